"""Files of others: names in tables, models and run directories rule no terminal, start no formula and break nothing."""

from __future__ import annotations

import ast
import csv
import io
import json
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from fedapp.cli import app, printing
from fedapp.data import datasets
from fedapp.data import pictures as decoding
from fedapp.data.columns import read_npz
from fedapp.data.transforms import InputSpec
from fedapp.engines.local import run as run_local
from fedapp.errors import BadRequest, is_number
from fedapp.learning.state import read_safetensors, write_safetensors
from fedapp.models.bounded import Bounded
from fedapp.results import forms, predict, report
from fedapp.results.cells import FORMULA, write_table
from fedapp.results.loading import load
from fedapp.results.runs import read_table
from fedapp.settings import DataSettings
from tests.house import FILES, ROOT
from tests.test_hostile_text import FORMULAS, HOSTILE, POSTSCRIPT, harmless

NAME = HOSTILE.replace("\ud800", "").replace("\x00", "")
"""A name that a file can hold."""


def command(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def stored(run: Any, folder: Path, **header: Any) -> Path:
    """A copy of client 0's model whose header says something else."""
    arrays, head = read_safetensors(run.out / "models" / "clients" / "0" / "personal.safetensors")
    write_safetensors(folder / "model.safetensors", arrays, {**head, **header})
    return folder / "model.safetensors"


def pictures(folder: Path) -> Path:
    np.savez(folder / "x.npz", x=np.zeros((2, 8, 8), np.uint8))
    return folder / "x.npz"


def rows(folder: Path, *labels: str) -> Path:
    """A table of two clients with hostile names."""
    path = folder / "rows.csv"
    rng = np.random.default_rng(0)
    lines = [f'{rng.normal():.3f},{rng.normal():.3f},"{labels[i % 2]}","{NAME}{i % 2}"' for i in range(100)]
    path.write_text("\n".join(["a,b,y,client", *lines]) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("terminal", [False, True])
def test_names_in_a_model_file_rule_no_terminal(
    terminal: bool, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(printing, "on_terminal", lambda: terminal)
    monkeypatch.setenv("COLUMNS", "4000")
    classes = [f"{NAME}\t\n{i}" for i in range(10)]
    file = stored(tiny(method="fedavg"), tmp_path, classes=classes, name=NAME, when=f"{NAME}[/b]")
    done = command("predict", "--model", file, pictures(tmp_path))
    assert done.exit_code == 0 and harmless(done.stdout)
    if terminal:
        assert "[bold red]" in done.stdout and "[/b]" in done.stdout, "square brackets are text"
    else:
        lines = done.stdout.splitlines()
        assert len(lines) == 2 and all(len(line.split("\t")) == 7 for line in lines), "a name adds no line or cell"


def test_names_in_a_table_rule_no_terminal(tmp_path: Path) -> None:
    file = rows(tmp_path, NAME, f"{NAME}b")
    settings = ["--set", "dataset=csv", "--set", f"data-dir={file}", "--set", "split=holdout"]
    done = command("partition", *settings, "--set", "partition=by-client")
    assert done.exit_code == 0 and "x1b]0;owned" in done.stdout and harmless(done.stdout)
    words = ("--engine", "local", "--method", "fedavg", "--rounds", "1", "--set", "partition=by-client")
    done = command("run", *words, *settings, "--out", tmp_path / "run")
    assert done.exit_code == 0 and harmless(done.output)
    assert harmless((tmp_path / "run" / "data_card.txt").read_text(encoding="utf-8"))


def test_the_message_of_any_error_is_plain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    from fedapp import cli

    def fails(*_: object, **__: object) -> None:
        raise OSError(NAME)

    monkeypatch.setattr(type(cli.app), "__call__", fails)
    with pytest.raises(SystemExit):
        cli.main()
    said = capsys.readouterr().err
    assert "Traceback" in said and harmless(said)


PRINTS = ("typer.echo", "click.echo", "print", "Console", "sys.stdout.write", "sys.stdout.writelines")
PRINTING = [
    p
    for p in FILES
    if p.relative_to(ROOT).parts[1] in ("cli", "results", "experiments") or p.name in ("runner.py", "deploy.py")
]


@pytest.mark.parametrize("path", PRINTING, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_print_through_one_module(path: Path) -> None:
    if path.name == "terminal.py":
        return
    calls = [ast.unparse(n.func) for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Call)]
    assert not set(calls) & set(PRINTS), "print with fedapp.results.terminal"


def test_no_table_of_a_command_holds_a_formula(tiny: Any, tmp_path: Path) -> None:
    """Classes of a file, and the names of samples."""
    file = stored(tiny(method="fedavg"), tmp_path, classes=[f"{FORMULAS[i % 6]}{i}\r=1" for i in range(10)])
    done = command("predict", "--model", file, pictures(tmp_path), "--out", tmp_path / "=out.csv")
    assert done.exit_code == 0, done.output
    with (tmp_path / "=out.csv").open(newline="", encoding="utf-8") as f:
        cells = [cell for row in csv.reader(f) for cell in row]
    assert not [cell for cell in cells if cell.startswith(FORMULA) and not is_number(cell)]


def test_a_table_reads_back_as_it_was(tmp_path: Path) -> None:
    texts = [*FORMULAS, *(f"'{text}" for text in FORMULAS), "'quoted'", "", "a\nb", "a\r=b", "Zürich", "1,2"]
    table = pd.DataFrame({"text": texts, "=x": range(len(texts)), "number": np.linspace(-1, 1, len(texts))})
    write_table(tmp_path / "t.csv", table)
    assert read_table(tmp_path / "t.csv").fillna({"text": ""}).equals(table)
    written = pd.read_csv(tmp_path / "t.csv", keep_default_na=False)
    assert not [text for text in [*written, *written["text"]] if text.startswith(FORMULA)]


@pytest.mark.parametrize("path", [p for p in FILES if p.name != "cells.py"], ids=lambda p: str(p.relative_to(ROOT)))
def test_tables_are_written_by_one_module(path: Path) -> None:
    assert ".to_csv(" not in path.read_text("utf-8"), "write it with fedapp.results.cells"


def shape_of(shape: list[int]) -> dict[str, Any]:
    return {"shape": shape, "mean": [0.5] * shape[0], "std": [0.5] * shape[0]}


SIZES: list[dict[str, Any]] = [
    {"num_classes": 1 << 40},
    {"num_classes": 1 << 40, "classes": []},
    {"num_classes": float("inf")},
    {"num_classes": "ten"},
    shape_of([1, 1 << 20, 1 << 20]),
    shape_of([1, 1 << 13, 1 << 13]),
]


@pytest.mark.parametrize("header", SIZES, ids=str)
def test_a_header_that_asks_for_more_than_its_file_holds_takes_no_memory(
    header: dict[str, Any], tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    draw = torch.nn.init.kaiming_uniform_

    def drawn(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        made.append(tensor.numel())
        assert tensor.numel() < 1 << 24, "so much was made"
        return draw(tensor, *args, **options)

    file = stored(tiny(method="fedavg", model="mlp"), tmp_path, **header)
    monkeypatch.setattr(torch.nn.init, "kaiming_uniform_", drawn)
    done = command("predict", "--model", file, pictures(tmp_path))
    assert isinstance(done.exception, BadRequest) and "damaged" in str(done.exception), done.exception
    assert sum(made) < 1 << 24


def test_a_model_of_a_file_may_be_as_large_as_the_file(tiny: Any, tmp_path: Path) -> None:
    with Bounded(100, "larger than the file"):
        torch.nn.Linear(9, 10)
    with Bounded(99, "larger than the file"), pytest.raises(ValueError, match="larger than the file"):
        torch.nn.Linear(9, 10)
    assert command("predict", "--model", stored(tiny(method="fedavg"), tmp_path), pictures(tmp_path)).exit_code == 0


def test_sizes_are_compared_before_a_model_is_built(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny(method="fedavg")
    for header in ({"num_classes": 11}, {"num_classes": 11, "classes": []}, {"num_classes": 9}):
        with pytest.raises(BadRequest, match="damaged: its classes do not fit the model"):
            predict.read_model(stored(run, tmp_path, **header))
    assert predict.read_model(stored(run, tmp_path, classes=[])).classes == tuple("0123456789")
    monkeypatch.setattr(predict, "LARGEST", 63)
    with pytest.raises(BadRequest, match="damaged: a sample would have the shape"):
        predict.read_model(stored(run, tmp_path))


def edited(name: str, **values: Any) -> Callable[[Path], None]:
    """Change values of a JSON file."""

    def change(out: Path) -> None:
        (out / name).write_text(json.dumps({**json.loads((out / name).read_text("utf-8")), **values}))

    return change


def column(name: str, column: str, value: str) -> Callable[[Path], None]:
    """Write a value into all rows of a table."""
    return lambda out: pd.read_csv(out / name).assign(**{column: value}).to_csv(out / name, index=False)


def text(name: str, old: str, new: str) -> Callable[[Path], object]:
    """Write another text into a file."""
    return lambda out: (out / name).write_text((out / name).read_text("utf-8").replace(old, new))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "deep json": lambda out: (out / "summary.json").write_text("[" * 200_000),
    "deep toml": lambda out: (out / "config.toml").write_text("a = " + "[" * 100_000),
    "accuracy a list": edited("summary.json", accuracy=[1]),
    "accuracy nothing": edited("summary.json", accuracy=None),
    "score a text": edited("summary.json", accuracy={"trained": {"last": "x"}}),
    "metrics of a list": edited("summary.json", metrics={"trained": ["f1"]}),
    "round endless": edited("summary.json", round=float("inf")),
    "bytes a text": edited("summary.json", bytes_up="x"),
    "bytes of an answer a text": edited("summary.json", bytes_up_query="x"),
    "seconds large": edited("summary.json", seconds=10**400),
    "versions a list": edited("versions.json", run=[1]),
    "classes a number": edited("data_card.json", classes=3),
    "counts a text": edited("data_card.json", train=[["a"]]),
    "counts ragged": edited("data_card.json", train=[[1], [1, 2], []]),
    "counts of too many": edited("data_card.json", majority=[0.5]),
    "seed a text": text("config.toml", "seed = 0", "seed = 'x'"),
    "partition seed a text": text("config.toml", 'partition-seed = "auto"', "partition-seed = 'x'"),
    "key a list": text("config.toml", "lr = 0", "lr = []\n#"),
    "clients missing in counts": edited("data_card.json", train_sizes=[1, None, 3]),
    "round a text": column("rounds.csv", "round", "x"),
    "round missing": text("rounds.csv", "round,", "rond,"),
    "round endless in a table": column("rounds.csv", "round", "inf"),
    "seconds a text": column("rounds.csv", "round_seconds", "x"),
    "score a text in a table": column("final.csv", "trained_accuracy", "x"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    return run_local(method="fedavg", clients=3, rounds=1, local_epochs=1, data_fraction=0.3, out=out).out


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_run_directory_is_named(damage: str, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "copy"
    shutil.copytree(finished, out)
    DAMAGE[damage](out)
    with pytest.raises(BadRequest, match=re.escape(str(out))) as said:
        report.write(out)
    assert "\n" not in str(said.value) and "pydantic" not in str(said.value)


def test_a_damaged_run_directory_gives_no_model(finished: Path, tmp_path: Path) -> None:
    for name in ("deep toml", "round endless", "round a text"):
        out = tmp_path / name
        shutil.copytree(finished, out)
        DAMAGE[name](out)
        with pytest.raises(BadRequest, match=re.escape(str(out))):
            load(out, 0)


def test_what_may_be_missing_is_no_damage(finished: Path) -> None:
    value = json.loads((finished / "summary.json").read_text("utf-8"))
    optional = ("pooled", "test_sizes", "calibration", "headline", "privacy", "warnings", "wdr")
    assert forms.wrong_summary(value) == "" == forms.wrong_summary({})
    assert forms.wrong_summary({**value, **dict.fromkeys(optional), "extra": [1], "seconds": None}) == ""
    assert forms.wrong(forms.Singles, json.loads((finished / "versions.json").read_text("utf-8"))) == ""
    assert forms.wrong_config({"seed": 0, "partition-seed": "auto", "lr": "auto"}) == ""
    assert forms.wrong_card(json.loads((finished / "data_card.json").read_text("utf-8"))) == "" == forms.wrong_card({})
    assert forms.wrong_table(pd.DataFrame(), ("round",)) == ""


def encrypted(path: Path) -> None:
    """Set the mark of encryption of the file in an archive."""
    np.savez(path, x=np.zeros(3))
    raw = bytearray(path.read_bytes())
    for start, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        raw[raw.find(start) + flags] |= 1
    path.write_bytes(raw)


def endless(path: Path) -> None:
    """An array of a petabyte, as its header says."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": (10**15,)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", head.getvalue())


@pytest.mark.parametrize("make", [encrypted, endless])
def test_an_archive_that_cannot_be_read_is_named(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "x.npz")
    with pytest.raises(BadRequest, match=r"cannot read .*x\.npz"):
        read_npz(tmp_path / "x.npz")


def test_a_picture_of_another_format_starts_no_program(tmp_path: Path, ghostscript: Path) -> None:
    """Pillow reads what a file holds, not its name, and hands PostScript to Ghostscript."""
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(4):
            Image.fromarray(np.full((28, 28), 9 * i, np.uint8)).save(tmp_path / "data" / name / f"{i}.png")
    path = tmp_path / "data" / "a" / "z.png"
    path.write_bytes(POSTSCRIPT)
    with pytest.raises(BadRequest, match=r"z\.png"):
        datasets.load("folder", tmp_path / "data", DataSettings())
    with pytest.raises(BadRequest, match=r"z\.png"):
        predict.read_images([path], InputSpec((1, 28, 28), 255.0, (0.5,), (0.5,)))
    with pytest.raises(OSError, match="row 3 is not a picture"):
        decoding._decode(io.BytesIO(POSTSCRIPT), 28, "row 3")
    assert not ghostscript.exists()


@pytest.mark.parametrize("label", [3 * 10**8, 2**40, 2**62])
def test_a_large_label_takes_no_memory(label: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((4, 3), np.float32), y=np.array([0, 1, 3, label]))
    monkeypatch.setattr(np, "bincount", lambda *a, **k: pytest.fail("counts every number up to the largest"))
    with pytest.raises(BadRequest, match="no row has label 2 although"):
        datasets.load("npz", tmp_path / "x.npz", DataSettings())


def test_members_that_are_no_arrays_and_headers_without_end_are_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x_train", b"text")
    np.savez(tmp_path / "flat.npz", x_train=np.float32(3), y_train=np.zeros(1, np.int64))
    (tmp_path / "x.csv").write_text(f"{'a' * (1 << 18)},y\n1,2\n")
    for kind, name in (("npz", "x.npz"), ("npz", "flat.npz"), ("csv", "x.csv")):
        with pytest.raises(BadRequest, match=re.escape(name)):
            datasets.load(kind, tmp_path / name, DataSettings())
