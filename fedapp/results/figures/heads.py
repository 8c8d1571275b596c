"""Figures of the clients' heads: norms of their rows, label shares, and who learns from whom."""

from __future__ import annotations

import math

import numpy as np

from fedapp.core.classwise import norm_distribution
from fedapp.results import analysis, heads
from fedapp.results.analysis import Unavailable
from fedapp.results.figures import plots
from fedapp.results.figures.plots import Array
from fedapp.results.figures.words import Runs, Words, each, percent
from fedapp.results.runs import RunResult


def head_maps(runs: Runs) -> Words:
    """Draw class counts beside the row norms of the clients' heads (cwFedAvg, Figs. 3 and 6)."""
    base = runs[0]
    analysis.label_shares(base)
    found = each(runs, heads.head_norms)
    clients = min((ids for ids, _ in found.values()), key=len)
    counts = base.counts[clients].astype(float)
    maps = {name: norms[[ids.index(c) for c in clients]] for name, (ids, norms) in found.items()}
    said = ", ".join(f"{name} {_correlation(counts, norms):.2f}" for name, norms in maps.items())
    panels = {"class counts": counts, **{f"row norms, {name}": norms for name, norms in maps.items()}}
    return (
        "Left: training images by client and class. Right: L2 norm of each class's row in the client's head, after its "
        f"last local training. Correlation with the class shares within clients: {said}.",
        f"Heat maps of class counts and head row norms; their correlation within clients is {said}.",
        plots.norm_maps(panels, base.classes, clients),
    )


def _correlation(counts: Array, norms: Array) -> float:
    """Pearson correlation of class shares and norm shares, both about the clients' own means."""
    a, b = (v / np.maximum(v.sum(axis=1, keepdims=True), 1e-12) for v in (counts, norms))
    a, b = a - a.mean(axis=1, keepdims=True), b - b.mean(axis=1, keepdims=True)
    scale = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float((a * b).sum() / scale) if scale else math.nan


def norm_evolution(runs: Runs, clients: int = 6) -> Words:
    """Draw p~ over rounds, a panel a client, with p at the edge (cwFedAvg, Fig. 2)."""
    run = runs[0]
    history = heads.head_norm_history(run)
    if max(len(rounds) for rounds, _ in history.values()) < 2:
        raise Unavailable(
            "there is only one round, and an evolution needs two", f"fedapp run --resume {run.out} --rounds 10"
        )
    shares = analysis.label_shares(run)
    chosen = sorted(sorted(history, key=lambda c: -float((shares[c] ** 2).sum()))[:clients])
    lines = {c: (t, n / n.sum(axis=1, keepdims=True)) for c, (t, n) in history.items() if c in chosen}
    apart = np.mean([np.abs(v[-1] - shares[c]).sum() / 2 for c, (_, v) in lines.items()])
    return (
        "Share of each class in the sum of the head's row norms, p~, after every local training; bars at the right "
        "edge, with the class's number: its share of the client's data, p. Grey: classes that the client has little or "
        f"nothing of. Shown: the {len(chosen)} clients with the most uneven data. Each client records the norms on "
        "its own disk; they are never sent.",
        f"Line charts of norm shares by round for clients {', '.join(map(str, chosen))}; at the end they are "
        f"{percent(float(apart))} away from the label shares (total variation, mean).",
        plots.norm_evolution(lines, {c: shares[c] for c in chosen}),
    )


def p_against_norms(runs: Runs) -> Words:
    """Draw p~ against p, a mark a client and class (cwFedAvg, Figs. 2 and 5)."""

    def points(run: RunResult) -> tuple[Array, Array]:
        shares, stored = analysis.label_shares(run), analysis.client_arrays(run)
        norms = [norm_distribution(arrays["model/head.weight"]) for _, arrays in stored.values()]
        return shares[list(stored)], np.stack(norms)

    panels = each(runs, points)
    said = "; ".join(
        f"{n}: R = {np.linalg.norm(p - q, axis=1).mean():.3f}, "
        f"{percent(np.where(p == 0, q, 0).sum(axis=1).mean())} of p~ on absent classes"
        for n, (p, q) in panels.items()
    )
    return (
        "A mark a client and class: the class's share of the client's data, p, and of the sum of its head's row norms, "
        f"p~ (cwFedAvg, Eq. 4). On the diagonal, heads tell the label distribution. Mean over clients: {said}.",
        f"Scatter plot of norm shares against label shares. {said}.",
        plots.p_against_norms(panels),
    )


def mixing(runs: Runs) -> Words:
    """Draw A, the shares of the clients in what each client receives next."""
    ids, matrix, how = heads.who_learns_from_whom(runs[0])
    own = percent(float(np.diag(matrix).mean()))
    return (
        f"Row i: the shares of the clients in what client i receives next ({how}); rows sum to 1. "
        f"Own share: {own} on average; an even mixture has {percent(1 / len(ids))} everywhere.",
        f"Heat map of {len(ids)} by {len(ids)} shares; the diagonal is {own} on average, the largest share "
        f"{percent(float(matrix.max()))}.",
        plots.mixing(matrix, ids),
    )
