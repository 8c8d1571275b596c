"""FedCOF: worked numbers, unbiased covariances by Monte Carlo, reductions; what heads from sums share is in
test_fed3r.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedapp.core import sums
from fedapp.engines.local import RunResult
from tests.closedform import B, W, answer, context, random_data, repaired, server, together


def test_the_head_of_the_worked_example() -> None:
    head, found = repaired("fedcof")
    np.testing.assert_allclose(head[W], [[0.981410, -0.191925], [-0.450658, 0.892696], [0.998362, 0.057210]], atol=1e-6)
    assert not head[B].any() and found["owners_of_a_class"] == 2 and "note" not in found


def test_a_class_without_owners_does_not_count_among_the_owners_of_a_class() -> None:
    _, found = repaired("fedcof", ctx=context(classes=4))  # three of them have samples
    assert found["owners_of_a_class"] == 2


def estimated(means: np.ndarray, counts: list[int], draws: int = 3000) -> np.ndarray:
    """The mean estimate of one class's covariance, of clients whose true means are given."""
    rng, root = np.random.default_rng(0), np.linalg.cholesky(np.array([[2, 0.5], [0.5, 1]]))
    total = np.zeros((2, 2))
    for _ in range(draws):
        parts = [
            np.array([[*(rng.standard_normal((n, 2)) @ root.T + m).sum(axis=0), n]]) for m, n in zip(means, counts)
        ]
        whole = np.sum(parts, axis=0)[0]
        mean = whole[:2] / whole[2]
        total += (sums.scatter_of_means(parts, 0.0) - whole[2] * np.outer(mean, mean)) / (whole[2] - 1)
    return total / draws


def test_covariances_are_unbiased_where_clients_have_one_distribution_and_only_there() -> None:
    counts = [3, 1, 7, 20]
    np.testing.assert_allclose(estimated(np.zeros((4, 2)), counts), [[2, 0.5], [0.5, 1]], atol=0.12)
    shifted = np.array([[0, 0], [1, 0], [0, 1], [-1, 0]], float)
    np.testing.assert_allclose(estimated(shifted, counts), [[5.118, 1.930], [1.930, 2.806]], atol=0.25)


def test_one_sample_at_every_client_is_the_pooled_covariance() -> None:
    z, y = together(random_data(1))
    parts = [answer(server("fedcof", ctx=context(4, 5))[0], z[[i]], y[[i]])["sums/b"] for i in range(len(y))]
    n, mean = len(y), z.mean(axis=0)
    wanted = sum((np.sum(y == c) - 1) * (np.cov(z[y == c].T) + 0.3 * np.eye(5)) for c in range(4))
    np.testing.assert_allclose(sums.scatter_of_means(parts, 0.3), wanted + n * np.outer(mean, mean), rtol=1e-10)


def test_with_the_scatter_between_classes_it_would_be_ridge_without_bias() -> None:
    """Z^T Z = within + between + N mu mu^T; FedCOF leaves the second out, and estimates the first."""
    z, y = together(random_data(1))
    parts = [answer(server("fedcof", ctx=context(4, 5))[0], z[[i]], y[[i]])["sums/b"] for i in range(len(y))]
    mean = z.mean(axis=0)
    between = sum(np.sum(y == c) * np.outer(m := z[y == c].mean(axis=0) - mean, m) for c in range(4))
    np.testing.assert_allclose(sums.scatter_of_means(parts, 0.0) + between, z.T @ z, rtol=1e-9)


def test_a_large_gamma_is_nearly_the_nearest_cosine_mean() -> None:
    cof, ncm = repaired("fedcof", "gamma=1e9")[0], repaired("fedncm")[0]
    np.testing.assert_allclose(cof[W], ncm[W], atol=1e-6)


def test_the_order_of_clients_does_not_matter_but_the_dealing_does() -> None:
    ctx, data = context(4, 5), random_data(6)
    head = repaired("fedcof", data=data, ctx=ctx)[0][W]
    np.testing.assert_allclose(repaired("fedcof", data=data[::-1], ctx=ctx)[0][W], head, atol=1e-6)
    assert np.abs(repaired("fedcof", data=random_data(5), ctx=ctx)[0][W] - head).max() > 1e-3


def test_large_features_of_honest_clients_are_not_refused(tmp_path: Path, tiny: Callable[..., RunResult]) -> None:
    """The mean square of 60,000 rows with features near 3,000 is above the limit of arrays without a size."""
    rng = np.random.default_rng(0)
    x, y, client = 3000 * rng.normal(size=(600, 4)), np.arange(600) % 3, np.arange(600) % 2
    np.savez(tmp_path / "large.npz", x=x.astype(np.float32), y=y, client=client)
    run = tiny(dataset="npz", clients=0, data_dir=tmp_path / "large.npz", method="fedcof", max_abs=1e5)
    assert run.summary["calibration"]["clients"] == 2 and not len(run.dropped)


def test_a_class_of_one_owner_has_no_covariance() -> None:
    np.testing.assert_allclose(
        sums.scatter_of_means([np.array([[3.0, 1, 2], [0, 0, 0]])], 0.5), [[4.5 + 0.5, 1.5], [1.5, 0.5 + 0.5]]
    )


def test_a_federation_says_that_few_clients_own_a_class(tiny: Callable[..., RunResult]) -> None:
    found = tiny(method="fedcof", alpha=0.3, rounds=1)
    said = found.summary["calibration"]
    assert said["after"] == found.summary["accuracy"]["global"]["last"] and "low rank" in said["note"]
    assert found.summary["bytes_up_query.sums"] == 8 * 650


def test_the_mean_square_as_gamma_makes_the_head_independent_of_the_scale_of_the_features() -> None:
    data = random_data(4)
    square = float(np.mean(together(data)[0] ** 2))
    head, found = repaired("fedcof", "base=none", data, context(4, 5))
    np.testing.assert_allclose(found["gamma"], square, rtol=1e-12)
    fixed, _ = repaired("fedcof", f"gamma={square!r}", data, context(4, 5))
    np.testing.assert_allclose(head[W], fixed[W], rtol=1e-6)
    small, _ = repaired("fedcof", "base=none", [(z / 50, y) for z, y in data], context(4, 5))
    np.testing.assert_allclose(head[W], small[W], rtol=1e-5, atol=1e-6)
    strategy, _ = server("fedcof", "base=none", context(4, 5))
    arrays = answer(strategy, *data[0])
    honest = {name.removeprefix("sums/"): array for name, array in arrays.items()}
    many, far = float(honest["b"][:, -1].sum()), float(np.abs(data[0][0]).max())
    for factor, fault in ((1.0, None), (1e4, "'energy' is larger than")):
        found = sums.problem_of_rounding({"energy": factor * honest["energy"], "b": 0 * honest["b"]}, 10, many, far)
        assert found is None if fault is None else fault in str(found)
    forged = honest | {"energy": np.zeros(1)}
    assert "less than features with these sums have" in str(sums.problem_of(forged, 4, 5, None, energy=True))
