"""Scores of a run and of a comparison: curves, and sweeps over settings and hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pandas as pd

from fedapp.registry import method_title
from fedapp.results.analysis import Unavailable
from fedapp.results.figures import plots
from fedapp.results.figures.pieces import Curve
from fedapp.results.figures.style import Drawing
from fedapp.results.figures.words import Runs, Words, alone, named, percent, setting_text, unfinished
from fedapp.results.runs import PROTOCOL_TEXT, RunResult, groups_of, uses
from fedapp.results.statistics import mean_and_std

# ---- scores of a run -------------------------------------------------------------------------------------------------


def _protocol_curves(run: RunResult, what: str) -> list[Curve]:
    """Curves of a run by protocol: `what` is accuracy (bands: standard deviation over clients) or balanced."""
    curves = []
    for p in run.protocols:
        shown = run.curve(p).dropna(subset=[what])
        if len(shown) > (what != "accuracy"):  # one balanced score makes no curve
            band = shown["std"].to_numpy(float) if what == "accuracy" and p != "global" else None
            curves.append(Curve(named(p), shown["completed"].to_numpy(float), shown[what].to_numpy(float), band))
    return curves


COMPLETED = "completed rounds"
"""The x axis of learning curves."""


def counted_clients(runs: Runs) -> str:
    """Name the clients that the points of learning curves count."""
    if not any(r.sampled for r in runs):
        return "Mean over all clients."
    if all(r.sampled and len(r.evaluations) for r in runs):
        return "Mean over all clients, each scored after every evaluation."
    return "Mean over the sampled clients of a round; the last point is over all clients, as in the tables."


def learning_curves(runs: Runs) -> Words:
    """Accuracy by round, one line per protocol; bands over clients (FedClassAvg, Figs. 4 to 7; FedGH, Fig. 2)."""
    run = runs[0]
    titles = {"accuracy": "accuracy", "balanced": "all classes: mean recall"}
    panels = {title: lines for what, title in titles.items() if (lines := _protocol_curves(run, what))}
    if "accuracy" not in panels:
        raise unfinished(run, "no round was finished")
    ends = "; ".join(
        f"{c.label} from {percent(c.mean[0])} after {c.x[0]:.0f} rounds to {percent(c.mean[-1])} after {c.x[-1]:.0f}"
        for c in panels["accuracy"]
    )
    caption = f"By completed rounds. {counted_clients(runs)} Bands: one standard deviation over clients.{alone(runs)}"
    if titles["balanced"] in panels:
        caption += " All-class scores are on all clients' test rows."
    if run.card.get("majority_mean") is not None:
        caption += " Dotted: guessing each client's majority class."
    figure = plots.curves(
        panels, baseline=guessing([run], titles["balanced"]), xlabel=COMPLETED,
        band="one standard deviation over clients",
    )  # fmt: skip
    return caption, f"Line chart of accuracy by completed rounds: {ends}.", figure


def guessing(runs: Runs, without: str) -> tuple[str, float, str] | None:
    """Name and height of the line that guessing each client's majority class makes, a mean over seeds."""
    known, _ = mean_and_std({r.seed: r.card.get("majority_mean") for r in runs}.values())
    return None if math.isnan(known) else (f"guessing each client's majority class, {percent(known)}", known, without)


def client_accuracy(runs: Runs) -> Words:
    """Accuracy of every client after the last round, sorted."""
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
        f"After the last round, on each client's own test split, sorted by {next(iter(scores)).partition(',')[0]}. "
        f"A bar joins the scores of a client.{alone(runs)}",
        f"Dot chart of {len(clients)} clients' accuracies: {spans}.",
        plots.client_scores(scores, clients, majority),
    )


def round_seconds(runs: Runs) -> Words:
    """Seconds of every round."""
    run = runs[0]
    names = {"round_seconds": "whole round", "train_seconds": "local training, mean over clients"}
    if "round_seconds" not in run.rounds:
        raise unfinished(run, "no round was finished")
    rounds = run.rounds["round"].to_numpy(float)
    lines = [Curve(n, rounds, run.rounds[c].to_numpy(float)) for c, n in names.items() if c in run.rounds]
    return (
        "Wall-clock seconds; other work of the machine counts.",
        f"Line chart: a round takes {np.median(lines[0].mean):.2f} seconds (median).",
        plots.curves({"": lines}, ylabel="seconds", height=2.2, percent=False),
    )


# ---- figures of a comparison -----------------------------------------------------------------------------------------


MOST_BANDS = 10
"""Methods up to which curves have bands."""


def by_method(runs: Runs) -> dict[str, list[RunResult]]:
    """Group runs by their labels, in the order of the runs."""
    found: dict[str, list[RunResult]] = {}
    for run in runs:
        found.setdefault(run.label, []).append(run)
    return found


def mean_curve(label: str, table: pd.DataFrame) -> Curve:
    """Mean and spread over seeds (ddof 1, 0 for one) of the second column by the first; NaN is left out."""
    x, y = table.columns
    found = table.dropna().groupby(x)[y].agg(["mean", "std"]).fillna(0)
    return Curve(label, found.index.to_numpy(float), found["mean"].to_numpy(), found["std"].to_numpy())


def by_round(run: RunResult, protocol: str, what: str = "accuracy") -> pd.Series:
    """Return the scores of a curve by completed rounds.

    After a repair of the head two scores stand at the last round; the table shows the later one.
    """
    scores = run.curve(protocol).set_index("completed")[what].dropna()
    return scores[~scores.index.duplicated(keep="last")]


def bands(runs: Runs) -> str:
    """Explain the bands of several seeds; empty for one seed, and where too many bands would overlap."""
    seeds = len({r.seed for r in runs})
    shown = seeds > 1 and len(by_method(runs)) <= MOST_BANDS
    return f"; bands: one standard deviation over {seeds} seeds" if shown else ""


def compared_curves(runs: Runs, name: str = "", suffix: str = "") -> list[Drawing]:
    """Accuracy by round, one line per method, one panel per protocol, bands over seeds; then all-class scores."""
    drawings = []
    said, title = bands(runs), f": {name}" if name else ""
    for what, heading, score, where, source in (
        (
            "accuracy", "Learning curves", "accuracy", "Received and trained are means over the clients' own test "
            "splits.", "FedClassAvg, Figs. 4 to 7; FedGH, Fig. 2",
        ),
        ("balanced", "Learning curves, all classes", "all-class score",
         "Mean recall over all classes on all clients' test rows.", ""),
    ):  # fmt: skip
        panels: dict[str, list[Curve]] = {}
        for p in PROTOCOL_TEXT:
            for label, members in by_method(runs).items():
                found = [s for r in members if p in r.protocols and len(s := by_round(r, p, what))]
                if found:
                    panels.setdefault(named(p), []).append(mean_curve(label, pd.concat(found).reset_index()))
        if panels:
            ends = "; ".join(
                f"{p}: " + ", ".join(f"{c.label} {percent(c.mean[-1])}" for c in lines) for p, lines in panels.items()
            )
            baseline = guessing(runs, named("global")) if what == "accuracy" else None
            drawings.append(
                Drawing(
                    f"curves-{what}{suffix}", heading + title,
                    f"Mean {score} by completed rounds{said}. {where} {counted_clients(runs)}{alone(runs)}",
                    f"Line charts of {score} by completed rounds. At the end: {ends}.",
                    plots.curves(
                        panels, xlabel=COMPLETED, band=said.removeprefix("; bands: "), baseline=baseline,
                    ),
                    source,
                )
            )  # fmt: skip
    if not drawings:
        raise Unavailable("no round was finished")
    return drawings


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
    curve = mean_curve(label, pd.DataFrame(points, columns=["x", "y"], dtype=float))
    return [curve] if len(curve.x) > 1 else []


def _sweep_lines(groups: Mapping[str, Runs], value: Callable[[RunResult], float]) -> dict[str, list[Curve]]:
    """Last accuracy against a setting, {protocol: curves}, one curve per group of runs."""
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
    groups: dict[str, list[RunResult]] = {}
    for run in runs:
        if uses(run, key):
            rest = {k: v for k, v in run.setting.items() if k != key}
            groups.setdefault(setting_text(rest), []).append(run)
    drawings: list[Drawing] = []
    for name, members in groups.items():
        title = f"Accuracy against {what}" + (f": {name}" if name else "")
        panels = _sweep_lines(by_method(members), lambda r: float(r.flat[key]))
        number = f"-{len(drawings)}" if drawings else ""
        drawings += _sweep(f"sweep-{key}{number}", title, axis, panels, alone(members), source, key == "alpha")
    if not drawings:
        raise Unavailable(f"no method was run with two values of {key} and all else equal")
    return drawings


def _sweep(
    name: str, title: str, axis: str, panels: Mapping[str, list[Curve]], note: str, source: str, log: bool
) -> list[Drawing]:
    """Draw last accuracy against what `axis` names; nothing without curves."""
    said = "; ".join(
        f"{p}, {c.label}: " + ", ".join(f"{percent(m)} at {v:g}" for v, m in zip(c.x, c.mean))
        for p, lines in panels.items()
        for c in lines
    )
    caption = f"After the last round, over all clients; error bars: one standard deviation over seeds.{note}"
    alt = f"Line charts of accuracy against {axis}. {said}."
    return [Drawing(name, title, caption, alt, plots.sweep(panels, axis, log=log), source)] if panels else []


def hyperparameters(runs: Runs) -> list[Drawing]:
    """Accuracy, and for cwFedAvg the distance R, against a numeric hyperparameter in which runs of a method differ."""
    drawings: list[Drawing] = []
    for setting, members in groups_of(runs):
        for method in dict.fromkeys(r.method for r in members):
            own = [r for r in members if r.method == method]
            for name in sorted({n for r in own for n in arguments(r)}):
                chosen = [r for r in own if name in arguments(r)]
                suffix = f"-{len(drawings)}" if drawings else ""
                drawings += hyperparameter(method, name, chosen, setting_text(setting), suffix)
    if not drawings:
        raise Unavailable(
            "no method was run with several values of a hyperparameter",
            "fedapp compare --methods 'cwfedavg(lam=0),cwfedavg(lam=1),cwfedavg(lam=10)' ...",
        )
    return drawings


def hyperparameter(method: str, name: str, runs: Runs, where: str, suffix: str) -> list[Drawing]:
    """Draw accuracy, and R where there is one, against a hyperparameter; nothing where it has one value."""
    given = [arguments(r)[name] for r in runs]
    panels = _sweep_lines({method_title(method): runs}, lambda r: arguments(r)[name])
    log = min(given) > 0 and max(given) / min(given) >= 20
    source = "cwFedAvg, Fig. 5" if (method, name) == ("cwfedavg", "lam") else ""
    title = f"{method_title(method)}: {name}" + (f", {where}" if where else "")
    drawings = _sweep(f"sweep-{method}-{name}{suffix}", title, name, panels, "", source, log)
    for distance in _against(method_title(method), [(v, last_wdr(r)) for v, r in zip(given, runs)]):
        drawings.append(
            Drawing(
                f"sweep-{method}-{name}-distance{suffix}", f"{title}, distance R",
                "Mean over clients of R = ||p - p~|| after the last local training.",
                f"Line chart of R against {name}, from {distance.mean[0]:.3f} to {distance.mean[-1]:.3f}.",
                plots.sweep({"": [distance]}, name, log=log, ylabel="R", percent=False), source,
            )
        )  # fmt: skip
    return drawings


def arguments(run: RunResult) -> dict[str, float]:
    """Return the run's own values of numeric hyperparameters."""
    given = dict(a.partition("=")[::2] for a in str(run.flat.get("method-args", "")).split())
    numbers = pd.to_numeric(pd.Series(given, dtype=object), errors="coerce")
    return {str(n): float(v) for n, v in numbers.items() if math.isfinite(v)}


def last_wdr(run: RunResult) -> float:
    """Return cwFedAvg's mean distance R of the last round, NaN where there is none."""
    values = [v for v in run.summary.get("wdr") or [] if v is not None]
    return float(values[-1]) if values else math.nan
