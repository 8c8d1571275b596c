"""Standalone: nothing travels, and rounds continue one private training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from clients.base import FedClient
from fedapp.learning.state import ClientStore
from fedapp.method import BaseHParams, Payload, Reply
from fedapp.models import SplitModel
from fedapp.models.selection import everything
from strategies.local import METHOD, Standalone
from tests.handmade import (
    assert_close,
    context,
    cross_entropy,
    descend,
    equal,
    model_like,
    one_batch_task,
    pixels,
    random_model,
)

TASK = one_batch_task()


def client(folder: Path, client: int = 0) -> FedClient:
    task = one_batch_task(client=client)
    return FedClient(task, METHOD, BaseHParams(), ClientStore(folder / str(client), "local", "ab"))


def loss(model: SplitModel) -> torch.Tensor:
    return cross_entropy(model(pixels(TASK)), TASK.y_train)


def test_rounds_continue_one_training_of_the_clients_own_model(tmp_path: Path) -> None:
    """Each round starts where the last one ended, with a fresh optimizer, and sends nothing."""
    model = None
    for server_round in (1, 2):
        one = client(tmp_path)
        if model is None:
            one.restore(1, Payload())
            model = one.model
        arrays, n, metrics = one.train_round(Payload(), server_round)
        model = descend(model, loss, TASK).float()
        assert arrays == {} and n == 12 and metrics["steps"] == 3
        assert_close(everything(one.model), model)


def test_clients_start_from_different_models(tmp_path: Path) -> None:
    starts = []
    for k in (0, 1):
        one = client(tmp_path, k)
        one.restore(1, Payload())
        starts.append(everything(one.model))
    assert not any(np.array_equal(starts[0][n], starts[1][n]) for n in starts[0])


def test_both_scores_of_a_final_evaluation_are_the_own_model_as_trained(tmp_path: Path) -> None:
    client(tmp_path).train_round(Payload(), 1)
    one = client(tmp_path)
    found = one.evaluate_round(Payload(), 2)
    kinds = [{n.split("-", 1)[1]: v for n, v in found.items() if n.startswith(k)} for k in ("received", "trained")]
    assert kinds[0] == kinds[1] and kinds[0]["total"] == len(TASK.y_test)


def test_the_server_sends_nothing_keeps_nothing_and_reads_every_reply() -> None:
    server = Standalone(METHOD, BaseHParams())
    ctx = context(random_model(np.random.default_rng(0)))
    state = server.init(ctx)
    assert state == {} and server.context is ctx
    payload = server.send(state, 1, 0)
    assert payload.nbytes == 0 and not payload.scalars
    replies = iter([Reply(k, 5, {}, {}) for k in range(3)])
    assert server.aggregate(state, 1, replies) is state
    assert next(replies, None) is None, "a reply that stays unread is an error of the round loop"
    assert server.global_arrays(state) is None


def test_nothing_that_a_server_sends_changes_the_training(tmp_path: Path) -> None:
    """The lower bound: whoever else takes part, a client's model depends on its own data alone."""
    one, two = client(tmp_path / "a"), client(tmp_path / "b")
    one.train_round(Standalone(METHOD, BaseHParams()).send({}, 1, 0), 1)
    two.train_round(Payload(), 1)
    assert equal(everything(one.model), everything(two.model))
    assert not equal(everything(one.model), everything(model_like(TASK)))
