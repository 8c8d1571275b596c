"""Low-rank form: worked numbers, energy and size by definition, round trips, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedapp.core.lowrank import compress, problem_of, rank_for, ranks, rebuild

TOY = np.array([[3, 0, 0, 1], [0, 2, 0, 0], [1, 0, 0.5, 0]], np.float32)


def test_worked_ranks() -> None:
    s = np.linalg.svd(TOY, compute_uv=False)
    np.testing.assert_allclose(s, [3.306021, 2, 0.565885], atol=1e-6)
    np.testing.assert_allclose(np.cumsum(s**2) / (s**2).sum(), [0.716706, 0.979002, 1], atol=1e-6)
    assert [rank_for(s, e) for e in (0.5, 0.95, 0.98, 1.0)] == [1, 2, 3, 3]


def test_worked_rebuild() -> None:
    """Rank 2 of the 3 x 4 toy has 16 numbers against 12; two copies below each other make it worth while."""
    tall = np.vstack([TOY] * 4)
    parts = compress({"w": tall}, 0.95)
    assert ranks(parts) == {"w": 2}
    back = rebuild(parts, {"w": tall.shape})["w"][:3]
    expected = [[3.019857, 0, 0.141382, 0.912364], [0, 2, 0, 0], [0.935928, 0, 0.043818, 0.282764]]
    np.testing.assert_allclose(back, expected, atol=2e-6)
    assert np.linalg.norm(back - TOY) == pytest.approx(0.565885, abs=1e-5)
    assert set(compress({"w": TOY}, 0.95)) == {"w"}, "factors of 16 numbers do not replace 12"


def test_all_values_needed_are_all_kept() -> None:
    """A loop that stops before the last value would leave rank 0 here."""
    assert rank_for(np.ones(5), 0.99) == 5
    assert rank_for(np.array([1.0]), 0.5) == 1


def test_zeros_have_rank_zero_and_come_back() -> None:
    shapes = {"w": (6, 5), "c": (4, 3, 3, 3)}
    parts = compress({n: np.zeros(s, np.float32) for n, s in shapes.items()}, 0.9)
    assert ranks(parts) == {"w": 0, "c": 0} and problem_of(parts, shapes) is None
    back = rebuild(parts, shapes)
    assert all(back[n].shape == s and not back[n].any() for n, s in shapes.items())


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 2), st.floats(0.1, 1.0), st.integers(0, 1000))
@settings(deadline=None, max_examples=60)
def test_energy_is_kept_with_the_smallest_rank(m: int, n: int, more: int, energy: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = (m, n, *([2] * more))
    array = (rng.normal(size=shape) * rng.integers(0, 2, size=shape)).astype(np.float32)
    arrays = {"w": array, "b": rng.normal(size=m).astype(np.float32)}
    parts = compress(arrays, energy)
    shapes = {k: a.shape for k, a in arrays.items()}
    assert problem_of(parts, shapes) is None
    back = rebuild(parts, shapes)
    assert back["b"] is arrays["b"]
    total = float((array.astype(np.float64) ** 2).sum())
    lost = float(((back["w"].astype(np.float64) - array) ** 2).sum())
    assert lost <= (1 - energy) * total + 1e-5 * total
    assert sum(a.size for a in parts.values()) <= sum(a.size for a in arrays.values())
    if "w/s" in parts and len(parts["w/s"]) > 1:
        s = np.linalg.svd(array.reshape(m, -1).astype(np.float64), compute_uv=False)
        fewer = (s[: len(parts["w/s"]) - 1] ** 2).sum()
        assert fewer < energy * (s**2).sum() * (1 + 1e-5)


def test_factors_of_a_low_rank_matrix_are_smaller() -> None:
    rng = np.random.default_rng(0)
    array = (rng.normal(size=(50, 2)) @ rng.normal(size=(2, 40))).astype(np.float32)
    parts = compress({"w": array}, 0.9999)
    assert ranks(parts) == {"w": 2}
    assert sum(a.size for a in parts.values()) == 2 * (50 + 40 + 1)
    np.testing.assert_allclose(rebuild(parts, {"w": array.shape})["w"], array, atol=1e-4)


def test_break_even_of_the_published_small_model() -> None:
    """Largest ranks at which factors are smaller than the matrix, for the layers of CNN-5 with 10 classes."""
    for shape, rank in (((16, 75), 13), ((32, 400), 29), ((500, 800), 307), ((500, 500), 249), ((10, 500), 9)):
        m, n = shape
        assert rank * (m + n + 1) < m * n <= (rank + 1) * (m + n + 1)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({}, "missing"),
        ({"w": np.zeros((4, 3))}, "'w' is float64"),
        ({"w": np.zeros((5, 4), int)}, "int64"),
        ({"w/u": np.zeros((5, 1)), "w/s": np.zeros(1)}, "missing"),
        ({"w/u": np.zeros((5, 1)), "w/s": np.zeros(1), "w/v": np.zeros((2, 4))}, "w/v"),
        ({"w/u": np.zeros((5, 6)), "w/s": np.zeros(6), "w/v": np.zeros((6, 4))}, "rank 6"),
        ({"w": np.zeros((5, 4)), "x": np.zeros(1)}, "'x' is not an array"),
        ({"w": np.zeros((5, 4)), "w/u": np.zeros((5, 1))}, "'w/u' is not an array"),
    ],
)
def test_bad_parts_are_named(parts: dict[str, np.ndarray], words: str) -> None:
    assert words in str(problem_of(parts, {"w": (5, 4)}))


def test_full_rank_is_possible() -> None:
    parts = {"w/u": np.zeros((5, 4)), "w/s": np.zeros(4), "w/v": np.zeros((4, 4))}
    assert problem_of(parts, {"w": (5, 4)}) is None


def test_a_vector_has_no_factors() -> None:
    assert "missing" in str(
        problem_of({"b/u": np.zeros((3, 1)), "b/s": np.zeros(1), "b/v": np.zeros((1, 1))}, {"b": (3,)})
    )
