"""What the checks of clients cost in rounds of honest clients: `python -m reproduction study trust`.

One run in this process, in which every second round has the checks of each reply and of each new state, and the others
do without; a coin says which of two comes first. Both kinds of rounds so share the process, its memory and the state of
the machine: two equal runs differ by a tenth and more, which hides a few percent. Compared are processor seconds of
neighbouring rounds, and their medians over the run, with the interval that 2,000 draws of pairs give. The last column
is the part of the seconds that is spent within the checks.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import numpy as np
import typer

from fedapp import server_app
from fedapp.client_app import app as client_app
from fedapp.engines import local
from fedapp.federation.hooks import soundness
from fedapp.transport import boundary, cohort
from fedapp.transport.local_grid import LocalGrid
from fedapp.transport.records import INFO, reply_of

CASES: dict[str, dict[str, Any]] = {
    "digits, LG-FedAvg, 10 clients": {"dataset": "digits", "method": "lgfedavg", "clients": 10},
    "digits, FedAvg, 10 clients": {"dataset": "digits", "method": "fedavg", "clients": 10},
    "ResNet-18 (45 MB), FedAvg, 2 clients of 64 images, 1 epoch": {
        "dataset": "npz",
        "method": "fedavg",
        "model": "resnet18",
        "clients": 2,
        "local-epochs": 1,
        "partition": "iid",
    },
}


def trusting(message: Any, contract: boundary.Contract) -> boundary.Good | boundary.Refused:
    """Decode a reply and believe all of it."""
    info = message.content.config_records.get(INFO, {})
    if "error" in info:
        return boundary.Refused(str(info["error"]), boundary.FAILED)
    return boundary.Good(*reply_of(message))


class Watch:
    """Processor seconds within the functions that it wraps, without the decoding that any server needs."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, function: Callable[..., Any], sign: int = 1) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = time.process_time()
            try:
                return function(*arguments)
            finally:
                self.seconds += sign * (time.process_time() - started)

        return timed


class Checks:
    """A switch: with it on, replies and states are checked; off, all is believed."""

    def __init__(self) -> None:
        self.on, self.watch = True, Watch()

    def __enter__(self) -> Checks:
        self._stack = contextlib.ExitStack()
        read, bounded = boundary.read, soundness.bounded
        self._put(cohort, "read", self.watch(read), trusting)
        self._put(soundness, "flaw", self.watch(soundness.flaw), lambda *given: None)
        self._put(soundness, "longest", self.watch(soundness.longest), lambda *given: 0.0)
        self._put(soundness, "bounded", lambda *given: self.watch(bounded(*given)), lambda check, *given: check)
        self._stack.enter_context(patch.object(boundary, "reply_of", self.watch(reply_of, -1)))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _put(self, place: Any, name: str, checked: Callable[..., Any], trusted: Callable[..., Any]) -> None:
        self._stack.enter_context(patch.object(place, name, lambda *given: (checked if self.on else trusted)(*given)))


class Round(NamedTuple):
    """One round: processor seconds, and those within the checks."""

    seconds: float
    inside: float


def rounds_of(values: Mapping[str, Any], data: Path, pairs: int) -> list[tuple[Round, Round]]:
    """Run a federation; return its pairs of neighbouring rounds, the one with checks first.

    The first two rounds warm up and do not count.
    """
    coin, found = random.Random(0), list[dict[bool, Round]]()
    plan = [on for _ in range(pairs + 1) for on in coin.sample([True, False], 2)]

    further = {"data-dir": str(data)} if values["dataset"] == "npz" else {}
    settings = {"num-server-rounds": len(plan), "max-growth": 10.0, "final-training": False}  # growth as on real nodes
    with tempfile.TemporaryDirectory() as folder, Checks() as checks:
        last = [time.process_time(), 0.0]
        checks.on = plan[0]

        def note(event: Mapping[str, Any]) -> None:
            if event["kind"] != "round":
                return
            now, done = [time.process_time(), checks.watch.seconds], int(event["round"])
            if done % 2:
                found.append({})
            found[-1][checks.on] = Round(now[0] - last[0], now[1] - last[1])
            last[:] = now
            if done < len(plan):
                checks.on = plan[done]

        flat = local.prepare({**values, **further, **settings}, Path(folder) / "out").to_flat()
        server_app.serve(LocalGrid(client_app, flat, int(flat["clients"])), flat, note)
    return [(pair[True], pair[False]) for pair in found[1:]]


def ratio(pairs: Sequence[tuple[Round, Round]]) -> float:
    """Return the median seconds with checks over the median without."""
    with_checks, without = ([one.seconds for one in side] for side in zip(*pairs, strict=True))
    return float(statistics.median(with_checks) / statistics.median(without))


def measure(pairs: int, folder: Path, only: str = "") -> Iterator[str]:
    """Yield the lines of a table."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (160, 32, 32, 3), dtype=np.uint8), np.arange(160) % 10
    np.savez(folder / "images.npz", x_train=x[:128], y_train=y[:128], x_test=x[128:], y_test=y[128:])
    yield "| a round | with checks, s | without, s | with / without | 95 % interval | within the checks |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name, values in CASES.items():
        if not name.startswith(only):
            continue
        found = rounds_of(values, folder, pairs)
        draws = sorted(ratio([found[i] for i in rng.integers(0, pairs, pairs)]) for _ in range(2000))
        slow, fast = (statistics.median(one.seconds for one in side) for side in zip(*found, strict=True))
        part = statistics.median(one.inside / one.seconds for one, _ in found)
        interval = f"{draws[49]:.3f} to {draws[1949]:.3f}"
        yield f"| {name} | {slow:.3f} | {fast:.3f} | {ratio(found):.3f} | {interval} | {100 * part:.2f} % |"


def main(
    pairs: Annotated[int, typer.Option(help="of rounds, with and without checks")] = 100,
    only: Annotated[str, typer.Option(help="runs whose name begins so")] = "",
) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory(prefix="fedapp-bench-") as name:
        for line in measure(pairs, Path(name), only):
            print(line, flush=True)
