"""Runs on real devices: submit to a SuperLink, follow the run through its log, and exit as truthfully as in simulation.

The SuperLink is a connection of Flower's configuration (`$FLWR_HOME/config.toml`, default `~/.flwr/config.toml`). It
may stand on another machine: events travel in the run's log, over the same encrypted port as everything else. Where the
run directory lies on this machine's disk too, nothing is copied. Otherwise this machine keeps a copy of the tables and
the summary, from which `--resume` works as well.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import queue
import shlex
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from fedapp import config as configuration
from fedapp.config import RunConfig
from fedapp.engines import control, local, runner, supervise
from fedapp.engines.control import Control, LaunchError
from fedapp.engines.superlink import COLOUR, Outcome
from fedapp.errors import BadRequest, plain
from fedapp.results.cells import cell
from fedapp.results.directory import ANNOUNCED, keep_rows, write_json
from fedapp.results.terminal import echo
from fedapp.tracking import following

LOST_AFTER = 30.0
"""Seconds without an answer from the SuperLink after which a run counts as lost."""
KEPT_LINES = 200
"""Lines of the run's log that are kept in memory."""


def connection(name: str | None) -> Any:
    """Read a connection (Flower's `SuperLinkConnection`) from Flower's configuration; None is its default.

    Raises
    ------
    BadRequest : there is no such connection (the message names the others), or it is one for simulations.
    """
    os.environ.update(control.QUIET)
    import click
    from flwr.cli.flower_config import read_flower_config, read_superlink_connection
    from flwr.supercore.utils import get_flwr_home

    path = get_flwr_home() / "config.toml"
    if not path.is_file():
        raise BadRequest(
            f"Flower's configuration {path} does not exist: write it with\n"
            '[superlink.prod]\naddress = "localhost:8001"\nroot-certificates = "/absolute/path/ca.crt"'
        )
    try:
        known = read_flower_config()[0].get("superlink", {})
        name = name or known.get("default")
        names = [n for n, c in known.items() if isinstance(c, dict) and not str(c.get("address", ":")).startswith(":")]
        if name is None or name not in known:
            there = f"it has {', '.join(names)}" if names else "it has none with an address"
            raise BadRequest(f"{path} has no SuperLink '{name}': {there}; give one of them with --superlink")
        found = read_superlink_connection(name)
    except (click.ClickException, typer.Exit, KeyError, TypeError) as e:
        raise BadRequest(f"{path}: {getattr(e, 'message', e)}") from e
    if found.address is None or found.address.startswith(":"):
        raise BadRequest(
            f"the SuperLink '{name}' of {path} is for simulations: name one with an address, or drop --engine deploy"
        )
    if found.root_certificates and not Path(found.root_certificates).is_file():
        raise BadRequest(f"{path}: root-certificates {found.root_certificates} of '{name}' does not exist")
    return found


def run(values: Mapping[str, Any], out: Path | None, superlink: str | None, dry_run: bool = False) -> int:
    """Submit one run to a SuperLink and follow it to its end.

    Parameters
    ----------
    values : flat run-config keys, with `resume` to continue an earlier run in `out`.
    out : run directory; with a SuperLink on another machine, the directory of the copy.
    superlink : connection in Flower's configuration; None = its default.
    dry_run : show configuration and connection, submit nothing.

    Returns
    -------
    0 if every round had enough valid replies, else 1.

    Raises
    ------
    BadRequest : refused before anything was trained, here or by the server.
    KeyboardInterrupt : interrupted; the run was stopped.
    """
    to = connection(superlink)
    resume = bool(values.get("resume", False))
    config = configuration.for_nodes(local.read_values(values, configuration.check_node))
    local.say_ignored(values, config)
    if dry_run:
        runner.print_config(config)
        with contextlib.suppress(BadRequest):  # the nodes' data need not be here
            echo("\n".join(runner.what_leaves(config.replaced(clients=config.data.clients or 3))))
        echo(f"SuperLink: {to.name}, {to.address}, {'plain HTTP' if to.insecure else 'TLS'}")
        return 0
    here = local.run_folder(config, out, resume=resume)
    there = str(here)
    if resume and not (here / "checkpoint").is_dir():
        there = str(configuration.read_toml(here / "config.toml")["out"])
    config = config.replaced(out=there, resume=resume)
    again = shlex.join(["fedapp", "run", "--engine", "deploy", "--superlink", to.name, "--resume", str(here)])
    how_to_resume = f"to continue after its last complete round: {again}"
    # SIGTERM ends the following like Ctrl-C, so that the run is stopped.
    with runner.Follower() as follower, supervise.handle_signals(supervise.interrupt, "SIGTERM"):
        follower.line(f"SuperLink {to.name} at {to.address}{' without encryption' if to.insecure else ''}")
        with Control.of_connection(to) as api:
            run_id = submit(api, to, config)
            follower.line(f"run {run_id} submitted")
            followed = RemoteRun(here, config, follower)
            try:
                with following.tracked(config, follower, here) as told:
                    followed.listener = told or follower
                    status, details = _watch(api, run_id, followed)
            except KeyboardInterrupt:
                api.stop(run_id)
                follower.line(f"run {run_id} stopped; {how_to_resume}")
                raise
    outcome = followed.outcome(status, details)
    if outcome.report(lambda text: echo(text, err=True)) == 0:
        runner.print_summary(followed.summary or {})
        echo(f"results: {here}" + (f" (a mirror of {followed.there})" if followed.copy is not None else ""))
        return 0
    followed.record_failure(status, details)
    echo(f"results: {here}\n{how_to_resume}", err=True)
    return 1


def submit(api: Control, to: Any, config: RunConfig) -> int:
    """Bundle the app and start a run; return Flower's run id.

    Raises
    ------
    BadRequest : the SuperLink cannot be reached, its certificate is not trusted, or it refuses the configuration.
    """
    with tempfile.TemporaryDirectory(prefix="fedapp-") as name:
        app = control.stage(Path(name) / "app")
        try:
            return api.start(app, config.to_flat())
        except (LaunchError, BadRequest) as e:
            if "Authentication failed" in str(e):
                raise BadRequest(f"the SuperLink at {to.address} {control.NO_TOKEN.format(to.name)}") from e
            raise BadRequest(
                f"the SuperLink at {to.address} did not accept the run: {' '.join(str(e).splitlines()[-3:])}\n"
                f"fedapp deploy check --superlink {to.name} looks for the cause"
            ) from e


class RemoteRun:
    """A run as seen through its log: its events, and the other lines that it prints.

    Parameters
    ----------
    here : run directory on this machine.   config : configuration of the run.   follower : shows lines and events.

    Attributes
    ----------
    listener : gets the events; the follower, or trackers that pass them on to it.
    there : run directory on the SuperLink's machine.   copy : the copy of it here; None where it is the same directory.
    summary : `summary.json` of the run.   failed : the event of a failed run.   printed : last lines of its log.
    """

    def __init__(self, here: Path, config: RunConfig, follower: Any) -> None:
        self.here = here
        self.config = config
        self.follower = self.listener = follower
        self.there = ""
        self.copy: DirectoryCopy | None = None
        self.summary: dict[str, Any] | None = None
        self.failed: dict[str, Any] | None = None
        self.printed: list[str] = []
        self._rest = ""

    def text(self, text: str) -> None:
        """Take a piece of the run's log, which may end anywhere in a line."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if not line.startswith(ANNOUNCED):  # in a line, it may be the text of a node
                shown = plain(COLOUR.sub("", line))
                self.printed = [*self.printed[-KEPT_LINES:], shown]
                with (self.here / "superlink.log").open("a", encoding="utf-8") as f:
                    f.write(shown + "\n")
                continue
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # the server writes no such line
                self.event(json.loads(line.removeprefix(ANNOUNCED)))

    def event(self, event: dict[str, Any]) -> None:
        """Take one event; none follows the end or the failure of a run."""
        if self.summary is not None or self.failed is not None:
            return
        kind = event.get("kind")
        if kind == "directory":
            self.there = str(event["out"])
            token = self.here / "versions.json"
            same = token.is_file() and json.loads(token.read_text(encoding="utf-8")).get("run") == event["run"]
            if not same:
                self.copy = DirectoryCopy(self.here, self.config, self.there)
                self.follower.line(f"the run directory lies on the SuperLink's machine: {self.there}")
        elif kind == "end":
            self.summary = event["summary"]
        elif kind == "failed":
            self.failed = event
        if self.copy is not None:
            self.copy.event(event)
        self.listener(event)

    def outcome(self, status: str, details: str) -> Outcome:
        """Return how the run ended; the summary comes from the disk where the log's last lines were lost."""
        path = self.here / "summary.json"
        if self.summary is None and self.there and self.copy is None and path.is_file():
            self.summary = dict(json.loads(path.read_text(encoding="utf-8")))
        ok = self.summary is not None and self.summary.get("ok") is True and self.failed is None
        tail = "\n".join(["last lines of its log:", *self.printed[-30:]]) if self.printed else ""
        return Outcome(status, details, ok, self.failed, tail)

    def record_failure(self, status: str, details: str) -> None:
        """Write the failure where the server could not, because it was killed or no longer answers."""
        if self.failed is None and not (self.here / "summary.json").is_file():
            message = f"{status}: {details}"
            no_client = {"client": None, "round": None, "stage": "superlink"}
            write_json(self.here / "error.json", {"message": message, "traceback": "", "exit": 1, **no_client})
            write_json(self.here / "summary.json", {"ok": False, "error": message})


class DirectoryCopy:
    """A copy of a remote run directory's tables and summary on this machine, made from the run's events."""

    def __init__(self, path: Path, config: RunConfig, out: str) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        configuration.write_toml(path / "config.toml", config.replaced(out=out, resume=False))
        for name in ("summary.json", "error.json"):
            (path / name).unlink(missing_ok=True)

    def event(self, event: Mapping[str, Any]) -> None:
        """Write the content of one event."""
        with (self.path / "progress.jsonl").open("a", encoding="utf-8") as f:
            f.write(json.dumps(event) + "\n")
        table = self.path / "rounds.csv"
        if event["kind"] == "start":
            keep_rows(table, lambda row: int(row[0]) <= event["done"])
        elif event["kind"] == "round":
            new = {k: cell(v) for k, v in event.items() if k not in ("kind", "rounds", "time")}
            keep_rows(table, lambda row: int(row[0]) < new["round"])
            with table.open("a", newline="", encoding="utf-8") as f:
                writer = csv.writer(f, lineterminator="\n")
                writer.writerows([new.values()] if f.tell() else [new, new.values()])
        elif event["kind"] == "end":
            write_json(self.path / "summary.json", event["summary"])
        elif event["kind"] == "failed":
            write_json(self.path / "error.json", {k: v for k, v in event.items() if k != "kind"})
            write_json(self.path / "summary.json", {"ok": False, "error": event["message"]})


def _watch(api: Control, run_id: int, followed: RemoteRun) -> tuple[str, str]:
    """Follow a run until the SuperLink calls it finished, or no longer answers."""
    printed: queue.Queue[str] = queue.Queue()
    ended = threading.Event()
    reader = api.read_log(run_id, printed.put, ended)
    asked = float("-inf")
    answered = time.monotonic()
    over: float | None = None  # when the run's own last event was seen
    status, details = "pending", ""
    try:
        while True:
            more = reader.is_alive()  # asked before the queue is emptied: a reader that has ended adds nothing
            with contextlib.suppress(queue.Empty):
                while True:
                    followed.text(printed.get(timeout=0.5))
            now = time.monotonic()
            if over is None and (followed.summary is not None or followed.failed is not None):
                over = now
            finished = status.startswith("finished")
            if (finished and (not more or now - asked > 15)) or (over is not None and now - over > 30):
                return status, details
            if not finished and (now - asked > 3 or not more):
                asked = now
                status, details = api.status(run_id)
                if status != "unknown":
                    answered = now
                elif now - answered > LOST_AFTER:
                    return "lost", f"the SuperLink has not answered for {LOST_AFTER:g} s ({details})"
    finally:
        ended.set()
