"""Sensitivities against random neighbours and the worst case, the mechanism, the accountant, and what is possible."""

from __future__ import annotations

import itertools
import math
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy.optimize import brentq
from scipy.special import log_ndtr

from fedapp.core import noise
from fedapp.core.gaussian import pack, unpack
from fedapp.core.privacy import (
    Float64,
    Joint,
    Squares,
    Steps,
    clip_rows,
    composed,
    epsilon_of,
    noise_for,
    noised,
    on_grid,
    projected,
    step_of,
)

FORMS: tuple[Squares, ...] = ("none", "all", "classes")


def statistics(z: Float64, y: np.ndarray[Any, Any], joint: Joint) -> Float64:
    """The vector that is released, without noise, image by image."""
    c, d = joint.classes, joint.width
    parts: dict[str, Any] = {"count": np.zeros(c), "sum": np.zeros((c, d))}
    squares = np.zeros((c, d, d))
    for row, label in zip(z, y):
        parts["count"][label] += 1
        parts["sum"][label] += row
        squares[label] += np.outer(row, row)
    if joint.squares == "classes":
        parts["square"] = pack(squares)
    elif joint.squares == "all":
        parts["square"] = pack(squares.sum(axis=0))
    return joint.vector(parts)


@pytest.mark.parametrize(("squares", "bound"), list(itertools.product(FORMS, (1.0, 3.0))))
def test_no_neighbour_is_farther_than_the_sensitivity_and_one_is_as_far(squares: Squares, bound: float) -> None:
    rng = np.random.default_rng(0)
    joint = Joint(3, 5, squares, bound=bound)
    far = 0.0
    for _ in range(300):
        n = int(rng.integers(1, 6))
        z = clip_rows(rng.normal(size=(n, 5)) * rng.exponential(3), bound)
        y = rng.integers(0, 3, n)
        gone = int(rng.integers(n))
        apart = statistics(z, y, joint) - statistics(np.delete(z, gone, 0), np.delete(y, gone), joint)
        far = max(far, float(np.linalg.norm(apart)))
    worst = statistics(bound * np.eye(5)[:1], np.array([1]), joint)
    assert far <= joint.sensitivity * (1 + 1e-12)
    assert np.linalg.norm(worst) == pytest.approx(joint.sensitivity, rel=1e-12)
    assert far == pytest.approx(joint.sensitivity, rel=1e-6)  # rows that were clipped are worst cases too


def test_the_sensitivity_is_the_stated_formula() -> None:
    joint = Joint(2, 16, "all", kappa=0.3, beta=2.0, bound=1.5)
    assert joint.sensitivity == pytest.approx(math.sqrt(0.3**2 + 1.5**2 + (2 * 1.5**2) ** 2))
    assert Joint(2, 16).weight == 0.5
    assert Joint(2, 16).sensitivity == pytest.approx(math.sqrt(1.25))
    assert Joint(2, 16, "all").sensitivity == pytest.approx(math.sqrt(1.5))


@pytest.mark.parametrize("squares", FORMS)
def test_parts_come_back_from_the_vector(squares: Squares) -> None:
    rng = np.random.default_rng(1)
    joint = Joint(3, 4, squares)
    parts = {n: rng.normal(size=s) for n, s in joint.shapes.items()}
    back = joint.parts(joint.vector(parts))
    assert back.keys() == parts.keys()
    assert all(np.allclose(back[n], parts[n], atol=1e-14) for n in parts)
    assert joint.problem_of(back) is None
    assert "consist of" in str(joint.problem_of({}))
    assert "float64 of shape" in str(joint.problem_of({**back, "sum": back["sum"][:1]}))
    assert "finite" in str(joint.problem_of({**back, "count": back["count"] * np.inf}))


def test_the_packed_norm_is_the_frobenius_norm() -> None:
    z = np.random.default_rng(2).normal(size=7)
    joint = Joint(1, 7, "all", beta=1.0)
    vector = joint.vector({"count": np.zeros(1), "sum": np.zeros((1, 7)), "square": pack(np.outer(z, z))})
    assert np.linalg.norm(vector) == pytest.approx(np.linalg.norm(np.outer(z, z)))


def test_rows_are_clipped_to_the_bound_and_what_is_not_finite_counts_as_nothing() -> None:
    rows = np.array([[3.0, 4.0], [0.3, 0.4], [np.nan, 1.0], [np.inf, 0.0], [0.0, 0.0]], dtype=np.float32)
    clipped = clip_rows(rows, 2.0)
    assert np.allclose(clipped, [[1.2, 1.6], [0.3, 0.4], [0, 0], [0, 0], [0, 0]], atol=1e-7)
    assert np.linalg.norm(clip_rows(np.full((1, 3), 1e200), 1.0)) <= 1 + 1e-12
    assert np.isnan(rows[2, 0])  # the given rows are not changed


def test_noise_has_the_stated_deviation_on_each_part() -> None:
    joint = Joint(200, 20, "all", kappa=0.25, beta=0.5)
    exact = joint.vector({n: np.zeros(s) for n, s in joint.shapes.items()})
    parts = joint.parts(noised(exact, joint.sensitivity, 3.0, noise.seeded(0)))
    stated = joint.deviations(3.0)
    assert stated["sum"] == pytest.approx(3 * joint.sensitivity, rel=1e-4)
    assert stated["sum"] >= 3 * joint.sensitivity
    assert stated["count"] == pytest.approx(stated["sum"] / 0.25)
    assert parts["sum"].std() == pytest.approx(stated["sum"], rel=0.05)
    assert parts["count"].std() == pytest.approx(stated["count"], rel=0.2)
    square = unpack(parts["square"], 20)
    assert square[~np.eye(20, dtype=bool)].std() == pytest.approx(stated["square"] / math.sqrt(2), rel=0.2)


def test_what_is_released_lies_on_a_grid_that_the_data_do_not_choose() -> None:
    step = step_of(50, 1.5, 2.0)
    for scale in (0.0, 1e-9, 1.0, 1e5):
        values = scale * np.random.default_rng(0).normal(size=50)
        found = noised(values, 1.5, 2.0, noise.seeded(1))
        assert np.array_equal(found, np.rint(found / step) * step)
    assert noise.STEPS * step >= 2.0 * (1.5 + 2 * math.sqrt(50) * step) * (1 - 1e-12)


def test_what_does_not_fit_the_grid_is_refused() -> None:
    for bad in (np.inf, np.nan, 1e12):
        with pytest.raises(ValueError, match="not finite, or too large"):
            noised(np.array([bad]), 1e-3, 1.0)
    with pytest.raises(ValueError, match="finer grid"):
        step_of(10**12, 1.0, 100.0)


def test_real_noise_differs_from_draw_to_draw() -> None:
    first, second = (noised(np.zeros(40), 1.0, 1.0) for _ in range(2))
    assert not np.intersect1d(first, second).size


# ---- the accountant --------------------------------------------------------------------------------------------------


def test_releases_add_up_as_one() -> None:
    assert composed([10.0] * 100) == pytest.approx(1.0)
    assert composed([3.0, 4.0]) == pytest.approx(2.4)
    assert math.isinf(composed([])) and epsilon_of(composed([]), 1e-5) == 0


def exact_epsilon(noise: float, delta: float) -> float:
    """Epsilon of one Gaussian release of real numbers (Balle, Wang, ICML 2018, Theorem 8)."""

    def excess(epsilon: float) -> float:
        a, b = 1 / (2 * noise), epsilon * noise
        return math.exp(log_ndtr(a - b)) - math.exp(epsilon + log_ndtr(-a - b)) - delta

    return float(brentq(excess, 0, 10 + 10 / noise**2 + 10 / noise, xtol=1e-12)) if excess(0) > 0 else 0.0


def test_epsilon_is_that_of_the_reference_and_never_below_the_exact_one() -> None:
    """100 releases with z = 10: 4.7285 by dp-accounting, 4.37718 by the exact formula."""
    assert epsilon_of(composed([10.0] * 100), 1e-5) == pytest.approx(4.7285, abs=2e-4)
    assert exact_epsilon(1.0, 1e-5) == pytest.approx(4.37718, abs=1e-5)
    for z, delta in itertools.product((0.2, 0.6377, 1.0, 4.0, 40.0, 400.0), (1e-9, 1e-5, 1e-3)):
        assert exact_epsilon(z, delta) <= epsilon_of(z, delta) <= 1.4 * exact_epsilon(z, delta) + 0.02


@pytest.mark.parametrize(
    ("epsilon", "z"), [(0.5, 7.03), (1, 3.73), (2, 1.99), (4, 1.08), (8, 0.60)]
)  # multipliers of the exact formula, to three digits
def test_the_exact_formula_gives_the_known_multipliers(epsilon: float, z: float) -> None:
    assert exact_epsilon(z, 1e-5) == pytest.approx(epsilon, rel=0.003)


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 8.0, 50.0])
@pytest.mark.parametrize("releases", [1, 20])
def test_noise_for_a_budget_spends_it_and_no_more(epsilon: float, releases: int) -> None:
    z = noise_for(epsilon, 1e-5, releases)
    assert 0.995 * epsilon < epsilon_of(composed([z] * releases), 1e-5) <= epsilon * (1 + 1e-6)


ROWS = [
    (1, 10, 100, 4.7285, 4.3772),
    (0.1, 1, 100, 7.9039, 7.0466),
    (0.01, 1.1, 1000, 1.7118, 1.5154),
    (256 / 60000, 1.1, 14040, 2.5944, 2.3796),
]
"""Sampling rate, noise, releases; epsilon at delta = 1e-5 by RDP and by privacy loss distributions."""


@pytest.mark.parametrize(("q", "z", "steps", "rdp", "pld"), ROWS)
def test_epsilon_lies_between_privacy_loss_distributions_and_the_published_rdp_value(
    q: float, z: float, steps: int, rdp: float, pld: float
) -> None:
    """Drawn images are bounded at whole orders, which costs at most a hundredth here."""
    event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z))
    tight = PLDAccountant().compose(dp_accounting.SelfComposedDpEvent(event, steps)).get_epsilon(1e-5)
    assert tight == pytest.approx(pld, abs=1e-3)
    ours = epsilon_of(math.inf, 1e-5, [Steps(z, q, steps)])
    assert tight < rdp * 0.9999 <= ours <= rdp * 1.01
    if q == 1:
        assert ours == pytest.approx(epsilon_of(composed([z] * steps), 1e-5), rel=1e-9)
        assert exact_epsilon(composed([z] * steps), 1e-5) == pytest.approx(pld, abs=1e-4)


def test_flowers_accountant_agrees() -> None:
    from flwr.supercore import privacy_accounting as flower
    from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant

    for q, z, steps, rdp in ((100, 10, 100, 4.7285), (10, 1, 100, 7.9039)):
        sampling = flower.SamplingMethod.POISSON if q < 100 else flower.SamplingMethod.NO_AMPLIFICATION
        config = flower.PrivacyConfig(
            target_delta=1e-5,
            population_size=100,
            neighboring_relation=flower.NeighboringRelation.ADD_OR_REMOVE_ONE,
            sampling_method=sampling,
        )
        accountant = RdpAccountant(config)
        accountant.compose(flower.GaussianPrivacyEvent(z, q, 100), steps)
        assert accountant.get_epsilon(1e-5) == pytest.approx(rdp, abs=1e-4)


# ---- what is possible ------------------------------------------------------------------------------------------------


def test_possible_sums_stay_as_they_are() -> None:
    rng = np.random.default_rng(0)
    z = clip_rows(rng.normal(size=(60, 4)), 1.0)
    y = np.arange(60) % 3
    count, total = np.bincount(y).astype(float), np.stack([z[y == c].sum(axis=0) for c in range(3)])
    for square in (z.T @ z, np.stack([z[y == c].T @ z[y == c] for c in range(3)])):
        found = projected(count, total, square)
        assert np.allclose(found[0], count) and np.allclose(found[1], total)
        assert found[2] is not None and np.allclose(found[2], square, atol=1e-12)


@pytest.mark.parametrize("apart", [False, True])
def test_noised_sums_become_possible_ones(apart: bool) -> None:
    rng = np.random.default_rng(1)
    square = rng.normal(size=(3, 4, 4)) if apart else rng.normal(size=(4, 4))
    square = square + np.swapaxes(square, -1, -2)
    n, sums, moments = projected(np.array([-3.0, 0.4, 5.0]), rng.normal(size=(3, 4)) * 9, square, floor=0.25)
    assert (n >= 1).all() and n[2] == 5
    assert (np.linalg.norm(sums / n[:, None], axis=1) <= 1 + 1e-12).all()
    assert moments is not None
    outer = np.einsum("ci,cj->cij", sums, sums) / n[:, None, None]
    scatter = moments - (outer if apart else outer.sum(axis=0))
    assert np.linalg.eigvalsh(scatter).min() >= 0.25 - 1e-9
    values = np.linalg.eigvalsh(square - (outer if apart else outer.sum(axis=0)))
    assert np.allclose(np.linalg.eigvalsh(scatter), np.maximum(values, 0.25))  # the nearest such matrix


def test_the_noise_of_many_steps_is_the_least_that_holds_epsilon() -> None:
    sigma = noise_for(2.0, 1e-5, 100, 0.1)
    assert epsilon_of(math.inf, 1e-5, [Steps(sigma, 0.1, 100)]) <= 2.0
    assert epsilon_of(math.inf, 1e-5, [Steps(sigma - 2e-4, 0.1, 100)]) > 2.0


def test_one_value_that_is_too_large_or_not_finite_is_refused() -> None:
    assert on_grid(np.array([0.26, -1.0]), 0.25).tolist() == [1.0, -4.0]
    for bad in (math.nan, math.inf, 25.0):
        with pytest.raises(ValueError, match="too large"):
            on_grid(np.array([0.25, bad]), 0.25, largest=100.0)
