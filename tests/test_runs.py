"""The one reader of run directories: missing files are empty, damaged ones are named, half a line is not read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import fedapp
from fedapp.engines.local import run
from fedapp.errors import BadRequest
from fedapp.results import report
from fedapp.results.figures import Gallery
from fedapp.results.runs import RunResult, folder_of, read_comparison, read_run, read_table


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    out = tmp_path_factory.mktemp("runs") / "fedavg"
    return run(dataset="digits", clients=3, rounds=2, local_epochs=1, batch_size=64, method="fedavg", out=out)


def test_what_run_returns_is_the_run_directory(finished: RunResult) -> None:
    assert fedapp.RunResult is RunResult and isinstance(finished, RunResult)
    assert finished.ok and finished.method == finished.label == "fedavg" and finished.seed == 0
    assert finished.summary == json.loads((finished.out / "summary.json").read_text())
    for name in ("rounds", "clients", "final"):
        pd.testing.assert_frame_equal(getattr(finished, name), pd.read_csv(finished.out / f"{name}.csv"))
    assert finished.config is not None and finished.config.federation.num_server_rounds == 2 and finished.problem == ""
    assert finished.counts.shape == (3, 10) and finished.counts.sum() == sum(finished.card["train_sizes"])
    assert finished.protocols == ("received", "trained", "global")
    assert finished.score("trained") == finished.summary["accuracy"]["trained"]["last"]
    assert finished.weakest("trained") == (finished.final["trained_accuracy"].min(),) * 2


def test_files_are_read_once_under_all_labels(finished: RunResult) -> None:
    other = replace(finished, label="other")
    assert other.final is finished.final and other.curve("trained") is finished.curve("trained")
    assert RunResult(finished.out).final is not finished.final


def test_files_that_are_missing_are_empty(tmp_path: Path) -> None:
    begun = RunResult(tmp_path)
    assert begun.summary == begun.card == begun.error == begun.versions == {}
    assert begun.rounds.empty and begun.clients.empty and begun.final.empty and begun.dropped.empty
    assert not begun.ok and begun.counts.shape == (0, 0) and begun.protocols == ()
    assert begun.score("trained") != begun.score("trained"), "NaN"
    with pytest.raises(BadRequest, match="holds no run"):
        _ = begun.flat
    with pytest.raises(BadRequest, match="holds no run"):
        read_run(tmp_path)
    with pytest.raises(BadRequest, match="neither a run"):
        read_comparison(tmp_path)


def test_files_that_are_damaged_are_named(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"ok": tr')
    (tmp_path / "data_card.json").write_text("[1]")
    (tmp_path / "rounds.csv").write_text("round\n1\n1,2,3\n")
    damaged = RunResult(tmp_path)
    for name, file in (("summary", "summary.json"), ("card", "data_card.json"), ("rounds", "rounds.csv")):
        with pytest.raises(BadRequest, match=rf"{file} cannot be read"):
            getattr(damaged, name)


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "rounds.csv"
    for text, rounds in (("", []), ("round,trained_acc", []), ("round,x\n", []), ("round,x\n1,0.5\n2,0.8", [1])):
        file.write_text(text)
        assert list(read_table(file).get("round", [])) == rounds
    file.write_text('round,x\n1,0.5\n2,"shape (3,')
    assert list(read_table(file)["round"]) == [1]


def test_another_versions_configuration_has_no_config_and_says_why(finished: RunResult, tmp_path: Path) -> None:
    text = (finished.out / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(text + 'key-of-tomorrow = "x"\n')
    old = read_run(tmp_path)
    assert old.config is None and "unknown key 'key-of-tomorrow'" in old.problem and old.method == "fedavg"


def test_page_and_figure_count_the_download_of_dropped_replies(tmp_path: Path) -> None:
    """4 clients, 10 MB up and 5 MB down each; one of them is dropped in the second of two rounds: 110 MB, not 105."""
    (tmp_path / "config.toml").write_text('method = "fedavg"\ndataset = "digits"\n')
    (tmp_path / "rounds.csv").write_text(
        "round,clients,dropped,bytes_up,bytes_down,received_accuracy\n1,4,0,1e7,5e6,0.5\n2,3,1,1e7,5e6,0.6\n"
    )
    (tmp_path / "final.csv").write_text("client,num_samples,received_accuracy\n0,9,0.7\n1,9,0.7\n2,9,0.7\n3,9,0.7\n")
    there = read_run(tmp_path)
    assert "110,000,000" in report.of_run(there, Gallery())


def test_variants_that_differ_in_a_point_or_a_sign_have_folders_of_their_own() -> None:
    labels = ["cwfedavg(lam=1.0)", "cwfedavg(lam=10)", "local(lr=1e-5)", "local(lr=1e5)", "fedprox(mu=0.1)", "x" * 99]
    folders = [folder_of(label) for label in labels]
    assert len(set(folders)) == 6 and folders[0] == "cwfedavg-lam=1.0" and max(map(len, folders)) == 80


def test_variants_in_two_settings_have_their_labels_and_training_alone_stands_last(tmp_path: Path) -> None:
    rows = ["method,variant,dataset,partition,alpha,classes_per_client,sweep,seed"]
    for alpha in (0.3, 2.0):
        for variant, own in (("local", ""), ("fedprox(lr=0.2)", "lr = 0.2\n"), ("fedprox(lr=0.1)", "lr = 0.1\n")):
            method = variant.partition("(")[0]
            out = tmp_path / "runs" / f"digits-dirichlet-{alpha:g}" / f"{folder_of(variant)}-s0"
            out.mkdir(parents=True)
            text = f'method = "{method}"\ndataset = "digits"\npartition = "dirichlet"\nalpha = {alpha}\n{own}'
            (out / "config.toml").write_text(text)
            rows.append(f"{method},{variant},digits,dirichlet,{alpha},,,0")
    (tmp_path / "results.csv").write_text("\n".join(rows) + "\n")
    found = read_comparison(tmp_path)
    assert found.labels == ("fedprox(lr=0.2)", "fedprox(lr=0.1)", "local")
    assert {(r.label, r.flat.get("lr")) for r in found.runs} == {
        ("local", None), ("fedprox(lr=0.2)", 0.2), ("fedprox(lr=0.1)", 0.1),
    }  # fmt: skip
    assert [r.setting["alpha"] for r in found.runs] == [0.3] * 3 + [2.0] * 3
