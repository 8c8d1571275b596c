"""Comparisons that no model was trained for: run directories with plausible or with given scores, written in seconds.

`python -m tests.madeup DIR` makes all methods, 5 seeds and 100 clients.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedapp import registry
from fedapp.config import write_toml
from fedapp.engines import local as engines
from fedapp.experiments import tables
from fedapp.experiments.jobs import Job, Variant
from fedapp.results.directory import write_json
from fedapp.results.runs import folder_of

CLASSES = 10
Scores = Mapping[str, Sequence[float]]
"""Method -> accuracy for each seed."""


def comparison(
    out: Path, methods: Sequence[str], seeds: int = 3, clients: int = 10, rounds: int = 8, failed: Iterable[str] = (),
    reference: str = "local",
) -> Path:  # fmt: skip
    """Write a comparison's run directories and tables; the runs of `failed` methods diverged."""
    jobs, again = list[Job](), list[Job]()
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        train = rng.multinomial(200, rng.dirichlet(np.full(CLASSES, 0.5)), size=clients)
        train = np.stack([rng.multinomial(rng.integers(40, 400), rng.dirichlet(np.full(CLASSES, 0.5))) for _ in train])
        test, skill = np.maximum(train.sum(axis=1) // 3, 5), rng.uniform(0.55, 0.9, clients)
        gains = [0.0 if m == "local" else 0.01 * (n % 5 - 1) + rng.normal(0, 0.004) for n, m in enumerate(methods)]
        wanted = [(jobs, "runs", *pair) for pair in zip(methods, gains)]
        wanted += [(again, "again", "local", 0.0)] if seeds > 2 else []
        for kept, folder, method, gain in wanted:
            chance = {"received": skill + gain - 0.03, "trained": skill + gain}
            if method == "local" or "base=none" in method:
                del chance["received" if method == "local" else "trained"]
            correct = {p: rng.binomial(test, np.clip(c, 0, 1)) for p, c in chance.items() if method not in failed}
            sent = 0 if method == "local" else float(10 ** rng.uniform(3, 6))
            place = out / folder / f"{folder_of(method)}-s{seed}"
            kept.append(_run(place, method, seed, train, test, correct, rounds, 0.8, sent))
    alerts = ["Settings differ, augment: none for all."]
    tables.write(out, jobs, again, reference, None, alerts, ["a note"], "fedapp compare x")
    return out


def scored(
    out: Path, scores: Scores, clients: int = 10, rows: int | Sequence[int] = 100, majority: float = 0.3
) -> list[Job]:
    """Write a comparison whose methods have these accuracies, and all clients the same; Standalone again: half a point.

    Parameters
    ----------
    rows : test rows of each client.   majority : share of each client's largest class.
    """
    test, train = np.full(clients, rows), np.full((clients, CLASSES), 5)

    def run(name: str, method: str, seed: int, score: float) -> Job:
        correct = dict.fromkeys(("received", "trained"), np.round(score * test))
        return _run(out / name, method, seed, train, test, correct, 3, 0.5, 2600, majority)

    alone = scores.get("local", ())
    jobs = [run(f"runs/{m}-s{s}", m, s, score) for m, by in scores.items() for s, score in enumerate(by)]
    again = [run(f"again/local-s{s}", "local", s, score + 0.005) for s, score in enumerate(alone) if len(alone) > 2]
    reference = "local" if "local" in scores else next(iter(scores))
    tables.write(out, jobs, again, reference, None, ["Settings differ, augment: weak for FedClassAvg."], [])
    return jobs


def _run(
    out: Path, method: str, seed: int, train: Any, test: Any, correct: Mapping[str, Any], rounds: int,
    balanced: float, sent: float, largest: float | None = None,
) -> Job:  # fmt: skip
    """Write a run's directory.

    Parameters
    ----------
    method : its label; with `base=none` the run has no rounds.
    train : training rows (K, C).   test : test rows (K,).   correct : by protocol (K,); empty: the run diverged.
    balanced : all-class scores as a share of accuracy.   sent : bytes.   largest : class share, None = that of `train`.
    """
    clients = len(train)
    label, (method, _, args) = method, method.partition("(")
    values = {"method": method, "dataset": "digits", "clients": clients, "num-server-rounds": rounds, "seed": seed}
    config = engines.effective({**values, "method-args": args.rstrip(")")}).replaced(out=str(out))
    job, rounds = Job(Variant(label, method), "", seed, config), config.federation.num_server_rounds
    out.mkdir(parents=True)
    write_toml(out / "config.toml", config)
    about = {"python": "3", "processor": "none", "system": "none", "started": "2026-01-02T03:04:05+0000"}
    write_json(out / "versions.json", {"run": out.name, "fedapp": "0.0", **about})
    majority = train.max(axis=1) / train.sum(axis=1) if largest is None else np.full(clients, largest)
    write_json(
        out / "data_card.json",
        {
            "dataset": "digits", "clients": clients, "split": "0.75 / 0.25", "classes": [*map(str, range(CLASSES))],
            "names": [f"site {i}" for i in range(clients)], "train": train.tolist(), "test": (train // 3).tolist(),
            "train_sizes": train.sum(axis=1).tolist(), "test_sizes": test.tolist(), "majority": majority.tolist(),
            "majority_mean": float(majority.mean()), "hash": f"seed {seed}",
        },
    )  # fmt: skip
    if not correct:
        write_json(out / "summary.json", {"ok": False, "error": "the loss is not finite"})
        write_json(out / "error.json", {"message": "the loss is not finite", "diverged": True})
        return job
    with np.errstate(invalid="ignore"):
        accuracy = {p: c / test for p, c in correct.items()}
    _write(out / "final.csv", [
        {"client": i, "num_samples": int(train[i].sum())}
        | {k: v for p in correct for k, v in {
            f"{p}_accuracy": accuracy[p][i], f"{p}_correct": correct[p][i], f"{p}_total": test[i],
            f"{p}_balanced": balanced * accuracy[p][i],
        }.items()}
        for i in range(clients)
    ])  # fmt: skip
    means = {p: float(a[test > 0].mean()) if test.any() else float("nan") for p, a in accuracy.items()}
    _write(out / "rounds.csv", [
        {"round": t, "clients": clients, "dropped": 0, "train_loss": 2 / t, "round_seconds": 1.0,
         "train_seconds": 0.1, "bytes_up": min(sent, 2600), "bytes_down": min(sent, 2600)}
        | {f"{p}_accuracy": mean * (1 - 0.5 / t) for p, mean in means.items()}
        | {f"{p}_accuracy_std": 0.05 for p in correct}
        for t in range(1, rounds + 1)
    ])  # fmt: skip
    sampled = [{"round": t, "client": i, "num_samples": 9} for t in range(1, rounds + 1) for i in range(clients)]
    _write(out / "clients.csv", sampled)
    parts = train // 3
    right = (parts * np.nan_to_num([*accuracy.values()][-1])[:, None]).astype(int)
    matrices = np.zeros((clients, CLASSES, CLASSES), int)
    for i in range(CLASSES):
        matrices[:, i, i] = right[:, i]
        matrices[:, i, (i + 1) % CLASSES] += (parts - right)[:, i]
    np.savez_compressed(out / "final_confusion.npz", client=np.arange(clients), **dict.fromkeys(correct, matrices))
    headline = next(p for p in registry.get(method).headlines if p in correct)
    summary = {
        "ok": True, "method": method, "clients": clients, "rounds": rounds, "seed": seed, "dropped": 0,
        "accuracy": {p: {"last": mean, "last_std": 0.05, "balanced": balanced * mean} for p, mean in means.items()},
        "pooled": means, "test_sizes": {"mean": float(test.mean())}, "seconds": 6.0, "metrics": {},
        **({"bytes_up": sent} if rounds else {"bytes_up": 0, "bytes_up_query.sums": sent}),
        "bytes_down": sent * bool(rounds), "headline": {"score": headline, "value": means[headline]},
    }  # fmt: skip
    write_json(out / "summary.json", summary)
    return job


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    with path.open("w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    comparison(Path(sys.argv[1]), list(registry.discover()), seeds=5, clients=100, rounds=20)
