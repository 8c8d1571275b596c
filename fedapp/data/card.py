"""The data card: classes and sizes of the clients of a partition, and the scores of guessing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.data.dataset import Dataset
from fedapp.data.moments import moments
from fedapp.data.partitions import Partition
from fedapp.errors import counted, described, plain

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


SHOWN = 20
"""Clients with a line of their own in the text."""
FEW = 8
"""Names of a list that stand in one line."""


@dataclass(frozen=True, eq=False)
class DataCard:
    """Classes and sizes of the clients, and the scores of guessing.

    Attributes
    ----------
    dataset, partition : the data and their assignment to clients.
    train, test : int64 (K, C): images per client and class.
    majority : float64 (K,): accuracy on the client's test split of always answering the client's most frequent training
        class (the first one if several are), in 0 .. 1; nan for a client without test images.
    unused : images of the partitioned pool (``official``, ``holdout``: the training images) that no client holds.
    shared : images that occur more than once in the training splits (several clients, or duplicates).
    public : training images that are held back from the clients as a public set.
    validation : images that the clients hold out from training to choose settings by.
    untrained : classes without a training row at any client.
    sizes : where clients' samples differ in size, each size and its clients.
    """

    dataset: Dataset
    partition: Partition
    train: Int64
    test: Int64
    majority: Float64
    unused: int
    shared: int
    public: int
    validation: int
    untrained: tuple[str, ...]
    sizes: tuple[str, ...]

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.dataset.classes

    @property
    def mean_majority(self) -> float:
        """Unweighted mean of :attr:`majority` over the clients with test images; nan if there are none."""
        known = self.majority[~np.isnan(self.majority)]
        return float(known.mean()) if known.size else float("nan")

    @property
    def _what(self) -> str:
        return "images" if self.dataset.kind == "image" else "rows"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; nan becomes None."""
        left_out = self.partition.settings.get("left_out", ())
        return {
            "dataset": self.dataset.name,
            "partition": self.partition.kind,
            "split": self.partition.split,
            "hash": self.partition.hash,
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
            **({"names": list(names), "left_out": list(left_out)} if (names := self.partition.names) else {}),
            **({"skipped": list(self.dataset.skipped)} if self.dataset.skipped else {}),
            **({"untrained": list(self.untrained)} if self.untrained else {}),
            **({"sizes": list(self.sizes)} if self.sizes else {}),
        }

    def text(self, max_classes: int = 26, max_clients: int = SHOWN, seed: str = "") -> str:
        """Return the card as plain text: a line per client, a column per class with its training rows (``.``: none).

        Names of classes and clients come from files: other characters become escapes.

        Parameters
        ----------
        max_classes : with more classes than this, a line gives the number of classes and the three largest instead.
        max_clients : clients with a line of their own; a summary follows for the others.
        seed : which of several partitions this is, for the last line.
        """
        train_sizes, test_sizes = self.train.sum(axis=1), self.test.sum(axis=1)
        data, partition, what = self.dataset, self.partition, self._what
        classes, names, ignored = map(in_lines, (data.classes, partition.names, data.ignored))
        lines = [
            f"{data.name}: {counted(len(self.train), 'client')}, partition {partition.kind}, split "
            f"{partition.split}, {partition.hash[:12]}",
            f"training {what} {train_sizes.sum()} ({train_sizes.min()} to {train_sizes.max()} a client), "
            f"test {what} {test_sizes.sum()} ({test_sizes.min()} to {test_sizes.max()} a client)",
        ]
        unseen = int(np.count_nonzero(((self.test > 0) & (self.train == 0)).any(axis=1)))
        whose = (
            "client is tested on classes that it does" if unseen == 1 else "clients are tested on classes that they do"
        )
        left_out = partition.settings.get("left_out", ())
        few, missing = (f"{len(names)} ({_first(names)})" for names in (left_out, data.skipped))
        notes = (
            (ignored, f"ignored: {', '.join(ignored)}"),
            (data.skipped, f"left out because they cannot be used: {missing}"),
            (self.untrained, f"no client has training {what} of {counted(len(self.untrained), 'class')} "
                             f"({_first(self.untrained)})"),
            (self.sizes, f"samples of {len(self.sizes)} sizes: {'; '.join(in_lines(self.sizes))}"),
            (left_out, f"left out, fewer than min-samples {what}: {few}"),
            (self.unused, f"{self.unused} {what} are held by no client"),
            (self.public, f"{self.public} training {what} are held back from the clients as the public set"),
            (self.validation, f"{self.validation} {what} are held out from training for validation scores"),
            (self.shared, f"{self.shared} training {what} are held more than once"),
            (unseen, f"{unseen} {whose} not train on"),
        )  # fmt: skip
        lines += [text for there, text in notes if there]
        lines += self._table(classes, names, max_classes, max_clients)
        if len(self.train) > max_clients:
            lines.append(self._others(max_clients))
        mean = "-" if np.isnan(self.mean_majority) else f"{100 * self.mean_majority:.1f} %"
        over = "; ".join(filter(None, ("mean over clients", seed)))
        lines.append(f"always predicting a client's majority class scores {mean} ({over})")
        return "\n".join(lines)

    def _table(self, classes: Sequence[str], names: Sequence[str], max_classes: int, max_clients: int) -> list[str]:
        """Return the lines of the clients that have one, below their heads."""
        wide, train_sizes, test_sizes = len(classes) > max_classes, self.train.sum(axis=1), self.test.sum(axis=1)
        # Names head the columns where they are short, else the classes' numbers.
        short = max(len(name) for name in classes) <= 6
        heads = classes if short else [str(label) for label in range(len(classes))]
        if wide:
            heads = ["classes", "largest classes"]
        rows = [["client", *heads, "train", "test", "majority"]]
        for client, counts in enumerate(self.train[:max_clients]):
            if wide:
                top = [label for label in np.argsort(-counts, kind="stable")[:3] if counts[label]]
                cells = [str(np.count_nonzero(counts)), ", ".join(f"{classes[i]} {counts[i]}" for i in top)]
            else:
                cells = [str(count) if count else "." for count in counts]
            score = "-" if np.isnan(self.majority[client]) else f"{100 * self.majority[client]:.1f}"
            name = names[client] if names else str(client)
            rows.append([name, *cells, str(train_sizes[client]), str(test_sizes[client]), score])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]

    def _others(self, shown: int) -> str:
        """Return a line about the clients that have none of their own."""
        held = self.train[shown:]
        known = 100 * self.majority[shown:][~np.isnan(self.majority[shown:])]
        numbers = [
            (f"training {self._what}", held.sum(axis=1), "d", "g"),
            (f"test {self._what}", self.test[shown:].sum(axis=1), "d", "g"),
            ("classes", np.count_nonzero(held, axis=1), "d", "g"),
            ("majority", known, ".1f", ".1f"),
        ]
        parts = [
            f"{name} {found.min():{form}} to {found.max():{form}}, median {np.median(found):{middle}}"
            for name, found, form, middle in numbers
            if found.size
        ]
        return f"and {len(held)} more {'client' if len(held) == 1 else 'clients'}: {'; '.join(parts)}"


def in_lines(names: Iterable[str]) -> list[str]:
    """Return names of a file, each as it may stand in a line."""
    return [plain(name, whole=True).replace("\n", "\\n") for name in names]


def _first(names: tuple[str, ...]) -> str:
    """Return the first names of a list as they may stand in a line."""
    return ", ".join(in_lines(names[:FEW])) + (", ..." if len(names) > FEW else "")


def _sizes(dataset: Dataset) -> tuple[str, ...]:
    """Describe each size of samples, with the first clients that have it."""
    texts = []
    for number, part in enumerate(dataset.parts):
        names = dataset.clients_of(number)
        texts.append(f"{described(part.shape)} ({', '.join(names[:FEW])}{', ...' if len(names) > FEW else ''})")
    return tuple(texts)


def data_card(dataset: Dataset, partition: Partition) -> DataCard:
    """Count the rows of the clients of a partition.

    Raises
    ------
    BadRequest : if the partition was made for other data.
    """
    partition.check(dataset)
    labels = dataset.pool_labels
    train, test = (
        np.stack([np.bincount(labels[getattr(c, part)], minlength=dataset.num_classes) for c in partition.clients])
        for part in ("train", "test")
    )
    sizes = test.sum(axis=1)
    hits = test[np.arange(len(test)), train.argmax(axis=1)]
    majority = np.where(sizes > 0, hits / np.maximum(sizes, 1), np.nan)
    held_train = np.concatenate([client.train for client in partition.clients])
    held_out = [rows for client in partition.clients for rows in (client.test, client.validation)]
    held = np.union1d(held_train, np.concatenate(held_out))
    # Official test images are drawn, not partitioned: those that no one drew do not count as unused.
    pool = len(labels) if partition.split == "merged" else dataset.num_train
    public = int(partition.settings.get("public_images", 0))
    validation = sum(len(c.validation) for c in partition.clients)
    return DataCard(
        dataset=dataset,
        partition=partition,
        train=train,
        test=test,
        majority=majority,
        unused=pool - int(np.count_nonzero(held < pool)) - public,
        shared=int(np.count_nonzero(np.unique(held_train, return_counts=True)[1] > 1)),
        public=public,
        validation=validation,
        untrained=tuple(dataset.classes[c] for c in np.flatnonzero(train.sum(axis=0) == 0)),
        sizes=_sizes(dataset),
    )


def leaks(dataset: Dataset, partition: Partition) -> list[str]:
    """Look for test rows that training rows give away, and for channels that look mixed up; return the findings.

    Exact copies are counted between all clients' training and test rows; of series also test windows that share one
    half with a training window, as overlapping windows do.
    """
    train, test = (
        np.unique(np.concatenate([getattr(c, part) for c in partition.clients])) for part in ("train", "test")
    )
    held = [{id(part): own for part, own in dataset.by_size(rows)} for rows in (train, test)]
    found = [
        text
        for part in dataset.parts or (dataset,)
        for text in _leaks(part, *(own.get(id(part), train[:0]) for own in held))
    ]
    return list(dict.fromkeys(found))


def _leaks(dataset: Dataset, train: Int64, test: Int64) -> list[str]:
    """Look for leaks between rows of one size."""
    found = []
    (x_train, _), (x_test, _) = dataset.take(train), dataset.take(test)
    known = {row.tobytes() for row in x_train}
    copies = sum(row.tobytes() in known for row in x_test)
    if copies:
        found.append(f"{copies} of {len(test)} test {'images' if dataset.kind == 'image' else 'rows'} are exact copies "
                     "of training ones: scores are too high")  # fmt: skip
    if dataset.kind == "series" and (half := dataset.shape[1] // 2):
        halves = {part.tobytes() for row in x_train for part in (row[:, :half], row[:, -half:])}
        shared = sum(row[:, :half].tobytes() in halves or row[:, -half:].tobytes() in halves for row in x_test)
        if shared:
            found.append(f"{shared} of {len(test)} test windows share a half with a training window: give each "
                         "recording a number in the column group, so that its windows stay on one side")  # fmt: skip
        mean, std = map(np.array, moments(x_train, dataset.scale))
        if len(mean) > 1 and np.ptp(mean) <= 0.1 * np.abs(mean).max() and np.ptp(std) <= 0.1 * std.max():
            found.append("all channels have nearly the same mean and standard deviation: check that x has the shape "
                         "(N, channels, steps), transposed and not reshaped")  # fmt: skip
    return found
