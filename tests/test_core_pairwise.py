"""Kernels on all models at once: worked numbers, double-loop oracles, blocks of every size, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedapp.core import pairwise
from fedapp.core.pairwise import combine, cosine_from_gram, cosine_matrix, gram, product, squared_distances

CLIENTS = np.array([[1.2, 0.8], [0.6, 1.4], [1.5, 1.5]])
Models = list[dict[str, np.ndarray]]


def named(theta: np.ndarray) -> Models:
    """Models of one array that are the rows of a matrix."""
    return [{"w": row.copy()} for row in theta]


def stacked(models: Models) -> np.ndarray:
    return np.stack([np.concatenate([array.reshape(-1) for array in model.values()]) for model in models])


def random_models(rng: np.random.Generator, count: int, dtype: type = np.float32) -> Models:
    shapes = {"conv": (3, 2, 2), "scale": (), "empty": (0, 4), "head": (5, 7)}
    return [
        {name: np.array(rng.normal(size=shape), dtype=dtype) for name, shape in shapes.items()} for _ in range(count)
    ]


@pytest.fixture(params=[1, 5, 16, 1000])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Work on few columns at a time."""
    monkeypatch.setattr(pairwise, "CHUNK", request.param)
    return int(request.param)


def test_fedamp_distances_and_mixture_worked_numbers() -> None:
    squared = squared_distances(named(CLIENTS))
    np.testing.assert_allclose(squared, [[0, 0.72, 0.58], [0.72, 0, 0.82], [0.58, 0.82, 0]], atol=1e-12)
    attention = 0.05 * np.exp(-squared)
    np.fill_diagonal(attention, 0)
    np.fill_diagonal(attention, 1 - attention.sum(axis=1))
    expected = [[0.947667, 0.024338, 0.027995], [0.024338, 0.953641, 0.022022], [0.027995, 0.022022, 0.949983]]
    np.testing.assert_allclose(attention, expected, atol=6e-7)
    mixed = [[1.193796, 0.834199], [0.634422, 1.387600], [1.471782, 1.478201]]
    np.testing.assert_allclose(stacked(combine(attention, named(CLIENTS))), mixed, atol=6e-7)


def test_heurfedamp_cosine_worked_numbers() -> None:
    scores = np.exp(10 * cosine_matrix(named(CLIENTS)))
    np.fill_diagonal(scores, 0)
    attention = 0.5 * scores / scores.sum(axis=1, keepdims=True) + 0.5 * np.eye(3)
    expected = [[0.5, 0.096573, 0.403427], [0.143637, 0.5, 0.356363], [0.313695, 0.186305, 0.5]]
    np.testing.assert_allclose(attention, expected, atol=6e-7)


def test_cfl_cosine_and_norm_worked_numbers() -> None:
    inner = gram(named(CLIENTS - 1))
    np.testing.assert_allclose(cosine_from_gram(inner), [[1, -1, 0], [-1, 1, 0], [0, 0, 1]], atol=1e-12)
    assert math.sqrt(inner.mean()) == pytest.approx(0.253859, abs=6e-7)
    assert math.sqrt(inner.diagonal().max()) == pytest.approx(0.707107, abs=6e-7)


def test_fedfomo_combination_worked_numbers() -> None:
    weights = np.array([[1 - 1.0, 0.454540, 0, 0.545460]])
    (mixed,) = combine(weights, named(np.vstack([np.ones(2), CLIENTS])))
    np.testing.assert_allclose(mixed["w"], [1.363638, 1.181822], atol=1e-6)


@pytest.mark.usefixtures("chunk")
def test_matrices_against_double_loops() -> None:
    models = random_models(np.random.default_rng(0), 6)
    rows = [[float(v) for v in row] for row in stacked(models)]
    dots = [[sum(a * b for a, b in zip(x, y)) for y in rows] for x in rows]
    squared = [[sum((a - b) ** 2 for a, b in zip(x, y)) for y in rows] for x in rows]
    cosine = [[dots[i][j] / math.sqrt(dots[i][i] * dots[j][j]) for j in range(6)] for i in range(6)]
    np.testing.assert_allclose(gram(models), dots, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(squared_distances(models), squared, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(cosine_matrix(models), cosine, rtol=1e-12, atol=1e-12)
    from_first = [[sum((a - o) * (b - o) for a, b, o in zip(x, y, rows[0])) for y in rows] for x in rows]
    np.testing.assert_allclose(gram(models, centred=True), from_first, rtol=1e-12, atol=1e-12)


def test_small_distances_of_long_vectors_are_kept() -> None:
    # Norms of 1e5 and differences of 1e-3: float32 inner products would lose the distance altogether.
    rng = np.random.default_rng(1)
    base = 1e3 * rng.normal(size=10_000)
    theta = np.stack([base, base + 1e-5 * rng.normal(size=base.size), base + 1e-5 * rng.normal(size=base.size)])
    direct = ((theta[:, None] - theta[None]) ** 2).sum(axis=2)
    np.testing.assert_allclose(squared_distances(named(theta)), direct, rtol=1e-9)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 6), width=st.integers(1, 12))
def test_properties_of_the_matrices(seed: int, count: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    theta = rng.normal(size=(count, width)).astype(np.float32)
    theta[rng.integers(count)] = theta[0]
    order = rng.permutation(count)
    for kernel in (gram, squared_distances, cosine_matrix):
        matrix = kernel(named(theta))
        np.testing.assert_array_equal(matrix, matrix.T)
        np.testing.assert_allclose(kernel(named(theta[order])), matrix[np.ix_(order, order)], atol=1e-10)
    squared, cosine = squared_distances(named(theta)), cosine_matrix(named(theta))
    assert (squared >= 0).all()
    assert (np.diag(squared) == 0).all()
    assert (np.abs(cosine) <= 1).all()
    assert (np.diag(cosine) == 1).all()
    np.testing.assert_allclose(squared_distances(named(theta + np.float32(1))), squared, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(cosine_matrix(named(3 * theta)), cosine, atol=1e-6)


def test_cosine_of_a_client_that_did_not_move() -> None:
    cosine = cosine_matrix(named(np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])))
    np.testing.assert_array_equal(cosine, np.eye(3))


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_combine_against_loops(dtype: type) -> None:
    rng = np.random.default_rng(3)
    models = random_models(rng, 5, dtype)
    weights = rng.dirichlet(np.ones(5), size=3)
    results = combine(weights, models)
    assert len(results) == 3
    for row, result in zip(weights, results):
        assert list(result) == list(models[0])
        for name, array in models[0].items():
            expected = sum(w * m[name].astype(np.float64) for w, m in zip(row, models))
            assert result[name].shape == array.shape
            assert result[name].dtype == (np.float64 if dtype is np.float64 else np.float32)
            np.testing.assert_allclose(result[name], expected, atol=1e-14 if dtype is np.float64 else 1e-6)


def test_one_array_in_float64_makes_its_product_float64() -> None:
    models = [{"a": np.array([1.0], t), "b": np.array([1.0], np.float32)} for t in (np.float32, np.float64, np.float16)]
    (result,) = combine(np.full((1, 3), 1 / 3), models)
    assert result["a"].dtype == np.float64 and result["b"].dtype == np.float32


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_chain_of_factors(dtype: type) -> None:
    rng = np.random.default_rng(4)
    factors = [rng.normal(size=shape) for shape in ((6, 3), (3, 2), (2, 5))]
    models = random_models(rng, 5, dtype)
    expected = factors[0] @ factors[1] @ factors[2] @ stacked(models)
    tolerance = 1e-12 if dtype is np.float64 else 1e-4
    np.testing.assert_allclose(stacked(product(factors, models)), expected, atol=tolerance)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize(
    "rows_of", ["product", "reversed", "every other", "part", "transposed", "flat", "float64", "read-only"]
)
def test_models_that_lie_in_one_block_of_memory_or_nearly(rows_of: str) -> None:
    """What a product returned is multiplied where it lies; what merely looks like it is not misread."""
    rng = np.random.default_rng(6)
    block = rng.normal(size=(6, 3, 3)).astype(np.float64 if rows_of == "float64" else np.float32)
    block.flags.writeable = rows_of != "read-only"
    rows = {
        "product": [block[i] for i in range(6)],
        "float64": [block[i] for i in range(6)],
        "read-only": [block[i] for i in range(6)],
        "reversed": [block[i] for i in reversed(range(6))],
        "every other": [block[i] for i in (0, 2, 4, 1, 3, 5)],
        "part": [block[i] for i in (1, 2, 3)],
        "transposed": [block[i].T for i in range(6)],
        "flat": [block.reshape(-1)[9 * i : 9 * i + 9].reshape(3, 3) for i in range(6)],
    }[rows_of]
    weights = rng.normal(size=(4, len(rows)))
    found = combine(weights, [{"w": row} for row in rows])
    expected = np.einsum("rm,mij->rij", weights, np.stack(rows).astype(np.float64))
    np.testing.assert_allclose([model["w"] for model in found], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        gram([{"w": row} for row in rows]), [[float((a * b).sum()) for b in rows] for a in rows], rtol=1e-5, atol=1e-5
    )


def test_what_a_product_returned_is_not_copied() -> None:
    models = combine(np.eye(3), random_models(np.random.default_rng(8), 3))
    for name in ("conv", "scale", "head"):
        found = pairwise._one_block([model[name] for model in models], torch.float32)
        assert found is not None and found.data_ptr() == models[0][name].__array_interface__["data"][0]


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
    for kernel in (gram, lambda models: combine(np.ones((1, len(models))), models)):
        with pytest.raises(ValueError, match="at least one model"):
            kernel([])
        with pytest.raises(ValueError, match=r"model 1 has other arrays.*\['v', 'w'\]"):
            kernel([good, {"v": good["w"]}])
        with pytest.raises(ValueError, match=r"'w' of model 1 has shape \(4,\), of model 0 \(3,\)"):
            kernel([good, {"w": np.ones(4, dtype=np.float32)}])
        with pytest.raises(TypeError, match="model 1 has dtype int64: only floating point"):
            kernel([good, {"w": np.ones(3, dtype=np.int64)}])
