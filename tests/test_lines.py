"""What a run says of itself: to a terminal, and to Flower's log where nobody else follows it."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedapp import cli
from fedapp.engines import local, progress, runner, superlink
from fedapp.engines.superlink import LaunchError, Outcome
from fedapp.errors import counted, raised
from fedapp.results import terminal
from fedapp.results.directory import only_writer, write_json
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
    assert scores(row, 2) == "received 50.0 %", "losses of methods are not comparable"
    assert scores(row, 3) == "received 50.0 % (2 clients)"


def test_the_summary_has_the_bytes_of_queries(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    summary = tiny(method="fed3r", method_args="base=none", rounds=1).summary
    runner.print_summary(summary)
    shown = " ".join(capsys.readouterr().out.split())
    sent = summary["bytes_up_query.sums"]
    assert sent > 0 and f"bytes per client for the query of sums: {sent:,.0f} up" in shown


# ---- runs under Ray, without Ray -------------------------------------------------------------------------------------


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[Any], int]]:
    """Stand in for Flower and Ray: a run is the call that a test puts in here; without one nothing may be started."""
    runs: list[Callable[[Any], int]] = []

    class Session:
        def __init__(self, **_: Any) -> None:
            assert runs, "a session was started"

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(superlink, "Session", Session)
    monkeypatch.setattr(runner, "run_in", lambda session, config, *_: runs[0](config))
    return runs


def on_ray(values: dict[str, Any], out: Path) -> int:
    return runner.run_and_report(values, out, engine="ray", client_cpus=1)


def test_a_run_that_was_lost_names_the_command_that_continues_it(
    ray: list[Callable[[Any], int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a run"

    def lost(config: Any) -> int:
        local.run_local(config)
        (out / "summary.json").unlink()
        return Outcome("finished:failed", "No heartbeat received from the task", False, None).report(print)

    ray.append(lost)
    assert on_ray(SMALL, out) == 1
    said = f"complete rounds are kept; to continue: fedapp run --resume '{out}'"
    shown = capsys.readouterr()
    assert "No heartbeat received" in shown.out and shown.err.splitlines()[-2:] == [f"results: {out}", said]
    ray[0] = lambda config: write_json(out / "error.json", {"message": "a fault of its own"}) or 1
    assert on_ray(local.resumed(out, {}), out) == 1 and "to continue" not in capsys.readouterr().err
    ray[0] = lambda config: 1
    assert on_ray(SMALL, tmp_path / "none") == 1 and "to continue" not in capsys.readouterr().err, "nothing was kept"


def test_a_resume_of_a_run_that_is_active_is_refused_before_ray_starts(
    ray: list[Callable[[Any], int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    local.run_local(local.prepare(SMALL, out))
    monkeypatch.setattr("sys.argv", ["fedapp", "run", "--resume", str(out)])
    with only_writer(out), pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert capsys.readouterr().err.partition("reading settings and data\n")[2] == (
        f"fedapp: another server process still writes to {out}: wait until it has ended, or end it\n"
    )


def test_a_failed_start_is_told_without_a_traceback(
    ray: list[Callable[[Any], int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(**_: Any) -> None:
        raise LaunchError("'flower-superlink' is not installed")

    monkeypatch.setattr(superlink, "Session", fails)
    words = ["--method", "local", "--clients", "2", "--rounds", "1", "--client-cpus", "1", "--out", str(tmp_path / "r")]
    monkeypatch.setattr("sys.argv", ["fedapp", "run", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    shown = capsys.readouterr().err
    assert end.value.code == 1 and "Traceback" not in shown
    assert shown.splitlines()[-1] == "fedapp: 'flower-superlink' is not installed"


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
    assert "last scores follow" in shown and " s left" not in shown


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
    assert "last scores" in last and "received 95.5 %" in last and "1.815" not in last and "\u2026" not in last
    assert ("\u2501" in last) == (width >= progress.WITH_BAR)


class Terminal(io.StringIO):
    """A stream that a person reads."""

    def isatty(self) -> bool:
        """Return that a person reads."""
        return True


def test_a_work_that_takes_seconds_is_named_until_the_next_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, quiet in ((Terminal(), False), (io.StringIO(), False), (Terminal(), True)):
        monkeypatch.setattr("sys.stderr", stream)
        with terminal.quiet(quiet):
            terminal.announce("reading data")
            assert len(terminal._waiting) == (stream.isatty() and not quiet)
            terminal.echo("read", err=True)
        shown = stream.getvalue()
        assert not terminal._waiting
        if quiet:
            assert shown == ""
        elif stream.isatty():
            assert "reading data 0 s" in shown and shown.endswith("read\n") and "\x1b[?25h" in shown
        else:
            assert shown == "reading data\nread\n"


@pytest.mark.parametrize("stream", ["", "2"])
@pytest.mark.parametrize("ending", [">&-", ">/dev/full"])
@pytest.mark.parametrize(
    "program", ["echo('a', err={err})", "Screen(stderr={err}).print('a')", "announce('a'); show('', ['x'], [['a']])"]
)
def test_a_command_does_its_work_where_a_stream_is_closed_or_full(program: str, ending: str, stream: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    program = f"from fedapp.results.terminal import *; from fedapp.cli.printing import show; {program}; echo('b')"
    command = f'{sys.executable} -c "{program.format(err=bool(stream))}; import os; os._exit(7)" {stream}{ending}'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    assert ("cannot be written (No space left on device)" in done.stderr) == (not stream and "full" in ending)


def test_nouns_have_their_plural() -> None:
    words = {
        "round": "rounds",
        "class": "classes",
        "reply": "replies",
        "query": "queries",
        "array": "arrays",
        "key": "keys",
    }
    assert {word: counted(2, word) for word in words} == {word: f"2 {plural}" for word, plural in words.items()}
    assert counted(1, "array") == "1 array" and counted(0, "reply") == "0 replies"
