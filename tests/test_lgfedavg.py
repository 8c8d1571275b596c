"""LG-FedAvg: a round against SGD written out, the heads' mean by hand, private extractors, one client is Standalone."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from clients.base import FedClient
from fedapp.learning.state import ClientStore
from fedapp.learning.task import Task
from fedapp.method import Arrays, Payload, Reply
from fedapp.models import SplitModel
from fedapp.models.selection import everything
from strategies.lgfedavg import METHOD, LGFedAvgHParams
from strategies.local import METHOD as LOCAL
from tests.handmade import (
    assert_close,
    context,
    cross_entropy,
    descend,
    digit_tasks,
    equal,
    federate,
    head_of,
    model_like,
    one_batch_task,
    pixels,
)


def client(task: Task, folder: Path) -> FedClient:
    return FedClient(task, METHOD, LGFedAvgHParams(), ClientStore(folder / str(task.client), "lgfedavg", "ab"))


def with_head(model: SplitModel, head: SplitModel) -> SplitModel:
    """The trunk of one model under the head of another."""
    both = copy.deepcopy(model)
    both.head.load_state_dict(head.head.state_dict())
    return both


def test_two_rounds_train_the_own_trunk_under_the_received_head(tmp_path: Path) -> None:
    task = one_batch_task()

    def loss(model: SplitModel) -> torch.Tensor:
        return cross_entropy(model(pixels(task)), task.y_train)

    first = client(task, tmp_path)
    first.restore(1, head_of(model_like(task)))
    model = first.model  # the client's own initial model
    for server_round in (1, 2):
        sent = model_like(task, seed=20 + server_round)
        one = client(task, tmp_path)
        arrays, n, _ = one.train_round(head_of(sent), server_round)
        model = descend(with_head(model, sent), loss, task).float()
        assert n == 12
        assert_close(arrays, model, prefix="head.")
        assert_close(everything(one.model), model)


@pytest.mark.parametrize("average", ["samples", "plain"])
def test_the_heads_average_is_weighted_by_samples_or_plain_over_the_participants(average: str) -> None:
    rng, counts = np.random.default_rng(0), (30, 10, 20)

    def draw() -> Arrays:
        return {n: rng.normal(size=s).astype(np.float32) for n, s in (("head.weight", (3, 4)), ("head.bias", (3,)))}

    heads, start = [draw() for _ in counts], draw()
    server = METHOD.strategy(METHOD, LGFedAvgHParams.model_validate({"average": average}))
    state = server.init(context(start))
    sent = server.send(state, 1, 0)
    assert equal(sent.common, start) and not sent.arrays
    replies = [Reply(k, n, h, {}) for k, (n, h) in enumerate(zip(counts, heads, strict=True))]
    for chosen in (replies, replies[::2]):
        after = server.aggregate(state, 1, iter(chosen))["model"]
        weights = [float(r.num_samples) if average == "samples" else 1.0 for r in chosen]
        for name in start:
            expected = sum(w / sum(weights) * r.arrays[name].astype(np.float64) for w, r in zip(weights, chosen))
            np.testing.assert_allclose(after[name], expected, atol=1e-6)
    assert equal(server.aggregate(state, 1, iter([]))["model"], start)
    assert server.global_arrays(state) is None, "an averaged head alone is no model"


def test_worked_averages() -> None:
    """Three clients of 30, 10 and 20 images, and the first two of them alone."""
    heads = [{"head.weight": np.full((1, 1), v, np.float32)} for v in (1.0, 4.0, 7.0)]
    replies = [Reply(k, n, h, {}) for k, (n, h) in enumerate(zip((30, 10, 20), heads, strict=True))]
    for average, all_three, two in (("samples", 3.5, 1.75), ("plain", 4.0, 2.5)):
        server = METHOD.strategy(METHOD, LGFedAvgHParams.model_validate({"average": average}))
        state = server.init(context(heads[0]))
        assert server.aggregate(state, 1, iter(replies))["model"]["head.weight"] == pytest.approx(all_three)
        assert server.aggregate(state, 1, iter(replies[:2]))["model"]["head.weight"] == pytest.approx(two)


def test_different_architectures_share_a_head_and_nothing_else(tmp_path: Path) -> None:
    tasks = [one_batch_task(model=m, client=k) for k, m in enumerate(("digits-a", "digits-b", "digits-c"))]
    for task in tasks:
        arrays = client(task, tmp_path).train_round(head_of(model_like(task)), 1)[0]
        assert {n: a.shape for n, a in arrays.items()} == {"head.weight": (4, 64), "head.bias": (4,)}


def test_with_one_client_it_is_standalone_from_the_same_head(tmp_path: Path) -> None:
    """The average of one head is that head, so every round goes on where the last one ended."""
    (task,) = digit_tasks(1)
    store = ClientStore(tmp_path / "lg", METHOD.id, "ab")
    _, state, _ = federate(METHOD, LGFedAvgHParams(), [task], 1, stores={0: store})
    alone = ClientStore(tmp_path / "alone", LOCAL.id, "ab")
    first = store.load(2)
    assert first is not None
    alone.save(1, first.arrays)
    together = FedClient(task, METHOD, LGFedAvgHParams(), store)
    together.train_round(METHOD.strategy(METHOD, LGFedAvgHParams()).send(state, 2, 0), 2)
    own = FedClient(task, LOCAL, LOCAL.hparams(), alone)
    own.train_round(Payload(), 2)
    assert equal(everything(together.model), everything(own.model))
