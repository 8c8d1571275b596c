"""The parts of a report's page, and the page: `report.html.jinja` says how each part looks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from fedapp.results.figures import Drawing, Gallery, Missing
from fedapp.results.statistics import DASH, percent

TEMPLATE = "report.html.jinja"
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
    "runs": "Runs",
    "further": "Further results of the method",
    "warnings": "Warnings and dropped replies",
    "configuration": "Configuration",
    "left-out": "Figures left out",
}
"""Sections in the order of the page: anchor and heading. Those without content are left out."""


@dataclass
class Cell:
    """A table cell: text, whether it is a number (right-aligned), whether it stands out."""

    text: str
    number: bool = True
    strong: bool = False


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

    kind: ClassVar[str] = "table"

    def __init__(self, head: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> None:
        self.head, self.caption = list(head), caption
        self.cells = [[_cell(v) for v in row] for row in rows]
        self.right = [any(row[i].number for row in self.cells) for i in range(len(self.head))]


@dataclass
class Text:
    """A paragraph, a `note` below a table, a `heading`, or `code` with its line ends."""

    text: str
    kind: str = "paragraph"


@dataclass
class Fold:
    """Parts that a reader opens."""

    kind: ClassVar[str] = "fold"
    summary: str
    parts: list[Part]


@dataclass
class Figure:
    """A figure with heading and caption."""

    kind: ClassVar[str] = "figure"
    drawing: Drawing


@dataclass
class LeftOut:
    """The figures that are missing, with the reasons."""

    kind: ClassVar[str] = "left-out"
    missing: list[Missing]


Part = Table | Text | Fold | Figure | LeftOut


def note(text: str, **values: object) -> Text:
    """Return a note; `text` may hold tags, the values are escaped."""
    return Text(Markup(text).format(**values), "note")


@dataclass
class Page:
    """A page under construction."""

    title: str
    eyebrow: str
    lead: str
    facts: list[tuple[str, str, str]] = field(default_factory=list)
    alerts: list[str] = field(default_factory=list)
    sections: dict[str, list[Part]] = field(default_factory=lambda: {key: [] for key in SECTIONS})

    def add(self, key: str, *parts: Part | None) -> None:
        """Add parts to a section."""
        self.sections[key].extend(p for p in parts if p is not None)

    def add_figures(self, gallery: Gallery) -> None:
        """Add all figures, and the list of those that are missing."""
        for key, drawings in gallery.sections.items():
            self.add(key, *map(Figure, drawings))
        self.add("left-out", LeftOut(gallery.missing) if gallery.missing else None)

    @property
    def shown(self) -> list[tuple[str, str, list[Part]]]:
        """Sections with content: anchor, heading, parts."""
        return [(key, SECTIONS[key], parts) for key, parts in self.sections.items() if parts]

    def html(self) -> str:
        """Return the whole page."""
        templates = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
        return templates.get_template(TEMPLATE).render(page=self) + "\n"
