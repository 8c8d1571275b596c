"""The kept runs of the ledger decide as their folders do, and only runs that are what their study asks for count."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import fedapp
from fedapp import __version__ as VERSION
from fedapp import config
from fedapp.engines import local, pool
from fedapp.errors import BadRequest
from fedapp.results.runs import RunResult
from reproduction.__main__ import app
from reproduction.ledger import archive, reproduce
from reproduction.ledger import studies as study_module
from reproduction.ledger.claims import Evidence, claims
from reproduction.ledger.studies import RunKey, Study, keys_of, settings_of, studies

STUDY = "ccvr-0.05"
KEYS = [RunKey(STUDY, "fedavg", seed) for seed in range(3)]


def made(out: Path, key: RunKey) -> None:
    """Write a run directory with random scores, which have all of their bits."""
    settings = local.effective(settings_of(key, {"data-dir": "/secret/data"})).replaced(out=str(out / key.folder))
    folder = out / key.folder
    folder.mkdir(parents=True)
    config.write_toml(folder / "config.toml", settings)
    rng = np.random.default_rng([key.seed, sum(map(ord, key.study + key.variant))])
    clients, rounds = settings.data.clients, settings.federation.num_server_rounds
    scores = {f"{p}_accuracy": rng.uniform(size=clients) for p in ("received", "trained")}
    scores["trained_accuracy"][0] = math.nan
    totals = rng.integers(3, 90, clients)
    counts: dict[str, Any] = {"received_correct": rng.integers(0, 3, clients), "received_total": totals}
    counts["received_loss"] = rng.random()
    scores["received_accuracy"] = counts["received_correct"] / totals
    final = pd.DataFrame({"client": range(clients), **scores, **counts, "client_seconds": 1.5})
    curves = {f"{p}_accuracy": np.sort(rng.uniform(size=rounds)) for p in ("received", "trained")}
    sizes = {"clients": clients, "bytes_up": 100.5, "bytes_down": 7, "dropped": 0}
    final.to_csv(folder / "final.csv", index=False)
    pd.DataFrame({"round": range(1, rounds + 1), **curves, **sizes}).to_csv(folder / "rounds.csv", index=False)
    calibration = {"base": "fedavg", **{name: rng.uniform() for name in ("before", "after", "oracle")}}
    summary = {
        "ok": True, "seconds": 60.0 + key.seed, "bytes_up": 1000 * len(key.variant), "bytes_down": 7,
        "accuracy": {
            p: {"last": float(np.nanmean(scores[f"{p}_accuracy"])), "balanced": rng.uniform()}
            for p in ("received", "trained")
        },
        **({"calibration": calibration} if "ccvr" in key.study else {}),
        "warnings": ["on host-7"],
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "versions.json").write_text(
        json.dumps({"fedapp": VERSION, "torch": "2.9", "machine": "x86_64", "run": "ab12"})
    )


def kept(tmp_path: Path, keys: list[RunKey] = KEYS) -> Path:
    for key in keys:
        made(tmp_path / "runs", key)
    archive.write(tmp_path / "kept", Evidence(tmp_path / "runs").finished())
    return tmp_path / "kept"


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of all runs of the ledger in `runs`, and their archive in `kept`."""
    folder = tmp_path_factory.mktemp("ledger")
    kept(folder, keys_of((study.id, variant) for study in studies().values() for variant in study.variants))
    return folder


@pytest.mark.full
def test_kept_runs_decide_as_their_folders_do(everything: Path, tmp_path: Path) -> None:
    folders, lines = Evidence(everything / "runs"), Evidence(None, archive.read(everything / "kept").runs)
    assert set(lines.finished()) == set(folders.finished())
    for one, other in ((folders.finished()[k], lines.finished()[k]) for k in folders.finished()):
        for name in ("final", "rounds"):
            there, here = getattr(one, name), getattr(other, name)
            assert set(here) == {c for c in there if not c.endswith("seconds")}
            kept = [c for c in here if not c.endswith("loss")]
            pd.testing.assert_frame_equal(there[kept], here[kept], check_exact=True)
        assert other.final["received_loss"].isna().all()
    verdicts = [[(c, c.decide(evidence)) for c in claims().values()] for evidence in (folders, lines)]
    assert verdicts[0] == verdicts[1]
    assert all("missing" not in verdict.ours for _, verdict in verdicts[1])
    for name, evidence, decided in (("a.md", folders, verdicts[0]), ("b.md", lines, verdicts[1])):
        reproduce.write(tmp_path / name, decided, evidence)
    assert (tmp_path / "a.md").read_text() == (tmp_path / "b.md").read_text()


@pytest.mark.full
def test_the_archive_is_small_text_without_places_of_the_machine(everything: Path) -> None:
    files = list((everything / "kept").iterdir())
    texts = [path.read_text() for path in files]
    assert len(files) == len(studies())
    assert sum(map(len, texts)) < 3000 * len(archive.read(everything / "kept").runs)
    assert not any(word in text for text in texts for word in ("/", "secret", "host-7", "ab12", "client_seconds"))


def test_an_archive_takes_up_new_runs_and_is_written_the_same_again(tmp_path: Path) -> None:
    folder = kept(tmp_path, KEYS[:1])
    made(tmp_path / "later", KEYS[2])
    assert set(archive.write(folder, Evidence(tmp_path / "later").finished()).runs) == {KEYS[0], KEYS[2]}
    assert set(archive.read(folder).runs) == {KEYS[0], KEYS[2]}
    before = (folder / f"{STUDY}.jsonl").read_text()
    archive.write(folder, {})
    archive.write(tmp_path / "copy", archive.read(folder).runs)
    assert before == (folder / f"{STUDY}.jsonl").read_text() == (tmp_path / "copy" / f"{STUDY}.jsonl").read_text()


@pytest.mark.full
@pytest.mark.parametrize(
    ("variant", "shared", "why"),
    [
        ({"settings": {"lr": 0.5}}, {}, "lr = 0.01 there, 0.5 now"),
        (
            {"args": "samples=7"},
            {},
            "method-args = '[^']*' there, '[^']*samples=7' now.*; samples = [0-9]+ there, 7 now",
        ),
        ({}, {"num-server-rounds": 11}, "num-server-rounds = 10 there, 11 now"),
        (None, {}, "no such run any more"),
    ],
)
def test_a_changed_setting_is_noticed(
    variant: dict[str, object] | None, shared: dict[str, object], why: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = kept(tmp_path)
    assert set(archive.read(folder).runs) == set(KEYS)
    known = dict(studies())
    study: Study = known[STUDY]
    variants = {} if variant is None else {"fedavg": study.variants["fedavg"].model_copy(update=variant)}
    known[STUDY] = study.model_copy(update={"variants": variants, "settings": {**study.settings, **shared}})
    for module in (study_module, archive):
        monkeypatch.setattr(module, "studies", lambda: known)
    found = archive.read(folder)
    assert not found.runs and set(found.stale) == set(KEYS)
    assert all(re.search(why, text) for text in found.stale.values())
    assert found.seconds[KEYS[1]] == 61.0, "they still say how long such a run takes"


@pytest.mark.full
@pytest.mark.parametrize("name", ["epochs", "base.mu"])
def test_a_changed_default_of_a_hyperparameter_is_noticed(name: str, tmp_path: Path) -> None:
    keys = keys_of([("ccvr-0.1", "moon")])
    folder = kept(tmp_path, keys)
    path = folder / "ccvr-0.1.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["hparams"][name] += 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = archive.read(folder)
    assert set(found.stale) == {keys[0]} and set(found.runs) == set(keys[1:])
    assert f"{name} = " in found.stale[keys[0]]


def edited(folder: Path, study: str, edit: Callable[[dict[str, Any]], object], line: int = 1) -> Path:
    """Change one line of a study's file, counted from 0."""
    path = folder / f"{study}.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    edit(lines[line])
    path.write_text("".join(json.dumps(text) + "\n" for text in lines))
    return path


def test_a_run_whose_method_has_a_new_hyperparameter_is_noticed(tmp_path: Path) -> None:
    """An earlier version compared models with another baseline; its line cannot say so."""
    keys = keys_of([("hetero-cifar10", "ktpfl")])
    folder = kept(tmp_path, keys)
    edited(folder, "hetero-cifar10", lambda line: line["hparams"].pop("step"))
    edited(folder, "hetero-cifar10", lambda line: line["hparams"].update(former=1), 2)
    found = archive.read(folder)
    assert set(found.runs) == {keys[2]}
    assert re.fullmatch(f"made by fedapp {re.escape(VERSION)}: step = missing there, .* now", found.stale[keys[0]])
    assert found.stale[keys[1]].endswith("former = 1 there, missing now")


def test_a_later_hyperparameter_that_changes_no_number_leaves_earlier_runs_as_they_are(tmp_path: Path) -> None:
    folder = kept(tmp_path, keys_of([("cw-mnist", "cwfedavg")]))
    edited(folder, "cw-mnist", lambda line: line["hparams"].pop("share"))
    edited(folder, "cw-mnist", lambda line: line["hparams"].update(share="head"), 2)
    assert [*archive.read(folder).stale.values()] == [f"made by fedapp {VERSION}: share = 'head' there, 'all' now"]


def test_runs_before_the_final_training_count_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their trained score is that of the last round's training."""
    folder = kept(tmp_path)
    edited(folder, STUDY, lambda line: line["config"].pop("final-training"), 0)
    found = archive.read(folder)
    assert not found.runs and all("final-training = missing there, True now" in why for why in found.stale.values())
    file = tmp_path / "runs" / KEYS[0].folder / "config.toml"
    file.write_text(file.read_text().replace("final-training = true\n", ""))
    written = archive.write(tmp_path / "later", Evidence(tmp_path / "runs").finished())
    assert set(written.stale) == {KEYS[0]} and "final-training" in written.stale[KEYS[0]]
    monkeypatch.setattr(reproduce, "prepared", lambda *args: config.from_flat({}))
    monkeypatch.setattr(reproduce, "pending_config", lambda config: None)
    with pytest.raises(
        BadRequest, match=f"made by fedapp {re.escape(VERSION)}, whose runs have no final-training.*Give a new --out"
    ):
        reproduce.reproduce(tmp_path / "runs", "", study_names=[STUDY])


def test_a_folder_of_another_version_is_not_kept(tmp_path: Path) -> None:
    """It does not say what the defaults of hyperparameters were."""
    for key, made_by in zip(KEYS, ({"fedapp": "0.0.1"}, {}, {"fedapp": VERSION}), strict=True):
        made(tmp_path / "runs", key)
        (tmp_path / "runs" / key.folder / "versions.json").write_text(json.dumps(made_by))
    written = archive.write(tmp_path / "kept", Evidence(tmp_path / "runs").finished())
    assert set(written.runs) == {KEYS[2]}
    assert f"made by fedapp 0.0.1, and this is {VERSION}" in written.stale[KEYS[0]]
    assert "made by fedapp an unknown version" in written.stale[KEYS[1]]


def _fewer_clients(line: dict[str, Any]) -> None:
    line["final"] = {k: v[:2] if isinstance(v, list) else v for k, v in line["final"].items()}


def _fewer_rounds(line: dict[str, Any]) -> None:
    line["rounds"] = {k: v[:2] if isinstance(v, list) else v for k, v in line["rounds"].items()}


def _put(column: list[float], value: float) -> None:
    column[1] = value


def _raised(line: dict[str, Any]) -> None:
    line["summary"]["accuracy"]["trained"]["last"] += 2e-9


FALSE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "clients": (_fewer_clients, r"final has the clients 0, 1, but the config has [0-9]+ of them"),
    "rounds": (_fewer_rounds, "rounds has the rounds 1, 2, but the config has 1 to 10"),
    "a client": (lambda line: _put(line["final"]["trained_accuracy"], 7.0), "final has trained_accuracy 7,"),
    "below 0": (lambda line: _put(line["rounds"]["received_accuracy"], -0.1), "rounds has received_accuracy -0.1,"),
    "more than all": (lambda line: _put(line["final"]["received_correct"], 500), "final has received_accuracy"),
    "above 1": (lambda line: line["summary"]["accuracy"]["trained"].update(last=7.0), "must be at most 1"),
    "mean": (_raised, "the last trained accuracy .* but the mean over the clients of final is"),
    "no mean": (lambda line: line["summary"]["accuracy"]["received"].update(last=None), "received accuracy None, but"),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", FALSE)
def test_a_line_that_contradicts_itself_is_refused(name: str, tmp_path: Path) -> None:
    edit, says = FALSE[name]
    path = edited(kept(tmp_path), STUDY, edit, 2)
    with pytest.raises(BadRequest, match=rf"{STUDY}\.jsonl, line 3: .*{says}"):
        archive.read(path.parent)


def test_a_run_that_stopped_by_patience_has_fewer_rounds(tmp_path: Path) -> None:
    folder = kept(tmp_path, KEYS[:1])
    run = archive.read(folder).runs[KEYS[0]]

    def fault(patience: int, first: int, last: int) -> str:
        parts = {"flat": {**run.flat, "patience": patience}, "rounds": run.rounds[first - 1 : last]}
        return archive.fault(
            RunResult(run.out, known={"final": run.final, "summary": run.summary, "evaluations": [], **parts})
        )

    assert fault(2, 1, 6) == "" and fault(6, 1, 6) == ""
    assert "rounds has the rounds 2, 3, 4, ..., 6" in fault(2, 2, 6)
    assert "rounds has" in fault(0, 1, 6) and "rounds has" in fault(7, 1, 6)


def test_a_run_directory_that_contradicts_itself_is_not_kept(tmp_path: Path) -> None:
    """A client whose last reply was dropped has no score, so the mean is not over all clients."""
    made(tmp_path / "runs", KEYS[0])
    file = tmp_path / "runs" / KEYS[0].folder / "final.csv"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    written = archive.write(tmp_path / "kept", Evidence(tmp_path / "runs").finished())
    assert not written.runs and "final has the clients 0, 1, 2, ..." in written.stale[KEYS[0]]


@pytest.mark.full
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"seed": 1', '"seed": -1', "line 3: must be at least 0"),
        ('"seed": 1', '"seed": 0', "line 3: ccvr-0.05/fedavg-s0 stands twice"),
        ('"seed": 1', '"seed": "1"', "line 3: must be a whole number"),
        ('"ok": true', '"ok": false', "line 2: must be True"),
        ('"bytes_down": 7', '"bytes_down": NaN', "line 2: NaN is not a number"),
        ('"bytes_down": 7', '"bytes_down": "7"', "line 2: must be a whole number"),
        ('"client": [0, ', '"client": [', "line 2: All arrays must be of the same length"),
        ('"round": [1, ', '"round": ["1", ', "line 2: must be a whole number"),
        ('"hparams"', '"code"', "line 2: (Field required|Extra inputs)"),
        ('{"variant"', '["variant"', "line 2: Expecting ',' delimiter"),
        ('{"study"', '{"studies"', "line 1: (Field required|Extra inputs)"),
        ("{", "[" * 100_000, "line 1: "),
    ],
)
def test_a_broken_file_is_refused_and_its_line_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = kept(tmp_path) / f"{STUDY}.jsonl"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(BadRequest, match=message):
        archive.read(path.parent)


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadRequest, match=r"a\.jsonl cannot be read"):
        archive.read(tmp_path)


def test_a_run_with_other_settings_is_not_kept(tmp_path: Path) -> None:
    for key, old, new in ((KEYS[0], "lr = 0.01", "lr = 0.02"), (KEYS[1], "lr = ", "lrs = "), (KEYS[2], "", "")):
        made(tmp_path / "runs", key)
        file = tmp_path / "runs" / key.folder / "config.toml"
        file.write_text(file.read_text().replace(old, new))
    written = archive.write(tmp_path / "kept", Evidence(tmp_path / "runs").finished())
    assert written.stale[KEYS[0]] == "lr = 0.02 there, 0.01 now" and "lrs" in written.stale[KEYS[1]]
    assert set(written.runs) == set(archive.read(tmp_path / "kept").runs) == {KEYS[2]}


def reproduced(*words: str) -> str:
    result = CliRunner().invoke(app, ["claim", *words])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.full
def test_the_page_is_renewed_without_any_run(everything: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "run_all", lambda *args: pytest.fail("runs were begun"))
    doc = tmp_path / "reproduction.md"
    output = reproduced("--from", str(everything / "kept"), "--doc", str(doc))
    runs = len({key for claim in claims().values() for key in keys_of(claim.runs)})
    assert f"{runs} of {runs} runs are there already" in output
    assert "missing" not in doc.read_text() and doc.read_text().count("| **") == len(claims())


@pytest.mark.full
def test_the_committed_page_is_what_the_kept_runs_give(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    committed, renewed = root / "docs" / "reproduction.md", tmp_path / "reproduction.md"
    shutil.copy(committed, renewed)
    reproduced("--from", str(root / "reproduction" / "ledger" / "runs"), "--doc", str(renewed))
    assert renewed.read_text() == committed.read_text(), "run the fourth command of docs/reproduction.md"


def test_without_out_missing_runs_are_named(tmp_path: Path) -> None:
    output = reproduced("--from", str(kept(tmp_path, KEYS[:2])), "--studies", STUDY)
    assert "2 of 3 runs are there already" in output and f"missing: {KEYS[2].folder} (add --out" in output


def test_only_the_difference_is_run_and_its_time_is_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = kept(tmp_path, KEYS[:2])
    begun: list[Path] = []

    def run_all(todo: list[config.RunConfig], *rest: object) -> list[object]:
        for run in todo:
            begun.append(Path(run.storage.out))
            made(tmp_path / "out", KEYS[2])
        return []

    monkeypatch.setattr(reproduce, "prepared", lambda key, out, _: config.from_flat({"out": str(out / key.folder)}))
    monkeypatch.setattr(pool, "run_all", run_all)
    out = tmp_path / "out"
    assert reproduce.reproduce(out, "", study_names=[STUDY], workers=4, kept=folder, keep=folder) == 0
    assert begun == [out / KEYS[2].folder]
    told = capsys.readouterr().err
    assert "to run: 1, about 1 minute, 1 at a time" in told and "3 runs kept" in told
    assert set(archive.read(folder).runs) == set(KEYS)


def test_the_estimate_takes_the_most_similar_runs() -> None:
    seconds = {RunKey("a", "x", 0): 60.0, RunKey("a", "x", 1): 180.0, RunKey("a", "y", 0): 600.0}
    todo = [RunKey("a", "x", 2), RunKey("a", "z", 0), RunKey("b", "x", 0)]
    assert [reproduce.minutes_left([key], seconds, 1) for key in todo] == [2.0, 3.0, 3.0]
    assert reproduce.minutes_left(todo, seconds, 2) == 4.0
    assert reproduce.minutes_left(todo, {}, 2) is None and reproduce.minutes_left([], seconds, 2) == 0.0


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="--from names a folder"):
        reproduce.reproduce(None, "", kept=tmp_path / "nowhere")
    with pytest.raises(BadRequest, match="give --out"):
        CliRunner().invoke(app, ["claim"], catch_exceptions=False)


@pytest.mark.full
def test_what_is_kept_of_a_real_calibrated_run_can_be_read_again(tmp_path: Path) -> None:
    """Its summary has true and false, and numbers by class, beside the three accuracies that claims read."""
    run = fedapp.run(
        method="ccvr", method_args="oracle=true", dataset="digits", clients=3, num_server_rounds=1, local_epochs=1,
        out=tmp_path / "run",
    )  # fmt: skip
    kept = archive._summary(run.summary)
    again = archive.Summary.model_validate(json.loads(json.dumps(kept)), strict=True)
    assert isinstance(run.summary["calibration"]["deployable"], bool)
    assert {k: again.calibration[k] for k in ("before", "after", "oracle")} == {
        k: run.summary["calibration"][k] for k in ("before", "after", "oracle")
    }
    assert again.accuracy["trained"]["last"] == run.summary["accuracy"]["trained"]["last"]
