"""`FedStrategy`: the server side of a method as five pure functions, and the round loop that runs them over Flower.

A method states its mathematics and nothing else:

- ``init(context) -> state``: a nested dict of arrays and JSON scalars;
- ``send(state, round, client) -> Payload``;
- ``aggregate(state, round, replies) -> state``: `replies` come checked, in the order of the client ids, one by one;
- ``finalize(state, ask) -> state``: after the last round; `ask` is the only extra exchange;
- ``global_arrays(state)``: the one global model, where there is one.

The rest of this file is the same for all methods: who takes part, messages, evaluation, and what observers are told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedapp.core.averages import RunningMean
from fedapp.method import Arrays, Ask, Method, Payload, Reply, ServerContext, ServerState
from fedapp.sampling import sample_clients
from fedapp.transport.client_manager import Federation, Settings, Traffic
from fedapp.transport.records import Encoder, arrays_of

TOGETHER = 8
"""Replies that are added to a mean in one pass."""


@dataclass
class Exchange:
    """What one exchange with clients gave, for results.

    Attributes
    ----------
    kind : `train`, `evaluate`, `final` or `query.<kind>`.
    metrics : each good client's numbers, by client id, with `num-examples`.
    """

    kind: str
    round: int
    metrics: dict[int, dict[str, Any]] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    seconds: float = 0.0


class Observer:
    """Is told what happens; every method may do nothing."""

    def trained(self, exchange: Exchange, state: ServerState) -> bool:
        """Record a finished round; returning False ends the run early."""
        return True

    def evaluated(self, exchange: Exchange) -> None:
        """Record an exchange in which all clients were scored."""

    def evaluated_after(self, server_round: int) -> bool:
        """Whether the evaluation after `server_round` was recorded (a resumed run may have to make up for it)."""
        return False

    def asked(self, exchange: Exchange) -> None:
        """Record an answered question."""


class FedStrategy(Strategy):
    """Base of all strategies; by itself it is FedAvg on the method's shared arrays.

    Parameters
    ----------
    method, hparams : the method and its hyperparameters.
    """

    def __init__(self, method: Method, hparams: Any) -> None:
        self.method = method
        self.hparams = hparams
        self.context: ServerContext

    # ---- mathematics ---------------------------------------------------------------------------------------------

    def init(self, context: ServerContext) -> ServerState:
        """Return the state before round 1: the common initial values of what is shared."""
        self.context = context
        return {"model": dict(context.initial)}

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        """Return what `client` gets in `server_round`: the shared arrays, the same for all."""
        return Payload(common=state["model"])

    def send_each(self, state: ServerState, server_round: int, clients: Iterable[int]) -> Iterator[tuple[int, Payload]]:
        """Yield each client with what it gets; for methods whose payloads are cheaper to compute several at a time."""
        return ((client, self.send(state, server_round, client)) for client in clients)

    def aggregate(self, state: ServerState, server_round: int, replies: Iterable[Reply]) -> ServerState:
        """Average the shared arrays over the participants, weighted by n_k."""
        return {**state, "model": weighted_mean(replies, state["model"])}

    def check(self, reply: Reply) -> str | None:
        """Say what is wrong with a reply beyond names, shapes and NaN; None if nothing."""
        return None

    def finalize(self, state: ServerState, ask: Ask) -> ServerState:
        """Finish after the last round."""
        return state

    def global_arrays(self, state: ServerState) -> Arrays | None:
        """Return the one global model by wire name, or None where the method has none."""
        return dict(state["model"]) if self.method.global_model else None

    def report(self, state: ServerState) -> dict[str, Any]:
        """Return further entries for the run's summary."""
        return {}

    def state_dict(self, state: ServerState) -> ServerState:
        """Return the state as nested dicts of arrays and scalars, for a checkpoint."""
        return state

    def load_state_dict(self, state: ServerState, context: ServerContext) -> ServerState:
        """Take a checkpointed state back."""
        self.context = context
        return state

    # ---- the round loop ------------------------------------------------------------------------------------------

    def expected(self, federation: Federation) -> dict[str, tuple[int, ...]]:
        """Shapes of the model arrays that every reply must hold."""
        prefixes = self.method.up_prefixes(self.hparams)
        shapes = next(iter(federation.infos.values())).shapes
        return {n: s for n, s in shapes.items() if any(n.startswith(p) or n == p.rstrip(".") for p in prefixes)}

    def run(
        self,
        federation: Federation,
        context: ServerContext,
        *,
        rounds: int,
        done: int = 0,
        state: ServerState | None = None,
        observer: Observer | None = None,
        control: Callable[[int], Mapping[str, Any]] = lambda server_round: {},
        evaluate_every: int = 0,
    ) -> ServerState:
        """Run rounds `done + 1 .. rounds`, finish, and score all clients once.

        Parameters
        ----------
        state : state after round `done` (None: start afresh).
        control : values that go with the messages of a round, such as whether to measure the balanced score.
        evaluate_every : n > 0: an evaluation exchange with all clients every n rounds.

        Returns
        -------
        The final state.
        """
        observer = observer or Observer()
        state = self.init(context) if state is None else self.load_state_dict(state, context)
        if (
            evaluate_every
            and done
            and done % evaluate_every == 0
            and done < rounds
            and not observer.evaluated_after(done)
        ):
            observer.evaluated(self._evaluate(federation, state, done, "evaluate", control(done)))
        for server_round in range(done + 1, rounds + 1):
            started = time.perf_counter()
            federation.greet()
            ids = sample_clients(context.seed, server_round, list(federation.nodes), federation.settings.fraction)
            state, exchange = self._train(federation, state, server_round, ids, control(server_round))
            exchange.seconds = time.perf_counter() - started
            proceed = observer.trained(exchange, state)
            if evaluate_every and server_round % evaluate_every == 0 and server_round < rounds:
                observer.evaluated(self._evaluate(federation, state, server_round, "evaluate", control(server_round)))
            if not proceed:
                rounds = server_round
                break
        state = self.finalize(state, self._asker(federation, rounds, observer))
        observer.evaluated(self._evaluate(federation, state, rounds, "final", {"balanced": True}))
        return state

    def _train(
        self, federation: Federation, state: ServerState, server_round: int, ids: list[int], control: Mapping[str, Any]
    ) -> tuple[ServerState, Exchange]:
        exchange = Exchange("train", server_round)
        replies = federation.exchange(
            "train",
            server_round,
            self.send_each(state, server_round, ids),
            self.expected(federation),
            self._check,
            exchange.traffic,
            control,
        )
        state = self.aggregate(state, server_round, _recorded(replies, exchange))
        for _ in replies:
            raise RuntimeError(f"{type(self).__name__}.aggregate left replies unread")
        federation.require(exchange.traffic, server_round)
        return state, exchange

    def _evaluate(
        self, federation: Federation, state: ServerState, server_round: int, kind: str, control: Mapping[str, Any]
    ) -> Exchange:
        """Score all clients after `server_round`, on what the server would send next and their own state."""
        exchange = Exchange(kind, server_round)
        payloads = self.send_each(state, server_round + 1, sorted(federation.nodes))
        control = {**control, "round": server_round + 1}
        replies = federation.exchange("evaluate", server_round, payloads, {}, _no_arrays, exchange.traffic, control)
        for _ in _recorded(replies, exchange):
            pass
        exchange.seconds = exchange.traffic.seconds
        federation.require(exchange.traffic, server_round)
        return exchange

    def _asker(self, federation: Federation, server_round: int, observer: Observer) -> Ask:
        def ask(kind: str, payload: Payload) -> Iterator[Reply]:
            stage = f"query.{kind}"
            exchange = Exchange(stage, server_round)
            payloads = ((c, payload) for c in sorted(federation.nodes))
            control = {"round": server_round + 1}
            replies = federation.exchange(stage, server_round, payloads, {}, self._check, exchange.traffic, control)
            yield from _recorded(replies, exchange)
            exchange.seconds = exchange.traffic.seconds
            federation.require(exchange.traffic, server_round)
            observer.asked(exchange)

        return ask

    def _check(self, reply: Reply) -> str | None:
        """Refuse arrays that the method did not declare, then ask the method."""
        prefixes = self.method.up_prefixes(self.hparams)
        for name in reply.arrays:
            if not (self.method.allows(name) or any(name.startswith(p) for p in prefixes)):
                return f"'{name}' is not in what {self.method.id} shares"
        return self.check(reply)

    # ---- Flower's Strategy interface -----------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the strategy the way any Flower strategy is started: for apps other than fedapp's own.

        The clients must answer `query.hello` as fedapp's ClientApp does. `initial_arrays` are the shared arrays by wire
        name; the result holds the global model where there is one, else the shared arrays.
        """
        config = dict(train_config or ConfigRecord())
        federation = Federation(grid, Settings(round_timeout=timeout), {})
        infos = federation.gather(0)
        federation.agree(self.method)
        facts = next(iter(federation.facts.values()))
        initial = arrays_of(initial_arrays)
        context = ServerContext(
            seed=int(config.get("seed", 0)),  # type: ignore[arg-type]
            clients=tuple(infos),
            num_classes=infos[0].num_classes,
            width=int(facts["width"]),
            initial=initial,
            initial_from=lambda k: initial,
            rng=_rng(int(config.get("seed", 0))),  # type: ignore[arg-type]
            channels=int(facts["channels"]),
            size=int(facts["size"]),
        )
        result = Result()

        class Keep(Observer):
            def trained(self, exchange: Exchange, state: ServerState) -> bool:
                result.train_metrics_clientapp[exchange.round] = _mean_metrics(exchange)
                return True

            def evaluated(self, exchange: Exchange) -> None:
                result.evaluate_metrics_clientapp[exchange.round] = _mean_metrics(exchange)

        state = self.run(federation, context, rounds=num_rounds, observer=Keep())
        result.arrays = ArrayRecord({n: Encoder().one(a) for n, a in (self.global_arrays(state) or initial).items()})
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Refuse Flower's own loop: `start` runs the round loop of this class, which checks and orders replies."""
        raise RuntimeError(
            f"{type(self).__name__} runs its own round loop: call start(grid, initial_arrays, num_rounds)"
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Refuse Flower's own loop, as `configure_train` does."""
        raise RuntimeError(
            f"{type(self).__name__} runs its own round loop: call start(grid, initial_arrays, num_rounds)"
        )

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Clients are scored inside the train exchange: no evaluation messages."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Clients are scored inside the train exchange: nothing to aggregate."""
        return None

    def summary(self) -> None:
        """Say nothing: the run directory holds the configuration."""


def weighted_mean(replies: Iterable[Reply], previous: Mapping[str, Any]) -> Arrays:
    """Average the arrays named in `previous` over replies, weighted by n_k; without replies `previous` stays.

    Replies are added in float32 as they come, a few at a time, since every pass reads and writes the mean; memory is
    one model and `TOGETHER` replies however many clients there are.
    """
    mean = RunningMean()
    waiting: list[tuple[Arrays, float]] = []
    for reply in replies:
        waiting.append(({n: reply.arrays[n] for n in previous}, float(reply.num_samples)))
        if len(waiting) == TOGETHER:
            mean.add_many(waiting)
            waiting = []
    mean.add_many(waiting)
    return mean.mean() if mean.replies else dict(previous)


def _no_arrays(reply: Reply) -> str | None:
    return f"an evaluation holds no arrays, but '{next(iter(reply.arrays))}' came" if reply.arrays else None


def _recorded(replies: Iterator[Reply], exchange: Exchange) -> Iterator[Reply]:
    for reply in replies:
        exchange.metrics[reply.client] = {**reply.metrics, "bytes-up": reply.bytes_up}
        yield reply


def _mean_metrics(exchange: Exchange) -> MetricRecord:
    rows = list(exchange.metrics.values())
    names = [n for n in (rows[0] if rows else {}) if all(isinstance(r.get(n), (int, float)) for r in rows)]
    return MetricRecord({n: float(sum(float(r[n]) for r in rows) / len(rows)) for n in names})


def _rng(seed: int) -> Callable[..., Any]:
    from fedapp.sampling import rng

    return lambda purpose, *numbers: rng(seed, purpose, *numbers)
