"""Means per class against loops, and the checks of rows that came from elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedapp.core.classmeans import ClassMeans, problem_of, shortened


def test_means_equal_a_loop_over_classes() -> None:
    rng = np.random.default_rng(0)
    rows, labels = rng.normal(size=(57, 5)).astype(np.float32), rng.choice([0, 2, 3, 6], 57)
    means = ClassMeans(8, 5)
    for part in np.array_split(np.arange(57), 4):
        means.add(torch.from_numpy(rows[part]), torch.from_numpy(labels[part]))
    got = means.rows()
    assert got.labels.tolist() == [0, 2, 3, 6]
    assert got.labels.dtype == np.int32 and got.values.dtype == np.float32
    for value, label, count in zip(got.values, got.labels, got.counts, strict=True):
        mine = rows[labels == label].astype(np.float64)
        assert count == len(mine)
        np.testing.assert_allclose(value, mine.mean(axis=0), rtol=1e-6, atol=1e-7)


def test_nothing_added_gives_no_rows() -> None:
    got = ClassMeans(3, 4).rows()
    assert got.values.shape == (0, 4) and got.labels.shape == (0,)


def test_rows_that_take_part_in_a_gradient_are_only_read() -> None:
    rows = torch.ones(2, 3, requires_grad=True)
    means = ClassMeans(2, 3)
    means.add(rows, torch.tensor([1, 1]))
    assert means.rows().values.tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize(
    ("values", "labels", "words"),
    [
        (None, np.array([0]), "missing"),
        (np.zeros((1, 2)), None, "missing"),
        (np.zeros((1, 2), int), np.array([0]), "dtype"),
        (np.zeros((1, 2)), np.array([0.0]), "dtype"),
        (np.zeros((1, 3)), np.array([0]), "shape"),
        (np.zeros((2, 2)), np.array([0]), "shape"),
        (np.zeros((1, 2)), np.array([[0]]), "shape"),
        (np.zeros((1, 2)), np.array([4]), "4 .. 4"),
        (np.zeros((1, 2)), np.array([-1]), "-1"),
        (np.zeros((2, 2)), np.array([1, 1]), "twice"),
    ],
)
def test_bad_rows_are_named(values: np.ndarray, labels: np.ndarray, words: str) -> None:
    assert words in str(problem_of(values, labels, 2, 4))


def test_good_rows_pass() -> None:
    assert problem_of(np.zeros((2, 2)), np.array([3, 0]), 2, 4) is None
    assert problem_of(np.zeros((0, 2)), np.zeros(0, int), 2, 4) is None


def test_class_means_of_honest_clients_stay_as_they_are() -> None:
    near = [np.full((2, 3), x, np.float32) for x in (0.5, 1, 9)]
    assert all(a is b for a, b in zip(near, shortened(near), strict=True))
    [*same, short] = shortened([*near[:2], np.full((2, 3), 1e6, np.float32)])
    assert [a is b for a, b in zip(same, near, strict=False)] == [True, True]
    assert np.linalg.norm(short, axis=1).max() == pytest.approx(10 * (1 + 3**0.5))
