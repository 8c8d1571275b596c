"""Clients per second on a GPU, for 1, 2, 4 and 8 processes that share it.

A client is that of the floor: FedAvg's gradient steps and evaluations in the setting of benchmark (a), without a
federation. The best number of clients at a time depends on the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.floor import Floor
from benchmarks.rounds import Scale, configuration, random_images
from benchmarks.timing import Times, alternate

WORKERS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Shared:
    """What was measured with one number of processes on the GPU.

    Attributes
    ----------
    workers : number of processes.   clients : clients per round.   times : seconds per round, under the name `round`.
    """

    workers: int
    clients: int
    times: Times

    @property
    def per_second(self) -> float:
        """Return the clients per second."""
        return self.clients / self.times.median("round")


def measure(folder: Path, data: Path | None, scale: Scale, workers: Sequence[int] = WORKERS) -> list[Shared]:
    """Measure rounds for each number of processes."""
    data = data or random_images(folder / "data", scale.images)
    config = configuration(data, folder / "run", scale, method="fedavg")
    found = []
    for count in workers:
        with Floor(config, count) as floor:
            found.append(Shared(count, scale.clients, alternate({"round": floor.round}, scale.repeats)))
    return found
