"""A bound on how much a client changes the model. Without noise this is not differential privacy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedapp.method import Array, Arrays


def clip_update(arrays: Mapping[str, Array], received: Mapping[str, Array], bound: float) -> tuple[Arrays, float]:
    """Scale the change from the received to the sent arrays down to an L2 norm of at most `bound`.

    Parameters
    ----------
    arrays : what the client is to send, by name.
    received : what the server sent, by name. The changes of all floating-point arrays that are in both form one vector;
        arrays that were not received, such as class means, are left as they are.
    bound : largest norm, > 0.

    Returns
    -------
    arrays : with the scaled change, in the same dtypes.
    norm : of the change before it was scaled.
    """
    common = [n for n, a in arrays.items() if n in received and np.issubdtype(a.dtype, np.floating)]
    deltas = {n: arrays[n].astype(np.float64) - received[n] for n in common}
    norm = float(np.sqrt(sum(float(np.square(d).sum()) for d in deltas.values())))
    if norm <= bound:
        return dict(arrays), norm
    short = {n: (received[n] + d * (bound / norm)).astype(arrays[n].dtype) for n, d in deltas.items()}
    return {**arrays, **short}, norm
