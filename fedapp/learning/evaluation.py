"""Scoring a model: one evaluator for all methods and protocols."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fedapp.data.transforms import InputSpec, normalise

BATCH = 128
"""Images per forward pass in scoring; the scores do not depend on it beyond float32 rounding."""


@dataclass(frozen=True)
class Scores:
    """Sums and counts, from which every average recomputes.

    Attributes
    ----------
    correct, total : (C,) int64 per class.
    loss_sum : sum of the samples' cross-entropies, in nats.
    """

    correct: NDArray[np.int64]
    total: NDArray[np.int64]
    loss_sum: float

    @property
    def n(self) -> int:
        """Number of samples."""
        return int(self.total.sum())

    @property
    def accuracy(self) -> float:
        """Share of correct predictions, NaN without samples."""
        return float(self.correct.sum() / self.n) if self.n else float("nan")

    @property
    def loss(self) -> float:
        """Mean cross-entropy in nats, NaN without samples."""
        return self.loss_sum / self.n if self.n else float("nan")

    @property
    def balanced(self) -> float:
        """Mean over the classes that are present of their share of correct predictions, NaN without samples."""
        present = self.total > 0
        if not present.any():
            return float("nan")
        return float((self.correct[present] / self.total[present]).mean())


@torch.inference_mode()
def batched(function: Callable[[Tensor], Tensor], x: Tensor, inputs: InputSpec, batch: int = BATCH) -> Tensor:
    """Apply a function to normalised batches of images, without gradients.

    Parameters
    ----------
    function : maps (B, C, H, W) float32 to (B, ...).
    x : (n, H, W, C) uint8, n >= 1.   inputs : how images are normalised.   batch : images per call.

    Returns
    -------
    (n, ...) the results of all batches, in the order of `x`.
    """
    parts = [function(normalise(x[i : i + batch].permute(0, 3, 1, 2), inputs)) for i in range(0, len(x), batch)]
    return torch.cat(parts)


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    inputs: InputSpec,
    num_classes: int,
    batch: int = BATCH,
    precision: str = "fp32",
) -> Scores:
    """Score a model in evaluation mode; the mode that it was in is restored.

    Parameters
    ----------
    model : maps (B, C, H, W) float32 to logits (B, num_classes).
    x : (n, H, W, C) uint8.   y : (n,) int64, values below num_classes.   inputs : how images are normalised.
    batch : images per forward pass.
    precision : as in training, `fp32`, or `bf16` for autocast of the forward pass. The loss is computed in float32.

    Returns
    -------
    Hits and samples per class, and the sum of the losses.
    """
    was_training = model.training
    # BatchNorm must use its running statistics and dropout must be off, or a score would depend on the batches.
    model.eval()
    device = y.device
    correct = torch.zeros(num_classes, dtype=torch.int64, device=device)
    total = torch.bincount(y, minlength=num_classes)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    for i in range(0, len(y), batch):
        labels = y[i : i + batch]
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
            logits = model(normalise(x[i : i + batch].permute(0, 3, 1, 2), inputs))
        logits = logits.float()
        # Added by label, not by a mask: picking rows would make the host wait for the device.
        correct.scatter_add_(0, labels, (logits.argmax(dim=1) == labels).long())
        loss += F.cross_entropy(logits, labels, reduction="sum").double()
    model.train(was_training)
    return Scores(correct.cpu().numpy(), total.cpu().numpy(), float(loss))
