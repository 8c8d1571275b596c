"""Comparisons that no model was trained for: run directories with plausible scores, written in seconds.

`python -m tests.madeup DIR` makes 38 methods, 5 seeds and 100 clients.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedapp import registry
from fedapp.config import RunConfig, write_toml
from fedapp.engines import local as engines
from fedapp.experiments import tables
from fedapp.experiments.jobs import Job, Variant
from fedapp.results.directory import write_json

CLASSES = 10


def comparison(
    out: Path, methods: Sequence[str], seeds: int = 3, clients: int = 10, rounds: int = 8, failed: Iterable[str] = ()
) -> Path:
    """Write a comparison's run directories and tables; the runs of `failed` methods diverged."""
    jobs, again = [], []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        train = rng.multinomial(200, rng.dirichlet(np.full(CLASSES, 0.5)), size=clients)
        train = np.stack([rng.multinomial(rng.integers(40, 400), rng.dirichlet(np.full(CLASSES, 0.5))) for _ in train])
        skill = rng.uniform(0.55, 0.9, clients)
        for number, method in enumerate(methods):
            config = _config(method, seed, out / "runs" / f"{method}-s{seed}", clients, rounds)
            jobs.append(Job(Variant(method, method), "", seed, config))
            gain = 0.0 if method == "local" else 0.01 * (number % 5 - 1) + rng.normal(0, 0.004)
            _run(config, train, skill + gain, rng, method in failed)
        if seeds > 2:
            config = _config("local", seed, out / "again" / f"local-s{seed}", clients, rounds)
            again.append(Job(Variant("local", "local"), "", seed, config))
            _run(config, train, skill, rng, False)
    notes = ["a note"]
    tables.write(
        out, jobs, again, "local", None, ["Settings differ, augment: none for all."], notes, "fedapp compare x"
    )
    return out


def _config(method: str, seed: int, out: Path, clients: int, rounds: int) -> RunConfig:
    values = {"method": method, "dataset": "digits", "clients": clients, "num-server-rounds": rounds, "seed": seed}
    return engines.effective(values).replaced(out=str(out))


def _run(config: RunConfig, train: np.ndarray, skill: np.ndarray, rng: Any, failed: bool) -> None:
    out = Path(config.storage.out)
    out.mkdir(parents=True)
    write_toml(out / "config.toml", config)
    about = {
        "fedapp": "0.0",
        "python": "3",
        "processor": "none",
        "system": "none",
        "started": "2026-01-02T03:04:05+0000",
    }
    write_json(out / "versions.json", {"run": out.name, **about})
    test = np.maximum(train.sum(axis=1) // 3, 5)
    majority = train.max(axis=1) / train.sum(axis=1)
    write_json(
        out / "data_card.json",
        {
            "dataset": "digits", "clients": len(train), "split": "0.75 / 0.25", "classes": [*map(str, range(CLASSES))],
            "names": [f"site {i}" for i in range(len(train))], "train": train.tolist(), "test": (train // 3).tolist(),
            "train_sizes": train.sum(axis=1).tolist(), "test_sizes": test.tolist(), "majority": majority.tolist(),
            "majority_mean": float(majority.mean()), "hash": f"seed {config.federation.seed}",
        },
    )  # fmt: skip
    if failed:
        write_json(out / "summary.json", {"ok": False, "error": "the loss is not finite"})
        write_json(out / "error.json", {"message": "the loss is not finite", "diverged": True})
        return
    alone = config.federation.method == "local"
    protocols = ("trained",) if alone else ("received", "trained")
    rounds = config.federation.num_server_rounds
    correct = {p: rng.binomial(test, np.clip(skill - 0.03 * (p == "received"), 0, 1)) for p in protocols}
    final = [
        {"client": i, "num_samples": int(train[i].sum())}
        | {k: v for p in protocols for k, v in {
            f"{p}_accuracy": correct[p][i] / test[i], f"{p}_correct": correct[p][i], f"{p}_total": test[i],
            f"{p}_balanced": 0.8 * correct[p][i] / test[i],
        }.items()}
        for i in range(len(train))
    ]  # fmt: skip
    _write(out / "final.csv", final)
    means = {p: float((correct[p] / test).mean()) for p in protocols}
    curve = [
        {"round": t, "clients": len(train), "dropped": 0, "train_loss": 2 / t, "round_seconds": 1.0,
         "train_seconds": 0.1, "bytes_up": 0 if alone else 2600, "bytes_down": 0 if alone else 2600}
        | {f"{p}_accuracy": means[p] * (1 - 0.5 / t) for p in protocols}
        | {f"{p}_accuracy_std": 0.05 for p in protocols}
        for t in range(1, rounds + 1)
    ]  # fmt: skip
    _write(out / "rounds.csv", curve)
    sampled = [{"round": t, "client": i, "num_samples": 9} for t in range(1, rounds + 1) for i in range(len(train))]
    _write(out / "clients.csv", sampled)
    rows, right = train // 3, (train // 3 * skill[:, None]).astype(int)
    matrices = np.zeros((len(train), CLASSES, CLASSES), int)
    for i in range(CLASSES):
        matrices[:, i, i] = right[:, i]
        matrices[:, i, (i + 1) % CLASSES] += (rows - right)[:, i]
    np.savez_compressed(out / "final_confusion.npz", client=np.arange(len(train)), **dict.fromkeys(protocols, matrices))
    headline = next(p for p in registry.get(config.federation.method).headlines if p in protocols)
    moved = float(10 ** rng.uniform(3, 6))
    summary = {
        "ok": True, "clients": len(train), "rounds": rounds, "seed": config.federation.seed, "dropped": 0,
        "accuracy": {p: {"last": means[p], "last_std": 0.05, "balanced": 0.8 * means[p]} for p in protocols},
        "pooled": means, "test_sizes": {"mean": float(test.mean())}, "seconds": 12.0,
        "bytes_up": 0 if alone else moved, "bytes_down": 0 if alone else moved,
        "headline": {"score": headline, "value": means[headline]},
    }  # fmt: skip
    write_json(out / "summary.json", summary)


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    comparison(Path(sys.argv[1]), list(registry.discover()), seeds=5, clients=100, rounds=20)
