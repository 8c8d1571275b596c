"""States that are lost, older than the server knows, or another client's: named, never silently fresh."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import ConfigRecord

from fedapp import server_app
from fedapp.client_app import app as client_app
from fedapp.config import from_flat
from fedapp.engines.local import RunResult, run
from fedapp.learning.state import ClientStore, Expected, StateError, read_safetensors
from fedapp.transport import checkpoint
from fedapp.transport.ledger import digests_of
from fedapp.transport.local_grid import LocalGrid
from fedapp.transport.traffic import RoundFailed

Tiny = Callable[..., RunResult]
Between = Callable[[Path, int], None]
"""What happens to the states of all clients, `OUT/state/run`, before a round."""


def folder_of(out: Path, client: int) -> Path:
    return out / "state" / "run" / str(client)


def lose(out: Path, client: int = 1) -> None:
    shutil.rmtree(folder_of(out, client))


def older(out: Path) -> None:
    """Client 1's disk comes back from a copy of one round before."""
    for path in sorted(folder_of(out, 1).glob("*.0*.safetensors"))[1:]:
        path.unlink()


def swap(out: Path) -> None:
    shutil.rmtree(folder_of(out, 1))
    shutil.copytree(folder_of(out, 2), folder_of(out, 1))


def other(out: Path) -> None:
    """Another state under client 1's own name: another training wrote it."""
    path = sorted(folder_of(out, 1).glob("*.0*.safetensors"))[-1]
    arrays, header = read_safetensors(path)
    folder, token = path.parent, path.name.split(".")[0]
    changed = {name: a + 1 if a.dtype.kind == "f" else a for name, a in arrays.items()}
    ClientStore(folder, str(header["method"]), token).save(int(str(header["round"])), changed)


def damage(out: Path) -> None:
    path = sorted(folder_of(out, 1).glob("*.0*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:-3])


class Broken(LocalGrid):
    """A simulation in which something happens to the states between rounds, or to replies on their way."""

    def __init__(self, flat: Mapping[str, Any], before: Mapping[int, Callable[[Path], None]], lost: set[int]) -> None:
        super().__init__(client_app, flat, 3)
        self.out, self.before, self.lost = Path(str(flat["out"])), dict(before), lost
        self.server_round = 0

    def push_messages(self, messages: Any) -> Any:
        messages = list(messages)
        if {m.metadata.message_type for m in messages} == {"train"}:
            self.server_round = int(messages[0].metadata.group_id.split()[0])
            self.before.pop(self.server_round, lambda out: None)(self.out)
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Any) -> Any:
        replies = list(super().pull_messages(message_ids))
        for reply in replies:
            if self.server_round in self.lost and reply.metadata.src_node_id == 1001 and not reply.has_error():
                reply.content["info"] = ConfigRecord({"error": "lost on the way", "client": 1})
        return replies


def start(
    out: Path, before: Mapping[int, Callable[[Path], None]], lost: set[int] | None = None, **values: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    settings = {"method": "lgfedavg", "clients": 3, "num-server-rounds": 4, "local-epochs": 1, "batch-size": 64,
                "min-replies": 0.5, "out": str(out)}  # fmt: skip
    flat = from_flat(settings | values).to_flat()
    events: list[dict[str, Any]] = []
    return server_app.serve(Broken(flat, before, lost or set()), flat, lambda e: events.append(dict(e))), events


def dropped(out: Path) -> list[tuple[int, int, str]]:
    path = out / "dropped.csv"
    table = pd.read_csv(path) if path.is_file() else pd.DataFrame(columns=["round", "client", "reason"])
    return list(zip(table["round"], table["client"], table["reason"], strict=True))


@pytest.mark.full
@pytest.mark.parametrize(
    ("happens", "words"),
    [
        (lose, "holds no state of this run"),
        (older, "the file is older than this client's last reply"),
        (swap, "client is '2', expected '1'"),
        (other, "or another's"),
        (damage, "cannot be read"),
    ],
)
def test_a_client_whose_state_is_not_its_last_one_is_named_and_left_out(
    happens: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    summary, _ = start(tmp_path / "a", {3: happens})
    rows = dropped(tmp_path / "a")
    assert summary["warnings"] == [
        f"no valid reply for the rest of the run: client 1 since round 3 (train: {rows[0][2]})"
    ]
    assert {client for _, client, _ in rows} == {1} and [r for r, _, _ in rows] == [3, 4, 4]  # 4 is scored too
    assert all(words in reason for _, _, reason in rows)
    assert list(pd.read_csv(tmp_path / "a" / "rounds.csv")["clients"]) == [3, 3, 2, 2]


def test_with_restart_it_begins_anew_and_the_tables_say_so(tmp_path: Path) -> None:
    summary, _ = start(tmp_path / "a", {3: lose}, **{"lost-state": "restart"})
    clients = pd.read_csv(tmp_path / "a" / "clients.csv")
    marked = clients[clients["restarted"] == 1]
    assert list(zip(marked["round"], marked["client"], strict=True)) == [(3, 1)] and not dropped(tmp_path / "a")
    assert pd.read_csv(tmp_path / "a" / "rounds.csv")["restarted"].tolist() == [0, 0, pytest.approx(1 / 3), 0]
    assert summary["warnings"] == ["client 1 started again in round 3, because its stored state was lost"]
    start(tmp_path / "b", {}, **{"lost-state": "restart"})
    whole = pd.read_csv(tmp_path / "b" / "clients.csv")
    columns = [c for c in clients if not c.endswith("seconds")]
    early = clients["round"] < 3
    pd.testing.assert_frame_equal(clients[early][columns], whole[early][columns], check_exact=True)
    third = (clients["round"] == 3) & (clients["client"] == 1)
    assert float(clients[third]["received_accuracy"].iloc[0]) != float(whole[third]["received_accuracy"].iloc[0])


def test_replies_that_are_lost_on_the_way_do_not_look_like_a_lost_state(tmp_path: Path) -> None:
    """The client goes on from what it made meanwhile; longer than it keeps files, too."""
    summary, _ = start(tmp_path / "a", {}, {2, 3, 4, 5}, **{"num-server-rounds": 7})
    assert not summary["warnings"] and [(r, c) for r, c, _ in dropped(tmp_path / "a")] == [
        (2, 1),
        (3, 1),
        (4, 1),
        (5, 1),
    ]
    start(tmp_path / "b", {6: older}, {2, 3, 4, 5}, **{"num-server-rounds": 6})
    assert [(r, c) for r, c, _ in dropped(tmp_path / "b")] == [(2, 1), (3, 1), (4, 1), (5, 1)]
    summary, _ = start(tmp_path / "c", {}, {2, 4})
    assert summary["warnings"] == [
        "no valid reply for the rest of the run: client 1 since round 4 (train: lost on the way)"
    ]


def test_where_the_server_sends_all_a_lost_state_costs_nothing(tmp_path: Path) -> None:
    start(tmp_path / "a", {3: lose}, method="fedavg")
    start(tmp_path / "b", {}, method="fedavg")
    a, b = (pd.read_csv(tmp_path / x / "clients.csv") for x in "ab")
    columns = [c for c in a if not c.endswith("seconds")]
    pd.testing.assert_frame_equal(a[columns], b[columns], check_exact=True)
    assert not dropped(tmp_path / "a")


def test_where_the_server_sends_all_a_damaged_state_is_named_and_costs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path / "a", {3: damage}, method="fedavg")
    start(tmp_path / "b", {}, method="fedavg")
    a, b = (pd.read_csv(tmp_path / x / "clients.csv") for x in "ab")
    columns = [c for c in a if not c.endswith("seconds")]
    pd.testing.assert_frame_equal(a[columns], b[columns], check_exact=True)
    assert not dropped(tmp_path / "a")
    (line,) = [text for text in capsys.readouterr().out.splitlines() if "ignoring a damaged state file" in text]
    assert "000002.safetensors cannot be read" in line


def test_but_its_model_as_last_trained_is_not_scored_in_place_of_another(tmp_path: Path) -> None:
    start(tmp_path / "a", {4: lambda out: None}, method="fedavg", **{"final-training": False})
    assert not dropped(tmp_path / "a")

    class Late(Broken):
        def push_messages(self, messages: Any) -> Any:
            messages = list(messages)
            if {m.metadata.message_type for m in messages} == {"evaluate"}:
                lose(self.out)
            return super().push_messages(messages)

    flat = from_flat({"method": "fedavg", "clients": 3, "num-server-rounds": 2, "local-epochs": 1, "batch-size": 64,
                      "min-replies": 0.5, "final-training": False, "out": str(tmp_path / "b")}).to_flat()  # fmt: skip
    server_app.serve(Late(flat, {}, set()), flat)
    assert [(r, c) for r, c, _ in dropped(tmp_path / "b")] == [(2, 1)]


def test_private_arrays_beside_a_whole_model_count_as_state(tmp_path: Path) -> None:
    """Nothing but `own/` is read where the server sends all; that a client has such arrays, the server learns."""
    store = ClientStore(tmp_path / "f" / "1", "m", "aa")
    store.save(1, {"own/c": np.ones(2), "model/w": np.ones(3)})
    for binding in (True, False):
        again = ClientStore(tmp_path / "f" / "1", "m", "aa", expected=Expected("0" * 32, binding))
        if binding:
            with pytest.raises(StateError, match="expected '0000"):
                again.load(2, "own/", needed=False)
        else:
            assert again.load(2, "own/", needed=False) is not None
        with pytest.raises(StateError):
            again.load(2, "own/")
    known = ClientStore(tmp_path / "f" / "1", "m", "aa", expected=Expected(store.written))
    assert known.load(2, "own/") is not None


def test_the_server_keeps_what_it_knows_in_its_checkpoint(tiny: Tiny, tmp_path: Path) -> None:
    common: dict[str, Any] = {"method": "lgfedavg", "clients": 3, "fraction_train": 0.67}
    whole = tiny(rounds=4, out=tmp_path / "whole", **common)
    tiny(rounds=2, out=tmp_path / "part", **common)
    found = checkpoint.latest(tmp_path / "part" / "checkpoint")
    assert found is not None
    for client, (digest, binds) in digests_of(found[2]["Cohort"]).items():
        stored = ClientStore(folder_of(tmp_path / "part", client), "lgfedavg", token(tmp_path / "part")).load(3)
        assert stored is not None and stored.digest == digest and binds is True
    rest = run(resume=tmp_path / "part", rounds=4)
    columns = [c for c in whole.rounds if not c.endswith("seconds")]
    pd.testing.assert_frame_equal(rest.rounds[columns], whole.rounds[columns], check_exact=True)
    lose(tmp_path / "part", 0)
    with pytest.raises(RoundFailed, match=r"client 0: .*holds no state of this run.*lost-state=restart"):
        run(resume=tmp_path / "part", rounds=6)
    again = run(resume=tmp_path / "part", rounds=6, lost_state="restart")
    clients = again.clients
    assert list(clients["client"][clients["restarted"] == 1]) == [0] and clients["restarted"].isna().sum() > 0


def token(out: Path) -> str:
    return str(json.loads((out / "versions.json").read_text())["run"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"state": "0" * 32, "state-from": "1" * 32}, "it went on from the state '1111"),
        ({"state": "../../etc"}, "is invalid"),
        ({"state": 5}, "is invalid"),
        ({"state": "0" * 32, "state-lost": "my dog"}, "does not allow: my dog"),
    ],
)
def test_what_a_client_reports_of_its_state_is_checked(facts: dict[str, Any], words: str, tmp_path: Path) -> None:
    class Lies(Broken):
        def pull_messages(self, message_ids: Any) -> Any:
            replies = list(super().pull_messages(message_ids))
            for reply in replies:
                if self.server_round == 2 and reply.metadata.src_node_id == 1001 and "state" in reply.content["info"]:
                    reply.content["info"].update(facts)
            return replies

    flat = from_flat({"method": "lgfedavg", "clients": 3, "num-server-rounds": 3, "local-epochs": 1, "batch-size": 64,
                      "min-replies": 0.5, "out": str(tmp_path / "a")}).to_flat()  # fmt: skip
    server_app.serve(Lies(flat, {}, set()), flat)
    ((server_round, client, reason),) = dropped(tmp_path / "a")
    assert (server_round, client) == (2, 1) and words in reason
