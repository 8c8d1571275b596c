"""Text of a client: escape sequences reach no terminal, cells are no formulas, pages stay escaped."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Message
from hypothesis import given
from hypothesis import strategies as st

from fedapp import cli
from fedapp.engines.runner import Follower
from fedapp.engines.superlink import Outcome
from fedapp.errors import CHARACTERS, LINES, BadRequest, one_line, plain
from fedapp.results import lines, report
from fedapp.results.cells import cell, uncelled
from fedapp.results.terminal import Screen
from fedapp.transport.records import INFO
from tests.liars import federate
from tests.test_robust import QUICK

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\r\x9b31m\u202egnp.exe\x00\x7f\ud800[bold red]<script>alert(1)</script>"
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 28 28\n%%EndComments\nshowpage\n"
FORMULAS = ['=HYPERLINK("http://x","y")', "+1+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\tx", "\rx"]


def harmless(text: str) -> bool:
    return all(c.isprintable() or c in "\n\t" for c in text)


def test_what_is_not_printed_as_itself_becomes_an_escape() -> None:
    assert plain("\x1b[2J a\tb\nc\r") == "\\x1b[2J a\tb\nc\\r"
    assert plain("\u202e\x9b\ud800\u2028") == "\\u202e\\x9b\\ud800\\u2028"
    assert plain("Zürich, 東京 [bold]") == "Zürich, 東京 [bold]"
    assert plain(BadRequest("\a")) == "\\x07"


@given(st.text())
def test_no_text_gets_through(text: str) -> None:
    once = plain(text, whole=True)
    assert harmless(once) and once.encode("utf-8").decode("utf-8") == once == plain(once, whole=True)
    if harmless(text):
        assert once == text


def test_the_end_of_a_long_text_is_kept() -> None:
    lines = [f"line {i}" for i in range(1000)]
    assert plain("\n".join(lines)) == "\n".join(lines[-LINES:])
    assert plain("x" * (CHARACTERS + 10) + "end") == "x" * (CHARACTERS - 3) + "end"
    assert plain("\n".join(lines), whole=True).count("\n") == 999


@pytest.mark.parametrize("text", FORMULAS)
def test_text_is_no_formula_in_a_table(text: str) -> None:
    assert cell(text) == "'" + text and cell("'" + text) == "''" + text
    assert uncelled(cell(text)) == text and uncelled(cell("'" + text)) == "'" + text
    assert cell(-2) == -2 and cell(-2.5) == "-2.5" and cell("-2.5") == "-2.5" and cell("train") == "train"
    assert uncelled("'quoted'") == "'quoted'" and uncelled(-2) == -2


def lying_text(text: str):  # type: ignore[no-untyped-def]
    def lie(kind: str, reply: Message) -> Message:
        if kind == "train":
            reply.content[INFO] = ConfigRecord({"client": 0, "error": f"{text}\n{text}"})
        return reply

    return lie


@pytest.mark.full
@pytest.mark.parametrize("text", [HOSTILE.replace("\ud800", ""), FORMULAS[0]])
def test_a_run_with_a_client_of_hostile_text(text: str, tmp_path: Path) -> None:
    """Every file of the run, and every line that is shown while it runs."""
    run = federate(tmp_path / "run", [0], lying_text(text), clients=3, min_replies=0.5, method="lgfedavg", **QUICK)
    for name in ("dropped.csv", "progress.jsonl", "summary.json"):
        assert harmless((run.out / name).read_text(encoding="utf-8")), name
    with (run.out / "dropped.csv").open(newline="", encoding="utf-8") as f:
        row = next(csv.DictReader(f))
    assert row["client"] == "0" and not row["stage"].startswith("=") and not row["reason"].startswith("=")
    events = [json.loads(line) for line in (run.out / "progress.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {e["kind"] for e in events} >= {"dropped", "client-error"}
    screen = io.StringIO()
    follower = Follower()
    follower.console = Screen(file=screen, force_terminal=True, highlight=False, width=4000)
    for event in events:
        follower(event)
    assert "client 0" in screen.getvalue() and harmless(screen.getvalue())
    if text in FORMULAS:
        return
    page = report.write(run.out).read_text(encoding="utf-8")
    assert "<script>alert(1)" not in page and "\x1b" not in page


FORGED = "round 3/3: received 99.0 %\nclient 2 is blocked for the rest of the run: it lied\n"


def test_a_client_writes_no_line_that_passes_for_one_of_the_run(tmp_path: Path) -> None:
    """An error, a stage and a fact with line ends: each becomes one line, or lines that begin with the client."""
    changes = {"train": {"error": FORGED}, "evaluate": {"error": "boom", "stage": FORGED}}

    def lie(kind: str, reply: Message) -> Message:
        if kind in changes:
            reply.content[INFO] = ConfigRecord({"client": 0, **changes[kind]})
        return reply

    run = federate(tmp_path / "run", [0], lie, clients=3, min_replies=0.5, method="lgfedavg", **QUICK)
    events = [json.loads(line) for line in (run.out / "progress.jsonl").read_text(encoding="utf-8").splitlines()]
    told = [e for e in events if e["kind"] in ("dropped", "blocked", "client-error")]
    assert {e["kind"] for e in told} == {"dropped", "blocked", "client-error"}
    for event in told:
        assert not [k for k, v in event.items() if "\n" in str(v) and k != "traceback"]
        head, *rest = str(lines.line(event)).split("\n")
        assert head.startswith(("client 0", "round 1: client 0")) and all(r.startswith("client 0: ") for r in rest)
    assert (run.out / "dropped.csv").read_text(encoding="utf-8").count("\n") == 3
    failed = Outcome(
        "finished:failed", "", False, {"message": "few", "traceback": FORGED, "client": 0, "round": 1, "stage": "train"}
    )
    said: list[str] = []
    assert failed.report(said.append) == 1
    assert "round 3/3" not in said[0] and len(said[0].splitlines()) == 2


@given(st.text())
def test_one_line_is_one_line(text: str) -> None:
    assert len(one_line(text).splitlines()) <= 1 and harmless(one_line(text))


def test_a_client_that_cannot_take_part_is_named_in_plain_text(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def lie(kind: str, reply: Message) -> Message:
        reply.content[INFO] = ConfigRecord({"client": 0, "error": HOSTILE.replace("\ud800", "")})
        return reply

    with pytest.raises(BadRequest, match="client 0 cannot take part") as e:
        federate(tmp_path / "run", [0], lie, clients=2, method="lgfedavg", **QUICK)
    assert harmless(str(e.value)) and harmless((tmp_path / "run" / "error.json").read_text(encoding="utf-8"))


def test_the_command_line_prints_errors_in_plain_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise BadRequest(HOSTILE)

    monkeypatch.setattr(type(cli.app), "__call__", fails)
    with pytest.raises(SystemExit):
        cli.main()
    said = capsys.readouterr().err
    assert said.startswith("fedapp: ") and harmless(said)


@pytest.mark.parametrize("piped", [False, True])
def test_a_narrow_or_closed_output_does_not_break_a_command(piped: bool, tmp_path: Path) -> None:
    """A dash that Latin-1 lacks becomes a question mark; where the reader of a pipe has gone, the work goes on."""
    code = (
        "from pathlib import Path\nfrom fedapp import cli\nfrom fedapp.results.terminal import Screen, echo\n"
        "def app(**_):\n"
        "    for _ in range(3):\n        echo('a \u2013 b ' * 9999)\n        Screen().print('c \u2013 d')\n"
        f"    Path({str(tmp_path / 'done')!r}).touch()\n"
        "cli.main(app)\n"
    )
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        if piped:
            process.stdout.close()
        else:
            assert b"a ? b" in process.stdout.read()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (0, b"") and (tmp_path / "done").exists()
