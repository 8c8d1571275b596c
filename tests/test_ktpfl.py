"""KT-pFL: worked numbers, the gradient by autograd, targets aligned with images, reduction, partial participation."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from clients.base import FedClient
from clients.ktpfl import KTpFLClient, KTpFLHParams, KTpFLWeightsClient, distillation_loss
from fedapp import config as configuration
from fedapp import registry
from fedapp.data.transforms import normalise
from fedapp.engines.local import RunResult, run
from fedapp.errors import BadRequest
from fedapp.learning.training import Batch
from fedapp.method import Arrays, ClientInfo, Payload, Reply, ServerContext, ServerState
from fedapp.models import build_model, selection
from fedapp.tasks import simulated as tasks
from fedapp.transport.traffic import RoundFailed
from strategies.ktpfl import METHOD, KTpFL, gradient, mixing, self_scaled
from tests.handmade import (
    DIGITS_BYTES,
    context,
    equal,
    full_batch,
    images,
    one_batch_task,
    random_model,
    steps_by_hand,
)

WORKED = np.array(
    [
        [[0.7, 0.2, 0.1], [0.6, 0.3, 0.1]],
        [[0.1, 0.8, 0.1], [0.2, 0.5, 0.3]],
        [[0.3, 0.3, 0.4], [0.1, 0.2, 0.7]],
    ]
)
PORT = {"step": "fixed", "coefficients": "free"}
"""The rule of FedClassAvg's port, to which the worked numbers belong."""
TARGET_0 = [[0.367680, 0.432347, 0.199618], [0.300898, 0.333076, 0.365671]]


def strategy(clients: int = 3, classes: int = 3, **hparams: Any) -> tuple[KTpFL, ServerState]:
    public = {"public-checksum": 1, "public-images": 2, "public-size": 2 * 32 * 32 * 3}
    infos = tuple(ClientInfo(k, 5, "m", classes, {}, public) for k in range(clients))
    made = KTpFL(METHOD, KTpFLHParams(**hparams))
    context = ServerContext(
        0, infos, classes, 9, {}, lambda k: {}, lambda *a: np.random.default_rng(0), shape=(3, 32, 32)
    )
    return made, made.init(context)


def reply(client: int, soft: Any, checksum: int = 1) -> Reply:
    return Reply(client, 5, {"soft": np.array(soft, np.float32)}, {"public-checksum": checksum})


def replies(soft: np.ndarray = WORKED) -> list[Reply]:
    return [reply(k, s) for k, s in enumerate(soft)]


def test_worked_round() -> None:
    server, state = strategy(**PORT)
    assert all(server.check(state, r) is None for r in replies())
    state = server.aggregate(state, 1, iter(replies()))
    np.testing.assert_allclose(
        state["c"],
        [[0.335467, 0.332, 0.332178], [0.3324, 0.335333, 0.333111], [0.332133, 0.332667, 0.334711]],
        atol=1e-6,
    )
    np.testing.assert_allclose(state["c"].sum(axis=1), [0.999644, 1.000844, 0.999511], atol=1e-6)
    np.testing.assert_allclose(server.send(state, 2, 0).arrays["target"], TARGET_0, atol=1e-6)


def test_worked_softmax_and_five_large_steps() -> None:
    server, state = strategy(step="fixed")
    state = server.aggregate(state, 1, iter(replies()))
    np.testing.assert_allclose(state["c"][0], [0.337097, 0.331304, 0.331599], atol=1e-6)
    server, state = strategy(**PORT, lr_c=1.0)
    for server_round in range(1, 6):
        state = server.aggregate(state, server_round, iter(replies()))
    np.testing.assert_allclose(state["c"][0], [0.505519, 0.236219, 0.247307], atol=1e-6)


def test_worked_distillation_losses() -> None:
    logits = torch.tensor([[2, 0.5, -1], [0.3, 0.2, 0.1]])
    target = torch.tensor(TARGET_0)
    mse = distillation_loss(logits, target, KTpFLHParams(distil="mse"))
    assert float(mse) == pytest.approx(0.045853, abs=1e-6)
    plain = distillation_loss(logits, target, KTpFLHParams(scale=False))
    assert float(plain) == pytest.approx(0.016314, abs=1e-6)
    assert float(plain) / 3 == pytest.approx(0.005438, abs=1e-6)
    assert float(distillation_loss(logits, target, KTpFLHParams())) == pytest.approx(100 * float(plain), rel=1e-5)


@pytest.mark.parametrize("rho", [0.0, 0.7])
def test_the_gradient_is_that_of_the_objective(rho: float) -> None:
    rng = np.random.default_rng(1)
    soft = rng.dirichlet(np.ones(4), (5, 6)).reshape(5, -1)
    start = rng.dirichlet(np.ones(5), 5)
    c, s = torch.from_numpy(start).requires_grad_(), torch.from_numpy(soft)
    objective = torch.zeros((), dtype=torch.float64)
    for k in range(5):
        t_k = sum(c[k, j] * s[j] for j in range(5))
        objective = objective + (s[k] - t_k).square().mean() + rho * (c[k] - 1 / 5).square().mean()
    objective.backward()
    np.testing.assert_allclose(gradient(start, start @ soft, soft, rho, 5), c.grad, atol=1e-12)


def recorded(rounds: int, clients: int = 10, images: int = 60, classes: int = 10) -> list[np.ndarray]:
    """What clients with two or three classes each would predict at temperature 10, round by round, (K, P, C)."""
    rng = np.random.default_rng(7)
    favour = np.stack([np.isin(np.arange(classes), [k, (k + 1) % classes, 3]) for k in range(clients)])
    picture = rng.normal(size=(images, classes))
    found = []
    for t in range(1, rounds + 1):
        logits = 2 * t * favour[:, None] + 2 * picture + rng.normal(size=(clients, images, classes))
        odds = np.exp(logits / 10)
        found.append((odds / odds.sum(axis=2, keepdims=True)).astype(np.float32))
    return found


def released(c: np.ndarray, soft: np.ndarray, rho: float) -> np.ndarray:
    """One update as the authors' code makes it, row by row: gradients by autograd, rates by a loop."""
    clients = len(c)
    new = np.zeros_like(c)
    for k in range(clients):
        row = torch.tensor(c[k], dtype=torch.float64, requires_grad=True)
        teacher = sum(row[j] * torch.from_numpy(soft[j]).double() for j in range(clients))
        uniform = torch.full((clients,), 1 / clients, dtype=torch.float64)
        loss = F.mse_loss(torch.from_numpy(soft[k]).double(), teacher) + rho * F.mse_loss(row, uniform)
        loss.backward()
        assert row.grad is not None
        average, rate = float(row.grad.abs().sum()) / clients, 1.0
        for _ in range(5):
            if average > 0.01:
                average, rate = average / 5, rate / 5
            if average < 0.01:
                average, rate = average * 5, rate * 5
        moved = [5 * float(w - rate * g) for w, g in zip(row, row.grad, strict=True)]
        total = sum(math.exp(m) for m in moved)
        new[k] = [math.exp(m) / total for m in moved]
    return new


def test_on_recorded_predictions_the_coefficients_move_as_in_the_released_code() -> None:
    server, state = strategy(clients=10, classes=10)
    c = np.full((10, 10), 0.1)
    for t, soft in enumerate(recorded(6), start=1):
        state["public"] = [1, soft.shape[1]]
        state = server.aggregate(state, t, iter(replies(soft)))
        c = released(c, soft, 0.7)
        np.testing.assert_allclose(state["c"], c, rtol=0, atol=1e-9)
        np.testing.assert_allclose(
            server.send(state, t + 1, 4).arrays["target"], np.tensordot(c[4], soft, 1), atol=1e-6
        )
        if t == 1:
            assert c.min() < 0.09 and c.max() > 0.13, "one step leaves 1/K"
    alike, other = np.mean([c[k, (k + 1) % 10] for k in range(10)]), np.mean([c[k, (k + 5) % 10] for k in range(10)])
    assert alike > other, "clients that share a class listen to each other more"


def test_a_constant_rate_leaves_the_recorded_predictions_mixed_evenly() -> None:
    """Which is why the released code scales its step."""
    for coefficients in ("free", "softmax"):
        server, state = strategy(clients=10, classes=10, step="fixed", coefficients=coefficients)
        for t, soft in enumerate(recorded(6), start=1):
            state = server.aggregate(state, t, iter(replies(soft)))
        assert np.abs(state["c"] - 0.1).max() < 0.002


def test_a_self_scaled_step_is_the_released_loop_at_every_scale() -> None:
    rng = np.random.default_rng(3)
    for size in 10.0 ** np.arange(-9, 5):
        rows = size * rng.normal(size=(20, 7))
        for row, rate in zip(rows, self_scaled(rows)[:, 0], strict=True):
            average, slow = float(np.abs(row).sum()) / 7, 1.0
            for _ in range(5):
                if average > 0.01:
                    average, slow = average / 5, slow / 5
                if average < 0.01:
                    average, slow = average * 5, slow * 5
            assert rate == pytest.approx(slow, rel=1e-12)
    assert self_scaled(np.zeros((1, 3)))[0, 0] == 5**5


@pytest.mark.parametrize("coefficients", ["free", "rows", "softmax"])
@pytest.mark.parametrize("step", [{"step": "self-scaled"}, *({"step": "fixed", "lr_c": x} for x in (0.02, 1, 50, 1e6))])
def test_targets_are_never_negative_and_losses_always_numbers(step: dict[str, Any], coefficients: str) -> None:
    """Clients that are sure of different classes push each other's coefficients below zero."""
    sure = [np.eye(3)[[k, k]] for k in range(3)]
    server, state = strategy(clients=4, coefficients=coefficients, rho=5.0, **step)
    hparams = KTpFLHParams(temperature=1.0)
    for t in range(1, 13):
        here = [0, 1] if t < 3 else [t % 3, (t + 1) % 3] if t < 6 else [0, 1, 2]
        state = server.aggregate(state, t, iter([reply(k, sure[k] if t % 2 else WORKED[k]) for k in here]))
        for k in range(4):
            target = torch.from_numpy(server.send(state, t + 1, k).arrays["target"])
            assert (target >= 0).all() and (target.sum(dim=1) > 0).all()
            logits = torch.zeros(2, 3, requires_grad=True)
            distillation_loss(logits, target, hparams).backward()
            assert logits.grad is not None and logits.grad.isfinite().all()


def test_a_negative_coefficient_becomes_zero_and_a_row_without_weight_starts_again() -> None:
    for coefficients in ("free", "rows"):
        server, state = strategy(step="fixed", coefficients=coefficients, lr_c=8.0)
        state = server.aggregate(state, 1, iter(replies()))
        flat = WORKED.reshape(3, -1)
        even = np.full((3, 3), 1 / 3)
        moved = np.maximum(even - 8.0 * gradient(even, even @ flat, flat, 0.7, 3), 0)
        assert (moved == 0).any(), "the step must be large enough"
        expected = moved / moved.sum(axis=1, keepdims=True) if coefficients == "rows" else moved
        np.testing.assert_allclose(state["c"], expected, atol=1e-6)
    server, state = strategy(**PORT, lr_c=1.0)
    state["c"][0] = 4.0  # far above every target: the gradient pushes all of them below zero
    assert (server.aggregate(state, 1, iter(replies()))["c"][0] == 1 / 3).all()


def test_a_row_with_little_weight_left_is_kept() -> None:
    server, state = strategy(step="fixed", coefficients="rows", lr_c=1e-12)
    state["c"][0] = [0.0006, 0.0005, 0.0001]
    after = server.aggregate(state, 1, iter(replies()))["c"]
    np.testing.assert_allclose(after[0], [0.5, 5 / 12, 1 / 12], atol=1e-6)


def test_a_rate_without_effect_is_warned_of() -> None:
    assert METHOD.warn is not None
    assert "step=fixed" in str(METHOD.warn(KTpFLHParams(lr_c=0.5), "sgd", "none"))
    for silent in (KTpFLHParams(), KTpFLHParams(step="fixed", lr_c=0.5)):
        assert METHOD.warn(silent, "sgd", "none") is None


@pytest.mark.parametrize("step", ["self-scaled", "fixed"])
def test_rows_sum_to_one_where_asked(step: str) -> None:
    for coefficients in ("rows", "softmax"):
        server, state = strategy(step=step, coefficients=coefficients, lr_c=1.0)
        for server_round in range(3):
            state = server.aggregate(state, server_round, iter(replies()))
        np.testing.assert_allclose(state["c"].sum(axis=1), 1, atol=1e-12)
        np.testing.assert_allclose(server.send(state, 2, 1).arrays["target"].sum(axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("rule", [{}, {**PORT, "lr_c": 0.5}])
def test_equal_clients_stay_equal_and_nothing_is_changed_in_place(rule: dict[str, Any]) -> None:
    server, state = strategy(**rule)
    first = server.aggregate(state, 1, iter(replies(np.stack([WORKED[0]] * 3))))
    assert np.ptp(first["c"]) < 1e-12
    np.testing.assert_allclose(server.send(first, 2, 0).arrays["target"] / first["c"][0].sum(), WORKED[0], atol=1e-6)
    assert (state["c"] == 1 / 3).all() and not state["soft"]
    kept = first["c"].copy()
    server.aggregate(first, 2, iter(replies()))
    assert np.array_equal(first["c"], kept)


def test_clients_that_were_not_drawn_keep_their_last_predictions() -> None:
    server, state = strategy()
    state = server.aggregate(state, 1, iter(replies()))
    partial = server.aggregate(state, 2, iter([reply(1, WORKED[2])]))
    full = server.aggregate(state, 2, iter([reply(0, WORKED[0]), reply(1, WORKED[2]), reply(2, WORKED[2])]))
    assert np.array_equal(partial["c"], full["c"])
    same = server.aggregate(partial, 3, iter([]))
    assert np.array_equal(same["soft"][1], partial["soft"][1])


def test_before_everybody_has_answered_the_step_is_scaled_by_those_who_have() -> None:
    server, state = strategy(clients=4)
    state = server.aggregate(state, 1, iter([reply(0, WORKED[0]), reply(2, WORKED[2])]))
    a, b = WORKED[0].ravel(), WORKED[2].ravel()
    t = (a + b) / 2
    slope = np.array([2 * ((t - a) * a).mean(), 2 * ((t - a) * b).mean()])  # 1/K has no penalty
    rate = 1.0
    while np.abs(rate * slope).mean() > 0.05:
        rate /= 5
    while np.abs(rate * slope).mean() < 0.01:
        rate *= 5
    odds = np.exp(5 * (0.25 - rate * np.array([slope[0], 0, slope[1], 0])))
    np.testing.assert_allclose(state["c"][0], odds / odds.sum(), atol=1e-7)
    assert (state["c"][[1, 3]] == 1 / 4).all()


def test_before_everybody_has_answered_rows_keep_their_mass() -> None:
    server, state = strategy(clients=4, **PORT)
    assert server.send(state, 1, 0).arrays["target"].shape == (0, 3)
    assert server.aggregate(state, 1, iter([])) == state
    state = server.aggregate(state, 1, iter([reply(0, WORKED[0]), reply(2, WORKED[2])]))
    assert (state["c"][1] == 1 / 4).all() and (state["c"][:, 3] == 1 / 4).all()
    c = state["c"]
    mixed = (c[0, 0] * WORKED[0] + c[0, 2] * WORKED[2]) * c[0].sum() / (c[0, 0] + c[0, 2])
    np.testing.assert_allclose(server.send(state, 2, 0).arrays["target"], mixed, atol=1e-6)
    plain = (WORKED[0] + WORKED[2]) / 2
    np.testing.assert_allclose(server.send(state, 2, 3).arrays["target"], plain, atol=1e-6)
    everything = np.arange(4)
    assert mixing(c, everything) is c


def test_a_client_that_joins_gets_a_row_and_a_column() -> None:
    server, state = strategy(clients=2, **PORT, lr_c=0.0)
    state = server.aggregate(state, 1, iter(replies(WORKED[:2])))
    assert server.send(state, 2, 7).arrays["target"] == pytest.approx(WORKED[:2].mean(axis=0))
    state = server.aggregate(state, 2, iter([reply(7, WORKED[2])]))
    assert state["ids"] == [0, 1, 7]
    np.testing.assert_allclose(state["c"], 1 / 3)
    state["c"] = np.array([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])
    grown = server.aggregate(state, 3, iter([reply(4, WORKED[2])]))
    assert grown["ids"] == [0, 1, 4, 7]
    np.testing.assert_allclose(grown["c"][np.ix_([0, 1, 3], [0, 1, 3])], state["c"] * 3 / 4)
    np.testing.assert_allclose(grown["c"][2], 1 / 4)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (reply(1, WORKED[0], checksum=2), "another public set"),
        (reply(1, WORKED[0][:1]), "another public set"),
        (reply(1, WORKED[0] * 2), "probabilities"),
        (reply(1, WORKED[0] - 0.2), "probabilities"),
        (Reply(1, 5, {"soft": WORKED[0]}, {}), "checksum"),
    ],
)
def test_bad_replies_are_refused(bad: Reply, words: str) -> None:
    server, state = strategy()
    assert server.check(state, reply(0, WORKED[0])) is None
    assert words in str(server.check(state, bad))


def test_boundaries_of_probabilities() -> None:
    server, state = strategy()
    good = [[1, 0, 0], [0.5, 0.495, 0]]
    assert server.check(state, reply(0, good)) is None, "half precision on the wire keeps three digits"
    for bad in ([0.5, 0.485, 0], [0.5, 0.515, 0], [1.2, -0.2, 0]):
        assert "probabilities" in str(server.check(state, reply(0, [good[0], bad])))


def test_predictions_are_matched_with_coefficients_whatever_the_order_of_arrival() -> None:
    server, state = strategy(**PORT, lr_c=1.0)
    late = server.aggregate(state, 1, iter([reply(2, WORKED[2])]))
    np.testing.assert_allclose(server.send(late, 2, 0).arrays["target"], WORKED[2], atol=1e-6)
    late["c"] = np.random.default_rng(0).dirichlet(np.ones(3), 3)
    together = server.aggregate({**late, "soft": {}}, 2, iter([reply(0, WORKED[0]), reply(2, WORKED[2])]))
    assert np.array_equal(server.aggregate(late, 2, iter([reply(0, WORKED[0])]))["c"], together["c"])


def test_one_client_alone() -> None:
    server, state = strategy(clients=1)
    state = server.aggregate(state, 1, iter([reply(0, WORKED[0])]))
    np.testing.assert_allclose(server.send(state, 2, 0).arrays["target"], state["c"][0, 0] * WORKED[0], atol=1e-6)


def test_the_mean_weight_of_own_predictions_is_reported() -> None:
    server, state = strategy(**PORT)
    state = server.aggregate(state, 1, iter(replies()))
    assert server.report(state, {})["self_coefficient"] == pytest.approx((0.335467 + 0.335333 + 0.334711) / 3, abs=1e-6)


def test_the_public_set_is_counted() -> None:
    for ship, each in (("indices", 4), ("images", 32 * 32 * 3)):
        server, state = strategy(ship=ship)
        assert server.report(state, {})["public_bytes"] == 0
        state = server.aggregate(state, 1, iter(replies()))
        assert server.report(state, {})["public_images"] == 2
        assert server.report(state, {})["public_bytes"] == 2 * each


def client(model: str = "digits-a", **hparams: Any) -> KTpFLClient:
    config = configuration.from_flat({"method": "ktpfl", "dataset": "digits", "clients": 4, "model": model})
    return KTpFLClient(tasks.simulated_task(config, 1, 4, torch.device("cpu")), METHOD, KTpFLHParams(**hparams))


def no_target() -> Payload:
    return Payload(arrays={"target": np.zeros((0, 10), np.float32)})


def test_predictions_are_in_the_order_of_the_public_set_without_augmentation() -> None:
    made = client(temperature=3.0)
    made.task = replace(made.task, train=made.task.train.replaced(augment="weak"))
    arrays, _, metrics = made.train_round(no_target(), 1)
    made.model.eval()
    for image, row in zip(made.public, arrays["soft"], strict=True):
        z = made.model(normalise(image[None].permute(0, 3, 1, 2), made.task.inputs))
        np.testing.assert_allclose(row, torch.softmax(z / 3.0, dim=1)[0].detach(), atol=1e-6)
    assert metrics["public-checksum"] == client().train_round(no_target(), 1)[2]["public-checksum"]


def test_each_public_image_is_distilled_towards_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    made = client(distil_epochs=3, public_batch=16)
    made.task = replace(made.task, train=made.task.train.replaced(augment="weak"))
    count = len(made.public)
    images = normalise(made.public.permute(0, 3, 1, 2), made.task.inputs)
    target = np.random.default_rng(0).dirichlet(np.ones(10), count).astype(np.float32)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    original = KTpFLClient.distil_step

    def step(self: KTpFLClient, batch: Any) -> torch.Tensor:
        seen.append((batch.index, batch.x))
        return original(self, batch)

    monkeypatch.setattr(KTpFLClient, "distil_step", step)
    made.train_round(Payload(arrays={"target": target}), 2)
    indices = torch.cat([i for i, _ in seen])
    assert torch.bincount(indices, minlength=count).eq(3).all(), "every row in every epoch"
    for index, x in seen:
        torch.testing.assert_close(x, images[index])


@pytest.mark.parametrize(("distil", "scale"), [("kl", True), ("kl", False), ("mse", True)])
def test_a_local_round_is_descent_on_the_targets_then_on_the_labels(distil: str, scale: bool) -> None:
    """Two steps of each, then the predictions: all written out on a copy of the model."""
    made = client(distil=distil, scale=scale, temperature=3.0, distil_epochs=2, public_batch=10**6)
    made.task = full_batch(made.task)
    target = 1.2 * np.random.default_rng(0).dirichlet(np.ones(10), len(made.public)).astype(np.float32)
    sent = Payload(arrays={"target": target})
    made.restore(2, sent)
    w, x, y = copy.deepcopy(made.model).train(), images(made.task), made.task.y_train
    public, t = normalise(made.public.permute(0, 3, 1, 2), made.task.inputs), torch.from_numpy(target)

    def distance() -> torch.Tensor:
        logits = w(public)
        if distil == "mse":
            return (logits.exp() / logits.exp().sum(dim=1, keepdim=True) - t).square().sum() / t.numel()
        student = (logits / 3).exp() / (logits / 3).exp().sum(dim=1, keepdim=True)
        p = t / t.sum(dim=1, keepdim=True)
        return (9 if scale else 1) * (p * (p / student).log()).sum() / len(p)

    steps_by_hand(w.parameters(), distance, made.task)
    steps_by_hand(w.parameters(), lambda: -w(x).log_softmax(dim=1)[torch.arange(len(y)), y].mean(), made.task)
    arrays, _, _ = made.train_round(sent, 2)
    for ours, theirs in zip(made.model.parameters(), w.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(arrays["soft"], (w(public) / 3).softmax(dim=1).detach(), rtol=1e-3, atol=1e-5)


def test_frozen_batch_norm_keeps_its_statistics() -> None:
    for freeze in (True, False):
        made = client(freeze_bn=freeze)
        made.round = 2
        made.restore(2, no_target())
        norm = torch.nn.BatchNorm1d(64)
        made.model.activation = torch.nn.Sequential(norm, torch.nn.ReLU())  # type: ignore[assignment]
        made.task = replace(made.task, y_train=made.task.y_train[:0], x_train=made.task.x_train[:0])
        made.target = torch.full((len(made.public), 10), 0.1)
        made.run_phases()
        assert bool((norm.running_mean == 0).all()) is freeze  # type: ignore[union-attr]


def test_only_batch_norm_is_frozen_and_predictions_are_made_in_evaluation_mode() -> None:
    made = client(freeze_bn=True)
    made.restore(2, no_target())
    norm, dropout = torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.5)
    made.model.activation = torch.nn.Sequential(norm, dropout)  # type: ignore[assignment]
    made.target = torch.full((len(made.public), 10), 0.1)
    x = normalise(made.public.permute(0, 3, 1, 2), made.task.inputs)
    made.model.train()
    made.distil_step(Batch(x, torch.zeros(len(x)), [x], torch.arange(len(x))))
    assert not norm.training and dropout.training
    made.model.train()
    first, second = (made.after_training(no_target())[0]["soft"] for _ in range(2))
    assert np.array_equal(first, second)


def test_epochs_can_grow() -> None:
    made = client(epochs="growing")
    for server_round, epochs in ((1, 1), (7, 7), (20, 20), (40, 20)):
        made.round = server_round
        assert made.epochs() == epochs
    assert client().epochs() == 2


def test_a_client_without_public_set_says_what_to_do() -> None:
    made = client()
    made.task = replace(made.task, extras={})
    with pytest.raises(BadRequest, match="public-data"):
        made.train_round(no_target(), 1)
    with pytest.raises(BadRequest, match="mixes 3 public rows"):
        client().train_round(Payload(arrays={"target": np.full((3, 10), 0.1, np.float32)}), 2)


def test_public_images_and_predictions_are_counted(tiny: Callable[..., RunResult]) -> None:
    distilled = tiny(method="ktpfl", rounds=3, model="digits-a,digits-b", public_data="0.1")
    images = distilled.summary["public_images"]
    assert distilled.summary["bytes_up"] == images * 10 * 4
    assert distilled.summary["public_bytes"] == images * 4
    assert distilled.rounds["bytes_down"].tolist() == [0, images * 40, images * 40]


def test_different_public_sets_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = KTpFLClient.after_training

    def other(self: KTpFLClient, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        arrays, numbers = original(self, payload)
        return arrays, {"public-checksum": 5} if self.task.client == 2 else numbers

    monkeypatch.setattr(KTpFLClient, "after_training", other)
    with pytest.raises(RoundFailed, match="client 2: another public set"):
        run(method="ktpfl", clients=3, rounds=1, local_epochs=1, out=tmp_path / "run")


def test_different_public_sets_are_found_before_round_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = KTpFLClient.common_facts

    def facts(self: KTpFLClient) -> dict[str, Any]:
        return original(self) | ({"public-checksum": 5} if self.task.client == 2 else {})

    monkeypatch.setattr(KTpFLClient, "common_facts", facts)
    with pytest.raises(BadRequest, match=r"public-checksum of client 2 .* differs"):
        run(method="ktpfl", clients=3, rounds=1, model="digits-a,digits-b,digits-c", out=tmp_path / "run")
    assert not (tmp_path / "run" / "rounds.csv").exists()


def test_widths_may_differ(tiny: Callable[..., RunResult], monkeypatch: pytest.MonkeyPatch) -> None:
    original = FedClient.register
    monkeypatch.setattr(
        FedClient, "register", lambda self: (original(self)[0], {**original(self)[1], "width": 64 + self.task.client})
    )
    assert tiny(method="ktpfl", fraction_train=0.67).summary["ok"]


# ---- '+weight' -------------------------------------------------------------------------------------------------------

WEIGHTS = KTpFLHParams(share="weights")
BY_WEIGHT = registry.resolve(METHOD, WEIGHTS)


def test_weights_are_mixed_by_coefficients_that_move_as_those_of_predictions_do() -> None:
    rng = np.random.default_rng(2)
    models = [random_model(rng, 0.3) for _ in range(4)]
    server = BY_WEIGHT.strategy(BY_WEIGHT, WEIGHTS)
    state = server.init(context(models[0], 4))
    assert server.send(state, 1, 0).arrays["target"].size == 0
    vectors = np.stack([np.concatenate([m[n].ravel() for n in models[0]]) for m in models])
    c = np.full((4, 4), 0.25)
    for server_round in (1, 2):
        state = server.aggregate(state, server_round, iter([Reply(k, 5, m, {}) for k, m in enumerate(models)]))
        c = released(c, vectors[:, None], 0.7)
        np.testing.assert_allclose(state["c"], c, atol=1e-7)
    assert np.abs(c - 0.25).max() > 0.01
    for k in range(4):
        np.testing.assert_allclose(server.send(state, 3, k).arrays["target"], c[k] @ vectors, atol=1e-6)
    assert server.report(state, {})["self_coefficient"] == pytest.approx(np.diag(c).mean())


def test_statistics_of_batch_norm_do_not_decide_who_learns_from_whom() -> None:
    rng = np.random.default_rng(2)
    models = [random_model(rng, 0.3) | {"features.1.running_var": np.full(3, k, np.float32)} for k in range(4)]
    found = []
    for given in (models, [{n: a for n, a in m.items() if "running" not in n} for m in models]):
        server = BY_WEIGHT.strategy(BY_WEIGHT, WEIGHTS)
        state = server.init(context(given[0], 4))
        found.append(server.aggregate(state, 1, iter([Reply(k, 5, m, {}) for k, m in enumerate(given)]))["c"])
    np.testing.assert_array_equal(*found)


def test_by_weight_other_facts_of_clients_are_not_those_of_a_public_set() -> None:
    known = context(random_model(np.random.default_rng(0), 0.3), 2)
    known = replace(known, clients=tuple(replace(c, common={"body": "a"}) for c in known.clients))
    assert BY_WEIGHT.strategy(BY_WEIGHT, WEIGHTS).init(known)["public"] is None


def test_a_client_steps_towards_its_mixture_and_then_trains() -> None:
    for steps in (0, 1, 3):
        task = full_batch(one_batch_task(model="digits-a"), steps=2, lr=0.1)
        made = KTpFLWeightsClient(task, BY_WEIGHT, KTpFLHParams(share="weights", distil_epochs=steps))
        made.restore(2, Payload(arrays={"target": np.zeros(0)}))
        mixed = build_model("digits-a", num_classes=4, shape=(1, 8, 8), seed=3)
        target = np.concatenate([a.ravel() for a in selection.extract(mixed, made.up_names()).values()])
        w, x, y = copy.deepcopy(made.model).train(), images(task), task.y_train
        before = selection.extract(w, made.up_names())
        with torch.no_grad():
            for p, t in zip(w.parameters(), mixed.parameters(), strict=True):
                p.copy_(t + 0.8**steps * (p - t))  # w - 0.1 * 2 (w - t)
        steps_by_hand(w.parameters(), lambda w=w, x=x, y=y: F.cross_entropy(w(x), y), task)
        sent = Payload(arrays={"target": target})
        arrays, _, _ = made.train_round(sent, 2)
        for name, p in w.named_parameters():
            np.testing.assert_allclose(arrays[name], p.detach(), rtol=1e-3, atol=1e-5)
        assert equal(made.reference, before)


def test_by_weight_it_needs_no_public_images(tiny: Callable[..., RunResult]) -> None:
    mixed = tiny(method="ktpfl", method_args="share=weights", rounds=3, fraction_train=0.67)
    assert mixed.summary["bytes_up"] == DIGITS_BYTES and "public_bytes" not in mixed.summary
    assert mixed.rounds["bytes_down"].tolist() == [0, DIGITS_BYTES, DIGITS_BYTES]
    with pytest.raises(BadRequest, match="one architecture"):
        tiny(method="ktpfl", method_args="share=weights", model="digits-a,digits-b")
