"""FedDBE: worked numbers, a round written out, FedAvg as reduction, what is private, when a mean is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from clients._models import BiasModel
from clients.feddbe import MEAN, FedDBEClient, FedDBEHParams, mean_regulariser
from fedapp.engines.local import RunResult
from fedapp.errors import Impossible
from fedapp.learning.state import read_safetensors
from fedapp.learning.training import Batch
from fedapp.method import Payload, Reply, ServerState
from fedapp.models import SplitModel, selection
from fedapp.reduce.reader import Policy
from strategies.fedavg import METHOD as FEDAVG
from strategies.feddbe import METHOD, FedDBE
from tests.handmade import (
    context,
    full_batch,
    guard,
    images,
    one_batch_task,
    refusal,
    reply,
    steps_by_hand,
)

WIDTH = 64
TASK = one_batch_task(model="digits-a")


def client(task: Any = TASK, **hparams: Any) -> FedDBEClient:
    return FedDBEClient(task, METHOD, FedDBEHParams(**hparams))


def shared(seed: int = 9) -> dict[str, Any]:
    """The arrays of a model that travel."""
    model = FedDBEClient.build_model(TASK.spec(seed), FedDBEHParams())
    return {n: a for n, a in selection.everything(model).items() if n != "bias_memory"}


def toy(**hparams: Any) -> tuple[FedDBEClient, Batch]:
    """The client of the worked example: its representations are given, in float64."""
    made = client(**{"kappa": 50.0, **hparams})
    head = nn.Linear(2, 3).double()
    model = SplitModel(name="toy", features=nn.Identity(), activation=nn.Identity(), head=head)
    made.model = BiasModel(model, trained=True).double()
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[0.5, -0.2], [-0.3, 0.8], [0.1, 0.1]]))
        head.bias.zero_()
        made.model.bias_memory.copy_(torch.tensor([0.1, -0.1]))
    made.before_training(Payload())
    made.target = torch.tensor([0.2, 0.6], dtype=torch.float64)
    z = torch.tensor([[1, 0], [0.5, 1], [0, 0.5]], dtype=torch.float64, requires_grad=True)
    return made, Batch(z, torch.arange(3), [z], torch.arange(3))


def test_worked_numbers() -> None:
    made, batch = toy()
    loss = made.step_loss(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss) == pytest.approx(2.150773, abs=6e-7)
    np.testing.assert_allclose(made.model.bias_memory.grad, [0.007517, -0.003768], atol=6e-7)
    plain, batch = toy(kappa=0.0)
    assert float(plain.step_loss(batch).detach()) == pytest.approx(0.900773, abs=6e-7)
    z = torch.tensor([[1, 0], [0.5, 1], [0, 0.5]], dtype=torch.float64, requires_grad=True)
    mean_regulariser(z.mean(dim=0), torch.tensor([0.2, 0.6]), 50.0).backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    np.testing.assert_allclose(z.grad, np.tile([2.5, -0.833333], (3, 1)), atol=6e-7)


def test_the_default_weight_is_that_of_the_authors_at_any_width() -> None:
    """Weight 50 / 2 on the mean over their 512 coordinates is 25 / 512 on the squared distance."""
    target = np.linspace(0, 1, WIDTH, dtype=np.float32)
    losses = []
    for hparams in ({}, {"kappa": 0.0}):
        made = client(**hparams)
        sent = Payload(common={**shared(), MEAN: target})
        made.restore(2, sent)
        made.receive(sent)
        made.before_training(sent)
        x, y = images(TASK), TASK.y_train
        losses.append(float(made.step_loss(Batch(x, y, [x], torch.arange(len(y))))))
    apart = made.model.represent(x).mean(dim=0) - torch.from_numpy(target)
    squared = sum(float(a) ** 2 for a in apart)
    assert losses[0] - losses[1] == pytest.approx(25 / 512 * squared, rel=1e-4)
    assert [FedDBEHParams().weight(d) for d in (64, 512)] == [6.25, 50.0]


def test_the_running_mean_begins_at_0_and_old_batches_are_constants() -> None:
    made, batch = toy(mu=0.1)
    first = made.step_loss(batch)
    np.testing.assert_allclose(made.mean.detach(), [0.05, 0.05], atol=1e-7)
    assert float(first.detach()) == pytest.approx(0.900773 + 50 * 0.08125, abs=1e-5)
    made.step_loss(batch).backward()  # type: ignore[no-untyped-call]
    np.testing.assert_allclose(made.mean.detach(), [0.095, 0.095], atol=1e-7)
    term = 50 / 2 * 2 * (np.array([0.095, 0.095]) - [0.2, 0.6]) / 2 * 0.1 / 3
    plain, other = toy(kappa=0.0)
    plain.step_loss(other).backward()  # type: ignore[no-untyped-call]
    assert batch.x.grad is not None and other.x.grad is not None
    np.testing.assert_allclose(batch.x.grad - other.x.grad, np.tile(term, (3, 1)), atol=1e-6)


def test_two_steps_after_round_1_are_descent_on_the_papers_loss() -> None:
    """The vector takes its own steps, from those of the round before."""
    made = client(full_batch(TASK), kappa=3.0)
    target = np.linspace(0, 1, WIDTH, dtype=np.float32)
    sent = Payload(common={**shared(), MEAN: target})
    found, _, metrics = made.train_round(sent, 2)
    model = FedDBEClient.build_model(TASK.spec(9), FedDBEHParams())
    x, y = images(TASK), TASK.y_train
    first = []

    def loss() -> torch.Tensor:
        z = torch.relu(model.features(x))
        logits = (z + model.bias_memory) @ model.head.weight.T + model.head.bias
        total = F.cross_entropy(logits, y) + 3 / 2 * ((z.mean(0) - torch.from_numpy(target)) ** 2).mean()
        first.append(float(total.detach()))
        return total

    steps_by_hand(model.parameters(), loss, made.task)
    assert metrics["train-loss"] == pytest.approx(np.mean(first), rel=1e-5)
    for name, p in model.named_parameters():
        got = made.model.bias_memory.detach().numpy() if name == "bias_memory" else found[name]
        np.testing.assert_allclose(got, p.detach(), rtol=1e-3, atol=2e-6)
    assert float(made.model.bias_memory.detach().norm()) > 1e-4 and MEAN not in found
    assert "bias_memory" not in found and made.reference.keys() == shared().keys()


@pytest.mark.parametrize("mean", ["split", "running"])
def test_round_1_is_plain_training_and_tells_the_mean(mean: str) -> None:
    made = client(mean=mean, mu=0.5)
    found, _, _ = made.train_round(Payload(common=shared()), 1)
    assert not made.model.bias_memory.any()
    with torch.no_grad():
        z = made.model.eval().represent(images(TASK)).mean(dim=0)
    assert found[MEAN].dtype == np.float32 and found[MEAN].shape == (WIDTH,)
    if mean == "split":
        np.testing.assert_allclose(found[MEAN], z, rtol=1e-5, atol=1e-6)
    else:
        assert 0.2 < float(np.linalg.norm(found[MEAN]) / z.norm()) < 1


def strategy() -> tuple[FedDBE, ServerState]:
    made = FedDBE(METHOD, FedDBEHParams())
    return made, made.init(context({"head.weight": np.zeros(2, np.float32)}, 3, width=2))


def told(number: int, n: int, *mean: float) -> Reply:
    return reply(number, n, {"head.weight": np.ones(2, np.float32), **({MEAN: np.float32(mean)} if mean else {})})


def test_the_mean_is_taken_once_weighted_by_samples() -> None:
    server, state = strategy()
    assert MEAN not in server.send(state, 1, 0).all()
    assert server.aggregate(state, 1, iter([])) is state, "a round without replies: the next one asks again"
    second = server.aggregate(state, 1, iter([told(0, 10, 1, 2), told(2, 30, 5, 0)]))
    assert second["mean"].tolist() == [4.0, 0.5] and "mean" not in state
    assert server.send(second, 2, 1).common[MEAN] is second["mean"]
    third = server.aggregate(second, 2, iter([told(1, 10)]))
    assert third["mean"] is second["mean"] and set(third["model"]) == {"head.weight"}
    assert server.aggregate(third, 3, iter([])) is third
    assert set(server.global_arrays(third) or {}) == {"head.weight", "bias_memory"}


def test_a_mean_is_refused_once_it_is_known() -> None:
    server, state = strategy()
    second = server.aggregate(state, 1, iter([told(0, 5, 1, 2)]))
    assert refusal(server, second, told(0, 5)) is None
    problem = refusal(server, second, told(0, 5, 1, 2))
    assert isinstance(problem, Impossible) and "is unexpected" in problem


def test_a_run_keeps_the_vectors_at_the_clients(tiny: Callable[..., RunResult]) -> None:
    """With sampled clients: one that sits out keeps its vector, and one that never trained scores with zeros."""
    result = tiny(method="feddbe", clients=4, rounds=3, fraction_train=0.5)
    model, mean = 4 * 38_282, 4 * WIDTH
    assert list(result.rounds["bytes_down"]) == [model, model + mean, model + mean]
    assert list(result.rounds["bytes_up"]) == [model + mean, model, model]
    folders = [result.out / "state" / "run" / str(c) for c in set(result.clients.query("round > 1")["client"])]
    vectors = [read_safetensors(max(f.glob("*.safetensors")))[0]["model/bias_memory"] for f in folders]
    assert all(v.any() for v in vectors) and len({v.tobytes() for v in vectors}) == len(vectors) > 1
    assert result.summary["ok"] and len(result.final) == 4


def test_representations_hide_no_long_update_from_the_norm() -> None:
    """Means are longer than honest changes of a model: in one vector a change 16 times too long would pass."""
    ctx, wide = context({"head.weight": np.zeros((2, 3), np.float32)}, clients=5, num_classes=2, width=3), np.ones(3)
    changes = [0.1, 0.1, 0.1, 0.1, 2.0]
    got = {}
    for method in (METHOD, FEDAVG):
        strategy = method.strategy(method, method.hparams(), policy=Policy(guard(robust="norm")))
        state = strategy.init(ctx)
        sent = [
            reply(k, 10, {"head.weight": np.full((2, 3), c, np.float32), MEAN: np.float32((k < 4) * 5 * wide)})
            for k, c in enumerate(changes)
        ]
        got[method.id] = strategy.aggregate(state, 1, iter(sent))["model"]["head.weight"]
    np.testing.assert_array_equal(got["feddbe"], got["fedavg"])
