"""The public set: a share held back from the clients, or images of another data set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from clients.base import FedClient
from fedapp import config as configuration
from fedapp import registry
from fedapp.config import RunConfig
from fedapp.data import datasets, partitions
from fedapp.data.card import data_card
from fedapp.errors import BadRequest
from fedapp.method import NONE, Method
from fedapp.tasks import simulated as tasks
from fedapp.tasks.public import PublicSource, public_source
from strategies.base import Strategy
from tests.handmade import partitioned
from tests.test_gradient_hook import patched

WITH_PUBLIC = Method("with_public", "", "", Strategy, FedClient, shared=NONE, public_share=0.1)


@pytest.fixture(autouse=True)
def _method_with_public_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Add a method that needs a public set, and forget it afterwards."""
    patched(monkeypatch, WITH_PUBLIC)
    yield
    registry.configured.cache_clear()


def _config(**settings: object) -> RunConfig:
    values = {"method": "with_public", "dataset": "digits", "clients": 5, **settings}
    return configuration.from_flat({k.replace("_", "-"): v for k, v in values.items()})


def test_hold_back_takes_the_same_share_of_every_client() -> None:
    dataset = datasets.load("digits")
    whole = partitioned(dataset, kind="dirichlet", split="holdout", clients=7, seed=3, alpha=0.3)
    left, public = partitions.hold_back(whole, 0.2, seed=3)
    for before, after in zip(whole.clients, left.clients, strict=True):
        assert set(after.train) == set(before.train) - set(public)
        assert len(before.train) - len(after.train) == int(0.2 * len(before.train) + 0.5)
        assert np.array_equal(before.test, after.test)
    assert len(public) == sum(int(0.2 * len(c.train) + 0.5) for c in whole.clients)
    assert np.array_equal(public, np.unique(public))
    assert left.hash != whole.hash
    assert left.settings["public_images"] == len(public)


def test_hold_back_is_a_function_of_the_seed(tmp_path: Path) -> None:
    dataset = datasets.load("digits")
    whole = partitioned(dataset, kind="iid", split="holdout", clients=4, seed=0)
    first, again, other = (partitions.hold_back(whole, 0.05, seed=s) for s in (1, 1, 2))
    assert np.array_equal(first[1], again[1])
    assert first[0].hash == again[0].hash
    assert not np.array_equal(first[1], other[1])
    first[0].save(tmp_path / "p.npz")
    assert partitions.Partition.load(tmp_path / "p.npz").hash == first[0].hash


def test_an_image_of_several_clients_is_taken_from_all_and_a_client_keeps_one() -> None:
    dataset = datasets.load("digits")
    whole = partitioned(dataset, kind="iid", split="holdout", clients=3, seed=0)
    rows = whole.clients[0].train
    small = partitions.ClientSplit(rows[:1], rows[:0])
    left, public = partitions.hold_back(replace(whole, clients=(*whole.clients[1:], small)), 0.9, seed=0)
    assert len(left.clients[-1].train) == 1
    shared = replace(whole, clients=(partitions.ClientSplit(rows, rows[:0]), partitions.ClientSplit(rows, rows[:0])))
    left, public = partitions.hold_back(shared, 0.1, seed=0)
    assert all(not np.isin(c.train, public).any() for c in left.clients)
    with pytest.raises(BadRequest, match="no training row left"):
        partitions.hold_back(
            replace(
                whole, clients=(partitions.ClientSplit(rows, rows[:0]), partitions.ClientSplit(rows[:2], rows[:0]))
            ),
            0.99,
            seed=0,
        )
    with pytest.raises(BadRequest, match="holds back none"):
        partitions.hold_back(whole, 1e-6, seed=0)
    with pytest.raises(BadRequest, match="between 0 and 1"):
        partitions.hold_back(whole, 1.0, seed=0)


def test_data_card_says_what_is_public() -> None:
    dataset = datasets.load("digits")
    whole = partitioned(dataset, kind="dirichlet", split="holdout", clients=4, seed=0)
    left, public = partitions.hold_back(whole, 0.05, seed=0)
    card = data_card(dataset, left)
    assert card.public == card.to_dict()["public"] == len(public)
    assert card.unused == data_card(dataset, whole).unused
    assert f"{len(public)} training images are held back from the clients as the public set" in card.text()
    assert "public" not in data_card(dataset, whole).text()


def test_clients_see_one_public_set_that_none_of_them_trains_on() -> None:
    config = _config()
    sets = [tasks.simulated_task(config, k, 5, torch.device("cpu")) for k in range(5)]
    public = sets[0].extras["public"]
    assert public.dtype == torch.uint8
    assert public.shape[1:] == (8, 8, 1)
    assert all(torch.equal(public, t.extras["public"]) for t in sets)
    plain = _config(method="local")
    whole = [tasks.simulated_task(plain, k, 5, torch.device("cpu")) for k in range(5)]
    assert all(t.extras == {} for t in whole)
    assert sum(t.num_samples for t in whole) == sum(t.num_samples for t in sets) + len(public)
    for with_public, without in zip(sets, whole, strict=True):
        assert torch.equal(with_public.x_test, without.x_test)


def test_an_explicit_share_is_held_back_from_every_method() -> None:
    ours, theirs = (tasks.federated(_config(method=m, public_data="0.2"), 5) for m in ("with_public", "fedavg"))
    assert ours.partition.hash == theirs.partition.hash
    assert tasks.federated(_config(), 5).partition.hash != tasks.federated(_config(method="fedavg"), 5).partition.hash


def test_another_data_set_is_drawn_with_the_seed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, count in (("mnist", 80), ("fashion_mnist", 90), ("cifar10", 60)):
        shape = (count, 32, 32, 3) if name == "cifar10" else (count, 28, 28)
        np.savez(
            tmp_path / f"{name}.npz",
            x_train=rng.integers(0, 256, shape, np.uint8),
            y_train=np.arange(count) % 10,
            x_test=rng.integers(0, 256, (20, *shape[1:]), np.uint8),
            y_test=np.arange(20) % 10,
        )
    base = {"dataset": "mnist", "data_dir": str(tmp_path), "clients": 2, "partition": "iid"}
    data = tasks.federated(_config(public_data="fashion_mnist:30", **base), 2)
    again = tasks.federated(_config(public_data="fashion_mnist:30", **base), 2)
    other = tasks.federated(_config(public_data="fashion_mnist:30", seed=1, **base), 2)
    assert data.public is not None and again.public is not None and other.public is not None
    assert data.public.shape == (30, 28, 28, 1)
    assert np.array_equal(data.public, again.public)
    assert not np.array_equal(data.public, other.public)
    known = {row.tobytes() for row in datasets.load("fashion_mnist", tmp_path).x_train}
    assert all(row.tobytes() in known for row in data.public)
    assert sum(len(c.train) for c in data.partition.clients) == 80
    assert tasks.federated(_config(public_data="fashion_mnist:30", **{**base, "method": "local"}), 2).public is None
    with pytest.raises(BadRequest, match="32x32"):
        tasks.federated(_config(public_data="cifar10:30", **base), 2)
    with pytest.raises(BadRequest, match="90 training rows"):
        tasks.federated(_config(public_data="fashion_mnist:91", **base), 2)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, PublicSource(share=0.1)),
        ({"public_data": " 0.2 "}, PublicSource(share=0.2)),
        ({"public_data": "mnist"}, PublicSource(dataset="mnist", count=3000)),
        ({"public_data": "mnist:50"}, PublicSource(dataset="mnist", count=50)),
        ({"method": "fedavg"}, None),
        ({"method": "fedavg", "public_data": "0.2"}, PublicSource(share=0.2)),
        ({"method": "fedavg", "public_data": "mnist:50"}, None),
    ],
)
def test_where_public_images_come_from(settings: dict[str, str], expected: PublicSource | None) -> None:
    assert public_source(_config(**settings)) == expected


@pytest.mark.parametrize("method", ["with_public", "fedavg"])
@pytest.mark.parametrize("text", ["0", "1", "1.5", "-0.1", "nan", "mnist:0", "mnist:x", "nothing", "digits", "npz"])
def test_bad_values_are_refused(text: str, method: str) -> None:
    with pytest.raises(BadRequest, match="public-data"):
        public_source(_config(public_data=text, method=method))
