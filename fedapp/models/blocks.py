"""Blocks of the zoo's own networks: classes that inherit from PyTorch's (see `fedapp.lazy`)."""

from __future__ import annotations

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
