"""`fedapp report`: one self-contained HTML page of a run, or of a comparison.

The page has no script, loads nothing (a content security policy in its head forbids it) and says of every figure that
it lacks why, and which command makes what is missing. What it says is put together here from the parts of `page`.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from threadpoolctl import threadpool_limits

from fedapp import config as configuration
from fedapp import registry
from fedapp.data.partitions import PARTITION_PARAMETER
from fedapp.errors import BadRequest
from fedapp.results import figures
from fedapp.results.figures import Gallery
from fedapp.results.figures.gallery import setting_text
from fedapp.results.page import MOST_ROWS, Cell, Fold, Page, Part, Table, Text, note, share
from fedapp.results.runs import (
    ONE_SCORE,
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
    mean_and_std,
    measured,
    percent,
    probability,
    size,
    spread,
    traffic,
    until,
)  # fmt: skip

PAGE = "report.html"


def write(directory: str | Path, figures_to: str | Path | None = None) -> Path:
    """Write `report.html` into a run directory or the folder of a comparison.

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
    import sklearn.manifold  # noqa: F401 - brings a thread pool of its own, which is limited only once it is there

    found = read(Path(directory))
    # Several threads wait for each other longer than they help with figures of this size.
    with threadpool_limits(limits=1):
        page, gallery = of_run(found) if isinstance(found, RunResult) else of_comparison(found)
    try:
        target = found.out / PAGE
        _write(target, page)
        if figures_to is not None:
            for drawing in gallery.drawings:
                drawing.save(Path(figures_to).expanduser().absolute())
    except OSError as e:
        raise BadRequest(f"{e.filename or found.out} cannot be written ({e.strerror})") from e
    return target


def _write(path: Path, text: str) -> None:
    """Write atomically: whoever has the old page open never sees half of the new one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


# ---- one run ---------------------------------------------------------------------------------------------------------


def _method_title(method: str) -> str:
    try:
        return registry.get(method).title
    except BadRequest:
        return method


def _partition_text(flat: Mapping[str, Any]) -> str:
    kind = str(flat.get("partition", "?"))
    key = PARTITION_PARAMETER.get(kind)
    if key == "alpha":
        return f"{kind} with alpha {flat.get('alpha')}"
    return f"{kind} with {flat.get(key)} classes per client" if key else kind


def of_run(run: RunResult) -> tuple[str, Gallery]:
    """Return the page of a run, and its figures."""
    gallery = figures.of_run(run)
    flat = run.flat
    clients = run.summary.get("clients") or flat.get("clients")
    done = int(run.rounds["round"].max()) if len(run.rounds) else 0
    page = Page(
        title=f"{_method_title(run.method)} on {flat.get('dataset', '?')}",
        eyebrow=f"fedapp run · {run.out.name}",
        lead=(
            f"{clients} clients, {_partition_text(flat)}, {done} of {flat.get('num-server-rounds')} rounds of "
            f"{flat.get('local-epochs')} local epochs, model {flat.get('model')}, seed {run.seed}"
            + (f", started {str(run.versions['started'])[:16].replace('T', ' ')}" if "started" in run.versions else "")
        ),
        facts=list(_facts(run)),
        alerts=list(_alerts(run)),
    )
    page.add("scores", *_scores(run))
    page.add("data", _data_text(run))
    page.add("cost", *_cost(run))
    page.add_figures(gallery)
    page.add("scores", _client_table(run), _rounds_table(run))
    page.add("data", *_data_table(run))
    page.add("further", _further(run))
    page.add("warnings", *_warnings(run))
    page.add("configuration", *_configuration(run))
    return page.html(), gallery


def _facts(run: RunResult) -> Iterable[tuple[str, str, str]]:
    names = {
        "received": "Before local training", "trained": "After local training", "global": "Global model",
    }  # fmt: skip
    for protocol in run.protocols:
        if not math.isnan(score := run.score(protocol)):
            std = run.score(protocol, "last_std")
            note = "central test set" if math.isnan(std) else f"± {percent(std)} over clients"
            yield names[protocol], percent(score, unit=" %"), note
    if run.card.get("majority_mean") is not None:
        yield "Guessing the majority", percent(run.card["majority_mean"], unit=" %"), "each client's largest class"
    if run.summary.get("bytes_up") is not None:
        yield "Sent by a client", size(run.summary["bytes_up"]), f"a round; receives {_size(run, 'bytes_down')}"
    if run.summary.get("seconds") is not None:
        yield "Time", duration(run.summary["seconds"]), "whole run"


def _size(run: RunResult, key: str) -> str:
    return size(run.summary.get(key))


def _alerts(run: RunResult) -> Iterable[str]:
    if run.error:
        where = ""
        if run.error.get("client") is not None:
            where = f" (client {run.error['client']}, round {run.error.get('round')}, {run.error.get('stage')})"
        yield Markup("<strong>The run failed</strong>{}: {}").format(where, run.error.get("message", ""))
    elif not run.ok:
        yield Markup("<strong>The run is not finished</strong>: there is no summary yet.")
    yield from map(str, run.summary.get("warnings") or [])
    if len(run.dropped):
        yield Markup('{} replies did not count: <a href="#warnings">see which</a>.').format(len(run.dropped))
    if run.summary.get("stopped"):
        yield f"Stopped early: {run.summary['stopped']}."


def _scores(run: RunResult) -> Iterable[Part]:
    shown = [p for p in run.protocols if not math.isnan(run.score(p))]
    if not shown:
        return
    pooled = run.summary.get("pooled") or {}
    rows = [
        [
            f"{p}: {PROTOCOL_TEXT[p]}", share(run.score(p)), share(run.score(p, "last_std")), share(pooled.get(p)),
            share(run.score(p, "balanced")), share(run.score(p, "best")),
        ]
        for p in shown
    ]  # fmt: skip
    yield Table(["accuracy in %", "last", "std over clients", "pooled", "balanced", "best round"], rows)
    yield note(
        "Last is the headline: all clients after the last round, unweighted mean over clients. Pooled: weighted by "
        "test images. Balanced: mean recall over all classes on all clients' test images, which shows what a client "
        "knows of classes it seldom saw.{one}{alone}",
        one=_one_image([run]),
        alone=f" {ONE_SCORE}" if run.alone else "",
    )


def _one_image(runs: Sequence[RunResult]) -> str:
    """Say how much one test image counts."""
    mean, _ = mean_and_std((r.summary.get("test_sizes") or {}).get("mean") for r in runs)
    if math.isnan(mean) or not mean:
        return ""
    return f" A client has {mean:.0f} test images on average, so one image is {100 / mean:.1f} points."


def _client_table(run: RunResult) -> Part | None:
    table = run.final
    if table.empty:
        return None
    majority = run.card.get("majority") or []
    shown = [p for p in run.protocols if p != "global" and f"{p}_accuracy" in table]
    head = ["client", "model", "training images", "test images"]
    head += [f"{p} %" for p in shown] + [f"{p} balanced %" for p in shown] + ["majority class %"]
    rows = []
    for _, row in table.iterrows():
        client = int(row["client"])
        tests = next((row[f"{p}_total"] for p in shown if f"{p}_total" in table), math.nan)
        rows.append(
            [
                Cell(str(client)), run.config.model_of(client) if run.config is not None else "?",
                int(row["num_samples"]), tests if math.isnan(tests) else int(tests),
                *(share(row[f"{p}_accuracy"]) for p in shown), *(share(row.get(f"{p}_balanced")) for p in shown),
                share(majority[client] if client < len(majority) else None),
            ]
        )  # fmt: skip
    parts: list[Part] = [Table(head, rows[:MOST_ROWS], _meaning(shown))]
    if len(rows) > MOST_ROWS:
        parts.append(Text(f"The first {MOST_ROWS}; all in final.csv.", "note"))
    return Fold(f"Accuracy of every client as a table ({len(rows)})", parts)


def _meaning(protocols: Iterable[str]) -> str:
    """Say what the protocols of a table mean, for its caption."""
    return "; ".join(f"{p}: {PROTOCOL_TEXT[p]}" for p in protocols)


def _rounds_table(run: RunResult) -> Part | None:
    whole = ("round", "clients", "dropped")
    shares = [f"{p}_{what}" for p in run.protocols for what in ("accuracy", "balanced")]
    columns = [
        c for c in run.rounds if c in (*whole, "train_loss", "round_seconds", *shares) and run.rounds[c].notna().any()
    ]
    if not columns:
        return None
    rows = [
        [share(v) if c in shares else Cell(str(int(v))) if c in whole else float(v) for c, v in zip(columns, row)]
        for row in run.rounds[columns].tail(MOST_ROWS).itertuples(index=False)
    ]
    names = [c.replace("_accuracy", " %").replace("_balanced", " balanced %").replace("_", " ") for c in columns]
    return Fold(f"All rounds as a table ({len(run.rounds)})", [Table(names, rows, _meaning(run.protocols))])


def _data_text(run: RunResult) -> Part:
    card = run.card
    if not card:
        return Text("The data lie on the devices; they told the server their sample counts only.", "note")
    sizes, tests = card.get("train_sizes", []), card.get("test_sizes", [])
    text = (
        f"{card.get('dataset')}, divided among {card.get('clients')} clients ({_partition_text(run.flat)}), split "
        f"{card.get('split')}. Training images {sum(sizes):,} ({min(sizes, default=0):,} to {max(sizes, default=0):,} "
        f"a client), test images {sum(tests):,} ({min(tests, default=0):,} to {max(tests, default=0):,} a client), "
        f"{len(run.classes)} classes."
    )
    for key, words in (
        ("unused", "images belong to no client"),
        ("shared", "training images belong to more than one client"),
        ("public", "training images are held back as the public set"),
    ):
        if card.get(key):
            text += f" {card[key]:,} {words}."
    if card.get("majority_mean") is not None:
        text += f" A client that always answers its majority class scores {percent(card['majority_mean'])} % (mean)."
    return Text(text)


def _data_table(run: RunResult) -> Iterable[Part]:
    card = run.card
    if not card:
        return
    named = len(run.classes) <= 26
    rows = [
        [
            Cell(str(client)),
            *([Cell(f"{c:,}" if c else "·") for c in counts] if named else [int(np.count_nonzero(counts))]),
            card["train_sizes"][client], card["test_sizes"][client], share(card["majority"][client]),
        ]
        for client, counts in enumerate(card.get("train", [])[:MOST_ROWS])
    ]  # fmt: skip
    head = ["client", *(run.classes if named else ["classes held"]), "train", "test", "majority %"]
    yield Fold("Training images by client and class as a table", [Table(head, rows)])
    yield note("Hash of the partition: <code>{hash}</code>", hash=card.get("hash", ""))


def _cost(run: RunResult) -> Iterable[Part]:
    summary, rounds = run.summary, run.rounds
    moved: list[tuple[str, float]] = []
    if summary.get("bytes_up") is not None:
        moved.append(("arrays that a client sends in a round", summary["bytes_up"]))
        moved.append(("arrays that a client receives in a round", summary.get("bytes_down") or 0))
    for key, value in summary.items():
        if key.startswith("bytes_up_query"):
            moved.append((f"answer of a client to {key.removeprefix('bytes_up_')}", value))
    if "bytes_up" in rounds and len(rounds):
        moved.append(("all clients and rounds, both ways", traffic(rounds)[-1]))
    if moved:
        yield Table(["traffic", "bytes", "about"], [[name, Cell(f"{n:,.0f}"), Cell(size(n))] for name, n in moved])
    times: list[tuple[str, Any]] = []
    if "round_seconds" in rounds and len(rounds):
        times.append(("a round, median", rounds["round_seconds"].median()))
        times.append(("first round (with the start of the workers)", rounds["round_seconds"].iloc[0]))
    if "train_seconds" in rounds and len(rounds):
        times.append(("local training of a client in a round, mean", rounds["train_seconds"].mean()))
    if summary.get("seconds") is not None:
        times.append(("whole run", summary["seconds"]))
    if times:
        yield Table(["time", "wall clock"], [[name, Cell(duration(t))] for name, t in times])


KNOWN = {
    "ok", "method", "dataset", "model", "clients", "rounds", "seed", "accuracy", "pooled", "test_sizes", "bytes_up",
    "bytes_down", "dropped", "stopped", "warnings", "seconds", "error",
}  # fmt: skip
"""Keys of summary.json that the page shows elsewhere; all others are the method's own."""


def _further(run: RunResult) -> Part | None:
    rows = []
    for key, value in run.summary.items():
        if key not in KNOWN and not key.startswith("bytes_up_query") and value not in (None, {}, []):
            text = _plain(value)
            rows.append([key, text if len(text) <= 600 else f"{text[:600]} … (all in summary.json)"])
    return Table(["name", "value"], rows) if rows else None


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


def _warnings(run: RunResult) -> Iterable[Part]:
    texts = [str(w) for w in run.summary.get("warnings") or []]
    if run.error:
        yield Text(str(run.error.get("message", "")))
        if trace := str(run.error.get("traceback") or "").strip():
            yield Fold("Traceback", [Text(trace, "code")])
    if run.problem:
        texts.append(f"This version does not accept the run's configuration: {run.problem}")
    yield from map(Text, texts)
    if len(run.dropped):
        rows = [
            [Cell(str(r["round"])), Cell(str(r["client"])), str(r["stage"]), str(r["reason"])]
            for _, r in run.dropped.head(MOST_ROWS).iterrows()
        ]
        caption = f"{len(run.dropped)} replies that did not count"
        yield Table(["round", "client", "stage", "reason"], rows, caption)
    if not (run.error or texts or len(run.dropped)):
        yield Text("None: every reply counted." if run.ok else "None so far.", "note")


def _configuration(run: RunResult) -> Iterable[Part]:
    defaults = configuration.DEFAULTS
    own, usual = [], []
    for key, value in run.flat.items():
        if key in defaults and value == defaults[key]:
            usual.append([key, _setting(value)])
        else:
            own.append([key, _setting(value), _setting(defaults[key]) if key in defaults else DASH])
    yield note(
        "The effective configuration, as in <code>config.toml</code>; <code>fedapp run config.toml</code> repeats the "
        "run. Where the default is auto, the value is the method's own."
    )
    yield Table(["key", "value", "default"], own)
    yield Fold(f"Keys at their defaults ({len(usual)})", [Table(["key", "value"], usual)])
    if run.versions:
        yield Fold("Versions", [Table(["what", "version"], [[k, str(v)] for k, v in run.versions.items()])])


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "(empty)" if value == "" else str(value)


# ---- several runs ----------------------------------------------------------------------------------------------------


def of_comparison(comparison: Comparison) -> tuple[str, Gallery]:
    """Return the page of a comparison, and its figures."""
    gallery = figures.of_comparison(comparison)
    runs, finished, methods = comparison.runs, comparison.finished, comparison.labels
    datasets = sorted({str(r.flat.get("dataset", "?")) for r in runs})
    settings = list(groups_of(finished))
    seeds = len({r.seed for r in runs})
    first, differing = runs[0].flat, varying(runs)
    lead = [f"{len(methods)} methods", f"{seeds} seed{'s' if seeds != 1 else ''}"]
    lead.append(f"{len(settings)} settings" if len(settings) > 1 else _partition_text(first))
    for key, words in (("clients", "clients"), ("num-server-rounds", "rounds"), ("local-epochs", "local epochs")):
        if key not in differing:
            lead.append(f"{first.get(key)} {words}")
    page = Page(
        title=f"{len(methods)} methods on {', '.join(datasets)}",
        eyebrow=f"fedapp comparison · {comparison.out.name}",
        lead=", ".join(lead) + ". The methods of a setting share the partition and the sampled clients.",
        alerts=list(_comparison_alerts(comparison)),
    )
    for setting, members in settings:
        name = setting_text(setting)
        page.add("scores", Text(name[:1].upper() + name[1:], "heading") if name else None)
        page.add("scores", *_comparison_tables(comparison, members), _significance(comparison, members))
    if finished:
        page.add("scores", _comparison_note(finished))
    page.add("scores", *_other_tables(comparison))
    if finished:
        if len(runs) > 1:
            page.add("data", Text(f"Of {finished[0].out.relative_to(comparison.out)}:", "note"))
        page.add("data", _data_text(finished[0]))
    page.add_figures(gallery)
    if finished:
        page.add("data", *_data_table(finished[0]))
    page.add("runs", *_runs_table(comparison))
    page.add("warnings", _comparison_warnings(comparison))
    page.add("configuration", *_shared_configuration(runs))
    return page.html(), gallery


def _comparison_alerts(comparison: Comparison) -> Iterable[str]:
    broken = [str(r.out.relative_to(comparison.out)) for r in comparison.runs if not r.ok]
    if broken:
        more = f" and {len(broken) - 10} more" if len(broken) > 10 else ""
        yield Markup("<strong>{} of {} runs are not finished</strong> and are not counted: {}{}.").format(
            len(broken), len(comparison.runs), ", ".join(broken[:10]), more
        )
    drops = [f"{r.out.name} {len(r.dropped)}" for r in comparison.finished if len(r.dropped)]
    if drops:
        yield f"Replies that did not count: {', '.join(drops[:10])}."


COLUMNS = (
    ("received", "received", "last"), ("trained", "trained", "last"), ("received balanced", "received", "balanced"),
    ("trained balanced", "trained", "balanced"), ("global", "global", "last"),
)  # fmt: skip
BEST = (("best received", "received", "best"), ("best trained", "trained", "best"))


def _comparison_tables(comparison: Comparison, runs: Sequence[RunResult]) -> Iterable[Part]:
    """Return the accuracies of a setting, its weak clients and best rounds, and what the methods cost."""
    labels: dict[str, list[RunResult]] = {}
    for run in sorted(runs, key=lambda r: (comparison.labels.index(r.label), r.out)):
        labels.setdefault(run.label, []).append(run)
    names = {label: _label_title(members[0]) for label, members in labels.items()}
    by = list(labels.values())
    scores = {title: [[r.score(p, which) for r in members] for members in by] for title, p, which in COLUMNS}
    scores = {title: values for title, values in scores.items() if any(len(measured(v)) for v in values)}
    further = {title: [[r.score(p, which) for r in members] for members in by] for title, p, which in BEST}
    for place, title in enumerate(("worst client", "worst tenth")):
        further[title] = [[_weakest(r)[place] for r in members] for members in by]
    shown = [p for p in PROTOCOL_TEXT if any(p in r.protocols for r in runs)]
    yield Table(["accuracy in %", *scores], _score_rows(names.values(), scores), _meaning(shown))
    yield Table(["further, in %", *further], _score_rows(names.values(), further), _meaning(shown))
    targets = {label: _target(comparison, members) for label, members in labels.items()}
    level = next((t[0] for t in targets.values() if t), "")
    rows = []
    for label, members in labels.items():
        row: list[Any] = [names[label]]
        if level:
            row += [Cell(text) for text in (targets[label] or ("", DASH, DASH))[1:]]
        row += [Cell(size(_mean(members, key))) for key in ("bytes_up", "bytes_down")]
        rows.append([*row, Cell(duration(_mean(members, "seconds")))])
    counted = [f"rounds to {level}", "traffic to it"] if level else []
    yield Table(["cost", *counted, "bytes up", "bytes down", "time"], rows)


def _weakest(run: RunResult) -> tuple[float, float]:
    """Worst client and worst tenth after local training, else of the received models."""
    return run.weakest("trained" if "trained_accuracy" in run.final else "received")


def _mean(runs: Sequence[RunResult], key: str) -> float:
    return mean_and_std(r.summary.get(key) for r in runs)[0]


def _label_title(run: RunResult) -> str:
    """Return the method's title, with its own values where its label has some."""
    return f"{_method_title(run.method)} {run.label.removeprefix(run.method)}".strip()


def _score_rows(names: Iterable[str], columns: Mapping[str, Sequence[Sequence[float]]]) -> list[list[Any]]:
    """Return a row a method: its name, then mean and spread of each column in percent, the highest mean in bold."""
    rows: list[list[Any]] = [[name] for name in names]
    for values in columns.values():
        means = np.array([mean_and_std(v)[0] for v in values])
        best = -math.inf if np.isnan(means).all() else float(np.nanmax(means))
        for row, value, mean in zip(rows, values, means):
            row.append(Cell(spread(value), strong=math.isclose(mean, best, abs_tol=1e-12)))
    return rows


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
    if lines.empty or lines["trained_target"].isna().all():
        return None
    moved = mean_and_std(lines["trained_target_bytes"])[0]
    return percent(lines["trained_target"].mean(), unit=" %"), until(lines["trained_target_rounds"]), size(moved)


def _significance(comparison: Comparison, runs: Sequence[RunResult]) -> Part | None:
    """Show what `fedapp compare` tested: differences to the reference in points, with p after Holm's correction."""
    table = comparison.significance
    if not {"measure", "variant", "reference", "mean_difference", "p_holm"} <= set(table.columns):
        return None
    table = _lines_of(table, runs[0])
    measures = list(dict.fromkeys(table["measure"]))
    rows = []
    for variant in dict.fromkeys(table["variant"]):
        row: list[Any] = [str(variant)]
        for measure in measures:
            line = table[(table["variant"] == variant) & (table["measure"] == measure)]
            if line.empty or line["mean_difference"].isna().all():
                row.append(None)
                continue
            p, points = float(line["p_holm"].iloc[0]), 100 * float(line["mean_difference"].iloc[0])
            row.append(Cell(f"{points:+.1f}, {probability(p)}", strong=p < 0.05))
        rows.append(row)
    if not rows:
        return None
    caption = (
        f"Difference to {table['reference'].iloc[0]} in points, paired over clients and seeds; p of Wilcoxon's "
        f"signed-rank test after Holm's correction, bold below 0.05. {_meaning(('received', 'trained'))}"
    )
    return Table(["method", *(str(m).replace("_accuracy", "").replace("_", " ") for m in measures)], rows, caption)


def _comparison_note(runs: Sequence[RunResult]) -> Part:
    seeds = len({r.seed for r in runs})
    majority, _ = mean_and_std(r.card.get("majority_mean") for r in runs)
    guess = "" if math.isnan(majority) else f" Guessing each client's majority class scores {percent(majority)} %."
    return note(
        "{spread}After the last round. Received and trained: on each client's own test split, mean over clients. "
        "Balanced: mean recall over all classes on all clients' test images. Best: the best round. Worst client and "
        "worst tenth of the clients: trained models on own test splits. Rounds and traffic to a target: trained "
        "models; the target is what the reference ends at unless one was given. Bytes: a client and round. Bold: the "
        "highest mean of a column, which with few seeds may be chance.{alone}{guess}{one}",
        spread=f"Mean ± standard deviation over {seeds} seeds. " if seeds > 1 else "One seed: no spread is known. ",
        alone=f" {ONE_SCORE}" if any(r.alone for r in runs) else "",
        guess=guess,
        one=_one_image(runs),
    )


def _other_tables(comparison: Comparison) -> Iterable[Part]:
    """Show tables that lie beside results.csv and are not shown elsewhere on the page."""
    for path in sorted(comparison.out.glob("*.csv")):
        if path.name in ("results.csv", "curves.csv", "significance.csv"):
            continue
        try:
            table = read_table(path)
        except BadRequest:
            continue  # a user's own file that is not a table
        rows = [list(row) for row in table.head(MOST_ROWS).itertuples(index=False)]
        name = path.stem.replace("_", " ").replace("-", " ")
        yield Fold(f"{name[:1].upper()}{name[1:]} ({len(table)} rows)", [Table(list(table.columns), rows)])


def _runs_table(comparison: Comparison) -> Iterable[Part]:
    keys = varying(comparison.runs)
    rows = [
        [
            str(run.out.relative_to(comparison.out)), Cell(str(run.seed)), *(str(run.flat.get(k, "")) for k in keys),
            *(share(run.score(p)) for p in PROTOCOL_TEXT), int(run.summary.get("dropped") or 0), run.ok,
        ]
        for run in comparison.runs[:MOST_ROWS]
    ]  # fmt: skip
    head = ["run", "seed", *keys, *(f"{p} %" for p in PROTOCOL_TEXT), "dropped", "finished"]
    yield Table(head, rows, _meaning(PROTOCOL_TEXT))
    yield note("Each is a full run directory: <code>fedapp report</code> makes a page of its own.")


def _comparison_warnings(comparison: Comparison) -> Part:
    seen: dict[str, list[str]] = {}
    for run in comparison.runs:
        texts = [str(w) for w in run.summary.get("warnings") or []]
        if run.error:
            texts.append(str(run.error.get("message", "")))
        elif not run.ok:
            texts.append("not finished")
        for text in texts:
            seen.setdefault(text, []).append(str(run.out.relative_to(comparison.out)))
    if not seen:
        return Text("None.", "note")
    return Table(["warning", "runs"], [[text, ", ".join(names)] for text, names in seen.items()])


def _shared_configuration(runs: Sequence[RunResult]) -> Iterable[Part]:
    """Say what all runs share, and in which training settings methods differ (`auto` is each method's own)."""
    shared, differing = [], []
    for key in dict.fromkeys(k for r in runs for k in r.flat):
        if key in ("out", "resume", "method", "seed"):
            continue
        by: dict[str, dict[str, None]] = {}
        for run in runs:
            by.setdefault(_setting(run.flat.get(key)), {})[run.method] = None
        if len(by) == 1:
            shared.append([key, next(iter(by))])
        else:
            differing.append([key, "; ".join(f"{value}: {', '.join(names)}" for value, names in by.items())])
    if differing:
        yield Table(["key", "values"], differing, "Keys in which the runs differ")
    yield Fold(f"What all runs share ({len(shared)} keys)", [Table(["key", "value"], shared)])
