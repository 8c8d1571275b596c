"""Many runs at a time: what their processes find, and that they end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.deployment import until
from tests.house import ROOT

RUNS = """
import os, sys
from pathlib import Path
sys.path.insert(0, os.environ["APP"])
from fedapp import config
from fedapp.engines import local, pool

if __name__ == "__main__":
    pool.begin()
    os.environ["MARK"] = "set later"
    values = {"method": "local", "model": "mine:net", "num-server-rounds": 1, "clients": 2, "data-fraction": 0.2}
    runs = [config.from_flat(local.prepare({**values, "seed": k}, Path(f"out{k}")).to_flat()) for k in (0, 1, 2)]
    print([run.error for run in pool.run_all(runs, 2)])
"""

MINE = """
import json, os, sys, time
import psutil, torch
from torch import nn
import clients, fedapp

def net(num_classes):
    me = psutil.Process()
    above = me.parent().cmdline() if me.parent() else []
    kept = {name: os.environ.get(name) for name in ("MARK", "PYTHONSAFEPATH", "OMP_NUM_THREADS")}
    facts = kept | {"threads": torch.get_num_threads(), "apps": [fedapp.__file__, clients.__file__]}
    facts["forked"] = any("forkserver" in word for word in above)
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
    env = {**os.environ, "APP": str(folder / "app"), "FACTS": str(folder / "facts"), **variables}
    env.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, str(folder / "own" / "runs.py")]
    return subprocess.Popen(command, cwd=folder / "here", env=env, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("cold", ["", "1"])
def test_the_processes_of_runs_have_the_environment_of_who_asks_and_the_modules_of_the_app(
    cold: str, tmp_path: Path
) -> None:
    runs = started(tmp_path, FEDAPP_COLD=cold)
    assert runs.communicate(timeout=120)[0].endswith("[None, None, None]\n")
    facts = [json.loads(file.read_text()) for file in (tmp_path / "facts").iterdir()]
    facts = [found for found in facts if found["MARK"] and found["OMP_NUM_THREADS"] == "1"]  # not who asks
    assert facts and len(facts) <= 2, "one process for several runs"
    wanted = {
        "MARK": "set later",
        "PYTHONSAFEPATH": None,
        "OMP_NUM_THREADS": "1",
        "apps": [str(tmp_path / "app" / name / "__init__.py") for name in ("fedapp", "clients")],
        "forked": sys.platform == "linux" and not cold,
        "threads": 1,
    }
    assert all(found == wanted for found in facts), facts


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
