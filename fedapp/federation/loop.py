"""The round loop: sampling of clients, messages, evaluation and callbacks, the same for all methods."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from fedapp import sampling
from fedapp.core.robust import needed
from fedapp.federation import soundness
from fedapp.federation.releases import released
from fedapp.federation.rollback import Earlier, WayBack, reset
from fedapp.method import Payload, Reply, ServerContext, ServerState
from fedapp.reduce.reader import Check
from fedapp.reduce.spec import Query
from fedapp.transport.cohort import Cohort
from fedapp.transport.offences import Dropped
from fedapp.transport.request import RoundRequest
from fedapp.transport.secure import SecureSums
from fedapp.transport.traffic import RoundFailed, Spoiled, Traffic
from strategies.base import Strategy

Each: TypeAlias = Callable[[int, RoundRequest], RoundRequest | None]
EVALUATED = 1024
"""Clients that are evaluated at a time: the payloads of more are not held together."""


@dataclass
class RoundResult:
    """The result of one exchange of messages with clients.

    Attributes
    ----------
    kind : `train`, `evaluate`, `final`, `unseen` or `query.<kind>`.
    void : why the state stays as it was; empty = it does not.
    metrics : the numbers of each client whose reply was accepted, by client id, with `num-examples`.
    """

    kind: str
    round: int
    void: str = ""
    metrics: dict[int, dict[str, Any]] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    seconds: float = 0.0


class Callbacks:
    """Functions that a run calls as it proceeds; the defaults record nothing."""

    def after_round(self, result: RoundResult, state: ServerState) -> bool:
        """Record a finished round; return False to end the run early."""
        return True

    def after_evaluation(self, result: RoundResult) -> None:
        """Record an evaluation of all clients."""

    def has_evaluation(self, server_round: int) -> bool:
        """Return whether the evaluation after `server_round` is recorded; a resumed run repeats a missing one."""
        return False

    def after_query(self, result: RoundResult) -> None:
        """Record the answers to a query."""

    def went_back(self, spoiled: Spoiled, earlier: Earlier, how: str) -> None:
        """Record that the run goes on from an earlier state; `how` says what bounds a single client from now on."""

    def without_evaluation(self, spoiled: Spoiled) -> None:
        """Record that an evaluation between rounds is left out; the next round finds the same, and goes back."""

    def selected(self, state: ServerState, server_round: int) -> tuple[ServerState, int]:
        """Return the state and the round that are scored at the end; given are those of the last round."""
        return state, server_round


def _alike(client: int, request: RoundRequest) -> RoundRequest:
    return request


class RoundLoop(WayBack):
    """Runs the rounds of a strategy over the clients of a manager."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy)
        self.secure: SecureSums | None = None
        self.unseen: frozenset[int] = frozenset()
        self.each: Each = _alike

    def run(
        self,
        manager: Cohort,
        context: ServerContext,
        *,
        rounds: int,
        done: int = 0,
        state: ServerState | None = None,
        previous: Earlier | None = None,
        callbacks: Callbacks | None = None,
        request: Callable[[int], RoundRequest] | None = None,
        evaluate_every: int = 0,
        final_training: bool = True,
        select: bool = False,
        unseen: Collection[int] = (),
        secure: SecureSums | None = None,
        each: Each = _alike,
    ) -> ServerState:
        """Run rounds `done + 1 .. rounds`, then `finalize`, and score all clients once.

        Parameters
        ----------
        state : state after round `done` (None: start with `init`).   previous : what was before it, if it is known.
        request : that of the messages of a round, such as whether to measure the balanced score.
        evaluate_every : n > 0: evaluate all clients every n rounds.
        final_training : whether each client trains one more round before an evaluation of all clients, from the model
            that it would receive next. All `trained` scores then have one age. Without it each client's last trained
            model is scored.

        select : finalize and score what `callbacks.selected` returns. Evaluations between rounds then score only what
            clients receive, and there is one after the last round too.

        each : the request of an evaluation for one client, from that for all; None skips it.
        unseen : clients that take no part. After the last evaluation of all others each gets what `send` has for it.
        secure : session of secure aggregation; the server sees only the sum of the replies.

        Returns
        -------
        The final state.
        """
        self.unseen, self.each = frozenset(unseen), each
        self.secure = secure
        if secure is not None:
            policy = replace(self.strategy.policy, share=lambda: secure.share)
            self.strategy = self.strategy.under(policy)
        callbacks = callbacks or Callbacks()
        ask = request or (lambda server_round: replace(manager.request, round=server_round))

        def between(server_round: int) -> RoundRequest:
            return replace(ask(server_round), train=final_training and not select, received_only=select)

        self.strategy.context = context
        state = self.strategy.init(context) if state is None else state
        # If a run was interrupted between a checkpoint and the evaluation after it, the resumed run evaluates first.
        due = evaluate_every and done and done % evaluate_every == 0 and (done < rounds or select)
        if due and not callbacks.has_evaluation(done):
            self._between(manager, state, done, between(done), callbacks)
        for server_round in range(done + 1, rounds + 1):
            started = time.perf_counter()
            manager.register()
            there, share = self._taking_part(manager), manager.settings.fraction_train
            drawn = sampling.sample_clients(context.seed, server_round, there, share)
            ids, dropped = manager.without_silent(server_round, drawn)
            now = Earlier(server_round - 1, state, dict(manager.ledger.states))
            asked = ask(server_round)
            while True:
                try:
                    new, result = self._train(manager, now.state, server_round, ids, asked)
                    break
                except Spoiled as e:
                    if previous is None or not self.goes_back(manager):
                        raise
                    manager.ledger.states = dict(now.states)
                    now, how = self.way_back(previous)
                    asked = replace(asked, back=reset(manager, now, server_round) or asked.back)
                    now = replace(now, states=dict(manager.ledger.states))
                    callbacks.went_back(e, now, how)
                    dropped += e.dropped
            result.traffic.dropped[:0] = dropped
            if result.void:
                manager.ledger.states = dict(now.states)  # nothing of what the clients said in this round counts
                state = {**now.state, **{name: new[name] for name in self.strategy.records if name in new}}
            else:
                previous, state = now, new
            result.seconds = time.perf_counter() - started
            proceed = callbacks.after_round(result, state)
            if evaluate_every and server_round % evaluate_every == 0 and (server_round < rounds or select):
                self._between(manager, state, server_round, between(server_round), callbacks)
            if not proceed:
                rounds = server_round
                break
        if select:
            state, rounds = callbacks.selected(state, rounds)
        last = replace(manager.request, balanced=True, final=True, train=final_training)
        try:
            state = self._end(manager, state, rounds, last, callbacks)
        except Spoiled as e:
            if previous is None or not self.goes_back(manager):
                raise
            # No client has trained on the last update, so the fault shows only here. The round cannot be repeated.
            last = replace(last, back=reset(manager, previous, rounds + 1))
            callbacks.went_back(e, previous, "the one before it is scored")
            state = self._end(manager, previous.state, rounds, last, callbacks, e.dropped)
        there = sorted(self.unseen & manager.nodes.keys())
        if there:
            asked = replace(manager.request, unseen=True)
            callbacks.after_evaluation(self._evaluate(manager, state, rounds, "unseen", asked, there))
        return state

    def _end(
        self,
        manager: Cohort,
        state: ServerState,
        rounds: int,
        request: RoundRequest,
        callbacks: Callbacks,
        dropped: Sequence[Dropped] = (),
    ) -> ServerState:
        """Return the final state, after the last scores of all clients; `dropped` are those of an attempt before."""
        state = self.strategy.finalize(state, self._queries(manager, state, rounds, callbacks, request.back))
        found = self._evaluate(manager, state, rounds, "final", request)
        if dropped:
            found.traffic.dropped[:0] = dropped
        callbacks.after_evaluation(found)
        return state

    def _between(
        self,
        manager: Cohort,
        state: ServerState,
        server_round: int,
        request: RoundRequest,
        callbacks: Callbacks,
    ) -> None:
        """Evaluate all clients between two rounds."""
        try:
            callbacks.after_evaluation(self._evaluate(manager, state, server_round, "evaluate", request))
        except Spoiled as e:
            if not self.goes_back(manager):
                raise
            callbacks.without_evaluation(e)

    def _taking_part(self, manager: Cohort) -> list[int]:
        return sorted(manager.nodes.keys() - self.unseen)

    def _train(
        self, manager: Cohort, state: ServerState, server_round: int, ids: list[int], request: RoundRequest
    ) -> tuple[ServerState, RoundResult]:
        strategy, robust = self.strategy, self.strategy.policy.robust
        result = RoundResult("train", server_round)
        payloads = strategy.send_each(state, server_round, ids)
        initial, growth = strategy.context.initial, robust.max_growth
        limit = growth * (1 + soundness.longest(state, initial)) if growth else math.inf
        expected = strategy.method.expected(strategy.hparams, {name: array.shape for name, array in initial.items()})
        check = strategy.checker(state, "train")
        if growth and self.secure is None:  # the length of every reply takes a pass over it
            check = soundness.bounded(check, initial, limit, strategy.reader.moves(state))
        replies = self._asked(manager, "train", server_round, payloads, expected, state, check, result, request)
        good = _recorded(replies, result)
        if robust.rules or self.gone_back:
            # A rule holds for a number of clients. So all must have arrived before it begins.
            arrived = list(good)
            manager.require(result.traffic, server_round)
            single = robust.rules or self.secure is not None  # of a sum there is one reply
            good = iter(arrived if single else self.shortened(state, server_round, arrived))
        if robust.rules and not self.gone_back:  # no client that fails may end a run which another one spoiled
            # A client that was blocked lies no more, so that the rule has fewer liars to bear.
            liars = max(0, robust.robust_f - len(manager.offences.blocked))
            least = needed(robust.averages, liars)
            if len(result.traffic.answered) < least:
                raise RoundFailed(
                    f"round {server_round}: {len(result.traffic.answered)} good replies, and robust needs {least} "
                    f"against {liars} liars: raise min-replies, or lower robust-f",
                    server_round,
                )
        sizes = [manager.infos[c].num_samples for c in self._taking_part(manager)] if robust.count_cap else []
        new = strategy.aggregate(state, server_round, strategy.policy.believed(good, sizes))
        for _ in replies:
            raise RuntimeError(f"{type(strategy).__name__}.aggregate left replies unread: it must read all of them")
        manager.require(result.traffic, server_round)
        result.void = soundness.flaw(new, initial, strategy.records, limit) or ""
        return new, result

    def _asked(
        self,
        manager: Cohort,
        kind: str,
        server_round: int,
        payloads: Iterable[tuple[int, Payload]],
        expected: Mapping[str, tuple[int, ...]],
        state: ServerState,
        check: Callable[[Reply], str | None],
        result: RoundResult,
        request: RoundRequest,
    ) -> Iterator[Reply]:
        """Send messages and yield the good replies, or with secure sums the one reply that stands for all of them."""
        strategy, secure, reader = self.strategy, self.secure, self.strategy.reader
        sums = strategy.method.sums(strategy.hparams) if secure else None
        template = {n: strategy.context.initial[n] for n in expected} | reader.further(kind, state) if sums else {}
        if secure is None or sums is None or not template:
            return manager.send_and_receive(kind, server_round, payloads, expected, check, result.traffic, request)
        return secure.exchange(
            kind, server_round, payloads, sums, template, check, result.traffic, request,
            released(reader, kind, template),
        )  # fmt: skip

    def _evaluate(
        self,
        manager: Cohort,
        state: ServerState,
        server_round: int,
        kind: str,
        request: RoundRequest,
        ids: Sequence[int] | None = None,
    ) -> RoundResult:
        """Score clients, by default all that take part, after `server_round`, with the payload of the next round."""
        result = RoundResult(kind, server_round)
        request = replace(request, round=server_round + 1)
        given = dict.fromkeys(ids or (), request)
        if ids is None:
            found = ((c, self.each(c, request)) for c in self._taking_part(manager))
            given = {c: own for c, own in found if own is not None}
        ids = list(given)
        for start in range(0, len(ids), EVALUATED):
            payloads = self.strategy.send_each(state, server_round + 1, ids[start : start + EVALUATED])
            replies = manager.send_and_receive(
                "evaluate", server_round, payloads, {}, _no_arrays, result.traffic, given
            )
            for _ in _recorded(replies, result):
                pass
        result.seconds = result.traffic.seconds
        manager.require(result.traffic, server_round)
        return result

    def _queries(
        self,
        manager: Cohort,
        state: ServerState,
        server_round: int,
        callbacks: Callbacks,
        back: int,
    ) -> Query:
        request = replace(manager.request, round=server_round + 1, back=back)

        def ask(stage: str, payload: Payload, repeated: Check) -> Iterator[Reply]:
            result = RoundResult(stage, server_round)
            payloads = ((c, payload) for c in self._taking_part(manager))
            own = self.strategy.checker(state, stage)
            replies = self._asked(
                manager, stage, server_round, payloads, {}, state, lambda reply: own(reply) or repeated(reply), result,
                request,
            )  # fmt: skip
            yield from _recorded(replies, result)
            result.seconds = result.traffic.seconds
            manager.require(result.traffic, server_round)
            callbacks.after_query(result)

        return self.strategy.reader.query(ask)


def _no_arrays(reply: Reply) -> str | None:
    return (
        f"the reply to an evaluation must hold no arrays, but has '{next(iter(reply.arrays))}'"
        if reply.arrays
        else None
    )


def _recorded(replies: Iterator[Reply], result: RoundResult) -> Iterator[Reply]:
    for reply in replies:
        for single in reply.singles:
            result.metrics[single.client] = {**single.metrics, "bytes-up": single.bytes_up}
        yield reply
