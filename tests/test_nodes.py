"""What nodes bring along, and a server that sees them come, go and come back, without any network."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.cli.typing import SuperLinkConnection
from PIL import Image
from typer.testing import CliRunner

from fedapp import registry, server_app
from fedapp.cli import app as cli
from fedapp.client_app import app as client_app
from fedapp.client_app import build
from fedapp.config import for_context, from_flat, write_toml
from fedapp.data import partitions
from fedapp.engines import deploy
from fedapp.engines.local import resumed, run
from fedapp.errors import BadRequest
from fedapp.learning.state import MOST_ROUNDS, ClientStore, StateError
from fedapp.method import Payload
from fedapp.results import directory as results
from fedapp.settings import DataSettings
from fedapp.tasks import claim
from fedapp.tasks import node as nodes
from fedapp.tasks import simulated as tasks
from fedapp.tasks.node import Node
from fedapp.transport import checkpoint
from fedapp.transport.local_grid import FIRST_NODE, LocalGrid
from fedapp.transport.nodes import NodeCohort
from fedapp.transport.records import INFO, Encoder
from fedapp.transport.request import RoundRequest
from tests.handmade import exchange
from tests.matrix import methods

sys.path.insert(0, str(Path(__file__).parent.parent / "docker"))
import sites

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache for this module, and one short run, so that no test counts the seconds of a first time."""
    folder = tmp_path_factory.mktemp("warm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDAPP_CACHE", str(folder / "cache"))
        run(method="moon", clients=2, rounds=1, local_epochs=1, out=folder / "run")
        yield


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAPP_STATE", str(tmp_path / "state"))


# ---- node-config ---------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_two_kinds_of_nodes() -> None:
    own = Node.parse({"client-id": 3, "data-path": "/data/site1", "model": "resnet18", "state-dir": "/state"})
    assert own == Node(client=3, data_path="/data/site1", model="resnet18", state_dir="/state") and own.own
    share = Node.parse({"partition-id": 2, "num-partitions": 3, "model": "auto"})
    assert share == Node(client=2, partitions=3) and not share.own


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "client-id and data-path missing"),
    ({"client-id": 3}, "data-path missing"),
    ({"data-path": "/x"}, "data-path needs client-id"),
    ({"client-id": 3, "data-path": "/x", "partition-id": 3, "num-partitions": 4}, "clash"),
    ({"client-id": 3, "partition-id": 3, "num-partitions": 4}, "client-id goes with data-path"),
    ({"partition-id": 3}, "needs num-partitions"),
    ({"partition-id": 3, "num-partitions": 3}, "0 .. 2"),
    ({"client_id": 3, "data-path": "/x"}, "did you mean 'client-id'"),
    ({"client-id": "3", "data-path": "/x"}, "whole number"),
    ({"client-id": True, "data-path": "/x"}, "whole number"),
    ({"client-id": -1, "data-path": "/x"}, "whole number"),
    ({"client-id": 3, "data-path": ""}, "text in quotation marks"),
    ({"client-id": 3, "data-path": "/x", "allow-methods": ["fedavg"]}, "text in quotation marks"),
    ({"client-id": 3, "data-path": "/x", "allow-methods": "fedavgg"}, "did you mean 'fedavg'"),
    ({"client-id": 3, "data-path": "/x", "min-sum-clients": 2.0}, "whole number"),
    ({"client-id": 3, "data-path": "/x", "dp": "sgd"}, "dp = 'sgd' must be 'example' or 'client'"),
    ({"client-id": 3, "data-path": "/x", "dp-epsilon": 0}, "a number above 0"),
    ({"client-id": 3, "data-path": "/x", "dp-delta": float("nan")}, "a number above 0"),
    ({"partition-id": 0, "num-partitions": 0}, "0 .. -1"),
    ({"client-id": 3, "data-path": "/x", "model": "resnet19"}, "did you mean 'resnet18'"),
    ({"client-id": 3, "data-path": "/x", "features-text": "q"}, "features-text needs features-with"),
    ({"partition-id": 0, "num-partitions": 2, "features-with": "minilm"}, "features-with needs data-path"),
]


@pytest.mark.parametrize(("config", "says"), BAD, ids=[str(c) for c, _ in BAD])
def test_a_bad_node_config_is_one_line_that_says_what_to_write(config: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        Node.parse(config)
    assert says in str(caught.value) and "\n" not in str(caught.value)


# ---- own data ------------------------------------------------------------------------------------------------------


def npz(path: Path, names: list[str] | None, labels: list[int], size: int = 8, high: int = 256) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    x = np.random.default_rng(0).integers(0, high, (len(labels), size, size), dtype=np.uint8)
    extra = {} if names is None else {"class_names": np.array(names)}
    np.savez(path, x_train=x, y_train=np.array(labels), **extra)
    return path


def test_labels_follow_the_names_of_the_classes(tmp_path: Path) -> None:
    path = npz(tmp_path / "a.npz", ["dog", "cat"], [0, 0, 0, 0, 1, 1, 1, 1])
    data = nodes.own_data(str(path), ("cat", "cow", "dog"), DataSettings(dataset="npz"))
    with np.load(path) as raw:
        pictures = raw["x_train"]
    found = {bytes(x): int(y) for rows in data.rows.values() for x, y in zip(*rows, strict=True)}
    assert found == {bytes(x): 2 if i < 4 else 0 for i, x in enumerate(pictures)}
    assert data.classes == ("cat", "cow", "dog") and len(data.rows["test"][1]) == 2


def test_a_class_that_the_federation_lacks_is_named(tmp_path: Path) -> None:
    path = npz(tmp_path / "a.npz", ["cat", "dgo"], [0, 1] * 4)
    with pytest.raises(BadRequest, match=r"class 'dgo' is not among the federation's 2 classes.*did you mean 'dog'"):
        nodes.own_data(str(path), ("cat", "dog"), DataSettings(dataset="npz"))


def test_without_names_the_data_keep_their_own(tmp_path: Path) -> None:
    data = nodes.own_data(str(npz(tmp_path / "a.npz", None, [0, 1, 2] * 4)), None, DataSettings(dataset="npz"))
    assert data.classes == ("0", "1", "2")


def test_what_is_held_out_is_the_same_in_every_run(tmp_path: Path) -> None:
    path = npz(tmp_path / "a.npz", None, [0, 1] * 20)
    config = from_flat({"dataset": "npz", "model": "digits-a"})
    node = Node(client=0, data_path=str(path))
    one = nodes.node_task(config, node, CPU)
    other = nodes.node_task(config.replaced(seed=7), node, CPU)
    assert len(one.y_test) == 10 and torch.equal(one.x_test, other.x_test) and torch.equal(one.x_train, other.x_train)


def test_validation_takes_the_rows_that_a_client_in_simulation_would_give(tmp_path: Path) -> None:
    config = from_flat({"dataset": "npz", "model": "digits-a", "validation": 0.2})
    node = Node(client=0, data_path=str(npz(tmp_path / "a.npz", None, [0, 1] * 20)))
    whole = nodes.node_task(config.replaced(validation=0.0), node, CPU)
    task, again = (nodes.node_task(config.replaced(seed=seed), node, CPU) for seed in (0, 7))
    rows = partitions.ClientSplit(np.arange(30), np.arange(0))
    (split,) = partitions.hold_out(partitions.Partition("", "", (rows,), "", {}), 0.2, 0).clients
    assert whole.x_validation is None and len(split.validation) == 6
    assert torch.equal(task.x_train, whole.x_train[split.train])
    assert torch.equal(task.y_train, whole.y_train[split.train])
    assert task.x_validation is not None and torch.equal(task.x_validation, whole.x_train[split.validation])
    assert task.y_validation is not None and torch.equal(task.y_validation, whole.y_train[split.validation])
    assert again.x_validation is not None and torch.equal(task.x_validation, again.x_validation)
    assert torch.equal(task.x_test, whole.x_test) and task.num_samples == 24


def test_a_folder_of_pictures(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        for number in range(6):
            path = tmp_path / "site" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(path)
    config = from_flat({"dataset": "folder", "class-names": "dog, cat", "model": "cnn"})
    task = nodes.node_task(config, Node(client=4, data_path=str(tmp_path / "site")), CPU)
    assert task.client == 4 and task.num_classes == 2 and task.inputs.shape == (3, 28, 28)
    assert len(task.y_train) + len(task.y_test) == 12 and task.extras["classes"] == ("dog", "cat")


def test_a_published_data_set_lends_its_normalisation(tmp_path: Path) -> None:
    path = npz(tmp_path / "a.npz", None, list(range(10)) * 2, high=17)
    assert nodes.own_data(str(path), None, DataSettings(dataset="digits")).inputs.scale == 16
    assert nodes.own_data(str(path), None, DataSettings(dataset="npz")).inputs.scale == 255
    bright = npz(tmp_path / "b.npz", None, list(range(10)) * 2)
    with pytest.raises(BadRequest, match=r"grey levels 0 .. 16"):
        nodes.own_data(str(bright), None, DataSettings(dataset="digits"))


def test_data_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="does not exist on this node"):
        nodes.own_data(str(tmp_path / "no.npz"), None, DataSettings(dataset="npz"))


def test_a_model_that_does_not_fit_the_images(tmp_path: Path) -> None:
    path = npz(tmp_path / "a.npz", None, [0, 1] * 4)
    with pytest.raises(BadRequest, match="resnet18"):
        nodes.node_task(from_flat({"dataset": "npz"}), Node(client=0, data_path=str(path), model="resnet18"), CPU)


def test_a_site_has_the_very_data_of_the_client_in_simulation(tmp_path: Path) -> None:
    paths = sites.write(tmp_path)
    config = from_flat({"clients": 3, "model": "digits-a,digits-b,digits-c"})
    for k, path in enumerate(paths):
        own = nodes.node_task(config, Node(client=k, data_path=str(path.parent)), CPU)
        simulated = tasks.simulated_task(config, k, 3, CPU)
        for name in ("x_train", "y_train", "x_test", "y_test"):
            assert torch.equal(getattr(own, name), getattr(simulated, name))
        assert own.inputs == simulated.inputs and own.model == simulated.model and own.train == simulated.train
        assert own.num_classes == 10 and own.x_union is None


def test_the_node_decides_where_its_state_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Node(client=0, state_dir=str(tmp_path / "a")).state_root() == tmp_path / "a"
    assert Node(client=0).state_root() == tmp_path / "state"
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(BadRequest, match="cannot be written"):
        Node(client=0, state_dir=str(blocked / "x")).state_root()


# ---- what is the node's own ----------------------------------------------------------------------------------------

NOISY = {"dp": "example", "method-args": "base=none", "normalise": "none", "protocols": "global"}


@pytest.mark.parametrize(
    ("more", "values", "words"),
    [
        ({"allow-methods": "fedavg, fedgh"}, {"method": "lgfedavg"}, r"'lgfedavg' is not among .* \(fedavg, fedgh\)"),
        ({"allow-methods": "fedavg, fedgh"}, {"method": "fedgh"}, ""),
        ({"allow-methods": "ccvr"}, {"method": "ccvr", "method-args": "base=moon"}, "the base 'moon' is not among"),
        ({"allow-methods": "ccvr"}, {"method": "ccvr", "method-args": "base=none"}, ""),
        ({"allow-methods": "ccvr, moon"}, {"method": "ccvr", "method-args": "base=moon"}, ""),
        ({"min-class-count": 5}, {"method": "lgfedavg"}, ""),
        ({"min-class-count": 5}, {"method": "fedgh"}, r'set method-args="min_class_count=5"'),
        ({"min-class-count": 5}, {"method": "fedgh", "method-args": "min_class_count=4"}, "this run 4"),
        ({"min-class-count": 5}, {"method": "fedgh", "method-args": "min_class_count=5"}, ""),
        ({"min-class-count": 1}, {"method": "fedgh"}, ""),
        ({"min-class-count": 5}, {"method": "fedncm", **NOISY}, r"the run takes dp = 'none'"),
        ({"min-class-count": 1}, {"method": "fedncm", **NOISY}, ""),
        ({"min-class-count": 3}, {"method": "ccvr"}, r'set method-args="min_count=3"'),
        ({"min-class-count": 3}, {"method": "ccvr", "method-args": "min_count=3"}, ""),
        ({"min-class-count": 3}, {"method": "ccvr", "method-args": "min_count=9 oracle=true"}, "every class"),
        ({"min-class-count": 3}, {"method": "ccvr", "method-args": "base=fednh min_count=3"}, "every class"),
        ({"min-class-count": 3}, {"method": "cwfedavg"}, ""),
        ({"min-class-count": 3}, {"method": "cwfedavg", "method-args": "dist=empirical"}, "every class"),
        *[({"min-class-count": 3}, {"method": m}, "class, and this node's") for m in ("fd", "fednh", "fedproto")],
        ({}, {"federation": "a_b"}, "small letters"),
        ({}, {"federation": "A"}, "small letters"),
        ({}, {"federation": "a" * 65}, "small letters"),
        ({}, {"federation": "a-9"}, ""),
        ({}, {"data-dir": "/etc"}, "a node reads no path that a server names"),
        ({"data-dir": "/data"}, {"data-dir": "/etc"}, ""),
        ({}, {"partition": "file", "partition-file": "/etc/passwd"}, "a node reads no file"),
    ],
)  # fmt: skip
def test_a_node_refuses_a_run_that_asks_for_more(more: dict[str, Any], values: dict[str, Any], words: str) -> None:
    node = Node.parse({"partition-id": 0, "num-partitions": 3, **more})
    try:
        config = from_flat(values)
    except BadRequest as e:
        pytest.fail(f"the configuration itself is refused: {e}")
    if words:
        with pytest.raises(BadRequest, match=words):
            node.check(config)
    else:
        node.check(config)


def test_every_method_that_tells_of_classes_says_so() -> None:
    """Those whose further arrays are per class, and no other."""
    every = {m.id: m.class_threshold(m.hparams()) for m in registry.discover().values()}
    found = {name: threshold for name, threshold in every.items() if threshold is not None}
    assert found == {
        "ccvr": "min_count",
        "fd": "",
        "fed3r": "min_count",
        "fedcof": "min_count",
        "fedgh": "min_class_count",
        "fedghg": "min_class_count",
        "fedncm": "min_count",
        "fednh": "",
        "fedproto": "",
        "fedtgp": "",
        "lda": "min_count",
        "qda": "min_count",
        "fedpac": "",
        "pfedfda": "min_count",
        "pccvr": "min_count",
    }
    beside = {m.id for m in registry.discover().values() if m.extra_up} - found.keys()
    # Small models, soft predictions on public images, control variates, one mean of all samples.
    assert beside == {"fedkd", "fml", "ktpfl", "scaffold", "feddbe"}


def test_a_method_that_does_not_exist_is_a_typing_error(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"allow-methods names no method 'fedvag', did you mean 'fedavg'"):
        Node.parse(share(0, **{"allow-methods": "fedvag"}))


@pytest.mark.full
def test_a_server_that_says_it_is_a_simulation_gets_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The messages of a simulation: a state folder of the server's choice, and no word of a deployment."""

    class Hostile(NodeCohort):
        def __init__(self, grid: Any, settings: Any, request: RoundRequest, *args: Any, **more: Any) -> None:
            theirs = replace(request, state_dir=str(tmp_path / "theirs"), models_dir="x", client=2)
            super().__init__(grid, settings, theirs, *args, **more)
            plain = self.ledger.request
            self.ledger.request = lambda client, asked: replace(plain(client, asked), client=2)  # type: ignore[method-assign]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_app, "NodeCohort", Hostile)
        start(tmp_path, THREE, **{"num-server-rounds": 1, "state-dir": str(tmp_path / "config")})
        assert not (tmp_path / "theirs").exists() and not (tmp_path / "config").exists()
        assert (tmp_path / "state" / "run" / "1" / "personal.safetensors").is_file()
        configs = {n: {**c, "allow-methods": "fedavg"} for n, c in THREE.items()}
        with pytest.raises(BadRequest, match=r"client \d cannot take part: .*'lgfedavg' is not among"):
            start(tmp_path / "b", configs)
    assert (
        "fedapp: this node cannot take part in register: the method 'lgfedavg' is not among" in capsys.readouterr().out
    )


@pytest.mark.parametrize("token", ["../../x", "", "AB", "a" * 65])
def test_a_run_names_itself_by_hexadecimal_digits(token: str, tmp_path: Path) -> None:
    with pytest.raises(StateError, match="hexadecimal"):
        ClientStore(tmp_path, "m", token)


def test_a_process_knows_whether_it_is_a_real_node(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from fedapp import process

    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert process.real_node()
    with process.simulation():
        assert not process.real_node()
        with process.simulation(False):
            assert process.real_node()
        assert not process.real_node()
    for inside in (True, False):
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda inside=inside: inside))
        assert process.real_node() is not inside and process.worker() is inside
        with process.simulation():
            assert not process.worker(), "the server is in this process"


# ---- two runs at once ----------------------------------------------------------------------------------------------


def other_run(root: Path, client: int, seen: float = 0.0, pause: float = 0.0) -> Path:
    note = root / "state" / "run" / str(client) / ".run"
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps({"run": "abcdef", "seen": time.time() - seen, "pause": pause}))
    return note


@pytest.mark.full
def test_a_second_run_is_told_of_the_first_and_keeps_out(tmp_path: Path) -> None:
    note = other_run(tmp_path, 1)
    with pytest.raises(
        BadRequest, match=r"client 1 cannot take part: .*the run abcdef is in progress .*--set federation"
    ):
        start(tmp_path, THREE, **{"min-clients": 3})
    assert json.loads(note.read_text())["run"] == "abcdef"
    assert start(tmp_path / "b", THREE, federation="other", **{"num-server-rounds": 1})[0]["ok"]


def test_a_run_that_begins_meanwhile_does_not_overwrite_models(tmp_path: Path) -> None:
    kept = tmp_path / "state" / "run" / "1" / "personal.safetensors"

    def script(grid: Nodes, server_round: int) -> None:
        if server_round == 2:
            other_run(tmp_path, 1)
            kept.write_bytes(b"of the other run")

    summary, _, _ = start(tmp_path, THREE, script, **{"min-replies": 0.5})
    rows = pd.read_csv(tmp_path / "run" / "dropped.csv")
    assert set(rows["client"]) == {1} and rows["reason"].str.contains("the run abcdef is in progress").all()
    assert summary["ok"] and kept.read_bytes() == b"of the other run"


@pytest.mark.parametrize(
    ("seen", "pause", "free"), [(100, 0, False), (130, 0, True), (130, 50, False), (160, 50, True), (-9000, 0, True)]
)
def test_a_run_that_is_silent_counts_as_ended(seen: float, pause: float, free: bool, tmp_path: Path) -> None:
    folder = other_run(tmp_path, 1, seen, pause).parent
    if free:
        claim.check(folder, "aa")
    else:
        with pytest.raises(BadRequest, match=r"silent for another [0-9]+ s"):
            claim.check(folder, "aa")
    claim.check(folder, "abcdef")


def test_the_claim_of_a_stopped_run_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor asks the SuperLink; a run that goes on or cannot be looked up keeps its claim."""
    folder = tmp_path / "f" / "1"
    monkeypatch.setenv(claim.SUPERVISED, "1")
    with claim.held(folder, "aa", last=False, flower=7):
        pass
    asked: list[int] = []
    over = threading.Event()

    def supervise() -> None:
        while not over.wait(0.01):
            claim.settle(tmp_path, lambda run: asked.append(run) or len(asked) < 2)  # type: ignore[func-returns-value]

    thread = threading.Thread(target=supervise)
    thread.start()
    try:
        with pytest.raises(BadRequest, match="the run aa is in progress"):
            claim.check(folder, "bb")
        claim.check(folder, "bb")
    finally:
        over.set()
        thread.join()
    assert asked == [7, 7] and {p.name for p in folder.iterdir()} <= {".lock"}


@pytest.mark.full
def test_a_node_that_could_not_take_part_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose folder a stopped run still claims; what it says is shown once, though it counts seconds."""
    monkeypatch.setattr("fedapp.transport.nodes.FAILED_AGAIN", 0.3)
    note = other_run(tmp_path, 1, seen=118.5)
    summary, grid, events = start(tmp_path, THREE, **{"wait-timeout": 60.0, "min-clients": 3, "num-server-rounds": 1})
    assert summary["ok"] and summary["clients"] == 3 and not note.exists()
    assert sum("the run abcdef is in progress" in e.get("text", "") for e in events) == 1
    assert grid.told[12].count("query.register") > 1


def test_a_run_that_is_resumed_after_days_holds_the_folder_for_hours_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1e6]
    monkeypatch.setattr(claim.time, "time", lambda: clock[0])
    folder = tmp_path / "f" / "1"
    for pause in (0, 3 * 86_400):
        clock[0] += pause
        with claim.held(folder, "aa", last=False):
            pass
    clock[0] += 3 * 3600 - 60
    with pytest.raises(BadRequest, match="the run aa"):
        claim.check(folder, "bb")
    clock[0] += 120
    claim.check(folder, "bb")


def test_the_folder_is_held_from_the_first_training_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(claim.time, "time", lambda: clock[0])
    folder = tmp_path / "f" / "1"
    for pause in (0, 30, 500, 10):
        clock[0] += pause
        with claim.held(folder, "aa", last=False), pytest.raises(BadRequest):
            claim.check(folder, "bb")
        with pytest.raises(BadRequest, match="the run aa"), claim.held(folder, "bb", last=False):
            pytest.fail("it works beside the other run")
    clock[0] += 1499
    with pytest.raises(BadRequest, match="another 1 s"):
        claim.check(folder, "bb")
    with claim.held(folder, "aa", last=True):
        pass
    claim.check(folder, "bb")
    with pytest.raises(ZeroDivisionError), claim.held(folder, "bb", last=False):
        raise ZeroDivisionError
    claim.check(folder, "cc")  # what a first message could not do leaves no claim
    (folder / ".run").write_text("{")
    claim.check(folder, "cc")


def test_two_messages_at_a_time_of_two_runs(tmp_path: Path) -> None:
    """The lock of another process, as while its message is worked on."""
    folder = tmp_path / "f" / "1"
    hold = "import sys, pathlib, fedapp.tasks.claim as c\n"
    hold += "with c.held(pathlib.Path(sys.argv[1]), 'aa', False): print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as p:
        assert p.stdout is not None and p.stdout.readline() == b"held\n"
        with pytest.raises(BadRequest, match="the run aa is in progress"), claim.held(folder, "bb", False):
            pytest.fail("it works beside the other run")
        assert p.stdin is not None
        p.stdin.close()
        with claim.held(folder, "aa", True):  # waits for the end of the same run's message
            pass


@pytest.mark.full
def test_old_states_of_ended_runs_are_removed_and_nothing_else(tmp_path: Path) -> None:
    start(tmp_path, THREE)
    root = tmp_path / "state"
    folder = root / "run" / "1"
    token = json.loads((tmp_path / "run" / "versions.json").read_text())["run"]
    ended = set(root.glob(f"run/*/{token}.*"))
    assert len(ended) >= 6
    for name in ("abcdef.000001.safetensors", "0-data.head"):  # of a run that goes on, and of a ledger
        (folder / name).touch()
    (root / "privacy").mkdir()
    (root / "privacy" / "0-data.jsonl").touch()
    before = {f for f in root.rglob("*") if f.is_file()}

    def remove(*words: str) -> str:
        config = f"client-id=1 data-path='x' state-dir='{root}'"
        done = CliRunner().invoke(cli, ["deploy", "remove-states", "--node-config", config, *words])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert "0 ended runs" in remove("--remove"), "they ended just now"
    assert "3 ended runs" in remove("--days", "0") and {f for f in root.rglob("*") if f.is_file()} == before
    remove("--days", "0", "--remove")
    left = {f for f in root.rglob("*") if f.is_file()}
    assert left == before - ended and folder / "personal.safetensors" in left


def test_a_run_that_goes_on_after_its_end_has_not_ended(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "1"
    for last in (True, False, True):
        with claim.held(folder, "aa", last):
            (folder / "aa.000001.safetensors").touch()
        assert claim.remove_ended(tmp_path, 0, remove=False)[0] == int(last)
    with pytest.raises(ValueError, match="x"), claim.held(folder, "aa", last=True):
        raise ValueError("x")
    assert claim.remove_ended(tmp_path, 0, remove=True) == (0, 0)


# ---- nodes that stay silent --------------------------------------------------------------------------------------


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for name in ("channel", "cohort", "nodes"):
            monkeypatch.setattr(f"fedapp.transport.{name}.time", self)

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.full
def test_a_silent_node_does_not_hold_up_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for once, then for a minute, and gets every second message; a resumed run goes on so."""
    Clock(monkeypatch)
    drawn: list[int] = []

    def script(grid: Nodes, server_round: int) -> None:
        drawn.append(server_round)
        grid.mute = {12} if server_round > 1 else set()

    values = {"min-replies": 0.5, "round-timeout": 200.0, "final-training": False}
    summary, grid, events = start(tmp_path, THREE, script, **values, **{"num-server-rounds": 5})
    assert summary["ok"] and drawn == [1, 2, 3, 4, 5] and grid.told[12].count("train") == 4
    rows = pd.read_csv(tmp_path / "run" / "dropped.csv").query("stage == 'train'")
    assert list(rows["round"]) == [2, 3, 4, 5] and set(rows["client"]) == {1}
    skipped = "no message in this round, because the last 2 that drew it brought no answer"
    first, second, third, fourth = rows["reason"]
    assert first == "no answer within 200 s" and third == skipped
    assert second.startswith("no answer within 6") and fourth.startswith("no answer within 6"), "a minute, and a look"
    assert sum(e["kind"] == "dropped" and e["stage"] == "train" for e in events) == 4
    lost = "no valid reply for the rest of the run: client 1 since round 2 (train: no answer within 200 s)"
    assert summary["warnings"][1:] == [lost]
    assert checkpoint.load(tmp_path / "run" / "checkpoint", 5)[2]["Cohort"]["silent"]["train"] == {1: 4}
    resumed_run, grid, _ = start(tmp_path, THREE, script, **values, **{"num-server-rounds": 7, "resume": True})
    assert resumed_run["ok"] and grid.told[12].count("train") == 1, "round 6 has no message for it, and round 7 has"
    assert resumed_run["warnings"][1:] == [lost]


@pytest.mark.full
def test_a_node_that_answers_again_gets_all_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)

    def script(grid: Nodes, server_round: int) -> None:
        grid.mute = {12} if server_round < 3 else set()

    summary, grid, _ = start(tmp_path, THREE, script, **{"min-replies": 0.5, "num-server-rounds": 5})
    assert summary["ok"] and grid.told[12].count("train") == 4
    assert list(rounds(tmp_path)["clients"]) == [2, 2, 2, 3, 3], "in round 3 it gets no message"


# ---- what leaves ---------------------------------------------------------------------------------------------------


def test_a_bound_on_nothing_is_refused() -> None:
    with pytest.raises(BadRequest, match="sends none"):
        from_flat({"method": "fedgh", "clip-update": 1.0})


# ---- nodes that come, go and come back -----------------------------------------------------------------------------

Script = Callable[["Nodes", int], None]


class Nodes(LocalGrid):
    """Real nodes as a server sees them: ids without meaning, own node-configs, some of them offline."""

    def __init__(self, flat: Mapping[str, Any], configs: Mapping[int, Mapping[str, Any]], script: Script) -> None:
        super().__init__(client_app, flat, 0)
        del self.pull_interval  # what tells a simulation's grid
        self.flat = dict(flat)
        self.script = script
        self.offline: set[int] = set()
        self.mute: set[int] = set()  # online, and without an answer
        self.told: dict[int, list[str]] = {}
        for node, config in configs.items():
            self.join(node, config)

    def join(self, node: int, config: Mapping[str, Any]) -> None:
        self.contexts[node] = Context(
            run_id=1, node_id=node, node_config=dict(config), state=RecordDict(), run_config=self.flat
        )

    def get_node_ids(self) -> list[int]:
        return [n for n in self.contexts if n not in self.offline]

    def push_messages(self, messages: Any) -> Any:
        messages = list(messages)
        kinds = {m.metadata.message_type for m in messages}
        if kinds == {"train"}:
            self.script(self, int(messages[0].metadata.group_id.split()[0]))
        for m in messages:
            self.told.setdefault(m.metadata.dst_node_id, []).append(m.metadata.message_type)
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Any) -> Any:
        for i in message_ids:
            message = self._waiting.get(i)
            if message is not None and message.metadata.dst_node_id in self.offline:
                del self._waiting[i]
                reply = Message(Error(code=5, reason="Node Unavailable"), reply_to=message)
                reply.metadata.__dict__["_src_node_id"] = 1  # the SuperLink signs for a node that is gone
                return [reply]
        told = [i for i in message_ids if self._waiting[i].metadata.dst_node_id not in self.mute]
        return super().pull_messages(told)


def share(k: int, of: int = 3, **more: Any) -> dict[str, Any]:
    return {"partition-id": k, "num-partitions": of, **more}


def start(
    tmp_path: Path, configs: Mapping[int, Mapping[str, Any]], script: Script = lambda g, r: None, **values: Any
) -> tuple[dict[str, Any], Nodes, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    settings: dict[str, Any] = {"method": "lgfedavg", "clients": 3, "num-server-rounds": 3}
    settings |= {"wait-timeout": 3.0, "round-timeout": 60.0, "out": str(tmp_path / "run")}
    flat = from_flat(settings | values).to_flat()
    grid = Nodes(flat, configs, script)
    return server_app.serve(grid, flat, lambda e: events.append(dict(e))), grid, events


def rounds(tmp_path: Path) -> pd.DataFrame:
    return pd.read_csv(tmp_path / "run" / "rounds.csv")


THREE = {71: share(0), 12: share(1), 55: share(2)}


@pytest.mark.full
def test_a_node_that_goes_is_dropped_and_goes_on_with_its_own_model(tmp_path: Path) -> None:
    def script(grid: Nodes, server_round: int) -> None:
        grid.offline = {12} if server_round == 2 else set()

    summary, grid, _ = start(tmp_path, THREE, script)
    assert summary["ok"] and summary["dropped"] == 1 and not any("no valid" in text for text in summary["warnings"])
    assert list(rounds(tmp_path)["clients"]) == [3, 2, 3]
    clients = pd.read_csv(tmp_path / "run" / "clients.csv")
    back = clients[(clients["client"] == 1) & (clients["round"] == 3)]
    assert float(back["received_accuracy"].iloc[0]) > 0.5  # a new body under the averaged head would guess
    assert grid.told[12].count("train") == 3


@pytest.mark.full
def test_a_node_may_come_back_under_another_id(tmp_path: Path) -> None:
    def script(grid: Nodes, server_round: int) -> None:
        if server_round == 2:
            grid.offline = {12}
            grid.join(99, share(1))

    summary, grid, events = start(tmp_path, THREE, script)
    assert summary["ok"] and list(rounds(tmp_path)["clients"]) == [3, 2, 3]
    assert [e["text"] for e in events if e["kind"] == "joined"] == ["client 1 is here again"]
    assert grid.told[99] == ["query.register", "train", "evaluate"]
    clients = pd.read_csv(tmp_path / "run" / "clients.csv")
    back = clients[(clients["client"] == 1) & (clients["round"] == 3)]
    assert float(back["received_accuracy"].iloc[0]) > 0.5


@pytest.mark.full
def test_a_late_node_joins_and_one_that_cannot_is_left_out(tmp_path: Path) -> None:
    def script(grid: Nodes, server_round: int) -> None:
        if server_round == 1:
            grid.join(13, share(2))
            grid.join(14, {"client-id": 9})  # no data
            grid.join(15, share(0))  # an id that is taken

    configs = {n: c for n, c in THREE.items() if c["partition-id"] != 2}
    summary, grid, events = start(tmp_path, configs, script)
    assert summary["ok"] and list(rounds(tmp_path)["clients"]) == [2, 3, 3]
    warnings = [e["text"] for e in events if e["kind"] == "warning"]
    assert any("waiting for 1 of 3" in w for w in warnings)
    assert any("left out" in w and "data-path missing" in w for w in warnings)
    assert any("two nodes are client 0, of which" in w for w in warnings)
    assert [e["text"] for e in events if e["kind"] == "joined"] == ["client 2 takes part from now on"]
    assert "train" not in grid.told[14] + grid.told[15]


@pytest.mark.full
def test_before_round_one_a_node_that_cannot_take_part_is_left_out_unless_too_few_are_left(tmp_path: Path) -> None:
    summary, grid, events = start(tmp_path, {8: {"client-id": 4}, **THREE}, **{"num-server-rounds": 1})
    assert summary["ok"] and summary["clients"] == 3 and grid.told[8] == ["query.register"]
    assert any("client 4 cannot take part" in e.get("text", "") for e in events)
    few: dict[int, dict[str, Any]] = {71: share(0), 8: {"client-id": 1}, 9: {"client-id": 2}}
    with pytest.raises(BadRequest, match=r"1 of 3 clients can take part, and 2 are needed: client \d cannot take part"):
        start(tmp_path / "few", few, **{"wait-timeout": 0.5})
    error = json.loads((tmp_path / "few" / "run" / "error.json").read_text())
    assert error["exit"] == 2 and error["stage"] == "register" and error["client"] in (1, 2)
    assert start(tmp_path / "one", few, **{"min-clients": 1, "num-server-rounds": 1})[0]["clients"] == 1


@pytest.mark.full
def test_before_round_one_the_majority_decides_what_is_shared(tmp_path: Path) -> None:
    """A second node of one id, and a node that is of another kind, are left out; without a majority nobody is right."""
    other = {71: share(0, of=4), 12: share(1, of=4), 55: share(2, of=4), 2: share(3, of=4, model="mlp"), 99: share(0)}
    settings = {"clients": 4, "num-server-rounds": 1, "method": "fedavg"}
    summary, grid, events = start(tmp_path, dict(sorted(other.items())), **settings)
    texts = [e["text"] for e in events if e["kind"] == "warning"]
    assert summary["ok"] and any("two nodes are client 0, of which" in t for t in texts)
    assert any(t.startswith("client 3 was left out: fedavg needs one architecture") for t in texts), texts
    assert "train" not in grid.told[2] and summary["model"] == "digits-a"
    two = {71: share(0, of=2), 12: share(1, of=2, model="mlp")}
    with pytest.raises(BadRequest, match="fedavg needs one architecture"):
        start(tmp_path / "two", two, method="fedavg", clients=2)


class Scripted(Nodes):
    """Nodes of which one says something else when it registers, and some come late."""

    says: ClassVar[dict[int, dict[str, Any]]] = {}
    late: ClassVar[dict[int, dict[str, Any]]] = {}
    looks = 0

    def get_node_ids(self) -> list[int]:
        self.looks += 1
        if self.looks == 4:
            for node, config in self.late.items():
                self.join(node, config)
        return super().get_node_ids()

    def pull_messages(self, message_ids: Any) -> Any:
        replies = list(super().pull_messages(message_ids))
        for reply in replies:
            if reply.metadata.message_type == "query.register":
                for name, value in self.says.get(reply.metadata.src_node_id, {}).items():
                    reply.content[INFO][name] = value
        return replies


def scripted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configs: Mapping[int, Mapping[str, Any]],
    says: Mapping[int, Any] = MappingProxyType({}), late: Mapping[int, Any] = MappingProxyType({}), **values: Any,
) -> tuple[dict[str, Any], Nodes, list[dict[str, Any]]]:  # fmt: skip
    monkeypatch.setattr(Scripted, "says", says)
    monkeypatch.setattr(Scripted, "late", late)
    monkeypatch.setattr(sys.modules[__name__], "Nodes", Scripted)
    return start(tmp_path, configs, **{"num-server-rounds": 1, **values})


@pytest.mark.full
def test_weights_that_one_node_claims_leave_it_out_even_if_all_others_agree_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    liar = {5: {"model": "mlp", "common": '{"weights": "junk"}'}}
    summary, grid, events = scripted(tmp_path, monkeypatch, {5: share(0, 4), **{k: share(k, 4) for k in (1, 2, 3)}},
                                     liar, clients=4)  # fmt: skip
    assert summary["ok"] and summary["clients"] == 3 and "train" not in grid.told[5]
    assert any("client 0 was left out: weights = ''" in e.get("text", "") for e in events)


def test_a_node_that_changes_its_client_id_leaves_nothing_behind() -> None:
    grid = Nodes(
        from_flat({"method": "fedavg", "clients": 3}).to_flat(), {71: share(0), 13: share(2)}, lambda g, r: None
    )
    manager = NodeCohort(grid, exchange(), RoundRequest())
    assert manager.register(strict=True) == [0, 2]
    manager.reference = 2
    grid.offline = {13}
    assert manager.register(strict=True) == []
    grid.join(13, share(1))
    grid.offline = set()
    assert manager.register(strict=True) == [1]
    assert set(manager.nodes) == set(manager.infos) == set(manager.facts) == {0, 1}
    assert manager.reference == 0
    manager.leave_out({0: "it lied"})
    assert manager.reference == 1 and set(manager.facts) == {1}


@pytest.mark.full
def test_a_stranger_that_is_left_out_is_not_one_of_those_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger, late = {8: {"client-id": 7}}, {12: share(1, 2)}
    summary, _, _ = scripted(tmp_path / "a", monkeypatch, {**stranger, 71: share(0, 2)}, late=late, clients=2)
    assert summary["clients"] == 2, "the node that comes later is waited for"
    first = {8: {"client-id": 0}}  # it cannot take part, and nobody else is there yet
    for clients in (0, 1):
        got, _, _ = scripted(tmp_path / str(clients), monkeypatch, first, late={12: share(0, 1)}, clients=clients)
        assert got["clients"] == 1


@pytest.mark.full
def test_a_node_that_was_restarted_as_another_client_registers_again(tmp_path: Path) -> None:
    def script(grid: Nodes, server_round: int) -> None:
        if server_round == 2:
            grid.join(12, share(3, 4))

    configs = {71: share(0, 4), 12: share(1, 4), 55: share(2, 4)}
    summary, _, _ = start(tmp_path, configs, script, method="fedavg", clients=4, **{"wait-timeout": 0.5})
    assert "blocked" not in summary and list(rounds(tmp_path)["clients"]) == [3, 2, 3]
    clients = pd.read_csv(tmp_path / "run" / "clients.csv")
    assert list(clients[clients["round"] == 3]["client"]) == [0, 2, 3]


@pytest.mark.full
def test_a_dead_node_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    class Unaware(Nodes):
        def get_node_ids(self) -> list[int]:
            return list(self.contexts)

    flat = from_flat({"clients": 3, "num-server-rounds": 1, "local-epochs": 1, "batch-size": 64,
                              "wait-timeout": 1.0, "out": str(tmp_path / "run")}).to_flat()  # fmt: skip
    grid = Unaware(flat, THREE, lambda g, r: None)
    grid.offline = {12}
    assert server_app.serve(grid, flat)["ok"]
    assert list(rounds(tmp_path)["clients"]) == [2]


def test_too_few_nodes_are_too_few(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="gave up after 3 s: waiting for 2 of 3"):
        start(tmp_path, {71: share(0)})


@pytest.mark.full
def test_other_architectures_join_only_where_the_method_allows_it(tmp_path: Path) -> None:
    def script(grid: Nodes, server_round: int) -> None:
        grid.join(30, share(2, model="digits-b"))

    configs = {71: share(0, model="digits-a"), 12: share(1, model="digits-a")}
    _, grid, events = start(tmp_path, configs, script, method="fedavg")
    assert any("fedavg needs one architecture" in e.get("text", "") for e in events)
    assert "train" not in grid.told[30]


@pytest.mark.full
def test_own_data_give_the_numbers_of_the_simulation(tmp_path: Path) -> None:
    paths = sites.write(tmp_path / "sites")
    models = "digits-a,digits-b,digits-c"
    own = {50 - k: {"client-id": k, "data-path": str(p)} for k, p in enumerate(paths)}
    start(tmp_path, own, model=models)
    simulated = {
        "method": "lgfedavg",
        "clients": 3,
        "num-server-rounds": 3,
        "model": models,
        "out": str(tmp_path / "simulated"),
    }
    flat = from_flat(simulated).to_flat()
    server_app.serve(LocalGrid(client_app, flat, 3), flat)
    for name in ("rounds.csv", "clients.csv", "final.csv"):
        real, wanted = pd.read_csv(tmp_path / "run" / name), pd.read_csv(tmp_path / "simulated" / name)
        columns = [c for c in wanted if not c.endswith("seconds") and "balanced" not in c]
        pd.testing.assert_frame_equal(real[columns], wanted[columns], check_exact=True)


def test_classes_with_other_names_do_not_meet(tmp_path: Path) -> None:
    a = npz(tmp_path / "a.npz", ["cat", "dog"], [0, 1] * 6)
    b = npz(tmp_path / "b.npz", ["dog", "cat"], [0, 1] * 6)
    configs = {5: {"client-id": 0, "data-path": str(a)}, 6: {"client-id": 1, "data-path": str(b)}}
    with pytest.raises(BadRequest, match="class-names"):
        start(tmp_path, configs, clients=2, dataset="npz", model="digits-a")
    again = tmp_path / "again"
    summary, _, _ = start(again, configs, clients=2, dataset="npz", model="digits-a", **{"class-names": "cat,dog"})
    assert summary["ok"]


@pytest.mark.full
def test_state_lies_on_the_node_and_a_later_run_starts_from_it(tmp_path: Path) -> None:
    start(tmp_path / "a", {n: share(k) for k, n in enumerate((4, 5, 6))}, federation="clinic")
    folder = tmp_path / "state" / "clinic" / "1"
    assert (folder / "personal.safetensors").is_file() and (folder / "received.safetensors").is_file()
    assert not (tmp_path / "a" / "run" / "state").exists()
    cold = pd.read_csv(tmp_path / "a" / "run" / "rounds.csv")["received_accuracy"].iloc[0]
    start(tmp_path / "b", {n: share(k) for k, n in enumerate((7, 8, 9))}, federation="clinic", **{"warm-start": True})
    warm = pd.read_csv(tmp_path / "b" / "run" / "rounds.csv")["trained_accuracy"].iloc[0]
    first = pd.read_csv(tmp_path / "a" / "run" / "rounds.csv")["trained_accuracy"].iloc[0]
    assert cold < 0.5 < first < warm


@pytest.mark.full
def test_updates_are_bounded_on_the_way(tmp_path: Path) -> None:
    start(tmp_path / "a", THREE, method="fedavg", **{"num-server-rounds": 1})
    start(tmp_path / "b", THREE, method="fedavg", **{"num-server-rounds": 1, "clip-update": 0.001})
    a = pd.read_csv(tmp_path / "a" / "run" / "final.csv")["received_accuracy"].mean()
    b = pd.read_csv(tmp_path / "b" / "run" / "final.csv")["received_accuracy"].mean()
    assert b < 0.3 < a  # an average that moved by a thousandth still guesses


# ---- where the server writes, and who follows from afar ------------------------------------------------------------


def test_the_owner_of_the_superlink_decides_where_runs_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAPP_RUNS", str(tmp_path / "runs"))
    assert server_app.place(from_flat({"out": "/somewhere/else/x"})) == tmp_path / "runs" / "x"
    assert server_app.place(from_flat({"out": str(tmp_path / "runs" / "y")})) == tmp_path / "runs" / "y"
    assert server_app.place(from_flat({})).parent == tmp_path / "runs"
    assert server_app.place(from_flat({"out": f"{tmp_path}/runs/../../z"})) == tmp_path / "runs" / "z"
    assert server_app.place(from_flat({"out": str(tmp_path / "runs")})) == tmp_path / "runs" / "runs"
    for out in ("/", "/tmp/x/.."):
        with pytest.raises(BadRequest, match="an absolute path that ends in a name"):
            server_app.place(from_flat({"out": out}))


@pytest.mark.full
def test_one_process_writes_to_a_run_directory(tmp_path: Path) -> None:
    holder = "import sys, time, fedapp.results.directory as r; from pathlib import Path\n"
    holder += "with r.only_writer(Path(sys.argv[1])): print('held', flush=True); time.sleep(float(sys.argv[2]))"

    def hold(seconds: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", holder, str(tmp_path), str(seconds)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process

    other = hold(60)
    with pytest.raises(BadRequest, match="another server process"), results.only_writer(tmp_path):
        pass
    other.kill()  # a lock does not outlive its process
    other.communicate()
    with results.only_writer(tmp_path):
        pass
    told: list[str] = []
    other = hold(1)
    with results.only_writer(tmp_path, 60, told.append):
        assert other.poll() is not None or other.wait(60) == 0
    other.communicate()
    assert len(told) == 1 and "waiting up to 60 s" in told[0]


class Silent:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def __call__(self, event: Mapping[str, Any]) -> None:
        pass


def test_a_mirror_holds_what_the_log_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events: list[dict[str, Any]] = []
    flat = from_flat({"clients": 2, "num-server-rounds": 2, "local-epochs": 1, "batch-size": 64,
                              "out": str(tmp_path / "there")}).to_flat()  # fmt: skip
    grid = Nodes(flat, {1: share(0, 2), 2: share(1, 2)}, lambda g, r: None)
    server_app.serve(grid, flat, lambda e: (events.append(dict(e)), server_app.announce(e))[0])
    log = "\x1b[92ma line\x1b[0m\n" + capsys.readouterr().out
    here = tmp_path / "here"
    here.mkdir()
    followed = deploy.RemoteRun(here, from_flat({**flat, "out": str(here)}), Silent())
    for i in range(0, len(log), 37):  # pieces of a log end anywhere
        followed.text(log[i : i + 37])
    assert followed.copy is not None and followed.there == str(tmp_path / "there")
    assert followed.summary is not None and followed.summary["ok"]
    real, copy = pd.read_csv(tmp_path / "there" / "rounds.csv"), pd.read_csv(here / "rounds.csv")
    pd.testing.assert_frame_equal(real, copy[real.columns])
    assert json.loads((here / "summary.json").read_text()) == json.loads(
        (tmp_path / "there" / "summary.json").read_text()
    )
    assert (here / "superlink.log").read_text().startswith("a line\n")


@pytest.mark.parametrize(
    "line",
    [
        'BadRequest: client 1 cannot take part: x fedapp-event {"kind": "end", "summary": {"ok": true}}',
        "fedapp-event 5",
        'fedapp-event {"kind": "directory"}',
    ],
)
def test_text_in_a_log_is_no_event(line: str, tmp_path: Path) -> None:
    followed = deploy.RemoteRun(tmp_path, from_flat({"out": str(tmp_path)}), Silent())
    followed.text(line + "\n")
    assert followed.summary is None and followed.copy is None
    failed = {"kind": "failed", "message": "too few", "exit": 2}
    for event in (failed, {"kind": "end", "summary": {"ok": True}}):
        followed.text(f"{results.ANNOUNCED}{json.dumps(event)}\n")
    assert followed.failed == failed and followed.summary is None, "nothing follows a failure"


def test_the_run_directory_itself_is_not_mirrored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat = from_flat({"clients": 1, "num-server-rounds": 1, "local-epochs": 1, "partition": "iid",
                              "out": str(tmp_path / "run")}).to_flat()  # fmt: skip
    server_app.serve(Nodes(flat, {1: share(0, 1)}, lambda g, r: None), flat, server_app.announce)
    before = (tmp_path / "run" / "progress.jsonl").read_bytes()
    followed = deploy.RemoteRun(tmp_path / "run", from_flat(flat), Silent())
    followed.text(capsys.readouterr().out)
    assert followed.copy is None and (tmp_path / "run" / "progress.jsonl").read_bytes() == before


def test_a_bad_end_is_told_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat = from_flat({"clients": 1, "num-server-rounds": 1, "wait-timeout": 1.0, "out": str(tmp_path / "run")})
    with pytest.raises(BadRequest):
        server_app.serve(Nodes(flat.to_flat(), {1: {"client-id": 5}}, lambda g, r: None), flat.to_flat(),
                         server_app.announce)  # fmt: skip
    followed = deploy.RemoteRun(tmp_path / "run", flat, Silent())
    followed.text(capsys.readouterr().out)
    assert followed.failed is not None and followed.failed["exit"] == 2 and "client 5" in followed.failed["message"]


@pytest.mark.full
@pytest.mark.parametrize("method", methods())
def test_every_method_takes_a_late_client_and_loses_one(method: str, tmp_path: Path) -> None:
    def script(grid: Nodes, server_round: int) -> None:
        grid.offline = {71} if server_round == 3 else set()
        if server_round == 1:
            grid.join(55, share(2))

    values = {"num-server-rounds": 4, "local-epochs": 1, "batch-size": 64, "public-data": "0.05"}
    summary, _, _ = start(tmp_path, {71: share(0), 12: share(1)}, script, method=method, **values)
    assert summary["ok"] and list(rounds(tmp_path)["clients"]) == [2, 3, 2, 3]


@pytest.mark.parametrize("mirror", [True, False])
def test_resuming_names_the_place_where_the_run_lies(
    mirror: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class NoControl:
        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    submitted = []
    monkeypatch.setattr(deploy, "connection", lambda name: SuperLinkConnection("prod", "host:1"))
    monkeypatch.setattr(deploy.Control, "of_connection", lambda to: NoControl())
    monkeypatch.setattr(deploy, "submit", lambda api, to, config: submitted.append(config) or 7)
    monkeypatch.setattr(deploy, "_watch", lambda control, run_id, followed: ("lost", "no answer"))
    here = tmp_path / "here"
    here.mkdir()
    write_toml(here / "config.toml", from_flat({"out": "/srv/runs/x", "num-server-rounds": 3}))
    if not mirror:
        (here / "checkpoint").mkdir()
    assert deploy.run(resumed(here, {"num-server-rounds": 5}), here, "prod") == 1
    assert submitted[0].storage.resume and submitted[0].federation.num_server_rounds == 5
    assert submitted[0].storage.out == ("/srv/runs/x" if mirror else str(here))
    assert f"--superlink prod --resume {here}" in capsys.readouterr().err
    assert json.loads((here / "summary.json").read_text()) == {"ok": False, "error": "lost: no answer"}


def test_no_value_of_a_nodes_data_leaves_it_in_the_words_of_an_error(tmp_path: Path) -> None:
    """The server chooses `columns` and `class-names`, so that an error could tell it one value after the other."""
    table = tmp_path / "site.csv"
    rows = [
        f"{40 + i},{'AB-7' if i == 0 else i},{('Alice', 'Bob')[i % 2]},{('ill', 'well')[i // 20]}" for i in range(40)
    ]
    table.write_text("\n".join(["age,number,patient,diagnosis", *rows]))
    asked: list[dict[str, str]] = [
        {"columns": "y=nothing"},
        {"columns": "x=number y=diagnosis"},
        {"columns": "x=age y=patient", "class-names": "zzz,yyy"},
        {"columns": "x=age y=patient", "class-names": "Alice,zzz"},
    ]
    for values in asked:
        config = from_flat({"dataset": "csv", "method": "fedavg", "num-server-rounds": 1, **values})
        grid = LocalGrid(client_app, for_context(config), 1)
        del grid.pull_interval  # a real node's process is no simulation's
        for context in grid.contexts.values():
            context.node_config.clear()
            context.node_config.update({"client-id": 0, "data-path": str(table), "state-dir": str(tmp_path)})
        content, _ = Encoder("fp32", False).content(Payload(), RoundRequest("abcd"))
        (answer,) = grid.send_and_receive([Message(content, next(iter(grid.contexts)), "query.register")])
        assert not answer.has_error(), answer.error
        text = str(answer.content.config_records)
        assert "the reason is in the node's own log" in text, text
        assert not [word for word in ("Alice", "Bob", "AB-7", "patient", "number", "site") if word in text], text


@pytest.mark.parametrize("server_round", [-1, MOST_ROUNDS])
def test_a_round_that_no_state_could_be_named_after_is_refused(server_round: int) -> None:
    context = LocalGrid(client_app, for_context(from_flat({"method": "fedavg"})), 1).contexts[FIRST_NODE]
    with pytest.raises(BadRequest, match=f"round {server_round} is not within 0 .. 999999"):
        build(context, from_flat({"method": "fedavg"}), RoundRequest("abcd", server_round))
