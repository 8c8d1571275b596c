"""Heat maps, dots and images in rows and columns: arrays in, a matplotlib figure out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedapp.results.figures.pieces import Array, colour_scale, entitle, heat_map, key, legend, name_ticks, new_figure
from fedapp.results.figures.style import INK, WIDTH, is_narrow, styled

# ---- data ------------------------------------------------------------------------------------------------------------


@styled
def label_heat(counts: Array, classes: Sequence[str]) -> Figure:
    """Draw training images by client (rows) and class (columns) as a heat map."""
    clients, n = counts.shape
    figure, ((axes,),) = new_figure(
        min(WIDTH, 2.2 + 0.42 * n), min(9.0, 1.6 + 0.2 * clients), "class", "client", grid=None
    )
    small = clients <= 40 and n <= 26
    mesh = heat_map(axes, counts, classes, range(clients), fmt=".0f" if small else "")
    colour_scale(figure, mesh, axes, "training images")
    return figure


@styled
def label_dots(counts: Array, classes: Sequence[str]) -> Figure:
    """Draw training images by client (columns) and class (rows) as dots whose area is the count."""
    clients, n = counts.shape
    width, height = min(WIDTH, 2.0 + 0.36 * clients), min(9.0, 1.6 + 0.24 * n)
    figure, ((axes,),) = new_figure(width, height, "client", "class", grid="both")
    client, label = np.nonzero(counts)
    room = min(24.0, 300.0 / max(clients, n))  # points across a dot at most
    area = room**2 * counts[client, label] / max(1, counts.max())
    axes.scatter(client, label, s=area, color=INK, linewidths=0)
    axes.set_xlim(-0.7, clients - 0.3)
    axes.set_ylim(n - 0.3, -0.7)
    name_ticks(axes.xaxis, range(clients))
    name_ticks(axes.yaxis, classes)
    axes.tick_params(length=0)
    sizes = sorted({max(1, round(int(counts.max()) * part)) for part in (0.1, 0.5, 1)})
    look: Any = {"marker": "o", "linestyle": "none", "color": INK, "markeredgewidth": 0}
    legend(figure, *(key(f"{n} images", markersize=room * (n / counts.max()) ** 0.5, **look) for n in sizes))
    return figure


# ---- heads -----------------------------------------------------------------------------------------------------------


@styled
def norm_maps(panels: Mapping[str, Array], classes: Sequence[str], clients: Sequence[Any]) -> Figure:
    """Draw (K, C) maps side by side, class counts on their own scale beside norms of heads on a common one."""
    height = min(9.0, 1.9 + 0.17 * len(clients))
    figure, (grid,) = new_figure(WIDTH, height, "class", "client", columns=len(panels), grid=None, sharey=True)
    norms = list(panels.values())[1:]
    low, high = (min(float(v.min()) for v in norms), max(float(v.max()) for v in norms)) if norms else (None, None)
    for i, (axes, (title, values)) in enumerate(zip(grid, panels.items())):
        mesh = heat_map(axes, values, classes, clients, low=low if i else None, high=high if i else None)
        entitle(axes, title)
        if not i or is_narrow():
            colour_scale(figure, mesh, axes, "norm" if i else "training images", 0.02, "bottom")
    if len(grid) > 1 and not is_narrow():
        colour_scale(figure, mesh, list(grid[1:]), "norm, the same scale in all", 0.02, "bottom")
    return figure


@styled
def mixing(matrix: Array, clients: Sequence[Any]) -> Figure:
    """Draw A: row i is the client that learns, column j the one that it learns from."""
    n = len(matrix)
    width, height = min(WIDTH, 2.4 + 0.36 * n), min(WIDTH - 1, 1.7 + 0.3 * n)
    figure, ((axes,),) = new_figure(width, height, "learns from client", "client", grid=None)
    mesh = heat_map(axes, matrix, clients, clients, high=max(float(matrix.max()), 1e-9), fmt=".2f" if n <= 14 else "")
    colour_scale(figure, mesh, axes, "share")
    return figure
