"""`normalise`: which rows give the mean and standard deviation by which samples are normalised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedapp
from fedapp import config as configuration
from fedapp.data import datasets
from fedapp.data.transforms import normalise
from fedapp.errors import BadRequest
from fedapp.results import analysis
from fedapp.tasks import node as nodes
from fedapp.tasks import simulated

ROWS = 160


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Series of four owners, each on a level of its own; without test rows."""
    monkeypatch.setenv("FEDAPP_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    owner = np.arange(ROWS) % 4
    x = rng.standard_normal((ROWS, 2, 16)) * (1 + owner[:, None, None]) + 10 * owner[:, None, None]
    np.savez(tmp_path / "own.npz", x=x.astype(np.float32), y=np.arange(ROWS) // 4 % 3, client=owner)
    return tmp_path / "own.npz"


def data_of(path: Path, how: str, **more: Any) -> simulated.FederatedData:
    flat = {"dataset": "npz", "data-dir": str(path), "normalise": how, **more}
    return simulated.federated(configuration.from_flat(flat), 4)


def by_hand(rows: np.ndarray) -> tuple[list[float], list[float]]:
    x = rows.astype(np.float64)
    return x.mean((0, 2)).tolist(), x.std((0, 2)).tolist()


@pytest.mark.parametrize("how", ["auto", "data", "client", "none"])
def test_moments_are_those_of_the_rows_that_the_key_names(how: str, own: Path) -> None:
    data = data_of(own, how, unseen="3", validation=0.2)
    x = data.dataset.x_train
    for client, split in enumerate(data.partition.clients):
        rows = {
            "auto": np.arange(ROWS),
            "data": np.concatenate([c.train for c in data.partition.clients[:3]]),
            "client": split.train,
            "none": None,
        }[how]
        mean, std = ([0, 0], [1, 1]) if rows is None else by_hand(x[rows])
        found = data.inputs_of(client)
        np.testing.assert_allclose(found.mean, mean, rtol=1e-6)
        np.testing.assert_allclose(found.std, std, rtol=1e-6)
        assert (found.shape, found.kind) == ((2, 16), "series")
        config = configuration.from_flat(
            {"dataset": "npz", "data-dir": str(own), "normalise": how, "unseen": "3", "validation": 0.2}
        )
        task = simulated.simulated_task(config, client, 4, torch.device("cpu"))
        assert task.inputs == found
        if how == "client":
            scaled = normalise(task.x_train, task.inputs)
            assert scaled.mean((0, 2)).abs().max() < 1e-5 and (scaled.std((0, 2), correction=0) - 1).abs().max() < 1e-5


def test_auto_is_what_is_published_and_data_is_what_is_there() -> None:
    digits = simulated.federated(configuration.from_flat({}), 3)
    known = datasets.published("digits")
    assert known is not None and digits.inputs.mean == known.mean and not digits.own_moments
    data = simulated.federated(configuration.from_flat({"normalise": "data"}), 3)
    train = np.concatenate([c.train for c in data.partition.clients])
    x = data.dataset.take(train)[0] / 16
    np.testing.assert_allclose((data.inputs.mean[0], data.inputs.std[0]), (x.mean(), x.std()), rtol=1e-6)
    assert data.inputs.mean != known.mean
    none = simulated.federated(configuration.from_flat({"normalise": "none"}), 3).inputs
    assert (none.mean, none.std, none.scale) == ((0.0,), (1.0,), 16.0)


def test_a_node_has_only_its_own_rows(own: Path) -> None:
    whole = nodes.own_data(str(own), None, "npz")
    np.testing.assert_allclose(whole.inputs.mean, by_hand(datasets.load("npz", own).x_train)[0], rtol=1e-6)
    alone = nodes.own_data(str(own), None, "npz", how="client")
    np.testing.assert_allclose(alone.inputs.mean, by_hand(alone.x_train)[0], rtol=1e-6)
    assert nodes.own_data(str(own), None, "npz", how="none").inputs.std == (1.0, 1.0)
    with pytest.raises(BadRequest, match="real nodes do not share: choose client"):
        nodes.own_data(str(own), None, "npz", how="data")


def test_a_client_that_normalises_by_itself_takes_its_transform_along(own: Path, tiny: Any) -> None:
    run = tiny(
        method="fedavg", rounds=1, clients=0, dataset="npz", data_dir=str(own), normalise="client", model="cnn1d"
    )
    data = simulated.federated(configuration.from_flat(run.flat), 4)
    nets = [fedapp.load(run.out, k) for k in (0, 3)]
    assert [net.inputs.mean for net in nets] == [data.inputs_of(k).mean for k in (0, 3)]
    assert nets[0].inputs != nets[1].inputs
    assert run.rounds.filter(like="global").isna().all(axis=None)
    with pytest.raises(BadRequest, match="every client normalised by itself"):
        fedapp.load(run.out)
    with pytest.raises(analysis.Unavailable, match="each client normalises its own"):
        analysis.inputs_of(run)
