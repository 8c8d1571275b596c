"""Partitions: the papers' procedures against literal loops and published numbers, and what must hold for all kinds."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedapp.data import label_skew, partitions
from fedapp.data.card import data_card
from fedapp.data.dataset import Dataset
from fedapp.data.label_skew import (
    block_owners,
    choose_classes,
    cut_by_shares,
    dirichlet_counts,
    draw_two_classes,
    round_to_total,
    scale_to_margins,
)
from fedapp.data.partitions import DRAWN, SPLITS, Partition, union_test
from fedapp.errors import BadRequest
from tests.handmade import partitioned
from tests.test_hostile_files import encrypted


def toy(train_sizes, test_sizes=None, *, shuffle_seed=0) -> Dataset:
    """A data set that has labels only; its images are one black pixel."""
    rng = np.random.default_rng(shuffle_seed)
    y_train = rng.permutation(np.repeat(np.arange(len(train_sizes)), train_sizes))
    y_test = np.zeros(0, np.int64)
    if test_sizes is not None:
        y_test = rng.permutation(np.repeat(np.arange(len(test_sizes)), test_sizes))
    return Dataset(
        name="toy",
        x_train=np.zeros((len(y_train), 1, 1, 1), np.uint8),
        y_train=y_train.astype(np.int64),
        x_test=np.zeros((len(y_test), 1, 1, 1), np.uint8),
        y_test=y_test.astype(np.int64),
        classes=tuple(f"c{i}" for i in range(len(train_sizes))),
        scale=255.0,
        mean=(0.0,),
        std=(1.0,),
    )


TOY = toy([120, 80, 100, 60, 140, 100, 90, 110, 130, 70], [30, 20, 25, 15, 35, 25, 22, 28, 32, 18])


# --- procedures against published numbers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("class_sizes", "clients", "sizes", "classes"),
    [
        ([5000] * 10, 20, (1765, 4100), (6, 9.1, 10)),
        ([6000] * 10, 20, (1322, 4377), (3, 8.6, 10)),
        ([5000] * 10, 100, (141, 1087), (2, 7.9, 10)),
        ([6000] * 10, 100, (143, 1030), (2, 8.3, 10)),
        # The authors' EMNIST labels run from 1 to 26: class 0 is empty but takes a draw.
        ([0] + [4800] * 26, 20, (3892, 7583), (13, 23.0, 26)),
        ([0] + [4800] * 26, 100, (700, 1849), (12, 21.8, 26)),
    ],
)
def test_dirichlet_reproduces_the_published_sizes_of_fedclassavg(class_sizes, clients, sizes, classes):
    rng = np.random.RandomState(2021)  # the generator that the authors used
    while True:
        shares = []
        for size in class_sizes:
            rng.shuffle(np.arange(size))
            shares.append(rng.dirichlet(np.repeat(0.5, clients)))
        counts = dirichlet_counts(np.array([shares]), np.array(class_sizes))[0]
        if counts.sum(axis=1).min() >= 10:
            break
    held, kinds = counts.sum(axis=1), (counts > 0).sum(axis=1)
    # Their code loses the image that rounding leaves behind the last cut, hence one or two images of tolerance.
    assert abs(held.min() - sizes[0]) <= 1
    assert abs(held.max() - sizes[1]) <= 2
    assert (kinds.min(), round(kinds.mean(), 1), kinds.max()) == classes


def test_two_classes_reproduce_the_published_pairs_of_fedclassavg():
    published = ["67", "07", "69", "01", "25", "57", "04", "48", "14", "58"]
    published += ["27", "79", "36", "47", "03", "02", "39", "01", "69", "58"]
    rng = np.random.RandomState(2021)
    rows_of = [np.arange(5000) for _ in range(10)]
    pairs, used = [], []
    for _ in range(20):
        classes, rows = draw_two_classes(rows_of, 1250, rng)
        pairs.append("".join(str(label) for label in sorted(classes)))
        rows = [label * 5000 + part for label, part in zip(classes, rows, strict=True)]
        used.append(np.concatenate(rows))
        rng.shuffle(np.arange(2500))
    assert pairs == published
    assert np.mean([len(np.unique(rows)) for rows in used]) == pytest.approx(2212, abs=1)
    assert len(np.unique(np.concatenate(used))) == 30_919


def test_classes_reproduce_the_published_deal_of_fedgh():
    rng = np.random.RandomState(42)
    shares_of = [rng.uniform(0.4, 0.6, 2) for _ in range(10)]
    picks = choose_classes(10, 10, 2, rng, distinct=False)
    assert picks == [[9, 2], [4, 8], [5, 0], [6, 1], [3, 7], [6, 4], [0, 9], [2, 7], [1, 5], [8, 3]]
    left = [list(shares / shares.sum()) for shares in shares_of]
    shares = np.zeros((10, 10))
    for client, own in enumerate(picks):
        for label in own:
            shares[client, label] += left[label].pop()
    train = cut_by_shares(shares, np.full(10, 4000)).sum(axis=1)
    test = cut_by_shares(shares, np.full(10, 1000)).sum(axis=1)
    assert (train.min(), int(train.mean()), train.max()) == (3579, 3999, 4596)
    assert (test.min(), int(test.mean()), test.max()) == (894, 999, 1149)


def test_blocks_of_the_pathological_partition():
    owners = block_owners(10, 20, 2)
    assert [list(own) for own in owners[:4]] == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]
    assert all(len(own) == 4 for own in owners)
    owners = block_owners(100, 20, 10)
    assert [list(own) for own in owners[:11]] == [[0, 1]] * 10 + [[2, 3]]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 20), st.data())
def test_blocks_fill_slots_and_never_leave_a_client_without_class(clients, num_classes, data):
    per_client = data.draw(st.integers(1, num_classes))
    owners = block_owners(num_classes, clients, per_client)
    held = np.bincount(np.concatenate(owners).astype(int), minlength=clients)
    assert held.min() >= 1
    assert held.max() <= per_client


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 20), st.integers(0, 2**31), st.data())
def test_chosen_classes_are_distinct_and_balanced(clients, num_classes, seed, data):
    per_client = data.draw(st.integers(1, num_classes))
    picks = choose_classes(num_classes, clients, per_client, np.random.default_rng(seed))
    assert all(len(set(own)) == per_client for own in picks)
    uses = np.bincount(np.concatenate(picks), minlength=num_classes)
    assert uses.max() - uses.min() <= 1


def literal_dirichlet(shares, class_sizes):
    """One draw, client by client and class by class, as the papers' codes write it."""
    num_classes, clients = shares.shape
    total = int(sum(class_sizes))
    held = [0] * clients
    counts = np.zeros((clients, num_classes), int)
    for label in range(num_classes):
        own = [share if have < total / clients else 0.0 for share, have in zip(shares[label], held, strict=True)]
        norm = sum(own)
        start, running = 0, 0.0
        last = max(client for client in range(clients) if own[client] > 0)
        for client in range(clients):
            running += own[client] / norm
            end = class_sizes[label] if client >= last else int(running * class_sizes[label])
            counts[client, label] = end - start
            held[client] += end - start
            start = end
    return counts


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 8), st.integers(1, 6), st.sampled_from([0.1, 0.5, 5.0]))
def test_dirichlet_counts_equal_a_literal_loop(seed, clients, num_classes, alpha):
    rng = np.random.default_rng(seed)
    class_sizes = rng.integers(1, 200, num_classes)
    shares = rng.dirichlet(np.full(clients, alpha), (3, num_classes))
    counts = dirichlet_counts(shares, class_sizes)
    for one, expected in zip(counts, shares, strict=True):
        # Sums in another order may move a cut by one image.
        assert np.abs(one - literal_dirichlet(expected, class_sizes)).max() <= 1
        assert np.array_equal(one.sum(axis=0), class_sizes)


def test_dirichlet_counts_worked_by_hand():
    # N = 20, K = 2, limit 10. Class 0 is cut at floor(.9 * 12) = 10: client 0 is full, all of class 1 goes to client 1.
    shares = np.array([[[0.9, 0.1], [0.7, 0.3]]])
    assert dirichlet_counts(shares, np.array([12, 8])).tolist() == [[[10, 0], [2, 8]]]
    # A client with one image less than the limit still takes its share.
    shares = np.array([[[0.75, 0.25], [0.75, 0.25]]])
    assert dirichlet_counts(shares, np.array([12, 8])).tolist() == [[[9, 6], [3, 2]]]


def test_dirichlet_draw_without_an_open_share_is_all_zero():
    shares = np.array([[[1.0, 0.0], [1.0, 0.0]]])
    assert not dirichlet_counts(shares, np.array([12, 8])).any()


def test_scaling_meets_both_margins_and_keeps_cross_ratios():
    rng = np.random.default_rng(3)
    weights = rng.uniform(0.1, 1, (5, 4))
    rows, columns = np.full(5, 20.0), np.array([40.0, 10.0, 30.0, 20.0])
    scaled = scale_to_margins(weights, rows, columns)
    np.testing.assert_allclose(scaled.sum(axis=0), columns)
    np.testing.assert_allclose(scaled.sum(axis=1), rows, atol=0.011)
    # Scaling rows and columns leaves the ratio w_ij w_kl / (w_il w_kj) as it was.
    ratio = weights[0, 0] * weights[1, 1] / (weights[0, 1] * weights[1, 0])
    assert scaled[0, 0] * scaled[1, 1] / (scaled[0, 1] * scaled[1, 0]) == pytest.approx(ratio)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 50), min_size=1, max_size=12))
def test_rounding_is_near_and_meets_the_total(amounts):
    values = np.array(amounts)
    total = round(float(values.sum()))
    whole = round_to_total(values, total)
    assert whole.sum() == total
    assert np.abs(whole - values).max() <= 1 + 1e-6


def test_rounding_respects_limits():
    assert round_to_total(np.array([2.6, 2.6, 0.8]), 6, np.array([2, 9, 0])).tolist() == [2, 4, 0]
    assert round_to_total(np.array([2.6, 2.6]), 9, np.array([2, 3])).tolist() == [2, 3]


# --- what holds for every kind -------------------------------------------------------------------------------------


def table(dataset: Dataset, partition: Partition, part: str) -> np.ndarray:
    labels = dataset.pool_labels
    rows = [np.bincount(labels[getattr(client, part)], minlength=dataset.num_classes) for client in partition.clients]
    return np.array(rows)


@pytest.fixture(scope="module")
def dealt() -> dict[tuple[str, str], Partition]:
    return {
        (kind, split): partitioned(TOY, kind=kind, split=split, clients=8, seed=5, min_samples=12)
        for kind in DRAWN
        for split in SPLITS
    }


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", DRAWN)
def test_invariants(dealt, kind, split):
    partition = dealt[kind, split]
    assert len(partition.clients) == 8
    for client in partition.clients:
        for rows in (client.train, client.test):
            assert rows.dtype == np.int64
            assert np.array_equal(rows, np.sort(rows))
            assert len(rows)
        # Nothing is drawn twice into a test split.
        assert len(np.unique(client.test)) == len(client.test)
    train = np.concatenate([client.train for client in partition.clients])
    test = np.concatenate([client.test for client in partition.clients])
    assert not np.intersect1d(train, test).size  # no client is tested on what another one trained on
    end = TOY.num_train + TOY.num_test
    lowest_test = TOY.num_train if split == "official" else 0
    highest = {"official": end, "merged": end, "holdout": TOY.num_train}[split]
    assert test.min() >= lowest_test
    assert max(train.max(), test.max()) < highest
    if split == "official":
        assert train.max() < TOY.num_train
    if kind != "two-class":
        assert len(np.unique(train)) == len(train)
        if split != "official":
            assert len(np.unique(test)) == len(test)
    held = [len(client.train) + (len(client.test) if split != "official" else 0) for client in partition.clients]
    assert min(held) >= 12


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", DRAWN)
def test_train_and_test_have_the_same_distribution(dealt, kind, split):
    partition = dealt[kind, split]
    train, test = table(TOY, partition, "train"), table(TOY, partition, "test")
    factor = TOY.num_test / TOY.num_train if split == "official" else 1 / 3
    # Rounding moves a class by less than one image, the rule "one image stays for training" by one more.
    assert np.abs(test - factor * train).max() <= 2
    assert not test[train == 0].any()


@pytest.mark.parametrize("kind", DRAWN)
def test_seed_decides(dealt, kind):
    again = partitioned(TOY, kind=kind, split="merged", clients=8, seed=5, min_samples=12)
    other = partitioned(TOY, kind=kind, split="merged", clients=8, seed=6, min_samples=12)
    assert again.hash == dealt[kind, "merged"].hash
    assert other.hash != again.hash
    for one, two in zip(again.clients, dealt[kind, "merged"].clients, strict=True):
        assert np.array_equal(one.train, two.train)
        assert np.array_equal(one.test, two.test)


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "dirichlet-equal"])
def test_every_image_is_dealt(dealt, kind):
    partition = dealt[kind, "merged"]
    held = np.concatenate([np.concatenate([client.train, client.test]) for client in partition.clients])
    assert np.array_equal(np.sort(held), np.arange(TOY.num_train + TOY.num_test))


def test_pathological_deals_whole_classes():
    partition = partitioned(TOY, kind="pathological", split="merged", clients=10, seed=5)
    counts = table(TOY, partition, "train") + table(TOY, partition, "test")
    assert np.array_equal(counts.sum(axis=0), np.bincount(TOY.pool_labels))
    # 8 clients with 2 classes have 16 slots and each class takes two: the procedure never reaches the last two classes.
    counts = table(TOY, partitioned(TOY, kind="pathological", split="merged", clients=8, seed=5), "train")
    assert (counts.sum(axis=0) > 0).tolist() == [True] * 8 + [False] * 2


def test_sizes_of_equal_kinds(dealt):
    for kind, slack in (("iid", 1), ("dirichlet-equal", 10), ("two-class", 0), ("shards", 0)):
        sizes = [len(client.train) for client in dealt[kind, "official"].clients]
        assert max(sizes) - min(sizes) <= slack, kind
    assert {len(client.train) for client in dealt["two-class", "official"].clients} == {2 * (1000 // 16)}
    assert {len(client.train) for client in dealt["shards", "official"].clients} == {2 * (1000 // 16)}


def test_iid_is_the_cut_of_flwr_datasets(dealt):
    sizes = [len(client.train) for client in dealt["iid", "official"].clients]
    assert sizes == [len(part) for part in np.array_split(np.arange(1000), 8)]
    counts = table(TOY, dealt["iid", "official"], "train")
    assert (counts > 0).sum() >= 75  # of 80: every client sees nearly every class


def test_shards_are_runs_of_sorted_labels(dealt):
    counts = table(TOY, dealt["shards", "official"], "train")
    # Classes have at least 60 images and a shard 62: it touches at most three classes, a client at most six.
    assert (counts > 0).sum(axis=1).max() <= 6
    starts = np.sort([c.train.min() for c in dealt["shards", "official"].clients])
    assert len(np.unique(starts)) == 8


@pytest.mark.parametrize("kind", ["pathological", "classes", "two-class"])
def test_number_of_classes(dealt, kind):
    assert ((table(TOY, dealt[kind, "official"], "train") > 0).sum(axis=1) == 2).all()


def test_pathological_sizes_lie_within_the_bounds_of_pfllib():
    data = toy([400] * 10)
    partition = partitioned(data, kind="pathological", split="holdout", clients=20, seed=1, min_samples=40)
    counts = table(data, partition, "train") + table(data, partition, "test")
    for label, owners in enumerate(block_owners(10, 20, 2)):
        parts = counts[owners, label]
        assert ((parts[:-1] >= 10) & (parts[:-1] < 100)).all()
        assert parts.sum() == 400


def test_smaller_alpha_is_more_skewed():
    def entropy(alpha):
        partition = partitioned(TOY, kind="dirichlet", split="merged", clients=8, seed=5, alpha=alpha, min_samples=1)
        shares = table(TOY, partition, "train") / table(TOY, partition, "train").sum(axis=1, keepdims=True)
        return float(-(shares * np.log(np.maximum(shares, 1e-12))).sum(axis=1).mean())

    assert entropy(0.05) < entropy(0.5) < entropy(50.0)


def test_classes_cut_official_test_images_by_the_same_shares():
    data = toy([1000] * 10, [500] * 10)
    partition = partitioned(data, kind="classes", split="official", clients=10, seed=2)
    train, test = table(data, partition, "train"), table(data, partition, "test")
    assert np.abs(test - train / 2).max() <= 1
    assert len(np.unique(np.concatenate([client.test for client in partition.clients]))) == test.sum()
    owned = train[train > 0] / 1000
    assert owned.min() >= 0.4 / (0.4 + 0.6) - 0.001
    assert owned.max() <= 0.6 / (0.4 + 0.6) + 0.001


def test_a_class_with_one_image_goes_to_training():
    labels = np.array([0] * 8 + [1] + [2] * 4)
    train, test = partitions._stratified(np.arange(13), labels, np.random.default_rng(0))
    assert np.bincount(labels[train], minlength=3).tolist() == [6, 1, 3]
    assert np.bincount(labels[test], minlength=3).tolist() == [2, 0, 1]
    train, test = partitions._stratified(np.arange(3), np.array([0, 1, 2]), np.random.default_rng(0))
    assert len(train) == 3
    assert len(test) == 0


@pytest.mark.parametrize("count", [2, 3])
def test_a_client_with_two_images_of_a_class_has_a_test_image(count):
    """A quarter of two or three images is less than one: rounding down would leave nothing to test on."""
    train, test = partitions._stratified(np.arange(count), np.zeros(count, int), np.random.default_rng(0))
    assert (len(train), len(test)) == (count - 1, 1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(0, 2**31))
def test_stratified_cut_is_a_quarter(sizes, seed):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    train, test = partitions._stratified(np.arange(len(labels)), labels, np.random.default_rng(seed))
    assert np.array_equal(np.sort(np.concatenate([train, test])), np.arange(len(labels)))
    counts = np.bincount(labels[train], minlength=len(sizes))
    assert all(count >= 1 for count, size in zip(counts, sizes, strict=True) if size)
    several = any(size > 1 for size in sizes)
    assert len(test) == min(max(len(labels) // 4, int(several)), sum(max(size - 1, 0) for size in sizes))


# --- bounded redraws and bad requests ------------------------------------------------------------------------------


def test_redraws_are_bounded_and_name_what_to_change():
    data = toy([200] * 10)
    with pytest.raises(BadRequest, match=r"10,000.*100 clients.*15 of 2000 samples.*alpha 0\.05") as caught:
        partitioned(data, kind="dirichlet", split="holdout", clients=100, seed=1, alpha=0.05, min_samples=15)
    assert "raise alpha" in str(caught.value)


def test_redraws_stop_at_ten_thousand(monkeypatch):
    drawn = []
    original = label_skew.dirichlet_counts
    monkeypatch.setattr(label_skew, "dirichlet_counts", lambda s, n: (drawn.append(len(s)), original(s, n))[1])
    with pytest.raises(BadRequest):
        partitioned(toy([20] * 3), kind="dirichlet", split="holdout", clients=6, seed=1, alpha=0.01, min_samples=10)
    assert sum(drawn) == 10_000


def test_redrawing_in_blocks_takes_the_first_good_draw():
    sizes = np.full(10, 40)
    rng = np.random.default_rng(np.random.SeedSequence([3, 0]))
    while True:
        counts = dirichlet_counts(rng.dirichlet(np.full(10, 0.3), (1, 10)), sizes)[0]
        if counts.sum(axis=1).min() >= 30:
            break
    data = toy([40] * 10)
    partition = partitioned(data, kind="dirichlet", split="holdout", clients=10, seed=3, alpha=0.3, min_samples=30)
    assert np.array_equal(table(data, partition, "train") + table(data, partition, "test"), counts)


GOOD = {"kind": "dirichlet", "split": "merged", "clients": 8, "seed": 0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "dirichelt"}, "did you mean 'dirichlet'"),
        ({"split": "oficial"}, "did you mean 'official'"),
        ({"clients": 0}, "at least 1"),
        ({"clients": 5000}, "5000 clients but only 1250 samples"),
        ({"min_samples": 157}, "needs 1256 samples"),
        ({"kind": "classes", "classes_per_client": 0}, "classes-per-client must lie in 1 .. 10"),
        ({"kind": "pathological", "classes_per_client": 11}, "classes-per-client must lie in 1 .. 10"),
        ({"kind": "shards", "classes_per_client": 157}, "must lie in 1 .. 156"),
        ({"kind": "pathological", "clients": 100, "min_samples": 12}, "classes-per-client 2"),
        ({"kind": "two-class", "clients": 700, "min_samples": 1}, "client 0 holds 0 samples"),
    ],
)
def test_bad_requests(change, message):
    with pytest.raises(BadRequest) as caught:
        partitioned(TOY, **{**GOOD, **change})
    assert message in str(caught.value)


def test_official_without_test_images_names_holdout():
    with pytest.raises(BadRequest, match="holdout"):
        partitioned(toy([50, 50]), kind="iid", split="official", clients=2, seed=0)


# --- on disk -------------------------------------------------------------------------------------------------------


def test_saved_partition_comes_back(tmp_path, dealt):
    partition = dealt["dirichlet", "official"]
    path = tmp_path / "new" / "partition.npz"
    partition.save(path)
    back = Partition.load(path)
    assert (back.kind, back.split, back.hash, back.settings) == (
        partition.kind,
        partition.split,
        partition.hash,
        partition.settings,
    )
    for one, two in zip(back.clients, partition.clients, strict=True):
        assert np.array_equal(one.train, two.train)
        assert np.array_equal(one.test, two.test)
    assert [item.name for item in path.parent.iterdir()] == ["partition.npz"]


def test_changed_partition_is_refused(tmp_path, dealt):
    path = tmp_path / "partition.npz"
    dealt["iid", "official"].save(path)
    with np.load(path) as archive:
        arrays = dict(archive)
    arrays["train"][0] += 1
    np.savez(path, **arrays)
    with pytest.raises(BadRequest, match="hash"):
        Partition.load(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(BadRequest, match="cannot read"):
        Partition.load(path)
    with pytest.raises(BadRequest, match="cannot read"):
        Partition.load(tmp_path / "absent.npz")
    np.savez(path, **{**arrays, "header": np.array("[]")})
    with pytest.raises(BadRequest, match="cannot read"):
        Partition.load(path)
    encrypted(path)
    with pytest.raises(BadRequest, match="cannot read"):
        Partition.load(path)


def test_partition_of_other_data_is_refused(dealt):
    other = toy([125] * 10)
    with pytest.raises(BadRequest, match="other data"):
        data_card(other, dealt["iid", "official"])


def test_hash_speaks_of_who_holds_what(dealt):
    hashes = {partition.hash for partition in dealt.values()}
    assert len(hashes) == len(dealt)
    partition = dealt["iid", "merged"]
    assert partitions._hash(tuple(reversed(partition.clients))) != partition.hash


# --- data card and balanced test set -------------------------------------------------------------------------------


def by_hand() -> tuple[Dataset, Partition]:
    data = toy([6, 6], shuffle_seed=1)
    zero, one = np.flatnonzero(data.y_train == 0), np.flatnonzero(data.y_train == 1)
    clients = (
        partitions.ClientSplit(np.sort(np.r_[zero[:3], one[:1]]), np.sort(np.r_[zero[3:4], one[1:3]])),
        partitions.ClientSplit(np.sort(one[3:5]), np.zeros(0, np.int64)),
    )
    settings_ = {"labels_sha256": partitions._label_hash(data)}
    return data, Partition("classes", "holdout", clients, partitions._hash(clients), settings_)


def test_data_card_by_hand():
    data, partition = by_hand()
    card = data_card(data, partition)
    assert card.train.tolist() == [[3, 1], [0, 2]]
    assert card.test.tolist() == [[1, 2], [0, 0]]
    # Client 0 answers class 0 and is right once in three; client 1 has nothing to be tested on.
    assert card.majority[0] == pytest.approx(1 / 3)
    assert np.isnan(card.majority[1])
    assert card.mean_majority == pytest.approx(1 / 3)
    assert (card.unused, card.shared) == (3, 0)
    values = json.loads(json.dumps(card.to_dict()))
    assert values["majority"] == [pytest.approx(1 / 3), None]
    assert values["train_sizes"] == [4, 2]
    text = card.text()
    assert "3 images are held by no client" in text
    assert text.splitlines()[-2].split() == ["1", ".", "2", "2", "0", "-"]
    assert "33.3 %" in text.splitlines()[-1]


def test_data_card_says_what_is_shared(dealt):
    card = data_card(TOY, dealt["two-class", "official"])
    assert card.shared > 0
    assert "held more than once" in card.text()
    assert data_card(TOY, dealt["iid", "official"]).unused == 0


def test_data_card_text_with_many_classes():
    data = toy([40] * 30)
    card = data_card(data, partitioned(data, kind="classes", split="holdout", clients=4, seed=0, classes_per_client=5))
    line = next(line for line in card.text().splitlines() if line.strip().startswith("0 "))
    assert line.split()[1] == "5"
    assert max(len(line) for line in card.text().splitlines()) < 100


def test_the_command_writes_partition_and_picture(tmp_path):
    from PIL import Image
    from typer.testing import CliRunner

    from fedapp import cli

    result = CliRunner().invoke(cli.app, ["partition", "--clients", "5", "--out", str(tmp_path / "new")])
    assert result.exit_code == 0
    assert Partition.load(tmp_path / "new" / "partition.npz").hash in result.stdout
    with Image.open(tmp_path / "new" / "partition.png") as picture:
        pixels = np.asarray(picture.convert("RGBA"))
    assert min(pixels.shape[:2]) > 100
    assert pixels[..., 3].min() == 255  # not transparent: readable on any background


def test_union_test_is_balanced_and_bounded(dealt):
    partition = dealt["dirichlet", "merged"]
    everything = np.unique(np.concatenate([client.test for client in partition.clients]))
    assert np.array_equal(union_test(TOY, partition, 0), everything)
    chosen = union_test(TOY, partition, 0, limit=100)
    assert len(chosen) == len(np.unique(chosen)) == 100
    assert np.isin(chosen, everything).all()
    assert np.bincount(TOY.pool_labels[chosen], minlength=10).tolist() == [10] * 10
    # Classes with few images give all they have and the others fill up.
    limited = np.bincount(TOY.pool_labels[union_test(TOY, partition, 0, limit=250)], minlength=10)
    available = np.bincount(TOY.pool_labels[everything], minlength=10)
    assert limited.sum() == 250
    short = available < limited.max()
    assert np.array_equal(
        limited[short & (limited < limited.max() - 1)], available[short & (limited < limited.max() - 1)]
    )
    assert np.array_equal(union_test(TOY, partition, 0, limit=100), chosen)
    assert not np.array_equal(union_test(TOY, partition, 1, limit=100), chosen)


@pytest.mark.parametrize("kind", ["dirichlet", "iid"])
def test_the_share_of_test_images_can_be_chosen(kind: str) -> None:
    """FedGH's 8:1:1: a tenth for testing; without the key the cut, and its hash, are those of before."""
    tenth = partitioned(TOY, kind=kind, split="merged", clients=4, seed=5, min_samples=1, test_share=0.1)
    for client in tenth.clients:
        whole = len(client.train) + len(client.test)
        assert len(client.test) == pytest.approx(0.1 * whole, abs=1)
        assert not set(client.train.tolist()) & set(client.test.tolist())
    pair = [
        partitioned(TOY, kind="two-class", split="merged", clients=4, seed=5, test_share=share) for share in (0.1, 0.25)
    ]
    sizes = [sum(len(client.test) for client in partition.clients) for partition in pair]
    assert sizes[0] < 0.5 * sizes[1], "the pool is cut by the share where clients draw with replacement"
    assert tenth.settings["test_share"] == 0.1
    plain, same = (
        partitioned(TOY, kind=kind, split="merged", clients=4, seed=5, min_samples=1, **more)
        for more in ({}, {"test_share": 0.25})
    )
    assert plain.hash == same.hash != tenth.hash and "test_share" not in plain.settings
