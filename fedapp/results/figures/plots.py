"""Drawing functions: arrays in, a matplotlib figure out. They know nothing of run directories."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import Formatter, MaxNLocator
from numpy.typing import NDArray

from fedapp.results.figures.style import COLOURS, DASHES, DOTTED, HEAT, LINE, MARKERS, MUTED, WIDTH, place_of, styled

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


class _Percent(Formatter):
    """Writes shares in percent, with a decimal where ticks lie between whole percents."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return self.format_ticks([x])[0]

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        shown = 100 * np.asarray(values, dtype=float)
        fine = bool(np.abs(shown - shown.round()).max(initial=0.0) > 0.01)
        return [f"{v:.{1 if fine else 0}f} %" for v in shown]


Panels = Mapping[str, Sequence[Curve]]
"""Curves by the title of their panel; a label has the same look in all panels."""

# ---- pieces ----------------------------------------------------------------------------------------------------------


def _new(
    width: float, height: float, xlabel: str, ylabel: str, rows: int = 1, columns: int = 1, grid: Any = "y", **more: Any
) -> tuple[Figure, Array]:
    """Return a figure in inches and its axes (rows, columns), named at the left and below; `grid` names grid lines."""
    figure = Figure(figsize=(width, height), layout="constrained")  # no pyplot: no window system and no global state
    panels = figure.subplots(rows, columns, squeeze=False, **more)
    for axes in panels.flat if grid else ():
        axes.grid(axis=grid)
    for axes in panels[-1]:
        axes.set_xlabel(xlabel)
    for axes in panels[:, 0]:
        axes.set_ylabel(ylabel)
    return figure, panels


def _look(label: str, shown: Sequence[str], **more: Any) -> dict[str, Any]:
    """Colour, dashes and marker of a line; no two of the first 30 on a page agree in dashes, marker and filling."""
    i = place_of(label, shown)
    colour = COLOURS[i % len(COLOURS)]
    return {
        "color": colour, "linestyle": DASHES[i % len(DASHES)], "marker": MARKERS[i % len(MARKERS)],
        "markerfacecolor": "none" if i % 2 else colour, **more,
    }  # fmt: skip


def _labels(panels: Panels) -> list[str]:
    return list(dict.fromkeys(c.label for lines in panels.values() for c in lines))


def _legend(figure: Figure) -> None:
    """Put one legend of all panels below them."""
    found = {label: h for axes in figure.axes for h, label in zip(*axes.get_legend_handles_labels())}
    # Columns are as wide as the longest label; a letter takes about a fifteenth of an inch, line and gap nine letters.
    fit = int(15 * figure.get_figwidth() / (max(map(len, found), default=0) + 9))
    figure.legend(
        found.values(), found.keys(), loc="outside lower left", ncols=min(6, max(1, fit)), handlelength=3.2,
        columnspacing=1.4,
    )  # fmt: skip


def _percent(axes: Axes) -> None:
    """Write the vertical axis in percent."""
    axes.yaxis.set_major_formatter(_Percent())


def _ticks(axis: Any, names: Sequence[Any], at: float = 0.0, **text: Any) -> None:
    """Name the positions `at`, `at` + 1, ..., thinned out where there are many."""
    shown = range(0, len(names), max(1, math.ceil(len(names) / MAX_TICKS)))
    axis.set_ticks([i + at for i in shown], [str(names[i]) for i in shown], **text)


def _slant(names: Sequence[Any]) -> dict[str, Any]:
    """Return the properties of names below an axis: long ones are turned."""
    long = len(names) > 4 and max(len(str(n)) for n in names) > 3
    return {"rotation": 45, "horizontalalignment": "right"} if long else {}


def _heat(
    axes: Axes, values: Array, columns: Sequence[Any], rows: Sequence[Any], high: float | None = None, fmt: str = "",
    low: float | None = 0,
) -> Any:  # fmt: skip
    """Draw a matrix with row 0 on top and named columns and rows; `fmt` writes each value into its cell."""
    rows_, columns_ = np.shape(values)
    mesh = axes.imshow(
        np.asarray(values, float), cmap=HEAT, vmin=low, vmax=high, aspect="auto",
        extent=(0, columns_, rows_, 0), interpolation="none",  # in an SVG one pixel a cell, which is small and sharp
    )  # fmt: skip
    _ticks(axes.xaxis, columns, 0.5, **_slant(columns))
    _ticks(axes.yaxis, rows, 0.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for (i, j), value in np.ndenumerate(values) if fmt else ():
        if np.isfinite(value) and value != 0:
            red, green, blue, _ = mesh.cmap(mesh.norm(value))
            dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.55
            # Not INK: cells keep their own colour in a dark scheme, so their text must too.
            axes.text(
                j + 0.5, i + 0.5, format(value, fmt), ha="center", va="center", fontsize=6.5,
                color="#ffffff" if dark else "#20242b",
            )  # fmt: skip
    return mesh


def _scale(figure: Figure, mesh: Any, axes: Any, label: str = "", pad: float = 0.015, location: str = "right") -> None:
    bar = figure.colorbar(mesh, ax=axes, label=label, location=location, pad=pad, fraction=0.05, aspect=24)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2)


def _dots(axes: Axes, scores: Mapping[str, Array], names: Sequence[Any]) -> None:
    """Draw several values (n,) of each name as dots on one vertical line."""
    place = np.arange(len(names))
    stack = np.stack(list(scores.values()))
    axes.vlines(place, np.nanmin(stack, axis=0), np.nanmax(stack, axis=0), color=LINE, linewidth=2.4)
    for label, values in scores.items():
        axes.plot(place, values, label=label, **_look(label, list(scores), linestyle="none"))
    _ticks(axes.xaxis, names, **_slant(names))


# ---- scores ----------------------------------------------------------------------------------------------------------


@styled
def curves(
    panels: Panels, xlabel: str = "round", ylabel: str = "accuracy", height: float = 3.1, percent: bool = True,
    log: bool = False, baseline: float | None = None,
) -> Figure:  # fmt: skip
    """Draw lines with bands, a panel each, with one legend; `baseline` is a dotted line in the first panel."""
    figure, (grid,) = _new(WIDTH, height, xlabel, ylabel, columns=len(panels), sharey=True)
    labels = _labels(panels)
    for axes, (title, lines) in zip(grid, panels.items()):
        for curve in lines:
            look = _look(curve.label, labels)
            axes.plot(curve.x, curve.mean, label=curve.label, markevery=max(1, len(curve.x) // 8), **look)
            if curve.spread is not None and np.any(band := np.nan_to_num(curve.spread)):
                alpha = 0.13 if len(lines) < 5 else 0.07
                low, high = curve.mean - band, curve.mean + band
                axes.fill_between(curve.x, low, high, color=look["color"], alpha=alpha, linewidth=0)
        axes.set_title(title)
        if log:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
        else:
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=xlabel.endswith(("round", "rounds"))))
    if baseline is not None:
        grid[0].axhline(baseline, color=MUTED, linewidth=1.0, linestyle=DOTTED)
    low, high = grid[0].get_ylim()
    if percent:
        _percent(grid[0])
        grid[0].set_ylim(max(low, -0.02), min(high, 1.03))  # bands leave 0 and 1, shares cannot
    else:
        grid[0].set_ylim(0, high)
    if len(labels) > 1:
        _legend(figure)
    return figure


@styled
def client_scores(scores: Mapping[str, Array], clients: Sequence[Any], majority: Array | None = None) -> Figure:
    """Draw every client's accuracy by protocol as dots on one line, sorted by the first protocol.

    Parameters
    ----------
    scores : (K,) by protocol.   majority : (K,) what guessing the client's majority class scores.
    """
    order = np.argsort(-np.nan_to_num(next(iter(scores.values())), nan=-1), kind="stable")
    figure, ((axes,),) = _new(WIDTH, 2.9, "client", "accuracy, own test split")
    _dots(axes, {name: values[order] for name, values in scores.items()}, [clients[i] for i in order])
    if majority is not None:
        axes.plot(majority[order], "_", color=MUTED, markersize=9, label="guessing the majority class")
    axes.set_ylim(min(0.0, axes.get_ylim()[0]), 1.03)
    _percent(axes)
    _legend(figure)
    return figure


@styled
def sweep(
    panels: Panels, xlabel: str, ylabel: str = "accuracy", percent: bool = True, log: bool = False, start: bool = False
) -> Figure:
    """Draw scores against a setting, with error bars over seeds; `start` adds a dotted line at each first value.

    Values of the setting that would lie too close together on a linear axis stand at equal distances.
    """
    width = WIDTH if len(panels) > 1 else 0.62 * WIDTH
    figure, (grid,) = _new(width, 3.0, xlabel, ylabel, columns=len(panels), sharey=True)
    labels = _labels(panels)
    ticks = sorted({float(v) for lines in panels.values() for c in lines for v in c.x})
    logarithmic = log and ticks[0] > 0
    crowded = not logarithmic and ticks[-1] - ticks[0] > 12 * float(np.diff(ticks).min(initial=np.inf))
    for axes, (title, lines) in zip(grid, panels.items()):
        for curve in lines:
            look = _look(curve.label, labels)
            x = [ticks.index(float(v)) for v in curve.x] if crowded else curve.x
            axes.errorbar(x, curve.mean, yerr=curve.spread, label=curve.label, capsize=2, elinewidth=0.8, **look)
            if start:
                axes.axhline(curve.mean[0], color=look["color"], linewidth=0.7, linestyle=DOTTED)
        if logarithmic:
            axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_xticks(range(len(ticks)) if crowded else ticks, [f"{t:g}" for t in ticks])
        axes.set_title(title)
    if percent:
        _percent(grid[0])
    if len(labels) > 1:
        _legend(figure)
    return figure


@styled
def cost(points: Mapping[str, tuple[float, float]]) -> Figure:
    """Draw operations against bytes, both logarithmic, one mark per method; those that send nothing stand at 1 byte."""
    figure, ((axes,),) = _new(
        0.75 * WIDTH, 2.9, "bytes per client and round, both ways", "operations per client and round", grid="both"
    )  # fmt: skip
    for label, (moved, flops) in points.items():
        axes.plot(max(moved, 1.0), flops, label=label, **_look(label, list(points), linestyle="none", markersize=7))
    axes.set(xscale="log", yscale="log")
    axes.set_ylim(0.5 * min(f for _, f in points.values()), 2 * max(f for _, f in points.values()))
    _legend(figure)
    return figure


# ---- data ------------------------------------------------------------------------------------------------------------


@styled
def label_heat(counts: Array, classes: Sequence[str]) -> Figure:
    """Draw training images by client (rows) and class (columns) as a heat map."""
    clients, n = counts.shape
    figure, ((axes,),) = _new(min(WIDTH, 2.2 + 0.42 * n), min(9.0, 1.6 + 0.2 * clients), "class", "client", grid=None)
    small = clients <= 40 and n <= 26
    mesh = _heat(axes, counts, classes, range(clients), fmt=".0f" if small else "")
    _scale(figure, mesh, axes, "training images")
    return figure


@styled
def label_dots(counts: Array, classes: Sequence[str]) -> Figure:
    """Draw training images by client (columns) and class (rows) as dots whose area is the count."""
    clients, n = counts.shape
    width, height = min(WIDTH, 2.0 + 0.36 * clients), min(9.0, 1.6 + 0.24 * n)
    figure, ((axes,),) = _new(width, height, "client", "class", grid="both")
    client, label = np.nonzero(counts)
    room = min(24.0, 300.0 / max(clients, n))  # points across a dot at most
    area = room**2 * counts[client, label] / max(1, counts.max())
    axes.scatter(client, label, s=area, color=COLOURS[0], linewidths=0)
    axes.set_xlim(-0.7, clients - 0.3)
    axes.set_ylim(n - 0.3, -0.7)
    _ticks(axes.xaxis, range(clients))
    _ticks(axes.yaxis, classes)
    axes.tick_params(length=0)
    return figure


# ---- heads -----------------------------------------------------------------------------------------------------------


@styled
def norm_maps(panels: Mapping[str, Array], classes: Sequence[str], clients: Sequence[Any]) -> Figure:
    """Draw (K, C) maps side by side, each on its own scale: class counts beside norms of heads."""
    height = min(9.0, 1.9 + 0.17 * len(clients))
    figure, (grid,) = _new(WIDTH, height, "class", "client", columns=len(panels), grid=None, sharey=True)
    for axes, (title, values) in zip(grid, panels.items()):
        mesh = _heat(axes, values, classes, clients, low=None)
        axes.set_title(title)
        _scale(figure, mesh, axes, pad=0.02, location="bottom")
    return figure


@styled
def norm_evolution(history: Mapping[Any, tuple[Array, Array]], shares: Mapping[Any, Array], named: int = 5) -> Figure:
    """Draw p~ over rounds, one panel per client, one line per class, with the true share p as a bar at the right edge.

    Parameters
    ----------
    history : {client: (rounds (T,), p~ (T, C))}.   shares : {client: p (C,)}.
    named : how many classes of a client, those with the largest p, stand out and are named; the others are grey.
    """
    columns = min(3, len(history))
    rows = math.ceil(len(history) / columns)
    figure, grid = _new(
        WIDTH, 0.6 + 1.8 * rows, "round", "share of the norm", rows, columns, sharex=True, sharey=True
    )  # fmt: skip
    top = 1.06 * max(max(float(v.max()), float(shares[c].max())) for c, (_, v) in history.items())
    for axes, (client, (rounds, values)) in zip(grid.flat, history.items()):
        p, edge = shares[client], axes.get_yaxis_transform()
        chosen = [int(c) for c in np.argsort(-p, kind="stable")[:named] if p[c] > 0]
        rest = np.delete(values, chosen, axis=1)
        axes.plot(rounds, rest, color=MUTED, linewidth=0.6, alpha=0.6)
        for c, colour, dashes in zip(chosen, COLOURS, DASHES):
            axes.plot(rounds, values[:, c], linewidth=1.3, color=colour, linestyle=dashes)
            axes.plot([1.01, 1.04], [p[c]] * 2, color=colour, linewidth=2, clip_on=False, transform=edge)
        place = -math.inf
        for c in sorted(chosen, key=lambda c: float(p[c])):  # names beside the bars, pushed apart where they touch
            place = max(float(p[c]), place + 0.09 * top)
            axes.annotate(
                str(c), (1.06, place), xycoords=edge, fontsize=7, color=COLOURS[chosen.index(c)], va="center",
                annotation_clip=False,
            )  # fmt: skip
        axes.set_title(f"client {client}")
        axes.set_ylim(0, top)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    for axes in grid.flat[len(history) :]:
        axes.set_visible(False)
    return figure


@styled
def named_maps(panels: Mapping[str, tuple[Array, str, Sequence[Any]]], classes: Sequence[str]) -> Figure:
    """Draw maps with classes as columns, three in a row, each on its own scale.

    Parameters
    ----------
    panels : {title: (values (n, C), what its rows are, their n names)}.
    """
    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    height = lines * (1.5 + 0.1 * max(min(len(names), 40) for _, _, names in panels.values()))
    figure, grid = _new(WIDTH, min(10.0, height), "", "", lines, columns, grid=None)
    for axes, (title, (values, rows, names)) in zip(grid.flat, panels.items()):
        mesh = _heat(axes, values, classes, names, low=None)
        axes.set(title=textwrap.fill(title, 26), xlabel="class", ylabel=rows)
        _scale(figure, mesh, axes, pad=0.02)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    return figure


@styled
def batch_evolution(lines: Mapping[str, Array], p: Array, points: Mapping[str, tuple[Array, Array]]) -> Figure:
    """Draw p~ by batch, one panel per run and one line per class, then p~ against p of all clients, one marker per run.

    Parameters
    ----------
    lines : p~ (T, C) by title.   p : (C,) the client's class shares, as bars at the right edge.
    points : (p, p~) by title, arrays of one shape.
    """
    figure, (grid,) = _new(WIDTH, 2.9, "batch", "share of the norm, p~", columns=len(lines) + 1)
    top = 1.06 * max(float(p.max()), *(float(v.max()) for v in lines.values()))
    chosen = [int(c) for c in np.argsort(-p, kind="stable")[:5] if p[c] > 0]
    for axes, (title, values) in zip(grid, lines.items()):
        axes.plot(np.delete(values, chosen, axis=1), color=MUTED, linewidth=0.6, alpha=0.6)
        for c, colour, dashes in zip(chosen, COLOURS, DASHES):
            axes.plot(values[:, c], linewidth=1.3, color=colour, linestyle=dashes)
            axes.plot(
                [1.01, 1.05], [p[c]] * 2, color=colour, linewidth=2, clip_on=False, transform=axes.get_yaxis_transform()
            )  # fmt: skip
            axes.annotate(
                str(c), (len(values) - 1, values[-1, c]), fontsize=7, color=colour, ha="right", va="bottom"
            )  # fmt: skip
        axes.set(title=title, ylim=(0, top))
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes, edge = grid[-1], 1.05 * max(float(np.max(both)) for both in points.values())
    axes.plot([0, edge], [0, edge], color=MUTED, linewidth=0.8, linestyle=DOTTED)
    for title, (x, y) in points.items():
        axes.plot(x.ravel(), y.ravel(), label=title, **_look(title, list(points), linestyle="none", alpha=0.7))
    axes.set(title="all clients", xlabel="share of the data, p", ylabel="")
    axes.legend(loc="upper left")
    return figure


@styled
def accuracy_and_distance(accuracy: Curve, distance: Curve, xlabel: str, log: bool) -> Figure:
    """Draw accuracy (left axis) and the distance R (right axis) against a hyperparameter (cwFedAvg, Fig. 5)."""
    figure, ((left,),) = _new(0.75 * WIDTH, 3.0, xlabel, "accuracy")
    right = left.twinx()
    right.spines["right"].set_visible(True)
    ticks = sorted({float(v) for v in accuracy.x})
    crowded = not log and len(ticks) > 2
    shown = [accuracy.label, distance.label]
    for axes, curve in ((left, accuracy), (right, distance)):
        x = [ticks.index(float(v)) for v in curve.x] if crowded else curve.x
        axes.errorbar(
            x, curve.mean, yerr=curve.spread, label=curve.label, capsize=2, elinewidth=0.8, **_look(curve.label, shown)
        )
    if log:
        left.set_xscale("log")
        left.minorticks_off()
    left.set_xticks(range(len(ticks)) if crowded else ticks, [f"{t:g}" for t in ticks])
    right.set(ylabel="R = ||p - p~||", ylim=(0, None))
    _percent(left)
    _legend(figure)
    return figure


@styled
def bars(values: Mapping[str, float], xlabel: str) -> Figure:
    """Draw one number a name as horizontal bars, the number written at their ends."""
    figure, ((axes,),) = _new(0.8 * WIDTH, 0.9 + 0.32 * len(values), xlabel, "", grid="x")
    shown = axes.barh(list(values), list(values.values()), color=COLOURS[0], height=0.6)
    axes.bar_label(shown, fmt="{:,.2f}", padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    return figure


@styled
def p_against_norms(panels: Mapping[str, tuple[Array, Array]]) -> Figure:
    """Draw p~ against p, one mark per client and class, with the diagonal; panels by title."""
    side = WIDTH / max(2, len(panels))
    figure, (grid,) = _new(
        side * len(panels), side, "share of the data, p", "share of the norm, p~", columns=len(panels), grid="both",
        sharex=True, sharey=True,
    )  # fmt: skip
    edge = 1.05 * max(float(np.max(both)) for both in panels.values())
    for axes, (title, (p, pt)) in zip(grid, panels.items()):
        axes.plot([0, edge], [0, edge], color=MUTED, linewidth=0.8, linestyle=DOTTED)
        held = p > 0
        axes.plot(p[held], pt[held], "o", color=COLOURS[0], markersize=3.4, alpha=0.75, markeredgewidth=0,
                  label="class held")  # fmt: skip
        axes.plot(p[~held], pt[~held], "x", color=COLOURS[1], markersize=3.8, markeredgewidth=0.9,
                  label="class absent")  # fmt: skip
        axes.set(title=title, xlim=(-0.02 * edge, edge), ylim=(-0.02 * edge, edge))
    _legend(figure)
    return figure


@styled
def mixing(matrix: Array, clients: Sequence[Any]) -> Figure:
    """Draw A: row i is the client that learns, column j the one that it learns from."""
    n = len(matrix)
    width, height = min(WIDTH, 2.4 + 0.36 * n), min(WIDTH - 1, 1.7 + 0.3 * n)
    figure, ((axes,),) = _new(width, height, "learns from client", "client", grid=None)
    mesh = _heat(axes, matrix, clients, clients, high=max(float(matrix.max()), 1e-9), fmt=".2f" if n <= 14 else "")
    _scale(figure, mesh, axes, "share")
    return figure


# ---- representations -------------------------------------------------------------------------------------------------


def _numbers(axes: Axes, points: Array, group: Array) -> None:
    """Draw every point as the number of its group, so that groups can be told apart without colour.

    Points are drawn in several layers, so that no group lies on top of all others.
    """
    names = sorted({int(g) for g in group})
    colours: Any = COLOURS
    if len(names) > len(COLOURS):
        colours = mpl.colormaps["viridis"](np.linspace(0.12, 0.82, len(names)))  # lightness rises with the number
    layer = np.arange(len(points)) * 7 % 8
    for k in range(8):
        for name, colour in zip(names, colours):
            x, y = points[(group == name) & (layer == k)].T
            marker = f"${name}$" if len(names) <= 40 else "."
            size = 27.2 if name > 9 else 16.0
            axes.scatter(x, y, s=size, marker=marker, color=colour, linewidths=0.15, rasterized=True)
    axes.set(xticks=[], yticks=[])
    axes.set_aspect("equal", "datalim")
    axes.spines[:].set(visible=True, color=LINE)


@styled
def embedding(rows: Mapping[str, tuple[Array, Mapping[str, Array]]]) -> Figure:
    """Draw points in the plane, one row per embedding, one column per colouring.

    Parameters
    ----------
    rows : {title: (points (n, 2), {colouring: group (n,)})}; every embedding has the same colourings.
    """
    columns = len(next(iter(rows.values()))[1])
    side = WIDTH / columns
    figure, grid = _new(WIDTH, side * len(rows), "", "", len(rows), columns, grid=None)
    figure.set_dpi(170)  # of the points, which are pixels in an SVG too
    for line, (title, (points, groups)) in zip(grid, rows.items()):
        for axes, (name, group) in zip(line, groups.items()):
            _numbers(axes, points, group)
            axes.set_title(f"{title}, {name}" if title else name)
    return figure


@styled
def cka(panels: Mapping[str, Mapping[str, Array]]) -> Figure:
    """Draw CKA between clients: per layer, one small dot per pair and a large mark for the mean; one line per run.

    Parameters
    ----------
    panels : {run: {layer: (K, K)}}; layers in forward order.
    """
    layers = list(dict.fromkeys(name for maps in panels.values() for name in maps))
    figure, ((axes,),) = _new(WIDTH, 3.0, "layer", "linear CKA between clients")
    shift = np.linspace(-0.22, 0.22, len(panels)) if len(panels) > 1 else [0.0]
    for i, (label, maps) in enumerate(panels.items()):
        look = _look(label, list(panels), markersize=6)
        means = np.full(len(layers), np.nan)
        for layer, matrix in maps.items():
            j = layers.index(layer)
            values = matrix[np.triu_indices(len(matrix), 1)]
            values = values[np.isfinite(values)]
            # A fixed fan-out in place of random jitter: the same picture every time.
            fan = (np.arange(len(values)) * 0.618 % 1 - 0.5) * 0.12
            axes.plot(j + shift[i] + fan, values, ".", color=look["color"], markersize=3, alpha=0.3, markeredgewidth=0)
            means[j] = values.mean() if len(values) else np.nan
        axes.plot(np.arange(len(layers)) + shift[i], means, label=label, **look)
    axes.set(xlim=(-0.5, len(layers) - 0.5), ylim=(0, 1.03))
    _ticks(axes.xaxis, layers, rotation=30 if len(layers) > 6 else 0)
    if len(panels) > 1:
        _legend(figure)
    return figure


@styled
def conductance(panels: Mapping[str, tuple[Array, Sequence[Any]]], image: Array) -> Figure:
    """Draw ranks of units (columns, sorted by their mean rank) at clients (rows), one panel per run, beside the image.

    Parameters
    ----------
    panels : {title: (ranks (K, d), clients)}.   image : (H, W, C), from 0 to 1.
    """
    heights = [len(ranks) + 3 for ranks, _ in panels.values()]
    figure, grid = _new(
        WIDTH, 0.9 + sum(0.27 + 0.16 * h for h in heights), "units before the head, by mean rank", "", len(panels), 2,
        grid=None, width_ratios=[1, 7], height_ratios=heights,
    )  # fmt: skip
    for axes, (title, (ranks, clients)) in zip(grid[:, 1], panels.items()):
        order = np.argsort(ranks.mean(axis=0), kind="stable")
        mesh = _heat(axes, ranks[:, order], (), clients, high=max(1, ranks.shape[1] - 1))
        axes.set(ylabel="client", title=title)
    for axes in grid[:, 0]:
        axes.set_axis_off()
    grid[0, 0].imshow(image.clip(0, 1).squeeze(), cmap="Greys_r", vmin=0, vmax=1)
    grid[0, 0].set_title("image", fontsize=8)
    _scale(figure, mesh, grid[:, 1], "rank of conductance")
    return figure


# ---- calibration -----------------------------------------------------------------------------------------------------


@styled
def norms_before_after(panels: Mapping[str, tuple[Array, Array]], classes: Sequence[str]) -> Figure:
    """Draw the row norms of heads before and after calibration, a pair of dots a class; panels by title."""
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, grid = _new(
        WIDTH if columns > 1 else 0.75 * WIDTH, 0.4 + 2.2 * rows, "class", "norm of the head's row", rows, columns,
        sharey=True,
    )  # fmt: skip
    for axes, (title, (before, after)) in zip(grid.flat, panels.items()):
        _dots(axes, {"as trained": before, "calibrated": after}, classes)
        axes.set_title(title)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    grid[0, 0].set_ylim(0, 1.08 * float(np.max(list(panels.values()))))
    _legend(figure)
    return figure


@styled
def separability(groups: Mapping[str, Mapping[str, Array]]) -> Figure:
    """Draw accuracy against the separability of the classes, one mark per run, with the upper bound as a line.

    Parameters
    ----------
    groups : {method: {"distance", "before", "after", "bound": (runs,)}}.
    """
    figure, ((axes,),) = _new(
        WIDTH, 3.2, "mean sliced Wasserstein distance between classes", "accuracy of the global model",
        grid="both",
    )  # fmt: skip
    every = [(d, b) for values in groups.values() for d, b in zip(values["distance"], values["bound"])]
    axes.plot(*zip(*sorted(every)), color=MUTED, linewidth=1.0, linestyle=DOTTED, marker="_", markersize=9,
              label="upper bound, real features")  # fmt: skip
    for label, values in groups.items():
        look = _look(label, list(groups), linestyle="none", markersize=6)
        axes.vlines(values["distance"], values["before"], values["after"], color=look["color"], linewidth=0.8)
        axes.plot(values["distance"], values["after"], label=label, **look)
        axes.plot(values["distance"], values["before"], ".", color=look["color"], markersize=4)
    _percent(axes)
    _legend(figure)
    return figure


@styled
def heat_grid(
    rows: Mapping[str, Mapping[str, Array]], xlabel: str, ylabel: str, columns: Sequence[Any], high: float | None = None
) -> Figure:
    """Draw matrices in rows and columns of panels, each with its own scale unless `high` gives a common one from 0.

    Parameters
    ----------
    rows : {row: {panel: (n, m)}}; every row has as many panels.   columns : names of the matrices' columns.
    """
    across = max(len(panels) for panels in rows.values())
    side = WIDTH / max(3, across)
    figure, grid = _new(side * across, 0.3 + side * len(rows), xlabel, ylabel, len(rows), across, grid=None)
    for line, (name, panels) in zip(grid, rows.items()):
        for axes, (title, values) in zip(line, panels.items()):
            mesh = _heat(axes, values, columns, range(len(values)), high=high)
            axes.set_title(f"{name}\n{title}" if name else title, fontsize=7.5)
            if high is None:
                _scale(figure, mesh, axes, pad=0.02)
        for axes in line[len(panels) :]:
            axes.set_visible(False)
    if high is not None:
        _scale(figure, mesh, grid, pad=0.02)
    return figure


@styled
def recovered(blocks: Mapping[str, tuple[Array, Array]], names: Sequence[str]) -> Figure:
    """Draw recovered images below the real ones behind them, one column per class.

    Parameters
    ----------
    blocks : {title: (real (m, n, H, W, C), recovered (m, H, W, C))}, from 0 to 1.   names : of the m columns.
    """
    lines = [
        (title if i == 0 else "", "real" if i < real.shape[1] else "recovered", row)
        for title, (real, found) in blocks.items()
        for i, row in enumerate([*real.swapaxes(0, 1), found])
    ]
    side = (WIDTH - 1.6) / len(names)
    figure, grid = _new(WIDTH, 0.4 + (side + 0.1) * len(lines), "", "", len(lines), len(names), grid=None)
    for axes, name in zip(grid[0], names):
        axes.set_title(name, fontsize=7, loc="center")
    for line, (title, what, images) in zip(grid, lines):
        line[0].set_ylabel(f"{title}\n{what}" if title else what, rotation=0, ha="right", va="center", fontsize=7)
        for axes, image in zip(line, images):
            axes.imshow(image.clip(0, 1).squeeze(), cmap="Greys_r", vmin=0, vmax=1, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
    return figure
