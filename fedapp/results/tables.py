"""The tables of a comparison, made from its CSV files: `fedapp show --all` prints them, its page shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rich.text import Text

from fedapp.errors import counted, plain
from fedapp.lazy import pd
from fedapp.registry import title_of
from fedapp.results import intervals
from fedapp.results.answers import AGAIN, AGAIN_TITLE, ALONE, HARM, Answer, answers_of, setting_title
from fedapp.results.intervals import points
from fedapp.results.runs import HARM_TEXT, ONE_SCORE, PAIRED, TUNED_PAIRS, UNADJUSTED, Comparison, RunResult
from fedapp.results.statistics import DASH, over, spread, tally, until
from fedapp.results.terminal import Screen, print_fitting
from fedapp.settings.evaluation import PROTOCOLS

TUNED = "tuned"
"""The score of methods that fine-tune; a table without such a method has no columns of it."""
SCORES = {
    "headline_last": "headline", "tuned_last": "tuned", "trained_last": "trained", "received_last": "received",
    "trained_participants": "trained, last round's clients", "trained_validation": "validation",
    "received_balanced": "received, all classes", "trained_balanced": "trained, all classes", "global_last": "global",
    "calibration_before": "global, uncalibrated",
}  # fmt: skip
"""Columns of results.csv in the first table of a setting, and their heads there."""
FEWEST_CLIENTS = 20
"""Fewer clients have no worst 10 %."""
MOST_NAMED = 12
"""Up to so many clients with names of their own have a column each."""


def meaning(runs: Sequence[RunResult]) -> str:
    """Explain the scores of runs, for the top of every table of scores."""
    after = {run.final_training for run in runs}
    last = {True: "after one more local training", False: "as each client was last trained"}
    chosen = {run.selected for run in runs}
    moment = {True: "the round that validation rows chose", False: "the last round"}
    received = f"after {' or '.join(moment[c] for c in sorted(chosen))}, before local training"
    tuned = "tuned: received, then fine-tuned by the method; " if any(TUNED in r.protocols for r in runs) else ""
    plain = f"; {UNADJUSTED}" if any(run.adjusted for run in runs) else ""
    return f"{tuned}received: {received}; trained: {' or '.join(last[a] for a in sorted(after, reverse=True))}{plain}"


def print_tables(comparison: Comparison) -> None:
    """Print accuracy, spread over clients and cost, and differences to the reference; three tables a setting."""
    runs = [run for run in comparison.finished if run.label in {*comparison.table.get("variant", ())}]
    if not runs:
        return
    answers, console = answers_of(comparison), Screen(highlight=False)
    for answer in answers:
        lost = [label for label in answer.called if label not in answer.methods]
        if answer.finished.empty:
            console.print_line(f"{setting_title(answer.table)}: every run failed")
            continue
        for title, cells in tables_of(answer, runs):
            failed = pd.DataFrame("failed", lost, cells.columns[:1]).reindex(columns=cells.columns, fill_value=DASH)
            shown = pd.concat([cells, failed])
            shown = shown.loc[[v for v in dict.fromkeys([*answer.table["variant"], *shown.index]) if v in shown.index]]
            console.print(Text(plain(title, whole=True), style="table.title"))
            names = {answer.alone: ALONE, AGAIN_TITLE: AGAIN}
            print_fitting(console, [names.get(v) or title_of(v) for v in shown.index], shown.to_dict("list"))
    lines = [
        "received, trained: each client's own test split, mean over all clients; all classes: mean recall over the "
        "classes on all clients' test rows.",
    ]
    whole, measures = pd.concat([answer.finished for answer in answers]), comparison.significance.get("measure", ())
    if (comparison.table["method"] == "local").any():
        lines.append(ONE_SCORE + f" {PAIRED}" * any(answer.reference == answer.alone for answer in answers))
    if any(measure.startswith(TUNED) for measure in measures):
        lines.append(TUNED_PAIRS)
    if whole["gain"].notna().any():
        lines.append(HARM_TEXT)
    by = whole.groupby("headline", sort=False)["variant"].unique()
    judged = [
        f"{score} for {', '.join(answers[0].name(str(v)) for v in names)}" for score, names in by.items() if score
    ]
    lines.append(f"headline, the score that a method is judged by: {'; '.join(judged)}.")
    console.print_line("\n".join([*lines, *comparison.notes["notes"]]))


def _texts(rows: pd.DataFrame, columns: Mapping[str, Callable[[pd.DataFrame], str]]) -> pd.DataFrame:
    """Write the cells of a table, a row for each method; each column is written from the method's rows."""
    groups = dict(tuple(rows.groupby("variant", sort=False)))
    return pd.DataFrame({head: [*map(write, groups.values())] for head, write in columns.items()}, [*groups])


def _spreads(rows: pd.DataFrame, names: Mapping[str, str], **how: Any) -> pd.DataFrame:
    """Write mean and spread over seeds of columns, by the heads that they get; those never measured are left out."""
    known = {head: c for c, head in names.items() if c in rows and rows[c].notna().any()}
    return _texts(rows, {head: partial(_spread, column=c, **how) for head, c in known.items()})


def _spread(rows: pd.DataFrame, column: str, **how: Any) -> str:
    alone = (rows["method"] == "local").all()
    return DASH if alone and column.startswith("received") else spread(rows[column], **how)


def _until(rows: pd.DataFrame, column: str, *how: Any) -> str:
    rows = rows[rows["trained_target"].notna()]  # a repeat has no target, nor has a seed whose reference failed
    return until(rows[column], *how) if rows["trained_last"].notna().any() else DASH


def _privacy(rows: pd.DataFrame) -> str:
    return str(rows.sort_values("privacy_epsilon")["privacy"].iloc[-1])  # the largest; unknown ones come last


def _gain(differences: pd.Series) -> str:
    if differences.isna().all():  # a client without test rows
        return ""
    mean = round(differences.mean(), 9) or 0.0  # no sign of a rounding error
    return f"; {points(mean)} ({(differences > 0).sum()})"


def _named_clients(runs: Sequence[RunResult], reference: str) -> pd.DataFrame:
    """Return the headline score of each client that has a name of its own, by method; empty for many clients.

    Behind it stand the mean difference to training alone, in points, and the seeds in which it is positive.
    """
    scores: dict[str, dict[int, pd.Series]] = {}
    for run in runs:
        if 0 < len(run.names) <= MOST_NAMED:
            names = {i: f"{n} ({i})" if run.names.count(n) > 1 else n for i, n in enumerate(run.names)}
            counts = run.headline_counts().rename(index=names)
            scores.setdefault(run.label, {})[run.seed] = counts["correct"] / counts["total"]
    by_name = {v: pd.DataFrame(found).agg(spread, axis=1) for v, found in scores.items()}
    alone = pd.DataFrame(scores.get(reference, {}))
    for label in scores.keys() - {reference}:
        apart = (pd.DataFrame(scores[label]) - alone).dropna(axis=1, how="all")
        if len(apart.columns):
            by_name[label] += apart.apply(_gain, axis=1)
    return pd.DataFrame(by_name).fillna(DASH).T


def tables_of(answer: Answer, runs: Sequence[RunResult]) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the tables of a setting: title, and the cells of each method."""
    part, again = answer.finished, answer.again.assign(variant=AGAIN_TITLE)
    seeds, metrics = part["seed"].nunique(), dict.fromkeys(name for run in runs for name in run.printed_metrics)
    kind = part["partition"].iloc[0]
    drawn = {run.card["hash"] for run in runs if run.card.get("partition") == kind} or {*part["partition_seed"]}
    partitions = min(len(drawn), part["partition_seed"].nunique())
    spread_over = f", mean ± std over {over(seeds, partitions, kind)}" if seeds > 1 else ""
    meant = f"\n({meaning(runs)})"
    title = f"{setting_title(part)}, after {counted(int(part['rounds'].max()), 'round')}, in %{spread_over}{meant}"
    yield title, _spreads(part, SCORES)
    further = {f"{p}_{name}": f"{p} {name}" for p in (*PROTOCOLS, TUNED) for name in metrics}
    further |= {f"trained_{name}_worst_decile": f"trained {name}, worst 10 %" for name in metrics}
    if len((found := _spreads(part, further, factor=1, digits=3)).columns):
        yield f"Further metrics, mean over clients{spread_over}{meant}", found
    names = [c for c in part if c.startswith("unseen_") and c.endswith("_accuracy")]
    unseen = _spreads(part, {c: c.removeprefix("unseen_").removesuffix("_accuracy") for c in names})
    if len(unseen.columns):
        tuned = "tuned: fine-tuned by the method; " if TUNED in unseen else ""
        yield (
            f"Clients that took no part in the training, accuracy in %{spread_over}\n"
            f"(received: as a newcomer; {tuned}trained@n: after n local epochs on it; local@n: alone, as long)",
            unseen,
        )
    goals = part["trained_target"].dropna()
    alone = part["gain"].notna().any()
    goal = f"{100 * goals.mean():.1f} %{'' if goals.nunique() == 1 else ' (mean)'}" if len(goals) else "-"
    yield (
        "Clients (the weakest after local training, in %), rounds and MB to a target, traffic per client and round",
        _texts(
            pd.concat([part, again]) if len(again) else part,
            {
                "worst client": lambda rows: spread(rows["trained_worst"]),
                **(
                    {"worst 10 %": lambda rows: spread(rows["trained_worst_decile"])}
                    if answer.clients >= FEWEST_CLIENTS
                    else {}
                ),
                **({"gain / same / lose": lambda rows: tally(rows[[*HARM]].to_numpy())} if alone else {}),
                f"rounds until trained {goal}": lambda rows: _until(rows, "trained_target_rounds"),
                "MB to it, all clients": lambda rows: _until(rows, "trained_target_bytes", 1e-6, 2),
                "bytes up": lambda rows: f"{rows['bytes_up'].mean():,.0f}",
                "bytes down": lambda rows: f"{rows['bytes_down'].mean():,.0f}",
                "dropped": lambda rows: f"{int(rows['dropped'].sum())}",
                **({"privacy": _privacy} if "privacy" in part else {}),
                "seconds": lambda rows: f"{rows['run_seconds'].mean():,.0f}",
            },
        ),
    )
    by_name = _named_clients([run for run in runs if answer.tells_of(run)], answer.alone)
    if len(by_name):
        meaning_of = "\n(then the difference to training alone in points, and the number of seeds in which it is > 0)"
        yield f"Clients by name, headline in %{spread_over}{meaning_of * bool(answer.alone)}", by_name
    if answer.tests and seeds > 1:
        columns = {
            m.removesuffix("_accuracy").replace("_balanced", ", all classes").replace("_worst_tenth", ", worst 10 %"): {
                label: intervals.in_words(row) for label, row in rows.items()
            }
            for m, rows in answer.tests.items()
        }
        judged = "95 % interval that holds for all methods of the column" if seeds > 2 else "one value for each seed"
        yield (
            f"Difference to {answer.name(answer.reference)} in points, {judged}{meant}",
            pd.DataFrame(columns).fillna(DASH),
        )
