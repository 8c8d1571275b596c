"""Reductions in their plain form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fedapp.core.averages import RunningMean
from fedapp.core.robust import RobustMean
from fedapp.method import Array, Arrays, Reply
from fedapp.reduce.spec import Mean

TOGETHER = 8
"""Number of replies that are added to a mean in one pass."""


MEAN = Mean()


class MeanReducer:
    """The mean of the arrays named in `of`; without replies these arrays themselves.

    Replies are added in float32 as they arrive, a few at a time, because every pass reads and writes the mean. Memory
    is one model and `TOGETHER` replies for any number of clients. Another `mean` than the running one may keep all.
    """

    def __init__(self, of: Mapping[str, Array], mean: RunningMean | RobustMean, spec: Mean = MEAN) -> None:
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


def weighted_mean(
    replies: Iterable[Reply], previous: Mapping[str, Array], mean: RunningMean | RobustMean | None = None
) -> Arrays:
    """Return the mean over replies of the arrays named in `previous`, weighted by n_k; see `MeanReducer`."""
    found = MeanReducer(previous, RunningMean() if mean is None else mean)
    for reply in replies:
        found.add(reply)
    return found.result()
