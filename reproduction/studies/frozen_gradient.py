"""Heads that are trained in rounds, for docs/frozen.md: `python -m reproduction study frozen_gradient --features DIR`.

On features of the settings `frozen.ROUNDS` every method trains a head for the same rounds, batches and epochs. The same
search chooses the step of each: `fedapp compare --tune ... --on validation`, with the first seed. Then each seed trains
on all training rows. The partition is that of seed 0, and clients' own models are those of `frozen`.

Scores are lines of docs/frozen.jsonl. A method whose scores are there is not run again.
"""

from __future__ import annotations

import resource
import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from fedapp.data.partitions import Partition
from fedapp.engines.local import run
from fedapp.experiments.api import compare
from fedapp.results import statistics
from fedapp.results.loading import load as load_model
from fedapp.results.runs import RunResult
from reproduction.studies import frozen
from reproduction.studies.choosing import DOCS, named
from reproduction.studies.frozen import Rows, Scores

SEEDS = 3
STEPS = {"banking77": "0.03,0.1,0.3,1,3", "clinc150": "0.03,0.1,0.3,1,3", "cifar10": "0.001,0.003,0.01,0.03,0.1"}
"""Learning rates of the search in each data set."""
PLAIN_STEPS = {"banking77": "10,30,100,300", "clinc150": "10,30,100,300", "cifar10": "0.01,0.03,0.1,0.3"}
"""Those for features that are not standardised: they are smaller, by a factor of 20 for sentences."""
EVEN: dict[str, Any] = {
    "dataset": "npz", "rounds": 20, "local_epochs": 1, "batch_size": 100, "partition_seed": 0, "keep_models": False,
}  # fmt: skip


def processor_seconds() -> float:
    """Return the processor seconds of this process and of those it waited for."""
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def step_of(method: str, steps: str, values: dict[str, Any], out: Path) -> float:
    """Return the step that validation rows of the first seed choose for a method."""
    found = compare([method], seeds=1, tune=f"lr={steps}", reference=method, workers=1, out=out, quiet=True, **values)
    return float(found.runs[0].flat["lr"])


def scores_of(done: RunResult, rows: Rows, alone: Any) -> Scores:
    """Return the scores of a finished run; those of a global model where the method has one."""
    columns = {f"trained_{name}": name for name in ("correct", "total")}
    delivered = done.final.set_index("client")[[*columns]].rename(columns=columns)
    scores = frozen.of_clients(delivered, "trained") | {
        "own": done.score("received"), "bytes": float(done.summary["bytes_up"] * done.summary["rounds"]),
    }  # fmt: skip
    scores |= dict(zip(("gain", "same", "lose"), statistics.harm(delivered, alone)))
    if further := done.summary["metrics"].get("global"):
        truth = rows.y[rows.test]
        right = load_model(done.out).predict(rows.x[rows.test]).argmax(axis=1) == truth
        scores |= {"global": done.score("global"), "auc": further["auc"]["mean"], "ece": further["ece"]["mean"],
                   **frozen.by_class(right, truth)}  # fmt: skip
    return scores


def run_missing(chosen: list[str], features: Path, out: Path, path: Path) -> None:
    """Measure what `path` lacks, method by method."""
    for setting in chosen:
        given, kept = frozen.SETTINGS[setting.removesuffix(frozen.IN_ROUNDS)], frozen.load(path)
        data = features.expanduser().absolute() / f"{given.file}.npz"
        values = {**EVEN, **given.values, "data_dir": data}
        rows, alone = Rows.read(data), None
        penalty = kept[setting.removesuffix(frozen.IN_ROUNDS), 0, "central"]["penalty"]
        for head in frozen.SETTINGS[setting].heads:
            if all((setting, seed, head) in kept for seed in range(SEEDS)):
                continue
            began, (method, _, plain) = processor_seconds(), head.partition(", ")
            settings = {**values, "normalise": "none"} if plain else values
            name = head.replace(", ", "-").replace(" ", "-")
            steps = (PLAIN_STEPS if plain else STEPS)[given.file]
            step = step_of(method, steps, settings, out / setting / f"{name}-search")
            searched = processor_seconds() - began
            for seed in range(SEEDS):
                folder = out / setting / f"{name}-s{seed}"
                shutil.rmtree(folder, ignore_errors=True)
                began = processor_seconds()
                done = run(method=method, lr=step, seed=seed, out=folder, metrics="accuracy,auc,ece", **settings)
                seconds = processor_seconds() - began
                if alone is None:
                    clients = Partition.load(folder / "partition.npz").clients
                    alone = frozen.each_alone(rows, clients, penalty)["logistic"]
                scores = scores_of(done, rows, alone) | {"seconds": seconds, "search": searched, "step": step}
                kept[setting, seed, head] = frozen.rounded({n: v for n, v in scores.items() if np.all(np.isfinite(v))})
            frozen.save(path, kept)


def main(
    features: Annotated[Path, typer.Option(help="folder of the files of features")],
    out: Annotated[Path, typer.Option(help="folder of the runs")] = Path("runs/frozen"),
    only: Annotated[str, typer.Option(help="settings, with commas (default: all)")] = "",
    kept: Path = DOCS / "frozen.jsonl",
    doc: Path = DOCS / "frozen.md",
) -> None:
    """Measure what is asked for, and write the tables."""
    run_missing(named(only, [*frozen.ROUNDS], "setting"), features, out.expanduser().absolute(), kept)
    doc.write_text(frozen.page(doc.read_text(encoding="utf-8"), frozen.load(kept)), encoding="utf-8")
