"""Real nodes that extract features of their own pictures: only sums leave, and another body is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from fedapp.learning.state import read_safetensors
from fedapp.settings import DataSettings
from fedapp.tasks.node import own_data
from tests.deployment import NODES, Deployment, deployed
from tests.test_deployed_nodes import out_of, warned
from tests.test_deployment import DEPLOY
from tests.test_features import SIDE, picture_body
from tests.test_nodes import start
from tests.test_raw_samples import COLOURS, SETTINGS, photos

pytestmark = pytest.mark.slow
pytest.importorskip("onnxruntime")


def start_nodes(it: Deployment, names: Sequence[str], given: Mapping[int, Mapping[str, object]]) -> None:
    """Start a SuperLink and a node for each name, and wait until all are online."""
    it.superlink()
    it.register(*names)
    for k, name in enumerate(names):
        text = " ".join(f"{key}={value!r}" for key, value in given[k].items())
        it.node(name, node_config=f"{text} state-dir='{it.folder}/vol-{name}/state'")
    for name in names:
        it.online(name, 120)


def test_two_nodes_extract_and_a_third_with_another_mean_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = picture_body(tmp_path / "body.onnx", side=SIDE)
    sites = [photos(tmp_path / f"site{k}", k) for k in range(3)]
    given = {
        k: {"client-id": k, "data-path": str(site), "features-with": f"{body} mean={mean} std=128"}
        for k, (site, mean) in enumerate(zip(sites, (127, 127, 120), strict=True))
    }
    with deployed(tmp_path / "deployment") as it:
        start_nodes(it, NODES, given)
        out = out_of(it, "features")
        words = [word for key, value in SETTINGS.items() if key != "method" for word in ("--set", f"{key}={value}")]
        more = ("--clients", "3", "--set", "min-clients=2", "--set", "wait-timeout=60", "--out", str(out))
        done = it.run(*DEPLOY, "--method", str(SETTINGS["method"]), *words, *more)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "the body of client 2 (" in warned(out) and "differs from that of client 0 (" in warned(out)
        for name in NODES:
            assert it.log(name).count("fedapp: the body 'body.onnx' extracts features of 24 rows, once") == 1
        found, _ = read_safetensors(out / "models" / "last.safetensors")
        kept = it.folder / "vol-supernode-0" / "state" / "run" / "0" / "received.safetensors"
        told = it.run("predict", "--model", str(kept), "--with", str(body), "--top", "1", str(sites[2] / "test"))
        assert told.returncode == 0, told.stderr
    rows = [line.split("\t") for line in told.stdout.splitlines()]
    assert len(rows) == 2 * len(COLOURS) and all(Path(row[0]).parent.name == row[1] for row in rows)

    for place, variable in (("cache", "FEDAPP_CACHE"), ("state", "FEDAPP_STATE")):
        monkeypatch.setenv(variable, str(tmp_path / place))
    summary, *_ = start(tmp_path / "here", {70 + k: given[k] for k in (0, 1)}, **SETTINGS, clients=2)
    wanted, _ = read_safetensors(tmp_path / "here" / "run" / "models" / "last.safetensors")
    assert summary["ok"] and json.loads((out / "summary.json").read_text())["calibration"] == summary["calibration"]
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_two_nodes_of_two_bodies_get_a_head_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body, names = picture_body(tmp_path / "body.onnx", side=SIDE), NODES[:2]
    options = [f"{body} mean={mean} std=128" for mean in (127, 120)]
    given = {
        k: {"client-id": k, "data-path": str(photos(tmp_path / f"site{k}", k)), "features-with": option}
        for k, option in enumerate(options)
    }
    for place, variable in (("cache", "FEDAPP_CACHE"), ("state", "FEDAPP_STATE")):
        monkeypatch.setenv(variable, str(tmp_path / place))
    plain = DataSettings(dataset="npz")
    digests = [own_data(str(given[k]["data-path"]), None, plain, o).inputs.body for k, o in enumerate(options)]
    with deployed(tmp_path / "deployment") as it:
        start_nodes(it, names, given)
        out = out_of(it, "bodies")
        settings = {**SETTINGS, "bodies": ",".join(digest[:8] for digest in digests)}
        words = [word for key, value in settings.items() if key != "method" for word in ("--set", f"{key}={value}")]
        done = it.run(*DEPLOY, "--method", settings["method"], *words, "--clients", "2", "--out", str(out))
        assert done.returncode == 0, done.stdout + done.stderr
        kept = [it.folder / f"vol-{name}" / "state" / "run" / str(k) / "received.safetensors"
                for k, name in enumerate(names)]  # fmt: skip
        for k, (digest, option) in enumerate(zip(digests, options, strict=True)):
            found, _ = read_safetensors(out / "models" / f"last-{digest[:8]}.safetensors")
            start(tmp_path / digest[:8], {70: {**given[k], "client-id": 0}}, **SETTINGS, clients=1)
            wanted, _ = read_safetensors(tmp_path / digest[:8] / "run" / "models" / "last.safetensors")
            assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
            picture = str(tmp_path / f"site{k}" / "test" / "red" / "3.png")
            told = it.run("predict", "--model", str(kept[k]), "--with", option, "--top", "1", picture)
            assert told.returncode == 0 and told.stdout.split("\t")[1] == "red", told.stdout + told.stderr
    bodies = json.loads((out / "summary.json").read_text())["bodies"]
    assert [bodies[digest[:8]]["clients"] for digest in digests] == [[0], [1]]
