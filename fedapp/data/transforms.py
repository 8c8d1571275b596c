"""Normalisation and augmentation of whole batches, with one draw per image.

=========  ================  ==================================================================================
kind       images            what happens
=========  ================  ==================================================================================
none       all               nothing
weak       one channel       rotation by up to 8 degrees, zoom by up to 5 %, shift by up to 1/16 of the width
                             (0.5 pixels at 8, 1.75 at 28), bilinear, black outside; no flips, since a mirrored
                             2 is not a 2. Up to 16 pixels wide also contrast within 10 % and Gaussian noise
                             with a standard deviation of 0.03
weak       several channels  black border of 4 pixels (an eighth of the width below 32), random crop, mirrored
                             with probability 0.5
strong     all               random resized crop (area 0.2 to 1, aspect 3/4 to 4/3), mirrored with probability
                             0.5; with probability 0.8 brightness, contrast and saturation within 40 % and hue
                             within 0.1 turns, in random order; with probability 0.2 grey. This is FedClassAvg's
                             pipeline; on one channel hue, saturation and grey change nothing
=========  ================  ==================================================================================

Series, table rows and other arrays are varied after normalisation; `fedapp.data.variations` says how.

All arithmetic on grey levels is on x / scale, limited to [0, 1] as torchvision's functions on float tensors do; each
step is the same as torchvision's per-image function with the drawn parameters, without rounding to uint8 in between.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from fedapp.data.columns import BODY, REPEATED
from fedapp.data.variations import vary
from fedapp.errors import BadRequest, described
from fedapp.lazy import F, Tensor, torch
from fedapp.process import hand_over

if TYPE_CHECKING:
    from fedapp.data.dataset import Dataset

AUGMENTATIONS: tuple[str, ...] = ("none", "weak", "strong")
"""Kinds that :func:`augment` knows."""

ROTATION = 8.0
ZOOM = 0.05
SHIFT = 1 / 16
CONTRAST = 0.10
NOISE = 0.03
SMALL = 16
BORDER = 4
AREA = (0.2, 1.0)
ASPECT = (3 / 4, 4 / 3)
CROP_TRIES = 10
JITTER = 0.4
HUE = 0.1
JITTER_PROBABILITY = 0.8
GREY_PROBABILITY = 0.2
_GREY_WEIGHTS = (0.2989, 0.587, 0.114)


@dataclass(frozen=True)
class InputSpec:
    """What the transforms need to know of a data set.

    Attributes
    ----------
    shape : of one sample as a model takes it: (C, H, W) images, (C, T) series, (F,) table rows.
    scale : largest grey level of images; 1 for all others.
    mean, std : of x / scale along the first axis of `shape`: per channel, or per feature.
    kind : `image` (uint8), `series`, `table` or `array` (float32).
    binary : per feature of a table: whether it has at most two values, such as a one-hot column. Empty = none has.
    features : names of a table's features; `column=category` is one category of a text column. Empty = unknown.
    columns : the column of the table that each feature is read from. Empty = unknown.
    body : SHA-256 of the pretrained body whose features the samples are. Empty = they are no features, or unknown.
    extraction : facts about that body and its samples (`columns.REPEATED`), as JSON. Empty = unknown.
    """

    shape: tuple[int, ...]
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    kind: str = "image"
    binary: tuple[bool, ...] = ()
    features: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    body: str = ""
    extraction: str = ""

    @classmethod
    def of(cls, dataset: Dataset) -> InputSpec:
        """Return the specification of a data set's samples; what training rows say of them is not in it yet."""
        d = dataset
        texts = {f"{name}={category}": name for name, found in d.categories.items() for category in found}
        columns = tuple(texts.get(feature, feature) for feature in d.features)
        body = str(d.about.get(BODY, ""))
        known = json.dumps({key: d.about[key] for key in REPEATED if key in d.about}, sort_keys=True) if body else ""
        return cls(d.shape, d.scale, d.mean, d.std, d.kind, (), d.features, columns, body, known)

    def scaled(self, text: str) -> InputSpec:
        """Return the specification with the mean and standard deviation that a server states, as JSON.

        Raises
        ------
        BadRequest : they are not finite numbers for each feature, or a deviation is not above 0.
        """
        mean, std = json.loads(text)
        found = replace(self, mean=tuple(map(float, mean)), std=tuple(map(float, std)))
        if not len(mean) == len(std) == self.shape[0] or not all(map(math.isfinite, mean + std)) or min(std) <= 0:
            raise BadRequest(f"the server's scaling is not that of {described(self.shape)}")
        return found

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of an image in pixels."""
        return self.shape[-2], self.shape[-1]


@lru_cache(maxsize=64)
def _affine(spec: InputSpec, scale: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Factor and offset with x * factor + offset = (x / scale - mean) / std, repeated for every pixel: (H * W * C,)."""
    # The result is cached. A caller may be in inference mode, whose tensors cannot be used in training later.
    with torch.inference_mode(False):
        mean = torch.tensor(spec.mean, dtype=torch.float64)
        std = torch.tensor(spec.std, dtype=torch.float64)
        pixels = math.prod(spec.sides)
        return (1 / (scale * std)).float().repeat(pixels).to(device), (-mean / std).float().repeat(pixels).to(device)


def _standardise(x: Tensor, spec: InputSpec, scale: float) -> Tensor:
    """Normalise float32 (B, H, W, C) of grey levels 0 .. scale in place; return (B, C, H, W), channels_last."""
    factor, offset = _affine(spec, scale, x.device)
    # Factor and offset of a whole image: broadcasting over the channels in the last axis would work in steps of three.
    # The batch may be symbolic where a model is exported, so not len(x).
    x.view(x.shape[0], factor.numel()).mul_(factor).add_(offset)
    return x.permute(0, 3, 1, 2)


def channels_first(x: Tensor) -> Tensor:
    """Return samples as they are kept in the layout of models: images uint8 (n, H, W, C) as (n, C, H, W), others as is.

    Only images are uint8: the bytes of a table become float32 when they are read.
    """
    return x.permute(0, 3, 1, 2) if x.dtype == torch.uint8 else x


@lru_cache(maxsize=64)
def _moments(spec: InputSpec, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Mean and reciprocal standard deviation float32, (1, C, 1, ...) as samples have axes; None if all are 0 and 1."""
    if set(spec.mean) == {0.0} and set(spec.std) == {1.0}:
        return None
    with torch.inference_mode(False):
        size = (1, -1, *(1 for _ in spec.shape[1:]))
        mean, std = (torch.tensor(v, dtype=torch.float64).view(size) for v in (spec.mean, spec.std))
        return mean.float().to(device), (1 / std).float().to(device)


def normalise(x: Tensor, spec: InputSpec) -> Tensor:
    """Return (x / scale - mean) / std as float32.

    Parameters
    ----------
    x : (B, *shape): images uint8 (B, C, H, W), all others float32. NaN, an unknown value, becomes 0, the mean.

    Returns
    -------
    (B, *shape), images in channels_last.
    """
    if x.dtype == torch.uint8:
        return _standardise(x.permute(0, 2, 3, 1).contiguous().to(torch.float32), spec, spec.scale)
    if (found := _moments(spec, x.device)) is None:
        return x.nan_to_num(nan=0.0)
    mean, factor = found
    return ((x - mean) * factor).nan_to_num_(nan=0.0)


def augment(x: Tensor, spec: InputSpec, kind: str, generator: torch.Generator) -> Tensor:
    """Augment and normalise a batch; every sample gets its own draw.

    Parameters
    ----------
    x : (B, *shape): images uint8 (B, C, H, W), all others float32.
    kind : ``none``, ``weak`` or ``strong``.
    generator : source of all draws. If it lives on the CPU the draws are the same whatever the device of the samples.

    Returns
    -------
    float32 (B, *shape), normalised, images in channels_last.

    Raises
    ------
    BadRequest : if the kind is unknown.
    """
    if kind not in AUGMENTATIONS:
        raise BadRequest(f"unknown augmentation {kind!r}: known are {', '.join(AUGMENTATIONS)}")
    if kind == "none" or not len(x):
        return normalise(x, spec)
    if spec.kind != "image":
        return vary(normalise(x, spec), spec.kind, kind == "strong", spec.binary, generator)
    if kind == "weak":
        return _weak_grey(x, spec, generator) if spec.shape[0] == 1 else _weak_colour(x, spec, generator)
    return _strong(x, spec, generator)


def _uniform(generator: torch.Generator, low: float, high: float, *shape: int) -> Tensor:
    draw = torch.rand(shape, generator=generator, device=generator.device)
    return draw.mul_(high - low).add_(low)


def _pixels_last(x: Tensor) -> Tensor:
    """Return (B, C, H, W) as contiguous (B, H, W, C)."""
    return x.permute(0, 2, 3, 1).contiguous()


# --- weak ----------------------------------------------------------------------------------------------------------


def draw_similarity(count: int, sides: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Draw rotation, zoom and shifts of images whose height and width in pixels are `sides`.

    Returns
    -------
    float32 (count, 4): angle in degrees (clockwise on the screen), zoom factor, shift to the right and downwards in
    pixels.
    """
    angle = _uniform(generator, -ROTATION, ROTATION, count)
    zoom = _uniform(generator, 1 - ZOOM, 1 + ZOOM, count)
    height, width = sides
    reach = SHIFT * torch.tensor([width, height], dtype=torch.float32, device=generator.device)
    shift = _uniform(generator, 0.0, 1.0, count, 2).mul_(2 * reach).sub_(reach)
    return torch.cat([angle[:, None], zoom[:, None], shift], dim=1)


def transform_similarity(x: Tensor, parameters: Tensor) -> Tensor:
    """Rotate, zoom and shift each image float32 (B, C, H, W) about its centre; bilinear, zero outside.

    The parameters are those of :func:`draw_similarity`.
    """
    angle, zoom, right, down = hand_over(parameters, x.device).unbind(1)
    radians = torch.deg2rad(angle)
    cos, sin = torch.cos(radians) / zoom, torch.sin(radians) / zoom
    # grid_sample needs the source of each target pixel, hence the inverse map, in units of half the height and width.
    high, wide = x.shape[-2] / 2, x.shape[-1] / 2
    across = [cos, sin * (high / wide), -(cos * right + sin * down) / wide]
    along = [-sin * (wide / high), cos, (sin * right - cos * down) / high]
    inverse = torch.stack([*across, *along], dim=1)
    grid = F.affine_grid(inverse.view(-1, 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _weak_grey(x_u8: Tensor, spec: InputSpec, generator: torch.Generator) -> Tensor:
    count = len(x_u8)
    x = transform_similarity(x_u8.to(torch.float32).div_(spec.scale), draw_similarity(count, spec.sides, generator))
    if max(spec.sides) <= SMALL:
        x = adjust_contrast(x, hand_over(_uniform(generator, 1 - CONTRAST, 1 + CONTRAST, count), x.device))
        noise = torch.randn(x.shape, generator=generator, device=generator.device)
        x = x.add_(hand_over(noise, x.device), alpha=NOISE)
    return _standardise(_pixels_last(x), spec, 1.0)


def _border(size: int) -> int:
    return min(BORDER, max(1, size // 8))


def draw_crop(count: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw top and left of a crop from the bordered image, int64 (B, 2), and whether it is mirrored, bool (B,)."""
    corner = torch.randint(0, 2 * _border(size) + 1, (count, 2), generator=generator, device=generator.device)
    return corner, _uniform(generator, 0.0, 1.0, count) < 0.5


def _weak_colour(x_u8: Tensor, spec: InputSpec, generator: torch.Generator) -> Tensor:
    count, (channels, height, width) = len(x_u8), spec.shape
    border = _border(min(spec.sides))
    corner, mirrored = draw_crop(count, min(spec.sides), generator)
    corner, mirrored = hand_over(corner, x_u8.device), hand_over(mirrored, x_u8.device)
    high, wide = height + 2 * border, width + 2 * border
    bordered = x_u8.new_zeros(count, high, wide, channels)
    bordered[:, border:-border, border:-border] = x_u8.permute(0, 2, 3, 1)
    down, across = (torch.arange(side, device=x_u8.device) for side in spec.sides)
    columns = torch.where(mirrored[:, None], across.flip(0), across) + corner[:, 1:]
    rows = down + corner[:, :1] + high * torch.arange(count, device=x_u8.device)[:, None]
    flat = (rows[:, :, None] * wide + columns[:, None, :]).view(-1)
    cropped = bordered.view(-1, channels).index_select(0, flat).view(count, height, width, channels)
    return _standardise(cropped.to(torch.float32), spec, spec.scale)


# --- strong --------------------------------------------------------------------------------------------------------


def draw_resized_crop(count: int, sides: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Draw crops of random area and aspect, as torchvision's ``RandomResizedCrop.get_params``.

    Ten tries per image; where none fits, the whole image, as torchvision takes it of square images.

    Returns
    -------
    int64 (B, 4): top, left, height, width.
    """
    full_height, full_width = sides
    area = _uniform(generator, *AREA, count, CROP_TRIES) * full_height * full_width
    aspect = torch.exp(_uniform(generator, math.log(ASPECT[0]), math.log(ASPECT[1]), count, CROP_TRIES))
    width = torch.round(torch.sqrt(area * aspect)).long()
    height = torch.round(torch.sqrt(area / aspect)).long()
    fits = (width > 0) & (width <= full_width) & (height > 0) & (height <= full_height)
    first = fits.to(torch.uint8).argmax(1, keepdim=True)
    found = fits.any(1)
    width = torch.where(found, width.gather(1, first)[:, 0], full_width)
    height = torch.where(found, height.gather(1, first)[:, 0], full_height)
    place = _uniform(generator, 0.0, 1.0, count, 2)
    top = torch.minimum((place[:, 0] * (full_height - height + 1)).long(), full_height - height)
    left = torch.minimum((place[:, 1] * (full_width - width + 1)).long(), full_width - width)
    return torch.stack([top, left, height, width], dim=1)


def _resize_weights(start: Tensor, length: Tensor, size: int) -> Tensor:
    """Bilinear weights (B, S, S) that stretch [start, start + length) of an axis to S pixels."""
    steps = torch.arange(size, device=start.device, dtype=torch.float32)
    extent = length[:, None].float()
    source = ((steps + 0.5) * (extent / size) - 0.5).clamp_min(0.0)
    source = torch.minimum(source, extent - 1) + start[:, None]
    # Linear interpolation: a hat of width one pixel on each side of the source position.
    return (1 - (source[:, :, None] - steps).abs()).clamp_min_(0.0)


def transform_resized_crop(x: Tensor, boxes: Tensor, mirrored: Tensor) -> Tensor:
    """Cut a box out of each image, stretch it to the full size (bilinear), and mirror it where asked.

    Images are float32 (B, C, H, W), boxes int64 (B, 4): top, left, height, width, `mirrored` is bool (B,).
    """
    count, channels, full_height, full_width = x.shape
    top, left, height, width = hand_over(boxes, x.device).unbind(1)
    down = _resize_weights(top, height, full_height)
    across = _resize_weights(left, width, full_width)
    across = torch.where(hand_over(mirrored, x.device)[:, None, None], across.flip(1), across)
    # Two small matrix products per image. With rows first and channels in the middle, each is one batched call.
    rows = x.permute(0, 2, 1, 3).reshape(count, full_height, channels * full_width)
    stretched = torch.bmm(down, rows).view(count, full_height * channels, full_width)
    stretched = torch.bmm(stretched, across.transpose(1, 2))
    return stretched.view(count, full_height, channels, full_width).permute(0, 2, 1, 3)


def to_grey(x: Tensor) -> Tensor:
    """Return the luma (B, 1, H, W) of colour images float32 (B, 3, H, W) (ITU-R 601 weights, as torchvision)."""
    red, green, blue = x.unbind(1)
    luma = red * _GREY_WEIGHTS[0]
    return luma.add_(green, alpha=_GREY_WEIGHTS[1]).add_(blue, alpha=_GREY_WEIGHTS[2]).unsqueeze(1)


def adjust_brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply each image (B, C, H, W) of values in [0, 1] by its factor (B,), limited to [0, 1]."""
    return (x * factor.view(-1, 1, 1, 1)).clamp_(0.0, 1.0)


def adjust_contrast(x: Tensor, factor: Tensor) -> Tensor:
    """Scale each image's distance from its mean luma by its factor (B,), limited to [0, 1]."""
    means = x.mean(dim=(2, 3))
    middle = to_grey(means[:, :, None, None]) if x.shape[1] == 3 else means.mean(dim=1).view(-1, 1, 1, 1)
    return torch.lerp(middle, x, factor.view(-1, 1, 1, 1)).clamp_(0.0, 1.0)


def adjust_saturation(x: Tensor, factor: Tensor) -> Tensor:
    """Scale each colour image's distance from its luma by its factor (B,), limited to [0, 1]; grey stays as it is."""
    if x.shape[1] != 3:
        return x
    return torch.lerp(to_grey(x), x, factor.view(-1, 1, 1, 1)).clamp_(0.0, 1.0)


def adjust_hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn each colour image's hue by its shift (B,) in turns of the colour wheel; grey stays as it is."""
    if x.shape[1] != 3:
        return x
    red, green, blue = x.unbind(1)
    high = torch.maximum(torch.maximum(red, green), blue)
    spread = high - torch.minimum(torch.minimum(red, green), blue)
    # Masks are numbers, since torch.where costs ten times as much as a product here. Exactly one of the three is 1.
    is_red = (high == red).float()
    is_green = (high == green).float().mul_(1 - is_red)
    is_blue = 1 - is_red - is_green
    # Position on the wheel in sixths of a turn: 0 red, 2 green, 4 blue. For grey pixels the numerator is 0.
    wheel = (green - blue).mul_(is_red).addcmul_(blue - red, is_green).addcmul_(red - green, is_blue)
    wheel = wheel.div_(spread.clamp_min(1e-12)).add_(is_green, alpha=2).add_(is_blue, alpha=4)
    wheel = wheel.add_(6 * shift.view(-1, 1, 1))
    wheel = wheel.sub_(torch.floor(wheel / 6), alpha=6)
    # How far each channel lies below the brightest: nothing within one sixth of its own place, all beyond two sixths.
    below = torch.stack([(wheel - 3).abs_().neg_().add_(2), (wheel - 2).abs_().sub_(1), (wheel - 4).abs_().sub_(1)])
    return (high - below.clamp_(0.0, 1.0).mul_(spread)).transpose(0, 1)


_ADJUSTMENTS = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)


def draw_jitter(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw the colour changes.

    Returns
    -------
    factors : float32 (B, 4): brightness, contrast, saturation, and the shift of hue.
    order : int64 (B, 4): the order in which the four are applied.
    jittered, greyed : bool (B,): which images are changed at all, and which become grey.
    """
    factors = _uniform(generator, 1 - JITTER, 1 + JITTER, count, 4)
    factors[:, 3] = (factors[:, 3] - 1) * (HUE / JITTER)
    order = _uniform(generator, 0.0, 1.0, count, 4).argsort(1)
    jittered = _uniform(generator, 0.0, 1.0, count) < JITTER_PROBABILITY
    greyed = _uniform(generator, 0.0, 1.0, count) < GREY_PROBABILITY
    return factors, order, jittered, greyed


def transform_jitter(x: Tensor, factors: Tensor, order: Tensor, jittered: Tensor, greyed: Tensor) -> Tensor:
    """Apply the colour changes of :func:`draw_jitter` to images float32 (B, C, H, W) in [0, 1]; return a new tensor."""
    colour = x.shape[1] == 3
    # One plane per channel over the whole batch, so that arithmetic between channels runs on contiguous memory.
    planes = x.transpose(0, 1).clone(memory_format=torch.contiguous_format)
    # Images that get the same change at the same place of their order are changed in one call.
    kinds = range(4 if colour else 2)
    groups = [torch.nonzero(jittered & (order[:, place] == kind))[:, 0] for place in range(4) for kind in kinds]
    groups.append(torch.nonzero(greyed)[:, 0])
    *chosen, grey = torch.split(hand_over(torch.cat(groups), x.device), [len(rows) for rows in groups])
    factors = hand_over(factors, x.device)
    for kind, rows in zip([*kinds] * 4, chosen, strict=True):
        if len(rows):
            images = planes.index_select(1, rows).transpose(0, 1)
            changed = _ADJUSTMENTS[kind](images, factors[:, kind].index_select(0, rows))
            planes.index_copy_(1, rows, changed.transpose(0, 1))
    if colour:
        luma = to_grey(planes.index_select(1, grey).transpose(0, 1))
        planes.index_copy_(1, grey, luma.transpose(0, 1).expand(3, -1, -1, -1))
    return planes.transpose(0, 1)


def _strong(x_u8: Tensor, spec: InputSpec, generator: torch.Generator) -> Tensor:
    count = len(x_u8)
    boxes = draw_resized_crop(count, spec.sides, generator)
    mirrored = _uniform(generator, 0.0, 1.0, count) < 0.5
    jitter = draw_jitter(count, generator)
    x = x_u8.to(torch.float32).div_(spec.scale)
    x = transform_jitter(transform_resized_crop(x, boxes, mirrored), *jitter)
    return _standardise(_pixels_last(x), spec, 1.0)
