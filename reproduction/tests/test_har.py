"""The tables of docs/har.md: from the kept runs, and from runs on a small file with the columns of har.npz."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks.pages import replaced
from fedapp import registry
from fedapp.experiments import recipes
from fedapp.results.intervals import differences_of
from fedapp.results.runs import RunResult
from reproduction.studies import har

PERSONS, RECORDINGS, WINDOWS = 3, 6, 5


def recordings(path: Path) -> Path:
    """Write windows of two activities with person, recording and split, as har.npz has them."""
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(PERSONS * 2 * RECORDINGS), WINDOWS)
    y, client, number = group % 2, group // 2 % PERSONS, group // (2 * PERSONS)
    x = rng.standard_normal((len(group), 9, 32)) + y[:, None, None]
    split = np.where(number == 0, "test", "train")
    np.savez(path, x=x.astype("float32"), y=y, client=client, group=group, split=split)
    return path


@pytest.mark.full
@pytest.mark.usefixtures("in_turn", "no_page")
def test_one_command_runs_both_comparisons_and_makes_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(har, "SEEDS", 2)
    short = {"num-server-rounds": 2, "local-epochs": 1}
    parts = {name: ("local,fedavg", {**changed, **short}) for name, (_, changed) in har.PARTS.items()}
    monkeypatch.setattr(har, "PARTS", parts)
    page = tmp_path / "har.md"
    page.write_text("".join(f"<!-- table:{n} -->\n<!-- /table:{n} -->\nafter\n" for n in ("levels", "all-methods")))
    data, out = recordings(tmp_path / "har.npz"), tmp_path / "runs"
    kept = tmp_path / "kept.jsonl"
    assert har.main(data, out, 1, page, kept) == 0
    capsys.readouterr()
    text = page.read_text()
    fedavg = [line.split(" | ") for line in text.splitlines() if line.startswith("| FedAvg |")]
    assert len(fedavg) == 2 and text.endswith("after\n")
    runs = [RunResult(out / "levels" / "runs" / f"fedavg-s{seed}") for seed in (0, 1)]
    means = [100 * r.final["trained_accuracy"].mean() for r in runs]
    lowest = [100 * r.final["trained_accuracy"].min() for r in runs]
    std = np.std(means, ddof=1), np.std(lowest, ddof=1)
    assert fedavg[0][5].startswith(f"{np.mean(means):.1f} ± {std[0]:.1f} / {np.mean(lowest):.1f} ± {std[1]:.1f}")
    ends = [100 * pd.read_csv(r.out / "rounds.csv")["trained_accuracy"].iloc[-1] for r in runs]
    assert fedavg[0][3].startswith(f"{np.mean(ends):.1f} ± ")

    runs, alone = ([RunResult(out / "methods" / "runs" / f"{m}-s{s}") for s in (0, 1)] for m in ("fedavg", "local"))
    received = [100 * r.final["received_accuracy"].mean() for r in runs]
    assert fedavg[1][1].startswith(f"{np.mean(received):.1f} ± ")
    gain = np.mean([r.summary["headline"]["value"] - a.summary["headline"]["value"] for r, a in zip(runs, alone)])
    assert fedavg[1][3] == "received" and fedavg[1][4].startswith(f"{100 * gain:+.1f} (")

    assert har.main(None, out, None, page, kept) == 0 and page.read_text() == text, (
        "without data: the same tables of the runs that are there"
    )


def test_the_page_holds_the_tables_of_the_kept_runs() -> None:
    text = (har.DOCS / "har.md").read_text(encoding="utf-8")
    tables = har.tables(har.load(har.DOCS / "har.jsonl"))
    assert {name: len(lines) for name, lines in tables.items()} == {"levels": 2 + 4, "all-methods": 2 + 21 + 2}
    for name, lines in tables.items():
        assert replaced(text, name, lines) == text, "run: python -m reproduction study har --doc docs/har.md"


def test_every_method_has_a_row_in_the_recipe() -> None:
    assert set(recipes.shipped()["har"].rows) == set(registry.discover())
    assert all(title == registry.get(name).title for name, title in recipes.shipped()["har"].rows.items())


def test_one_interval_holds_for_all_rows_and_another_seed_shows_harm_by_chance() -> None:
    """Four persons of 100 rows; seeds of Standalone differ by 10 or 20 rows of two persons."""

    def kept(method: str, seed: int, *right: int) -> har.Kept:
        return har.Kept(method=method, seed=seed, total=(100,) * 4, received=right, trained=right)

    alone = [(50, 70, 60, 60), (70, 50, 60, 60), (60, 50, 60, 60)]
    shifts = {"fedgh": (9, 10, 11), "lgfedavg": (-20, -25, -30), "fedper": (0, 5, -6)}
    runs = [kept("local", seed, *right) for seed, right in enumerate(alone)]
    runs += [kept(m, s, *(c + by for c in alone[s])) for m, shift in shifts.items() for s, by in enumerate(shift)]
    lines = har.methods_table(runs)
    rows = {line.split(" | ")[0].removeprefix("| "): line.rstrip(" |").split(" | ") for line in lines[2:6]}
    wanted = differences_of({m: [s / 100 for s in shift] for m, shift in shifts.items()}, 1 / 400)["fedgh"]
    shown = f"+10.0 ({100 * wanted.low:+.1f} to {100 * wanted.high:+.1f})"
    assert rows["FedGH"][4:] == [shown, "4 / 0 / 0"]
    assert rows["Standalone"][4:] == ["–", "1 / 2.3 / 0.7"]
    assert lines[-1] == (
        "Against training alone, with a margin of 1.0 points. Better: FedGH. Worse: LG-FedAvg. Equal: none. The others "
        "are open."
    )
