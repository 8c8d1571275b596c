"""Bounds on what leaves a client. A bound is no guarantee: without noise nothing here is differential privacy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedapp.method import Array, Arrays


def clip_update(arrays: Mapping[str, Array], received: Mapping[str, Array], bound: float) -> tuple[Arrays, float]:
    """Shorten the change from what was received to what is sent to an L2 norm of `bound`.

    Parameters
    ----------
    arrays : what is to be sent, by name.
    received : what the server sent. Floating-point arrays of both are bounded together, as one vector; arrays that were
        not received, such as class means, are left alone.
    bound : largest norm, > 0.

    Returns
    -------
    New arrays of the same dtypes, and the norm before clipping.
    """
    common = [n for n, a in arrays.items() if n in received and np.issubdtype(a.dtype, np.floating)]
    deltas = {n: arrays[n].astype(np.float64) - received[n] for n in common}
    norm = float(np.sqrt(sum(float(np.square(d).sum()) for d in deltas.values())))
    if norm <= bound:
        return dict(arrays), norm
    short = {n: (received[n] + d * (bound / norm)).astype(arrays[n].dtype) for n, d in deltas.items()}
    return {**arrays, **short}, norm
