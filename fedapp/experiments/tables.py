"""From finished runs to tidy tables: results, curves, differences, and whether the runs may be compared at all."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from rich.table import Column, Table
from rich.text import Text

from fedapp.data.partitions import PARTITION_PARAMETER
from fedapp.errors import counted
from fedapp.experiments.jobs import Job
from fedapp.results import intervals
from fedapp.results.cells import write_table
from fedapp.results.intervals import differences_of, margin_of
from fedapp.results.runs import HARM_TEXT, ONE_SCORE, PAIRED, TUNED_PAIRS, UNADJUSTED, RunResult, refuse
from fedapp.results.statistics import (
    DASH,
    harm,
    holm,
    mean_and_std,
    over,
    privacy,
    reached,
    spread,
    tally,
    until,
)  # fmt: skip
from fedapp.results.terminal import Screen
from fedapp.settings.evaluation import PROTOCOLS
from fedapp.tasks import identity

TUNED = "tuned"
"""The score of methods that fine-tune; a table without such a method has no columns of it."""
BALANCED = "balanced"
MEASURES = tuple(f"{p}_{name}" for name in ("accuracy", BALANCED) for p in ("received", "trained", TUNED))
"""Columns of final.csv that methods are tested on."""
SPREAD = ("std", "worst_decile", "worst")
"""What the tables say of a metric beside its mean over clients."""
EDGES = 3
"""Columns of a terminal that the edge and the padding of a table's column take."""
HARM = ("gain", "same", "lose")
"""Columns that say how many clients a method helps and harms, against training alone."""
NARROWEST = 150
"""Columns of a table that goes to a file or a pipe."""


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


SETTING = ["dataset", "partition", "alpha", "classes_per_client", "sweep"]
NEEDED = ("clients", "rounds", "accuracy", "bytes_up", "bytes_down", "dropped", "test_sizes", "seconds")
"""What a summary must hold to be compared."""


def results(jobs: Sequence[Job], reference: str, target: float | None = None) -> pd.DataFrame:
    """Return one row per run. Of a run that failed there are the columns of :func:`describe`, `rounds` and `failed`.

    Parameters
    ----------
    reference : label of the method whose last accuracy, seed by seed, is the target where `target` is None.

    Returns
    -------
    Columns of :func:`describe`, then `clients`, `rounds`, `round` (the one that is scored), and by protocol `last`,
    `last_std`, `best`, `best_pooled`, `participants`, `validation` (see `accuracy_summary`), `pooled`, `balanced`,
    `worst` (client), `worst_decile`, `target`, `target_rounds`, `target_bytes`, and of each metric that a run measured
    beside accuracy and loss its mean over clients, `_std`, `_worst_decile` and `_worst`; the same of the accuracy and
    the metrics of clients that took no part (`unseen_received`, `unseen_trained@n`, ...); then `headline` (the score
    that the method is judged by) and `headline_last`; `gain`, `same`, `lose` (where the runs of a setting include
    Standalone: how many clients gain from the method, see :func:`harm`), CCVR's calibration, bytes per client and
    round, dropped replies, test images per client, why it stopped early, what it states of `privacy` where any run
    does, seconds, and why it `failed` (empty if it did not).

    Raises
    ------
    BadRequest : the summary of a run lacks one of these.
    """
    every, jobs = jobs, [j for j in jobs if j.result.ok]
    references = {(j.setting, j.seed): j.result for j in jobs if j.variant.label == reference}
    alone = {(j.setting, j.seed): j.result for j in reversed(jobs) if j.variant.method == "local"}
    metrics = dict.fromkeys(name for j in jobs for name in j.result.metrics)
    unseen = dict.fromkeys(p for j in jobs for p in j.result.unseen_scores)
    tuned = (TUNED,) if any(TUNED in j.result.protocols for j in jobs) else ()
    rows: list[dict[str, Any]] = []
    for job in every:
        run, summary = job.result, job.result.summary
        if not run.ok:
            done = {"clients": job.config.data.clients, "rounds": len(run.rounds)}
            rows.append({**describe(job), **done, "failed": run.failure})
            continue
        refuse(run.out / "summary.json", next((f"no {name}" for name in NEEDED if name not in summary), ""))
        row: dict[str, Any] = {
            **describe(job), "clients": summary["clients"], "rounds": summary["rounds"],
            "round": summary.get("round", summary["rounds"]),
        }  # fmt: skip
        for p in (*PROTOCOLS, *tuned):
            scores = summary["accuracy"].get(p, {})
            goal = target
            if goal is None and (job.setting, job.seed) in references:
                goal = references[job.setting, job.seed].summary["accuracy"].get(p, {}).get("last")
            goal = math.nan if goal is None else goal
            worst, decile = run.weakest(p)
            count, moved = reached(run.curve(p, everyone=True), goal)
            values = {
                **{name: scores.get(name) for name in ("last", "last_std", "best", "best_pooled", "participants")},
                "validation": scores.get("validation"),
                "pooled": summary.get("pooled", {}).get(p), "balanced": scores.get("balanced"), "worst": worst,
                "worst_decile": decile, "target": goal, "target_rounds": count, "target_bytes": moved,
            }  # fmt: skip
            row.update({f"{p}_{name}": value for name, value in values.items()})
            for name in metrics:
                row[f"{p}_{name}"] = run.metric(p, name)
                if p != "global":
                    row |= {f"{p}_{name}_{what}": run.metric(p, name, what) for what in SPREAD}
        for p, name in product(unseen, ("accuracy", *metrics)):
            row[f"{p}_{name}"] = run.metric(p, name)
            row |= {f"{p}_{name}_{what}": run.metric(p, name, what) for what in SPREAD}
        lone = None if run.alone else alone.get((job.setting, job.seed))
        found = (math.nan,) * 3 if lone is None else harm(run.headline_counts(), lone.headline_counts())
        row |= {"headline": run.headline, "headline_last": run.score(run.headline), **dict(zip(HARM, found))}
        calibration = summary.get("calibration") or {}
        row.update({f"calibration_{k}": calibration.get(k) for k in ("before", "after", "oracle")})
        row.update({k: summary[k] for k in ("bytes_up", "bytes_down", "dropped")})
        row.update(test_mean=(summary["test_sizes"] or {}).get("mean"), stopped=summary.get("stopped") or "")
        if any(j.result.privacy for j in jobs):
            row |= {f"privacy_{k}": run.privacy.get(k) for k in ("unit", "epsilon", "delta")}
            row["privacy"] = privacy([run.privacy])
        rows.append({**row, "run_seconds": summary["seconds"], "failed": ""})
    return pd.DataFrame(rows)


def curves(jobs: Sequence[Job]) -> pd.DataFrame:
    """Return the learning curves, one row per run, protocol and point.

    Returns
    -------
    Columns of :func:`describe`, `protocol`, and those of `RunResult.curve`.
    """
    parts = []
    for job in jobs:
        for p in PROTOCOLS:
            curve = job.result.curve(p)
            if len(curve):
                parts.append(curve.assign(**describe(job), protocol=p)[[*describe(job), "protocol", *curve.columns]])
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


# ---- differences -----------------------------------------------------------------------------------------------------


def significance(jobs: Sequence[Job], reference: str) -> pd.DataFrame:
    """Compare every method with the reference on the final scores of all clients; each seed gives one number.

    Returns
    -------
    One row per setting, measure and method: `seeds`, `by_seed` (the differences, separated by blanks), their mean
    `mean_difference` and spread `std_over_seeds` (ddof 1), the interval `low` to `high` that holds for all methods of a
    setting and measure together (:func:`differences_of`), `margin` and `word` (:class:`Difference`), the probabilities
    `worse`, `equal` and `better` by more than the margin, `p` of the t-test and `p_holm` corrected over the methods.
    Methods that fine-tune are also compared on `tuned`, against the reference's `trained` score where it does not
    fine-tune itself.
    """
    rows: list[dict[str, Any]] = []
    for setting in dict.fromkeys(j.setting for j in jobs):
        members = [j for j in jobs if j.setting == setting]
        about = {k: v for k, v in describe(members[0]).items() if k in SETTING}
        labels = dict.fromkeys(j.variant.label for j in members)
        finals = pd.concat([j.result.final.assign(variant=j.variant.label, seed=j.seed) for j in members])
        for measure in MEASURES if reference in labels else ():
            if measure not in finals:
                continue
            scores = finals.pivot(index=["seed", "client"], columns="variant", values=measure)
            if measure.startswith(TUNED) and scores[reference].isna().all():
                trained = finals[finals["variant"] == reference].set_index(["seed", "client"])
                scores[reference] = trained[measure.replace(TUNED, "trained")]
            differences = {
                label: by_seed.to_numpy()
                for label in labels
                if label != reference
                and len(by_seed := (scores[label] - scores[reference]).groupby("seed").mean().dropna())
            }
            pooled = measure.endswith(BALANCED)
            step = max(j.result.resolution(pooled) for j in members)
            tested = np.median(np.concatenate([j.result.test_rows for j in members]))
            margin = margin_of(float(scores[reference].mean()), 1 / step if pooled else float(tested))
            found = differences_of(differences, step)
            corrected = holm([d.p for d in found.values()])
            rows += [
                {
                    **about, "measure": measure, "variant": label, "reference": reference, "seeds": len(d.values),
                    "by_seed": " ".join(f"{v:.6f}" for v in d.values), "mean_difference": d.mean,
                    "std_over_seeds": mean_and_std(d.values)[1], "low": d.low, "high": d.high, "margin": margin,
                    "word": d.word(margin), **dict(zip(("worse", "equal", "better"), d.probabilities(margin))),
                    "p": d.p, "p_holm": p, "standard_error": d.error,
                }
                for (label, d), p in zip(found.items(), corrected)
            ]  # fmt: skip
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
    unknown: dict[str, None] = {}
    groups: dict[tuple[str, int], dict[str, RunResult]] = {}
    for job in jobs:
        groups.setdefault((job.setting, job.seed), {})[job.variant.label] = job.result
    for (setting, seed), members in groups.items():
        where = f"{setting} seed {seed}".strip()
        tables = [run.rounds for run in members.values()]
        common = set.intersection(*({int(r) for r in t.loc[t["dropped"] == 0, "round"]} for t in tables))
        known = {label: identity.data_hash(run.versions) for label, run in members.items()}
        unknown |= dict.fromkeys(label for label, value in known.items() if not value)
        for what, hashes in (
            ("data", {label: value for label, value in known.items() if value}),
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
    same = "the same division of the data" if unknown else "the same data"
    text = f"checked by hash ({where}): all methods had {same} and the same clients each round"
    told = f"NOT CHECKED: an earlier version, which kept no hash of the data, made runs of {', '.join(unknown)}"
    return Shared(True, (text, *([told] if unknown else [])))


# ---- showing ---------------------------------------------------------------------------------------------------------


def setting_title(part: pd.DataFrame) -> str:
    """Name a setting: data set, partition, clients."""
    first = part.iloc[0]
    number = first["alpha"] if not math.isnan(first["alpha"]) else first["classes_per_client"]
    kind = first["partition"] + ("" if math.isnan(number) else f" {number:g}")
    return ", ".join(filter(None, (first["dataset"], kind, f"{counted(first['clients'], 'client')}", first["sweep"])))


SCORES: Mapping[str, str] = {
    "headline": "headline_last",
    "tuned": "tuned_last",
    "trained": "trained_last", "received": "received_last", "trained, last round's clients": "trained_participants",
    "validation": "trained_validation",
    "balanced received": "received_balanced", "balanced trained": "trained_balanced", "global": "global_last",
    "global, uncalibrated": "calibration_before",
}  # fmt: skip
"""Columns of the first table of a setting -> columns of results.csv."""
Columns: TypeAlias = Mapping[str, Callable[[pd.DataFrame], str]]
"""Columns of a printed table -> what writes the cell of one method from its rows."""


def meaning(jobs: Sequence[Job]) -> str:
    """Say what the scores of runs are; it stands at the top of every table of scores."""
    after = {j.result.final_training for j in jobs}
    last = {True: "after one more local training", False: "as each client was last trained"}
    chosen = {j.result.selected for j in jobs}
    moment = {True: "the round that validation images chose", False: "the last round"}
    received = f"after {' or '.join(moment[c] for c in sorted(chosen))}, before local training"
    tuned = "tuned: received, then fine-tuned by the method; " if any(TUNED in j.result.protocols for j in jobs) else ""
    plain = f"; {UNADJUSTED}" if any(j.result.adjusted for j in jobs) else ""
    return f"{tuned}received: {received}; trained: {' or '.join(last[a] for a in sorted(after, reverse=True))}{plain}"


def print_tables(
    table: pd.DataFrame,
    tests: pd.DataFrame,
    titles: Mapping[str, str],
    notes: Sequence[str],
    meaning: str,
    metrics: Sequence[str] = (),
) -> None:
    """Print accuracy, spread over clients and cost, and differences to the reference; three tables a setting.

    Parameters
    ----------
    titles : label -> name of the method.   meaning : what the scores are.
    metrics : columns of the metrics beside accuracy and loss; they have a table of their own.
    """
    if table.empty:
        return
    console = Screen(highlight=False)
    if not console.is_terminal:
        console = Screen(highlight=False, width=max(NARROWEST, console.width))
    for _, whole in table.groupby(SETTING, dropna=False, sort=False):
        part = whole[whole["failed"] == ""]
        if part.empty:
            console.print_line(f"{setting_title(whole)}: every run failed")
            continue
        lost = [label for label in dict.fromkeys(whole["variant"]) if label not in set(part["variant"])]
        here = tests if tests.empty else tests.merge(part[SETTING].drop_duplicates())
        for title, rows, columns in _tables(part, here, titles, meaning, metrics):
            groups = [(titles[str(label)], mine) for label, mine in rows.groupby("variant", sort=False)]
            failed = [titles[label] for label in lost] if rows is part else []
            console.print(Text(title, style="table.title"))
            print_fitting(
                console,
                [*(name for name, _ in groups), *failed],
                {
                    head: [*(cell(mine) for _, mine in groups), *([DASH if at else "failed"] * len(failed))]
                    for at, (head, cell) in enumerate(columns.items())
                },
            )
    if not (table["failed"] == "").any():
        return
    size = float(table["test_mean"].mean())
    lines = [
        "received, trained: each client's own test split, mean over all clients; balanced: mean recall over all "
        "classes on all clients' test images.",
        f"test images per client: {size:.0f} on average, so one image is {100 / max(1.0, size):.1f} points of "
        "one client's own score.",
    ]
    if (table["method"] == "local").any():
        lines.append(ONE_SCORE if tests.empty else f"{ONE_SCORE} {PAIRED}")
    if len(tests) and tests["measure"].str.startswith(TUNED).any():
        lines.append(TUNED_PAIRS)
    if table["gain"].notna().any():
        lines.append(HARM_TEXT)
    lines += [_power(part, titles) for _, part in tests.groupby(SETTING, dropna=False, sort=False)]
    by = table.groupby("headline", sort=False)["variant"].unique()
    judged = [f"{score} for {', '.join(titles[str(v)] for v in names)}" for score, names in by.items() if score]
    lines.append(f"headline, the score that a method is judged by: {'; '.join(judged)}.")
    console.print_line("\n".join([*lines, *notes]))


def print_fitting(console: Screen, names: Sequence[str], columns: Mapping[str, Sequence[str]]) -> None:
    """Print named rows of numbers: several tables where one would be wider than the screen.

    Rich would cut the numbers of a table that is too wide.
    """
    room = console.width - 1 - (max(map(len, ("method", *names))) + EDGES)
    widths = {h: min(room - EDGES, max(map(len, (*h.split(), *cells)))) for h, cells in columns.items()}
    left = list(columns)
    while left:
        taken = itertools.accumulate(widths[head] + EDGES for head in left)
        count = max(1, sum(width <= room for width in taken))
        here, left = left[:count], left[count:]
        shown = Table(Column("method", no_wrap=True))
        spare = room - sum(widths[head] + EDGES for head in here)
        for head in here:
            wider = max(0, min(len(head) - widths[head], spare))
            spare -= wider
            shown.add_column(head, justify="right", width=widths[head] + wider, overflow="fold")
        for row in zip(names, *(columns[head] for head in here), strict=True):
            shown.add_row(*row)
        console.print(shown)


def _score(rows: pd.DataFrame, column: str) -> str:
    alone = (rows["method"] == "local").all()
    return DASH if alone and column.startswith("received") else spread(rows[column])


def _plain(rows: pd.DataFrame, column: str) -> str:
    return spread(rows[column], factor=1, digits=3)


def _percent(rows: pd.DataFrame, column: str) -> str:
    return spread(rows[column])


def _privacy(rows: pd.DataFrame) -> str:
    return str(rows.sort_values("privacy_epsilon")["privacy"].iloc[-1])  # the largest; unknown ones come last


def _difference(rows: pd.DataFrame, measure: str) -> str:
    for _, row in rows[rows["measure"] == measure].iterrows():
        return intervals.in_words(row)
    return DASH


def _power(tests: pd.DataFrame, titles: Mapping[str, str]) -> str:
    """Say what the seeds of a setting could show of `trained`, or of its first measure."""
    ranked = sorted(tests["measure"].unique(), key=lambda m: m != "trained_accuracy")
    rows = tests[tests["measure"] == ranked[0]]
    seeds, reference = int(rows["seeds"].min()), titles[str(rows["reference"].iloc[0])]
    spread_over_seeds = float((rows["standard_error"] * np.sqrt(rows["seeds"])).median())
    return intervals.power_text(seeds, len(rows), reference, spread_over_seeds)


def _tables(
    part: pd.DataFrame, tests: pd.DataFrame, titles: Mapping[str, str], meaning: str, metrics: Sequence[str] = ()
) -> Iterator[tuple[str, pd.DataFrame, Columns]]:
    """Yield the tables of a setting: title, the rows that are grouped by method, columns."""
    seeds = part["seed"].nunique()
    spread_over = f", mean ± std over {over(seeds, part['partition_seed'].nunique())}" if seeds > 1 else ""
    yield (
        f"{setting_title(part)}, after {counted(int(part['rounds'].max()), 'round')}, in %{spread_over}\n({meaning})",
        part,
        {name: partial(_score, column=c) for name, c in SCORES.items() if c in part and part[c].notna().any()},
    )
    further = {f"{p}_{name}": f"{p} {name}" for p in (*PROTOCOLS, TUNED) for name in metrics}
    if shown := [c for c in further if c in part and part[c].notna().any()]:
        worst = {f"trained_{name}_worst_decile": f"trained {name}, worst tenth" for name in metrics}
        columns = {**further, **worst}
        yield (
            f"Further metrics, mean over clients{spread_over}\n({meaning})",
            part,
            {columns[c]: partial(_plain, column=c) for c in [*shown, *(w for w in worst if part[w].notna().any())]},
        )
    unseen = [c for c in part if c.startswith("unseen_") and c.endswith("_accuracy") and part[c].notna().any()]
    if unseen:
        tuned = "tuned: fine-tuned by the method; " if f"unseen_{TUNED}_accuracy" in unseen else ""
        yield (
            f"Clients that took no part in the training, accuracy in %{spread_over}\n"
            f"(received: as a newcomer; {tuned}trained@n: after n local epochs on it; local@n: alone, as long)",
            part,
            {c.removeprefix("unseen_").removesuffix("_accuracy"): partial(_percent, column=c) for c in unseen},
        )
    goals = part["trained_target"].dropna()
    alone = part["gain"].notna().any()
    goal = f"{100 * goals.mean():.1f} %{'' if goals.nunique() == 1 else ' (mean)'}" if len(goals) else "-"
    yield (
        "Clients (the weakest after local training, in %), what it took, and traffic per client and round",
        part,
        {
            "worst client": lambda rows: spread(rows["trained_worst"]),
            "worst tenth": lambda rows: spread(rows["trained_worst_decile"]),
            **({"gain / same / lose": lambda rows: tally(rows[[*HARM]].to_numpy())} if alone else {}),
            f"completed rounds to {goal}": lambda rows: until(rows["trained_target_rounds"]),
            "MB to it, all clients": lambda rows: until(rows["trained_target_bytes"], 1e-6, 2),
            "bytes up": lambda rows: f"{rows['bytes_up'].mean():,.0f}",
            "bytes down": lambda rows: f"{rows['bytes_down'].mean():,.0f}",
            "dropped": lambda rows: f"{int(rows['dropped'].sum())}",
            **({"privacy": _privacy} if "privacy" in part else {}),
            "seconds": lambda rows: f"{rows['run_seconds'].mean():,.0f}",
        },
    )
    if len(tests) and seeds > 1:
        names = {m: " ".join(m.removesuffix("_accuracy").split("_")[::-1]) for m in tests["measure"].unique()}
        judged = "95 % interval that holds for all methods of the column" if seeds > 2 else "one value for each seed"
        yield (
            f"Difference to {titles[tests['reference'].iloc[0]]} in points, {judged}\n({meaning})",
            tests,
            {name: partial(_difference, measure=measure) for measure, name in names.items()},
        )


def write(out: Path, jobs: Sequence[Job], reference: str, target: float | None, notes: Sequence[str]) -> pd.DataFrame:
    """Write `results.csv`, `curves.csv` and `significance.csv`, and print the tables.

    Parameters
    ----------
    jobs : all runs. One that failed is a row of `results.csv` with its reason.
    """
    table = results(jobs, reference, target)
    every, jobs = jobs, [j for j in jobs if j.result.ok]
    tests = significance(jobs, reference)
    if not table.empty:
        write_table(out / "results.csv", table)
    if jobs:
        write_table(out / "curves.csv", curves(jobs))
        write_table(out / "significance.csv", tests)
    if any(j.result.sampled and not len(j.result.evaluations) for j in jobs):
        notes = [*notes, "completed rounds and MB to a target count points over all clients only; with sampled clients "
                 "that is the end of the run, unless --set evaluate-every=1 adds others"]  # fmt: skip
    warnings = {f"{j.variant.label}: {w}": None for j in jobs for w in j.result.summary.get("warnings", [])}
    titles = {j.variant.label: j.variant.title for j in every}
    metrics = list(dict.fromkeys(name for j in jobs for name in j.result.metrics))
    print_tables(table, tests, titles, [*notes, *warnings], meaning(jobs), metrics)
    return table
