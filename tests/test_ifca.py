"""IFCA: the choice by training loss, the averages of the choosers, and what it buys where clients contradict."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fedapp
from clients.ifca import IFCAClient, IFCAHParams, choose
from fedapp.data.transforms import normalise
from fedapp.errors import BadRequest
from fedapp.learning.state import ClientStore
from fedapp.method import Arrays, Payload
from fedapp.models import selection
from strategies import fedavg
from strategies.ifca import IFCA, METHOD
from tests.handmade import (
    DIGITS_BYTES,
    context,
    digit_tasks,
    digits_context,
    equal,
    federate,
    flat,
    full_batch,
    images,
    point,
    random_model,
    reply,
    steps_by_hand,
)


def strategy_of(**values: object) -> IFCA:
    return IFCA(METHOD, IFCAHParams.model_validate(values))


WORKED = [(0, 100, (1.2, 0.8)), (1, 60, (0.6, 1.4)), (2, 40, (1.5, 1.5))]
LOSSES = [[0.9, 0.4], [0.3, 0.8], [0.5, 0.5]]


@pytest.mark.parametrize(("weighting", "first"), [("samples", (0.96, 1.44)), ("uniform", (1.05, 1.45))])
def test_worked_numbers(weighting: str, first: tuple[float, float]) -> None:
    choices = [choose(row) for row in LOSSES]
    assert choices == [1, 0, 0]
    strategy = strategy_of(weighting=weighting)
    state = strategy.init(context(lambda k: point(1.0, 1.0 + k)))
    replies = [reply(c, n, point(*w), ifca_cluster=choices[c]) for c, n, w in WORKED]
    after = strategy.aggregate(state, 1, iter(replies))
    np.testing.assert_allclose(after["clusters"][0]["head.weight"], first, atol=1e-6)
    np.testing.assert_array_equal(after["clusters"][1]["head.weight"], np.float32([1.2, 0.8]))
    assert after["chosen"] == {0: 1, 1: 0, 2: 0}
    assert strategy.report(after, {}) == {"clusters": [[1, 2], [0]]}


def test_a_choice_is_the_lowest_finite_loss_and_ties_go_to_the_first() -> None:
    assert choose([2.0, 1.0, 1.0]) == 1
    assert choose([math.nan, 3.0, 2.0]) == 2
    assert choose([math.inf, math.nan, 9.0]) == 2
    assert choose([math.nan, math.nan]) == 0


@pytest.mark.parametrize("trunk", ["clustered", "shared"])
def test_aggregation_equals_plain_averages(trunk: str) -> None:
    rng = np.random.default_rng(1)
    strategy = strategy_of(clusters=4, trunk=trunk)
    starts = [random_model(rng) for _ in range(4)]
    state = strategy.init(context(lambda k: starts[k], clients=7))
    replies = [reply(c, int(rng.integers(1, 50)), random_model(rng), ifca_cluster=int(c % 3)) for c in range(7)]
    after = strategy.aggregate(state, 1, iter(replies))

    def average(chosen: list[int], name: str) -> np.ndarray:
        weights = [replies[c].num_samples for c in chosen]
        return np.average([replies[c].arrays[name].astype(np.float64) for c in chosen], axis=0, weights=weights)

    for cluster in range(3):
        members = [c for c in range(7) if c % 3 == cluster]
        for name, array in after["clusters"][cluster].items():
            np.testing.assert_allclose(array, average(members, name), rtol=1e-5, atol=1e-6)
    assert equal(after["clusters"][3], state["clusters"][3]), "nobody chose it: it stays"
    if trunk == "shared":
        assert sorted(after["clusters"][0]) == ["head.bias", "head.weight"]
        np.testing.assert_allclose(
            after["shared"]["features.weight"], average(list(range(7)), "features.weight"), rtol=1e-5, atol=1e-6
        )
    else:
        assert after["shared"] == {}


def test_the_models_of_one_cluster_may_not_be_those_of_another() -> None:
    def start(*points: float) -> Callable[[int], Arrays]:
        return lambda k: {**point(points[k], 1.0), "head.bias": np.zeros(1, np.float32)}

    with pytest.raises(BadRequest, match="different initial models"):
        strategy_of(clusters=3).init(context(start(1, 2, 1)))
    made, ctx = strategy_of(clusters=3), context(start(1, 2, 3))
    assert len(made.init(ctx)["clusters"]) == 3, "equal biases are not equal models"
    assert made.context is ctx


def test_absent_clients_keep_their_place() -> None:
    strategy = strategy_of()
    state = strategy.init(context(lambda k: point(k, 1.0)))
    state = strategy.aggregate(state, 1, iter([reply(0, 3, point(5, 5), ifca_cluster=1)]))
    state = strategy.aggregate(state, 2, iter([reply(2, 3, point(7, 7), ifca_cluster=0)]))
    assert state["chosen"] == {0: 1, 2: 0}
    assert flat(state["clusters"][1]).tolist() == [5, 5]
    state = strategy.aggregate(state, 3, iter([reply(1, 3, point(7, 7), ifca_cluster=0)]))
    assert strategy.report(state, {}) == {"clusters": [[1, 2], [0]]}, "members in the order of their ids"


def test_equal_initial_models_are_refused() -> None:
    with pytest.raises(BadRequest, match="different initial models"):
        strategy_of().init(context(point(1.0, 2.0)))
    strategy_of(clusters=1).init(context(point(1.0, 2.0)))


def test_the_initial_models_differ_and_the_first_is_the_usual_one() -> None:
    tasks = digit_tasks(2)
    ctx = digits_context(METHOD, IFCAHParams(), tasks)
    state = strategy_of(clusters=3).init(ctx)
    assert equal(state["clusters"][0], ctx.initial)
    heads = [state["clusters"][c]["head.weight"] for c in range(3)]
    assert not np.allclose(heads[0], heads[1]) and not np.allclose(heads[1], heads[2])


@pytest.mark.parametrize("bad", [None, -1, 2, 0.5])
def test_a_choice_that_does_not_exist_is_refused(bad: object) -> None:
    metrics = {} if bad is None else {"ifca_cluster": bad}
    assert "ifca-cluster" in str(strategy_of().check({}, reply(0, 1, point(1), **metrics)))
    for good in (0, 1):
        assert strategy_of().check({}, reply(0, 1, point(1), ifca_cluster=good)) is None


def test_the_client_chooses_by_its_training_loss() -> None:
    """Against a plain loop over models and images, in evaluation mode; test images have no say."""
    hparams = IFCAHParams(clusters=4)
    (task,) = digit_tasks(1)
    task = replace(task, y_test=(task.y_test + 5) % 10)
    strategy = IFCA(METHOD, hparams)
    state = strategy.init(digits_context(METHOD, hparams, [task]))
    payload = strategy.send(state, 1, 0)
    client = IFCAClient(task, METHOD, hparams)
    client.restore(1, payload)
    client.receive(payload)
    losses = []
    for c in range(4):
        model = IFCAClient.build_model(task.spec(0), hparams).eval()
        selection.merge(model, state["clusters"][c])
        with torch.no_grad():
            logits = [model(normalise(x.permute(2, 0, 1)[None], task.inputs))[0] for x in task.x_train]
        losses.append(float(np.mean([float(F.cross_entropy(z, y)) for z, y in zip(logits, task.y_train)])))
    np.testing.assert_allclose(client.losses, losses, rtol=1e-5)
    assert client.choice == int(np.argmin(losses))
    taken = selection.extract(client.model, state["clusters"][0])
    assert equal(taken, state["clusters"][client.choice])
    assert client.after_training(Payload())[1] == {"ifca-cluster": client.choice}


@pytest.mark.parametrize(("trunk", "seed"), [("clustered", 1), ("shared", 6)])
def test_a_local_round_is_descent_from_the_model_with_the_lowest_loss(
    trunk: Literal["clustered", "shared"], seed: int
) -> None:
    hparams = IFCAHParams(clusters=3, trunk=trunk)
    (task,) = digit_tasks(1)
    task = full_batch(task)
    strategy = IFCA(METHOD, hparams)
    state = strategy.init(digits_context(METHOD, hparams, [task], seed))
    made = IFCAClient(task, METHOD, hparams)
    arrays, n, metrics = made.train_round(strategy.send(state, 1, 0), 1)
    x, y = images(task), task.y_train
    w = IFCAClient.build_model(task.spec(0), hparams)

    def loss() -> torch.Tensor:
        return -w(x).log_softmax(dim=1)[torch.arange(len(y)), y].mean()

    losses = []
    for c in range(3):
        selection.merge(w, {**state["shared"], **state["clusters"][c]})
        losses.append(loss().item())
    best = losses.index(min(losses))
    assert best == 1, "neither the default nor the model that was tried last"
    chosen = {**state["shared"], **state["clusters"][best]}
    assert equal(made.reference, chosen), "what a bound on updates is measured from"
    selection.merge(w, chosen)
    steps_by_hand(w.parameters(), loss, task)
    assert n == 40 and metrics["ifca-cluster"] == best
    for name, value in w.named_parameters():
        np.testing.assert_allclose(arrays[name], value.detach(), rtol=1e-3, atol=1e-5)


def test_an_app_of_its_own_may_use_the_client_with_one_model() -> None:
    (task,) = digit_tasks(1)
    client = IFCAClient(task, METHOD, IFCAHParams())
    parameters = client.get_parameters({})
    trained, n, metrics = client.fit(parameters, {})
    assert n == 40 and len(trained) == len(parameters) and metrics["ifca-cluster"] == 0


@pytest.mark.full
def test_contradicting_populations_are_told_apart() -> None:
    """Labels of odd clients are shifted by 3: one model cannot serve both, and two models find them."""
    tasks = digit_tasks(6, relabel=lambda c, y: y if c % 2 == 0 else (y + 3) % 10, train=80)
    _, state, scores = federate(METHOD, IFCAHParams(clusters=2), tasks, 8)
    chosen = state["chosen"]
    assert chosen[0] == chosen[2] == chosen[4] != chosen[1] == chosen[3] == chosen[5]
    _, _, single = federate(fedavg.METHOD, fedavg.METHOD.hparams(), tasks, 8)
    assert min(scores.values()) > max(single.values())


@pytest.mark.parametrize(
    ("args", "down"),
    [("", 2 * DIGITS_BYTES), ("clusters=3", 3 * DIGITS_BYTES), ("trunk=shared", DIGITS_BYTES + 4 * 650)],
)
def test_bytes_and_both_protocols(tmp_path, args: str, down: int) -> None:
    result = fedapp.run(
        method="ifca", method_args=args, clients=3, rounds=1, dataset="digits", data_fraction=0.3, out=tmp_path / "run"
    )
    assert result.summary["bytes_down"] == down
    assert result.summary["bytes_up"] == DIGITS_BYTES
    assert sorted(c for members in result.summary["clusters"] for c in members) == [0, 1, 2]
    assert result.rounds[["received_accuracy", "trained_accuracy"]].notna().all(axis=None)


def test_what_is_shared_covers_the_model_so_no_state_is_read(tmp_path) -> None:
    hparams = IFCAHParams(trunk="shared")
    (task,) = digit_tasks(1)
    client = IFCAClient(task, METHOD, hparams, ClientStore(tmp_path, "ifca", "ab"))
    for strategy in (IFCA(METHOD, hparams), IFCA(METHOD, IFCAHParams(clusters=1))):
        payload = strategy.send(strategy.init(digits_context(METHOD, strategy.hparams, [task])), 1, 0)
        client.restore(1, payload)
        assert not client.starts_from_state
    client.restore(1, Payload(arrays={"head.bias": payload.all()["head.bias"]}))
    assert client.starts_from_state
