"""FedTGP: the margin and the loss by hand, its gradient by differences, reductions to FedProto and Standalone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from clients.fedproto import FedProtoHParams
from clients.fedtgp import FedTGPClient, FedTGPHParams
from fedapp.core.prototypes import contrastive, margin, outputs
from fedapp.core.robust import UNGUARDED
from fedapp.engines.local import RunResult
from fedapp.learning.training import Batch
from fedapp.method import Payload, Reply, ServerState
from fedapp.reduce.reader import Policy
from fedapp.settings import RobustnessSettings
from fedapp.transport import checkpoint
from strategies.fedtgp import METHOD, FedTGP
from tests import handmade
from tests.handmade import guard, refusal
from tests.test_fedproto import WORKED
from tests.test_fedproto import strategy as fedproto

CENTRES = np.array([[0.9, 0.2], [0.3, 0.8], [0.6, 0.6]])
FREE = [[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]]
MEANS = torch.tensor([[0.9, 0.2], [0.2, 1.0], [0.4, 0.6], [0.6, 0.6]], dtype=torch.float64)
LABELS = torch.tensor([0, 1, 1, 2])


def reply(client: int, rows: Mapping[int, Sequence[float]], **metrics: Any) -> Reply:
    arrays = {"protos": np.array(list(rows.values()), np.float32).reshape(-1, 2), "labels": np.array(list(rows), "i4")}
    return Reply(client, 5, arrays, metrics)


ROUND = [reply(k, rows) for k, (rows, _) in enumerate(WORKED)]


def strategy(classes: int = 3, width: int = 2, robust: RobustnessSettings | None = None, **hparams: Any) -> FedTGP:
    made = FedTGP(METHOD, FedTGPHParams(**hparams), policy=Policy(robust or UNGUARDED))
    made.context = handmade.context({}, 2, num_classes=classes, width=width)
    return made


def after(made: FedTGP, *rounds: Sequence[Reply]) -> ServerState:
    state = made.init(made.context)
    for number, replies in enumerate(rounds, 1):
        assert all(refusal(made, state, r) is None for r in replies)
        state = made.aggregate(state, number, iter(replies))
    return state


# ---- worked numbers ------------------------------------------------------------------------------------------------


def test_the_margin_is_the_largest_distance_to_a_nearest_centre() -> None:
    assert margin(CENTRES, 100.0) == pytest.approx(0.5, abs=1e-12), "and not .848528, the largest of all distances"
    assert margin(CENTRES, 0.2) == 0.2
    assert margin(CENTRES[[1, 2]], 100.0) == pytest.approx(0.360555, abs=1e-6)
    assert margin(CENTRES[:1], 100.0) == margin(CENTRES[:0], 100.0) == 0.0


@pytest.mark.parametrize(("delta", "expected"), [(0.0, 0.850361), (0.5, 1.162024), (0.848528, 1.411237)])
def test_worked_losses(delta: float, expected: float) -> None:
    free = torch.tensor(FREE, dtype=torch.float64)
    assert float(contrastive(MEANS, LABELS, free, delta)) == pytest.approx(expected, abs=1e-6)


def test_the_worked_gradient_and_one_step_of_the_server() -> None:
    free = torch.tensor(FREE, dtype=torch.float64, requires_grad=True)
    contrastive(MEANS, LABELS, free, 0.5).backward()
    expected = [[-0.050831, 0.008629], [-0.188749, 0.058875], [-0.174914, 0.003265]]
    assert free.grad is not None
    np.testing.assert_allclose(free.grad, expected, atol=1e-6)
    made = strategy(network=False, server_epochs=1, server_lr=0.1, server_batch=4)
    net = [torch.tensor(FREE, dtype=torch.float64)]
    losses = made.descend(net, MEANS.numpy(), LABELS.numpy(), np.arange(3), 0.5, 1)
    np.testing.assert_allclose(net[0], [[1.005083, -0.000863], [0.018875, 0.994112], [0.517491, 0.499674]], atol=1e-6)
    assert losses == [pytest.approx(1.162024, abs=1e-6)]


# ---- oracle --------------------------------------------------------------------------------------------------------


def test_the_loss_of_the_net_against_a_loop_and_its_steps_against_finite_differences() -> None:
    """Two epochs on one batch: every parameter of the net moves by -lr times the difference quotient of the loss."""
    made = strategy(classes=4, server_epochs=2, server_batch=9, server_lr=0.3)
    start = made.init(made.context)["net"]
    assert [a.shape for a in start.values()] == [(4, 2), (2, 2), (2,), (2, 2), (2,)]
    assert all(np.abs(start[n]).max() <= 1 / np.sqrt(2) for n in ("w1", "b1", "w2", "b2"))

    def slow(net: Mapping[str, np.ndarray]) -> float:
        hidden = np.maximum(net["vectors"] @ net["w1"].T + net["b1"], 0.0)
        protos, total = hidden @ net["w2"].T + net["b2"], 0.0
        for z, c in zip(MEANS.numpy(), LABELS.tolist(), strict=True):
            own = np.exp(-(np.sqrt(((z - protos[c]) ** 2).sum()) + 0.5))
            others = [np.exp(-np.sqrt(((z - protos[k]) ** 2).sum())) for k in range(3) if k != c]
            total -= np.log(own / (own + sum(others)))
        return total / 4

    net = {n: a.copy() for n, a in start.items()}
    losses = []
    for _ in range(2):
        losses.append(slow(net))
        slopes = {}
        for name, array in net.items():
            slopes[name] = np.zeros(array.shape)
            for place in np.ndindex(array.shape):
                ends = []
                for sign in (1, -1):
                    moved = {n: a.copy() for n, a in net.items()}
                    moved[name][place] += sign * 1e-6
                    ends.append(slow(moved))
                slopes[name][place] = (ends[0] - ends[1]) / 2e-6
        net = {n: a - 0.3 * slopes[n] for n, a in net.items()}
    state = after(made, ROUND)
    for name, array in net.items():
        np.testing.assert_allclose(state["net"][name], array, atol=2e-7, err_msg=name)
    assert state["loss"] == [pytest.approx(np.mean(losses), abs=1e-7)] and state["margin"] == [pytest.approx(0.5)]
    protos = outputs([torch.from_numpy(a) for a in net.values()]).numpy()
    np.testing.assert_allclose(state["protos"][:3], protos[:3], atol=1e-6)
    assert state["known"].tolist() == [True, True, True, False] and not state["protos"][3].any()


def test_a_prototype_on_its_own_mean_has_a_finite_gradient() -> None:
    free = MEANS[:2].clone().requires_grad_()
    contrastive(MEANS[:2], torch.tensor([0, 1]), free, 0.5).backward()
    assert free.grad is not None and bool(torch.isfinite(free.grad).all())


# ---- reductions ----------------------------------------------------------------------------------------------------


def test_vectors_alone_without_a_step_are_fedprotos_prototypes() -> None:
    made = strategy(network=False, server_epochs=0)
    server, state = fedproto()
    for number, replies in enumerate((ROUND, ROUND[:1]), 1):
        state = server.aggregate(state, number, iter(replies))
    ours = after(made, ROUND, ROUND[:1])
    np.testing.assert_allclose(ours["protos"], state["protos"], atol=1e-7)
    np.testing.assert_array_equal(ours["known"], state["known"])


def test_the_default_pull_is_that_of_the_authors_at_any_width() -> None:
    """Weight 10 on the mean over their 512 coordinates is 10 / 512 on the squared distance."""
    task = handmade.digit_tasks(1)[0]
    rows = np.random.default_rng(0).normal(size=(10, 64)).astype(np.float32)
    sent = Payload(arrays={"protos": rows, "labels": np.arange(10, dtype=np.int32)})
    losses = []
    for hparams in ({}, {"lam": 0.0}):
        made = FedTGPClient(task, METHOD, FedTGPHParams(**hparams))
        made.restore(1, sent)
        made.receive(sent)
        made.before_training(sent)
        x, y = handmade.images(task), task.y_train
        losses.append(float(made.step_loss(Batch(x, y, [x], torch.arange(len(y))))))
    z = made.model.represent(x).detach().double().numpy()
    squared = sum(float(((z[i] - rows[c]) ** 2).sum()) for i, c in enumerate(y.tolist())) / len(y)
    assert losses[0] - losses[1] == pytest.approx(10 / 512 * squared, rel=1e-4)
    assert [FedTGPHParams().weight(d) for d in (64, 512)] == [1.25, 10.0]
    assert FedProtoHParams().weight(64) == FedProtoHParams().weight(512) == 1.0


def test_margins_and_bytes_of_a_run(tiny: Callable[..., RunResult]) -> None:
    common = {"rounds": 2, "model": "digits-a,digits-b", "final_training": False}
    pulled = tiny(method="fedtgp", method_args="server_epochs=2", **common)
    assert len(pulled.summary["prototype_margin"]) == 2 and 0 <= pulled.summary["prototype_accuracy"] <= 1
    assert pulled.rounds["bytes_down"].tolist() == [0, 10 * (64 * 4 + 4)], "every known class, to every client"


# ---- invariants, missing classes and clients -----------------------------------------------------------------------


def test_training_separates_the_prototypes_and_arrival_plays_no_part() -> None:
    apart = []
    for epochs in (0, 200):
        made = strategy(classes=4, network=False, server_epochs=epochs, server_lr=0.02, server_batch=2)
        state = after(made, ROUND)
        first, again = (made.aggregate(state, 2, iter(ROUND)) for _ in range(2))
        assert checkpoint.flatten(first)[1] == checkpoint.flatten(again)[1]
        assert all(np.array_equal(a, again["net"][n]) for n, a in first["net"].items())
        distance = np.linalg.norm(state["protos"][:3, None] - state["protos"][None, :3], axis=2)
        apart.append(float((distance + 9 * np.eye(3)).min()))
    assert apart[0] == pytest.approx(0.360555, abs=1e-6) and apart[1] > 0.5
    other = strategy(classes=4, network=False, server_epochs=200, server_lr=0.02, server_batch=2)
    other.context = handmade.context({}, 2, seed=1, num_classes=4, width=2)
    assert not np.array_equal(after(other, ROUND)["protos"], state["protos"])


def test_each_round_shuffles_by_itself() -> None:
    made = strategy(classes=4, network=False, server_epochs=20, server_lr=0.02, server_batch=2)
    second, third = (made.aggregate(after(made, ROUND), number, iter(ROUND))["protos"] for number in (2, 3))
    assert not np.array_equal(second, third)


def test_a_class_that_nobody_sent_is_no_candidate_and_an_absent_one_stays_known() -> None:
    made = strategy(classes=5, network=False, server_epochs=3)
    start = made.init(made.context)
    assert made.send(start, 1, 0).arrays["protos"].shape == (0, 2)
    one = after(made, ROUND[:1])
    assert made.send(one, 2, 9).arrays["labels"].tolist() == [0, 1], "also to a client that never answered"
    two = made.aggregate(one, 2, iter(ROUND[1:]))
    assert made.send(two, 3, 0).arrays["labels"].tolist() == [0, 1, 2]
    assert np.array_equal(two["net"]["vectors"][3:], start["net"]["vectors"][3:]), "no gradient reaches what is unseen"
    assert not np.array_equal(two["net"]["vectors"][0], one["net"]["vectors"][0]), "class 0 is pushed by the others"
    before = {n: a.copy() for n, a in two["net"].items()}
    for nothing in ([], [reply(0, {})]):
        stays = made.aggregate(two, 3, iter(nothing))
        assert np.array_equal(stays["protos"], two["protos"]) and handmade.equal(stays["net"], before)
        assert np.isnan(stays["margin"][-1]) and np.isnan(stays["loss"][-1])
    report = made.report(made.aggregate(two, 3, iter([])), {})
    assert report["prototype_margin"][-1] is None and report["prototype_margin"][1] == pytest.approx(0.2, abs=1e-7)


def test_the_nearest_prototypes_score_is_kept_by_client() -> None:
    made = strategy(server_epochs=1)
    scored = [reply(k, r, **{"prototype-correct": 3 + k, "prototype-total": 5}) for k, (r, _) in enumerate(WORKED)]
    state = after(made, scored, ROUND)
    assert made.report(state, {})["prototype_accuracy"] == pytest.approx(0.7)


def test_one_liar_is_screened() -> None:
    rng = np.random.default_rng(0)
    honest = [reply(k, {c: CENTRES[c] + 0.01 * rng.normal(size=2) for c in range(3)}) for k in range(6)]
    lies = reply(6, {c: 1e4 * CENTRES[c] for c in range(3)})
    plain, guarded = (strategy(network=False, server_epochs=0, robust=robust) for robust in (None, guard(robust="own")))
    assert np.abs(after(plain, [*honest, lies])["protos"]).max() > 1e3
    state = after(guarded, [*honest, lies])
    np.testing.assert_allclose(state["protos"], CENTRES, atol=0.05)
    assert state["robust"] == {"left_out": 3}
