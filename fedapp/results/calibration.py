"""What CCVR's figures compute from a run directory without training again.

| symbol (paper)        | here                                                                |
|-----------------------|---------------------------------------------------------------------|
| z = f(x)              | `represent`, what the head sees                                     |
| M_c                   | virtual samples per class in `calibration_sweep`                    |
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedapp.learning.evaluation import batched
from fedapp.models import SplitModel
from fedapp.results.analysis import (
    Unavailable,
    client_models,
    config_of,
    data_of,
    global_arrays,
    global_model,
    method_of,
    probe,
    represent,
)
from fedapp.results.representations import embed
from fedapp.results.runs import RunResult
from fedapp.results.statistics import Floats, Ints, mean_and_std

CALIBRATION_IMAGES = 20_000
"""Training images from which class statistics are computed at most."""


# ---- layers ----------------------------------------------------------------------------------------------------------


def stages(run: RunResult, model: SplitModel, x: Tensor) -> dict[str, NDArray[np.float32]]:
    """Return the output of every layer with parameters for images, in forward order: {name: (n, d)}, `head` last."""
    layers = [(n, m) for n, m in model.features.named_children() if any(True for _ in m.parameters())]
    kept: dict[str, list[Tensor]] = {}
    with contextlib.ExitStack() as hooks:
        for name, layer in [*layers, ("head", model.head)]:
            keep = functools.partial(_keep_output, kept.setdefault(name, []))
            hooks.enter_context(layer.register_forward_hook(keep))
        batched(model, x, data_of(run).inputs)
    return {name: torch.cat(parts).numpy() for name, parts in kept.items() if parts}


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

    Returns
    -------
    Client ids, and {layer: (K, K)} in forward order. Inner layers are compared between equal architectures only (NaN
    elsewhere); `features` (the end of the trunk) and `head` (the logits) between all.
    """
    config, models = config_of(run), client_models(run, clients)
    if len(models) < 2:
        raise Unavailable("it compares clients, and there are fewer than two")
    x, _ = probe(run, images)
    grams: dict[str, dict[int, Floats]] = {}
    for client, model in models.items():
        outputs = stages(run, model, x)
        *inner, head = outputs
        prefix = f"{config.model_of(client)} " if len(config.model_names) > 1 else ""
        names = {**{n: prefix + n for n in inner[:-1]}, **dict.fromkeys(inner[-1:], "features"), head: "head"}
        for name, rows in outputs.items():
            grams.setdefault(names[name], {})[client] = _unit_gram(rows)
    ends = ("features", "head")
    ordered = {name: grams[name] for name in (*(n for n in grams if n not in ends), *ends) if name in grams}
    return list(models), {
        name: np.array([[(of[a] * of[b]).sum() if a in of and b in of else np.nan for b in models] for a in models])
        for name, of in ordered.items()
    }


def mean_of_pairs(matrix: Floats) -> float:
    """Return the mean over all pairs of different clients, NaN skipped; NaN without pairs."""
    return mean_and_std(matrix[np.triu_indices(len(matrix), 1)])[0]


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
    inputs = data_of(run).inputs
    before, after = (batched(m, x, inputs).argmax(1).numpy().astype(np.int64) for m in (trained, repaired))
    return Repair(embed(z, run.seed), y, before, after)


@dataclass(frozen=True, eq=False)
class Calibration:
    """The effect of CCVR's calibration on a run's global model, computed after the run.

    Attributes
    ----------
    samples : M_c, virtual samples per class; the first is 0, the head as it was trained.
    accuracy : on the central test set (or on all clients' test splits), same length.
    separability : mean sliced Wasserstein distance over pairs of classes (CCVR, Fig. 6).
    images : training images that the statistics are of.
    """

    samples: list[int]
    accuracy: list[float]
    separability: float
    images: int


def calibration_sweep(run: RunResult, samples: Sequence[int] = (0, 10, 50, 100, 500, 1000, 2000)) -> Calibration:
    """Calibrate the head of a run's global model with several M_c (CCVR, Fig. 7); nothing is written.

    The statistics are those that the clients would send, computed here from their training splits (from at most
    `CALIBRATION_IMAGES`); settings are those of the run where its method is CCVR, else CCVR's defaults.

    Raises
    ------
    Unavailable : no global model with a linear head, or no test images.
    """
    from clients.ccvr import CCVRHParams
    from fedapp import sampling
    from fedapp.core.gaussian import moments
    from fedapp.core.virtual import separability, virtual_features
    from strategies.ccvr import retrain

    _, hparams = method_of(run)
    settings = hparams if isinstance(hparams, CCVRHParams) else CCVRHParams()
    if settings.transform != "none" or settings.clsnorm or settings.mc_mode != "fixed":
        raise Unavailable("the sweep is drawn for CCVR without transform, clsnorm and mc_mode=proportional")
    arrays = global_arrays(run, calibrated=False)
    if "head.weight" not in arrays or "head.bias" not in arrays:
        raise Unavailable(f"{run.method} leaves no linear head with bias to calibrate")
    data = data_of(run)
    model = global_model(run, calibrated=False)
    if type(model.head) is not nn.Linear:
        raise Unavailable(f"{run.method} leaves no plain linear head to calibrate")
    tests = data.central(torch.device("cpu"))
    if tests is None:
        images, labels = data.dataset.take(np.sort(np.concatenate([c.test for c in data.partition.clients])))
        tests = torch.from_numpy(images), torch.from_numpy(labels)
    indices = np.sort(np.concatenate([c.train for c in data.partition.clients]))
    if len(indices) > CALIBRATION_IMAGES:
        indices = np.sort(sampling.rng(run.seed, "report").choice(indices, CALIBRATION_IMAGES, replace=False))
    x, y = data.dataset.take(indices)
    z = represent(run, model, torch.from_numpy(x))
    classes = data.dataset.num_classes
    pooled = moments(z, np.asarray(y, dtype=np.int64), classes)
    test_z, test_y = represent(run, model, tests[0]), tests[1].numpy()

    head = {n: np.asarray(arrays[n]) for n in ("head.weight", "head.bias")}
    kept = [m for m in samples if m * classes <= 50_000]
    accuracy = []
    for m in kept:
        after: Mapping[str, Any] = head
        if m:
            virtual, label, _ = virtual_features(pooled, np.where(pooled.counts > 0, m, 0), run.seed, settings.shrink)
            after = retrain(head, virtual, label, settings, lambda epoch: sampling.rng(run.seed, "ccvr-order", epoch))
        logits = test_z @ np.asarray(after["head.weight"]).T + np.asarray(after["head.bias"])
        accuracy.append(float((logits.argmax(axis=1) == test_y).mean()))
    return Calibration(
        samples=kept,
        accuracy=accuracy,
        separability=separability(pooled, run.seed) if pooled.classes.size > 1 else float("nan"),
        images=len(indices),
    )
