"""The models that a configuration can name.

Every entry is a body that ends in `width` features, before the last activation. Bodies are `nn.Sequential` with named
stages in forward order, so a method can choose the last layers by prefix (cwFedAvg: `features.fc1.`, then
`features.conv2.`, ...). The sizes of linear layers follow from the input, so an architecture published for 32 x 32
colour images also takes 28 x 28 grey ones.

====================  =====  ==================================================================================
name                  width  source
====================  =====  ==================================================================================
cnn                   512    4-layer CNN of cwFedAvg's experiments (FedAvg's CNN: McMahan et al., AISTATS 2017)
cnn-a ... cnn-d       512    light family of four different bodies, made for this project
fedgh-1 ... fedgh-5   500    Yi et al., FedGH, ACM MM 2023, table of heterogeneous CNNs
fedgh-resnet          500    the same paper, CIFAR-100: ResNet-18 for small images (3x3 stem, no max pooling), then
                             a linear layer to 500
fedproto-a, -b, -c    50     released code of FedProto (Tan et al., AAAI 2022), grey images: two convolutions, the
                             second with 18, 20 or 22 channels, with dropout
fedproto-d, -e        512    the same, CIFAR-10: ResNet-18 whose stem and max pooling have strides 1 and 4, or 2 and
                             2; no linear layer before the head
moon                  256    Li et al., MOON, CVPR 2021: CNN with a 2-layer projection head that ends in 256
                             numbers; no activation before the head
resnet18, googlenet,  512    FedClassAvg, ICPP 2022: torchvision networks without weights and auxiliary outputs,
shufflenetv2, alexnet        and a small AlexNet; each with a linear layer to 512
mobilenetv2-plain     1280   CCVR, NeurIPS 2021: MobileNetV2 (Sandler et al., CVPR 2018) with strides for 32 x 32
                             images; its last ReLU stands before the global mean, so none stands before the head
mobilenetv2           512    the same with a linear layer 1280 -> 512, so that it shares a head with the other
                             512-wide models
resnet18-plain        512    ResNet-18 as torchvision has it (He et al., CVPR 2016): the head sees the global mean of
                             the last block, without `resnet18`'s linear layer; the same network as fedproto-e
digits-a, -b, -c      64     made for the 8 x 8 digits
cnn1d                 56     for series (C, T), such as the channels of a sensor: three convolutions over time
mlp                   64     for table rows (F,), and for all numbers of any other sample
adapter               128    one linear layer on features, so that clients with other bodies share a head
identity              F      no body: the head is on all numbers of a sample, which are features already
====================  =====  ==================================================================================

Parameters without the head (width x classes + classes), as (channels x size):

=================  ===========  ===========  ===========
name               1 x 28       3 x 32       3 x 64
=================  ===========  ===========  ===========
cnn                    576,896      873,408    5,592,000
cnn-a                  170,464      285,952    1,072,384
cnn-b                  605,272      791,640      800,856
cnn-c                  563,168      563,600    2,136,464
cnn-d                  105,520      105,808      105,808
fedgh-1              2,039,748    2,616,548   11,832,548
fedgh-2              1,521,332    1,810,132    6,418,132
fedgh-3              1,026,748    1,315,548    5,923,548
fedgh-4                824,148    1,055,348    4,741,748
fedgh-5                520,248      665,048    2,969,048
fedgh-resnet        11,424,180   11,425,332   11,425,332
fedproto-a              19,228       27,828      157,428
fedproto-b              21,330       30,830      174,830
fedproto-c              23,432       33,832      192,232
fedproto-d          11,170,240   11,176,512   11,176,512
fedproto-e          11,170,240   11,176,512   11,176,512
moon                    72,476       90,056      366,536
resnet18            11,432,896   11,439,168   11,439,168
shufflenetv2         1,777,972    1,778,404    1,778,404
googlenet            6,118,432    6,124,704    6,124,704
alexnet              1,812,480    1,813,632    1,813,632
mobilenetv2          2,879,168    2,879,744    2,879,744
mobilenetv2-plain    2,223,296    2,223,872    2,223,872
resnet18-plain      11,170,240   11,176,512   11,176,512
=================  ===========  ===========  ===========

The digits models have 37,632 (`a`), 16,576 (`b`) and 9,088 (`c`) on 1 x 8. `cnn1d` has 47,784 for 9 channels of 128
steps. Bodies that end in a mean over all positions (`cnn-d`, `alexnet`, the ResNets, `shufflenetv2`, `googlenet`, the
MobileNets) take images of any height and width, all other bodies square ones.

Initial values are PyTorch's (or torchvision's) own; a first convolution replaced for another number of channels has
PyTorch's. Dropout (`googlenet`, `mobilenetv2`, `mobilenetv2-plain`, `alexnet`, `fedproto-a` to `-c`) draws from
PyTorch's global generator, which local training seeds. Networks with batch normalisation (ResNet-18, `shufflenetv2`,
`googlenet`, MobileNetV2) need two images or more per batch in training mode wherever their last maps are one pixel
wide: PyTorch refuses a batch of one there ("Expected more than 1 value per channel"). Local training therefore never
makes a batch of one. All other models take any batch.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from fedapp.errors import BadRequest, described, suggest_choice
from fedapp.lazy import nn, torch, torchvision
from fedapp.models import frozen, own, weights
from fedapp.models.own import PLAIN
from fedapp.settings import ModelSettings

if TYPE_CHECKING:
    from fedapp.models.split import SplitModel

Stages: TypeAlias = "list[tuple[str, nn.Module]]"
Shape = tuple[int, ...]
TrunkBuilder = Callable[[int, int], Stages]
AXES = {"image": 3, "series": 2}
"""Axes of one sample by kind of body; those of `any` kind flatten it."""


@dataclass(frozen=True)
class ZooEntry:
    """How to build one body, and for which data.

    Attributes
    ----------
    width : number of features at the end of the body; 0 = as many as a sample has numbers.
    trunk : (channels, size) -> named stages in forward order; size is the side of an image, the steps of a series, and
        for bodies of `any` kind 1, where channels are all numbers of a sample.
    min_size : smallest side in pixels, or fewest steps.   max_size : largest side in pixels; None = any.
    relu : whether a ReLU stands between body and head.   kind : `image` (C, H, W), `series` (C, T) or `any`.
    square : whether height and width of an image must be equal: the sizes of linear layers follow from the side.
    """

    width: int
    trunk: TrunkBuilder
    min_size: int
    max_size: int | None = None
    relu: bool = True
    kind: str = "image"
    square: bool = True

    def features(self, shape: Shape) -> int:
        """Return the number of features that the head takes of samples of this shape."""
        return self.width or math.prod(shape)

    def fits(self, shape: Shape) -> bool:
        """Whether samples of this shape can be fed."""
        if self.kind == "any":
            return True
        sides = shape[1:]
        return (
            len(shape) == AXES[self.kind]
            and (not self.square or len(set(sides)) == 1)
            and self.min_size <= min(sides)
            and (self.max_size is None or max(sides) <= self.max_size)
        )

    def sizes(self) -> str:
        """Describe the inputs that fit."""
        if self.kind == "any":
            return "table rows, or all numbers of any sample"
        if self.kind == "series":
            return f"series of {self.min_size} steps or more"
        low = f"{self.min_size}x{self.min_size}"
        images = "square images" if self.square else "images"
        if self.max_size is None:
            return f"{images} of {low} pixels or more"
        if self.max_size == self.min_size:
            return f"images of {low} pixels"
        return f"{images} of {low} to {self.max_size}x{self.max_size} pixels"

    def stages(self, shape: Shape) -> Stages:
        """Build the body for samples of this shape."""
        return self.trunk(math.prod(shape), 1) if self.kind == "any" else self.trunk(shape[0], shape[-1])


_KINDS = {
    "Conv2d": "conv", "MaxPool2d": "pool", "AdaptiveAvgPool2d": "pool", "ReLU": "relu", "Linear": "fc",
    "Conv1d": "conv", "MaxPool1d": "pool",
}  # fmt: skip


def _fc(inputs: int, outputs: int) -> nn.Module:
    """Return PyTorch's linear layer with the faster product."""
    from fedapp.core.products import Linear

    return Linear(inputs, outputs)


def _named(*parts: nn.Module | tuple[str, nn.Module]) -> Stages:
    """Number the layers of each kind: conv1, pool1, relu1, conv2, ...; pairs and all other layers keep their names."""
    found: Counter[str] = Counter()
    stages: Stages = []
    for part in parts:
        if isinstance(part, tuple):
            stages.append(part)
        elif kind := _KINDS.get(type(part).__name__):
            found[kind] += 1
            stages.append((f"{kind}{found[kind]}", part))
        else:
            stages.append((type(part).__name__.lower(), part))
    return stages


def _two_convolutions(channels: int, size: int, c1: int, c2: int) -> tuple[list[nn.Module], int]:
    """Conv 5x5, pool 2, ReLU, twice, then flatten; return the layers and the number of values after flattening.

    Pooling before ReLU gives the same bits as after it (both are monotone) on a quarter of the values.
    """
    side = ((size - 4) // 2 - 4) // 2
    first = [nn.Conv2d(channels, c1, 5), nn.MaxPool2d(2), nn.ReLU()]
    return [*first, nn.Conv2d(c1, c2, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()], c2 * side * side


def _convolutions(
    channels: int, size: int, hidden: int, *layers: tuple[int, int, int, int], series: bool = False
) -> Stages:
    """Return padded convolutions of (channels, window, stride, pool), each with ReLU, then flatten and fc `hidden`."""
    convolution, pooling = (nn.Conv1d, nn.MaxPool1d) if series else (nn.Conv2d, nn.MaxPool2d)
    parts: list[nn.Module] = []
    for c, window, stride, pool in layers:
        parts.append(convolution(channels, c, window, stride=stride, padding=window // 2))
        parts += [pooling(pool), nn.ReLU()] if pool > 1 else [nn.ReLU()]
        channels, size = c, -(-size // stride) // pool
    return _named(*parts, nn.Flatten(), _fc(channels * size ** (1 if series else 2), hidden))


def _cnn(channels: int, size: int) -> Stages:
    """4-layer CNN: conv 32, conv 64, fc 512 (the output layer is the fourth)."""
    layers, flat = _two_convolutions(channels, size, 32, 64)
    return _named(*layers, _fc(flat, 512))


def _fedgh(channels: int, size: int, *, c2: int, hidden: int) -> Stages:
    """FedGH's CNN-1 ... CNN-5: conv 16, conv `c2`, fc `hidden`, fc 500."""
    layers, flat = _two_convolutions(channels, size, 16, c2)
    return _named(*layers, _fc(flat, hidden), nn.ReLU(), _fc(hidden, 500))


def _fedproto(channels: int, size: int, *, c2: int) -> Stages:
    """FedProto's CNN for grey images: conv 10, conv `c2` with channel dropout 0.5, fc 50, dropout 0.5.

    The released code has the last dropout behind the ReLU; before it, it gives the same numbers to the head.
    """
    layers, flat = _two_convolutions(channels, size, 10, c2)
    layers.insert(4, nn.Dropout2d(0.5))
    return _named(*layers, _fc(flat, 50), nn.Dropout(0.5))


def _moon(channels: int, size: int) -> Stages:
    """MOON's CNN: conv 6, conv 16, fc 120, fc 84, then the projection head 84 -> 84 -> 256."""
    layers, flat = _two_convolutions(channels, size, 6, 16)
    return _named(
        *layers, _fc(flat, 120), nn.ReLU(), _fc(120, 84), nn.ReLU(),
        ("proj1", _fc(84, 84)), nn.ReLU(), ("proj2", _fc(84, 256)),
    )  # fmt: skip


def _digits_a(channels: int, size: int) -> Stages:
    """Strided CNN: conv 3x3/2 16, conv 3x3 32, fc 64."""
    return _convolutions(channels, size, 64, (16, 3, 2, 1), (32, 3, 1, 1))


def _digits_b(channels: int, size: int) -> Stages:
    """Multi-layer perceptron: fc 128, fc 64."""
    return _mlp(channels * size * size, 1)


def _mlp(numbers: int, _: int) -> Stages:
    """Multi-layer perceptron of all numbers of a sample: fc 128, fc 64."""
    return _named(nn.Flatten(), _fc(numbers, 128), nn.ReLU(), _fc(128, 64))


def _adapter(numbers: int, _: int) -> Stages:
    """One linear layer on given features, so that clients with other pretrained bodies share a head: fc 128."""
    return _named(nn.Flatten(), _fc(numbers, 128))


def _identity(numbers: int, _: int) -> Stages:
    """No body: the head is on all numbers of a sample, which are features already."""
    return [("flatten", nn.Flatten())]


def _cnn1d(channels: int, steps: int) -> Stages:
    """CNN for series: conv 7/2 32, conv 5 48, conv 3 64, each pooled by 2; fc 56."""
    convolutions = (32, 7, 2, 2), (48, 5, 1, 2), (64, 3, 1, 2)
    return _convolutions(channels, steps, 56, *convolutions, series=True)


def _digits_c(channels: int, size: int) -> Stages:
    """One convolution with large windows: conv 5x5/2 32, pool 2, fc 64."""
    return _convolutions(channels, size, 64, (32, 5, 2, 2))


def _cnn_a(channels: int, size: int) -> Stages:
    """Small pooled CNN: conv 5x5 16, conv 5x5 32, conv 3x3 32, each pooled by 2; fc 512."""
    return _convolutions(channels, size, 512, (16, 5, 1, 2), (32, 5, 1, 2), (32, 3, 1, 2))


def _cnn_b(channels: int, size: int) -> Stages:
    """Patch network: a two-layer perceptron on each of at most 8x8 patches (64, then 24 numbers a patch); fc 512.

    The patches do not overlap. Where the patch does not divide the side, a border of zeros is added, so no pixel is
    left out.
    """
    patch = -(-size // 8)
    grid = -(-size // patch)
    border = -(-(grid * patch - size) // 2)
    return _named(
        ("patch1", nn.Conv2d(channels, 64, patch, stride=patch, padding=border)), nn.ReLU(),
        ("patch2", nn.Conv2d(64, 24, 1)), nn.ReLU(),
        nn.Flatten(), _fc(24 * grid * grid, 512),
    )  # fmt: skip


def _cnn_c(channels: int, size: int) -> Stages:
    """Strided CNN without pooling: conv 3x3/2 24, conv 3x3/2 48, conv 3x3/2 64; fc 512."""
    return _convolutions(channels, size, 512, (24, 3, 2, 1), (48, 3, 2, 1), (64, 3, 2, 1))


def _cnn_d(channels: int, size: int) -> Stages:
    """Residual network: stem 3x3/2 16, residual blocks 32 and 64, global mean; fc 512. Any side, the same weights."""
    from fedapp.models.blocks import ResidualBlock

    return [
        ("stem", nn.Conv2d(channels, 16, 3, stride=2, padding=1, bias=False)),
        ("norm", nn.GroupNorm(8, 16)),
        ("relu", nn.ReLU()),
        ("block1", ResidualBlock(16, 32)),
        ("block2", ResidualBlock(32, 64)),
        ("pool", nn.AdaptiveAvgPool2d(1)),
        ("flatten", nn.Flatten()),
        ("fc1", _fc(64, 512)),
    ]


def _for_channels(conv: nn.Conv2d, channels: int) -> nn.Conv2d:
    """Return a first convolution of the same geometry for `channels` channels (the same one if nothing changes)."""
    if conv.in_channels == channels:
        return conv
    return nn.Conv2d(
        channels,
        conv.out_channels,
        (conv.kernel_size[0], conv.kernel_size[1]),
        stride=(conv.stride[0], conv.stride[1]),
        padding=(int(conv.padding[0]), int(conv.padding[1])),
        bias=conv.bias is not None,
    )


def _resnet18(channels: int, size: int) -> Stages:
    """ResNet-18 with the 7x7/2 stem and max pooling, fc 512."""
    net = torchvision.models.resnet18(weights=None, num_classes=512)
    net.conv1 = _for_channels(net.conv1, channels)
    parts: Stages = list(net.named_children())
    return [*parts[:-1], ("flatten", nn.Flatten()), ("fc1", net.fc)]


def _fedgh_resnet18(channels: int, size: int) -> Stages:
    """ResNet-18 with a 3x3 stem of stride 1 and no max pooling, fc 500."""
    net = torchvision.models.resnet18(weights=None, num_classes=500)
    net.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    parts: Stages = [(name, part) for name, part in net.named_children() if name != "maxpool"]
    return [*parts[:-1], ("flatten", nn.Flatten()), ("fc1", net.fc)]


def _fedproto_resnet18(channels: int, size: int, *, stem: int, pool: int) -> Stages:
    """ResNet-18 whose 7x7 stem and max pooling have these strides; the body ends with the mean of the last maps."""
    net = torchvision.models.resnet18(weights=None)
    net.conv1 = _for_channels(net.conv1, channels)
    net.conv1.stride, net.maxpool.stride = (stem, stem), pool
    parts: Stages = list(net.named_children())
    return [*parts[:-1], ("flatten", nn.Flatten())]


def _googlenet(channels: int, size: int) -> Stages:
    """GoogLeNet with batch normalisation, dropout 0.2, fc 512; no auxiliary outputs (they would never be trained)."""
    net = torchvision.models.googlenet(weights=None, num_classes=512, aux_logits=False, init_weights=True)
    net.conv1.conv = _for_channels(net.conv1.conv, channels)
    parts: Stages = list(net.named_children())
    return [*parts[:-2], ("flatten", nn.Flatten()), ("dropout", net.dropout), ("fc1", net.fc)]


def _shufflenetv2(channels: int, size: int) -> Stages:
    """ShuffleNetV2 x1.0, global mean, fc 512."""
    net = torchvision.models.shufflenet_v2_x1_0(weights=None, num_classes=512)
    net.conv1[0] = _for_channels(net.conv1[0], channels)
    parts: Stages = list(net.named_children())
    return [*parts[:-1], ("pool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten()), ("fc1", net.fc)]


def _alexnet(channels: int, size: int) -> Stages:
    """Small AlexNet: conv 3x3 64, 128, 256 with overlapping pools, mean to 3x3, dropout 0.5, fc 512, fc 512."""
    return _named(
        nn.Conv2d(channels, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2, stride=1, padding=1),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2, stride=2, padding=1),
        nn.Conv2d(128, 256, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(3),
        nn.Flatten(), nn.Dropout(0.5), _fc(2304, 512), nn.ReLU(), _fc(512, 512),
    )  # fmt: skip


# (expansion, channels, repeats, first stride): MobileNetV2's blocks with the second stage's stride 1 instead of 2.
_MOBILENET_BLOCKS = [
    [1, 16, 1, 1], [6, 24, 2, 1], [6, 32, 3, 2], [6, 64, 4, 2], [6, 96, 3, 1], [6, 160, 3, 2], [6, 320, 1, 1],
]  # fmt: skip


def _mobilenetv2(channels: int, size: int) -> Stages:
    """MobileNetV2 with total stride 8 (stem and second stage 1 instead of 2), global mean, dropout 0.2, fc 512.

    The ImageNet strides would leave a single pixel of a 32 x 32 image; the parameters are the same.
    """
    net = torchvision.models.mobilenet_v2(weights=None, num_classes=512, inverted_residual_setting=_MOBILENET_BLOCKS)
    stem, *blocks, last = net.features.children()
    stem[0] = _for_channels(stem[0], channels)
    stem[0].stride = (1, 1)
    dropout, fc = net.classifier.children()
    return [
        ("stem", stem),
        *((f"block{i}", block) for i, block in enumerate(blocks, start=1)),
        ("last", last),
        ("pool", nn.AdaptiveAvgPool2d(1)),
        ("flatten", nn.Flatten()),
        ("dropout", dropout),
        ("fc1", fc),
    ]


def _mobilenetv2_plain(channels: int, size: int) -> Stages:
    """MobileNetV2 as published, with total stride 8: the head sees the 1280 means, after dropout 0.2."""
    *trunk, _ = _mobilenetv2(channels, size)
    return trunk


# Smallest side for two unpadded 5x5 convolutions with pooling: 16 -> 12 -> 6 -> 2 -> 1.
_TWO_CONV_MIN = 16
# Total stride 32: a 16-pixel image is one pixel wide in the last stage, a smaller one already in the stages before it.
_STRIDE_32_MIN = 16

_ZOO: dict[str, ZooEntry] = {
    "cnn": ZooEntry(512, _cnn, _TWO_CONV_MIN),
    "cnn-a": ZooEntry(512, _cnn_a, 8),
    "cnn-b": ZooEntry(512, _cnn_b, 8),
    "cnn-c": ZooEntry(512, _cnn_c, 8),
    "cnn-d": ZooEntry(512, _cnn_d, 8, square=False),
    "fedgh-1": ZooEntry(500, partial(_fedgh, c2=32, hidden=2000), _TWO_CONV_MIN),
    "fedgh-2": ZooEntry(500, partial(_fedgh, c2=16, hidden=2000), _TWO_CONV_MIN),
    "fedgh-3": ZooEntry(500, partial(_fedgh, c2=32, hidden=1000), _TWO_CONV_MIN),
    "fedgh-4": ZooEntry(500, partial(_fedgh, c2=32, hidden=800), _TWO_CONV_MIN),
    "fedgh-5": ZooEntry(500, partial(_fedgh, c2=32, hidden=500), _TWO_CONV_MIN),
    "fedgh-resnet": ZooEntry(500, _fedgh_resnet18, 8, square=False),
    "fedproto-a": ZooEntry(50, partial(_fedproto, c2=18), _TWO_CONV_MIN),
    "fedproto-b": ZooEntry(50, partial(_fedproto, c2=20), _TWO_CONV_MIN),
    "fedproto-c": ZooEntry(50, partial(_fedproto, c2=22), _TWO_CONV_MIN),
    "fedproto-d": ZooEntry(512, partial(_fedproto_resnet18, stem=1, pool=4), _STRIDE_32_MIN, relu=False, square=False),
    "fedproto-e": ZooEntry(512, partial(_fedproto_resnet18, stem=2, pool=2), _STRIDE_32_MIN, relu=False, square=False),
    "moon": ZooEntry(256, _moon, _TWO_CONV_MIN, relu=False),
    "resnet18": ZooEntry(512, _resnet18, _STRIDE_32_MIN, square=False),
    "shufflenetv2": ZooEntry(512, _shufflenetv2, _STRIDE_32_MIN, square=False),
    "googlenet": ZooEntry(512, _googlenet, _STRIDE_32_MIN, square=False),
    "alexnet": ZooEntry(512, _alexnet, 8, square=False),
    "mobilenetv2": ZooEntry(512, _mobilenetv2, 8, square=False),
    "mobilenetv2-plain": ZooEntry(1280, _mobilenetv2_plain, 8, relu=False, square=False),
    "resnet18-plain": ZooEntry(
        512, partial(_fedproto_resnet18, stem=2, pool=2), _STRIDE_32_MIN, relu=False, square=False
    ),
    "digits-a": ZooEntry(64, _digits_a, 8, 8),
    "digits-b": ZooEntry(64, _digits_b, 8, 8),
    "digits-c": ZooEntry(64, _digits_c, 8, 8),
    "cnn1d": ZooEntry(56, _cnn1d, 16, kind="series"),
    "mlp": ZooEntry(64, _mlp, 1, kind="any"),
    frozen.ADAPTER: ZooEntry(128, _adapter, 1, kind="any"),
    frozen.IDENTITY: ZooEntry(0, _identity, 1, relu=False, kind="any"),
}
MODEL_NAMES: tuple[str, ...] = tuple(_ZOO)
"""All names that `build_model` knows, in the order of the documentation."""


def listed() -> list[tuple[str, int, str, str]]:
    """Return for each model its name, the width of its representations, its inputs, and a sentence about it."""
    found = []
    for name, entry in _ZOO.items():
        builder = getattr(entry.trunk, "func", entry.trunk)
        numbers = ", ".join(f"{key} {value}" for key, value in getattr(entry.trunk, "keywords", {}).items())
        words = (builder.__doc__ or "").partition("\n")[0].replace("`", "").rstrip(".")
        found.append((name, entry.width, entry.sizes(), f"{words} ({numbers})" if numbers else words))
    return found


def default_model(shape: Shape) -> str:
    """Return the model that `auto` stands for, by the shape of one sample.

    `cnn1d` for series (C, T) and `mlp` for table rows (F,); for images (C, H, W) `digits-a` if they are 8 x 8, `cnn` if
    they are square, and else `cnn-d`, which takes any height and width.

    Raises
    ------
    BadRequest : none of these fits; a model must then be named.
    """
    name = "cnn" if len(shape) == 3 and shape[1] == shape[2] else "cnn-d"
    if len(shape) != 3:
        name = "cnn1d" if len(shape) == 2 else "mlp"
    elif shape[1:] == (8, 8):
        name = "digits-a"
    if len(shape) > 3 or not _ZOO[name].fits(shape):
        fitting = ", ".join(other for other, entry in _ZOO.items() if entry.fits(shape))
        raise BadRequest(f"no model is the default for {described(shape)}: set model to one of {fitting}")
    return name


def default_small(shape: Shape) -> str:
    """Return the second, small model of methods that have one: by shape, and less than a quarter of `default_model`."""
    if len(shape) != 3:
        return "mlp"
    return "digits-c" if shape[1:] == (8, 8) else "cnn-d"


def _entry(name: str) -> ZooEntry:
    if name in _ZOO:
        return _ZOO[name]
    raise BadRequest(f"unknown model '{name}'{suggest_choice(name.strip(), MODEL_NAMES)}")


def head_width(name: str, num_classes: int = 0, shape: Shape = (), settings: ModelSettings = PLAIN) -> int:
    """Return the number of features that the head of a model takes; models of equal width can share a head.

    That of an own model depends on all arguments; it is built once in a process to find out. That of `identity` is the
    number of features of a sample, or of its random features.

    Raises
    ------
    BadRequest : the name is unknown.
    """
    own_width = own.head_of(name, num_classes, shape, settings)[0] if own.is_own(name) else 0
    return own_width or frozen.of(name, settings).random_features or _entry(name).features(shape)


def check_model(name: str, shape: Shape) -> None:
    """Check that a model exists and fits samples of this shape: (C, H, W) images, (C, T) series, (F,) table rows.

    Raises
    ------
    BadRequest : the name is unknown, or the model does not fit; the message names models that do. Whether an own model
        fits is seen when it is tried (`own.check`).
    """
    if own.is_own(name):
        own.check_form(name, PLAIN)
        return
    entry = _entry(name)
    if not shape or min(shape) < 1:
        raise BadRequest(f"one sample has the shape {shape}, without a number in it: check the arrays of the data")
    if not entry.fits(shape):
        fitting = ", ".join(other for other, candidate in _ZOO.items() if candidate.fits(shape))
        raise BadRequest(
            f"model '{name}' is made for {entry.sizes()}, this data has {described(shape)}. Models that fit: {fitting}."
        )


def build_model(
    name: str, *, num_classes: int, shape: Shape, seed: int, settings: ModelSettings = PLAIN, unit: bool = False
) -> SplitModel:
    """Build a model with random initial values.

    The values depend on `seed` and the shapes only, and the global random state is left as it was. The head is drawn
    first, so models of different architecture with the same width, classes and seed start with the same head.

    Parameters
    ----------
    name : one of `MODEL_NAMES`, or an own model, `package.module:function` (`fedapp.models.own`).
    num_classes : outputs of the head, at least 1.
    shape : of one sample: (C, H, W) images, (C, T) series, (F,) table rows.
    seed : of the initial values, 0 to 2**64 - 1.
    settings : of own models; those of the zoo take stored weights and frozen layers, `identity` also `model-args`.
    unit : representations of norm 1 (`SplitModel.unit`).

    Returns
    -------
    On the CPU, float32, in training mode, convolutions in channels_last memory format.

    Raises
    ------
    BadRequest : the name is unknown, the model does not fit the data, or there are no classes.
    """
    check_model(name, shape)
    if num_classes < 1:
        raise BadRequest(f"a model needs at least 1 class, got {num_classes}; check the labels of the data.")
    if own.is_own(name):
        return own.build(name, num_classes=num_classes, shape=shape, seed=seed, settings=settings, unit=unit)
    from fedapp.models.split import SplitModel

    entry = _ZOO[name]
    with own.seeded(seed):
        head = nn.Linear(head_width(name, num_classes, shape, settings), num_classes)
        features = nn.Sequential(OrderedDict([*entry.stages(shape), *frozen.stages(name, shape, settings)]))
    activation = nn.ReLU() if entry.relu else nn.Identity()
    model = SplitModel(name=name, features=features, activation=activation, head=head)
    if settings.weights:
        weights.fill(name, model, settings.weights, "head")
    if settings.freeze:
        weights.freeze(name, model, settings.freeze)
    model.unit = unit
    return model.to(memory_format=torch.channels_last)
