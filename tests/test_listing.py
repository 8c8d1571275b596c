"""The commands that list what a run can be made of, on a terminal of 80 columns and through a pipe."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import click
import pytest
import typer
from typer.testing import CliRunner

from fedapp import __version__, registry
from fedapp.cli import app, listing, printing
from fedapp.config import GROUPS, KEYS
from fedapp.data.datasets import DATASET_NAMES
from fedapp.data.partitions import PARTITION_KINDS
from fedapp.errors import BadRequest, suggest
from fedapp.models import MODEL_NAMES
from tests.house import ROOT

WIDE = 80


def printed(*arguments: str) -> str:
    """Return what a command prints through a pipe."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def lines(*arguments: str) -> list[list[str]]:
    """Return what a command prints through a pipe: the cells of each line."""
    return [line.split("\t") for line in printed(*arguments).splitlines()]


def test_the_version_is_the_packages() -> None:
    assert lines("--version") == [[f"fedapp {__version__}"]]


def test_every_key_is_listed_with_type_default_and_meaning() -> None:
    rows = lines("keys")
    assert [row[0] for row in rows] == list(KEYS)
    assert all(row[1] and row[3] for row in rows)
    found = {row[0]: row[1:] for row in rows}
    assert found["lr"] == ["auto, or number, above 0", "auto", "learning rate"]
    assert found["min-samples"][:2] == ["whole number, at least 1", "10"]
    assert found["precision"][:2] == ["fp32, bf16", "fp32"] and found["final-training"][:2] == ["true, false", "true"]


def test_a_word_chooses_keys_by_name_first_and_by_meaning() -> None:
    named = [row[0] for row in lines("keys", "LR")]
    assert named[0] == "lr" and {"lr-schedule", "lr-schedule-steps"} <= {*named[:3]}
    assert "seed" not in named
    assert [row[0] for row in lines("keys", "concentration")] == ["alpha"]
    unknown = CliRunner().invoke(app, ["keys", "optimiser"])
    assert unknown.exit_code != 0 and "did you mean 'optimizer'" in str(unknown.exception)


def test_the_hyperparameters_of_every_method_are_listed_with_default_and_meaning() -> None:
    assert lines("methods", "fedprox")[1][:3] == ["mu", "number, at least 0", "0.01"]
    for method in registry.discover().values():
        rows = lines("methods", method.id)
        if not method.hparams.model_fields:
            assert rows == [[f"{method.title} has no hyperparameters"]]
            continue
        assert rows.pop(0) == ["hyperparameter", "type", "default", "meaning"]
        assert [row[0] for row in rows] == list(method.hparams.model_fields)
        assert all(len(row) == 4 and row[1] and row[3] for row in rows), rows


@pytest.mark.parametrize("method", ["fedprox(mu=0.5 lr=0.2)", " fedprox( mu=0.5  lr=0.2 )"])
def test_a_run_takes_a_methods_values_in_brackets(method: str) -> None:
    result = CliRunner().invoke(app, ["run", "--dry-run", "--engine", "local", "--method", method])
    assert result.exit_code == 0, result.output
    assert {'method = "fedprox"', 'method-args = "mu=0.5"', "lr = 0.2"} <= set(result.stdout.splitlines())


@pytest.mark.parametrize(
    ("command", "names"),
    [("models", MODEL_NAMES), ("datasets", DATASET_NAMES), ("partitions", (*PARTITION_KINDS, "flwr:NAME"))],
)
def test_every_name_is_listed_with_a_sentence(command: str, names: tuple[str, ...]) -> None:
    rows = lines(command)
    assert tuple(row[0] for row in rows)[: len(names)] == names
    assert all(len(row[-1].split()) > 1 for row in rows)


LISTS = [
    "methods",
    "methods fedgh",
    "methods local",
    "keys",
    "keys data",
    "keys lr",
    "models",
    "datasets",
    "partitions",
]


@pytest.mark.parametrize("command", [*LISTS, "recipes", "--help", "run --help"])
def test_a_listing_fits_eighty_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is wider, and no word or number of a wide terminal is cut or broken."""
    for module in (printing, listing):
        monkeypatch.setattr(module, "on_terminal", lambda: True)
    wide, shown = (
        CliRunner().invoke(app, command.split(), env={"COLUMNS": str(width)}).stdout for width in (1000, WIDE)
    )
    assert max(map(len, shown.splitlines())) <= WIDE and "\u2026" not in shown
    assert set(shown.split()) == set(wide.split())


def on_terminal(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """Return what a command prints on a terminal."""
    for module in (printing, listing):
        monkeypatch.setattr(module, "on_terminal", lambda: True)
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(WIDE)})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_keys_begin_with_their_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    piped = {name: {row[0] for row in lines("keys", name)} for name in GROUPS}
    shown = on_terminal(monkeypatch, "keys")
    assert len(shown.splitlines()) < 40
    for name, group in GROUPS.items():
        assert f"{name} {len(group.model_fields)} keys" in shown
        keys = {field.alias for field in group.model_fields.values()}
        assert piped[name] == keys and keys <= set(shown.replace(",", " ").split())


def test_keys_know_other_names_and_hyperparameters() -> None:
    assert lines("keys", "local_epochs")[0][0] == "local-epochs"
    assert lines("keys", "learning-rate")[0][0] == "lr" and lines("keys", "rounds")[0][0] == "num-server-rounds"
    assert lines("keys", "mu")[0][0].startswith("mu is a hyperparameter of fedprox, ")


def test_methods_are_chosen_by_what_they_declare() -> None:
    every = registry.discover().values()
    for option, wanted in {
        "--different-architectures": [m.id for m in every if m.heterogeneous],
        "--no-class-info": [m.id for m in every if m.class_threshold(m.hparams()) is None],
        "--global-model": [m.id for m in every if m.global_model],
    }.items():
        assert [row[0] for row in lines("methods", option)] == ["id", *wanted]
        assert [m["id"] for m in json.loads(printed("methods", option, "--json"))] == wanted
    found = json.loads(printed("methods", "fedprox", "--json"))
    assert found["hyperparameters"]["mu"]["default"] == 0.01 and found["kb_up"] == 153.1
    assert found["headline"] == "received" and "0.001, 0.01, 0.1, 1" in found["authors_settings"]


def test_the_facts_of_a_method_are_its_declarations(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = " ".join(on_terminal(monkeypatch, "methods", "fedgh").split())
    for part in (
        "payload class means up, the head down kb up 2.3 kb down 2.6", "counted on digits with the model digits-a",
        "class info yes class threshold min_class_count", "different architectures yes", "global model no",
        "docs/methods/fedgh.md", "authors settings 0.01, 1, 50; clients SGD", '--method "fedgh(header_lr=0.01)"',
        "header_epochs whole number, at least 1; default 1 passes over the LARs",
    ):  # fmt: skip
        assert part in shown, part


def test_the_facts_are_json_whatever_a_title_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "facts", lambda method: {"id": method.id, "title": "a\u00a0b\x1b"})
    assert json.loads(printed("methods", "fedavg", "--json"))["title"] == "a\u00a0b\x1b"


def test_recipes_come_in_the_order_of_their_numbers() -> None:
    found = [row[0] for row in lines("recipes") if row[0].startswith("ccvr-table4")]
    assert found == [f"ccvr-table4-{clients}-clients" for clients in (10, 50, 100)]


def refused(*arguments: str) -> str:
    """Return what a command says that exits with 2, in one line."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2 or isinstance(result.exception, BadRequest), result.output
    said = result.output or str(result.exception)
    return " ".join(said.split())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("runn",), "no such command 'runn', did you mean 'run'?"),
        (("deploy", "chek"), "no such command 'chek', did you mean 'check'?"),
        (("run", "--lr", "0.1"), "no such option '--lr', did you mean '--set lr=VALUE'?"),
        (("run", "--epochs=3"), "did you mean '--set local-epochs=VALUE'?"),
        (("compare", "--local_epochs=3"), "did you mean '--set local-epochs=VALUE'?"),
        (("run", "--num-server-rounds", "3"), "did you mean '--rounds'?"),
        (("compare", "--num-rounds", "3"), "did you mean '--rounds'?"),
        (("run", "--learning-rate", "3"), "did you mean '--set lr=VALUE'?"),
        (("run", "--datset", "mnist"), "did you mean '--dataset'?"),
        (("run", "--mu", "0.1"), "mu is a hyperparameter of fedprox, "),
        (("export", "--lr", "0.1"), "no such option '--lr'"),
        (("run", "--set", "rounds=3"), "unknown key 'rounds', did you mean 'num-server-rounds'?"),
        (("run", "--set", "mu=0.1"), 'give it as --method "fedprox(mu=0.1)"'),
        (("run", "--method", "moon(tau=1)", "--set", "mu=0.1"), 'give it as --method "moon(mu=0.1)"'),
        (("compare", "--set", "mu=0.1"), 'give it as --methods "fedprox(mu=0.1)"'),
        (("run", "--mu", "0.1"), 'give it as --method "fedprox(mu=VALUE)"'),
        (("compare", "--methods", "local", "fedavg"), "a method: give --method fedavg, or several with commas"),
        (("compare", "--methods", "local", "fedavg", "fedprox"), "separate methods with commas"),
        (("run", "mnist"), "a data set: give --dataset mnist"),
        (("run", "--clients", "0"), "--clients 0: a simulation has at least 1 client"),
        (("compare", "--clients", "0"), "'--clients': 0 is not in the range"),
        (("partition", "--clients", "-2"), "'--clients': -2 is not in the range"),
        (("run", "--rounds", "-1"), "'--rounds': -1 is not in the range"),
        (("run", "--seed", "-1"), "'--seed': -1 is not in the range"),
        (("compare", "--seeds", "0"), "'--seeds': 0 is not in the range"),
        (("compare", "--workers", "0"), "'--workers': 0 is not in the range"),
        (("run", "--client-cpus", "0"), "'--client-cpus': 0 is not in the range"),
        (("run", "--method", "fedprox(mu=0.1", "--dry-run"), "its brackets do not match"),
        (("run", "--method", "fedprox(mu=0.1)", "--set", "method-args=mu=1"), "mu is given twice"),
        (("methods", "fedavg", "--no-class-info"), "options that choose methods go without an id"),
        (("methods", "fedavgg"), "did you mean 'fedavg'?"),
    ],
)
def test_a_wrong_word_is_refused_with_the_right_one_once(arguments: tuple[str, ...], told: str) -> None:
    said = refused(*arguments)
    assert told in said and said.lower().count("did you mean") == told.count("did you mean"), said
    assert "--help'?" not in said and "robust" not in said


@pytest.mark.parametrize("word", ["--zzz", "-x", "--mux"])
def test_a_word_that_is_near_nothing_has_no_suggestion(word: str) -> None:
    assert "did you mean" not in refused("run", word)


def commands(group: click.Group, *above: str) -> Iterator[tuple[str, ...]]:
    """Yield every command and group with the names of the groups that it is in."""
    yield above
    for name in group.list_commands(click.Context(group)):
        inner = group.get_command(click.Context(group), name)
        yield from commands(inner, *above, name) if isinstance(inner, click.Group) else [(*above, name)]


@pytest.mark.parametrize("command", list(commands(typer.main.get_group(app))), ids=" ".join)
def test_help_lists_arguments_once_and_escapes_nothing(command: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": str(WIDE)}).stdout
    assert "Options:" in shown and "\\[" not in shown
    assert shown.lower().count("arguments:") <= 1


def test_help_says_whole_sentences() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": str(WIDE)}).stdout
    found = shown.partition("\n\nRun:")[2]
    assert "..." not in found and "Commands:" not in found and "--install-completion" in shown
    assert all(f"\n\n{group}:" in found for group in ("Look at results", "Use a model", "Lists", "Real devices"))
    for name, *_ in filter(None, commands(typer.main.get_group(app))):
        assert re.search(rf"^  {name} ", found, re.M), name
    assert max(map(len, shown.splitlines())) <= WIDE


def test_no_message_joins_a_suggestion_with_further_punctuation() -> None:
    joined = re.compile(r"suggest(_choice)?\((?:[^{}]|\{[^{}]*\})*\)\}[:;.,]")
    for folder in ("fedapp", "strategies", "clients"):
        for file in (ROOT / folder).rglob("*.py"):
            assert joined.search(file.read_text(encoding="utf-8")) is None, file
    assert suggest("cifar", ["cifar10"], "choose one") == ", did you mean 'cifar10'? Choose one"
    assert suggest("x", ["cifar10"], "choose one") == ": choose one"
