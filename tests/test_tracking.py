"""Trackers: what the real libraries wrote, read back; the same in every engine; a tracker that fails costs no run."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from fedapp import cli, plugins
from fedapp.config import from_flat
from fedapp.engines import deploy, local
from fedapp.engines.local import run
from fedapp.errors import BadRequest
from fedapp.experiments import compare
from fedapp.results.directory import ANNOUNCED
from fedapp.results.figures import gallery
from fedapp.results.runs import RunResult, read_run
from fedapp.tracking import following
from fedapp.tracking.base import Tracked
from tests.recorder import FAILS, Recorder

SMALL: dict[str, Any] = {
    "method": "fedavg", "clients": 3, "local_epochs": 1, "batch_size": 64, "data_fraction": 0.3, "evaluate_every": 1,
}  # fmt: skip


def flat(**more: Any) -> dict[str, Any]:
    """The small run's keys with hyphens."""
    return {k.replace("_", "-"): v for k, v in {**SMALL, **more}.items()}


LOCAL = ["tensorboard", "mlflow", "wandb"]


# ---- the real libraries, on real files -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunResult]:
    """Two rounds with all three trackers, then a third by a resume from another folder."""
    for name in LOCAL:
        pytest.importorskip(name)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_MODE", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
            patch.delenv(name, raising=False)
        work = tmp_path_factory.mktemp("work")
        patch.setenv("WANDB_DATA_DIR", str(work / "wandb-data"))
        patch.setenv("WANDB_CACHE_DIR", str(work / "wandb-cache"))
        patch.setattr(gallery, "FIGURES", {"labels-heat": gallery.FIGURES["labels-heat"]})
        patch.chdir(work)
        run(**SMALL, rounds=2, track=",".join(LOCAL), out="runs/try")
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        yield run(resume=work / "runs" / "try", rounds=3)


def expected(result: RunResult) -> dict[str, dict[int, float]]:
    """What trackers must hold: names of a sample of the series, with their values by round."""
    rounds = result.rounds.set_index("round")
    found = {f"round/{c}": dict(rounds[c].items()) for c in ("received_accuracy", "train_loss", "bytes_up")}
    evaluations = result.evaluations.set_index("round")["trained_accuracy"]
    found["evaluation/trained_accuracy"] = dict(evaluations.items())
    for client, rows in result.clients.groupby("client"):
        found[f"client_trained_accuracy/{client}"] = dict(zip(rows["round"], rows["trained_accuracy"], strict=True))
    return found


@pytest.mark.full
def test_tensorboard_reads_the_run_back(real: RunResult) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(real.out / "tensorboard")).Reload()
    for name, values in expected(real).items():
        points = [(e.step, e.value) for e in events.Scalars(name)]
        assert [step for step, _ in points] == sorted(values)
        assert dict(points) == pytest.approx(values, rel=1e-6)
    assert [e.step for e in events.Scalars("final_client_trained_accuracy/2")] == [2, 3]
    last = events.Scalars("final/accuracy/trained/last")[-1]
    assert last.value == pytest.approx(real.score("trained"), rel=1e-6)
    image = events.Images("figures/labels-heat")[-1]
    assert image.step == 3 and image.width > 300
    texts = {tag: events.Tensors(f"{tag}/text_summary")[-1].tensor_proto.string_val[0].decode() for tag in (
        "configuration", "models", "status")}  # fmt: skip
    assert "| local-epochs | 1 |" in texts["configuration"] and texts["status"] == "finished"
    assert "models/last.safetensors" in texts["models"]
    plugin = events.SummaryMetadata("_hparams_/session_start_info").plugin_data
    assert plugin.plugin_name == "hparams" and b"local-epochs" in plugin.content


def test_mlflow_reads_the_run_back(real: RunResult) -> None:
    from mlflow import MlflowClient

    store = real.out.parents[1] / "mlflow.db"
    client = MlflowClient(f"sqlite:///{store}")
    experiment = client.get_experiment_by_name("fedapp")
    [found] = client.search_runs([experiment.experiment_id])
    number = found.info.run_id
    assert (found.info.run_name, found.info.status) == ("try", "FINISHED")
    for name, values in expected(real).items():
        points = [(m.step, m.value) for m in client.get_metric_history(number, name)]
        assert [step for step, _ in points] == sorted(values)
        assert dict(points) == pytest.approx(values)
    assert found.data.params["local-epochs"] == "1" and found.data.params["num-server-rounds"] == "2"
    assert found.data.tags["num-server-rounds"] == "3" and found.data.tags["method"] == "fedavg"
    assert found.data.metrics["final/accuracy/trained/last"] == pytest.approx(real.score("trained"))
    kept = {f.path: f for f in client.list_artifacts(number, "models")}
    assert kept["models/last.safetensors"].file_size == (real.out / "models" / "last.safetensors").stat().st_size
    for folder, file in (("models/clients/2", "personal.safetensors"), ("figures", "labels-heat.png")):
        assert f"{folder}/{file}" in {f.path for f in client.list_artifacts(number, folder)}
    assert "summary.json" in {f.path for f in client.list_artifacts(number)}
    assert sqlite3.connect(store).execute("select count(*) from runs").fetchone() == (1,)


@pytest.mark.parametrize(
    ("uri", "kept", "told"),
    [
        ("postgresql://user:secret@/db?host=/run/sql", "", "postgresql"),
        ("mysql+pymysql://u:secret@h/db", "", "h"),
        ("https://u:secret@flow.example", "", "flow.example"),
        ("sqlite:////a/b.db", "sqlite:////a/b.db", "sqlite:////a/b.db"),
        ("mlruns", "mlruns", "mlruns"),
        ("file:///a", "file:///a", "file:///a"),
    ],
)
def test_no_password_of_an_address_reaches_the_run_directory(
    uri: str, kept: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedapp.tracking import mlflow

    client = MagicMock()
    client.get_run.return_value.data.params = {}
    monkeypatch.setattr(mlflow, "MlflowClient", lambda uri: client)
    tracker = mlflow.MLflow(Tracked(tmp_path, "a", {}, {}, key=f"{uri}#7", step=0))
    assert (tracker.key, tracker.where) == (f"{kept}#7", f"run 7 in {told}")


def records(file: Path) -> Iterator[Any]:
    """Yield the records of an offline run of W&B: its own messages in the blocks of a LevelDB log."""
    from wandb.proto import wandb_internal_pb2

    content, at, whole = file.read_bytes(), 7, b""
    while at < len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def test_wandb_keeps_the_run_offline(real: RunResult) -> None:
    files = sorted((real.out / "wandb").glob("offline-run-*/*.wandb"))
    found = [list(records(f)) for f in files]
    runs = [next(r.run for r in part if r.HasField("run")) for part in found]
    assert len(files) == 2 and len({r.run_id for r in runs}) == 1 and runs[0].project == "fedapp"
    history: dict[str, list[tuple[float, float]]] = defaultdict(list)
    artifacts: dict[str, set[str]] = {}
    for record in (r for part in found for r in part):
        if record.HasField("history"):
            row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            for name, value in row.items():
                if "step" in row and isinstance(value, float):
                    history[name].append((row["step"], value))
        if record.HasField("request") and record.request.HasField("log_artifact"):
            artifact = record.request.log_artifact.artifact
            artifacts[artifact.type] = {e.path for e in artifact.manifest.contents}
        if record.HasField("artifact"):
            artifacts[record.artifact.type] = {e.path for e in record.artifact.manifest.contents}
    for name, values in expected(real).items():
        if name != "round/bytes_up":  # whole numbers
            assert dict(history[name]) == pytest.approx(values)
            assert len(history[name]) == len(values)
    settings = {u.key or "/".join(u.nested_key): u.value_json for u in runs[0].config.update}
    assert settings["local-epochs"] == "1"
    assert {"models/last.safetensors", "models/clients/2/personal.safetensors"} <= artifacts["model"]
    assert list((real.out / "wandb").rglob("media/images/figures/labels-heat*.png"))


def test_what_the_libraries_send_is_the_users_choice(real: RunResult, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    from fedapp.tracking.mlflow import MLflow
    from fedapp.tracking.wandb import Wandb

    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    given: list[dict[str, Any]] = []

    class Stop(Exception):
        pass

    def init(**settings: Any) -> None:
        given.append(settings)
        raise Stop

    monkeypatch.setattr(wandb, "init", init)
    told = Tracked(real.out, "try", {}, {"method": "fedavg", "dataset": "digits"})
    for mode in ("", "online"):
        monkeypatch.setenv("WANDB_MODE", mode)
        with pytest.raises(Stop):
            Wandb(told)
    assert [g["mode"] for g in given] == ["offline", "online"]
    server = MagicMock()
    server.get_run.return_value.data.params = {}
    monkeypatch.setattr("fedapp.tracking.mlflow.MlflowClient", lambda uri: server)
    monkeypatch.setattr("fedapp.tracking.mlflow.mlflow.get_tracking_uri", lambda: "https://me:secret@tracks.example")
    tracker = MLflow(told)
    assert "secret" not in tracker.key + tracker.where and "tracks.example" in tracker.where


# ---- the mechanism ---------------------------------------------------------------------------------------------------


def steps(told: list[tuple[Any, ...]], prefix: str = "round/") -> list[int]:
    return [t[1] for t in told if t[0] == "log" and any(k.startswith(prefix) for k in t[2])]


def test_the_same_is_tracked_in_this_process_from_a_file_and_from_a_servers_log(
    recorded: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    result = run(**SMALL, rounds=2, track="records", out=tmp_path / "here")
    here = list(recorded)
    assert here[0] == ("begin", "") and here[-1] == ("end", "finished", True, "")
    assert steps(here) == [1, 2] and steps(here, "evaluation/") == [1] and steps(here, "final_client_") == [2]
    events = [json.loads(line) for line in (result.out / "progress.jsonl").read_text().splitlines()]

    recorded.clear()
    with following.tracked(from_flat({**result.flat, "resume": False}), None, tmp_path / "ray") as told:
        assert told is not None
        (tmp_path / "ray").mkdir()
        for event in events:
            told(event)
    assert [t for t in recorded if t[0] == "log"] == [t for t in here if t[0] == "log"]

    recorded.clear()
    copy = tmp_path / "copy"
    copy.mkdir()
    lines: list[str] = []
    config = from_flat({**result.flat, "resume": False})
    remote = deploy.RemoteRun(copy, config, type("Shows", (), {"line": lines.append, "__call__": lambda *_: None})())
    with following.tracked(config, remote.follower, copy) as told:
        remote.listener = told
        for event in events:
            remote.text(f"{ANNOUNCED}{json.dumps(event)}\n")
    assert remote.copy is not None and read_run(copy).ok
    assert [t for t in recorded if t[0] in ("log", "end")] == [t for t in here if t[0] in ("log", "end")]
    assert ("files", "models", []) not in recorded and [t[1] for t in recorded if t[0] == "files"] == ["tables"]


def test_a_resumed_run_goes_on_under_its_key_and_doubles_no_step(
    recorded: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run(**SMALL, rounds=2, track="records", out=out)
    state = json.loads((out / "tracking.json").read_text())
    assert state == {"records": {"key": "k1", "round": 2}}
    recorded.clear()
    run(resume=out, rounds=3)
    assert recorded[0] == ("begin", "k1") and steps(recorded) == [3] and steps(recorded, "final_client_") == [3]
    assert [t[0] for t in recorded].count("files") and recorded[-1] == ("end", "finished", True, "")
    recorded.clear()
    run(resume=out, rounds=3)  # nothing is left to do but the last scores
    assert recorded[0] == ("begin", "k1") and steps(recorded) == steps(recorded, "client_") == []


def test_a_run_whose_figures_fail_has_finished_all_the_same(
    recorded: list[tuple[Any, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(following, "RunResult", full)
    assert run(**SMALL, rounds=1, track="records", out=tmp_path / "run").ok
    assert recorded[-1] == ("end", "finished", True, "")
    assert "not all figures and files are tracked: OSError: the disk is full" in capsys.readouterr().err


def test_a_tracker_that_is_added_later_gets_the_rounds_before(recorded: list[tuple[Any, ...]], tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(**SMALL, rounds=2, out=out)
    assert not recorded and not (out / "tracking.json").exists()
    result = run(resume=out, rounds=3, track="records")
    assert steps(recorded) == [1, 2, 3] and steps(recorded, "client_") == [1, 2, 3]
    first = next(t[2] for t in recorded if t[0] == "log" and "round/train_loss" in t[2])
    assert first["round/train_loss"] == result.rounds["train_loss"][0]
    assert read_run(out).flat["track"] == "records"


def test_a_tracker_that_fails_ends_no_run_and_catches_up(
    recorded: list[tuple[Any, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    FAILS.add("log 2")
    out = tmp_path / "run"
    result = run(**SMALL, rounds=3, track="breaks,records", out=out)
    told = capsys.readouterr().err
    assert result.ok and told.count("breaks failed") == 1 and "the server is gone" in told
    state = json.loads((out / "tracking.json").read_text())
    assert (state["breaks"]["round"], state["records"]["round"]) == (1, 3)
    assert [t for t in recorded if t[0] == "end"] == [("end", "finished", True, "")]
    monkeypatch.setattr(sys, "argv", ["fedapp", "track", str(out), "--to", "breaks"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr().out
    assert ended.value.code == 1 and "breaks failed (ConnectionError: the server is gone" in told
    assert told.endswith(f"; mend the cause and repeat fedapp track {out} --to breaks\n")
    recorded.clear()
    FAILS.clear()
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code and recorded[0] == ("begin", "k1") and recorded[-1][:2] == ("end", "finished")
    assert steps(recorded) == [2, 3] and steps(recorded, "client_") == [2, 3]
    assert steps(recorded, "final_client_") == [3]


def test_a_tracker_that_cannot_begin_ends_no_run(
    recorded: list[tuple[Any, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Recorder, run: Tracked) -> None:
        raise RuntimeError("no disk")

    monkeypatch.setattr(Recorder, "__init__", broken)
    assert run(**SMALL, rounds=1, track="records", out=tmp_path / "run").ok
    assert capsys.readouterr().err.count("records failed, the run goes on without it (RuntimeError: no disk (") == 1
    assert not recorded


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), "interrupted"), (RuntimeError("no power"), "failed")]
)
def test_trackers_learn_how_a_run_ended(
    error: BaseException, status: str, recorded: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listener(event: Mapping[str, Any]) -> None:
        if event["kind"] == "round":
            raise error

    config = local.prepare(flat(track="records"), tmp_path / "run")
    with pytest.raises(type(error)):
        local.run_local(config, listener)
    assert [t[1] for t in recorded if t[0] == "end"] == [status]
    recorded.clear()
    following.track(read_run(tmp_path / "run"), "records", None)
    assert steps(recorded) == [1] and [t[1] for t in recorded if t[0] == "end"] == [status]


def test_many_clients_have_no_curves_of_their_own(
    recorded: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("fedapp.federation.hooks.events", "fedapp.tracking.following"):
        monkeypatch.setattr(f"{module}.MOST_CURVES", 2)
    told: list[str] = []
    config = local.prepare(flat(track="records", num_server_rounds=1), tmp_path / "run")
    local.run_local(config, lambda event: told.append(str(event.get("text"))))
    assert steps(recorded) == [1] and steps(recorded, "client_") == steps(recorded, "final_client_") == []
    assert any("3 clients have no curves of their own" in text for text in told)
    assert '"clients"' not in [json.loads(line)["kind"] for line in (tmp_path / "run/progress.jsonl").open()]


def test_what_is_missing_is_said_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec

    def find(name: str, *args: Any) -> Any:
        # A folder called wandb lies in the working folder of everyone who used it there.
        return real("fedapp.conf") if name == "wandb" else None if name == "mlflow" else real(name, *args)

    assert importlib.util.find_spec("fedapp.conf") is not None
    monkeypatch.setattr(importlib.util, "find_spec", find)
    for name in ("mlflow", "wandb"):
        out = tmp_path / name
        argv = ["fedapp", "run", "--engine", "local", "--track", name, "--out", str(out)]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        text = capsys.readouterr().err
        assert ended.value.code == 2 and text.count("\nfedapp: ") == 1 and f"pip install 'fedapp[{name}]'" in text
        assert not out.exists()
    with pytest.raises(BadRequest, match="did you mean 'mlflow'"):
        following.check("mlflw")
    with pytest.raises(BadRequest, match="no tracker given: choose from tensorboard"):
        following.track(RunResult(tmp_path), "", None)


def test_packages_add_trackers(
    recorded: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = plugins.Entry("trackers", "mine", "tests.recorder:Recorder", "addon 1.2")
    monkeypatch.setattr(plugins, "_read", lambda group: {"mine": [entry]} if group == "trackers" else {})
    result = run(**SMALL, rounds=1, track="mine", out=tmp_path / "run")
    assert steps(recorded) == [1] and result.ok
    assert recorded[-1] == ("end", "finished", True, "")


def test_tracking_is_no_other_configuration(
    recorded: list[tuple[Any, ...]], tmp_path: Path, in_turn: list[str], no_page: list[Path]
) -> None:
    values = {k: v for k, v in flat(num_server_rounds=1).items() if k != "method"}
    out = tmp_path / "compared"
    assert compare.run(compare.Plan(values, "local", 1), out) == 0
    assert compare.run(compare.Plan({**values, "track": "records"}, "local,fedavg", 1), out) == 0
    assert in_turn == ["local-s0", "fedavg-s0"] and [t[0] for t in recorded].count("begin") == 1


def test_numbers_do_not_depend_on_trackers(
    recorded: list[tuple[Any, ...]], tmp_path: Path, tiny: Callable[..., RunResult]
) -> None:
    with_, without = tiny(method="fedavg", track="records"), tiny(method="fedavg")
    same = [c for c in without.rounds if not c.endswith("seconds")]
    assert with_.rounds[same].equals(without.rounds[same])
    assert with_.final.filter(regex="accuracy").equals(without.final.filter(regex="accuracy"))
