"""The local training loop of all methods; a method contributes the loss of one batch.

Images stay uint8 in memory, are permuted once an epoch, and are normalised and augmented batch by batch as tensor
operations; models and batches are channels_last. The result equals a plain loop to float32 rounding.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedapp.data.transforms import InputSpec, augment, channels_first, normalise
from fedapp.errors import BadRequest, counted
from fedapp.lazy import Tensor, nn, torch
from fedapp.learning.dp_sgd import NoisySteps
from fedapp.learning.optimizers import optimizer_arguments, optimizer_class, scheduled, takes
from fedapp.process import hand_over
from fedapp.settings import TrainingSettings

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

    from fedapp.models import SplitModel


BETAS = (0.9, 0.999)
"""Decay rates of the two moments of Adam and its relatives."""


def rate_in(server_round: int, rates: Sequence[float], lr: float) -> float:
    """Return the learning rate of a round, at its first step unless there is a schedule of steps.

    Parameters
    ----------
    server_round : from 1. After the last round of the run, where clients train again for their scores, the rate is
        that of the last round.
    rates : of rounds 1, 2, ...; empty = `lr` in all.
    """
    return rates[min(max(server_round, 1), len(rates)) - 1] if rates else lr


def step_rates(settings: TrainingSettings, rate: float, steps: int) -> tuple[float, ...]:
    """Return the learning rate of each of a round's steps; empty if it is the round's `rate` in all.

    Raises
    ------
    BadRequest : the schedule has no rate for so many steps.
    """
    if not settings.lr_schedule_steps or steps < 1:
        return ()
    factor = rate / settings.lr
    return tuple(r * factor for r in scheduled("lr-schedule-steps", settings.lr_schedule_steps, settings.lr, steps))


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

    def then(self, later: TrainReport) -> TrainReport:
        """Return the report of this training and a later one: sums, and the loss of the last one that took a step."""
        return TrainReport(
            later.loss if later.steps else self.loss,
            self.steps + later.steps,
            self.samples + later.samples,
            self.seconds + later.seconds,
        )


@dataclass(frozen=True)
class Phase:
    """One part of a local training, with an optimizer of its own.

    Attributes
    ----------
    loss : of one batch, a scalar tensor.   spec : the settings, with the epochs.
    rate : learning rate; None = the round's, or `lr`.
    prefixes : dotted prefixes of the parameters that are trained, see `trained_alone`.
    draws : purpose of the generator that draws the batches; phases of one purpose see the same batches in a round.
    model : the trained one; None = the client's model. Several models are an `nn.ModuleList`.
    parameters : returns the parameters of the optimizer, as PyTorch's optimizers take them: in groups, such as one per
        model, each group is clipped by itself. Those that require no gradient are left out. None = all of the model.
    rows : samples x (n, H, W, C) uint8 and labels y (n,); None = the training split. The report of a round is that of
        the phases on the training split.
    views : independent augmentations per image.
    betas : decay rates of the moments, for optimizers that have them.
    on_gradients : called in each step with all trained tensors, after the backward pass and before clipping and the
        optimizer's step, which adds weight decay.
    on_step : called after each step of the optimizer with its batch.
    on_epoch : called after each epoch with its number from 0.
    """

    loss: Callable[[Batch], Tensor]
    spec: TrainingSettings
    prefixes: tuple[str, ...] = ("",)
    draws: str = "batches"
    model: nn.Module | None = None
    parameters: Callable[[], ParamsT] | None = None
    rate: float | None = None
    rows: tuple[Tensor, Tensor] | None = None
    views: int = 1
    betas: tuple[float, float] = BETAS
    on_gradients: Callable[[list[Tensor]], None] | None = None
    on_step: Callable[[Batch], None] | None = None
    on_epoch: Callable[[int], None] | None = None


@contextlib.contextmanager
def trained_alone(model: nn.Module, prefixes: tuple[str, ...]) -> Iterator[list[nn.Module]]:
    """Freeze all parameters of `model` but those whose names begin with one of `prefixes`; thaw them at the end.

    Yields
    ------
    The modules that are frozen as a whole. In evaluation mode their running statistics stay too.
    """
    frozen = [p for n, p in model.named_parameters() if p.requires_grad and not n.startswith(prefixes)]
    held = {id(p) for p in frozen}
    # Frozen and not only left out of the optimizer: the backward pass would fill gradients that no one clears.
    for p in frozen:
        p.requires_grad_(False)
    try:
        yield [m for m in model.modules() if held.intersection(map(id, m.parameters())) and not _any_trained(m)]
    finally:
        for p in frozen:
            p.requires_grad_(True)


@contextlib.contextmanager
def taking_representations(model: SplitModel) -> Iterator[None]:
    """Let a model take what `represent` returns, so that a frozen body is not passed in each epoch."""
    model.__dict__["represent"] = lambda z: z
    try:
        yield
    finally:
        del model.__dict__["represent"]


def _any_trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


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
    image = torch.zeros(1, *inputs.shape, device=next(model.parameters()).device)
    try:
        with torch.no_grad():
            copy.deepcopy(model).train()(image)  # a copy: BatchNorm's statistics change
    except ValueError:
        return True
    return False


def make_optimizer(
    parameters: ParamsT, spec: TrainingSettings, betas: tuple[float, float] = BETAS, rate: float | None = None
) -> torch.optim.Optimizer:
    """Build the optimizer of `spec` with empty memory: momentum and moments do not survive a round.

    Its learning rate is `rate`, by default `lr`. It gets those of momentum, weight decay and `betas` that its
    constructor takes; `optimizer_args` go before `betas`.

    Raises
    ------
    BadRequest : the optimizer or one of its arguments is unknown, or an argument is not valid.
    """
    cls: Any = optimizer_class(spec.optimizer)
    given = {"momentum": spec.momentum, "weight_decay": spec.weight_decay, "betas": betas}
    own: dict[str, Any] = {name: value for name, value in given.items() if takes(spec.optimizer, name)}
    own |= optimizer_arguments(spec.optimizer, spec.optimizer_args)
    try:
        return cls(parameters, lr=spec.lr if rate is None else rate, **own)  # type: ignore[no-any-return]
    except (ValueError, TypeError, RuntimeError) as e:
        raise BadRequest(f"optimizer = '{spec.optimizer}' with optimizer-args = '{spec.optimizer_args}': {e}") from e


def class_numbers(text: str) -> list[float]:
    """Return the numbers of `class-weights`; none for `none` and `balanced`.

    Raises
    ------
    BadRequest : the text is none of these, or the numbers are negative or all 0.
    """
    if text in ("none", "balanced"):
        return []
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        weights = []
    if not any(weights) or not all(math.isfinite(w) and w >= 0 for w in weights):
        raise BadRequest(
            f"class-weights = '{text}': give none, balanced, or a number for each class with commas between them, "
            "at least 0 and not all 0"
        )
    return weights


def class_weights(text: str, y: Tensor, num_classes: int) -> Tensor | None:
    """Return the weights of the classes, (C,) float32 on the device of `y`; None for `none`.

    Parameters
    ----------
    text : `none`; `balanced`: n / (C_k n_c) for each of the C_k classes present in `y` and 0 for the others, as
        scikit-learn has it, so that the mean weight of the samples is 1; or C numbers with commas between them.
    y : (n,) int64, labels of the training split.

    Raises
    ------
    BadRequest : the text is none of these, or the numbers are negative, all 0, or not C.
    """
    if text == "none":
        return None
    if text == "balanced":
        counts = torch.bincount(y, minlength=num_classes)
        return torch.where(counts > 0, len(y) / ((counts > 0).sum() * counts.clamp_min(1)), 0.0)
    weights = class_numbers(text)
    if num_classes and len(weights) != num_classes:
        raise BadRequest(
            f"class-weights has {counted(len(weights), 'number')}, but the data have {counted(num_classes, 'class')}"
        )
    return torch.tensor(weights, device=y.device)


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
    images, labels = channels_first(x[chosen]), y[chosen]
    for part in batch_slices(len(y), batch_size):
        yield images[part], labels[part], chosen[part]


def train(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    phase: Phase,
    inputs: InputSpec | None,
    generator: torch.Generator,
    *,
    held: Iterable[nn.Module] = (),
    private: NoisySteps | None = None,
) -> TrainReport:
    """Train `model` in place by the loss and the settings of one phase.

    Parameters
    ----------
    model : on the device of `x`; left in training mode, but for `held`.
    x : (n, H, W, C) uint8.   y : (n,) int64.
    phase : its `model`, `rows`, `prefixes` and `draws` are the caller's matter.
    inputs : how `x` is normalised; None = not at all, without augmentation.
    generator : draws the order of an epoch, then the views of each batch; its seed also seeds dropout.
    held : parts of the model that stay in evaluation mode.
    private : draws the images of each step and noises their gradients (DP-SGD); nothing is drawn from `generator` then.

    Returns
    -------
    What was done. Without samples or epochs that is nothing: 0 steps, a loss of NaN, and the model as it was.

    Raises
    ------
    FloatingPointError : the mean loss is not finite; the message names the setting to lower.
    BadRequest : the settings name an optimizer, an argument or a schedule that is not valid.
    """
    report, spec = TrainReport(), phase.spec
    epochs, rate = spec.local_epochs, spec.lr if phase.rate is None else phase.rate
    if len(y) == 0 or epochs < 1:
        return report
    device = next(model.parameters()).device
    parameters = model.parameters() if phase.parameters is None else phase.parameters()
    optimizer = make_optimizer(parameters, spec, phase.betas, rate)
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p.requires_grad]
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    rates = step_rates(spec, rate, epochs * len(batch_slices(len(y), spec.batch_size)))
    total = torch.zeros((), device=device)
    started = time.perf_counter()
    model.train()
    for module in held:
        module.eval()
    # Dropout draws from PyTorch's global generator: it is seeded for this training, and restored afterwards.
    dropout = generator.initial_seed()
    if private is not None:
        generator, dropout = private.generator(), private.generator().initial_seed()
    watched = contextlib.nullcontext() if private is None else private.watching(model)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), watched:
        if device.type == "cpu":
            # The same numbers; torch.manual_seed also notes for GPUs from where it was called, which takes longer than
            # the steps of a client with a few samples.
            torch.default_generator.manual_seed(dropout)
        else:
            torch.manual_seed(dropout)
        for epoch in range(epochs):
            batches = epoch_batches(x, y, spec.batch_size, generator) if private is None else private.batches(x, y)
            for raw, labels, index in batches:
                optimizer.zero_grad(set_to_none=True)
                if len(labels):  # a draw of DP-SGD may be empty
                    pictures = _views(raw, inputs, spec.augment, generator, phase.views)
                    batch = Batch(pictures[0], labels, pictures, index)
                    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=spec.precision == "bf16"):
                        loss = phase.loss(batch)
                    loss.backward()  # type: ignore[no-untyped-call]
                    # The sum stays on the device: reading a number here would make every step wait for it.
                    total += loss.detach() * len(labels)
                if private is not None:
                    private.replace(trained, len(labels), len(y))
                if phase.on_gradients is not None:
                    phase.on_gradients(trained)
                if spec.clip > 0:
                    for group in optimizer.param_groups:
                        nn.utils.clip_grad_norm_(group["params"], spec.clip)
                if rates:
                    for group in optimizer.param_groups:
                        group["lr"] = rates[report.steps]
                optimizer.step()
                report.steps += 1
                report.samples += len(labels)
                if phase.on_step is not None and len(labels):
                    phase.on_step(batch)
            if phase.on_epoch is not None:
                phase.on_epoch(epoch)
    report.seconds = time.perf_counter() - started
    if report.samples:
        report.loss = float(total) / report.samples
    if private is not None:
        # Whether a loss is finite may depend on one image, so a private training never fails for it.
        report.loss = report.loss if math.isfinite(report.loss) else math.nan
        return report
    if not math.isfinite(report.loss):
        raise FloatingPointError(
            f"the training loss is {report.loss} after {counted(report.steps, 'step')}: lower lr (now "
            f"{rate}), or set clip"
        )
    return report


def _views(raw: Tensor, inputs: InputSpec | None, kind: str, generator: torch.Generator, views: int) -> list[Tensor]:
    """Return `views` independent augmentations of a batch; without augmentation all are the same tensor."""
    if inputs is None:
        return [raw] * views
    if kind == "none":
        return [normalise(raw, inputs)] * views
    return [augment(raw, inputs, kind, generator) for _ in range(views)]
