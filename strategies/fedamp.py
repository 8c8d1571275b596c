"""FedAMP. Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI
2021.

Symbols    w_i -> reply.arrays     u_i -> state["mixed"][i]     xi_ij -> `attention(...)`[i, j]     S_t -> participants
Each round, over S_t:
    u_i = sum_j xi_ij w_j,   rows of xi sum to 1
    distance (FedAMP)       xi_ij = alpha A'(||w_i - w_j||^2),  A'(x) = exp(-x / sigma) / sigma;  xi_ii = 1 - the others
    cosine (HeurFedAMP)     xi_ij = (1 - xi) e^{s cos(w_i, w_j)} / sum_{h != i} e^{s cos(w_i, w_h)};  xi_ii = xi
In the distance form nothing bounds the sum of a row's other weights; where they exceed 1 - xi they are scaled down to
that, so that no model enters with a negative weight.

Clients that are absent keep the mix that they were last given; a client that never took part gets the initial model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from clients.fedamp import FedAMPClient, FedAMPHParams
from fedapp.core import names
from fedapp.core.pairwise import combine, cosine_matrix, squared_distances
from fedapp.method import Array, Arrays, Blend, Method, Payload, ServerContext, ServerState
from fedapp.reduce.spec import Each, Reduced
from strategies.base import Strategy


def attention(models: Sequence[Arrays], hparams: FedAMPHParams) -> NDArray[np.float64]:
    """Return how much each client takes of each model.

    Parameters
    ----------
    models : m models with equal names and shapes; running statistics of normalisation layers are left out.

    Returns
    -------
    (m, m) float64, not negative, rows sum to 1.
    """
    trained = [{n: a for n, a in w.items() if not n.endswith(names.RUNNING_STATISTICS)} for w in models]
    itself: NDArray[np.bool_] = np.eye(len(models), dtype=bool)
    weights: NDArray[np.float64]
    if len(models) == 1:
        return np.ones((1, 1))
    if hparams.form == "cosine":
        logits = np.where(itself, -np.inf, hparams.scale * cosine_matrix(trained))
        # The largest of a row is subtracted, so that a sharp scale does not overflow; the quotient is the same.
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights *= (1.0 - hparams.xi) / weights.sum(axis=1, keepdims=True)
    else:
        weights = hparams.alpha * np.exp(-squared_distances(trained) / hparams.sigma) / hparams.sigma
        weights[itself] = 0.0
        total = weights.sum(axis=1, keepdims=True)
        # Scaled down only where the others' weights exceed 1 - xi; `tiny` keeps 0 / 0 away where all of them are 0.
        weights *= np.minimum(1.0, (1.0 - hparams.xi) / np.maximum(total, np.finfo(np.float64).tiny))
    weights[itself] = np.maximum(1.0 - weights.sum(axis=1), 0.0)  # rounding may leave it a little below 0
    return weights


class FedAMP(Strategy):
    """Keeps for every client a mix of all participants' models in which similar ones weigh more."""

    def init(self, context: ServerContext) -> ServerState:
        """Return the common initial model and no mix."""
        self.context = context
        return {"initial": dict(context.initial), "mixed": {}, "attention": {}}

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        """Return u_i, or the initial model to a client that never took part."""
        if client in state["mixed"]:
            return Payload(arrays=state["mixed"][client])
        return Payload(common=state["initial"])

    def update(self, state: ServerState, server_round: int, reduced: Reduced) -> ServerState:
        """Mix the participants' models: one m x m matrix, one product."""
        clients, models = [], []
        for reply in reduced.each():
            clients.append(reply.client)
            models.append({n: reply.arrays[n] for n in state["initial"]})
        if not clients:
            return state
        weights = attention(models, self.hparams)
        mixed = dict(zip(clients, combine(weights, models)))
        given = {c: {"of": np.array(clients), "weights": row} for c, row in zip(clients, weights)}
        # A mix is a view into those of its round: one that outlives the round must not hold the others.
        absent = {
            c: {n: a if a.base is None else a.copy() for n, a in mix.items()}
            for c, mix in state["mixed"].items()
            if c not in mixed
        }
        return {**state, "mixed": {**absent, **mixed}, "attention": {**state["attention"], **given}}

    def blend(self, state: ServerState, sizes: Mapping[int, float]) -> Blend | None:
        """Return the attention of the round in which each client was last given a mix."""
        given = given_weights(state.get("attention", {}))  # a checkpoint of version 0.1 has none
        return given and (*given, "attention of the round in which the client was last given a mix")


def given_weights(given: Mapping[int, Mapping[str, Array]]) -> tuple[list[int], NDArray[np.float64]] | None:
    """Return client ids and the weights (n, n) that each was given last; None where no client was given any.

    `given` holds by client the ids `of` the participants of its last round, ascending, and their `weights`.
    """
    ids = sorted(given)
    matrix = np.zeros((len(ids), len(ids)))
    for i, client in enumerate(ids):
        matrix[i, np.searchsorted(ids, given[client]["of"])] = given[client]["weights"]
    return (ids, matrix) if ids else None


METHOD = Method(
    id="fedamp",
    title="FedAMP, HeurFedAMP",
    paper="Huang et al., AAAI 2021",
    strategy=FedAMP,
    client=FedAMPClient,
    hparams=FedAMPHParams,
    head="none",
    travels="a mix of models for each client down, the whole model up",
    reduces={"train": {"models": Each(cap=False)}},
)
