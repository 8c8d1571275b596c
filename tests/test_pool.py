"""Many runs at a time: what their processes find, and that they end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest

from tests.deployment import until
from tests.house import ROOT

RUNS = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, os.environ["APP"])
from fedapp import config
from fedapp.engines import local, pool

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have made it ignored
    os.environ["MARK"] = "set later"
    values = {"method": "local", "model": "mine:net", "num-server-rounds": 1, "clients": 2, "data-fraction": 0.2}
    runs = [config.from_flat(local.prepare({**values, "seed": k}, Path(f"out{k}")).to_flat()) for k in (0, 1, 2)]
    print([run.error for run in pool.run_all(runs, 2)])
"""

MINE = """
import json, os, sys, time
import torch
from torch import nn
import clients, fedapp
from fedapp import client_app

def net(num_classes):
    kept = {name: os.environ.get(name) for name in ("MARK", "PYTHONSAFEPATH", "OMP_NUM_THREADS")}
    facts = kept | {"apps": [fedapp.__file__, clients.__file__], "threads": torch.get_num_threads()}
    facts |= {"here": client_app.PROCESS == os.getpid(), "under": client_app.THREADS}
    with open(os.environ["FACTS"] + f"/{os.getpid()}", "w") as file:
        json.dump(facts, file)
    time.sleep(float(os.environ.get("WAIT", 0)) if kept["OMP_NUM_THREADS"] else 0)  # not in who asks
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
"""


def started(folder: Path, **variables: str) -> subprocess.Popen[str]:
    """Start three runs on two processes with a copy of the app, in a folder that has a `fedapp` too."""
    files = {
        "own/mine.py": MINE,
        "own/runs.py": RUNS,
        "here/fedapp/__init__.py": "client_app = server_app = 'not the app'",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "facts").mkdir()
    for name in ("fedapp", "clients", "strategies"):  # not the app that is installed
        shutil.copytree(ROOT / name, folder / "app" / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "app" / "fedapp" / "client_app.py").open("a") as file:
        file.write("\nimport os\nPROCESS, THREADS = os.getpid(), os.environ.get('OMP_NUM_THREADS')\n")
    env = {**os.environ, "APP": str(folder / "app"), "FACTS": str(folder / "facts"), **variables}
    env.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, str(folder / "own" / "runs.py")]
    return subprocess.Popen(command, cwd=folder / "here", env=env, stdout=PIPE, stderr=PIPE, text=True)


@pytest.mark.full
def test_the_processes_of_runs_have_the_environment_of_their_parent_and_the_modules_of_the_app(tmp_path: Path) -> None:
    runs = started(tmp_path)
    assert runs.communicate(timeout=120)[0].endswith("[None, None, None]\n")
    facts = [json.loads(f.read_text()) for f in (tmp_path / "facts").iterdir() if f.name != str(runs.pid)]
    assert facts and len(facts) <= 2, "one process for several runs"
    wanted = {
        "MARK": "set later",
        "PYTHONSAFEPATH": None,
        "OMP_NUM_THREADS": "1",
        "apps": [str(tmp_path / "app" / name / "__init__.py") for name in ("fedapp", "clients")],
        "threads": 1,
        "here": True,
        "under": "1",
    }
    assert all(found == wanted for found in facts), facts


PLAIN = """
import fedapp
from torch import nn

class Net(nn.Sequential):
    def __init__(self, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(64, num_classes))

print("begins")
small = dict(rounds=1, clients=2, data_fraction=0.2, seeds=2, local_epochs=1)
print(len(fedapp.compare("local", **small, {further}).table), "rows")
"""
GUARD = 'if __name__ == "__main__":'


def plain_script(folder: Path, further: str, guard: str = "") -> tuple[int, str]:
    """Run a script that compares without more ado; return its exit code and what it printed."""
    text = PLAIN.replace("{further}", further)
    if guard:
        text = text.replace('print("begins")', guard).replace("\nsmall", "\n  small").replace("\nprint", "\n  print")
    (folder / "script.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300,
        stdout=PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_script_without_a_guard_compares(workers: int, tmp_path: Path) -> None:
    code, shown = plain_script(tmp_path, f"workers={workers}")
    assert code == 0 and shown.count("begins") == 1 and shown.endswith("2 rows\n"), shown
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.full
@pytest.mark.parametrize("guard", ["", GUARD])
def test_own_code_of_a_script_needs_its_guard(guard: str, tmp_path: Path) -> None:
    code, shown = plain_script(tmp_path, 'model="__main__:Net"', guard)
    assert len(list((tmp_path / "runs").iterdir())) == 1, "a process that runs the script again makes no folder"
    if guard:
        assert code == 0 and shown.endswith("2 rows\n"), shown
    else:
        assert code == 1 and f"`{GUARD}`" in shown and "memory" not in shown, shown


@pytest.mark.full
def test_the_processes_of_runs_end_with_who_asks(tmp_path: Path) -> None:
    runs = started(tmp_path, WAIT="60")
    try:
        until(lambda: len(list((tmp_path / "facts").iterdir())) >= 2, 60, "two runs are at work")
        below = psutil.Process(runs.pid).children(recursive=True)
        assert len(below) >= 3
    finally:
        runs.kill()
        runs.wait()
    until(lambda: not any(p.is_running() for p in below), 20, "all have ended")


@pytest.mark.full
def test_ctrl_c_while_the_processes_of_runs_start_shows_no_error_of_theirs(tmp_path: Path) -> None:
    runs = started(tmp_path, WAIT="60")
    until((tmp_path / "facts" / str(runs.pid)).exists, 60, "the configurations are made")
    runs.send_signal(signal.SIGINT)
    errors = runs.communicate(timeout=60)[1]
    # The interrupt may meet a handler of another exception, whose traceback then comes first.
    assert errors.count("KeyboardInterrupt\n") == 1 and errors.endswith("KeyboardInterrupt\n"), errors
