"""Studies whose tables are short: heads in closed form, and the cost of checks."""

from __future__ import annotations

from pathlib import Path

from reproduction.studies import heads, trust


def test_the_table_of_heads_counts_in_how_many_seeds_each_was_first() -> None:
    rows = [{"a": 50.0, "b": 60.0}, {"a": 70.0, "b": 60.0}, {"a": 30.0, "b": 60.0}]
    assert heads.table(rows).splitlines()[2:] == ["| b | 60.0 ± 0.0 | 2 |", "| a | 50.0 ± 20.0 | 1 |"]
    assert heads.table(rows[:1]).splitlines()[2] == "| b | 60.0 | 1 |"


def test_every_pair_of_rounds_has_one_with_checks_and_one_without(tmp_path: Path) -> None:
    values = {"dataset": "digits", "method": "fedavg", "clients": 2, "local-epochs": 1}
    pairs = trust.rounds_of(values, tmp_path, 2)
    assert len(pairs) == 2 and all(a.inside > 0 and b.inside == 0 for a, b in pairs)
    assert all(a.seconds > a.inside and b.seconds > 0 for a, b in pairs)
