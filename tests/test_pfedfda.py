"""pFedFDA: worked logits, the rule against Gaussian densities, beta against a slow search, reductions, frozen head."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from clients.pfedfda import GAUSSIANS, PFedFDAClient, PFedFDAHParams
from fedapp import sampling
from fedapp.core import sums
from fedapp.core.adaptation import Gaussians, choose, estimate, folds, log_prior, rule
from fedapp.core.gaussian import pack, unpack
from fedapp.core.sums import FeatureSums, discriminant, nearest_mean
from fedapp.engines.local import RunResult
from fedapp.method import Payload, Reply
from fedapp.models import build_model, selection
from strategies.pfedfda import METHOD, PFedFDA
from tests import handmade
from tests.handmade import refusal
from tests.test_core_gaussian import CLIENTS

Z = [np.array(z, np.float64) for z, _ in CLIENTS]
Y = [np.array(y) for _, y in CLIENTS]
EVERY, LABELS = np.concatenate(Z), np.concatenate(Y)
SHARED = Gaussians(np.array([[2.5, 1.5], [1.2, 5.0], [5, 5]]), np.array([[11.8, -3], [-3, 9]]) / 7)
OWN = Gaussians(np.array([[2, 2], [0.5, 4.5], [5, 5]]), np.array([[1, 0.5], [0.5, 1]]))
PRIOR = log_prior(Y[0], 3, 1e-4)


def logits(rows: np.ndarray, z: Any) -> np.ndarray:
    return np.asarray(z) @ rows[:, :-1].T + rows[:, -1]


# ---- worked numbers ------------------------------------------------------------------------------------------------


def test_worked_shares_and_statistics() -> None:
    np.testing.assert_allclose(np.exp(PRIOR), [0.599920, 0.399980, 0.000100], atol=1e-6)
    np.testing.assert_allclose(PRIOR, [-0.510959, -0.916341, -9.210640], atol=1e-6)
    found = estimate(Z[0], Y[0], SHARED, 2)
    np.testing.assert_allclose(found.mean, OWN.mean, atol=1e-12)
    scatter = 2 * np.array([[1, 0.5], [0.5, 1]]) + np.array([[0.5, 0.5], [0.5, 0.5]])
    np.testing.assert_allclose(found.cov, scatter / 4 + np.eye(2), atol=1e-12)


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        ((1, 1), [3.489174, -0.749135, -9.210640]),
        ((0, 0), [5.030422, 3.938727, -8.706587]),
        ((0.5, 0.5), [4.065938, 2.494634, -8.884605]),
        ((0.25, 0.75), [3.280329, 1.406902, -8.999400]),
    ],
)
def test_worked_logits(beta: tuple[float, float], expected: list[float]) -> None:
    got = logits(rule(OWN.mixed(SHARED, beta), PRIOR, 1e-4), [2, 3])
    np.testing.assert_allclose(got, expected, atol=1e-6)


# ---- oracles -------------------------------------------------------------------------------------------------------


def slow_estimate(z: np.ndarray, y: np.ndarray, shared: Gaussians, least: int) -> Gaussians:
    """Means and covariance sample by sample; the covariance has the identity of the authors' code added."""
    means, apart = shared.mean.copy(), []
    for c in range(len(means)):
        rows = [row for row, label in zip(z, y) if label == c]
        if len(rows) >= least:
            means[c] = sum(rows) / len(rows)
            apart += [row - means[c] for row in rows]
    return Gaussians(means, np.eye(z.shape[1]) + sum(np.outer(a, a) for a in apart) / (len(apart) - 1))


def test_the_rule_is_the_log_density_of_each_gaussian_times_its_share_but_for_a_constant() -> None:
    rng = np.random.default_rng(0)
    root = rng.normal(size=(4, 4))
    of, prior = Gaussians(rng.normal(size=(3, 4)), root @ root.T + np.eye(4)), np.log([0.7, 0.2, 0.1])
    sigma = 0.9 * of.cov + 0.1 * np.trace(of.cov) / 4 * np.eye(4)
    z = rng.normal(size=(20, 4)) * 3
    dense = np.array([
        [-0.5 * (x - m) @ np.linalg.inv(sigma) @ (x - m) + p for m, p in zip(of.mean, prior)] for x in z
    ])  # fmt: skip
    apart = logits(rule(of, prior, 0.1), z) - dense
    np.testing.assert_allclose(apart, apart[:, :1] @ np.ones((1, 3)), atol=1e-9)


def test_beta_is_the_smallest_cross_entropy_on_held_out_halves_of_a_slow_search() -> None:
    rng = np.random.default_rng(8)
    y = np.repeat([0, 1, 2], [6, 4, 1])  # halves of 5 and 6 samples
    z = rng.normal(size=(11, 3)) @ rng.normal(size=(3, 3)) + 1.5 * np.eye(3)[y]
    shared = Gaussians(np.eye(3) + rng.normal(size=(3, 3)), 2 * np.eye(3))
    prior = log_prior(y, 3, 0.05)
    got = choose(z, y, shared, prior, 0.05, 2, np.random.default_rng(7))
    second = folds(y, np.random.default_rng(7))
    best = (np.inf, (0.0, 0.0))
    tenths = [k / 10 for k in range(11)]
    for a in tenths:
        for b in tenths:
            total = 0.0
            for here in (second, ~second):
                own = slow_estimate(z[~here], y[~here], shared, 2)
                out = logits(rule(own.mixed(shared, (a, b)), prior, 0.05), z[here])
                total -= sum(float(row[k] - np.log(np.exp(row).sum())) for row, k in zip(out, y[here]))
            if total < best[0] - 1e-9:
                best = (total, (a, b))
    assert tuple(got) == pytest.approx(best[1]) and best[1] not in ((0, 0), (1, 1))


def test_each_covariance_is_factorised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    solve, seen = sums._solve, list[int]()
    monkeypatch.setattr(sums, "_solve", lambda matrix, rows: (seen.append(len(rows)), solve(matrix, rows))[1])
    y, shared = np.repeat([0, 1], 8), Gaussians(np.eye(2), np.eye(2))
    choose(np.eye(2)[y], y, shared, log_prior(y, 2, 0.05), 0.05, 2, np.random.default_rng(0))
    assert seen == [4] * 22  # 2 folds, 11 covariances; the means of both ends


def test_folds_halve_every_class() -> None:
    y = np.repeat([0, 1, 2, 3], [7, 4, 1, 9])
    second = folds(np.random.default_rng(0).permutation(y), np.random.default_rng(1))
    assert second.sum() == 10 and len(second) == 21
    shuffled = np.random.default_rng(0).permutation(y)
    for c, n in enumerate((7, 4, 1, 9)):
        assert second[shuffled == c].sum() in (n // 2, (n + 1) // 2)
    assert not np.array_equal(second, folds(shuffled, np.random.default_rng(2)))
    assert folds(np.zeros(1, np.int64), np.random.default_rng(0)).tolist() == [False]


# ---- reductions ----------------------------------------------------------------------------------------------------


def test_beta_zero_is_the_lda_head_with_the_own_prior_and_equal_spheres_are_the_nearest_mean() -> None:
    sums = FeatureSums(3, 2)
    sums.update(torch.from_numpy(EVERY), torch.from_numpy(LABELS))
    sent = sums.arrays()
    uniform = discriminant(unpack(sent["a"], 3), sent["b"], 1e-4, "uniform")
    shared = estimate(EVERY, LABELS, SHARED, 1)
    shared = Gaussians(shared.mean, (shared.cov - np.eye(2)) * (len(EVERY) - 1) / (len(EVERY) - 3))
    ours = rule(OWN.mixed(shared, (0, 0)), PRIOR, 1e-4)
    np.testing.assert_allclose(ours[:, :-1], uniform[:, :-1], atol=1e-9)
    np.testing.assert_allclose(ours[:, -1], uniform[:, -1] + np.log(3) + PRIOR, atol=1e-9)
    spheres = rule(Gaussians(shared.mean, np.eye(2)), np.zeros(3), 1e-4)
    np.testing.assert_allclose(spheres, nearest_mean(sent["b"], "euclidean"), atol=1e-12)
    flat = rule(Gaussians(shared.mean, np.zeros((2, 2))), np.zeros(3), 1e-4)
    np.testing.assert_allclose(flat, spheres, atol=1e-12, err_msg="without any spread it is the identity")


def test_own_statistics_of_clients_with_equal_shares_average_to_the_pooled_means() -> None:
    rng = np.random.default_rng(0)
    sizes, y = (6, 12, 30), np.repeat(np.arange(3), 1)
    parts = [(rng.normal(size=(3 * n, 2)), np.repeat(y, n)) for n in sizes]
    means = [estimate(z, labels, SHARED, 2).mean for z, labels in parts]
    pooled = estimate(np.concatenate([z for z, _ in parts]), np.concatenate([k for _, k in parts]), SHARED, 2).mean
    np.testing.assert_allclose(sum(n * m for n, m in zip(sizes, means)) / sum(sizes), pooled, atol=1e-12)


# ---- missing classes and edges -------------------------------------------------------------------------------------


def test_a_class_with_too_few_samples_is_the_global_one_and_has_no_part_in_the_spread() -> None:
    one = estimate(Z[1], Y[1], SHARED, 2)
    np.testing.assert_array_equal(one.mean, [SHARED.mean[0], [1, 6], SHARED.mean[2]])
    np.testing.assert_allclose(one.cov, [[3, 0], [0, 1]], atol=1e-12)
    none = estimate(Z[2], Y[2], SHARED, 2)
    assert np.array_equal(none.mean, SHARED.mean) and np.array_equal(none.cov, SHARED.cov)
    assert np.array_equal(estimate(Z[2], Y[2], SHARED, 1).cov, np.eye(2))
    beta = choose(Z[2], Y[2], SHARED, log_prior(Y[2], 3, 1e-4), 1e-4, 2, np.random.default_rng(0))
    assert beta.tolist() == [0, 0], "where the data say nothing the global Gaussians stay"


def payload(task: Any, shared: Gaussians | None = None, seed: int = 9) -> Payload:
    model = build_model(task.model, num_classes=task.num_classes, shape=(1, 8, 8), seed=seed)
    c, d = task.num_classes, model.width
    shared = shared or Gaussians(np.random.default_rng(0).random((c, d)), np.eye(d))
    sent = {"mean": shared.mean.astype(np.float32), "cov": pack(shared.cov).astype(np.float32)}
    body = {n: a for n, a in selection.everything(model).items() if n.startswith("features.")}
    return Payload(common={**body, **{GAUSSIANS + n: a for n, a in sent.items()}})


def test_a_round_trains_the_extractor_under_the_global_rule_and_predicts_with_the_adapted_one() -> None:
    task = handmade.one_batch_task(lr=0.01)
    sent = payload(task)
    for beta in (0.0, 0.7, 1.0):
        one = PFedFDAClient(task, METHOD, PFedFDAHParams(beta=beta))
        one.restore(1, sent)
        one.receive(sent)
        y, x = task.y_train, handmade.pixels(task)
        shared = Gaussians(sent.common[GAUSSIANS + "mean"].astype(np.float64), np.eye(one.model.width))
        prior = log_prior(y.numpy(), 4, 1e-4)
        fixed = torch.from_numpy(rule(shared, prior, 1e-4).astype(np.float32)).double()

        def loss(model: Any, fixed: Any = fixed, x: Any = x, y: Any = y) -> torch.Tensor:
            return handmade.cross_entropy(model.represent(x) @ fixed[:, :-1].T + fixed[:, -1], y)

        start = copy.deepcopy(one.model)
        start.head.requires_grad_(False)
        trained = handmade.descend(start, loss, task)
        arrays, n, metrics = PFedFDAClient(task, METHOD, PFedFDAHParams(beta=beta)).train_round(sent, 1)
        body = {name: a for name, a in arrays.items() if name.startswith("features.")}
        handmade.assert_close(body, trained, "features.", atol=2e-5)
        own = estimate(trained.represent(x).detach().numpy(), y.numpy(), shared, 2).mixed(shared, (beta, beta))
        np.testing.assert_allclose(arrays[GAUSSIANS + "mean"], own.mean, atol=1e-4)
        np.testing.assert_allclose(unpack(arrays[GAUSSIANS + "cov"], one.model.width), own.cov, atol=1e-4)
        assert (metrics["beta-mean"], metrics["beta-cov"]) == (beta, beta) and n == 12
        assert not any(name.startswith("head.") for name in arrays)
        again = PFedFDAClient(task, METHOD, PFedFDAHParams(beta=beta))
        again.train_round(sent, 1)
        head = rule(Gaussians(own.mean, own.cov), prior, 1e-4)
        np.testing.assert_allclose(again.model.head.bias.detach(), head[:, -1], rtol=2e-2, atol=2e-2)


def test_representations_that_vary_little_do_not_make_the_head_large() -> None:
    """No eigenvalue of a covariance that leaves a client is below 1, so no row of the head is longer than its mean."""
    rng = np.random.default_rng(0)
    y, shared = np.repeat([0, 1, 2], 20), Gaussians(rng.normal(size=(3, 8)), np.eye(8))
    z = shared.mean[y] + 1e-3 * rng.normal(size=(60, 8))
    own = estimate(z, y, shared, 2)
    slow = slow_estimate(z, y, shared, 2)
    np.testing.assert_allclose(own.cov, slow.cov, atol=1e-12)
    assert np.linalg.eigvalsh(own.cov).min() >= 1 - 1e-12
    weights = rule(own.mixed(shared, (1, 1)), np.zeros(3), 1e-4)[:, :-1]
    assert (np.linalg.norm(weights, axis=1) <= 1.001 * np.linalg.norm(own.mean, axis=1)).all()
    task = handmade.digit_tasks(1)[0]
    sent = payload(task)
    for beta in (0.0, 1.0):
        arrays, _, _ = PFedFDAClient(task, METHOD, PFedFDAHParams(beta=beta)).train_round(sent, 1)
        cov = unpack(arrays[GAUSSIANS + "cov"].astype(np.float64), 64)
        assert np.linalg.eigvalsh(cov).min() >= 1 - 1e-5


def test_received_is_the_adapted_rule_on_the_received_extractor_and_folds_depend_on_the_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = handmade.digit_tasks(1)[0]
    sent = payload(task)
    one = PFedFDAClient(task, METHOD, PFedFDAHParams())
    one.round = 3
    one.restore(3, sent)
    one.receive(sent)
    z, y = one.representations().double().numpy(), task.y_train.numpy()
    prior = log_prior(y, 10, 1e-4)
    beta = choose(z, y, one.shared, prior, 1e-4, 2, sampling.rng(0, "folds", 3, 0))
    own = estimate(z, y, one.shared, 2).mixed(one.shared, beta.tolist())
    expected = rule(own, prior, 1e-4)
    np.testing.assert_allclose(one.model.head.weight.detach(), expected[:, :-1], rtol=1e-5)
    assert one.after_training(sent)[1] == {"beta-mean": beta[0], "beta-cov": beta[1]} and 0 < beta.max() <= 1
    assert np.linalg.eigvalsh(own.cov).min() > -1e-9
    drawn: list[tuple[Any, ...]] = []
    monkeypatch.setattr(sampling, "rng", lambda *words: drawn.append(words) or np.random.default_rng(0))  # type: ignore[func-returns-value]
    one.adapt()
    assert drawn == [(0, "folds", 3, 0)], "seed, round and client"
    one.before_training(sent)
    fixed = rule(one.shared, prior, 1e-4)
    np.testing.assert_allclose(one.model.head.weight.detach(), fixed[:, :-1], rtol=1e-5)


# ---- the server ----------------------------------------------------------------------------------------------------


def test_the_server_averages_by_samples_and_refuses_what_does_not_fit() -> None:
    server = PFedFDA(METHOD, PFedFDAHParams())
    context = handmade.context({"features.w": np.ones(2, np.float32)}, num_classes=3, width=2)
    state = server.init(context)
    start = state["model"]
    assert (
        np.array_equal(unpack(start[GAUSSIANS + "cov"], 2), np.eye(2))
        and len(np.unique(start[GAUSSIANS + "mean"])) == 6
    )
    other = PFedFDA(METHOD, PFedFDAHParams()).init(handmade.context({}, seed=1, num_classes=3, width=2))
    assert not np.array_equal(other["model"][GAUSSIANS + "mean"], start[GAUSSIANS + "mean"])
    sent = [
        Reply(k, n, {name: np.full_like(a, v) for name, a in start.items()}, {})
        for k, (n, v) in enumerate(((10, 1.0), (30, 3.0)))
    ]
    assert [refusal(server, state, r) for r in sent] == [None, None]
    after = server.aggregate(state, 1, iter(sent))
    assert all(np.allclose(a, 2.5) for a in after["model"].values())
    assert server.send(state, 1, 0).common.keys() == start.keys() and server.global_arrays(state) is None
    good = sent[0].arrays
    negative = {**good, GAUSSIANS + "cov": np.array([1, 0, -1], np.float32)}
    assert "negative" in str(refusal(server, state, replace(sent[0], arrays=negative)))
    off = {**good, GAUSSIANS + "cov": np.array([1, -5, 1], np.float32)}
    assert "no representations" in str(refusal(server, state, replace(sent[0], arrays=off)))
    # A client that keeps an indefinite median of covariances returns it.
    state["model"] = {**state["model"], GAUSSIANS + "cov": off[GAUSSIANS + "cov"]}
    assert refusal(server, state, replace(sent[0], arrays=off)) is None
    half = {**good, GAUSSIANS + "cov": np.array([1, 0.99951, 0.999], np.float16).astype(np.float32)}
    assert refusal(server, state, replace(sent[0], arrays=half)) is None


def test_a_federation_with_absent_clients_and_its_columns(tiny: Callable[..., RunResult]) -> None:
    result = tiny(method="pfedfda", rounds=3, clients=4, fraction_train=0.5, partition="pathological")
    table = result.clients
    assert table["beta_mean"].between(0, 1).all() and table["beta_cov"].between(0, 1).all()
    assert result.summary["bytes_up"] == result.summary["bytes_down"]
    assert result.final["trained_accuracy"].mean() > 0.7 and np.isfinite(result.rounds["train_loss"]).all()
