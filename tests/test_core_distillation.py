"""Divergences against their definition, and against worked numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedapp.core.distillation import divergence, divergence_to, soften

Z_L = torch.tensor([[2, 0.5, -1], [0.3, 0.2, 0.1]])
Z_M = torch.tensor([[1.0, 1, 0], [-0.5, 0.8, 0.4]])


def slow(p: np.ndarray, q: np.ndarray) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p.flat, q.flat, strict=True) if a > 0) / len(p)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 10.0])
def test_divergence_is_its_definition(temperature: float) -> None:
    generator = torch.Generator().manual_seed(1)
    teacher, student = (torch.randn(6, 4, generator=generator, dtype=torch.float64) * 3 for _ in range(2))
    p, q = (F.softmax(z / temperature, dim=1).numpy() for z in (teacher, student))
    logits = (teacher / temperature, student / temperature)
    assert float(divergence(*logits)) == pytest.approx(slow(p, q), rel=1e-10)
    assert float(divergence(*logits, "mean")) == pytest.approx(slow(p, q) / 4, rel=1e-10)
    assert float(divergence_to(torch.from_numpy(p), student, temperature)) == pytest.approx(slow(p, q), rel=1e-10)
    assert np.allclose(soften(student, temperature).numpy(), q)


def test_the_temperature_is_one_unless_it_is_given() -> None:
    assert torch.equal(soften(Z_L), soften(Z_L, 1.0))
    assert torch.equal(divergence_to(soften(Z_M), Z_L), divergence_to(soften(Z_M), Z_L, 1.0))


def test_worked_numbers() -> None:
    assert float(divergence(Z_M, Z_L)) == pytest.approx(0.230708, abs=1e-6)
    assert float(divergence(Z_L, Z_M)) == pytest.approx(0.222976, abs=1e-6)


def test_zero_where_equal_and_with_hard_targets_the_cross_entropy() -> None:
    assert float(divergence(Z_L, Z_L.clone())) == pytest.approx(0.0, abs=1e-7)
    hard = F.one_hot(torch.tensor([0, 2]), 3).float()
    assert float(divergence_to(hard, Z_L)) == pytest.approx(float(F.cross_entropy(Z_L, torch.tensor([0, 2]))), rel=1e-6)


def test_only_the_student_gets_a_gradient_and_it_is_p_minus_target() -> None:
    teacher, student = Z_M.clone().requires_grad_(), Z_L.clone().requires_grad_()
    divergence(teacher, student).backward()
    assert teacher.grad is None
    expected = (F.softmax(Z_L, dim=1) - F.softmax(Z_M, dim=1)) / 2
    torch.testing.assert_close(student.grad, expected)


def test_half_precision_is_widened() -> None:
    assert divergence(Z_M.half(), Z_L.half()).dtype == torch.float32
    assert soften(Z_M.bfloat16()).dtype == torch.float32
