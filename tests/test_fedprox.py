"""FedProx: the proximal term against gradients by hand, a whole round against SGD written out, FedAvg at mu = 0."""

from __future__ import annotations

from typing import Any

import torch

from clients.fedprox import FedProxClient, FedProxHParams
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


def test_a_round_is_sgd_on_the_local_problem() -> None:
    """Three steps: at the first the term is 0, at the next two it pulls back to what was received."""
    sent = model_like(TASK)
    arrays, n, metrics = client(mu=0.5).train_round(whole(sent), 1)
    assert n == len(TASK.y_train) and metrics["steps"] == 3
    assert_close(arrays, descend(sent, lambda model: local_problem(model, sent, 0.5), TASK))
