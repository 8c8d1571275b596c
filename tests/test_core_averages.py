"""The running mean: worked numbers, a slow oracle, exactness of a consensus, refusals."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedapp.core.averages import BLOCK, RunningMean, within


def weighted_mean(models: list[dict[str, np.ndarray]], weights: Sequence[float]) -> dict[str, np.ndarray]:
    running = RunningMean()
    running.add_many(list(zip(models, weights, strict=True)))
    return running.mean()


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_fedavg_worked_numbers() -> None:
    models = [{"w": f32(1.2, 0.8)}, {"w": f32(0.6, 1.4)}, {"w": f32(1.5, 1.5)}]
    np.testing.assert_allclose(weighted_mean(models, [100, 60, 40])["w"], [1.08, 1.12], atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_against_a_float64_loop(dtype: type) -> None:
    rng = np.random.default_rng(3)
    models = [
        {
            "a": rng.normal(size=(7, 5)).astype(dtype),
            "b": rng.normal(size=()).astype(dtype),
            "c": np.zeros((0, 3), dtype),
        }
        for _ in range(25)
    ]
    weights = rng.integers(1, 500, size=25).tolist()
    mean = weighted_mean(models, weights)
    for name, first in models[0].items():
        total = np.zeros(first.shape)
        for model, weight in zip(models, weights):
            total += weight * model[name].astype(np.float64)
        expected = total / sum(weights)
        assert mean[name].shape == first.shape
        assert mean[name].dtype == (np.float64 if dtype is np.float64 else np.float32)
        np.testing.assert_allclose(mean[name], expected, atol=1e-14 if dtype is np.float64 else 1e-6)


def test_half_precision_replies_do_not_lose_the_sum() -> None:
    # Summed in float16, 4,000 ones stop at 2,048; the mean must stay at the value itself.
    value = np.array([0.1], dtype=np.float16)
    running = RunningMean()
    for _ in range(4000):
        running.add({"w": value}, 1)
    assert running.mean()["w"][0] == np.float32(value[0])


@settings(max_examples=30, deadline=None)
@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=6),
    weights=st.lists(st.floats(0.01, 1e4), min_size=1, max_size=8),
)
def test_a_consensus_comes_back_unchanged(values: list[float], weights: list[float]) -> None:
    model = {"w": f32(*values)}
    np.testing.assert_array_equal(weighted_mean([model] * len(weights), weights)["w"], model["w"])
    assert weighted_mean([model], weights[:1])["w"].tobytes() == model["w"].tobytes()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), clients=st.integers(1, 9))
def test_order_scale_and_convexity(seed: int, clients: int) -> None:
    rng = np.random.default_rng(seed)
    models = [{"w": rng.normal(size=11)} for _ in range(clients)]
    weights = rng.uniform(0.1, 10, size=clients)
    mean = weighted_mean(models, weights)["w"]
    order = rng.permutation(clients)
    np.testing.assert_allclose(weighted_mean([models[i] for i in order], weights[order])["w"], mean, atol=1e-12)
    np.testing.assert_allclose(weighted_mean(models, 1000 * weights)["w"], mean, atol=1e-12)
    stacked = np.stack([model["w"] for model in models])
    assert np.all(mean >= stacked.min(axis=0) - 1e-12)
    assert np.all(mean <= stacked.max(axis=0) + 1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_added_together_or_one_by_one_is_the_same_bits(dtype: type) -> None:
    rng = np.random.default_rng(8)
    size = 2 * BLOCK + 77  # three blocks, the last one partial
    replies = [({"w": rng.normal(size=size).astype(dtype)}, float(weight)) for weight in (3, 0, 20, 1, 7)]
    one_by_one, together = RunningMean(), RunningMean()
    for arrays, weight in replies:
        one_by_one.add(arrays, weight)
    together.add_many(replies[:2])
    together.add_many(replies[2:])
    assert together.replies == one_by_one.replies == 5
    assert together.mean()["w"].tobytes() == one_by_one.mean()["w"].tobytes()


def test_replies_are_neither_changed_nor_kept() -> None:
    first, second = {"w": f32(1, 2)}, {"w": f32(3, 6)}
    running = RunningMean()
    running.add(first, 1)
    running.add(second, 1)
    first["w"][:] = 100.0
    np.testing.assert_array_equal(running.mean()["w"], [2, 4])
    np.testing.assert_array_equal(second["w"], [3, 6])


def test_read_only_and_transposed_arrays_are_accepted_without_a_warning() -> None:
    base = np.arange(6, dtype=np.float32).reshape(2, 3)
    frozen = base.copy()
    frozen.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mean = weighted_mean([{"w": base}, {"w": frozen}, {"w": base[::-1][::-1]}], [1, 1, 1])["w"]
        turned = weighted_mean([{"w": base.T}, {"w": frozen.T}], [1, 2])["w"]
    np.testing.assert_array_equal(mean, base)
    np.testing.assert_array_equal(turned, base.T)


def test_weight_zero_changes_nothing_but_is_checked() -> None:
    running = RunningMean()
    running.add({"w": f32(np.nan)}, 0)
    running.add({"w": f32(2)}, 5)
    running.add({"w": f32(np.inf)}, 0)
    with pytest.raises(ValueError, match="unexpected"):
        running.add({"v": f32(2)}, 0)
    assert running.replies == 3
    assert running.mean()["w"][0] == 2


def test_no_weight_is_an_error() -> None:
    with pytest.raises(ValueError, match="total weight"):
        RunningMean().mean()
    running = RunningMean()
    running.add({"w": f32(1)}, 0)
    with pytest.raises(ValueError, match="total weight"):
        running.mean()


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_bad_weights(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        RunningMean().add({"w": f32(1)}, weight)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.bool_, np.complex64])
def test_only_floating_point(dtype: type) -> None:
    with pytest.raises(TypeError, match="'count'"):
        RunningMean().add({"w": f32(1), "count": np.ones(1, dtype=dtype)}, 1)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"a": f32(1)}, r"missing \['b'\]"),
        ({"a": f32(1), "b": f32(1), "c": f32(1)}, r"unexpected \['c'\]"),
        ({"a": f32(1), "b": f32(1, 2)}, "'b' has shape"),
    ],
)
def test_a_refused_model_leaves_the_mean_as_it_was(second: dict, message: str) -> None:
    running = RunningMean()
    running.add({"a": f32(3), "b": f32(4)}, 2)
    with pytest.raises(ValueError, match=message):
        running.add(second, 1)
    assert running.replies == 1
    running.add({"a": f32(6), "b": f32(4)}, 1)
    np.testing.assert_array_equal(running.mean()["a"], [4])


def test_nothing_can_be_added_once_the_mean_was_read() -> None:
    running = RunningMean()
    running.add({"w": f32(1)}, 1)
    mean = running.mean()
    with pytest.raises(ValueError, match="already read"):
        running.add({"w": f32(5)}, 1)
    assert mean["w"][0] == 1


def test_weights_within_clusters_add_up_to_one() -> None:
    ids, shares = within({4: 0, 1: 0, 2: 1}, {1: 3.0, 2: 5.0, 4: 1.0})
    assert ids == [1, 2, 4]
    assert shares.tolist() == [[0.75, 0.0, 0.25], [0.0, 1.0, 0.0], [0.75, 0.0, 0.25]]
