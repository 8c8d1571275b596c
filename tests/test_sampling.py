"""Random draws: functions of their names, the same in every version, and fair."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedapp.sampling import derived_seed, rng, sample_clients, torch_generator


def test_draws_are_functions_of_their_names() -> None:
    assert rng(1, "a", 2, 3).random() == rng(1, "a", 2, 3).random()
    names = [(s, p, n) for s in (0, 1) for p in ("a", "b") for n in ((), (0,), (1,), (0, 1), (1, 0))]
    for draw in (lambda *a: rng(*a).random(), derived_seed):
        assert len({draw(s, p, *n) for s, p, n in names}) == len(names)


def test_draws_never_change() -> None:
    """Seed, CRC-32 of the purpose and the numbers plus one are NumPy's seed sequence: runs of earlier versions hold."""
    entropy = [7, 3632233996, 3, 1]  # crc32(b"test") is 3632233996
    assert rng(7, "test", 2, 0).random() == np.random.default_rng(np.random.SeedSequence(entropy)).random()
    word = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])
    assert derived_seed(7, "test", 2, 0) == word // 2 < 2**63
    assert torch_generator(7, "test", 2, 0).initial_seed() == word // 2
    expected = torch.rand(3, generator=torch.Generator().manual_seed(word // 2))
    assert torch.equal(torch.rand(3, generator=torch_generator(7, "test", 2, 0)), expected)


def test_negative_numbers_are_refused() -> None:
    for numbers in ((-1,), (2, -1), (-1, 2)):
        for draw in (rng, derived_seed, torch_generator):
            with pytest.raises(ValueError, match="at least 0"):
                draw(1, "a", *numbers)


@pytest.mark.parametrize(
    ("total", "fraction", "count"),
    [(5, 0.1, 1), (5, 0.3, 2), (5, 0.5, 3), (5, 0.9, 5), (5, 1.0, 5), (10, 0.25, 3), (10, 0.24, 2), (1, 0.01, 1)],
)
def test_the_number_of_participants_is_rounded_half_up_and_at_least_one(
    total: int, fraction: float, count: int
) -> None:
    assert len(sample_clients(3, 1, range(total), fraction)) == count


@given(st.integers(1, 200), st.floats(0.01, 1.0), st.integers(1, 50))
def test_participants_are_known_distinct_and_independent_of_the_order(
    total: int, fraction: float, server_round: int
) -> None:
    ids = list(range(100, 100 + total))
    chosen = sample_clients(3, server_round, ids[::-1], fraction)
    assert chosen == sorted(set(chosen)) and set(chosen) <= set(ids)
    assert chosen == sample_clients(3, server_round, ids, fraction)


def test_participants_are_those_of_the_draw_for_sampling() -> None:
    ids = [40, 10, 30, 20, 50]
    picked = rng(3, "sampling", 4).choice(5, size=2, replace=False)
    assert sample_clients(3, 4, ids, 0.4) == sorted((int(i) + 1) * 10 for i in picked)


def test_every_client_is_drawn_about_equally_often() -> None:
    counts = np.zeros(20)
    for server_round in range(1, 2001):
        for c in sample_clients(0, server_round, range(20), 0.25):
            counts[c] += 1
    expected = 2000 * 0.25
    chi2 = float(((counts - expected) ** 2 / (expected * 0.75)).sum())
    assert chi2 < 43.8, "chi-square with 19 degrees of freedom, 0.1 %"
