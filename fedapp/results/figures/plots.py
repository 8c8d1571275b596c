"""Charts with axes: arrays in, a matplotlib figure out. They know nothing of run directories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from fedapp.results.figures.pieces import (
    Array,
    Panels,
    draw_dots,
    entitle,
    in_percent,
    key,
    labels_of,
    legend,
    look_of,
    new_figure,
)
from fedapp.results.figures.style import DOTTED, LINE, MUTED, WIDTH, styled

# ---- scores ----------------------------------------------------------------------------------------------------------


@styled
def curves(
    panels: Panels, xlabel: str = "round", ylabel: str = "accuracy", height: float = 3.1, percent: bool = True,
    log: bool = False, baseline: tuple[str, float] | None = None, without: str = "", band: str = "",
) -> Figure:  # fmt: skip
    """Draw lines with bands, a panel each, with one legend.

    Parameters
    ----------
    baseline : name and height of a dotted line, in all panels but the one that is titled `without`.
    band : what half the height of a band is, for the legend.
    """
    figure, (grid,) = new_figure(WIDTH, height, xlabel, ylabel, columns=len(panels), sharey=True)
    labels, more = labels_of(panels), []
    edges = (0.0, 1.0) if percent else (-np.inf, np.inf)  # bands leave 0 and 1, shares cannot
    banded = False
    for axes, (title, lines) in zip(grid, panels.items()):
        for curve in lines:
            look = look_of(curve.label, labels)
            axes.plot(curve.x, curve.mean, label=curve.label, markevery=max(1, len(curve.x) // 8), **look)
            if curve.spread is not None and np.any(half := np.nan_to_num(curve.spread)):
                alpha = 0.13 if len(lines) < 5 else 0.07
                low, high = (np.clip(curve.mean + sign * half, *edges) for sign in (-1, 1))
                axes.fill_between(curve.x, low, high, color=look["color"], alpha=alpha, linewidth=0)
                banded = True
        entitle(axes, title)
        if log:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # no powers, whose exponents are small
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
        else:
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=xlabel.endswith(("round", "rounds"))))
        if baseline is not None and title != without:
            axes.axhline(baseline[1], color=MUTED, linewidth=1.0, linestyle=DOTTED)
    if not log:  # panels that are compared have the same scales
        ends = [axes.get_xlim() for axes in grid]
        for axes in grid:
            axes.set_xlim(min(a for a, _ in ends), max(b for _, b in ends))
    if baseline is not None:
        more.append(key(baseline[0], color=MUTED, linewidth=1.0, linestyle=DOTTED))
    if banded and band:
        more.append(key(band, color=MUTED, linewidth=7, alpha=0.3))
    low, high = grid[0].get_ylim()
    if percent:
        in_percent(grid[0])
        grid[0].set_ylim(max(low, -0.02), min(high, 1.03))
    else:
        grid[0].set_ylim(0, high)
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
    axes.set_ylim(min(0.0, axes.get_ylim()[0]), 1.03)
    in_percent(axes)
    legend(figure, key("span of a client's scores", color=LINE, linewidth=2.4))
    return figure


@styled
def sweep(
    panels: Panels, xlabel: str, ylabel: str = "accuracy", percent: bool = True, log: bool = False, start: bool = False
) -> Figure:
    """Draw scores against a setting, with error bars over seeds; `start` adds a dotted line at each first value.

    Values of the setting that would lie too close together on a linear axis stand at equal distances.
    """
    width = WIDTH if len(panels) > 1 else 0.62 * WIDTH
    figure, (grid,) = new_figure(width, 3.0, xlabel, ylabel, columns=len(panels), sharey=True)
    labels = labels_of(panels)
    ticks = sorted({float(v) for lines in panels.values() for c in lines for v in c.x})
    logarithmic = log and ticks[0] > 0
    crowded = not logarithmic and ticks[-1] - ticks[0] > 12 * float(np.diff(ticks).min(initial=np.inf))
    for axes, (title, lines) in zip(grid, panels.items()):
        for curve in lines:
            look = look_of(curve.label, labels)
            x = [ticks.index(float(v)) for v in curve.x] if crowded else curve.x
            spread = curve.spread
            if percent and spread is not None:  # no share is above 1
                half = np.nan_to_num(spread)
                spread = np.stack(
                    [half.clip(max=np.maximum(curve.mean, 0)), half.clip(max=np.maximum(1 - curve.mean, 0))]
                )
            axes.errorbar(x, curve.mean, yerr=spread, label=curve.label, capsize=2, elinewidth=0.8, **look)
            if start:
                axes.axhline(curve.mean[0], color=look["color"], linewidth=0.7, linestyle=DOTTED)
        if logarithmic:
            axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_xticks(range(len(ticks)) if crowded else ticks, [f"{t:g}" for t in ticks])
        entitle(axes, title)
    if percent:
        in_percent(grid[0])
    more = [key("at the first value", color=MUTED, linewidth=0.7, linestyle=DOTTED)] if start else []
    if any(c.spread is not None and np.any(c.spread > 0) for lines in panels.values() for c in lines):
        more.append(key("one standard deviation over seeds", color=MUTED, marker="|", linestyle="none", markersize=9))
    legend(figure, *more)
    return figure
