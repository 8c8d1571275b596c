"""The local loop against a plain eager one, its batches, and its seeds."""

from __future__ import annotations

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fedapp.data.transforms import InputSpec
from fedapp.learning.evaluation import evaluate
from fedapp.learning.training import Batch, TrainSpec, batch_slices, train
from fedapp.models import build_model

INPUTS = InputSpec(channels=1, size=8, scale=16.0, mean=(0.305,), std=(0.376,))


def data(n: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = np.random.default_rng(seed)
    x = torch.from_numpy(generator.integers(0, 17, (n, 8, 8, 1), dtype=np.uint8))
    return x, torch.from_numpy(generator.integers(0, 10, n))


def go(model: nn.Module, spec: TrainSpec, seed: int = 5, n: int = 60) -> float:
    x, y = data(n)
    generator = torch.Generator().manual_seed(seed)
    report = train(model, x, y, spec, INPUTS, lambda b: F.cross_entropy(model(b.x), b.y), generator)
    return report.loss


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", ["digits-a", "digits-b", "digits-c"])
def test_equals_the_plain_eager_loop(name: str, optimizer: str) -> None:
    """Contiguous float32 images normalised up front, an index list per batch, nothing clever."""
    spec = TrainSpec(epochs=2, batch_size=7, lr=0.02, optimizer=optimizer, momentum=0.9 if optimizer == "sgd" else 0.0)
    fast = build_model(name, num_classes=10, channels=1, size=8, seed=1)
    plain = copy.deepcopy(fast).to(memory_format=torch.contiguous_format)
    start = {n: p.clone() for n, p in plain.named_parameters()}
    go(fast, spec)

    x, y = data()
    images = ((x.float() / 16 - 0.305) / 0.376).permute(0, 3, 1, 2).contiguous()
    if optimizer == "sgd":
        step: torch.optim.Optimizer = torch.optim.SGD(plain.parameters(), lr=0.02, momentum=0.9)
    else:
        step = torch.optim.Adam(plain.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(5)
    for _ in range(2):
        order = torch.randperm(60, generator=generator)
        for part in batch_slices(60, 7):
            chosen = order[part]
            step.zero_grad()
            F.cross_entropy(plain(images[chosen]), y[chosen]).backward()
            step.step()
    for (n, a), b in zip(fast.named_parameters(), plain.parameters(), strict=True):
        update = (b - start[n]).norm()
        assert (a - b).norm() <= 2e-4 * update + 1e-7, n


@given(st.integers(1, 500), st.integers(1, 70))
def test_batches_cover_the_epoch_in_near_equal_parts(n: int, size: int) -> None:
    slices = batch_slices(n, size)
    sizes = [s.stop - s.start for s in slices]
    assert slices[0].start == 0 and slices[-1].stop == n
    assert all(a.stop == b.start for a, b in pairwise(slices))
    assert max(sizes) - min(sizes) <= 1
    if size > 1:
        assert len(slices) == max(1, min(int(n / size + 0.5), n // 2))
    if n > 1 and size > 1:
        assert min(sizes) > 1, "a batch of one breaks BatchNorm"


def test_no_samples_no_steps() -> None:
    assert batch_slices(0, 16) == []
    model = build_model("digits-b", num_classes=10, channels=1, size=8, seed=1)
    before = [p.clone() for p in model.parameters()]
    x, y = data(0)
    report = train(model, x, y, TrainSpec(), INPUTS, lambda b: model(b.x).sum(), torch.Generator())
    assert report.steps == 0 and all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_seed_decides_everything_and_leaves_the_global_generator_alone() -> None:
    models = [build_model("digits-a", num_classes=10, channels=1, size=8, seed=1) for _ in range(3)]
    spec = TrainSpec(epochs=1, batch_size=8, augment="weak")
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    go(models[0], spec, seed=5)
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(99)
    go(models[1], spec, seed=5)
    go(models[2], spec, seed=6)
    same, other = (
        all(torch.equal(a, b) for a, b in zip(models[0].parameters(), m.parameters(), strict=True)) for m in models[1:]
    )
    assert same and not other


def test_dropout_is_seeded_too() -> None:
    results = []
    for salt in (1, 2):
        torch.manual_seed(salt)
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.01)
        go(model, TrainSpec(epochs=1, batch_size=8))
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_clipping_bounds_the_step() -> None:
    model = build_model("digits-b", num_classes=10, channels=1, size=8, seed=1)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    go(model, TrainSpec(epochs=1, batch_size=100, lr=1.0, momentum=0.0, clip=0.25))
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert float((after - before).norm()) == pytest.approx(0.25, rel=1e-4)


def test_a_loss_that_is_not_finite_says_what_to_lower() -> None:
    model = build_model("digits-b", num_classes=10, channels=1, size=8, seed=1)
    with pytest.raises(FloatingPointError, match="lower lr"):
        go(model, TrainSpec(epochs=3, lr=1e12))


def test_two_views_differ_only_where_images_are_augmented() -> None:
    model = build_model("digits-b", num_classes=10, channels=1, size=8, seed=1)
    x, y = data(10)
    seen: list[Batch] = []

    def loss(batch: Batch) -> Tensor:
        seen.append(batch)
        return F.cross_entropy(model(batch.x), batch.y)

    for kind in ("none", "weak"):
        spec = TrainSpec(epochs=1, batch_size=10, augment=kind)
        train(model, x, y, spec, INPUTS, loss, torch.Generator().manual_seed(1), views=2)
    plain, weak = seen
    assert torch.equal(plain.views[0], plain.views[1])
    assert not torch.equal(weak.views[0], weak.views[1])
    assert torch.equal(weak.y, y[weak.index])


def test_evaluation_counts_by_class_and_restores_training_mode() -> None:
    model = build_model("digits-a", num_classes=10, channels=1, size=8, seed=3)
    x, y = data(300)
    model.train()
    scores = evaluate(model, x, y, INPUTS, 10)
    assert model.training
    model.eval()
    images = ((x.float() / 16 - 0.305) / 0.376).permute(0, 3, 1, 2)
    with torch.no_grad():
        logits = model(images)
    hits = logits.argmax(1) == y
    assert scores.n == 300 and scores.accuracy == pytest.approx(hits.float().mean().item())
    assert scores.loss == pytest.approx(F.cross_entropy(logits, y).item(), rel=1e-5)
    recalls = [hits[y == c].float().mean().item() for c in range(10) if (y == c).any()]
    assert scores.balanced == pytest.approx(np.mean(recalls))
    empty = evaluate(model, x[:0], y[:0], INPUTS, 10)
    assert np.isnan(empty.accuracy) and np.isnan(empty.loss) and np.isnan(empty.balanced)


@pytest.mark.parametrize(("epochs", "n"), [(0, 60), (2, 0)])
def test_nothing_to_do_is_reported_as_nothing(epochs: int, n: int) -> None:
    model = build_model("digits-a", num_classes=10, channels=1, size=8, seed=1)
    before = copy.deepcopy(model.state_dict())
    x, y = data(n)
    spec = TrainSpec(epochs=epochs)
    generator = torch.Generator().manual_seed(5)
    report = train(model, x, y, spec, INPUTS, lambda b: F.cross_entropy(model(b.x), b.y), generator)
    assert np.isnan(report.loss) and (report.steps, report.samples) == (0, 0)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_bf16_scores_in_bfloat16_and_sums_the_loss_in_float32() -> None:
    seen: list[torch.dtype] = []

    class Watched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits = super().forward(x.flatten(1))
            seen.append(logits.dtype)
            return logits

    model = Watched(INPUTS.channels * INPUTS.size**2, 10)
    x = torch.randint(0, 16, (9, INPUTS.size, INPUTS.size, INPUTS.channels), dtype=torch.uint8)
    y = torch.arange(9)
    exact, half = (evaluate(model, x, y, INPUTS, 10, precision=p) for p in ("fp32", "bf16"))
    assert seen == [torch.float32, torch.bfloat16]
    assert half.loss == pytest.approx(exact.loss, rel=0.05)
    assert half.loss != exact.loss
