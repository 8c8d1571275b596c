"""The data card: what the clients of a partition hold, and what guessing would score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.data.datasets import Dataset
from fedapp.data.partitions import Partition

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class DataCard:
    """What the clients hold, and what guessing would score.

    Attributes
    ----------
    dataset, kind, split, hash : str
    classes : tuple of str
    train, test : int64 (K, C): images per client and class.
    majority : float64 (K,): accuracy on the client's test split of always answering the client's most frequent training
        class (the first one if several are), in 0 .. 1; nan for a client without test images.
    unused : images of the partitioned pool (``official``, ``holdout``: the training images) that no client holds.
    shared : images that occur more than once in the training splits (several clients, or duplicates).
    public : training images that are held back from the clients as a public set.
    validation : images that the clients hold out from training to choose settings by.
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
    validation: int = 0

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
            "validation": self.validation,
        }

    def text(self, max_classes: int = 26) -> str:
        """Return the card as plain text: one line per client, one column per class with its images (``.``: none).

        Parameters
        ----------
        max_classes : with more classes than this, a line gives the number of classes and the three largest instead.
        """
        train_sizes, test_sizes = self.train.sum(axis=1), self.test.sum(axis=1)
        lines = [
            f"{self.dataset}: {len(self.train)} clients, partition {self.kind}, split {self.split}, {self.hash[:12]}",
            f"training images {train_sizes.sum()} ({train_sizes.min()} to {train_sizes.max()} a client), "
            f"test images {test_sizes.sum()} ({test_sizes.min()} to {test_sizes.max()} a client)",
        ]
        if self.unused:
            lines.append(f"{self.unused} images are held by no client")
        if self.public:
            lines.append(f"{self.public} training images are held back from the clients as the public set")
        if self.validation:
            lines.append(f"{self.validation} images are held out from training for validation scores")
        if self.shared:
            lines.append(f"{self.shared} training images are held more than once")
        wide = len(self.classes) > max_classes
        # Names head the columns where they are short, else the classes' numbers.
        short = max(len(name) for name in self.classes) <= 6
        heads = list(self.classes) if short else [str(label) for label in range(len(self.classes))]
        if wide:
            heads = ["classes", "largest classes"]
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
        lines.append(f"always predicting a client's majority class scores {mean} (mean over clients)")
        return "\n".join(lines)


def data_card(dataset: Dataset, partition: Partition) -> DataCard:
    """Count what the clients of a partition hold.

    Raises
    ------
    BadRequest : if the partition was made for other data.
    """
    partition.check(dataset)
    labels = dataset.pool_labels
    train, test = (
        np.stack(
            [np.bincount(labels[getattr(client, part)], minlength=dataset.num_classes) for client in partition.clients]
        )
        for part in ("train", "test")
    )
    sizes = test.sum(axis=1)
    hits = test[np.arange(len(test)), train.argmax(axis=1)]
    majority = np.where(sizes > 0, hits / np.maximum(sizes, 1), np.nan)
    held_train = np.concatenate([client.train for client in partition.clients])
    held_out = [rows for client in partition.clients for rows in (client.test, client.validation)]
    held = np.union1d(held_train, np.concatenate(held_out))
    # Official test images are drawn, not partitioned: those that nobody drew do not count as unused.
    pool = len(labels) if partition.split == "merged" else dataset.num_train
    public = int(partition.settings.get("public_images", 0))
    validation = sum(len(c.validation) for c in partition.clients)
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
        validation=validation,
    )
