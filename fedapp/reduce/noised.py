"""Reductions of statistics with noise (`dp = example`): they add up, and the nearest possible ones are used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedapp.core.gaussian import ClassMoments, MomentsPool, pack, unpack
from fedapp.core.names import under
from fedapp.core.privacy import Joint, Squares, projected
from fedapp.core.sums import capped_sums
from fedapp.method import Arrays, Reduction, Reply, ServerContext, ServerState
from fedapp.reduce.spec import LABELS, ClassRows, Float64, Gaussians, Reducer, Rows, Total, Totals


@dataclass(frozen=True)
class Noised(Reduction):
    """A reduction whose clients send noised counts, sums and second moments of all classes in a run with noise.

    Attributes
    ----------
    plain : the same without noise.   prefix : beginning of the names of the arrays.
    moments : which second moments, see `Joint`.
    """

    plain: Rows | Total | Gaussians
    prefix: str
    moments: Squares = "none"

    def joint(self, context: ServerContext) -> Joint:
        """Return the form of a client's release."""
        return Joint(context.num_classes, context.width, self.moments)

    def form(self, context: ServerContext, state: ServerState) -> Arrays:
        """Return a reply of a client without samples."""
        return {self.prefix + name: np.zeros(shape) for name, shape in self.joint(context).shapes.items()}

    def problem(self, context: ServerContext, reply: Reply, form: Arrays) -> str | None:
        """Return why arrays are not noised statistics, or None."""
        return self.joint(context).problem_of(under(self.prefix, reply.arrays))


def noised(reduction: Reduction) -> Reduction:
    """Return the form with noise of a reduction; where there is none, the reduction itself."""
    if isinstance(reduction, Rows) and reduction.noised:
        return Noised(reduction, reduction.noised)
    if isinstance(reduction, Total) and reduction.moments is not None:
        return Noised(reduction, reduction.prefix, reduction.moments)
    if isinstance(reduction, Gaussians):
        return Noised(reduction, reduction.prefix, "classes")
    return reduction


class NoisedSums(Reducer):
    """Noised statistics of all clients added up, and the nearest that are possible.

    Parameters
    ----------
    cap : largest length of a client's statistics as a multiple of the median; 0 = no limit.
    noise : gives the deviation of the noise of one client, as a multiple of the sensitivity.
    """

    def __init__(self, spec: Noised, context: ServerContext, cap: float, noise: Callable[[], float]) -> None:
        self.spec, self.context, self.cap, self.noise = spec, context, cap, noise
        self.joint = spec.joint(context)
        self._replies: list[Reply] = []
        self._kept: list[Arrays] = []
        self._total: dict[str, Any] = {}

    def add(self, reply: Reply) -> None:
        """Add the statistics of a reply; with a cap all are kept until the last one."""
        self._replies.append(dataclasses.replace(reply, arrays={}))
        arrays = under(self.spec.prefix, reply.arrays)
        if self.cap:
            self._kept.append(arrays)
        else:
            self._add(arrays)

    def _add(self, arrays: Arrays) -> None:
        self._total = {n: self._total.get(n, 0.0) + a for n, a in arrays.items()}

    def projected(self) -> tuple[Float64, Float64, Float64 | None]:
        """Return counts (C,), sums (C, d) and second moments of all clients.

        A scatter of all classes has no direction with less than the size of the noise on it: where there is only
        noise, less would be taken for knowledge.
        """
        for arrays in capped_sums(self._kept, [self.joint.length(a) for a in self._kept], self.cap):
            self._add(arrays)
        total, square, floor, d = self._total, None, 0.0, self.joint.width
        if self.spec.moments != "none":
            square = unpack(total["square"], d)
        if self.spec.moments == "all":
            clients = sum(len(reply.singles) for reply in self._replies)
            floor = self.joint.deviations(self.noise())["square"] * float(np.sqrt(clients * d))
        return projected(total["count"], total["sum"], square, floor=floor)


class PooledRows(NoisedSums):
    """The class means of all clients' noised sums, as the rows of one client: one client's are mostly noise.

    Means are of at least one image and no longer than an image's representation.
    """

    def result(self) -> list[ClassRows]:
        """Return one row for each class, or nothing without replies."""
        if not self._replies:
            return []
        plain = self.spec.plain
        assert isinstance(plain, Rows)
        count, sums, _ = self.projected()
        rows, labels = (sums / count[:, None]).astype(np.float32), np.arange(len(count))
        reply = dataclasses.replace(self._replies[-1], arrays={plain.rows: rows, LABELS: labels})
        return [ClassRows(reply, labels, rows.astype(np.float64))]


class NoisedTotals(NoisedSums):
    """Sums over clients from noised statistics."""

    def result(self) -> Totals:
        """Return the sums; without replies zeros."""
        plain = self.spec.plain
        assert isinstance(plain, Total) and plain.remade is not None
        if not self._replies:
            return Totals(plain.read(self.context, plain.arrays(self.context)), [])
        return Totals(plain.remade(*self.projected()), [])


class NoisedMoments(NoisedSums):
    """Gaussians from noised statistics: whole numbers of samples, with the means that belong to the others."""

    def result(self) -> ClassMoments:
        """Return the pooled Gaussians."""
        count, total, square = self.projected()
        assert square is not None
        whole = np.rint(count)
        ratio = (whole / count)[:, None]
        pool = MomentsPool(self.joint.classes, self.joint.width, "sums")
        pool.add({"count": whole.astype(np.int64), "sum": total * ratio, "square": pack(square) * ratio})
        return pool.moments()


NOISED_FORMS: dict[type[Reduction], type[NoisedSums]] = {
    Rows: PooledRows, Total: NoisedTotals, Gaussians: NoisedMoments,
}  # fmt: skip
"""Form with noise of each kind."""
