"""Normalisation and variations of series, table rows and other arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fedapp.data import variations
from fedapp.data.transforms import InputSpec, augment, channels_first, normalise

SERIES = InputSpec((3, 40), 1.0, (1.0, -2.0, 0.5), (2.0, 0.5, 1.0), "series")
TABLE = InputSpec((10,), 1.0, (0.0,) * 10, (1.0,) * 10, "table", (False,) * 8 + (True, True))
ARRAY = InputSpec((2, 3, 4), 1.0, (0.0, 1.0), (1.0, 2.0), "array")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(spec: InputSpec, count: int = 200) -> Tensor:
    return torch.randn(count, *spec.shape, generator=generator(7))


@pytest.mark.parametrize("spec", [SERIES, TABLE, ARRAY])
def test_normalisation_is_along_the_first_axis(spec: InputSpec) -> None:
    x = draw(spec)
    size = (1, -1, *(1,) * (len(spec.shape) - 1))
    expected = (x.numpy() - np.reshape(spec.mean, size)) / np.reshape(spec.std, size)
    np.testing.assert_allclose(normalise(x, spec).numpy(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(augment(x, spec, "none", generator()), normalise(x, spec))


def test_an_unknown_value_becomes_the_mean() -> None:
    spec = InputSpec((2,), 1.0, (5.0, 7.0), (2.0, 2.0), "table")
    x = torch.tensor([[float("nan"), 9.0]])
    assert normalise(x, spec).tolist() == [[0.0, 1.0]]
    assert torch.isnan(x[0, 0]), "the data stay as they are"


def test_only_bytes_are_images() -> None:
    assert channels_first(torch.zeros(5, 4, 6, 3, dtype=torch.uint8)).shape == (5, 3, 4, 6)
    assert channels_first(torch.zeros(5, 4, 6, 3)).shape == (5, 4, 6, 3)


@pytest.mark.parametrize("kind", ["weak", "strong"])
@pytest.mark.parametrize("spec", [SERIES, TABLE, ARRAY])
def test_draws_depend_on_the_generator_alone_and_differ_between_samples(spec: InputSpec, kind: str) -> None:
    x = draw(spec, 50)[:1].expand(50, *spec.shape).contiguous() if spec.kind != "table" else draw(spec, 50)
    kept = x.clone()
    torch.manual_seed(1)
    first = augment(x, spec, kind, generator(3))
    torch.manual_seed(2)
    again, other = augment(x, spec, kind, generator(3)), augment(x, spec, kind, generator(4))
    assert torch.equal(first, again) and not torch.equal(first, other) and torch.equal(x, kept)
    assert first.shape == x.shape and first.dtype == torch.float32 and torch.isfinite(first).all()
    moved = (first - normalise(x, spec)).flatten(1)
    assert not torch.equal(moved[0], moved[1])


def test_weak_series_have_noise_and_one_factor_per_channel() -> None:
    x = torch.full((4000, 2, 50), 3.0)
    out = variations.vary(x, "series", False, (), generator())
    factors = out.mean(2) / 3
    assert abs(float(factors.std()) - 0.1) < 0.004 and abs(float(factors.mean()) - 1) < 0.004
    within = out - out.mean(2, keepdim=True)
    assert abs(float(within.std()) - 0.05) < 0.001
    assert abs(float(torch.corrcoef(factors.T)[0, 1])) < 0.05, "channels are scaled by themselves"


def test_times_increase_from_the_first_step_to_the_last() -> None:
    times = variations.draw_times(500, 40, generator())
    assert torch.all(times[:, 1:] > times[:, :-1])
    torch.testing.assert_close(times[:, 0], torch.zeros(500))
    torch.testing.assert_close(times[:, -1], torch.full((500,), 39.0))
    away = (times - torch.arange(40.0)).abs().amax(1)
    assert 0.5 < float(away.mean()) < 5 and float(away.std()) > 0.2
    assert variations.draw_times(3, 1, generator()).tolist() == [[0.0]] * 3


def test_a_warped_line_runs_through_the_drawn_times() -> None:
    """A line has the time as its value, in every channel; a curve is read between its two neighbours."""
    x = torch.stack([torch.arange(40.0), -2 * torch.arange(40.0)]).expand(20, 2, 40)
    out = variations.warp_time(x, generator(5))
    times = variations.draw_times(20, 40, generator(5))
    torch.testing.assert_close(out[:, 0], times, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(out[:, 1], -2 * times, rtol=1e-5, atol=1e-4)
    curve = torch.randn(20, 1, 40, generator=generator(1))
    expected = [np.interp(t, np.arange(40), c) for t, c in zip(times.numpy(), curve[:, 0].numpy(), strict=True)]
    np.testing.assert_allclose(variations.warp_time(curve, generator(5))[:, 0].numpy(), expected, atol=1e-4)


@pytest.mark.parametrize(("steps", "length"), [(40, 4), (128, 13), (5, 1)])
def test_one_stretch_is_hidden_in_all_channels(steps: int, length: int) -> None:
    out = variations.hide_stretch(torch.ones(2000, 3, steps), generator())
    assert torch.equal(out[:, 0], out[:, 2])
    hidden = out[:, 0] == 0
    assert torch.all(hidden.sum(1) == length)
    edges = (hidden[:, 1:] != hidden[:, :-1]).sum(1)
    assert int(edges.max()) <= 2, "it is one piece"
    starts = hidden.float().argmax(1)
    assert int(starts.min()) == 0 and int(starts.max()) == steps - length


def test_weak_tables_leave_features_of_two_values_alone() -> None:
    x = draw(TABLE, 2000)
    moved = variations.vary(x, "table", False, TABLE.binary, generator()) - x
    assert torch.count_nonzero(moved[:, 8:]) == 0
    assert abs(float(moved[:, :8].std()) - 0.05) < 0.001


def test_strong_tables_take_values_of_other_rows() -> None:
    x = torch.arange(60.0)[:, None] + 1000 * torch.arange(20.0)
    out = variations.swap_features(x, generator())
    assert torch.all((out // 1000 == torch.arange(20.0)) & (out % 1000 < 60)), "of the same feature"
    changed = (out != x).float().mean(1)
    assert float(changed.max()) < 0.301 and 0.2 < float(changed.mean()) < 0.26
    assert (out != x).any(0).all(), "every feature is swapped in some row"
    assert torch.count_nonzero(variations.swap_features(torch.tensor([[1.0], [2.0]]), generator(1)) == 0) == 0
