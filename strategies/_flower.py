"""The methods in Flower's own round loop, for apps that are not fedapp's.

A `Strategy` is a Flower strategy, and `FlowerStrategy(maths)` makes one of a `Maths`: `start(grid, arrays, ...)` runs
Flower's loop, which calls the functions below. They translate between Flower's messages and the method's pure
functions. A client of such an app is anything that takes the arrays it is sent and replies with arrays of the same
names and with `num-examples`. It does not register, so a node's client id is its place in the order in which nodes were
first seen. Methods that need more from their clients, such as class means, predictions or answers to a query, need
clients that send it. The last layer of the app's model must be called `head`, unless the method treats all layers alike
(`Method.head`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections.abc import Iterable, Iterator
from logging import INFO, WARNING
from typing import Any, Self

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from flwr.serverapp.strategy.strategy_utils import sample_nodes

from fedapp.errors import BadRequest, plain
from fedapp.method import HEAD, Arrays, ClientInfo, Payload, Reply, ServerContext, ServerState
from fedapp.reduce.reader import Check, Policy, Reader, Schema
from fedapp.reduce.scaling import KIND
from fedapp.reduce.spec import Query
from fedapp.sampling import rng, sample_clients
from fedapp.transport.boundary import LARGE, Contract, decoded_problem
from fedapp.transport.records import Encoder, decoded, encoded
from strategies._maths import Maths

CLIENT_FN = (
    "a NumPyClient behind `client_fn` reads and writes Flower's earlier records: give the strategy "
    "arrayrecord_key='fitins.parameters', configrecord_key='fitins.config', weighted_by_key='num_examples' and "
    "fraction_evaluate=0.0"
)


class FlowerStrategy(FedAvg):
    """Flower's FedAvg with a method's mathematics in the place of its own.

    Parameters
    ----------
    maths : the mathematics.   policy : the treatment of replies.
    seed : decides which clients take part in a round, and every draw of the method.
    max_abs : largest value in heads and in means of representations.
    flower : what Flower's FedAvg takes: `fraction_train`, `fraction_evaluate`, `min_train_nodes`, `min_evaluate_nodes`,
        `min_available_nodes`, `weighted_by_key`, `arrayrecord_key`, `configrecord_key`, and the functions that
        aggregate metrics.
    """

    def __init__(
        self, maths: Maths, *, policy: Policy | None = None, seed: int = 0, max_abs: float = LARGE, **flower: Any
    ) -> None:
        FedAvg.__init__(self, **flower)
        self.maths, self.policy, self.seed, self.max_abs = maths, (policy or Policy()).resolved(), seed, max_abs
        self._state: ServerState | None = None
        self._clients: dict[int, int] = {}  # node id -> client id
        self._whole: Arrays = {}  # the initial arrays of the app, by name
        self._initial: Arrays = {}  # those of them that the method shares
        self._round = 0
        self._sample = (0, 1)  # nodes wanted, nodes connected
        self._counted = False  # whether a reply to `train` has counted
        self._timeout = 3600.0  # seconds for the replies of an exchange, as in `start`
        self._problem = ""  # why the last reply to `train` that did not count did not

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        *args: Any,
        **kwargs: Any,
    ) -> Result:
        """Run Flower's loop from `initial_arrays`, then what the method does after its last round.

        Returns
        -------
        Flower's result. Its arrays are the initial ones with the global model where the method has one, else with what
        the client with the lowest id would get next; `personal_arrays(client)` gives those of any client.
        `evaluate_fn` is called after each round, before what the method does at the end.

        Raises
        ------
        BadRequest : the method cannot find its layers in `initial_arrays`, or no client could read its first message.
        RuntimeError : no reply of any round counted.
        """
        self._state, self._clients, self._round = None, {}, 0
        self._counted, self._problem, self._timeout = False, "", timeout
        self._take(initial_arrays)
        result = super().start(grid, initial_arrays, num_rounds, timeout, *args, **kwargs)
        if self._round and self.fraction_train and not self._counted:
            rounds = f"{self._round} round{'s' * (self._round > 1)}"
            raise RuntimeError(
                f"no reply to train counted in {rounds}, so the arrays are as they were given. The last reason: "
                f"{plain(self._problem) or 'no client answered'}"
            )
        if self._state is not None:
            self._state = self.maths.finalize(self._state, self._query(grid))
            result.arrays = self._record()
        return result

    def personal_arrays(self, client: int) -> Arrays:
        """Return the arrays that `client` would get next, after a run by `start`."""
        if self._state is None:
            raise RuntimeError("personal_arrays needs a finished run: call start first")
        return self.maths.send(self._state, self._round + 1, client).all()

    # ---- for both round loops ------------------------------------------------------------------------------------

    def under(self, policy: Policy) -> Self:
        """Return this strategy with another treatment of replies."""
        other = copy.copy(self)
        other.policy = policy
        if isinstance(other, Maths):
            other.maths = other
        return other

    @property
    def reader(self) -> Reader:
        """Reads the replies of this method under the policy."""
        return Reader(self.maths.method, self.maths.hparams, self.maths.context, self.policy)

    def aggregate(self, state: ServerState, server_round: int, replies: Iterable[Reply]) -> ServerState:
        """Return the next state from the replies of a round: reduce them, then `update`.

        A class that defines this function gets the replies one by one.
        """
        sent = functools.partial(self.maths.send_each, state, server_round)
        reduced = self.reader.reduce("train", replies, state, sent)
        new = self.maths.update(state, server_round, reduced)
        reduced.drain()
        noted = reduced.noted(state.get("robust", {}))
        return {**new, "robust": noted} if noted else new

    def schema(self, state: ServerState, kind: str) -> Schema:
        """Return the possible replies to `kind`: the form follows from the declarations; then the method checks it."""
        schema = self.reader.schema(kind, state)
        if kind == f"query.{KIND}" or type(self.maths).check is Maths.check:
            return schema
        return dataclasses.replace(schema, check=lambda reply: schema.check(reply) or self.maths.check(state, reply))

    # ---- what Flower's loop calls --------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Choose clients and build their messages; the first round starts the method from `arrays`."""
        clients = self._connected(grid, self.min_train_nodes, self.fraction_train)
        if self._state is None:
            if not self._whole:
                self._take(arrays)
            self._state = self.maths.init(self._context())
            self._state = self.maths.prepare(self._state, self._query(grid))
        if self.fraction_train == 0.0:
            return []
        return self._messages(server_round, clients, config, MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the replies that pass the method's checks; the others are logged with the reason."""
        assert self._state is not None, "configure_train comes first"
        good = list(self._checked(replies, "train"))
        self._round = server_round
        self._counted = self._counted or bool(good)
        if not good:
            self._refuse_records([] if self._counted else [self._problem])
            return None, None
        counts = [reply.num_samples for reply, _ in good]
        self._state = self.aggregate(self._state, server_round, self.policy.believed((r for r, _ in good), counts))
        return self._record(), self.train_metrics_aggr_fn(
            _with_usual_metrics([content for _, content in good]), self.weighted_by_key
        )

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send what each client would get in the next round, for evaluation."""
        if self.fraction_evaluate == 0.0 or self._state is None:
            return []
        clients = self._connected(grid, self.min_evaluate_nodes, self.fraction_evaluate)
        return self._messages(server_round, clients, config, MessageType.EVALUATE)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Aggregate the metrics as Flower does."""
        replies = list(replies)
        if all(message.has_error() for message in replies):
            self._refuse_records(str(message.error.reason) for message in replies)
        return super().aggregate_evaluate(server_round, replies)

    # summary is Flower's own.

    # ---- pieces --------------------------------------------------------------------------------------------------

    def _refuse_records(self, problems: Iterable[str]) -> None:
        """Raise BadRequest if clients cannot read or write the records of this loop, which no further round mends."""
        if any(sign in problem for problem in problems for sign in ("fitins.", "evaluateins.", CLIENT_FN)):
            raise BadRequest(CLIENT_FN)

    def _take(self, record: ArrayRecord) -> None:
        """Keep the app's initial arrays, and those of them that the method shares: its head, all else, or both.

        The model of a foreign app need not call its body `features`. Integer arrays, such as BatchNorm's counters, are
        never averaged.
        """
        self._whole = {name: decoded(array) for name, array in record.items()}
        prefixes = self._prefixes()
        floats = {n: a for n, a in self._whole.items() if np.issubdtype(a.dtype, np.floating)}
        self._initial = {n: a for n, a in floats.items() if _under(n, prefixes)}
        self._check_layers(list(floats), prefixes)

    def _check_layers(self, names: list[str], prefixes: tuple[str, ...]) -> None:
        """Refuse a model in which the method cannot find its layers; `names` are those of its floating-point arrays.

        Raises
        ------
        BadRequest : how to name the head, or the missing part.
        """
        method = self.maths.method
        known = ", ".join(dict.fromkeys(n.rpartition(".")[0] or n for n in self._whole)) or "none"
        if method.head != "none" and not any(_under(n, HEAD) for n in names):
            raise BadRequest(
                f"{method.id} must know which layer is the head, and no layer of the app's model is called 'head' (its "
                f"layers: {known}). Call the last linear layer `head` in the model of the server and of the clients, "
                "so that its arrays are 'head.weight' and 'head.bias'"
            )
        weight, bias = (getattr(self._whole.get(n), "shape", None) for n in ("head.weight", "head.bias"))
        if method.head == "shape" and (weight is None or len(weight) != 2 or bias != weight[:1]):
            raise BadRequest(
                f"{method.id} needs one linear head: 'head.weight' of shape (classes, features) and 'head.bias' of "
                f"shape (classes,), but they are {weight or 'missing'} and {bias or 'missing'}. Make the last layer an "
                "nn.Linear with bias, and call it `head`"
            )
        # A server that treats all layers alike takes a model without a body or without a head.
        wanted = [prefixes] if method.head == "none" and prefixes else [(p,) for p in prefixes]
        for prefix in wanted:
            if not any(_under(n, prefix) for n in names):
                raise BadRequest(
                    f"{method.id} shares the layers {' and '.join(prefix)} of a model, and no floating-point array of "
                    f"the app's model is one of them (its layers: {known}). Give `start` the arrays of the whole model"
                )

    def _connected(self, grid: Grid, at_least: int, fraction: float) -> list[tuple[int, int]]:
        """Wait for enough nodes; return (client id, node id) of all that are connected now, in the order of ids."""
        _, nodes = sample_nodes(grid, max(1, self.min_available_nodes, at_least), 0)
        for node in sorted(nodes):
            self._clients.setdefault(node, len(self._clients))
        self._sample = (max(at_least, int(len(nodes) * fraction)), len(nodes))
        return sorted((self._clients[node], node) for node in nodes)

    def _context(self) -> ServerContext:
        """Return what the method knows when it starts; the clients of a foreign app state nothing about themselves."""
        head = self._whole.get("head.weight")
        shapes = {name: array.shape for name, array in self._initial.items()}
        classes, width = head.shape if head is not None else (0, 0)
        return ServerContext(
            seed=self.seed,
            clients=tuple(ClientInfo(c, 0, "", classes, shapes) for c in sorted(self._clients.values())),
            num_classes=classes,
            width=width,
            initial=self._initial,
            initial_from=lambda k: self._initial,
            rng=lambda purpose, *numbers: rng(self.seed, purpose, *numbers),
        )

    def _messages(
        self, server_round: int, connected: list[tuple[int, int]], config: ConfigRecord, kind: str
    ) -> Iterator[Message]:
        assert self._state is not None
        node_of = dict(connected)
        wanted, among = self._sample
        evaluate = kind == MessageType.EVALUATE
        purpose = "evaluation" if evaluate else "sampling"
        chosen = sample_clients(self.seed, server_round, list(node_of), wanted / among, purpose)
        # A client that gets the whole model loads all of it, with unaveraged arrays unchanged.
        fixed = {n: self._whole[n] for n in self._sent() if n not in self._initial}
        encoder = Encoder()
        # An evaluation scores what was just aggregated, which is what the next round would send.
        for client, payload in self.maths.send_each(self._state, server_round + evaluate, chosen):
            arrays = encoder.arrays(Payload(payload.arrays, {**fixed, **payload.common}))
            arrays = {n: arrays.pop(n) for n in self._sent() if n in arrays} | arrays  # in the order of the app's model
            settings = ConfigRecord({**config, **payload.scalars, "server-round": server_round})
            content = RecordDict({self.arrayrecord_key: ArrayRecord(arrays), self.configrecord_key: settings})
            yield Message(content=content, dst_node_id=node_of[client], message_type=kind)

    def _checked(
        self, replies: Iterable[Message], kind: str, further: Check = lambda reply: None
    ) -> Iterator[tuple[Reply, RecordDict]]:
        """Yield valid replies with their content, in the order of client ids; log why another one does not count."""
        assert self._state is not None
        schema = self.schema(self._state, kind)
        schema = dataclasses.replace(schema, shapes=self._shared() if kind == "train" else {})
        arrived = []
        for arrival, message in enumerate(replies):
            if message.metadata.src_node_id in self._clients:
                arrived.append((arrival, message))
            else:  # the SuperLink answers in the place of a node that has left, or of a message that expired
                reason = str(message.error.reason) if message.has_error() else "it comes from an unknown node"
                self._problem = reason
                log(WARNING, "A reply to %s does not count: %s", kind, plain(reason))
        for arrival, message in sorted(arrived, key=lambda item: self._clients[item[1].metadata.src_node_id]):
            client = self._clients[message.metadata.src_node_id]
            try:
                reply, content = self._reply(message, client, kind, arrival, list(schema.shapes))
                problem = decoded_problem(reply.arrays, self._contract(reply, schema))
                problem = problem or schema.check(reply) or further(reply)
            except (KeyError, TypeError, ValueError, OverflowError) as e:
                problem = str(e)
            if problem:
                self._problem = problem
                log(WARNING, "The reply of client %s to %s does not count: %s", client, kind, plain(problem))
            else:
                yield reply, content

    def _contract(self, reply: Reply, schema: Schema) -> Contract:
        """Return what a reply may hold. The app decides on the precision, and its arrays are in memory already."""
        dtypes = {"float32", "float64", *(str(a.dtype) for a in self._initial.values())}
        return Contract(
            reply.client, reply.kind, schema, sys.maxsize, reply.num_samples, max_abs=self.max_abs,
            dtypes=tuple(sorted(dtypes)),
        )  # fmt: skip

    def _reply(
        self, message: Message, client: int, kind: str, arrival: int, names: list[str]
    ) -> tuple[Reply, RecordDict]:
        if message.has_error():
            raise ValueError(message.error.reason)
        content = message.content
        record = next(iter(content.array_records.values()), ArrayRecord())
        arrays = {name: decoded(array) for name, array in record.items()}
        # A NumPyClient behind `client_fn` replies with a list: Flower names its arrays by their positions.
        sent = self._sent()
        if sent and list(arrays) == [str(i) for i in range(len(sent))]:
            arrays = dict(zip(sent, arrays.values(), strict=True))
        if kind == "train":  # a client may reply with its whole model; the method takes what it shares
            arrays = {n: a for n, a in arrays.items() if n in names or n not in self._whole}
        metrics: dict[str, Any] = {k: v for part in content.metric_records.values() for k, v in part.items()}
        if self.weighted_by_key not in metrics:
            hint = f": {CLIENT_FN}" if "num_examples" in metrics else ""
            raise ValueError(f"the reply has no '{self.weighted_by_key}'{hint}")
        stated = metrics[self.weighted_by_key]
        if (count := int(stated)) != stated:
            raise ValueError(f"'{self.weighted_by_key}' is {stated}, a whole number is needed")
        size = sum(a.nbytes for a in arrays.values())
        return Reply(client, count, arrays, metrics, size, kind, arrival), content

    def _sent(self) -> list[str]:
        """Return the names of the app's arrays that a client is sent, in their order."""
        return [n for n in self._whole if _under(n, self._prefixes())]

    def _shared(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the arrays that a reply must hold."""
        shapes = {name: array.shape for name, array in self._initial.items()}
        method, hparams = self.maths.method, self.maths.hparams
        return shapes if "features." in method.up_prefixes(hparams) else method.expected(hparams, shapes)

    def _prefixes(self) -> tuple[str, ...]:
        """Return the prefixes of the arrays that travel."""
        return self.maths.method.shared_prefixes(self.maths.hparams)

    def _record(self) -> ArrayRecord:
        """Return the app's model with the global arrays, or with those that the client with the lowest id would get."""
        assert self._state is not None
        arrays = self.maths.global_arrays(self._state)
        if arrays is None:
            arrays = self.personal_arrays(min(self._clients.values()))
        return ArrayRecord({name: encoded(arrays.get(name, a), "fp32") for name, a in self._whole.items()})

    def _query(self, grid: Grid) -> Query:
        """Return the query of the method, which sends one message to every node."""

        def asked(stage: str, payload: Payload, repeated: Check) -> Iterator[Reply]:
            log(INFO, "%s: asking %s nodes", stage, len(self._clients))
            arrays = ArrayRecord(Encoder().arrays(Payload(common=payload.all())))
            settings = ConfigRecord(dict(payload.scalars))
            content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: settings})
            connected = set(grid.get_node_ids())
            messages = [Message(content, node, stage) for node in self._clients if node in connected]
            return (
                reply
                for reply, _ in self._checked(grid.send_and_receive(messages, timeout=self._timeout), stage, repeated)
            )

        return self.reader.query(asked)


def _with_usual_metrics(contents: list[RecordDict]) -> list[RecordDict]:
    """Return the replies with the metrics that most replies have: a mean needs the same ones of all."""
    forms = [
        {n: len(v) if isinstance(v, list) else -1 for of in content.metric_records.values() for n, v in of.items()}
        for content in contents
    ]
    usual = max(forms, key=forms.count)
    if others := len(forms) - forms.count(usual):
        log(WARNING, "%s replies have other metrics than most, and do not count in their mean", others)
    return [content for content, form in zip(contents, forms, strict=True) if form == usual]


def _under(name: str, prefixes: tuple[str, ...]) -> bool:
    """Whether an array of a foreign app is one that is shared: its body is whatever is not called `head`."""
    return name.startswith(prefixes) or ("features." in prefixes and not name.startswith("head."))
