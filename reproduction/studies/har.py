"""The table of docs/har.md: `python -m reproduction study har --data har.npz --out runs/har --doc docs/har.md`.

A comparison of the recipe `har` on all training rows, as in the reference implementation whose scores the table has
too. Finished runs are not run again, so the command can be stopped and started at any time. Without `--data` nothing is
run, and the table is made of the finished runs in the folder.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.pages import markdown, replaced
from fedapp import registry
from fedapp.experiments import compare, recipes
from fedapp.results.runs import RunResult
from fedapp.results.statistics import DASH, spread, worst

SEEDS = 3
CHANGED: dict[str, Any] = {"validation": 0.0, "select": "last"}
"""Keys in which the comparison differs from the recipe."""
LEVELS = {
    "local": (DASH, "95.1 ± 0.6 / 74.3 ± 2.1"),
    "fedavg": ("91.9 ± 0.8 / 59.8 ± 1.0", "96.4 ± 1.0 / 73.1 ± 4.8"),
    "fedper": ("92.8 ± 1.0 / 63.5 ± 3.5", "95.6 ± 0.8 / 67.0 ± 0.4"),
    "lgfedavg": ("95.5 ± 0.8 / 74.6 ± 3.1", "95.5 ± 0.8 / 75.0 ± 3.3"),
}
"""The reference implementation's `received` and `trained`: mean over persons / worst tenth, in percent, 3 seeds."""


def run(data: Path, out: Path, workers: int | None) -> int:
    """Run what is missing of the comparison; return the exit code."""
    values = {**recipes.shipped()["har"].settings, **CHANGED, "data-dir": str(data.absolute())}
    return compare.run(values, ",".join(LEVELS), SEEDS, out / "levels", workers=workers)


def found(folder: Path) -> dict[str, list[RunResult]]:
    """Return the finished runs of a comparison by method, in the order of the recipe and of the seeds."""
    runs: dict[str, list[RunResult]] = defaultdict(list)
    finished = [run for path in folder.glob("runs/*") if (run := RunResult(path)).ok]
    for one in sorted(finished, key=lambda r: r.seed):
        runs[one.method].append(one)
    return {name: runs[name] for name in recipes.shipped()["har"].rows if name in runs}


def trained_at_the_end(run: RunResult) -> pd.Series:
    """Return each client's accuracy after the local training of the last round, before the server averaged."""
    rows = run.clients[run.clients["round"] == run.clients["round"].max()]
    return rows.set_index("client")["trained_accuracy"]


def final(run: RunResult, score: str) -> pd.Series:
    """Return each client's final accuracy."""
    return run.final.set_index("client")[f"{score}_accuracy"]


def both(scores: Sequence[Any]) -> str:
    """Write mean over clients and mean of their worst tenth, each mean ± std over seeds; scores by seed and client."""
    return f"{spread(np.mean(s) for s in scores)} / {spread(worst(s)[1] for s in scores)}"


def levels_table(runs: Mapping[str, Sequence[RunResult]]) -> list[str]:
    """Build the table next to the reference implementation."""
    rows = []
    for name, theirs in LEVELS.items():
        if here := runs.get(name, ()):
            received = DASH if name == "local" else both([final(r, "received") for r in here])
            ends, trained = both([trained_at_the_end(r) for r in here]), both([final(r, "trained") for r in here])
            rows.append((registry.get(name).title, received, theirs[0], ends, theirs[1], trained))
    return markdown("method|received|reference|trained, last round|reference|trained, next round", rows)


def main() -> int:
    """Run what is asked for and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="har.npz (default: run nothing, read the runs that are there)")
    parser.add_argument("--out", type=Path, default=Path("runs/har"), help="folder of the runs (default: %(default)s)")
    parser.add_argument("--workers", type=int, help="processes at a time (default: one per core)")
    parser.add_argument("--doc", type=Path, help="page whose table is renewed (default: print it)")
    args = parser.parse_args()
    code = run(args.data, args.out, args.workers) if args.data else 0
    lines = levels_table(found(args.out / "levels"))
    if args.doc:
        args.doc.write_text(replaced(args.doc.read_text(encoding="utf-8"), "levels", lines), encoding="utf-8")
    else:
        sys.stdout.write("\n".join([*lines, "", ""]))
    return code
