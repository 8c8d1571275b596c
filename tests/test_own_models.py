"""Own models, `package.module:function`: cut into trunk and head, tried before round 1, and run by every method."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from torch import nn

from fedapp import client_app, plugins, process, registry
from fedapp.config import from_flat
from fedapp.engines.local import effective, run
from fedapp.engines.runner import what_leaves
from fedapp.errors import BadRequest
from fedapp.experiments import compare
from fedapp.federation.server_model import buildable, known_model
from fedapp.learning.task import ModelSpec
from fedapp.method import ClientInfo
from fedapp.models import SplitModel, build_model, head_width, own, selection
from fedapp.results import predict
from fedapp.results.loading import load
from fedapp.settings import ModelSettings
from fedapp.tasks import simulated as tasks
from fedapp.tasks.node import Node, try_own
from fedapp.transport.local_grid import _identify
from fedapp.transport.records import Records, reply_records
from tests import own_nets
from tests.handmade import digit_tasks
from tests.matrix import methods
from tests.readme import READS

NETS = "tests.own_nets"
ROOT = Path(__file__).parents[1]
SHAPE = (1, 8, 8)
NONE = ModelSettings()


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))


def built(name: str, seed: int = 0, shape: tuple[int, ...] = SHAPE, **options: Any) -> SplitModel:
    return build_model(f"{NETS}:{name}", num_classes=10, shape=shape, seed=seed, settings=ModelSettings(**options))


# ---- trunk and head ------------------------------------------------------------------------------------------------


def test_the_last_fitting_linear_is_the_head_and_keeps_its_names() -> None:
    model = built("Net")
    assert list(model.state_dict()) == [
        "features.conv.weight", "features.conv.bias", "features.fc1.weight", "features.fc1.bias", "head.weight",
        "head.bias",
    ]  # fmt: skip
    assert (model.width, model.num_classes, model.name) == (64, 10, f"{NETS}:Net")
    x = rows(*SHAPE)
    assert torch.equal(model(x), model.head(model.features(x))) and model(x).shape == (2, 10)


def test_images_come_channel_by_channel_so_that_view_works() -> None:
    model, x = built("Net", shape=(3, 8, 8)), rows(3, 8, 8)
    assert torch.equal(model(x.contiguous(memory_format=torch.channels_last)), model(x))


def test_an_own_model_has_the_initial_values_of_the_same_one_in_the_zoo() -> None:
    ours, zoo = built("digits_a", seed=5), build_model("digits-a", num_classes=10, shape=SHAPE, seed=5)
    theirs = zoo.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.state_dict().items())
    # Some processors' convolutions depend on where the weights lie in memory, in their last bits.
    torch.testing.assert_close(ours(rows(*SHAPE)), zoo(rows(*SHAPE)), rtol=1e-6, atol=1e-7)
    assert not torch.equal(built("digits_a", seed=6).head.weight, ours.head.weight)


def test_equal_widths_start_with_equal_heads() -> None:
    zoo = build_model("digits-b", num_classes=10, shape=SHAPE, seed=3)
    for model in (built("Net", seed=3), built("Wide", seed=3, width=64)):
        assert torch.equal(model.head.weight, zoo.head.weight) and torch.equal(model.head.bias, zoo.head.bias)


def test_the_global_random_state_stays() -> None:
    before = torch.get_rng_state()
    built("Net", seed=4)
    own.check(f"{NETS}:Net", rows(*SHAPE), num_classes=10, settings=NONE)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_layer_of_the_wanted_width_takes_the_place_of_the_head() -> None:
    model = built("Wide", width=12)
    assert model.features.get_submodule("fc2").weight.shape == (12, 80)  # type: ignore[union-attr]
    assert model.width == head_width(f"{NETS}:Wide", 10, SHAPE, ModelSettings(width=12)) == 12


def test_a_head_without_bias_gets_zeros() -> None:
    model = built("linear", shape=(5,), seed=2)
    assert isinstance(model.features, nn.Identity) and not model.head.bias.any() and model.head.weight.any()
    own.check(f"{NETS}:linear", rows(5), num_classes=10, settings=NONE)


def test_a_split_model_is_taken_as_it_is() -> None:
    model = built("split")
    assert isinstance(model.activation, nn.ReLU) and model.width == 16
    own.check(f"{NETS}:split", rows(*SHAPE), num_classes=10, settings=NONE)
    with pytest.raises(BadRequest, match="leave out head and width"):
        built("split", width=8)


@pytest.mark.parametrize("args", ["features=32", "features=10"])
def test_arguments_and_the_named_head(args: str) -> None:
    model = built("Net", model_args=args, head="fc2")
    assert model.width == int(args.partition("=")[2])
    assert built("Net", model_args=args).width == model.width  # without a name: the last that fits
    own.check(f"{NETS}:Net", rows(*SHAPE), num_classes=10, settings=ModelSettings(model_args=args, head="fc2"))


def test_the_kind_follows_the_shape() -> None:
    model = built("Series", shape=(3, 40))
    own.check(f"{NETS}:Series", rows(3, 40), num_classes=10, settings=NONE)
    assert model(rows(3, 40)).shape == (2, 10)


@pytest.mark.parametrize(
    "name",
    ["resnet18", *(pytest.param(n, marks=pytest.mark.full) for n in ("mobilenet_v3_small", "densenet121", "alexnet"))],
)
def test_torchvision_works_as_it_stands(name: str) -> None:
    x = rows(3, 64, 64)
    own.check(f"torchvision.models:{name}", x, num_classes=6, settings=NONE)
    model = build_model(f"torchvision.models:{name}", num_classes=6, shape=(3, 64, 64), seed=0).eval()
    assert model(x).shape == (2, 6) and model.features(x).shape == (2, model.width)


# ---- what is refused -----------------------------------------------------------------------------------------------

WRONG: list[tuple[str, str]] = [
    ("seven", r"returns \(2, 7\), the data have 10 classes: pass num_classes on"),
    ("headless", "no Linear with 10 outputs: end it with nn.Linear"),
    ("Softmax", "something follows the head .*return logits"),
    ("Tuple", "cannot be trained .*also in training mode"),
    ("Noise", "something else for the same rows in evaluation mode"),
    ("Nan", "not finite"),
    ("Reads", "does not run without its head"),
    ("Random", "other initial values at each call"),
    ("nothing", "returns NoneType: return an nn.Module"),
    ("text", "is not a function or class, but str"),
    ("Nett", "cannot be imported .*PYTHONPATH"),
    ("Series", r"cannot be built: AssertionError.* \(.*own_nets\.py, line [0-9]+, in "),
    ("OldNorm", "cannot be copied.*take weight_norm from torch.nn.utils.parametrizations"),
    ("Locked", "cannot be copied.*cannot pickle '_thread.lock' object"),
    ("leaves", "cannot be built: SystemExit: 3"),
    ("Keeps", "cannot be trained .*: make tensors that it keeps from one forward to the next in __init__, as buffers"),
    ("Gain", "'gain' is outside features and head: put it into features"),
    ("trained_activation", "'activation.weight' is outside features and head"),
    ("cosine_head", "has a head of type ParametrizedLinear: make it a plain nn.Linear"),
    ("tied_split", "head and body share an array"),
    ("Tied", "head and body share an array"),
    ("Squeezed", "returns .10,., .* for 1 row$"),
]


@pytest.mark.parametrize(("name", "message"), WRONG)
def test_a_wrong_model_is_refused_before_anything_is_trained(name: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        own.check(f"{NETS}:{name}", rows(*SHAPE), num_classes=10, settings=NONE)


@pytest.mark.parametrize("method", ["feddbe", "fedetf", "fednh", "fedrod"])
def test_methods_that_change_a_split_model_refuse_one_with_functions_of_its_own(method: str) -> None:
    kind, hparams = registry.configured(method, "")
    kind.client.build_model(ModelSpec(f"{NETS}:split", 10, SHAPE, 0, NONE), hparams)
    with pytest.raises(BadRequest, match="is a Split, and this method changes"):
        kind.client.build_model(ModelSpec(f"{NETS}:Split", 10, SHAPE, 0, NONE), hparams)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ModelSettings(model_args="feature=3"), "cannot be built: TypeError.*it takes .*features"),
        (ModelSettings(model_args="num_classes=3"), "num_classes comes from the data"),
        (ModelSettings(model_args="features"), "'features' is not name=value"),
        (ModelSettings(head="fc1"), "'fc1' is not a Linear with 10 outputs: set head to one of: fc2"),
        (ModelSettings(head="fc9"), "'fc9' is not a Linear layer of it: set head to one of: fc2"),
    ],
)
def test_wrong_options_are_refused(options: ModelSettings, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        own.check_form(f"{NETS}:Net", options)
        own.check(f"{NETS}:Net", rows(*SHAPE), num_classes=10, settings=options)


def test_random_tensors_are_stored() -> None:
    name, x = f"{NETS}:Masked", rows(*SHAPE)
    own.check(name, x, num_classes=10, settings=NONE)
    for persistent, what in (("false", "buffer 'features.mask'"), ("none", "a tensor")):
        with pytest.raises(BadRequest, match=f"{what} depends on the seed and is not stored: .*persistent=True"):
            own.check(name, x, num_classes=10, settings=ModelSettings(model_args=f"persistent={persistent}"))
    own.check(f"{NETS}:Mask", x, num_classes=10, settings=ModelSettings(model_args="persistent=false"))


def test_a_model_for_other_data_is_refused_with_the_shape() -> None:
    with pytest.raises(BadRequest, match="fails on images of 8x8 pixels with 1 channel: RuntimeError"):
        own.check("torchvision.models:resnet18", rows(*SHAPE), num_classes=10, settings=NONE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "my net:Net"}, "not of the form package.module:function"),
        ({"model": "os:path.join"}, "not of the form package.module:function"),
        ({"model": "cnn-a", "width": 8}, "are for own models"),
        ({"model": f"{NETS}:Net,{NETS}:Wide", "method": "fedavg"}, "needs one architecture"),
    ],
)
def test_the_configuration_is_checked_without_an_import(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        from_flat(settings)


def test_a_wrong_model_is_refused_by_the_dry_run() -> None:
    config = effective({"model": f"{NETS}:Softmax", "method": "fedavg", "clients": 3})
    with pytest.raises(BadRequest, match="something follows the head"):
        tasks.check(config, 3)


@pytest.mark.parametrize(
    ("net", "message"),
    [
        ("Complex", "'features.phase' .* is complex64, .* as two parameters"),
        ("Mask", "'features.mask' .* not finite, and fedavg sends it: .* persistent=False"),
    ],
)
def test_arrays_that_cannot_be_sent_are_refused_where_they_would_be(net: str, message: str) -> None:
    for method, args in (("fedavg", ""), ("lgfedavg", ""), ("fedavg", "persistent=false")):
        config = effective({"model": f"{NETS}:{net}", "method": method, "clients": 3, "model-args": args})
        if (method, args) == ("fedavg", ""):
            with pytest.raises(BadRequest, match=message):
                what_leaves(config)
        elif net == "Mask" or not args:
            assert what_leaves(config)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_a_model_with_other_dtypes_trains_and_resumes(dtype: str, tmp_path: Path) -> None:
    """Arrays of a model travel as float32 whatever dtype they have, and no honest client is blocked for that."""
    given = {"method": "lgfedavg", "model": f"{NETS}:Half", "model_args": f"dtype={dtype}", "clients": 2}
    for method in ("fedavg", "lgfedavg"):  # the one sends these arrays, the other keeps them in the clients' states
        result = run(**{**given, "method": method}, rounds=1, local_epochs=1, out=tmp_path / method)
        result = run(resume=tmp_path / method, rounds=2)
        assert list(result.rounds["round"]) == [1, 2] and result.summary["dropped"] == 0
    net = built("Half", model_args=f"dtype={dtype}")
    state = {name: value.dtype for name, value in net.state_dict().items()}
    assert state["features.kept"] == state["features.scale"] == getattr(torch, dtype)
    sent = selection.extract(net, state)
    assert {a.dtype for a in sent.values()} == {np.dtype(np.float32)}
    other = built("Half", seed=1, model_args=f"dtype={dtype}")
    selection.merge(other, sent)
    assert all(torch.equal(a, other.state_dict()[n]) for n, a in net.state_dict().items() if "kept" not in n)
    exact = selection.everything(net)
    selection.merge(other, exact)
    assert all(torch.equal(a, other.state_dict()[n]) for n, a in net.state_dict().items())


def test_lazy_layers_take_their_size_from_the_shape_of_the_samples() -> None:
    own.check(f"{NETS}:lazy", rows(*SHAPE), num_classes=10, settings=NONE)
    net = built("lazy")
    assert net.training and net.width == 12 and net.eval()(rows(*SHAPE)).shape == (2, 10)
    assert torch.equal(net.features[2].running_mean, torch.zeros(144)), "the first batch leaves statistics as they are"


def test_lazy_layers_see_rows_that_are_not_constant() -> None:
    own.check(f"{NETS}:LazyDeviation", rows(*SHAPE), num_classes=10, settings=NONE)


def test_compare_counts_the_width_of_own_models() -> None:
    config = effective({"model": f"digits-a,{NETS}:Wide", "method": "fedclassavg", "clients": 3})
    with pytest.raises(BadRequest, match=r"widths \[64, 80\]"):
        compare._check_widths(config)
    compare._check_widths(config.replaced(model=f"digits-a,{NETS}:Net"))


# ---- whose code is imported ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allow", "taken"),
    [
        ("", False),
        ("a.b:f", True),
        ("c:g, a.b:f", True),
        ("a.*", True),
        ("a.b.*", True),
        ("a.b:g", False),
        ("a.b.c.*", False),
        ("b.*", False),
        ("a.b:f.*", False),
        (".*", False),
        ("*", False),
    ],
)
def test_what_allow_names(allow: str, taken: bool) -> None:
    assert plugins.allowed("a.b:f", allow) == taken
    assert not plugins.allowed("ab.b:f", allow)


def test_the_server_builds_no_model_that_only_a_node_names() -> None:
    config = from_flat({"model": f"digits-a,{NETS}:Net"})
    infos = [ClientInfo(i, 9, name, 10, {}) for i, name in enumerate(("os:system", f"{NETS}:Net", "digits-a"))]
    assert buildable(infos, config) == infos[1:]
    assert buildable([infos[0], infos[2]], config) == infos[2:]
    with pytest.raises(BadRequest, match=r"os:system.* that this run does not name"):
        buildable(infos[:1], config)


TORCHVISION = "torchvision.models:resnet18"


@pytest.mark.parametrize("kind", [{"client-id": 0, "data-path": "/data"}, {"partition-id": 0, "num-partitions": 2}])
def test_a_node_imports_no_code_that_a_server_names(
    kind: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    imported: list[str] = []
    monkeypatch.setattr(plugins.importlib, "import_module", imported.append)
    config = from_flat({"model": f"digits-a,{TORCHVISION}", "method": "fedclassavg"})
    Node.parse(kind).check(config)  # this node gets digits-a
    config = from_flat({"model": TORCHVISION, "method": "fedavg"})
    for allow in ({}, {"allow": "torchvision.models:resnet50, mypkg.*"}):
        with pytest.raises(BadRequest, match=f"model '{TORCHVISION}' .*its owner can allow it in the node-config"):
            Node.parse({**kind, **allow}).check(config)
    for allow in ("mypkg.*, torchvision.models:resnet18", "torchvision.*"):
        Node.parse({**kind, "allow": allow}).check(config)
    Node.parse({**kind, "model": "digits-a"}).check(config)  # the node has chosen another
    assert not imported


def test_allowed_code_does_not_come_from_the_working_or_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dropped.py").write_text("def net(): ...")
    (tmp_path / "work" / "pack").mkdir(parents=True)
    (tmp_path / "work" / "pack" / "__init__.py").write_text("def net(): ...")
    monkeypatch.syspath_prepend(str(tmp_path / "data"))
    monkeypatch.syspath_prepend(str(tmp_path / "work"))
    monkeypatch.chdir(tmp_path / "work")
    node = Node.parse({"client-id": 0, "data-path": str(tmp_path / "data"), "allow": "dropped.*, pack.*, lost.*"})
    for name, message in (("dropped", "data folder"), ("pack", "working or the data"), ("lost", "no package 'lost'")):
        with pytest.raises(BadRequest, match=message):
            node.check(from_flat({"model": f"{name}:net", "method": "fedavg"}))
    monkeypatch.chdir(tmp_path)
    Node.parse({"client-id": 0, "data-path": "/d", "allow": "pack.*"}).check(
        from_flat({"model": "pack:net", "method": "fedavg"})
    )


def test_a_module_that_ends_the_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").write_text("import argparse\nargparse.ArgumentParser().parse_args(['--odd'])\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BadRequest, match=r"cannot be imported \(SystemExit: 2"):
        own.factory("script:net")


def test_only_what_is_allowed_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    with plugins.only(""), pytest.raises(BadRequest, match="not imported here"):
        own.factory("colorsys:rgb_to_hls")
    with plugins.only("colorsys:rgb_to_hls"), pytest.raises(BadRequest, match="not imported here"):
        own.factory(f"{NETS}:Net")
    monkeypatch.setattr(own_nets, "system", os.system, raising=False)
    with plugins.only("tests.*"):
        assert own.factory(f"{NETS}:Net") is own_nets.Net
        with pytest.raises(BadRequest, match=r"which 'tests\.\*' does not stand for"):
            own.factory(f"{NETS}:system")
    with plugins.only(f"tests.*, {NETS}:system"):
        assert own.factory(f"{NETS}:system") is os.system
    assert own.factory(f"{NETS}:system") is os.system


def test_every_message_of_a_node_is_handled_without_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool] | None] = []

    def replied(*_: object) -> Records:
        seen.append(plugins._permitted)
        return reply_records({}, {}, {}, "fp32")

    _identify(1)
    monkeypatch.setattr(client_app, "_reply", replied)
    for node, simulated in (
        ({"client-id": 0, "data-path": "/d", "allow": "pack.*"}, True),
        ({"client-id": 0, "data-path": "/d", "model": "pack:net"}, True),
        ({"partition-id": 0, "num-partitions": 2}, False),
        ({"partition-id": 0, "num-partitions": 2}, True),
    ):
        with process.simulation(simulated):
            client_app.app(Message(RecordDict(), 1, "train"), Context(1, 1, node, RecordDict(), {}))
    assert [p and p[0] for p in seen] == ["pack.*, ", ", pack:net", ", ", None] and plugins._permitted is None


def test_a_name_from_a_node_does_not_get_into_the_runs_configuration() -> None:
    """With model = auto the clients say which model it is; one that names code is not believed."""
    config = from_flat({"dataset": "npz", "data-dir": "x", "method": "fedavg"})
    assert config.model.model == "auto"
    for theirs, known in (("os:system", "auto"), ("mlp", "mlp"), ("mpl", "auto")):
        assert known_model(config, [ClientInfo(0, 9, theirs, 10, {})]) == known


def test_a_node_may_choose_an_own_model_and_tries_it(tmp_path: Path) -> None:
    assert Node.parse({"client-id": 0, "data-path": "/d", "model": f"{NETS}:Net"}).model == f"{NETS}:Net"
    with pytest.raises(BadRequest, match=r"package\.module:function"):
        Node.parse({"client-id": 0, "data-path": "/d", "model": "a b:c"})
    (task,) = digit_tasks(1)
    try_own(replace(task, model=f"{NETS}:Net"))
    with pytest.raises(BadRequest, match="something follows the head"):
        try_own(replace(task, model=f"{NETS}:Softmax"))


# ---- runs ----------------------------------------------------------------------------------------------------------

SETTINGS = {"clients": 3, "rounds": 1, "local_epochs": 1, "seed": 0}


@pytest.mark.full
@pytest.mark.parametrize("method", methods())
def test_every_method_runs_with_an_own_model(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apart, inside = [], False
    forward = SplitModel.forward

    def through(model: SplitModel, x: torch.Tensor) -> torch.Tensor:
        nonlocal inside
        inside = True
        try:
            return forward(model, x)
        finally:
            inside = False

    def looked_at(name: str) -> Any:
        original = getattr(SplitModel, name)

        def half(model: SplitModel, x: torch.Tensor) -> torch.Tensor:
            if not inside:
                apart.append(name)
            return original(model, x)

        return half

    monkeypatch.setattr(own, "check", lambda *_, **__: None)  # it tries the halves too
    monkeypatch.setattr(SplitModel, "forward", through)
    for name in ("represent", "classify"):  # the halves of forward
        monkeypatch.setattr(SplitModel, name, looked_at(name))
    result = run(method=method, model=f"{NETS}:Net", out=tmp_path / "run", **SETTINGS)
    assert np.isfinite(result.rounds.train_loss).all() and result.summary["headline"]["value"] > 0.2
    assert bool(apart) == (method in READS), "READS in tests/readme.py, for the table of docs/own-models.md"


@pytest.mark.parametrize("method", ["fml", "fedkd"])
def test_the_small_model_of_two_methods_may_be_an_own_one(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a node takes no code from its working folder
    args = f"small={NETS}:split"
    result = run(method=method, method_args=args, out=tmp_path / "run", **SETTINGS)
    assert result.summary["bytes_up"] <= 4 * (64 * 16 + 16 + 16 * 10 + 10)
    config = from_flat({"method": method, "method-args": args})
    with pytest.raises(BadRequest, match=f"model '{NETS}:split' .*its owner can allow it"):
        Node.parse({"client-id": 0, "data-path": "/d"}).check(config)
    Node.parse({"client-id": 0, "data-path": "/d", "allow": "tests.*"}).check(config)
    with pytest.raises(BadRequest, match="something follows the head"):
        tasks.check(effective({"method": method, "method-args": f"small={NETS}:Softmax", "clients": 3}), 3)
    with pytest.raises(BadRequest, match=r"package\.module:function"):
        from_flat({"method": method, "method-args": "small=os:path.join"})


def test_own_models_and_the_zoo_share_a_head(tmp_path: Path) -> None:
    names = f"digits-a,{NETS}:Net,{NETS}:Wide"
    result = run(method="fedclassavg", model=names, width=64, out=tmp_path / "run", **SETTINGS)
    assert result.summary["bytes_up"] == 4 * (64 * 10 + 10)


def test_predict_imports_no_code_that_a_file_names(tmp_path: Path) -> None:
    run(method="fedavg", model=f"{NETS}:Wide", width=7, out=tmp_path / "run", **SETTINGS)
    path = tmp_path / "run" / "models" / "last.safetensors"
    with pytest.raises(BadRequest, match="--allow"):
        predict.read_model(path)
    assert predict.read_model(path, "digits", allow=f"{NETS}:*, {NETS}.*").model.width == 7
    for client in (None, 1):
        with pytest.raises(BadRequest, match="allow it with"):
            load(tmp_path / "run", client)
        assert load(tmp_path / "run", client, allow=f"{NETS}:Wide").model.width == 7


NEAR = """
from torch import nn

class Small(nn.Sequential):
    def __init__(self, num_classes, input_shape):
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, num_classes))
"""


@pytest.mark.full
def test_a_file_beside_the_configuration_is_found_after_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nearnets.py").write_text(NEAR)
    (tmp_path / "torch.py").write_text("raise ImportError")
    (tmp_path / "my.toml").write_text(
        'method = "fedavg"\nmodel = "nearnets:Small"\nclients = 2\nnum-server-rounds = 1\nlocal-epochs = 1\n'
    )
    env = {**os.environ, "PYTHONPATH": ""}
    words = ["-m", "fedapp.cli", "run", str(tmp_path / "my.toml"), "--engine", "local", "--out", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, *words], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    versions = json.loads((tmp_path / "run" / "versions.json").read_text())
    assert versions["code of nearnets"] == hashlib.sha256(NEAR.encode()).hexdigest()


@pytest.mark.full
def test_without_a_configuration_the_current_folder_is_beside(tmp_path: Path) -> None:
    (tmp_path / "nearnets.py").write_text(NEAR)
    (tmp_path / "torch.py").write_text("raise ImportError")
    env = {**os.environ, "PYTHONPATH": ""}
    words = ["run", "--set", "model=nearnets:Small", "--clients", "2", "--engine", "local", "--dry-run"]
    code = "from fedapp import cli; cli.main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *words],
        env=env, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "nearnets:Small: " in done.stdout, done.stderr


def test_the_file_of_a_module_is_found_without_an_import() -> None:
    assert plugins.code_file(f"{NETS}:Net") == Path(own_nets.__file__) and plugins.code_file("torch.nn:Linear")
    assert plugins.code_file("nowhere.at.all:x") is None and plugins.code_file("fedapp.nothing:x") is None
