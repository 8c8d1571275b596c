"""Random Fourier features (Rahimi and Recht, NeurIPS 2007) with the same bits on every machine.

Features are ``sqrt(2 / D) cos(2 pi (z W + u))`` of standardised ``z`` (d,), with ``W`` (d, D) and ``u`` (D,) in turns.
An entry of ``W`` is nearly normal with deviation ``gamma / (2 pi sqrt(d))``: the sum of twelve uniform numbers less 6,
rounded to ``2^-24``. All random numbers are raw words of Philox, which no version of NumPy changes. With ``z`` rounded
to ``2^-16``, ``z W + u`` has no rounding error below ``2^13`` turns.
"""

from __future__ import annotations

import functools
import hashlib
import math

import numpy as np
import numpy.typing as npt

from fedapp.lazy import Tensor, torch

Float64 = npt.NDArray[np.float64]
STEP = 2.0**-16
"""The features and their input are multiples of it."""


@functools.lru_cache(maxsize=2)
def directions(width: int, count: int, gamma: float, seed: int) -> tuple[Float64, Float64]:
    """Return ``W`` (d, D) and ``u`` (D,), in turns."""
    source, w = np.random.Philox(key=[seed, 0]), np.empty((width, count))
    for row in w:
        twelve = _words(source, 12 * count).reshape(count, 12).sum(axis=1, dtype=np.int64)
        row[:] = (twelve - 6 * (2**32 - 1)) * 2.0**-32 * (gamma / (2 * math.pi * math.sqrt(width)))
    u = _words(np.random.Philox(key=[seed, 1]), count).astype(np.float64) * 2.0**-32
    return np.rint(w * 2.0**24) * 2.0**-24, u


def _words(source: np.random.Philox, count: int) -> npt.NDArray[np.uint32]:
    return np.asarray(source.random_raw((count + 1) // 2), "<u8").view("<u4")[:count]


def digest(w: Float64) -> str:
    """Return the SHA-256 of ``W``, row by row, in hexadecimal digits."""
    return hashlib.sha256(np.ascontiguousarray(w, "<f8").tobytes()).hexdigest()


def cosine(turns: Tensor) -> Tensor:
    """Return the cosine of angles in turns, float64, to 4e-16.

    It consists of additions, products and roundings alone, which all machines compute with the same bits.
    """
    turns = 0.25 - (turns - turns.round()).abs()
    square, found = turns * turns, torch.zeros_like(turns)
    for factor in reversed(_SINE):
        found = found * square + factor
    return found * turns


def _sine(terms: int) -> list[float]:
    """Return the coefficients of the sine of an angle in turns, from which its series has so many odd powers."""
    found = [2 * math.pi]
    for i in range(1, terms):
        found.append(-found[-1] * (4 * math.pi * math.pi) / (2 * i * (2 * i + 1)))
    return found


_SINE = _sine(10)
