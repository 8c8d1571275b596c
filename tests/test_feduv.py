"""FedUV: worked numbers, loops as oracle, gradients by differences, batches without spread, FedAvg at zero weights."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clients.feduv import FedUVClient, FedUVHParams, uniformity_loss, variance_loss
from fedapp import run
from fedapp.data.transforms import InputSpec
from fedapp.learning.task import Task
from fedapp.method import Payload
from fedapp.models import build_model
from fedapp.models.selection import extract, merge
from strategies.feduv import METHOD
from tests.handmade import full_batch, images, short, steps_by_hand

INPUTS = InputSpec((1, 8, 8), 16.0, (0.3,), (0.4,))
LOGITS = torch.tensor([[2.0, 0, 0], [0, 1, 0], [1, 1, 0]], dtype=torch.float64)
Z = torch.tensor([[0.0, 0], [1, 0], [0, 2]], dtype=torch.float64)


def variance_loops(logits: Tensor) -> float:
    """L_V with plain floats."""
    rows = []
    for row in logits.tolist():
        weights = [math.exp(v - max(row)) for v in row]
        rows.append([w / sum(weights) for w in weights])
    gamma = statistics.stdev([1.0] + [0.0] * (len(rows[0]) - 1))  # of a column of the identity matrix
    return statistics.fmean(max(0.0, gamma - statistics.stdev(column)) for column in zip(*rows))


def squared_distances(z: Tensor) -> list[float]:
    rows = z.tolist()
    return [math.dist(rows[a], rows[b]) ** 2 for a in range(len(rows)) for b in range(a + 1, len(rows))]


def uniformity_loops(z: Tensor, median: float | None = None) -> float:
    """L_U with plain floats; `median` instead of the batch's own."""
    squared = squared_distances(z)
    if median is None:
        median = statistics.median_low([s for s in squared if s > 0])
    return statistics.fmean(math.exp(-s / median) for s in squared)


def test_worked_numbers() -> None:
    probabilities = F.softmax(LOGITS, dim=1)
    assert probabilities.std(dim=0).tolist() == pytest.approx([0.290952, 0.239418, 0.052764], abs=6e-7)
    assert squared_distances(Z) == pytest.approx([1, 4, 5])
    l_v, l_u = variance_loss(LOGITS), uniformity_loss(Z)
    assert l_v.item() == pytest.approx(0.382972, abs=6e-7)
    assert l_u.item() == pytest.approx(0.477728, abs=6e-7)
    assert (2.5 * l_v + 0.5 * l_u).item() == pytest.approx(1.196295, abs=6e-7)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("rows", "classes", "width"), [(2, 2, 1), (5, 10, 7), (16, 3, 64)])
def test_both_terms_equal_loops(seed: int, rows: int, classes: int, width: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, classes, generator=generator)
    z = torch.randn(rows, width, generator=generator).relu()
    z[0] = 1.5  # one row that is surely not zero
    z[-1] = 0.0
    assert variance_loss(logits).item() == pytest.approx(variance_loops(logits), rel=1e-5, abs=1e-6)
    assert uniformity_loss(z).item() == pytest.approx(uniformity_loops(z), rel=1e-5)


def test_gradients_equal_differences() -> None:
    assert torch.autograd.gradcheck(variance_loss, (LOGITS.clone().requires_grad_(),))
    z = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    (gradient,) = torch.autograd.grad(uniformity_loss(z), z)
    # The median is held at its value, so the differences are those of the function with a constant scale.
    median = statistics.median_low(squared_distances(z.detach()))
    for a in range(5):
        for j in range(3):
            ends = []
            for step in (1e-6, -1e-6):
                moved = z.detach().clone()
                moved[a, j] += step
                ends.append(uniformity_loops(moved, median))
            assert gradient[a, j].item() == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-8)


def test_balanced_confident_predictions_cost_nothing_and_constant_ones_most() -> None:
    for classes in (2, 10, 100):
        confident = 200 * torch.eye(classes, dtype=torch.float64)
        assert variance_loss(confident).item() == pytest.approx(0, abs=1e-12)
        constant = confident[:1].repeat(8, 1)
        assert variance_loss(constant).item() == pytest.approx(1 / math.sqrt(classes), abs=2e-6)


def test_uniformity_does_not_depend_on_place_orientation_or_scale() -> None:
    z = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    rotation, _ = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(4)))
    for moved in (z + 3, z @ rotation, 100 * z, z.flip(0)):
        assert uniformity_loss(moved).item() == pytest.approx(uniformity_loss(z).item(), rel=1e-10)


@pytest.mark.parametrize("z", [torch.ones(1, 4), torch.ones(6, 4), torch.zeros(2, 3)])
def test_batches_without_spread_have_no_uniformity_term(z: Tensor) -> None:
    z = z.clone().requires_grad_()
    loss = uniformity_loss(z) + 0 * z.sum()
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, z)[0].any()


def test_equal_rows_among_others_get_finite_gradients() -> None:
    z = torch.tensor([[0.0, 0], [0, 0], [0, 0], [3, 4]], requires_grad=True)
    loss = uniformity_loss(z)
    assert loss.item() == pytest.approx(uniformity_loops(z.detach()), rel=1e-6)  # zeros stay out of the median: 25
    (gradient,) = torch.autograd.grad(loss, z)
    assert torch.isfinite(gradient).all() and gradient[3].any()


@pytest.mark.parametrize("gap", [0.0, 40.0, 87.0, 95.0, 103.0, 200.0, 1e4])
def test_confident_predictions_have_finite_gradients(gap: float) -> None:
    # A probability of e^-87 is near the smallest normal float32, and its deviation is subnormal.
    logits = torch.tensor([[gap, 0, -1], [gap, 0.5, 0], [gap, 0, 0]], requires_grad=True)
    loss = variance_loss(logits)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all()


def test_a_batch_of_one_has_no_variance_term() -> None:
    assert variance_loss(torch.tensor([[1.0, 2.0]])).item() == 0


# ---- the client ------------------------------------------------------------------------------------------------------


def client(n: int = 30, **hparams: Any) -> FedUVClient:
    return FedUVClient(task(n), METHOD, FedUVHParams(**hparams), None)


def task(n: int = 30, **train: Any) -> Task:
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(0, 17, (n, 8, 8, 1), generator=generator, dtype=torch.uint8)
    y = torch.randint(0, 4, (n,), generator=generator)
    settings = short(batch_size=8, lr=0.05, **train)
    return Task(0, 1, 4, INPUTS, "digits-a", x, y, x[:10], y[:10], train=settings)


def payload(seed: int) -> Payload:
    made = build_model("digits-a", num_classes=4, shape=(1, 8, 8), seed=seed)
    return Payload(common=extract(made, [n for n, _ in made.named_parameters()]))


def test_two_local_steps_are_descent_on_the_papers_loss() -> None:
    """L_CE + lambda L_V + mu L_U with sums over classes and pairs; the median is a number, without gradient."""
    job = full_batch(task(12))
    arrays, _, _ = FedUVClient(job, METHOD, FedUVHParams(lam=1.5, mu=0.8), None).train_round(payload(1), 1)
    w, x, y = build_model("digits-a", num_classes=4, shape=(1, 8, 8), seed=0), images(job), job.y_train
    merge(w, payload(1).common)

    def loss() -> Tensor:
        z = w.represent(x)
        logits = z @ w.head.weight.T + w.head.bias
        p = logits.exp() / logits.exp().sum(dim=1, keepdim=True)
        supervised = -p[torch.arange(12), y].log().mean()
        spread = torch.zeros(())
        for column in p.T:
            deviation = ((column - column.sum() / 12).square().sum() / 11).sqrt()
            spread = spread + max(torch.zeros(()), 0.5 - deviation) / 4  # gamma = 1 / sqrt(4)
        pairs = [(z[a] - z[b]).square().sum() for a in range(12) for b in range(a + 1, 12)]
        median = statistics.median_low([d.item() for d in pairs if d > 0])
        apart = torch.zeros(())
        for d in pairs:
            apart = apart + (-d / median).exp() / len(pairs)
        return supervised + 1.5 * spread + 0.8 * apart

    steps_by_hand(w.parameters(), loss, job)
    for name, value in w.named_parameters():
        np.testing.assert_allclose(arrays[name], value.detach(), rtol=1e-3, atol=1e-5)


def test_one_sample_and_bf16_are_no_trouble() -> None:
    for job in (task(1), task(precision="bf16")):
        _, _, metrics = FedUVClient(job, METHOD, FedUVHParams(), None).train_round(payload(1), 1)
        assert math.isfinite(metrics["train-loss"])


@pytest.mark.full
def test_clients_of_one_class_train_without_nan(tmp_path: Path) -> None:
    summary = run(
        method="feduv", clients=4, rounds=6, lr=0.001, out=tmp_path / "a", partition="classes", classes_per_client=1
    ).summary  # fmt: skip
    assert summary["ok"] and summary["dropped"] == 0
