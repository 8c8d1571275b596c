"""Partitions of a data set over clients: seeded, with a train and a test split of the same distribution per client.

===================  =======================================================================================
kind                 procedure
===================  =======================================================================================
``iid``              a random permutation cut into equal parts (flwr-datasets ``IidPartitioner`` on the permuted
                     label column)
``dirichlet``        per class Dir(alpha) over the clients; a client that already holds N/K images gets no share of
                     further classes; redrawn until the smallest client has min_samples images (PFNM, NIID-Bench,
                     MOON, PFLlib; used by FedClassAvg, cwFedAvg and CCVR). Own code: flwr-datasets'
                     ``DirichletPartitioner`` stops one image later, gives up after 10 draws and assigns
                     every image in every attempt.
``dirichlet-equal``  equal client sizes, as FedClassAvg's text says: per client Dir(alpha) over the classes, scaled
                     alternately to the client size and to the class sizes, rounded per class. Own code.
``pathological``     blocks of clients that share the same classes, with uneven sizes (PFLlib, used by cwFedAvg).
                     Own code: flwr-datasets' ``PathologicalPartitioner`` draws classes independently and cuts evenly.
``classes``          random classes per client, balanced over classes, with shares from U(0.4, 0.6) (FedGH, after
                     Shamsian et al.). Own code, for the same reason.
``two-class``        two random classes per client, N/(2K) images of each drawn with replacement (FedClassAvg's
                     "skewed"): equal sizes; clients overlap and hold duplicates. Own code.
``shards``           images sorted by label and cut into equal shards; each client gets classes_per_client of them
                     (McMahan et al. 2017; flwr-datasets ``ShardPartitioner`` on the label column)
``flwr:NAME``        any partitioner of flwr-datasets that gives clients whole rows, `fedapp.data.flower`
===================  =======================================================================================

Splits:

* ``official``: the clients share the official training images. Client k's test images are drawn once from the official
  test images, without replacement within the client (clients may share test images): n_k * N_test / N_train images,
  the same fraction as of the training images, in the client's class proportions. For ``classes``, as in FedGH, the
  shares that cut the training images also cut the test images, so that clients' test images are disjoint.
* ``merged``: official training and test images are pooled, the pool is partitioned, and each client keeps 75 % for
  training and 25 % (``test_share``) for testing, stratified per class; a class with one image goes to training.
* ``holdout``: as ``merged``, with the training images alone as the pool.

Drawing with replacement (``two-class``) would put copies of one image on both sides of a 75/25 cut. There the pool
itself is cut first, 75/25 per class, and clients draw from the two parts.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.data import flower, label_skew
from fedapp.data.dataset import Dataset
from fedapp.data.label_skew import round_to_total
from fedapp.errors import BadRequest, counted, suggest_choice
from fedapp.files import atomic
from fedapp.settings import DataSettings

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

_KINDS: dict[str, tuple[str | None, str]] = {
    "iid": (None, "every client gets an equal share of a random order"),
    "dirichlet": ("alpha", "each class is divided by shares that Dirichlet(alpha) draws; sizes differ too"),
    "dirichlet-equal": ("alpha", "equal sizes; each client's shares of the classes are drawn from Dirichlet(alpha)"),
    "pathological": ("classes-per-client", "blocks of clients share the same few classes, with uneven sizes"),
    "classes": ("classes-per-client", "each client gets a few random classes, and an uneven share of each"),
    "two-class": (None, "two random classes a client, equal sizes, drawn with replacement"),
    "shards": (
        "classes-per-client",
        "samples sorted by label are cut into equal shards; each client gets a few",
    ),
    "by-client": (None, "a column of your data names each sample's client"),
    "file": (None, "an index file lists each client's samples (partition-file)"),
}
PARTITION_PARAMETER = {kind: key for kind, (key, _) in _KINDS.items()}
"""Every kind, with the run-config key that sets how far it is from iid (None: nothing to set)."""
MEANING = {kind: words for kind, (_, words) in _KINDS.items()}
"""Every kind in one sentence."""
NATURAL = ("by-client", "file")
"""Kinds where the data or a file assign rows to clients, `fedapp.data.natural`; :func:`make` draws all others."""
PARTS = ("train", "test", "validation")
"""What a client's images are divided into."""
PARTITION_KINDS: tuple[str, ...] = tuple(PARTITION_PARAMETER)
DRAWN: tuple[str, ...] = tuple(kind for kind in PARTITION_KINDS if kind not in NATURAL)
SPLITS: tuple[str, ...] = ("official", "merged", "holdout")
TEST_FRACTION = 0.25
UNION = 2000
"""Largest number of common test images for the balanced score."""


@dataclass(frozen=True, eq=False)
class ClientSplit:
    """What one client holds, as indices into the virtual pool (official training rows, then test rows).

    Attributes
    ----------
    train, test : int64, sorted. ``test`` may be empty when the client has one image of each of its classes.
    validation : int64, sorted: what :func:`hold_out` took from ``train``.
    """

    train: Int64
    test: Int64
    validation: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(frozen=True, eq=False)
class Partition:
    """An assignment of rows to clients.

    Attributes
    ----------
    clients : in the order of client ids.
    hash : sha256 of all indices, hexadecimal: equal exactly when every client holds the same images.
    settings : JSON values: the arguments of :func:`make` and the data set's name, sizes and label hash.
    names : of the clients, where the data or a file name them; else empty.
    """

    kind: str
    split: str
    clients: tuple[ClientSplit, ...]
    hash: str
    settings: dict[str, Any]
    names: tuple[str, ...] = ()

    def with_clients(self, clients: Sequence[ClientSplit], **settings: Any) -> Partition:
        """Return the partition with other splits of the same clients, and further settings."""
        members = tuple(clients)
        return replace(self, clients=members, hash=_hash(members), settings={**self.settings, **settings})

    def save(self, path: str | Path) -> None:
        """Write the partition to an ``.npz`` file, atomically; its folder is made if needed."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        header = {"kind": self.kind, "split": self.split, "hash": self.hash, "settings": self.settings}
        header |= {"names": self.names} if self.names else {}
        arrays: dict[str, Any] = {"header": np.array(json.dumps(header, sort_keys=True))}
        for part in PARTS:
            rows = [getattr(client, part) for client in self.clients]
            arrays[part] = np.concatenate(rows)
            arrays[f"{part}_sizes"] = np.array([len(r) for r in rows], np.int64)
        with atomic(target, mode=0o666) as draft, draft.open("wb") as stream:
            np.savez_compressed(stream, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> Partition:
        """Read a partition and verify its hash.

        Raises
        ------
        BadRequest : if the file is absent or damaged, or its indices do not match the hash.
        """
        try:
            with np.load(path, allow_pickle=False) as archive:
                arrays = {key: archive[key] for key in archive.files}
            header = json.loads(str(arrays["header"]))
            parts = {}
            for part in PARTS:
                sizes = arrays[f"{part}_sizes"]
                if sizes.sum() != len(arrays[part]):
                    raise ValueError(f"{part}: sizes and indices disagree")
                parts[part] = np.split(arrays[part].astype(np.int64), np.cumsum(sizes)[:-1])
            clients = tuple(ClientSplit(*rows) for rows in zip(*parts.values(), strict=True))
            names = tuple(map(str, header.get("names", ())))
            if names and len(names) != len(clients):
                raise ValueError("names and clients disagree")
            partition = cls(header["kind"], header["split"], clients, header["hash"], dict(header["settings"]), names)
        except Exception as error:  # a damaged file raises errors of its readers
            raise BadRequest(f"cannot read the partition {path} ({error}): make it again") from error
        if _hash(clients) != partition.hash:
            raise BadRequest(f"the partition {path} was changed: its indices do not match its hash. Make it again")
        return partition

    def check(self, dataset: Dataset) -> None:
        """Make sure that the partition was made for this data set.

        Raises
        ------
        BadRequest : if the data set's labels are not those that the partition was made from.
        """
        made_for = self.settings.get("labels_sha256")
        if made_for != _label_hash(dataset):
            raise BadRequest(
                f"the partition was made for other data ({self.settings.get('dataset')}, "
                f"{self.settings.get('num_train')} + {self.settings.get('num_test')} images) than {dataset.name} "
                f"({dataset.num_train} + {dataset.num_test} images): make it again"
            )


def make(dataset: Dataset, settings: DataSettings) -> Partition:
    """Partition a data set over clients.

    Parameters
    ----------
    dataset : only its labels are read; a partitioner of flwr-datasets may also ask for owners, groups or a feature.
    settings : `partition` is one of :data:`DRAWN`, or ``flwr:NAME``; `split` one of :data:`SPLITS`; `clients` 0 = as a
        partitioner of flwr-datasets counts them; `partition_seed` a number: the same settings give the same partition.
        Sizes count before the cut into training and test images (``official``: training images).

    Raises
    ------
    BadRequest : if the settings contradict the data, or no draw of 10,000 satisfies `min_samples`.
    """
    kind, split, seed, test_share = settings.partition, settings.split, settings.partition_seed, settings.test_share
    _check(dataset, settings)
    # One stream per purpose: a change in how counts are drawn moves neither the images' order nor the test draw.
    seeds = (np.random.SeedSequence([seed, purpose]) for purpose in range(3))
    counts_rng, order_rng, split_rng = map(np.random.default_rng, seeds)
    labels = np.asarray(dataset.pool_labels if split == "merged" else dataset.y_train)
    shares, tests = None, None
    if kind == "two-class":
        held, tests = _two_class(labels, dataset.num_classes, settings, counts_rng, split_rng)
    else:
        held, shares = _dealt(dataset, labels, settings, counts_rng, order_rng)
    _check_smallest(held, settings)
    if split == "official":
        tests = _official_tests(dataset, held, shares, split_rng)
    if tests is None:
        pairs = [cut(rows, labels, dataset.groups, split_rng, test_share) for rows in held]
    else:
        pairs = list(zip(held, tests, strict=True))
    members = tuple(ClientSplit(np.sort(train), np.sort(test)) for train, test in pairs)
    drawn = {"alpha": float(settings.alpha), "classes_per_client": settings.classes_per_client}
    about = {
        "seed": seed,
        **({"partition_args": settings.partition_args} if flower.is_named(kind) else drawn),
        "min_samples": settings.min_samples,
        **({} if test_share == TEST_FRACTION else {"test_share": test_share}),
    }
    return of_clients(dataset, kind, split, members, about)


def _dealt(
    dataset: Dataset,
    labels: Int64,
    settings: DataSettings,
    counts_rng: np.random.Generator,
    order_rng: np.random.Generator,
) -> tuple[list[Int64], Float64 | None]:
    """Return each client's rows of the pool, and the shares (K, C) that cut it where the kind is ``classes``."""
    kind, clients = settings.partition, settings.clients
    if kind == "iid":
        return flower.partition("flwr:IidPartitioner", {}, clients, {"label": labels}, order_rng), None
    if kind == "shards":
        shards = {"partition_by": "label", "num_shards_per_partition": settings.classes_per_client}
        return flower.partition("flwr:ShardPartitioner", shards, clients, {"label": labels}, order_rng), None
    if flower.is_named(kind):
        given, columns = flower.arguments(kind, settings.partition_args), _columns(dataset, labels)
        return flower.partition(kind, given, clients, columns, order_rng), None
    sizes = np.bincount(labels, minlength=dataset.num_classes)
    if kind == "classes":
        shares = label_skew.class_shares(sizes, settings, counts_rng)
        return _assign(labels, label_skew.cut_by_shares(shares, sizes), order_rng), shares
    counts = getattr(label_skew, kind.replace("-", "_"))(sizes, settings, counts_rng)
    return _assign(labels, counts, order_rng), None


def of_clients(
    dataset: Dataset,
    kind: str,
    split: str,
    clients: Sequence[ClientSplit],
    settings: dict[str, Any],
    names: Sequence[str] = (),
) -> Partition:
    """Return a partition of a data set, with what identifies it in its settings."""
    facts = {
        "dataset": dataset.name,
        "num_train": dataset.num_train,
        "num_test": dataset.num_test,
        "labels_sha256": _label_hash(dataset),
        "kind": kind,
        "split": split,
        "clients": len(clients),
    }
    members = tuple(clients)
    return Partition(kind, split, members, _hash(members), {**facts, **settings}, tuple(names))


def _check(dataset: Dataset, settings: DataSettings) -> None:
    """Raise `BadRequest` where the settings contradict the data."""
    kind, split, clients = settings.partition, settings.split, settings.clients
    per_client, least = settings.classes_per_client, settings.min_samples
    for what, value, known in (("partition", kind, PARTITION_KINDS), ("split", split, SPLITS)):
        if value not in known and not flower.is_named(value):
            raise BadRequest(f"unknown {what} '{value}'{suggest_choice(value, known)}")
    if split == "official" and dataset.num_test == 0:
        raise BadRequest(f"{dataset.name} has no official test rows: choose split 'holdout' (75/25 per client)")
    samples = dataset.num_train + (dataset.num_test if split == "merged" else 0)
    if clients < 1 and not (clients == 0 and flower.is_named(kind) and flower.counts_clients(kind)):
        raise BadRequest(f"clients must be at least 1, got {clients}")
    if clients > samples:
        raise BadRequest(
            f"{counted(clients, 'client')} but only {counted(samples, 'sample')} in {dataset.name}: lower clients"
        )
    if least * clients > samples:
        raise BadRequest(
            f"min-samples {least} for {counted(clients, 'client')} needs "
            f"{counted(least * clients, 'sample')}, {dataset.name} has {samples}: lower min-samples or clients"
        )
    if kind in ("pathological", "classes") and not 1 <= per_client <= dataset.num_classes:
        raise BadRequest(
            f"classes-per-client must lie in 1 .. {dataset.num_classes} (classes of {dataset.name}), got {per_client}"
        )
    if kind == "shards" and not 1 <= per_client <= samples // clients:
        raise BadRequest(
            f"classes-per-client (shards of each client) must lie in 1 .. {samples // clients} for "
            f"{counted(clients, 'client')} and {counted(samples, 'sample')}, got {per_client}"
        )


def _check_smallest(held: Sequence[Int64], settings: DataSettings) -> None:
    """Raise `BadRequest` where a client holds fewer samples than it must."""
    smallest = min(range(len(held)), key=lambda client: len(held[client]))
    if len(held[smallest]) < settings.min_samples:
        raise BadRequest(
            f"partition {settings.partition!r}: client {smallest} holds {counted(len(held[smallest]), 'sample')}, "
            f"fewer than min-samples {settings.min_samples}: lower min-samples or clients"
        )


def _columns(dataset: Dataset, labels: Int64) -> dict[str, npt.NDArray[Any]]:
    """Return what the rows of a pool can be partitioned by: the first `len(labels)` rows of the virtual pool."""
    columns = {"label": labels, "client": dataset.owners, "group": dataset.groups}
    found = {name: column[: len(labels)] for name, column in columns.items() if column is not None}
    for i, name in enumerate(dataset.features):
        column = np.concatenate([dataset.x_train[:, i], dataset.x_test[:, i]])
        found.setdefault(name, column[: len(labels)])
    return found


# --- indices -------------------------------------------------------------------------------------------------------


def _assign(labels: Int64, counts: Int64, rng: np.random.Generator) -> list[Int64]:
    """Assign the images of each class to the clients in random order: counts (K, C) -> K arrays of row numbers."""
    parts: list[list[Int64]] = [[] for _ in range(len(counts))]
    for label in range(counts.shape[1]):
        rows = rng.permutation(np.flatnonzero(labels == label))
        ends = np.cumsum(counts[:, label])
        for client, (start, end) in enumerate(zip(ends - counts[:, label], ends, strict=True)):
            if end > start:
                parts[client].append(rows[start:end])
    return [np.concatenate(own) if own else np.zeros(0, np.int64) for own in parts]


def cut(
    rows: Int64, labels: Int64, groups: Int64 | None, rng: np.random.Generator, test_share: float = TEST_FRACTION
) -> tuple[Int64, Int64]:
    """Cut one client's rows for training and testing: class by class, and without parting a group.

    Whole groups go to the test split by scikit-learn's StratifiedGroupKFold: as many of its first folds as meet the
    share best. A client with one group, or with no two rows of a class, keeps all for training.
    """
    if groups is None:
        return _stratified(rows, labels, rng, test_share)
    own, seed = groups[rows], int(rng.integers(2**31))
    limit = min(len(np.unique(own)), int(np.bincount(labels[rows], minlength=1).max()))
    if limit < 2:
        return rows, rows[:0]
    # One fold if no other number of up to ten folds is nearer.
    numbers = [min(limit, max(2, round(1 / test_share))), *range(2, min(limit, 10) + 1)]
    pairs = [(n, min(n - 1, max(1, round(n * test_share)))) for n in numbers]
    folds, tested = min(pairs, key=lambda pair: round(abs(pair[1] / pair[0] - test_share), 9))
    # Importing scikit-learn takes a second; most partitions do not need it.
    from sklearn.model_selection import StratifiedGroupKFold

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a class with fewer groups than folds is cut as well as it goes
        splitter = StratifiedGroupKFold(folds, shuffle=True, random_state=seed)
        cuts = itertools.islice(splitter.split(np.zeros(len(rows)), labels[rows], own), tested)
        test = np.sort(np.concatenate([fold for _, fold in cuts]))
    return np.delete(rows, test), rows[test]


def _stratified(
    rows: Int64, labels: Int64, rng: np.random.Generator, test_share: float = TEST_FRACTION
) -> tuple[Int64, Int64]:
    """Cut one client's rows class by class for training and testing; every class keeps one training image or more."""
    shuffled = rng.permutation(rows)
    shuffled = shuffled[np.argsort(labels[shuffled], kind="stable")]
    sizes = np.bincount(labels[shuffled])
    most = np.maximum(sizes - 1, 0)
    total = max(int(len(rows) * test_share), int(most.any()))
    test_sizes = round_to_total(np.asarray(sizes * test_share, np.float64), total, most)
    place = np.arange(len(shuffled)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    is_test = place < np.repeat(test_sizes, sizes)
    return shuffled[~is_test], shuffled[is_test]


def _two_class(
    labels: Int64, classes: int, settings: DataSettings, draw_rng: np.random.Generator, test_rng: np.random.Generator
) -> tuple[list[Int64], list[Int64] | None]:
    """Return the clients' training rows, and their test rows if the pool is cut here (not ``official``)."""
    pool, official = np.arange(len(labels)), settings.split == "official"
    train_pool, test_pool = (pool, pool[:0]) if official else _stratified(pool, labels, test_rng, settings.test_share)
    train_of, test_of = ([rows[labels[rows] == c] for c in range(classes)] for rows in (train_pool, test_pool))
    if sum(len(rows) > 0 for rows in train_of) < 2:
        raise BadRequest("partition 'two-class' needs rows of at least two classes")
    train_each = len(train_pool) // (2 * settings.clients)
    test_each = max(1, len(test_pool) // (2 * settings.clients))
    held, tests = [], []
    for _ in range(settings.clients):
        drawn, rows = label_skew.draw_two_classes(train_of, train_each, draw_rng)
        held.append(np.concatenate(rows))
        tests.append(np.concatenate([test_rng.permutation(test_of[label])[:test_each] for label in drawn]))
    return held, None if official else tests


def _official_tests(
    dataset: Dataset, held: Sequence[Int64], shares: Float64 | None, rng: np.random.Generator
) -> list[Int64]:
    """Draw each client's rows of the official test images.

    `shares` (K, C) cut the test images of each class into disjoint parts; without them each client draws in proportion
    to its training images `held`, whatever the others draw.
    """
    labels = np.asarray(dataset.y_test)
    limits = np.bincount(labels, minlength=dataset.num_classes)
    if shares is not None:
        return [rows + dataset.num_train for rows in _assign(labels, label_skew.cut_by_shares(shares, limits), rng)]
    rows_of = [np.flatnonzero(labels == label) for label in range(dataset.num_classes)]
    tests = []
    for rows in held:
        counted = np.bincount(dataset.y_train[rows], minlength=dataset.num_classes).astype(np.float64)
        amounts = np.asarray(counted * (dataset.num_test / dataset.num_train))
        total = max(1, round(float(amounts.sum())))
        sizes = round_to_total(amounts, total, np.where(amounts > 0, limits, 0))
        drawn = [rng.permutation(rows_of[label])[: sizes[label]] for label in np.flatnonzero(sizes)]
        tests.append(np.concatenate(drawn) + dataset.num_train if drawn else np.zeros(0, np.int64))
    return tests


def union_test(dataset: Dataset, partition: Partition, seed: int, limit: int = UNION) -> Int64:
    """Return common test images for the balanced score, on which every client is tested on every class.

    Parameters
    ----------
    seed : fixes the draw.   limit : largest number of images.

    Returns
    -------
    int64, sorted, without duplicates, indices into the virtual pool: the union of all clients' test splits if it has at
    most `limit` images, else equally many of each class (all images of classes that have fewer).
    """
    union = np.unique(np.concatenate([client.test for client in partition.clients]))
    if len(union) <= limit:
        return union
    labels = dataset.pool_labels[union]
    sizes = np.bincount(labels, minlength=dataset.num_classes)
    quota = np.zeros_like(sizes)
    left = limit
    # Rounds of equal additions: classes that have run out of images leave their part to the others.
    while left > 0:
        growing = np.flatnonzero(quota < sizes)
        step = max(1, left // len(growing))
        for label in growing[:left]:
            more = min(step, int(sizes[label] - quota[label]))
            quota[label] += more
            left -= more
    rng = np.random.default_rng(np.random.SeedSequence([seed, 100]))
    return np.sort(
        np.concatenate(
            [union[rng.permutation(np.flatnonzero(labels == label))[: quota[label]]] for label in range(len(sizes))]
        )
    )


def held_out(sizes: Sequence[int], share: float, seed: int) -> list[npt.NDArray[np.bool_]]:
    """Draw which of each client's training images validate, as masks; :func:`hold_out` says how many."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, 201]))
    return [rng.permutation(n) < min(n - 1, max(1, int(share * n + 0.5))) for n in sizes]


def hold_out(partition: Partition, share: float, seed: int, dataset: Dataset | None = None) -> Partition:
    """Move a share of every client's training images to its validation split.

    Parameters
    ----------
    share : in (0, 1). The number is rounded half up; at least one image validates and at least one trains, and a client
        with a single image keeps it for training.
    seed : fixes the draw.   dataset : its groups stay whole, as in :func:`cut`; None = all rows may part.
    """
    if dataset is not None and dataset.groups is not None:
        rng = np.random.default_rng(np.random.SeedSequence([seed, 201]))
        pairs = [cut(c.train, dataset.pool_labels, dataset.groups, rng, share) for c in partition.clients]
    else:
        masks = held_out([len(c.train) for c in partition.clients], share, seed)
        pairs = [(c.train[~taken], c.train[taken]) for c, taken in zip(partition.clients, masks, strict=True)]
    clients = [
        replace(c, train=np.sort(train), validation=np.sort(taken))
        for c, (train, taken) in zip(partition.clients, pairs, strict=True)
    ]
    return partition.with_clients(clients, validation=share)


def hold_back(partition: Partition, share: float, seed: int, without: Collection[int] = ()) -> tuple[Partition, Int64]:
    """Take a public set out of the clients' training splits.

    Every client gives up the same share of its training images, drawn at random, and keeps at least one; an image that
    several clients hold is taken from all of them. Test splits stay as they are.

    Parameters
    ----------
    share : share of each client's training images, in (0, 1); the number is rounded half up.
    seed : fixes the draw.   without : clients that give up nothing, unless another one holds the same image.

    Returns
    -------
    partition : the same clients without the public images; its settings say how many were taken.
    public : int64 (P,), sorted, without duplicates: indices into the virtual pool.

    Raises
    ------
    BadRequest : if the share is out of range, so small that no image would be public, or so large that a client whose
        images others hold too would have none left.
    """
    if not 0 < share < 1:
        raise BadRequest(f"a public set is a share of the training rows between 0 and 1, got {share}")
    rng = np.random.default_rng(np.random.SeedSequence([seed, 200]))
    given = []
    for k, client in enumerate(partition.clients):
        count = max(0, min(int(np.floor(share * len(client.train) + 0.5)), len(client.train) - 1))
        drawn = rng.permutation(client.train)[:count]
        given.append(drawn[:0] if k in without else drawn)
    public = np.unique(np.concatenate(given))
    if len(public) == 0:
        raise BadRequest(f"a share of {share:g} of the training rows holds back none: give a larger one")
    kept = [replace(c, train=c.train[~np.isin(c.train, public)]) for c in partition.clients]
    empty = [str(k) for k, c in enumerate(kept) if len(c.train) == 0]
    if empty:
        raise BadRequest(
            f"with a public share of {share:g} client {', '.join(empty[:5])} has no training row left: "
            "give a smaller share, or another data set"
        )
    return partition.with_clients(kept, public_share=float(share), public_images=len(public)), public


def _hash(clients: Sequence[ClientSplit]) -> str:
    digest = hashlib.sha256()
    for client in clients:
        # Without validation splits the hash is that of earlier versions.
        for part in (client.train, client.test, *([client.validation] if len(client.validation) else [])):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
    return digest.hexdigest()


def _label_hash(dataset: Dataset) -> str:
    return hashlib.sha256(np.ascontiguousarray(dataset.pool_labels, dtype="<i8").tobytes()).hexdigest()
