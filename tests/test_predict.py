"""`fedapp predict`: the file alone is enough, and gives what the model gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from fedapp import server_app
from fedapp.cli import app
from fedapp.client_app import app as client_app
from fedapp.config import from_flat
from fedapp.errors import BadRequest
from fedapp.learning.evaluation import evaluate
from fedapp.results import predict
from fedapp.tasks import simulated as tasks
from fedapp.transport.local_grid import LocalGrid


class Real(LocalGrid):
    """Partition nodes as a deployed server sees them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        del self.pull_interval


def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **values: Any) -> Path:
    """Train two nodes for two rounds; returns the state folder of client 1."""
    monkeypatch.setenv("FEDAPP_STATE", str(tmp_path / "state"))
    settings = {"clients": 2, "num-server-rounds": 2, "local-epochs": 1, "out": str(tmp_path / "run"), **values}
    flat = from_flat(settings).to_flat()
    server_app.serve(Real(client_app, flat, 2), flat)
    return tmp_path / "state" / "run" / "1"


@pytest.mark.full
@pytest.mark.parametrize(
    "values",
    [
        {"method": "lgfedavg", "model": "digits-a,digits-b"},
        {"method": "fedclassavg", "model": "digits-b"},
        {"method": "ccvr", "method-args": "transform=feature clsnorm=true"},
    ],
    ids=lambda v: v["method"],
)
def test_the_kept_models_score_what_the_run_says(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pandas as pd

    folder = trained(tmp_path, monkeypatch, **values)
    task = tasks.simulated_task(from_flat({"clients": 2, **values}), 1, 2, torch.device("cpu"))
    final = pd.read_csv(tmp_path / "run" / "final.csv").set_index("client")
    for name, protocol in (("personal", "trained"), ("received", "received")):
        found = predict.read_model(folder / f"{name}.safetensors")
        assert found.classes == tuple(str(i) for i in range(10)) and found.inputs == task.inputs
        scores = evaluate(found.model, task.x_test, task.y_test, found.inputs, 10)
        assert int(scores.correct.sum()) == final.loc[1, f"{protocol}_correct"]
        p = found.predict(task.x_test.numpy())
        assert np.allclose(p.sum(1), 1, atol=1e-5)
        assert int((p.argmax(1) == task.y_test.numpy()).sum()) == final.loc[1, f"{protocol}_correct"]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = trained(tmp_path, monkeypatch, method="fedavg")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8))
    for name in ("a.png", "b.jpg"):
        image.save(tmp_path / name)
    arguments = [str(tmp_path / "a.png"), str(tmp_path / "b.jpg"), "--top", "2"]
    done = CliRunner().invoke(app, ["predict", "--model", str(folder / "personal.safetensors"), *arguments])
    assert done.exit_code == 0, done.output
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert [len(r) for r in rows] == [5, 5] and float(rows[0][2]) >= float(rows[0][4])
    # The server keeps the shared part; where that is a whole model it classifies too.
    done = CliRunner().invoke(
        app, ["predict", "--model", str(tmp_path / "run" / "models" / "last.safetensors"), *arguments]
    )
    assert done.exit_code == 0, done.output


def test_pictures_are_read_as_a_folder_of_pictures_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedapp.data import datasets
    from fedapp.data.transforms import InputSpec

    monkeypatch.setenv("FEDAPP_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        for number in range(2):
            path = tmp_path / "data" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (40 + number, 60, 3), dtype=np.uint8)).save(path)
    data = datasets.load("folder", tmp_path / "data")
    read = predict.read_images(sorted((tmp_path / "data").rglob("*.png")), InputSpec.of(data))
    assert np.array_equal(read, np.array(data.x_train))


def test_grey_levels_follow_the_data_set(tmp_path: Path) -> None:
    from fedapp.data.transforms import InputSpec

    Image.fromarray(np.array([[0, 16], [128, 255]], np.uint8)).save(tmp_path / "x.png")
    read = predict.read_images([tmp_path / "x.png"], InputSpec((1, 2, 2), 16.0, (0.3,), (0.4,)))
    assert read[0, :, :, 0].tolist() == [[0, 1], [8, 16]]


def test_files_that_are_not_models_or_pictures_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = trained(tmp_path, monkeypatch, method="lgfedavg")
    state = next(folder.glob("*.000002.safetensors"))
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    (tmp_path / "junk.png").write_bytes(b"junk")
    for path, says in (
        (tmp_path / "no", "does not exist"),
        (tmp_path / "junk.safetensors", "not a model of fedapp"),
        (state, "training state: use personal.safetensors"),
        (tmp_path / "run" / "models" / "last.safetensors", "only the shared part of lgfedavg"),
    ):
        with pytest.raises(BadRequest, match=says):
            predict.read_model(path)
    good = predict.read_model(folder / "personal.safetensors")
    for name, says in (("no.png", "does not exist"), ("junk.png", "not a picture")):
        with pytest.raises(BadRequest, match=says):
            predict.read_images([tmp_path / name], good.inputs)


def test_a_model_without_normalisation_asks_for_its_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedapp.learning.state import read_safetensors, write_safetensors

    trained(tmp_path, monkeypatch, method="fedavg")
    path = tmp_path / "run" / "models" / "last.safetensors"
    arrays, header = read_safetensors(path)
    for key in ("scale", "mean", "std", "classes"):
        header.pop(key)
    write_safetensors(path, arrays, header)
    with pytest.raises(BadRequest, match="add --dataset, one of digits"):
        predict.read_model(path)
    assert predict.read_model(path, "digits").inputs.scale == 16
