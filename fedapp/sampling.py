"""Every random draw is a function of (seed, purpose, round, client) and independent of order, process and engine."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence

import numpy as np

from fedapp.lazy import torch


def _words(seed: int, purpose: str, numbers: tuple[int, ...]) -> list[int]:
    if min(numbers, default=0) < 0:  # a last -1 would become 0, which NumPy's seed sequence does not tell from nothing
        raise ValueError(f"{purpose}: {numbers} must be at least 0")
    return [seed, zlib.crc32(purpose.encode()), *(n + 1 for n in numbers)]


def rng(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """Return the NumPy generator of one purpose.

    Parameters
    ----------
    seed : the run's seed, >= 0.
    purpose : a word, such as `sampling` or `batches`; different words give independent streams.
    numbers : what distinguishes the draws of one purpose, such as round and client, each >= 0.

    Raises
    ------
    ValueError : a negative number.
    """
    return np.random.default_rng(np.random.SeedSequence(_words(seed, purpose, numbers)))


def derived_seed(seed: int, purpose: str, *numbers: int) -> int:
    """Return a seed in 0 .. 2**63 - 1 for libraries that take a number; the parameters are those of `rng`."""
    state = np.random.SeedSequence(_words(seed, purpose, numbers)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))  # some libraries take signed 64-bit seeds only


@functools.lru_cache(maxsize=64)
def server_model_seed(seed: int, k: int = 0) -> int:
    """Return the seed of the server's k-th initial model in a run with this seed."""
    return derived_seed(seed, "server-model", k)


def torch_generator(seed: int, purpose: str, *numbers: int) -> torch.Generator:
    """Return the PyTorch generator of one purpose, on the CPU; the parameters are those of `rng`."""
    generator = torch.Generator()
    generator.manual_seed(derived_seed(seed, purpose, *numbers))
    return generator


def some(seed: int, purpose: str, ids: Sequence[int], count: int, *numbers: int) -> list[int]:
    """Draw `count` of these ids, uniformly without replacement; return them in increasing order."""
    if count >= len(ids):
        return sorted(ids)
    picked = rng(seed, purpose, *numbers).choice(len(ids), size=count, replace=False)
    return sorted(ids[i] for i in picked)


def sample_clients(
    seed: int, server_round: int, ids: Sequence[int], fraction: float, purpose: str = "sampling"
) -> list[int]:
    """Draw the participants of a round, uniformly without replacement.

    Parameters
    ----------
    seed, server_round : decide the draw.
    ids : the known client ids, in any order.
    fraction : share of them in (0, 1]; `fraction * len(ids)` rounded half up, at least one.
    purpose : gives a draw of its own.

    Returns
    -------
    Client ids in increasing order. They depend on no method, so comparisons with the same seed are paired.
    """
    ordered = sorted(ids)
    count = min(len(ordered), max(1, int(np.floor(fraction * len(ordered) + 0.5))))
    return some(seed, purpose, ordered, count, server_round)
