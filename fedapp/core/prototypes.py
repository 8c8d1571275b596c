"""Trainable prototypes: a contrastive loss on class means whose margin follows how far the classes are apart (FedTGP).

Zhang, Liu, Hua, Cao, "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for Data
and Model Heterogeneity in Federated Learning", AAAI 2024. The formulas stand in `strategies/fedtgp.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedapp.lazy import F, Tensor

Float64 = npt.NDArray[np.float64]


def margin(centres: Float64, tau: float) -> float:
    """Return delta(t) of the class centres (S, d) of a round: 0 with fewer than two of them, never above `tau`."""
    apart = np.linalg.norm(centres[:, None] - centres[None], axis=2)
    np.fill_diagonal(apart, np.inf)
    return min(float(apart.min(axis=1).max()), tau) if len(centres) > 1 else 0.0


def contrastive(means: Tensor, labels: Tensor, protos: Tensor, delta: float) -> Tensor:
    """Return L of one batch of class means.

    Parameters
    ----------
    means : (B, d).   labels : (B,) rows of `protos` that they belong to.   protos : (S, d), the candidates.
    """
    # The root has no gradient at zero, and a prototype may sit on the mean of a class's only owner.
    apart = (means[:, None] - protos[None]).square().sum(dim=2).clamp_min(1e-24).sqrt()
    return F.cross_entropy(-(apart + delta * F.one_hot(labels, len(protos))), labels)


def outputs(net: Sequence[Tensor]) -> Tensor:
    """Return hat P^c of all classes, (C, d); a net of vectors alone is its own output."""
    vectors, *layers = net
    return vectors if not layers else F.linear(F.relu(F.linear(vectors, *layers[:2])), *layers[2:])
