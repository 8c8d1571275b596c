"""What the SuperLink keeps of messages: a list of objects that a node made up changes nobody else's message."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from inspect import isfunction, signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.date import now
from flwr.supercore.error import FlowerError
from flwr.supercore.error.catalog import API_ERROR_MAP
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
from flwr.supercore.object_store import ObjectStore, ObjectStoreFactory, object_store_factory
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from fedapp.deployment import objects

RUN = 7
ROW = "8" * 64
"""An object that only the liar names."""
Opened = Callable[[], ObjectStore]


@pytest.fixture(params=["file", "memory"])
def opened(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """The store that a SuperLink opens; each call is a SuperLink that was started again."""
    for name in ("SqlObjectStore", "InMemoryObjectStore"):  # put back afterwards
        monkeypatch.setattr(object_store_factory, name, getattr(object_store_factory, name))
    objects.own_lists()
    where = str(tmp_path / "state.db") if request.param == "file" else ":flwr-in-memory:"
    yield lambda: ObjectStoreFactory(where).store()


def message(node: int, weights: float = 1.0) -> Message:
    """A message to a node, with two arrays and a record that a stranger may foresee."""
    arrays = ArrayRecord({"head": Array(np.full(3, weights)), "bias": Array(np.zeros(2))})
    about = ConfigRecord({"round": 1})
    head = Metadata(RUN, "", SUPERLINK_NODE_ID, node, "", "1", now().timestamp(), 60.0, "train")
    return make_message(head, content=RecordDict({"arrays": arrays, "config": about}))


def listed(store: ObjectStore, sent: Message) -> list[str]:
    with no_object_id_recompute():
        return store.preregister(RUN, get_object_tree(sent))


def upload(store: ObjectStore, sent: Message, names: list[str]) -> None:
    with no_object_id_recompute():
        for name, part in get_all_nested_objects(sent).items():
            if name in names:
                store.put(name, part.deflate())


def received(store: ObjectStore, sent: Message) -> Message:
    """What the receiver of a message makes of it, by Flower's own code."""

    def pull(name: str) -> bytes:
        content = store.get(name)
        assert content, f"{name} was never sent"
        return content

    return pull_and_inflate_object_from_tree(
        store.get_object_tree(sent.object_id), pull, lambda name: None, return_type=Message, max_tries_per_object=1
    )


def made_up(sent: Message) -> ObjectTree:
    """A reply of another node that names what `sent` will consist of, with other parts or none."""
    parts = [name for name in get_all_nested_objects(sent) if name != sent.object_id]
    row = [ObjectTree(object_id=ROW)]
    strange = [ObjectTree(object_id=name, children=row[: i % 2]) for i, name in enumerate(parts)]
    return ObjectTree(object_id="9" * 64, children=strange)


def test_flower_believes_the_first_list(tmp_path: Path) -> None:
    """If this fails, Flower has closed the hole, and `fedapp/deployment/objects.py` may go."""
    store = ObjectStoreFactory(str(tmp_path / "state.db")).store()
    store.preregister(RUN, made_up(message(1)))
    with pytest.raises(ValueError, match="different children"):
        listed(store, message(1))


@pytest.mark.parametrize("first", [True, False])
def test_a_list_that_is_made_up_changes_no_other_message(opened: Opened, first: bool) -> None:
    store, sent = opened(), message(1)
    if first:
        store.preregister(RUN, made_up(sent))
    names = listed(store, sent)
    assert sorted(names) == sorted(get_all_nested_objects(sent))  # all must be sent, and nothing else
    if not first:
        store.preregister(RUN, made_up(sent))
    upload(store, sent, names)
    content = received(store, sent).content
    np.testing.assert_array_equal(content.array_records["arrays"]["head"].numpy(), np.full(3, 1.0))
    assert content.config_records["config"]["round"] == 1
    assert store.get_object_tree(sent.object_id) == get_object_tree(sent)


def test_what_two_messages_share_is_kept_until_both_are_gone(opened: Opened) -> None:
    store, one, two = opened(), message(1), message(2)
    upload(store, one, listed(store, one))
    shared = set(get_all_nested_objects(one)) & set(get_all_nested_objects(two))
    missing = listed(store, two)
    assert shared and not shared & set(missing)  # a message is sent only as far as it is new
    upload(store, two, missing)
    strange = made_up(one)
    store.preregister(RUN, strange)
    store.delete(strange.object_id)
    store.delete(one.object_id)
    assert one.object_id not in store
    assert received(store, two).content.config_records["config"]["round"] == 1
    store.delete(two.object_id)
    assert len(store) == 0


def test_a_run_that_ends_takes_all_its_objects_along(opened: Opened) -> None:
    store, sent = opened(), message(1)
    upload(store, sent, listed(store, sent))
    store.preregister(RUN, made_up(message(2)))
    store.delete_objects_in_run(RUN)
    assert len(store) == 0


def test_a_list_that_comes_twice_counts_once(opened: Opened) -> None:
    store, sent = opened(), message(1)
    assert listed(store, sent) == listed(store, sent)
    store.delete(sent.object_id)
    assert len(store) == 0


def test_a_node_cannot_list_its_own_tree_as_a_part(opened: Opened) -> None:
    store = opened()
    root = "5" * 64
    tree = ObjectTree(object_id=root, children=[ObjectTree(object_id=objects.tree_name(root))])
    assert store.preregister(RUN, tree) == [root]
    assert store.get_object_tree(root) == tree


def test_the_name_of_an_object_is_the_hash_of_its_content(opened: Opened) -> None:
    store, sent = opened(), message(1)
    names = listed(store, sent)
    parts = get_all_nested_objects(sent)
    with pytest.raises(ValueError, match="does not match"):
        store.put(names[0], parts[names[1]].deflate())
    with pytest.raises(ValueError, match="does not match"):
        store.put(objects.tree_name(sent.object_id), b"another tree")
    assert store.get(names[0]) == b""


def test_a_superlink_that_starts_again_still_has_the_lists(tmp_path: Path) -> None:
    sent, stores = message(1), [objects.SqlStore(str(tmp_path / "state.db")) for _ in range(2)]
    for store in stores:
        store.initialize()
    upload(stores[0], sent, listed(stores[0], sent))
    assert stores[1].get_object_tree(sent.object_id) == get_object_tree(sent)
    assert len(list(iterate_object_tree(stores[1].get_object_tree(sent.object_id)))) > 5


def test_what_refers_to_a_removed_object_is_found_without_reading_whole_tables(tmp_path: Path) -> None:
    store = objects.SqlStore(str(tmp_path / "state.db"))
    assert "objects" in store.initialize()
    for table, column in (("object_children", "child_id"), ("run_objects", "object_id")):
        plan = store.query(f"EXPLAIN QUERY PLAN DELETE FROM {table} WHERE {column} = :id", {"id": ROW})
        assert f"USING INDEX fedapp_{table}" in str(plan) or f"USING COVERING INDEX fedapp_{table}" in str(plan), plan


def test_a_long_list_is_written_and_removed_with_few_statements(tmp_path: Path) -> None:
    store = objects.SqlStore(str(tmp_path / "state.db"))
    store.initialize()
    assert store._engine is not None
    statements: list[str] = []
    event.listen(store._engine, "before_cursor_execute", lambda c, cursor, words, *_: statements.append(words))
    names = [f"{number:064x}" for number in range(500)]
    listed = ObjectTree(object_id=ROW, children=[ObjectTree(object_id=name) for name in names])
    assert set(store.preregister(RUN, listed)) == {ROW, *names} == set(store.preregister(RUN, listed))
    other = ObjectTree(object_id="9" * 64, children=[ObjectTree(object_id=name) for name in names[:3]])
    store.preregister(RUN + 1, other)
    store.delete(ROW)
    assert {name for name in names if name in store} == set(names[:3]), "another message has them too"
    store.delete_objects_in_run(RUN)
    assert names[0] in store
    store.delete_objects_in_run(RUN + 1)
    assert len(store) == 0 and len(statements) < 600, "500 of them look for a name in this test"


def handled_by(handler: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a function stand in for all handlers of requests, and make these whole."""
    for handlers in (fleet_handlers, runtime_handlers):
        for name, old in vars(handlers).copy().items():
            if isfunction(old) and "state" in signature(old).parameters:
                monkeypatch.setattr(handlers, name, handler)
    objects.make_requests_atomic()


def test_a_message_that_cannot_be_counted_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is one transaction, so that its sender may ask again after an error."""
    state, done = SimpleNamespace(open=0), list[str]()

    @contextlib.contextmanager
    def session() -> Iterator[None]:
        try:
            yield
        except Exception:
            done.append("rolled back")
            raise

    def pull(request: str, state: Any, task: int = 0, store: str = "") -> Any:
        if request == "fails":
            raise OSError
        if request == "refused":
            return SimpleNamespace(stored=False)  # Flower has removed an upload that took too long
        if request == "wrong":
            raise KeyError("run\x1b[1m\n" * 99)
        return f"{request} {task} {store}"

    state.session = session
    handled_by(pull, monkeypatch)
    assert fleet_handlers.pull_messages(request="a", state=state, store="b") == "a 0 b"
    assert runtime_handlers.acquire_task("a", state, 1) == "a 1 " == runtime_handlers.push_messages("a", object(), 1)
    for handle in (fleet_handlers.push_messages, runtime_handlers.pull_messages, runtime_handlers.push_task_output):
        with pytest.raises(OSError):
            handle("fails", state)
    with pytest.raises(FlowerError) as refused:
        fleet_handlers.push_object(request="wrong", state=state)
    assert fleet_handlers.push_object(request="refused", state=state).stored is False
    assert done == ["rolled back"] * 4 and API_ERROR_MAP[refused.value.code].http_status_code == 400
    assert str(refused.value).isprintable() and len(str(refused.value)) < 600


def test_a_failure_that_flower_keeps_to_itself_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower answers that an object which it could not write was not wanted, and its sender throws the message away."""
    store = objects.SqlStore(str(tmp_path / "state.db"))
    store.initialize()

    def push(request: str, state: objects.SqlStore) -> Any:
        with contextlib.suppress(OperationalError):
            state.query(request)
        return SimpleNamespace(stored=False)

    handled_by(push, monkeypatch)
    with pytest.raises(OperationalError):
        fleet_handlers.push_object("INSERT INTO nowhere VALUES (1)", store)
    assert fleet_handlers.push_object("SELECT 1", store).stored is False


def test_an_object_with_a_wrong_name_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower suppresses the error of its store, and would keep what it wrote before."""
    store = objects.SqlStore(str(tmp_path / "state.db"))
    store.initialize()

    def push(request: str, state: objects.SqlStore) -> Any:
        state.preregister(RUN, ObjectTree(object_id=ROW))
        with contextlib.suppress(ValueError):
            state.put(ROW, request.encode())
        return SimpleNamespace(stored=False)

    handled_by(push, monkeypatch)
    with pytest.raises(FlowerError):
        fleet_handlers.push_object("another content", store)
    assert ROW not in store


def test_a_shared_object_stays_while_another_message_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store in memory reads and writes in several steps: another thread waits until a list is whole."""
    store, one, two = objects.MemoryStore(), message(1), message(2)
    upload(store, one, listed(store, one))
    held: list[bool] = []
    whole = objects._OwnLists.preregister

    def during(self: Any, run_id: int, tree: ObjectTree) -> list[str]:
        def taken() -> bool:
            free: bool = self.lock_store.acquire(blocking=False)
            if free:
                self.lock_store.release()
            return not free

        with ThreadPoolExecutor(1) as pool:
            held.append(pool.submit(taken).result())
        return whole(self, run_id, tree)

    monkeypatch.setattr(objects._OwnLists, "preregister", during)
    listed(store, two)
    assert held == [True]
