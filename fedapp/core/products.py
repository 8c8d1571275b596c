"""Matrix products in float32 at the speed of the processor.

PyTorch hands its products to MKL, which keeps to 256-bit instructions on processors that are not Intel's. The oneDNN
that PyTorch ships for convolutions uses the 512-bit ones where there are any, and multiplies twice as fast. The two
agree to the rounding of float32; on all other processors, types and sizes PyTorch's own product is taken.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORTH = 1 << 21
"""Multiply-adds from which on oneDNN's longer call pays (measured on Zen 5: 10 microseconds more a call)."""
WORTH_A_COPY = 64
"""Rows of one factor from which on a copy of the other without gaps pays (measured there: 40 would be even)."""
CPUINFO = Path("/proc/cpuinfo")


@functools.cache
def onednn_is_faster() -> bool:
    """Whether this processor has 512-bit instructions that MKL does not use, and PyTorch a oneDNN that does."""
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and CPUINFO.is_file()
        and "GenuineIntel" not in CPUINFO.read_text(encoding="utf-8", errors="replace")
    )


def _suits(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN is the faster one for ``a b^T``."""
    return (
        a.dtype == b.dtype == torch.float32
        and a.device.type == b.device.type == "cpu"
        and a.ndim == b.ndim == 2
        and min(len(a), len(b)) > 1
        and len(a) * a.shape[1] * len(b) >= WORTH
        and (_dense(a) or len(b) >= WORTH_A_COPY)
        and (_dense(b) or len(a) >= WORTH_A_COPY)
        and onednn_is_faster()
    )


def _onednn(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(_without_gaps(a), _without_gaps(b), bias, "none", [], "")
    return result


def _dense(matrix: Tensor) -> bool:
    """Whether a matrix lies in memory row by row or column by column without gaps."""
    return matrix.is_contiguous() or matrix.t().is_contiguous()


def _without_gaps(matrix: Tensor) -> Tensor:
    """Return a dense matrix, in the order of the one given: for others oneDNN takes a thousand times as long."""
    if _dense(matrix):
        return matrix
    return matrix.t().contiguous().t() if matrix.stride(0) < matrix.stride(1) else matrix.contiguous()


def matmul(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return ``a b``, without gradients.

    Parameters
    ----------
    a : (n, k).   b : (k, m); of one floating-point type.   out : (n, m), where the result goes; overlaps neither.

    Returns
    -------
    (n, m)
    """
    if not _suits(a, b.t()):
        return torch.mm(a, b, out=out)
    result = _onednn(a, b.t())
    return result if out is None else out.copy_(result)


class _Product(torch.autograd.Function):
    """``a b^T + bias``; its gradients are products of the same kind, so that it can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(a, b)
        return _onednn(a, b, bias) if _suits(a, b) else F.linear(a, b, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (g,) = gradients
        a, b = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            _product(g, b.t()) if wanted[0] else None,
            _product(g.t(), a.t()) if wanted[1] else None,
            g.sum(0) if wanted[2] else None,
        )


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    result: Tensor = _Product.apply(a, b, bias)
    return result


class Linear(nn.Linear):
    """A linear layer as in PyTorch, by the faster product; under autocast and on a GPU it is PyTorch's own."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x W^T + b``, (B, out), for ``x`` of shape (B, in)."""
        if _suits(x, self.weight) and not torch.is_autocast_enabled("cpu"):
            return _product(x, self.weight, self.bias)
        return super().forward(x)
