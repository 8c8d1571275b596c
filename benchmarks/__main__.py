"""Measure the speed of the app: `make bench`, or `python -m benchmarks`.

The alternatives run in turns and need an otherwise idle machine. All parts together take 40 to 90 minutes on two cores.
Results are written to `docs/performance.json` and between the markers of `docs/performance.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, overhead, report, rounds, server
from fedapp.engines.resources import usable_cores

Keep = Callable[[dict[str, Any]], None]
PARTS = ("rounds", "overhead", "server", "gpu")
"""The last part needs a GPU and is left out without one (its small form runs anywhere)."""


def measure(
    parts: list[str], data: Path | None, small: bool, folder: Path, keep: Keep = lambda figures: None
) -> dict[str, Any]:
    """Run the parts; return the figures for performance.json.

    Parameters
    ----------
    data : folder with cifar10.npz; None = random images.   small : a form that takes seconds, without Ray, for tests.
    folder : for temporary files.   keep : called after each part with all that is known by then.
    """
    scale = rounds.SMALL if small else rounds.Scale()
    speeds = [asdict(machine.speeds(n, small)) for n in sorted({1, 1 if small else usable_cores()})]
    figures: dict[str, Any] = {"machine": machine.describe(), "speeds": speeds}
    if "server" in parts:
        figures |= report.server_figures(server.measure(server.SMALL if small else server.ROWS, small))
        keep(figures)
    if "overhead" in parts:
        cases = overhead.SMALL if small else overhead.CASES
        seconds, peaks = overhead.measure(folder / "overhead", cases, ray=not small)
        for key, values in seconds.items():
            figures |= report.spread(key, values)
        figures |= {key.replace("_seconds", "_peak_bytes"): peak for key, peak in peaks.items()}
        keep(figures)
    if "rounds" in parts:
        times, peaks = rounds.measure(folder / "rounds", data, scale)
        figures |= report.round_figures(times)
        figures |= {f"{name}_peak_bytes": peak for name, peak in peaks.items()}
        keep(figures)
    if "gpu" in parts and (small or torch.cuda.is_available()):
        shared = rounds.clients_per_second(folder / "gpu", data, scale, (1,) if small else rounds.GPU_WORKERS)
        for workers, rates in shared.items():
            figures |= report.spread(f"gpu_clients_per_second_{workers}", rates)
        keep(figures)
    return figures


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    only = "comma-separated parts to run; only their figures and tables are updated (default: %(default)s)"
    parser.add_argument("--only", default=",".join(PARTS), help=only)
    parser.add_argument("--data-dir", type=Path, help="folder with cifar10.npz (default: random images)")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder for the two files (default: docs)")
    parser.add_argument("--small", action="store_true", help="a form that tries out every part in seconds, without Ray")
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    if parts == ["gpu"] and not (options.small or torch.cuda.is_available()):
        parser.error("this machine has no GPU: choose other parts, or add --small")
    stored = options.out / "performance.json"
    if set(parts) < set(PARTS) and stored.is_file():
        known, here = json.loads(stored.read_text(encoding="utf-8")).get("machine", {}), machine.describe()
        if differ := [f"{k} {known.get(k)}" for k in ("processor", "cores", "torch") if known.get(k) != here[k]]:
            parser.error(f"the other tables of {options.out} are of another machine ({', '.join(differ)}): give --out")
    for name in machine.BLAS_VARIABLES:
        if name in os.environ:
            sys.stderr.write(f"{name} is set, so NumPy may use kernels for another processor: unset it\n")
    started = time.perf_counter()
    keep = partial(report.write, options.out)  # what was measured stays if a later part is interrupted
    with tempfile.TemporaryDirectory(prefix="fedapp-bench-") as folder:
        figures = measure(parts, options.data_dir, options.small, Path(folder), keep)
    sys.stdout.write(f"written to {options.out}\n")
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")
    sys.stdout.write(f"{(time.perf_counter() - started) / 60:.1f} minutes\n")


if __name__ == "__main__":
    main()
