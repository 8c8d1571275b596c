"""What the checks of clients cost in rounds of honest clients: `python -m benchmarks.trust`.

Processor seconds of rounds in this process, with the checks of every reply and of every new state, and with these taken
out, in turns; and the part of the seconds that is spent within the checks. Processor seconds count on a machine that
does other work too.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.timing import Times, alternate
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


def measure(turns: int, rounds: int, folder: Path) -> Iterator[str]:
    """Yield the lines of a table."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (160, 32, 32, 3), dtype=np.uint8), np.arange(160) % 10
    np.savez(folder / "images.npz", x_train=x[:128], y_train=y[:128], x_test=x[128:], y_test=y[128:])
    yield "| a run | with checks, s | without, s | with / without | within the checks |"
    yield "|---|---:|---:|---|---:|"
    for name, values in CASES.items():
        shares: list[float] = []

        def run(on: bool, values: Mapping[str, Any] = values, shares: list[float] = shares) -> float:
            total, inside = rounds_of(values, folder, rounds, on)
            if on:
                shares.append(inside / total)
            return total

        # With, without, without, with: whatever drifts within a turn does so for both.
        ways = {"with": True, "without": False, "without again": False, "with again": True}
        found = alternate({way: partial(run, on) for way, on in ways.items()}, turns).seconds
        both = {way: list(map(sum, zip(found[way], found[f"{way} again"], strict=True))) for way in ("with", "without")}
        times = Times(both)
        part = f"{100 * statistics.median(shares):.2f} %"
        cells = [name, f"{times.median('with') / 2:.2f}", f"{times.median('without') / 2:.2f}", spread(times), part]
        yield "| " + " | ".join(cells) + " |"


def spread(times: Times) -> str:
    """Return the ratio of the two alternatives, with the least and the greatest."""
    slow, fast = times.seconds
    found = times.ratios(slow, fast)
    return f"{times.ratio(slow, fast):.3f} ({found[0]:.3f} to {found[-1]:.3f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4, help="of a run, of which the first does not count")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="fedapp-bench-") as name:
        for line in measure(given.turns, given.rounds, Path(name)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
