"""Run the app on a private simulation SuperLink, follow the run, and leave nothing behind.

A shared local SuperLink keeps the folder and the environment of the shell that started it and installs dependencies
again for each run, and ``flwr run --stream`` reports success for runs that failed. :class:`Session` avoids all three.
It starts a SuperLink for simulation on a free loopback port, with its own Flower home and with a small copy of the app
as its working directory. It submits runs one at a time, follows the files that the ServerApp writes, and stops every
process that it caused when the ``with`` block ends, however it ends.

The ServerApp writes these files into the run directory:

- ``progress.jsonl``: one JSON object per line and event; a line without its newline is not read yet;
- ``summary.json``: written last, with ``"ok": true`` if every round was good;
- ``error.json``: on failure, with ``client``, ``round``, ``stage``, ``message``, ``traceback``.

This module knows nothing of methods, models or data. Without ``RAY_ADDRESS`` (or with ``RAY_ADDRESS=local``) Ray starts
on this machine, inside the session's temporary folder, and joins no other cluster. With it the variable reaches the
simulation, whose backend calls ``ray.init`` without an address, so that Ray takes it from the environment;
``docs/simulation.md`` says what a cluster needs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import tomli_w

from fedapp.engines import control, supervise
from fedapp.engines.control import Control, LaunchError, stage
from fedapp.engines.resources import cluster_address
from fedapp.errors import BadRequest, plain
from fedapp.results import lines

CONNECTION = "fedapp"
"""Name of the connection in the session's private Flower configuration."""

PROGRESS_FILE = "progress.jsonl"
SUMMARY_FILE = "summary.json"
ERROR_FILE = "error.json"

SUPERLINK_STARTS = 60.0
"""Seconds until the SuperLink, or Ray, must answer."""
SIMULATION_STARTS = 120.0
"""Seconds until the simulation must have appeared as a process."""
SIMULATION_ENDS = 60.0
"""Seconds that the simulation may take to end once its results are written; then it is stopped."""

LONG_FOLDER = 45
"""Characters of a folder for temporary files from which on Ray's sockets have no valid names."""

Scalar = bool | int | float | str


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes
    ----------
    status, details : Flower's words (``finished:completed``, ``finished:failed``, ``finished:stopped``), or ``lost``
        when the SuperLink or the simulation is gone. They describe the machinery; only `ok` says whether the run is
        good.
    error : content of ``error.json``.
    log_tail : first error and last lines of the log, if the run failed without ``error.json``.
    """

    status: str
    details: str
    ok: bool
    error: dict[str, Any] | None = None
    log_tail: str = ""

    def report(self, say: Callable[[str], object]) -> int:
        """Return the exit code: 0 for a good run, else 1 after saying why it failed.

        Raises
        ------
        BadRequest : the server refused the run before training.
        """
        if self.ok:
            return 0
        error = self.error or {}
        if error.get("exit") == 2:
            raise BadRequest(str(error["message"]))
        if error:
            say(plain(lines.failed(error), whole=True))
        else:
            say(plain(f"the run failed: {self.status}: {self.details}\n{self.log_tail}", whole=True))
        return 1


class Session:
    """One private simulation SuperLink, for as long as a ``with`` block lasts.

    Starting it takes two or three seconds; several runs in sequence share it. Inside the block SIGTERM and SIGHUP raise
    ``KeyboardInterrupt`` in the main thread, so that every end passes through the same clean-up: all processes that
    descend from the SuperLink are stopped, and none may be left. If this process is killed, a small guard process does
    the same.

    Parameters
    ----------
    app : app folder to submit; None = a fresh copy of this project (:func:`stage`).
    log : file that the SuperLink and everything below it append to. None = inside the session's temporary folder,
        which is removed at the end.
    ray_cpus : CPUs of one Ray that is started next to the SuperLink for all runs of the session; each run then starts
        sooner. None = each run starts its own Ray. Without effect where ``RAY_ADDRESS`` names a
        cluster.

    Raises
    ------
    LaunchError : the SuperLink does not come up (with the end of its log), or processes survive the clean-up.
    """

    def __init__(self, *, app: Path | None = None, log: Path | None = None, ray_cpus: int | None = None) -> None:
        self._given_app = app
        self._given_log = log
        self._ray_cpus = None if cluster_address() else ray_cpus
        self._ray_port = 0
        self._ray: subprocess.Popen[bytes] | None = None
        self._mark = uuid.uuid4().hex
        self._superlink: subprocess.Popen[bytes] | None = None
        self._processes = supervise.SessionProcesses(self._mark)
        self._guard: supervise.Guard | None = None
        self._signals = contextlib.ExitStack()
        self._active: RunHandle | None = None
        self.port = 0
        self.home = Path()
        self.app = Path()
        self.log_path = Path()

    # Start and end

    def __enter__(self) -> Session:
        self._signals.enter_context(supervise.handle_signals(supervise.interrupt, "SIGTERM", "SIGHUP"))
        try:
            self.home = Path(tempfile.mkdtemp(prefix="fedapp-", dir=_short_folder()))
            self.app = self._given_app.resolve() if self._given_app is not None else stage(self.home / "app")
            self.log_path = (self._given_log or self.home / "superlink.log").resolve()
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            self._guard = supervise.Guard(self._mark, self.home)
            if self._ray_cpus is not None:
                self._ray_port = _free_port()
                self._start_ray()
            self._start()
        except BaseException as error:
            self._close(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        # A second Ctrl-C must not break off the clean-up, which takes seconds at most.
        with supervise.handle_signals(signal.SIG_IGN, "SIGINT", "SIGTERM", "SIGHUP"):
            left = self._processes.stop()
            self._active = None
            if self._guard is not None:
                self._guard.dismiss()
            for child in (self._superlink, self._ray):
                supervise.reap(child)
            if self.home != Path():
                shutil.rmtree(self.home, ignore_errors=True)
        self._signals.close()
        if left:
            message = "these processes could not be stopped: " + ", ".join(str(process.pid) for process in left)
            if error is None:
                raise LaunchError(message)
            error.add_note(message)

    def _start(self) -> None:
        began = self._log_size()
        for _ in range(3):
            self.port = _free_port()
            connection = {"address": f"127.0.0.1:{self.port}", "insecure": True}
            config = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
            (self.home / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
            options = f"--simulation --insecure --isolation subprocess --host 127.0.0.1 --port {self.port}"
            self._superlink = self._spawn(
                "flower-superlink", "--disable-runtime-dependency-installation", *options.split()
            )
            if self._healthy():
                return
            # Another process may have taken the free port in between; try again with a new one.
            self._processes.stop(keep=_RAY)
        raise LaunchError(
            f"the SuperLink did not come up within {SUPERLINK_STARTS:g} s; its log:\n" + _tail(self.log_path, began)
        )

    def _start_ray(self) -> None:
        """Start the Ray of all runs without waiting for it; it comes up while the SuperLink and the first run do."""
        # By ray.init, as the simulation would; "ray start" adds a server on a fixed port that is not needed here.
        own = {"RAY_ADDRESS": "local", "RAY_GCS_SERVER_PORT": str(self._ray_port)}
        self._ray = self._spawn(sys.executable, "-c", _RAY_HOLDER, "fedapp-ray", str(self._ray_cpus), env=own)

    def _ensure_ray(self) -> None:
        """Wait until Ray accepts connections; start it again if it died with an earlier run."""
        began = self._log_size()
        for _ in range(2):
            assert self._ray is not None
            deadline = time.monotonic() + SUPERLINK_STARTS
            while time.monotonic() < deadline and self._ray.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._ray_port), timeout=1):
                    return
                time.sleep(0.05)
            self._processes.stop(keep=_FLOWER)
            # On the same port: the SuperLink's environment names it to the simulations.
            self._start_ray()
        raise LaunchError("Ray did not come up; the log:\n" + _tail(self.log_path, began))

    def _log_size(self) -> int:
        """Return where the next line will stand in the log, which many runs may share."""
        return self.log_path.stat().st_size if self.log_path.exists() else 0

    def _spawn(self, name: str, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        env = self._environment() | dict(env or {})
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                [control.executable(name, env["PATH"]), *arguments],
                cwd=self.app,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Its own session: Ctrl-C in the terminal reaches this process only, which then stops it in order.
                start_new_session=True,
            )

    def _healthy(self) -> bool:
        assert self._superlink is not None
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        deadline = time.monotonic() + SUPERLINK_STARTS
        while time.monotonic() < deadline and self._superlink.poll() is None:
            with (
                contextlib.suppress(urllib.error.URLError, OSError),
                opener.open(f"http://127.0.0.1:{self.port}/health", timeout=2) as reply,
            ):
                if reply.status == 200 and self._superlink.poll() is None:
                    return True
            time.sleep(0.05)
        return False

    def _environment(self) -> dict[str, str]:
        env = control.environment()
        # Relative and empty entries would mean another folder below the SuperLink than here.
        path = [str(Path(entry).absolute()) for entry in env.pop("PYTHONPATH", "").split(os.pathsep) if entry]
        if path:
            env["PYTHONPATH"] = os.pathsep.join(path)
        if importlib.util.find_spec("socksio") is None:
            # Flower's programs fail with a SOCKS proxy even for calls on this machine, which are all that they make.
            env = {n: v for n, v in env.items() if not (n.lower().endswith("_proxy") and v.lower().startswith("socks"))}
        for name in ("NO_PROXY", "no_proxy"):
            env[name] = ",".join(filter(None, [env.get(name), "127.0.0.1", "localhost"]))
        env |= {
            supervise.MARKER: self._mark,
            "FLWR_HOME": str(self.home),
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONUNBUFFERED": "1",
        }
        # A look for new runs costs two processes 10 ms together, also while the clients need the cores.
        env.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "1")
        if not cluster_address():
            env["RAY_ADDRESS"] = f"127.0.0.1:{self._ray_port}" if self._ray_port else "local"
            # Workers that start before a job states its needs are never used by it.
            env.setdefault("RAY_prestart_worker_first_driver", "0")
            # Ray listens on all interfaces, not on loopback alone; the token keeps others out.
            env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._mark}
            # Unix socket paths end at about 100 characters; Ray appends about 70 to this folder.
            if len(str(self.home)) < 36:
                env["RAY_TMPDIR"] = str(self.home)
        return env

    # Runs

    def submit(
        self,
        run_config: Mapping[str, Scalar],
        *,
        num_supernodes: int,
        client_cpus: int = 1,
        client_gpus: float = 0.0,
        total_cpus: int | None = None,
    ) -> RunHandle:
        """Submit one run.

        Parameters
        ----------
        run_config : overrides of the app's run-config; keys may contain dots and hyphens. ``out`` is the run directory
            that the ServerApp writes to.
        num_supernodes : number of virtual clients.
        client_cpus, client_gpus : resources of one virtual client.
        total_cpus : CPUs that Ray may use; None = all. Not sent to a Ray cluster, which has its own.

        Raises
        ------
        BadRequest : Flower refuses the run-config, such as a key that the app does not declare.
        LaunchError : the SuperLink cannot be reached, or the session's previous run has not ended. Two runs at a time
            would each claim all cores.
        """
        if self._active is not None:
            raise LaunchError(f"run {self._active.run_id} has not ended yet: follow it before the next one")
        federation = {
            "num-supernodes": num_supernodes,
            "client-resources-num-cpus": client_cpus,
            "client-resources-num-gpus": float(client_gpus),
        }
        if self._ray_cpus is not None:
            if total_cpus not in (None, self._ray_cpus):
                raise LaunchError(f"this session's Ray has {self._ray_cpus} CPUs, not {total_cpus}")
            self._ensure_ray()
        elif total_cpus is not None and not cluster_address():
            federation["init-args-num-cpus"] = total_cpus
        log_start = self._log_size()
        out = Path(str(run_config["out"]))
        progress = EventReader(out / PROGRESS_FILE)
        submitted = time.time_ns()
        with Control.of_port(self.port) as api:
            run_id = api.start(self.app, run_config, federation)
        self._active = RunHandle(self, run_id, out, progress, submitted, log_start)
        return self._active

    def _clear_run(self) -> None:
        """Stop what a run left: Ray's helpers may outlive it by minutes, and the next run must have the machine."""
        self._processes.stop(keep=_FLOWER if self._ray_cpus is None else _FLOWER + _RAY, grace=0.3)
        self._active = None


class RunHandle:
    """A submitted run; made by :meth:`Session.submit`."""

    def __init__(
        self, session: Session, run_id: int, out: Path, progress: EventReader, submitted: int, log_start: int
    ) -> None:
        self.run_id = run_id
        self._session = session
        self._out = out
        self._progress = progress
        self._submitted = submitted
        self._log_start = log_start

    def follow(self, on_event: Callable[[dict[str, Any]], None], poll: float = 0.2) -> Outcome:
        """Follow the run to its end; afterwards no process of the run is left.

        What was in the run directory before the submission belongs to another run.

        Parameters
        ----------
        on_event : called with each event of ``progress.jsonl``, in order; an exception of it ends the following.
        poll : seconds between two looks.
        """
        out, progress = self._out, self._progress
        ended = threading.Event()
        log = self._session.log_path
        with Control.of_port(self._session.port) as api, log.open("a", encoding="utf-8", buffering=1) as file:
            # The simulation prints to the SuperLink only.
            copier = api.read_log(self.run_id, file.write, ended)
            try:
                status, details = self._watch(api, out, lambda: progress.read(on_event), poll)
                copier.join(timeout=2.0)
            finally:
                ended.set()
        self._session._clear_run()
        progress.read(on_event)
        summary = _newer_json(out / SUMMARY_FILE, self._submitted)
        error = _newer_json(out / ERROR_FILE, self._submitted)
        ok = bool(summary and summary.get("ok") is True and error is None)
        return Outcome(status, details, ok, error, "" if ok or error else _tail(log, self._log_start))

    def _watch(self, api: Control, out: Path, progress: Callable[[], int], poll: float) -> tuple[str, str]:
        """Wait until Flower calls the run finished, or until no process is left that could."""
        began = time.monotonic()
        asked = searched = float("-inf")
        written: float | None = None  # when the results were first seen
        gone: float | None = None  # when the simulation was first missed
        simulation: psutil.Process | None = None
        status, details = "pending", ""
        while True:
            if progress():
                written = None  # it is still at work
            now = time.monotonic()
            superlink = self._session._superlink
            if superlink is None or superlink.poll() is not None:
                return "lost", "the SuperLink ended during the run"
            if simulation is None or now - searched > 5:
                searched = now
                processes = self._session._processes.alive()
                if simulation is None:
                    simulation = next((p for p in processes if supervise.runs(p, "flwr-simulation")), None)
            if simulation is None and now - began > SIMULATION_STARTS:
                return "lost", f"the simulation did not start within {SIMULATION_STARTS:g} s"
            if written is None and any(_newer(out / name, self._submitted) for name in (SUMMARY_FILE, ERROR_FILE)):
                written = now
            if gone is None and simulation is not None and not supervise.is_alive(simulation):
                gone = now
            # A request costs the SuperLink little, but not nothing: frequent only near the end.
            if now - asked > (0.1 if gone is not None or written is not None else 2.0):
                asked = now
                status, details = api.status(self.run_id)
                if status.startswith("finished"):
                    return status, details
            if gone is not None and now - gone > 1.5:
                return "lost", "the simulation's process was killed or crashed; the main memory may have run out"
            if written is not None and now - written > SIMULATION_ENDS:
                return status, f"still {status} {SIMULATION_ENDS:g} s after its results were written; stopped"
            time.sleep(poll)


class EventReader:
    """Reads lines that are appended to a file of JSON lines from now on.

    A resumed run appends to its predecessor's file, so earlier lines are skipped.

    Parameters
    ----------
    path : the file; it need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        with contextlib.suppress(FileNotFoundError):
            self._position = path.stat().st_size

    def read(self, on_event: Callable[[dict[str, Any]], None]) -> int:
        """Hand over the complete lines that were added; return their number."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._position:
                    self._position = 0
                file.seek(self._position)
                lines = file.read()
        except FileNotFoundError:
            return 0
        count = 0
        for line in lines[: lines.rfind(b"\n") + 1].splitlines(keepends=True):
            self._position += len(line)
            if line.strip():
                try:
                    event = json.loads(line)
                except ValueError as error:
                    raise LaunchError(f"{self._path} holds a line that is not a JSON object: {line!r}") from error
                on_event(event)
                count += 1
        return count


def _short_folder() -> str | None:
    """Return a folder for temporary files in which Ray's sockets have valid names; None = the usual one (TMPDIR).

    Ray appends about 60 characters to it, and the path of a Unix socket ends at 107.
    """
    usual = tempfile.gettempdir()
    if len(usual) < LONG_FOLDER:
        return None
    if not os.access("/tmp", os.W_OK | os.X_OK):
        raise BadRequest(
            f"the folder for temporary files has a path of {len(usual)} characters ({usual}), and Ray's sockets there "
            f"would have no valid names: set TMPDIR to a folder with less than {LONG_FOLDER}, or use --engine local"
        )
    return "/tmp"


COLOUR = re.compile(r"\x1b\[[0-9;]*m")
"""Colours in Flower's log."""
_FLOWER = ("flower-superlink", "flower-superexec")
_RAY = (
    "fedapp-ray",
    "gcs_server",
    "raylet",
    "monitor.py",
    "log_monitor.py",
    "dashboard.py",
    # Ray's node dies with either of these two, which take their titles only after their first seconds.
    "dashboard/agent.py",
    "ray::DashboardAgent",
    "runtime_env/agent/main.py",
    "ray::RuntimeEnvAgent",
)

# Its first argument is the name by which this process is recognised. It ends at once when Ray's node does: the rest of
# Ray would still accept connections, and fail every run.
_RAY_HOLDER = """\
import os, sys, ray, psutil
ray.init(num_cpus=int(sys.argv[2]), include_dashboard=False, log_to_driver=False)
[raylet] = [child for child in psutil.Process().children() if child.name() == "raylet"]
raylet.wait()
os._exit(1)
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _newer(path: Path, since: int) -> bool:
    try:
        return path.stat().st_mtime_ns >= since
    except OSError:
        return False


def _newer_json(path: Path, since: int) -> dict[str, Any] | None:
    if not _newer(path, since):
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        return {"ok": False, "message": f"{path} cannot be read: {error}"}
    return content if isinstance(content, dict) else {"ok": False, "message": f"{path} is not a JSON object"}


def _tail(path: Path, start: int, lines: int = 60, head: int = 20) -> str:
    """Return the end of a log from byte ``start`` on, without the lines about web requests.

    The first error usually causes the later ones; it stands before the end where it lies further back.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            text = COLOUR.sub("", file.read().decode("utf-8", errors="replace"))
    except OSError:
        return ""
    noise = ('"POST /', '"GET /', "ControlServicer.ListRuns")
    kept = [line for line in text.splitlines() if not any(word in line for word in noise)]
    earlier, end = kept[:-lines], kept[-lines:]
    first = next((i for i, line in enumerate(earlier) if line.startswith(("ERROR", "Traceback"))), None)
    if first is not None:
        end = [*earlier[first : first + head], "...", *end]
    return "\n".join(end)
