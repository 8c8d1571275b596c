"""Norms of the rows of heads: by round, by batch, after further training, and of class-specific models.

| symbol (cwFedAvg) | here                                   |
|-------------------|----------------------------------------|
| p_i               | `label_shares`                         |
| p~_i (Eq. 4)      | `norm_distribution` of a client's head |

Every function takes a run and raises `Unavailable` where its directory lacks what is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedapp.learning.state import read_head_norms
from fedapp.learning.training import Batch
from fedapp.method import Payload
from fedapp.results.analysis import (
    Unavailable,
    client_arrays,
    client_folders,
    config_of,
    method_of,
    server_state,
)
from fedapp.results.runs import RUN_MARK, RunResult
from fedapp.results.statistics import Floats, Ints
from fedapp.tasks import simulated as tasks
from reproduction.analysis.models import data_of, global_arrays, initial_arrays


def head_norm_history(run: RunResult) -> dict[int, tuple[Ints, Floats]]:
    """Return the row norms of the clients' heads over rounds: {client: (rounds (T,), norms (T, C))}.

    Each client records them beside its own state, on its own disk. They are never sent.
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

    Every client is trained once more, as in the round after the last.

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
