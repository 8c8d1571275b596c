"""The SuperLink answers with fewer layers around it as with all of them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.superlink.main import _get_middleware, create_app
from starlette.middleware import Middleware

from fedapp.deployment.layers import ONLY, PathFilter, narrow

PATHS = sorted(path for _, path in PROTOBUF_REQUEST_TYPES)


async def bare(scope: Any, receive: Any, send: Any) -> None:
    """Answer everything."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-path", scope["path"].encode())]})
    await send({"type": "http.response.body", "body": b"passed"})


def posted(app: Any, *paths: str, body: bytes = b"", **headers: str) -> list[tuple[int, list[tuple[str, str]], bytes]]:
    """Return status, head and body of the answers."""

    async def everything() -> list[tuple[int, list[tuple[str, str]], bytes]]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="https://there") as client:
            head = {"content-type": PROTOBUF_MEDIA_TYPE, **headers}
            got = [await client.post(path, content=body, headers=head) for path in paths]
            return [(r.status_code, sorted(r.headers.items()), r.content) for r in got]

    return asyncio.run(asyncio.wait_for(everything(), 60))


def test_a_layer_that_is_left_out_would_have_passed_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_TRACING_ENABLED", "1")
    layers = {getattr(m.cls, "__name__", ""): m for m in _get_middleware()}
    assert layers.keys() >= ONLY.keys()
    for name, paths in ONLY.items():
        outside = [*(p for p in PATHS if not p.startswith(paths)), "/health", "/docs", "/v1/other"]
        assert len(outside) > 3 and any(p.startswith(paths) for p in PATHS)
        layer: Any = layers[name]
        assert posted(layer.cls(bare), *outside) == posted(bare, *outside), name


def test_inside_its_paths_a_layer_stays() -> None:
    seen: list[str] = []

    def layer(app: Any) -> Any:
        async def call(scope: Any, receive: Any, send: Any) -> None:
            seen.append(scope.get("path", scope["type"]))
            await app(scope, receive, send)

        return call

    only: Any = PathFilter(bare, Middleware(layer), ("/v1/control/",))
    posted(only, "/v1/fleet/get-run", "/v1/control/start-run", "/v1/contro%6C/stop-run", "/v1/control")
    assert seen == ["/v1/control/start-run", "/v1/control/stop-run"], "as the app itself reads a path"
    seen.clear()

    async def other(scope: Any, receive: Any, send: Any) -> None: ...

    asyncio.run(PathFilter(other, Middleware(layer), ("/v1/control/",))({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan"]


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer no", "flwr-public-key": "bm8=", "flwr-signature": "bm8="}]
)
def test_who_has_no_right_is_refused_as_before(headers: dict[str, str]) -> None:
    before, now = create_app(), create_app()
    narrow(now)
    assert len(now.user_middleware) == len(before.user_middleware) - 1
    paths = [path for path in PATHS if not path.startswith("/v1/control/stream")]
    answers = [posted(app, *paths, body=b"\x0a", **headers) + posted(app, *paths, **headers) for app in (before, now)]
    for path, one, other in zip(paths * 2, *answers, strict=True):
        assert one[0] == other[0] and (one[0] < 400 or one == other), path
    fleet = [one[0] for path, one in zip(paths * 2, answers[1], strict=True) if path.startswith("/v1/fleet/")]
    assert set(fleet) <= {400, 401}


def test_events_of_nodes_are_logged_where_somebody_logs_them() -> None:
    app = create_app()
    app.state.fleet_event_log_plugin = SimpleNamespace()
    narrow(app)
    kept = [m.kwargs["layer"].cls.__name__ for m in app.user_middleware if m.cls is PathFilter]
    assert sorted(kept) == sorted(ONLY)
