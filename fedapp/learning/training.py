"""The local training loop, with no method inside.

Images stay uint8 in memory, are permuted once an epoch, and normalised and augmented in the step as batched tensor
operations; models and batches are channels_last. The result equals the plain eager loop to float32 rounding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedapp.data.transforms import InputSpec, augment, normalise
from fedapp.process import hand_over


@dataclass(frozen=True)
class TrainSpec:
    """How a client trains in one round.

    Attributes
    ----------
    epochs : passes over the local training split.
    batch_size : samples per step (near-equal batches, see `batch_slices`).
    lr : learning rate per step.   clip : largest gradient norm, 0 = none.
    precision : `fp32`, or `bf16` for autocast of the forward pass.
    """

    epochs: int = 1
    batch_size: int = 16
    lr: float = 0.01
    optimizer: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip: float = 0.0
    augment: str = "none"
    precision: str = "fp32"


@dataclass
class Batch:
    """One step's input.

    Attributes
    ----------
    x : (B, channels, H, W) float32, normalised; the first view.
    y : (B,) int64.
    views : all views of the batch, `views[0] is x`.
    index : (B,) int64 positions in the data that was passed to `train`.
    """

    x: Tensor
    y: Tensor
    views: list[Tensor]
    index: Tensor


@dataclass
class TrainReport:
    """What a local training did: mean loss per sample over all steps, steps, samples seen, seconds."""

    loss: float = math.nan
    steps: int = 0
    samples: int = 0
    seconds: float = 0.0


def batch_slices(n: int, batch_size: int) -> list[slice]:
    """Cut an epoch of `n` shuffled samples into `max(1, round(n / batch_size))` near-equal batches.

    Every sample is used, no batch is a small remainder, and a batch of one occurs only where `n` is 1 or
    `batch_size` is 1.
    """
    if n == 0:
        return []
    count = max(1, math.floor(n / batch_size + 0.5))
    if batch_size > 1:
        count = max(1, min(count, n // 2))
    small, extra = divmod(n, count)
    slices, start = [], 0
    for i in range(count):
        size = small + (1 if i < extra else 0)
        slices.append(slice(start, start + size))
        start += size
    return slices


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    spec: TrainSpec,
    betas: tuple[float, float] = (0.9, 0.999),
) -> torch.optim.Optimizer:
    """Build a fresh optimizer; moments and momentum never survive a round."""
    parameters = list(parameters)
    if spec.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=spec.lr, momentum=spec.momentum, weight_decay=spec.weight_decay)
    if spec.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=spec.lr, betas=betas, weight_decay=spec.weight_decay)
    raise ValueError(f"unknown optimizer '{spec.optimizer}': use sgd or adam")


def epoch_batches(
    x: Tensor, y: Tensor, batch_size: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (uint8 images (B, C, H, W) channels_last, labels, indices) of one shuffled epoch."""
    order = torch.randperm(len(y), generator=generator)
    chosen = hand_over(order, x.device)
    images, labels = x[chosen].permute(0, 3, 1, 2), y[chosen]
    for part in batch_slices(len(y), batch_size):
        yield images[part], labels[part], chosen[part]


def train(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    spec: TrainSpec,
    inputs: InputSpec,
    step_loss: Callable[[Batch], Tensor],
    generator: torch.Generator,
    *,
    parameters: Iterable[nn.Parameter] | None = None,
    views: int = 1,
    betas: tuple[float, float] = (0.9, 0.999),
    on_epoch: Callable[[int], None] | None = None,
) -> TrainReport:
    """Train `model` in place.

    Parameters
    ----------
    x : (n, H, W, C) uint8.   y : (n,) int64.
    step_loss : loss of one batch, a scalar; the method's formula.
    generator : order of samples and augmentation; a function of (seed, round, client).
    parameters : what is optimised; default the model's parameters that require a gradient.
    views : independent augmentations per image.
    on_epoch : called after each epoch with its number from 0.

    Returns
    -------
    What was done; without samples or epochs that is nothing: 0 steps, a loss of NaN, and the model as it was.

    Raises
    ------
    FloatingPointError : the loss is not finite; says what to lower.
    """
    report = TrainReport()
    if len(y) == 0 or spec.epochs < 1:
        return report
    chosen = [p for p in (model.parameters() if parameters is None else parameters) if p.requires_grad]
    device = next(model.parameters()).device
    optimizer = make_optimizer(chosen, spec, betas)
    total = torch.zeros((), device=device)
    started = time.perf_counter()
    model.train()
    # Dropout draws from the global generator: it is seeded for this training, and left as it was found.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(generator.initial_seed())
        for epoch in range(spec.epochs):
            for raw, labels, index in epoch_batches(x, y, spec.batch_size, generator):
                pictures = _views(raw, inputs, spec.augment, generator, views)
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=spec.precision == "bf16"):
                    loss = step_loss(Batch(pictures[0], labels, pictures, index))
                optimizer.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                if spec.clip > 0:
                    nn.utils.clip_grad_norm_(chosen, spec.clip)
                optimizer.step()
                # The sum stays on the device: reading a number here would make every step wait for it.
                total += loss.detach() * len(labels)
                report.steps += 1
                report.samples += len(labels)
            if on_epoch is not None:
                on_epoch(epoch)
    report.loss = float(total) / report.samples
    report.seconds = time.perf_counter() - started
    if not math.isfinite(report.loss):
        raise FloatingPointError(
            f"the training loss is {report.loss} after {report.steps} steps: lower lr (now {spec.lr}), or set clip"
        )
    return report


def _views(raw: Tensor, inputs: InputSpec, kind: str, generator: torch.Generator, views: int) -> list[Tensor]:
    """`views` independent augmentations of a batch; without augmentation they are one and the same tensor."""
    if kind == "none":
        return [normalise(raw, inputs)] * views
    return [augment(raw, inputs, kind, generator) for _ in range(views)]
