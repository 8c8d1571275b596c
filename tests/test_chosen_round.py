"""`select = "validation"`: the round that is scored at the end is chosen on validation rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest

from clients.base import FedClient
from fedapp import config, server_app
from fedapp.engines.local import run
from fedapp.errors import BadRequest
from fedapp.federation.hooks.scores import ValidationChoice
from fedapp.learning.state import StateError, read_safetensors
from fedapp.results import tables
from fedapp.results.directory import RunDirectory
from fedapp.results.runs import RunResult
from fedapp.transport import checkpoint
from tests.matrix import methods

Tiny = Callable[..., RunResult]
CHOOSING: dict[str, Any] = {"validation": 0.2, "select": "validation"}


def reproducible(table: pd.DataFrame) -> pd.DataFrame:
    return table[[c for c in table if not c.endswith("seconds")]]


def leads(self: ValidationChoice) -> int | None:
    """Round 2 leads from the moment that it is evaluated."""
    seen = [int(r) for r in self.run.directory.table("evaluations.csv").get("round", [])]
    return min(2, seen[-1]) if seen else None


METHODS = ["fedavg", "local", "lgfedavg", "fedclassavg", "fedproto", "fedgh", "ktpfl", "fedfomo", "fedamp", "ifca",
           "cwfedavg", "ccvr"]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("method", methods(METHODS))
def test_the_end_is_that_of_a_run_which_stopped_at_the_chosen_round(
    method: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round 2 of 5 is chosen; sampled clients have last trained in any round before it, or in none."""
    common = {"method": method, "clients": 4, "fraction_train": 0.5, "validation": 0.2}
    short = tiny(rounds=2, **common)
    monkeypatch.setattr(ValidationChoice, "best_round", leads)
    result = tiny(rounds=5, select="validation", **common)
    assert result.summary["round"] == result.summary["headline"]["round"] == 2 and result.summary["rounds"] == 5
    assert "round 2, chosen on validation rows" in result.summary["headline"]["point"]
    pd.testing.assert_frame_equal(reproducible(result.final), reproducible(short.final), check_exact=True)
    for protocol, scores in short.summary["accuracy"].items():
        assert result.summary["accuracy"][protocol]["last"] == scores["last"]
    if (short.out / "models" / "last.safetensors").exists():
        (one, header), (other, _) = (read_safetensors(r.out / "models" / "last.safetensors") for r in (result, short))
        assert header["round"] == 2 and all(np.array_equal(one[n], other[n]) for n in other)
    assert [p.name for p in (result.out / "selected").iterdir()] == ["round-000002.safetensors"]


@pytest.mark.full
def test_the_highest_mean_over_all_clients_on_validation_images_chooses(tiny: Tiny) -> None:
    result = tiny(method="fedavg", clients=5, fraction_train=0.4, rounds=6, lr=0.4, data_fraction=1.0, **CHOOSING)
    rows = result.evaluations.set_index("round")
    best = rows["received_validation"].idxmax()
    assert list(rows.index) == [1, 2, 3, 4, 5, 6] and set(rows["clients"]) == {5}
    assert best == result.summary["round"] != rows["received_accuracy"].idxmax(), "test images would choose another"
    assert result.final["received_validation"].mean() == rows["received_validation"][best]
    assert result.score("received") == rows["received_accuracy"][best]
    curve = result.curve("trained")
    assert curve["completed"].is_monotonic_increasing and best in set(curve["completed"])
    assert result.flat["evaluate-every"] == 1
    assert tiny(method="fedavg", rounds=1, validation=0.2).summary["round"] == 1


def test_choosing_trains_nobody(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[int] = []
    measured: list[str] = []
    whole, measure = FedClient.train_to_score, FedClient.measure
    monkeypatch.setattr(
        FedClient,
        "measure",
        lambda self, protocol, *a, **k: measured.append(protocol) or measure(self, protocol, *a, **k),
    )
    monkeypatch.setattr(
        FedClient, "train_to_score", lambda self, *a, **k: scored.append(self.round) or whole(self, *a, **k)
    )
    result = tiny(method="fedavg", rounds=3, **CHOOSING)
    assert scored == [result.summary["round"] + 1] * 3, "once at the end, by each client"
    assert not [c for c in result.evaluations if c.startswith("trained")]
    assert measured.count("trained") == 3 * (3 + 1) and measured.count("received") == 3 * (3 + 3 + 1)


def test_the_first_of_equal_rounds_and_only_evaluated_ones_count(tiny: Tiny) -> None:
    result = tiny(method="fedavg", rounds=5, lr=1e-9, evaluate_every=2, **CHOOSING)
    assert list(result.evaluations["round"]) == [2, 4] and result.evaluations["received_validation"].nunique() == 1
    assert result.summary["round"] == 2


@pytest.mark.full
@pytest.mark.parametrize(("method", "last"), [("fedavg", 4), ("fedamp", 5)])
def test_a_resumed_run_chooses_the_same(method: str, last: int, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ran three rounds, then went on and was killed before the evaluation of round `last` was recorded."""
    common = {"method": method, "clients": 4, "fraction_train": 0.5, "lr": 0.4, **CHOOSING}
    whole = tiny(rounds=5, **common)
    part = tiny(rounds=3, **common)
    append = RunDirectory.append

    def killed(self: RunDirectory, name: str, *rows: Mapping[str, Any]) -> None:
        if name == "evaluations.csv" and rows[0]["round"] == last:
            raise KeyboardInterrupt
        append(self, name, *rows)

    monkeypatch.setattr(RunDirectory, "append", killed)
    with pytest.raises(KeyboardInterrupt):
        run(resume=part.out, rounds=5)
    monkeypatch.setattr(RunDirectory, "append", append)
    rest = run(resume=part.out, rounds=5)
    for name in ("rounds", "clients", "evaluations", "final"):
        one, other = (reproducible(getattr(r, name)) for r in (whole, rest))
        pd.testing.assert_frame_equal(one, other, check_exact=True)
    assert rest.summary["round"] == whole.summary["round"]
    assert rest.summary["accuracy"] == whole.summary["accuracy"]


def test_a_chosen_state_that_is_lost_is_one_line(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ValidationChoice, "best_round", lambda self: 7)
    with pytest.raises(StateError, match=r"selected/round-000007.* put a good copy of it back") as failed:
        tiny(method="fedavg", rounds=1, **CHOOSING)
    assert server_app._entry(failed.value, None)["traceback"] == ""


def test_without_validation_scores_the_last_round_is_scored_with_a_warning(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ValidationChoice, "best_round", lambda self: None)
    result = tiny(method="fedavg", rounds=2, **CHOOSING)
    assert result.summary["round"] == 2 and "no validation scores" in result.summary["warnings"][0]


BAD = {
    "validation=0.1": {"select": "validation"},
    "measure it too": {**CHOOSING, "protocols": "trained,global"},
    "evaluates none of 3 rounds": {**CHOOSING, "evaluate-every": 4, "num-server-rounds": 3},
    "must be 'last' or 'validation'": {"select": "best"},
}


@pytest.mark.parametrize("says", BAD)
def test_settings_that_cannot_choose_are_refused(says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        config.from_flat(BAD[says])


def test_a_checkpoint_under_two_names(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a hard link, and as a copy where the file system has none."""
    for server_round in (1, 2, 3, 4):
        (tmp_path / "a").mkdir(exist_ok=True)
        checkpoint.save(tmp_path / "a", server_round,
                        {"w": np.full(2, server_round)}, {})  # fmt: skip
        checkpoint.link(tmp_path / "a", server_round, tmp_path / "b")
        if server_round == 2:
            monkeypatch.setattr("pathlib.Path.hardlink_to", lambda *a: (_ for _ in ()).throw(OSError("no links")))
    assert (tmp_path / "b" / "round-000001.safetensors").exists(), "the other folder keeps what one forgets"
    assert not (tmp_path / "a" / "round-000001.safetensors").exists()
    for server_round in (1, 2, 3, 4):
        assert list(checkpoint.load(tmp_path / "b", server_round)[1]["w"]) == [server_round] * 2
    checkpoint.only(tmp_path / "b", 2)
    assert [p.name for p in (tmp_path / "b").iterdir()] == ["round-000002.safetensors"]


def test_tables_say_that_a_round_was_chosen_and_show_no_best_on_test(tiny: Tiny) -> None:
    run = tiny(method="fedavg", rounds=2, **CHOOSING)
    assert "after the round that validation rows chose" in tables.meaning([run])
    assert not [name for name in (*tables.SCORES, *tables.SCORES.values()) if "best" in name]
