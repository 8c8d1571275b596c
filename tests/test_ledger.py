"""The ledger decides as it says: on made-up runs whose answer is known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedapp import config, registry
from fedapp.errors import BadRequest
from fedapp.experiments import ledger, reproduce
from fedapp.experiments.ledger import CLAIMS, Evidence, Verdict
from fedapp.experiments.studies import STUDIES, RunKey, keys_of, settings_of


def made(out: Path, study: str, variant: str, level: float, noise: float = 0.02, **summary: object) -> None:
    """Write three seeds of a run whose clients score about `level`."""
    for seed in range(3):
        folder = out / RunKey(study, variant, seed).folder
        folder.mkdir(parents=True)
        rng = np.random.default_rng([seed, len(variant)])
        scores = np.clip(level + noise * rng.standard_normal(20), 0, 1)
        columns = {f"{p}_accuracy": scores for p in ("received", "trained")}
        pd.DataFrame({"client": range(20), **columns}).to_csv(folder / "final.csv", index=False)
        rounds = pd.DataFrame({"round": [1, 2, 3], "trained_accuracy": [level - 0.2, level - 0.1, level]})
        rounds.to_csv(folder / "rounds.csv", index=False)
        facts = {"bytes_up": 100, "bytes_down": 200, "accuracy": {"received": {"balanced": level}}}
        (folder / "summary.json").write_text(json.dumps({"ok": True, "seconds": 60.0, **facts, **summary}))


def claim(name: str) -> ledger.Claim:
    return next(c for c in CLAIMS if c.id == name)


@pytest.mark.parametrize(
    ("ours", "theirs", "outcome"), [(0.9, 0.7, "holds"), (0.7, 0.9, "does not hold"), (0.8, 0.8, "not decided")]
)
def test_directed_claims(ours: float, theirs: float, outcome: str, tmp_path: Path) -> None:
    made(tmp_path, ledger.H, "fedclassavg", ours)
    made(tmp_path, ledger.H, "local", theirs, noise=0.03)
    verdict = claim("fca-1").decide(Evidence(tmp_path))
    assert verdict.outcome == outcome
    assert f"{100 * ours:.0f}" in verdict.ours or f"{100 * ours - 1:.0f}" in verdict.ours


@pytest.mark.parametrize(("gap", "outcome"), [(0.0, "holds"), (0.2, "does not hold"), (-0.2, "does not hold")])
def test_claims_of_equality(gap: float, outcome: str, tmp_path: Path) -> None:
    made(tmp_path, ledger.D, "cw-no-wdr", 0.5 + gap)
    made(tmp_path, ledger.D, "fedavg", 0.5)
    assert claim("cw-4").decide(Evidence(tmp_path)).outcome == outcome


def test_an_interval_across_the_margin_decides_nothing(tmp_path: Path) -> None:
    made(tmp_path, ledger.D, "cw-no-wdr", 0.53, noise=0.1)
    made(tmp_path, ledger.D, "fedavg", 0.5, noise=0.1)
    assert claim("cw-4").decide(Evidence(tmp_path)).outcome == "not decided"


def test_one_number_a_seed(tmp_path: Path) -> None:
    made(tmp_path, ledger.C1, "fedavg", 0.5, calibration={"before": 0.4, "after": 0.5, "oracle": 0.55})
    evidence = Evidence(tmp_path)
    assert claim("ccvr-2").decide(evidence).outcome == "holds"
    assert claim("ccvr-6").decide(evidence).outcome == "holds"
    assert claim("ccvr-2").decide(evidence).ours.startswith("40.0 ± 0.0 to 50.0 ± 0.0")


def test_rounds_to_a_target(tmp_path: Path) -> None:
    made(tmp_path, ledger.G, "fedgh", 0.9)
    run = Evidence(tmp_path).runs(ledger.G, "fedgh")[0]
    assert ledger.rounds_to(run, 0.75) == 2 and ledger.rounds_to(run, 0.95) == 4


def test_missing_runs_decide_nothing(tmp_path: Path) -> None:
    for c in CLAIMS:
        verdict = c.decide(Evidence(tmp_path))
        assert verdict.outcome == "not decided" and "missing" in verdict.ours


def test_every_part_must_hold() -> None:
    yes, no, open_ = (Verdict(o, o) for o in ("holds", "does not hold", "not decided"))
    assert ledger.every(yes, yes).outcome == "holds"
    assert ledger.every(yes, open_).outcome == "not decided"
    assert ledger.every(yes, open_, no).outcome == "does not hold"


def test_the_ledger_names_runs_that_exist() -> None:
    assert len(CLAIMS) >= 25 and len({c.id for c in CLAIMS}) == len(CLAIMS)
    for c in CLAIMS:
        assert c.runs and all(v in STUDIES[s].variants for s, v in c.runs)


def test_every_study_is_a_valid_configuration() -> None:
    for study in STUDIES.values():
        for key in keys_of([(study.id, v) for v in study.variants]):
            settings = config.from_flat(settings_of(key))
            assert registry.get(settings.method) and study.scaled


def test_the_document_keeps_its_chapters(tmp_path: Path) -> None:
    made(tmp_path, ledger.H, "fedclassavg", 0.9, bytes_up=20_520)
    doc = tmp_path / "r.md"
    doc.write_text(f"# R\n\nbefore\n\n{reproduce.START}\nold\n{reproduce.END}\n\nafter\n")
    verdicts = [(c, c.decide(Evidence(tmp_path))) for c in CLAIMS]
    reproduce.write(doc, verdicts, Evidence(tmp_path))
    text = doc.read_text()
    assert "before" in text and "after" in text and "\nold\n" not in text
    rows = [line for line in text.splitlines() if line.startswith("| **")]
    assert len(rows) == len(CLAIMS)
    assert all(r.rstrip(" |").endswith(("holds", "does not hold", "not decided")) for r in rows)
    with pytest.raises(BadRequest, match="markers"):
        (tmp_path / "x.md").write_text("nothing")
        reproduce.write(tmp_path / "x.md", verdicts, Evidence(tmp_path))


def test_unknown_claims_and_studies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="unknown claim"):
        reproduce.chosen(["nope"])
    with pytest.raises(BadRequest, match="unknown study"):
        reproduce.reproduce(tmp_path, "", studies=["nope"])


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("nothing")
    monkeypatch.setattr(reproduce, "prepared", lambda key, out, data_dir: config.from_flat({}))
    monkeypatch.setattr(reproduce, "pending_config", lambda pending: pending)
    monkeypatch.setattr(reproduce, "run_all", lambda *args: pytest.fail("runs were begun"))
    with pytest.raises(BadRequest, match="file/out cannot be written"):
        reproduce.reproduce(tmp_path / "file" / "out", "", studies=[ledger.H])
    with pytest.raises(BadRequest, match="markers"):
        reproduce.reproduce(tmp_path / "out", "", studies=[ledger.H], doc=tmp_path / "file")
    (tmp_path / "turned.md").write_text(f"{reproduce.END} {reproduce.START}")
    with pytest.raises(BadRequest, match="markers"):
        reproduce.reproduce(tmp_path / "out", "", studies=[ledger.H], doc=tmp_path / "turned.md")
    with pytest.raises(BadRequest, match="cannot be read and written as text"):
        reproduce.reproduce(tmp_path / "out", "", studies=[ledger.H], doc=tmp_path)
    (tmp_path / "picture").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadRequest, match="cannot be read and written as text"):
        reproduce.reproduce(tmp_path / "out", "", studies=[ledger.H], doc=tmp_path / "picture")
    with pytest.raises(BadRequest, match="file/x cannot be written"):
        reproduce.reproduce(tmp_path / "out", "", studies=[ledger.H], doc=tmp_path / "file" / "x" / "doc.md")


def test_a_studys_table_counts_rounds_and_bytes_to_the_target(tmp_path: Path) -> None:
    made(tmp_path, ledger.H, "local", 0.6)
    made(tmp_path, ledger.H, "fedclassavg", 0.7)
    made(tmp_path, ledger.H, "ktpfl", 0.6, public_bytes=1_000_000)
    made(tmp_path, ledger.H, "fedproto", 0.5)
    rows = reproduce.study_table(STUDIES[ledger.H], Evidence(tmp_path))
    cells = {r.split("|")[1].strip(): [c.strip() for c in r.split("|")[2:-1]] for r in rows if r.startswith("| ")}
    assert "rounds to 59.0 %" in " ".join(rows)
    assert cells["fedclassavg"][4:6] == ["2.0", "0.0006"] and cells["fedclassavg"][6] == "76.7 ± 5.3"
    assert cells["ktpfl"][5] == "1" and cells["fedproto"][4:6] == ["not by all", "-"]
    assert "fml" not in cells


def test_pages_of_methods_get_their_studies(tmp_path: Path) -> None:
    made(tmp_path / "runs", ledger.H, "local", 0.6)
    page = tmp_path / "fedclassavg.md"
    page.write_text("# F\n\nabove\n<!-- measured -->\nstale table\n<!-- /measured -->\nbelow\n")
    reproduce.write_pages(tmp_path, Evidence(tmp_path / "runs"))
    text = page.read_text()
    assert "above" in text and "below" in text and "stale" not in text
    assert "| local |" in text and "Scaled down: 10 % of the images" in text
    reproduce.write_pages(tmp_path, Evidence(tmp_path / "runs"))
    assert page.read_text() == text
