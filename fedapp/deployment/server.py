"""A SuperLink with two listeners: a public one for nodes, a private one for the operator and the server itself.

:func:`serve` starts Flower's SuperLink with two listeners in one process:

- the **public** listener passes what registered nodes may ask for (:class:`fedapp.deployment.gate.Gate`);
- the **private** listener on loopback passes everything but the paths of nodes. Flower's command line must show the
  operator's token (:class:`fedapp.deployment.credentials.OperatorToken`), and tasks are given only to a helper process
  that knows a secret (Flower's ``--isolation process``, :mod:`fedapp.deployment.executor`).

Other users of the machine read neither its files nor the token of a task. What one node lists as objects of its message
changes no other message (:mod:`fedapp.deployment.objects`). Requests pass only through those of Flower's layers that do
something for them (:mod:`fedapp.deployment.layers`).

It uses internals of Flower 1.41 (`_parse_superlink_lifespan_config`, `SuperLinkLifespan`, `create_app`,
`authenticate_node`, `subprocess_executor`, `object_store_factory`, its handlers of requests, and what tells that a node
or a run is lost) and therefore refuses to start under another minor version.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import uvicorn

from fedapp.deployment import database, patience
from fedapp.deployment.credentials import (
    OperatorToken,
    Signatures,
    check_certificate,
    make_secrets_folder,
    operator_token,
    write_secret,
)
from fedapp.deployment.executor import check_flower, executor_command, replace_attribute
from fedapp.deployment.gate import CONNECTIONS, Gate
from fedapp.deployment.layers import LINE, UnavailableMiddleware, narrow
from fedapp.engines import control
from fedapp.errors import BadRequest, one_line
from fedapp.transport import roster

if TYPE_CHECKING:
    from flwr.superlink.config_loader import SuperLinkLifespanConfig

STARTS = 60.0
"""Seconds until a listener must have started."""
STABLE, TRIES = 30.0, 3
"""Seconds after which the helper process counts as one that works; how often one that never did is started."""
OURS = ("--host", "--port", "--isolation", "--superexec-auth-secret-file", "--insecure", "--simulation")
"""Flower's options that :func:`serve` sets itself or that would open what it closes."""
NEEDED = ("--ssl-ca-certfile", "--ssl-certfile", "--ssl-keyfile")
ALWAYS = ("--enable-supernode-auth", "--disable-runtime-dependency-installation")
"""Options that the operator gives, and switches that are on in any case."""


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


def _configuration(flower: Sequence[str], private: socket.socket) -> SuperLinkLifespanConfig:
    """Read flower-superlink's options with what a guarded SuperLink always has."""
    proxy = "put a reverse proxy in front of flower-superlink (docker/nginx.conf says what is lacking then)"
    check_flower("fedapp superlink", proxy)
    names = [word.partition("=")[0] for word in flower]
    if given := [name for name in OURS if name in names]:
        why = "fedapp superlink always uses TLS, node keys and its own listeners"
        raise BadRequest(f"{given[0]} cannot be given: {why}")
    if missing := [name for name in NEEDED if name not in names]:
        why = "a SuperLink is started with TLS only (docker/certs.sh makes the files)"
        raise BadRequest(f"{missing[0]} is needed: {why}")
    always = [name for name in ALWAYS if name not in names]
    host, port = private.getsockname()[:2]
    ours = ["--host", host, "--port", str(port), "--isolation", "process"]
    before = sys.argv
    sys.argv = ["fedapp superlink", *flower, *always, *ours]
    try:
        # The package exports a function under the module's name, so the module is asked for by its full name.
        flower_superlink: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")
        config: SuperLinkLifespanConfig = flower_superlink._parse_superlink_lifespan_config()
        return config
    finally:
        sys.argv = before


def serve(public: str, private: str, token_file: Path | None, max_reply: int, flower: Sequence[str]) -> int:
    """Run a SuperLink until it is told to stop (SIGTERM or Ctrl-C).

    Parameters
    ----------
    public, private : HOST:PORT of the two listeners; `private` must be on loopback.
    token_file : the operator's token, made if it does not exist; None = `operator.token` next to the database.
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
        os.environ.update(control.environment())
        config = _configuration(flower, inner)
        check_certificate(config, inner.getsockname()[0])
        database.own_files(config.database)
        stack.enter_context(database.lock_database(config.database))
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
        write_secret(secret, config.superexec_auth_secret)
        ready = f"nodes at {public}, operator at {private} with the token in {token_file}"
        return asyncio.run(_serve(config, inner, outer, secret, max_reply, ready))


class Server(uvicorn.Server):
    """A server that leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


async def _serve(
    config: SuperLinkLifespanConfig,
    inner: socket.socket,
    outer: socket.socket,
    secret: Path,
    max_reply: int,
    ready: str,
) -> int:
    """Run both listeners and the helper process; the first that ends for good ends all. `ready` is printed at last."""
    from flwr.supercore.http_logging import get_uvicorn_log_config
    from flwr.supercore.logger import FLOWER_LOGGER, console_handler
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
    from flwr.superlink.main import create_app

    from fedapp.deployment.objects import make_requests_atomic, own_lists

    def say(text: str) -> None:
        with contextlib.suppress(OSError):  # the log's disk is full
            typer.echo(f"fedapp superlink: {text}", err=True)

    own_lists()
    make_requests_atomic()
    FLOWER_LOGGER.addFilter(_shorten)
    _free_at_once()
    database.tolerate_write_failures()
    database.limit_connections()
    app = create_app(config, SuperLinkLifespan)
    narrow(app)
    database.end_runs(app)  # before the operator can submit another one
    gate = Gate(app, max_reply, say, Signatures(app))
    common: dict[str, Any] = {
        "log_config": get_uvicorn_log_config(console_handler.level),
        "ssl_keyfile": config.ssl_keyfile,
        "ssl_certfile": config.ssl_certfile,
        "timeout_graceful_shutdown": 3,
        "limit_concurrency": CONNECTIONS,
        "http": patience.TimeLimitedProtocol,
        "ws": "none",
        "backlog": patience.BATCH,
    }
    private = Server(uvicorn.Config(UnavailableMiddleware(gate.inside, say), interface="asgi3", **common))
    # The app's resources belong to the private listener, which starts them once.
    public = Server(
        uvicorn.Config(
            UnavailableMiddleware(gate, say), lifespan="off", server_header=False, access_log=False, **common
        )
    )
    # A connection counts for uvicorn after the TLS handshake, for which asyncio would wait 60 seconds.
    replace_attribute(asyncio.constants, "SSL_HANDSHAKE_TIMEOUT", patience.REQUEST)  # type: ignore[attr-defined]
    replace_attribute(asyncio.sslproto.SSLProtocol, "max_size", patience.RECORD)  # type: ignore[attr-defined]
    connections, (host, port) = min(patience.MAX_CONNECTIONS, patience.raise_limit() // 2), inner.getsockname()[:2]
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(partial(_report_loop_error, say))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    tasks: list[asyncio.Task[Any]] = [
        asyncio.create_task(private.serve(sockets=[patience.LimitedListener(inner, connections)]))
    ]
    helper: asyncio.Task[None] | None = None
    try:
        if not await _started(private, tasks[0]):
            return 1
        runtime = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        command = executor_command(runtime, secret, "--root-certificates", str(config.ssl_ca_certfile))
        helper = asyncio.create_task(_run_helper(command, say))
        tasks += [helper, asyncio.create_task(public.serve(sockets=[patience.LimitedListener(outer, connections)]))]
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


def _shorten(record: logging.LogRecord) -> bool:
    """Let a message of Flower fill one line: a node chooses names in it, of up to 8 MiB."""
    record.msg, record.args = one_line(record.getMessage()[:LINE]), ()
    return True


async def _started(server: Any, task: asyncio.Task[None]) -> bool:
    for _ in range(int(STARTS / 0.05)):
        if server.started or task.done():
            break
        await asyncio.sleep(0.05)
    return bool(server.started)
