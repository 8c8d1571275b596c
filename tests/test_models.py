"""The zoo: parameter counts and layer tables of the papers, the cut into trunk and head, and clear refusals."""

from __future__ import annotations

import copy
import math
import pickle
import random
import re

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedapp.errors import BadRequest
from fedapp.models import MODEL_NAMES, SplitModel, build_model, check_model, default_model, default_small, head_width

DIGITS = ("digits-a", "digits-b", "digits-c")
LIGHT = ("cnn-a", "cnn-b", "cnn-c", "cnn-d")
FEDGH = tuple(f"fedgh-{i}" for i in range(1, 6))
BATCH_NORM = ("resnet18", "shufflenetv2", "googlenet", "mobilenetv2")
RESNETS = ("fedgh-resnet", "fedproto-d", "fedproto-e")
PLAIN = ("mobilenetv2-plain", "resnet18-plain")
"""As published: no linear layer between the last means and the head."""
OTHER = ("cnn1d", "mlp", "adapter", "identity")
"""Trunks of data that are no images."""
IMAGES = tuple(name for name in MODEL_NAMES if name not in OTHER)
ALL_SIZES = tuple(name for name in IMAGES if name not in DIGITS)
SMALL = ("cnn", *LIGHT, "fedgh-5", "moon", *DIGITS)


def native_size(name: str) -> int:
    return 8 if name in DIGITS else 32


def build(name: str, channels: int = 3, size: int | None = None, num_classes: int = 10, seed: int = 0) -> SplitModel:
    side = native_size(name) if size is None else size
    return build_model(name, num_classes=num_classes, shape=(channels, side, side), seed=seed)


def images(batch: int, channels: int, size: int, seed: int = 0) -> Tensor:
    x = torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(seed))
    return x.contiguous(memory_format=torch.channels_last)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def stage_counts(model: SplitModel) -> dict[str, int]:
    """Parameters of every stage that has some, in forward order, then the head's."""
    counts = {name: count(stage) for name, stage in model.features.named_children() if count(stage)}
    return {**counts, "head": count(model.head)}


def stage_shapes(model: SplitModel, x: Tensor) -> dict[str, tuple[int, ...]]:
    """Shape after every stage, without the batch."""
    shapes = {}
    model.eval()
    with torch.inference_mode():
        for name, stage in model.features.named_children():
            x = stage(x)
            shapes[name] = tuple(x.shape[1:])
    return shapes


def test_the_zoo_holds_the_documented_names() -> None:
    assert set(MODEL_NAMES) == {
        *("cnn", "cnn-a", "cnn-b", "cnn-c", "cnn-d", "moon", "mobilenetv2"),
        *("fedgh-1", "fedgh-2", "fedgh-3", "fedgh-4", "fedgh-5", "fedgh-resnet"),
        *("fedproto-a", "fedproto-b", "fedproto-c", "fedproto-d", "fedproto-e"),
        *("resnet18", "shufflenetv2", "googlenet", "alexnet", "digits-a", "digits-b", "digits-c"),
        *PLAIN,
        *OTHER,
    }
    assert len(set(MODEL_NAMES)) == len(MODEL_NAMES)


# --- parameter counts and layer tables of the papers -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("channels", "size", "num_classes", "conv1", "fc1", "head", "total"),
    [
        (1, 28, 10, 832, 524_800, 5_130, 582_026),
        (3, 32, 10, 2_432, 819_712, 5_130, 878_538),
        (3, 32, 100, 2_432, 819_712, 51_300, 924_708),
        (3, 64, 200, 2_432, 5_538_304, 102_600, 5_694_600),
    ],
)
def test_cnn_counts(channels: int, size: int, num_classes: int, conv1: int, fc1: int, head: int, total: int) -> None:
    model = build("cnn", channels, size, num_classes)
    assert stage_counts(model) == {"conv1": conv1, "conv2": 51_264, "fc1": fc1, "head": head}
    assert count(model) == total


@pytest.mark.parametrize(("size", "side1", "side2"), [(28, 12, 4), (32, 14, 5), (64, 30, 13)])
def test_cnn_layer_table(size: int, side1: int, side2: int) -> None:
    shapes = stage_shapes(build("cnn", 3, size), images(2, 3, size))
    assert shapes["relu1"] == (32, side1, side1)
    assert shapes["relu2"] == (64, side2, side2)
    assert shapes["flatten"] == (64 * side2 * side2,)
    assert shapes["fc1"] == (512,)


@pytest.mark.parametrize(
    ("name", "conv2", "fc1", "fc2", "total10", "total100", "trunk"),
    [
        ("fedgh-1", 12_832, 1_602_000, 1_000_500, 2_621_558, 2_666_648, 2_616_548),
        ("fedgh-2", 6_416, 802_000, 1_000_500, 1_815_142, 1_860_232, 1_810_132),
        ("fedgh-3", 12_832, 801_000, 500_500, 1_320_558, 1_365_648, 1_315_548),
        ("fedgh-4", 12_832, 640_800, 400_500, 1_060_358, 1_105_448, 1_055_348),
        ("fedgh-5", 12_832, 400_500, 250_500, 670_058, 715_148, 665_048),
    ],
)
def test_fedgh_counts(name: str, conv2: int, fc1: int, fc2: int, total10: int, total100: int, trunk: int) -> None:
    model = build(name)
    assert stage_counts(model) == {"conv1": 1_216, "conv2": conv2, "fc1": fc1, "fc2": fc2, "head": 5_010}
    assert count(model) == total10
    assert count(model.features) == trunk
    assert count(build(name, num_classes=100)) == total100


@pytest.mark.parametrize(
    ("name", "mebibytes"),
    [("fedgh-1", 10.00), ("fedgh-2", 6.92), ("fedgh-3", 5.04), ("fedgh-4", 4.04), ("fedgh-5", 2.56)],
)
def test_fedgh_sizes(name: str, mebibytes: float) -> None:
    assert round(4 * count(build(name)) / 2**20, 2) == mebibytes


def test_fedgh_resnet_counts_and_maps() -> None:
    """ResNet-18 for small images, with the 500 numbers that FedGH's header takes."""
    model = build("fedgh-resnet", num_classes=100)
    assert count(model) == 11_475_432 and count(model.head) == 50_100
    assert stage_counts(model)["fc1"] == 256_500 and head_width("fedgh-resnet") == 500
    shapes = stage_shapes(model, images(2, 3, 32))
    assert shapes["conv1"] == (64, 32, 32) and shapes["layer4"] == (512, 4, 4)


@pytest.mark.parametrize(
    ("name", "ten", "letters"),
    [("fedproto-a", 19_738, 20_554), ("fedproto-b", 21_840, 22_656), ("fedproto-c", 23_942, 24_758)],
)
def test_fedproto_cnn_counts(name: str, ten: int, letters: int) -> None:
    assert count(build(name, 1, 28, 10)) == ten and count(build(name, 1, 28, 26)) == letters
    assert head_width(name) == 50


def test_fedproto_cnn_drops_channels_and_values() -> None:
    model = build("fedproto-c", 1, 28).train()
    torch.manual_seed(0)
    maps = model.features[:5](images(8, 1, 28))  # after the channel dropout
    dead = (maps == 0).flatten(2).all(dim=2)
    assert 0.3 < dead.float().mean() < 0.7 and not (maps[~dead] == 0).any()
    rows = model.features(images(8, 1, 28))
    assert 0.3 < (rows == 0).float().mean() < 0.7


@pytest.mark.parametrize(("name", "stem", "pooled"), [("fedproto-d", 32, 8), ("fedproto-e", 16, 8)])
def test_fedproto_resnet_strides(name: str, stem: int, pooled: int) -> None:
    """The prototype is the last stage's output itself: no linear layer stands before the head."""
    model = build(name)
    assert count(model) == 11_181_642
    shapes = stage_shapes(model, images(2, 3, 32))
    assert shapes["conv1"] == (64, stem, stem) and shapes["maxpool"] == (64, pooled, pooled)
    assert shapes["layer4"] == (512, 1, 1) and shapes["flatten"] == (512,)


def test_moon_counts_and_layer_table() -> None:
    model = build("moon")
    assert stage_counts(model) == {
        "conv1": 456,
        "conv2": 2_416,
        "fc1": 48_120,
        "fc2": 10_164,
        "proj1": 7_140,
        "proj2": 21_760,
        "head": 2_570,
    }
    assert count(model) == 92_626
    shapes = stage_shapes(model, images(2, 3, 32))
    assert shapes["relu1"] == (6, 14, 14)
    assert shapes["flatten"] == (400,)
    assert shapes["proj2"] == (256,)
    assert isinstance(model.activation, nn.Identity)


@pytest.mark.parametrize(
    ("name", "fc", "conv_colour", "conv_grey", "fc_count", "total"),
    [
        ("resnet18", ("fc1",), 11_176_512, 11_170_240, 262_656, 11_444_298),
        ("shufflenetv2", ("fc1",), 1_253_604, 1_253_172, 524_800, 1_783_534),
        ("googlenet", ("fc1",), 5_599_904, 5_593_632, 524_800, 6_129_834),
        ("alexnet", ("fc1", "fc2"), 370_816, 369_664, 1_442_816, 1_818_762),
    ],
)
def test_fedclassavg_counts(
    name: str, fc: tuple[str, ...], conv_colour: int, conv_grey: int, fc_count: int, total: int
) -> None:
    for channels, conv in ((3, conv_colour), (1, conv_grey)):
        counts = stage_counts(build(name, channels, 32 if channels == 3 else 28))
        assert sum(counts[stage] for stage in fc) == fc_count
        assert counts["head"] == 5_130
        assert sum(counts.values()) - fc_count - counts["head"] == conv
    assert count(build(name)) == total
    assert count(build(name, num_classes=26).head) == 13_338


@pytest.mark.parametrize(
    ("name", "size", "stage", "shape"),
    [
        ("resnet18", 32, "layer4", (512, 1, 1)),
        ("resnet18", 28, "layer4", (512, 1, 1)),
        ("resnet18", 32, "conv1", (64, 16, 16)),
        ("shufflenetv2", 32, "conv5", (1024, 1, 1)),
        ("shufflenetv2", 28, "conv5", (1024, 1, 1)),
        ("shufflenetv2", 32, "stage2", (116, 4, 4)),
        ("googlenet", 32, "inception5b", (1024, 1, 1)),
        ("googlenet", 28, "inception5b", (1024, 1, 1)),
        ("googlenet", 32, "inception3b", (480, 4, 4)),
        ("alexnet", 32, "pool1", (64, 33, 33)),
        ("alexnet", 32, "relu3", (256, 17, 17)),
        ("alexnet", 28, "relu3", (256, 15, 15)),
        ("alexnet", 32, "flatten", (2304,)),
        ("mobilenetv2", 32, "stem", (32, 32, 32)),
        ("mobilenetv2", 32, "last", (1280, 4, 4)),
    ],
)
def test_maps_of_the_larger_networks(name: str, size: int, stage: str, shape: tuple[int, ...]) -> None:
    channels = 3 if size == 32 else 1
    assert stage_shapes(build(name, channels, size), images(2, channels, size))[stage] == shape


def test_resnet18_buffers() -> None:
    buffers = list(build("resnet18").buffers())
    assert sum(b.numel() for b in buffers if b.is_floating_point()) == 9_600
    assert sum(b.numel() for b in buffers if not b.is_floating_point()) == 20
    assert len(buffers) == 60


def test_mobilenetv2_counts() -> None:
    model = build("mobilenetv2")
    counts = stage_counts(model)
    assert count(model.features) - counts["fc1"] == 2_223_872
    assert counts["fc1"] == 1280 * 512 + 512
    buffers = list(model.buffers())
    assert len(buffers) == 156
    assert sum(b.numel() for b in buffers) == 34_164


@pytest.mark.parametrize(
    ("name", "classes", "total"),
    [
        ("mobilenetv2-plain", 10, 2_236_682),  # torchvision's mobilenet_v2(num_classes=10)
        ("mobilenetv2-plain", 100, 2_351_972),
        ("resnet18-plain", 10, 11_181_642),
        ("resnet18-plain", 100, 11_227_812),
    ],
)
def test_plain_networks_have_nothing_between_the_means_and_the_head(name: str, classes: int, total: int) -> None:
    model, wider = build(name, num_classes=classes), build(name.removesuffix("-plain"), num_classes=classes)
    assert count(model) == total
    assert "fc1" not in dict(model.features.named_children())
    assert count(wider.features) - count(model.features) == count(dict(wider.features.named_children())["fc1"])
    assert model.width == count(model.head) // classes - 1
    x = images(2, 3, 32)
    stages = stage_shapes(model, x)
    assert stages["last" if "mobile" in name else "layer4"][0] == model.width == stages["flatten"][0]
    with torch.inference_mode():
        assert model.features(x).min() >= 0, "the means of a ReLU: a further ReLU would change nothing"


@pytest.mark.parametrize(("name", "total"), [("digits-a", 38_282), ("digits-b", 17_226), ("digits-c", 9_738)])
def test_digits_counts(name: str, total: int) -> None:
    assert count(build(name, channels=1)) == total


def test_digits_layer_tables() -> None:
    x = images(2, 1, 8)
    assert stage_shapes(build("digits-a", 1), x)["flatten"] == (512,)
    assert stage_shapes(build("digits-b", 1), x)["fc1"] == (128,)
    assert stage_shapes(build("digits-c", 1), x)["flatten"] == (128,)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cnn-a", 5 * 5 * 16 + 16 + 25 * 16 * 32 + 32 + 9 * 32 * 32 + 32 + (3 * 3 * 32) * 512 + 512),
        ("cnn-b", 4 * 4 * 64 + 64 + 64 * 24 + 24 + (7 * 7 * 24) * 512 + 512),
        ("cnn-c", 9 * 24 + 24 + 9 * 24 * 48 + 48 + 9 * 48 * 64 + 64 + (4 * 4 * 64) * 512 + 512),
        (
            "cnn-d",
            9 * 16
            + 2 * 16
            + sum(9 * a * b + 9 * b * b + a * b + 4 * b for a, b in ((16, 32), (32, 64)))
            + 64 * 512
            + 512,
        ),
    ],
)
def test_light_family_counts(name: str, expected: int) -> None:
    assert count(build(name, 1, 28).features) == expected


def test_documented_counts_are_true() -> None:
    """The table in the zoo's documentation is checked row by row against the models."""
    from fedapp.models import zoo

    rows = re.findall(r"^([a-z0-9-]+) +([\d,]+) +([\d,]+) +([\d,]+)$", zoo.__doc__ or "", flags=re.MULTILINE)
    assert {name for name, *_ in rows} == set(ALL_SIZES)
    for name, *numbers in rows:
        built = [count(build(name, channels, size).features) for channels, size in ((1, 28), (3, 32), (3, 64))]
        assert [int(number.replace(",", "")) for number in numbers] == built, name


# --- functions against references written in the papers' order ------------------------------------------------------


def test_cnn_equals_the_papers_order_bit_for_bit() -> None:
    """The paper applies ReLU before pooling; both are monotone, so the order does not change a bit."""
    model = build("cnn").eval()
    p = dict(model.named_parameters())
    x = images(3, 3, 32)
    z = x
    for layer in ("conv1", "conv2"):
        z = functional.conv2d(z, p[f"features.{layer}.weight"], p[f"features.{layer}.bias"])
        z = functional.max_pool2d(torch.relu(z), 2)
    z = torch.relu(model.features.fc1(z.flatten(1)))
    expected = functional.linear(z, p["head.weight"], p["head.bias"])
    assert torch.equal(model.represent(x), z)
    assert torch.equal(model(x), expected)


def test_moon_equals_its_layer_list() -> None:
    model = build("moon").eval()
    p = dict(model.named_parameters())
    x = images(3, 3, 32)
    z = x
    for layer in ("conv1", "conv2"):
        z = functional.conv2d(z, p[f"features.{layer}.weight"], p[f"features.{layer}.bias"])
        z = functional.max_pool2d(torch.relu(z), 2)
    z = z.flatten(1)
    for layer in ("fc1", "fc2", "proj1"):
        z = torch.relu(functional.linear(z, p[f"features.{layer}.weight"], p[f"features.{layer}.bias"]))
    z = functional.linear(z, p["features.proj2.weight"], p["features.proj2.bias"])
    torch.testing.assert_close(model.represent(x), z, rtol=0, atol=1e-6)
    torch.testing.assert_close(model(x), functional.linear(z, p["head.weight"], p["head.bias"]), rtol=0, atol=1e-6)


def reference_network(name: str) -> nn.Module:
    """Build torchvision's own network with 512 outputs; MobileNetV2 with the two strides changed by hand."""
    from torchvision import models

    if name.startswith("resnet18"):
        net = models.resnet18(num_classes=512)
        net.fc = nn.Identity() if name in PLAIN else net.fc
        return net
    if name == "shufflenetv2":
        return models.shufflenet_v2_x1_0(num_classes=512)
    if name == "googlenet":
        return models.googlenet(num_classes=512, aux_logits=False, init_weights=False)
    net = models.mobilenet_v2(num_classes=512)
    net.features[0][0].stride = (1, 1)
    net.features[2].conv[1][0].stride = (1, 1)
    net.classifier = nn.Identity() if name in PLAIN else net.classifier
    return net


@pytest.mark.parametrize("name", [*BATCH_NORM, *PLAIN])
def test_trunk_equals_torchvisions_network(name: str) -> None:
    """Same tensors in the same order in torchvision's own forward give the same numbers."""
    model = build(name)
    model.train()
    for seed in range(2):
        model(images(4, 3, 32, seed))  # moves the running statistics away from their initial values
    model.eval()
    reference = reference_network(name).eval()
    own = model.features.state_dict()
    theirs = reference.state_dict()
    assert [tuple(t.shape) for t in own.values()] == [tuple(t.shape) for t in theirs.values()]
    reference.load_state_dict(dict(zip(theirs, own.values(), strict=True)))
    x = images(3, 3, 32, seed=9)
    with torch.inference_mode():
        expected = reference(x)
        torch.testing.assert_close(model.features(x), expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("name", ["resnet18", "shufflenetv2", "googlenet", "mobilenetv2"])
def test_grey_networks_differ_in_the_first_convolution_only(name: str) -> None:
    grey, colour = build(name, 1), build(name, 3)
    differing = [
        key
        for (key, a), b in zip(grey.state_dict().items(), colour.state_dict().values(), strict=True)
        if a.shape != b.shape
    ]
    assert differing == [next(iter(colour.state_dict()))]
    first_grey = next(m for m in grey.modules() if isinstance(m, nn.Conv2d))
    first_colour = next(m for m in colour.modules() if isinstance(m, nn.Conv2d))
    for attribute in ("out_channels", "kernel_size", "stride", "padding", "dilation", "groups"):
        assert getattr(first_grey, attribute) == getattr(first_colour, attribute)
    assert (first_grey.bias is None) == (first_colour.bias is None)


@pytest.mark.parametrize("name", IMAGES)
def test_dropout_rates(name: str) -> None:
    rates = [m.p for m in build(name).modules() if isinstance(m, nn.Dropout)]
    half = {n: [0.5] for n in ("alexnet", "fedproto-a", "fedproto-b", "fedproto-c")}
    assert rates == {"googlenet": [0.2], "mobilenetv2": [0.2], "mobilenetv2-plain": [0.2], **half}.get(name, [])


# --- the cut ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IMAGES)
def test_the_cut(name: str) -> None:
    model = build(name, num_classes=7).eval()
    assert (model.name, model.width, model.num_classes) == (name, head_width(name), 7)
    x = images(4, 3, native_size(name))
    with torch.inference_mode():
        features = model.features(x)
        kept = features.clone()
        z = model.represent(x)
        assert features.shape == z.shape == (4, model.width)
        assert torch.equal(z, model.activation(features))
        assert torch.equal(features, kept)
        assert torch.equal(model.classify(z), functional.linear(z, model.head.weight, model.head.bias))
        assert torch.equal(model(x), model.classify(z))
    # Before the last activation numbers of both signs occur; a ReLU inside the trunk's end would show here.
    assert (features.min() < 0 < features.max()) != (name in ("fedproto-d", "fedproto-e", *PLAIN))
    assert (z.min() >= 0) == (name != "moon")


@pytest.mark.parametrize("name", IMAGES)
def test_names_on_the_wire(name: str) -> None:
    model = build(name)
    names = list(model.state_dict())
    assert [n for n in names if not n.startswith("features.")] == ["head.weight", "head.bias"]
    assert names[-2:] == ["head.weight", "head.bias"]
    assert model.state_dict()["head.weight"].shape == (10, model.width)
    assert model.state_dict()["head.bias"].shape == (10,)
    assert not list(model.activation.parameters())


def test_widths() -> None:
    assert {name: head_width(name) for name in MODEL_NAMES} == {
        **dict.fromkeys(("cnn", *LIGHT, *BATCH_NORM, "alexnet"), 512),
        **dict.fromkeys((*FEDGH, "fedgh-resnet"), 500),
        **dict.fromkeys(("fedproto-a", "fedproto-b", "fedproto-c"), 50),
        **dict.fromkeys(("fedproto-d", "fedproto-e"), 512),
        **dict.fromkeys(DIGITS, 64),
        "moon": 256,
        "mobilenetv2-plain": 1280,
        "resnet18-plain": 512,
        "cnn1d": 56,
        "mlp": 64,
        "adapter": 128,
        "identity": 1,
    }
    assert head_width("identity", shape=(7,)) == 7


def test_suffixes_of_the_cnn_can_be_chosen_by_prefix() -> None:
    names = [name for name, _ in build("cnn").named_parameters()]
    prefixes = ["features.conv1.", "features.conv2.", "features.fc1.", "head."]
    grouped = [[name for name in names if name.startswith(prefix)] for prefix in prefixes]
    assert [len(group) for group in grouped] == [2, 2, 2, 2]
    assert [name for group in grouped for name in group] == names


def test_an_activation_in_place_is_refused() -> None:
    with pytest.raises(ValueError, match="in place"):
        SplitModel(name="x", features=nn.Flatten(), activation=nn.ReLU(inplace=True), head=nn.Linear(4, 2))


def test_a_head_without_bias_is_refused() -> None:
    with pytest.raises(ValueError, match="bias"):
        SplitModel(name="x", features=nn.Flatten(), activation=nn.ReLU(), head=nn.Linear(4, 2, bias=False))


# --- forward and backward -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [28, 32, 64])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ALL_SIZES)
def test_a_step_and_a_single_image(name: str, channels: int, size: int) -> None:
    """A batch of two trains, a batch of one is classified, for the sizes of all supported data sets."""
    check_one_step(build(name, channels, size), channels, size)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", DIGITS)
def test_a_step_and_a_single_digit(name: str, channels: int) -> None:
    check_one_step(build(name, channels, 8), channels, 8)


def check_one_step(model: SplitModel, channels: int, size: int) -> None:
    torch.manual_seed(0)  # dropout draws from the global generator
    model.train()
    loss = functional.cross_entropy(model(images(2, channels, size)), torch.tensor([0, 1]))
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    model.eval()
    with torch.inference_mode():
        logits = model(images(1, channels, size))
    assert logits.shape == (1, 10)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("name", ["resnet18", "shufflenetv2", "googlenet"])
def test_batch_normalisation_refuses_a_batch_of_one(name: str) -> None:
    """The documented limit: on 32 x 32 images the last maps are one pixel wide."""
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        build(name).train()(images(1, 3, 32))


@pytest.mark.parametrize("name", [name for name in IMAGES if name not in (*BATCH_NORM, *RESNETS, *PLAIN)])
def test_other_models_train_on_a_batch_of_one(name: str) -> None:
    model = build(name).train()
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    model(images(1, 3, native_size(name))).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("name", LIGHT)
def test_light_family_does_not_mix_the_images_of_a_batch(name: str) -> None:
    model = build(name).train()
    x = images(5, 3, 32)
    with torch.no_grad():
        alone = torch.cat([model(row[None]) for row in x])
        torch.testing.assert_close(model(x), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [*range(8, 35), 63, 65])
def test_patches_cover_every_pixel(size: int) -> None:
    """Every pixel has a gradient, at any side: the patch network leaves no border out."""
    model = build("cnn-b", 1, size)
    patches = model.features.get_submodule("patch1")
    x = torch.ones(1, 1, size, size, requires_grad=True)
    with torch.no_grad():
        patches.weight.fill_(1.0)
    patches(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 64.0))  # once in each of 64 outputs
    assert patches(x).shape[-1] <= 8


@pytest.mark.full
@pytest.mark.parametrize("name", SMALL)
def test_a_few_steps_fit_a_few_images(name: str) -> None:
    """Trunk and head learn together: eight images of four classes are told apart."""
    model = build(name, 1, num_classes=4).train()
    x, y = images(8, 1, native_size(name)), torch.arange(8) % 4
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(60):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert torch.equal(model(x).argmax(1), y)


# --- initial values, random state, memory format --------------------------------------------------------------------


@pytest.mark.parametrize("name", IMAGES)
def test_initial_values_depend_on_the_seed_only(name: str) -> None:
    torch.manual_seed(1)
    first = build(name, seed=5).state_dict()
    torch.manual_seed(2)
    again = build(name, seed=5).state_dict()
    other = build(name, seed=6).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])
    first_weight = next(iter(first))
    assert not torch.equal(first[first_weight], other[first_weight])


@pytest.mark.parametrize("name", ["cnn", "cnn-d", "googlenet", "mobilenetv2"])
def test_global_random_state_is_left_alone(name: str) -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002 - the legacy global state is what must not move
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    build(name, seed=11)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])  # noqa: NPY002


def test_models_of_one_width_start_with_the_same_head() -> None:
    heads = [build(name, seed=4).head for name in ("cnn", *LIGHT, *BATCH_NORM, "alexnet", "resnet18-plain")]
    assert all(torch.equal(head.weight, heads[0].weight) and torch.equal(head.bias, heads[0].bias) for head in heads)


@pytest.mark.parametrize(("name", "width"), [("cnn", 512), ("fedgh-1", 500)])
def test_initial_head_is_uniform(name: str, width: int) -> None:
    """Uniform in +-1/sqrt(width): +-0.0441942 for 512, +-0.0447214 for 500 (weights and bias)."""
    bound = {512: 0.0441942, 500: 0.0447214}[width]
    head = build(name, num_classes=100).head
    weight = head.weight.detach().double()
    assert weight.abs().max().item() <= bound + 1e-7
    assert weight.abs().max().item() > 0.99 * bound
    # Standard deviation of U(-b, b) is b/sqrt(3); five standard errors of its estimate from n = 100 * width draws.
    tolerance = 5 * bound / math.sqrt(3) * math.sqrt(0.2 / weight.numel())
    assert abs(weight.std().item() - bound / math.sqrt(3)) < tolerance
    assert head.bias.abs().max().item() <= bound + 1e-7


def test_build_takes_numpy_integers() -> None:
    a = build_model("digits-a", num_classes=int(np.int64(10)), shape=(1, 8, 8), seed=int(np.int64(3)))
    b = build_model("digits-a", num_classes=10, shape=(1, 8, 8), seed=3)
    assert torch.equal(a.head.weight, b.head.weight)


@pytest.mark.parametrize("name", ["cnn", "cnn-d", "resnet18"])
def test_convolutions_are_channels_last(name: str) -> None:
    convolutions = [m for m in build(name).modules() if isinstance(m, nn.Conv2d)]
    assert convolutions
    assert all(c.weight.is_contiguous(memory_format=torch.channels_last) for c in convolutions)


@pytest.mark.parametrize("name", SMALL)
def test_contiguous_arrays_load_and_give_the_same_function(name: str) -> None:
    source = build(name, seed=1).eval()
    arrays = {key: np.ascontiguousarray(value.numpy()) for key, value in source.state_dict().items()}
    target = build(name, seed=2).eval()
    strides = {key: value.stride() for key, value in target.state_dict().items()}
    with torch.no_grad():
        for key, value in target.state_dict().items():
            value.copy_(torch.from_numpy(arrays[key]))
    x = images(3, 3, native_size(name))
    assert {key: value.stride() for key, value in target.state_dict().items()} == strides
    assert torch.equal(target(x), source(x))
    for key, value in target.state_dict().items():
        assert np.array_equal(value.numpy(), arrays[key])


@pytest.mark.parametrize("name", ["cnn", "cnn-d", "resnet18"])
def test_memory_format_changes_nothing_but_rounding(name: str) -> None:
    model = build(name).eval()
    plain = copy.deepcopy(model).to(memory_format=torch.contiguous_format)
    x = images(3, 3, 32)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), plain(x.contiguous()), rtol=1e-4, atol=1e-5)


def test_models_can_be_copied_and_pickled() -> None:
    model = build("cnn-d").eval()
    x = images(2, 3, 32)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), model(x))
        assert (twin.name, twin.width, twin.num_classes) == (model.name, model.width, model.num_classes)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("cnn-e", "cnn-"),
        ("resnet", "resnet18"),
        ("ResNet18", "resnet18"),
        ("digits_a", "digits-a"),
        ("fedgh1", "fedgh-1"),
    ],
)
def test_unknown_model_gets_a_suggestion(typed: str, meant: str) -> None:
    with pytest.raises(BadRequest, match=f"unknown model '{typed}', did you mean '{meant}"):
        check_model(typed, (3, 32, 32))


def test_unknown_model_lists_all_names() -> None:
    with pytest.raises(BadRequest) as error:
        check_model("zzz", (3, 32, 32))
    assert "did you mean" not in str(error.value)
    assert all(name in str(error.value) for name in MODEL_NAMES)
    with pytest.raises(BadRequest, match="unknown model 'zzz'"):
        head_width("zzz")
    with pytest.raises(BadRequest, match="unknown model 'zzz'"):
        build_model("zzz", num_classes=10, shape=(3, 32, 32), seed=0)


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("digits-a", 28, "images of 8x8 pixels"),
        ("digits-b", 32, "images of 8x8 pixels"),
        ("digits-c", 7, "images of 8x8 pixels"),
        ("cnn", 8, "square images of 16x16 pixels or more"),
        ("cnn", 15, "square images of 16x16 pixels or more"),
        ("fedgh-3", 15, "square images of 16x16 pixels or more"),
        ("moon", 8, "square images of 16x16 pixels or more"),
        ("resnet18", 8, "images of 16x16 pixels or more"),
        ("cnn-d", 7, "images of 8x8 pixels or more"),
    ],
)
def test_model_that_does_not_fit(name: str, size: int, reason: str) -> None:
    with pytest.raises(
        BadRequest,
        match=rf"model '{name}' is made for {reason}, this data has images of {size}x{size} pixels with 1 channel\.",
    ):
        check_model(name, (1, size, size))
    with pytest.raises(BadRequest, match=reason):
        build_model(name, num_classes=10, shape=(1, size, size), seed=0)


@pytest.mark.parametrize("size", [8, 12, 16])
def test_every_model_named_as_fitting_fits(size: int) -> None:
    with pytest.raises(BadRequest) as error:
        check_model("cnn" if size < 16 else "digits-a", (1, size, size))
    fitting = str(error.value).split("Models that fit: ")[1].rstrip(".").split(", ")
    assert fitting
    for name in IMAGES:
        if name in fitting:
            check_model(name, (1, size, size))
            logits = build(name, 1, size).train()(images(2, 1, size))
            assert logits.shape == (2, 10)
        else:
            with pytest.raises(BadRequest):
                check_model(name, (1, size, size))


def test_no_channels_and_no_classes_are_refused() -> None:
    with pytest.raises(BadRequest, match="without a number in it"):
        check_model("cnn", (0, 28, 28))
    with pytest.raises(BadRequest, match="at least 1 class"):
        build_model("cnn", num_classes=0, shape=(1, 28, 28), seed=0)


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((1, 8, 8), "digits-a"), ((3, 28, 28), "cnn"), ((5, 64, 64), "cnn"), ((3, 20, 33), "cnn-d"),
        ((9, 128), "cnn1d"), ((7,), "mlp"),
    ],
)  # fmt: skip
def test_default_models_fit_their_data(shape: tuple[int, ...], name: str) -> None:
    assert default_model(shape) == name
    check_model(name, shape)
    small = build_model(default_small(shape), num_classes=3, shape=shape, seed=0)
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    assert small(x).shape == build_model(name, num_classes=3, shape=shape, seed=0)(x).shape == (2, 3)


@pytest.mark.parametrize("shape", [(3, 4, 4), (9, 10), (2, 3, 4, 5)])
def test_where_no_model_is_the_default_those_that_fit_are_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(BadRequest, match=r"no model is the default for .*: set model to one of mlp"):
        default_model(shape)


# --- other data than square images --------------------------------------------------------------------------------


def test_the_series_network_has_the_documented_size_and_any_length() -> None:
    model = build_model("cnn1d", num_classes=6, shape=(9, 128), seed=0)
    assert stage_counts(model) == {"conv1": 2048, "conv2": 7728, "conv3": 9280, "fc1": 28728, "head": 342}
    assert count(model) == 48_126 and count(model.features) == 47_784
    shapes = stage_shapes(model, torch.zeros(2, 9, 128))
    assert [shapes[n] for n in ("pool1", "pool2", "pool3", "fc1")] == [(32, 32), (48, 16), (64, 8), (56,)]
    for steps in (16, 17, 31, 33, 127, 500):
        net = build_model("cnn1d", num_classes=2, shape=(1, steps), seed=0)
        assert net(torch.zeros(1, 1, steps)).shape == (1, 2)


def test_the_perceptron_takes_any_shape_and_equals_that_of_the_digits() -> None:
    for shape in ((5,), (2, 3), (1, 8, 8), (2, 2, 2, 2)):
        model = build_model("mlp", num_classes=4, shape=shape, seed=1)
        assert stage_counts(model) == {"fc1": math.prod(shape) * 128 + 128, "fc2": 8256, "head": 260}
        assert model(torch.zeros(3, *shape)).shape == (3, 4)
    ours, digits = (build_model(name, num_classes=4, shape=(1, 8, 8), seed=1) for name in ("mlp", "digits-b"))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), digits.parameters(), strict=True))


SQUARE = ("cnn", "cnn-a", "cnn-b", "cnn-c", *FEDGH, "fedproto-a", "fedproto-b", "fedproto-c", "moon", *DIGITS)


@pytest.mark.parametrize("name", IMAGES)
def test_images_that_are_not_square(name: str) -> None:
    """Trunks that end in a mean take them, with the parameters that they have for squares; the others refuse them."""
    shape = (2, 24, 40)
    if name in SQUARE:
        with pytest.raises(BadRequest, match=r"made for .*this data has images of 24x40 pixels with 2 channels"):
            check_model(name, shape)
        return
    model = build_model(name, num_classes=3, shape=shape, seed=0).eval()
    with torch.inference_mode():
        assert model(torch.randn(2, *shape)).shape == (2, 3)
    assert count(model) == count(build(name, 2, 32, 3))


@pytest.mark.parametrize(
    ("name", "shape"), [("cnn1d", (3, 32, 32)), ("cnn", (9, 128)), ("cnn1d", (9, 15)), ("cnn", (9,))]
)
def test_data_of_another_kind_are_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(BadRequest, match=f"model '{name}' is made for"):
        check_model(name, shape)
