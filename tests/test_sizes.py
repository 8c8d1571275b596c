"""Clients whose samples differ in size: methods for several architectures take them, each with its own model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedapp
from fedapp import registry
from fedapp.data import datasets
from fedapp.data.card import data_card, leaks
from fedapp.data.dataset import sample
from fedapp.data.moments import moments
from fedapp.engines import local
from fedapp.errors import BadRequest
from fedapp.experiments import compare
from fedapp.learning.state import read_safetensors
from fedapp.results.runs import RunResult
from fedapp.settings import DataSettings
from fedapp.tasks import simulated
from fedapp.transport import checkpoint
from fedapp.transport.virtual import Member, asked, smallest
from tests.matrix import methods

STEPS = {"ada": 32, "bob": 48, "cleo": 32, "dan": 48, "eve": 32}
SECOND = ("fml", "fedkd")
"""Methods that share a second model, which must be the same at all clients."""
SEVERAL = sorted(m.id for m in registry.discover().values() if m.heterogeneous and not m.public_share)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAPP_CACHE", str(tmp_path / "cache"))


def windows(steps: int, seed: int, rows: int = 48, channels: int = 2) -> dict[str, Any]:
    """Series of three classes: class c is a wave of c + 1 periods."""
    rng = np.random.default_rng([seed, steps])
    y = np.arange(rows) % 3
    wave = np.sin(2 * np.pi * (y[:, None] + 1) * np.arange(steps) / steps + rng.uniform(0, 6, (rows, 1)))
    x = np.stack([seed + (c + 1) * wave for c in range(channels)], 1) + 0.2 * rng.standard_normal(
        (rows, channels, steps)
    )
    return {"x": x.astype(np.float32), "y": np.array(["walk", "run", "sit"])[y], "group": np.arange(rows) // 2}


def folder(place: Path, steps: dict[str, int] = STEPS) -> Path:
    """Write a file for each person, with windows of so many steps."""
    place.mkdir(parents=True, exist_ok=True)
    for number, (name, n) in enumerate(steps.items()):
        np.savez(place / f"{name}.npz", **windows(n, number, 48 + 6 * number))
    return place


def tables(place: Path) -> Path:
    """Write a table for each of four hospitals, of which the last two know one feature more and one less."""
    place.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(3)
    for number, name in enumerate(("east", "north", "south", "west")):
        ill = rng.integers(0, 2, 60)
        frame = {
            "age": rng.normal(50 + 9 * ill, 3),
            "pulse": rng.normal(70 + 5 * ill, 5),
            "weight": rng.normal(80, 9, 60),
        }
        if number == 2:
            frame |= {"sugar": rng.normal(5 + ill, 1), "salt": rng.normal(3 - ill, 1)}
        if number == 3:
            del frame["weight"]
        pd.DataFrame({**frame, "y": np.where(ill, "ill", "well")}).to_csv(place / f"{name}.csv", index=False)
    return place


def pictures(place: Path) -> Path:
    """Write a file of pictures for each of three clients, of which the second has larger ones."""
    place.mkdir(parents=True, exist_ok=True)
    for name, side in (("a", 8), ("b", 28), ("c", 8)):
        x = np.random.default_rng(side).integers(0, 256, (24, side, side), np.uint8)
        np.savez(place / f"{name}.npz", x=x, y=np.arange(24) % 2)
    return place


def went(place: Path, out: Path, method: str, **settings: Any) -> RunResult:
    dataset = "csv" if any(place.glob("*.csv")) else "npz"
    common = {"num_server_rounds": 2, "local_epochs": 1, "batch_size": 8}
    return fedapp.run(dataset=dataset, data_dir=str(place), method=method, out=out, **{**common, **settings})


def checked(place: Path, **settings: Any) -> simulated.FederatedData:
    dataset = "csv" if any(place.glob("*.csv")) else "npz"
    config = local.effective({"dataset": dataset, "data-dir": str(place), **settings})
    return simulated.check(config, config.data.clients)


@pytest.mark.parametrize("method", methods(m for m in SEVERAL if m not in SECOND))
def test_methods_for_several_architectures_take_clients_of_several_sizes(method: str, tmp_path: Path) -> None:
    run = went(folder(tmp_path / "data"), tmp_path / "out", method)
    assert run.ok and len(run.final) == len(STEPS) and run.final["trained_accuracy"].notna().all()
    assert run.final["received_accuracy"].notna().all() and len(run.rounds) == 2
    assert not [c for c in run.final if "balanced" in c and run.final[c].notna().any()], "no rows are common to all"
    for client, steps in enumerate(STEPS.values()):
        net = fedapp.load(run.out, client=client)
        assert net.predict(np.zeros((3, 2, steps), np.float32)).shape == (3, 3)
        with pytest.raises(BadRequest):
            net.predict(np.zeros((3, 2, steps + 16), np.float32))


def test_the_head_is_the_mean_of_heads_on_trunks_of_two_sizes(tmp_path: Path) -> None:
    run = went(folder(tmp_path / "data"), tmp_path / "out", "lgfedavg", final_training=False)
    models, counts = [], []
    for client in range(len(STEPS)):
        (path,) = (run.out / "state" / "run" / str(client)).glob("*.000002.safetensors")
        models.append(read_safetensors(path)[0])
        counts.append(run.counts[client].sum())
    head = np.average([m["model/head.weight"] for m in models], axis=0, weights=counts)
    found = checkpoint.latest(run.out / "checkpoint")
    assert found is not None
    np.testing.assert_allclose(found[1]["model"]["head.weight"], head, rtol=1e-5, atol=1e-7)
    shapes = {m["model/features.fc1.weight"].shape for m in models}
    assert shapes == {(56, 64 * 2), (56, 64 * 3)}, "one trunk for 32 steps, one for 48"
    assert "samples of 2 sizes: series of 32 steps with 2 channels (ada, cleo, eve); series of 48" in "".join(
        (run.out / "data_card.txt").read_text().splitlines()
    )


def test_alone_a_client_learns_what_it_learns_among_clients_of_its_size(tmp_path: Path) -> None:
    """The rows of the others change nothing: samples are normalised by those of the same size."""
    steps = {"ada": 32, "bob": 32, "cleo": 48}
    mixed = went(folder(tmp_path / "mixed", steps), tmp_path / "a", "local")
    alike = went(folder(tmp_path / "alike", {"ada": 32, "bob": 32}), tmp_path / "b", "local")
    columns = ["client", "trained_accuracy", "trained_loss"]
    one, two = (r.final[columns].iloc[:2] for r in (mixed, alike))
    pd.testing.assert_frame_equal(one, two, check_exact=True)


def test_architectures_go_to_clients_in_turn(tmp_path: Path) -> None:
    run = went(folder(tmp_path / "data"), tmp_path / "out", "fd", model="cnn1d,mlp")
    shapes = []
    for client in range(len(STEPS)):
        (path,) = (run.out / "state" / "run" / str(client)).glob("*.000002.safetensors")
        arrays, _ = read_safetensors(path)
        shapes.append(arrays["model/features.fc1.weight"].shape)
    assert shapes == [(56, 128), (128, 96), (56, 128), (128, 96), (56, 128)]
    with pytest.raises(BadRequest, match=r"compares representations, .* widths \[56, 64\]"):
        went(folder(tmp_path / "data"), tmp_path / "other", "fedproto", model="cnn1d,mlp")


def test_every_client_gets_a_model_that_takes_its_samples(tmp_path: Path) -> None:
    place = pictures(tmp_path)
    data = checked(place, method="fd", model="digits-a,cnn-a")
    assert [data.size_of(k).shape for k in range(3)] == [(1, 8, 8), (1, 28, 28), (1, 8, 8)]
    with pytest.raises(BadRequest, match="client b: model 'digits-a' is made for"):
        checked(place, method="fd", model="cnn-a,digits-a")
    with pytest.raises(BadRequest, match="client c: model 'moon' is made for"):
        checked(place, method="fd", model="digits-a,cnn-a,moon")


@pytest.mark.parametrize("method", ["fedavg", "fedper", "ccvr"])
def test_one_architecture_for_all_means_one_size(method: str, tmp_path: Path) -> None:
    place = folder(tmp_path / "data")
    told = (
        f"{method} needs samples of one size. Most clients have series of 32 steps with 2 channels, 2 have others: bob "
        "(series of 48 steps with 2 channels), dan (series of 48 steps with 2 channels). Bring them to one size"
    )
    with pytest.raises(BadRequest, match=re.escape(told)):
        checked(place, method=method)
    data = checked(place, method=method, **{"skip-bad": True})
    assert (
        data.partition.names == ("ada", "cleo", "eve")
        and data.dataset.skipped == ("bob", "dan")
        and not data.dataset.parts
    )
    card = data_card(data.dataset, data.partition)
    assert "left out because they cannot be used: 2 (bob, dan)" in card.text() and card.sizes == ()
    assert checked(place, method="fd", **{"skip-bad": True}).partition.names == tuple(STEPS), "fd takes all"


def test_of_equally_many_the_first_size_is_right(tmp_path: Path) -> None:
    data = checked(folder(tmp_path, {"a": 48, "b": 32}), method="fedavg", **{"skip-bad": True})
    assert data.partition.names == ("a",)


@pytest.mark.parametrize("method", SECOND)
def test_a_second_model_of_all_clients_needs_one_size(method: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"one small model, and auto is another one .* \(bob \(series of 48"):
        checked(folder(tmp_path / "series"), method=method)
    place = pictures(tmp_path / "pictures")
    with pytest.raises(BadRequest, match="small=cnn-d"):
        checked(place, method=method, model="mlp")
    run = went(place, tmp_path / "out", method, model="mlp", method_args="small=cnn-d")
    assert run.ok and len(run.final) == 3


def test_public_rows_need_one_size(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"public rows go to all clients, and .* differ in size \(bob \(series of 48"):
        checked(folder(tmp_path), method="ktpfl")


def test_a_client_of_two_sizes_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "data"
    for part, ada in (("train", 32), ("test", 48)):
        (place / part).mkdir(parents=True)
        for name, steps in (("ada", ada), ("bob", 48)):
            arrays = {key: value for key, value in windows(steps, 0).items() if key != "group"}
            np.savez(place / part / f"{name}.npz", **arrays)
    config = {"dataset": "npz", "data-dir": str(place), "method": "fd"}
    with pytest.raises(BadRequest, match="client ada would hold samples of several sizes"):
        local.effective(config)
    with pytest.raises(BadRequest, match=r"would hold samples of several sizes.* by-client"):
        checked(folder(tmp_path / "drawn"), method="fd", partition="iid", clients=3, split="holdout")


def test_columns_of_tables_are_a_size(tmp_path: Path) -> None:
    place = tables(tmp_path / "tables")
    with pytest.raises(
        BadRequest, match=r"south \(rows of 5 features, also salt, sugar\), west \(rows of 2 features, no we"
    ):
        checked(place, method="fedavg")
    run = went(place, tmp_path / "out", "lgfedavg", validation=0.2)
    assert run.ok and len(run.final) == 4
    shown = pd.read_csv(place / "south.csv").drop(columns="y")
    shown.to_csv(tmp_path / "new.csv", index=False)
    net = fedapp.load(run.out, client="south")
    assert net.inputs.features == ("age", "pulse", "weight", "sugar", "salt")
    data = datasets.load("csv", place, DataSettings(columns="x=age,pulse"))
    assert not data.parts and data.features == ("age", "pulse"), "named features are all there"


@pytest.mark.parametrize("how", ["data", "client", "none"])
def test_samples_are_normalised_by_those_of_their_size(how: str, tmp_path: Path) -> None:
    data = checked(folder(tmp_path), method="local", normalise=how, unseen="0")
    held = [data.dataset.take(c.train)[0] for c in data.partition.clients]
    of_size = {"data": [held[2], held[4]], "client": [held[2]], "none": []}[how]
    mean, std = moments(np.concatenate(of_size), 1.0) if of_size else ((0.0, 0.0), (1.0, 1.0))
    assert data.inputs_of(2).mean == pytest.approx(mean, rel=1e-6) and data.inputs_of(2).std == pytest.approx(std, 1e-6)
    assert data.inputs_of(2).shape == (2, 32) and data.inputs_of(1).shape == (2, 48)


def test_rows_of_a_data_set_of_several_sizes(tmp_path: Path) -> None:
    data = datasets.load("npz", folder(tmp_path))
    files = [windows(n, k, 48 + 6 * k) for k, n in enumerate(STEPS.values())]
    assert data.num_train == sum(len(f["y"]) for f in files) and data.classes == ("run", "sit", "walk")
    for name, want in zip(STEPS, files, strict=True):
        rows = np.flatnonzero(data.owners == data.owner_names.index(name))
        x, y = data.take(rows)
        np.testing.assert_array_equal(x, want["x"])
        assert [data.classes[label] for label in y] == list(want["y"])
    with pytest.raises(BadRequest, match="several sizes"):
        data.take(range(data.num_train))
    assert data.groups is not None and data.owners is not None
    held = {(g, o) for g, o in zip(data.groups, data.owners, strict=True)}
    assert len(held) == len(np.unique(data.groups)) == data.num_train // 2, "no group of two clients"
    half = sample(data, 0.5, np.random.default_rng(0))
    assert half.num_train == pytest.approx(data.num_train / 2, abs=2) and half.owners is not None
    for owner, name in enumerate(half.owner_names):
        x, _ = half.take(np.flatnonzero(half.owners == owner))
        assert x.shape[1:] == (2, STEPS[name]) and {r.tobytes() for r in x} <= {
            r.tobytes() for r in files[list(STEPS).index(name)]["x"]
        }


def test_copies_are_looked_for_within_a_size(tmp_path: Path) -> None:
    place = folder(tmp_path)
    copy = windows(32, 0)
    copy["x"][:] = copy["x"][0]
    np.savez(place / "ada.npz", **copy)
    data = checked(place, method="fd")
    found = leaks(data.dataset, data.partition)
    copies = len(data.partition.clients[0].test)
    assert any(text.startswith(f"{copies} of ") and "exact copies" in text for text in found)


def test_compared_methods_have_the_same_clients(tmp_path: Path) -> None:
    values = {"dataset": "npz", "data-dir": str(folder(tmp_path / "data")), "skip-bad": True}
    with pytest.raises(BadRequest, match=r"fedavg would leave out clients .* fd takes"):
        compare.run(compare.Plan(values, "fd,fedavg,local", 1), tmp_path / "out")


def test_of_each_size_one_client_is_asked_who_it_is() -> None:
    members = [Member(c, 9 - c, 3, "a", (2, 48 if c % 2 else 32)) for c in range(4)]
    assert asked(members) == {0: 0, 1: 1, 2: 0, 3: 1} and smallest(members) == [2, 3]
