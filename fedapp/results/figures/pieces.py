"""Parts of figures: panels, looks of lines, legends, heat maps; arrays in, no run directories."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import Formatter
from numpy.typing import NDArray

from fedapp.results.figures.style import (
    COLOURS,
    DASHES,
    HEAT,
    INK,
    LINE,
    MARKERS,
    MUTED,
    NARROW,
    ON_DARK,
    ON_LIGHT,
    WIDTH,
    is_narrow,
    letters,
    mark_of,
    place_of,
)

Array = NDArray[Any]
MAX_TICKS = 32
"""Names on an axis at most."""


@dataclass(frozen=True, eq=False)
class Curve:
    """A line with a band: x (n,), mean (n,), spread (n,) or None (half the height of the band)."""

    label: str
    x: Array
    mean: Array
    spread: Array | None = None


Panels = Mapping[str, Sequence[Curve]]
"""Curves by the title of their panel; a label has the same look in all panels."""


class Percent(Formatter):
    """Writes shares in percent, with a decimal where ticks lie between whole percents."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """Return one share as text."""
        return self.format_ticks([x])[0]

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        """Return shares as text, all with as many decimals."""
        shown = 100 * np.asarray(values, dtype=float)
        fine = bool(np.abs(shown - shown.round()).max(initial=0.0) > 0.01)
        return [f"{v:.{1 if fine else 0}f} %" for v in shown]


def new_figure(
    width: float, height: float, xlabel: str, ylabel: str, rows: int = 1, columns: int = 1, grid: Any = "y", **more: Any
) -> tuple[Figure, Array]:  # fmt: skip
    """Return a figure in inches and its axes (rows, columns), named at the left and below; `grid` names grid lines.

    On a narrow page panels stand one below the other, each as high as on a wide one.
    """
    shape = rows, columns
    if is_narrow():
        height, width = min(height / rows, 2.7 if grid else np.inf), NARROW
        shape = rows * columns, 1
        height *= shape[0]
    figure = Figure(figsize=(width, height), layout="constrained")  # no pyplot: no window system and no global state
    drawn = figure.subplots(*shape, squeeze=False, **more)
    for axes in drawn.flat if grid else ():
        axes.grid(axis=grid)
    for axes in drawn[:, 0]:
        axes.set_ylabel(ylabel)
    for axes in drawn[-1]:
        axes.set_xlabel(xlabel)
    panels: Array = drawn.reshape(rows, columns)
    return figure, panels


def entitle(axes: Axes, text: str, **more: Any) -> None:
    """Write a panel's title in as many lines as it needs."""
    spec, figure = axes.get_subplotspec(), axes.get_figure(root=True)
    across = 1 if spec is None else spec.get_gridspec().ncols
    width = (WIDTH if figure is None else figure.get_figwidth()) / across
    axes.set_title("\n".join(textwrap.fill(line, max(12, int(14 * width) - 3)) for line in text.split("\n")), **more)


def look_of(label: str, shown: Sequence[str], **more: Any) -> dict[str, Any]:
    """Colour, dashes and marker of a line; no two of the first 30 on a page agree in dashes, marker and filling.

    Where the page gives methods their colours, all else is drawn in the colours of text.
    """
    i, own = place_of(label, shown)
    colour = COLOURS[i % len(COLOURS)] if own else (INK, MUTED)[i % 2]
    return {
        "color": colour, "linestyle": DASHES[i % len(DASHES)], "marker": MARKERS[i % len(MARKERS)],
        "markerfacecolor": "none" if i % 2 else colour, "gid": mark_of(label), **more,
    }  # fmt: skip


def labels_of(panels: Panels) -> list[str]:
    """Return the labels of all curves, each once."""
    return list(dict.fromkeys(c.label for lines in panels.values() for c in lines))


def legend(figure: Figure, *more: Artist) -> None:
    """Put one legend of all panels, and of marks that no panel names, below them."""
    found: dict[str, Any] = {
        label: h for axes in figure.axes for h, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    found |= {str(h.get_label()): h for h in more}
    if not found:
        return
    # Columns are as wide as the longest label; a letter takes about a fifteenth of an inch, line and gap nine letters.
    fit = max(1, int(15 * figure.get_figwidth() / (max(map(len, found)) + 9)))
    columns = min(6, fit)
    lines = math.ceil(len(found) / columns) - (0 if is_narrow() else 2)
    figure.set_figheight(figure.get_figheight() + 0.17 * max(0, lines))  # a long one must not take the panels' room
    figure.legend(
        found.values(), [textwrap.fill(text, 50) for text in found], loc="outside lower left", ncols=columns,
        handlelength=3.2, columnspacing=1.4,
    )  # fmt: skip


def key(label: str, **looks: Any) -> Line2D:
    """Return a mark for a legend."""
    return Line2D([], [], label=label, **looks)


def in_percent(axes: Axes) -> None:
    """Write the vertical axis in percent."""
    axes.yaxis.set_major_formatter(Percent())


def name_ticks(axis: Any, names: Sequence[Any], at: float = 0.0, **text: Any) -> None:
    """Name the positions `at`, `at` + 1, ..., thinned out where there are many."""
    shown = range(0, len(names), max(1, math.ceil(len(names) / (MAX_TICKS // (2 if is_narrow() else 1)))))
    axis.set_ticks([i + at for i in shown], [str(names[i]) for i in shown], **text)


def slant(names: Sequence[Any]) -> dict[str, Any]:
    """Return the properties of names below an axis: long ones are turned."""
    long = len(names) > 4 and max(len(str(n)) for n in names) > 3
    return {"rotation": 45, "horizontalalignment": "right"} if long else {}


def brightness(colour: Any) -> float:
    """Return the relative luminance of a colour (WCAG 2.1)."""
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def heat_map(
    axes: Axes, values: Array, columns: Sequence[Any], rows: Sequence[Any], high: float | None = None, fmt: str = "",
    low: float | None = 0,
) -> Any:  # fmt: skip
    """Draw a matrix with row 0 on top and named columns and rows; `fmt` writes each value into its cell."""
    n, m = np.shape(values)
    mesh = axes.imshow(
        np.asarray(values, float), cmap=HEAT, vmin=low, vmax=high, aspect="auto", extent=(0, m, n, 0),
        interpolation="none",  # in an SVG one pixel a cell, which is small and sharp
    )  # fmt: skip
    name_ticks(axes.xaxis, columns, 0.5, **slant(columns))
    name_ticks(axes.yaxis, rows, 0.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    widest = max((len(format(v, fmt)) for v in np.ravel(values)), default=0) if fmt else 0
    if is_narrow() and m * (widest + 1) > 42:  # numbers that would run into each other
        fmt = ""
    for (i, j), value in np.ndenumerate(values) if fmt else ():
        if np.isfinite(value) and value != 0:
            # Either text has a contrast of 4.5 to 1 there; on a dark page the page turns cells and texts around.
            dark = brightness(mesh.cmap(mesh.norm(value))) < 0.18
            axes.text(
                j + 0.5, i + 0.5, format(value, fmt), ha="center", va="center", fontsize=letters(6.5),
                color=ON_DARK if dark else ON_LIGHT,
            )  # fmt: skip
    return mesh


def colour_scale(
    figure: Figure, mesh: Any, axes: Any, label: str = "", pad: float = 0.015, location: str = "right"
) -> None:
    """Draw what the colours of a heat map mean next to its axes, or below them."""
    if is_narrow():
        location, pad = "bottom", 0.02
    beside = location == "right"
    bar = figure.colorbar(mesh, ax=axes, label=label, location=location, pad=pad, fraction=0.05, aspect=24)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2)
    # As pixels like those of the map, which the page can turn around for a dark scheme.
    if bar.solids is not None:
        bar.solids.set_visible(False)
    steps = np.linspace(mesh.norm.vmin, mesh.norm.vmax, 64)
    ends = (mesh.norm.vmin, mesh.norm.vmax)
    bar.ax.imshow(
        steps[:, None] if beside else steps[None], cmap=HEAT, norm=mesh.norm, aspect="auto", interpolation="none",
        origin="lower", extent=(0, 1, *ends) if beside else (*ends, 0, 1),
    )  # fmt: skip


def draw_dots(axes: Axes, scores: Mapping[str, Array], names: Sequence[Any]) -> None:
    """Draw several values (n,) of each name as dots on one vertical line."""
    place = np.arange(len(names))
    stack = np.stack(list(scores.values()))
    known = np.isfinite(stack).any(axis=0)
    spans = np.nanmin(stack[:, known], axis=0), np.nanmax(stack[:, known], axis=0)
    axes.vlines(place[known], *spans, color=LINE, linewidth=2.4)
    for label, values in scores.items():
        axes.plot(place, values, label=label, **look_of(label, list(scores), linestyle="none"))
    name_ticks(axes.xaxis, names, **slant(names))
