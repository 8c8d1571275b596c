"""A comparison as `fedapp compare` writes it, without a run: tables of made-up numbers.

`python -m tests.synthetic DIR` writes one of 38 methods, 5 seeds and 100 clients; `time fedapp show DIR` reads it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedapp import config, registry
from fedapp.experiments import tables
from fedapp.experiments.jobs import Job, Variant

Scores = Mapping[str, Sequence[float]]
"""Method -> accuracy for each seed."""


def comparison(out: Path, scores: Scores, clients: int = 10, rows: int = 100, majority: float = 0.3) -> None:
    """Write a comparison whose methods have these accuracies, and all clients the same; Standalone again: half a point.

    Parameters
    ----------
    rows : test rows of each client.
    """
    jobs, again = [], []
    for method, seed in ((m, s) for m in scores for s in range(len(scores[m]))):
        folder = out / "runs" / f"{method}-s{seed}"
        jobs.append(_run(folder, method, seed, scores[method][seed], clients, rows, majority))
    for seed, score in enumerate(scores.get("local", ()) if len(scores.get("local", ())) > 2 else ()):
        again.append(_run(out / "again" / f"local-s{seed}", "local", seed, score + 0.005, clients, rows, majority))
    reference = "local" if "local" in scores else next(iter(scores))
    tables.write(out, jobs, again, reference, None, ["Settings differ, augment: weak for FedClassAvg."], [])


def _run(out: Path, method: str, seed: int, score: float, clients: int, rows: int, majority: float) -> Job:
    out.mkdir(parents=True)
    settings = config.from_flat({"method": method, "seed": seed, "clients": clients, "dataset": "digits"})
    settings = settings.replaced(out=str(out))
    headline = registry.get(method).deploy_as
    correct = np.full(clients, np.round(score * rows))
    columns: dict[str, Any] = {"client": range(clients), "num_samples": 50}
    for protocol in ("received", "trained"):
        columns |= {f"{protocol}_accuracy": correct / rows, f"{protocol}_balanced": correct / rows / 2}
        columns |= {f"{protocol}_correct": correct, f"{protocol}_total": rows}
    pd.DataFrame(columns).to_csv(out / "final.csv", index=False)
    own = {"last": score, "last_std": 0.0, "balanced": score / 2}
    summary = {
        "ok": True, "method": method, "clients": clients, "rounds": 3, "accuracy": {"received": own, "trained": own},
        "headline": {"score": headline, "value": score}, "bytes_up": 2600, "bytes_down": 2600, "dropped": 0,
        "test_sizes": {"mean": rows}, "seconds": 6.0, "metrics": {},
    }  # fmt: skip
    (out / "summary.json").write_text(json.dumps(summary))
    (out / "config.toml").write_text(f'method = "{method}"\nseed = {seed}\nfinal-training = true\n')
    (out / "data_card.json").write_text(json.dumps({"majority_mean": majority}))
    rounds = {"round": [1], "clients": clients, "dropped": 0, "trained_accuracy": score, "received_accuracy": score}
    pd.DataFrame(rounds).to_csv(out / "rounds.csv", index=False)
    return Job(Variant(method, method), "", seed, settings)


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    comparison(Path(sys.argv[1]), {m: rng.normal(0.8, 0.02, 5) for m in registry.names()}, clients=100)
