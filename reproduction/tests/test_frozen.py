"""docs/frozen.md: the page as the kept scores make it, and what the study measures beside each run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge

from fedapp.results.runs import read_run
from reproduction.studies import frozen, frozen_gradient
from reproduction.studies.frozen import SETTINGS, Scores, Setting
from tests.test_given_features import features


def test_the_page_holds_the_tables_of_the_kept_scores() -> None:
    text = (frozen.DOCS / "frozen.md").read_text(encoding="utf-8")
    kept = frozen.load(frozen.DOCS / "frozen.jsonl")
    assert frozen.page(text, kept) == text, "run: python -m reproduction study frozen"
    for setting in {setting for setting, _, _ in kept} & {*frozen.PLAIN, *frozen.ROUNDS}:
        assert f"### {SETTINGS[setting].title}\n" in text
    apart = [scores["apart"] for scores in kept.values() if "apart" in scores]
    assert apart and not any(apart), "a head from sums predicts each test row as the central head of its kind"


def test_the_central_heads_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1, 2], [50, 50, 50])
    x = rng.normal(size=(3, 8))[y] + rng.normal(size=(150, 8))
    h, labels = np.column_stack([x, np.ones(150)]), np.eye(3)[y]
    a, b = h.T @ h, labels.T @ h
    new = rng.normal(size=(40, 8))
    theirs = Ridge(alpha=2.0, fit_intercept=False).fit(h, labels)
    assert np.allclose(frozen.ridge(a, b, 2.0), theirs.coef_)
    lda = LinearDiscriminantAnalysis(solver="lsqr", priors=[1 / 3] * 3).fit(x, y)
    assert (frozen.predicted(frozen.discriminant(a, b, 0.0), new) == lda.predict(new)).all()
    near = (x @ new.T).reshape(3, 50, 40).mean(axis=1)
    norms = np.linalg.norm(x.reshape(3, 50, 8).mean(axis=1), axis=1)
    assert (frozen.predicted(frozen.nearest_mean(b), new) == (near / norms[:, None]).argmax(axis=0)).all()
    absent = np.vstack([b, np.zeros(9)])
    assert (frozen.predicted(frozen.nearest_mean(absent), new) == frozen.predicted(frozen.nearest_mean(b), new)).all()
    assert (frozen.logistic(x[:50], y[:50], new, 0.1) == 0).all(), "one class"


@pytest.mark.full
def test_a_setting_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head of each run predicts every test row as the central head, and counts by client add up."""
    features(tmp_path / "made.npz", client=False)
    values = {"clients": 4, "partition": "dirichlet", "alpha": 0.5}
    monkeypatch.setattr(frozen, "SETTINGS", {"made": Setting("Made up", "made", values, frozen.OF_TEXTS)})
    for name, kinds in {"PLAIN": ("made",), "ROUNDS": (), "GUARDED": ()}.items():
        monkeypatch.setattr(frozen, name, kinds)
    page, lines = tmp_path / "page.md", tmp_path / "kept.jsonl"
    parts = ("answer", "costs", "bodies", "settings", "recalls", "rounds", "guards")
    page.write_text("".join(f"<!-- table:{part} -->\n<!-- /table:{part} -->\n" for part in parts))
    frozen.main(kept=lines, doc=page)
    assert frozen.UNMEASURED in page.read_text()
    again = partial(frozen.main, tmp_path, tmp_path, seeds=1, kept=lines, doc=page)
    again()
    kept = frozen.load(lines)
    found = {model: scores for (_, _, model), scores in kept.items()}
    assert [*found] == [*frozen.OF_TEXTS, *frozen.MODELS]
    assert [found[method]["apart"] for method in ("fed3r", "lda", "fedncm", "qda")] == [0] * 4
    assert all(sum(found[m][w] for w in ("gain", "same", "lose")) == 4 for m in frozen.OF_TEXTS)
    up = 8 * (13 * 14 // 2 + 4 * 13) + 8 * 65
    assert found["fed3r"]["bytes"] == up, "A, b and the losses of 65 factors"
    assert found[frozen.CHOOSING]["bytes"] == 2 * up + 8, "twice, and the number by which a client's own head is ahead"
    assert "global" not in found[frozen.CHOOSING] and "gain" not in found["alone"]
    monkeypatch.setattr(frozen, "measure", None)
    again()
    assert page.read_text().count("\n") > 8, "nothing is measured again"


@pytest.mark.full
def test_heads_are_trained_in_rounds_with_a_searched_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features(tmp_path / "made.npz", client=False)
    given = Setting("Made up", "made", {"clients": 4, "partition": "dirichlet", "alpha": 0.5})
    monkeypatch.setattr(frozen, "SETTINGS", {"made": given, "made-rounds": replace(given, heads=("fedavg", "local"))})
    monkeypatch.setattr(frozen, "ROUNDS", ("made-rounds",))
    monkeypatch.setattr(frozen_gradient, "STEPS", {"made": "1e-6,1"})
    monkeypatch.setattr(frozen_gradient, "EVEN", {**frozen_gradient.EVEN, "rounds": 3})
    lines = tmp_path / "kept.jsonl"
    frozen.save(lines, {("made", 0, "central"): {"penalty": 0.01, "global": 0.8}})
    frozen_gradient.run_missing(["made-rounds"], tmp_path, tmp_path / "runs", lines)
    kept = frozen.load(lines)
    for seed in range(frozen_gradient.SEEDS):
        found = kept["made-rounds", seed, "fedavg"]
        assert found["step"] == 1 and found["bytes"] == 3 * 4 * (4 * 13)
        done = read_run(tmp_path / "runs" / "made-rounds" / f"fedavg-s{seed}")
        assert found["global"] == pytest.approx(done.score("global"), abs=1e-6)
        assert {done.flat["validation"], done.flat["partition-seed"], done.seed} == {0.0, seed}
        assert "global" not in kept["made-rounds", seed, "local"] and "own" not in kept["made-rounds", seed, "local"]
    monkeypatch.setattr(frozen_gradient, "step_of", None)
    frozen_gradient.run_missing(["made-rounds"], tmp_path, tmp_path / "runs", lines)


def test_recalls_are_by_class_and_of_many_classes_deciles() -> None:
    truth = np.array([3, 0, 0, 3, 3, 1])
    found = frozen.by_class(np.array([True, True, False, False, True, True]), truth)
    assert found == {"recalls": [0.5, 1.0, 0.6667], "recall": 0.5}
    some = {("banking77", 0, "lda"): found, ("banking77", 1, "lda"): {**found, "recalls": [1.0, 1.0, 0.0]},
            ("cifar10-20", 0, "lda"): {"recalls": [n / 20 for n in range(20, -1, -1)]},
            ("clinc150", 0, "lda"): {}}  # fmt: skip
    rows = [line.split(" | ")[-1] for line in frozen.recall_table(some)[2:]]
    assert rows == [" ".join(map(str, range(0, 101, 10))) + " |", "75 100 33 |"]
    assert frozen.rounded(found | {"ece": 1 / 3}) == {**found, "ece": 0.333333}


def test_few_training_rows_are_drawn_and_all_test_rows_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features(tmp_path / "made.npz", rows=40)
    monkeypatch.setattr(frozen, "FEW_ROWS", {"made-few": 7})
    few, whole = frozen.features_of(tmp_path, "made-few", tmp_path / "out"), tmp_path / "made.npz"
    assert frozen.features_of(tmp_path, "made", tmp_path / "out") == whole
    with np.load(few) as found, np.load(whole) as all_rows:
        test = all_rows["split"] == "test"
        assert (found["split"] == "train").sum() == 7 and str(found["about"]) == str(all_rows["about"])
        assert np.array_equal(found["x"][found["split"] == "test"], all_rows["x"][test])
        assert len(found["y"]) == len(found["x"]) == len(found["client"]) == 7 + test.sum()


def test_settings_are_what_the_page_says() -> None:
    files = {s.file.removesuffix("-few") for s in SETTINGS.values()}
    assert files == {"cifar10", "fashion_mnist", "banking77", "clinc150"}
    assert {"cifar10-few": 1.2 * 1280, "banking77-few": round(1.2 * 384)} == frozen.FEW_ROWS
    for name, guard in frozen.GUARDS.items():
        assert SETTINGS[f"banking77-{name}"].values == {**SETTINGS["banking77"].values, **guard}


def test_the_seconds_of_both_commands_are_added_and_each_search_counts_once() -> None:
    def run(seconds: float) -> Scores:
        return {"seconds": seconds, "search": 30.0}

    trained = {("banking77-rounds", seed, model): run(4.0) for seed in (0, 1) for model in ("local", "fedavg")}
    found = frozen.costs({("banking77", 0, "lda"): {"seconds": 5.0}, ("banking77", 0, "alone"): {}, **trained})
    assert found.startswith("The runs of the first command took 5 processor seconds, those of the second 16, its "
                            "searches 60.")  # fmt: skip


def test_sentences_of_a_comparison_follow_from_the_scores() -> None:
    def setting(shares: float, rows: float, unshared: float, gains: tuple[float, float]) -> dict[str, list[Scores]]:
        head = {"shares": shares, "global": 0.8, "apart": 0.0, "few": gains[0], "few_clients": 10.0, "many": gains[1],
                "many_clients": 10.0}  # fmt: skip
        alone = {"own": 0.9, "rows": rows, "tests": 200.0, "unshared": unshared}
        chosen = {"harm": -0.004, "shares": 0.895, "own_heads": 7.0, "gain": 1.0, "same": 8.0, "lose": 1.0}
        return {"fed3r": [head], "lda": [head], frozen.CHOOSING: [chosen], "alone": [alone]}

    few, many = setting(0.93, 300, 0, (0.4, 0.1)), setting(0.905, 3000, 0, (0.2, 0.1))
    own = setting(0.87, 1500, 1, (0, -1.0))
    assert frozen.comparison({"cifar10-100": few, "cifar10-20": many, "clinc150": own}) == [
        "With each client's class shares, against training alone in 3 settings: both are better in 1, in every seed, "
        "by 3.0 points (CIFAR-10, 100 clients, Dirichlet 0.1, one seed); both are worse in 1, in every seed, by 3.0 "
        "points (CLINC150, ten domains as clients, one seed); in 1 neither holds.",
        "With `choose` the mean harm to clients, against LDA alone, is known in every seed of 3 of 3 settings. It "
        "comes nearest to the margin in CIFAR-10, 100 clients, Dirichlet 0.1: 0.4 points, margin 1.0.",
        "Where clients share classes, those with fewer than 500 training rows gain +3.0 points, the others +1.0.",
        "Both heads are worse only where no class is at two clients.",
        "There `choose` keeps the own head of 7 of 10 clients and stays 0.5 points below training alone.",
    ]
    equal, worse = setting(0.905, 300, 0, (0.1, 0.4)), setting(0.87, 9, 0, (0, 0))
    assert frozen.comparison({"cifar10-100": equal, "fashion-20": worse}) == [
        "With each client's class shares, against training alone in 2 settings: both are worse in 1, in every seed, "
        "by 3.0 points (Fashion-MNIST, 20 clients, Dirichlet 0.1, one seed); in 1 neither holds.",
        "With `choose` the mean harm to clients, against LDA alone, is known in every seed of 2 of 2 settings. It "
        "comes nearest to the margin in CIFAR-10, 100 clients, Dirichlet 0.1: 0.4 points, margin 1.0.",
        "There `choose` keeps the own head of 7 of 10 clients and stays 0.5 points below training alone.",
    ]
    twice = {model: [*few[model], *equal[model]] for model in few}
    assert frozen.comparison({"cifar10-100": twice})[0].endswith("in 1 settings: in 1 neither holds.")
