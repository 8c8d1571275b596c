"""Weighted mean of models, one reply at a time.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, Algorithm 1:
``w <- sum_k (n_k / n) w_k`` over the clients that answered.

The mean is kept in its running form ``mean <- mean + (n_k / (n_1 + ... + n_k)) (w_k - mean)``. It needs the memory of
one model however many clients answer, and it returns a consensus unchanged: one client's model comes back bit for bit,
and so do equal values from all clients. ``sum_k (n_k w_k) / n`` in floating point does neither.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.lazy import torch

Array = npt.NDArray[Any]

BLOCK = 1 << 20
"""Entries of the mean that are worked on at a time (4 MiB of float32: within a last-level cache)."""


def lower_median(values: Array | Sequence[float]) -> float:
    """Return the median, of an even number of values the lower of the two in the middle; 0 without values.

    The upper one, and the mean of both, can be raised without a limit by half of the clients. With two clients one
    would do.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    return float(ordered[(len(ordered) - 1) // 2]) if len(ordered) else 0.0


def blended(cluster: Mapping[int, int], sizes: Mapping[int, float], weights: str) -> tuple[list[int], Any, str]:
    """Return client ids, the weights of clients within their clusters (n, n), see `within`, and a phrase about them.

    Parameters
    ----------
    cluster : the cluster of each client.   sizes : n_k.   weights : `samples`, n_k, or `uniform`.
    """
    by_samples = weights == "samples"
    ids, matrix = within(cluster, sizes if by_samples else dict.fromkeys(cluster, 1.0))
    how = "by sample counts" if by_samples else "alike"
    return ids, matrix, f"{len(set(cluster.values()))} clusters, within them {how}"


def as_tensor(array: Array) -> torch.Tensor:
    """Return a tensor on the array's own memory, also where that is read-only; it must then only be read."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def _room(arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    """Return memory for arrays of these shapes, float32 at least, in one block for each dtype.

    NumPy asks the kernel for huge pages for large blocks only. One block per model, instead of one per array, saves
    most of the page faults, which cost more than filling it.
    """
    dtypes = {name: np.result_type(array.dtype, np.float32) for name, array in arrays.items()}
    room = {name: -(-array.size // 16) * 16 for name, array in arrays.items()}  # every array starts on a cache line
    places: dict[str, torch.Tensor] = {}
    for dtype in set(dtypes.values()):
        names = [name for name in arrays if dtypes[name] == dtype]
        block, start = np.empty(sum(room[name] for name in names), dtype=dtype), 0
        for name in names:
            places[name] = torch.from_numpy(block[start : start + arrays[name].size]).view(arrays[name].shape)
            start += room[name]
    return {name: places[name] for name in arrays}


class RunningMean:
    """Weighted mean of named arrays, updated in place as replies arrive.

    Memory: one model (the mean) and one block of 4 MiB. Time: each reply is read once, and each call of ``add`` or
    ``add_many`` reads and writes the mean once.

    Float16 and float32 arrays are accumulated in float32, float64 arrays in float64. The result depends on the order of
    the calls in the last bits: callers add replies sorted by client where runs must be equal bit for bit. The first
    reply is copied, so the mean of one client is its model bit for bit. A later reply moves the mean by a multiple of
    their difference, so equal arrays from all clients come back equal (only a zero may change its sign).

    Examples
    --------
    >>> running = RunningMean()
    >>> running.add({"w": np.array([1.0, 3.0], dtype=np.float32)}, weight=1)
    >>> running.add({"w": np.array([5.0, 3.0], dtype=np.float32)}, weight=3)
    >>> running.mean()["w"]
    array([4., 3.], dtype=float32)

    Attributes
    ----------
    replies : int
        Number of models added so far, those of weight zero included.
    """

    def __init__(self) -> None:
        self.replies = 0
        self._mean: dict[str, torch.Tensor] = {}
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._total = 0.0
        self._read = False

    def add(self, arrays: Mapping[str, Array], weight: float) -> None:
        """Add one model with its weight; a model that is refused changes nothing.

        Parameters
        ----------
        arrays : mapping of str to ndarray
            Floating-point arrays, only read. Every call must bring the same names with the same shapes.
        weight : float
            Finite and not negative, in the paper the number of samples ``n_k``. A model of weight 0 is checked, but
            does not enter the mean.

        Raises
        ------
        TypeError
            An array is not floating point (an average of counters has no meaning: leave them out).
        ValueError
            Names or shapes differ from the first reply's, the weight is negative or not finite, or ``mean`` was
            already called.
        """
        self.add_many([(arrays, weight)])

    def add_many(self, replies: Sequence[tuple[Mapping[str, Array], float]]) -> None:
        """Add several models at once; the result has the same bits as with `add` for one after the other.

        Each block of the mean stays in the cache while all models are added to it. The memory traffic is little more
        than reading every model once, against three times that for single calls.

        Parameters
        ----------
        replies : sequence of (mapping of str to ndarray, float)
            Models and weights as in `add`, whose errors are raised before anything is changed.
        """
        if self._read:
            raise ValueError("the mean was already read; start a new RunningMean for the next round")
        shapes = self._shapes
        for arrays, weight in replies:
            if not math.isfinite(weight) or weight < 0:
                raise ValueError(f"a weight must be finite and not negative, got {weight}")
            for name, array in arrays.items():
                if not np.issubdtype(array.dtype, np.floating):
                    raise TypeError(
                        f"array {name!r} has dtype {array.dtype}: only floating-point arrays can be averaged"
                    )
            got = {name: tuple(array.shape) for name, array in arrays.items()}
            if shapes is None:
                shapes = got
            elif got != shapes:
                raise ValueError(_difference(shapes, got))
        self._shapes = shapes
        self.replies += len(replies)
        heavy = [(arrays, float(weight)) for arrays, weight in replies if weight > 0]
        if not heavy:
            return
        first = self._total == 0.0
        if first:
            self._mean = _room(heavy[0][0])
        shares = []
        for _, weight in heavy:
            self._total += weight
            shares.append(weight / self._total)
        for name, mean in self._mean.items():
            flat = mean.view(-1)
            rows = [as_tensor(np.asarray(arrays[name], order="C")).view(-1) for arrays, _ in heavy]
            for start in range(0, flat.numel(), BLOCK):
                block = slice(start, start + BLOCK)
                part = flat[block]
                for i, (row, share) in enumerate(zip(rows, shares)):
                    if first and i == 0:
                        part.copy_(row[block])
                    else:
                        # mean + share (reply - mean): a difference of 0 changes nothing, so a consensus stays exact.
                        part.lerp_(row[block].to(part.dtype), share)

    def mean(self) -> dict[str, Array]:
        """Return the weighted mean of the models that were added.

        The arrays are the accumulators themselves, not copies, so nothing can be added afterwards.

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
            raise ValueError(f"the total weight of {self.replies} replies is zero: there is no mean")
        self._read = True
        return {name: tensor.numpy() for name, tensor in self._mean.items()}


def _difference(expected: Mapping[str, tuple[int, ...]], got: Mapping[str, tuple[int, ...]]) -> str:
    """Describe in one line how a model's names or shapes differ from the first one's."""
    missing = sorted(set(expected) - set(got))
    extra = sorted(set(got) - set(expected))
    if missing or extra:
        return f"a model has other arrays than the first one: missing {missing}, unexpected {extra}"
    name = next(name for name in expected if expected[name] != got[name])
    return f"array {name!r} has shape {got[name]}, the first model had {expected[name]}"


def within(cluster: Mapping[int, int], weights: Mapping[int, float]) -> tuple[list[int], npt.NDArray[np.float64]]:
    """Return the weights of clients for each other where averages are taken within clusters.

    Parameters
    ----------
    cluster : the cluster of every client.   weights : of every client in an average, > 0.

    Returns
    -------
    Client ids (n) in ascending order, and (n, n): row i holds the shares in the average that client i gets.
    """
    ids = sorted(cluster)
    together = np.array([[cluster[i] == cluster[j] for j in ids] for i in ids])
    matrix = together * np.array([weights[i] for i in ids], dtype=np.float64)
    return ids, matrix / matrix.sum(axis=1, keepdims=True)
