"""A local training in phases, a second model that is scored and kept, and where a new client's private parts start."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedapp
from clients._checks import MOVED
from clients._initial import skeleton
from clients.base import FedClient
from fedapp import registry, sampling
from fedapp.learning.state import ClientStore, read_head_norms
from fedapp.learning.task import ModelSpec, Task, with_common_seed
from fedapp.learning.training import Batch, Phase, TrainReport, trained_alone
from fedapp.method import Arrays, BaseHParams, Payload
from fedapp.models import SplitModel
from fedapp.models.selection import everything, extract
from fedapp.privacy import statistics
from fedapp.privacy.clients import noised_client
from strategies._sums import class_sums
from strategies.fedavg import METHOD as FEDAVG
from strategies.local import METHOD as LOCAL
from tests.handmade import (
    assert_close,
    cross_entropy,
    descend,
    digit_tasks,
    digits_context,
    equal,
    model_like,
    one_batch_task,
    pixels,
    whole,
)
from tests.test_gradient_hook import patched
from tests.test_load import hits


class TwoPhases(FedClient):
    """The head at three times the rate, then the trunk on twice the loss."""

    def phases(self) -> Sequence[Phase]:
        spec = self.training
        return [
            Phase(self.step_loss, spec.replaced(lr=3 * spec.lr), ("head.",)),
            Phase(
                lambda batch: 2 * self.step_loss(batch), spec.replaced(local_epochs=2), ("features.",), "batches.trunk"
            ),
        ]


def by_hand(model: SplitModel, prefix: str, factor: float, task: Task) -> SplitModel:
    """SGD in float64 on `factor` times the cross-entropy, of the parameters under a prefix alone."""
    model = copy.deepcopy(model)
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(prefix))
    return descend(model, lambda m: factor * cross_entropy(m(pixels(task)), task.y_train), task)


def test_each_phase_trains_its_part_with_an_optimizer_of_its_own() -> None:
    task = one_batch_task(momentum=0.9)
    sent = model_like(task)
    client = TwoPhases(task, FEDAVG, BaseHParams())
    arrays, _, metrics = client.train_round(whole(sent), 1)
    first = by_hand(sent, "head.", 1, replace(task, train=task.train.replaced(lr=3 * task.train.lr)))
    last = by_hand(first, "features.", 2, replace(task, train=task.train.replaced(local_epochs=2)))
    assert_close(arrays, last, atol=5e-6)
    moved = by_hand(sent, "head.", 1, task), by_hand(first, "features.", 1, task)
    for other, prefix in zip(moved, ("head.", "features.")):
        with pytest.raises(AssertionError):
            assert_close({n: a for n, a in arrays.items() if n.startswith(prefix)}, other, prefix, atol=1e-3)
    assert metrics["steps"] == client.report.steps == 5 and client.report.samples == 60 and client.report.seconds > 0
    one_step = by_hand(first, "features.", 2, replace(task, train=task.train.replaced(local_epochs=1)))
    losses = [2 * cross_entropy(m(pixels(task)), task.y_train).item() for m in (first, one_step)]
    assert metrics["train-loss"] == pytest.approx(np.mean(losses), rel=1e-5), "of the last phase alone"


def test_a_phase_without_steps_leaves_the_loss_of_the_one_before() -> None:
    first, nothing = TrainReport(0.5, 3, 30, 1.0), TrainReport()
    assert first.then(nothing) == first and nothing.then(first) == first
    assert first.then(TrainReport(0.2, 2, 10, 0.5)) == TrainReport(0.2, 5, 40, 1.5)


def test_a_later_phase_draws_other_batches_unless_it_asks_for_the_same() -> None:
    task = one_batch_task(batch_size=4, epochs=2)
    seen: dict[str, list[Tensor]] = {"batches": [], "batches.trunk": []}

    def client(purpose: str, record: list[Tensor]) -> FedClient:
        class Recording(FedClient):
            def loss(self, batch: Batch) -> Tensor:
                record.append(batch.index)
                return self.step_loss(batch)

            def phases(self) -> Sequence[Phase]:
                return [Phase(self.step_loss, self.training), Phase(self.loss, self.training, draws=purpose)]

        return Recording(task, FEDAVG, BaseHParams())

    for purpose, record in seen.items():
        client(purpose, record).train_round(whole(model_like(task)), 1)
    generator = sampling.torch_generator(task.seed, "batches", 1, task.client)
    orders = [torch.cat(seen["batches"])[12 * e : 12 * e + 12] for e in (0, 1)]
    assert all(torch.equal(order, torch.randperm(12, generator=generator)) for order in orders)
    assert not torch.equal(torch.cat(seen["batches"]), torch.cat(seen["batches.trunk"]))


def normalised(seed: int = 0) -> SplitModel:
    """A small model with BatchNorm and dropout, of which the user has frozen one array."""
    torch.manual_seed(seed)
    trunk = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 6), nn.Dropout(0.5))
    trunk[0].weight.requires_grad_(False)
    return SplitModel(name="t", features=trunk, activation=nn.ReLU(), head=nn.Linear(6, 4))


def test_what_is_frozen_gets_no_gradient_and_is_thawed_again() -> None:
    model = normalised()
    trunk = model.features
    assert isinstance(trunk, nn.Sequential)
    with pytest.raises(KeyError), trained_alone(model, ("head.",)) as held:
        assert [p for p in model.parameters() if p.requires_grad] == list(model.head.parameters())
        assert trunk in held and trunk[1] in held and model not in held and model.head not in held
        model(torch.ones(5, 1, 8, 8)).sum().backward()
        assert trunk[3].weight.grad is None and model.head.weight.grad is not None
        raise KeyError
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["features.0.weight"]
    with trained_alone(model, ("",)) as held:
        assert held == []
    with trained_alone(model, ("features.0.", "head.")) as held:
        assert trunk not in held and trunk[0] not in held and trunk[1] in held


def test_running_statistics_move_with_the_trunk_alone() -> None:
    task = one_batch_task(epochs=1)

    class Whole(TwoPhases):
        @classmethod
        def build_model(cls, spec: Any, hparams: Any) -> SplitModel:
            return normalised()

    class HeadAlone(Whole):
        def phases(self) -> Sequence[Phase]:
            return super().phases()[:1]

    sent = normalised(seed=1)
    for kind, moves in ((HeadAlone, False), (Whole, True)):
        client = kind(task, FEDAVG, BaseHParams())
        client.train_round(whole(sent), 1)
        before, after = everything(sent), everything(client.model)
        for name in ("features.1.running_mean", "features.1.running_var", "features.1.num_batches_tracked"):
            assert np.array_equal(before[name], after[name]) != moves, name


class Doubled(FedClient):
    """Predicts with a second model, trained along with the one that travels."""

    needs_state = True

    @functools.cached_property
    def second(self) -> SplitModel:
        return copy.deepcopy(self.model)

    def receive(self, payload: Payload) -> None:
        self.second = copy.deepcopy(self.model)
        super().receive(payload)

    def phases(self) -> Sequence[Phase]:
        loss = lambda batch: self.cross_entropy(self.second(batch.x), batch.y)  # noqa: E731
        return [*super().phases(), Phase(loss, self.training, model=self.second)]

    def after_training(self, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        sent = extract(self.model, self.up_names())
        self.model = self.second
        return sent, {}


def test_the_second_model_is_scored_stored_and_restored(tmp_path: Path) -> None:
    """With the same batches it is what a client alone would have; what travels is FedAvg's."""
    (task,) = digit_tasks(1)
    sent = model_like(task)

    def store(name: str, method: str) -> ClientStore:
        return ClientStore(tmp_path / name, method, "ab")

    both = Doubled(task, FEDAVG, BaseHParams(), store("both", "fedavg"))
    plain = FedClient(task, FEDAVG, BaseHParams(), store("plain", "fedavg"))
    alone = FedClient(task, LOCAL, BaseHParams(), store("alone", "local"))
    first = everything(skeleton(Doubled, task.spec(0), BaseHParams()))
    alone.store.save(0, {f"model/{n}": a for n, a in first.items()})
    for server_round in (1, 2):
        arrays, _, metrics = both.train_round(whole(sent), server_round)
        assert equal(arrays, plain.train_round(whole(sent), server_round)[0])
        expected = alone.train_round(Payload(), server_round)[2]
        for name in ("trained-correct", "trained-loss-sum", "train-loss"):
            assert metrics[name] == expected[name], name
        stored, kept = (c.store.load(server_round + 1) for c in (both, alone))
        assert stored is not None and kept is not None
        assert equal(stored.arrays, kept.arrays)
        norms = [read_head_norms(tmp_path / name, "ab")[1] for name in ("both", "alone")]
        assert np.array_equal(*norms) and len(norms[0]) == server_round
    later = both.evaluate_round(whole(sent), 3, train=False)
    assert later["trained-loss-sum"] == expected["trained-loss-sum"]
    received = plain.evaluate_round(whole(sent), 3)["received-loss-sum"]
    assert later["received-loss-sum"] == received != later["trained-loss-sum"]


def test_the_run_keeps_the_model_that_it_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Any) -> None:
    """`fedapp.load` gives the second model as trained, and what was sent as received."""
    patched(monkeypatch, replace(FEDAVG, id="doubled", client=Doubled))
    for kept in (True, False):
        run = tiny(method="doubled", keep_models=kept, final_training=kept)
        assert registry.get("doubled").client is Doubled
        for client, row in run.final.set_index("client").iterrows():
            assert hits(fedapp.load(run.out, int(client)), run, int(client)) == row["trained_correct"]
            if kept:
                net = fedapp.load(run.out, int(client), point="received")
                assert hits(net, run, int(client)) == row["received_correct"]


@pytest.mark.parametrize("common", [True, False])
def test_private_parts_start_like_the_servers_model_or_with_a_seed_of_their_own(common: bool) -> None:
    class Client(FedClient):
        @classmethod
        def build_model(cls, spec: ModelSpec, hparams: Any) -> SplitModel:
            return super().build_model(with_common_seed(spec) if common else spec, hparams)

    tasks = digit_tasks(2)
    initial = digits_context(FEDAVG, BaseHParams(), tasks).initial
    heads = []
    for task in tasks:
        client = Client(task, LOCAL, BaseHParams())
        client.restore(4, Payload())
        heads.append(extract(client.model, ["head.weight", "head.bias"]))
    assert equal(heads[0], heads[1]) == common
    assert equal(heads[0], {n: initial[n] for n in heads[0]}) == common


def test_after_each_step_the_client_sees_its_batch_and_the_new_model() -> None:
    task = one_batch_task(batch_size=4, epochs=2)
    seen: list[tuple[int, bool]] = []

    class Watching(FedClient):
        def before_training(self, payload: Payload) -> None:
            self.last = self.snapshot()

        def after_step(self, batch: Batch) -> None:
            seen.append((len(batch.y), all(torch.equal(a, b) for a, b in zip(self.last, self.snapshot(), strict=True))))
            self.last = self.snapshot()

    client = Watching(task, FEDAVG, BaseHParams())
    client.train_round(whole(model_like(task)), 1)
    assert seen == [(4, False)] * 6 and client.report.steps == 6


def test_a_phase_on_other_rows_trains_on_them_and_is_not_in_the_report() -> None:
    task = one_batch_task(epochs=1)
    rows = task.x_train[:5], task.y_train[:5]
    seen: list[int] = []

    class Partly(FedClient):
        def loss(self, batch: Batch) -> Tensor:
            seen.append(len(batch.y))
            return self.step_loss(batch)

        def phases(self) -> Sequence[Phase]:
            return [Phase(self.loss, self.training, draws="part", rows=rows), *super().phases()]

    client = Partly(task, FEDAVG, BaseHParams())
    client.train_round(whole(model_like(task)), 1)
    assert seen == [5] and client.report.samples == 12 and client.epochs() == 1


def test_the_query_before_round_1_has_a_function_of_its_own() -> None:
    class Prepared(FedClient):
        def answer_prepare(self, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
            return {"sum": self.task.x_train.double().sum(dim=0).numpy()}, {}

    task = one_batch_task()
    sent = whole(model_like(task))
    arrays, count, numbers = Prepared(task, FEDAVG, BaseHParams()).answer_query("prepare", sent, 0)
    assert list(arrays) == ["sum"] and count == 12 and not numbers
    with pytest.raises(ValueError, match=r"'query\.prepare'"):
        FedClient(task, FEDAVG, BaseHParams()).answer_query("prepare", sent, 0)


def test_with_noise_the_answer_before_round_1_is_the_noised_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found, hparams = registry.configured("fed3r", "base=none")
    early = replace(found, reduces={"train": {}, "prepare": {"sums": class_sums(np.float64, False, False)}})
    client = noised_client(early, hparams)(one_batch_task(), early, hparams)
    monkeypatch.setattr(statistics, "release", lambda client, batches, moments, kind: {"count": np.array([len(kind)])})
    arrays, _, _ = client.answer_query("prepare", whole(model_like(client.task)), 0)
    assert {n: a.tolist() for n, a in arrays.items()} == {"sums/count": [7]}


@pytest.mark.parametrize("name", MOVED)
def test_a_function_of_earlier_versions_is_refused_where_its_class_is_made(name: str) -> None:
    with pytest.raises(TypeError, match=f"Own.{name} is never called: write "):
        type("Own", (FedClient,), {name: lambda self: None})


def test_a_client_with_its_own_score_states_that_the_stored_model_predicts_it() -> None:
    own: type[FedClient] = type("Own", (FedClient,), {"score": FedClient.score})
    assert not own.alone and not type("Heir", (own,), {}).alone and FedClient.alone
    assert type("Stated", (FedClient,), {"score": FedClient.score, "alone": True}).alone


@pytest.mark.parametrize(
    ("method", "args"),
    [("fedrep", "head_epochs=4"), ("fedpac", "head_epochs=4"), ("fedbabu", "tune=head tune_epochs=4")],
)
def test_a_phase_of_the_head_passes_the_trunk_once(method: str, args: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the numbers of a pass in each epoch, to float rounding; with augmentation each epoch has a pass."""
    task = digit_tasks(1)[0]
    kind, hparams = registry.configured(method, args)
    heads, passes = [], []
    for once, augment in ((True, "none"), (False, "none"), (True, "weak")):
        c = kind.client(replace(task, train=task.train.replaced(augment=augment)), kind, hparams)
        with monkeypatch.context() as patch:
            if not once:
                patch.setattr(FedClient, "_trains_head_alone", lambda self, phase, held: False)
            c.model, c.round = model_like(task), 1
            rows: list[int] = []
            c.model.features.register_forward_hook(lambda m, x, z, seen=rows: seen.append(len(z)))
            before = extract(c.model, everything(c.model))
            c.run_phase((c.tuning() if method == "fedbabu" else c.phases())[0])
        after = extract(c.model, everything(c.model))
        assert all(np.array_equal(after[n], before[n]) == n.startswith("features.") for n in before)
        passes.append(sum(rows) / task.num_samples)
        heads.append(after["head.weight"] - before["head.weight"])
    assert passes == [1, 4, 4]
    np.testing.assert_allclose(heads[0], heads[1], rtol=1e-4, atol=1e-6)


class Dropping(SplitModel):
    """Has dropout between body and activation."""

    def represent(self, x: Tensor) -> Tensor:
        return self.activation(nn.functional.dropout(self.features(x), training=self.training))


@pytest.mark.parametrize("where", ["activation", "represent"])
def test_dropout_outside_the_body_is_active_in_each_epoch(where: str) -> None:
    task = digit_tasks(1)[0]
    method, hparams = registry.configured("fedrep", "head_epochs=4")
    c = method.client(task, method, hparams)
    c.model, c.round = model_like(task), 1
    passes: list[bool] = []
    if where == "represent":
        c.model.__class__ = Dropping
    else:
        c.model.activation = nn.Dropout()
    c.model.features.register_forward_hook(lambda m, x, z: passes.append(c.model.training))
    c.run_phase(c.phases()[0])
    assert len(passes) > 4 and all(passes)
