"""Whole numbers from the discrete Gaussian, drawn exactly from random bits: the noise of differential privacy.

Canonne, Kamath, Steinke, The Discrete Gaussian for Differential Privacy, NeurIPS 2020, Algorithms 1 to 3. Noise that is
computed in floating point can be told apart by its last digits: which numbers are possible depends on what it was added
to (Mironov, On Significance of the Least Significant Bits for Differential Privacy, CCS 2012). So data are rounded to a
grid, the noise is a number of grid steps, and every decision here compares whole numbers; nothing is rounded.

The standard deviation is always ``STEPS`` steps. All denominators are then powers of two, so that uniform numbers below
them are plain bits, and all quantities fit 64 bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Source = Callable[[int], bytes]
"""Returns that many random bytes."""

BITS = 24
STEPS = 1 << BITS
"""Standard deviation of the noise, in steps of the grid."""
BLOCK = 1 << 17
"""Numbers that are drawn together."""


def system(count: int) -> bytes:
    """Return random bytes of the operating system: the only source of noise that protects anybody."""
    return os.urandom(count)


def seeded(seed: int) -> Source:
    """Return a source of bytes that repeats, for tests alone: with the seed anyone can remove the noise."""
    return np.random.Generator(np.random.PCG64(seed)).bytes


def discrete_gaussian(count: int, source: Source = system) -> Int64:
    """Return whole numbers with probabilities in proportion to ``exp(-y^2 / (2 STEPS^2))``, (count,)."""
    found = np.empty(count, dtype=np.int64)
    for start in range(0, count, BLOCK):
        part = found[start : start + BLOCK]
        left = np.arange(len(part))
        while len(left):
            y = _laplace(len(left), source)
            # exp(-|y| / t) of the proposal times this is exp(-y^2 / (2 t^2)) but for a constant, with t = STEPS.
            away = np.abs(y) - STEPS
            kept = _decays(away * away, 2 * BITS + 1, source)
            part[left[kept]] = y[kept]
            left = left[~kept]
    return found


def _bits(count: int, width: int, source: Source) -> Int64:
    """Return uniform numbers of ``width`` bits, at most 62."""
    size = 4 if width <= 31 else 8
    words = np.frombuffer(source(size * count), dtype=f"<u{size}")
    numbers: Int64 = (words & words.dtype.type((1 << width) - 1)).astype(np.int64)
    return numbers


def _is_zero_of(n: int, count: int, source: Source) -> Bools:
    """Return which of uniform numbers below n are 0: true with probability 1 / n."""
    width = (n - 1).bit_length()
    if not width:
        return np.ones(count, dtype=np.bool_)
    numbers = _bits(count, width, source)
    again = np.flatnonzero(numbers >= n)
    while len(again):
        numbers[again] = _bits(len(again), width, source)
        again = again[numbers[again] >= n]
    found: Bools = numbers == 0
    return found


def _decays_below_1(numerator: Int64, width: int, source: Source) -> Bools:
    """Return true with probability ``exp(-numerator / 2^width)``, for numerators from 0 to 2^width (Algorithm 1)."""
    odd = np.zeros(len(numerator), dtype=np.bool_)
    left, k = np.arange(len(numerator)), 1
    while len(left):
        # True with probability numerator / (k 2^width); the number of the first failure is odd with exp(-...).
        more = (_bits(len(left), width, source) < numerator[left]) & _is_zero_of(k, len(left), source)
        odd[left[~more]] = k % 2 == 1
        left, k = left[more], _next(k)
    return odd


def _next(k: int) -> int:
    if k > 180:  # once in 180! numbers
        raise OverflowError("the source of random bytes repeats itself")
    return k + 1


def _decays_once(count: int, source: Source) -> Bools:
    """Return true with probability ``exp(-1)``."""
    odd = np.zeros(count, dtype=np.bool_)
    left, k = np.arange(count), 2  # the first try, with probability 1 / 1, never fails
    while len(left):
        more = _is_zero_of(k, len(left), source)
        odd[left[~more]] = k % 2 == 1
        left, k = left[more], _next(k)
    return odd


def _decays(numerator: Int64, width: int, source: Source) -> Bools:
    """Return true with probability ``exp(-numerator / 2^width)``, for numerators from 0 (Algorithm 1)."""
    whole = numerator >> width
    true = _decays_below_1(numerator & ((1 << width) - 1), width, source)
    left = np.flatnonzero(true & (whole > 0))
    done = 0
    while len(left):
        stays = _decays_once(len(left), source)
        true[left[~stays]] = False
        done += 1
        left = left[stays & (whole[left] > done)]
    return true


def _laplace(count: int, source: Source) -> Int64:
    """Return whole numbers with probabilities in proportion to ``exp(-|y| / STEPS)`` (Algorithm 2)."""
    found = np.empty(count, dtype=np.int64)
    left = np.arange(count)
    while len(left):
        size = len(left)
        low = _bits(size, BITS, source)
        high = np.zeros(size, dtype=np.int64)
        going = np.arange(size)
        while len(going):
            going = going[_decays_once(len(going), source)]
            high[going] += 1
        if high.max() > 180:  # once in exp(180) numbers; its square would not fit 64 bits
            raise OverflowError("the source of random bytes repeats itself")
        negative = _bits(size, 1, source) == 1
        size_of = low + STEPS * high
        # 0 would come twice as often, as +0 and as -0.
        kept = _decays_below_1(low, BITS, source) & ~(negative & (size_of == 0))
        found[left[kept]] = np.where(negative, -size_of, size_of)[kept]
        left = left[~kept]
    return found
