"""The only ClientApp, used by all engines: its message handlers build a `FedClient` and call it."""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from clients._checks import check_private
from clients.base import FedClient
from fedapp import config as configuration
from fedapp import plugins, process, sampling
from fedapp.client_steps import (
    Handler,
    Outcome,
    Step,
    around,
    bounded_update,
    claimed,
    released_numbers,
    secure_sum,
)
from fedapp.config import RunConfig, dp_rules
from fedapp.core.names import prefixed
from fedapp.core.secure_sum import Unsafe
from fedapp.data import partitions
from fedapp.data.moments import feature_sums
from fedapp.errors import BadRequest, plain
from fedapp.files import absolute
from fedapp.learning.releases import Ledger, Releaser, path_of
from fedapp.learning.state import MOST_ROUNDS, ClientStore, Expected, StateError
from fedapp.learning.task import Task
from fedapp.method import Payload, Scalar
from fedapp.models import frozen
from fedapp.reduce.scaling import KIND, SCALING
from fedapp.results import predict
from fedapp.tasks import node as nodes
from fedapp.tasks.node import Node
from fedapp.transport import secure
from fedapp.transport.identity import Identity
from fedapp.transport.packing import PACKED, pack, unpack
from fedapp.transport.records import PARTS, REQUEST, Part, Records, parts, payload_of, reply_records, sealed, together
from fedapp.transport.request import WITHOUT_DATA, RoundRequest
from fedapp.transport.secure import SecureClient


def allowed_imports(context: Context) -> AbstractContextManager[None]:
    """On a real node: import no own code but what the node-config names."""
    node = context.node_config
    real = process.real_node() or node.keys() & {"client-id", "allow"}
    return plugins.only(f"{node.get('allow', '')}, {node.get('model', '')}") if real else nullcontext()


class App(ClientApp):
    """Answers every kind of query, so that no method must be imported to know which kinds there are."""

    def __init__(self) -> None:
        super().__init__()
        # Of this object, not of the class: Ray makes a new one of it for each message, in a process that goes on.
        self.kinds: set[str] = set()

    def __call__(self, message: Message, context: Context) -> Message:
        """Execute a message; a packed one has a packed reply."""
        if packed := PACKED in message.content.array_records:
            unpack(message.content)
        category, _, kind = message.metadata.message_type.partition(".")
        if category == "query" and kind.isidentifier() and kind != "register" and kind not in self.kinds:
            self.kinds.add(kind)
            self.query(kind)(functools.partial(handle, f"query.{kind}"))
        with allowed_imports(context):
            reply = super().__call__(message, context)
        if packed:
            pack([reply])
        return reply


app = App()


def build(context: Context, config: RunConfig, request: RoundRequest) -> FedClient:
    """Build the client that a message is addressed to.

    Raises
    ------
    BadRequest : the node's configuration or its data do not fit the run.
    """
    if not 0 <= request.round < MOST_ROUNDS:
        raise BadRequest(f"round {request.round} is not within 0 .. {MOST_ROUNDS - 1}")
    node = _node(context, config, request)
    method, hparams = config.method_and_hparams()
    task = _task(node, config, request)
    store, releaser = None, None
    if request.run:
        # On a real node only the node itself decides where files are written.
        real = process.real_node()
        root = node.state_root() if real else Path(config.storage.state_dir or request.state_dir)
        folder = root / (config.storage.federation or "run") / str(node.client)
        known = Expected(request.state, request.state_binds, config.storage.lost_state == "restart")
        about = {
            "names of classes": nodes.fingerprint(task.extras.get("classes", ())),
            "names of features": nodes.fingerprint(task.inputs.features),
            **predict.made_with(task.model, ""),
        }
        store = ClientStore(
            folder,
            config.federation.method,
            request.run,
            config.storage.warm_start,
            request.keep,
            real,
            known,
            config.privacy.dp,
            about,
        )
        store.back = request.back
        releaser = _releaser(context, root, node, config, request)
    client: FedClient = method.client(task, method, hparams, store)
    client.releaser = releaser
    return client


def _releaser(context: Context, root: Path, node: Node, config: RunConfig, request: RoundRequest) -> Releaser | None:
    """Return what books and noises the releases of a client, or None in a run without `dp`."""
    privacy = node.privacy(config)
    if privacy is None:
        return None
    if config.secure.secure_sum:
        privacy = secure.in_sum(privacy, kept_secrets(context, node.client), config.secure.secure_colluders)
    # Not by the run's names: they are the server's, and the budget belongs to the data.
    data = str(absolute(node.data_path)) if node.own and node.data_path else config.data.dataset
    about = {
        "run": request.run, "federation": config.storage.federation, "round": request.round,
        "method": config.federation.method,
    }  # fmt: skip
    seed = sampling.derived_seed(config.federation.seed, "dp-test", request.round, node.client)
    path = path_of(root, node.client, data)
    head = root / (config.storage.federation or "run") / str(node.client) / f"{path.stem}.head"
    ledger = Ledger(path, head if process.real_node() else None, request.releases)
    return Releaser(privacy, ledger, about, seed)


def _node(context: Context, config: RunConfig, request: RoundRequest) -> Node:
    """Return whose client this is: in a simulation the server's number, where there are more clients than nodes."""
    if request.client >= 0 and not process.real_node():
        return Node(client=request.client, partitions=config.data.clients or request.clients)
    return Node.parse(context.node_config)


def _task(node: Node, config: RunConfig, request: RoundRequest) -> Task:
    process.prepare(config.training.threads)
    images = min(partitions.UNION, request.balanced_images or partitions.UNION)
    if node.own or process.real_node():
        node.check(config)
    task = nodes.node_task(config, node, process.device(), images)
    return replace(task, inputs=task.inputs.scaled(request.scaling)) if request.scaling else task


def newcomer(context: Context, config: RunConfig, request: RoundRequest, alone: bool = False) -> FedClient:
    """Build a client that has stored nothing; `alone`: one that trains the plain model, whatever the method is."""
    method, hparams = config.method_and_hparams()
    kind: type[FedClient] = FedClient if alone else method.client
    return kind(_task(_node(context, config, request), config, request), method, hparams)


def score_newcomer(
    build: Callable[[bool], FedClient], payload: Payload, server_round: int, epochs: Iterable[int]
) -> dict[str, Any]:
    """Score a client that took no part in the training: as it receives, and after n epochs on it and without it.

    Parameters
    ----------
    build : makes the client as :func:`newcomer` does. A method's client keeps what it likes, so each score has its own.
    payload : the server's to a newcomer in `server_round`.

    Returns
    -------
    The scores `unseen_received`, with methods that fine-tune `unseen_tuned`, and, for each n of `epochs`,
    `unseen_trained@n`, and `unseen_local@n` of the client's own initial model, trained alone as long.
    """
    first = build(False)
    metrics = first.meet(payload, server_round, "unseen_received", 0)
    if first.tunes():
        metrics |= _tuned(first, "unseen_tuned", balanced=True)
    for n in epochs:
        metrics |= build(False).meet(payload, server_round, f"unseen_trained@{n}", n)
        metrics |= build(True).meet(Payload(), server_round, f"unseen_local@{n}", n)
    return metrics


def kept_secrets(context: Context, client: int) -> Mapping[str, Any]:
    """Return the secrets of secure sums that a node keeps in memory for a client; they end with the run."""
    found: Mapping[str, Any] = context.state.config_records.get(f"secure-{client}", {})
    return found


@contextmanager
def secrets_of(context: Context, config: RunConfig, client: int) -> Iterator[SecureClient]:
    """Give a client's side of secure sums, and keep its secrets in the node's memory."""
    kept = dict(kept_secrets(context, client))
    try:
        node = Node.parse(context.node_config)
        identity = Identity(node.node_key, node.peers)
        yield SecureClient(
            client, kept, config.secure.secure_dropout, config.secure.secure_colluders, identity, node.min_sum_clients
        )
    finally:
        context.state[f"secure-{client}"] = ConfigRecord(kept)


@dataclass(frozen=True)
class Handlers:
    """The handlers of one client: each returns the client's reply to a kind of message."""

    context: Context
    config: RunConfig
    client: FedClient

    def of(self, stage: str) -> Handler:
        """Return the handler of a kind of message, with the steps around it."""
        client, privacy, bound = self.client, self.client.task.privacy, self.config.robustness.clip_update
        steps: list[Step] = []
        if self.config.secure.secure_sum:
            steps.append(secure_sum(client, functools.partial(secrets_of, self.context, self.config)))
        if process.real_node():
            steps.append(claimed(client, stage, self.context.run_id))
        if privacy is not None and stage != "register":
            steps.append(released_numbers(client))
        if stage == "train" and (bound or (privacy is not None and privacy.unit == "client")):
            steps.append(bounded_update(client, bound))
        query = functools.partial(self.query, stage.removeprefix("query."))
        found = {
            "register": self.register, "train": self.train, "evaluate": self.evaluate, f"query.{KIND}": self.scaling
        }.get(stage, query)  # fmt: skip
        return around(found, steps)

    def register(self, request: RoundRequest, payload: Payload) -> Outcome:
        """Return the client's statements about itself, after a check of all that it would refuse later."""
        client = self.client
        if process.real_node():
            nodes.try_own(client.task)
        stated = client.task.privacy
        if stated is not None and stated.unit == "client":
            dp_rules.check_names(client.up_names())
        if stated is not None and stated.sgd:
            check_private(client)
            if not len(client.task.y_train):
                raise BadRequest("dp = 'sgd': this client has no training samples: leave it out, or raise min-samples")
        numbers, facts = client.register()
        count = _node(self.context, self.config, request).partitions
        classes = "" if count else nodes.fingerprint(client.task.extras["classes"])
        return Outcome({}, numbers, {**facts, "partitions": count, "classes": classes})

    def train(self, request: RoundRequest, payload: Payload) -> Outcome:
        """Run one round: evaluate, train, evaluate, store, reply."""
        client = self.client
        arrays, _, numbers = client.train_round(payload, request.round, balanced=request.balanced)
        # A digest of what was trained on the data without noise says more of them than noised numbers may.
        facts = state_facts(client) if client.releaser is None else {}
        if client.store is not None and client.store.ignored:
            print(
                f"fedapp: ignoring a damaged state file that this method does not need: {plain(client.store.ignored)}",
                flush=True,
            )
        _remember(self.context, client, request.round)
        if self.config.storage.lost_state == "restart":
            numbers["restarted"] = int("state-lost" in facts)
        self.keep("trained", request, request.round, payload.scalars)
        return Outcome(arrays, numbers, facts)

    def evaluate(self, request: RoundRequest, payload: Payload) -> Outcome:
        """Score the received model and, as the request says, a tuned and a trained one."""
        client, server_round, balanced = self.client, request.round, request.balanced
        if request.unseen:
            make = functools.partial(newcomer, self.context, self.config, request)
            return Outcome({}, score_newcomer(make, payload, server_round, self.config.evaluation.adaptations))
        train = request.train and "trained" in client.task.protocols
        without = train or request.received_only
        numbers = client.evaluate_round(payload, server_round, balanced=balanced, train=without)
        if payload.all():
            self.keep("received", request, server_round - 1, payload.scalars)
        if request.final and request.tune and client.tunes():
            tuned = _tuned(client, "tuned", balanced)
            if tuned:
                self.keep("tuned", request, server_round - 1, payload.scalars)
            numbers |= tuned
        if train:
            numbers |= client.train_to_score(payload, balanced=balanced)
            if request.final:
                self.keep("trained", request, server_round, payload.scalars)
        return Outcome({}, numbers)

    def query(self, kind: str, request: RoundRequest, payload: Payload) -> Outcome:
        """Answer a query of the server."""
        arrays, _, numbers = self.client.answer_query(kind, payload, request.round)
        return Outcome(arrays, numbers)

    def scaling(self, request: RoundRequest, payload: Payload) -> Outcome:
        """Return the sums from which mean and deviation of the features of all clients follow.

        Rows of classes with fewer than `min-class-count` rows are left out, since other replies may describe the rest.
        """
        settings, task = self.config.model, self.client.task
        if not frozen.of(settings.model, settings).scaled:
            raise BadRequest("the server asks for sums of features, and this run's model does not standardise any")
        least = _node(self.context, self.config, request).min_class_count
        rows = task.x_train[task.y_train.bincount()[task.y_train] >= least].cpu().numpy()
        if not len(rows):
            raise BadRequest("this node has too few rows of every class (min-class-count in the node-config)")
        return Outcome(prefixed(SCALING, feature_sums(rows)))

    def keep(self, protocol: str, request: RoundRequest, rounds: int, scalars: Mapping[str, Scalar]) -> None:
        """Keep the model of a score for use after the run: on a real node always, in a simulation at the end."""
        client, folder = self.client, None
        if process.real_node():
            folder = client.store.folder if client.store is not None else None
        elif request.final and request.models_dir:
            folder = Path(request.models_dir) / str(client.task.client)
        if folder is not None:
            path = folder / predict.FILES[protocol]
            predict.keep(path, client, protocol, self.config, rounds, scalars)


def _tuned(client: FedClient, protocol: str, balanced: bool) -> dict[str, Any]:
    """Return the score after fine-tuning. Where that diverges it alone is missing, because nothing depends on it."""
    try:
        return client.tune_to_score(protocol, balanced=balanced)
    except FloatingPointError as e:
        if process.real_node():
            print(f"fedapp: there is no score after fine-tuning: {plain(e)}", flush=True)
        return {}


def state_facts(client: FedClient) -> dict[str, Scalar]:
    """Return the facts by which the server recognises the stored state of a round in the next one.

    Returns
    -------
    `state` : its digest.   `state-from` : digest of the last state in the server's records, from which it was made.
    `state-binds` : whether the next training starts from it.   `state-lost` : why it was not read.
    """
    if client.store is None:
        return {}
    facts: dict[str, Scalar] = {
        "state": client.store.written,
        "state-from": "" if client.store.lost else client.store.expected.digest,
        "state-binds": client.starts_from_state or bool(client.own),
    }
    return facts | ({"state-lost": client.store.lost} if client.store.lost else {})


def _remember(context: Context, client: FedClient, server_round: int) -> None:
    """Note round, path and digest of the state in the node's context; the state itself is on disk."""
    if client.store is not None and client.store.written:
        path = str(client.store.folder / f"{client.store.run}.{server_round:06d}.safetensors")
        context.state["fedapp"] = ConfigRecord({"round": server_round, "path": path, "hash": client.store.written})


def handle(stage: str, message: Message, context: Context) -> Message:
    """Run one stage of each client of a message. Errors become replies, which name client, stage and reason."""
    real = process.real_node()
    read = functools.cache(lambda: configuration.from_context(context.run_config, nodes=real))  # once for all clients
    if real or PARTS not in message.content.config_records:
        return Message(sealed(_reply(stage, message, context, read)), reply_to=message)
    replies = {client: _reply(stage, part, context, read) for client, part in parts(message.content).items()}
    return Message(together(replies), reply_to=message)


def _reply(stage: str, message: Message | Part, context: Context, read: Callable[[], RunConfig]) -> Records:
    started, info = time.perf_counter(), dict[str, Scalar]()
    try:
        payload, request = payload_of(message, checked=not process.real_node())
        config = read()
        if config.secure.secure_sum and stage in WITHOUT_DATA:
            with secrets_of(context, config, _node(context, config, request).client) as secrets:
                info["client"] = secrets.member.client
                arrays = secrets.answer(stage, payload, request)
            return reply_records(arrays, {"num-examples": 0}, info, "fp32")
        client = build(context, config, request)
        info |= {"client": client.task.client, "model": client.task.model}
        outcome = Handlers(context, config, client).of(stage)(request, payload)
        numbers = {**outcome.numbers, "num-examples": client.task.num_samples}
        if stage != "register" and not (client.task.privacy is not None and process.real_node()):
            numbers["seconds"] = time.perf_counter() - started
        facts = {**info, **outcome.facts}
        return reply_records(outcome.arrays, numbers, facts, config.federation.wire_dtype, lend=process.worker())
    except Exception as error:
        return _failed(error, stage, info, message, context)


def _failed(
    error: Exception, stage: str, info: Mapping[str, Scalar], message: Message | Part, context: Context
) -> Records:
    """Return the reply of a client that failed; on a real node its own log has the details."""
    known = isinstance(error, (BadRequest, StateError, Unsafe))
    if known:
        print(f"fedapp: this node cannot take part in {stage}: {plain(error)}", flush=True)
    text = f"{type(error).__name__}: {error}" if known else "".join(traceback.format_exception(error))
    if isinstance(error, nodes.OwnDataError) and process.real_node():
        text = "BadRequest: this node's data do not fit the run; the reason is in the node's own log"
    text += process.out_of_memory(error) or ""
    if not known and process.real_node() and context.run_config.get("dp", "none") != "none":
        print(f"fedapp: {plain(text)}", flush=True)
        text = f"{type(error).__name__} in {stage}: details are in the node's own log, since dp keeps them there"
    client = info.get("client", _number(message, context))
    return reply_records({}, {"num-examples": 0}, {**info, "error": text, "stage": stage, "client": client}, "fp32")


def _number(message: Message | Part, context: Context) -> int:
    """Return the id of the client that a message is for, as far as it can be known; else -1."""
    node = context.node_config
    number: Any = node.get("client-id", node.get("partition-id"))
    if not process.real_node():
        number = message.content.config_records.get(REQUEST, {}).get("client", number)
    return number if isinstance(number, int) else -1


app.train()(functools.partial(handle, "train"))
app.evaluate()(functools.partial(handle, "evaluate"))
app.query("register")(functools.partial(handle, "register"))
