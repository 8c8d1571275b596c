"""`fedapp export`: the file computes what the module computes, for any number of raw samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedapp
from fedapp.cli import app
from fedapp.errors import BadRequest
from fedapp.results import exporting


def own(folder: Path, kind: str) -> dict[str, Any]:
    """Write own data of a kind and return the run-config keys for it."""
    rng = np.random.default_rng(0)
    shape = {"series": (90, 2, 32), "table": (90, 5)}[kind]
    np.savez(folder / "d.npz", x=rng.standard_normal(shape).astype("float32") * 3 + 5, y=np.arange(90) % 3)
    return {"dataset": "npz", "data_dir": str(folder / "d.npz")}


@pytest.mark.full
@pytest.mark.parametrize("kind", ["image", "series", "table"])
def test_the_graph_is_the_module(kind: str, tiny: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tiny(method="fedclassavg", rounds=1, **(own(tmp_path, kind) if kind != "image" else {}))
    file = tmp_path / "m" / "net.pt2"
    done = CliRunner().invoke(app, ["export", str(run.out), "--client", "1", "--out", str(file)])
    assert done.exit_code == 0, done.output
    assert not [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "on 8 samples: 0\n" in done.output and "client 1, fedclassavg" in done.output
    net = fedapp.load(run.out, 1)
    extra = {"fedapp.json": ""}
    graph = torch.export.load(file, extra_files=extra).module()
    for rows in (1, 2, 5, 300):
        x = exporting.examples(net, rows)
        if kind == "table":
            x[0, 1] = torch.nan
        assert torch.allclose(graph(x), net(x), atol=1e-5) and torch.isfinite(net(x)).all(), rows
    facts = json.loads(extra["fedapp.json"])
    assert facts["classes"] == list(net.classes) and facts["kind"] == kind


def test_own_models_need_a_word_as_for_predict(tiny: Any, tmp_path: Path) -> None:
    run = tiny(method="fedavg", rounds=1, model="tests.own_nets:digits_a")
    file = tmp_path / "net.pt2"
    command = ["export", str(run.out), "--client", "0", "--out", str(file)]
    refused = CliRunner().invoke(app, command)
    assert isinstance(refused.exception, BadRequest) and '--allow "tests.own_nets:digits_a"' in str(refused.exception)
    done = CliRunner().invoke(app, [*command, "--allow", "tests.own_nets:digits_a"])
    assert done.exit_code == 0, done.output
    net = fedapp.load(run.out, 0, allow="tests.own_nets:digits_a")
    x = exporting.examples(net, 3)
    assert torch.allclose(torch.export.load(file).module()(x), net(x), atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("to", exporting.FORMATS)
@pytest.mark.parametrize("name", ["FixedBatch", "ByValue"])
def test_a_model_that_is_no_graph_says_what_to_change(name: str, to: str, tiny: Any, tmp_path: Path) -> None:
    if to == "onnx":
        pytest.importorskip("onnxscript")
    run = tiny(method="fedavg", rounds=1, model=f"tests.own_nets:{name}")
    net = fedapp.load(run.out, 0, allow=f"tests.own_nets:{name}")
    with pytest.raises(BadRequest, match=r"cannot be exported \(\w+: .*x\.flatten\(1\), not x\.view\(32, -1\)") as told:
        exporting.write(net, to, tmp_path / f"net.{to}")
    assert len(str(told.value)) < 600 and "\n" not in str(told.value) and not list(tmp_path.glob("net*"))


def test_what_cannot_be_exported_is_refused(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = fedapp.load(tiny(method="fedavg", rounds=1).out, 0)
    with pytest.raises(BadRequest, match="--to tflite: choose from"):
        exporting.write(net, "tflite", tmp_path / "x")
    (tmp_path / "file").write_text("")
    with pytest.raises(BadRequest, match="cannot be written"):
        exporting.write(net, "pt2", tmp_path / "file" / "x.pt2")
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(BadRequest, match=r"needs the package onnx: pip install 'fedapp\[onnx\]'"):
        exporting.write(net, "onnx", tmp_path / "x.onnx")
    monkeypatch.setattr(exporting, "_pt2", lambda net, path, facts, x: net(x) + 0.1)
    with pytest.raises(RuntimeError, match=r"differs from the model by 0\.1"):
        exporting.write(net, "pt2", tmp_path / "y.pt2")


@pytest.mark.parametrize("to", ["pt2", pytest.param("onnx", marks=pytest.mark.full)])
def test_a_full_disk_ends_with_a_message(to: str, tiny: Any, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: its end comes within the file too."""
    if to == "onnx":
        pytest.importorskip("onnxscript")
    resource = pytest.importorskip("resource")
    net = fedapp.load(tiny(method="fedavg", rounds=1).out, 0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(BadRequest, match=r"net\.\w+ cannot be written \(File too large\): choose another --out"):
            exporting.write(net, to, tmp_path / f"net.{to}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not [p.name for p in tmp_path.iterdir() if "net" in p.name]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["image", "series"])
def test_onnx(kind: str, tiny: Any, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    run = tiny(method="fedavg", rounds=1, **(own(tmp_path, kind) if kind != "image" else {}))
    net = fedapp.load(run.out, 0)
    assert exporting.write(net, "onnx", tmp_path / "net.onnx") < 1e-5
    assert [p.name for p in tmp_path.glob("net*")] == ["net.onnx"], "one file"
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    for rows in (1, 5):
        x = exporting.examples(net, rows)
        found = session.run(None, {"raw": x.numpy()})[0]
        assert np.allclose(found, net(x).detach().numpy(), atol=1e-5)
    facts = json.loads(session.get_modelmeta().custom_metadata_map["fedapp"])
    assert facts["classes"] == list(net.classes)
