"""Comparisons: what is run, what is kept, what the tables say, and that the runs may be compared."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_1samp, ttest_rel
from typer.testing import CliRunner

from fedapp import cli, config
from fedapp.engines import local as engine
from fedapp.engines import pool
from fedapp.engines import superlink as launch
from fedapp.engines.local import RunResult
from fedapp.errors import BadRequest
from fedapp.experiments import compare, tables
from fedapp.experiments.jobs import Job, Variant, common_public
from fedapp.results import report, terminal
from fedapp.results import tables as printed
from fedapp.results.directory import only_writer
from fedapp.results.figures import Gallery
from fedapp.results.runs import MAX_FOLDER, PAIRED, read_comparison
from fedapp.results.statistics import privacy
from fedapp.results.terminal import Screen, echo

BASE: dict[str, Any] = {
    "dataset": "digits", "data-fraction": 0.3, "clients": 4, "num-server-rounds": 3, "local-epochs": 1,
    "batch-size": 64, "alpha": 1.0,
}  # fmt: skip


# ---- what is asked for -----------------------------------------------------------------------------------------------


def test_methods_may_have_values_of_their_own() -> None:
    text = "local, local(augment=weak),cwfedavg( lam=1  layers=fc1,output ) ,"
    text += "ccvr(base=moon base.mu=5 lr=0.1 config.lr=0.2)"
    plain, weak, cw, ccvr = compare.parse_variants(text)
    assert plain == Variant("local", "local")
    assert (weak.label, weak.args, weak.settings) == ("local(augment=weak)", (), (("augment", "weak"),))
    assert cw.args == (("lam", "1"), ("layers", "fc1,output"))
    assert cw.label == "cwfedavg(lam=1 layers=fc1,output)"
    assert dict(ccvr.args) == {"base": "moon", "base.mu": "5", "lr": "0.1"}, "CCVR has an lr of its own"
    assert dict(ccvr.settings) == {"lr": 0.2}
    assert weak.title == "Standalone (augment=weak)"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no method"),
        ("fedavgg", "did you mean"),
        ("local,local", "twice"),
        ("local(augment=weak),local( augment=weak )", "twice"),
        ("fedprox(mu=0.1 lr=1),fedprox(lr=1.0 mu=0.10)", "twice"),
        ("local(augment=weak", "brackets"),
        ("local)", "brackets"),
        ("local((augment=weak))", "brackets"),
        ("local(augment)", "name=value"),
        ("fedprox(mu=1 mu=2)", "twice"),
        ("fedprox(lr=1 config.lr=2)", "twice"),
        ("fedgh(header_lr=1 header-lr=2)", "names header-lr twice"),
        ("ccvr(base=fedgh base.header_lr=1 base.header-lr=2)", "twice"),
        ("fedprox(muu=1)", "did you mean 'mu'"),
        ("local(alpha=1)", "--set alpha=1"),
        ("local(augment=bright)", None),
        ("local(lr=fast)", "must be a number"),
    ],
)
def test_methods_that_cannot_be_read_are_refused(text: str, says: str | None, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=says and says.replace("(", r"\(")):
        plan(compare.parse_variants(text), tmp_path)


def plan(
    variants: list[Variant], out: Path, seeds: int = 1, datasets: Any = (), partitions: Any = (), **values: Any
) -> list[Job]:
    values = {**BASE, **{k.replace("_", "-"): v for k, v in values.items()}}
    settings = compare.settings_of(values, datasets, partitions)
    return compare.jobs_of(values, variants, settings, seeds, out)


def parsed(text: str) -> list[Variant]:
    return compare.parse_variants(text)


@given(st.lists(st.sampled_from(["mu=0.1", "mu=1e-3", "augment=weak", "lr=0.5", "batch-size=8"]), unique=True))
def test_folders_are_plain_names(pairs: list[str]) -> None:
    try:
        (variant,) = parsed(f"fedprox({' '.join(pairs)})" if pairs else "fedprox")
    except BadRequest:
        assert sum(p.startswith("mu") for p in pairs) == 2
        return
    assert variant.folder.startswith("fedprox")
    assert set(variant.folder) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._=+-")


def test_long_labels_have_short_folders_that_differ() -> None:
    long = " ".join(f"{name}=0.123456789" for name in ("mu", "lr", "weight-decay", "clip"))
    a, b = parsed(f"fedprox({long}),fedprox({long}1)")
    assert a.folder != b.folder
    assert max(len(a.folder), len(b.folder)) <= MAX_FOLDER


def test_one_setting_has_plain_folders_and_several_have_one_each(tmp_path: Path) -> None:
    one = plan(parsed("local,fedavg"), tmp_path, seeds=2, seed=5)
    names = [str(j.out.relative_to(tmp_path)) for j in one]
    assert names == ["runs/local-s5", "runs/fedavg-s5", "runs/local-s6", "runs/fedavg-s6"]
    several = plan(parsed("local"), tmp_path, partitions=["iid", "dirichlet:0.5", "pathological:3"])
    names = [str(j.out.relative_to(tmp_path)) for j in several]
    assert names == [f"runs/digits-{p}/local-s0" for p in ("iid", "dirichlet-0.5", "pathological-3")]
    assert [j.config.data.partition for j in several] == ["iid", "dirichlet", "pathological"]
    assert several[1].config.data.alpha == 0.5
    assert several[2].config.data.classes_per_client == 3


@pytest.mark.parametrize(
    ("partitions", "says"),
    [(["iid:3"], "takes no number"), (["direchlet"], "did you mean"), (["dirichlet:x"], "number"),
     (["dirichlet", "dirichlet:1.0"], "twice"), (["classes:2.5"], "whole number")],
)  # fmt: skip
def test_partitions_that_cannot_be_read_are_refused(partitions: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=says):
        plan(parsed("local"), tmp_path, partitions=partitions)


def test_all_methods_that_refuse_the_setting_are_named_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(BadRequest) as e:
        plan(parsed("local,fedavg,fedclassavg,cwfedavg(lam=1)"), tmp_path, model="digits-a,digits-b")
    lines = str(e.value).splitlines()
    assert [line.split(" needs one architecture")[0] for line in lines] == ["fedavg", "cwfedavg(lam=1)"], "named once"
    assert not any(tmp_path.iterdir())


def test_models_of_different_width_are_refused_where_heads_are_compared(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"^fedclassavg: .*widths"):
        plan(parsed("local,fedclassavg"), tmp_path, model="digits-a,cnn-a")
    assert len(plan(parsed("local"), tmp_path, model="digits-a,cnn-a")) == 1


def test_method_args_of_a_file_are_for_its_method_alone(tmp_path: Path) -> None:
    given = {"method": "fedprox", "method_args": "mu=0.5"}
    jobs = plan(parsed("local,fedprox,fedprox(mu=2)"), tmp_path, **given)
    assert [j.config.federation.method_args for j in jobs] == ["", "mu=0.5", "mu=2"]
    with pytest.raises(BadRequest, match="local has no hyperparameter"):
        plan(parsed("local,fedprox"), tmp_path, method_args="mu=0.5")


def test_public_images_of_one_method_are_held_back_from_all(tmp_path: Path) -> None:
    jobs = plan(parsed("local,ktpfl"), tmp_path)
    assert [j.config.data.public_data for j in jobs] == ["0.05", "0.05"]
    assert [j.config.data.public_data for j in plan(parsed("local,fedavg"), tmp_path)] == ["", ""]
    assert {j.config.data.public_data for j in plan(parsed("local,ktpfl"), tmp_path, public_data="0.1")} == {"0.1"}
    assert [j.config.data.public_data for j in plan(parsed("local,ktpfl(share=weights)"), tmp_path)] == ["", ""]
    given = {"method": "ktpfl", "method_args": "share=weights"}
    assert {j.config.data.public_data for j in plan(parsed("local,ktpfl"), tmp_path, **given)} == {""}


def test_images_are_held_back_only_where_the_resolved_method_needs_them() -> None:
    """KT-pFL with weights has no public images, so the other rows must not lose a share of theirs."""
    assert common_public({}, [("local", ""), ("ktpfl", "share=weights")]) == {}
    for methods in ([("ktpfl", "")], [("ktpfl", "share=weights"), ("ktpfl", "rho=0.5")]):
        assert common_public({"lr": 1}, methods) == {"lr": 1, "public-data": "0.05"}
    assert common_public({}, [("ktpfl", "share=nonsense")]) == {"public-data": "0.05"}, "refused later, with its run"


# ---- what is there already -------------------------------------------------------------------------------------------


def test_standing_of_a_run(tiny: Callable[..., RunResult], tmp_path: Path) -> None:
    out = tmp_path / "run"
    finished = tiny(out=out)
    there = config.from_flat(config.read_toml(finished.out / "config.toml"))
    assert compare.standing(there.replaced(out=str(tmp_path / "other"))) == "new"
    assert compare.standing(there) == "done"
    assert compare.pending_config(there) is None
    with pytest.raises(BadRequest, match="num-server-rounds = 2 there, 5 now"):
        compare.pending_config(there.replaced(num_server_rounds=5))
    (out / "summary.json").unlink()
    assert compare.standing(there) == "broken off"
    resumed = compare.pending_config(there)
    assert resumed is not None
    assert resumed.storage.resume
    for file in (out / "checkpoint").iterdir():
        file.unlink()
    assert compare.standing(there) == "nothing kept"
    assert compare.pending_config(there) == there
    assert not out.exists(), "what broke off before its first checkpoint begins anew"


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "local-s0"
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    there = config.from_flat(BASE).replaced(out=str(out))
    with pytest.raises(BadRequest, match=r"thesis\.tex"):
        compare.pending_config(there)
    assert (out / "thesis.tex").read_text() == "mine"


def test_two_comparisons_do_not_share_a_folder(tmp_path: Path) -> None:
    with only_writer(tmp_path, who="fedapp compare"):
        result = command("--methods", "local", *SMALL, "--out", str(tmp_path))
    assert isinstance(result.exception, BadRequest)
    assert "another fedapp compare still writes" in str(result.exception)


def test_the_page_speaks_of_options_that_exist() -> None:
    text = (Path(__file__).parent.parent / "docs" / "comparing.md").read_text(encoding="utf-8")
    shown = "".join(
        CliRunner().invoke(cli.app, [name, "--help"], terminal_width=200).output for name in ("compare", "run", "show")
    )
    named = set(re.findall(r"--[a-z][a-z-]*", text)) - {"--run-config"}  # of flwr run
    assert len(named) > 10
    assert {n for n in named if n not in shown} == set()
    for column in (
        "worst_decile",
        "target_rounds",
        "std_over_seeds",
        "p_holm",
        "word",
        "classes_per_client",
        "completed",
    ):
        assert column in text


# ---- the whole command -----------------------------------------------------------------------------------------------


def command(*words: str) -> Any:
    """Compare a few clients; one seed unless the words say otherwise."""
    return CliRunner().invoke(cli.app, ["compare", "--clients", "4", "--rounds", "3", "--seeds", "1", *words])


def tables_of(out: Path) -> str:
    return CliRunner().invoke(cli.app, ["show", str(out), "--all"]).stdout


SMALL = tuple(w for s in ("local-epochs=1", "batch-size=64", "alpha=1.0", "data-fraction=0.3") for w in ("--set", s))


@pytest.mark.full
def test_a_comparison_in_processes_equals_runs_alone_and_is_not_repeated(
    tmp_path: Path, tiny: Callable[..., RunResult], no_page: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDAPP_RUNS", str(tmp_path / "served"))  # it is for runs of nodes
    out = tmp_path / "c"
    words = ("--methods", "local,fedavg", "--set", "fraction-train=0.5", *SMALL, "--out", str(out))
    result = command(*words, "--workers", "2")
    assert result.exit_code == 0, result.output
    table = pd.read_csv(out / "results.csv")
    assert list(table["variant"]) == ["local", "fedavg"]
    assert no_page == [out]
    alone = tiny(method="fedavg", clients=4, rounds=3, alpha=1.0, fraction_train=0.5, out=tmp_path / "alone")

    def reproducible(path: Path) -> pd.DataFrame:
        frame = pd.read_csv(path)
        return frame[[c for c in frame if not c.endswith("seconds")]]

    for name in ("rounds.csv", "clients.csv", "final.csv"):
        pd.testing.assert_frame_equal(reproducible(out / "runs/fedavg-s0" / name), reproducible(alone.out / name))
    summary = json.loads((out / "runs/fedavg-s0/summary.json").read_text())
    row = table[table["variant"] == "fedavg"].iloc[0]
    assert row["received_last"] == summary["accuracy"]["received"]["last"]
    assert row["trained_best"] == summary["accuracy"]["trained"]["best"]
    assert row["global_last"] == summary["accuracy"]["global"]["last"]
    final = pd.read_csv(out / "runs/fedavg-s0/final.csv")
    assert row["trained_worst"] == final["trained_accuracy"].min()
    assert "checked by hash (1 seed)" in tables_of(out)
    lines = pd.read_csv(out / "curves.csv")
    assert set(lines[lines["variant"] == "fedavg"]["protocol"]) == {"received", "trained", "global"}
    assert set(lines["completed"]) == {0, 1, 2, 3}
    ends = lines[(lines["variant"] == "fedavg") & (lines["completed"] == 3)].set_index("protocol")["accuracy"]
    assert {p: ends[p] for p in ends.index} == {p: row[f"{p}_last"] for p in ("received", "trained", "global")}
    stamps = {p: p.stat().st_mtime_ns for p in out.glob("runs/*/summary.json")}
    again = command(*words)
    assert again.exit_code == 0
    assert "2 of 2 runs are there already" in again.stderr
    assert stamps == {p: p.stat().st_mtime_ns for p in out.glob("runs/*/summary.json")}
    pd.testing.assert_frame_equal(table, pd.read_csv(out / "results.csv"))
    (out / "runs/fedavg-s0/summary.json").write_text(json.dumps({k: v for k, v in summary.items() if k != "dropped"}))
    refused = command(*words).exception
    assert isinstance(refused, BadRequest)
    assert re.search(r"fedavg-s0/summary\.json is damaged \(no dropped\)", str(refused)), refused


@pytest.mark.full
def test_a_broken_run_goes_on_and_others_are_left_out_by_name(
    tmp_path: Path, no_page: list[Path], in_turn: list[str]
) -> None:
    out = tmp_path / "c"
    words = (*SMALL, "--out", str(out))
    assert command("--methods", "local,fedavg,fedprox", *words).exit_code == 0
    before = (out / "runs/fedavg-s0/rounds.csv").read_text()
    (out / "runs/fedavg-s0/summary.json").unlink()
    in_turn.clear()
    result = command("--methods", "fedavg,local", *words)
    assert result.exit_code == 0
    assert in_turn == ["fedavg-s0"]
    assert (out / "runs/fedavg-s0/rounds.csv").read_text() == before, "all rounds were checkpointed"
    assert "not in these tables" in result.stderr
    assert "fedprox-s0" in result.stderr
    assert list(pd.read_csv(out / "results.csv")["variant"]) == ["fedavg", "local"]
    there = read_comparison(out)
    assert there.labels == ("fedavg", "local") and [r.out.name for r in there.others] == ["fedprox-s0"]
    told = report.of_comparison(there, Gallery())
    assert "these runs of an earlier call: runs/fedprox-s0." in told


def test_a_comparison_that_was_moved_goes_on(tmp_path: Path, no_page: list[Path], in_turn: list[str]) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    words = ("--methods", "local,fedavg", *SMALL, "--out")
    assert command(*words, str(there)).exit_code == 0
    whole, run = pd.read_csv(there / "runs/fedavg-s0/final.csv"), here / "runs/fedavg-s0"
    there.rename(here)
    (run / "summary.json").unlink()
    *_, newest = sorted((run / "checkpoint").glob("*.safetensors"))
    newest.unlink()  # it broke off half-way
    in_turn.clear()
    result = command(*words, str(here))
    assert (result.exit_code, in_turn) == (0, ["fedavg-s0"]), result.output
    unlike = whole.compare(pd.read_csv(run / "final.csv"))
    assert all("seconds" in column for column in unlike.columns.get_level_values(0)) and not there.exists()


def test_another_configuration_in_the_folder_stops_before_any_run(
    tmp_path: Path, no_page: list[Path], in_turn: list[str]
) -> None:
    words = (*SMALL, "--out", str(tmp_path))
    assert command("--methods", "local", *words).exit_code == 0
    in_turn.clear()
    result = command("--methods", "fedavg,local", *words, "--set", "lr=0.001")
    assert isinstance(result.exception, BadRequest)
    assert "lr = " in str(result.exception)
    assert in_turn == []


@pytest.mark.full
def test_several_settings_are_tabled_and_tested_apart(tmp_path: Path, no_page: list[Path], in_turn: list[str]) -> None:
    words = ("--methods", "local,fedavg(lr=0.02)", "--partitions", "iid,dirichlet:1.0", "--seeds", "2", *SMALL[:4])
    result = command(*words, "--out", str(tmp_path), "--target", "0.3")
    assert result.exit_code == 0, result.output
    table = pd.read_csv(tmp_path / "results.csv")
    assert len(table) == 8
    assert set(table["trained_target"]) == {0.3}
    assert (tmp_path / "runs/digits-iid/fedavg-lr=0.02-s1/summary.json").is_file()
    tests = pd.read_csv(tmp_path / "significance.csv")
    assert len(tests) == 2 * len([m for m in tables.MEASURES if "tuned" not in m and "tenth" not in m])
    assert set(tests["seeds"]) == {2}, "one number per seed"
    assert set(tests["variant"]) == {"fedavg(lr=0.02)"}
    assert PAIRED in tables_of(tmp_path), "training alone has a row for received"
    row = tests[(tests["partition"] == "iid") & (tests["measure"] == "trained_accuracy")].iloc[0]
    finals = {
        (m, s): pd.read_csv(tmp_path / f"runs/digits-iid/{m}-s{s}/final.csv")["trained_accuracy"].to_numpy()
        for m in ("local", "fedavg-lr=0.02")
        for s in (0, 1)
    }
    by_seed = [finals["fedavg-lr=0.02", s] - finals["local", s] for s in (0, 1)]
    assert row["mean_difference"] == pytest.approx(np.mean([d.mean() for d in by_seed]))
    assert row["std_over_seeds"] == pytest.approx(np.std([d.mean() for d in by_seed], ddof=1))
    wanted = ttest_1samp([d.mean() for d in by_seed], 0)
    assert row["p"] == row["p_holm"] == pytest.approx(wanted.pvalue)
    assert (row["low"], row["high"]) == pytest.approx(tuple(wanted.confidence_interval(0.95)))
    assert json.loads(row["by_seed"]) == pytest.approx([d.mean() for d in by_seed], abs=1e-6)
    assert "Two seeds: differences are shown, not judged" in result.output
    row = tests[(tests["partition"] == "iid") & (tests["measure"] == "received_balanced")].iloc[0]
    numbers = [
        RunResult(tmp_path / "runs/digits-iid" / f"{name}-s{s}").final["received_balanced"].mean()
        for s in (0, 1)
        for name in ("fedavg-lr=0.02", "local")
    ]
    assert row["p"] == pytest.approx(ttest_rel(numbers[::2], numbers[1::2]).pvalue)
    runs = [(r.label, r.seed, r.flat["partition"]) for r in read_comparison(str(tmp_path)).runs]
    assert runs == list(table[["variant", "seed", "partition"]].itertuples(index=False, name=None)), "one order"
    assert runs != sorted(runs)
    assert result.stdout.count("3 rounds, 2 seeds") == tables_of(tmp_path).count("after 3 rounds") == 2
    assert "Settings differ, lr: 0.05 for training alone; 0.02 for all others." in result.stdout


@pytest.mark.full
def test_what_runs_state_of_privacy_stands_in_the_tables(
    tmp_path: Path, no_page: list[Path], in_turn: list[str]
) -> None:
    private = ("--set", "dp=client", "--set", "clip-update=1", "--set", "dp-epsilon=30", "--set", "secure-sum=true")
    methods = ("--methods", "fedavg,fedclassavg", "--reference", "fedavg")
    words = (*methods, *SMALL, *private, "--rounds", "1", "--out", str(tmp_path))
    result = command(*words)
    assert result.exit_code == 0, result.output
    table = pd.read_csv(tmp_path / "results.csv")
    assert table["privacy_unit"].tolist() == ["client", "client"] and table["privacy_delta"].tolist() == [1e-5] * 2
    assert table["privacy_epsilon"].to_numpy() == pytest.approx(30, rel=1e-3)
    shown = tables_of(tmp_path)
    assert "privacy" in shown and shown.count("ε 30") == 2  # the cell may be broken into lines
    assert table["privacy"].tolist() == ["client: ε 30, δ 1e-05, 0 colluders"] * 2


def test_privacy_in_a_few_words() -> None:
    one = {"unit": "example", "epsilon": 2.0, "delta": 1e-6}
    assert privacy([{}]) == privacy([]) == privacy([one, {}]) == "none"
    assert privacy([one, {**one, "epsilon": 7.996}]) == "example: ε 8, δ 1e-06"  # what holds for all of them
    assert privacy([{**one, "epsilon": None, "test": "test noise, no privacy"}]) == "none: test noise"
    assert privacy([{**one, "epsilon": None}]) == "example: ε –, δ 1e-06"
    assert privacy([{**one, "colluders": 2}]) == "example: ε 2, δ 1e-06, 2 colluders"
    table = pd.DataFrame({"privacy_epsilon": [2.0, None, 8.0], "privacy": ["two", "unknown", "eight"]})
    assert printed._privacy(table) == "unknown" and printed._privacy(table.dropna()) == "eight"


@pytest.mark.full
@pytest.mark.parametrize(
    ("more", "seeds", "says"),
    [
        ((), [0, 1], "mean ± std over 2 seeds, each with a partition of its own"),
        (("--set", "partition-seed=5"), [5, 5], "mean ± std over 2 runs on one partition"),
    ],
)
def test_the_spread_over_seeds_says_whether_partitions_differ(
    more: tuple[str, ...], seeds: list[int], says: str, tmp_path: Path, no_page: list[Path], in_turn: list[str]
) -> None:
    result = command("--methods", "local", "--seeds", "2", *SMALL, *more, "--rounds", "1", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert says in " ".join(tables_of(tmp_path).split())
    assert pd.read_csv(tmp_path / "results.csv")["partition_seed"].tolist() == seeds
    runs = read_comparison(tmp_path).runs
    assert len({r.card["hash"] for r in runs}) == len({r.data_seed for r in runs}) == len(set(seeds))
    assert ("(mean over clients; seed 0 of 2)" in result.output) == (len(set(seeds)) == 2)
    starts = [r.clients["trained_loss"].tolist() for r in runs]
    assert starts[0] != starts[1], "initial values and the order of images still differ between seeds"


@pytest.mark.parametrize(
    ("split", "says"),
    [("", "2 seeds, each with its own test split"), ("train,train,test", "2 runs on one partition")],
    ids=["drawn", "given"],
)
def test_clients_of_the_data_have_their_own_test_splits(
    split: str, says: str, tmp_path: Path, no_page: list[Path], in_turn: list[str]
) -> None:
    parts = [*filter(None, split.split(","))] or [""]
    rows = [f"{i % 7},{i % 2},{i % 3 % 2},{parts[i % len(parts)]}" for i in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["a,y,client,split" if split else "a,y,client,", *rows]))
    columns = "x=a y=y client=client" + " split=split" * bool(split)
    words = ("--dataset", "csv", "--set", f"data-dir={tmp_path / 't.csv'}", "--set", f"columns={columns}")
    out = tmp_path / "out"
    result = command("--methods", "local", *words, "--clients", "2", "--seeds", "2", "--rounds", "1", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert f"mean ± std over {says}" in " ".join(tables_of(out).split())


def test_a_page_that_cannot_be_made_is_told_and_changes_nothing(
    tmp_path: Path, in_turn: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(out: Path, **options: Any) -> None:
        raise RuntimeError("no ink")

    monkeypatch.setattr(report, "write", broken)
    (tmp_path / "report.html").touch()
    result = command("--methods", "local", *SMALL, "--out", str(tmp_path))
    assert result.exit_code == 0
    assert "no report.html: RuntimeError: no ink" in result.stderr
    assert "  report " not in result.stdout, "no page of an earlier call is named"


@pytest.mark.parametrize(
    "words",
    [
        ("--seeds", "0"), ("--target", "90"), ("--workers", "0"), ("--reference", "fedprox"),
        ("--reference", "fedavg,local"),
        ("--partitions", "iid", "--set", "partition=iid"), ("--datasets", "digits", "--dataset", "digits"),
    ],
)  # fmt: skip
def test_requests_that_make_no_sense(words: tuple[str, ...], tmp_path: Path) -> None:
    result = command("--methods", "local,fedavg", *words, "--out", str(tmp_path))
    assert isinstance(result.exception, BadRequest) or result.exit_code == 2, result.output
    assert not any(tmp_path.iterdir())


@pytest.mark.full
def test_a_file_without_rows_is_compared_with_standalone(
    tmp_path: Path, no_page: list[Path], in_turn: list[str]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('method = "fedprox"\nmethod-args = "mu=0.5"\n')
    result = CliRunner().invoke(
        cli.app, ["compare", str(file), "--clients", "4", "--rounds", "1", *SMALL, "--out", str(tmp_path / "c")]
    )
    assert result.exit_code == 0, result.output
    table = pd.read_csv(tmp_path / "c" / "results.csv", keep_default_na=False)
    assert set(zip(table["variant"], table["method_args"])) == {("local", ""), ("fedprox", "mu=0.5")}


def test_the_ray_engine_runs_one_session_for_all(
    tmp_path: Path, no_page: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: list[Any] = []

    class Session:
        def __init__(self, **settings: Any) -> None:
            sessions.append(settings)

        def __enter__(self) -> Session:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def submit(self, flat: dict[str, Any], **_: Any) -> Any:
            def follow(listener: Any) -> Any:
                engine.run_local(config.from_flat(flat), listener)
                return launch.Outcome("finished:completed", "", True)

            return SimpleNamespace(follow=follow)

    monkeypatch.setattr(launch, "Session", Session)
    result = command("--methods", "local,fedavg", *SMALL, "--engine", "ray", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert len(sessions) == 1
    assert len(pd.read_csv(tmp_path / "results.csv")) == 2


def test_progress_is_counted_in_rounds_that_are_written_down(tmp_path: Path) -> None:
    assert compare.rounds_done(tmp_path) == 0
    (tmp_path / "rounds.csv").write_text("round,clients\n1,4\n2,4\n3,")
    assert compare.rounds_done(tmp_path) == 2


# ---- may they be compared? -------------------------------------------------------------------------------------------


def fake(out: Path, label: str, deal: str, played: list[list[int]], dropped: tuple[int, ...] = ()) -> Job:
    """A run directory with the files that say how data were dealt and who took part."""
    folder = out / label
    folder.mkdir()
    (folder / "data_card.json").write_text(json.dumps({"hash": deal}))
    rows = [{"round": r, "client": c} for r, clients in enumerate(played, 1) for c in clients]
    pd.DataFrame(rows).to_csv(folder / "clients.csv", index=False)
    rounds = [{"round": r, "dropped": int(r in dropped)} for r in range(1, len(played) + 1)]
    pd.DataFrame(rounds).to_csv(folder / "rounds.csv", index=False)
    return Job(Variant(label, "local"), "", 0, config.from_flat(BASE).replaced(out=str(folder)))


def test_runs_that_share_partition_and_sampling_are_said_to(tmp_path: Path) -> None:
    played = [[0, 2], [1, 3], [0, 1]]
    a, b = fake(tmp_path, "a", "x", played), fake(tmp_path, "b", "x", played[:2])
    c = fake(tmp_path, "c", "x", [[0, 2], [1], [0, 1]], dropped=(2,))
    shared = tables.verify([a, b, c])
    assert shared.ok, "stopping early and a dropped reply are no difference"
    assert "checked by hash (1 seed)" in shared.lines[0]
    assert tables.verify([]).ok


def test_another_partition_or_sampling_is_found(tmp_path: Path) -> None:
    a = fake(tmp_path, "a", "x", [[0, 2], [1, 3]])
    other_deal = fake(tmp_path, "b", "y", [[0, 2], [1, 3]])
    other_clients = fake(tmp_path, "c", "x", [[0, 2], [1, 2]])
    found = tables.verify([a, other_deal])
    assert not found.ok
    assert "partitions differ" in found.lines[0]
    found = tables.verify([a, other_clients])
    assert not found.ok
    assert "sampled clients differ" in found.lines[0]


@pytest.mark.full
def test_a_comparison_of_runs_that_differ_is_not_a_success(
    tmp_path: Path, no_page: list[Path], in_turn: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--methods", "local,fedavg", *SMALL, "--out", str(tmp_path))
    assert command(*words).exit_code == 0
    card = tmp_path / "runs/local-s0/data_card.json"
    card.write_text(json.dumps({**json.loads(card.read_text()), "hash": "another"}))
    result = command(*words)
    assert result.exit_code == 1
    assert "NOT COMPARABLE" in result.stdout


# ---- showing ---------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_narrow_pipe_does_not_squeeze_names(
    tmp_path: Path, no_page: list[Path], in_turn: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert command("--methods", "local,cwfedavg(lam=1)", *SMALL, "--out", str(tmp_path)).exit_code == 0
    shown = tables_of(tmp_path)
    assert "Training alone receives no model, so it has one score" in shown
    assert "cwFedAvg + WDR (lam=1)" in shown and "…" not in shown
    assert max(len(line) for line in shown.splitlines() if line.startswith(("│", "┃"))) <= 40


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_number_is_cut_however_narrow_the_terminal_is(width: int) -> None:
    names = ["Standalone", "FedClassAvg (lam=10)"]
    heads = ("worst client", "better off than alone", "completed rounds to 73.9 %", "bytes up", "bytes down", "seconds")
    columns = {head: [f"{number:,}", f"{number}.1 ± 2.3"] for number, head in enumerate(heads, 153128)}
    console = Screen(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    terminal.print_fitting(console, names, columns)
    shown = str(console.file.getvalue())  # type: ignore[attr-defined]
    assert max(map(len, shown.splitlines())) <= width and "…" not in shown
    for cells in columns.values():
        assert all(shown.count(f" {cell} ") == 1 for cell in cells)
    assert shown.count("Standalone") == shown.count("FedClassAvg (lam=10)") == shown.count("method")
    assert (shown.count("method") == 1) == (width == 200)


def test_no_number_is_lost_next_to_a_long_name() -> None:
    console = Screen(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    columns = {f"column {n}": [f"{n}0.1 ± 2.3", f"{n}0.2 ± 2.3"] for n in range(5)}
    terminal.print_fitting(console, ["a" * 90, "b"], columns)
    shown = str(console.file.getvalue())  # type: ignore[attr-defined]
    assert all(shown.count(f" {cell} ") == 1 for cells in columns.values() for cell in cells)
    assert max(map(len, shown.splitlines())) <= 80 and shown.count("a" * 20) >= 90 // 40


def test_messages_on_a_terminal_break_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((20, 10)))
    text = "a message of several words\n  an indented one that goes on\n/a/path/that/is/longer/than/a/line"
    echo(text, err=True)
    assert capsys.readouterr().err == text + "\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    echo(text, err=True)
    assert capsys.readouterr().err == (
        "a message of several\nwords\n  an indented one\n  that goes on\n/a/path/that/is/longer/than/a/line\n"
    )


def test_one_seed_shows_no_difference(tmp_path: Path, no_page: list[Path], in_turn: list[str]) -> None:
    """All clients of one seed share a federation, and those of FedAvg one model."""
    words = ("--methods", "fedavg,fedprox", "--clients", "4", *SMALL, "--rounds", "1", "--out", str(tmp_path))
    result = command(*words, "--reference", "fedavg")
    assert result.exit_code == 0, result.output
    tests = pd.read_csv(tmp_path / "significance.csv").set_index("measure")
    row = tests.loc["received_balanced"]
    assert row["seeds"] == 1 and row[["low", "high", "word", "p", "p_holm"]].isna().all()
    assert "One seed: no differences are shown" in result.stdout and "Difference to" not in tables_of(tmp_path)


def test_a_run_that_diverged_is_shown_as_failed_with_what_to_do(
    tmp_path: Path, no_page: list[Path], in_turn: list[str]
) -> None:
    words = ("--methods", "local,fedavg,fedprox(lr=1e8)", "--clients", "3", *SMALL, "--rounds", "1")
    result = command(*words, "--out", str(tmp_path))
    assert result.exit_code == 1, result.output
    failed = RunResult(tmp_path / "runs" / "fedprox-lr=1e8-s0")
    assert failed.repeats and failed.error["diverged"] and failed.error["round"] == 1
    assert "round 1: " in failed.failure and "lower lr" in failed.failure
    assert re.search(r"FedProx \(lr=1e8\) +│ +failed │ +– ", tables_of(tmp_path))
    assert "! FedProx (lr=1e8) failed (1 of 1 seed): round 1: " in result.stdout
    assert f"fedprox(lr=1e8) s0 failed: {failed.failure}" in result.stderr
    assert "would fail in the same way" in result.stderr and " continues" not in result.stderr
    table = pd.read_csv(tmp_path / "results.csv").set_index("variant")
    assert table.loc["fedprox(lr=1e8)", "failed"] == failed.failure
    assert table["failed"].isna().tolist() == [True, True, False]
    assert table.loc["fedprox(lr=1e8)", ["trained_last", "received_last"]].isna().all()
    assert set(pd.read_csv(tmp_path / "significance.csv")["variant"]) == {"fedavg"}


def test_an_error_in_own_code_does_not_go_away_by_the_same_command_and_may_be_mended(
    tmp_path: Path, no_page: list[Path], in_turn: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = "class Net(torch.nn.Sequential):\n  def __init__(self, num_classes):\n    super().__init__(%s)\n"
    layers = "torch.nn.Flatten(), torch.nn.Linear(64, num_classes)"
    (tmp_path / "mended_net.py").write_text(f"import torch\n{net % layers}")
    monkeypatch.syspath_prepend(tmp_path)
    small = ("--clients", "3", *SMALL, "--rounds", "1")
    words = ("--methods", "fedavg", "--reference", "fedavg", *small, "--out", str(tmp_path / "c"))
    words += ("--set", "model=mended_net:Net")
    right = importlib.import_module("mended_net").Net.train

    def fails(self: Any, mode: bool = True) -> Any:
        if mode and in_turn:
            raise NameError("absent")
        return right(self, mode)

    monkeypatch.setattr("mended_net.Net.train", fails)
    failed = command(*words)
    assert failed.exit_code == 1 and "absent" in failed.output
    how = f"the same command with --out {tmp_path / 'c'} continues"
    assert failed.stderr.rstrip().endswith(f"({how} when the cause above is gone)")
    with (tmp_path / "mended_net.py").open("a") as file:
        file.write("# mended\n")
    monkeypatch.setattr("mended_net.Net.train", right)
    assert command(*words).exit_code == 0, "nothing of the run was kept, and it began again with the mended code"


def test_a_comparison_whose_runs_all_failed_still_says_why(
    tmp_path: Path, no_page: list[Path], in_turn: list[str]
) -> None:
    result = command(
        *("--methods", "fedavg", "--reference", "fedavg", "--clients", "3", *SMALL, "--rounds", "1"),
        *("--set", "lr=1e8", "--out", str(tmp_path)),
    )
    assert result.exit_code == 1
    assert "! FedAvg failed (1 of 1 seed): " in result.stdout
    assert "Most often the training diverged" in pd.read_csv(tmp_path / "results.csv")["failed"][0]


def test_an_interrupted_comparison_says_where_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "run_here", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare.run(compare.Plan(BASE, "local", 1), None)
    (folder,) = (tmp_path / "runs").iterdir()
    how = f"the same command with --out runs/{folder.name} continues"
    first, *_, last = capsys.readouterr().err.splitlines()
    assert (first, last) == (f"results: runs/{folder.name} ({how})", f"what has finished is kept: {how}")


def test_a_full_disk_after_the_runs_is_one_line_and_the_earlier_tables_stay_together(
    tmp_path: Path, no_page: list[Path], in_turn: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "grid.csv").write_text("method\n")
    monkeypatch.setattr(tables, "write", full)
    with pytest.raises(BadRequest, match=r"\(No space left on device\): make room; the runs are kept, and the same"):
        compare.run(compare.Plan({**BASE, "num-server-rounds": 1}, "local", 1), tmp_path)
    assert (tmp_path / "grid.csv").exists()


def test_a_worker_that_dies_fails_no_finished_run_and_hides_no_earlier_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    todo = {name: config.from_flat({**BASE, "out": str(tmp_path / name)}) for name in ("bad", "done", "lost")}

    def run_all(configs: Any, workers: Any, on_end: Any, deadline: Any) -> None:
        on_end(pool.FinishedRun(tmp_path / "bad", "NameError: absent"))
        (tmp_path / "done").mkdir()
        (tmp_path / "done" / "summary.json").write_text('{"ok": true}')
        raise BrokenProcessPool("killed")

    monkeypatch.setattr(pool, "run_all", run_all)
    assert compare.run_here(todo, 1) == {"bad": "NameError: absent", "lost": "the process ended"}


def test_the_command_of_a_page_makes_the_same_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[compare.Plan] = []
    monkeypatch.setattr(compare, "run", lambda plan, *args: called.append(plan) or 0)
    values = {"dataset": "digits", "clients": 7, "final-training": True, "track": ""}
    plan = compare.Plan(values, "local,fedprox(mu=0.1 lr=0.05)", 4, (), ["dirichlet:0.1", "iid"], target=0.9)
    words = shlex.split(plan.command())
    assert words[:2] == ["fedapp", "compare"]
    result = CliRunner().invoke(cli.app, words[1:])
    assert result.exit_code == 0, result.output
    (given,) = called
    assert {k: given.values.get(k) for k in values} == values
    assert replace(given, values=values, datasets=()) == plan
    several = replace(plan, values={**values, "partition": "classes", "seed": 3}, datasets=["digits"])
    words = shlex.split(several.command())
    assert not {"dataset=digits", "partition=classes"} & {*words} and "seed=3" in words
    assert CliRunner().invoke(cli.app, words[1:]).exit_code == 0
