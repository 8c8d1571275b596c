"""FD: worked numbers, leave-one-out against loops, reduction to Standalone, labels that go missing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from clients.base import FedClient
from clients.fd import FDClient, FDHParams, distillation_loss
from fedapp import config as configuration
from fedapp.engines.local import RunResult
from fedapp.learning.training import Batch
from fedapp.method import Payload, Reply, ServerContext, ServerState
from fedapp.tasks import simulated as tasks
from fedapp.transport import checkpoint
from strategies.fd import FD, METHOD
from tests.handmade import full_batch, images, participants, refusal, steps_by_hand

LOGITS = [{0: [2, 0, -1], 1: [0, 1.5, 0]}, {1: [0.5, 0.9, 0.1], 2: [-0.5, 0.2, 1]}]


def softmax(z: Any) -> list[float]:
    return F.softmax(torch.tensor(z, dtype=torch.float64), dim=0).tolist()


def strategy(classes: int = 3, **hparams: Any) -> tuple[FD, ServerState]:
    made = FD(METHOD, FDHParams(**hparams))
    return made, made.init(ServerContext(0, (), classes, 9, {}, lambda k: {}, lambda *a: np.random.default_rng(0)))


def reply(client: int, rows: Mapping[int, Any]) -> Reply:
    arrays = {"outputs": np.array(list(rows.values()), np.float32), "labels": np.array(list(rows), np.int32)}
    return Reply(client, 5, arrays, {})


def worked(**hparams: Any) -> tuple[FD, ServerState]:
    server, state = strategy(**hparams)
    replies = [reply(k, {c: softmax(z) for c, z in rows.items()}) for k, rows in enumerate(LOGITS)]
    assert all(refusal(server, {}, r) is None for r in replies)
    return server, server.aggregate(state, 1, iter(replies))


def rows_of(payload: Payload) -> dict[int, list[float]]:
    return dict(zip(payload.arrays["labels"].tolist(), payload.arrays["outputs"].tolist(), strict=True))


def test_worked_targets_leave_the_own_share_out() -> None:
    server, state = worked()
    first, second = (rows_of(server.send(state, 2, k)) for k in (0, 1))
    assert list(first) == list(second) == [1], "labels that only one client owns have no target"
    np.testing.assert_allclose(first[1], [0.316241, 0.471776, 0.211983], atol=1e-6)
    np.testing.assert_allclose(second[1], [0.154281, 0.691438, 0.154281], atol=1e-6)


def test_worked_targets_with_the_own_share() -> None:
    server, state = worked(include_self=True)
    first = rows_of(server.send(state, 2, 0))
    np.testing.assert_allclose(first[0], [0.843795, 0.114195, 0.042010], atol=1e-6)
    np.testing.assert_allclose(first[1], [0.235261, 0.581607, 0.183132], atol=1e-6)
    np.testing.assert_allclose(rows_of(server.send(state, 2, 1))[2], [0.133414, 0.268664, 0.597922], atol=1e-6)


def test_worked_losses() -> None:
    z, y = torch.tensor([[0.2, 0.7, -0.3]]), torch.tensor([1])
    assert float(F.cross_entropy(z, y)) == pytest.approx(0.680270, abs=1e-6)
    known = torch.tensor([False, True, False])
    for target, output, expected in (
        ([0.235261, 0.581607, 0.183132], "softmax", 0.981032),
        ([0.316241, 0.471776, 0.211983], "softmax", 1.050373),
        ([0.25, 1.2, 0.05], "logits", 0.125),
    ):
        targets = torch.zeros(3, 3)
        targets[1] = torch.tensor(target)
        assert float(distillation_loss(z, y, targets, known, output)) == pytest.approx(expected, abs=2e-6)
        assert float(distillation_loss(z, y, targets, ~known, output)) == 0.0


def test_logit_targets_are_means_of_logits() -> None:
    server, state = strategy(output="logits", include_self=True)
    replies = [reply(k, rows) for k, rows in enumerate(LOGITS)]
    assert all(refusal(server, {}, r) is None for r in replies)
    state = server.aggregate(state, 1, iter(replies))
    np.testing.assert_allclose(rows_of(server.send(state, 2, 0))[1], [0.25, 1.2, 0.05], atol=1e-7)


@pytest.mark.parametrize("include_self", [False, True])
def test_rounds_equal_loops_over_the_last_senders(include_self: bool, tmp_path: Path) -> None:
    """Random rounds with partial participation and labels that come and go; the state goes through a checkpoint."""
    rng = np.random.default_rng(7)
    server, state = strategy(classes=5, include_self=include_self, down="all")
    last: dict[int, dict[int, np.ndarray]] = {}
    for server_round in range(1, 7):
        replies, fresh = [], {}
        for client in sorted(rng.choice(6, 3, replace=False).tolist()):
            owned = sorted(rng.choice(4, rng.integers(1, 4), replace=False).tolist())
            rows = {c: rng.dirichlet(np.ones(5)) for c in owned}
            replies.append(reply(client, rows))
            for c in owned:
                fresh.setdefault(c, {})[client] = rows[c]
        last.update(fresh)
        kept = {k: v.copy() for k, v in state.items() if isinstance(v, np.ndarray)}
        new = server.aggregate(state, server_round, iter(replies))
        assert all(np.array_equal(kept[k], state[k]) for k in kept), "the old state was changed"
        assert not new["sums"][new["owners"] == 0].any(), "labels that nobody ever sent have no sum"
        checkpoint.save(tmp_path, server_round, new, {})
        found = checkpoint.latest(tmp_path)
        assert found is not None
        state = found[1]
        for client in range(7):
            got = rows_of(server.send(state, server_round + 1, client))
            expected = {}
            for label, senders in last.items():
                others = [v for k, v in senders.items() if include_self or k != client]
                if others:
                    expected[label] = sum(others) / len(others)
            assert set(got) == set(expected)
            for label, value in expected.items():
                np.testing.assert_allclose(got[label], value, atol=1e-6)


def test_a_missing_label_keeps_its_sum_and_no_reply_changes_nothing() -> None:
    server, state = worked()
    before = rows_of(server.send(state, 2, 0))
    state = server.aggregate(state, 2, iter([reply(1, {2: [0.2, 0.2, 0.6]})]))
    assert rows_of(server.send(state, 3, 0)) == before
    assert rows_of(server.send(server.aggregate(state, 3, iter([])), 4, 0)) == before


def test_a_client_gets_targets_for_its_own_labels() -> None:
    server, state = worked()
    state = server.aggregate(state, 2, iter([reply(2, {0: [1, 0, 0], 1: [0, 1, 0], 2: [0, 0, 1]})]))
    assert list(rows_of(server.send(state, 3, 0))) == [0, 1]
    assert list(rows_of(server.send(state, 3, 7))) == [0, 1, 2], "a client that never answered"
    everything, state = worked(down="all")
    assert list(rows_of(everything.send(state, 2, 0))) == [1, 2]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({0: [0.5, 0.6, 0.2]}, "probabilities"),
        ({0: [0.2, 0.5, 0.2]}, "probabilities"),
        ({0: [0.5, 0.3, 0.215]}, "probabilities"),
        ({0: [0.5, 0.5, 0], 1: [0.5, 0.6, 0.2]}, "probabilities"),
        ({0: [1.5, -0.5, 0]}, "probabilities"),
    ],
)
def test_bad_replies_are_refused(rows: dict[int, list[float]], words: str) -> None:
    assert refusal(strategy()[0], {}, reply(0, {0: [0, 1, 0], 2: [0.5, 0.495, 0]})) is None
    assert words in str(refusal(strategy()[0], {}, reply(0, rows)))


def client(**hparams: Any) -> FDClient:
    config = configuration.from_flat({"method": "fd", "dataset": "digits", "clients": 4})
    return FDClient(tasks.simulated_task(config, 1, 4, torch.device("cpu")), METHOD, FDHParams(**hparams))


def nothing() -> Payload:
    return Payload(arrays={"outputs": np.zeros((0, 10), np.float32), "labels": np.zeros(0, np.int32)})


@pytest.mark.parametrize(("output", "gamma"), [("softmax", 0.6), ("logits", 0.6), ("softmax", 0.0), ("softmax", 1.0)])
def test_two_local_steps_are_descent_on_the_papers_loss(output: str, gamma: float) -> None:
    """phi(F, e_y) + gamma phi(F, hat F_y), sample by sample; then the mean output of each label."""
    made = client(gamma=gamma, output=output)
    made.task = full_batch(made.task)
    labels = np.array([0, 3, 4, 9], np.int32)
    targets = np.random.default_rng(0).dirichlet(np.ones(10), 4).astype(np.float32)
    sent = Payload(arrays={"outputs": targets, "labels": labels})
    made.restore(1, sent)
    w, x, y = copy.deepcopy(made.model).train(), images(made.task), made.task.y_train
    rows = dict(zip(labels.tolist(), torch.from_numpy(targets), strict=True))

    def loss() -> torch.Tensor:
        total = torch.zeros(())
        for logits, label in zip(w(x), y.tolist(), strict=True):
            log_p = logits - logits.exp().sum().log()
            total = total - log_p[label]
            if label in rows and output == "softmax":
                total = total - gamma * (rows[label] * log_p).sum()
            elif label in rows:
                total = total + gamma * (logits - rows[label]).square().sum() / 10
        return total / len(y)

    steps_by_hand(w.parameters(), loss, made.task)
    arrays, _, _ = made.train_round(sent, 1)
    for ours, theirs in zip(made.model.parameters(), w.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    logits = w(x).detach()
    outputs = (logits.softmax(dim=1) if output == "softmax" else logits).double().numpy()
    for row, label in zip(arrays["outputs"], arrays["labels"], strict=True):
        np.testing.assert_allclose(row, outputs[(y == int(label)).numpy()].mean(axis=0), rtol=1e-3, atol=1e-4)


def test_collecting_while_training_takes_the_outputs_of_the_last_epoch() -> None:
    made = client(collect="train")
    assert made.hparams.gamma == 1.0
    made.task = full_batch(made.task)
    made.restore(1, nothing())
    w, x, y = copy.deepcopy(made.model).train(), images(made.task), made.task.y_train
    one = full_batch(made.task, steps=1)
    steps_by_hand(w.parameters(), lambda: -w(x).log_softmax(dim=1)[torch.arange(len(y)), y].mean(), one)
    arrays, _, _ = made.train_round(nothing(), 1)
    outputs = w(x).softmax(dim=1).detach().double().numpy()
    assert arrays["labels"].tolist() == sorted(set(y.tolist()))
    for row, label in zip(arrays["outputs"], arrays["labels"], strict=True):
        np.testing.assert_allclose(row, outputs[(y == int(label)).numpy()].mean(axis=0), rtol=1e-3, atol=1e-5)


def test_in_half_precision_the_distance_to_targets_is_still_taken_in_float32() -> None:
    made = client(output="logits")
    sent = Payload(arrays={"outputs": np.ones((10, 10), np.float32), "labels": np.arange(10, dtype=np.int32)})
    made.restore(1, sent)
    made.receive(sent)
    made.before_training(sent)
    x, y = images(made.task), made.task.y_train
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = made.step_loss(Batch(x, y, [x], torch.arange(len(y))))
        logits = made.model(x)
    assert logits.dtype == torch.bfloat16
    expected = F.cross_entropy(logits.float(), y) + (logits.float() - 1).square().mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_bytes_under_client_sampling_are_those_of_the_page(tiny: Callable[..., RunResult]) -> None:
    """Who has answered gets those of its labels that others sent, who has not gets all that were sent."""
    result = tiny(method="fd", rounds=6, partition="pathological", clients=5, classes_per_client=3, fraction_train=0.4)
    senders: dict[int, set[int]] = {}
    answered: set[int] = set()
    newcomers = 0
    for server_round, here in participants(result):
        rows = []
        for k, own in here.items():
            rows.append(len([y for y, by in senders.items() if (k not in answered or y in own) and by - {k}]))
            newcomers += k not in answered and bool(senders.keys() - own)
        sent = result.rounds.set_index("round")["bytes_down"].loc[server_round]
        assert sent == np.mean(rows) * (4 * 10 + 4), server_round
        for y in set().union(*here.values()):
            senders[y] = {k for k, own in here.items() if y in own}
        answered |= set(here)
    assert newcomers, "some client must answer late"


def test_logit_distillation_runs_and_widths_may_differ(
    tiny: Callable[..., RunResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = FedClient.register

    def register(self: FedClient) -> Any:
        metrics, info = original(self)
        return metrics, {**info, "width": 64 + self.task.client}

    monkeypatch.setattr(FedClient, "register", register)
    result = tiny(method="fd", method_args="output=logits down=all", model="digits-a,digits-c", fraction_train=0.67)
    assert result.summary["ok"]
