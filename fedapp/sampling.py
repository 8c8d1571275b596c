"""Every random draw is a function of (seed, purpose, round, client): nothing depends on order, process or engine."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch


def _words(seed: int, purpose: str, numbers: tuple[int, ...]) -> list[int]:
    return [seed, zlib.crc32(purpose.encode()), *(n + 1 for n in numbers)]


def rng(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """Return the generator of one purpose.

    Parameters
    ----------
    seed : the run's seed, >= 0.
    purpose : a word, such as `sampling` or `batches`; different words give independent streams.
    numbers : round, client or whatever else tells draws apart, each >= -1.
    """
    return np.random.default_rng(np.random.SeedSequence(_words(seed, purpose, numbers)))


def derived_seed(seed: int, purpose: str, *numbers: int) -> int:
    """Return a 63-bit seed for libraries that take a number."""
    state = np.random.SeedSequence(_words(seed, purpose, numbers)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def torch_generator(seed: int, purpose: str, *numbers: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a torch generator of one purpose (see `rng`)."""
    generator = torch.Generator(device=device)
    generator.manual_seed(derived_seed(seed, purpose, *numbers))
    return generator


def sample_clients(seed: int, server_round: int, ids: Sequence[int], fraction: float) -> list[int]:
    """Draw the participants of a round, uniformly without replacement.

    Parameters
    ----------
    ids : the known client ids, in any order.
    fraction : share of them in (0, 1]; `round(fraction * len(ids))` clients, at least one.

    Returns
    -------
    Sorted client ids. The same for every method with the same seed, so that comparisons are paired.
    """
    ordered = sorted(ids)
    count = min(len(ordered), max(1, int(np.floor(fraction * len(ordered) + 0.5))))
    if count == len(ordered):
        return ordered
    picked = rng(seed, "sampling", server_round).choice(len(ordered), size=count, replace=False)
    return sorted(ordered[i] for i in picked)
