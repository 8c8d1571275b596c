"""Charts with axes: arrays in, a matplotlib figure out. They know nothing of run directories."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from fedapp.results.figures.pieces import (
    Array,
    Panels,
    Percent,
    draw_dots,
    entitle,
    in_percent,
    key,
    labels_of,
    legend,
    look_of,
    new_figure,
)
from fedapp.results.figures.style import (
    COLOURS,
    DOTTED,
    INK,
    LINE,
    MUTED,
    WIDTH,
    is_narrow,
    letters,
    name_marks,
    styled,
)
from fedapp.results.intervals import in_words, size_of
from fedapp.results.statistics import size

# ---- against training alone ------------------------------------------------------------------------------------------

SIDES = {1: ("gains", ">", COLOURS[2]), 0: ("scores the same", "o", MUTED), -1: ("loses", "<", COLOURS[1])}
"""What a client's side is called, and its mark and colour."""


@styled
def forest(rows: Mapping[str, Mapping[str, Any] | str], reference: str) -> Figure:
    """Draw each method's difference to the reference in points: its mean and interval, its seeds, and the margin.

    Parameters
    ----------
    rows : method -> its row of `significance.csv`, or why it has none.
    """
    figure, ((axes,),) = new_figure(WIDTH, 1.0 + 0.26 * len(rows), f"points against {reference}", "", grid=None)
    axes.grid(axis="x")
    axes.axvline(0, color=INK, linewidth=0.8)
    shown, margin = list(rows), 0.0
    for place, (name, row) in enumerate(rows.items()):
        if isinstance(row, str):
            axes.annotate(row, (0.01, place), xycoords=("axes fraction", "data"), color=MUTED, va="center")
            continue
        look, margin = look_of(name, shown, linestyle="none"), 100 * row["margin"]
        values = 100 * np.array(json.loads(row["by_seed"]))
        own = {"color": look["color"], "gid": look["gid"]}
        (seeds,) = axes.plot(values, np.full(len(values), place + 0.25), ".", markersize=5, **own)
        name_marks(seeds, [f"{name}, one seed: {v:+.1f}" for v in values])
        if row["seeds"] > 2:
            axes.plot([100 * row["low"], 100 * row["high"]], [place] * 2, **own)
            (mean,) = axes.plot(100 * row["mean_difference"], place, **{**look, "markersize": 7})
            name_marks(mean, [f"{name}: {in_words(row)}"])
    if margin:
        axes.axvspan(-margin, margin, color=MUTED, alpha=0.15, linewidth=0)
    axes.set_yticks(range(len(rows)), [textwrap.fill(n, 20) if is_narrow() else n for n in rows])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    keys = [key("one seed", color=MUTED, marker=".", linestyle="none")]
    if any(not isinstance(row, str) and row["seeds"] > 2 for row in rows.values()):
        keys.insert(0, key("mean, 95 % interval", color=MUTED, markersize=7, marker="o"))
    legend(figure, *keys, key(f"margin, {size_of(margin / 100)} points", color=MUTED, linewidth=7, alpha=0.3))
    return figure


def _by_side(axes: Axes, table: pd.DataFrame, texts: Sequence[str], x: Array, y: Array, **how: Any) -> None:
    """Draw a mark for each client, which says on which side it is."""
    for side, (_, marker, colour) in SIDES.items():
        chosen = np.flatnonzero(table["side"] == side).tolist()
        (marks,) = axes.plot(x[chosen], y[chosen], marker, color=colour, **how)
        name_marks(marks, [texts[i] for i in chosen])


def _side_legend(figure: Figure, *more: Artist) -> None:
    marks = (key(word, marker=m, color=c, linestyle="none", markersize=6) for word, m, c in SIDES.values())
    legend(figure, *more, *marks)


@styled
def clients_alone(panels: Mapping[str, tuple[pd.DataFrame, Sequence[str]]], names: Mapping[Any, str]) -> Figure:
    """Draw the score of each client alone and with a method, a client a row, a panel for each method.

    Parameters
    ----------
    panels : method -> (`side`, `score`, `alone` of each client, hover text).
    names : of the clients of the rows, from above; a panel may lack some.
    """
    height = 1.0 + 0.16 * len(names)
    figure, (grid,) = new_figure(WIDTH, height, "own test rows", "", columns=len(panels), grid=None, sharex=True)
    for number, (axes, (title, (table, texts))) in enumerate(zip(grid, panels.items())):
        place = pd.Index(names).get_indexer(table.index)
        axes.grid(axis="x")
        axes.hlines(place, table["alone"], table["score"], color=LINE, linewidth=2.4)
        axes.plot(table["alone"], place, "|", color=INK, markersize=7)
        _by_side(axes, table, texts, table["score"].to_numpy(), place, markersize=6)
        entitle(axes, title)
        axes.set_ylim(len(names) - 0.5, -0.5)
        shown = names.values() if not number or is_narrow() else [""] * len(names)
        axes.set_yticks(range(len(names)), shown, fontsize=letters(7))
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.xaxis.set_major_formatter(Percent())
        axes.xaxis.set_major_locator(MaxNLocator(4))
    _side_legend(figure, key("alone", marker="|", color=INK, linestyle="none", markersize=7))
    return figure


@styled
def gain_by_rows(panels: Mapping[str, tuple[pd.DataFrame, Sequence[str]]]) -> Figure:
    """Draw the gain of each client against its number of training rows, a panel for each method.

    Parameters
    ----------
    panels : method -> (`side`, `score`, `alone`, `rows` of each client, hover text).
    """
    across = {"columns": len(panels), "sharex": True, "sharey": True}
    figure, (grid,) = new_figure(WIDTH, 2.7, "training rows of the client", "gain in points", **across)
    for axes, (title, (table, texts)) in zip(grid, panels.items()):
        axes.axhline(0, color=INK, linewidth=0.8)
        gain = 100 * (table["score"] - table["alone"]).to_numpy()
        _by_side(axes, table, texts, table["rows"].to_numpy(), gain, markersize=5, alpha=0.8)
        entitle(axes, title)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        rows = [table["rows"] for table, _ in panels.values()]
        if max(r.max() for r in rows) > 20 * max(1, min(r.min() for r in rows)):
            _in_numbers(axes)
    _side_legend(figure)
    return figure


@styled
def points(values: Mapping[str, tuple[float, float, str]], lines: Mapping[str, float], xlabel: str) -> Figure:
    """Draw a point a method on a logarithmic axis of bytes, and the front of those that no other beats on both axes.

    Parameters
    ----------
    values : method -> (bytes, > 0, score, hover text).   lines : dotted heights by name.
    """
    figure, ((axes,),) = new_figure(WIDTH, 3.0, xlabel, "accuracy")
    front, best = [], -np.inf
    for x, y, _ in sorted(values.values(), key=lambda v: (v[0], -v[1])):
        if y > best:
            front += [(x, y)] if best == -np.inf else [(x, best), (x, y)]
            best = y
    axes.plot(*np.transpose(front), color=LINE, linewidth=2.4, zorder=0)
    for name, (x, y, text) in values.items():
        (mark,) = axes.plot(x, y, label=name, **look_of(name, list(values), linestyle="none", markersize=7))
        name_marks(mark, [text])
    for name, height in lines.items():
        axes.axhline(height, color=MUTED, linewidth=1.0, linestyle=DOTTED, label=name)
    least, most = (f(x for x, *_ in values.values()) for f in (min, max))
    axes.set(xscale="log", xlim=(least / 3, most * 3))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3) if most < 1000 * least else (1,)))
    axes.xaxis.set_major_formatter(lambda x, _: size(x).replace(".0 ", " "))
    axes.xaxis.set_minor_formatter(NullFormatter())
    in_percent(axes)
    legend(figure, key("no method is better for fewer bytes", color=LINE, linewidth=2.4))
    return figure


def numeric_axis(axes: Axes, ticks: Sequence[float], crowded: bool) -> None:
    """Put these ticks on the horizontal axis; a crowded one becomes logarithmic, and linear around 0."""
    if crowded and ticks[0] > 0:
        axes.set_xscale("log")
    elif crowded:
        axes.set_xscale("symlog", linthresh=min(t for t in ticks if t > 0))
    axes.minorticks_off()
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])


def _in_numbers(axes: Axes) -> None:
    """Make the horizontal axis logarithmic, with numbers at its ticks: exponents are small."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


# ---- scores ----------------------------------------------------------------------------------------------------------


@styled
def curves(
    panels: Panels, xlabel: str = "round", ylabel: str = "accuracy", height: float = 3.1, percent: bool = True,
    baseline: tuple[str, float, str] | None = None, band: str = "", floor: float | None = 0,
) -> Figure:  # fmt: skip
    """Draw lines with bands, a panel each, with one legend.

    Parameters
    ----------
    baseline : name and height of a dotted line, and the title of a panel that does not have it.
    band : what half the height of a band is, for the legend; without it there are no bands.
    floor : lower end of an axis that is not in percent; None = where the lines end.
    """
    figure, (grid,) = new_figure(WIDTH, height, xlabel, ylabel, columns=len(panels), sharey=True)
    labels, more = labels_of(panels), []
    edges = (0.0, 1.0) if percent else (-np.inf, np.inf)  # bands leave 0 and 1, shares cannot
    banded = False
    for axes, (title, lines) in zip(grid, panels.items()):
        for curve in lines:
            look = look_of(curve.label, labels)
            axes.plot(curve.x, curve.mean, label=curve.label, markevery=max(1, len(curve.x) // 8), **look)
            if band and curve.spread is not None and np.any(half := np.nan_to_num(curve.spread)):
                alpha = 0.13 if len(lines) < 5 else 0.07
                low, high = (np.clip(curve.mean + sign * half, *edges) for sign in (-1, 1))
                axes.fill_between(curve.x, low, high, color=look["color"], alpha=alpha, linewidth=0, gid=look["gid"])
                banded = True
        entitle(axes, title)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=xlabel.endswith(("round", "rounds", "epochs"))))
        if baseline is not None and title != baseline[2]:
            axes.axhline(baseline[1], color=MUTED, linewidth=1.0, linestyle=DOTTED)
    ends = [axes.get_xlim() for axes in grid]
    for axes in grid:  # panels that are compared have the same scales
        axes.set_xlim(min(a for a, _ in ends), max(b for _, b in ends))
    if baseline is not None:
        more.append(key(baseline[0], color=MUTED, linewidth=1.0, linestyle=DOTTED))
    if banded and band:
        more.append(key(band, color=MUTED, linewidth=7, alpha=0.3))
    low, high = grid[0].get_ylim()
    if percent:
        in_percent(grid[0])
        grid[0].set_ylim(max(low, -0.02), min(high, 1.03))
    elif floor is not None:
        grid[0].set_ylim(floor, high)
    legend(figure, *more)
    return figure


@styled
def client_scores(scores: Mapping[str, Array], clients: Sequence[Any], majority: Array | None = None) -> Figure:
    """Draw every client's accuracy by protocol as dots on one line, sorted by the first protocol.

    Parameters
    ----------
    scores : (K,) by protocol.   majority : (K,) what guessing the client's majority class scores.
    """
    order = np.argsort(-np.nan_to_num(next(iter(scores.values())), nan=-1), kind="stable")
    figure, ((axes,),) = new_figure(WIDTH, 2.9, "client", "accuracy, own test split")
    draw_dots(axes, {name: values[order] for name, values in scores.items()}, [clients[i] for i in order])
    if majority is not None:
        axes.plot(majority[order], "_", color=MUTED, markersize=9, label="guessing the majority class")
    axes.set_ylim(top=min(1.03, axes.get_ylim()[1]))
    in_percent(axes)
    legend(figure, key("span of a client's scores", color=LINE, linewidth=2.4))
    return figure


@styled
def sweep(
    panels: Panels, xlabel: str, ylabel: str = "accuracy", percent: bool = True, log: bool = False, start: bool = False
) -> Figure:
    """Draw scores against a setting, with error bars over seeds; `start` adds a dotted line at each first value.

    Where values would lie too close together on a linear axis, it is logarithmic, and linear around 0.
    """
    width = WIDTH if len(panels) > 1 else 0.62 * WIDTH
    figure, (grid,) = new_figure(width, 3.0, xlabel, ylabel, columns=len(panels), sharey=True)
    labels = labels_of(panels)
    ticks = sorted({float(v) for lines in panels.values() for c in lines for v in c.x})
    crowded = log or ticks[-1] - ticks[0] > 12 * float(np.diff(ticks).min(initial=np.inf))
    for axes, (title, lines) in zip(grid, panels.items()):
        for curve in lines:
            look, spread = look_of(curve.label, labels), curve.spread
            if percent and spread is not None:  # no share is above 1
                rooms = np.maximum([curve.mean, 1 - curve.mean], 0)
                spread = np.nan_to_num(spread).clip(max=rooms)
            axes.errorbar(curve.x, curve.mean, yerr=spread, label=curve.label, capsize=2, elinewidth=0.8, **look)
            if start:
                axes.axhline(curve.mean[0], color=look["color"], linewidth=0.7, linestyle=DOTTED)
        numeric_axis(axes, ticks, crowded)
        entitle(axes, title)
    if percent:
        in_percent(grid[0])
    more = [key("at the first value", color=MUTED, linewidth=0.7, linestyle=DOTTED)] if start else []
    if any(c.spread is not None and np.any(c.spread > 0) for lines in panels.values() for c in lines):
        more.append(key("one standard deviation over seeds", color=MUTED, marker="|", linestyle="none", markersize=9))
    legend(figure, *more)
    return figure
