"""FedUV, local step. Son, Kim, Chung, Huang, Liu, FedUV: Uniformity and Variance for Heterogeneous Federated Learning,
CVPR 2024.

| symbol (paper)  | here                                                                                     |
|-----------------|------------------------------------------------------------------------------------------|
| z               | `model.represent(x)`, (B, d): what the head sees                                          |
| P               | softmax of the logits, (B, C)                                                             |
| gamma           | 1 / sqrt(C): the standard deviation of a column of the C x C identity matrix              |
| lambda, mu      | `hparams.lam`, `hparams.mu`                                                               |

Local loss:  L = L_CE + lambda L_V + mu L_U,
    L_V = mean_c max(0, gamma - std_B(P_c))              every class is predicted for some images and not for others;
    L_U = mean_{a<b} exp(-||z_a - z_b||^2 / med)         representations spread out;
with the unbiased standard deviation over the batch, and med the (lower) median of the non-zero squared distances of the
batch. No gradient flows through med. L_V needs two images, L_U two different representations; else they are 0.
"""

from __future__ import annotations

import math

from pydantic import Field

from clients.base import FedClient
from fedapp.lazy import F, Tensor, torch
from fedapp.learning.training import Batch
from fedapp.method import BaseHParams


class FedUVHParams(BaseHParams):
    """Hyperparameters of FedUV."""

    lam: float = Field(2.5, ge=0, description="lambda, weight of the variance term (paper: 2.5)")
    mu: float = Field(0.5, ge=0, description="weight of the uniformity term (paper: 0.5)")


class FedUVClient(FedClient):
    """Local training whose predictions and representations spread as they would on IID data."""

    def step_loss(self, batch: Batch) -> Tensor:
        """Return L_CE + lambda L_V + mu L_U; exactly FedAvg's loss where both weights are 0."""
        hparams = self.hparams
        if hparams.lam == 0 and hparams.mu == 0:
            return super().step_loss(batch)
        z = self.model.represent(batch.x)
        logits = self.model.classify(z)
        loss = self.cross_entropy(logits, batch.y)
        if hparams.lam > 0:
            loss = loss + hparams.lam * variance_loss(logits)
        if hparams.mu > 0:
            loss = loss + hparams.mu * uniformity_loss(z)
        return loss


def variance_loss(logits: Tensor) -> Tensor:
    """L_V: how far each class's predicted probabilities fall short of the spread they would have on IID data.

    Parameters
    ----------
    logits : Tensor, (B, C)

    Returns
    -------
    Tensor, ()
        From 0 to gamma, float32 (float64 for float64 input); 0 without gradient for a batch of one.
    """
    if len(logits) < 2:
        return logits.new_zeros(())
    # softmax in float32: in half precision the spread of small probabilities would be rounding. Autocast leaves the
    # operations below in the precision of their input.
    probabilities = F.softmax(logits, dim=1, dtype=torch.promote_types(logits.dtype, torch.float32))
    gamma = 1 / math.sqrt(logits.shape[1])
    # The root of a subnormal variance has an infinite derivative: below a deviation of 1e-6 a class counts as
    # constant. Nothing is lost: a probability that small hardly moves its logit.
    return F.relu(gamma - probabilities.var(dim=0).clamp_min(1e-12).sqrt()).mean()


def uniformity_loss(z: Tensor) -> Tensor:
    """L_U: mean Gaussian potential of all pairs of a batch, on the scale of the batch's median distance.

    Parameters
    ----------
    z : Tensor, (B, d)

    Returns
    -------
    Tensor, ()
        In [0, 1), float32 (float64 for float64 input); 0 without gradient where all rows are equal or there is one.
        Rows that are equal to each other, such as two dead representations, get no gradient from their pair.
    """
    if len(z) < 2:
        return z.new_zeros(())
    squared = F.pdist(z.to(torch.promote_types(z.dtype, torch.float32))).square()  # (B (B - 1) / 2,), every pair once
    with torch.no_grad():
        median = torch.where(squared > 0, squared, torch.nan).nanmedian()  # NaN where all rows are equal
        spread = median.isfinite()
    # No branch on `spread`: that would wait for the device.
    potential = torch.exp(-squared / torch.where(spread, median, 1.0)).mean()
    return potential * spread
