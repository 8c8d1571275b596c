"""The SuperLink's layers of middleware: one of ours, and each of Flower's for the requests that it does something for.

Flower puts nine layers around every request, and each starts a task and queues for it. Seven of them do something for
some paths alone. A round with two nodes is 150 requests, most of them for single arrays.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, MutableMapping
from typing import Any

from fedapp.deployment.asgi import App, Receive, Scope, Send
from fedapp.errors import one_line

LINE = 1000
"""Characters of one line of the log that a text of a node may fill."""
CONTROL, FLEET = ("/v1/control/",), ("/v1/fleet/",)
ONLY: dict[str, tuple[str, ...]] = {
    "ControlSensitiveResponseMiddleware": CONTROL,
    "ControlAuthenticationMiddleware": CONTROL,
    "ControlLicenseMiddleware": CONTROL,
    "ControlEventLogMiddleware": CONTROL,
    "NodeAuthMiddleware": FLEET,
    "FleetEventLogMiddleware": FLEET,
    "RuntimeTracingMiddleware": ("/v1/runtime/acquire-task", "/v1/runtime/pull-task-input"),
}
"""How the paths begin that a layer of Flower's does something for."""


class PathFilter:
    """A layer for some paths. The path is the decoded one by which the app itself chooses what to call.

    Parameters
    ----------
    app : what lies below the layer.   layer : Starlette's description of it.   paths : how its paths begin.
    """

    def __init__(self, app: Any, layer: Any, paths: tuple[str, ...]) -> None:
        self.app, self.paths = app, paths
        self.layer = layer.cls(app, *layer.args, **layer.kwargs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        passes = scope["type"] == "http" and not scope["path"].startswith(self.paths)
        await (self.app if passes else self.layer)(scope, receive, send)


class UnavailableMiddleware:
    """The outermost layer: a failure is answered with 503, after which Flower's programs ask again.

    They take 500 for final: a node's heartbeats end for good, the program that starts runs ends, a reply is thrown
    away. But nearly all of these answers come from a database that cannot be written to for a while.

    Parameters
    ----------
    app : what lies below.   report : receives one line for each failure that the app leaves to the server.
    """

    def __init__(self, app: App, report: Callable[[str], object] = lambda text: None) -> None:
        self.app, self.report = app, report

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        begun = False

        async def send_unavailable(message: MutableMapping[str, Any]) -> None:
            nonlocal begun
            begun = True
            await send({**message, "status": 503} if message.get("status", 200) >= 500 else message)

        try:
            await self.app(scope, receive, send_unavailable)
        except (Exception, asyncio.CancelledError) as e:
            stopped = isinstance(e, asyncio.CancelledError)  # a log is followed while the server stops
            if scope["type"] != "http" or (begun and not stopped):
                raise
            if not stopped:
                self.report(one_line(f"{scope['path']} failed: {type(e).__name__}: {e}"[:LINE]))
            if not begun:
                await send({"type": "http.response.start", "status": 503, "headers": [(b"content-length", b"0")]})
            with contextlib.suppress(RuntimeError):  # part of an answer whose length was stated
                await send({"type": "http.response.body", "body": b""})


def narrow(app: Any) -> None:
    """Let the layers of an app that has not started see only the requests that they do something for."""
    from starlette.middleware import Middleware

    found = []
    for layer in app.user_middleware:
        name = getattr(layer.cls, "__name__", "")
        if name == "FleetEventLogMiddleware" and app.state.fleet_event_log_plugin is None:
            continue  # no plugin gets its log
        found.append(Middleware(PathFilter, layer=layer, paths=ONLY[name]) if name in ONLY else layer)
    app.user_middleware[:] = found
