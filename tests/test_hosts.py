"""Four hosts on a network that fails: a slow line, a server that moves, and a site that is cut off and comes back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from fedapp.engines.local import run
from tests.deployment import NODES, deployed, until
from tests.hosts import Hosts
from tests.test_deployment import DEPLOY, reached, same, table

pytestmark = pytest.mark.slow
MODEL = "cnn-b"
"""On digits it has 3.2 MB, nearly all in one array, which takes 25 seconds at 1 Mbit/s."""
SETTINGS = ("--method", "fedavg", "--clients", "3", "--set", f"model={MODEL}")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """A SuperLink and three sites with data of their own, each on a host."""
    with deployed(tmp_path_factory.mktemp("hosts"), Hosts) as it:
        it.up(*NODES)
        yield it


def test_a_slow_line_and_a_server_that_moves_cost_time_and_nothing_else(hosts: Hosts, tmp_path: Path) -> None:
    hosts.change("slow", "supernode-1", "1mbit")
    out = hosts.folder / "vol-superlink" / "runs" / "moved"
    following = hosts.begin(*DEPLOY, *SETTINGS, "--rounds", "2", "--out", str(out))
    until(lambda: reached(out, 1) or following.poll() is not None, 600, "round 1")
    seconds = pd.read_csv(out / "rounds.csv")["round_seconds"][0]
    assert seconds > 50, "the model went down the slow line and up again"
    time.sleep(10)  # round 2 is on its way
    hosts.change("move", "superlink", "10.77.0.99/24")
    assert following.wait(900) == 0, hosts.log("fedapp")
    print(hosts.log("fedapp"))
    run(method="fedavg", clients=3, rounds=2, model=MODEL, out=tmp_path / "simulated")
    same(out, tmp_path / "simulated", "clients.csv", "final.csv", without="balanced")
    assert all(hosts.log(name).count("SuperNode ID") == 1 for name in NODES), "no node started anew"


def test_a_site_that_is_cut_off_is_missed_in_its_round_and_comes_back(hosts: Hosts) -> None:
    out = hosts.folder / "vol-superlink" / "runs" / "cut"
    following = hosts.begin(*DEPLOY, *SETTINGS, "--rounds", "5", "--out", str(out))
    until(lambda: reached(out, 1) or following.poll() is not None, 600, "round 1")
    hosts.change("cut", "supernode-2")
    until(lambda: reached(out, 2) or following.poll() is not None, 600, "round 2")
    hosts.change("join", "supernode-2")
    assert following.wait(1200) == 0, hosts.log("fedapp")
    print(hosts.log("fedapp"))
    rounds, dropped = table(out, "rounds.csv"), pd.read_csv(out / "dropped.csv")
    assert list(rounds["clients"][:2]) == [3, 2] and rounds["clients"].iloc[-1] == 3
    assert list(dropped["round"]) == list(rounds["round"][rounds["clients"] == 2])
    assert set(dropped["client"]) == {2} and "failed to report a heartbeat" in dropped["reason"][0]
    assert set(table(out, "final.csv")["client"]) == {0, 1, 2}
    assert json.loads((out / "summary.json").read_text())["ok"] is True
    assert hosts.log("supernode-2").count("SuperNode ID") == 1, "it was not started anew"
