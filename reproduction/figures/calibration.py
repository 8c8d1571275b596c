"""CCVR's figures; `reproduction/analysis/calibration.py` and `inversion.py` compute them.

Where runs differ in a setting, the name of a run says it, so that two settings of one method stand side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd

from fedapp.results import analysis
from fedapp.results.analysis import Unavailable
from fedapp.results.figures.pieces import Array, Curve
from fedapp.results.figures.plots import sweep
from fedapp.results.figures.scores import mean_curve
from fedapp.results.figures.words import Runs, Words, each, made, method_title, percent, setting_text
from fedapp.results.runs import RunResult
from fedapp.results.statistics import within_rows
from reproduction.analysis import calibration, inversion
from reproduction.analysis.calibration import Calibration
from reproduction.analysis.inversion import DRAWN, Attack
from reproduction.analysis.models import global_arrays
from reproduction.figures import maps, plots

CKA_IMAGES = 1000
"""Test images of the paper's figures of CKA; the report, which draws many figures, takes fewer."""
CLASSES = 10
"""Classes of which recovered images are shown, at most."""


def by_name(runs: Runs) -> dict[str, RunResult]:
    """Return the first seed's run of every method and setting by a name that tells them apart."""
    found: dict[str, RunResult] = {}
    for run in sorted(runs, key=lambda r: r.seed):
        found.setdefault(full_name(run), run)
    return {name: found[name] for name in dict.fromkeys(map(full_name, runs))}


def full_name(run: RunResult) -> str:
    """Write a run's method with its own values, and its setting where runs differ in one."""
    return ", ".join(filter(None, (run.label, setting_text(run.setting))))


def _side_by_side(runs: Runs) -> list[RunResult]:
    """Return the first seed's run of every method and setting, labelled with both."""
    return [replace(run, label=name) for name, run in by_name(runs).items()]


# ---- layers ----------------------------------------------------------------------------------------------------------


def cka(runs: Runs, images: int = 300) -> Words:
    """Similarity of clients by layer, one line per run (Figs. 2 and 11)."""
    found = each(_side_by_side(runs), partial(calibration.layer_cka, images=images))
    said = "; ".join(
        f"{n}: " + ", ".join(f"{layer} {calibration.mean_of_pairs(m):.2f}" for layer, m in by_layer.items())
        for n, (_, by_layer) in found.items()
    )
    clients = len(next(iter(found.values()))[0])
    return (
        f"Linear centred kernel alignment between the trained models of {clients} clients on the same test images, "
        "layer by layer; small dots: pairs of clients, large marks: their mean. Low at the head means that clients "
        "disagree there most.",
        f"Mean CKA between clients: {said}.",
        plots.cka({n: by_layer for n, (_, by_layer) in found.items()}),
    )


def cka_maps(runs: Runs) -> Words:
    """Similarity of every pair of clients at the first, the middle and the last layer, one row per run (Fig. 1)."""
    found = each(_side_by_side(runs), partial(calibration.layer_cka, images=CKA_IMAGES))
    rows = {}
    for name, (_, by_layer) in found.items():
        layers = list(by_layer)
        rows[name] = {layer: by_layer[layer] for layer in (layers[0], layers[(len(layers) - 1) // 2], layers[-1])}
    said = "; ".join(
        f"{n}: " + ", ".join(f"{layer} {calibration.mean_of_pairs(m):.2f}" for layer, m in by_layer.items())
        for n, by_layer in rows.items()
    )
    clients = next(iter(found.values()))[0]
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
        clients, norms = calibration.norms_by_round(run)
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
        maps.heat_grid(rows, "class", "client", runs[0].classes),
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
    for run, result in made(new, partial(calibration.calibration_sweep, samples=samples, real=real)):
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


def separability(runs: Runs, samples: int = 100) -> Words:
    """Accuracy before and after calibration, and its upper bound, against the separability of the classes (Fig. 6)."""
    found = _calibrated(runs, (0, samples), (0,))
    if len(found) < 2:
        raise Unavailable(
            "it needs two runs with one global model, there is 1",
            "fedapp compare --methods fedavg,fedprox,moon,ccvr --seeds 3 ...",
        )
    table = pd.DataFrame(
        [(_trained_by(run), c.separability, c.accuracy[0], c.accuracy[samples], c.oracle[0]) for run, c in found],
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
        f"representation, and the accuracy of the global model as trained (dot), calibrated with {samples} "
        f"virtual samples per class, and calibrated on all real features, which is the upper bound; "
        f"computed after the fact.{bound}",
        f"Scatter plot of accuracy against separability. {said}.",
        plots.separability(groups),
    )


# ---- predictions and labels ------------------------------------------------------------------------------------------


def calibration_map(runs: Runs, points: int = 1000) -> Words:
    """Predictions before and after calibration on one embedding, one row per run (Figs. 5 and 13)."""
    found = each(_side_by_side(runs), partial(calibration.calibration_embedding, points=points))
    said = "; ".join(
        (f"{n}: " if len(found) > 1 else "")
        + " before, ".join(percent(float((p != e.label).mean())) for p in (e.before, e.after))
        + " after"
        for n, e in found.items()
    )
    rows = {
        n if len(found) > 1 else "": (e.points, {"truth": e.label, "before": e.before, "after": e.after})
        for n, e in found.items()
    }
    return (
        "t-SNE of the global trunk's representations of test images, drawn as the number of the true class and of the "
        f"class that the head answers. Wrong: {said}.",
        f"Scatter plots of test images by truth and by prediction. Wrong: {said} calibration.",
        plots.embedding(rows),
    )


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


def inversion_of_features(runs: Runs) -> Words:
    """Images recovered from single features (Fig. 8)."""
    return _inverted(runs, (1,))


def inversion_of_means(runs: Runs) -> Words:
    """Images recovered from means of 3 and of 10 features, and from virtual representations (Fig. 9)."""
    return _inverted(runs, (3, 10, DRAWN))


def _inverted(runs: Runs, counts: Sequence[int]) -> Words:
    run = runs[0]
    leak = inversion.measure(run, counts)
    names = {n: _source(n) for n in counts}
    said = "; ".join(f"{names[n]}: {_findings(a)}" for n, a in leak.attacks.items())
    label = next(iter(leak.attacks.values())).label[:CLASSES]
    blocks = {names[n]: (a.secret[:CLASSES], a.recovered[:CLASSES]) for n, a in leak.attacks.items()}
    return (
        "Real training images, and images whose representation under the global model is made close to what was sent, "
        "with a total variation prior. Similarity is the correlation with the most similar of the real images; in "
        "brackets, that of the class's mean image, which the label alone gives. Identified: the most similar training "
        "image of the class is one of the real ones; in brackets, by chance. Recognised: an independent classifier, "
        f"which is right on {percent(leak.classifier)} of the real images, sees the class. {said}.",
        f"Real and recovered images of {len(label)} classes. {said}.",
        maps.recovered(blocks, [run.classes[c] for c in label]),
    )


def _source(n: int) -> str:
    return {1: "one feature", DRAWN: "virtual feature"}.get(n, f"mean of {n}")


def _findings(attack: Attack) -> str:
    found = f"similarity {attack.similarity:.2f} ({attack.by_class:.2f})"
    if attack.images != DRAWN:
        found += f", identified {percent(attack.identified)} ({percent(attack.chance)})"
    return f"{found}, recognised {percent(attack.recognised)}"
