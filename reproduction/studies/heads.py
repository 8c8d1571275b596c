"""Heads in closed form next to CCVR, on one trained extractor a seed.

`python -m reproduction study heads --dataset cifar10`

CCVR trains with FedAvg and repairs the head. Its extractor, which the repair leaves as it is, is then given to the
other heads (`base=none weights=FILE`), so a seed trains once. Printed and added to OUT/heads.jsonl: accuracy in % of
the global model on the central test set, before local training. A seed that is there already is not run again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.pages import markdown
from fedapp.engines.local import run
from fedapp.results.statistics import spread

OTHERS = {
    "fed3r": "lam=0.01", "fed3r, normalised": "lam=0.01 normalise=true", "lda": "", "fedncm": "", "fedcof": "gamma=1",
}  # fmt: skip
"""Heads on the given extractor, which begin with the method, and its arguments: the papers' penalties."""


def measured(seed: int, out: Path, settings: dict[str, Any]) -> dict[str, float]:
    """Return the accuracy in % of every head for one seed."""
    common = {**settings, "seed": seed, "final_training": False, "protocols": "global", "keep_models": False}
    base = run(method="ccvr", method_args="oracle=true", out=out / f"ccvr-s{seed}", **common)
    found = base.summary["calibration"]
    scores = {"FedAvg's own": found["before"], "ccvr": found["after"], "ccvr on real features": found["oracle"]}
    common |= {"num_server_rounds": 1, "weights": str((base.out / "models" / "last.safetensors").absolute())}
    for name, args in OTHERS.items():
        folder, method = out / f"{name.replace(', ', '-')}-s{seed}", name.partition(",")[0]
        done = run(method=method, method_args=f"base=none {args}", out=folder, **common)
        scores[name] = done.summary["calibration"]["after"]
    return {name: 100 * float(value) for name, value in scores.items()}


def table(rows: list[dict[str, float]]) -> str:
    """Return a table of means over seeds, the best first, and in how many seeds each head was first."""
    lines = []
    for name in sorted(rows[0], key=lambda n: -np.mean([r[n] for r in rows])):
        first = sum(r[name] == max(r.values()) for r in rows)
        lines.append((name, spread((r[name] for r in rows), factor=1), first))
    return "\n".join(markdown(f"head|{len(rows)} seeds:|first in:", lines))


def main(
    dataset: str = "digits",
    alpha: float = 0.1,
    model: str = "auto",
    rounds: int = 5,
    fraction: Annotated[float, typer.Option(help="share of the images")] = 1.0,
    seeds: int = 3,
    data_dir: str = "",
    out: Path = Path("runs/heads"),
) -> None:
    """Measure what OUT lacks, and print the table."""
    settings: dict[str, Any] = {
        "dataset": dataset, "alpha": alpha, "partition": "dirichlet", "clients": 10, "model": model,
        "num_server_rounds": rounds, "data_fraction": fraction, "data_dir": data_dir,
    }  # fmt: skip
    kept = out / "heads.jsonl"
    lines = [json.loads(line) for line in kept.read_text().splitlines()] if kept.is_file() else []
    done = {line["seed"]: line["scores"] for line in lines if line["settings"] == settings}
    for seed in range(seeds):
        if seed not in done:
            done[seed] = measured(seed, out / f"{dataset}-{alpha}-{fraction}-{rounds}-{model}", settings)
            with kept.open("a", encoding="utf-8") as f:
                f.write(json.dumps({"settings": settings, "seed": seed, "scores": done[seed]}) + "\n")
    print(table([done[seed] for seed in range(seeds)]))
