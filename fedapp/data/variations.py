"""Variations of samples that are no images, on normalised values, with one draw per sample.

========  ======  ==============================================================================================
samples   kind    what happens
========  ======  ==============================================================================================
series    weak    Gaussian noise with a standard deviation of 0.05 on every value, and each channel times a
                  factor from N(1, 0.1)
series    strong  weak; time runs faster and slower along a smooth curve through four random speeds with a
                  standard deviation of 0.2, by linear interpolation; and a stretch of a tenth is set to 0, the mean
table     weak    noise with a standard deviation of 0.05 on every feature with more than two values
table     strong  20 to 30 % of the features of a row have their values from other rows of the batch, so each
                  value is one that occurs (SCARF: Bahri et al., ICLR 2022)
array     both    noise with a standard deviation of 0.05 on every value
========  ======  ==============================================================================================

The draws come from the given generator in a fixed order and do not depend on the device of the samples.
"""

from __future__ import annotations

from fedapp.lazy import F, Tensor, torch
from fedapp.process import hand_over

NOISE = 0.05
GAIN = 0.1
KNOTS = 4
SPEED = 0.2
SLOWEST = 0.1
HIDDEN = 0.1
SWAPPED = (0.2, 0.3)


def vary(x: Tensor, kind: str, strong: bool, binary: tuple[bool, ...], generator: torch.Generator) -> Tensor:
    """Return a varied copy of samples.

    Parameters
    ----------
    x : (B, *shape) float32, normalised.
    kind : `series` (B, C, T), `table` (B, F) or `array`.   strong : whether the views are FedClassAvg's strong ones.
    binary : per feature of a table: whether it has at most two values; empty = none has.
    """
    if kind == "table" and strong:
        return swap_features(x, generator)
    noise = NOISE * _normal(x.shape, generator, x.device)
    if kind == "table" and any(binary):
        noise[:, list(binary)] = 0.0
    if kind != "series":
        return x + noise
    gain = 1 + GAIN * _normal((*x.shape[:2], 1), generator, x.device)
    x = x * gain + noise
    return hide_stretch(warp_time(x, generator), generator) if strong else x


def _normal(shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Tensor:
    return hand_over(torch.randn(shape, generator=generator, device=generator.device), device)


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, device=generator.device)


def draw_times(count: int, steps: int, generator: torch.Generator) -> Tensor:
    """Draw increasing times (B, T) from 0 to T - 1, at which warped series are read.

    Speeds are drawn at four knots, at least 0.1, interpolated linearly, summed, and scaled to the whole length, so that
    the first and the last step stay where they are.
    """
    speeds = torch.randn((count, 1, KNOTS), generator=generator, device=generator.device).mul_(SPEED).add_(1.0)
    curve = F.interpolate(speeds.clamp_min_(SLOWEST), size=max(1, steps - 1), mode="linear", align_corners=True)[:, 0]
    times = F.pad(curve.cumsum(1), (1, 0))[:, :steps]
    return times * ((steps - 1) / times[:, -1:].clamp_min(SLOWEST))


def warp_time(x: Tensor, generator: torch.Generator) -> Tensor:
    """Read each series (B, C, T) at its own `draw_times`, with linear interpolation."""
    count, _, steps = x.shape
    times = hand_over(draw_times(count, steps, generator), x.device)
    before = times.floor().clamp_(0, max(0, steps - 2)).long()
    after = (before + 1).clamp_max_(steps - 1)
    share = (times - before)[:, None]
    left, right = (x.gather(2, place[:, None].expand_as(x)) for place in (before, after))
    return left + share * (right - left)


def hide_stretch(x: Tensor, generator: torch.Generator) -> Tensor:
    """Set one random stretch of a tenth of the steps (at least one) of each series (B, C, T) to 0 in all channels."""
    count, _, steps = x.shape
    length = max(1, round(HIDDEN * steps))
    start = (_uniform((count, 1), generator) * (steps - length + 1)).long().clamp_max_(steps - length)
    step = torch.arange(steps, device=generator.device)
    hidden = (step >= start) & (step < start + length)
    return x.masked_fill(hand_over(hidden, x.device)[:, None], 0.0)


def swap_features(x: Tensor, generator: torch.Generator) -> Tensor:
    """Replace 20 to 30 % of the features of each row (B, F), at least one, by those of rows drawn from the batch."""
    count, features = x.shape
    low, high = SWAPPED
    share = low + (high - low) * _uniform((count, 1), generator)
    number = (share * features).round_().clamp_min_(1)
    # The features with the smallest random numbers: exactly `number` of them, and each feature equally often.
    chosen = _uniform((count, features), generator).argsort(1).argsort(1) < number
    rows = torch.randint(0, count, (count, features), generator=generator, device=generator.device)
    return torch.where(hand_over(chosen, x.device), x.gather(0, hand_over(rows, x.device)), x)
