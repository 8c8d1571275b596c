"""Partitioners of flwr-datasets by name, run on columns of labels, owners and groups instead of whole data sets.

`partition = "flwr:InnerDirichletPartitioner"` with `partition-args = "partition_sizes=100,200,300 alpha=0.3"`. Columns
to partition by are ``label``, ``client`` and ``group``, as far as the data have them, and the features of a table.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.errors import BadRequest, named_values, plain_value, suggest, suggest_choice
from fedapp.lazy import datasets

Int64 = npt.NDArray[np.int64]

PREFIX = "flwr:"
REFUSED = {
    "DistributionPartitioner": "it takes a table of numbers, which a line of text cannot give",
    "IdToSizeFncPartitioner": "it takes a function, which a line of text cannot give",
    "VerticalEvenPartitioner": "it cuts columns, and clients hold whole rows",
    "VerticalSizePartitioner": "it cuts columns, and clients hold whole rows",
}
_ELSEWHERE = {"num_partitions": "it is the key clients", "seed": "it is the key partition-seed"}
"""Arguments that are not set here, and where they are."""


def is_named(partition: str) -> bool:
    """Return whether a value of `partition` names a partitioner of flwr-datasets."""
    return partition.startswith(PREFIX)


@functools.lru_cache(maxsize=16)
def _class(partition: str) -> type[Any]:
    # Importing this takes seconds; most partitions do not need it.
    from flwr_datasets import partitioner

    known = sorted({*partitioner.__all__} - {"Partitioner", *REFUSED})
    name = partition.removeprefix(PREFIX)
    if name not in known:
        choice = f"choose {PREFIX} and one of {', '.join(known)}"
        if name in REFUSED:
            raise BadRequest(f"partition = '{partition}' cannot be used: {REFUSED[name]}; {choice}")
        raise BadRequest(f"partition = '{partition}' is unknown{suggest(name, known, choice)}")
    found: type[Any] = getattr(partitioner, name)
    return found


@functools.lru_cache(maxsize=16)
def arguments(partition: str, text: str) -> Mapping[str, Any]:
    """Return the arguments "name=value name=value" of a partitioner (`partition-args`).

    Raises
    ------
    BadRequest : unknown partitioner, unknown or missing argument; the message lists what there is.
    """
    name, known = partition.removeprefix(PREFIX), inspect.signature(_class(partition)).parameters
    settable = [n for n in known if n not in _ELSEWHERE]
    listing = f"{name} takes: {', '.join(settable) or 'nothing'}"
    found: dict[str, Any] = {}
    for argument, written in named_values("partition-args", text, listing).items():
        if argument not in settable:
            why = f"{argument} is not set here: {_ELSEWHERE[argument]}" if argument in known else (
                f"{name} has no argument '{argument}'{suggest(argument, settable)}"
            )  # fmt: skip
            raise BadRequest(f"partition-args: {why}{'' if why.endswith('?') else '.'} {listing}")
        value = plain_value(written)
        found[argument] = list(value) if isinstance(value, tuple) else value
        if argument == "partition_sizes" and not isinstance(value, tuple):
            found[argument] = [value]
    if "partition_by" in settable:
        found.setdefault("partition_by", "client" if "NaturalId" in name else "label")
    empty = inspect.Parameter.empty
    if missing := [n for n in settable if n not in found and known[n].default is empty]:
        raise BadRequest(f"partition-args: {name} needs {', '.join(f'{n}=...' for n in missing)}. {listing}")
    return found


def column(partition: str, text: str) -> str:
    """Return the column that a partitioner with the arguments `text` goes by; of one without a column `label`."""
    return str(arguments(partition, text).get("partition_by", "label"))


def counts_clients(partition: str) -> bool:
    """Return whether a partitioner itself says how many clients there are, such as one with `partition_sizes`.

    Raises
    ------
    BadRequest : unknown partitioner.
    """
    return "num_partitions" not in inspect.signature(_class(partition)).parameters


def partition(
    partition: str, given: Mapping[str, Any], clients: int, columns: Mapping[str, Any], rng: np.random.Generator
) -> list[Int64]:
    """Run a partitioner.

    Parameters
    ----------
    given : arguments of its constructor without the number of clients and the seed.
    clients : their number; of a partitioner that counts them itself 0, or the number that it must be.
    columns : name -> values, one per row.   rng : decides the order of the rows and the partitioner's seed.

    Returns
    -------
    Per client the numbers of its rows, int64.

    Raises
    ------
    BadRequest : an argument does not fit the data, or the number of clients is another one.
    """
    name = partition.removeprefix(PREFIX)
    if name == "IidPartitioner" and not given and clients > 0:
        # It cuts the permuted rows into pieces of nearly the same length, a millisecond for each client.
        return list(np.array_split(rng.permutation(len(columns["label"])), clients))
    cls = _class(partition)
    known = inspect.signature(cls).parameters
    by = given.get("partition_by", "label")
    if by not in columns:
        raise BadRequest(f"{partition}: no column '{by}' to partition by{suggest_choice(str(by), columns)}")
    # Some partitioners do not shuffle rows before they cut, so the permutation makes the cut depend on the seed.
    # Shards need a sorted column: equal values stay in permuted order.
    rows = rng.permutation(len(columns[by]))
    if name == "ShardPartitioner":
        rows = rows[np.argsort(np.asarray(columns[by])[rows], kind="stable")]
    chosen = dict(given)
    if "num_partitions" in known:
        chosen["num_partitions"] = clients
    if "seed" in known:
        chosen["seed"] = int(rng.integers(2**31))
    with warnings.catch_warnings():
        # Sorting a column makes pyarrow warn about an option that the datasets library passes.
        warnings.simplefilter("ignore", FutureWarning)
        try:
            partitioner = cls(**chosen)
            row = f"row of {by}"  # another name than `by`
            partitioner.dataset = datasets.Dataset.from_dict({by: np.asarray(columns[by])[rows], row: rows})
            count = int(partitioner.num_partitions)
            parts = [partitioner.load_partition(client)[row][:] for client in range(count)]
        except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RuntimeError) as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise BadRequest(f"{partition} cannot deal these data ({why}): change partition-args or clients") from error
    if clients not in (0, count):
        raise BadRequest(f"clients = {clients}, but {partition} with these arguments makes {count}: set clients = 0")
    return [np.asarray(part, dtype=np.int64) for part in parts]
