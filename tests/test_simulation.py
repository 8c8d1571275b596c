"""The product path: runs through Flower's simulation engine on Ray, compared with the same runs in this process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest

from fedapp import registry
from fedapp.config import RunConfig
from fedapp.engines import local as engines
from fedapp.engines import runner
from fedapp.engines import superlink as launch
from fedapp.engines.local import run
from fedapp.engines.resources import choose_resources

ROOT = Path(__file__).parent.parent
SETTINGS: dict[str, Any] = {
    "dataset": "digits", "clients": 4, "num-server-rounds": 2, "local-epochs": 1, "batch-size": 32, "alpha": 1.0,
    "fraction-train": 0.75,
}  # fmt: skip


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[launch.Session]:
    log = tmp_path_factory.mktemp("superlink") / "superlink.log"
    with launch.Session(log=log, ray_cpus=2) as opened:
        yield opened


def prepared(out: Path, **changes: Any) -> RunConfig:
    return engines.prepare({**SETTINGS, **{k.replace("_", "-"): v for k, v in changes.items()}}, out)


def through_ray(session: launch.Session, config: RunConfig) -> int:
    resources = choose_resources(config.data.clients)
    with runner.Follower() as follower:
        return runner.run_in(session, config, resources, follower)


def same(left: Path, right: Path, name: str) -> None:
    a, b = pd.read_csv(left / name), pd.read_csv(right / name)
    keep = [c for c in a.columns if not c.endswith("seconds")]
    pd.testing.assert_frame_equal(a[keep], b[keep], check_exact=True)


def compare(session: launch.Session, tmp_path: Path, method: str) -> None:
    model = "digits-a,digits-b" if registry.get(method).heterogeneous else "digits-a"
    config = prepared(tmp_path / "ray", method=method, model=model)
    assert through_ray(session, config) == 0
    local = {k.replace("-", "_"): v for k, v in SETTINGS.items()}
    run(**{**local, "method": method, "model": model, "out": tmp_path / "local"})
    for name in ("rounds.csv", "clients.csv", "final.csv"):
        same(tmp_path / "ray", tmp_path / "local", name)


@pytest.mark.full
@pytest.mark.parametrize(
    "method", ["fedclassavg", *(pytest.param(m, marks=pytest.mark.full) for m in ("fedavg", "local"))]
)
def test_ray_gives_the_numbers_of_this_process(method: str, session: launch.Session, tmp_path: Path) -> None:
    compare(session, tmp_path, method)


@pytest.mark.slow
@pytest.mark.parametrize("method", [m for m in registry.discover() if m not in ("fedclassavg", "fedavg", "local")])
def test_ray_gives_the_numbers_of_this_process_for_the_rest(
    method: str, session: launch.Session, tmp_path: Path
) -> None:
    compare(session, tmp_path, method)


@pytest.mark.full
def test_own_data_and_every_option_of_scoring_give_the_numbers_of_this_process(
    session: launch.Session, tmp_path: Path, recorded: list[tuple[Any, ...]]
) -> None:
    rng = np.random.default_rng(0)
    x, owner = rng.standard_normal((180, 2, 16)).astype(np.float32), np.arange(180) % 6
    np.savez(tmp_path / "own.npz", x=x + owner[:, None, None], y=np.arange(180) // 6 % 3, client=owner)
    settings = {
        "dataset": "npz", "data_dir": str(tmp_path / "own.npz"), "clients": 0, "method": "fedavg", "alpha": 0.5,
        "validation": 0.2, "select": "validation", "unseen": "0.34", "adapt_epochs": "0,1", "normalise": "client",
        "metrics": "accuracy,balanced,macro_f1,auc,ece", "track": "records",
    }  # fmt: skip
    config = prepared(tmp_path / "ray", **settings)
    assert config.data.clients == 6 and through_ray(session, config) == 0
    tracked = list(recorded)
    recorded.clear()
    local = {k.replace("-", "_"): v for k, v in SETTINGS.items()}
    run(**{**local, **settings, "out": tmp_path / "local"})
    for name in ("rounds.csv", "clients.csv", "evaluations.csv", "final.csv", "unseen.csv"):
        same(tmp_path / "ray", tmp_path / "local", name)
    one, two = (json.loads((tmp_path / place / "summary.json").read_text()) for place in ("ray", "local"))
    assert one["metrics"] == two["metrics"] and one["round"] == two["round"] and one["metrics"]
    assert [t[:3] for t in recorded] == [t[:3] for t in tracked] and len(tracked) > 8


@pytest.mark.full
def test_a_client_that_fails_is_told_with_its_traceback(session: launch.Session, tmp_path: Path) -> None:
    """The data vanish between the check and the run: the clients fail, and the run says so."""
    config = prepared(tmp_path / "run", lr=1e20, method="fedavg")
    assert through_ray(session, config) == 1
    error = launch._newer_json(tmp_path / "run" / "error.json", 0)
    assert error is not None and error["stage"] == "train" and error["round"] == 1
    assert "FloatingPointError" in error["traceback"] and "lower lr" in error["message"]


class ActorKiller(runner.Follower):
    """Kills one Ray actor of the session after round 1."""

    def __init__(self, session: launch.Session) -> None:
        super().__init__()
        self.session = session
        self.killed = 0

    def __call__(self, event: Mapping[str, Any]) -> None:
        super().__call__(event)
        if event.get("kind") == "round" and not self.killed:
            actors = [
                p for p in self.session._processes.alive() if "ClientAppActor" in " ".join(p.cmdline() or [p.name()])
            ]
            assert actors, "no actor was found"
            actors[0].kill()
            self.killed = actors[0].pid


@pytest.mark.full
def test_a_killed_actor_is_named_and_ends_the_run_truthfully(session: launch.Session, tmp_path: Path) -> None:
    config = prepared(tmp_path / "run", method="fedavg", num_server_rounds=200, fraction_train=1.0)
    with ActorKiller(session) as follower:
        assert runner.run_in(session, config, choose_resources(config.data.clients), follower) == 1
    assert follower.killed
    dropped = pd.read_csv(tmp_path / "run" / "dropped.csv") if (tmp_path / "run" / "dropped.csv").exists() else None
    error = launch._newer_json(tmp_path / "run" / "error.json", 0)
    assert error is not None and "min-replies" in error["message"] and "client" in error["message"]
    assert error["client"] in range(4) and error["stage"] == "train" and error["round"] >= 1
    assert "worker process was killed" in error["cause"] and "--client-cpus" in error["cause"]
    assert "worker process was killed" in error["message"] and "ActorDiedError" in error["traceback"]
    assert dropped is None or set(dropped["client"]) <= set(range(4))


@pytest.mark.full
def test_an_interrupted_run_leaves_no_process_and_resumes(tmp_path: Path) -> None:
    """SIGINT to `fedapp run` in round 2 or later: exit code 130, nothing left behind; then --resume ends well."""
    out = tmp_path / "run"
    sets = [f"{k}={v}" for k, v in SETTINGS.items() if k not in ("dataset", "clients", "num-server-rounds")]
    command = [sys.executable, "-m", "fedapp.cli", "run", "--rounds", "500", "--clients", "4", "--out", str(out)]
    command += [part for s in sets for part in ("--set", s)]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 120
        while not (out / "rounds.csv").is_file() or (out / "rounds.csv").read_text().count("\n") < 3:
            assert process.poll() is None and time.monotonic() < deadline, process.stdout
            time.sleep(0.1)
        family = psutil.Process(process.pid).children(recursive=True)
        assert family
        os.kill(process.pid, signal.SIGINT)
        text = process.communicate(timeout=60)[0].decode()
        assert process.returncode == 130, text
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive, f"still there: {alive}"
    finally:
        if process.poll() is None:
            process.kill()
    done = len(pd.read_csv(out / "rounds.csv"))
    result = run(resume=out, rounds=done + 1)
    assert result.summary["ok"] and result.summary["rounds"] == done + 1
