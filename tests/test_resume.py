"""What a resumed, refused or interrupted run must not do."""

from __future__ import annotations

import errno
import json
import os
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
from fedapp.config import check_continued, from_flat, read_toml, write_toml
from fedapp.engines import local as engines
from fedapp.engines import pool, runner
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
    with pytest.raises(BadRequest, match=r"leave out out$"):
        run(resume=result.out, out=result.out / "other")
    assert (result.out / "summary.json").read_text() == before and not (result.out / "error.json").exists()


def test_a_resumed_run_takes_every_key_that_may_change(tmp_path: Path) -> None:
    write_toml(tmp_path / "config.toml", from_flat({"method": "fedavg"}))
    for key in ("lost-state", "track", "wait-timeout", "round-timeout"):
        assert engines.resumed(tmp_path, {key: "x"})[key] == "x"
    with pytest.raises(BadRequest, match=r"num-server-rounds, lost-state, .* leave out lr"):
        engines.resumed(tmp_path, {"lr": 0.1, "round-timeout": 9.0})


def test_a_resumed_run_keeps_the_noise_of_its_rounds(tmp_path: Path) -> None:
    values = {"method": "lgfedavg", "dp": "client", "clip-update": 1.0}
    write_toml(tmp_path / "config.toml", from_flat({**values, "num-server-rounds": 10}))
    with pytest.raises(BadRequest, match=r"give dp-noise = \d"):
        check_continued(from_flat({**values, "num-server-rounds": 5}), tmp_path / "config.toml", 3)
    check_continued(from_flat({**values, "num-server-rounds": 10}), tmp_path / "config.toml", 3)


def test_a_resumed_run_keeps_its_settings(tiny: Tiny) -> None:
    path = tiny(method="fedavg", lr=0.02).out / "config.toml"
    before = path.read_bytes()
    flat = {**read_toml(path), "num-server-rounds": 3, "resume": True}
    with pytest.raises(BadRequest, match=r"settings \(local-epochs = 1, not 2; lr = 0\.02, not 0\.001\)"):
        changed = {**flat, "lr": 0.001, "local-epochs": 2}
        server_app.serve(LocalGrid(client_app, changed, 3), changed)
    assert path.read_bytes() == before and not (path.parent / "error.json").exists()
    left_open = {**flat, "clients": 0, "model": "auto"}
    assert server_app.serve(LocalGrid(client_app, left_open, 3), left_open)["rounds"] == 3


def test_a_resume_needs_the_rounds_before_it(tiny: Tiny) -> None:
    out = tiny(method="fedavg").out
    table = out / "rounds.csv"
    header, first, second = whole = table.read_text().splitlines(keepends=True)
    table.write_text(header + second)
    with pytest.raises(BadRequest, match=r"rounds.csv lacks round 1"):
        run(resume=out, rounds=3)
    table.write_text(header + first + second)
    (out / "checkpoint").rename(out / "elsewhere")
    with pytest.raises(BadRequest, match="put checkpoint/ back"):
        run(resume=out, rounds=3)
    assert table.read_text() == "".join(whole) and (out / "final.csv").is_file()


def test_tables_are_on_the_disk_before_the_checkpoint(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def noted(handle: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        real(handle)

    monkeypatch.setattr(os, "fsync", noted)
    tiny(method="fedavg", evaluate_every=1)
    second = next(n for n, name in enumerate(synced) if name.startswith(".round-000002"))
    assert {"run0", "rounds.csv", "clients.csv", "evaluations.csv"} <= set(synced[second - 5 : second])


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


def test_the_reason_of_a_failure_is_todays_and_a_full_disk_is_one_line(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tiny(method="fedavg", rounds=1).out
    (out / "error.json").write_text('{"message": "yesterday", "traceback": "of yesterday"}')
    config = engines.prepare(engines.resumed(out, {"num-server-rounds": 2}), out)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(server_app, "found_checkpoint", full)
    with runner.Follower() as follower:
        assert runner.local(config, follower) == 1
    pool._run(config.to_flat())
    said = capfd.readouterr().err
    assert said == "the run failed: [Errno 28] No space left on device: make room there, then resume the run\n"


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
