"""The local training loop of all methods; a method contributes the loss of one batch.

Images stay uint8 in memory, are permuted once an epoch, and are normalised and augmented batch by batch as tensor
operations; models and batches are channels_last. The result equals a plain loop to float32 rounding.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from fedapp.data.transforms import InputSpec, augment, normalise
from fedapp.process import hand_over


@dataclass(frozen=True)
class TrainSpec:
    """How a client trains in one round.

    Attributes
    ----------
    epochs : passes over the local training split.
    batch_size : samples per step (near-equal batches, see `batch_slices`).
    lr : learning rate.   optimizer : `sgd` or `adam`.   momentum : of SGD.
    weight_decay : factor of the L2 penalty that is added to the gradient, in Adam too (not AdamW's).
    clip : largest L2 norm of the gradient of one model's trained parameters together, 0 = no clipping.
    augment : `none`, `weak` or `strong`, see `fedapp.data.transforms`.
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
    x : (B, channels, H, W) float32, normalised, channels_last; the first view.
    y : (B,) int64 labels.
    views : all views of the batch, each like `x`; `views[0] is x`.
    index : (B,) int64 positions in the data that was passed to `train`.
    """

    x: Tensor
    y: Tensor
    views: list[Tensor]
    index: Tensor


@dataclass
class TrainReport:
    """What a local training did.

    Attributes
    ----------
    loss : mean over all samples seen of the loss that was trained on (of each step, before its update).
    steps : optimizer steps.   samples : samples seen, epochs included.   seconds : wall-clock time.
    """

    loss: float = math.nan
    steps: int = 0
    samples: int = 0
    seconds: float = 0.0


def batch_slices(n: int, batch_size: int) -> list[slice]:
    """Cut an epoch of `n` shuffled samples into near-equal batches: n / batch_size of them, rounded half up.

    Every sample is used and no batch is a small remainder. A batch of one, which BatchNorm may refuse (`needs_two`),
    occurs only where `n` or `batch_size` is 1.
    """
    if n == 0:
        return []
    count = max(1, math.floor(n / batch_size + 0.5))
    if batch_size > 1:
        count = max(1, min(count, n // 2))  # two samples or more in each
    small, extra = divmod(n, count)
    slices, start = [], 0
    for i in range(count):
        size = small + (1 if i < extra else 0)
        slices.append(slice(start, start + size))
        start += size
    return slices


def needs_two(model: nn.Module, inputs: InputSpec) -> bool:
    """Return whether `model` cannot be trained on one image: BatchNorm has a single value where maps are 1 x 1."""
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return False
    image = torch.zeros(1, inputs.channels, inputs.size, inputs.size, device=next(model.parameters()).device)
    try:
        with torch.no_grad():
            copy.deepcopy(model).train()(image)  # a copy: BatchNorm's statistics change
    except ValueError:
        return True
    return False


def make_optimizer(
    parameters: ParamsT,
    spec: TrainSpec,
    betas: tuple[float, float] = (0.9, 0.999),
) -> torch.optim.Optimizer:
    """Build an optimizer of `spec` with empty memory: momentum and moments do not survive a round.

    Raises
    ------
    ValueError : the optimizer is unknown.
    """
    if spec.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=spec.lr, momentum=spec.momentum, weight_decay=spec.weight_decay)
    if spec.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=spec.lr, betas=betas, weight_decay=spec.weight_decay)
    raise ValueError(f"unknown optimizer '{spec.optimizer}': use sgd or adam")


def epoch_batches(
    x: Tensor, y: Tensor, batch_size: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the batches of one shuffled epoch.

    Parameters
    ----------
    x : (n, H, W, C) uint8.   y : (n,) int64.
    generator : draws the order, one permutation of n.

    Yields
    ------
    images (B, C, H, W) uint8 in channels_last, labels (B,) int64, positions in `x` and `y` (B,) int64.
    """
    order = torch.randperm(len(y), generator=generator)
    chosen = hand_over(order, x.device)
    # One gather for the whole epoch: the batches are views of it.
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
    parameters: ParamsT | None = None,
    views: int = 1,
    betas: tuple[float, float] = (0.9, 0.999),
    on_epoch: Callable[[int], None] | None = None,
) -> TrainReport:
    """Train `model` in place.

    Parameters
    ----------
    model : on the device of `x`; left in training mode.
    x : (n, H, W, C) uint8.   y : (n,) int64.
    spec : the settings.   inputs : how `x` is normalised.
    step_loss : the method's loss of one batch, a scalar tensor.
    generator : draws the order of an epoch, then the views of each batch; its seed also seeds dropout.
    parameters : what is trained, as far as it requires a gradient; default all parameters of the model. As PyTorch's
        optimizers take them: in groups, such as one per model, each group is clipped by itself.
    views : independent augmentations per image.
    betas : of Adam.
    on_epoch : called after each epoch with its number from 0.

    Returns
    -------
    What was done. Without samples or epochs that is nothing: 0 steps, a loss of NaN, and the model as it was.

    Raises
    ------
    FloatingPointError : the mean loss is not finite; the message says which setting to lower.
    """
    report = TrainReport()
    if len(y) == 0 or spec.epochs < 1:
        return report
    device = next(model.parameters()).device
    optimizer = make_optimizer(model.parameters() if parameters is None else parameters, spec, betas)
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p.requires_grad]
    total = torch.zeros((), device=device)
    started = time.perf_counter()
    model.train()
    # Dropout draws from PyTorch's global generator: it is seeded for this training, and restored afterwards.
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
                    for group in optimizer.param_groups:
                        nn.utils.clip_grad_norm_(group["params"], spec.clip)
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
    """Return `views` independent augmentations of a batch; without augmentation all are the same tensor."""
    if kind == "none":
        return [normalise(raw, inputs)] * views
    return [augment(raw, inputs, kind, generator) for _ in range(views)]
