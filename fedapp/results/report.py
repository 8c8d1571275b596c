"""`fedapp report`: one self-contained HTML page of a run, or of a comparison.

The page has no script, loads nothing (a content security policy in its head forbids it) and says of every figure that
it lacks why, and which command makes what is missing.
"""

from __future__ import annotations

import html
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from fedapp import config as configuration
from fedapp import registry
from fedapp.data.partitions import PARTITION_PARAMETER
from fedapp.errors import BadRequest
from fedapp.results import figures, statistics
from fedapp.results.figures import Drawing, Gallery
from fedapp.results.figures.gallery import CAPTIONS, setting_text
from fedapp.results.runs import Comparison, RunResult, groups_of, read, uses, varying

PAGE = "report.html"
MOST_ROWS = 400
"""Rows that a table of the page shows at most; the rest is in the CSV file that it names."""
SECTIONS = {
    "scores": "Results",
    "sweeps": "Sweeps",
    "data": "Data",
    "heads": "Heads",
    "representations": "Representations",
    "calibration": "Calibration",
    "cost": "Traffic and time",
}


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


# ---- pieces of HTML --------------------------------------------------------------------------------------------------


def _h(value: object) -> str:
    return html.escape(str(value), quote=True)


@dataclass
class Cell:
    """A table cell: text, whether it is a number (right-aligned), whether it stands out."""

    text: str
    number: bool = False
    strong: bool = False


def _cell(value: Any) -> Cell:
    if isinstance(value, Cell):
        return value
    if isinstance(value, (bool, np.bool_)):
        return Cell("yes" if value else "no")
    if value is None:
        return Cell("–", number=True)
    if isinstance(value, (int, np.integer)):
        return Cell(f"{int(value):,}", number=True)
    if isinstance(value, (float, np.floating)):
        number = float(value)
        text = "–" if math.isnan(number) else f"{number:,.4g}" if abs(number) < 1e6 else f"{number:,.0f}"
        return Cell(text, number=True)
    return Cell(str(value))


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> str:
    """Return a table; the first column names its row."""
    cells = [[_cell(v) for v in row] for row in rows]
    right = [any(row[i].number for row in cells) for i in range(len(head))]
    parts = ['<div class="table" tabindex="0" role="region" aria-label="', _h(caption or head[0]), '"><table>']
    if caption:
        parts.append(f"<caption>{_h(caption)}</caption>")
    parts.append("<thead><tr>")
    parts += [f'<th scope="col"{" class=n" if right[i] else ""}>{_h(name)}</th>' for i, name in enumerate(head)]
    parts.append("</tr></thead><tbody>")
    for row in cells:
        parts.append("<tr>")
        for i, cell in enumerate(row):
            names = " ".join((["n"] if right[i] else []) + (["strong"] if cell.strong else []))
            kind = f' class="{names}"' if names else ""
            parts.append(f'<th scope="row"{kind}>{_h(cell.text)}</th>' if i == 0 else f"<td{kind}>{_h(cell.text)}</td>")
        parts.append("</tr>")
    parts.append("</tbody></table></div>")
    return "".join(parts)


def _details(summary: str, body: str) -> str:
    return f"<details><summary>{_h(summary)}</summary>{body}</details>"


def _percent(value: Any, digits: int = 1) -> Cell:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return Cell("–", number=True)
    return Cell(f"{100 * float(value):.{digits}f}", number=True)


def _bytes(value: Any) -> str:
    """Write bytes as they are and, from 10 kB on, with a decimal prefix."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    number = float(value)
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= 10 * size or (unit != "kB" and number >= size):
            return f"{number / size:,.1f} {unit}"
    return f"{number:,.0f} B"


def _seconds(value: Any) -> str:
    if value is None:
        return "–"
    number = float(value)
    if number < 120:
        return f"{number:.1f} s"
    return f"{number / 60:.1f} min" if number < 7200 else f"{number / 3600:.1f} h"


def _figure(drawing: Drawing) -> str:
    source = f' <span class="source">{_h(drawing.source)}</span>' if drawing.source else ""
    return (
        f'<figure id="{_h(drawing.id)}"><h3>{_h(drawing.title)}</h3>{drawing.inline()}'
        f"<figcaption>{_h(drawing.caption)}{source}</figcaption></figure>"
    )


@dataclass
class Page:
    """A page under construction: sections in order, each a heading and HTML parts."""

    title: str
    eyebrow: str
    lead: str
    facts: list[tuple[str, str, str]] = field(default_factory=list)
    alerts: list[str] = field(default_factory=list)
    sections: dict[str, tuple[str, list[str]]] = field(default_factory=dict)

    def add(self, key: str, heading: str, *parts: str) -> None:
        """Add parts to a section, which stands where it was first named."""
        self.sections.setdefault(key, (heading, []))[1].extend(p for p in parts if p)

    def html(self) -> str:
        """Return the whole page."""
        kept = {k: v for k, v in self.sections.items() if v[1]}
        links = "".join(f'<a href="#{k}">{_h(name)}</a>' for k, (name, _) in kept.items())
        facts = "".join(
            f"<div><dt>{_h(name)}</dt><dd>{_h(value)}</dd><dd class=note>{_h(note)}</dd></div>"
            for name, value, note in self.facts
        )
        alerts = "".join(f"<p>{a}</p>" for a in self.alerts)
        body = "".join(
            f'<section id="{k}" aria-labelledby="{k}-h"><h2 id="{k}-h">{_h(name)}</h2>{"".join(parts)}</section>'
            for k, (name, parts) in kept.items()
        )
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta name="color-scheme" content="light dark">'
            f"<title>{_h(self.title)} · fedapp</title><style>{STYLE}</style></head><body>"
            f"<header><p class=eyebrow>{_h(self.eyebrow)}</p><h1>{_h(self.title)}</h1>"
            f"<p class=lead>{_h(self.lead)}</p>"
            + (f'<div class="alerts" role="note">{alerts}</div>' if alerts else "")
            + (f"<dl class=facts>{facts}</dl>" if facts else "")
            + f'<nav aria-label="Sections">{links}</nav></header><main>{body}</main></body></html>\n'
        )


STYLE = """
:root{--ink:#1b1d21;--muted:#666b74;--line:#d9dce1;--paper:#fff;--tint:#f5f6f8;--accent:#00639c;--alert:#8a3c00;
--sans:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","Noto Sans","DejaVu Sans",sans-serif;
--mono:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
@media(prefers-color-scheme:dark){:root{--ink:#e3e5e9;--muted:#9aa0aa;--line:#373b42;--paper:#15171a;--tint:#1e2125;
--accent:#79bdec;--alert:#f0a870}}
*{box-sizing:border-box}
html{color-scheme:light dark;-webkit-text-size-adjust:100%}
body{margin:0 auto;padding:3rem 1.5rem 5rem;max-width:53rem;background:var(--paper);color:var(--ink);
font:16px/1.55 var(--sans);font-variant-numeric:tabular-nums lining-nums}
h1,h2,h3{font-weight:600;line-height:1.25;text-wrap:balance}
h1{font-size:1.9rem;margin:.1rem 0 .5rem;letter-spacing:-.012em}
h2{font-size:1.3rem;margin:3.2rem 0 .4rem;padding-top:.9rem;border-top:1px solid var(--line)}
h3{font-size:1rem;margin:1.8rem 0 .5rem}figure h3{margin-top:0}
.eyebrow{margin:0;color:var(--muted);font-size:.85rem}
.lead{margin:0;max-width:44rem;color:var(--muted)}
a{color:var(--accent);text-underline-offset:.15em}
nav{display:flex;flex-wrap:wrap;gap:.3rem 1.3rem;margin:1.7rem 0 0;font-size:.92rem}
nav a{text-decoration:none}nav a:hover,nav a:focus-visible{text-decoration:underline}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(7.6rem,1fr));gap:1.2rem 1.2rem;margin:1.8rem 0 0}
.facts dt{font-size:.83rem;color:var(--muted)}
.facts dd{margin:0;font-size:1.4rem;font-weight:600;letter-spacing:-.01em}
.facts dd.note{font-size:.83rem;font-weight:400;color:var(--muted);letter-spacing:0}
.alerts{margin:1.4rem 0 0;padding:.2rem 1rem;border-left:3px solid var(--alert);background:var(--tint)}
.alerts p{margin:.5rem 0}
figure{margin:1.9rem 0 2.4rem;break-inside:avoid}
figure svg{display:block;width:100%;height:auto;color:var(--ink)}
figcaption{margin-top:.6rem;max-width:46rem;font-size:.88rem;color:var(--muted)}
.source{white-space:nowrap;font-style:italic}
.table{overflow-x:auto;margin:1rem 0}
table{border-collapse:collapse;font-size:.9rem;line-height:1.35}
caption{text-align:left;color:var(--muted);font-size:.88rem;padding-bottom:.35rem}
th,td{padding:.32rem 1.1rem .32rem 0;text-align:left;vertical-align:baseline;border-bottom:1px solid var(--line)}
th:last-child,td:last-child{padding-right:0}
thead th{font-weight:500;color:var(--muted);border-bottom-color:var(--muted);vertical-align:bottom}
tbody th{font-weight:400}
.n{text-align:right;white-space:nowrap}
.strong{font-weight:650}
.note,.left-out{font-size:.9rem;color:var(--muted)}
p.note{max-width:46rem}
.left-out li{margin:.45rem 0}.left-out b{font-weight:600;color:var(--ink)}
code,pre{font-family:var(--mono);font-size:.86em}
pre{overflow-x:auto;padding:.8rem 1rem;background:var(--tint);line-height:1.4;white-space:pre-wrap;
overflow-wrap:anywhere}
details{margin:1rem 0}summary{cursor:pointer;color:var(--accent);font-size:.92rem}
:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
@media print{:root{--ink:#000;--muted:#444;--line:#bbb;--paper:#fff;--tint:#f4f4f4;--accent:#000;--alert:#000;
color-scheme:light}
body{max-width:none;padding:0;font-size:10pt}nav{display:none}h2{margin-top:1.6rem;break-after:avoid}
h3,thead,tr{break-inside:avoid;break-after:auto}.table{overflow:visible}a{text-decoration:none}
details::details-content{content-visibility:visible;height:auto}summary{color:var(--muted)}}
""".strip()


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
    if key == "classes-per-client":
        return f"{kind} with {flat.get('classes-per-client')} classes per client"
    return kind


def of_run(run: RunResult) -> tuple[str, Gallery]:
    """Return the page of a run, and its figures."""
    gallery = figures.of_run(run)
    flat, summary = run.flat, run.summary
    clients = summary.get("clients") or flat.get("clients")
    done = int(run.rounds["round"].max()) if len(run.rounds) else 0
    page = Page(
        title=f"{_method_title(run.method)} on {flat.get('dataset', '?')}",
        eyebrow=f"fedapp run · {run.out.name}",
        lead=(
            f"{clients} clients, {_partition_text(flat)}, {done} of {flat.get('num-server-rounds')} rounds of "
            f"{flat.get('local-epochs')} local epochs, model {flat.get('model')}, seed {run.seed}"
            + (f", started {str(run.versions['started'])[:16].replace('T', ' ')}" if "started" in run.versions else "")
        ),
    )
    page.facts = _facts(run)
    page.alerts = _alerts(run)
    page.add("scores", SECTIONS["scores"], _score_table(run), _pooled_note(run))
    page.add("data", SECTIONS["data"], _data_text(run))
    page.add("cost", SECTIONS["cost"], _traffic(run))
    _add_figures(page, gallery)
    page.add("scores", SECTIONS["scores"], _client_table(run), _rounds_table(run))
    page.add("data", SECTIONS["data"], _data_table(run))
    page.add("further", "Further results of the method", _further(run))
    page.add("warnings", "Warnings and dropped replies", _warnings(run))
    page.add("configuration", "Configuration", _configuration(run), _versions(run))
    page.add("left-out", "Figures left out", _left_out(gallery))
    _order(page)
    return page.html(), gallery


def _order(page: Page) -> None:
    order = [*SECTIONS, "runs", "further", "warnings", "configuration", "left-out"]
    page.sections = dict(sorted(page.sections.items(), key=lambda item: order.index(item[0])))


def _add_figures(page: Page, gallery: Gallery) -> None:
    for section, drawings in gallery.sections.items():
        page.add(section, SECTIONS[section], *(_figure(d) for d in drawings))


def _facts(run: RunResult) -> list[tuple[str, str, str]]:
    facts: list[tuple[str, str, str]] = []
    names = {"received": "As handed out", "trained": "After local training", "global": "Global model"}
    for protocol, scores in (run.summary.get("accuracy") or {}).items():
        if scores.get("last") is not None:
            spread = scores.get("last_std")
            note = f"± {100 * spread:.1f} over clients" if spread is not None else "central test set"
            facts.append((names.get(protocol, protocol), f"{100 * scores['last']:.1f} %", note))
    majority = run.card.get("majority_mean")
    if majority is not None:
        facts.append(("Guessing the majority", f"{100 * majority:.1f} %", "each client's largest class"))
    if run.summary.get("bytes_up") is not None:
        down = _bytes(run.summary.get("bytes_down"))
        facts.append(("Sent by a client", _bytes(run.summary["bytes_up"]), f"a round; receives {down}"))
    if run.summary.get("seconds") is not None:
        facts.append(("Time", _seconds(run.summary["seconds"]), "whole run"))
    return facts


def _alerts(run: RunResult) -> list[str]:
    alerts = []
    if run.error:
        where = ""
        if run.error.get("client") is not None:
            where = f" (client {run.error['client']}, round {run.error.get('round')}, {run.error.get('stage')})"
        alerts.append(f"<strong>The run did not end well</strong>{_h(where)}: {_h(run.error.get('message', ''))}")
    elif not run.ok:
        alerts.append("<strong>The run is not finished</strong>: there is no summary yet.")
    alerts += [_h(w) for w in run.summary.get("warnings") or []]
    if len(run.dropped):
        alerts.append(f'{len(run.dropped)} replies did not count: <a href="#warnings">see which</a>.')
    if run.summary.get("stopped"):
        alerts.append(f"Stopped early: {_h(run.summary['stopped'])}.")
    return alerts


def _score_table(run: RunResult) -> str:
    rows = [
        [
            f"{protocol}: {CAPTIONS.get(protocol, '')}",
            _percent(scores.get("last")),
            _percent(scores.get("last_std")),
            _percent((run.summary.get("pooled") or {}).get(protocol)),
            _percent(scores.get("balanced")),
            _percent(scores.get("best")),
        ]
        for protocol, scores in (run.summary.get("accuracy") or {}).items()
    ]
    head = ["accuracy in %", "last", "std over clients", "pooled", "balanced", "best round"]
    return _table(head, rows) if rows else ""


def _pooled_note(run: RunResult) -> str:
    if not run.summary.get("accuracy"):
        return ""
    size = float((run.summary.get("test_sizes") or {}).get("mean") or 0)
    one = f" A client has {size:.0f} test images on average: one image is {100 / size:.1f} points." if size else ""
    return (
        "<p class=note>Last is the headline: all clients after the last round, unweighted mean over clients. Pooled: "
        "weighted by test images. Balanced: mean recall over all classes on all clients' test images, which shows what "
        f"a client knows of classes it seldom saw.{one}</p>"
    )


def _client_table(run: RunResult) -> str:
    table = run.final
    if table.empty:
        return ""
    majority = run.card.get("majority") or []
    head, rows = ["client", "model", "training images", "test images"], []
    shown = [p for p in ("received", "trained") if f"{p}_accuracy" in table]
    head += [f"{p} %" for p in shown] + [f"{p} balanced %" for p in shown] + ["majority class %"]
    for _, row in table.iterrows():
        client = int(row["client"])
        tests = next((row[f"{p}_total"] for p in shown if f"{p}_total" in table), math.nan)
        model = run.config.model_of(client) if run.config is not None else "?"
        rows.append(
            [
                Cell(str(client)), model, int(row["num_samples"]), tests if math.isnan(tests) else int(tests),
                *(_percent(float(row[f"{p}_accuracy"])) for p in shown),
                *(_percent(float(row.get(f"{p}_balanced", math.nan))) for p in shown),
                _percent(majority[client]) if client < len(majority) else None,
            ]
        )  # fmt: skip
    more = f"<p class=note>The first {MOST_ROWS}; all in final.csv.</p>" if len(rows) > MOST_ROWS else ""
    return _details(f"Accuracy of every client as a table ({len(rows)})", _table(head, rows[:MOST_ROWS]) + more)


def _rounds_table(run: RunResult) -> str:
    if run.rounds.empty:
        return ""
    columns = [
        c for c in run.rounds.columns
        if c in ("round", "clients", "train_loss", "dropped", "round_seconds") or c.endswith(("_accuracy", "_balanced"))
    ]  # fmt: skip
    columns = [c for c in columns if run.rounds[c].notna().any()]
    rows = []
    for _, row in run.rounds[columns].tail(MOST_ROWS).iterrows():
        cells: list[Any] = []
        for c in columns:
            value = float(row[c])
            if c.endswith(("_accuracy", "_balanced")):
                cells.append(_percent(value))
            else:
                cells.append(int(value) if c in ("round", "clients", "dropped") else value)
        cells[0] = Cell(str(cells[0]))
        rows.append(cells)
    names = [c.replace("_accuracy", " %").replace("_balanced", " balanced %").replace("_", " ") for c in columns]
    return _details(f"All rounds as a table ({len(run.rounds)})", _table(names, rows))


def _data_text(run: RunResult) -> str:
    card = run.card
    if not card:
        return "<p class=note>The data lie on the devices; they told sample counts only.</p>"
    sizes, tests = card.get("train_sizes", []), card.get("test_sizes", [])
    classes = card.get("classes", [])
    text = (
        f"{card.get('dataset')}, dealt to {card.get('clients')} clients ({_partition_text(run.flat)}), split "
        f"{card.get('split')}. Training images {sum(sizes):,} ({min(sizes, default=0):,} to {max(sizes, default=0):,} "
        f"a client), test images {sum(tests):,} ({min(tests, default=0):,} to {max(tests, default=0):,} a client), "
        f"{len(classes)} classes."
    )
    for key, words in (
        ("unused", "images are held by nobody"),
        ("shared", "training images are held more than once"),
        ("public", "training images are held back as the public set"),
    ):
        if card.get(key):
            text += f" {card[key]:,} {words}."
    majority = card.get("majority_mean")
    if majority is not None:
        text += f" Always answering the own majority class scores {100 * majority:.1f} % (mean over clients)."
    return f"<p>{_h(text)}</p>"


def _data_table(run: RunResult) -> str:
    card = run.card
    if not card:
        return ""
    sizes, tests, classes = card.get("train_sizes", []), card.get("test_sizes", []), card.get("classes", [])
    rows = []
    for client, counts in enumerate(card.get("train", [])[:MOST_ROWS]):
        cells: list[Any] = [Cell(str(client))]
        if len(classes) <= 26:
            cells += [Cell("·" if not c else f"{c:,}", number=True) for c in counts]
        else:
            cells.append(int(np.count_nonzero(counts)))
        rows.append([*cells, sizes[client], tests[client], _percent(card["majority"][client])])
    names = [str(c) for c in classes] if len(classes) <= 26 else ["classes held"]
    table = _table(["client", *names, "train", "test", "majority %"], rows)
    return (
        f"{_details('Training images by client and class as a table', table)}"
        f"<p class=note>Hash of the partition: <code>{_h(card.get('hash', ''))}</code></p>"
    )


def _traffic(run: RunResult) -> str:
    summary, rounds = run.summary, run.rounds
    moved: list[tuple[str, float]] = []
    if summary.get("bytes_up") is not None:
        moved.append(("arrays that a client sends in a round", float(summary["bytes_up"])))
        moved.append(("arrays that a client receives in a round", float(summary.get("bytes_down") or 0)))
    for key, value in summary.items():
        if key.startswith("bytes_up_query"):
            moved.append((f"answer of a client to {key.removeprefix('bytes_up_')}", float(value)))
    if {"bytes_up", "bytes_down", "clients"} <= set(rounds.columns) and len(rounds):
        moved.append(("all clients and rounds, both ways", float(statistics.traffic(rounds)[-1])))
    parts = []
    if moved:
        rows = [[name, Cell(f"{n:,.0f}", number=True), Cell(_bytes(n), number=True)] for name, n in moved]
        parts.append(_table(["traffic", "bytes", "about"], rows))
    times: list[tuple[str, Any]] = []
    if "round_seconds" in rounds and len(rounds):
        times.append(("a round, median", rounds["round_seconds"].median()))
        times.append(("first round (with the start of the workers)", rounds["round_seconds"].iloc[0]))
    if "train_seconds" in rounds and len(rounds):
        times.append(("local training of a client in a round, mean", rounds["train_seconds"].mean()))
    if summary.get("seconds") is not None:
        times.append(("whole run", summary["seconds"]))
    if times:
        parts.append(_table(["time", "wall clock"], [[n, Cell(_seconds(t), number=True)] for n, t in times]))
    return "".join(parts)


KNOWN = {
    "ok", "method", "dataset", "model", "clients", "rounds", "seed", "accuracy", "pooled", "test_sizes", "bytes_up",
    "bytes_down", "dropped", "stopped", "warnings", "seconds", "error",
}  # fmt: skip


def _further(run: RunResult) -> str:
    rows = []
    for key, value in run.summary.items():
        if key in KNOWN or key.startswith("bytes_up_query") or value in (None, {}, []):
            continue
        text = _plain(value)
        rows.append([key, text if len(text) <= 600 else f"{text[:600]} … (all in summary.json)"])
    return _table(["name", "value"], rows) if rows else ""


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
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _warnings(run: RunResult) -> str:
    parts = []
    if run.error:
        trace = str(run.error.get("traceback") or "").strip()
        parts.append(f"<p>{_h(run.error.get('message', ''))}</p>")
        if trace:
            parts.append(_details("Traceback", f"<pre>{_h(trace)}</pre>"))
    parts += [f"<p>{_h(w)}</p>" for w in run.summary.get("warnings") or []]
    if run.problem:
        parts.append(f"<p>This version does not accept the run's configuration: {_h(run.problem)}</p>")
    if len(run.dropped):
        rows = [
            [Cell(str(r["round"])), Cell(str(r["client"])), str(r["stage"]), str(r["reason"])]
            for _, r in run.dropped.head(MOST_ROWS).iterrows()
        ]
        parts.append(
            _table(["round", "client", "stage", "reason"], rows, f"{len(run.dropped)} replies that did not count")
        )
    if not parts:
        parts.append(f"<p class=note>{'None: every reply counted.' if run.ok else 'None so far.'}</p>")
    return "".join(parts)


def _configuration(run: RunResult) -> str:
    defaults = configuration.defaults()
    own, usual = [], []
    for key, value in run.flat.items():
        if key in defaults and value == defaults[key]:
            usual.append([key, _setting(value)])
        else:
            own.append([key, _setting(value), _setting(defaults[key]) if key in defaults else "–"])
    note = (
        "<p class=note>The effective configuration, as in <code>config.toml</code>; <code>fedapp run config.toml</code>"
        " repeats the run. Where the default is auto, the value is the method's own.</p>"
    )
    return (
        note
        + _table(["key", "value", "default"], own)
        + _details(f"Keys at their defaults ({len(usual)})", _table(["key", "value"], usual))
    )


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "(empty)" if value == "" else str(value)


def _versions(run: RunResult) -> str:
    rows = [[k, str(v)] for k, v in run.versions.items()]
    return _details("Versions", _table(["what", "version"], rows)) if rows else ""


def _left_out(gallery: Gallery) -> str:
    if not gallery.missing:
        return ""
    items = "".join(
        f"<li><b>{_h(m.title)}</b>: {_h(m.why)}." + (f" <code>{_h(m.command)}</code>" if m.command else "") + "</li>"
        for m in gallery.missing
    )
    return f'<ul class="left-out">{items}</ul>'


# ---- several runs ----------------------------------------------------------------------------------------------------


def of_comparison(comparison: Comparison) -> tuple[str, Gallery]:
    """Return the page of a comparison, and its figures."""
    gallery = figures.of_comparison(comparison)
    runs, finished = comparison.runs, comparison.finished
    methods = comparison.labels
    datasets = sorted({str(r.flat.get("dataset", "?")) for r in runs})
    settings = list(groups_of(finished))
    seeds = sorted({r.seed for r in runs})
    first = runs[0].flat
    same = varying(runs)
    parts = [f"{len(methods)} methods", f"{len(seeds)} seed{'s' if len(seeds) != 1 else ''}"]
    parts.append(f"{len(settings)} settings" if len(settings) > 1 else _partition_text(first))
    for key, words in (("clients", "clients"), ("num-server-rounds", "rounds"), ("local-epochs", "local epochs")):
        if key not in same:
            parts.append(f"{first.get(key)} {words}")
    page = Page(
        title=f"{len(methods)} methods on {', '.join(datasets)}",
        eyebrow=f"fedapp comparison · {comparison.out.name}",
        lead=", ".join(parts) + ". The methods of a setting share partition and sampling of clients.",
    )
    broken = [r for r in runs if not r.ok]
    if broken:
        named = ", ".join(str(r.out.relative_to(comparison.out)) for r in broken[:10])
        more = f" and {len(broken) - 10} more" if len(broken) > 10 else ""
        page.alerts.append(
            f"<strong>{len(broken)} of {len(runs)} runs have not ended well</strong> and are not counted: "
            f"{_h(named)}{more}."
        )
    drops = [(r, len(r.dropped)) for r in finished if len(r.dropped)]
    if drops:
        named = ", ".join(f"{r.out.name} {n}" for r, n in drops[:10])
        page.alerts.append(f"Replies that did not count: {_h(named)}.")
    for setting, members in settings:
        page.add("scores", SECTIONS["scores"], _comparison_table(comparison, setting_text(setting), members))
        page.add("scores", SECTIONS["scores"], _significance(comparison, members))
    if settings:
        page.add("scores", SECTIONS["scores"], _comparison_note(finished))
    page.add("scores", SECTIONS["scores"], _other_tables(comparison))
    if finished:
        where = f"<p class=note>Of {_h(finished[0].out.relative_to(comparison.out))}:</p>" if len(runs) > 1 else ""
        page.add("data", SECTIONS["data"], where, _data_text(finished[0]))
    _add_figures(page, gallery)
    if finished:
        page.add("data", SECTIONS["data"], _data_table(finished[0]))
    page.add("runs", "Runs", _runs_table(comparison))
    page.add("warnings", "Warnings", _comparison_warnings(comparison))
    page.add("configuration", "Configuration", _shared_configuration(runs))
    page.add("left-out", "Figures left out", _left_out(gallery))
    _order(page)
    return page.html(), gallery


COLUMNS = (
    ("received", "received", "last"), ("trained", "trained", "last"), ("received balanced", "received", "balanced"),
    ("trained balanced", "trained", "balanced"), ("global", "global", "last"),
)  # fmt: skip


def _spread(values: Sequence[float]) -> str:
    kept = [v for v in values if not math.isnan(v)]
    if not kept:
        return "–"
    text = f"{100 * float(np.mean(kept)):.1f}"
    return f"{text} ± {100 * float(np.std(kept, ddof=1)):.1f}" if len(kept) > 1 else text


def _low_end(run: RunResult, share: float) -> float:
    """Mean final accuracy of the worst clients: of one (`share` 0), or of a tenth of them; trained, else received."""
    for protocol in ("trained", "received"):
        column = f"{protocol}_accuracy"
        if column in run.final and run.final[column].notna().any():
            values = np.sort(run.final[column].dropna().to_numpy(float))
            return float(values[: max(1, math.ceil(share * len(values)))].mean())
    return math.nan


FURTHER: dict[str, Callable[[RunResult], float]] = {
    "best received": lambda run: run.score("received", "best"),
    "best trained": lambda run: run.score("trained", "best"),
    "worst client": lambda run: _low_end(run, 0.0),
    "worst tenth": lambda run: _low_end(run, 0.1),
}


def _comparison_table(comparison: Comparison, name: str, runs: Sequence[RunResult]) -> str:
    labels: dict[str, list[RunResult]] = {}
    for run in sorted(runs, key=lambda r: (comparison.labels.index(r.label), r.out)):
        labels.setdefault(run.label, []).append(run)
    scores: list[tuple[str, dict[str, list[float]]]] = []
    for title, protocol, which in COLUMNS:
        values = {n: [r.score(protocol, which) for r in m] for n, m in labels.items()}
        if any(not math.isnan(v) for found in values.values() for v in found):
            scores.append((title, values))
    rest = [(title, {n: [score(r) for r in m] for n, m in labels.items()}) for title, score in FURTHER.items()]
    names = {label: _label_title(members[0]) for label, members in labels.items()}
    targets = {label: _target(comparison, members) for label, members in labels.items()}
    level = next((t[0] for t in targets.values() if t), "")
    cost = []
    for label, members in labels.items():
        row: list[Any] = [names[label]]
        if level:
            _, rounds, traffic = targets[label] or ("", "–", "–")
            row += [Cell(rounds, number=True), Cell(traffic, number=True)]
        for key in ("bytes_up", "bytes_down"):
            row.append(Cell(_bytes(np.mean([float(r.summary.get(key) or 0) for r in members])), number=True))
        row.append(Cell(_seconds(np.mean([float(r.summary.get("seconds") or 0) for r in members])), number=True))
        cost.append(row)
    counted = [f"rounds to {level}", "traffic to it"] if level else []
    return "".join(
        [
            f"<h3>{_h(_capital(name))}</h3>" if name else "",
            _table(["accuracy in %", *(t for t, _ in scores)], _score_rows(names, scores)),
            _table(["further, in %", *(t for t, _ in rest)], _score_rows(names, rest)),
            _table(["cost", *counted, "bytes up", "bytes down", "time"], cost),
        ]
    )


def _label_title(run: RunResult) -> str:
    """The method's title, with its own values where its label has some."""
    inside = run.label.removeprefix(run.method)
    return f"{_method_title(run.method)} {inside}".strip()


def _lines_of(table: pd.DataFrame, run: RunResult) -> pd.DataFrame:
    """Rows of one of `fedapp compare`'s tables that speak of a run's setting."""
    for column, key in (
        ("dataset", "dataset"), ("partition", "partition"), ("alpha", "alpha"),
        ("classes_per_client", "classes-per-client"),
    ):  # fmt: skip
        if column in table and uses(run, key):
            table = table[table[column] == run.flat.get(key)]
    return table


def _target(comparison: Comparison, runs: Sequence[RunResult]) -> tuple[str, str, str] | None:
    """Level, rounds and bytes to the target accuracy, as `fedapp compare` counted them; mean over seeds."""
    table = comparison.table
    if not {"variant", "trained_target", "trained_target_rounds", "trained_target_bytes"} <= set(table.columns):
        return None
    lines = _lines_of(table[table["variant"] == runs[0].label], runs[0])
    if lines.empty or lines["trained_target"].isna().all():
        return None
    level = f"{100 * float(lines['trained_target'].mean()):.1f} %"
    reached = lines[lines["trained_target_rounds"].notna()]
    if reached.empty:
        return level, "never", "–"
    part = f" ({len(reached)}/{len(lines)})" if len(reached) < len(lines) else ""
    rounds, moved = float(reached["trained_target_rounds"].mean()), float(reached["trained_target_bytes"].mean())
    return level, f"{rounds:.1f}{part}", _bytes(moved)


def _significance(comparison: Comparison, runs: Sequence[RunResult]) -> str:
    """Show what `fedapp compare` tested: differences to the reference in points, with p after Holm's correction."""
    try:
        table = pd.read_csv(comparison.out / "significance.csv")
    except (OSError, ValueError):
        return ""
    wanted = {"measure", "variant", "reference", "mean_difference", "p_holm"}
    if not wanted <= set(table.columns) or not runs:
        return ""
    table = _lines_of(table, runs[0])
    measures = list(dict.fromkeys(table["measure"]))
    rows = []
    for variant in dict.fromkeys(table["variant"]):
        cells: list[Any] = [str(variant)]
        for measure in measures:
            line = table[(table["variant"] == variant) & (table["measure"] == measure)]
            if line.empty or line["mean_difference"].isna().all():
                cells.append(None)
                continue
            p = float(line["p_holm"].iloc[0])
            shown = "–" if math.isnan(p) else f"{p:.3f}" if p >= 0.001 else "< 0.001"
            points = 100 * float(line["mean_difference"].iloc[0])
            cells.append(Cell(f"{points:+.1f}, p {shown}", number=True, strong=p < 0.05))
        rows.append(cells)
    if not rows:
        return ""
    reference = str(table["reference"].iloc[0])
    caption = (
        f"Difference to {reference} in points, paired over clients and seeds; p of Wilcoxon's signed-rank test after "
        "Holm's correction, bold below 0.05"
    )
    return _table(["method", *(str(m).replace("_accuracy", "").replace("_", " ") for m in measures)], rows, caption)


def _score_rows(names: Mapping[str, str], columns: Sequence[tuple[str, dict[str, list[float]]]]) -> list[list[Any]]:
    """Return a row a method: its name, then mean and spread of each column in percent, the highest mean in bold."""
    best = {
        title: max((float(np.nanmean(v)) for v in values.values() if not np.isnan(v).all()), default=math.nan)
        for title, values in columns
    }
    rows: list[list[Any]] = []
    for label, name in names.items():
        cells: list[Any] = [name]
        for title, values in columns:
            scores = values[label]
            top = not np.isnan(scores).all() and math.isclose(float(np.nanmean(scores)), best[title], abs_tol=1e-12)
            cells.append(Cell(_spread(scores), number=True, strong=top))
        rows.append(cells)
    return rows


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _comparison_note(runs: Sequence[RunResult]) -> str:
    seeds = len({r.seed for r in runs})
    sizes = [float((r.summary.get("test_sizes") or {}).get("mean") or 0) for r in runs]
    size = float(np.mean(sizes)) if sizes else 0.0
    one = f" A client has {size:.0f} test images on average: one image is {100 / size:.1f} points." if size else ""
    spread = f"Mean ± standard deviation over {seeds} seeds. " if seeds > 1 else "One seed: no spread is known. "
    majority = [r.card["majority_mean"] for r in runs if r.card.get("majority_mean") is not None]
    guess = f" Guessing each client's majority class scores {100 * np.mean(majority):.1f} %." if majority else ""
    return (
        f"<p class=note>{spread}After the last round. Received: as handed out, before local training; trained: after "
        "it; both on each client's own test split, mean over clients. Balanced: mean recall over all classes on all "
        "clients' test images. Best: the best round. Worst client and worst tenth of the clients: trained models on "
        "own test splits. Rounds and traffic to a target: trained models; the target is what the reference ends at "
        "unless one was given. Bytes: a client and round. Bold: the highest mean of a column, which with few seeds may "
        f"be chance.{guess}{one}</p>"
    )


def _other_tables(comparison: Comparison) -> str:
    """Show tables that lie beside results.csv and are not shown elsewhere on the page."""
    parts = []
    for path in sorted(comparison.out.glob("*.csv")):
        if path.name in ("results.csv", "curves.csv", "significance.csv"):
            continue
        try:
            table = pd.read_csv(path)
        except (OSError, ValueError):
            continue
        rows = [list(row) for row in table.head(MOST_ROWS).itertuples(index=False)]
        name = path.stem.replace("_", " ").replace("-", " ")
        parts.append(_details(f"{name[:1].upper()}{name[1:]} ({len(table)} rows)", _table(list(table.columns), rows)))
    return "".join(parts)


def _runs_table(comparison: Comparison) -> str:
    keys = varying(comparison.runs)
    rows = []
    for run in comparison.runs:
        rows.append(
            [
                str(run.out.relative_to(comparison.out)), Cell(str(run.seed)),
                *(str(run.flat.get(k, "")) for k in keys),
                *(_percent(run.score(p)) for p in ("received", "trained", "global")),
                int(run.summary.get("dropped") or 0), run.ok,
            ]
        )  # fmt: skip
    head = ["run", "seed", *keys, "received %", "trained %", "global %", "dropped", "ended well"]
    return _table(head, rows[:MOST_ROWS]) + (
        "<p class=note>Each is a full run directory: <code>fedapp report</code> makes a page of its own.</p>"
    )


def _comparison_warnings(comparison: Comparison) -> str:
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
        return "<p class=note>None.</p>"
    return _table(["warning", "runs"], [[text, ", ".join(names)] for text, names in seen.items()])


def _shared_configuration(runs: Sequence[RunResult]) -> str:
    """Say what all runs share, and in which training settings methods differ (`auto` is each method's own)."""
    keys = list(dict.fromkeys(k for r in runs for k in r.flat))
    hidden = ("out", "resume", "method", "seed")
    shared, differing = [], []
    for key in keys:
        values = {str(r.flat.get(key)) for r in runs}
        if key in hidden:
            continue
        if len(values) == 1:
            value = next(iter(values))
            shared.append([key, value if value else "(empty)"])
        else:
            by: dict[str, list[str]] = {}
            for run in runs:
                names = by.setdefault(str(run.flat.get(key)) or "(empty)", [])
                if run.method not in names:
                    names.append(run.method)
            differing.append([key, "; ".join(f"{value}: {', '.join(names)}" for value, names in by.items())])
    parts = []
    if differing:
        parts.append(_table(["key", "values"], differing, "In what the runs differ"))
    parts.append(_details(f"What all runs share ({len(shared)} keys)", _table(["key", "value"], shared)))
    return "".join(parts)
