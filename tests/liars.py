"""Federations in this process in which some clients send something else than their client code made."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, Context, Message
from flwr.supercore.constant import HEAD_BODY_DIVIDER
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id
from flwr.supercore.inflatable.inflatable_utils import validate_object_content

from fedapp import config as configuration
from fedapp.client_app import app
from fedapp.engines.local import prepare
from fedapp.results.runs import RunResult, read_run
from fedapp.server_app import serve
from fedapp.transport.local_grid import LocalGrid
from fedapp.transport.records import ARRAYS

Lie = Callable[[str, Message], Message | None]
"""Takes the type of a message and the client's reply to it, and returns what is sent; None = silence."""


class LyingGrid(LocalGrid):
    """A grid whose clients may say nothing: the server then gets no reply."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        asked, replies = set(message_ids), list[Message]()
        while not replies and not asked.isdisjoint(self._waiting):  # the next one answers though this one does not
            replies = [reply for reply in super().pull_messages(asked) if reply is not None]
        return replies


def federate(
    out: Path, liars: Iterable[int], lie: Lie, clients: int = 5, nodes: bool = False, **settings: Any
) -> RunResult:
    """Run a federation on digits in which the replies of `liars` are changed by `lie`; with `nodes` on real nodes."""
    chosen = set(liars)
    plain: dict[str, Any] = {"dataset": "digits", "clients": clients, "rounds": 1, "local-epochs": 1, "batch-size": 64}
    values = {**plain, **{name.replace("_", "-"): value for name, value in settings.items()}}
    values["num-server-rounds"] = values.pop("rounds")

    def client_app(message: Message, context: Context) -> Any:
        reply = app(message, context)
        if context.node_config["partition-id"] not in chosen:
            return reply
        return lie(message.metadata.message_type, reply)

    config = prepare(values, out)
    # Real nodes say themselves into how many parts the data are split.
    flat = configuration.for_context(config.replaced(clients=0) if nodes else config)
    grid: Any = LyingGrid(client_app, flat, config.data.clients)  # type: ignore[arg-type]
    if nodes:
        del grid.pull_interval  # what tells a simulation's grid
        for context in grid.contexts.values():
            context.node_config["state-dir"] = str(out.with_name(f"{out.name}-state"))
    serve(grid, flat, None)
    return read_run(out)


def change_arrays(reply: Message, change: Callable[[str, np.ndarray], np.ndarray]) -> Message:
    """Replace every array of a reply."""
    record = reply.content.array_records.get(ARRAYS, ArrayRecord())
    new = {name: FlowerArray(np.asarray(change(name, array.numpy()))) for name, array in record.items()}
    reply.content[ARRAYS] = ArrayRecord(new)
    return reply


Forge = Callable[[str, bytes], bytes]
"""Takes the kind and the body of a piece of a message, and returns another body."""


def forged(message: Message, change: Forge) -> dict[str, bytes]:
    """Take a message apart as a node does, with other bodies; returns the pieces by id, the message itself last."""
    made: dict[str, str] = {}
    pieces: dict[str, bytes] = {}
    for name, part in get_all_nested_objects(message).items():
        whole = part.deflate()
        for old, new in made.items():
            whole = whole.replace(old.encode(), new.encode())
        head, _, body = whole.partition(HEAD_BODY_DIVIDER)
        kind, children, _ = head.decode().split(" ")
        body = change(kind, body)
        whole = f"{kind} {children} {len(body)}".encode() + HEAD_BODY_DIVIDER + body
        validate_object_content(whole)  # what the SuperLink asks of it
        made[name] = get_object_id(whole)
        pieces[made[name]] = whole
    return pieces


def often(times: int) -> Forge:
    """Say that an array has its first piece so many times."""

    def change(kind: str, body: bytes) -> bytes:
        return json.dumps({**json.loads(body), "arraychunk_ids": [0] * times}).encode() if kind == "Array" else body

    return change
