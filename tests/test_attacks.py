"""The benchmark of attacks: what the liars' updates are, which cells there are, and how the table reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import attacks
from fedapp.engines.local import prepare

HONEST = np.random.default_rng(0).normal(size=(8, 30)) + 1.0
OWN = np.arange(30.0) - 10


def test_lies_by_hand() -> None:
    np.testing.assert_array_equal(attacks.lie("sign", OWN, HONEST), -OWN)
    np.testing.assert_array_equal(attacks.lie("times-10", OWN, HONEST), -10 * OWN)
    np.testing.assert_array_equal(attacks.lie("times1000", OWN, HONEST), 1000 * OWN)
    np.testing.assert_array_equal(attacks.lie("backdoor", OWN, HONEST), 10 * OWN)
    np.testing.assert_array_equal(attacks.lie("none", OWN, HONEST), OWN)
    assert set(np.abs(attacks.lie("huge", OWN, HONEST))) == {3e38}
    expected = [np.mean(c) - 1.5 * np.std(c) for c in HONEST.T]
    np.testing.assert_allclose(attacks.lie("little", OWN, HONEST), expected)


def test_min_max_goes_as_far_as_the_honest_updates_are_apart() -> None:
    found = attacks.lie("min-max", OWN, HONEST)
    apart = max(np.linalg.norm(a - b) for a in HONEST for b in HONEST)
    assert max(np.linalg.norm(found - a) for a in HONEST) == pytest.approx(apart)
    back = found - HONEST.mean(axis=0)
    assert back @ HONEST.mean(axis=0) == pytest.approx(-np.linalg.norm(back) * np.linalg.norm(HONEST.mean(axis=0)))


def test_every_cell_is_a_run_that_is_accepted(tmp_path: Path) -> None:
    for method in ("fedavg", "cwfedavg", "fedgh", "ccvr"):
        for rule in attacks.RULES:
            if attacks.fits(method, "none", rule):
                prepare({**attacks.SETTINGS, **attacks.rule_settings(rule), "method": method}, tmp_path / "run")
    assert not attacks.fits("fedgh", "count", "none") and not attacks.fits("fedavg", "wide", "none")
    assert not attacks.fits("fedgh", "none", "median") and attacks.fits("ccvr", "wide", "own")


def test_the_table_says_what_was_run() -> None:
    runs = {
        "fedavg none none 0": {"accuracy": 0.9}, "fedavg none none 1": {"accuracy": 0.8},
        "fedavg none none 2": {"accuracy": 0.7}, "fedavg backdoor none 0": {"accuracy": 0.5, "backdoor": 1.0},
        "fedavg backdoor median 0": {"accuracy": 0.0, "ended": "RoundFailed"},
    }  # fmt: skip
    text = attacks.table({"machine": "a processor", "runs": runs})
    assert "seeds 0, 1, 2, a processor" in text
    assert "| none | 0.800 (0.700) | – |" in text
    assert "| backdoor | 0.500 (0.500), success 1.00, 1 of 3 | 0.000 (0.000)†, 1 of 3 |" in text
