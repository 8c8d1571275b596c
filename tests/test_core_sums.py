"""Sums of features and the heads that follow from them: worked numbers, oracles in NumPy, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedapp.core import gaussian, sums
from tests.closedform import CLIENTS, together

Z, Y = together(CLIENTS)
H = np.column_stack([Z, np.ones(10)])


def summed(z: Any, y: Any, classes: int = 3, batches: int = 1, squares: bool = True) -> dict[str, np.ndarray]:
    found = sums.FeatureSums(classes, np.shape(z)[1], squares)
    for rows in np.array_split(np.arange(len(y)), batches):
        found.update(torch.tensor(np.asarray(z)[rows]), torch.tensor(np.asarray(y)[rows]))
    return found.arrays()


def whole(z: Any = Z, y: Any = Y, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    arrays = summed(z, y, classes)
    return gaussian.unpack(arrays["a"], np.shape(z)[1] + 1), arrays["b"]


def test_sums_of_the_worked_example() -> None:
    a, b = whole()
    assert a.tolist() == [[69, 67, 21], [67, 168, 36], [21, 36, 10]]
    assert b.T.tolist() == [[10, 6, 5], [6, 25, 5], [4, 5, 1]]
    found = sums.FeatureSums(3, 2)
    found.update(torch.tensor(Z), torch.tensor(Y))
    assert np.triu(found.squares()).tolist() == [[69, 67], [0, 168]]
    first = summed(*CLIENTS[0])
    assert gaussian.unpack(first["a"], 3).tolist() == [[15, 18, 7], [18, 55, 15], [7, 15, 5]]
    assert first["b"].T.tolist() == [[6, 1, 0], [6, 9, 0], [3, 2, 0]]


@pytest.mark.parametrize("batches", [1, 3, 10])
def test_sums_equal_a_product_of_all_rows(batches: int) -> None:
    rng = np.random.default_rng(1)
    z, y = rng.normal(100, 1, (40, 6)), rng.choice([0, 2], 40)
    arrays = summed(z, y, batches=batches)
    h = np.column_stack([z, np.ones(40)])
    np.testing.assert_allclose(gaussian.unpack(arrays["a"], 7), h.T @ h, rtol=1e-14)
    np.testing.assert_allclose(arrays["b"], np.eye(3)[y].T @ h, rtol=1e-14)
    assert set(summed(z, y, squares=False)) == {"b"} and arrays["b"].dtype == np.float64


def test_scatter_within_is_that_of_the_moments() -> None:
    """One (A, b) holds what CCVR's statistics hold of the common covariance."""
    rng = np.random.default_rng(2)
    z, y = rng.normal(5, 1, (60, 4)), rng.integers(0, 3, 60)
    wanted = gaussian.moments(z, y, 3)
    np.testing.assert_allclose(sums.scatter_within(*whole(z, y)), wanted.pooled_cov() * wanted.degrees, atol=1e-11)


# ---- ridge ---------------------------------------------------------------------------------------------------------


def test_ridge_of_the_worked_example() -> None:
    a, b = whole()
    small = [[-0.010682, -0.127326, 0.139261], [-0.219948, 0.153936, 0.067223], [1.213030, 0.213002, -0.434017]]
    one = [[0.071165, -0.109009, 0.105498], [-0.136142, 0.165060, 0.037308], [0.673331, 0.122456, -0.232596]]
    bare = [[0.179878, -0.093864, 0.071080], [-0.036021, 0.186232, 0.001414], [0, 0, 0]]
    np.testing.assert_allclose(sums.ridge(a, b, 0.01).T, small, atol=1e-6)
    np.testing.assert_allclose(sums.ridge(a, b, 1.0).T, one, atol=1e-6)
    np.testing.assert_allclose(sums.ridge(a, b, 0.01, bias=False).T, bare, atol=1e-6)
    mean = np.trace(a) / 3
    np.testing.assert_allclose(sums.ridge(a, b, 0.01 / mean, relative=True).T, small, atol=1e-6)


@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_ridge_is_least_squares_on_rows_stacked_with_the_penalty(shift: float) -> None:
    rng = np.random.default_rng(3)
    z, y = rng.normal(shift, 1, (80, 6)), rng.integers(0, 4, 80)
    rows = np.vstack([np.column_stack([z, np.ones(80)]), np.sqrt(0.3) * np.eye(7)])
    wanted = np.linalg.lstsq(rows, np.vstack([np.eye(4)[y], np.zeros((7, 4))]), rcond=None)[0].T
    np.testing.assert_allclose(sums.ridge(*whole(z, y, 4), 0.3), wanted, atol=1e-9)


def test_ridge_survives_second_moments_that_are_not_definite() -> None:
    """Each answer is checked, but what rounding or a liar takes off may exceed a small penalty."""
    a, b = whole()
    found = sums.ridge(a - 1.7 * np.eye(3), b, 1e-9)
    assert np.isfinite(found).all()


# ---- nearest mean --------------------------------------------------------------------------------------------------


def test_nearest_mean_of_the_worked_example() -> None:
    b = whole()[1]
    cosine, euclidean = sums.nearest_mean(b, "cosine"), sums.nearest_mean(b, "euclidean")
    wanted = [[0.857493, 0.514496, 0], [0.233373, 0.972387, 0], [0.707107, 0.707107, 0]]
    np.testing.assert_allclose(cosine, wanted, atol=1e-6)
    np.testing.assert_allclose(euclidean, [[2.5, 1.5, -4.25], [1.2, 5, -13.22], [5, 5, -25]], atol=1e-12)
    np.testing.assert_allclose(cosine @ [2, 2.5, 1], [3.001225, 2.897714, 3.181981], atol=1e-6)
    np.testing.assert_allclose(euclidean @ [2, 2.5, 1], [4.5, 1.68, -2.5], atol=1e-12)
    assert (cosine @ [5, 2, 1]).argmax() == (euclidean @ [5, 2, 1]).argmax() == 0


# ---- linear discriminant analysis ----------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", ["uniform", "pooled"])
def test_discriminant_is_the_log_of_gaussian_densities(prior: Any) -> None:
    rng = np.random.default_rng(4)
    z, y = rng.normal(0, 1, (90, 3)) @ rng.normal(0, 1, (3, 3)), rng.choice(4, 90, p=[0.5, 0.3, 0.2, 0])
    rows = sums.discriminant(*whole(z, y, 4), 0.2, prior)
    means = np.stack([z[y == c].mean(axis=0) for c in range(3)])
    centred = z - means[y]
    sigma = centred.T @ centred / (90 - 3)
    sigma = 0.8 * sigma + 0.2 * np.trace(sigma) / 3 * np.eye(3)
    pi = np.bincount(y, minlength=3) / 90 if prior == "pooled" else np.full(3, 1 / 3)
    x = rng.normal(0, 2, (20, 3))
    gaps = x[:, None] - means
    wanted = -0.5 * np.einsum("ncd,de,nce->nc", gaps, np.linalg.inv(sigma), gaps) + np.log(pi)
    got = x @ rows[:3, :3].T + rows[:3, 3]
    np.testing.assert_allclose(got - got[:, :1], wanted - wanted[:, :1], atol=1e-9)
    assert not rows[3].any()


def test_a_discriminant_does_not_depend_on_the_unit_of_features() -> None:
    rows, tiny = (sums.discriminant(*whole(unit * Z, Y), 0.2, "pooled") for unit in (1.0, 2.0**-30))
    np.testing.assert_allclose(tiny[:, :-1] * 2.0**-30, rows[:, :-1], rtol=1e-9)
    np.testing.assert_allclose(tiny[:, -1], rows[:, -1], rtol=1e-9)


def test_a_discriminant_knows_a_small_spread_far_from_0() -> None:
    rng = np.random.default_rng(0)
    z, y = 1e-4 * rng.normal(size=(300, 40)), rng.integers(0, 3, 300)
    near, far = (np.diff(sums.discriminant(*whole(z + offset, y), 0.1, "uniform")[:, :-1], axis=0) for offset in (0, 1))
    np.testing.assert_allclose(far, near, rtol=1e-3, atol=1e-4 * np.abs(near).max())


def test_without_any_spread_the_discriminant_is_the_nearest_mean() -> None:
    z, y = np.array([[1.0, 2], [3, 1], [1, 2]]), np.array([0, 1, 0])
    got = sums.discriminant(*whole(z, y), 0.1, "uniform")[:2]
    wanted = sums.nearest_mean(whole(z, y)[1], "euclidean")[:2]
    np.testing.assert_allclose(got[:, :2], wanted[:, :2], atol=1e-12)
    np.testing.assert_allclose(got[1, 2] - got[0, 2], wanted[1, 2] - wanted[0, 2], atol=1e-12)


# ---- FedCOF --------------------------------------------------------------------------------------------------------


def test_scatter_of_means_of_the_worked_example() -> None:
    parts = [summed(*c, squares=False)["b"] for c in CLIENTS]
    np.testing.assert_allclose(sums.scatter_of_means(parts, 1.0), [[68.7, 63.6], [63.6, 152.6]], atol=1e-12)
    wanted = [[0.981410, -0.191925, 0], [-0.450658, 0.892696, 0], [0.998362, 0.057210, 0]]
    np.testing.assert_allclose(sums.cof(parts, 1.0), wanted, atol=1e-6)


# ---- heads and temperature -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1 / 64, 1024.0])
def test_an_unseen_class_loses_far_from_0_too(scale: float) -> None:
    """Logits of the two seen classes at (50, 50): -30000; a fixed -10000 would win."""
    b = np.array([[300.0, 0, 1], [0, 300, 1], [0, 0, 0]])
    a = np.diag([9e4, 9e4, 2.0])
    for rows in (sums.nearest_mean(b, "euclidean"), 100 * sums.discriminant(a, b, 0.5, "uniform")):
        weight, bias = sums.as_head(rows, b[:, -1] > 0, scale)
        logits = np.array([[50, 50], [300, 0], [-1000, 1000]], np.float32) @ weight.T + bias
        assert (logits[:, 2] < logits[:, :2].max(axis=1) - 9_000).all()


def test_a_class_without_samples_loses_and_the_scale_multiplies_logits() -> None:
    rows = np.array([[1.0, -2, 3], [3, 4, 5], [9, 9, 9]])
    weight, bias = sums.as_head(rows, np.array([True, True, False]), 2.0)
    assert weight.tolist() == [[2, -4], [6, 8], [4, 2]] and bias.tolist() == [6, 10, 8 + sums.UNSEEN]
    assert weight.dtype == bias.dtype == np.float32


def test_losses_by_scale_and_the_best_of_them() -> None:
    rng = np.random.default_rng(5)
    logits, labels = torch.tensor(rng.normal(0, 1, (30, 3))), torch.tensor(rng.integers(0, 3, 30))
    losses = sums.scaled_losses(logits, labels)
    assert losses.shape == sums.SCALES.shape == (65,) and sums.SCALES[[0, 24, 64]].tolist() == [1 / 64, 1, 1024]
    for k in (0, 24, 30):
        p = torch.softmax(sums.SCALES[k] * logits, dim=1)[torch.arange(30), labels]
        assert losses[k] == pytest.approx(float(-p.log().sum()), rel=1e-12)
    assert sums.best_scale(np.abs(np.log2(sums.SCALES) - 3)) == 8


# ---- what came from elsewhere ----------------------------------------------------------------------------------------


def broken(change: Callable[[dict[str, np.ndarray], np.ndarray], Any]) -> str | None:
    arrays = summed(*CLIENTS[0])
    a = gaussian.unpack(arrays["a"], 3)
    change(arrays, a)
    if "a" in arrays and arrays["a"].shape == (6,):
        arrays["a"] = gaussian.pack(a)
    return sums.problem_of(arrays, 3, 2, np.float64)


def put(name: str, place: Any, value: float) -> Callable[[dict[str, np.ndarray], np.ndarray], None]:
    def change(arrays: dict[str, np.ndarray], a: np.ndarray) -> None:
        (a if name == "a" else arrays[name])[place] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda arrays, a: arrays.pop("b"), "sums consist of"),
        (lambda arrays, a: arrays.update(c=a), "sums consist of"),
        (lambda arrays, a: arrays.update(b=arrays["b"].astype(np.float32)), "float64"),
        (lambda arrays, a: arrays.update(b=arrays["b"][:2]), "shape"),
        (lambda arrays, a: arrays.update(a=np.zeros(9)), "shape"),
        (put("b", (0, 0), np.nan), "finite"),
        (put("a", (0, 0), np.inf), "finite"),
        (put("b", (0, 2), -1), "numbers of samples"),
        (put("b", (0, 2), 2.5), "numbers of samples"),
        (put("b", (2, 0), 1), "has a sum of features"),
        (put("b", (0, 0), 4e4), "last column"),
        (put("a", (0, 0), -1), "negative diagonal"),
        (put("a", (2, 2), 6), "counts 6 samples"),
        (put("a", (0, 2), 8), "last column"),
        (put("a", (0, 0), 12.4), "no features"),
        (put("a", (0, 1), 40), "no features"),
    ],
)
def test_arrays_that_are_no_sums_are_refused(change: Any, words: str) -> None:
    assert broken(lambda arrays, a: None) is None
    assert words in (broken(change) or "")


def test_the_refusal_leaves_room_for_rounding() -> None:
    rng = np.random.default_rng(6)
    for offset in (0.0, 1e3):
        z = np.column_stack([rng.normal(offset, 1e-3, (50, 8)), np.zeros((50, 3)), np.full((50, 2), offset)])
        z = z.astype(np.float32).astype(np.float64)
        assert sums.problem_of(summed(z, rng.integers(0, 3, 50)), 3, 13, np.float64) is None
        one = summed(z[:1], np.array([1]))
        assert sums.problem_of(one, 3, 13, np.float64) is None
    nothing = sums.FeatureSums(3, 2).arrays()
    assert sums.problem_of(nothing, 3, 2, np.float64) is None
    rounded = {n: np.rint(x * 8) / 8 for n, x in summed(rng.normal(2, 0.01, (50, 8)), rng.integers(0, 3, 50)).items()}
    assert sums.problem_of(rounded, 3, 8, np.float64) and not sums.problem_of(rounded, 3, 8, np.float64, lost=1 / 16)


@pytest.mark.parametrize(
    ("penalty", "rss", "df", "error"),
    [
        (0.01, 1.808353, 2.991302, 0.368136),
        (1.0, 2.247991, 2.510115, 0.400723),
        (10.0, 3.597745, 1.840207, 0.540346),
        (100.0, 5.486459, 0.950909, 0.670011),
    ],
)
def test_cross_validation_of_the_worked_example(penalty: float, rss: float, df: float, error: float) -> None:
    found = sums.cross_validated(*whole(), 10.0, np.array([penalty]))
    np.testing.assert_allclose([float(f[0]) for f in found], [rss, df, error], rtol=2e-6)


def test_cross_validation_from_sums_is_that_of_the_hat_matrix() -> None:
    rng = np.random.default_rng(0)
    z, y = rng.normal(size=(40, 6)), rng.integers(0, 3, 40)
    h, target = np.column_stack([z, np.ones(40)]), np.eye(3)[y]
    for penalty in (1e-3, 1.0, 50.0):
        hat = h @ np.linalg.solve(h.T @ h + penalty * np.eye(7), h.T)
        wanted = ((target - hat @ target) ** 2).sum() / 40 / (1 - np.trace(hat) / 40) ** 2
        _, _, error = sums.cross_validated(*whole(z, y), 40.0, np.array([penalty]))
        np.testing.assert_allclose(error, [wanted], rtol=1e-10)
    few = whole(z[:5], y[:5])
    assert np.isinf(sums.cross_validated(*few, 3.0, np.array([1e-9]))[2]).all(), "more degrees of freedom than samples"


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_the_penalty_of_cross_validation_is_beyond_that_which_fits_noise(offset: float) -> None:
    """About as many samples as features: 0.01 fits their noise, wherever the features lie."""
    rng = np.random.default_rng(0)
    means = rng.normal(size=(4, 120))
    y, other = rng.integers(0, 4, 121), rng.integers(0, 4, 2000)
    z, new = (means[labels] / 3 + rng.normal(size=(len(labels), 120)) + offset for labels in (y, other))

    def accuracy(penalty: float) -> float:
        rows = sums.ridge(*whole(z, y, 4), penalty)
        return float(((new @ rows[:, :-1].T + rows[:, -1]).argmax(axis=1) == other).mean())

    penalty, inside = sums.best_penalty(*whole(z, y, 4))
    assert inside and accuracy(penalty) > accuracy(0.01) + 0.2
    assert np.abs(sums.PENALTIES * z.var(axis=0).mean() / penalty - 1).min() < 1e-6, "multiples of the mean variance"
    shuffled = rng.permutation(121)
    np.testing.assert_allclose(sums.best_penalty(*whole(z[shuffled], y[shuffled], 4))[0], penalty, rtol=1e-6)


def test_cross_validation_names_the_end_of_its_grid_and_features_without_any_difference() -> None:
    np.testing.assert_allclose(sums.PENALTIES, 10 ** np.linspace(-2, 5, 29), rtol=1e-12)
    y = np.arange(60) % 2
    assert not sums.best_penalty(*whole(np.eye(2)[y], y, 2))[1], "no penalty is too small where features are labels"
    assert sums.best_penalty(*whole(np.ones((6, 3)), np.arange(6) % 2, 2)) == (1.0, True)
