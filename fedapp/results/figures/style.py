"""How all figures look, and how they are written: the same bytes for the same data.

Colours are those of Okabe and Ito, darkened or lightened until they stand out from white and from near-black; nothing
is said by colour alone, so that every figure can be read on a grey printer: lines differ in dashes and markers, classes
and clients are drawn as their own numbers, heat maps run from light to dark.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

INK, MUTED, LINE = "#1b1d21", "#666b74", "#d4d7dd"
"""Text, secondary text and axes, grid lines. On the page these three follow the reader's light or dark scheme."""
COLOURS = (
    "#0072b2", "#d55e00", "#00916a", "#b5609a", "#b07d00", "#3a9bd0", "#7a7f87", "#8f5f3a", "#6a62c9", "#c63d5c",
)  # fmt: skip
DASHES: tuple[Any, ...] = (
    "-", (0, (5, 2)), (0, (1.2, 1.6)), (0, (6, 2, 1.2, 2)), (0, (3, 1.5)), (0, (8, 2, 1, 2, 1, 2)),
)  # fmt: skip
DOTTED = (0, (1, 2))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")
HEAT = LinearSegmentedColormap.from_list("fedapp-heat", ["#f4f6f9", "#bcd3e6", "#6aa3cc", "#22699f", "#08294b"])
"""Light to dark in one hue: the order of lightness is the order of values."""
WIDTH = 7.8
"""Width of a full figure in inches."""

SETTINGS: Any = dict(mpl.rcParamsDefault) | {
    "font.sans-serif": ["DejaVu Sans"], "font.size": 8.5, "text.color": INK,
    "axes.titlesize": 9, "axes.titlelocation": "left", "axes.titlecolor": INK,
    "axes.labelsize": 8.5, "axes.labelcolor": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": MUTED, "axes.linewidth": 0.7,
    "axes.facecolor": "none", "figure.facecolor": "none", "savefig.facecolor": "none",
    "axes.axisbelow": True, "grid.color": LINE, "grid.linewidth": 0.6,
    "xtick.color": MUTED, "xtick.labelsize": 8, "xtick.major.width": 0.7,
    "ytick.color": MUTED, "ytick.labelsize": 8, "ytick.major.width": 0.7,
    "legend.frameon": False, "legend.fontsize": 8,
    "lines.linewidth": 1.6, "lines.markersize": 4,
    "svg.hashsalt": "fedapp",
}  # fmt: skip
"""Everything that matplotlib reads while it draws and writes; what the process itself has set does not count."""
styled = mpl.rc_context(SETTINGS)
"""Decorator: a function draws or writes under `SETTINGS`, which leaves those of the process untouched."""


_PLACES: ContextVar[Mapping[str, int]] = ContextVar("places", default={})  # noqa: B039, it is never changed


@contextmanager
def one_look_each(labels: Sequence[str]) -> Iterator[None]:
    """Give each method one colour, dash and marker in all figures drawn inside, also where some do not show it."""
    token = _PLACES.set({label: i for i, label in enumerate(dict.fromkeys(labels))})
    try:
        yield
    finally:
        _PLACES.reset(token)


def looks() -> Mapping[str, int]:
    """Return the places of the methods that :func:`one_look_each` has set."""
    return _PLACES.get()


def place_of(label: str, shown: Sequence[str]) -> int:
    """Return which look a line has: its place on the page, or among the lines that its figure shows.

    A line that stands for several variants of a method (`fedprox` for `fedprox(mu=1)`) looks like the first of them.
    """
    places = _PLACES.get()
    if label in places:
        return places[label]
    return next((i for known, i in places.items() if known.partition("(")[0] == label), shown.index(label))


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure with what a page needs beside it.

    Attributes
    ----------
    id : file name and anchor.   title : a heading.   caption : what is drawn and how to read it.
    alt : what it shows, in words, for readers who do not see it.   source : the paper's figure, or an empty string.
    """

    id: str
    title: str
    caption: str
    alt: str
    figure: Figure
    source: str = ""

    def svg(self, text: bool = True) -> str:
        """Return the figure as SVG, the same bytes for the same data.

        Parameters
        ----------
        text : keep letters as text (for a page); False turns them into outlines (for a paper, whatever its fonts).
        """
        buffer = io.StringIO()
        with mpl.rc_context({**SETTINGS, "svg.fonttype": "none" if text else "path"}):
            self.figure.savefig(
                buffer, format="svg", metadata={"Date": None, "Creator": None}, facecolor="none" if text else "white"
            )
        return buffer.getvalue()

    def inline(self) -> str:
        """Return the figure as an SVG element for a page: its own ids, the page's colours, no reference to the web."""
        svg = self.svg()
        svg = svg[svg.index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        svg = re.sub(r' id="([^"]+)"', rf' id="{self.id}-\1"', svg)
        svg = re.sub(r'href="#([^"]+)"', rf'href="#{self.id}-\1"', svg)
        svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{self.id}-\1)", svg)
        svg = re.sub(r"'DejaVu Sans'(, *[^;\"]*)?", "var(--sans)", svg)
        for colour, variable in ((INK, "currentColor"), (MUTED, "var(--muted)"), (LINE, "var(--line)")):
            svg = svg.replace(colour, variable)
        head, rest = svg.split(">", 1)
        box = re.search(r'viewBox="([^"]+)"', head)
        assert box is not None, "matplotlib writes a viewBox"
        width = float(box[1].split()[2]) / 72
        return (
            f'<svg viewBox="{box[1]}" style="max-width:{width:.2f}in" role="img" aria-labelledby="{self.id}-alt" '
            f'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
            f'<title id="{self.id}-alt">{html.escape(self.alt, quote=False)}</title>{rest.strip()}'
        )

    @styled
    def png(self, dpi: int = 200) -> bytes:
        """Return the figure as PNG on white."""
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
        return buffer.getvalue()

    def save(self, folder: Path) -> None:
        """Write `ID.png` and `ID.svg` into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.id}.png").write_bytes(self.png())
        (folder / f"{self.id}.svg").write_text(self.svg(text=False), encoding="utf-8")
