"""The figures of a run and of a comparison, and why some are left out.

Every figure is a function of a run or of several that returns a `Drawing`, or raises `Unavailable` with the reason and
the command that would make what is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import pandas as pd

from fedapp.core.classwise import norm_distribution
from fedapp.results import analysis
from fedapp.results.analysis import Unavailable
from fedapp.results.figures import plots
from fedapp.results.figures.plots import Array, Curve
from fedapp.results.figures.style import Drawing
from fedapp.results.runs import ONE_SCORE, PROTOCOL_TEXT, Comparison, RunResult, groups_of, uses, varying
from fedapp.results.statistics import mean_and_std, traffic
from fedapp.results.statistics import percent as share

_T = TypeVar("_T")
DETAILED = 3
"""Runs of a comparison whose clients' models are looked at closely (t-SNE, conductance)."""


@dataclass(frozen=True)
class Missing:
    """A figure that is left out: its title, why, and the command that makes what it needs."""

    title: str
    why: str
    command: str = ""


@dataclass
class Gallery:
    """Figures by section, in the order of the page, and those that are left out."""

    sections: dict[str, list[Drawing]] = field(default_factory=dict)
    missing: list[Missing] = field(default_factory=list)

    @property
    def drawings(self) -> list[Drawing]:
        """All figures."""
        return [d for drawings in self.sections.values() for d in drawings]

    def add(self, section: str, title: str, draw: Callable[[], Drawing | Iterable[Drawing]]) -> None:
        """Draw; what cannot be drawn is listed with the reason."""
        try:
            drawn = draw()
            found = [drawn] if isinstance(drawn, Drawing) else list(drawn)
        except Unavailable as e:
            self.missing.append(Missing(title, e.why, e.command))
            return
        except Exception as e:  # one figure must not cost the reader the whole page; the page names the error
            self.missing.append(Missing(title, f"it could not be drawn: {type(e).__name__}: {e}"))
            return
        self.sections.setdefault(section, []).extend(found)


def percent(value: float) -> str:
    """Write a share in percent with its unit."""
    return share(value, unit=" %")


def named(protocol: str) -> str:
    """Write what a protocol means behind its name: the title of a panel, the label of a line."""
    return f"{protocol}, {PROTOCOL_TEXT[protocol]}"


# ---- one run ---------------------------------------------------------------------------------------------------------


def of_run(run: RunResult) -> Gallery:
    """Draw all figures that a run directory holds the data for."""
    gallery = Gallery()
    gallery.add("scores", "Learning curves", lambda: learning_curves(run))
    gallery.add("scores", "Accuracy of every client", lambda: client_accuracy(run))
    gallery.add("data", "Label distribution", lambda: label_distribution(run))
    gallery.add("heads", "Head norms against class counts", lambda: head_maps([run]))
    gallery.add("heads", "Evolution of head norms", lambda: norm_evolution(run))
    gallery.add("heads", "Label shares against norm shares", lambda: p_against_norms([run]))
    gallery.add("heads", "Who learns from whom", lambda: mixing(run))
    gallery.add("representations", "Representations by class and client", lambda: embedding([run]))
    gallery.add("representations", "Similarity of clients by layer", lambda: cka([run]))
    gallery.add("representations", "Units that matter", lambda: conductance([run]))
    gallery.add("calibration", "Head norms before and after calibration", lambda: norms_before_after(run))
    gallery.add("calibration", "Virtual samples per class", lambda: samples_sweep([run]))
    gallery.add("calibration", "Predictions before and after calibration", lambda: calibration_embedding(run))
    gallery.add("cost", "Time of a round", lambda: round_seconds(run))
    return gallery


def _protocol_curves(run: RunResult, what: str) -> list[Curve]:
    """Curves of a run by protocol: `what` is accuracy (bands: standard deviation over clients) or balanced."""
    curves = []
    for p in run.protocols:
        column = f"{p}_{what}"
        if column in run.rounds and run.rounds[column].notna().any():
            shown = run.rounds[run.rounds[column].notna()]
            std = f"{column}_std"
            spread = shown[std].to_numpy(float) if std in shown else None
            curves.append(Curve(named(p), shown["round"].to_numpy(float), shown[column].to_numpy(float), spread))
    return curves


def learning_curves(run: RunResult) -> Drawing:
    """Accuracy by round and protocol, with the balanced score beside it where rounds measured it."""
    if run.rounds.empty or not _protocol_curves(run, "accuracy"):
        raise Unavailable("no round was finished", f"fedapp run --resume {run.out}")
    panels = {"accuracy": _protocol_curves(run, "accuracy")}
    balanced = _protocol_curves(run, "balanced")
    if balanced:
        panels["balanced: mean recall over all classes"] = balanced
    lines = panels["accuracy"]
    ends = "; ".join(
        f"{c.label} from {percent(float(c.mean[0]))} in round {c.x[0]:.0f} to {percent(float(c.mean[-1]))} in round "
        f"{c.x[-1]:.0f}"
        for c in lines
    )
    guess = run.card.get("majority_mean")
    dotted = f" Dotted: guessing each client's majority class, {percent(float(guess))}." if guess is not None else ""
    return Drawing(
        "learning-curves",
        "Learning curves",
        f"Mean over the clients of a round; bands: one standard deviation over clients.{_alone([run])}"
        + (" Balanced scores are on all clients' test images." if balanced else "")
        + dotted,
        f"Line chart of accuracy by round: {ends}.",
        plots.curves(panels, baselines={"accuracy": None if guess is None else float(guess)}),
        "FedClassAvg, Figs. 4 to 7; FedGH, Fig. 2",
    )


def _alone(runs: Iterable[RunResult]) -> str:
    """Say that Standalone has one score, where it is among the runs."""
    return f" {ONE_SCORE}" if any(r.alone for r in runs) else ""


def _final_scores(run: RunResult) -> tuple[list[int], dict[str, Array]]:
    table = run.final
    if table.empty and not run.clients.empty:
        table = run.clients.drop_duplicates("client", keep="last").sort_values("client")
    if table.empty:
        raise Unavailable("no client was scored", f"fedapp run --resume {run.out}")
    scores = {}
    for p in run.protocols:
        if f"{p}_accuracy" in table and table[f"{p}_accuracy"].notna().any():
            scores[named(p)] = table[f"{p}_accuracy"].to_numpy(float)
    if not scores:
        raise Unavailable("neither received nor trained was measured", "--set protocols=received,trained,global")
    return [int(c) for c in table["client"]], scores


def client_accuracy(run: RunResult) -> Drawing:
    """Final accuracy of every client."""
    clients, scores = _final_scores(run)
    majority = None
    if run.card.get("majority"):
        of = [run.card["majority"][c] for c in clients]
        majority = np.array([np.nan if v is None else v for v in of], dtype=float)
    spans = "; ".join(f"{n}: {percent(np.nanmin(v))} to {percent(np.nanmax(v))}" for n, v in scores.items())
    return Drawing(
        "client-accuracy",
        "Accuracy of every client",
        "After the last round, on each client's own test split, sorted. A bar joins the scores of a client."
        + _alone([run]),
        f"Dot chart of {len(clients)} clients' accuracies: {spans}.",
        plots.client_scores(scores, clients, majority),
    )


def label_distribution(run: RunResult) -> list[Drawing]:
    """Training images by client and class, as a heat map and as dots."""
    counts = run.counts
    if not counts.size:
        raise Unavailable("the run has no data card: real devices keep their class counts to themselves")
    held = (counts > 0).sum(axis=1)
    alt = (
        f"{counts.shape[0]} clients hold {held.min()} to {held.max()} of {counts.shape[1]} classes and "
        f"{counts.sum(axis=1).min()} to {counts.sum(axis=1).max()} training images each."
    )
    return [
        Drawing(
            "labels-heat",
            "Label distribution",
            "Training images by client and class; an empty cell is none.",
            f"Heat map: {alt}",
            plots.label_heat(counts, run.classes),
            "FedClassAvg, Figs. 2 and 3",
        ),
        Drawing(
            "labels-dots",
            "Label distribution, as dots",
            "The area of a dot is the number of training images.",
            f"Dots: {alt}",
            plots.label_dots(counts, run.classes),
            "cwFedAvg; FedGH",
        ),
    ]


def _each(runs: Sequence[RunResult], make: Callable[[RunResult], _T]) -> dict[str, _T]:
    """Apply a function to every run that has what it needs; raise the first reason if none has."""
    found: dict[str, _T] = {}
    first: Unavailable | None = None
    for run in runs:
        try:
            found[run.label] = make(run)
        except Unavailable as e:
            first = first or e
    if not found:
        raise first or Unavailable("there is no finished run")
    return found


def head_maps(runs: Sequence[RunResult]) -> Drawing:
    """Class counts beside the row norms of the clients' heads."""
    base = runs[0]
    analysis.label_shares(base)
    found = _each(runs, analysis.head_norms)
    clients = min((ids for ids, _ in found.values()), key=len)
    panels: dict[str, Array] = {"class counts": base.counts[clients].astype(float)}
    for name, value in found.items():
        ids, norms = value
        panels[f"row norms, {name}"] = norms[[ids.index(c) for c in clients]]
    correlations = [
        f"{name.removeprefix('row norms, ')} {_correlation(panels['class counts'], values):.2f}"
        for name, values in panels.items()
        if name != "class counts"
    ]
    return Drawing(
        "head-norms",
        "Head norms against class counts",
        "Left: training images by client and class. Right: L2 norm of each class's row in the client's head, after its "
        f"last local training. Correlation with the class shares within clients: {', '.join(correlations)}.",
        f"Heat maps of class counts and head row norms; their correlation within clients is {', '.join(correlations)}.",
        plots.norm_maps(panels, base.classes, clients),
        "cwFedAvg, Figs. 3 and 6; CCVR, Figs. 3 and 12",
    )


def _correlation(counts: Array, norms: Array) -> float:
    """Pearson correlation of class shares and norm shares, both about the clients' own means."""
    a = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    b = norms / norms.sum(axis=1, keepdims=True)
    a, b = a - a.mean(axis=1, keepdims=True), b - b.mean(axis=1, keepdims=True)
    scale = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float((a * b).sum() / scale) if scale else float("nan")


def norm_evolution(run: RunResult, clients: int = 6) -> Drawing:
    """p~ of some clients over rounds."""
    history = analysis.head_norm_history(run)
    if max(len(rounds) for rounds, _ in history.values()) < 2:
        raise Unavailable(
            "there is only one round, and an evolution needs two", f"fedapp run --resume {run.out} --rounds 10"
        )
    shares = analysis.label_shares(run)
    skew = sorted(history, key=lambda c: -float((shares[c] ** 2).sum()))
    chosen = sorted(skew[:clients])
    lines = {c: (t, n / n.sum(axis=1, keepdims=True)) for c, (t, n) in history.items() if c in chosen}
    apart = [float(np.abs(v[-1] - shares[c]).sum() / 2) for c, (_, v) in lines.items()]
    return Drawing(
        "norm-evolution",
        "Evolution of head norms",
        "Share of each class in the sum of the head's row norms, p~, after every local training; bars at the right "
        "edge, with the class's number: its share of the client's data, p. Grey: classes that the client has little or "
        f"nothing of. Shown: the {len(chosen)} clients with the most uneven data. Each client records the norms on "
        "its own disk; they are never sent.",
        f"Line charts of norm shares by round for clients {', '.join(map(str, chosen))}; at the end they are "
        f"{percent(float(np.mean(apart)))} away from the label shares (total variation, mean).",
        plots.norm_evolution(lines, {c: shares[c] for c in chosen}),
        "cwFedAvg, Fig. 2",
    )


def p_against_norms(runs: Sequence[RunResult]) -> Drawing:
    """p against p~ for all clients and classes."""

    def points(run: RunResult) -> tuple[Array, Array]:
        shares = analysis.label_shares(run)
        ids, _ = analysis.head_norms(run)
        stored = analysis.client_arrays(run)
        return shares[ids], np.stack([norm_distribution(stored[c][1]["model/head.weight"]) for c in ids])

    panels = _each(runs, points)
    far = {n: float(np.linalg.norm(p - q, axis=1).mean()) for n, (p, q) in panels.items()}
    absent = {n: float(np.where(p == 0, q, 0).sum(axis=1).mean()) for n, (p, q) in panels.items()}
    said = "; ".join(f"{n}: R = {far[n]:.3f}, {percent(absent[n])} of p~ on absent classes" for n in panels)
    return Drawing(
        "p-against-norms",
        "Label shares against norm shares",
        "A mark a client and class: the class's share of the client's data, p, and of the sum of its head's row norms, "
        f"p~ (cwFedAvg, Eq. 4). On the diagonal, heads tell the label distribution. Mean over clients: {said}.",
        f"Scatter plot of norm shares against label shares. {said}.",
        plots.p_against_norms(panels),
        "cwFedAvg, Figs. 2 and 5",
    )


def mixing(run: RunResult) -> Drawing:
    """The matrix A."""
    ids, matrix, how = analysis.who_learns_from_whom(run)
    own = float(np.diag(matrix).mean())
    return Drawing(
        "who-learns-from-whom",
        "Who learns from whom",
        f"Row i: the shares of the clients in what client i receives next ({how}); rows sum to 1. "
        f"Own share: {percent(own)} on average; an even mixture has {percent(1 / len(ids))} everywhere.",
        f"Heat map of {len(ids)} by {len(ids)} shares; the diagonal is {percent(own)} on average, the largest share "
        f"{percent(float(matrix.max()))}.",
        plots.mixing(matrix, ids),
    )


def embedding(runs: Sequence[RunResult], points: int = 1200) -> Drawing:
    """t-SNE of the clients' representations of the same test images, by class and by client."""
    found = _each(runs, lambda r: analysis.client_embedding(r, points=points))
    rows = {n: (e.points, {"by class": e.label, "by client": e.client}) for n, e in found.items()}
    said = "; ".join(
        f"{n}: {e.silhouette_label:.2f} by class, {e.silhouette_client:.2f} by client" for n, e in found.items()
    )
    clients = len(set(next(iter(found.values())).client.tolist()))
    return Drawing(
        "tsne",
        "Representations by class and client",
        f"t-SNE of the representations of the same test images by {clients} clients' trunks, drawn as class numbers "
        "and as client numbers. Where clients agree, numbers mix on the right and part on the left. Mean silhouette of "
        f"the representations themselves, -1 to 1: {said}.",
        f"Scatter plots of representations by class and by client. Silhouette: {said}.",
        plots.embedding(rows),
        "FedClassAvg, Fig. 8",
    )


def cka(runs: Sequence[RunResult]) -> Drawing:
    """CKA between clients by layer."""
    found = _each(runs, analysis.layer_cka)
    panels = {n: maps for n, (_, maps) in found.items()}
    said = "; ".join(
        f"{n}: " + ", ".join(f"{layer} {analysis.mean_of_pairs(m):.2f}" for layer, m in maps.items())
        for n, maps in panels.items()
    )
    pairs = len(next(iter(found.values()))[0])
    return Drawing(
        "cka",
        "Similarity of clients by layer",
        f"Linear centred kernel alignment between the trained models of {pairs} clients on the same test images, layer "
        "by layer; small dots: pairs of clients, large marks: their mean. Low at the head means that clients disagree "
        "there most.",
        f"Mean CKA between clients: {said}.",
        plots.cka(panels),
        "CCVR, Figs. 1 and 2",
    )


def conductance(runs: Sequence[RunResult]) -> Drawing:
    """Ranks of units by layer conductance at clients that classify one image correctly."""
    base = runs[0]
    right = _each(runs, analysis.right_clients)
    shared = {r.label: r for r in runs if r.label in right}
    best = int(np.min([table.sum(axis=0) for _, table in right.values()], axis=0).argmax())
    found = {name: analysis.conductance(run, best, right[name]) for name, run in shared.items()}
    first = next(iter(found.values()))
    said = "; ".join(f"{n}: {c.agreement:.2f}" for n, c in found.items())
    return Drawing(
        "conductance",
        "Units that matter",
        f"Units before the head at clients that classify one test image (class {base.classes[first.label]}) correctly; "
        "dark: high rank of layer conductance for that class, W_cj (z_j(x) - z_j(x0)), x0 the mean image. Vertical "
        f"stripes mean that clients use the same units. Mean Spearman correlation between clients: {said}.",
        f"Heat map of unit ranks by client. Mean Spearman correlation between clients: {said}.",
        plots.conductance(
            {n: (c.ranks, c.clients) for n, c in found.items()}, first.image, analysis.data_of(base).dataset.scale
        ),
        "FedClassAvg, Fig. 9",
    )


def norms_before_after(run: RunResult) -> Drawing:
    """Row norms of the global head before and after CCVR."""
    if run.method != "ccvr":
        raise Unavailable("only a calibrated run has a head before and after", "fedapp run --method ccvr ...")
    before, after = (
        np.linalg.norm(analysis.global_arrays(run, calibrated)["head.weight"].astype(float), axis=1)
        for calibrated in (False, True)
    )
    ratio = [float(n.max() / n.min()) if n.min() > 0 else math.nan for n in (before, after)]
    return Drawing(
        "norms-before-after",
        "Head norms before and after calibration",
        f"L2 norm of each class's row of the global head. Largest over smallest: {ratio[0]:.2f} as trained, "
        f"{ratio[1]:.2f} calibrated.",
        f"Dot chart of head row norms; largest over smallest is {ratio[0]:.2f} before and {ratio[1]:.2f} after.",
        plots.norms_before_after(before, after, run.classes),
        "CCVR, Figs. 3 and 10",
    )


def samples_sweep(runs: Sequence[RunResult]) -> Drawing:
    """Accuracy of the calibrated global model against M_c."""
    found = _each(runs, analysis.calibration_sweep)
    said = "; ".join(
        f"{n}: {percent(c.accuracy[0])} as trained, "
        + ", ".join(f"{percent(a)} with {m}" for m, a in zip(c.samples[1:], c.accuracy[1:]))
        for n, c in found.items()
    )
    images = next(iter(found.values())).images
    return Drawing(
        "samples-sweep",
        "Virtual samples per class",
        f"Calibration computed from this run's global model and class statistics of {images:,} training images, after "
        "the run; dotted: the head as trained.",
        f"Line chart of accuracy against virtual samples per class. {said}.",
        plots.samples_sweep({n: (c.samples, c.accuracy) for n, c in found.items()}),
        "CCVR, Figs. 7 and 14",
    )


def calibration_embedding(run: RunResult) -> Drawing:
    """One embedding of test images, coloured by truth, prediction before and prediction after."""
    found = analysis.calibration_embedding(run)
    wrong = [float((p != found.label).mean()) for p in (found.before, found.after)]
    return Drawing(
        "calibration-map",
        "Predictions before and after calibration",
        "t-SNE of the global trunk's representations of test images, drawn as the number of the true class and of the "
        f"class that the head answers. Wrong: {percent(wrong[0])} before, {percent(wrong[1])} after.",
        f"Scatter plots of test images by truth and by prediction; {percent(wrong[0])} are wrong before calibration, "
        f"{percent(wrong[1])} after.",
        plots.embedding({"": (found.points, {"truth": found.label, "before": found.before, "after": found.after})}),
        "CCVR, Figs. 5 and 13",
    )


def round_seconds(run: RunResult) -> Drawing:
    """Seconds of a round: the whole exchange, and the mean local training."""
    if "round_seconds" not in run.rounds:
        raise Unavailable("no round was finished", f"fedapp run --resume {run.out}")
    rounds = run.rounds["round"].to_numpy(float)
    parts = {"whole round": run.rounds["round_seconds"].to_numpy(float)}
    if "train_seconds" in run.rounds:
        parts["local training, mean over clients"] = run.rounds["train_seconds"].to_numpy(float)
    return Drawing(
        "round-seconds",
        "Time of a round",
        "Wall-clock seconds; the first round includes the start of the workers.",
        f"Line chart: a round takes {np.median(parts['whole round']):.2f} seconds (median).",
        plots.seconds(rounds, parts),
    )


# ---- several runs ----------------------------------------------------------------------------------------------------


def of_comparison(comparison: Comparison) -> Gallery:
    """Draw all figures that the runs of a comparison hold the data for."""
    gallery = Gallery()
    order = comparison.labels
    runs = sorted(comparison.finished, key=lambda r: order.index(r.label))
    if not runs:
        gallery.missing.append(Missing("All figures", "no run has finished yet", "fedapp compare ... (again)"))
        return gallery
    settings = list(groups_of(runs))
    shown = representatives(comparison)
    for i, (setting, members) in enumerate(settings):
        name, suffix = setting_text(setting), f"-{i}" if len(settings) > 1 else ""
        gallery.add("scores", f"Learning curves {name}".strip(), partial(compared_curves, members, name, suffix))
        gallery.add("cost", f"Accuracy for traffic {name}".strip(), partial(traffic_curves, members, name, suffix))
    gallery.add("sweeps", "Accuracy against non-IID degree", lambda: non_iid(runs))
    gallery.add("sweeps", "Accuracy against participation", lambda: sweeps(runs, "fraction-train"))
    gallery.add("sweeps", "Hyperparameters", lambda: hyperparameters(runs))
    for key in ("clients", "local-epochs"):
        if key in varying(runs):
            gallery.add("sweeps", f"Accuracy against {key}", partial(sweeps, runs, key))
    gallery.add("data", "Label distribution", lambda: label_distribution(shown[0]))
    gallery.add("heads", "Head norms against class counts", lambda: head_maps(shown[:DETAILED]))
    gallery.add("heads", "Label shares against norm shares", lambda: p_against_norms(shown[:DETAILED]))
    blended = [r for r in shown if r.method in ("cwfedavg", "fedamp", "fedfomo", "ktpfl", "ifca", "cfl")]
    gallery.add("heads", "Who learns from whom", lambda: mixing((blended or shown)[0]))
    gallery.add(
        "representations", "Representations by class and client", lambda: embedding(shown[:DETAILED], points=800)
    )
    gallery.add("representations", "Similarity of clients by layer", lambda: cka(shown[:6]))
    gallery.add("representations", "Units that matter", lambda: conductance(shown[:DETAILED]))
    gallery.add("calibration", "Separability against gain", lambda: separability(runs))
    repaired = [r for r in shown if r.method == "ccvr"]
    if repaired:
        gallery.add("calibration", "Head norms before and after", lambda: norms_before_after(repaired[0]))
        gallery.add("calibration", "Virtual samples per class", lambda: samples_sweep(repaired))
    return gallery


def setting_text(setting: Mapping[str, object]) -> str:
    """Write a setting as words; an empty string where all runs share everything."""
    return ", ".join(str(v) if k in ("dataset", "partition", "model") else f"{k} {v}" for k, v in setting.items())


def representatives(comparison: Comparison) -> list[RunResult]:
    """One finished run a method of the first setting and seed: local training first, then the four, then the others."""
    first = next(iter(groups_of(comparison.finished)))[1]
    order = ["local", "fedclassavg", "cwfedavg", "fedgh", "ccvr"]
    best: dict[str, RunResult] = {}
    for run in sorted(first, key=lambda r: (r.seed, comparison.labels.index(r.label))):
        best.setdefault(run.label, run)
    return sorted(best.values(), key=lambda r: order.index(r.method) if r.method in order else len(order))


def _by_method(runs: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    found: dict[str, list[RunResult]] = {}
    for run in runs:
        found.setdefault(run.label, []).append(run)
    return found


def _over_seeds(runs: Sequence[RunResult], x: str, y: str) -> tuple[Array, Array, Array | None]:
    """Mean and spread (ddof 1) over runs of a column of rounds.csv."""
    table = pd.concat([r.rounds[[x, y]].dropna() for r in runs])
    grouped = table.groupby(x)[y]
    several = len(runs) > 1
    return (
        grouped.mean().index.to_numpy(float),
        grouped.mean().to_numpy(float),
        grouped.std(ddof=1).to_numpy(float) if several else None,
    )


def compared_curves(runs: Sequence[RunResult], name: str = "", suffix: str = "") -> list[Drawing]:
    """Accuracy by round, a line a method, a panel a protocol; bands over seeds. Then the same for balanced scores."""
    drawings = []
    seeds = len({r.seed for r in runs})
    bands = f"; bands: one standard deviation over {seeds} seeds" if seeds > 1 else ""
    for what, heading, where in (
        ("accuracy", "Learning curves", "Received and trained are means over the clients' own test splits."),
        ("balanced", "Learning curves, balanced", "Mean recall over all classes on all clients' test images."),
    ):
        panels: dict[str, list[Curve]] = {}
        for p in PROTOCOL_TEXT:
            column = f"{p}_{what}"
            for label, members in _by_method(runs).items():
                measured = [
                    r for r in members if p in r.protocols and column in r.rounds and r.rounds[column].notna().any()
                ]
                if measured:
                    panels.setdefault(named(p), []).append(Curve(label, *_over_seeds(measured, "round", column)))
        if not panels:
            continue
        ends = "; ".join(
            f"{p}: " + ", ".join(f"{c.label} {percent(float(c.mean[-1]))}" for c in lines)
            for p, lines in panels.items()
        )
        drawings.append(
            Drawing(
                f"curves-{what}{suffix}",
                heading + (f": {name}" if name else ""),
                f"Mean {what if what == 'accuracy' else 'balanced accuracy'} by round{bands}. {where}{_alone(runs)}",
                f"Line charts of {what} by round. Last round: {ends}.",
                plots.curves(panels),
                "FedClassAvg, Figs. 4 to 7; FedGH, Fig. 2; cwFedAvg, Fig. 4" if what == "accuracy" else "",
            )
        )
    if not drawings:
        raise Unavailable("no round was finished")
    return drawings


def traffic_curves(runs: Sequence[RunResult], name: str = "", suffix: str = "") -> Drawing:
    """Accuracy against all bytes that travelled so far."""
    lines = []
    for label, members in _by_method(runs).items():
        run = members[0]
        column = next((f"{p}_accuracy" for p in ("received", "trained") if f"{p}_accuracy" in run.rounds), None)
        if column is None or "bytes_up" not in run.rounds:
            continue
        moved = traffic(run.rounds) / 1e6
        if moved[-1] > 0:
            lines.append(Curve(label, moved, run.rounds[column].to_numpy(float)))
    if not lines:
        raise Unavailable("nothing travelled: the methods train alone")
    said = "; ".join(f"{c.label} {percent(float(c.mean[-1]))} for {c.x[-1]:,.1f} MB" for c in lines)
    return Drawing(
        f"traffic{suffix}",
        "Accuracy for traffic" + (f": {name}" if name else ""),
        "Accuracy before local training (where it was not measured: after it) against the bytes of all arrays that all "
        "clients sent and received so far, in megabytes (10^6 bytes); first seed. Methods that send nothing are not "
        "shown.",
        f"Line chart of accuracy against traffic: {said}.",
        plots.curves({"": lines}, xlabel="megabytes, all clients, both ways", log=len(lines) > 1),
        "FedGH, Table 3",
    )


def _sweep_lines(runs: Sequence[RunResult], key: str) -> dict[str, list[Curve]]:
    """Last accuracy against a setting, {protocol: curves}, a curve a method."""
    panels: dict[str, list[Curve]] = {}
    for p in PROTOCOL_TEXT:
        for label, members in _by_method(runs).items():
            curve = _curve(label, [(float(r.flat[key]), r.score(p)) for r in members])
            if curve is not None:
                panels.setdefault(named(p), []).append(curve)
    return panels


SWEEPS = {
    "alpha": ("non-IID degree", "Dirichlet concentration (left: more uneven)", "FedGH, Fig. 3; CCVR, Table 2"),
    "classes-per-client": ("non-IID degree", "classes per client", "FedGH, Fig. 3"),
    "fraction-train": ("participation", "share of clients in a round", "FedGH, Fig. 4"),
    "clients": ("number of clients", "clients", "CCVR, Table 4"),
    "local-epochs": ("local epochs", "local epochs", ""),
}
"""What a sweep over a run-config key is called, its axis, and its source."""


def sweeps(runs: Sequence[RunResult], key: str) -> list[Drawing]:
    """Last accuracy against a setting in which runs differ; a figure for each setting of everything else."""
    values = {str(r.flat.get(key)) for r in runs}
    if len(values) < 2:
        raise Unavailable(
            f"all runs have {key} = {next(iter(values), '-')}",
            f"fedapp run --set {key}=VALUE --out DIR/NAME for several values, then fedapp report DIR",
        )
    degree = ("alpha", "classes-per-client")
    groups: dict[str, list[RunResult]] = {}
    for run in runs:
        if uses(run, key):
            rest = {k: v for k, v in run.setting.items() if k != key}
            groups.setdefault(setting_text(rest), []).append(run)
    drawings: list[Drawing] = []
    for name, members in groups.items():
        panels = _sweep_lines(members, key)
        if not panels:
            continue
        said = "; ".join(
            f"{p}, {c.label}: " + ", ".join(f"{percent(float(m))} at {v:g}" for v, m in zip(c.x, c.mean))
            for p, lines in panels.items()
            for c in lines
        )
        what, axis, source = SWEEPS[key]
        one = "" if key in degree else " Received and global count all clients, trained those of the last round."
        drawings.append(
            Drawing(
                f"sweep-{key}" + (f"-{len(drawings)}" if drawings else ""),
                f"Accuracy against {what}" + (f": {name}" if name else ""),
                f"After the last round; error bars: one standard deviation over seeds.{one}{_alone(members)}",
                f"Line charts of accuracy against {key}. {said}.",
                plots.sweep(panels, axis, log=key == "alpha"),
                source,
            )
        )
    if not drawings:
        raise Unavailable(f"no method was run with two values of {key} and all else equal")
    return drawings


def non_iid(runs: Sequence[RunResult]) -> list[Drawing]:
    """Accuracy against classes per client, or against the Dirichlet concentration, whatever the runs vary."""
    drawings = []
    for key in ("classes-per-client", "alpha"):
        if len({str(r.flat.get(key)) for r in runs if uses(r, key)}) > 1:
            drawings += sweeps(runs, key)
    if not drawings:
        raise Unavailable(
            "all runs have the same non-IID degree (alpha, classes-per-client)",
            "fedapp compare --partitions dirichlet:0.1,dirichlet:0.5,dirichlet:5 ...",
        )
    return drawings


def hyperparameters(runs: Sequence[RunResult]) -> list[Drawing]:
    """Accuracy, and for cwFedAvg the distance R, against a numeric hyperparameter in which runs of a method differ."""
    drawings: list[Drawing] = []
    for setting, members in groups_of(runs):
        for method in dict.fromkeys(r.method for r in members):
            own = [r for r in members if r.method == method]
            for name in sorted({n for r in own for n in _arguments(r)}):
                points = [(r, float(_arguments(r)[name])) for r in own if _number(_arguments(r).get(name))]
                if len({v for _, v in points}) > 1:
                    suffix = f"-{len(drawings)}" if drawings else ""
                    drawings += _against(method, name, points, setting_text(setting), suffix)
    if not drawings:
        raise Unavailable(
            "no method was run with several values of a hyperparameter",
            "fedapp compare --methods 'cwfedavg(lam=0),cwfedavg(lam=1),cwfedavg(lam=10)' ...",
        )
    return drawings


def _against(
    method: str, name: str, points: Sequence[tuple[RunResult, float]], where: str, suffix: str
) -> list[Drawing]:
    """Draw accuracy, and R where there is one, against a hyperparameter."""
    panels: dict[str, list[Curve]] = {}
    for protocol in PROTOCOL_TEXT:
        curve = _curve(method, [(v, r.score(protocol)) for r, v in points])
        if curve is not None:
            panels[named(protocol)] = [curve]
    given = [v for _, v in points]
    log = min(given) > 0 and max(given) / min(given) >= 20
    source = "cwFedAvg, Fig. 5" if (method, name) == ("cwfedavg", "lam") else ""
    title = f"{method}: {name}" + (f", {where}" if where else "")
    drawings = []
    if panels:
        said = "; ".join(f"{p} {percent(float(c[0].mean.max()))} at best" for p, c in panels.items())
        drawings.append(
            Drawing(
                f"sweep-{method}-{name}{suffix}",
                title,
                f"Accuracy after the last round against the hyperparameter {name}; error bars: one standard deviation "
                "over seeds.",
                f"Line chart of accuracy against {name}: {said}.",
                plots.sweep(panels, name, log=log),
                source,
            )
        )
    distance = _curve(method, [(v, _last_wdr(r)) for r, v in points])
    if distance is not None:
        drawings.append(
            Drawing(
                f"sweep-{method}-{name}-distance{suffix}",
                f"{title}, distance R",
                "Mean over clients of R = ||p - p~|| after the last local training.",
                f"Line chart of R against {name}, from {distance.mean[0]:.3f} to {distance.mean[-1]:.3f}.",
                plots.sweep({"": [distance]}, name, log=log, ylabel="R", percent=False),
                source,
            )
        )
    return drawings


def _arguments(run: RunResult) -> dict[str, str]:
    parts = str(run.flat.get("method-args", "")).split()
    return {p.partition("=")[0]: p.partition("=")[2] for p in parts}


def _number(text: str | None) -> bool:
    try:
        return text is not None and math.isfinite(float(text))
    except ValueError:
        return False


def _last_wdr(run: RunResult) -> float:
    values = [v for v in run.summary.get("wdr") or [] if v is not None]
    return float(values[-1]) if values else math.nan


def _curve(label: str, points: Iterable[tuple[float, float]]) -> Curve | None:
    """Mean and spread (ddof 1, 0 for one run) of y by x; None where there are not two values of x."""
    found: dict[float, list[float]] = {}
    for x, y in points:
        if not math.isnan(y):
            found.setdefault(x, []).append(y)
    if len(found) < 2:
        return None
    at = sorted(found)
    mean, std = np.array([mean_and_std(found[v]) for v in at]).T
    return Curve(label, np.array(at), mean, np.nan_to_num(std))


def separability(runs: Sequence[RunResult], samples: int = 100) -> Drawing:
    """Gain of calibration against the separability of the classes, a mark a run."""
    groups: dict[str, tuple[list[float], list[float]]] = {}
    reason: Unavailable | None = None
    for run in runs:
        try:
            found = analysis.calibration_sweep(run, (0, samples))
        except Unavailable as e:
            reason = reason or e
            continue
        distances, gains = groups.setdefault(run.label, ([], []))
        distances.append(found.separability)
        gains.append(found.accuracy[1] - found.accuracy[0])
    count = sum(len(d) for d, _ in groups.values())
    if count < 2:
        why = f" ({reason.why})" if reason else ""
        raise Unavailable(
            f"it needs two runs with one global model, there is {count or 'none'}{why}",
            "fedapp compare --methods fedavg,fedprox,moon,ccvr --seeds 3 ...",
        )
    said = "; ".join(
        f"{n}: distance {np.mean(d):.2f}, gain {100 * np.mean(g):+.1f} points" for n, (d, g) in groups.items()
    )
    return Drawing(
        "separability",
        "Separability against gain",
        f"A mark a run: mean sliced Wasserstein distance between the classes' Gaussians in the global representation, "
        f"and what calibrating the head with {samples} virtual samples per class adds, computed after the fact.",
        f"Scatter plot of gain against separability. {said}.",
        plots.separability({n: (np.array(d), np.array(g)) for n, (d, g) in groups.items()}),
        "CCVR, Fig. 6",
    )
