"""Methods against training alone: differences with intervals, clients that gain and lose, bytes, classes, curves."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pandas as pd

from fedapp.results.analysis import Unavailable
from fedapp.results.answers import Answer
from fedapp.results.figures import plots
from fedapp.results.figures.pieces import Curve
from fedapp.results.figures.scores import COMPLETED, bands, by_method, by_round, mean_curve
from fedapp.results.figures.style import Drawing
from fedapp.results.figures.words import Runs, percent
from fedapp.results.intervals import in_words
from fedapp.results.runs import PAIRED, RunResult
from fedapp.results.statistics import mean_and_std, sides, size

MEASURES = {
    "headline": ("own test rows", "The score that each method is judged by, on the clients' own test rows."),
    "headline_balanced": ("all classes", "Mean recall over all classes on all clients' test rows."),
    "received_accuracy": ("as delivered", "The received models, before local training."),
    "headline_worst_tenth": ("worst 10 %", "Each method's own worst 10 % of the clients, on own test rows."),
}
"""Measures of significance.csv with a plot: its name, and the compared score."""
MOST_METHODS = 3
"""Methods whose single clients are shown: panels stand next to each other."""
MOST_MARKS = 300
"""Marks of a method from which on a plot of all seeds shows one method."""
MOST_CLIENTS = 100
"""Clients with a row of their own at most: those at both ends of the order."""
SHARES = (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
"""Edges of the shares of a client's training rows by which classes are grouped."""


def _titled(title: str, name: str) -> str:
    return f"{title}: {name}" if name else title


def differences(runs: Runs, answer: Answer, name: str, suffix: str) -> Iterator[Drawing]:
    """Draw the differences of all methods to the reference, a plot for each measure that was compared."""
    if answer.seeds == 1:
        raise Unavailable("one seed has no differences", "fedapp compare ... --seeds 3")
    for measure, (title, text) in MEASURES.items():
        if not (tests := answer.tests.get(measure)):
            continue
        if answer.test_data == "central":
            title, text = (
                words.replace("clients' own", "central").replace("own", "central") for words in (title, text)
            )
        finished = {*answer.methods, answer.alone}
        order = [*answer.called, *filter(None, [answer.alone])]
        known = {v: tests[v] for v in order if v in tests and v in finished}
        rows = {answer.name(v): known.get(v, "failed") for v in order if v in known or v not in finished}
        paired = f" {PAIRED}" if measure == "received_accuracy" and answer.reference == answer.alone else ""
        said = "; ".join(f"{answer.name(v)} {in_words(row)}" for v, row in known.items())
        yield Drawing(
            f"forest-{measure}{suffix}",
            _titled(title[:1].upper() + title[1:], name),
            text
            + paired
            + (" Intervals hold for all methods of the plot together, at 95 %." if answer.seeds > 2 else ""),
            f"Differences to {answer.name(answer.reference)} in points. {said}.",
            plots.forest(rows, answer.name(answer.reference)),
        )


def _clients(runs: Runs) -> tuple[dict[str, list[tuple[RunResult, pd.DataFrame]]], int]:
    """Return each method's runs with what its clients gain against training alone, and the number of seeds."""
    alone = {(r.seed, r.data_seed): r.headline_counts() for r in reversed(runs) if r.alone}
    if not alone:
        raise Unavailable("no run of training alone", "fedapp compare --methods local,...")
    found: dict[str, list[tuple[RunResult, pd.DataFrame]]] = {}
    for run in runs:
        if not run.alone and (run.seed, run.data_seed) in alone:
            table = sides(run.headline_counts(), alone[run.seed, run.data_seed])
            if len(table):
                rows = run.final.set_index("client")["num_samples"]
                found.setdefault(run.label, []).append((run, table.assign(rows=rows)))
    if not found:
        raise Unavailable("no client has test rows with a method and alone")
    return found, len(alone)


def _hover(run: RunResult, table: pd.DataFrame) -> list[str]:
    return [
        f"client {run.name_of(int(str(client)))}: {percent(row.alone)} alone, {percent(row.score)} with {run.label}, "
        f"{plots.SIDES[int(row.side)][0]}; {row.rows:.0f} training rows"
        for client, row in zip(table.index, table.itertuples())
    ]


def clients(runs: Runs, leader: str, name: str, suffix: str) -> Iterator[Drawing]:
    """Draw which clients gain and lose, of one seed by name and of all seeds by training rows, for a few methods."""
    found, seeds = _clients(runs)
    first = [label for label in (leader, *found) if label in found]
    shown = [label for label in found if label in list(dict.fromkeys(first))[:MOST_METHODS]]
    lead = found[first[0]][0]
    order = (lead[1]["score"] - lead[1]["alone"]).sort_values(ascending=False, kind="stable").index
    half = MOST_CLIENTS // 2
    ends = order.delete(np.arange(half, max(half, len(order) - half)))
    panels, told = {}, []
    for label in shown:
        run, t = next((pair for pair in found[label] if pair[0].seed == lead[0].seed), found[label][0])
        told.append(f"{label} {(t.side > 0).sum()} gain, {(t.side == 0).sum()} same, {(t.side < 0).sum()} lose")
        t = t.reindex(ends).dropna()
        panels[label] = t, _hover(run, t)
    more = f" The first {len(shown)} of {len(found)} methods." if len(found) > len(shown) else ""
    more += f" The first and the last {half} of {len(order)} clients." if len(order) > len(ends) else ""
    yield Drawing(
        f"clients-alone{suffix}",
        _titled("Clients with each method and alone", name),
        f"Seed {lead[0].seed}{f' of {seeds} seeds' if seeds > 1 else ''}, sorted by the gain with {lead[0].label}."
        f"{more} The same: within one standard error of the difference, or one test row.",
        f"Dot chart of {len(ends)} clients. {'; '.join(told)}.",
        plots.clients_alone(panels, {c: lead[0].name_of(int(str(c))) for c in ends}),
    )
    every = {
        label: (pd.concat([t for _, t in found[label]]), [text for pair in found[label] for text in _hover(*pair)])
        for label in (shown if seeds * len(order) <= MOST_MARKS else first[:1])
    }
    least, most = (f(t["rows"].agg(f.__name__) for t, _ in every.values()) for f in (min, max))
    yield Drawing(
        f"gain-by-rows{suffix}",
        _titled("Gain by training rows", name),
        "When is training alone enough? A mark is a client of one seed; above the line the method is better for it.",
        f"Scatter plot of gains against {least:.0f} to {most:.0f} training rows.",
        plots.gain_by_rows(every),
    )


def bytes_of(runs: Runs, name: str, suffix: str) -> Iterator[Drawing]:
    """Draw each method's headline against the bytes that a client exchanges in a round."""
    found, lines = {}, {}
    for label, members in by_method(runs).items():
        score, _ = mean_and_std(r.score(r.headline) for r in members)
        moved, _ = mean_and_std((r.bytes_up or 0) + (r.summary.get("bytes_down") or 0) for r in members)
        if members[0].alone:
            lines[f"{label}, {percent(score)}"] = score
        elif not math.isnan(score) and moved > 0:
            found[label] = moved, score, f"{label}: {percent(score)}, {size(moved)}"
    if not found:
        raise Unavailable("no method exchanges anything and has a score")
    yield Drawing(
        f"traffic{suffix}",
        _titled("Accuracy against bytes", name),
        "The score that each method is judged by, mean over seeds, and the bytes of the arrays that a client sends and "
        "receives in a round, or once without rounds.",
        f"Scatter plot. {'; '.join(text for *_, text in found.values())}.",
        plots.points(found, lines, "bytes per client and round, both ways"),
        "FedGH, Table 3",
    )


def recall(runs: Runs, name: str, suffix: str) -> Iterator[Drawing]:
    """Draw the recall of classes by their share of the client's training rows, over all clients."""
    lines = []
    for label, members in by_method(runs).items():
        points = []
        for run in (r for r in members if r.headline in r.confusions and r.counts.size):
            matrices = np.maximum(run.confusions[run.headline], 0)  # a client without this score has -1
            held = run.counts[run.confusions["client"]]
            share = held / np.maximum(held.sum(axis=1, keepdims=True), 1)
            rows, right = matrices.sum(axis=2), np.diagonal(matrices, axis1=1, axis2=2)
            group = np.digitize(share, SHARES[1:])
            for number in np.unique(group[rows > 0]):
                here = (group == number) & (rows > 0)
                points.append((float(share[here].mean()), number, right[here].sum() / rows[here].sum()))
        if points:
            table = pd.DataFrame(points, columns=["share", "group", "recall"]).groupby("group").mean()
            lines.append(Curve(label, 100 * table["share"].to_numpy(), table["recall"].to_numpy()))
    if not lines:
        raise Unavailable("the runs kept no confusion matrices", "fedapp compare ... --set metrics=accuracy,confusion")
    yield Drawing(
        f"recall{suffix}",
        _titled("Recall by the share of a class", name),
        "Classes of all clients, grouped by their share of the client's training rows; recall on own test rows.",
        "Line chart. " + "; ".join(f"{c.label} {percent(c.mean[0])} to {percent(c.mean[-1])}" for c in lines) + ".",
        plots.curves({"": lines}, xlabel="share of the client's training rows in %", ylabel="recall"),
    )


def curves(runs: Runs, name: str, suffix: str) -> Iterator[Drawing]:
    """Draw each method's headline by completed rounds, less that of training alone after as many."""
    alone = {(r.seed, r.data_seed): by_round(r, "trained") for r in reversed(runs) if r.alone}
    if len(alone) == 1:
        raise Unavailable("one seed has no differences", "fedapp compare ... --seeds 3")
    lines = []
    for label, members in by_method(runs).items():
        tables = []
        for run in members:
            if not run.alone and (run.seed, run.data_seed) in alone:
                tables.append((100 * (by_round(run, run.headline) - alone[run.seed, run.data_seed])).dropna())
        if tables and len(table := pd.concat(tables)):
            lines.append(mean_curve(label, table.reset_index()))
    if not lines and alone:
        raise Unavailable("no method was scored by round")
    if not lines:
        raise Unavailable("no run of training alone to compare curves with", "fedapp compare --methods local,...")
    ends = "; ".join(f"{c.label} {c.mean[-1]:+.1f}" for c in lines)
    yield Drawing(
        f"curves-difference{suffix}",
        _titled("Difference to training alone by round", name),
        f"The score that each method is judged by, less training alone after as many completed rounds{bands(runs)}.",
        f"Line chart. At the end, in points: {ends}.",
        plots.curves(
            {"": lines}, xlabel=COMPLETED, ylabel="points", percent=False, floor=None,
            baseline=("training alone", 0.0, ""), band=bands(runs).removeprefix("; bands: "),
        ),
    )  # fmt: skip
