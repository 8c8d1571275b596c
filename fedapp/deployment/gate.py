"""The SuperLink's public listener: it passes the requests of registered nodes, within limits, and nothing else.

Flower's SuperLink serves nodes, the command line and its own helper processes on one port. A program that reaches that
port with the CA's certificate can register nodes, submit code, and take over the task of a run. The gate passes exactly
the paths that a registered SuperNode uses, with limits for sizes. A node can send only its own replies, and receive
only its own messages. The gate relies on the protocol of Flower 1.41.
"""

from __future__ import annotations

import asyncio
import collections
import json
import time
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from fedapp.deployment.asgi import App, Receive, Scope, Send, answer, discard_body, header, read_body, replay
from fedapp.deployment.credentials import UNREGISTERED, USED, fingerprint
from fedapp.transport import records

FLEET = "/v1/fleet/"
"""Start of the paths of nodes, which the private listener does not serve."""
_PATHS = [
    f"{FLEET}{name}"
    for name in (
        *("activate-node", "pull-messages", "push-object", "push-messages", "pull-object", "confirm-message-received"),
        *("deactivate-node", "send-node-heartbeat", "get-run", "get-fab"),
    )
]
NODE_PATHS = frozenset(_PATHS)
"""All requests of a SuperNode with a registered key; registering is the operator's affair."""
ACTIVATE, PULL, PUSH_OBJECT, PUSH_MESSAGES, PULL_OBJECT, CONFIRM = _PATHS[:6]
NODES_ONLY, NO_NODES = "this listener serves SuperNodes only", "SuperNodes use the public listener"
"""The answers to everything else."""
UNKNOWN_KEY = "its key is not registered; the operator admits it with fedapp admit KEY.pub --client ID"
BODY, FEW = 8 << 20, 64 << 10
"""Largest body in bytes of a request that brings a part of a reply, and of any other."""
PIECES, PIECE, ENTRY = 5000, 5 << 20, 80
"""Objects that a reply may consist of, besides one for each `PIECE` bytes of it, in which Flower sends arrays, and the
bytes that list one of them. Each array is two objects, so that a reply has up to 2,500 arrays: the largest network of
torchvision has 1,550. The SuperLink writes all of a list at once, and no other request can write meanwhile."""
PRICE, LISTS = 18, 4
"""What one byte of a reply's list of objects counts: the SuperLink keeps 18 times as much. And how many lists a node
may send for each message: it may have to send the same one again."""
LONG = 1.0
"""Seconds from which on others must get a turn to write before the next list of objects."""
GIVEN = 4
"""Messages of a node whose parts it may ask for. A SuperNode asks for the next one when it has all of the last."""
LATEST = 1e11
"""Times in a reply, which are moments since 1970 or lengths, have fewer seconds than that: the year 5138."""
NEWS, ALL_THERE = "/v1/runtime/push-messages", "/v1/runtime/pull-messages"
"""Where a run hands over messages for nodes; where it asks for replies, when it has also sent all their parts."""
PARTS = 1.0
"""Seconds after which nodes get messages even if parts of them are still on their way. A node that asks for a part too
early asks again a second later."""
HOLD = 10.0
"""Seconds that a node's question for messages waits for one. Without waiting, Flower's node would sleep for 3 seconds
after each answer that has none. Shorter than what a node waits for an answer (30 seconds)."""
CONNECTIONS = 1024
"""Requests that a listener handles at once; further ones get 503."""
HELD = CONNECTIONS // 2
"""Questions that wait at once; further ones are answered immediately."""
SUMMARY = 60.0
"""Seconds between two log lines about refused requests. Strangers can send any number of requests."""


class Gate:
    """Pass a node's requests to an ASGI app, and answer all others.

    An allow list decides, on the decoded path that the app itself routes by: a deny list
    would be passed by an encoded slash.

    Parameters
    ----------
    app : the SuperLink.
    max_reply : bytes that one key may send for each message that the server had for it, or fewer where it states
        how many its reply can have (`records.group_of`); a reply alone earns nothing, so that sending more of them does
        not help. What was not used is kept for one more message. Bytes are taken off before they are read, and given
        back if the app refuses them.
    report : receives one line for each refusal because of `max_reply`, and one a minute about all others.
    signed : says which node's key has signed a request; see :class:`Signatures`.
    hold : seconds that a question for messages waits for one.

    In memory a node has at most `max_reply` bytes of bodies. The app works on one of them: it makes several copies. Of
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
        self._budgets: dict[int, ByteBudget] = {}
        self._queues: weakref.WeakValueDictionary[int, NodeQueue] = weakref.WeakValueDictionary()
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
            await self._priced(scope, receive, send, header(scope, b"flwr-public-key"), node, size)
        elif path in (PULL, PULL_OBJECT, CONFIRM):
            body = await read_body(receive, size)
            if body is None:
                return
            if path == PULL:
                await self._pull(scope, body, receive, send)
            elif self._was_given(path, body):
                await self.app(scope, replay(body, receive), send)
            else:
                await answer(send, 403, "this is not a part of a message that the node was given")
        else:
            await self.app(scope, receive, send)

    async def _refuse(self, send: Send, status: int, text: str, kind: str = "text/plain") -> None:
        """Refuse a request that may be a stranger's; refusals are counted, not logged one by one."""
        if not self._refused:
            asyncio.get_running_loop().call_later(SUMMARY, self._summarise)
        self._refused[status] += 1
        await answer(send, status, text, kind)

    def _summarise(self) -> None:
        counts = ", ".join(f"{count} with {status}" for status, count in sorted(self._refused.items()))
        self.report(f"refused requests in the last {SUMMARY:g} s: {counts}")
        self._refused.clear()

    async def _priced(self, scope: Scope, receive: Receive, send: Send, key: bytes, node: int, size: int) -> None:
        """Handle a request that brings a part of a reply."""
        listing = scope["path"] == PUSH_MESSAGES
        budget, cost = self._budget(node), size * (PRICE if listing else 1)
        if cost > budget.left or budget.lists < listing:
            most = max(budget.given)
            self.report(f"the node with key {fingerprint(key)} sent more than {most} bytes for one reply")
            await discard_body(receive)  # a node that cannot send the rest would try again and not see the answer
            await answer(send, 413, f"a reply has at most {most} bytes here, and {LISTS} lists of its objects")
            return
        budget.take(cost, listing)
        good, queue = False, self._queues.setdefault(node, NodeQueue())
        try:
            async with queue.room:
                await queue.room.wait_for(lambda: queue.held + size <= max(self.max_reply, size))
                queue.held += size
            try:
                body = await read_body(receive, size)
                if body is not None:
                    async with queue.app:
                        if listing:
                            good = await self._list(scope, body, receive, send, key, node)
                        else:
                            good = await self._pass(scope, replay(body, receive), send)
            finally:
                async with queue.room:
                    queue.held -= size
                    queue.room.notify_all()
        finally:
            if not good:
                budget.take(-cost, -listing)

    async def _list(self, scope: Scope, body: bytes, receive: Receive, send: Send, key: bytes, node: int) -> bool:
        """Pass a reply's list of objects, one at a time; return whether the app accepted it."""
        status, wrong = await asyncio.to_thread(reply_problem, body, node, self.pieces)
        if wrong:
            self.report(f"refused a message of the node with key {fingerprint(key)}: {wrong}")
            await answer(send, status, wrong)
            return False
        async with self._listing:
            # SQLite has no queue: without a pause a node that asks again at once would always be first.
            await asyncio.sleep(self._rest - time.monotonic())
            began = time.monotonic()
            try:
                return await self._pass(scope, replay(body, receive), send)
            finally:
                took = time.monotonic() - began
                self._rest = time.monotonic() + (took if took > LONG else 0.0)

    def _was_given(self, path: str, body: bytes) -> bool:
        """Return whether a request is for a part of a message that the node which it names was given."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest

        request = _read(ConfirmMessageReceivedRequest if path == CONFIRM else PullObjectRequest, body)
        if request is None:
            return False
        name = request.message_object_id if path == CONFIRM else request.object_id
        return any(name in parts for parts in self._given.get(request.node.node_id, ()))

    def _budget(self, node: int) -> ByteBudget:
        # A SuperLink that was started again does not know what it had sent before: each node begins with one reply.
        return self._budgets.setdefault(node, ByteBudget(self.max_reply))

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
        """Let the app answer a node that asks for messages; where there is none, when a run has sent some."""
        news = self._news  # bytes sent while the app answers also count
        response, found = await self._asked(scope, body, receive)
        if found == [] and self._held < HELD:
            gone, rung = asyncio.ensure_future(receive()), asyncio.ensure_future(news.wait())
            self._held += 1
            try:
                await asyncio.wait((gone, rung), timeout=self.hold, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    return  # an unread message would count as delivered
                if rung.done():
                    response, found = await self._asked(scope, body, receive)
            finally:
                self._held -= 1
                gone.cancel()
                rung.cancel()
        if found:
            from flwr.proto.fleet_pb2 import PullMessagesRequest

            node = PullMessagesRequest.FromString(body).node.node_id  # as the key says: the app has answered it
            budget, given = self._budget(node), self._given.setdefault(node, collections.deque(maxlen=GIVEN))
            for parts, most in found:
                budget.earn(min(most or self.max_reply, self.max_reply))
                given.append(parts)
        for message in response:
            await send(message)

    async def _asked(
        self, scope: Scope, body: bytes, receive: Receive
    ) -> tuple[list[MutableMapping[str, Any]], list[tuple[frozenset[str], int]] | None]:
        """Return the app's answer and its `_messages`; the signature in the head is good for both questions."""
        response: list[MutableMapping[str, Any]] = []

        async def kept(message: MutableMapping[str, Any]) -> None:
            response.append(message)

        await self.app(dict(scope), replay(body, receive), kept)
        return response, _messages(response)

    async def inside(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request of the private listener; when a run has sent messages, wake the nodes that wait for one."""
        path = scope.get("path", "")
        if path.startswith(FLEET):
            # A node with an account on this machine would give orders in the server's name, past what stands above.
            await answer(send, 403, NO_NODES)
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


class ByteBudget:
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


class NodeQueue:
    """The requests of one node that bring parts of replies: how many bytes of them are held, and whose turn it is."""

    def __init__(self) -> None:
        self.held = 0
        self.room, self.app = asyncio.Condition(), asyncio.Lock()


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
        return 400, "this is not a message"
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


def _messages(response: Sequence[MutableMapping[str, Any]]) -> list[tuple[frozenset[str], int]] | None:
    """Return of each message in the SuperLink's answer to a node its parts, and the bytes that its reply can have.

    Those are 0 where the message does not say it. None if the SuperLink refuses the node.
    """
    from flwr.proto.fleet_pb2 import PullMessagesResponse
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

    if not response or response[0].get("status") != 200:
        return None
    body = b"".join(part.get("body", b"") for part in response)
    found = PullMessagesResponse.FromString(body)
    return [
        (frozenset(part.object_id for part in iterate_object_tree(tree)), records.most_of(message.metadata.group_id))
        for message, tree in zip(found.messages_list, found.message_object_trees, strict=True)
    ]
