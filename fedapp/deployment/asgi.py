"""Requests and answers of ASGI, for code in front of Flower's apps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def header(scope: Scope, name: bytes) -> bytes:
    """Return the value of a header, empty if it is missing."""
    found: bytes = next((value for key, value in scope["headers"] if key == name), b"")
    return found


async def read_body(receive: Receive, size: int) -> bytes | None:
    """Return a request's body, or None if its sender is gone or it does not have the stated size in bytes."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if message["type"] == "http.disconnect" or len(body) > size:
            return None
        if not message.get("more_body", False):
            return bytes(body) if len(body) == size else None


async def discard_body(receive: Receive) -> None:
    """Read the rest of a request, and keep nothing."""
    while (await receive()).get("more_body", False):
        pass


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that hands out a body that was read already."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> MutableMapping[str, Any]:
        return left.pop() if left else await receive()

    return replayed


async def answer(send: Send, status: int, text: str, kind: str = "text/plain") -> None:
    """Answer a request, and end its connection."""
    body = text.encode()
    headers = [
        (b"content-type", kind.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
