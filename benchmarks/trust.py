"""What the checks of clients cost in rounds of honest clients: `python -m benchmarks.trust`.

Processor seconds of rounds in this process, with the checks of every reply and of every new state, and with these taken
out, in random order; and the part of the seconds that is spent within the checks. Two equal runs differ by a tenth and
more on a small machine, so only many turns tell a few percent: look at the fastest runs too.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from fedapp import server_app
from fedapp.client_app import app as client_app
from fedapp.engines import local
from fedapp.transport import boundary, client_manager
from fedapp.transport.local_grid import LocalGrid
from fedapp.transport.records import INFO, reply_of
from strategies import _soundness

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
        return boundary.Refused(str(info["error"]), boundary.FAILED, contract.kind)
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


@contextlib.contextmanager
def checks(on: bool, watch: Watch) -> Iterator[None]:
    """Run with or without the checks."""
    with contextlib.ExitStack() as stack:

        def put(place: Any, name: str, function: Any) -> None:
            stack.enter_context(patch.object(place, name, function))

        if on:
            put(boundary, "reply_of", watch(reply_of, -1))
            put(client_manager, "read", watch(boundary.read))
            for name in ("flaw", "longest"):
                put(_soundness, name, watch(getattr(_soundness, name)))
            bounded = _soundness.bounded
            put(_soundness, "bounded", lambda *given: watch(bounded(*given)))
        else:
            put(client_manager, "read", trusting)
            put(_soundness, "flaw", lambda *given: None)
        yield


def rounds_of(values: Mapping[str, Any], data: Path, rounds: int, on: bool) -> tuple[float, float]:
    """Run a federation; return the processor seconds of its rounds but the first, and those within the checks."""
    watch, marks = Watch(), list[tuple[float, float]]()

    def note(event: Mapping[str, Any]) -> None:
        if event["kind"] == "round":
            marks.append((time.process_time(), watch.seconds))

    further = {"data-dir": str(data)} if values["dataset"] == "npz" else {}
    growth = 10.0 if on else 0.0  # as on real nodes
    settings = {"num-server-rounds": rounds, "max-growth": growth, "final-training": False}
    with tempfile.TemporaryDirectory() as folder, checks(on, watch):
        flat = local.prepare({**values, **further, **settings}, Path(folder) / "out").to_flat()
        server_app.serve(LocalGrid(client_app, flat, int(flat["clients"])), flat, note)
    return marks[-1][0] - marks[0][0], marks[-1][1] - marks[0][1]


def measure(turns: int, rounds: int, folder: Path, only: str = "") -> Iterator[str]:
    """Yield the lines of a table."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (160, 32, 32, 3), dtype=np.uint8), np.arange(160) % 10
    np.savez(folder / "images.npz", x_train=x[:128], y_train=y[:128], x_test=x[128:], y_test=y[128:])
    order = random.Random(0)
    yield "| a run | with checks, s | without, s | with / without, medians | of the fastest | within the checks |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name, values in CASES.items():
        if not name.startswith(only):
            continue
        shares: list[float] = []

        def run(on: bool, values: Mapping[str, Any] = values, shares: list[float] = shares) -> float:
            total, inside = rounds_of(values, folder, rounds, on)
            if on:
                shares.append(inside / total)
            return total

        seconds: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(turns + 1):
            for on in order.sample([True, False], 2):
                took = run(on)
                if turn:  # the first turn warms up
                    seconds[on].append(took)
        slow, fast = (statistics.median(seconds[on]) for on in (True, False))
        least = min(seconds[True]) / min(seconds[False])
        part = f"{100 * statistics.median(shares):.2f} %"
        yield f"| {name} | {slow:.2f} | {fast:.2f} | {slow / fast:.3f} | {least:.3f} | {part} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--only", default="", help="runs whose name begins so")
    parser.add_argument("--rounds", type=int, default=3, help="of a run, of which the first does not count")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="fedapp-bench-") as name:
        for line in measure(given.turns, given.rounds, Path(name), given.only):
            print(line, flush=True)


if __name__ == "__main__":
    main()
