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
Eq. 6 as printed takes the weights of `count` and divides by |N_j| once more, which shrinks every prototype towards zero
as more clients own its class. No published code does that, and neither does this. A class that nobody sent keeps its
prototype.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from clients.fedproto import FedProtoClient, FedProtoHParams
from fedapp.core.classmeans import problem_of
from fedapp.core.robust import class_means
from fedapp.method import NONE, Arrays, Method, Payload, Reply, Scored, ServerContext, ServerState, Sums
from strategies.base import FedStrategy


class FedProto(FedStrategy):
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

    def further(self, state: ServerState, kind: str) -> Arrays:
        """Return prototypes of all classes, as a client that has all of them sends."""
        labels = np.zeros(len(state["protos"]), np.int32)
        counts = {"counts": labels} if self.hparams.average == "count" else {}
        return {"protos": state["protos"], "labels": labels, **counts}

    def check(self, state: ServerState, reply: Reply) -> str | None:
        """Refuse malformed prototypes, and counts that are missing, not asked for, or not positive."""
        labels, counts = reply.arrays.get("labels"), reply.arrays.get("counts")
        problem = problem_of(reply.arrays.get("protos"), labels, self.context.width, self.context.num_classes)
        if problem or labels is None:
            return problem
        if (counts is not None) != (self.hparams.average == "count"):
            return f"counts are {'missing' if counts is None else 'not asked for'} with average={self.hparams.average}"
        if counts is not None and (counts.shape != labels.shape or counts.dtype.kind not in "iu" or (counts < 1).any()):
            return "counts must hold one positive whole number per class"
        if counts is not None and counts.sum() > reply.num_samples:
            return f"counts of {counts.sum()} samples from a client of {reply.num_samples}"
        return None

    def aggregate(self, state: ServerState, server_round: int, replies: Iterable[Reply]) -> ServerState:
        """Average class by class over the clients that sent it."""
        sums = np.zeros(state["protos"].shape)
        weights = np.zeros(len(sums))
        owned, nearest = dict(state["owned"]), dict(state["nearest"])
        rows = []
        for reply in replies:
            labels = reply.arrays["labels"]
            weight = reply.arrays["counts"] if self.hparams.average == "count" else np.ones(len(labels))
            if self.robust.active:
                rows.append((labels, reply.arrays["protos"], weight))
            else:
                # A check made sure that no label comes twice: fancy indexing would add only one of its rows.
                sums[labels] += weight[:, None] * reply.arrays["protos"].astype(np.float64)  # Eq. 6 without 1 / |N_j|
                weights[labels] += weight
            if not reply.members:
                owned[reply.client] = np.sort(labels).astype(np.int32)
            nearest |= nearest_of(reply.singles)
        sent = weights > 0
        protos = state["protos"].copy()
        protos[sent] = sums[sent] / weights[sent, None]
        noted: ServerState = {}
        if self.robust.active:
            found = class_means(rows, state["protos"], self.robust)
            sent, noted = found.sent, self.noted(state, found.weaker)
            protos[sent] = found.values[sent]
        return {"protos": protos, "known": state["known"] | sent, "owned": owned, "nearest": nearest, **noted}

    def report(self, state: ServerState, final: Scored) -> dict[str, Any]:
        """Return the mean accuracy of nearest-prototype prediction, as each client last measured it."""
        scores = [correct / total for correct, total in state["nearest"].values() if total]
        return {"prototype_accuracy": float(np.mean(scores)) if scores else None}


def nearest_of(replies: Iterable[Reply]) -> dict[int, list[int]]:
    """Return by client how many test images the nearest prototype classified correctly, of how many."""
    return {
        reply.client: [int(reply.metrics[f"prototype-{n}"]) for n in ("correct", "total")]
        for reply in replies
        if "prototype-total" in reply.metrics
    }


METHOD = Method(
    id="fedproto",
    title="FedProto",
    paper="Tan et al., AAAI 2022",
    strategy=FedProto,
    client=FedProtoClient,
    hparams=FedProtoHParams,
    shared=NONE,
    extra_up=("protos", "labels", "counts"),
    # With down=own the server must know which classes each client has.
    sum_only=lambda hparams: Sums(rows="protos") if hparams.down == "all" else None,
    per_class="",
    heterogeneous=True,
    metrics=("prototype-correct", "prototype-total"),
    travels="class prototypes, both ways",
)
