"""FedYogi: three rounds number by number, FedAvgM where v cannot move, scaling by powers of two, bounded steps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fedapp.method import Arrays, Reply, ServerState
from strategies.fedavgm import METHOD as FEDAVGM
from strategies.fedavgm import FedAvgM, FedAvgMHParams
from strategies.fedyogi import METHOD, FedYogi, FedYogiHParams
from tests.handmade import context, equal, point, random_model, reply

ROUNDS = ((0, 1, 2), (0, 2), (1,))
"""The clients of three rounds: not all take part in each."""
COUNTS = (2, 1, 2)


def strategy(initial: Arrays, **hparams: Any) -> tuple[FedYogi, ServerState]:
    made = FedYogi(METHOD, FedYogiHParams(**hparams))
    return made, made.init(context(initial))


def replies_of(server_round: int, scale: float = 1.0) -> list[Reply]:
    """Replies of random models; those of a round are the same for every caller."""
    rng = np.random.default_rng(server_round)
    return [reply(k, COUNTS[k], random_model(rng, scale)) for k in ROUNDS[server_round - 1]]


def dyadic_replies(server_round: int, scale: float = 1.0) -> list[Reply]:
    """Replies of two clients whose numbers are eighths up to 2: their means and differences have no rounding."""
    rng = np.random.default_rng(server_round)
    return [reply(k, 5, point(*(scale * rng.integers(-16, 17, size=6) / 8))) for k in range(2)]


def test_three_rounds_equal_algorithm_2_number_by_number() -> None:
    eta, beta1, beta2, tau = 0.3, 0.8, 0.7, 0.05
    initial = random_model(np.random.default_rng(9))
    fed, state = strategy(initial, server_lr=eta, beta1=beta1, beta2=beta2, tau=tau)
    x = {(n, i): float(a) for n, array in initial.items() for i, a in np.ndenumerate(array)}
    m, v = dict.fromkeys(x, 0.0), dict.fromkeys(x, tau**2)
    shrunk = 0
    for server_round in (1, 2, 3):
        given = replies_of(server_round)
        state = fed.aggregate(state, server_round, given)
        total = sum(r.num_samples for r in given)
        for name, i in x:
            delta = sum(r.num_samples * float(r.arrays[name][i]) for r in given) / total - x[name, i]
            m[name, i] = beta1 * m[name, i] + (1 - beta1) * delta
            shrunk += v[name, i] > delta**2
            v[name, i] += math.copysign(1 - beta2, delta**2 - v[name, i]) * delta**2
            x[name, i] += eta * m[name, i] / (math.sqrt(v[name, i]) + tau)
    assert shrunk  # both signs occur
    for name, i in x:
        found = (state[part][name][i] for part in ("model", "momentum", "variance"))
        np.testing.assert_allclose([*found], [x[name, i], m[name, i], v[name, i]], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_equals_dampened_fedavgm_bit_for_bit_where_tau_is_large(beta: float) -> None:
    """V stays tau^2, so that a step is eta m / (2 tau); without momentum and with eta = 2 tau this is FedAvg."""
    start = point(1, -1, 0.5, 0, 2, -0.25)
    tau, rate = 2.0**20, 0.5 if beta else 1.0
    fed, state = strategy(start, tau=tau, server_lr=2 * tau * rate, beta1=beta)
    momentum = FedAvgM(FEDAVGM, FedAvgMHParams(momentum=beta, dampening=beta, server_lr=rate))
    expected = momentum.init(context(start))
    for server_round in (1, 2, 3):
        state = fed.aggregate(state, server_round, dyadic_replies(server_round))
        expected = momentum.aggregate(expected, server_round, dyadic_replies(server_round))
        assert equal(state["model"], expected["model"])
        assert (state["variance"]["head.weight"] == tau**2).all()


def test_model_rate_and_tau_scale_together() -> None:
    """A unit of the weights that is 16 times smaller changes no bit: steps are relative to tau and eta."""
    start = random_model(np.random.default_rng(9))
    fed, state = strategy(start, server_lr=0.1, tau=0.01)
    wide, scaled = strategy({n: 16 * a for n, a in start.items()}, server_lr=1.6, tau=0.16)
    for server_round in (1, 2, 3):
        state = fed.aggregate(state, server_round, replies_of(server_round))
        scaled = wide.aggregate(scaled, server_round, replies_of(server_round, 16.0))
    assert equal({n: 16 * a for n, a in state["model"].items()}, scaled["model"])
    assert equal({n: 256 * a for n, a in state["variance"].items()}, scaled["variance"])


@pytest.mark.parametrize("change", [1e-3, 1.0, 1e7])
def test_a_first_step_is_no_longer_than_the_rate_however_long_the_change(change: float) -> None:
    """|m| / sqrt(v) is at most (1 - beta_1) / sqrt(1 - beta_2) = 1 before other rounds add to m."""
    fed, state = strategy(point(1, -1), server_lr=0.25)
    moved = fed.aggregate(state, 1, [reply(0, 3, point(1 + change, -1 - change))])["model"]["head.weight"]
    assert 0 < moved[0] - 1 <= 0.25 and 0 < -1 - moved[1] <= 0.25
    if change > 1:  # nothing is lost in the difference of two long numbers
        np.testing.assert_allclose(moved, [1.25, -1.25], rtol=1e-6)


def test_running_statistics_are_plain_averages() -> None:
    names = ("features.norm.weight", "features.norm.running_mean", "features.norm.running_var")
    fed, state = strategy({n: np.ones(2, np.float32) for n in names}, server_lr=10.0)
    sent = [{n: np.full(2, value, np.float32) for n in names} for value in (0.25, 0.5)]
    after = fed.aggregate(state, 1, [reply(k, 4, model) for k, model in enumerate(sent)])
    assert all((after["model"][n] == 0.375).all() for n in names[1:])
    assert (after["model"][names[0]] < 0).all()  # a step of this rate would make a variance negative
    assert list(after["momentum"]) == list(after["variance"]) == [names[0]]


def test_a_round_without_replies_changes_nothing() -> None:
    fed, state = strategy(point(1, 2))
    for before in (state, fed.aggregate(state, 1, [reply(0, 1, point(3, 1))])):
        after = fed.aggregate(before, 2, [])
        assert all(equal(after[part], before[part]) for part in ("model", "momentum", "variance"))
