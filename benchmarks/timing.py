"""Timing of alternatives in turn: on a machine whose speed drifts, only what was measured side by side compares."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    """Seconds of the alternatives of one comparison; index i of all lists belongs to the same turn."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Median seconds of an alternative."""
        return statistics.median(self.seconds[name])

    def ratio(self, slow: str, fast: str) -> float:
        """How many times longer `slow` takes than `fast`: the median over turns of the ratio within a turn."""
        return statistics.median(self.ratios(slow, fast))

    def ratios(self, slow: str, fast: str) -> list[float]:
        """The ratio of every turn, ascending."""
        return sorted(a / b for a, b in zip(self.seconds[slow], self.seconds[fast], strict=True))


def alternate(alternatives: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 1) -> Times:
    """Call every alternative once a turn, `warmup` turns uncounted and `repeats` counted.

    An alternative that returns a float has measured itself (a whole process, of which only a part counts); otherwise
    the call is timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in alternatives}
    for turn in range(warmup + repeats):
        for name, call in alternatives.items():
            started = time.perf_counter()
            own = call()
            took = own if isinstance(own, float) else time.perf_counter() - started
            if turn >= warmup:
                seconds[name].append(took)
    return Times(seconds)
