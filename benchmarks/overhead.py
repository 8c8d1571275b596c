"""Benchmark (b): the cost of a round when the clients have almost nothing to do, by payload and number of clients.

Every client has four training images and one test image of 8 x 8 pixels, for which the small CNN needs milliseconds.
The head and a block of zeros travel; the client keeps the rest of its model on disk. The seconds from the end of one
round to the end of the next are therefore the engine's: messages, storing and loading arrays and client states, Ray,
evaluation calls, averaging, checkpoint and result files.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import strategies
from benchmarks import clients, padded
from benchmarks.rounds import between_rounds, submit
from fedapp import registry, server_app
from fedapp.client_app import app as client_app
from fedapp.engines import superlink as launch
from fedapp.engines.control import stage
from fedapp.process import high_water
from fedapp.transport.local_grid import LocalGrid
from fedapp.transport.virtual import hosts

HEAD = 650
"""Parameters of the head: 64 features, 10 classes, weights and biases."""
SIZES = {"20kb": 20_000, "4mb": 4_000_000, "45mb": 45_000_000}


@dataclass(frozen=True)
class Case:
    """One payload, one number of clients.

    Attributes
    ----------
    size : key of `SIZES`.   clients : number of clients.   sample : number of them that take part in a round.
    """

    size: str
    clients: int
    sample: int
    rounds: int = 6

    @property
    def key(self) -> str:
        """Return the name in performance.json."""
        some = f"_sample_{self.sample}" if self.sample < self.clients else f"x{self.size}"
        rest = "" if self.sample == self.clients or self.size == "20kb" else f"_{self.size}"
        return f"overhead_{self.clients}{some}{rest}_seconds"


CASES = [
    Case("20kb", 20, 20), Case("4mb", 20, 20), Case("45mb", 20, 20, 4),
    Case("20kb", 100, 100), Case("4mb", 100, 100, 4), Case("45mb", 100, 100, 3),
    Case("20kb", 1000, 100), Case("4mb", 1000, 100, 4), Case("45mb", 1000, 100, 3),
]  # fmt: skip
SMALL = [Case("20kb", 4, 4, 3), Case("20kb", 8, 4, 3)]


def configuration(case: Case, data: Path, out: Path) -> dict[str, Any]:
    """Return the flat run-config of a case."""
    values = {"method": "fedavg", "protocols": "received,trained", "augment": "none"}
    flat = clients.configuration(data, out, case.clients, case.sample, case.rounds, **values)
    return {**flat, "method": "padded", "method-args": f"numbers={SIZES[case.size] // 4 - HEAD}"}


class _Enough(Exception):
    """The last counted round is over; the rest of the run is not measured."""


def ray_rounds(app: Path, case: Case, flat: Mapping[str, Any], out: Path) -> tuple[list[float], int]:
    """Run under Ray until the last round has ended; return the seconds of the counted rounds and the peak memory."""
    peak = 0

    def stop_after_last(event: Mapping[str, Any]) -> None:
        nonlocal peak
        if event["kind"] == "round" and event["round"] == case.rounds:
            # Peaks of processes since they began: pages that they share count in each.
            peak = sum(high_water(p.pid) or 0 for p in session._processes.alive())
            raise _Enough

    with contextlib.suppress(_Enough), launch.Session(app=app) as session:
        outcome = submit(session, flat).follow(stop_after_last, poll=0.5)
        raise RuntimeError(f"{case.key} failed: {outcome.status} {outcome.error} {outcome.log_tail}")
    return between_rounds(out), peak


def local_rounds(app: Path, flat: Mapping[str, Any], out: Path) -> tuple[list[float], int]:
    """Run in this process; the peak memory is 0, because that of this process includes more than the run."""
    strategies.__path__.append(str(app / "strategies"))
    registry.forget()
    try:
        server_app.serve(
            LocalGrid(client_app, dict(flat), hosts(int(flat["clients"]), bool(flat.get("secure-sum")))), dict(flat)
        )
    finally:
        strategies.__path__.pop()
        registry.forget()
    return between_rounds(out), 0


def measure(folder: Path, cases: list[Case], ray: bool) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Return the seconds of every counted round, and the peak memory in bytes, by key."""
    app = stage(folder / "app")
    shutil.copy(Path(padded.__file__), app / "strategies" / "padded.py")
    found: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    for case in cases:
        out = folder / "out"
        data = clients.images(folder / case.key, case.clients, (4, 1))
        flat = configuration(case, data, out)
        found[case.key], peaks[case.key] = ray_rounds(app, case, flat, out) if ray else local_rounds(app, flat, out)
        sys.stderr.write(f"{case.key} {statistics.median(found[case.key]):.3g} s a round\n")
        shutil.rmtree(out)
        time.sleep(1.0 if ray else 0.0)
    return found, peaks
