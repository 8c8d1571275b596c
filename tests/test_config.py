"""The configuration: declared keys, autos, and what is refused before anything is trained."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tomllib
import urllib.error
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapp import RunResult, cli, config, files, registry, run, server_app
from fedapp.config import DEFAULTS, FIELDS, KEYS, from_flat, keys
from fedapp.engines import local as engines
from fedapp.engines import runner
from fedapp.errors import BadRequest
from fedapp.experiments import compare
from fedapp.results import directory as results

ROOT = Path(__file__).parent.parent


def test_pyproject_declares_every_key_with_its_default() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    declared = project["tool"]["flwr"]["app"]["config"]
    assert declared == DEFAULTS
    assert {k: type(v) for k, v in declared.items()} == {k: type(v) for k, v in DEFAULTS.items()}


def test_a_configuration_survives_its_toml_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = from_flat({"method": "fedprox", "method-args": "mu=0.5", "alpha": 0.1, "data-dir": 'a "b" c', "lr": 0.02})
    config.write_toml(tmp_path / "c.toml", chosen)
    assert from_flat(config.read_toml(tmp_path / "c.toml")) == chosen
    runner.print_config(chosen.replaced(state_dir="a\\b"))
    assert tomllib.loads(capsys.readouterr().out)["state-dir"] == "a\\b"


def test_a_configuration_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, chosen = tmp_path / "config.toml", from_flat({"method": "fedprox", "lr": 0.02})
    config.write_toml(path, chosen)
    monkeypatch.setattr(Path, "write_text", lambda self, text, **_: self.write_bytes(b"") or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        config.write_toml(path, chosen)
    assert from_flat(config.read_toml(path)) == chosen
    path.write_bytes(b"")
    with pytest.raises(BadRequest, match="names no method: put a good copy"):
        run(resume=tmp_path)


def test_auto_is_the_methods_own_value() -> None:
    assert from_flat({"method": "fedavg"}).training.lr == 0.05
    other = from_flat({"method": "fedclassavg", "dataset": "mnist"})
    assert (other.training.lr, other.training.augment, other.model.model) == (0.01, "weak", "cnn")
    assert from_flat({"method": "fedavg", "lr": 0.3}).training.lr == 0.3
    assert from_flat({"optimizer": "adam"}).training.momentum == 0.0


def test_models_are_dealt_by_client_id() -> None:
    dealt = from_flat({"model": "digits-a, digits-b,digits-c"})
    assert [dealt.model.name_of(c) for c in range(5)] == ["digits-a", "digits-b", "digits-c", "digits-a", "digits-b"]


def test_balanced_every_round_on_digits_only_unless_said() -> None:
    assert from_flat({"dataset": "digits"}).balanced_in(3)
    assert not from_flat({"dataset": "mnist"}).balanced_in(3)
    assert not from_flat({"dataset": "digits", "balanced-every": -1}).balanced_in(3)
    every = from_flat({"dataset": "mnist", "balanced-every": 5})
    assert [every.balanced_in(r) for r in (4, 5, 10)] == [False, True, True]


def test_a_keys_other_names_and_hyperparameters_are_explained() -> None:
    for name, key in keys.OTHER_NAMES.items():
        assert name not in KEYS and key in KEYS
        for written in (name, name.replace("-", "_"), name.upper()):
            assert f"did you mean '{key}'?" in config.unknown_key(written, 1)
    for method in registry.discover().values():
        for field in method.hparams.model_fields:
            if field.replace("_", "-") not in KEYS:
                told = config.unknown_key(field, "x")
                assert method.id in told and f'({field}=x)"' in told
    with pytest.raises(BadRequest, match="unknown key 'rounds', did you mean 'num-server-rounds'"):
        from_flat({"rounds": 3})


BAD: list[tuple[dict[str, Any], str]] = [
    ({"methd": "fedavg"}, "did you mean 'method'"),
    ({"method": "fedavgg"}, "did you mean 'fedavg'"),
    ({"method": "zzzzzz"}, "unknown method"),
    ({"method": 3}, "must be text"),
    ({"dataset": "mnits"}, "did you mean 'mnist'"),
    ({"model": "digits-z"}, "did you mean"),
    ({"model": ","}, "model is empty"),
    ({"partition": "dirichlett"}, "did you mean 'dirichlet'"),
    ({"clients": -1}, "at least 0"),
    ({"clients": 2.5}, "whole number"),
    ({"clients": "ten"}, "whole number"),
    ({"num-server-rounds": 0}, "at least 1"),
    ({"num-server-rounds": "abc"}, "whole number"),
    ({"fraction-train": 0.0}, "greater than 0"),
    ({"fraction-train": 1.5}, "at most 1"),
    ({"alpha": 0.0}, "greater than 0"),
    ({"alpha": float("nan")}, "alpha"),
    ({"lr": -0.1}, "lr"),
    ({"lr": "fast"}, "lr"),
    ({"batch-size": 0}, "at least 1"),
    ({"local-epochs": 0}, "at least 1"),
    ({"momentum": 1.0}, "less than 1"),
    ({"optimizer": "lion"}, "unknown optimizer 'lion': choose from adadelta, adafactor, adagrad, adam, adamax, adamw"),
    ({"optimizer": "AdamW"}, "did you mean 'adamw'"),
    ({"optimizer": "lbfgs"}, "cannot be used: it computes the loss several times in each step"),
    ({"optimizer": "muon"}, "cannot be used: it optimises matrices alone"),
    ({"optimizer": "SparseAdam"}, "cannot be used: it takes sparse gradients"),
    ({"optimizer-args": "nesterow=true"}, "no argument 'nesterow', did you mean 'nesterov'? sgd takes"),
    ({"optimizer-args": "nesterov=yes"}, "nesterov = 'yes' is not true or false. sgd takes: dampening (default 0), "),
    ({"optimizer-args": "nesterov"}, "not name=value (values without spaces). sgd takes"),
    ({"optimizer-args": "nesterov=true nesterov=false"}, "given twice"),
    ({"optimizer-args": "nesterov=true", "momentum": 0.0}, "Nesterov momentum requires a momentum"),
    ({"optimizer-args": "momentum=0.5"}, "'momentum' is not set here: it is the key momentum"),
    ({"optimizer": "adamw", "optimizer-args": "weight_decay=0.1"}, "it is the key weight-decay"),
    ({"optimizer": "adamw", "optimizer-args": "lr=0.1"}, "it is the key lr"),
    ({"optimizer": "adamw", "optimizer-args": "betas=0.9"}, "betas = '0.9' is not numbers with commas"),
    ({"optimizer": "adamw", "optimizer-args": "betas=0.9,0.9,0.9"}, "betas = '0.9,0.9,0.9' is not numbers with commas"),
    ({"optimizer": "adamw", "optimizer-args": "betas=0.9,1.5"}, "Invalid beta parameter"),
    ({"optimizer": "adamw", "optimizer-args": "eps=tiny"}, "eps = 'tiny' is not a number"),
    ({"optimizer": "adamw", "optimizer-args": "eps=nan"}, "eps = 'nan' is not a number"),
    ({"optimizer": "nadam", "momentum": 0.9}, "momentum is for SGD and RMSprop: leave it at auto"),
    ({"optimizer": "rprop", "weight-decay": 0.1}, "rprop has no weight decay"),
    ({"optimizer": "rprop", "lr-schedule-steps": "LinearLR"}, "first step of a round only"),
    ({"lr-schedule": "CosineLR"}, "lr-schedule: no scheduler 'CosineLR', did you mean 'CosineAnnealingLR'"),
    ({"lr-schedule": "ReduceLROnPlateau"}, "it needs a score after each step"),
    ({"lr-schedule": "LambdaLR"}, "it takes a function"),
    ({"lr-schedule": "SequentialLR"}, "it takes other schedulers"),
    (
        {"lr-schedule": "CosineAnnealingLR T_min=3"},
        "did you mean 'eta_min'? CosineAnnealingLR takes: T_max, eta_min",
    ),
    ({"lr-schedule": "CosineAnnealingLR T_max=2.5"}, "T_max = '2.5' is not a whole number"),
    ({"lr-schedule": "CosineAnnealingLR T_max=0"}, "cannot give 20 rates"),
    ({"lr-schedule": "CosineAnnealingLR last_epoch=3"}, "a resumed run goes on by itself"),
    ({"lr-schedule": "StepLR"}, "StepLR needs step_size=..."),
    ({"lr-schedule": "OneCycleLR max_lr=1 cycle_momentum=true"}, "a schedule sets the learning rate only"),
    ({"lr-schedule": "OneCycleLR max_lr=1 epochs=3"}, "give total_steps"),
    ({"lr-schedule": "OneCycleLR max_lr=1 total_steps=10"}, "cannot give 20 rates"),
    ({"lr-schedule": "OneCycleLR max_lr=1 anneal_strategy=sin"}, "not one of cos, linear"),
    ({"lr-schedule": "ExponentialLR gamma=-1"}, "rates must be finite and at least 0"),
    ({"lr-schedule-steps": "StepLR step_size=3 gamma=x"}, "lr-schedule-steps: gamma = 'x' is not a number"),
    ({"warmup-rounds": 20}, "leaves none of the 20 rounds"),
    ({"warmup-rounds": -1}, "at least 0"),
    ({"class-weights": "equal"}, "give none, balanced, or a number for each class"),
    ({"class-weights": "1,-1"}, "at least 0"),
    ({"class-weights": "0,0"}, "not all 0"),
    ({"class-weights": "1,nan"}, "give none, balanced, or a number"),
    ({"augment": "heavy"}, "augment"),
    ({"precision": "fp8"}, "precision"),
    ({"buffers": "keep"}, "buffers"),
    ({"split": "random"}, "split"),
    ({"min-replies": 0.0}, "min-replies"),
    ({"wire-dtype": "int8"}, "wire-dtype"),
    ({"seed": -1}, "at least 0"),
    ({"resume": "yes"}, "true or false"),
    ({"protocols": "received,best"}, "protocols"),
    ({"protocols": ""}, "protocols"),
    ({"method-args": "mu=1"}, "no hyperparameter 'mu'"),
    ({"method": "fedprox", "method-args": "mu"}, "name=value"),
    ({"method": "fedprox", "method-args": "mu=-1"}, "mu"),
    ({"method": "fedprox", "method-args": "mu=high"}, "mu"),
    ({"method": "fedprox", "method-args": "mu=1 mu=2"}, "given twice"),
    ({"method": "fedprox", "method-args": "muu=1"}, "did you mean 'mu'"),
    ({"method": "fedavg", "model": "digits-a,digits-b"}, "one architecture"),
    ({"method-args": "share=all", "model": "digits-a,digits-b"}, "one architecture"),
    ({"optimizer": "adam", "momentum": 0.9}, "momentum is for SGD"),
    ({"resume": True}, "needs out"),
    ({"federation": "a/b"}, "letters, digits"),
    ({"class-names": "cat,,dog"}, "different names"),
    ({"class-names": "cat,cat"}, "different names"),
    ({"clip-update": -1.0}, "at least 0"),
]


@pytest.mark.parametrize(("values", "says"), BAD, ids=[str(v) for v, _ in BAD])
def test_bad_values_are_refused_with_a_reason(values: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        from_flat(values)
    assert says in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 5


def small(path: Path, n: int = 12) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (n, 8, 8), dtype=np.uint8)
    np.savez(path / "own.npz", x_train=x, y_train=np.arange(n) % 3, x_test=x[:3], y_test=np.arange(3))
    return path / "own.npz"


DATA_BAD: list[tuple[dict[str, Any], str]] = [
    ({"warm-start": True}, "needs state-dir"),
    ({"dataset": "npz"}, "needs data-dir"),
    ({"dataset": "folder"}, "needs data-dir"),
    ({"dataset": "digits", "clients": 5000}, "client"),
    ({"dataset": "digits", "model": "cnn"}, "cnn"),
    ({"dataset": "digits", "split": "official"}, "holdout"),
    ({"dataset": "digits", "partition": "dirichlet", "alpha": 0.001, "clients": 50, "min-samples": 30}, "alpha"),
    ({"dataset": "digits", "partition": "pathological", "classes-per-client": 11}, "class"),
    ({"dataset": "mnist", "data-dir": "EMPTY"}, "mnist.npz"),
    ({"dataset": "npz", "data-dir": "MISSING"}, "MISSING"),
    ({"dataset": "npz", "data-dir": "OWN", "clients": 20}, "client"),
    ({"dataset": "npz", "data-dir": "OWN", "columns": "y=label"}, "columns is for dataset = csv or parquet or hf"),
    ({"dataset": "npz", "data-dir": "OWN", "image-size": 9}, "image-size is for dataset = folder or hf"),
    ({"dataset": "csv", "data-dir": "OWN", "layout": "clients"}, "layout is for dataset = folder"),
]


@pytest.mark.parametrize(("values", "says"), DATA_BAD, ids=[str(v) for v, _ in DATA_BAD])
def test_what_does_not_fit_the_data_is_refused_before_training(
    values: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unplugged(*args: object, **kwargs: object) -> None:
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", unplugged)
    monkeypatch.setenv("FEDAPP_CACHE", str(tmp_path / "cache"))
    places = {"EMPTY": tmp_path, "MISSING": tmp_path / "MISSING", "OWN": small(tmp_path / "own")}
    if "data-dir" in values:
        values = {**values, "data-dir": str(places[values["data-dir"]])}
    with pytest.raises(BadRequest) as caught:
        engines.prepare(values, tmp_path / "out")
    assert says in str(caught.value)
    assert not (tmp_path / "out" / "config.toml").exists()


def test_an_output_directory_must_be_new_and_writable(tmp_path: Path) -> None:
    taken = tmp_path / "taken twice"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    with pytest.raises(BadRequest, match=r"not empty.* --resume '.*/taken twice'$"):
        engines.prepare({}, taken)
    with pytest.raises(BadRequest, match="is a file"):
        engines.prepare({}, taken / "notes.txt")
    with pytest.raises(BadRequest, match=r"cannot be written|is a file"):
        engines.prepare({}, taken / "notes.txt" / "below")
    with pytest.raises(BadRequest, match="no run to resume"):
        engines.resumed(taken, {})


@pytest.mark.full
def test_a_run_that_a_full_disk_ended_at_its_start_begins_again_with_the_same_command(
    tiny: Callable[..., RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(results, "write_toml", full)
        tiny(out=out)
    assert {p.name for p in out.iterdir()} >= {".lock", "checkpoint", "models", "versions.json"}
    assert tiny(out=out, rounds=1).ok
    (out / "config.toml").unlink()
    with pytest.raises(BadRequest, match="is not empty"):
        engines.prepare({}, out)


LONG = "x" * 300
"""A name that no file system takes: an error of the system that a root user gets too."""


LOCAL, RAY = ["run", "--engine", "local"], ["run", "--engine", "ray"]


@pytest.mark.parametrize("command", [[*LOCAL, "--out"], [*RAY, "--out"], [*LOCAL, "--resume"], ["compare", "--out"]])
def test_a_folder_that_cannot_be_looked_into_is_a_bad_request(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fedapp", *command, str(tmp_path / LONG)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    errors = capsys.readouterr().err
    assert ended.value.code == 2 and "cannot be " in errors and "File name too long" in errors
    assert "Traceback" not in errors and "majority" not in errors, "found before the data are dealt"


@pytest.mark.parametrize(
    "words",
    [
        f"run {LONG}", f"run {LONG}.toml", f"compare {LONG}.toml", f"partition {LONG}", f"recipes {LONG}",
        f"show {LONG}", f"predict --run {LONG} x.csv", f"export {LONG} --out x.pt2",
        f"features {LONG} --with minilm --out x.npz",
    ],
    ids=lambda words: words.replace(LONG, "LONG"),
)  # fmt: skip
def test_a_name_that_no_file_has_is_a_bad_request(
    words: str, fedapp: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, said = fedapp(*words.split())
    assert code == 2 and "Traceback" not in said, said


@pytest.mark.parametrize("mode", [0o000, 0o500])
def test_a_folder_without_permission_is_a_bad_request(mode: int, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(mode)
    if os.access(closed, os.W_OK):
        pytest.skip("this user may write everywhere")
    try:
        for ask in (
            lambda: engines.prepare({}, closed),
            lambda: engines.prepare({}, closed / "below"),
            lambda: compare.run(compare.Plan({}, "local", 1), closed),
        ):
            with pytest.raises(BadRequest, match="cannot be "):
                ask()
    finally:
        closed.chmod(0o700)


def test_a_folder_that_becomes_unwritable_refuses_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").write_text("seed = 1")

    def denied(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files.tempfile, "mkstemp", denied)
    with pytest.raises(BadRequest, match=r"cannot be written \(Permission denied\)"):
        engines.resumed(tmp_path, {})


def test_default_folders_of_the_same_second_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDAPP_RUNS", str(tmp_path / "served"))
    monkeypatch.setattr(results.time, "strftime", lambda form: "20260102-030405")
    names = [Path(engines.prepare({"method": "local"}, None).storage.out) for _ in range(3)]
    name = "local-digits-s0-20260102-030405"
    assert names == [tmp_path / "runs" / n for n in (name, f"{name}-2", f"{name}-3")]
    served = [server_app.place(config.from_flat({"method": "local"})) for _ in range(2)]
    assert served == [tmp_path / "served" / n for n in (name, f"{name}-2")]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: results.new_folder(tmp_path / "many", "x"), range(40)))
    assert len(set(made)) == 40


def test_a_refused_comparison_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadRequest):
        compare.run(compare.Plan({"lr": -1.0}, "local", 1), None)
    assert not any((tmp_path / "runs").iterdir())


def test_the_command_line_goes_before_the_file_and_contradicts_itself_never(tmp_path: Path) -> None:
    settings = {"method": "fedavg", "seed": 1}
    assert cli.collect({"seed": 2}, ["alpha=0.3"], settings) == {"method": "fedavg", "seed": 2, "alpha": 0.3}
    assert cli.collect({"seed": 2}, ["seed=2"]) == {"seed": 2}
    with pytest.raises(BadRequest, match="given twice"):
        cli.collect({"seed": 2}, ["seed=3"])
    with pytest.raises(BadRequest, match="given twice"):
        cli.collect({}, ["alpha=0.1", "alpha=0.2"])
    with pytest.raises(BadRequest, match="key=value"):
        cli.collect({}, ["alpha"])
    with pytest.raises(BadRequest, match="does not exist"):
        config.read_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(BadRequest, match="not TOML"):
        config.read_toml(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("seed", "3", 3),
        ("alpha", "1", 1.0),
        ("lr", "auto", "auto"),
        ("resume", "true", True),
        ("dataset", "x", "x"),
        ("partition-seed", "3", 3),
        ("partition-seed", "auto", "auto"),
    ],
)
def test_set_values_take_the_type_of_their_key(key: str, text: str, value: Any) -> None:
    assert config.parse_value(key, text) == value and type(config.parse_value(key, text)) is type(value)


@pytest.mark.parametrize(("key", "text"), [("seed", "1.5"), ("alpha", "x"), ("resume", "1"), ("nokey", "1")])
def test_set_values_of_another_type_are_refused(key: str, text: str) -> None:
    with pytest.raises(BadRequest):
        config.parse_value(key, text)


@pytest.fixture
def fedapp(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Call the command line; gives the exit code and what it wrote to both streams."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["fedapp", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return call


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--method", "fedavgg"],
        ["run", "--set", "nokey=1"],
        ["run", "--rounds", "many"],
        ["run", "--seed", "1", "--set", "seed=2"],
        ["run", "--engine", "cloud"],
        ["run", "--resume", "nowhere"],
        ["run", "--engine", "local", "--out", "not-utf-8-\udcff"],
        ["run", "--engine", "local", "--set", "dataset=npz", "--set", "data-dir=~no-such-user/x"],
        ["run", "--engine", "local", "--set", "weights=" + 300 * "x"],
        ["run", "--engine", "local", "--set", "state-dir=" + 300 * "x"],
        ["partition", "--dataset", "npz", "--set", "data-dir=~no-such-user/x"],
        ["report", "~no-such-user/x"],
        ["run", "--engine", "local", "--client-gpus", "0.5"],
        ["run", "--superlink", "prod"],
        ["compare", "--methods", "local,nonsense"],
        ["compare", "--methods", "local,local"],
    ],
    ids=" ".join,
)
def test_exit_code_2_and_no_traceback(arguments: list[str], fedapp: Callable[..., tuple[int, str, str]]) -> None:
    code, _, said = fedapp(*arguments)
    assert code == 2, said
    assert "Traceback" not in said and 0 < len(said.strip().splitlines()) <= 12


def test_a_working_folder_that_is_gone_is_a_bad_request(
    fedapp: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for words in (["show", "run"], ["partition", "--dataset", "npz", "--set", "data-dir=x"]):
        code, _, said = fedapp(*words)
        assert code == 2 and "give an absolute path" in said


def test_the_key_resume_alone_is_refused(fedapp: Callable[..., tuple[int, str, str]]) -> None:
    code, _, said = fedapp("run", "--set", "resume=true", "--set", "lr=0.001", "--engine", "local", "--out", "nowhere")
    assert code == 2 and "give --resume DIR" in said


def test_a_process_ends_with_that_code() -> None:
    command = [sys.executable, "-m", "fedapp.cli", "run", "--method", "fedavgg"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2 and "did you mean" in done.stderr and "Traceback" not in done.stderr


def test_methods_lists_a_line_each_when_stdout_is_no_terminal(fedapp: Callable[..., tuple[int, str, str]]) -> None:
    code, said, _ = fedapp("methods")
    assert code == 0
    lines = said.splitlines()
    assert [line.split("\t")[0] for line in lines][:4] == ["id", "fedclassavg", "cwfedavg", "fedgh"]
    assert all(len(line.split("\t")) == 9 for line in lines)


def test_dry_run_shows_configuration_and_traffic_and_trains_nothing(
    tmp_path: Path, fedapp: Callable[..., tuple[int, str, str]]
) -> None:
    code, said, _ = fedapp("run", "--dry-run", "--out", str(tmp_path / "o"), "--set", "model=digits-a,digits-b")
    assert code == 0
    assert "lr = 0.05" in said and "2,600 bytes each way" in said
    assert not (tmp_path / "o").exists()


def test_every_key_has_a_description() -> None:
    assert all(f.description for f in FIELDS.values())


@pytest.mark.parametrize(
    ("words", "what"),
    [(["methods"], "fedapp.registry.discover"), (["deploy", "check"], "fedapp.deployment.deploy_check.check")],
)
def test_an_interrupt_is_one_line_and_exit_code_130(
    words: list[str], what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(what, interrupted)
    monkeypatch.setattr(sys, "argv", ["fedapp", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130 and capsys.readouterr().err == "fedapp: interrupted\n"


def test_a_run_validates_and_resolves_its_configuration_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The object is handed on, to the server and to every client, instead of being made again from flat values."""
    calls: list[str] = []
    originals = {name: getattr(config, name) for name in ("check", "_resolved")}
    for name in originals:

        def counted(given: Any, name: str = name) -> Any:
            calls.append(name)
            return originals[name](given)

        monkeypatch.setattr(config, name, counted)
    run(method="fedavg", clients=3, rounds=2, local_epochs=1, data_fraction=0.2, out=tmp_path / "run")
    assert calls == ["check", "_resolved"]


def test_a_context_is_validated_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"method": "fedavg", "lr": 0.0123, "seed": 77}
    first = config.from_context(values)
    monkeypatch.setattr(config, "check", lambda given: pytest.fail("validated again"))
    assert config.from_context(dict(reversed(values.items()))) is first
    assert first.training.momentum == 0.9 and first.model.model == "digits-a", "what a message gives is resolved"


def test_a_run_of_version_0_1_is_still_read_and_a_key_that_a_user_writes_is_not_dropped(tmp_path: Path) -> None:
    result = run(method="local", clients=2, rounds=1, local_epochs=1, data_fraction=0.2, out=tmp_path / "run")
    saved = result.out / "config.toml"
    saved.write_text(saved.read_text() + "cuda-graphs = false\ncompile = true\n")
    assert RunResult(result.out).config is not None
    assert compare.standing(engines.effective(config.read_toml(saved)).replaced(out=str(result.out))) == "done"
    assert engines.resumed(result.out, {"num-server-rounds": 2})["num-server-rounds"] == 2
    with pytest.raises(BadRequest, match="unknown key 'cuda-graphs': it was removed; leave it out"):
        from_flat({"cuda-graphs": False})
    with pytest.raises(BadRequest, match="unknown key 'compile': it was removed; leave it out"):
        config.parse_value("compile", "true")
