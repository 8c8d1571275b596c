"""The local training loop against plain loops that are written out here: updates, batches, views, seeds, reports."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fedapp.data.transforms import InputSpec, augment
from fedapp.learning.training import Batch, Phase, TrainReport, batch_slices, epoch_batches, make_optimizer, train
from fedapp.models import build_model
from fedapp.settings import TrainingSettings
from tests.handmade import short

INPUTS = InputSpec(shape=(1, 8, 8), scale=16.0, mean=(0.305,), std=(0.376,))


def data(n: int = 50, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = np.random.default_rng(seed)
    x = torch.from_numpy(generator.integers(0, 17, (n, 8, 8, 1), dtype=np.uint8))
    return x, torch.from_numpy(generator.integers(0, 10, n))


def network(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))


def go(model: nn.Module, spec: TrainingSettings, seed: int = 5, n: int = 50, **further: object) -> TrainReport:
    x, y = data(n)
    generator = torch.Generator().manual_seed(seed)
    phase = Phase(lambda b: F.cross_entropy(model(b.x), b.y), spec, **further)  # type: ignore[arg-type]
    return train(model, x, y, phase, INPUTS, generator)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


# ---- the updates -----------------------------------------------------------------------------------------------------

Update = Callable[[Tensor, Tensor, int], Tensor]


def sgd(lr: float, momentum: float) -> Update:
    """v <- momentum v + g; p <- p - lr v, with v = g in the first step."""
    memory: dict[int, Tensor] = {}

    def update(p: Tensor, g: Tensor, step: int) -> Tensor:
        memory[id(p)] = g if step == 1 else momentum * memory[id(p)] + g
        return p - lr * memory[id(p)]

    return update


def adam(lr: float, beta1: float = 0.9, beta2: float = 0.999) -> Update:
    """Kingma and Ba, Algorithm 1: moments corrected for their start at zero."""
    memory: dict[int, tuple[Tensor, Tensor]] = {}

    def update(p: Tensor, g: Tensor, step: int) -> Tensor:
        m, v = memory.get(id(p), (torch.zeros_like(p), torch.zeros_like(p)))
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        memory[id(p)] = m, v
        return p - lr * (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + 1e-8)

    return update


def plain(
    model: nn.Module, update: Update, weight_decay: float, clip: float, parts: list[tuple[int, int]], epochs: int
) -> float:
    """Train in float64 with updates by hand; returns the mean loss per sample."""
    x, y = data()
    images = ((x.double() / 16 - 0.305) / 0.376).permute(0, 3, 1, 2)
    generator = torch.Generator().manual_seed(5)
    total, step = 0.0, 0
    for _ in range(epochs):
        order = torch.randperm(len(y), generator=generator)
        for start, stop in parts:
            step += 1
            chosen = order[start:stop]
            loss = F.cross_entropy(model(images[chosen]), y[chosen])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
            factor = min(1.0, clip / norm) if clip else 1.0
            with torch.no_grad():
                for p, g in zip(model.parameters(), gradients, strict=True):
                    p.copy_(update(p, factor * g + weight_decay * p, step))
            total += loss.item() * len(chosen)
    return total / (len(y) * epochs)


SGD = short(batch_size=16, lr=0.1, momentum=0.8, weight_decay=0.05)
ADAM = short(batch_size=16, lr=0.01, optimizer="adam", weight_decay=0.1)


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize(
    ("spec", "make_update"),
    [
        (SGD, lambda: sgd(0.1, 0.8)),
        (short(batch_size=16, lr=0.1, momentum=0.0, clip=0.3), lambda: sgd(0.1, 0.0)),
        (short(batch_size=16, lr=0.1, momentum=0.5, weight_decay=0.2, clip=0.3), lambda: sgd(0.1, 0.5)),
        (ADAM, lambda: adam(0.01)),
        (short(batch_size=16, lr=0.01, optimizer="adam", clip=0.3), lambda: adam(0.01)),
    ],
    ids=["sgd", "sgd, clipped", "sgd, clipped before weight decay", "adam", "adam, clipped"],
)
def test_training_equals_a_plain_loop(spec: TrainingSettings, make_update: Callable[[], Update], epochs: int) -> None:
    """50 samples in batches of about 16 are 17, 17 and 16."""
    fast, slow = network(), network().double()
    start = flat(fast).double()
    report = go(fast, short(**{**spec.__dict__, "local_epochs": epochs}))
    loss = plain(slow, make_update(), spec.weight_decay, spec.clip, [(0, 17), (17, 34), (34, 50)], epochs)
    assert (report.steps, report.samples) == (3 * epochs, 50 * epochs)
    assert report.loss == pytest.approx(loss, rel=1e-5)
    moved = float((flat(slow) - start).norm())
    assert moved > 0.01
    assert float((flat(fast) - flat(slow)).norm()) < 1e-4 * moved


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", ["digits-a", "digits-c"])
def test_convolutions_in_channels_last_equal_contiguous_ones(name: str, optimizer: str) -> None:
    spec = short(local_epochs=1, batch_size=7, lr=0.02, optimizer=optimizer, momentum=0.9)
    fast = build_model(name, num_classes=10, shape=(1, 8, 8), seed=1)
    slow = copy.deepcopy(fast).to(memory_format=torch.contiguous_format)
    start = flat(slow)
    go(fast, spec)
    x, y = data()
    images = ((x.float() / 16 - 0.305) / 0.376).permute(0, 3, 1, 2).contiguous()
    step = make_optimizer(slow.parameters(), spec)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(5))
    for part in batch_slices(50, 7):
        step.zero_grad()
        F.cross_entropy(slow(images[order[part]]), y[order[part]]).backward()
        step.step()
    assert float((flat(fast) - flat(slow)).norm()) < 2e-4 * float((flat(slow) - start).norm())


def test_adams_betas_are_passed_on() -> None:
    fast, slow = network(), network().double()
    start = flat(fast).double()
    go(fast, short(batch_size=16, lr=0.01, optimizer="adam"), betas=(0.5, 0.9))
    plain(slow, adam(0.01, 0.5, 0.9), 0.0, 0.0, [(0, 17), (17, 34), (34, 50)], 1)
    assert float((flat(fast) - flat(slow)).norm()) < 1e-4 * float((flat(slow) - start).norm())


def test_an_unknown_optimizer_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown optimizer 'lion'"):
        make_optimizer(network().parameters(), short(optimizer="lion"))


def test_a_training_starts_without_the_moments_of_the_one_before() -> None:
    """Two trainings of one epoch differ from one of two epochs: momentum does not survive."""
    twice, once = network(), network()
    for part in (twice, once):
        go(part, SGD)
    middle = flat(once)
    go(twice, SGD)
    fresh = network()
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(middle, fresh.parameters())
    go(fresh, SGD)
    assert torch.equal(flat(twice), flat(fresh))


def test_only_the_chosen_parameters_are_trained_and_clipped() -> None:
    """Clipping sees the gradients of the trained parameters alone: one step moves them by lr times the bound."""
    model = network()
    head, trunk = model[3], model[1]
    before = copy.deepcopy(model.state_dict())
    spec = short(batch_size=100, lr=1.0, momentum=0.0, clip=0.01)
    go(model, spec, parameters=head.parameters)
    after = model.state_dict()
    assert all(torch.equal(before[f"1.{n}"], p) for n, p in trunk.named_parameters())
    change = torch.cat([(after[f"3.{n}"] - before[f"3.{n}"]).flatten() for n, _ in head.named_parameters()])
    assert float(change.norm()) == pytest.approx(0.01, rel=1e-3)


def test_a_frozen_parameter_stays_even_under_weight_decay() -> None:
    model = network()
    model[1].weight.requires_grad_(False)
    model[1].weight.grad = torch.ones_like(model[1].weight)  # left over from something else
    before = model[1].weight.clone()
    go(model, SGD)
    assert torch.equal(before, model[1].weight)
    go(model, SGD, parameters=lambda: list(model.parameters()))
    assert torch.equal(before, model[1].weight)


def test_training_is_in_training_mode() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10)).eval()
    go(model, SGD)
    assert model.training
    assert int(model[1].num_batches_tracked) == 3


# ---- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "batch_size", "sizes"),
    [
        (0, 16, []),
        (1, 16, [1]),
        (3, 2, [3]),
        (4, 2, [2, 2]),
        (5, 2, [3, 2]),
        (3, 1, [1, 1, 1]),
        (23, 16, [23]),
        (24, 16, [12, 12]),
        (50, 16, [17, 17, 16]),
        (64, 16, [16, 16, 16, 16]),
    ],
)
def test_sizes_of_batches_by_hand(n: int, batch_size: int, sizes: list[int]) -> None:
    assert [s.stop - s.start for s in batch_slices(n, batch_size)] == sizes


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


def test_an_epoch_yields_every_sample_once_in_the_generators_order() -> None:
    x = torch.arange(10 * 4 * 4 * 3, dtype=torch.uint8).reshape(10, 4, 4, 3)
    y = torch.arange(10) % 3
    batches = list(epoch_batches(x, y, 4, torch.Generator().manual_seed(3)))
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3))
    assert [len(labels) for _, labels, _ in batches] == [4, 3, 3]
    assert torch.equal(torch.cat([index for _, _, index in batches]), order)
    assert torch.equal(torch.cat([labels for _, labels, _ in batches]), y[order])
    assert torch.equal(torch.cat([images for images, _, _ in batches]), x[order].permute(0, 3, 1, 2))
    assert all(images.dtype == torch.uint8 for images, _, _ in batches)
    assert all(images.is_contiguous(memory_format=torch.channels_last) for images, _, _ in batches)


def batches(spec: TrainingSettings, views: int, n: int = 20) -> list[Batch]:
    model = network()
    seen: list[Batch] = []

    def loss(batch: Batch) -> Tensor:
        seen.append(batch)
        return F.cross_entropy(model(batch.x), batch.y)

    x, y = data(n)
    train(model, x, y, Phase(loss, spec, views=views), INPUTS, torch.Generator().manual_seed(1))
    return seen


def test_without_augmentation_all_views_are_one_tensor() -> None:
    x, y = data(20)
    for batch in batches(short(batch_size=10), views=3):
        assert len(batch.views) == 3 and all(view is batch.x for view in batch.views)
        expected = ((x[batch.index].float() / 16 - 0.305) / 0.376).permute(0, 3, 1, 2)
        torch.testing.assert_close(batch.x, expected)
        assert torch.equal(batch.y, y[batch.index])


@pytest.mark.parametrize("kind", ["weak", "strong"])
def test_order_then_augmentation_batch_by_batch_and_view_by_view(kind: str) -> None:
    """All draws come from one generator: the epoch's order first, then each batch's views one after another."""
    x, _ = data(20)
    generator = torch.Generator().manual_seed(1)
    seen = iter(batches(short(local_epochs=2, batch_size=10, augment=kind), views=2))
    for _ in range(2):
        order = torch.randperm(20, generator=generator)
        for start in (0, 10):
            batch = next(seen)
            index = order[start : start + 10]
            raw = x[index].permute(0, 3, 1, 2)
            assert torch.equal(batch.index, index)
            assert len(batch.views) == 2 and batch.views[0] is batch.x
            for view in batch.views:
                assert torch.equal(view, augment(raw, INPUTS, kind, generator))
            assert not torch.equal(*batch.views)


# ---- seeds, precision and reports ------------------------------------------------------------------------------------


def test_a_training_on_the_processor_leaves_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch formats the whole call stack for a GPU that is not there, which takes longer than a short training."""
    model = network()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("for GPUs"))
    go(model, short(lr=0.1, batch_size=10, local_epochs=1))


def test_dropout_draws_from_the_trainings_own_seed_and_the_global_generator_is_restored() -> None:
    class Recorded(nn.Dropout):
        masks: list[Tensor]

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(torch.ones_like(x))
            self.masks.append(out > 0)
            return x * out

    masks = []
    for salt in (1, 2):
        torch.manual_seed(salt)
        before = torch.random.get_rng_state()
        model = nn.Sequential(nn.Flatten(), Recorded(0.5), nn.Linear(64, 10))
        model[1].masks = []
        torch.random.set_rng_state(before)
        go(model, short(batch_size=16), seed=5)
        assert torch.equal(before, torch.random.get_rng_state())
        masks.append(model[1].masks)
    assert len(masks[0]) == 3
    assert all(torch.equal(a, b) for a, b in zip(*masks, strict=True))
    torch.manual_seed(5)
    assert all(torch.equal(mask, F.dropout(torch.ones(mask.shape)) > 0) for mask in masks[0])
    assert not torch.equal(masks[0][0], masks[0][1])


def test_another_seed_is_another_order() -> None:
    one, other = network(), network()
    go(one, SGD, seed=5)
    go(other, SGD, seed=6)
    assert not torch.equal(flat(one), flat(other))


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_precision_is_that_of_the_forward_pass(precision: str, dtype: torch.dtype) -> None:
    model = network()
    seen: list[torch.dtype] = []

    def loss(batch: Batch) -> Tensor:
        logits = model(batch.x)
        seen.append(logits.dtype)
        return F.cross_entropy(logits.float(), batch.y)

    x, y = data()
    train(model, x, y, Phase(loss, short(precision=precision)), INPUTS, torch.Generator().manual_seed(1))
    assert set(seen) == {dtype}
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_epochs_are_announced_when_they_end() -> None:
    model = network()
    steps: list[str] = []

    def loss(batch: Batch) -> Tensor:
        steps.append("step")
        return F.cross_entropy(model(batch.x), batch.y)

    x, y = data(20)
    spec = short(local_epochs=2, batch_size=10)
    phase = Phase(loss, spec, on_epoch=lambda e: steps.append(f"end {e}"))
    report = train(model, x, y, phase, INPUTS, torch.Generator().manual_seed(1))
    assert steps == ["step", "step", "end 0", "step", "step", "end 1"]
    assert 0 < report.seconds < 60


@pytest.mark.parametrize(("epochs", "n"), [(0, 50), (2, 0)])
def test_nothing_to_do_is_reported_as_nothing(epochs: int, n: int) -> None:
    model = network().eval()
    before = flat(model)
    report = go(model, short(local_epochs=epochs), n=n)
    assert math.isnan(report.loss) and (report.steps, report.samples, report.seconds) == (0, 0, 0.0)
    assert torch.equal(before, flat(model)) and not model.training


def test_one_epoch_is_enough_to_train() -> None:
    model = network()
    before = flat(model)
    assert go(model, short(local_epochs=1)).steps == 3
    assert not torch.equal(before, flat(model))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_says_what_to_lower(value: float) -> None:
    model = network()
    x, y = data()
    spec = short(batch_size=16, lr=0.25, local_epochs=1)
    with pytest.raises(FloatingPointError, match=rf"loss is {value} after 3 steps: lower lr \(now 0.25\), or set clip"):
        train(model, x, y, Phase(lambda b: model(b.x).sum() * 0 + value, spec), INPUTS, torch.Generator())
