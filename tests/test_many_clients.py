"""Simulations of many clients: nobody is asked what is known, messages are shared, expensive scores are sampled."""

from __future__ import annotations

import json
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
from fedapp.data.card import data_card
from fedapp.data.partitions import UNION
from fedapp.engines.local import RunResult, run
from fedapp.errors import BadRequest
from fedapp.method import Payload
from fedapp.tasks import scoring, simulated
from fedapp.transport import client_manager, virtual
from fedapp.transport.local_grid import LocalGrid
from fedapp.transport.records import ARRAYS, Encoder, parts, together
from fedapp.transport.virtual import Member, asked, batches, smallest
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
    monkeypatch.setattr(client_manager, "MANY", 2)
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
    monkeypatch.setattr(client_manager, "MANY", 2)
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


def test_a_worker_that_is_killed_is_named_for_each_client_of_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_manager, "MANY", 2)
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
    monkeypatch.setattr(server_app, "Member", lambda c, train, test, model: Member(c, train + 1, test, model))
    with pytest.raises(BadRequest, match="a worker has Member"):
        served(tmp_path / "run", 2)


def test_contents_are_joined_and_parted_without_copies() -> None:
    content = {c: RecordDict() for c in (3, 12)}
    assert parts(RecordDict()) == {}
    encoder, common = Encoder(), np.ones(4, np.float32)
    for c in content:
        content[c] = encoder.content(Payload(common={"w": common}, scalars={"c": c}), {"round": c})[0]
    found = parts(together(content))
    assert list(found) == [3, 12] and not found[3].has_error()
    assert all(found[c].content == content[c] for c in content)
    a, b = (found[c].content.array_records[ARRAYS]["w"] for c in content)
    assert a.data is b.data, "pickle writes one object once"


def test_messages_are_shares_of_the_work_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    found = list(batches(range(100), dict.fromkeys(range(100), 7), 0))
    assert [c for batch in found for c in batch] == list(range(100))
    assert [len(b) for b in found[:4]] == [13, 11, 10, 9] and [len(b) for b in found[-8:]] == [1] * 8
    assert max(len(b) for b in batches(range(2000), dict.fromkeys(range(2000), 1), 0)) == virtual.MOST
    assert all(len(b) == 1 for b in batches(range(50), dict.fromkeys(range(50), 1), virtual.MOST_BYTES))
    unequal = {0: 1000, **dict.fromkeys(range(1, 100), 1)}
    assert next(batches(range(100), unequal, 0)) == [0], "a large client has a message of its own"


def test_one_client_answers_for_its_kind() -> None:
    members = [Member(0, 9, 3, "a"), Member(1, 5, 3, "b"), Member(2, 4, 3, "a"), Member(3, 9, 1, "a")]
    assert asked(members) == {0: 0, 1: 1, 2: 0, 3: 0}
    assert asked(members, by_size=True) == {0: 0, 1: 1, 2: 2, 3: 0}
    assert smallest(members) == [1, 2]
    assert [virtual.hosts(n) for n in (1, 20, 100_000)] == [1, 20, 64]
    assert virtual.hosts(100, apart=True) == 100


# ---- scores of a sample --------------------------------------------------------------------------------------------


def plan(clients: int, share: float, size: int = 45, **values: Any) -> scoring.Scoring:
    config = from_flat(
        {"dataset": "mnist", "fraction-train": share, "num-server-rounds": 100, "local-epochs": 1, **values}
    )
    return scoring.scoring(config, dict.fromkeys(range(clients), size), 10, True, False)


def test_small_federations_are_scored_in_full() -> None:
    for found in (plan(100, 0.01), plan(500, 0.01, 20_000)):
        assert len(found.finalists) == len(found.balanced) == found.clients and found.images == UNION
        assert found.stated() == {} and found.each(3) == {}
    config = from_flat({"dataset": "mnist", "fraction-train": 0.001})
    real = scoring.scoring(config, dict.fromkeys(range(10_000), 5), 10, False, False)
    assert real.stated() == {}, "real nodes work side by side"


def test_large_ones_on_a_sample_that_is_stated() -> None:
    found = plan(10_000, 0.01)
    assert (len(found.finalists), len(found.balanced), found.images) == (500, 135, 500), "0.1 * 3 * 100 * 100 * 45 / 2"
    assert found.balanced < found.finalists
    assert found.stated() == {
        "sampled": {
            "trained": {"clients": 500, "of": 10_000}, "balanced": {"clients": 135, "of": 10_000, "images": 500}
        }
    }  # fmt: skip
    outside = next(c for c in range(10_000) if c not in found.finalists)
    assert found.each(outside) == {
        "balanced-images": 500, "balanced": False, "tune": False, "train": False, "received-only": True,
    }  # fmt: skip
    assert found.each(min(found.balanced)) == {"balanced-images": 500}
    assert len(plan(10_000, 0.05).finalists) == 2500, "five rounds' worth"
    assert plan(10_000, 0.01).finalists == found.finalists != plan(10_000, 0.01, seed=1).finalists
    assert plan(10_000, 0.01, protocols="trained").each(outside) is None
    given = plan(1000, 0.1, **{"final-clients": 40, "balanced-clients": 7})
    assert (len(given.finalists), len(given.balanced), given.images) == (40, 7, UNION)


def test_what_is_not_scored_is_empty_and_all_else_as_before(tmp_path: Path) -> None:
    common = {"method": "fedavg", "clients": 8, "rounds": 1, "local_epochs": 1, "batch_size": 64}
    whole: RunResult = run(out=tmp_path / "whole", **common)
    part: RunResult = run(out=tmp_path / "part", final_clients=3, balanced_clients=2, evaluate_every=1, **common)
    again, balanced = part.final["trained_accuracy"].notna(), part.final["trained_balanced"].notna()
    assert (again.sum(), balanced.sum()) == (3, 2) and part.final["received_accuracy"].notna().all()
    for column in ("received_accuracy", "received_loss", "trained_loss", "trained_balanced"):
        known = part.final[column].notna()
        pd.testing.assert_series_equal(part.final[column][known], whole.final[column][known], check_exact=True)
    summary = part.summary
    assert summary["headline"]["clients"] == 3 and summary["headline"]["of"] == 8
    assert summary["accuracy"]["trained"]["last"] == pytest.approx(whole.final["trained_accuracy"][again].mean())
    assert summary["sampled"]["balanced"] == {"clients": 2, "of": 8, "images": UNION}
    assert "sampled" not in whole.summary and whole.summary["headline"]["clients"] == 8


def test_the_balanced_score_of_a_sample_is_on_fewer_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "FEW_BALANCED", 3)
    monkeypatch.setattr(scoring, "LEAST", 20)
    monkeypatch.setattr(scoring, "SHARE", 0.01)
    monkeypatch.setattr(scoring, "PER_CLASS", 2)
    seen: list[int] = []
    inside = simulated.simulated_task

    def counted(config: Any, client: int, clients: int, device: Any, images: int) -> Any:
        task = inside(config, client, clients, device, images)
        seen.append(len(task.y_union))
        return task

    monkeypatch.setattr(simulated, "simulated_task", counted)
    out = tmp_path / "run"
    run(out=out, method="fedavg", clients=8, rounds=1, local_epochs=1, batch_size=64)
    assert 20 in seen
    stated = json.loads((out / "summary.json").read_text())["sampled"]["balanced"]
    assert stated["images"] == 20 and 3 <= stated["clients"] < 8


# ---- the data card -------------------------------------------------------------------------------------------------


def test_the_card_shows_the_first_clients_and_says_what_the_others_have() -> None:
    config = from_flat({"clients": 30, "min-samples": 2})
    data = simulated.federated(config, 30)
    card = data_card(data.dataset, data.partition)
    lines = card.text().splitlines()
    sizes = card.train[20:].sum(axis=1)
    [others] = [line for line in lines if line.startswith("and ")]
    assert f"and 10 more clients: training images {sizes.min()} to {sizes.max()}, median {np.median(sizes):g}" in others
    assert others.endswith(f"median {100 * np.median(card.majority[20:]):.1f}"), "as many digits as the range"
    assert len(card.text(max_clients=30).splitlines()) == len(lines) + 10 - 1
