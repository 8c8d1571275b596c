"""Reductions in their robust forms: all replies are kept, and rules of `fedapp/core/robust.py` combine them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.core.robust import class_means, screened_lars
from fedapp.method import Array, Reply
from fedapp.reduce.plain import Labels, PlainRows, note_owner, weighted_rows
from fedapp.reduce.spec import ClassMean, ClassMeans, ClassRows, Float64, Reducer, Rows, note_weaker
from fedapp.settings import RobustnessSettings


class RobustClassMeans(Reducer):
    """Means of single classes by the run's rules, class by class over its senders.

    Parameters
    ----------
    of : (C, d), from which changes are measured.
    """

    def __init__(self, spec: ClassMean, of: Array, robust: RobustnessSettings) -> None:
        self.spec, self.of, self.robust = spec, of, robust
        self._weaker: dict[int, str] = {}
        self._rows: list[tuple[Labels, Float64, Array]] = []
        self._owned: dict[int, npt.NDArray[np.int32]] = {}

    def add(self, reply: Reply) -> None:
        """Keep the rows of a reply."""
        labels, sums, weights = weighted_rows(self.spec, reply)
        rows = sums / weights[:, None] if self.spec.summed else reply.arrays[self.spec.rows]
        self._rows.append((labels, rows, weights))
        note_owner(self._owned, reply, labels)

    def note(self, noted: dict[str, Any]) -> None:
        """Note the rules that were used for classes with too few senders."""
        note_weaker(noted, self._weaker)

    def result(self) -> ClassMeans:
        """Return the means."""
        found = class_means(self._rows, self.of, self.robust)
        self._weaker = found.weaker
        return ClassMeans(found.values, found.sent, self._owned)


class ScreenedRows(PlainRows):
    """Rows of single classes with bounded norms, without those far from the other clients' of their class."""

    def __init__(self, spec: Rows) -> None:
        super().__init__(spec)
        self._left_out = 0

    def note(self, noted: dict[str, Any]) -> None:
        """Count the rows that were left out."""
        noted["left_out"] = noted.get("left_out", 0) + self._left_out

    def result(self) -> list[ClassRows]:
        """Return the rows that are left."""
        kept, rows = screened_lars([(of.labels, of.rows) for of in self._found])
        self._left_out = sum(int((~k).sum()) for k in kept)
        return [ClassRows(of.reply, of.labels[k], r[k]) for of, r, k in zip(self._found, rows, kept, strict=True)]
