"""Training steps with and without PyTorch's compiler, in turn: milliseconds of processor time, and what it costs first.

python -m benchmarks.compiled [MODEL:BATCH:PRECISION ...]

Each case has two processes with a cache of their own: the first compiles, the second finds the code and is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace

import numpy as np
import torch

from benchmarks.timing import alternate
from fedapp import process
from fedapp.data.transforms import InputSpec
from fedapp.learning.training import TrainSpec, train
from fedapp.models import build_model

CASES = ("cnn:10:fp32", "cnn:10:bf16", "cnn:64:fp32", "cnn:64:bf16", "digits-a:16:fp32", "resnet18-plain:10:fp32")
STEPS, TURNS = 20, 5


def seconds() -> float:
    """Return the processor seconds of this process and of those that it has started, such as g++."""
    return time.process_time() + sum(os.times()[2:4])


def measure(model: str, batch: int, precision: str, turns: int) -> dict[str, float | list[float]]:
    """Return the seconds of the first step, and those of a step plain and compiled, by turn."""
    process.prepare(1)
    small = model.startswith(("digits", "mlp"))
    shape, scale = ((1, 8, 8), 16.0) if small else ((3, 32, 32), 255.0)
    inputs = InputSpec(shape, scale, (0.5,) * shape[0], (0.25,) * shape[0])
    rng = np.random.default_rng(0)
    images = rng.integers(0, int(scale) + 1, (batch * STEPS, *shape[1:], shape[0]), dtype=np.uint8)
    x, y = torch.from_numpy(images), torch.from_numpy(rng.integers(0, 10, batch * STEPS))
    spec = TrainSpec(batch_size=batch, lr=0.005, momentum=0.0, precision=precision)

    def steps(spec: TrainSpec, count: int = STEPS) -> float:
        net, before = build_model(model, num_classes=10, shape=shape, seed=0), seconds()
        n, g = count * batch, torch.Generator().manual_seed(0)
        train(net, x[:n], y[:n], spec, inputs, lambda b: torch.nn.functional.cross_entropy(net(b.x), b.y), g)
        return (seconds() - before) / count

    fast = replace(spec, compiled=True)
    steps(spec, 1)
    first = steps(fast, 1)
    times = alternate({"plain": lambda: steps(spec), "compiled": lambda: steps(fast)}, turns) if turns else None
    return {"first": first, **(times.seconds if times else {})}


def main(cases: list[str]) -> None:
    """Print a row of a Markdown table for each case."""
    for case in cases or CASES:
        found = []
        with tempfile.TemporaryDirectory() as cache:
            for turns in (0, TURNS):
                command = [sys.executable, "-m", "benchmarks.compiled", "--one", case, str(turns)]
                done = subprocess.run(
                    command, env=os.environ | {"FEDAPP_CACHE": cache}, stdout=subprocess.PIPE, check=True, text=True
                )
                found.append(json.loads(done.stdout.splitlines()[-1]))
        (cold, warm), last = found, found[-1]
        ratios = [a / b for a, b in zip(last["plain"], last["compiled"], strict=True)]
        model, batch, precision = case.split(":")
        plain, fast = (1000 * np.median(last[kind]) for kind in ("plain", "compiled"))
        spread = f"{np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        row = (f"`{model}`", batch, precision, f"{plain:.2f}", f"{fast:.2f}", spread)
        print("|", " | ".join((*row, f"{cold['first']:.1f}", f"{warm['first']:.1f}")), "|", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        name, size, kind = sys.argv[2].split(":")
        print(json.dumps(measure(name, int(size), kind, int(sys.argv[3]))))
    else:
        main(sys.argv[1:])
