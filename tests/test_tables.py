"""Own data as tables: CSV and Parquet files."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pyarrow.lib
import pytest

import fedapp
from fedapp import config as configuration
from fedapp.data import datasets, tables
from fedapp.data.dataset import Dataset
from fedapp.data.names import roles
from fedapp.data.transforms import InputSpec
from fedapp.engines import local as engine
from fedapp.errors import BadRequest
from fedapp.settings import DataSettings
from fedapp.tasks import node


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAPP_CACHE", str(tmp_path / "cache"))


def patients(rows: int = 120, seed: int = 0) -> Any:
    """A table of four hospitals: two numeric features, one of yes and no, one of text, and columns of other names."""
    rng = np.random.default_rng(seed)
    ill = rng.integers(0, 2, rows)
    return pd.DataFrame(
        {
            "age": rng.normal(50 + 10 * ill, 3, rows),
            "pulse": np.where(rng.random(rows) < 0.1, np.nan, rng.normal(70, 5, rows)),
            "smoker": rng.random(rows) < 0.4,
            "blood": rng.choice(["0", "A", "AB", "B-"], rows),
            "diagnosis": np.where(ill, "ill", "well"),
            "hospital": np.array(["Nord", "NA", "007", "7"])[np.arange(rows) % 4],
            "part": np.where(np.arange(rows) // 4 % 3 == 2, "test", "train"),
            "visit": np.arange(rows) // 2,
        }
    )


ROLES = "y=diagnosis client=hospital split=part"


def loaded(tmp_path: Path, frame: Any, columns: str = ROLES, kind: str = "csv", **options: Any) -> Dataset:
    path = tmp_path / f"table.{kind}"
    if kind == "csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path)
    return datasets.load(kind, path, DataSettings(columns=columns, **options))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_every_other_numeric_column_is_a_feature_to_the_last_bit(kind: str, tmp_path: Path) -> None:
    frame = patients()
    data = loaded(tmp_path, frame, kind=kind)
    assert (data.kind, data.shape, data.classes) == ("table", (4,), ("ill", "well"))
    assert data.features == ("age", "pulse", "smoker", "visit") and data.ignored == ("blood",)
    test = (frame["part"] == "test").to_numpy()
    order = np.concatenate([np.flatnonzero(~test), np.flatnonzero(test)])
    x, y = data.take(np.arange(len(frame)))
    wanted = frame[list(data.features)].to_numpy(np.float64, na_value=np.nan).astype(np.float32)[order]
    np.testing.assert_array_equal(x, wanted)
    assert np.isnan(x[:, 1]).any()
    assert [data.classes[c] for c in y] == frame["diagnosis"].to_numpy()[order].tolist()
    assert data.owners is not None
    # 007 and 7 are two owners, and NA is no empty cell.
    assert [data.owner_names[o] for o in data.owners] == frame["hospital"].to_numpy()[order].tolist()


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_text_is_one_feature_per_category_of_the_training_rows(kind: str, tmp_path: Path) -> None:
    frame = patients()
    train = np.flatnonzero(frame["part"] == "train")
    test = np.flatnonzero(frame["part"] == "test")
    frame.loc[test[0], "blood"] = "Bombay"
    frame.loc[train[0], "blood"] = None
    data = loaded(tmp_path, frame, f"x=blood,age {ROLES}", kind)
    categories = ("0", "A", "AB", "B-")
    assert data.features == (*(f"blood={c}" for c in categories), "age")
    assert data.categories == {"blood": categories} and "visit" in data.ignored
    wanted = np.array([[blood == c for c in categories] for blood in frame["blood"]])
    assert np.array_equal(data.x_train[:, :4], wanted[train]) and np.array_equal(data.x_test[:, :4], wanted[test])
    assert not data.x_test[0, :4].any() and not data.x_train[0, :4].any()
    every = loaded(tmp_path, frame, f"x=* {ROLES}", kind)
    assert every.features == ("age", "pulse", "smoker", *data.features[:4], "visit")


def test_names_of_the_columns_say_what_they_are(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [0.5, 1, 2, 3, 4, 5], "label": [2, 10, 2, 9, 10, 9], "client": [2, 10, 2, 10, 2, 10],
                          "group": [1, 1, 2, 2, 3, 4], "split": ["train", "train"] * 2 + ["test"] * 2})  # fmt: skip
    frame["group"] = [0, 1, 2, 3, 4, 5]
    data = loaded(tmp_path, frame, "")
    assert data.features == ("a",) and data.classes == ("2", "9", "10") and data.owner_names == ("2", "10")
    assert data.pool_labels.tolist() == [0, 2, 0, 1, 2, 1] and data.groups is not None
    assert datasets.load("csv", tmp_path / "table.csv", DataSettings(columns="x=a,group y=label")).features == (
        "a",
        "group",
    )


def test_booleans_and_numbers_with_unknown_cells(tmp_path: Path) -> None:
    text = "\ufeff;a;b;c;y\n0;true;1.5;;2\n1;;NA;3;1\n2;FALSE;2;4;1\n"
    (tmp_path / "t.csv").write_text(text, encoding="utf-8")
    data = datasets.load("csv", tmp_path / "t.csv")
    assert data.features == ("a", "b", "c") and data.classes == ("1", "2")
    wanted = [[1, 1.5, np.nan], [np.nan, np.nan, 3], [0, 2, 4]]
    np.testing.assert_array_equal(data.x_train, np.array(wanted, np.float32))


def test_numbers_that_are_names_stay_as_written(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y,client\n1,0,007\n2,1,7\n3,0,7\n4,1,NA\n")
    assert datasets.load("csv", tmp_path / "t.csv").owner_names == ("007", "7", "NA")
    (tmp_path / "t.csv").write_text("a,y,client\n1,0,007\n2,1,7\n3,0,10\n")
    assert datasets.load("csv", tmp_path / "t.csv").owner_names == ("007", "10", "7")
    for zero in (".0", "-0", "+.0", "-0.0", "0."):  # all of them are one class
        (tmp_path / "t.csv").write_text(f"a,y\n1,0\n2,1\n3,{zero}\n4,1\n")
        assert datasets.load("csv", tmp_path / "t.csv").classes == ("0", "1"), zero


@pytest.mark.parametrize("cells", [[b"a", b"b"], [[1], [2]], [{"a": 1}, {"a": 2}]])
@pytest.mark.parametrize("role", ["y", "client", "group"])
def test_names_are_text_or_numbers(role: str, cells: list[Any], tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [1.0, 2, 3, 4], "y": [0, 1, 0, 1]}).assign(**{role: cells * 2})
    with pytest.raises(BadRequest, match=rf"row 0 has \w+ in '{role}' \(4 in all\): write text"):
        loaded(tmp_path, frame, "", "parquet")
    if role == "group":  # of a client's file
        (tmp_path / "all").mkdir()
        frame.to_parquet(tmp_path / "all" / "a.parquet")
        with pytest.raises(BadRequest, match=r"a\.parquet: row 0 has"):
            datasets.load("parquet", tmp_path / "all")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_one_long_cell_takes_the_memory_of_one_cell(kind: str, tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": np.arange(5000) % 7, "note": "fine", "y": np.arange(5000) % 2})
    frame.loc[7, "note"] = "z" * 20_000
    tracemalloc.start()
    try:
        data = loaded(tmp_path, frame, "", kind)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # An array of type str would take 4 x 20,000 bytes for each of the 5,000 rows.
    assert (data.features, data.ignored) == (("a",), ("note",)) and peak < 4 * 20_000 * 5000 / 10


@pytest.mark.parametrize("form", ["csv", "parquet", "hf"])
def test_row_numbers_of_pandas_are_no_feature(form: str, tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [0.5, 1, 2, 3], "y": [0, 1, 0, 1]}, index=[3, 5, 7, 9])
    path = tmp_path / f"t.{form}"
    if form == "csv":
        frame.to_csv(path)
        pd.read_csv(path).to_csv(path)  # such as ",Unnamed: 0,a,y"
        ignored: tuple[str, ...] = ("(column 0)", "Unnamed: 0")
    else:
        frame.to_parquet(path if form == "parquet" else tmp_path / "t.parquet")
        path, ignored = tmp_path / "t.parquet", ("__index_level_0__",)
    data = datasets.load(form, path)
    assert (data.features, data.ignored) == (("a",), ignored)
    assert datasets.load(form, path, DataSettings(columns="x=* y=y")).features == ("a",)
    if form == "csv":
        assert datasets.load(form, path, DataSettings(columns='x="Unnamed: 0,a" y=y')).features == ("Unnamed: 0", "a")
    assert tables.rows(path, (), 1)[:, 0].tolist() == [0.5, 1, 2, 3] if form != "hf" else True


def test_a_named_index_of_a_parquet_file_is_a_column(tmp_path: Path) -> None:
    frame = patients().set_index(["hospital", "visit"])
    data = loaded(tmp_path, frame, ROLES, "parquet")
    assert data.owner_names == ("007", "7", "NA", "Nord") and data.features == ("visit", "age", "pulse", "smoker")
    assert tables.rows(tmp_path / "table.parquet", ("visit",), 1)[:3, 0].tolist() == [0, 0, 1]
    twice = loaded(tmp_path, patients().set_index("hospital", drop=False), ROLES, "parquet")
    assert twice.owner_names == data.owner_names and "__index_level_0__" in twice.ignored


@pytest.mark.parametrize(
    ("header", "mark", "names"),
    [
        ('"age, years";"pulse, bpm";y', ";", ("age, years", "pulse, bpm")),
        ('"a;b;c;d",e,y', ",", ("a;b;c;d", "e")),
        ('a, "heart, rate", y', ",", ("a", "heart, rate")),
    ],
)
def test_a_separator_in_quotation_marks_separates_nothing(
    header: str, mark: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "t.csv").write_text(f"{header}\n1{mark}2{mark}a\n2{mark}3{mark}b\n", encoding="utf-8-sig")
    assert datasets.load("csv", tmp_path / "t.csv").features == names


@pytest.mark.parametrize("codes", [["1,4,7", "2,3,5"], ["1,4", "2,3,5", "1,3,4"], ["52.5,13.4", "48.1,11.6"]])
def test_a_list_of_numbers_is_text(codes: list[str], tmp_path: Path) -> None:
    frame = patients()
    data = loaded(tmp_path, frame.assign(codes=[codes[n % len(codes)] for n in range(len(frame))]), ROLES)
    assert "codes" in data.ignored and "age" in data.features


def test_a_column_with_a_comma_in_its_name_can_be_named(tmp_path: Path) -> None:
    assert roles('x="age,, years,pulse" y=a,,b') == {"x": ("age, years", "pulse"), "y": ("a,b",)}
    frame = patients().rename(columns={"age": "age, years"})
    assert loaded(tmp_path, frame, f'x="pulse,age,, years" {ROLES}').features == ("pulse", "age, years")


def test_two_forms_of_one_name_are_one_name(tmp_path: Path) -> None:
    composed, parted = "M\u00fcnchen", "Mu\u0308nchen"  # NFC and NFD
    frame = patients().assign(
        hospital=[composed, parted] * 60, diagnosis=["gr\u00fcn", "rot", "gru\u0308n", "rot"] * 30
    )
    frame["blood"] = [composed, parted, "A"] * 40
    data = loaded(tmp_path, frame.rename(columns={"age": "gro\u0308\u00dfe"}), f"x=gr\u00f6\u00dfe,blood {ROLES}")
    assert data.owner_names == (composed,) and data.classes == ("gr\u00fcn", "rot")
    assert data.features == ("gr\u00f6\u00dfe", "blood=A", f"blood={composed}")
    found = tables.rows(tmp_path / "table.csv", data.features, 3)
    assert found[:3, 1:].tolist() == [[0, 1], [0, 1], [1, 0]]


def test_a_column_of_text_at_one_site_is_no_other_size(tmp_path: Path) -> None:
    frame = patients(48).drop(columns=["hospital", "part", "blood"])
    frame[:16].to_csv(tmp_path / "a.csv", index=False)
    frame[16:32].assign(remark="fine").to_csv(tmp_path / "b.csv", index=False)
    frame[32:].to_csv(tmp_path / "c.csv")  # with row numbers
    data = datasets.load("csv", tmp_path, DataSettings(columns="y=diagnosis"))
    assert not data.parts and data.num_train == 48 and set(data.ignored) == {"remark", "(column 0)"}
    frame[16:32].assign(weight=1.5).to_csv(tmp_path / "b.csv", index=False)
    assert len(datasets.load("csv", tmp_path, DataSettings(columns="y=diagnosis")).parts) == 2
    every = datasets.load("csv", tmp_path, DataSettings(columns="x=* y=diagnosis"))
    assert [part.shape for part in every.parts] == [(4,), (5,)]


def test_a_file_per_client(tmp_path: Path) -> None:
    frame = patients(48)
    for part, name, rows in (("train", "north", slice(0, 20)), ("train", "south", slice(20, 40)),
                             ("test", "south", slice(40, 48))):  # fmt: skip
        (tmp_path / part).mkdir(exist_ok=True)
        shuffled = frame[list(frame.columns[::-1])] if name == "south" else frame  # the order of columns is free
        shuffled[rows].drop(columns=["hospital", "part"]).to_csv(tmp_path / part / f"{name}.csv", index=False)
    data = datasets.load("csv", tmp_path, DataSettings(columns="x=age,blood y=diagnosis group=visit"))
    assert data.owner_names == ("north", "south") and (data.num_train, data.num_test) == (40, 8)
    assert data.owners is not None and data.owners.tolist() == [0] * 20 + [1] * 28
    np.testing.assert_array_equal(data.take(range(48))[0][:, 0], frame["age"].to_numpy(np.float32))
    grouped = frame[:4].drop(columns=["hospital", "part"]).rename(columns={"visit": "group"})
    for name in ("east", "west"):
        grouped.to_csv(tmp_path / "train" / f"{name}.csv", index=False)
    told = (
        r"2 of 5 files .*east\.csv has the columns .*group=group.* but 3 of 5 files have .*split, y=diagnosis; .*west"
    )
    with pytest.raises(BadRequest, match=told):
        datasets.load("csv", tmp_path, DataSettings(columns="x=age,blood y=diagnosis"))
    data = datasets.load("csv", tmp_path, DataSettings(columns="x=age,blood y=diagnosis", skip_bad=True))
    assert data.owner_names == ("north", "south") and data.skipped == ("train/east.csv", "train/west.csv")


@pytest.mark.parametrize(
    ("change", "columns", "message"),
    [
        (lambda f: f, "y=diagnosi client=hopital", r"no column 'diagnosi' .did .*, 'hopital' .did .*\(2 in all"),
        (lambda f: f, "client=hospital", 'no column y, label or target for the classes: say which with columns = "y='),
        (lambda f: f.assign(y=1, label=2), "", "y and label could both be the classes"),
        (lambda f: f, "y=age", "'age' has numbers such as .*, wanted classes"),
        (lambda f: f.assign(hospital=[None, *f["hospital"][1:]]), ROLES, "row 0 has no client .column 'hospital' is e"),
        (lambda f: f.assign(blood=[f"b{i}" for i in range(120)]), f"x=blood {ROLES}", "'blood' has 80 different texts"),
        (lambda f: f.assign(age=["?", *f["age"][1:]]), ROLES, r"'age' has '\?' among numbers \(row 0, 1 in all\)"),
        (lambda f: f.assign(age=[f"{a:.2f}".replace(".", ",") for a in f["age"]]), ROLES, "'age' has commas"),
        (lambda f: f.assign(age=[f"1,2{i:02}" for i in range(120)]), ROLES, "such as '1,200': leave out commas"),
        (lambda f: f.assign(age=[f"{i},23,000" for i in range(120)]), ROLES, "'age' has commas in its numbers"),
        (lambda f: f.assign(age=[f"1.23{i % 10},5" for i in range(120)]), ROLES, "'age' has commas in its numbers"),
        (lambda f: f.assign(age=["1,200", *range(119)]), ROLES, "'1,200' among numbers .*: leave out commas"),
        (lambda f: f.assign(hospital=["z" * 300, *f["hospital"][1:]]), ROLES, "row 0 has a client of 300 characters"),
        (lambda f: f.assign(**{"a=b": f["blood"], "a": "b=A"}), f"x=a=b,a {ROLES}", "'a=b=A' is both a column and a"),
        (lambda f: f.assign(time=2**24 + 1), ROLES, "'time' has whole numbers above 2"),
        (lambda f: f.assign(age=np.inf), ROLES, r"'age' is infinite for float32 \(row 0, 120 in all\)"),
        (lambda f: f.assign(part="Train"), ROLES, "'part' has no row 'train', but Train: write train"),
        (lambda f: f[["blood", "diagnosis"]], "y=diagnosis", r"no numeric .* x=\*; .* --text, .* are blood"),
        (lambda f: f.iloc[:0], ROLES, "has no rows"),
        # All faults at once.
        (
            lambda f: f.assign(age=np.inf, time=2**25 + 1, hospital=None),
            ROLES,
            "row 0 has no client.*'age' is infinite.*'time' has whole",
        ),
    ],
)  # fmt: skip
def test_wrong_tables_say_what_to_do(change: Any, columns: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=re.compile(message, re.DOTALL)):
        loaded(tmp_path, change(patients()), columns)


@pytest.mark.parametrize("content", [b"x,y,\n1,0\n2,1\n", b"x,y,z\n1,0\n2,1,5\n3,0\n", b"y,x\n0,1\n1,2\n  \n"])
def test_rows_that_end_early_are_not_a_file_that_was_cut(content: bytes, tmp_path: Path) -> None:
    """A comma at the end of the header, empty cells that are left out, and a last line of blanks."""
    (tmp_path / "t.csv").write_bytes(content)
    assert len(datasets.load("csv", tmp_path / "t.csv", DataSettings()).pool_labels) >= 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"1,2,3\n4,5,6\n", "the first line has numbers only"),
        (b"a,a,y\n1,2,3\n", "several columns are called 'a'"),
        (b"a,y\n1,0,7\n2,1,8\n", "cannot read the table"),
        (b"y,a,b\n1,2,3\n0,1", "its last line has 2 of 3 cells"),
        (b"a,y\n\xff\xfe,1\n", "cannot read the table"),
    ],
)
def test_files_that_are_no_table(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(BadRequest, match=message):
        datasets.load("csv", tmp_path / "t.csv")
    if not content:
        (tmp_path / "t.parquet").write_bytes(b"PAR1 no")
        with pytest.raises(BadRequest, match="cannot read the table"):
            datasets.load("parquet", tmp_path / "t.parquet")


def test_an_error_of_arrow_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow raises errors of its own: a file that holds more than it has memory for raises one."""
    (tmp_path / "t.parquet").touch()
    monkeypatch.setattr(pd, "read_parquet", Mock(side_effect=pyarrow.lib.ArrowCapacityError("too large")))
    with pytest.raises(BadRequest, match=r"t\.parquet \(too large\)"):
        datasets.load("parquet", tmp_path / "t.parquet")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x=a z=b", "'z=b'.*is not of the form"),
        ("x= y=b", "'x='"),
        ("y=a,b", "only x may have several"),
        ("y=a y=b", "y is given more than once"),
        ("x=a,b y=a", "'a' is named twice"),
        ("y='a", "No closing quotation"),
    ],
)
def test_columns_of_another_form_are_refused_before_data_are_read(text: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        configuration.from_flat({"columns": text})
    assert roles('x="heart rate,age" y=diagnosis') == {"x": ("heart rate", "age"), "y": ("diagnosis",)}


def test_other_columns_are_another_data_set(tmp_path: Path) -> None:
    assert loaded(tmp_path, patients(), ROLES).shape == (4,)
    assert loaded(tmp_path, patients(), f"x=age {ROLES}").shape == (1,)


def test_a_node_reads_a_table_but_no_text_features(tmp_path: Path) -> None:
    frame = patients().drop(columns=["hospital", "part"])
    frame.to_csv(tmp_path / "site.csv", index=False)
    path = str(tmp_path / "site.csv")
    data = node.own_data(path, ("well", "ill"), DataSettings(dataset="csv", columns="x=age,pulse y=diagnosis"))
    assert data.rows["train"][0].shape[1:] == (2,) and data.classes == ("well", "ill")
    # A simulation may have cached the same table.
    assert datasets.load("csv", path, DataSettings(columns="x=age,blood y=diagnosis")).shape == (5,)
    with pytest.raises(BadRequest, match="'blood' is text, which every site would code in its own way"):
        node.own_data(path, ("well", "ill"), DataSettings(dataset="csv", columns="x=age,blood y=diagnosis"))


def test_a_run_learns_a_table_of_natural_clients(tmp_path: Path) -> None:
    patients(480).to_csv(tmp_path / "t.csv", index=False)
    run = fedapp.run(
        dataset="csv", data_dir=str(tmp_path / "t.csv"), columns=f"x=age,pulse,blood {ROLES}", method="fedavg",
        num_server_rounds=4, lr=0.05, out=tmp_path / "out",
    )  # fmt: skip
    assert len(run.final) == 4 and run.final["received_accuracy"].mean() > 0.85


@pytest.mark.parametrize("form", [",", ";", "\t", "parquet"])
def test_rows_to_classify_are_read_as_training_read_them(form: str, tmp_path: Path) -> None:
    frame = patients().drop(columns=["part", "visit"])
    frame.loc[[3, 5], "blood"] = None
    frame.loc[0, "age"] = np.nan
    path = tmp_path / "new.parquet"
    if form == "parquet":
        frame.to_parquet(path)
    else:
        path = tmp_path / "new.csv"
        frame.to_csv(path, sep=form, na_rep="N/A", index=False)
    own = tables.read([path], path, DataSettings(columns="x=age,pulse,smoker,blood y=diagnosis client=hospital"))
    assert own.features[-2:] == ("blood=AB", "blood=B-") and np.isnan(own.arrays["x_train"]).sum() > 5
    found = tables.rows(path, own.features, len(own.features))
    assert found.dtype == np.float32 and np.array_equal(found, own.arrays["x_train"], equal_nan=True)
    single = tables.rows(path, ("blood=NA", "age"), 2)
    assert not single[:, 0].any() and np.array_equal(single[:, 1], found[:, 0], equal_nan=True)
    assert not tables.rows(path, ("blood=nan", "blood=None"), 2).any(), "an unknown cell is of no category"


def test_the_column_of_a_category_is_known_where_names_could_mean_two(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": ["b=c", "b=d"] * 8, "a=b": ["d", "c"] * 8, "y": [0, 1] * 8})
    frame.to_csv(tmp_path / "t.csv", index=False)
    data = datasets.load("csv", tmp_path / "t.csv", DataSettings(columns="x=a=b"))
    inputs = InputSpec.of(data)
    assert data.features == ("a=b=c", "a=b=d") and inputs.columns == ("a=b", "a=b")
    found = tables.rows(tmp_path / "t.csv", inputs.features, 2, inputs.columns)
    assert np.array_equal(found, data.x_train)
    # A file of an earlier version does not say it.
    with pytest.raises(BadRequest, match=r"lacks a=b=c \(a or a=b\), a=b=d \(a or a=b\)"):
        tables.rows(tmp_path / "t.csv", inputs.features, 2)
    frame[["a"]].to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(BadRequest, match="lacks a=b: the model"):
        tables.rows(tmp_path / "t.csv", inputs.features, 2, inputs.columns)


def test_faults_of_rows_to_classify_are_named_together(tmp_path: Path) -> None:
    path = tmp_path / "new.csv"
    path.write_text("age;pulse\nold;1e60\n;2\n")
    with pytest.raises(BadRequest, match=r"'age' has 'old' \(row 0\), which is not a number.*'pulse' is infinite"):
        tables.rows(path, ("age", "pulse"), 2)
    with pytest.raises(BadRequest, match="lacks weight, sex=f: the model was trained on"):
        tables.rows(path, ("weight", "pulse", "sex=f"), 3)
    path.write_text("1;NA;3\n;2;x\n")
    with pytest.raises(BadRequest, match="'column 3' has 'x'"):
        tables.rows(path, (), 3)
    path.write_text("1;NA;3\n;2;5\n")
    assert np.array_equal(tables.rows(path, (), 3), [[1, np.nan, 3], [np.nan, 2, 5]], equal_nan=True)
    pd.DataFrame({"age": [None], "y": ["ill"]}).to_parquet(tmp_path / "one.parquet")
    assert np.isnan(tables.rows(tmp_path / "one.parquet", (), 1)).all(), "unknown in the only row"
    pd.DataFrame({"age": [b"1"]}).to_parquet(tmp_path / "odd.parquet")
    with pytest.raises(BadRequest, match="'age' is object, wanted numbers"):
        tables.rows(tmp_path / "odd.parquet", ("age",), 1)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_all_broken_files_are_named_or_left_out(kind: str, tmp_path: Path) -> None:
    frame = patients(40).drop(columns=["hospital", "part"])
    for n in range(16):
        path = tmp_path / f"{n:02}.{kind}"
        if n % 4:
            path.write_bytes(b"\xff\xfe broken")
        elif kind == "csv":
            frame[n : n + 8].to_csv(path, index=False)
        else:
            frame[n : n + 8].to_parquet(path)
    with pytest.raises(BadRequest, match=rf"12 of 16 files .*01\.{kind}.*13\.{kind}.*; and 2 more: .*skip-bad = true"):
        datasets.load(kind, tmp_path, DataSettings(columns="y=diagnosis"))
    data = datasets.load(kind, tmp_path, DataSettings(columns="y=diagnosis", skip_bad=True))
    assert data.owner_names == ("00", "04", "08", "12")
    assert data.skipped == tuple(f"{n:02}.{kind}" for n in range(16) if n % 4) and data.num_train == 32
    card = engine.data_card(**{"dataset": kind, "data-dir": str(tmp_path), "columns": "y=diagnosis", "skip-bad": True,
                               "min-samples": 1})  # fmt: skip
    assert f"left out because they cannot be used: 12 (01.{kind}, 02.{kind}, " in card.text()
    assert card.to_dict()["skipped"] == list(data.skipped)
