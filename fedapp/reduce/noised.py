"""Reductions of statistics with noise (`dp = example`): they add up, and the nearest possible ones are used."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedapp.core.names import under
from fedapp.core.privacy import Joint, projected
from fedapp.core.sums import capped_sums
from fedapp.method import Arrays, Reduction, Reply, ServerContext, ServerState
from fedapp.reduce.spec import LABELS, ClassRows, Rows


@dataclass(frozen=True)
class NoisedRows(Reduction):
    """`Rows` whose clients send noised counts and sums of all classes."""

    plain: Rows

    def joint(self, context: ServerContext) -> Joint:
        """Return the form of what a client releases."""
        return Joint(context.num_classes, context.width)

    def form(self, context: ServerContext, state: ServerState) -> Arrays:
        """Return a reply."""
        return {self.plain.noised + name: np.zeros(shape) for name, shape in self.joint(context).shapes.items()}

    def problem(self, arrays: Arrays, form: Arrays, num_samples: int) -> str | None:
        """Return why arrays are no noised counts and sums, or None."""
        classes, width = form[f"{self.plain.noised}sum"].shape
        return Joint(classes, width).problem_of(under(self.plain.noised, arrays))


class PooledRows:
    """The class means of all clients' noised sums, as the rows of one client: one client's are mostly noise.

    Means are of at least one image and no longer than an image's representation.

    Parameters
    ----------
    cap : largest length of a client's statistics as a multiple of the median; 0 = no limit.
    """

    def __init__(self, spec: NoisedRows, context: ServerContext, cap: float) -> None:
        self.spec, self.cap, self.joint = spec, cap, spec.joint(context)
        self._replies: list[Reply] = []

    def note(self, noted: dict[str, Any]) -> None:
        """Note nothing: there are no rules."""

    def add(self, reply: Reply) -> None:
        """Keep a reply."""
        self._replies.append(reply)

    def result(self) -> list[ClassRows]:
        """Return one row for each class, or nothing without replies."""
        if not self._replies:
            return []
        found = [under(self.spec.plain.noised, reply.arrays) for reply in self._replies]
        total: dict[str, Any] = {}
        for arrays in capped_sums(found, [self.joint.length(a) for a in found], self.cap):
            total = {n: total.get(n, 0.0) + a for n, a in arrays.items()}
        count, sums, _ = projected(total["count"], total["sum"])
        rows, labels = (sums / count[:, None]).astype(np.float32), np.arange(len(count))
        reply = dataclasses.replace(self._replies[-1], arrays={self.spec.plain.rows: rows, LABELS: labels})
        return [ClassRows(reply, labels, rows.astype(np.float64))]
