"""Virtual features: draws from the Gaussians that stand for the classes (CCVR).

Luo et al., "No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data", NeurIPS 2021,
arXiv:2106.05001, Section 4: Algorithm 1 re-trains the head on G_c, M_c draws from ``N(mu_c, Sigma_c)`` for every class;
Figure 6 asks how far the Gaussians lie apart. The statistics come from `fedapp.core.gaussian`.

Covariances are often singular: a class may have fewer samples than features, and a linear layer before the head makes
features that are a linear map of fewer numbers. Hence a covariance is factorised here by rules that never fail, and in
float64, in which rounding stays far below the smallest pivot that is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedapp.core.gaussian import ClassMoments
from fedapp.lazy import blas, torch

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

ISOTROPIC = 1e-6
"""Variance of a class of one sample when no class has two, so that nothing is known about any spread."""
EIGH_LIMIT = 512
"""Up to this width a singular covariance is factorised by its eigenvalues, above it by Cholesky with jitter."""
PIVOT_LIMIT = 1e-10
"""Smallest pivot, relative to the mean variance, with which a covariance counts as positive definite."""
DRAWS = 256
"""Virtual features that are drawn, multiplied and rounded at a time."""
STREAM = 7919
"""Keeps the generators of virtual features apart from all others made from the same seed."""


def gaussian_of(statistics: ClassMoments, c: int, shrinkage: float = 0.0) -> tuple[Float64, Float64]:
    """Return mean (d,) and covariance (shaped as in `ClassMoments.cov`) of the Gaussian that stands for class c.

    Eq. 4 assumes ``N_c >= 2``. A class of one sample takes the within-class covariance, or, if no class has two
    samples, ``ISOTROPIC`` times the identity.

    Parameters
    ----------
    statistics : ClassMoments
        Pooled statistics.
    c : int
        A class with samples.
    shrinkage : float
        g in 0..1: the covariance is ``(1 - g) Sigma_c + g Sigma_w``, Sigma_w the within-class covariance.
    """
    cov, width = statistics.cov(c), statistics.width
    if statistics.degrees == 0:
        cov = ISOTROPIC * (np.ones(width) if statistics.form == "diag" else np.eye(width))
    elif statistics.counts[c] == 1 and statistics.form != "pooled":
        cov = statistics.pooled_cov()
    if shrinkage:
        cov = (1.0 - shrinkage) * cov + shrinkage * statistics.pooled_cov()
    return statistics.means[c], cov


@dataclass(frozen=True)
class Factor:
    """A matrix F with ``F F^T = Sigma + jitter I``.

    Attributes
    ----------
    matrix : ndarray, (d, d), or (d,) for a diagonal covariance, float64
        F.
    jitter : float
        What had to be added to the diagonal; 0 unless a wide covariance was singular.
    triangular : bool
        Whether F is lower triangular.
    """

    matrix: Float64
    jitter: float
    triangular: bool


def factorise(cov: Float64) -> Factor:
    """Return a factor of a covariance that may be singular, (d, d) or in the diagonal form (d,).

    A positive definite covariance has its Cholesky factor. A singular one (fewer samples than features, or features
    that are a linear map of fewer) has the symmetric root ``U max(l, 0)^(1/2) U^T`` up to d = 512: it is exact, and the
    same whatever signs and rotations the eigenvectors come in. Wider ones get a jitter of 1e-8, 1e-7, ... times the
    mean variance on the diagonal until Cholesky succeeds, and the symmetric root if none up to 1e-2 does.

    Raises
    ------
    ValueError
        The covariance has values that are not finite.
    """
    if not np.isfinite(cov).all():
        raise ValueError("the covariance has values that are not finite")
    if cov.ndim == 1:
        return Factor(np.sqrt(np.maximum(cov, 0.0)), 0.0, False)
    width = cov.shape[0]
    scale = float(np.trace(cov)) / width
    if scale <= 0.0:
        return Factor(np.zeros_like(cov), 0.0, True)
    for jitter in (0.0, *(scale * 10.0**power for power in range(-8, -1) if width > EIGH_LIMIT)):
        root = _cholesky(cov, jitter, PIVOT_LIMIT * scale)
        if root is not None:
            return Factor(root, jitter, True)
    values, vectors = torch.linalg.eigh(torch.from_numpy(cov))
    return Factor((vectors * values.clamp_min(0.0).sqrt() @ vectors.T).numpy(), 0.0, False)


def _cholesky(sigma: Float64, jitter: float, smallest: float) -> Float64 | None:
    """Return the lower Cholesky factor, or None if a pivot is so small that rounding could have made it from zero."""
    shifted = torch.from_numpy(sigma + jitter * np.eye(sigma.shape[0]) if jitter else sigma)
    root, info = torch.linalg.cholesky_ex(shifted)
    if int(info) != 0 or float(root.diagonal().min()) ** 2 <= smallest:
        return None
    lower: Float64 = root.numpy()
    return lower


def draw(mean: Float64, factor: Factor, eps: Float64) -> Float64:
    """Return ``mean + F eps`` for every row of standard normal numbers ``eps``, (m, d) float64."""
    middle, rows = torch.from_numpy(mean), torch.from_numpy(eps)
    if factor.matrix.ndim == 1:
        drawn = middle + rows * torch.from_numpy(factor.matrix)
    elif factor.triangular:
        # eps F^T without the zeros above F's diagonal; as with dsyrk, the bits do not depend on BLAS's threads.
        drawn = torch.from_numpy(blas.dtrmm(1.0, factor.matrix.T, eps.T, side=0, lower=0, trans_a=1).T) + middle
    else:
        drawn = torch.addmm(middle, rows, torch.from_numpy(factor.matrix).T)
    result: Float64 = drawn.numpy()
    return result


def sample(mean: Float64, factor: Factor, m: int, seed: int, label: int) -> npt.NDArray[np.float32]:
    """Return m draws of the Gaussian that stands for one class.

    Every class has its own generator, made from ``seed`` and ``label``: a larger m extends the same stream, and no
    class depends on how many draws another one has.

    Parameters
    ----------
    mean : ndarray, (d,), float64
        Mean.
    factor : Factor
        Of the covariance, from `factorise`.
    m : int
        Number of draws.
    seed, label : int
        Seed of the run and class, both not negative.

    Returns
    -------
    ndarray, (m, d), float32
        Rounded from float64 after drawing.
    """
    generator = np.random.default_rng([seed, STREAM, label])
    drawn = np.empty((m, mean.size), dtype=np.float32)
    for start in range(0, m, DRAWS):
        rows = drawn[start : start + DRAWS]
        rows[:] = draw(mean, factor, generator.standard_normal(rows.shape))
    return drawn


def allot(counts: Int64, samples: int, mode: Literal["fixed", "proportional"] = "fixed") -> Int64:
    """Return M_c, how many virtual features each class gets (Section 4).

    Parameters
    ----------
    counts : ndarray, (C,), integer
        N_c; classes without samples get none.
    samples : int
        M, mean number over the classes with samples.
    mode : {"fixed", "proportional"}
        M for every class, or shares of the same total as ``N_c / |D|``, rounded, and at least 1.

    Returns
    -------
    ndarray, (C,), int64
    """
    seen = counts > 0
    if mode == "fixed":
        return np.where(seen, samples, 0)
    share = counts / max(1, counts.sum())
    return np.where(seen, np.maximum(1, np.rint(samples * seen.sum() * share)), 0).astype(np.int64)


def virtual_features(
    statistics: ClassMoments, per_class: int | Sequence[int] | Int64, seed: int, shrinkage: float = 0.0
) -> tuple[npt.NDArray[np.float32], Int64, dict[int, float]]:
    """Return the union of all G_c: virtual features drawn from the Gaussians of all classes (Algorithm 1).

    Parameters
    ----------
    statistics : ClassMoments
        Pooled statistics.
    per_class : int, or (C,) of int
        M_c; classes without samples get none.
    seed : int
        Seed of the run.
    shrinkage : float
        As in `gaussian_of`.

    Returns
    -------
    features : ndarray, (S, d), float32
        Sorted by class. Memory is ``4 S d`` bytes and one d x d matrix at a time.
    labels : ndarray, (S,), int64
    jitter : dict of int to float
        Classes with a `Factor.jitter` that is not 0.
    """
    draws = np.broadcast_to(np.asarray(per_class, dtype=np.int64), (statistics.num_classes,))
    classes = statistics.classes
    labels = np.repeat(classes, draws[classes])
    features = np.empty((labels.size, statistics.width), dtype=np.float32)
    jitter: dict[int, float] = {}
    factor: Factor | None = None
    end = 0
    for c in classes.tolist():
        mean, cov = gaussian_of(statistics, c, shrinkage)
        if factor is None or statistics.form != "pooled":  # in the pooled form all classes share one factor
            factor = factorise(cov)
        if factor.jitter:
            jitter[c] = factor.jitter
        start, end = end, end + int(draws[c])
        features[start:end] = sample(mean, factor, int(draws[c]), seed, c)
    return features, labels, jitter
