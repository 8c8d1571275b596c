"""`FedStrategy`: the server side of a method as pure functions, and the round loop that calls them over Flower.

A method defines only its mathematics. The table lists the functions that it may define, in the order in which they are
called. Each function returns new values and does not change its arguments. Everything that must be remembered is in the
state, so a checkpoint contains all of it. `self.context`, `self.method` and `self.hparams` never change during a run.

| function                                  | when                                   | what it returns         |
|-------------------------------------------|----------------------------------------|-------------------------|
| `init(context)`                           | once, before round 1                   | the first state         |
| `send(state, server_round, client)`       | for each client that gets a message    | its payload             |
| `send_each(state, server_round, clients)` | instead of `send`, if it is cheaper    | pairs (client, payload) |
| `check(state, reply)`                     | for each reply as it arrives           | what is wrong, or None  |
| `moves(state, reply)`                     | where `max-growth` bounds lengths      | what moves the state    |
| `further(state, kind)`                    | before sums that hide single replies   | how replies look        |
| `aggregate(state, server_round, replies)` | once per round                         | the next state          |
| `global_arrays(state)`                    | after each round                       | the one model, or None  |
| `finalize(state, query)`                  | once, after the last round             | the final state         |
| `report(state, final)`                    | once, after the final evaluation       | entries of the summary  |
| `blend(state, sizes)`                     | when a figure of the run is drawn      | who learns from whom    |

`replies` yields the checked replies one at a time, in the order of the client ids; `aggregate` must read all of them.
`query` is the only other exchange with clients. `final` holds the clients' last scores.

The state is a nested dict of arrays and plain values. The rest of this file is the same for all methods: sampling of
clients, messages, evaluation and callbacks. `strategies/_flower.py` runs the same functions in Flower's own loop, for
apps other than fedapp.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from fedapp import sampling
from fedapp.core.averages import RunningMean
from fedapp.core.privacy import Privacy
from fedapp.core.robust import UNGUARDED, RobustMean, count_limit, mean_of, needed
from fedapp.learning.task import ModelSpec, Task
from fedapp.method import (
    Array,
    Arrays,
    Blend,
    ClientInfo,
    Method,
    Payload,
    Query,
    Reply,
    Scalar,
    Scored,
    ServerContext,
    ServerState,
)
from fedapp.settings import RobustnessSettings
from fedapp.transport.client_manager import ClientManager, Dropped, RoundFailed, Spoiled, Traffic
from fedapp.transport.clipping import arrays_of
from fedapp.transport.secure import Released, SecureSums
from strategies import _soundness
from strategies._back import Earlier, WayBack, reset
from strategies._flower import FlowerLoop

Each: TypeAlias = Callable[[int], Mapping[str, Any] | None]
EVALUATED = 1024
"""Clients that are evaluated at a time: the payloads of more are not held together."""
TOGETHER = 8
"""Number of replies that are added to a mean in one pass."""


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


class FedStrategy(WayBack, FlowerLoop):
    """Base of all strategies; without changes it is FedAvg on the method's shared arrays.

    Parameters
    ----------
    method, hparams : the method and its hyperparameters.
    robust : what is done against clients that lie.
    privacy : what the run states of what leaves its clients, or None.
    flower : settings of Flower's own loop (`strategies/_flower.py`), for apps other than fedapp.
    """

    records: ClassVar[tuple[str, ...]] = ()
    """Entries of the state that only note numbers round by round, which may be NaN; all other arrays must be finite."""

    def __init__(
        self,
        method: Method,
        hparams: Any,
        *,
        robust: RobustnessSettings | None = None,
        privacy: Privacy | None = None,
        **flower: Any,
    ) -> None:
        super().__init__(**flower)
        self.method, self.hparams = method, hparams
        self.robust = robust or UNGUARDED
        self.privacy = privacy
        self.context: ServerContext
        self.unseen: frozenset[int] = frozenset()
        self.secure: SecureSums | None = None
        self.each: Each = lambda client: {}

    # ---- mathematics ---------------------------------------------------------------------------------------------

    def init(self, context: ServerContext) -> ServerState:
        """Return the state before round 1: the common initial values of the shared arrays."""
        self.context = context
        return {"model": dict(context.initial)}

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        """Return the payload of `client` in `server_round`: the shared arrays, the same for all clients."""
        return Payload(common=state["model"])

    def send_each(self, state: ServerState, server_round: int, clients: Iterable[int]) -> Iterator[tuple[int, Payload]]:
        """Yield each client with its payload, for methods that compute several payloads at lower cost."""
        return ((client, self.send(state, server_round, client)) for client in clients)

    def check(self, state: ServerState, reply: Reply) -> str | None:
        """Return what is wrong with a reply besides names, shapes and NaN, or None."""
        return None

    def moves(self, state: ServerState, reply: Reply) -> Arrays:
        """Return what of a reply moves the state as far as it is long, by the names of a model's arrays."""
        return {}

    def further(self, state: ServerState, kind: str) -> Arrays:
        """Return arrays of the names, shapes and dtypes that replies to `kind` hold beside the model's, for sums.

        Those of classes (`Sums.rows`) have a row for each of the C classes.
        """
        return {}

    def aggregate(self, state: ServerState, server_round: int, replies: Iterable[Reply]) -> ServerState:
        """Return the next state: the shared arrays averaged over the participants, weighted by n_k."""
        return {**state, "model": self.averaged(replies, state["model"])}

    def averaged(self, replies: Iterable[Reply], previous: Mapping[str, Any]) -> Arrays:
        """Return the arrays named in `previous`, which the clients were sent, averaged over replies by `robust`."""
        return weighted_mean(replies, previous, mean_of(previous, self.robust))

    def aggregate_believed(
        self, state: ServerState, server_round: int, replies: Iterable[Reply], counts: Sequence[float]
    ) -> ServerState:
        """Aggregate replies, none with more samples than `robust.count_cap` times the median of `counts`."""
        limit = count_limit(counts, self.robust.count_cap)
        if self.privacy is not None:
            # Every update has the same noise, so equal weights leave the least of it in the mean.
            limit = 1
        if limit is not None:
            replies = (dataclasses.replace(r, num_samples=min(r.num_samples, limit)) for r in replies)
        return self.aggregate(state, server_round, replies)

    def noted(self, state: ServerState, weaker: Mapping[int, str]) -> ServerState:
        """Return an entry of the next state: by rule, in how many rounds it took the place of `robust` for a group.

        Parameters
        ----------
        weaker : the rule that was used, by class or cluster; empty where all had enough senders.
        """
        before = state.get("robust", {})
        if not weaker and not before:
            return {}
        found = {rule: dict(groups) for rule, groups in before.items()}
        for group, rule in weaker.items():
            groups = found.setdefault(rule, {})
            groups[group] = groups.get(group, 0) + 1
        return {"robust": found}

    def global_arrays(self, state: ServerState) -> Arrays | None:
        """Return the one global model by wire name, or None if the method has none."""
        return dict(state["model"]) if self.method.global_model else None

    def finalize(self, state: ServerState, query: Query) -> ServerState:
        """Return the final state after the last round."""
        return state

    def report(self, state: ServerState, final: Scored) -> dict[str, Any]:
        """Return further entries for the run's summary; `final` holds the last scores of all clients."""
        return {}

    def blend(self, state: ServerState, sizes: Mapping[int, float]) -> Blend | None:
        """Return who learns from whom in what clients get next, or None where all get the same or nothing.

        `sizes` holds n_k by client; `self.context` is not there. Rows of the matrix sum to 1.
        """
        return None

    # ---- the round loop ------------------------------------------------------------------------------------------

    def expected(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes, out of a client's `shapes`, of the arrays that every reply to `train` must hold."""
        prefixes = self.method.up_prefixes(self.hparams)
        return {n: s for n, s in shapes.items() if any(n.startswith(p) or n == p.rstrip(".") for p in prefixes)}

    def run(
        self,
        manager: ClientManager,
        context: ServerContext,
        *,
        rounds: int,
        done: int = 0,
        state: ServerState | None = None,
        previous: Earlier | None = None,
        callbacks: Callbacks | None = None,
        control: Callable[[int], Mapping[str, Any]] = lambda server_round: {},
        evaluate_every: int = 0,
        final_training: bool = True,
        select: bool = False,
        unseen: Collection[int] = (),
        secure: SecureSums | None = None,
        each: Each = lambda client: {},
    ) -> ServerState:
        """Run rounds `done + 1 .. rounds`, then `finalize`, and score all clients once.

        Parameters
        ----------
        state : state after round `done` (None: start with `init`).   previous : what was before it, if it is known.
        control : values sent with the messages of a round, such as whether to measure the balanced score.
        evaluate_every : n > 0: evaluate all clients every n rounds.
        final_training : in evaluations of all clients each trains once more on what it would receive next, so that all
            `trained` scores are of one age; False scores each client's model as it was last trained.

        select : finalize and score what `callbacks.selected` returns. Evaluations between rounds then score only what
            clients receive, and there is one after the last round too.

        each : how the evaluation of a client differs from that of all; None: it is not evaluated.
        unseen : clients that take no part. After the last evaluation of all others each gets what `send` has for it.
        secure : makes one reply of all, of which the server sees no single one.

        Returns
        -------
        The final state.
        """
        self.unseen, self.each = frozenset(unseen), each
        self.secure = secure
        callbacks = callbacks or Callbacks()
        train: dict[str, Any] = {"train": final_training}
        between = {"received-only": True} if select else train
        self.context = context
        state = self.init(context) if state is None else state
        # If a run was interrupted between a checkpoint and the evaluation after it, the resumed run evaluates first.
        due = evaluate_every and done and done % evaluate_every == 0 and (done < rounds or select)
        if due and not callbacks.has_evaluation(done):
            self._between(manager, state, done, {**control(done), **between}, callbacks)
        for server_round in range(done + 1, rounds + 1):
            started = time.perf_counter()
            manager.register()
            there, share = self._taking_part(manager), manager.settings.fraction_train
            drawn = sampling.sample_clients(context.seed, server_round, there, share)
            ids, dropped = manager.without_silent(server_round, drawn)
            now = Earlier(server_round - 1, state, dict(manager.states))
            values = dict(control(server_round))
            while True:
                try:
                    new, result = self._train(manager, now.state, server_round, ids, values)
                    break
                except Spoiled as e:
                    if previous is None or not self.goes_back(manager):
                        raise
                    manager.states = dict(now.states)
                    now, how = self.way_back(previous)
                    values |= reset(manager, now, server_round)
                    now = dataclasses.replace(now, states=dict(manager.states))
                    callbacks.went_back(e, now, how)
                    dropped += e.dropped
            result.traffic.dropped[:0] = dropped
            if result.void:
                manager.states = dict(now.states)  # nothing of what the clients said in this round counts
                state = {**now.state, **{name: new[name] for name in self.records if name in new}}
            else:
                previous, state = now, new
            result.seconds = time.perf_counter() - started
            proceed = callbacks.after_round(result, state)
            if evaluate_every and server_round % evaluate_every == 0 and (server_round < rounds or select):
                self._between(manager, state, server_round, {**control(server_round), **between}, callbacks)
            if not proceed:
                rounds = server_round
                break
        if select:
            state, rounds = callbacks.selected(state, rounds)
        last = {"balanced": True, "final": True, **train}
        try:
            state = self._end(manager, state, rounds, last, callbacks)
        except Spoiled as e:
            if previous is None or not self.goes_back(manager):
                raise
            # Nobody has trained on the last update, so that it is found only now. It cannot be repeated any more.
            again = reset(manager, previous, rounds + 1)
            callbacks.went_back(e, previous, "the one before it is scored")
            state = self._end(manager, previous.state, rounds, {**last, **again}, callbacks, e.dropped)
        there = sorted(self.unseen & manager.nodes.keys())
        if there:
            callbacks.after_evaluation(self._evaluate(manager, state, rounds, "unseen", {"unseen": True}, there))
        return state

    def _end(
        self,
        manager: ClientManager,
        state: ServerState,
        rounds: int,
        control: Mapping[str, Any],
        callbacks: Callbacks,
        dropped: Sequence[Dropped] = (),
    ) -> ServerState:
        """Return the final state, after the last scores of all clients; `dropped` are those of an attempt before."""
        state = self.finalize(state, self._queries(manager, state, rounds, callbacks, control))
        found = self._evaluate(manager, state, rounds, "final", control)
        if dropped:
            found.traffic.dropped[:0] = dropped
        callbacks.after_evaluation(found)
        return state

    def _between(
        self,
        manager: ClientManager,
        state: ServerState,
        server_round: int,
        control: Mapping[str, Any],
        callbacks: Callbacks,
    ) -> None:
        """Evaluate all clients between two rounds."""
        try:
            callbacks.after_evaluation(self._evaluate(manager, state, server_round, "evaluate", control))
        except Spoiled as e:
            if not self.goes_back(manager):
                raise
            callbacks.without_evaluation(e)

    def _taking_part(self, manager: ClientManager) -> list[int]:
        return sorted(manager.nodes.keys() - self.unseen)

    def _train(
        self, manager: ClientManager, state: ServerState, server_round: int, ids: list[int], control: Mapping[str, Any]
    ) -> tuple[ServerState, RoundResult]:
        result = RoundResult("train", server_round)
        payloads = self.send_each(state, server_round, ids)
        expected = self.expected({name: array.shape for name, array in self.context.initial.items()})
        initial, growth = self.context.initial, self.robust.max_growth
        limit = growth * (1 + _soundness.longest(state, initial)) if growth else math.inf
        check = self._checker(state)
        if growth and self.secure is None:  # the length of every reply takes a pass over it
            check = _soundness.bounded(check, initial, limit, lambda reply: self.moves(state, reply))
        replies = self._asked(manager, "train", server_round, payloads, expected, state, check, result, control)
        good = _recorded(replies, result)
        if self.robust.rules or self.gone_back:
            # A rule holds for a number of clients. So all must have arrived before it begins.
            arrived = list(good)
            manager.require(result.traffic, server_round)
            single = self.robust.rules or self.secure is not None  # of a sum there is one reply
            good = iter(arrived if single else self.shortened(state, server_round, arrived))
        if self.robust.rules and not self.gone_back:  # no client that fails may end a run which another one spoiled
            # A client that was blocked lies no more, so that the rule has fewer liars to bear.
            liars = max(0, self.robust.robust_f - len(manager.offences.blocked))
            least = needed(self.robust.averages, liars)
            if len(result.traffic.answered) < least:
                raise RoundFailed(
                    f"round {server_round}: {len(result.traffic.answered)} good replies, and robust needs {least} "
                    f"against {liars} liars: raise min-replies, or lower robust-f",
                    server_round,
                )
        sizes = [manager.infos[c].num_samples for c in self._taking_part(manager)] if self.robust.count_cap else []
        new = self.aggregate_believed(state, server_round, good, sizes)
        for _ in replies:
            raise RuntimeError(f"{type(self).__name__}.aggregate left replies unread: it must read all of them")
        manager.require(result.traffic, server_round)
        result.void = _soundness.flaw(new, initial, self.records, limit) or ""
        return new, result

    def _asked(
        self,
        manager: ClientManager,
        kind: str,
        server_round: int,
        payloads: Iterable[tuple[int, Payload]],
        expected: Mapping[str, tuple[int, ...]],
        state: ServerState,
        check: Callable[[Reply], str | None],
        result: RoundResult,
        control: Mapping[str, Any],
    ) -> Iterator[Reply]:
        """Send messages and yield the good replies, or one in place of all where the server is to see only sums."""
        sums = self.method.sums(self.hparams) if self.secure else None
        template = {n: self.context.initial[n] for n in expected} | self.further(state, kind) if sums else {}
        if self.secure is None or sums is None or not template:
            return manager.send_and_receive(kind, server_round, payloads, expected, check, result.traffic, control)
        released = self.released(kind, template)
        return self.secure.exchange(
            kind, server_round, payloads, sums, template, check, result.traffic, control, released
        )

    def released(self, kind: str, template: Arrays) -> Released | None:
        """Return what of the replies adds up where the sum has noise, or None in a run without `dp`.

        Parameters
        ----------
        template : arrays of the names, shapes and dtypes of a reply.
        """
        if self.privacy is None:
            return None
        size = sum(array.size for array in template.values())
        return Released(self.privacy, self.privacy.bound, size, lambda v, clients: arrays_of(v / clients, template))

    def _evaluate(
        self,
        manager: ClientManager,
        state: ServerState,
        server_round: int,
        kind: str,
        control: Mapping[str, Any],
        ids: Sequence[int] | None = None,
    ) -> RoundResult:
        """Score clients, by default all that take part, after `server_round`, on what the server would send next."""
        result = RoundResult(kind, server_round)
        values: dict[int, Mapping[str, Any]] = {}
        if ids is None:
            found = ((c, self.each(c)) for c in self._taking_part(manager))
            values = {c: differs for c, differs in found if differs is not None}
        ids = list(values) if ids is None else list(ids)
        control = {**control, "round": server_round + 1}
        for start in range(0, len(ids), EVALUATED):
            payloads = self.send_each(state, server_round + 1, ids[start : start + EVALUATED])
            replies = manager.send_and_receive(
                "evaluate", server_round, payloads, {}, _no_arrays, result.traffic, control,
                each=lambda c: values.get(c, {}),
            )  # fmt: skip
            for _ in _recorded(replies, result):
                pass
        result.seconds = result.traffic.seconds
        manager.require(result.traffic, server_round)
        return result

    def _queries(
        self,
        manager: ClientManager,
        state: ServerState,
        server_round: int,
        callbacks: Callbacks,
        last: Mapping[str, Any],
    ) -> Query:
        back = {name: value for name, value in last.items() if name == "back"}

        def query(kind: str, payload: Payload) -> Iterator[Reply]:
            stage = f"query.{kind}"
            result = RoundResult(stage, server_round)
            payloads = ((c, payload) for c in self._taking_part(manager))
            control = {"round": server_round + 1, **back}
            check = self._checker(state)
            replies = self._asked(manager, stage, server_round, payloads, {}, state, check, result, control)
            yield from _recorded(replies, result)
            result.seconds = result.traffic.seconds
            manager.require(result.traffic, server_round)
            callbacks.after_query(result)

        return query

    def _checker(self, state: ServerState) -> Callable[[Reply], str | None]:
        return lambda reply: self._check(state, reply)

    def _check(self, state: ServerState, reply: Reply) -> str | None:
        """Refuse arrays that the method did not declare; then let the method check the reply."""
        prefixes = tuple(self.method.up_prefixes(self.hparams))
        return self._undeclared(reply, lambda name: name.startswith(prefixes)) or self.check(state, reply)


def server_context(
    method: Method,
    hparams: Any,
    spec: ModelSpec,
    clients: Iterable[ClientInfo],
    *,
    seed: int,
    width: int,
    buffers: str = "global",
    score: Callable[[Mapping[str, Array], Mapping[str, Scalar]], float | None] | None = None,
) -> ServerContext:
    """Return what a strategy knows at the start; the initial values are those of a new model of `spec`.

    Parameters
    ----------
    spec : the server's model. `seed` decides the initial values; the seed of `spec` is not used.
    width : feature width d of the common head.   buffers : as in the run configuration.
    score : scores a model on the central test set, if there is one.
    """

    def initial_from(k: int) -> Arrays:
        drawn = dataclasses.replace(spec, seed=sampling.server_model_seed(seed, k))
        arrays: Arrays = method.client.initial_arrays(drawn, method, hparams, buffers)
        return arrays

    return ServerContext(
        seed=seed,
        clients=tuple(clients),
        num_classes=spec.num_classes,
        width=width,
        initial=initial_from(0),
        initial_from=initial_from,
        rng=lambda purpose, *numbers: sampling.rng(seed, purpose, *numbers),
        score=score or (lambda arrays, scalars: None),
        shape=spec.shape,
        weights=spec.settings.weights,
    )


def weighted_mean(
    replies: Iterable[Reply], previous: Mapping[str, Any], mean: RunningMean | RobustMean | None = None
) -> Arrays:
    """Average the arrays named in `previous` over replies, weighted by n_k; without replies return `previous`.

    Replies are added in float32 as they arrive, a few at a time, because every pass reads and writes the mean. Memory
    is one model and `TOGETHER` replies for any number of clients. Another `mean` than the running one may keep all.
    """
    mean = RunningMean() if mean is None else mean
    waiting: list[tuple[Arrays, float]] = []
    for reply in replies:
        waiting.append(({n: reply.arrays[n] for n in previous}, float(reply.num_samples)))
        if len(waiting) == TOGETHER:
            mean.add_many(waiting)
            waiting = []
    mean.add_many(waiting)
    return mean.mean() if mean.replies else dict(previous)


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


def first_payload(method: Method, hparams: Any, task: Task) -> Payload:
    """Return what the server would send in round 1 if this were the only client."""
    client = method.client(task, method, hparams)
    metrics, facts = client.register()
    shapes = {n: tuple(s) for n, s in json.loads(str(facts["shapes"])).items()}
    info = ClientInfo(
        task.client, int(metrics["num-examples"]), task.model, task.num_classes, shapes, client.common_facts()
    )
    context = server_context(
        method, hparams, task.spec(0), [info], seed=task.seed, width=int(facts["width"]), buffers=task.buffers
    )
    strategy = method.strategy(method, hparams)
    payload: Payload = strategy.send(strategy.init(context), 1, task.client)
    return payload
