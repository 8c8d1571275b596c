"""FedProto. Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022.

| symbol (paper)   | here                                                                        |
|------------------|-----------------------------------------------------------------------------|
| C_i^(j)          | rows of reply.arrays["protos"], classes in reply.arrays["labels"]           |
| bar C^(j)        | state["protos"][j], where state["known"][j]                                 |
| N_j              | the clients of the round that own class j                                   |
| D_{i,j}          | reply.arrays["counts"], sent with `average=count` only                      |

Algorithm 1, server, for every class j that someone sent:
    plain:  bar C^(j) = 1 / |N_j| * sum_{i in N_j} C_i^(j)
    count:  bar C^(j) = sum_{i in N_j} |D_{i,j}| C_i^(j) / sum_{i in N_j} |D_{i,j}|
Eq. 6 as printed takes the weights of `count` and divides by |N_j| again, which shrinks every prototype towards zero
as more clients own its class. No published code does that, and neither does this. A class that no client sent keeps its
prototype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from clients.fedproto import FedProtoClient, FedProtoHParams, NearestPrototypeClient
from fedapp.method import NONE, Method, Payload, Reductions, Reply, Scored, ServerContext, ServerState
from fedapp.reduce.spec import ClassMean, Reduced
from strategies.base import Strategy


class FedProto(Strategy):
    """Averages prototypes per class and sends each client those of its own classes."""

    def init(self, context: ServerContext) -> ServerState:
        """Return no prototype yet; what round 1 sends has no rows."""
        self.context = context
        return {
            "protos": np.zeros((context.num_classes, context.width), np.float32),
            "known": np.zeros(context.num_classes, np.bool_),
            "owned": {},
            "nearest": {},
        }

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        """Return the prototypes of the client's classes, or all for a client that has not answered yet."""
        known = state["known"]
        if self.hparams.down == "own" and client in state["owned"]:
            known = known & np.isin(np.arange(len(known)), state["owned"][client])
        labels = np.flatnonzero(known).astype(np.int32)
        return Payload(arrays={"protos": state["protos"][labels], "labels": labels})

    def update(self, state: ServerState, server_round: int, reduced: Reduced) -> ServerState:
        """Take the mean of every class that somebody sent (Eq. 6 without 1 / |N_j|)."""
        mean, protos = reduced.classes("protos"), state["protos"].copy()
        protos[mean.seen] = mean.values[mean.seen]
        return {
            "protos": protos,
            "known": state["known"] | mean.seen,
            "owned": {**state["owned"], **mean.owned},
            "nearest": {**state["nearest"], **nearest_of(reduced.clients)},
        }

    def report(self, state: ServerState, final: Scored) -> dict[str, Any]:
        """Return the mean accuracy of nearest-prototype prediction, as each client last measured it."""
        scores = [correct / total for correct, total in state["nearest"].values() if total]
        return {"prototype_accuracy": float(np.mean(scores)) if scores else None}


def nearest_of(replies: Iterable[Reply]) -> dict[int, list[int]]:
    """Return by client how many test images the nearest prototype classified correctly, of how many."""
    return {
        single.client: [int(single.metrics[f"prototype-{n}"]) for n in ("correct", "total")]
        for reply in replies
        for single in reply.singles
        if "prototype-total" in single.metrics
    }


def _reductions(hparams: FedProtoHParams) -> Reductions:
    """Return the mean of every class; with `down=own` the server must know which classes each client has."""
    counts = "counts" if hparams.average == "count" else ""
    mean = ClassMean("protos", lambda context, state: state["protos"], counts, named=hparams.down == "own")
    return {"train": {"protos": mean}}


def with_inference(method: Method, hparams: Any) -> Method:
    """Return the method whose clients predict as `inference` says."""
    return dataclasses.replace(method, client=NearestPrototypeClient) if hparams.inference == "prototype" else method


def _resolve(hparams: FedProtoHParams, lookup: Callable[[str], Method]) -> Method:
    return with_inference(METHOD, hparams)


METHOD = Method(
    id="fedproto",
    title="FedProto",
    paper="Tan et al., AAAI 2022",
    strategy=FedProto,
    client=FedProtoClient,
    hparams=FedProtoHParams,
    shared=NONE,
    extra_up=("protos", "labels", "counts"),
    reduces=_reductions,
    heterogeneous=True,
    metrics=("prototype-correct", "prototype-total"),
    travels="class prototypes, both ways",
    resolve=_resolve,
)
