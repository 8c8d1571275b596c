"""What the clients' heads say: norms of their rows, and who learns from whom.

| symbol (cwFedAvg)     | here                                                         |
|-----------------------|--------------------------------------------------------------|
| p_i                   | `analysis.label_shares`                                      |
| p~_i (Eq. 4)          | `norm_distribution` of a client's head                       |
| A = p~ Q^T (Eq. 6, 7) | `who_learns_from_whom`                                       |

Every function takes a run and raises `Unavailable` where its directory lacks what is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedapp import sampling
from fedapp.learning.state import read_head_norms
from fedapp.learning.task import ModelSpec
from fedapp.learning.training import Batch
from fedapp.method import Payload
from fedapp.results.analysis import (
    Unavailable,
    client_arrays,
    client_folders,
    config_of,
    counts_of,
    data_of,
    global_arrays,
    method_of,
    server_state,
)
from fedapp.results.runs import RUN_MARK, RunResult
from fedapp.results.statistics import Floats, Ints
from fedapp.tasks import simulated as tasks


def head_norms(run: RunResult) -> tuple[list[int], Floats]:
    """Return client ids, and the L2 norms of the rows of their heads (K, C) after the last local training."""
    stored = client_arrays(run)
    rows = [np.linalg.norm(a["model/head.weight"].astype(np.float64), axis=1) for _, a in stored.values()]
    return list(stored), np.stack(rows)


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
    config, (method, hparams), data = config_of(run), method_of(run), data_of(run)
    seed = sampling.derived_seed(config.seed, "server-model", 0)
    spec = ModelSpec(config.model_of(client), data.dataset.num_classes, data.inputs.channels, data.inputs.size, seed)
    initial = method.client.initial_arrays(spec, method, hparams, config.buffers)
    norms = _trained_again(run, client, Payload(common=initial), 1)
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
    """Return the row norms of the K class-specific global models' heads (cwFedAvg, Eq. 5): (K, C), a row a model.

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


Mixture = tuple[list[int], Floats, str]
"""Client ids, A (K, K) with rows that sum to 1, and a phrase that says what is shared and how A was found."""


def who_learns_from_whom(run: RunResult) -> Mixture:
    """Return A (K, K), where A[i, j] is the share of client j in what client i receives next.

    Raises
    ------
    Unavailable : the method sends one model to all clients, or none.
    """
    state = server_state(run)
    find = {
        "cwfedavg": _cwfedavg_weights, "fedamp": _fedamp_weights, "fedfomo": _fedfomo_weights, "ktpfl": _ktpfl_weights,
        "ifca": _cluster_weights, "cfl": _cluster_weights,
    }.get(run.method)  # fmt: skip
    if find is None:
        raise Unavailable(
            f"{run.method} keeps no weights of clients for each other",
            "fedapp run --method cwfedavg ... (or fedamp, fedfomo, ktpfl, ifca, cfl)",
        )
    return find(run, state)


def _cwfedavg_weights(run: RunResult, state: Mapping[str, Any]) -> Mixture:
    """A = p~ Q^T (cwFedAvg, Eq. 6 and 7) from the uploads of the last round."""
    from fedapp.core.classwise import class_weights, mixing_matrix, norm_distribution

    sizes, stored = counts_of(run).sum(axis=1), client_arrays(run)
    ids, last = list(stored), max(r for r, _ in stored.values())
    pt = np.stack([norm_distribution(a["model/head.weight"]) for _, a in stored.values()])
    uploaded = [i for i, c in enumerate(ids) if stored[c][0] == last]
    q = class_weights(sizes[[ids[i] for i in uploaded]].astype(np.float64), pt[uploaded])
    matrix = np.zeros((len(ids), len(ids)))
    matrix[:, uploaded] = mixing_matrix(pt, q)
    return ids, matrix, "of the class-wise layers, from the row norms of the last heads (cwFedAvg, Eq. 4, 6 and 7)"


def _fedamp_weights(run: RunResult, state: Mapping[str, Any]) -> Mixture:
    """FedAMP's attention over the uploads of the last round."""
    from strategies.fedamp import attention

    _, hparams = method_of(run)
    stored = client_arrays(run)
    last = max(r for r, _ in stored.values())
    ids = [c for c, (r, _) in stored.items() if r == last]
    models = [{n: stored[c][1][f"model/{n}"] for n in state["initial"]} for c in ids]
    return ids, np.asarray(attention(models, hparams), dtype=np.float64), "attention of the last round's participants"


def _fedfomo_weights(run: RunResult, state: Mapping[str, Any]) -> Mixture:
    """FedFomo's table P, its positive part by rows."""
    kept = np.maximum(np.asarray(state["P"], dtype=np.float64), 0)
    total = kept.sum(axis=1, keepdims=True)
    matrix = np.where(total > 0, kept / np.where(total > 0, total, 1), np.eye(len(kept)))
    how = "positive weights that clients gave to each other's models so far; a client without any has its own"
    return [int(c) for c in state["ids"]], matrix, how


def _ktpfl_weights(run: RunResult, state: Mapping[str, Any]) -> Mixture:
    """KT-pFL's knowledge coefficients."""
    c = np.asarray(state["c"], dtype=np.float64)
    matrix = c / c.sum(axis=1, keepdims=True)
    return [int(k) for k in state["ids"]], matrix, "knowledge coefficients: predictions, not models"


def _cluster_weights(run: RunResult, state: Mapping[str, Any]) -> Mixture:
    """IFCA's last choices and CFL's members: within a cluster by sample counts."""
    if run.method == "cfl":
        cluster = {int(c): j for j, members in state["members"].items() for c in members}
    else:
        cluster = {int(c): int(j) for c, j in state["chosen"].items()}
    if not cluster:
        raise Unavailable("no client has a cluster yet", f"fedapp run --resume {run.out}")
    ids = sorted(cluster)
    together = np.array([[cluster[i] == cluster[j] for j in ids] for i in ids])
    weights = together * counts_of(run).sum(axis=1)[ids]
    matrix = weights / weights.sum(axis=1, keepdims=True)
    return ids, matrix, f"{len(set(cluster.values()))} clusters, within them by sample counts"
