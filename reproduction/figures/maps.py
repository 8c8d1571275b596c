"""Heat maps and images in rows and columns: arrays in, a matplotlib figure out."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedapp.results.figures.pieces import Array, colour_scale, entitle, heat_map, new_figure
from fedapp.results.figures.style import WIDTH, styled


@styled
def named_maps(
    panels: Mapping[str, tuple[Array, str, Sequence[Any]]], classes: Sequence[str], own: Collection[str] = ()
) -> Figure:
    """Draw maps with classes as columns, three in a row, on one scale.

    Parameters
    ----------
    panels : {title: (values (n, C), what its rows are, their n names)}.   own : panels that have their own scale.
    """
    low, high = _ends({title: values for title, (values, *_) in panels.items() if title not in own})
    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    height = lines * (1.5 + 0.1 * max(min(len(names), 40) for _, _, names in panels.values()))
    figure, grid = new_figure(WIDTH, min(10.0, height), "", "", lines, columns, grid=None)
    for axes, (title, (values, rows, names)) in zip(grid.flat, panels.items()):
        scale = (None, None) if title in own else (low, high)
        mesh = heat_map(axes, values, classes, names, low=scale[0], high=scale[1])
        entitle(axes, title)
        axes.set(xlabel="class", ylabel=rows)
        colour_scale(figure, mesh, axes, pad=0.02)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    return figure


@styled
def conductance(panels: Mapping[str, tuple[Array, Sequence[Any]]], image: Array) -> Figure:
    """Draw ranks of units (columns, sorted by their mean rank) at clients (rows), one panel per run, next to the image.

    Parameters
    ----------
    panels : {title: (ranks (K, d), clients)}.   image : (H, W, C), from 0 to 1.
    """
    heights = [len(ranks) + 3 for ranks, _ in panels.values()]
    figure, grid = new_figure(
        WIDTH, 0.9 + sum(0.27 + 0.16 * h for h in heights), "units before the head, by mean rank", "", len(panels), 2,
        grid=None, width_ratios=[1, 7], height_ratios=heights,
    )  # fmt: skip
    for axes, (title, (ranks, clients)) in zip(grid[:, 1], panels.items()):
        order = np.argsort(ranks.mean(axis=0), kind="stable")
        mesh = heat_map(axes, ranks[:, order], (), clients, high=max(1, ranks.shape[1] - 1))
        axes.set_ylabel("client")
        entitle(axes, title)
    for axes in grid[:, 0]:
        axes.set_axis_off()
    grid[0, 0].imshow(image.clip(0, 1).squeeze(), cmap="Greys_r", vmin=0, vmax=1)
    grid[0, 0].set_title("image", fontsize=8)
    colour_scale(figure, mesh, grid[:, 1], "rank of conductance")
    return figure


@styled
def heat_grid(
    rows: Mapping[str, Mapping[str, Array]], xlabel: str, ylabel: str, columns: Sequence[Any],
    high: float | None = None, own: Collection[str] = (),
) -> Figure:  # fmt: skip
    """Draw matrices in rows and columns of panels, on one scale.

    Parameters
    ----------
    rows : {row: {panel: (n, m)}}; every row has as many panels.   columns : names of the matrices' columns.
    high : upper end of the scale, from 0; None = the ends of the values.   own : panels that have their own scale.
    """
    shared = {(row, p): values for row, panels in rows.items() for p, values in panels.items() if p not in own}
    ends = _ends(shared) if high is None else (0.0, high)
    across = max(len(panels) for panels in rows.values())
    side = WIDTH / max(3, across)
    figure, grid = new_figure(side * across, 0.3 + side * len(rows), xlabel, ylabel, len(rows), across, grid=None)
    for line, (name, panels) in zip(grid, rows.items()):
        for axes, (title, values) in zip(line, panels.items()):
            low, top = (0, None) if title in own else ends
            mesh = heat_map(axes, values, columns, range(len(values)), high=top, low=low)
            axes.set_title(f"{name}\n{title}" if name else title, fontsize=7.5)
            if title in own:
                colour_scale(figure, mesh, axes, pad=0.02)
        for axes in line[len(panels) :]:
            axes.set_visible(False)
    colour_scale(figure, mesh, grid, pad=0.02)
    return figure


def _ends(panels: Mapping[Any, Array]) -> tuple[float, float]:
    """Return the lowest and the highest value of all panels."""
    return min(float(v.min()) for v in panels.values()), max(float(v.max()) for v in panels.values())


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
    figure, grid = new_figure(WIDTH, 0.4 + (side + 0.1) * len(lines), "", "", len(lines), len(names), grid=None)
    for axes, name in zip(grid[0], names):
        axes.set_title(name, fontsize=7, loc="center")
    for line, (title, what, images) in zip(grid, lines):
        line[0].set_ylabel(f"{title}\n{what}" if title else what, rotation=0, ha="right", va="center", fontsize=7)
        for axes, image in zip(line, images):
            axes.imshow(image.clip(0, 1).squeeze(), cmap="Greys_r", vmin=0, vmax=1, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
    return figure
