"""The tutorials and docs/own-data.md: scripts, settings, commands and printed texts are read from the pages and tried.

A block of code is a file with the name that stands before it, a `console` block holds commands, and a `text` block is
what the commands before it have printed.
"""

from __future__ import annotations

import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import fedapp
from fedapp import cli
from fedapp.results.runs import read_run
from tests.test_report import Page

DOCS = Path(__file__).parent.parent / "docs"
METHODS = {"pictures": "fedclassavg", "sensors": "lgfedavg", "table": "fedavg"}
TUTORIALS = {name: (DOCS / "tutorials" / f"{name}.md").read_text(encoding="utf-8") for name in METHODS}
TEXT = (DOCS / "own-data.md").read_text(encoding="utf-8")


def blocks(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the text before each block of code, its language, and its lines."""
    yield from re.findall(r"(.*?)^```(\w+)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def tried(command: str, rounds: int = 0) -> str:
    """Run one command in the current folder and return what it prints; `rounds` = 0 leaves a comparison its length."""
    program, *words = shlex.split(command.replace("\\\n", ""))
    if program == "python":
        runpy.run_path(*words, run_name="__main__")
        return ""
    assert program == "fedapp", command
    if words[0] == "compare":
        words += ["--workers", "1"]  # a process less to start; the numbers are the same
        words += ["--rounds", str(rounds)] if rounds else []
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, f"{command}\n{done.output}\n{done.exception!r}"
    return done.stdout


def walk(text: str, rounds: int = 0) -> list[str]:
    """Do what a text says in the current folder; return its commands."""
    commands: list[str] = []
    printed = ""
    for before, language, body in blocks(text):
        if language == "console":
            for command in body.splitlines():
                printed = tried(command, rounds)
                commands.append(command)
        elif language == "text":
            assert body.strip() in printed
        else:
            name = re.findall(rf"`([\w-]+\.{'py' if language == 'python' else language})`", before)[-1]
            Path(name).write_text(body, encoding="utf-8")
    return commands


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDAPP_CACHE", str(tmp_path / "cache"))
    return tmp_path


SHORT = [(name, 1) for name in TUTORIALS]
FULL = [pytest.param(name, 0, marks=pytest.mark.slow) for name in TUTORIALS]


@pytest.mark.full
@pytest.mark.parametrize(("name", "rounds"), [*SHORT, *FULL])
def test_a_tutorial_ends_in_a_report_and_in_a_model_that_predicts(name: str, rounds: int, here: Path) -> None:
    commands = walk(TUTORIALS[name], rounds)
    assert [c.split()[1] for c in commands if c.startswith("fedapp")] == ["partition", "compare", "report", "predict"]

    (comparison,) = (here / "runs").iterdir()
    results = pd.read_csv(comparison / "results.csv")
    page = Page((comparison / "report.html").read_text(encoding="utf-8"))
    assert len(results) == 9 and "Standalone" in page.said
    words = shlex.split(commands[-1])
    run, client, table = (words[words.index(option) + 1] for option in ("--run", "--client", "--out"))
    assert run.endswith(METHODS[name] + "-s0") and (here / run / "report.html").is_file()
    if not rounds:
        assert results["trained_last"].min() > largest_class(here / run), "all methods beat the largest class"

    found = pd.read_csv(here / table)
    net = fedapp.load(run, client=int(client) if client.isdigit() else client)
    assert len(found) == {"pictures": 2, "sensors": 6, "table": 2}[name]
    assert set(found["class"]) <= set(net.classes) and found["probability"].between(1 / len(net.classes), 1).all()
    assert np.allclose(found[[f"p_{name}" for name in net.classes]].sum(axis=1), 1, atol=1e-5)


def test_the_card_on_the_page_is_what_partition_prints(here: Path) -> None:
    before, card, _ = TUTORIALS["pictures"].partition("always predicting")
    assert card
    assert walk(f"{before}{card}\n```\n")[-1].startswith("fedapp partition")


def largest_class(run: Path) -> float:
    """Return the mean accuracy of always predicting a client's largest class."""
    counts = np.array(read_run(run).card["train"])
    return float((counts.max(axis=1) / counts.sum(axis=1)).mean())


REFERENCE = [line for _, language, body in blocks(TEXT) if language == "console" for line in body.splitlines()]


@pytest.mark.parametrize("command", REFERENCE)
def test_other_commands_have_options_that_exist(command: str) -> None:
    program, name, *words = shlex.split(command)
    shown = CliRunner().invoke(cli.app, [name, "--help"], terminal_width=200)
    assert program == "fedapp" and shown.exit_code == 0
    for option in (w for w in words if w.startswith("--")):
        assert option in shown.output


@pytest.mark.slow
def test_the_other_commands_work_after_the_first_tutorial(here: Path) -> None:
    walk(TUTORIALS["pictures"], rounds=1)
    codes = [body for _, language, body in blocks(TEXT) if language == "python"]
    for code in (c for c in codes if "fedapp" not in c):
        exec(compile(code, "own-data.md", "exec"), {})
    for command in REFERENCE:
        tried(command)
    assert (here / "client3.pt2").is_file() and (here / "runs" / "waves").is_dir()
    tried(
        "fedapp run --dataset npz --set data-dir=shapes.npz --method fedgh --clients 3 --rounds 1 --engine local "
        "--set model=cnn-a --out runs/npz"
    )


def form(screen: str) -> list[str]:
    """Return the title, the table and the lines below it, with `#` for numbers and without the sentences between."""
    title, *lines = screen.strip().splitlines()
    table = next(i for i, line in enumerate(lines) if line.split()[:2] == ["own", "vs"])
    text = "\n".join([title, *(" ".join(line.split()) for line in lines[table:])]).partition("\nreport ")[0]
    return re.sub(r"# (?:s|min) of", "# of", re.sub(r"[-+]?\d[\d.,/]*(?<=\d)", "#", text)).split("\n")


@pytest.mark.full
@pytest.mark.usefixtures("here")
def test_the_quick_start_shows_the_screen_of_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = [(before, body) for before, _, body in blocks((DOCS / "quickstart.md").read_text(encoding="utf-8"))]
    at = next(i for i, (_, body) in enumerate(found) if body.startswith("fedapp compare digits"))
    screen, shown = tried(found[at][1], rounds=2), found[at + 1][1]
    assert form(screen) == form(shown)
    assert screen.splitlines()[-2:] == shown.splitlines()[-2:], "paths as a reader may type them"
