"""Gaussian statistics of features: worked numbers, np.cov on pooled data, laws of pooling, what is sent and refused."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from fedapp.core import gaussian
from fedapp.core.gaussian import (
    REPLIES,
    ClassMoments,
    Form,
    Mode,
    MomentsPool,
    form_of,
    moments,
    pack,
    problem_of,
    sums,
    to_arrays,
    unpack,
)

TIGHT = {"rtol": 0, "atol": 6e-7}
CLIENTS = [
    ([[1, 2], [2, 1], [3, 3], [0, 4], [1, 5]], [0, 0, 0, 1, 1]),
    ([[4, 0], [2, 6], [0, 6], [5, 5]], [0, 1, 1, 2]),
    ([[3, 4]], [1]),
]
SIGMA_0 = np.array([[1.666667, -0.666667], [-0.666667, 1.666667]])
SIGMA_1 = np.array([[1.7, -0.25], [-0.25, 1.0]])


def pool(parts: list[ClassMoments], mode: Mode | None = None, centres: np.ndarray | None = None) -> ClassMoments:
    """Send the statistics of all parts in float64 and pool them."""
    replies = MomentsPool(parts[0].num_classes, parts[0].width, mode or parts[0].form, centres)
    for part in parts:
        replies.add(to_arrays(part, replies.mode, part.width, np.float64, centres))
    return replies.moments()


def worked(form: str = "full") -> list[ClassMoments]:
    return [moments(np.array(z, dtype=np.float64), np.array(y), 3, form) for z, y in CLIENTS]


def random_clients(seed: int, clients: int = 5, classes: int = 4, width: int = 6, dtype: type = np.float64) -> list:
    """Features and labels of clients with unequal sizes; every client lacks some class."""
    rng = np.random.default_rng(seed)
    result = []
    for k in range(clients):
        size = int(rng.integers(1, 40))
        labels = rng.choice([c for c in range(classes) if c != k % classes], size=size)
        mixing = rng.normal(size=(width, width))
        result.append(((rng.normal(size=(size, width)) @ mixing + 5 * labels[:, None]).astype(dtype), labels))
    return result


def pooled_reference(clients: list, c: int) -> np.ndarray:
    return np.concatenate([z[y == c] for z, y in clients])


def assert_equal_to_data(statistics: ClassMoments, clients: list, tolerance: float = 1e-10) -> None:
    """Compare with NumPy on the features of all clients together."""
    for c in range(statistics.num_classes):
        rows = pooled_reference(clients, c).astype(np.float64)
        assert statistics.counts[c] == len(rows)
        if len(rows):
            np.testing.assert_allclose(statistics.means[c], rows.mean(axis=0), rtol=tolerance, atol=tolerance)
        if len(rows) > 1:
            cov = np.cov(rows, rowvar=False).reshape(statistics.width, statistics.width)
            expected = np.diag(cov) if statistics.form == "diag" else cov
            if statistics.form != "pooled":
                np.testing.assert_allclose(statistics.cov(c), expected, rtol=tolerance, atol=tolerance)
    within = np.zeros((statistics.width, statistics.width))
    for c in range(statistics.num_classes):
        rows = pooled_reference(clients, c).astype(np.float64)
        if len(rows):
            within += (rows - rows.mean(axis=0)).T @ (rows - rows.mean(axis=0))
    within /= max(statistics.degrees, 1)
    expected = np.diag(within) if statistics.form == "diag" else within
    np.testing.assert_allclose(statistics.pooled_cov(), expected, rtol=tolerance, atol=tolerance)


# Worked numbers


def test_client_statistics_worked_numbers() -> None:
    first, second, third = worked()
    assert [part.counts.tolist() for part in (first, second, third)] == [[3, 2, 0], [1, 2, 1], [0, 1, 0]]
    np.testing.assert_allclose(first.means[:2], [[2, 2], [0.5, 4.5]], **TIGHT)
    np.testing.assert_allclose(first.cov(0), [[1, 0.5], [0.5, 1]], **TIGHT)
    np.testing.assert_allclose(first.cov(1), [[0.5, 0.5], [0.5, 0.5]], **TIGHT)
    np.testing.assert_allclose(second.means, [[4, 0], [1, 6], [5, 5]], **TIGHT)
    np.testing.assert_allclose(second.cov(1), [[2, 0], [0, 0]], **TIGHT)
    np.testing.assert_array_equal(second.cov(0), np.zeros((2, 2)))
    np.testing.assert_array_equal(third.cov(1), np.zeros((2, 2)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_pooled_worked_numbers(dtype: type) -> None:
    replies = MomentsPool(3, 2)
    for part in worked():
        replies.add(to_arrays(part, "full", dtype=dtype))
    merged = replies.moments()
    np.testing.assert_array_equal(merged.counts, [4, 5, 1])
    np.testing.assert_allclose(merged.means, [[2.5, 1.5], [1.2, 5.0], [5, 5]], **TIGHT)
    np.testing.assert_allclose(merged.cov(0), SIGMA_0, **TIGHT)
    np.testing.assert_allclose(merged.cov(1), SIGMA_1, **TIGHT)
    np.testing.assert_allclose(pack(merged.cov(1)), [1.7, -0.25, 1.0], **TIGHT)
    np.testing.assert_allclose(np.linalg.eigvalsh(merged.cov(0)), [1, 2.333333], **TIGHT)
    np.testing.assert_allclose(np.linalg.eigvalsh(merged.cov(1)), [0.919884, 1.780116], **TIGHT)
    np.testing.assert_allclose(pool(worked()[:2]).scatter(0), [[5, -2], [-2, 5]], **TIGHT)


def test_sums_worked_numbers() -> None:
    first, second, _ = (sums(part) for part in worked())
    np.testing.assert_allclose(first["sum"][0], [6, 6], **TIGHT)
    np.testing.assert_allclose(first["square"][0], [14, 13, 14], **TIGHT)
    np.testing.assert_allclose(second["sum"][0], [4, 0], **TIGHT)
    np.testing.assert_allclose(second["square"][0], [16, 0, 0], **TIGHT)


# Against NumPy on the pooled data


@pytest.mark.parametrize("form", get_args(Form))
@pytest.mark.parametrize("seed", range(3))
def test_pooling_equals_the_pooled_data(form: Form, seed: int) -> None:
    clients = random_clients(seed)
    assert_equal_to_data(pool([moments(z, y, 4, form) for z, y in clients]), clients)


@pytest.mark.parametrize("form", get_args(Form))
@pytest.mark.parametrize("buffer", [1, 7, 50, 8192])
@pytest.mark.parametrize("batch", [1, 13, 1000])
def test_streaming_equals_the_whole(form: Form, buffer: int, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gaussian, "BUFFER", buffer)
    monkeypatch.setattr(gaussian, "BLOCK", 16)
    rng = np.random.default_rng(1)
    z, y = rng.normal(size=(200, 5)) * 3 + 20, rng.integers(0, 3, size=200)
    streamed = ClassMoments(3, 5, form)
    for start in range(0, 200, batch):
        streamed.update(z[start : start + batch], y[start : start + batch])
        assert streamed._waiting_rows == sum(len(rows) for rows, _ in streamed._waiting) < buffer
    assert_equal_to_data(streamed, [(z, y)])


def test_results_asked_for_on_the_way_stay_as_they_were_and_later_rows_count_too() -> None:
    (z, y), (more, others) = random_clients(3, clients=2)
    streamed = moments(z, y, 4)
    first, within = streamed.cov(1), streamed.pooled_cov()
    kept = first.copy(), within.copy(), streamed.means
    streamed.update(more, others)
    assert_equal_to_data(streamed, [(z, y), (more, others)])
    np.testing.assert_array_equal(first, kept[0])
    np.testing.assert_array_equal(within, kept[1])
    assert not np.array_equal(streamed.means, kept[2])
    streamed.scatter(1)[:] = streamed.means[:] = streamed.counts[:] = 7
    assert_equal_to_data(streamed, [(z, y), (more, others)])


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_features_in_lower_precision_are_widened_before_anything_else(dtype: type) -> None:
    clients = random_clients(7, dtype=dtype)
    assert_equal_to_data(pool([moments(z, y, 4) for z, y in clients]), clients)


def test_tensors_and_read_only_arrays() -> None:
    z, y = random_clients(8, clients=1)[0]
    z.flags.writeable = False
    expected = moments(z.copy(), y, 4)
    tensor = torch.tensor(z, requires_grad=True)
    for given_as in (moments(z, y, 4), moments(tensor, torch.from_numpy(y).int(), 4)):
        for c in expected.classes:
            np.testing.assert_array_equal(given_as.cov(c), expected.cov(c))


@pytest.mark.parametrize("width", [84, 512])
def test_the_number_of_blas_threads_changes_no_bit(width: int) -> None:
    rng = np.random.default_rng(width)
    z, y = rng.normal(size=(3000, width)).astype(np.float32), rng.integers(0, 2, size=3000)
    results = []
    for threads in (1, 2, 3):
        with threadpool_limits(threads, user_api="blas"):
            results.append(pool([moments(z[:2000], y[:2000], 2), moments(z[2000:], y[2000:], 2)]))
    for other in results[1:]:
        for c in (0, 1):
            np.testing.assert_array_equal(other.means[c], results[0].means[c])
            np.testing.assert_array_equal(other.cov(c), results[0].cov(c))


def test_large_means_do_not_cancel() -> None:
    z = np.array([[10000.0], [10000.1], [10000.2]], dtype=np.float32)
    exact = np.var(z.astype(np.float64), ddof=1)
    assert moments(z, np.zeros(3, dtype=int), 1).cov(0)[0, 0] == pytest.approx(exact, rel=1e-9)
    # The same values on three clients: Eq. 4 as printed subtracts numbers of 1e8.
    parts = [moments(row[None, :], np.zeros(1, dtype=int), 1) for row in z]
    assert pool(parts).cov(0)[0, 0] == pytest.approx(exact, rel=1e-9)


def test_the_biased_client_covariance_is_not_used() -> None:
    # ddof = 0 at the clients with weights N - 1 gives these; the pooled data do not.
    cov = pool(worked()).cov(0)
    assert not np.allclose(cov, [[1.444444, -0.777778], [-0.777778, 1.444444]], atol=1e-3)


# Laws


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), form=st.sampled_from(get_args(Form)))
def test_pooling_does_not_depend_on_order_or_grouping_and_an_empty_part_changes_nothing(seed: int, form: Form) -> None:
    a, b, c = (moments(z, y, 4, form) for z, y in random_clients(seed, clients=3))

    def assert_same(x: ClassMoments, y: ClassMoments) -> None:
        np.testing.assert_array_equal(x.counts, y.counts)
        np.testing.assert_allclose(x.means, y.means, atol=1e-10)
        for k in x.classes:
            np.testing.assert_allclose(x.scatter(k), y.scatter(k), rtol=1e-10, atol=1e-9)

    assert_same(pool([c, a, b]), pool([a, b, c]))
    assert_same(pool([pool([a, b]), c]), pool([a, pool([b, c])]))
    assert_same(pool([a, ClassMoments(4, 6, form)]), a)


def test_equal_means_stay_equal_bit_for_bit() -> None:
    z = np.random.default_rng(2).normal(size=(1, 50))
    replies = MomentsPool(1, 50)
    for n in (3, 7, 1):
        replies.add({**to_arrays(moments(z, np.zeros(1, dtype=int), 1), dtype=np.float64), "count": np.array([n])})
    np.testing.assert_array_equal(replies.moments().means, z)
    assert not replies.moments().cov(0).any()


@pytest.mark.parametrize("width", [1, 2, 5])
def test_packing(width: int) -> None:
    rng = np.random.default_rng(width)
    root = rng.normal(size=(3, width, width))
    square = root + root.transpose(0, 2, 1)
    rows, columns = np.triu_indices(width)
    packed = pack(square)
    np.testing.assert_array_equal(packed, square[:, rows, columns])
    np.testing.assert_array_equal(unpack(packed, width), square)
    np.testing.assert_array_equal(unpack(packed[0], width), square[0])


# Edge cases


def test_a_class_that_a_client_lacks_is_left_out() -> None:
    arrays = to_arrays(worked()[0])
    np.testing.assert_array_equal(arrays["ids"], [0, 1])
    np.testing.assert_array_equal(arrays["count"], [3, 2])
    assert arrays["cov"].shape == (2, 3)
    with pytest.raises(ValueError, match="class 2"):
        worked()[0].cov(2)


def test_the_covariance_sent_with_a_single_sample_has_no_weight() -> None:
    arrays = to_arrays(worked()[2], dtype=np.float64)
    arrays["cov"][:] = 99.0
    replies = MomentsPool(3, 2)
    replies.add(arrays)
    for part in worked()[:2]:
        replies.add(to_arrays(part, dtype=np.float64))
    np.testing.assert_allclose(replies.moments().cov(1), SIGMA_1, **TIGHT)


def test_single_samples_on_every_client_still_have_a_covariance() -> None:
    rng = np.random.default_rng(4)
    z = rng.normal(size=(6, 3))
    parts = [moments(row[None, :], np.zeros(1, dtype=int), 1) for row in z]
    np.testing.assert_allclose(pool(parts).cov(0), np.cov(z, rowvar=False), atol=1e-12)


@pytest.mark.parametrize("form", get_args(Form))
def test_statistics_of_nothing(form: Form) -> None:
    empty = ClassMoments(2, 3, form)
    empty.update(np.empty((0, 3)), np.empty(0, dtype=int))
    shape = (3,) if form == "diag" else (3, 3)
    assert empty.classes.size == empty.degrees == 0
    for zero in (empty.scatter(1), empty.pooled_cov(), empty.means, empty.counts):
        assert not zero.any()
    assert empty.scatter(1).shape == empty.pooled_cov().shape == shape


# Modes of sending


@pytest.mark.parametrize("form", get_args(Form))
def test_a_pool_of_many_replies_keeps_a_few_means_and_stays_exact(form: Form) -> None:
    """Means far apart and far from zero; a class that nobody has, and one that appears in the last replies only."""
    rng = np.random.default_rng(21)
    clients = []
    for k in range(3 * REPLIES + 5):
        y = rng.integers(0, 3 if k > 2 * REPLIES else 2, size=int(rng.integers(1, 6)))
        clients.append((rng.normal(size=(y.size, 6)) + 100 * y[:, None] + rng.normal(size=6) * 5, y))
    replies = MomentsPool(4, 6, form)
    for z, y in clients:
        replies.add(to_arrays(moments(z, y, 4, form), form, dtype=np.float64))
        assert len(replies._means) <= REPLIES
    assert_equal_to_data(replies.moments(), clients)


@pytest.mark.parametrize("mode", get_args(Mode))
def test_a_reply_comes_back(mode: Mode) -> None:
    z, y = random_clients(11, clients=1)[0]
    part = moments(z, y, 4, form_of(mode))
    assert part.form == {"diag": "diag", "pooled": "pooled"}.get(mode, "full")
    back = pool([part], mode)
    np.testing.assert_array_equal(back.counts, part.counts)
    np.testing.assert_allclose(back.means, part.means, atol=1e-10)
    for c in part.classes:
        np.testing.assert_allclose(back.cov(c), part.cov(c), atol=1e-9)


@pytest.mark.parametrize("mode", get_args(Mode))
def test_sizes_on_the_wire(mode: Mode) -> None:
    width, classes = 12, 3
    z = np.random.default_rng(0).normal(size=(30, width)).astype(np.float32)
    arrays = to_arrays(moments(z, np.arange(30) % 3, 5, form_of(mode)), mode, rank=4)
    entries = sum(array.size for array in arrays.values())
    triangle = width * (width + 1) // 2
    expected = {
        "full": classes * (2 + width + triangle),
        "diag": classes * (2 + 2 * width),
        "lowrank": classes * (2 + width + (4 + 1) * width),
        "pooled": classes * (2 + width) + triangle,
        "sums": 5 * (1 + width + triangle),
    }
    assert entries == expected[mode]
    floats = np.float64 if mode == "sums" else np.float32
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.int64), np.dtype(floats)}


def test_low_rank_keeps_variances_and_the_leading_directions() -> None:
    rng = np.random.default_rng(5)
    loadings = rng.normal(size=(2, 8))
    noise = np.diag(rng.uniform(1e-3, 2e-3, size=8))
    z = rng.multivariate_normal(np.zeros(8), loadings.T @ loadings + noise, size=4000)
    part = moments(z, np.zeros(4000, dtype=int), 1)
    cov = part.cov(0)
    values, vectors = np.linalg.eigh(cov)
    for rank in (1, 2, 8):
        replies = MomentsPool(1, 8, "lowrank")
        replies.add(to_arrays(part, "lowrank", rank, np.float64))
        leading = (vectors[:, -rank:] * values[-rank:]) @ vectors[:, -rank:].T
        expected = leading + np.diag(np.diag(cov - leading))
        np.testing.assert_allclose(replies.moments().cov(0), expected, atol=1e-12)


def test_low_rank_with_fewer_samples_than_rank() -> None:
    part = moments(np.array([[1.0, 2.0, 3.0], [2.0, 2.0, 5.0]]), np.zeros(2, dtype=int), 1)
    arrays = to_arrays(part, "lowrank", rank=5, dtype=np.float64)
    assert arrays["factor"].shape == (1, 5, 3)
    assert (arrays["rest"] >= 0).all()
    replies = MomentsPool(1, 3, "lowrank")
    replies.add(arrays)
    np.testing.assert_allclose(replies.moments().cov(0), part.cov(0), atol=1e-12)


def test_sums_add_up_over_clients_and_in_two_exchanges_lose_nothing() -> None:
    clients = [(z + 1e6, y) for z, y in random_clients(13)]
    parts = [moments(z, y, 4) for z, y in clients]
    for part, (z, y) in zip(parts, clients):
        found = sums(part, np.full((4, 6), 1e6))
        for c in range(4):
            rows = z[y == c] - 1e6
            np.testing.assert_allclose(found["sum"][c], rows.sum(axis=0), atol=1e-6)
            np.testing.assert_allclose(unpack(found["square"][c], 6), rows.T @ rows, atol=1e-4)
    plain = pool(parts, "sums")
    exact = pool(parts, "sums", plain.means + 0.1)
    assert_equal_to_data(exact, clients, 1e-9)
    with pytest.raises(AssertionError):
        assert_equal_to_data(plain, clients, 1e-9)  # S2 - S1 S1^T / N has lost the digits
    assert_equal_to_data(plain, clients, 0.1)


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_every_batch_that_waits_counts(batches: int) -> None:
    z, y = random_clients(13)[0]
    collected = ClassMoments(4, 6)
    for part in np.array_split(np.arange(len(y)), batches):
        collected.update(z[part], y[part])
    assert_equal_to_data(collected, [(z, y)], 1e-9)


@pytest.mark.parametrize("mode", ["full", "sums"])
def test_what_a_pool_returned_is_not_the_pools_own(mode: str) -> None:
    parts = [moments(z, y, 4) for z, y in random_clients(13)]
    replies = MomentsPool(4, 6, mode)
    for part in parts:
        replies.add(to_arrays(part, mode))
    first, counts = replies.moments(), sum(part.counts for part in parts)
    first.update(torch.zeros(5, 6), torch.zeros(5, dtype=torch.int64))
    np.testing.assert_array_equal(first.counts, counts + np.array([5, 0, 0, 0]))
    np.testing.assert_array_equal(replies.moments().counts, counts)


def test_sums_of_single_samples_have_exactly_no_spread() -> None:
    part = moments(np.array([[0.1, 1e5]]), np.array([1]), 2)
    np.testing.assert_array_equal(pool([part], "sums").cov(1), np.zeros((2, 2)))
    assert not sums(part)["sum"][0].any() and not sums(part, np.ones((2, 2)))["sum"][0].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("cov"), "consist of"),
        (lambda a: a.pop("ids"), "consist of"),
        (lambda a: a.update(extra=np.ones(1)), "consist of"),
        (lambda a: a.update(cov=a["cov"][:, :2]), "'cov'.*shape"),
        (lambda a: a.update(mean=a["mean"].astype(int)), "'mean'"),
        (lambda a: a.update(count=a["count"] * 0.5), "'count'"),
        (lambda a: a.update(count=a["count"] * 0), "positive"),
        (lambda a: a.update(ids=np.array([0, 0])), "distinct"),
        (lambda a: a.update(ids=np.array([0, 3])), "distinct"),
        (lambda a: a.update(cov=a["cov"] * np.nan), "not finite"),
        (lambda a: a.update(mean=a["mean"] + np.array([np.inf, -np.inf], dtype=np.float32)), "not finite"),
    ],
)
def test_a_reply_that_cannot_be_statistics_is_refused_and_changes_nothing(change, message: str) -> None:
    replies = MomentsPool(3, 2)
    good, bad = to_arrays(worked()[0]), to_arrays(worked()[0])
    replies.add(good)
    change(bad)
    with pytest.raises(ValueError, match=message):
        replies.add(bad)
    np.testing.assert_array_equal(replies.moments().counts, [3, 2, 0])


@pytest.mark.parametrize(
    ("mode", "change", "message"),
    [
        ("full", {"ids": np.array([-1, 0])}, "distinct and lie in 0..2"),
        ("full", {"ids": np.array([[0, 1]])}, "'ids'"),
        ("diag", {"cov": np.ones((2, 3))}, r"'cov'.*floating of shape \(2, 2\)"),
        ("pooled", {"cov": np.ones((2, 3))}, r"'cov'.*floating of shape \(3,\)"),
        ("lowrank", {"factor": np.ones((2, 2))}, r"'factor'.*floating of shape \(2, 0, 2\)"),
        ("lowrank", {"rest": np.ones((2, 1))}, "'rest'"),
        ("sums", {"count": np.array([1, -1, 0])}, "negative"),
        ("sums", {"square": np.ones((2, 3))}, r"'square'.*\(3, 3\)"),
        ("sums", {"sum": np.full((3, 2), np.inf)}, "'sum'.*not finite"),
    ],
)
def test_what_is_wrong_with_a_reply_is_named(mode: Mode, change: dict, message: str) -> None:
    good = to_arrays(worked(form_of(mode))[0], mode)
    assert problem_of(good, mode, 3, 2) is None
    with pytest.raises(ValueError, match=message):
        raise ValueError(problem_of({**good, **change}, mode, 3, 2))


def test_an_array_that_is_missing_is_named_in_every_mode() -> None:
    for mode in get_args(Mode):
        good = to_arrays(worked(form_of(mode))[0], mode)
        for name in good:
            partial = {other: array for other, array in good.items() if other != name}
            assert "consist of" in str(problem_of(partial, mode, 3, 2))


def test_large_finite_values_are_not_taken_for_infinite_ones() -> None:
    arrays = to_arrays(worked()[0])
    arrays["mean"] = np.full((2, 2), 3e38, dtype=np.float32)  # their sum overflows
    assert problem_of(arrays, "full", 3, 2) is None


def test_refusals() -> None:
    z, y = np.ones((2, 3)), np.array([0, 1])
    collected = ClassMoments(2, 3)
    for features, labels, message in [
        (np.ones((2, 4)), y, r"features \(B, 3\)"),
        (np.ones(3), y, "features"),
        (z, np.array([0]), "features"),
        (z, np.array([0.0, 1.0]), "integers"),
        (z.astype(int), y, "floating point"),
    ]:
        with pytest.raises(ValueError, match=message):
            collected.update(features, labels)
    assert collected.classes.size == 0
    with pytest.raises(ValueError, match="class 1 are not finite"):
        moments(np.array([[1.0], [np.inf]]), y, 2)
    with pytest.raises(ValueError, match="needs statistics of form 'diag'"):
        to_arrays(collected, "diag")
    with pytest.raises(ValueError, match="form 'full'"):
        sums(ClassMoments(2, 3, "diag"))
    with pytest.raises(ValueError, match="centres"):
        sums(collected, np.ones(3))
    with pytest.raises(ValueError, match="no statistics"):
        MomentsPool(2, 3).moments()
    with pytest.raises(ValueError, match="class 1 has no samples"):
        collected.cov(1)
