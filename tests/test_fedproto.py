"""FedProto: worked numbers, class-by-class oracle, reduction to Standalone, missing classes, both inference modes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from clients._models import NearestPrototype
from clients.base import FedClient
from clients.fedproto import FedProtoClient, FedProtoHParams, NearestPrototypeClient, prototype_loss
from fedapp import config as configuration
from fedapp.data.transforms import normalise
from fedapp.engines.local import RunResult
from fedapp.errors import BadRequest
from fedapp.learning.training import Batch
from fedapp.method import Payload, Reply, ServerContext, ServerState
from fedapp.models import build_model
from fedapp.tasks import simulated as tasks
from strategies.fedproto import METHOD, FedProto
from tests.handmade import full_batch, images, participants, refusal, steps_by_hand


def strategy(width: int = 2, classes: int = 3, **hparams: Any) -> tuple[FedProto, ServerState]:
    made = FedProto(METHOD, FedProtoHParams(**hparams))
    context = ServerContext(0, (), classes, width, {}, lambda k: {}, lambda *a: np.random.default_rng(0))
    return made, made.init(context)


def reply(client: int, rows: Mapping[int, Sequence[float]], counts: Sequence[int] | None = None) -> Reply:
    arrays = {"protos": np.array(list(rows.values()), np.float32), "labels": np.array(list(rows), np.int32)}
    if counts is not None:
        arrays["counts"] = np.array(counts, np.int32)
    return Reply(client, 5, arrays, {})


WORKED = [({0: [0.9, 0.2], 1: [0.2, 1.0]}, [2, 3]), ({1: [0.4, 0.6], 2: [0.6, 0.6]}, [1, 4])]


@pytest.mark.parametrize(
    ("average", "expected"),
    [("plain", [[0.9, 0.2], [0.3, 0.8], [0.6, 0.6]]), ("count", [[0.9, 0.2], [0.25, 0.9], [0.6, 0.6]])],
)
def test_worked_averages(average: str, expected: list[list[float]]) -> None:
    server, state = strategy(average=average)
    replies = [reply(k, rows, counts if average == "count" else None) for k, (rows, counts) in enumerate(WORKED)]
    assert all(refusal(server, {}, r) is None for r in replies)
    np.testing.assert_allclose(server.aggregate(state, 1, iter(replies))["protos"], expected, atol=1e-7)


def test_worked_losses() -> None:
    z = torch.tensor([[1.0, 0], [0, 1], [0.5, 0.5]])
    y = torch.tensor([0, 1, 2])
    protos = torch.tensor([[0.9, 0.2], [0.3, 0.8], [0.6, 0.6]])
    known = torch.ones(3, dtype=torch.bool)
    assert float(prototype_loss(z, y, protos, known)) == pytest.approx(0.033333, abs=1e-6)
    assert float(prototype_loss(z, y, protos, known, "squared")) == pytest.approx(0.066667, abs=1e-6)
    assert float(prototype_loss(z, y, protos, known, "norm")) == pytest.approx(0.241861, abs=1e-6)
    assert float(prototype_loss(z, y, protos, torch.tensor([True, True, False]))) == pytest.approx(0.03, abs=1e-6)
    assert float(prototype_loss(z, y, protos, torch.zeros(3, dtype=torch.bool))) == 0.0


def test_worked_inference() -> None:
    protos = torch.tensor([[0.9, 0.2], [0.3, 0.8], [0.6, 0.6]])
    z = torch.tensor([[0.55, 0.75]])
    model = build_model("digits-b", num_classes=3, shape=(1, 8, 8), seed=0)
    everything = NearestPrototype(model, protos, torch.ones(3, dtype=torch.bool)).logits(z)
    torch.testing.assert_close(everything, -torch.tensor([[0.2125, 0.0325, 0.0125]]))
    without = NearestPrototype(model, protos, torch.tensor([True, True, False])).logits(z)
    assert int(without.argmax()) == 1
    torch.testing.assert_close(without, -torch.tensor([[0.2125, 0.0325, 100.2125]]))


def test_norm_has_a_finite_gradient_on_the_prototype() -> None:
    z = torch.tensor([[0.9, 0.2]], requires_grad=True)
    prototype_loss(z, torch.tensor([0]), z.detach().clone(), torch.tensor([True]), "norm").backward()
    assert z.grad is not None and z.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("average", ["plain", "count"])
def test_rounds_equal_a_loop_over_classes_and_clients(average: str) -> None:
    """Random rounds with partial participation and missing classes, against dictionaries and loops."""
    rng = np.random.default_rng(4)
    server, state = strategy(width=3, classes=6, average=average)
    expected: dict[int, np.ndarray] = {}
    for server_round in range(1, 5):
        replies = []
        for client in sorted(rng.choice(7, 3, replace=False).tolist()):
            owned = sorted(rng.choice(5, rng.integers(1, 4), replace=False).tolist())
            rows = {c: rng.normal(size=3).tolist() for c in owned}
            counts = rng.integers(1, 9, len(owned)).tolist()
            replies.append(reply(client, rows, counts if average == "count" else None))
        for label in range(6):
            mine = []
            for r in replies:
                for i, c in enumerate(r.arrays["labels"]):
                    if c == label:
                        mine.append((r.arrays["protos"][i], r.arrays["counts"][i] if average == "count" else 1))
            if mine:
                expected[label] = sum(v * n for v, n in mine) / sum(n for _, n in mine)
        before = {k: v.copy() for k, v in state.items() if isinstance(v, np.ndarray)}
        new = server.aggregate(state, server_round, iter(replies))
        assert all(np.array_equal(before[k], state[k]) for k in before), "the old state was changed"
        state = new
        assert set(np.flatnonzero(state["known"])) == set(expected)
        for label, value in expected.items():
            np.testing.assert_allclose(state["protos"][label], value, rtol=1e-5, atol=1e-6)


def test_a_missing_class_keeps_its_prototype_and_an_unseen_one_is_absent() -> None:
    server, state = strategy(classes=5, down="all")
    assert server.send(state, 1, 0).arrays["protos"].shape == (0, 2)
    state = server.aggregate(state, 1, iter([reply(0, {0: [1, 2], 3: [3, 4]})]))
    state = server.aggregate(state, 2, iter([reply(1, {3: [5, 6]})]))
    sent = server.send(state, 3, 0).arrays
    assert sent["labels"].tolist() == [0, 3] and sent["protos"].tolist() == [[1, 2], [5, 6]]
    unchanged = server.aggregate(state, 3, iter([]))
    assert np.array_equal(unchanged["protos"], state["protos"]) and unchanged["owned"] == state["owned"]


def test_a_client_gets_its_own_classes_or_all() -> None:
    for down, expected in (("own", [0, 1]), ("all", [0, 1, 2])):
        server, state = strategy(down=down)
        state = server.aggregate(state, 1, iter([reply(k, rows) for k, (rows, _) in enumerate(WORKED)]))
        assert server.send(state, 2, 0).arrays["labels"].tolist() == expected
        assert server.send(state, 2, 9).arrays["labels"].tolist() == [0, 1, 2], "a client that never answered"
        assert server.send(state, 2, 0).nbytes == len(expected) * (4 * 2 + 4)


def test_disjoint_classes_carry_nothing_from_one_client_to_another() -> None:
    server, state = strategy(classes=4)
    mine = {0: [0.5, 1.0], 1: [2.0, 3.0]}
    state = server.aggregate(state, 1, iter([reply(0, mine), reply(1, {2: [9.0, 9.0], 3: [8.0, 8.0]})]))
    assert server.send(state, 2, 0).arrays["protos"].tolist() == list(mine.values())


def test_nearest_prototype_scores_are_remembered_and_averaged_over_clients() -> None:
    server, state = strategy()
    assert not state["protos"].any() and server.report(state, {}) == {"prototype_accuracy": None}
    for server_round, client, correct, total in ((1, 0, 1, 4), (1, 1, 3, 4), (2, 0, 2, 4), (2, 2, 0, 0)):
        answer = reply(client, {0: [1, 2]})
        answer.metrics.update({"prototype-correct": correct, "prototype-total": total})
        state = server.aggregate(state, server_round, iter([answer]))
    state = server.aggregate(state, 3, iter([reply(1, {0: [1, 2]})]))
    assert state["nearest"] == {0: [2, 4], 1: [3, 4], 2: [0, 0]}
    assert server.report(state, {}) == {"prototype_accuracy": 0.625}, "clients without test images have no score"


def test_counts_are_checked() -> None:
    server, _ = strategy(average="count")
    assert "positive" in str(refusal(server, {}, reply(0, {0: [1, 2], 1: [1, 2]}, [1, 0])))
    assert "positive" in str(refusal(server, {}, reply(0, {0: [1, 2]}, [1, 1])))
    fractions = reply(0, {0: [1, 2]}, [1])
    fractions.arrays["counts"] = np.ones(1, np.float32)
    assert "positive" in str(refusal(server, {}, fractions))
    assert "missing" in str(refusal(server, {}, reply(0, {0: [1, 2]})))
    assert "positive" in str(refusal(server, {}, reply(0, {0: [1, 2]}, [0])))
    assert refusal(server, {}, reply(0, {0: [1, 2]}, [1])) is None


def client(**hparams: Any) -> FedProtoClient:
    config = configuration.from_flat({"method": "fedproto", "dataset": "digits", "clients": 4})
    task = tasks.simulated_task(config, 1, 4, torch.device("cpu"))
    kind = NearestPrototypeClient if hparams.get("inference") == "prototype" else FedProtoClient
    return kind(task, METHOD, FedProtoHParams(**hparams))


def payload(rows: Mapping[int, Sequence[float]]) -> Payload:
    values = np.array(list(rows.values()), np.float32).reshape(len(rows), 64)
    return Payload(arrays={"protos": values, "labels": np.array(list(rows), np.int32)})


def test_collecting_while_training_takes_the_last_epoch() -> None:
    made = client(collect="train", average="count")
    arrays, _, _ = made.train_round(payload({}), 1)
    assert arrays["counts"].tolist() == made.task.class_counts()[arrays["labels"]].tolist()
    after = client().train_round(payload({}), 1)[0]
    assert not np.allclose(arrays["protos"], after["protos"])


@pytest.mark.parametrize(
    ("distance", "lam"), [("mse", 0.3), ("squared", 0.3), ("norm", 0.3), ("mse", 0.0), ("mse", 1.0)]
)
def test_two_local_steps_are_descent_on_the_papers_loss(distance: str, lam: float) -> None:
    """Eq. 7 written out; then Eq. 3, the mean representation of each class, by the model that results."""
    made = client(lam=lam, distance=distance, average="count")
    made.task = full_batch(made.task, lr=0.02)
    rng = np.random.default_rng(0)
    sent = payload({c: rng.normal(size=64).tolist() for c in (0, 2, 3, 5, 7)})
    made.restore(1, sent)
    made.receive(sent)
    w, x, y = copy.deepcopy(made.model).train(), images(made.task), made.task.y_train
    rows = dict(zip(sent.arrays["labels"].tolist(), torch.from_numpy(sent.arrays["protos"]), strict=True))

    def loss() -> torch.Tensor:
        z = w.represent(x)
        logits = z @ w.head.weight.T + w.head.bias
        total = (logits.exp().sum(dim=1).log() - logits[torch.arange(len(y)), y]).sum()
        for row, label in zip(z, y.tolist(), strict=True):
            if label in rows:
                squared = (row - rows[label]).square().sum()
                total = total + lam * {"mse": squared / 64, "squared": squared, "norm": squared.sqrt()}[distance]
        return total / len(y)

    steps_by_hand(w.parameters(), loss, made.task)
    arrays, _, _ = made.train_round(sent, 1)
    for ours, theirs in zip(made.model.parameters(), w.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    z = w.represent(x).detach().double().numpy()
    for row, label, count in zip(*(arrays[n] for n in ("protos", "labels", "counts")), strict=True):
        assert count == int((y == int(label)).sum())
        np.testing.assert_allclose(row, z[(y == int(label)).numpy()].sum(axis=0) / count, rtol=1e-3, atol=1e-4)


def test_the_nearest_prototype_is_scored_and_may_be_the_prediction() -> None:
    rng = np.random.default_rng(2)
    sent = payload({c: (0.1 * rng.normal(size=64)).tolist() for c in (1, 2, 6, 8)})
    made = client(inference="prototype")
    made.restore(2, sent)
    made.receive(sent)
    assert not made.prototypes[~made.known].any() and made.known.nonzero().flatten().tolist() == [1, 2, 6, 8]
    with torch.no_grad():
        z = made.model.eval().represent(normalise(made.task.x_test.permute(0, 3, 1, 2), made.task.inputs)).numpy()
    distances = np.stack([np.square(z - row).mean(axis=1) for row in sent.arrays["protos"]], axis=1)
    predicted = sent.arrays["labels"][distances.argmin(axis=1)]
    correct = int((predicted == made.task.y_test.numpy()).sum())
    assert 0 < correct < len(predicted)
    assert int(made.score(made.task.x_test, made.task.y_test).correct.sum()) == correct
    made.before_training(sent)
    assert made.after_training(sent)[1] == {"prototype-correct": correct, "prototype-total": len(predicted)}
    head = client()
    head.restore(2, sent)
    head.receive(sent)
    scores = head.score(head.task.x_test, head.task.y_test)
    logits = head.model(normalise(head.task.x_test.permute(0, 3, 1, 2), head.task.inputs))
    assert int(scores.correct.sum()) == int((logits.argmax(dim=1) == head.task.y_test).sum())
    for nothing in (payload({}), sent):
        made.restore(2, nothing)
        made.receive(nothing)
        made.nearest = None
        made.task = replace(made.task, x_test=made.task.x_test[: 3 * (nothing is not sent)])
        made.task = replace(made.task, y_test=made.task.y_test[: len(made.task.x_test)])
        made.before_training(nothing)
        assert made.nearest is None, "without prototypes or test images there is no score"


def test_in_half_precision_the_distance_is_still_taken_in_float32() -> None:
    made = client()
    sent = payload({c: [0.01] * 64 for c in range(10)})
    made.restore(1, sent)
    made.receive(sent)
    made.before_training(sent)
    x, y = images(made.task), made.task.y_train
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = made.step_loss(Batch(x, y, [x], y))
        z = made.model.represent(x)
        supervised = F.cross_entropy(made.model.classify(z), y)
    assert z.dtype == torch.bfloat16
    assert loss.item() == pytest.approx((supervised + (z.float() - 0.01).square().mean()).item(), rel=1e-5)


def test_bytes_under_client_sampling_are_those_of_the_page(tiny: Callable[..., RunResult]) -> None:
    """Who has answered gets the known ones of its classes, who has not gets all known ones."""
    result = tiny(method="fedproto", rounds=6, partition="pathological", clients=5, fraction_train=0.4)
    known: set[int] = set()
    answered: set[int] = set()
    newcomers = 0
    for server_round, here in participants(result):
        rows = [len(known & own if k in answered else known) for k, own in here.items()]
        newcomers += sum(bool(known - own) for k, own in here.items() if k not in answered)
        sent = result.rounds.set_index("round")["bytes_down"].loc[server_round]
        assert sent == np.mean(rows) * (4 * 64 + 4), server_round
        known |= set().union(*here.values())
        answered |= set(here)
    assert newcomers, "some client must answer late"


def test_prototype_inference_is_measured_and_can_be_the_prediction(tiny: Callable[..., RunResult]) -> None:
    head = tiny(method="fedproto", rounds=3)
    nearest = tiny(method="fedproto", method_args="inference=prototype", rounds=3)
    assert head.summary["prototype_accuracy"] == pytest.approx(nearest.rounds["received_accuracy"].iloc[-1])
    assert head.rounds["received_accuracy"].iloc[-1] != nearest.rounds["received_accuracy"].iloc[-1]
    assert head.rounds["train_loss"].equals(nearest.rounds["train_loss"])


def test_widths_must_agree(tiny: Callable[..., RunResult], monkeypatch: pytest.MonkeyPatch) -> None:
    original = FedClient.register

    def register(self: FedClient) -> Any:
        metrics, info = original(self)
        return metrics, {**info, "width": 64 + self.task.client}

    monkeypatch.setattr(FedClient, "register", register)
    with pytest.raises(BadRequest, match="widths"):
        tiny(method="fedproto", model="digits-a,digits-b")
