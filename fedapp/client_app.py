"""The only ClientApp: message handlers that build a `FedClient` and call it, the same in all engines."""

from __future__ import annotations

import hashlib
import time
import traceback
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from clients.base import FedClient
from fedapp import config as configuration
from fedapp import process, registry, tasks
from fedapp.config import RunConfig
from fedapp.errors import BadRequest
from fedapp.method import Scalar
from fedapp.records import payload_of, reply_content
from fedapp.state import ClientStore

app = ClientApp()


def identity(context: Context, config: RunConfig) -> tuple[int, int]:
    """Return (client id, number of clients) of the node that handles a message.

    Raises
    ------
    BadRequest : the node-config lacks what is needed; says which keys.
    """
    node = context.node_config
    number = node.get("client-id", node.get("partition-id"))
    if number is None:
        raise BadRequest(
            "this node's node-config has neither client-id nor partition-id: start flower-supernode with "
            '--node-config "client-id=0 data-path=\'/data/site\'" or "partition-id=0 num-partitions=3"'
        )
    total = config.clients or int(node.get("num-partitions", 0))
    return int(number), total


def build(context: Context, config: RunConfig, control: dict[str, Any]) -> FedClient:
    """Build the client that a message is for."""
    process.prepare(config.threads)
    client, total = identity(context, config)
    method, hparams = config.method_and_hparams()
    task = tasks.task_of(config, client, total, process.device())
    store = None
    if control.get("run"):
        root = str(context.node_config.get("state-dir", "") or config.state_dir or control.get("state-dir", ""))
        folder = Path(root) / (config.federation or "run") / str(client)
        store = ClientStore(folder, config.method, str(control["run"]), config.warm_start)
    return method.client(task, method, hparams, store)  # type: ignore[no-any-return]


def handle(stage: str, message: Message, context: Context) -> Message:
    """Run one stage of a client; whatever goes wrong becomes a reply that says who, where and why."""
    started = time.perf_counter()
    info: dict[str, Scalar] = {}
    try:
        payload, control = payload_of(message)
        config = configuration.from_context(context.run_config)
        round = int(control.get("round", 0))
        wire = config.wire_dtype
        client = build(context, config, control)
        info = {"client": client.task.client, "model": client.task.model}
        balanced = bool(control.get("balanced", False))
        if stage == "hello":
            metrics, facts = client.hello()
            facts["partitions"] = int(context.node_config.get("num-partitions", 0))
            return Message(reply_content({}, metrics, facts, wire), reply_to=message)
        if stage == "train":
            arrays, count, metrics = client.train_round(payload, round, balanced=balanced)
            _remember(context, client, round)
        elif stage == "evaluate":
            arrays, count = {}, client.task.num_samples
            metrics = client.evaluate_round(payload, round, balanced=balanced)
        else:
            arrays, count, metrics = client.answer_query(stage.removeprefix("query."), payload, round)
        metrics = {**metrics, "num-examples": count, "seconds": time.perf_counter() - started}
        return Message(reply_content(arrays, metrics, info, wire), reply_to=message)
    except Exception as e:
        text = f"{type(e).__name__}: {e}" if isinstance(e, BadRequest) else traceback.format_exc()
        failed: dict[str, Scalar] = {**info, "error": text, "stage": stage}
        failed.setdefault(
            "client", int(context.node_config.get("client-id", context.node_config.get("partition-id", -1)))
        )
        return Message(reply_content({}, {"num-examples": 0}, failed, "fp32"), reply_to=message)


def _remember(context: Context, client: FedClient, round: int) -> None:
    """Keep round, path and hash of the stored state in the node's context; the state itself lies on disk."""
    if client.store is None:
        return
    path = client.store.folder / f"{client.store.run}.{round:06d}.safetensors"
    stat = path.stat()
    digest = hashlib.sha256(f"{path.name}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()
    context.state["fedapp"] = ConfigRecord({"round": round, "path": str(path), "hash": digest})


@app.train()
def train(message: Message, context: Context) -> Message:
    """One round of one client: evaluate, train, evaluate, reply."""
    return handle("train", message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Score the trained and the received model."""
    return handle("evaluate", message, context)


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Say who this client is."""
    return handle("hello", message, context)


def _register_queries() -> None:
    """One handler for every question that some method asks."""
    for kind in sorted({kind for method in registry.discover().values() for kind in method.queries}):

        def answer(message: Message, context: Context, stage: str = f"query.{kind}") -> Message:
            return handle(stage, message, context)

        app.query(kind)(answer)


_register_queries()
