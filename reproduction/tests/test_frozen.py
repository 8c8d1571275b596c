"""docs/frozen.md: the page as the kept scores make it, and what the study measures beside each run."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge

from reproduction.studies import frozen
from reproduction.studies.frozen import SETTINGS, Setting
from tests.test_given_features import features


def test_the_page_holds_the_tables_of_the_kept_scores() -> None:
    text = (frozen.DOCS / "frozen.md").read_text(encoding="utf-8")
    kept = frozen.load(frozen.DOCS / "frozen.jsonl")
    assert frozen.page(text, kept) == text, "run: python -m reproduction study frozen"
    measured = {setting for setting, _, _ in kept}
    assert measured, "something was measured"
    for setting in measured:
        assert setting not in frozen.PLAIN or f"<!-- table:{setting} -->" in text
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
    assert (frozen.logistic(x[:50], y[:50], new, 0.1) == 0).all(), "one class"


def test_a_setting_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head of each run predicts every test row as the central head, and counts by client add up."""
    features(tmp_path / "made.npz", client=False)
    values = {"clients": 4, "partition": "dirichlet", "alpha": 0.5}
    monkeypatch.setattr(frozen, "SETTINGS", {"made": Setting("Made up", "made", values)})
    page, lines = tmp_path / "page.md", tmp_path / "kept.jsonl"
    page.write_text("<!-- table:made -->\n<!-- /table:made -->\n")
    words = ["frozen", "--kept", str(lines), "--doc", str(page)]
    monkeypatch.setattr(sys, "argv", words)
    assert frozen.main() == 0 and frozen.UNMEASURED in page.read_text()
    monkeypatch.setattr(sys, "argv", [*words, "--features", str(tmp_path), "--out", str(tmp_path), "--seeds", "1"])
    assert frozen.main() == 0
    kept = frozen.load(lines)
    found = {model: scores for (_, _, model), scores in kept.items()}
    assert [*found] == [*frozen.HEADS, *frozen.MODELS]
    assert [found[method]["apart"] for method in ("fed3r", "lda", "fedncm")] == [0, 0, 0]
    assert all(sum(found[m][w] for w in ("gain", "same", "lose")) == 4 for m in frozen.HEADS)
    up = 8 * (13 * 14 // 2 + 4 * 13) + 8 * 65
    assert found["fed3r"]["bytes"] == up, "A, b and the losses of 65 factors"
    assert found[frozen.CHOOSING]["bytes"] == 2 * up + 8, "twice, and the number by which a client's own head is ahead"
    assert "global" not in found[frozen.CHOOSING] and "gain" not in found["alone"]
    monkeypatch.setattr(frozen, "measure", None)
    assert frozen.main() == 0 and page.read_text().count("\n") > 8, "nothing is measured again"


def test_settings_are_what_the_page_says() -> None:
    assert {s.file for s in SETTINGS.values()} == {"cifar10", "fashion_mnist", "banking77", "clinc150"}
    for name, guard in frozen.GUARDS.items():
        assert SETTINGS[f"banking77-{name}"].values == {**SETTINGS["banking77"].values, **guard}
