"""Timing of alternatives in turns: if a machine's speed drifts, only times measured close together are comparable."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    """Seconds of the alternatives of one comparison; entry i of every list belongs to turn i."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Return the median seconds of an alternative."""
        return statistics.median(self.seconds[name])

    def ratio(self, slow: str, fast: str) -> float:
        """Return how many times as long `slow` takes as `fast`: the median over turns of the ratio within a turn."""
        return statistics.median(self.ratios(slow, fast))

    def ratios(self, slow: str, fast: str) -> list[float]:
        """Return the ratios of all turns in ascending order."""
        return sorted(a / b for a, b in zip(self.seconds[slow], self.seconds[fast], strict=True))


def alternate(alternatives: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 1) -> Times:
    """Call every alternative once per turn, in `warmup` turns that do not count and `repeats` turns that do.

    If an alternative returns a float, that is its time, because only a part of the call counts. Otherwise the whole
    call is timed. A call of more than a second is reported on standard error.
    """
    seconds: dict[str, list[float]] = {name: [] for name in alternatives}
    for turn in range(warmup + repeats):
        for name, call in alternatives.items():
            started = time.perf_counter()
            own = call()
            took = own if isinstance(own, float) else time.perf_counter() - started
            if turn >= warmup:
                seconds[name].append(took)
            if took > 1:
                where = f"turn {turn + 1 - warmup} of {repeats}" if turn >= warmup else "warm-up"
                sys.stderr.write(f"{where}: {name} {took:.3g} s\n")
    return Times(seconds)
