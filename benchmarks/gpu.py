"""Clients per second on a GPU, for 1, 2, 4 and 8 processes that share it.

A client is that of the floor: FedAvg's gradient steps and evaluations in the setting of benchmark (a), with no
federation around them. How many clients at a time pay differs from one GPU to the next.
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
    """What was measured with some processes on the GPU.

    Attributes
    ----------
    times : seconds of a round, `server_round`.   clients : of a round.
    """

    workers: int
    clients: int
    times: Times

    @property
    def per_second(self) -> float:
        """Clients per second."""
        return self.clients / self.times.median("round")


def measure(folder: Path, data: Path | None, scale: Scale, workers: Sequence[int] = WORKERS) -> list[Shared]:
    """Time rounds for each number of processes."""
    data = data or random_images(folder / "data", scale.images)
    config = configuration(data, folder / "run", scale, method="fedavg")
    found = []
    for count in workers:
        with Floor(config, count) as floor:
            found.append(Shared(count, scale.clients, alternate({"round": floor.round}, scale.repeats)))
    return found
