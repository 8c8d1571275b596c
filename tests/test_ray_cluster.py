"""Simulations on a Ray cluster that exists already: nodes on this machine, loopback alone, GPUs in name only."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedapp.engines import runner
from fedapp.engines import superlink as launch
from fedapp.engines.local import run
from tests.test_simulation import SETTINGS, prepared, same
from tests.toyapp import make_toy, running

pytestmark = pytest.mark.slow

# Ends when its standard input closes, whatever becomes of the tests.
HOLDER = """
import json, sys
from ray.cluster_utils import Cluster
head, *others = json.loads(sys.argv[1])
cluster = Cluster(initialize_head=True, head_node_args={**head, "include_dashboard": False})
for node in others:
    cluster.add_node(**node)
cluster.wait_for_nodes()
print(json.dumps(cluster.address), flush=True)
sys.stdin.read()
cluster.shutdown()
"""
NODE = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 100 << 20}


@dataclass(frozen=True)
class Nodes:
    address: str
    raylets: frozenset[int]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    """Two nodes of one core."""
    with started(NODE, NODE) as nodes:
        yield nodes


@contextmanager
def started(*nodes: dict[str, int]) -> Iterator[Nodes]:
    folder = tempfile.mkdtemp(prefix="ray-")  # short, for the sake of Ray's sockets
    with pytest.MonkeyPatch.context() as patch:
        # A token of this test's own keeps everybody else out; who joins the cluster needs it too.
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", os.urandom(16).hex())
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        log = Path(folder) / "holder.log"
        with log.open("wb") as errors:
            holder = subprocess.Popen(
                [sys.executable, "-c", HOLDER, json.dumps(nodes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | {"RAY_TMPDIR": folder},
            )
        family: set[psutil.Process] = set()
        try:
            assert holder.stdout is not None and holder.stdin is not None
            line = holder.stdout.readline()
            assert line, log.read_text()
            family = set(psutil.Process(holder.pid).children(recursive=True))
            raylets = frozenset(p.pid for p in family if p.name() == "raylet")
            assert len(raylets) == len(nodes)
            patch.setenv("RAY_ADDRESS", json.loads(line))
            yield Nodes(json.loads(line), raylets)
            assert running(set(raylets)) == raylets, "a cluster that is not ours is left alone"
            for raylet in raylets:
                left = [p for p in psutil.Process(raylet).children(recursive=True) if is_worker(p)]
                psutil.wait_procs(left, timeout=20)
                assert not [p for p in left if p.is_running()], "clients outlived their run"
            holder.stdin.close()
            holder.wait(timeout=30)
        finally:
            for process in [*family, psutil.Process(holder.pid)] if holder.poll() is None else family:
                if process.is_running():
                    process.kill()
            holder.wait()
            shutil.rmtree(folder, ignore_errors=True)
        assert not running({p.pid for p in family})


def is_worker(process: psutil.Process) -> bool:
    try:
        return "ray::ClientAppActor" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def test_clients_work_on_both_nodes(cluster: Nodes, tmp_path: Path) -> None:
    """Each client says which node's raylet started the process that it ran in."""
    events: list[dict[str, Any]] = []
    with launch.Session(app=make_toy(tmp_path / "toy")) as session:
        handle = session.submit({"out": str(tmp_path), "mode": "slow"}, num_supernodes=4)
        outcome = handle.follow(events.append)
    assert outcome.ok, outcome
    assert events[0]["environment"]["RAY_ADDRESS"] == cluster.address
    for event in events[2::2]:
        assert {reply["parent"] for reply in event["replies"]} == cluster.raylets
        assert len({reply["pid"] for reply in event["replies"]}) == 2


class Watcher(runner.Follower):
    """Notes on which nodes there are workers at the end of each round."""

    def __init__(self) -> None:
        super().__init__()
        self.parents: list[set[int]] = []

    def __call__(self, event: Any) -> None:
        super().__call__(event)
        if event.get("kind") == "round":
            self.parents.append({p.ppid() for p in psutil.process_iter() if is_worker(p)})


def test_a_cluster_gives_the_numbers_of_this_process(cluster: Nodes, tmp_path: Path) -> None:
    config = prepared(tmp_path / "cluster", method="fedclassavg", model="digits-a,digits-b")
    chosen = runner.proposed([config])
    assert cluster.address in chosen.text and chosen.total_cpus is None
    follower = Watcher()
    with launch.Session(log=tmp_path / "superlink.log") as session, follower:
        assert runner.run_in(session, config, chosen, follower) == 0
    assert follower.parents and all(parents >= cluster.raylets for parents in follower.parents)
    local = {k.replace("-", "_"): v for k, v in SETTINGS.items()}
    run(**{**local, "method": "fedclassavg", "model": "digits-a,digits-b", "out": tmp_path / "local"})
    for name in ("rounds.csv", "clients.csv", "final.csv"):
        same(tmp_path / "cluster", tmp_path / "local", name)
    trained = [folder / "models" / "last.safetensors" for folder in (tmp_path / "cluster", tmp_path / "local")]
    assert trained[0].read_bytes() == trained[1].read_bytes()


def test_clients_share_a_gpu(tmp_path: Path) -> None:
    """Ray believes what it is told of GPUs: four cores and one GPU; how many clients work at a time is their share."""
    with started({**NODE, "num_cpus": 4, "num_gpus": 1}):
        for share, at_once in ((0.5, 2), (0.25, 4)):
            out = tmp_path / str(share)
            out.mkdir()
            events: list[dict[str, Any]] = []
            with launch.Session(app=make_toy(tmp_path / f"toy-{share}")) as session:
                handle = session.submit({"out": str(out), "mode": "slow"}, num_supernodes=4, client_gpus=share)
                outcome = handle.follow(events.append)
            assert outcome.ok, outcome
            rounds = [event for event in events if "replies" in event]
            assert rounds and {len({r["pid"] for r in event["replies"]}) for event in rounds} == {at_once}
