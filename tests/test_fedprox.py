"""FedProx: the proximal term against gradients by hand, a whole round against SGD written out, FedAvg at mu = 0."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from clients.fedprox import FedProxClient, FedProxHParams
from fedapp.errors import BadRequest
from fedapp.learning.training import Batch
from fedapp.method import Reply
from fedapp.models import SplitModel
from fedapp.registry import parse_args
from strategies.fedavg import METHOD as FEDAVG
from strategies.fedprox import METHOD
from tests.handmade import (
    assert_close,
    context,
    cross_entropy,
    descend,
    digit_tasks,
    equal,
    federate,
    model_like,
    one_batch_task,
    pixels,
    random_model,
    whole,
)

TASK = one_batch_task()


def client(**hparams: Any) -> FedProxClient:
    return FedProxClient(TASK, METHOD, FedProxHParams(**hparams))


def local_problem(model: SplitModel, received: SplitModel, mu: float) -> torch.Tensor:
    """Algorithm 2, parameter by parameter: F_k(w) + mu/2 ||w - w^t||^2."""
    loss = cross_entropy(model(pixels(TASK)), TASK.y_train)
    for w, w_t in zip(model.parameters(), received.parameters(), strict=True):
        loss = loss + mu / 2 * ((w - w_t.detach().double()) ** 2).sum()
    return loss


def test_one_step_is_the_gradient_of_the_local_problem() -> None:
    """Away from w^t, where the term and its gradient are not 0."""
    one, sent = client(mu=0.3), model_like(TASK)
    payload = whole(sent)
    one.restore(1, payload)
    one.receive(payload)
    one.before_training(payload)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in one.model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator)
    x = pixels(TASK).float()
    loss = one.step_loss(Batch(x, TASK.y_train, [x], torch.arange(len(x))))
    loss.backward()  # type: ignore[no-untyped-call]
    moved = model_like(TASK).double()
    moved.load_state_dict(one.model.state_dict())
    by_hand = local_problem(moved, sent, 0.3)
    assert float(by_hand.detach()) - float(local_problem(moved, sent, 0).detach()) > 10, "the term counts here"
    assert float(loss.detach()) == pytest.approx(float(by_hand.detach()), rel=1e-5)
    for p, gradient in zip(one.model.parameters(), torch.autograd.grad(by_hand, list(moved.parameters())), strict=True):
        assert p.grad is not None
        np.testing.assert_allclose(p.grad.numpy(), gradient.numpy(), atol=2e-6)


def test_a_round_is_sgd_on_the_local_problem() -> None:
    """Three steps: at the first the term is 0, at the next two it pulls back to what was received."""
    sent = model_like(TASK)
    arrays, n, metrics = client(mu=0.5).train_round(whole(sent), 1)
    assert n == len(TASK.y_train) and metrics["steps"] == 3
    assert_close(arrays, descend(sent, lambda model: local_problem(model, sent, 0.5), TASK))


def test_a_larger_mu_stays_nearer_to_what_was_received() -> None:
    sent = model_like(TASK)

    def distance(mu: float) -> float:
        arrays = client(mu=mu).train_round(whole(sent), 1)[0]
        return float(sum(((arrays[n] - p.detach().numpy()) ** 2).sum() for n, p in sent.named_parameters()))

    assert distance(0) > distance(0.1) > distance(1.0) > distance(3.0)


def test_mu_zero_is_fedavg_bit_for_bit() -> None:
    tasks = digit_tasks(3)
    present = {1: [0, 1, 2], 2: [0, 2]}.__getitem__
    _, mine, scores = federate(METHOD, FedProxHParams(mu=0), tasks, 2, present=present)
    _, fedavg, expected = federate(FEDAVG, FEDAVG.hparams(), tasks, 2, present=present)
    _, other, _ = federate(METHOD, FedProxHParams(mu=0.1), tasks, 2, present=present)
    assert equal(mine["model"], fedavg["model"]) and scores == expected
    assert not equal(other["model"], fedavg["model"])


def test_the_server_averages_as_fedavg_does() -> None:
    models = [random_model(np.random.default_rng(k)) for k in range(3)]
    server = METHOD.strategy(METHOD, FedProxHParams())
    state = server.init(context(models[0]))
    after = server.aggregate(state, 1, iter([Reply(k, n, m, {}) for k, (n, m) in enumerate(zip((30, 10, 20), models))]))
    for name in models[0]:
        expected = (30.0 * models[0][name] + 10.0 * models[1][name] + 20.0 * models[2][name]) / 60
        np.testing.assert_allclose(after["model"][name], expected, atol=1e-6)
    assert server.global_arrays(after) == after["model"]


def test_a_negative_mu_is_refused() -> None:
    assert FedProxHParams().mu == 0.01
    with pytest.raises(BadRequest, match="mu"):
        parse_args(METHOD, "mu=-0.1")
