"""KT-pFL. Zhang et al., Parameterized Knowledge Transfer for Personalized Federated Learning, NeurIPS 2021.

| symbol (paper)   | here                                                                     |
|------------------|--------------------------------------------------------------------------|
| c                | state["c"], (K, K), rows and columns in the order of state["ids"]        |
| s(w_k, D_r)      | state["soft"][k], (P, C): what client k last predicted                   |
| rho, lr_c        | hparams.rho, hparams.lr_c                                                |

Algorithm 1, server, with t_k = sum_l c_kl S_l, means over P * C and over K:
    J_k = mean (S_k - t_k)^2 + rho * mean_l (c_kl - 1/K)^2
    dJ_k / dc_kl = 2 mean((t_k - S_k) S_l) + 2 rho (c_kl - 1/K) / K
    c_k <- softmax(5 (c_k - 5^n_k dJ_k / dc_k))   (one step a round, all k),  then client k gets t_k of the new c.

5^n_k is the released code's step: the power of 5, n_k from -5 to 5, with which the row moves by 0.01 to 0.05 in the
mean. Predictions at temperature 10 are almost uniform, so the gradients are tiny: with a constant rate such as lr_c =
0.02 the coefficients stay where they are, and so does the softmax (step=fixed, coefficients=free: FedClassAvg's port).

With `share=weights` S_k is the vector of client k's weights ('KT-pFL +weight', FedClassAvg's Table 3).

Clients that were not drawn keep the predictions that they sent last: the public set never changes. While some client
has sent none yet, the rows are restricted to the others and scaled to the mass that they had.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.ktpfl import KTpFLClient, KTpFLHParams, KTpFLWeightsClient
from fedapp.core.distillation import problem_of
from fedapp.core.names import RUNNING_STATISTICS
from fedapp.method import ALL, NONE, Array, Blend, Method, Payload, Reply, Scored, ServerContext, ServerState
from fedapp.reduce.spec import Each, Reduced
from strategies.base import Strategy

Float64 = NDArray[np.float64]
LEAST = 1e-3
"""Least weight that a row of coefficients gives to clients with predictions."""


def gradient(c: Float64, mixed: Float64, soft: Float64, rho: float, clients: int) -> Float64:
    """dJ_k / dc_kl for all pairs.

    Parameters
    ----------
    c : (m, m) coefficients among the m clients with predictions.
    mixed, soft : (m, P * C) rows t_k and S_k.
    clients : K; m of them have sent predictions.
    """
    result: Float64 = 2 * (mixed - soft) @ soft.T / soft.shape[1] + 2 * rho * (c - 1 / clients) / clients
    return result


def self_scaled(gradients: Float64) -> Float64:
    """Return 5^n_k for each row of (m, m) gradients, (m, 1): the released code's step.

    n_k from -5 to 5 is the smallest that brings the mean absolute value of the row to 0.01 or more.
    """
    mean = np.abs(gradients).mean(axis=1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        power = np.ceil(np.log(0.01 / mean) / np.log(5))
    result: Float64 = 5.0 ** np.clip(power, -5, 5)
    return result


def mixing(c: Float64, known: NDArray[np.int64]) -> Float64:
    """Restrict rows of `c` to the columns `known` and scale them to the mass they had; all known: `c` itself."""
    if len(known) == c.shape[1]:
        return c
    kept = c[:, known]
    result: Float64 = kept * (c.sum(axis=1) / kept.sum(axis=1))[:, None]
    return result


class KTpFL(Strategy):
    """Learns who should learn from whom, and sends each client its own mixture of predictions."""

    def init(self, context: ServerContext) -> ServerState:
        """Return equal coefficients 1/K and no predictions."""
        self.context = context
        k, facts = len(context.clients), context.clients[0].common
        public = [int(facts["public-checksum"]), int(facts["public-images"])] if "public-checksum" in facts else None
        return {"ids": list(context.ids()), "c": np.full((k, k), 1 / k), "soft": {}, "public": public}

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        """Return t_k, no rows in round 1; a client that the matrix does not know gets the plain mean."""
        ids, known = state["ids"], sorted(state["soft"])
        target = np.zeros(state["soft"][known[0]].shape if known else (0, self.context.num_classes))
        if known:
            row = state["c"][[ids.index(client)]] if client in ids else np.full((1, len(ids)), 1 / len(ids))
            weights = mixing(row, np.array([ids.index(k) for k in known]))[0]
            for weight, k in zip(weights, known, strict=True):
                target += weight * state["soft"][k]
        return Payload(arrays={"target": target.astype(np.float32)})

    def check(self, state: ServerState, reply: Reply) -> str | None:
        """Refuse rows that are not probabilities, and predictions on a public set other than the common one."""
        soft, checksum = reply.arrays.get("soft"), reply.metrics.get("public-checksum")
        if soft is None or checksum is None:
            return "the predictions, or the checksum of the public set, are missing"
        if soft.ndim != 2 or soft.shape[1] != self.context.num_classes or not len(soft) or soft.dtype.kind != "f":
            return f"predictions have shape {soft.shape}, expected (rows, {self.context.num_classes})"
        if problem := problem_of(soft):
            return f"predictions {problem}"
        mine, known = [int(checksum), len(soft)], state["public"]
        if known and mine != list(known):
            return f"another public set ({mine[1]} rows) than the other clients have ({known[1]} rows)"
        return None

    def sent(self, reply: Reply) -> Array:
        """Return S_k."""
        return reply.arrays["soft"].astype(np.float32)

    def update(self, state: ServerState, server_round: int, reduced: Reduced) -> ServerState:
        """Take the new predictions and make one step on the coefficients of all clients that ever sent any."""
        soft: dict[int, Array] = dict(state["soft"])
        soft.update({r.client: self.sent(r) for r in reduced.each()})
        if not soft:
            return state
        ids, c = _grown(state["ids"], state["c"], soft)
        known = np.array([ids.index(k) for k in sorted(soft)])
        stacked = np.stack([soft[k].reshape(-1).astype(np.float64) for k in sorted(soft)])
        # One step for all k at once, from the coefficients before it; targets are mixed with those after it.
        among, rows = np.ix_(known, known), mixing(c[known], known)
        slope = gradient(c[among], rows @ stacked, stacked, self.hparams.rho, len(ids))
        c[among] -= slope * (self_scaled(slope) if self.hparams.step == "self-scaled" else self.hparams.lr_c)
        if self.hparams.coefficients == "softmax":
            from scipy.special import softmax

            c[known] = softmax(5 * c[known], axis=1)
        else:
            # A negative coefficient could make a target negative, and a divergence from that is not a number.
            c[known] = np.maximum(c[known], 0)
        # A row that has lost its weight has no mixture: it starts again.
        c[known[c[among].sum(axis=1) < LEAST]] = 1 / len(ids)
        if self.hparams.coefficients == "rows":
            c[known] /= c[known].sum(axis=1, keepdims=True)
        return {**state, "ids": ids, "c": c, "soft": soft}

    def blend(self, state: ServerState, sizes: Mapping[int, float]) -> Blend | None:
        """Return the knowledge coefficients, rows scaled to the sum 1."""
        c = np.asarray(state["c"], dtype=np.float64)
        matrix = c / c.sum(axis=1, keepdims=True)
        return [int(k) for k in state["ids"]], matrix, "knowledge coefficients: predictions, not models"

    def report(self, state: ServerState, final: Scored) -> dict[str, Any]:
        """Return the size of the public set, which every client gets once, and the mean weight of own predictions."""
        images = len(next(iter(state["soft"].values()))) if state["soft"] else 0
        facts = self.context.clients[0].common
        return {
            "public_images": images,
            "public_bytes": 4 * images if self.hparams.ship == "indices" or not images else int(facts["public-size"]),
            "self_coefficient": float(np.diag(state["c"]).mean()),
        }


class KTpFLWeights(KTpFL):
    """'+weight': the coefficients mix the clients' weights, and no images are public."""

    def check(self, state: ServerState, reply: Reply) -> str | None:
        """Accept every reply that holds the whole model, which has been checked."""
        return None

    def sent(self, reply: Reply) -> Array:
        """Return the weights as one vector (D,), in state-dict order, without statistics of BatchNorm."""
        names = [name for name in self.context.initial if not name.endswith(RUNNING_STATISTICS)]
        return np.concatenate([reply.arrays[name].astype(np.float32).ravel() for name in names])

    def report(self, state: ServerState, final: Scored) -> dict[str, Any]:
        """Return the mean weight of own models."""
        return {"self_coefficient": float(np.diag(state["c"]).mean())}


def _grown(ids: list[int], c: Float64, soft: dict[int, Array]) -> tuple[list[int], Float64]:
    """Copy c, with rows and columns for clients that joined since: these start at 1/K, the others keep their ratios."""
    grown = sorted({*ids, *soft})
    if grown == ids:
        return ids, c.copy()
    old = [grown.index(k) for k in ids]
    result = np.full((len(grown), len(grown)), 1 / len(grown))
    result[np.ix_(old, old)] = c * len(ids) / len(grown)
    return grown, result


def _chosen(hparams: KTpFLHParams, lookup: Callable[[str], Method]) -> Method:
    if hparams.share == "predictions":
        return METHOD
    return dataclasses.replace(
        METHOD, strategy=KTpFLWeights, client=KTpFLWeightsClient, shared=ALL, extra_up=(), heterogeneous=False,
        same_width=True, public_share=0.0,
    )  # fmt: skip


def _warn(hparams: KTpFLHParams, optimizer: str, augment: str) -> str | None:
    if hparams.step == "self-scaled" and "lr_c" in hparams.model_fields_set:
        return f"lr_c = {hparams.lr_c:g} has no effect on a self-scaled step: give step=fixed with it"
    return None


METHOD = Method(
    id="ktpfl",
    title="KT-pFL",
    paper="Zhang et al., NeurIPS 2021",
    strategy=KTpFL,
    client=KTpFLClient,
    hparams=KTpFLHParams,
    shared=NONE,
    extra_up=("soft",),
    heterogeneous=True,
    same_width=False,
    public_share=0.05,
    metrics=("public-checksum",),
    travels="soft predictions on a public set, both ways",
    reduces={"train": {"predictions": Each(cap=False)}},
    resolve=_chosen,
    warn=_warn,
)
