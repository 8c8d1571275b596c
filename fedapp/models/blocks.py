"""Blocks of the zoo's own networks: classes that inherit from PyTorch's (see `fedapp.lazy`)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedapp.core.fourier import STEP, cosine
from fedapp.lazy import Tensor, nn, torch


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with group normalisation and a 1x1 shortcut; halves the side.

    Group normalisation has no running statistics, so nothing depends on the size or the make-up of a batch.

    Parameters
    ----------
    c_in, c_out : channels before and after; `c_out` is a multiple of 8.
    """

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(8, c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(8, c_out)
        self.shortcut = nn.Conv2d(c_in, c_out, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, c_in, s, s) to (B, c_out, ceil(s/2), ceil(s/2))."""
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class RandomFeatures(nn.Module):
    """sqrt(2 / D) cos(2 pi (z W + u)) of standardised features z, (B, d) to (B, D), with the same bits everywhere.

    Input and output are multiples of 2^-16. No array of it is stored or sent.

    Parameters
    ----------
    w : W (d, D), in turns.   u : (D,), in turns; both float64.
    """

    w: Tensor
    u: Tensor

    def __init__(self, w: NDArray[np.float64], u: NDArray[np.float64]) -> None:
        super().__init__()
        self.register_buffer("w", torch.from_numpy(w), persistent=False)
        self.register_buffer("u", torch.from_numpy(u), persistent=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> RandomFeatures:
        """Return this very layer, since nothing changes it."""
        return self

    def forward(self, z: Tensor) -> Tensor:
        """Map standardised features (B, d) to random ones (B, D) float32."""
        exact = (z.double() / STEP).round() * STEP
        found = math.sqrt(2 / len(self.u)) * cosine(exact @ self.w + self.u)
        return ((found / STEP).round() * STEP).float()
