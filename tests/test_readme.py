"""The README quotes files, methods and commands as they are; what it and CONTRIBUTING.md name exists."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from fedapp import cli
from tests.readme import README, ROOT, renewed

TEXT = README.read_text(encoding="utf-8")


def test_what_is_quoted_is_current() -> None:
    assert renewed(TEXT) == TEXT, "run: python -m tests.readme"


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(((?!https?:)[^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target


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
FOLDERS = "benchmarks|clients|docker|docs|fedapp|strategies|tests"


@pytest.mark.parametrize("path", sorted(set(re.findall(rf"(?<![\w/.])((?:{FOLDERS})/[\w/.-]*\w/?)(?![\w<*])", BOTH))))
def test_paths_exist(path: str) -> None:
    assert (ROOT / path).exists()


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.findall(r"(?:^|`)make (\w+)", BOTH, flags=re.M)
    assert {"run", "test", "quick", "mutants"} <= set(found)
    for target in found:
        assert re.search(rf"^{target}:", makefile, flags=re.M), target
