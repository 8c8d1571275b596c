"""One head from the sums of six real nodes, each with a file of features, and from a simulation of the same clients."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from fedapp.data.partitions import Partition
from fedapp.engines.local import run
from fedapp.learning.state import read_safetensors
from tests.deployment import Deployment, deployed
from tests.test_given_features import features

pytestmark = pytest.mark.slow
NODES = tuple(f"supernode-{k}" for k in range(6))


class Nodes(Deployment):
    """A deployment with more nodes than docker/compose.yml has; all have the command of its first."""

    def command(self, service: str, **changes: str) -> list[str]:
        first = service if service == "superlink" else "supernode-0"
        return [word.replace(f"/{first}", f"/{service}") for word in super().command(first, **changes)]


def head_of(out: Path) -> str:
    """The SHA-256 of a run's head: weights, then biases, float32."""
    arrays, _ = read_safetensors(out / "models" / "last.safetensors")
    return hashlib.sha256(b"".join(arrays[f"head.{name}"].tobytes() for name in ("weight", "bias"))).hexdigest()


def test_six_nodes_make_the_head_of_the_simulation(tmp_path: Path) -> None:
    method, data = "fed3r(personal=true)", features(tmp_path / "all.npz")
    here = run(method="fed3r", method_args="personal=true", dataset="npz", data_dir=data, partition="by-client",
               out=tmp_path / "simulated")  # fmt: skip
    clients = Partition.load(here.out / "partition.npz").clients
    with np.load(data) as arrays:
        columns = {name: arrays[name] for name in arrays.files}
    order = np.argsort(columns["split"] == "test", kind="stable")  # training rows have the first numbers
    with deployed(tmp_path / "deployed", Nodes, nodes=NODES) as it:
        it.superlink()
        it.register(*NODES)
        for k, (name, client) in enumerate(zip(NODES, clients)):
            own, folder = order[np.concatenate([client.train, client.test])], it.folder / name
            rows = {key: columns[key][own] for key in ("x", "y", "split")}
            np.savez(f"{folder}.npz", **rows, about=columns["about"])
            it.node(name, node_config=f"client-id={k} data-path='{folder}.npz' model='identity' state-dir='{folder}'")
        for name in NODES:
            it.online(name, 120)
        out = it.folder / "vol-superlink" / "runs" / "six"
        settings = {"dataset": "npz", "model": "identity", "class-names": "0,1,2,3"}
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        options = ("--engine", "deploy", "--superlink", "superlink", "--clients", "6", "--out", str(out))
        done = it.run("run", "--method", method, *words, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        assert head_of(out) == head_of(here.out)
