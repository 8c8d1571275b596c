"""Own data: columns of any kind, natural clients, index files, and what runs make of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedapp
from fedapp import config as configuration
from fedapp.data import datasets, natural, partitions
from fedapp.data.card import data_card, leaks
from fedapp.data.columns import own, samples
from fedapp.data.dataset import Dataset
from fedapp.data.moments import binary, moments, rounded
from fedapp.engines import local
from fedapp.errors import BadRequest
from fedapp.results import report
from fedapp.settings import DataSettings
from fedapp.tasks import node as nodes
from fedapp.tasks import simulated
from tests.handmade import partitioned
from tests.matrix import methods

PERSONS = ("ada", "bob", "cleo", "dan")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAPP_CACHE", str(tmp_path / "cache"))


def sensors(rows: int = 240, steps: int = 32, seed: int = 0) -> dict[str, np.ndarray]:
    """Series of two channels by four persons in recordings of four windows; class c is a wave of c + 1 periods."""
    rng = np.random.default_rng(seed)
    recording = np.arange(rows) // 4
    y = recording % 3
    person = recording // 3 % 4
    wave = np.sin(2 * np.pi * (y[:, None] + 1) * np.arange(steps) / steps + rng.uniform(0, 6, (rows, 1)))
    x = np.stack([wave, 5 + 3 * wave], 1) + 0.3 * rng.standard_normal((rows, 2, steps))
    split = np.where(recording // 12 % 4 == 3, "test", "train")
    return {
        "x": x.astype(np.float32), "y": np.array(["walk", "run", "sit"])[y], "client": np.array(PERSONS)[person],
        "split": split, "group": recording,
    }  # fmt: skip


def saved(path: Path, arrays: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return path


def loaded(tmp_path: Path, arrays: dict[str, Any], name: str = "own.npz") -> Dataset:
    return datasets.load("npz", saved(tmp_path / name, arrays))


# ---- columns -------------------------------------------------------------------------------------------------------


def test_series_with_all_columns(tmp_path: Path) -> None:
    columns = sensors()
    data = loaded(tmp_path, columns)
    assert (data.kind, data.shape, data.num_classes, data.classes) == ("series", (2, 32), 3, ("run", "sit", "walk"))
    test = columns["split"] == "test"
    assert (data.num_train, data.num_test) == (int((~test).sum()), int(test.sum())) and test.any()
    order = np.concatenate([np.flatnonzero(~test), np.flatnonzero(test)])
    x, y = data.take(np.arange(240))
    assert x.dtype == np.float32 and np.array_equal(x, columns["x"][order])
    assert [data.classes[c] for c in y] == columns["y"][order].tolist()
    assert data.owners is not None and [data.owner_names[o] for o in data.owners] == columns["client"][order].tolist()
    train = columns["x"][~test].astype(np.float64)
    mean, std = moments(data.x_train, data.scale)
    np.testing.assert_allclose(mean, train.mean((0, 2)), rtol=1e-6)
    np.testing.assert_allclose(std, train.std((0, 2)), rtol=1e-6)
    assert data.scale == 1 and abs(mean[1] - 5) < 0.2


def test_a_table_has_unknown_values_and_features_of_two_values(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = np.stack([rng.normal(1e6, 2, 50), rng.integers(0, 2, 50), np.full(50, 7.0)], 1)
    x[3, 0] = x[4, 1] = np.nan
    data = loaded(tmp_path, {"x": x, "y": np.arange(50) % 2})
    assert (data.kind, data.shape, binary(data.x_train)) == ("table", (3,), (False, True, True))
    assert binary(np.full((3, 1), np.nan, np.float32)) == (True,)
    mean, std = moments(data.x_train, data.scale)
    assert std[2] == 1, "a constant feature is divided by 1"
    kept = x.astype(np.float32).astype(np.float64)
    np.testing.assert_allclose(mean, np.nanmean(kept, 0), rtol=1e-9)
    np.testing.assert_allclose(std[:2], np.nanstd(kept, 0)[:2], rtol=1e-6)


@pytest.mark.parametrize(
    ("x", "kind", "shape"),
    [
        (np.zeros((5, 12, 20), np.uint8), "image", (1, 12, 20)),
        (np.zeros((5, 12, 20, 7), np.uint8), "image", (7, 12, 20)),
        (np.zeros((5, 9), np.uint8), "table", (9,)),
        (np.zeros((5, 3, 8, 8), np.float64), "array", (3, 8, 8)),
        (np.zeros((5, 2, 3, 4, 5), np.float16), "array", (2, 3, 4, 5)),
        (np.zeros((5, 4), bool), "table", (4,)),
        (np.zeros((5, 4, 6), np.int32), "series", (4, 6)),
    ],
)
def test_type_and_axes_decide_the_kind(x: np.ndarray, kind: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    data = loaded(tmp_path, {"x": x, "y": np.arange(5) % 2})
    assert (data.kind, data.shape) == (kind, shape)
    assert data.x_train.dtype == (np.uint8 if kind == "image" else np.float32)


def test_moments_leave_test_and_validation_rows_out(tmp_path: Path) -> None:
    x = np.concatenate([np.zeros((4, 2)), np.ones((4, 2)), np.full((4, 2), 50.0), np.full((4, 2), 99.0)])
    split = np.repeat(["train", "train", "validation", "test"], 4)
    keys = {"x": x, "y": np.arange(16) % 2, "split": split, "client": np.arange(16) % 2}
    data = loaded(tmp_path, keys)
    config = configuration.from_flat({"dataset": "npz", "data-dir": str(tmp_path / "own.npz"), "min-samples": 1})
    inputs = simulated.federated(config, 2).inputs
    assert inputs.mean == (0.5, 0.5) and inputs.std == (0.5, 0.5)
    assert data.held_out is not None and data.held_out.tolist() == [False] * 8 + [True] * 4


def test_classes_by_name_have_the_given_order(tmp_path: Path) -> None:
    y = np.array(["b", "a", "b", "c"])
    x = np.zeros((4, 2), np.float32)
    data = loaded(tmp_path, {"x": x, "y": y, "class_names": np.array(["c", "b", "a"])})
    assert data.classes == ("c", "b", "a") and data.y_train.tolist() == [1, 2, 1, 0]
    with pytest.raises(BadRequest, match=r"y has 'a', which is not a class"):
        loaded(tmp_path, {"x": x, "y": y, "class_names": np.array(["c", "b"])}, "other.npz")


def test_the_last_class_may_have_test_rows_alone(tmp_path: Path) -> None:
    y = np.append(np.arange(50) % 2, np.full(10, 2))
    columns = {"x": np.arange(120, dtype=np.float32).reshape(60, 2), "y": y, "client": np.arange(60) // 5 % 2}
    data = loaded(tmp_path, {**columns, "split": np.repeat(["train", "test"], [40, 20])})
    card = data_card(data, partitioned(data, kind="by-client", split="given", clients=0, seed=0, min_samples=1))
    assert data.classes == ("0", "1", "2") and card.untrained == ("2",)
    assert card.test.tolist() == [[3, 2, 5], [2, 3, 5]]


X, Y = np.zeros((6, 3), np.float32), np.array([0, 1, 2, 0, 1, 2])
INF = X.copy()
INF[4, 1] = np.inf
NAN = np.zeros((6, 2, 5), np.float32)
NAN[2, 1, 3] = np.nan


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"x": X}, "no column 'y'"),
        ({"y": Y}, "no column 'x'"),
        ({"x": X, "y": Y[:5]}, "x has 6 rows but y has 5"),
        ({"x": X, "y": Y, "client": Y[:5]}, "x has 6 rows but client has 5"),
        ({"x": X, "y": Y, "x_train": X}, "give one of the two forms"),
        ({"x": X, "y": Y * 0.5}, "y is float64, wanted integer labels"),
        (
            {"x": X, "y": Y, "client": Y * 0.5},
            r"client is float64, wanted integers or text: write client.astype\(str\)",
        ),
        ({"x": X, "y": Y[:, None]}, r"y has shape \(6, 1\), wanted one entry per row"),
        ({"x": X, "y": Y * 2}, "no row has label 1 although the largest label is 4"),
        ({"x": X, "y": Y - 1}, "label -1 is out of range"),
        ({"x": X[:0], "y": Y[:0]}, "x has no rows"),
        ({"x": X[:, 0], "y": Y}, r"x has shape \(6,\), wanted \(N, F\) rows"),
        ({"x": X.astype(str), "y": Y}, "x is <U32, wanted numbers"),
        ({"x": INF, "y": Y}, r"x is inf at \[4, 1\] \(1 in all\): replace it by nan"),
        ({"x": NAN, "y": Y}, r"x is nan at \[2, 1, 3\] \(1 in all\): fill"),
        ({"x": X.astype(np.int64) + 2**25, "y": Y}, r"above 2\^24"),
        ({"x": X, "y": Y, "split": np.repeat(["train", "tset"], 3)}, "split has 'tset', did you mean 'test'"),
        ({"x": X, "y": Y, "split": np.repeat("test", 6)}, "split has no training rows"),
        ({"x": X, "y": Y, "client": np.array(["a", "", "b", " ", "c", "d"])}, r"row 1 has no client \(2 in all\)"),
        ({"x": X, "y": np.array(["a", "", "b", " ", "a", "b"])}, r"row 1 has no y \(2 in all\)"),
        ({"x": X, "y": Y, "class_names": np.array(["a", " ", "b"])}, "3 class_names for 3 classes: give each"),
        (
            {"x": X, "y": Y, "split": np.repeat(["train", "test"], 3), "group": np.array([1, 2, 7, 7, 4, 5])},
            r"group '7' has rows in train and in test \(1 groups in all\)",
        ),
        ({"x": np.zeros((6, 3, 9, 9), np.uint8), "y": Y}, r"channels first: write x.transpose\(0, 2, 3, 1\)"),
    ],
)
def test_wrong_columns_are_named(columns: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        own("data.npz", columns)


def test_python_objects_are_refused_with_the_way_out(tmp_path: Path) -> None:
    path = saved(tmp_path / "o.npz", {"x": X, "y": np.array(["a", None, "b", "c", "a", "b"], dtype=object)})
    with pytest.raises(BadRequest, match=r"cannot read .*array.astype\(str\)"):
        datasets.load("npz", path)


def test_other_arrays_are_ignored_and_named(tmp_path: Path) -> None:
    assert loaded(tmp_path, {"x": X, "y": Y, "weather": Y, "channel_names": X}).ignored == ("channel_names", "weather")
    folder = saved(tmp_path / "all" / "a.npz", {"x": X, "y": Y, "weather": Y}).parent
    saved(folder / "b.npz", {"x": X, "y": Y, "age": Y})
    assert datasets.load("npz", folder).ignored == ("age", "weather")


def test_images_of_bytes_are_kept_as_they_are() -> None:
    x = np.random.default_rng(0).integers(0, 256, (4, 6, 5, 2), np.uint8)
    kept, kind = samples("f", "x", x)
    assert kind == "image" and kept is x


# ---- one file per client -------------------------------------------------------------------------------------------


def test_a_file_per_client_makes_its_name_the_client(tmp_path: Path) -> None:
    for number in (2, 10, 1):
        saved(tmp_path / f"{number}.npz", {"x": X + number, "y": Y, "group": [0, 0, 1, 1, 2, 2]})
    data = datasets.load("npz", tmp_path)
    assert data.owner_names == ("1", "2", "10"), "numbers sort as numbers"
    assert data.owners is not None and data.x_train[:, 0].tolist() == [[1, 2, 10][o] for o in data.owners]
    assert data.groups is not None and len(np.unique(data.groups)) == 9, "group 0 of two clients are two groups"


def test_all_broken_files_are_named_or_left_out(tmp_path: Path) -> None:
    for name in "abcd":
        saved(tmp_path / f"{name}.npz", {"x": X, "y": Y})
    for name in "bd":
        (tmp_path / f"{name}.npz").write_bytes((tmp_path / f"{name}.npz").read_bytes()[:-30])
    saved(tmp_path / "c.npz", {"y": Y})
    with pytest.raises(BadRequest, match=r"3 of 4 files .*b\.npz.*c\.npz: no column 'x'.*d\.npz"):
        datasets.load("npz", tmp_path)
    saved(tmp_path / "c.npz", {"x": X, "y": Y})
    with pytest.raises(BadRequest, match=r"2 of 4 files .*b\.npz.*d\.npz.*skip-bad = true"):
        datasets.load("npz", tmp_path)
    data = datasets.load("npz", tmp_path, DataSettings(skip_bad=True))
    assert data.owner_names == ("a", "c") and data.skipped == ("b.npz", "d.npz") and data.num_train == 2 * len(X)
    for name in "ac":
        (tmp_path / f"{name}.npz").write_bytes(b"")
    with pytest.raises(BadRequest, match="4 of 4 files"):
        datasets.load("npz", tmp_path, DataSettings(skip_bad=True))


@pytest.mark.parametrize("kind", ["npz", "csv"])
def test_a_client_without_rows_is_named_or_left_out(kind: str, tmp_path: Path) -> None:
    for name, rows in (("ada", 6), ("bob", 0), ("cleo", 6)):
        saved(tmp_path / f"{name}.npz", {"x": X[:rows], "y": Y[:rows]})
        pd.DataFrame({"f": X[:rows, 0], "y": Y[:rows]}).to_csv(tmp_path / f"{name}.csv", index=False)
    with pytest.raises(BadRequest, match=rf"1 of 3 files .*bob\.{kind}:? .*has no rows"):
        datasets.load(kind, tmp_path)
    data = datasets.load(kind, tmp_path, DataSettings(skip_bad=True))
    assert (data.owner_names, data.skipped) == (("ada", "cleo"), (f"bob.{kind}",))


def test_the_file_of_a_client_may_name_it(tmp_path: Path) -> None:
    for name in ("a", "b"):
        saved(tmp_path / f"{name}.npz", {"x": X, "y": Y, "client": np.full(len(Y), name)})
    assert datasets.load("npz", tmp_path).owner_names == ("a", "b")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (("a.csv", "a.CSV"), "a.CSV and a.csv have one name: rename one"),
        (("train/a.csv", "train/a.CSV"), "have one name"),
        (("a.csv", "sub/b.csv"), "sub would not be read: move it away"),
        (("train/a.csv", "more/b.csv"), "more would not be read: move it away"),
        (("train/a.csv", "train/test/b.csv"), "train/test would not be read: move it away"),
        (("a.csv", "test ->"), "test is a link to nothing: repair or remove it"),
        (("train/a.csv", "test -> test"), "test is a link to nothing"),
        (("a.csv", "run/config.toml", "run/b.csv", "all/runs", "all/b.csv", "f.npz.parts/c.csv"), ""),
    ],
)
def test_files_that_would_not_be_read_are_named(made: tuple[str, ...], message: str, tmp_path: Path) -> None:
    for name in ("b.csv" if "/" not in made[0] else "train/b.csv", *made):
        link, arrow, target = name.partition(" ->")
        if arrow:
            (tmp_path / link).symlink_to(target.strip() or "gone")
        else:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("f,y\n1,0\n2,1\n")
    if message:
        with pytest.raises(BadRequest, match=message):
            datasets.load("csv", tmp_path)
    else:
        assert datasets.load("csv", tmp_path).owner_names == ("a", "b"), "of folders that the program itself wrote"


def test_integers_join_with_text_by_the_names_of_classes(tmp_path: Path) -> None:
    names = np.array(["p", "q", "r"])
    saved(tmp_path / "a.npz", {"x": X, "y": Y, "class_names": names})
    for width in (3, 2):  # the second time of two sizes
        saved(tmp_path / "b.npz", {"x": X[:, :width], "y": names[::-1][Y], "class_names": names})
        data = datasets.load("npz", tmp_path)
        assert data.classes == ("p", "q", "r") and data.y_train.tolist() == [*Y, *(2 - Y)]
    saved(tmp_path / "a.npz", {"x": X, "y": Y + 1, "class_names": names})
    with pytest.raises(BadRequest, match=r"a\.npz: label 3 is out of range"):
        datasets.load("npz", tmp_path)


def test_two_spellings_of_a_number_are_two_clients(tmp_path: Path) -> None:
    for name in ("7", "007"):
        saved(tmp_path / f"{name}.npz", {"x": X, "y": Y})
    assert datasets.load("npz", tmp_path).owner_names == ("007", "7")


def test_folders_of_files_are_the_split(tmp_path: Path) -> None:
    for part, value in (("train", 1), ("test", 3)):
        for name in ("a", "b"):
            saved(tmp_path / part / f"{name}.npz", {"x": X + value, "y": Y})
    data = datasets.load("npz", tmp_path)
    assert (data.num_train, data.num_test, data.owner_names) == (12, 12, ("a", "b"))
    assert set(data.x_train.ravel()) == {1.0} and set(data.x_test.ravel()) == {3.0}
    assert datasets.source(tmp_path) == "npz"


@pytest.mark.parametrize("kind", ["npz", "csv"])
@pytest.mark.parametrize("part", ["train", "validation", "test"])
def test_the_folder_that_is_given_is_no_split(part: str, kind: str, tmp_path: Path) -> None:
    folder = tmp_path / part
    for name in "ab":
        saved(folder / f"{name}.npz", {"x": X, "y": Y, "split": ["train"] * 4 + ["test"] * 2})
        if kind == "csv":
            columns = {"f": X[:, 0], "y": Y, "split": ["train"] * 4 + ["test"] * 2}
            pd.DataFrame(columns).to_csv(folder / f"{name}.csv", index=False)
    data = datasets.load(kind, folder)
    assert (data.num_train, data.num_test, data.owner_names, data.held_out) == (8, 4, ("a", "b"), None)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"x": X}, "b.npz: no column 'y'"),
        ({"x": X, "y": Y, "group": Y}, "b.npz has the columns x, y, group with rows of features, but 1 of 2 files has"),
        ({"x": X[:, :, None], "y": Y}, "b.npz has the columns x, y with series, but 1 of 2 files has .* with rows"),
        ({"x": X, "y": Y[:2]}, "b.npz: x has 6 rows but y has 2"),
        ({"x": X, "y": Y, "class_names": ["p", "q", "r"]}, "different class_names"),
        ({"x": X, "y": Y.astype(str)}, "y has integers in a.npz and text in b.npz: write .* or add class_names"),
        ({"x": X, "y": Y, "client": Y}, "b.npz: its name gives the client: leave out client"),
        ({"x": X, "y": Y, "y_test": Y}, "b.npz: .* leave out y_test"),
    ],
)
def test_files_that_differ_are_refused(other: dict[str, Any], message: str, tmp_path: Path) -> None:
    saved(
        tmp_path / "a.npz",
        {"x": X, "y": Y, "class_names": ["p", "q", "s"]} if "class_names" in other else {"x": X, "y": Y},
    )
    saved(tmp_path / "b.npz", other)
    with pytest.raises(BadRequest, match=message):
        datasets.load("npz", tmp_path)


# ---- natural clients -----------------------------------------------------------------------------------------------


def rows_by(data: Dataset, part: str, partition: partitions.Partition) -> list[set[str]]:
    assert data.owners is not None
    return [{data.owner_names[o] for o in data.owners[getattr(c, part)]} for c in partition.clients]


def test_each_client_holds_the_rows_of_its_owner(tmp_path: Path) -> None:
    data = loaded(tmp_path, sensors())
    partition = partitioned(data, kind="by-client", split="given", clients=0, seed=0, min_samples=1)
    assert partition.names == PERSONS and rows_by(data, "train", partition) == [{p} for p in PERSONS]
    assert rows_by(data, "test", partition) == [{p} for p in PERSONS]
    held = np.concatenate([rows for c in partition.clients for rows in (c.train, c.test)])
    assert np.array_equal(np.sort(held), np.arange(240)), "every row has one holder"
    assert all(c.train.max() < data.num_train <= c.test.min() for c in partition.clients)


@pytest.mark.parametrize("split", ["holdout", "merged"])
def test_a_cut_keeps_groups_whole_and_every_class_on_both_sides(split: str, tmp_path: Path) -> None:
    data = loaded(tmp_path, sensors(480))
    partition = partitioned(data, kind="by-client", split=split, clients=0, seed=3, min_samples=1)
    assert data.groups is not None
    for client in partition.clients:
        assert not set(data.groups[client.train]) & set(data.groups[client.test])
        assert set(data.pool_labels[client.train]) == set(data.pool_labels[client.test]) == {0, 1, 2}
        share = len(client.test) / (len(client.test) + len(client.train))
        assert 0.15 <= share <= 0.35
    again, other = (partitioned(data, kind="by-client", split=split, clients=0, seed=s, min_samples=1) for s in (3, 4))
    assert again.hash == partition.hash != other.hash
    end = data.num_train + (data.num_test if split == "merged" else 0)
    held = np.concatenate([rows for c in partition.clients for rows in (c.train, c.test)])
    assert np.array_equal(np.sort(held), np.arange(end))


def test_drawn_partitions_and_validation_keep_groups_whole_too(tmp_path: Path) -> None:
    data = loaded(tmp_path, sensors(480))
    assert data.groups is not None
    partition = partitioned(data, kind="iid", split="holdout", clients=3, seed=0)
    held = partitions.hold_out(partition, 0.3, 0, data)
    for client in held.clients:
        sides = [set(data.groups[getattr(client, part)]) for part in partitions.PARTS]
        assert all(sides) and not (sides[0] & sides[1] or sides[0] & sides[2] or sides[1] & sides[2])


def test_a_client_with_one_recording_trains_on_it() -> None:
    labels, groups, rng = np.zeros(9, np.int64), np.zeros(9, np.int64), np.random.default_rng(0)
    train, test = partitions.cut(np.arange(9), labels, groups, rng)
    assert len(train) == 9 and len(test) == 0
    train, test = partitions.cut(np.arange(9), np.arange(9), np.arange(9), rng)  # no class has a second row
    assert len(train) == 9 and len(test) == 0


@pytest.mark.parametrize("share", [0.1, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 0.8, 0.9])
def test_whole_groups_meet_any_share(share: float) -> None:
    labels, groups = np.arange(120) % 2, np.arange(120) // 2
    train, test = partitions.cut(np.arange(120), labels, groups, np.random.default_rng(0), share)
    assert abs(len(test) / 120 - share) < 0.02 and not set(groups[train]) & set(groups[test])
    assert np.array_equal(np.sort(np.concatenate([train, test])), np.arange(120))


def test_small_owners_are_left_out_and_named(tmp_path: Path) -> None:
    columns = sensors()
    columns["client"][:3] = "eve"
    data = loaded(tmp_path, columns)
    partition = partitioned(data, kind="by-client", split="given", clients=0, seed=0, min_samples=10)
    assert partition.names == PERSONS and partition.settings["left_out"] == ["eve"]
    assert "left out" in simulated_card(tmp_path / "own.npz")
    with pytest.raises(BadRequest, match=r"4 of the 5 owners .* have min-samples = 10 rows"):
        partitioned(data, kind="by-client", split="given", clients=5, seed=0, min_samples=10)


def test_fewer_clients_are_drawn_with_the_seed(tmp_path: Path) -> None:
    data = loaded(tmp_path, sensors())
    drawn = {
        partitioned(data, kind="by-client", split="given", clients=2, seed=s, min_samples=1).names for s in range(12)
    }
    assert len(drawn) > 3 and all(list(names) == sorted(names) and len(names) == 2 for names in drawn)


def test_given_validation_rows_leave_training(tmp_path: Path) -> None:
    columns = sensors()
    columns["split"] = np.where(columns["group"] // 12 % 4 == 2, "validation", columns["split"])
    saved(tmp_path / "own.npz", columns)
    config = local.effective({"dataset": "npz", "data-dir": str(tmp_path / "own.npz"), "validation": 0.5})
    data = simulated.federated(config, config.data.clients)
    assert data.dataset.held_out is not None
    held = np.concatenate([c.validation for c in data.partition.clients])
    assert np.array_equal(np.sort(held), np.flatnonzero(data.dataset.held_out)), "the data's own split wins"
    assert not np.isin(np.concatenate([c.train for c in data.partition.clients]), held).any()


def test_without_the_column_it_says_what_to_add(tmp_path: Path) -> None:
    data = loaded(tmp_path, {"x": X, "y": Y})
    with pytest.raises(BadRequest, match="needs a column client"):
        partitioned(data, kind="by-client", split="holdout", clients=0, seed=0, min_samples=1)
    with pytest.raises(BadRequest, match="add a column split, or use holdout"):
        data = loaded(tmp_path, {"x": X, "y": Y, "client": Y}, "c.npz")
        partitioned(data, kind="by-client", split="given", clients=0, seed=0, min_samples=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"partition": "by-client", "alpha": 0.1}, "alpha is for drawn partitions"),
        ({"partition": "by-client", "split": "official"}, "use given or auto"),
        ({"partition": "iid", "split": "given"}, "goes with partition = 'by-client'"),
        ({"partition": "file"}, "go together"),
        ({"partition-file": "x.json"}, "go together"),
    ],
)
def test_settings_that_contradict_natural_clients(values: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        configuration.from_flat(values)


# ---- index files ---------------------------------------------------------------------------------------------------


def test_the_three_forms_of_an_index_file_say_the_same(tmp_path: Path) -> None:
    data = loaded(tmp_path, sensors())
    partition = partitioned(data, kind="by-client", split="given", clients=0, seed=0, min_samples=1)
    partition.save(tmp_path / "partition.npz")
    listed = [
        {"name": name, **{part: getattr(c, part).tolist() for part in partitions.PARTS}}
        for name, c in zip(partition.names, partition.clients, strict=True)
    ]
    (tmp_path / "p.json").write_text(json.dumps({"clients": listed}))
    lines = [f"{row},{c['name']},{part}" for c in listed for part in partitions.PARTS for row in c[part]]
    (tmp_path / "p.csv").write_text("\n".join(["row,client,split", *lines]))
    for name in ("partition.npz", "p.json", "p.csv"):
        again = natural.from_file(data, tmp_path / name)
        assert (again.hash, again.names) == (partition.hash, PERSONS), name


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([{"train": [0, 1]}, {"train": [1, 2]}], "client 1 has row 1, which client 0 has too"),
        ([{"train": [0, 1], "test": [1]}], "client 0 has row 1 twice"),
        ([{"train": [0, 6]}], "row 6, but npz has rows 0 .. 5"),
        ([{"train": [-1]}], "row -1"),
        ([{"train": [], "test": [1]}], "has no training rows"),
        ([{"name": "a", "train": [0]}, {"name": "a", "train": [1]}], "two clients are called 'a'"),
        ([{"name": "a", "train": [0], "test": [1]}], "one group in train and in test"),
        ([{"name": "a", "train": [0.5]}], "must be a whole number"),
        ([{"name": "a", "training": [0]}], "Field required|Extra inputs"),
        ([], "at least 1 item"),
    ],
)
def test_wrong_index_files_are_refused(clients: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    data = loaded(tmp_path, {"x": X, "y": Y, "group": [0, 0, 1, 2, 3, 4]})
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"clients": clients}))
    with pytest.raises(BadRequest, match=message):
        natural.from_file(data, path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.json", "{", "cannot be read"),
        ("p.csv", "row,client\n1,a", "its columns are row, client"),
        ("p.csv", "row,client,split\n1,a,tset", "line 2: split 'tset'"),
        ("p.csv", "row,client,split\nx,a,test", "invalid literal"),
        ("p.csv", "client,split,row\nA,train", "line 2 does not have 3 cells"),
        ("p.csv", "row,client,split\n0,A,train,9", "line 2 does not have 3 cells"),
        ("p.csv", f"row,client,split\n0,{'A' * (1 << 18)},train", "cannot be read"),
        ("p.json", "[" * 100_000, "cannot be read"),
        ("p.json", f'{{"clients": [{{"train": [1{"0" * 23}]}}]}}', f"row 1{'0' * 23}, but"),
        ("p.txt", "", "wanted .npz, .json or .csv"),
    ],
)
def test_files_that_are_no_index_are_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(BadRequest, match=re.escape(message)):
        natural.from_file(loaded(tmp_path, {"x": X, "y": Y}), tmp_path / name)


def test_a_run_repeats_the_partition_that_another_saved(tmp_path: Path) -> None:
    first = fedapp.run(dataset="digits", method="local", clients=3, num_server_rounds=1, out=tmp_path / "a", seed=4)
    again = fedapp.run(
        dataset="digits", method="local", partition="file", partition_file=str(tmp_path / "a" / "partition.npz"),
        num_server_rounds=1, out=tmp_path / "b", seed=4,
    )  # fmt: skip
    assert again.config is not None and again.config.data.clients == 3
    assert first.final.drop(columns="client_seconds").equals(again.final.drop(columns="client_seconds"))


def test_leaks_are_found_and_clean_data_have_none(tmp_path: Path) -> None:
    columns = sensors()
    data = loaded(tmp_path, columns)
    partition = partitioned(data, kind="by-client", split="given", clients=0, seed=0, min_samples=1)
    assert leaks(data, partition) == []
    train, test = (np.flatnonzero(columns["split"] == part) for part in ("train", "test"))
    columns["x"][test[:3]] = columns["x"][train[:3]]
    columns["x"][test[5], :, :16] = columns["x"][train[9], :, 16:]
    copied = leaks(loaded(tmp_path, columns, "copies.npz"), partition)
    assert copied[0].startswith(f"3 of {len(test)} test rows are exact copies")
    assert copied[1].startswith(f"4 of {len(test)} test windows share a half")
    columns["x"] = columns["x"].reshape(240, 32, 2).transpose(0, 2, 1).copy()
    mixed = leaks(loaded(tmp_path, columns, "mixed.npz"), partition)
    assert "transposed and not reshaped" in mixed[-1]


# ---- runs ----------------------------------------------------------------------------------------------------------


def simulated_card(path: Path) -> str:
    from fedapp.data.card import data_card

    config = local.effective({"dataset": "npz", "data-dir": str(path)})
    data = simulated.federated(config, config.data.clients)
    return data_card(data.dataset, data.partition).text()


def test_what_the_data_decide_is_settled_before_the_run(tmp_path: Path) -> None:
    path = saved(tmp_path / "own.npz", {**sensors(), "weather": Y})
    config = local.effective({"dataset": "npz", "data-dir": str(path)})
    assert (config.data.partition, config.model.model, config.data.clients) == ("by-client", "cnn1d", 4)
    text = simulated_card(path)
    assert "partition by-client, split given" in text and all(name in text for name in PERSONS)
    assert "weather" in text
    table = saved(tmp_path / "t.npz", {"x": np.zeros((60, 3)), "y": np.arange(60) % 2})
    config = local.effective({"dataset": "npz", "data-dir": str(table)})
    assert (config.data.partition, config.model.model, config.data.clients) == (
        "dirichlet",
        "mlp",
        local.DEFAULT_CLIENTS,
    )


def test_a_run_learns_series_of_natural_clients(tmp_path: Path) -> None:
    path = saved(tmp_path / "own.npz", sensors(960))
    run = fedapp.run(
        dataset="npz", data_dir=str(path), method="fedavg", num_server_rounds=4, lr=0.05, out=tmp_path / "out"
    )
    assert len(run.final) == 4 and run.final["received_accuracy"].mean() > 0.8


def table(rows: int = 120) -> dict[str, Any]:
    """Five features, two of them one-hot, some unknown, of three hospitals."""
    rng = np.random.default_rng(1)
    y = np.arange(rows) % 3
    x = np.stack([y + rng.normal(0, 0.5, rows), rng.normal(1e3, 5, rows), y == 1, y == 2, rng.normal(0, 1, rows)], 1)
    x[rng.random((rows, 5)) < 0.05] = np.nan
    return {"x": x, "y": y, "client": np.repeat(["north", "south", "west"], rows // 3)}


@pytest.mark.parametrize("method", methods())
@pytest.mark.parametrize("kind", ["series", "table"])
def test_every_method_runs_on_series_and_tables(kind: str, method: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "own.npz", sensors(120) if kind == "series" else table())
    run = fedapp.run(
        dataset="npz", data_dir=str(path), method=method, num_server_rounds=1, local_epochs=1, out=tmp_path / "out",
        batch_size=8,
    )  # fmt: skip
    clients = 4 if kind == "series" else 3
    assert run.ok and len(run.final) == clients and run.final["trained_accuracy"].notna().all()


def test_a_node_trains_on_its_own_series_and_keeps_its_validation_rows(tmp_path: Path) -> None:
    columns = {k: v for k, v in sensors(96).items() if k != "client"}
    columns["split"] = np.where(np.arange(96) % 32 < 4, "validation", "train")
    columns["group"] = np.arange(96)
    path = saved(tmp_path / "node.npz", columns)
    node = nodes.Node.parse({"client-id": 3, "data-path": str(path)})
    for share in (0.0, 0.5):
        config = configuration.from_flat({"dataset": "npz", "validation": share, "clients": 2})
        task = nodes.node_task(config, node, torch.device("cpu"))
        assert (task.model, task.inputs.kind, task.inputs.shape) == ("cnn1d", "series", (2, 32))
        assert task.x_validation is not None and len(task.x_validation) == 12
        assert 0 < len(task.x_test) == 84 - len(task.x_train), "rows for validation are in neither of the two"
        assert torch.equal(task.x_validation, torch.from_numpy(columns["x"][columns["split"] == "validation"]))


def test_a_published_normalisation_is_for_images_alone(tmp_path: Path) -> None:
    path = saved(
        tmp_path / "node.npz", {"x": np.random.default_rng(0).normal(9, 2, (30, 1, 20)), "y": np.arange(30) % 3}
    )
    node = nodes.Node.parse({"client-id": 0, "data-path": str(path)})
    task = nodes.node_task(
        configuration.from_flat({"class-names": "0,1,2", "model": "cnn1d"}), node, torch.device("cpu")
    )
    assert task.inputs.kind == "series" and abs(task.inputs.mean[0] - 9) < 0.3


# ---- numbers far from zero -----------------------------------------------------------------------------------------


def times(form: str, place: Path, offset: float) -> dict[str, Any]:
    """Write two features at this distance from zero; the second one gives the class."""
    rng = np.random.default_rng(0)
    y = np.arange(200) % 2
    x = np.stack([rng.standard_normal(200), offset + 30 * y + rng.uniform(0, 20, 200)], 1)
    place.mkdir()
    if form == "npz":
        np.savez(place / "own.npz", x=x, y=y)
    elif form == "clients":
        for half in range(2):
            np.savez(place / f"{half}.npz", x=x[half::2], y=y[half::2])
    elif form == "series":
        np.savez(place / "own.npz", x_train=np.repeat(x[..., None], 4, 2), y_train=y)
    else:
        pd.DataFrame(x, columns=["noise", "ts"]).assign(y=y).to_csv(place / "own.csv", index=False)
    name = "csv" if form == "csv" else "npz"
    return {"name": name, "data_dir": place if form == "clients" else place / f"own.{name}"}


@pytest.mark.parametrize("form", ["npz", "series", "csv", "clients"])
def test_differences_that_float32_rounds_away_are_an_error(form: str, tmp_path: Path) -> None:
    wanted = (
        r"(x(_train)?\[:, 1\]|'ts') has numbers near 1.7e\+09 with a standard deviation of 16, which float32 rounds"
    )
    with pytest.raises(BadRequest, match=wanted):
        datasets.load(**times(form, tmp_path / "far", 1.7e9))
    assert datasets.load(**times(form, tmp_path / "near", 1e4)).num_train == 200


def test_differences_between_clients_may_be_larger_than_those_of_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for client in range(3):
        x = 1e6 * (1 + client) + 1e-3 * rng.standard_normal((20, 1))
        np.savez(tmp_path / f"{client}.npz", x=x, y=np.arange(20) % 2)
    assert datasets.load("npz", tmp_path).x_train.dtype == np.float32
    assert not rounded(np.full(9, 0.1)) and not rounded(np.array([0.3, 0.1 + 0.2])), "a constant loses nothing"


def test_rows_and_pages_have_the_clients_own_names(tmp_path: Path) -> None:
    """Whatever a name holds, it is one line in a table, no formula in a spreadsheet, and text on a page."""
    hostile = np.array(["=1+1", "<b>bob</b>", "two\nlines", "dan"])
    columns = sensors()
    columns["client"] = hostile[np.searchsorted(np.sort(PERSONS), columns["client"])]
    path = saved(tmp_path / "own.npz", columns)
    run = fedapp.run(dataset="npz", data_dir=str(path), method="local", num_server_rounds=1, out=tmp_path / "out")
    shown = ["<b>bob</b>", "=1+1", "dan", "two\\nlines"]
    assert run.final["name"].tolist() == run.clients["name"].tolist() == shown == list(run.names)
    for name in ("final.csv", "clients.csv"):
        text = (run.out / name).read_text()
        assert len(text.splitlines()) == 5 and ",'=1+1," in text, name
    rest = fedapp.run(resume=run.out, num_server_rounds=2)
    assert rest.clients["name"].tolist() == 2 * shown
    page = report.write(run.out).read_text()
    assert "1 (=1+1)" in page and "0 (&lt;b&gt;bob&lt;/b&gt;)" in page and "<b>bob" not in page


def test_clients_without_names_have_no_column_of_them(tmp_path: Path) -> None:
    run = fedapp.run(dataset="digits", method="local", clients=2, num_server_rounds=1, out=tmp_path / "out")
    assert "name" not in run.final and run.names == () and run.name_of(1) == "1"
