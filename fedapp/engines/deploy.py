"""Runs on real devices: submit to a SuperLink, follow the run through its log, and exit as truthfully as in simulation.

The SuperLink is a connection of Flower's configuration (`$FLWR_HOME/config.toml`, default `~/.flwr/config.toml`). It
may stand on another machine: events travel in the run's log, over the same encrypted port as everything else. Where the
run directory lies on this machine's disk too, nothing is copied; otherwise this machine keeps a mirror with the tables
and the summary, from which `--resume` works as well.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import typer

from fedapp import config as configuration
from fedapp.config import RunConfig
from fedapp.engines import superlink as launch
from fedapp.engines.supervise import _interrupt
from fedapp.errors import BadRequest
from fedapp.results.directory import ANNOUNCED, absolute, cell, check_out, new_folder, run_name, write_json

LOST_AFTER = 30.0
"""Seconds without an answer from the SuperLink after which a run is given up as lost."""
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


@dataclass(frozen=True)
class Connection:
    """A SuperLink of Flower's configuration.

    Attributes
    ----------
    name : its name there.   address : host:port.   insecure : plain HTTP, which the configuration must ask for.
    root_certificates : path of the CA's certificate, "" = the system's.   raw : Flower's own object.
    """

    name: str
    address: str
    insecure: bool
    root_certificates: str
    raw: Any


def connection(name: str | None) -> Connection:
    """Read a connection from Flower's configuration; None is its default.

    Raises
    ------
    BadRequest : no such connection, or one that simulates; names those there are.
    """
    os.environ.update(QUIET)
    import click
    from flwr.cli.flower_config import read_flower_config, read_superlink_connection
    from flwr.supercore.utils import get_flwr_home

    path = get_flwr_home() / "config.toml"
    if not path.is_file():
        raise BadRequest(
            f"Flower's configuration {path} does not exist: write it with\n"
            '[superlink.prod]\naddress = "HOST:8000"\nroot-certificates = "/absolute/path/ca.crt"'
        )
    try:
        known = read_flower_config()[0].get("superlink", {})
        name = name or known.get("default")
        names = [n for n, c in known.items() if isinstance(c, dict) and not str(c.get("address", ":")).startswith(":")]
        if name is None or name not in known:
            there = f"it has {', '.join(names)}" if names else "it has none with an address"
            raise BadRequest(f"{path} has no SuperLink '{name}': {there}; give one of them with --superlink")
        raw = read_superlink_connection(name)
    except (click.ClickException, typer.Exit, KeyError, TypeError) as e:
        raise BadRequest(f"{path}: {getattr(e, 'message', e)}") from e
    if raw.address is None or raw.address.startswith(":"):
        raise BadRequest(
            f"the SuperLink '{name}' of {path} simulates: give one with an address, or leave --engine deploy"
        )
    certificates = raw.root_certificates or ""
    if certificates and not Path(certificates).is_file():
        raise BadRequest(f"{path}: root-certificates {certificates} of '{name}' does not exist")
    return Connection(name, raw.address, raw.insecure, certificates, raw)


class Control:
    """What is asked of a SuperLink, besides starting a run: status, log, stop, nodes."""

    def __init__(self, to: Connection) -> None:
        self._to = to
        self._client = self._open()

    def _open(self) -> Any:
        from flwr.cli.utils import init_http_client_from_connection

        with contextlib.redirect_stdout(io.StringIO()):  # it names the connection, which we do ourselves
            return init_http_client_from_connection(self._to.raw)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def status(self, run_id: int) -> tuple[str, str]:
        """Return status and details in Flower's words, `unknown` when the SuperLink gives no answer."""
        from flwr.proto.control_pb2 import ListRunsRequest

        try:
            run = self._client.ListRuns(ListRunsRequest(run_id=run_id)).run_dict[run_id]
        except Exception as error:
            return "unknown", f"{type(error).__name__}: {error}"
        return ":".join(filter(None, (run.status.status, run.status.sub_status))), run.status.details

    def stop(self, run_id: int) -> None:
        """Stop a run; that it has ended already, or that nobody answers, is found elsewhere."""
        from flwr.proto.control_pb2 import StopRunRequest

        with contextlib.suppress(Exception):
            self._client.StopRun(StopRunRequest(run_id=run_id))

    def nodes(self) -> list[tuple[int, str]]:
        """Return (id, status) of all registered nodes."""
        from flwr.proto.control_pb2 import ListNodesRequest

        return [(n.node_id, n.status) for n in self._client.ListNodes(ListNodesRequest()).nodes_info]

    def log(self, run_id: int, into: queue.Queue[str | None], ended: threading.Event) -> None:
        """Put what a run prints into a queue until it has ended, then None; broken streams are taken up again."""
        from flwr.proto.control_pb2 import StreamLogsRequest

        client, seen = self._open(), 0.0
        while not ended.is_set():
            try:
                for reply in client.StreamLogs(StreamLogsRequest(run_id=run_id, after_timestamp=seen)):
                    into.put(reply.log_output)
                    seen = max(seen, reply.latest_timestamp)
                break
            except Exception:
                ended.wait(1.0)
        into.put(None)
        with contextlib.suppress(Exception):
            client.close()


class Mirror:
    """A copy of a run's tables and summary on the machine that follows it from afar, made from its events."""

    def __init__(self, path: Path, config: RunConfig, out: str) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        configuration.write_toml(path / "config.toml", config.replaced(out=out, resume=False))
        for name in ("summary.json", "error.json"):
            (path / name).unlink(missing_ok=True)

    def event(self, event: Mapping[str, Any]) -> None:
        """Write what one event tells."""
        with (self.path / "progress.jsonl").open("a", encoding="utf-8") as f:
            f.write(json.dumps(event) + "\n")
        if event["kind"] == "start":
            self._keep(int(event["done"]))
        elif event["kind"] == "round":
            row = {k: cell(v) for k, v in event.items() if k not in ("kind", "rounds", "time")}
            self._rows([*self._kept(row["round"] - 1), row])
        elif event["kind"] == "end":
            write_json(self.path / "summary.json", event["summary"])
        elif event["kind"] == "failed":
            write_json(self.path / "error.json", {k: v for k, v in event.items() if k != "kind"})
            write_json(self.path / "summary.json", {"ok": False, "error": event["message"]})

    def _kept(self, last: int) -> list[dict[str, Any]]:
        path = self.path / "rounds.csv"
        if not path.is_file():
            return []
        with path.open(newline="", encoding="utf-8") as f:
            return [row for row in csv.DictReader(f) if int(row["round"]) <= last]

    def _keep(self, last: int) -> None:
        rows = self._kept(last)
        if rows:
            self._rows(rows)
        else:
            (self.path / "rounds.csv").unlink(missing_ok=True)

    def _rows(self, rows: list[dict[str, Any]]) -> None:
        with (self.path / "rounds.csv").open("w", newline="", encoding="utf-8") as f:
            writer = csv.DictWriter(f, list(rows[0]), lineterminator="\n", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)


def run(values: Mapping[str, Any], out: Path | None, superlink: str | None, dry_run: bool = False) -> int:
    """Submit one run to a SuperLink and follow it to its end.

    Parameters
    ----------
    values : flat run-config keys, with `resume` where an earlier run in `out` goes on.
    out : run directory; on a SuperLink elsewhere the directory of the mirror.
    superlink : connection in Flower's configuration; None = its default.
    dry_run : show configuration and connection, submit nothing.

    Returns
    -------
    0 when every round had enough good replies, else 1.

    Raises
    ------
    BadRequest : refused before anything was trained, here or by the server.
    KeyboardInterrupt : interrupted; the run was stopped.
    """
    from fedapp.engines.runner import Follower, print_summary, what_leaves

    to = connection(superlink)
    resume = bool(values.get("resume", False))
    given = configuration.from_flat({**values, "resume": False})
    config = configuration.resolve(given)
    if dry_run:
        for key, value in config.to_flat().items():
            typer.echo(f"{key} = {value!r}" if not isinstance(value, bool) else f"{key} = {str(value).lower()}")
        with contextlib.suppress(BadRequest):  # the nodes' data need not be here
            typer.echo("\n".join(what_leaves(config.replaced(clients=config.clients or 3))))
        typer.echo(f"SuperLink: {to.name}, {to.address}, {'plain HTTP' if to.insecure else 'TLS'}")
        return 0
    here = absolute(out) if out is not None else new_folder(Path("runs"), run_name(config))
    check_out(here, resume)
    there = str(here)
    if resume and not (here / "checkpoint").is_dir():
        there = str(configuration.read_toml(here / "config.toml")["out"])
    config = config.replaced(out=there, resume=resume)
    with Follower() as follower, _terminable():
        follower.line(f"SuperLink {to.name} at {to.address}{' without encryption' if to.insecure else ''}")
        control = Control(to)
        try:
            run_id = submit(to, config)
            follower.line(f"run {run_id} submitted")
            followed = Followed(here, config, follower)
            try:
                status, details = _watch(control, run_id, followed)
            except KeyboardInterrupt:
                control.stop(run_id)
                follower.line(f"run {run_id} stopped; {_resume(to, here)}")
                raise
        finally:
            control.close()
    if followed.failed is not None and followed.failed.get("exit") == 2:
        raise BadRequest(str(followed.failed["message"]))
    summary = followed.result()
    if summary is not None and summary.get("ok") is True and followed.failed is None:
        print_summary(summary)
        typer.echo(f"results: {here}" + (f" (a mirror of {followed.there})" if followed.mirror else ""))
        return 0
    _explain(status, details, followed)
    followed.bad_end(status, details)
    typer.echo(f"results: {here}\n{_resume(to, here)}", err=True)
    return 1


def _resume(to: Connection, here: Path) -> str:
    return f"to go on from its last complete round: fedapp run --engine deploy --superlink {to.name} --resume {here}"


def _explain(status: str, details: str, followed: Followed) -> None:
    failed = followed.failed
    if failed is not None:
        where = f" (client {failed['client']}, round {failed['round']}, {failed['stage']})"
        text = (
            f"{where if failed.get('client') is not None else ''}: {failed['message']}\n{failed.get('traceback', '')}"
        )
    else:
        tail = "\n".join(followed.printed[-30:])
        text = f": {status} {details}" + (f"\nlast lines of its log:\n{tail}" if tail else "")
    typer.echo(f"the run did not end well{text}", err=True)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the following the way Ctrl-C does, so that the run is stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def submit(to: Connection, config: RunConfig) -> int:
    """Bundle the app and start a run; returns Flower's run id.

    Raises
    ------
    BadRequest : the SuperLink cannot be reached, its certificate is not trusted, or it refuses the configuration.
    """
    env = {**os.environ, **QUIET}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    with tempfile.TemporaryDirectory(prefix="fedapp-") as folder:
        app = launch.stage(Path(folder) / "app")
        settings = Path(folder) / "run.toml"
        settings.write_text(tomli_w.dumps(config.to_flat()), encoding="utf-8")
        command = [launch._executable("flwr", env["PATH"]), "run", str(app), to.name]
        command += ["--run-config", str(settings), "--format", "json"]
        try:
            done = subprocess.run(
                command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180
            )
        except subprocess.TimeoutExpired:
            raise BadRequest(f"the SuperLink at {to.address} did not take the run within 180 s") from None
    try:
        reply: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        reply = {"success": False, "error-message": (done.stderr or done.stdout).strip()}
    if not reply.get("success"):
        reason = str(reply.get("error-message", "")).strip().splitlines() or ["no reason given"]
        raise BadRequest(
            f"the SuperLink at {to.address} did not take the run: {' '.join(reason[-3:])}\n"
            f"fedapp deploy check --superlink {to.name} says what is wrong"
        )
    return int(reply["run-id"])


class Followed:
    """What is known of a run from its events."""

    def __init__(self, here: Path, config: RunConfig, tell: Any) -> None:
        self.here = here
        self.config = config
        self.tell = tell
        self.there = ""
        self.mirror: Mirror | None = None
        self.summary: dict[str, Any] | None = None
        self.failed: dict[str, Any] | None = None
        self.printed: list[str] = []
        self._rest = ""

    def text(self, text: str) -> None:
        """Take a piece of the run's log."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            _, mark, event = line.partition(ANNOUNCED)
            if not mark:
                self.printed = [*self.printed[-200:], line]
                with (self.here / "superlink.log").open("a", encoding="utf-8") as f:
                    f.write(line + "\n")
                continue
            with contextlib.suppress(ValueError):
                self.event(json.loads(event))

    def event(self, event: dict[str, Any]) -> None:
        """Take one event."""
        kind = event.get("kind")
        if kind == "directory":
            self.there = str(event["out"])
            token = self.here / "versions.json"
            same = token.is_file() and json.loads(token.read_text(encoding="utf-8")).get("run") == event["run"]
            if not same:
                self.mirror = Mirror(self.here, self.config, self.there)
                self.tell.line(f"the run directory lies on the SuperLink's machine: {self.there}")
        elif kind == "end":
            self.summary = event["summary"]
        elif kind == "failed":
            self.failed = event
        if self.mirror is not None:
            self.mirror.event(event)
        self.tell(event)

    def result(self) -> dict[str, Any] | None:
        """Return the summary, from the disk where the log's last lines were lost."""
        path = self.here / "summary.json"
        if self.summary is None and self.there and self.mirror is None and path.is_file():
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return found
        return self.summary

    def bad_end(self, status: str, details: str) -> None:
        """Leave a truthful end where the server could not: it was killed, or nobody answers any more."""
        if self.failed is None and not (self.here / "summary.json").is_file():
            message = f"{status}: {details}"
            entry = {
                "message": message,
                "traceback": "",
                "exit": 1,
                "client": None,
                "round": None,
                "stage": "superlink",
            }
            write_json(self.here / "error.json", entry)
            write_json(self.here / "summary.json", {"ok": False, "error": message})


def _watch(control: Control, run_id: int, followed: Followed) -> tuple[str, str]:
    """Follow a run until the SuperLink calls it finished, or is gone."""
    printed: queue.Queue[str | None] = queue.Queue()
    ended = threading.Event()
    reader = threading.Thread(target=control.log, args=(run_id, printed, ended), daemon=True)
    reader.start()
    open_ = True
    asked = float("-inf")
    answered = time.monotonic()
    over: float | None = None
    status, details = "pending", ""
    try:
        while True:
            with contextlib.suppress(queue.Empty):
                while True:
                    piece = printed.get(timeout=0.5)
                    if piece is None:
                        open_ = False
                    else:
                        followed.text(piece)
            now = time.monotonic()
            if over is None and (followed.summary is not None or followed.failed is not None):
                over = now
            if (status.startswith("finished") and (not open_ or now - asked > 15)) or (over and now - over > 30):
                return status, details
            if not status.startswith("finished") and (now - asked > 3 or not open_):
                asked = now
                status, details = control.status(run_id)
                if status != "unknown":
                    answered = now
                elif now - answered > LOST_AFTER:
                    return "lost", f"the SuperLink has not answered for {LOST_AFTER:g} s ({details})"
    finally:
        ended.set()
