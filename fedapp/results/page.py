"""The tables of a report's page, and the page, which the templates next to this file lay out.

`run.html.jinja` and `comparison.html.jinja` hold the text of a page, `parts.html.jinja` the look of its parts, and
`report.html.jinja` the frame.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader

from fedapp.data.partitions import PARTITION_PARAMETER
from fedapp.errors import counted
from fedapp.registry import method_title
from fedapp.results.figures import Gallery
from fedapp.results.runs import HARM_TEXT, ONE_SCORE, PROTOCOL_TEXT, UNADJUSTED, Comparison, RunResult
from fedapp.results.statistics import DASH, duration, percent, size

MOST_ROWS = 400
"""Rows that a table of the page shows at most; the rest is in the CSV file that it names."""
SECTIONS = {
    "differences": "Differences",
    "scores": "Results",
    "clients": "Who gains",
    "bytes": "What it costs",
    "classes": "Recall by class",
    "curves": "Curves",
    "sweeps": "Sweeps",
    "data": "Data",
    "heads": "Inside the method",
    "cost": "Traffic and time",
    "runs": "Runs",
    "further": "Further results of the method",
    "warnings": "Warnings and dropped replies",
    "configuration": "Configuration",
    "reproduce": "Reproduce and cite",
}
"""Sections in the order of the page: anchor and heading. Those without content are left out."""

MORE = ("classes", "data", "heads", "runs", "further", "warnings", "left-out")
"""Sections that are not printed, so that ten methods fit on two sheets."""


@dataclass
class Cell:
    """A table cell: text, whether it is a number (right-aligned), whether it is bold, and where it links to."""

    text: str
    number: bool = True
    strong: bool = False
    href: str = ""


def _cell(value: Any) -> Cell:
    if isinstance(value, Cell):
        return value
    if isinstance(value, (bool, np.bool_)):
        return Cell("yes" if value else "no", number=False)
    if value is None:
        return Cell(DASH)
    if isinstance(value, (int, np.integer)):
        return Cell(f"{int(value):,}")
    if isinstance(value, (float, np.floating)):
        number = float(value)
        return Cell(DASH if math.isnan(number) else f"{number:,.4g}" if abs(number) < 1e6 else f"{number:,.0f}")
    return Cell(str(value), number=False)


def share(value: Any) -> Cell:
    """Return a cell with a share in percent."""
    return Cell(percent(value))


class Table:
    """A table; the first column names its row. Cells are values or `Cell`s, numbers stand on the right."""

    def __init__(self, head: Iterable[str], rows: Iterable[Sequence[Any]], caption: str = "") -> None:
        self.head, self.caption = list(head), caption
        self.cells = [[_cell(v) for v in row] for row in rows]
        self.right = [any(row[i].number for row in self.cells) for i in range(len(self.head))]


def meaning(protocols: Iterable[str], runs: Iterable[RunResult] = ()) -> str:
    """Explain the protocols of a table of `runs`, for its caption."""
    told = {p: f"{p}: {PROTOCOL_TEXT[p]}" for p in protocols}
    if "global" in told and any(run.adjusted for run in runs):
        told["global"] += f"; {UNADJUSTED}"
    return "; ".join(told.values())


def partition_text(flat: Mapping[str, Any]) -> str:
    """Write a run-config's partition with its parameter."""
    kind = str(flat.get("partition", "?"))
    key = PARTITION_PARAMETER.get(kind)
    if key == "alpha":
        return f"{kind} with alpha {flat.get('alpha')}"
    return f"{kind} with {counted(flat[key], 'class')} per client" if key else kind


def place(run: RunResult, comparison: Comparison) -> str:
    """Return where in the folder of a comparison a run lies."""
    return str(run.out.relative_to(comparison.out))


def render(template: str, gallery: Gallery, **values: Any) -> str:
    """Return a whole page: `template` sets its title, lead, facts, alerts and sections, by their names in `SECTIONS`.

    A section that the template does not set holds its figures only. Sections without content are left out.
    """
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    templates.filters |= {
        "percent": percent, "size": size, "duration": duration, "whole": lambda n: f"{n or 0:,}", "meaning": meaning,
        "method": method_title, "partition": partition_text, "place": place,
    }  # fmt: skip
    templates.globals |= {
        "ONE_SCORE": ONE_SCORE,
        "HARM_TEXT": HARM_TEXT,
        "MOST_ROWS": MOST_ROWS,
        "MORE": MORE,
        "SCRIPT": (script := (Path(__file__).parent / "report.js").read_text(encoding="utf-8")),
        "SCRIPT_HASH": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }
    parts: Any = templates.get_template("parts.html.jinja").module
    words = templates.get_template(template).make_module({**values, "gallery": gallery})
    sections = [
        (key, title, text)
        for key, title in SECTIONS.items()
        if (text := (getattr(words, key) if hasattr(words, key) else parts.figures(gallery, key)).strip())
    ]
    if gallery.missing:
        sections.append(("left-out", "Figures left out", parts.left_out(gallery)))
    return templates.get_template("report.html.jinja").render(words=words, sections=sections) + "\n"
