"""FedBABU. Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022: only the
body is learned together, under a random head that nobody trains; each client fine-tunes at the end.

Symbols    theta_ext -> state["model"]["features.*"]     theta_cls -> state["model"]["head.*"]
Server:    theta_ext <- sum_k n_k theta_ext,k / sum_k n_k  over the participants;   theta_cls stays bit for bit.
The head travels down, so that any client has the right one, and never up. It is FedAvg on a model whose head is frozen,
bit for bit (tested).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from clients.fedbabu import BODY, FedBABUClient, FedBABUHParams
from fedapp.method import ALL, Method, Reply, ServerState, Sums
from strategies.base import FedStrategy


class FedBABU(FedStrategy):
    """The average of the participants' bodies, under the head of the beginning."""

    def aggregate(self, state: ServerState, server_round: int, replies: Iterable[Reply]) -> ServerState:
        """Return the state with the new body."""
        if self.hparams.weights == "uniform":
            replies = (dataclasses.replace(reply, num_samples=1) for reply in replies)
        model = state["model"]
        body = {name: array for name, array in model.items() if name.startswith(BODY)}
        return {**state, "model": {**model, **self.averaged(replies, body)}}


METHOD = Method(
    id="fedbabu",
    title="FedBABU",
    paper="Oh et al., ICLR 2022",
    strategy=FedBABU,
    client=FedBABUClient,
    hparams=FedBABUHParams,
    shared=ALL,
    head="names",
    up=BODY,
    sum_only=lambda hparams: Sums(hparams.weights),
    global_model=True,
    travels="the whole model down, the body up",
    private=("client",),
)
