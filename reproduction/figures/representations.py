"""FedClassAvg's figures of representations: where clients place the same images, and which units they use for them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedapp.learning.evaluation import batched
from fedapp.models import SplitModel
from fedapp.results.analysis import Unavailable
from fedapp.results.figures.words import Runs, Words, each
from fedapp.results.runs import RunResult
from fedapp.results.statistics import Floats, Ints, mean_and_std
from reproduction.figures import maps, plots
from reproduction.figures.models import client_models, data_of, inputs_of, probe, represent


def _of_one_width(models: Mapping[int, SplitModel]) -> None:
    """Refuse models whose representations have different widths."""
    widths = {m.width for m in models.values()}
    if len(widths) > 1:
        raise Unavailable(f"the clients' representations have different widths ({sorted(widths)})")


def embed(rows: NDArray[Any], seed: int) -> Floats:
    """Return the t-SNE (n, 2) of rows (n, d): started at the principal components, perplexity at most 30, seeded."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    if len(rows) < 5:
        raise Unavailable(f"{len(rows)} points are too few for t-SNE")
    perplexity = min(30.0, (len(rows) - 1) / 3)
    tsne = TSNE(2, perplexity=perplexity, init="pca", random_state=seed % 2**32, n_jobs=1, max_iter=500)
    # sklearn brings a thread pool of its own, and several threads wait for each other longer than they help.
    with threadpool_limits(limits=1):
        points: Floats = np.asarray(tsne.fit_transform(np.asarray(rows, dtype=np.float32)), dtype=np.float64)
    return points


def client_embedding(
    run: RunResult, clients: int | None = None, points: int = 2000
) -> tuple[Floats, dict[str, Ints], list[float]]:
    """Embed the trained trunks' outputs before the ReLU for the same test images (FedClassAvg, Fig. 8).

    Parameters
    ----------
    clients : how many at most, by id; None = all.   points : images times clients, 20 images at least.

    Returns
    -------
    Points (n, 2), their numbers (n,) `by class` and `by client`, and the mean silhouette of the representations
    themselves by both, in -1..1: high by class and low by client where clients agree.
    """
    from sklearn.metrics import silhouette_score

    models = client_models(run, clients)
    _of_one_width(models)
    x, y = probe(run, max(20, points // len(models)))
    # Clients train to representations of different length. At one scale, what differs is their shape.
    rows = np.concatenate([_at_unit_scale(represent(run, m, x, activated=False)) for m in models.values()])
    numbers = {"by class": np.tile(y, len(models)), "by client": np.repeat(list(models), len(y))}
    apart = [float(silhouette_score(rows, of)) if len(set(of)) > 1 else math.nan for of in numbers.values()]
    return embed(rows, run.seed), numbers, apart


def _at_unit_scale(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    length = float(np.sqrt((rows.astype(np.float64) ** 2).sum(axis=1).mean()))
    return rows / np.float32(length) if length > 0 else rows


@dataclass(frozen=True, eq=False)
class Conductance:
    """How clients that classify one image correctly use the units before the head (FedClassAvg, Fig. 9).

    Attributes
    ----------
    clients : ids.   ranks : (K, d) ranks 0 .. d-1 of the units' conductance per client, ties at their mean.
    label : class of the image.   agreement : mean Spearman correlation over pairs of clients.
    image : (H, W, C) uint8.
    """

    clients: list[int]
    ranks: Floats
    label: int
    agreement: float
    image: NDArray[np.uint8]


def unit_conductance(model: SplitModel, x: Tensor, baseline: Tensor, target: int) -> Floats:
    """Layer conductance of the units that the head sees, for one normalised image, (d,).

    For the logit c of a linear head on z = represent(x) the path integral has a closed form, whatever the trunk:
    W_cj (z_j(x) - z_j(x0)); it sums to the difference of the logits.

    Parameters
    ----------
    x, baseline : (1, C, H, W) float32, the image and where the path starts.
    """
    with torch.inference_mode():
        step = (model.represent(x) - model.represent(baseline))[0].double()
        values: Floats = (model.head.weight[target].double() * step).numpy()
    return values


def right_clients(run: RunResult, images: int = 200) -> tuple[list[int], NDArray[np.bool_]]:
    """Return client ids, and which probe images each client's trained model classifies correctly (K, n).

    Runs of one data set, partition and seed have the same images.
    """
    models = client_models(run)
    _of_one_width(models)
    x, y = probe(run, images)
    inputs = inputs_of(run)
    return list(models), np.stack([batched(m, x, inputs).argmax(1).numpy() == y for m in models.values()])


def ranked_units(run: RunResult, chosen: int, right: tuple[list[int], NDArray[np.bool_]]) -> Conductance:
    """Rank units by conductance at the first eight clients that classify one image correctly.

    The path starts at the mean image (zeros after normalisation), which is captum's default.

    Parameters
    ----------
    chosen : the image's place among the probe images.   right : what `right_clients` returned.
    """
    from scipy.stats import rankdata, spearmanr

    from fedapp.data.transforms import channels_first, normalise

    known, table = right
    ids = [c for c, ok in zip(known, table[:, chosen]) if ok][:8]
    if len(ids) < 2:
        raise Unavailable("no test image is classified correctly by two clients")
    x, y = probe(run, table.shape[1])
    models = client_models(run)
    image = normalise(channels_first(x[chosen : chosen + 1]), inputs_of(run))
    rows = np.stack(
        [rankdata(unit_conductance(models[c], image, torch.zeros_like(image), int(y[chosen]))) - 1 for c in ids]
    )
    agreement, _ = mean_and_std(spearmanr(a, b).statistic for a, b in itertools.combinations(rows, 2))
    return Conductance(ids, rows, int(y[chosen]), agreement, x[chosen].numpy())


def embedding(runs: Runs) -> Words:
    """Where clients place the same images (FedClassAvg, Fig. 8)."""
    found = each(runs, client_embedding)
    said = "; ".join(f"{n}: {label:.2f} by class, {client:.2f} by client" for n, (*_, (label, client)) in found.items())
    clients = len(np.unique(next(iter(found.values()))[1]["by client"]))
    return (
        f"t-SNE of the representations before the ReLU of the same test images by all {clients} clients' trunks, drawn "
        "as class numbers and as client numbers. Where clients agree, numbers mix on the right and part on the left. "
        f"Mean silhouette of the representations themselves, -1 to 1: {said}.",
        f"Scatter plots of representations by class and by client. Silhouette: {said}.",
        plots.embedding({n: (points, numbers) for n, (points, numbers, _) in found.items()}),
    )


def conductance(runs: Runs) -> Words:
    """Which units clients use for one image (FedClassAvg, Fig. 9)."""
    base = runs[0]
    right = each(runs, right_clients)
    best = int(np.min([table.sum(axis=0) for _, table in right.values()], axis=0).argmax())
    found = {r.label: ranked_units(r, best, right[r.label]) for r in runs if r.label in right}
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
