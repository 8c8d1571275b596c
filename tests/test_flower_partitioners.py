"""Partitioners of flwr-datasets by name: the assignment is the library's; rows, seeds and errors are ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets as library
import numpy as np
import pytest
from flwr_datasets import partitioner

from fedapp import config
from fedapp.data import flower
from fedapp.data.dataset import Dataset
from fedapp.data.partitions import Partition
from fedapp.errors import BadRequest
from fedapp.tasks import simulated
from tests.handmade import partitioned

ROWS, TESTS = 240, 60
ARGUMENTS = {
    "ContinuousPartitioner": "strictness=0.5 partition_by=age",
    "DirichletPartitioner": "alpha=0.5 min_partition_size=1",
    "ExponentialPartitioner": "",
    "GroupedNaturalIdPartitioner": "group_size=2",
    "IidPartitioner": "",
    "InnerDirichletPartitioner": "partition_sizes=100,80,60 alpha=0.5",
    "LinearPartitioner": "",
    "NaturalIdPartitioner": "",
    "PathologicalPartitioner": "num_classes_per_partition=2",
    "ShardPartitioner": "num_shards_per_partition=2",
    "SizePartitioner": "partition_sizes=200,40",
    "SquarePartitioner": "",
}


def toy() -> Dataset:
    rng = np.random.default_rng(1)
    pool = ROWS + TESTS
    x, y = rng.standard_normal((pool, 2)).astype(np.float32), rng.integers(0, 4, pool)
    return Dataset(
        "toy", x[:ROWS], y[:ROWS], x[ROWS:], y[ROWS:], tuple("abcd"), 1.0, (0.0, 0.0), (1.0, 1.0), "table",
        owners=rng.integers(0, 6, pool), owner_names=tuple("uvwxyz"), features=("age", "height"),
    )  # fmt: skip


TOY = toy()


def dealt(name: str, text: str | None = None, seed: int = 0, clients: int = 0, split: str = "official") -> Partition:
    kind = f"flwr:{name}"
    text = ARGUMENTS[name] if text is None else text
    clients = clients or (0 if flower.counts_clients(kind) else 4)
    return partitioned(TOY, kind=kind, split=split, clients=clients, seed=seed, min_samples=1, arguments=text)


def test_every_partitioner_is_either_tested_or_refused() -> None:
    assert {*ARGUMENTS} | {*flower.REFUSED} | {"Partitioner"} == {*partitioner.__all__}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_seed_decides_and_nothing_is_held_twice(name: str) -> None:
    one, again, other = dealt(name), dealt(name), dealt(name, seed=1)
    assert one.hash == again.hash != other.hash
    rows = np.concatenate([c.train for c in one.clients])
    assert len(np.unique(rows)) == len(rows) and rows.max() < ROWS
    assert one.settings["partition_args"] == ARGUMENTS[name] and "alpha" not in one.settings


def test_sizes_and_classes_are_those_of_the_library() -> None:
    """The same arguments, given to the library by hand: equal tables of classes, row numbers mapped by the column."""
    rng = np.random.default_rng(np.random.SeedSequence([3, 1]))
    rows = rng.permutation(ROWS)
    oracle = partitioner.InnerDirichletPartitioner(
        partition_sizes=[100, 80, 60], partition_by="kind", alpha=0.5, seed=int(rng.integers(2**31))
    )
    oracle.dataset = library.Dataset.from_dict({"kind": TOY.y_train[rows], "number": rows})
    mine = dealt("InnerDirichletPartitioner", seed=3)
    assert [len(c.train) for c in mine.clients] == [100, 80, 60]
    for k, client in enumerate(mine.clients):
        assert np.array_equal(client.train, np.sort(oracle.load_partition(k)["number"]))


@pytest.mark.parametrize(("rows", "clients"), [(23, 5), (20, 5), (3, 3), (7, 1)])
def test_equal_parts_are_those_of_the_library(rows: int, clients: int) -> None:
    dealt = flower.partition("flwr:IidPartitioner", {}, clients, {"label": np.zeros(rows)}, np.random.default_rng(4))
    theirs = partitioner.IidPartitioner(clients)
    theirs.dataset = library.Dataset.from_dict({"row": np.random.default_rng(4).permutation(rows)})
    assert [part.tolist() for part in dealt] == [theirs.load_partition(c)["row"][:] for c in range(clients)]
    assert all(part.dtype == np.int64 for part in dealt)


def test_natural_owners_and_features_can_be_partitioned_by() -> None:
    assert TOY.owners is not None
    owners = [set(TOY.owners[c.train].tolist()) for c in dealt("NaturalIdPartitioner").clients]
    assert sorted(map(tuple, owners)) == [(k,) for k in range(6)]
    pairs = [set(TOY.owners[c.train].tolist()) for c in dealt("GroupedNaturalIdPartitioner").clients]
    assert sorted(x for pair in pairs for x in pair) == list(range(6)) and {len(p) for p in pairs} == {2}
    strict = dealt("ContinuousPartitioner", "strictness=1 partition_by=height").clients
    tops = [TOY.x_train[c.train, 1].max() for c in strict]
    assert tops == sorted(tops) and tops[0] <= TOY.x_train[strict[1].train, 1].min()
    values = np.random.default_rng(0).integers(0, 3, 30) + 100  # a feature may be called row
    given = {"partition_by": "row"}
    parts = flower.partition("flwr:NaturalIdPartitioner", given, 0, {"row": values}, np.random.default_rng(0))
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(30)) and len(parts) == 3


@pytest.mark.parametrize(
    ("name", "text", "owned"), [("NaturalIdPartitioner", "", True), ("IidPartitioner", "", False),
                                ("DirichletPartitioner", "alpha=5 partition_by=client min_partition_size=1", True),
                                ("DirichletPartitioner", "alpha=5 min_partition_size=1", False)],
)  # fmt: skip
def test_a_client_that_is_an_owner_is_tested_on_its_own_rows(name: str, text: str, owned: bool, tmp_path: Path) -> None:
    assert TOY.owners is not None
    x, split = np.concatenate([TOY.x_train, TOY.x_test]), np.repeat(["train", "test"], [ROWS, TESTS])
    np.savez(tmp_path / "toy.npz", x=x, y=np.concatenate([TOY.y_train, TOY.y_test]), client=TOY.owners, split=split)
    flat: dict[str, Any] = {
        "method": "local",
        "dataset": "npz",
        "data-dir": str(tmp_path / "toy.npz"),
        "min-samples": 1,
    }
    flat |= {"partition": f"flwr:{name}", "partition-args": text, "clients": 0 if "Natural" in name else 3}
    data = simulated.federated(config.from_flat(flat), flat["clients"])
    assert data.partition.split == ("merged" if owned else "official") and data.dataset.owners is not None
    if "Natural" in name:
        for client in data.partition.clients:
            assert len({*data.dataset.owners[client.train], *data.dataset.owners[client.test]}) == 1
            assert len(client.test)


@pytest.mark.parametrize("split", ["official", "merged", "holdout"])
def test_splits_are_as_for_drawn_partitions(split: str) -> None:
    text = "partition_sizes=200,100" if split == "merged" else "partition_sizes=200,40"
    clients = dealt("SizePartitioner", text, split=split).clients
    sizes = [len(c.train) + (0 if split == "official" else len(c.test)) for c in clients]
    assert sizes == [200, 100 if split == "merged" else 40]
    assert all(len(c.test) for c in clients) and (clients[0].test.min() >= ROWS) == (split == "official")


@pytest.mark.parametrize(
    ("name", "text", "clients", "message"),
    [
        ("DirichletPartitoner", "", 3, "is unknown, did you mean 'DirichletPartitioner'"),
        ("VerticalSizePartitioner", "", 3, "it cuts columns"),
        ("Partitioner", "", 3, "is unknown"),
        ("DirichletPartitioner", "alpa=1", 3, "no argument 'alpa', did you mean 'alpha'"),
        ("DirichletPartitioner", "", 3, "needs alpha="),
        ("DirichletPartitioner", "alpha=1 seed=3", 3, "seed is not set here: it is the key partition-seed"),
        ("DirichletPartitioner", "alpha=1 num_partitions=3", 3, "it is the key clients"),
        ("DirichletPartitioner", "alpha=much", 3, "cannot deal these data"),
        ("DirichletPartitioner", "alpha=1 partition_by=labl", 3, "no column 'labl' .*did you mean 'label'. Choose"),
        ("SizePartitioner", "partition_sizes=100,100", 3, "makes 2: set clients = 0"),
        ("SizePartitioner", "partition_sizes=100,1000", 0, "cannot deal these data"),
        ("PathologicalPartitioner", "num_classes_per_partition=9", 3, "cannot deal these data"),
    ],
)
def test_what_does_not_fit_gets_one_line(name: str, text: str, clients: int, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as raised:
        partitioned(TOY, kind=f"flwr:{name}", split="official", clients=clients, seed=0, min_samples=1, arguments=text)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"partition": "flwr:Dirichlet"}, "did you mean 'DirichletPartitioner'"),
        ({"partition": "flwr:DirichletPartitioner"}, "needs alpha="),
        ({"partition": "flwr:DirichletPartitioner", "alpha": 0.1}, "give alpha in partition-args"),
        ({"partition-args": "alpha=1"}, "partition-args is for partitioners of flwr-datasets"),
        ({"partition": "flwr:IidPartitioner", "split": "given"}, "goes with partition = 'by-client'"),
    ],
)
def test_the_configuration_is_checked_before_any_data(values: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        config.from_flat(values)


def test_a_run_has_its_clients_and_its_partition_comes_back(tiny: Any) -> None:
    run = tiny(
        method="local", rounds=1, clients=0, partition="flwr:InnerDirichletPartitioner",
        partition_args="partition_sizes=300,200,100 alpha=1", data_fraction=1.0,
    )  # fmt: skip
    saved = Partition.load(run.out / "partition.npz")
    assert [len(c.train) + len(c.test) for c in saved.clients] == [300, 200, 100]
    made = config.from_flat(run.flat)
    again = made.replaced(seed=made.federation.seed + 1, partition_seed=made.data_seed)
    assert simulated.federated(again, 3).partition.hash == saved.hash
