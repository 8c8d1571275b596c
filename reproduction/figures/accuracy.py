"""Accuracy against local epochs, rounds, settings and hyperparameters (FedClassAvg, FedGH)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from clients.base import FedClient
from fedapp.data.transforms import InputSpec
from fedapp.lazy import torch
from fedapp.learning.task import Task
from fedapp.results.analysis import Unavailable, config_of
from fedapp.results.figures import plots
from fedapp.results.figures.pieces import Array
from fedapp.results.figures.scores import (
    arguments,
    by_method,
    compared_curves,
    counted_clients,
    hyperparameter,
    mean_curve,
    sweeps,
)
from fedapp.results.figures.style import Drawing
from fedapp.results.figures.words import Runs, Words, named, percent
from fedapp.results.runs import RunResult


def epochs_done(run: RunResult, rounds: Array) -> Array:
    """Return how many local epochs a client that took part in every round has trained after each of these rounds."""
    config = config_of(run)
    method, hparams = config.method_and_hparams()
    warm_up: Any = hparams
    # Epochs depend on settings alone, so a client with any samples has them.
    x, y = torch.zeros(4, 8, 8, 1, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    inputs = InputSpec((1, 8, 8), 255.0, (0.0,), (1.0,))
    task = Task(0, 0, 2, inputs, "digits-a", x, y, x, y, train=config.training, extras={"public": x})
    client: FedClient = method.client(task, method, hparams)
    epochs = [warm_up.chosen.warmup_epochs if method.id == "fedclassavg" else 0]
    for client.round in range(1, int(rounds.max(initial=0)) + 1):
        epochs.append(client.epochs())
    return np.asarray(np.cumsum(epochs, dtype=float)[rounds.astype(int)])


def by_epochs(runs: Runs, protocol: str = "trained") -> Words:
    """Accuracy by local epochs, one line per method: KT-pFL's rounds can be longer (FedClassAvg, Figs. 4 to 7)."""
    lines = []
    for label, members in by_method(runs).items():
        tables = []
        for run in members:
            shown = run.curve(protocol)
            if len(shown):
                # A score after local training has one training more than completed rounds.
                done = epochs_done(run, shown["completed"].to_numpy() + (protocol == "trained"))
                tables.append(shown[["accuracy"]].assign(epochs=done)[["epochs", "accuracy"]])
        if tables:
            lines.append(mean_curve(label, pd.concat(tables)))
    if not lines:
        raise Unavailable(f"no run measured {protocol}", f"fedapp run --set protocols={protocol} ...")
    said = ", ".join(f"{c.label} {percent(c.mean[-1])} after {c.x[-1]:g}" for c in lines)
    return (
        f"Mean accuracy ({named(protocol)}) on the clients' own test splits by local epochs of a client that takes "
        f"part in every round; bands: one standard deviation over seeds. {counted_clients(runs)}",
        f"Line chart of accuracy by local epochs: {said}.",
        plots.curves({"": lines}, xlabel="local epochs", band="one standard deviation over seeds"),
    )


def by_round(runs: Runs) -> Words:
    """Accuracy by round, one line per method, one panel per protocol (FedGH, Fig. 2)."""
    return _words(compared_curves(runs)[0])


def against(runs: Runs, key: str) -> Words:
    """Last accuracy against a setting (FedGH, Figs. 3 and 4)."""
    return _words(sweeps(runs, key)[0])


def against_hyperparameter(runs: Runs, method: str, name: str) -> Words:
    """Last accuracy of a method against one of its hyperparameters (FedGH, Fig. 5)."""
    chosen = [r for r in runs if r.method == method and name in arguments(r)]
    drawings = hyperparameter(method, name, chosen, "", "") if chosen else []
    if not drawings:
        raise Unavailable(
            f"no runs of {method} with several values of {name}",
            f"fedapp compare --methods '{method}({name}=0.01),{method}({name}=0.1)' ...",
        )
    return _words(drawings[0])


def _words(drawing: Drawing) -> Words:
    return drawing.caption, drawing.alt, drawing.figure
