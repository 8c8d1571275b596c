"""Models as a user writes them, for `tests.own_nets:NAME`; most of them are wrong in one way."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict

import torch
from torch import Tensor, nn

from fedapp.models import SplitModel


class Net(nn.Module):
    """A small network for images; its view needs images stored channel by channel."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...], features: int = 64) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.conv = nn.Conv2d(channels, 8, 3, padding=1)
        self.fc1 = nn.Linear(8 * height * width, features)
        self.fc2 = nn.Linear(features, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(x))
        x = x.view(len(x), -1)
        return self.fc2(torch.relu(self.fc1(x)))


class FixedBatch(Net):
    """Takes batches of 2 and of 8 apart from the others, each by a number that stands in the code."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(x))
        x = x.reshape(2, -1) if len(x) == 2 else x.reshape(8, -1) if len(x) == 8 else x.flatten(1)
        return self.fc2(torch.relu(self.fc1(x)))


class ByValue(Net):
    """Chooses by the values of the samples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else x * 1.0)


class Wide(Net):
    """Another trunk of another width."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__(num_classes, input_shape, features=80)


class Series(nn.Module):
    """For (C, T)."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...], kind: str) -> None:
        super().__init__()
        assert kind == "series"
        self.conv = nn.Conv1d(input_shape[0], 8, 5)
        self.out = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.conv(x)).mean(dim=2))


def digits_a(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    """The zoo's `digits-a`, with a head without bias as the last layer."""
    from fedapp.models.zoo import _ZOO

    stages = OrderedDict(_ZOO["digits-a"].stages(input_shape))
    return nn.Sequential(OrderedDict([*stages.items(), ("relu", nn.ReLU()), ("out", nn.Linear(64, num_classes))]))


def linear(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    """A model that is its head."""
    return nn.Linear(input_shape[0], num_classes, bias=False)


def split(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    trunk = nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0] * input_shape[1] * input_shape[2], 16))
    return SplitModel(name="mine", features=trunk, activation=nn.ReLU(), head=nn.Linear(16, num_classes))


class Split(SplitModel):
    """Its logits are linear in a function of its representations."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        trunk = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), 16))
        super().__init__(name="mine", features=trunk, activation=nn.ReLU(), head=nn.Linear(16, num_classes))

    def head_input(self, z: Tensor) -> Tensor:
        return 10 * nn.functional.normalize(z, dim=1)


class Gain(Split):
    """Has a parameter `gain` outside features and head."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__(num_classes, input_shape)
        self.gain = nn.Parameter(torch.ones(16))

    def head_input(self, z: Tensor) -> Tensor:
        return self.gain * z


def trained_activation(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    net = Split(num_classes, input_shape)
    net.activation = nn.PReLU(16)  # type: ignore[assignment]
    return net


def cosine_head(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    net = Split(num_classes, input_shape)
    net.head = nn.utils.parametrizations.weight_norm(net.head)
    return net


def tied_split(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    net = Split(num_classes, input_shape)
    net.features.add_module("again", nn.Linear(16, num_classes))
    net.features.add_module("back", nn.Linear(num_classes, 16))
    net.features.again.weight = net.head.weight  # type: ignore[union-attr]
    return net


class Tied(Net):
    """Its body has the weight of the head."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__(num_classes, input_shape)
        self.side = nn.Linear(64, num_classes)
        self.side.weight = self.fc2.weight


class Masked(Net):
    """Holds a random mask: in a buffer, or where `persistent` is none, as an attribute."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...], persistent: bool | None = True) -> None:
        super().__init__(num_classes, input_shape)
        mask = (torch.rand(input_shape) > 0.5).float()
        if persistent is None:
            self.mask = mask
        else:
            self.register_buffer("mask", mask, persistent)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.mask)


class Normed(Net):
    """Normalises by statistics alone, and leaves out pixels by a mask of whole numbers."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__(num_classes, input_shape)
        self.bn = nn.BatchNorm2d(8, affine=False)
        self.register_buffer("mask", torch.ones(input_shape, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.conv(x * self.mask))).flatten(1)
        return self.fc2(torch.relu(self.fc1(x)))


class Keeps(Net):
    """Keeps a table of its first forward."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, 64, device=x.device)
        return self.fc2(torch.relu(self.fc1(torch.relu(self.conv(x)).flatten(1))) * self.table)


class Squeezed(Net):
    """Fails on a batch of one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze()


class Half(Net):
    """Computes a part in another dtype, and holds a buffer and a parameter of it."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...], dtype: str) -> None:
        super().__init__(num_classes, input_shape)
        self.register_buffer("kept", torch.full((3,), 1.001, dtype=getattr(torch, dtype)))
        self.scale = nn.Parameter(torch.full((64,), 1.5, dtype=getattr(torch, dtype)))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.fc1(torch.relu(self.conv(x)).flatten(1)))
        return self.fc2((x * self.scale).float())


class Complex(Net):
    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__(num_classes, input_shape)
        self.phase = nn.Parameter(torch.ones(64, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.fc1(torch.relu(self.conv(x)).flatten(1)))
        return self.fc2((x * self.phase).real)


class Mask(Net):
    """Holds minus infinity in a buffer, as a mask of an attention does."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...], persistent: bool = True) -> None:
        super().__init__(num_classes, input_shape)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1), persistent)


def lazy() -> nn.Module:
    return nn.Sequential(
        nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(12), nn.LazyLinear(10)
    )


class LazyDeviation(nn.Module):
    """Divides rows by their deviation before a lazy layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.LazyLinear(10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1) / x.flatten(1).std(dim=1, keepdim=True))


class OldNorm(Net):
    """Its layer holds a tensor that PyTorch does not copy."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__(num_classes, input_shape)
        self.fc1 = nn.utils.weight_norm(self.fc1)


class Softmax(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(dim=1)


class Tuple(Net):
    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x), x) if self.training else super().forward(x)  # type: ignore[return-value]


class Noise(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn_like(x))


class Nan(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.nan


class Reads(Net):
    """Multiplies by the head's weight without calling the head."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.fc1(torch.relu(self.conv(x)).reshape(len(x), -1)))
        return nn.functional.linear(x, self.fc2.weight, self.fc2.bias)


class Random(Net):
    """Its initial values do not come from the seed."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__(num_classes, input_shape)
        nn.init.normal_(self.fc1.weight, generator=torch.Generator().manual_seed(torch.seed()))


class Locked(Net):
    """It holds what cannot be copied."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__(num_classes, input_shape)
        self.lock = threading.Lock()


def leaves() -> nn.Module:
    raise SystemExit(3)


def seven() -> nn.Module:
    return Net(7, (1, 8, 8))


def headless(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, num_classes, 8), nn.Flatten())


def nothing(num_classes: int) -> None:
    return None


text = "no function"


def pooled_body() -> nn.Module:
    """A body of pictures without a head: the mean over positions of a convolution."""
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
