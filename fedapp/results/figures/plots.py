"""Drawing functions: arrays in, a matplotlib figure out. They know nothing of run directories."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedapp.results.figures.style import COLOURS, DASHES, HEAT, INK, LINE, MARKERS, MUTED, SPLIT, WIDTH, new, styled

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


# ---- pieces ----------------------------------------------------------------------------------------------------------


def _look(i: int) -> dict[str, Any]:
    """Colour, dashes and marker of the i-th line; no two of the first 60 agree in all three."""
    return {
        "color": COLOURS[i % len(COLOURS)],
        "linestyle": DASHES[i % len(DASHES)],
        "marker": MARKERS[i % len(MARKERS)],
        "markerfacecolor": "none" if i % 2 else COLOURS[i % len(COLOURS)],
    }


def _shades(n: int) -> list[Any]:
    """Return n colours: the named ones where they are enough, else a scale whose lightness rises."""
    if n <= len(COLOURS):
        return list(COLOURS[:n])
    import matplotlib as mpl

    scale = mpl.colormaps["viridis"]
    return [scale(0.12 + 0.70 * i / max(1, n - 1)) for i in range(n)]


def _percent(axes: Axes) -> None:
    """Write the vertical axis in percent, with a decimal where ticks lie closer than a point."""

    def text(value: float, _: float) -> str:
        ticks = axes.get_yticks()
        fine = len(ticks) > 1 and abs(ticks[1] - ticks[0]) < 0.0099
        return f"{100 * value:.{1 if fine else 0}f} %"

    axes.yaxis.set_major_formatter(text)


def _ticks(axis: Any, names: Sequence[Any], **kwargs: Any) -> None:
    """Name the positions 0 .. n-1, thinned out where there are many."""
    step = max(1, math.ceil(len(names) / MAX_TICKS))
    shown = list(range(0, len(names), step))
    axis.set_ticks(shown, [str(names[i]) for i in shown], **kwargs)


def _short(names: Sequence[str]) -> bool:
    return max((len(n) for n in names), default=0) <= 3


def _heat(
    axes: Axes, values: Array, *, cmap: Any = HEAT, low: float | None = None, high: float | None = None, fmt: str = ""
) -> Any:
    """Draw a matrix with row 0 on top; `fmt` writes each value into its cell."""
    values = np.asarray(values, dtype=np.float64)
    mesh = axes.pcolormesh(
        np.ma.masked_invalid(values), cmap=cmap, vmin=low, vmax=high, rasterized=values.size > 1500,
        edgecolors="face", linewidth=0.3,  # without edges browsers show seams between cells
    )  # fmt: skip
    axes.invert_yaxis()
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    if fmt:
        for (i, j), value in np.ndenumerate(values):
            if np.isfinite(value) and value != 0:
                red, green, blue, _ = mesh.cmap(mesh.norm(value))
                dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.55
                # Not INK: cells keep their own colour in a dark scheme, so their text must too.
                axes.text(
                    j + 0.5, i + 0.5, format(value, fmt), ha="center", va="center", fontsize=6.5,
                    color="#ffffff" if dark else "#20242b",
                )  # fmt: skip
    return mesh


def _cells(axes: Axes, columns: Sequence[Any], rows: Sequence[Any]) -> None:
    """Name columns and rows of a heat map."""
    for axis, names in ((axes.xaxis, columns), (axes.yaxis, rows)):
        step = max(1, math.ceil(len(names) / MAX_TICKS))
        shown = range(0, len(names), step)
        axis.set_ticks([i + 0.5 for i in shown], [str(names[i]) for i in shown])
    if len(columns) > 4 and not _short([str(c) for c in columns]):
        for label in axes.get_xticklabels():
            label.set_rotation(45)
            label.set_horizontalalignment("right")


def _scale(figure: Figure, mesh: Any, axes: Any, label: str) -> None:
    bar = figure.colorbar(mesh, ax=axes, label=label, pad=0.015, fraction=0.05, aspect=24)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2)


def _legend(figure: Figure, axes: Axes, n: int) -> None:
    """Put the legend of one panel below all of them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=min(n, 6), handlelength=3.2, columnspacing=1.4)


def _rows_height(rows: int, low: float = 1.6, each: float = 0.2, high: float = 9.0) -> float:
    return min(high, low + each * rows)


# ---- scores ----------------------------------------------------------------------------------------------------------


@styled
def curves(
    panels: Mapping[str, Sequence[Curve]], xlabel: str = "round", baselines: Mapping[str, float | None] | None = None,
    ylabel: str = "accuracy", percent: bool = True, log: bool = False,
) -> Figure:  # fmt: skip
    """Draw lines with bands, a panel each, with one legend.

    Parameters
    ----------
    panels : curves by the panel's title; a label has the same look in all panels.
    baselines : a dotted horizontal line by panel, or None.
    """
    figure = new(WIDTH, 3.1)
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    labels = list(dict.fromkeys(c.label for curves in panels.values() for c in curves))
    for axes, (title, lines) in zip(grid, panels.items()):
        for curve in lines:
            look = _look(labels.index(curve.label))
            x, y = np.asarray(curve.x, float), np.asarray(curve.mean, float)
            axes.plot(x, y, label=curve.label, markevery=max(1, len(x) // 8), **look)
            if curve.spread is not None:
                band = np.nan_to_num(np.asarray(curve.spread, float))
                alpha = 0.13 if len(lines) < 5 else 0.07
                axes.fill_between(x, y - band, y + band, color=look["color"], alpha=alpha, linewidth=0)
        level = (baselines or {}).get(title)
        if level is not None:
            axes.axhline(level, color=MUTED, linewidth=1.0, linestyle=(0, (1, 2)))
        axes.set_title(title)
        axes.set_xlabel(xlabel)
        axes.grid(axis="y")
        if log:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
        else:
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=xlabel == "round"))
    grid[0].set_ylabel(ylabel)
    if percent:
        _percent(grid[0])
        low, high = grid[0].get_ylim()
        grid[0].set_ylim(max(low, -0.02), min(high, 1.03))  # bands leave 0 and 1, shares cannot
    longest = max(grid, key=lambda a: len(a.get_legend_handles_labels()[1]))
    if len(labels) > 1:
        _legend(figure, longest, len(labels))
    return figure


@styled
def client_scores(scores: Mapping[str, Array], clients: Sequence[Any], majority: Array | None = None) -> Figure:
    """Draw every client's accuracy by protocol as dots on one line, sorted by the first protocol.

    Parameters
    ----------
    scores : (K,) by protocol.   majority : (K,) what guessing the client's majority class scores.
    """
    first = np.asarray(next(iter(scores.values())), float)
    order = np.argsort(-np.nan_to_num(first, nan=-1), kind="stable")
    figure = new(WIDTH, 2.9)
    axes = figure.subplots()
    place = np.arange(len(order))
    stack = np.stack([np.asarray(v, float)[order] for v in scores.values()])
    axes.vlines(place, np.nanmin(stack, axis=0), np.nanmax(stack, axis=0), color=LINE, linewidth=2.4)
    for i, (name, values) in enumerate(scores.items()):
        look = _look(i)
        axes.plot(place, np.asarray(values, float)[order], label=name, **{**look, "linestyle": "none"})
    if majority is not None:
        axes.plot(
            place,
            np.asarray(majority, float)[order],
            "_",
            color=MUTED,
            markersize=9,
            label="guessing the majority class",
        )
    axes.set_ylim(min(0.0, axes.get_ylim()[0]), 1.03)
    axes.grid(axis="y")
    axes.set_ylabel("accuracy, own test split")
    axes.set_xlabel("client")
    _ticks(axes.xaxis, [clients[i] for i in order])
    _percent(axes)
    _legend(figure, axes, 4)
    return figure


@styled
def seconds(rounds: Array, parts: Mapping[str, Array]) -> Figure:
    """Draw seconds a round, a line a part."""
    figure = new(WIDTH, 2.2)
    axes = figure.subplots()
    for i, (name, values) in enumerate(parts.items()):
        axes.plot(rounds, values, label=name, markevery=max(1, len(rounds) // 8), **_look(i))
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")
    axes.set_xlabel("round")
    axes.set_ylabel("seconds")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    _legend(figure, axes, 4)
    return figure


@styled
def sweep(
    panels: Mapping[str, Sequence[Curve]], xlabel: str, log: bool = False, ylabel: str = "accuracy",
    percent: bool = True,
) -> Figure:  # fmt: skip
    """Draw scores against a setting, a panel a protocol, with error bars over seeds.

    Values of the setting that would lie too close together on a linear axis stand at equal distances.
    """
    figure = new(WIDTH if len(panels) > 1 else 0.62 * WIDTH, 3.0)
    grid = figure.subplots(1, len(panels), sharey=percent, squeeze=False)[0]
    labels = list(dict.fromkeys(c.label for lines in panels.values() for c in lines))
    ticks = sorted({float(v) for lines in panels.values() for c in lines for v in c.x})
    logarithmic = log and ticks[0] > 0
    crowded = not logarithmic and ticks[-1] - ticks[0] > 12 * float(np.diff(ticks).min(initial=np.inf))
    for axes, (title, lines) in zip(grid, panels.items()):
        for curve in lines:
            look = _look(labels.index(curve.label))
            x = [ticks.index(float(v)) for v in curve.x] if crowded else curve.x
            axes.errorbar(x, curve.mean, yerr=curve.spread, label=curve.label, capsize=2, elinewidth=0.8, **look)
        if logarithmic:
            axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_xticks(range(len(ticks)) if crowded else ticks, [f"{t:g}" for t in ticks])
        axes.set_title(title)
        axes.set_xlabel(xlabel)
        axes.grid(axis="y")
        if percent:
            _percent(axes)
    grid[0].set_ylabel(ylabel)
    if len(labels) > 1:
        _legend(figure, grid[0], len(labels))
    return figure


# ---- data ------------------------------------------------------------------------------------------------------------


@styled
def label_heat(counts: Array, classes: Sequence[str]) -> Figure:
    """Draw training images by client (rows) and class (columns) as a heat map."""
    clients, n = counts.shape
    figure = new(min(WIDTH, 2.2 + 0.42 * n), _rows_height(clients))
    axes = figure.subplots()
    small = clients <= 40 and n <= 26
    mesh = _heat(axes, counts, low=0, fmt=".0f" if small else "")
    _cells(axes, classes, range(clients))
    axes.set_xlabel("class")
    axes.set_ylabel("client")
    _scale(figure, mesh, axes, "training images")
    return figure


@styled
def label_dots(counts: Array, classes: Sequence[str]) -> Figure:
    """Draw training images by client (columns) and class (rows) as dots whose area is the count."""
    clients, n = counts.shape
    figure = new(min(WIDTH, 2.0 + 0.36 * clients), _rows_height(n, each=0.24))
    axes = figure.subplots()
    client, label = np.nonzero(counts)
    room = min(24.0, 300.0 / max(clients, n))  # points across a dot at most
    area = room**2 * counts[client, label] / max(1, counts.max())
    axes.scatter(client, label, s=area, color=COLOURS[0], linewidths=0)
    axes.set_xlim(-0.7, clients - 0.3)
    axes.set_ylim(n - 0.3, -0.7)
    axes.grid(True)
    axes.set_xlabel("client")
    axes.set_ylabel("class")
    _ticks(axes.xaxis, range(clients))
    _ticks(axes.yaxis, classes)
    axes.tick_params(length=0)
    return figure


# ---- heads -----------------------------------------------------------------------------------------------------------


@styled
def norm_maps(panels: Mapping[str, Array], classes: Sequence[str], clients: Sequence[Any]) -> Figure:
    """Draw (K, C) maps side by side, each on its own scale: class counts beside norms of heads."""
    rows = len(next(iter(panels.values())))
    figure = new(WIDTH, _rows_height(rows, 1.9, 0.17))
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, values) in zip(grid, panels.items()):
        signed = np.nanmin(values) < 0
        edge = float(np.nanmax(np.abs(values))) or 1.0
        mesh = _heat(
            axes, values, cmap=SPLIT if signed else HEAT, low=-edge if signed else None, high=edge if signed else None
        )
        _cells(axes, classes, clients)
        axes.set_title(title)
        axes.set_xlabel("class")
        bar = figure.colorbar(mesh, ax=axes, location="bottom", fraction=0.05, pad=0.02, aspect=24)
        bar.outline.set_visible(False)
    for i, axes in enumerate(grid):
        if i:
            axes.tick_params(labelleft=False)
    for axes in grid:
        axes.set_ylim(rows, 0)
    grid[0].set_ylabel("client")
    return figure


@styled
def norm_evolution(history: Mapping[Any, tuple[Array, Array]], shares: Mapping[Any, Array], named: int = 5) -> Figure:
    """Draw p~ over rounds, a panel a client, a line a class, with the true share p as a bar at the right edge.

    Parameters
    ----------
    history : {client: (rounds (T,), p~ (T, C))}.   shares : {client: p (C,)}.
    named : how many classes of a client, those with the largest p, stand out and are named; the others are grey.
    """
    columns = min(3, len(history))
    rows = math.ceil(len(history) / columns)
    figure = new(WIDTH, 0.6 + 1.8 * rows)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    top = 1.06 * max(max(float(v.max()), float(shares[c].max())) for c, (_, v) in history.items())
    for axes, (client, (rounds, values)) in zip(grid.flat, history.items()):
        p = shares[client]
        chosen = [int(c) for c in np.argsort(-p, kind="stable")[:named] if p[c] > 0]
        for c in range(len(p)):
            if c not in chosen:
                axes.plot(rounds, values[:, c], color=MUTED, linewidth=0.6, alpha=0.6)
        for i, c in enumerate(chosen):
            look = {"color": COLOURS[i], "linestyle": DASHES[i % len(DASHES)]}
            axes.plot(rounds, values[:, c], linewidth=1.3, **look)
            axes.plot([1.01, 1.04], [p[c]] * 2, color=COLOURS[i], linewidth=2, clip_on=False,
                      transform=axes.get_yaxis_transform())  # fmt: skip
        place = -math.inf
        for c in sorted(chosen, key=lambda c: float(p[c])):  # names beside the bars, pushed apart where they touch
            place = max(float(p[c]), place + 0.09 * top)
            axes.annotate(
                str(c), (1.06, place), xycoords=axes.get_yaxis_transform(), fontsize=7,
                color=COLOURS[chosen.index(c)], va="center", annotation_clip=False,
            )  # fmt: skip
        axes.set_title(f"client {client}")
        axes.grid(axis="y")
        axes.set_ylim(0, top)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    for axes in list(grid.flat)[len(history) :]:
        axes.set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("round")
    for axes in grid[:, 0]:
        axes.set_ylabel("share of the norm")
    return figure


@styled
def p_against_norms(panels: Mapping[str, tuple[Array, Array]]) -> Figure:
    """Draw p~ against p, a dot a client and class, with the diagonal; panels by title."""
    side = WIDTH / max(2, min(3, len(panels)))
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = new(side * columns, side * rows)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    edge = 1.05 * max(max(float(p.max()), float(pt.max())) for p, pt in panels.values())
    for axes, (title, (p, pt)) in zip(grid.flat, panels.items()):
        axes.plot([0, edge], [0, edge], color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
        absent = p.ravel() == 0
        axes.plot(p.ravel()[~absent], pt.ravel()[~absent], "o", color=COLOURS[0], markersize=3.4, alpha=0.75,
                  markeredgewidth=0, label="class held")  # fmt: skip
        axes.plot(p.ravel()[absent], pt.ravel()[absent], "x", color=COLOURS[1], markersize=3.8, markeredgewidth=0.9,
                  label="class absent")  # fmt: skip
        axes.set_title(title)
        axes.set_xlabel("share of the data, p")
        axes.set_xlim(-0.02 * edge, edge)
        axes.set_ylim(-0.02 * edge, edge)
        axes.grid(True)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("share of the norm, p~")
    _legend(figure, grid.flat[0], 2)
    return figure


@styled
def norms_before_after(before: Array, after: Array, classes: Sequence[str]) -> Figure:
    """Draw the row norms of one head before and after calibration, a pair of dots a class."""
    figure = new(0.75 * WIDTH, 2.6)
    axes = figure.subplots()
    place = np.arange(len(before))
    axes.vlines(place, before, after, color=LINE, linewidth=2.4)
    axes.plot(place, before, label="as trained", **{**_look(0), "linestyle": "none"})
    axes.plot(place, after, label="calibrated", **{**_look(1), "linestyle": "none"})
    axes.set_ylim(0, 1.08 * float(max(before.max(), after.max())))
    axes.grid(axis="y")
    axes.set_xlabel("class")
    axes.set_ylabel("norm of the head's row")
    _ticks(axes.xaxis, classes, rotation=0 if _short(classes) else 45)
    _legend(figure, axes, 2)
    return figure


# ---- representations -------------------------------------------------------------------------------------------------


def _numbers(axes: Axes, points: Array, group: Array, size: float = 16.0) -> None:
    """Draw every point as the number of its group, so that groups can be told apart without colour.

    Points are drawn in several layers, so that no group lies on top of all others.
    """
    names = sorted({int(g) for g in group})
    layer = np.arange(len(points)) * 7 % 8
    for k in range(8):
        for name, colour in zip(names, _shades(len(names))):
            chosen = points[(group == name) & (layer == k)]
            marker = f"${name}$" if len(names) <= 40 else "."
            axes.scatter(
                chosen[:, 0], chosen[:, 1], s=size * (1.7 if name > 9 else 1.0), marker=marker, color=colour,
                linewidths=0.15, rasterized=True,
            )  # fmt: skip
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_aspect("equal", "datalim")
    for side in axes.spines.values():
        side.set_visible(True)
        side.set_color(LINE)


@styled
def embedding(rows: Mapping[str, tuple[Array, Mapping[str, Array]]]) -> Figure:
    """Draw points in the plane, a row an embedding, a column a colouring.

    Parameters
    ----------
    rows : {title: (points (n, 2), {colouring: group (n,)})}.
    """
    columns = max(len(groups) for _, groups in rows.values())
    side = WIDTH / max(2, columns)
    figure = new(side * columns, side * len(rows))
    figure.set_dpi(170)
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for line, (title, (points, groups)) in zip(grid, rows.items()):
        for axes, (name, group) in zip(line, groups.items()):
            _numbers(axes, points, group)
            axes.set_title(f"{title}, {name}" if title else name)
    return figure


@styled
def cka(panels: Mapping[str, Mapping[str, Array]]) -> Figure:
    """Draw CKA between clients: per layer, a small dot a pair and a large mark the mean; a line a run.

    Parameters
    ----------
    panels : {run: {layer: (K, K)}}; layers in forward order.
    """
    layers = list(dict.fromkeys(name for maps in panels.values() for name in maps))
    figure = new(WIDTH, 3.0)
    axes = figure.subplots()
    shift = np.linspace(-0.22, 0.22, len(panels)) if len(panels) > 1 else np.zeros(1)
    for i, (label, maps) in enumerate(panels.items()):
        look = _look(i)
        means = []
        for j, layer in enumerate(layers):
            values = np.full(1, np.nan)
            if layer in maps:
                values = maps[layer][np.triu_indices(len(maps[layer]), 1)]
                values = values[np.isfinite(values)]
            # A fixed fan-out in place of random jitter: the same picture every time.
            fan = (np.arange(len(values)) * 0.618 % 1 - 0.5) * 0.12
            axes.plot(j + shift[i] + fan, values, ".", color=look["color"], markersize=3, alpha=0.3, markeredgewidth=0)
            means.append(values.mean() if len(values) else np.nan)
        axes.plot(np.arange(len(layers)) + shift[i], means, label=label, **{**look, "markersize": 6})
    axes.set_xlim(-0.5, len(layers) - 0.5)
    axes.set_ylim(0, 1.03)
    axes.grid(axis="y")
    axes.set_ylabel("linear CKA between clients")
    axes.set_xlabel("layer")
    _ticks(axes.xaxis, layers, rotation=30 if len(layers) > 6 else 0)
    if len(panels) > 1:
        _legend(figure, axes, len(panels))
    return figure


@styled
def conductance(panels: Mapping[str, tuple[Array, Sequence[Any]]], image: Array, scale: float) -> Figure:
    """Draw ranks of units (columns, sorted by their mean rank) at clients (rows), a panel a run, beside the image.

    Parameters
    ----------
    panels : {title: (ranks (K, d), clients)}.   image : (H, W, C) uint8, drawn from 0 to `scale`.
    """
    heights = [len(ranks) for ranks, _ in panels.values()]
    figure = new(WIDTH, 0.9 + sum(0.75 + 0.16 * h for h in heights))
    grid = figure.subplots(
        len(panels), 2, squeeze=False, gridspec_kw={"width_ratios": [1, 7], "height_ratios": [h + 3 for h in heights]}
    )
    mesh: Any = None
    for i, ((left, axes), (title, (ranks, clients))) in enumerate(zip(grid, panels.items())):
        order = np.argsort(ranks.mean(axis=0), kind="stable")
        mesh = _heat(axes, ranks[:, order], low=0, high=max(1, ranks.shape[1] - 1))
        axes.set_xticks([])
        axes.set_yticks([j + 0.5 for j in range(len(clients))], [str(c) for c in clients])
        axes.set_ylabel("client")
        axes.set_title(title)
        left.set_axis_off()
        if i == 0:
            shown = np.asarray(image, float) / scale
            grey = shown.shape[2] == 1
            left.imshow(shown[:, :, 0] if grey else shown.clip(0, 1), cmap="Greys_r", vmin=0, vmax=1)
            left.set_title("image", fontsize=8)
    grid[-1][1].set_xlabel("units before the head, by mean rank")
    _scale(figure, mesh, [line[1] for line in grid], "rank of conductance")
    return figure


# ---- calibration -----------------------------------------------------------------------------------------------------


@styled
def samples_sweep(lines: Mapping[str, tuple[Sequence[int], Sequence[float]]]) -> Figure:
    """Draw accuracy against M_c, the number of virtual samples per class; the first point (0) is the trained head."""
    figure = new(0.75 * WIDTH, 2.7)
    axes = figure.subplots()
    values = sorted({m for samples, _ in lines.values() for m in samples})
    for i, (label, (samples, accuracy)) in enumerate(lines.items()):
        axes.plot([values.index(m) for m in samples], accuracy, label=label, **_look(i))
        axes.axhline(accuracy[0], color=_look(i)["color"], linewidth=0.7, linestyle=(0, (1, 3)))
    _ticks(axes.xaxis, values)
    axes.grid(axis="y")
    axes.set_xlabel("virtual samples per class, M_c (0 = as trained)")
    axes.set_ylabel("accuracy of the global model")
    _percent(axes)
    if len(lines) > 1:
        _legend(figure, axes, len(lines))
    return figure


@styled
def separability(groups: Mapping[str, tuple[Array, Array]]) -> Figure:
    """Draw the gain of calibration against the separability of the classes, a mark a run."""
    figure = new(0.75 * WIDTH, 2.9)
    axes = figure.subplots()
    for i, (label, (distance, gain)) in enumerate(groups.items()):
        axes.plot(distance, 100 * np.asarray(gain), label=label, **{**_look(i), "linestyle": "none", "markersize": 6})
    axes.axhline(0, color=MUTED, linewidth=0.7)
    axes.grid(True)
    axes.set_xlabel("mean sliced Wasserstein distance between classes")
    axes.set_ylabel("gain of calibration, points")
    _legend(figure, axes, len(groups))
    return figure


# ---- federation ------------------------------------------------------------------------------------------------------


@styled
def mixing(matrix: Array, clients: Sequence[Any]) -> Figure:
    """Draw A: row i is the client that learns, column j the one that it learns from."""
    n = len(matrix)
    figure = new(min(WIDTH, 2.4 + 0.36 * n), min(WIDTH - 1, 1.7 + 0.3 * n))
    axes = figure.subplots()
    mesh = _heat(axes, matrix, low=0, high=max(float(matrix.max()), 1e-9), fmt=".2f" if n <= 14 else "")
    _cells(axes, clients, clients)
    axes.set_xlabel("learns from client")
    axes.set_ylabel("client")
    _scale(figure, mesh, axes, "share")
    return figure


__all__ = [
    "INK", "Curve", "cka", "client_scores", "conductance", "curves", "embedding", "label_dots", "label_heat", "mixing",
    "norm_evolution", "norm_maps", "norms_before_after", "p_against_norms", "samples_sweep", "seconds", "separability",
    "sweep",
]  # fmt: skip
