"""Standalone: every client trains alone and sends only metrics. A federated method must beat this lower bound."""

from __future__ import annotations

from collections.abc import Iterable

from clients.base import FedClient
from fedapp.method import NONE, BaseHParams, Method, Payload, Reply, ServerContext, ServerState
from strategies.base import FedStrategy


class Standalone(FedStrategy):
    """Sends nothing and aggregates nothing."""

    def init(self, context: ServerContext) -> ServerState:
        """Return an empty state."""
        self.context = context
        return {}

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        """Return an empty payload: the client goes on with its own model."""
        return Payload()

    def aggregate(self, state: ServerState, server_round: int, replies: Iterable[Reply]) -> ServerState:
        """Read the replies for their metrics."""
        for _ in replies:  # replies must be read to the end
            pass
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
    guards=(),
)
