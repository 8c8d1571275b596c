"""Gaussian statistics of features: worked numbers, np.cov on pooled data, laws of merging, singular sampling."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from fedapp.core import gaussian
from fedapp.core.gaussian import (
    MODES,
    REPLIES,
    ClassMoments,
    Factor,
    MomentsPool,
    allot,
    draw,
    factorise,
    form_of,
    from_arrays,
    from_sums,
    linear_cka,
    merge,
    moments,
    pack,
    pool,
    sample,
    separability,
    sliced_wasserstein,
    sums,
    to_arrays,
    tukey,
    unpack,
    virtual_features,
)

TIGHT = {"rtol": 0, "atol": 6e-7}
CLIENTS = [
    ([[1, 2], [2, 1], [3, 3], [0, 4], [1, 5]], [0, 0, 0, 1, 1]),
    ([[4, 0], [2, 6], [0, 6], [5, 5]], [0, 1, 1, 2]),
    ([[3, 4]], [1]),
]
SIGMA_0 = np.array([[1.666667, -0.666667], [-0.666667, 1.666667]])
SIGMA_1 = np.array([[1.7, -0.25], [-0.25, 1.0]])


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
    for merged in (pool(worked()), replies.moments()):
        np.testing.assert_array_equal(merged.counts, [4, 5, 1])
        np.testing.assert_allclose(merged.means, [[2.5, 1.5], [1.2, 5.0], [5, 5]], **TIGHT)
        np.testing.assert_allclose(merged.cov(0), SIGMA_0, **TIGHT)
        np.testing.assert_allclose(merged.cov(1), SIGMA_1, **TIGHT)
        np.testing.assert_allclose(pack(merged.cov(1)), [1.7, -0.25, 1.0], **TIGHT)
        np.testing.assert_allclose(np.linalg.eigvalsh(merged.cov(0)), [1, 2.333333], **TIGHT)
        np.testing.assert_allclose(np.linalg.eigvalsh(merged.cov(1)), [0.919884, 1.780116], **TIGHT)


def test_merge_worked_numbers() -> None:
    first, second, _ = worked()
    merged = merge(first, second)
    np.testing.assert_allclose(merged.means[0], [2.5, 1.5], **TIGHT)
    np.testing.assert_allclose(merged.scatter(0), [[5, -2], [-2, 5]], **TIGHT)


def test_sums_worked_numbers() -> None:
    first, second, _ = (sums(part) for part in worked())
    np.testing.assert_allclose(first["sum"][0], [6, 6], **TIGHT)
    np.testing.assert_allclose(first["square"][0], [14, 13, 14], **TIGHT)
    np.testing.assert_allclose(second["sum"][0], [4, 0], **TIGHT)
    np.testing.assert_allclose(second["square"][0], [16, 0, 0], **TIGHT)


def test_factors_and_draws_worked_numbers() -> None:
    merged = pool(worked())
    cholesky_1 = factorise(merged.cov(1), "cholesky")
    np.testing.assert_allclose(cholesky_1.matrix, [[1.303840, 0], [-0.191741, 0.981446]], **TIGHT)
    np.testing.assert_allclose(factorise(merged.cov(0)).matrix, [[1.290994, 0], [-0.516398, 1.183216]], **TIGHT)
    eps = np.array([[0, 0], [1, 0], [0, 1], [-1, 2]], dtype=np.float64)
    drawn = draw(merged.means[1], cholesky_1, eps, np.float64)
    np.testing.assert_allclose(drawn, [[1.2, 5], [2.503840, 4.808259], [1.2, 5.981446], [-0.103840, 7.154632]], **TIGHT)
    transformed = [[1.095445, 2.236068], [1.582353, 2.192774], [1.095445, 2.445699], [0, 2.674814]]
    np.testing.assert_allclose(tukey(drawn), transformed, **TIGHT)
    np.testing.assert_allclose(tukey(torch.from_numpy(drawn)), transformed, **TIGHT)


def test_sliced_wasserstein_worked_numbers() -> None:
    merged = pool(worked())
    directions = np.array([[1, 0], [0, 1], [np.sqrt(0.5), np.sqrt(0.5)], [np.sqrt(0.5), -np.sqrt(0.5)]])
    distance, squared = sliced_wasserstein(merged.means[0], merged.cov(0), merged.means[1], merged.cov(1), directions)
    np.testing.assert_allclose(squared, [1.690165, 12.334678, 2.422382, 11.588966], atol=1e-6)
    assert distance == pytest.approx(2.647461, abs=6e-7)


def test_linear_cka_worked_numbers() -> None:
    a = np.array([[1, 2], [2, 1], [3, 3], [4, 0]], dtype=np.float64)
    b = np.array([[1, 0], [0, 1], [1, 1], [2, -1]], dtype=np.float64)
    assert linear_cka(a, b) == pytest.approx(0.400781, abs=6e-7)
    assert linear_cka(a, a) == pytest.approx(1.0, abs=1e-12)


# Against NumPy on the pooled data


@pytest.mark.parametrize("form", ["full", "diag", "pooled"])
@pytest.mark.parametrize("seed", range(3))
def test_pooling_equals_the_pooled_data(form: str, seed: int) -> None:
    clients = random_clients(seed)
    parts = [moments(z, y, 4, form) for z, y in clients]
    merged = parts[0]
    for part in parts[1:]:
        merged = merge(merged, part)
    assert_equal_to_data(merged, clients)
    assert_equal_to_data(pool(parts), clients)
    replies = MomentsPool(4, 6, form)
    for part in parts:
        replies.add(to_arrays(part, form, dtype=np.float64))
    assert_equal_to_data(replies.moments(), clients)


@pytest.mark.parametrize("form", ["full", "diag", "pooled"])
@pytest.mark.parametrize("buffer_rows", [1, 7, 50, 8192])
@pytest.mark.parametrize("batch", [1, 13, 1000])
def test_streaming_equals_the_whole(form: str, buffer_rows: int, batch: int) -> None:
    rng = np.random.default_rng(1)
    z, y = rng.normal(size=(200, 5)) * 3 + 20, rng.integers(0, 3, size=200)
    streamed = ClassMoments(3, 5, form, buffer_rows)
    for start in range(0, 200, batch):
        streamed.update(z[start : start + batch], y[start : start + batch])
    assert_equal_to_data(streamed, [(z, y)])


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
@given(seed=st.integers(0, 2**31), form=st.sampled_from(["full", "diag", "pooled"]))
def test_merging_is_associative_commutative_and_has_a_neutral_element(seed: int, form: str) -> None:
    a, b, c = (moments(z, y, 4, form) for z, y in random_clients(seed, clients=3))

    def assert_same(x: ClassMoments, y: ClassMoments) -> None:
        np.testing.assert_array_equal(x.counts, y.counts)
        np.testing.assert_allclose(x.means, y.means, atol=1e-10)
        for k in x.classes:
            np.testing.assert_allclose(x.scatter(k), y.scatter(k), rtol=1e-10, atol=1e-9)

    assert_same(merge(merge(a, b), c), merge(a, merge(b, c)))
    assert_same(merge(a, b), merge(b, a))
    assert_same(merge(a, ClassMoments(4, 6, form)), a)
    assert_same(pool([c, a, b]), pool([a, b, c]))


def test_merging_changes_neither_part() -> None:
    first, second, _ = worked()
    before = first.scatter(0).copy(), second.scatter(0).copy()
    merged = merge(first, second)
    merged.update(np.array([[9.0, 9.0]]), np.array([0]))
    assert merged.counts[0] == 5
    np.testing.assert_array_equal(first.scatter(0), before[0])
    np.testing.assert_array_equal(second.scatter(0), before[1])


def test_batches_that_still_wait_are_merged_too() -> None:
    waiting = ClassMoments(1, 2)
    waiting.update(np.array([[1.0, 2.0], [3.0, 5.0]]), np.array([0, 0]))
    other = ClassMoments(1, 2)
    other.update(np.array([[0.0, 0.0]]), np.array([0]))
    expected = np.cov([[1.0, 3.0, 0.0], [2.0, 5.0, 0.0]])
    np.testing.assert_allclose(merge(other, waiting).cov(0), expected, atol=1e-12)


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


def test_affine_map_of_the_statistics() -> None:
    rng = np.random.default_rng(3)
    z, y = rng.normal(size=(60, 4)), rng.integers(0, 2, size=60)
    v, shift = rng.normal(size=(7, 4)), rng.normal(size=7)
    for form in ("full", "pooled"):
        mapped = moments(z, y, 3, form).affine(v, shift)
        assert_equal_to_data(mapped, [(z @ v.T + shift, y)])
    with pytest.raises(ValueError, match="diagonal"):
        moments(z, y, 3, "diag").affine(v, shift)


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


@pytest.mark.parametrize("form", ["full", "diag"])
def test_a_class_of_one_sample_takes_the_pooled_covariance(form: str) -> None:
    merged = pool(worked(form))
    mean, cov = merged.gaussian(2)
    np.testing.assert_array_equal(mean, [5, 5])
    expected = (3 * SIGMA_0 + 4 * SIGMA_1) / 7
    np.testing.assert_allclose(cov, np.diag(expected) if form == "diag" else expected, **TIGHT)


@pytest.mark.parametrize("form", ["full", "diag", "pooled"])
def test_single_samples_only_give_a_small_isotropic_spread(form: str) -> None:
    lonely = moments(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([0, 1]), 2, form)
    expected = gaussian.ISOTROPIC * (np.ones(2) if form == "diag" else np.eye(2))
    np.testing.assert_array_equal(lonely.gaussian(0)[1], expected)
    assert np.isfinite(virtual_features(lonely, 5, 0)[0]).all()


def test_an_unseen_class_gets_no_virtual_features() -> None:
    partial = moments(np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 1.0]]), np.array([0, 2, 2]), 4)
    features, labels, jitter = virtual_features(partial, 3, 0)
    np.testing.assert_array_equal(labels, [0, 0, 0, 2, 2, 2])
    assert features.shape == (6, 2)
    assert jitter == {}
    with pytest.raises(ValueError, match="class 1"):
        partial.gaussian(1)


def test_shrinkage() -> None:
    merged = pool(worked())
    within = (3 * SIGMA_0 + 4 * SIGMA_1) / 7
    np.testing.assert_allclose(merged.gaussian(0, 0.25)[1], 0.75 * SIGMA_0 + 0.25 * within, **TIGHT)
    np.testing.assert_allclose(merged.gaussian(0, 1.0)[1], within, **TIGHT)
    isotropic = merged.gaussian(1, 0.5, "isotropic")[1]
    np.testing.assert_allclose(isotropic, 0.5 * SIGMA_1 + 0.5 * 1.35 * np.eye(2), **TIGHT)
    diagonal = pool(worked("diag")).gaussian(1, 0.5, "isotropic")[1]
    np.testing.assert_allclose(diagonal, np.diag(isotropic), **TIGHT)
    with pytest.raises(ValueError, match="shrinkage"):
        merged.gaussian(0, 1.5)
    with pytest.raises(ValueError, match="target"):
        merged.gaussian(0, 0.5, "nothing")


# Modes of sending


@pytest.mark.parametrize("form", ["full", "diag", "pooled"])
def test_a_pool_of_many_replies_keeps_a_few_means_and_stays_exact(form: str) -> None:
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


def test_a_pool_of_sums_is_that_of_their_totals() -> None:
    parts = [moments(z + 1e3, y, 4) for z, y in random_clients(22)]
    centres = pool(parts).means + 0.1
    replies, arrays = MomentsPool(4, 6, "sums", centres), [to_arrays(part, "sums", centres=centres) for part in parts]
    for reply in arrays:
        replies.add(reply)
    total = {name: sum(reply[name] for reply in arrays) for name in ("count", "sum", "square")}
    wanted, found = from_sums(total["count"], total["sum"], total["square"], centres), replies.moments()
    for c in wanted.classes:
        np.testing.assert_array_equal(found.means[c], wanted.means[c])
        np.testing.assert_array_equal(found.cov(c), wanted.cov(c))
        np.testing.assert_allclose(found.cov(c), pool(parts).cov(c), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_a_reply_comes_back(mode: str) -> None:
    z, y = random_clients(11, clients=1)[0]
    part = moments(z, y, 4, form_of(mode))
    back = from_arrays(to_arrays(part, mode, rank=6, dtype=np.float64), 4, 6, mode)
    np.testing.assert_array_equal(back.counts, part.counts)
    np.testing.assert_allclose(back.means, part.means, atol=1e-10)
    for c in part.classes:
        np.testing.assert_allclose(back.cov(c), part.cov(c), atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_sizes_on_the_wire(mode: str) -> None:
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
    back = [from_arrays(to_arrays(part, "lowrank", r, np.float64), 1, 8, "lowrank").cov(0) for r in (1, 2, 8)]
    for approximation in back:
        np.testing.assert_allclose(np.diag(approximation), np.diag(cov), rtol=1e-9)
        assert np.linalg.eigvalsh(approximation).min() > -1e-12
    errors = [np.linalg.norm(approximation - cov) for approximation in back]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-10
    # With rank 2, all that can be missing off the diagonal lies in the six small eigenvalues.
    assert errors[1] <= 2 * np.linalg.norm(np.sort(np.linalg.eigvalsh(cov))[:6])


def test_low_rank_with_fewer_samples_than_rank() -> None:
    part = moments(np.array([[1.0, 2.0, 3.0], [2.0, 2.0, 5.0]]), np.zeros(2, dtype=int), 1)
    arrays = to_arrays(part, "lowrank", rank=5, dtype=np.float64)
    assert arrays["factor"].shape == (1, 5, 3)
    np.testing.assert_allclose(from_arrays(arrays, 1, 3, "lowrank").cov(0), part.cov(0), atol=1e-12)


def test_pooled_mode_is_linear_discriminant_analysis() -> None:
    clients = random_clients(12)
    replies = MomentsPool(4, 6, "pooled")
    for z, y in clients:
        replies.add(to_arrays(moments(z, y, 4, "pooled"), "pooled", dtype=np.float64))
    merged = replies.moments()
    for c in merged.classes:
        np.testing.assert_allclose(merged.cov(c), pool([moments(z, y, 4) for z, y in clients]).pooled_cov(), atol=1e-10)


def test_sums_add_up_over_clients_and_in_two_exchanges_lose_nothing() -> None:
    clients = [(z + 1e6, y) for z, y in random_clients(13)]
    parts = [moments(z, y, 4) for z, y in clients]
    first = [sums(part) for part in parts]
    total = {name: sum(reply[name] for reply in first) for name in ("count", "sum", "square")}
    plain = from_sums(total["count"], total["sum"], total["square"])
    centres = plain.means
    second = [sums(part, centres) for part in parts]
    centred = {name: sum(reply[name] for reply in second) for name in ("count", "sum", "square")}
    exact = from_sums(centred["count"], centred["sum"], centred["square"], centres)
    reference = pool(parts)
    for c in reference.classes:
        np.testing.assert_allclose(exact.cov(c), reference.cov(c), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(plain.cov(c), reference.cov(c), atol=0.1)
    assert max(np.abs(plain.cov(c) - reference.cov(c)).max() for c in reference.classes) > 1e-6
    assert all(reply["square"].shape == (4, 21) for reply in first)


def test_sums_of_single_samples_have_exactly_no_spread() -> None:
    part = moments(np.array([[0.1, 1e5]]), np.array([1]), 2)
    arrays = sums(part)
    np.testing.assert_array_equal(from_sums(**_renamed(arrays)).cov(1), np.zeros((2, 2)))
    assert not arrays["sum"][0].any()


def _renamed(arrays: dict) -> dict:
    return {"count": arrays["count"], "total": arrays["sum"], "square": arrays["square"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("cov"), "consist of"),
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


def test_refusals() -> None:
    z, y = np.ones((2, 3)), np.array([0, 1])
    collected = ClassMoments(2, 3)
    for features, labels, message in [
        (np.ones((2, 4)), y, "features"),
        (z, np.array([0]), "features"),
        (z, np.array([0, 2]), "labels must lie"),
        (z, np.array([-1, 0]), "labels must lie"),
        (z, np.array([0.0, 1.0]), "integers"),
        (z.astype(int), y, "floating point"),
    ]:
        with pytest.raises(ValueError, match=message):
            collected.update(features, labels)
    collected.update(np.empty((0, 3)), np.empty(0, dtype=int))
    assert collected.classes.size == 0
    with pytest.raises(ValueError, match="class 1 are not finite"):
        moments(np.array([[1.0], [np.inf]]), y, 2)
    with pytest.raises(ValueError, match="form"):
        ClassMoments(2, 3, "half")
    with pytest.raises(ValueError, match="mode"):
        MomentsPool(2, 3, "half")
    with pytest.raises(ValueError, match="needs statistics of form 'diag'"):
        to_arrays(collected, "diag")
    with pytest.raises(ValueError, match="equal classes"):
        merge(collected, ClassMoments(2, 4))
    with pytest.raises(ValueError, match="no statistics"):
        pool([])
    with pytest.raises(ValueError, match="no statistics"):
        MomentsPool(2, 3).moments()
    with pytest.raises(ValueError, match="packed"):
        unpack(np.ones(4), 3)


# Sampling


def test_allotted_draws() -> None:
    counts = np.array([30, 0, 10, 1])
    assert allot(counts, 7).tolist() == [7, 0, 7, 7]
    # 3 classes seen, 300 samples shared as 30 : 10 : 1 of 41.
    assert allot(counts, 100, "proportional").tolist() == [220, 0, 73, 7]
    assert allot(counts, 1, "proportional").tolist() == [2, 0, 1, 1]


def singular(width: int, rank: int, seed: int = 0) -> np.ndarray:
    root = np.random.default_rng(seed).normal(size=(width, rank))
    return root @ root.T / rank


@pytest.mark.parametrize("method", ["auto", "eigh", "cholesky"])
@pytest.mark.parametrize(("width", "rank"), [(1, 1), (6, 6), (130, 130), (6, 3), (130, 40)])
def test_factors_give_the_covariance_back(method: str, width: int, rank: int) -> None:
    cov = singular(width, rank)
    factor = factorise(cov, method)
    expected = cov + factor.jitter * np.eye(width)
    np.testing.assert_allclose(factor.matrix @ factor.matrix.T, expected, atol=1e-9)
    assert factor.jitter <= 1e-6 * np.trace(cov) / width
    if method != "cholesky":
        assert factor.jitter == 0.0


def test_a_wide_singular_covariance_needs_a_small_jitter_only() -> None:
    cov = singular(600, 50)
    factor = factorise(cov)
    assert factor.triangular
    assert 0 < factor.jitter <= 1e-6 * np.trace(cov) / 600
    np.testing.assert_allclose(factor.matrix @ factor.matrix.T, cov + factor.jitter * np.eye(600), atol=1e-9)


def test_special_covariances() -> None:
    assert not factorise(np.zeros((3, 3))).matrix.any()
    np.testing.assert_allclose(factorise(np.array([4.0, 0.0, 9.0])).matrix, [2, 0, 3])
    # A rounding error below zero is no reason to fail.
    slightly_negative = np.diag([1.0, 0.0]) - 1e-17
    assert np.isfinite(factorise(slightly_negative).matrix).all()
    with pytest.raises(ValueError, match="finite"):
        factorise(np.array([[np.nan]]))
    with pytest.raises(ValueError, match="square"):
        factorise(np.ones((2, 3)))
    with pytest.raises(ValueError, match="method"):
        factorise(np.eye(2), "svd")


def test_the_symmetric_root_does_not_depend_on_the_basis() -> None:
    # Equal eigenvalues leave the eigenvectors free to rotate; the draws must not follow them.
    cov = np.diag([2.0, 2.0, 0.0])
    np.testing.assert_allclose(factorise(cov).matrix, np.diag([np.sqrt(2), np.sqrt(2), 0]), atol=1e-12)


@pytest.mark.parametrize(
    "factor",
    [
        factorise(singular(150, 150), "cholesky"),
        factorise(singular(150, 20), "eigh"),
        factorise(np.linspace(0, 2, 150)),
    ],
)
def test_draw_is_the_plain_product(factor: Factor) -> None:
    rng = np.random.default_rng(1)
    mean, eps = rng.normal(size=150), rng.normal(size=(40, 150))
    root = np.diag(factor.matrix) if factor.matrix.ndim == 1 else factor.matrix
    np.testing.assert_allclose(draw(mean, factor, eps, np.float64), mean + eps @ root.T, atol=1e-11)


@pytest.mark.parametrize("rank", [4, 2])
def test_draws_have_the_mean_and_covariance_asked_for(rank: int) -> None:
    cov, mean = singular(4, rank), np.array([1.0, -2.0, 0.0, 5.0])
    size = 40_000
    drawn = sample(mean, cov, size, seed=3, label=1, dtype=np.float64)
    # Six standard errors of a mean and of a covariance of normal variables.
    deviation = np.sqrt(np.diag(cov))
    assert (np.abs(drawn.mean(axis=0) - mean) <= 6 * deviation / np.sqrt(size)).all()
    spread = np.sqrt((cov**2 + np.outer(deviation, deviation) ** 2) / size)
    assert (np.abs(np.cov(drawn, rowvar=False) - cov) <= 6 * spread + 1e-12).all()
    assert np.linalg.matrix_rank(drawn - mean, tol=1e-6) == rank


def test_draws_are_streams_of_seed_and_class() -> None:
    cov, mean = singular(5, 5), np.zeros(5)
    few, many = (sample(mean, cov, m, seed=1, label=2) for m in (10, 25))
    assert few.dtype == np.float32
    np.testing.assert_array_equal(few, many[:10])
    assert not np.array_equal(few, sample(mean, cov, 10, seed=2, label=2))
    assert not np.array_equal(few, sample(mean, cov, 10, seed=1, label=3))
    assert sample(mean, cov, 0, seed=1, label=2).shape == (0, 5)
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    sample(mean, cov, 10, seed=1, label=2)
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


@pytest.mark.parametrize("form", ["full", "diag", "pooled"])
def test_virtual_features_are_the_samples_of_every_class(form: str) -> None:
    merged = pool([moments(z, y, 5, form) for z, y in random_clients(2, classes=4)])
    numbers = [7, 0, 3, 11, 99]
    features, labels, jitter = virtual_features(merged, numbers, seed=9)
    np.testing.assert_array_equal(labels, np.repeat([0, 2, 3], [7, 3, 11]))
    assert features.dtype == np.float32
    assert jitter == {}
    for c in (0, 2, 3):
        expected = sample(*merged.gaussian(c), numbers[c], seed=9, label=c)
        np.testing.assert_array_equal(features[labels == c], expected)


def test_jitter_is_reported() -> None:
    z = np.random.default_rng(0).normal(size=(5, 6))
    thin = moments(z, np.zeros(5, dtype=int), 1)
    assert virtual_features(thin, 2, 0)[2] == {}
    jitter = virtual_features(thin, 2, 0, method="cholesky")[2]
    assert list(jitter) == [0]
    assert jitter[0] > 0


# Transform and analyses


def test_tukey() -> None:
    z = np.array([-4.0, 0.0, 0.25, 9.0], dtype=np.float32)
    np.testing.assert_allclose(tukey(z), [0, 0, 0.5, 3])
    np.testing.assert_allclose(tukey(z, 2.0), [0, 0, 0.0625, 81])
    assert tukey(z).dtype == np.float32
    assert torch.equal(tukey(torch.from_numpy(z), 1.0), torch.from_numpy(z).relu())
    with pytest.raises(ValueError, match="power"):
        tukey(z, 0.0)


def test_sliced_wasserstein_of_shifted_and_scaled_gaussians() -> None:
    directions = np.eye(3)
    shift = np.array([1.0, 2.0, 3.0])
    distance, _ = sliced_wasserstein(shift, np.eye(3), np.zeros(3), np.eye(3), directions)
    assert distance == pytest.approx(np.sqrt((shift**2).mean()))
    distance, _ = sliced_wasserstein(shift, 9 * np.eye(3), shift, np.ones(3), directions)
    assert distance == pytest.approx(2.0)


def test_separability_is_the_mean_over_pairs() -> None:
    merged = pool([moments(z, y, 5) for z, y in random_clients(3)])
    rng = np.random.default_rng([4, gaussian.STREAM])
    directions = rng.standard_normal((20, 6))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    classes = merged.classes
    distances = [
        sliced_wasserstein(merged.means[i], merged.cov(i), merged.means[j], merged.cov(j), directions)[0]
        for i in classes
        for j in classes
        if i < j
    ]
    assert separability(merged, seed=4, directions=20) == pytest.approx(np.mean(distances), rel=1e-12)
    with pytest.raises(ValueError, match="two classes"):
        separability(moments(np.ones((2, 2)), np.zeros(2, dtype=int), 3), 0)


@pytest.mark.parametrize(("rows", "widths"), [(50, (4, 7)), (5, (30, 3)), (6, (20, 20))])
def test_linear_cka_against_the_kernel_form(rows: int, widths: tuple[int, int]) -> None:
    rng = np.random.default_rng(rows)
    x, y = rng.normal(size=(rows, widths[0])) + 3, rng.normal(size=(rows, widths[1])) - 1
    centring = np.eye(rows) - 1 / rows
    k, l = centring @ x @ x.T @ centring, centring @ y @ y.T @ centring  # noqa: E741
    expected = np.trace(k @ l) / np.sqrt(np.trace(k @ k) * np.trace(l @ l))
    assert linear_cka(x, y) == pytest.approx(expected, rel=1e-10)
    rotation = np.linalg.qr(rng.normal(size=(widths[0], widths[0])))[0]
    assert linear_cka(x, 3 * x @ rotation + 1) == pytest.approx(1.0, rel=1e-10)
    assert np.isnan(linear_cka(x, np.ones((rows, 2))))
    with pytest.raises(ValueError, match="rows"):
        linear_cka(x, y[1:])
