"""The hook on gradients: its place in a step, and SCAFFOLD of docs/training.md against a bare loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from clients.base import FedClient
from fedapp import registry
from fedapp.engines.local import RunResult
from fedapp.learning import training
from fedapp.learning.state import read_safetensors
from fedapp.learning.training import Phase
from fedapp.method import BaseHParams, Method, Payload
from strategies.fedavg import METHOD as FEDAVG
from tests.handmade import (
    model_like,
    one_batch_task,
    short,
    whole,
)
from tests.test_training import flat, go, network

# ---- the place of the hook -------------------------------------------------------------------------------------------


def test_a_gradient_is_corrected_then_clipped_then_decayed() -> None:
    """Two steps of SGD by hand: p <- p - lr (clip(g + 3) + decay p)."""
    spec = short(batch_size=25, lr=0.1, momentum=0.0, clip=0.5, weight_decay=0.2)
    fast = network()
    seen: list[list[Tensor]] = []

    def hook(parameters: list[Tensor]) -> None:
        seen.append([p.detach().clone() for p in parameters])
        for p in parameters:
            assert p.grad is not None
            p.grad += 3.0
            seen[-1].append(p.grad.clone())

    go(fast, spec, on_gradients=hook)
    assert len(seen) == 2
    after = [*seen[1][:4], *(p.detach() for p in fast.parameters())]
    for step in seen:
        before, gradients, expected = step[:4], step[4:], after[:4]
        after = after[4:]
        norm = float(torch.cat([g.flatten() for g in gradients]).norm())
        assert norm > 10, "the correction of every entry is in what is clipped"
        for p, g, new in zip(before, gradients, expected, strict=True):
            torch.testing.assert_close(p - 0.1 * (g * 0.5 / norm + 0.2 * p), new, atol=1e-6, rtol=1e-5)


def test_the_hook_sees_what_is_trained_and_nothing_else() -> None:
    model = network()
    model[1].requires_grad_(False)
    found: list[int] = []
    go(model, short(batch_size=50), on_gradients=lambda parameters: found.extend(map(id, parameters)))
    assert found == [id(p) for p in model[3].parameters()]


def test_a_hook_that_changes_nothing_changes_no_bit() -> None:
    plain, hooked = network(), network()
    go(plain, short(local_epochs=2))
    go(hooked, short(local_epochs=2), on_gradients=lambda parameters: None)
    assert torch.equal(flat(plain), flat(hooked))


@pytest.mark.parametrize("defined", [True, False])
def test_only_a_client_that_defines_the_hook_pays_for_it(defined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    original = training.train

    def train(*args: Any, **further: Any) -> Any:
        given.append(args[3].on_gradients)
        return original(*args, **further)

    monkeypatch.setattr("clients.base.train", train)

    class Hooked(FedClient):
        def phases(self) -> Sequence[Phase]:
            return [Phase(self.step_loss, self.training, on_gradients=self.look)]

        def look(self, parameters: list[Tensor]) -> None:
            self.seen = getattr(self, "seen", 0) + len(parameters)

    task = one_batch_task(model="digits-a")
    client = (Hooked if defined else FedClient)(task, FEDAVG, BaseHParams())
    model = model_like(task)
    client.train_round(whole(model), 1)
    if defined:
        assert given == [client.look] and client.seen == 3 * len(list(model.parameters()))  # type: ignore[attr-defined]
    else:
        assert given == [None]


def test_private_arrays_count_the_rounds_of_a_run(
    tiny: Callable[..., RunResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedAvg's server sends the whole model, and yet nothing private is lost; the final training is no round."""

    class Counting(FedClient):
        def before_training(self, payload: Payload) -> None:
            self.own["rounds"] = self.own.get("rounds", np.zeros(1)) + 1

    patched(monkeypatch, replace(FEDAVG, id="counting", client=Counting))
    result = tiny(method="counting", rounds=4)
    assert [float(private(result, client)["own/rounds"][0]) for client in range(3)] == [4.0] * 3


def patched(monkeypatch: pytest.MonkeyPatch, method: Method) -> None:
    """Add a method to the registry for one test."""
    own, names = registry._own, (*registry._files(), method.id)
    monkeypatch.setattr(registry, "_files", lambda: names)
    monkeypatch.setattr(registry, "_own", lambda name: method if name == method.id else own(name))


def private(result: RunResult, client: int) -> dict[str, Any]:
    """What a client of a run stored last."""
    folder = result.out / "state" / "run" / str(client)
    return read_safetensors(max(folder.glob("*.safetensors")))[0]
