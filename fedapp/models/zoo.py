"""The models that can be asked for by name.

Every entry is a trunk that ends in `width` numbers, before the last activation. Trunks are `nn.Sequential` with named stages in
forward order, so a method can choose a suffix of layers by prefix (cwFedAvg: `features.fc1.`, then `features.conv2.`, ...).
Sizes of linear layers follow from the input, so an architecture published for 32 x 32 colour images also takes 28 x 28 grey ones.

====================  =====  ==========================================================================================
name                  width  source
====================  =====  ==========================================================================================
cnn                   512    4-layer CNN of the cwFedAvg experiments (FedAvg CNN: McMahan et al., AISTATS 2017)
cnn-a ... cnn-d       512    light family of four different trunks, made for this project
fedgh-1 ... fedgh-5   500    Yi et al., FedGH, ACM MM 2023, table of heterogeneous CNNs
moon                  256    Li et al., MOON, CVPR 2021: CNN with a 2-layer projection head, no activation before the head
resnet18, googlenet,  512    FedClassAvg, ICPP 2022: torchvision networks without weights and auxiliary outputs, a small
shufflenetv2, alexnet        AlexNet; each with a linear layer to 512
mobilenetv2           512    CCVR, NeurIPS 2021: MobileNetV2 with the strides for 32 x 32 images, then a linear layer to 512
digits-a, -b, -c      64     for the 8 x 8 digits
====================  =====  ==========================================================================================

Initial values are PyTorch's (or torchvision's) own. Networks with batch normalisation (`resnet18`, `shufflenetv2`, `googlenet`,
`mobilenetv2`) need at least two images per batch in training mode wherever the last maps are one pixel wide: PyTorch refuses a
batch of one there ("Expected more than 1 value per channel"). Local training therefore never makes a batch of one. All other
models take batches of any size.
"""

from __future__ import annotations

import difflib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from fedapp.errors import BadRequest
from fedapp.models.split import SplitModel

Stages = list[tuple[str, nn.Module]]
TrunkBuilder = Callable[[int, int], Stages]


@dataclass(frozen=True)
class ZooEntry:
    """How to build one trunk, and for which images.

    Parameters
    ----------
    width : int
        Number of features at the end of the trunk.
    trunk : callable
        (channels, size) -> named stages in forward order.
    min_size : int
        Smallest image side, in pixels.
    max_size : int or None
        Largest image side, in pixels; None = any.
    relu : bool
        Whether a ReLU stands between trunk and head.
    """

    width: int
    trunk: TrunkBuilder
    min_size: int
    max_size: int | None = None
    relu: bool = True

    def fits(self, size: int) -> bool:
        """Whether images of `size` x `size` pixels can be fed."""
        return self.min_size <= size and (self.max_size is None or size <= self.max_size)

    def sizes(self) -> str:
        """Say in words which image sizes fit."""
        low = f"{self.min_size}x{self.min_size}"
        if self.max_size is None:
            return f"images of {low} pixels or more"
        if self.max_size == self.min_size:
            return f"images of {low} pixels"
        return f"images of {low} to {self.max_size}x{self.max_size} pixels"


def _named(stages: Stages) -> nn.Sequential:
    return nn.Sequential(OrderedDict(stages))


def _two_convolutions(channels: int, size: int, c1: int, c2: int) -> tuple[Stages, int]:
    """Conv 5x5, pool 2, ReLU, twice, then flatten; return the stages and the number of values after flattening.

    Pooling before ReLU gives the same bits as after it (both are monotone) on a quarter of the values.
    """
    side = ((size - 4) // 2 - 4) // 2
    stages: Stages = [
        ("conv1", nn.Conv2d(channels, c1, 5)),
        ("pool1", nn.MaxPool2d(2)),
        ("relu1", nn.ReLU()),
        ("conv2", nn.Conv2d(c1, c2, 5)),
        ("pool2", nn.MaxPool2d(2)),
        ("relu2", nn.ReLU()),
        ("flatten", nn.Flatten()),
    ]
    return stages, c2 * side * side


def _cnn(channels: int, size: int) -> Stages:
    """4-layer CNN: conv 32, conv 64, fc 512 (the output layer is the fourth)."""
    stages, flat = _two_convolutions(channels, size, 32, 64)
    return [*stages, ("fc1", nn.Linear(flat, 512))]


def _fedgh(channels: int, size: int, *, c2: int, hidden: int) -> Stages:
    """FedGH's CNN-1 ... CNN-5: conv 16, conv `c2`, fc `hidden`, fc 500."""
    stages, flat = _two_convolutions(channels, size, 16, c2)
    return [*stages, ("fc1", nn.Linear(flat, hidden)), ("relu3", nn.ReLU()), ("fc2", nn.Linear(hidden, 500))]


def _moon(channels: int, size: int) -> Stages:
    """MOON's CNN: conv 6, conv 16, fc 120, fc 84, then the projection head 84 -> 84 -> 256."""
    stages, flat = _two_convolutions(channels, size, 6, 16)
    return [
        *stages,
        ("fc1", nn.Linear(flat, 120)),
        ("relu3", nn.ReLU()),
        ("fc2", nn.Linear(120, 84)),
        ("relu4", nn.ReLU()),
        ("proj1", nn.Linear(84, 84)),
        ("relu5", nn.ReLU()),
        ("proj2", nn.Linear(84, 256)),
    ]


def _digits_a(channels: int, size: int) -> Stages:
    """Strided CNN: conv 3x3/2 16, conv 3x3 32, fc 64."""
    side = -(-size // 2)
    return [
        ("conv1", nn.Conv2d(channels, 16, 3, stride=2, padding=1)),
        ("relu1", nn.ReLU()),
        ("conv2", nn.Conv2d(16, 32, 3, padding=1)),
        ("relu2", nn.ReLU()),
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(32 * side * side, 64)),
    ]


def _digits_b(channels: int, size: int) -> Stages:
    """Multi-layer perceptron: fc 128, fc 64."""
    return [
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(channels * size * size, 128)),
        ("relu1", nn.ReLU()),
        ("fc2", nn.Linear(128, 64)),
    ]


def _digits_c(channels: int, size: int) -> Stages:
    """One convolution with large windows: conv 5x5/2 32, pool 2, fc 64."""
    side = -(-size // 2) // 2
    return [
        ("conv1", nn.Conv2d(channels, 32, 5, stride=2, padding=2)),
        ("pool1", nn.MaxPool2d(2)),
        ("relu1", nn.ReLU()),
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(32 * side * side, 64)),
    ]


# Smallest side for two unpadded 5x5 convolutions with pooling: 16 -> 12 -> 6 -> 2 -> 1.
_TWO_CONV_MIN = 16

_ZOO: dict[str, ZooEntry] = {
    "cnn": ZooEntry(512, _cnn, _TWO_CONV_MIN),
    "fedgh-1": ZooEntry(500, partial(_fedgh, c2=32, hidden=2000), _TWO_CONV_MIN),
    "fedgh-2": ZooEntry(500, partial(_fedgh, c2=16, hidden=2000), _TWO_CONV_MIN),
    "fedgh-3": ZooEntry(500, partial(_fedgh, c2=32, hidden=1000), _TWO_CONV_MIN),
    "fedgh-4": ZooEntry(500, partial(_fedgh, c2=32, hidden=800), _TWO_CONV_MIN),
    "fedgh-5": ZooEntry(500, partial(_fedgh, c2=32, hidden=500), _TWO_CONV_MIN),
    "moon": ZooEntry(256, _moon, _TWO_CONV_MIN, relu=False),
    "digits-a": ZooEntry(64, _digits_a, 8, 8),
    "digits-b": ZooEntry(64, _digits_b, 8, 8),
    "digits-c": ZooEntry(64, _digits_c, 8, 8),
}

MODEL_NAMES: tuple[str, ...] = tuple(_ZOO)
"""All names that `build_model` knows, in the order of the documentation."""


def default_model(dataset_name: str) -> str:
    """Return the model that is used when none is asked for.

    Parameters
    ----------
    dataset_name : str
        Name of the data set.

    Returns
    -------
    str
        `digits-a` for the 8 x 8 digits, else `cnn`.
    """
    return "digits-a" if dataset_name == "digits" else "cnn"


def _entry(name: str) -> ZooEntry:
    if name in _ZOO:
        return _ZOO[name]
    close = difflib.get_close_matches(name.strip().lower().replace("_", "-"), MODEL_NAMES, n=1, cutoff=0.5)
    hint = f"Did you mean '{close[0]}'? " if close else ""
    raise BadRequest(f"unknown model '{name}'. {hint}Known models: {', '.join(MODEL_NAMES)}.")


def head_width(name: str) -> int:
    """Return how many features the head of a model sees.

    Models with equal widths can share a head.

    Parameters
    ----------
    name : str
        One of `MODEL_NAMES`.

    Returns
    -------
    int
        Number of features.

    Raises
    ------
    BadRequest
        If the name is unknown.
    """
    return _entry(name).width


def check_model(name: str, *, channels: int, size: int) -> None:
    """Refuse a model that does not exist or does not fit the images.

    Parameters
    ----------
    name : str
        Name to look up.
    channels : int
        Channels of an image, 1 or more.
    size : int
        Side of the square image, in pixels.

    Raises
    ------
    BadRequest
        If the name is unknown (with a suggestion), or the model does not fit (with the reason and the models that do).
    """
    entry = _entry(name)
    if channels < 1:
        raise BadRequest(f"images need at least 1 channel, got {channels}; give arrays of shape (N, H, W, C).")
    if not entry.fits(size):
        fitting = [other for other, candidate in _ZOO.items() if candidate.fits(size)]
        instead = (
            f"Models that fit: {', '.join(fitting)}." if fitting else "No model fits: use images of 8x8 pixels or more."
        )
        raise BadRequest(f"model '{name}' is made for {entry.sizes()}, this data has {size}x{size}. {instead}")


def build_model(name: str, *, num_classes: int, channels: int, size: int, seed: int) -> SplitModel:
    """Build a model with random initial values.

    The values depend on `seed` and the shapes only, and the global random state is left as it was. The head is drawn first, so
    models of different architecture with the same width, classes and seed start with the same head.

    Parameters
    ----------
    name : str
        One of `MODEL_NAMES`.
    num_classes : int
        Outputs of the head, 1 or more.
    channels : int
        Channels of an image.
    size : int
        Side of the square image, in pixels.
    seed : int
        Seed of the initial values, any int64.

    Returns
    -------
    SplitModel
        On the CPU, float32, in training mode, convolutions in channels_last memory format (same values and shapes, other strides;
        `Tensor.copy_` from contiguous arrays works as usual).

    Raises
    ------
    BadRequest
        If the name is unknown, the model does not fit the images, or there are no classes.
    """
    check_model(name, channels=channels, size=size)
    if num_classes < 1:
        raise BadRequest(f"a model needs at least 1 class, got {num_classes}; check the labels of the data.")
    entry = _ZOO[name]
    with torch.random.fork_rng(devices=[]):
        # Seeds the CPU generator alone: torch.manual_seed would also reset the generators of all GPUs.
        torch.default_generator.manual_seed(seed)
        head = nn.Linear(entry.width, num_classes)
        features = _named(entry.trunk(channels, size))
    activation = nn.ReLU() if entry.relu else nn.Identity()
    model = SplitModel(name=name, features=features, activation=activation, head=head)
    return model.to(memory_format=torch.channels_last)
