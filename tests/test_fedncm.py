"""FedNCM: worked numbers, means of all features, reductions to LDA; what heads from sums share is in test_fed3r.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from fedapp.engines.local import RunResult
from tests.closedform import (
    CLIENTS,
    B,
    W,
    answer,
    asker,
    context,
    one_class_each,
    random_data,
    repaired,
    server,
    summed,
    together,
)
from tests.handmade import deterministic


def test_the_head_of_the_worked_example() -> None:
    head = repaired("fedncm")[0]
    np.testing.assert_allclose(head[W], [[0.857493, 0.514496], [0.233373, 0.972387], [0.707107, 0.707107]], atol=1e-6)
    assert not head[B].any()
    np.testing.assert_allclose(head[W] @ [2, 2.5], [3.001225, 2.897714, 3.181981], atol=1e-6)
    by_distance = repaired("fedncm", "metric=euclidean")[0]
    np.testing.assert_allclose(by_distance[B], [-4.25, -13.22, -25], atol=1e-5)
    np.testing.assert_allclose(by_distance[W] @ [2, 2.5] + by_distance[B], [4.5, 1.68, -2.5], atol=1e-5)


def test_means_weigh_clients_by_their_samples() -> None:
    """The mean over clients of class 0's means is (3, 1), over its samples (2.5, 1.5)."""
    np.testing.assert_allclose(repaired("fedncm", "metric=euclidean")[0][W][0], [2.5, 1.5], atol=1e-6)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_any_dealing_of_the_samples_gives_the_same_head(metric: str) -> None:
    ctx = context(4, 5)
    z, y = together(random_data(1))
    means = np.stack([z[y == c].mean(axis=0) for c in range(4)])
    expected = np.column_stack([means, -0.5 * (means**2).sum(axis=1)])
    if metric == "cosine":
        expected = np.column_stack([means / np.linalg.norm(means, axis=1, keepdims=True), np.zeros(4)])
    for data in (random_data(1), random_data(7), random_data(300), one_class_each(random_data(1))):
        strategy, state = server("fedncm", f"metric={metric}", ctx=ctx)
        rows = strategy.rows(summed(strategy, state, asker(strategy, data)))[0]
        np.testing.assert_allclose(rows, expected, atol=1e-12)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_the_largest_logit_is_the_nearest_mean_of_all_features(metric: str) -> None:
    ctx = context(4, 5)
    z, y = together(random_data(1))
    means = np.stack([z[y == c].mean(axis=0) for c in range(4)])
    if metric == "cosine":
        near = (z @ means.T / np.linalg.norm(means, axis=1) / np.linalg.norm(z, axis=1, keepdims=True)).argmax(axis=1)
    else:
        near = ((z[:, None] - means) ** 2).sum(axis=2).argmin(axis=1)
    for data in (random_data(1), random_data(7), random_data(300), one_class_each(random_data(1))):
        head = repaired("fedncm", f"metric={metric}", data, ctx)[0]
        assert ((z @ head[W].T + head[B]).argmax(axis=1) == near).all()


def test_longer_features_scale_the_logits_alone() -> None:
    longer = [(3 * np.asarray(z), y) for z, y in CLIENTS]
    for name in (W, B):
        np.testing.assert_allclose(repaired("fedncm", data=longer)[0][name], repaired("fedncm")[0][name], atol=1e-7)


def test_only_sums_over_classes_leave_a_client() -> None:
    assert set(answer(server("fedncm")[0], *CLIENTS[0])) == {"sums/b"}


def test_a_federation_sends_ten_sums_and_trains_as_its_base(tiny: Callable[..., RunResult]) -> None:
    common = {"alpha": 0.3, "fraction_train": 0.67, "rounds": 1}
    plain, found = tiny(method="fedavg", **common), tiny(method="fedncm", method_args="scale=fit", **common)
    pd.testing.assert_frame_equal(deterministic(plain.rounds), deterministic(found.rounds), check_exact=True)
    assert found.summary["bytes_up_query.sums"] == 8 * 10 * 65
    assert found.summary["calibration"]["after"] == found.summary["accuracy"]["global"]["last"]
