"""The tables of a comparison, made from its CSV files: `fedapp show --all` prints them, its page shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from rich.text import Text

from fedapp.errors import counted, plain
from fedapp.lazy import pd
from fedapp.registry import title_of
from fedapp.results import intervals
from fedapp.results.answers import AGAIN_TITLE, HARM, SETTING, rows_of, setting_title, with_reasons
from fedapp.results.runs import HARM_TEXT, ONE_SCORE, PAIRED, TUNED_PAIRS, UNADJUSTED, Comparison, RunResult
from fedapp.results.statistics import DASH, over, spread, tally, until
from fedapp.results.terminal import Screen, print_fitting
from fedapp.settings.evaluation import PROTOCOLS

TUNED = "tuned"
"""The score of methods that fine-tune; a table without such a method has no columns of it."""
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


def meaning(runs: Sequence[RunResult]) -> str:
    """Say what the scores of runs are; it stands at the top of every table of scores."""
    after = {run.final_training for run in runs}
    last = {True: "after one more local training", False: "as each client was last trained"}
    chosen = {run.selected for run in runs}
    moment = {True: "the round that validation images chose", False: "the last round"}
    received = f"after {' or '.join(moment[c] for c in sorted(chosen))}, before local training"
    tuned = "tuned: received, then fine-tuned by the method; " if any(TUNED in r.protocols for r in runs) else ""
    plain = f"; {UNADJUSTED}" if any(run.adjusted for run in runs) else ""
    return f"{tuned}received: {received}; trained: {' or '.join(last[a] for a in sorted(after, reverse=True))}{plain}"


def print_tables(comparison: Comparison) -> None:
    """Print accuracy, spread over clients and cost, and differences to the reference; three tables a setting."""
    table, tests = comparison.table, comparison.significance
    runs = [run for run in comparison.finished if run.label in {*table.get("variant", ())}]
    if not runs:
        return
    table = with_reasons(table)
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))
    console = Screen(highlight=False)
    for key, whole in table.groupby(SETTING, dropna=False, sort=False):
        part = whole[whole["failed"] == ""]
        lost = [str(label) for label in dict.fromkeys(whole["variant"]) if label not in set(part["variant"])]
        if part.empty:
            console.print_line(f"{setting_title(whole)}: every run failed")
            continue
        here = rows_of(tests, key), rows_of(comparison.again, key).assign(variant=AGAIN_TITLE)
        for title, rows, columns in tables_of(part, *here, meaning(runs), metrics):
            groups = [(title_of(str(label)), mine) for label, mine in rows.groupby("variant", sort=False)]
            failed = [title_of(label) for label in lost] if "failed" in rows else []
            console.print(Text(plain(title, whole=True), style="table.title"))
            print_fitting(
                console,
                [*(name for name, _ in groups), *failed],
                {
                    head: [*(cell(mine) for _, mine in groups), *([DASH if at else "failed"] * len(failed))]
                    for at, (head, cell) in enumerate(columns.items())
                },
            )
    lines = [
        "received, trained: each client's own test split, mean over all clients; balanced: mean recall over all "
        "classes on all clients' test images."
    ]
    if (table["method"] == "local").any():
        lines.append(f"{ONE_SCORE} {PAIRED}")
    if len(tests) and tests["measure"].str.startswith(TUNED).any():
        lines.append(TUNED_PAIRS)
    if table["gain"].notna().any():
        lines.append(HARM_TEXT)
    by = table[table["failed"] == ""].groupby("headline", sort=False)["variant"].unique()
    judged = [f"{score} for {', '.join(title_of(str(v)) for v in names)}" for score, names in by.items() if score]
    lines.append(f"headline, the score that a method is judged by: {'; '.join(judged)}.")
    console.print_line("\n".join([*lines, *comparison.notes["notes"]]))


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


def tables_of(
    part: pd.DataFrame, tests: pd.DataFrame, again: pd.DataFrame, meaning: str, metrics: Sequence[str] = ()
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
        pd.concat([part, again]) if len(again) else part,
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
        named = {"headline_worst_tenth": "headline, worst tenth"}
        measures = tests["measure"].unique()
        names = {m: named.get(m) or " ".join(m.removesuffix("_accuracy").split("_")[::-1]) for m in measures}
        judged = "95 % interval that holds for all methods of the column" if seeds > 2 else "one value for each seed"
        yield (
            f"Difference to {title_of(tests['reference'].iloc[0])} in points, {judged}\n({meaning})",
            tests,
            {name: partial(_difference, measure=measure) for measure, name in names.items()},
        )
