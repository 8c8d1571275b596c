"""Reductions in their robust forms: all replies are kept, and rules of `fedapp/core/robust.py` combine them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.core.robust import class_means
from fedapp.method import Array, Reply
from fedapp.reduce.plain import Labels, note_owner, weighted_rows
from fedapp.reduce.spec import ClassMean, ClassMeans, Float64, Reducer, note_weaker
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
        values, sent, self._weaker = class_means(self._rows, self.of, self.robust)
        return ClassMeans(values, sent, self._owned)
