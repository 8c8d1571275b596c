"""Divergences between soft predictions, for methods that distil.

Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network", 2015; Zhang et al., "Deep Mutual Learning",
CVPR 2018. Teachers are constants: no gradient flows into them. Everything is computed in float32 at least.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedapp.lazy import F, Tensor

Reduction: TypeAlias = Literal["batch", "mean"]
"""`batch`: sum over classes, mean over the batch, as the divergence is defined. `mean`: mean over batch and classes, C
times smaller: the default of `KLDivLoss`, and so of several published codes."""


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.itemsize >= 4 else tensor.float()


def problem_of(rows: NDArray[Any]) -> str | None:
    """Return why rows (n, C) are not probabilities, or None; half precision on the wire keeps about three digits."""
    fits = bool((rows >= 0).all() and (np.abs(rows.sum(axis=1) - 1) <= 1e-2).all())
    return None if fits else "are not probabilities: rows must be non-negative and sum to 1"


def soften(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return `softmax(logits / temperature)`, (B, C)."""
    return F.softmax(_wide(logits) / temperature, dim=1)


def divergence_to(target: Tensor, logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return `KL(target || softmax(logits / temperature))` in nats.

    Parameters
    ----------
    target : Tensor, (B, C)
        Probabilities, rows that sum to 1; zeros are allowed.
    logits : Tensor, (B, C)
        Of the student; only they get a gradient.
    temperature : float
        Positive; divides the logits.
    """
    student = F.log_softmax(_wide(logits) / temperature, dim=1)
    return F.kl_div(student, target.detach(), reduction="batchmean")


def divergence(teacher: Tensor, logits: Tensor, reduction: Reduction = "batch") -> Tensor:
    """Return `KL(softmax(teacher) || softmax(logits))` in nats; both (B, C) logits."""
    student, target = F.log_softmax(_wide(logits), dim=1), F.log_softmax(_wide(teacher.detach()), dim=1)
    found = F.kl_div(student, target, reduction="batchmean", log_target=True)
    return found if reduction == "batch" else found / logits.shape[1]
