"""Heat maps: arrays in, a matplotlib figure out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from fedapp.results.figures.pieces import Array, colour_scale, entitle, heat_map, new_figure
from fedapp.results.figures.style import WIDTH, is_narrow, styled

# ---- data ------------------------------------------------------------------------------------------------------------


@styled
def label_heat(counts: Array, classes: Sequence[str]) -> Figure:
    """Draw training rows by class (rows) and client (columns) as a heat map; `counts` is (clients, classes)."""
    clients, n = counts.shape
    small = clients <= 20 and n <= 40
    width, height = min(WIDTH, 2.2 + (0.42 if small else 0.2) * clients), min(9.0, 1.4 + 0.2 * n)
    figure, ((axes,),) = new_figure(width, height, "client", "class", grid=None)
    mesh = heat_map(axes, counts.T, range(clients), classes, fmt=".0f" if small else "")
    colour_scale(figure, mesh, axes, "training rows")
    return figure


# ---- heads -----------------------------------------------------------------------------------------------------------


@styled
def norm_maps(panels: Mapping[str, Array], classes: Sequence[str], clients: Sequence[Any]) -> Figure:
    """Draw (K, C) maps side by side, class counts on their own scale next to norms of heads on a common one."""
    height = min(9.0, 1.9 + 0.17 * len(clients))
    figure, (grid,) = new_figure(WIDTH, height, "class", "client", columns=len(panels), grid=None, sharey=True)
    norms = list(panels.values())[1:]
    low, high = (min(float(v.min()) for v in norms), max(float(v.max()) for v in norms)) if norms else (None, None)
    for i, (axes, (title, values)) in enumerate(zip(grid, panels.items())):
        mesh = heat_map(axes, values, classes, clients, low=low if i else None, high=high if i else None)
        entitle(axes, title)
        if not i or is_narrow():
            colour_scale(figure, mesh, axes, "norm" if i else "training rows", 0.02, "bottom")
    if len(grid) > 1 and not is_narrow():
        text = "norm, the same scale in all" if len(grid) > 2 else "norm"
        colour_scale(figure, mesh, list(grid[1:]), text, 0.02, "bottom")
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
