"""Hostile replies to single methods, and that honest clients' results are as if the liar had said nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import ArrayRecord, Message

from fedapp.config import from_flat
from fedapp.method import ClientInfo, Reply, ServerContext
from fedapp.results.runs import RunResult
from fedapp.transport import checkpoint
from fedapp.transport.agreement import majority
from fedapp.transport.boundary import BAD, IMPOSSIBLE, grade
from fedapp.transport.records import ARRAYS, INFO, METRICS
from tests.liars import change_arrays, federate
from tests.test_robust import QUICK

C, D = 10, 4


def strategy(method: str, args: str = "") -> Any:
    found, hparams = from_flat({"method": method, "method-args": args}).method_and_hparams()
    made = found.strategy(found, hparams)
    initial = {"head.weight": np.ones((C, D), np.float32), "head.bias": np.ones(C, np.float32)}
    made.context = ServerContext(0, (), C, D, initial, lambda k: initial, lambda *a: np.random.default_rng(0))
    return made


def reply(kind: str = "train", **arrays: np.ndarray) -> Reply:
    return Reply(1, 20, {n.replace("__", "/"): a for n, a in arrays.items()}, {}, 0, kind)


def means(labels: Any, rows: int | None = None) -> dict[str, np.ndarray]:
    found = np.asarray(labels)
    return {"lar": np.ones((len(found) if rows is None else rows, D), np.float32), "labels": found}


def statistics(**changes: Any) -> dict[str, np.ndarray]:
    ids = np.array([1, 3])
    cov = np.zeros((2, D * (D + 1) // 2), np.float32)
    good = {"ids": ids, "count": np.array([4, 5]), "mean": np.ones((2, D), np.float32), "cov": cov}
    return {f"statistics__{n}": np.asarray(a) for n, a in {**good, **changes}.items()}


Q = "query.statistics"
NEGATIVE = np.zeros((2, D * (D + 1) // 2), np.float32)
NEGATIVE[1, -1] = -1  # the variance of the last feature
CASES: dict[str, tuple[str, Reply, str, str]] = {
    "label beyond all": ("fedgh", reply(**means([99])), IMPOSSIBLE, "labels lie in"),
    "label below 0": ("fedproto", reply(protos=np.ones((1, D), np.float32), labels=np.array([-1])), IMPOSSIBLE, "lie"),
    "label twice": ("fedgh", reply(**means([2, 2])), IMPOSSIBLE, "twice"),
    "200,000 rows": ("fedgh", reply(**means([1], 200_000)), IMPOSSIBLE, "(200000, 4)"),
    "labels that are fractions": ("fedgh", reply(**means(np.array([1.0, 2.0]))), IMPOSSIBLE, "labels float64"),
    "head of zeros": ("cwfedavg", reply(**{"head.weight": np.zeros((C, D), np.float32)}), BAD, "are zero"),
    "more samples than it has": ("ccvr", reply(Q, **statistics(count=[10, 11])), BAD, "21 samples from a client of 20"),
    "means of a million samples": ("ccvr", reply(Q, **statistics(count=[10**6, 1])), BAD, "from a client of 20"),
    "no samples": ("ccvr", reply(Q, **statistics(count=[0, 5])), BAD, "must be positive"),
    "class twice": ("ccvr", reply(Q, **statistics(ids=[3, 3])), IMPOSSIBLE, "distinct"),
    "variance below 0": ("ccvr", reply(Q, **statistics(cov=NEGATIVE)), BAD, "negative"),
    "covariances of other shape": ("ccvr", reply(Q, **statistics(cov=np.zeros((2, D)))), IMPOSSIBLE, "of shape"),
}


@pytest.mark.parametrize("what", CASES)
def test_a_methods_own_check_has_grades(what: str) -> None:
    method, sent, verdict, words = CASES[what]
    problem = strategy(method).check({}, sent)
    assert problem is not None and words in problem and grade(problem) == verdict, problem


def test_honest_statistics_pass_and_a_second_answer_must_be_like_the_first() -> None:
    calibrated = strategy("ccvr")
    assert calibrated.check({}, reply(Q, **statistics())) is None
    rounded = statistics(cov=np.where(NEGATIVE < 0, -1e-7, 1.0))
    assert calibrated.check({}, reply(Q, **rounded)) is None, "half precision may take 0 below 0"
    sums = strategy("ccvr", "cov=sums")
    count, total, square = np.full(C, 2), np.ones((C, D)), np.ones((C, D * (D + 1) // 2))
    second = reply(Q, statistics__count=count, statistics__sum=total, statistics__square=square)
    assert sums.check({}, second) is None
    sums.counted = {1: np.full(C, 1)}
    assert "not those of its first answer" in str(sums.check({}, second))


# ---- registration: the majority ------------------------------------------------------------------------------------

INFO_OF = ClientInfo(0, 9, "digits-a", 10, {"head.weight": (10, 64)}, {"public-checksum": 5})
FACTS = {"shape": "[1, 8, 8]", "width": 64, "classes": ""}


@pytest.mark.parametrize(
    ("lie", "facts", "words"),
    [
        ({"num_classes": 7}, {}, "has 7 classes"),
        ({"shapes": {"head.weight": (10, 65)}}, {}, "'head.weight' is shared"),
        ({"shapes": {}}, {}, "no array of that name"),
        ({"model": "zork"}, {}, "needs one architecture"),
        ({"common": {"public-checksum": 6}}, {}, "the public-checksum of"),
        ({}, {"width": 65}, "have widths [64, 65]"),
        ({}, {"shape": "[3, 8, 8]"}, "needs one kind"),
        ({}, {"classes": "abc"}, "have other names"),
    ],
)
@pytest.mark.parametrize("liar", [0, 1, 2])
def test_one_of_three_that_states_something_else_is_apart(lie: Any, facts: Any, words: str, liar: int) -> None:
    method = from_flat({"method": "fedavg"}).method_and_hparams()[0]
    infos = {c: dataclasses.replace(INFO_OF, client=c, **(lie if c == liar else {})) for c in range(3)}
    stated = {c: {**FACTS, "classes": "xyz", **(facts if c == liar else {})} for c in range(3)}
    found, apart = majority(method, infos, stated)
    assert found == min({0, 1, 2} - {liar}) and set(apart) == {liar} and words in apart[liar]
    assert majority(method, {c: infos[c] for c in (liar, (liar + 1) % 3)}, stated)[0] is None


# ---- whole runs ----------------------------------------------------------------------------------------------------

Change = Callable[[Message], object]


def on(kind: str, change: Change) -> Callable[[str, Message], Message]:
    def lie(stage: str, sent: Message) -> Message:
        if stage == kind:
            change(sent)
        return sent

    return lie


def zeros(sent: Message) -> Message:
    return change_arrays(sent, lambda name, array: np.zeros_like(array))


def label(value: int) -> Change:
    return lambda sent: change_arrays(sent, lambda n, a: np.full_like(a, value) if n.endswith(("labels", "ids")) else a)


def fails(sent: Message) -> None:
    sent.content[INFO]["error"] = "ValueError: boom"
    sent.content[ARRAYS] = ArrayRecord()


def untested(sent: Message) -> None:
    sent.content[METRICS]["received-total"] = sent.content[METRICS]["received-correct"]


def honest(run: RunResult) -> tuple[dict[str, bytes], pd.DataFrame]:
    rows = pd.concat([pd.read_csv(run.out / name) for name in ("clients.csv", "final.csv")])
    rows = rows[rows["client"] != 1][[c for c in rows if not c.endswith("seconds")]].reset_index(drop=True)
    found = checkpoint.latest(run.out / "checkpoint")
    assert found is not None
    arrays = checkpoint.flatten(found[1])[0]
    return {n: a.tobytes() for n, a in arrays.items()}, rows


@pytest.mark.parametrize(
    ("method", "kind", "lies"),
    [
        ("fedgh", "train", [label(99), label(2)]),
        ("cwfedavg", "train", [zeros, untested]),
        ("ccvr", "query.statistics", [label(3)]),
        ("lgfedavg", "evaluate", [untested]),
    ],
)
def test_honest_clients_are_as_if_the_liar_had_said_nothing(
    method: str, kind: str, lies: list[Change], tmp_path: Path
) -> None:
    settings = {"method": method, "min_replies": 0.5, "rounds": 2, **QUICK}
    silent = honest(federate(tmp_path / "silent", [1], on(kind, fails), 3, **settings))
    for number, lie in enumerate(lies):
        run = federate(tmp_path / str(number), [1], on(kind, lie), 3, **settings)
        arrays, rows = honest(run)
        assert run.summary["ok"] and run.summary["dropped"] and arrays == silent[0]
        pd.testing.assert_frame_equal(rows, silent[1], check_exact=True)


def test_a_reply_of_the_round_before_does_not_count_again(tmp_path: Path) -> None:
    kept: list[Any] = []

    def again(sent: Message) -> None:
        kept.append(sent.content)
        sent.content = kept[0]

    run = federate(tmp_path / "run", [1], on("train", again), 3, method="lgfedavg", min_replies=0.5, rounds=2, **QUICK)
    dropped = pd.read_csv(run.out / "dropped.csv")
    assert list(zip(dropped["round"], dropped["client"], strict=True)) == [(2, 1)]
    assert "it went on from the state" in dropped["reason"][0]
