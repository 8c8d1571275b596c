"""Who is blocked, for what, for how long, and that honest clients are not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pandas as pd
import pytest
from flwr.app import ArrayRecord, Message

from fedapp import server_app
from fedapp.config import from_flat
from fedapp.engines.local import run as resume
from fedapp.errors import BadRequest
from fedapp.federation import participants
from fedapp.federation.hook import Hooks, Setup
from fedapp.federation.hooks import soundness
from fedapp.federation.hooks.rollback import Rollback
from fedapp.federation.participants import Participants, Progress, stored
from fedapp.learning.state import ClientStore, read_safetensors
from fedapp.method import Reply, ServerContext
from fedapp.transport import checkpoint
from fedapp.transport.nodes import NodeCohort
from fedapp.transport.offences import STRIKES, Blocked, Dropped, Offences
from fedapp.transport.records import ARRAYS, INFO, METRICS
from fedapp.transport.traffic import RoundFailed
from strategies.base import Strategy
from tests.liars import Lie, change_arrays, federate
from tests.test_robust import QUICK, largest, state_after

FEW: dict[str, Any] = {"method": "lgfedavg", "min_replies": 0.5, **QUICK}


ALIKE = dict.fromkeys(range(4), "the same")


def bad(*clients: int) -> list[Dropped]:
    return [Dropped(1, c, "train", "3e38") for c in clients]


def test_the_third_time_and_never_where_most_are_bad() -> None:
    found = Offences()
    assert [found.judge(bad(2), ALIKE), found.judge(bad(2, 3), ALIKE)] == [[], []]
    assert found.judge(bad(0, 1, 2), ALIKE) == [], "most of them: the model is spoiled, not the clients"
    again = Offences.of(found.state())
    assert again == found and again.strikes == {2: 2, 3: 1} and STRIKES == 3
    assert [o.client for o in again.judge(bad(2, 3), ALIKE)] == [2]
    again.blocked[2] = Blocked(4, 2, 77, "train", "3e38")
    assert Offences.of(again.state()) == again and again.nodes == {77}


def test_a_spoiled_group_strikes_nobody_and_a_good_reply_takes_a_quarter_back() -> None:
    found = Offences()
    groups = {**dict.fromkeys(range(7), "a"), 7: "b", 8: "b", 9: "c"}
    for _ in range(STRIKES):
        assert found.judge(bad(7, 8, 9), groups) == []
    assert found.strikes == {}
    assert found.judge(bad(2, 7), groups, [0, 1, 8]) == [] and found.strikes == {2: 1, 7: 1}
    assert found.judge(bad(7), groups, [2]) == [] and found.strikes == {2: 0.75, 7: 2}
    for _ in range(3):
        found.judge([], groups, [2, 3])
    assert found.strikes == {7: 2} and Offences.of(found.state()) == found


@pytest.mark.parametrize(("every", "blocked"), [(1, 3), (2, 7), (3, 13), (4, 33), (5, None), (20, None)])
def test_taking_turns_with_good_replies_does_not_help_a_liar(every: int, blocked: int | None) -> None:
    """Who sends bad values in one of `every` trainings is blocked in which; the honest one in five never is."""
    found, when = Offences(), None
    for n in range(1000):
        wrong = n % every == 0
        if found.judge(bad(2) if wrong else [], ALIKE, () if wrong else (2,)) and when is None:
            when = n + 1
    assert when == blocked


def impossible(kind: str, reply: Message) -> Message:
    if kind == "train":
        reply.content[INFO]["secret"] = 5
    return reply


def asked(out: Path) -> list[tuple[int, int]]:
    rows = pd.read_csv(out / "dropped.csv")
    return list(zip(rows["round"], rows["client"], strict=True))


def test_who_sends_the_impossible_gets_no_more_messages_in_the_run_and_its_resumes(tmp_path: Path) -> None:
    run = federate(tmp_path / "run", [1], impossible, 4, rounds=2, **FEW)
    assert run.summary["ok"] and asked(run.out) == [(1, 1)] and run.summary["blocked"] == [1]
    row = pd.read_csv(run.out / "blocked.csv").to_dict("records")[0]
    assert (row["round"], row["client"], row["node"], row["stage"]) == (1, 1, 1001, "train")
    assert "unexpected fact 'secret'" in row["reason"]
    assert list(run.rounds["clients"]) == [3, 3] and sorted(run.final["client"]) == [0, 2, 3]
    (run.out / "blocked.csv").unlink()  # the checkpoint knows too
    again = resume(resume=run.out, rounds=3)
    assert list(again.rounds["clients"]) == [3, 3, 3] and asked(run.out) == [(1, 1)]
    assert again.summary["blocked"] == [1]


def test_who_answers_as_another_client_registers_again_once(tmp_path: Path) -> None:
    def other(kind: str, reply: Message) -> Message:
        if kind != "query.register":
            reply.content[INFO]["client"] = 5
        return reply

    run = federate(tmp_path / "run", [1], other, 4, rounds=3, **{**FEW, "method": "fedavg"})
    rows = pd.read_csv(run.out / "dropped.csv")
    assert list(zip(rows["round"], rows["client"], strict=True)) == [(1, 1), (2, 1)]
    assert rows["reason"].str.contains("answers as client 5").all() and run.summary["blocked"] == [1]


def test_a_block_of_a_round_that_failed_is_remembered(tmp_path: Path) -> None:
    """There is no checkpoint of that round; the table says who it was."""

    def late(kind: str, reply: Message) -> Message:
        return impossible(kind, reply) if reply.metadata.group_id == "2" else reply

    with pytest.raises(RoundFailed, match="min-replies asks for 3"):
        federate(tmp_path / "run", [1], late, 3, rounds=2, **{**FEW, "min_replies": 1.0})
    with pytest.raises(RoundFailed, match="blocked are client 1: unexpected fact"):
        resume(resume=tmp_path / "run", rounds=2, wait_timeout=0.1)


def test_values_out_of_range_block_the_third_time(tmp_path: Path) -> None:
    def huge(kind: str, reply: Message) -> Message:
        return change_arrays(reply, lambda n, a: a * np.float32(1e9)) if kind == "train" else reply

    def in_turn(kind: str, reply: Message) -> Message:
        return huge(kind, reply) if reply.metadata.group_id in {"1", "3", "5", "7"} else reply

    turns = federate(tmp_path / "turns", [1], in_turn, 3, rounds=8, evaluate_every=1, **FEW)
    assert [r for r, _ in asked(turns.out)] == [1, 3, 5, 7] and turns.summary["blocked"] == [1]
    run = federate(tmp_path / "run", [1], huge, 3, rounds=4, evaluate_every=1, **FEW)
    assert asked(run.out) == [(1, 1), (2, 1), (3, 1)] and run.summary["blocked"] == [1]
    row = pd.read_csv(run.out / "blocked.csv").iloc[0]
    assert row["round"] == 3 and row["reason"].startswith("values out of range too often: 'head.")


def test_bad_values_count_once_where_clients_are_evaluated_in_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The groups after that of the liar do not know what it was sent."""
    monkeypatch.setattr(participants, "MOST_EVALUATED", 2)

    def impossible_share(kind: str, reply: Message) -> Message:
        if kind == "evaluate":
            reply.content["metrics"]["received-balanced"] = 2.0
        return reply

    run = federate(tmp_path / "run", [1], impossible_share, 6, rounds=3, evaluate_every=1, **FEW)
    rows = pd.read_csv(run.out / "dropped.csv")
    assert list(zip(rows["round"], rows["stage"], strict=True)) == [(1, "evaluate"), (2, "evaluate"), (3, "evaluate")]
    assert run.summary["ok"] and "blocked" not in run.summary


@pytest.mark.parametrize("few", [2, 3])
def test_min_clients_ends_a_run_that_lost_too_many(few: int, tmp_path: Path) -> None:
    if few == 2:
        assert federate(tmp_path / "run", [1], impossible, 3, min_clients=2, **FEW).summary["ok"]
        return
    with pytest.raises(
        RoundFailed, match=r"2 clients are left, and the run needs 3 \(min-clients\).*client 1: unexpected fact"
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


# ---- rounds that do not count --------------------------------------------------------------------------------------


def grown(factor: float, rounds: set[str], kind: str = "train") -> Lie:
    """Multiply all arrays in some rounds."""

    def lie(stage: str, reply: Message) -> Message:
        hit = stage == kind and reply.metadata.group_id in rounds
        return change_arrays(reply, lambda n, a: a * np.float32(factor)) if hit else reply

    return lie


def test_without_a_limit_nobody_measures_a_reply() -> None:
    def check(reply: Any) -> str | None:
        return None

    assert soundness.bounded(check, {}, math.inf) is check
    assert soundness.bounded(check, {}, 1.0) is not check
    assert soundness.longest({"x": np.array([3.0, 4.0]), "times": 1}, {"x": np.zeros(2)}) == 5.0


def test_a_model_that_grew_too_much_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = federate(tmp_path / "run", [1], grown(50.0, {"1"}), 3, max_growth=10.0, **{**FEW, "method": "fedavg"})
    assert asked(run.out) == [(1, 1)] and list(run.rounds["void"]) == [0]
    assert "its model has norm" in pd.read_csv(run.out / "dropped.csv")["reason"][0]
    monkeypatch.setattr(soundness, "bounded", None)  # nothing is measured where nothing is limited
    free = federate(tmp_path / "free", [1], grown(50.0, {"1"}), 3, **{**FEW, "method": "fedavg"})
    assert free.summary["dropped"] == 0, "in a simulation nothing is limited unless asked for"


class Wild(Strategy):
    """A server whose own step makes too much of valid replies in some rounds."""

    records = ("noted",)
    rounds: ClassVar[set[int]] = set()
    factor: ClassVar[float] = 1e3

    def aggregate(self, state: Any, server_round: int, replies: Any) -> Any:
        new = super().aggregate(state, server_round, replies)
        scale = self.factor if server_round in self.rounds else 1.0
        noted = np.append(state.get("noted", np.zeros(0)), server_round)
        return {**new, "model": {n: a * np.float32(scale) for n, a in new["model"].items()}, "noted": noted}


def use_strategy(strategy: type[Strategy], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs have FedAvg with another server."""
    method = from_flat({"method": "fedavg"}).method_and_hparams()[0]
    found = replace(method, strategy=strategy), method.hparams()
    monkeypatch.setattr(server_app.configuration.RunConfig, "method_and_hparams", lambda self: found)


@pytest.mark.parametrize("factor", [1e3, np.inf])
def test_a_void_round_leaves_the_model_and_two_in_a_row_end_the_run(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_strategy(Wild, monkeypatch)
    monkeypatch.setattr(Wild, "rounds", {2})
    monkeypatch.setattr(Wild, "factor", factor)
    run = federate(tmp_path / "run", [], grown(1, set()), 3, rounds=3, max_growth=10.0, **{**FEW, "method": "fedavg"})
    assert list(run.rounds["void"]) == [0, 1, 0] and "round 2 is void" in run.summary["warnings"][0]
    states = {r: checkpoint.load(run.out / "checkpoint", r)[1]["model"] for r in (1, 2, 3)}
    assert all(np.array_equal(states[1][n], states[2][n]) for n in states[1])
    assert not all(np.array_equal(states[2][n], states[3][n]) for n in states[1])
    noted = checkpoint.load(run.out / "checkpoint", 3)[1]["noted"]
    assert noted.tolist() == [1, 2, 3], "records have an entry for every round"
    known = [stored(run.out / "checkpoint", r).clients for r in (1, 2, 3)]
    assert known[0] == known[1] != known[2], "what clients stored in the void round does not count"
    monkeypatch.setattr(Wild, "rounds", {2, 3})
    with pytest.raises(RoundFailed, match=r"rounds 2 and 3 are void.*max-growth"):
        federate(tmp_path / "two", [], grown(1, set()), 3, rounds=4, max_growth=10.0, **{**FEW, "method": "fedavg"})
    assert checkpoint.latest(tmp_path / "two" / "checkpoint")[0] == 3  # type: ignore[index]
    with pytest.raises(RoundFailed, match="rounds 2 and 3 are void"):  # no round is left that could be better
        again = {**FEW, "method": "fedavg", "resume": True}
        federate(tmp_path / "two", [], grown(1, set()), 3, rounds=3, max_growth=10.0, **again)


def test_a_model_that_one_client_spoiled_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client 0 sends what passes and what no other client can train on: the median takes its place."""

    def lie(stage: str, reply: Message) -> Message:
        return change_arrays(reply, lambda n, a: np.full_like(a, 9e3)) if stage == "train" else reply

    settings = {**FEW, "method": "fedavg", "lr": 0.05}
    with monkeypatch.context() as patch:
        use_strategy(Wild, patch)
        run = federate(tmp_path / "run", [0], lie, 4, rounds=3, **settings)
    assert checkpoint.load(run.out / "checkpoint", 3)[1]["noted"].tolist() == [1, 2, 3]
    assert run.summary["ok"] and list(run.rounds["round"]) == [1, 2, 3]
    assert asked(run.out) == [(2, 1), (2, 2), (2, 3)], "of the attempt that is taken back"
    assert "spoiled the model and is taken back" in run.summary["warnings"][0]
    assert largest(state_after(run)) < 10 and "blocked" not in run.summary
    again = resume(resume=run.out, rounds=4)
    assert again.summary["robust"]["rules"] == "median"
    assert checkpoint.load(run.out / "checkpoint", 4)[2]["Rollback"]["times"] == 1
    with pytest.raises(RoundFailed, match="round 2: 1 valid replies of 4"):
        federate(tmp_path / "strict", [0], lie, 4, rounds=3, **{**settings, "min_replies": 1.0})


def test_a_resumed_run_takes_back_the_round_before_it(tmp_path: Path) -> None:
    def lie(stage: str, reply: Message) -> Message:
        hit = stage == "train" and reply.metadata.group_id == "2"
        return change_arrays(reply, lambda n, a: np.full_like(a, 9e3)) if hit else reply

    settings = {**FEW, "method": "fedavg", "lr": 0.05}
    run = federate(tmp_path / "run", [0], lie, 4, rounds=2, **settings)
    assert largest(state_after(run)) > 1e3
    again = resume(resume=run.out, rounds=3)
    assert "spoiled the model and is taken back" in again.summary["warnings"][0] and largest(state_after(again)) < 10


def times(kind: str, server_round: str, left: int, change: Callable[[Message], Message]) -> Lie:
    """Lie in the first `left` replies of each client to messages of a kind in a round."""
    counted: Counter[int] = Counter()

    def lie(stage: str, reply: Message) -> Message:
        client = reply.metadata.src_node_id
        if stage != kind or reply.metadata.group_id != server_round or counted[client] == left:
            return reply
        counted[client] += 1
        return change(reply)

    return lie


def nan_arrays(reply: Message) -> Message:
    return change_arrays(reply, lambda n, a: a * np.float32(np.nan))


def nan_score(reply: Message) -> Message:
    reply.content[METRICS]["received-total"] = math.inf
    return reply


@pytest.mark.full
def test_the_second_time_the_run_begins_anew_and_so_do_the_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of clients that were made of what is taken back are not read again."""
    read: list[tuple[str, int]] = []
    plain = ClientStore._read

    def noting(self: ClientStore, file: Any, *which: Any) -> Any:
        read.append((self.folder.name, file[1]))
        return plain(self, file, *which)

    monkeypatch.setattr(ClientStore, "_read", noting)
    lie = times("train", "4", 2, nan_arrays)
    settings = {**FEW, "method": "fedper"}
    run = federate(tmp_path / "run", [0, 1, 2], lie, rounds=5, **settings)
    first, second = (text for text in run.summary["warnings"] if "taken back" in text)
    assert first.startswith("the update before round 4") and second.startswith("everything before round 4")
    of_four = [after for client, after in read if client == "4"]
    assert of_four[:5] == [1, 2, 3, 2, 4], "rounds 2, 3, 4 and 4 again; the third time from nothing; round 5"
    assert "blocked" not in run.summary and run.summary["ok"]
    found = checkpoint.latest(run.out / "checkpoint")
    assert found is not None and found[2]["Rollback"]["times"] == 2
    again = federate(tmp_path / "three", [0, 1, 2], times("train", "4", 2, nan_arrays), rounds=4, **settings)
    assert again.summary["ok"]
    with pytest.raises(RoundFailed, match="round 5: 2 valid replies of 5"):
        federate(again.out, [0, 1, 2], times("train", "5", 1, nan_arrays), rounds=5, resume=True, **settings)


def test_a_resumed_run_goes_back_as_far_past_a_void_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state before the last round that counts is an older one than that before a void round."""
    use_strategy(Wild, monkeypatch)
    monkeypatch.setattr(Wild, "rounds", {2})
    monkeypatch.setattr(Wild, "factor", np.inf)
    settings = {**FEW, "method": "fedavg"}
    straight = federate(tmp_path / "straight", [0, 1, 2], times("train", "3", 1, nan_arrays), rounds=3, **settings)
    federate(tmp_path / "part", [], nan_arrays, rounds=2, **settings)  # type: ignore[arg-type]
    lie = times("train", "3", 1, nan_arrays)
    resumed = federate(tmp_path / "part", [0, 1, 2], lie, rounds=3, resume=True, **settings)
    taken = [[text for text in r.summary["warnings"] if "taken back" in text] for r in (straight, resumed)]
    assert taken[0] == taken[1] and taken[0][0].startswith("everything before round 3")
    states = [checkpoint.load(r.out / "checkpoint", 3)[1]["model"] for r in (straight, resumed)]
    assert all(np.array_equal(states[0][name], array) for name, array in states[1].items())


@pytest.mark.full
def test_a_resumed_run_goes_back_to_the_beginning_where_the_earlier_state_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier state is that of round 2; after round 5 its checkpoint is removed."""
    use_strategy(Wild, monkeypatch)
    monkeypatch.setattr(Wild, "rounds", {5})
    monkeypatch.setattr(Wild, "factor", np.inf)
    settings, found = {**FEW, "method": "fedavg"}, []
    for name, parts in (("straight", (6,)), ("resumed", (5, 6))):
        first, second = times("train", "4", 1, nan_arrays), times("train", "6", 1, nan_arrays)
        for rounds in parts:
            given = {**settings, "rounds": rounds, "resume": rounds != parts[0]}
            run = federate(tmp_path / name, [0, 1, 2], lambda kind, r: second(kind, first(kind, r)), **given)  # type: ignore[arg-type]  # noqa: B023
        assert "everything before round 6" in run.summary["warnings"][-1]
        found.append(state_after(run)["model"])
    assert all(np.array_equal(found[0][name], array) for name, array in found[1].items())


class Prepared(Strategy):
    """A server that changes its state before round 1 and asks no client."""

    def prepare(self, state: Any, query: Any) -> Any:
        return {**state, "prepared": 1}


@pytest.mark.parametrize(("parts", "spoiled", "left"), [((2,), "2", 1), ((1, 2), "2", 1), ((3,), "3", 2)])
def test_a_rollback_to_the_beginning_keeps_the_prepared_state(
    parts: tuple[int, ...], spoiled: str, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_strategy(Prepared, monkeypatch)
    lie = times("train", spoiled, left, nan_arrays)
    for rounds in parts:
        given = {**FEW, "method": "fedavg", "rounds": rounds, "resume": rounds != parts[0]}
        run = federate(tmp_path / "run", [0, 1, 2], lie, **given)
    assert "taken back" in run.summary["warnings"][-1] and state_after(run)["prepared"] == 1


@pytest.mark.parametrize("nodes", [False, True])
def test_a_client_that_is_blocked_in_an_attempt_gets_no_message_in_the_next(nodes: bool, tmp_path: Path) -> None:
    """Client 0 spoils the model in round 1, and is blocked in the attempt at round 2 that is taken back."""

    def lie(stage: str, reply: Message) -> Message:
        if stage == "train" and reply.metadata.group_id.split()[0] == "1":
            return change_arrays(reply, lambda n, a: np.full_like(a, 9e3))
        return impossible(stage, reply)

    settings = {**FEW, "method": "fedavg", "lr": 0.05, "max_growth": 0}
    run = federate(tmp_path / "run", [0], lie, 4, nodes=nodes, rounds=2, **settings)
    assert "taken back" in run.summary["warnings"][-1] and run.summary["blocked"] == [0]
    assert list(run.rounds["clients"]) == [4, 3]


def test_a_bounded_check_has_three_reasons() -> None:
    checked = soundness.bounded(
        lambda reply: "refused" if reply.num_samples == 0 else None, {"w": np.zeros(2)}, 5.0,
        lambda reply: {"w": reply.arrays["step"]},
    )  # fmt: skip
    for n, model, step, told in ((0, 3, 3, "refuse"), (1, 9, 3, "its model"), (1, 3, 9, "its move"), (1, 3, 3, "None")):
        arrays = {"w": np.array([model, 0.0]), "step": np.array([0.0, step])}
        assert str(checked(Reply(0, n, arrays, {}))).startswith(told)


def test_a_rollback_leaves_no_spoiled_model_as_the_best(tmp_path: Path) -> None:
    """Round 3 is repeated from the state of round 1, so its `received` scores that one."""

    def lie(stage: str, reply: Message) -> Message:
        hit = stage == "train" and reply.metadata.group_id == "2"
        return change_arrays(reply, lambda n, a: np.full_like(a, 9e3)) if hit else reply

    more = {"method": "fedavg", "lr": 0.05, "fraction_train": 0.5, "protocols": "received,trained"}
    run = federate(tmp_path / "run", range(6), lie, 6, rounds=3, **{**FEW, **more})
    arrays, header = read_safetensors(run.out / "models" / "best.safetensors")
    kept = checkpoint.load(run.out / "checkpoint", 1)[1]["model"]
    assert header["round"] == 1 and header["received_accuracy"] == run.rounds["received_accuracy"][2]
    assert all(np.array_equal(kept[name], array) for name, array in arrays.items())


def test_a_model_that_is_spoiled_for_a_few_is_taken_back_where_each_of_them_is_needed(tmp_path: Path) -> None:
    settings = {**FEW, "method": "fedavg", "rounds": 2, "min_replies": 0.8}
    run = federate(tmp_path / "run", [0, 1], times("train", "2", 1, nan_arrays), **settings)
    assert "taken back" in run.summary["warnings"][0] and list(run.rounds["clients"]) == [5, 5]


def test_an_evaluation_of_a_spoiled_model_ends_no_run(tmp_path: Path) -> None:
    settings = {**FEW, "method": "fedavg", "rounds": 2, "evaluate_every": 1}
    run = federate(tmp_path / "run", [0, 1, 2], times("evaluate", "1", 1, nan_score), **settings)
    assert "the evaluation after round 1 is left out" in run.summary["warnings"][0]
    assert len(run.final) == 5 and set(pd.read_csv(run.out / "dropped.csv")["round"]) == {1}
    with pytest.raises(RoundFailed, match="round 1: 2 valid replies of 5"):
        strict = {**settings, "min_replies": 1.0}
        federate(tmp_path / "strict", [0, 1, 2], times("evaluate", "1", 1, nan_score), **strict)


def test_a_last_update_that_nobody_can_be_scored_with_is_taken_back(tmp_path: Path) -> None:
    """After the last round no training finds what a client did; what comes then does."""
    settings = {**FEW, "method": "fedavg", "rounds": 2}
    run = federate(tmp_path / "run", [0, 1, 2], times("evaluate", "2", 1, nan_score), **settings)
    assert "is taken back; the one before it is scored" in run.summary["warnings"][0] and len(run.final) == 5
    shown, _ = read_safetensors(run.out / "models" / "last.safetensors")
    kept = checkpoint.load(run.out / "checkpoint", 1)[1]["model"]
    assert all(np.array_equal(shown[name], array) for name, array in kept.items())
    with pytest.raises(RoundFailed, match="round 2: 2 valid replies of 5"):
        federate(tmp_path / "twice", [0, 1, 2], times("evaluate", "2", 2, nan_score), **settings)


def test_a_liar_that_falls_silent_does_not_end_the_run_that_it_spoiled(tmp_path: Path) -> None:
    """The median that took the place of the mean needs no number of replies."""

    def lie(stage: str, reply: Message) -> Message:
        if stage == "train" and reply.metadata.group_id == "1":
            return change_arrays(reply, lambda n, a: np.full_like(a, 9e3))
        if stage == "train" and reply.metadata.group_id == "3":
            reply.content[INFO]["error"], reply.content[ARRAYS] = "ValueError: boom", ArrayRecord()
        return reply

    run = federate(tmp_path / "run", [0], lie, 3, rounds=4, **{**FEW, "method": "fedavg", "lr": 0.05})
    assert "taken back" in run.summary["warnings"][0] and list(run.rounds["clients"]) == [3, 3, 2, 3]


def test_updates_are_no_longer_than_the_median_one_where_no_vote_is_possible() -> None:
    method, hparams = from_flat({"method": "fedavg"}).method_and_hparams()
    strategy = Strategy(method, hparams)
    initial = {"head.weight": np.zeros(2, np.float32)}
    strategy.context = ServerContext(0, (), 2, 1, initial, lambda k: initial, lambda *a: np.random.default_rng(0))
    changes = ([3.0, 4.0], [0.0, 1.0], [600.0, 800.0])
    replies = [
        Reply(c, 9, {"head.weight": np.array([1, 1], np.float32) + np.float32(x), "lar": np.ones(1)}, {}, 0, "train")
        for c, x in enumerate(changes)
    ]
    manager: Any = None
    rollback = Rollback(cast("Setup", SimpleNamespace(cohort=Participants(manager, strategy, Hooks()))))
    at = Progress(1, {"model": {"head.weight": np.ones(2, np.float32)}})
    found = rollback.shortened(at, 1, replies)
    assert rollback.shortened(at, 1, []) == []
    assert [r.arrays["head.weight"].tolist() for r in found] == [[4, 5], [1, 2], [4, 5]]
    assert all(r.arrays["lar"] is s.arrays["lar"] for r, s in zip(found, replies, strict=True))


def test_statistics_of_batchnorm_and_second_models() -> None:
    initial = {"head.weight": np.full((2, 2), 2.0, np.float32), "bn.running_var": np.ones(3, np.float32)}
    assert soundness.length({**initial, "bn.running_var": np.full(3, 1e12)}, initial) == 4
    assert soundness.length({"small/w": np.full(4, 1e30, np.float32)}, initial) == pytest.approx(2e30)
    assert soundness.longest({"model": {}, "n": 3}, initial) == 4
    state = {"clusters": {0: initial, 1: {n: 2 * a for n, a in initial.items()}}, "norms": np.full(3, 1e9)}
    assert soundness.longest(state, initial) == 8
    assert soundness.flaw(state, initial, (), 8) is None and "norm 8" in str(soundness.flaw(state, initial, (), 7.9))
    assert "norms" in str(soundness.flaw({"norms": np.array([np.nan])}, initial, (), 8))
    assert soundness.flaw({"norms": np.array([np.nan])}, initial, ("norms",), 8) is None


def test_the_width_that_bounds_replies_is_found_once_in_an_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    plain = NodeCohort._widths
    monkeypatch.setattr(NodeCohort, "_widths", lambda self, *given: found.append(given) or plain(self, *given))
    federate(tmp_path / "run", [], impossible, 3, nodes=True, **FEW)
    assert len(found) == 2, "training and last scores"
