"""Federations in this process in which some clients send something else than their client code made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, Context, Message

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
        return [reply for reply in super().pull_messages(message_ids) if reply is not None]


def federate(out: Path, liars: Iterable[int], lie: Lie, clients: int = 5, **settings: Any) -> RunResult:
    """Run a federation on digits in which the replies of `liars` are changed by `lie`."""
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
    flat = configuration.for_context(config)
    grid: Any = LyingGrid(client_app, flat, config.clients)  # type: ignore[arg-type]
    serve(grid, flat, None)
    return read_run(out)


def change_arrays(reply: Message, change: Callable[[str, np.ndarray], np.ndarray]) -> Message:
    """Replace every array of a reply."""
    record = reply.content.array_records.get(ARRAYS, ArrayRecord())
    new = {name: FlowerArray(np.asarray(change(name, array.numpy()))) for name, array in record.items()}
    reply.content[ARRAYS] = ArrayRecord(new)
    return reply
