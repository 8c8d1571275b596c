"""cwFedAvg + WDR. Lee and Choi, Class-Wise Federated Averaging for Efficient Personalization, ICCV 2025.

| symbol (paper)      | here                                                                               |
|---------------------|------------------------------------------------------------------------------------|
| p~_ij               | state["pt"][i] (K,), from client i's last upload; 1/K if it never uploaded         |
| p_i = n_i / n       | reply.num_samples (n cancels in Eq. 6)                                             |
| Theta, q_ij         | state["rows"] and state["q"]: models of the last round and their class weights     |
| w_j^G = g_j         | formed only for more than K uploads: state["rows"] are then the g_j                |
| w_i^L = theta_i     | what `send` returns                                                                |
| C^t                 | the clients that replied                                                           |

Algorithm 1, round t:
line 6, Eq. 7:  theta_i = sum_j p~_ij g_j                  (`send`, each client its own model)
line 8, Eq. 4:  p~_ij = ||W_i,j|| / sum_k ||W_i,k||        (from the uploaded head; nothing but the model is sent)
line 9, Eq. 5:  g_j = sum_i q_ij theta_i   over C^t
        Eq. 6:  q_ij = n_i p~_ij / sum_i' n_i' p~_i'j.
For at most K uploads, lines 9 and 6 together are one product, theta_i = (p~_i Q^T) Theta. For more uploads, Q^T Theta
comes first: it needs less memory, and from 2K uploads on less work too.
Layers that are not in `layers` are averaged as in FedAvg. With `share=head` theta_i is the head alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.cwfedavg import CwFedAvgClient, CwFedAvgHParams, classwise_names
from fedapp.core.classwise import Uploads, class_globals, class_weights, mix, norm_distribution, weakly_held
from fedapp.learning.metrics import mean, tidy
from fedapp.method import HEAD, Arrays, Blend, Method, Payload, Reply, Scored, ServerContext, ServerState
from fedapp.reduce.spec import Each, Mean, Reduced
from strategies.base import Strategy

Float64 = NDArray[np.float64]
TOGETHER = 128
"""Clients whose models are computed in one product. All payloads of a round are in memory anyway."""


class CwFedAvg(Strategy):
    """One global model per class, blended for each client by the class distribution of its own head."""

    records = ("wdr",)

    def init(self, context: ServerContext) -> ServerState:
        """Return the first state (lines 1 and 2): every g_j is the one initial model, every p~_i is 1/K."""
        self.context = context
        names = self._names()
        return {
            "common": {n: a for n, a in context.initial.items() if n not in names},
            "rows": {0: {n: context.initial[n] for n in names}},
            "q": np.ones((1, context.num_classes)),
            "share": {},  # q_i of every client whose model is part of the g_j: what `blend` reads
            "pt": {},  # a client that is not in it has p~_ij = 1/K
            "wdr": np.zeros(0),
        }

    def _names(self) -> list[str]:
        return classwise_names(self.hparams.layers, list(self.context.initial))

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        """Return theta_i (line 6); arrays that are the same for all clients travel once."""
        return next(self.send_each(state, server_round, [client]))[1]

    def send_each(self, state: ServerState, server_round: int, clients: Iterable[int]) -> Iterator[tuple[int, Payload]]:
        """Yield theta_i of every client; `TOGETHER` of them are rows of one product (P Q^T) Theta."""
        rows, even = _rows(state), np.full(self.context.num_classes, 1 / self.context.num_classes)
        queue = iter(clients)
        while group := list(itertools.islice(queue, TOGETHER)):
            if len(rows) == 1:  # before the first upload, or after a single one, every g_j is this model
                yield from ((c, Payload(common={**state["common"], **rows[0]})) for c in group)
            else:
                # Eq. 7 and 5 for the whole group: (P Q^T) Theta, one row of P for each client.
                models = mix(rows, np.stack([state["pt"].get(c, even) for c in group]), state["q"])
                yield from ((c, Payload(arrays=m, common=state["common"])) for c, m in zip(group, models))

    def check(self, state: ServerState, reply: Reply) -> str | None:
        """Refuse a head or a distribution that says nothing about classes."""
        if self.hparams.dist == "approx":
            zero = not np.any(reply.arrays["head.weight"])
            return "all rows of the head are zero: their norms say nothing about classes" if zero else None
        p = reply.arrays.get("distribution")
        if p is None:
            return "distribution missing: dist=empirical needs the clients' label distributions"
        if p.shape != (self.context.num_classes,) or (p < 0).any() or abs(float(p.sum()) - 1) > 0.01:
            return f"distribution must hold {self.context.num_classes} shares that sum to 1"
        return None

    def update(self, state: ServerState, server_round: int, reduced: Reduced) -> ServerState:
        """Take p~ from the uploads and form Q over the clients that answered (lines 8 and 9)."""
        names, classes = self._names(), self.context.num_classes
        pt, uploads, given = dict(state["pt"]), Uploads(classes), dict[int, tuple[float, Float64]]()
        distances: list[float] = []
        for reply, n, p in reduced.shares():  # n_i and p~_i of Eq. 6
            pt[reply.client] = distribution(self.hparams, reply.arrays)  # line 8, for Eq. 7
            given[reply.client] = n, p
            # Under Ray an array is a view into the whole reply, and would keep all of it in the object store.
            uploads.add({name: reply.arrays[name].copy() for name in names}, n, p)
            distance = reply.metrics.get("wdr")
            distances.append(float(distance) if isinstance(distance, (int, float)) else np.nan)
        rows = uploads.models
        if not rows:
            return {**state, "wdr": np.append(state["wdr"], np.nan)}
        q = class_weights(uploads.n, uploads.p)  # Eq. 6
        sizes, shares = zip(*given.values())
        share, earlier = dict(zip(given, class_weights(np.array(sizes), np.stack(shares)))), state["share"]
        # A weakly held class keeps its g_j of the round before: one more row, with the whole weight of that class.
        for j in np.flatnonzero(weakly_held(uploads.n, uploads.p, self.hparams.tau)):
            rows.append(class_globals(_rows(state), state["q"][:, [j]])[0])
            for c in {*share, *earlier}:
                share.setdefault(c, np.zeros(classes))[j] = earlier[c][j] if c in earlier else 0
            q[:, j] = 0
            q = np.vstack([q, np.eye(classes)[j]])
        if len(rows) > classes:
            rows, q = class_globals(rows, q), np.eye(classes)  # Eq. 5
        return {
            "common": reduced.arrays("common"),
            "rows": dict(enumerate(rows)),
            "q": q,
            "share": share,
            "pt": pt,
            "wdr": np.append(state["wdr"], mean(distances)),
        }

    def blend(self, state: ServerState, sizes: Mapping[int, float]) -> Blend | None:
        """Return A = P Q^T (Eqs. 6 and 7), for every client that has sent a model.

        Rows sum to less than 1 only where a class that no client has held yet (`tau`) still has the initial model.
        """
        ids, share = sorted(state["pt"]), state.get("share", {})  # a checkpoint of version 0.1 has none
        if not share:
            return None
        q = np.stack([share.get(c, np.zeros_like(next(iter(share.values())))) for c in ids])
        how = "of the class-wise layers, from the row norms of the last heads (cwFedAvg, Eq. 4, 6 and 7)"
        return ids, np.stack([state["pt"][c] for c in ids]) @ q.T, how

    def report(self, state: ServerState, final: Scored) -> dict[str, Any]:
        """Return the mean of R after training in every round, and which layers are class-wise."""
        layers = dict.fromkeys(n.rsplit(".", 1)[0] for n in self._names())
        return {"wdr": [tidy(v) for v in state["wdr"].tolist()], "classwise_layers": list(layers)}


def distribution(hparams: CwFedAvgHParams, arrays: Arrays) -> Float64:
    """Return p~_i (K,) of an upload (Eq. 4), or the client's true p_i in the ablation."""
    if hparams.dist == "approx":
        return norm_distribution(arrays["head.weight"])
    sent = arrays["distribution"].astype(np.float64)
    p: Float64 = sent / sent.sum()
    return p


def class_models(state: ServerState) -> list[Arrays]:
    """Return the K class-specific global models g_j (Eq. 5), their class-wise layers alone."""
    return class_globals(_rows(state), state["q"])


def _rows(state: ServerState) -> list[Arrays]:
    """Return Theta: the class-wise parts of the models that the state holds, in the order of Q's rows."""
    return [state["rows"][i] for i in range(len(state["rows"]))]


def _resolve(hparams: CwFedAvgHParams, lookup: Callable[[str], Method]) -> Method:
    """Only the ablation may send label distributions; bodies that do not travel may differ."""
    method = dataclasses.replace(METHOD, extra_up=("distribution",)) if hparams.dist == "empirical" else METHOD
    if hparams.share == "all":
        return method
    return dataclasses.replace(
        method, shared=HEAD, heterogeneous=True, travels="the head, both ways; each client gets its own"
    )


def _warn(hparams: CwFedAvgHParams, optimizer: str, augment: str) -> str | None:
    if hparams.dist == "empirical":
        return (
            "dist=empirical: every client sends its label distribution to the server, which cwFedAvg is made to avoid"
        )
    return None


METHOD = Method(
    id="cwfedavg",
    title="cwFedAvg + WDR",
    paper="Lee and Choi, ICCV 2025",
    strategy=CwFedAvg,
    client=CwFedAvgClient,
    hparams=CwFedAvgHParams,
    travels="the whole model, both ways; each client gets its own",
    reduces=lambda hparams: {
        "train": {
            "common": Mean(lambda context, state: state["common"]),
            "uploads": Each(
                share=functools.partial(distribution, hparams), least="" if hparams.dist == "empirical" else None
            ),
        }
    },
    resolve=_resolve,
    columns=("cross-entropy",),
    metrics=("wdr",),
    warn=_warn,
)
