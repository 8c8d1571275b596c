"""The discrete Gaussian: exact probabilities on a coarse grid, the shape on the fine one, and the source of bits."""

from __future__ import annotations

import os

import numpy as np
import pytest
from scipy import stats

from fedapp.core import noise


@pytest.mark.parametrize("bits", [0, 1, 3])
def test_probabilities_are_those_of_the_discrete_gaussian(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a grid so coarse that every number occurs often, by chi-square against exp(-y^2 / 2 sigma^2)."""
    monkeypatch.setattr(noise, "BITS", bits)
    monkeypatch.setattr(noise, "STEPS", 1 << bits)
    drawn = noise.discrete_gaussian(200_000, noise.seeded(3))
    support = np.arange(-60, 61)
    p = np.exp(-(support**2) / (2.0 * (1 << bits) ** 2))
    expected = p / p.sum() * len(drawn)
    often = expected > 10
    seen = np.array([(drawn == y).sum() for y in support])
    assert stats.chisquare(seen[often], expected[often] * seen[often].sum() / expected[often].sum()).pvalue > 1e-3
    assert abs(seen[~often].sum() - expected[~often].sum()) < 30


def test_the_fine_grid_has_the_shape_of_the_gaussian() -> None:
    x = noise.discrete_gaussian(100_000, noise.seeded(1)) / noise.STEPS
    assert stats.kstest(x, "norm").pvalue > 1e-3
    assert x.std() == pytest.approx(1, abs=0.01) and abs(x.mean()) < 0.01
    assert len(np.unique(x)) > 99_000  # the low digits are used: a coarse grid would repeat


def test_bits_are_the_operating_systems_unless_a_test_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def urandom(count: int) -> bytes:
        asked.append(count)
        return noise.seeded(len(asked))(count)

    monkeypatch.setattr(os, "urandom", urandom)
    noise.discrete_gaussian(100)
    assert sum(asked) > 100 * noise.BITS / 8
    before = len(asked)
    assert np.array_equal(noise.discrete_gaussian(50, noise.seeded(5)), noise.discrete_gaussian(50, noise.seeded(5)))
    assert len(asked) == before


def test_a_source_that_repeats_itself_is_noticed() -> None:
    with pytest.raises(OverflowError):
        noise.discrete_gaussian(10, lambda count: b"\x00\x00\x00\x00" * (count // 4))
