"""Gaussians of one covariance, adapted to one client: estimate, mix with the global ones, predict (pFedFDA).

McLaughlin, Su, "Personalized Federated Learning via Feature Distribution Adaptation", NeurIPS 2024. The formulas stand
in `clients/pfedfda.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedapp.core.sums import gaussian_rule
from fedapp.lazy import torch

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

GRID: Float64 = np.linspace(0, 1, 11)
"""Values of beta that are tried, 0 first: where the data do not say, the global Gaussians stay."""


class Gaussians(NamedTuple):
    """One Gaussian a class: `mean` (C, d) and the covariance that all share, `cov` (d, d)."""

    mean: Float64
    cov: Float64

    def mixed(self, other: Gaussians, beta: Sequence[float]) -> Gaussians:
        """Return beta times these and 1 - beta times the other's; beta of means and of covariances."""
        return Gaussians(*(b * own + (1 - b) * theirs for b, own, theirs in zip(beta, self, other)))


def estimate(z: Float64, y: Int64, shared: Gaussians, least: int) -> Gaussians:
    """Return means and within-class covariance of representations z (n, d) with labels y (n,).

    A class with fewer than `least` samples has the shared mean and no part in the covariance, whose divisor is n - 1.
    The identity is added to the covariance, as in the released code. It bounds the inverse, and so the weights of the
    rule, however little the representations of a class vary.
    """
    counts = np.bincount(y, minlength=len(shared.mean))
    means, known = shared.mean.copy(), counts >= least
    for c in np.flatnonzero(known):
        means[c] = z[y == c].mean(axis=0)
    apart = torch.from_numpy(z[known[y]] - means[y[known[y]]])
    if not len(apart):
        return Gaussians(means, shared.cov)
    return Gaussians(means, (apart.T @ apart).numpy() / max(len(apart) - 1, 1) + np.eye(z.shape[1]))


def rule(of: Gaussians, log_prior: Float64, eps: float) -> Float64:
    """Return the head, (C, d + 1): weights and then the bias."""
    d = of.cov.shape[0]
    level = float(np.trace(of.cov)) / d
    sigma = (1 - eps) * of.cov + eps * level * np.eye(d) if level > 0 else np.eye(d)
    return gaussian_rule(of.mean, sigma, log_prior)


def log_prior(y: Int64, num_classes: int, eps: float) -> Float64:
    """Return log p_c, (C,), of p_c proportional to n_c / n + eps."""
    share = np.bincount(y, minlength=num_classes) / len(y) + eps
    found: Float64 = np.log(share / share.sum())
    return found


def folds(y: Int64, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Return which samples are in the second of two folds: each class is halved, and so is their number."""
    order = rng.permutation(len(y))
    order = order[np.argsort(y[order], kind="stable")]
    second = np.zeros(len(y), dtype=np.bool_)
    second[order[1::2]] = True
    return second


def choose(
    z: Float64, y: Int64, shared: Gaussians, prior: Float64, eps: float, least: int, rng: np.random.Generator
) -> Float64:
    """Return beta of means and of covariances with the smallest mean cross-entropy over both held-out folds."""
    loss, second = np.zeros((len(GRID), len(GRID))), folds(y, rng)
    for held_out in (second, ~second):
        own = estimate(z[~held_out], y[~held_out], shared, least)
        means = np.vstack([own.mean, shared.mean])
        rows, labels = torch.from_numpy(z[held_out]), torch.from_numpy(y[held_out])
        for j, b in enumerate(GRID):
            # W is linear in the means: one solve for both ends, and every beta of the means between them.
            both = Gaussians(means, own.mixed(shared, (1, b)).cov)
            ends = np.split(rule(both, np.zeros(len(means)), eps)[:, :-1], 2)
            first, last = (rows @ torch.from_numpy(w).T for w in ends)
            for i, a in enumerate(GRID):
                mean = a * own.mean + (1 - a) * shared.mean
                bias = prior - 0.5 * ((a * ends[0] + (1 - a) * ends[1]) * mean).sum(axis=1)
                logits = a * first + (1 - a) * last + torch.from_numpy(bias)
                loss[i, j] -= float(torch.log_softmax(logits, dim=1).gather(1, labels[:, None]).sum())
    return GRID[list(np.unravel_index(int(np.argmin(loss)), loss.shape))]
