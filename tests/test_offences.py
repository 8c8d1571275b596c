"""Who is blocked, for what, for how long, and that honest clients are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import Message

from fedapp.config import from_flat
from fedapp.engines.local import run as resume
from fedapp.errors import BadRequest
from fedapp.transport.client_manager import RoundFailed
from fedapp.transport.offences import STRIKES, Blocked, Offence, Offences
from fedapp.transport.records import INFO
from tests.liars import change_arrays, federate
from tests.test_robust import QUICK

FEW: dict[str, Any] = {"method": "lgfedavg", "min_replies": 0.5, **QUICK}


def bad(*clients: int) -> list[Offence]:
    return [Offence(1, c, "train", "3e38") for c in clients]


def test_the_third_time_and_never_where_most_are_bad() -> None:
    found = Offences()
    assert [found.judge(bad(2), 4), found.judge(bad(2, 3), 4)] == [[], []]
    assert found.judge(bad(0, 1, 2), 4) == [], "most of them: the model is spoiled, not the clients"
    again = Offences.of(found.state())
    assert again == found and again.strikes == {2: 2, 3: 1} and STRIKES == 3
    assert [o.client for o in again.judge(bad(2, 3), 4)] == [2]
    again.blocked[2] = Blocked(4, 2, 77, "train", "3e38")
    assert Offences.of(again.state()) == again and again.nodes == {77}


def impossible(kind: str, reply: Message) -> Message:
    if kind == "train":
        reply.content[INFO]["client"] = 5
    return reply


def asked(out: Path) -> list[tuple[int, int]]:
    rows = pd.read_csv(out / "dropped.csv")
    return list(zip(rows["round"], rows["client"], strict=True))


def test_who_sends_the_impossible_gets_no_more_messages_in_the_run_and_its_resumes(tmp_path: Path) -> None:
    run = federate(tmp_path / "run", [1], impossible, 4, rounds=2, **FEW)
    assert run.summary["ok"] and asked(run.out) == [(1, 1)] and run.summary["blocked"] == [1]
    row = pd.read_csv(run.out / "blocked.csv").to_dict("records")[0]
    assert (row["round"], row["client"], row["node"], row["stage"]) == (1, 1, 1001, "train")
    assert "answers as client 5" in row["reason"]
    assert list(run.rounds["clients"]) == [3, 3] and sorted(run.final["client"]) == [0, 2, 3]
    (run.out / "blocked.csv").unlink()  # the checkpoint knows too
    again = resume(resume=run.out, rounds=3)
    assert list(again.rounds["clients"]) == [3, 3, 3] and asked(run.out) == [(1, 1)]
    assert again.summary["blocked"] == [1]


def test_a_block_of_a_round_that_failed_is_remembered(tmp_path: Path) -> None:
    """There is no checkpoint of that round; the table says who it was."""

    def late(kind: str, reply: Message) -> Message:
        return impossible(kind, reply) if reply.metadata.group_id == "2" else reply

    with pytest.raises(RoundFailed, match="min-replies asks for 3"):
        federate(tmp_path / "run", [1], late, 3, rounds=2, **{**FEW, "min_replies": 1.0})
    with pytest.raises(BadRequest, match="wait-timeout"):
        resume(resume=tmp_path / "run", rounds=2, wait_timeout=0.1)


def test_values_out_of_range_block_the_third_time(tmp_path: Path) -> None:
    def huge(kind: str, reply: Message) -> Message:
        return change_arrays(reply, lambda n, a: a * np.float32(1e9)) if kind == "train" else reply

    run = federate(tmp_path / "run", [1], huge, 3, rounds=4, **FEW)
    assert asked(run.out) == [(1, 1), (2, 1), (3, 1)] and run.summary["blocked"] == [1]
    row = pd.read_csv(run.out / "blocked.csv").iloc[0]
    assert row["round"] == 3 and row["reason"].startswith("values out of range for the third time: 'head.")


@pytest.mark.parametrize("few", [2, 3])
def test_min_clients_ends_a_run_that_lost_too_many(few: int, tmp_path: Path) -> None:
    if few == 2:
        assert federate(tmp_path / "run", [1], impossible, 3, min_clients=2, **FEW).summary["ok"]
        return
    with pytest.raises(
        RoundFailed, match=r"2 clients are left, and the run needs 3 \(min-clients\).*client 1: the node"
    ):
        federate(tmp_path / "run", [1], impossible, 3, min_clients=3, **FEW)


def test_min_clients_fits_clients() -> None:
    with pytest.raises(BadRequest, match="min-clients = 4, but clients = 3"):
        from_flat({"clients": 3, "min-clients": 4})


def test_a_liar_that_spoils_the_model_blocks_no_honest_client(tmp_path: Path) -> None:
    """Its own replies pass, and those of all others are NaN: they are dropped, and asked again."""

    def nan(kind: str, reply: Message) -> Message:
        return change_arrays(reply, lambda n, a: a * np.float32(np.nan)) if kind == "train" else reply

    run = federate(tmp_path / "run", [0, 1, 2], nan, 4, rounds=4, **{**FEW, "min_replies": 0.25})
    assert len(asked(run.out)) == 12 and "blocked" not in run.summary
