"""A bound on how much a client changes the model, and with noise (`dp = client`) what can be learned of the client."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedapp.core.privacy import Float64, clip_rows
from fedapp.learning.releases import Releaser
from fedapp.method import Array, Arrays


def clip_update(arrays: Mapping[str, Array], received: Mapping[str, Array], bound: float) -> tuple[Arrays, float]:
    """Scale the change from the received to the sent arrays down to an L2 norm of at most `bound`.

    Parameters
    ----------
    arrays : the client's reply, by name.
    received : the payload, by name. The changes of all floating-point arrays that are in both form one vector;
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


def private_update(arrays: Mapping[str, Array], received: Mapping[str, Array], releaser: Releaser) -> Arrays:
    """Return arrays whose change from the received ones is clipped to `releaser.privacy.bound`, with noise.

    Parameters
    ----------
    arrays : the client's reply, by name; it has received all of these names.
    received : the payload, by name.
    releaser : books the release and draws the noise.

    Raises
    ------
    BadRequest : the release would pass the budget.
    RuntimeError : an array was not received, so that its change is unknown.
    """
    strange = [n for n, a in arrays.items() if n not in received or not np.issubdtype(a.dtype, np.floating)]
    if strange:
        raise RuntimeError(f"'{strange[0]}' is not the change of a received array: it has no bound")
    bound = releaser.privacy.bound
    known = vector_of({n: received[n] for n in arrays})
    change = clip_rows((vector_of(arrays) - known)[None], bound)[0]
    return arrays_of(releaser.release(change, bound, "update", around=known), arrays)


def vector_of(arrays: Mapping[str, Array]) -> Float64:
    """Return all arrays as one vector of float64, in the order of their names."""
    return np.concatenate([arrays[n].astype(np.float64).ravel() for n in sorted(arrays)])


def arrays_of(vector: Float64, like: Mapping[str, Array]) -> Arrays:
    """Return the arrays that make up a vector, in the shapes and dtypes of others."""
    found: Arrays = {}
    for name in sorted(like):
        part, vector = np.split(vector, [like[name].size])
        found[name] = part.reshape(like[name].shape).astype(like[name].dtype)
    return {name: found[name] for name in like}
