"""Weighted mean of models, one reply at a time.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, Algorithm 1:
``w <- sum_k (n_k / n) w_k`` over the clients that answered.

The mean is kept in its running form ``mean <- mean + (n_k / (n_1 + ... + n_k)) (w_k - mean)``. It needs the memory of
one model however many clients answer, and it returns a consensus unchanged: one client's model comes back bit for bit,
and so do equal values from all clients, which ``(n w) / n`` in floating point does not give.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

__all__ = ["RunningMean", "weighted_mean"]


def _as_tensor(array: Array) -> torch.Tensor:
    """Return a tensor on the array's own memory, also when that memory is read-only (the tensor is only read)."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


class RunningMean:
    """Weighted mean of named arrays, updated in place as replies arrive.

    Memory: one model (the mean) plus, while a reply in another precision is added, one of its arrays. Time: each reply
    is read once and the mean read and written once.

    Numbers: float16 and float32 arrays are accumulated in float32, float64 arrays in float64. The result depends on the
    order of the calls in the last bits, so callers add replies in a fixed order (sorted by client) where runs must be
    equal bit for bit. The first reply is copied, so the mean of one client is its model bit for bit (float16 widened to
    float32); a later reply moves the mean by a multiple of their difference, so equal arrays from all clients come back
    equal (only a zero may change its sign).

    Examples
    --------
    >>> running = RunningMean()
    >>> running.add({"w": np.array([1.0, 3.0], dtype=np.float32)}, weight=1)
    >>> running.add({"w": np.array([5.0, 3.0], dtype=np.float32)}, weight=3)
    >>> running.mean()["w"]
    array([4., 3.], dtype=float32)
    """

    def __init__(self) -> None:
        self._mean: dict[str, torch.Tensor] = {}
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._total = 0.0
        self._replies = 0
        self._read = False

    @property
    def total_weight(self) -> float:
        """Sum of the weights added so far."""
        return self._total

    @property
    def replies(self) -> int:
        """Number of calls of ``add``, those of weight zero included."""
        return self._replies

    def add(self, arrays: Mapping[str, Array], weight: float) -> None:
        """Add one model with its weight; nothing is changed when the model is refused.

        Parameters
        ----------
        arrays : mapping of str to ndarray
            Floating-point arrays. Every call must bring the same names with the same shapes. They are only read.
        weight : float
            Finite and not negative, in the paper the number of samples ``n_k``. Weight 0 checks the names and shapes
            and changes nothing else.

        Raises
        ------
        TypeError
            An array is not floating point (an average of counters has no meaning: leave them out).
        ValueError
            Names or shapes differ from the first reply's, the weight is negative or not finite, or ``mean`` was
            already called.
        """
        if self._read:
            raise ValueError("the mean was already handed out; start a new RunningMean for the next round")
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(f"a weight must be finite and not negative, got {weight}")
        shapes = {name: tuple(array.shape) for name, array in arrays.items()}
        for name, array in arrays.items():
            if not np.issubdtype(array.dtype, np.floating):
                raise TypeError(f"array {name!r} has dtype {array.dtype}: only floating-point arrays can be averaged")
        if self._shapes is None:
            self._shapes = shapes
        elif shapes != self._shapes:
            raise ValueError(_difference(self._shapes, shapes))
        self._replies += 1
        if weight == 0:
            return
        first = self._total == 0.0
        self._total += weight
        share = weight / self._total
        for name, array in arrays.items():
            if first:
                kept = np.array(array, dtype=np.result_type(array.dtype, np.float32), order="C")
                self._mean[name] = torch.from_numpy(kept)
                continue
            mean = self._mean[name]
            dtype = np.float64 if mean.dtype == torch.float64 else np.float32
            # lerp reads the reply once and writes the mean once: the traffic of an axpy, but a consensus stays exact.
            mean.lerp_(_as_tensor(np.asarray(array, dtype=dtype, order="C")), share)

    def mean(self) -> dict[str, Array]:
        """Return the weighted mean of what was added.

        The arrays are the accumulators themselves, not copies, so no further ``add`` is accepted afterwards.

        Returns
        -------
        dict of str to ndarray
            float32 (float64 where the first reply's array was float64), in the order of names of the first reply.

        Raises
        ------
        ValueError
            The total weight is zero: nothing was added, or every client had no samples.
        """
        if self._total == 0.0:
            raise ValueError(f"the total weight of {self._replies} replies is zero: there is no mean")
        self._read = True
        return {name: tensor.numpy() for name, tensor in self._mean.items()}


def weighted_mean(models: Iterable[Mapping[str, Array]], weights: Iterable[float]) -> dict[str, Array]:
    """Return the weighted mean of models that are all at hand; see `RunningMean` for dtypes and errors.

    Parameters
    ----------
    models : iterable of mapping of str to ndarray
        Models with equal names and shapes.
    weights : iterable of float
        One weight a model, not negative.
    """
    running = RunningMean()
    for arrays, weight in zip(models, weights, strict=True):
        running.add(arrays, weight)
    return running.mean()


def _difference(expected: Mapping[str, tuple[int, ...]], got: Mapping[str, tuple[int, ...]]) -> str:
    """Say in one line how a reply's names or shapes differ from the first one's."""
    missing = sorted(set(expected) - set(got))
    extra = sorted(set(got) - set(expected))
    if missing or extra:
        return f"a model has other arrays than the first one: missing {missing}, unexpected {extra}"
    name = next(name for name in expected if expected[name] != got[name])
    return f"array {name!r} has shape {got[name]}, the first model had {expected[name]}"
