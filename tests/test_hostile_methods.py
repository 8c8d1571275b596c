"""Hostile replies to single methods, and that honest clients' results are as if the liar had said nothing."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, Message, RecordDict

from fedapp import registry
from fedapp.config import from_flat
from fedapp.federation.hooks import soundness
from fedapp.method import HEAD, LARGEST, ClientInfo, Payload, Reply, ServerContext
from fedapp.reduce.reader import Check
from fedapp.results.runs import RunResult
from fedapp.transport.agreement import majority
from fedapp.transport.boundary import BAD, IMPOSSIBLE, LARGE
from fedapp.transport.records import ARRAYS, INFO, METRICS
from tests.handmade import refusal
from tests.liars import Lie, federate
from tests.matrix import methods
from tests.test_hostile import Bits, Change, answer, both, final_bits, metric, put, without
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


def statistics(**changes: Any) -> dict[str, np.ndarray]:
    ids = np.array([1, 3])
    cov = np.zeros((2, D * (D + 1) // 2), np.float32)
    good = {"ids": ids, "count": np.array([4, 5]), "mean": np.ones((2, D), np.float32), "cov": cov}
    return {f"statistics__{n}": np.asarray(a) for n, a in {**good, **changes}.items()}


Q = "query.statistics"
NEGATIVE = np.zeros((2, D * (D + 1) // 2), np.float32)
NEGATIVE[1, -1] = -1  # the variance of the last feature


def test_honest_statistics_pass_and_a_second_answer_must_be_like_the_first() -> None:
    calibrated = strategy("ccvr")
    assert refusal(calibrated, {}, reply(Q, **statistics())) is None
    rounded = statistics(cov=np.where(NEGATIVE < 0, -1e-7, 1.0))
    assert refusal(calibrated, {}, reply(Q, **rounded)) is None, "half precision may take 0 below 0"
    sums = strategy("ccvr", "cov=sums")
    count, total, square = np.full(C, 2), np.ones((C, D)), np.ones((C, D * (D + 1) // 2))
    second = reply(Q, statistics__count=count, statistics__sum=total, statistics__square=square)
    assert refusal(sums, {}, second) is None
    first = reply("query.totals", statistics__count=np.full(C, 1), statistics__sum=total)
    found: list[str | None] = []

    def ask(exchange: str, payload: Payload, check: Check) -> list[Reply]:
        given = first if exchange == "query.totals" else second
        found.append(check(given))
        return [given]

    query = sums.reader.query(ask)
    assert all(len(query(kind, Payload()).clients) == 1 for kind in ("totals", "statistics"))
    assert found == [None, "its 'statistics/count' are not those of its first answer"]


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


def replaced(ending: str, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    """Replace the arrays whose names end so."""

    def replace(content: RecordDict) -> None:
        for name in [n for n in content[ARRAYS] if n.endswith(ending)]:
            content[ARRAYS][name] = FlowerArray(np.ascontiguousarray(change(content[ARRAYS][name].numpy())))

    return replace


def filled(ending: str, value: Any, dtype: Any = None) -> Change:
    return replaced(ending, lambda a: np.full_like(a, value, dtype))


def rotated(array: np.ndarray) -> np.ndarray:
    """Give each class what belongs to the one before it."""
    return np.roll(array, 1, axis=0)


def untested(content: RecordDict) -> None:
    content[METRICS]["received-total"] = content[METRICS]["received-correct"]


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "evaluate": ("evaluate", {"method": "lgfedavg", "evaluate_every": 1}),
    "fedgh": ("train", {"method": "fedgh"}),
    "cwfedavg": ("train", {"method": "cwfedavg"}),
    "ccvr": ("query.statistics", {"method": "ccvr"}),
    "sums": ("query.statistics", {"method": "ccvr", "method_args": "cov=sums"}),
}
"""Which messages client 1 answers with a lie, and the settings of the run."""
LIES: dict[tuple[str, str], tuple[Change, str, str]] = {
    ("evaluate", "total inf"): (metric("received-total", math.inf), BAD, "'received-total' is inf"),
    ("evaluate", "total list"): (metric("received-total", [1]), IMPOSSIBLE, "'received-total' is [1]"),
    ("evaluate", "correct 1e9"): (metric("received-correct", 10**9), BAD, "1000000000 of them correct"),
    ("evaluate", "total of another test set"): (untested, BAD, "test samples"),
    ("evaluate", "no total"): (without("received-total"), IMPOSSIBLE, "go together"),
    ("evaluate", "arrays"): (put("head.bias", np.zeros(C, np.float32)), IMPOSSIBLE, "'head.bias' is not an array"),
    ("fedgh", "label beyond all"): (filled("labels", 99), IMPOSSIBLE, "labels lie in"),
    ("fedgh", "label twice"): (filled("labels", 2), IMPOSSIBLE, "a label occurs twice"),
    ("fedgh", "mean 1e30"): (filled("lar", 1e30), BAD, "possible are"),
    ("fedgh", "200,000 rows"): (replaced("lar", lambda a: np.ones((200_000, a.shape[1]), a.dtype)), IMPOSSIBLE, "(200"),
    ("fedgh", "labels that are fractions"): (filled("labels", 1, np.float32), IMPOSSIBLE, "labels float32"),
    ("cwfedavg", "head of zeros"): (filled("", 0), BAD, "are zero"),
    ("cwfedavg", "total of another test set"): (untested, BAD, "test samples"),
    ("ccvr", "permuted means of a million samples"): (
        both(replaced("/mean", rotated), filled("/count", 10**6)), BAD, "from a client of",
    ),
    ("ccvr", "more samples than it has"): (replaced("/count", lambda a: a + 1), BAD, "from a client of"),
    ("ccvr", "count 2**62"): (filled("/count", 2**62), BAD, "possible are"),
    ("ccvr", "class twice"): (filled("/ids", 3), IMPOSSIBLE, "must be distinct"),
    ("ccvr", "variances below 0"): (filled("/cov", -1), BAD, "must not be negative"),
    ("ccvr", "covariance 1e30"): (filled("/cov", 1e30), BAD, "possible are"),
    ("sums", "other counts than before"): (replaced("/count", rotated), BAD, "not those of its first answer"),
}  # fmt: skip
SOME = (
    ("evaluate", "total inf"), ("fedgh", "label twice"), ("cwfedavg", "head of zeros"), ("ccvr", "covariance 1e30"),
)  # fmt: skip


def quiet(kind: str, for_good: bool) -> Lie:
    """Fail at each message of a kind, and `for_good` from the first one on."""
    failing = False

    def lie(stage: str, sent: Message) -> Message:
        nonlocal failing
        failing = stage == kind or (failing and for_good)
        if failing:
            sent.content[INFO]["error"], sent.content[ARRAYS] = "ValueError: boom", ArrayRecord()
        return sent

    return lie


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Bits]:
    """Return what a run leaves in which client 1 fails in place of each lie, or `for_good` if it is to be blocked."""

    @functools.cache
    def found(name: str, for_good: bool) -> Bits:
        kind, settings = RUNS[name]
        return final_bits(lied(tmp_path_factory.mktemp("silent") / "run", quiet(kind, for_good), **settings).out)

    return found


def lied(out: Path, lie: Lie, **settings: Any) -> RunResult:
    run = federate(out, [1], lie, 4, min_replies=0.5, rounds=2, **settings, **QUICK)
    assert run.summary["ok"]
    return run


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "what"), [pytest.param(*w, marks=() if w in SOME else pytest.mark.full) for w in LIES]
)
def test_honest_clients_are_as_if_the_liar_had_said_nothing(
    name: str, what: str, silent: Callable[[str, bool], Bits], tmp_path: Path
) -> None:
    """And the lie is dropped with its reason, in each exchange anew unless it was one that blocks the client."""
    (kind, settings), (change, offence, reason) = RUNS[name], LIES[name, what]
    run = lied(tmp_path / "run", answer(change, kind), **settings)
    rows = pd.read_csv(run.out / "dropped.csv")
    times = 1 if offence == IMPOSSIBLE or kind == "query.statistics" else 2
    assert list(zip(rows["client"], rows["stage"], strict=True)) == [(1, kind)] * times
    assert rows["reason"].str.contains(reason, regex=False).all()
    assert run.summary.get("blocked", []) == ([1] if offence == IMPOSSIBLE else [])
    assert final_bits(run.out) == silent(name, offence == IMPOSSIBLE)


@pytest.mark.full
def test_permuted_means_with_true_counts_are_for_the_rule_to_find(tmp_path: Path) -> None:
    """No check can tell that classes were exchanged: without `robust` such means move the head."""
    means, made = replaced("/mean", rotated), {}
    for rule in ("none", "own"):
        for name, change in (("true", lambda content: None), ("permuted", means)):
            lie = answer(change, "query.statistics")
            made[rule, name] = lied(tmp_path / f"{rule}-{name}", lie, method="ccvr", robust=rule)
            assert made[rule, name].summary["dropped"] == 0
    heads = {name: final_bits(made["none", name].out)[1]["kept/head.weight"] for name in ("true", "permuted")}
    left_out = {n: made["own", n].summary["calibration"]["screened"]["left_out"] for n in ("true", "permuted")}
    assert heads["true"] != heads["permuted"] and left_out["permuted"] > left_out["true"]


def far(prefix: str, by: float) -> Change:
    """Make floating point arrays as large as that, with both signs."""

    def change(content: RecordDict) -> None:
        for name in [n for n in content[ARRAYS] if n.startswith(prefix)]:
            array = content[ARRAYS][name].numpy()
            if array.dtype.kind == "f":
                signs = np.where(np.arange(array.size).reshape(array.shape) % 2, -1, 1)
                content[ARRAYS][name] = FlowerArray((by * signs).astype(array.dtype))

    return change


ALONE: dict[str, tuple[str, Change, str]] = {
    "control variates": ("scaffold", far("control/", 9e7), "its move has norm"),
    "factors": ("fedkd", far("small/", 4e3), "when it is rebuilt"),
    "factors within the range": ("fedkd", far("small/", 1.0), "its move has norm"),
    "weights": ("fedfomo", metric("fomo-weights", [1e308] * 5), "more than 1e+08"),
    "means beyond all": ("fedpac", far("pac/", 9e7), "possible are -10000 to 10000"),
    "means": ("fedpac", far("pac/proto", 9e3), ""),
}
"""What one of five clients sends in every round; the method; why it is dropped, if it is."""


@pytest.mark.parametrize(
    "what", [w if w in ("weights", "factors") else pytest.param(w, marks=pytest.mark.full) for w in ALONE]
)
def test_one_client_does_not_end_a_run_through_its_method(what: str, tmp_path: Path) -> None:
    method, lie, reason = ALONE[what]
    growth = 1e6 if what == "factors" else 10
    settings = {"min_replies": 0.5, "max_growth": growth, "rounds": 4, **QUICK}
    run = federate(tmp_path / "run", [1], answer(lie), method=method, **settings)
    assert run.summary["ok"] and not run.rounds["void"].any()
    if reason:
        rows = pd.read_csv(run.out / "dropped.csv")
        assert set(rows["client"]) == {1} and rows["reason"].str.contains(reason, regex=False).all(), rows["reason"][0]
    else:
        assert run.summary["dropped"] == 0


def test_prototypes_are_of_no_more_samples_than_the_client_has() -> None:
    made, rows = strategy("fedproto", "average=count"), np.ones((2, D), np.float32)
    for last, refused in ((16, False), (17, True)):
        sent = reply(protos=rows, labels=np.array([1, 2]), counts=np.array([4, last]))
        assert (refusal(made, {}, sent) == f"counts of {4 + last} samples from a client of 20") == refused


@pytest.mark.parametrize(("loss", "dropped"), [(-1e300, True), (-9e3, False)])
def test_one_client_does_not_end_a_run_by_its_training_loss(loss: float, dropped: bool, tmp_path: Path) -> None:
    """It says once what no later round can fall below."""
    left = [metric("train-loss", loss)]
    lie = answer(lambda content: left.pop()(content) if left else None)
    run = federate(tmp_path / "run", [1], lie, method="fedavg", min_replies=0.5, patience=2, rounds=5, **QUICK)
    assert run.summary["rounds"] == 5 and run.summary["stopped"] is None
    assert (run.summary["dropped"] > 0) == dropped


@pytest.mark.full
@pytest.mark.parametrize("then", [None, 1e9, -8e3, math.nan])
@pytest.mark.parametrize("clients", [2, 3])
def test_no_client_of_two_ends_a_run_by_its_training_loss(clients: int, then: float | None, tmp_path: Path) -> None:
    """Low once and then high, or true: two clients have no majority, nor have those of a round of two."""
    stated: list[float] = []

    def lie(content: RecordDict) -> None:
        stated.append(-9e3 if not stated else content[METRICS]["train-loss"] if then is None else then)
        content[METRICS]["train-loss"] = stated[-1]

    of = {"method": "fedavg", "min_replies": 0.5, "patience": 2, "rounds": 6, "fraction_train": 2 / clients, **QUICK}
    run = federate(tmp_path / "run", [1], answer(lie), clients, nodes=True, **of)
    assert len(stated) > 2 and run.summary["rounds"] == 6 and run.summary["stopped"] is None


def test_two_clients_end_a_run_by_patience_if_both_say_so(tmp_path: Path) -> None:
    of = {"method": "fedavg", "patience": 2, "rounds": 6, **QUICK}
    run = federate(tmp_path / "run", [0, 1], answer(metric("train-loss", 2.0)), 2, **of)
    assert run.summary["rounds"] == 3 and "no lower training loss for 2 rounds" in run.summary["stopped"]


def test_a_reply_of_the_round_before_does_not_count_again(tmp_path: Path) -> None:
    kept: list[dict[str, Any]] = []

    def again(content: RecordDict) -> None:
        kept.append(dict(content))
        content.update(kept[0])

    run = federate(tmp_path / "run", [1], answer(again), 3, method="lgfedavg", min_replies=0.5, rounds=2, **QUICK)
    dropped = pd.read_csv(run.out / "dropped.csv")
    assert list(zip(dropped["round"], dropped["client"], strict=True)) == [(2, 1)]
    assert "it went on from the state" in dropped["reason"][0]


# ---- every method --------------------------------------------------------------------------------------------------

MODEL = ("features.", "head.", "small/")
"""Beginnings of the names of a model's arrays."""
FEATURES = tuple(
    name for made, hparams in (registry.configured(method, "") for method in registry.discover())
    for of in made.reductions(hparams).values() for reduction in of.values()
    for name, size in reduction.sizes.items() if size == "feature"
)  # fmt: skip
"""Names of arrays whose numbers are as large as features."""


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list of which the last entry says how long a model may be in the present round."""
    found, plain = [math.inf], soundness.bounded

    def noting(check: Any, initial: Any, limit: float, *moves: Any) -> Any:
        found.append(limit)
        return plain(check, initial, limit, *moves)

    monkeypatch.setattr(soundness, "bounded", noting)
    return found


def long(limit: list[float]) -> Change:
    """Send a model of one number everywhere that is 0.9 of what is accepted long."""

    def change(content: RecordDict) -> None:
        names = [n for n in content[ARRAYS] if n.startswith(MODEL) and not n.endswith(soundness.BUFFERS)]
        size = sum(math.prod(content[ARRAYS][n].shape) for n in names)
        for name in names:
            array = content[ARRAYS][name].numpy()
            content[ARRAYS][name] = FlowerArray(np.full_like(array, 0.9 * limit[-1] / math.sqrt(size)))

    return change


def wide(content: RecordDict) -> None:
    """Send numbers that are 0.9 of the largest ones beside the model."""
    for name in [n for n in content[ARRAYS] if not n.startswith(MODEL)]:
        array = content[ARRAYS][name].numpy()
        if array.dtype.kind == "f":
            value = 0.9 * (LARGE if name.startswith((*HEAD, *FEATURES)) else LARGEST)
            content[ARRAYS][name] = FlowerArray(np.full_like(array, value))


def longest_lie(limit: list[float], when: Callable[[Message], bool] = lambda message: True) -> Lie:
    """Send both, to `train` and to the queries of a method."""

    def lie(kind: str, sent: Message) -> Message:
        honest = kind in ("evaluate", "query.register") or "error" in sent.content[INFO] or not when(sent)
        if not honest:
            wide(sent.content)
        if not honest and kind == "train":
            long(limit)(sent.content)
        return sent

    return lie


EVERY = [*methods(), *(pytest.param(m, marks=pytest.mark.full) for m in (
    "fd output=logits", "ktpfl share=weights", "ccvr cov=sums", "fedproto down=all", "fedncm base=scaffold",
))]  # fmt: skip
NODES: dict[str, Any] = {"nodes": True, "min_replies": 0.5, **QUICK}


@pytest.mark.full
@pytest.mark.parametrize("method", EVERY)
def test_one_client_does_not_end_a_run_with_the_longest_lie_that_counts(
    method: str, limit: list[float], tmp_path: Path
) -> None:
    """It sends it in every round. Where nobody could train on it, the run went back and bounds its clients."""
    name, _, args = method.partition(" ")
    run = federate(tmp_path / "run", [1], longest_lie(limit), method=name, method_args=args, rounds=5, **NODES)
    assert run.summary["ok"] and list(run.rounds["round"]) == [1, 2, 3, 4, 5] and not run.rounds["void"].any()
    assert set(run.summary.get("blocked", [])) <= {1}


@pytest.mark.full
@pytest.mark.parametrize("method", EVERY)
def test_a_run_of_one_round_with_a_lie_can_be_resumed(method: str, limit: list[float], tmp_path: Path) -> None:
    """The state before it is the one that all start from."""
    name, _, args = method.partition(" ")
    settings = {"method": name, "method_args": args, **NODES}
    lie = longest_lie(limit, lambda sent: sent.metadata.group_id == "1" and sent.metadata.message_type == "train")
    federate(tmp_path / "run", [1], lie, rounds=1, **settings)
    again = federate(tmp_path / "run", [], lie, rounds=3, resume=True, **settings)
    assert again.summary["ok"] and list(again.rounds["round"]) == [1, 2, 3]


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "how"),
    [
        ("fed3r", "the median of the clients is taken"),  # rules are no use for its head, and are for its training
        ("ccvr", "the median of the clients is taken"),
        pytest.param("pccvr", "the median of the clients is taken", marks=pytest.mark.full),
        ("cwfedavg", "no client's update is longer than the median one"),
        pytest.param("fedpac", "no client's update is longer than the median one", marks=pytest.mark.full),
    ],
)
def test_what_bounds_clients_after_a_lie(method: str, how: str, limit: list[float], tmp_path: Path) -> None:
    run = federate(tmp_path / "run", [1], longest_lie(limit), method=method, rounds=3, **NODES)
    back = [text for text in run.summary["warnings"] if "taken back" in text]
    assert len(back) == 1 and f"is taken back; from now on {how} (" in back[0]


def test_sums_around_centres_are_at_most_those_of_a_clients_samples(tmp_path: Path) -> None:
    """Means that one client moves far away would put the honest sums of squares out of range."""
    lie = answer(lambda content: wide(content), "query.totals")
    run = federate(tmp_path / "run", [1], lie, method="ccvr", method_args="cov=sums", rounds=1, **NODES)
    rows = pd.read_csv(run.out / "dropped.csv")
    assert set(rows["client"]) == {1} and "'statistics/sum' holds values" in rows["reason"][0]
