"""DP-SGD: local training whose every step sees the images only through a clipped, noised sum of their gradients.

Abadi et al., Deep Learning with Differential Privacy, CCS 2016, Algorithm 1. A step draws each of the client's images
with probability q, clips the gradient of each drawn image to the norm C, adds noise of ``z C`` to their sum and divides
by the expected number of images:  ``g = (sum_i clip(g_i, C) + N(0, z^2 C^2 I)) / (q n)``. The model after the training
is made from these gradients alone, so that all that is sent of it is covered.

Neighbours have the same n, on which q, z and the divisor depend: an image that is left out counts as one whose gradient
is 0.

Opacus computes the gradient of every image. The noise is that of `core.noise`, from the operating system's random bytes
and on a grid. Which images are drawn, how they are augmented and what dropout leaves out is drawn secretly too: with
draws that the server can repeat there would be no amplification, and one image more would shift the others' draws.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fedapp.core.noise import Source, system
from fedapp.core.privacy import Float64, noised
from fedapp.data.transforms import channels_first
from fedapp.errors import BadRequest
from fedapp.lazy import Tensor, nn, torch
from fedapp.process import hand_over

INSTALL = "dp = 'sgd' needs Opacus: pip install 'fedapp[dpsgd]'"
LEFT = ("grad_sample", "_current_grad_sample", "_forward_counter")
"""What Opacus adds to parameters."""


class NoisySteps:
    """The draws and the gradients of one local training.

    Parameters
    ----------
    rate : q, probability with which a step draws an image.   count : steps of an epoch.
    bound : C, norm that the gradient of an image is clipped to.   noise : z.
    source : of random bytes.
    """

    def __init__(self, rate: float, count: int, bound: float, noise: float, source: Source) -> None:
        self.rate, self.count, self.bound, self.noise, self.source = rate, count, bound, noise, source

    def generator(self) -> torch.Generator:
        """Return a generator with a secret seed, for augmentation and dropout."""
        return torch.Generator().manual_seed(int.from_bytes(self.source(8), "little") >> 1)

    def batches(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield what the steps of an epoch draw, as `epoch_batches` does; a draw may be empty."""
        for _ in range(self.count):
            # 53 bits are a number in [0, 1) without rounding.
            drawn = (np.frombuffer(self.source(8 * len(y)), dtype="<u8") >> 11) * 2.0**-53
            chosen = hand_over(torch.from_numpy(np.flatnonzero(drawn < self.rate)), x.device)
            yield channels_first(x[chosen]), y[chosen], chosen

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Let the backward pass compute the gradient of every image, which `replace` needs.

        Raises
        ------
        BadRequest : Opacus is not installed.
        NotImplementedError : a layer has no gradient of a single image, see `check`.
        """
        try:
            from opacus.grad_sample.grad_sample_module import GradSampleHooks
        except ImportError as e:
            raise BadRequest(INSTALL) from e
        hooks: Any = GradSampleHooks(model, loss_reduction="mean", strict=True)
        layers = [m for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)]
        before = [layer.register_forward_pre_hook(_contiguous) for layer in layers]
        try:
            with warnings.catch_warnings():
                # True of every model whose first layer is trained: images need no gradient.
                warnings.filterwarnings("ignore", "Full backward hook is firing")
                yield
        finally:
            for handle in before:
                handle.remove()
            hooks.remove_hooks()
            for p, name in itertools.product(model.parameters(), LEFT):
                if hasattr(p, name):
                    delattr(p, name)

    def replace(self, parameters: list[Tensor], drawn: int, images: int) -> None:
        """Put the noised gradient of a step in the place of the exact one.

        Parameters
        ----------
        parameters : all that is trained; after a backward pass of the mean loss, unless no image was drawn.
        drawn : images of the step.   images : n.

        Raises
        ------
        BadRequest : Opacus has found no gradients of single images.
        """
        total = self._clipped_sum(parameters, drawn) if drawn else np.zeros(sum(p.numel() for p in parameters))
        mean = noised(total, self.bound, self.noise, self.source) / (self.rate * images)
        start = 0
        for p in parameters:
            part = torch.from_numpy(mean[start : start + p.numel()].reshape(p.shape))
            p.grad = part.to(p)
            start += p.numel()

    def _clipped_sum(self, parameters: list[Tensor], drawn: int) -> Float64:
        rows = _taken(parameters, drawn)
        # In float64, a parameter at a time: rounding must not make a clipped gradient longer than C.
        squares = torch.stack([row.double().square().sum(1) for row in rows]).sum(0)
        factor = self.bound / squares.sqrt().clamp_min(self.bound)
        finite = torch.isfinite(squares)
        if not finite.all():  # an image without a finite gradient says nothing
            rows, factor = [row[finite] for row in rows], factor[finite]
        return np.concatenate([(factor @ row.double()).cpu().numpy() for row in rows])


def _taken(parameters: Sequence[Tensor], drawn: int) -> list[Tensor]:
    """Take the gradients of all images from the parameters, (drawn, numbers) each."""
    rows = []
    for p in parameters:
        found = getattr(p, "grad_sample", None)
        if not isinstance(found, torch.Tensor) or len(found) != drawn:
            raise BadRequest("dp = 'sgd': a layer is used more than once or has no gradient of a single sample")
        p.grad_sample = None  # type: ignore[attr-defined]
        rows.append(found.flatten(1))
    return rows


def check(model: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    """Refuse a model whose images have no gradients of their own, by a trial on random images.

    Parameters
    ----------
    shape : of an image, channels first.

    Raises
    ------
    BadRequest : says why, and what to do.
    """
    trial = copy.deepcopy(model).train()
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in trial.modules()):
        raise BadRequest(
            f"dp = 'sgd': '{name}' has BatchNorm, which makes the output of one sample depend on all others, so "
            "that no clipping bounds the effect of one: choose a model without BatchNorm"
        )
    device = next(trial.parameters()).device
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            problem = _problem(trial, torch.rand(3, *shape, device=device))
    except BadRequest:
        raise
    except Exception as e:  # of a model that Opacus cannot follow, such as one that changes its input in place
        raise BadRequest(f"dp = 'sgd': Opacus finds no gradient of a single sample in '{name}': {str(e)[:300]}") from e
    if problem:
        raise BadRequest(f"dp = 'sgd': in '{name}' {problem}: choose another model")


def _problem(trial: nn.Module, images: Tensor) -> str | None:
    """Return the reason that a model's images cannot be clipped one by one, or None; x is (3, channels, ...)."""
    buffers = {n: b.clone() for n, b in trial.named_buffers()}
    with NoisySteps(1.0, 1, 1.0, 1.0, system).watching(trial):
        for place in (0, 1):  # the same image next to two others, in both places
            found = []
            for other in (1, 2):
                torch.manual_seed(0)  # the same dropout
                with torch.no_grad():
                    found.append(trial(images[[0, other] if place == 0 else [other, 0]])[place])
            if not torch.allclose(found[0], found[1], rtol=1e-4, atol=1e-6):
                return "the output of one sample depends on the others in its batch, so that no clipping bounds it"
        if any(not torch.equal(b, buffers[n]) for n, b in trial.named_buffers()):
            return "a buffer changes with the samples, and no noise covers that"
        trial(images).square().mean(1).mean().backward()
        trained = [p for p in trial.parameters() if p.requires_grad]
        for p, row in zip(trained, _taken(trained, len(images))):
            exact, mean = torch.zeros_like(p) if p.grad is None else p.grad, row.mean(0).reshape(p.shape)
            rounding = 1e-2 if p.is_cuda else 1e-4  # convolutions of a GPU may use TF32
            if not torch.allclose(mean, exact, rtol=0, atol=rounding * float(row.abs().max()) + 1e-12):
                return "the gradient is not the mean over the samples, as where a layer's weights are used outside it"
    return None


def _contiguous(layer: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Undo channels_last, for which Opacus 1.6 finds wrong gradients of convolutions without a word."""
    return tuple(x.contiguous() for x in given)
