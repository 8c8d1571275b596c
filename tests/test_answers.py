"""The answer of a comparison: sentences, alerts, and a screen of 24 lines."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from fedapp import cli, registry
from fedapp.engines.local import effective
from fedapp.engines.runner import what_leaves
from fedapp.errors import BadRequest
from fedapp.experiments import compare, tables
from fedapp.results import tables as printed
from fedapp.results.answers import Answer, alerts_of, answers_of, payload_of, screen
from fedapp.results.figures import gains
from fedapp.results.figures.scores import guessing
from fedapp.results.runs import Comparison, read_comparison
from tests import madeup
from tests.madeup import scored as comparison

ALONE = [0.8, 0.81, 0.79]
FOUR = {"local": ALONE, "fedclassavg": [0.85, 0.86, 0.83], "lgfedavg": [0.81, 0.79, 0.8], "fedavg": [0.6, 0.62, 0.58]}


def answered(out: Path) -> Answer:
    (found,) = answers_of(Comparison(out, ()))
    return found


@pytest.fixture
def four(tmp_path: Path) -> Path:
    comparison(tmp_path, FOUR, clients=20)
    return tmp_path


def test_each_question_has_a_sentence(four: Path) -> None:
    difference, harm, classes, cost, tenth = answered(four).sentences().values()
    assert re.match(
        r"Better than training alone: FedClassAvg by 4\.7 points \(\+\d\.\d to \+\d\.\d\)\. Worse ", difference
    )
    assert "Worse than training alone: FedAvg by 20.0 points" in difference and "Not decided: LG-FedAvg." in difference
    assert harm.startswith("FedClassAvg helps") and "harms 0; by chance (training alone, run again) 0 and 0." in harm
    assert "FedAvg harms the most clients: 20." in harm
    assert tenth.startswith("Worst 10 % of the clients, against that of training alone: FedClassAvg +4.7 (")
    assert classes == "Highest on all classes: FedClassAvg, 42.3 % (training alone 40.0 %)."
    assert cost == "A client of FedClassAvg sends 2,600 B a round. Exchanged: the head, both ways."


def test_the_interval_of_the_screen_is_that_of_the_table_and_k_counts_the_methods_alone(four: Path) -> None:
    answer = answered(four)
    tests = Comparison(four, ()).significance
    assert set(tests.loc[tests["measure"] == "headline", "variant"]) == {"fedclassavg", "lgfedavg", "fedavg"}
    assert "3 seeds, 3 methods against alone: only differences above" in answer.power()
    assert "--seeds 5 adds 60.0 s of runs" in answer.power(), "two seeds of 24 seconds, and 6 for alone again"
    row = answer.test("fedclassavg")
    assert row is not None
    assert f"{100 * row['low']:+.1f} to {100 * row['high']:+.1f}" in screen(Comparison(four, ()))


def test_an_open_difference_is_called_neither_better_nor_worse(tmp_path: Path) -> None:
    comparison(tmp_path, {"local": ALONE, "fedclassavg": [0.9, 0.75, 0.82], "lgfedavg": [0.7, 0.85, 0.81]})
    shown = screen(Comparison(tmp_path, ()), everything=True).lower()
    assert "no difference to training alone is decided. highest mean on own test data: fedclassavg" in " ".join(
        shown.split()
    )
    assert "better" not in shown and "worse" not in shown


@pytest.mark.parametrize("seeds", [1, 2])
def test_one_seed_shows_no_difference_and_two_show_both_without_a_word(seeds: int, tmp_path: Path) -> None:
    comparison(tmp_path, {name: values[:seeds] for name, values in FOUR.items()})
    shown = screen(Comparison(tmp_path, ()))
    assert ("+5.0 and +5.0" in shown) == (seeds == 2) and "interval" not in shown and "again" not in shown
    assert ("One seed: no differences" if seeds == 1 else "Two seeds: differences are shown, not judged") in shown
    assert "vs" in shown if seeds == 2 else "vs" not in shown


@pytest.mark.full
def test_the_screen_has_24_lines_of_80_columns_however_many_methods_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    scores = {m: [0.8 + i / 500, 0.79, 0.81 - i / 300] for i, m in enumerate(registry.names())}
    comparison(tmp_path, scores, clients=100)
    shown = screen(Comparison(tmp_path, ())).splitlines()
    assert len(shown) <= 24 and max(map(len, shown[:-1])) <= 80
    hidden = next(line for line in shown if "more: --all shows them" in line)
    everything = screen(Comparison(tmp_path, ()), everything=True)
    assert all(registry.get(m).title.split()[0] in everything for m in registry.names() if m != "local")
    rows = [i for i, line in enumerate(shown) if line.startswith(("alone ", "alone again", "majority class"))]
    assert rows == [shown.index(hidden) + i for i in (1, 2, 3)]


@pytest.mark.full
@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("long", [False, True])
def test_the_screen_answers_three_questions_whatever_the_methods_are_called(
    long: bool, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    scores = {m: [0.76 + i / 200 + n / 2000 for n in range(3)] for i, m in enumerate(registry.names())}
    scores["local"] = [0.8, 0.8005, 0.801]
    comparison(tmp_path, scores, clients=20)
    if long:
        args = "(lr=0.003 optimizer=adam augment=weak local-epochs=5)"
        for name in ("results.csv", "significance.csv"):
            table = pd.read_csv(tmp_path / name)
            table["variant"] = table["variant"].where(table["variant"] == "local", table["variant"] + args)
            table.to_csv(tmp_path / name, index=False)
    shown = screen(Comparison(tmp_path, ())).splitlines()
    assert len(shown) <= 24 or (long and width < 80)
    text = " ".join(shown)
    assert re.search(r"Better than training alone: .* by \d+\.\d points", text)
    assert re.search(r"helps [\d.]+ of 20 clients and harms", text) and " sends 2,600 B a round. Exchanged: " in text
    leader = answered(tmp_path).name(answered(tmp_path).leader).split(" (")[0]
    assert sum(line.startswith(leader) for line in shown) >= 2, "a sentence and a row of the table"


def test_two_rows_of_one_method_keep_their_settings(tmp_path: Path) -> None:
    comparison(tmp_path, {"local": [0.8] * 3, "fedclassavg": [0.84] * 3, "fedprox": [0.7] * 3}, clients=20)
    for name in ("results.csv", "significance.csv"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace("fedprox", "fedclassavg(tau=1)"), encoding="utf-8")
    shortest = answered(tmp_path).sentences(2)
    assert "FedClassAvg (tau=1) harms the most clients: 20." in shortest["harm"]
    assert "Worse than training alone: FedClassAvg (tau=1)" in shortest["difference"]


def test_a_delivered_model_that_is_better_after_local_training_is_named(tmp_path: Path) -> None:
    comparison(tmp_path, {"local": [0.8] * 3, "fedavg": [0.84] * 3}, clients=20)
    assert "as delivered; others after local training" in screen(Comparison(tmp_path, ()))
    table = pd.read_csv(tmp_path / "significance.csv")
    table.loc[table["measure"] == "headline", "word"] = "worse"
    table.to_csv(tmp_path / "significance.csv", index=False)
    assert "* as delivered; after local training FedAvg has 84.0, +4.0 (+" in screen(Comparison(tmp_path, ()))


def test_a_difference_within_the_margin_is_said_to_be(tmp_path: Path) -> None:
    scores = {"local": [0.8] * 3, "fedavg": [0.804, 0.8045, 0.8055], "lgfedavg": [0.796, 0.7955, 0.7945]}
    comparison(tmp_path, {**scores, "fedclassavg": [0.8] * 3}, clients=30, rows=1000)
    told = answered(tmp_path).sentences()["difference"]
    assert re.search(r"FedAvg by 0\.5 points \(\+0\.\d to \+0\.\d; less than the margin of 1\.0\)", told)


def test_seeds_that_agree_have_an_interval_with_two_ends(tmp_path: Path) -> None:
    comparison(tmp_path, {"local": [0.8] * 3, "fedavg": [0.85] * 3, "lgfedavg": [0.8] * 3}, clients=30, rows=1000)
    shown = " ".join(screen(Comparison(tmp_path, ())).split())
    assert "FedAvg by 5.0 points (+4.997 to +5.003). Equal to training alone within 1.0 points (90 %" in shown
    assert "LG-FedAvg 80.0 +0.0 -0.003 to +0.003 0/30/0" in shown
    whole = " ".join(screen(Comparison(tmp_path, ()), everything=True).split())
    assert "FedAvg +5.0 (+4.97 to +5.03), better by more than the margin of 1.0." in whole
    assert "only differences above about 0.004 points would show, with 5 seeds 0.002, with 10 seeds 0.001" in shown


def test_a_method_that_failed_is_in_its_place_and_says_whether_the_same_command_helps(tmp_path: Path) -> None:
    madeup.comparison(tmp_path, ["fedavg", "local", "fedclassavg"], failed=["fedavg"])
    (tmp_path / "runs" / "fedavg-s1" / "error.json").write_text('{"message": "no space left"}')
    found = read_comparison(tmp_path)
    assert [run.failure for run in found.runs if not run.ok] == [
        "the loss is not finite (the same command would fail in the same way)",
        "no space left (the same command continues it)",
        "the loss is not finite (the same command would fail in the same way)",
    ]
    alert = "FedAvg failed (3 of 3 seeds): the loss is not finite (the same command would fail in the same way)"
    assert alerts_of(found, answers_of(found))[0] == alert
    for seed, told in enumerate(("; it would fail in the same way", "; to continue: fedapp run --resume {}")):
        run = tmp_path / "runs" / f"fedavg-s{seed}"
        refused = CliRunner().invoke(cli.app, ["show", str(run)]).exception
        assert str(refused).endswith(told.format(run)), "fedapp run continues a single run"
    table = pd.read_csv(tmp_path / "results.csv")
    table["failed"] = table["failed"].where(table["failed"].isna(), f"round 1: {'a reason ' * 40}: lower lr")
    table.to_csv(tmp_path / "results.csv", index=False)
    shown = screen(Comparison(tmp_path, ()))
    assert re.search(r"^! FedAvg failed \(3 of 3 seeds\): round 1: a reason .*\s…\s.*: lower lr$", shown, re.M | re.S)
    everything = CliRunner().invoke(cli.app, ["show", str(tmp_path), "--all"]).stdout
    names = re.findall(r"│ (FedAvg|alone|FedClassAvg) +│", everything.partition("Further")[0])
    assert names[:3] == ["FedAvg", "alone", "FedClassAvg"]


def test_a_comparison_without_the_reference_has_no_columns_of_differences(tmp_path: Path) -> None:
    madeup.comparison(tmp_path, ["fedavg", "local"], failed=["local"])
    shown = screen(Comparison(tmp_path, ()), everything=True)
    assert "interval" not in shown and "ref." not in shown and "No differences: training alone" in shown


@pytest.mark.full
@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_number_is_cut_and_no_word_broken(width: int, four: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = screen(Comparison(four, ()))
    assert max(len(line) for line in shown.splitlines() if str(four) not in line) <= width
    monkeypatch.setenv("COLUMNS", "500")
    whole = set(screen(Comparison(four, ()), everything=True).split())
    said = {
        "…",
        "more",
        "alert",
        "alerts",
        "details",
        "show",
        "--all",
        "fedapp",
        "shows",
        "them",
        "1",
        "2",
        "3",
        "1.",
        "more:",
    }
    assert set(shown.split()) <= whole | said


def test_the_narrowest_terminal_gets_an_answer(four: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1")
    assert "alone:\nFedClassAvg" in screen(Comparison(four, ()), everything=True)


def test_alerts_name_what_must_be_known_first(tmp_path: Path) -> None:
    comparison(tmp_path, {"local": [0.2, 0.2, 0.2], "lgfedavg": [0.1, 0.1]}, clients=1, rows=20)
    found = Comparison(tmp_path, ())
    assert alerts_of(found, answers_of(found)) == [
        "Settings differ, augment: weak for FedClassAvg.",
        "One client: there is nothing to federate.",
        "Methods have different seeds; differences count the common ones: training alone 3, LG-FedAvg 2.",
        "No method is above guessing each client's majority class (30.0 %).",
        "Few test rows: 20 of the median client, so one row is 5.0 points of its score.",
    ]
    lines = screen(found).splitlines()
    assert any(line.startswith("LG-FedAvg helps 0 of 1 client and harms 0") for line in lines)
    assert sum(line.startswith(("! ", "  ")) and not line.startswith("  details") for line in lines) <= 6
    assert any(re.match(r"! \d more alert", line) for line in lines)


def test_a_method_that_lost_seeds_has_no_interval_and_the_others_keep_theirs(tmp_path: Path) -> None:
    comparison(tmp_path, {**FOUR, "lgfedavg": [0.81, 0.79]})
    rows = {line.split("  ")[0]: line.split()[1:] for line in screen(Comparison(tmp_path, ())).splitlines()}
    row = answered(tmp_path).test("fedclassavg")
    assert row is not None and rows["LG-FedAvg"][:3] == ["80.0", "–", "–"]
    assert rows["FedClassAvg"][1:3] == ["+4.7", f"{100 * row['low']:+.1f}"]
    told = answered(tmp_path).sentences()["difference"]
    assert "FedClassAvg" in told and "LG-FedAvg" not in told and "Not decided" not in told, "two seeds have no word"


def test_a_second_call_leaves_no_table_of_the_first(four: Path) -> None:
    assert len(answered(four).again) == 3
    shutil.rmtree(four / "runs")
    shutil.rmtree(four / "again")
    comparison(four, {name: values[:1] for name, values in FOUR.items()}, clients=20)
    assert len(answered(four).again) == 0 and "again" not in screen(Comparison(four, ()))


def test_titles_from_a_foreign_folder_reach_the_terminal_as_text(four: Path) -> None:
    for name in ("results", "significance", "again"):
        pd.read_csv(four / f"{name}.csv").assign(dataset="\x1b[31mred").to_csv(four / f"{name}.csv", index=False)
    shown = CliRunner().invoke(cli.app, ["show", str(four), "--all"]).stdout
    assert "\x1b" not in shown and r"\x1b[31mred" in shown


def test_the_payload_is_that_of_the_row_and_says_whether_it_shows_classes() -> None:
    assert payload_of("cwfedavg") == "Exchanged: the whole model, both ways; each client gets its own."
    assert payload_of("cwfedavg(share=head lr=0.1)") == "Exchanged: the head, both ways; each client gets its own."
    assert payload_of("fedgh").endswith("the head down. The payload shows a client's classes.")
    assert payload_of("fedgh", hidden=True).endswith("the head down.")


def test_the_payload_is_that_of_the_run(four: Path) -> None:
    """A head without rounds exchanges no arrays of a base method, and secure sums show no classes of a client."""
    table = pd.read_csv(four / "results.csv").replace("fedclassavg", "lda(base=none)").assign(rounds=0)
    tests = pd.read_csv(four / "significance.csv").replace("fedclassavg", "lda(base=none)")
    tests.to_csv(four / "significance.csv", index=False)
    shown = " Exchanged: sums of features and of their products."
    for secure, more in ((False, " The payload shows a client's classes."), (True, "")):
        table.assign(secure_sum=1 if secure else None).to_csv(four / "results.csv", index=False)
        assert answered(four).sentences()["cost"] == f"A client of LDA (base=none) sends 2,600 B once.{shown}{more}"
    values = {"dataset": "digits", "clients": 3, "method": "lda", "method-args": "base=none"}
    assert what_leaves(effective(values))[0] == "exchanged: sums of features and of their products"


def test_runs_with_secure_sums_are_marked_in_the_results(tmp_path: Path) -> None:
    jobs = comparison(tmp_path, {"local": [0.8] * 3, "fedgh": [0.9] * 3})
    for file in tmp_path.glob("runs/fedgh-*/config.toml"):
        file.write_text(file.read_text().replace("secure-sum = false", "secure-sum = true"))
    tables.write(tmp_path, [replace(job) for job in jobs], [], "local", None, [], [])  # nothing is read
    assert answered(tmp_path).sentences()["cost"].endswith("the head down.")


def test_each_seed_counts_once_in_the_majority_class(four: Path) -> None:
    table = pd.read_csv(four / "results.csv")
    table["majority"] = table["seed"].map({0: 0.1, 1: 0.2, 2: 0.6})
    table[(table["seed"] == 0) | (table["variant"] == "local")].to_csv(four / "results.csv", index=False)
    assert answered(four).majority == pytest.approx(0.3)
    runs: Any = [SimpleNamespace(seed=s, card={"majority_mean": share}) for s, share in ((0, 0.1), (0, 0.1), (1, 0.5))]
    guess = guessing(runs, "")
    assert guess is not None and guess[1] == pytest.approx(0.3)


def test_a_method_that_is_not_installed_is_shown_without_its_payload(four: Path) -> None:
    for name in ("results", "significance"):
        table = pd.read_csv(four / f"{name}.csv").replace("fedclassavg", "mine")
        table.to_csv(four / f"{name}.csv", index=False)
    assert answered(four).sentences()["cost"] == "A client of mine sends 2,600 B a round."


def test_a_reference_that_lost_seeds_or_all_is_named(four: Path, tmp_path: Path) -> None:
    comparison(tmp_path / "lost", {**FOUR, "local": ALONE[:1]}, clients=20)
    assert answered(tmp_path / "lost").power().startswith("Only 1 seed of 3 finished")
    madeup.comparison(tmp_path / "other", ["fedavg", "local", "lgfedavg"], failed=["fedavg"], reference="fedavg")
    told = [*answers_of(Comparison(tmp_path / "other", ()))[0].alerts()]
    assert "No differences: FedAvg and no method have finished a seed in common." in told
    (four / "significance.csv").unlink()
    assert any(alert.startswith("No differences: ") for alert in answered(four).alerts())


def test_harm_against_another_reference_says_that_it_is_against_training_alone(four: Path) -> None:
    tests = pd.read_csv(four / "significance.csv").replace("local", "fedavg")
    tests[tests["variant"] != "fedavg"].to_csv(four / "significance.csv", index=False)
    assert answered(four).sentences()["harm"].startswith("Against training alone, ")


def test_show_prints_the_screen_again_and_everything_when_asked(four: Path) -> None:
    shown = CliRunner().invoke(cli.app, ["show", str(four)])
    assert shown.exit_code == 0 and shown.stdout == screen(Comparison(four, ())) + "\n"
    everything = CliRunner().invoke(cli.app, ["show", str(four), "--all"]).stdout
    assert "alone again" in everything and "Standalone" not in everything, "one name on a screen"
    assert "headline, the score that a method is judged by" in everything
    run = CliRunner().invoke(cli.app, ["show", str(four / "runs" / "local-s0"), "--all"])
    assert run.exit_code == 1 or "trained" in run.stdout


def test_what_is_no_comparison_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    comparison(tmp_path / "scoreless", {"local": [math.nan] * 2, "fedavg": [math.nan] * 2}, rows=0)
    for folder, told in (("empty", "holds no comparison of this version"), ("scoreless", "no client has test rows")):
        refused = CliRunner().invoke(cli.app, ["show", str(tmp_path / folder)]).exception
        assert isinstance(refused, BadRequest) and told in str(refused) and "\n" not in str(refused)


@pytest.mark.parametrize(
    "command",
    ["show", "report", "track --to tensorboard", "export --out m.pt2", "predict x.npz --run", "predict x.npz --model",
     "run", "run --resume", "compare"],
)  # fmt: skip
def test_a_path_that_does_not_exist_is_named_with_a_similar_one(command: str, tmp_path: Path) -> None:
    (tmp_path / "runs" / "fedavg").mkdir(parents=True)
    for typed, near in (("runs/fedavgg", "fedavg"), ("run/fedavg", "runs")):
        refused = CliRunner().invoke(cli.app, [*command.split(), str(tmp_path / typed)]).exception
        assert f"{tmp_path / typed} does not exist, did you mean '{near}'? " in str(refused)
        assert isinstance(refused, BadRequest) and str(refused).count("did you mean") == 1


def test_the_second_runs_of_standalone_are_no_rows_of_the_comparison(four: Path) -> None:
    found = read_comparison(four)
    assert not any("again" in run.out.parts for run in found.runs) and len(found.table) == 12
    assert len(found.again) == 3 and found.again["method"].eq("local").all() and found.again["gain"].notna().all()


def test_standalone_is_added_unless_a_reference_is_named_or_it_refuses() -> None:
    values = {"dataset": "digits", "clients": 4, "data-fraction": 0.3}
    settings = compare.settings_of(values, (), ())
    fedavg = compare.parse_variants("fedavg")
    assert [v.label for v in compare.with_standalone(values, fedavg, settings)] == ["fedavg", "local"]
    both = compare.parse_variants("local(augment=weak),fedavg")
    assert compare.with_standalone(values, both, settings) == both
    private = {**values, "secure-sum": True, "dp": "client", "clip-update": 1.0, "dp-epsilon": 30.0}
    assert compare.with_standalone(private, fedavg, settings) == fedavg


def test_standalone_again_has_the_same_partition_and_the_next_training_seed(tmp_path: Path) -> None:
    values = {"dataset": "digits", "clients": 4, "data-fraction": 0.3, "seed": 4}
    variants = compare.parse_variants("fedavg,local")
    for seeds, wanted in ((2, []), (3, [(5, 4), (6, 5), (7, 6)])):
        jobs = compare.jobs_of(values, variants, {"": {}}, seeds, tmp_path)
        again = compare.repeats(jobs, tmp_path)
        assert [(j.config.federation.seed, j.config.data_seed) for j in again] == wanted
        assert [j.seed for j in again] == [4, 5, 6][: len(again)]
        assert all(j.out.parent == tmp_path / "again" for j in again)


def test_the_resolution_is_that_of_the_data_card_where_only_the_central_test_set_is_scored(tmp_path: Path) -> None:
    jobs = [replace(job) for job in comparison(tmp_path, {"local": [0.8] * 2, "fedavg": [0.9] * 2})]  # nothing is read
    for path in tmp_path.glob("runs/*/final.csv"):
        table = pd.read_csv(path)
        table[[c for c in table if not c.endswith(("_total", "_correct"))]].to_csv(path, index=False)
    (tmp_path / "runs" / "fedavg-s1" / "data_card.json").unlink()
    found = tables.significance(jobs, "local").set_index("measure")["standard_error"]
    assert found["headline"] == pytest.approx(1 / 1000 / math.sqrt(12 * 2)), "ten clients with 100 test rows"


def test_the_worst_tenth_is_a_mean_of_a_tenth_of_the_clients(tmp_path: Path) -> None:
    comparison(tmp_path, {"local": [0.8] * 3, "fedavg": [0.9] * 3}, clients=21, rows=40)
    row = answered(tmp_path).test("fedavg", "headline_worst_tenth")
    assert row is not None and row["standard_error"] == pytest.approx(1 / (3 * 40) / math.sqrt(12 * 3))


def test_scores_on_the_central_test_set_are_called_so_and_a_method_without_one_does_not_lead(tmp_path: Path) -> None:
    comparison(tmp_path, {"lgfedavg": [0.9], "fedavg": [0.8], "local": [0.7]})
    table = pd.read_csv(tmp_path / "results.csv")
    scored = table["variant"] == "fedavg"
    table["headline"] = table["headline"].where(~scored, "global").where(scored)
    table["headline_last"] = table["headline_last"].where(scored)
    table.to_csv(tmp_path / "results.csv", index=False)
    (tmp_path / "significance.csv").unlink()
    answer, shown = answered(tmp_path), " ".join(screen(Comparison(tmp_path, ())).split())
    assert answer.leader == "fedavg" and "Highest mean on central test data: FedAvg, 80.0 %." in shown
    assert "central" in shown.partition("majority")[0].split()
    assert "No differences: training alone has no score on central test data: give another --reference." in shown


def test_a_plot_of_scores_on_the_central_test_set_says_so(four: Path) -> None:
    pd.read_csv(four / "results.csv").assign(headline="global").to_csv(four / "results.csv", index=False)
    first, *_ = gains.differences([], answered(four), "", "")
    assert first.title == "Central test rows" and "on the central test rows." in first.caption


def test_named_clients_without_test_rows_or_without_a_gain(tmp_path: Path) -> None:
    comparison(tmp_path, {"local": [0.8, 0.8], "fedavg": [0.81, 0.79]}, clients=2, rows=[0, 100])
    (row,) = printed._named_clients(read_comparison(tmp_path).runs, "local").loc[["fedavg"]].to_numpy().tolist()
    assert row == ["–", "80.0 ± 1.4; +0.0 (1)"]


def test_rounds_to_a_target_count_the_seeds_that_have_one() -> None:
    rows = pd.DataFrame({"trained_target": [0.9, 0.9, math.nan], "trained_last": 0.9, "n": [3, 5, math.nan]})
    assert printed._until(rows, "n") == "4.0" and printed._until(rows[2:], "n") == "–"
    assert printed._until(rows.assign(trained_last=math.nan, n=math.nan), "n") == "–", "not never: it was not measured"


def test_two_clients_of_one_name_have_a_column_each(tmp_path: Path) -> None:
    comparison(tmp_path, {"local": [0.8, 0.8], "fedavg": [0.81, 0.79]}, clients=3)
    for file in tmp_path.glob("runs/*/data_card.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "names": ["ada", "site", "ada"]}))
    assert list(printed._named_clients(read_comparison(tmp_path).runs, "local")) == ["ada (0)", "site", "ada (2)"]


def test_clients_without_test_rows_have_no_say_in_margin_and_median(tmp_path: Path) -> None:
    comparison(tmp_path, FOUR, clients=5, rows=[0, 0, 0, 50, 40])
    answer = answered(tmp_path)
    assert any("Few test rows: 45 of the median client" in alert for alert in answer.alerts())
    row = answer.test("fedclassavg")
    assert row is not None and row["margin"] == pytest.approx(1 / 45)


def test_the_share_of_partitions_is_told_from_four_seeds_on_with_everything(tmp_path: Path) -> None:
    """Standalone again lies half a point above the first run, the partitions lie points apart."""
    comparison(tmp_path / "four", {"local": [0.8, 0.82, 0.78, 0.84], "fedavg": [0.8] * 4}, rows=1000)
    told = answered(tmp_path / "four").variance()
    assert re.fullmatch(r"Between partitions lies 9\d % of the variance of training alone \(95 % interval .*\)\.", told)
    assert told.endswith("to 100 %, 4 partitions, 2 training seeds each).")
    found = Comparison(tmp_path / "four", ())
    shown = (" ".join(screen(found, everything).split()) for everything in (True, False))
    assert [told in text for text in shown] == [True, False], "the screen of 24 lines has no room for it"
    comparison(tmp_path / "three", FOUR)
    assert answered(tmp_path / "three").variance() == ""


def test_methods_with_the_same_mean_are_named_together(tmp_path: Path) -> None:
    comparison(tmp_path / "alone", {"local": ALONE, "fedavg": [0.8] * 3, "lgfedavg": [0.7] * 3})
    told = answered(tmp_path / "alone").sentences()["difference"]
    assert told.endswith("Highest mean on own test data: FedAvg and training alone, 80.0 % each.")
    comparison(tmp_path / "two", {"local": ALONE, "fedavg": [0.81] * 3, "lgfedavg": [0.81] * 3})
    told = answered(tmp_path / "two").sentences()["difference"]
    assert told.endswith("FedAvg and LG-FedAvg, 81.0 % each (training alone 80.0 %).")


@pytest.mark.parametrize(
    ("clients", "rows", "images", "wanted"), [(10, 20, 2000, 200), (30, 100, 2000, 2000), (30, 100, 500, 500)]
)
def test_the_margin_of_all_classes_counts_the_rows_that_it_is_measured_on(
    clients: int, rows: int, images: int, wanted: int, tmp_path: Path
) -> None:
    """They are all clients' test rows together, at most 2,000, or as many as the run says; alone scores 99.5 %."""
    comparison(tmp_path, {"local": [0.8] * 3, "fedavg": [0.8] * 3}, clients, rows)
    (run, *_) = read_comparison(tmp_path).runs
    if images < 2000:
        summary = json.loads((run.out / "summary.json").read_text())
        sampled = {"balanced": {"clients": clients, "of": clients, "images": images}}
        (run.out / "summary.json").write_text(json.dumps({**summary, "sampled": sampled}))
        (run, *_) = read_comparison(tmp_path).runs
    assert run.resolution(pooled=True) == 1 / wanted


def test_paths_below_the_current_folder_are_printed_as_a_command_there_takes_them(
    four: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (four / "report.html").touch()
    assert screen(read_comparison(four)).endswith(f"details  fedapp show {four} --all")
    monkeypatch.chdir(four.parent)
    last = [line.split(maxsplit=1) for line in screen(read_comparison(four)).splitlines()[-2:]]
    assert last == [["report", f"{four.name}/report.html"], ["details", f"fedapp show {four.name} --all"]]
