"""MOON: the loss by plain loops, FedAvg at mu = 0, first participation, the previous model, frozen models, resume."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clients.base import FedClient
from clients.moon import MoonClient, MoonHParams
from fedapp.core.contrastive import moon_contrast
from fedapp.data.transforms import InputSpec, normalise
from fedapp.learning.state import ClientStore, read_safetensors
from fedapp.learning.task import Task
from fedapp.learning.training import Batch
from fedapp.method import Arrays, Payload
from fedapp.models import SplitModel, build_model
from fedapp.models.selection import extract, merge
from strategies.fedavg import METHOD as FEDAVG
from strategies.moon import METHOD
from tests.handmade import full_batch, images, short, steps_by_hand

INPUTS = InputSpec((1, 8, 8), 16.0, (0.3,), (0.4,))


def task(n: int = 40, model: str = "digits-a", **train: Any) -> Task:
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(0, 17, (n, 8, 8, 1), generator=generator, dtype=torch.uint8)
    y = torch.randint(0, 4, (n,), generator=generator)
    return Task(
        0, 1, 4, INPUTS, model, x, y, x[:10], y[:10], train=short(local_epochs=2, batch_size=8, lr=0.05, **train)
    )


def client(folder: Path | None = None, job: Task | None = None, **hparams: Any) -> MoonClient:
    store = None if folder is None else ClientStore(folder, "moon", "ab")
    return MoonClient(job or task(), METHOD, MoonHParams(**hparams), store)


def payload(seed: int, model: str = "digits-a") -> Payload:
    made = build_model(model, num_classes=4, shape=(1, 8, 8), seed=seed)
    return Payload(common=extract(made, [n for n, _ in made.named_parameters()]))


def same(a: Arrays, b: Arrays) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


def test_a_client_alone_is_pulled_from_nothing_with_dropped_statistics(tmp_path: Path) -> None:
    """w^t is then the previous model, its statistics included."""
    from tests.test_engine import Normed, normed_task

    kind = type("NormedMoon", (MoonClient,), {"build_model": classmethod(Normed.build_model.__func__)})  # type: ignore[attr-defined]
    one = kind(normed_task("drop"), METHOD, MoonHParams(mu=1.0), ClientStore(tmp_path, "moon", "ab"))
    arrays, _, _ = one.train_round(Payload(), 1)
    one.restore(2, Payload(arrays=arrays))
    one.receive(Payload(arrays=arrays))
    one.train_locally(Payload(arrays=arrays))
    assert torch.equal(*one.references)


def parameters(model: SplitModel) -> Arrays:
    return extract(model, [n for n, _ in model.named_parameters()])


def ready(tmp_path: Path, job: Task | None = None, **hparams: Any) -> MoonClient:
    """A client in its second participation, at the start of local training, its model a little way off what it got."""
    first = client(tmp_path, job, **hparams)
    first.train_round(payload(1, first.task.model), 1)
    again = client(tmp_path, job, **hparams)
    sent = payload(2, first.task.model)
    again.round = 2
    again.restore(2, sent)
    again.receive(sent)
    again.before_training(sent)
    with torch.no_grad():
        for p in again.model.parameters():
            p.add_(0.01)
    return again


def batch(made: FedClient, rows: list[int]) -> Batch:
    x = normalise(made.task.x_train[rows].permute(0, 3, 1, 2), INPUTS)
    return Batch(x, made.task.y_train[rows], [x], torch.tensor(rows))


def test_worked_numbers() -> None:
    z, z_glob, z_prev = (torch.tensor([row]) for row in ([1.0, 2, 2], [2.0, 1, 2], [-1.0, 0, 1]))
    assert moon_contrast(z, z_glob, z_prev, 0.5).item() == pytest.approx(0.239647, abs=5e-7)


def test_two_local_steps_are_descent_on_the_papers_loss(tmp_path: Path) -> None:
    """Eqs. 3 and 4 written out on a copy of the model; from the second step on z and z_glob differ."""
    job = full_batch(task())
    before, _, _ = client(tmp_path, job).train_round(payload(1), 1)
    arrays, n, _ = client(tmp_path, job, mu=3.0, tau=0.4).train_round(payload(2), 2)
    w, received, previous = (build_model("digits-a", num_classes=4, shape=(1, 8, 8), seed=0) for _ in range(3))
    for model, values in ((w, payload(2).common), (received, payload(2).common), (previous, before)):
        merge(model, values)
    x, y = images(job), job.y_train

    def cosine(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(dim=1) / (a.square().sum(dim=1).sqrt() * b.square().sum(dim=1).sqrt())

    def loss() -> Tensor:
        z, z_glob, z_prev = w.represent(x), received.represent(x).detach(), previous.represent(x).detach()
        logits = z @ w.head.weight.T + w.head.bias
        supervised = logits.exp().sum(dim=1).log() - logits[torch.arange(len(y)), y]
        near, far = (cosine(z, z_glob) / 0.4).exp(), (cosine(z, z_prev) / 0.4).exp()
        return (supervised - 3.0 * (near / (near + far)).log()).mean()

    steps_by_hand(w.parameters(), loss, job)
    assert n == 40
    for name, value in parameters(w).items():
        np.testing.assert_allclose(arrays[name], value, rtol=1e-3, atol=1e-5)


def test_gradient_reaches_the_extractor_and_leaves_the_head_to_cross_entropy(tmp_path: Path) -> None:
    made = ready(tmp_path, mu=3.0)
    got = batch(made, [1, 2, 3, 4])
    plain = torch.autograd.grad(F.cross_entropy(made.model(got.x), got.y), list(made.model.parameters()))
    full = torch.autograd.grad(made.step_loss(got), list(made.model.parameters()))
    for (name, _), a, b in zip(made.model.named_parameters(), plain, full):
        assert torch.equal(a, b) == name.startswith("head.")


def test_references_computed_once_equal_those_of_every_batch(tmp_path: Path) -> None:
    made = ready(tmp_path, mu=2.0)
    got = batch(made, [5, 30, 11])
    once = made.step_loss(got).item()
    assert made.references
    made.references = ()
    assert made.step_loss(got).item() == pytest.approx(once, rel=1e-5)


def test_augmented_images_pass_through_the_frozen_models(tmp_path: Path) -> None:
    job = task(augment="weak")
    made = ready(tmp_path, job, mu=2.0)
    assert not made.references and len(made.frozen) == 2
    got = batch(made, [5, 30, 11])
    got.x = got.x.flip(3)
    z_glob, _ = made.frozen_representations(got)
    with torch.no_grad():
        assert torch.equal(z_glob, made.frozen[0].represent(got.x))


def test_where_previous_and_received_are_one_model_the_gradient_is_cross_entropys(tmp_path: Path) -> None:
    made = ready(tmp_path, mu=5.0)
    made.frozen = (made.frozen[0], made.frozen[0])
    made.references = ()
    got = batch(made, [0, 1, 2, 3])
    loss = made.step_loss(got)
    plain = F.cross_entropy(made.model(got.x), got.y)
    assert loss.item() == pytest.approx(plain.item() + 5 * math.log(2), rel=1e-6)
    for a, b in zip(
        torch.autograd.grad(loss, list(made.model.parameters())),
        torch.autograd.grad(plain, list(made.model.parameters())),
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("server_round", [1, 7])
def test_first_participation_is_fedavgs_training_bit_for_bit(tmp_path: Path, server_round: int) -> None:
    plain = FedClient(task(), FEDAVG, FEDAVG.hparams(), None)
    expected, _, expected_metrics = plain.train_round(payload(1), server_round)
    arrays, _, metrics = client(tmp_path, mu=5.0).train_round(payload(1), server_round)
    assert same(arrays, expected)
    assert metrics["train-loss"] == expected_metrics["train-loss"]


def test_previous_model_is_the_one_of_the_last_participation(tmp_path: Path) -> None:
    first, _, _ = client(tmp_path).train_round(payload(1), 1)
    # Rounds 2 to 4 pass without this client; an evaluation in between must not count as a participation.
    client(tmp_path).evaluate_round(payload(7), 3)
    again = client(tmp_path)
    second, _, _ = again.train_round(payload(4), 5)
    assert again.previous is not None
    assert same(parameters(again.previous), first)
    assert same(parameters(again.frozen[0]), payload(4).common)
    assert not same(second, first)
    third = client(tmp_path)
    third.train_round(payload(5), 6)
    assert third.previous is not None and same(parameters(third.previous), second)


def test_frozen_models_stay_as_they_are(tmp_path: Path) -> None:
    client(tmp_path, mu=5.0).train_round(payload(1), 1)
    before = read_safetensors(next(tmp_path.glob("*.000001.safetensors")))[0]
    made = client(tmp_path, mu=5.0)
    made.train_round(payload(2), 2)
    assert made.previous is not None
    assert same(parameters(made.previous), {n[6:]: a for n, a in before.items()})
    for model in made.frozen:
        assert not model.training
        assert all(not p.requires_grad and p.grad is None for p in model.parameters())
    assert all(p.requires_grad for p in made.model.parameters())


def test_dropout_is_off_in_the_frozen_models(tmp_path: Path) -> None:
    made = ready(tmp_path, task(12, "alexnet", augment="weak"), mu=1.0)
    made.model.train()
    got = batch(made, [0, 1, 2])
    for a, b in zip(made.frozen_representations(got), made.frozen_representations(got)):
        assert torch.equal(a, b)
    assert not torch.equal(made.model.represent(got.x), made.model.represent(got.x))


def test_nothing_but_the_model_is_sent_and_stored(tmp_path: Path) -> None:
    arrays, n, _ = client(tmp_path).train_round(payload(1), 1)
    assert list(arrays) == FedClient(task(), FEDAVG, FEDAVG.hparams(), None).up_names()
    assert n == 40
    stored = read_safetensors(next(tmp_path.glob("*.safetensors")))[0]
    assert all(name.startswith("model/") for name in stored)


def test_without_a_weight_no_model_is_frozen(tmp_path: Path) -> None:
    assert ready(tmp_path, mu=0.0).frozen == ()


def test_one_sample_and_bf16_are_no_trouble(tmp_path: Path) -> None:
    for name, job in {"one": task(1), "half": task(precision="bf16")}.items():
        client(tmp_path / name, job).train_round(payload(1), 1)
        _, _, metrics = client(tmp_path / name, job).train_round(payload(2), 2)
        assert math.isfinite(metrics["train-loss"])


def test_the_model_named_moon_contrasts_its_projection(tmp_path: Path) -> None:
    # The method and MOON's network share a name; the projection ends in 256 numbers without an activation.
    spec = InputSpec((1, 28, 28), 255.0, (0.3,), (0.4,))
    x = torch.randint(0, 256, (6, 28, 28, 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    job = dataclasses.replace(task(), inputs=spec, model="moon", x_train=x, y_train=torch.arange(6) % 4, x_test=x)
    job = dataclasses.replace(job, y_test=job.y_train)
    sent = [Payload(common=parameters(build_model("moon", num_classes=4, shape=(1, 28, 28), seed=s))) for s in (1, 2)]
    client(tmp_path, job).train_round(sent[0], 1)
    made = client(tmp_path, job)
    made.train_round(sent[1], 2)
    assert [r.shape for r in made.references] == [(6, 256), (6, 256)]
    assert (made.references[0] < 0).any()
