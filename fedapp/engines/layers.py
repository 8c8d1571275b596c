"""The SuperLink's layers of middleware, each for the requests that it does something for.

Flower puts nine layers around every request, and each starts a task and queues for it. Seven of them do something for
some paths alone. A round with two nodes is 150 requests, most of them for single arrays.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

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


class Only:
    """A layer for some paths. The path is the decoded one by which the app itself chooses what to call.

    Parameters
    ----------
    app : what lies below the layer.   layer : Starlette's description of it.   paths : how its paths begin.
    """

    def __init__(self, app: Any, layer: Any, paths: tuple[str, ...]) -> None:
        self.app, self.paths = app, paths
        self.layer = layer.cls(app, *layer.args, **layer.kwargs)

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[..., Awaitable[None]],
    ) -> None:
        """Handle one request."""
        passes = scope["type"] == "http" and not scope["path"].startswith(self.paths)
        await (self.app if passes else self.layer)(scope, receive, send)


def narrow(app: Any) -> None:
    """Let the layers of an app that has not started see only the requests that they do something for."""
    from starlette.middleware import Middleware

    found = []
    for layer in app.user_middleware:
        name = getattr(layer.cls, "__name__", "")
        if name == "FleetEventLogMiddleware" and app.state.fleet_event_log_plugin is None:
            continue  # it would log to nobody
        found.append(Middleware(Only, layer=layer, paths=ONLY[name]) if name in ONLY else layer)
    app.user_middleware[:] = found
