"""Class-wise aggregation and WDR: worked numbers, naive loops, both orders, limits, invariants."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedapp.core import classwise
from fedapp.core.classwise import (
    Uploads,
    cheaper_order,
    class_globals,
    class_weights,
    mix,
    mixing_matrix,
    norm_distribution,
    wdr,
    weakly_held,
)

N = np.array([100, 60, 40])
COUNTS = np.array([[80, 20, 0], [0, 50, 10], [10, 10, 20]])
EMPIRICAL = COUNTS / COUNTS.sum(axis=1, keepdims=True)
HEADS = np.array([[[3, 4], [0, 2], [0.6, 0.8]], [[0.3, 0.4], [6, 8], [1, 0]], [[1, 0], [0, 1], [1.2, 1.6]]])
BIASES = np.array([[0.5, 0.1, -0.2], [0.0, 0.4, 0.2], [-0.1, 0.3, 0.6]])
THETA = np.hstack([HEADS.reshape(3, -1), BIASES])
SHARES = np.array([norm_distribution(head) for head in HEADS])
MIXED = [
    [2.134366, 2.608257, 1.131748, 2.953575, 0.782354, 0.791639, 0.298784, 0.192222, 0.017989],
    [1.254965, 1.471088, 3.203860, 5.052211, 0.904580, 0.494138, 0.142022, 0.290523, 0.134910],
    [1.731636, 1.872724, 1.364840, 3.037747, 0.887245, 0.879696, 0.190008, 0.233661, 0.152664],
]
TIGHT = {"rtol": 0, "atol": 6e-7}


Models = list[dict[str, np.ndarray]]


def named(theta: np.ndarray) -> Models:
    """Models of one array that are the rows of a matrix."""
    return [{"w": row} for row in theta]


def stacked(models: Models) -> np.ndarray:
    return np.stack([np.concatenate([array.reshape(-1) for array in model.values()]) for model in models])


def naive_mix(theta: np.ndarray, recipients: np.ndarray, n: np.ndarray, p: np.ndarray) -> np.ndarray:
    """Equations 5 to 7 by plain loops over clients, classes and recipients."""
    clients, classes = p.shape
    models = []
    for j in range(classes):
        total = sum(n[i] * p[i, j] for i in range(clients))
        model = np.zeros(theta.shape[1])
        for i in range(clients):
            model += n[i] * p[i, j] / total * theta[i].astype(np.float64)
        models.append(model)
    return np.array([sum(row[j] * models[j] for j in range(classes)) for row in recipients])


def random_case(seed: int, clients: int = 5, classes: int = 4, size: int = 23) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    theta = rng.normal(size=(clients, size))
    shares = rng.dirichlet(np.ones(classes), size=clients)
    return theta, rng.integers(1, 300, size=clients), shares


def test_norm_distribution_worked_numbers() -> None:
    expected = [[0.625, 0.25, 0.125], [0.043478, 0.869565, 0.086957], [0.25, 0.25, 0.5]]
    np.testing.assert_allclose(SHARES, expected, **TIGHT)


def test_class_weights_worked_numbers() -> None:
    expected = [[0.832127, 0.286783, 0.331412], [0.034732, 0.598504, 0.138329], [0.133140, 0.114713, 0.530259]]
    np.testing.assert_allclose(class_weights(N, SHARES), expected, **TIGHT)


def test_mixing_matrix_worked_numbers() -> None:
    expected = [[0.633202, 0.188625, 0.178173], [0.314374, 0.533977, 0.151649], [0.445434, 0.227473, 0.327093]]
    np.testing.assert_allclose(mixing_matrix(SHARES, class_weights(N, SHARES)), expected, **TIGHT)


def test_class_globals_worked_numbers() -> None:
    expected = [
        [2.639942, 3.342402, 0.208394, 2.075253, 0.693777, 0.878726, 0.402750, 0.137048, -0.079595],
        [1.154613, 1.386534, 3.591022, 5.476309, 0.908229, 0.412968, 0.131920, 0.302494, 0.131172],
        [1.565994, 1.380980, 0.829971, 2.299712, 0.973487, 1.113545, 0.112680, 0.247550, 0.279539],
    ]
    models = [{"weight": head, "bias": bias} for head, bias in zip(HEADS, BIASES)]
    np.testing.assert_allclose(stacked(class_globals(models, class_weights(N, SHARES))), expected, **TIGHT)


@pytest.mark.parametrize("order", ["direct", "factored"])
def test_mix_worked_numbers(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classwise, "cheaper_order", lambda recipients, uploads, classes: order)
    models = [{"weight": head, "bias": bias} for head, bias in zip(HEADS, BIASES)]
    np.testing.assert_allclose(stacked(mix(models, SHARES, class_weights(N, SHARES))), MIXED, **TIGHT)


def test_empirical_mode_worked_numbers() -> None:
    weights = class_weights(N, EMPIRICAL)
    expected = [[0.888889, 0.25, 0], [0, 0.625, 0.333333], [0.111111, 0.125, 0.666667]]
    np.testing.assert_allclose(weights, expected, **TIGHT)
    np.testing.assert_allclose(weights, COUNTS / COUNTS.sum(axis=0), **TIGHT)
    mixing = [[0.761111, 0.125, 0.113889], [0.208333, 0.576389, 0.215278], [0.284722, 0.322917, 0.392361]]
    np.testing.assert_allclose(mixing_matrix(EMPIRICAL, weights), mixing, **TIGHT)


def test_partial_participation_worked_numbers() -> None:
    weights = class_weights(N[[0, 2]], SHARES[[0, 2]])
    expected = [[0.862069, 0.714286, 0.384615], [0.137931, 0.285714, 0.615385]]
    np.testing.assert_allclose(weights, expected, **TIGHT)
    recipients = np.vstack([SHARES, np.full(3, 1 / 3)])
    mixing = [[0.765441, 0.234559], [0.692044, 0.307956], [0.586396, 0.413604], [0.653657, 0.346343]]
    np.testing.assert_allclose(mixing_matrix(recipients, weights), mixing, **TIGHT)
    new = [2.307313, 2.614627, 0, 1.653657, 0.807806, 1.077075, 0.292194, 0.169269, 0.077075]
    np.testing.assert_allclose(mix(named(THETA[[0, 2]]), recipients, weights)[3]["w"], new, **TIGHT)


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (2, 5), (7, 2), (12, 3), (6, 20)])
@pytest.mark.parametrize("order", ["direct", "factored"])
def test_against_naive_loops(clients: int, classes: int, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classwise, "cheaper_order", lambda recipients, uploads, classes: order)
    theta, n, shares = random_case(clients, clients, classes)
    recipients = np.random.default_rng(1).dirichlet(np.ones(classes), size=clients + 2)
    expected = naive_mix(theta, recipients, n, shares)
    weights = class_weights(n, shares)
    np.testing.assert_allclose(stacked(mix(named(theta), recipients, weights)), expected, atol=1e-12)
    single = stacked(mix(named(theta.astype(np.float32)), recipients, weights))
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("recipients", "uploads", "classes"), [(20, 20, 100), (9, 3, 2), (2, 30, 1)])
def test_mix_takes_the_cheaper_order(
    recipients: int, uploads: int, classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of multiply-adds of the factors that are handed on is the smaller one."""
    seen: list[int] = []

    def count(factors: list[np.ndarray], models: Models) -> Models:
        seen.append(sum(factor.size for factor in factors))
        return []

    monkeypatch.setattr(classwise, "product", count)
    rng = np.random.default_rng(0)
    theta, n, shares = random_case(0, uploads, classes)
    mix(named(theta), rng.dirichlet(np.ones(classes), size=recipients), class_weights(n, shares))
    assert seen == [min(recipients * uploads, classes * (recipients + uploads))]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    clients=st.integers(1, 7),
    classes=st.integers(1, 7),
    recipients=st.integers(1, 7),
    sparse=st.booleans(),
)
def test_properties(seed: int, clients: int, classes: int, recipients: int, sparse: bool) -> None:
    rng = np.random.default_rng(seed)
    theta, n, shares = random_case(seed, clients, classes)
    if sparse:  # one class a client: some classes have no holder
        shares = np.eye(classes)[rng.integers(classes, size=clients)]
    p = rng.dirichlet(np.ones(classes), size=recipients)
    weights = class_weights(n, shares)
    mixing = mixing_matrix(p, weights)
    assert (weights >= 0).all()
    assert (mixing >= 0).all()
    np.testing.assert_allclose(weights.sum(axis=0), 1, atol=1e-12)
    np.testing.assert_allclose(mixing.sum(axis=1), 1, atol=1e-12)
    direct = stacked(mix(named(theta), p, weights))
    # Every personalised parameter lies between the smallest and the largest uploaded one.
    assert (direct >= theta.min(axis=0) - 1e-12).all()
    assert (direct <= theta.max(axis=0) + 1e-12).all()
    # The order of the clients does not matter, nor does the unit in which samples are counted.
    order = rng.permutation(clients)
    shuffled = stacked(mix(named(theta[order]), p, class_weights(7 * n[order], shares[order])))
    np.testing.assert_allclose(shuffled, direct, atol=1e-12)
    # Renaming the classes does not matter either.
    renamed = rng.permutation(classes)
    np.testing.assert_allclose(mixing_matrix(p[:, renamed], class_weights(n, shares[:, renamed])), mixing, atol=1e-12)


def test_equal_distributions_give_fedavg() -> None:
    theta, n, _ = random_case(5)
    even = np.full((5, 4), 1 / 4)
    weights = class_weights(n, even)
    np.testing.assert_allclose(weights, np.tile(n[:, None] / n.sum(), 4), atol=1e-12)
    fedavg = n @ theta / n.sum()
    np.testing.assert_allclose(stacked(class_globals(named(theta), weights)), np.tile(fedavg, (4, 1)), atol=1e-12)
    np.testing.assert_allclose(stacked(mix(named(theta), even, weights)), np.tile(fedavg, (5, 1)), atol=1e-12)


@pytest.mark.parametrize("clients", [3, 8, 9, 40])
def test_uploads_that_are_merged_on_the_way_give_the_same_global_models(clients: int) -> None:
    theta, n, shares = random_case(17, clients)
    uploads = Uploads(4)
    for row, samples, share in zip(theta, n, shares):
        uploads.add({"w": row}, float(samples), share)
        assert len(uploads.models) <= 8
    found = class_globals(uploads.models, class_weights(uploads.n, uploads.p))
    wanted = naive_mix(theta, np.eye(4), n, shares)
    np.testing.assert_allclose([model["w"] for model in found], wanted, atol=1e-12)
    assert uploads.n.sum() == pytest.approx(n.sum(), rel=1e-12)


def test_one_class_gives_fedavg() -> None:
    theta, n, _ = random_case(6)
    mixed = stacked(mix(named(theta), np.ones((2, 1)), class_weights(n, np.ones((5, 1)))))
    np.testing.assert_allclose(mixed, np.tile(n @ theta / n.sum(), (2, 1)), atol=1e-12)


def test_one_class_a_client_gives_one_average_a_class() -> None:
    held = np.array([0, 2, 0, 2, 0])
    n = np.array([10, 20, 30, 60, 40])
    shares = np.eye(3)[held]
    same = held[:, None] == held[None, :]
    expected = same * n / (same * n).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(mixing_matrix(shares, class_weights(n, shares)), expected, atol=1e-12)


def test_a_class_that_nobody_holds_is_the_fedavg_mean() -> None:
    n = np.array([10, 30])
    weights = class_weights(n, np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]))
    np.testing.assert_allclose(weights, [[1, 0.25, 0], [0, 0.75, 1]], atol=1e-12)
    np.testing.assert_array_equal(weakly_held(n, np.array([[1.0, 0, 0], [0, 0, 1.0]]), 0.5), [False, True, False])
    assert not weakly_held(n, np.array([[1.0, 0, 0], [0, 0, 1.0]]), 0.0).any()


def test_a_client_without_samples_has_no_weight() -> None:
    weights = class_weights(np.array([0, 5]), np.array([[0.5, 0.5], [0.9, 0.1]]))
    np.testing.assert_array_equal(weights, [[0, 0], [1, 1]])


def test_cheaper_order() -> None:
    assert cheaper_order(20, 20, 100) == "direct"
    assert cheaper_order(100, 100, 10) == "factored"
    assert cheaper_order(199, 199, 100) == "direct"
    assert cheaper_order(200, 200, 100) == "factored"
    assert cheaper_order(100, 10, 10) == "direct"


def test_refusals() -> None:
    with pytest.raises(ValueError, match="finite"):
        norm_distribution(np.array([[1.0, np.nan], [1.0, 1.0]]))
    with pytest.raises(ValueError, match="all rows"):
        norm_distribution(np.zeros((3, 2)))
    with pytest.raises(ValueError, match=r"row 1 of the class distributions sums to 0\.5"):
        class_weights(N[:2], np.array([[1.0, 0.0], [0.5, 0.0]]))
    with pytest.raises(ValueError, match="not negative"):
        class_weights(N[:1], np.array([[1.5, -0.5]]))
    with pytest.raises(ValueError, match="3 sample counts"):
        class_weights(N[:2], SHARES)
    for n in ([0, 0, 0], [1, -1, 1], [1, np.nan, 1]):
        with pytest.raises(ValueError, match="sample counts"):
            class_weights(np.array(n), SHARES)
    with pytest.raises(ValueError, match="transposed class weights sums to 2"):
        class_globals(named(THETA), 2 * class_weights(N, SHARES))
    with pytest.raises(ValueError, match=r"recipients' distributions must be a matrix, got shape \(3,\)"):
        mixing_matrix(SHARES[0], class_weights(N, SHARES))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wdr_worked_numbers(dtype: torch.dtype) -> None:
    values = [wdr(torch.tensor(h, dtype=dtype), torch.tensor(p, dtype=dtype)).item() for h, p in zip(HEADS, EMPIRICAL)]
    np.testing.assert_allclose(values, [0.220794, 0.097759, 0.0], atol=1e-6)


def test_wdr_gradient_and_step_worked_numbers() -> None:
    weight = torch.tensor(HEADS[0], requires_grad=True)
    p = torch.tensor(EMPIRICAL[0], requires_grad=True)
    wdr(weight, p).backward()
    assert p.grad is None
    p = p.detach()
    expected = [[-0.031845, -0.042460], [0, 0.074306], [0.070060, 0.093413]]
    np.testing.assert_allclose(weight.grad, expected, **TIGHT)
    stepped = weight.detach() - 0.005 * 10 * weight.grad
    np.testing.assert_allclose(stepped, [[3.001592, 4.002123], [0, 1.996285], [0.596497, 0.795329]], **TIGHT)
    assert wdr(stepped, p).item() == pytest.approx(0.219694, abs=6e-7)


def test_wdr_gradient_against_the_closed_form() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    p = torch.tensor([0.5, 0.0, 0.2, 0.3, 0.0], dtype=torch.float64)
    wdr(weight, p).backward()
    rows = weight.detach().numpy()
    norms = np.linalg.norm(rows, axis=1)
    share = norms / norms.sum()
    r = share - p.numpy()
    factor = (r - r @ share) / (norms.sum() * np.linalg.norm(r))
    np.testing.assert_allclose(weight.grad, (factor / norms)[:, None] * rows, atol=1e-14)
    assert torch.autograd.gradcheck(lambda w: wdr(w, p), (weight,))


def test_wdr_at_its_minimum_has_no_gradient() -> None:
    weight = torch.tensor(HEADS[2], requires_grad=True)
    wdr(weight, torch.tensor(EMPIRICAL[2])).backward()
    assert torch.count_nonzero(weight.grad) == 0


@pytest.mark.parametrize("rows", [[[0.0, 0.0], [1.0, 2.0]], [[0.0, 0.0], [0.0, 0.0]]])
def test_wdr_with_rows_of_zeros_stays_finite(rows: list[list[float]]) -> None:
    weight = torch.tensor(rows, requires_grad=True)
    loss = wdr(weight, torch.tensor([0.2, 0.8]))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(weight.grad).all()
    assert torch.count_nonzero(weight.grad[0]) == 0


def test_wdr_ignores_the_scale_of_the_head_and_autocast() -> None:
    weight = torch.tensor(HEADS[0], dtype=torch.float32)
    p = torch.tensor(EMPIRICAL[0], dtype=torch.float32)
    assert wdr(50 * weight, p).item() == pytest.approx(wdr(weight, p).item(), rel=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(wdr(weight, p), wdr(weight.double(), p.double()).float())
