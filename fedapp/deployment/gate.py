"""A SuperLink with two listeners: a public one for nodes, a private one for the operator and the server itself.

Flower's SuperLink serves nodes, the command line and its own helper processes on one port. Whoever reaches that port
with the CA's certificate can register nodes, submit code, and take over the task of a run. :func:`serve` starts the
same SuperLink with two listeners in one process:

- the **public** listener passes exactly the paths that a registered SuperNode uses, with limits for sizes, and only
  what a node says about its own messages (:class:`Gate`);
- the **private** listener on loopback passes everything but the paths of nodes. Flower's command line must show the
  operator's token (:class:`OperatorToken`), and tasks are given only to a helper process that knows a secret (Flower's
  ``--isolation process``).

Other users of the machine read neither its files (:func:`own_files`) nor the token of a task (:func:`superexec`). What
one node lists as objects of its message changes no other message (:mod:`fedapp.deployment.objects`). Requests pass only
through those of Flower's layers that do something for them (:mod:`fedapp.deployment.layers`).

It uses internals of Flower 1.41 (`_parse_superlink_lifespan_config`, `SuperLinkLifespan`, `create_app`,
`authenticate_node`, `subprocess_executor`, `object_store_factory`, its handlers of requests, and what tells that a node
or a run is lost) and therefore refuses to start under another minor version. The file is long because everything that
decides who gets through stands in it and is reviewed as one.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import contextlib
import ctypes
import fcntl
import hashlib
import hmac
import importlib
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typer
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin

from fedapp.deployment.layers import LINE, UnavailableMiddleware, narrow
from fedapp.engines import control
from fedapp.errors import BadRequest, one_line
from fedapp.transport import records, roster

FLOWER = (1, 41)
"""The minor version of Flower whose internals are used."""
NODE_PATHS = frozenset(
    f"/v1/fleet/{name}"
    for name in (
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "get-run",
        "get-fab",
        "push-object",
        "pull-object",
        "confirm-message-received",
    )
)
"""All that a SuperNode with a registered key asks for; registering is the operator's affair."""
ACTIVATE, PULL, PUSH_OBJECT, PUSH_MESSAGES, PULL_OBJECT, CONFIRM = (
    f"/v1/fleet/{name}"
    for name in (
        *("activate-node", "pull-messages", "push-object"),
        *("push-messages", "pull-object", "confirm-message-received"),
    )
)
FLEET = "/v1/fleet/"
"""How the paths of nodes begin, which the private listener does not serve."""
NODES_ONLY, NO_NODES = "this listener serves SuperNodes only", "SuperNodes use the public listener"
"""The answers to everything else."""
UNKNOWN_KEY = "its key is not registered; the operator admits it with fedapp admit KEY.pub --client ID"
KEY, STAMP = 1 << 10, 64
"""Most bytes of the header with a node's key, where the largest curve needs 400, and of the one with the time that it
signed. Each used time is kept for five minutes, and Python reads times with any number of digits."""
UNREGISTERED, USED = -1, -2
"""Results without a node's id: the key that signed a request is not registered; the signature was used before."""
BODY, FEW = 8 << 20, 64 << 10
"""Largest body in bytes of a request that brings a part of a reply, and of any other."""
PIECES, PIECE, ENTRY = 5000, 5 << 20, 80
"""Objects that a reply may consist of, besides one for each `PIECE` bytes of it, in which Flower sends arrays, and the
bytes that list one of them. Each array is two objects, so that a reply has up to 2,500 arrays: the largest network of
torchvision has 1,550. The SuperLink writes all of a list at once and lets nobody else write meanwhile."""
PRICE, LISTS = 18, 4
"""What one byte of a reply's list of objects counts: the SuperLink keeps 18 times as much. And how many lists a node
may send for each message: it may have to send the same one again."""
LONG = 1.0
"""Seconds from which on others must get a turn to write before the next list of objects."""
GIVEN = 4
"""Messages of a node whose parts it may ask for. A SuperNode asks for the next one when it has all of the last."""
LATEST = 1e11
"""Times in a reply, which are moments since 1970 or lengths, have fewer seconds than that: the year 5138."""
CONNECTIONS = 1024
"""Requests that a listener handles at once; further ones get 503."""
NEWS, ALL_THERE = "/v1/runtime/push-messages", "/v1/runtime/pull-messages"
"""Where a run hands over messages for nodes; where it asks for replies, when it has also sent all their parts."""
PARTS = 1.0
"""Seconds after which nodes get messages even if parts of them are still on their way. A node that asks for a part too
early asks again a second later."""
HOLD = 10.0
"""Seconds that a node's question for messages waits for one. Without waiting, Flower's node would sleep for 3 seconds
after each answer that has none. Shorter than what a node waits for an answer (30 seconds)."""
HELD = CONNECTIONS // 2
"""Questions that wait at once; further ones are answered immediately."""
TURN = 20.0
"""Seconds that a request waits for others which write to the database; a node waits 30 for its answer."""
RECOVERY, PATIENCE = 60.0, 6
"""Seconds after a failed write during which no node or run is taken for lost: heartbeats come every 20 seconds, and up
to 20 later after one that failed. And how many times 30 seconds a run may be without one; Flower's 2 are less than a
full disk takes, and the run's process ends as soon as they are over."""
STARTS = 60.0
"""Seconds until a listener must have started."""
STABLE, TRIES = 30.0, 3
"""Seconds after which the helper process counts as one that works; how often one that never did is started."""
SUMMARY = 60.0
"""Seconds between two lines about refused requests, of which strangers can send as many as they like."""
OURS = ("--host", "--port", "--isolation", "--superexec-auth-secret-file", "--insecure", "--simulation")
"""Flower's options that :func:`serve` sets itself or that would open what it closes."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Gate:
    """Pass a node's requests to an ASGI app, and answer all others.

    A list of what is allowed decides, on the decoded path that the app itself routes by: a list of what is forbidden
    would be passed by an encoded slash.

    Parameters
    ----------
    app : the SuperLink.
    max_reply : bytes that one key may send for each message that the server had for it, or fewer where the message says
        how many its reply can have (`records.group_of`); a reply alone earns nothing, so that sending more of them does
        not help. What was not used is kept for one more message. Bytes are taken off before they are read, and given
        back if the app refuses them.
    report : receives one line for each refusal because of `max_reply`, and one a minute about all others.
    signed : says which node's key has signed a request; see :class:`Signatures`.
    hold : seconds that a question for messages waits for one.

    In memory a node has at most `max_reply` bytes of bodies, of which the app works on one: it makes several copies. Of
    a stranger nothing is read but the head of a request and `FEW` bytes.

    Flower checks that the node which a request names is the one whose key has signed it. It does not check that
    anything else in there is this node's: it takes a message that answers none for an order of the server, and hands
    out, or deletes, whatever message is named. So the gate passes only replies of the node itself, and questions for
    parts of messages that it was given.
    """

    def __init__(
        self,
        app: App,
        max_reply: int,
        report: Callable[[str], object] = lambda text: None,
        signed: Callable[[Scope], int | None] = lambda scope: 0,
        hold: float = HOLD,
    ) -> None:
        self.app = app
        self.max_reply = max_reply
        self.report = report
        self.signed, self.hold = signed, hold
        self.pieces = PIECES + max_reply // PIECE
        self.longest = FEW + self.pieces * ENTRY
        self._purses: dict[int, _Purse] = {}
        self._turns: weakref.WeakValueDictionary[int, _Turn] = weakref.WeakValueDictionary()
        self._given: dict[int, collections.deque[frozenset[str]]] = {}
        self._listing, self._rest = asyncio.Lock(), 0.0
        self._news = asyncio.Event()
        self._coming: asyncio.TimerHandle | None = None
        self._held = 0
        self._refused: collections.Counter[int] = collections.Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            return
        path, headers = scope["path"], scope["headers"]
        if path not in NODE_PATHS or scope["method"] != "POST":
            await self._refuse(send, 403, NODES_ONLY)
            return
        sizes = [value for name, value in headers if name == b"content-length"]
        if len(sizes) != 1 or not sizes[0].isdigit() or any(name == b"transfer-encoding" for name, _ in headers):
            await self._refuse(send, 411, "one Content-Length is needed")
            return
        size = int(sizes[0])
        if size > (most := {PUSH_OBJECT: BODY, PUSH_MESSAGES: self.longest}.get(path, FEW)):
            await self._refuse(send, 413, f"a request body has at most {most} bytes here")
            return
        node = await asyncio.to_thread(self.signed, scope)
        if node == USED:
            await self._refuse(send, 503, "a signature is good for one request: sign again")
        elif node == UNREGISTERED and path == ACTIVATE:
            # In Flower's own words, so that the node prints them and ends; 401 ends it without any.
            error = {"code": 2004, "detail": f"Failed to activate SuperNode: {UNKNOWN_KEY}"}
            await self._refuse(send, 412, json.dumps(error), "application/json")
        elif node is None or node == UNREGISTERED:
            await self._refuse(send, 401, "a registered key must sign this")
        elif path in (PUSH_OBJECT, PUSH_MESSAGES):
            await self._priced(scope, receive, send, _header(scope, b"flwr-public-key"), node, size)
        elif path in (PULL, PULL_OBJECT, CONFIRM):
            body = await _whole(receive, size)
            if body is None:
                return
            if path == PULL:
                await self._pull(scope, body, receive, send)
            elif self._was_given(path, body):
                await self.app(scope, _again(body, receive), send)
            else:
                await _answer(send, 403, "this is not a part of a message that the node was given")
        else:
            await self.app(scope, receive, send)

    async def _refuse(self, send: Send, status: int, text: str, kind: str = "text/plain") -> None:
        """Refuse a request that may be a stranger's; refusals are counted, not logged one by one."""
        if not self._refused:
            asyncio.get_running_loop().call_later(SUMMARY, self._summarise)
        self._refused[status] += 1
        await _answer(send, status, text, kind)

    def _summarise(self) -> None:
        counts = ", ".join(f"{count} with {status}" for status, count in sorted(self._refused.items()))
        self.report(f"refused requests in the last {SUMMARY:g} s: {counts}")
        self._refused.clear()

    async def _priced(self, scope: Scope, receive: Receive, send: Send, key: bytes, node: int, size: int) -> None:
        """Handle a request that brings a part of a reply."""
        listing = scope["path"] == PUSH_MESSAGES
        purse, cost = self._purse(node), size * (PRICE if listing else 1)
        if cost > purse.left or purse.lists < listing:
            most = max(purse.given)
            self.report(f"the node with key {fingerprint(key)} sent more than {most} bytes for one reply")
            await _discard(receive)  # a node that cannot send the rest would try again and not see the answer
            await _answer(send, 413, f"a reply has at most {most} bytes here, and {LISTS} lists of its objects")
            return
        purse.take(cost, listing)
        good, turn = False, self._turns.setdefault(node, _Turn())
        try:
            async with turn.room:
                await turn.room.wait_for(lambda: turn.held + size <= max(self.max_reply, size))
                turn.held += size
            try:
                body = await _whole(receive, size)
                if body is not None:
                    async with turn.app:
                        if listing:
                            good = await self._list(scope, body, receive, send, key, node)
                        else:
                            good = await self._pass(scope, _again(body, receive), send)
            finally:
                async with turn.room:
                    turn.held -= size
                    turn.room.notify_all()
        finally:
            if not good:
                purse.take(-cost, -listing)

    async def _list(self, scope: Scope, body: bytes, receive: Receive, send: Send, key: bytes, node: int) -> bool:
        """Pass a reply's list of objects, one at a time; return whether the app accepted it."""
        status, wrong = await asyncio.to_thread(reply_problem, body, node, self.pieces)
        if wrong:
            self.report(f"refused a message of the node with key {fingerprint(key)}: {wrong}")
            await _answer(send, status, wrong)
            return False
        async with self._listing:
            # SQLite has no queue: without a pause who asks again at once would always be first.
            await asyncio.sleep(self._rest - time.monotonic())
            began = time.monotonic()
            try:
                return await self._pass(scope, _again(body, receive), send)
            finally:
                took = time.monotonic() - began
                self._rest = time.monotonic() + (took if took > LONG else 0.0)

    def _was_given(self, path: str, body: bytes) -> bool:
        """Return whether a request is for a part of a message that the node which it names was given."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest

        kind, name = (
            (ConfirmMessageReceivedRequest, "message_object_id")
            if path == CONFIRM
            else (PullObjectRequest, "object_id")
        )
        request = _read(kind, body)
        if request is None:
            return False
        return any(getattr(request, name) in parts for parts in self._given.get(request.node.node_id, ()))

    def _purse(self, node: int) -> _Purse:
        # A SuperLink that was started again does not know what it had sent before: each node begins with one reply.
        return self._purses.setdefault(node, _Purse(self.max_reply))

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Let the app handle a request; return whether it accepted it."""
        good = False

        async def seen(message: MutableMapping[str, Any]) -> None:
            nonlocal good
            good = good or (message["type"] == "http.response.start" and message["status"] == 200)
            await send(message)

        await self.app(scope, receive, seen)
        return good

    async def _pull(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Let the app answer a node that asks for messages; where there is none, once more when a run has sent some."""
        news = self._news  # what is sent while the app answers also counts
        answer, found = await self._asked(scope, body, receive)
        if found == [] and self._held < HELD:
            gone, rung = asyncio.ensure_future(receive()), asyncio.ensure_future(news.wait())
            self._held += 1
            try:
                await asyncio.wait((gone, rung), timeout=self.hold, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    return  # a message that nobody takes would count as delivered
                if rung.done():
                    answer, found = await self._asked(scope, body, receive)
            finally:
                self._held -= 1
                gone.cancel()
                rung.cancel()
        if found:
            from flwr.proto.fleet_pb2 import PullMessagesRequest

            node = PullMessagesRequest.FromString(body).node.node_id  # as the key says: the app has answered it
            purse, given = self._purse(node), self._given.setdefault(node, collections.deque(maxlen=GIVEN))
            for parts, most in found:
                purse.earn(min(most or self.max_reply, self.max_reply))
                given.append(parts)
        for message in answer:
            await send(message)

    async def _asked(
        self, scope: Scope, body: bytes, receive: Receive
    ) -> tuple[list[MutableMapping[str, Any]], list[tuple[frozenset[str], int]] | None]:
        """Return the app's answer and its `_messages`; the signature in the head is good for both questions."""
        answer: list[MutableMapping[str, Any]] = []

        async def kept(message: MutableMapping[str, Any]) -> None:
            answer.append(message)

        await self.app(dict(scope), _again(body, receive), kept)
        return answer, _messages(answer)

    async def inside(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request of the private listener; when a run has sent messages, wake the nodes that wait for one."""
        path = scope.get("path", "")
        if path.startswith(FLEET):
            # A node with an account on this machine would give orders in the server's name, past what stands above.
            await _answer(send, 403, NO_NODES)
            return
        if path == ALL_THERE and self._coming:
            self.wake()
        try:
            await self.app(scope, receive, send)
        finally:
            if path == NEWS and not self._coming:
                self._coming = asyncio.get_running_loop().call_later(PARTS, self.wake)

    def wake(self) -> None:
        """Answer all questions that wait."""
        if self._coming:
            self._coming.cancel()
        self._coming = None
        self._news.set()
        self._news = asyncio.Event()


class _Purse:
    """What a node may still send: bytes, and lists of objects.

    It holds what the two largest of its last `GIVEN` messages give at most, since the reply to a large one may come
    after smaller ones. The first message replaces what a node begins with.
    """

    def __init__(self, first: int) -> None:
        self.left, self.lists, self.new = first, LISTS, True
        self.given = collections.deque([first], maxlen=GIVEN)

    def earn(self, most: int) -> None:
        """Add what one message gives."""
        if self.new and most < self.left:
            self.left = 0
            self.given.clear()
        self.new = False
        self.given.append(most)
        self.take(-most, -LISTS)

    def take(self, cost: int, lists: int) -> None:
        """Take off, or give back."""
        self.left = min(self.left - cost, sum(sorted(self.given)[-2:]))
        self.lists = min(self.lists - lists, 2 * LISTS)


class _Turn:
    """The requests of one node that bring parts of replies: how many bytes of them are held, and whose turn it is."""

    def __init__(self) -> None:
        self.held = 0
        self.room, self.app = asyncio.Condition(), asyncio.Lock()


class Signatures:
    """Which node's registered key has signed a request in the last minutes, and that it has not done so before.

    Flower checks the signature too, and whether the key belongs to the node, but only after it has read and parsed the
    body, and it logs keys. A signature covers its time alone, and would be good for any request.

    Parameters
    ----------
    app : the SuperLink.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self._lock = threading.Lock()
        self._used: dict[tuple[int, bytes], float] = {}
        """For each node and time that were signed when this can be forgotten, the oldest first."""

    def __call__(self, scope: Scope) -> int | None:
        """Return the node's id, `UNREGISTERED`, `USED`, or None if the signature is wrong; for threads."""
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
        from fastapi import HTTPException, Request
        from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
        from flwr.proto.fleet_pb2 import ActivateNodeRequest
        from flwr.superlink.routers.fleet.node_auth import authenticate_node

        given, stamp = _header(scope, b"flwr-public-key"), _header(scope, TIMESTAMP_HEADER.encode())
        if len(given) > KEY or len(stamp) > STAMP:
            return None
        try:
            key = base64.b64decode(given, validate=True)
            if not isinstance(load_pem_public_key(key), ec.EllipticCurvePublicKey):
                return None
            authenticate_node(Request({**scope, "state": {"protobuf_request": ActivateNodeRequest(public_key=key)}}))
        except (ValueError, UnsupportedAlgorithm, HTTPException):
            return None
        node: int | None = self.app.state.linkstate_factory.state().get_node_id_by_public_key(key)
        if node is None:
            return UNREGISTERED
        now, signed = time.monotonic(), (node, stamp)
        with self._lock:
            while self._used and self._used[oldest := next(iter(self._used))] < now:
                del self._used[oldest]
            if signed in self._used:
                return USED
            self._used[signed] = now + TIMESTAMP_TOLERANCE + 2 * SYSTEM_TIME_TOLERANCE
        return node


def _header(scope: Scope, name: bytes) -> bytes:
    found: bytes = next((value for key, value in scope["headers"] if key == name), b"")
    return found


def reply_problem(body: bytes, node: int, pieces: int) -> tuple[int, str]:
    """Return status and reason if a request is not what a SuperNode sends for a reply, else 200 and an empty text.

    That the answered message was one for this node, in this run, is checked by Flower when it stores a reply.

    Parameters
    ----------
    body : the request.   node : the node that has signed it.   pieces : objects that a reply may consist of.
    """
    from flwr.common.constant import SUPERLINK_NODE_ID
    from flwr.proto.fleet_pb2 import PushMessagesRequest

    request = _read(PushMessagesRequest, body)
    if request is None:
        return 400, "this is no message"
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        return 403, "a request brings one message and one list of its objects"
    about, tree = request.messages_list[0].metadata, request.message_object_trees[0]
    if request.node.node_id != node or about.src_node_id != node:
        return 403, "a node sends messages of its own only"
    if not about.reply_to_message_id or about.dst_node_id != SUPERLINK_NODE_ID:
        return 403, "a node sends replies to the server only"
    # The database keeps NaN as nothing, and every call of the run that meets such a time fails from then on.
    if not all(0 <= t < LATEST for t in (about.created_at, about.ttl, *request.clientapp_runtime_list)):
        return 403, "the times of a reply are numbers from 0 to 1e11"
    if tree.object_id != about.message_id:
        return 403, "the list of objects belongs to another message"
    waiting, count = [tree], 0
    while waiting:
        count += 1
        waiting.extend(waiting.pop().children)
    return (413, f"a reply has at most {pieces} objects, and this one has {count}") if count > pieces else (200, "")


def _read(kind: Any, body: bytes) -> Any:
    """Return the request that a body holds, or None if it holds none."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        return kind.FromString(body)
    except DecodeError:
        return None


async def _whole(receive: Receive, size: int) -> bytes | None:
    """Return a request's body, or None if its sender is gone or it is not as long as it says."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if message["type"] == "http.disconnect" or len(body) > size:
            return None
        if not message.get("more_body", False):
            return bytes(body) if len(body) == size else None


async def _discard(receive: Receive) -> None:
    """Read the rest of a request, and keep nothing."""
    while (await receive()).get("more_body", False):
        pass


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that hands out a body that was read already."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> MutableMapping[str, Any]:
        return left.pop() if left else await receive()

    return replay


def _messages(answer: Sequence[MutableMapping[str, Any]]) -> list[tuple[frozenset[str], int]] | None:
    """Return of each message in the SuperLink's answer to a node its parts, and the bytes that its reply can have.

    Those are 0 where the message does not say it. None if the SuperLink refuses the node.
    """
    from flwr.proto.fleet_pb2 import PullMessagesResponse
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

    if not answer or answer[0].get("status") != 200:
        return None
    body = b"".join(part.get("body", b"") for part in answer)
    found = PullMessagesResponse.FromString(body)
    return [
        (frozenset(part.object_id for part in iterate_object_tree(tree)), records.most_of(message.metadata.group_id))
        for message, tree in zip(found.messages_list, found.message_object_trees, strict=True)
    ]


async def _answer(send: Send, status: int, text: str, kind: str = "text/plain") -> None:
    body = text.encode()
    headers = [
        (b"content-type", kind.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def fingerprint(key: bytes) -> str:
    """Return the start of a public key's SHA-256; `key` is the value of Flower's header, base64 of the PEM text."""
    with contextlib.suppress(ValueError):
        key = base64.b64decode(key, validate=True)
    return hashlib.sha256(key).hexdigest()[:16]


class OperatorToken(NoOpControlAuthnPlugin):
    """Flower's hook for the command line's credentials: a call is good if it carries the operator's token.

    The process keeps the token's SHA-256, not the token.
    """

    def __init__(self, token: str) -> None:
        self._digest = hashlib.sha256(token.encode()).digest()

    def validate_tokens_in_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> tuple[bool, Any]:
        """Return whether the token is right, and Flower's default account, to which all runs and nodes belong."""
        from flwr.common.constant import ACCESS_TOKEN_KEY

        given = dict(metadata).get(ACCESS_TOKEN_KEY, "")
        digest = hashlib.sha256(given if isinstance(given, bytes) else given.encode()).digest()
        good, account = hmac.compare_digest(digest, self._digest), super().validate_tokens_in_metadata(metadata)[1]
        return good, account if good else None

    def refresh_tokens(self, metadata: Sequence[tuple[str, str | bytes]]) -> tuple[None, None]:
        """Refuse: the token does not expire, so a call that asks for another one has a wrong one."""
        return None, None


def _write_secret(path: Path, content: bytes) -> None:
    """Make a file that only this user can read; `FileExistsError` if it is there."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def operator_token(path: Path) -> str:
    """Read the operator's token, or make it: 32 random bytes as text, readable by this user only.

    Raises
    ------
    BadRequest : the file cannot be read or written, others can read it, or it holds no token.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            _write_secret(path, secrets.token_urlsafe(32).encode() + b"\n")
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise BadRequest(f"the operator's token {path}: {e}") from e
    if mode & 0o077:
        raise BadRequest(f"the operator's token {path} can be read by others ({mode:o}): chmod 600 {path}")
    if len(text) < 32 or not text.isascii() or not text.isprintable() or " " in text:
        raise BadRequest(f"{path} holds no token: remove it, and a new one is made")
    return text


def login(address: str, token: str) -> None:
    """Write the token where `flwr` and `fedapp` look for the credentials of a SuperLink.

    Parameters
    ----------
    address : HOST:PORT as in Flower's configuration.   token : the operator's token.
    """
    from flwr.cli.constant import ACCESS_TOKEN_STORE_KEY, AUTHN_TYPE_STORE_KEY, REFRESH_TOKEN_STORE_KEY
    from flwr.common.constant import AuthnType
    from flwr.supercore.credential_store import get_credential_store

    store = get_credential_store()
    store.set(AUTHN_TYPE_STORE_KEY % address, AuthnType.OIDC.encode())
    for key in (ACCESS_TOKEN_STORE_KEY, REFRESH_TOKEN_STORE_KEY):
        store.set(key % address, token.encode())


def admit(api: control.Control, file: Path, client: int, known: Path, max_examples: int = 0) -> int:
    """Register a node's public key and bind it to a client id.

    Parameters
    ----------
    api : the SuperLink.   file : public key (NAME.pub).   client : client id.   known : the roster.
    max_examples : largest number of training rows, and of test rows, that the client may report; 0 = no limit.

    Returns
    -------
    The id of the node. A key that is registered already keeps its id.

    Raises
    ------
    BadRequest : the file is no public key, the client id is taken, or the SuperLink refuses.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    if client < 0 or max_examples < 0:
        raise BadRequest("--client and --max-examples are not negative")
    try:
        key = load_ssh_public_key(file.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as e:
        raise BadRequest(f"{file} is not a public key ({e}): give the .pub file that docker/keys.sh made") from e
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise BadRequest(f"{file} is not an elliptic-curve key: make it with docker/keys.sh")
    text = public_key_to_bytes(key)
    entries = roster.read(known) if known.exists() else {}
    roster.check_free(known, entries, client)
    node = api.register(text)
    roster.add(known, roster.Admitted(client, node, hashlib.sha256(text).hexdigest(), max_examples))
    return node


def _listener(address: str, private: bool) -> socket.socket:
    """Bind HOST:PORT."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or int(port) > 65535:
        raise BadRequest(f"'{address}' is not of the form HOST:PORT")
    if private and host not in ("127.0.0.1", "::1", "localhost"):
        raise BadRequest(
            f"the private listener must be on loopback, not on {host}: operators on other machines use an SSH tunnel "
            "(docs/deployment.md)"
        )
    try:
        family = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, int(port)), family=family, backlog=2048)
    except OSError as e:
        raise BadRequest(f"cannot listen on {address}: {e}") from e


def _configuration(flower: Sequence[str], private: socket.socket) -> Any:
    """Read flower-superlink's options with what a guarded SuperLink always has."""
    found = minor(metadata.version("flwr"))
    if found != FLOWER:
        raise BadRequest(
            f"fedapp superlink knows Flower {FLOWER[0]}.{FLOWER[1]} only, and {metadata.version('flwr')} is installed: "
            "install that version, or put a reverse proxy in front of flower-superlink (docker/nginx.conf says what is "
            "lacking then)"
        )
    names = [word.partition("=")[0] for word in flower]
    for name in OURS:
        if name in names:
            raise BadRequest(
                f"{name} cannot be given: fedapp superlink always uses TLS, node keys and its own listeners"
            )
    for name in ("--ssl-ca-certfile", "--ssl-certfile", "--ssl-keyfile"):
        if name not in names:
            raise BadRequest(
                f"{name} is needed: a SuperLink is started with TLS only (docker/certs.sh makes the files)"
            )
    always = [
        word for word in ("--enable-supernode-auth", "--disable-runtime-dependency-installation") if word not in names
    ]
    host, port = private.getsockname()[:2]
    ours = ["--host", host, "--port", str(port), "--isolation", "process"]
    before = sys.argv
    sys.argv = ["fedapp superlink", *flower, *always, *ours]
    try:
        # The package exports a function under the module's name, so the module is asked for by its full name.
        return importlib.import_module("flwr.superlink.cli.flower_superlink")._parse_superlink_lifespan_config()
    finally:
        sys.argv = before


def check_certificate(config: Any, host: str) -> None:
    """Check that the helper process and the operator will trust the server's certificate.

    Parameters
    ----------
    config : of the SuperLink, with the paths of certificate, key and authority.   host : of the private listener.

    Raises
    ------
    BadRequest : a file cannot be used, or the certificate is expired, another authority's or for other names.
    """
    files = f"{config.ssl_certfile} with {config.ssl_keyfile} and {config.ssl_ca_certfile}"
    try:
        server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        server.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: b"")
        client = ssl.create_default_context(cafile=config.ssl_ca_certfile)
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = client.wrap_bio(there, back, server_hostname=host), server.wrap_bio(back, there, server_side=True)
        for end in ends * 3:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except (OSError, ValueError) as e:
        why = getattr(e, "verify_message", "") or e
        raise BadRequest(
            f"{files} cannot be used ({why}): docker/certs.sh DIR NAME ... makes them, with localhost and {host} among "
            "the names"
        ) from e


def minor(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def own_files(database: str) -> None:
    """Let nobody else read the files of a database, which hold messages and the tokens of tasks.

    Raises
    ------
    BadRequest : a file belongs to another user.
    """
    for path in (Path(database + end) for end in ("", "-wal", "-shm", "-journal")):
        if not path.is_file():
            continue
        if path.stat().st_uid != os.geteuid():
            raise BadRequest(f"{path} belongs to another user, who could read all messages: chown it, or name another")
        path.chmod(0o600)


def lock_database(database: str) -> contextlib.AbstractContextManager[object]:
    """Let no other SuperLink of fedapp use a database: each fails all unfinished runs when it starts.

    The lock is on a file of its own: SQLite's locks on the database end when this process closes any handle of it.

    Returns
    -------
    A context that holds the lock, which also ends with the process.

    Raises
    ------
    BadRequest : another process has the lock, or the file cannot be made.
    """
    if database.startswith(":"):
        return contextlib.nullcontext()
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(Path(f"{Path(database).resolve()}.lock").open("ab"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise BadRequest(f"another SuperLink uses {database}: stop it, or name another --database") from e
        except OSError as e:
            raise BadRequest(f"the database {database} cannot be locked: {e}") from e
        return stack.pop_all()


def make_secrets_folder(folder: Path) -> None:
    """Make an empty folder that only this user can read, also where a killed process left one.

    Raises
    ------
    BadRequest : the folder is a link, belongs to another user, or cannot be made.
    """
    try:
        if folder.is_symlink() or folder.exists():
            shutil.rmtree(folder)  # it refuses links
        folder.mkdir(0o700, parents=True)
    except OSError as e:
        raise BadRequest(f"the folder for secrets {folder} cannot be made ({e}): remove it") from e


def serve(public: str, private: str, token_file: Path | None, max_reply: int, flower: Sequence[str]) -> int:
    """Run a SuperLink until it is told to stop (SIGTERM or Ctrl-C).

    Parameters
    ----------
    public, private : HOST:PORT of the two listeners; `private` must be on loopback.
    token_file : the operator's token, made if it does not exist; None = `operator.token` beside the database.
    max_reply : bytes that a node may send for one reply.
    flower : options of `flower-superlink`.

    Returns
    -------
    0 if it was told to stop, 1 if a listener ended by itself, or the helper process whenever it was started.

    Raises
    ------
    BadRequest : an option cannot be used, an address is taken, a file cannot be read or belongs to another user.
    """
    with contextlib.ExitStack() as stack:
        # Also for the run directories, which the helper process and what it starts make.
        stack.callback(os.umask, os.umask(0o077))
        inner = stack.enter_context(contextlib.closing(_listener(private, private=True)))
        outer = stack.enter_context(contextlib.closing(_listener(public, private=False)))
        os.environ.update(control.QUIET)
        config = _configuration(flower, inner)
        check_certificate(config, inner.getsockname()[0])
        own_files(config.database)
        stack.enter_context(lock_database(config.database))
        home = (
            Path(config.database).absolute().parent if not config.database.startswith(":") else Path.home() / ".fedapp"
        )
        token_file = token_file or home / "operator.token"
        config.authn_plugin = OperatorToken(operator_token(token_file))
        if known := os.environ.setdefault(roster.ROSTER, str(home / "roster.toml")):
            roster.create(Path(known))
        # Not in /tmp, where old files are cleaned up while runs still need them. The port is this process's own.
        folder = home / f".superlink-{inner.getsockname()[1]}"
        make_secrets_folder(folder)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        secret = folder / "superexec.secret"
        config.superexec_auth_secret = secrets.token_bytes(32)
        _write_secret(secret, config.superexec_auth_secret)
        ready = f"nodes at {public}, operator at {private} with the token in {token_file}"
        return asyncio.run(_serve(config, inner, outer, secret, max_reply, ready))


async def _serve(
    config: Any, inner: socket.socket, outer: socket.socket, secret: Path, max_reply: int, ready: str
) -> int:
    """Run both listeners and the helper process; the first that ends for good ends all. `ready` is printed at last."""
    import uvicorn
    from flwr.supercore.http_logging import get_uvicorn_log_config
    from flwr.supercore.logger import FLOWER_LOGGER, console_handler
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
    from flwr.superlink.main import create_app
    from sqlalchemy import event
    from sqlalchemy.pool import Pool

    from fedapp.deployment.objects import make_requests_atomic, own_lists
    from fedapp.deployment.patience import (
        BATCH,
        MAX_CONNECTIONS,
        RECORD,
        REQUEST,
        LimitedListener,
        TimeLimitedProtocol,
        raise_limit,
    )

    class Server(uvicorn.Server):
        """A server that leaves signals to the process."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    def say(text: str) -> None:
        with contextlib.suppress(OSError):  # the log's disk is full
            typer.echo(f"fedapp superlink: {text}", err=True)

    own_lists()
    make_requests_atomic()
    FLOWER_LOGGER.addFilter(_shorten)
    _free_at_once()
    tolerate_write_failures()
    event.listen(Pool, "checkout", _patient)
    event.listen(Pool, "checkin", _shrink)
    app = create_app(config, SuperLinkLifespan)
    narrow(app)
    end_runs(app)  # before the operator can submit another one
    gate = Gate(app, max_reply, say, Signatures(app))
    common: dict[str, Any] = {
        "log_config": get_uvicorn_log_config(console_handler.level),
        "ssl_keyfile": config.ssl_keyfile,
        "ssl_certfile": config.ssl_certfile,
        "timeout_graceful_shutdown": 3,
        "limit_concurrency": CONNECTIONS,
        "http": TimeLimitedProtocol,
        "ws": "none",
        "backlog": BATCH,
    }
    private = Server(uvicorn.Config(UnavailableMiddleware(gate.inside, say), interface="asgi3", **common))
    # The app's resources belong to the private listener, which starts them once.
    public = Server(
        uvicorn.Config(
            UnavailableMiddleware(gate, say), lifespan="off", server_header=False, access_log=False, **common
        )
    )
    # A connection counts for uvicorn after the TLS handshake, for which asyncio would wait 60 seconds.
    control.replace_attribute(asyncio.constants, "SSL_HANDSHAKE_TIMEOUT", REQUEST)  # type: ignore[attr-defined]
    control.replace_attribute(asyncio.sslproto.SSLProtocol, "max_size", RECORD)  # type: ignore[attr-defined]
    connections, address = min(MAX_CONNECTIONS, raise_limit() // 2), inner.getsockname()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(partial(_report_loop_error, say))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(private.serve(sockets=[LimitedListener(inner, connections)]))]
    helper: asyncio.Task[None] | None = None
    try:
        if not await _started(private, tasks[0]):
            return 1
        helper = asyncio.create_task(_run_helper(_helper(config, address, secret), say))
        tasks += [helper, asyncio.create_task(public.serve(sockets=[LimitedListener(outer, connections)]))]
        if await _started(public, tasks[2]):
            typer.echo(f"fedapp superlink: {ready}")
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            say(f"{'flower-superexec' if helper.done() else 'a listener'} ended by itself, so everything stops")
        return 0 if stop.is_set() else 1
    finally:
        if helper is not None:
            helper.cancel()
        public.should_exit = private.should_exit = True
        gate.wake()
        await asyncio.wait(tasks, timeout=10)


async def _run_helper(words: Sequence[str], say: Callable[[str], object]) -> None:
    """Run the helper process and start it again whenever it ends; return if it never worked."""
    works, tries = False, 0
    while works or tries < TRIES:
        began, tries = time.monotonic(), tries + 1
        helper = None
        try:
            helper = await asyncio.create_subprocess_exec(*words, stdin=subprocess.DEVNULL)
            end = f"ended with code {await helper.wait()}"
        except OSError as e:
            end = f"cannot be started: {e}"
        finally:
            if helper is not None and helper.returncode is None:
                helper.terminate()
                await helper.wait()
        if time.monotonic() - began > STABLE:
            works, tries = True, 1
        say(f"flower-superexec {end}")
        await asyncio.sleep(min(2 ** (tries - 1), STABLE))


def end_runs(app: Any) -> None:
    """End what an earlier SuperLink with this database left unfinished: its runs have failed for who followed them."""
    from flwr.common.constant import Status, SubStatus

    state = app.state.linkstate_factory.state()
    for run in state.get_run_info(statuses=[Status.PENDING, Status.STARTING, Status.RUNNING]):
        state.finish_task(run.primary_task_id, SubStatus.FAILED, "the SuperLink was started again")
        state.cleanup_run(run.run_id)


def _report_loop_error(say: Callable[[str], object], loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report in one line that no connection could be accepted; asyncio tries again after a second."""
    if "out of system resource" in context["message"]:
        say(f"no connection can be accepted: {context['exception']}")
    else:
        loop.default_exception_handler(context)


def _free_at_once() -> None:
    """Let glibc give blocks of 256 KiB and more back to the system, which each of the server's threads would keep."""
    mmap_threshold, arena_max = -3, -8  # of mallopt(3)
    with contextlib.suppress(OSError, AttributeError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(mmap_threshold, 256 << 10)
        library.mallopt(arena_max, 2)


def _patient(connection: Any, record: Any, proxy: Any) -> None:
    """Let SQLite wait for its turn to write: on a busy disk Flower's 5 seconds pass, and what fails then ends a run."""
    if not record.info.get(_patient):  # it lasts as long as the connection
        connection.execute(f"PRAGMA busy_timeout = {int(1000 * TURN)}").close()
        record.info[_patient] = True


def tolerate_write_failures() -> None:
    """Take no node and no run of this process's SuperLinks for lost because heartbeats could not be written."""
    from sqlalchemy import Engine, event
    from sqlalchemy.exc import OperationalError

    sql_linkstate: Any = importlib.import_module("flwr.server.superlink.linkstate.sql_linkstate")
    sql_corestate: Any = importlib.import_module("flwr.supercore.corestate.sql_corestate")
    failed, links = -RECOVERY, sql_linkstate.SqlLinkState
    tag, check = links._check_and_tag_offline_nodes, sql_linkstate.check_node_availability_for_in_message

    def note(context: Any) -> None:
        nonlocal failed
        if isinstance(context.sqlalchemy_exception, OperationalError):
            failed = time.monotonic()

    def recovers() -> bool:
        return time.monotonic() - failed < RECOVERY

    def tag_lost(self: Any, node_ids: list[int] | None = None) -> None:
        if not recovers():
            tag(self, node_ids)

    def check_lost(**named: Any) -> Any:
        # A time long ago: only nodes that do not exist are not there.
        return check(**(named | {"current_time": 1.0} if recovers() else named))

    event.listen(Engine, "handle_error", note)
    control.replace_attribute(links, "_check_and_tag_offline_nodes", tag_lost)
    control.replace_attribute(sql_linkstate, "check_node_availability_for_in_message", check_lost)
    control.replace_attribute(sql_corestate, "HEARTBEAT_PATIENCE", PATIENCE)


def _shorten(record: logging.LogRecord) -> bool:
    """Let a message of Flower fill one line: a node chooses names in it, of up to 8 MiB."""
    record.msg, record.args = one_line(record.getMessage()[:LINE]), ()
    return True


def _shrink(connection: Any, record: Any) -> None:
    """Let SQLite give back its pages after each transaction: Flower has every connection keep 64 MB of them."""
    if connection is not None:
        connection.execute("PRAGMA shrink_memory").close()


async def _started(server: Any, task: asyncio.Task[None]) -> bool:
    for _ in range(int(STARTS / 0.05)):
        if server.started or task.done():
            break
        await asyncio.sleep(0.05)
    return bool(server.started)


def _helper(config: Any, address: tuple[Any, ...], secret: Path) -> list[str]:
    """Return the command of the process that starts a run's ServerApp."""
    host, port = address[:2]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    os.environ["PATH"] = path  # flower-superexec starts its own helpers by bare name
    return [
        sys.executable, "-P", "-c", "from fedapp.deployment.gate import superexec; superexec()", "flower-superexec",
        "--runtime-api-address", f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        "--root-certificates", str(config.ssl_ca_certfile),
        "--superexec-auth-secret-file", str(secret),
        "--parent-pid", str(os.getpid()),
    ]  # fmt: skip


def superexec() -> None:
    """Run flower-superexec in this process, with the tokens of tasks in files of this user.

    Flower writes them on command lines, which all users of the machine see, and who has one acts as the run.
    """
    from flwr.supercore.cli.flower_superexec import flower_superexec
    from flwr.supercore.superexec.executor import subprocess_executor

    del sys.argv[0]  # "-c"
    folder = Path(sys.argv[sys.argv.index("--superexec-auth-secret-file") + 1]).parent

    def start(words: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(without_token(words, folder), **options)

    ours = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
    control.replace_attribute(subprocess_executor, "subprocess", ours)
    flower_superexec()


def without_token(words: Sequence[str], folder: Path) -> list[str]:
    """Return the command with the token in a file of `folder` that only this user can read."""
    at = words.index("--token")
    path = folder / f"{secrets.token_hex(8)}.token"
    _write_secret(path, words[at + 1].encode())
    return [*words[:at], "--token-file", str(path), *words[at + 2 :]]
