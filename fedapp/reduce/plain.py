"""Reductions in their plain form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedapp.core.averages import RunningMean
from fedapp.core.gaussian import ClassMoments, MomentsPool
from fedapp.core.names import under
from fedapp.core.robust import RobustMean, capped_statistics
from fedapp.core.sums import capped_losses, capped_sums
from fedapp.method import Array, Arrays, Reply, ServerContext, ServerState
from fedapp.reduce.spec import (
    LABELS,
    ClassMean,
    ClassMeans,
    ClassRows,
    Float64,
    Gaussians,
    Mean,
    Reducer,
    Rows,
    Total,
    Totals,
)

Labels: TypeAlias = npt.NDArray[np.integer[Any]]

TOGETHER = 8
"""Number of replies that are added to a mean in one pass."""


class MeanReducer(Reducer):
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

    def result(self) -> Arrays:
        """Return the mean; afterwards nothing can be added."""
        self._add_waiting()
        return self._mean.mean() if self._mean.replies else self.of

    def _add_waiting(self) -> None:
        self._mean.add_many(self._waiting)
        self._waiting = []


class PlainClassMeans(Reducer):
    """Means of single classes: a running sum in float64 in the order of the replies, and one division."""

    def __init__(self, spec: ClassMean, shape: tuple[int, ...]) -> None:
        self.spec = spec
        self._sums, self._weights = np.zeros(shape), np.zeros(shape[0])
        self._owned: dict[int, npt.NDArray[np.int32]] = {}

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


class PlainRows(Reducer):
    """Rows of single classes as they came."""

    def __init__(self, spec: Rows) -> None:
        self.spec = spec
        self._found: list[ClassRows] = []

    def add(self, reply: Reply) -> None:
        """Keep the rows of a reply, in the order of their classes."""
        labels, rows = reply.arrays[LABELS], reply.arrays[self.spec.rows]
        order = np.argsort(labels)
        self._found.append(ClassRows(reply, labels[order].astype(np.int64), rows[order].astype(np.float64)))

    def result(self) -> list[ClassRows]:
        """Return the rows of all clients."""
        return self._found


class PlainTotals(Reducer):
    """Sums over clients, as replies arrive; with a cap all replies are kept until the last one.

    Parameters
    ----------
    cap : most samples behind a client's sums as a multiple of the median; 0 = no limit.
    """

    def __init__(self, spec: Total, context: ServerContext, cap: float) -> None:
        self.spec, self.context, self.cap = spec, context, cap
        self._sums = {name: np.zeros(array.shape) for name, array in spec.arrays(context).items()}
        self._kept: list[Arrays] = []

    def add(self, reply: Reply) -> None:
        """Add the sums of a reply."""
        arrays = under(self.spec.prefix, reply.arrays)
        if self.cap or self.spec.apart:
            self._kept.append(arrays)
        if not self.cap:
            self._add(arrays)

    def result(self) -> Totals:
        """Return the sums."""
        if self.cap:
            self._kept = self._capped()
            for arrays in self._kept:
                self._add(arrays)
        return Totals(self.spec.read(self.context, self._sums), self._kept)

    def _add(self, arrays: Arrays) -> None:
        for name, array in arrays.items():
            self._sums[name] += array

    def _capped(self) -> list[Arrays]:
        if self.spec.samples:
            return capped_sums(self._kept, [self.spec.samples(arrays) for arrays in self._kept], self.cap)
        # A loss has no bound of its own: one client's could exclude any factor.
        return [{"loss": loss} for loss in capped_losses([arrays["loss"] for arrays in self._kept], self.cap)]


class PlainMoments(Reducer):
    """Gaussians of all clients, pooled as replies arrive; with a cap all replies are kept until the last one.

    Parameters
    ----------
    cap : most samples of a client as a multiple of the median; 0 = no limit.
    """

    def __init__(self, spec: Gaussians, context: ServerContext, state: ServerState, cap: float = 0.0) -> None:
        self.spec, self.context, self.cap = spec, context, cap
        self._centres = state.get(spec.centres)
        self._kept: list[Arrays] = []
        self._pool = self._empty()

    def add(self, reply: Reply) -> None:
        """Add the statistics of a reply."""
        arrays = under(self.spec.prefix, reply.arrays)
        if self.cap:
            self._kept.append(arrays)
        else:
            self._pool.add(arrays)

    def result(self) -> ClassMoments:
        """Return the pooled Gaussians."""
        for arrays in capped_statistics(self._kept, self.cap):
            self._pool.add(arrays)
        return self._pool.moments()

    def _empty(self) -> MomentsPool:
        return MomentsPool(self.context.num_classes, self.context.width, self.spec.cov, self._centres)


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
