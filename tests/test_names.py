"""Names and files of own data: hidden and damaged files, parts, spellings of one name, and what a system refuses."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedapp.cli import app
from fedapp.data import datasets
from fedapp.data.names import name_of
from fedapp.errors import BadRequest
from fedapp.results import predict
from fedapp.settings import DataSettings
from fedapp.tasks import node

TABLES = ("csv", "parquet", "npz")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAPP_CACHE", str(tmp_path_factory.mktemp("cache")))


def client(path: Path, labels: Any = ("a", "b")) -> None:
    """Write the file of a client: eight rows of one feature."""
    path.parent.mkdir(parents=True, exist_ok=True)
    x, y = np.arange(8, dtype=np.float32), np.array(labels)[np.arange(8) % len(labels)]
    kind = path.suffix.lower()
    if kind == ".npz":
        with path.open("wb") as file:
            np.savez(file, x=x[:, None], y=y)
    elif kind == ".csv":
        pd.DataFrame({"x": x, "y": y}).to_csv(path, index=False)
    else:
        pd.DataFrame({"x": x, "y": y}).to_parquet(path)


def picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8), 7, np.uint8)).save(path)


@pytest.mark.parametrize("kind", TABLES)
def test_files_are_found_in_any_case_and_hidden_ones_are_none(kind: str, tmp_path: Path) -> None:
    client(tmp_path / f"north.{kind}")
    client(tmp_path / f"SOUTH.{kind.upper()}")
    client(tmp_path / f".east.{kind}")
    (tmp_path / f".#north.{kind}").symlink_to("ada@host.17:4")  # an editor's lock
    assert datasets.load(kind, tmp_path).owner_names == ("SOUTH", "north")
    assert datasets.source(tmp_path) == kind


@pytest.mark.parametrize("kind", TABLES)
def test_a_link_to_nowhere_is_named_or_left_out(kind: str, tmp_path: Path) -> None:
    client(tmp_path / f"north.{kind}")
    (tmp_path / f"east.{kind}").symlink_to("gone")
    (tmp_path / f"west.{kind}").symlink_to(f"west.{kind}")  # to itself
    with pytest.raises(BadRequest, match=rf"2 of 3 files .*east\.{kind}.*west\.{kind}.*skip-bad = true"):
        datasets.load(kind, tmp_path)
    data = datasets.load(kind, tmp_path, DataSettings(skip_bad=True))
    assert data.owner_names == ("north",) and data.skipped == (f"east.{kind}", f"west.{kind}")


@pytest.mark.parametrize("kind", [*TABLES, "folder", "hf"])
def test_what_the_system_does_not_show_is_named(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRequest, match=r"z is not (a folder|there)|zz does not exist"):
        datasets.load(kind, tmp_path / ("z" * 300))
    picture(tmp_path / "a" / "0.png")

    def closed(path: Path, **_: bool) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch, pytest.raises(BadRequest, match=rf"cannot read {tmp_path} \(Permission den"):
        patch.setattr(Path, "stat", closed)
        datasets.load(kind, tmp_path)
    if kind == "hf":
        return  # the library looks at the files
    monkeypatch.setattr(Path, "iterdir", closed)
    with pytest.raises(BadRequest, match=rf"cannot read {tmp_path} \(Permission denied\): repair it"):
        datasets.load(kind, tmp_path, DataSettings(skip_bad=True))


def test_a_node_and_a_model_name_what_is_not_there() -> None:
    with pytest.raises(BadRequest, match="does not exist on this node"):
        node.own_data("z" * 300, None, DataSettings(dataset="csv"))
    with pytest.raises(BadRequest, match="zz does not exist"):
        predict.read_model(Path("z" * 300))


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("name", ["train", "Test", "VAL"])
def test_a_part_of_the_data_is_no_client(kind: str, name: str, tmp_path: Path) -> None:
    client(tmp_path / f"north.{kind}")
    client(tmp_path / f"{name}.{kind}")
    part = {"VAL": "validation"}.get(name, name.lower())
    with pytest.raises(BadRequest, match=rf"would be the client '{name}': if it is a part .* into .*/{part}; if"):
        datasets.load(kind, tmp_path)
    (tmp_path / f"north.{kind}").unlink()
    if kind == "npz":  # one such file is all of the data
        assert datasets.load(kind, tmp_path).num_train == 8


@pytest.mark.parametrize("kind", TABLES)
def test_a_folder_called_like_a_part_is_not_left_out(kind: str, tmp_path: Path) -> None:
    client(tmp_path / "train" / f"north.{kind}")
    client(tmp_path / "Testing" / f"north.{kind}")
    with pytest.raises(BadRequest, match="Testing would not be read: call it test, or move it away"):
        datasets.load(kind, tmp_path)
    (tmp_path / "Testing").rename(tmp_path / "test")
    assert datasets.load(kind, tmp_path).num_test == 8


def test_a_file_called_like_a_part_is_no_folder(tmp_path: Path) -> None:
    client(tmp_path / "north.csv")
    (tmp_path / "test").write_text("notes")
    assert datasets.load("csv", tmp_path).owner_names == ("north",)


def test_a_picture_outside_of_the_classes_is_named_also_after_the_data_were_read(tmp_path: Path) -> None:
    for name in ("a", "b"):
        picture(tmp_path / name / "0.png")
    assert datasets.load("folder", tmp_path).num_train == 2
    picture(tmp_path / "1.png")
    with pytest.raises(BadRequest, match=r"1\.png is in no folder of a class"):
        datasets.load("folder", tmp_path)


@pytest.mark.parametrize("layout", ["Training/{}/0.png", "ada/Testing/{}/0.png"])
def test_a_folder_of_pictures_called_like_a_part_is_refused(layout: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        picture(tmp_path / layout.format(name))
        picture(tmp_path / layout.format(name).replace("Training", "Testing").replace("ada", "bob"))
    with pytest.raises(BadRequest, match=r"Testing: a part of the data is called test: rename it"):
        datasets.load("folder", tmp_path)
    if layout.startswith("Training"):
        assert datasets.load("folder", tmp_path, DataSettings(layout="clients")).owner_names == ("Testing", "Training")


NAMES = ("M\u00fcnchen", "Mu\u0308nchen")  # NFC, NFD


@pytest.mark.parametrize("form", [*TABLES, "classes", "clients"])
def test_two_encodings_of_a_name_are_one_name(form: str, tmp_path: Path) -> None:
    for name, part in zip(NAMES, ("train", "test")):
        if form in TABLES:
            client(tmp_path / part / f"{name}.{form}", [name, "b"])
        elif form == "classes":
            picture(tmp_path / name / "0.png")
        else:
            picture(tmp_path / NAMES[1] / name / "0.png")
    picture(tmp_path / "b" / "0.png") if form == "classes" else None
    kind = form if form in TABLES else "folder"
    data = datasets.load(kind, tmp_path, DataSettings(columns="x=x" if kind in ("csv", "parquet") else ""))
    assert data.owner_names == (() if form == "classes" else NAMES[:1])
    assert data.classes == (NAMES[:1] if form == "clients" else (NAMES[0], "b"))
    if form == "npz":
        client(tmp_path / "one.npz", NAMES)
        one = node.own_data(
            str(tmp_path / "one.npz"), node.federation_classes(_config(NAMES[1])), DataSettings(dataset="npz")
        )
        assert one.classes == (NAMES[0],)
    if form in TABLES:
        client(tmp_path / "train" / f"{NAMES[1]}.{form}")
    else:
        picture(tmp_path / NAMES[0] / "b" / "0.png")
    if form != "classes":  # of two such clients, only the user knows whether they are one
        with pytest.raises(BadRequest, match="have one name: rename one of them"):
            datasets.load(kind, tmp_path)


def _config(names: str) -> Any:
    from fedapp import config

    return config.from_flat({"dataset": "npz", "class-names": names})


@pytest.mark.parametrize("kind", TABLES)
def test_a_name_that_is_not_utf_8_is_named_or_left_out(kind: str, tmp_path: Path) -> None:
    client(tmp_path / f"north.{kind}")
    client(tmp_path / f"south.{kind}")
    (tmp_path / f"south.{kind}").rename(tmp_path / os.fsdecode(b"s\xfcd." + kind.encode()))
    with pytest.raises(BadRequest, match="its name is not UTF-8: rename it"):
        datasets.load(kind, tmp_path)
    assert datasets.load(kind, tmp_path, DataSettings(skip_bad=True)).owner_names == ("north",)
    assert name_of(Path("north.csv")) == "north" and name_of(Path("v1.0"), suffix=True) == "v1.0"


def test_classes_without_training_rows_are_named(tmp_path: Path) -> None:
    for part, names in (("train", "ab"), ("test", "abz")):
        for name in names:
            for i in range(8):
                picture(tmp_path / "pictures" / part / name / f"{i}.png")
        x = np.full((8 * len(names), 8, 8), 7, np.uint8)
        np.savez(tmp_path / f"{part}.npz", x=x, y=np.repeat(list(names), 8))
    both = [np.load(tmp_path / f"{part}.npz") for part in ("train", "test")]
    np.savez(tmp_path / "own.npz", **{k: np.concatenate([b[k] for b in both]) for k in "xy"},
             split=np.repeat(["train", "test"], [16, 24]))  # fmt: skip
    cards = [
        CliRunner().invoke(
            app,
            [
                "partition",
                "--dataset",
                kind,
                "--clients",
                "2",
                "--set",
                f"data-dir={place}",
                "--set",
                "partition=iid",
                "--set",
                "min-samples=1",
            ],
        )
        for kind, place in (("folder", tmp_path / "pictures"), ("npz", tmp_path / "own.npz"))
    ]
    assert all(card.exit_code == 0 for card in cards), [card.exception for card in cards]
    texts = [re.sub(r"^(folder|npz)|[0-9a-f]{12,}", "", card.output, flags=re.M) for card in cards]
    assert texts[0] == texts[1] and "no client has training images of 1 class (z)" in texts[0]


@pytest.mark.parametrize("written", [lambda p, t: p.write_text(t), lambda p, t: p.write_text("\ufeff" + t, "utf-8")])
def test_a_partition_is_shown_for_a_file_and_a_mark_at_its_start_is_no_fault(
    written: Callable[[Path, str], object], tmp_path: Path
) -> None:
    written(tmp_path / "mine.toml", 'dataset = "digits"\nclients = 2\npartition = "file"\npartition-file = "who.csv"\n')
    rows = [f"{row},{'ab'[row % 2]},{'test' if row % 8 > 5 else 'train'}" for row in range(40)]
    written(tmp_path / "who.csv", "\n".join(["row,client,split", *rows]) + "\n")
    shown = CliRunner().invoke(
        app, ["partition", str(tmp_path / "mine.toml"), "--set", f"partition-file={tmp_path / 'who.csv'}"]
    )
    assert shown.exit_code == 0 and "digits: 2 clients, partition file, split given" in shown.output
