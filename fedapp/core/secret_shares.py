"""Shamir's secret sharing: a secret in n shares, of which any t give it back and t - 1 say nothing of it.

A. Shamir, How to Share a Secret, Communications of the ACM 22, 1979. The secret is the value at 0 of a random
polynomial of degree t - 1 over a prime field, and share x is its value at x. Shares belong to positions 1 .. n.

All secrets of an exchange are opened by the same holders, so their Lagrange weights are computed once; after that a
secret costs t products. PyCryptodome's `Shamir`, which Flower uses, computes them anew for every 16 bytes.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

PRIME = 2**256 + 297
"""The least prime above 2^256: every secret of `SECRET` bytes is an element of the field."""
SECRET = 32
"""Bytes of a secret."""
SHARE = 33
"""Bytes of a share."""

__all__ = ["PRIME", "SECRET", "SHARE", "combine", "split", "weights_at"]


def split(secret: bytes, threshold: int, holders: int) -> list[bytes]:
    """Return a share for each of the positions 1 .. holders, `SHARE` bytes each.

    Parameters
    ----------
    secret : `SECRET` bytes.   threshold : t, shares that are needed to get it back.

    Raises
    ------
    ValueError : the secret has another length, or t does not lie in 1 .. holders.
    """
    if len(secret) != SECRET:
        raise ValueError(f"a secret has {SECRET} bytes, got {len(secret)}")
    if not 1 <= threshold <= holders:
        raise ValueError(f"a threshold lies in 1 .. {holders}, got {threshold}")
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [value_at(coefficients, x, PRIME).to_bytes(SHARE, "big") for x in range(1, holders + 1)]


def value_at(coefficients: Sequence[int], x: int, prime: int) -> int:
    """Return the value at x of a polynomial, lowest coefficient first, modulo a prime."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % prime
    return value


def weights_at(place: int, positions: Sequence[int], prime: int = PRIME) -> list[int]:
    """Return Lagrange's weights: the value at `place` of a polynomial is their product with its values at `positions`.

    Raises
    ------
    ValueError : a position comes twice.
    """
    if len(set(positions)) != len(positions):
        raise ValueError("a position comes twice")
    found = []
    for x in positions:
        above = below = 1
        for other in positions:
            if other != x:
                above = above * (place - other) % prime
                below = below * (x - other) % prime
        found.append(above * pow(below, -1, prime) % prime)
    return found


def combine(shares: Sequence[bytes], weights: Sequence[int]) -> bytes | None:
    """Return the secret of t shares, or None where they are shares of no secret of `SECRET` bytes.

    Parameters
    ----------
    weights : as from `weights_at(0, positions)` for the positions of these shares.
    """
    pairs = zip(shares, weights, strict=True)
    value = sum(int.from_bytes(share, "big") * weight for share, weight in pairs) % PRIME
    return value.to_bytes(SECRET, "big") if value < 2 ** (8 * SECRET) else None
