"""Secure sums on a real SuperLink and SuperNodes: a node is killed outright, and the run goes on without it."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from fedapp.transport.request import WITHOUT_DATA
from tests.deployment import NODES, deployed, until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("phase", ["query.keys", "query.shares", "train", "query.agree", "query.unmask"])
def test_a_node_that_is_killed_in_a_phase(phase: str, tmp_path: Path) -> None:
    with deployed(tmp_path / "deployment") as it:
        it.up(*NODES)
        out = it.folder / "vol-superlink" / "runs" / "sums"
        settings = ("--method", "fedclassavg", "--clients", "3", "--rounds", "3", "--set", "secure-sum=true")
        models = ("--set", "model=digits-a,digits-b,digits-c", "--out", str(out))
        follower = it.begin("run", "--engine", "deploy", "--superlink", "superlink", *settings, *models)
        # A node says so before it starts the process that answers.
        word = f"Receiving: {phase} message"
        until(lambda: word in it.log("supernode-2") or follower.poll() is not None, 300, f"{phase} arrives")
        assert follower.poll() is None, it.log("fedapp")[-3000:]
        it.supernode("supernode-2").kill()
        it.kill("supernode-2")
        until(lambda: follower.poll() is not None, 900, "the run ends")
        assert follower.returncode == 0, it.log("fedapp")[-4000:]
        summary = json.loads((out / "summary.json").read_text())
        dropped = pd.read_csv(out / "dropped.csv")
        assert summary["ok"] and set(dropped["client"]) == {2} and len(pd.read_csv(out / "rounds.csv")) == 3
        assert dropped["stage"].iloc[0] == phase and dropped["round"].iloc[0] == 1
        assert dropped["stage"].isin((*WITHOUT_DATA, "train", "evaluate")).all()
