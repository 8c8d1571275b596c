"""Data, own code and weights that change after a run began: noticed wherever the run is used again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedapp
from fedapp import config as configuration
from fedapp.data import datasets
from fedapp.engines.local import RunResult, run
from fedapp.errors import BadRequest
from fedapp.experiments import compare, tables
from fedapp.experiments.compare import Variant
from fedapp.experiments.jobs import Job
from fedapp.tasks import identity, simulated
from tests.test_normalise import FORMS, drawn, written

Tiny = Callable[..., RunResult]
NETS = """
from torch import nn

def build(num_classes, input_shape):
    return nn.Sequential(nn.Flatten(), nn.Linear({inputs}, 8), nn.{relu}(), nn.Linear(8, num_classes))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAPP_CACHE", str(tmp_path / "cache"))


def times(place: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in place.rglob("*") if file.is_file()}


def rewritten(form: str, place: Path, values: np.ndarray) -> dict[str, Any]:
    """Write other values into the files of the same names, with the times that the files had."""
    before = times(place)
    shutil.rmtree(place)
    keys = written(form, place, values)
    for file, when in before.items():
        if file.exists():
            os.utime(file, ns=(when, when))
    return keys


def changed_one(values: np.ndarray) -> np.ndarray:
    other = values.copy()
    other[5].flat[1] += 1
    return other


def noted(keys: dict[str, Any]) -> dict[str, str]:
    config = configuration.from_flat(keys)
    datasets.load(config.data.dataset, config.data.data_dir, config.data)
    return identity.of_data(config)


# ---- what is noted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_one_changed_number_is_read_and_seen_though_size_and_time_are_the_same(form: str, tmp_path: Path) -> None:
    values = drawn(form)
    keys = written(form, tmp_path / "data", values)
    before, sizes = noted(keys), [f.stat().st_size for f in sorted(times(tmp_path / "data"))]
    assert noted(keys) == before
    rewritten(form, tmp_path / "data", changed_one(values))
    if form in ("npz", "picture"):
        assert [f.stat().st_size for f in sorted(times(tmp_path / "data"))] == sizes
    assert identity.changed(before, noted(keys)) == "data samples"


def test_names_are_noted_apart_from_numbers(tmp_path: Path) -> None:
    x, y = np.arange(40.0).reshape(20, 2), np.arange(20) % 2

    def table(text: str, rows: np.ndarray = x) -> dict[str, str]:
        lines = [text, *(f"{a},{b},{'ab'[c]},{c}" for (a, b), c in zip(rows.tolist(), y.tolist()))]
        (tmp_path / "own.csv").write_text("\n".join(lines))
        return noted({"dataset": "csv", "data-dir": str(tmp_path / "own.csv"), "min-samples": 1})

    before = table("age,pulse,y,client")
    assert identity.changed(before, table("age,weight,y,client")) == "data features"
    assert identity.changed(before, table("pulse,age,y,client", x[:, ::-1])) == "data samples, data features"

    def arrays(**more: Any) -> dict[str, str]:
        np.savez(tmp_path / "own.npz", x=x, y=y, **more)
        return noted({"dataset": "npz", "data-dir": str(tmp_path / "own.npz"), "min-samples": 1})

    before = arrays(class_names=["cat", "dog"], client=y, group=np.arange(20))
    assert identity.changed(before, arrays(class_names=["dog", "cat"], client=y, group=np.arange(20))) == "data classes"
    other = arrays(class_names=["cat", "dog"], client=1 - y, group=np.arange(20) // 2)
    assert identity.changed(before, other) == "data clients, data groups"


def test_a_run_in_the_same_process_has_the_data_that_are_there_when_it_begins(tmp_path: Path, tiny: Tiny) -> None:
    values = drawn("npz")
    keys = written("npz", tmp_path / "data", values)
    settings = {"method": "local", "dataset": "npz", "data_dir": keys["data-dir"], "rounds": 1, "clients": 0}
    first = tiny(**settings)
    rewritten("npz", tmp_path / "data", 2 * values)
    second, third = tiny(**settings), tiny(**settings)
    means = [json.loads((r.out / "inputs.json").read_text())["mean"] for r in (first, second)]
    assert means[1] == [2 * mean for mean in means[0]]
    assert identity.data_hash(first.versions) != identity.data_hash(second.versions)
    assert identity.data_hash(second.versions) == identity.data_hash(third.versions) != ""


def test_another_partition_file_of_the_same_name_is_read_again(tmp_path: Path) -> None:
    keys = {"dataset": "digits", "partition": "file", "partition-file": str(tmp_path / "p.json"), "split": "given"}
    for rows in ([0, 1, 2], [3, 4, 5]):
        clients = [{"name": "a", "train": rows, "test": [9]}]
        (tmp_path / "p.json").write_text(json.dumps({"clients": clients}))
        data = simulated.federated(configuration.from_flat(keys), 1)
        assert data.partition.clients[0].train.tolist() == rows


# ---- where it is compared ------------------------------------------------------------------------------------------


def test_a_run_on_other_data_is_neither_resumed_nor_compared(tmp_path: Path, tiny: Tiny) -> None:
    values = drawn("npz")
    keys = written("npz", tmp_path / "data", values)
    there = tiny(method="fedavg", dataset="npz", data_dir=keys["data-dir"], rounds=1, clients=0, model="mlp")
    files = {path: path.read_bytes() for path in there.out.iterdir() if path.is_file()}
    config = configuration.from_flat(there.flat).replaced(out=str(there.out))
    assert compare.standing(config) == "done"
    rewritten("npz", tmp_path / "data", changed_one(values))
    with pytest.raises(BadRequest, match=r"began these have changed \(SHA-256\): data samples. Put the former"):
        run(resume=there.out, rounds=2)
    assert {path: path.read_bytes() for path in files} == files
    with pytest.raises(BadRequest, match=r"have changed \(SHA-256\): data samples.* or give a new --out"):
        compare.standing(config)
    assert len(fedapp.load(there.out).classes) == 2, "a stored model needs no data"
    rewritten("npz", tmp_path / "data", values)
    assert len(run(resume=there.out, rounds=2).rounds) == 2


def job(result: RunResult, label: str) -> Job:
    config = configuration.from_flat(result.flat).replaced(out=str(result.out))
    return Job(Variant(label, result.method), "", 0, config)


def test_runs_of_a_table_must_have_the_same_data(tmp_path: Path, tiny: Tiny) -> None:
    values = drawn("npz")
    keys = written("npz", tmp_path / "data", values)
    settings = {"dataset": "npz", "data_dir": keys["data-dir"], "rounds": 1, "clients": 0}
    first, second = tiny(method="local", **settings), tiny(method="fedavg", **settings)
    rewritten("npz", tmp_path / "data", changed_one(values))
    third = tiny(method="fedavg", **settings)
    shared = tables.verify([job(first, "a"), job(second, "b")])
    assert shared.ok and "the same data and the same clients" in shared.lines[0]
    shared = tables.verify([job(first, "a"), job(third, "c")])
    assert not shared.ok and "NOT COMPARABLE, seed 0: data differ" in shared.lines[0]
    forget(second.out)
    shared = tables.verify([job(first, "a"), job(second, "b")])
    assert shared.ok and "the same division of the data" in shared.lines[0] and "made runs of b" in shared.lines[1]


def forget(out: Path) -> None:
    """Make a run directory as versions wrote it that noted no data."""
    versions = json.loads((out / "versions.json").read_text())
    kept = {k: v for k, v in versions.items() if not k.startswith("data ")}
    (out / "versions.json").write_text(json.dumps(kept))


def test_a_warm_start_refuses_states_of_other_class_names(tmp_path: Path, tiny: Tiny) -> None:
    x, y = np.arange(400.0).reshape(80, 5) % 7, np.arange(80) % 2
    settings = {"method": "fedavg", "dataset": "npz", "data_dir": str(tmp_path / "own.npz"), "rounds": 1, "clients": 2}
    shared = {**settings, "model": "mlp", "partition": "iid", "state_dir": str(tmp_path / "state")}
    np.savez(tmp_path / "own.npz", x=x, y=y, class_names=["cat", "dog"])
    tiny(**shared)
    np.savez(tmp_path / "own.npz", x=x + 1, y=y, class_names=["cat", "dog"])
    tiny(warm_start=True, **shared)
    np.savez(tmp_path / "own.npz", x=x, y=y, class_names=["dog", "cat"])
    with pytest.raises(Exception, match="was made with other names of classes than there are now"):
        tiny(warm_start=True, **shared)


# ---- own code and stored weights -----------------------------------------------------------------------------------


def test_changed_code_of_an_own_model_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Tiny) -> None:
    file = tmp_path / "identitynets.py"
    file.write_text(NETS.format(inputs=64, relu="ReLU"))
    monkeypatch.syspath_prepend(str(tmp_path))
    model = "identitynets:build"
    there = tiny(method="fedavg", model=model, rounds=1, keep_models=True)
    config = configuration.from_flat(there.flat).replaced(out=str(there.out))
    assert compare.standing(config) == "done"
    fedapp.load(there.out, client=0, allow=model)
    file.write_text(NETS.format(inputs=64, relu="Tanh"))
    wanted = r"have changed \(SHA-256\): code of identitynets"
    with pytest.raises(BadRequest, match=wanted):
        run(resume=there.out, rounds=2)
    with pytest.raises(BadRequest, match=wanted):
        compare.standing(config)
    kept = there.out / "models" / "clients"
    for client in (0, None):
        with pytest.raises(BadRequest, match=wanted):
            fedapp.load(there.out, client=client, allow=model)
    shutil.rmtree(kept)
    with pytest.raises(BadRequest, match=wanted):
        fedapp.load(there.out, client=0, allow=model)


def test_replaced_weights_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Tiny) -> None:
    (tmp_path / "identityweights.py").write_text(NETS.format(inputs=64, relu="ReLU"))
    monkeypatch.syspath_prepend(str(tmp_path))
    arrays = {"1.weight": torch.ones(8, 64), "1.bias": torch.ones(8)}
    file, model = tmp_path / "w.pt", "identityweights:build"
    torch.save(arrays, file)
    stat = file.stat()
    there = tiny(method="fedavg", model=model, weights=str(file), freeze="features", rounds=1, keep_models=False)
    fedapp.load(there.out, allow=model)
    torch.save({name: 2 * value for name, value in arrays.items()}, file)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(BadRequest, match=r"have changed \(SHA-256\): weights. Put"):
        run(resume=there.out, rounds=2)
    with pytest.raises(BadRequest, match="was made with other weights than"):
        fedapp.load(there.out, allow=model)
    config = configuration.from_flat(there.flat).replaced(out=str(there.out))
    with pytest.raises(BadRequest, match=r"have changed \(SHA-256\): weights"):
        compare.standing(config)


def test_a_second_model_and_a_method_of_ones_own_are_code_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "identitysmall.py").write_text(NETS.format(inputs=64, relu="ReLU"))
    monkeypatch.syspath_prepend(str(tmp_path))
    config = configuration.from_flat({"method": "fml", "method-args": "small=identitysmall:build"})
    assert [*identity.of_files(config)] == ["code of identitysmall"]
    assert not identity.of_files(configuration.from_flat({"method": "fedavg"}))


def test_the_data_set_says_what_it_is_whatever_part_of_it_is_used() -> None:
    data = datasets.load("digits")
    assert set(data.identity) == {"samples", "labels", "features", "classes", "clients", "groups"}
    assert replace(data, x_train=data.x_train[:5]).identity == data.identity
