"""Partitions of a data set over clients: seeded, with a train and a test split of the same distribution per client.

===================  =======================================================================================
kind                 procedure
===================  =======================================================================================
``iid``              a random permutation cut into equal parts (flwr-datasets ``IidPartitioner`` on the permuted
                     label column)
``dirichlet``        per class Dir(alpha) over the clients; a client that already holds N/K images gets no share of
                     further classes; redrawn until the smallest client has min_samples images (PFNM, NIID-Bench,
                     MOON, PFLlib; used by FedClassAvg, cwFedAvg and CCVR). Own code: flwr-datasets'
                     ``DirichletPartitioner`` stops one image later, gives up after 10 draws and deals
                     every image of every attempt.
``dirichlet-equal``  equal client sizes, as FedClassAvg's text says: per client Dir(alpha) over the classes, scaled
                     alternately to the client size and to the class sizes, rounded per class. Own code.
``pathological``     blocks of clients that share the same classes, with uneven sizes (PFLlib, used by cwFedAvg).
                     Own code: flwr-datasets' ``PathologicalPartitioner`` draws classes independently and cuts evenly.
``classes``          random classes per client, balanced over classes, with shares from U(0.4, 0.6) (FedGH, after
                     Shamsian et al.). Own code, for the same reason.
``two-class``        two random classes per client, N/(2K) images of each drawn with replacement (FedClassAvg's
                     "skewed"): equal sizes, clients overlap and hold duplicates. Own code.
``shards``           images sorted by label, cut into equal shards, classes_per_client shards dealt to each client
                     (McMahan et al. 2017; flwr-datasets ``ShardPartitioner`` on the label column)
===================  =======================================================================================

Splits:

* ``official``: the clients share the official training images. Client k's test images are drawn once from the official
  test images, without replacement within the client (clients may share test images): as many as its part of the
  training images, n_k * N_test / N_train, by its class shares. For ``classes``, as in FedGH, the very shares that cut
  the training images also cut the test images, so that clients' test images are disjoint.
* ``merged``: official training and test images are pooled, the pool is dealt to the clients, and each client keeps 75 %
  for training and 25 % for testing, stratified per class; a class with one image goes to training.
* ``holdout``: as ``merged``, with the training images alone as the pool.

Drawing with replacement (``two-class``) would put copies of one image on both sides of a 75/25 cut. There the pool
itself is cut first, 75/25 per class, and clients draw from the two parts.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.data.datasets import Dataset
from fedapp.errors import BadRequest, suggest

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

PARTITION_PARAMETER: dict[str, str | None] = {
    "iid": None,
    "dirichlet": "alpha",
    "dirichlet-equal": "alpha",
    "pathological": "classes-per-client",
    "classes": "classes-per-client",
    "two-class": None,
    "shards": "classes-per-client",
}
"""Every kind, with the run-config key that sets how far it is from iid (None: nothing to set)."""
PARTITION_KINDS: tuple[str, ...] = tuple(PARTITION_PARAMETER)
SPLITS: tuple[str, ...] = ("official", "merged", "holdout")
MAX_DRAWS = 10_000
TEST_FRACTION = 0.25
_BLOCK_NUMBERS = 2_000_000
"""Upper bound on the Dirichlet shares held at a time while redrawing (16 MB)."""


@dataclass(frozen=True, eq=False)
class ClientSplit:
    """What one client holds, as indices into the virtual pool (official training rows, then test rows).

    Attributes
    ----------
    train, test : numpy.ndarray
        int64, sorted. ``test`` may be empty when the client has one image of each of its classes.
    """

    train: Int64
    test: Int64


@dataclass(frozen=True, eq=False)
class Partition:
    """Who holds what.

    Attributes
    ----------
    kind, split : str
    clients : tuple of ClientSplit
        In the order of client ids.
    hash : str
        sha256 of all indices, hexadecimal: equal exactly when every client holds the same images.
    settings : dict
        JSON values: the arguments of :func:`make` and the data set's name, sizes and label hash.
    """

    kind: str
    split: str
    clients: tuple[ClientSplit, ...]
    hash: str
    settings: dict[str, Any]

    def save(self, path: str | Path) -> None:
        """Write the partition to an ``.npz`` file, atomically.

        Parameters
        ----------
        path
            The file; its folder is made if needed.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        header = {"kind": self.kind, "split": self.split, "hash": self.hash, "settings": self.settings}
        arrays: dict[str, Any] = {"header": np.array(json.dumps(header, sort_keys=True))}
        for part in ("train", "test"):
            rows = [getattr(client, part) for client in self.clients]
            arrays[part] = np.concatenate(rows)
            arrays[f"{part}_sizes"] = np.array([len(r) for r in rows], np.int64)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as stream:
                np.savez_compressed(stream, **arrays)
            Path(name).replace(target)
        finally:
            Path(name).unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> Partition:
        """Read a partition and verify its hash.

        Raises
        ------
        BadRequest
            If the file is absent or damaged, or its indices do not match the hash.
        """
        try:
            with np.load(path, allow_pickle=False) as archive:
                arrays = {key: archive[key] for key in archive.files}
            header = json.loads(str(arrays["header"]))
            parts = {}
            for part in ("train", "test"):
                sizes = arrays[f"{part}_sizes"]
                if sizes.sum() != len(arrays[part]):
                    raise ValueError(f"{part}: sizes and indices disagree")
                parts[part] = np.split(arrays[part].astype(np.int64), np.cumsum(sizes)[:-1])
            clients = tuple(ClientSplit(train, test) for train, test in zip(parts["train"], parts["test"], strict=True))
            partition = cls(header["kind"], header["split"], clients, header["hash"], header["settings"])
        except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
            raise BadRequest(f"cannot read the partition {path} ({error}): make it again") from error
        if _hash(clients) != partition.hash:
            raise BadRequest(f"the partition {path} was changed: its indices do not match its hash. Make it again")
        return partition

    def check(self, dataset: Dataset) -> None:
        """Make sure that the partition was made for this data set.

        Raises
        ------
        BadRequest
            If the data set's labels are not those that the partition was made from.
        """
        made_for = self.settings.get("labels_sha256")
        if made_for != _label_hash(dataset):
            raise BadRequest(
                f"the partition was made for other data ({self.settings.get('dataset')}, "
                f"{self.settings.get('num_train')} + {self.settings.get('num_test')} images) than {dataset.name} "
                f"({dataset.num_train} + {dataset.num_test} images): make it again"
            )


def make(
    dataset: Dataset,
    *,
    kind: str,
    split: str,
    clients: int,
    seed: int,
    alpha: float = 0.5,
    classes_per_client: int = 2,
    min_samples: int = 10,
) -> Partition:
    """Deal a data set to clients.

    Parameters
    ----------
    dataset
        Only its labels are read.
    kind
        One of :data:`PARTITION_KINDS`.
    split
        One of :data:`SPLITS`.
    clients
        Number of clients K.
    seed
        Non-negative; the same arguments give the same partition.
    alpha
        Concentration of the Dirichlet distribution (``dirichlet``, ``dirichlet-equal``), > 0.
    classes_per_client
        Classes (``pathological``, ``classes``) or shards (``shards``) per client.
    min_samples
        Smallest number of images that a client may hold before a 75/25 cut (``official``: of training images).

    Returns
    -------
    Partition

    Raises
    ------
    BadRequest
        If the arguments are out of range, contradict the data, or no draw of 10,000 satisfies ``min_samples``.
    """
    _check_request(dataset, kind, split, clients, seed, alpha, classes_per_client, min_samples)
    # One stream per purpose: a change in how counts are drawn does not move the images' order or the test draw.
    deal_rng, order_rng, split_rng = (
        np.random.default_rng(np.random.SeedSequence([seed, purpose])) for purpose in range(3)
    )
    labels = dataset.pool_labels if split == "merged" else dataset.y_train
    request = _Request(dataset.num_classes, clients, alpha, classes_per_client, min_samples)
    class_shares = None
    tests: list[Int64] | None = None
    if kind == "two-class":
        held, tests = _two_class(np.asarray(labels), split, request, deal_rng, split_rng)
    elif kind in ("iid", "shards"):
        held = _flower(np.asarray(labels), kind, request, order_rng)
    else:
        sizes = np.bincount(labels, minlength=dataset.num_classes)
        if kind == "classes":
            class_shares = _class_shares(sizes, request, deal_rng)
            counts = cut_by_shares(class_shares, sizes)
        else:
            draw = {"dirichlet": _dirichlet, "dirichlet-equal": _dirichlet_equal, "pathological": _pathological}
            counts = draw[kind](sizes, request, deal_rng)
        held = _deal(np.asarray(labels), counts, order_rng)
    _check_sizes([len(rows) for rows in held], kind, request)
    if tests is not None:
        pairs = list(zip(held, tests, strict=True))
    elif split == "official":
        test_counts = None
        if class_shares is not None:
            test_counts = cut_by_shares(class_shares, np.bincount(dataset.y_test, minlength=dataset.num_classes))
        pairs = list(zip(held, _official_tests(dataset, held, test_counts, split_rng), strict=True))
    else:
        pairs = [_stratified(rows, np.asarray(labels), split_rng) for rows in held]
    members = tuple(ClientSplit(np.sort(train), np.sort(test)) for train, test in pairs)
    settings = {
        "dataset": dataset.name,
        "num_train": dataset.num_train,
        "num_test": dataset.num_test,
        "labels_sha256": _label_hash(dataset),
        "kind": kind,
        "split": split,
        "clients": clients,
        "seed": seed,
        "alpha": float(alpha),
        "classes_per_client": classes_per_client,
        "min_samples": min_samples,
    }
    return Partition(kind, split, members, _hash(members), settings)


@dataclass(frozen=True)
class _Request:
    """The checked arguments that the procedures share: C classes, K clients."""

    num_classes: int
    clients: int
    alpha: float
    classes_per_client: int
    min_samples: int

    def failure(self, kind: str, samples: int, smallest: int) -> BadRequest:
        """Say that no draw was good enough."""
        if PARTITION_PARAMETER[kind] == "alpha":
            setting, remedy = f"alpha {self.alpha:g}", "raise alpha, or lower clients or min-samples"
        else:
            setting = f"classes-per-client {self.classes_per_client}"
            remedy = "raise classes-per-client, or lower clients or min-samples"
        return BadRequest(
            f"partition {kind!r}: no draw of {MAX_DRAWS:,} gave each of {self.clients} clients at least "
            f"{self.min_samples} of {samples} samples ({setting}; best draw: smallest client {smallest}): {remedy}"
        )


def _check_request(
    dataset: Dataset,
    kind: str,
    split: str,
    clients: int,
    seed: int,
    alpha: float,
    classes_per_client: int,
    min_samples: int,
) -> None:
    for what, value, known in (("partition", kind, PARTITION_KINDS), ("split", split, SPLITS)):
        if value not in known:
            raise BadRequest(f"unknown {what} '{value}'{suggest(value, known)}: choose from {', '.join(known)}")
    if split == "official" and dataset.num_test == 0:
        raise BadRequest(f"{dataset.name} has no official test images: choose split 'holdout' (75/25 per client)")
    if seed < 0:
        raise BadRequest(f"seed must not be negative, got {seed}")
    samples = dataset.num_train + (dataset.num_test if split == "merged" else 0)
    if clients < 1:
        raise BadRequest(f"clients must be at least 1, got {clients}")
    if clients > samples:
        raise BadRequest(f"{clients} clients but only {samples} samples in {dataset.name}: lower clients")
    if not (alpha > 0 and np.isfinite(alpha)):
        raise BadRequest(f"alpha must be a positive number, got {alpha}")
    if min_samples < 1:
        raise BadRequest(f"min-samples must be at least 1, got {min_samples}")
    if min_samples * clients > samples:
        raise BadRequest(
            f"min-samples {min_samples} for {clients} clients needs {min_samples * clients} samples, "
            f"{dataset.name} has {samples}: lower min-samples or clients"
        )
    if kind in ("pathological", "classes") and not 1 <= classes_per_client <= dataset.num_classes:
        raise BadRequest(
            f"classes-per-client must lie in 1 .. {dataset.num_classes} (classes of {dataset.name}), "
            f"got {classes_per_client}"
        )
    if kind == "shards" and not 1 <= classes_per_client <= samples // clients:
        raise BadRequest(
            f"classes-per-client (shards of each client) must lie in 1 .. {samples // clients} for {clients} clients "
            f"and {samples} samples, got {classes_per_client}"
        )


def _check_sizes(sizes: Sequence[int], kind: str, request: _Request) -> None:
    if min(sizes) < request.min_samples:
        raise BadRequest(
            f"partition {kind!r}: client {int(np.argmin(sizes))} holds {min(sizes)} samples, fewer than min-samples "
            f"{request.min_samples}: lower min-samples or clients"
        )


# --- label counts --------------------------------------------------------------------------------------------------


def dirichlet_counts(shares: Float64, class_sizes: Int64) -> Int64:
    """Turn Dirichlet shares into images per client and class, for many draws at once.

    Classes are cut in index order. The share of a client that already holds at least N/K images is set to zero and the
    others are scaled up; the cuts are floor(cumulative share * class size), so that every image is dealt.

    Parameters
    ----------
    shares
        float64 (B, C, K): for each of B draws and each class a distribution over K clients.
    class_sizes
        int64 (C,).

    Returns
    -------
    numpy.ndarray
        int64 (B, K, C). A draw that leaves no client with a positive share for some class is all zero.
    """
    draws, num_classes, clients = shares.shape
    limit = class_sizes.sum() / clients
    held = np.zeros((draws, clients), np.int64)
    counts = np.zeros((draws, clients, num_classes), np.int64)
    dealt = np.ones(draws, bool)
    for label in range(num_classes):
        open_shares = np.where(held < limit, shares[:, label], 0.0)
        ends = np.cumsum(open_shares, axis=1)
        total = ends[:, -1:]
        dealt &= total[:, 0] > 0
        # Dividing by the last cumulative share makes it exactly 1, so that rounding loses no image.
        ends = np.floor(ends / np.where(total > 0, total, 1.0) * class_sizes[label]).astype(np.int64)
        counts[:, :, label] = np.diff(ends, axis=1, prepend=0)
        held += counts[:, :, label]
    counts[~dealt] = 0
    return counts


def _first_good(draw: Callable[[int], Int64], kind: str, sizes: Int64, request: _Request) -> tuple[Int64, int]:
    """Return the first draw in which every client holds min_samples images, and its place in the last block drawn.

    ``draw(block)`` returns counts (block, K, C). The first block is one draw, which is nearly always enough; later ones
    grow, so that 10,000 draws on label counts take seconds.
    """
    per_draw = request.clients * request.num_classes
    done, block, smallest = 0, 1, 0
    while done < MAX_DRAWS:
        block = min(block, MAX_DRAWS - done, max(1, _BLOCK_NUMBERS // per_draw))
        counts = draw(block)
        minima = counts.sum(axis=2).min(axis=1)
        good = np.flatnonzero(minima >= request.min_samples)
        if good.size:
            return np.asarray(counts[good[0]]), int(good[0])
        smallest = max(smallest, int(minima.max()))
        done += block
        block *= 4
    raise request.failure(kind, int(sizes.sum()), smallest)


def _dirichlet(sizes: Int64, request: _Request, rng: np.random.Generator) -> Int64:
    def draw(block: int) -> Int64:
        shares = rng.dirichlet(np.full(request.clients, request.alpha), (block, request.num_classes))
        # A concentration near zero can underflow to 0/0; a class without shares fails the draw.
        return dirichlet_counts(np.nan_to_num(shares), sizes)

    return _first_good(draw, "dirichlet", sizes, request)[0]


def scale_to_margins(weights: Float64, rows: Float64, columns: Float64, steps: int = 200) -> Float64:
    """Scale a positive matrix alternately until its row and column sums are the wanted ones (Sinkhorn's iteration).

    Parameters
    ----------
    weights
        float64 (K, C), positive.
    rows, columns
        Wanted sums, float64 (K,) and (C,), of equal total.
    steps
        Largest number of alternations.

    Returns
    -------
    numpy.ndarray
        float64 (K, C) with exact column sums; row sums are exact to the degree of convergence.
    """
    scaled = weights.copy()
    for _ in range(steps):
        scaled *= (rows / scaled.sum(axis=1))[:, None]
        scaled *= columns / scaled.sum(axis=0)
        if np.abs(scaled.sum(axis=1) - rows).max() < 0.01:
            break
    return scaled


def round_to_total(amounts: Float64, total: int, limits: Int64 | None = None) -> Int64:
    """Round amounts down, then give one more to those with the largest remainders until the total is met.

    Parameters
    ----------
    amounts
        float64 (n,), not negative.
    total
        Wanted sum.
    limits
        int64 (n,): upper bounds; None for no bounds. With bounds the sum is as near to the total as they allow.

    Returns
    -------
    numpy.ndarray
        int64 (n,).
    """
    bounds = np.full(len(amounts), np.iinfo(np.int64).max) if limits is None else limits
    # An amount a hair below an integer is that integer: it was computed, not measured.
    whole = np.minimum(np.floor(amounts + 1e-9).astype(np.int64), bounds)
    order = np.argsort(-(amounts - np.floor(amounts + 1e-9)), kind="stable")
    missing = total - int(whole.sum())
    while missing > 0:
        room = order[whole[order] < bounds[order]][:missing]
        if not room.size:
            break
        whole[room] += 1
        missing -= room.size
    return whole


def _dirichlet_equal(sizes: Int64, request: _Request, rng: np.random.Generator) -> Int64:
    wanted = np.full(request.clients, sizes.sum() / request.clients)
    present = sizes > 0
    smallest = 0
    for _ in range(MAX_DRAWS):
        rows = rng.dirichlet(np.full(request.num_classes, request.alpha), request.clients)
        # A share that underflows to zero could not be scaled to any margin.
        weights = np.maximum(np.nan_to_num(rows[:, present]), 1e-30)
        scaled = scale_to_margins(weights, wanted, sizes[present].astype(np.float64))
        counts = np.zeros((request.clients, request.num_classes), np.int64)
        for column, label in enumerate(np.flatnonzero(present)):
            counts[:, label] = round_to_total(scaled[:, column], int(sizes[label]))
        held = counts.sum(axis=1)
        # Rounding each class moves a client by at most half an image per class; more means that scaling did not settle.
        settled = np.abs(held - wanted).max() <= max(1.0, present.sum() / 2)
        if settled and held.min() >= request.min_samples:
            return counts
        smallest = max(smallest, int(held.min()))
    raise request.failure("dirichlet-equal", int(sizes.sum()), smallest)


def block_owners(num_classes: int, clients: int, per_client: int) -> list[Int64]:
    """Return the owners of each class in PFLlib's blocks.

    In index order a class goes to the first ceil(clients * per_client / num_classes) clients with free slots. Unless
    that division is exact, the slots are used up before the last classes, whose images then stay unused.

    Returns
    -------
    list of numpy.ndarray
        For each class the ids of its owners, increasing; empty when all slots are taken.
    """
    width = -(-clients * per_client // num_classes)
    slots = np.full(clients, per_client)
    owners = []
    for _ in range(num_classes):
        chosen = np.flatnonzero(slots > 0)[:width]
        slots[chosen] -= 1
        owners.append(chosen)
    return owners


def _pathological(sizes: Int64, request: _Request, rng: np.random.Generator) -> Int64:
    owners = block_owners(request.num_classes, request.clients, request.classes_per_client)

    def draw(block: int) -> Int64:
        counts = np.zeros((block, request.clients, request.num_classes), np.int64)
        for label, chosen in enumerate(owners):
            if not chosen.size:
                continue
            even = sizes[label] / len(chosen)
            # PFLlib's bounds. For tiny classes its lower one would pass the upper one: then all get the even part.
            low = min(int(max(even / 10, request.min_samples / request.num_classes)), int(even))
            parts = rng.integers(low, max(int(even), low + 1), (block, len(chosen) - 1))
            counts[:, chosen[:-1], label] = parts
            counts[:, chosen[-1], label] = sizes[label] - parts.sum(axis=1)
        return counts

    return _first_good(draw, "pathological", sizes, request)[0]


def choose_classes(
    num_classes: int, clients: int, per_client: int, rng: Any, *, distinct: bool = True
) -> list[list[int]]:
    """Deal class slots to clients so that all classes are used about equally often (FedGH's procedure).

    There are ceil(per_client * clients / num_classes) slots per class. Client by client and slot by slot, one of the
    classes with the most free slots is picked uniformly.

    Parameters
    ----------
    num_classes, clients, per_client
        Numbers of classes, clients, and picks per client.
    rng
        A numpy generator, old or new: only its ``choice`` is used.
    distinct
        Exclude the classes that the client owns already. False is the behaviour of FedGH's code, where a client may
        pick a class twice and then owns fewer classes than asked for.

    Returns
    -------
    list of list of int
        Picks of each client, in the order in which they were made.
    """
    free = np.full(num_classes, -(-per_client * clients // num_classes))
    picks: list[list[int]] = []
    for _ in range(clients):
        own: list[int] = []
        for _ in range(per_client):
            offered = free.copy()
            if distinct:
                offered[own] = -1
            label = int(rng.choice(np.flatnonzero(offered == offered.max())))
            free[label] -= 1
            own.append(label)
        picks.append(own)
    return picks


def _class_shares(sizes: Int64, request: _Request, rng: np.random.Generator) -> Float64:
    """Return shares (K, C): column sums 1 for the classes that somebody owns, 0 for the others.

    FedGH draws the shares of all slots, so that with slots left over some images stay unused; here they are drawn for
    the slots that were taken. Both are the same when clients * classes_per_client is a multiple of the classes.
    """
    picks = choose_classes(request.num_classes, request.clients, request.classes_per_client, rng)
    owned = np.zeros((request.clients, request.num_classes), bool)
    for client, own in enumerate(picks):
        owned[client, own] = True
    shares = np.zeros(0)

    def draw(block: int) -> Int64:
        nonlocal shares
        shares = np.where(owned, rng.uniform(0.4, 0.6, (block, *owned.shape)), 0.0)
        shares /= np.maximum(shares.sum(axis=1, keepdims=True), 1e-12)
        return cut_by_shares(shares, sizes)

    _, place = _first_good(draw, "classes", sizes, request)
    return np.asarray(shares[place])


def cut_by_shares(shares: Float64, class_sizes: Int64) -> Int64:
    """Return images per client and class, int(class size * share), as FedGH; what rounding leaves over stays unused.

    Parameters
    ----------
    shares
        float64 (..., K, C), column sums at most 1.
    class_sizes
        int64 (C,).

    Returns
    -------
    numpy.ndarray
        int64 (..., K, C).
    """
    # The tiny addition keeps a product such as 0.29 * 100 = 28.999999999999996 from losing an image.
    return np.floor(shares * class_sizes + 1e-9).astype(np.int64)


# --- indices -------------------------------------------------------------------------------------------------------


def _deal(labels: Int64, counts: Int64, rng: np.random.Generator) -> list[Int64]:
    """Hand out the images of each class in random order: counts (K, C) -> K index arrays."""
    parts: list[list[Int64]] = [[] for _ in range(len(counts))]
    for label in range(counts.shape[1]):
        rows = rng.permutation(np.flatnonzero(labels == label))
        ends = np.cumsum(counts[:, label])
        for client, (start, end) in enumerate(zip(ends - counts[:, label], ends, strict=True)):
            if end > start:
                parts[client].append(rows[start:end])
    return [np.concatenate(own) if own else np.zeros(0, np.int64) for own in parts]


def _flower(labels: Int64, kind: str, request: _Request, rng: np.random.Generator) -> list[Int64]:
    """Run a partitioner of flwr-datasets on the label column alone."""
    # Importing these takes seconds; most partitions do not need them.
    import datasets
    from flwr_datasets.partitioner import IidPartitioner, ShardPartitioner

    # Neither partitioner mixes images before cutting: the permutation makes the cut depend on the seed. For shards the
    # column is handed over sorted, equal labels in permuted order.
    rows = rng.permutation(len(labels))
    partitioner: Any
    if kind == "iid":
        partitioner = IidPartitioner(num_partitions=request.clients)
    else:
        rows = rows[np.argsort(labels[rows], kind="stable")]
        partitioner = ShardPartitioner(
            num_partitions=request.clients,
            partition_by="label",
            num_shards_per_partition=request.classes_per_client,
            seed=int(rng.integers(2**31)),
        )
    partitioner.dataset = datasets.Dataset.from_dict({"label": labels[rows], "row": rows})
    with warnings.catch_warnings():
        # Sorting a column makes pyarrow warn about an option that the datasets library passes.
        warnings.simplefilter("ignore", FutureWarning)
        parts = [partitioner.load_partition(client)["row"] for client in range(request.clients)]
    return [np.asarray(part, dtype=np.int64) for part in parts]


def _stratified(rows: Int64, labels: Int64, rng: np.random.Generator) -> tuple[Int64, Int64]:
    """Cut one client's rows 75/25, class by class; every class keeps at least one image for training."""
    shuffled = rng.permutation(rows)
    shuffled = shuffled[np.argsort(labels[shuffled], kind="stable")]
    sizes = np.bincount(labels[shuffled])
    most = np.maximum(sizes - 1, 0)
    total = max(int(len(rows) * TEST_FRACTION), int(most.any()))
    test_sizes = round_to_total(np.asarray(sizes * TEST_FRACTION, np.float64), total, most)
    place = np.arange(len(shuffled)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    is_test = place < np.repeat(test_sizes, sizes)
    return shuffled[~is_test], shuffled[is_test]


def draw_two_classes(rows_of: Sequence[Int64], each: int, rng: Any) -> tuple[list[int], list[Int64]]:
    """Draw one client of FedClassAvg's skewed setting: two distinct classes, then images of each with replacement.

    Parameters
    ----------
    rows_of
        For each class the indices of its images; classes without images are never drawn.
    each
        Images per class.
    rng
        A numpy generator, old or new: only its ``choice`` is used.

    Returns
    -------
    classes : list of int
    rows : list of numpy.ndarray
        int64 (each,) for each of the two classes.
    """
    present = np.flatnonzero([len(rows) > 0 for rows in rows_of])
    classes = [int(label) for label in rng.choice(present, 2, replace=False)]
    return classes, [rng.choice(rows_of[label], each) for label in classes]


def _two_class(
    labels: Int64, split: str, request: _Request, deal_rng: np.random.Generator, test_rng: np.random.Generator
) -> tuple[list[Int64], list[Int64] | None]:
    """Return the clients' training rows, and their test rows if the pool is cut here (not ``official``)."""
    pool = np.arange(len(labels))
    train_pool, test_pool = (pool, pool[:0]) if split == "official" else _stratified(pool, labels, test_rng)
    train_of = [train_pool[labels[train_pool] == label] for label in range(request.num_classes)]
    test_of = [test_pool[labels[test_pool] == label] for label in range(request.num_classes)]
    if sum(len(rows) > 0 for rows in train_of) < 2:
        raise BadRequest("partition 'two-class' needs images of at least two classes")
    each = len(train_pool) // (2 * request.clients)
    test_each = max(1, len(test_pool) // (2 * request.clients))
    held, tests = [], []
    for _ in range(request.clients):
        classes, rows = draw_two_classes(train_of, each, deal_rng)
        held.append(np.concatenate(rows))
        tests.append(np.concatenate([test_rng.permutation(test_of[label])[:test_each] for label in classes]))
    return held, None if split == "official" else tests


def _official_tests(
    dataset: Dataset, held: Sequence[Int64], counts: Int64 | None, rng: np.random.Generator
) -> list[Int64]:
    """Draw each client's test images from the official test rows: by its class shares, or by given disjoint counts."""
    labels = np.asarray(dataset.y_test)
    if counts is not None:
        return [rows + dataset.num_train for rows in _deal(labels, counts, rng)]
    limits = np.bincount(labels, minlength=dataset.num_classes)
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


def union_test(dataset: Dataset, partition: Partition, seed: int, limit: int = 2000) -> Int64:
    """Return test images on which every client can be asked about every class.

    Parameters
    ----------
    dataset, partition
        The data and who holds what.
    seed
        Fixes the draw.
    limit
        Largest number of images.

    Returns
    -------
    numpy.ndarray
        int64, sorted, without duplicates: the union of all clients' test splits if it is small enough, else equally
        many of each class (all images of classes that have fewer).
    """
    union = np.unique(np.concatenate([client.test for client in partition.clients]))
    if len(union) <= limit:
        return union
    labels = dataset.pool_labels[union]
    sizes = np.bincount(labels, minlength=dataset.num_classes)
    quota = np.zeros_like(sizes)
    left = limit
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


def hold_back(partition: Partition, share: float, seed: int) -> tuple[Partition, Int64]:
    """Take a public set out of the clients' training splits.

    Every client gives up the same share of its training images, drawn at random, and keeps at least one; an image that
    several clients hold is taken from all of them. Test splits stay as they are.

    Parameters
    ----------
    partition
        Who holds what.
    share
        Share of each client's training images, in (0, 1); the number is rounded half up.
    seed
        Fixes the draw.

    Returns
    -------
    partition : Partition
        The same clients without the public images; its settings say how many were taken.
    public : numpy.ndarray
        int64 (P,), sorted, without duplicates: indices into the virtual pool.

    Raises
    ------
    BadRequest
        If the share is out of range, so small that no image would be public, or so large that a client whose images
        others hold too would have none left.
    """
    if not 0 < share < 1:
        raise BadRequest(f"a public set is a share of the training images between 0 and 1, got {share}")
    rng = np.random.default_rng(np.random.SeedSequence([seed, 200]))
    given = []
    for client in partition.clients:
        count = max(0, min(int(np.floor(share * len(client.train) + 0.5)), len(client.train) - 1))
        given.append(rng.permutation(client.train)[:count])
    public = np.unique(np.concatenate(given))
    if len(public) == 0:
        raise BadRequest(f"a share of {share:g} of the training images holds back none: give a larger one")
    kept = tuple(ClientSplit(c.train[~np.isin(c.train, public)], c.test) for c in partition.clients)
    empty = [str(k) for k, c in enumerate(kept) if len(c.train) == 0]
    if empty:
        raise BadRequest(
            f"with a public share of {share:g} client {', '.join(empty[:5])} has no training image left: "
            "give a smaller share, or another data set"
        )
    settings = {**partition.settings, "public_share": float(share), "public_images": len(public)}
    return Partition(partition.kind, partition.split, kept, _hash(kept), settings), public


def _hash(clients: Sequence[ClientSplit]) -> str:
    digest = hashlib.sha256()
    for client in clients:
        for part in (client.train, client.test):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
    return digest.hexdigest()


def _label_hash(dataset: Dataset) -> str:
    return hashlib.sha256(np.ascontiguousarray(dataset.pool_labels, dtype="<i8").tobytes()).hexdigest()


# --- data card -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class DataCard:
    """What the clients hold, and what guessing would score.

    Attributes
    ----------
    dataset, kind, split, hash : str
    classes : tuple of str
    train, test : numpy.ndarray
        int64 (K, C): images per client and class.
    majority : numpy.ndarray
        float64 (K,): accuracy on the client's test split of always answering the client's most frequent training class
        (the first one if several are); nan for a client without test images.
    unused : int
        Images of the dealt pool (``official``, ``holdout``: the training images) that no client holds.
    shared : int
        Images that stand more than once in the training splits (several clients, or duplicates).
    public : int
        Training images that were held back from the clients as a public set.
    """

    dataset: str
    kind: str
    split: str
    hash: str
    classes: tuple[str, ...]
    train: Int64
    test: Int64
    majority: Float64
    unused: int
    shared: int
    public: int = 0

    @property
    def mean_majority(self) -> float:
        """Unweighted mean of :attr:`majority` over the clients with test images; nan if there are none."""
        known = self.majority[~np.isnan(self.majority)]
        return float(known.mean()) if known.size else float("nan")

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; nan becomes None."""
        return {
            "dataset": self.dataset,
            "partition": self.kind,
            "split": self.split,
            "hash": self.hash,
            "clients": len(self.train),
            "classes": list(self.classes),
            "train": self.train.tolist(),
            "test": self.test.tolist(),
            "train_sizes": self.train.sum(axis=1).tolist(),
            "test_sizes": self.test.sum(axis=1).tolist(),
            "majority": [None if np.isnan(value) else float(value) for value in self.majority],
            "majority_mean": None if np.isnan(self.mean_majority) else self.mean_majority,
            "unused": self.unused,
            "shared": self.shared,
            "public": self.public,
        }

    def text(self, max_classes: int = 26) -> str:
        """Return the card as plain text: one line a client, one column a class.

        Parameters
        ----------
        max_classes
            With more classes than this, the line names the number of classes and the three largest instead.

        Returns
        -------
        str
            Lines without trailing newline. Numbers in the class columns are training images; ``.`` is none.
        """
        train_sizes, test_sizes = self.train.sum(axis=1), self.test.sum(axis=1)
        lines = [
            f"{self.dataset}: {len(self.train)} clients, partition {self.kind}, split {self.split}, {self.hash[:12]}",
            f"training images {train_sizes.sum()} ({train_sizes.min()} to {train_sizes.max()} a client), "
            f"test images {test_sizes.sum()} ({test_sizes.min()} to {test_sizes.max()} a client)",
        ]
        if self.unused:
            lines.append(f"{self.unused} images are held by nobody")
        if self.public:
            lines.append(f"{self.public} training images are held back from the clients as the public set")
        if self.shared:
            lines.append(f"{self.shared} training images are held more than once")
        wide = len(self.classes) > max_classes
        heads = ["classes", "largest classes"] if wide else _column_heads(self.classes)
        rows = [["client", *heads, "train", "test", "majority"]]
        for client, counts in enumerate(self.train):
            if wide:
                top = [label for label in np.argsort(-counts, kind="stable")[:3] if counts[label]]
                cells = [str(np.count_nonzero(counts)), ", ".join(f"{self.classes[i]} {counts[i]}" for i in top)]
            else:
                cells = [str(count) if count else "." for count in counts]
            score = "-" if np.isnan(self.majority[client]) else f"{100 * self.majority[client]:.1f}"
            rows.append([str(client), *cells, str(train_sizes[client]), str(test_sizes[client]), score])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        mean = "-" if np.isnan(self.mean_majority) else f"{100 * self.mean_majority:.1f} %"
        lines.append(f"always answering the own majority class scores {mean} (mean over clients)")
        return "\n".join(lines)


def _column_heads(classes: Sequence[str]) -> list[str]:
    """Short class names where they are short and distinct, else class numbers."""
    if max(len(name) for name in classes) <= 6:
        return list(classes)
    return [str(label) for label in range(len(classes))]


def data_card(dataset: Dataset, partition: Partition) -> DataCard:
    """Count what the clients of a partition hold.

    Raises
    ------
    BadRequest
        If the partition was made for other data.
    """
    partition.check(dataset)
    labels = dataset.pool_labels
    tables = [
        np.stack(
            [np.bincount(labels[getattr(client, part)], minlength=dataset.num_classes) for client in partition.clients]
        )
        for part in ("train", "test")
    ]
    train, test = tables
    sizes = test.sum(axis=1)
    hits = test[np.arange(len(test)), train.argmax(axis=1)]
    majority = np.where(sizes > 0, hits / np.maximum(sizes, 1), np.nan)
    held_train = np.concatenate([client.train for client in partition.clients])
    held = np.union1d(held_train, np.concatenate([client.test for client in partition.clients]))
    # Official test images are drawn, not dealt: those that nobody drew are not missing from anything.
    pool = len(labels) if partition.split == "merged" else dataset.num_train
    public = int(partition.settings.get("public_images", 0))
    return DataCard(
        dataset=dataset.name,
        kind=partition.kind,
        split=partition.split,
        hash=partition.hash,
        classes=dataset.classes,
        train=train,
        test=test,
        majority=majority,
        unused=pool - int(np.count_nonzero(held < pool)) - public,
        shared=int(np.count_nonzero(np.unique(held_train, return_counts=True)[1] > 1)),
        public=public,
    )


def draw(card: DataCard, path: str | Path) -> None:
    """Draw classes x clients as a heat map of training images that stays readable in grey.

    Parameters
    ----------
    card
        What the clients hold.
    path
        A picture file; its suffix chooses the format (``.png``).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = card.train.T
    num_classes, clients = counts.shape
    figure = Figure(
        figsize=(min(16.0, 2.6 + 0.36 * clients), min(16.0, 1.8 + 0.30 * num_classes)), layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # One hue from white to black: the order of lightness is the order of counts, also on a grey printer.
    image = axes.imshow(counts, cmap="Greys", vmin=0, aspect="auto", interpolation="nearest")
    figure.colorbar(image, ax=axes, label="training images")
    axes.set_xlabel("client")
    axes.set_ylabel("class")
    axes.set_title(f"{card.dataset}, {card.kind}, split {card.split}")
    if num_classes <= 30:
        axes.set_yticks(range(num_classes), list(card.classes))
    if clients <= 40:
        axes.set_xticks(range(clients))
    if num_classes <= 30 and clients <= 24:
        for label in range(num_classes):
            for client in range(clients):
                if counts[label, client]:
                    dark = counts[label, client] > 0.5 * counts.max()
                    axes.text(
                        client,
                        label,
                        str(counts[label, client]),
                        ha="center",
                        va="center",
                        fontsize=6,
                        color="white" if dark else "black",
                    )
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=150)
