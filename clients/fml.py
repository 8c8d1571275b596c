"""FML, local step. Shen et al., Federated Mutual Learning, 2020.

| symbol (paper)     | here                                                                  |
|--------------------|-----------------------------------------------------------------------|
| local model, p_l   | `self.model`, private, and its softmax                                |
| meme model, p_m    | `self.small`, a fork of the server's model, and its softmax           |
| alpha, beta        | `hparams.alpha`, `hparams.beta`                                       |

Per batch (Eqs. 4 and 5), where each loss takes the other model's prediction as a constant:
    L_local = alpha CE(z_l, y) + (1 - alpha) KL(p_m || p_l)
    L_meme  = beta  CE(z_m, y) + (1 - beta)  KL(p_l || p_m)
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from clients.mutual import Loss, MutualClient, MutualHParams, prefixed, small_arrays
from fedapp.core.distillation import Reduction, divergence
from fedapp.lazy import F, Tensor
from fedapp.learning.training import Batch
from fedapp.method import Arrays, Payload


class FMLHParams(MutualHParams):
    """Hyperparameters of FML."""

    alpha: float = Field(
        0.5, ge=0, le=1, description="weight of the labels for the private model (paper: 0.5); 1 = alone"
    )
    beta: float = Field(0.5, ge=0, le=1, description="weight of the labels for the meme (paper: 0.5)")
    divergence: Reduction = Field(
        "batch", description="divergence averaged over the batch (authors' code), or over batch and classes (libraries)"
    )
    average: Literal["plain", "samples"] = Field(
        "plain", description="mean of the memes: plain (authors' code), or weighted by samples as in FedAvg"
    )


def mutual_losses(
    z_l: Tensor, z_m: Tensor, y: Tensor, hparams: FMLHParams, cross_entropy: Loss | None = None
) -> tuple[Tensor, Tensor]:
    """Return (L_local, L_meme) of one batch.

    Parameters
    ----------
    z_l, z_m : (B, C) logits of the private model and of the meme.   y : (B,) labels.
    cross_entropy : CE, of logits and labels; None = PyTorch's.
    """
    cross_entropy = cross_entropy or F.cross_entropy
    a, b, reduction = hparams.alpha, hparams.beta, hparams.divergence
    local, meme = cross_entropy(z_l, y), cross_entropy(z_m, y)
    # `divergence` takes its first argument as a constant, so each loss moves one model alone.
    return (
        a * local + (1 - a) * divergence(z_m, z_l, reduction=reduction),  # Eq. 4
        b * meme + (1 - b) * divergence(z_l, z_m, reduction=reduction),  # Eq. 5
    )


class FMLClient(MutualClient):
    """Trains private model and meme by mutual learning, and returns the meme."""

    def step_loss(self, batch: Batch) -> Tensor:
        """Return L_local + L_meme. No parameter has a gradient from both, so this is one step on each."""
        z_l, z_m = self.model(batch.x), self.small(batch.x)
        local, meme = mutual_losses(z_l, z_m, batch.y, self.hparams, self.cross_entropy)
        return local + meme

    def after_training(self, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Return the meme under `small/`."""
        return prefixed(small_arrays(self.small)), {}
