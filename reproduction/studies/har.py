"""The table of docs/har.md: `python -m reproduction study har --data har.npz --out runs/har --doc docs/har.md`.

Two comparisons of the recipe `har`. `levels` has the recipe's length and trains on all training rows, as the reference
implementation did whose scores stand next to it. `methods` has all methods and chooses the round by validation rows.
Finished runs are not run again, so the command can be stopped and started at any time. Without `--data` nothing is run,
and the tables are made of the runs that are there.
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
from fedapp.results.intervals import differences_of
from fedapp.results.runs import RunResult
from fedapp.results.statistics import DASH, harm, spread, tally, worst

SEEDS = 3
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "levels": ("local,fedavg,fedper,lgfedavg", {"validation": 0.0, "select": "last"}),
    "methods": ("", {"num-server-rounds": 8}),
}
"""Comparisons by their folder: methods (none = those of the recipe), and keys in which they differ from the recipe."""
LEVELS = {
    "local": (DASH, "95.1 ± 0.6 / 74.3 ± 2.1"),
    "fedavg": ("91.9 ± 0.8 / 59.8 ± 1.0", "96.4 ± 1.0 / 73.1 ± 4.8"),
    "fedper": ("92.8 ± 1.0 / 63.5 ± 3.5", "95.6 ± 0.8 / 67.0 ± 0.4"),
    "lgfedavg": ("95.5 ± 0.8 / 74.6 ± 3.1", "95.5 ± 0.8 / 75.0 ± 3.3"),
}
"""The reference implementation's `received` and `trained`: mean over persons / worst tenth, in percent, 3 seeds."""


def run(data: Path, out: Path, workers: int | None) -> int:
    """Run what is missing of both comparisons; return the highest exit code."""
    recipe = recipes.shipped()["har"]
    codes = []
    for name, (methods, changed) in PARTS.items():
        values = {**recipe.settings, **changed, "data-dir": str(data.absolute())}
        codes.append(compare.run(values, methods or recipe.methods, SEEDS, out / name, workers=workers))
    return max(codes)


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


def gain(values: Sequence[float], step: float) -> str:
    """Write a difference in points with the 90 % t interval of its mean over seeds; `step` is its resolution."""
    found = differences_of({"": values}, step)[""]
    low, high = (f"{100 * (found.mean + side * found.inner):+.1f}" for side in (-1, 1))
    return f"{100 * found.mean:+.1f}" + (f" ({low} to {high})" if len(values) > 1 else "")


def levels_table(runs: Mapping[str, Sequence[RunResult]]) -> list[str]:
    """Build the table next to the reference implementation."""
    rows = []
    for name, theirs in LEVELS.items():
        if here := runs.get(name, ()):
            received = DASH if name == "local" else both([final(r, "received") for r in here])
            ends, trained = both([trained_at_the_end(r) for r in here]), both([final(r, "trained") for r in here])
            rows.append((registry.get(name).title, received, theirs[0], ends, theirs[1], trained))
    return markdown("method|received|reference|trained, last round|reference|trained, next round", rows)


def differences(runs: Sequence[RunResult], alone: Mapping[int, RunResult]) -> tuple[str, str]:
    """Write the difference of the headline to training alone with its 90 % interval over seeds, and whom it harms."""
    pairs = [(r, alone[r.seed]) for r in runs if r.seed in alone]
    if not pairs or runs[0].alone:
        return DASH, DASH
    gains = [a.score(a.headline) - b.score(b.headline) for a, b in pairs]
    return gain(gains, max(r.resolution() for r in runs)), tally(
        [harm(a.headline_counts(), b.headline_counts()) for a, b in pairs]
    )


def methods_table(runs: Mapping[str, Sequence[RunResult]]) -> list[str]:
    """Build the table of all methods."""
    alone = {r.seed: r for r in runs.get("local", ())}
    rows = []
    for name, here in runs.items():
        received = DASH if name == "local" else both([final(r, "received") for r in here])
        trained, headline = both([final(r, "trained") for r in here]), here[0].headline
        rows.append((registry.get(name).title, received, trained, headline, *differences(here, alone)))
    return markdown("method|received|trained|headline|to training alone|gain / same / lose:", rows)


def main() -> int:
    """Run what is asked for and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="har.npz (default: run nothing, read the runs that are there)")
    parser.add_argument("--out", type=Path, default=Path("runs/har"), help="folder of the runs (default: %(default)s)")
    parser.add_argument("--workers", type=int, help="processes at a time (default: one per core)")
    parser.add_argument("--doc", type=Path, help="page whose tables are renewed (default: print them)")
    args = parser.parse_args()
    code = run(args.data, args.out, args.workers) if args.data else 0
    for name, table in (("levels", levels_table), ("methods", methods_table)):
        lines = table(found(args.out / name))
        if args.doc:
            args.doc.write_text(replaced(args.doc.read_text(encoding="utf-8"), name, lines), encoding="utf-8")
        else:
            sys.stdout.write("\n".join([*lines, "", ""]))
    return code
