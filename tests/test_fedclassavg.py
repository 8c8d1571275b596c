"""FedClassAvg: the local loss and a round against loops by hand, Eq. 3 on worked numbers, LG-FedAvg without the terms,
the control, and the warm-up."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from clients import base
from clients.fedclassavg import FedClassAvgClient, FedClassAvgHParams
from fedapp import sampling
from fedapp.learning.state import ClientStore
from fedapp.learning.task import Task
from fedapp.learning.training import Batch, Phase
from fedapp.method import ALL, HEAD, Arrays, Reply
from fedapp.models import SplitModel
from fedapp.models.selection import everything
from strategies.fedclassavg import METHOD, FedClassAvg
from tests.handmade import (
    assert_close,
    context,
    cross_entropy,
    descend,
    digit_tasks,
    equal,
    federate,
    head_of,
    model_like,
    one_batch_task,
    pixels,
    whole,
)

TASK = one_batch_task(lr=0.05)
TWO_BATCHES = one_batch_task(40, batch_size=20, epochs=1, augment="weak")


def client(folder: Path, task: Task = TASK, **hparams: Any) -> FedClassAvgClient:
    return FedClassAvgClient(task, METHOD, FedClassAvgHParams(**hparams), ClientStore(folder, "fedclassavg", "ab"))


# ---- the local loss --------------------------------------------------------------------------------------------------


def contrast(f: Tensor, y: Tensor, temperature: float, base: float, normalise: bool) -> Tensor:
    """The supervised contrastive loss in float64, anchor by anchor: every row against all others."""
    if normalise:
        f = f / f.square().sum(dim=1, keepdim=True).sqrt()
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(y)):
        others = [a for a in range(len(y)) if a != i]
        s = {a: f[i] @ f[a] / temperature for a in others}
        everything_else = torch.logsumexp(torch.stack(list(s.values())), dim=0)
        positives = [a for a in others if y[a] == y[i]]
        total = total - sum(s[p] - everything_else for p in positives) / len(positives)
    return temperature / base * total / len(y)


def local_loss(
    model: SplitModel, views: tuple[Tensor, Tensor], y: Tensor, received: SplitModel, *, rho: float,
    contrastive: float = 1.0, temperature: float = 0.07, base: float = 0.07, normalise: bool = True, half: bool = False,
) -> Tensor:  # fmt: skip
    """Eq. 4 and 5: contrast of both views before the ReLU, cross-entropy of the first, distance of the heads."""
    f1, f2 = (model.features(x) for x in views)
    loss = cross_entropy(f1.clamp_min(0) @ model.head.weight.T + model.head.bias, y)
    loss = loss + contrastive * contrast(torch.cat([f1, f2]), torch.cat([y, y]), temperature, base, normalise)
    gaps = [p - q.detach().double() for p, q in zip(model.head.parameters(), received.head.parameters(), strict=True)]
    if half:
        return loss + rho * sum((g**2).mean() / 2 for g in gaps)
    squared = sum((g**2).sum() for g in gaps)
    if float(squared.detach()) == 0:  # the root has no gradient at 0: it counts as 0
        return loss
    return loss + rho * squared.sqrt()


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"rho": 0.1}),
    ({"rho": 2.0}, {"rho": 2.0}),
    ({"rho": 0.0, "contrastive": 0.5}, {"rho": 0.0, "contrastive": 0.5}),
    ({"preset": "paper", "rho": 0.4662}, {"rho": 0.4662, "temperature": 100.0, "normalise": False}),
    ({"preset": "authors", "rho": 30}, {"rho": 30, "temperature": 100.0, "normalise": False, "half": True}),
    ({"temperature": 0.5, "base_temperature": 0.2}, {"rho": 0.1, "temperature": 0.5, "base": 0.2}),
    ({"preset": "paper", "normalise": True}, {"rho": 0.1, "temperature": 100.0}),
    ({"proximal": "mse_half", "rho": 30, "share": "all"}, {"rho": 30, "half": True}),
    ({"share": "none", "rho": 5.0}, {"rho": 5.0}),
]


@pytest.mark.parametrize(("hparams", "formula"), CASES)
def test_one_step_is_the_gradient_of_the_formula(tmp_path: Path, hparams: dict[str, Any], formula: Any) -> None:
    """Two different views, and a model that has moved away from the received head."""
    one, sent = client(tmp_path, **{"warmup_epochs": 0, **hparams}), model_like(TASK)
    payload = whole(sent)
    one.restore(1, payload)
    one.receive(payload)
    one.before_training(payload)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in one.model.parameters():
            p += 0.05 * torch.randn(p.shape, generator=generator)
    x1 = pixels(TASK)
    x2 = x1.flip(3) + 0.3 * torch.randn(x1.shape, generator=generator, dtype=x1.dtype)
    views = [x1.float(), x2.float()]
    loss = one.step_loss(Batch(views[0], TASK.y_train, views, torch.arange(12)))
    loss.backward()  # type: ignore[no-untyped-call]
    moved = model_like(TASK).double()
    moved.load_state_dict(one.model.state_dict())
    f = moved.features(x1).detach()
    assert (f < 0).any() and (f > 0).any(), "else nothing tells the contrast before the ReLU from that after it"
    by_hand = local_loss(moved, (x1, x2), TASK.y_train, sent, **formula)
    assert float(loss.detach()) == pytest.approx(float(by_hand.detach()), rel=1e-5)
    gradients = torch.autograd.grad(by_hand, list(moved.parameters()))
    for (name, p), expected in zip(one.model.named_parameters(), gradients, strict=True):
        assert p.grad is not None
        scale = float(expected.abs().max())
        np.testing.assert_allclose(p.grad.numpy() / scale, expected.numpy() / scale, atol=1e-4, err_msg=name)


def test_without_contrast_the_second_view_is_not_looked_at(tmp_path: Path) -> None:
    one, payload = client(tmp_path, contrastive=0), whole(model_like(TASK))
    one.restore(1, payload)
    one.receive(payload)
    one.before_training(payload)
    x = pixels(TASK).float()
    with_nan = one.step_loss(Batch(x, TASK.y_train, [x, x * torch.nan], torch.arange(12)))
    expected = cross_entropy(model_like(TASK).double()(pixels(TASK)), TASK.y_train)
    assert with_nan.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("rho", [0.0, 3.0])
def test_a_round_is_sgd_on_the_formula(tmp_path: Path, rho: float) -> None:
    """From the own trunk under the received head, whose copy must stay where it is while the head moves."""
    sent = model_like(TASK)
    one = client(tmp_path, rho=rho)
    one.restore(1, head_of(sent))
    start = copy.deepcopy(one.model)
    start.head.load_state_dict(sent.head.state_dict())
    arrays, n, metrics = client(tmp_path, rho=rho).train_round(head_of(sent), 1)
    assert n == 12 and metrics["steps"] == 3
    x, y = pixels(TASK), TASK.y_train
    expected = descend(start, lambda model: local_loss(model, (x, x), y, sent, rho=rho), TASK)
    assert_close(arrays, expected, prefix="head.", atol=1e-5)
    stored = client(tmp_path, rho=rho)
    stored.restore(2, head_of(sent))
    assert_close(everything(stored.model), expected, atol=1e-5)


def test_the_two_views_are_drawn_independently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Batch] = []
    true = FedClassAvgClient.step_loss
    monkeypatch.setattr(FedClassAvgClient, "step_loss", lambda self, batch: seen.append(batch) or true(self, batch))
    client(tmp_path, TWO_BATCHES).train_round(head_of(model_like(TASK)), 1)
    assert len(seen) == 2
    for batch in seen:
        assert len(batch.views) == 2 and batch.views[0] is batch.x and not torch.equal(*batch.views)


def test_adam_has_the_released_codes_moments(tmp_path: Path) -> None:
    """Four steps of Adam written out, with beta1 = 0.5 by default, on the cross-entropy alone."""
    task = one_batch_task(epochs=4, lr=0.01, optimizer="adam")
    for given, beta in (({}, 0.5), ({"beta1": 0.9}, 0.9)):
        sent = model_like(task)
        arrays = client(tmp_path, task, share="all", contrastive=0, rho=0, **given).train_round(whole(sent), 1)[0]
        model = copy.deepcopy(sent).double()
        moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()]
        for t in range(1, 5):
            gradients = torch.autograd.grad(cross_entropy(model(pixels(task)), task.y_train), list(model.parameters()))
            with torch.no_grad():
                for p, (m, v), g in zip(model.parameters(), moments, gradients, strict=True):
                    m.mul_(beta).add_((1 - beta) * g)
                    v.mul_(0.999).add_(0.001 * g**2)
                    p -= 0.01 * (m / (1 - beta**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        assert_close(arrays, model, atol=2e-5)


# ---- reductions ------------------------------------------------------------------------------------------------------


def stores(folder: Path, method: str, clients: int) -> dict[int, ClientStore]:
    return {k: ClientStore(folder / method / str(k), method, "ab") for k in range(clients)}


def trained(
    folder: Path, tasks: list[Task], rounds: int = 3, present: Any = None, method: Any = METHOD, **hparams: Any
) -> tuple[Any, dict[int, Arrays], dict[int, float]]:
    """The server's state, every client's stored model, and the scores after some rounds."""
    kept = stores(folder, method.id, 1 + max(t.client for t in tasks))
    chosen = method.hparams(**hparams)
    _, state, scores = federate(method, chosen, tasks, rounds, stores=kept, present=present)
    stored = {t.client: kept[t.client].load(rounds + 1) for t in tasks}
    return state, {k: s.arrays for k, s in stored.items() if s}, scores


CONTROL = [{}, {"rho": 3.0}, {"proximal": "mse_half", "warmup_epochs": 1, "rho": 30.0}, {"contrastive": 0, "rho": 0}]


@pytest.mark.parametrize("hparams", CONTROL)
def test_with_one_client_the_control_is_the_method_bit_for_bit(tmp_path: Path, hparams: dict[str, Any]) -> None:
    """The average of one head is that head: same initial head, same loss, same anchor of the proximal term."""
    tasks = digit_tasks(1)
    state, models, scores = trained(tmp_path / "head", tasks, share="head", **hparams)
    control, own, own_scores = trained(tmp_path / "none", tasks, share="none", **hparams)
    assert equal(models[0], own[0]) and scores == own_scores
    assert equal(state["model"], control["own"][0])


def test_nothing_crosses_between_the_clients_of_the_control(tmp_path: Path) -> None:
    """Among others, also while some sit out, each client becomes what it becomes alone, and differs from the method."""
    tasks, here = digit_tasks(3), {1: [0, 1, 2], 2: [0, 2], 3: [1, 2]}.__getitem__
    _, models, scores = trained(tmp_path / "three", tasks, present=here, share="none", rho=3.0)
    _, averaged, _ = trained(tmp_path / "head", tasks, present=here, share="head", rho=3.0)
    assert len(models) == 3
    for task in tasks:
        k = task.client

        def alone(server_round: int, k: int = k) -> list[int]:
            return [k] if k in here(server_round) else []

        _, single, score = trained(tmp_path / f"alone-{k}", [task], present=alone, share="none", rho=3.0)
        assert equal(models[k], single[k]) and scores[k] == score[k]
        assert not equal(models[k], averaged[k])


def test_the_control_sends_each_client_its_own_last_head() -> None:
    """The common initial head before a client's first round; a client that sat out keeps the head of its last one."""
    initial, one, two, three = ({"head.bias": np.full(3, v, np.float32)} for v in (0.0, 1.0, 2.0, 3.0))
    control = FedClassAvg(METHOD, FedClassAvgHParams(share="none"))
    control.context = context(initial)
    first = {"model": initial}
    assert all(control.send(first, 1, k).common["head.bias"] is initial["head.bias"] for k in (0, 1))
    unread = iter(replies((0, one, 30), (2, two, 10)))
    second = control.aggregate(first, 1, unread)
    assert next(unread, None) is None and first == {"model": initial}
    third = control.aggregate(second, 2, replies((0, three, 30)))
    sent = [control.send(third, 3, k) for k in (0, 1, 2)]
    assert [p.all()["head.bias"][0] for p in sent] == [3.0, 0.0, 2.0]
    assert [bool(p.arrays) for p in sent] == [True, False, True], "an own head is no common array"


# ---- the server ------------------------------------------------------------------------------------------------------


def replies(*clients: tuple[int, Arrays, int]) -> list[Reply]:
    return [Reply(k, n, arrays, {}, 0) for k, arrays, n in clients]


def test_heads_are_averaged_over_the_participants_data() -> None:
    """Eq. 3 on worked numbers, with all clients and with two of three."""

    def make(w: list[list[float]], b: list[float]) -> Arrays:
        return {"head.weight": np.array(w, np.float32), "head.bias": np.array(b, np.float32)}

    one = make([[0.5, -0.2], [-0.3, 0.8], [0.1, 0.1]], [0.0, 0.1, -0.1])
    two = make([[0.4, -0.1], [-0.2, 0.7], [0.0, 0.2]], [0.05, 0.05, -0.05])
    three = make([[0.0, 0.3], [0.6, -0.4], [0.2, 0.5]], [0.3, -0.3, 0.0])
    strategy = FedClassAvg(METHOD, FedClassAvgHParams())
    strategy.context = context(two)
    state = {"model": two}
    everyone = strategy.aggregate(state, 1, replies((0, one, 30), (1, two, 10), (2, three, 20)))["model"]
    np.testing.assert_allclose(
        everyone["head.weight"], [[0.316667, -0.016667], [0.016667, 0.383333], [0.116667, 0.25]], atol=1e-6
    )
    np.testing.assert_allclose(everyone["head.bias"], [0.108333, -0.041667, -0.058333], atol=1e-6)
    some = strategy.aggregate(state, 1, replies((0, one, 30), (2, three, 20)))["model"]
    np.testing.assert_allclose(some["head.weight"], [[0.3, 0], [0.06, 0.32], [0.14, 0.26]], atol=1e-6)
    sent = [strategy.send(state, 2, k) for k in (0, 1)]
    assert all(p.common[n] is two[n] for p in sent for n in two), "the same arrays for all: they are encoded once"


@pytest.mark.parametrize(("share", "prefixes"), [("head", HEAD), ("all", ALL), ("none", HEAD)])
def test_what_is_shared(share: Any, prefixes: tuple[str, ...]) -> None:
    assert METHOD.shared_prefixes(FedClassAvgHParams(share=share)) == prefixes


def warn(hparams: FedClassAvgHParams, optimizer: str = "sgd", augment: str = "weak") -> str | None:
    assert METHOD.warn is not None
    return METHOD.warn(hparams, optimizer, augment)


def test_two_identical_views_are_warned_of() -> None:
    assert "contrastive=0" in (warn(FedClassAvgHParams(), augment="none") or "")
    assert "augment=weak" in (warn(FedClassAvgHParams(contrastive=0.1), "adam", "none") or "")
    assert warn(FedClassAvgHParams(contrastive=0), augment="none") is None
    assert warn(FedClassAvgHParams(), augment="strong") is None


def test_a_temperature_that_diverges_under_sgd_is_warned_of() -> None:
    assert "diverges" in (warn(FedClassAvgHParams(preset="paper"), "sgd") or "")
    assert "T/T_b = 1429" in (warn(FedClassAvgHParams(preset="paper"), "sgd") or "")
    assert warn(FedClassAvgHParams(preset="paper"), "adam") is None
    assert warn(FedClassAvgHParams(preset="paper", contrastive=0), "sgd") is None
    assert "T/T_b = 101" in (
        warn(FedClassAvgHParams(temperature=101, base_temperature=1, contrastive=0.1), "sgd") or ""
    )
    assert warn(FedClassAvgHParams(temperature=100, base_temperature=1), "sgd") is None
    assert warn(FedClassAvgHParams(), "sgd") is None


def test_the_values_of_the_presets() -> None:
    chosen = FedClassAvgHParams()
    assert chosen.chosen == (0.07, 0.07, True, "l2", 0)
    assert FedClassAvgHParams(preset="paper").chosen == (100, 0.07, False, "l2", 0)
    assert FedClassAvgHParams(preset="authors").chosen == (100, 0.07, False, "mse_half", 1)


# ---- the warm-up -----------------------------------------------------------------------------------------------------


@pytest.fixture
def warmups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Epochs of each warm-up that is trained, while it is checked for its stream of random numbers and its settings."""
    found: list[int] = []
    true = base.train

    def train(model: Any, x: Any, y: Any, phase: Phase, inputs: Any, generator: Any, **others: Any) -> Any:
        expected = sampling.torch_generator(1, "warm-up", 1, 0).initial_seed()
        if generator.initial_seed() != expected:  # the same whenever it is computed
            return true(model, x, y, phase, inputs, generator, **others)
        client = cast(Any, phase.loss).__self__
        rate = (client.task.rates or (phase.spec.lr,))[0]  # of round 1, whenever it is computed
        views = 2 if client.hparams.contrastive else 1
        assert (phase.views, phase.betas, phase.rate) == (views, (0.5, 0.999), rate)
        reference = client.received_head
        assert reference and not any(p.requires_grad for p in reference), "no gradient, and none is kept for it"
        found.append(phase.spec.local_epochs)
        return true(model, x, y, phase, inputs, generator, **others)

    monkeypatch.setattr(base, "train", train)
    return found


def test_the_warm_up_is_sgd_on_the_formula_and_leaves_its_trunk_only(tmp_path: Path, warmups: list[int]) -> None:
    """Its proximal term refers to the client's own initial head."""
    task = one_batch_task(lr=0.05, epochs=3)  # the term moves the trunk from the third step on
    warm = client(tmp_path, task=one_batch_task(lr=0.05, epochs=1), warmup_epochs=3, rho=3.0)
    sent = model_like(TASK)
    warm.restore(1, head_of(sent))
    start = copy.deepcopy(warm.model)
    warm.receive(head_of(sent))
    assert warmups == [3]
    x, y = pixels(TASK), TASK.y_train
    expected = descend(start, lambda model: local_loss(model, (x, x), y, start, rho=3.0), task)
    expected.head.load_state_dict(sent.head.state_dict())
    assert_close(everything(warm.model), expected, atol=1e-5)
    warm.before_training(head_of(sent))
    assert all(torch.equal(a, b) for a, b in zip(warm.received_head, sent.head.parameters(), strict=True))


def test_the_warm_up_comes_once(tmp_path: Path, warmups: list[int]) -> None:
    sent, hparams = head_of(model_like(TASK)), FedClassAvgHParams(preset="authors", contrastive=0)
    for server_round in (1, 2, 3):
        client(tmp_path, TWO_BATCHES, **hparams.model_dump()).train_round(sent, server_round)
    assert warmups == [1]
    FedClassAvgClient(TWO_BATCHES, METHOD, hparams).train_round(sent, 1)
    assert warmups == [1], "a client without a store would warm up in every round"


def test_a_client_that_never_trained_is_scored_after_one_and_the_same_warm_up(
    tmp_path: Path, warmups: list[int]
) -> None:
    """Also with a schedule: its rate is that of round 1, and so are its random numbers."""
    sent, rates = head_of(model_like(TASK)), (0.1, 0.05, 0.02)
    task = replace(TWO_BATCHES, rates=rates)
    early, late = (client(tmp_path, task, warmup_epochs=1).evaluate_round(sent, t) for t in (2, 6))
    assert early == late and warmups == [1, 1]
    trained = client(tmp_path / "a", replace(task, train=task.train.replaced(local_epochs=0)), warmup_epochs=1)
    trained.train_round(sent, 3)
    first = replace(TWO_BATCHES, train=TWO_BATCHES.train.replaced(lr=0.1, local_epochs=0))
    same = client(tmp_path / "b", first, warmup_epochs=1)
    same.train_round(sent, 1)
    assert equal(everything(trained.model), everything(same.model)) and warmups == [1] * 4


def test_where_the_whole_model_is_handed_out_there_is_no_warm_up(tmp_path: Path, warmups: list[int]) -> None:
    sent = whole(model_like(TASK))
    found = {}
    for epochs in (0, 1):
        for server_round in (1, 2):
            one = client(tmp_path / str(epochs), TWO_BATCHES, share="all", warmup_epochs=epochs)
            found[epochs, server_round] = one.train_round(sent, server_round)[0]
        one.evaluate_round(sent, 3)
    assert warmups == [], "it would be trained every round and overwritten"
    assert all(equal(found[0, server_round], found[1, server_round]) for server_round in (1, 2))
