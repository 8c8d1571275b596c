"""Gaussians of the same classes at several clients: read, pooled, and how far apart they lie (FedGH on Gaussians).

Where `gaussian` pools the statistics of all clients into one Gaussian a class, here each client's own are kept, as
FedGHG draws from them one by one. The formulas stand in `strategies/fedghg.py`; with counts, pooling is Eq. 3 and 4 of
CCVR (Luo et al., NeurIPS 2021).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedapp.core.gaussian import diagonal, unpack
from fedapp.errors import Impossible

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]


class Gaussian(NamedTuple):
    """Of one class: mean (d,), covariance (d, d) or, where it is diagonal, (d,), and samples, 1 where not sent."""

    mean: Float64
    cov: Float64
    n: int = 1


def pool(of: Sequence[Gaussian], equal: bool) -> tuple[Gaussian, float, float]:
    """Return one Gaussian for several, the scatter between their means, and that within them.

    With counts it is Eq. 3 and 4 of CCVR: (a_k, b_k) = (n_k - 1, n_k), divided by N - 1. `equal` has a_k = b_k = 1,
    divided by their number: the moments of the mixture.
    """
    b = np.array([1 if equal else g.n for g in of], dtype=np.float64)
    a, divisor = (b, len(of)) if equal else (b - 1, max(b.sum() - 1, 1))
    mean = sum(w * g.mean for w, g in zip(b, of)) / b.sum()
    apart = [g.mean - mean for g in of]
    spread = [np.outer(x, x) if of[0].cov.ndim == 2 else x**2 for x in apart]
    cov = sum(v * g.cov + w * x for v, w, g, x in zip(a, b, of, spread)) / divisor
    within = [g.cov.sum() if g.cov.ndim == 1 else np.trace(g.cov) for g in of]
    between = float(sum(w * (x @ x) for w, x in zip(b, apart)))
    return Gaussian(mean, cov, int(sum(g.n for g in of))), between, float(a @ within)


def between_share(classes: Mapping[int, Sequence[Gaussian]], equal: bool) -> float:
    """Return rho of the Gaussians of each class; NaN where no class with a spread has two clients."""
    parts = [pool(of, equal)[1:] for of in classes.values() if len(of) > 1]
    between, within = (sum(part[i] for part in parts) for i in (0, 1))
    return between / (between + within) if within > 0 else float("nan")


def problem_of(arrays: Mapping[str, Array], width: int, full: bool, samples: int) -> str | None:
    """Return the reason that a client's covariances and counts are invalid, or None.

    Parameters
    ----------
    arrays : `labels` (S,), and where they are sent `cov` (S, d (d + 1) / 2) packed or (S, d), and `counts` (S,).
    width : d.   full : whether covariances are packed matrices.   samples : what the client trained on.
    """
    cov, counts, rows = arrays.get("cov"), arrays.get("counts"), len(arrays["labels"])
    if cov is not None:
        shape = (rows, width * (width + 1) // 2 if full else width)
        if cov.shape != shape or cov.dtype.kind != "f":
            got = f"cov has dtype {cov.dtype} and shape {cov.shape}"
            return Impossible(f"{got}, expected floating point of shape {shape}")
        places = diagonal(width) if full else slice(None)
        if (cov[:, places] < 0).any():
            return "variances must not be negative"
    if counts is not None:
        if counts.shape != (rows,) or counts.dtype.kind not in "iu" or (counts < 1).any():
            return Impossible("counts must hold one positive whole number per class")
        if counts.sum() > samples:
            return Impossible(f"counts of {counts.sum()} samples from a client of {samples}")
    return None


def gaussians(arrays: Mapping[str, Array], width: int, full: bool) -> dict[int, Gaussian]:
    """Return a client's Gaussians by class, ascending; arrays as in `problem_of`, and the means `lar` (S, d)."""
    labels = arrays["labels"].astype(np.int64)
    cov = arrays.get("cov", np.zeros((len(labels), width))).astype(np.float64)
    counts = arrays.get("counts", np.ones(len(labels), np.int64))
    rows = unpack(cov, width) if full else cov
    mean = arrays["lar"].astype(np.float64)
    return {int(labels[i]): Gaussian(mean[i], rows[i], int(counts[i])) for i in np.argsort(labels)}


def by_class(clients: Sequence[Mapping[int, Gaussian]]) -> dict[int, list[Gaussian]]:
    """Return the Gaussians of every class, ascending, in the order of the clients."""
    return {c: [g[c] for g in clients if c in g] for c in sorted({c for g in clients for c in g})}
