"""FedETF: the simplex, worked numbers, FedAvg as reduction, what never moves, fine-tuning in turn, absent classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from clients._models import ETFModel
from clients.fedetf import ETF, FedETFClient, FedETFHParams, simplex
from clients.fedrod import log_prior
from fedapp import load
from fedapp.config import from_flat
from fedapp.engines.local import RunResult
from fedapp.errors import BadRequest
from fedapp.method import Payload
from fedapp.models import SplitModel, selection
from strategies.fedetf import METHOD
from tests.handmade import digit_tasks, equal, full_batch, images, one_batch_task, steps_by_hand

TASK = one_batch_task(model="digits-a", classes=4)


def client(task: Any = TASK, **hparams: Any) -> FedETFClient:
    return FedETFClient(task, METHOD, FedETFHParams(**hparams))


def shared(task: Any = TASK, **hparams: Any) -> dict[str, Any]:
    model = FedETFClient.build_model(task.spec(9), FedETFHParams(**hparams))
    return {n: a for n, a in selection.everything(model).items() if n != ETF}


@pytest.mark.parametrize("c", [2, 3, 10])
def test_the_simplex_is_as_wide_as_can_be(c: int) -> None:
    m = simplex(c).double().numpy()
    np.testing.assert_allclose(m.T @ m, c / (c - 1) * (np.eye(c) - 1 / c), atol=1e-6)
    np.testing.assert_allclose(np.diag(m.T @ m), 1, atol=1e-6)
    if c == 3:
        np.testing.assert_allclose(m, np.full((3, 3), -0.408248) + np.eye(3) * (0.816497 + 0.408248), atol=6e-7)


def test_worked_numbers() -> None:
    head = nn.Linear(3, 3)
    base = SplitModel(name="toy", features=nn.Identity(), activation=nn.Identity(), head=head)
    model = ETFModel(base, scale=1.0, train_scale=True).double()
    with torch.no_grad():
        head.weight.copy_(torch.eye(3))
        head.bias.zero_()
    u = torch.tensor([[2, 0, -1], [0, 1, 1]], dtype=torch.float64, requires_grad=True)
    y, counts = torch.tensor([0, 1]), torch.tensor([8, 2, 0])
    expected = [[0.912871, -0.182574, -0.730297], [-0.577350, 0.288675, 0.288675]]
    np.testing.assert_allclose(model.classify(u).detach(), expected, atol=6e-7)
    for scale, plain, one, drop in ((1.0, 0.653912, 0.630004, 0.533514), (10.0, 0.346626, 0.202966, 0.000349)):
        with torch.no_grad():
            model.scale.fill_(scale)
        logits = model.classify(u)
        assert float(F.cross_entropy(logits, y)) == pytest.approx(plain, abs=1e-6)
        for absent, value in (("one", one), ("drop", drop)):
            balanced = F.cross_entropy(logits + log_prior(counts, 1.0, absent).double(), y)
            assert float(balanced.detach()) == pytest.approx(value, abs=1e-6)
            if scale == 1 and absent == "one":
                by_u, by_s = torch.autograd.grad(balanced, [u, model.scale], retain_graph=True)
                np.testing.assert_allclose(
                    by_u, [[-0.002938, 0.020667, -0.005877], [0.228921, -0.182491, 0.182491]], atol=1e-6
                )
                assert float(by_s) == pytest.approx(-0.288181, abs=1e-6)


def test_two_steps_are_descent_on_the_papers_loss_and_nothing_else_is_sent() -> None:
    """Cosines and the balanced softmax written out; class 3 is absent and counts as one."""
    made = client(full_batch(one_batch_task(model="digits-a", classes=3)), scale=4.0, gamma=0.5)
    assert made.task.num_classes == 3
    sent = shared(made.task, scale=4.0)
    found, _, _ = made.train_round(Payload(common=sent), 1)
    model = FedETFClient.build_model(made.task.spec(9), FedETFHParams(scale=4.0))
    x, y = images(made.task), made.task.y_train
    m = np.sqrt(3 / 2) * (torch.eye(3) - 1 / 3)
    counts = torch.bincount(y, minlength=3).float()

    def loss() -> torch.Tensor:
        u = model.head(model.represent(x))
        cosines = (u / u.square().sum(1, keepdim=True).sqrt()) @ m
        z = (model.scale * cosines).exp() * counts**0.5
        return -(z[torch.arange(len(y)), y] / z.sum(dim=1)).log().mean()

    steps_by_hand([p for n, p in model.named_parameters() if n != ETF], loss, made.task)
    assert found.keys() == sent.keys() and ETF not in found
    for name, p in model.named_parameters():
        if name != ETF:
            np.testing.assert_allclose(found[name], p.detach(), rtol=1e-3, atol=5e-6)
    assert found["scale"][0] != 4.0 and torch.equal(made.model.etf, simplex(3))  # type: ignore[arg-type]


def test_absent_classes_and_the_scale_at_the_start() -> None:
    task = digit_tasks(1, relabel=lambda c, label: label % 2)[0]
    for absent, value in (("one", 0.0), ("drop", -np.inf)):
        prior = client(task, absent=absent).prior
        assert prior[2:].tolist() == [value] * 8 and torch.isfinite(prior[:2]).all()
        _, _, metrics = client(task, absent=absent).train_round(Payload(common=shared(task)), 1)
        assert np.isfinite(metrics["train-loss"])
    sizes = {c: shared(one_batch_task(model="digits-a", classes=c))["scale"][0] for c in (3, 10, 100)}
    assert sizes == {3: 10, 10: 10, 100: 20}
    logits = FedETFClient.build_model(TASK.spec(0), FedETFHParams())(1e3 * images(TASK))
    assert float(logits.detach().abs().max()) <= 10 + 1e-4


def test_fine_tuning_frees_the_simplex_of_a_copy_and_takes_turns() -> None:
    scheduled = TASK.train.replaced(lr=0.1, lr_schedule_steps="OneCycleLR max_lr=1")
    made = client(dataclasses.replace(TASK, train=scheduled, rates=(0.1, 0.01, 0.001)), tune_cycles=1)
    payload = Payload(common=shared())
    made.evaluate_round(payload, 3, train=True)
    phases = made.tuning()
    assert made.rate == 0.001 and all(p.rate == 0.1 and not p.spec.lr_schedule_steps for p in phases)
    assert [p.prefixes for p in phases] == [("features.", "head.", "scale"), ("etf",), ("head.",)]
    assert len({p.draws for p in phases}) == 3 and [p.loss == made.step_loss for p in phases] == [True, False, False]
    made = client(tune_cycles=1)
    made.evaluate_round(payload, 3, train=True)
    made.tune_to_score()
    assert equal(shared(), {n: a for n, a in selection.everything(made.model).items() if n != ETF})
    assert torch.equal(made.model.etf, simplex(4)) and not made.model.etf.requires_grad  # type: ignore[union-attr, arg-type]
    assert not torch.equal(made.tuned.etf, simplex(4))  # type: ignore[arg-type]
    only = client(tune_epochs=0, tune_cycles=2, tune_projection=0)
    only.evaluate_round(payload, 3, train=True)
    only.tune_to_score()
    assert equal(shared(), {n: a for n, a in selection.everything(only.tuned).items() if n != ETF})
    none = client(tune_epochs=0, tune_cycles=0)
    received = none.evaluate_round(payload, 3, train=True)
    assert none.tune_to_score() == {k.replace("received", "tuned"): v for k, v in received.items()}


def test_calibration_is_refused_because_the_head_is_no_classifier() -> None:
    with pytest.raises(BadRequest, match="fedetf does not leave one"):
        from_flat({"method": "ccvr", "method-args": "base=fedetf"}).method_and_hparams()


def test_a_run_needs_no_state_and_its_models_can_be_loaded(tiny: Callable[..., RunResult]) -> None:
    result = tiny(method="fedetf", clients=3, fraction_train=0.67)
    assert result.summary["headline"]["score"] == "tuned" and result.final["tuned_accuracy"].notna().all()
    assert set(result.clients["bytes_up"]) == {4 * 38_283}
    tuned = load(result.out, client=0, point="tuned").model
    assert not torch.equal(tuned.etf, simplex(10))  # type: ignore[arg-type]
    assert not made_of_state(result)


def made_of_state(result: RunResult) -> bool:
    """Whether the server expects a client to come back with what it stored."""
    from fedapp.transport import checkpoint

    found = checkpoint.latest(result.out / "checkpoint")
    assert found is not None
    return bool(found[2]["Cohort"]["binds"].any())
