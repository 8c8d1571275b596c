"""Low-rank form of named arrays: singular value decomposition, cut where enough of the energy is kept.

Wu et al., "Communication-efficient federated learning via knowledge distillation", Nature Communications 2022 (FedKD),
dynamic gradient approximation. An array of two or more dimensions is read as a matrix (first dimension) x (all others),
so a convolution (out, in, h, w) is out x (in h w).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_PARTS = ("/u", "/s", "/v")


def rank_for(singular: Array, energy: float) -> int:
    """Return the smallest q with ``s_1^2 + ... + s_q^2 >= energy * (s_1^2 + ... + s_r^2)``.

    Parameters
    ----------
    singular : ndarray, (r,)
        Singular values, descending.
    energy : float
        Share that must be kept, in (0, 1].

    Returns
    -------
    int
        1 .. r; 0 if all values are zero.
    """
    kept = np.cumsum(np.square(singular.astype(np.float64)))
    if not len(kept) or kept[-1] == 0:
        return 0
    # kept[-1] is the sum itself, so the comparison holds for the last value at the latest.
    return int(np.argmax(kept >= energy * kept[-1])) + 1


def compress(arrays: Mapping[str, Array], energy: float) -> dict[str, Array]:
    """Replace each matrix by its factors where they are smaller.

    Parameters
    ----------
    arrays : mapping of str to ndarray
        float32 arrays by name.
    energy : float
        Share of each matrix's squared norm that is kept, in (0, 1].

    Returns
    -------
    dict
        ``NAME/u`` (m, q), ``NAME/s`` (q,), ``NAME/v`` (q, n) where q (m + n + 1) < m n; ``NAME`` itself for vectors,
        scalars, and matrices that would not get smaller. A matrix of zeros has q = 0: three empty arrays.
    """
    result: dict[str, Array] = {}
    for name, array in arrays.items():
        if array.ndim < 2 or array.size == 0:
            result[name] = array
            continue
        matrix = array.reshape(len(array), -1)
        u, s, v = np.linalg.svd(matrix, full_matrices=False)
        q = rank_for(s, energy)
        if q * (sum(matrix.shape) + 1) >= matrix.size:
            result[name] = array
        else:
            for part, factor in zip(_PARTS, (u[:, :q], s[:q], v[:q]), strict=True):
                result[name + part] = np.ascontiguousarray(factor)
    return result


def rebuild(parts: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Return the arrays that `compress` replaced: ``(u * s) v``, in the shape that belongs to each name."""
    result: dict[str, Array] = {}
    for name, shape in shapes.items():
        if name in parts:
            result[name] = parts[name]
        else:
            u, s, v = (parts[name + part] for part in _PARTS)
            result[name] = ((u * s) @ v).reshape(shape)
    return result


def ranks(parts: Mapping[str, Array]) -> dict[str, int]:
    """Return the rank of every array that was replaced by its factors."""
    return {name.removesuffix("/s"): len(array) for name, array in parts.items() if name.endswith("/s")}


def problem_of(parts: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return the reason that received parts cannot become arrays of these shapes, or None."""
    left = set(parts)
    for name, shape in shapes.items():
        factors = [name + part for part in _PARTS]
        if name in parts:
            wanted = {name: shape}
        elif all(f in parts for f in factors) and len(shape) >= 2:
            m, n, q = shape[0], math.prod(shape[1:]), parts[factors[1]].size
            if q > min(m, n):
                return f"'{name}' has rank {q}, at most {min(m, n)} is possible"
            wanted = dict(zip(factors, ((m, q), (q,), (q, n)), strict=True))
        else:
            return f"'{name}' is missing, or one of its factors is"
        for key, expected in wanted.items():
            left.discard(key)
            if parts[key].shape != expected or not np.issubdtype(parts[key].dtype, np.floating):
                return f"'{key}' is {parts[key].dtype} {parts[key].shape}, expected floating point {expected}"
    return f"'{min(left)}' is not an array of the model" if left else None
