"""One data set: samples with their labels, owners, groups and facts about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.data.moments import Samples
from fedapp.data.names import SHOWN
from fedapp.errors import BadRequest, described

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Dataset:
    """One data set; all arrays are read-only and memory-mapped.

    Attributes
    ----------
    name : str
    x_train, x_test : images uint8 (N, H, W, C), all others float32 (N, *shape); the test array may have no rows.
    y_train, y_test : int64 (N,), values 0 .. num_classes - 1.
    classes : name of each class.
    scale : largest grey level: 16 for digits, else 255; 1 for data that are not images.
    mean, std : of x / scale per channel, as published for the data set; empty where nothing is published, for which
        rows train is not known here.
    kind : `image`, `series` (N, C, T), `table` (N, F) or `array` (N, ...).
    owners, owner_names : natural client of each row of the virtual pool, int64 (num_train + num_test,), a position in
        the names; None and empty where the data have no column `client`.
    groups : rows of the pool with equal numbers must stay on one side of every cut, int64; None = all rows may part.
    held_out : which training rows the data's own `split` column has for validation, bool (num_train,); None = none.
    ignored : arrays or columns of the source that mean nothing here.
    features : name of each feature of a table, where the source has names; else empty.
    categories : text column of a table -> its categories, which the features `column=category` stand for.
    identity : SHA-256 of what the data are, by `samples`, `labels`, `features` (their names), `classes` (theirs),
        `clients` and `groups`, of all rows; of features of a body also its digest as `body`.
    skipped : files, rows of a table of pictures, or clients that could not be used and were left out.
    about : of features of a pretrained body, what `fedapp features` wrote of it; empty for all other data.
    parts, part : where clients' samples differ in size or body, the rows of each as a data set of their own, and which
        of them each row of the pool is in, int64; the rows of a part have the order that they have here. Then `x_train`
        and `x_test` have no rows, and the statements above hold for the first part.
    """

    name: str
    x_train: Samples
    y_train: Int64
    x_test: Samples
    y_test: Int64
    classes: tuple[str, ...]
    scale: float
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    kind: str = "image"
    owners: Int64 | None = None
    owner_names: tuple[str, ...] = ()
    groups: Int64 | None = None
    held_out: npt.NDArray[np.bool_] | None = None
    ignored: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    identity: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[Dataset, ...] = ()
    part: Int64 | None = None

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample as a model takes it: (C, H, W) images, (C, T) series, (F,) table rows."""
        shape = tuple(map(int, self.x_train.shape[1:]))
        return (shape[2], *shape[:2]) if self.kind == "image" else shape

    @property
    def num_train(self) -> int:
        """Number of official training images."""
        return len(self.y_train)

    @property
    def num_test(self) -> int:
        """Number of official test images; 0 if there are none."""
        return len(self.y_test)

    @cached_property
    def pool_labels(self) -> Int64:
        """Labels of the virtual pool, int64 (num_train + num_test,): training rows, then test rows."""
        labels = np.concatenate([self.y_train, self.y_test])
        labels.flags.writeable = False
        return labels

    @cached_property
    def _place(self) -> Int64:
        """Row of each row of the pool in its part."""
        assert self.part is not None
        place = np.empty(len(self.part), np.int64)
        for number in range(len(self.parts)):
            mine = self.part == number
            place[mine] = np.arange(np.count_nonzero(mine))
        return place

    def by_size(self, rows: Int64) -> list[tuple[Dataset, Int64]]:
        """Return rows of the pool by the size of their samples: the part, and the rows in its own pool."""
        if self.part is None:
            return [(self, rows)]
        found = self.part[rows]
        return [(self.parts[n], self._place[rows[found == n]]) for n in np.unique(found)]

    def clients_of(self, part: int) -> tuple[str, ...]:
        """Return whose samples have the size of a part."""
        assert self.owners is not None and self.part is not None
        return tuple(self.owner_names[o] for o in np.unique(self.owners[self.part == part]))

    @property
    def common(self) -> int:
        """The part with the size that most clients have; of equally many the first."""
        return int(np.argmax([len(self.clients_of(n)) for n in range(len(self.parts))]))

    def unlike(self) -> list[str]:
        """Name the clients whose samples have another size than most, with the differences."""
        usual = self.parts[self.common] if self.parts else self
        texts = []
        for number, one in enumerate(self.parts):
            names, others = ({*d.features, *d.ignored} for d in (one, usual))
            lists = [("no", sorted(others - names)), ("also", sorted(names - others))]
            differ = [f"{word} {', '.join(found[:SHOWN])}" for word, found in lists if found]
            text = f"{described(one.shape)}{', ' * bool(differ)}{' but '.join(differ)}"
            texts += [f"{client} ({text})" for client in self.clients_of(number) if one is not usual]
        return texts

    def of_one_size(self) -> Dataset:
        """Return the rows of the clients whose samples have the size that most have; the others are named."""
        if not self.parts:
            return self
        left = [name for n in range(len(self.parts)) if n != self.common for name in self.clients_of(n)]
        return replace(self.parts[self.common], skipped=(*self.skipped, *left))

    def labels_of(self, train: Int64, test: Int64) -> dict[str, Any]:
        """Return all arrays but the samples for some training and some test rows, by attribute."""
        pool = np.concatenate([train, self.num_train + test])
        columns = {"owners": pool, "groups": pool, "part": pool, "held_out": train}
        found = {name: None if (c := getattr(self, name)) is None else c[rows] for name, rows in columns.items()}
        return {"y_train": self.y_train[train], "y_test": self.y_test[test], **found}

    def take(self, indices: npt.ArrayLike) -> tuple[Samples, Int64]:
        """Copy rows of the virtual pool (training rows, then test rows).

        Parameters
        ----------
        indices : integers (n,) in [0, num_train + num_test); an index >= num_train is a test row.

        Returns
        -------
        x : like `x_train`, (n, ...), in the order of the indices.
        y : int64 (n,).

        Raises
        ------
        IndexError : if an index lies outside the pool.
        BadRequest : the rows' samples differ in size.
        """
        rows = np.asarray(indices, dtype=np.int64).reshape(-1)
        if rows.size and (rows.min() < 0 or rows.max() >= self.num_train + self.num_test):
            raise IndexError(f"pool indices must lie in 0 .. {self.num_train + self.num_test - 1}")
        if self.parts:
            found = self.by_size(rows) or [(self.parts[0], rows)]
            if len(found) > 1:
                raise BadRequest(f"{self.name}: samples of several sizes do not fit into one array: take one client's")
            return found[0][0].take(found[0][1])
        from_test = rows >= self.num_train
        if not from_test.any():
            return self.x_train[rows], self.pool_labels[rows]
        if from_test.all():
            return self.x_test[rows - self.num_train], self.pool_labels[rows]
        x = np.empty((len(rows), *self.x_train.shape[1:]), self.x_train.dtype)
        x[~from_test] = self.x_train[rows[~from_test]]
        x[from_test] = self.x_test[rows[from_test] - self.num_train]
        return x, self.pool_labels[rows]


@dataclass(frozen=True)
class View:
    """Some rows of a data set's pool, int64, whose samples are copied piece by piece: all may be more than memory."""

    dataset: Dataset
    rows: Int64

    @property
    def shape(self) -> tuple[int, ...]:
        """As if all were one array."""
        return len(self.rows), *self.dataset.x_train.shape[1:]

    @property
    def dtype(self) -> npt.DTypeLike:
        """Of the samples."""
        return self.dataset.x_train.dtype

    def __getitem__(self, rows: slice, /) -> Samples:
        """Copy neighbouring rows."""
        return self.dataset.take(self.rows[rows])[0]


def sample(dataset: Dataset, fraction: float, rng: np.random.Generator) -> Dataset:
    """Return a smaller data set: the same share of every class, of training and of test images.

    Parameters
    ----------
    fraction : in (0, 1]; each class keeps ``round(fraction * count)`` images, at least one. 1 returns the data set
        itself.
    rng : decides which images are kept; their order stays.

    Returns
    -------
    With arrays in this process's memory.
    """
    if fraction == 1:
        return dataset

    def rows(labels: Int64) -> Int64:
        kept = [
            rng.choice(found, max(1, round(fraction * len(found))), replace=False)
            for c in range(dataset.num_classes)
            if len(found := np.flatnonzero(labels == c))
        ]
        return np.sort(np.concatenate(kept)) if kept else np.zeros(0, np.int64)

    return _of_rows(dataset, rows(dataset.y_train), rows(dataset.y_test))


def _of_rows(dataset: Dataset, train: Int64, test: Int64) -> Dataset:
    """Return some training and some test rows of a data set."""
    pool = np.concatenate([train, dataset.num_train + test])
    parts: list[Dataset] = []
    for number, one in enumerate(dataset.parts):
        assert dataset.part is not None
        mine = dataset._place[pool[dataset.part[pool] == number]]  # training rows first, as in the pool
        parts.append(_of_rows(one, mine[mine < one.num_train], mine[mine >= one.num_train] - one.num_train))
    x: dict[str, Any] = {} if parts else {"x_train": dataset.x_train[train], "x_test": dataset.x_test[test]}
    return replace(dataset, parts=tuple(parts), **dataset.labels_of(train, test), **x)
