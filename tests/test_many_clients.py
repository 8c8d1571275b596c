"""Simulations of many clients: nobody is asked what is known, messages are shared, expensive scores are sampled."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import Message, RecordDict

from fedapp import server_app
from fedapp.client_app import app as client_app
from fedapp.config import from_flat
from fedapp.errors import BadRequest
from fedapp.method import Payload
from fedapp.tasks import simulated
from fedapp.transport import virtual
from fedapp.transport.local_grid import LocalGrid
from fedapp.transport.records import (
    ARRAYS,
    PARTS,
    Encoder,
    Records,
    parts,
    payload_of,
    reply_of,
    reply_records,
    sealed,
    together,
)
from fedapp.transport.request import RoundRequest
from fedapp.transport.virtual import Member
from tests import handmade
from tests.handmade import deterministic

SETTINGS = {
    "method": "lgfedavg", "clients": 9, "num-server-rounds": 2, "local-epochs": 1, "batch-size": 64,
    "fraction-train": 0.6, "partition": "dirichlet", "balanced-every": -1,
}  # fmt: skip


class Few(LocalGrid):
    """A grid with fewer nodes than clients, whose messages are for several clients."""

    one_at_a_time = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pushed: list[tuple[str, int, int]] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.pushed += [(m.metadata.message_type, m.metadata.dst_node_id, len(parts(m.content))) for m in messages]
        return super().push_messages(messages)


def served(out: Path, nodes: int, **settings: Any) -> Few:
    flat = from_flat({**SETTINGS, **settings, "out": str(out)}).to_flat()
    grid = Few(client_app, flat, nodes)
    server_app.serve(grid, flat)
    return grid


@pytest.mark.parametrize("method", ["lgfedavg", "cwfedavg"])
def test_numbers_do_not_depend_on_nodes_or_on_who_shares_a_message(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node and one message for each client, or two nodes and messages for several: the same bits."""
    served(tmp_path / "plain", 9, method=method)
    monkeypatch.setattr(virtual, "MANY", 2)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    grid = served(tmp_path / "shared", 2, method=method)
    assert {node for _, node, _ in grid.pushed} == {1000, 1001}
    assert any(several > 1 for kind, _, several in grid.pushed if kind == "train")
    assert sum(kind == "query.register" for kind, _, _ in grid.pushed) <= 2
    for name in ("rounds.csv", "clients.csv", "final.csv"):
        a, b = (deterministic(pd.read_csv(tmp_path / run / name)) for run in ("plain", "shared"))
        pd.testing.assert_frame_equal(a, b, check_exact=True)
    assert len(pd.read_csv(tmp_path / "shared" / "final.csv")) == 9


def test_a_client_that_fails_takes_nobody_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "MANY", 2)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    inside = simulated.simulated_task

    def broken(config: Any, client: int, *rest: Any) -> Any:
        if client == 4:
            raise ValueError("no room")
        return inside(config, client, *rest)

    monkeypatch.setattr(simulated, "simulated_task", broken)
    out = tmp_path / "run"
    served(out, 3, **{"fraction-train": 1.0, "min-replies": 0.5})
    dropped = pd.read_csv(out / "dropped.csv")
    assert set(dropped["client"]) == {4} and dropped["reason"].str.contains("no room").all()
    assert set(pd.read_csv(out / "final.csv")["client"]) == set(range(9)) - {4}


def test_in_one_process_scores_share_a_message_and_nothing_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies with models are used one at a time, whatever their number."""

    class Alone(Few):
        one_at_a_time = True

    def result(name: str) -> tuple[Path, list[tuple[str, int]]]:
        flat = from_flat({**SETTINGS, "out": str(tmp_path / name)}).to_flat()
        grid = Alone(client_app, flat, 3)
        server_app.serve(grid, flat)
        return tmp_path / name, [(kind, several) for kind, _, several in grid.pushed]

    plain, sent = result("plain")
    assert {several for _, several in sent} == {0}
    monkeypatch.setattr(virtual, "MANY", 2)
    monkeypatch.setattr(virtual, "MOST", 4)
    shared, sent = result("shared")
    assert [several for kind, several in sent if kind == "evaluate"] == [4, 4, 0], "nine clients, the last one alone"
    assert {several for kind, several in sent if kind != "evaluate"} == {0}
    for name in ("rounds.csv", "clients.csv", "final.csv"):
        assert deterministic(pd.read_csv(plain / name)).equals(deterministic(pd.read_csv(shared / name))), name


def test_a_worker_that_is_killed_is_named_for_each_client_of_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(virtual, "MANY", 2)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    app, found = client_app, []

    def dying(message: Message, context: Any) -> Message:
        several = parts(message.content)
        if message.metadata.message_type == "train" and several and not found:
            found.extend(several)
            raise RuntimeError("the worker is gone")
        return app(message, context)

    flat = from_flat({**SETTINGS, "fraction-train": 1.0, "min-replies": 0.1, "out": str(tmp_path / "run")}).to_flat()
    server_app.serve(Few(dying, flat, 3), flat)
    dropped = pd.read_csv(tmp_path / "run" / "dropped.csv")
    assert len(set(found)) > 1 and set(dropped["client"]) == set(found)
    assert dropped["reason"].str.contains("the worker is gone").all()


def test_data_that_differ_between_server_and_worker_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_app, "Member", lambda c, train, *rest: Member(c, train + 1, *rest))
    with pytest.raises(BadRequest, match="a worker has Member"):
        served(tmp_path / "run", 2)


def test_contents_are_joined_and_parted_without_copies() -> None:
    assert parts(RecordDict()) == {} and parts(sealed(Records({ARRAYS: {}}, {}, {}))) == {}
    encoder, common = Encoder(shared=True), np.ones(4, np.float32)
    content = {}
    for c in (3, 12, 5, 7):
        own = {"own": np.full(2, c, np.float32)} if c == 5 else {}
        given = {"w": common} if c != 7 else {}
        content[c], _ = encoder.records(
            Payload(own, given, {"c": c, "x": float("nan")}), RoundRequest(round=c, balanced=True)
        )
    joined = together(content)
    assert set(joined) == {ARRAYS, f"{ARRAYS}@5", PARTS}, "one record for the clients that get the same"
    found = parts(joined)
    assert list(found) == list(content) and not found[3].has_error()
    for c, part in found.items():
        alone, request = payload_of(Message(sealed(content[c]), 1, "train"))
        with_others, its_request = payload_of(part, checked=True)
        assert handmade.equal(alone.arrays, with_others.arrays) and request == its_request
        assert repr(alone.scalars) == repr(with_others.scalars)
        assert all(a.flags.writeable for a in with_others.arrays.values())
    first, second = (payload_of(found[c], checked=True)[0].arrays["w"] for c in (3, 12))
    first += 1
    assert second.max() == common.max() == 1, "what one client does to its arrays is not seen by another"
    a, b = (found[c].content.array_records[ARRAYS]["w"] for c in (3, 5))
    assert a.data is b.data, "pickle writes one object once"


def test_replies_keep_their_numbers_and_who_sent_arrays() -> None:
    sent = {
        4: reply_records({"h": np.ones(2, np.float32)}, {"n": 3, "loss": 0.1, "of": [1, 2]}, {"client": 4}, "fp16"),
        9: reply_records({}, {"n": np.int64(2), "loss": float("nan"), "of": [0.5]}, {"error": "it's broken"}, "fp16"),
    }
    found = parts(together(sent))
    for c, records in sent.items():
        alone = reply_of(Message(sealed(records), 1, "train"))
        got = reply_of(found[c])
        assert handmade.equal(alone[0], got[0]) and repr(alone[1:]) == repr(got[1:])
    assert not reply_of(found[9])[0] and reply_of(found[4])[0]["h"].dtype == np.float32
