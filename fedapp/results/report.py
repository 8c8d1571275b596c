"""`fedapp report`: one self-contained HTML page of a run, or of a comparison.

The page has no script, loads nothing (a content security policy in its head forbids it) and says of every figure that
it lacks why, and which command makes what is missing. This file makes the tables, the templates hold the words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.text import Text
from threadpoolctl import threadpool_limits

from fedapp import config as configuration
from fedapp.errors import BadRequest, plain
from fedapp.registry import method_title, title_of
from fedapp.results import figures, intervals
from fedapp.results.answers import AGAIN_TITLE, HARM, on_page
from fedapp.results.directory import write_text
from fedapp.results.figures import Gallery, Progress
from fedapp.results.figures.words import setting_text
from fedapp.results.page import MOST_ROWS, Cell, Table, meaning, place, render, share
from fedapp.results.runs import (
    PROTOCOL_TEXT,
    Comparison,
    RunResult,
    groups_of,
    read,
    read_table,
    uses,
    varying,
)  # fmt: skip
from fedapp.results.statistics import (
    DASH,
    duration,
    harm,
    mean_and_std,
    measured,
    number,
    over,
    percent,
    privacy,
    size,
    spread,
    tally,
    traffic,
    until,
)  # fmt: skip
from fedapp.results.terminal import Screen
from fedapp.settings.evaluation import PROTOCOLS

PAGE = "report.html"


def write(
    directory: str | Path,
    figures_to: str | Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write `report.html` into a run directory or the folder of a comparison.

    Parameters
    ----------
    directory : a run directory (finished or not), or a folder with run directories below it.
    figures_to : folder for the figures as PNG and SVG files too.
    progress : hears of each figure before it is drawn: its number, how many there are, its title.

    Returns
    -------
    The page's absolute path.

    Raises
    ------
    BadRequest : no run there, or a folder that cannot be written.
    """
    found = read(Path(directory))
    # Several threads wait for each other longer than they help with figures of this size.
    with threadpool_limits(limits=1):
        if isinstance(found, RunResult):
            gallery = figures.of_run(found, progress)
            page = of_run(found, gallery)
        else:
            gallery = figures.of_comparison(found, progress)
            page = of_comparison(found, gallery)
    try:
        target = found.out / PAGE
        write_text(target, page)
        if figures_to is not None:
            for drawing in gallery.drawings:
                drawing.save(Path(figures_to).expanduser().absolute())
    except OSError as e:
        raise BadRequest(f"{e.filename or found.out} cannot be written ({e.strerror})") from e
    return target


@contextmanager
def on_terminal() -> Iterator[Progress]:
    """Show on the terminal which figure is being drawn, in a line that vanishes; nothing where stderr is no terminal.

    The parameter `progress` of :func:`write` takes what it yields.
    """
    screen = Screen(stderr=True, highlight=False)
    if not screen.is_terminal:  # in a notebook rich would warn of a missing ipywidgets with each figure
        yield lambda number, count, title: None
        return
    with screen.status("drawing the report") as status:
        yield lambda number, count, title: status.update(
            Text(plain(f"drawing the report: figure {number} of {count}, {title}"))
        )


# ---- one run ---------------------------------------------------------------------------------------------------------


def of_run(run: RunResult, gallery: Gallery) -> str:
    """Return the page of a run with its figures."""
    scored = [p for p in run.protocols if not math.isnan(run.score(p))]
    own, usual = _configuration(run)
    return render(
        "run.html.jinja",
        gallery,
        run=run,
        scored=scored,
        done=int(run.rounds["round"].max()) if len(run.rounds) else 0,
        test_images=_test_images([run]),
        tables={
            "scores": _scores(run, scored),
            "metrics": _metrics(run),
            "clients": _client_table(run),
            "rounds": _rounds_table(run),
            "counts": _counts(run),
            "traffic": _traffic(run),
            "times": _times(run),
            "further": _further(run),
            "dropped": _dropped(run),
            "own": own,
            "usual": usual,
            "versions": Table(["what", "version"], [[k, str(v)] for k, v in run.versions.items()]),
        },
    )


def _scores(run: RunResult, protocols: Sequence[str]) -> Table:
    pooled = run.summary.get("pooled") or {}
    named = {"validation": "validation", "participants": "last round's clients"}
    more = {key: name for key, name in named.items() if any(not math.isnan(run.score(p, key)) for p in protocols)}
    rows = [
        [
            meaning([p], [run]), share(run.score(p)), share(run.score(p, "last_std")), share(pooled.get(p)),
            share(run.score(p, "balanced")),
            *(share(run.score(p, key)) for key in more),
        ]
        for p in protocols
    ]  # fmt: skip
    head = [
        "accuracy in %",
        "all clients",
        "std over clients",
        "pooled",
        "balanced",
    ]
    return Table([*head, *more.values()], rows)


def _metrics(run: RunResult) -> Table:
    """Return the metrics of each score with their spread over clients; nothing where there are only the usual ones."""
    wide = ("mean", "std", "worst_decile", "worst")
    rows = [
        [f"{p} {name}", *(Cell(number(run.metric(p, name, what))) for what in wide)]
        for p in (*run.protocols, *run.unseen_scores)
        for name in ("accuracy", *run.metrics, "loss")
        if (run.metrics or p in run.unseen_scores) and not math.isnan(run.metric(p, name))
    ]
    return Table(["further metrics", "mean over clients", "std", "worst tenth", "worst client"], rows)


def _test_images(runs: Sequence[RunResult]) -> float:
    """Return the mean number of a client's test images; 0 where it is not known."""
    mean, _ = mean_and_std((r.summary.get("test_sizes") or {}).get("mean") for r in runs)
    return 0.0 if math.isnan(mean) else mean


def _client_table(run: RunResult) -> Table:
    table, majority = run.final, run.card.get("majority") or []
    shown = [p for p in run.protocols if p != "global" and f"{p}_accuracy" in table]
    total = next((f"{p}_total" for p in shown if f"{p}_total" in table), "")
    rows = []
    for _, row in table.head(MOST_ROWS).iterrows():
        client, tests = int(row["client"]), row.get(total, math.nan)
        rows.append(
            [
                Cell(run.name_of(client)), run.config.model.name_of(client) if run.config is not None else "?",
                int(row["num_samples"]), tests if math.isnan(tests) else int(tests),
                *(share(row[f"{p}_accuracy"]) for p in shown), *(share(row.get(f"{p}_balanced")) for p in shown),
                share(majority[client] if client < len(majority) else None),
            ]
        )  # fmt: skip
    scores = [*(f"{p} %" for p in shown), *(f"{p} balanced %" for p in shown)]
    head = ["client", "model", "training images", "test images", *scores, "majority class %"]
    return Table(head, rows, meaning(shown))


def _rounds_table(run: RunResult) -> Table:
    whole = ("round", "clients", "dropped")
    shares = [f"{p}_{what}" for p in run.protocols for what in ("accuracy", "balanced")]
    columns = [
        c for c in run.rounds if c in (*whole, "train_loss", "round_seconds", *shares) and run.rounds[c].notna().any()
    ]
    rows = [
        [share(v) if c in shares else Cell(str(int(v))) if c in whole else float(v) for c, v in zip(columns, row)]
        for row in run.rounds[columns].tail(MOST_ROWS).itertuples(index=False)
    ]
    names = (c.replace("_accuracy", " %").replace("_balanced", " balanced %").replace("_", " ") for c in columns)
    return Table(names, rows, meaning(run.protocols, [run]))


def _counts(run: RunResult) -> Table:
    """Return the training images by client and class; with many classes only how many of them a client holds."""
    card, named = run.card, len(run.classes) <= 26
    rows = [
        [
            Cell(run.name_of(client)),
            *([Cell(f"{c:,}" if c else "·") for c in counts] if named else [int(np.count_nonzero(counts))]),
            card["train_sizes"][client], card["test_sizes"][client], share(card["majority"][client]),
        ]
        for client, counts in enumerate(card.get("train", [])[:MOST_ROWS])
    ]  # fmt: skip
    return Table(["client", *(run.classes if named else ["classes held"]), "train", "test", "majority %"], rows)


def _traffic(run: RunResult) -> Table:
    summary, rounds = run.summary, run.rounds
    moved: dict[str, float] = {}
    if summary.get("bytes_up") is not None:
        moved["arrays that a client sends in a round"] = summary["bytes_up"]
        moved["arrays that a client receives in a round"] = summary.get("bytes_down") or 0
    for key, value in summary.items():
        if key.startswith("bytes_up_query"):
            moved[f"answer of a client to {key.removeprefix('bytes_up_')}"] = value
    if "bytes_up" in rounds and len(rounds):
        moved["all clients and rounds, both ways"] = traffic(rounds)[-1]
    return Table(["traffic", "bytes", "about"], [[k, Cell(f"{n:,.0f}"), Cell(size(n))] for k, n in moved.items()])


def _times(run: RunResult) -> Table:
    seconds, training = (run.rounds.get(c, pd.Series(dtype=float)) for c in ("round_seconds", "train_seconds"))
    times: dict[str, Any] = {}
    if len(seconds):
        times["a round, median"] = seconds.median()
        times["first round (with the start of the workers)"] = seconds.iloc[0]
    if len(training):
        times["local training of a client in a round, mean"] = training.mean()
    if run.summary.get("seconds") is not None:
        times["whole run"] = run.summary["seconds"]
    return Table(["time", "wall clock"], [[k, Cell(duration(t))] for k, t in times.items()])


KNOWN = {
    "ok", "method", "dataset", "model", "clients", "rounds", "seed", "accuracy", "pooled", "test_sizes", "bytes_up",
    "bytes_down", "dropped", "headline", "metrics", "round", "stopped", "warnings", "seconds", "error",
}  # fmt: skip
"""Keys of summary.json that the page shows elsewhere; all others are the method's own."""


def _further(run: RunResult) -> Table:
    rows = []
    for key, value in run.summary.items():
        if key not in KNOWN and not key.startswith("bytes_up_query") and value not in (None, {}, []):
            text = _plain(value)
            rows.append([key, text if len(text) <= 600 else f"{text[:600]} … (all in summary.json)"])
    return Table(["name", "value"], rows)


def _plain(value: Any) -> str:
    """Write a JSON value for people: four digits, no quotes and braces where words do."""
    if value in (None, [], {}):
        return "none"
    if isinstance(value, dict):
        return "; ".join(f"{k}: {_plain(v)}" for k, v in value.items())
    if isinstance(value, list):
        nested = any(isinstance(v, (list, dict)) for v in value)
        return ", ".join(f"[{_plain(v)}]" if nested else _plain(v) for v in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _dropped(run: RunResult) -> Table:
    rows = [
        [Cell(str(r["round"])), Cell(run.name_of(int(r["client"]))), str(r["stage"]), str(r["reason"])]
        for _, r in run.dropped.head(MOST_ROWS).iterrows()
    ]
    return Table(["round", "client", "stage", "reason"], rows)


def _configuration(run: RunResult) -> tuple[Table, Table]:
    """Return the keys that differ from their defaults, and those that do not."""
    own, usual = [], []
    for key, value in run.flat.items():
        default = configuration.DEFAULTS.get(key)
        if default is not None and value == default:
            usual.append([key, _setting(value)])
        else:
            own.append([key, _setting(value), DASH if default is None else _setting(default)])
    return Table(["key", "value", "default"], own), Table(["key", "value"], usual)


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "(empty)" if value == "" else str(value)


# ---- several runs ----------------------------------------------------------------------------------------------------


def of_comparison(comparison: Comparison, gallery: Gallery) -> str:
    """Return the page of a comparison with its figures."""
    runs, finished = comparison.runs, comparison.finished
    shared, differing = _configurations(runs)
    answers, warned = on_page(comparison)
    return render(
        "comparison.html.jinja",
        gallery,
        comparison=comparison,
        datasets=sorted({str(r.flat.get("dataset", "?")) for r in runs}),
        seeds=len({r.seed for r in runs}),
        finished_seeds=len({r.seed for r in finished}),
        spread_over=over(len({r.seed for r in finished}), len({r.data_seed for r in finished})),
        settings=[
            {"name": setting_text(setting), **_setting_tables(comparison, members, _lost(comparison, members))}
            for setting, members in groups_of(finished)
        ],
        differing=varying(runs),
        answers=answers,
        warned=warned,
        test_images=_test_images(finished),
        others=list(_other_tables(comparison)),
        meaning=meaning(_protocols(comparison.runs), comparison.runs),
        chosen=any(r.selected for r in finished),
        tables={
            "counts": _counts(finished[0]) if finished else None,
            "runs": _runs_table(comparison),
            "warnings": _comparison_warnings(comparison),
            "shared": shared,
            "differing": differing,
        },
    )


COLUMNS = (
    ("tuned", "tuned", "last"),
    ("trained", "trained", "last"), ("received", "received", "last"), ("trained balanced", "trained", "balanced"),
    ("received balanced", "received", "balanced"), ("global", "global", "last"),
    ("trained, validation", "trained", "validation"),
    ("trained, last round's clients", "trained", "participants"),
)  # fmt: skip


OWN_SPLITS = ("tuned", "trained", "received")
"""Those of `COLUMNS` that are on each client's own test split, as is the score of guessing its majority class."""


def _harm(runs: Sequence[RunResult], by: Sequence[Sequence[RunResult]]) -> list[str]:
    """Return how many clients each method helps and harms against training alone; nothing without such a run."""
    alone = {(r.seed, r.data_seed): r.headline_counts() for r in runs if r.alone}
    others = ([r for r in members if not r.alone and (r.seed, r.data_seed) in alone] for members in by)
    found = [tally([harm(r.headline_counts(), alone[r.seed, r.data_seed]) for r in runs]) for runs in others]
    return found if alone else []


def _lost(comparison: Comparison, runs: Sequence[RunResult]) -> list[str]:
    """Return the labels of a setting without a finished run; `runs` are its finished runs."""
    there = {r.label for r in runs}
    mine = [r for r in comparison.runs if r.setting == runs[0].setting and r.label not in there]
    return [label for label in comparison.labels if any(r.label == label for r in mine)]


def _setting_tables(comparison: Comparison, runs: Sequence[RunResult], lost: Sequence[str] = ()) -> dict[str, Any]:
    """Return the accuracies of a setting, its weak and harmed clients, what methods cost, and what was tested."""
    labels: dict[str, list[RunResult]] = {}
    for run in sorted(runs, key=lambda r: (comparison.labels.index(r.label), r.out)):
        labels.setdefault(run.label, []).append(run)
    names = [title_of(label) for label in labels]
    by = list(labels.values())
    scores = {"headline": [[r.score(r.headline) for r in members] for members in by]}
    scores |= {title: [[r.score(p, which) for r in members] for members in by] for title, p, which in COLUMNS}
    scores = {title: values for title, values in scores.items() if any(len(measured(v)) for v in values)}
    further: dict[str, list[list[float]]] = {}
    for rank, title in enumerate(("worst client", "worst tenth")):
        further[title] = [[_weakest(r)[rank] for r in members] for members in by]
    metrics = dict.fromkeys(name for r in runs for name in r.metrics)
    chosen = {
        f"{p} {name}": [[r.metric(p, name) for r in members] for members in by]
        for p in PROTOCOL_TEXT
        for name in metrics
    }
    worst_of = {
        f"trained {name}, worst tenth": [[r.metric("trained", name, "worst_decile") for r in members] for members in by]
        for name in metrics
    }
    chosen |= {
        f"{p} accuracy".replace("_", " "): [[r.metric(p, "accuracy") for r in members] for members in by]
        for p in dict.fromkeys(p for r in runs for p in r.unseen_scores)
    }
    chosen = {title: values for title, values in (chosen | worst_of).items() if any(len(measured(v)) for v in values)}
    harmed = _harm(runs, by)
    targets = [_target(comparison, members) for members in by]
    level = next((t[0] for t in targets if t), "")
    rows = []
    private = ["privacy"] if any(r.privacy for r in runs) else []
    for name, members, target in zip(names, by, targets):
        counted = [Cell(text) for text in (target or ("", DASH, DASH))[1:]] if level else []
        up, down, seconds = (
            mean_and_std(r.summary.get(key) for r in members)[0] for key in ("bytes_up", "bytes_down", "seconds")
        )
        stated = [privacy([r.privacy for r in members])] if private else []
        rows.append([name, *counted, Cell(size(up)), Cell(size(down)), Cell(duration(seconds)), *stated])
    head = [f"completed rounds to {level}", "traffic of these"] if level else []
    failed = [[title_of(label), Cell("failed"), *(Cell(DASH) for _ in list(scores)[1:])] for label in lost]
    significance, reference = _significance(comparison, runs)
    return {
        "meaning": meaning(_protocols(runs, always=()), runs),
        "headlines": {
            score: ", ".join(name for name, members in zip(names, by) if members[0].headline == score)
            for score in dict.fromkeys(members[0].headline for members in by if members[0].headline)
        },
        "harmed": bool(harmed),
        "accuracy": Table(["accuracy in %", *scores], [*_score_rows(names, scores), *failed, *_guessing(runs, scores)]),
        "further": Table(
            ["further, in %", *further, *(["clients: gain / same / lose"] if harmed else [])],
            [
                *([*row, *(Cell(t) for t in harmed[i : i + 1])] for i, row in enumerate(_score_rows(names, further))),
                *_again(comparison, runs),
            ],
        ),
        "metrics": Table(
            ["further metrics", *chosen],
            [
                [name, *(Cell(spread(values[i], factor=1, digits=3)) for values in chosen.values())]
                for i, name in enumerate(names)
            ]
            if chosen
            else [],
        ),
        "cost": Table(["cost", *head, "bytes up", "bytes down", "time", *private], rows),
        "significance": significance,
        "tested": [p for p in ("received", "trained", "tuned") if p in significance.head],
        "reference": reference,
    }


def _again(comparison: Comparison, runs: Sequence[RunResult]) -> list[list[Any]]:
    """Return the row of Standalone's second runs below the weak and harmed clients: harm by chance."""
    rows = _lines_of(comparison.again, runs[0])
    if not len(rows):
        return []
    weak = (Cell(spread(rows[f"trained_{name}"])) for name in ("worst", "worst_decile"))
    return [[AGAIN_TITLE, *weak, Cell(tally(rows[HARM].to_numpy()))]]


def _weakest(run: RunResult) -> tuple[float, float]:
    """Worst client and worst tenth after fine-tuning or local training, else of the received models."""
    return run.weakest(next((p for p in ("tuned", "trained") if f"{p}_accuracy" in run.final), "received"))


def _score_rows(names: Iterable[str], columns: Mapping[str, Sequence[Sequence[float]]]) -> list[list[Any]]:
    """Return one row per method: its name, then mean and spread of each column in percent."""
    rows: list[list[Any]] = [[name] for name in names]
    for values in columns.values():
        for row, value in zip(rows, values):
            row.append(Cell(spread(value)))
    return rows


def _guessing(runs: Sequence[RunResult], columns: Iterable[str]) -> list[list[Any]]:
    """Return the row of what guessing each client's majority class scores, below the scores on own test splits."""
    known = {(r.seed, r.data_seed): r.card.get("majority_mean") for r in runs}
    if not len(measured(known.values())):
        return []
    text = spread(known.values())
    return [["guessing the majority class", *(Cell(text if c in OWN_SPLITS else DASH) for c in columns)]]


def _lines_of(table: pd.DataFrame, run: RunResult) -> pd.DataFrame:
    """Return the rows of one of `fedapp compare`'s tables that belong to a run's setting."""
    for key in ("dataset", "partition", "alpha", "classes-per-client"):
        column = key.replace("-", "_")
        if column in table and uses(run, key):
            table = table[table[column] == run.flat.get(key)]
    return table


def _target(comparison: Comparison, runs: Sequence[RunResult]) -> tuple[str, str, str] | None:
    """Return level, rounds and bytes to the target accuracy, as `fedapp compare` counted them; mean over seeds."""
    table = comparison.table
    if not {"variant", "trained_target", "trained_target_rounds", "trained_target_bytes"} <= set(table.columns):
        return None
    lines = _lines_of(table[table["variant"] == runs[0].label], runs[0])
    lines = lines[lines["failed"].isna()] if "failed" in lines else lines
    if lines.empty or lines["trained_target"].isna().all():
        return None
    moved = mean_and_std(lines["trained_target_bytes"])[0]
    return percent(lines["trained_target"].mean(), unit=" %"), until(lines["trained_target_rounds"]), size(moved)


def _significance(comparison: Comparison, runs: Sequence[RunResult]) -> tuple[Table, str]:
    """Return the differences of `significance.csv` in points with intervals and words, and the reference.

    Differences of one seed are not shown; neither are tests of an earlier version, which had no intervals.
    """
    table = comparison.significance
    if not {"measure", "variant", "reference", *intervals.COLUMNS} <= set(table.columns):
        return Table([], []), ""
    table = _lines_of(table, runs[0])
    if not (table["seeds"] > 1).any():
        return Table([], []), ""
    measures = table["measure"].unique()
    rows = []
    for variant in table["variant"].unique():
        row: list[Any] = [title_of(str(variant))]
        for measure in measures:
            lines = table[(table["variant"] == variant) & (table["measure"] == measure)].to_dict("records")
            row.append(Cell(intervals.in_words(lines[0]), strong=intervals.is_decided(lines[0])) if lines else None)
        rows.append(row)
    head = ["method", *(str(m).replace("_accuracy", "").replace("_", " ") for m in measures)]
    return Table(head, rows), title_of(str(next(iter(table["reference"]), "")))


NAMES = {"method", "variant", "reference"}
"""Columns of `fedapp compare`'s tables that hold labels of methods."""


def _other_tables(comparison: Comparison) -> Iterable[tuple[str, int, Table]]:
    """Yield name, number of rows and table of the CSV files beside results.csv that the page shows nowhere else."""
    for path in sorted(comparison.out.glob("*.csv")):
        if path.name in ("results.csv", "curves.csv", "significance.csv", "again.csv"):
            continue
        try:
            table = read_table(path)
        except BadRequest:
            continue  # a user's own file that is not a table
        for column in NAMES & set(table.columns):
            table[column] = [title_of(str(label)) for label in table[column]]
        rows = [list(row) for row in table.head(MOST_ROWS).itertuples(index=False)]
        name = path.stem.replace("_", " ").replace("-", " ")
        yield name[:1].upper() + name[1:], len(table), Table(table.columns, rows)


def _protocols(runs: Sequence[RunResult], always: Sequence[str] = PROTOCOLS) -> list[str]:
    """Return the scores that some run has, and those that `always` have a column, in the order of the tables."""
    return [p for p in PROTOCOL_TEXT if p in always or any(p in r.protocols for r in runs)]


def _runs_table(comparison: Comparison) -> Table:
    keys, protocols = varying(comparison.runs), _protocols(comparison.runs)
    rows = [
        [
            place(run, comparison), Cell(str(run.seed)), *(str(run.flat.get(k, "")) for k in keys),
            *(share(run.score(p)) for p in protocols), int(run.summary.get("dropped") or 0), run.ok,
        ]
        for run in comparison.runs[:MOST_ROWS]
    ]  # fmt: skip
    return Table(["run", "seed", *keys, *(f"{p} %" for p in protocols), "dropped", "finished"], rows)


def _comparison_warnings(comparison: Comparison) -> Table:
    seen: dict[str, list[str]] = {}
    for run in comparison.runs:
        texts = [str(w) for w in run.summary.get("warnings") or []]
        if run.error:
            texts.append(str(run.error.get("message", "")))
        elif not run.ok:
            texts.append("not finished")
        for text in texts:
            seen.setdefault(text, []).append(place(run, comparison))
    return Table(["warning", "runs"], [[text, ", ".join(names)] for text, names in seen.items()])


def _configurations(runs: Sequence[RunResult]) -> tuple[Table, Table]:
    """Return the keys that all runs share, and those in which they differ (`auto` is each method's own value)."""
    shared, differing = [], []
    for key in dict.fromkeys(k for r in runs for k in r.flat):
        if key in ("out", "resume", "method", "seed"):
            continue
        by: dict[str, dict[str, None]] = {}
        for run in runs:
            by.setdefault(_setting(run.flat.get(key)), {})[method_title(run.method)] = None
        if len(by) == 1:
            shared.append([key, next(iter(by))])
        else:
            differing.append([key, "; ".join(f"{value}: {', '.join(names)}" for value, names in by.items())])
    return Table(["key", "value"], shared), Table(["key", "values"], differing)
