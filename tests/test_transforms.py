"""Batched transforms against torchvision's per-image functions with the drawn parameters."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as TF

from fedapp.data import transforms as T
from fedapp.data.dataset import Dataset
from fedapp.data.transforms import InputSpec, augment, normalise
from fedapp.errors import BadRequest

GREY8 = InputSpec((1, 8, 8), 16.0, (0.305,), (0.376,))
GREY28 = InputSpec((1, 28, 28), 255.0, (0.1307,), (0.3081,))
COLOUR32 = InputSpec((3, 32, 32), 255.0, (0.49, 0.48, 0.45), (0.25, 0.24, 0.26))
SPECS = {
    "grey8": GREY8,
    "grey28": GREY28,
    "colour32": COLOUR32,
    "colour64": dataclasses.replace(COLOUR32, shape=(3, 64, 64)),
}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def pictures(spec, count=24, seed=1):
    """Smooth random pictures as uint8 (B, C, S, S): noise alone would hide errors of a fraction of a pixel."""
    coarse = torch.rand(count, spec.shape[0], 5, 5, generator=generator(seed))
    fine = torch.nn.functional.interpolate(coarse, size=spec.sides, mode="bicubic", align_corners=False)
    return (fine.clamp(0, 1) * spec.scale).round().to(torch.uint8)


def unit(x_u8, spec):
    return x_u8.float() / spec.scale


def standard(x, spec):
    return TF.normalize(x, spec.mean, spec.std)


# --- normalisation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_normalise_equals_torchvision(spec, layout):
    x = pictures(spec)
    before = x.clone()
    out = normalise(x.contiguous(memory_format=layout), spec)
    assert out.dtype == torch.float32
    assert out.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(out, standard(unit(x, spec), spec), rtol=1e-5, atol=1e-5)
    assert torch.equal(x, before)


def test_normalise_from_rows_of_a_data_set():
    rows = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    out = normalise(torch.from_numpy(rows).permute(0, 3, 1, 2), COLOUR32)
    expected = (rows / 255.0 - COLOUR32.mean) / COLOUR32.std
    np.testing.assert_allclose(out.permute(0, 2, 3, 1).numpy(), expected, rtol=1e-5, atol=1e-5)


def test_normalise_can_be_trained_on_after_inference_mode():
    spec = dataclasses.replace(GREY8, mean=(0.3,))  # a fresh entry of the cache, first used in inference mode
    with torch.inference_mode():
        normalise(pictures(spec), spec)
    weight = torch.ones(1, 1, 8, 8, requires_grad=True)
    (normalise(pictures(spec), spec) * weight).sum().backward()
    assert weight.grad is not None


def test_spec_of_a_data_set():
    x = np.zeros((2, 28, 28, 1), np.uint8)
    y = np.zeros(2, np.int64)
    data = Dataset("mnist", x, y, x, y, ("0",), 255.0, (0.1307,), (0.3081,))
    assert InputSpec.of(data) == GREY28


def test_empty_batch():
    for kind in T.AUGMENTATIONS:
        for spec in SPECS.values():
            out = augment(torch.zeros(0, *spec.shape, dtype=torch.uint8), spec, kind, generator())
            assert out.shape == (0, *spec.shape)


# --- what holds for every kind -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", T.AUGMENTATIONS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_shape_and_seed(spec, kind):
    x = pictures(spec)
    before = x.clone()
    one = augment(x, spec, kind, generator(7))
    assert one.shape == x.shape
    assert one.dtype == torch.float32
    assert one.is_contiguous(memory_format=torch.channels_last)
    assert torch.isfinite(one).all()
    assert torch.equal(x, before)
    assert torch.equal(one, augment(x, spec, kind, generator(7)))
    if kind == "none":
        assert torch.equal(one, normalise(x, spec))
    else:
        assert not torch.equal(one, augment(x, spec, kind, generator(8)))


@pytest.mark.parametrize("kind", ["weak", "strong"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_image_has_its_own_draw(spec, kind):
    x = pictures(spec, 1).expand(24, -1, -1, -1)
    out = augment(x, spec, kind, generator(3))
    distinct = {out[row].contiguous().numpy().tobytes() for row in range(24)}
    # 81 places times 2 for the random crop: a few of 24 may coincide, never most.
    assert len(distinct) >= 18


@pytest.mark.parametrize("kind", ["weak", "strong"])
def test_global_generator_is_left_alone(kind):
    before = torch.get_rng_state()
    augment(pictures(COLOUR32), COLOUR32, kind, generator())
    augment(pictures(GREY8), GREY8, kind, generator())
    assert torch.equal(before, torch.get_rng_state())


def test_unknown_kind():
    with pytest.raises(BadRequest, match="none, weak, strong"):
        augment(pictures(GREY8), GREY8, "medium", generator())


# --- weak ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [GREY8, GREY28, COLOUR32])
def test_similarity_equals_torchvision(spec):
    x = unit(pictures(spec), spec)
    parameters = T.draw_similarity(len(x), spec.sides, generator(2))
    out = T.transform_similarity(x, parameters)
    for row, (angle, zoom, right, down) in enumerate(parameters.tolist()):
        expected = TF.affine(
            x[row], angle, [right, down], zoom, [0.0, 0.0], interpolation=TF.InterpolationMode.BILINEAR
        )
        torch.testing.assert_close(out[row], expected, rtol=1e-4, atol=1e-4)


def test_similarity_moves_as_it_says():
    x = torch.zeros(3, 1, 8, 8)
    x[:, 0, 2, 3] = 1
    # One pixel right; one pixel down; a quarter turn clockwise takes (row 2, column 3) to (row 3, column 5).
    parameters = torch.tensor([[0.0, 1.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0], [90.0, 1.0, 0.0, 0.0]])
    out = T.transform_similarity(x, parameters)
    for row, place in enumerate([(2, 4), (3, 3), (3, 5)]):
        assert out[row, 0][place] == pytest.approx(1, abs=1e-5)
        assert out[row].sum() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(("spec", "shift"), [(GREY8, 0.5), (GREY28, 1.75)])
def test_similarity_is_drawn_within_its_bounds(spec, shift):
    drawn = T.draw_similarity(4000, spec.sides, generator())
    for column, (low, high) in enumerate([(-8, 8), (0.95, 1.05), (-shift, shift), (-shift, shift)]):
        values = drawn[:, column]
        assert low <= values.min() < low + 0.02 * (high - low)
        assert high >= values.max() > high - 0.02 * (high - low)
        assert values.mean() == pytest.approx((low + high) / 2, abs=0.03 * (high - low))


def test_weak_digits_step_by_step():
    x = pictures(GREY8)
    g = generator(5)
    moved = T.transform_similarity(unit(x, GREY8), T.draw_similarity(len(x), (8, 8), g))
    factors = torch.rand(len(x), generator=g) * 0.2 + 0.9
    noise = torch.randn(x.shape, generator=g)
    contrasted = torch.stack(
        [TF.adjust_contrast(image, factor.item()) for image, factor in zip(moved, factors, strict=True)]
    )
    expected = standard(contrasted + 0.03 * noise, GREY8)
    torch.testing.assert_close(augment(x, GREY8, "weak", generator(5)), expected, rtol=1e-4, atol=1e-4)


def test_weak_grey_28_has_no_noise():
    x = torch.zeros(16, 1, 28, 28, dtype=torch.uint8)
    out = augment(x, GREY28, "weak", generator())
    torch.testing.assert_close(out, normalise(x, GREY28))


@pytest.mark.parametrize(
    ("height", "width", "border"), [(32, 32, 4), (64, 64, 4), (16, 16, 2), (8, 8, 1), (20, 33, 2), (33, 20, 2)]
)
def test_weak_colour_equals_pad_crop_flip(height, width, border):
    spec = dataclasses.replace(COLOUR32, shape=(3, height, width))
    x = pictures(spec)
    corner, mirrored = T.draw_crop(len(x), min(height, width), generator(4))
    out = augment(x, spec, "weak", generator(4))
    for row, ((top, left), mirror) in enumerate(zip(corner.tolist(), mirrored.tolist(), strict=True)):
        expected = TF.crop(TF.pad(unit(x, spec)[row], [border] * 4), top, left, height, width)
        expected = TF.hflip(expected) if mirror else expected
        torch.testing.assert_close(out[row], standard(expected, spec), rtol=1e-5, atol=1e-5)


def test_crops_are_drawn_evenly():
    corner, mirrored = T.draw_crop(20_000, 32, generator())
    counts = torch.bincount(corner[:, 0] * 9 + corner[:, 1], minlength=81)
    assert len(counts) == 81
    # 247 expected in each of 81 places; 6 standard deviations.
    assert (counts - 20_000 / 81).abs().max() < 6 * (20_000 / 81) ** 0.5
    assert mirrored.float().mean() == pytest.approx(0.5, abs=0.02)


# --- strong --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_resized_crop_equals_torchvision(spec):
    x = unit(pictures(spec), spec)
    boxes = T.draw_resized_crop(len(x), spec.sides, generator(6))
    mirrored = torch.rand(len(x), generator=generator(1)) < 0.5
    out = T.transform_resized_crop(x, boxes, mirrored)
    for row, (top, left, height, width) in enumerate(boxes.tolist()):
        expected = TF.resized_crop(x[row], top, left, height, width, [*spec.sides], antialias=True)
        expected = TF.hflip(expected) if mirrored[row] else expected
        torch.testing.assert_close(out[row], expected, rtol=1e-4, atol=1e-4)


def test_resized_crops_are_distributed_as_torchvisions():
    from torchvision.transforms import RandomResizedCrop

    boxes = T.draw_resized_crop(4000, (32, 32), generator()).float()
    image = torch.zeros(1, 32, 32)
    state = torch.get_rng_state()
    try:
        torch.manual_seed(0)
        theirs = torch.tensor(
            [RandomResizedCrop.get_params(image, [0.2, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)]
        ).float()
    finally:
        torch.set_rng_state(state)
    for column in range(4):
        quantiles = torch.linspace(0.05, 0.95, 10)
        difference = boxes[:, column].quantile(quantiles) - theirs[:, column].quantile(quantiles)
        assert difference.abs().max() <= 1, column
    top, left, height, width = boxes.unbind(1)
    assert ((top >= 0) & (left >= 0) & (top + height <= 32) & (left + width <= 32)).all()
    assert (height * width / 1024).min() > 0.17  # 0.2, less the rounding of both sides


ADJUSTMENTS = {
    "brightness": (T.adjust_brightness, TF.adjust_brightness),
    "contrast": (T.adjust_contrast, TF.adjust_contrast),
    "saturation": (T.adjust_saturation, TF.adjust_saturation),
    "hue": (T.adjust_hue, TF.adjust_hue),
}


@pytest.mark.parametrize("name", ADJUSTMENTS)
@pytest.mark.parametrize("spec", [GREY28, COLOUR32])
def test_adjustments_equal_torchvision(name, spec):
    ours, theirs = ADJUSTMENTS[name]
    x = unit(pictures(spec), spec)
    x[0] = 0.0
    x[1] = 1.0
    x[2] = 0.4
    x[3] = x[3].round()  # pure colours: ties between channels
    factor = torch.rand(len(x), generator=generator(9)) * 0.8 + (0.6 if name != "hue" else -0.4)
    out = ours(x, factor)
    for row in range(len(x)):
        torch.testing.assert_close(out[row], theirs(x[row], factor[row].item()), rtol=1e-4, atol=2e-5)


def test_grey_equals_torchvision():
    x = unit(pictures(COLOUR32), COLOUR32)
    torch.testing.assert_close(T.to_grey(x), TF.rgb_to_grayscale(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_strong_step_by_step(spec):
    x = pictures(spec)
    g = generator(11)
    boxes = T.draw_resized_crop(len(x), spec.sides, g)
    mirrored = torch.rand(len(x), generator=g) < 0.5
    factors, order, jittered, greyed = T.draw_jitter(len(x), g)
    functions = [theirs for _, theirs in ADJUSTMENTS.values()]
    out = augment(x, spec, "strong", generator(11))
    for row, (top, left, height, width) in enumerate(boxes.tolist()):
        image = TF.resized_crop(unit(x, spec)[row], top, left, height, width, [*spec.sides], antialias=True)
        image = TF.hflip(image) if mirrored[row] else image
        if jittered[row]:
            for step in order[row].tolist():
                image = functions[step](image, factors[row, step].item())
        if greyed[row] and spec.shape[0] == 3:
            image = TF.rgb_to_grayscale(image, 3)
        torch.testing.assert_close(out[row], standard(image, spec), rtol=2e-3, atol=2e-3)


def test_jitter_is_drawn_as_published():
    factors, order, jittered, greyed = T.draw_jitter(20_000, generator())
    for column, (low, high) in enumerate([(0.6, 1.4)] * 3 + [(-0.1, 0.1)]):
        assert low <= factors[:, column].min() < low + 0.01
        assert high >= factors[:, column].max() > high - 0.01
    assert jittered.float().mean() == pytest.approx(0.8, abs=0.015)
    assert greyed.float().mean() == pytest.approx(0.2, abs=0.015)
    assert torch.equal(order.sort(1).values, torch.arange(4).expand(20_000, 4))
    kinds = torch.unique(order, dim=0, return_counts=True)[1]
    assert len(kinds) == 24
    assert (kinds - 20_000 / 24).abs().max() < 6 * (20_000 / 24) ** 0.5


def test_jitter_leaves_its_input_alone():
    x = unit(pictures(COLOUR32), COLOUR32)
    before = x.clone()
    T.transform_jitter(x, *T.draw_jitter(len(x), generator()))
    assert torch.equal(x, before)
