"""FedRoD: worked losses, gradients and a worked step, a generic model that is FedAvg's, a personal head that stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fedapp
from clients._models import RoDModel
from clients.fedrod import FedRoDClient, FedRoDHParams, log_prior
from fedapp.engines.local import RunResult
from fedapp.learning.state import ClientStore
from fedapp.learning.training import Batch
from fedapp.method import Payload
from fedapp.models import SplitModel
from fedapp.models.selection import everything, extract
from fedapp.tasks import simulated as tasks
from strategies.fedrod import METHOD
from tests.handmade import TOY, cross_entropy, descend, equal, model_like, one_batch_task, pixels, toy_model, toy_task

Tiny = Callable[..., RunResult]
LOGITS = [[1.0, 0.0, 0.5, -1.0], [0.0, 1.0, 0.0, 0.0]]
COUNTS = torch.tensor([6, 3, 1, 0])
EMPTY = {"personal.weight", "personal.bias"}


@pytest.mark.parametrize(
    ("gamma", "absent", "loss"), [(1.0, "drop", 1.484550), (1.0, "one", 1.525201), (0.5, "drop", 1.254788)]
)
def test_the_worked_balanced_losses(gamma: float, absent: str, loss: float) -> None:
    z, y = torch.tensor(LOGITS, dtype=torch.float64), torch.tensor([0, 2])
    assert float(F.cross_entropy(z, y)) == pytest.approx(1.245118, abs=1e-6)
    assert float(F.cross_entropy(z + log_prior(COUNTS, gamma, absent).double(), y)) == pytest.approx(loss, abs=1e-6)


def test_the_worked_gradients() -> None:
    """A class without samples has a gradient of exactly 0, and nothing is NaN."""
    y = torch.tensor([0, 2])
    balanced = [[-0.110903, 0.071570, 0.039333, 0], [0.197956, 0.269051, -0.467007, 0]]
    plain = [[-0.263005, 0.087186, 0.143745, 0.032074], [0.087439, 0.237683, -0.412561, 0.087439]]
    for gamma, worked in ((1.0, balanced), (0.0, plain)):
        z = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
        prior = log_prior(COUNTS, gamma, "drop").double() if gamma else 0
        F.cross_entropy(z + prior, y).backward()
        assert z.grad is not None
        np.testing.assert_allclose(z.grad, worked, atol=1e-6)
        assert not gamma or not z.grad[:, 3].any()
    z = torch.tensor(LOGITS, requires_grad=True)
    equal_counts = log_prior(torch.full((4,), 7), 1.0, "drop")
    torch.testing.assert_close(*(torch.autograd.grad(F.cross_entropy(z + p, y), z)[0] for p in (equal_counts, 0)))


class Toy(FedRoDClient):
    """The common example, with class counts of 3, 2 and 1."""

    @classmethod
    def build_model(cls, spec: Any, hparams: Any) -> SplitModel:
        return RoDModel(toy_model()).double()

    def before_training(self, payload: Payload) -> None:
        super().before_training(payload)
        self.log_prior = log_prior(torch.tensor([3, 2, 1]), 1.0, "drop").double()


def test_one_step_of_the_example() -> None:
    client = Toy(toy_task(), METHOD, FedRoDHParams())
    arrays, _, metrics = client.train_round(Payload(common=TOY), 1)
    worked = {
        "features.1.weight": [[1.016781, 0.428695], [-0.530422, 1.079774]],
        "head.weight": [[0.441100, -0.311206], [-0.311722, 0.888033], [0.170622, 0.123173]],
        "head.bias": [-0.115162, 0.021147, 0.094015],
        "personal.weight": [[0.005396, -0.097359], [-0.015079, 0.089889], [0.009683, 0.007470]],
        "personal.bias": [-0.032468, 0.017861, 0.014607],
    }
    after = everything(client.model)
    assert set(after) == set(worked) and set(arrays) == set(worked) - EMPTY
    for name, value in worked.items():
        np.testing.assert_allclose(after[name], value, atol=1e-6, err_msg=name)
    assert metrics["generic-loss"] == pytest.approx(0.982458, abs=1e-6)
    assert metrics["personal-loss"] == pytest.approx(0.841809, abs=1e-6)
    assert metrics["train-loss"] == pytest.approx(0.982458 + 0.841809, abs=1e-6)


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_the_generic_model_descends_the_balanced_loss_of_the_own_counts(gamma: float) -> None:
    """Three steps in float64, with six images of class 0, five of class 1, one of class 2 and none of class 3."""
    task = replace(one_batch_task(), y_train=torch.tensor([0, 1] * 5 + [0, 2]))
    sent = RoDModel(model_like(task))
    prior = gamma * torch.tensor([6.0, 5.0, 1.0, 0.0], dtype=torch.float64).log()

    def loss(model: SplitModel) -> torch.Tensor:
        return cross_entropy(model.head(model.represent(pixels(task))) + prior, task.y_train)

    plain = model_like(task)
    expected = descend(plain, loss, task)
    shared = Payload(common={n: a for n, a in everything(sent).items() if n not in EMPTY})
    arrays = FedRoDClient(task, METHOD, FedRoDHParams(gamma=gamma)).train_round(shared, 1)[0]
    for name, p in expected.named_parameters():
        np.testing.assert_allclose(arrays[name], p.detach(), atol=2e-6, err_msg=name)


def test_the_personal_loss_moves_the_personal_head_alone() -> None:
    task = one_batch_task()
    client = FedRoDClient(task, METHOD, FedRoDHParams())
    client.restore(1, Payload())
    client.before_training(Payload())
    with torch.no_grad():
        client.model.personal.weight.normal_()
    losses: list[torch.Tensor] = []
    mean = client.cross_entropy
    client.cross_entropy = lambda z, y: (losses.append(mean(z, y)), losses[-1])[1]  # type: ignore[method-assign]
    x = pixels(task).float()
    client.step_loss(Batch(x, task.y_train, [x], torch.arange(len(x))))
    names = [n for n, _ in client.model.named_parameters()]
    for loss, moved in zip(losses, (set(names) - EMPTY, EMPTY), strict=True):
        gradients = torch.autograd.grad(loss, list(client.model.parameters()), allow_unused=True)
        assert {n for n, g in zip(names, gradients, strict=True) if g is not None} == moved


def test_the_training_loss_is_the_sum_of_both(tiny: Tiny) -> None:
    ours = tiny(method="fedrod")
    assert np.allclose(ours.clients["generic_loss"] + ours.clients["personal_loss"], ours.clients["train_loss"])


def test_a_client_goes_on_with_its_personal_head(tmp_path: Path) -> None:
    task = one_batch_task()
    sent = Payload(common=everything(model_like(task)))
    store = ClientStore(tmp_path / "0", METHOD.id, "ab")
    first = FedRoDClient(task, METHOD, FedRoDHParams(), store)
    first.train_round(sent, 1)
    later = FedRoDClient(task, METHOD, FedRoDHParams(), store)
    later.restore(5, sent)
    later.receive(sent)
    assert equal(extract(later.model, EMPTY), extract(first.model, EMPTY))
    assert all(a.any() for a in extract(first.model, EMPTY).values())
    assert equal({n: a for n, a in everything(later.model).items() if n not in EMPTY}, sent.common)


def test_the_stored_global_model_is_the_generic_one(tiny: Tiny) -> None:
    run = tiny(method="fedrod")
    net = fedapp.load(run.out)
    assert isinstance(net.model, RoDModel) and not net.model.personal.weight.any()
    x, y = tasks.federated(run.config, 3).central(torch.device("cpu")) or pytest.fail("no central test set")
    accuracy = float((net.predict(x).argmax(1) == y.numpy()).mean())
    assert accuracy == pytest.approx(run.summary["accuracy"]["global"]["last"], abs=1e-12)
    assert fedapp.load(run.out, 0).model.personal.weight.any()
