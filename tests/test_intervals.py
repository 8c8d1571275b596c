"""Differences over seeds: the interval of a table, its words, the margin, and what few seeds can show."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, stats

from fedapp.results.intervals import Difference, differences_of, margin_of, partition_share, smallest_seen

RNG = np.random.default_rng(5)
THREE = {"a": [0.03, 0.05, 0.04], "b": [0.0, 0.02, -0.01], "c": [-0.06, -0.05, -0.055]}


def test_a_table_of_three_methods_and_three_seeds_by_hand() -> None:
    """The moderated variance with its five lines of arithmetic; points and not shares, to be read."""
    d = {name: 100 * np.array(values) for name, values in THREE.items()}
    s2 = {name: v.var(ddof=1) for name, v in d.items()}  # 1, 2.333, 0.25
    s0 = np.median([v / (2 * math.log(2) / 2) for v in s2.values()])  # the median of chi-squared(2) is 2 ln 2
    for name, v in d.items():
        error = math.sqrt((2 * s0 + 2 * s2[name]) / 4 / 3)
        half = stats.t.ppf(1 - 0.025 / 3, 4) * error
        found = differences_of(THREE, 1e-4)[name]
        wanted = (v.mean(), error, v.mean() - half, v.mean() + half)
        np.testing.assert_allclose(100 * np.array([found.mean, found.error, found.low, found.high]), wanted)
        assert found.freedom == 4


@pytest.mark.parametrize(("rows", "seeds"), [(2, 3), (1, 5), (5, 6)])
def test_few_rows_and_many_seeds_have_the_interval_of_the_t_test(rows: int, seeds: int) -> None:
    table = {str(i): RNG.normal(size=seeds) for i in range(rows)}
    for name, found in differences_of(table, 1e-4).items():
        wanted = stats.ttest_1samp(table[name], 0).confidence_interval(1 - 0.05 / rows)
        assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high))


def test_no_row_is_decided_in_nineteen_of_twenty_tables_without_a_difference() -> None:
    """All intervals of a table hold together, also where the rows share the luck of one reference."""
    wrong = 0
    for _ in range(400):
        common = RNG.normal(size=5)
        table = {str(i): common + RNG.normal(size=5) for i in range(9)}
        wrong += any(d.low > 0 or d.high < 0 for d in differences_of(table, 1e-6).values())
    assert wrong <= 400 * 0.05 + 3 * math.sqrt(400 * 0.05 * 0.95)


def test_seeds_that_agree_have_the_spread_of_rounding() -> None:
    found = differences_of({"a": [0.02] * 3}, 0.01)["a"]
    assert found.error == pytest.approx(0.01 / math.sqrt(12 * 3)) and found.low < 0.02 < found.high


def test_seeds_that_agree_to_an_unknown_resolution_have_a_p() -> None:
    found = differences_of({"a": [0.02] * 2, "b": [0.0] * 2}, math.nan)
    assert (found["a"].p, found["b"].p) == (0, 1)


def test_one_seed_has_no_interval_and_counts_among_the_rows() -> None:
    table = differences_of({**THREE, "d": [0.5]}, 1e-4)
    assert math.isnan(table["d"].error) and table["d"].word(0.01) == ""
    assert differences_of({"two": [0.5, 0.5]}, 1e-4)["two"].word(0.01) == "", "two seeds have no word either"
    assert table["a"].high - table["a"].mean == pytest.approx(stats.t.ppf(1 - 0.025 / 4, 4) * table["a"].error)


@pytest.mark.parametrize(
    ("mean", "error", "word"),
    [
        (0.0, 0.001, "equal"), (0.0, 0.02, "open"), (0.005, 0.0005, "better, by less than the margin"),
        (0.012, 0.001, "better"), (0.05, 0.001, "better by more than the margin"), (-0.012, 0.001, "worse"),
        (-0.05, 0.001, "worse by more than the margin"), (-0.005, 0.0005, "worse, by less than the margin"),
    ],
)  # fmt: skip
def test_words(mean: float, error: float, word: str) -> None:
    found = Difference(np.zeros(3), mean, error, 2.0, rows=1)
    assert found.word(0.01) == word


def test_the_margin_is_a_point_less_near_a_hundred_and_one_test_row_at_least() -> None:
    assert margin_of(0.6, 1000) == 0.01
    assert margin_of(0.97, 1000) == pytest.approx(0.003)
    assert margin_of(0.97, 50) == 0.02


@pytest.mark.parametrize(
    ("seeds", "wanted"),
    [(3, (3.26, 4.62, 2.96, 3.96, 5.71)), (5, (1.68, 2.05, 1.92, 2.39, 3.11)), (10, (1.0, 1.14, 1.22, 1.46, 1.79))],
)
def test_the_smallest_difference_that_is_seen(seeds: int, wanted: tuple[float, ...]) -> None:
    found = [smallest_seen(seeds, k) for k in (1, 2, 3, 9, 37)]
    np.testing.assert_allclose(found, wanted, atol=0.006)


def test_posterior_probabilities_are_integrals_of_the_posterior() -> None:
    found = differences_of({"a": [0.004, 0.012, 0.02, -0.001]}, 1e-4)["a"]
    scale = float(np.std(found.values, ddof=1)) / 2
    edges = [(-np.inf, -0.01), (-0.01, 0.01), (0.01, np.inf)]
    wanted = [integrate.quad(stats.t(3, found.mean, scale).pdf, *edge)[0] for edge in edges]
    np.testing.assert_allclose(found.probabilities(0.01), wanted, atol=1e-6)


def test_the_share_of_partitions_in_the_variance_by_hand() -> None:
    """Four partitions with two training seeds: sums of squares, then the quantiles of F(3, 4) from a table."""
    scores = np.array([[80.0, 82.0], [84.0, 86.0], [90.0, 88.0], [76.0, 78.0]])
    between, within = 2 * (2**2 + 2**2 + 6**2 + 6**2) / 3, 4 * 2 / 4  # mean squares about 83, and within pairs
    ratio, (upper, lower) = between / within, (9.979, 1 / 15.10)
    wanted = [(f - 1) / (f + 1) for f in (ratio, ratio / upper, ratio / lower)]
    np.testing.assert_allclose(partition_share(scores), wanted, rtol=1e-3)
    np.testing.assert_allclose(wanted, [0.928, 0.455, 0.995], atol=5e-4)
    assert partition_share(np.tile([1.0, 2.0], (4, 1)))[:2] == (0, 0), "partitions that differ by less than their seeds"


def test_the_interval_of_the_share_holds_in_nineteen_of_twenty_tables() -> None:
    """Half of the variance lies between partitions."""
    tables = RNG.normal(size=(2000, 4, 1)) + RNG.normal(size=(2000, 4, 2))
    held = sum(low <= 0.5 <= high for _, low, high in map(partition_share, tables))
    assert abs(held / 2000 - 0.95) < 3 * math.sqrt(0.95 * 0.05 / 2000)


def test_few_partitions_and_seeds_that_agree_have_no_share() -> None:
    """With two partitions the variance between them has one degree of freedom: a factor of 5,000."""
    assert all(math.isnan(v) for v in (*partition_share(RNG.normal(size=(3, 2))), *partition_share(np.ones((4, 2)))))
    assert stats.chi2.ppf(0.975, 1) / stats.chi2.ppf(0.025, 1) == pytest.approx(5000, rel=0.03)
