"""The figures of a run and of a comparison, and why some are left out.

`FIGURES` names the figures of a run. Their functions take runs and return a caption, what the figure shows in words,
and the figure. The others depend on what a comparison varies, and return `Drawing`s. All raise `Unavailable` with the
reason, and the command that would make what is missing. The file is long because every figure has its caption and its
description in words here, beside the numbers that they quote.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pandas as pd

from fedapp.results import analysis, statistics
from fedapp.results.analysis import Unavailable
from fedapp.results.figures import calibration, heads, plots
from fedapp.results.figures.plots import Curve
from fedapp.results.figures.style import Drawing
from fedapp.results.figures.words import Runs, Words, each, percent, unfinished
from fedapp.results.runs import ONE_SCORE, PROTOCOL_TEXT, Comparison, RunResult, groups_of, uses, varying


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

    def add(self, section: str, title: str, draw: Callable[[], Iterable[Drawing]]) -> None:
        """Draw; what cannot be drawn is listed with the reason."""
        try:
            found = list(draw())
        except Unavailable as e:
            self.missing.append(Missing(title, e.why, e.command))
        except Exception as e:  # one figure must not cost the reader the whole page; the page names the error
            self.missing.append(Missing(title, f"it could not be drawn: {type(e).__name__}: {e}"))
        else:
            self.sections.setdefault(section, []).extend(found)

    def add_known(self, name: str, runs: Runs) -> None:
        """Draw a figure of `FIGURES`."""
        section, title, source, draw = FIGURES[name]

        def drawn() -> Iterable[Drawing]:
            caption, alt, figure = draw(runs)
            yield Drawing(name, title, caption, alt, figure, source)

        self.add(section, title, drawn)


# ---- words -----------------------------------------------------------------------------------------------------------


def named(protocol: str) -> str:
    """Write what a protocol means behind its name: the title of a panel, the label of a line."""
    return f"{protocol}, {PROTOCOL_TEXT[protocol]}"


def setting_text(setting: Mapping[str, object]) -> str:
    """Write a setting as words; an empty string where all runs share everything."""
    return ", ".join(str(v) if k in ("dataset", "partition", "model") else f"{k} {v}" for k, v in setting.items())


def _alone(runs: Iterable[RunResult]) -> str:
    """Say that Standalone has one score, where it is among the runs."""
    return f" {ONE_SCORE}" if any(r.alone for r in runs) else ""


# ---- scores of a run -------------------------------------------------------------------------------------------------


def _measured(run: RunResult, column: str) -> pd.DataFrame:
    """Return the rounds that measured a column; no rows where none did."""
    return run.rounds.dropna(subset=[column]) if column in run.rounds else run.rounds.iloc[:0]


def _protocol_curves(run: RunResult, what: str) -> list[Curve]:
    """Curves of a run by protocol: `what` is accuracy (bands: standard deviation over clients) or balanced."""
    curves = []
    for p in run.protocols:
        shown = _measured(run, f"{p}_{what}")
        if len(shown):
            spread = shown.get(f"{p}_{what}_std")
            curves.append(
                Curve(
                    named(p), shown["round"].to_numpy(float), shown[f"{p}_{what}"].to_numpy(float),
                    None if spread is None else spread.to_numpy(float),
                )
            )  # fmt: skip
    return curves


def _learning_curves(runs: Runs) -> Words:
    run = runs[0]
    panels = {"accuracy": _protocol_curves(run, "accuracy")}
    if not panels["accuracy"]:
        raise unfinished(run, "no round was finished")
    balanced = _protocol_curves(run, "balanced")
    if balanced:
        panels["balanced: mean recall over all classes"] = balanced
    ends = "; ".join(
        f"{c.label} from {percent(c.mean[0])} in round {c.x[0]:.0f} to {percent(c.mean[-1])} in round {c.x[-1]:.0f}"
        for c in panels["accuracy"]
    )
    guess = run.card.get("majority_mean")
    caption = f"Mean over the clients of a round; bands: one standard deviation over clients.{_alone(runs)}"
    if balanced:
        caption += " Balanced scores are on all clients' test images."
    if guess is not None:
        caption += f" Dotted: guessing each client's majority class, {percent(guess)}."
    return caption, f"Line chart of accuracy by round: {ends}.", plots.curves(panels, baseline=guess)


def _client_accuracy(runs: Runs) -> Words:
    run = runs[0]
    table = run.final
    if table.empty and not run.clients.empty:
        table = run.clients.drop_duplicates("client", keep="last").sort_values("client")
    if table.empty:
        raise unfinished(run, "no client was scored")
    columns = {named(p): f"{p}_accuracy" for p in run.protocols}
    scores = {n: table[c].to_numpy(float) for n, c in columns.items() if c in table and table[c].notna().any()}
    if not scores:
        raise Unavailable("neither received nor trained was measured", "--set protocols=received,trained,global")
    clients = [int(c) for c in table["client"]]
    guess = run.card.get("majority")
    majority = np.array([guess[c] for c in clients], dtype=float) if guess else None  # None becomes NaN
    spans = "; ".join(f"{n}: {percent(np.nanmin(v))} to {percent(np.nanmax(v))}" for n, v in scores.items())
    return (
        "After the last round, on each client's own test split, sorted. A bar joins the scores of a client."
        + _alone(runs),
        f"Dot chart of {len(clients)} clients' accuracies: {spans}.",
        plots.client_scores(scores, clients, majority),
    )


def _round_seconds(runs: Runs) -> Words:
    run = runs[0]
    names = {"round_seconds": "whole round", "train_seconds": "local training, mean over clients"}
    if "round_seconds" not in run.rounds:
        raise unfinished(run, "no round was finished")
    rounds = run.rounds["round"].to_numpy(float)
    lines = [Curve(n, rounds, run.rounds[c].to_numpy(float)) for c, n in names.items() if c in run.rounds]
    return (
        "Wall-clock seconds; the first round includes the start of the workers.",
        f"Line chart: a round takes {np.median(lines[0].mean):.2f} seconds (median).",
        plots.curves({"": lines}, ylabel="seconds", height=2.2, percent=False),
    )


# ---- data --------------------------------------------------------------------------------------------------


def _label_distribution(runs: Runs, dots: bool = False) -> Words:
    analysis.label_shares(runs[0])
    counts, classes = runs[0].counts, runs[0].classes
    held, images = (counts > 0).sum(axis=1), counts.sum(axis=1)
    alt = (
        f"{counts.shape[0]} clients hold {held.min()} to {held.max()} of {counts.shape[1]} classes and "
        f"{images.min()} to {images.max()} training images each."
    )
    if dots:
        caption = "The area of a dot is the number of training images."
        return caption, f"Dots: {alt}", plots.label_dots(counts, classes)
    caption = "Training images by client and class; an empty cell is none."
    return caption, f"Heat map: {alt}", plots.label_heat(counts, classes)


# ---- representations -------------------------------------------------------------------------------------------------


def _embedding(runs: Runs) -> Words:
    found = each(runs, partial(analysis.client_embedding, points=1200 if len(runs) == 1 else 800))
    rows = {n: (e.points, {"by class": e.label, "by client": e.client}) for n, e in found.items()}
    said = "; ".join(
        f"{n}: {e.silhouette_label:.2f} by class, {e.silhouette_client:.2f} by client" for n, e in found.items()
    )
    clients = len(np.unique(next(iter(found.values())).client))
    return (
        f"t-SNE of the representations of the same test images by {clients} clients' trunks, drawn as class numbers "
        "and as client numbers. Where clients agree, numbers mix on the right and part on the left. Mean silhouette of "
        f"the representations themselves, -1 to 1: {said}.",
        f"Scatter plots of representations by class and by client. Silhouette: {said}.",
        plots.embedding(rows),
    )


def _conductance(runs: Runs) -> Words:
    base = runs[0]
    right = each(runs, analysis.right_clients)
    best = int(np.min([table.sum(axis=0) for _, table in right.values()], axis=0).argmax())
    found = {r.label: analysis.conductance(r, best, right[r.label]) for r in runs if r.label in right}
    first = next(iter(found.values()))
    said = "; ".join(f"{n}: {c.agreement:.2f}" for n, c in found.items())
    image = first.image / analysis.data_of(base).dataset.scale
    return (
        f"Units before the head at clients that classify one test image (class {base.classes[first.label]}) correctly; "
        "dark: high rank of layer conductance for that class, W_cj (z_j(x) - z_j(x0)), x0 the mean image. Vertical "
        f"stripes mean that clients use the same units. Mean Spearman correlation between clients: {said}.",
        f"Heat map of unit ranks by client. Mean Spearman correlation between clients: {said}.",
        plots.conductance({n: (c.ranks, c.clients) for n, c in found.items()}, image),
    )


# ---- which figures there are -----------------------------------------------------------------------------------------

FIGURES: dict[str, tuple[str, str, str, Callable[[Runs], Words]]] = {
    "learning-curves": ("scores", "Learning curves", "FedClassAvg, Figs. 4 to 7; FedGH, Fig. 2", _learning_curves),
    "client-accuracy": ("scores", "Accuracy of every client", "", _client_accuracy),
    "labels-heat": ("data", "Label distribution", "FedClassAvg, Figs. 2 and 3", _label_distribution),
    "labels-dots": (
        "data", "Label distribution, as dots", "cwFedAvg; FedGH", partial(_label_distribution, dots=True),
    ),
    "head-norms": (
        "heads", "Head norms against class counts", "cwFedAvg, Figs. 3 and 6; CCVR, Figs. 3 and 12", heads.head_maps,
    ),
    "norm-evolution": ("heads", "Evolution of head norms", "cwFedAvg, Fig. 2", heads.norm_evolution),
    "p-against-norms": ("heads", "Label shares against norm shares", "cwFedAvg, Figs. 2 and 5", heads.p_against_norms),
    "who-learns-from-whom": ("heads", "Who learns from whom", "", heads.mixing),
    "tsne": ("representations", "Representations by class and client", "FedClassAvg, Fig. 8", _embedding),
    "cka": ("representations", "Similarity of clients by layer", "CCVR, Figs. 1 and 2", calibration.cka),
    "conductance": ("representations", "Units that matter", "FedClassAvg, Fig. 9", _conductance),
    "separability": ("calibration", "Separability against gain", "CCVR, Fig. 6", calibration.separability),
    "norms-before-after": (
        "calibration", "Head norms before and after calibration", "CCVR, Figs. 3 and 10",
        calibration.norms_before_after,
    ),
    "samples-sweep": ("calibration", "Virtual samples per class", "CCVR, Figs. 7 and 14", calibration.samples_sweep),
    "calibration-map": (
        "calibration", "Predictions before and after calibration", "CCVR, Figs. 5 and 13", calibration.calibration_map,
    ),
    "round-seconds": ("cost", "Time of a round", "", _round_seconds),
}  # fmt: skip
"""By id: section of the page, title, the paper's figure, and what draws it."""


def of_run(run: RunResult) -> Gallery:
    """Draw all figures that a run directory holds the data for."""
    gallery = Gallery()
    for name in FIGURES:
        if name != "separability":  # it compares runs
            gallery.add_known(name, [run])
    return gallery


def of_comparison(comparison: Comparison) -> Gallery:
    """Draw all figures that the runs of a comparison hold the data for."""
    gallery = Gallery()
    order = comparison.labels
    runs = sorted(comparison.finished, key=lambda r: order.index(r.label))
    if not runs:
        gallery.missing.append(Missing("All figures", "no run has finished yet", "fedapp compare ... (again)"))
        return gallery
    settings = list(groups_of(runs))
    for i, (setting, members) in enumerate(settings):
        name, suffix = setting_text(setting), f"-{i}" if len(settings) > 1 else ""
        gallery.add("scores", f"Learning curves {name}".strip(), partial(compared_curves, members, name, suffix))
        gallery.add("cost", f"Accuracy for traffic {name}".strip(), partial(traffic_curves, members, name, suffix))
    gallery.add("sweeps", "Accuracy against non-IID degree", partial(non_iid, runs))
    gallery.add("sweeps", "Accuracy against participation", partial(sweeps, runs, "fraction-train"))
    gallery.add("sweeps", "Hyperparameters", partial(hyperparameters, runs))
    for key in ("clients", "local-epochs"):
        if key in varying(runs):
            gallery.add("sweeps", f"Accuracy against {key}", partial(sweeps, runs, key))
    shown = representatives(comparison)
    few = shown[:3]  # the clients' models of more runs would take long to look at, and a figure could not hold them
    blended = [r for r in shown if r.method in ("cwfedavg", "fedamp", "fedfomo", "ktpfl", "ifca", "cfl")]
    repaired = [r for r in shown if r.method == "ccvr"]
    for name, chosen in (
        ("labels-heat", shown), ("labels-dots", shown), ("head-norms", few), ("p-against-norms", few),
        ("who-learns-from-whom", blended or shown), ("tsne", few), ("cka", shown[:6]), ("conductance", few),
        ("separability", runs), ("norms-before-after", repaired), ("samples-sweep", repaired),
    ):  # fmt: skip
        if chosen:
            gallery.add_known(name, chosen)
    return gallery


def representatives(comparison: Comparison) -> list[RunResult]:
    """One finished run a method of the first setting and seed: local training first, then the four, then the others."""
    first = next(iter(groups_of(comparison.finished)))[1]
    order = ["local", "fedclassavg", "cwfedavg", "fedgh", "ccvr"]
    best = [members[0] for members in _by_method(sorted(first, key=lambda r: r.seed)).values()]
    best.sort(key=lambda r: comparison.labels.index(r.label))
    return sorted(best, key=lambda r: order.index(r.method) if r.method in order else len(order))


# ---- figures of a comparison -----------------------------------------------------------------------------------------


def _by_method(runs: Runs) -> dict[str, list[RunResult]]:
    found: dict[str, list[RunResult]] = {}
    for run in runs:
        found.setdefault(run.label, []).append(run)
    return found


def _mean(label: str, table: pd.DataFrame) -> Curve:
    """Mean and spread over seeds (ddof 1, 0 for one) of the second column by the first; what is NaN is left out."""
    x, y = table.columns
    found = table.dropna().groupby(x)[y].agg(["mean", "std"]).fillna(0)
    return Curve(label, found.index.to_numpy(float), found["mean"].to_numpy(), found["std"].to_numpy())


def compared_curves(runs: Runs, name: str = "", suffix: str = "") -> list[Drawing]:
    """Accuracy by round, a line a method, a panel a protocol; bands over seeds. Then the same for balanced scores."""
    drawings = []
    seeds = len({r.seed for r in runs})
    bands = f"; bands: one standard deviation over {seeds} seeds" if seeds > 1 else ""
    for what, score, where, source in (
        (
            "accuracy", "accuracy", "Received and trained are means over the clients' own test splits.",
            "FedClassAvg, Figs. 4 to 7; FedGH, Fig. 2; cwFedAvg, Fig. 4",
        ),
        ("balanced", "balanced accuracy", "Mean recall over all classes on all clients' test images.", ""),
    ):  # fmt: skip
        panels: dict[str, list[Curve]] = {}
        for p in PROTOCOL_TEXT:
            column = f"{p}_{what}"
            for label, members in _by_method(runs).items():
                rounds = [_measured(r, column) for r in members if p in r.protocols]
                rounds = [t[["round", column]] for t in rounds if len(t)]
                if rounds:
                    panels.setdefault(named(p), []).append(_mean(label, pd.concat(rounds)))
        if panels:
            ends = "; ".join(
                f"{p}: " + ", ".join(f"{c.label} {percent(c.mean[-1])}" for c in lines) for p, lines in panels.items()
            )
            drawings.append(
                Drawing(
                    f"curves-{what}{suffix}",
                    f"Learning curves{', balanced' if what == 'balanced' else ''}" + (f": {name}" if name else ""),
                    f"Mean {score} by round{bands}. {where}{_alone(runs)}",
                    f"Line charts of {what} by round. Last round: {ends}.",
                    plots.curves(panels),
                    source,
                )
            )
    if not drawings:
        raise Unavailable("no round was finished")
    return drawings


def traffic_curves(runs: Runs, name: str = "", suffix: str = "") -> list[Drawing]:
    """Accuracy against all bytes that travelled so far."""
    lines = []
    for label, (run, *_) in _by_method(runs).items():
        column = next((f"{p}_accuracy" for p in ("received", "trained") if f"{p}_accuracy" in run.rounds), None)
        moved = statistics.traffic(run.rounds) / 1e6
        if column is not None and moved[-1] > 0:
            lines.append(Curve(label, moved, run.rounds[column].to_numpy(float)))
    if not lines:
        raise Unavailable("nothing travelled: the methods train alone")
    said = "; ".join(f"{c.label} {percent(c.mean[-1])} for {c.x[-1]:,.1f} MB" for c in lines)
    return [
        Drawing(
            f"traffic{suffix}",
            "Accuracy for traffic" + (f": {name}" if name else ""),
            "Accuracy before local training (where it was not measured: after it) against the bytes of all arrays that "
            "all clients sent and received so far, in megabytes (10^6 bytes); first seed. Methods that send nothing "
            "are not shown.",
            f"Line chart of accuracy against traffic: {said}.",
            plots.curves({"": lines}, xlabel="megabytes, all clients, both ways", log=len(lines) > 1),
            "FedGH, Table 3",
        )
    ]


SWEEPS = {
    "alpha": ("non-IID degree", "Dirichlet concentration (left: more uneven)", "FedGH, Fig. 3; CCVR, Table 2"),
    "classes-per-client": ("non-IID degree", "classes per client", "FedGH, Fig. 3"),
    "fraction-train": ("participation", "share of clients in a round", "FedGH, Fig. 4"),
    "clients": ("number of clients", "clients", "CCVR, Table 4"),
    "local-epochs": ("local epochs", "local epochs", ""),
}
"""What a sweep over a run-config key is called, its axis, and its source."""


def _against(label: str, points: Iterable[tuple[float, float]]) -> list[Curve]:
    """Return the curve of scores against a setting, or none where there are not two values."""
    curve = _mean(label, pd.DataFrame(points, columns=["x", "y"], dtype=float))
    return [curve] if len(curve.x) > 1 else []


def _sweep_lines(groups: Mapping[str, Runs], value: Callable[[RunResult], float]) -> dict[str, list[Curve]]:
    """Last accuracy against a setting, {protocol: curves}, a curve a group of runs."""
    panels = {}
    for p in PROTOCOL_TEXT:
        curves = [c for label, runs in groups.items() for c in _against(label, [(value(r), r.score(p)) for r in runs])]
        if curves:
            panels[named(p)] = curves
    return panels


def sweeps(runs: Runs, key: str) -> list[Drawing]:
    """Last accuracy against a setting in which runs differ; a figure for each setting of everything else."""
    values = {str(r.flat.get(key)) for r in runs}
    if len(values) < 2:
        raise Unavailable(
            f"all runs have {key} = {next(iter(values), '-')}",
            f"fedapp run --set {key}=VALUE --out DIR/NAME for several values, then fedapp report DIR",
        )
    what, axis, source = SWEEPS[key]
    counted = " Received and global count all clients, trained those of the last round."
    groups: dict[str, list[RunResult]] = {}
    for run in runs:
        if uses(run, key):
            rest = {k: v for k, v in run.setting.items() if k != key}
            groups.setdefault(setting_text(rest), []).append(run)
    drawings: list[Drawing] = []
    for name, members in groups.items():
        panels = _sweep_lines(_by_method(members), lambda r: float(r.flat[key]))
        if panels:
            said = "; ".join(
                f"{p}, {c.label}: " + ", ".join(f"{percent(m)} at {v:g}" for v, m in zip(c.x, c.mean))
                for p, lines in panels.items()
                for c in lines
            )
            drawings.append(
                Drawing(
                    f"sweep-{key}" + (f"-{len(drawings)}" if drawings else ""),
                    f"Accuracy against {what}" + (f": {name}" if name else ""),
                    "After the last round; error bars: one standard deviation over seeds."
                    f"{'' if what == 'non-IID degree' else counted}{_alone(members)}",
                    f"Line charts of accuracy against {key}. {said}.",
                    plots.sweep(panels, axis, log=key == "alpha"),
                    source,
                )
            )
    if not drawings:
        raise Unavailable(f"no method was run with two values of {key} and all else equal")
    return drawings


def non_iid(runs: Runs) -> list[Drawing]:
    """Accuracy against classes per client, or against the Dirichlet concentration, whatever the runs vary."""
    varied = [
        key for key in ("classes-per-client", "alpha") if len({str(r.flat.get(key)) for r in runs if uses(r, key)}) > 1
    ]
    if not varied:
        raise Unavailable(
            "all runs have the same non-IID degree (alpha, classes-per-client)",
            "fedapp compare --partitions dirichlet:0.1,dirichlet:0.5,dirichlet:5 ...",
        )
    return [drawing for key in varied for drawing in sweeps(runs, key)]


def hyperparameters(runs: Runs) -> list[Drawing]:
    """Accuracy, and for cwFedAvg the distance R, against a numeric hyperparameter in which runs of a method differ."""
    drawings: list[Drawing] = []
    for setting, members in groups_of(runs):
        for method in dict.fromkeys(r.method for r in members):
            own = [r for r in members if r.method == method]
            for name in sorted({n for r in own for n in _arguments(r)}):
                chosen = [r for r in own if name in _arguments(r)]
                suffix = f"-{len(drawings)}" if drawings else ""
                drawings += _hyperparameter(method, name, chosen, setting_text(setting), suffix)
    if not drawings:
        raise Unavailable(
            "no method was run with several values of a hyperparameter",
            "fedapp compare --methods 'cwfedavg(lam=0),cwfedavg(lam=1),cwfedavg(lam=10)' ...",
        )
    return drawings


def _hyperparameter(method: str, name: str, runs: Runs, where: str, suffix: str) -> list[Drawing]:
    """Draw accuracy, and R where there is one, against a hyperparameter; nothing where it has one value."""
    given = [_arguments(r)[name] for r in runs]
    panels = _sweep_lines({method: runs}, lambda r: _arguments(r)[name])
    log = min(given) > 0 and max(given) / min(given) >= 20
    source = "cwFedAvg, Fig. 5" if (method, name) == ("cwfedavg", "lam") else ""
    title = f"{method}: {name}" + (f", {where}" if where else "")
    drawings = []
    if panels:
        said = "; ".join(f"{p} {percent(lines[0].mean.max())} at best" for p, lines in panels.items())
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
    for distance in _against(method, [(v, _last_wdr(r)) for v, r in zip(given, runs)]):
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


def _arguments(run: RunResult) -> dict[str, float]:
    """Return the run's own values of numeric hyperparameters."""
    given = dict(a.partition("=")[::2] for a in str(run.flat.get("method-args", "")).split())
    numbers = pd.to_numeric(pd.Series(given, dtype=object), errors="coerce")
    return {str(n): float(v) for n, v in numbers.items() if math.isfinite(v)}


def _last_wdr(run: RunResult) -> float:
    values = [v for v in run.summary.get("wdr") or [] if v is not None]
    return float(values[-1]) if values else math.nan
