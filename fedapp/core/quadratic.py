"""Quadratic discriminant analysis with shrinkage, from the pooled statistics of `gaussian` (Friedman, Regularized
Discriminant Analysis, JASA 1989).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedapp.core.gaussian import ClassMoments, Float64, pack
from fedapp.lazy import torch

LEVEL = 1e-9
"""Share of the class means' mean square, or of the spread within classes, up to which a spread counts as none."""


def discriminant(
    pooled: ClassMoments, share: float, shrink: float, prior: Literal["uniform", "pooled"]
) -> tuple[Float64, Float64, Float64]:
    """Return a Gaussian for each class: log N(z; mu_c, Sigma_c) pi_c = -|U_c^T (z - mu_c)|^2 / 2 + bias_c + constant.

    ``Sigma_c = (1 - h) S_c + h S_w`` with the class's own covariance S_c, divisor n_c - 1, and that within classes S_w,
    divisor N - C_seen, which also stands for S_c where the rows of a class do not differ. Then ``(1 - g) Sigma_c +
    g tr(Sigma_c) / d I``; it is the identity where nothing is known about any spread. Then ``U_c U_c^T = Sigma_c^-1``
    with U_c upper triangular, and ``bias_c = log |U_c| + log pi_c``.

    Parameters
    ----------
    pooled : of the form ``full``.   share : h, in 0..1.   shrink : g, in 0..1.
    prior : pi_c equal for all classes with samples, or ``n_c / N``.

    Returns
    -------
    Means (C, d), U packed (C, d (d + 1) / 2) as `gaussian.pack` does, and bias (C,); zeros for a class without samples.
    """
    counts, means = pooled.counts, pooled.means
    width, seen, within = pooled.width, pooled.classes, pooled.pooled_cov()
    roots, bias = np.zeros((len(counts), width * (width + 1) // 2)), np.zeros(len(counts))
    known = float(np.trace(within)) > LEVEL * float((means[seen] ** 2).sum(axis=1).mean())
    for c in seen.tolist():
        own = pooled.cov(c)
        if counts[c] < 2 or float(np.trace(own)) <= LEVEL * float(np.trace(within)):
            own = within
        sigma = (1 - share) * own + share * within
        sigma = (1 - shrink) * sigma + shrink * float(np.trace(sigma)) / width * np.eye(width)
        upper = _inverse_root(sigma if known else np.eye(width))
        roots[c] = pack(upper)
        pi = counts[c] / counts.sum() if prior == "pooled" else 1 / len(seen)
        bias[c] = np.log(np.diag(upper)).sum() + np.log(pi)
    return means, roots, bias


def _inverse_root(sigma: Float64) -> Float64:
    """Return U, upper triangular, with ``U U^T = sigma^-1``, of a positive definite matrix."""
    lower = torch.linalg.cholesky(torch.from_numpy(sigma))
    inverse: Float64 = torch.linalg.solve_triangular(
        lower, torch.eye(len(sigma), dtype=lower.dtype), upper=False
    ).numpy()
    return np.ascontiguousarray(inverse.T)
