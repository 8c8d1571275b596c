"""The search over hyperparameters, and sweeps: which runs are made, and that validation rows alone choose."""

from __future__ import annotations

import html
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from fedapp import cli, config
from fedapp.config import DEFAULTS
from fedapp.errors import BadRequest
from fedapp.experiments import compare, grid, tables
from fedapp.experiments.jobs import Job
from fedapp.results import answers
from fedapp.results.cells import write_table
from fedapp.results.runs import RunResult, read_comparison

BASE: dict[str, Any] = {
    "dataset": "digits", "data-fraction": 0.3, "clients": 4, "num-server-rounds": 2, "local-epochs": 1,
    "batch-size": 64, "alpha": 1.0,
}  # fmt: skip


def plan(methods: str, out: Path, points: str = "", sweep: str = "", seeds: int = 1) -> list[Job]:
    variants = compare.expand(compare.parse_variants(methods), points)
    return compare.jobs_of(BASE, variants, compare.settings_of(BASE, (), (), sweep), seeds, out)


def finish(job: Job, validation: float, test: float = 0.5, ok: bool = True) -> None:
    """Write what a run leaves, as far as the search reads it."""
    job.out.mkdir(parents=True)
    config.write_toml(job.out / "config.toml", job.config)
    other = 0.99 if math.isfinite(validation) else validation
    mine = next(p for p in grid.choosing(job.variant.method) if p != "tuned")
    scores = {p: {"last": test, "validation": validation if p == mine else other} for p in ("trained", "received")}
    (job.out / "summary.json").write_text(json.dumps({"ok": ok, "accuracy": scores}))
    if not ok:
        (job.out / "error.json").write_text(json.dumps({"message": "diverged", "diverged": True}))


def test_every_point_of_the_grid_is_a_variant_of_the_methods_that_have_its_names() -> None:
    variants = compare.parse_variants("local,fedprox(clip=5),fedavg")
    found = compare.expand(variants, "lr=0.1, 0.01; fedprox.mu=1,2")
    assert [v.label for v in found] == [
        "local(lr=0.1)", "local(lr=0.01)", "fedprox(clip=5 lr=0.1 mu=1)", "fedprox(clip=5 lr=0.1 mu=2)",
        "fedprox(clip=5 lr=0.01 mu=1)", "fedprox(clip=5 lr=0.01 mu=2)", "fedavg(lr=0.1)", "fedavg(lr=0.01)",
    ]  # fmt: skip
    assert [v.family for v in found] == ["local"] * 2 + ["fedprox(clip=5)"] * 4 + ["fedavg"] * 2
    assert found[3].args == (("mu", "2"),) and dict(found[3].settings) == {"clip": 5.0, "lr": 0.1}
    assert len({v.folder for v in found}) == len(found)


def test_a_name_of_one_method_goes_before_the_same_name_of_all() -> None:
    variants = compare.parse_variants("fedprox,ditto")
    for points in ("fedprox.lr=5;lr=0.1,1", "lr=0.1,1;fedprox.lr=5"):
        found = compare.expand(variants, points)
        assert [v.label for v in found] == ["fedprox(lr=5)", "ditto(lr=0.1)", "ditto(lr=1)"]


def test_a_call_without_a_search_forgets_the_choice_of_an_earlier_one(
    tmp_path: Path, no_page: list[Path], in_turn: list[str]
) -> None:
    values = {**BASE, "validation": 0.1, "num-server-rounds": 1}
    compare.run(compare.Plan(values, "fedprox,local", 1, points="fedprox.mu=0.1,1"), tmp_path)
    compare.run(compare.Plan(values, "fedprox(mu=0.1),fedprox(mu=1),local", 1), tmp_path)
    assert [r.label for r in read_comparison(tmp_path).runs] == ["fedprox(mu=0.1)", "fedprox(mu=1)", "local"]


def test_a_name_is_a_hyperparameter_before_it_is_a_key() -> None:
    """CCVR has an lr of its own, as in the brackets of --methods."""
    variants = compare.parse_variants("ccvr,fedavg")
    own, plain = compare.expand(variants, "lr=0.5")
    assert own.args == (("lr", "0.5"),) and plain.settings == (("lr", 0.5),)
    key, _ = compare.expand(variants, "config.lr=0.5")
    assert key.settings == (("lr", 0.5),) and not key.args


@pytest.mark.parametrize(
    ("points", "says"),
    [
        ("lr", "NAME=VALUE"), ("lr=", "NAME=VALUE"), ("lr=1,,2", "NAME=VALUE"), ("lr=1,2,1", "twice"),
        ("lr=1;lr=2", "twice"), ("mu=1", "none of local, fedavg has mu"), ("fedprox.mu=1", "none of"),
        ("alpha=0.1,1", "none of"), ("lr=fast", "number"),
        ("lr=0.1,0.10", "a value of lr twice"), (";", "names nothing"),
    ],
)  # fmt: skip
def test_grids_that_make_no_sense_are_refused(points: str, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        compare.expand(compare.parse_variants("local,fedavg"), points)
    with pytest.raises(BadRequest, match="value of its own for lr"):
        compare.expand(compare.parse_variants("local(lr=1)"), "lr=1,2")


def test_a_search_without_validation_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="validation=0"):
        compare.run(compare.Plan(BASE, "local", 1, points="lr=0.1,0.2"), tmp_path / "out")


def test_validation_images_choose_and_test_images_do_not(tmp_path: Path) -> None:
    """The mean over seeds decides; a better test score or a better single seed changes nothing."""
    jobs = plan("local,fedprox", tmp_path, "lr=0.1,0.2,0.3", seeds=2)
    scores = {"lr=0.1": (0.9, 0.1), "lr=0.2": (0.6, 0.6), "lr=0.3": (0.5, 0.5)}
    for job in jobs:
        value = next(v for k, v in scores.items() if k in job.variant.label)[job.seed]
        finish(job, value if job.variant.method == "local" else 1 - value, test=1 - value)
    table, chosen, lines, _ = grid.choose(jobs, jobs, "--grid")
    assert [(j.variant.label, j.seed) for j in chosen] == [("local", 0), ("local", 1), ("fedprox", 0), ("fedprox", 1)]
    assert [dict(j.variant.settings)["lr"] for j in chosen] == [0.2, 0.2, 0.1, 0.1]
    assert chosen[0].out.name == "local-lr=0.2-s0"
    assert any("local(lr=0.2) of 3, 60.0 %" in line for line in lines)
    assert list(table["chosen"]) == [False, True, False, True, False, False]
    assert table["validation"].tolist() == pytest.approx([0.5, 0.6, 0.5, 0.5, 0.4, 0.5])
    assert not [c for c in table if "accuracy" in c or "test" in c or "last" in c], "no test score among the points"


def test_a_point_that_failed_is_not_chosen_and_the_first_of_equals_is(tmp_path: Path) -> None:
    jobs = plan("local,fedavg", tmp_path, "lr=0.1,0.2,0.3")
    for job, (value, ok) in zip(jobs, [(0.9, False), (0.6, True), (0.6, True), *[(math.nan, True)] * 3]):
        finish(job, value, ok=ok)
    _, chosen, lines, unchosen = grid.choose(jobs, jobs, "--grid")
    assert [j.out.name for j in chosen] == ["local-lr=0.2-s0"]
    assert unchosen == ["fedavg: nothing chosen, no point of the grid has a score on validation rows"]
    assert unchosen[0] in lines


def test_points_of_which_a_seed_is_missing_are_told_from_points_without_a_score(tmp_path: Path) -> None:
    jobs = plan("local", tmp_path, "lr=0.1,0.2", seeds=2)
    for job in jobs:
        finish(job, 0.5, ok=job.seed == 0)
    _, chosen, _, unchosen = grid.choose(jobs, jobs, "--grid")
    assert not chosen and unchosen == ["local: nothing chosen, no point of the grid has finished with all of its seeds"]


@pytest.mark.parametrize("error", [None, {"message": "no space left", "exit": 1}])
def test_nothing_is_chosen_while_a_point_has_a_run_that_may_still_succeed(
    error: dict[str, Any] | None, tmp_path: Path
) -> None:
    jobs = plan("local,fedavg", tmp_path, "lr=0.1,0.2")
    for job in jobs[1:]:
        finish(job, 0.5)
    if error is not None:
        finish(jobs[0], 0.5, ok=False)
        (jobs[0].out / "error.json").write_text(json.dumps(error))
    points, chosen, lines, unchosen = grid.choose(jobs, jobs, "--grid")
    assert unchosen == ["local: nothing chosen, not all points have run: repeat the command"] and unchosen[0] in lines
    assert [j.out.name for j in chosen] == ["fedavg-lr=0.1-s0"] and list(points["chosen"]) == [
        False,
        False,
        True,
        False,
    ]


@pytest.mark.full
def test_a_search_goes_on_with_further_points_and_its_second_runs_are_those_of_the_chosen_one(
    tmp_path: Path, no_page: list[Path], in_turn: list[str]
) -> None:
    values = {**BASE, "num-server-rounds": 1, "local-epochs": 3}
    for rates, lr in (("0.000001", 0.000001), ("0.000001,0.1", 0.1)):
        assert compare.run(compare.Plan(values, "local", 3, tune=f"lr={rates}"), tmp_path) == 0
        runs, again = read_comparison(tmp_path).runs, tmp_path / "again" / f"local-lr={rates.split(',')[-1]}-s0"
        assert [run.flat["lr"] for run in runs] == [lr] * 3 and RunResult(again).flat["lr"] == lr
        table = pd.read_csv(tmp_path / "results.csv")
        assert [run.score("trained") for run in runs] == pytest.approx(table["trained_last"].tolist())
    assert len(in_turn) == 3 + 3 + 3 + 3


def test_a_search_by_the_global_score_is_refused_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = {**BASE, "validation": 0.1, "protocols": "global"}
    with pytest.raises(BadRequest, match=r"protocols = 'global' .*--set protocols=received,trained,global"):
        compare.run(compare.Plan(values, "local", 1, points="lr=0.1"), None)
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    ("methods", "protocols", "says"),
    [
        ("local,ccvr,fedavg(clip=5)", "", "received chooses for ccvr, fedavg(clip=5); "),
        ("ccvr", "received,global", "received chooses for ccvr; "), ("ccvr", "received,trained", ""),
        ("local,fedclassavg", "", ""),
    ],
)  # fmt: skip
def test_which_score_chooses_where_a_global_one_is_published_is_said_before_any_run(
    methods: str,
    protocols: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = {**BASE, "validation": 0.1, "protocols": protocols or DEFAULTS["protocols"]}
    monkeypatch.setattr(compare, "run_here", lambda *_: pytest.fail("begun"))
    with pytest.raises(pytest.fail.Exception):
        compare.run(compare.Plan(values, methods, 1, points="lr=0.1,0.2"), tmp_path / "out")
    said = capsys.readouterr().err
    assert says in said and ("global has no validation rows" in said) == bool(says)


def test_a_comparison_that_is_read_again_holds_the_chosen_runs_alone(tmp_path: Path) -> None:
    """Each setting has its own choice, and all go by the name of the method."""
    jobs = plan("local,fedavg", tmp_path, "lr=0.1,0.2", sweep="fraction-train=0.5,1")
    for job in jobs:
        best = 0.1 if job.config.federation.fraction_train < 1 else 0.2
        finish(job, 0.8 if dict(job.variant.settings)["lr"] == best else 0.7)
    points, chosen, _, _ = grid.choose(jobs, jobs, "--grid")
    write_table(tmp_path / "grid.csv", points)
    runs = read_comparison(tmp_path).runs
    assert sorted(r.out for r in runs) == sorted(j.out for j in chosen)
    assert {(r.label, r.setting["fraction-train"], r.flat["lr"]) for r in runs} == {
        (method, fraction, lr) for method in ("local", "fedavg") for fraction, lr in ((0.5, 0.1), (1.0, 0.2))
    }


def test_each_value_of_a_sweep_is_a_setting(tmp_path: Path) -> None:
    jobs = plan("local,fedavg", tmp_path, sweep="fraction-train=0.5,1;clients=3,4")
    assert [str(j.out.relative_to(tmp_path / "runs")) for j in jobs[::2]] == [
        f"digits-dirichlet-1-fraction-train={f}-clients={c}/local-s0" for f in ("0.5", "1") for c in (3, 4)
    ]
    assert [(j.config.federation.fraction_train, j.config.data.clients) for j in jobs[::2]] == [
        (0.5, 3),
        (0.5, 4),
        (1, 3),
        (1, 4),
    ]
    assert jobs[0].sweep == "clients 3, fraction-train 0.5"
    with pytest.raises(BadRequest, match="did you mean 'fraction-train'"):
        plan("local", tmp_path, sweep="fraction-tran=0.5")
    with pytest.raises(BadRequest, match="no common key"):
        plan("local", tmp_path, sweep="lr=0.5")
    with pytest.raises(BadRequest, match="a value of clients twice"):
        plan("local", tmp_path, sweep="clients=3,03")


def test_a_method_without_a_chosen_point_in_one_setting_is_named_and_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has a chosen point in the other setting."""
    shared, out = tables.Shared(True, ()), tmp_path / "out"

    def execute(jobs: list[Job], *_: Any) -> dict[str, str]:
        lost = [j for j in jobs if j.variant.method == "fedavg" and j.config.data.clients == 4]
        for job in (j for j in jobs if not j.out.exists()):
            finish(job, 0.5, ok=job not in lost)
        return {job.name: "diverged" for job in lost}

    for module, name, value in (
        (compare, "execute", execute), (tables, "write", lambda *_: None), (tables, "verify", lambda _: shared),
        (compare, "_report", lambda *_: None), (answers, "screen", lambda _: ""),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    plan = compare.Plan({**BASE, "num-server-rounds": 1}, "local,fedavg", 1, tune="lr=0.1", sweep="clients=3,4")
    assert compare.run(plan, out) == 1
    told = capsys.readouterr().err
    assert "digits-dirichlet-1-clients=4 fedavg: nothing chosen, no point of the grid has finished" in told
    assert "clients=4 fedavg(lr=0.1) s0 failed" in told


@pytest.mark.full
def test_a_search_from_end_to_end(tmp_path: Path) -> None:
    """A rate that learns nothing loses; tables hold the winner under the method's name, once a seed."""
    values = {**BASE, "validation": 0.2, "num-server-rounds": 1, "local-epochs": 3}
    plan = compare.Plan(values, "local,fedavg", 1, points="lr=0.000001,0.1")
    assert compare.run(plan, tmp_path / "out", workers=1) == 0
    table = pd.read_csv(tmp_path / "out" / "grid.csv")
    assert list(table["chosen"]) == [False, True, False, True]
    rows = pd.read_csv(tmp_path / "out" / "results.csv")
    assert list(rows["variant"]) == ["local", "fedavg"]
    best = [rows["trained_validation"][0], rows["received_validation"][1]]
    assert best == pytest.approx(table["validation"][table["chosen"]].tolist()), "each by its headline"
    for run in read_comparison(tmp_path / "out").runs:
        assert run.flat["lr"] == 0.1
        assert run.score("trained", "validation") == pytest.approx(run.final["trained_validation"].mean())


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--tune", "lr=0.1,1"], "--tune chooses on validation rows: add --on validation"),
        (["--tune", "lr=0.1,1", "--on", "test"], "not on test rows"),
        (["--on", "validation"], "goes with --tune"),
        (["--tune", "mu=1,2", "--on", "validation"], "takes keys that all methods have, and mu is not one of them"),
        (["--tune", "local_epochs=1,2", "--on", "validation"], "did you mean 'local-epochs'?"),
        (["--tune", "lr", "--on", "validation"], "--tune: 'lr' is not NAME=VALUE,VALUE"),
        (["--tune", "lr=0.1,1", "--on", "validation", "--grid", "lr=1"], "--tune and --grid are two searches"),
        (["--tune", "lr=0.1,1", "--on", "validation", "--set", "validation=0"], "--tune chooses on validation rows"),
        (["--tune", "lr=0.1,1", "--on", "validation", "--methods", "local(lr=1)"], "--tune: local(lr=1) has a value"),
    ],
)
def test_a_search_for_all_methods_that_makes_no_sense_is_refused_in_one_line(
    args: list[str], says: str, tmp_path: Path
) -> None:
    result = CliRunner().invoke(
        cli.app, ["compare", "--methods", "local,fedprox", "--out", str(tmp_path / "out"), *args]
    )
    assert isinstance(result.exception, BadRequest) and says in str(result.exception), result.exception
    assert "\n" not in str(result.exception) and not (tmp_path / "out").exists()


def test_the_common_search_sets_the_key_of_a_method_that_has_a_hyperparameter_of_the_same_name() -> None:
    own, plain = compare.expand(compare.parse_variants("ccvr,fedavg"), "lr=0.5", compare.TUNE)
    assert dict(own.settings) == dict(plain.settings) == {"lr": 0.5} and not own.args


@pytest.mark.full
def test_all_methods_get_the_same_search_with_the_first_seed_and_its_choice_runs_with_all_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that diverges is a result of the search; the same command again begins none that has finished."""
    out, values = tmp_path / "out", {**BASE, "num-server-rounds": 1, "local-epochs": 3}
    plan = compare.Plan(values, "local,fedavg", 2, tune="lr=0.000001,0.1,1e30")
    assert compare.run(plan, out, workers=1) == 0
    ran = sorted(p.name for p in (out / "runs").iterdir() if p.is_dir())
    tried = [f"{method}-lr={lr}-s0" for method in ("fedavg", "local") for lr in ("0.000001", "0.1", "1e30")]
    assert ran == sorted([*tried, "fedavg-lr=0.1-s1", "local-lr=0.1-s1"])
    rows = pd.read_csv(out / "results.csv")
    assert list(zip(rows["variant"], rows["seed"])) == [("local", 0), ("local", 1), ("fedavg", 0), ("fedavg", 1)]
    comparison = read_comparison(out)
    assert {(run.flat["lr"], run.flat["validation"]) for run in comparison.runs} == {(0.1, 0.1)}
    told = "Chosen from 0.000001, 0.1, 1e30 on validation rows of seed 0, lr: 0.1 for all."
    assert comparison.notes["alerts"][0] == told
    assert told in html.unescape((out / "report.html").read_text()).partition("<caption>")[2]
    assert f"! {told}" in " ".join(answers.screen(comparison, everything=True).split())
    assert " --tune lr=0.000001,0.1,1e30 --on validation " in comparison.notes["command"][0]
    begun: list[str] = []
    run_here = compare.run_here
    monkeypatch.setattr(compare, "run_here", lambda todo, workers: begun.extend(todo) or run_here(todo, workers))
    assert compare.run(replace(plan, values={**values, "validation": 0.1}), out, workers=1) == 0
    assert begun == ["local(lr=1e30) s0", "fedavg(lr=1e30) s0"], "those that diverged: code may have been mended"
