"""Matrix products in float32 at the speed of the processor.

PyTorch multiplies by MKL, which uses only 256-bit instructions on processors that are not Intel's. The oneDNN that
PyTorch ships for convolutions uses 512-bit instructions where there are any, and multiplies twice as fast. The two
agree to the rounding of float32. On other processors, and for other types and sizes, PyTorch's own product is taken.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedapp import process

WORTH = 1 << 21
"""Multiply-adds from which oneDNN is faster in spite of its longer call (on Zen 5: 10 microseconds longer)."""
WORTH_A_COPY = 64
"""Rows of one factor from which it pays to copy the other without gaps (on Zen 5 the two are even at 40 rows)."""


@functools.cache
def onednn_is_faster() -> bool:
    """Return whether this processor has 512-bit instructions that MKL does not use, and PyTorch a oneDNN that does."""
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and process.cpu_facts().get("vendor_id", "GenuineIntel") != "GenuineIntel"
    )


def _suits(a: Tensor, b: Tensor) -> bool:
    """Return whether oneDNN is faster for ``a b^T``."""
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
    """Return whether a matrix lies in memory row by row or column by column without gaps."""
    return matrix.is_contiguous() or matrix.t().is_contiguous()


def _without_gaps(matrix: Tensor) -> Tensor:
    """Return a dense matrix in the same order: with gaps oneDNN has no kernel and takes a thousand times as long."""
    if _dense(matrix):
        return matrix
    return matrix.t().contiguous().t() if matrix.stride(0) < matrix.stride(1) else matrix.contiguous()


def matmul(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return ``a b``, (n, m), without gradients.

    Parameters
    ----------
    a, b : Tensor, (n, k) and (k, m)
        Of one floating-point type.
    out : Tensor, (n, m), optional
        Where the result is written; must not overlap a or b.
    """
    if not _suits(a, b.t()):
        return torch.mm(a, b, out=out)
    result = _onednn(a, b.t())
    return result if out is None else out.copy_(result)


class _Product(torch.autograd.Function):
    """``a b^T + bias``. Its gradients are products of the same kind, so it can be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(a, b)
        return _onednn(a, b, bias) if _suits(a, b) else F.linear(a, b, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (g,) = gradients
        a, b = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (  # of y = a b^T + bias: dL/da = g b, dL/db = g^T a, dL/dbias = the sum of g over rows
            _product(g, b.t()) if wanted[0] else None,
            _product(g.t(), a.t()) if wanted[1] else None,
            g.sum(0) if wanted[2] else None,
        )


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    result: Tensor = _Product.apply(a, b, bias)
    return result


class Linear(nn.Linear):
    """PyTorch's linear layer with the faster product; under autocast, on a GPU and compiled it is PyTorch's own."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x W^T + b``, (B, out), for ``x`` of shape (B, in)."""
        # PyTorch's compiler takes oneDNN's product for weights alone that do not change.
        compiling = torch.compiler.is_compiling()
        if not compiling and _suits(x, self.weight) and not torch.is_autocast_enabled("cpu"):
            return _product(x, self.weight, self.bias)
        return super().forward(x)
