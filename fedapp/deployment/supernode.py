"""A SuperNode under a supervisor: Flower's own in this process, with its helper processes and a warm process.

Flower's SuperNode has four gaps that one supervisor closes:

- The first failure of the SuperLink ends its heartbeats for good, and the process lives on. Here they go on. Without an
  acknowledged one for `SILENT` seconds the node ends with code 1, so that it is started again, and before that its
  `/health` answers 503.
- The first refusal ends it with code 0. Here only a signal does.
- It does not notice that its executor has died. Here a helper that has died is started again.
- Every user of the machine may take its tasks from its local port. Here only an executor that knows a secret may, as at
  the server (:mod:`fedapp.deployment.executor`).

Every line of the node and its helpers gets the time, and loses colours and control characters (:class:`Log`).
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from fedapp.deployment.asgi import App, Receive, Scope, Send, answer
from fedapp.deployment.credentials import make_secrets_folder, write_secret
from fedapp.deployment.executor import check_flower, executor_command
from fedapp.deployment.forks import Forks, ForkServerUnavailable
from fedapp.engines import control
from fedapp.errors import BadRequest, plain
from fedapp.results.terminal import echo
from fedapp.tasks import claim
from fedapp.tasks.node import Node as Place

if TYPE_CHECKING:
    from flwr.supernode.cli.flower_supernode import SuperNodeLifespanConfig

POLL = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25"}
"""Seconds between two questions of Flower's executor whether a message has come; 1 by default."""
OFFLINE, SILENT = 60.0, 90.0
"""Seconds without an acknowledged heartbeat until the SuperLink takes a node for lost, and until the node ends."""
SECRETS = ".executor-"
"""Beginning of the name of the folder with the secrets of an executor, before the id of the node's process."""
LOOK, LONGEST = 1.0, 60.0
"""Seconds between two looks at the helpers, and the longest pause before one that dies again and again is started."""
_COLOUR, _GROUP = re.compile(rb"\x1b\[[0-9;]*m"), re.compile(rb"(ROUND \d+) \d+\]")


def serve(words: Sequence[str], cold: bool) -> int:
    """Run a SuperNode until it is told to stop.

    Parameters
    ----------
    words : options of `flower-supernode`.   cold : without a warm process.

    Returns
    -------
    0 if a signal ended it, else 1.

    Raises
    ------
    BadRequest : another minor version of Flower is installed, or the node has neither a key nor `--insecure`.
    """
    check_flower("fedapp supernode", "use flower-supernode")
    names = {word.partition("=")[0] for word in words}
    if not names & {"--auth-supernode-private-key", "--insecure", "--help", "-h", "--version", "-V"}:
        raise BadRequest("--auth-supernode-private-key is needed: give the node's key, which docker/keys.sh makes")
    os.umask(0o077)  # also for the copies of the app that each run brings, whose code the node executes
    os.environ.update({**POLL, **control.environment(), claim.SUPERVISED: "1"})
    sys.argv = ["flower-supernode", *words]
    flower: Any = importlib.import_module("flwr.supernode.cli.flower_supernode")
    config = flower._parse_supernode_lifespan_config()
    node, log = Node(config.node_config), Log()
    if config.isolation != "process":
        config.isolation, config.superexec_auth_secret = "process", secrets.token_bytes(32)
        node.warm(obstacle(words), cold)
        node.helpers.append(Executor(config, node.folder))
    flower._parse_supernode_lifespan_config = lambda: config
    node.watch()
    code = 1
    try:
        flower.flower_supernode()
        echo("fedapp supernode: the node ends, because the connection to the SuperLink broke", err=True)
    except SystemExit as e:
        code = int(bool(e.code))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    node.end()
    log.end()
    os._exit(code)  # Flower's HTTP server may go on in another thread


def obstacle(words: Sequence[str]) -> str:
    """Return why a SuperNode with these options cannot have a warm process, or an empty text."""
    return "each run installs libraries of its own" if "--allow-runtime-dependency-installation" in words else ""


class Executor:
    """Flower's executor, which starts a process for each message.

    Parameters
    ----------
    config : of Flower's SuperNode.   make_folder : makes a folder of this user alone, for the secrets.
    """

    name = "flower-superexec"

    def __init__(self, config: SuperNodeLifespanConfig, make_folder: Callable[[], Path]) -> None:
        self._config, self._make_folder = config, make_folder
        self._folder = Path()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it."""
        from flwr.supercore.address import resolve_bind_address

        self._folder, config = self._make_folder(), self._config
        secret = self._folder / "superexec.secret"
        assert config.superexec_auth_secret is not None
        write_secret(secret, config.superexec_auth_secret)
        host = f"[{config.host}]" if ":" in config.host else config.host
        ca = config.runtime_root_certificates_path
        options = ["--root-certificates", ca] if ca else ["--insecure"]
        if config.runtime_dependency_install:
            options.append("--allow-runtime-dependency-installation")
        command = executor_command(resolve_bind_address(f"{host}:{config.port}"), secret, *options)
        # In a session of its own Ctrl-C reaches the node alone, which then ends it.
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def end(self) -> None:
        """End it and remove its secrets."""
        if self.process is not None:
            with contextlib.suppress(OSError):
                self.process.terminate()
            shutil.rmtree(self._folder, ignore_errors=True)


class Node:
    """Watches the heartbeats and the helper processes of a SuperNode.

    Attributes
    ----------
    helpers : processes that are started again when they end; none where another program starts the messages.

    Parameters
    ----------
    about : its node-config.
    """

    def __init__(self, about: Mapping[str, Any]) -> None:
        self._running_of: Callable[[int], bool] = lambda run: True
        self.helpers: list[Forks | Executor] = []
        self._watching, self._ending = threading.Thread(target=self._watch, daemon=True), threading.Event()
        self._acknowledged: float | None = None  # when; None before the SuperLink knows the node
        self._began = time.monotonic()
        self._trouble = ""
        self._root: Path | None = None
        with contextlib.suppress(BadRequest):  # where the node-config is wrong, its messages say so
            self._root = Place.parse(about).state_root()

    def folder(self) -> Path:
        """Make a folder for secrets, among the states, for a cleaner of temporary files must not remove it.

        Folders of nodes that were killed are removed.
        """
        if self._root is None:
            return Path(tempfile.mkdtemp(prefix=SECRETS))
        for old in self._root.glob(f"{SECRETS}*"):
            number = old.name.removeprefix(SECRETS)
            if number.isdecimal() and not psutil.pid_exists(int(number)):
                shutil.rmtree(old, ignore_errors=True)
        folder = self._root / f"{SECRETS}{os.getpid()}"
        make_secrets_folder(folder)
        return folder

    def warm(self, reason: str, cold: bool) -> None:
        """Start a warm process, or say why there is none, unless none is wanted."""
        if cold:
            return
        try:
            if reason:
                raise ForkServerUnavailable(reason)
            forks = Forks(os.environ)
            os.environ["PATH"] = forks.path(os.environ["PATH"])
            self.helpers.append(forks)
        except ForkServerUnavailable as e:
            echo(f"fedapp supernode: the warm process cannot start, so messages start cold: {e}", err=True)

    def watch(self) -> None:
        """Replace Flower's calls of the SuperLink and its `/health`, and start the supervision."""
        calls: Any = importlib.import_module("flwr.supernode.fleet_http_client").FleetHttpClient
        main: Any = importlib.import_module("flwr.supernode.main")
        call, create = calls._unary_unary, main.create_app

        def called(client: Any, **named: Any) -> Any:
            answer = self.answered(named["path"], lambda: call(client, **named))
            if named["path"].endswith("/activate-node"):
                self._running_of = partial(running, client, answer.node_id)
            return answer

        calls._unary_unary = called
        main.create_app = lambda *args, **named: self.healthy(create(*args, **named))
        self._watching.start()

    def answered(self, path: str, call: Callable[[], Any]) -> Any:
        """Call the SuperLink. What it refuses, or fails in, is raised as a call that did not arrive.

        Flower tries such a call again. A refused one (401), as of a clock that is ahead, would end the node with code
        0, and a failed one (500) the heartbeats alone. A node that is not known yet ends with Flower's own words.
        """
        import httpx

        beat = path.endswith("/send-node-heartbeat")
        try:
            answer = call()
            if beat and not answer.success:
                raise ValueError("the SuperLink does not know this node")
        except Exception as e:
            status = e.response.status_code if isinstance(e, httpx.HTTPStatusError) else 0
            if self._acknowledged is None or not (beat or status == 401 or status >= 500):
                raise
            reason = plain(str(e).partition("\n")[0] or type(e).__name__)
            if not self._trouble:
                echo(f"fedapp supernode: a call is tried again: {reason}", err=True)
            self._trouble = reason
            raise httpx.ConnectError(reason) from e
        if beat or path.endswith("/activate-node"):
            if self._trouble:
                echo("fedapp supernode: heartbeats are acknowledged again", err=True)
            self._trouble, self._acknowledged = "", time.monotonic()
        return answer

    def silence(self) -> float:
        """Return the seconds since the last acknowledged heartbeat, or since the start."""
        return time.monotonic() - (self._began if self._acknowledged is None else self._acknowledged)

    def healthy(self, app: App) -> App:
        """Return an ASGI app that answers `/health` with 503 while the SuperLink takes the node for lost."""

        async def asked(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["path"] == "/health" and (silent := self.silence()) > OFFLINE:
                await answer(send, 503, f"no heartbeat was acknowledged for {silent:.0f} s")
            else:
                await app(scope, receive, send)

        return asked

    def _watch(self) -> None:
        """Supervise; a node that cannot be supervised ends, so that it is started again."""
        try:
            self._supervise()
        except Exception as e:  # such as a full disk
            self._give_up(f"its helpers cannot be started ({plain(f'{type(e).__name__}: {e}')})")

    def _supervise(self) -> None:
        """Start helpers that have died again; end the process where that cannot help."""
        pause, then = LOOK, time.monotonic()
        while not self._ending.is_set():
            # Before the node is known Flower itself tries without end, and ends with code 1 if it is refused.
            if self._acknowledged is not None and self.silence() > SILENT:
                self._give_up(f"no heartbeat was acknowledged for {SILENT:g} s ({self._trouble})")
            if time.monotonic() >= then:
                died = self._revive()
                pause = min(2 * pause, LONGEST) if died else max(LOOK, pause / 2)
                then = time.monotonic() + (pause if died else LOOK)
            if self._root is not None:
                with contextlib.suppress(OSError):  # a question that is not answered waits for the silence of the run
                    claim.settle(self._root, self._running_of)
            self._ending.wait(LOOK)

    def _revive(self) -> bool:
        """Start the helpers that do not run; return whether one had died."""
        died = False
        for helper in self.helpers:
            if helper.process is not None:
                if (code := helper.process.poll()) is None:
                    continue
                died = True
                echo(f"fedapp supernode: {helper.name} ended (code {code}) and is started again", err=True)
                helper.end()
            if not self._ending.is_set():
                helper.start()
        return died

    def _give_up(self, why: str) -> None:
        echo(f"fedapp supernode: {why}, so the node ends with code 1", err=True)
        self.end()
        time.sleep(LOOK)  # for the last lines
        os._exit(1)

    def end(self) -> None:
        """End the helpers."""
        self._ending.set()
        if threading.current_thread() is not self._watching:
            self._watching.join()  # it may be starting a helper
        for helper in self.helpers:
            helper.end()


def running(client: Any, node: int, run: int) -> bool:
    """Ask the SuperLink whether a run goes on. It refuses a question about one that has ended, or that it forgot (403).

    With any other answer, and with none, the run goes on.
    """
    import httpx
    from flwr.proto.node_pb2 import Node as About
    from flwr.proto.run_pb2 import GetRunRequest

    try:
        client.GetRun(GetRunRequest(node=About(node_id=node), run_id=run))
    except httpx.HTTPStatusError as e:
        return e.response.status_code != 403
    except httpx.TransportError:
        pass
    return True


class Log:
    """Writes what this process and its helpers print line by line, with the time and without colours.

    Flower's names of rounds hold a number for the server's gate after the round; it is left out.
    """

    def __init__(self) -> None:
        self._last = f"{secrets.token_hex(16)}\n".encode()
        self._out = os.dup(1)
        read, write = os.pipe()
        for file in (1, 2):
            os.dup2(write, file)
        os.close(write)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        self._thread = threading.Thread(target=self._copy, args=(read,), daemon=True)
        self._thread.start()

    def _copy(self, read: int) -> None:
        with os.fdopen(read, "rb") as lines:
            for line in lines:
                over, line = line.endswith(self._last), line.removesuffix(self._last)
                if over and not line:
                    return
                now = datetime.datetime.now(datetime.UTC)
                text = _GROUP.sub(rb"\1]", _COLOUR.sub(b"", line)).decode(errors="replace").rstrip("\n")
                with contextlib.suppress(OSError):
                    os.write(self._out, f"{now:%Y-%m-%dT%H:%M:%SZ} {plain(text, whole=True)}\n".encode())
                if over:
                    return

    def end(self) -> None:
        """Wait until all lines are written."""
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(1, self._last)
        self._thread.join(2.0)
