"""The statistics that comparisons, reports and the ledger share, against enumeration and worked numbers."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedapp.results import statistics
from fedapp.results.intervals import differences_of

# ---- over clients and rounds -----------------------------------------------------------------------------------------


def test_worst_client_and_tenth() -> None:
    assert statistics.worst([0.9, 0.5, math.nan, 0.7]) == (0.5, 0.5)
    assert statistics.worst([i / 20 for i in range(20)]) == (0.0, pytest.approx(0.025))
    assert statistics.worst([0.1, 0.2, *[1.0] * 9]) == (0.1, pytest.approx(0.15)), "11 clients: a tenth is two"
    assert all(math.isnan(v) for v in statistics.worst([]))


def test_a_correlation_within_rows_is_that_of_what_is_left_of_them() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.random((4, 5)) + np.arange(4)[:, None], rng.random((4, 5)) - np.arange(4)[:, None]
    left = [(v - v.mean(axis=1, keepdims=True)).ravel() for v in (a, b)]
    assert statistics.within_rows(a, b) == pytest.approx(np.corrcoef(*left)[0, 1])
    unknown = np.r_[b, np.full((1, 5), np.nan)]
    assert statistics.within_rows(np.r_[a, a[:1]], unknown) == statistics.within_rows(a, b)
    assert math.isnan(statistics.within_rows(a, np.ones((4, 5))))


ROUNDS = pd.DataFrame(
    {
        "round": [1, 2, 3],
        "clients": [4, 3, 4],
        "dropped": [0, 1, 0],
        "bytes_up": [10.0, 20.0, 10.0],
        "bytes_down": [5.0, 5.0, 5.0],
        "trained_accuracy": [0.5, 0.8, 0.7],
    }
)


def test_a_client_whose_reply_was_dropped_had_downloaded_its_arrays() -> None:
    assert list(statistics.traffic(ROUNDS)) == [60.0, 140.0, 200.0]
    assert list(statistics.traffic(ROUNDS.drop(columns="dropped"))) == [60.0, 135.0, 195.0]
    assert list(statistics.traffic(ROUNDS[["round"]])) == [0.0, 0.0, 0.0]


def test_rounds_and_bytes_to_a_target() -> None:
    curve = pd.DataFrame({"completed": [0, 1, 3], "accuracy": [0.5, 0.8, 0.7], "bytes": [0.0, 60.0, 200.0]})
    assert statistics.reached(curve, 0.7) == (1.0, 60.0)
    assert statistics.reached(curve, 0.5) == (0.0, 0.0)
    assert all(math.isnan(v) for v in statistics.reached(curve, 0.81))
    assert all(math.isnan(v) for v in statistics.reached(curve.iloc[:0], 0.1))
    assert all(math.isnan(v) for v in statistics.reached(curve, math.nan))


# ---- over seeds ------------------------------------------------------------------------------------------------------


def test_spread_over_seeds_is_that_of_a_sample() -> None:
    assert statistics.mean_and_std([0.5, None, 0.7]) == (pytest.approx(0.6), pytest.approx(0.2 / 2**0.5))
    mean, std = statistics.mean_and_std([0.5, math.nan])
    assert mean == 0.5 and math.isnan(std)
    assert all(math.isnan(v) for v in statistics.mean_and_std([]))


def test_the_interval_of_a_row_is_that_of_the_t_test() -> None:
    wanted = stats.ttest_1samp([0.02, 0.05, 0.03], 0).confidence_interval(0.9)
    found = differences_of({"row": [0.02, 0.05, 0.03, math.nan]}, 0.001)["row"]
    assert (found.mean - found.inner, found.mean + found.inner) == pytest.approx((wanted.low, wanted.high))


def test_seeds_that_agree_exactly_are_known_to_a_resolution() -> None:
    """Three seeds of ten clients with 45 test rows: one step of their mean is 1 / 450."""
    step = statistics.resolution([45] * 10)
    assert step == 1 / 450 and statistics.resolution([10, 10, 70, None, 0]) == 1 / 30
    error = step / 12**0.5 / 3**0.5
    assert differences_of({"row": [0.025] * 3}, step)["row"].inner == pytest.approx(stats.t.ppf(0.95, 2) * error)


def test_one_seed_is_not_tested() -> None:
    assert math.isnan(statistics.resolution([]))
    assert math.isnan(differences_of({"row": [0.3]}, 0.1)["row"].inner)


# ---- tests -----------------------------------------------------------------------------------------------------------


def test_holm_on_worked_numbers() -> None:
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.6, 0.5]) == [1.0, 1.0]
    assert statistics.holm([]) == []
    assert statistics.holm([0.02, math.nan, 0.04]) == pytest.approx([0.04, math.nan, 0.04], nan_ok=True)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_what_stepping_down_rejects(p: list[float]) -> None:
    corrected = statistics.holm(p)
    for level in (0.01, 0.05, 0.2):
        rejected = set()
        for step, index in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
            if (len(p) - step) * p[index] > level:
                break
            rejected.add(index)
        assert rejected == {i for i, v in enumerate(corrected) if v <= level}
    assert all(c >= q for c, q in zip(corrected, p))


# ---- as text ---------------------------------------------------------------------------------------------------------


def test_numbers_as_text() -> None:
    assert statistics.percent(0.1234) == "12.3" and statistics.percent(0.1234, 2, " %") == "12.34 %"
    assert statistics.percent(None) == statistics.percent(math.nan) == "–"
    assert statistics.spread(pd.Series([0.5, 0.7])) == "60.0 ± 14.1"
    assert statistics.spread([0.5, 0.7], signed=True) == "+60.0 ± 14.1"
    assert statistics.spread([2000.0, None], 1, 0) == "2,000"
    assert statistics.spread(pd.Series([math.nan, None])) == "–"
    assert statistics.until(pd.Series([3.0, 5.0])) == "4.0"
    assert statistics.until(pd.Series([3.0, math.nan]), digits=0) == "3 (1/2)"
    assert statistics.until(pd.Series([math.nan])) == "never"
    assert [statistics.size(n) for n in (None, 9_999, 10_000, 1_500_000, 2e9)] == [
        "–", "9,999 B", "10.0 kB", "1.5 MB", "2.0 GB",
    ]  # fmt: skip
    assert [statistics.duration(t) for t in (None, 119.0, 120, 7200)] == ["–", "119.0 s", "2.0 min", "2.0 h"]
