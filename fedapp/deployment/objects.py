"""What a SuperLink keeps of messages: each list of a message's objects as its sender wrote it, and whole or not at all.

Flower cuts a message into objects, which are named by the hash of their content, and shares equal ones between
messages. A sender lists them as a tree before it sends them. Flower stores the parts of each object once, as the first
list says, and refuses a message that says otherwise. So a node that foresees an object of another's next message, such
as unchanged weights, could list it first with other parts: the honest message would be refused, or without the check
(database ``:flwr-in-memory:``) reach its receiver with parts missing.

:func:`own_lists` replaces the stores of Flower 1.41 in this process. Shared objects have no parts there: all belong to
the message itself, which cannot be foreseen (its name depends on its time and on what it answers), and the tree is kept
as one more of them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.inflatable.inflatable_object import (
    UnexpectedObjectContentError,
    get_object_id,
    is_valid_sha256_hash,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import validate_object_content
from flwr.supercore.object_store import NoObjectInStoreError, object_store_factory
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.utils import uint64_to_int64
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import OperationalError

from fedapp.deployment.executor import replace_attribute


class _OwnLists:
    """The changes, for both of Flower's stores: put before them among the bases of a class."""

    def __init__(self, *where: str) -> None:
        super().__init__(*where, verify=False)  # type: ignore[call-arg]  # `put` verifies: a tree has no such name

    def preregister(self, run_id: int, object_tree: ObjectTree) -> list[str]:
        """Register the objects of a message; return the names of those whose content is not there yet."""
        message = object_tree.object_id
        tree = tree_name(message)
        parts = {part.object_id: None for part in iterate_object_tree(object_tree)} | {tree: None}
        del parts[message]
        flat = ObjectTree(object_id=message, children=[ObjectTree(object_id=part) for part in parts])
        stores: Any = super()
        missing: list[str] = stores.preregister(run_id, flat)
        if tree in missing:
            stores.put(tree, object_tree.SerializeToString())
            missing.remove(tree)
        return missing

    def get_object_tree(self, object_id: str) -> ObjectTree:
        """Return the tree of a message as it was listed."""
        stores: Any = super()
        tree = stores.get(tree_name(object_id))
        found: ObjectTree = ObjectTree.FromString(tree) if tree else stores.get_object_tree(object_id)
        return found

    def put(self, object_id: str, object_content: bytes) -> None:
        """Keep the content of an object.

        Raises
        ------
        ValueError : the content has another name.   UnexpectedObjectContentError : it is not an object.
        """
        stores: Any = super()
        try:
            if get_object_id(object_content) != object_id:
                raise ValueError(f"Object ID {object_id} does not match content hash")
            validate_object_content(object_content)
            stores.put(object_id, object_content)
        except _WRONG as e:
            _add_failure(e)
            raise


class _BatchedStore(SqlObjectStore):
    """Flower's store with few statements for all parts of a message. Flower's has four for each, and a list of 5,000
    objects took 5 processor seconds, during which no other request could write. Parts have no parts here
    (:class:`_OwnLists`).
    """

    def preregister(self, run_id: int, object_tree: ObjectTree) -> list[str]:
        """Register a message and its parts; return the names of those whose content is not there yet.

        Raises
        ------
        ValueError : a name is not a SHA-256, or the message was listed with other parts.
        """
        message, parts = object_tree.object_id, [child.object_id for child in object_tree.children]
        names = [message, *parts]
        if not all(map(is_valid_sha256_hash, names)):
            raise ValueError("the name of an object is a SHA-256")
        rows = [{"part": part, "message": message, "run": uint64_to_int64(run_id)} for part in parts]
        whole = {"part": message, "run": uint64_to_int64(run_id)}
        with self._mutation_session() as session:
            found: dict[str, int] = dict(session.execute(_THERE, {"names": json.dumps(names)}).all())
            missing = [name for name in names if not found.get(name)]
            if message not in found:
                session.execute(_ADD, [{"name": name} for name in names if name not in found])
                if rows:
                    session.execute(text("INSERT INTO object_children VALUES (:message, :part)"), rows)
                    session.execute(text("UPDATE objects SET ref_count = ref_count + 1 WHERE object_id = :part"), rows)
            elif set(parts) != set(session.scalars(_PARTS, {"name": message})):
                raise ValueError(f"Object {message} was preregistered with different children.")
            session.execute(text("INSERT OR IGNORE INTO run_objects VALUES (:run, :part)"), [whole, *rows])
        return missing

    def delete(self, object_id: str) -> None:
        """Remove a message, and those of its parts that belong to no other."""
        with self._mutation_session() as session:
            parts = [{"name": part} for part in session.scalars(_PARTS, {"name": object_id})]
            if session.scalar(text(f"{_UNUSED} RETURNING object_id"), {"name": object_id}) and parts:
                less = "UPDATE objects SET ref_count = ref_count - 1 WHERE object_id = :name AND ref_count > 0"
                session.execute(text(less), parts)
                session.execute(text(_UNUSED), parts)

    def delete_objects_in_run(self, run_id: int) -> None:
        """Remove the messages of a run."""
        run = {"run": uint64_to_int64(run_id)}
        with self._mutation_session() as session:
            messages = session.scalars(_MESSAGES, run).all()
            session.execute(text("DELETE FROM run_objects WHERE run_id = :run"), run)
            for message in messages:
                self.delete(message)


_ADD = text("INSERT INTO objects (object_id, content, is_available, ref_count) VALUES (:name, x'', 0, 0)")
_THERE = text("SELECT object_id, is_available FROM objects WHERE object_id IN (SELECT value FROM json_each(:names))")
_MESSAGES = text(
    "SELECT object_id FROM objects JOIN run_objects USING (object_id) WHERE run_id = :run AND ref_count = 0"
)
_PARTS = text("SELECT child_id FROM object_children WHERE parent_id = :name")
_UNUSED = "DELETE FROM objects WHERE object_id = :name AND ref_count = 0"


class SqlStore(_OwnLists, _BatchedStore):
    """Flower's store in a database file."""

    def initialize(self, log_queries: bool = False, **engine_kwargs: Any) -> list[str]:
        """Open the file, and make tables and indexes that are not there; return the tables' names.

        With each object that is removed, SQLite removes what refers to it. Without an index it reads whole tables for
        that: the 5,000 objects of a reply took 26 seconds, in which no other request could write.
        """
        tables: list[str] = super().initialize(log_queries, **engine_kwargs)
        with self.session() as session:
            for table, column in (("object_children", "child_id"), ("run_objects", "object_id")):
                session.execute(text(f"CREATE INDEX IF NOT EXISTS fedapp_{table} ON {table} ({column})"))
        return tables


class MemoryStore(_OwnLists, InMemoryObjectStore):
    """Flower's store in the memory of the process."""

    def preregister(self, run_id: int, object_tree: ObjectTree) -> list[str]:
        """Register the objects of a message; meanwhile no request removes one that it shares with another message."""
        with self.lock_store:
            return super().preregister(run_id, object_tree)


def tree_name(message: str) -> str:
    """Return the name under which the tree of a message is kept; no content has it."""
    return hashlib.sha256(f"tree of {message}".encode()).hexdigest()


def own_lists() -> None:
    """Let every SuperLink that is started in this process keep each message's list of objects for itself."""
    replace_attribute(object_store_factory, "SqlObjectStore", SqlStore)
    replace_attribute(object_store_factory, "InMemoryObjectStore", MemoryStore)


def make_requests_atomic() -> None:
    """Let each request to this process's SuperLinks be one transaction, and tell whose fault an error is.

    Flower marks a message or a task as handed out, and counts bytes in a second transaction. Where that fails the
    answer is an error, and the message or the task would be lost. And it answers 500 to what cannot be
    right at any time, such as a run that does not exist, as to a database that is full.
    """
    messages = ("pull_messages", "push_messages", "push_object", "pull_object", "confirm_message_received")
    names: dict[Any, tuple[str, ...]] = {
        fleet_handlers: (*messages, "activate_node", "deactivate_node", "send_node_heartbeat", "get_run", "get_fab"),
        runtime_handlers: (*messages, "acquire_task", "push_task_output"),
    }
    for handlers, of_it in names.items():
        for name in of_it:
            setattr(handlers, name, _atomic(getattr(handlers, name)))
    event.listen(Engine, "handle_error", _record_failure)


_WRONG = (KeyError, OverflowError, TypeError, ValueError, NoObjectInStoreError, UnexpectedObjectContentError)
"""Errors that Flower raises for a request with an unknown name or an invalid value; the answer is 400."""


def _atomic(handler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(handler)
    def handle(request: Any, state: Any, *task: Any, **store: Any) -> Any:
        failures: list[Exception] = []
        before = _failures.set(failures)
        try:
            # A state in memory has no sessions, and nothing of it fails half way.
            with getattr(state, "session", contextlib.nullcontext)():
                answer = handler(request, state, *task, **store)
                if failures:  # Flower answers that the object was not wanted, and its sender discards the message
                    raise failures[0]
                return answer
        except _WRONG as e:
            # Its text may be the node's: short, and in one line of the log.
            about = f"{type(e).__name__}: {str(e)[:200]!r}"
            raise FlowerError(ApiErrorCode.INVALID_PROTOBUF_PAYLOAD, about) from e
        finally:
            _failures.reset(before)

    return handle


_failures: ContextVar[list[Exception] | None] = ContextVar("failures", default=None)
"""Failures in the request that is handled, which Flower may suppress."""


def _add_failure(error: Exception) -> None:
    failures = _failures.get()
    if failures is not None:
        failures.append(error)


def _record_failure(context: Any) -> None:
    if isinstance(context.sqlalchemy_exception, OperationalError):
        _add_failure(context.sqlalchemy_exception)
