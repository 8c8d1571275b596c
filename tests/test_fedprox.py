"""FedProx: the proximal term against gradients by hand, a whole round against SGD written out, FedAvg at mu = 0."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from clients.fedprox import FedProxClient, FedProxHParams
from fedapp.learning.training import Batch
from fedapp.models import SplitModel
from strategies.fedprox import METHOD
from tests.handmade import (
    assert_close,
    cross_entropy,
    descend,
    model_like,
    one_batch_task,
    pixels,
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
