"""Reductions: the consequences of a declaration, and servers that get single replies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

import fedapp.method
from clients.fedproto import FedProtoHParams
from fedapp import registry
from fedapp.core.averages import RunningMean
from fedapp.core.privacy import Privacy
from fedapp.errors import Impossible
from fedapp.federation.hook import Hooks
from fedapp.federation.loop import train_once
from fedapp.federation.participants import Participants, Progress
from fedapp.method import UNTESTED, BaseHParams, Payload, Reply, ServerState, Sums, is_one_of
from fedapp.reduce.noised import Noised, noised
from fedapp.reduce.plain import MeanReducer, PlainClassMeans
from fedapp.reduce.reader import Policy
from fedapp.reduce.robust import RobustClassMeans
from fedapp.reduce.spec import ClassMean, Each, Gaussians, Mean, Query, Total, form_problem
from fedapp.transport.local_grid import FIRST_NODE, LocalGrid
from fedapp.transport.request import RoundRequest
from strategies._flower import FlowerStrategy
from strategies._maths import Maths
from strategies.base import Strategy
from strategies.fedavg import METHOD as FEDAVG
from strategies.fedavg import FedAvg
from strategies.fedproto import METHOD as FEDPROTO
from tests.handmade import context, guard, point, refusal, reply


class OneByOne(FedAvg):
    """A user's own server: it notes the clients that replied, and averages replies of two samples or more."""

    def aggregate(self, state: ServerState, server_round: int, replies: Iterable[Reply]) -> ServerState:
        given = list(replies)
        new = super().aggregate(state, server_round, [r for r in given if r.num_samples > 1])
        return {**new, "seen": np.array([r.client for r in given])}


METHOD = dataclasses.replace(FEDAVG, strategy=OneByOne)
HEAD = {"head.weight": np.zeros((2, 1), np.float32), "head.bias": np.zeros(2, np.float32)}


def test_a_class_with_an_aggregate_of_its_own_gets_single_replies_in_the_round_loop() -> None:
    strategy = OneByOne(METHOD, BaseHParams())
    state = strategy.init(context(point(0.0)))
    sent = [reply(0, 1, point(9.0)), reply(1, 2, point(1.0)), reply(2, 6, point(3.0))]
    manager: Any = SimpleNamespace(
        send_and_receive=lambda *given: iter(sent),
        require=lambda *given: None,
        nodes={},
        infos={},
        request=RoundRequest(),
    )
    hooks = Hooks()
    new = train_once(Participants(manager, strategy, hooks), hooks, Progress(0, state), 1, [0, 1, 2]).state
    assert new["seen"].tolist() == [0, 1, 2] and new["model"]["head.weight"].tolist() == [2.5]
    assert METHOD.sums(BaseHParams()) is None
    assert METHOD.guarded_by(BaseHParams()) == ("rules", "count-cap")


def test_a_class_with_an_aggregate_of_its_own_gets_single_replies_in_flowers_loop() -> None:
    app, server, strategy = ClientApp(), ServerApp(), OneByOne(METHOD, BaseHParams(), fraction_evaluate=0.0)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        arrays = {n: Array(a.numpy() + np.float32(number)) for n, a in message.content["arrays"].items()}
        metrics = MetricRecord({"num-examples": number + 1})
        return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)

    found = {}

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        found["result"] = strategy.start(grid, ArrayRecord({n: Array(a) for n, a in HEAD.items()}), num_rounds=1)

    grid = LocalGrid(app, {}, 3)
    server(grid, grid.contexts[FIRST_NODE])
    assert strategy._state is not None and strategy._state["seen"].tolist() == [0, 1, 2]
    np.testing.assert_allclose(found["result"].arrays["head.bias"].numpy(), (2 * 1 + 3 * 2) / 5)


class Shifted(Maths):
    """Mathematics without Flower: the initial model is moved by a sum over the clients before round 1."""

    def prepare(self, state: ServerState, query: Query) -> ServerState:
        total = query("prepare", Payload()).totals("n").sums["n"]
        return {"model": {name: array + total for name, array in state["model"].items()}}


def test_mathematics_alone_run_in_flowers_loop_and_ask_before_round_1() -> None:
    app = ClientApp()

    @app.query("prepare")
    def count(message: Message, context: Context) -> Message:
        number = np.array(int(context.node_config["partition-id"]), np.float32)
        metrics = MetricRecord({"num-examples": 1})
        return Message(
            RecordDict({"arrays": ArrayRecord({"n/n": Array(number)}), "metrics": metrics}), reply_to=message
        )

    total = Total("n/", lambda context: {"n": np.zeros(())}, lambda context, arrays, lost: None)
    method = dataclasses.replace(FEDAVG, strategy=Shifted, extra_up=("n/",), reduces={"prepare": {"n": total}})
    strategy = FlowerStrategy(Shifted(method, BaseHParams()), fraction_train=0.0, fraction_evaluate=0.0)
    given = ArrayRecord({n: Array(a) for n, a in HEAD.items()})
    found = strategy.start(LocalGrid(app, {}, 3), given, num_rounds=1)
    assert found.arrays["head.bias"].numpy().tolist() == [3.0, 3.0]


def test_replies_pass_once_and_in_order_through_all_reductions() -> None:
    pulled: list[int] = []

    def arriving() -> Iterator[Reply]:
        for client in range(3):
            pulled.append(client)
            yield reply(client, 1, point(float(client)))

    strategy = Strategy(FEDAVG, BaseHParams())
    state = strategy.init(context(point(0.0)))
    reduced = strategy.reader.reduce("train", arriving(), state)
    assert pulled == []
    assert [r.client for r in reduced.each()] == pulled == [0, 1, 2]
    assert reduced.arrays("model")["head.weight"].tolist() == [1.0] and list(reduced.each()) == []
    assert [(r.client, r.arrays) for r in reduced.clients] == [(0, {}), (1, {}), (2, {})]


def test_without_replies_a_mean_is_the_arrays_that_were_sent() -> None:
    strategy = Strategy(FEDAVG, BaseHParams())
    state = strategy.init(context(point(2.0)))
    assert strategy.update(state, 1, strategy.reader.reduce("train", [], state))["model"] == state["model"]


@pytest.mark.parametrize(
    ("reductions", "sums"),
    [
        ({}, None),
        ({"model": Mean()}, Sums()),
        ({"model": Mean(weights="uniform")}, Sums("uniform")),
        ({"model": Mean(read=lambda arrays, of: arrays)}, None),
        ({"model": Mean(), "own": Each()}, None),
        ({"rows": ClassMean("rows", lambda *given: np.zeros((2, 1)))}, Sums(rows="rows")),
        ({"rows": ClassMean("rows", lambda *given: np.zeros((2, 1)), named=True)}, None),
        (
            {
                "model": Mean(weights="uniform"),
                "rows": ClassMean("rows", lambda *given: np.zeros((2, 1)), "count", summed=True),
            },
            Sums("uniform", ("rows", "count")),
        ),
    ],
)
def test_secure_sums_follow_from_what_is_reduced(reductions: dict[str, Any], sums: Sums | None) -> None:
    assert dataclasses.replace(FEDAVG, reduces={"train": reductions}).sums(BaseHParams()) == sums


@pytest.mark.parametrize("summed", [False, True])
def test_class_means_are_equal_in_both_forms_where_no_rule_is_needed(summed: bool) -> None:
    spec = ClassMean("rows", lambda *given: np.zeros((3, 1)), "counts", summed=summed)
    of = np.zeros((3, 1))
    server = context(HEAD, num_classes=3, width=1)
    whole = spec.form(server, {})
    forms = [PlainClassMeans(spec, of.shape), RobustClassMeans(spec, of, guard(count_cap=100.0))]
    replies = [
        (np.array([0, 2]), np.array([[1.0], [5.0]], np.float32), np.array([1, 3])),
        (np.array([2]), np.array([[1.0]], np.float32), np.array([1])),
    ]
    for form in forms:
        for client, (labels, rows, counts) in enumerate(replies):
            given = {"rows": rows, "labels": labels, "counts": counts}
            if summed:
                given = {"rows": np.zeros((3, 1), np.float32), "counts": np.zeros(3, np.int64)}
                given["rows"][labels], given["counts"][labels] = rows * counts[:, None], counts
            assert spec.problem(server, reply(client, 4, given), whole) is None
            lost = {n: a for n, a in given.items() if n != "counts"}
            assert spec.problem(server, reply(client, 4, lost), whole) == "'counts' is missing"
            form.add(reply(client, 4, given))
        if not summed:
            assert str(spec.problem(server, reply(1, 0, given), whole)) == "counts of 1 samples from a client of 0"
            many = {**given, "counts": np.array([1, 3]), **dict(zip(("labels", "rows"), replies[0]))}
            assert str(spec.problem(server, reply(0, 3, many), whole)) == "counts of 4 samples from a client of 3"
        found = form.result()
        assert found.seen.tolist() == [True, False, True]
        assert found.values[found.seen].ravel().tolist() == [1.0, 4.0]
        assert {c: o.tolist() for c, o in found.owned.items()} == {0: [0, 2], 1: [2]}


def test_a_reply_of_several_clients_does_not_say_who_has_which_class() -> None:
    means = PlainClassMeans(ClassMean("rows", lambda *given: np.zeros((2, 1))), (2, 1))
    arrays = {"rows": np.ones((1, 1), np.float32), "labels": np.array([1])}
    means.add(dataclasses.replace(reply(-1, 4, arrays), members=(reply(0, 2, {}), reply(1, 2, {}))))
    assert means.result().owned == {}


def test_rules_that_took_the_place_of_others_are_noted_round_by_round() -> None:
    strategy = FEDPROTO.strategy(FEDPROTO, FedProtoHParams(), policy=Policy(guard(robust="trimmed", robust_f=2)))
    state = strategy.init(context(point(0.0), num_classes=2, width=1))
    arrays = {"protos": np.ones((1, 1), np.float32), "labels": np.array([1], np.int32)}
    for times in (1, 2):
        state = strategy.aggregate(state, times, [reply(k, 1, arrays) for k in range(4)])
        assert state["robust"] == {"median": {1: times}}


def test_arrays_that_the_server_does_not_reduce_are_refused() -> None:
    strategy = FEDPROTO.strategy(FEDPROTO, FedProtoHParams())
    state = strategy.init(context({}, num_classes=2, width=1))
    arrays = {"protos": np.ones((1, 1), np.float32), "labels": np.array([1], np.int32)}
    assert refusal(strategy, state, reply(0, 5, arrays)) is None
    for wrong, text in (
        ({**arrays, "counts": np.ones(1, np.int32)}, "'counts' is unexpected"),
        ({"protos": arrays["protos"]}, "'labels' is missing"),
    ):
        found = refusal(strategy, state, reply(0, 5, wrong))
        assert isinstance(found, Impossible) and text in found


def test_a_mean_needs_all_its_arrays() -> None:
    server, form = context(point(0.0)), point(0.0)
    assert isinstance(Mean().problem(server, reply(0, 1, {}), form), Impossible)
    assert Mean().problem(server, reply(0, 1, {**form, "other": np.ones(1)}), form) is None


def test_samples_of_one_client_count_for_a_multiple_of_the_median() -> None:
    replies, counts = [reply(0, n, {}) for n in (10, 20, 100)], [10, 20, 100]
    policy, private = Policy(guard(count_cap=2.0)), Policy(privacy=Privacy("client", 8.0, 1e-5, noise=1.0))
    assert [r.num_samples for r in policy.believed(replies, counts)] == [10, 20, 40]
    assert [r.num_samples for r in private.believed(replies, counts)] == [1, 1, 1]


def test_a_mean_of_decoded_arrays_has_no_form_of_its_own() -> None:
    spec = Mean(read=lambda arrays, of: dict.fromkeys(of, arrays["half"] * 2))
    reducer = MeanReducer(point(0.0), RunningMean(), spec)
    reducer.add(reply(0, 1, {"half": np.ones(1, np.float32)}))
    assert reducer.result()["head.weight"].tolist() == [2.0]
    assert spec.form(context(point(0.0)), {"model": point(0.0)}) is None


class Foreign(FedAvg):
    """The server of another package, which may walk single replies."""


def test_what_a_declaration_does_not_say_is_not_permitted() -> None:
    foreign = dataclasses.replace(FEDAVG, strategy=Foreign)
    assert FEDAVG.sums(BaseHParams()) == Sums("samples") and foreign.sums(BaseHParams()) is None
    declared = dataclasses.replace(foreign, reduces={"train": {"a": Mean(), "b": Mean()}})
    assert declared.sums(BaseHParams()) == Sums("samples")
    mixed = dataclasses.replace(foreign, reduces={"train": {"a": Mean(), "b": Mean(weights="uniform")}})
    assert mixed.sums(BaseHParams()) is None, "a sum has one kind of weights"


def test_a_form_that_no_test_covers_is_refused_by_one_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reductions alone would permit it, for a base of another method too."""
    listed = [("scaffold", ""), ("fed3r", "base=scaffold"), *((name, "") for name in UNTESTED["dp"])]
    found = [registry.configured(*given) for given in listed]
    assert [(m.sums(h) is None, m.units(h)) for m, h in found[:2]] == [(True, ())] * 2
    assert [m.units(h) for m, h in found[2:]] == [()] * 4
    monkeypatch.setattr(fedapp.method, "UNTESTED", {"secure-sum": (), "dp": ()})
    assert all(m.sums(h) for m, h in found[:2])
    assert [m.units(h) for m, h in found[2:]] == [("client",)] * 4


def test_further_arrays_of_a_method_that_declares_no_reductions_are_accepted() -> None:
    method = dataclasses.replace(FEDAVG, strategy=Foreign, extra_up=("mine/",))
    strategy = Foreign(method, BaseHParams())
    state = strategy.init(context(point(0.0)))
    assert refusal(strategy, state, reply(0, 1, {**point(1.0), "mine/x": np.zeros(1, np.float32)})) is None
    further = strategy.schema(state, "train").further
    assert is_one_of("mine/x", further) and not is_one_of("yours", further)


@pytest.mark.parametrize("dtype", [np.complex128, np.bool_, np.float32])
def test_counts_are_whole_numbers(dtype: Any) -> None:
    assert form_problem({"n": np.ones(2, dtype)}, {"n": np.zeros(2, np.int64)}) is not None
    assert form_problem({"n": np.ones(2, np.uint8)}, {"n": np.zeros(2, np.int64)}) is None


@pytest.mark.parametrize("n", [5, 6])
def test_statistics_are_of_no_more_samples_than_the_client_has(n: int) -> None:
    arrays = {"s/count": np.array([2, n - 2]), "s/sum": np.zeros((2, 1)), "s/square": np.zeros((2, 1))}
    total = Total("s/", lambda context: {}, lambda *given: None, lambda arrays: float(arrays["count"].sum()))
    for kind in (total, Gaussians("s/", "sums")):
        found = kind.problem(context(HEAD, num_classes=2, width=1), reply(0, 5, arrays), {})
        assert (found is None) == (n == 5)


def test_a_clients_noise_is_its_share_of_the_variance() -> None:
    privacy = Privacy("example", 8.0, 1e-5, noise=3.0)
    assert Policy(privacy=privacy, share=lambda: 0.25).noise() == 1.5 and Policy().noise() == 0.0


@pytest.mark.parametrize("method", ["fed3r", "fedncm", "lda", "fedgh", "ccvr"])
def test_noised_statistics_of_another_form_are_refused(method: str) -> None:
    known, hparams = registry.configured(method, "cov=sums" if method == "ccvr" else "")
    [statistics] = [
        form for found in known.reductions(hparams).values() for form in map(noised, found.values())
        if isinstance(form, Noised)
    ]  # fmt: skip
    of = context(HEAD, num_classes=2, width=1)
    form = statistics.form(of, {})
    for name, array in form.items():
        assert not array.any(), "no samples"
        assert statistics.problem(of, reply(0, 5, form), form) is None
        for bad in (array.astype(np.float32), array[None], array[:-1]):
            assert isinstance(statistics.problem(of, reply(0, 5, {**form, name: bad}), form), Impossible)
        lost = {other: a for other, a in form.items() if other != name}
        assert isinstance(statistics.problem(of, reply(0, 5, lost), form), Impossible)
        infinite = {**form, name: np.full_like(array, np.nan)}
        assert "not finite" in (statistics.problem(of, reply(0, 5, infinite), form) or "")
