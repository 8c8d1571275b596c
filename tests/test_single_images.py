"""Batches of one image: a model whose BatchNorm needs two is refused before anything is trained, by every method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clients.base import FedClient
from clients.ktpfl import KTpFLClient
from fedapp import registry
from fedapp.data.transforms import InputSpec
from fedapp.engines.local import RunResult
from fedapp.errors import BadRequest
from fedapp.learning.task import Task
from fedapp.learning.training import needs_two
from fedapp.method import Payload
from fedapp.models import build_model
from tests.handmade import short
from tests.matrix import methods

ALL = tuple(registry.discover())
SOME = ("local", "fedavg", "moon", "fedclassavg", "fml", "fedkd", "fedproto", "ktpfl", "fedfomo", "ccvr")


def task(n: int, model: str = "resnet18", size: int = 28, **train: int) -> Task:
    generator = torch.Generator().manual_seed(n)
    x = torch.randint(0, 256, (n, size, size, 1), generator=generator, dtype=torch.uint8)
    y = torch.arange(n) % 3
    spec = short(**{"batch_size": 4, **train})  # type: ignore[arg-type]
    inputs = InputSpec((1, size, size), 255.0, (0.5,), (0.5,))
    return Task(2, 0, 3, inputs, model, x, y, x[:1], y[:1], train=spec, extras={"public": x.repeat(4, 1, 1, 1)})


def client(method: str, on: Task, **hparams: object) -> FedClient:
    found = registry.get(method)
    values = found.hparams.model_validate(hparams).settled()
    made = registry.resolve(found, values)
    built: FedClient = made.client(on, made, values)
    return built


@pytest.mark.parametrize(
    ("name", "size", "two"),
    [
        ("resnet18", 28, True), ("googlenet", 28, True), ("shufflenetv2", 28, True), ("mobilenetv2", 8, True),
        ("mobilenetv2", 32, False), ("alexnet", 28, False), ("cnn-a", 28, False),
    ],
)  # fmt: skip
def test_which_models_need_two_images(name: str, size: int, two: bool) -> None:
    model = build_model(name, num_classes=3, shape=(1, size, size), seed=0)
    before = {n: a.clone() for n, a in model.state_dict().items()}
    assert needs_two(model, InputSpec((1, size, size), 255.0, (0.5,), (0.5,))) is two
    assert all(torch.equal(a, before[n]) for n, a in model.state_dict().items()), "statistics stay as they were"
    if two:
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            model.train()(torch.zeros(1, 1, size, size))
    else:
        assert torch.isfinite(model.train()(torch.zeros(1, 1, size, size))).all()


@pytest.mark.full
@pytest.mark.parametrize("model", ["resnet18", "googlenet"])
@pytest.mark.parametrize("method", SOME)
def test_a_client_with_one_image_is_refused_when_it_registers(method: str, model: str) -> None:
    with pytest.raises(BadRequest, match=f"one row to train on.*'{model}' needs two.*min-samples = 2"):
        client(method, task(1, model)).register()


def test_the_error_names_validation_where_it_took_the_other_images() -> None:
    whole = task(3, "resnet18")
    split = replace(whole, x_train=whole.x_train[:1], y_train=whole.y_train[:1])
    for n in (1, 2):
        held = replace(split, x_validation=whole.x_train[:n], y_validation=whole.y_train[:n])
        with pytest.raises(
            BadRequest, match=f"since validation holds out {n}, .*: leave out validation, or give it more"
        ):
            client("fedavg", held).register()
    empty = replace(split, x_validation=whole.x_train[:0], y_validation=whole.y_train[:0])
    with pytest.raises(BadRequest, match=r"one row to train on, and .*min-samples = 2 or more"):
        client("fedavg", empty).register()


@pytest.mark.parametrize("method", SOME)
def test_single_images_are_welcome_without_batch_norm(method: str) -> None:
    client(method, task(1, "cnn-a")).register()
    client(method, task(5, "cnn-a", batch_size=1)).register()
    client(method, task(5)).register()


@pytest.mark.parametrize("method", methods(ALL))
def test_batches_of_one_end_a_run_before_round_1(method: str, tiny: Callable[..., RunResult], tmp_path: Path) -> None:
    with pytest.raises(
        BadRequest, match=r"client 0 cannot take part: .*batch-size is 1.*'mobilenetv2'.*batch-size = 2"
    ):
        tiny(method=method, model="mobilenetv2", batch_size=1, clients=2, rounds=1)
    assert not list(tmp_path.rglob("rounds.csv"))


@pytest.mark.parametrize("method", ["fml", "fedkd"])
def test_the_small_model_counts_too(method: str) -> None:
    client(method, task(1, "cnn-a")).register()
    with pytest.raises(BadRequest, match="'googlenet' needs two"):
        client(method, task(1, "cnn-a"), small="googlenet").register()


def test_public_images_come_in_batches_of_two_or_more() -> None:
    with pytest.raises(BadRequest, match="public rows holds one"):
        client("ktpfl", task(8), public_batch=1).register()
    lone = replace(task(8), extras={"public": task(8).x_train[:1]})
    with pytest.raises(BadRequest, match="public rows holds one"):
        client("ktpfl", lone).register()
    for harmless in ({"freeze_bn": True}, {"distil_epochs": 0}):
        client("ktpfl", lone, **harmless).register()
    assert isinstance(client("ktpfl", task(8), public_batch=2), KTpFLClient)
    client("ktpfl", task(8), public_batch=2).register()


def test_an_image_that_would_be_left_over_joins_a_batch() -> None:
    """Five images in batches of four, or three in batches of two: one batch each, none of one image."""
    for n, size in ((5, 4), (3, 2)):
        made = client("local", task(n, batch_size=size))
        made.train_round(Payload(), 1)
        assert made.report.steps == 1 and made.report.samples == n
