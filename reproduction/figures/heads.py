"""Figures of the clients' heads: norms of their rows by round, by batch and after further training, and label shares.

| symbol (cwFedAvg) | here                                   |
|-------------------|----------------------------------------|
| p_i               | `label_shares`                         |
| p~_i (Eq. 4)      | `norm_distribution` of a client's head |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedapp.learning.state import read_head_norms
from fedapp.learning.training import Batch
from fedapp.method import Payload
from fedapp.results import analysis
from fedapp.results.analysis import Unavailable, client_arrays, client_folders, config_of, method_of, server_state
from fedapp.results.figures import scores
from fedapp.results.figures.heads import cross_entropy, loss_words
from fedapp.results.figures.pieces import Array, Curve
from fedapp.results.figures.plots import curves
from fedapp.results.figures.scores import bands, by_method, mean_curve
from fedapp.results.figures.words import Runs, Words, each, percent
from fedapp.results.runs import RUN_MARK, RunResult
from fedapp.results.statistics import Floats, Ints, within_rows
from fedapp.tasks import simulated as tasks
from reproduction.figures import maps, plots
from reproduction.figures.models import data_of, global_arrays, initial_arrays


def head_norm_history(run: RunResult) -> dict[int, tuple[Ints, Floats]]:
    """Return the row norms of the clients' heads over rounds: {client: (rounds (T,), norms (T, C))}.

    Each client records them next to its own state, on its own disk. They are never sent.
    """
    found: dict[int, tuple[Ints, Floats]] = {}
    for client, folder in client_folders(run).items():
        rounds, norms = read_head_norms(folder, str(run.versions.get("run", "")))
        if len(rounds):
            found[client] = rounds, norms.astype(np.float64)
    if not found:
        raise Unavailable("the clients' records of head norms are missing", f"fedapp run {run.out / RUN_MARK}")
    return found


def _trained_again(run: RunResult, client: int, payload: Payload, server_round: int) -> Floats:
    """Train one client again; return the norms of its head's rows before every step and after the last, (T + 1, C)."""
    config, (method, hparams) = config_of(run), method_of(run)
    data_of(run)  # the partition must still be that of the run
    task = tasks.simulated_task(config, client, len(run.counts), torch.device("cpu"))
    again = method.client(task, method, hparams)
    plain, norms = again.step_loss, []

    def note() -> None:
        norms.append(again.model.head.weight.detach().double().norm(dim=1).numpy().copy())

    def step_loss(batch: Batch) -> Tensor:
        note()
        loss: Tensor = plain(batch)
        return loss

    again.step_loss = step_loss
    again.train_round(payload, server_round)
    note()
    return np.stack(norms)


def first_round(run: RunResult, client: int) -> Floats:
    """Return p~ of a client before every batch of round 1 and after the last, (T + 1, C) (cwFedAvg, Fig. 2).

    The client's first round is trained again, from the initial model of the run. Rows sum to 1.
    """
    norms = _trained_again(run, client, Payload(common=initial_arrays(run)), 1)
    shares: Floats = norms / norms.sum(axis=1, keepdims=True)
    return shares


def fine_tuned(run: RunResult) -> tuple[list[int], Floats, Floats]:
    """Return client ids, the row norms of the last global head (C,), and those after local training from it (K, C).

    Every client is trained again, as in the round after the last.

    Raises
    ------
    Unavailable : the method has no global model.
    """
    arrays = global_arrays(run, calibrated=False)
    before: NDArray[np.float64] = np.linalg.norm(arrays["head.weight"].astype(np.float64), axis=1)
    ids = list(client_arrays(run))
    rounds = int(run.rounds["round"].max()) + 1
    tuned = [_trained_again(run, c, Payload(common=arrays), rounds)[-1] for c in ids]
    return ids, before, np.stack(tuned)


def class_global_norms(run: RunResult) -> Floats:
    """Return the row norms of the K class-specific global models' heads (cwFedAvg, Eq. 5): (K, C), one row per model.

    Raises
    ------
    Unavailable : the run is not one of cwFedAvg, or averages the head as FedAvg does.
    """
    from strategies.cwfedavg import class_models

    models = class_models(dict(server_state(run))) if run.method == "cwfedavg" else []
    if not models or "head.weight" not in models[0]:
        raise Unavailable(f"{run.label} has no global models by class", "fedapp run --method cwfedavg ...")
    return np.stack([np.linalg.norm(m["head.weight"].astype(np.float64), axis=1) for m in models])


def server_bytes(run: RunResult) -> int:
    """Return the bytes of all arrays that the server keeps after the last round."""

    def size(value: Any) -> int:
        if isinstance(value, np.ndarray):
            return int(value.nbytes)
        return sum(map(size, value.values())) if isinstance(value, Mapping) else 0

    return size(server_state(run))


# ---- figures of cwFedAvg ---------------------------------------------------------------------------------------------


def batch_evolution(runs: Runs) -> Words:
    """Draw p~ by batch in a client's first round, one panel per run, and p~ against p (cwFedAvg, Fig. 2)."""
    runs = sorted(runs, key=lambda r: r.method == "cwfedavg")[:3]
    shares = analysis.label_shares(runs[0])
    client = int(runs[0].counts.sum(axis=1).argmax())  # the one with the most batches
    found = each(runs, lambda run: first_round(run, client))
    points = {}
    for run in runs:
        first = {c: n[0] for c, (t, n) in head_norm_history(run).items() if t[0] == 1}
        pt = np.stack([n / n.sum() for n in first.values()])
        points[run.label] = (analysis.label_shares(run)[list(first)], pt)
    said = "; ".join(f"{n}: R = {np.linalg.norm(p - q, axis=1).mean():.3f}" for n, (p, q) in points.items())
    steps = len(next(iter(found.values()))) - 1
    return (
        f"Share of each class in the sum of the head's row norms, p~, over the {steps} batches of the first round of "
        f"client {client}, trained again from the run's initial model; bars at the right edge: the class's share "
        "of the client's data, p. Grey: classes that the client has little or nothing of. Right: p~ against p after "
        "round 1, one mark per client and class; on the diagonal heads tell the label distribution. Mean over clients: "
        f"{said}.",
        f"Line charts of norm shares by batch, and a scatter plot of norm shares against label shares. {said}.",
        plots.batch_evolution(found, shares[client], points),
    )


def personalisation_maps(runs: Runs) -> Words:
    """Draw data, heads before and after local training, clients' heads and class models (cwFedAvg, Figs. 3 and 6)."""
    base = runs[0]
    shares, classes = analysis.label_shares(base), base.classes
    panels: dict[str, tuple[Array, str, Sequence[object]]] = {
        "training images": (base.counts.astype(float), "client", range(len(shares)))
    }
    said = {}
    order = ("fedavg", "", "cwfedavg")  # as in the paper: FedAvg first, cwFedAvg last
    ordered = sorted(runs, key=lambda r: order.index(r.method if r.method in order else ""))
    for label, (run, *_) in by_method(ordered).items():
        if run.method == "fedavg":
            ids, before, after = fine_tuned(run)
            panels[label] = (np.tile(before, (len(ids), 1)), "client", ids)
            panels[f"{label}, fine-tuned"] = (after, "client", ids)
            panels["difference"] = (after - before, "client", ids)
            said[f"{label}, difference"] = within_rows(shares[ids], after - before)
            continue
        ids, norms = analysis.head_norms(run)
        panels[label] = (norms, "client", ids)
        said[label] = within_rows(shares[ids], norms)
        if run.method == "cwfedavg" and "class models" not in panels:
            panels["class models"] = (class_global_norms(run), "global model of class", classes)
    if len(panels) < 2:
        raise Unavailable("no run has heads to draw", "fedapp compare --methods fedavg,cwfedavg ...")
    words = ", ".join(f"{name} {value:.2f}" for name, value in said.items())
    return (
        "First the training images by client and class. The others: L2 norm of each class's row of the output layer, "
        "on one scale; the difference has its own. FedAvg: the global model that all clients receive, the same after "
        "one more local training (fine-tuned), and the difference of the two. Other methods: the clients' models after "
        "their last local training. Class models: the class-specific global models of cwFedAvg, Eq. 5, one row per "
        "model. "
        f"Correlation with the class shares within clients: {words}.",
        f"Heat maps of class counts and of row norms of heads. Correlation within clients: {words}.",
        maps.named_maps(panels, classes, own=("training images", "difference")),
    )


def client_loss(runs: Runs, clients: int = 6) -> Words:
    """Draw the training loss by round of single clients, one panel per client (cwFedAvg, supplement)."""
    panels: dict[str, list[Curve]] = {}
    shown = sorted(int(c) for c in runs[0].clients["client"].unique())[:clients]
    for client in shown:
        for label, (run, *_) in by_method(runs).items():
            table = cross_entropy(run.clients[run.clients["client"] == client])
            curve = Curve(label, table["round"].to_numpy(float), table["loss"].to_numpy())
            panels.setdefault(f"client {client}", []).append(curve)
    last = [(c.label, c.mean[-1]) for lines in panels.values() for c in lines]
    ends = pd.DataFrame(last, columns=["label", "loss"]).groupby("label", sort=False)["loss"].mean()
    said = ", ".join(f"{label} {value:.2f}" for label, value in ends.items())
    return (
        f"{loss_words(runs)} Clients {', '.join(map(str, shown))}, mean over the steps of a round, first seed. "
        f"Mean of these clients in the last round: {said}.",
        f"Line charts of the training loss by round, one panel per client. Last round: {said}.",
        curves(panels, ylabel="training loss", percent=False, height=2.6),
    )


def regularisation(runs: Runs) -> Words:
    """Draw accuracy and the distance R against lambda in one figure (cwFedAvg, Fig. 5)."""
    chosen = [r for r in runs if r.method == "cwfedavg" and "lam" in scores.arguments(r)]
    if len({scores.arguments(r)["lam"] for r in chosen}) < 2:
        raise Unavailable(
            "there are not two values of lam",
            "fedapp compare --methods 'cwfedavg(lam=0),cwfedavg(lam=1),cwfedavg(lam=10)' ...",
        )
    table = pd.DataFrame(
        [(scores.arguments(r)["lam"], r.score("received"), scores.last_wdr(r)) for r in chosen],
        columns=["lam", "a", "R"],
    )  # fmt: skip
    accuracy = mean_curve("accuracy before local training", table[["lam", "a"]])
    distance = mean_curve("distance R", table[["lam", "R"]])
    x = accuracy.x
    said = "; ".join(
        f"{v:g}: {percent(a)}, R = {r:.3f}" for v, a, r in zip(x, accuracy.mean, distance.mean, strict=True)
    )
    return (
        "Accuracy of the personalised models before local training, and the mean over clients of R = ||p - p~|| after "
        f"it, in the last round, against the weight lambda of WDR{bands(chosen).replace('bands', 'error bars')}.",
        f"Line chart of accuracy and R against lambda. {said}.",
        plots.accuracy_and_distance(accuracy, distance, "lambda", log=bool(x[0] > 0 and x[-1] / x[0] >= 20)),
    )


def server_memory(runs: Runs) -> Words:
    """Draw the bytes of arrays that the server keeps between rounds (cwFedAvg, supplement)."""
    found = {label: members[0] for label, members in by_method(runs).items()}
    size = each(list(found.values()), server_bytes)
    said = ", ".join(f"{label} {n / 1e6:.2f} MB" for label, n in size.items())
    return (
        "Arrays that the server keeps after the last round, in megabytes (10^6 bytes). cwFedAvg keeps for its "
        "class-wise layers the uploads of a round or the global models of the K classes, whichever are fewer.",
        f"Bar chart of the server's memory: {said}.",
        plots.bars({label: n / 1e6 for label, n in size.items()}, "megabytes"),
    )
