"""How cost grows with the number of clients when as many take part in a round: start, round, last scores, memory.

`python -m benchmarks.clients` runs LG-FedAvg, whose clients keep a model of their own on disk, with 100 clients a round
on images of 8 x 8 pixels, 7 to train on and one to test on for each client.
It prints a table of wall-clock seconds and, in brackets, processor seconds of all processes, which a busy machine
changes less.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import psutil
import typer

from benchmarks import memory
from benchmarks.pages import markdown
from benchmarks.rounds import submit
from fedapp.config import from_flat
from fedapp.engines import local as engine
from fedapp.engines import superlink as launch

IMAGES = (7, 1)
"""Images of each client, to train on and to test on."""
A_ROUND = 100
"""Clients of a round."""


@dataclass(frozen=True)
class Point:
    """One run.

    Attributes
    ----------
    start, round, final : wall-clock seconds from the submission to round 1, of a round (median without the first), and
        from the last round to the end.
    start_cpu, round_cpu, final_cpu : processor seconds of all processes in the same times.
    early, late : bytes of memory after the second and after the last round.   peak : the largest.
    """

    engine: str
    clients: int
    a_round: int
    rounds: int
    start: float
    round: float
    final: float
    start_cpu: float
    round_cpu: float
    final_cpu: float
    early: int
    late: int
    peak: int


def images(folder: Path, clients: int, each: tuple[int, int]) -> Path:
    """Write 8 x 8 pixels of a pattern for each class and noise: `each` client's images to train and test on."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    number = sum(each) * clients
    y = np.arange(number) % 10
    noise = rng.integers(-60, 61, (number, 8, 8, 1), dtype=np.int16)
    x = np.clip(rng.integers(0, 256, (10, 8, 8, 1), dtype=np.int16)[y] + noise, 0, 255).astype(np.uint8)
    cut = each[0] * clients
    np.savez(folder / "images.npz", x_train=x[:cut], y_train=y[:cut], x_test=x[cut:], y_test=y[cut:])
    return folder


def configuration(data: Path, out: Path, clients: int, a_round: int, rounds: int, **values: Any) -> dict[str, Any]:
    """Return the flat run-config of a point."""
    common = {
        "method": "lgfedavg", "dataset": "npz", "data-dir": str(data), "model": "digits-c", "clients": clients,
        "fraction-train": min(1.0, a_round / clients), "partition": "iid", "min-samples": 1, "batch-size": 4,
        "local-epochs": 1, "num-server-rounds": rounds,
    }  # fmt: skip
    return engine.prepare({**common, **values}, out).to_flat()


class Marks:
    """Notes time, processor seconds and memory at the events of a run.

    Parameters
    ----------
    processes : finds the processes of the run.
    """

    def __init__(self, processes: Callable[[], Iterable[psutil.Process]]) -> None:
        self._processes = processes
        self._used: dict[int, float] = {}  # of processes that have ended too
        self.seen: dict[str, list[tuple[float, float, int]]] = {}
        self.note("begin", time.time())

    def processes(self) -> list[psutil.Process]:
        """Return the processes that run now, and note their processor seconds."""
        found = list(self._processes())
        for process in found:
            with contextlib.suppress(psutil.Error):
                used = process.cpu_times()
                self._used[process.pid] = max(self._used.get(process.pid, 0.0), used.user + used.system)
        return found

    def note(self, kind: str, moment: float) -> None:
        """Note what has been used up to this moment."""
        held = 0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                held += process.memory_full_info().pss
        self.seen.setdefault(kind, []).append((moment, sum(self._used.values()), held))

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Note an event."""
        if event["kind"] in ("start", "round", "end"):
            self.note(str(event["kind"]), float(event.get("time", time.time())))

    def point(self, name: str, flat: Mapping[str, Any], a_round: int, peak: int) -> Point:
        """Return the run's figures."""
        rounds, [begin], [start], [end] = self.seen["round"], self.seen["begin"], self.seen["start"], self.seen["end"]
        walls = [b[0] - a[0] for a, b in itertools.pairwise(rounds)]
        cpus = [b[1] - a[1] for a, b in itertools.pairwise(rounds)]
        return Point(
            name, int(flat["clients"]), a_round, len(rounds), start[0] - begin[0], statistics.median(walls),
            end[0] - rounds[-1][0], start[1] - begin[1], statistics.fmean(cpus), end[1] - rounds[-1][1], rounds[1][2],
            rounds[-1][2], max(peak, *(held for found in self.seen.values() for _, _, held in found)),
        )  # fmt: skip


def measure(folder: Path, name: str, clients: int, a_round: int, rounds: int) -> Point:
    """Run one point; `name` is `ray` or `local`."""
    out = folder / "out"
    data = images(folder / "data", clients, IMAGES)
    flat = configuration(data, out, clients, a_round, rounds)
    if name == "local":
        marks = Marks(lambda: [psutil.Process()])
        engine.run_local(from_flat(flat), marks)
        return marks.point(name, flat, a_round, 0)
    with launch.Session() as session:
        marks = Marks(session._processes.alive)
        handle = submit(session, flat)
        with memory.Watch(marks.processes, 2.0) as watch:
            outcome = handle.follow(marks)
    if not outcome.ok:
        raise RuntimeError(f"{clients} clients under Ray failed: {outcome.status} {outcome.error} {outcome.log_tail}")
    return marks.point(name, flat, a_round, watch.peak)


def table(p: Point) -> str:
    """Return the figures of a run as a table of Markdown."""
    cells = [f"{wall:.2f} ({cpu:.2f})" for wall, cpu in
             ((p.start, p.start_cpu), (p.round, p.round_cpu), (p.final, p.final_cpu))]  # fmt: skip
    share = f"{p.final_cpu / (10 * p.round_cpu):.2f}" if p.round_cpu else "-"
    held = f"{p.early / 1e6:,.0f} to {p.late / 1e6:,.0f}, {p.peak / 1e6:,.0f}"
    heads = "engine|clients:|a round:|start s:|round s:|last scores s:|over ten rounds:|memory MB, peak:"
    return "\n".join(markdown(heads, [(p.engine, f"{p.clients:,}", p.a_round, *cells, share, held)]))


def main(
    engine: Literal["ray", "local"] = "ray",
    clients: Annotated[str, typer.Option(help="numbers of clients")] = "100,1000,10000",
    rounds: Annotated[int, typer.Option(help="number of rounds; the first is not counted")] = 6,
) -> None:
    """Measure each number of clients in a folder of its own, and print its table."""
    for count in map(int, clients.split(",")):
        with tempfile.TemporaryDirectory(prefix="fedapp-bench-") as folder:
            print(table(measure(Path(folder), engine, count, min(count, A_ROUND), rounds)), flush=True)


if __name__ == "__main__":
    typer.run(main)
