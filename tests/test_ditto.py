"""Ditto: worked steps, a personal model that is scored, stored and used, FedAvg and Standalone as its ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedapp
from clients.base import FedClient
from clients.ditto import DittoClient, DittoHParams
from fedapp import sampling
from fedapp.data.transforms import InputSpec
from fedapp.engines.local import RunResult
from fedapp.learning.state import ClientStore
from fedapp.learning.task import Task
from fedapp.method import Arrays, BaseHParams, Payload
from fedapp.models import SplitModel
from fedapp.models.selection import everything
from strategies.ditto import METHOD
from strategies.fedavg import METHOD as FEDAVG
from tests.handmade import InDouble, equal, model_like, one_batch_task, short, whole
from tests.test_phases import normalised

Tiny = Callable[..., RunResult]


class Quadratic(DittoClient):
    """F(v) = a/2 (v - b)^2 with a = 1, b = 2: v is the head's bias, and all else is 0 and stays."""

    @classmethod
    def build_model(cls, spec: Any, hparams: Any) -> SplitModel:
        trunk = nn.Sequential(InDouble(), nn.Linear(1, 1))
        model = SplitModel(name="q", features=trunk, activation=nn.Identity(), head=nn.Linear(1, 1)).double()
        for p in model.parameters():
            nn.init.zeros_(p).requires_grad_(p is model.head.bias)
        return model

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (logits - 2).square().mean()

    def after_training(self, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        self.sent = self.model.head.bias.item()  # in float64, before it is sent in float32
        return super().after_training(payload)


def after(steps: int, **hparams: Any) -> tuple[float, float]:
    """v_k and w_k after some steps of size .1, from v_k = 0 and w = .5."""
    x, y = torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64)
    spec = short(local_epochs=steps, batch_size=1, lr=0.1, momentum=0.0)
    task = Task(0, 1, 1, InputSpec((1,), 1.0, (0.0,), (1.0,), "table"), "q", x, y, x, y, train=spec)
    client = Quadratic(task, METHOD, DittoHParams.model_validate(hparams))
    sent = {**everything(Quadratic.build_model(None, None)), "head.bias": np.full(1, 0.5)}
    client.train_round(Payload(common=sent), 1)
    return client.personal.head.bias.item(), client.sent


@pytest.mark.parametrize(("lam", "values"), [(1.0, (0.25, 0.45, 0.61)), (0.0, (0.2, 0.38, 0.542))])
def test_the_worked_steps(lam: float, values: tuple[float, ...]) -> None:
    for steps, value in enumerate(values, start=1):
        v, w = after(steps, lam=lam)
        assert v == pytest.approx(value, abs=1e-12)
        assert w == pytest.approx(2 - 1.5 * 0.9**steps, abs=1e-12), "plain steps, whatever v does"


@pytest.mark.parametrize("lam", [0.5, 8.0])
def test_the_closed_form(lam: float) -> None:
    """v_K = v* + (1 - eta (a + lambda))^K (v_0 - v*), v* = (a b + lambda w) / (a + lambda)."""
    limit = (2 + lam * 0.5) / (1 + lam)
    for steps in (4, 60):
        v = after(1, lam=lam, personal_epochs=steps)[0]
        assert v == pytest.approx(limit * (1 - (1 - 0.1 * (1 + lam)) ** steps), abs=1e-12)
    assert abs(v - 0.5) < (1.0 if lam == 0.5 else 0.2), "a strong pull leaves v near w"


@pytest.mark.parametrize("start", ["common", "own"])
def test_the_personal_model_starts_at_an_initial_model_and_not_at_what_was_sent(start: str, tmp_path: Path) -> None:
    task = one_batch_task()
    client = DittoClient(task, METHOD, DittoHParams.model_validate({"start": start}))
    sent = whole(model_like(task))
    client.restore(7, sent)
    client.receive(sent)
    own = sampling.derived_seed(task.seed, "model", task.client)
    seed = sampling.server_model_seed(task.seed) if start == "common" else own
    assert equal(everything(client.personal), everything(FedClient.build_model(task.spec(seed), None)))
    assert equal(everything(client.model), sent.common)
    client.before_training(sent)
    client.after_training(sent)
    assert client.model is client.personal, "which is scored and stored once it is trained"


def test_the_personal_model_is_what_is_used_after_the_run(tiny: Tiny) -> None:
    run = tiny(method="ditto", method_args="lam=0 start=own", keep_models=False, final_training=False)
    alone = tiny(method="local", keep_models=False, final_training=False)
    for client in range(3):
        mine, theirs = (fedapp.load(r.out, client).model for r in (run, alone))
        assert equal(everything(mine), everything(theirs))


def test_statistics_that_stay_at_the_client_are_kept_for_both_models(tmp_path: Path) -> None:
    """With `buffers=local` each model has its own running statistics; w_k's are FedAvg's."""
    task = dataclasses.replace(one_batch_task(), buffers="local")
    sent = Payload(
        common={n: a for n, a in everything(normalised(1)).items() if ".running_" not in n and "num_" not in n}
    )

    def build(cls: Any, spec: Any, hparams: Any) -> SplitModel:
        return normalised()

    found = []
    for kind, method, hparams in ((DittoClient, METHOD, DittoHParams()), (FedClient, FEDAVG, BaseHParams())):
        made = type("Normed", (kind,), {"build_model": classmethod(build)})
        store = ClientStore(tmp_path / method.id, method.id, "ab")
        for server_round in (1, 2):
            client = made(task, method, hparams, store)
            client.train_round(sent, server_round)
        found.append(made(task, method, hparams, store).evaluate_round(sent, 3)["received-loss-sum"])
        if kind is DittoClient:
            shared = client.own["buffers/features.1.running_mean"]
            assert not np.array_equal(shared, client.personal.features[1].running_mean.numpy())
    assert found[0] == found[1]


class Keeping(DittoClient):
    """Keeps what it sends."""

    shared: Arrays

    def after_training(self, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        self.shared, numbers = super().after_training(payload)
        return self.shared, numbers


def test_passes_over_both_models_and_of_a_newcomer_over_its_own() -> None:
    task = one_batch_task(epochs=2)
    for personal, epochs in ((None, 4), (5, 7)):
        hparams = DittoHParams(personal_epochs=personal)
        client = Keeping(task, METHOD, hparams)
        assert client.epochs() == epochs
        client.train_round(whole(model_like(task)), 1)
        assert client.report.samples == 12 * epochs
        client.meet(whole(model_like(task)), 3, "unseen_trained@3", 3)
        assert client.report.samples == 12 * 3
        assert equal(client.shared, whole(model_like(task)).common), "w is as it was sent"
