"""Messages pushed to nodes, and replies pulled from them in pieces: sizes are checked before anything is decoded."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from flwr.app import Array as FlowerArray
from flwr.app import Error, Message, Metadata
from flwr.serverapp import Grid

from fedapp.transport.packing import pack, unpack

UNREADABLE = 4217
"""Error code of a reply whose pieces do not make a message. Flower's codes are small."""
INCOMPLETE = 4218
"""Error code of a reply whose pieces did not all come."""
LOOK = 5.0
"""Seconds for which the pieces of one reply are pulled at a time, so that it does not hold up the others."""
AGAIN = 60.0
"""Seconds for which a call that the SuperLink fails to answer is tried again."""
TEXT_MOST = 4096
"""Largest length of a text, in characters."""


@dataclass(frozen=True)
class Coming:
    """A reply that a node has announced: its head, the names of its pieces, and the pieces so far."""

    metadata: Metadata
    names: list[str]
    pieces: dict[str, bytes] = field(default_factory=dict)


def _real(grid: Grid) -> bool:
    """Whether messages go to real nodes."""
    return hasattr(type(grid), "_runtime_client")


def push(grid: Grid, messages: list[Message]) -> list[str]:
    """Send messages that belong together, to real nodes in few pieces; return their ids, empty where one failed."""
    if _real(grid):
        pack(messages)
    return list(patiently(partial(grid.push_messages, messages)))


def arrived(
    grid: Grid, ids: Iterable[str], most: int, coming: dict[str, Coming] | None = None, last: bool = False
) -> list[Message]:
    """Return the replies so far. A reply that is not a message becomes an error message; nothing is raised.

    A real node's reply consists of many objects that name each other, and an array names its pieces. Flower trusts
    these names. It raises an error for a piece that it cannot read, so one node could end the run. It repeats a piece
    as often as the array names it, so a few bytes could fill the memory. It reads the id of the question from the
    message itself; here the id is the SuperLink's, which asked that node. It waits minutes for a missing piece and
    reads no other reply meanwhile; here an incomplete reply stays in `coming`.

    Parameters
    ----------
    ids : of the messages that were sent.   most : largest size of one reply in bytes.
    coming : replies of earlier calls that are not complete, by the id of the message that they answer. The SuperLink
        hands out a reply once, complete or not.
    last : this is the last look, so an incomplete reply becomes an error message too.
    """
    if not _real(grid):
        return list(grid.pull_messages(ids))  # from processes of the same simulation
    coming = {} if coming is None else coming
    _note_announced(grid, set(ids), coming)
    found = []
    for question in list(coming):
        reply = coming.pop(question)
        message = _assembled(grid, reply, most, last)
        if message is None:
            coming[question] = reply  # its next turn is after all others
        else:
            found.append(message)
    return found


def _note_announced(flower: Any, asked: set[str], coming: dict[str, Coming]) -> None:
    """Note the replies that the SuperLink has, with the names of their pieces; drop those to messages of the past."""
    from flwr.common.serde_utils import metadata_from_proto
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

    for past in coming.keys() - asked:
        del coming[past]
    if new := asked - coming.keys():
        pull = flower._runtime_client.PullMessages
        answer = patiently(lambda: pull(PullAppMessagesRequest(message_ids=new)))
        for given, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
            names = dict.fromkeys(part.object_id for part in iterate_object_tree(tree))
            metadata = metadata_from_proto(given.metadata)
            coming[metadata.reply_to_message_id] = Coming(metadata, list(names))


def _assembled(flower: Any, reply: Coming, most: int, last: bool) -> Message | None:
    """Pull the missing pieces of a reply; return its message, None while one is missing. See :func:`arrived`."""
    from flwr.app.message import make_message
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
    from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
    from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, inflate_object_from_contents, pull_objects

    client, node, run = flower._runtime_client, flower.node, flower.run.run_id
    metadata, pieces, code, wrong = reply.metadata, reply.pieces, UNREADABLE, ""
    pull = make_pull_object_fn_protobuf(client.PullObject, node, run)
    try:
        pull_objects([name for name in reply.names if name not in pieces], _keeping(pieces, most, pull))
    except _TooMuch as e:
        wrong = str(e)
    except _NotYet:
        if not last:
            return None
        code, wrong = INCOMPLETE, "a part of its reply is missing, and the time is over"
    except ObjectPullError as e:
        code, wrong = INCOMPLETE, f"a part of its reply is missing: {e}"
    if code == UNREADABLE:
        received = ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=metadata.message_id)
        patiently(partial(client.ConfirmMessageReceived, received))
    content: dict[str, Any] = {}
    try:
        wrong = wrong or _pieces_problem(pieces, most)
        if not wrong:
            whole: Any = inflate_object_from_contents(metadata.message_id, pieces)
            if not whole.has_error():
                unpack(whole.content)
            content = {"error": whole.error} if whole.has_error() else {"content": whole.content}
    except Exception as e:
        wrong = f"its reply is not a message: {type(e).__name__}: {str(e)[:TEXT_MOST]}"
    return make_message(metadata, **({"error": Error(code, wrong)} if wrong else content))


class _TooMuch(Exception):
    """More was sent than one reply may have."""


class _NotYet(Exception):
    """A piece is missing, or the time for this look is over."""


def _keeping(pieces: dict[str, bytes], most: int, pull: Callable[[str], bytes]) -> Callable[[str], bytes]:
    """Return a function that pulls into `pieces`, until one is missing or they have more than `most` bytes together."""
    from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError

    until, counting = time.monotonic() + LOOK, threading.Lock()  # Flower pulls several at once
    left = most - sum(map(len, list(pieces.values())))

    def one(name: str) -> bytes:
        nonlocal left
        if time.monotonic() > until:
            raise _NotYet
        try:
            piece = pull(name)
        except ObjectUnavailableError:
            raise _NotYet from None
        except Exception as e:
            if _passing(e):
                raise _NotYet from None
            raise
        with counting:
            if name not in pieces:  # a thread of the look before may have been late
                left -= len(piece)
                if left < 0:
                    raise _TooMuch(f"its reply has more than {most} bytes")
                pieces[name] = piece
        return piece

    return one


T = TypeVar("T")


def patiently(call: Callable[[], T]) -> T:
    """Return what a call of the SuperLink returns; while the SuperLink fails, try for `AGAIN` seconds.

    Flower itself tries again after a failed connection or a proxy's error, but not after the SuperLink's own error
    (500), such as a locked database.
    """
    until, pause = time.monotonic() + AGAIN, 0.1
    while True:
        try:
            return call()
        except Exception as e:
            if not _passing(e) or time.monotonic() > until:
                raise
        time.sleep(pause)
        pause = min(2 * pause, 5.0)


def _passing(e: Exception) -> bool:
    """Whether the SuperLink failed in a way that may pass."""
    return getattr(getattr(e, "response", None), "status_code", 0) >= 500


def _pieces_problem(pieces: Mapping[str, bytes], most: int) -> str:
    """Return the fault of the sizes that arrays would have; nothing is put together here."""
    from flwr.supercore.inflatable.inflatable_object import get_object_body, get_object_head_values_from_object_content

    left = most
    for piece in pieces.values():
        kind, names, _ = get_object_head_values_from_object_content(piece)
        if kind == FlowerArray.__qualname__:
            of = [len(pieces[name]) for name in names]
            left -= sum(of[place] for place in json.loads(get_object_body(piece, FlowerArray))["arraychunk_ids"])
        if left < 0:
            return f"the arrays of its reply have more than {most} bytes"
    return ""
