"""Contrastive and proximal losses: worked numbers with gradients, double-loop oracles, edge cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedapp.core.contrastive import l2_distance, moon_contrast, mse_half, squared_distance, supcon

VIEW_1 = [[1, 0], [0, 1], [0.8, 0.6]]
VIEW_2 = [[0.6, 0.8], [-0.6, 0.8], [1, 0]]
LABELS = torch.tensor([0, 1, 0])
CODE = {"temperature": 100.0, "base_temperature": 0.07, "normalise": False}


def worked_features() -> Tensor:
    return torch.tensor(VIEW_1 + VIEW_2, dtype=torch.float64, requires_grad=True)


def supcon_loops(features: Tensor, labels: list[int], temperature: float, base: float, normalise: bool) -> list[float]:
    """The loss per anchor, by plain Python loops over plain floats."""
    rows = features.detach().tolist()
    if normalise:
        rows = [[v / math.sqrt(sum(u * u for u in row)) for v in row] for row in rows]
    losses = []
    for i, anchor in enumerate(rows):
        dots = {a: sum(u * v for u, v in zip(anchor, other)) / temperature for a, other in enumerate(rows) if a != i}
        top = max(dots.values())
        log_sum = top + math.log(sum(math.exp(dot - top) for dot in dots.values()))
        positives = [a for a in dots if labels[a] == labels[i]]
        mean = sum(dots[p] - log_sum for p in positives) / len(positives) if positives else 0.0
        losses.append(-temperature / base * mean)
    return losses


@pytest.mark.parametrize(
    ("temperature", "base", "normalise", "anchors", "loss"),
    [
        (
            100,
            0.07,
            False,
            [2292.935733, 2294.063757, 2296.043167, 2298.172167, 2287.446106, 2292.935733],
            2293.599444,
        ),
        (100, 100, False, [1.605055, 1.605845, 1.607230, 1.608721, 1.601212, 1.605055], 1.605520),
        (0.07, 0.07, True, [2.916102, 0.721469, 1.713806, 3.536029, 0.000605, 2.916102], 1.967352),
        (0.1, 0.1, True, [2.142971, 0.758938, 1.425169, 2.629251, 0.005837, 2.142971], 1.517523),
    ],
)
def test_supcon_worked_numbers(
    temperature: float, base: float, normalise: bool, anchors: list[float], loss: float
) -> None:
    features = worked_features()
    assert supcon(features, LABELS, temperature, base, normalise).item() == pytest.approx(loss, abs=6e-7)
    loops = supcon_loops(features, [0, 1, 0, 0, 1, 0], temperature, base, normalise)
    np.testing.assert_allclose(loops, anchors, atol=6e-7)


def test_supcon_worked_gradient() -> None:
    features = worked_features()
    supcon(features, LABELS, **CODE).backward()
    np.testing.assert_allclose(
        features.grad,
        [
            [-2.081905, 0.818203],
            [5.514741, -1.707455],
            [-2.212877, 1.207076],
            [-2.344770, 1.337354],
            [3.220996, -2.472526],
            [-2.081905, 0.818203],
        ],
        atol=6e-7,
    )


def test_supcon_other_worked_values() -> None:
    assert supcon(worked_features(), torch.tensor([0, 1, 2]), **CODE).item() == pytest.approx(2294.488332, abs=1e-6)
    same = torch.ones(8, 2, dtype=torch.float64)
    expected = 100 / 0.07 * math.log(7)
    assert expected == pytest.approx(2779.871642, abs=6e-7)
    assert supcon(same, torch.zeros(4, dtype=torch.int64), **CODE).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_supcon_against_loops_and_numerical_gradient(seed: int, normalise: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(14, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(3, (7,), generator=generator)
    loops = supcon_loops(features, labels.tolist() * 2, 0.4, 0.1, normalise)
    loss = supcon(features, labels, 0.4, 0.1, normalise)
    assert loss.item() == pytest.approx(sum(loops) / 14, rel=1e-12)
    assert torch.autograd.gradcheck(lambda f: supcon(f, labels, 0.4, 0.1, normalise), (features,))


def test_supcon_labels_of_one_view_or_of_every_row() -> None:
    both = supcon(worked_features(), torch.cat([LABELS, LABELS]), **CODE)
    assert torch.equal(both, supcon(worked_features(), LABELS, **CODE))


def test_supcon_anchor_without_positive_adds_nothing() -> None:
    features = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = [0, 0, 1, 2, 2]
    loops = supcon_loops(features, labels, 0.5, 0.5, True)
    assert loops[2] == 0.0
    assert supcon(features, torch.tensor(labels), 0.5, 0.5).item() == pytest.approx(sum(loops) / 5, rel=1e-12)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 300.0])
@pytest.mark.parametrize("normalise", [True, False])
def test_supcon_batch_of_one_is_exactly_zero(scale: float, normalise: bool) -> None:
    features = (scale * torch.tensor([[1.0, 2.0, -3.0], [0.5, 0.1, 2.0]])).requires_grad_()
    loss = supcon(features, torch.tensor([4]), 100.0, 0.07, normalise)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.count_nonzero(features.grad) == 0


def test_supcon_large_features_neither_overflow_nor_underflow() -> None:
    # Similarities of order 1e6: an unshifted exponential overflows, and one shifted by the anchor's similarity to
    # itself (the largest by far here) leaves only zeros under the logarithm.
    features = torch.tensor([[3000.0, 0.0], [0.0, 1.0], [0.0, 2.0], [1.0, 1.0]], requires_grad=True)
    loss = supcon(features, torch.tensor([0, 1]), 0.07, 0.07, normalise=False)
    loss.backward()
    expected = supcon_loops(features.detach().double(), [0, 1, 0, 1], 0.07, 0.07, False)
    assert loss.item() == pytest.approx(sum(expected) / 4, rel=1e-5)
    assert torch.isfinite(features.grad).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_supcon_is_computed_in_float32_also_under_autocast(dtype: torch.dtype) -> None:
    features = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    labels = torch.arange(16) % 3
    expected = supcon(features.float(), labels, **CODE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = supcon(features, labels, **CODE)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, expected)


def test_supcon_with_unit_rows_ignores_their_length() -> None:
    features = torch.randn(8, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    lengths = torch.tensor([0.1, 5, 2, 7, 1, 3, 9, 0.5], dtype=torch.float64)[:, None]
    labels = torch.tensor([0, 0, 1, 1])
    assert supcon(features * lengths, labels).item() == pytest.approx(supcon(features, labels).item(), rel=1e-12)


def test_moon_worked_number() -> None:
    z, z_g, z_p = (torch.tensor([v], dtype=torch.float64) for v in ([1, 2, 2], [2, 1, 2], [-1, 0, 1]))
    assert moon_contrast(z, z_g, z_p, 0.5).item() == pytest.approx(0.239647, abs=6e-7)


def test_moon_against_the_formula() -> None:
    generator = torch.Generator().manual_seed(5)
    z, z_g, z_p = (torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    losses = []
    for a, b, c in zip(z, z_g, z_p):
        near = math.exp(float(a @ b / (a.norm() * b.norm())) / 0.3)
        far = math.exp(float(a @ c / (a.norm() * c.norm())) / 0.3)
        losses.append(-math.log(near / (near + far)))
    assert moon_contrast(z, z_g, z_p, 0.3).item() == pytest.approx(sum(losses) / 6, rel=1e-12)
    z.requires_grad_()
    assert torch.autograd.gradcheck(lambda t: moon_contrast(t, z_g, z_p, 0.3), (z,))


def test_moon_equal_references_give_log_two_and_no_gradient() -> None:
    generator = torch.Generator().manual_seed(6)
    z = torch.randn(6, 4, generator=generator, requires_grad=True)
    other = torch.randn(6, 4, generator=generator, requires_grad=True)
    loss = moon_contrast(z, other, other, 0.5)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2), rel=1e-6)
    assert torch.count_nonzero(z.grad) == 0
    assert other.grad is None


def test_moon_small_temperature_stays_finite() -> None:
    z = torch.tensor([[1.0, 0.0]], requires_grad=True)
    loss = moon_contrast(z, torch.tensor([[-1.0, 0.1]]), torch.tensor([[1.0, 0.1]]), 1e-3)
    loss.backward()
    assert loss.item() == pytest.approx(2 / math.sqrt(1.01) / 1e-3, rel=1e-5)
    assert torch.isfinite(z.grad).all()


def head() -> tuple[list[Tensor], list[Tensor]]:
    now = [[[0.5, -0.2], [-0.3, 0.8], [0.1, 0.1]], [0.0, 0.1, -0.1]]
    received = [[[0.4, -0.1], [-0.2, 0.7], [0.0, 0.2]], [0.05, 0.05, -0.05]]
    params = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in now]
    return params, [torch.tensor(v, dtype=torch.float64) for v in received]


def test_l2_distance_worked_numbers() -> None:
    params, refs = head()
    distance = l2_distance(params, refs)
    assert distance.item() == pytest.approx(0.259808, abs=6e-7)
    (0.1 * distance).backward()
    s = 0.038490
    np.testing.assert_allclose(params[0].grad, [[s, -s], [-s, s], [s, -s]], atol=6e-7)
    np.testing.assert_allclose(params[1].grad, [-0.019245, 0.019245, -0.019245], atol=6e-7)


def test_squared_and_mean_squared_worked_numbers() -> None:
    params, refs = head()
    assert squared_distance(params, refs).item() == pytest.approx(0.067500, abs=1e-12)
    (0.1 * mse_half(params, refs)).backward()
    assert 0.1 * mse_half(params, refs).item() == pytest.approx(0.000625, abs=1e-12)
    g = 0.001667
    np.testing.assert_allclose(params[0].grad, [[g, -g], [-g, g], [g, -g]], atol=6e-7)
    np.testing.assert_allclose(params[1].grad, [-g, g, -g], atol=6e-7)


def test_fedclassavg_totals() -> None:
    params, refs = head()
    weight, bias = params
    cross_entropy = nn.functional.cross_entropy(
        torch.relu(torch.tensor(VIEW_1, dtype=torch.float64)) @ weight.T + bias, LABELS
    )
    assert cross_entropy.item() == pytest.approx(0.781255, abs=6e-7)
    code = supcon(worked_features(), LABELS, **CODE) + cross_entropy + 0.1 * mse_half(params, refs)
    khosla = supcon(worked_features(), LABELS) + cross_entropy + 0.1 * l2_distance(params, refs)
    assert code.item() == pytest.approx(2294.381324, abs=1e-6)
    assert khosla.item() == pytest.approx(2.774587, abs=1e-6)


def test_fedprox_gradient_worked_numbers() -> None:
    w = torch.tensor([1.2, 0.8], dtype=torch.float64, requires_grad=True)
    loss = 0.5 * w[0] - w[1] + 0.1 / 2 * squared_distance([w], [torch.ones(2, dtype=torch.float64)])
    loss.backward()
    np.testing.assert_allclose(w.grad, [0.52, -1.02], atol=1e-12)
    np.testing.assert_allclose(w.detach() - 0.01 * w.grad, [1.1948, 0.8102], atol=1e-12)


@pytest.mark.parametrize("term", [l2_distance, mse_half, squared_distance])
def test_proximal_terms_at_zero_and_their_references(term) -> None:
    params = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))]
    refs = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))]
    value = term(params, refs)
    value.backward()
    assert value.item() == 0.0
    assert all(torch.count_nonzero(p.grad) == 0 for p in params)
    term([p + 1 for p in params], refs).backward()
    assert all(r.grad is None for r in refs)


def test_proximal_terms_refuse_lists_that_do_not_match() -> None:
    with pytest.raises(ValueError, match="zip"):
        l2_distance([torch.ones(2)], [])
