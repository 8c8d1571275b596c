"""The ledger decides as it says: on made-up runs whose answer is known."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedapp import config, registry
from fedapp.engines import pool
from fedapp.engines.pool import FinishedRun
from fedapp.errors import BadRequest
from fedapp.results.intervals import differences_of
from fedapp.tasks import simulated
from fedapp.tasks.public import public_source
from reproduction import check_intervals
from reproduction.ledger import archive, reproduce
from reproduction.ledger import claims as ledger
from reproduction.ledger import studies as study_module
from reproduction.ledger.claims import Evidence, Pair, Verdict, claims
from reproduction.ledger.studies import RunKey, keys_of, settings_of, studies

H, D, D1, G, C1 = "hetero-cifar10", "cw-dirichlet", "cw-dirichlet-1", "fedgh-cifar10", "ccvr-0.1"


def made(out: Path, study: str, variant: str, level: float, noise: float = 0.02, **summary: object) -> None:
    """Write all seeds of a run whose clients score about `level`."""
    for key in keys_of([(study, variant)]):
        folder, seed = out / key.folder, key.seed
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text("final-training = true\n")
        rng = np.random.default_rng([seed, len(variant)])
        scores = np.clip(level + noise * rng.standard_normal(20), 0, 1)
        columns = {f"{p}_accuracy": scores for p in ("received", "trained")}
        columns |= {f"{p}_total": np.full(20, 50) for p in ("received", "trained")}
        pd.DataFrame({"client": range(20), **columns}).to_csv(folder / "final.csv", index=False)
        rounds = pd.DataFrame(
            {"round": [1, 2, 3], "clients": 20, "trained_accuracy": [level - 0.2, level - 0.1, level]}
        )
        rounds.to_csv(folder / "rounds.csv", index=False)
        facts = {"bytes_up": 100, "bytes_down": 200, "accuracy": {"received": {"balanced": level}}}
        (folder / "summary.json").write_text(json.dumps({"ok": True, "seconds": 60.0, **facts, **summary}))


@pytest.mark.parametrize(
    ("ours", "theirs", "outcome"), [(0.9, 0.7, "holds"), (0.7, 0.9, "does not hold"), (0.8, 0.8, "not decided")]
)
def test_directed_claims(ours: float, theirs: float, outcome: str, tmp_path: Path) -> None:
    made(tmp_path, H, "fedclassavg", ours, noise=0.1)
    made(tmp_path, H, "local", theirs, noise=0.03)
    verdict = claims()["fca-1"].decide(Evidence(tmp_path))
    assert verdict.outcome == outcome
    assert abs(100 * ours - float(verdict.ours.split()[0])) < 2


@pytest.mark.parametrize(("spread", "outcome"), [(0.002, "does not hold"), (0.02, "not decided")])
def test_a_difference_that_is_shown_to_be_negligible_decides_against_a_directed_claim(
    spread: float, outcome: str
) -> None:
    differences = spread * np.array([-1.0, 1.05, 0.0])
    found = ledger.over_seeds(differences, 0.0001, "ours")
    assert found.outcome == outcome and ("equal within one point" in found.ours) == (outcome == "does not hold")
    assert ledger.over_seeds(differences, 0.0001, "ours", negligible=0.0).outcome == "not decided", "counts have none"


def test_the_interval_is_that_of_the_t_test_and_has_a_stricter_level_after_a_look() -> None:
    differences = np.array([0.031, 0.004, 0.022, 0.011, 0.035])
    for level in (0.05, 0.022):
        found = ledger.over_seeds(differences, 1e-6, "ours", level)
        low, high = (100 * end for end in stats.ttest_1samp(differences, 0).confidence_interval(1 - level))
        assert found.ours == f"ours, difference +2.1 ({low:+.1f} to {high:+.1f})"
        assert found.p == pytest.approx(stats.ttest_1samp(differences, 0).pvalue * 0.05 / level)
        assert (found.outcome == "holds") == (low > 0) == (found.p < 0.05)
    assert [Evidence(None).level(n) for n in (3, 5, 10)] == [0.05, 0.022, 0.022]


def test_decisions_survive_the_correction_over_all_directed_claims_or_do_not() -> None:
    verdicts = [Verdict("holds", "", p) for p in (0.001, 0.02, math.nan)] + [Verdict("not decided", "", 0.3)]
    assert ledger.surviving(verdicts) == ["yes", "yes", "–", "–"]
    assert ledger.surviving([*verdicts, Verdict("holds", "", 0.03)]) == ["yes", "no", "–", "–", "no"]


def test_one_model_scored_by_all_clients_is_one_number_a_seed(tmp_path: Path) -> None:
    """Twenty clients with one difference are no twenty differences."""
    made(tmp_path, H, "fedclassavg", 0.8, noise=0.0)
    made(tmp_path, H, "local", 0.8, noise=0.0)
    for seed, level in enumerate((0.85, 0.79, 0.81, 0.8, 0.84, 0.78, 0.8, 0.86, 0.79, 0.8)):
        path = tmp_path / RunKey(H, "fedclassavg", seed).folder / "final.csv"
        pd.read_csv(path).assign(trained_accuracy=level).to_csv(path, index=False)
    assert claims()["fca-1"].decide(Evidence(tmp_path)).outcome == "not decided"


UNEVEN = ("ccvr-5", "ccvr-6", "ccvr-7")
"""Claims whose heads took different numbers of steps."""


@pytest.mark.full
def test_exactly_the_outcomes_change_that_a_t_interval_over_seeds_changes(tmp_path: Path) -> None:
    """Without the stricter level after a look these differ from version 0.2."""
    kept = archive.read(study_module.FOLDER / "runs").runs
    one_look, all_looks = Evidence(None, kept, after_a_look=0.05), Evidence(None, kept)
    now = {name: (c.decide(one_look).outcome, c.decide(all_looks).outcome) for name, c in claims().items()}
    assert {n for n, c in claims().items() if c.before is not None} == {
        "fca-1", "fca-4", "fca-8", "fca-9", "fca-11", "cw-4", "cw-5", "cw-9", "cw-10", "gh-1", "gh-3", "gh-4", "gh-6",
        "gh-8", *UNEVEN,
    }  # fmt: skip
    assert all(all_looks != c.before for c in claims().values() for all_looks in [now[c.id][1]])
    lost = {n for n, c in claims().items() if c.before not in (None, now[n][0])}
    assert lost == {"fca-1", "fca-4", "fca-8", "fca-9", "cw-4", "cw-5", "cw-9", "gh-1", "gh-3", "gh-6", *UNEVEN}
    assert now["gh-7"] == ("does not hold", "not decided"), "it was open, and is so after the looks"


@pytest.mark.full
@pytest.mark.parametrize(
    ("claim", "which", "wanted"),
    [
        ("fca-1", "equal", 0.91), ("gh-8", "equal", 0.96), ("gh-7", "equal", 0.95), ("fca-6", "equal", 0.76),
        ("fca-13", "equal", 0.23), ("fca-13", "worse", 0.77), ("gh-1", "worse", 0.81), ("cw-9", "better", 0.85),
        ("fca-4", "better", 0.86),
    ],
)  # fmt: skip
def test_posterior_probabilities_of_the_ledger(claim: str, which: str, wanted: float) -> None:
    evidence = Evidence(None, archive.read(study_module.FOLDER / "runs").runs)
    (rule,) = claims()[claim].tests
    assert isinstance(rule, ledger.BetterOverClients)
    first, second = evidence.seeds(rule.runs(), [ledger.MEASURES[rule.protocol]] * 2)
    differences = first - second
    found = differences_of({"": differences}, 1e-6)[""].probabilities(0.01)
    assert found[("worse", "equal", "better").index(which)] == pytest.approx(wanted, abs=0.011)


def test_a_script_without_fedapp_recomputes_every_interval_of_the_page() -> None:
    script = (study_module.FOLDER.parent / "check_intervals.py").read_text()
    assert "fedapp" not in "".join(line for line in script.splitlines() if "import" in line)
    assert check_intervals.main() == (0, 41)


def test_variants_are_compared_over_the_seeds_that_both_have(tmp_path: Path) -> None:
    """Standalone has ten seeds and KT-pFL three; the seven further ones would turn the claim round."""
    made(tmp_path, H, "ktpfl", 0.5, noise=0.0)
    made(tmp_path, H, "local", 0.6, noise=0.0)
    for seed in range(3, 10):
        path = tmp_path / RunKey(H, "local", seed).folder / "final.csv"
        pd.read_csv(path).assign(trained_accuracy=0.0).to_csv(path, index=False)
    evidence = Evidence(tmp_path)
    assert [len(evidence.runs(Pair(H, v))) for v in ("local", "ktpfl")] == [10, 3]
    verdict = claims()["fca-4"].decide(evidence)
    assert verdict.outcome == "holds"
    assert verdict.ours.startswith("60.0 ± 0.0 against 50.0 ± 0.0 (trained), difference +10.0 (")
    x, y = evidence.seeds([Pair(H, "local"), Pair(H, "ktpfl")], [ledger.MEASURES["trained"]] * 2)
    assert x.tolist() == pytest.approx([0.6] * 3) and y.tolist() == pytest.approx([0.5] * 3)


@pytest.mark.parametrize(("gap", "outcome"), [(0.0, "holds"), (0.2, "does not hold"), (-0.2, "does not hold")])
def test_claims_of_equality(gap: float, outcome: str, tmp_path: Path) -> None:
    made(tmp_path, D, "cw-no-wdr", 0.5 + gap)
    made(tmp_path, D, "fedavg", 0.5)
    assert claims()["cw-4"].decide(Evidence(tmp_path)).outcome == outcome


def test_an_interval_across_the_margin_decides_nothing(tmp_path: Path) -> None:
    made(tmp_path, D, "cw-no-wdr", 0.53, noise=0.1)
    made(tmp_path, D, "fedavg", 0.5, noise=0.1)
    assert claims()["cw-4"].decide(Evidence(tmp_path)).outcome == "not decided"


def test_one_number_a_seed(tmp_path: Path) -> None:
    made(tmp_path, C1, "fedavg", 0.5, calibration={"before": 0.4, "after": 0.5, "oracle": 0.55})
    evidence = Evidence(tmp_path)
    assert claims()["ccvr-2"].decide(evidence).outcome == "holds"
    uneven = claims()["ccvr-6"]
    assert uneven.decide(evidence).outcome == "not decided" and "471 steps" in uneven.decide(evidence).ours
    assert uneven.model_copy(update={"uneven": ""}).decide(evidence).outcome == "holds"
    assert claims()["ccvr-2"].decide(evidence).ours.startswith("40.0 ± 0.0 to 50.0 ± 0.0")


def test_rounds_to_a_target(tmp_path: Path) -> None:
    made(tmp_path, G, "fedgh", 0.9, noise=0.0)
    run = Evidence(tmp_path).runs(Pair(G, "fedgh"))[0]
    assert ledger.rounds_to(run, 0.75) == 1 and ledger.rounds_to(run, 0.95) == 4
    made(tmp_path, G, "lgfedavg", 0.8, noise=0.0)
    verdict = claims()["gh-4"].decide(Evidence(tmp_path))
    assert verdict == Verdict(
        "holds", "1.0 ± 0.0 against 2.0 ± 0.0 rounds to 79.0 %, difference +1.0 (+0.7 to +1.3)", verdict.p
    )


def test_spread_over_clients(tmp_path: Path) -> None:
    made(tmp_path, H, "fedclassavg", 0.5, noise=0.02)
    made(tmp_path, H, "local", 0.5, noise=0.1)
    verdict = claims()["fca-11"].decide(Evidence(tmp_path))
    stds = [Evidence(tmp_path).runs(Pair(H, "local"))[s].final["trained_accuracy"].std(ddof=0) for s in range(10)]
    assert verdict.outcome == "holds" and f"against {100 * np.mean(stds):.1f} ± " in verdict.ours


def test_a_gain_is_compared_with_another_gain(tmp_path: Path) -> None:
    """FedAvg is 0.1 lower at alpha 1.0 and 0.3 lower at alpha 0.1: the gain shrinks."""
    for study, gap in ((D, 0.3), (D1, 0.1)):
        made(tmp_path, study, "cwfedavg", 0.6, noise=0.0)
        made(tmp_path, study, "fedavg", 0.6 - gap, noise=0.0)
    verdict = claims()["cw-7"].decide(Evidence(tmp_path))
    assert verdict.ours.startswith("gain +30.0 ± 0.0 at alpha 0.1, +10.0 ± 0.0 at alpha 1.0 (received)")
    assert verdict.outcome == "holds"


@pytest.mark.parametrize(("ours", "theirs"), [(4_104, 20_520), (20_520, 20_520), (20_520, 4_104)])
def test_bytes_are_counted(ours: int, theirs: int, tmp_path: Path) -> None:
    made(tmp_path, G, "fedgh", 0.5, bytes_up=ours)
    made(tmp_path, G, "lgfedavg", 0.5, bytes_up=theirs)
    verdict = claims()["gh-5"].decide(Evidence(tmp_path))
    assert verdict.outcome == ("holds" if ours < theirs else "does not hold")
    assert verdict.ours == f"{ours:,} B against {theirs:,} B up per client and round"
    made(tmp_path, "cw-pathological", "cwfedavg", 0.5, bytes_up=ours, bytes_down=1)
    made(tmp_path, "cw-pathological", "fedavg", 0.5, bytes_up=theirs, bytes_down=1)
    verdict = claims()["cw-8"].decide(Evidence(tmp_path))
    assert verdict.outcome == ("holds" if ours == theirs else "does not hold")
    assert verdict.ours == f"{ours + 1:,} B against {theirs + 1:,} B per client and round"


@pytest.mark.parametrize(("sent", "outcome"), [(20_520, "holds"), (25_000, "does not hold")])
def test_a_head_is_2000_times_less_than_resnet18(sent: int, outcome: str, tmp_path: Path) -> None:
    made(tmp_path, H, "fedclassavg", 0.5, bytes_up=sent)
    verdict = claims()["fca-12"].decide(Evidence(tmp_path))
    assert verdict.outcome == outcome
    assert verdict.ours == f"{sent:,} B against 45,815,752 B for ResNet-18: {45_815_752 / sent:,.0f} times"


def test_missing_runs_decide_nothing(tmp_path: Path) -> None:
    for c in claims().values():
        verdict = c.decide(Evidence(tmp_path))
        assert verdict.outcome == "not decided" and "missing" in verdict.ours


def test_every_part_must_hold() -> None:
    yes, no, open_ = (Verdict(o, o) for o in ("holds", "does not hold", "not decided"))
    assert ledger.every(yes, yes).outcome == "holds"
    assert ledger.every(yes, open_).outcome == "not decided"
    assert ledger.every(yes, open_, no).outcome == "does not hold"


def test_the_claims_are_pinned() -> None:
    counts = {paper: sum(name.split("-")[0] == paper for name in claims()) for paper in ("fca", "cw", "gh", "ccvr")}
    assert counts == {"fca": 13, "cw": 11, "gh": 8, "ccvr": 10} and len(claims()) == 42
    rules = [test.rule for c in claims().values() for test in c.tests]
    assert {rule: rules.count(rule) for rule in rules} == {
        "better over clients": 23, "equal over clients": 3, "larger over seeds": 14, "fewer rounds": 1,
        "fewer bytes up": 1, "same bytes": 1, "times fewer bytes": 1,
    }  # fmt: skip
    assert len({pair for c in claims().values() for pair in c.runs}) == 48
    claim = claims()["ccvr-10"]
    assert claim.text == "Calibration after training gains more than a normalised head during it (Table 1)"
    assert claim.paper == "+4.1 against +0.4" and claim.runs == ((C1, "fedavg"), (C1, "clsnorm"))


def test_the_studies_are_pinned() -> None:
    assert {s.id: len(s.variants) for s in studies().values()} == {
        "hetero-cifar10": 14, "hetero-cifar10-skewed": 3, "hetero-fashion": 5, "homo-cifar10": 4, "fedgh-cifar10": 10,
        "fedgh-cifar10-6": 3, "cw-pathological": 12, "cw-dirichlet": 13, "cw-dirichlet-1": 2, "cw-mnist": 12,
        "ccvr-0.5": 1, "ccvr-0.1": 7, "ccvr-0.05": 1,
    }  # fmt: skip
    assert settings_of(RunKey("homo-cifar10", "weight", 2), {"data-dir": "/d"}) == {
        "clients": 20, "partition": "dirichlet", "alpha": 0.5, "model": "cnn-a", "data-fraction": 0.1,
        "num-server-rounds": 12, "local-epochs": 1, "batch-size": 32, "protocols": "received,trained",
        "min-samples": 20, "dataset": "cifar10", "data-dir": "/d", "method": "fedclassavg",
        "method-args": "share=all", "seed": 2,
    }  # fmt: skip
    assert settings_of(RunKey(H, "local-weak", 0))["augment"] == "weak"
    assert settings_of(RunKey("cw-mnist", "moon", 0))["num-server-rounds"] == 6
    assert "6 rounds instead of 1000" in studies()["cw-mnist"].scaled
    assert "10 rounds instead of 1000" in studies()["cw-dirichlet"].scaled


def test_every_study_is_a_valid_configuration() -> None:
    for study in studies().values():
        for key in keys_of((study.id, variant) for variant in study.variants):
            settings = config.from_flat(settings_of(key))
            assert registry.get(settings.federation.method) and study.scaled


def private(pair: Pair, seed: int = 0) -> tuple[str, float]:
    """What of the training images a run of the ledger holds back from its clients."""
    settings = config.from_flat(settings_of(RunKey(*pair, seed)))
    source = public_source(settings)
    return settings.data.dataset, source.share if source else 0.0


@pytest.mark.parametrize("study", studies())
def test_all_rows_of_a_study_train_on_the_same_images(study: str) -> None:
    variants = studies()[study].variants
    shares = {private(Pair(study, variant)) for variant in variants}
    assert len(shares) == 1
    assert (next(iter(shares))[1] > 0) == any(v.method == "ktpfl" for v in variants.values())


@pytest.mark.parametrize("claim", claims())
def test_no_claim_compares_clients_that_have_different_shares_of_their_images(claim: str) -> None:
    assert len({private(pair)[1] for pair in claims()[claim].runs}) == 1


def test_standalone_and_ktpfl_hold_the_very_same_images() -> None:
    splits = {}
    for variant in ("local", "ktpfl", "fedclassavg"):
        settings = settings_of(RunKey(H, variant, 1))
        settings |= {"dataset": "digits", "data-fraction": 1.0, "model": "digits-a", "clients": 5}
        splits[variant] = simulated.federated(config.from_flat(settings), 5).partition.clients
    for variant, clients in splits.items():
        for ours, theirs in zip(clients, splits["ktpfl"], strict=True):
            assert np.array_equal(ours.train, theirs.train) and np.array_equal(ours.test, theirs.test), variant


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("claims", "fedavg before", "fedavg befor", r"smaller.0: .*'ccvr-0.5/fedavg befor'"),
        ("claims", "fedgh-cifar10/lgfedavg", "fedgh-cifar10/nothing", "fedgh-cifar10/nothing.* is no study/variant"),
        ("claims", '"better over clients"', '"better"', "'better' .* does not match any of the expected tags"),
        ("claims", "margin = 0.03", "margin = 0.0", "margin: must be greater than 0"),
        ("claims", "margin = 0.03", "margins = 0.03", "margins: Extra inputs are not permitted"),
        ("claims", 'id = "fca-2"', 'id = "fca-1"', "two claims are called fca-1"),
        ("studies", 'like = "cw"', 'like = "cww"', "study cw-pathological is like 'cww', did you mean 'cw'"),
        ("studies", "method =", "methode =", "methode: Extra inputs are not permitted"),
        (
            "studies",
            '{ method = "fml" }',
            '{ method = "fml", settings = { public-data = "0.1" } }',
            "public-data of hetero-cifar10/fml concerns all variants",
        ),
    ],
)
def test_a_wrong_file_is_refused_and_the_place_is_named(
    name: str, old: str, new: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = studies()
    text = (study_module.FOLDER / f"{name}.toml").read_text()
    assert old in text
    (tmp_path / f"{name}.toml").write_text(text.replace(old, new))
    monkeypatch.setattr(ledger if name == "claims" else study_module, "FOLDER", tmp_path)
    monkeypatch.setattr(ledger, "studies", lambda: known)
    with pytest.raises(BadRequest, match=message):
        (claims if name == "claims" else studies).__wrapped__()


def test_the_document_keeps_its_chapters(tmp_path: Path) -> None:
    made(tmp_path, H, "fedclassavg", 0.9, bytes_up=20_520)
    doc = tmp_path / "r.md"
    doc.write_text(f"# R\n\nbefore\n\n{reproduce.START}\nold\n{reproduce.END}\n\nafter\n")
    verdicts = [(c, c.decide(Evidence(tmp_path))) for c in claims().values()]
    reproduce.write(doc, verdicts, Evidence(tmp_path))
    text = doc.read_text()
    assert "before" in text and "after" in text and "\nold\n" not in text
    rows = [line for line in text.splitlines() if line.startswith("| **")]
    assert len(rows) == len(claims())
    assert all(r.rstrip(" |").endswith(("| yes", "| no", "| –")) for r in rows)
    with pytest.raises(BadRequest, match="markers"):
        (tmp_path / "x.md").write_text("nothing")
        reproduce.write(tmp_path / "x.md", verdicts, Evidence(tmp_path))


def test_unknown_claims_and_studies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="unknown claim"):
        reproduce.chosen(["nope"])
    with pytest.raises(BadRequest, match="unknown study"):
        reproduce.reproduce(tmp_path, "", study_names=["nope"])


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("nothing")
    monkeypatch.setattr(reproduce, "prepared", lambda key, out, data_dir: config.from_flat({}))
    monkeypatch.setattr(reproduce, "pending_config", lambda pending: pending)
    monkeypatch.setattr(pool, "run_all", lambda *args: pytest.fail("runs were begun"))
    with pytest.raises(BadRequest, match="file/out cannot be written"):
        reproduce.reproduce(tmp_path / "file" / "out", "", study_names=[H])
    with pytest.raises(BadRequest, match="markers"):
        reproduce.reproduce(tmp_path / "out", "", study_names=[H], doc=tmp_path / "file")
    (tmp_path / "turned.md").write_text(f"{reproduce.END} {reproduce.START}")
    with pytest.raises(BadRequest, match="markers"):
        reproduce.reproduce(tmp_path / "out", "", study_names=[H], doc=tmp_path / "turned.md")
    with pytest.raises(BadRequest, match="cannot be read and written as text"):
        reproduce.reproduce(tmp_path / "out", "", study_names=[H], doc=tmp_path)
    (tmp_path / "picture").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadRequest, match="cannot be read and written as text"):
        reproduce.reproduce(tmp_path / "out", "", study_names=[H], doc=tmp_path / "picture")
    with pytest.raises(BadRequest, match="file/x cannot be written"):
        reproduce.reproduce(tmp_path / "out", "", study_names=[H], doc=tmp_path / "file" / "x" / "doc.md")


def test_runs_are_wanted_once_and_seed_by_seed() -> None:
    selected = reproduce.chosen(["gh-1", "fca-1", "fca-2"])
    keys = reproduce.wanted(selected, ["hetero-cifar10-skewed"])
    wanted = [seed for seed in range(10) for _ in range(7 if seed < 3 else 4)]
    assert [key.seed for key in keys] == wanted
    first = [(key.study, key.variant) for key in keys[:7]]
    assert [study for study, _ in first] == [H] * 2 + ["hetero-cifar10-skewed"] * 3 + [G] * 2
    assert len(set(first)) == 7
    assert reproduce.chosen(["none"]) == [] and len(reproduce.chosen([])) == 42


@pytest.mark.parametrize(("error", "code"), [("memory ran out", 1), (None, 0)])
def test_only_missing_runs_are_run_and_a_failure_is_the_exit_code(
    error: str | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[Path] = []

    def prepared(key: RunKey, out: Path, data_dir: str) -> config.RunConfig:
        return config.from_flat({"out": str(out / key.folder)})

    def run_all(
        todo: list[config.RunConfig], workers: int, on_end: Callable[[FinishedRun], None], *rest: object
    ) -> list[FinishedRun]:
        begun.extend(Path(c.storage.out) for c in todo)
        ended = [FinishedRun(out, error) for out in begun]
        for run in ended:
            on_end(run)
        return ended

    monkeypatch.setattr(reproduce, "prepared", prepared)
    monkeypatch.setattr(reproduce, "pending_config", lambda c: None if c.storage.out.endswith("-s0") else c)
    monkeypatch.setattr(pool, "run_all", run_all)
    assert reproduce.reproduce(tmp_path, "", ["fca-12"]) == code
    assert begun == [tmp_path / H / f"fedclassavg-s{seed}" for seed in range(1, 10)]
    told = capsys.readouterr()
    assert "1 of 10 runs are there already" in told.err
    assert f"{H}/fedclassavg-s1{': done' if error is None else f' failed: {error}'}" in told.err
    assert "fca-12: A head is" in told.out and "fca-11" not in told.out


def test_a_studys_table_counts_rounds_and_bytes_to_the_target(tmp_path: Path) -> None:
    made(tmp_path, H, "local", 0.6, noise=0.0)
    made(tmp_path, H, "fedclassavg", 0.7)
    made(tmp_path, H, "ktpfl", 0.6, public_bytes=1_000_000)
    made(tmp_path, H, "fedproto", 0.5)
    rows = reproduce.study_table(studies()[H], Evidence(tmp_path))
    cells = {r.split("|")[1].strip(): [c.strip() for c in r.split("|")[2:-1]] for r in rows if r.startswith("| ")}
    assert "rounds to 59.0 %" in " ".join(rows)
    assert cells["fedclassavg"][5:] == ["1.0", "0.0003", "76.7 ± 5.3"]
    assert {name: row[0] for name, row in cells.items()} == {
        "variant": "seeds", "local": "10", "fedclassavg": "10", "ktpfl": "3", "fedproto": "10"
    }  # fmt: skip
    worst = [Evidence(tmp_path).runs(Pair(H, "ktpfl"))[s].final["received_accuracy"].min() for s in range(3)]
    assert cells["ktpfl"][4] == f"{100 * np.mean(worst):.1f} ± {100 * np.std(worst, ddof=1):.1f}"
    assert cells["ktpfl"][6] == "0.0006", "the public images are not traffic of a round"
    assert cells["fedproto"][5:7] == ["not by all", "-"]
    assert "fml" not in cells


def test_numbers_of_the_paper_and_ours_stand_in_one_order() -> None:
    """Ours begin with the variant that the claim has ahead. So must the paper's."""
    for c in claims().values():
        pair = re.match(r"([\d.]+) against ([\d.]+)$", c.paper)
        if pair and all(t.rule == "better over clients" for t in c.tests):
            assert float(pair[1]) > float(pair[2]), c.id
