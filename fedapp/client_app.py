"""The only ClientApp, used by all engines: its message handlers build a `FedClient` and call it."""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from clients.base import FedClient
from fedapp import config as configuration
from fedapp import plugins, process, sampling
from fedapp.config import RunConfig, dp_rules
from fedapp.core import masks
from fedapp.core.secure_sum import Unsafe
from fedapp.data import partitions
from fedapp.errors import BadRequest, plain
from fedapp.learning.releases import Ledger, Releaser, path_of
from fedapp.learning.state import MOST_ROUNDS, ClientStore, Expected, StateError
from fedapp.learning.task import Task
from fedapp.method import Arrays, Payload, Scalar
from fedapp.results import predict
from fedapp.tasks import claim
from fedapp.tasks import node as nodes
from fedapp.tasks.node import Node
from fedapp.transport import secure
from fedapp.transport.clipping import clip_update, private_update
from fedapp.transport.identity import Identity
from fedapp.transport.packing import pack, unpack
from fedapp.transport.records import REQUEST, Part, Records, parts, payload_of, reply_records, sealed, together
from fedapp.transport.request import WITHOUT_DATA, RoundRequest
from fedapp.transport.secure import SecureClient


class App(ClientApp):
    """Answers every kind of query, so that no method must be imported to know which kinds there are."""

    def __init__(self) -> None:
        super().__init__()
        # Of this object, not of the class: Ray makes a new one of it for each message, in a process that goes on.
        self.kinds: set[str] = set()

    def __call__(self, message: Message, context: Context) -> Message:
        """Execute a message."""
        category, _, kind = message.metadata.message_type.partition(".")
        if category == "query" and kind.isidentifier() and kind != "register" and kind not in self.kinds:
            self.kinds.add(kind)
            self.query(kind)(functools.partial(handle, f"query.{kind}"))
        packed = unpack(message.content)
        reply = super().__call__(message, context)
        if packed:
            pack([reply])
        return reply


app = App()
SECURE = "secure"
"""Name of the record of a node's context that holds the secrets of secure sums."""


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
        kept: Mapping[str, Any] = context.state.config_records.get(f"{SECURE}-{node.client}", {})
        privacy = secure.in_sum(privacy, kept, config.secure.secure_colluders)
    # Not by the run's names: they are the server's, and the budget belongs to the data.
    data = str(Path(node.data_path).expanduser().absolute()) if node.own and node.data_path else config.data.dataset
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
    """Return whose client this is: in a simulation the server says it, where it counts more clients than nodes."""
    if request.client >= 0 and not process.real_node():
        return Node(client=request.client, partitions=config.data.clients or request.clients)
    return Node.parse(context.node_config)


def _task(node: Node, config: RunConfig, request: RoundRequest) -> Task:
    process.prepare(config.training.threads)
    images = min(partitions.UNION, request.balanced_images or partitions.UNION)
    if node.own or process.real_node():
        node.check(config)
    return nodes.node_task(config, node, process.device(), images)


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
    payload : what the server sends a newcomer in `server_round`.

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


def _imports(context: Context) -> AbstractContextManager[None]:
    """On a real node: import no own code but what the node-config names."""
    node = context.node_config
    if process.real_node() or node.keys() & {"client-id", "allow"}:
        return plugins.only(f"{node.get('allow', '')}, {node.get('model', '')}")
    return nullcontext()


def handle(stage: str, message: Message, context: Context) -> Message:
    """Run one stage of a client. Every error becomes a reply that names the client, the stage and the reason."""
    with _imports(context):
        return _handle(stage, message, context)


def _claimed(stage: str, client: FedClient, request: RoundRequest, flower: int) -> AbstractContextManager[None]:
    """On a real node: let one run at a time write to the folder of a client; a second one is told so when it asks."""
    if client.store is None or not process.real_node() or request.unseen:
        return nullcontext()
    if stage == "register":
        claim.check(client.store.folder, client.store.run)
        return nullcontext()
    return claim.held(client.store.folder, client.store.run, last=request.final, flower=flower)


def _answer(
    stage: str, context: Context, config: RunConfig, client: FedClient, payload: Payload, request: RoundRequest
) -> tuple[Arrays, dict[str, Any], dict[str, Scalar]]:
    """Run one stage; return the arrays, the metrics and the facts of the reply."""
    server_round, balanced = request.round, request.balanced

    def keep(protocol: str, rounds: int) -> None:
        """Keep the model of a score for use after the run: on a real node always, in a simulation at the end."""
        folder = None
        if process.real_node():
            folder = client.store.folder if client.store is not None else None
        elif request.final and request.models_dir:
            folder = Path(request.models_dir) / str(client.task.client)
        if folder is not None:
            predict.keep(folder / predict.FILES[protocol], client, protocol, config, rounds, payload.scalars)

    facts: dict[str, Scalar] = {}
    if stage == "register":
        if process.real_node():
            nodes.try_own(client.task)
        stated = client.task.privacy
        if stated is not None and stated.unit == "client":
            dp_rules.check_names(client.up_names())
        if stated is not None and stated.sgd:
            client.check_private()
            if not len(client.task.y_train):
                raise BadRequest("dp = 'sgd': there is no training image: leave this client out, or raise min-samples")
        metrics, facts = client.register()
        partitions = _node(context, config, request).partitions
        facts["partitions"] = partitions
        facts["classes"] = "" if partitions else nodes.fingerprint(client.task.extras["classes"])
        return {}, metrics, facts
    if stage == "train":
        arrays, count, metrics = client.train_round(payload, server_round, balanced=balanced)
        # A digest of what was trained on the data without noise says more of them than noised numbers may.
        facts = client.state_facts() if client.releaser is None else {}
        if client.store is not None and client.store.ignored:
            print(f"fedapp: nothing of a damaged file is needed here: {plain(client.store.ignored)}", flush=True)
        _remember(context, client, server_round)
        if config.storage.lost_state == "restart":
            metrics["restarted"] = int("state-lost" in facts)
        keep("trained", server_round)
        if client.releaser is not None and client.releaser.privacy.unit == "client":
            arrays = private_update(arrays, client.reference, client.releaser)
        elif config.robustness.clip_update:
            arrays, norm = clip_update(arrays, client.reference, config.robustness.clip_update)
            metrics["update-clipped"] = int(norm > config.robustness.clip_update)
    elif stage == "evaluate" and request.unseen:
        arrays, count = {}, client.task.num_samples
        metrics = score_newcomer(
            lambda alone: newcomer(context, config, request, alone),
            payload,
            server_round,
            config.evaluation.adaptations,
        )
    elif stage == "evaluate":
        arrays, count = {}, client.task.num_samples
        train = request.train and "trained" in client.task.protocols
        without = train or request.received_only
        metrics = client.evaluate_round(payload, server_round, balanced=balanced, train=without)
        if payload.all():
            keep("received", server_round - 1)
        if request.final and request.tune and client.tunes():
            tuned = _tuned(client, "tuned", balanced)
            if tuned:
                keep("tuned", server_round - 1)
            metrics |= tuned
        if train:
            metrics |= client.train_to_score(payload, balanced=balanced)
            if request.final:
                keep("trained", server_round)
    else:
        arrays, count, metrics = client.answer_query(stage.removeprefix("query."), payload, server_round)
    return arrays, {**_shown(client, arrays, metrics), "num-examples": count}, facts


def _tuned(client: FedClient, protocol: str, balanced: bool) -> dict[str, Any]:
    """Return the score after fine-tuning. Where that diverges it alone is missing, because nothing depends on it."""
    try:
        return client.tune_to_score(protocol, balanced=balanced)
    except FloatingPointError as e:
        if process.real_node():
            print(f"fedapp: there is no score after fine-tuning: {plain(e)}", flush=True)
        return {}


def _shown(client: FedClient, arrays: Arrays, metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers that may leave: with `dp` those of the ledger, and in a simulation also exact scores.

    Raises
    ------
    RuntimeError : arrays would leave that nothing has noised.
    """
    releaser = client.releaser
    if releaser is None:
        if client.task.privacy is not None and arrays:
            raise RuntimeError("dp is on, and nothing that noises is there: nothing is sent")
        return {} if client.task.privacy is not None and process.real_node() else metrics
    if releaser.privacy.sgd and not set(arrays) <= set(client.up_names()):
        raise RuntimeError(f"{client.method.id} would send more than the trained model: nothing is sent")
    if arrays and not releaser.done and not client.released:
        raise RuntimeError(f"{client.method.id} would send {next(iter(arrays))!r} without noise: nothing is sent")
    if not arrays:
        return {} if process.real_node() else metrics
    spent = releaser.spent()
    told = {"dp-epsilon": spent.epsilon, "dp-releases": spent.releases}
    return told if process.real_node() else {**metrics, **told}


def _remember(context: Context, client: FedClient, server_round: int) -> None:
    """Note round, path and digest of the state in the node's context; the state itself is on disk."""
    if client.store is not None and client.store.written:
        path = str(client.store.folder / f"{client.store.run}.{server_round:06d}.safetensors")
        context.state["fedapp"] = ConfigRecord({"round": server_round, "path": path, "hash": client.store.written})


@contextmanager
def _secrets(context: Context, config: RunConfig, client: int) -> Iterator[SecureClient]:
    """Give this client's side of secure sums; its secrets stay in the node's memory and end with the run."""
    place = f"{SECURE}-{client}"  # a node of a simulation runs several clients
    kept: dict[str, Any] = dict(context.state.config_records.get(place, {}))
    try:
        node = Node.parse(context.node_config)
        identity = Identity(node.node_key, node.peers)
        yield SecureClient(
            client, kept, config.secure.secure_dropout, config.secure.secure_colluders, identity, node.min_sum_clients
        )
    finally:
        context.state[place] = ConfigRecord(kept)


def _hidden(context: Context, config: RunConfig, client: FedClient, given: Payload, arrays: Arrays) -> Arrays:
    """Return the client's hidden part of a sum, for a server that may see only sums."""
    sums = client.method.sums(client.hparams)
    if sums is None:
        raise BadRequest(f"secure-sum: {client.method.id} needs the reply of each client")
    bits = masks.BITS
    if client.releaser is None:
        found = secure.additive(arrays, sums, client.task.num_samples, client.task.num_classes)
    elif client.releaser.steps is None:
        raise RuntimeError("dp is on, and no noise was drawn for this sum: nothing is sent")
    else:
        found, bits = {secure.NOISED: client.releaser.steps}, 0
    with _secrets(context, config, client.task.client) as secrets:
        return secrets.hide(given, found, bits)


def _handle(stage: str, message: Message, context: Context) -> Message:
    read = functools.cache(lambda: configuration.from_context(context.run_config))  # once for all clients of a message
    several = {} if process.real_node() else parts(message.content)
    if not several:
        return Message(sealed(_reply(stage, message, context, read)), reply_to=message)
    replies = {client: _reply(stage, part, context, read) for client, part in several.items()}
    return Message(together(replies), reply_to=message)


def _reply(stage: str, message: Message | Part, context: Context, read: Callable[[], RunConfig]) -> Records:
    started = time.perf_counter()
    info: dict[str, Scalar] = {}
    try:
        payload, request = payload_of(message, checked=not process.real_node())
        config = read()
        given = Payload()
        if config.secure.secure_sum and stage in WITHOUT_DATA:
            with _secrets(context, config, _node(context, config, request).client) as secrets:
                info = {"client": secrets.member.client}
                arrays = secrets.answer(stage, payload, request.run)
            return reply_records(arrays, {"num-examples": 0}, info, "fp32")
        if config.secure.secure_sum:
            payload, given = secure.taken_from(payload)
        client = build(context, config, request)
        info = {"client": client.task.client, "model": client.task.model}
        with _claimed(stage, client, request, context.run_id):
            arrays, metrics, facts = _answer(stage, context, config, client, payload, request)
        if config.secure.secure_sum and arrays:
            arrays = _hidden(context, config, client, given, arrays)
        if stage != "register" and not (client.task.privacy is not None and process.real_node()):
            metrics["seconds"] = time.perf_counter() - started
        return reply_records(arrays, metrics, {**info, **facts}, config.federation.wire_dtype, lend=process.worker())
    except Exception as e:
        known = isinstance(e, (BadRequest, StateError, Unsafe))
        if known:
            print(f"fedapp: this node cannot take part in {stage}: {plain(e)}", flush=True)
        text = f"{type(e).__name__}: {e}" if known else traceback.format_exc()
        if isinstance(e, nodes.OwnDataError) and process.real_node():
            text = "BadRequest: this node's data do not fit what the run asks for; the node's own log says why"
        text += process.out_of_memory(e) or ""
        if not known and process.real_node() and context.run_config.get("dp", "none") != "none":
            print(f"fedapp: {plain(text)}", flush=True)
            text = f"{type(e).__name__} in {stage}: the node's own log says more, since dp keeps texts of errors there"
        failed: dict[str, Scalar] = {**info, "error": text, "stage": stage}
        failed.setdefault("client", _number(message, context))
        return reply_records({}, {"num-examples": 0}, failed, "fp32")


def _number(message: Message | Part, context: Context) -> int:
    """Return the id of the client that a message is for, as far as it can be known; else -1."""
    node = context.node_config
    number: Any = node.get("client-id", node.get("partition-id"))
    if not process.real_node():
        number = message.content.config_records.get(REQUEST, {}).get("client", number)
    return number if isinstance(number, int) else -1


@app.train()
def train(message: Message, context: Context) -> Message:
    """Run one round of one client: evaluate, train, evaluate, reply."""
    return handle("train", message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Score the trained and the received model."""
    return handle("evaluate", message, context)


@app.query("register")
def register(message: Message, context: Context) -> Message:
    """Return the facts that this client states about itself."""
    return handle("register", message, context)
