"""FedAvgM: worked numbers of three forms, torch's SGD as oracle, FedAvg at zero momentum, running statistics, state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pydantic import ValidationError

from fedapp import run
from fedapp.method import Arrays, Reply, ServerContext, ServerState
from fedapp.models import MODEL_NAMES, build_model, check_model
from fedapp.sampling import rng
from fedapp.transport.selection import float_buffers
from strategies.base import weighted_mean
from strategies.fedavgm import METHOD, RUNNING_STATISTICS, FedAvgM, FedAvgMHParams

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


@pytest.mark.parametrize("hparams", [{"momentum": 0.0}, {"momentum": 0.0, "nesterov": True}])
def test_without_momentum_it_is_fedavg_bit_for_bit(hparams: dict[str, Any]) -> None:
    fed, state = strategy(random_models(5, count=1)[0], **hparams)
    for server_round in range(1, 4):
        models = random_models(20 + server_round)
        expected = weighted_mean(replies(models), models[0])
        state = fed.aggregate(state, server_round, replies(models))
        for name in expected:
            assert np.array_equal(state["model"][name], expected[name])
            assert state["model"][name].dtype == np.float32


def test_without_momentum_a_run_gives_fedavgs_table(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"clients": 4, "rounds": 3, "dataset": "digits", "fraction_train": 0.5}
    plain = run(method="fedavg", out=tmp_path / "a", **settings).rounds
    same = run(method="fedavgm", method_args="momentum=0", out=tmp_path / "m", **settings).rounds
    other = run(method="fedavgm", method_args="momentum=0.5", out=tmp_path / "o", **settings).rounds
    kept = [c for c in plain.columns if not c.endswith("seconds")]
    pd.testing.assert_frame_equal(plain[kept], same[kept])
    assert not plain[kept].equals(other[kept])


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
    check_model(name, channels=3, size=size)
    model = build_model(name, num_classes=3, channels=3, size=size, seed=0)
    assert {n for n in model.state_dict() if n.endswith(RUNNING_STATISTICS)} == float_buffers(model)
    assert not any(n.endswith(RUNNING_STATISTICS) for n, _ in model.named_parameters())


def test_the_old_state_is_not_written() -> None:
    fed, state = strategy(random_models(8, count=1)[0], momentum=0.5)
    state = fed.aggregate(state, 1, replies(random_models(9)))
    kept = {k: {n: a.copy() for n, a in state[k].items()} for k in ("model", "velocity")}
    fed.aggregate(state, 2, replies(random_models(10)))
    for k in kept:
        assert all(np.array_equal(state[k][n], kept[k][n]) for n in kept[k])


def test_without_replies_nothing_moves() -> None:
    fed, state = strategy(random_models(8, count=1)[0], momentum=0.5)
    state = fed.aggregate(state, 1, replies(random_models(9)))
    after = fed.aggregate(state, 2, [])
    for k in ("model", "velocity"):
        assert all(np.array_equal(state[k][n], after[k][n]) for n in state[k])


def test_resume_keeps_the_velocity(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"method": "fedavgm", "clients": 4, "dataset": "digits", "fraction_train": 0.5}
    whole = run(rounds=4, out=tmp_path / "whole", **settings).rounds
    run(rounds=2, out=tmp_path / "parts", **settings)
    parts = run(resume=tmp_path / "parts", rounds=4).rounds
    kept = [c for c in whole.columns if not c.endswith("seconds")]
    pd.testing.assert_frame_equal(whole[kept], parts[kept])


def test_nesterov_with_dampening_is_refused() -> None:
    with pytest.raises(ValidationError, match="dampening at 0"):
        FedAvgMHParams(momentum=0.9, dampening=0.1, nesterov=True)
    with pytest.raises(ValidationError):
        FedAvgMHParams(momentum=1.0)
