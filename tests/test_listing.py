"""The commands that list what a run can be made of, on a terminal of 80 columns and through a pipe."""

from __future__ import annotations

import io
from collections.abc import Iterator

import click
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from fedapp import __version__, registry
from fedapp.cli import app, printing
from fedapp.config import KEYS
from fedapp.data.datasets import DATASET_NAMES
from fedapp.data.partitions import PARTITION_KINDS
from fedapp.errors import BadRequest
from fedapp.models import MODEL_NAMES

WIDE = 80


def lines(*arguments: str) -> list[list[str]]:
    """Return what a command prints through a pipe: the cells of each line."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return [line.split("\t") for line in result.stdout.splitlines()]


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
    assert lines("methods", "fedprox")[0][:3] == ["mu", "number, at least 0", "0.01"]
    for method in registry.discover().values():
        rows = lines("methods", method.id)
        assert [row[0] for row in rows] == list(method.hparams.model_fields)
        assert all(len(row) == 4 and row[1] and row[3] for row in rows), rows


@pytest.mark.parametrize("method", ["fedprox(mu=0.5 lr=0.2)", " fedprox( mu=0.5  lr=0.2 )"])
def test_a_run_takes_a_methods_values_in_brackets(method: str) -> None:
    result = CliRunner().invoke(app, ["run", "--dry-run", "--engine", "local", "--method", method])
    assert result.exit_code == 0, result.output
    assert {"method = 'fedprox'", "method-args = 'mu=0.5'", "lr = 0.2"} <= set(result.stdout.splitlines())


@pytest.mark.parametrize(
    ("command", "names"),
    [("models", MODEL_NAMES), ("datasets", DATASET_NAMES), ("partitions", (*PARTITION_KINDS, "flwr:NAME"))],
)
def test_every_name_is_listed_with_a_sentence(command: str, names: tuple[str, ...]) -> None:
    rows = lines(command)
    assert tuple(row[0] for row in rows)[: len(names)] == names
    assert all(len(row[-1].split()) > 1 for row in rows)


@pytest.mark.parametrize("command", ["methods", "keys", "models", "datasets", "partitions", "recipes"])
def test_a_listing_fits_eighty_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is wider, and no name is broken."""
    names = [row[0] for row in lines(command)]
    console = Console(width=WIDE, record=True, file=io.StringIO())
    monkeypatch.setattr(printing, "Screen", lambda **_: console)
    monkeypatch.setattr(printing, "on_terminal", lambda: True)
    result = CliRunner().invoke(app, [command])
    assert result.exit_code == 0, result.output
    shown = console.export_text().splitlines()
    assert max(map(len, shown)) <= WIDE
    begun = {line.split(" ")[0] for line in shown if not line.startswith(" ")}
    assert {*names} <= begun


def refused(*arguments: str) -> str:
    """Return what a command says that exits with 2, in one line."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2 or isinstance(result.exception, BadRequest), result.output
    said = result.output or str(result.exception)
    return " ".join(said.split())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("runn",), "No such command 'runn', did you mean 'run'?"),
        (("deploy", "chek"), "No such command 'chek', did you mean 'check'?"),
        (("run", "--lr", "0.1"), "No such option '--lr', did you mean '--set lr=VALUE'?"),
        (("run", "--epochs=3"), "did you mean '--set local-epochs=VALUE'?"),
        (("compare", "--local_epochs=3"), "did you mean '--set local-epochs=VALUE'?"),
        (("run", "--num-server-rounds", "3"), "did you mean '--rounds'?"),
        (("compare", "--num-rounds", "3"), "did you mean '--rounds'?"),
        (("run", "--learning-rate", "3"), "did you mean '--set lr=VALUE'?"),
        (("run", "--datset", "mnist"), "did you mean '--dataset'?"),
        (("run", "--mu", "0.1"), "mu is a hyperparameter of fedprox, "),
        (("export", "--lr", "0.1"), "No such option '--lr'"),
        (("run", "--set", "rounds=3"), "unknown key 'rounds', did you mean 'num-server-rounds'?"),
        (("run", "--set", "mu=0.1"), '--set method-args="mu=0.1"'),
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
    assert "..." not in shown.partition("Commands:")[2] and "--install-completion" in shown
    assert max(map(len, shown.splitlines())) <= WIDE
