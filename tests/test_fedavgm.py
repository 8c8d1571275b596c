"""FedAvgM: worked numbers of three forms, torch's SGD as oracle, FedAvg at zero momentum, running statistics, state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedapp.method import Arrays, Reply, ServerContext, ServerState
from fedapp.models import MODEL_NAMES, build_model, check_model
from fedapp.models.selection import float_buffers
from fedapp.sampling import rng
from strategies.fedavgm import METHOD, RUNNING_STATISTICS, FedAvgM, FedAvgMHParams
from tests.handmade import (
    cross_entropy,
    descend,
    digits_context,
    federate,
    model_like,
    one_batch_task,
    pixels,
    weighted_mean,
)

N = (100, 60, 40)
CLIENTS = np.array([[1.2, 0.8], [0.6, 1.4], [1.5, 1.5]], dtype=np.float32)


def strategy(initial: Arrays, **hparams: Any) -> tuple[FedAvgM, ServerState]:
    made = FedAvgM(METHOD, FedAvgMHParams(**hparams))
    context = ServerContext(
        seed=0, clients=(), num_classes=2, width=2, initial=initial, initial_from=lambda k: initial,
        rng=lambda purpose, *numbers: rng(0, purpose, *numbers),
    )  # fmt: skip
    return made, made.init(context)


def replies(models: list[Arrays], counts: tuple[int, ...] = N) -> list[Reply]:
    return [Reply(k, n, m, {}) for k, (m, n) in enumerate(zip(models, counts))]


def random_models(seed: int, names: tuple[str, ...] = ("features.a", "head.b"), count: int = 3) -> list[Arrays]:
    generator = np.random.default_rng(seed)
    return [{n: generator.normal(size=(3, 4)).astype(np.float32) for n in names} for _ in range(count)]


@pytest.mark.parametrize(
    ("hparams", "first", "second"),
    [
        ({"momentum": 0.1}, (1.08, 1.12), (1.168, 1.252)),
        ({"momentum": 0.1, "dampening": 0.1}, (1.072, 1.108), (1.1512, 1.2268)),
        ({"momentum": 0.1, "nesterov": True}, (1.088, 1.132), (1.1768, 1.2652)),
    ],
)
def test_worked_numbers_of_the_three_forms(
    hparams: dict[str, Any], first: tuple[float, float], second: tuple[float, float]
) -> None:
    fed, state = strategy({"head.w": np.ones(2, dtype=np.float32)}, **hparams)
    # Round 1: the worked clients, whose average drifts by (0.08, 0.12); round 2: the same drift from what was sent.
    state = fed.aggregate(state, 1, replies([{"head.w": w} for w in CLIENTS]))
    np.testing.assert_allclose(state["model"]["head.w"], first, atol=5e-7)
    drifted = [{"head.w": w - 1 + state["model"]["head.w"]} for w in CLIENTS]
    state = fed.aggregate(state, 2, replies(drifted))
    np.testing.assert_allclose(state["model"]["head.w"], second, atol=5e-7)


@pytest.mark.parametrize("hparams", [{"momentum": 0.9}, {"momentum": 0.7, "nesterov": True, "server_lr": 0.3}])
def test_equals_torch_sgd_on_the_pseudo_gradient(hparams: dict[str, Any]) -> None:
    initial = random_models(1, count=1)[0]
    fed, state = strategy(initial, **hparams)
    weights = {n: torch.nn.Parameter(torch.from_numpy(a.astype(np.float64))) for n, a in initial.items()}
    sgd = torch.optim.SGD(
        weights.values(), lr=fed.hparams.server_lr, momentum=fed.hparams.momentum, nesterov=fed.hparams.nesterov
    )
    for server_round in range(1, 6):
        models = random_models(10 + server_round)
        state = fed.aggregate(state, server_round, replies(models))
        for name, w in weights.items():
            mean = np.average([m[name].astype(np.float64) for m in models], axis=0, weights=N)
            w.grad = w.detach() - torch.from_numpy(mean)
        sgd.step()
        for name, w in weights.items():
            np.testing.assert_allclose(state["model"][name], w.detach().numpy(), rtol=2e-6, atol=2e-6)


def test_dampened_form_is_a_moving_average_of_updates() -> None:
    # v_t = (1 - b) sum_s b^(t - s) D_s, written out as a sum over all rounds.
    beta, drift = 0.6, np.random.default_rng(3).normal(size=(7, 5)).astype(np.float32)
    fed, state = strategy({"head.w": np.zeros(5, dtype=np.float32)}, momentum=beta, dampening=beta)
    for t in range(7):
        state = fed.aggregate(state, t + 1, [Reply(0, 3, {"head.w": state["model"]["head.w"] + drift[t]}, {})])
        v = (1 - beta) * sum(beta ** (t - s) * -drift[s].astype(np.float64) for s in range(t + 1))
        np.testing.assert_allclose(state["velocity"]["head.w"], v, rtol=1e-5, atol=1e-6)


def test_two_real_rounds_are_sgd_by_hand_and_two_steps_of_momentum_by_hand() -> None:
    """Two clients of 10 and 20 images; Delta w, v and w of round 2 depend on those of round 1."""
    tasks = [one_batch_task(n, 10, model="digits-a", client=k, seed=k) for k, n in enumerate((10, 20))]
    _, state, _ = federate(METHOD, FedAvgMHParams(momentum=0.6, server_lr=0.8), tasks, 2)
    context = digits_context(METHOD, FedAvgMHParams(), tasks)
    model = model_like(tasks[0])
    w = {n: a.astype(np.float64) for n, a in context.initial.items()}
    v = {n: np.zeros_like(a) for n, a in w.items()}
    for _ in range(2):
        trained = []
        for task in tasks:
            x, y = pixels(task), task.y_train
            model.load_state_dict({n: torch.from_numpy(a) for n, a in w.items()})
            after = descend(model, lambda m, x=x, y=y: cross_entropy(m(x), y), task)
            trained.append({n: p.detach().numpy() for n, p in after.named_parameters()})
        for n in w:
            v[n] = 0.6 * v[n] + (w[n] - (10 * trained[0][n] + 20 * trained[1][n]) / 30)
            w[n] = w[n] - 0.8 * v[n]
    for n in w:
        np.testing.assert_allclose(state["model"][n], w[n], atol=5e-6)
        np.testing.assert_allclose(state["velocity"][n], v[n], atol=5e-6)


def test_a_consensus_at_rest_stays_and_velocity_carries_on() -> None:
    w = random_models(7, count=1)[0]
    fed, state = strategy(w, momentum=0.5)
    rest = fed.aggregate(state, 1, replies([w, w, w]))
    assert all(np.array_equal(rest["model"][n], w[n]) for n in w)
    moved = fed.aggregate(state, 1, replies([{n: a + 1 for n, a in w.items()}] * 3))
    # Clients that stand still after a move of +1: the server goes on by 0.5, 0.25, ...
    for step in (0.5, 0.25):
        before = moved["model"]
        moved = fed.aggregate(moved, 2, replies([before] * 3))
        for name in w:
            np.testing.assert_allclose(moved["model"][name] - before[name], step, rtol=1e-5)


def test_running_statistics_are_plain_averages() -> None:
    names = ("features.norm.weight", "features.norm.running_mean", "features.norm.running_var")
    initial = {n: np.full(3, 1.0, dtype=np.float32) for n in names}
    fed, state = strategy(initial, momentum=0.9)
    for server_round, value in enumerate((0.4, 0.1, 0.02), start=1):
        models = [{n: np.full(3, value * k, dtype=np.float32) for n in names} for k in (0.5, 1.0, 2.0)]
        state = fed.aggregate(state, server_round, replies(models))
        expected = weighted_mean(replies(models), initial)
        for name in names[1:]:
            assert np.array_equal(state["model"][name], expected[name])
            assert name not in state["velocity"]
    # Momentum itself has carried the weight beyond zero: this is what would make a variance negative.
    assert (state["model"][names[0]] < 0).all()
    assert (state["model"][names[2]] > 0).all()


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_names_tell_running_statistics_from_parameters(name: str) -> None:
    size = 8 if name.startswith("digits") else 32
    shape = (3, size) if name == "cnn1d" else (3, size, size)
    check_model(name, shape)
    model = build_model(name, num_classes=3, shape=shape, seed=0)
    assert {n for n in model.state_dict() if n.endswith(RUNNING_STATISTICS)} == float_buffers(model)
    assert not any(n.endswith(RUNNING_STATISTICS) for n, _ in model.named_parameters())
