"""FedPAC. Xu, Tong, Huang, Personalized Federated Learning with Feature Alignment and Classifier Collaboration, ICLR
2023: a shared body, global class means that it is aligned to, and for each client the best combination of all heads.

| symbol (paper)    | here                                                                     |
|-------------------|--------------------------------------------------------------------------|
| theta             | `state["model"]`                                                         |
| phi_i             | `state["heads"][i]`, or `state["head"]` before client i has taken part   |
| c                 | `state["protos"]` (C, d), where `state["known"]` (C,) is 1               |
| h_i, V_i          | `reply.arrays["pac/h"]`, `reply.arrays["pac/v"]`                         |
| alpha_ij          | `combination(...)`[i, j]; `state["combined"][i]`                         |

Server, over the participants S_t:
    theta   <- sum_i n_i theta_i / sum_i n_i
    c_c     <- sum_i n_ic mu_ic / sum_i n_ic                for classes that somebody has; the others stay
    alpha_i  = argmin a^T P a,  a >= 0, sum a = 1,   P_jl = [j = l] V_j + <h_i - h_j, h_i - h_l>
    phi_i   <- sum_j alpha_ij phi_j
The second part of P is a Gram matrix, so P has no negative eigenvalue that would have to be repaired.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.fedpac import PAC, FedPACClient, FedPACHParams
from fedapp.core.collaboration import combination, pooled_means
from fedapp.core.names import under
from fedapp.core.pairwise import combine
from fedapp.method import Array, Arrays, Blend, Method, Payload, Reply, ServerContext, ServerState
from fedapp.reduce.spec import Each, Mean, Reduced
from strategies.base import Strategy
from strategies.fedamp import given_weights

Float64 = NDArray[np.float64]


class FedPAC(Strategy):
    """Averages bodies, keeps global class means, and combines the participants' heads for each of them."""

    def init(self, context: ServerContext) -> ServerState:
        """Return the initial body and head, and no class means."""
        self.context = context
        parts: tuple[Arrays, Arrays] = ({}, {})
        for name, array in context.initial.items():
            parts[name.startswith("head.")][name] = array
        protos = np.zeros((context.num_classes, context.width), np.float32)
        known = np.zeros(context.num_classes, np.uint8)
        state: ServerState = {"model": parts[0], "head": parts[1], "heads": {}, "protos": protos, "known": known}
        return {**state, "combined": {}}

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        """Return body and class means, and the client's own head."""
        means = {PAC + "proto": state["protos"], PAC + "known": state["known"]}
        return Payload(arrays=state["heads"].get(client, state["head"]), common={**state["model"], **means})

    def check(self, state: ServerState, reply: Reply) -> str | None:
        """Refuse statistics that do not fit the model or each other."""
        found = under(PAC, reply.arrays)
        classes, width = state["protos"].shape
        shapes = {"h": (classes, width), "v": (1,), "proto": (classes, width), "count": (classes,)}
        if (got := {n: a.shape for n, a in found.items()}) != shapes:
            return f"arrays under '{PAC}' have the shapes {got}, expected {shapes}"
        count = found["count"]
        if not np.issubdtype(count.dtype, np.integer) or (count < 0).any() or count.sum() != reply.num_samples:
            return f"'{PAC}count' must hold whole numbers that add up to num-examples = {reply.num_samples}"
        if any(not np.issubdtype(found[n].dtype, np.floating) for n in ("h", "v", "proto")) or found["v"][0] < 0:
            return f"'{PAC}h', '{PAC}v' and '{PAC}proto' must be floating point, and '{PAC}v' at least 0"
        return None

    def update(self, state: ServerState, server_round: int, reduced: Reduced) -> ServerState:
        """Average the bodies as they arrive; of the others keep the heads and statistics, which are small."""
        clients: list[int] = []
        heads: list[Arrays] = []
        h, v = list[Float64](), list[float]()
        found_means: list[tuple[Float64, Array]] = []

        for reply in reduced.each():
            found = under(PAC, reply.arrays)
            # `count-cap` limits num_samples alone; the class counts follow it.
            count = found["count"] * (reply.num_samples / found["count"].sum())
            found_means.append((count, found["proto"]))
            clients.append(reply.client)
            heads.append({n: reply.arrays[n] for n in state["head"]})
            h.append(found["h"].astype(np.float64).ravel())
            v.append(float(found["v"][0]))
        if not clients:
            return state
        if self.hparams.combine == "weighted":
            weights = combination(np.stack(h), np.array(v))
            mixed: Iterable[Any] = combine(weights, heads)
        else:
            weights, mixed = np.eye(len(clients)), heads
        protos, seen = pooled_means(found_means, state["protos"])
        given = {c: {"of": np.array(clients), "weights": row} for c, row in zip(clients, weights, strict=True)}
        return {
            **state,
            "model": reduced.arrays("body"),
            "heads": {**state["heads"], **dict(zip(clients, mixed, strict=True))},
            "protos": protos,
            "known": (seen | (state["known"] > 0)).astype(np.uint8),
            "combined": {**state["combined"], **given},
        }

    def blend(self, state: ServerState, sizes: Mapping[int, float]) -> Blend | None:
        """Return the weights of the heads in the round in which each client last took part."""
        given = given_weights(state["combined"])
        return given and (*given, "weights of the heads (FedPAC) in the round in which the client last took part")


METHOD = Method(
    id="fedpac",
    title="FedPAC",
    paper="Xu et al., ICLR 2023",
    strategy=FedPAC,
    client=FedPACClient,
    hparams=FedPACHParams,
    extra_up=(PAC,),
    reduces={"train": {"body": Mean(), "statistics": Each(least="", features=(PAC + "h", PAC + "proto"))}},
    travels="the body, a head for each client and class means down; the model, class means and class counts up",
)
