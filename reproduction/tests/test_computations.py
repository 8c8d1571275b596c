"""Computations behind the papers' figures against slow or independent ones."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from fedapp.core.gaussian import Form, moments
from fedapp.core.virtual import STREAM
from fedapp.data.transforms import normalise
from fedapp.engines.local import run
from fedapp.models import build_model
from fedapp.results.analysis import Unavailable, head_norms
from fedapp.results.runs import RunResult, read_run
from reproduction.figures import calibration, heads, models, representations
from tests.conftest import SMALL
from tests.test_core_virtual import MU_1, SIGMA_0, SIGMA_1
from tests.test_figures import files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("figures")


def test_the_history_of_norms_ends_with_the_stored_models(cw: RunResult) -> None:
    history = heads.head_norm_history(cw)
    _, norms = head_norms(cw)
    for k, (rounds, rows) in history.items():
        assert rounds.tolist() == [1, 2, 3]
        np.testing.assert_allclose(rows[-1], norms[k], rtol=1e-6)
        before = load_file(files(cw, k)[-2])["model/head.weight"]
        np.testing.assert_allclose(rows[-2], np.linalg.norm(before, axis=1), rtol=1e-6)


@pytest.mark.full
def test_resume_leaves_the_history_as_if_never_stopped(cw: RunResult, tmp_path: Path) -> None:
    settings = {**SMALL, "method": "cwfedavg", "partition": "classes", "classes_per_client": 4}
    run(**{**settings, "rounds": 2, "out": tmp_path / "resumed"})
    run(resume=tmp_path / "resumed", rounds=3)
    whole, parts = heads.head_norm_history(cw), heads.head_norm_history(read_run(tmp_path / "resumed"))
    for k in whole:
        np.testing.assert_array_equal(whole[k][0], parts[k][0])
        np.testing.assert_array_equal(whole[k][1], parts[k][1])


def test_stages_are_what_the_layers_put_out(cw: RunResult) -> None:
    model = models.client_models(cw, 1)[0]
    x, _ = models.probe(cw, 40)
    assert list(calibration.layers_of(model)) == ["conv1", "conv2", "fc1", "head"]
    outputs = {name: calibration.output_of(cw, model, name, x) for name in calibration.layers_of(model)}
    with torch.no_grad():
        image = normalise(x.permute(0, 3, 1, 2), models.data_of(cw).inputs)
        np.testing.assert_allclose(outputs["fc1"], model.features(image).numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(outputs["head"], model(image).numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(outputs["conv1"], model.features[0](image).flatten(1).numpy(), rtol=1e-5, atol=1e-6)


def linear_cka(x: np.ndarray, y: np.ndarray) -> float:
    """||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F) of the centred features (Kornblith et al., ICML 2019, Eq. 5)."""
    a, b = (z.astype(np.float64) - z.mean(axis=0, dtype=np.float64) for z in (x, y))
    return float(np.linalg.norm(b.T @ a) ** 2 / (np.linalg.norm(a.T @ a) * np.linalg.norm(b.T @ b)))


def test_linear_cka_worked_numbers() -> None:
    a, b = np.array([[1, 2], [2, 1], [3, 3], [4, 0]]), np.array([[1, 0], [0, 1], [1, 1], [2, -1]])
    assert linear_cka(a, b) == pytest.approx(0.400781, abs=6e-7)


def test_cka_of_layers_against_the_formula(cw: RunResult) -> None:
    ids, maps = calibration.layer_cka(cw, images=60)
    assert list(maps) == ["conv1", "conv2", "features", "head"]
    nets = models.client_models(cw)
    x, _ = models.probe(cw, 60)
    outputs = {c: {n: calibration.output_of(cw, m, n, x) for n in calibration.layers_of(m)} for c, m in nets.items()}
    for name, key in (("conv1", "conv1"), ("features", "fc1"), ("head", "head")):
        for i, a in enumerate(ids):
            for j, b in enumerate(ids):
                assert maps[name][i, j] == pytest.approx(linear_cka(outputs[a][key], outputs[b][key]), abs=1e-9)
        np.testing.assert_allclose(np.diag(maps[name]), 1)


@pytest.mark.full
def test_inner_layers_are_compared_between_equal_architectures_only(mixed: RunResult) -> None:
    ids, maps = calibration.layer_cka(mixed, images=40)
    assert ids == [0, 1, 2]
    assert list(maps)[-2:] == ["features", "head"]
    inner = maps["digits-a conv1"]
    assert np.isfinite(inner[0, 2])
    assert np.isnan(inner[0, 1])
    assert np.isfinite(maps["features"]).all()
    assert calibration.mean_of_pairs(inner) == pytest.approx(inner[0, 2])


def test_conductance_sums_to_the_difference_of_logits() -> None:
    model = build_model("digits-a", num_classes=10, shape=(1, 8, 8), seed=3).eval()
    x = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    zero = torch.zeros_like(x)
    with torch.no_grad():
        gap = float(model(x)[0, 4] - model(zero)[0, 4])
    values = representations.unit_conductance(model, x, zero, 4)
    assert values.shape == (64,)
    assert values.sum() == pytest.approx(gap, abs=1e-5)


@pytest.mark.full
def test_conductance_against_captum() -> None:
    attr = pytest.importorskip("captum.attr")
    model = build_model("digits-a", num_classes=10, shape=(1, 8, 8), seed=3).eval()
    x = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    path = attr.LayerConductance(model, model.activation)
    theirs = path.attribute(x, baselines=torch.zeros_like(x), target=4, n_steps=1500, internal_batch_size=500)
    ours = representations.unit_conductance(model, x, torch.zeros_like(x), 4)
    np.testing.assert_allclose(ours, theirs[0].detach().numpy(), atol=5e-4)


def test_ranks_are_of_the_units_and_clients_that_are_right(cw: RunResult) -> None:
    ids, right = representations.right_clients(cw, 50)
    found = representations.ranked_units(cw, int(right.sum(axis=0).argmax()), (ids, right))
    best = right.sum(axis=0).max()
    assert len(found.clients) == min(8, best) >= 2
    assert found.ranks.shape == (len(found.clients), 64)
    np.testing.assert_allclose(found.ranks.sum(axis=1), 63 * 64 / 2)
    assert -1 <= found.agreement <= 1


def test_tsne_is_the_same_every_time() -> None:
    rows = np.random.default_rng(0).standard_normal((60, 8)).astype(np.float32)
    np.testing.assert_array_equal(representations.embed(rows, 5), representations.embed(rows, 5))
    with pytest.raises(Unavailable, match="too few"):
        representations.embed(rows[:4], 5)


def test_every_client_sees_the_same_images_in_the_embedding(cw: RunResult) -> None:
    points, numbers, (by_class, by_client) = representations.client_embedding(cw, clients=3, points=90)
    label, client = numbers.values()
    assert points.shape == (len(label), 2)
    for k in (1, 2):
        np.testing.assert_array_equal(label[client == k], label[client == 0])
    assert -1 <= by_client <= by_class + 2 <= 3


@pytest.mark.full
def test_the_sweep_repeats_the_runs_own_calibration(ccvr: RunResult) -> None:
    """The same statistics, draws and training order: 0 samples is `before`, the run's M_c is `after`.

    On the wire means and covariances are float32 here, which may tip one test image.
    """
    found = calibration.calibration_sweep(ccvr, (0, 100))
    said = ccvr.summary["calibration"]
    images = sum(ccvr.card["test_sizes"])
    assert found.accuracy[0] == pytest.approx(said["before"], abs=1e-9)
    assert found.accuracy[100] == pytest.approx(said["after"], abs=1.01 / images)
    assert found.images == ccvr.counts.sum()
    assert found.separability > 0


@pytest.mark.full
@pytest.mark.parametrize(
    "args",
    [
        "transform=feature", "transform=sample", "transform=sample-only", "clsnorm=true", "mc_mode=proportional",
        "cov=diag min_count=3", "base=fednh transform=sample",
    ],
)  # fmt: skip
def test_the_sweep_repeats_the_calibration_of_any_variant(args: str, folder: Path) -> None:
    """Without test images on the wire in between, statistics in float64 make the sweep's head that of the run."""
    out = folder / args.replace(" ", "-")
    given = f"{args} epochs=3 samples=50 dtype=float64 oracle=true"
    values = {**SMALL, "data_fraction": 1.0, "rounds": 1, "method": "ccvr", "method_args": given, "alpha": 0.2}
    run(**{**values, "clients": 3, "out": out})
    data = read_run(out)
    said = data.summary["calibration"]
    found = calibration.calibration_sweep(data, (0, 10, 50), (0,))
    images = sum(data.card["test_sizes"])
    assert list(found.accuracy) == [0, 10, 50]
    assert found.accuracy[0] == pytest.approx(said["before"], abs=1e-9)
    assert found.accuracy[50] == pytest.approx(said["after"], abs=1.01 / images)
    assert found.images == said["samples"]
    # The run's oracle sees the same features in another order.
    assert found.oracle[0] == pytest.approx(said["oracle"], abs=0.03)
    assert found.separability > 0


def test_a_run_that_calibrates_nothing_has_no_sweep(folder: Path) -> None:
    run(**{**SMALL, "rounds": 1, "method": "ccvr", "method_args": "epochs=0", "clients": 3, "out": folder / "none"})
    with pytest.raises(Unavailable, match="epochs=0 calibrates nothing"):
        calibration.calibration_sweep(read_run(folder / "none"))


def test_head_norms_before_and_after_calibration(ccvr: RunResult) -> None:
    before, after = (np.linalg.norm(models.global_arrays(ccvr, c)["head.weight"], axis=1) for c in (False, True))
    ratios = ccvr.summary["calibration"]["head_norm_ratio"]
    assert before.max() / before.min() == pytest.approx(ratios[0], rel=1e-5)
    assert after.max() / after.min() == pytest.approx(ratios[1], rel=1e-5)


def test_predictions_before_and_after_are_the_two_heads(ccvr: RunResult) -> None:
    _, found = calibration.calibration_embedding(ccvr, points=150)
    x, y = models.probe(ccvr, 150)
    np.testing.assert_array_equal(found["truth"], y)
    model = models.global_model(ccvr, calibrated=False)
    z = models.represent(ccvr, model, x)
    for predicted, calibrated in ((found["before"], False), (found["after"], True)):
        arrays = models.global_arrays(ccvr, calibrated)
        np.testing.assert_array_equal(predicted, (z @ arrays["head.weight"].T + arrays["head.bias"]).argmax(axis=1))


def test_personal_models_cannot_be_calibrated(cw: RunResult) -> None:
    with pytest.raises(Unavailable, match="cwfedavg has no global model"):
        calibration.calibration_sweep(cw)


# ---- separability ----------------------------------------------------------------------------------------------------


def sliced_wasserstein(a: tuple[np.ndarray, ...], b: tuple[np.ndarray, ...], directions: np.ndarray) -> np.ndarray:
    """Squared distances of two Gaussians (mean, covariance) along each direction, one by one."""
    (mean_a, cov_a), (mean_b, cov_b) = a, b
    shifts = np.array([t @ mean_a - t @ mean_b for t in directions])
    return shifts**2 + np.array([np.sqrt(t @ cov_a @ t) - np.sqrt(t @ cov_b @ t) for t in directions]) ** 2


def test_sliced_wasserstein_worked_numbers() -> None:
    h = np.sqrt(0.5)
    directions = np.array([[1, 0], [0, 1], [h, h], [h, -h]])
    squared = sliced_wasserstein((np.array([2.5, 1.5]), SIGMA_0), (MU_1, SIGMA_1), directions)
    np.testing.assert_allclose(squared, [1.690165, 12.334678, 2.422382, 11.588966], atol=2e-6)


@pytest.mark.parametrize("form", get_args(Form))
def test_separability_is_the_mean_over_pairs(form: Form) -> None:
    rng = np.random.default_rng(3)
    y = np.repeat([0, 1, 3], [20, 25, 30])
    statistics = moments(rng.normal(size=(75, 6)) * (1 + y[:, None]) + y[:, None], y, 5, form)
    directions = np.random.default_rng([4, STREAM]).standard_normal((20, 6))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    found = {c: (statistics.means[c], statistics.cov(c)) for c in (0, 1, 3)}
    if form == "diag":
        found = {c: (mean, np.diag(variances)) for c, (mean, variances) in found.items()}
    pairs = ((0, 1), (0, 3), (1, 3))
    distances = [np.sqrt(sliced_wasserstein(found[i], found[j], directions).mean()) for i, j in pairs]
    assert calibration.class_distance(statistics, seed=4, directions=20) == pytest.approx(np.mean(distances), rel=1e-12)


def test_separability_needs_two_classes() -> None:
    two = moments(np.array([[0.0], [0.0], [3.0], [3.0]]), np.array([0, 0, 1, 1]), 3)
    assert calibration.class_distance(two, 0) == pytest.approx(3.0)
    with pytest.raises(ValueError, match="two classes, got 1"):
        calibration.class_distance(moments(np.ones((2, 2)), np.zeros(2, dtype=int), 3), 0)
