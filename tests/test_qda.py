"""QDA: densities of Gaussians as the oracle, the reduction to LDA, the quadratic head where it is stored and used."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from clients._models import QuadraticHead
from fedapp import load, registry
from fedapp.core import gaussian, quadratic, sums
from fedapp.engines.local import RunResult
from fedapp.engines.runner import run_and_report
from fedapp.errors import BadRequest
from fedapp.learning.state import read_safetensors
from fedapp.results import exporting, predict
from tests import handmade
from tests.closedform import random_data, together
from tests.test_personal_heads import counts, heads, on_features, union

Tiny = Callable[..., RunResult]


def logits(z: np.ndarray, y: np.ndarray, classes: int, h: float, g: float) -> np.ndarray:
    """Log-densities of Gaussians with equal classes, written out in NumPy."""
    d, seen = z.shape[1], np.flatnonzero(np.bincount(y, minlength=classes))
    means = {c: z[y == c].mean(axis=0) for c in seen}
    within = sum((z[y == c] - means[c]).T @ (z[y == c] - means[c]) for c in seen) / (len(y) - len(seen))
    found = np.full((len(z), classes), -np.inf)
    for c in seen:
        own = np.cov(z[y == c].T) if (y == c).sum() > 1 else within
        sigma = (1 - h) * own + h * within
        sigma = (1 - g) * sigma + g * np.trace(sigma) / d * np.eye(d)
        gap = z - means[c]
        found[:, c] = -0.5 * np.einsum("nd,de,ne->n", gap, np.linalg.inv(sigma), gap)
        found[:, c] -= 0.5 * np.linalg.slogdet(sigma)[1] + np.log(len(seen))
    return found


def solved(z: np.ndarray, y: np.ndarray, classes: int, h: float, g: float, prior: str = "uniform") -> np.ndarray:
    """Logits of the solution in float64, before it is stored."""
    means, roots, bias = quadratic.discriminant(gaussian.moments(z, y, classes), h, g, prior)  # type: ignore[arg-type]
    d = z.shape[1]
    upper = np.triu(gaussian.unpack(roots, d))
    return -0.5 * (np.einsum("ncd,cde->nce", z[:, None] - means, upper) ** 2).sum(axis=2) + bias


@pytest.mark.parametrize(("h", "g"), [(0.7, 0.2), (0.0, 0.5), (1.0, 0.1), (0.4, 1.0)])
def test_logits_are_those_of_gaussians(h: float, g: float) -> None:
    z, y = together(random_data(1))
    z, y = np.vstack([z, z[:1] + 3]), np.append(y, 4)  # a class of one row
    np.testing.assert_allclose(solved(z, y, 5, h, g), logits(z, y, 5, h, g), atol=1e-9)


@pytest.mark.parametrize("prior", ["uniform", "pooled"])
def test_with_the_common_covariance_it_is_lda(prior: str) -> None:
    """Up to one term that all classes have in common, to 1e-9 in float64."""
    z, y = together(random_data(1))
    found = sums.FeatureSums(4, 5)
    found.update(torch.from_numpy(z), torch.from_numpy(y))
    arrays = found.arrays()
    rows = sums.discriminant(gaussian.unpack(arrays["a"], 6), arrays["b"], 0.1, prior)  # type: ignore[arg-type]
    gap = solved(z, y, 4, 1.0, 0.1, prior) - (z @ rows[:, :-1].T + rows[:, -1])
    np.testing.assert_allclose(np.ptp(gap, axis=1), 0, atol=1e-9)


def test_one_row_of_each_class_has_no_spread() -> None:
    z, y = np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([0, 1])
    np.testing.assert_allclose(np.ptp(solved(z, y, 2, 0.7, 0.2)[0]), 2.5, atol=1e-12)


def test_equal_rows_of_a_class_have_the_spread_within_all_classes() -> None:
    z, y = together(random_data(1))
    z, y = np.vstack([z, np.full((3, 5), 2.0)]), np.append(y, [4] * 3)
    equal, one = (quadratic.discriminant(gaussian.moments(z[:n], y[:n], 5), 0.0, 0.5, "uniform") for n in (None, -2))
    factor = np.sqrt((len(y) - 5) / (len(y) - 7))  # the scatter within classes is the same, its divisor is not
    np.testing.assert_allclose(equal[1][4], factor * one[1][4], rtol=1e-12)


@pytest.mark.parametrize("text", ["qda", "qda scale=none share=0.3 shrink=0.4", "qda personal=true prior=pooled"])
def test_a_federation_stores_uses_and_exports_the_head_of_all_rows(text: str, tmp_path: Path, tiny: Tiny) -> None:
    place = union(tmp_path / "f.npz", [160, 120, 80, 60], width=6)
    run = on_features(tiny, place, text)
    _, hparams = registry.configured("qda", text.partition(" ")[2])
    with np.load(place) as found:
        x, y, train = found["x"], found["y"], found["split"] == "train"
        site = found["client"]
    z, f = x.astype(float), run.summary["calibration"]["scale"]
    means, roots, bias = quadratic.discriminant(
        gaussian.moments(z[train], y[train], 4), hparams.share, hparams.shrink, hparams.prior
    )
    shared, own = heads(run)
    np.testing.assert_allclose(shared["head.weight"], means, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(shared["head.factor"], f**0.5 * roots, rtol=2e-4, atol=1e-5)
    upper = np.triu(gaussian.unpack(roots, 6))
    wanted = f * (-0.5 * (np.einsum("ncd,cde->nce", z[:, None] - means, upper) ** 2).sum(axis=2) + bias)
    right = (wanted[~train].argmax(axis=1) == y[~train]).mean()
    assert run.summary["accuracy"]["global"]["last"] == pytest.approx(right)
    net = load(run.out)
    assert isinstance(net.model.head, QuadraticHead)
    np.testing.assert_allclose(net.predict(x), torch.from_numpy(wanted).softmax(1).numpy(), atol=1e-4)
    assert exporting.write(net, "pt2", tmp_path / "m.pt2") < 1e-4
    for client, rows in counts(place, 4).items():
        moved = np.zeros(4)
        if hparams.personal:
            total = np.bincount(y[train], minlength=4)
            moved = np.log((rows + 0.75) / (rows.sum() + 3)) - f * np.log((total + 0.75) / (total.sum() + 3))
        np.testing.assert_allclose(own[client]["head.bias"] - f * bias, moved, rtol=1e-4, atol=1e-4)
        kept = predict.read_model(run.out / "models" / "clients" / str(client) / "received.safetensors")
        here = site == client
        assert (kept.predict(x[here]).argmax(axis=1) == (wanted + moved)[here].argmax(axis=1)).mean() > 0.99


def test_a_class_without_rows_never_wins_however_far_a_sample_is(tmp_path: Path, tiny: Tiny) -> None:
    place = union(tmp_path / "f.npz", [80, 40, 40, 6], width=6)
    with np.load(place) as found:
        arrays = dict(found)
    arrays["split"][arrays["y"] == 1] = "test"
    np.savez(place, **arrays)
    run = on_features(tiny, place, "qda personal=true")
    assert run.summary["calibration"]["classes_unseen"] == [1]
    far = 1e4 * np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32)
    with torch.no_grad():
        found = load(run.out).model.head(torch.from_numpy(far)).numpy()
    others = found[:, [0, 2, 3]].astype(float).mean(axis=1)
    np.testing.assert_allclose(found[:, 1] - others, -1e4, rtol=1e-2, atol=1e-5 * np.abs(others).max())
    assert (found.argmax(axis=1) != 1).all()
    _, kept = heads(run)
    assert all(head["head.bias"][1] == 0 and not head["head.factor"][1].any() for head in kept.values())


def test_secure_sums_give_the_same_head(tmp_path: Path, tiny: Tiny) -> None:
    place = union(tmp_path / "f.npz", [160, 120, 80, 60], width=6)
    plain, hidden = (heads(on_features(tiny, place, "qda", secure_sum=s))[0] for s in (False, True))
    for name, array in plain.items():
        np.testing.assert_allclose(hidden[name], array, rtol=1e-4, atol=1e-5)


def test_after_training_the_extractor_stays_as_trained(tiny: Tiny) -> None:
    """The rounds are those of the base; the quadratic head is not trained, so that both scores of a client agree."""
    plain, found = tiny(method="fedavg", alpha=0.3), tiny(method="qda", method_args="base=fedavg", alpha=0.3)
    assert handmade.deterministic(plain.rounds).equals(handmade.deterministic(found.rounds))
    before, after = (read_safetensors(r.out / "models" / "last.safetensors")[0] for r in (plain, found))
    assert all(np.array_equal(before[n], after[n]) for n in before if not n.startswith("head."))
    assert found.summary["accuracy"]["trained"]["last"] == found.summary["accuracy"]["received"]["last"]
    assert found.summary["calibration"]["after"] > found.summary["calibration"]["before"]


def test_heads_and_answers_of_an_unreasonable_size_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "f.npz"
    y = np.arange(800) % 200
    np.savez(place, x=np.ones((800, 384), np.float32), y=y, client=np.arange(800) // 400)
    given = {"method": "qda", "dataset": "npz", "data-dir": str(place), "model": "identity", "partition": "by-client"}
    for args, refused in (("base=none", True), ("base=none force=true", False)):
        with pytest.raises(BadRequest, match="answers of 118 MB and a head of 59 MB") if refused else nullcontext():
            assert run_and_report({**given, "method-args": args}, None, "local", dry_run=True) == 0


def test_it_is_no_base() -> None:
    outer = registry.get("ccvr")
    with pytest.raises(BadRequest, match="does not leave one"):
        registry.resolve(outer, registry.parse_args(outer, "base=qda"))


def test_sites_do_not_choose_between_quadratic_heads() -> None:
    with pytest.raises(BadRequest, match="qda has no hyperparameter 'choose'") as refused:
        registry.configured("qda", "choose=true")
    assert "\n" not in str(refused.value)
