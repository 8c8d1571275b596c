"""Reductions in their plain form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedapp.core.averages import RunningMean
from fedapp.core.robust import RobustMean
from fedapp.method import Array, Arrays, Reply
from fedapp.reduce.spec import LABELS, ClassMean, ClassMeans, ClassRows, Float64, Mean, Rows

Labels: TypeAlias = npt.NDArray[np.integer[Any]]

TOGETHER = 8
"""Number of replies that are added to a mean in one pass."""


class MeanReducer:
    """The mean of the arrays named in `of`; without replies these arrays themselves.

    Replies are added in float32 as they arrive, a few at a time, because every pass reads and writes the mean. Memory
    is one model and `TOGETHER` replies for any number of clients. Another `mean` than the running one may keep all.
    """

    def __init__(self, of: Mapping[str, Array], mean: RunningMean | RobustMean, spec: Mean) -> None:
        self.of, self.spec = dict(of), spec
        self._mean = mean
        self._waiting: list[tuple[Arrays, float]] = []

    def add(self, reply: Reply) -> None:
        """Add the arrays of a reply with its weight."""
        arrays = self.spec.read(reply.arrays, self.of) if self.spec.read else reply.arrays
        weight = float(reply.num_samples) if self.spec.weights == "samples" else 1.0
        self._waiting.append(({n: arrays[n] for n in self.of}, weight))
        if len(self._waiting) == TOGETHER:
            self._add_waiting()

    def note(self, noted: dict[str, Any]) -> None:
        """Note nothing: there are no rules."""

    def result(self) -> Arrays:
        """Return the mean; afterwards nothing can be added."""
        self._add_waiting()
        return self._mean.mean() if self._mean.replies else self.of

    def _add_waiting(self) -> None:
        self._mean.add_many(self._waiting)
        self._waiting = []


class PlainClassMeans:
    """Means of single classes: a running sum in float64 in the order of the replies, and one division."""

    def __init__(self, spec: ClassMean, shape: tuple[int, ...]) -> None:
        self.spec = spec
        self._sums, self._weights = np.zeros(shape), np.zeros(shape[0])
        self._owned: dict[int, npt.NDArray[np.int32]] = {}

    def note(self, noted: dict[str, Any]) -> None:
        """Note nothing: there are no rules."""

    def add(self, reply: Reply) -> None:
        """Add the rows of a reply."""
        labels, rows, weights = weighted_rows(self.spec, reply)
        # A check made sure that no label comes twice: fancy indexing would add only one of its rows.
        self._sums[labels] += rows
        self._weights[labels] += weights
        note_owner(self._owned, reply, labels)

    def result(self) -> ClassMeans:
        """Return the means."""
        seen = self._weights > 0
        self._sums[seen] /= self._weights[seen, None]
        return ClassMeans(self._sums, seen, self._owned)


class PlainRows:
    """Rows of single classes as they came."""

    def __init__(self, spec: Rows) -> None:
        self.spec = spec
        self._found: list[ClassRows] = []

    def note(self, noted: dict[str, Any]) -> None:
        """Note nothing: there are no rules."""

    def add(self, reply: Reply) -> None:
        """Keep the rows of a reply, in the order of their classes."""
        labels, rows = reply.arrays[LABELS], reply.arrays[self.spec.rows]
        order = np.argsort(labels)
        self._found.append(ClassRows(reply, labels[order].astype(np.int64), rows[order].astype(np.float64)))

    def result(self) -> list[ClassRows]:
        """Return the rows of all clients."""
        return self._found


def weighted_rows(spec: ClassMean, reply: Reply) -> tuple[Labels, Float64, Array]:
    """Return the classes of a reply (S,), the sum of each, in float64 (S, d), and the weights (S,)."""
    arrays = reply.arrays
    if spec.summed:
        labels = np.flatnonzero(arrays[spec.counts])
        return labels, arrays[spec.rows][labels].astype(np.float64), arrays[spec.counts][labels]
    labels = arrays[LABELS]
    weights = arrays[spec.counts] if spec.counts else np.ones(len(labels))
    return labels, weights[:, None] * arrays[spec.rows].astype(np.float64), weights


def note_owner(owned: dict[int, npt.NDArray[np.int32]], reply: Reply, labels: Labels) -> None:
    """Note which classes a client has, unless the reply stands for those of several."""
    if not reply.members:
        owned[reply.client] = np.sort(labels).astype(np.int32)
