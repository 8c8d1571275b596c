"""Raw pictures and texts at the two ends of a run on features: nodes that extract, and the model that comes back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedapp
from fedapp.bodies import extraction
from fedapp.config import from_flat
from fedapp.errors import BadRequest
from fedapp.learning.state import read_safetensors
from fedapp.tasks.node import Node, OwnDataError, node_task
from tests.test_features import SIDE, picture_body, text_body
from tests.test_nodes import start

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

COLOURS = {"blue": (30, 60, 220), "green": (40, 200, 50), "red": (220, 40, 30)}
LEVELS = "mean=127 std=128"
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
    task = node_task(from_flat(SETTINGS), Node.parse(nodes[70]), torch.device("cpu"))
    assert len(task.y_train) == 17 and made[-1] not in made[:-1], "changed files are extracted again"


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
        node_task(from_flat(SETTINGS), node, torch.device("cpu"))
    assert "\n" not in str(refused.value) and not [*(tmp_path / "cache").glob("features/*.npz")]


def test_features_are_not_extracted_from_features(tmp_path: Path) -> None:
    body = picture_body(tmp_path / "body.onnx", side=SIDE)
    place = fedapp.features(photos(tmp_path / "site", 0), body, tmp_path / "f.npz", mean=[127], std=[128]).out
    node = Node.parse({"client-id": 0, "data-path": str(place), "features-with": f"{body} {LEVELS}"})
    with pytest.raises(OwnDataError, match=r"holds features of the body \w{8}: give raw samples"):
        node_task(from_flat(SETTINGS), node, torch.device("cpu"))


def test_a_node_extracts_texts(tmp_path: Path) -> None:
    file, tokenizer, _ = text_body(tmp_path, ["alpha", "beta"])
    (tmp_path / "site.csv").write_text("q,label\n" + "alpha,a\nbeta,b\nalpha alpha,a\n" * 4, encoding="utf-8")
    values = {"client-id": 0, "data-path": str(tmp_path / "site.csv"), "features-with": f"{file} tokenizer={tokenizer}"}
    config = from_flat({**SETTINGS, "class-names": "a,b"})
    task = node_task(config, Node.parse({**values, "features-text": "q"}), torch.device("cpu"))
    assert task.inputs.shape == (4,) and len(task.y_train) + len(task.y_test) == 12
    with pytest.raises(OwnDataError, match="no column 'p'"):
        node_task(config, Node.parse({**values, "features-text": "p"}), torch.device("cpu"))
