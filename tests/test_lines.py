"""What a run says of itself: to a terminal, and to Flower's log where nobody else follows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedapp.engines import local, runner
from fedapp.results.lines import Spoken, line, resumed, scores

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


def test_a_run_is_told_from_its_first_line_to_its_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    config = local.prepare(SMALL, tmp_path / "run")
    local.run_local(config, Spoken(said.append))
    assert said[0] == f"local on digits, 2 clients, 1 rounds; results go to {tmp_path / 'run'}"
    assert said[1].startswith("round 1/1: received ")
    assert said[-1].startswith("trained ") and said[-1].endswith(f"results: {tmp_path / 'run'}")
    values = local.resumed(tmp_path / "run", {"num-server-rounds": 2})
    assert runner.run_and_report(values, tmp_path / "run", engine="local") == 0
    shown = capsys.readouterr().err
    assert "continues with round 2 of 2 (rounds 1 to 1 are kept as they are)" in shown.replace("\n", " ")
