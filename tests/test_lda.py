"""LDA: densities of Gaussians as the oracle, reductions; what heads from sums share is in test_fed3r.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fedapp.engines.local import RunResult
from tests.closedform import CLIENTS, B, W, context, one_class_each, random_data, repaired, together


def density(x: np.ndarray, mean: np.ndarray, sigma: np.ndarray) -> np.ndarray:
    gaps = x - mean
    return np.exp(-0.5 * np.einsum("nd,de,ne->n", gaps, np.linalg.inv(sigma), gaps)) / np.sqrt(np.linalg.det(sigma))


@pytest.mark.parametrize("prior", ["uniform", "pooled"])
def test_probabilities_are_those_of_gaussians_times_the_prior(prior: str) -> None:
    z, y = together(CLIENTS)
    sigma = np.array([[11.8, -3], [-3, 9]]) / 7  # (3 Sigma_0 + 4 Sigma_1 + 0) / 7
    sigma = 0.75 * sigma + 0.25 * np.trace(sigma) / 2 * np.eye(2)
    pi = np.array([0.4, 0.5, 0.1]) if prior == "pooled" else np.full(3, 1 / 3)
    joint = np.stack([pi[c] * density(z, z[y == c].mean(axis=0), sigma) for c in range(3)], axis=1)
    head = repaired("lda", f"shrink=0.25 prior={prior}")[0]
    logits = z @ head[W].T + head[B]
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(p, joint / joint.sum(axis=1, keepdims=True), atol=1e-5)


def test_with_the_identity_as_covariance_it_is_the_nearest_mean() -> None:
    ctx, data = context(4, 5), random_data(3)
    z, _ = together(data)
    lda, ncm = repaired("lda", "shrink=1", data, ctx)[0], repaired("fedncm", "metric=euclidean", data, ctx)[0]
    assert ((z @ lda[W].T + lda[B]).argmax(axis=1) == (z @ ncm[W].T + ncm[B]).argmax(axis=1)).all()


def test_any_dealing_of_the_samples_gives_the_same_head() -> None:
    ctx = context(4, 5)
    one = repaired("lda", data=random_data(1, shift=100.0), ctx=ctx)[0]
    for data in (random_data(30, shift=100.0), one_class_each(random_data(1, shift=100.0))):
        for name in (W, B):
            np.testing.assert_allclose(repaired("lda", data=data, ctx=ctx)[0][name], one[name], rtol=1e-5)


def test_a_map_of_the_features_changes_no_prediction() -> None:
    """Without shrinkage the rule does not depend on the coordinates; FedNCM does."""
    ctx, data = context(4, 5), random_data(3)
    turn = np.random.default_rng(1).standard_normal((5, 5))
    mapped = [(np.asarray(z) @ turn, y) for z, y in data]
    z, _ = together(data)
    a, b = (repaired("lda", "shrink=1e-12", d, ctx)[0] for d in (data, mapped))
    assert ((z @ a[W].T + a[B]).argmax(axis=1) == (z @ turn @ b[W].T + b[B]).argmax(axis=1)).all()


def test_one_sample_of_each_class_has_no_spread() -> None:
    head = repaired("lda", data=[([[1, 0]], [0]), ([[0, 2]], [1])])[0]
    np.testing.assert_allclose(head[W][:2], [[1, 0], [0, 2]], atol=1e-7)


def test_a_federation(tiny: Callable[..., RunResult]) -> None:
    found = tiny(method="lda", alpha=0.3, rounds=1)
    said = found.summary["calibration"]
    assert said["after"] == found.summary["accuracy"]["global"]["last"] > said["before"]
    assert found.summary["bytes_up_query.sums"] == 8 * (65 * 66 // 2 + 650)
