"""Differential privacy of what a client sends: bounds, one Gaussian mechanism, and what its releases add up to.

Two data sets are neighbours if one holds one unit more than the other: one training image (`example`), or all of a
client (`client`). With feature vectors ``||z|| <= R`` one image changes

=============================================  ============================================
class counts N                                 by 1
class sums ``S_c = sum z``                     by R
second moments ``M = sum z z^T`` (Frobenius)   by R^2
all three as one vector ``(kappa N, S, beta M)``  by ``sqrt(kappa^2 + R^2 + beta^2 R^4)``
a client's change of the model, clipped to C   by C (the whole client)
=============================================  ============================================

and one Gaussian on the whole vector covers all parts (Dwork, Roth 2014; Ryffel et al. 2022 for the joint vector). The
off-diagonals of M are packed once and times ``sqrt(2)``, so that the packed norm is the Frobenius norm.

The noise is discrete (`core.noise`). Its Renyi divergences are at most those of the Gaussian (Canonne, Kamath, Steinke
2020, Section 2), so ``epsilon`` here follows from these: releases with multipliers z_i of the sensitivity add up to one
with ``1 / z^2 = sum 1 / z_i^2``.

In a secure sum each client adds a share of the noise. Discrete Gaussians with deviations s and t
add up to the one with ``s^2 + t^2``, but for a factor in each probability: the sum of ``exp(-(x - c)^2 / (2 r^2))``
over whole x, next to its mean over c, where ``1 / r^2 = 1 / s^2 + 1 / t^2``. By Poisson's formula it is within
``1 +- 5 exp(-2 pi^2 r^2)`` (Kairouz, Liu, Steinke, The Distributed Discrete Gaussian Mechanism, ICML 2021). Each share
has a deviation of 2^24 steps, so what the factors of all numbers and clients add to epsilon is below ``exp(-2^50)``.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedapp.core.noise import STEPS, Source, discrete_gaussian, system
from fedapp.errors import Impossible
from fedapp.lazy import torch

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]
Squares = Literal["none", "all", "classes"]

BOUND = 1.0
"""R: the norm that features are brought to."""
LARGEST = float(1 << 52)
"""Largest value in steps of the grid; whole numbers below it are exact in float64."""


@dataclass(frozen=True)
class Privacy:
    """What a run states.

    Attributes
    ----------
    unit : `example` or `client`.   epsilon, delta : what a client's ledger of releases may add up to.
    noise : z, standard deviation of the noise in multiples of the sensitivity.
    bound : C, the norm that a client's update is clipped to; for examples features have the norm `BOUND`.
    test : noise of a seeded generator, which protects no one.
    summed : number of clients in a secure sum; 0 = the server sees each release.
    share : variance of this client's noise as a share of the sum's, whose standard deviation `noise` then is.
    sgd : the release is a model trained by steps with noise (DP-SGD); `noise` is that of a step, 0 for as
        much as the client's own training needs.
    rounds, asked : with `sgd`: trainings of the run, and the epsilon that they are to spend together if `noise` is 0.
    """

    unit: Literal["example", "client"]
    epsilon: float
    delta: float
    noise: float
    bound: float = BOUND
    test: bool = False
    summed: int = 0
    share: float = 1.0
    sgd: bool = False
    rounds: int = 1
    asked: float = math.inf

    @property
    def own(self) -> float:
        """Standard deviation of the noise that one client adds, in multiples of the sensitivity."""
        return self.noise * math.sqrt(self.share)

    @property
    def largest(self) -> float:
        """Largest value, in steps of the grid, with which a sum modulo 2^64 does not wrap, noise included."""
        return min(LARGEST, 2.0**62 / max(1, self.summed))


# What many releases add up to ---------------------------------------------------------------------


def composed(noises: Iterable[float]) -> float:
    """Return z of the one release that Gaussian releases with these multipliers add up to; infinite without any."""
    total = math.fsum(1 / z**2 for z in noises)
    return 1 / math.sqrt(total) if total else math.inf


# Sums over drawn images are only bounded at whole orders: the binomial formula needs no density there, so it also holds
# for the discrete Gaussian. Renyi divergences of the Gaussian itself bound those of the discrete one at every order.
_WHOLE = (*range(2, 65), *sorted({round(64 * 1.15**k) for k in range(1, 25)}))
_ORDERS = tuple(1 + np.geomspace(0.02, 1e5, 600))
_LEAST = 0.05
"""Smallest noise multiplier that a budget is turned into."""


@dataclass(frozen=True)
class Steps:
    """Steps of DP-SGD: each releases a sum, with noise, over images that it draws. Neighbours have the same rate.

    Attributes
    ----------
    noise : z.   rate : q, probability with which a step draws each image, independently.   count : T.
    """

    noise: float
    rate: float
    count: int


def epsilon_of(noise: float, delta: float, steps: Iterable[Steps] = ()) -> float:
    """Return epsilon of one release with that noise multiplier (infinite: none) and of steps of DP-SGD, together.

    Renyi divergences add up (of drawn images: Mironov, Talwar, Zhang 2019) and become epsilon (Canonne, Kamath, Steinke
    2020, Proposition 12). `dp_accounting` computes both.
    """
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.rdp import RdpAccountant

    counts: Counter[tuple[float, float]] = Counter()
    for s in steps:
        counts[s.noise, s.rate] += s.count
    if math.isinf(noise) and not counts:
        return 0.0
    accountant = RdpAccountant(_WHOLE if any(rate < 1 for _, rate in counts) else _ORDERS)
    if not math.isinf(noise):
        accountant.compose(GaussianDpEvent(noise))
    for (z, rate), count in counts.items():
        accountant.compose(SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(z)), count))
    return float(accountant.get_epsilon(delta))


@functools.lru_cache(maxsize=256)
def noise_for(epsilon: float, delta: float, count: int, rate: float = 1.0) -> float:
    """Return the noise multiplier with which that many releases have `epsilon` together, rounded up to 4 digits.

    Parameters
    ----------
    rate : probability with which each release draws an image; 1 = it is of all images.

    Raises
    ------
    ValueError : no noise is enough.
    """
    from dp_accounting import (
        GaussianDpEvent,
        LowerEndpointAndGuess,
        PoissonSampledDpEvent,
        SelfComposedDpEvent,
        calibrate_dp_mechanism,
    )
    from dp_accounting.mechanism_calibration import NoBracketIntervalFoundError
    from dp_accounting.rdp import RdpAccountant

    if epsilon_of(math.inf, delta, [Steps(_LEAST, rate, count)]) <= epsilon:
        return _LEAST
    try:
        noise = calibrate_dp_mechanism(
            lambda: RdpAccountant(_WHOLE if rate < 1 else _ORDERS),
            lambda z: SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(z)), count),
            epsilon,
            delta,
            LowerEndpointAndGuess(_LEAST, 1.0),
            tol=1e-5,
        )
    except NoBracketIntervalFoundError as e:
        raise ValueError(f"no noise gives {count} releases epsilon = {epsilon:g} at delta = {delta:g}") from e
    return math.ceil(float(noise) * 1e4) / 1e4


# The mechanism ------------------------------------------------------------------------------------


def clip_rows(rows: Array | torch.Tensor, bound: float) -> Float64:
    """Return rows (n, d), those that are longer than `bound` scaled down to it; rows that are not finite become 0."""
    given = rows.detach().cpu().numpy() if isinstance(rows, torch.Tensor) else rows
    wide = given.astype(np.float64)
    wide[~np.isfinite(wide).all(axis=1)] = 0.0
    with np.errstate(over="ignore"):  # an infinite norm makes the row 0
        norms = np.linalg.norm(wide, axis=1, keepdims=True)
    clipped: Float64 = wide * np.minimum(1.0, bound / np.maximum(norms, np.finfo(np.float64).tiny))
    return clipped


def step_of(size: int, sensitivity: float, noise: float) -> float:
    """Return the step of the grid for `size` numbers: the noise has `STEPS` of them as its standard deviation.

    Rounding to the grid moves two neighbours apart by at most one step in each coordinate, so by ``sqrt(size)`` steps.
    The noise covers this and as much again, for the errors of the sums and of the division. With z as noise multiplier:
    ``STEPS step = z (sensitivity + 2 sqrt(size) step)``.
    """
    left = STEPS - 2 * noise * math.sqrt(size)
    if left < STEPS / 2:
        raise ValueError(f"noise of {noise:g} times the sensitivity on {size} numbers needs a finer grid")
    return noise * sensitivity / left


def noised(values: Float64, sensitivity: float, noise: float, source: Source = system) -> Float64:
    """Return values on a grid, with discrete Gaussian noise on each.

    Parameters
    ----------
    values : (m,) float64, all that one unit changes, as one vector.
    sensitivity : largest Euclidean distance between the vectors of two neighbours.
    noise : z; the standard deviation is z times the sensitivity, and a little more for the grid.
    source : of random bytes.

    Raises
    ------
    ValueError : values that are not finite, or too large for the grid.
    """
    steps, step = noised_steps(values, sensitivity, noise, source)
    return steps * step


def noised_steps(
    values: Float64, sensitivity: float, noise: float, source: Source = system, largest: float = LARGEST
) -> tuple[Float64, float]:
    """Return what `noised` does as whole numbers of steps of the grid, and the step.

    Parameters
    ----------
    largest : value in steps; the noise itself is below 2^32 steps.
    """
    step = step_of(len(values), sensitivity, noise)
    return on_grid(values, step, largest) + discrete_gaussian(len(values), source), step


def on_grid(values: Float64, step: float, largest: float = LARGEST) -> Float64:
    """Return the nearest whole numbers of steps.

    Raises
    ------
    ValueError : values that are not finite, or that are not below `largest` steps.
    """
    steps: Float64 = np.rint(values / step)
    if not (np.abs(steps) < largest).all():
        raise ValueError("the release has values that are not finite, or too large compared with its noise")
    return steps


@dataclass(frozen=True)
class Joint:
    """Counts, sums and second moments as one vector ``(kappa N, S, beta M)``.

    Attributes
    ----------
    classes, width : C and d.
    squares : `none` of them, one matrix of `all` classes, or one for each of the `classes`.
    kappa, beta : weights of counts and of second moments: a larger one takes noise from this part and gives it to the
        others. 0 for kappa = ``R d^(-1/4)``, with which the error of the means is least. With beta = 1/2 second moments
        add a tenth to the noise on the sums.
    bound : R.
    """

    classes: int
    width: int
    squares: Squares = "none"
    kappa: float = 0.0
    beta: float = 0.5
    bound: float = BOUND

    @property
    def weight(self) -> float:
        """The weight of the counts."""
        return self.kappa or self.bound * self.width**-0.25

    @property
    def sensitivity(self) -> float:
        """How far one image moves the vector."""
        squares = 0.0 if self.squares == "none" else (self.beta * self.bound**2) ** 2
        return math.sqrt(self.weight**2 + self.bound**2 + squares)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parts: `count`, `sum` and `square`, upper triangles."""
        triangle = self.width * (self.width + 1) // 2
        squares: dict[Squares, dict[str, tuple[int, ...]]] = {
            "none": {}, "all": {"square": (triangle,)}, "classes": {"square": (self.classes, triangle)},
        }  # fmt: skip
        return {"count": (self.classes,), "sum": (self.classes, self.width), **squares[self.squares]}

    @property
    def size(self) -> int:
        """Numbers in the vector."""
        return sum(map(math.prod, self.shapes.values()))

    @property
    def weights(self) -> dict[str, Float64]:
        """By what each part is multiplied."""
        square = np.full((self.width, self.width), math.sqrt(2) * self.beta)
        np.fill_diagonal(square, self.beta)
        found = {"count": np.array(self.weight), "sum": np.array(1.0), "square": square[np.triu_indices(self.width)]}
        return {name: found[name] for name in self.shapes}

    def vector(self, arrays: Mapping[str, Array]) -> Float64:
        """Return the parts as one vector."""
        weights = self.weights
        return np.concatenate([(arrays[n].astype(np.float64) * weights[n]).ravel() for n in self.shapes])

    def length(self, arrays: Mapping[str, Array]) -> float:
        """Return the norm of the vector: how much the parts weigh in a sum."""
        return float(np.linalg.norm(self.vector(arrays)))

    def parts(self, vector: Float64) -> dict[str, Array]:
        """Return the parts of a vector, by name."""
        found, start, weights = {}, 0, self.weights
        for name, shape in self.shapes.items():
            end = start + math.prod(shape)
            found[name] = vector[start:end].reshape(shape) / weights[name]
            start = end
        return found

    def deviations(self, noise: float) -> dict[str, float]:
        """Return the standard deviation of the noise on each part; of squares that on the diagonal."""
        sigma = STEPS * step_of(self.size, self.sensitivity, noise)
        return {n: sigma / {"count": self.weight, "sum": 1.0, "square": self.beta}[n] for n in self.shapes}

    def problem_of(self, arrays: Mapping[str, Array]) -> str | None:
        """Return the reason that received arrays are not such parts, or None."""
        if set(arrays) != set(self.shapes):
            return Impossible(f"noised sums consist of {sorted(self.shapes)}, got {sorted(arrays)}")
        for name, shape in self.shapes.items():
            if arrays[name].shape != shape or arrays[name].dtype != np.float64:
                return Impossible(f"'{name}' must be float64 of shape {shape}")
            if not np.isfinite(arrays[name]).all():
                return f"'{name}' has values that are not finite"
        return None


# What a receiver makes of noised sums; it costs no privacy ----------------------------------------


def projected(
    count: Float64, total: Float64, square: Float64 | None = None, bound: float = BOUND, floor: float = 0.0
) -> tuple[Float64, Float64, Float64 | None]:
    """Return the nearest numbers that could be sums over images.

    Counts are at least 1, means no longer than R, and scatters within classes have no negative eigenvalue.

    Parameters
    ----------
    count, total : (C,), (C, d), noised.
    square : (d, d) of all classes, (C, d, d) of each, or None.
    floor : least eigenvalue of a scatter, such as the size of the noise on it.

    Returns
    -------
    count, total, square : as given. With square = scatter + sum of ``S S^T / N``.
    """
    n = np.maximum(count, 1.0)
    sums = clip_rows(total / n[:, None], bound) * n[:, None]
    if square is None:
        return n, sums, None
    rows = sums / np.sqrt(n)[:, None]
    between = rows.T @ rows if square.ndim == 2 else rows[:, :, None] * rows[:, None, :]
    values, vectors = np.linalg.eigh(square - between)
    scatter = (vectors * np.maximum(values, floor)[..., None, :]) @ np.swapaxes(vectors, -1, -2)
    return n, sums, between + 0.5 * (scatter + np.swapaxes(scatter, -1, -2))
