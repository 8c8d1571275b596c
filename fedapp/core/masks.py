"""Whole numbers modulo 2^64 instead of fractions, and the random numbers that hide them.

A value x becomes round(x 2^24), modulo 2^64. Sums of such numbers are exact, masks modulo 2^64 hide a number perfectly,
and both commute. What is lost is the rounding: at most 2^-25 a value, so K 2^-25 / N in a mean with total weight N.
Class counts and other whole numbers are exact. A sum of K values wraps at 2^39, so each lies below 2^39 / K.

Masks are the key stream of AES-256 in counter mode, one key for each mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

Array = npt.NDArray[Any]
Words = npt.NDArray[np.uint64]

BITS = 24
"""Bits of a number behind the point."""
BLOCK = 1 << 17
"""Numbers of a mask that are made at a time (1 MiB)."""


def largest(parts: int, bits: int = BITS) -> float:
    """Return the value that each of so many parts of a sum may have at most, so that the sum does not wrap."""
    return float((2 ** (63 - bits) - 1) / parts)


def rounding(parts: int) -> float:
    """Return how far a sum of so many vectors may be from the exact one, in each number."""
    return float(parts * 2.0 ** -(BITS + 1))


def encode(arrays: Mapping[str, Array], parts: int, bits: int = BITS) -> Words:
    """Return named arrays as one vector, in the order of their names.

    Parameters
    ----------
    arrays : of floating-point or whole numbers, any shapes.   parts : number of vectors that are added up.
    bits : behind the point; 0 for whole numbers alone.

    Raises
    ------
    FloatingPointError : a value is not finite.
    OverflowError : a value is so large that a sum of `parts` could wrap.
    """
    limit = largest(parts, bits)
    found = [np.zeros(0, np.uint64)]
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        if not np.isfinite(array).all():
            raise FloatingPointError(f"'{name}' contains NaN or infinity")
        most = float(np.abs(array.astype(np.float64)).max()) if array.size else 0.0
        if most > limit:
            raise OverflowError(
                f"'{name}' holds {most:g}, and a secure sum of {parts} clients takes values up to {limit:g}"
            )
        if np.issubdtype(array.dtype, np.integer):
            whole = array.astype(np.int64) << bits
        else:
            whole = np.rint(np.ldexp(array.astype(np.float64), bits)).astype(np.int64)
        found.append(whole.reshape(-1).view(np.uint64))
    return np.concatenate(found)


def decode(total: Words, shapes: Mapping[str, tuple[int, ...]], bits: int = BITS) -> dict[str, npt.NDArray[np.float64]]:
    """Return the named arrays of a sum of vectors from `encode`, as float64.

    Parameters
    ----------
    shapes : by name.   bits : as in `encode`.
    """
    values = np.ldexp(total.view(np.int64).astype(np.float64), -bits)
    found, start = {}, 0
    for name in sorted(shapes):
        size = int(np.prod(shapes[name], dtype=np.int64))
        found[name] = values[start : start + size].reshape(shapes[name])
        start += size
    if start != len(values):
        raise ValueError(f"the shapes have {start} numbers, the vector {len(values)}")
    return found


def add_mask(vector: Words, key: bytes, sign: int) -> None:
    """Add the mask of a key of 32 bytes to a vector in place, or with sign -1 take it away."""
    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
    zeros = bytes(8 * min(BLOCK, len(vector)))
    for start in range(0, len(vector), BLOCK):
        part = vector[start : start + BLOCK]
        mask = np.frombuffer(stream.update(zeros[: 8 * len(part)]), dtype="<u8")
        if sign > 0:
            part += mask
        else:
            part -= mask
