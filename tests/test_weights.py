"""Stored weights of own models: read, checked by name, kept as they are where the run says so, and images resized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from fedapp.client_app import app as client_app
from fedapp.config import from_flat
from fedapp.data.transforms import InputSpec
from fedapp.engines.local import effective, run
from fedapp.errors import BadRequest
from fedapp.method import ClientInfo
from fedapp.models import build_model, own, selection, weights
from fedapp.results.loading import load
from fedapp.settings import ModelSettings
from fedapp.tasks import simulated
from fedapp.tasks.node import Node
from fedapp.transport.local_grid import LocalGrid
from fedapp.transport.request import RoundRequest
from fedapp.transport.virtual import VirtualCohort
from tests.handmade import exchange
from tests.own_nets import Net

NET = "tests.own_nets:Net"
RESNET = "torchvision.models:resnet18"
SHAPE = (1, 8, 8)
SETTINGS = {"clients": 3, "rounds": 1, "local_epochs": 1, "seed": 0, "method": "fedavg"}
Arrays = dict[str, torch.Tensor]


def stored(tmp_path: Path, change: Callable[[Arrays], Any] = lambda a: None, classes: int = 1000) -> str:
    torch.manual_seed(5)
    arrays = dict(Net(classes, SHAPE).state_dict())
    change(arrays)
    torch.save(arrays, tmp_path / "net.pt")
    return str(tmp_path / "net.pt")


def built(file: str, seed: int = 0, **options: Any) -> Any:
    options = {"weights": file, **options}
    return build_model(NET, num_classes=10, shape=SHAPE, seed=seed, settings=ModelSettings(**options))


@pytest.mark.parametrize("classes", [10, 1000])
@pytest.mark.parametrize("kind", ["pt", "safetensors", "nested"])
def test_all_but_the_head_comes_from_the_file(kind: str, classes: int, tmp_path: Path) -> None:
    file = stored(tmp_path, classes=classes)
    arrays = torch.load(file, weights_only=True)
    if kind == "safetensors":
        file = str(tmp_path / "net.safetensors")
        safetensors.torch.save_file(arrays, file)
    if kind == "nested":
        torch.save({"epoch": 3, "state_dict": arrays}, file)
    plain = build_model(NET, num_classes=10, shape=SHAPE, seed=4)
    for seed in (4, 7):
        state = built(file, seed).state_dict()
        for name in ("conv.weight", "conv.bias", "fc1.weight", "fc1.bias"):
            assert torch.equal(state[f"features.{name}"], arrays[name])
        assert torch.equal(state["head.weight"], plain.head.weight) == (seed == 4)


def test_weights_of_torchvision_fit_and_keep_their_statistics(tmp_path: Path) -> None:
    import torchvision

    theirs = torchvision.models.resnet18(weights=None)
    for buffer in theirs.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 2)
    torch.save(theirs.state_dict(), tmp_path / "r.pt")
    options = ModelSettings(weights=str(tmp_path / "r.pt"), input_size=32)
    own.check(RESNET, torch.randn(2, 3, 12, 20), num_classes=6, settings=options)
    model = build_model(RESNET, num_classes=6, shape=(3, 12, 20), seed=0, settings=options).eval()
    x = torch.randn(2, 3, 12, 20)
    theirs.fc = nn.Identity()
    wanted = theirs.eval()(nn.functional.interpolate(x, (32, 32), mode="bilinear", align_corners=False))
    assert torch.allclose(model.represent(x), wanted, atol=1e-5)


def drop(name: str) -> Callable[[Arrays], Any]:
    return lambda arrays: arrays.pop(name)


WRONG: list[tuple[Callable[[Arrays], Any], str]] = [
    (drop("conv.bias"), r"does not fit the model .*it lacks 'conv.bias'; it has no others"),
    (lambda a: a.update(more=torch.zeros(2)), "the model has no 'more'"),
    (lambda a: a.update({"conv.bias": torch.zeros(3)}), r"'conv.bias' is \(3,\) in the file and \(8,\) in the model"),
    (lambda a: a["fc1.bias"].fill_(torch.nan), "'fc1.bias' has numbers that are not finite"),
    (lambda a: a.clear(), "holds no state dict"),
    (lambda a: a.update(x=3), "holds no state dict"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_weights_that_do_not_fit_are_refused(change: Callable[[Arrays], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=message):
        built(stored(tmp_path, change))


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("evil"),))


def test_nothing_in_a_file_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for content in (Evil(), Net(10, SHAPE)):
        torch.save(content, tmp_path / "evil.pt")
        with pytest.raises(BadRequest, match=r"cannot be read .*state_dict"):
            built(str(tmp_path / "evil.pt"))
    for name, content in (("torn.pt", b"no weights"), ("torn.safetensors", b"no weights"), ("a.pt", b"\x80\x02.")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadRequest, match="cannot be read"):
            built(str(tmp_path / name))
    with pytest.raises(BadRequest, match=r"is not a file: give a \.safetensors"):
        built("DEFAULT")
    assert not (tmp_path / "evil").exists()


@pytest.mark.full
def test_layers_that_are_frozen_are_neither_trained_nor_sent(tmp_path: Path) -> None:
    file = stored(tmp_path)
    arrays = torch.load(file, weights_only=True)
    settings = {**SETTINGS, "model": NET, "weights": file}
    both = {freeze: run(**settings, freeze=freeze, out=tmp_path / f"run{freeze}") for freeze in ("", "features.conv")}
    sent = {freeze: result.summary["bytes_up"] for freeze, result in both.items()}
    assert sent[""] - sent["features.conv"] == 4 * (8 * 9 + 8)
    for client in (None, 1):
        state = load(tmp_path / "runfeatures.conv", client, allow=NET).model.state_dict()
        assert torch.equal(state["features.conv.weight"], arrays["conv.weight"])
        assert not torch.equal(state["features.fc1.weight"], arrays["fc1.weight"])
        state = load(tmp_path / "run", client, allow=NET).model.state_dict()
        assert not torch.equal(state["features.conv.weight"], arrays["conv.weight"])


def test_frozen_layers_stay_in_evaluation_mode() -> None:
    model = build_model("resnet18", num_classes=3, shape=(3, 16, 16), seed=0)
    weights.freeze("resnet18", model, "features.bn1, features.layer1")
    before = {n: a.clone() for n, a in model.state_dict().items()}
    copied = torch.nn.Module.train(__import__("copy").deepcopy(model))
    copied(torch.randn(4, 3, 16, 16))
    moved = {n for n, a in copied.state_dict().items() if not torch.equal(a, before[n])}
    assert moved and not any(n.startswith(("features.bn1.", "features.layer1.")) for n in moved)
    names = selection.shared_names(copied, ("",))
    assert "features.conv1.weight" in names and "features.layer2.0.bn1.running_mean" in names
    assert not any(n.startswith(("features.bn1.", "features.layer1.")) for n in names)
    assert "features.layer1.0.conv1.weight" in selection.everything(copied)


@pytest.mark.parametrize("freeze", ["head", "head.weight", "conv", "features.conv.weight", "features.nothing"])
def test_what_cannot_be_frozen(freeze: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"does not name a layer in the body .*such as 'features.conv'"):
        built(stored(tmp_path), freeze=freeze)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": "w.pt", "model": f"cnn,{NET}", "method": "fedclassavg"}, "weights are of one architecture"),
        ({"freeze": "features", "model": NET}, "give weights too"),
        ({"input-size": 32}, "are for own models"),
    ],
)
def test_the_configuration_is_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        from_flat({"method": "fedavg", **settings})


def test_size_and_normalisation_are_those_that_torchvision_states() -> None:
    config = from_flat({"method": "fedavg", "model": "torchvision.models:vit_b_16", "weights": "w.pt"})
    assert own.side(config.model) == 224 and own.side(config.replaced(input_size=64).model) == 64
    inputs = InputSpec((3, 8, 8), 255.0, (0.1, 0.1, 0.1), (1.0, 1.0, 1.0))
    wanted = replace(inputs, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    assert simulated.with_weights(config, inputs) == wanted
    assert simulated.with_weights(config.replaced(weights=""), inputs) == inputs
    assert simulated.with_weights(config.replaced(normalise="data"), inputs) == inputs
    assert simulated.with_weights(config.replaced(model=NET), inputs) == inputs
    assert own.side(config.replaced(model=NET).model) == 0 == own.side(config.replaced(weights="").model)


def test_images_get_the_size_that_the_model_wants() -> None:
    options = ModelSettings(input_size=16)
    x = torch.randn(2, 1, 8, 8)
    own.check(NET, x, num_classes=10, settings=options)
    model = build_model(NET, num_classes=10, shape=SHAPE, seed=0, settings=options)
    assert model.features.fc1.in_features == 8 * 16 * 16 and model(x).shape == (2, 10)  # type: ignore[union-attr]
    assert own.resized(x, 0) is x and own.resized(x, 8) is x
    with pytest.raises(BadRequest, match="input-size is for images"):
        build_model(NET, num_classes=10, shape=(5,), seed=0, settings=options)


def test_the_dry_run_refuses_weights_that_do_not_fit(tmp_path: Path) -> None:
    file = stored(tmp_path, drop("conv.bias"))
    config = effective({"model": NET, "method": "fedavg", "clients": 3, "weights": file})
    with pytest.raises(BadRequest, match=r"it lacks .conv\.bias."):
        simulated.check(config, 3)


def test_a_node_takes_weights_from_its_own_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a node takes no code from its working folder
    (tmp_path / "mine").mkdir()
    file = stored(tmp_path / "mine")
    np.savez(tmp_path / "d.npz", x=np.zeros((40, 8, 8), np.uint8), y=np.arange(40) % 10)
    node = {"client-id": 0, "data-path": str(tmp_path / "d.npz"), "allow": NET}
    config = from_flat(
        {"method": "fedavg", "model": NET, "weights": "/etc/secret/net.pt", "freeze": "features.conv", "dataset": "npz"}
    )
    with pytest.raises(BadRequest, match=r"put net\.pt into a folder .*weights-dir"):
        Node.parse(node).check(config)
    mine = Node.parse({**node, "weights-dir": str(tmp_path / "mine")})
    mine.check(config)
    from fedapp.tasks.node import node_task

    task = node_task(config, mine, torch.device("cpu"))
    assert task.settings.weights == file
    method, hparams = config.method_and_hparams()
    common = method.client(task, method, hparams).register()[1]["common"]
    assert weights.checksum(file) in str(common)
    chosen = node_task(config, Node.parse({**node, "model": "digits-a"}), torch.device("cpu"))
    assert chosen.settings.weights == "" and chosen.model == "digits-a"


def test_stored_weights_are_compared_among_the_clients_of_one_model() -> None:
    method = from_flat({"method": "fedclassavg"}).method_and_hparams()[0]

    def clash(*clients: tuple[str, str]) -> str:
        grid = LocalGrid(client_app, from_flat({"method": "local"}).to_flat(), len(clients))
        manager = VirtualCohort(grid, exchange(), RoundRequest())
        for number, (model, stored) in enumerate(clients):
            manager.infos[number] = ClientInfo(number, 9, model, 4, {}, {"weights": stored} if stored else {})
            manager.facts[number] = {"shape": "[1, 8, 8]", "width": 5}
        manager._asked = range(len(clients))
        try:
            manager.agree(method)
        except BadRequest as e:
            return str(e)
        return ""

    assert clash((NET, "aa"), ("digits-a", ""), (NET, "aa")) == ""
    assert clash(("digits-a", ""), (NET, "aa"), (NET, "aa")) == ""
    assert "the weights of client 2 (bb) differs from that of client 1 (aa)" in clash(
        ("digits-a", ""), (NET, "aa"), (NET, "bb")
    )
    assert "client 1" in clash((NET, "aa"), (NET, ""))
