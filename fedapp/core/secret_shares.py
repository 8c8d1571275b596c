"""Shamir's secret sharing: a secret in n shares; any t give it back and t - 1 reveal nothing.

A. Shamir, How to Share a Secret, Communications of the ACM 22, 1979. The secret is the value at 0 of a random
polynomial of degree t - 1 over a prime field, and share x is its value at x. Shares belong to positions 1 .. n.

All secrets of an exchange are opened by the same holders, so their Lagrange weights are computed once; after that a
secret costs t products. PyCryptodome's `Shamir`, which Flower uses, computes them again for every 16 bytes.
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


def value_at(coefficients: Sequence[int], x: int, prime: int = PRIME) -> int:
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


def corrected(values: Sequence[int], positions: Sequence[int], threshold: int, prime: int = PRIME) -> list[int] | None:
    """Return the polynomial of degree below t that all but at most (n - t) / 2 of n values lie on, or None.

    S. Gao, A New Algorithm for Decoding Reed-Solomon Codes, 2003: Euclid's algorithm on the product of all x - x_i and
    the polynomial through all values, broken off half-way. It costs n^2 products.

    Parameters
    ----------
    values : at the positions, which are distinct.   threshold : t.

    Returns
    -------
    t coefficients, lowest first; the first is the secret.
    """
    product = [1]
    for x in positions:
        product = _times(product, [-x, 1], prime)
    through = [0] * len(positions)
    for x, value in zip(positions, values, strict=True):
        others, _ = _divided(product, [-x, 1], prime)  # the product without x - x_i
        scale = value * pow(value_at(others, x, prime), -1, prime)
        through = [(a + scale * b) % prime for a, b in zip(through, others, strict=True)]
    before, rest, past, factor = product, _trimmed(through), [0], [1]
    while 2 * (len(rest) - 1) >= len(positions) + threshold:
        quotient, after = _divided(before, rest, prime)
        before, rest = rest, after
        past, factor = factor, _less(past, _times(quotient, factor, prime), prime)
    found, left_over = _divided(rest, factor, prime)
    if left_over != [0] or len(found) > threshold:
        return None
    return found + [0] * (threshold - len(found))


def _trimmed(p: list[int]) -> list[int]:
    while len(p) > 1 and not p[-1]:
        p.pop()
    return p


def _times(a: Sequence[int], b: Sequence[int], prime: int) -> list[int]:
    found = [0] * (len(a) + len(b) - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            found[i + j] = (found[i + j] + x * y) % prime
    return found


def _less(a: Sequence[int], b: Sequence[int], prime: int) -> list[int]:
    size = max(len(a), len(b))
    pairs = zip([*a, *[0] * (size - len(a))], [*b, *[0] * (size - len(b))], strict=True)
    return _trimmed([(x - y) % prime for x, y in pairs])


def _divided(a: Sequence[int], b: Sequence[int], prime: int) -> tuple[list[int], list[int]]:
    """Return quotient and rest of two polynomials, lowest coefficient first."""
    rest, inverse = list(a), pow(b[-1], -1, prime)
    quotient = [0] * max(1, len(a) - len(b) + 1)
    for shift in range(len(a) - len(b), -1, -1):
        quotient[shift] = rest[shift + len(b) - 1] * inverse % prime
        for i, x in enumerate(b):
            rest[shift + i] = (rest[shift + i] - quotient[shift] * x) % prime
    return _trimmed(quotient), _trimmed(rest)
