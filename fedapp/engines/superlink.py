"""Run the app on a simulation SuperLink of its own, follow the run, and leave nothing behind.

A shared local SuperLink inherits the folder and the environment of whoever started it first, installs dependencies
anew for each run, and ``flwr run --stream`` reports success for runs that failed. :class:`Session` avoids all three:
it starts one private SuperLink for simulation on a free loopback port, with its own Flower home and a small copy of
the app as its working directory, submits runs to it one at a time, follows the files that the ServerApp writes, and
stops every process it caused when the ``with`` block ends, however it ends.

What the ServerApp has to do to be followed (all in the run directory):

- append one JSON object per line to ``progress.jsonl`` (an event; lines without their newline are left until complete),
- write ``summary.json`` last, with ``"ok": true`` when every round was good,
- on failure write ``error.json``: ``client``, ``server_round``, ``stage``, ``message``, ``traceback``.

The module knows nothing of methods, models or data.

Ray clusters
------------
Without ``RAY_ADDRESS`` (or with ``RAY_ADDRESS=local``) each run starts Ray in this machine,
inside the session's temporary folder; a cluster that somebody else started here is not joined by accident. With
``RAY_ADDRESS`` set (``host:port``, or ``auto`` for the cluster of this machine) the variable reaches the simulation,
whose backend calls ``ray.init`` without an address, so Ray takes it from the environment. Three consequences: Ray
refuses CPU totals for a cluster that exists, so none is sent; the virtual clients live on the cluster's machines,
which need this project installed in the same Python (Ray hands them the driver's module path, which exists on this
machine and on shared storage only); and data, results and client state must lie on storage that all of them see,
named by absolute paths.

What users need to know stands in ``docs/simulation.md``.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import tomllib
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import tomli_w

from fedapp.engines.resources import cluster_address
from fedapp.engines.supervise import _GUARD, _MARKER, _alive, _Family, _interrupt, _runs, _shielded
from fedapp.errors import BadRequest

PACKAGES = ("fedapp", "strategies", "clients")
"""Importable packages that make up the app."""

BUNDLED_SUFFIXES = (".py", ".toml", ".md", ".yaml", ".yml", ".json")
"""File types that a Flower App Bundle carries; nothing else is staged."""

CONNECTION = "fedapp"
"""Name of the connection in the session's private Flower configuration."""

PROGRESS_FILE = "progress.jsonl"
SUMMARY_FILE = "summary.json"
ERROR_FILE = "error.json"


Scalar = bool | int | float | str


class LaunchError(RuntimeError):
    """The simulation could not be started, or could not be stopped; not the fault of the request."""


def stage(dest: Path) -> Path:
    """Copy the app into a small folder, so that bundling it never walks an environment or a data folder.

    Parameters
    ----------
    dest : Path
        Folder to fill; made if it does not exist.

    Returns
    -------
    Path
        ``dest``, with the packages of :data:`PACKAGES` and ``pyproject.toml``. The bundle's include and exclude
        patterns are left out of that file: Flower refuses patterns that match nothing, and the copy holds nothing to
        exclude.

    Raises
    ------
    BadRequest
        A package or the project file is missing from the installation; the message names it and says how to install.
    """
    home = _package_folder("fedapp").parent
    project = tomllib.loads(_project_file(home).read_text(encoding="utf-8"))
    for key in ("fab-include", "fab-exclude"):
        project["tool"]["flwr"]["app"].pop(key, None)
    dest.mkdir(parents=True, exist_ok=True)
    for name in PACKAGES:
        # The three travel together: a folder of the same common name elsewhere on the path must not take a place here.
        source = home / name if (home / name / "__init__.py").is_file() else _package_folder(name)
        shutil.copytree(source, dest / name, ignore=_not_bundled, dirs_exist_ok=True)
    (dest / "pyproject.toml").write_text(tomli_w.dumps(project), encoding="utf-8")
    return dest


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise BadRequest(
            f"package '{name}' is not installed: pip install -e . in the project folder, or install its wheel"
        )
    return Path(places[0])


def _project_file(home: Path) -> Path:
    candidates = (home / "pyproject.toml", home / "fedapp" / "_pyproject.toml")
    for path in candidates:
        if path.is_file():
            content = tomllib.loads(path.read_text(encoding="utf-8"))
            if content.get("project", {}).get("name") == "fedapp" and "app" in content.get("tool", {}).get("flwr", {}):
                return path
    places = " nor ".join(map(str, candidates))
    raise BadRequest(
        f"the app's project file is missing: neither {places}; install with pip install -e . or from a wheel"
    )


def _not_bundled(folder: str, names: list[str]) -> set[str]:
    """Name what is not copied: caches, and whatever Flower would not bundle."""
    return {
        name
        for name in names
        if name in ("__pycache__", "_pyproject.toml")
        or not ((Path(folder) / name).is_dir() or name.endswith(BUNDLED_SUFFIXES))
    }


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    ``status`` and ``details`` are Flower's words (``finished:completed``, ``finished:failed``, ``finished:stopped``),
    or ``lost`` when the SuperLink or the simulation died without a word. They say whether the machinery ended well;
    only ``ok`` says whether the run did.
    """

    status: str
    details: str
    ok: bool
    error: dict[str, Any] | None = None
    log_tail: str = ""
    """First error and last lines of the SuperLink's log for this run, if it ended badly and left no ``error.json``."""

    @property
    def exit_code(self) -> int:
        """0 when the run was good, else 1."""
        return 0 if self.ok else 1


class Session:
    """One private simulation SuperLink, for as long as a ``with`` block lasts.

    Starting it takes two or three seconds; several runs in sequence share it. While the block lasts SIGTERM and
    SIGHUP raise ``KeyboardInterrupt`` in the main thread, so that every end passes through the same clean-up: all
    processes that descend from the SuperLink are stopped and it is verified that none is left. Should this process be
    killed outright, a small guard process does the same.

    Parameters
    ----------
    app : Path or None
        App folder to submit; None = a fresh copy of this project (:func:`stage`).
    log : Path or None
        File that the SuperLink and everything below it write to; appended. None = inside the session's temporary
        folder, which is removed at the end.
    ray_cpus : int or None
        Start Ray once for all runs of the session, with this many CPUs, beside the SuperLink; each run then starts
        about five seconds sooner. None = each run starts its own Ray. Without effect where ``RAY_ADDRESS`` names a
        cluster.
    env : mapping or None
        Further environment variables for the SuperLink and all below it.
    start_timeout : float
        Seconds to wait until the SuperLink answers.

    Raises
    ------
    LaunchError
        The SuperLink does not come up (with the end of its log), or processes survive the clean-up.
    """

    def __init__(
        self,
        *,
        app: Path | None = None,
        log: Path | None = None,
        ray_cpus: int | None = None,
        env: Mapping[str, str] | None = None,
        start_timeout: float = 60.0,
    ) -> None:
        self._given_app = app
        self._given_log = log
        self._given_env = dict(env or {})
        self._ray_cpus = None if cluster_address() else ray_cpus
        self._ray_port = 0
        self._ray: subprocess.Popen[bytes] | None = None
        self._start_timeout = start_timeout
        self._mark = uuid.uuid4().hex
        self._superlink: subprocess.Popen[bytes] | None = None
        self._family = _Family(self._mark)
        self._guard: subprocess.Popen[bytes] | None = None
        self._active: RunHandle | None = None
        self._runs = 0
        self._handlers: dict[signal.Signals, Any] = {}
        self.port = 0
        self.home = Path()
        self.app = Path()
        self.log_path = Path()

    # Life

    def __enter__(self) -> Session:
        self._trap_signals()
        try:
            self.home = Path(tempfile.mkdtemp(prefix="fedapp-"))
            self.app = self._given_app.resolve() if self._given_app is not None else stage(self.home / "app")
            self.log_path = (self._given_log or self.home / "superlink.log").resolve()
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            self._station_guard()
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

    def _start(self) -> None:
        attempts = 3
        began = self._log_size()
        for attempt in range(1, attempts + 1):
            self.port = _free_port()
            self._write_config()
            self._superlink = self._spawn(
                "flower-superlink",
                "--simulation",
                "--insecure",
                "--disable-runtime-dependency-installation",
                *("--isolation", "subprocess"),
                *("--host", "127.0.0.1"),
                *("--port", str(self.port)),
            )
            if self._healthy():
                return
            # The free port may have been taken between asking for it and using it; a new one is tried.
            self._family.stop(keep=_RAY)
            if attempt == attempts:
                raise LaunchError(
                    f"the SuperLink did not come up within {self._start_timeout:g} s; its log:\n"
                    + _tail(self.log_path, began)
                )

    def _start_ray(self) -> None:
        """Start the Ray of all runs without waiting for it; it comes up while the SuperLink and the first run do."""
        # Through ray.init, as the simulation would; "ray start" adds a server on a fixed port that nobody here needs.
        self._ray = self._spawn(
            sys.executable,
            "-c",
            _RAY_HOLDER,
            "fedapp-ray",
            str(self._ray_cpus),
            env={"RAY_ADDRESS": "local", "RAY_GCS_SERVER_PORT": str(self._ray_port)},
        )

    def _ensure_ray(self) -> None:
        """Wait until Ray takes connections; start it anew if it died with an earlier run."""
        began = self._log_size()
        for _ in range(2):
            assert self._ray is not None
            deadline = time.monotonic() + self._start_timeout
            while time.monotonic() < deadline and self._ray.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._ray_port), timeout=1):
                    return
                time.sleep(0.05)
            self._family.stop(keep=_FLOWER)
            # On the same port: the simulations look for Ray where the SuperLink's environment says.
            self._start_ray()
        raise LaunchError("Ray did not come up; the log:\n" + _tail(self.log_path, began))

    def _log_size(self) -> int:
        """Return where in the log, which many runs may share, what comes next will stand."""
        return self.log_path.stat().st_size if self.log_path.exists() else 0

    def _spawn(self, name: str, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        env = self._environment() | dict(env or {})
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                [_executable(name, env["PATH"]), *arguments],
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
        deadline = time.monotonic() + self._start_timeout
        while time.monotonic() < deadline and self._superlink.poll() is None:
            with (
                contextlib.suppress(urllib.error.URLError, OSError),
                opener.open(f"http://127.0.0.1:{self.port}/health", timeout=2) as reply,
            ):
                if reply.status == 200 and self._superlink.poll() is None:
                    return True
            time.sleep(0.05)
        return False

    def _write_config(self) -> None:
        config = {
            "superlink": {"default": CONNECTION, CONNECTION: {"address": f"127.0.0.1:{self.port}", "insecure": True}}
        }
        (self.home / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")

    def _environment(self) -> dict[str, str]:
        env = dict(os.environ)
        scripts = [str(Path(sys.executable).parent), sysconfig.get_path("scripts")]
        # The SuperLink starts its helpers by bare name.
        env["PATH"] = os.pathsep.join([*dict.fromkeys(scripts), env.get("PATH", os.defpath)])
        # Relative and empty entries would mean another folder below the SuperLink than they mean here.
        path = [str(Path(entry).absolute()) for entry in env.pop("PYTHONPATH", "").split(os.pathsep) if entry]
        if path:
            env["PYTHONPATH"] = os.pathsep.join(path)
        for name in ("NO_PROXY", "no_proxy"):
            env[name] = ",".join(filter(None, [env.get(name), "127.0.0.1", "localhost"]))
        env |= {
            _MARKER: self._mark,
            "FLWR_HOME": str(self.home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONUNBUFFERED": "1",
        }
        env.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.25")
        if not cluster_address():
            env["RAY_ADDRESS"] = f"127.0.0.1:{self._ray_port}" if self._ray_port else "local"
            # Workers started before a job says what it needs are never used by it.
            env.setdefault("RAY_prestart_worker_first_driver", "0")
            # Ray listens on all interfaces, not on loopback alone; the token keeps others out.
            env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._mark}
            # Unix socket paths end at about 100 characters; Ray appends about 70 to this folder.
            if len(str(self.home)) < 36:
                env["RAY_TMPDIR"] = str(self.home)
        return env | self._given_env

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
        run_config : mapping
            Overrides of the app's run configuration; keys may contain dots and hyphens.
        num_supernodes : int
            Number of virtual clients.
        client_cpus, client_gpus : int, float
            Resources of one virtual client.
        total_cpus : int or None
            CPUs that Ray may use; None = all. Not sent to a Ray cluster, which has its own.

        Returns
        -------
        RunHandle

        Raises
        ------
        BadRequest
            The app does not declare a key (the message has a suggestion), or Flower refuses the configuration.
        LaunchError
            The SuperLink cannot be reached, or another run of this session has not been followed to its end: two at a
            time would each believe that all cores are theirs.
        """
        if self._active is not None:
            raise LaunchError(f"run {self._active.run_id} has not ended yet: follow or stop it before the next one")
        self._check_keys(run_config)
        self._runs += 1
        config = self.home / f"run-{self._runs}.toml"
        config.write_text(tomli_w.dumps(dict(run_config)), encoding="utf-8")
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
        submitted = time.time_ns()
        reply = self._flwr(
            "run",
            str(self.app),
            CONNECTION,
            "--run-config",
            str(config),
            "--federation-config",
            " ".join(f"{key}={value}" for key, value in federation.items()),
            "--format",
            "json",
        )
        handle = RunHandle(self, int(reply["run-id"]), submitted, log_start)
        self._active = handle
        return handle

    def _check_keys(self, run_config: Mapping[str, Scalar]) -> None:
        """Refuse keys that the app does not declare; Flower would too, but without naming them."""
        project = tomllib.loads((self.app / "pyproject.toml").read_text(encoding="utf-8"))
        declared = _flat_keys(project["tool"]["flwr"]["app"].get("config", {}))
        for key in run_config:
            if key not in declared:
                near = difflib.get_close_matches(key, declared, n=1)
                hint = f"; did you mean '{near[0]}'?" if near else f"; there are: {', '.join(sorted(declared))}"
                raise BadRequest(f"unknown run-config key '{key}'{hint}")

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        """Call Flower's command line and return the JSON object that it prints."""
        env = self._environment()
        command = [_executable("flwr", env["PATH"]), *arguments]
        try:
            done = subprocess.run(
                command, cwd=self.home, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
            )
        except subprocess.TimeoutExpired as error:
            raise LaunchError(f"flwr {arguments[0]} did not answer within 120 s") from error
        try:
            reply: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
        except ValueError:
            raise LaunchError(f"flwr {arguments[0]} failed:\n{(done.stderr or done.stdout).strip()}") from None
        if not reply.get("success"):
            message = str(reply.get("error-message", "")).strip() or done.stderr.strip()
            refused = "Invalid run configuration" in message or "[code: 15]" in message
            raise (BadRequest if refused else LaunchError)(f"flwr {arguments[0]}: {message}")
        return reply

    def _clear_run(self) -> None:
        """Stop what a run left; Ray's helpers may outlive it by minutes, and the next run must have the machine."""
        self._family.stop(keep=_FLOWER if self._ray_cpus is None else _FLOWER + _RAY, grace=0.3)
        self._active = None

    def _close(self, error: BaseException | None) -> None:
        with _shielded():
            left = self._family.stop()
            self._active = None
            self._dismiss()
            if self.home != Path():
                shutil.rmtree(self.home, ignore_errors=True)
        self._restore_signals()
        if left:
            message = "these processes could not be stopped: " + ", ".join(str(process.pid) for process in left)
            if error is None:
                raise LaunchError(message)
            error.add_note(message)

    def _station_guard(self) -> None:
        """Start the small process that cleans up should this one be killed outright."""
        self._guard = subprocess.Popen(
            [sys.executable, "-c", _GUARD, str(Path(__file__).parents[2]), self._mark, str(self.home)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _dismiss(self) -> None:
        """Send the guard home, and take leave of the children that were stopped."""
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.write(b"done")
            with contextlib.suppress(OSError):
                self._guard.stdin.close()
        for child in (self._guard, self._superlink, self._ray):
            if child is not None:
                try:
                    child.wait(timeout=5)
                except subprocess.TimeoutExpired:
                    child.kill()

    def _trap_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            # A hang-up that is ignored (nohup) stays ignored.
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, _interrupt)

    def _restore_signals(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()


class RunHandle:
    """A submitted run; made by :meth:`Session.submit`."""

    def __init__(self, session: Session, run_id: int, submitted: int, log_start: int) -> None:
        self.run_id = run_id
        self._session = session
        self._submitted = submitted
        self._log_start = log_start

    def follow(
        self,
        out: Path,
        on_event: Callable[[dict[str, Any]], None],
        poll: float = 0.2,
        *,
        start_timeout: float = 120.0,
        end_timeout: float = 60.0,
    ) -> Outcome:
        """Follow the run to its end.

        Parameters
        ----------
        out : Path
            Run directory that the ServerApp writes to. Files that are older than the submission are another run's.
        on_event : callable
            Called with each event of ``progress.jsonl``, in order; what it raises ends the following.
        poll : float
            Seconds between two looks.
        start_timeout : float
            Seconds that the simulation may take to appear as a process.
        end_timeout : float
            Seconds that it may take to end once ``summary.json`` or ``error.json`` is there; then it is stopped.

        Returns
        -------
        Outcome
            When it is returned no process of the run is left.
        """
        progress = _Events(out / PROGRESS_FILE, self._submitted)
        with _Control(self._session.port, self.run_id) as control:
            copier = threading.Thread(target=control.copy_log, args=(self._session.log_path,), daemon=True)
            copier.start()
            status, details = self._watch(progress, out, on_event, poll, start_timeout, end_timeout, control)
            copier.join(timeout=2.0)
        self._session._clear_run()
        progress.read(on_event)
        summary = _newer_json(out / SUMMARY_FILE, self._submitted)
        error = _newer_json(out / ERROR_FILE, self._submitted)
        ok = bool(summary and summary.get("ok") is True and error is None)
        log_tail = "" if ok or error else _tail(self._session.log_path, self._log_start)
        return Outcome(status, details, ok, error, log_tail)

    def _watch(
        self,
        progress: _Events,
        out: Path,
        on_event: Callable[[dict[str, Any]], None],
        poll: float,
        start_timeout: float,
        end_timeout: float,
        control: _Control,
    ) -> tuple[str, str]:
        """Wait until Flower calls the run finished, or until nobody is left who could."""
        began = time.monotonic()
        asked = counted = float("-inf")
        written: float | None = None
        gone: float | None = None
        simulation: psutil.Process | None = None
        status, details = "pending", ""
        while True:
            if progress.read(on_event):
                written = None  # it still works
            now = time.monotonic()
            superlink = self._session._superlink
            if superlink is None or superlink.poll() is not None:
                return "lost", "the SuperLink ended while the run was going on"
            if simulation is None or now - counted > 5:
                counted = now
                family = self._session._family.members()
                if simulation is None:
                    simulation = next((p for p in family if _runs(p, "flwr-simulation")), None)
            if simulation is None and now - began > start_timeout:
                return "lost", f"the simulation did not start within {start_timeout:g} s"
            if written is None and any(_newer(out / name, self._submitted) for name in (SUMMARY_FILE, ERROR_FILE)):
                written = now
            if gone is None and simulation is not None and not _alive(simulation):
                gone = now
            # Asking costs the SuperLink little, but not nothing: often only near the end.
            if now - asked > (0.1 if gone is not None or written is not None else 2.0):
                asked = now
                status, details = control.status()
                if status.startswith("finished"):
                    return status, details
            if gone is not None and now - gone > 1.5:
                return "lost", "the simulation process ended without a word (killed, perhaps for memory?)"
            if written is not None and now - written > end_timeout:
                return status, f"still {status} {end_timeout:g} s after its results were written; stopped"
            time.sleep(poll)

    def stop(self) -> None:
        """Stop the run, whatever its state; the session can then take the next one."""
        with contextlib.suppress(LaunchError):
            self._session._flwr("stop", str(self.run_id), CONNECTION, "--format", "json")
        if self._session._active is self:
            self._session._clear_run()


class _Events:
    """Reader of a growing file of JSON lines."""

    def __init__(self, path: Path, since: int) -> None:
        self._path = path
        self._position = 0
        with contextlib.suppress(OSError):
            found = path.stat()
            # A resumed run appends to its predecessor's file.
            if found.st_mtime_ns < since:
                self._position = found.st_size

    def read(self, on_event: Callable[[dict[str, Any]], None]) -> int:
        """Hand over the complete lines that have been added; return their number."""
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
                    raise LaunchError(f"{self._path} holds a line that is no JSON object: {line!r}") from error
                on_event(event)
                count += 1
        return count


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
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

# The name of its first argument is how the process is told from others. It ends, at once, when Ray's node does: what is
# left of Ray would take connections still, and fail every run.
_RAY_HOLDER = """\
import os, sys, ray, psutil
ray.init(num_cpus=int(sys.argv[2]), include_dashboard=False, log_to_driver=False)
[raylet] = [child for child in psutil.Process().children() if child.name() == "raylet"]
raylet.wait()
os._exit(1)
"""


class _Control:
    """Flower's control interface for one run.

    It lives in this process because each call of the command line costs a second of a core that the clients could use.
    """

    def __init__(self, port: int, run_id: int) -> None:
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        self._run_id = run_id
        with _no_proxy():
            self._client = ControlHttpClient.from_server_address(
                server_address=f"127.0.0.1:{port}",
                insecure=True,
                root_certificates=None,
                interceptors=[RuntimeVersionHttpInterceptor(component_name="fedapp")],
            )

    def __enter__(self) -> _Control:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def status(self) -> tuple[str, str]:
        """Return status and details in Flower's words, ``unknown`` when the SuperLink gives no answer."""
        from flwr.proto.control_pb2 import ListRunsRequest

        try:
            run = self._client.ListRuns(ListRunsRequest(run_id=self._run_id)).run_dict[self._run_id]
        except Exception as error:
            return "unknown", str(error)
        return ":".join(filter(None, (run.status.status, run.status.sub_status))), run.status.details

    def copy_log(self, path: Path) -> None:
        """Append what the simulation prints to a file, until the run ends; it prints to the SuperLink only."""
        from flwr.proto.control_pb2 import StreamLogsRequest

        # A connection that breaks when the SuperLink is stopped ends the copying; the run's status is found elsewhere.
        with contextlib.suppress(Exception), path.open("a", encoding="utf-8") as file:
            for reply in self._client.StreamLogs(StreamLogsRequest(run_id=self._run_id, after_timestamp=0.0)):
                file.write(reply.log_output)
                file.flush()


@contextlib.contextmanager
def _no_proxy() -> Iterator[None]:
    """Keep a proxy of the environment out of the way of loopback connections that are made inside."""
    names = ("NO_PROXY", "no_proxy")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "127.0.0.1"))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _flat_keys(table: Mapping[str, Any], prefix: str = "") -> set[str]:
    keys: set[str] = set()
    for key, value in table.items():
        keys |= _flat_keys(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key}
    return keys


def _executable(name: str, path: str) -> str:
    found = shutil.which(name, path=path)
    if found is None:
        raise LaunchError(f"'{name}' is not installed beside {sys.executable}: pip install 'flwr[simulation]'")
    return found


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
    return content if isinstance(content, dict) else {"ok": False, "message": f"{path} holds no object"}


def _tail(path: Path, start: int, lines: int = 60, head: int = 20) -> str:
    """Return the end of a log from byte ``start`` on, without the lines about web requests.

    The first error, from which the later ones commonly follow, stands before it where it lies further back.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            text = _COLOUR.sub("", file.read().decode("utf-8", errors="replace"))
    except OSError:
        return ""
    noise = ('"POST /', '"GET /', "ControlServicer.ListRuns")
    kept = [line for line in text.splitlines() if not any(word in line for word in noise)]
    earlier, end = kept[:-lines], kept[-lines:]
    first = next((i for i, line in enumerate(earlier) if line.startswith(("ERROR", "Traceback"))), None)
    if first is not None:
        end = [*earlier[first : first + head], "...", *end]
    return "\n".join(end)
