"""Kernels on stacked models: worked numbers, double-loop oracles, memory forms, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedapp.core.pairwise import (
    combine,
    cosine_matrix,
    gram,
    product,
    squared_distances,
    stack,
    unstack,
)

CLIENTS = np.array([[1.2, 0.8], [0.6, 1.4], [1.5, 1.5]])


def random_models(rng: np.random.Generator, count: int, dtype: type = np.float32) -> list[dict[str, np.ndarray]]:
    shapes = {"conv": (3, 2, 2), "scale": (), "empty": (0, 4), "head": (5, 7)}
    return [
        {name: np.array(rng.normal(size=shape), dtype=dtype) for name, shape in shapes.items()} for _ in range(count)
    ]


def test_fedamp_distances_and_mixture_worked_numbers() -> None:
    squared = squared_distances(CLIENTS)
    np.testing.assert_allclose(squared, [[0, 0.72, 0.58], [0.72, 0, 0.82], [0.58, 0.82, 0]], atol=1e-12)
    attention = 0.05 * np.exp(-squared)
    np.fill_diagonal(attention, 0)
    np.fill_diagonal(attention, 1 - attention.sum(axis=1))
    expected = [[0.947667, 0.024338, 0.027995], [0.024338, 0.953641, 0.022022], [0.027995, 0.022022, 0.949983]]
    np.testing.assert_allclose(attention, expected, atol=6e-7)
    mixed = [[1.193796, 0.834199], [0.634422, 1.387600], [1.471782, 1.478201]]
    np.testing.assert_allclose(combine(attention, CLIENTS), mixed, atol=6e-7)


def test_heurfedamp_cosine_worked_numbers() -> None:
    scores = np.exp(10 * cosine_matrix(CLIENTS))
    np.fill_diagonal(scores, 0)
    attention = 0.5 * scores / scores.sum(axis=1, keepdims=True) + 0.5 * np.eye(3)
    expected = [[0.5, 0.096573, 0.403427], [0.143637, 0.5, 0.356363], [0.313695, 0.186305, 0.5]]
    np.testing.assert_allclose(attention, expected, atol=6e-7)


def test_cfl_cosine_and_norm_worked_numbers() -> None:
    updates = CLIENTS - 1
    np.testing.assert_allclose(cosine_matrix(updates), [[1, -1, 0], [-1, 1, 0], [0, 0, 1]], atol=1e-12)
    inner = gram(updates)
    assert math.sqrt(inner.mean()) == pytest.approx(0.253859, abs=6e-7)
    assert math.sqrt(inner.diagonal().max()) == pytest.approx(0.707107, abs=6e-7)


def test_fedfomo_combination_worked_numbers() -> None:
    weights = np.array([[1 - 1.0, 0.454540, 0, 0.545460]])
    models = np.vstack([np.ones(2), CLIENTS])
    np.testing.assert_allclose(combine(weights, models), [[1.363638, 1.181822]], atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 5, 16, 1000])
@pytest.mark.parametrize("form", ["matrix", "models"])
def test_matrices_against_double_loops(chunk: int, form: str) -> None:
    models = random_models(np.random.default_rng(0), 6)
    theta, _ = stack(models)
    given_as = theta if form == "matrix" else models
    rows = [[float(v) for v in row] for row in theta]
    dots = [[sum(a * b for a, b in zip(x, y)) for y in rows] for x in rows]
    squared = [[sum((a - b) ** 2 for a, b in zip(x, y)) for y in rows] for x in rows]
    cosine = [[dots[i][j] / math.sqrt(dots[i][i] * dots[j][j]) for j in range(6)] for i in range(6)]
    np.testing.assert_allclose(gram(given_as, chunk), dots, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(squared_distances(given_as, chunk), squared, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(cosine_matrix(given_as, chunk), cosine, rtol=1e-12, atol=1e-12)


def test_small_distances_of_long_vectors_are_kept() -> None:
    # Norms of 1e5 and differences of 1e-3: float32 inner products would lose the distance altogether.
    rng = np.random.default_rng(1)
    base = 1e3 * rng.normal(size=10_000)
    theta = np.stack([base, base + 1e-5 * rng.normal(size=base.size), base + 1e-5 * rng.normal(size=base.size)])
    direct = ((theta[:, None] - theta[None]) ** 2).sum(axis=2)
    np.testing.assert_allclose(squared_distances(theta), direct, rtol=1e-9)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 6), width=st.integers(1, 12))
def test_properties_of_the_matrices(seed: int, count: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    theta = rng.normal(size=(count, width)).astype(np.float32)
    theta[rng.integers(count)] = theta[0]
    order = rng.permutation(count)
    for kernel in (gram, squared_distances, cosine_matrix):
        matrix = kernel(theta)
        np.testing.assert_array_equal(matrix, matrix.T)
        np.testing.assert_allclose(kernel(theta[order]), matrix[np.ix_(order, order)], atol=1e-10)
    squared, cosine = squared_distances(theta), cosine_matrix(theta)
    assert (squared >= 0).all()
    assert (np.diag(squared) == 0).all()
    assert (np.abs(cosine) <= 1).all()
    assert (np.diag(cosine) == 1).all()
    np.testing.assert_allclose(squared_distances(theta + np.float32(1)), squared, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(cosine_matrix(3 * theta), cosine, atol=1e-6)


def test_cosine_of_a_client_that_did_not_move() -> None:
    cosine = cosine_matrix(np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]))
    np.testing.assert_array_equal(cosine, np.eye(3))


def test_stack_and_unstack() -> None:
    models = random_models(np.random.default_rng(2), 4)
    theta, layout = stack(models)
    assert theta.shape == (4, 12 + 1 + 0 + 35) == (4, layout.size)
    assert theta.dtype == np.float32
    for model, back in zip(models, unstack(theta, layout)):
        assert list(back) == list(model)
        for name, array in model.items():
            np.testing.assert_array_equal(back[name], array)
            assert back[name].size == 0 or np.shares_memory(back[name], theta)
    heads, layout = stack(models, ["head"])
    np.testing.assert_array_equal(heads, [model["head"].ravel() for model in models])
    assert layout.names == ("head",)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("chunk", [1, 6, 1000])
def test_combine_against_loops_in_both_forms(dtype: type, chunk: int) -> None:
    rng = np.random.default_rng(3)
    models = random_models(rng, 5, dtype)
    weights = rng.dirichlet(np.ones(5), size=3)
    results = combine(weights, models, chunk=chunk)
    assert len(results) == 3
    tolerance = 1e-14 if dtype is np.float64 else 1e-6
    for row, result in zip(weights, results):
        assert list(result) == list(models[0])
        for name, array in models[0].items():
            expected = sum(w * m[name].astype(np.float64) for w, m in zip(row, models))
            assert result[name].shape == array.shape
            assert result[name].dtype == (np.float64 if dtype is np.float64 else np.float32)
            np.testing.assert_allclose(result[name], expected, atol=tolerance)
    theta = np.stack([np.concatenate([a.ravel() for a in m.values()]) for m in models])
    stacked = combine(weights, theta, chunk=chunk)
    np.testing.assert_allclose(stacked, weights @ theta.astype(np.float64), atol=tolerance)


def test_a_chain_of_factors() -> None:
    rng = np.random.default_rng(4)
    left, right, theta = rng.normal(size=(3, 2)), rng.normal(size=(2, 5)), rng.normal(size=(5, 40))
    np.testing.assert_allclose(product([left, right], theta, chunk=7), left @ right @ theta, atol=1e-12)


@pytest.mark.parametrize("factors", [1, 2])
def test_in_place_in_both_forms(factors: int) -> None:
    rng = np.random.default_rng(5)
    chain = [rng.normal(size=(4, 4)) for _ in range(factors)]
    models = random_models(rng, 4)
    theta, layout = stack(models)
    expected = product(chain, theta)
    product(chain, models, out=models, chunk=3)
    assert product(chain, theta, out=theta, chunk=3) is theta
    np.testing.assert_allclose(theta, expected, atol=1e-5)
    np.testing.assert_allclose(stack(models)[0], expected, atol=1e-5)
    assert layout.names == tuple(models[0])


def test_results_are_written_where_asked() -> None:
    rng = np.random.default_rng(6)
    models, weights = random_models(rng, 4), rng.normal(size=(2, 4))
    out = [{name: np.full_like(array, np.nan) for name, array in models[0].items()} for _ in range(2)]
    for result, expected in zip(combine(weights, models, out=out), combine(weights, models)):
        for name in expected:
            np.testing.assert_array_equal(result[name], expected[name])
    assert all(np.isfinite(array).all() for result in out for array in result.values())


def test_models_are_only_read() -> None:
    models = random_models(np.random.default_rng(7), 3)
    before = [{name: array.copy() for name, array in model.items()} for model in models]
    for model in models:
        for array in model.values():
            array.flags.writeable = False
    combine(np.ones((2, 3)), models)
    squared_distances(models)
    for model, old in zip(models, before):
        for name in model:
            np.testing.assert_array_equal(model[name], old[name])


def test_refusals() -> None:
    good = {"w": np.ones(3, dtype=np.float32)}
    with pytest.raises(ValueError, match="at least one model"):
        stack([])
    with pytest.raises(ValueError, match=r"other arrays.*\['v', 'w'\]"):
        stack([good, {"v": good["w"]}])
    with pytest.raises(ValueError, match="shape"):
        gram([good, {"w": np.ones(4, dtype=np.float32)}])
    with pytest.raises(TypeError, match="floating point"):
        combine(np.ones((1, 1)), [{"w": np.ones(3, dtype=np.int64)}])
    with pytest.raises(TypeError, match="floating point"):
        gram(np.ones((2, 2), dtype=np.int64))
    with pytest.raises(ValueError, match="do not chain"):
        combine(np.ones((1, 2)), [good])
    with pytest.raises(ValueError, match="out must be"):
        combine(np.ones((1, 1)), np.ones((1, 3)), out=np.ones((1, 3), dtype=np.float32))
    with pytest.raises(ValueError, match="out has 2"):
        combine(np.ones((1, 1)), [good], out=[good, good])
    with pytest.raises(ValueError, match="no array 'w'"):
        combine(np.ones((1, 1)), [good], out=[{}])
    with pytest.raises(ValueError, match="columns"):
        unstack(np.ones((1, 4)), stack([good])[1])
    with pytest.raises(ValueError, match="chunk"):
        combine(np.ones((1, 1)), [good], chunk=0)
    with pytest.raises(ValueError, match="at least one factor"):
        product([], [good])
