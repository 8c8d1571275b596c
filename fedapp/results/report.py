"""`fedapp report`: one self-contained HTML page of a run, or of a comparison.

The page loads nothing: a content security policy in its head forbids it. Its own script sorts tables, and the page
reads without it. Of every figure that it lacks it says why, and which command makes what is missing. This file makes
the tables, the templates hold the words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
from rich.text import Text
from threadpoolctl import threadpool_limits

from fedapp import config as configuration
from fedapp import registry
from fedapp.errors import BadRequest, plain
from fedapp.files import absolute
from fedapp.registry import method_title, title_of
from fedapp.results import figures
from fedapp.results.answers import (
    AGAIN_TITLE,
    Answer,
    alerts_of,
    cells_of,
    heads_of,
    row_of,
    setting_title,
)
from fedapp.results.directory import write_text
from fedapp.results.figures import Gallery, Progress
from fedapp.results.page import MOST_ROWS, Cell, Table, meaning, place, render, share
from fedapp.results.runs import PROTOCOL_TEXT, TUNED_PAIRS, Comparison, RunResult, read, read_table, varying
from fedapp.results.statistics import DASH, duration, mean_and_std, number, percent, size, traffic
from fedapp.results.tables import tables_of
from fedapp.results.terminal import Screen
from fedapp.settings.evaluation import PROTOCOLS

PAGE = "report.html"


def write(directory: str | Path, figures_to: str | Path | None = None) -> Path:
    """Write `report.html` into a run directory or the folder of a comparison; a terminal shows the progress.

    Parameters
    ----------
    directory : a run directory (finished or not), or a folder with run directories below it.
    figures_to : folder for the figures as PNG and SVG files too.

    Returns
    -------
    The page's absolute path.

    Raises
    ------
    BadRequest : no run there, or a folder that cannot be written.
    """
    found = read(Path(directory))
    # Several threads wait for each other longer than they help with figures of this size.
    with threadpool_limits(limits=1), on_terminal() as progress:
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
                drawing.save(absolute(figures_to))
    except OSError as e:
        raise BadRequest(f"{e.filename or found.out} cannot be written ({e.strerror})") from e
    return target


@contextmanager
def on_terminal() -> Iterator[Progress]:
    """Show on the terminal which figure is being drawn, in a line that vanishes."""
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
        comparison=next(
            (
                up * "../" + PAGE
                for up, folder in enumerate(run.out.parents[:4], 1)
                if all((folder / name).is_file() for name in ("results.csv", PAGE))
            ),
            "",
        ),
        test_rows=_test_rows([run]),
        tables={
            "scores": _scores(run, scored),
            "metrics": _metrics(run),
            "clients": _client_table(run),
            "rounds": _rounds_table(run),
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
    heads = {"last": "all clients", "last_std": "std over clients", "pooled": "pooled", "balanced": "all classes"}
    for key, name in {"validation": "validation", "participants": "last round's clients"}.items():
        heads |= {key: name} if any(not math.isnan(run.score(p, key)) for p in protocols) else {}
    pooled = run.summary.get("pooled") or {}
    rows = [
        [meaning([p], [run]), *(share(pooled.get(p) if key == "pooled" else run.score(p, key)) for key in heads)]
        for p in protocols
    ]
    return Table(["accuracy in %", *heads.values()], rows)


def _metrics(run: RunResult) -> Table:
    """Return the metrics of each score with their spread over clients; nothing where there are only the usual ones."""
    wide = ("mean", "std", "worst_decile", "worst")
    rows = [
        [f"{p} {name}", *(Cell(number(run.metric(p, name, what))) for what in wide)]
        for p in (*run.protocols, *run.unseen_scores)
        for name in ("accuracy", *run.printed_metrics, "loss")
        if (run.printed_metrics or p in run.unseen_scores) and not math.isnan(run.metric(p, name))
    ]
    return Table(["further metrics", "mean over clients", "std", "worst 10 %", "worst client"], rows)


def _test_rows(runs: Sequence[RunResult]) -> float:
    """Return the mean number of a client's test rows; 0 where it is not known."""
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
    scores = [*(f"{p} %" for p in shown), *(f"{p}, all classes %" for p in shown)]
    head = ["client", "model", "training rows", "test rows", *scores, "majority class %"]
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
    names = (c.replace("_accuracy", " %").replace("_balanced", ", all classes %").replace("_", " ") for c in columns)
    return Table(names, rows, meaning(run.protocols, [run]))


def _traffic(run: RunResult) -> Table:
    queries = {key.removeprefix("bytes_up_"): n for key, n in run.summary.items() if key.startswith("bytes_up_query")}
    summed = traffic(run.rounds).tolist() if "bytes_up" in run.rounds else []
    ways = {} if run.summary.get("rounds") == 0 else {"sends": "bytes_up", "receives": "bytes_down"}
    moved = {
        **{f"arrays that a client {way} in a round": run.summary.get(key) for way, key in ways.items()},
        **{f"answer of a client to {query}": n for query, n in queries.items()},
        "all clients and rounds, both ways": summed[-1] if summed else None,
    }
    rows = [[k, Cell(f"{n:,.0f}"), Cell(size(n))] for k, n in moved.items() if n is not None]
    return Table(["traffic", "bytes", "about"], rows)


def _times(run: RunResult) -> Table:
    seconds, training = (run.rounds.get(c, pd.Series(dtype=float)) for c in ("round_seconds", "train_seconds"))
    times = {
        "a round, median": seconds.median(),
        "first round": next(iter(seconds), None),
        "local training of a client in a round, mean": training.mean(),
        "whole run": run.summary.get("seconds"),
    }
    return Table(["time", "wall clock"], [[k, Cell(text)] for k, t in times.items() if (text := duration(t)) != DASH])


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
    heads = ["round", "client", "stage", "reason"]
    rows = run.dropped.reindex(columns=heads).head(MOST_ROWS).itertuples(index=False)
    return Table(heads, [[Cell(str(n)), Cell(run.name_of(int(c))), str(stage), str(why)] for n, c, stage, why in rows])


def _configuration(run: RunResult) -> tuple[Table, Table]:
    """Return the keys that differ from their defaults, and those that do not."""
    defaults = {key: configuration.DEFAULTS.get(key) for key in run.flat}
    rows = [
        [key, _setting(value), DASH if defaults[key] is None else _setting(defaults[key])]
        for key, value in run.flat.items()
    ]
    usual = [row[:2] for row in rows if run.flat[row[0]] == defaults[row[0]]]
    own = [row for row in rows if row[:2] not in usual]
    return Table(["key", "value", "default"], own), Table(["key", "value"], usual)


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "(empty)" if value == "" else str(value)


# ---- several runs ----------------------------------------------------------------------------------------------------


def of_comparison(comparison: Comparison, gallery: Gallery) -> str:
    """Return the page of a comparison with its figures and answers."""
    runs, finished, answers = comparison.runs, comparison.finished, gallery.answers
    shared, differing = _configurations(runs)
    keys = dict.fromkeys(k for r in runs for k in r.versions)
    versions = {k: ", ".join(dict.fromkeys(str(r.versions[k]) for r in runs if k in r.versions)) for k in keys}
    started = max((str(r.versions.get("started", "")) for r in runs), default="")[:16].replace("T", " ")
    made = (f"{name} {versions[key]}" for name, key in MADE_WITH.items() if key in versions)
    return render(
        "comparison.html.jinja",
        gallery,
        comparison=comparison,
        datasets=sorted({str(r.flat.get("dataset", "?")) for r in runs}),
        names=[title_of(label) for label in comparison.labels],
        methods=len({r.label for r in runs if r.method != "local"}),
        seeds=len({r.seed for r in runs}),
        started=started,
        settings=[_answered(comparison, answer, len(answers) > 1) for answer in answers],
        warned=[*([gallery.unanswered] if gallery.unanswered else []), *alerts_of(comparison, answers)],
        differing=varying(runs),
        test_rows=_test_rows(finished),
        files=[name for name in TABLES if (comparison.out / name).is_file()],
        others=list(_other_tables(comparison)),
        meaning=meaning(_protocols(runs), runs),
        command=next(iter(comparison.notes["command"]), ""),
        made=f"The last run began at {started}. {', '.join(made)}.",
        bibtex=_bibtex(comparison, versions.get("fedapp", "")),
        tables={
            "runs": _runs_table(comparison),
            "warnings": _comparison_warnings(comparison),
            "shared": shared,
            "differing": differing,
            "versions": Table(
                ["what", "version"], [[k, v] for k, v in versions.items() if k not in ("run", "started")]
            ),
        },
    )


TABLES = ("results.csv", "significance.csv", "curves.csv", "again.csv")
"""Files of a comparison that its page links to."""
MADE_WITH = {"fedapp": "fedapp", "Python": "python", "processor:": "processor", "system:": "system"}


def _answered(comparison: Comparison, answer: Answer, several: bool) -> dict[str, Any]:
    """Return the page's answer for one setting: its sentences, and its tables with the methods in one order."""
    order = [*answer.called, *([answer.alone] if answer.alone else [])]
    heads = ["method", *("".join(h.split("\n")) if "/" in h else h.replace("\n", " ") for h in heads_of(answer)[1:])]
    heads.append("decision")
    rows: list[list[Any]] = []
    for label in order:
        if label in answer.methods or label == answer.alone:
            test = answer.test(label)
            strong = bool(test and test["seeds"] > 2 and (test["low"] > 0 or test["high"] < 0))
            name, own, *cells = row_of(answer, label, title_of(label) + (" *" if label in answer.delivered else ""))
            shown = [Cell(own), *(Cell(c, strong=strong and i < 2) for i, c in enumerate(cells))]
            rows.append([name, *shown, str(test["word"]) if test else ""])
        else:
            rows.append([title_of(label), *(Cell(DASH) for _ in heads[2:]), "failed"])
    if len(answer.again):
        rows.append([AGAIN_TITLE, *map(Cell, cells_of(answer, answer.again, None)), ""])
    rows.append(["guessing the majority class", Cell(percent(answer.majority)), *(Cell(DASH) for _ in heads[3:]), ""])
    tests = [(title_of(v), t) for v in order if (t := answer.test(v)) and t["seeds"] > 2]
    chances = ("p", "p_holm", "worse", "equal", "better")
    return {
        "name": setting_title(answer.table) if several else "",
        "sentences": [*answer.sentences().values()],
        "power": " ".join(filter(None, (answer.power(), answer.variance()))),
        "table": Table(heads, rows),
        "decisions": Table(
            ["method", "p", "p after Holm", "P(worse)", "P(equal)", "P(better)"],
            [[name, *(Cell(number(test[c])) for c in chances)] for name, test in tests],
            "Two-sided t-test over seeds, corrected over the methods; probabilities of a difference beyond the margin.",
        ),
        "more": list(_further_tables(comparison, answer, order)),
    }


def _further_tables(comparison: Comparison, answer: Answer, order: Sequence[str]) -> Iterator[tuple[str, Table]]:
    """Yield name and table of what `fedapp show --all` prints of a setting."""
    for at, (title, cells) in enumerate(tables_of(answer, [r for r in comparison.finished if answer.tells_of(r)])):
        rows = [[title_of(v), *map(Cell, cells.loc[v])] for v in [*order, AGAIN_TITLE] if v in cells.index]
        name = title.partition(",")[0].partition("(")[0].strip() if at else "Scores"
        pairs = f" {TUNED_PAIRS}" if "tuned" in cells and title.startswith("Difference") else ""
        yield name, Table(["method", *cells], rows, title.replace("\n", " ") + pairs)


def bibtex(key: str, title: str, paper: str, authors: str = "") -> str:
    """Return an entry of BibTeX; `paper` is as in `Method`, `authors` all of them with commas."""
    found = re.fullmatch(r"(?!ours)([^,;:]+), (?:(.+) )?(\d{4})", paper)
    fields = {"title": title, "note": paper}
    if found is not None:
        names = authors.replace(", ", " and ") or found[1].replace(" et al.", " and others")
        fields = {"title": title, "author": names, "howpublished": found[2], "year": found[3]}
    lines = "".join(f",\n  {name} = {{{value}}}" for name, value in fields.items() if value)
    return f"@misc{{{key}{lines}\n}}"


def _bibtex(comparison: Comparison, version: str) -> str:
    """Return entries of fedapp and of each method's paper."""
    methods = {r.method: None for r in comparison.runs}
    known = {m: found for m, found in registry.discover().items() if m in methods and m != "local"}
    entries = [("fedapp", "fedapp: federated learning where the classifier head does the work", f"version {version}")]
    entries += [(name, method.title, method.paper) for name, method in known.items()]
    return "\n".join(bibtex(*entry) for entry in entries)


NAMES = {"method", "variant", "reference"}
"""Columns of `fedapp compare`'s tables that hold labels of methods."""


def _other_tables(comparison: Comparison) -> Iterable[tuple[str, int, Table]]:
    """Yield name, number of rows and table of the CSV files besides results.csv that the page shows nowhere else."""
    for path in sorted(p for p in comparison.out.glob("*.csv") if p.name not in TABLES):
        try:
            table = read_table(path)
        except BadRequest:
            continue  # a user's own file that is not a table
        for column in NAMES & set(table.columns):
            table[column] = [title_of(str(label)) for label in table[column]]
        rows = [list(row) for row in table.head(MOST_ROWS).itertuples(index=False)]
        name = path.stem.replace("_", " ").replace("-", " ")
        yield name[:1].upper() + name[1:], len(table), Table(table.columns, rows)


def _protocols(runs: Sequence[RunResult]) -> list[str]:
    """Return the scores that some run has, and those that always have a column, in the order of the tables."""
    return [p for p in PROTOCOL_TEXT if p in PROTOCOLS or any(p in r.protocols for r in runs)]


def _runs_table(comparison: Comparison) -> Table:
    keys, protocols = varying(comparison.runs), _protocols(comparison.runs)
    rows = [
        [
            Cell(place(run, comparison), number=False, href=_link(run, comparison)),
            Cell(str(run.seed)), *(str(run.flat.get(k, "")) for k in keys),
            *(share(run.score(p)) for p in protocols), int(run.summary.get("dropped") or 0), run.ok,
        ]
        for run in comparison.runs[:MOST_ROWS]
    ]  # fmt: skip
    return Table(["run", "seed", *keys, *(f"{p} %" for p in protocols), "dropped", "finished"], rows)


def _link(run: RunResult, comparison: Comparison) -> str:
    """Return the address of a run's page, or of its folder, from the page of its comparison."""
    folder = quote(place(run, comparison))
    return f"{folder}/{PAGE}" if (run.out / PAGE).is_file() else f"{folder}/"


def _comparison_warnings(comparison: Comparison) -> Table:
    seen: dict[str, list[str]] = {}
    for run in comparison.runs:
        failed = [] if run.ok else [run.failure]
        for text in (*map(str, run.summary.get("warnings") or ()), *failed):
            seen.setdefault(text, []).append(place(run, comparison))
    return Table(["warning", "runs"], [[text, ", ".join(names)] for text, names in seen.items()])


def _configurations(runs: Sequence[RunResult]) -> tuple[Table, Table]:
    """Return the keys that all runs share, and those in which they differ (`auto` is each method's own value)."""
    rows = []
    for key in dict.fromkeys(k for r in runs for k in r.flat if k not in ("out", "resume", "method", "seed")):
        by: dict[str, dict[str, None]] = {}
        for run in runs:
            by.setdefault(_setting(run.flat.get(key)), {})[method_title(run.method)] = None
        texts = by if len(by) == 1 else (f"{value}: {', '.join(names)}" for value, names in by.items())
        rows.append((len(by) == 1, [key, "; ".join(texts)]))
    shared, differing = ([row for same, row in rows if same is wanted] for wanted in (True, False))
    return Table(["key", "value"], shared), Table(["key", "values"], differing)
