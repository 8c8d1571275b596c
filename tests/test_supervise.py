"""The processes of a session: found and stopped however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from fedapp.engines import superlink as launch
from fedapp.engines import supervise
from fedapp.engines.superlink import Session
from tests.toyapp import make_toy, running, wait_for


def test_rays_agents_are_known_before_they_have_their_titles(tmp_path: Path) -> None:
    """Ray's node dies with its agents, whose processes are called by their scripts for their first seconds."""
    kept, stopped = ("dashboard/agent.py", "runtime_env/agent/main.py"), ("agent.py", "other/agent/main.py")
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name in (*kept, *stopped):
            script = tmp_path / name
            script.parent.mkdir(parents=True, exist_ok=True)
            script.write_text("import time; time.sleep(600)")
            env = os.environ | {supervise.MARKER: str(tmp_path)}
            started[name] = subprocess.Popen([sys.executable, "-u", str(script), "--node-id=1"], env=env)
        assert not supervise.SessionProcesses(str(tmp_path)).stop(keep=launch._RAY)
        assert [name for name, process in started.items() if process.poll() is None] == list(kept)
    finally:
        for process in started.values():
            process.kill()
            process.wait()


SCRIPT = """
import sys
from pathlib import Path
from fedapp.engines.superlink import Session

app, out, log = map(Path, sys.argv[1:])
with Session(app=app, log=log) as session:
    run = session.submit({"out": str(out), "mode": "hang"}, num_supernodes=2, total_cpus=2)
    try:
        run.follow(lambda event: None)
    except KeyboardInterrupt as interrupt:
        print("interrupted", session.home, flush=True)
        sys.exit(130)
"""


def interrupted(tmp_path: Path, number: signal.Signals) -> tuple[subprocess.Popen[str], set[int], str]:
    """Start a session in another process, signal it while its clients work; return what belonged to it."""
    toy = make_toy(tmp_path / "toy")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, str(script), str(toy), str(out), str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(launch.__file__).parents[2])},
    )
    try:
        family = psutil.Process(process.pid)

        def names() -> list[str]:
            return [word for child in family.children(recursive=True) for word in _words(child)]

        assert wait_for(lambda: "ray::ClientAppActor.run" in names(), 90), (tmp_path / "log").read_text()
        pids = {child.pid for child in family.children(recursive=True)}
        process.send_signal(number)
        printed, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    return process, pids, printed


def _words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return [word.strip() for word in process.cmdline()]
    return []


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupt_leaves_no_process_and_no_folder(tmp_path: Path, number: signal.Signals) -> None:
    process, pids, printed = interrupted(tmp_path, number)
    assert len(pids) >= 8  # SuperLink, SuperExec, simulation, and Ray's own
    assert process.returncode == 130
    assert not running(pids)
    word, folder = printed.split()
    assert word == "interrupted"
    assert not Path(folder).exists()


@pytest.mark.slow
def test_a_killed_launcher_takes_its_processes_along(tmp_path: Path) -> None:
    _, pids, _ = interrupted(tmp_path, signal.SIGKILL)
    assert wait_for(lambda: not running(pids), 30), [psutil.Process(pid).cmdline() for pid in running(pids)]


def test_signals_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "_start", lambda self: None)
    # Whatever other sessions of this process do with them.
    outer = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with Session(app=tmp_path):
        assert signal.getsignal(signal.SIGTERM) is not before[signal.SIGTERM]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert {number: signal.getsignal(number) for number in before} == before
    signal.signal(signal.SIGTERM, outer)
    # Other threads may not set signals, but may hold a session.
    failures: list[BaseException] = []

    def hold() -> None:
        try:
            with Session(app=tmp_path):
                pass
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert not failures
