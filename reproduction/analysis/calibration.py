"""What CCVR's figures compute from a run directory without training again.

| symbol (paper)        | here                                                                |
|-----------------------|---------------------------------------------------------------------|
| z = f(x)              | `represent`, what the head sees                                     |
| M_c                   | virtual samples per class in `calibration_sweep`                    |
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from clients.ccvr import CCVRHParams
from fedapp import sampling
from fedapp.core import gaussian, heads, virtual
from fedapp.core.gaussian import ClassMoments
from fedapp.learning.evaluation import batched
from fedapp.models import SplitModel
from fedapp.results.analysis import Unavailable, config_of, method_of
from fedapp.results.runs import RunResult
from fedapp.results.statistics import Floats, Ints, mean_and_std
from reproduction.analysis.heads import head_norm_history
from reproduction.analysis.models import (
    client_models,
    data_of,
    global_arrays,
    global_model,
    initial_arrays,
    inputs_of,
    probe,
    represent,
)
from reproduction.analysis.representations import embed
from strategies.ccvr import on_virtual, retrain

CALIBRATION_IMAGES = 20_000
"""Training images from which class statistics are computed at most."""
VIRTUAL_SAMPLES = 50_000
"""Virtual samples of all classes together that a sweep draws at most."""


# ---- layers ----------------------------------------------------------------------------------------------------------


def layers_of(model: SplitModel) -> dict[str, nn.Module]:
    """Return the layers with parameters in forward order, `head` last."""
    named = [(n, m) for n, m in model.features.named_children() if any(True for _ in m.parameters())]
    return {**dict(named), "head": model.head}


def output_of(run: RunResult, model: SplitModel, layer: str, x: Tensor) -> NDArray[np.float32]:
    """Return what a layer of a model puts out for images (n, H, W, C) uint8, as rows (n, d)."""
    kept: list[Tensor] = []
    handle = layers_of(model)[layer].register_forward_hook(functools.partial(_keep_output, kept))
    try:
        batched(model, x, inputs_of(run))
    finally:
        handle.remove()
    rows: NDArray[np.float32] = torch.cat(kept).numpy()
    return rows


def _keep_output(parts: list[Tensor], module: nn.Module, inputs: Any, output: Tensor) -> None:
    parts.append(output.detach().float().flatten(1))


def _unit_gram(rows: NDArray[np.float32]) -> Floats:
    """Centred (n, n) Gram matrix of (n, d) rows divided by its Frobenius norm; NaN where the rows do not vary."""
    centred = rows.astype(np.float64) - rows.mean(axis=0, dtype=np.float64)
    gram = centred @ centred.T
    with np.errstate(invalid="ignore", divide="ignore"):
        unit: Floats = gram / np.linalg.norm(gram)
    return unit


def layer_cka(run: RunResult, clients: int = 10, images: int = 300) -> tuple[list[int], dict[str, Floats]]:
    """Linear CKA between the clients' trained models, layer by layer (CCVR, Fig. 1 and 2).

    Parameters
    ----------
    clients : how many at most, by id.
    images : test images on which the layers are compared (paper: 10,000 or more). Time and memory grow with the
        square; memory is `clients` matrices of `images` x `images` numbers, since layers are compared one by one.

    Returns
    -------
    Client ids, and {layer: (K, K)} in forward order. Inner layers are compared between equal architectures only (NaN
    elsewhere); `features` (the end of the trunk) and `head` (the logits) between all.
    """
    config, models = config_of(run), client_models(run, clients)
    if len(models) < 2:
        raise Unavailable("it compares clients, and there are fewer than two")
    x, _ = probe(run, images)
    layers: dict[str, dict[int, str]] = {}
    for client, model in models.items():
        *inner, last, head = layers_of(model)
        prefix = f"{config.model.name_of(client)} " if len(config.model.names) > 1 else ""
        for shown, name in ({prefix + n: n for n in inner} | {"features": last, "head": head}).items():
            layers.setdefault(shown, {})[client] = name
    ends = ("features", "head")
    maps = {}
    for shown in (*(n for n in layers if n not in ends), *ends):
        of = {c: _unit_gram(output_of(run, models[c], name, x)) for c, name in layers[shown].items()}
        maps[shown] = np.array(
            [[(of[a] * of[b]).sum() if a in of and b in of else np.nan for b in models] for a in models]
        )
    return list(models), maps


def mean_of_pairs(matrix: Floats) -> float:
    """Return the mean over all pairs of different clients, NaN skipped; NaN without pairs."""
    return mean_and_std(matrix[np.triu_indices(len(matrix), 1)])[0]


def norms_by_round(run: RunResult) -> tuple[list[int], dict[str, Floats]]:
    """Return client ids, and the norms of the rows of their heads (K, C) before and after training (CCVR, Fig. 3, 12).

    The keys are `before training` (the head that all clients start from), `round 1` and the last round that is known of
    every client. Clients that were not drawn in a round keep the norms of their round before; NaN before the first.

    Raises
    ------
    Unavailable : no records of norms, or no head that all clients start from.
    """
    history = head_norm_history(run)
    last = max(int(rounds[-1]) for rounds, _ in history.values())
    classes = len(run.classes)
    start = initial_arrays(run)
    if "head.weight" not in start:
        raise Unavailable(
            f"with {run.method} every client starts from a head of its own", "fedapp run --method fedavg ..."
        )
    initial = np.linalg.norm(start["head.weight"].astype(np.float64), axis=1)

    def after(server_round: int) -> Floats:
        found = np.full((len(history), classes), np.nan)
        for row, (rounds, norms) in zip(found, history.values()):
            if known := int((rounds <= server_round).sum()):
                row[:] = norms[known - 1]
        return found

    shown = {"before training": np.tile(initial, (len(history), 1)), "round 1": after(1)}
    if last > 1:
        shown[f"round {last}"] = after(last)
    return list(history), shown


# ---- calibration -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Repair:
    """Test images before and after calibration (CCVR, Fig. 5): one embedding, three colourings.

    Attributes
    ----------
    points : (n, 2).   label, before, after : (n,) truth and predictions.
    """

    points: Floats
    label: Ints
    before: Ints
    after: Ints


def calibration_embedding(run: RunResult, points: int = 1000) -> Repair:
    """Embed test images by the global trunk, with the predictions of the head before and after CCVR."""
    if run.method != "ccvr":
        raise Unavailable("only a calibrated run has predictions before and after", "fedapp run --method ccvr ...")
    x, y = probe(run, points)
    trained, repaired = global_model(run, calibrated=False), global_model(run)
    z = represent(run, trained, x)
    inputs = inputs_of(run)
    before, after = (batched(m, x, inputs).argmax(1).numpy().astype(np.int64) for m in (trained, repaired))
    return Repair(embed(z, run.seed), y, before, after)


@dataclass(frozen=True, eq=False)
class Calibration:
    """The effect of CCVR's calibration on a run's global model, computed after the run.

    Attributes
    ----------
    accuracy : by M_c, virtual samples per class; 0 is the head as it was trained.
    oracle : by real representations per class; 0 is all of them (CCVR, Fig. 4 and 6).
    separability : mean sliced Wasserstein distance over pairs of classes (CCVR, Fig. 6).
    images : training images that the statistics are of.

    All accuracies are on the central test set (or on all clients' test splits).
    """

    accuracy: dict[int, float]
    oracle: dict[int, float]
    separability: float
    images: int


def calibration_sweep(
    run: RunResult, samples: Sequence[int] = (0, 50, 100, 500, 1000, 2000), real: Sequence[int] = ()
) -> Calibration:
    """Calibrate the head of a run's global model with several M_c (CCVR, Fig. 7 and 14); nothing is written.

    The statistics are those that the clients would send, computed here from their training splits (from at most
    `CALIBRATION_IMAGES`); settings are those of the run where its method is CCVR, else CCVR's defaults.

    Parameters
    ----------
    samples : values of M_c; those that would make more than `VIRTUAL_SAMPLES` in all are left out.
    real : numbers of real representations per class to calibrate on as well, 0 = all.

    Raises
    ------
    Unavailable : no global model, no test images, or a run that calibrates nothing.
    """
    settings = method_of(run)[1]
    settings = settings if isinstance(settings, CCVRHParams) else CCVRHParams()
    if settings.epochs == 0:
        raise Unavailable("epochs=0 calibrates nothing", "fedapp run --method ccvr ... (without epochs=0)")
    w = global_arrays(run, calibrated=False)
    model = global_model(run, calibrated=False)
    z, y, sent, test_z, test_y = _inputs_of_the_head(run, model, settings.min_count)
    classes = data_of(run).dataset.num_classes
    fitted = heads.tukey(z) if settings.transform == "feature" else z
    pooled = gaussian.moments(fitted[sent], y[sent], classes, gaussian.form_of(settings.cov))

    def score(head: Mapping[str, Any], calibrated: int) -> float:
        inputs = torch.from_numpy(heads.tukey(test_z) if settings.before_head(calibrated) else test_z)
        weight, bias = (torch.from_numpy(np.asarray(head[f"head.{n}"], np.float32)) for n in ("weight", "bias"))
        predicted = heads.logits(inputs, weight, bias, settings.clsnorm).argmax(dim=1).numpy()
        return float((predicted == test_y).mean())

    accuracy: dict[int, float] = {}
    for m in samples:
        if m * classes <= VIRTUAL_SAMPLES:
            order = functools.partial(sampling.rng, run.seed, "ccvr-order")
            drawn = settings.model_copy(update={"samples": max(1, m)})
            head, label, _ = on_virtual(w, pooled, drawn, run.seed, order) if m else (w, (), {})
            accuracy[m] = score(head, len(label))
    oracle: dict[int, float] = {}
    seen = heads.tukey(z) if settings.transforms_input else z
    for m in real:
        rng = sampling.rng(run.seed, "ccvr-oracle")
        rows = np.concatenate([rng.permutation(np.flatnonzero(y == c))[: m or None] for c in np.unique(y)])
        order = functools.partial(sampling.rng, run.seed, "ccvr-oracle-order")
        oracle[m] = score(retrain(w, seen[rows], y[rows], settings, order), len(rows))
    distance = separability(pooled, run.seed) if pooled.classes.size > 1 else float("nan")
    return Calibration(accuracy, oracle, distance, int(sent.sum()))


def separability(statistics: ClassMoments, seed: int, directions: int = 500) -> float:
    """Return the mean sliced Wasserstein-2 distance over all pairs of classes (Section 4, Figure 6).

    Along a unit vector t, two Gaussians are normal and have the squared distance ``(t.mu - t.mu')^2 + (s - s')^2``
    with ``s^2 = t^T Sigma t``; the sliced distance is the root of its mean over directions.

    Parameters
    ----------
    statistics : pooled, of at least two classes.
    seed : of the random directions, which are the same for all pairs.   directions : their number.
    """
    classes = statistics.classes
    if classes.size < 2:
        raise ValueError(f"separability needs at least two classes, got {classes.size}")
    unit = np.random.default_rng([seed, virtual.STREAM]).standard_normal((directions, statistics.width))
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    middles = statistics.means[classes] @ unit.T
    variances = [
        unit**2 @ cov if cov.ndim == 1 else np.einsum("ld,ld->l", unit @ cov, unit)
        for cov in map(statistics.cov, classes)
    ]
    spreads = np.sqrt(np.maximum(variances, 0.0))
    distances = [
        np.sqrt(((middles[i] - middles[j]) ** 2 + (spreads[i] - spreads[j]) ** 2).mean())
        for i, j in itertools.combinations(range(classes.size), 2)
    ]
    return float(np.mean(distances))


def _inputs_of_the_head(
    run: RunResult, model: SplitModel, min_count: int
) -> tuple[NDArray[np.float32], Ints, NDArray[np.bool_], NDArray[np.float32], Ints]:
    """Return what the head sees of images.

    Returns
    -------
    z, y : of the clients' training images, (n, d), and their labels, (n,).
    sent : (n,) whether the image's class has `min_count` images at its client, and so is part of the statistics.
    test_z, test_y : of the test images, (m, d) and (m,).
    """
    data, _ = data_of(run), inputs_of(run)
    tests = data.central(torch.device("cpu"))
    if tests is None:
        images, labels = data.dataset.take(np.sort(np.concatenate([c.test for c in data.partition.clients])))
        tests = torch.from_numpy(images), torch.from_numpy(labels)
    if not len(tests[1]):
        raise Unavailable("there are no test images")
    many = np.zeros(len(data.dataset.pool_labels), dtype=np.bool_)
    for client in data.partition.clients:
        labels = data.dataset.pool_labels[client.train]
        many[client.train] = np.bincount(labels, minlength=data.dataset.num_classes)[labels] >= min_count
    indices = np.sort(np.concatenate([c.train for c in data.partition.clients]))
    if len(indices) > CALIBRATION_IMAGES:
        indices = np.sort(sampling.rng(run.seed, "report").choice(indices, CALIBRATION_IMAGES, replace=False))
    images, labels = data.dataset.take(indices)

    def seen(x: Tensor) -> NDArray[np.float32]:
        rows: NDArray[np.float32] = batched(lambda b: model.head_input(model.represent(b)), x, inputs_of(run)).numpy()
        return rows

    y, test_y = (np.asarray(v, dtype=np.int64) for v in (labels, tests[1]))
    return seen(torch.from_numpy(images)), y, many[indices], seen(tests[0]), test_y
