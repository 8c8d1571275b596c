"""The quadratic form on the simplex: all supports by enumeration, the conditions of a minimum, degenerate forms."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedapp.core.simplex import Float64, minimise


def by_enumeration(p: Float64) -> float:
    """The smallest value over all supports on whose interior the form has a critical point."""
    m, best = len(p), np.inf
    for size in range(1, m + 1):
        for support in map(list, itertools.combinations(range(m), size)):
            part = p[np.ix_(support, support)]
            a = np.linalg.lstsq(part, np.ones(size), rcond=None)[0]
            if a.sum() > 0 and (a >= 0).all():
                a /= a.sum()
                best = min(best, float(a @ part @ a))
    return best


def random_form(m: int, rank: int, seed: int, scale: float = 1.0, ridge: float = 0.0) -> Float64:
    rows = np.random.default_rng(seed).normal(0.3, 1, (m, rank))
    p: Float64 = scale * (rows @ rows.T + ridge * np.diag(np.random.default_rng(seed + 1).random(m)))
    return p


@pytest.mark.parametrize("m", [1, 2, 4, 6])
@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e6])
def test_it_is_the_best_of_all_supports(m: int, scale: float) -> None:
    for seed in range(25):
        p = random_form(m, m, seed, scale, ridge=0.1)
        a = minimise(p)
        assert (a >= 0).all() and a.sum() == pytest.approx(1, abs=1e-12)
        assert a @ p @ a == pytest.approx(by_enumeration(p), rel=1e-7, abs=1e-10 * np.trace(p))


@pytest.mark.parametrize(("m", "rank"), [(40, 60), (100, 20), (12, 3)])
def test_the_conditions_of_a_minimum_hold(m: int, rank: int) -> None:
    p = random_form(m, rank, seed=3, ridge=0.05)
    a = minimise(p)
    gradient = p @ a
    level = a @ gradient
    little = 1e-9 * np.trace(p)
    np.testing.assert_allclose(gradient[a > 0], level, atol=little)
    assert (gradient >= level - little).all() and 1 < (a > 0).sum() < m


def test_equal_variables_share_alike_and_one_has_all() -> None:
    np.testing.assert_allclose(minimise(0.7 * np.eye(5)), 0.2, atol=1e-12)
    assert np.array_equal(minimise(np.zeros((3, 3))), np.full(3, 1 / 3))
    assert np.array_equal(minimise(np.array([[4.0]])), [1.0])
    np.testing.assert_allclose(minimise(np.diag([0.0, 1.0, 2.0])), [1, 0, 0], atol=1e-9)


def test_a_variable_that_was_in_may_leave_again() -> None:
    """The smallest diagonal entry is where it starts, and it is not in the answer."""
    rows = np.array([[1.0, 0.9, 0.0], [2.0, -1.0, 0.1], [-1.2, 2.0, 0.1]])
    p = rows @ rows.T
    a = minimise(p)
    assert int(np.argmin(np.diag(p))) == 0 and a[0] == 0 and (a[1:] > 0).all()
    assert a @ p @ a == pytest.approx(by_enumeration(p), abs=1e-9)
