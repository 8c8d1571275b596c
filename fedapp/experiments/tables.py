"""From finished runs to tidy tables: results, curves, differences, and whether the runs may be compared at all."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedapp.data.partitions import PARTITION_PARAMETER
from fedapp.errors import counted
from fedapp.experiments.jobs import Job
from fedapp.results.answers import HARM, SETTING
from fedapp.results.cells import write_table
from fedapp.results.directory import write_json
from fedapp.results.intervals import differences_of, margin_of
from fedapp.results.runs import AGAIN, RunResult, refuse
from fedapp.results.statistics import Floats, harm, holm, mean_and_std, measured, privacy, reached
from fedapp.results.tables import FEWEST_CLIENTS, TUNED
from fedapp.settings.evaluation import PROTOCOLS
from fedapp.tasks import identity

BALANCED = "balanced"
MEASURES = (
    "headline",
    f"headline_{BALANCED}",
    "headline_worst_tenth",
    *(f"{p}_{name}" for name in ("accuracy", BALANCED) for p in ("received", "trained", TUNED)),
)
"""What methods are compared on: the score that each is judged by, and columns of final.csv."""
SPREAD = ("std", "worst_decile", "worst")
"""What the tables say of a metric besides its mean over clients."""


# ---- reading runs ----------------------------------------------------------------------------------------------------


def describe(job: Job) -> dict[str, Any]:
    """Return the columns that say which run a row is of."""
    c = job.config
    key = PARTITION_PARAMETER.get(c.data.partition)
    return {
        "method": job.variant.method, "variant": job.variant.label, "method_args": c.federation.method_args,
        "dataset": c.data.dataset, "partition": c.data.partition, "alpha": c.data.alpha if key == "alpha" else math.nan,
        "classes_per_client": c.data.classes_per_client if key == "classes-per-client" else math.nan,
        "sweep": job.sweep, "seed": job.seed, "partition_seed": c.data_seed,
    }  # fmt: skip


NEEDED = ("clients", "rounds", "accuracy", "bytes_up", "bytes_down", "dropped", "test_sizes", "seconds")
"""What a summary must hold to be compared."""


def results(
    jobs: Sequence[Job], reference: str, target: float | None = None, alone: Sequence[Job] = ()
) -> pd.DataFrame:
    """Return one row per run. Of a run that failed there are the columns of :func:`describe`, `rounds` and `failed`.

    Parameters
    ----------
    reference : label of the method whose last accuracy, seed by seed, is the target where `target` is None.
    alone : runs of Standalone that all `jobs` are compared with; default: those among `jobs`, with all others.

    Returns
    -------
    Columns of :func:`describe`, then `clients`, `rounds`, `round` (the one that is scored), and by protocol `last`,
    `last_std`, `best`, `best_pooled`, `participants`, `validation` (see `accuracy_summary`), `pooled`, `balanced`,
    `worst` (client), `worst_decile`, `target`, `target_rounds`, `target_bytes`, and of each metric that a run measured
    besides accuracy and loss its mean over clients, `_std`, `_worst_decile` and `_worst`; the same of the accuracy and
    the metrics of clients that took no part (`unseen_received`, `unseen_trained@n`, ...); then `headline` (the score
    that the method is judged by), `headline_last` and `all_classes` (its balanced score); `majority` (guessing each
    client's majority class); `gain`, `same`, `lose` (where the runs of a setting include
    Standalone: how many clients gain from the method, see :func:`harm`), CCVR's calibration, bytes per client and
    round, dropped replies, test images per client (mean, median), why it stopped early, what it states of `privacy`
    where any run does, `secure_sum` (1) where any run has it, seconds, and why it `failed` (empty if it did not).

    Raises
    ------
    BadRequest : the summary of a run lacks one of these.
    """
    every, jobs = jobs, [j for j in jobs if j.result.ok]
    references = {(j.setting, j.seed): j.result for j in jobs if j.variant.label == reference}
    lone = {(j.setting, j.seed): j.result for j in reversed(alone or jobs) if j.variant.method == "local"}
    metrics = dict.fromkeys(name for j in jobs for name in j.result.metrics)
    unseen = dict.fromkeys(p for j in jobs for p in j.result.unseen_scores)
    tuned = (TUNED,) if any(TUNED in j.result.protocols for j in jobs) else ()
    rows: list[dict[str, Any]] = []
    for job in every:
        run, summary, row = job.result, job.result.summary, dict(describe(job))
        if not run.ok:
            row |= {"clients": job.config.data.clients, "rounds": len(run.rounds), "failed": run.failure}
            rows.append(row)
            continue
        refuse(run.out / "summary.json", next((f"no {name}" for name in NEEDED if name not in summary), ""))
        row |= {name: summary[name] for name in ("clients", "rounds")}
        row["round"] = summary.get("round", summary["rounds"])
        for p in (*PROTOCOLS, *tuned):
            goal = target
            if goal is None and (job.setting, job.seed) in references:
                goal = references[job.setting, job.seed].summary["accuracy"].get(p, {}).get("last")
            row |= _scores(run, p, math.nan if goal is None else goal) | _metrics(run, p, metrics)
        for p in unseen:
            row |= _metrics(run, p, ("accuracy", *metrics))
        single = lone.get((job.setting, job.seed)) if alone or not run.alone else None
        found = (math.nan,) * 3 if single is None else harm(run.headline_counts(), single.headline_counts())
        row |= {"headline": run.headline, "headline_last": run.score(run.headline), **dict(zip(HARM, found))}
        row |= _of_all_clients(run)
        if any(j.result.privacy for j in jobs):
            row |= {f"privacy_{k}": run.privacy.get(k) for k in ("unit", "epsilon", "delta")}
            row["privacy"] = privacy([run.privacy])
        rows.append({**row, "run_seconds": summary["seconds"], "failed": ""})
    return pd.DataFrame(rows)


def _scores(run: RunResult, protocol: str, goal: float) -> dict[str, Any]:
    """Return the columns of one protocol; `goal` is the accuracy whose rounds and bytes are counted, NaN = none."""
    scores = run.summary["accuracy"].get(protocol, {})
    worst, decile = run.weakest(protocol)
    count, moved = reached(run.curve(protocol, everyone=True), goal)
    told = ("last", "last_std", "best", "best_pooled", "participants", "validation")
    values = {
        **{name: scores.get(name) for name in told}, "pooled": run.summary.get("pooled", {}).get(protocol),
        "balanced": scores.get("balanced"), "worst": worst, "worst_decile": decile, "target": goal,
        "target_rounds": count, "target_bytes": moved,
    }  # fmt: skip
    return {f"{protocol}_{name}": value for name, value in values.items()}


def _of_all_clients(run: RunResult) -> dict[str, Any]:
    """Return the columns from `all_classes` to `stopped`."""
    calibration, sizes = run.summary.get("calibration") or {}, run.summary["test_sizes"] or {}
    return {
        "all_classes": run.score(run.headline, "balanced"), "majority": run.card.get("majority_mean"),
        **{f"calibration_{k}": calibration.get(k) for k in ("before", "after", "oracle")},
        "bytes_up": run.bytes_up, **{k: run.summary[k] for k in ("bytes_down", "dropped")},
        "test_mean": sizes.get("mean"), "test_median": run.test_rows[run.test_rows > 0].median(),
        **({"secure_sum": 1} if run.flat.get("secure-sum") else {}), "stopped": run.summary.get("stopped") or "",
    }  # fmt: skip


def _metrics(run: RunResult, score: str, names: Iterable[str]) -> dict[str, float]:
    """Return the mean over clients of metrics of a score and, but for `global`, their spread, by column."""
    found: dict[str, float] = {}
    for name in names:
        found[f"{score}_{name}"] = run.metric(score, name)
        found |= {f"{score}_{name}_{what}": run.metric(score, name, what) for what in SPREAD if score != "global"}
    return found


def curves(jobs: Sequence[Job]) -> pd.DataFrame:
    """Return the learning curves, one row per run, protocol and point.

    Returns
    -------
    Columns of :func:`describe`, `protocol`, and those of `RunResult.curve`.
    """
    parts = [
        curve.assign(**(about := describe(job)), protocol=p)[[*about, "protocol", *curve.columns]]
        for job, p in product(jobs, PROTOCOLS)
        if len(curve := job.result.curve(p))
    ]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


# ---- differences -----------------------------------------------------------------------------------------------------


def significance(jobs: Sequence[Job], reference: str) -> pd.DataFrame:
    """Compare every method with the reference on the final scores of all clients; each seed gives one number.

    Returns
    -------
    One row per setting, measure and method: `seeds`, `by_seed` (the differences, a JSON list), their mean
    `mean_difference` and spread `std_over_seeds` (ddof 1), the interval `low` to `high` that holds for all methods of a
    setting and measure together (:func:`differences_of`), `margin` and `word` (:class:`Difference`; empty below three
    seeds), the probabilities `worse`, `equal` and `better` by more than the margin, `p` of the t-test, `p_holm`
    corrected over the methods, and `standard_error`.
    Methods that fine-tune are also compared on `tuned`, against the reference's `trained` score where it does not
    fine-tune itself.
    """
    rows: list[dict[str, Any]] = []
    for setting in dict.fromkeys(j.setting for j in jobs):
        members = [j for j in jobs if j.setting == setting]
        about = {k: v for k, v in describe(members[0]).items() if k in SETTING}
        if reference not in {j.variant.label for j in members}:
            continue
        for measure in MEASURES:
            differences, level = _by_seed(members, reference, measure)
            central = measure == "headline" and {j.result.headline for j in members} <= {"global", ""}
            pooled, tenth = central or measure.endswith(BALANCED), measure.endswith("worst_tenth")
            step = float(max(measured(j.result.resolution(pooled, tenth) for j in members), default=math.nan))
            tested = measured(itertools.chain.from_iterable(j.result.test_rows for j in members))
            tested = tested[tested > 0]
            median = float(np.median(tested)) if len(tested) else math.inf
            margin = margin_of(level, 1 / step if pooled else median)
            found = differences_of(differences, step)
            corrected = holm([d.p for d in found.values()])
            rows += [
                {
                    **about, "measure": measure, "variant": label, "reference": reference, "seeds": len(d.values),
                    "by_seed": json.dumps([round(v, 6) for v in d.values.tolist()]), "mean_difference": d.mean,
                    "std_over_seeds": mean_and_std(d.values)[1], "low": d.low, "high": d.high, "margin": margin,
                    "word": d.word(margin), **dict(zip(("worse", "equal", "better"), d.probabilities(margin))),
                    "p": d.p, "p_holm": p, "standard_error": d.error,
                }
                for (label, d), p in zip(found.items(), corrected)
            ]  # fmt: skip
    return pd.DataFrame(rows)


def _by_seed(members: Sequence[Job], reference: str, measure: str) -> tuple[dict[str, Floats], float]:
    """Return each method's differences to the reference, one for each seed of both, and the reference's mean.

    Columns of final.csv are compared client by client.
    """

    def scores_of(run: RunResult, measure: str) -> pd.Series:
        whole = {
            "headline": run.score(run.headline), f"headline_{BALANCED}": run.score(run.headline, BALANCED),
            "headline_worst_tenth": run.weakest(run.headline)[1] if len(run.final) >= FEWEST_CLIENTS else math.nan,
        }  # fmt: skip
        columns = run.final.set_index("client")
        return pd.Series([whole[measure]]) if measure in whole else columns.get(measure, pd.Series(dtype=float))

    scores: dict[str, dict[int, pd.Series]] = {}
    for job in members:
        scores.setdefault(job.variant.label, {})[job.seed] = scores_of(job.result, measure)
    own = scores.pop(reference)
    if measure.startswith(TUNED) and not any(s.notna().any() for s in own.values()):
        trained = measure.replace(TUNED, "trained")
        own = {j.seed: scores_of(j.result, trained) for j in members if j.variant.label == reference}
    differences = {
        label: measured((found - own[seed]).mean() for seed, found in by.items() if seed in own)
        for label, by in scores.items()
    }
    level = mean_and_std(s.mean() for s in own.values())[0]
    return {label: values for label, values in differences.items() if len(values)}, level


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
    unknown: dict[str, None] = {}
    groups: dict[tuple[str, int], dict[str, RunResult]] = {}
    for job in jobs:
        groups.setdefault((job.setting, job.seed), {})[job.variant.label] = job.result
    for (setting, seed), members in groups.items():
        where = f"{setting} seed {seed}".strip()
        trained = {label: run for label, run in members.items() if len(run.rounds)}  # without rounds all are asked once
        whole = (t.loc[t["dropped"] == 0, "round"] for t in (run.rounds for run in trained.values()))
        common = set.intersection(*(set(map(int, rounds)) for rounds in whole)) if trained else set()
        known = {label: identity.data_hash(run.versions) for label, run in members.items()}
        unknown |= dict.fromkeys(label for label, value in known.items() if not value)
        for what, hashes in (
            ("data", {label: value for label, value in known.items() if value}),
            ("partitions", {label: str(run.card["hash"]) for label, run in members.items()}),
            ("sampled clients", {label: participants(run.clients, common) for label, run in trained.items()}),
        ):
            if len(set(hashes.values())) > 1:
                named = ", ".join(f"{label} {value[:12]}" for label, value in hashes.items())
                lines.append(f"NOT COMPARABLE, {where}: {what} differ ({named})")
    if lines or not groups:
        return Shared(not lines, tuple(lines))
    seeds, settings = len({s for _, s in groups}), len({s for s, _ in groups})
    where = counted(seeds, "seed") + (f", {settings} settings" if settings > 1 else "")
    same = "the same division of the data" if unknown else "the same data"
    text = f"checked by hash ({where}): all methods had {same} and the same clients each round"
    told = f"NOT CHECKED: an earlier version, which kept no hash of the data, made runs of {', '.join(unknown)}"
    return Shared(True, (text, *([told] if unknown else [])))


# ---- writing ---------------------------------------------------------------------------------------------------------


def write(
    out: Path,
    jobs: Sequence[Job],
    again: Sequence[Job],
    reference: str,
    target: float | None,
    alerts: Sequence[str],
    notes: Sequence[str],
    command: str = "",
) -> None:
    """Write `results.csv`, `curves.csv`, `significance.csv`, `again.csv` and `notes.json`.

    Parameters
    ----------
    jobs : all runs. One that failed is a row of `results.csv` with its reason.
    again : the second runs of training alone.   alerts, notes : lines for the reader.
    command : that makes the same comparison.
    """
    made = {"results.csv": table} if not (table := results(jobs, reference, target)).empty else {}
    jobs = [j for j in jobs if j.result.ok]
    second = [j for j in again if j.result.ok]
    made |= {"curves.csv": curves(jobs), "significance.csv": significance(jobs, reference)} if jobs else {}
    made |= {f"{AGAIN}.csv": results(second, "", alone=jobs)} if second else {}
    for name in ("results.csv", "curves.csv", "significance.csv", f"{AGAIN}.csv"):
        if name in made:
            write_table(out / name, made[name])
        else:  # a table of an earlier call would be read as one of this call
            (out / name).unlink(missing_ok=True)
    if any(j.result.sampled and not len(j.result.evaluations) for j in jobs):
        notes = [*notes, "completed rounds and MB to a target count points over all clients only; with sampled clients "
                 "that is the end of the run, unless --set evaluate-every=1 adds others"]  # fmt: skip
    warnings = {f"{j.variant.label}: {w}": None for j in jobs for w in j.result.summary.get("warnings", [])}
    told = {"alerts": [*alerts], "notes": [*notes, *warnings], "command": [command], "reference": [reference]}
    write_json(out / "notes.json", told)
