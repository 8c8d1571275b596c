"""Robust averages: loops written out, permutations, liars up to the stated number and one too many, refusals."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest
from scipy.optimize import minimize

from fedapp.core import gaussian, robust
from fedapp.core.averages import RunningMean, lower_median
from fedapp.core.robust import RobustMean, combined, fitting, needed, parsed
from fedapp.reduce import rules_ccvr, rules_cwfedavg, rules_fedgh
from tests.handmade import guard

F = 2
EVERY = ("norm", "median", "trimmed", "krum", "multikrum", "geomedian", "norm+trimmed", "norm+multikrum")


def updates(k: int = 9, d: int = 5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(k, d))


def of(text: str, u: np.ndarray, w: np.ndarray | None = None, f: int = F) -> np.ndarray:
    return combined(u, np.ones(len(u)) if w is None else w, parsed(text), f)


# ---- oracles ---------------------------------------------------------------------------------------------------------


def length(row: list[float]) -> float:
    return sum(x * x for x in row) ** 0.5


def test_norm_against_a_loop() -> None:
    u, w = updates(), np.arange(1.0, 10.0)
    limit = statistics.median(length(row) for row in u.tolist())
    short = [[x * min(1.0, limit / length(row)) for x in row] for row in u.tolist()]
    mean = [sum(n * row[j] for n, row in zip(w, short)) / sum(w) for j in range(5)]
    np.testing.assert_allclose(of("norm", u, w), mean, rtol=1e-12)


def test_median_and_trimmed_against_loops() -> None:
    for u in (updates(9), updates(8)):
        columns = [sorted(column) for column in u.T.tolist()]
        np.testing.assert_allclose(of("median", u), [statistics.median(c) for c in columns], rtol=1e-12)
        expected = [statistics.fmean(c[F : len(c) - F]) for c in columns]
        np.testing.assert_allclose(of("trimmed", u), expected, rtol=1e-12)


def slow_scores(u: np.ndarray, f: int) -> list[float]:
    scores = []
    for i, a in enumerate(u.tolist()):
        others = sorted(sum((x - y) ** 2 for x, y in zip(a, b)) for j, b in enumerate(u.tolist()) if j != i)
        scores.append(sum(others[: len(u) - f - 2]))
    return scores


def test_krum_and_multikrum_against_loops() -> None:
    for seed in range(5):
        u = updates(seed=seed)
        scores = slow_scores(u, F)
        np.testing.assert_allclose(robust.krum_scores(u, F), [scores, slow_scores(u, -1)], rtol=1e-12)
        order = sorted(range(9), key=scores.__getitem__)
        np.testing.assert_array_equal(of("krum", u), u[order[0]])
        # The kept ones count alike, whatever they weigh: a weight would let one of them decide alone.
        np.testing.assert_allclose(of("multikrum", u, np.arange(1.0, 10.0)), u[order[:7]].mean(axis=0), rtol=1e-12)


def test_distances_of_long_updates_keep_their_digits() -> None:
    u = updates() + 1e6
    np.testing.assert_allclose(robust.krum_scores(u, F)[0], slow_scores(u, F), rtol=1e-6)


def test_geometric_median_against_an_optimiser() -> None:
    u, w = updates(), np.array([1, 1, 1, 5, 1, 1, 2, 1, 3.0])
    found = of("geomedian", u, w)
    best = minimize(lambda z: w @ np.linalg.norm(u - z, axis=1), w @ u / w.sum(), method="Nelder-Mead",
                    options={"xatol": 1e-9, "fatol": 1e-12, "maxiter": 20_000, "maxfev": 20_000})  # fmt: skip
    np.testing.assert_allclose(found, best.x, atol=1e-4)


def test_geometric_median_leaves_and_reaches_points_of_the_data() -> None:
    """On a line the geometric median is the weighted median, which is one of the points."""
    x, w = np.array([[1.0], [0.0], [-1.0], [-1.0], [0.0]]), np.array([0.24, 0.76, 2.61, 2.67, 3.64])
    assert robust.geometric_median(x, w).tolist() == [-1.0]
    rng = np.random.default_rng(0)
    for _ in range(50):
        k, d = int(rng.integers(3, 10)), int(rng.integers(1, 4))
        u, w = rng.integers(-2, 3, (k, d)).astype(float), rng.integers(1, 100, k) / 10
        starts = [*u, w @ u / w.sum()]
        least = min(sum_of(z, u, w) for z in starts)
        for start in starts if d > 1 else ():
            least = min(least, minimize(sum_of, start, args=(u, w), method="Nelder-Mead").fun)
        assert sum_of(robust.geometric_median(u, w), u, w) <= 1.001 * least


def sum_of(z: np.ndarray, u: np.ndarray, w: np.ndarray) -> float:
    return sum(float(n) * length(row) for n, row in zip(w, (u - z).tolist()))


def test_rules_run_from_left_to_right() -> None:
    u = updates() * np.arange(1, 10)[:, None]
    np.testing.assert_allclose(of("norm+trimmed", u), robust.trimmed_mean(robust.bounded(u), F))
    kept = u[robust.multikrum(u, F)]
    np.testing.assert_allclose(of("multikrum+norm", u), robust.bounded(kept).mean(axis=0))
    bound = robust.bounded(u)
    np.testing.assert_allclose(of("norm+multikrum", u), bound[robust.multikrum(bound, F)].mean(axis=0))
    assert not np.allclose(of("norm+multikrum", u), of("multikrum+norm", u))


@pytest.mark.parametrize("count", range(1, 9))
def test_no_half_of_the_clients_raises_a_lower_median(count: int) -> None:
    honest, liars = [3.0, 1.0, 2.0, 4.0][: (count + 1) // 2], [1e9] * (count // 2)
    assert lower_median([*liars, *honest]) == statistics.median_low([*liars, *honest]) <= max(honest)
    assert lower_median([]) == 0.0


def test_counts_are_capped_at_a_multiple_of_the_median() -> None:
    assert robust.capped([10, 20, 30, 40, 1e9], 2).tolist() == [10, 20, 30, 40, 60]
    assert robust.capped([10, 20, 30, 40, 1e9], 0).tolist() == [10, 20, 30, 40, 1e9]
    assert robust.capped([], 2).tolist() == []


@pytest.mark.parametrize("lie", [1e9, 1e3])
def test_of_two_senders_neither_raises_the_bound_of_its_own_lie(lie: float) -> None:
    assert robust.capped([20, lie], 10).tolist() == [20, 200]
    assert np.linalg.norm(robust.bounded(np.array([[3.0, 4.0], [0.0, lie]])), axis=1).tolist() == [5, 5]
    shares = np.array([[0.5, 0.5], [1.0, 0.0]])
    n, p = rules_cwfedavg.capped_masses([20, lie], shares)
    np.testing.assert_allclose(n[:, None] * p, [[10, 10], [20, 0]])
    rows = [(np.array([0]), np.array([[float(x)]]), np.array([n])) for x, n in ((1, 10), (9, lie))]
    assert robust.class_means(rows, np.zeros((1, 1)), guard(count_cap=2.0))[0][0, 0] == pytest.approx(190 / 30)
    moments = {"ids": np.array([0]), "mean": np.zeros((1, 2)), "cov": np.zeros((1, 2))}
    found, _ = rules_ccvr.screened_statistics([moments | {"count": np.array([n])} for n in (20, lie)])
    assert [arrays["count"].tolist() for arrays in found] == [[20], [80]]


def test_statistics_of_one_client_count_for_a_multiple_of_the_median_total() -> None:
    counts = [[10, 20], [5, 5], [60, 0, 10], [10**9, 1, 10**9, 10]]
    answers = [{"count": np.array(c), "mean": np.zeros((len(c), 2))} for c in counts]
    found = robust.capped_statistics(answers, 2)  # totals 30, 10, 70, 2e9: the lower median is 30
    assert [arrays["count"].tolist() for arrays in found] == [*counts[:2], [51, 0, 8], [28, 1, 28, 1]]
    assert [a["count"].tolist() for a in robust.capped_statistics(answers, 0)] == counts
    of_two = robust.capped_statistics([answers[0], answers[3]], 2)
    assert of_two[1]["count"].sum() <= 60 and of_two[1]["count"].dtype == np.int64
    assert answers[3]["count"].tolist() == counts[3]  # what came in stays as it is
    for arrays in robust.capped_statistics([{**a, "sum": 3.0 * a["count"][:, None]} for a in answers], 2):
        np.testing.assert_allclose(arrays["sum"], 3.0 * arrays["count"][:, None], rtol=1e-12)  # the means stay
    ones = [{"count": np.array(c)} for c in ([1], [1], [3, *[1] * 8])]  # no class is left without a sample
    assert robust.capped_statistics(ones, 2)[2]["count"].tolist() == [1] * 9
    assert robust.capped_statistics([], 2) == []


# ---- invariants ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", EVERY)
def test_the_order_of_clients_does_not_matter(text: str) -> None:
    u, w = updates(), np.arange(1.0, 10.0)
    expected = of(text, u, w)
    for seed in range(5):
        p = np.random.default_rng(seed).permutation(9)
        np.testing.assert_allclose(of(text, u[p], w[p]), expected, rtol=1e-10, atol=1e-12)


def test_two_updates_that_are_nearest_to_each_other_have_one_order() -> None:
    u = np.array([[0.0], [1.0], [5.0]])  # with f = 0 the first two have the same score
    assert all(of("krum", u[list(p)], f=0) == 1.0 for p in itertools.permutations(range(3)))


@pytest.mark.parametrize("text", EVERY)
def test_a_consensus_comes_back(text: str) -> None:
    u = np.repeat(updates(1), 9, axis=0)
    np.testing.assert_allclose(of(text, u), u[0], rtol=1e-12)


# ---- liars -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", [1e3, -1e3, 3e38, -3e38, 1e200])
@pytest.mark.parametrize("text", EVERY)
def test_f_liars_cannot_pull_a_rule_away(text: str, lie: float) -> None:
    """Honest updates have lengths up to 3: no result may be longer, whatever two of nine send."""
    u = updates()
    limit = 2 * np.linalg.norm(u, axis=1).max()
    u[:F] = lie * (1 + updates(F, seed=1))
    found = of(text, u)
    assert np.isfinite(found).all() and np.linalg.norm(found) <= limit


@pytest.mark.parametrize("text", ["median", "trimmed", "krum", "multikrum", "geomedian"])
def test_more_liars_than_honest_clients_decide(text: str) -> None:
    u = updates()
    u[:5] = 1e3 + 1e-3 * updates(5, seed=1)
    assert np.linalg.norm(of(text, u)) > 100


def test_a_weighted_rule_needs_a_cap() -> None:
    u = updates(9)
    u[0] = 1e3
    w = np.array([1e9, *[50.0] * 8])
    assert np.linalg.norm(of("geomedian", u, w)) > 100
    assert np.linalg.norm(of("geomedian", u, robust.capped(w, 2))) < 3
    # norm bounds each update, but not how much of the mean one client is.
    alone = robust.bounded(u)[0]
    np.testing.assert_allclose(of("norm", u, w), alone, rtol=1e-5)
    assert not np.allclose(of("norm", u, robust.capped(w, 2)), alone, rtol=0.5)


# ---- composition -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "needs"),
    [("none", 1), ("norm", 5), ("median", 5), ("trimmed", 5), ("krum", 7), ("multikrum", 7), ("geomedian", 5),
     ("multikrum+trimmed", 7), ("multikrum+norm", 7), ("norm+krum", 7), ("multikrum+krum", 9)],
)  # fmt: skip
def test_how_many_clients_a_rule_needs(text: str, needs: int) -> None:
    assert needed(parsed(text), 2) == needs


@pytest.mark.parametrize(
    ("text", "said"),
    [("median+norm", "must come last"), ("norm+norm", "twice"), ("zork", "unknown rule 'zork'"), ("", "unknown"),
     ("norm+own", "stands alone")],
)  # fmt: skip
def test_what_cannot_be_composed_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parsed(text)


def test_few_senders_take_a_weaker_rule() -> None:
    assert fitting(("multikrum",), 2, 7) == ("multikrum",)
    assert fitting(("multikrum",), 2, 6) == ("median",)
    assert fitting(("multikrum",), 2, 3) == ("norm",)
    assert fitting(("norm",), 2, 4) == ("norm",)
    assert fitting((), 2, 1) == ()


# ---- means of models -------------------------------------------------------------------------------------------------


def models(k: int = 9) -> tuple[dict, list[dict]]:
    rng = np.random.default_rng(4)
    sent = {"a": rng.normal(size=(3, 2)).astype(np.float32), "b": rng.normal(size=()).astype(np.float32)}
    return sent, [{n: (x + rng.normal(size=x.shape)).astype(np.float32) for n, x in sent.items()} for _ in range(k)]


@pytest.mark.parametrize("text", EVERY)
def test_a_mean_of_models_is_what_was_sent_plus_the_combined_update(text: str) -> None:
    sent, replies = models()
    mean = RobustMean(sent, parsed(text), F)
    for i, reply in enumerate(replies):
        mean.add(reply, i + 1)
    got = mean.mean()
    flat = np.stack([np.concatenate([(m[n].astype(float) - sent[n]).ravel() for n in sent]) for m in replies])
    step = of(text, flat, np.arange(1.0, 10.0))
    np.testing.assert_allclose(got["a"], sent["a"] + step[:6].reshape(3, 2), atol=1e-6)
    np.testing.assert_allclose(got["b"], sent["b"] + step[6], atol=1e-6)
    assert got["a"].dtype == np.float32 and got["b"].shape == () and mean.replies == 9 and mean.used == parsed(text)


def test_without_rules_a_mean_is_the_running_one() -> None:
    assert isinstance(robust.mean_of({}, guard(count_cap=10)), RunningMean)
    assert isinstance(robust.mean_of({}, guard(robust="own", robust_f=1)), RunningMean)
    assert isinstance(robust.mean_of({}, guard(robust="norm", robust_f=1)), RobustMean)


def test_a_model_with_other_arrays_is_refused() -> None:
    sent, (first, *_) = models()
    with pytest.raises(ValueError, match="were sent: b"):
        RobustMean(sent, ("median",), 1).add({"a": first["a"]}, 1)
    with pytest.raises(ValueError, match="no model"):
        RobustMean(sent, ("median",), 1).mean()


# ---- classes ---------------------------------------------------------------------------------------------------------


def test_vectors_of_classes_are_combined_over_their_senders() -> None:
    rng = np.random.default_rng(0)
    previous = rng.normal(size=(4, 3))
    sends = [[0, 1], [0, 1], [0, 2], [0, 1], [0, 2], [0], [0]]
    vectors = [rng.normal(size=(len(s), 3)).astype(np.float32) for s in sends]
    vectors[0][:] = 1e6
    replies = [(np.array(s), v, np.ones(len(s))) for s, v in zip(sends, vectors)]
    values, sent, weaker = robust.class_means(replies, previous, guard(robust="trimmed", robust_f=2))
    every = np.stack([v[0] for v in vectors]).astype(float)
    np.testing.assert_allclose(values[0], robust.trimmed_mean(every, 2), atol=1e-9)
    assert weaker == {1: "norm", 2: "norm"} and sent.tolist() == [True, True, True, False]
    np.testing.assert_array_equal(values[3], previous[3])
    three = np.stack([vectors[k][1] for k in (0, 1, 3)]).astype(float) - previous[1]
    np.testing.assert_allclose(values[1], previous[1] + robust.bounded(three).mean(axis=0))


def test_weights_of_classes_are_capped_at_their_own_median() -> None:
    replies = [(np.array([0]), np.array([[float(x)]]), np.array([n])) for x, n in ((1, 10), (2, 10), (9, 10**9))]
    values = robust.class_means(replies, np.zeros((1, 1)), guard(count_cap=2.0))[0]
    assert values[0, 0] == pytest.approx((1 * 10 + 2 * 10 + 9 * 20) / 40)


# ---- FedGH, cwFedAvg, CCVR -------------------------------------------------------------------------------------------


def test_screening_against_a_loop_and_for_few() -> None:
    rows = np.vstack([updates(6), 50 * np.ones((1, 5))])
    middle = [statistics.median(c) for c in rows.T.tolist()]
    far = [length([x - m for x, m in zip(row, middle)]) for row in rows.tolist()]
    assert robust.screened(rows).tolist() == [d <= 3 * statistics.median(far) for d in far]
    assert robust.screened(rows).tolist() == [True] * 6 + [False]
    assert robust.screened(rows[-3:]).all()


@pytest.mark.parametrize(
    ("counts", "most"),
    [([30], 60), ([30, 10**9], 60), ([10**9, 30], 60), ([10, 30, 10**9], 60), ([10, 30, 50, 70], 60)],
)
def test_no_client_raises_the_limit_of_its_own_count(counts: list[int], most: int) -> None:
    assert robust.count_limit(counts, 2) == most and robust.count_limit(counts, 0) is None


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_covariances_the_smaller_bounds_both(order: tuple[int, int]) -> None:
    two = [
        {"ids": np.array([3]), "count": np.array([9]), "mean": np.zeros((1, 2)), "cov": np.full((1, 2), v)}
        for v in (1.0, 1e6)
    ]
    assert rules_ccvr.scale_covariances([two[k] for k in order]) == 1
    assert two[0]["cov"].tolist() == [[1, 1]] and two[1]["cov"].tolist() == [[rules_ccvr.TRACE, rules_ccvr.TRACE]]


def test_class_means_of_fedgh_are_bounded_and_screened() -> None:
    rng = np.random.default_rng(1)
    centre = np.ones(20)
    lars = [(np.array([0, 1]), np.stack([centre, -centre]) + 0.1 * rng.normal(size=(2, 20))) for _ in range(5)]
    lars.append((np.array([0]), -centre[None]))  # a swapped class is left out
    lars.append((np.array([0, 2]), np.full((2, 20), 1e3)))  # a long one is shortened, and too far where others vote
    kept, rows = rules_fedgh.screened_lars(lars)
    assert [k.tolist() for k in kept] == [[True, True]] * 5 + [[False], [False, True]]
    typical = np.median([np.linalg.norm(r) for _, m in lars for r in m])
    assert np.linalg.norm(rows[6][1]) == pytest.approx(2 * typical)  # alone in its class: the median of all classes
    np.testing.assert_array_equal(rows[0], lars[0][1])
    assert rules_fedgh.screened_lars([]) == ([], [])


def test_changes_of_rows_of_heads_are_bounded_by_their_class() -> None:
    rng = np.random.default_rng(2)
    sent = rng.normal(size=(5, 3, 4))
    new = sent + rng.normal(size=(5, 3, 4))
    new[0, 1] *= 1000
    got = rules_cwfedavg.row_bounded(new, sent)
    for j in range(3):
        limit = statistics.median(length(row) for row in (new - sent)[:, j].tolist())
        for k in range(5):
            change = length((new - sent)[k, j].tolist())
            np.testing.assert_allclose(got[k, j], sent[k, j] + (new - sent)[k, j] * min(1, limit / change))


def test_changes_of_whole_models_are_bounded_together() -> None:
    sent, replies = models(5)
    replies[0] = {n: (sent[n] + 1e4 * (a - sent[n])).astype(np.float32) for n, a in replies[0].items()}
    changes = [[float(x) for n in sent for x in (m[n].astype(float) - sent[n]).ravel()] for m in replies]
    limit = statistics.median(length(row) for row in changes)
    for got, model, row in zip(robust.changes_bounded(replies, [sent] * 5), replies, changes):
        share = min(1.0, limit / length(row))
        for n in sent:
            np.testing.assert_allclose(got[n], sent[n] + share * (model[n].astype(float) - sent[n]), atol=1e-5)
            assert got[n].dtype == np.float32 and got[n].shape == sent[n].shape


def test_the_mass_of_a_class_is_capped_among_those_that_hold_it() -> None:
    p = np.array([[1, 0, 0], [0.5, 0.5, 0], [0.5, 0.5, 0], [0.1, 0.5, 0.4]])
    n, shares = rules_cwfedavg.capped_masses([10**9, 40, 20, 100], p)
    # Class 0 is held by all: masses 1e9, 20, 10, 10 with lower median 10. Class 2 is one client's, so nobody can vote.
    np.testing.assert_allclose(n[:, None] * shares, [[20, 0, 0], [20, 20, 0], [10, 10, 0], [10, 40, 40]])
    np.testing.assert_allclose(shares.sum(axis=1), 1)


def test_pulls_by_hand() -> None:
    model = {"w": np.zeros((2, 2)), "b": np.zeros(1)}

    def moved(far: float) -> dict[str, np.ndarray]:
        return {"w": np.array([[3.0, 0.0], [0.0, 0.0]]) * far, "b": np.array([4.0]) * far}

    without = [moved(f) for f in (1.0, 2.0, 3.0, 20.0, 0.0)]
    np.testing.assert_allclose(rules_ccvr.pulls(without, model), [0.5, 1.0, 1.5, 10.0, 0.0])
    assert rules_ccvr.pulls(without[:3], model).tolist() == [0, 0, 0], "three are too few for a vote"
    assert rules_ccvr.pulls([model] * 5, model).tolist() == [0] * 5
    assert rules_ccvr.pulls([], model).tolist() == []


def answer(mode: str, client: int, samples: int = 40) -> dict:
    rng = np.random.default_rng(client)
    y = rng.integers(0, 3, size=samples)
    z = rng.normal(size=(samples, 4)) + 5 * np.eye(3, 4)[y]
    return gaussian.to_arrays(gaussian.moments(z, y, 3, gaussian.form_of(mode)), mode, rank=2)


MODES = ("full", "diag", "lowrank", "pooled")


def trace(arrays: dict, mode: str, row: int) -> float:
    if mode == "lowrank":
        return float(np.trace(arrays["factor"][row].T @ arrays["factor"][row]) + arrays["rest"][row].sum())
    if mode == "diag":
        return float(arrays["cov"][row].sum())
    return float(np.trace(gaussian.unpack(arrays["cov"] if mode == "pooled" else arrays["cov"][row], 4)))


@pytest.mark.parametrize("mode", MODES)
def test_honest_statistics_stay_as_they_are(mode: str) -> None:
    answers = [answer(mode, c) for c in range(6)]
    found, report = rules_ccvr.screened_statistics(answers)
    assert report == {"capped": 0, "left_out": 0, "scaled": 0}
    for before, after in zip(answers, found):
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[n], after[n]) for n in before)


@pytest.mark.parametrize("mode", MODES)
def test_lying_statistics_are_capped_left_out_and_scaled(mode: str) -> None:
    answers = [answer(mode, c) for c in range(6)]
    liar = answers[0]
    counts = np.array([a["count"] for a in answers])
    liar["count"] = np.full(3, 10**9)
    liar["mean"] = liar["mean"][[1, 0, 2]]  # two classes are swapped, the third is honest
    scale = np.float32(1e4)
    for name in ("cov", "rest"):
        if name in liar:
            liar[name] = liar[name] * scale
    if "factor" in liar:
        liar["factor"] = liar["factor"] * np.sqrt(scale)
    found, report = rules_ccvr.screened_statistics(answers)
    assert found[0]["ids"].tolist() == [2] and report["left_out"] == 2 and report["capped"] == 3
    counts[0] = 10**9
    assert found[0]["count"].tolist() == [int(4 * statistics.median_low(counts[:, 2].tolist()))]
    others = [trace(a, mode, 0 if mode == "pooled" else 2) for a in found[1:]]
    mine = trace(found[0], mode, 0)
    assert report["scaled"] == 1 and mine == pytest.approx(4 * statistics.median([*others, 1e9]), rel=0.5)
    assert not any(gaussian.problem_of(a, mode, 3, 4) for a in found)
    assert liar["count"][0] == 10**9  # the reply itself is only read


def test_one_sample_has_no_vote_on_a_trace() -> None:
    answers = [answer("diag", c) for c in range(3)] + [answer("diag", c, samples=1) for c in (4, 5, 6, 7, 8, 9)]
    assert rules_ccvr.screened_statistics(answers)[1]["scaled"] == 0
