"""What a method inherits: the client's round and evaluation, Flower's positional form, the server's first state."""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from clients.base import FedClient
from fedapp.config import from_flat
from fedapp.core.averages import RunningMean
from fedapp.federation import loop
from fedapp.federation.hook import Hooks, Setup
from fedapp.federation.hooks.scores import PeriodicEvaluation, UnseenClients
from fedapp.federation.participants import Outcome, Participants, Progress
from fedapp.learning.state import ClientStore, DamagedError
from fedapp.learning.training import BETAS
from fedapp.method import BaseHParams, Payload, Reply, ServerState
from fedapp.transport.ledger import StateLedger
from fedapp.transport.request import RoundRequest
from fedapp.transport.traffic import Exchange
from strategies.base import Strategy
from strategies.fedavg import METHOD as FEDAVG
from strategies.lgfedavg import METHOD as LGFEDAVG
from tests.handmade import context, head_of, images, model_like, one_batch_task, point, weighted_mean, whole


def test_a_client_that_never_trained_has_one_score_under_both_names(tmp_path: Path) -> None:
    task = one_batch_task()
    store = ClientStore(tmp_path / "0", "fedavg", "aa")
    sent = whole(model_like(task))
    metrics = FedClient(task, FEDAVG, BaseHParams(), store).evaluate_round(sent, 1)
    received = {k: v for k, v in metrics.items() if k.startswith("received-")}
    assert received and metrics == received | {k.replace("received", "trained"): v for k, v in received.items()}


def test_a_client_that_trained_is_scored_as_it_was_and_with_what_is_sent_now(tmp_path: Path) -> None:
    task = one_batch_task(epochs=20, lr=0.5)
    store = ClientStore(tmp_path / "0", "fedavg", "aa")
    sent = whole(model_like(task))
    client = FedClient(task, FEDAVG, BaseHParams(), store)
    _, _, during = client.train_round(sent, 1)
    metrics = FedClient(task, FEDAVG, BaseHParams(), store).evaluate_round(sent, 2)
    scores = {k for k in metrics if k.endswith(("-correct", "-total", "-loss-sum"))}
    assert scores and all(metrics[k] == during[k] for k in scores), "of the stored model, and of the one sent"
    assert any(metrics[k] != metrics[k.replace("trained", "received")] for k in scores)


@pytest.mark.parametrize(
    ("protocols", "train", "new", "known"),
    [
        (("received", "trained"), False, 1, 2), (("received", "trained"), True, 1, 1), (("received",), False, 1, 1),
        (("trained",), False, 1, 1), (("trained",), True, 0, 0), (("global",), False, 0, 0),
    ],
)  # fmt: skip
def test_an_evaluation_scores_only_what_is_measured(
    protocols: tuple[str, ...], train: bool, new: int, known: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test images are scored `new` times at a client that never trained, and `known` times at one that did."""
    task = dataclasses.replace(one_batch_task(), protocols=protocols)
    store = ClientStore(tmp_path / "0", "fedavg", "aa")
    sent, scored, score = whole(model_like(task)), [], FedClient.score
    monkeypatch.setattr(FedClient, "score", lambda self, x, y: (scored.append(1), score(self, x, y))[1])
    for server_round, count in ((1, new), (2, known)):
        scored.clear()
        metrics = FedClient(task, FEDAVG, BaseHParams(), store).evaluate_round(sent, server_round, train=train)
        names = {k.partition("-")[0] for k in metrics}
        assert len(scored) == count and names == set(protocols) - {"global"} - ({"trained"} if train else set())
        FedClient(task, FEDAVG, BaseHParams(), store).train_round(sent, server_round)


class Looks(FedClient):
    """A client that looks at its own head before that of the server replaces it."""

    def receive(self, payload: Payload) -> None:
        self.left = self.model.head.bias.detach().clone()
        super().receive(payload)


def test_of_a_stored_model_nothing_is_read_that_the_server_sends(tmp_path: Path) -> None:
    task = one_batch_task()
    sent, hparams = head_of(model_like(task)), LGFEDAVG.hparams()

    def client(kind: type[FedClient] = FedClient) -> FedClient:
        return kind(task, LGFEDAVG, hparams, ClientStore(tmp_path / "0", "lgfedavg", "aa"))

    first = client()
    first.train_round(sent, 1)
    looking = client(Looks)
    looking.restore(2, sent)
    looking.receive(sent)
    assert torch.equal(looking.left, first.model.head.bias), "what an own function may look at is restored"
    whole_again, _, _ = client().train_round(sent, 2)
    path = tmp_path / "0" / "aa.000001.safetensors"
    for array, read in ((first.model.head.weight, False), (next(first.model.features.parameters()), True)):
        numbers = array.detach().numpy().tobytes()
        good = path.read_bytes()
        assert good.count(numbers) == 1
        path.write_bytes(good.replace(numbers, bytes(len(numbers))))
        if read:
            with pytest.raises(DamagedError, match="SHA-256 of 'model/features"):
                client().train_round(sent, 2)
        else:
            again, _, _ = client().train_round(sent, 2)
            assert all(np.array_equal(again[n], whole_again[n]) for n in whole_again)
            for reads in (lambda: client(Looks).train_round(sent, 2), lambda: client().evaluate_round(sent, 2)):
                with pytest.raises(DamagedError, match=r"SHA-256 of 'model/head\.weight'"):
                    reads()
        path.write_bytes(good)


@pytest.mark.parametrize("stored", [False, True])
def test_a_client_that_may_not_look_at_its_model_finds_nan_in_it(stored: bool, tmp_path: Path) -> None:
    """Where the server sends the whole model the stored one is not read: an untrained one would look like a model."""
    task, sent = one_batch_task(), whole(model_like(one_batch_task()))

    def looking(**more: Any) -> Looks:
        client = type("Own", (Looks,), more)(task, FEDAVG, BaseHParams(), store)
        client.train_round(sent, 2)
        return client

    store = ClientStore(tmp_path / "0", "fedavg", "aa") if stored else None
    first = FedClient(task, FEDAVG, BaseHParams(), store)
    first.train_round(sent, 1)
    own = looking()
    assert own.left.isnan().all() and all(bool(a.isfinite().all()) for a in own.model.state_dict().values())
    if stored:
        assert torch.equal(looking(needs_state=True).left, first.model.head.bias)


def test_the_store_is_told_what_the_next_round_does_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, told, save = one_batch_task(), [], ClientStore.save
    monkeypatch.setattr(
        ClientStore, "save", lambda self, r, arrays, unread: (told.append(unread), save(self, r, arrays))
    )
    for method, sent in ((LGFEDAVG, head_of(model_like(task))), (FEDAVG, whole(model_like(task)))):
        for kind in (FedClient, Looks, type("Needs", (FedClient,), {"needs_state": True})):
            store = ClientStore(tmp_path / method.id / kind.__name__, method.id, "aa")
            kind(task, method, method.hparams(), store).train_round(sent, 1)
    head, model = {f"model/{n}" for n in head_of(model_like(task)).all()}, {f"model/{n}" for n in sent.all()}
    assert told == [head, set(), set(), model, model, set()]


def test_validation_images_are_scored_beside_the_test_images(tmp_path: Path) -> None:
    task = one_batch_task()
    held_out = dataclasses.replace(task, x_validation=task.x_train, y_validation=task.y_train)
    client = FedClient(held_out, FEDAVG, BaseHParams(), ClientStore(tmp_path / "0", "fedavg", "aa"))
    metrics = client.evaluate_round(whole(model_like(task)), 1)
    with torch.inference_mode():
        right = int((client.model(images(task)).argmax(dim=1) == task.y_train).sum())
    assert metrics["received-validation-correct"] == metrics["trained-validation-correct"] == right
    assert metrics["received-validation-total"] == len(task.y_train)


def test_the_balanced_score_is_only_measured_where_it_is_asked_for(tmp_path: Path) -> None:
    task = one_batch_task()
    union = dataclasses.replace(task, x_union=task.x_train, y_union=task.y_train)
    client = FedClient(union, FEDAVG, BaseHParams(), ClientStore(tmp_path / "0", "fedavg", "aa"))
    for balanced in (True, False):
        metrics = client.evaluate_round(whole(model_like(task)), 1, balanced=balanced)
        assert ("received-balanced" in metrics) is balanced


def test_a_metric_keeps_its_own_name_under_both_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric of the user's own may be called `received`."""
    task = one_batch_task()
    monkeypatch.setattr(FedClient, "measure", lambda *args, **more: {"received-own.received": 0.5})
    client = FedClient(task, FEDAVG, BaseHParams(), ClientStore(tmp_path / "0", "fedavg", "aa"))
    metrics = client.evaluate_round(whole(model_like(task)), 1)
    assert metrics == {"received-own.received": 0.5, "trained-own.received": 0.5}


def test_positional_training_is_a_round() -> None:
    task = one_batch_task()
    model = model_like(task)
    client = FedClient(task, FEDAVG, BaseHParams(), None)
    given = client.get_parameters({})
    for old, name in zip(given, client.down_names(), strict=True):
        assert old.shape == model.state_dict()[name].shape
    parameters = [model.state_dict()[name].numpy() for name in client.down_names()]
    arrays, n, metrics = client.fit(parameters, {"round": 3})
    expected, size, _ = FedClient(task, FEDAVG, BaseHParams(), None).train_round(whole(model), 3)
    assert n == size == 12 and metrics["trained-total"] == 4
    assert all(np.array_equal(a, b) for a, b in zip(arrays, expected.values(), strict=True))


def test_positional_evaluation_scores_the_given_parameters() -> None:
    task = one_batch_task()
    client, other = (FedClient(task, FEDAVG, BaseHParams(), None) for _ in range(2))
    given = [p + 1 for p in client.get_parameters({})]
    wanted = other.evaluate_round(Payload(common=dict(zip(other.down_names(), given, strict=True))), 1)
    loss, rows, metrics = client.evaluate(given, {})
    assert (loss * rows, metrics["accuracy"] * rows, rows) == pytest.approx(
        tuple(wanted[f"received-{name}"] for name in ("loss-sum", "correct", "total"))
    )


def test_adams_moments_are_pytorchs() -> None:
    assert torch.optim.Adam([torch.zeros(1)]).defaults["betas"] == BETAS


def test_a_strategy_starts_with_the_initial_arrays_and_knows_its_context() -> None:
    strategy, given = Strategy(FEDAVG, BaseHParams()), context(point(1.0, 2.0))
    state = strategy.init(given)
    assert strategy.context is given and list(state["model"]) == ["head.weight"]


def test_a_reply_must_hold_what_the_method_sends_up() -> None:
    shapes = {"features.0.weight": (4, 3), "head.weight": (3, 4), "head.bias": (3,)}
    heads = {name: shapes[name] for name in ("head.weight", "head.bias")}
    assert LGFEDAVG.expected(BaseHParams(), shapes) == heads
    assert FEDAVG.expected(BaseHParams(), shapes) == shapes


@pytest.mark.parametrize(("select", "retrains"), [(False, True), (True, True), (False, False)])
def test_evaluations_of_all_clients_are_told_what_they_are_for(
    select: bool, retrains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a round they may leave the training out, and the last one is told that it is the last."""
    asked: list[tuple[str, RoundRequest]] = []
    manager: Any = SimpleNamespace(
        register=lambda: None, nodes={0: None}, ledger=StateLedger(), settings=SimpleNamespace(fraction_train=1.0),
        without_silent=lambda server_round, ids: (ids, []), request=RoundRequest("abcd"),
    )  # fmt: skip
    directory: Any = SimpleNamespace(table=lambda name: {})
    strategy, hooks = Strategy(FEDAVG, BaseHParams()), Hooks()
    cohort = Participants(manager, strategy, hooks, retrains=retrains)
    choice = "validation" if select else "last"
    chosen = {"select": choice, "validation": 0.2 if select else 0.0}
    values = from_flat({"evaluate-every": 1, "num-server-rounds": 2, **chosen})
    run: Any = SimpleNamespace(config=values, cohort=cohort, hooks=hooks, directory=directory)
    hooks.append(PeriodicEvaluation(run))

    def evaluate(kind: str, state: ServerState, request: RoundRequest, *clients: Any) -> Exchange:
        asked.append((kind, request))
        return Exchange(kind, request.round)

    monkeypatch.setattr(cohort, "evaluate", evaluate)
    monkeypatch.setattr(loop, "train_once", lambda *given: Outcome(given[2].state, Exchange("train", given[3])))
    loop.federate(strategy, cohort, context(point(1.0, 2.0)), hooks, rounds=2)
    between = [
        ("evaluate", RoundRequest("abcd", n, balanced=True, train=retrains and not select, received_only=select))
        for n in range(1, 2 + select)
    ]
    assert asked == [*between, ("final", RoundRequest("abcd", 2, balanced=True, final=True, train=retrains))]


class State(dict[str, Any]):
    """A state that a weak reference may point to."""


def test_the_loop_lets_go_of_the_state_that_it_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    manager: Any = SimpleNamespace(
        register=lambda: None, nodes={0: None}, ledger=StateLedger(), settings=SimpleNamespace(fraction_train=1.0),
        without_silent=lambda server_round, ids: (ids, []), request=RoundRequest(),
    )  # fmt: skip
    strategy, hooks, held = Strategy(FEDAVG, BaseHParams()), Hooks(), list[Any]()
    given = context(point(1.0, 2.0))
    strategy.init(given)
    cohort = Participants(manager, strategy, hooks)
    monkeypatch.setattr(cohort, "evaluate", lambda *asked: 1)

    def train_once(cohort: Any, hooks: Any, at: Progress, number: int, clients: Any) -> Outcome:
        held.append(weakref.ref(at.state) if number == 1 else held[0]())
        return Outcome(State(at.state), Exchange("train", number))

    monkeypatch.setattr(loop, "train_once", train_once)
    loop.federate(strategy, cohort, given, hooks, rounds=2, start=Progress(0, State(model={})))
    assert held[1] is None


def test_clients_that_take_no_part_are_asked_last_and_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    manager: Any = SimpleNamespace(nodes={0: None, 3: None, 4: None}, request=RoundRequest())
    strategy, hooks = Strategy(FEDAVG, BaseHParams()), Hooks()
    cohort = Participants(manager, strategy, hooks, unseen=(4, 3, 9))
    hooks.append(UnseenClients(cast("Setup", SimpleNamespace(cohort=cohort))))
    monkeypatch.setattr(cohort, "evaluate", lambda *given: asked.append((given[0], *given[2:])) or 1)
    loop.federate(strategy, cohort, context(point(1.0, 2.0)), hooks, rounds=0)
    assert [kind for kind, *_ in asked] == ["final", "unseen"]
    assert asked[1] == ("unseen", RoundRequest(unseen=True), [3, 4])


def test_only_secure_sums_hide_single_replies() -> None:
    strategy, hooks = Strategy(FEDAVG, BaseHParams()), Hooks()
    state = strategy.init(context(point(1.0, 2.0)))
    manager: Any = SimpleNamespace(send_and_receive=lambda *more: "single replies", request=RoundRequest())
    secure: Any = SimpleNamespace(exchange=lambda *more: "a sum")
    found = [
        Participants(manager, strategy, hooks, secure=session).train(1, state, [], lambda check: check).replies
        for session in (None, secure)
    ]
    assert found == ["single replies", "a sum"]


def test_a_mean_is_a_running_one_unless_another_is_given() -> None:
    replies = [Reply(i, n, {"w": np.full(2, v, np.float32)}, {}) for i, n, v in ((0, 1, 0.0), (1, 3, 4.0))]
    assert weighted_mean(replies, {"w": 0})["w"].tolist() == [3.0, 3.0]
    given = RunningMean()
    given.add_many([({"w": np.full(2, 7, np.float32)}, 4.0)])
    assert weighted_mean(replies, {"w": 0}, given)["w"].tolist() == [5.0, 5.0], "it goes on from what it has"
    assert weighted_mean([], {"w": 0}) == {"w": 0}


def test_a_query_that_the_method_does_not_know_says_what_to_do() -> None:
    client = FedClient(one_batch_task(), FEDAVG, BaseHParams(), None)
    with pytest.raises(ValueError, match=r"'fedavg' cannot answer 'query\.zork': define answer\(\)"):
        client.answer("zork", Payload())


def test_a_newcomer_knows_that_it_is_one_and_in_which_round(monkeypatch: pytest.MonkeyPatch) -> None:
    task = one_batch_task()
    client = FedClient(task, FEDAVG, BaseHParams(), None)
    seen: list[tuple[bool, int]] = []
    restore = client.restore
    monkeypatch.setattr(
        client, "restore", lambda *given: (seen.append((client.newcomer, client.round)), restore(*given))
    )
    metrics = client.meet(whole(model_like(task)), 7, "unseen_received", 0)
    assert seen == [(True, 7)] and metrics["unseen_received-total"] == len(task.y_test)
