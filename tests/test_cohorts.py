"""Replies that do not count: each kind of fault is named, recorded and bounded."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedapp import server_app
from fedapp.client_app import app as client_app
from fedapp.config import from_flat
from fedapp.errors import BadRequest
from fedapp.method import Payload
from fedapp.tasks.simulated import federated
from fedapp.transport import cohort, nodes, virtual
from fedapp.transport.local_grid import FIRST_NODE, LocalGrid
from fedapp.transport.nodes import NodeCohort
from fedapp.transport.offences import Blocked
from fedapp.transport.records import INFO, METRICS
from fedapp.transport.request import RoundRequest
from fedapp.transport.traffic import RoundFailed
from fedapp.transport.virtual import Member, VirtualCohort
from tests.handmade import exchange

Change = Callable[[Message], Message | None]


class Faulty(LocalGrid):
    """A grid that changes the train replies of client 1."""

    def __init__(self, change: Change, clients: int, flat: dict[str, Any], first: int = 1) -> None:
        super().__init__(client_app, flat, clients)
        self.change = change
        self.first = first
        self.trains = 0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for reply in super().pull_messages(message_ids):
            if reply.metadata.message_type == "train" and reply.metadata.src_node_id == 1001:
                self.trains += 1
                changed = self.change(reply) if self.trains >= self.first else reply
                if changed is not None:
                    replies.append(changed)
            else:
                replies.append(reply)
        return replies


def arrays(reply: Message) -> ArrayRecord:
    return reply.content.array_records["arrays"]


def rename(reply: Message) -> Message:
    record = arrays(reply)
    reply.content["arrays"] = ArrayRecord({("other" if n == "head.bias" else n): a for n, a in record.items()})
    return reply


def put(name: str, value: np.ndarray) -> Change:
    def change(reply: Message) -> Message:
        record = dict(arrays(reply).items())
        record[name] = FlowerArray(value)
        reply.content["arrays"] = ArrayRecord(record)
        return reply

    return change


def number(key: str, value: float) -> Change:
    def change(reply: Message) -> Message:
        reply.content.metric_records[METRICS][key] = value
        return reply

    return change


def failed(reply: Message) -> Message:
    info = ConfigRecord({"error": "Traceback ...\nValueError: boom", "stage": "train", "client": 1})
    empty = {"arrays": ArrayRecord(), METRICS: MetricRecord({"num-examples": 0}), INFO: info}
    reply.content = RecordDict(empty)  # type: ignore[arg-type]
    return reply


def nothing(reply: Message) -> None:
    return None


def garbage(reply: Message) -> Message:
    reply.content = RecordDict()
    return reply


FAULTS: dict[str, tuple[Change, str]] = {
    "missing name": (rename, "arrays missing: head.bias"),
    "foreign name": (put("features.secret", np.zeros(3, np.float32)), "is not an array that lgfedavg shares"),
    "wrong shape": (put("head.bias", np.zeros(4, np.float32)), "shape (4,), expected (10,)"),
    "wrong dtype": (put("head.bias", np.zeros(10, np.int64)), "dtype int64"),
    "NaN": (put("head.bias", np.full(10, np.nan, np.float32)), "NaN or infinity"),
    "infinity": (put("head.bias", np.full(10, np.inf, np.float32)), "NaN or infinity"),
    "zero count": (number("num-examples", 0), "num-examples is 0"),
    "negative count": (number("num-examples", -5), "num-examples is -5"),
    "error reply": (failed, "ValueError: boom"),
    "no content": (garbage, "arrays missing"),
    "never comes": (nothing, "no answer within"),
}


BLOCKED = ("missing name", "foreign name", "wrong shape", "wrong dtype", "no content")
"""Faults that our client code cannot have: the client is asked once."""


def go(tmp_path: Path, change: Change, least: float, first: int = 1) -> dict[str, Any]:
    values = {
        "method": "lgfedavg", "clients": 3, "num-server-rounds": 2, "local-epochs": 1, "batch-size": 64,
        "min-replies": least, "round-timeout": 1.0 if change is nothing else 60.0, "out": str(tmp_path / "run"),
    }  # fmt: skip
    flat = from_flat(values).to_flat()
    return server_app.serve(Faulty(change, 3, flat, first), flat)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_the_round_goes_on(fault: str, tmp_path: Path) -> None:
    change, reason = FAULTS[fault]
    summary = go(tmp_path, change, least=0.6)
    rounds = (1,) if fault in BLOCKED else (1, 2)
    assert summary["ok"] and summary["dropped"] == len(rounds) and summary.get("blocked", []) == [1] * (rounds == (1,))
    rows = (tmp_path / "run" / "dropped.csv").read_text().splitlines()
    for line, server_round in zip(rows[1:], rounds, strict=True):
        assert line.startswith(f"{server_round},1,train,") and reason in line.replace('"', "")
    clients = (tmp_path / "run" / "clients.csv").read_text()
    assert "\n1,0," in clients and "\n1,1," not in clients and "\n1,2," in clients


@pytest.mark.full
@pytest.mark.parametrize("fault", ["NaN", "error reply", "never comes"])
def test_too_few_good_replies_end_the_run_truthfully(fault: str, tmp_path: Path) -> None:
    change, reason = FAULTS[fault]
    with pytest.raises(RoundFailed, match="min-replies asks for 3"):
        go(tmp_path, change, least=1.0, first=2)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    error = json.loads((tmp_path / "run" / "error.json").read_text())
    assert summary["ok"] is False and reason in error["message"] and "client 1" in error["message"]
    assert error["exit"] == 1
    if fault == "error reply":
        assert (error["client"], error["round"], error["stage"]) == (1, 2, "train")
        assert "Traceback" in error["traceback"]
    assert (tmp_path / "run" / "rounds.csv").read_text().count("\n") == 2, "round 1 is kept, round 2 is not written"


def test_a_dropped_reply_changes_nothing_but_its_own_weight(tmp_path: Path) -> None:
    """Averaging without client 1 equals averaging the two others."""
    from fedapp.learning.state import read_safetensors

    go(tmp_path, FAULTS["NaN"][0], least=0.6)
    got, _ = read_safetensors(tmp_path / "run" / "models" / "last.safetensors")
    assert all(np.isfinite(a).all() for a in got.values())


class Deaf(LocalGrid):
    """A grid on which client 1 fails in one kind of exchange."""

    def __init__(self, kind: str, flat: dict[str, Any]) -> None:
        super().__init__(client_app, flat, 3)
        self.kind = kind

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        for reply in replies:
            if reply.metadata.message_type == self.kind and reply.metadata.src_node_id == 1001:
                failed(reply).content.config_records[INFO]["stage"] = self.kind
        return replies


def deaf(kind: str, out: Path, **values: Any) -> dict[str, Any]:
    base = {
        "method": "local", "clients": 3, "num-server-rounds": 2, "local-epochs": 1, "batch-size": 64,
        "min-replies": 0.6, "out": str(out), **values,
    }  # fmt: skip
    flat = from_flat(base).to_flat()
    return server_app.serve(Deaf(kind, flat), flat)


def rows_of(out: Path) -> list[tuple[int, str]]:
    with (out / "dropped.csv").open(newline="", encoding="utf-8") as f:
        rows = list(csv.DictReader(f))
    assert all(r["client"] == "1" and "boom" in r["reason"] for r in rows)
    return [(int(r["round"]), r["stage"]) for r in rows]


@pytest.mark.full
def test_what_is_dropped_after_a_round_is_recorded_under_that_round(tmp_path: Path) -> None:
    out = tmp_path / "run"
    summary = deaf("evaluate", out, **{"evaluate-every": 1})
    assert rows_of(out) == [(1, "evaluate"), (2, "evaluate")] and summary["dropped"] == 2
    longer = deaf("evaluate", out, **{"evaluate-every": 1, "num-server-rounds": 3, "resume": True})
    assert rows_of(out) == [(1, "evaluate"), (2, "evaluate"), (3, "evaluate")], "the final one of round 2 is done again"
    assert longer["dropped"] == 3
    ccvr = tmp_path / "ccvr"
    deaf("query.statistics", ccvr, method="ccvr")
    assert set(rows_of(ccvr)) == {(2, "query.statistics")}


def test_a_failed_final_evaluation_names_the_client_that_caused_it(tmp_path: Path) -> None:
    with pytest.raises(RoundFailed, match="round 2: 2 valid replies of 3"):
        deaf("evaluate", tmp_path / "run", **{"min-replies": 1.0})
    error = json.loads((tmp_path / "run" / "error.json").read_text())
    assert (error["client"], error["round"], error["stage"]) == (1, 2, "evaluate") and "boom" in error["traceback"]


class Empty(LocalGrid):
    """A grid without nodes."""

    def get_node_ids(self) -> Iterable[int]:
        return []


def test_a_simulation_without_nodes_ends(tmp_path: Path) -> None:
    values = {"method": "local", "clients": 3, "out": str(tmp_path / "run"), "wait-timeout": 0.5}
    flat = from_flat(values).to_flat()
    with pytest.raises(BadRequest, match=r"gave up after 0\.5 s: no node came"):
        server_app.serve(Empty(client_app, flat, 3), flat)
    assert json.loads((tmp_path / "run" / "error.json").read_text())["exit"] == 2


def test_clients_zero_takes_the_nodes_present(tmp_path: Path) -> None:
    values = {"method": "local", "num-server-rounds": 1, "local-epochs": 1, "out": str(tmp_path / "run")}
    flat = from_flat(values).to_flat()
    assert server_app.serve(LocalGrid(client_app, flat, 4), flat)["clients"] == 4


def test_models_that_disagree_on_what_is_shared_are_found_before_round_1(tmp_path: Path) -> None:
    values = {
        "method": "lgfedavg", "dataset": "npz", "clients": 2, "model": "cnn-a,fedgh-5", "data-dir": str(tmp_path),
        "out": str(tmp_path / "run"), "min-samples": 1, "partition": "iid",
    }  # fmt: skip
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (40, 28, 28), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", x_train=x, y_train=np.arange(40) % 4, x_test=x[:8], y_test=np.arange(8) % 4)
    flat = from_flat(values).to_flat()
    with pytest.raises(BadRequest, match=r"head.weight.*shape \(4, 512\).*shape \(4, 500\)"):
        server_app.serve(LocalGrid(client_app, flat, 2), flat)
    assert not (tmp_path / "run" / "rounds.csv").exists()


class Silent(LocalGrid):
    """Three clients that answer, and a fourth node that stays silent when asked to register until `wakes`."""

    extra = 1003

    def __init__(self, flat: dict[str, Any]) -> None:
        super().__init__(client_app, flat, 4)
        self.wakes = False
        self.requests = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.requests += sum(m.metadata.dst_node_id == self.extra for m in messages)
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        heard = [i for i in message_ids if i in self._waiting]
        awake = [i for i in heard if self.wakes or self._waiting[i].metadata.dst_node_id != self.extra]
        return super().pull_messages(awake)


def silent(**settings: Any) -> tuple[Silent, NodeCohort, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    grid = Silent(from_flat({"method": "local", "clients": 4}).to_flat())
    chosen = exchange(**{"wait_timeout": 60.0, "min_replies": 0.5, "round_timeout": 60.0, **settings})
    return grid, NodeCohort(grid, chosen, RoundRequest(), events.append), events


def test_a_silent_node_does_not_hold_the_start_nor_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "LATECOMERS", 0.2)
    grid, clients, events = silent()
    started = time.monotonic()
    assert [i.client for i in clients.gather(3)] == [0, 1, 2]
    assert [e["text"] for e in events] == ["1 node(s) that are online have not answered: starting without them"]
    assert clients.register() == [], "round 1 does not wait for it either"
    assert time.monotonic() - started < 30, "well before the limits of 60 seconds"
    grid.wakes = True
    assert clients.register() == [3] and grid.requests == 1, "its answer counts when it comes"
    assert clients.register() == [] and grid.requests == 1


class Slow(LocalGrid):
    """A grid on which a client answers every 0.3 seconds."""

    last = 0.0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        if time.monotonic() - self.last < 0.3:
            return []
        replies = list(super().pull_messages(message_ids))
        self.last = time.monotonic()
        return replies


def test_virtual_clients_that_take_turns_may_take_longer_than_the_limit_together() -> None:
    """One after the other is there within the limit of a second; all six are not."""
    config = from_flat({"method": "local", "clients": 6, "partition": "dirichlet"})
    grid = Slow(client_app, config.to_flat(), 6)
    clients = VirtualCohort(grid, exchange(wait_timeout=1.0), RoundRequest())
    own = federated(config, 6).partition.clients
    members = [Member(c, len(s.train), len(s.test), config.model.name_of(c), (1, 8, 8)) for c, s in enumerate(own)]
    assert len({m.examples for m in members}) > 4, "or too few are asked for this test"
    clients.by_size = True
    assert len(clients.enrol(members)) == 6


def test_a_lost_request_to_register_is_sent_again_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "LATECOMERS", 0.0)
    grid, clients, _ = silent()
    clients.gather(3)
    monkeypatch.setattr(nodes, "REGISTER_AGAIN", 0.0)
    started = time.monotonic()
    assert clients.register() == [] and grid.requests == 2
    assert time.monotonic() - started < 30
    grid.wakes = True
    assert clients.register() == [3]


def test_who_is_expected_is_waited_for_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "LATECOMERS", 0.0)
    _, clients, events = silent(wait_timeout=0.5)
    assert len(clients.gather(4)) == 3
    assert "waiting for 1 of 4 clients, missing 3; 1 node(s) that are online" in events[-1]["text"]
    _, clients, _ = silent(wait_timeout=0.5, min_replies=1.0)
    with pytest.raises(BadRequest, match=r"gave up after 0\.5 s: waiting for 1 of 4"):
        clients.gather(4)
    _, clients, _ = silent(wait_timeout=0.5)
    assert len(clients.gather(0)) == 3, "where no number is given, all that are online are waited for"


class Late(LocalGrid):
    """A grid whose nodes come online at the fifth look."""

    looks = 0

    def get_node_ids(self) -> Iterable[int]:
        self.looks += 1
        return super().get_node_ids() if self.looks > 4 else []


def test_a_resumed_run_without_a_blocked_client_waits_for_all_others() -> None:
    grid = Late(client_app, from_flat({"method": "local", "clients": 3}).to_flat(), 3)
    clients = NodeCohort(grid, exchange(wait_timeout=30.0, min_replies=0.5), RoundRequest(), poll=(0.002, 0.1))
    clients.offences.blocked[0] = Blocked(1, 0, FIRST_NODE, "train", "it lied")
    assert [i.client for i in clients.gather(3)] == [1, 2] and clients.fewest() == 2


def test_what_clients_were_sent_is_compared() -> None:
    a, b = np.zeros(3, np.float32), np.zeros(3, np.float32)
    same = cohort._content
    assert same(Payload(arrays={"x": a}, common={"y": a})) == same(Payload(arrays={"x": b}, common={"y": a}))
    assert same(Payload(arrays={"x": a})) != same(Payload(arrays={"x": a + 1}))
    assert same(Payload(common={"x": a})) != same(Payload(common={"x": b})), "arrays for all are the same objects"
    assert same(Payload(scalars={"n": 1})) != same(Payload(scalars={"n": 2}))


class SideBySide(LocalGrid):
    """A grid of one worker that hands out what it has been given in the order of the nodes, as Flower's simulation."""

    one_at_a_time = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.queue: dict[str, Message] = {}
        self.began: list[tuple[str, str, int]] = []
        self.most = 0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.most = max(self.most, len(self._waiting))
        new = [m for m in self._waiting.items() if m[0] not in self.queue]
        self.queue |= dict(sorted(new, key=lambda m: m[1].metadata.dst_node_id))
        self._waiting = {i: m for i, m in self.queue.items() if i in self._waiting}
        replies = list(super().pull_messages(message_ids))
        for reply in replies:
            meta = reply.metadata
            self.began.append((meta.message_type, meta.group_id, meta.src_node_id - FIRST_NODE))
        return replies

    def of(self, kind: str, server_round: int) -> list[int]:
        return [client for k, r, client in self.began if (k, r) == (kind, str(server_round))]


UNEQUAL = {
    "method": "fedavg", "clients": 8, "num-server-rounds": 2, "local-epochs": 1, "batch-size": 64, "alpha": 0.3,
    "partition": "dirichlet", "seed": 1,
}  # fmt: skip


def unequal(out: Path, grid: type[LocalGrid]) -> Any:
    flat = from_flat({**UNEQUAL, "out": str(out)}).to_flat()
    made = grid(client_app, flat, 8)
    server_app.serve(made, flat)
    return made


def sizes(out: Path) -> dict[int, int]:
    rows = pd.read_csv(out / "clients.csv")
    return dict(zip(rows["client"], rows["num_samples"], strict=True))


@pytest.mark.full
@pytest.mark.parametrize("held", [1 << 30, 500_000])
def test_the_largest_clients_begin_first_and_no_number_changes(
    held: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half go out at once, the rest by size; where memory is for three replies only the last three by id are sorted."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr(virtual, "WORTH_SORTING", 0.0)
    monkeypatch.setattr(virtual, "HELD_BYTES", held)
    plain, sorted_ = tmp_path / "plain", tmp_path / "sorted"
    assert unequal(plain, LocalGrid).one_at_a_time
    grid = unequal(sorted_, SideBySide)
    size = sizes(sorted_)
    for server_round in (1, 2):
        began = grid.of("train", server_round)
        assert sorted(began) == list(range(8))
        by_size = sorted(range(8) if held > 1 << 20 else range(5, 8), key=lambda c: -size[c])
        assert [size[c] for c in began if c in by_size[-3:]] == [size[c] for c in by_size[-3:]]
        if held > 1 << 20:
            assert set(began[:4]) == set(by_size[:4]) and began[4:] == by_size[4:]
        else:
            assert sorted(began[:5]) == list(range(5))
    for name in ("rounds.csv", "clients.csv", "final.csv"):
        a, b = pd.read_csv(plain / name), pd.read_csv(sorted_ / name)
        keep = [c for c in a.columns if not c.endswith("seconds")]
        pd.testing.assert_frame_equal(a[keep], b[keep], check_exact=True)
    assert (plain / "models" / "last.safetensors").read_bytes() == (
        sorted_ / "models" / "last.safetensors"
    ).read_bytes()


@pytest.mark.full
def test_short_exchanges_are_not_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lasts less than two seconds goes out at once from the second time on: in the order of the nodes."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr(virtual, "WORTH_SORTING", 1e9)
    grid = unequal(tmp_path / "run", SideBySide)
    assert grid.of("train", 1) != list(range(8)) and grid.of("train", 2) == list(range(8))


@pytest.mark.full
def test_few_of_many_messages_are_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert [virtual.messages_underway(n) for n in (1, 100, 1000, 10_000)] == [25_000, 250, 25, 16]
    monkeypatch.setattr(virtual, "messages_underway", lambda nodes: 3)
    grid = unequal(tmp_path / "run", SideBySide)
    assert grid.most == 3
    size = sizes(tmp_path / "run")
    asked = {c for k, _, c in grid.began if k == "query.register"}
    assert asked == {0, min(size, key=lambda c: (size[c], c))}, "the first client, and the one that settings fit least"
    assert sorted(grid.of("evaluate", 2)) == list(range(8))


@pytest.mark.parametrize("lasted", [0.1, 100.0])
def test_few_large_messages_are_in_flight(lasted: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run in any order, so all replies but one may wait for that of the first; each worker still has two."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    manager: Any = VirtualCohort(SimpleNamespace(), exchange(), RoundRequest())  # type: ignore[arg-type]
    manager.several = False
    manager.nodes = {c: c for c in range(100)}
    manager.infos = {c: SimpleNamespace(num_samples=1) for c in range(100)}  # type: ignore[misc]
    manager._lasted["train"] = lasted
    for size, most in ((1 << 10, 100), (32 << 20, 16), (45 << 20, 11), (1 << 30, 4), (5 << 30, 4)):
        order, at_once = manager._batches("train", range(100), size)
        assert sorted(c for batch in order for c in batch) == list(range(100))
        assert at_once == most if most < 100 else at_once >= 50
