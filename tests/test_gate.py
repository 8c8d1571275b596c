"""The SuperLink with two listeners: what the public one passes, what the private one asks for, and who is who."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import json
import logging
import math
import os
import re
import shutil
import socket
import sqlite3
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import sqlalchemy
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, x25519
from flwr.app import Message
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PullMessagesResponse, PushMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    Metadata,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from typer.testing import CliRunner

from fedapp import config
from fedapp.cli import app
from fedapp.client_app import app as client_app
from fedapp.deployment import credentials, database, executor, gate, patience, server
from fedapp.deployment.layers import UnavailableMiddleware
from fedapp.errors import BadRequest
from fedapp.transport import roster
from fedapp.transport.local_grid import FIRST_NODE, LocalGrid
from fedapp.transport.nodes import NodeCohort
from fedapp.transport.records import group_of, most_of
from fedapp.transport.request import RoundRequest
from tests.deployment import BIN, ROOT, Deployment, deployed, free_port, until
from tests.handmade import exchange

PULL, PUSH, OBJECT = "/v1/fleet/pull-messages", "/v1/fleet/push-messages", "/v1/fleet/push-object"
PULL_OBJECT, CONFIRM = "/v1/fleet/pull-object", "/v1/fleet/confirm-message-received"
BEAT = "/v1/fleet/send-node-heartbeat"


# ---- the gate alone --------------------------------------------------------------------------------------------------


class Inner:
    """An app that answers with a status and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.status = 200
        self.body = b""
        self.meanwhile: Callable[[], object] = lambda: None
        """What happens after the app has looked what to answer."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        body = self.body
        self.meanwhile()
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": body[:3], "more_body": True})
        await send({"type": "http.response.body", "body": body[3:]})


def ask(
    door: gate.Gate,
    path: str,
    *headers: tuple[bytes, bytes],
    method: str = "POST",
    kind: str = "http",
    body: bytes = b"",
) -> int:
    sent: list[Any] = []
    if body:
        headers = (*headers, size(len(body)))

    async def send(message: Any) -> None:
        sent.append(message)

    given = [int(value) for name, value in headers if name == b"content-length" and value.isdigit()]

    async def receive() -> dict[str, Any]:
        if not given:
            await asyncio.Event().wait()
        length = given.pop()
        return {"type": "http.request", "body": body or bytes(length)}

    scope = {"type": kind, "path": path, "method": method, "headers": list(headers)}
    asyncio.run(door(scope, receive, send))
    return int(sent[0].get("status", 0)) if sent else 0


def size(number: int) -> tuple[bytes, bytes]:
    return (b"content-length", str(number).encode())


def node_of(scope: Any) -> int | None:
    """The node whose key a test shows: its number."""
    return int(dict(scope["headers"]).get(b"flwr-public-key", b"0"))


def question(node: int) -> bytes:
    return PullMessagesRequest(node=Node(node_id=node)).SerializeToString()


def orders(*trees: ObjectTree, group: str = "") -> bytes:
    """The server's answer to a node for which it has messages."""
    messages = [ProtoMessage(metadata=Metadata(group_id=group)) for _ in trees]
    return PullMessagesResponse(messages_list=messages, message_object_trees=trees).SerializeToString()


NO_TIMES = (math.nan, math.inf, -math.inf, -1.0, 1e300)


def reply(
    node: int,
    tree: ObjectTree | None = None,
    messages: int = 1,
    named: int | None = None,
    runtime: float = 0.5,
    **changes: Any,
) -> bytes:
    """What a SuperNode sends for a reply."""
    tree = tree or ObjectTree(object_id="reply")
    about = {"message_id": "reply", "src_node_id": node, "dst_node_id": 1, "reply_to_message_id": "order", **changes}
    return PushMessagesRequest(
        node=Node(node_id=node if named is None else named),
        messages_list=[ProtoMessage(metadata=Metadata(**about))] * messages,
        message_object_trees=[tree] * messages,
        clientapp_runtime_list=[runtime],
    ).SerializeToString()


def test_only_the_paths_of_a_node_pass() -> None:
    inner = Inner()
    door = gate.Gate(inner, 100, hold=0)
    assert len(gate.NODE_PATHS) == 10
    # Messages of others are refused before this point.
    seen = {path: ask(door, path, size(3)) for path in gate.NODE_PATHS}
    assert seen == {**dict.fromkeys(gate.NODE_PATHS, 200), PUSH: 400, PULL_OBJECT: 403, CONFIRM: 403}
    assert inner.calls == 7
    others = (
        "/v1/fleet/register-node", "/v1/fleet/unregister-node", "/v1/control/start-run", "/v1/runtime/acquire-task",
        "/health", "/docs", "/openapi.json", "/", "", PULL + "/", PULL + "?", "/v1/fleet//pull-messages", PULL.upper(),
        "/v1/fleet/../control/start-run", "/v1/control/start-run\0" + PULL, "/v1/fleet/pull-messages;x", " " + PULL,
    )  # fmt: skip
    assert [ask(door, path, size(3)) for path in others] == [403] * len(others)
    assert [ask(door, PULL, size(3), method=m) for m in ("GET", "PUT", "HEAD", "post")] == [403] * 4
    assert ask(door, PULL, size(3), kind="websocket") == 0 and ask(door, PULL, kind="lifespan") == 0
    assert inner.calls == 7


def test_the_size_of_a_body_is_known_and_bounded() -> None:
    inner = Inner()
    door = gate.Gate(inner, 1 << 40, hold=0)
    assert ask(door, PULL, size(gate.FEW)) == 200 and ask(door, OBJECT, size(gate.BODY)) == 200
    assert ask(door, PULL, size(gate.FEW + 1)) == 413 and ask(door, OBJECT, size(gate.BODY + 1)) == 413
    assert ask(door, PULL) == 411 and ask(door, PULL, (b"content-length", b"-1")) == 411
    assert ask(door, PULL, size(3), size(3)) == 411
    assert ask(door, PULL, size(3), (b"transfer-encoding", b"chunked")) == 411
    assert inner.calls == 2


def test_a_node_sends_so_many_bytes_for_each_message_that_it_got() -> None:
    inner, said = Inner(), list[str]()
    door = gate.Gate(inner, 1000, said.append, node_of, hold=0)
    a, b = (b"flwr-public-key", b"1"), (b"flwr-public-key", b"2")

    def pulls() -> int:
        return ask(door, PULL, a, body=question(1))

    list_of_one = reply(1)
    cost = gate.PRICE * len(list_of_one)
    assert ask(door, OBJECT, size(600), a) == 200 and ask(door, OBJECT, size(400), a) == 200
    assert ask(door, OBJECT, size(1), a) == 413 and credentials.fingerprint(b"1") in said[0]
    assert ask(door, OBJECT, size(1000), b) == 200, "another node has its own count"
    # Neither a reply nor a question that brings no message earns anything.
    assert pulls() == 200 and ask(door, PUSH, a, body=list_of_one) == 413
    inner.body = orders(ObjectTree(object_id="order"))
    assert pulls() == 200 and ask(door, PUSH, a, body=list_of_one) == 200
    assert ask(door, OBJECT, size(1001 - cost), a) == 413 and ask(door, OBJECT, size(1000 - cost), a) == 200
    # A node that serves two runs may have two messages before it answers the first; more is not kept.
    assert [pulls() for _ in range(3)] == [200] * 3
    assert ask(door, OBJECT, size(2001), a) == 413 and ask(door, OBJECT, size(2000), a) == 200
    # What the app refuses uses nothing up and earns nothing.
    inner.status = 401
    assert pulls() == 401 and ask(door, OBJECT, size(1), a) == 413
    inner.status = 200
    pulls()
    inner.status = 401
    assert ask(door, OBJECT, size(900), a) == 401
    inner.status = 200
    assert ask(door, OBJECT, size(1000), a) == 200


def test_a_message_says_how_much_its_reply_can_have() -> None:
    inner, said = Inner(), list[str]()
    door = gate.Gate(inner, 1000, said.append, node_of, hold=0)
    a = (b"flwr-public-key", b"1")

    def given(group: str) -> None:
        """Let the node have a message of that group."""
        inner.body = orders(ObjectTree(object_id="order"), group=group)
        assert ask(door, PULL, a, body=question(1)) == 200

    def most() -> int:
        """How much the node can send in one request; the app refuses, so that nothing is used up."""
        inner.status = 401
        good = [n for n in range(0, 2500, 50) if ask(door, OBJECT, size(n), a) == 401]
        inner.status = 200
        return max(good)

    given(group_of(1, 300))
    assert most() == 300, "not what a node has that nothing was sent to yet"
    given(group_of(2, 200))
    assert most() == 500, "of two messages"
    given(group_of(3, 200))
    assert most() == 500 and "more than 300 bytes" in said[-1], "no more is kept than two of them give"
    assert ask(door, OBJECT, size(500), a) == 200 and most() == 0
    given(group_of(4, 10**6))
    assert most() == 1000, "the operator's limit holds too"
    for group in ("4", "", "x y", "4 -1", "4 1e9", "4 " + "9" * 30, "4 \u0663"):
        given(group)
        assert most_of(group) == 0 and most() == 2000


def test_a_node_sends_nothing_but_replies_of_its_own() -> None:
    inner, said = Inner(), list[str]()
    door = gate.Gate(inner, 1 << 20, said.append, node_of, hold=0)
    assert ask(door, PUSH, (b"flwr-public-key", b"7"), body=reply(7)) == 200 and inner.calls == 1
    forged = {
        "an order to another node": reply(7, reply_to_message_id="", src_node_id=1, dst_node_id=8),
        "an order to the ServerApp": reply(7, reply_to_message_id="", src_node_id=1),
        "an order to itself": reply(7, reply_to_message_id="", src_node_id=1, dst_node_id=7),
        "a reply to nothing": reply(7, reply_to_message_id=""),
        "a reply of another node": reply(7, src_node_id=8),
        "a request of another node": reply(8, named=8),
        "a request in another node's name": reply(7, named=8),
        "a reply to another node": reply(7, dst_node_id=8),
        "two messages": reply(7, messages=2),
        "none": reply(7, messages=0),
        "another message's objects": reply(7, tree=ObjectTree(object_id="other")),
        **{f"{name} {t}": reply(7, **{name: t}) for name in ("created_at", "ttl") for t in NO_TIMES},
        **{f"a runtime of {t}": reply(7, runtime=t) for t in NO_TIMES},
    }
    seen = {name: ask(door, PUSH, (b"flwr-public-key", b"7"), body=body) for name, body in forged.items()}
    assert seen == dict.fromkeys(forged, 403) and inner.calls == 1
    assert len(said) == len(forged) and credentials.fingerprint(b"7") in said[0]
    assert ask(door, PUSH, (b"flwr-public-key", b"7"), body=b"no message") == 400 and inner.calls == 1
    assert door._budgets[7].left == (1 << 20) - gate.PRICE * len(reply(7)), "what is refused counts nothing"


def test_a_reply_has_so_many_pieces() -> None:
    inner = Inner()
    door = gate.Gate(inner, 100 << 20, signed=node_of, hold=0)
    assert door.pieces == gate.PIECES + 20, "and one for each 5 MiB"

    def long(pieces: int) -> bytes:
        """Flower's names of objects are SHA-256 in hexadecimal digits."""
        parts = [ObjectTree(object_id="f" * 64) for _ in range(pieces - 2)]
        return reply(0, tree=ObjectTree(object_id="reply", children=[ObjectTree(object_id="content", children=parts)]))

    assert len(long(door.pieces)) < door.longest
    assert [ask(door, PUSH, body=long(door.pieces + more)) for more in (0, 1)] == [200, 413] and inner.calls == 1
    assert ask(door, PUSH, size(door.longest + 1)) == 413
    # The same list may be sent again, but not for ever.
    answers = [ask(door, PUSH, body=long(door.pieces)) for _ in range(2 * gate.LISTS)]
    assert answers[0] == 200 and answers[-1] == 413


def test_lists_that_take_long_leave_room_for_others() -> None:
    running, pauses = 0, list[float]()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        nonlocal running
        running += 1
        assert running == 1, "one list at a time"
        pauses.append(time.monotonic())
        await asyncio.sleep(0.1)
        pauses.append(time.monotonic())
        await Inner()(scope, receive, send)
        running -= 1

    async def lists(door: gate.Gate) -> None:
        async def push(node: int) -> None:
            body = reply(node)

            async def receive() -> dict[str, Any]:
                return {"type": "http.request", "body": body}

            async def send(message: Any) -> None:
                assert message.get("status", 200) == 200

            headers = [size(len(body)), (b"flwr-public-key", str(node).encode())]
            await door({"type": "http", "path": PUSH, "method": "POST", "headers": headers}, receive, send)

        await asyncio.gather(*(push(node) for node in range(3)))

    for long in (0.05, 10.0):
        pauses.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gate, "LONG", long)
            asyncio.run(lists(gate.Gate(slow, 1 << 20, signed=node_of)))
        between = [after - before for before, after in zip(pauses[1::2], pauses[2::2], strict=False)]
        assert len(between) == 2 and (min(between) >= 0.09) == (long < 0.1)


def test_a_node_asks_only_for_parts_of_messages_that_it_was_given() -> None:
    inner = Inner()
    door = gate.Gate(inner, 1000, hold=0)

    def pulls(node: int, part: str) -> int:
        return ask(
            door, PULL_OBJECT, body=PullObjectRequest(node=Node(node_id=node), object_id=part).SerializeToString()
        )

    def confirms(node: int, message: str) -> int:
        request = ConfirmMessageReceivedRequest(node=Node(node_id=node), message_object_id=message)
        return ask(door, CONFIRM, body=request.SerializeToString())

    inner.body = orders(ObjectTree(object_id="one", children=[ObjectTree(object_id="shared")]))
    ask(door, PULL, body=question(1))
    inner.body = orders(ObjectTree(object_id="two", children=[ObjectTree(object_id="shared")]))
    ask(door, PULL, body=question(2))
    assert [pulls(1, part) for part in ("one", "shared", "two")] == [200, 200, 403]
    assert [pulls(2, part) for part in ("one", "shared", "two")] == [403, 200, 200]
    assert [confirms(1, "two"), confirms(1, "one"), confirms(3, "one"), confirms(3, "")] == [403, 200, 403, 403]
    # A question that the SuperLink refuses gives nothing.
    inner.status = 401
    ask(door, PULL, body=question(3))
    inner.status = 200
    assert pulls(3, "two") == 403
    for number in range(gate.GIVEN):
        inner.body = orders(ObjectTree(object_id=f"further {number}"))
        ask(door, PULL, body=question(1))
    assert pulls(1, "one") == 403 and pulls(1, "further 0") == 200, "what was long ago is forgotten"


class Line:
    """A connection that brings a body in pieces of 100 bytes, and notes how much of it was read."""

    def __init__(self, key: bytes, length: int, sent: int | None = None) -> None:
        self.headers = [size(length), (b"flwr-public-key", key)]
        self.left, self.whole = length if sent is None else sent, sent is None
        self.read, self.status = 0, 0

    async def receive(self) -> dict[str, Any]:
        await asyncio.sleep(0)
        if not self.left and not self.whole:
            return {"type": "http.disconnect"}
        piece = min(100, self.left)
        self.left, self.read = self.left - piece, self.read + piece
        return {"type": "http.request", "body": bytes(piece), "more_body": bool(self.left) or not self.whole}

    async def send(self, message: Any) -> None:
        self.status = message.get("status", self.status)

    async def push(self, door: gate.Gate) -> None:
        await door({"type": "http", "path": OBJECT, "method": "POST", "headers": self.headers}, self.receive, self.send)


def together(door: gate.Gate, *lines: Line) -> list[int]:
    """Send all at once; return the answers."""

    async def everybody() -> None:
        await asyncio.gather(*(line.push(door) for line in lines))

    asyncio.run(everybody())
    return [line.status for line in lines]


def test_requests_of_one_key_at_a_time_share_what_it_may_send() -> None:
    accepted: list[int] = []

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        accepted.append(len((await receive())["body"]))
        await asyncio.sleep(0.01)
        await Inner()(scope, receive, send)

    door = gate.Gate(slow, 1000, signed=node_of)
    lines = [Line(key, 600) for key in (b"1", b"1", b"1", b"2")]
    assert together(door, *lines) == [200, 413, 413, 200] and accepted == [600, 600], "one of each key"
    assert [line.read for line in lines] == [600] * 4, "who reads no answer before it has sent all gets one"
    gone = Line(b"3", 600, sent=300)
    assert together(door, gone) == [0] and together(door, Line(b"3", 1000)) == [200], "what did not come is given back"
    assert not door._queues, "who names many keys leaves nothing"


def test_what_one_key_has_in_memory_is_bounded() -> None:
    lines, most, working = [Line(b"1", 400) for _ in range(5)], 0, 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal most, working
        working += 1
        await asyncio.sleep(0.01)
        most = max(most, sum(line.read for line in lines if not line.status))
        await Inner()(scope, receive, send)
        assert working == 1, "copies are made of one body at a time"
        working -= 1

    door = gate.Gate(app, 1000, signed=node_of)
    door._budget(1).earn(1000)  # two messages wait for an answer
    assert together(door, *lines) == [200] * 5 and most == 800


def test_small_messages_leave_room_for_the_reply_to_a_large_one() -> None:
    purse = gate.ByteBudget(1000)
    for most in (10, 100, 10, 10):
        purse.earn(most)
    assert purse.left == 110, "the reply to the second has room"
    purse.take(100, 0)
    for most in (10,) * gate.GIVEN:
        purse.earn(most)
    assert purse.left == 20, "a message that is long ago gives nothing"


def test_no_body_of_a_stranger_is_read() -> None:
    inner = Inner()
    door = gate.Gate(inner, 1000, signed=lambda scope: {b"known": 7}.get(dict(scope["headers"])[b"flwr-public-key"]))
    lines = [Line(key, 600) for key in (b"stranger", b"known")]
    assert together(door, *lines) == [401, 200] and [line.read for line in lines] == [0, 600] and inner.calls == 1
    assert door._budgets[7].left == 400


def shown(key: Any) -> bytes:
    """The header with a public key."""
    kind = serialization.PublicFormat.SubjectPublicKeyInfo
    return base64.b64encode(key.public_key().public_bytes(serialization.Encoding.PEM, kind))


def signing(shows: bytes, signer: Any, late: float = 0.0, **changes: bytes) -> tuple[tuple[bytes, bytes], ...]:
    """The headers that a node sends: its key, the time, and the time signed."""
    stamp = (now() - datetime.timedelta(seconds=late)).isoformat().encode()
    headers = {
        b"flwr-public-key": shows,
        TIMESTAMP_HEADER.encode(): stamp,
        FLEET_HTTP_SIGNATURE_HEADER.encode(): base64.b64encode(sign_message(signer, stamp)),
    }
    return tuple((headers | {name.replace("_", "-").encode(): value for name, value in changes.items()}).items())


def known_by(*keys: Any) -> credentials.Signatures:
    """The check of signatures in front of a SuperLink that has registered some keys."""
    nodes = {public_key_to_bytes(key.public_key()): number for number, key in enumerate(keys, 7)}
    state = SimpleNamespace(get_node_id_by_public_key=nodes.get)
    return credentials.Signatures(
        SimpleNamespace(state=SimpleNamespace(linkstate_factory=SimpleNamespace(state=lambda: state)))
    )


def test_a_signature_is_checked_on_all_paths_before_the_app_sees_a_request() -> None:
    mine, other = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    inner = Inner()
    door = gate.Gate(inner, 1000, signed=known_by(mine), hold=0)

    def seen(*headers: tuple[bytes, bytes]) -> set[int]:
        return {ask(door, path, size(3), *headers) for path in gate.NODE_PATHS - {gate.ACTIVATE}}

    assert seen() == seen(*signing(shown(mine), other)) == seen(*signing(shown(mine), mine, late=3600)) == {401}
    for key in (b"", b"QQ==", b"no base64", b"\xff"):
        assert seen(*signing(key, mine)) == {401}
    for kind in (x25519.X25519PrivateKey.generate(), ed25519.Ed25519PrivateKey.generate()):
        assert seen(*signing(shown(kind), mine)) == {401}
    # A key can stand behind any text, which Flower would log.
    text = base64.b64encode(b"x" * credentials.KEY + base64.b64decode(shown(mine)))
    assert seen(*signing(text, mine)) == {401} and ask(door, gate.ACTIVATE, size(3), *signing(text, mine)) == 401
    assert seen(*signing(shown(other), other)) == {401}, "it is not registered"
    assert ask(door, gate.ACTIVATE, size(3), *signing(shown(other), other)) == 412, "a new node learns why"
    assert inner.calls == 0
    assert ask(door, gate.ACTIVATE, size(3), *signing(shown(mine), mine)) == 200


def test_a_signature_is_good_for_one_request() -> None:
    mine, other = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    inner, signatures = Inner(), known_by(mine, other)
    door = gate.Gate(inner, 1000, signed=signatures, hold=0)
    once = signing(shown(mine), mine)
    assert ask(door, gate.ACTIVATE, size(3), *once) == 200
    # Not 401, which ends a node: another one may have used what it signed.
    assert {ask(door, path, size(3), *once) for path in gate.NODE_PATHS} == {503} and inner.calls == 1
    stamp = dict(once)[TIMESTAMP_HEADER.encode()]
    again = base64.b64encode(sign_message(mine, stamp))
    assert again != dict(once)[FLEET_HTTP_SIGNATURE_HEADER.encode()], "it has many forms"
    assert ask(door, gate.ACTIVATE, size(3), *signing(shown(mine), mine, flwr_timestamp=stamp,
               **{FLEET_HTTP_SIGNATURE_HEADER: again})) == 503  # fmt: skip
    assert ask(door, gate.ACTIVATE, size(3), *signing(shown(other), other)) == 200
    # Python reads a time with any number of digits, and each used one is kept.
    long = f"{now().replace(tzinfo=None).isoformat()}{'0' * 60_000}+00:00".encode()
    signature = base64.b64encode(sign_message(mine, long))
    assert ask(door, gate.ACTIVATE, size(3), *signing(shown(mine), mine, flwr_timestamp=long,
               **{FLEET_HTTP_SIGNATURE_HEADER: signature})) == 401  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(credentials.time, "monotonic", lambda: 1e9)
        assert ask(door, gate.ACTIVATE, size(3), *signing(shown(mine), mine)) == 200
    assert len(signatures._used) == 1, "what is too old to pass is forgotten"


def test_what_is_refused_is_counted_and_not_logged_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "SUMMARY", 0.05)
    said = list[str]()
    door = gate.Gate(Inner(), 1000, said.append, signed=lambda scope: None)

    async def strangers() -> None:
        async def send(message: Any) -> None:
            pass

        for path in (PULL, PULL, "/docs"):
            scope = {"type": "http", "path": path, "method": "POST", "headers": [size(3)]}
            await door(scope, asyncio.Event().wait, send)
        await asyncio.sleep(0.2)

    asyncio.run(strangers())
    assert said == ["refused requests in the last 0.05 s: 2 with 401, 1 with 403"]


def test_a_log_that_is_followed_ends_without_a_traceback_when_the_server_stops() -> None:
    sent = list[Any]()

    async def follow(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/log":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message)

    async def stop(path: str) -> None:
        task = asyncio.create_task(
            UnavailableMiddleware(follow)({"type": "http", "path": path}, asyncio.Event().wait, send)
        )
        await turns()
        task.cancel()
        await task

    asyncio.run(stop("/log"))
    asyncio.run(stop("/other"))
    assert [message.get("status", message.get("body")) for message in sent] == [200, b"", 503, b""]


@pytest.mark.parametrize("fails", ["before", "with 500", "after"])
def test_a_failure_means_later(fails: str) -> None:
    """Flower's programs try again after 503; 500 ends them."""
    said, sent = list[str](), list[Any]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if fails == "before":
            raise OSError("disk full")
        await send({"type": "http.response.start", "status": 500, "headers": [(b"a", b"b")]})
        if fails == "after":
            raise OSError("disk full")
        await send({"type": "http.response.body", "body": b"why"})

    async def send(message: Any) -> None:
        sent.append(message)

    door = UnavailableMiddleware(app, said.append)
    with pytest.raises(OSError) if fails == "after" else contextlib.nullcontext():
        asyncio.run(door({"type": "http", "path": "/x"}, asyncio.Event().wait, send))
    assert sent[0]["status"] == 503
    assert said == (["/x failed: OSError: disk full"] if fails == "before" else [])
    assert fails != "with 500" or sent[1]["body"] == b"why"


def test_the_private_listener_serves_no_nodes() -> None:
    inner, sent = Inner(), list[Any]()
    door = gate.Gate(inner, 1000)

    async def send(message: Any) -> None:
        sent.append(message)

    for path in (*gate.NODE_PATHS, "/v1/fleet/register-node", "/v1/fleet/unregister-node"):
        asyncio.run(door.inside({"type": "http", "path": path}, asyncio.Event().wait, send))
    assert {message.get("status", 403) for message in sent} == {403} and inner.calls == 0


class Waiting:
    """A node's question for messages, put to a gate."""

    def __init__(self, door: gate.Gate) -> None:
        self.sent: list[Any] = []
        self.parts: asyncio.Queue[Any] = asyncio.Queue()
        body = question(1)
        self.parts.put_nowait({"type": "http.request", "body": body})
        scope = {"type": "http", "path": PULL, "method": "POST", "headers": [size(len(body))]}
        self.task = asyncio.ensure_future(door(scope, self.parts.get, self.send))

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_question_waits_for_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    inner, found = Inner(), orders(ObjectTree(object_id="order"))
    door = gate.Gate(inner, 1000, hold=60)
    monkeypatch.setattr(gate, "HELD", 2)

    async def at_once(function: Any, *words: Any) -> Any:
        return function(*words)

    monkeypatch.setattr(gate.asyncio, "to_thread", at_once)

    async def nowhere(message: Any) -> None:
        pass

    async def run_asks(path: str) -> None:
        await door.inside({"type": "http", "path": path}, asyncio.Event().wait, nowhere)

    async def everything() -> None:
        first, second = Waiting(door), Waiting(door)
        await turns()
        assert inner.calls == 2 and not first.task.done() and not second.sent
        third = Waiting(door)
        await third.task
        assert inner.calls == 3 and third.sent[0]["status"] == 200, "two wait already"
        # Who has gone is not asked for: the SuperLink would think that the message has arrived.
        second.parts.put_nowait({"type": "http.disconnect"})
        await second.task
        assert inner.calls == 3 and not second.sent
        await run_asks(gate.ALL_THERE)
        await turns()
        assert not first.task.done()
        inner.body = found
        await run_asks(gate.NEWS)
        await turns()
        assert not first.task.done(), "parts of the message are still on their way"
        await run_asks(gate.ALL_THERE)
        await first.task
        assert first.body() == found and [m["type"].rpartition(".")[2] for m in first.sent] == ["start", "body", "body"]
        assert door._held == 0
        # A run that dies before it asks for replies, or sends for long, delays the nodes for a short time only.
        inner.body = b""
        monkeypatch.setattr(gate, "PARTS", 0.05)
        third = Waiting(door)
        await turns()
        inner.body = found
        await run_asks(gate.NEWS)
        await run_asks(gate.NEWS)
        await turns()
        assert not third.task.done()
        await third.task
        assert third.body() == found and door._coming is None
        # A message that is sent while the SuperLink looks for one is not missed.
        inner.body = b""

        def run_sends() -> None:
            inner.body = found
            door.wake()

        inner.meanwhile = run_sends
        late = Waiting(door)
        await late.task
        assert late.body() == found
        inner.body, inner.status = b"", 401
        refused = Waiting(door)
        await refused.task
        assert refused.sent[0]["status"] == 401

    asyncio.run(asyncio.wait_for(everything(), 20))


def test_a_request_waits_for_who_writes_to_the_database(tmp_path: Path) -> None:
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/state.db", connect_args={"timeout": 0.1})
    sqlalchemy.event.listen(engine, "checkout", database._patient)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 20_000


def test_a_certificate_that_its_own_helper_would_refuse(tmp_path: Path) -> None:
    for name, host in (("right", "127.0.0.1"), ("other", "superlink.example.org")):
        subprocess.run([ROOT / "docker" / "certs.sh", tmp_path / name, host], check=True, capture_output=True)

    def files(certificate: str, key: str = "right", authority: str = "right") -> Any:
        return SimpleNamespace(
            ssl_certfile=str(tmp_path / certificate / "server.crt"), ssl_keyfile=str(tmp_path / key / "server.key"),
            ssl_ca_certfile=str(tmp_path / authority / "ca.crt"),
        )  # fmt: skip

    credentials.check_certificate(files("right"), "127.0.0.1")
    for wrong, says in (
        (files("right", authority="other"), "unable to get local issuer"),
        (files("other", "other", "other"), "not valid for '127.0.0.1'"),
        (files("right", key="other"), "MISMATCH"),
        (files("nowhere"), "No such file"),
    ):
        with pytest.raises(BadRequest, match=says):
            credentials.check_certificate(wrong, "127.0.0.1")


def test_the_operators_token(tmp_path: Path) -> None:
    path = tmp_path / "new" / "operator.token"
    token = credentials.operator_token(path)
    assert len(token) >= 32 and path.stat().st_mode & 0o777 == 0o600 and credentials.operator_token(path) == token
    plugin = credentials.OperatorToken(token)
    name = "flwr-oidc-access-token"
    assert plugin.validate_tokens_in_metadata([(name, token)])[0]
    for wrong in ([], [(name, "")], [(name, token[:-1])], [(name, token + "x")], [("other", token)]):
        assert plugin.validate_tokens_in_metadata(wrong) == (False, None)
    assert plugin.refresh_tokens([(name, token)]) == (None, None)
    path.chmod(0o640)
    with pytest.raises(BadRequest, match="can be read by others"):
        credentials.operator_token(path)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(BadRequest, match="holds no token"):
        credentials.operator_token(path)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--private", "0.0.0.0:0"], "must be on loopback"),
        (["--public", "nowhere"], "HOST:PORT"),
        (["--insecure"], "always uses TLS"),
        (["--isolation=subprocess"], "always uses TLS"),
        (["--simulation"], "always uses TLS"),
        ([], "--ssl-ca-certfile is needed"),
    ],
)
def test_what_would_open_it_is_refused(words: list[str], says: str) -> None:
    given = ["superlink", "--public", "127.0.0.1:0", "--private", "127.0.0.1:0", *words]
    done = CliRunner().invoke(app, given)
    assert isinstance(done.exception, BadRequest) and says in str(done.exception), done.output


def test_the_files_of_a_database_are_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database.own_files(str(tmp_path / "new.db"))
    database.own_files(":flwr-in-memory:")
    files = [tmp_path / f"old.db{end}" for end in ("", "-wal", "-shm")]
    for path in files:
        path.touch(0o644)
    database.own_files(str(files[0]))
    assert [path.stat().st_mode & 0o777 for path in files] == [0o600] * 3
    monkeypatch.setattr(database.os, "geteuid", lambda: files[0].stat().st_uid + 1)
    with pytest.raises(BadRequest, match="belongs to another user"):
        database.own_files(str(files[0]))


def test_a_database_belongs_to_one_superlink(tmp_path: Path) -> None:
    """The second one would fail the runs of the first."""
    path, link = str(tmp_path / "a.db"), tmp_path / "b.db"
    link.symlink_to(path)
    with database.lock_database(path), database.lock_database(str(tmp_path / "c.db")):
        with database.lock_database(":flwr-in-memory:"), database.lock_database(":flwr-in-memory:"):
            pass
        with pytest.raises(BadRequest, match="another SuperLink uses"), database.lock_database(str(link)):
            pass
    with database.lock_database(path):
        pass
    missing = database.lock_database(str(tmp_path / "missing" / "a.db"))
    with pytest.raises(BadRequest, match=r"missing cannot be written .*; make it first"), missing:
        pass


def test_the_folder_for_secrets_is_no_link(tmp_path: Path) -> None:
    """Another user may have made it where all may write."""
    folder, other = tmp_path / ".superlink-1", tmp_path / "other"
    other.mkdir()
    (other / "file").touch()
    folder.symlink_to(other)
    with pytest.raises(BadRequest, match="remove it"):
        credentials.make_secrets_folder(folder)
    assert (other / "file").exists()
    folder.unlink()
    credentials.make_secrets_folder(tmp_path / "new" / folder.name)
    folder.mkdir()
    (folder / "old.secret").touch()
    credentials.make_secrets_folder(folder)
    assert list(folder.iterdir()) == [] and folder.stat().st_mode & 0o777 == 0o700


def test_a_text_of_a_node_fills_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("tests.gate")
    logger.addFilter(server._shorten)
    logger.error("fab_hash=%s 100%%", "a\n\x1b[1m" + "x" * 100_000)
    [record] = caplog.records
    assert record.getMessage().startswith("fab_hash=a\\n\\x1b[1mxxx") and len(record.getMessage()) < 1100


def test_an_internal_name_that_is_missing_is_reported() -> None:
    with pytest.raises(BadRequest, match=r"fedapp.deployment.gate has no _missing"):
        executor.replace_attribute(gate, "_missing", 1)
    assert not hasattr(gate, "_missing")


@pytest.mark.full
def test_the_token_of_a_task_is_not_on_the_command_line(tmp_path: Path) -> None:
    """Flower's own executor, as the helper process starts it, with a program that shows what it was given."""
    program = tmp_path / "flwr-serverapp"
    program.write_text('#!/bin/sh\necho "$@" > "$OUT.new"; cat "$4" >> "$OUT.new"; mv "$OUT.new" "$OUT"\n')
    program.chmod(0o755)
    code = """
import importlib
import sys
def started():
    from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
    from flwr.supercore.superexec.executor.types import ExecutionSpec
    from flwr.supercore.constant import TaskType
    assert sys.argv[0] == "flower-superexec"
    SubprocessExecutor().launch(ExecutionSpec(
        task_type=TaskType.SERVER_APP, runtime_api_address="here", token="s3cret", insecure=True,
        root_certificates_path=None, runtime_dependency_install=False, parent_pid=None, suppress_output=True,
        task_id=1, fab_hash=None))
importlib.import_module("flwr.supercore.cli.flower_superexec").flower_superexec = started
from fedapp.deployment.executor import superexec
superexec()
"""
    out, secret = tmp_path / "out", tmp_path / "superexec.secret"
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(out)}
    words = ["flower-superexec", "--superexec-auth-secret-file", str(secret)]
    subprocess.run([sys.executable, "-c", code, *words], env=env, check=True)
    until(out.exists, 10, "the program has started")
    given, token = out.read_text().splitlines()
    assert token == "s3cret" and "s3cret" not in given and "--token-file" in given
    (file,) = tmp_path.glob("*.token")
    assert file.stat().st_mode & 0o777 == 0o600


# ---- the roster ------------------------------------------------------------------------------------------------------


def test_the_roster_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "roster.toml"
    large = roster.Admitted(3, 2**64 - 1, "ab", 500)
    roster.add(path, large)
    roster.add(path, roster.Admitted(0, 7, "cd"))
    assert roster.read(path) == {2**64 - 1: large, 7: roster.Admitted(0, 7, "cd")}
    for taken in (roster.Admitted(3, 8, "ef"), roster.Admitted(4, 7, "ef")):
        with pytest.raises(BadRequest, match="already"):
            roster.add(path, taken)
    assert {p.name for p in tmp_path.iterdir()} <= {"roster.toml", ".roster.toml.lock"}
    with ThreadPoolExecutor(6) as threads:
        [*threads.map(lambda c: roster.add(path, roster.Admitted(c, 100 + c, "ab")), range(10, 16))]
    assert {a.client for a in roster.read(path).values()} == {0, 3, *range(10, 16)}
    before = os.umask(0)
    try:
        roster.add(tmp_path / "open" / "roster.toml", large)
    finally:
        os.umask(before)
    assert (tmp_path / "open" / "roster.toml").stat().st_mode & 0o777 == 0o644
    for text in ("client = 3", "[[client]]\nclient = 1", "[[client", "[[client]]\nclient=-1\nnode-id='1'\nkey=''"):
        path.write_text(text)
        with pytest.raises(BadRequest, match="cannot be read"):
            roster.read(path)
    path.write_text("[[client]]\nclient=1\nnode-id='1'\nkey=''\n[[client]]\nclient=1\nnode-id='2'\nkey=''\n")
    with pytest.raises(BadRequest, match="client 1 twice"):
        roster.read(path)


def test_the_roster_decides_who_is_who() -> None:
    entry = roster.Admitted(3, 7, "ab", 500)
    roster.check(entry, 3, 500, 500)
    for client, examples, tests, says in (
        (4, 1, 1, "has it as client 3"),
        (3, 501, 1, "501 training rows, and the roster allows 500"),
        (3, 500, 501, "501 test rows, and the roster allows 500"),
    ):
        with pytest.raises(BadRequest, match=says):
            roster.check(entry, client, examples, tests)


def test_a_roster_is_created_and_nobody_else_may_write_it(tmp_path: Path) -> None:
    path, before = tmp_path / "roster.toml", os.umask(0)
    try:
        roster.create(path)
        assert roster.read(path) == {} and path.stat().st_mode & 0o777 == 0o644
        roster.add(path, roster.Admitted(0, 7, "cd"))
        roster.create(path)
        assert len(roster.read(path)) == 1 and path.stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)


def test_a_roster_that_is_gone_admits_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the file a client could take another's id: a run keeps the last one, and a new run is refused."""
    path = tmp_path / "roster.toml"
    monkeypatch.setenv(roster.ROSTER, str(path))
    for client in range(2):
        roster.add(path, roster.Admitted(client, FIRST_NODE + client, ""))
    flat = config.from_flat({"method": "local", "clients": 3}).to_flat()
    events: list[dict[str, Any]] = []
    manager = NodeCohort(
        LocalGrid(client_app, flat, 3), exchange(), RoundRequest(), events.append, roster.of_this_server
    )
    assert [info.client for info in manager.gather(2)] == [0, 1]
    path.unlink()
    assert manager.register() == [] and sorted(manager.nodes) == [0, 1]
    assert manager.register() == [] and sum("the roster of before is used" in e["text"] for e in events) == 1
    with pytest.raises(BadRequest, match="cannot be read"):
        roster.of_this_server()
    monkeypatch.setenv(roster.ROSTER, "")
    assert roster.of_this_server() is None


def test_who_is_not_in_the_roster_is_never_asked_and_never_ends_a_run() -> None:
    flat = config.from_flat({"method": "local", "clients": 5}).to_flat()
    events: list[dict[str, Any]] = []
    asked: list[int] = []

    class Watched(LocalGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            asked.extend(m.metadata.dst_node_id for m in messages)
            return super().push_messages(messages)

    known = {
        FIRST_NODE: roster.Admitted(0, FIRST_NODE, ""),
        FIRST_NODE + 1: roster.Admitted(4, FIRST_NODE + 1, ""),  # says that it is client 1
        FIRST_NODE + 2: roster.Admitted(2, FIRST_NODE + 2, "", max_examples=10),
        FIRST_NODE + 3: roster.Admitted(3, FIRST_NODE + 3, "", max_examples=10_000),
    }
    manager = NodeCohort(Watched(client_app, flat, 5), exchange(), RoundRequest(), events.append, lambda: known)
    assert [info.client for info in manager.gather(2)] == [0, 3]
    assert manager.register() == []
    assert sorted(asked) == [FIRST_NODE + k for k in range(4)]
    # A node that is admitted during the run is asked from the next round on.
    known = {**known, FIRST_NODE + 4: roster.Admitted(9, FIRST_NODE + 4, "")}
    assert manager.register() == [] and FIRST_NODE + 4 in asked
    said = "\n".join(e["text"] for e in events)
    assert f"node {FIRST_NODE + 4} is not in the roster" in said and said.count("not in the roster") == 1
    assert "registers as client 1, but the roster has it as client 4" in said and "the roster allows 10" in said
    # One whose entry is removed takes no further part, and one whose client id changes must register with the new one.
    known = {FIRST_NODE + 3: roster.Admitted(5, FIRST_NODE + 3, "")}
    assert manager.register() == [] and not manager.nodes
    said = "\n".join(e["text"] for e in events)
    assert f"node {FIRST_NODE} is not in the roster" in said and "client 3, but the roster has it as client 5" in said


# ---- a started one, attacked -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A SuperLink without nodes."""
    with deployed(tmp_path_factory.mktemp("gate")) as it:
        it.superlink()
        yield it


def raw(link: Deployment, port: int, request: bytes, tls: bool = True, shown: tuple[Path, Path] | None = None) -> str:
    """Send bytes, with a client certificate if one is to be shown, and return the first line of the answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        plain.settimeout(40)
        if not tls:
            plain.sendall(request)
            return plain.recv(200).decode(errors="replace").partition("\r\n")[0]
        context = ssl.create_default_context(cafile=str(link.folder / "certs" / "ca.crt"))
        if shown is not None:
            context.load_cert_chain(*shown)
        with context.wrap_socket(plain, server_hostname="localhost") as secure:
            secure.sendall(request)
            return secure.recv(200).decode(errors="replace").partition("\r\n")[0]


def post(
    link: Deployment, port: int, path: str, body: bytes = b"", *more: str, shown: tuple[Path, Path] | None = None
) -> str:
    head = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/protobuf", *more]
    if not any(m.startswith(("Transfer", "Content-Length")) for m in more):
        head.append(f"Content-Length: {len(body)}")
    return raw(link, port, "\r\n".join([*head, "", ""]).encode() + body, shown=shown).split()[1]


@pytest.mark.full
def test_the_public_listener_passes_nothing_but_a_nodes_paths(link: Deployment) -> None:
    refused = (
        "/v1/control/list-runs", "/v1/control/start-run", "/v1/control/register-node", "/v1/control/unregister-node",
        "/v1/runtime/acquire-task", "/v1/fleet/register-node", "/docs", "/openapi.json", "/health",
        "/v1/fleet/../control/list-runs", "/v1/fleet/%2e%2e/control/list-runs", "/v1/control%2flist-runs",
        "//v1/control/list-runs", "/V1/CONTROL/LIST-RUNS", "/v1/control/list-runs;/v1/fleet/pull-messages",
        "/v1/control/list-runs?/v1/fleet/pull-messages", "/v1/control/list-runs%3f", "/v1/fleet/pull-messages%00",
    )  # fmt: skip
    assert {path: post(link, link.port, path) for path in refused} == dict.fromkeys(refused, "403")
    # An absolute address as target must not lead elsewhere either.
    assert post(link, link.port, "https://localhost/v1/control/list-runs") in ("400", "403")
    assert post(link, link.port, PULL) == "401", "a node's path without a registered key"


def test_bodies_on_the_public_listener_are_bounded(link: Deployment) -> None:
    assert post(link, link.port, PULL, b"", f"Content-Length: {9 << 20}") == "413"
    assert post(link, link.port, PULL, b"", "Transfer-Encoding: chunked") == "411"
    both = post(link, link.port, PULL, b"", "Transfer-Encoding: chunked", "Content-Length: 3")
    assert both in ("400", "411")


@pytest.mark.slow
def test_connections_that_send_no_whole_request_are_closed(link: Deployment) -> None:
    """One that says nothing, one without TLS, one that drips, and one whose body never comes; a node's own passes."""
    context = ssl.create_default_context(cafile=str(link.folder / "certs" / "ca.crt"))
    started = time.monotonic()
    silent = socket.create_connection(("127.0.0.1", link.port), timeout=30)
    head = f"POST {PULL} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n".encode()
    others = [
        context.wrap_socket(socket.create_connection(("127.0.0.1", link.port), timeout=30), server_hostname="localhost")
        for _ in range(3)
    ]
    others[2].sendall(head + b"\r\n")
    for i in range(8):
        others[1].sendall(head[i : i + 1])
        time.sleep(1)
    assert post(link, link.port, PULL) == "401"
    for connection in (silent, *others):
        with contextlib.suppress(OSError), connection:
            while connection.recv(4096):
                pass  # Flower may answer before the body is there
    assert patience.REQUEST - 1 < time.monotonic() - started < patience.REQUEST + 8


@pytest.mark.full
def test_connections_that_send_nothing_take_little_and_leave_room(link: Deployment) -> None:
    """Before the TLS handshake too: from many addresses, from one, and where the system has no more descriptors."""
    superlink = psutil.Process(link.processes["superlink"].pid)
    limits, log = superlink.rlimit(psutil.RLIMIT_NOFILE), link.folder / "superlink.log"
    start, size = superlink.memory_info().rss, log.stat().st_size

    def silent(count: int, *addresses: str) -> list[socket.socket]:
        return [
            socket.create_connection(("127.0.0.1", link.port), 30, (addresses[n % len(addresses)], 0))
            for n in range(count)
        ]

    assert limits[0] == min(limits[1], 1 << 20)
    for count, *addresses in ((2000, *(f"127.0.0.{n}" for n in range(2, 10))), (600, "127.0.0.1")):
        crowd = silent(count, *addresses)
        assert post(link, link.port, PULL) == "401"
        assert superlink.num_fds() < patience.MAX_CONNECTIONS + 200
        # Less than asyncio's own buffers for TLS would take for the connections that may be open.
        assert superlink.memory_info().rss - start < patience.MAX_CONNECTIONS * (256 << 10)
        for connection in crowd:
            connection.close()
    superlink.rlimit(psutil.RLIMIT_NOFILE, (superlink.num_fds() + 20, limits[1]))
    try:
        crowd = silent(400, "127.0.0.1")
        until(lambda: post(link, link.port, PULL) == "401", 30, "a node is heard")
    finally:
        superlink.rlimit(psutil.RLIMIT_NOFILE, limits)
    for connection in crowd:
        connection.close()
    assert log.stat().st_size - size < 10_000, log.read_text()[size : size + 3000]


@pytest.mark.full
def test_a_stranger_writes_nothing_into_the_log(link: Deployment) -> None:
    log, mine = link.folder / "superlink.log", ec.generate_private_key(ec.SECP384R1())
    size = log.stat().st_size

    def sent(key: bytes) -> str:
        body = ActivateNodeRequest(public_key=base64.b64decode(key), heartbeat_interval=30).SerializeToString()
        headers = (f"{name.decode()}: {value.decode()}" for name, value in signing(key, mine))
        return post(link, link.port, gate.ACTIVATE, body, *headers)

    text = base64.b64encode(b"x" * 40_000 + base64.b64decode(shown(mine)))
    assert [sent(key) for key in (text, b"QQ==", shown(mine))] == ["401", "401", "412"]
    assert {raw(link, link.port, b"\xff" * 90).split()[1] for _ in range(10)} == {"400"}
    assert log.stat().st_size == size, log.read_text()[size:]


@pytest.mark.full
def test_a_helper_that_died_is_started_again(link: Deployment) -> None:
    def helpers() -> list[psutil.Process]:
        children = psutil.Process(link.processes["superlink"].pid).children()
        return [c for c in children if c.status() != psutil.STATUS_ZOMBIE and "flower-superexec" in c.cmdline()]

    [first] = helpers()
    first.kill()
    until(lambda: [h for h in helpers() if h.pid != first.pid], 30, "another one\n" + link.log("superlink")[-2000:])
    assert link.healthy() and "flower-superexec ended with code -9" in link.log("superlink")


@pytest.mark.slow
def test_a_run_whose_failure_was_reported_does_not_start_later(tmp_path: Path) -> None:
    with deployed(tmp_path / "deployment") as it:
        it.superlink()
        [helper] = psutil.Process(it.processes["superlink"].pid).children()
        helper.suspend()  # the run stays pending
        following = it.begin("run", "--engine", "deploy", "--superlink", "superlink", "--out", str(tmp_path / "out"))
        until(lambda: "submitted" in it.log("fedapp"), 90, "submitted\n" + it.log("fedapp"))
        it.kill("superlink")
        helper.kill()
        assert following.wait(120) == 1
        it.superlink()
        [run] = json.loads(it.flwr("list", "superlink", "--format", "json"))["runs"]
        assert run["status"] == "finished:failed"


LARGE = 16 << 20
"""Bytes of an answer that no kernel buffer holds."""


def served(
    tests: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    crowd: int = 6,
    seconds: float = 0.6,
    each: int = 100,
    **tls: str,
) -> None:
    """Run tests against a listener in this process that answers requests with their body's length, after a pause."""
    import threading

    import uvicorn

    async def app(scope: Any, receive: Any, send: Any) -> None:
        size, more = 0, True
        while more:
            part = await receive()
            size, more = size + len(part.get("body", b"")), part.get("more_body", False)
        await asyncio.sleep(2 * seconds if scope["path"] == "/slow" else 0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        body = bytes(LARGE) if scope["path"] == "/large" else str(size).encode()
        await send({"type": "http.response.body", "body": body})

    monkeypatch.setattr(patience, "REQUEST", seconds)
    with patience.LimitedListener(socket.create_server(("127.0.0.1", 0)), crowd, each) as listener:
        config = uvicorn.Config(
            app, http=patience.TimeLimitedProtocol, lifespan="off", log_level="error", loop="asyncio", **tls
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
        thread.start()
        try:
            tests(listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(20)


def test_a_slow_request_and_a_slow_answer_pass_and_a_crowd_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def tests(port: int) -> None:
        def ask(path: str, parts: list[bytes], pause: float = 0.0) -> str:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as it:
                it.sendall(f"POST {path} HTTP/1.1\r\nContent-Length: {sum(map(len, parts))}\r\n\r\n".encode())
                for part in parts:
                    it.sendall(part)
                    time.sleep(pause)
                return it.recv(4096).decode().partition("\r\n")[0]

        assert ask("/slow", [b"x"]).endswith("200 OK"), "the answer may take its time"
        # 64 KiB at 160 KiB a second: longer than the limit, and fast enough for its size.
        assert ask("/", [bytes(16 << 10)] * 8, 0.1).endswith("200 OK")
        with contextlib.suppress(ConnectionError):
            assert ask("/", [b"x"] * 10, 0.15) == "", "too slow for its size"
        crowd = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(12)]
        assert ask("/", [b"x"]).endswith("200 OK")
        first, *_ = crowd
        with contextlib.suppress(ConnectionError):
            assert first.recv(1) == b""
        for connection in crowd:
            connection.close()

    served(tests, monkeypatch)


@pytest.mark.parametrize(("crowd", "each", "closed"), [(100, 3, {1, 2}), (4, 100, {0, 1})])
def test_connections_are_limited(crowd: int, each: int, closed: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of the address makes room, or the oldest of all, long before its time is over."""

    def tests(port: int) -> None:
        def connect(address: str) -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", port), 5, (address, 0)))

        with contextlib.ExitStack() as stack:
            for number, it in enumerate([connect(f"127.0.0.{host}") for host in (2, 1, 1, 1, 1, 1)]):
                if number in closed:
                    with contextlib.suppress(ConnectionError):
                        assert it.recv(1) == b""
                else:
                    it.sendall(b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
                    assert it.recv(4096).startswith(b"HTTP/1.1 200")

    served(tests, monkeypatch, crowd=crowd, seconds=30, each=each)


def test_an_owner_of_a_network_has_one_address() -> None:
    same = {patience._origin(host) for host in ("2001:db8::1", "2001:db8::ffff:1%eth0", "2001:db8:0:0:9::")}
    others = {patience._origin(host) for host in ("2001:db8:0:1::1", "10.0.0.1", "10.0.0.2")}
    assert len(same) == 1 and len(same | others) == 4


def test_a_head_that_does_not_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    start = b"POST /slow HTTP/1.1\r\nContent-Length: 0\r\n"

    def tests(port: int) -> None:
        def sent(*parts: bytes) -> int:
            """Send until the connection is closed; return how much was taken."""
            size = 0
            with socket.create_connection(("127.0.0.1", port), timeout=10) as it, contextlib.suppress(ConnectionError):
                for part in parts:
                    it.sendall(part)
                    size += len(part)
                    time.sleep(0.005)
            return size

        line = b"a: " + bytes(b"b" * (16 << 10)) + b"\r\n"
        assert sent(start, *[line] * 40) < 20 * len(line)
        # While an answer is on its way no time runs, and the next head may follow.
        assert sent(start + b"\r\n", start, *[line] * 40) < 20 * len(line)
        # All of it in one read, too.
        for head in (line * 5, b"a: " + bytes(b"b" * (66 << 10)) + b"\r\n"):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as it:
                it.sendall(start + head + b"\r\n")
                with contextlib.suppress(ConnectionError):
                    assert it.recv(4096)[:12] in (b"HTTP/1.1 400", b"")
        with socket.create_connection(("127.0.0.1", port), timeout=10) as it:
            it.sendall(start + b"a: b\r\n" * (patience.FIELDS + 1) + b"\r\n")
            assert it.recv(4096).startswith(b"HTTP/1.1 400")
        with socket.create_connection(("127.0.0.1", port), timeout=10) as it:
            it.sendall(start + b"a: b\r\n" * (patience.FIELDS - 1) + b"\r\n")
            assert it.recv(4096).startswith(b"HTTP/1.1 200")
        # What was sent of a head does not buy it more time, as a body does.
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", port), timeout=10) as it:
            it.sendall(start + line * 3)
            with contextlib.suppress(ConnectionError):
                assert it.recv(1) == b""
        assert time.monotonic() - began < 2

    served(tests, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("encrypted", [False, True])
def test_a_slow_line_gets_a_large_answer_and_one_that_takes_nothing_is_closed(
    encrypted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls: dict[str, str] = {}
    if encrypted:
        subprocess.run([ROOT / "docker" / "certs.sh", tmp_path, "localhost"], check=True, capture_output=True)
        tls = {"ssl_certfile": str(tmp_path / "server.crt"), "ssl_keyfile": str(tmp_path / "server.key")}

    def tests(port: int) -> None:
        def ask(wait: float, pause: float) -> int:
            with socket.socket() as plain:
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
                plain.settimeout(10)
                plain.connect(("127.0.0.1", port))
                it = plain
                if encrypted:
                    context = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
                    it = context.wrap_socket(plain, server_hostname="localhost")
                it.sendall(b"POST /large HTTP/1.1\r\nContent-Length: 0\r\nConnection: keep-alive\r\n\r\n")
                time.sleep(wait)
                size, began = 0, time.monotonic()
                with contextlib.suppress(ssl.SSLError, ConnectionError):
                    while size < LARGE and (part := it.recv(64 << 10)):
                        size += len(part)
                        # Never faster than 64 KiB in this time, whatever a read returns.
                        time.sleep(max(0.0, began + pause * size / (64 << 10) - time.monotonic()))
                it.close()
                return size

        assert ask(wait=0, pause=0.01) >= LARGE, "2.5 seconds at least, with a limit of 0.6"
        assert ask(wait=3, pause=0) < LARGE, "nothing was taken for longer than the limit"

    served(tests, monkeypatch, **tls)


def test_what_it_writes_is_for_this_user_only(link: Deployment) -> None:
    volume = link.folder / "vol-superlink"
    written = [path for path in volume.iterdir() if path.name.startswith(("superlink", "op"))]
    # A cleaner of /tmp must not remove what the helper process still needs.
    written += [volume / f".superlink-{link.private}", *(volume / f".superlink-{link.private}").iterdir()]
    assert {"superlink.db", "operator.token", "superexec.secret"} <= {path.name for path in written}
    assert {path.name: oct(path.stat().st_mode & 0o077) for path in written} == {path.name: "0o0" for path in written}


def test_plain_http_gets_no_answer(link: Deployment) -> None:
    request = b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
    for port in (link.port, link.private):
        with contextlib.suppress(ConnectionError):
            assert "HTTP" not in raw(link, port, request, tls=False)


def test_the_private_listener_asks_for_the_token(link: Deployment) -> None:
    for path in ("list-runs", "start-run", "register-node", "list-nodes", "stop-run"):
        assert post(link, link.private, f"/v1/control/{path}") == "401", path
        assert post(link, link.private, f"/v1/control/{path}", b"", "Authorization: Bearer wrong") == "401", path
    token = link.token.read_text().strip()
    assert post(link, link.private, "/v1/control/list-nodes", b"", f"Authorization: Bearer {token}") == "200"
    assert post(link, link.private, "/v1/control/list-nodes", b"", f"Authorization: Bearer {token}") == "200"
    assert {post(link, link.private, path) for path in (PULL, PUSH, "/v1/fleet/register-node")} == {"403"}
    # A task, and with it the code and the messages of a run, is given only to the process that knows the secret.
    assert post(link, link.private, "/v1/runtime/acquire-task") in ("401", "403")


@pytest.mark.full
def test_flower_without_the_token_is_refused(link: Deployment) -> None:
    home = link.folder / "stranger"
    home.mkdir()
    config = (link.folder / "vol-superlink" / "flwr" / "config.toml").read_text()
    (home / "config.toml").write_text(config)
    link.sh("docker/keys.sh", str(link.folder / "keys"), "own")

    def flwr(*words: str) -> subprocess.CompletedProcess[str]:
        env = {**link.env("superlink"), "FLWR_HOME": str(home)}
        return subprocess.run([str(BIN / "flwr"), *words], env=env, cwd=link.folder,
                              capture_output=True, text=True)  # fmt: skip

    for words in (["list", "superlink"], ["supernode", "register", str(link.folder / "keys" / "own.pub"), "superlink"]):
        done = flwr(*words)
        assert done.returncode != 0, done.stdout
    env = {**link.env("superlink"), "FLWR_HOME": str(home), "PYTHONPATH": str(ROOT)}
    for words in (
        ["run", "--engine", "deploy", "--superlink", "superlink"],
        ["deploy", "check", "--superlink", "superlink"],
        ["admit", str(link.folder / "keys" / "own.pub"), "--client", "7", "--superlink", "superlink"],
    ):
        done = subprocess.run([str(BIN / "fedapp"), *words], env=env, cwd=link.folder, capture_output=True, text=True)
        assert done.returncode in (1, 2) and "fedapp operator login superlink" in done.stdout + done.stderr
    listed = json.loads(link.flwr("supernode", "list", "superlink", "--format", "json"))
    assert listed["success"] and listed["nodes"] == []


@pytest.mark.full
def test_a_key_is_admitted_once(link: Deployment) -> None:
    link.register("supernode-0")
    entries = roster.read(link.folder / "vol-superlink" / "roster.toml")
    assert [e.client for e in entries.values()] == [0]
    listed = json.loads(link.flwr("supernode", "list", "superlink", "--format", "json"))
    assert [int(n["node-id"]) for n in listed["nodes"]] == list(entries)
    done = link.run("admit", str(link.folder / "keys" / "supernode-1.pub"), "--client", "0", "--superlink", "superlink")
    assert done.returncode == 2 and "client 0" in done.stderr
    done = link.run("admit", str(link.folder / "keys" / "supernode-0"), "--client", "1", "--superlink", "superlink")
    assert done.returncode == 2 and "is not a public key" in done.stderr


@pytest.fixture(scope="module")
def node(link: Deployment) -> tuple[Any, Node]:
    """An admitted node, as its key and its id."""
    link.register("supernode-2")
    entries = roster.read(link.folder / "vol-superlink" / "roster.toml").values()
    key = serialization.load_ssh_private_key((link.folder / "keys" / "supernode-2").read_bytes(), None)
    return key, Node(node_id=next(entry.node for entry in entries if entry.client == 2))


def asks(link: Deployment, key: Any, path: str, body: bytes, *seen: tuple[bytes, bytes]) -> str:
    """Send a request that a key signs, or with what was signed before; return the status."""
    headers = seen or signing(shown(key), key)
    return post(link, link.port, path, body, *(f"{name.decode()}: {value.decode()}" for name, value in headers))


@pytest.mark.full
def test_who_has_seen_a_signature_cannot_use_it(link: Deployment, node: tuple[Any, Node]) -> None:
    body, once = SendNodeHeartbeatRequest(node=node[1], heartbeat_interval=30), signing(shown(node[0]), node[0])
    assert [asks(link, node[0], BEAT, body.SerializeToString(), *once) for _ in range(2)] == ["200", "503"]


@pytest.mark.full
def test_a_locked_database_means_later(link: Deployment, node: tuple[Any, Node]) -> None:
    """Neither a node nor the helper process takes it for the end."""
    helpers = [child.pid for child in psutil.Process(link.processes["superlink"].pid).children()]
    body = SendNodeHeartbeatRequest(node=node[1], heartbeat_interval=30).SerializeToString()
    file = link.folder / "vol-superlink" / "superlink.db"
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        assert asks(link, node[0], BEAT, body) == "503"
    assert asks(link, node[0], BEAT, body) == "200"
    assert set(helpers) <= {child.pid for child in psutil.Process(link.processes["superlink"].pid).children()}


@pytest.mark.full
def test_what_a_node_asks_for_in_vain_is_its_own_fault(link: Deployment, node: tuple[Any, Node]) -> None:
    for run in (1, 2**63, 2**64 - 1):
        piece = PushObjectRequest(node=node[1], run_id=run, object_id="0" * 64, object_content=b"x", session_id="a")
        assert asks(link, node[0], OBJECT, piece.SerializeToString()) == "400"
        odd = reply(node[1].node_id, run_id=run, message_type="a\n" * 999)
        assert asks(link, node[0], PUSH, odd) == "400"
    fab = GetFabRequest(node=node[1], run_id=1, hash_str="a\nb" * 20_000).SerializeToString()
    assert asks(link, node[0], "/v1/fleet/get-fab", fab) == "403"
    log = link.log("superlink")
    assert "Traceback" not in log and max(map(len, log.splitlines())) < 1200 and "\nba" not in log


@pytest.mark.full
def test_it_stops_when_told_and_with_its_helper(link: Deployment) -> None:
    port, private = free_port(), free_port()
    words = link.command("superlink", public=f"127.0.0.1:{port}", private=f"127.0.0.1:{private}",
                         database=str(link.folder / "second.db"))  # fmt: skip
    second = link.start("second", *words)
    until(lambda: "nodes at" in link.log("second"), 60, "the second\n" + link.log("second"))
    other = link.command("superlink", public=f"127.0.0.1:{free_port()}", private=f"127.0.0.1:{free_port()}",
                         database=str(link.folder / "second.db"))  # fmt: skip
    assert link.start("other", *other).wait(60) == 2 and "another SuperLink uses" in link.log("other")
    second.terminate()
    assert second.wait(15) == 0 and "Traceback" not in link.log("second"), link.log("second")[-2000:]
    # The address is free again, and taking one that is not says so.
    again = link.start("third", *link.command("superlink"))
    assert again.wait(60) == 2 and "cannot listen on" in link.log("third")


# ---- nginx in its place ----------------------------------------------------------------------------------------------


def test_the_paths_of_nginx_are_those_of_the_gate() -> None:
    text = (ROOT / "docker" / "nginx.conf").read_text(encoding="utf-8")
    names = "|".join(re.findall(r'"~\^/v1/fleet/\(([a-z|-]+)\)\$" 1;', text)).split("|")
    assert sorted(f"/v1/fleet/{name}" for name in names) == sorted(gate.NODE_PATHS)
    assert "default 0;" in text


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is needed")
def test_nginx_passes_the_same(link: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, nodes, operators = link.folder, free_port(), free_port()
    monkeypatch.setenv("USE", "clientAuth")
    link.sh("docker/certs.sh", str(folder / "operators"), "alice")
    text = (ROOT / "docker" / "nginx.conf").read_text(encoding="utf-8")
    link.sh("docker/certs.sh", str(folder / "sites"), "site-a")
    text = text.replace("/run/secrets/operators.crt", f"{folder}/operators/ca.crt")
    text = text.replace("/run/secrets/sites.crt", f"{folder}/sites/ca.crt")
    text = text.replace("/run/secrets", f"{folder}/certs").replace("/tmp/nginx", f"{folder}/nginx")
    # For operators the private listener of the started SuperLink stands in for a plain one: it asks for the token too.
    words, plain = link.command("superlink"), free_port()
    files = words[words.index("--ssl-ca-certfile") : words.index("--database")]
    link.start("plain", "flower-superlink", "--port", str(plain), "--enable-supernode-auth", *files)
    until(lambda: "startup complete" in link.log("plain"), 60, "a plain SuperLink\n" + link.log("plain")[-1500:])
    for_nodes, _, for_operators = text.rpartition("127.0.0.1:8002")
    text = f"{for_nodes.replace(':8002', f':{plain}')}127.0.0.1:{link.private}{for_operators}"
    text = text.replace("0.0.0.0", "127.0.0.1")
    text = text.replace(":8000", f":{nodes}").replace(":8001", f":{operators}")
    (folder / "nginx.conf").write_text("daemon off;\n" + text)
    link.start("nginx", "nginx", "-c", str(folder / "nginx.conf"))
    until(lambda: _answers(link, nodes), 20, "nginx answers\n" + link.log("nginx"))
    refused = (
        "/v1/control/list-runs", "/v1/runtime/acquire-task", "/v1/fleet/register-node", "/docs", "/health",
        "/v1/fleet/../control/list-runs", "/v1/control%2flist-runs", "//v1/control/list-runs",
        "/v1/fleet/%70ull-messages",        "/V1/FLEET/PULL-MESSAGES", PULL + ";x", PULL + "?x", PULL + "/",
    )  # fmt: skip
    assert {path: post(link, nodes, path) for path in refused} == dict.fromkeys(refused, "403")
    assert post(link, nodes, PULL) in ("400", "401", "422"), "the SuperLink itself answers"
    assert post(link, nodes, PULL, b"", f"Content-Length: {gate.FEW + 1}") == "413"
    assert post(link, nodes, gate.PUSH_OBJECT, b"", f"Content-Length: {gate.BODY + 1}") == "413"
    assert post(link, nodes, gate.PUSH_OBJECT, bytes(gate.FEW + 1)) in ("400", "401", "422"), "the SuperLink answers"
    assert post(link, nodes, PULL, b"0\r\n\r\n", "Transfer-Encoding: chunked") == "411"
    # Operators: only with a certificate, and only the operator's paths.
    assert post(link, operators, "/v1/control/list-nodes") == "400"
    shown = (folder / "operators" / "server.crt", folder / "operators" / "server.key")
    assert post(link, operators, "/v1/control/list-nodes", shown=shown) == "401", "then the token"
    assert post(link, operators, "/v1/runtime/acquire-task", shown=shown) == "403"
    assert post(link, operators, "/v1/control/%2e%2e/runtime/acquire-task", shown=shown) == "403"
    assert link.processes["nginx"].terminate() is None and link.processes["nginx"].wait(20) == 0
    # Nodes only with a certificate of the sites' authority, as the file proposes.
    with_sites, lines = re.subn(r"# (ssl_(?:client_certificate|verify_client) .*;)", r"\1", text)
    assert lines == 2
    (folder / "nginx.conf").write_text("daemon off;\n" + with_sites)
    link.start("nginx", "nginx", "-c", str(folder / "nginx.conf"))
    until(lambda: _answers(link, nodes, "400"), 20, "nginx answers\n" + link.log("nginx"))
    site = (folder / "sites" / "server.crt", folder / "sites" / "server.key")
    closed = "/v1/control/list-runs"  # nginx refuses the path to those whom it lets in
    assert [post(link, nodes, closed, shown=who) for who in (None, shown, site)] == ["400", "400", "403"]
    assert post(link, nodes, PULL, shown=site) in ("400", "401", "422"), "the SuperLink itself answers"
    assert post(link, operators, "/v1/control/list-nodes", shown=site) == "400", "a site is no operator"


def _answers(link: Deployment, port: int, status: str = "403") -> bool:
    try:
        return post(link, port, "/") == status
    except OSError:
        return False
