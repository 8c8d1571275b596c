"""Own data as data sets of the library `datasets`."""

from __future__ import annotations

import io
import os
import re
import socket
import zipfile
from pathlib import Path
from typing import Any

import datasets as library
import numpy as np
import pyarrow.parquet as parquet
import pytest
from datasets import Array2D, Array3D, ClassLabel, DatasetDict, Features, Image, List, Value
from PIL import Image as Pictures

from fedapp.data import hub
from fedapp.data.dataset import Dataset
from fedapp.data.datasets import load, source
from fedapp.errors import BadRequest
from fedapp.models import zoo
from fedapp.settings import DataSettings
from tests.test_hostile_text import POSTSCRIPT

PERSONS = ["ada", "bob", "cleo"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAPP_CACHE", str(tmp_path / "cache"))


def content(rows: int = 12, seed: int = 0) -> dict[str, list[Any]]:
    rng = np.random.default_rng(seed)
    return {
        "signal": list(rng.standard_normal((rows, 2, 5)).astype("float32")),
        "age": rng.standard_normal(rows).astype("float32").tolist(),
        "eyes": [("blue", "brown")[i % 2] for i in range(rows)],
        "photo": [Pictures.fromarray(rng.integers(0, 256, (10, 10, 3), dtype=np.uint8)) for _ in range(rows)],
        "pair": list(rng.standard_normal((rows, 3)).astype("float32")),
        "activity": [(2, 0, 1)[i % 3] for i in range(rows)],
        "person": [PERSONS[i % 3] for i in range(rows)],
    }


def made(values: dict[str, list[Any]], *names: str) -> Any:
    kinds = {
        "signal": Array2D((2, 5), "float32"), "age": Value("float32"), "eyes": Value("string"), "photo": Image(),
        "pair": List(Value("float32")), "activity": ClassLabel(names=["walk", "run", "sit"]), "person": Value("string"),
    }  # fmt: skip
    names = (*names, "activity", "person")
    features = Features({name: kinds[name] for name in names})
    return library.Dataset.from_dict({name: values[name] for name in names}, features=features)


def loaded(place: Path, data: Any, columns: str = "y=activity client=person", **options: Any) -> Dataset:
    data.save_to_disk(str(place))
    assert source(place) == "hf"
    return load("hf", place, DataSettings(columns=columns, **options))


def test_arrays_classes_and_clients_are_equal_to_the_last_bit(tmp_path: Path) -> None:
    values = content()
    data = loaded(tmp_path / "ds", made(values, "signal", "age"))
    assert (data.kind, data.shape, data.classes) == ("series", (2, 5), ("walk", "run", "sit"))
    assert np.array_equal(data.x_train, np.stack(values["signal"])) and data.x_train.dtype == np.float32
    assert data.y_train.tolist() == values["activity"] and data.ignored == ("age",)
    assert data.owners is not None and [data.owner_names[o] for o in data.owners] == values["person"]


def test_parts_are_the_split(tmp_path: Path) -> None:
    parts = {part: content(12, seed) for seed, part in enumerate(["test", "train", "validation"])}
    data = loaded(tmp_path / "ds", DatasetDict({part: made(v, "signal") for part, v in parts.items()}))
    assert np.array_equal(data.x_test, np.stack(parts["test"]["signal"]))
    wanted = [*parts["train"]["signal"], *parts["validation"]["signal"]]
    assert np.array_equal(data.x_train, np.stack(wanted))
    assert data.held_out is not None and data.held_out.tolist() == [False] * 12 + [True] * 12
    with pytest.raises(BadRequest, match="a split 'tests', did you mean 'test'"):
        loaded(tmp_path / "odd", DatasetDict({"tests": made(content(), "signal")}))
    for part in ("test", "validation"):
        with pytest.raises(BadRequest, match=f"'split' has no row 'train', but {part}: write"):
            loaded(tmp_path / part, DatasetDict({part: made(content(), "age")}))


def test_pictures_are_equal_and_brought_to_a_size(tmp_path: Path) -> None:
    values = content()
    data = loaded(tmp_path / "ds", made(values, "photo"))
    assert data.kind == "image" and np.array_equal(data.x_train, np.stack([np.asarray(p) for p in values["photo"]]))
    assert load("hf", tmp_path / "ds", DataSettings(columns="y=activity", image_size=5)).shape == (3, 5, 5)
    values["photo"][7] = None
    with pytest.raises(BadRequest, match="column photo: row 7 has no picture"):
        loaded(tmp_path / "odd", made(values, "photo"))


def test_broken_pictures_are_named_together_or_left_out(tmp_path: Path) -> None:
    values = content()
    whole = [np.asarray(p) for p in values["photo"]]
    stream = io.BytesIO()
    values["photo"][6].save(stream, "png")
    values["photo"][2] = {"bytes": b"no picture", "path": None}
    values["photo"][6] = {"bytes": stream.getvalue()[:-40], "path": None}
    values["photo"][9] = None
    columns = "y=activity client=person"
    with pytest.raises(
        BadRequest, match=r"row 2 has a picture that .*no known format.*row 6 .*row 9 has no p"
    ) as found:
        loaded(tmp_path / "ds", made(values, "photo"))
    assert "skip-bad = true" in str(found.value) and "0x" not in str(found.value)
    data = load("hf", tmp_path / "ds", DataSettings(columns=columns, skip_bad=True))
    left = [i for i in range(12) if i not in (2, 6, 9)]
    assert data.skipped == ("row 2", "row 6", "row 9") and np.array_equal(
        data.x_train, np.stack([whole[i] for i in left])
    )
    assert data.y_train.tolist() == [values["activity"][i] for i in left] and data.owners is not None
    assert [data.owner_names[o] for o in data.owners] == [values["person"][i] for i in left]
    parts = {part: made(values, "photo").select(rows) for part, rows in (("train", range(8)), ("test", range(8, 12)))}
    DatasetDict(parts).save_to_disk(str(tmp_path / "parts"))
    data = load("hf", tmp_path / "parts", DataSettings(columns=columns, skip_bad=True))
    assert (len(data.x_train), len(data.x_test), data.skipped) == (6, 3, ("row 2", "row 6", "row 9"))
    values["photo"] = [None if values["activity"][i] == 1 else values["photo"][i] for i in range(12)]
    made(values, "photo").save_to_disk(str(tmp_path / "class"))
    with pytest.raises(BadRequest, match="class 'run' has no row left for training"):
        load("hf", tmp_path / "class", DataSettings(columns=columns, skip_bad=True))


def test_lists_of_equal_length_are_features(tmp_path: Path) -> None:
    values = content()
    data = loaded(tmp_path / "ds", made(values, "pair", "age"))
    assert data.kind == "table" and np.array_equal(data.x_train, np.stack(values["pair"]))
    values["pair"][3] = values["pair"][3][:2]
    with pytest.raises(BadRequest, match="column pair: its rows have different lengths"):
        loaded(tmp_path / "odd", made(values, "pair"))


@pytest.mark.parametrize("form", ["disk", "file", "folder"])
def test_single_values_are_a_table(form: str, tmp_path: Path) -> None:
    values = content()
    table = made(values, "age", "eyes")
    place = tmp_path / "ds"
    columns = "x=age,eyes y=activity client=person"
    if form == "disk":
        data = loaded(place, table, columns)
    else:
        place.mkdir()
        table.to_parquet(str(place / "train.parquet"))
        data = load("hf", place / "train.parquet" if form == "file" else place, DataSettings(columns=columns))
    assert data.features == ("age", "eyes=blue", "eyes=brown") and data.classes == ("walk", "run", "sit")
    assert np.array_equal(data.x_train[:, 0], np.array(values["age"], np.float32))
    assert data.x_train[:, 1].tolist() == [1, 0] * 6 and data.y_train.tolist() == values["activity"]


def test_a_picture_of_another_format_starts_no_program(tmp_path: Path, ghostscript: Path) -> None:
    """Pillow hands PostScript to Ghostscript."""
    values = content()
    values["photo"][4] = {"bytes": POSTSCRIPT, "path": None}
    with pytest.raises(BadRequest, match=r"row 4 has a picture that .*no known format"):
        loaded(tmp_path / "ds", made(values, "photo"))
    assert not ghostscript.exists()


def at(tmp_path: Path, row: int, path: str) -> Path:
    """Write a data set whose pictures are bytes, but for one that lies at a path."""
    values = content()
    values["photo"][row] = {"bytes": None, "path": path}
    data = made(values, "photo").cast_column("photo", Image(decode=False))
    place = tmp_path / "ds"
    place.mkdir()
    # The library's own writers would fetch the picture.
    parquet.write_table(data.data.table.cast(data.features.arrow_schema), place / "train.parquet")
    return place


def test_a_picture_in_an_archive_is_read_if_its_format_starts_no_program(tmp_path: Path, ghostscript: Path) -> None:
    picture = np.random.default_rng(5).integers(0, 256, (10, 10, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Pictures.fromarray(picture).save(stream, "PNG")
    with zipfile.ZipFile(tmp_path / "p.zip", "w") as archive:
        archive.writestr("a.png", stream.getvalue())
        archive.writestr("b.png", POSTSCRIPT)
    columns = DataSettings(columns="x=photo y=activity client=person", image_size=0)
    (tmp_path / "good").mkdir()
    data = load("hf", at(tmp_path / "good", 4, f"zip://a.png::{tmp_path / 'p.zip'}"), columns)
    assert data.num_train == 12 and any(np.array_equal(row, picture) for row in data.x_train)
    (tmp_path / "bad").mkdir()
    with pytest.raises(BadRequest, match=r"row 4 has a picture that .*no known format"):
        load("hf", at(tmp_path / "bad", 4, f"zip://b.png::{tmp_path / 'p.zip'}"), columns)
    assert not ghostscript.exists()


@pytest.mark.parametrize(
    "path",
    ["http://127.0.0.1:{}/a.png", "zip://a.png::http://127.0.0.1:{}/p.zip", "hf://datasets/o/n/a.png", "memory://a"],
)
def test_data_of_ones_own_fetch_no_picture(path: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        place = at(tmp_path, 4, path.format(server.getsockname()[1]))
        with pytest.raises(BadRequest, match=r"row 4 has a picture .*nothing is fetched from"):
            load("hf", place, DataSettings(columns="x=photo y=activity client=person"))
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize(("path", "words"), [("/dev/zero", "no file"), ("{}/pipe", "no file"), ("{}/big", "1 MiB")])
def test_no_picture_is_read_without_end(path: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device and a pipe have no end, and a file in an archive may be much longer than it looks."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "big").write_bytes(bytes((1 << 20) + 1))
    monkeypatch.setattr(hub, "MOST_ENCODED", 1 << 20)
    with pytest.raises(BadRequest, match=f"row 4 has a picture .*{words}"):
        load("hf", at(tmp_path, 4, path.format(tmp_path)), DataSettings(columns="x=photo y=activity client=person"))


def test_a_folder_of_pictures_with_a_table_of_clients(tmp_path: Path) -> None:
    lines = ["file_name,person,label"]
    grey = np.random.default_rng(0).integers(0, 256, (4, 9, 9), dtype=np.uint8)
    for i, picture in enumerate(grey):
        Pictures.fromarray(picture).save(tmp_path / f"{i}.png")
        lines.append(f"{i}.png,{PERSONS[i % 2]},{'ab'[i // 2]}")
    (tmp_path / "metadata.csv").write_text("\n".join(lines) + "\n")
    data = load("hf", tmp_path, DataSettings(columns="client=person"))
    assert np.array_equal(data.x_train[..., 0], grey) and data.classes == ("a", "b")
    assert data.owners is not None and data.owners.tolist() == [0, 1, 0, 1]
    (tmp_path / "test").symlink_to("gone")
    with pytest.raises(BadRequest, match="test is a link to nothing"):
        load("hf", tmp_path, DataSettings(columns="client=person"))


def alone(place: Path, kind: Any, rows: list[Any], **options: Any) -> Dataset:
    """Load a data set with one column x and classes."""
    features = Features({"x": kind, "y": ClassLabel(names=["a", "b"])})
    values = {"x": rows, "y": [i % 2 for i in range(len(rows))]}
    return loaded(place, library.Dataset.from_dict(values, features=features), "y=y", **options)


@pytest.mark.parametrize(
    ("kind", "shape", "read"),
    [
        (Array2D((28, 28), "uint8"), (28, 28), ("image", (1, 28, 28), "cnn")),
        (Array3D((28, 28, 3), "uint8"), (28, 28, 3), ("image", (3, 28, 28), "cnn")),
        (List(List(Value("uint8"))), (28, 28), ("image", (1, 28, 28), "cnn")),
        (List(Value("uint8")), (6,), ("table", (6,), "mlp")),
        (Array2D((28, 28), "int16"), (28, 28), ("series", (28, 28), "cnn1d")),
    ],
)
def test_numbers_of_a_byte_are_read_as_from_an_npz_file(
    kind: Any, shape: tuple[int, ...], read: tuple[str, tuple[int, ...], str], tmp_path: Path
) -> None:
    x = np.random.default_rng(0).integers(0, 256, (8, *shape)).astype("int16" if "int16" in str(kind) else "uint8")
    data = alone(tmp_path / "ds", kind, list(x))
    np.savez(tmp_path / "own.npz", x=x, y=np.array(["a", "b"] * 4))
    other = load("npz", tmp_path / "own.npz")
    assert (data.kind, data.shape, zoo.default_model(data.shape)) == read == (other.kind, other.shape, read[2])
    assert np.array_equal(data.x_train, other.x_train) and data.x_train.dtype == other.x_train.dtype


@pytest.mark.parametrize("kind", [List(Value("float32")), Array2D((2, 3), "uint8"), List(Value("uint8"), length=4)])
def test_rows_without_an_array_are_named_or_left_out(kind: Any, tmp_path: Path) -> None:
    one = np.ones((2, 3), "uint8") if isinstance(kind, Array2D) else [1, 2, 3, 4]
    with pytest.raises(BadRequest, match=r"column x: row 2 is empty \(2 in all\): fill .* skip-bad = true"):
        alone(tmp_path / "ds", kind, [one, one, None, one, None])
    data = load("hf", tmp_path / "ds", DataSettings(columns="y=y", skip_bad=True))
    assert data.skipped == ("row 2", "row 4") and data.y_train.tolist() == [0, 1, 1]
    assert data.x_train.dtype == (np.uint8 if isinstance(kind, Array2D) else np.float32)
    with pytest.raises(BadRequest, match="different lengths"):
        alone(tmp_path / "odd", List(List(Value("float32"))), [[[1, 2]], [[None]]])


@pytest.mark.parametrize(
    ("name", "kind", "other"),
    [
        ("age", Value("float32"), Value("float64")),
        ("activity", ClassLabel(names=["walk", "run", "sit"]), ClassLabel(names=["sit", "walk", "run"])),
        ("activity", ClassLabel(names=["walk", "run", "sit"]), Value("int64")),
    ],
)
def test_splits_of_different_types_are_named(name: str, kind: Any, other: Any, tmp_path: Path) -> None:
    data = made(content(), "age")
    parts = DatasetDict(train=data, test=data.cast_column(name, other))
    told = re.escape(f"the column '{name}' is {kind} in the split train and {other} in test: give it one type")
    with pytest.raises(BadRequest, match=told):
        loaded(tmp_path / "ds", parts)


def test_splits_are_compared_with_one_another(tmp_path: Path) -> None:
    data = made(content(), "age", "eyes")
    parts = DatasetDict(train=data.remove_columns("eyes"), validation=data, test=data.remove_columns("eyes"))
    parts["test"] = parts["test"].add_column("eyes", [1] * 12)
    with pytest.raises(BadRequest, match=r"'eyes' is .*string.* in the split validation and .*int64.* in test"):
        loaded(tmp_path / "ds", parts)


@pytest.mark.parametrize("names", [["1.0", "2.0"], ["0.5", "1.5"], ["cat ", " dog"]])
@pytest.mark.parametrize("x", ["age", "pair"])
def test_names_of_classes_stay_as_given(x: str, names: list[str], tmp_path: Path) -> None:
    data = made(content(), x).cast_column("activity", Value("int64"))
    data = data.map(lambda row: {"activity": row["activity"] % 2}).cast_column("activity", ClassLabel(names=names))
    found = loaded(tmp_path / "ds", data)
    assert found.classes == tuple(names) and found.y_train.tolist() == [c % 2 for c in content()["activity"]]


def test_two_forms_of_one_name_are_one_column_too_many(tmp_path: Path) -> None:
    data = library.Dataset.from_dict({"M\u00fc": [1.0, 2.0], "Mu\u0308": [1.0, 2.0], "y": ["a", "b"]})
    with pytest.raises(BadRequest, match="several columns are called 'M\u00fc'"):
        loaded(tmp_path / "ds", data, "y=y")


def test_a_missing_entry_is_found_first(tmp_path: Path) -> None:
    values = content()
    values["person"][7] = values["person"][9] = None
    with pytest.raises(BadRequest, match=r"row 7 has no client \(column 'person' is empty, 2 in all\)"):
        loaded(tmp_path / "ds", made(values, "signal"))
    values = content()
    for unknown in (None, -1):  # -1 is how test sets without labels are published
        values["activity"][5] = unknown
        with pytest.raises(BadRequest, match="row 5 has no y"):
            loaded(tmp_path / f"dt{unknown}", made(values, "age"))


@pytest.mark.parametrize(
    ("names", "columns", "message"),
    [
        (["signal", "photo"], "y=activity", r"signal, photo could all be x: give columns = .x=NAME"),
        (["signal", "age"], "x=signal,age y=activity", "signal, age could all be x"),
        (["signal"], "y=activty client=persn", r"no column 'activty' .did .*'persn' .did .*\(2 in all\)"),
        (["signal"], "", "no column y, label or target for the classes"),
    ],
)
def test_wrong_columns_say_what_to_do(names: list[str], columns: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=message):
        loaded(tmp_path / "ds", made(content(), *names), columns)


def test_nothing_is_fetched_unless_it_says_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []

    def fetched(name: str, revision: str | None = None) -> Any:
        asked.append((name, revision))
        return DatasetDict({"train": made(content(), "signal")})

    monkeypatch.setattr(library, "load_dataset", fetched)
    with pytest.raises(BadRequest, match=r"somebody/waves is not there\).* hub:owner/name"):
        load("hf", "somebody/waves", DataSettings(columns="y=activity"))
    assert not asked
    assert load("hf", "hub:somebody/waves@v2", DataSettings(columns="y=activity")).num_train == 12
    assert asked == [("somebody/waves", "v2")]


def test_a_damaged_data_set_is_an_error(tmp_path: Path) -> None:
    made(content(), "signal").save_to_disk(str(tmp_path / "ds"))
    (tmp_path / "ds" / "data-00000-of-00001.arrow").write_bytes(b"no")
    with pytest.raises(BadRequest, match="cannot read the data set"):
        load("hf", tmp_path / "ds", DataSettings(columns="y=activity"))
    assert hub.identity(str(tmp_path / "ds"))["files"]
