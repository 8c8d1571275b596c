"""FedBABU. Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022: only the
body is learned together, under a random head that no one trains; each client fine-tunes at the end.

Symbols    theta_ext -> state["model"]["features.*"]     theta_cls -> state["model"]["head.*"]
Server:    theta_ext <- sum_k n_k theta_ext,k / sum_k n_k  over the participants;   theta_cls stays bit for bit.
The head travels down, so that any client has the right one, and never up. It is FedAvg on a model whose head is frozen,
bit for bit (tested).
"""

from __future__ import annotations

from clients.fedbabu import BODY, FedBABUClient, FedBABUHParams
from fedapp.method import Arrays, Method, ServerContext, ServerState
from fedapp.reduce.spec import Mean, Reduced
from strategies.base import Strategy


class FedBABU(Strategy):
    """The average of the participants' bodies, under the head of the beginning."""

    def update(self, state: ServerState, server_round: int, reduced: Reduced) -> ServerState:
        """Return the state with the new body."""
        return {**state, "model": {**state["model"], **reduced.arrays("body")}}


def _body(context: ServerContext, state: ServerState) -> Arrays:
    return {name: array for name, array in state["model"].items() if name.startswith(BODY)}


METHOD = Method(
    id="fedbabu",
    title="FedBABU",
    paper="Oh et al., ICLR 2022",
    strategy=FedBABU,
    client=FedBABUClient,
    hparams=FedBABUHParams,
    head="names",
    up=BODY,
    reduces=lambda hparams: {"train": {"body": Mean(_body, hparams.weights)}},
    global_model=True,
    travels="the whole model down, the body up",
)
