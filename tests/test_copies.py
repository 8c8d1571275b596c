"""Copies of models: what deepcopy makes, and the initial model of each client as its own function makes it."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy as copy_of
from itertools import chain
from types import MethodType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

from clients import _initial
from clients.base import FedClient
from clients.feddbe import FedDBEClient, FedDBEHParams
from clients.fedrod import FedRoDClient, FedRoDHParams
from fedapp import config, registry
from fedapp.learning.task import ModelSpec
from fedapp.method import BaseHParams, Payload
from fedapp.models import MODEL_NAMES, SplitModel, build_model, copies
from fedapp.models.copies import copied, redrawn
from fedapp.results.runs import RunResult
from fedapp.settings import ModelSettings
from fedapp.tasks import simulated
from tests.test_models import OTHER, native_size


def spec(name: str, seed: int = 0, options: ModelSettings | None = None) -> ModelSpec:
    shape = {"cnn1d": (2, 64), "mlp": (7,)}.get(name, (3, native_size(name), native_size(name)))
    return ModelSpec(name, 5, shape, seed, options or ModelSettings())


def built(name: str, seed: int = 0, options: ModelSettings | None = None) -> SplitModel:
    return FedClient.build_model(spec(name, seed, options), BaseHParams())


def attributes(model: nn.Module) -> list[object]:
    """What modules hold beside tensors and other modules, in their order."""
    hidden = ("_parameters", "_buffers", "_modules")

    def plain(module: nn.Module, value: object) -> object:
        if isinstance(value, MethodType):  # of frozen layers
            assert value.__self__ is module, "a copy's own"
            return value.__func__
        return value

    return [(type(m), {k: plain(m, v) for k, v in vars(m).items() if k not in hidden}) for m in model.modules()]


def tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*chain(model.parameters(), model.buffers())]


@pytest.mark.full
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_a_copy_is_what_deepcopy_makes_and_shares_nothing(name: str) -> None:
    model = built(name, options=ModelSettings(freeze="features") if name not in OTHER else None).eval()
    ours, theirs = copied(model), copy.deepcopy(model)
    assert attributes(ours) == attributes(theirs)
    assert list(ours.state_dict()) == list(model.state_dict())
    for a, b, c in zip(tensors(ours), tensors(theirs), tensors(model), strict=True):
        assert torch.equal(a, c) and a.stride() == b.stride() and a.requires_grad == c.requires_grad
        assert type(a) is type(c) and a.data_ptr() != c.data_ptr()
    ids = [{id(m) for m in x.modules()} | {id(h) for m in x.modules() for h in (m._forward_hooks, m._buffers)}
           for x in (ours, model)]  # fmt: skip
    assert not ids[0] & ids[1]
    x = torch.rand(2, *spec(name).shape)
    with torch.inference_mode():
        assert torch.equal(ours(x), model(x))


def test_what_a_user_keeps_in_a_module_stays_as_it_is() -> None:
    """Empty tables with a factory, one table of two names, and modules that restore themselves."""

    class Restored(nn.Module):
        def __setstate__(self, state: dict[str, Any]) -> None:
            super().__setstate__({**state, "restored": True})

    model = nn.Sequential(nn.Conv2d(1, 1, 1), Restored())
    model.lists = defaultdict(list)  # type: ignore[assignment]
    model.one = model.other = {}  # type: ignore[assignment]
    found = copied(model)
    found.lists["new"].append(1)  # type: ignore[operator, index]
    assert found.one is found.other and found.one is not model.one and not model.lists
    assert found[1].restored is True and not hasattr(model[1], "restored")


def test_large_parameters_that_are_replaced_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "torch", SimpleNamespace(empty_like=lambda x: torch.full_like(x, math.nan)))
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, 4), nn.Linear(512, 512))
    model[3].weight = model[0].weight.requires_grad_(False)
    found = copied(model, {"0.weight", "2.weight"})
    assert [bool(p.isnan().all()) for p in found.parameters()] == [True, False, False, False, False, False, False]
    assert found[3].weight is found[0].weight, "tied as before"
    for a, b in zip(found.parameters(), model.parameters(), strict=True):
        assert a.requires_grad == b.requires_grad and a.data_ptr() != b.data_ptr()
        assert a.isnan().all() or torch.equal(a, b)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Leave out small values too, and make them NaN; collects them."""
    found = []

    def nan(x: torch.Tensor) -> torch.Tensor:
        found.append(torch.full_like(x, math.nan))
        return found[-1]

    monkeypatch.setattr(copies, "LARGE", 1)
    monkeypatch.setattr(copies, "torch", SimpleNamespace(empty_like=nan))
    return found


def test_a_client_finds_nan_in_values_that_it_receives_even_if_it_looks(poison: list[torch.Tensor]) -> None:
    class Looks(FedClient):
        def receive(self, payload: Payload) -> None:
            self.seen = self.model.head.weight.detach().clone()
            super().receive(payload)

    settings = config.from_flat({"method": "fedavg", "model": "digits-b", "clients": 3})
    method, hparams = settings.method_and_hparams()
    task = simulated.simulated_task(settings, 0, 3, torch.device("cpu"))
    sent = {n: v.numpy() for n, v in FedClient.build_model(task.spec(7), hparams).state_dict().items()}
    for kind in (FedClient, Looks):
        client = kind(task, method, hparams)
        client.restore(1, Payload(sent))
        assert client.model.head.weight.isnan().all()
        client.receive(Payload(sent))
        assert all(torch.equal(v, torch.from_numpy(sent[n])) for n, v in client.model.state_dict().items())
        assert kind is FedClient or client.seen.isnan().all()  # type: ignore[attr-defined]


@pytest.mark.full
@pytest.mark.parametrize("method", list(registry.discover()))
@pytest.mark.parametrize("again", [True, False])
def test_no_method_reads_what_is_replaced(
    method: str, again: bool, poison: list[torch.Tensor], tiny: Callable[..., RunResult]
) -> None:
    values = {"fraction_train": 0.67, "rounds": 3, "evaluate_every": 1, "final_training": again}
    found = tiny(method=method, **values)
    used, copies.LARGE = len(poison), 1 << 40
    wanted = tiny(method=method, **values)
    for a, b in ((found.final, wanted.final), (found.evaluations, wanted.evaluations)):
        columns = [c for c in b.columns if not c.endswith("seconds")]
        pd.testing.assert_frame_equal(a[columns], b[columns], check_exact=True)
    assert used == len(poison) and (used or method not in ("fedavg", "fedprox", "lgfedavg", "cwfedavg", "fedgh"))


def test_most_modules_are_not_left_to_deepcopy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("digits-c")
    seen: list[object] = []
    monkeypatch.setattr("fedapp.models.copies.copy.deepcopy", lambda x, memo: seen.append(x) or copy_of(x, memo))
    copied(model)
    assert not any(isinstance(x, nn.Module) for x in seen)


def test_what_is_tied_stays_tied_and_what_copies_itself_does() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.calls = torch.ones(3), [1]

        def __deepcopy__(self, memo: object) -> Own:
            return Own()

    a = nn.Linear(3, 3)
    b = nn.Linear(3, 3)
    b.weight = a.weight
    model = nn.Sequential(a, b, a, Own())
    model[3].calls.append(2)
    model.extra = torch.ones(2)  # type: ignore[assignment]
    a.register_forward_hook(lambda *args: None)
    found = copied(model)
    assert found[0] is found[2] and found[0] is not a
    assert found[1].weight is found[0].weight and found[0].weight is not a.weight
    assert found[3].calls == [1] and len(found[0]._forward_hooks) == 1
    assert torch.equal(found.extra, model.extra) and found.extra is not model.extra


@pytest.mark.full
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_new_values_are_those_of_a_model_that_is_built_or_it_is_built(name: str) -> None:
    state = torch.get_rng_state()
    trusted = _initial._seeded(FedClient, spec(name), BaseHParams()) == "own"
    new = redrawn(built(name, 9), 3)
    assert torch.equal(torch.get_rng_state(), state)
    same = [torch.equal(a, b) for a, b in zip(tensors(new), tensors(built(name, 3)), strict=True)]
    assert all(same) == trusted, "seeds that were not tried"
    if name in ("cnn", "digits-a", "digits-b", "digits-c", "mlp", "cnn1d"):
        assert trusted, f"{name} would be built for each client"


@pytest.mark.parametrize(("client", "hparams"), [(FedDBEClient, FedDBEHParams()), (FedRoDClient, FedRoDHParams())])
def test_a_method_with_a_model_of_its_own_has_the_same_start(client: type[FedClient], hparams: object) -> None:
    def made(seed: int) -> SplitModel:
        return client.build_model(spec("digits-a", seed), hparams)

    new = redrawn(made(0), 4)
    same = all(torch.equal(a, b) for a, b in zip(tensors(new), tensors(made(4)), strict=True))
    assert (_initial._seeded(client, spec("digits-a"), hparams) == "own") == same


def test_models_that_start_from_special_values_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def special(spec: ModelSpec, hparams: object) -> SplitModel:
        model = build_model(spec.name, num_classes=5, shape=spec.shape, seed=spec.seed)
        with torch.no_grad():
            model.head.bias.zero_()
        return model

    client = type("Special", (FedClient,), {"build_model": staticmethod(special)})
    assert not _initial._seeded(client, spec("digits-a"), BaseHParams())
    other = dataclasses.replace(spec("digits-a"), name="package.module:function")
    assert not _initial._seeded(FedClient, other, BaseHParams()), "a user's own function"
