"""CCVR's figures, from a run directory and without training again; `inversion.py` recovers the images of Figs. 8 and 9.

Where runs differ in a setting, the name of a run says it, so that two settings of one method stand side by side.

| symbol (paper) | here                                               |
|----------------|----------------------------------------------------|
| z = f(x)       | `represent`, what the head sees                    |
| M_c            | virtual samples per class in `calibration_sweep`   |
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from clients.ccvr import CCVRHParams
from fedapp import sampling
from fedapp.core import gaussian, heads, virtual
from fedapp.core.gaussian import ClassMoments
from fedapp.learning.evaluation import batched
from fedapp.models import SplitModel
from fedapp.registry import method_title
from fedapp.results import analysis
from fedapp.results.analysis import Unavailable, config_of, method_of
from fedapp.results.figures.pieces import Array, Curve
from fedapp.results.figures.plots import sweep
from fedapp.results.figures.scores import mean_curve
from fedapp.results.figures.words import Runs, Words, each, made, percent, setting_text
from fedapp.results.runs import RunResult
from fedapp.results.statistics import Floats, Ints, mean_and_std, within_rows
from reproduction.figures import inversion, maps, plots
from reproduction.figures.heads import head_norm_history
from reproduction.figures.inversion import DRAWN, Attack
from reproduction.figures.models import (
    client_models,
    data_of,
    global_arrays,
    global_model,
    head_inputs,
    initial_arrays,
    inputs_of,
    probe,
    represent,
)
from reproduction.figures.representations import embed
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

    def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
        kept.append(output.detach().float().flatten(1))

    handle = layers_of(model)[layer].register_forward_hook(keep)
    try:
        batched(model, x, inputs_of(run))
    finally:
        handle.remove()
    rows: NDArray[np.float32] = torch.cat(kept).numpy()
    return rows


def _unit_gram(rows: NDArray[np.float32]) -> Floats:
    """Centred (n, n) Gram matrix of (n, d) rows divided by its Frobenius norm; NaN where the rows do not vary."""
    centred = rows.astype(np.float64) - rows.mean(axis=0, dtype=np.float64)
    gram = centred @ centred.T
    with np.errstate(invalid="ignore", divide="ignore"):
        unit: Floats = gram / np.linalg.norm(gram)
    return unit


def layer_cka(run: RunResult, images: int) -> tuple[list[int], dict[str, Floats]]:
    """Linear CKA between the trained models of the first ten clients, layer by layer (CCVR, Fig. 1 and 2).

    Parameters
    ----------
    images : test images on which the layers are compared (paper: 10,000 or more). Time and memory grow with the
        square; memory is a matrix of `images` x `images` numbers a client, since layers are compared one by one.

    Returns
    -------
    Client ids, and {layer: (K, K)} in forward order. Inner layers are compared between equal architectures only (NaN
    elsewhere); `features` (the end of the body) and `head` (the logits) between all.
    """
    config, models = config_of(run), client_models(run, 10)
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


def norms_of(run: RunResult) -> tuple[list[int], dict[str, Floats]]:
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


def calibration_embedding(run: RunResult, points: int = 1000) -> tuple[Floats, dict[str, Ints]]:
    """Embed test images by the global trunk, (n, 2), with their true classes and both heads' predictions, (n,)."""
    if run.method != "ccvr":
        raise Unavailable("only a calibrated run has predictions before and after", "fedapp run --method ccvr ...")
    x, y = probe(run, points)
    trained, repaired = global_model(run, calibrated=False), global_model(run)
    z = represent(run, trained, x)
    inputs = inputs_of(run)
    before, after = (batched(m, x, inputs).argmax(1).numpy().astype(np.int64) for m in (trained, repaired))
    return embed(z, run.seed), {"truth": y, "before": before, "after": after}


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
    distance = class_distance(pooled, run.seed) if pooled.classes.size > 1 else float("nan")
    return Calibration(accuracy, oracle, distance, int(sent.sum()))


def class_distance(statistics: ClassMoments, seed: int, directions: int = 500) -> float:
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
    seen = functools.partial(head_inputs, model, inputs=inputs_of(run))
    y, test_y = (np.asarray(v, dtype=np.int64) for v in (labels, tests[1]))
    return seen(torch.from_numpy(images)), y, many[indices], seen(tests[0]), test_y


CKA_IMAGES = 1000
"""Test images on which layers are compared."""
SAMPLES = 100
"""Virtual samples per class in the figure of separability."""
CLASSES = 10
"""Classes of which recovered images are shown, at most."""


def by_name(runs: Runs) -> dict[str, RunResult]:
    """Return the first seed's run of every method and setting by a name that tells them apart."""
    found: dict[str, RunResult] = {}
    for run in runs:
        name = ", ".join(filter(None, (run.label, setting_text(run.setting))))
        if name not in found or run.seed < found[name].seed:
            found[name] = run
    return found


def _side_by_side(runs: Runs) -> list[RunResult]:
    """Return the first seed's run of every method and setting, labelled with both."""
    return [replace(run, label=name) for name, run in by_name(runs).items()]


# ---- layers ----------------------------------------------------------------------------------------------------------


def cka(runs: Runs) -> Words:
    """Similarity of clients by layer, one line per run (Figs. 2 and 11)."""
    found = each(_side_by_side(runs), partial(layer_cka, images=CKA_IMAGES))
    maps_of = {name: by_layer for name, (_, by_layer) in found.items()}
    said, clients = _mean_cka(maps_of), len(next(iter(found.values()))[0])
    return (
        f"Linear centred kernel alignment between the trained models of {clients} clients on the same test images, "
        "layer by layer; small dots: pairs of clients, large marks: their mean. Low at the head means that clients "
        "disagree there most.",
        f"Mean CKA between clients: {said}.",
        plots.cka(maps_of),
    )


def _mean_cka(runs: Mapping[str, Mapping[str, Array]]) -> str:
    return "; ".join(
        f"{n}: " + ", ".join(f"{layer} {mean_of_pairs(m):.2f}" for layer, m in by_layer.items())
        for n, by_layer in runs.items()
    )


def cka_maps(runs: Runs) -> Words:
    """Similarity of every pair of clients at the first, the middle and the last layer, one row per run (Fig. 1)."""
    found = each(_side_by_side(runs), partial(layer_cka, images=CKA_IMAGES))
    rows = {}
    for name, (_, by_layer) in found.items():
        layers = list(by_layer)
        rows[name] = {layer: by_layer[layer] for layer in (layers[0], layers[(len(layers) - 1) // 2], layers[-1])}
    said, clients = _mean_cka(rows), next(iter(found.values()))[0]
    return (
        "Linear centred kernel alignment of every pair of clients' trained models on the same test images: the first "
        f"layer, the middle one, and the classifier. Mean over pairs: {said}.",
        f"Heat maps of CKA between {len(clients)} clients. Mean over pairs: {said}.",
        maps.heat_grid(rows, "client", "client", clients, high=1.0),
    )


# ---- norms of the head's rows ----------------------------------------------------------------------------------------


def norms_by_round(runs: Runs) -> Words:
    """Labels, and the norms of the clients' heads before training and by round, one row per run (Figs. 3 and 12)."""

    def panels(run: RunResult) -> dict[str, Array]:
        clients, norms = norms_of(run)
        return {"training images": analysis.counts_of(run)[clients].astype(float), **norms}

    rows = each(_side_by_side(runs), panels)

    def bias(row: dict[str, Array]) -> str:
        counts, _, *rounds = row.values()
        return " and ".join(f"{within_rows(counts, norms):.2f}" for norms in rounds)

    said = "; ".join(f"{n}: {bias(row)}" for n, row in rows.items())
    return (
        "Training images by client and class, and the L2 norm of each class's row in the client's head: the head that "
        "all start from, then after local training in round 1 and in the last round. Correlation of images and norms "
        f"within clients, in round 1 and at the end: {said}.",
        f"Heat maps of training images and of norms by round. Correlation within clients: {said}.",
        maps.heat_grid(rows, "class", "client", runs[0].classes, own=("training images",)),
    )


def norms_before_after(runs: Runs) -> Words:
    """Norms of the head's rows before and after calibration, one panel per run (Fig. 10)."""

    def norms(run: RunResult) -> tuple[Array, Array]:
        if run.method != "ccvr":
            raise Unavailable("only a calibrated run has a head before and after", "fedapp run --method ccvr ...")
        heads = [global_arrays(run, calibrated)["head.weight"].astype(float) for calibrated in (False, True)]
        before, after = (np.linalg.norm(head, axis=1) for head in heads)
        return before, after

    panels = each(_side_by_side(runs), norms)
    said = "; ".join(
        f"{n}: {_ratio(before)} as trained, {_ratio(after)} calibrated" for n, (before, after) in panels.items()
    )
    if len(panels) == 1:
        said = said.partition(": ")[2]
        panels = {"": next(iter(panels.values()))}
    return (
        f"L2 norm of each class's row of the global head. Largest over smallest: {said}.",
        f"Dot chart of head row norms; largest over smallest, {said}.",
        plots.norms_before_after(panels, runs[0].classes),
    )


def _ratio(norms: Array) -> str:
    return f"{norms.max() / norms.min():.2f}" if norms.min() > 0 else "none, a row is zero"


# ---- how much to calibrate with --------------------------------------------------------------------------------------


def samples_sweep(runs: Runs) -> Words:
    """Accuracy by virtual samples per class (Figs. 7 and 14); runs that train the same model count once."""
    found = _calibrated(runs, (0, 50, 100, 500, 1000, 2000), ())
    axis = "virtual samples per class, M_c (0 = as trained)"
    panels, said = _panels([(run, c.accuracy) for run, c in found], "{m}")
    images = found[0][1].images
    return (
        f"Calibration computed from the runs' global models and class statistics of {images:,} training images, after "
        "the run; dotted: the head as trained.",
        f"Line chart of accuracy against virtual samples per class. {said}.",
        sweep(panels, axis, "accuracy of the global model", start=True),
    )


def real_sweep(runs: Runs) -> Words:
    """Accuracy by real representations per class (Fig. 4)."""
    found = _calibrated(runs, (0,), (100, 1000, 0))
    points = []
    for run, c in found:
        whole = c.images // max(1, len(run.classes))
        amounts = {m: a for m, a in c.oracle.items() if 0 < m < whole} | {whole: c.oracle[0]}
        points.append((run, {0: c.accuracy[0], **amounts}))
    panels, said = _panels(points, "{m} images")
    return (
        "Calibration on real representations, computed after the run: an upper bound, since it would need the clients' "
        "features. 0: the head as trained; the last mark is all training images, whose number per class is a mean.",
        f"Line chart of accuracy against real representations per class. {said}.",
        sweep(panels, "real representations per class", "accuracy of the global model", start=True),
    )


def _calibrated(runs: Runs, samples: Sequence[int], real: Sequence[int]) -> list[tuple[RunResult, Calibration]]:
    """Calibrate each run that has a global model; of runs that train the same model, only the first."""

    def key(run: RunResult) -> tuple[object, ...]:
        return _trained_by(run), setting_text(run.setting), run.seed

    found: dict[tuple[object, ...], tuple[RunResult, Calibration]] = {}
    new = (run for run in runs if key(run) not in found)  # asked when the runs before have been calibrated
    for run, result in made(new, partial(calibration_sweep, samples=samples, real=real)):
        found[key(run)] = run, result
    return list(found.values())


def _trained_by(run: RunResult) -> str:
    """Name what trained the run's global model: a method's own label, for CCVR that of its base."""
    if run.method != "ccvr":
        return run.label
    args = str(run.flat.get("method-args", "")).split()
    base = next((a.partition("=")[2] for a in args if a.startswith("base=")), "fedavg")
    # All other arguments say how the head is calibrated afterwards.
    rest = " ".join(a.removeprefix("base.") for a in args if a.startswith(("base.", "clsnorm=", "clsprox=")))
    if run.label.startswith(method_title("ccvr")):  # a page shows titles
        return f"{method_title(base)} ({rest})" if rest else method_title(base)
    return f"{base}({rest})" if rest else base


def _panels(points: Sequence[tuple[RunResult, dict[int, float]]], amount: str) -> tuple[dict[str, list[Curve]], str]:
    """Return curves over seeds by setting, and the numbers in words."""
    rows = [(setting_text(run.setting), _trained_by(run), m, a) for run, values in points for m, a in values.items()]
    table = pd.DataFrame(rows, columns=["setting", "label", "m", "accuracy"])
    panels: dict[str, list[Curve]] = {}
    said = []
    for (setting, label), group in table.groupby(["setting", "label"], sort=False):
        curve = mean_curve(str(label), group[["m", "accuracy"]])
        panels.setdefault(str(setting), []).append(curve)
        listed = [f"{percent(a)} with {amount.format(m=f'{m:g}')}" for m, a in zip(curve.x[1:], curve.mean[1:])]
        name = ", ".join(filter(None, (str(label), str(setting))))
        said.append(f"{name}: {percent(curve.mean[0])} as trained, " + ", ".join(listed))
    return panels, "; ".join(said)


def separability(runs: Runs) -> Words:
    """Accuracy before and after calibration, and its upper bound, against the separability of the classes (Fig. 6)."""
    found = _calibrated(runs, (0, SAMPLES), (0,))
    if len(found) < 2:
        raise Unavailable(
            "it needs two runs with one global model, there is 1",
            "fedapp compare --methods fedavg,fedprox,moon,ccvr --seeds 3 ...",
        )
    table = pd.DataFrame(
        [(_trained_by(run), c.separability, c.accuracy[0], c.accuracy[SAMPLES], c.oracle[0]) for run, c in found],
        columns=["label", "distance", "before", "after", "bound"],
    )
    groups = {
        str(n): {c: t[c].to_numpy() for c in ("distance", "before", "after", "bound")}
        for n, t in table.groupby("label", sort=False)
    }
    said = "; ".join(
        f"{n}: distance {v['distance'].mean():.2f}, {percent(float(v['before'].mean()))} as trained, "
        f"{percent(float(v['after'].mean()))} calibrated, at most {percent(float(v['bound'].mean()))}"
        for n, v in groups.items()
    )
    trend = table["distance"].corr(table["bound"])
    bound = f" Correlation of distance and upper bound over the runs: {trend:.2f}." if math.isfinite(trend) else ""
    return (
        "One mark per run: mean sliced Wasserstein distance between the classes' Gaussians in the global "
        f"representation, and the accuracy of the global model as trained (dot), calibrated with {SAMPLES} "
        f"virtual samples per class, and calibrated on all real features, which is the upper bound; "
        f"computed after the fact.{bound}",
        f"Scatter plot of accuracy against separability. {said}.",
        plots.separability(groups),
    )


# ---- predictions and labels ------------------------------------------------------------------------------------------


def calibration_map(runs: Runs) -> Words:
    """Predictions before and after calibration on one embedding, one row per run (Figs. 5 and 13)."""
    found = each(_side_by_side(runs), calibration_embedding)
    said = "; ".join(
        (f"{n}: " if len(found) > 1 else "")
        + " before, ".join(percent(float((of[name] != of["truth"]).mean())) for name in ("before", "after"))
        + " after"
        for n, (_, of) in found.items()
    )
    rows = {
        n if len(found) > 1 else "": (points, {"truth": of["truth"], **changed(of["before"], of["after"])})
        for n, (points, of) in found.items()
    }
    return (
        "t-SNE of the global trunk's representations of test images, drawn as the number of the true class, and where "
        "calibration changes the head's answer, as that of the class before and after; all others are grey. "
        f"Wrong: {said}.",
        f"Scatter plots of test images by truth and by prediction. Wrong: {said} calibration.",
        plots.embedding(rows),
    )


def changed(before: Array, after: Array) -> dict[str, Array]:
    """Return the predictions that differ, by panel; -1 stands for one that stays as it is."""
    same = before == after
    return {"before": np.where(same, -1, before), "after": np.where(same, -1, after)}


def label_maps(runs: Runs) -> Words:
    """Training images by client and class, one panel per run (Fig. 15)."""
    found = each(_side_by_side(runs), lambda run: analysis.counts_of(run).astype(float))
    # Methods that share a partition would show it again.
    panels = {
        n: c
        for i, (n, c) in enumerate(found.items())
        if not any(np.array_equal(c, o) for o in list(found.values())[:i])
    }
    held = "; ".join(
        f"{n}: {(c > 0).sum(axis=1).min()} to {(c > 0).sum(axis=1).max()} classes a client" for n, c in panels.items()
    )
    return (
        "Training images by client and class; a panel for each partition among the runs.",
        f"Heat maps of training images. {held}.",
        maps.heat_grid({"": panels}, "class", "client", runs[0].classes),
    )


# ---- what the statistics reveal --------------------------------------------------------------------------------------


def inverted(runs: Runs, counts: Sequence[int]) -> Words:
    """Images recovered from features: from each one (Fig. 8), or from their means and virtual ones (Fig. 9)."""
    run = runs[0]
    attacks, classifier = inversion.measure(run, counts)
    names = {n: {1: "one feature", DRAWN: "virtual feature"}.get(n, f"mean of {n}") for n in counts}
    said = "; ".join(f"{names[n]}: {_findings(a)}" for n, a in attacks.items())
    label = next(iter(attacks.values())).label[:CLASSES]
    blocks = {names[n]: (a.secret[:CLASSES], a.recovered[:CLASSES]) for n, a in attacks.items()}
    return (
        "Real training images, and images whose representation under the global model is made close to what was sent, "
        "with a total variation prior. Similarity is the correlation with the most similar of the real images; in "
        "brackets, that of the class's mean image, which the label alone gives. Identified: the most similar training "
        "image of the class is one of the real ones; in brackets, by chance. Recognised: an independent classifier, "
        f"which is right on {percent(classifier)} of the real images, sees the class. {said}.",
        f"Real and recovered images of {len(label)} classes. {said}.",
        maps.recovered(blocks, [run.classes[c] for c in label]),
    )


def _findings(attack: Attack) -> str:
    found = f"similarity {attack.similarity:.2f} ({attack.by_class:.2f})"
    if attack.images != DRAWN:
        found += f", identified {percent(attack.identified)} ({percent(attack.chance)})"
    return f"{found}, recognised {percent(attack.recognised)}"
