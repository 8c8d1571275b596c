"""Clients per second on a GPU, for 1, 2, 4 and 8 processes that share it.

A client is that of the floor: FedAvg's gradient steps and evaluations in the setting of benchmark (a), without a
federation. The best number of clients at a time depends on the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.floor import Floor
from benchmarks.rounds import Scale, configuration, random_images
from benchmarks.timing import alternate

WORKERS = (1, 2, 4, 8)


def measure(folder: Path, data: Path | None, scale: Scale, workers: Sequence[int] = WORKERS) -> dict[int, list[float]]:
    """Return the clients per second in every counted round, by the number of processes."""
    data = data or random_images(folder / "data", scale.images)
    config = configuration(data, folder / "run", scale, method="fedavg")
    found = {}
    for count in workers:
        with Floor(config, count) as floor:
            seconds = alternate({"round": floor.round}, scale.repeats).seconds["round"]
        found[count] = [scale.clients / s for s in seconds]
    return found
