"""Linear heads on representations: worked numbers of re-training, unit rows, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from clients._models import CCVRHead
from fedapp.core.heads import logits, norm_ratio, problem_of, retrain, tukey

W, B = np.array([[1, 0], [0, 1], [1, 1]], np.float32), np.zeros(3, np.float32)


def test_one_step_of_the_worked_example() -> None:
    z = tukey(np.array([[2.0, 1.0], [1.0, 5.0], [5.0, 5.0]]))
    w, b = retrain((W, B), z, np.arange(3), [np.arange(3)], 0.1)
    np.testing.assert_allclose(w, [[1.027397, 0.013757], [0.011341, 1.044349], [0.961262, 0.941894]], atol=1e-6)
    np.testing.assert_allclose(b, [0.020371, 0.017053, -0.037423], atol=1e-6)
    np.testing.assert_array_equal(W, [[1, 0], [0, 1], [1, 1]])


def test_steps_see_the_rows_they_name() -> None:
    rng = np.random.default_rng(0)
    z, y = rng.standard_normal((9, 2)), np.arange(9) % 3
    rows = [np.array([0, 4, 8]), np.array([1, 2, 3])]
    both = retrain((W, B), z, y, rows, 0.2)
    half = retrain(retrain((W, B), z, y, rows[:1], 0.2), z, y, rows[1:], 0.2)
    for a, b in zip(both, half):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(retrain((W, B), z, y, [], 0.2), (W, B)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("normalise", [False, True])
def test_classes_without_a_sample_stay(normalise: bool) -> None:
    z, y = np.ones((4, 2)), np.array([0, 2, 0, 2])
    w, b = retrain((W, B + 1), z, y, [np.arange(4)] * 3, 0.5, momentum=0.9, weight_decay=0.1, normalise=normalise)
    np.testing.assert_array_equal(w[1], W[1])
    assert b[1] == 1 and not np.array_equal(w[0], W[0])
    assert bool((b == 1).all()) is normalise, "the bias is trained where it plays a part"


def test_unit_rows_and_transform() -> None:
    plain = nn.Linear(3, 4)
    z = torch.tensor([[4.0, -1.0, 9.0]])
    head = CCVRHead(plain, normalise=False)
    torch.testing.assert_close(head(z), plain(z))
    head.transform = True
    torch.testing.assert_close(head(z), plain(torch.tensor([[2.0, 0.0, 3.0]])))
    unit = plain.weight / plain.weight.norm(dim=1, keepdim=True)
    torch.testing.assert_close(CCVRHead(plain, normalise=True)(z), z @ unit.T)
    torch.testing.assert_close(logits(z, plain.weight, plain.bias, True), z @ unit.T)


def test_tukey() -> None:
    z = np.array([[1.2, 5], [2.503840, 4.808259], [-0.103840, 7.154632], [0, 0.25]])
    expected = [[1.095445, 2.236068], [1.582353, 2.192774], [0, 2.674814], [0, 0.5]]
    np.testing.assert_allclose(tukey(z), expected, atol=6e-7)
    np.testing.assert_allclose(tukey(torch.from_numpy(z)), expected, atol=6e-7)
    assert tukey(z.astype(np.float32)).dtype == np.float32


def test_norm_ratio() -> None:
    assert norm_ratio(np.array([[3.0, 4.0], [0.0, 1.0]])) == 5.0
    assert norm_ratio(np.zeros((0, 2))) is None and norm_ratio(np.array([[1.0, 0.0], [0.0, 0.0]])) is None


def test_features_that_do_not_fit_are_named() -> None:
    z, y = np.ones((2, 3), np.float32), np.array([0, 1])
    assert problem_of(z, y, 3, 2) is None and problem_of(z[:0], y[:0], 3, 2) is None
    bad = [(None, y), (z, None), (z, y[:1]), (z[:, :2], y), (z, y.astype(float)), (z, y[:, None]), (z, np.int64(2))]
    for features, labels in bad:
        assert problem_of(features, labels, 3, 2) == "features must be z (n, 3) and integer labels (n,)"
    assert problem_of(z, y + 1, 3, 2) == problem_of(z, y - 1, 3, 2) == "labels must lie in 0..1"
