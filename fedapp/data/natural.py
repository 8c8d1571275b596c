"""Clients that the data themselves name, and clients that a file lists.

``by-client``  one client per value of the column ``client``, sorted; numbers sort as numbers
``file``       an index file: a partition that a run saved (``.npz``); ``.json``
               ``{"clients": [{"name": "A", "train": [rows], "validation": [rows], "test": [rows]}]}``; or ``.csv`` with
               the columns ``row``, ``client`` and ``split``. Rows are counted from 0, training rows of the data first.

Splits: ``given`` takes the data's own training and test rows, ``holdout`` and ``merged`` cut each client's rows as for
drawn partitions.
"""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedapp.data.columns import PARTS
from fedapp.data.dataset import Dataset
from fedapp.data.names import is_there
from fedapp.data.partitions import TEST_FRACTION, ClientSplit, Partition, cut, of_clients
from fedapp.errors import BadRequest, faults, suggest_choice
from fedapp.settings import DataSettings

SPLITS = ("given", "holdout", "merged")


def by_client(dataset: Dataset, settings: DataSettings) -> Partition:
    """Return the natural clients of a data set.

    Parameters
    ----------
    settings : `split` is one of :data:`SPLITS`; `clients` 0 = all, fewer are drawn with `partition_seed` and keep their
        order; owners with fewer rows than `min_samples` (`given`: training rows) are left out, and named in the result.

    Raises
    ------
    BadRequest : no column `client`, no test rows for `given`, or fewer owners than clients.
    """
    split, clients, least, seed = settings.split, settings.clients, settings.min_samples, settings.partition_seed
    if dataset.owners is None:
        raise BadRequest(
            f"partition = 'by-client' needs a column client, which {dataset.name} does not have: add one entry per row "
            "with its client, or choose a drawn partition such as dirichlet"
        )
    if split not in SPLITS:
        raise BadRequest(f"split = '{split}' does not go with by-client{suggest_choice(split, SPLITS)}")
    if split == "given" and not dataset.num_test:
        raise BadRequest(f"split = 'given': {dataset.name} has no test rows: add a column split, or use holdout")
    pool = np.arange(dataset.num_train + (0 if split == "holdout" else dataset.num_test))
    owners = dataset.owners[pool]
    counted = owners[: dataset.num_train] if split == "given" else owners
    sizes = np.bincount(counted, minlength=len(dataset.owner_names))
    enough = np.flatnonzero(sizes >= least)
    if clients > len(enough) or not len(enough):
        raise BadRequest(
            f"clients = {clients}: {len(enough)} of the {len(sizes)} owners in {dataset.name} have min-samples = "
            f"{least} rows or more: lower clients or min-samples, or set clients = 0 for all"
        )
    if clients:
        draw = np.random.default_rng(np.random.SeedSequence([seed, 300]))
        enough = np.sort(draw.choice(enough, clients, replace=False))
    rng = np.random.default_rng(np.random.SeedSequence([seed, 2]))
    labels, order = dataset.pool_labels, np.argsort(owners, kind="stable")
    ends = np.searchsorted(owners[order], np.arange(len(sizes) + 1))
    members = []
    for owner in enough:
        rows = order[ends[owner] : ends[owner + 1]]
        if split == "given":
            train, test = rows[rows < dataset.num_train], rows[rows >= dataset.num_train]
        else:
            train, test = cut(rows, labels, dataset.groups, rng, settings.test_share)
        members.append(ClientSplit(np.sort(train), np.sort(test)))
    small = np.flatnonzero((sizes < least) & (np.bincount(dataset.owners, minlength=len(sizes)) > 0))
    facts = {
        "seed": seed, "min_samples": least, "left_out": [dataset.owner_names[o] for o in small],
        **({} if settings.test_share == TEST_FRACTION else {"test_share": settings.test_share}),
    }  # fmt: skip
    return of_clients(dataset, "by-client", split, members, facts, [dataset.owner_names[o] for o in enough])


class _Client(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = ""
    train: list[int]
    validation: list[int] = Field(default_factory=list)
    test: list[int] = Field(default_factory=list)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    clients: list[_Client] = Field(min_length=1)


def from_file(dataset: Dataset, path: Path) -> Partition:
    """Read the partition from an index file.

    Raises
    ------
    BadRequest : the file cannot be read, was made for other data, or its rows do not fit: out of range, held by two
        clients, on two sides of a client's cut, or no training rows.
    """
    if not is_there(path) or not path.is_file():
        raise BadRequest(f"partition-file {path} does not exist: give a partition.npz of a run, a .json or a .csv file")
    if path.suffix == ".npz":
        partition = Partition.load(path)
        partition.check(dataset)
        return partition
    if path.suffix not in (".json", ".csv"):
        raise BadRequest(f"partition-file {path}: wanted .npz, .json or .csv")
    try:
        text = path.read_text(encoding="utf-8-sig")
        found = _File.model_validate(json.loads(text)) if path.suffix == ".json" else _from_csv(path, text)
    except ValidationError as error:
        raise BadRequest(f"partition-file {path}: {faults(error)[0]}") from error
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        raise BadRequest(f"partition-file {path} cannot be read ({error})") from error
    members = []
    total = dataset.num_train + dataset.num_test
    holder = np.full(total, -1)
    for number, client in enumerate(found.clients):
        who = f"partition-file {path}: client {client.name or number}"
        if not client.train:
            raise BadRequest(f"{who} has no training rows")
        listed = {part: getattr(client, part) for part in PARTS}
        if wrong := [row for part in PARTS for row in listed[part] if not 0 <= row < total]:
            raise BadRequest(f"{who} has row {wrong[0]}, but {dataset.name} has rows 0 .. {total - 1}")
        rows = {part: np.array(listed[part], np.int64) for part in PARTS}
        every = np.concatenate(list(rows.values()))
        values, counts = np.unique(every, return_counts=True)
        if counts.max() > 1:
            raise BadRequest(f"{who} has row {values[counts.argmax()]} twice")
        taken = values[holder[values] >= 0]
        if len(taken):
            other = found.clients[holder[taken[0]]].name or holder[taken[0]]
            raise BadRequest(f"{who} has row {taken[0]}, which client {other} has too")
        holder[values] = number
        if dataset.groups is not None:
            groups = {part: set(dataset.groups[rows[part]].tolist()) for part in PARTS}
            for one, other in itertools.combinations(PARTS, 2):
                if groups[one] & groups[other]:
                    raise BadRequest(
                        f"{who} has rows of one group in {one} and in {other}: keep each group on one side"
                    )
        members.append(ClientSplit(*(np.sort(rows[part]) for part in ("train", "test", "validation"))))
    names = [client.name or str(number) for number, client in enumerate(found.clients)]
    if len(set(names)) != len(names):
        raise BadRequest(f"partition-file {path}: two clients are called '{max(names, key=names.count)}'")
    return of_clients(dataset, "file", "given", members, {"file": path.name}, names)


def _from_csv(path: Path, text: str) -> _File:
    """Read the columns row, client and split."""
    reader = csv.DictReader(text.splitlines())
    if set(reader.fieldnames or ()) != {"row", "client", "split"}:
        raise ValueError(f"its columns are {', '.join(reader.fieldnames or ()) or 'none'}, not row, client and split")
    clients: dict[str, dict[str, Any]] = {}
    for line in reader:
        if None in line or None in line.values():
            raise ValueError(f"line {reader.line_num} does not have 3 cells")
        part = line["split"]
        if part not in PARTS:
            raise ValueError(f"line {reader.line_num}: split '{part}', not {', '.join(PARTS)}")
        own = clients.setdefault(line["client"], {"name": line["client"], **{p: [] for p in PARTS}})
        own[part].append(int(line["row"]))
    return _File.model_validate({"clients": list(clients.values())})


def given_validation(partition: Partition, dataset: Dataset) -> Partition:
    """Move the rows that the data's own `split` column has for validation out of the clients' other splits.

    Where the data name no test rows, a cut may have put some of them into a test split.
    """
    if dataset.held_out is None:
        return partition
    flagged = np.flatnonzero(dataset.held_out)
    members: list[ClientSplit] = []
    for client in partition.clients:
        held, tested = np.isin(client.train, flagged), np.isin(client.test, flagged)
        kept = np.concatenate([client.validation, client.train[held], client.test[tested]])
        members.append(ClientSplit(client.train[~held], client.test[~tested], np.unique(kept)))
    empty = [k for k, client in enumerate(members) if not len(client.train)]
    if empty:
        name = partition.names[empty[0]] if partition.names else str(empty[0])
        raise BadRequest(f"client {name} has validation rows alone: give it training rows, or leave it out")
    return partition.with_clients(members)
