"""FedClassAvg's figures of representations; `reproduction/analysis/representations.py` computes them."""

from __future__ import annotations

from functools import partial

import numpy as np

from fedapp.results.figures.words import Runs, Words, each
from reproduction.analysis import representations
from reproduction.analysis.models import data_of
from reproduction.figures import maps, plots


def embedding(runs: Runs, whole: bool = False) -> Words:
    """Where clients place the same images (FedClassAvg, Fig. 8).

    Parameters
    ----------
    whole : as in the paper: all clients, and the trunk's output before the ReLU.
    """
    draw = partial(representations.client_embedding, points=1200 if len(runs) == 1 else 800)
    if whole:
        draw = partial(representations.client_embedding, clients=None, points=2000, activated=False)
    found = each(runs, draw)
    rows = {n: (e.points, {"by class": e.label, "by client": e.client}) for n, e in found.items()}
    said = "; ".join(
        f"{n}: {e.silhouette_label:.2f} by class, {e.silhouette_client:.2f} by client" for n, e in found.items()
    )
    clients = len(np.unique(next(iter(found.values())).client))
    return (
        f"t-SNE of the representations{' before the ReLU' if whole else ''} of the same test images by "
        f"{'all ' if whole else ''}{clients} clients' trunks, drawn as class numbers "
        "and as client numbers. Where clients agree, numbers mix on the right and part on the left. Mean silhouette of "
        f"the representations themselves, -1 to 1: {said}.",
        f"Scatter plots of representations by class and by client. Silhouette: {said}.",
        plots.embedding(rows),
    )


def conductance(runs: Runs) -> Words:
    """Which units clients use for one image (FedClassAvg, Fig. 9)."""
    base = runs[0]
    right = each(runs, representations.right_clients)
    best = int(np.min([table.sum(axis=0) for _, table in right.values()], axis=0).argmax())
    found = {r.label: representations.conductance(r, best, right[r.label]) for r in runs if r.label in right}
    first = next(iter(found.values()))
    said = "; ".join(f"{n}: {c.agreement:.2f}" for n, c in found.items())
    image = first.image / data_of(base).dataset.scale
    return (
        f"Units before the head at clients that classify one test image (class {base.classes[first.label]}) correctly; "
        "dark: high rank of layer conductance for that class, W_cj (z_j(x) - z_j(x0)), x0 the mean image. Vertical "
        f"stripes mean that clients use the same units. Mean Spearman correlation between clients: {said}.",
        f"Heat map of unit ranks by client. Mean Spearman correlation between clients: {said}.",
        maps.conductance({n: (c.ranks, c.clients) for n, c in found.items()}, image),
    )
