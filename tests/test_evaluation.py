"""Scoring: evaluation mode, counts by class, sums of losses, and what is computed from them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedapp.data.transforms import InputSpec
from fedapp.learning.evaluation import BATCH, Scores, batched, evaluate

INPUTS = InputSpec(shape=(1, 8, 8), scale=16.0, mean=(0.305,), std=(0.376,))
CLASSES = 6


def data(n: int = 40) -> tuple[Tensor, Tensor]:
    """Images and labels 0 .. 4: class 5 of 6 is absent."""
    generator = np.random.default_rng(0)
    x = torch.from_numpy(generator.integers(0, 17, (n, 8, 8, 1), dtype=np.uint8))
    return x, torch.from_numpy(generator.integers(0, 5, n))


def network() -> nn.Sequential:
    """A model whose output depends on its mode twice: BatchNorm and dropout."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, CLASSES))
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2.0)
    return model


def logits_by_hand(model: nn.Sequential, x: Tensor) -> Tensor:
    """Running statistics, no dropout, in float64."""
    norm, head = model[1], model[3]
    z = ((x.double() / 16 - 0.305) / 0.376).flatten(1)
    z = (z - norm.running_mean.double()) / (norm.running_var.double() + norm.eps).sqrt()
    return (z @ head.weight.double().T + head.bias.double()).detach()


@pytest.mark.parametrize("batch", [7, 128])
@pytest.mark.parametrize("training", [True, False])
def test_scores_equal_those_by_hand_in_evaluation_mode(training: bool, batch: int) -> None:
    model = network().train(training)
    x, y = data()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scores = evaluate(model, x, y, INPUTS, CLASSES, batch=batch)
    assert model.training is training and model[1].training is training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items()), "statistics moved"
    logits = logits_by_hand(model, x)
    hits = logits.argmax(1) == y
    assert scores.correct.tolist() == [int(hits[y == c].sum()) for c in range(CLASSES)]
    assert scores.total.tolist() == [int((y == c).sum()) for c in range(CLASSES)]
    assert scores.correct.dtype == scores.total.dtype == np.int64
    assert scores.loss_sum == pytest.approx(float(F.cross_entropy(logits, y, reduction="sum")), rel=1e-6)
    assert scores.n == 40


def test_what_is_computed_from_the_counts() -> None:
    scores = Scores(np.array([3, 0, 1]), np.array([4, 0, 4]), 2.0)
    assert scores.n == 8
    assert scores.accuracy == 4 / 8
    assert scores.loss == 2.0 / 8
    assert scores.balanced == (3 / 4 + 1 / 4) / 2, "an absent class does not count"
    uneven = Scores(np.array([9, 0]), np.array([9, 1]), 0.0)
    assert uneven.accuracy == 0.9 and uneven.balanced == 0.5


def test_without_samples_scores_are_nan() -> None:
    x, y = data(0)
    scores = evaluate(network(), x, y, INPUTS, CLASSES)
    assert scores.n == 0 and scores.total.tolist() == [0] * CLASSES and scores.loss_sum == 0
    assert math.isnan(scores.accuracy) and math.isnan(scores.loss) and math.isnan(scores.balanced)


def test_bf16_scores_in_bfloat16_and_sums_the_loss_in_float32() -> None:
    seen: list[torch.dtype] = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            logits = super().forward(x.flatten(1))
            seen.append(logits.dtype)
            return logits

    torch.manual_seed(0)
    model = Watched(64, CLASSES)
    x, y = data()
    exact, half = (evaluate(model, x, y, INPUTS, CLASSES, precision=p) for p in ("fp32", "bf16"))
    assert seen == [torch.float32, torch.bfloat16]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(((x.float() / 16 - 0.305) / 0.376).permute(0, 3, 1, 2))
    assert half.loss_sum == pytest.approx(float(F.cross_entropy(logits.float(), y, reduction="sum")), rel=1e-4)
    assert half.loss_sum != exact.loss_sum


def test_batched_applies_to_normalised_batches_and_stacks_the_rows() -> None:
    x, _ = data(9)
    sizes: list[int] = []

    def rows(images: Tensor) -> Tensor:
        sizes.append(len(images))
        assert images.shape[1:] == (1, 8, 8) and images.dtype == torch.float32
        return images.flatten(1).sum(1)

    found = batched(rows, x, INPUTS, batch=4)
    assert sizes == [4, 4, 1]
    torch.testing.assert_close(found, ((x.float() / 16 - 0.305) / 0.376).flatten(1).sum(1))
    assert found.is_inference()
    sizes.clear()
    batched(rows, x, INPUTS)
    assert sizes == [9] and BATCH >= 9
