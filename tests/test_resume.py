"""What a resumed, refused or interrupted run must not do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fedapp import server_app
from fedapp.client_app import app as client_app
from fedapp.config import from_flat
from fedapp.engines.local import RunResult, run
from fedapp.errors import BadRequest
from fedapp.learning.state import read_safetensors, write_safetensors
from fedapp.results import analysis
from fedapp.results.directory import keep_rows
from fedapp.results.loading import load
from fedapp.results.runs import read_run
from fedapp.transport import checkpoint
from fedapp.transport.local_grid import LocalGrid

Tiny = Callable[..., RunResult]


def test_a_refused_resume_leaves_the_finished_run_as_it_was(tiny: Tiny) -> None:
    result = tiny(method="local", rounds=2)
    before = (result.out / "summary.json").read_text()
    with pytest.raises(BadRequest, match="already holds 2 rounds"):
        run(resume=result.out, rounds=1)
    assert (result.out / "summary.json").read_text() == before and not (result.out / "error.json").exists()


def test_nodes_that_were_counted_stay_counted(tmp_path: Path) -> None:
    """`clients = 0` becomes the number that was found, so that a resumed run deals the data as before."""
    values = {"method": "local", "num-server-rounds": 1, "local-epochs": 1, "out": str(tmp_path / "run")}
    flat = from_flat(values).to_flat()
    server_app.serve(LocalGrid(client_app, flat, 3), flat)
    resumed = run(resume=tmp_path / "run", rounds=2)
    assert resumed.summary["clients"] == 3 and list(resumed.rounds["clients"]) == [3, 3]


def test_a_damaged_checkpoint_is_named_and_the_numbers_are_those_of_the_whole_run(tiny: Tiny) -> None:
    """Clients keep as many rounds as the server, so that they can go back with it."""
    result = tiny(method="lgfedavg", rounds=3)
    before = result.rounds
    folder = result.out / "checkpoint"
    for server_round in (3, 2):
        path = folder / f"round-{server_round:06d}.safetensors"
        path.write_bytes(path.read_bytes()[:-5])
    again = run(resume=result.out, rounds=3)
    columns = [c for c in before if not c.endswith("seconds")]
    pd.testing.assert_frame_equal(again.rounds[columns], before[columns], check_exact=True)
    expected = ("round 3 is damaged", "round 2 is damaged", "rounds 2 to 3 are lost")
    assert [[words in text for words in expected].index(True) for text in again.summary["warnings"]] == [0, 1, 2]
    assert sorted(p.name for p in folder.glob("*.damaged")) == [f"round-00000{r}.safetensors.damaged" for r in (2, 3)]


def test_without_a_good_checkpoint_a_resume_is_refused_and_changes_no_table(tiny: Tiny) -> None:
    result = tiny(method="fedavg", rounds=1)
    before = (result.out / "rounds.csv").read_text()
    (result.out / "checkpoint" / "round-000001.safetensors").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(BadRequest, match=r"no checkpoint in .* can be read"):
            run(resume=result.out, rounds=2)
    assert (result.out / "rounds.csv").read_text() == before and result.summary["ok"]


@pytest.mark.parametrize("text", [None, "", "{}", "[1]"])
def test_a_run_whose_token_is_gone_is_not_resumed(text: str | None, tiny: Tiny) -> None:
    result = tiny(method="local", rounds=1)
    path = result.out / "versions.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(BadRequest, match=r"cannot read .*versions.json \(the run's token"):
        run(resume=result.out, rounds=2)
    assert (result.out / "rounds.csv").is_file()


def test_a_run_of_an_earlier_version_is_not_resumed_and_its_directory_is_read(tiny: Tiny) -> None:
    """Its checkpoint does not hold the states of the hooks."""
    result = tiny(method="fedavg", rounds=1)
    folder = result.out / "checkpoint"
    _, state, _ = checkpoint.load(folder, 1)
    arrays, scalars = checkpoint.flatten(state)
    _, header = read_safetensors(folder / "round-000001.safetensors")
    about = {name: header[name] for name in ("method", "run", "federation")}
    header = {"schema": 2, **about, "round": 1, "scalars": scalars, "extra": {"best": None}, "order": list(arrays)}
    known = {"clients": np.arange(3), "digests": np.ones((3, 16), np.uint8), "binds": np.ones(3, np.uint8)}
    states = {f"\x1fstates\x1f{name}": array for name, array in known.items()}
    write_safetensors(folder / "round-000001.safetensors", {**arrays, **states}, header)
    before = (result.out / "summary.json").read_text()
    with pytest.raises(BadRequest, match="another version of fedapp wrote the checkpoint of 1 round") as refused:
        run(resume=result.out, rounds=2)
    assert "\n" not in str(refused.value) and (result.out / "summary.json").read_text() == before
    again = read_run(result.out)
    assert again.score("trained") == result.score("trained") and set(analysis.server_state(again)) == set(state)
    assert load(result.out, 0).about


def test_other_data_than_before_are_refused(tiny: Tiny) -> None:
    result = tiny(method="local", rounds=1)
    config = (result.out / "config.toml").read_text()
    (result.out / "config.toml").write_text(config.replace("alpha = 0.5", "alpha = 5.0"))
    with pytest.raises(BadRequest, match="split differently from those of 1 round before"):
        run(resume=result.out, rounds=2)


def test_evaluations_between_rounds_are_made_up_for(tiny: Tiny, tmp_path: Path) -> None:
    common = {"method": "fedavg", "evaluate_every": 2, "fraction_train": 0.67}
    whole = tiny(rounds=5, **common)
    tiny(rounds=2, out=tmp_path / "part", **common)
    rest = run(resume=tmp_path / "part", rounds=5)
    a, b = (pd.read_csv(r.out / "evaluations.csv") for r in (whole, rest))
    keep = [c for c in a.columns if not c.endswith("seconds")]
    assert list(a["round"]) == [2, 4]
    pd.testing.assert_frame_equal(a[keep], b[keep], check_exact=True)


def test_a_stopped_run_stays_stopped(tiny: Tiny) -> None:
    common = {"method": "local", "lr": 1e-9, "patience": 2, "clients": 4, "fraction_train": 0.5}
    result = tiny(rounds=40, **common)
    again = run(resume=result.out)
    assert again.summary["rounds"] == result.summary["rounds"] and again.summary["stopped"] == result.summary["stopped"]


def test_best_is_the_model_that_was_scored(tiny: Tiny) -> None:
    """Where `received` decides, row t speaks of what round t had sent: the state after round t - 1."""
    result = tiny(method="lgfedavg", rounds=4, lr=0.3)
    scores = result.rounds["received_accuracy"]
    best = int(result.rounds["round"][scores[1:].idxmax()]) - 1
    arrays, header = read_safetensors(result.out / "models" / "best.safetensors")
    assert header["round"] == best and header["received_accuracy"] == pytest.approx(scores[1:].max())
    shorter = tiny(method="lgfedavg", rounds=best, lr=0.3)
    last, _ = read_safetensors(shorter.out / "models" / "last.safetensors")
    assert all(np.array_equal(arrays[n], last[n]) for n in last)


def test_the_servers_threads_are_its_own(tmp_path: Path) -> None:
    seen: list[int] = []

    class Watched(LocalGrid):
        def pull_messages(self, message_ids: object) -> object:  # type: ignore[override]
            replies = super().pull_messages(message_ids)  # type: ignore[arg-type]
            seen.append(torch.get_num_threads())
            return replies

    values = {
        "method": "local", "num-server-rounds": 1, "local-epochs": 1, "clients": 2, "server-threads": 2,
        "out": str(tmp_path / "run"),
    }  # fmt: skip
    flat = from_flat(values).to_flat()
    before = torch.get_num_threads()
    try:
        server_app.serve(Watched(client_app, flat, 2), flat)
        assert set(seen) == {2}
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("damage", ["", "round,clients\n1,3\n2"])
def test_a_table_that_a_kill_cut_off_does_not_stop_a_resume(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "rounds.csv"
    path.write_text(damage)
    keep_rows(path, lambda row: int(row[0]) <= 5)
    assert path.read_text() == ("round,clients\n1,3\n" if damage else "")


def test_a_later_fault_of_the_server_is_not_blamed_on_an_earlier_client(tmp_path: Path) -> None:
    from fedapp.transport.traffic import RoundFailed
    from tests.test_cohorts import FAULTS, Faulty

    values = {
        "method": "lgfedavg", "clients": 3, "num-server-rounds": 3, "local-epochs": 1, "batch-size": 64,
        "min-replies": 0.6, "out": str(tmp_path / "run"),
    }  # fmt: skip
    flat = from_flat(values).to_flat()

    class Later(Faulty):
        def push_messages(self, messages):  # type: ignore[no-untyped-def]
            if self.trains >= 2:
                raise OSError("no space left")
            return super().push_messages(messages)

    with pytest.raises(OSError, match="no space left"):
        server_app.serve(Later(FAULTS["error reply"][0], 3, flat), flat)
    error = json.loads((tmp_path / "run" / "error.json").read_text())
    assert error["client"] is None and error["stage"] == "server" and "no space left" in error["traceback"]
    assert issubclass(RoundFailed, RuntimeError)
    register = {"client": 4, "round": 0, "stage": "register", "traceback": "theirs", "message": "no data"}
    known: Any = SimpleNamespace(manager=SimpleNamespace(first_error=register))
    failed = server_app._entry(RoundFailed("round 0: 1 valid replies of 5", 0), known)
    assert failed["client"] is None, "a client that was left out at registration does not fail a query before round 1"
    assert server_app._entry(BadRequest("too few"), known)["client"] == 4
