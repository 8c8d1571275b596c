"""A method of one exchange for clients with several pretrained bodies: run once for the clients of each (`bodies`).

Features of different bodies mean different things, so each body has a query, a total, a head and a file of its own.
Each body's `Participants` know only the clients that state its digest. All clients are scored together, each with the
head of its body.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedapp.errors import BadRequest
from fedapp.federation.hook import Setup
from fedapp.federation.hooks.tables import Tables
from fedapp.federation.participants import Observer, Participants, Progress
from fedapp.learning.metrics import mean
from fedapp.method import Arrays, ClientInfo, Payload, ServerContext, ServerState
from fedapp.reduce.spec import Query
from fedapp.transport.traffic import Exchange, RoundFailed
from strategies.base import Strategy


class ByBody(Strategy):
    """The strategy of all bodies; its state has that of each body by its digest.

    Parameters
    ----------
    parts : the clients of each body, with the strategy for them.   infos : of all clients, by id.
    leave_out : leaves out the clients of a body that fails, for a reason.
    """

    def __init__(
        self,
        parts: dict[str, Participants],
        infos: Mapping[int, ClientInfo],
        leave_out: Callable[[str, str], None],
    ) -> None:
        first = next(iter(parts.values())).strategy
        super().__init__(first.method, first.hparams, policy=first.policy)
        self.parts, self.infos, self.leave_out = parts, infos, leave_out

    def init(self, context: ServerContext) -> ServerState:
        """Return the first state of each body."""
        self.context = context
        return self._of_each(lambda body, part: part.strategy.init(part.strategy.context))

    def finalize(self, state: ServerState, query: Query) -> ServerState:
        """Query the clients of one body after the other, and make a head for each."""
        return self._of_each(
            lambda body, part: part.strategy.finalize(state[body], part.query(Progress(0, state[body])))
        )

    def _of_each(self, made: Callable[[str, Participants], ServerState]) -> ServerState:
        """Return the state of each body; one that fails is left out, unless it is the last."""
        found = {}
        for body, part in [*self.parts.items()]:
            try:
                found[body] = made(body, part)
            except (BadRequest, RoundFailed) as e:
                if len(self.parts) == 1:
                    raise
                del self.parts[body]
                self.leave_out(body, f"fails: {e}")
        return found

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        """Return the payload of the client's body."""
        body = self.infos[client].body
        return self.parts[body].strategy.send(state[body], server_round, client)

    def global_arrays(self, state: ServerState) -> Arrays | None:
        """Return None: there is one model for each body."""
        return None


class JoinedQueries(Observer):
    """Passes the queries of a kind to the hooks as one, to which each body adds its clients."""

    def __init__(self, hooks: Observer) -> None:
        self.hooks, self.asked = hooks, dict[str, Exchange]()

    def after_query(self, exchange: Exchange) -> None:
        """Add the answers of one body."""
        before = self.asked.get(exchange.kind, Exchange(exchange.kind, exchange.round))
        exchange.up, exchange.seconds = exchange.up + before.up, exchange.seconds + before.seconds
        exchange.metrics = before.metrics | exchange.metrics
        self.asked[exchange.kind] = exchange
        self.hooks.after_query(exchange)


def scores_by_body(run: Setup, state: ServerState) -> dict[str, Any]:
    """Return for the summary, by the first 8 digits of each body, its clients, its scores and the method's entries."""
    scores, table, found = run.hooks.one(Tables).last_scores, run.directory.table("final.csv"), {}
    for body, part in run.parts.items():
        ids = [info.client for info in part.infos]
        mine = np.isin(table.get("client", ()), ids)
        accuracy = {n.removesuffix("_accuracy"): mean(v[mine]) for n, v in table.items() if n.endswith("_accuracy")}
        if part.central.wanted and (central := part.central.score(state[body])):
            accuracy["global"] = central.accuracy
        entries = part.strategy.report(state[body], {c: scores[c] for c in ids if c in scores})
        found[body[:8]] = {"body": body, "clients": ids, "accuracy": accuracy, **entries}
    return {"bodies": found} if found else {}
