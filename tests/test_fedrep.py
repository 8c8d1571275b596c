"""FedRep: worked phases, what each of them leaves alone, FedPer as its joint form, both means of bodies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from clients.fedbabu import FedBABUClient, FedBABUHParams
from clients.fedrep import FedRepClient, FedRepHParams
from fedapp.method import Payload, Reply
from fedapp.models.selection import everything, extract
from strategies.fedbabu import METHOD as FEDBABU
from strategies.fedrep import METHOD
from tests.handmade import TOY, context, digit_tasks, equal, head_of, model_like, on_toy, toy_task
from tests.test_fedper import BODY, STEPPED

HEAD = ("head.weight", "head.bias")


def test_the_example_head_first_then_body() -> None:
    client = on_toy(FedRepClient)(toy_task(), METHOD, FedRepHParams(head_epochs=1))
    arrays, _, metrics = client.train_round(Payload(common={BODY: TOY[BODY]}), 1)
    assert list(arrays) == [BODY] and metrics["steps"] == 2
    after = everything(client.model)
    for name in HEAD:
        np.testing.assert_allclose(after[name], STEPPED[name], atol=1e-6)
    np.testing.assert_allclose(after[BODY], [[1.037585, 0.447928], [-0.554982, 1.073834]], atol=1e-6)
    assert metrics["train-loss"] == pytest.approx(0.804420, abs=1e-6), "between the phases"
    assert metrics["trained-loss-sum"] / 3 == pytest.approx(0.779893, abs=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_each_phase_leaves_the_other_part_alone(momentum: float) -> None:
    """Two classes are missing here; no memory of the head's phase moves the head in the body's."""
    (task,) = digit_tasks(1, relabel=lambda client, label: min(label, 7), momentum=momentum)
    sent = model_like(task)
    body = Payload(common=extract(sent, [n for n, _ in sent.named_parameters() if n.startswith("features.")]))

    def trained(**epochs: int) -> tuple[dict[str, Any], dict[str, Any]]:
        client = FedRepClient(task, METHOD, FedRepHParams.model_validate(epochs))
        arrays = client.train_round(body, 1)[0]
        return arrays, extract(client.model, HEAD)

    head_alone, both = trained(head_epochs=3, body_epochs=0), trained(head_epochs=3, body_epochs=1)
    body_alone = trained(head_epochs=0, body_epochs=1)
    assert equal(head_alone[0], body.common) and not equal(both[0], body.common)
    assert equal(head_alone[1], both[1]) and not equal(both[1], body_alone[1])
    start = FedRepClient(task, METHOD, FedRepHParams())
    start.restore(1, body)
    assert equal(body_alone[1], extract(start.model, HEAD)) and not equal(body_alone[0], both[0])


@pytest.mark.parametrize("batch_size", [40, 8])
def test_without_a_phase_for_the_head_it_is_fedbabu_up_to_the_order_of_batches(batch_size: int) -> None:
    """The passes over the body have batches of their own; with one batch an epoch these are the same."""
    (task,) = digit_tasks(1)
    task = replace(task, train=task.train.replaced(batch_size=batch_size))
    sent = Payload(common=everything(model_like(task)))
    ours = FedRepClient(task, METHOD, FedRepHParams(head_epochs=0, start="common"))
    theirs = FedBABUClient(task, FEDBABU, FedBABUHParams(tune_epochs=0))
    bodies = [client.train_round(sent, 1)[0] for client in (ours, theirs)]
    assert bodies[0].keys() == bodies[1].keys()
    gap = max(float(np.abs(bodies[0][n] - bodies[1][n]).max()) for n in bodies[1])
    assert gap < 1e-6 if batch_size == 40 else gap > 1e-4


def test_a_consensus_of_bodies_stays_and_both_means_are_worked() -> None:
    bodies = [np.full(2, v, np.float32) for v in (1.0, 4.0, 7.0)]
    for average, all_three, two in (("samples", 3.5, 1.75), ("plain", 4.0, 2.5)):
        server = METHOD.strategy(METHOD, FedRepHParams.model_validate({"average": average}))
        state = server.init(context({BODY: np.zeros(2, np.float32)}))
        replies = [Reply(k, n, {BODY: b}, {}) for k, (n, b) in enumerate(zip((30, 10, 20), bodies, strict=True))]
        assert server.aggregate(state, 1, iter(replies))["model"][BODY] == pytest.approx(all_three)
        assert server.aggregate(state, 1, iter(replies[:2]))["model"][BODY] == pytest.approx(two)
        same = [Reply(k, n, {BODY: bodies[1]}, {}) for k, n in enumerate((30, 10, 20))]
        assert np.array_equal(server.aggregate(state, 1, iter(same))["model"][BODY], bodies[1])


def test_a_newcomer_trains_its_head_alone_for_the_epochs_that_all_methods_have() -> None:
    (task,) = digit_tasks(1)
    sent = model_like(task)
    client = FedRepClient(task, METHOD, FedRepHParams())
    client.meet(head_of(sent), 3, "unseen_trained@4", 4)  # the payload holds no body, so the client's own stays
    before = FedRepClient(task, METHOD, FedRepHParams())
    before.restore(3, Payload())
    assert client.report.samples == 4 * task.num_samples
    trunk = [n for n, _ in before.model.named_parameters() if n.startswith("features.")]
    assert equal(extract(client.model, trunk), extract(before.model, trunk))
    assert not equal(extract(client.model, HEAD), extract(sent, HEAD))


@pytest.mark.parametrize(
    ("args", "epochs"), [({}, 12), ({"head_epochs": 1, "body_epochs": 5}, 6), ({"phases": "joint"}, 2)]
)
def test_epochs_of_a_round(args: dict[str, Any], epochs: int) -> None:
    hparams = FedRepHParams.model_validate(args)
    client = FedRepClient(digit_tasks(1)[0], METHOD, hparams)  # two epochs of 40 samples
    assert client.epochs() == epochs
    client.train_round(Payload(), 1)
    assert client.report.samples == 40 * epochs
