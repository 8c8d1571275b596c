"""The launcher, against a small Flower app of its own: truthful outcomes, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedapp.engines import control, supervise
from fedapp.engines import superlink as launch
from fedapp.engines.resources import choose_resources
from fedapp.engines.superlink import LaunchError, Outcome, RunHandle, Session
from fedapp.errors import BadRequest
from tests.toyapp import ignore, make_toy, running, wait_for

# What needs no SuperLink


def test_events_are_read_when_complete_and_once(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    seen: list[dict[str, Any]] = []
    reader = launch.EventReader(path)
    reader.read(seen.append)
    with path.open("ab") as file:
        for piece, expected in [(b'{"a": 1}\n{"b"', 1), (b": 2", 1), (b"}\n", 2), (b"\n", 2), (b'{"c": 3}\n', 3)]:
            file.write(piece)
            file.flush()
            reader.read(seen.append)
            assert len(seen) == expected
    assert seen == [{"a": 1}, {"b": 2}, {"c": 3}]


@pytest.mark.parametrize("characters", [44, 45, 200])
def test_rays_sockets_have_valid_names_whatever_the_temporary_folder_is(
    characters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + "t" * (characters - 1))
    assert launch._short_folder() == (None if characters < 45 else "/tmp")
    monkeypatch.setattr(os, "access", lambda *_: False)
    if characters >= 45:
        with pytest.raises(BadRequest, match=f"path of {characters} characters .* set TMPDIR"):
            launch._short_folder()


def test_a_socks_proxy_does_not_reach_flowers_programs_which_cannot_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    for name, value in (("ALL_PROXY", "socks5://127.0.0.1:9"), ("https_proxy", "http://127.0.0.1:9")):
        monkeypatch.setenv(name, value)
    found = Session()._environment()
    assert "ALL_PROXY" not in found and found["https_proxy"] == "http://127.0.0.1:9"
    with control.Control.of_port(9):
        pass  # it is made, although httpx refuses such a proxy


def test_an_empty_path_still_finds_the_systems_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert control.environment()["PATH"].split(os.pathsep)[-1] == os.defpath.split(os.pathsep)[-1]


def test_events_of_an_earlier_run_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    path.write_text('{"old": 1}\n{"torn": ')
    reader = launch.EventReader(path)
    with path.open("a") as file:
        file.write('{"new": 1}\n')
    seen: list[dict[str, Any]] = []
    reader.read(seen.append)
    assert seen == [{"new": 1}]


def test_a_broken_event_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    reader = launch.EventReader(path)
    path.write_text("not json\n")
    with pytest.raises(LaunchError, match="not a JSON object"):
        reader.read(ignore)


def test_the_log_tail_is_the_runs_own_and_without_noise(tmp_path: Path) -> None:
    path = tmp_path / "log"
    before = b"earlier run\n"
    path.write_bytes(before + b'"POST /v1/x HTTP/1.1" 200\n\x1b[91mERROR \x1b[0m: bad\nlast\n')
    assert launch._tail(path, len(before)) == "ERROR : bad\nlast"
    path.write_bytes(before + b"first\nlast\n")
    assert launch._tail(path, len(before), lines=1) == "last"


def test_a_long_log_shows_its_first_error_too(tmp_path: Path) -> None:
    path = tmp_path / "log"
    chatter = [f"line {i}" for i in range(100)]
    path.write_text("\n".join(chatter))
    assert launch._tail(path, 0, lines=4).splitlines() == chatter[-4:]
    path.write_text("\n".join([*chatter[:9], "ERROR : the cause", "Traceback", *chatter[9:], "ERROR : the end"]))
    shown = launch._tail(path, 0, lines=2, head=3).splitlines()
    assert shown == ["ERROR : the cause", "Traceback", "line 9", "...", "line 99", "ERROR : the end"]
    assert launch._tail(path, len("\n".join(chatter[:9])) + 19, lines=2).splitlines()[0] == "Traceback"
    # An error among the last lines needs no second place.
    path.write_text("\n".join([*chatter, "ERROR : the end"]))
    assert launch._tail(path, 0, lines=4).splitlines() == ["line 97", "line 98", "line 99", "ERROR : the end"]


def test_a_superlink_that_cannot_start_shows_its_log_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bin" / "flower-superlink"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho the reason why\nsleep 100 &\nexit 3\n")
    fake.chmod(0o755)
    real = control.executable
    monkeypatch.setattr(
        control, "executable", lambda name, path: str(fake) if "superlink" in name else real(name, path)
    )
    session = Session(app=make_toy(tmp_path / "toy"))
    with pytest.raises(LaunchError, match="the reason why"):
        session.__enter__()
    assert not session._processes.alive()
    assert not session.home.exists()


# A real SuperLink


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    folder = tmp_path_factory.mktemp("session")
    with Session(app=make_toy(folder / "toy"), log=folder / "superlink.log", ray_cpus=2) as live:
        yield live
        pids = {process.pid for process in live._processes.alive()}
    assert pids
    assert not running(pids)
    assert not live.home.exists()


def go(session: Session, out: Path, **config: Any) -> tuple[Outcome, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    run = session.submit({"out": str(out), **config}, num_supernodes=3, client_cpus=1)
    return run.follow(events.append), events


CONFIG = {"method.mu": 1e-3, "text-value": "a 'b' \"c\" = ü\n# \\ {x}", "some-flag": True, "whole": -7}


def test_a_good_run(session: Session, tmp_path: Path) -> None:
    outcome, events = go(session, tmp_path / "out", **CONFIG)
    assert outcome == Outcome(status="finished:completed", details="", ok=True)
    assert outcome.report(pytest.fail) == 0
    assert [event["event"] for event in events] == ["start", "round", "replies", "round", "replies"]
    start = events[0]
    assert start["config"] == {"out": str(tmp_path / "out"), "mode": "good", **CONFIG}
    assert Path(start["cwd"]) == session.app
    assert Path(start["file"]).is_relative_to(session.home)  # the bundle, not an installed copy
    assert start["environment"]["FLWR_TELEMETRY_ENABLED"] == "0"
    assert Path(start["environment"]["PATH"].split(os.pathsep)[0]) == Path(sys.executable).parent
    for event in events[2::2]:
        assert sorted(reply["partition"] for reply in event["replies"]) == [0, 1, 2]
        assert 1 <= len({reply["pid"] for reply in event["replies"]}) <= 2  # two CPUs, one each
    assert "client speaking" in session.log_path.read_text()
    workers = {reply["pid"] for event in events[2::2] for reply in event["replies"]}
    assert not running(workers | {start["pid"]})


@pytest.mark.full
def test_an_app_that_raises_is_not_a_success(session: Session, tmp_path: Path) -> None:
    outcome, events = go(session, tmp_path / "out", mode="raise")
    assert len(events) == 1
    said: list[str] = []
    assert (outcome.ok, outcome.report(said.append), outcome.status) == (False, 1, "finished:failed")
    assert said[0].startswith("the run failed: finished:failed") and "boom in the server" in said[0]
    assert "ValueError: boom in the server" in outcome.log_tail
    assert "Traceback" in outcome.log_tail


@pytest.mark.full
def test_an_error_file_is_handed_over(session: Session, tmp_path: Path) -> None:
    outcome, _ = go(session, tmp_path / "out", mode="error")
    assert not outcome.ok
    assert outcome.error is not None
    said: list[str] = []
    assert outcome.report(said.append) == 1 and said == [
        "the run failed (client 3, round 1, train): boom\nerror.json in the run directory keeps the traceback"
    ]
    assert outcome.log_tail == ""


@pytest.mark.full
def test_a_killed_simulation_and_a_summary_of_yesterday_are_no_success(session: Session, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"ok": true}')
    (tmp_path / "progress.jsonl").write_text('{"event": "yesterday"}\n')
    outcome, events = go(session, tmp_path, mode="die")
    assert [event["event"] for event in events] == ["start"]
    assert not outcome.ok
    assert outcome.log_tail
    # On a busy machine Flower sometimes notices before the follower does.
    assert outcome.status == "finished:failed" or (outcome.status == "lost" and "killed or crashed" in outcome.details)


def test_refused_configurations_are_bad_requests(session: Session) -> None:
    with pytest.raises(BadRequest, match="Invalid run configuration"):
        session.submit({"out": "", "no-such-key": 1}, num_supernodes=2)
    with pytest.raises(LaunchError, match="2 CPUs, not 4"):
        session.submit({}, num_supernodes=2, total_cpus=4)


def test_one_run_at_a_time_and_a_stopped_one_makes_room(session: Session, tmp_path: Path) -> None:
    run = session.submit({"out": str(tmp_path), "mode": "hang"}, num_supernodes=2)
    with pytest.raises(LaunchError, match="has not ended yet"):
        session.submit({"out": str(tmp_path)}, num_supernodes=2)
    progress = tmp_path / "progress.jsonl"
    assert wait_for(lambda: progress.exists() and "\n" in progress.read_text(), 60)
    pid = json.loads((tmp_path / "progress.jsonl").read_text().splitlines()[0])["pid"]
    with control.Control.of_port(session.port) as api:
        api.stop(run.run_id)
    session._clear_run()
    assert not running({pid})
    assert session._active is None


def ray_process(session: Session, *commands: str) -> psutil.Process | None:
    """Return the oldest process of a session that runs one of these commands: a child is called like its parent until
    it runs its own.
    """
    found = [process for process in session._processes.alive() if supervise.runs(process, *commands)]
    return min(found, key=lambda process: (process.create_time(), process.pid), default=None)


@pytest.mark.full
def test_a_run_that_ends_early_leaves_rays_own_processes(tmp_path: Path) -> None:
    with Session(app=make_toy(tmp_path / "toy"), ray_cpus=2) as live:

        def own() -> list[psutil.Process | None]:
            agents = [
                ("dashboard/agent.py", "ray::DashboardAgent"),
                ("runtime_env/agent/main.py", "ray::RuntimeEnvAgent"),
            ]
            return [ray_process(live, *names) for names in [*agents, ("raylet",), ("gcs_server",), ("fedapp-ray",)]]

        assert wait_for(lambda: None not in own(), 60)
        pids = {process.pid for process in own() if process is not None}
        assert len(pids) == 5
        live._clear_run()
        assert running(pids) == pids


@pytest.mark.slow
@pytest.mark.parametrize("command", ["fedapp-ray", "raylet", "ray::DashboardAgent"])
def test_a_ray_that_died_is_started_again(session: Session, tmp_path: Path, command: str) -> None:
    session._ensure_ray()
    assert session._ray is not None
    assert wait_for(lambda: ray_process(session, "ray::DashboardAgent") is not None, 60)  # Ray is up by then
    found = ray_process(session, command)
    assert found is not None
    found.kill()
    session._ray.wait(60)
    outcome, _ = go(session, tmp_path)
    assert outcome.ok, outcome


@pytest.mark.slow
def test_ray_address_takes_the_run_to_that_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = launch._free_port()
    folder = tempfile.mkdtemp(prefix="ray-")  # short, for the sake of Ray's sockets
    holder = (
        "import ray, sys, time; ray.init(num_cpus=2, include_dashboard=False); print('up', flush=True); time.sleep(300)"
    )
    cluster = subprocess.Popen(
        [sys.executable, "-c", holder],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"RAY_ADDRESS": "local", "RAY_GCS_SERVER_PORT": str(port), "RAY_TMPDIR": folder},
    )
    try:
        assert cluster.stdout is not None
        assert cluster.stdout.readline() == b"up\n"
        servers = {child.name(): child.pid for child in psutil.Process(cluster.pid).children(recursive=True)}
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        with Session(app=make_toy(tmp_path / "toy")) as live:
            chosen = choose_resources(3)
            events: list[dict[str, Any]] = []
            run = live.submit({"out": str(tmp_path)}, num_supernodes=3, total_cpus=chosen.total_cpus)
            assert wait_for(lambda: (tmp_path / "progress.jsonl").exists(), 60)
            outcome = run.follow(events.append)
        assert outcome.ok, outcome
        assert events[0]["environment"]["RAY_ADDRESS"] == f"127.0.0.1:{port}"
        assert {reply["parent"] for reply in events[-1]["replies"]} == {servers["raylet"]}
        # A cluster that is not ours is left alone.
        assert running({servers["raylet"], servers["gcs_server"]}) == {servers["raylet"], servers["gcs_server"]}
    finally:
        for process in [*psutil.Process(cluster.pid).children(recursive=True), psutil.Process(cluster.pid)]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        cluster.wait()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_run_that_the_server_refused_is_a_bad_request() -> None:
    refused = Outcome("finished:failed", "", False, {"exit": 2, "message": "client 3 cannot take part"})
    with pytest.raises(BadRequest, match="client 3 cannot take part"):
        refused.report(pytest.fail)
    said: list[str] = []
    assert Outcome("lost", "why", False, None, "last line").report(said.append) == 1
    assert said == ["the run failed: lost: why\nlast line"]


def test_a_run_handle_belongs_to_its_session(tmp_path: Path) -> None:
    session = Session(app=tmp_path)
    first = RunHandle(session, 1, tmp_path, launch.EventReader(tmp_path / "progress.jsonl"), 0, 0)
    session._active = first
    with pytest.raises(LaunchError, match="run 1 has not ended"):
        session.submit({}, num_supernodes=1)
