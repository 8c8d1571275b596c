"""Matrix products by oneDNN equal PyTorch's own, and so do their first and second derivatives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedapp import process
from fedapp.core import products
from fedapp.core.products import Linear, matmul
from fedapp.models import build_model

pytestmark = pytest.mark.filterwarnings("error")


class Way:
    """Which products are taken, and how often oneDNN's was."""

    def __init__(self, onednn: bool) -> None:
        self.onednn, self.calls = onednn, 0


@pytest.fixture(params=[True, False], ids=["onednn", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    """Take one way for products of every size, whatever this processor has."""
    if request.param and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this PyTorch has no oneDNN")
    way, original = Way(request.param), products._onednn

    def counted(*args: Any) -> Tensor:
        way.calls += 1
        return original(*args)

    monkeypatch.setattr(products, "WORTH", 1)
    monkeypatch.setattr(products, "WORTH_A_COPY", 1)
    monkeypatch.setattr(products, "onednn_is_faster", lambda: request.param)
    monkeypatch.setattr(products, "_onednn", counted)
    return way


def close(a: Tensor, exact: Tensor) -> bool:
    """Whether float32 numbers are right to its rounding, seen beside the largest of them."""
    return bool((a.double() - exact).abs().max() <= 1e-5 * exact.abs().max())


@pytest.mark.parametrize(("n", "k", "m"), [(1, 1, 1), (3, 7, 5), (10, 1600, 512), (100, 100, 4096), (2, 300, 1)])
def test_a_product_equals_one_in_float64(path: Way, n: int, k: int, m: int) -> None:
    generator = torch.Generator().manual_seed(n + k + m)
    a, b = torch.randn(n, k, generator=generator), torch.randn(k, m, generator=generator)
    exact = a.double() @ b.double()
    assert close(matmul(a, b), exact)
    out = torch.full((n, m), torch.nan)
    assert matmul(a, b, out=out) is out and close(out, exact)
    # Views are read where they lie.
    assert close(matmul(b.t(), a.t()), exact.t())
    wide = torch.randn(n, 2 * k, generator=generator)
    assert close(matmul(wide[:, ::2], b), wide[:, ::2].double() @ b.double())
    tall = torch.randn(2 * k, m, generator=generator).t()
    assert close(matmul(a, tall[:, ::2].t()), a.double() @ tall[:, ::2].t().double())
    assert matmul(a.double(), b.double()).dtype == torch.float64
    assert (path.calls > 0) == (path.onednn and min(n, m) > 1)


def test_products_of_nothing(path: Way) -> None:
    assert matmul(torch.zeros(0, 3), torch.zeros(3, 2)).shape == (0, 2)
    assert torch.equal(matmul(torch.zeros(2, 0), torch.zeros(0, 3)), torch.zeros(2, 3))


def _twins(bias: bool) -> tuple[Linear, nn.Linear]:
    torch.manual_seed(0)
    ours = Linear(37, 11, bias=bias)
    exact = nn.Linear(37, 11, bias=bias).double()
    exact.load_state_dict(ours.state_dict())
    return ours, exact


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_and_its_gradients_equal_those_in_float64(path: Way, bias: bool) -> None:
    ours, exact = _twins(bias)
    x = torch.randn(6, 37, requires_grad=True)
    x64 = x.detach().double().requires_grad_()
    for layer, entered in ((ours, x), (exact, x64)):
        layer(entered).pow(2).sum().backward()
    assert close(ours(x), exact(x64))
    assert x.grad is not None and x64.grad is not None and close(x.grad, x64.grad)
    for mine, right in zip(ours.parameters(), exact.parameters(), strict=True):
        assert mine.grad is not None and right.grad is not None and close(mine.grad, right.grad)
        assert mine.grad.is_contiguous()
    assert path.calls == (4 if path.onednn else 0), "forward, two gradients, forward"


def test_second_derivatives(path: Way) -> None:
    ours, exact = _twins(True)
    x = torch.randn(6, 37)
    found = []
    for layer, entered in ((ours, x), (exact, x.double())):
        (first,) = torch.autograd.grad(layer(entered).pow(3).sum(), [layer.weight], create_graph=True)
        found.append(torch.autograd.grad(first.pow(2).sum(), [layer.weight])[0])
    assert close(found[0], found[1])
    assert (path.calls > 2) == path.onednn


def test_frozen_parts_get_no_gradient(path: Way) -> None:
    ours, _ = _twins(True)
    ours.weight.requires_grad_(False)
    ours(torch.randn(4, 37)).sum().backward()
    assert ours.weight.grad is None and ours.bias.grad is not None
    with torch.inference_mode():
        assert ours(torch.randn(4, 37)).shape == (4, 11)


def test_under_autocast_and_for_other_types_it_is_pytorchs_own_layer(path: Way) -> None:
    ours, exact = _twins(True)
    plain = nn.Linear(37, 11)
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(6, 37)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(x).dtype == torch.bfloat16 and torch.equal(ours(x), plain(x))
    assert torch.equal(copy.deepcopy(ours).double()(x.double()), exact(x.double()))
    assert ours(torch.randn(2, 3, 37)).shape == (2, 3, 11)
    assert path.calls == 0


def test_onednn_gets_matrices_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no kernel for others, and falls back to loops that take a thousand times as long."""
    seen: list[Tensor] = []

    class Recorded:
        _linear_pointwise = staticmethod(lambda a, b, bias, *_: (seen.extend([a, b]), a @ b.t())[1])

    monkeypatch.setattr(torch.ops, "mkldnn", Recorded)
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    theta = torch.randn(100, 20_000)
    blocks = [theta[:, i : i + 5000] for i in range(0, 20_000, 5000)]
    for block in blocks:
        assert close(matmul(torch.eye(100), block), block.double())
    assert len(seen) == 8 and all(m.is_contiguous() or m.t().is_contiguous() for m in seen)
    few = torch.randn(20, 100)  # the copy would cost more than it saves
    assert torch.equal(matmul(few, blocks[0]), few @ blocks[0]) and len(seen) == 8


def test_small_products_are_pytorchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "_onednn", lambda *_: pytest.fail("too small for it"))
    a, b = torch.randn(10, 512), torch.randn(512, 10)
    assert torch.equal(matmul(a, b), a @ b)


@pytest.mark.parametrize(
    ("vendor", "capability", "faster"),
    [("AuthenticAMD", "AVX512", True), ("AuthenticAMD", "AVX2", False), ("GenuineIntel", "AVX512", False)],
)
def test_which_processors_gain(vendor: str, capability: str, faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """MKL uses all that Intel's processors have."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(process, "cpu_facts", dict)
    assert not products.onednn_is_faster.__wrapped__(), "outside Linux"
    monkeypatch.setattr(process, "cpu_facts", lambda: {"processor": "0", "vendor_id": vendor})
    assert products.onednn_is_faster.__wrapped__() == faster


def test_a_model_trains_to_the_same_parameters_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    ends, used = [], []
    original = products._onednn
    monkeypatch.setattr(products, "_onednn", lambda *args: (used.append(fast), original(*args))[1])
    for fast in (True, False):
        monkeypatch.setattr(products, "onednn_is_faster", lambda fast=fast: fast)
        model = build_model("cnn", num_classes=10, shape=(3, 32, 32), seed=0)
        start = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(1)
        for _ in range(5):
            x, y = torch.randn(10, 3, 32, 32, generator=generator), torch.arange(10)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]) - start)
    assert used == [True] * 15
    assert (ends[0] - ends[1]).norm() < 1e-4 * ends[1].norm()
