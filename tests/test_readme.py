"""Pages quote files and tables as they are; what README.md and CONTRIBUTING.md name exists."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from fedapp import cli, registry
from fedapp.cli import listing
from tests.readme import OWN_MODELS, QUOTING, README, ROOT, renewed

TEXT = README.read_text(encoding="utf-8")


def test_what_is_quoted_is_current() -> None:
    for page in QUOTING:
        text = page.read_text(encoding="utf-8")
        assert renewed(text) == text, "run: python -m tests.readme"


def test_every_method_says_what_it_needs_of_a_model() -> None:
    table = OWN_MODELS.read_text(encoding="utf-8").partition("<!-- table:needs -->")[2].partition("<!-- /table")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, flags=re.M) == registry.ORDER


def test_the_list_of_methods_judged_as_received_is_complete() -> None:
    received = (ROOT / "docs" / "scores.md").read_text(encoding="utf-8").partition("- `received` where")[2]
    named = re.findall(r"[A-Z][\w-]*(?: CCVR)?|CCVR", received.partition("\n")[0])
    assert sorted(named) == sorted(m.title for m in registry.discover().values() if m.deploy_as == "received")


def test_every_method_says_what_it_costs() -> None:
    """`tests/test_contract.py` counts and compares."""
    assert list(listing.notes()) == registry.ORDER and all(len(m["costs"]) == 4 for m in listing.notes().values())


COMMANDS = re.findall(r"^\.venv/bin/fedapp ([^#\n]+)", TEXT, flags=re.M)


def test_commands_were_found() -> None:
    assert len(COMMANDS) >= 4


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_have_options_that_exist(command: str) -> None:
    name = command.split()[0]
    shown = CliRunner().invoke(cli.app, [name, "--help"], terminal_width=200)
    assert shown.exit_code == 0
    for option in re.findall(r"(--[a-z-]+)", command):
        assert option in shown.output


BOTH = TEXT + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FOLDERS = "benchmarks|clients|docker|docs|fedapp|strategies|tests|tools"


@pytest.mark.parametrize("path", sorted(set(re.findall(rf"(?<![\w/.])((?:{FOLDERS})/[\w/.-]*\w/?)(?![\w<*])", BOTH))))
def test_paths_exist(path: str) -> None:
    assert (ROOT / path).exists()


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.findall(r"(?:^|`)make (\w+)", BOTH, flags=re.M)
    assert {"run", "test", "quick", "mutants"} <= set(found)
    for target in found:
        assert re.search(rf"^{target}:", makefile, flags=re.M), target
