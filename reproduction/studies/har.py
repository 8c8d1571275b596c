"""The tables of docs/har.md: `python -m reproduction study har --data har.npz --out runs/har --doc docs/har.md`.

Two comparisons of the recipe `har`. `levels` trains on all training rows, as the reference implementation whose scores
its table has too. `methods` has all methods and chooses the round by validation rows. docs/har.jsonl keeps the correct
test rows of each client. Finished runs are not run again, so the command can be stopped and started at any time.
Without `--data` nothing is run, and the tables are made of the finished runs and of the kept ones.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import typer

from benchmarks.pages import markdown, replaced
from fedapp import registry
from fedapp.experiments import compare, recipes
from fedapp.experiments.shipped import Entry
from fedapp.results.directory import write_text
from fedapp.results.intervals import differences_of, margin_of
from fedapp.results.runs import RunResult
from fedapp.results.statistics import DASH, harm, resolution, spread, tally, worst
from reproduction.studies.choosing import DOCS, Score, headline, in_points

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
"""The reference implementation's `received` and `trained`: mean over persons / worst 10 %, in percent, 3 seeds."""


class Kept(Entry):
    """The test rows of each client in a run, in the order of their ids: how many, and how many are correct.

    Runs of `levels` also have them after the local training of the last round, before the server averaged (`last`).
    """

    method: str
    seed: int
    total: tuple[int, ...]
    received: tuple[int, ...]
    trained: tuple[int, ...]
    last: tuple[int, ...] | None = None

    def counts(self, score: Score | Literal["last"]) -> pd.DataFrame:
        """Return `correct` and `total` by client."""
        return pd.DataFrame({"correct": getattr(self, score), "total": self.total})

    def accuracies(self, score: Score | Literal["last"]) -> pd.Series:
        """Return each client's accuracy."""
        return self.counts(score).pipe(lambda table: table["correct"] / table["total"])


def kept_of(run: RunResult, part: str) -> Kept:
    """Return the line of a finished run."""
    table = run.final.sort_values("client")
    columns = {name: table[f"{name}_correct"].tolist() for name in ("received", "trained")}
    if part == "levels":
        rows = run.clients[run.clients["round"] == run.clients["round"].max()].sort_values("client")
        columns["last"] = rows["trained_correct"].tolist()
    return Kept(method=run.method, seed=run.seed, total=table["trained_total"].tolist(), **columns)


def load(path: Path) -> list[Kept]:
    """Return the kept runs."""
    return [Kept.model_validate_json(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(data: Path, out: Path, workers: int | None) -> int:
    """Run what is missing of both comparisons; return the highest exit code."""
    recipe, codes = recipes.shipped()["har"], []
    for name, (methods, changed) in PARTS.items():
        values = {**recipe.settings, **changed, "data-dir": str(data.absolute())}
        codes.append(compare.run(compare.Plan(values, methods or recipe.methods, SEEDS), out / name, workers=workers))
    return max(codes)


def found(folder: Path) -> dict[str, list[RunResult]]:
    """Return the finished runs of a comparison by method, in the order of the recipe and of the seeds."""
    runs: dict[str, list[RunResult]] = defaultdict(list)
    finished = [run for path in folder.glob("runs/*") if (run := RunResult(path)).ok]
    for one in sorted(finished, key=lambda r: r.seed):
        runs[one.method].append(one)
    return {name: runs[name] for name in recipes.shipped()["har"].rows if name in runs}


def both(scores: Sequence[Any]) -> str:
    """Write mean over clients and mean of their worst 10 %, each mean ± std over seeds; scores by seed and client."""
    return f"{spread(np.mean(s) for s in scores)} / {spread(worst(s)[1] for s in scores)}"


def levels_table(runs: Sequence[Kept]) -> list[str]:
    """Build the table next to the reference implementation."""
    rows = []
    for name, theirs in LEVELS.items():
        if here := [run for run in runs if run.method == name]:
            received = DASH if name == "local" else both([run.accuracies("received") for run in here])
            ends, trained = (both([run.accuracies(score) for run in here]) for score in ("last", "trained"))
            rows.append((registry.get(name).title, received, theirs[0], ends, theirs[1], trained))
    return markdown("method|received|reference|trained, last round|reference|trained, next round", rows)


def methods_table(runs: Sequence[Kept]) -> list[str]:
    """Build the table of all methods, each against training alone with the same seed, with one interval for all rows.

    Standalone again compares the models of each seed with those of the next: chance alone.
    """
    alone, rows = {run.seed: run for run in runs if run.method == "local"}, []
    names = dict.fromkeys(run.method for run in runs)
    by = {name: [run for run in runs if run.method == name and run.seed in alone] for name in names}
    gains = {
        name: [r.accuracies(headline(name)).mean() - alone[r.seed].accuracies("trained").mean() for r in here]
        for name, here in by.items()
        if name != "local"
    }
    found = differences_of(gains, max(resolution(run.total) for run in runs))
    for name, here in by.items():
        received = DASH if name == "local" else both([run.accuracies("received") for run in here])
        trained, used = both([run.accuracies("trained") for run in here]), headline(name)
        difference = DASH if name == "local" else in_points(found[name])
        against = [*here[1:], *here[:1]] if name == "local" else [alone[run.seed] for run in here]
        sides = tally([harm(run.counts(used), other.counts("trained")) for run, other in zip(here, against)])
        rows.append((registry.get(name).title, received, trained, used, difference, sides))
    level = float(np.mean([run.accuracies("trained").mean() for run in alone.values()]))
    margin = margin_of(level, float(np.median([run.total for run in runs])))
    words = {name: difference.word(margin).partition(" ")[0].rstrip(",") for name, difference in found.items()}
    decided = (
        f"{side}: {', '.join(registry.get(m).title for m, word in words.items() if word == side.lower()) or 'none'}."
        for side in ("Better", "Worse", "Equal")
    )
    return [
        *markdown("method|received|trained|headline|to training alone|gain / same / lose:", rows), "",
        f"Against training alone, with a margin of {100 * margin:.1f} points. {' '.join(decided)} The others are open.",
    ]  # fmt: skip


def tables(lines: Sequence[Kept]) -> dict[str, list[str]]:
    """Build both tables of the page, by name."""
    levels, methods = ([one for one in lines if (one.last is None) == whole] for whole in (False, True))
    return {"levels": levels_table(levels), "all-methods": methods_table(methods)}


def main(
    data: Annotated[Path | None, typer.Option(help="har.npz (default: run nothing, read what is there)")] = None,
    out: Annotated[Path, typer.Option(help="folder of the runs")] = Path("runs/har"),
    workers: Annotated[int | None, typer.Option(help="processes at a time (default: one per core)")] = None,
    doc: Annotated[Path | None, typer.Option(help="page whose tables are renewed (default: print them)")] = None,
    kept: Path = DOCS / "har.jsonl",
) -> int:
    """Run what is asked for and write the tables."""
    code = run(data, out, workers) if data else 0
    done = [kept_of(one, part) for part in PARTS for runs in found(out / part).values() for one in runs]
    lines = list({(one.last is None, one.method, one.seed): one for one in [*load(kept), *done]}.values())
    write_text(kept, "".join(f"{one.model_dump_json(exclude_none=True)}\n" for one in lines))
    for name, table in tables(lines).items():
        if doc and len(table) > 2:
            doc.write_text(replaced(doc.read_text(encoding="utf-8"), name, table), encoding="utf-8")
        elif not doc:
            sys.stdout.write("\n".join([*table, "", ""]))
    return code
