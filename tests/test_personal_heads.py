"""Heads in closed form, fitted to each client's class shares: the terms of each head, reductions, unequal unions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapp import registry
from fedapp.engines.local import RunResult
from fedapp.learning.state import read_safetensors
from fedapp.method import Reply
from fedapp.results import predict
from strategies.fed3r import Fed3RHParams
from strategies.lda import LDAHParams

W, B = "head.weight", "head.bias"
Tiny = Callable[..., RunResult]
HEADS = ["fed3r", "lda", "lda prior=pooled", "fedncm", "fedncm metric=euclidean", "fedcof"]


def union(path: Path, sizes: list[int], width: int = 12, clients: int = 5, spread: float = 1.6, seed: int = 0) -> Path:
    """Write features of classes of these sizes, most rows of a class at few clients, and test rows dealt alike."""
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(len(sizes)), sizes)
    centres = np.random.default_rng(7).normal(size=(len(sizes), width))
    x = centres[y] + spread * rng.normal(size=(len(y), width))
    dealt = rng.dirichlet(np.full(clients, 0.3), size=len(sizes))
    owner = np.array([rng.choice(clients, p=dealt[c]) for c in y])
    split = np.where(np.arange(len(y)) % 3 == 2, "test", "train")
    np.savez(path, x=x.astype(np.float32), y=y, client=owner, split=split)
    return path


def heads(run: RunResult) -> tuple[dict[str, np.ndarray], dict[int, dict[str, np.ndarray]]]:
    """The head of all clients, and that of each client, as they are stored."""
    out = run.out / "models"
    own = {int(p.parent.name): read_safetensors(p)[0] for p in out.glob("clients/*/received.safetensors")}
    return read_safetensors(out / "last.safetensors")[0], own


def on_features(tiny: Tiny, place: Path, text: str, **more: Any) -> RunResult:
    method, _, args = text.partition(" ")
    common = {"dataset": "npz", "clients": 0, "data_dir": str(place), "model": "identity", "keep_models": True}
    return tiny(method=method, method_args=args, rounds=1, **{**common, **more})


def counts(place: Path, classes: int) -> dict[int, np.ndarray]:
    with np.load(place) as arrays:
        train = arrays["split"] == "train"
        owner, y = arrays["client"][train], arrays["y"][train]
    return {int(k): np.bincount(y[owner == k], minlength=classes) for k in np.unique(owner)}


@pytest.mark.parametrize("text", HEADS)
def test_the_bias_of_each_client_has_the_terms_of_its_head(
    text: str, tmp_path: Path, tiny: Tiny, replies: list[tuple[str, Reply]]
) -> None:
    """b_k = f b + log p_k - w log q with m = 3, only where a model is scored and kept; replies are those without it."""
    place = union(tmp_path / "f.npz", [160, 80, 40, 30])
    plain = on_features(tiny, place, text)
    sent = [(kind, {n: a.tobytes() for n, a in reply.arrays.items()}) for kind, reply in replies]
    replies.clear()
    run = on_features(tiny, place, f"{text} personal=true")
    assert [(kind, {n: a.tobytes() for n, a in reply.arrays.items()}) for kind, reply in replies] == sent
    (shared, own), (before, _) = heads(run), heads(plain)
    assert all(np.array_equal(shared[n], before[n]) for n in (W, B)), "the head of all clients is the plain one"
    n, f = counts(place, 4), run.summary["calibration"]["scale"]
    total = np.sum(list(n.values()), axis=0)
    log_q = np.log((total + 3 / 4) / (total.sum() + 3))
    weight = {"fed3r": 1.0, "lda prior=pooled": f}.get(text, 0.0)
    assert sorted(own) == sorted(n)
    for client, rows in n.items():
        wanted = np.log((rows + 3 / 4) / (rows.sum() + 3)) - weight * log_q
        np.testing.assert_allclose(own[client][B].astype(float) - shared[B], wanted, atol=2e-5)
        np.testing.assert_array_equal(own[client][W], shared[W])
    said = run.summary["personal"]
    assert said["unadjusted"]["local"] == pytest.approx(plain.summary["accuracy"]["received"]["last"], abs=1e-12)
    assert said["adjusted"]["local"] == pytest.approx(run.summary["accuracy"]["received"]["last"], abs=1e-12)
    with np.load(place) as arrays:
        x = arrays["x"]
    net = predict.read_model(run.out / "models" / "clients" / "0" / "received.safetensors")
    logits = x @ own[0][W].T + own[0][B]
    assert (net.predict(x).argmax(axis=1) == logits.argmax(axis=1)).all()


def test_the_pooled_prior_leaves_a_discriminant_as_far_as_its_factor_kept_it(
    tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One class has one row, and f is below a half, since a twentieth of the labels is wrong.

    Decisions are those of the head without any prior. With the whole log q instead of f log q they are not.
    """
    place = union(tmp_path / "f.npz", [1, 40, 300, 600], spread=0.6)
    with np.load(place) as found:
        arrays = dict(found)
    wrong = np.flatnonzero(np.arange(len(arrays["y"])) % 20 == 5)
    arrays["y"][wrong] = 1 + arrays["y"][wrong] % 3
    np.savez(place, **arrays)
    uniform = on_features(tiny, place, "lda personal=true scale=none")
    base, n = heads(uniform)[0][B].astype(float), counts(place, 4)
    gaps = []
    for weight in (LDAHParams.strength, lambda self, scale: 1.0):
        monkeypatch.setattr(LDAHParams, "strength", weight)
        pooled = on_features(tiny, place, "lda personal=true prior=pooled")
        f, (_, own) = pooled.summary["calibration"]["scale"], heads(pooled)
        assert f < 0.5
        gaps += [max(np.ptp(own[k][B] - f * base - np.log((rows + 3 / 4) / (rows.sum() + 3))) for k, rows in n.items())]
    assert gaps[0] < 0.6 * 0.5 < 2 < gaps[1], "but for the three rows that q is smoothed with"


@pytest.mark.parametrize("text", ["fed3r", "lda", "lda prior=pooled", "fedncm", "fedcof"])
def test_with_equal_shares_everywhere_it_is_the_plain_head(text: str, tmp_path: Path, tiny: Tiny) -> None:
    rng = np.random.default_rng(0)
    y, client = np.tile(np.arange(4), 45), np.repeat(np.arange(3), 60)
    x = 2 * np.random.default_rng(7).normal(size=(4, 12))[y] + rng.normal(size=(180, 12))
    split = np.where(np.arange(180) // 4 % 3 == 2, "test", "train")
    np.savez(tmp_path / "f.npz", x=x.astype(np.float32), y=y, client=client, split=split)
    shared, own = heads(on_features(tiny, tmp_path / "f.npz", f"{text} personal=true"))
    for head in own.values():
        np.testing.assert_allclose(np.ptp(head[B] - shared[B]), 0, atol=1e-5)
        np.testing.assert_array_equal(head[W], shared[W])


def test_a_class_without_rows_keeps_its_bias(tmp_path: Path, tiny: Tiny) -> None:
    place = union(tmp_path / "f.npz", [160, 80, 40, 6])
    with np.load(place) as found:
        arrays = dict(found)
    arrays["split"][arrays["y"] == 1] = "test"
    np.savez(place, **arrays)
    shared, own = heads(on_features(tiny, place, "lda personal=true"))
    for head in own.values():
        assert head[B][1] == shared[B][1] < -9_000


def test_the_shares_of_all_clients_leave_the_ridge_head_of_an_unequal_union(
    tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Class sizes that fall by a factor of 20: without the second term the common classes count twice."""
    gains = []
    for seed in range(3):
        sizes = [int(900 / 20 ** (c / 9)) for c in range(10)]
        place = union(tmp_path / f"{seed}.npz", sizes, clients=8, spread=1.4, seed=seed)
        scores = []
        for weight in (1.0, 0.0):
            with monkeypatch.context() as patch:
                patch.setattr(Fed3RHParams, "strength", lambda self, scale, w=weight: w)
                scores.append(on_features(tiny, place, "fed3r personal=true").summary["accuracy"]["received"]["last"])
        gains.append(scores[0] - scores[1])
    assert np.mean(gains) >= 0.01


def test_a_factor_that_was_not_fitted_is_warned_of(tmp_path: Path, tiny: Tiny) -> None:
    place = union(tmp_path / "f.npz", [60, 30])
    for text, warned in (
        ("lda scale=none personal=true", True),
        ("lda scale=trained personal=true", True),
        ("lda personal=true", False),
        ("lda scale=none", False),
    ):
        found = on_features(tiny, place, text).summary
        assert any("no factor was fitted" in line for line in found.get("warnings", [])) is warned
    hparams = registry.configured("lda", "personal=true base=fedavg")[1]
    assert hparams.model_dump()["scale"] == "fit"
