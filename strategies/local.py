"""Standalone: every client trains alone and sends only metrics. A federated method must beat this lower bound."""

from __future__ import annotations

from clients.base import FedClient
from fedapp.method import NONE, BaseHParams, Method, Payload, ServerContext, ServerState
from fedapp.reduce.spec import Reduced
from strategies.base import Strategy


class Standalone(Strategy):
    """Sends nothing and aggregates nothing."""

    def init(self, context: ServerContext) -> ServerState:
        """Return an empty state."""
        self.context = context
        return {}

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        """Return an empty payload: the client goes on with its own model."""
        return Payload()

    def update(self, state: ServerState, server_round: int, reduced: Reduced) -> ServerState:
        """Keep the state."""
        return state


METHOD = Method(
    id="local",
    title="Standalone",
    paper="control",
    strategy=Standalone,
    client=FedClient,
    hparams=BaseHParams,
    shared=NONE,
    head="none",
    heterogeneous=True,
    same_width=False,
    travels="nothing",
    reduces={"train": {}},
)
