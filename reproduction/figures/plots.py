"""Charts with axes: arrays in, a matplotlib figure out. They know nothing of run directories."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedapp.results.figures.pieces import (
    Array,
    Curve,
    draw_dots,
    entitle,
    in_percent,
    key,
    legend,
    look_of,
    name_ticks,
    new_figure,
)
from fedapp.results.figures.plots import numeric_axis
from fedapp.results.figures.style import COLOURS, DASHES, DOTTED, LINE, MUTED, WIDTH, styled


@styled
@mpl.rc_context({"text.parse_math": True})  # powers of ten
def cost(points: Mapping[str, tuple[float, float]]) -> Figure:
    """Draw operations against bytes, both logarithmic, one mark per method; those that send nothing stand at 1 byte."""
    figure, ((axes,),) = new_figure(
        0.75 * WIDTH, 2.9, "bytes per client and round, both ways", "operations per client and round", grid="both"
    )  # fmt: skip
    for label, (moved, flops) in points.items():
        axes.plot(max(moved, 1.0), flops, label=label, **look_of(label, list(points), linestyle="none", markersize=7))
    axes.set(xscale="log", yscale="log")
    axes.set_ylim(0.5 * min(f for _, f in points.values()), 2 * max(f for _, f in points.values()))
    legend(figure)
    figure.draw_without_rendering()  # makes the ticks
    return figure


def _shares(axes: Axes, values: Array, p: Array) -> list[int]:
    """Draw p~ (T, C) of a client and p (C,) as bars at the edge; return the classes with the largest p.

    These five classes stand out, the others are grey.
    """
    x = np.arange(len(values))
    chosen = [int(c) for c in np.argsort(-p, kind="stable")[:5] if p[c] > 0]
    axes.plot(x, np.delete(values, chosen, axis=1), color=MUTED, linewidth=0.6, alpha=0.6)
    edge = axes.get_yaxis_transform()
    for c, colour, dashes in zip(chosen, COLOURS, DASHES):
        axes.plot(x, values[:, c], linewidth=1.3, color=colour, linestyle=dashes)
        axes.plot([1.01, 1.05], [p[c]] * 2, color=colour, linewidth=2, clip_on=False, transform=edge)
    return chosen


@styled
def batch_evolution(lines: Mapping[str, Array], p: Array, points: Mapping[str, tuple[Array, Array]]) -> Figure:
    """Draw p~ by batch, one panel per run and one line per class, then p~ against p of all clients, one marker per run.

    Parameters
    ----------
    lines : p~ (T, C) by title.   p : (C,) the client's class shares, as bars at the right edge.
    points : (p, p~) by title, arrays of one shape.
    """
    figure, (grid,) = new_figure(WIDTH, 2.9, "batch", "share of the norm, p~", columns=len(lines) + 1)
    top = 1.06 * max(float(p.max()), *(float(v.max()) for v in lines.values()))
    for axes, (title, values) in zip(grid, lines.items()):
        for c, colour in zip(_shares(axes, values, p), COLOURS):
            axes.annotate(
                str(c), (len(values) - 1, values[-1, c]), fontsize=7, color=colour, ha="right", va="bottom"
            )  # fmt: skip
        axes.set(title=title, ylim=(0, top))
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes, edge = grid[-1], 1.05 * max(float(np.max(both)) for both in points.values())
    axes.plot([0, edge], [0, edge], color=MUTED, linewidth=0.8, linestyle=DOTTED)
    for title, (x, y) in points.items():
        axes.plot(x.ravel(), y.ravel(), label=title, **look_of(title, list(points), linestyle="none", alpha=0.7))
    axes.set(title="all clients", xlabel="share of the data, p", ylabel="")
    axes.legend(loc="upper left")
    return figure


@styled
def accuracy_and_distance(accuracy: Curve, distance: Curve, xlabel: str, log: bool) -> Figure:
    """Draw accuracy (left axis) and the distance R (right axis) against a hyperparameter (cwFedAvg, Fig. 5)."""
    figure, ((left,),) = new_figure(0.75 * WIDTH, 3.0, xlabel, "accuracy")
    right = left.twinx()
    right.spines["right"].set_visible(True)
    ticks = sorted({float(v) for v in accuracy.x})
    shown = [accuracy.label, distance.label]
    for axes, curve in ((left, accuracy), (right, distance)):
        look, spread = look_of(curve.label, shown), curve.spread if np.any(curve.spread) else None
        axes.errorbar(curve.x, curve.mean, yerr=spread, label=curve.label, capsize=2, elinewidth=0.8, **look)
    numeric_axis(left, ticks, log or len(ticks) > 2)
    right.set(ylabel="R = ||p - p~||", ylim=(0, None))
    in_percent(left)
    legend(figure)
    return figure


@styled
def bars(values: Mapping[str, float], xlabel: str) -> Figure:
    """Draw one number a name as horizontal bars, the number written at their ends."""
    figure, ((axes,),) = new_figure(0.8 * WIDTH, 0.9 + 0.32 * len(values), xlabel, "", grid="x")
    shown = axes.barh(list(values), list(values.values()), color=COLOURS[0], height=0.6)
    axes.bar_label(shown, fmt="{:,.2f}", padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    return figure


def _numbers(axes: Axes, points: Array, group: Array) -> None:
    """Draw every point as the number of its group, so that groups can be told apart without colour; -1 is a grey dot.

    Points are drawn in several layers, so that no group lies on top of all others.
    """
    names = sorted({int(g) for g in group if g >= 0})
    still_x, still_y = points[group < 0].T
    axes.scatter(still_x, still_y, s=3, color=LINE, linewidths=0, rasterized=True)
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
@mpl.rc_context({"text.parse_math": True})  # numbers as marks
def embedding(rows: Mapping[str, tuple[Array, Mapping[str, Array]]]) -> Figure:
    """Draw points in the plane, one row per embedding, one column per colouring.

    Parameters
    ----------
    rows : {title: (points (n, 2), {colouring: group (n,), -1 for none})}; every embedding has the same colourings.
    """
    columns = len(next(iter(rows.values()))[1])
    side = WIDTH / columns
    figure, grid = new_figure(WIDTH, side * len(rows), "", "", len(rows), columns, grid=None)
    figure.set_dpi(170)  # of the points, which are pixels in an SVG too
    for line, (title, (points, groups)) in zip(grid, rows.items()):
        for axes, (name, group) in zip(line, groups.items()):
            _numbers(axes, points, group)
            entitle(axes, f"{title}, {name}" if title else name)
    return figure


@styled
def cka(panels: Mapping[str, Mapping[str, Array]]) -> Figure:
    """Draw CKA between clients: per layer, one small dot per pair and a large mark for the mean; one line per run.

    Parameters
    ----------
    panels : {run: {layer: (K, K)}}; layers in forward order.
    """
    layers = list(dict.fromkeys(name for maps in panels.values() for name in maps))
    figure, ((axes,),) = new_figure(WIDTH, 3.0, "layer", "linear CKA between clients")
    shift = np.linspace(-0.22, 0.22, len(panels)) if len(panels) > 1 else [0.0]
    for i, (label, maps) in enumerate(panels.items()):
        look = look_of(label, list(panels), markersize=6)
        means = np.full(len(layers), np.nan)
        for layer, matrix in maps.items():
            j = layers.index(layer)
            values = matrix[np.triu_indices(len(matrix), 1)]
            values = values[np.isfinite(values)]
            # A fixed fan-out instead of random jitter: the same picture every time.
            fan = (np.arange(len(values)) * 0.618 % 1 - 0.5) * 0.12
            axes.plot(j + shift[i] + fan, values, ".", color=look["color"], markersize=3, alpha=0.3, markeredgewidth=0)
            means[j] = values.mean() if len(values) else np.nan
        axes.plot(np.arange(len(layers)), means, label=label, **look)
    axes.set(xlim=(-0.5, len(layers) - 0.5), ylim=(0, 1.03))
    name_ticks(axes.xaxis, layers, rotation=30 if len(layers) > 6 else 0)
    legend(
        figure,
        key("a pair of clients", marker=".", color=MUTED, linestyle="none", markersize=3),
        *([] if len(panels) > 1 else [key("mean", marker="o", color=MUTED, linestyle="none", markersize=6)]),
    )
    return figure


@styled
def norms_before_after(panels: Mapping[str, tuple[Array, Array]], classes: Sequence[str]) -> Figure:
    """Draw the row norms of heads before and after calibration, a pair of dots a class; panels by title."""
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, grid = new_figure(
        WIDTH if columns > 1 else 0.75 * WIDTH, 0.4 + 2.2 * rows, "class", "norm of the head's row", rows, columns,
        sharey=True,
    )  # fmt: skip
    for axes, (title, (before, after)) in zip(grid.flat, panels.items()):
        draw_dots(axes, {"as trained": before, "calibrated": after}, classes)
        entitle(axes, title)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    grid[0, 0].set_ylim(0, 1.08 * float(np.max(list(panels.values()))))
    legend(figure, key("change", color=LINE, linewidth=2.4))
    return figure


@styled
def separability(groups: Mapping[str, Mapping[str, Array]]) -> Figure:
    """Draw accuracy against the separability of the classes, one mark per run, with the upper bound as a line.

    Parameters
    ----------
    groups : {method: {"distance", "before", "after", "bound": (runs,)}}.
    """
    figure, ((axes,),) = new_figure(
        WIDTH, 3.2, "mean sliced Wasserstein distance between classes", "accuracy of the global model",
        grid="both",
    )  # fmt: skip
    every = [(d, b) for values in groups.values() for d, b in zip(values["distance"], values["bound"])]
    axes.plot(*zip(*sorted(every)), color=MUTED, linewidth=1.0, linestyle=DOTTED, marker="_", markersize=9,
              label="upper bound, real features")  # fmt: skip
    for label, values in groups.items():
        look = look_of(label, list(groups), linestyle="none", markersize=6)
        axes.vlines(values["distance"], values["before"], values["after"], color=look["color"], linewidth=0.8)
        axes.plot(values["distance"], values["after"], label=label, **look)
        axes.plot(values["distance"], values["before"], ".", color=look["color"], markersize=4)
    in_percent(axes)
    legend(
        figure,
        key("as trained", marker=".", color=MUTED, linestyle="none", markersize=4),
        key("gain by calibration", color=MUTED, linewidth=0.8),
    )
    return figure
