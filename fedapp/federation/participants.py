"""The clients of a run, as its method exchanges messages with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedapp import sampling
from fedapp.federation.releases import released
from fedapp.learning.state import KEPT
from fedapp.method import Payload, Reply, ServerState
from fedapp.reduce.reader import Check
from fedapp.reduce.spec import Query
from fedapp.transport import checkpoint
from fedapp.transport.cohort import Cohort
from fedapp.transport.ledger import digests_of
from fedapp.transport.offences import Dropped
from fedapp.transport.request import RoundRequest
from fedapp.transport.secure import SecureSums, name_of
from fedapp.transport.traffic import Exchange
from strategies.base import Strategy


@dataclass(frozen=True)
class Progress:
    """A point from which a run can continue.

    Attributes
    ----------
    round : the last one that counts there; 0 = none.   state : the server's, after it.
    clients : digest of each client's stored state, and whether its next training starts from it.
    """

    round: int
    state: ServerState
    clients: Mapping[int, tuple[str, bool]] = field(default_factory=dict)


@dataclass
class Outcome:
    """The result of a round; `void` is the reason for which it does not count, or empty."""

    state: ServerState
    exchange: Exchange
    void: str = ""


class Observer:
    """The functions of a hook that exchanges call; without changes they do nothing."""

    def request(self, request: RoundRequest) -> RoundRequest:
        """Return the request to clients in a round, from that of the hooks before."""
        return request

    def after_query(self, exchange: Exchange) -> None:
        """Act after a query."""

    def after_evaluation(self, exchange: Exchange) -> None:
        """Act after an evaluation."""


MOST_EVALUATED = 1024
"""Clients that are evaluated at a time: the payloads of more are not held together."""


class Participants:
    """The clients of a run.

    Parameters
    ----------
    hooks : of the run: they give values of requests, and are called after each query and evaluation.
    unseen : clients that take no part in the training.
    each : the request of an evaluation for one client, from that for all; None: the client is not evaluated.
    retrains : whether each client trains one more round before an evaluation of all, from the model that it would
        receive next. All `trained` scores then have one age. Without it its last trained model is scored.
    secure : session of secure sums: the server sees no single reply.

    Attributes
    ----------
    strategy : the strategy under the policy of the present round.
    back : n > 0: clients restore their states before round n in the messages of this attempt.
    pending : dropped replies of attempts that do not count, first in the next table of dropped replies.
    """

    def __init__(
        self,
        manager: Cohort,
        strategy: Strategy,
        hooks: Observer,
        *,
        unseen: Collection[int] = (),
        each: Callable[[int, RoundRequest], RoundRequest | None] = lambda client, request: request,
        retrains: bool = True,
        secure: SecureSums | None = None,
    ) -> None:
        self.manager, self.strategy, self.hooks = manager, strategy, hooks
        self.unseen, self.each, self.retrains = frozenset(unseen), each, retrains
        self.secure = secure
        if secure is not None:
            policy = replace(strategy.policy, share=lambda: secure.share)
            self.strategy = strategy.under(policy)
        self.back = 0
        self.pending: list[Dropped] = []
        self._began = 0.0

    @property
    def clients(self) -> dict[int, tuple[str, bool]]:
        """The server's records of the clients' stored states (`Progress.clients`)."""
        return dict(self.manager.ledger.states)

    def restore(self, at: Progress) -> None:
        """Set the server's records of the clients' states to those of `at`."""
        self.manager.ledger.states = dict(at.clients)

    def rewind(self, to: Progress, server_round: int) -> None:
        """Let the clients go back too, in the messages of `server_round`.

        A state that a client trained from a spoiled model is spoiled too. A client keeps its last `KEPT` states; after
        a longer rollback it goes on from its last one.
        """
        if not to.round or server_round - to.round < KEPT:
            self.restore(to)
            self.back = to.round + 1

    def training(self) -> list[int]:
        """Return the clients that take part and are there."""
        return sorted(self.manager.nodes.keys() - self.unseen)

    def sample(self, seed: int, server_round: int) -> list[int]:
        """Return the clients of a round, after those that are new have registered; of a repeated secure sum its own."""
        self._began = time.perf_counter()
        self.manager.register()
        before = self.secure.before(name_of("train", server_round)) if self.secure else None
        if before is not None:
            return [c for c in self.training() if c in before]
        drawn = sampling.sample_clients(seed, server_round, self.training(), self.manager.settings.fraction_train)
        ids, self.pending = self.manager.without_silent(server_round, drawn)
        return ids

    def train(
        self,
        server_round: int,
        state: ServerState,
        clients: Sequence[int],
        checks: Callable[[Check], Check],
    ) -> Exchange:
        """Let clients train on the payloads of a state; `checks` wraps the check of a reply.

        A client that an earlier attempt at the round blocked gets no message.
        """
        strategy, exchange = self.strategy, Exchange("train", server_round)
        clients = [c for c in clients if c in self.manager.nodes]
        payloads = strategy.send_each(state, server_round, clients)
        request = replace(self.request(server_round), back=self.back)
        exchange.replies = self._replies(exchange, payloads, state, checks, request)
        return exchange

    def request(self, server_round: int) -> RoundRequest:
        """Return the request to clients in a round."""
        return self.hooks.request(replace(self.manager.request, round=server_round))

    def aggregate(self, at: Progress, server_round: int, replies: Iterable[Reply]) -> ServerState:
        """Return the next state; the sizes of all that take part bound how much a reply weighs (`count-cap`)."""
        policy = self.strategy.policy
        sizes = [self.manager.infos[c].num_samples for c in self.training()] if policy.robust.count_cap else []
        return self.strategy.aggregate(at.state, server_round, policy.believed(replies, sizes))

    def end_training(self, exchange: Exchange) -> None:
        """Check that every reply was read and that enough of them count.

        Raises
        ------
        RoundFailed : there are too few.   Spoiled : they failed as they do where the state is spoiled.
        """
        for _ in exchange.replies:
            name = type(self.strategy).__name__
            raise RuntimeError(f"{name}.aggregate left replies unread: it must read all of them")
        self.manager.require(exchange)
        exchange.dropped[:0], self.pending, self.back = self.pending, [], 0
        exchange.seconds = time.perf_counter() - self._began

    def accept(self, at: Progress, outcome: Outcome) -> Progress:
        """Return the point after a round: the new state, or where the round is void the old one with its records."""
        state = outcome.state
        if outcome.void:
            self.restore(at)  # no statement of a client in this round counts
            state = {**at.state, **{name: state[name] for name in self.strategy.records if name in state}}
        return Progress(outcome.exchange.round, state)

    def wait_for(self, exchange: Exchange, replies: Iterable[Reply]) -> list[Reply]:
        """Return all replies of an exchange, after the check that enough of them count."""
        arrived = list(replies)
        self.manager.require(exchange)
        return arrived

    def query(self, at: Progress) -> Query:
        """Return the function with which a method queries all clients at `at`."""

        request = replace(self.manager.request, round=at.round + 1, back=self.back)

        def ask(kind: str, payload: Payload, repeated: Check) -> Iterator[Reply]:
            exchange = Exchange(kind, at.round)
            payloads = ((c, payload) for c in self.training())

            def checks(own: Check) -> Check:
                return lambda reply: own(reply) or repeated(reply)

            exchange.replies = self._replies(exchange, payloads, at.state, checks, request)
            yield from exchange
            self.manager.require(exchange)
            self.hooks.after_query(exchange)

        return self.strategy.reader.query(ask)

    def score(self, state: ServerState, server_round: int) -> Exchange:
        """Score all clients for the last time."""
        last = replace(self.manager.request, round=server_round, balanced=True, final=True, train=self.retrains)
        return self.evaluate("final", state, replace(last, back=self.back))

    def evaluate(
        self, kind: str, state: ServerState, request: RoundRequest, clients: Iterable[int] | None = None
    ) -> Exchange:
        """Score clients after the round of a request, with the payload of the next round.

        Parameters
        ----------
        kind : as in `Exchange`.   clients : None = all that take part.
        """
        exchange, number = Exchange(kind, request.round), request.round + 1
        request = replace(request, round=number)
        if clients is None:
            found = ((c, self.each(c, request)) for c in self.training())
            given = {c: own for c, own in found if own is not None}
        else:
            given = dict.fromkeys(clients, request)
        ids, schema = list(given), self.strategy.reader.schema("evaluate", state)
        for start in range(0, len(ids), MOST_EVALUATED):
            payloads = self.strategy.send_each(state, number, ids[start : start + MOST_EVALUATED])
            for _ in self.manager.send_and_receive(exchange, payloads, schema, given):
                pass
        self.manager.require(exchange)
        exchange.dropped[:0], self.pending = self.pending, []
        self.hooks.after_evaluation(exchange)
        return exchange

    def _replies(
        self,
        exchange: Exchange,
        payloads: Iterable[tuple[int, Payload]],
        state: ServerState,
        checks: Callable[[Check], Check],
        request: RoundRequest,
    ) -> Iterator[Reply]:
        """Send messages and yield the valid replies, or with secure sums the one reply that stands for all of them."""
        strategy, kind, secure = self.strategy, exchange.kind, self.secure
        schema, initial = strategy.schema(state, kind), strategy.context.initial
        schema = replace(schema, check=checks(schema.check))
        if secure is None:
            return self.manager.send_and_receive(exchange, payloads, schema, request)
        template = {n: initial[n] for n in schema.shapes} | strategy.reader.further(kind, state)
        sums, noise = strategy.method.sums(strategy.hparams), released(strategy.reader, kind, template)
        assert sums is not None
        return secure.exchange(exchange, payloads, sums, template, schema, request, noise)


def stored(folder: Path, server_round: int) -> Progress:
    """Return the point after a round from its checkpoint in a folder.

    Raises
    ------
    StateError : there is none, or it cannot be read.
    """
    _, state, remembered = checkpoint.load(folder, server_round)
    return Progress(server_round, state, digests_of(remembered["Cohort"]))
