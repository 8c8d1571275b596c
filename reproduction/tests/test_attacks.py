"""The benchmark of attacks: what the liars' updates are, which cells there are, and how the table reads."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, RecordDict

from fedapp.engines.local import prepare
from fedapp.transport.local_grid import _identify
from fedapp.transport.records import ARRAYS
from reproduction.studies import attacks

HONEST = np.random.default_rng(0).normal(size=(8, 30)) + 1.0
OWN = np.arange(30.0) - 10


def test_the_page_holds_the_tables_of_what_is_kept() -> None:
    page, kept = (Path(__file__).parents[2] / place for place in (attacks.PAGE, attacks.FILE))
    text = page.read_text(encoding="utf-8")
    lines = attacks.table(json.loads(kept.read_text(encoding="utf-8"))).splitlines()
    assert attacks.replaced(text, "attacks", lines) == text, "run: python -m reproduction study attacks --table"


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


def test_the_table_says_what_was_run_and_what_a_rule_holds() -> None:
    runs = {
        "fedavg none none 0 0.5": {"accuracy": 0.9}, "fedavg none none 1 0.5": {"accuracy": 0.8},
        "fedavg none none 2 0.5": {"accuracy": 0.7}, "fedavg backdoor none 0 0.5": {"accuracy": 0.5, "backdoor": 1.0},
        "fedavg backdoor median 0 0.5": {"accuracy": 0.0, "ended": "RoundFailed"},
        "fedavg none median 0 0.5": {"accuracy": 0.75}, "fedavg sign median 0 0.5": {"accuracy": 0.6},
        "fedavg none none 0 0.1": {"accuracy": 0.6},
    }  # fmt: skip
    text = attacks.table({"machine": "a processor", "runs": runs})
    assert "seeds 0, 1, 2, a processor" in text
    assert "| none | 0.800 (0.700) | 0.750 (0.750), 1 of 3 |" in text
    assert "| backdoor | 0.500 (0.500), success 1.00, 1 of 3 | 0.000 (0.000)†, 1 of 3 |" in text
    assert "| fedavg | 0.5 | none | – | 30.0 (backdoor) | 1.00 |" in text
    assert "| fedavg | 0.5 | median | 5.0 | 80.0 (backdoor) | – |" in text
    assert "| fedavg | 0.1 | none | – | – | – |" in text
    assert "**fedavg**, Dirichlet 0.1\n\n| attack | none |\n|---|---|\n| none | 0.600 (0.600), 1 of 3 |" in text


def test_statistics_are_changed_as_the_attack_says() -> None:
    _identify(1)
    honest = {
        "statistics/mean": np.arange(6.0, dtype=np.float32).reshape(3, 2),
        "statistics/count": np.array([2, 3, 4]),
        "statistics/cov": np.ones((3, 3), np.float32),
    }
    found = {}
    for attack in attacks.ON_STATISTICS:
        grid = attacks.AttackedGrid({}, attack)
        reply = Message(RecordDict({ARRAYS: ArrayRecord({n: Array(a) for n, a in honest.items()})}), 1, "query")
        grid._change_statistics(reply)
        found[attack] = {n: a.numpy() for n, a in reply.content.array_records[ARRAYS].items()}
    moved = np.array([[4, 5], [0, 1], [2, 3]], np.float32)
    for attack in ("permute", "swap"):
        np.testing.assert_array_equal(found[attack]["statistics/mean"], moved)
    np.testing.assert_allclose(found["shift"]["statistics/mean"][0], [0.7 * 4, 0.3 + 0.7 * 5], rtol=1e-6)
    assert found["permute"]["statistics/count"].tolist() == [10**6] * 3
    assert all(found[a]["statistics/count"].tolist() == [2, 3, 4] for a in ("swap", "shift", "wide"))
    assert found["wide"]["statistics/cov"].max() == 1e4


@pytest.mark.full
def test_a_made_up_count_is_what_the_server_registers(tmp_path: Path) -> None:
    """And an attack on statistics goes on from a training that is over."""
    small = {**attacks.SETTINGS, "num-server-rounds": 1, "data-fraction": 0.3, "local-epochs": 1}
    with mock.patch.dict(attacks.SETTINGS, small):
        found = attacks.measure("ccvr", "none", "none", 0, "0.5", tmp_path / "clean")
        lying = attacks.measure("ccvr", "permute", "none", 0, "0.5", tmp_path / "lying", tmp_path / "clean")
    assert "ended" not in found and "ended" not in lying and lying["accuracy"] < found["accuracy"]
    tables = [(tmp_path / f / "rounds.csv").read_text() for f in ("clean", "lying")]
    assert tables[0] == tables[1], "the round is not run again"
