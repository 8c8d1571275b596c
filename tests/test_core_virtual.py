"""Virtual features: worked numbers, factors of singular covariances, moments and streams of draws."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from fedapp.core import virtual
from fedapp.core.gaussian import ClassMoments, Form, moments
from fedapp.core.virtual import (
    EIGH_LIMIT,
    ISOTROPIC,
    Factor,
    allot,
    draw,
    factorise,
    gaussian_of,
    sample,
    virtual_features,
)

TIGHT = {"rtol": 0, "atol": 6e-7}
Z = [[1, 2], [2, 1], [3, 3], [4, 0], [0, 4], [1, 5], [2, 6], [0, 6], [3, 4], [5, 5]]
Y = [0, 0, 0, 0, 1, 1, 1, 1, 1, 2]
MU_1 = np.array([1.2, 5.0])
SIGMA_0 = np.array([[1.666667, -0.666667], [-0.666667, 1.666667]])
SIGMA_1 = np.array([[1.7, -0.25], [-0.25, 1.0]])
EIGH = Factor(np.array([[2.0, 0.5], [0.5, 1.0]]), 0.0, False)


def worked(form: Form = "full") -> ClassMoments:
    return moments(np.array(Z, dtype=np.float64), np.array(Y), 3, form)


def singular(width: int, rank: int, seed: int = 0) -> np.ndarray:
    root = np.random.default_rng(seed).normal(size=(width, rank))
    return root @ root.T / rank


# The Gaussian of a class


@pytest.mark.parametrize("form", ["full", "diag"])
def test_a_class_of_one_sample_takes_the_pooled_covariance(form: Form) -> None:
    mean, cov = gaussian_of(worked(form), 2)
    np.testing.assert_array_equal(mean, [5, 5])
    expected = (3 * SIGMA_0 + 4 * SIGMA_1) / 7
    np.testing.assert_allclose(cov, np.diag(expected) if form == "diag" else expected, **TIGHT)
    np.testing.assert_allclose(gaussian_of(worked(form), 1)[0], MU_1, **TIGHT)


@pytest.mark.parametrize("form", get_args(Form))
def test_single_samples_only_give_a_small_isotropic_spread(form: Form) -> None:
    lonely = moments(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([0, 1]), 2, form)
    expected = ISOTROPIC * (np.ones(2) if form == "diag" else np.eye(2))
    np.testing.assert_array_equal(gaussian_of(lonely, 0)[1], expected)
    assert np.isfinite(virtual_features(lonely, 5, 0)[0]).all()


def test_shrinkage() -> None:
    within = (3 * SIGMA_0 + 4 * SIGMA_1) / 7
    np.testing.assert_allclose(gaussian_of(worked(), 0, 0.25)[1], 0.75 * SIGMA_0 + 0.25 * within, **TIGHT)
    np.testing.assert_allclose(gaussian_of(worked(), 0, 1.0)[1], within, **TIGHT)
    np.testing.assert_allclose(gaussian_of(worked("pooled"), 0, 0.5)[1], within, **TIGHT)


# Factors


def test_factors_and_draws_worked_numbers() -> None:
    statistics = worked()
    cholesky_1 = factorise(statistics.cov(1))
    np.testing.assert_allclose(cholesky_1.matrix, [[1.303840, 0], [-0.191741, 0.981446]], **TIGHT)
    np.testing.assert_allclose(factorise(statistics.cov(0)).matrix, [[1.290994, 0], [-0.516398, 1.183216]], **TIGHT)
    eps = np.array([[0, 0], [1, 0], [0, 1], [-1, 2]], dtype=np.float64)
    drawn = draw(statistics.means[1], cholesky_1, eps)
    np.testing.assert_allclose(drawn, [[1.2, 5], [2.503840, 4.808259], [1.2, 5.981446], [-0.103840, 7.154632]], **TIGHT)


@pytest.mark.parametrize("limit", [EIGH_LIMIT, 0], ids=["eigh", "jitter"])
@pytest.mark.parametrize(("width", "rank"), [(1, 1), (6, 6), (130, 130), (6, 3), (130, 40)])
def test_factors_give_the_covariance_back(limit: int, width: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "EIGH_LIMIT", limit)
    cov = singular(width, rank)
    factor = factorise(cov)
    np.testing.assert_allclose(factor.matrix @ factor.matrix.T, cov + factor.jitter * np.eye(width), atol=1e-9)
    definite = rank == width
    assert factor.triangular == (definite or limit == 0)
    if factor.triangular:
        assert not np.triu(factor.matrix, 1).any()
    if definite or limit:
        assert factor.jitter == 0.0
    else:
        assert factor.jitter == pytest.approx(1e-8 * np.trace(cov) / width, rel=1e-12)


@pytest.mark.parametrize(("width", "jittered"), [(EIGH_LIMIT, False), (EIGH_LIMIT + 1, True)])
def test_from_which_width_a_singular_covariance_gets_a_jitter(width: int, jittered: bool) -> None:
    factor = factorise(np.diag(np.arange(width, dtype=np.float64)))
    assert (factor.jitter > 0) == factor.triangular == jittered


def test_a_pivot_is_small_beside_the_mean_variance() -> None:
    assert factorise(np.diag([1e-6, 1e3])).triangular, "2e-9 of the mean variance"
    assert not factorise(np.diag([1e-8, 1e3])).triangular, "2e-11 of the mean variance"


def test_a_jitter_grows_until_it_is_enough_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """A covariance that rounding on the way has made indefinite."""
    monkeypatch.setattr(virtual, "EIGH_LIMIT", 0)
    factor = factorise(np.diag([2.0, -3e-6]))
    assert factor.jitter == pytest.approx(1e-5, rel=1e-5)
    assert factorise(np.diag([2.0, -4e-3])).jitter == pytest.approx(1e-2, rel=1e-2), "the largest one"
    largest = factorise(np.diag([2.0, -5e-3]))
    assert largest.jitter == pytest.approx(1e-2, rel=1e-2)
    hopeless = factorise(np.diag([2.0, -0.5]))
    assert hopeless.jitter == 0.0 and not hopeless.triangular
    np.testing.assert_allclose(hopeless.matrix, np.diag([np.sqrt(2), 0]), atol=1e-12)


def test_special_covariances() -> None:
    nothing, diagonal = factorise(np.zeros((3, 3))), factorise(np.array([4.0, 0.0, 9.0, -1e-17]))
    assert not nothing.matrix.any() and nothing.jitter == 0.0 and nothing.triangular
    np.testing.assert_allclose(diagonal.matrix, [2, 0, 3, 0])
    assert diagonal.jitter == 0.0 and not diagonal.triangular
    # A rounding error below zero is no reason to fail.
    slightly_negative = np.diag([1.0, 0.0]) - 1e-17
    assert np.isfinite(factorise(slightly_negative).matrix).all()
    with pytest.raises(ValueError, match="finite"):
        factorise(np.array([[np.nan]]))


def test_the_symmetric_root_does_not_depend_on_the_basis() -> None:
    # Equal eigenvalues leave the eigenvectors free to rotate; the draws must not follow them.
    cov = np.diag([2.0, 2.0, 0.0])
    np.testing.assert_allclose(factorise(cov).matrix, np.diag([np.sqrt(2), np.sqrt(2), 0]), atol=1e-12)
    root = factorise(singular(20, 5)).matrix
    np.testing.assert_allclose(root, root.T, atol=1e-12)


# Draws


@pytest.mark.parametrize(
    "factor", [factorise(singular(150, 150)), factorise(singular(150, 20)), factorise(np.arange(150.0)), EIGH]
)
def test_draw_is_the_plain_product(factor: Factor) -> None:
    rng = np.random.default_rng(1)
    width = len(factor.matrix)
    mean, eps = rng.normal(size=width), rng.normal(size=(40, width))
    root = np.diag(factor.matrix) if factor.matrix.ndim == 1 else factor.matrix
    np.testing.assert_allclose(draw(mean, factor, eps), mean + eps @ root.T, atol=1e-11)


@pytest.mark.parametrize("rank", [4, 2])
def test_draws_have_the_mean_and_covariance_asked_for(rank: int) -> None:
    cov, mean = singular(4, rank), np.array([1.0, -2.0, 0.0, 5.0])
    size = 40_000
    drawn = sample(mean, factorise(cov), size, seed=3, label=1).astype(np.float64)
    # Six standard errors of a mean and of a covariance of normal variables.
    deviation = np.sqrt(np.diag(cov))
    assert (np.abs(drawn.mean(axis=0) - mean) <= 6 * deviation / np.sqrt(size)).all()
    spread = np.sqrt((cov**2 + np.outer(deviation, deviation) ** 2) / size)
    assert (np.abs(np.cov(drawn, rowvar=False) - cov) <= 6 * spread + 1e-12).all()
    assert np.linalg.matrix_rank(drawn - mean, tol=1e-3) == rank


def test_draws_are_streams_of_seed_and_class() -> None:
    factor, mean = factorise(singular(5, 5)), np.arange(5.0)
    few, many = (sample(mean, factor, m, seed=1, label=2) for m in (10, 700))
    assert few.dtype == np.float32
    np.testing.assert_array_equal(few, many[:10])
    eps = np.random.default_rng([1, virtual.STREAM, 2]).standard_normal((700, 5))
    np.testing.assert_allclose(many, mean + eps @ factor.matrix.T, rtol=1e-5, atol=1e-6)
    assert not np.array_equal(few, sample(mean, factor, 10, seed=2, label=2))
    assert not np.array_equal(few, sample(mean, factor, 10, seed=1, label=3))
    assert sample(mean, factor, 0, seed=1, label=2).shape == (0, 5)


def test_allotted_draws() -> None:
    counts = np.array([30, 0, 10, 1])
    assert allot(counts, 7).tolist() == [7, 0, 7, 7]
    # 3 classes seen, 300 samples shared as 30 : 10 : 1 of 41.
    assert allot(counts, 100, "proportional").tolist() == [220, 0, 73, 7]
    assert allot(counts, 1, "proportional").tolist() == [2, 0, 1, 1]
    assert allot(np.array([0, 1]), 5, "proportional").tolist() == [0, 5]
    assert allot(np.zeros(2, dtype=np.int64), 5, "proportional").tolist() == [0, 0]


@pytest.mark.parametrize("form", get_args(Form))
@pytest.mark.parametrize("shrinkage", [0.0, 0.3])
def test_virtual_features_are_the_samples_of_every_class(form: Form, shrinkage: float) -> None:
    rng = np.random.default_rng(2)
    y = np.repeat([0, 2, 3], [20, 1, 30])
    statistics = moments(rng.normal(size=(51, 4)) + y[:, None], y, 5, form)
    numbers = [7, 5, 3, 11, 99]
    features, labels, jitter = virtual_features(statistics, numbers, 9, shrinkage)
    np.testing.assert_array_equal(labels, np.repeat([0, 2, 3], [7, 3, 11]))
    assert features.dtype == np.float32
    assert jitter == {}
    for c in (0, 2, 3):
        mean, cov = gaussian_of(statistics, c, shrinkage)
        expected = sample(mean, factorise(cov), numbers[c], seed=9, label=c)
        np.testing.assert_array_equal(features[labels == c], expected)


def test_an_unseen_class_gets_no_virtual_features() -> None:
    partial = moments(np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 1.0]]), np.array([0, 2, 2]), 4)
    features, labels, jitter = virtual_features(partial, 3, 0)
    np.testing.assert_array_equal(labels, [0, 0, 0, 2, 2, 2])
    assert features.shape == (6, 2)
    assert jitter == {}
    with pytest.raises(ValueError, match="class 1"):
        gaussian_of(partial, 1)


def test_jitter_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    z = np.random.default_rng(0).normal(size=(35, 6))
    statistics = moments(z, np.repeat([0, 1], [5, 30]), 2)
    assert virtual_features(statistics, 2, 0)[2] == {}
    monkeypatch.setattr(virtual, "EIGH_LIMIT", 0)
    expected = factorise(statistics.cov(0)).jitter
    assert virtual_features(statistics, 2, 0)[2] == {0: expected} and expected > 0
