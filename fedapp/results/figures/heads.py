"""Figures of the clients' heads: norms of their rows, their mixing matrix, and the training loss."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fedapp.results import analysis
from fedapp.results.analysis import Unavailable
from fedapp.results.figures import maps, plots
from fedapp.results.figures.pieces import Curve
from fedapp.results.figures.scores import bands, by_method, mean_curve
from fedapp.results.figures.words import Runs, Words, each, made, percent, setting_text
from fedapp.results.runs import groups_of
from fedapp.results.statistics import within_rows


def head_maps(runs: Runs) -> Words:
    """Draw class counts next to the row norms of the clients' heads."""
    base = runs[0]
    shares = analysis.label_shares(base)
    found = each(runs, analysis.head_norms)
    clients = min((ids for ids, _ in found.values()), key=len)
    shown = {name: norms[[ids.index(c) for c in clients]] for name, (ids, norms) in found.items()}
    parts = {name: norms / np.maximum(norms.sum(axis=1, keepdims=True), 1e-12) for name, norms in shown.items()}
    said = ", ".join(f"{name} {within_rows(shares[clients], part):.2f}" for name, part in parts.items())
    panels = {
        "class counts": base.counts[clients].astype(float),
        **{f"row norms, {name}": norms for name, norms in shown.items()},
    }
    return (
        "Left: training rows by client and class. Right: L2 norm of each class's row in the client's head, after its "
        f"last local training. Correlation with the class shares within clients: {said}.",
        f"Heat maps of class counts and head row norms; their correlation within clients is {said}.",
        maps.norm_maps(panels, base.classes, clients),
    )


def mixing(runs: Runs) -> Words:
    """Draw A, the shares of the clients in the next payload of each client."""
    ids, matrix, how = analysis.who_learns_from_whom(runs[0])
    own = percent(float(np.diag(matrix).mean()))
    return (
        f"Row i: the shares of the clients in the next payload of client i ({how}); rows sum to 1. "
        f"Own share: {own} on average; an even mixture has {percent(1 / len(ids))} everywhere.",
        f"Heat map of {len(ids)} by {len(ids)} shares; the diagonal is {own} on average, the largest share "
        f"{percent(float(matrix.max()))}.",
        maps.mixing(matrix, ids),
    )


def training_loss(runs: Runs) -> Words:
    """Draw the clients' mean training loss by round, one panel per setting (cwFedAvg, Fig. 4)."""
    runs = [run for run, _ in made(runs, lambda run: cross_entropy(run.rounds))]
    panels: dict[str, list[Curve]] = {}
    for setting, members in groups_of(runs):
        for label, same in by_method(members).items():
            curve = mean_curve(label, pd.concat([cross_entropy(r.rounds) for r in same]))
            panels.setdefault(setting_text(setting), []).append(curve)
    said = "; ".join(
        f"{name}: " * bool(name) + ", ".join(f"{c.label} {c.mean[0]:.2f} to {c.mean[-1]:.2f}" for c in lines)
        for name, lines in panels.items()
    )
    return (
        f"{loss_words(runs)} Mean over the steps of a round and the clients{bands(runs)}.",
        f"Line charts of the training loss by round. {said}.",
        plots.curves(panels, ylabel="training loss", percent=False, band=bands(runs).removeprefix("; bands: ")),
    )


def loss_words(runs: Runs) -> str:
    """Explain the figure, and name the runs whose line is more than the cross-entropy."""
    whole_only = [r for r in runs if _loss_column(r.rounds) == "train_loss"]
    more = [r.label for r in whole_only if analysis.method_of(r)[0].client.adds_to_loss()]
    whole = f"; of {', '.join(dict.fromkeys(more))} the whole loss, with the terms that the method adds" if more else ""
    return f"Cross-entropy of the local training{whole}."


def _loss_column(table: pd.DataFrame) -> str:
    return "cross_entropy" if "cross_entropy" in table else "train_loss"


def cross_entropy(table: pd.DataFrame) -> pd.DataFrame:
    """Return round and loss: the cross-entropy where a method reports it, else its training loss."""
    column = _loss_column(table)
    if column not in table:
        raise Unavailable("no round was finished")
    return table[["round", column]].rename(columns={column: "loss"}).dropna()
