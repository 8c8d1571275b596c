"""CCVR's figures; what each shows is computed in `fedapp/results/calibration.py`."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from fedapp.results import analysis, calibration
from fedapp.results.analysis import Unavailable
from fedapp.results.figures import plots
from fedapp.results.figures.plots import Curve
from fedapp.results.figures.words import Runs, Words, each, percent


def cka(runs: Runs) -> Words:
    """Similarity of clients by layer (Figs. 1 and 2)."""
    found = each(runs, calibration.layer_cka)
    said = "; ".join(
        f"{n}: " + ", ".join(f"{layer} {calibration.mean_of_pairs(m):.2f}" for layer, m in maps.items())
        for n, (_, maps) in found.items()
    )
    clients = len(next(iter(found.values()))[0])
    return (
        f"Linear centred kernel alignment between the trained models of {clients} clients on the same test images, "
        "layer by layer; small dots: pairs of clients, large marks: their mean. Low at the head means that clients "
        "disagree there most.",
        f"Mean CKA between clients: {said}.",
        plots.cka({n: maps for n, (_, maps) in found.items()}),
    )


def norms_before_after(runs: Runs) -> Words:
    """Norms of the head's rows before and after calibration (Figs. 3 and 10)."""
    run = runs[0]
    if run.method != "ccvr":
        raise Unavailable("only a calibrated run has a head before and after", "fedapp run --method ccvr ...")
    heads = [analysis.global_arrays(run, calibrated)["head.weight"].astype(float) for calibrated in (False, True)]
    before, after = (np.linalg.norm(head, axis=1) for head in heads)
    ratio = [float(n.max() / n.min()) if n.min() > 0 else math.nan for n in (before, after)]
    return (
        f"L2 norm of each class's row of the global head. Largest over smallest: {ratio[0]:.2f} as trained, "
        f"{ratio[1]:.2f} calibrated.",
        f"Dot chart of head row norms; largest over smallest is {ratio[0]:.2f} before and {ratio[1]:.2f} after.",
        plots.norms_before_after(before, after, run.classes),
    )


def samples_sweep(runs: Runs) -> Words:
    """Accuracy by virtual samples per class (Figs. 7 and 14)."""
    found = each(runs, calibration.calibration_sweep)
    said = "; ".join(
        f"{n}: {percent(c.accuracy[0])} as trained, "
        + ", ".join(f"{percent(a)} with {m}" for m, a in c.accuracy.items() if m)
        for n, c in found.items()
    )
    images = next(iter(found.values())).images
    lines = [Curve(n, np.array(list(c.accuracy)), np.array(list(c.accuracy.values()))) for n, c in found.items()]
    axis = "virtual samples per class, M_c (0 = as trained)"
    return (
        f"Calibration computed from this run's global model and class statistics of {images:,} training images, after "
        "the run; dotted: the head as trained.",
        f"Line chart of accuracy against virtual samples per class. {said}.",
        plots.sweep({"": lines}, axis, "accuracy of the global model", start=True),
    )


def calibration_map(runs: Runs) -> Words:
    """Predictions before and after calibration, on one embedding (Figs. 5 and 13)."""
    found = calibration.calibration_embedding(runs[0])
    before, after = (percent(float((p != found.label).mean())) for p in (found.before, found.after))
    return (
        "t-SNE of the global trunk's representations of test images, drawn as the number of the true class and of the "
        f"class that the head answers. Wrong: {before} before, {after} after.",
        f"Scatter plots of test images by truth and by prediction; {before} are wrong before calibration, {after} "
        "after.",
        plots.embedding({"": (found.points, {"truth": found.label, "before": found.before, "after": found.after})}),
    )


def separability(runs: Runs, samples: int = 100) -> Words:
    """Gain of calibration against the separability of the classes (Fig. 6)."""
    points = []
    reasons = []
    for run in runs:
        try:
            found = calibration.calibration_sweep(run, (0, samples))
        except Unavailable as e:
            reasons.append(f" ({e.why})")
        else:
            points.append((run.label, found.separability, 100 * (found.accuracy[samples] - found.accuracy[0])))
    if len(points) < 2:
        raise Unavailable(
            f"it needs two runs with one global model, there is {len(points) or 'none'}{''.join(reasons[:1])}",
            "fedapp compare --methods fedavg,fedprox,moon,ccvr --seeds 3 ...",
        )
    table = pd.DataFrame(points, columns=["label", "distance", "gain"]).groupby("label", sort=False)
    groups = {str(n): (t["distance"].to_numpy(), t["gain"].to_numpy()) for n, t in table}
    said = "; ".join(f"{n}: distance {d.mean():.2f}, gain {g.mean():+.1f} points" for n, (d, g) in groups.items())
    return (
        f"A mark a run: mean sliced Wasserstein distance between the classes' Gaussians in the global representation, "
        f"and what calibrating the head with {samples} virtual samples per class adds, computed after the fact.",
        f"Scatter plot of gain against separability. {said}.",
        plots.separability(groups),
    )
