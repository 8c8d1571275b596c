"""The SuperLink's database: who reads its files and uses it, how long a request waits for it, and failed writes."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import Pool

from fedapp.deployment.executor import replace_attribute
from fedapp.errors import BadRequest
from fedapp.files import locked

TURN = 20.0
"""Seconds that a request waits for others which write to the database; a node waits 30 for its answer."""
RECOVERY, PATIENCE = 60.0, 6
"""Seconds after a failed write during which no node or run is taken for lost: heartbeats come every 20 seconds, and up
to 20 later after one that failed. And how many times 30 seconds a run may be without one; Flower's 2 are less than a
full disk takes, and the run's process ends as soon as they are over."""


def own_files(database: str) -> None:
    """Make the files of a database, which hold messages and the tokens of tasks, readable by their owner only.

    Raises
    ------
    BadRequest : a file belongs to another user.
    """
    for path in (Path(database + end) for end in ("", "-wal", "-shm", "-journal")):
        if not path.is_file():
            continue
        if path.stat().st_uid != os.geteuid():
            raise BadRequest(f"{path} belongs to another user, who could read all messages: chown it, or name another")
        path.chmod(0o600)


def lock_database(database: str) -> contextlib.AbstractContextManager[object]:
    """Let no other SuperLink of fedapp use a database: each fails all unfinished runs when it starts.

    The lock is on a file of its own: SQLite's locks on the database end when this process closes any handle of it.

    Returns
    -------
    A context that holds the lock, which also ends with the process.

    Raises
    ------
    BadRequest : another process has the lock, or the file cannot be made.
    """
    if database.startswith(":"):
        return contextlib.nullcontext()
    taken = f"another SuperLink uses {database}: stop it, or name another --database"
    return locked(Path(f"{Path(database).resolve()}.lock"), taken)


def end_runs(app: Any) -> None:
    """End what an earlier SuperLink with this database left unfinished: its runs have failed for who followed them."""
    from flwr.common.constant import Status, SubStatus

    state = app.state.linkstate_factory.state()
    for run in state.get_run_info(statuses=[Status.PENDING, Status.STARTING, Status.RUNNING]):
        state.finish_task(run.primary_task_id, SubStatus.FAILED, "the SuperLink was started again")
        state.cleanup_run(run.run_id)


def limit_connections() -> None:
    """Let this process's connections of SQLite wait for their turn, and give memory back after each transaction."""
    event.listen(Pool, "checkout", _patient)
    event.listen(Pool, "checkin", _shrink)


def _patient(connection: Any, record: Any, proxy: Any) -> None:
    """Let SQLite wait for its turn to write: on a busy disk Flower's 5 seconds pass, and what fails then ends a run."""
    if not record.info.get(_patient):  # it lasts as long as the connection
        connection.execute(f"PRAGMA busy_timeout = {int(1000 * TURN)}").close()
        record.info[_patient] = True


def tolerate_write_failures() -> None:
    """Take no node and no run of this process's SuperLinks for lost because heartbeats could not be written."""
    sql_linkstate: Any = importlib.import_module("flwr.server.superlink.linkstate.sql_linkstate")
    sql_corestate: Any = importlib.import_module("flwr.supercore.corestate.sql_corestate")
    failed, links = -RECOVERY, sql_linkstate.SqlLinkState
    tag, check = links._check_and_tag_offline_nodes, sql_linkstate.check_node_availability_for_in_message

    def note(context: Any) -> None:
        nonlocal failed
        if isinstance(context.sqlalchemy_exception, OperationalError):
            failed = time.monotonic()

    def recovers() -> bool:
        return time.monotonic() - failed < RECOVERY

    def tag_lost(self: Any, node_ids: list[int] | None = None) -> None:
        if not recovers():
            tag(self, node_ids)

    def check_lost(**named: Any) -> Any:
        # A time long ago: only nodes that do not exist are not there.
        return check(**(named | {"current_time": 1.0} if recovers() else named))

    event.listen(Engine, "handle_error", note)
    replace_attribute(links, "_check_and_tag_offline_nodes", tag_lost)
    replace_attribute(sql_linkstate, "check_node_availability_for_in_message", check_lost)
    replace_attribute(sql_corestate, "HEARTBEAT_PATIENCE", PATIENCE)


def _shrink(connection: Any, record: Any) -> None:
    """Let SQLite give back its pages after each transaction: Flower has every connection keep 64 MB of them."""
    if connection is not None:
        connection.execute("PRAGMA shrink_memory").close()
