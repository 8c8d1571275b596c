"""docs/privacy.md: its measured tables by hand, cells that are scores of runs, attacks that find what there is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedapp.core.noise import seeded
from fedapp.core.privacy import Joint, noise_for
from fedapp.errors import BadRequest
from fedapp.learning.releases import Releaser
from fedapp.method import Reply
from fedapp.models import build_model
from fedapp.results.runs import RunResult
from reproduction.studies import leakage, privacy
from reproduction.studies.choosing import DOCS

PAGE = "".join(f"<!-- table:{name} -->\n<!-- /table:{name} -->\nbetween\n" for name in privacy.PARTS)


def test_the_page_holds_the_tables_of_what_is_kept() -> None:
    text = (DOCS / "privacy.md").read_text(encoding="utf-8")
    kept = json.loads((DOCS / "privacy.json").read_text(encoding="utf-8"))
    assert privacy.page(text, kept) == text, "run: python -m reproduction study privacy"
    assert set(kept["made"]) <= set(privacy.PARTS)


def test_tables_by_hand() -> None:
    cells = {"mnist": {"fed3r client 1": [0.5, 0.6], "fed3r none": [0.75, 0.75], "fedncm sum 8": [0.25]}}
    lines = privacy.accuracy_tables(cells)
    assert lines[1].startswith("**MNIST**: a tenth of the images") and len(lines) == 9
    assert lines[5] == "| Fed3R | at each client | – | 55.0 ± 7.1 | – | – | – | 75.0 ± 0.0 |"
    assert lines[6] == "| Fed3R | on the sum | – | – | – | – | – | 75.0 ± 0.0 |"
    assert lines[7] == "| FedNCM | on the sum | – | – | – | – | 25.0 | – |"
    found = {"absent, fedavg, none": [0.9, 1.0], "similar, fedavg, client 8": [0.5], "label, fedavg, none": [0.8]}
    table = privacy.attack_table(found)
    assert "| absent classes, AUC | whole models (FedAvg) | 0.95 ± 0.07 | – | – | – |" in table
    assert any("(the label alone: 0.80)" in line and line.endswith("| – | – | – | 0.50 |") for line in table)
    costs = {"fed3r": {"plain": 1500, "hidden": 3000, "noise_ms": 1.5, "mask_ms": 2, "server_ms": 3.0}}
    assert privacy.cost_table(costs)[3].endswith("| 1.5 KB | 1.5 KB | 3.0 KB | 1.5 ms | 2 ms | 3 ms |")


def test_what_is_chosen_has_the_highest_mean_over_methods_and_seeds() -> None:
    scores = {f"{m} {b:g} {f:g}": [0.5, 0.5] for m in ("fed3r", "lda", "ccvr") for b in privacy.BETAS
              for f in privacy.FLOORS}  # fmt: skip
    scores |= {"fed3r 1 0.5": [0.9, 0.1], "lda 1 0.5": [0.6, 0.6], "fed3r 2 1": [0.5, 0.9], "lda 2 1": [0.3, 0.4],
               "ccvr 0.25 0": [0.6, 0.6]}  # fmt: skip
    assert privacy.best(scores, ("fed3r", "lda")) == (1.0, 0.5)
    assert privacy.best(scores, ("ccvr",)) == (0.25, 0.0)
    table = privacy.choice_table(scores)
    assert "| Fed3R, LDA | 1 | 50.0 | 50.0 | **55.0** | 50.0 | 50.0 |" in table
    assert "| CCVR | 0.25 | **60.0** | 50.0 | 50.0 | 50.0 | 50.0 |" in table


def test_noise_alone_has_no_larger_eigenvalue_than_the_edge() -> None:
    joint = Joint(2, 100, "all")
    noise, size = 2.0, 100 * 101 // 2
    rng = np.random.default_rng(0)
    total = np.zeros((100, 100))
    for _ in range(5):
        drawn = joint.parts(rng.normal(size=202 + size) * noise * joint.sensitivity)["square"]
        matrix = np.zeros((100, 100))
        matrix[np.triu_indices(100)] = drawn
        total += matrix + np.triu(matrix, 1).T
    assert np.linalg.eigvalsh(total)[-1] == pytest.approx(privacy.edge(joint, noise, 5), rel=0.1)


def test_noise_of_a_client_is_a_release_or_its_share() -> None:
    assert privacy.noise_of(math.inf, "client") == privacy.noise_of(math.inf, "sum") == 0.0
    assert privacy.noise_of(2.0, "client") == noise_for(2.0, privacy.DELTA, 1)
    # Of ten clients seven must answer, and one of them may take its share away.
    assert privacy.noise_of(2.0, "sum") == pytest.approx(noise_for(2.0, privacy.DELTA, 1) / math.sqrt(6))


def test_images_are_means_over_squares_inside_the_border() -> None:
    image = np.zeros((1, 28, 28), dtype=np.uint8)
    image[0, 2:5, 2:5], image[0, 0:2], image[0, 23:26, 23:26] = 90, 255, np.arange(9).reshape(3, 3)
    small = privacy.shrunk(image, 8)
    assert small.shape == (1, 8, 8) and small[0, 0, 0] == 90 and small[0, 7, 7] == 4 and small.sum() == 94


def test_few_rows_are_rebuilt_from_their_second_moments(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = np.maximum(rng.normal(size=(300, 400)), 0).astype(np.float32) ** 2  # sparse, as after ReLU
    for rows in (1, 5):
        found = leakage.from_moments(x, rows, 0)
        assert found["rebuilt"] > 0.95, rows
    assert found["rotated"] < 0.85
    true = x[:3].astype(np.float64)
    assert leakage.likeness(-2 * true[[2, 0, 1]], true) == pytest.approx(1)
    rotated = leakage.rotated_rows(np.column_stack([true, np.ones(3)]).T @ np.column_stack([true, np.ones(3)]), 3,
                                   np.zeros(400))  # fmt: skip
    np.testing.assert_allclose(rotated.T @ rotated, true.T @ true, atol=1e-9)
    np.savez(tmp_path / "f.npz", x=x[:, :20], split=np.repeat(["train", "test"], [250, 50]))
    table = privacy.rows_table({"cifar10": privacy.rebuilt(tmp_path / "f.npz", [0, 1])})
    assert table[3].startswith("| pictures, EfficientNet-Lite0 | rebuilt | 1.00 ± 0.00 | ") and len(table) == 6


@pytest.mark.parametrize("method", ["fedgh", "fed3r", "fedncm", "ccvr"])
def test_a_cell_is_the_score_of_a_run(
    method: str, tiny: Callable[..., RunResult], replies: list[tuple[str, Reply]], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    weights = tmp_path / "weights.pt"
    torch.save(build_model("digits-a", num_classes=10, shape=(1, 8, 8), seed=7).state_dict(), weights)
    exact: list[Any] = []
    release = Releaser.release

    def spy(self: Releaser, values: Any, sensitivity: float, what: str) -> Any:
        exact.append(values)
        return release(self, values, sensitivity, what)

    monkeypatch.setattr(Releaser, "release", spy)
    monkeypatch.setattr(privacy, "CLIENTS", 3)
    monkeypatch.setattr(privacy, "ROUNDS", 2)
    arguments, prefix, squares = privacy.METHODS[method]
    values = {key.replace("-", "_"): v for key, v in privacy.settings(tmp_path, "digits", weights, 1).items()}
    values |= {"data_dir": "", "protocols": "received" if method == "fedgh" else "global"}
    found = tiny(**values, method=method, method_args=arguments, dp_epsilon=20.0, dp_test=True,
                 rounds=2 if method == "fedgh" else 1)  # fmt: skip
    features = privacy.read_features(tmp_path, "digits", weights, 1)
    np.testing.assert_allclose(privacy.exact(features, squares), exact, atol=1e-5)
    sent = {r.client: r.arrays for kind, r in replies if any(name.startswith(prefix) for name in r.arrays)}
    answers = [{n.removeprefix(prefix): a for n, a in sent[k].items()} for k in range(3)]
    noise = noise_for(20.0, privacy.DELTA, 1)
    score = privacy.accuracy(method, features, answers, noise, 1)
    if method == "fedgh":  # it has no global score: what clients receive, on their own test images
        run = np.average(found.final["received_accuracy"], weights=found.final["received_total"])
    else:
        run = found.summary["calibration"]["after"]
    assert score == pytest.approx(run, abs=1e-6)


def test_one_command_makes_the_page_of_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, kept = tmp_path / "privacy.md", tmp_path / "privacy.json"
    page.write_text(PAGE)
    monkeypatch.setattr(privacy, "costs", lambda: {"ccvr": {"plain": 1, "hidden": 2000, "noise_ms": 1, "mask_ms": 2,
                                                            "server_ms": 3}})  # fmt: skip
    privacy.main(tmp_path, "cost", kept=kept, doc=page)
    text = page.read_text()
    assert "--only cost`, " in text and "seeds" not in text and text.count("between") == len(privacy.PARTS)
    assert "| CCVR |" in text and "2.0 KB" in text
    assert json.loads(kept.read_text())["made"]["cost"]["seeds"] == [0, 1, 2]
    privacy.main(kept=kept, doc=page)
    assert page.read_text() == text
    with pytest.raises(BadRequest, match="no part 'costs'"):
        privacy.main(only="costs", kept=kept, doc=page)


# ---- attacks ---------------------------------------------------------------------------------------------------------


def test_who_knows_all_other_images_finds_one_as_often_as_the_noise_lets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leakage, "TRIALS", 400)
    assert leakage.known_others(0.0, 0) == 1.0
    for noise in (0.64, 2.0):  # Phi(1 / (z sqrt(2))), of two Gaussians one sensitivity apart
        expected = 0.5 * math.erfc(-1 / (2 * noise))
        assert leakage.known_others(noise, 0) == pytest.approx(expected, abs=0.05)


def test_a_gradient_without_noise_shows_feature_and_image() -> None:
    net = build_model("digits-a", num_classes=10, shape=(1, 8, 8), seed=0).eval()
    data, _ = leakage.parts_of({"method": "fedavg"})
    secret = leakage.secret_of(data, 0)
    x, y = secret.x[:1], secret.y[:1]
    seen = leakage.step_of_client(leakage.gradient(net, x, y), 0.0, seeded(0))
    with torch.no_grad():
        z = net.represent(x)[0].numpy()
    found = leakage.feature_of(*seen[-2:])
    assert found @ z / np.linalg.norm(found) / np.linalg.norm(z) == pytest.approx(1.0, abs=1e-4)
    image = leakage.matched(net, data.inputs, seen, y)
    assert np.corrcoef(image.ravel(), secret.pixels[secret.rows[0]].ravel())[0, 1] > 0.9
    noisy = leakage.step_of_client(leakage.gradient(net, x, y), 0.64, seeded(0))
    lost = leakage.feature_of(*noisy[-2:])
    assert lost @ z / np.linalg.norm(lost) / np.linalg.norm(z) < 0.7


def test_judging_by_hand() -> None:
    rng = np.random.default_rng(0)
    pixels = rng.random((4, 2, 2, 1))
    labels = np.array([0, 0, 1, 1])
    secret = leakage.Secret(np.array([0, 2]), torch.zeros(2, 1, 2, 2), torch.tensor([0, 1]), pixels, labels)
    perfect = leakage.judged(2 * pixels[[0, 2]] + 1, secret)
    assert perfect["similar"] == pytest.approx(1.0) and perfect["named"] == 1.0 and perfect["label"] < 1.0
    assert leakage.judged(pixels[[1, 2]], secret)["named"] == 0.5


def test_absent_classes_of_class_means_and_counts() -> None:
    grid = leakage.Wiretap.__new__(leakage.Wiretap)
    truth = leakage.class_counts(0)
    grid.answers = {k: {"sums/b": np.column_stack([np.ones((10, 2)), row])} for k, row in enumerate(truth)}
    assert leakage.absent("fedncm", grid, 0) == 1.0
    grid.heard = {1: {k: {"labels": np.flatnonzero(row)} for k, row in enumerate(truth)}}
    assert leakage.absent("fedgh", grid, 0) == 1.0
    assert leakage.auc([1.0, 3.0], [2.0, 2.0]) == 0.5
