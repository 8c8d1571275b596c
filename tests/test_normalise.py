"""`normalise`: which rows give the mean and standard deviation by which samples are normalised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets as library
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import fedapp
from fedapp import config as configuration
from fedapp.data import datasets
from fedapp.data.transforms import channels_first, normalise
from fedapp.errors import BadRequest
from fedapp.results.runs import read_json
from fedapp.settings import DataSettings
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
            "auto": np.concatenate([c.train for c in data.partition.clients[:3]]),
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


def written(form: str, place: Path, values: np.ndarray) -> dict[str, Any]:
    """Write rows of four owners in one form of own data; return the keys that name them."""
    owner, y = np.repeat(np.arange(4), len(values) // 4), np.tile(np.repeat(["a", "b"], len(values) // 8), 4)
    place.mkdir()
    frame = pd.DataFrame(values.reshape(len(values), -1)).add_prefix("f").assign(y=y, client=owner)
    match form:
        case "npz" | "picture":
            np.savez(place / "own.npz", x=values, y=y, client=owner)
            return {"dataset": "npz", "data-dir": str(place / "own.npz")}
        case "csv":
            frame.to_csv(place / "own.csv", index=False)
            return {"dataset": "csv", "data-dir": str(place / "own.csv")}
        case "parquet":
            frame.to_parquet(place / "own.parquet", index=False)
            return {"dataset": "parquet", "data-dir": str(place / "own.parquet")}
        case "hf":
            library.Dataset.from_pandas(frame).save_to_disk(str(place))
        case "folder":
            for row, pixels in enumerate(values):
                file = place / str(owner[row]) / y[row] / f"{row:04d}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(file)
    return {"dataset": form, "data-dir": str(place)}


FORMS = ("npz", "csv", "parquet", "hf", "picture", "folder")


def drawn(form: str) -> np.ndarray:
    """Rows of one form; the last feature of a table has two values."""
    rng = np.random.default_rng(0)
    if form in ("picture", "folder"):
        return rng.integers(0, 200, (ROWS, 6, 6), dtype=np.uint8)
    return np.append(rng.integers(0, 100, (ROWS, 3)), rng.integers(0, 2, (ROWS, 1)), 1).astype(np.float32)


def moved(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Put rows far from where they are."""
    there = values.copy()
    there[rows] = 255 if values.dtype == np.uint8 else there[rows] + 1000
    return there


@pytest.mark.parametrize("how", ["auto", "data", "none"])
@pytest.mark.parametrize("form", FORMS)
def test_no_row_that_is_tested_has_a_say(form: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAPP_CACHE", str(tmp_path / "cache"))
    values = drawn(form)
    asked = {"normalise": how, "unseen": "3", "validation": 0.2}

    def made(name: str, rows: np.ndarray) -> simulated.FederatedData:
        keys = written(form, tmp_path / name, moved(values, rows))
        return simulated.federated(configuration.from_flat({**keys, **asked}), 4)

    before = made("before", np.zeros(0, int))
    clients = before.partition.clients
    for part in ("test", "validation", "unseen"):
        after = made(
            part, clients[3].train if part == "unseen" else np.concatenate([getattr(c, part) for c in clients])
        )
        assert after.partition.hash == before.partition.hash
        for client in range(3):
            (x, _), (same, _) = (d.tensors("train", client, torch.device("cpu")) for d in (before, after))
            inputs = [d.inputs_of(client) for d in (before, after)]
            assert inputs[0] == inputs[1], part
            assert torch.equal(*(normalise(channels_first(r), i) for r, i in zip((x, same), inputs, strict=True)))


def test_public_rows_count_as_training_rows(own: Path) -> None:
    data = data_of(own, "auto", **{"public-data": "0.3"})
    held = np.concatenate([c.train for c in data.partition.clients])
    assert data.inputs == data_of(own, "auto").inputs and data.public is not None
    x = data.dataset.x_train
    np.testing.assert_allclose(data.inputs.mean, by_hand(np.concatenate([x[held], data.public]))[0], rtol=1e-6)
    np.testing.assert_allclose(data_of(own, "data", **{"public-data": "0.3"}).inputs.mean, by_hand(x[held])[0])


def test_training_and_what_is_stored_are_the_same_whatever_the_rows_for_tests_are(tmp_path: Path, tiny: Any) -> None:
    values, runs = drawn("npz"), []
    for name in ("before", "after"):
        keys = {k.replace("-", "_"): v for k, v in written("npz", tmp_path / name, values).items()}
        runs.append(
            tiny(method="fedavg", rounds=1, clients=0, model="mlp", unseen="3", validation=0.2, augment="weak", **keys)
        )
        clients = simulated.federated(configuration.from_flat(runs[0].flat), 4).partition.clients
        values = moved(values, np.concatenate([*(c.test for c in clients), clients[3].train]))
    first, second = (read_json(run.out / "inputs.json") for run in runs)
    assert first == second and first["binary"] == [False, False, False, True]
    assert runs[0].clients["train_loss"].tolist() == runs[1].clients["train_loss"].tolist()
    assert runs[0].final["received_loss"].tolist() != runs[1].final["received_loss"].tolist()


@pytest.mark.parametrize("how", ["auto", "client"])
@pytest.mark.parametrize("form", ["csv", "folder"])
def test_no_row_that_a_node_tests_has_a_say(
    form: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDAPP_CACHE", str(tmp_path / "cache"))
    values, found = drawn(form), []
    for name in ("before", "after"):
        keys = written(form, tmp_path / name, values)
        found.append(nodes.own_data(keys["data-dir"], None, DataSettings(dataset=form, validation=0.2, normalise=how)))
        trained = found[0].rows["train"][0]
        train = {row.tobytes() for row in trained}
        rows = [row.reshape(trained.shape[1:]).tobytes() not in train for row in values]
        values = moved(values, np.flatnonzero(rows))
    assert found[0].inputs == found[1].inputs
    assert not np.array_equal(found[0].rows["test"][0], found[1].rows["test"][0])


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
    for how in ("auto", "client"):
        alone = nodes.own_data(str(own), None, DataSettings(dataset="npz", validation=0.2, normalise=how))
        assert all(len(alone.rows[part][1]) for part in ("test", "validation"))
        np.testing.assert_allclose(alone.inputs.mean, by_hand(alone.rows["train"][0])[0], rtol=1e-6)
    assert nodes.own_data(str(own), None, DataSettings(dataset="npz", normalise="none")).inputs.std == (1.0, 1.0)
    with pytest.raises(BadRequest, match="real nodes do not share: choose client"):
        nodes.own_data(str(own), None, DataSettings(dataset="npz", normalise="data"))


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
