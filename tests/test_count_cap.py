"""`count-cap` where clients send sums and statistics: one whose counts are made up weighs no more than the cap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from clients.ccvr import STATISTICS
from clients.sums import SUMS
from fedapp.config import from_flat
from fedapp.core import robust, sums
from fedapp.core.privacy import Joint, Privacy
from fedapp.errors import BadRequest
from fedapp.learning.state import read_safetensors
from fedapp.method import Payload, Reply
from fedapp.reduce.reader import Policy
from fedapp.transport.records import METRICS
from strategies._sums import HeadFromSums
from strategies.ccvr import CCVR, statistics
from strategies.fedgh import NOISED
from tests import closedform, test_ccvr, test_fedgh, test_fedghg
from tests.handmade import asking, guard, refusal
from tests.liars import change_arrays, federate

HEADS = ("fed3r", "fedncm", "lda", "fedcof")
Ask = Callable[[str, Payload], list[Reply]]

rng = np.random.default_rng(0)
DATA: closedform.Data = [(rng.standard_normal((60, 5)) + y[:, None], y) for y in rng.integers(0, 4, (5, 60))]
"""Five clients of 60 samples. The first one's features lie elsewhere, so that its weight shows."""
DATA[0][0][:] += rng.standard_normal(5) * 3  # type: ignore[index]


def times(ask: Ask, factor: float) -> Ask:
    """Let client 0 say that it has so many times the samples, each as often."""

    def lying(kind: str, payload: Payload) -> list[Reply]:
        first, *others = ask(kind, payload)
        grown = {n: (a * factor).astype(a.dtype) for n, a in first.arrays.items()}
        return [replace(first, num_samples=int(first.num_samples * factor), arrays=grown), *others]

    return lying


def head(method: str, factor: float, cap: float, args: str = "scale=none") -> np.ndarray:
    strategy, state = closedform.server(method, args, closedform.context(4, 5))
    strategy.policy = Policy(guard(count_cap=cap))
    ask = times(closedform.asker(strategy, DATA), factor)
    made = strategy.finalize(state, asking(strategy, ask))[method]["head"]
    return np.column_stack([made[closedform.W], made[closedform.B]])


@pytest.mark.parametrize("method", HEADS)
@pytest.mark.parametrize("lie", [1e6, 1e12])
def test_a_head_is_that_of_the_scaled_sums(method: str, lie: float) -> None:
    """The others have 60 samples, and the cap is 3 times as many: what the client says beyond counts for nothing."""
    np.testing.assert_allclose(head(method, lie, cap=3), head(method, 3, cap=0), rtol=1e-5, atol=1e-5)
    assert np.abs(head(method, lie, cap=0) - head(method, 3, cap=0)).max() > 0.02, "without a cap it would count"


@pytest.mark.parametrize("method", HEADS)
def test_a_cap_that_nobody_reaches_changes_no_bit(method: str) -> None:
    for args in ("scale=none", "scale=fit"):
        assert np.array_equal(head(method, 3, cap=1e9, args=args), head(method, 3, cap=0, args=args))


def test_the_worked_sums() -> None:
    """Totals 30, 0, 1e9, 10: the median of those that have any is 30, so 60 are believed, as a share of 6e-8."""
    answers = [{"a": np.full(2, n), "b": np.full((1, 3), n)} for n in (30.0, 0.0, 1e9, 10.0)]
    found = sums.capped_sums(answers, [30, 0, 1e9, 10], 2)
    assert [a["a"].tolist() for a in found] == [[30, 30], [0, 0], pytest.approx([60, 60]), [10, 10]]
    assert all(a["b"] == pytest.approx(np.full((1, 3), a["a"][0])) for a in found)
    assert all(np.array_equal(a["a"], b["a"]) for a, b in zip(answers, sums.capped_sums(answers, [9, 9, 9, 9], 0)))


def test_a_class_of_less_than_one_sample_keeps_its_mean_and_has_no_scatter() -> None:
    part = np.array([[1.0, 2, 0.5], [3, 4, 2]])
    np.testing.assert_allclose(sums.nearest_mean(part, "euclidean"), [[2, 4, -10], [1.5, 2, -3.125]])
    assert np.linalg.eigvalsh(sums.scatter_of_means([part[:1]], 5.0)).min() >= 0


def test_no_client_alone_decides_on_the_factor_of_the_logits() -> None:
    """It excludes all but the largest factor, which is far from the best. Believed like one of the others, it fails."""
    strategy, state = closedform.server("fed3r", "scale=fit", closedform.context(4, 5))
    honest = closedform.asker(strategy, DATA)

    def lie(kind: str, payload: Payload) -> list[Reply]:
        first, *others = honest(kind, payload)
        if kind == "losses":
            excluded = np.where(np.arange(len(sums.SCALES)) < len(sums.SCALES) - 1, 1e300, 0.0)
            first = replace(first, arrays={f"{SUMS}loss": excluded})
        return [first, *others]

    def factor(ask: Ask, cap: float) -> float:
        strategy.policy = Policy(guard(count_cap=cap))
        return float(strategy.finalize(state, asking(strategy, ask))["fed3r"]["calibration"]["scale"])

    best = factor(honest, 0)
    assert factor(lie, 0) == sums.SCALES[-1] and best / 2 < factor(lie, 1) < best * 2


def test_a_cap_does_not_change_the_factor_of_honest_clients() -> None:
    """Most of them make no errors, and some have no rows: with large factors their losses are 0, others' are not."""
    rng = np.random.default_rng(0)

    def losses(rows: int, wrong: float) -> np.ndarray:
        margin = np.where(rng.random(rows) < wrong, -1.0, 1.0) * rng.uniform(0.5, 1.5, rows)
        return np.array([np.logaddexp(0, -s * margin).sum() for s in sums.SCALES])

    clients = [losses(100, 0.0) for _ in range(6)] + [losses(100, 0.15) for _ in range(4)]
    nobody = [np.zeros(len(sums.SCALES))] * 11
    best = sums.best_scale(sum(clients))
    for cap in (1, 2, 10):
        assert best / 2 <= sums.best_scale(sum(sums.capped_losses([*clients, *nobody], cap))) <= best * 2
    assert sums.best_scale(np.zeros(len(sums.SCALES))) == 1
    sly = np.where(np.arange(len(sums.SCALES)) % 64 == 0, clients[0][0], 1e300)
    found = sums.best_scale(sum(sums.capped_losses([*clients, sly], 1)))
    assert best / 2 <= found <= best * 2, "it has as many rows as others, and excludes all other factors"
    large = sums.capped_losses([*clients, 50 * clients[0]], 2)
    np.testing.assert_allclose(large[-1], 2 * clients[0], rtol=0.02)


def test_what_a_single_class_has_is_kept_by_ccvrs_statistics_and_sums_alike() -> None:
    """Counts of 1e9 and 1: the sums of a class follow its count, whole numbers, and classes without samples stay so."""
    counts = [[20, 10, 0], [10, 0, 5], [10**9, 1, 0]]
    answers = [
        {"count": np.array(n), "sum": np.array(n)[:, None] * np.ones((3, 2)), "square": np.array(n)[:, None] * 2.0}
        for n in counts
    ]
    found = robust.capped_statistics(answers, 2)
    assert found[2]["count"].tolist() == [59, 1, 0]
    np.testing.assert_allclose(found[2]["sum"], [[59, 59], [1, 1], [0, 0]], rtol=1e-12)
    np.testing.assert_allclose(found[2]["square"][:, 0], [118, 2, 0], rtol=1e-12)
    assert [a["count"].tolist() for a in found[:2]] == counts[:2]
    few = robust.capped_statistics([{"count": np.array(n)} for n in ([1, 0, 0], [0, 1, 0], [9, 9, 0])], 1)
    assert few[2]["count"].tolist() == [1, 1, 0], "less than one sample a class is believed"


def ccvr(args: str, factor: float, cap: float) -> Any:
    """The pooled statistics of DATA, of which client 0 says that it has so many times the samples."""
    strategy, state = test_ccvr.server(args, test_ccvr.context(4, 5))
    strategy.policy = Policy(guard(count_cap=cap))
    honest = test_ccvr.asker(test_ccvr.server(args, test_ccvr.context(4, 5))[0], [(z, y) for z, y in DATA])

    def lying(kind: str, payload: Payload) -> list[Reply]:
        first, *others = honest(kind, payload)
        sums_of = {f"{STATISTICS}{n}" for n in ("count", "sum", "square")}
        grown = {n: (a * factor).astype(a.dtype) if n in sums_of else a for n, a in first.arrays.items()}
        first = replace(first, num_samples=int(first.num_samples * factor), arrays=grown)
        assert refusal(strategy, state, first) is None
        return [first, *others]

    return statistics(state["model"], strategy.settings.cov, asking(strategy, lying))[0]


def test_sums_of_ccvr_are_capped_as_its_statistics_are() -> None:
    whole, parts = ccvr("cov=sums", 1e6, cap=3), ccvr("cov=full dtype=float64", 1e6, cap=3)
    assert whole.counts.tolist() == parts.counts.tolist() and whole.counts.sum() <= 4 * 60 + 3 * 60
    np.testing.assert_allclose(whole.means, parts.means, atol=1e-5)
    for c in range(4):  # with divisors N_ck and N_ck - 1 of one client's, as statistics are of samples and sums are not
        np.testing.assert_allclose(whole.cov(c), parts.cov(c), rtol=0.05, atol=0.05)
    assert ccvr("cov=sums", 1e6, cap=0).counts.sum() > 6e7
    free, huge = ccvr("cov=sums", 3, cap=0), ccvr("cov=sums", 3, cap=1e9)
    assert np.array_equal(free.means, huge.means) and np.array_equal(free.cov(0), huge.cov(0))


def test_counts_of_fedgh_on_gaussians_are_capped_before_pooling() -> None:
    """Three clients of 5, 4 and 1 samples; the last one says that it has a million of its class."""
    honest = [test_fedghg.reply(k, of, counts=True) for k, of in enumerate(test_fedghg.CLIENTS)]
    lie = replace(honest[2], arrays={**honest[2].arrays, "counts": np.array([10**6], np.int32)})

    def counts(cap: float, last: Reply) -> list[dict[int, int]]:
        made = test_fedghg.strategy(guard(count_cap=cap), weights="count", source="pooled")
        rows = made.reader.reduce("train", [*honest[:2], last], {}).rows("lar")
        return [dict(zip(of.labels.tolist(), of.reply.arrays["counts"].tolist(), strict=True)) for of in rows]

    assert counts(0, lie)[2] == {1: 10**6}
    assert counts(2, lie) == [*counts(0, lie)[:2], {1: 10}], "the median is 5"
    assert counts(2, honest[2]) == counts(0, honest[2])


@pytest.mark.parametrize("method", ["fed3r", "fedncm", "lda", "ccvr", "fedgh"])
def test_noised_sums_count_for_no_more_than_the_cap(method: str) -> None:
    """What weighs is the length of the vector: a liar can make its sums long without any count."""
    z = rng.standard_normal((5, 40, 5))
    y = rng.integers(0, 4, (5, 40))
    joint = Joint(4, 5, {"fedncm": "none", "fedgh": "none", "ccvr": "classes"}.get(method, "all"))
    answers = []
    for rows, labels in zip(z / np.linalg.norm(z, axis=2, keepdims=True), y):
        of = np.eye(4)[labels]
        square = np.einsum("nc,ni,nj->cij", of, rows, rows)[:, *np.triu_indices(5)]
        found = {"count": of.sum(axis=0), "sum": of.T @ rows, "square": square}
        found["square"] = square if joint.squares == "classes" else square.sum(axis=0)
        answers.append({n: found[n] for n in joint.shapes})
    long = {n: a * 1e6 * (-1 if n == "sum" else 1) for n, a in answers[0].items()}
    median = np.median([joint.length(a) for a in (long, *answers[1:])])
    capped = {n: a * 2 * median / joint.length(long) for n, a in long.items()}

    def totals(first: dict[str, Any], cap: float) -> np.ndarray:
        prefix = {"ccvr": STATISTICS, "fedgh": NOISED}.get(method, SUMS)
        replies = [
            Reply(
                k, 40, {prefix + n: a for n, a in of.items()}, {}, kind="train" if method == "fedgh" else "query.sums"
            )
            for k, of in enumerate([first, *answers[1:]])
        ]
        if method == "fedgh":
            made = test_fedgh.strategy()
            made.context = test_fedgh.context(4, 5, np.zeros((4, 5)))
            made.policy = Policy(guard(count_cap=cap), Privacy("example", 1.0, 1e-5, 1e-9))
            return made.reader.reduce("train", replies, {}).rows("lar")[0].rows
        server = test_ccvr.server if method == "ccvr" else closedform.server
        args = ("cov=sums base=none",) if method == "ccvr" else (method, "base=none")
        context = test_ccvr.context if method == "ccvr" else closedform.context
        strategy, state = server(*args, context(4, 5))  # type: ignore[operator]
        strategy.policy = Policy(guard(count_cap=cap), Privacy("example", 1.0, 1e-5, 1e-9))
        if isinstance(strategy, CCVR):
            return np.asarray(
                statistics(state["model"], strategy.settings.cov, asking(strategy, lambda *_: replies))[0].means
            )
        assert isinstance(strategy, HeadFromSums)
        return closedform.summed(strategy, state, lambda *_: replies).sums["b"]

    np.testing.assert_allclose(totals(long, 2), totals(capped, 0), rtol=1e-6, atol=1e-6)
    assert np.abs(totals(long, 0) - totals(capped, 0)).max() > 0.1
    assert np.array_equal(totals(answers[0], 1e9), totals(answers[0], 0))


@pytest.mark.full
@pytest.mark.parametrize(("method", "args"), [*((m, "") for m in HEADS), ("ccvr", "cov=sums epochs=1")])
def test_a_node_that_makes_up_its_counts_moves_the_head_no_farther_than_the_cap(
    method: str, args: str, tmp_path: Path
) -> None:
    """One of five nodes multiplies its counts and sums by 1e5, in its registration too; 1e6 then changes nothing."""

    def run(name: str, factor: float, **settings: Any) -> np.ndarray:
        def lie(kind: str, reply: Message) -> Message:
            reply.content[METRICS]["num-examples"] = int(reply.content[METRICS]["num-examples"]) * int(factor)
            if kind in ("query.sums", "query.totals", "query.statistics"):
                return change_arrays(reply, lambda n, a: (a * factor).astype(a.dtype))
            return reply

        found = federate(
            tmp_path / name, [1], lie, 5, nodes=True, method=method, min_replies=0.8,
            method_args=f"base=none {args}", protocols="received", final_training=False, **settings,
        )  # fmt: skip
        assert found.summary["calibration"]["clients"] == 5
        return read_safetensors(found.out / "models" / "last.safetensors")[0]["head.weight"]

    one, ten, free = run("one", 1e5), run("ten", 1e6), run("free", 1e6, count_cap=0.0)
    np.testing.assert_allclose(one, ten, rtol=1e-3, atol=1e-5)
    assert np.abs(one - free).max() > 1e-3 * np.abs(one).max()


def test_heads_of_sums_have_a_cap_on_real_nodes_and_none_in_simulations() -> None:
    """Which methods have which cap is in the table of declarations."""
    for values, most in (({"method": "fed3r"}, 10), ({"method": "fedgh", "dp": "example", "dp-epsilon": 1.0}, 10),
                         ({"method": "fed3r", "secure-sum": True}, 0)):  # fmt: skip
        config = from_flat(values)
        caps = [config.resolved(simulation=simulated).robustness.count_cap for simulated in (False, True)]
        assert caps == [most, 0], values
    with pytest.raises(BadRequest, match="count-cap limits the weights of clients, and fedamp has none"):
        from_flat({"method": "fedamp", "count-cap": 3.0})
