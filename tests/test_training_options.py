"""Optimizers, learning rates by round and by step, and class weights: against PyTorch's classes and loops by hand."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch.nn import functional as F

from clients.base import FedClient
from clients.fedclassavg import FedClassAvgHParams
from clients.ktpfl import KTpFLHParams, KTpFLWeightsClient
from fedapp import registry
from fedapp.config import from_flat
from fedapp.data.transforms import normalise
from fedapp.engines.local import RunResult, run
from fedapp.errors import BadRequest
from fedapp.learning import training
from fedapp.learning.optimizers import (
    REFUSED_OPTIMIZERS,
    REFUSED_SCHEDULERS,
    optimizer_class,
    optimizers,
    parameters_of,
    round_rates,
    scheduled,
    schedulers,
    takes,
)
from fedapp.learning.task import Task
from fedapp.learning.training import class_weights, epoch_batches, make_optimizer, rate_in, step_rates
from fedapp.method import BaseHParams, Payload
from fedapp.settings import TrainingSettings
from fedapp.tasks import simulated
from fedapp.tasks.node import Node, node_task
from strategies.fedavg import METHOD as FEDAVG
from strategies.fedclassavg import METHOD as FEDCLASSAVG
from strategies.ktpfl import METHOD as KTPFL
from tests.handmade import (
    cross_entropy,
    deterministic,
    model_like,
    one_batch_task,
    pixels,
    short,
    whole,
)
from tests.matrix import methods
from tests.test_training import INPUTS, Update, data, flat, go, network, plain

Tiny = Callable[..., RunResult]

# ---- optimizers ------------------------------------------------------------------------------------------------------

CLASSES = {
    "sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam, "rmsprop": torch.optim.RMSprop, "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta, "adamax": torch.optim.Adamax, "asgd": torch.optim.ASGD,
    "adafactor": torch.optim.Adafactor, "rprop": torch.optim.Rprop,
}  # fmt: skip


def test_the_names_are_those_of_torch() -> None:
    """They are read from the text of its modules; the classes themselves say the same."""
    assert {name: optimizer_class(name) for name in optimizers()} == CLASSES
    found = {n.lower(): c for n, c in vars(torch.optim).items() if isinstance(c, type) and n != "Optimizer"}
    assert {n for n, c in found.items() if issubclass(c, torch.optim.Optimizer)} == {*CLASSES, *REFUSED_OPTIMIZERS}
    for name, cls in CLASSES.items():
        for argument in ("lr", "momentum", "weight_decay", "betas", "nesterov"):
            assert takes(name, argument) == (argument in parameters_of(cls)), (name, argument)
    assert set(REFUSED_OPTIMIZERS) == {"lbfgs", "muon", "sparseadam"}


@pytest.mark.parametrize("name", CLASSES)
def test_an_optimizer_is_torchs_with_the_runs_settings(name: str) -> None:
    """Two epochs give the bits of a loop with PyTorch's own class; what is not given is PyTorch's default."""
    decay = {} if name == "rprop" else {"weight_decay": 0.02}
    momentum = {"momentum": 0.7} if name in ("sgd", "rmsprop") else {}
    fast, slow = network(), network()
    go(fast, short(local_epochs=2, batch_size=16, lr=0.003, optimizer=name, momentum=0.7, weight_decay=0.02))
    optimizer = CLASSES[name](slow.parameters(), lr=0.003, **decay, **momentum)
    x, y = data()
    generator = torch.Generator().manual_seed(5)
    for _ in range(2):
        for raw, labels, _ in epoch_batches(x, y, 16, generator):
            optimizer.zero_grad()
            F.cross_entropy(slow(normalise(raw, INPUTS)), labels).backward()
            optimizer.step()
    assert torch.equal(flat(fast), flat(slow)) and not torch.equal(flat(fast), flat(network()))


def nesterov(lr: float, momentum: float) -> Update:
    """v <- momentum v + g; p <- p - lr (g + momentum v), with v = g in the first step."""
    memory: dict[int, torch.Tensor] = {}

    def update(p: torch.Tensor, g: torch.Tensor, step: int) -> torch.Tensor:
        memory[id(p)] = g if step == 1 else momentum * memory[id(p)] + g
        return p - lr * (g + momentum * memory[id(p)])

    return update


PARTS = [(0, 17), (17, 34), (34, 50)]


def test_arguments_reach_the_optimizer() -> None:
    fast, slow = network(), network().double()
    start = flat(fast).double()
    go(fast, short(batch_size=16, lr=0.1, momentum=0.8, optimizer_args="nesterov=true"))
    plain(slow, nesterov(0.1, 0.8), 0.0, 0.0, PARTS, 1)
    assert float((flat(fast) - flat(slow)).norm()) < 1e-4 * float((flat(slow) - start).norm())


def test_arguments_have_the_type_of_the_signature() -> None:
    spec = short(optimizer="adafactor", optimizer_args="eps=none,0.01 d=2 beta2-decay=-0.5 foreach=none")
    defaults = make_optimizer(network().parameters(), spec).defaults
    assert (defaults["eps"], defaults["d"], defaults["beta2_decay"]) == ((None, 0.01), 2, -0.5)


def test_given_betas_go_before_the_methods_own() -> None:
    """FedClassAvg's `beta1` is for whichever optimizer has betas; what the user gives counts more."""
    one = FEDCLASSAVG.client(one_batch_task(), FEDCLASSAVG, FedClassAvgHParams())
    (phase,) = one.planned()
    for name in ("adam", "adamw", "nadam"):
        spec = short(optimizer=name)
        assert make_optimizer(network().parameters(), spec, phase.betas).defaults["betas"] == (0.5, 0.999)
        spec = spec.replaced(optimizer_args="betas=0.8,0.99")
        assert make_optimizer(network().parameters(), spec, phase.betas).defaults["betas"] == (0.8, 0.99)


def test_weight_decay_and_momentum_are_the_runs_and_not_torchs() -> None:
    """AdamW's constructor would decay by 0.01 unasked."""
    adamw = from_flat({"method": "fedavg", "optimizer": "adamw"}).training
    assert make_optimizer(network().parameters(), adamw).defaults["weight_decay"] == 0
    rms = from_flat({"method": "fedavg", "optimizer": "rmsprop"})
    assert rms.training.momentum == 0.0, "auto is PyTorch's default"
    rms = from_flat({"method": "fedavg", "optimizer": "rmsprop", "momentum": 0.6})
    assert make_optimizer(network().parameters(), rms.training).defaults["momentum"] == 0.6
    assert from_flat({"optimizer": "rprop"}).training.weight_decay == 0.0


# ---- learning rates by round -----------------------------------------------------------------------------------------


def cosine(t: int, length: int, lr: float = 0.2, low: float = 0.0) -> float:
    return low + (lr - low) * (1 + math.cos(math.pi * t / length)) / 2


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("CosineAnnealingLR", lambda t: cosine(t, 8)),
        ("CosineAnnealingLR T_max=4 eta_min=0.01", lambda t: cosine(t, 4, low=0.01)),
        ("StepLR step_size=3 gamma=0.5", lambda t: 0.2 * 0.5 ** (t // 3)),
        ("MultiStepLR milestones=2,5", lambda t: 0.2 * 0.1 ** ((t >= 2) + (t >= 5))),
        ("MultiStepLR milestones=2", lambda t: 0.2 * 0.1 ** (t >= 2)),
        ("ExponentialLR gamma=0.9", lambda t: 0.2 * 0.9**t),
        ("LinearLR start_factor=1 end_factor=0.2", lambda t: 0.2 * (1 - 0.8 * t / 8)),
        ("PolynomialLR power=2", lambda t: 0.2 * (1 - t / 8) ** 2),
        ("ConstantLR factor=0.5 total_iters=3", lambda t: 0.1 if t < 3 else 0.2),
        ("CosineAnnealingWarmRestarts T_0=3", lambda t: cosine(t % 3, 3)),
        ("CyclicLR base_lr=0.1 max_lr=0.5 step_size_up=2", lambda t: 0.1 + 0.2 * (2 - abs(t % 4 - 2))),
    ],
)  # fmt: skip
def test_rates_are_those_of_the_closed_form(text: str, rate: Callable[[int], float]) -> None:
    assert scheduled("lr-schedule", text, 0.2, 8) == pytest.approx([rate(t) for t in range(8)], rel=1e-9, abs=1e-15)


def test_rates_are_torchs_to_the_last_bit() -> None:
    """The whole of OneCycleLR, stepped with a real optimizer."""
    optimizer = torch.optim.SGD(network().parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.4, total_steps=11)
    rates = []
    for step in range(11):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step < 10:
            scheduler.step()
    assert list(scheduled("lr-schedule", "OneCycleLR max_lr=0.4", 0.2, 11)) == rates


def test_every_scheduler_that_is_offered_makes_rates() -> None:
    needed = {
        "StepLR": " step_size=2", "MultiStepLR": " milestones=3", "ExponentialLR": " gamma=0.5",
        "CosineAnnealingWarmRestarts": " T_0=2", "CyclicLR": " base_lr=0.1 max_lr=1", "OneCycleLR": " max_lr=1",
    }  # fmt: skip
    known = torch.optim.lr_scheduler
    heirs = {n for n, c in vars(known).items() if isinstance(c, type) and issubclass(c, known.LRScheduler)}
    assert {*schedulers(), *REFUSED_SCHEDULERS} == heirs - {"LRScheduler", "_LRScheduler"}
    for name in schedulers():
        for count in (1, 2, 5):
            assert len(scheduled("lr-schedule", name + needed.get(name, ""), 0.1, count)) == count, name


def test_a_warm_up_rises_linearly_and_the_schedule_fills_what_is_left() -> None:
    rates = round_rates(0.2, "CosineAnnealingLR", 3, 10)
    assert rates == pytest.approx([0.05, 0.1, 0.15, *(cosine(t, 7) for t in range(7))])
    assert round_rates(0.2, "", 1, 3) == (0.1, 0.2, 0.2)
    assert round_rates(0.2, "", 0, 3) == (), "nothing to do"
    low = round_rates(0.2, "LinearLR start_factor=0.5", 1, 5)
    assert low[:2] == pytest.approx([0.05, 0.1]), "the rise ends at the schedule's own first rate"


def test_after_the_last_round_its_rate_stays() -> None:
    assert [rate_in(t, (0.3, 0.2, 0.1), 0.3) for t in (1, 2, 3, 4, 9)] == [0.3, 0.2, 0.1, 0.1, 0.1]
    assert rate_in(7, (), 0.3) == 0.3, "without a schedule a round changes nothing"


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The learning rate of every optimizer that is built in this process."""
    found: list[float] = []
    original = training.make_optimizer

    def make(parameters: Any, spec: TrainingSettings, *args: Any) -> torch.optim.Optimizer:
        optimizer = original(parameters, spec, *args)
        found.append(float(optimizer.param_groups[0]["lr"]))
        return optimizer

    monkeypatch.setattr(training, "make_optimizer", make)
    return found


def test_each_round_of_a_run_has_its_rate_and_the_final_training_the_last_one(used: list[float], tiny: Tiny) -> None:
    """Two clients a round, and an evaluation after round 1: its training is that of round 2 to come."""
    tiny(
        method="fedavg", clients=2, rounds=3, lr=0.08, lr_schedule="StepLR step_size=1 gamma=0.5", evaluate_every=1,
        warmup_rounds=1,
    )  # fmt: skip
    rates = [0.04] * 2 + [0.08] * 2 + [0.08] * 2 + [0.04] * 2 + [0.04] * 2 + [0.04] * 2
    assert used == pytest.approx(rates)


@pytest.mark.full
@pytest.mark.parametrize("method", ["fml", "fedkd", "moon", "fedgh", "fd", "ktpfl"])
def test_methods_with_several_models_follow_the_schedule(method: str, used: list[float], tiny: Tiny) -> None:
    """One optimizer for both models (FML, FedKD); KT-pFL's distillation, from round 2 on, has the round's rate too."""
    tiny(method=method, clients=2, rounds=2, lr=0.08, lr_schedule="StepLR step_size=1 gamma=0.25", final_training=False)
    assert used == pytest.approx([0.08] * 2 + [0.02] * (4 if method == "ktpfl" else 2))


def test_a_schedule_of_equal_rates_changes_no_bit(tiny: Tiny) -> None:
    plain_run = tiny(method="fedavg", fraction_train=0.7)
    same = tiny(
        method="fedavg", fraction_train=0.7, lr_schedule="ConstantLR factor=1", lr_schedule_steps="ConstantLR factor=1"
    )
    for a, b in ((plain_run.rounds, same.rounds), (plain_run.final, same.final)):
        assert deterministic(a).equals(deterministic(b))


def test_kt_pfl_by_weight_moves_with_the_rate_of_the_round() -> None:
    task = one_batch_task(model="digits-a", lr=0.1)
    task = replace(task, rates=(0.1, 0.05))
    hparams = KTpFLHParams(share="weights")
    made = KTpFLWeightsClient(task, registry.resolve(KTPFL, hparams), hparams)
    made.restore(2, Payload(arrays={"target": np.zeros(0)}))
    before = {n: p.detach().clone() for n, p in made.model.named_parameters()}
    size = sum(made.model.state_dict()[n].numel() for n in made.up_names())
    made.round, made.target = 2, torch.zeros(size)
    made.before_training(Payload())
    for name, p in made.model.named_parameters():
        torch.testing.assert_close(p.detach(), 0.9 * before[name])  # 1 - 2 * 0.05


def test_a_warm_up_of_fedclassavg_has_the_rate_of_round_1(used: list[float], tiny: Tiny) -> None:
    """Whenever it is computed: with one of three clients in round 1, the others warm up later."""
    tiny(
        method="fedclassavg", method_args="preset=authors", rounds=3, fraction_train=0.34, lr=0.001, optimizer="adam",
        lr_schedule="StepLR step_size=1 gamma=0.5", final_training=False,
    )  # fmt: skip
    trainings, warmups = [0.001, 0.0005, 0.00025], used.count(0.001) - 1
    assert warmups >= 2 and sorted(used) == pytest.approx(sorted(trainings + [0.001] * warmups))


# ---- resume ----------------------------------------------------------------------------------------------------------

SCHEDULED = {"method": "fedavg", "fraction_train": 0.7, "lr_schedule": "CosineAnnealingLR T_max=4"}


@pytest.mark.full
def test_a_resumed_run_has_the_numbers_of_one_in_one_go(tiny: Tiny) -> None:
    """With its length in the schedule, a run can also be continued for more rounds."""
    at_once, part = tiny(rounds=4, **SCHEDULED), tiny(rounds=2, **SCHEDULED)
    rest = run(resume=part.out, rounds=4)
    for a, b in ((at_once.rounds, rest.rounds), (at_once.final, rest.final)):
        assert deterministic(a).equals(deterministic(b))
    constant = tiny(rounds=4, method="fedavg", fraction_train=0.7)
    assert not deterministic(constant.rounds).equals(deterministic(rest.rounds)), "the schedule counts here"


def test_more_rounds_than_a_schedule_was_made_for_are_refused(tiny: Tiny) -> None:
    part = tiny(**{**SCHEDULED, "lr_schedule": "CosineAnnealingLR", "rounds": 2})
    before = (part.out / "summary.json").read_text()
    with pytest.raises(BadRequest, match=r"rates of rounds 1 to 2 were made for 2 rounds: resume without --rounds"):
        run(resume=part.out, rounds=4)
    assert (part.out / "summary.json").read_text() == before
    assert run(resume=part.out).summary["rounds"] == 2


# ---- learning rates by step ------------------------------------------------------------------------------------------


def test_a_schedule_over_the_steps_is_a_factor_of_the_rounds_rate() -> None:
    """Six steps of 2 epochs in round 2, against SGD by hand with a rate for each step."""
    spec = short(
        local_epochs=2, batch_size=16, lr=0.2, momentum=0.5,
        lr_schedule_steps="LinearLR start_factor=1 end_factor=0.4",
    )  # fmt: skip
    rates = [0.1 * (1 - 0.6 * i / 6) for i in range(6)]
    assert step_rates(spec, 0.1, 6) == pytest.approx(rates)
    memory: dict[int, torch.Tensor] = {}

    def update(p: torch.Tensor, g: torch.Tensor, step: int) -> torch.Tensor:
        memory[id(p)] = g if step == 1 else 0.5 * memory[id(p)] + g
        return p - rates[step - 1] * memory[id(p)]

    fast, slow = network(), network().double()
    start = flat(fast).double()
    go(fast, spec, rate=0.1)
    plain(slow, update, 0.0, 0.0, PARTS, 2)
    assert float((flat(fast) - flat(slow)).norm()) < 1e-4 * float((flat(slow) - start).norm())


def test_absolute_rates_of_a_step_schedule_are_relative_to_lr() -> None:
    one_cycle = "OneCycleLR max_lr=0.4"
    whole_rate = step_rates(short(lr=0.2, lr_schedule_steps=one_cycle), 0.2, 10)
    assert whole_rate == scheduled("lr-schedule-steps", one_cycle, 0.2, 10) and max(whole_rate) == 0.4
    half = step_rates(short(lr=0.2, lr_schedule_steps=one_cycle), 0.1, 10)
    assert half == pytest.approx([r / 2 for r in whole_rate])


def test_too_few_steps_in_a_schedule_are_refused_before_training() -> None:
    task = one_batch_task(epochs=3)
    spec = task.train.replaced(lr_schedule_steps="OneCycleLR max_lr=0.1 total_steps=1")
    with pytest.raises(BadRequest, match=r"lr-schedule-steps = .* cannot give 3 rates"):
        FedClient(replace(task, train=spec), FEDAVG, BaseHParams()).register()


@pytest.mark.parametrize(
    ("method", "long", "short"),
    [
        ("fedrep", "head_epochs=4 body_epochs=1", "head_epochs=1 body_epochs=2"),
        ("fedrep", "head_epochs=1 body_epochs=4", "phases=joint"),
        ("ditto", "personal_epochs=4", "personal_epochs=1"),
    ],
)
def test_too_few_steps_for_a_phase_are_refused_before_training(method: str, long: str, short: str) -> None:
    """The rates are enough for two passes, as `local-epochs` has them."""
    task, found = one_batch_task(epochs=2), registry.get(method)
    task = replace(task, train=task.train.replaced(lr_schedule_steps="OneCycleLR max_lr=0.1 total_steps=2"))
    with pytest.raises(BadRequest, match=r"lr-schedule-steps = .* cannot give 4 rates"):
        found.client(task, found, registry.parse_args(found, long)).register()
    found.client(task, found, registry.parse_args(found, short)).register()


# ---- class weights ---------------------------------------------------------------------------------------------------

LABELS = torch.tensor([0] * 7 + [1] * 3 + [3] * 2)


def weighted(task: Task, weights: str) -> Task:
    return replace(task, train=task.train.replaced(class_weights=weights))


def test_balanced_weights_are_scikit_learns() -> None:
    found = class_weights("balanced", LABELS, 5)
    assert found is not None and found.dtype == torch.float32
    expected = compute_class_weight("balanced", classes=np.array([0, 1, 3]), y=LABELS.numpy())
    np.testing.assert_allclose(found[[0, 1, 3]], expected, rtol=1e-6)
    assert found[[2, 4]].tolist() == [0, 0], "classes that the client lacks"
    assert float(found[LABELS].mean()) == pytest.approx(1), "the mean weight of a sample, so lr keeps its meaning"
    assert class_weights("none", LABELS, 5) is None
    given = class_weights("1,2,0,0.5,3", LABELS, 5)
    assert given is not None and given.tolist() == [1, 2, 0, 0.5, 3]


def test_a_wrong_number_of_weights_is_refused_before_training() -> None:
    with pytest.raises(BadRequest, match="class-weights has 3 numbers, but the data have 4 classes"):
        FedClient(weighted(one_batch_task(classes=4), "1,2,3"), FEDAVG, BaseHParams()).register()


def test_the_loss_with_weights_is_the_mean_over_the_classes() -> None:
    """The printed loss of an epoch is that of all samples, whatever batches they came in."""
    task = replace(one_batch_task(epochs=1, lr=1e-9, batch_size=5, momentum=0.0), y_train=LABELS)
    model = model_like(task)
    _, _, metrics = FedClient(weighted(task, "balanced"), FEDAVG, BaseHParams()).train_round(whole(model), 1)
    logits = model.double()(pixels(task)).detach()
    rows = [torch.nonzero(LABELS.eq(c)).flatten() for c in (0, 1, 3)]
    by_class = [float(cross_entropy(logits[r], LABELS[r])) for r in rows]
    assert metrics["steps"] == 2 and metrics["train-loss"] == pytest.approx(np.mean(by_class), rel=1e-5)
    _, _, metrics = FedClient(weighted(task, "1,0,5,2"), FEDAVG, BaseHParams()).train_round(whole(model), 1)
    total = 7 * by_class[0] + 2 * 2 * by_class[2]
    assert metrics["train-loss"] == pytest.approx(total / 12, rel=1e-5)


def test_equal_weights_are_no_weights() -> None:
    task = one_batch_task()
    sent = whole(model_like(task))
    found = [
        FedClient(weighted(task, text), FEDAVG, BaseHParams()).train_round(sent, 1)[0] for text in ("none", "1,1,1,1")
    ]
    for name, array in found[0].items():
        np.testing.assert_allclose(found[1][name], array, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("method", methods())
def test_every_method_weighs_its_supervised_loss(method: str, monkeypatch: pytest.MonkeyPatch, tiny: Tiny) -> None:
    """In every step, once for each model that learns from labels; no other cross-entropy of labels is taken."""
    seen: list[float] = []
    mean = F.cross_entropy

    def unweighted(logits: Any, y: Any, weight: Any = None, **further: Any) -> Any:
        if sys._getframe(1).f_globals["__name__"].startswith("clients."):
            assert weight is not None or y.is_floating_point(), "a mean over labels without weights"
        return mean(logits, y, weight, **further)

    def spy(self: FedClient, logits: Any, y: Any, original: Any = FedClient.cross_entropy) -> Any:
        loss = original(self, logits, y)
        seen.append(float(loss.detach()))
        return loss

    original_tuning = FedClient.tune_to_score

    def tunes(self: FedClient, *given: Any, **further: Any) -> Any:
        before = len(seen)
        found = original_tuning(self, *given, **further)
        del seen[before:]  # no steps of a round
        return found

    monkeypatch.setattr(F, "cross_entropy", unweighted)
    monkeypatch.setattr(FedClient, "cross_entropy", spy)
    monkeypatch.setattr(FedClient, "tune_to_score", tunes)
    result = tiny(method=method, rounds=1, class_weights="balanced", final_training=False)
    assert len(seen) == result.clients["steps"].sum() * (2 if method in ("fml", "fedkd", "fedrod") else 1) > 0


def test_a_simulation_counts_the_weights_before_it_starts() -> None:
    with pytest.raises(BadRequest, match="class-weights has 2 numbers, but the data have 10 classes"):
        simulated.check(from_flat({"method": "fedavg", "clients": 3, "class-weights": "1,2"}), 3)


# ---- on real nodes ---------------------------------------------------------------------------------------------------


def test_a_node_trains_as_the_run_says(tmp_path: Path) -> None:
    """A node with its own data takes optimizer, rates and weights from the run-config that every message brings."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 17, (20, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", x_train=x, y_train=np.arange(20) % 4, x_test=x[:4], y_test=np.arange(4))
    config = from_flat({
        "method": "fedavg", "class-names": "0,1,2,3", "optimizer": "rmsprop", "optimizer-args": "centered=true",
        "num-server-rounds": 2, "lr": 0.2, "lr-schedule": "StepLR step_size=1 gamma=0.5", "class-weights": "1,2,3,4",
        "lr-schedule-steps": "LinearLR",
    })  # fmt: skip
    node = Node.parse({"client-id": 0, "data-path": str(tmp_path / "own.npz"), "model": "digits-b"})
    one = FedClient(node_task(config, node, torch.device("cpu")), FEDAVG, BaseHParams())
    one.register()
    rates = []
    for server_round in (1, 2, 3):
        one.round = server_round
        rates.append(one.rate)
    assert rates == [0.2, 0.1, 0.1]
    assert one.class_weights is not None and one.class_weights.tolist() == [1, 2, 3, 4]
    optimizer = make_optimizer(network().parameters(), one.training)
    assert isinstance(optimizer, torch.optim.RMSprop) and optimizer.defaults["centered"]
    assert len(step_rates(one.training, one.rate, 5)) == 5


# ---- the loss that is printed ----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("method", methods())
def test_the_training_loss_is_what_the_optimizer_minimised(
    method: str, monkeypatch: pytest.MonkeyPatch, tiny: Tiny
) -> None:
    """Per client: the mean over all images of both epochs of what was differentiated, with all terms and weights.

    What is differentiated before the local training (KT-pFL's distillation, FedClassAvg's warm-up) is not in it, nor
    are phases before the last one. In round 2 the terms are not 0, since something was received.
    """
    losses: list[tuple[float, int]] = []
    found: list[tuple[int, int, float]] = []
    original, run_phases = training.train, FedClient.run_phases

    def train(model: Any, x: Any, y: Any, phase: Any, *args: Any, **further: Any) -> Any:
        def seen(batch: Any) -> Any:
            loss = phase.loss(batch)
            loss.register_hook(lambda gradient: losses.append((float(loss.detach()), len(batch.y))))
            return loss

        losses.clear()
        return original(model, x, y, replace(phase, loss=seen), *args, **further)

    def watched(self: FedClient) -> Any:
        report = run_phases(self)
        mean = sum(loss * n for loss, n in losses) / sum(n for _, n in losses)
        found.append((self.round, self.task.client, mean))
        return report

    monkeypatch.setattr("clients.base.train", train)
    monkeypatch.setattr(FedClient, "run_phases", watched)
    result = tiny(method=method, rounds=2, local_epochs=2, class_weights="balanced", final_training=False)
    table = result.clients.set_index(["round", "client"])["train_loss"]
    assert len(found) == len(table) == 6
    for server_round, client_id, loss in found:
        assert table[server_round, client_id] == pytest.approx(loss, rel=1e-5)
    whole_round = result.rounds.set_index("round")["train_loss"]
    for server_round in (1, 2):
        assert whole_round[server_round] == pytest.approx(
            np.mean([m for t, _, m in found if t == server_round]), rel=1e-5
        )


def test_every_method_is_in_the_table_of_training_losses() -> None:
    page = (Path(__file__).parent.parent / "docs" / "training.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]*) \|", page.partition("## What `train_loss` is")[2].partition("\n## ")[0], flags=re.M)
    named = [name for row in rows[1:] for name in row.split(", ")]
    assert sorted(named) == sorted(n for m in registry.discover().values() for n in m.title.split(", "))
