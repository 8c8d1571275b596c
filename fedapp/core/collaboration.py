"""Which heads help a client: each client's statistics of its representations, and the best combination (FedPAC).

Xu, Tong, Huang, "Personalized Federated Learning with Feature Alignment and Classifier Collaboration", ICLR 2023. The
formulas stand in `clients/fedpac.py` (h_i, V_i) and `strategies/fedpac.py` (alpha).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedapp.core.classmeans import shortened
from fedapp.core.simplex import minimise
from fedapp.lazy import F, Tensor

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]


class ClassStatistics(NamedTuple):
    """Moments of representations by class, float64, 0 for classes without samples.

    Attributes
    ----------
    counts : (C,).   means : (C, d).   squares : (C,), mean squared length.
    """

    counts: Tensor
    means: Tensor
    squares: Tensor


def class_statistics(z: Tensor, y: Tensor, num_classes: int) -> ClassStatistics:
    """Return the moments of representations z (n, d) with labels y (n,)."""
    z = z.double()
    # A product instead of a scattered sum: on a GPU the order of the latter changes from run to run.
    member = F.one_hot(y, num_classes).double().T
    counts = member.sum(dim=1)
    share = member / counts.clamp_min(1)[:, None]
    return ClassStatistics(counts, share @ z, share @ z.square().sum(dim=1))


def collaboration_statistics(found: ClassStatistics) -> tuple[Tensor, float]:
    """Return (h_ic) for all classes, (C, d) float64, and V_i >= 0."""
    n = found.counts.sum()
    p = found.counts / n
    v = (p * found.squares).sum() - (p.square() * found.means.square().sum(dim=1)).sum()
    return p[:, None] * found.means, max(0.0, float(v / n))


def combination(h: Float64, v: Float64) -> Float64:
    """Return how much of each head a client takes.

    Parameters
    ----------
    h : (m, C d) statistics of m clients.   v : (m,), at least 0.

    Returns
    -------
    (m, m), row i for client i; not negative, rows sum to 1.
    """
    rows = []
    for mine in h:
        apart = mine - h  # not from products of h with itself: close clients would cancel
        rows.append(minimise(np.diag(v) + apart @ apart.T))
    return np.stack(rows)


def pooled_means(given: Sequence[tuple[Float64, Array]], before: Array) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Return the global class means c, (C, d), and which classes somebody has, (C,).

    Parameters
    ----------
    given : of each client n_ic (C,) and mu_ic (C, d).   before : (C, d), the means so far: they stay where no client
        has the class.
    """
    sums, counts = np.zeros(before.shape), np.zeros(len(before))
    # Bodies are pulled to the means, so that those of one client alone, far away, would give NaN to all others.
    for (count, _), proto in zip(given, shortened([p for _, p in given]), strict=True):
        sums, counts = sums + count[:, None] * proto.astype(np.float64), counts + count
    seen = counts > 0
    means = before.copy()
    means[seen] = sums[seen] / counts[seen, None]
    return means, seen
