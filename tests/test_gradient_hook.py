"""The hook on gradients: its place in a step, and SCAFFOLD of docs/training.md against a bare loop."""

from __future__ import annotations

import copy
import re
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clients.base import FedClient
from fedapp import registry, sampling
from fedapp.engines.local import RunResult
from fedapp.learning import training
from fedapp.learning.state import ClientStore, read_safetensors
from fedapp.learning.training import TrainSpec, batch_slices
from fedapp.method import BaseHParams, Method, Payload
from fedapp.transport import checkpoint
from strategies.fedavg import METHOD as FEDAVG
from tests.handmade import (
    deterministic,
    digit_tasks,
    digits_context,
    federate,
    images,
    model_like,
    one_batch_task,
    whole,
)
from tests.test_training import flat, go, network

# ---- the place of the hook -------------------------------------------------------------------------------------------


def test_a_gradient_is_corrected_then_clipped_then_decayed() -> None:
    """Two steps of SGD by hand: p <- p - lr (clip(g + 3) + decay p)."""
    spec = TrainSpec(batch_size=25, lr=0.1, momentum=0.0, clip=0.5, weight_decay=0.2)
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
    go(model, TrainSpec(batch_size=50), on_gradients=lambda parameters: found.extend(map(id, parameters)))
    assert found == [id(p) for p in model[3].parameters()]


def test_a_hook_that_changes_nothing_changes_no_bit() -> None:
    plain, hooked = network(), network()
    go(plain, TrainSpec(epochs=2))
    go(hooked, TrainSpec(epochs=2), on_gradients=lambda parameters: None)
    assert torch.equal(flat(plain), flat(hooked))


@pytest.mark.parametrize("defined", [True, False])
def test_only_a_client_that_defines_the_hook_pays_for_it(defined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    original = training.train

    def train(*args: Any, **further: Any) -> Any:
        given.append(further["on_gradients"])
        return original(*args, **further)

    monkeypatch.setattr("clients.base.train", train)

    class Hooked(FedClient):
        def on_gradients(self, parameters: list[Tensor]) -> None:
            self.seen = getattr(self, "seen", 0) + len(parameters)

    task = one_batch_task(model="digits-a")
    client = (Hooked if defined else FedClient)(task, FEDAVG, BaseHParams())
    model = model_like(task)
    client.train_round(whole(model), 1)
    if defined:
        assert given == [client.on_gradients] and client.seen == 3 * len(list(model.parameters()))  # type: ignore[attr-defined]
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
    known = {**registry.discover(), method.id: method}
    monkeypatch.setattr(registry, "_discovered", lambda: (known, {}))


def private(result: RunResult, client: int) -> dict[str, Any]:
    """What a client of a run stored last."""
    folder = result.out / "state" / "run" / str(client)
    return read_safetensors(max(folder.glob("*.safetensors")))[0]


# ---- SCAFFOLD --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scaffold() -> Method:
    """The method of the documentation."""
    page = (Path(__file__).parent.parent / "docs" / "training.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    assert len(blocks) == 1
    module = types.ModuleType("scaffold_of_the_documentation")
    sys.modules[module.__name__] = module
    exec(compile(blocks[0], "docs/training.md", "exec"), module.__dict__)
    method: Method = module.METHOD
    return method


def by_hand(
    start: torch.nn.Module, tasks: list[Any], rounds: int, present: Callable[[int], list[int]], corrected: bool = True
) -> tuple[torch.nn.Module, list[Tensor], dict[int, list[Tensor]]]:
    """Algorithm 1 with option II in float64, with the clients' own batches; returns x, c and the c_k."""
    x = copy.deepcopy(start).double()
    zero = [torch.zeros_like(p) for p in x.parameters()]
    c, own = zero, {t.client: zero for t in tasks}
    for server_round in range(1, rounds + 1):
        ys, changes = [], []
        for task in (t for t in tasks if t.client in present(server_round)):
            y, c_k, steps, lr = copy.deepcopy(x), own[task.client], 0, task.train.lr
            generator = sampling.torch_generator(task.seed, "batches", server_round, task.client)
            pictures = images(task).double()
            for _ in range(task.train.epochs):
                order = torch.randperm(task.num_samples, generator=generator)
                for part in batch_slices(task.num_samples, task.train.batch_size):
                    loss = F.cross_entropy(y(pictures[order[part]]), task.y_train[order[part]])
                    gradients = torch.autograd.grad(loss, list(y.parameters()))
                    steps += 1
                    with torch.no_grad():
                        for p, g, mine, all_ in zip(y.parameters(), gradients, c_k, c, strict=True):
                            p -= lr * (g - mine + all_ if corrected else g)
            moved = [(a - b).detach() / (steps * lr) for a, b in zip(x.parameters(), y.parameters(), strict=True)]
            new = [a - b + d for a, b, d in zip(c_k, c, moved, strict=True)]
            changes.append([a - b for a, b in zip(new, c_k, strict=True)])
            own[task.client] = new
            ys.append(y)
        with torch.no_grad():
            for i, p in enumerate(x.parameters()):
                p.copy_(torch.stack([list(y.parameters())[i] for y in ys]).mean(dim=0))
        c = [a + sum(change[i] for change in changes) / len(tasks) for i, a in enumerate(c)]
    return x, c, own


def test_scaffold_is_algorithm_1(scaffold: Method, tmp_path: Path) -> None:
    """Four rounds of three clients with contradicting data, two of them in the third; each client has its own file."""
    tasks = digit_tasks(3, relabel=lambda client, label: (label + client) % 10, momentum=0.0, epochs=2)
    stores = {t.client: ClientStore(tmp_path / str(t.client), "scaffold", "ab") for t in tasks}

    def present(server_round: int) -> list[int]:
        return [0, 2] if server_round == 3 else [0, 1, 2]

    _, state, _ = federate(scaffold, BaseHParams(), tasks, 4, stores=stores, present=present)
    start = FedClient.build_model(tasks[0].spec(0), BaseHParams())
    initial = digits_context(scaffold, BaseHParams(), tasks).initial
    start.load_state_dict({n: torch.from_numpy(a) for n, a in initial.items()})
    x, c, own = by_hand(start, tasks, 4, present)
    without, _, _ = by_hand(start, tasks, 4, present, corrected=False)
    names = [n for n, _ in start.named_parameters()]
    assert names == list(initial), "digits-a has no buffers"
    far = float((flat(without) - flat(x)).norm())
    found = torch.cat([torch.from_numpy(state["model"][n]).flatten() for n in names])
    assert float((found - flat(x)).norm()) < 1e-4 * far and far > 0.05, "the correction counts"
    scale = max(float(a.norm()) for a in c)
    for i, name in enumerate(names):
        np.testing.assert_allclose(state["c"][name], c[i], atol=1e-4 * scale)
        for task in tasks:
            stored = stores[task.client].load(5)
            assert stored is not None and stored.round == 4
            np.testing.assert_allclose(stored.arrays[f"own/{name}"], own[task.client][i], atol=1e-4 * scale)


def test_scaffold_runs_as_a_method_and_c_is_the_mean_of_what_clients_keep(
    scaffold: Method, tiny: Callable[..., RunResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the engine, with sampled clients and a resume; the final training of all clients leaves c_k alone."""
    patched(monkeypatch, scaffold)
    settings = {"method": "scaffold", "momentum": 0.0, "clients": 4, "fraction_train": 0.5, "alpha": 0.3}
    at_once, part = tiny(rounds=5, **settings), tiny(rounds=3, **settings)
    rest = tiny(resume=part.out, rounds=5)
    for a, b in ((at_once.rounds, rest.rounds), (at_once.final, rest.final)):
        assert deterministic(a).equals(deterministic(b))
    found = checkpoint.latest(rest.out / "checkpoint")
    assert found is not None
    trained = set(rest.clients["client"])
    kept = {client: private(rest, int(client)) for client in trained}
    for name, c in found[1]["c"].items():
        mean = sum(arrays[f"own/{name}"] for arrays in kept.values()) / 4
        np.testing.assert_allclose(c, mean, atol=1e-5)
    assert max(float(np.abs(c).max()) for c in found[1]["c"].values()) > 1e-3
