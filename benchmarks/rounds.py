"""Benchmark (a): a round of FedAvg and of cwFedAvg against the reference loop and against the bare floor.

The setting is CIFAR-10's 60,000 images pooled, 75 / 25 per client, 20 clients, Dirichlet 0.1, `cnn`, batch 10 and one
local epoch. A round then has about 45,000 training samples. Each client is scored before and after its training. The
reference loop, the floor and the app run in turns. A turn of the app is a whole run, whose first round does not count.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import multiprocessing
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import memory
from benchmarks.floor import floor_processes
from benchmarks.reference import Reference
from benchmarks.timing import Times, alternate
from fedapp import process
from fedapp.config import RunConfig
from fedapp.engines import local as engine
from fedapp.engines import superlink as launch
from fedapp.engines.resources import choose_resources
from fedapp.tasks.simulated import bf16_works
from fedapp.transport.virtual import hosts

LAM = 10.0
"""cwFedAvg's factor of the regulariser for 10 classes."""


@dataclass(frozen=True)
class Scale:
    """The size of the benchmark; the small form is for tests.

    Attributes
    ----------
    images : size of the pooled data set.   rounds : rounds of a turn's run; the first does not count.
    workers : processes that train in parallel.   ray : under Ray, else in this process.
    """

    images: int = 60_000
    clients: int = 20
    rounds: int = 3
    repeats: int = 3
    workers: int = 2
    ray: bool = True


SMALL = Scale(images=360, clients=4, rounds=2, repeats=2, workers=1, ray=False)


def random_images(folder: Path, count: int) -> Path:
    """Write random arrays with CIFAR-10's shapes, in place of real data: the arithmetic takes just as long."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    test = count // 6
    np.savez(
        folder / "cifar10.npz",
        x_train=rng.integers(0, 256, (count - test, 32, 32, 3), dtype=np.uint8),
        y_train=np.arange(count - test) % 10,
        x_test=rng.integers(0, 256, (test, 32, 32, 3), dtype=np.uint8),
        y_test=np.arange(test) % 10,
    )
    return folder


def configuration(data: Path, out: Path, scale: Scale, **values: Any) -> RunConfig:
    """Return the common setting of all alternatives, with changes."""
    common = {
        "dataset": "cifar10", "data-dir": str(data), "clients": scale.clients, "partition": "dirichlet", "alpha": 0.1,
        "split": "merged", "model": "cnn", "batch-size": 10, "local-epochs": 1, "lr": 0.005, "momentum": 0.0,
        "num-server-rounds": scale.rounds, "min-samples": 40 if scale.images >= 60_000 else 10,
    }  # fmt: skip
    return engine.prepare({**common, **values}, out)


def between_rounds(out: Path) -> list[float]:
    """Return the seconds from the end of each round to the end of the next, including all work of the server."""
    events = [json.loads(line) for line in (out / "progress.jsonl").read_text(encoding="utf-8").splitlines()]
    ends = [float(e["time"]) for e in events if e["kind"] == "round"]
    return [b - a for a, b in itertools.pairwise(ends)]


def submit(session: launch.Session, flat: Mapping[str, Any]) -> launch.RunHandle:
    """Submit a run with the resources that `fedapp run` chooses by default."""
    resources = choose_resources(int(flat["clients"]))
    return session.submit(
        flat, num_supernodes=hosts(int(flat["clients"]), bool(flat.get("secure-sum"))),
        client_cpus=resources.client_cpus, client_gpus=resources.client_gpus, total_cpus=resources.total_cpus,
    )  # fmt: skip


class Visits:
    """Turns of the app: each is a run in a new folder, under Ray with as many workers as the machine has cores.

    Attributes
    ----------
    peak : memory of all processes in bytes, of `warm_up`, which is not timed: watching takes time.
    """

    def __init__(self, data: Path, folder: Path, scale: Scale, **values: Any) -> None:
        self.configuration = partial(configuration, data, folder, scale, **values)
        self.folder, self.ray, self.peak = folder, scale.ray, 0

    def __call__(self) -> float:
        """Run one turn and return the mean seconds of its counted rounds."""
        self._run()
        return statistics.fmean(between_rounds(self.folder))

    def warm_up(self) -> None:
        """Make a run of two rounds, of which only the memory counts."""
        self._run(num_server_rounds=2)

    def _run(self, **changes: Any) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)  # first: a configuration refuses a folder that is in use
        config = self.configuration().replaced(**changes)
        if self.ray:
            self._run_under_ray(config)
        else:
            engine.run_local(config)

    def _run_under_ray(self, config: RunConfig) -> None:
        with launch.Session() as session:
            handle = submit(session, config.to_flat())
            watch = memory.Watch(session._processes.alive)
            with contextlib.nullcontext() if self.peak else watch:
                outcome = handle.follow(lambda event: None, poll=1.0)
            self.peak = self.peak or watch.peak
        if not outcome.ok:
            raise RuntimeError(f"the benchmark's run failed: {outcome.status} {outcome.error} {outcome.log_tail}")


GPU_WORKERS = (1, 2, 4, 8)


def clients_per_second(folder: Path, data: Path | None, scale: Scale, workers: Sequence[int]) -> dict[int, list[float]]:
    """Return the floor's clients per second in every counted round, by the number of processes that share a GPU.

    The best number of clients at a time depends on the GPU.
    """
    data = data or random_images(folder / "data", scale.images)
    config = configuration(data, folder / "run", scale, method="fedavg")
    found = {}
    for count in workers:
        with floor_processes(config, count) as (_, floor):
            seconds = alternate({"round": floor}, scale.repeats).seconds["round"]
        found[count] = [scale.clients / s for s in seconds]
    return found


_reference = functools.cache(Reference)


def _reference_round(*args: Any) -> float:
    return _reference(*args).round()


@contextlib.contextmanager
def reference_process(*args: Any) -> Iterator[tuple[list[int], Callable[[], float]]]:
    """Keep the reference loop in a separate process, with as many threads as the app has workers.

    Yields
    ------
    The ids of its processes, and what runs one round and returns its seconds.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:

        def run() -> float:
            return pool.submit(_reference_round, *args).result()

        run()  # not counted: the first round waits for the files to be written
        yield list(pool._processes), run


def measure(folder: Path, data: Path | None, scale: Scale) -> tuple[Times, dict[str, int]]:
    """Run the alternatives in turns; return the seconds per round and the peak memory in bytes by alternative.

    A processor without fast bfloat16 leaves out the app in bf16, which refuses to run there.
    """
    process.prepare(1)
    data = data or random_images(folder / "data", scale.images)

    classwise = {"method": "cwfedavg", "method-args": f"layers=all wdr=authors lam={LAM}"}
    app = {
        "fedavg": Visits(data, folder / "fedavg", scale, method="fedavg"),
        "cwfedavg": Visits(data, folder / "cwfedavg", scale, **classwise),
    }
    if bf16_works():
        app["fedavg_bf16"] = Visits(data, folder / "fedavg-bf16", scale, method="fedavg", precision="bf16")
    config = configuration(data, folder / "reference", scale, method="fedavg")
    peak: dict[str, int] = {}
    with (
        reference_process(config, folder / "files", scale.workers, None) as fedavg,
        reference_process(config, folder / "files-classwise", scale.workers, LAM) as cwfedavg,
        floor_processes(config, scale.workers) as bare,
    ):
        floor = bare[1]
        named = {"reference_fedavg": fedavg, "reference_cwfedavg": cwfedavg, "floor": bare}
        for name, (pids, call) in named.items():
            with memory.Watch(partial(memory.trees, pids)) as watch:
                call()
            peak[name] = watch.peak
        around: list[float] = []

        def between_floors() -> float:
            # The floor runs before and after the app, so that a drift of the machine's speed affects both.
            before = floor()
            seconds = app["fedavg"]()
            around[:] = [before, floor()]
            return seconds

        # The reference loop runs between the two precisions of the app, since both are compared with it.
        alternatives: dict[str, Callable[[], object]] = {
            "fedavg": between_floors, "floor": lambda: sum(around) / 2, "reference_fedavg": fedavg[1],
            **({"fedavg_bf16": app["fedavg_bf16"]} if "fedavg_bf16" in app else {}),
            "reference_cwfedavg": cwfedavg[1], "cwfedavg": app["cwfedavg"],
        }  # fmt: skip
        for visit in app.values():
            visit.warm_up()
        times = alternate(alternatives, scale.repeats, warmup=0)
    peak |= {name: visit.peak for name, visit in app.items() if visit.peak}
    return times, peak
