"""CCVR's figures 1 to 15: what they are computed from against independent computations, and that each is drawn."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedapp.data.transforms import InputSpec, normalise
from fedapp.engines.local import run
from fedapp.models import SplitModel, build_model
from fedapp.results.analysis import Unavailable
from fedapp.results.figures.words import percent
from fedapp.results.runs import RunResult, labelled, read_run
from reproduction.figures import calibration, inversion, models, papers, plots
from reproduction.figures.calibration import by_name
from reproduction.figures.heads import head_norm_history

SMALL: dict[str, Any] = {
    "method": "ccvr", "dataset": "digits", "data_fraction": 0.3, "clients": 3, "rounds": 2, "local_epochs": 1,
    "batch_size": 16, "alpha": 0.2,
}  # fmt: skip
NUMBERS = range(1, 16)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunResult]:
    """FedAvg on a skewed and on an even partition, and MOON on the skewed one; all calibrated."""
    folder = tmp_path_factory.mktemp("ccvr-figures")
    for name, values in {
        "skewed": {"method_args": "transform=sample"},
        "iid": {"method_args": "transform=sample", "partition": "iid"},
        "moon": {"method_args": "transform=sample base=moon"},
    }.items():
        run(**{**SMALL, **values, "out": folder / name})
    return labelled([read_run(folder / name) for name in ("skewed", "iid", "moon")])


@pytest.fixture(scope="module")
def partitions(runs: list[RunResult]) -> list[RunResult]:
    return labelled([read_run(r.out) for r in runs[:2]])


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_runs_of_several_folders_are_told_apart(runs: list[RunResult], partitions: list[RunResult]) -> None:
    assert list(by_name(partitions)) == ["ccvr, dirichlet, alpha 0.2", "ccvr, iid"]
    assert len(by_name(runs)) == 3
    twice = [*partitions, replace(partitions[0])]
    assert len(by_name(twice)) == 2, "the first seed stands for all"


def test_runs_that_train_the_same_model_count_once(runs: list[RunResult], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def sweep(data: RunResult, samples: Any, real: Any) -> calibration.Calibration:
        asked.append(str(data.flat["method-args"]))
        return calibration.Calibration({0: 0.5, 50: 0.75}, {0: 0.9}, 1.0, 100)

    monkeypatch.setattr(calibration, "calibration_sweep", sweep)
    same = [replace(runs[0]), replace(runs[0])]
    for data, args in zip(same, ("samples=50 epochs=60 transform=none", "samples=2000 base=fedavg oracle=true")):
        data.flat.update({"method-args": args})
    _, alt, figure = calibration.samples_sweep([runs[0], *same, runs[2]])
    assert len(asked) == 2 and "moon" in asked[1]
    assert "fedavg, dirichlet, alpha 0.2: 50.0 % as trained, 75.0 % with 50" in alt and "moon, dirichlet" in alt
    assert [line.get_label() for line in figure.axes[0].containers] == ["fedavg", "moon"]


def test_a_legend_of_long_names_stays_on_the_figure() -> None:
    names = [f"ccvr(base=fedprox), dirichlet, alpha 0.{i}" for i in range(6)]
    layers = {"conv1": np.eye(2), "head": np.eye(2)}
    figure = plots.cka(dict.fromkeys(names, layers))
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box, page = legend.get_window_extent(), figure.bbox
    assert page.x0 <= box.x0 and box.x1 <= page.x1
    assert {text.get_text() for text in legend.get_texts()} == {*names, "a pair of clients"}


# ---- norms -----------------------------------------------------------------------------------------------------------


def test_norms_before_training_are_those_of_the_head_that_all_start_from(tmp_path: Path) -> None:
    """With steps of almost no length the heads after round 1 are still the first one."""
    run(**{**SMALL, "method": "fedavg", "lr": 1e-9, "momentum": 0.0, "out": tmp_path / "run"})
    ids, norms = calibration.norms_of(read_run(tmp_path / "run"))
    assert ids == [0, 1, 2] and list(norms) == ["before training", "round 1", "round 2"]
    np.testing.assert_allclose(norms["before training"], norms["round 1"], rtol=1e-5)
    assert np.ptp(norms["before training"][0]) > 0.01


def test_without_a_common_head_there_are_no_norms_before_training(tmp_path: Path) -> None:
    run(**{**SMALL, "method": "local", "rounds": 1, "out": tmp_path / "run"})
    with pytest.raises(Unavailable, match="starts from a head of its own"):
        calibration.norms_of(read_run(tmp_path / "run"))


def test_norms_by_round_are_the_recorded_ones(tmp_path: Path) -> None:
    run(**{**SMALL, "method": "fedavg", "rounds": 4, "fraction_train": 0.34, "out": tmp_path / "run"})
    data = read_run(tmp_path / "run")
    _, norms = calibration.norms_of(data)
    history = head_norm_history(data)
    drawn = [set(data.clients.query("round == @t")["client"]) for t in (1, 2, 3, 4)]
    for row, (client, (rounds, values)) in enumerate(history.items()):
        known = [t for t in (1, 2, 3, 4) if client in drawn[t - 1]]
        assert rounds.tolist() == known
        assert np.isnan(norms["round 1"][row]).all() == (client not in drawn[0])
        np.testing.assert_array_equal(norms[list(norms)[-1]][row], values[-1])


# ---- calibration -----------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_upper_bound_is_calibration_on_all_real_features(runs: list[RunResult]) -> None:
    caption, alt, _ = calibration.separability(runs)
    for data, name in zip((runs[0], runs[2]), ("fedavg", "moon")):
        found = calibration.calibration_sweep(data, (0, 100), (0,))
        x, y = data_of_test(data)
        model = models.global_model(data, calibrated=False)
        with torch.no_grad():
            right = (model(normalise(x, models.data_of(data).inputs)).argmax(1) == y).double().mean()
        assert found.accuracy[0] == pytest.approx(float(right))
        assert found.oracle[0] > found.accuracy[0]
        if name == "moon":  # FedAvg is there twice, on two partitions: the words give the mean
            assert f"moon: distance {found.separability:.2f}" in alt
            assert f"at most {percent(found.oracle[0])}" in alt
    assert "upper bound" in caption and "Correlation of distance and upper bound" in caption


def data_of_test(data: RunResult) -> tuple[torch.Tensor, torch.Tensor]:
    federated = models.data_of(data)
    x, y = federated.dataset.take(np.sort(np.concatenate([c.test for c in federated.partition.clients])))
    return torch.from_numpy(x).permute(0, 3, 1, 2), torch.from_numpy(y)


def test_fewer_real_features_lie_between(runs: list[RunResult]) -> None:
    found = calibration.calibration_sweep(runs[0], (0,), (5, 0))
    assert found.accuracy[0] < found.oracle[5] <= found.oracle[0] + 0.05
    _, alt, figure = calibration.real_sweep(runs[:1])
    whole = found.images // 10
    assert f"{percent(found.oracle[0])} with {whole} images" in alt
    assert next(t.get_text() for t in figure.axes[0].get_xticklabels()) == "0"


# ---- inversion -------------------------------------------------------------------------------------------------------

GREY = InputSpec((1, 4, 4), 16.0, (0.3,), (0.5,))


def test_total_variation_worked_numbers() -> None:
    x = torch.tensor([[[[0.0, 1.0], [0.0, 0.0]]], [[[0.5, 0.5], [0.5, 0.5]]]])
    # Down: |0 - 0|, |0 - 1|; right: |1 - 0|, |0 - 0|: means 1/2 and 1/2.
    torch.testing.assert_close(inversion.total_variation(x), torch.tensor([1.0, 0.0]))


def test_an_invertible_representation_gives_the_image_back() -> None:
    """f(x) is the normalised image itself: without a prior the attack must find the pixels."""
    plain = SplitModel(name="identity", features=nn.Flatten(), activation=nn.Identity(), head=nn.Linear(16, 2)).eval()
    pixels = np.random.default_rng(0).integers(1, 16, (3, 4, 4, 1)).astype(np.uint8)
    z = normalise(torch.from_numpy(pixels).permute(0, 3, 1, 2), GREY).flatten(1).numpy()
    found = inversion.invert(plain, GREY, z, steps=600, tv=0.0)
    np.testing.assert_allclose(found, pixels / 16, atol=0.01)
    smooth = inversion.invert(plain, GREY, z, steps=600, tv=5.0)
    roughness = [np.abs(np.diff(v, axis=1)).mean() for v in (found, smooth)]
    assert roughness[1] < 0.3 * roughness[0], "the prior draws neighbours together"


def test_every_image_is_recovered_by_itself() -> None:
    model = build_model("digits-a", num_classes=10, shape=(1, 8, 8), seed=3).eval()
    inputs = InputSpec((1, 8, 8), 16.0, (0.3,), (0.4,))
    z = np.random.default_rng(1).random((2, 64)).astype(np.float32)
    both = inversion.invert(model, inputs, z, steps=15)
    alone = np.concatenate([inversion.invert(model, inputs, row[None], steps=15) for row in z])
    np.testing.assert_allclose(both, alone, atol=1e-4)
    assert all(p.grad is None for p in model.parameters())


class Always:
    """A classifier that answers one class."""

    def predict(self, x: np.ndarray) -> np.ndarray:
        return np.full(len(x), 1)


def test_what_an_attack_is_judged_by() -> None:
    rng = np.random.default_rng(2)
    pixels, y = rng.random((30, 4, 4, 1)), np.arange(30) % 3
    rows = [np.array([0]), np.array([1]), np.array([4]), np.array([5])]
    perfect = inversion._judged(1, rows, pixels[[0, 1, 4, 5]], pixels, y, Always())
    assert perfect.similarity == pytest.approx(1) and perfect.identified == 1
    assert perfect.chance == pytest.approx(0.1) and perfect.recognised == 0.5
    average = pixels[y == 0].mean(axis=0)
    assert perfect.by_class < 1
    one = np.corrcoef(average.ravel(), pixels[0].ravel())[0, 1]
    alone = inversion._judged(1, rows[:1], average[None], pixels, y, Always())
    assert alone.similarity == alone.by_class == pytest.approx(one), "the baseline is the class's mean image"
    other = inversion._judged(1, rows[:1], pixels[[3]], pixels, y, Always())
    assert other.identified == 0 and other.similarity < 1
    three = inversion._judged(3, [np.array([0, 3, 6])], pixels[[6]], pixels, y, Always())
    assert three.identified == 1 and three.similarity == pytest.approx(1) and three.chance == pytest.approx(0.3)
    assert perfect.secret.shape == (3, 1, 4, 4, 1), "one example a class"


def test_one_feature_tells_its_image_and_the_classifier_is_independent(runs: list[RunResult]) -> None:
    attacks, classifier = inversion.measure(runs[1], (1, inversion.DRAWN), per_class=2, steps=150)
    assert classifier > 0.9
    attack = attacks[1]
    assert attack.identified > 10 * attack.chance
    assert attack.recovered.min() >= 0 and attack.recovered.max() <= 1
    assert attacks[inversion.DRAWN].secret.shape[1] == 0


def test_a_mean_of_more_images_than_there_are_is_refused(runs: list[RunResult]) -> None:
    with pytest.raises(Unavailable, match="no class has 5000 training images"):
        inversion.measure(runs[0], (5000,))


# ---- drawn -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("number", NUMBERS)
def test_every_figure_of_the_paper_is_drawn(
    number: int, runs: list[RunResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inversion, "measure", partial(inversion.measure, per_class=1, steps=5))
    monkeypatch.setattr(calibration, "embed", lambda rows, seed: np.asarray(rows[:, :2], dtype=np.float64))
    monkeypatch.setattr(
        calibration, "calibration_sweep",
        lambda data, samples, real=(): calibration.Calibration(
            dict.fromkeys(samples, 0.5), dict.fromkeys(real, 0.75), 1.0 + ("moon" in data.label), 1350
        ),
    )  # fmt: skip
    drawing = papers.draw(f"ccvr-{number}", [r.out for r in runs])
    assert drawing.caption.endswith(".") and len(drawing.alt) > 30
    panels = [a for a in drawing.figure.axes if a.get_visible() and a.get_label() != "<colorbar>"]
    wanted = {1: 9, 3: 12, 4: 2, 5: 9, 7: 2, 8: 20, 9: 90, 10: 3, 12: 12, 13: 9, 14: 2, 15: 2}
    assert len(panels) == wanted.get(number, 1)
    assert len(drawing.png()) > 1000


@pytest.mark.parametrize("number", NUMBERS)
def test_every_figure_names_its_runs_and_has_a_small_picture(number: int) -> None:
    docs = Path(__file__).parents[2] / "docs"
    _, _, section = (docs / "figures.md").read_text(encoding="utf-8").partition(f"### ccvr-{number}: ")
    section = section.partition("\n### ")[0]
    assert "Runs: `" in section or "--out runs/" in section
    assert f"](figures/ccvr-{number}.png)" in section
    assert (docs / "figures" / f"ccvr-{number}.png").stat().st_size < 80_000
