"""From finished runs to tidy tables: results, curves, paired tests, and whether the runs may be compared at all."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from fedapp import config as configuration
from fedapp.data.partitions import PARTITION_PARAMETER
from fedapp.experiments.jobs import Job
from fedapp.results.runs import ONE_SCORE, RunResult
from fedapp.results.statistics import (
    DASH,
    holm,
    mean_and_std,
    probability,
    reached,
    signed_rank,
    spread,
    traffic,
    until,
)  # fmt: skip

PROTOCOLS = configuration.PROTOCOLS
MEASURES = ("received_accuracy", "trained_accuracy", "received_balanced", "trained_balanced")
"""Columns of final.csv that methods are tested on."""
NARROWEST = 150
"""Columns of a table that goes to a file or a pipe."""


# ---- reading runs ----------------------------------------------------------------------------------------------------


def describe(job: Job) -> dict[str, Any]:
    """Return the columns that say which run a row is of."""
    c = job.config
    key = PARTITION_PARAMETER.get(c.partition)
    return {
        "method": job.variant.method, "variant": job.variant.label, "method_args": c.method_args, "dataset": c.dataset,
        "partition": c.partition, "alpha": c.alpha if key == "alpha" else math.nan,
        "classes_per_client": c.classes_per_client if key == "classes-per-client" else math.nan, "seed": job.seed,
    }  # fmt: skip


SETTING = ["dataset", "partition", "alpha", "classes_per_client"]


def results(jobs: Sequence[Job], reference: str, target: float | None = None) -> pd.DataFrame:
    """Return a row a finished run.

    Parameters
    ----------
    reference : label of the method whose last accuracy, seed by seed, is the target where `target` is None.

    Returns
    -------
    Columns of :func:`describe`, then `clients`, `rounds`, and by protocol `last`, `best`, `last_std`, `pooled`,
    `balanced`, `worst` (client), `worst_decile`, `target`, `target_rounds`, `target_bytes`; then CCVR's calibration,
    bytes per client and round, dropped replies, test images per client, why it stopped early, and seconds.
    """
    rows = []
    for job in jobs:
        run = job.result
        if not run.ok:
            continue
        summary = run.summary
        row: dict[str, Any] = {**describe(job), "clients": summary["clients"], "rounds": summary["rounds"]}
        for p in PROTOCOLS:
            scores = summary["accuracy"].get(p, {})
            row.update({f"{p}_{name}": scores.get(name) for name in ("last", "best", "last_std")})
            row[f"{p}_pooled"] = summary.get("pooled", {}).get(p)
            row[f"{p}_balanced"] = scores.get("balanced")
            row[f"{p}_worst"], row[f"{p}_worst_decile"] = run.weakest(p)
            row.update({f"{p}_target": math.nan, f"{p}_target_rounds": math.nan, f"{p}_target_bytes": math.nan})
        calibration = summary.get("calibration") or {}
        row.update({f"calibration_{k}": calibration.get(k) for k in ("before", "after", "oracle")})
        row.update(bytes_up=summary["bytes_up"], bytes_down=summary["bytes_down"], dropped=summary["dropped"])
        row.update(test_mean=summary["test_sizes"]["mean"], stopped=summary.get("stopped") or "")
        row.update(run_seconds=summary["seconds"], run=run)
        rows.append(row)
    table = pd.DataFrame(rows)
    if table.empty:
        return table
    numbers = [str(c) for c in table.columns if str(c).startswith(tuple(f"{p}_" for p in (*PROTOCOLS, "calibration")))]
    for name in numbers:
        table[name] = pd.to_numeric(table[name])
    for _, part in table.groupby([*SETTING, "seed"], dropna=False):
        for p in PROTOCOLS:
            goal = part.loc[part["variant"] == reference, f"{p}_last"].mean() if target is None else target
            for index in part.index:
                count, moved = reached(part.at[index, "run"].rounds, f"{p}_accuracy", goal)
                table.loc[index, [f"{p}_target", f"{p}_target_rounds", f"{p}_target_bytes"]] = [goal, count, moved]
    return table.drop(columns="run")


def curves(jobs: Sequence[Job]) -> pd.DataFrame:
    """Return the learning curves, a row a run, round and protocol.

    Returns
    -------
    Columns of :func:`describe`, `round`, `protocol`, `accuracy`, `std` and `pooled` (over clients), `balanced`, `loss`,
    `train_loss`, `total_bytes` (all clients, both ways, up to this round).
    """
    parts = []
    for job in jobs:
        rounds = job.result.rounds
        bytes_so_far = traffic(rounds)
        for p in PROTOCOLS:
            if f"{p}_accuracy" not in rounds or rounds[f"{p}_accuracy"].isna().all():
                continue
            part = pd.DataFrame({"round": rounds["round"], "protocol": p, "accuracy": rounds[f"{p}_accuracy"]})
            for name, column in (
                ("std", f"{p}_accuracy_std"), ("pooled", f"{p}_accuracy_pooled"), ("balanced", f"{p}_balanced"),
                ("loss", f"{p}_loss"), ("train_loss", "train_loss"),
            ):  # fmt: skip
                part[name] = rounds.get(column, math.nan)
            part["total_bytes"] = bytes_so_far
            for place, (name, value) in enumerate(describe(job).items()):
                part.insert(place, name, value)
            parts.append(part)
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


# ---- paired tests ----------------------------------------------------------------------------------------------------


def significance(jobs: Sequence[Job], reference: str) -> pd.DataFrame:
    """Test every method against the reference, paired by client and seed, on the final scores of all clients.

    Returns
    -------
    A row a setting, measure and method: `pairs`, `seeds`, `mean_difference`, `std_over_seeds` (of the seeds' mean
    differences, ddof 1), `p` (:func:`signed_rank` over all pairs), `p_holm` (corrected over the methods of a
    setting and measure). Clients of one seed share a federation, so p speaks of these partitions; the spread over seeds
    stands beside it.
    """
    finals = {(j.setting, j.variant.label, j.seed): j.result.final.set_index("client") for j in jobs}
    rows: list[dict[str, Any]] = []
    for setting in dict.fromkeys(j.setting for j in jobs):
        members = [j for j in jobs if j.setting == setting]
        about = {k: v for k, v in describe(members[0]).items() if k in SETTING}
        for measure in MEASURES:
            tested = []
            for label in dict.fromkeys(j.variant.label for j in members):
                by_seed = []
                for seed in dict.fromkeys(j.seed for j in members):
                    a, b = finals.get((setting, label, seed)), finals.get((setting, reference, seed))
                    if label != reference and a is not None and b is not None and measure in a and measure in b:
                        by_seed.append((a[measure] - b[measure]).dropna().to_numpy(dtype=np.float64))
                by_seed = [d for d in by_seed if len(d)]
                if not by_seed:
                    continue
                mean, std = mean_and_std(d.mean() for d in by_seed)
                tested.append(
                    {
                        **about,
                        "measure": measure,
                        "variant": label,
                        "reference": reference,
                        "pairs": sum(map(len, by_seed)),
                        "seeds": len(by_seed),
                        "mean_difference": mean,
                        "std_over_seeds": std,
                        "p": signed_rank(np.concatenate(by_seed)),
                    }
                )
            for row, corrected in zip(tested, holm([r["p"] for r in tested])):
                rows.append({**row, "p_holm": corrected})
    return pd.DataFrame(rows)


# ---- may they be compared? -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shared:
    """Whether the runs of each seed share partition and sampled clients, in words."""

    ok: bool
    lines: tuple[str, ...]


def participants(table: pd.DataFrame, rounds: set[int]) -> str:
    """Return a hash of who took part in the named rounds; `table` is clients.csv."""
    pairs = sorted((int(r), int(c)) for r, c in zip(table["round"], table["client"]) if int(r) in rounds)
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def verify(jobs: Sequence[Job]) -> Shared:
    """Compare the hashes of partitions and of sampled clients between the methods of each setting and seed.

    Rounds that only some runs have (early stopping), and rounds in which a reply was dropped, are left out.
    """
    lines: list[str] = []
    groups: dict[tuple[str, int], dict[str, RunResult]] = {}
    for job in jobs:
        groups.setdefault((job.setting, job.seed), {})[job.variant.label] = job.result
    for (setting, seed), members in groups.items():
        where = f"{setting} seed {seed}".strip()
        tables = [run.rounds for run in members.values()]
        common = set.intersection(*({int(r) for r in t.loc[t["dropped"] == 0, "round"]} for t in tables))
        for what, hashes in (
            ("partitions", {label: str(run.card["hash"]) for label, run in members.items()}),
            ("sampled clients", {label: participants(run.clients, common) for label, run in members.items()}),
        ):
            if len(set(hashes.values())) > 1:
                named = ", ".join(f"{label} {value[:12]}" for label, value in hashes.items())
                lines.append(f"NOT COMPARABLE, {where}: {what} differ ({named})")
    if lines or not groups:
        return Shared(not lines, tuple(lines))
    seeds, settings = len({s for _, s in groups}), len({s for s, _ in groups})
    where = f"{seeds} seed{'s' if seeds > 1 else ''}" + (f", {settings} settings" if settings > 1 else "")
    return Shared(
        True, (f"checked by hash ({where}): all methods had the same images and the same clients each round",)
    )


# ---- showing ---------------------------------------------------------------------------------------------------------


def setting_title(part: pd.DataFrame) -> str:
    """Name a setting: data set, partition, clients."""
    first = part.iloc[0]
    number = first["alpha"] if not math.isnan(first["alpha"]) else first["classes_per_client"]
    kind = first["partition"] + ("" if math.isnan(number) else f" {number:g}")
    return f"{first['dataset']}, {kind}, {first['clients']} clients"


ACCURACY_COLUMNS: Mapping[str, str] = {
    "received": "received_last", "trained": "trained_last", "best trained": "trained_best",
    "balanced received": "received_balanced", "balanced trained": "trained_balanced", "global": "global_last",
    "global, uncalibrated": "calibration_before",
}  # fmt: skip
MEANING = "received: before local training; trained: after local training"
"""Stands at the top of every table of scores."""


def print_tables(table: pd.DataFrame, tests: pd.DataFrame, titles: Mapping[str, str], notes: Sequence[str]) -> None:
    """Print accuracy, spread over clients and cost, and differences to the reference; three tables a setting.

    Parameters
    ----------
    titles : label -> name of the method.
    """
    if table.empty:
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=max(NARROWEST, console.width))
    for _, part in table.groupby(SETTING, dropna=False, sort=False):
        _print_setting(console, part, tests, titles)
    size = float(table["test_mean"].mean())
    lines = [
        "received, trained: each client's own test split, mean over clients; balanced: mean recall over all classes on "
        "all clients' test images. Last round unless it says best.",
        f"test images per client: {size:.0f} on average, so one image is {100 / max(1.0, size):.1f} points of "
        "one client's own score.",
    ]
    if (table["method"] == "local").any():
        lines.append(ONE_SCORE)
    console.print("\n".join([*lines, *notes]), soft_wrap=True)


def _print_setting(console: Console, part: pd.DataFrame, tests: pd.DataFrame, titles: Mapping[str, str]) -> None:
    order = list(dict.fromkeys(part["variant"]))
    seeds = part["seed"].nunique()
    over = f", mean ± std over {seeds} seeds" if seeds > 1 else ""

    def start(title: str, columns: Sequence[str]) -> Table:
        shown = Table(title=title, title_justify="left")
        shown.add_column("method", no_wrap=True)
        for name in columns:
            shown.add_column(name, justify="right")
        return shown

    rounds = f"{int(part['rounds'].max())} rounds"
    columns = {k: c for k, c in ACCURACY_COLUMNS.items() if part[c].notna().any()}
    shown = start(f"{setting_title(part)}, after {rounds}, in %{over}\n({MEANING})", list(columns))
    for label in order:
        rows = part[part["variant"] == label]
        alone = (rows["method"] == "local").all()
        shown.add_row(
            titles[label], *(DASH if alone and c.startswith("received") else spread(rows[c]) for c in columns.values())
        )
    console.print(shown)
    goals = part["trained_target"]
    goal = f"{100 * goals.mean():.1f} %" + ("" if goals.nunique() == 1 else " (mean)") if goals.notna().any() else "-"
    shown = start(
        "Weak clients (after local training, in %), what it took, and traffic per client and round",
        ["worst client", "worst tenth", f"rounds to {goal}", "MB to it, all clients", "bytes up",
         "bytes down", "dropped", "seconds"],
    )  # fmt: skip
    for label in order:
        rows = part[part["variant"] == label]
        shown.add_row(
            titles[label], spread(rows["trained_worst"]), spread(rows["trained_worst_decile"]),
            until(rows["trained_target_rounds"]), until(rows["trained_target_bytes"], 1e-6, 2),
            f"{rows['bytes_up'].mean():,.0f}", f"{rows['bytes_down'].mean():,.0f}", f"{int(rows['dropped'].sum())}",
            f"{rows['run_seconds'].mean():,.0f}",
        )  # fmt: skip
    console.print(shown)
    if tests.empty:
        return
    first = part.iloc[0]
    here = np.ones(len(tests), dtype=bool)
    for key in SETTING:
        here &= (tests[key].isna() if pd.isna(first[key]) else tests[key] == first[key]).to_numpy()
    mine = tests[here]
    if mine.empty:
        return
    names = {
        "received_accuracy": "received", "trained_accuracy": "trained", "received_balanced": "balanced received",
        "trained_balanced": "balanced trained",
    }  # fmt: skip
    measures = [m for m in names if (mine["measure"] == m).any()]
    reference = titles[mine["reference"].iloc[0]]
    shown = start(
        f"Difference to {reference} in points, paired over clients{' and seeds' if seeds > 1 else ''} "
        f"(Wilcoxon signed-rank, p after Holm)\n({MEANING})",
        [names[m] for m in measures],
    )
    for label in order:
        cells = []
        for measure in measures:
            row = mine[(mine["variant"] == label) & (mine["measure"] == measure)]
            if row.empty:
                cells.append(DASH)
                continue
            d, s = 100 * row["mean_difference"].iloc[0], 100 * row["std_over_seeds"].iloc[0]
            cells.append(f"{d:+.1f}{'' if math.isnan(s) else f' ± {s:.1f}'}, {probability(row['p_holm'].iloc[0])}")
        if any(c != DASH for c in cells):
            shown.add_row(titles[label], *cells)
    console.print(shown)


def write(out: Path, jobs: Sequence[Job], reference: str, target: float | None, notes: Sequence[str]) -> pd.DataFrame:
    """Write `results.csv`, `curves.csv` and `significance.csv` of the finished runs, and print the tables."""
    table = results(jobs, reference, target)
    tests = significance(jobs, reference)
    if not table.empty:
        table.to_csv(out / "results.csv", index=False)
        curves(jobs).to_csv(out / "curves.csv", index=False)
        tests.to_csv(out / "significance.csv", index=False)
    warnings = {f"{j.variant.label}: {w}": None for j in jobs for w in j.result.summary.get("warnings", [])}
    print_tables(table, tests, {j.variant.label: j.variant.title for j in jobs}, [*notes, *warnings])
    return table
