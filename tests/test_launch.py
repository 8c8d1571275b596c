"""The launcher, against a small Flower app of its own: truthful outcomes, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedapp.engines import superlink as launch
from fedapp.engines.superlink import LaunchError, Outcome, RunHandle, Session
from fedapp.errors import BadRequest

PYPROJECT = """
[project]
name = "toyapp"
version = "0.1.0"
description = "A server that asks its clients who they are"
license = "Apache-2.0"
dependencies = ["flwr[simulation]"]
[tool.flwr.app]
publisher = "fedapp"
[tool.flwr.app.components]
serverapp = "toyapp.server:app"
clientapp = "toyapp.client:app"
[tool.flwr.app.config]
out = ""
mode = "good"
text-value = ""
some-flag = false
whole = 1
method.mu = 0.5
"""

CLIENT = """
import os
import time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.query()
def query(msg, context):
    print("client speaking", flush=True)
    time.sleep(msg.content["ask"]["sleep"])
    facts = {"pid": os.getpid(), "parent": os.getppid(), "partition": int(context.node_config["partition-id"])}
    return Message(RecordDict({"facts": ConfigRecord(facts)}), reply_to=msg)
"""

SERVER = """
import json
import os
import time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    config = dict(context.run_config)
    out = Path(config["out"])
    out.mkdir(parents=True, exist_ok=True)

    def emit(**event):
        with (out / "progress.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\\n")

    environment = {key: os.environ.get(key) for key in ("FLWR_TELEMETRY_ENABLED", "FLWR_HOME", "PATH", "RAY_ADDRESS")}
    emit(event="start", config=config, cwd=os.getcwd(), file=__file__, pid=os.getpid(), environment=environment)
    mode = config["mode"]
    if mode == "raise":
        raise ValueError("boom in the server")
    if mode == "error":
        error = {"client": 3, "round": 1, "stage": "train", "message": "boom", "traceback": "Traceback ..."}
        (out / "error.json").write_text(json.dumps(error))
    if mode in ("error", "die"):
        os._exit(9)
    while not list(grid.get_node_ids()):
        time.sleep(0.05)
    content = RecordDict({"ask": ConfigRecord({"sleep": {"hang": 3600.0, "slow": 0.5}.get(mode, 0.0)})})
    for number in (1, 2):
        emit(event="round", round=number)
        nodes = grid.get_node_ids()
        messages = [Message(content, dst_node_id=node, message_type="query", group_id=str(number)) for node in nodes]
        replies = [dict(reply.content["facts"]) for reply in grid.send_and_receive(messages)]
        emit(event="replies", round=number, replies=replies)
    (out / "summary.json").write_text(json.dumps({"ok": mode in ("good", "slow")}))
"""


def make_toy(folder: Path) -> Path:
    (folder / "toyapp").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "toyapp" / "__init__.py").touch()
    (folder / "toyapp" / "client.py").write_text(CLIENT)
    (folder / "toyapp" / "server.py").write_text(SERVER)
    return folder


def ignore(event: dict[str, Any]) -> None:
    pass


def running(pids: set[int]) -> set[int]:
    alive = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                alive.add(pid)
    return alive


def wait_for(condition: Callable[[], Any], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return bool(condition())


# What needs no SuperLink


def test_stage_holds_the_app_and_nothing_else(tmp_path: Path) -> None:
    app = launch.stage(tmp_path / "app")
    assert {path.name for path in app.iterdir()} == {"fedapp", "strategies", "clients", "pyproject.toml"}
    source = Path(launch.__file__).parents[1]
    assert (app / "fedapp" / "launch.py").read_bytes() == (source / "launch.py").read_bytes()
    staged = {path.relative_to(app / "fedapp") for path in (app / "fedapp").rglob("*.py")}
    assert staged == {path.relative_to(source) for path in source.rglob("*.py")}
    suffixes = {path.suffix for path in app.rglob("*") if path.is_file()}
    assert suffixes <= {".py", ".toml", ".md", ".yaml", ".yml", ".json"}
    project = tomllib.loads((app / "pyproject.toml").read_text())
    assert project["project"]["name"] == "fedapp"
    assert project["tool"]["flwr"]["app"]["components"]["serverapp"] == "fedapp.server_app:app"


def fake_installation(home: Path) -> Path:
    for name in launch.PACKAGES:
        (home / name / "__pycache__").mkdir(parents=True)
        (home / name / "__init__.py").write_text(f"NAME = '{name}'\n")
        (home / name / "__pycache__" / "x.pyc").touch()
        (home / name / "weights.npz").touch()
    return home


APP_TABLE = '[project]\nname = "fedapp"\n[tool.flwr.app]\nfab-exclude = ["tests/**"]\npublisher = "fedapp"\n'


@pytest.mark.parametrize("place", ["pyproject.toml", "fedapp/_pyproject.toml"])
def test_stage_takes_the_project_file_beside_the_packages_or_the_wheels(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = fake_installation(tmp_path / "site")
    (home / place).write_text(APP_TABLE)
    monkeypatch.setattr(launch, "_package_folder", lambda name: home / name)
    app = launch.stage(tmp_path / "app")
    names = sorted(str(path.relative_to(app)) for path in app.rglob("*") if path.is_file())
    assert names == ["clients/__init__.py", "fedapp/__init__.py", "pyproject.toml", "strategies/__init__.py"]
    # A pattern that matches nothing in the copy would make Flower refuse it.
    assert tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"] == {"publisher": "fedapp"}


def test_stage_says_in_one_line_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = fake_installation(tmp_path / "site")
    (home / "pyproject.toml").write_text('[project]\nname = "another"\n')
    monkeypatch.setattr(launch, "_package_folder", lambda name: home / name)
    with pytest.raises(BadRequest, match=r"project file is missing.*pip install") as caught:
        launch.stage(tmp_path / "app")
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_named() -> None:
    with pytest.raises(BadRequest, match="'no_such_package' is not installed"):
        launch._package_folder("no_such_package")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int, int], None]:
    """Set cores, CUDA devices and GiB of memory of the machine that the launcher sees."""

    def build(cores: int, devices: int, memory: int) -> None:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr(launch, "usable_cores", lambda: cores)
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        monkeypatch.setattr(launch, "cuda_devices", lambda: devices)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": memory << 30})())

    return build


def test_two_cores_train_two_clients_at_a_time(machine: Callable[[int, int, int], None]) -> None:
    machine(2, 0, 20)
    chosen = launch.choose_resources(10)
    assert (chosen.client_cpus, chosen.client_gpus, chosen.total_cpus, chosen.parallel) == (1, 0.0, 2, 2)
    assert chosen.text == "2 of 10 clients at a time on 2 cores: 1 CPU each"


@pytest.mark.parametrize(
    ("cores", "memory", "clients", "cpus", "parallel", "total"),
    [
        (64, 500, 3, None, 3, 3),  # no idle actors beside three clients
        (24, 500, 100, None, 24, 24),
        (64, 500, 100, None, 32, 32),  # Flower keeps 32 at work
        (64, 10, 100, None, 10, 10),  # memory for ten
        (8, 100, 20, 3, 2, 6),
        (1, 0, 5, None, 1, 1),
    ],
)
def test_cores_clients_and_memory_bound_what_runs_side_by_side(
    machine: Callable[[int, int, int], None],
    cores: int,
    memory: int,
    clients: int,
    cpus: int | None,
    parallel: int,
    total: int,
) -> None:
    machine(cores, 0, memory)
    chosen = launch.choose_resources(clients, cpus)
    assert (chosen.parallel, chosen.total_cpus) == (parallel, total)


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("cores", range(1, 40))
def test_a_gpu_share_lets_exactly_the_parallel_clients_fit(
    machine: Callable[[int, int, int], None], cores: int, devices: int
) -> None:
    machine(cores, devices, 500)
    chosen = launch.choose_resources(30)
    assert 0 < chosen.client_gpus <= 1
    # Ray counts GPUs in units of 1/10,000, and a client's share must come from one device.
    unit = chosen.client_gpus * 10_000
    assert unit == pytest.approx(round(unit))
    per_device = 10_000 // round(unit)
    assert 1 <= per_device <= 8
    assert chosen.parallel <= per_device * devices
    # Flower's own count, from which it makes its actors.
    assert chosen.total_cpus is not None
    assert chosen.parallel == min(chosen.total_cpus, int(devices / chosen.client_gpus))
    assert chosen.parallel == min(cores, 30, 8 * devices)


NEED = launch.Need(7, 3 << 29, 1.13)


@pytest.mark.parametrize(
    ("cores", "memory", "need", "parallel"),
    [
        (2, 20, NEED, 2),
        (16, 20, NEED, 12),  # 13 times 1.5 GiB, one of them for the server
        (16, 2, NEED, 1),
        (16, 500, NEED, 16),
        (16, 20, launch.Need(7, 100 << 30, 1.0), 1),
    ],
)
def test_measured_memory_bounds_what_runs_side_by_side(
    machine: Callable[[int, int, int], None], cores: int, memory: int, need: launch.Need, parallel: int
) -> None:
    machine(cores, 0, memory)
    chosen = launch.choose_resources(20, need=need)
    assert (chosen.parallel, chosen.total_cpus, chosen.client_gpus) == (parallel, parallel, 0.0)
    assert chosen.text.startswith(f"{parallel} of 20 clients at a time on {cores} cores: 1 CPU each; one client needs")


def test_the_line_says_what_was_measured(machine: Callable[[int, int, int], None]) -> None:
    machine(2, 0, 20)
    assert launch.choose_resources(20, need=NEED).text == (
        "2 of 20 clients at a time on 2 cores: 1 CPU each; "
        "one client needs 1.5 GiB and about 1.1 s a round (measured on client 7)"
    )
    assert "about 0.04 s a round" in str(launch.Need(0, 1 << 30, 0.0412))


@pytest.mark.parametrize(
    ("devices", "free", "each", "parallel", "share"),
    [
        (1, 80, 10, 7, 0.1428),  # 79 GiB beside the server's
        (1, 139, 2, 8, 0.125),  # at most eight
        (2, 24, 10, 4, 0.5),
        (1, 24, 40, 1, 1.0),  # what does not fit is tried alone
    ],
)
def test_measured_gpu_memory_sets_the_share(
    machine: Callable[[int, int, int], None], devices: int, free: int, each: int, parallel: int, share: float
) -> None:
    machine(16, devices, 500)
    chosen = launch.choose_resources(20, need=launch.Need(7, 3 << 30, 1.0, each << 30, free << 30))
    assert (chosen.parallel, chosen.client_gpus) == (parallel, share)
    assert chosen.parallel == min(chosen.total_cpus or 0, int(devices / chosen.client_gpus))
    assert f"1 CPU and {share:g} of {devices} GPU each" in chosen.text and f"{each}.0 GiB of GPU memory" in chosen.text


def test_a_whole_gpu_for_each_client_is_respected(machine: Callable[[int, int, int], None]) -> None:
    machine(16, 2, 100)
    chosen = launch.choose_resources(10, gpus=1.0)
    assert (chosen.client_gpus, chosen.parallel) == (1.0, 2)
    assert launch.choose_resources(10, gpus=0.0).client_gpus == 0.0


@pytest.mark.parametrize(
    ("clients", "cpus", "gpus", "message"),
    [
        (0, None, None, "clients = 0"),
        (5, 0, None, "client CPUs = 0"),
        (5, 3, None, "only 2 can be used here"),
        (5, None, -0.5, "client GPUs = -0.5"),
        (5, None, 1.5, "client GPUs = 1.5"),
        (5, None, float("nan"), "client GPUs = nan"),
        (5, None, 0.5, "no CUDA device"),
    ],
)
def test_impossible_resources_are_refused(
    machine: Callable[[int, int, int], None], clients: int, cpus: int | None, gpus: float | None, message: str
) -> None:
    machine(2, 0, 20)
    with pytest.raises(BadRequest, match=message):
        launch.choose_resources(clients, cpus, gpus)


def test_a_cluster_decides_itself(machine: Callable[[int, int, int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    machine(2, 0, 20)
    monkeypatch.setenv("RAY_ADDRESS", "ray-head:6379")
    chosen = launch.choose_resources(50, 4, 0.5)
    assert (chosen.client_cpus, chosen.client_gpus, chosen.total_cpus) == (4, 0.5, None)
    assert "ray-head:6379" in chosen.text
    assert chosen.parallel == 6 and "at most 6" in chosen.text  # threads of a pool on two cores
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert launch.cluster_address() is None


def test_events_are_read_when_complete_and_once(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    seen: list[dict[str, Any]] = []
    reader = launch._Events(path, time.time_ns())
    reader.read(seen.append)
    with path.open("ab") as file:
        for piece, expected in [(b'{"a": 1}\n{"b"', 1), (b": 2", 1), (b"}\n", 2), (b"\n", 2), (b'{"c": 3}\n', 3)]:
            file.write(piece)
            file.flush()
            reader.read(seen.append)
            assert len(seen) == expected
    assert seen == [{"a": 1}, {"b": 2}, {"c": 3}]


def test_events_of_an_earlier_run_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    path.write_text('{"old": 1}\n{"torn": ')
    submitted = path.stat().st_mtime_ns + 1
    reader = launch._Events(path, submitted)
    with path.open("a") as file:
        file.write('{"new": 1}\n')
    seen: list[dict[str, Any]] = []
    reader.read(seen.append)
    assert seen == [{"new": 1}]


def test_a_broken_event_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    reader = launch._Events(path, time.time_ns())
    path.write_text("not json\n")
    with pytest.raises(LaunchError, match="no JSON object"):
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


def test_rays_agents_are_known_before_they_have_their_titles(tmp_path: Path) -> None:
    """Ray's node dies with its agents, whose processes are called by their scripts for their first seconds."""
    kept, stopped = ("dashboard/agent.py", "runtime_env/agent/main.py"), ("agent.py", "other/agent/main.py")
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name in (*kept, *stopped):
            script = tmp_path / name
            script.parent.mkdir(parents=True, exist_ok=True)
            script.write_text("import time; time.sleep(600)")
            env = os.environ | {launch._MARKER: str(tmp_path)}
            started[name] = subprocess.Popen([sys.executable, "-u", str(script), "--node-id=1"], env=env)
        assert not launch._Family(str(tmp_path)).stop(keep=launch._RAY)
        assert [name for name, process in started.items() if process.poll() is None] == list(kept)
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def test_a_missing_command_is_one_clear_line() -> None:
    with pytest.raises(LaunchError, match=r"'flower-nothing' is not installed .*flwr\[simulation\]"):
        launch._executable("flower-nothing", "")


def test_a_superlink_that_cannot_start_shows_its_log_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bin" / "flower-superlink"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho the reason why\nsleep 100 &\nexit 3\n")
    fake.chmod(0o755)
    real = launch._executable
    monkeypatch.setattr(
        launch, "_executable", lambda name, path: str(fake) if "superlink" in name else real(name, path)
    )
    session = Session(app=make_toy(tmp_path / "toy"))
    with pytest.raises(LaunchError, match="the reason why"):
        session.__enter__()
    assert not session._family.members()
    assert not session.home.exists()


# A real SuperLink


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    folder = tmp_path_factory.mktemp("session")
    with Session(app=make_toy(folder / "toy"), log=folder / "superlink.log", ray_cpus=2) as live:
        yield live
        pids = {process.pid for process in live._family.members()}
    assert pids
    assert not running(pids)
    assert not live.home.exists()


def go(session: Session, out: Path, **config: Any) -> tuple[Outcome, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    run = session.submit({"out": str(out), **config}, num_supernodes=3, client_cpus=1)
    return run.follow(out, events.append), events


CONFIG = {"method.mu": 1e-3, "text-value": "a 'b' \"c\" = ü\n# \\ {x}", "some-flag": True, "whole": -7}


@pytest.mark.ray
def test_a_good_run(session: Session, tmp_path: Path) -> None:
    outcome, events = go(session, tmp_path / "out", **CONFIG)
    assert outcome == Outcome(status="finished:completed", details="", ok=True)
    assert outcome.exit_code == 0
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


@pytest.mark.ray
def test_an_app_that_raises_is_not_a_success(session: Session, tmp_path: Path) -> None:
    outcome, events = go(session, tmp_path / "out", mode="raise")
    assert len(events) == 1
    assert (outcome.ok, outcome.exit_code, outcome.status) == (False, 1, "finished:failed")
    assert "ValueError: boom in the server" in outcome.log_tail
    assert "Traceback" in outcome.log_tail


@pytest.mark.ray
def test_an_error_file_is_handed_over(session: Session, tmp_path: Path) -> None:
    outcome, _ = go(session, tmp_path / "out", mode="error")
    assert not outcome.ok
    assert outcome.error is not None
    assert (outcome.error["client"], outcome.error["round"], outcome.error["stage"]) == (3, 1, "train")
    assert outcome.log_tail == ""


@pytest.mark.ray
def test_a_killed_simulation_and_a_summary_of_yesterday_are_no_success(session: Session, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"ok": true}')
    (tmp_path / "progress.jsonl").write_text('{"event": "yesterday"}\n')
    outcome, events = go(session, tmp_path, mode="die")
    assert [event["event"] for event in events] == ["start"]
    assert (outcome.ok, outcome.status) == (False, "lost")
    assert "without a word" in outcome.details
    assert outcome.log_tail


@pytest.mark.ray
def test_refused_configurations_are_bad_requests(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRequest, match=r"'method\.nu'; did you mean 'method\.mu'\?"):
        session.submit({"method.nu": 1}, num_supernodes=2)
    # Flower's own refusal, should it know better.
    monkeypatch.setattr(Session, "_check_keys", lambda self, run_config: None)
    with pytest.raises(BadRequest, match="Invalid run configuration"):
        session.submit({"no-such-key": 1}, num_supernodes=2)
    with pytest.raises(LaunchError, match="2 CPUs, not 4"):
        session.submit({}, num_supernodes=2, total_cpus=4)


@pytest.mark.ray
def test_one_run_at_a_time_and_a_stopped_one_makes_room(session: Session, tmp_path: Path) -> None:
    run = session.submit({"out": str(tmp_path), "mode": "hang"}, num_supernodes=2)
    with pytest.raises(LaunchError, match="has not ended yet"):
        session.submit({"out": str(tmp_path)}, num_supernodes=2)
    assert wait_for(lambda: (tmp_path / "progress.jsonl").exists(), 60)
    pid = json.loads((tmp_path / "progress.jsonl").read_text().splitlines()[0])["pid"]
    run.stop()
    assert not running({pid})
    assert session._active is None


def ray_process(session: Session, *commands: str) -> psutil.Process | None:
    """Return the oldest process of a session that runs one of these commands: a child is called like its parent until
    it runs its own.
    """
    found = [process for process in session._family.members() if launch._runs(process, *commands)]
    return min(found, key=lambda process: (process.create_time(), process.pid), default=None)


@pytest.mark.ray
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


@pytest.mark.ray
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


SCRIPT = """
import sys
from pathlib import Path
from fedapp.engines.superlink import Session

app, out, log = map(Path, sys.argv[1:])
with Session(app=app, log=log) as session:
    run = session.submit({"out": str(out), "mode": "hang"}, num_supernodes=2, total_cpus=2)
    try:
        run.follow(out, lambda event: None)
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


@pytest.mark.ray
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupt_leaves_no_process_and_no_folder(tmp_path: Path, number: signal.Signals) -> None:
    process, pids, printed = interrupted(tmp_path, number)
    assert len(pids) >= 8  # SuperLink, SuperExec, simulation, and Ray's own
    assert process.returncode == 130
    assert not running(pids)
    word, folder = printed.split()
    assert word == "interrupted"
    assert not Path(folder).exists()


@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_launcher_takes_its_processes_along(tmp_path: Path) -> None:
    _, pids, _ = interrupted(tmp_path, signal.SIGKILL)
    assert wait_for(lambda: not running(pids), 30), [psutil.Process(pid).cmdline() for pid in running(pids)]


@pytest.mark.ray
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
            chosen = launch.choose_resources(3)
            events: list[dict[str, Any]] = []
            run = live.submit({"out": str(tmp_path)}, num_supernodes=3, total_cpus=chosen.total_cpus)
            assert wait_for(lambda: (tmp_path / "progress.jsonl").exists(), 60)
            outcome = run.follow(tmp_path, events.append)
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


def test_a_run_handle_belongs_to_its_session(tmp_path: Path) -> None:
    session = Session(app=tmp_path)
    first = RunHandle(session, 1, 0, 0)
    session._active = first
    with pytest.raises(LaunchError, match="run 1 has not ended"):
        session.submit({}, num_supernodes=1)
