"""FedAvg: a round against SGD written out, the weighted mean by hand, and what it must be in simple cases."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from clients.base import FedClient
from fedapp.learning.task import Task
from fedapp.method import Arrays, BaseHParams, Reply
from fedapp.models import SplitModel
from strategies.fedavg import METHOD, FedAvg
from tests.handmade import (
    assert_close,
    context,
    cross_entropy,
    descend,
    equal,
    flat,
    model_like,
    one_batch_task,
    pixels,
    random_model,
    whole,
)


def server(initial: Arrays) -> tuple[FedAvg, dict[str, object]]:
    made = FedAvg(METHOD, BaseHParams())
    return made, made.init(context(initial))


def models(count: int, seed: int = 0) -> list[Arrays]:
    rng = np.random.default_rng(seed)
    return [random_model(rng) for _ in range(count)]


def replies(arrays: Sequence[Arrays], counts: Sequence[int]) -> list[Reply]:
    return [Reply(k, n, m, {}) for k, (n, m) in enumerate(zip(counts, arrays, strict=True))]


def pooled_loss(model: SplitModel, *tasks: Task) -> torch.Tensor:
    """Mean cross-entropy over the images of all these clients together."""
    return cross_entropy(model(torch.cat([pixels(t) for t in tasks])), torch.cat([t.y_train for t in tasks]))


@pytest.mark.parametrize("model", ["digits-a", "digits-b"])
def test_a_round_is_sgd_from_the_received_model(model: str) -> None:
    task = one_batch_task(model=model)
    sent = model_like(task)
    arrays, n, metrics = FedClient(task, METHOD, BaseHParams()).train_round(whole(sent), 1)
    assert n == 12 and metrics["steps"] == 3
    assert_close(arrays, descend(sent, lambda model: pooled_loss(model, task), task))


def test_the_average_is_weighted_by_samples() -> None:
    """Algorithm 1: w = sum_k n_k w_k / sum_j n_j over the clients that replied, in float64."""
    clients, counts = models(4), (100, 60, 40, 7)
    fed, state = server(models(1, seed=9)[0])
    after = fed.aggregate(state, 1, iter(replies(clients, counts)))
    for name in clients[0]:
        expected = sum(n * m[name].astype(np.float64) for n, m in zip(counts, clients, strict=True)) / 207
        np.testing.assert_allclose(after["model"][name], expected, atol=1e-6)
        assert after["model"][name].dtype == np.float32
    some = fed.aggregate(state, 1, iter(replies(clients, counts)[1:3]))
    np.testing.assert_allclose(flat(some["model"]), 0.6 * flat(clients[1]) + 0.4 * flat(clients[2]), atol=1e-6)


def test_one_full_step_each_is_one_step_on_all_data_together() -> None:
    """FedSGD: with one step a client, averaging the models is averaging the gradients."""
    tasks = [
        one_batch_task(n, epochs=1, momentum=0.0, client=k, seed=k, batch_size=32) for k, n in enumerate((4, 8, 20))
    ]
    start = model_like(tasks[0])
    fed, state = server(whole(start).common)
    sent = [fed.send(state, 1, t.client) for t in tasks]
    got = [FedClient(t, METHOD, BaseHParams()).train_round(p, 1) for t, p in zip(tasks, sent, strict=True)]
    after = fed.aggregate(state, 1, iter(Reply(k, n, arrays, {}) for k, (arrays, n, _) in enumerate(got)))
    assert_close(after["model"], descend(start, lambda model: pooled_loss(model, *tasks), tasks[0]))


def test_equal_models_come_back_equal_and_so_does_a_single_one() -> None:
    one = models(1)[0]
    fed, state = server(models(1, seed=9)[0])
    assert equal(fed.aggregate(state, 1, iter(replies([one] * 5, (3, 1, 4, 1, 5))))["model"], one)
    assert equal(fed.aggregate(state, 1, iter(replies([one], (7,))))["model"], one)


def test_every_client_gets_the_one_model_which_is_also_the_global_one() -> None:
    initial = models(1)[0]
    fed, state = server(initial)
    payloads = [fed.send(state, 1, k) for k in (0, 7)]
    assert all(not p.arrays and not p.scalars for p in payloads)
    assert all(payloads[0].common[n] is payloads[1].common[n] is initial[n] for n in initial)
    found = fed.global_arrays(state)
    assert found is not None and equal(found, initial)
