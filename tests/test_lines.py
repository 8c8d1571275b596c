"""What a run says of itself: to a terminal, and to Flower's log where nobody else follows it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from fedapp.engines import local, runner
from fedapp.errors import raised
from fedapp.results.lines import Spoken, failed, line, resumed, scores
from fedapp.results.runs import read_json
from fedapp.results.terminal import Screen
from strategies import local as standalone

SMALL = {"method": "local", "clients": 2, "num-server-rounds": 1, "local-epochs": 1, "data-fraction": 0.1}


def start(done: int, rounds: int = 20) -> dict[str, Any]:
    return {"kind": "start", "resume": True, "done": done, "rounds": rounds}


def test_a_resumed_run_says_where_it_goes_on() -> None:
    assert resumed(start(6)) == "continues with round 7 of 20 (rounds 1 to 6 are kept as they are)"
    assert "begins again with round 1 of 20" in resumed(start(0))
    assert resumed(start(20)).startswith("all 20 rounds are done")
    assert line(start(6)) == resumed(start(6)) and line({**start(6), "resume": False}) is None


def test_a_round_says_its_scores_and_who_was_missing() -> None:
    row = {
        "kind": "round",
        "clients": 2,
        "received_accuracy": 0.5,
        "trained_accuracy": float("nan"),
        "train_loss": 0.25,
    }
    assert scores(row, 2) == "received 50.0 %, loss 0.250"
    assert scores(row, 3) == "received 50.0 %, loss 0.250 (2 clients)"


@pytest.mark.parametrize("hook", ["strategy", "client"])
def test_an_error_in_a_methods_code_is_shown_with_type_file_and_line(
    hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*_: object) -> None:
        raise KeyError("absent")

    name = "aggregate" if hook == "strategy" else "after_training"
    monkeypatch.setattr(getattr(standalone.METHOD, hook), name, wrong, raising=False)
    assert runner.run_and_report(SMALL, tmp_path / "run", engine="local") == 1
    shown = capsys.readouterr().err
    assert shown.count("KeyError: 'absent'") >= 1 and shown.count("Traceback (most recent call last)") == 1
    assert f'File "{__file__}", line ' in shown and "in wrong" in shown
    assert "error.json in the run directory keeps the traceback" in shown
    assert f'File "{__file__}", line ' in read_json(tmp_path / "run" / "error.json")["traceback"]


def test_an_error_is_told_in_one_line_with_the_place_in_the_users_code() -> None:
    def told(text: str) -> str:
        with pytest.raises(Exception) as error:
            exec(compile(text, "/home/me/net.py", "exec"), {})
        return raised(error.value)

    assert told("def f():\n  import json\n  json.loads('{')\nf()").endswith("(/home/me/net.py, line 3, in f)")
    assert "(net.py, line 2)" in told("x = 1\nx x") and "/home" not in told("x x")
    assert raised(ValueError("two\nlines")) == "ValueError: two lines"
    assert failed({"message": "few replies", "traceback": "", "client": None}) == "the run failed: few replies"


def test_a_run_is_told_from_its_first_line_to_its_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    config = local.prepare(SMALL, tmp_path / "run")
    local.run_local(config, Spoken(said.append))
    assert said[0] == f"local on digits, 2 clients, 1 round; results go to {tmp_path / 'run'}"
    assert said[1].startswith("round 1/1: received ")
    assert said[-1].startswith("trained ") and said[-1].endswith(f"results: {tmp_path / 'run'}")
    values = local.resumed(tmp_path / "run", {"num-server-rounds": 2})
    assert runner.run_and_report(values, tmp_path / "run", engine="local") == 0
    shown = capsys.readouterr().err
    assert "continues with round 2 of 2 (round 1 is kept as it is)" in shown.replace("\n", " ")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_line_of_progress_cuts_no_number(width: int) -> None:
    shown = io.StringIO()
    with runner.Follower("fedclassavg s0 (3/3)") as follower:
        follower.console = Screen(width=width, file=shown, force_terminal=True, color_system=None)
        follower.__enter__()
        follower({"kind": "start", "done": 0, "clients": 10, "rounds": 20, "method": "fedclassavg"})
        scored = {f"{protocol}_accuracy": 0.955 for protocol in ("received", "trained", "global")}
        follower({"kind": "round", "round": 20, "rounds": 20, "clients": 10, "train_loss": 1.815, **scored})
    last = shown.getvalue()
    assert "0:00:00" in last and "1.815" in last and "\u2026" not in last
    assert ("\u2501" in last) == (width >= runner.WITH_BAR)
