"""The methods in Flower's own round loop, in a plain Flower app that knows nothing of fedapp's engine."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy

from clients.cwfedavg import CwFedAvgHParams
from fedapp import registry
from fedapp.core.classwise import norm_distribution
from fedapp.errors import BadRequest
from fedapp.method import BaseHParams, Payload
from fedapp.reduce.reader import Policy
from fedapp.sampling import sample_clients
from fedapp.settings import RobustnessSettings
from fedapp.transport.local_grid import FIRST_NODE, LocalGrid
from strategies import cfl, cwfedavg, fedamp, fedavg, fedavgm, fedclassavg, fedgh, fedper, lgfedavg

SHAPES = {"conv.weight": (4, 3), "head.weight": (3, 4), "head.bias": (3,)}
SIZES = (10, 30, 60)
COUNTER = {"bn.num_batches_tracked": np.array(5, np.int64)}


class Foreign(NumPyClient):
    """A client that fedapp has never seen: it adds a fixed step to what it receives."""

    def __init__(self, number: int) -> None:
        self.step = [np.random.default_rng(number).standard_normal(s).astype(np.float32) for s in SHAPES.values()]
        self.size = SIZES[number]

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        return [p + s for p, s in zip(parameters, self.step)], self.size, {"lr": config.get("lr", -1.0)}

    def evaluate(self, parameters: list[Any], config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        norm = float(sum(np.square(p).sum() for p in parameters))
        return norm, self.size, {"seen": float(config.get("split", -1.0))}


def client_app(bad: int = -1, extra: int = -1) -> ClientApp:
    """The usual adapter of a NumPyClient to Flower's messages."""
    app = ClientApp()

    def unpack(message: Message, context: Context) -> tuple[Foreign, list[Any], dict[str, Any]]:
        client = Foreign(int(context.node_config["partition-id"]))
        arrays = message.content.array_records["arrays"]
        return client, [arrays[n].numpy() for n in SHAPES], dict(message.content.config_records["config"])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client, arrays, config = unpack(message, context)
        out, size, metrics = client.fit(arrays, config)
        if context.node_config["partition-id"] == bad:
            out[0][0, 0] = np.nan
        record = ArrayRecord({n: Array(a) for n, a in zip(SHAPES, out)})
        if context.node_config["partition-id"] == extra:
            record["optimizer"] = Array(np.zeros(1, np.float32))
        content = RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": size, **metrics})})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client, arrays, config = unpack(message, context)
        loss, size, metrics = client.evaluate(arrays, config)
        found = MetricRecord({"num-examples": size, "loss": loss, **metrics})
        return Message(RecordDict({"metrics": found}), reply_to=message)

    return app


def initial() -> ArrayRecord:
    return ArrayRecord({n: Array(np.full(s, 0.5, np.float32)) for n, s in SHAPES.items()})


def values(record: ArrayRecord) -> dict[str, np.ndarray]:
    return {n: a.numpy() for n, a in record.items()}


def cw(**flower: Any) -> Any:
    return cwfedavg.CwFedAvg(cwfedavg.METHOD, CwFedAvgHParams(), **flower)


def test_a_plain_server_app_runs_cwfedavg_with_a_foreign_client() -> None:
    """Twenty lines that any Flower user would write; one round against the equations by hand."""
    app, found = ServerApp(), {}

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        found["strategy"] = strategy = cw()
        found["result"] = strategy.start(
            grid,
            initial(),
            num_rounds=1,
            train_config=ConfigRecord({"lr": 0.25}),
            evaluate_config=ConfigRecord({"split": 2.0}),
            evaluate_fn=lambda server_round, arrays: MetricRecord({"first": float(values(arrays)["head.bias"][0])}),
        )

    grid = LocalGrid(client_app(), {}, 3)
    app(grid, grid.contexts[FIRST_NODE])
    result, strategy = found["result"], found["strategy"]
    assert isinstance(strategy, Strategy)
    trained = [{n: 0.5 + s for n, s in zip(SHAPES, Foreign(k).step)} for k in range(3)]
    p = np.array([norm_distribution(t["head.weight"].astype(np.float32)) for t in trained])
    q = np.array(SIZES)[:, None] * p
    q /= q.sum(axis=0)  # Eq. 6: weight of client i in the model of class j
    for k in range(3):
        ours = strategy.personal_arrays(k)
        for name in ("head.weight", "head.bias"):
            theta = sum((p[k] @ q.T)[i] * trained[i][name] for i in range(3))
            np.testing.assert_allclose(ours[name], theta, rtol=1e-5)
    assert result.train_metrics_clientapp[1]["lr"] == pytest.approx(0.25), "the train config reaches the clients"
    assert result.evaluate_metrics_clientapp[1]["seen"] == pytest.approx(2.0), "and so does the evaluate config"
    own = [sum(np.square(a.astype(np.float64)).sum() for a in strategy.personal_arrays(k).values()) for k in range(3)]
    assert result.evaluate_metrics_clientapp[1]["loss"] == pytest.approx(np.average(own, weights=SIZES), rel=1e-5)
    assert result.evaluate_metrics_serverapp[0]["first"] == 0.5, "evaluate_fn sees the initial arrays"
    last = values(result.arrays)["head.bias"][0]
    assert result.evaluate_metrics_serverapp[1]["first"] == pytest.approx(float(last)), "and the aggregated ones"
    assert float(last) == pytest.approx(float(strategy.personal_arrays(0)["head.bias"][0]))


def test_fedavg_is_flowers_fedavg_to_rounding() -> None:
    from flwr.serverapp.strategy import FedAvg

    ours = fedavg.METHOD.strategy(fedavg.METHOD, BaseHParams())
    results = [s.start(LocalGrid(client_app(), {}, 3), initial(), num_rounds=3) for s in (ours, FedAvg())]
    for name in SHAPES:
        a, b = (values(r.arrays)[name] for r in results)
        np.testing.assert_allclose(a, b, rtol=1e-6)
    losses = [r.evaluate_metrics_clientapp[3]["loss"] for r in results]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_bad_reply_does_not_count_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    strategy = fedavg.METHOD.strategy(fedavg.METHOD, BaseHParams())
    with caplog.at_level(logging.WARNING, logger="flwr"):
        result = strategy.start(LocalGrid(client_app(bad=2, extra=0), {}, 3), initial(), num_rounds=1)
    np.testing.assert_allclose(values(result.arrays)["head.bias"], 0.5 + Foreign(1).step[2], rtol=1e-5)
    assert "client 2 to train does not count: 'conv.weight' contains NaN" in caplog.text
    assert "client 0 to train does not count: 'optimizer' is not an array that fedavg shares" in caplog.text


@pytest.mark.parametrize(
    ("name", "array", "count", "more", "reason"),
    [
        ("head.weight", np.full((3, 4), 2e4, np.float32), 60, {}, "'head.weight' holds values from 20000"),
        ("head.weight", np.full((3, 4), 2e4, np.float32), 60, {"max_abs": 1e5}, ""),
        (
            "head.bias",
            np.zeros(3, np.complex64),
            60,
            {},
            "'head.bias' has dtype complex64, expected float32 or float64",
        ),
        ("head.bias", np.zeros(3), 60, {}, ""),
        ("head.bias", np.zeros(3, np.float32), 10**12, {}, "num-examples is 1000000000000"),
        ("head.bias", np.zeros(3, np.float32), 12.5, {}, "'num-examples' is 12.5, a whole number is needed"),
    ],
)
def test_a_reply_is_checked_as_the_app_checks_it(
    name: str, array: np.ndarray, count: float, more: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def lie(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type == "train" and context.node_config["partition-id"] == 2:
            reply.content.array_records["arrays"][name] = Array(array)
            reply.content.metric_records["metrics"]["num-examples"] = count
        return reply

    honest, grid = client_app(), LocalGrid(client_app(), {}, 3)
    grid.client_app = lie  # type: ignore[assignment]
    strategy = fedavg.METHOD.strategy(fedavg.METHOD, BaseHParams(), fraction_evaluate=0.0, **more)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        strategy.start(grid, initial(), num_rounds=1)
    assert reason in caplog.text and ("does not count" in caplog.text) == bool(reason)


def test_a_fraction_of_the_clients_is_sampled_by_the_seed() -> None:
    def run(seed: int) -> np.ndarray:
        strategy = fedavg.METHOD.strategy(
            fedavg.METHOD, BaseHParams(), seed=seed, fraction_train=0.4, min_train_nodes=1, fraction_evaluate=0.0
        )
        arrays = strategy.start(LocalGrid(client_app(), {}, 3), initial(), num_rounds=4).arrays
        return values(arrays)["head.bias"]

    for seed in (1, 2):
        chosen = [next(iter(sample_clients(seed, t, [0, 1, 2], 1 / 3))) for t in range(1, 5)]
        np.testing.assert_allclose(run(seed), 0.5 + sum(Foreign(c).step[-1] for c in chosen), rtol=1e-5)
    assert not np.array_equal(run(1), run(2)) and cw().seed == 0


def test_a_query_after_the_last_round_reaches_every_client(caplog: pytest.LogCaptureFixture) -> None:
    """`finalize` asks through Flower too: here for one number of each client, with what the method sends along."""
    app = client_app()

    @app.query("size")
    def size(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        factor = message.content.array_records["arrays"]["factor"].numpy()
        record = ArrayRecord({"size": Array(factor * np.float32(SIZES[number]))})
        content = RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": SIZES[number]})})
        return Message(content, reply_to=message)

    class Asking(fedavg.METHOD.strategy):  # type: ignore[misc, name-defined]
        def finalize(self, state: Any, query: Any) -> Any:
            replies = list(query("size", Payload(common={"factor": np.full(1, 2.0, np.float32)})))
            found.extend((r.client, r.kind, float(r.arrays["size"][0])) for r in replies)
            return state

    class Timed(LocalGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            limits.append(timeout)
            return super().send_and_receive(messages, timeout=timeout)

    found: list[tuple[int, str, float]] = []
    limits: list[float | None] = []
    method = dataclasses.replace(fedavg.METHOD, extra_up=("size",))
    Asking(method, BaseHParams()).start(Timed(app, {}, 3), initial(), num_rounds=1, timeout=30)
    assert found == [(k, "query.size", 2.0 * SIZES[k]) for k in range(3)]
    assert set(limits) == {30}, "the time limit holds for queries too"
    assert "size: asking 3 nodes" in caplog.text


def test_metrics_of_a_few_replies_do_not_count_in_a_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Foreign.fit

    def more(self: Foreign, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        arrays, size, metrics = fit(self, parameters, config)
        return arrays, size, metrics | ({"lr": [1.0, 2.0]} if size == SIZES[0] else {})

    monkeypatch.setattr(Foreign, "fit", more)
    strategy = fedavg.METHOD.strategy(fedavg.METHOD, BaseHParams(), fraction_evaluate=0.0)
    result = strategy.start(
        LocalGrid(client_app(), {}, 3), initial(), num_rounds=1, train_config=ConfigRecord({"lr": 0.25})
    )
    assert result.train_metrics_clientapp[1]["lr"] == pytest.approx(0.25)


def test_a_policy_may_leave_limits_to_the_rules() -> None:
    policy = Policy(RobustnessSettings(robust="median"))
    strategy = fedavg.METHOD.strategy(fedavg.METHOD, BaseHParams(), policy=policy, fraction_evaluate=0.0)
    found = values(strategy.start(LocalGrid(client_app(), {}, 3), initial(), num_rounds=1).arrays)
    for name, n in zip(SHAPES, range(len(SHAPES))):
        np.testing.assert_allclose(
            found[name], 0.5 + np.median([Foreign(k).step[n] for k in range(3)], axis=0), rtol=1e-5
        )


def test_a_client_fn_that_names_nothing_works_by_position() -> None:
    """Flower's NumPyClient behind `client_fn` sends lists: its arrays are taken in the order of the shared names."""
    app = ClientApp(client_fn=lambda context: Foreign(int(context.node_config["partition-id"])).to_client())
    strategy = cw(**SETTINGS)
    strategy.start(LocalGrid(app, {}, 3), initial(), num_rounds=1)
    other = cw(fraction_evaluate=0.0)
    other.start(LocalGrid(client_app(), {}, 3), initial(), num_rounds=1)
    for name in SHAPES:
        assert np.array_equal(strategy.personal_arrays(1)[name], other.personal_arrays(1)[name])


SETTINGS = {
    "arrayrecord_key": "fitins.parameters",
    "configrecord_key": "fitins.config",
    "weighted_by_key": "num_examples",
    "fraction_evaluate": 0.0,
}


@pytest.mark.parametrize("given", range(4))
def test_a_client_fn_without_the_four_settings_ends_the_first_round_with_them(given: int) -> None:
    app = ClientApp(client_fn=lambda context: Foreign(int(context.node_config["partition-id"])).to_client())
    strategy, rounds = cw(**dict(list(SETTINGS.items())[:given])), []
    with pytest.raises(BadRequest) as e:
        strategy.start(LocalGrid(app, {}, 3), initial(), num_rounds=3, evaluate_fn=lambda t, _: rounds.append(t))
    assert all(f"{name}={value!r}" in str(e.value) for name, value in SETTINGS.items()) and rounds == [0]
    with pytest.raises(BadRequest):
        cw(fraction_evaluate=0.0).start(LocalGrid(app, {}, 3), initial(), num_rounds=1)


def test_a_run_in_which_no_reply_counts_does_not_end_well() -> None:
    strategy = fedgh.METHOD.strategy(fedgh.METHOD, fedgh.METHOD.hparams(), fraction_evaluate=0.0)
    with pytest.raises(RuntimeError, match=r"no reply .* in 2 rounds.*The last reason: the values or the labels"):
        strategy.start(LocalGrid(plain_app(False), {}, 3), initial(), num_rounds=2)
    some = fedavg.METHOD.strategy(fedavg.METHOD, BaseHParams(), fraction_evaluate=0.0)
    assert some.start(LocalGrid(client_app(bad=1), {}, 3), initial(), num_rounds=2).train_metrics_clientapp


def test_personal_arrays_need_a_run() -> None:
    with pytest.raises(RuntimeError, match="call start first"):
        cw().personal_arrays(0)


def test_personal_arrays_are_those_of_the_round_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = cw(fraction_evaluate=0.0)
    strategy.start(LocalGrid(client_app(), {}, 3), initial(), num_rounds=2)
    monkeypatch.setattr(strategy.maths, "send", lambda state, *asked: Payload(arrays={"asked": np.array(asked)}))
    assert strategy.personal_arrays(1)["asked"].tolist() == [3, 1]


def plain_app(whole: bool) -> ClientApp:
    """Clients that reply with what they were sent plus 1, or (`whole`) with all arrays of a model of their own."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        received = {n: a.numpy() for n, a in message.content.array_records["arrays"].items()}
        seen.append(sorted(received))
        out = {n: a + np.asarray(number + 1, a.dtype) for n, a in received.items()}
        if whole:
            out = {n: np.full(s, -9.0, np.float32) for n, s in SHAPES.items()} | out
        record = ArrayRecord({n: Array(np.asarray(a)) for n, a in out.items()})
        metrics = MetricRecord({"num-examples": SIZES[number]})
        return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)

    seen: list[list[str]] = []
    app.seen = seen  # type: ignore[attr-defined]
    return app


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("method", [fedclassavg.METHOD, lgfedavg.METHOD, fedavg.METHOD, fedavgm.METHOD, fedper.METHOD])
def test_the_app_gives_its_whole_model_and_only_what_is_shared_travels(method: Any, whole: bool) -> None:
    arrays = ArrayRecord({**initial(), **{n: Array(a) for n, a in COUNTER.items()}})
    app = plain_app(whole)
    strategy = method.strategy(method, method.hparams(), fraction_evaluate=0.0)
    result = values(strategy.start(LocalGrid(app, {}, 3), arrays, num_rounds=1).arrays)
    prefixes = method.shared_prefixes(method.hparams())
    head, rest = "head." in prefixes, "features." in prefixes
    sent = sorted(n for n in [*SHAPES, *COUNTER] if (head if n.startswith("head.") else rest))
    assert app.seen == [sent] * 3  # type: ignore[attr-defined]
    moved = 0.5 + np.average([1, 2, 3], weights=SIZES)
    for name, shape in SHAPES.items():
        shared = head if name.startswith("head.") else rest
        np.testing.assert_allclose(result[name], np.full(shape, moved if shared else 0.5), rtol=1e-6)
    assert result["bn.num_batches_tracked"] == 5, "counters are not averaged"


ALIKE = {
    "cfl",
    "ditto",
    "fedamp",
    "fedavg",
    "fedavgm",
    "fedyogi",
    "fedfomo",
    "fedprox",
    "feduv",
    "ifca",
    "local",
    "moon",
    "scaffold",
}
"""Methods whose server treats all layers alike."""
AVERAGED = {"fedper", "fedrep", "fedbabu", "lgfedavg", "fedclassavg", "fedrod"}
"""Methods whose server needs the names of the head's arrays, and no more."""


def started(method_id: str, shapes: dict[str, tuple[int, ...]], **hparams: Any) -> None:
    method, settings = registry.get(method_id), registry.get(method_id).hparams(**hparams)
    method = registry.resolve(method, settings)
    strategy = method.strategy(method, settings, fraction_evaluate=0.0)
    arrays = ArrayRecord({n: Array(np.full(s, 0.5, np.float32)) for n, s in shapes.items()})
    strategy.start(LocalGrid(plain_app(False), {}, 3), arrays, num_rounds=0)


@pytest.mark.parametrize("method_id", registry.names())
def test_a_model_without_a_layer_called_head_is_refused_unless_all_layers_are_alike(method_id: str) -> None:
    """Every method that tells the head from other layers needs its name: without it, it would share nothing or all."""
    other = {n.replace("head", "fc"): s for n, s in SHAPES.items()}
    if method_id in ALIKE:
        started(method_id, other)
    else:
        with pytest.raises(BadRequest, match=r"no layer .* is called 'head' \(its layers: conv, fc\).*Call the last"):
            started(method_id, other)


@pytest.mark.parametrize("method_id", registry.names())
@pytest.mark.parametrize("wrong", [{"head.weight": (3, 4, 1, 1)}, {"head.bias": (4,)}, {"head.0.weight": (3, 4)}])
def test_a_head_of_another_form_is_refused_where_its_shape_counts(wrong: dict[str, Any], method_id: str) -> None:
    shapes = {**SHAPES, **wrong}
    if "head.0.weight" in wrong:
        del shapes["head.weight"], shapes["head.bias"]
    if method_id in ALIKE | AVERAGED:
        started(method_id, shapes)
    else:
        with pytest.raises(BadRequest, match=r"needs one linear head: 'head.weight' of shape \(classes, features\)"):
            started(method_id, shapes)


@pytest.mark.parametrize(
    ("method_id", "hparams", "left"),
    [
        ("fedper", {}, ("head.weight", "head.bias")),
        ("fedper", {"share": "features.conv2"}, tuple(SHAPES)),
        ("fednh", {}, tuple(SHAPES)),
        ("fedavg", {}, ()),
    ],
)
def test_an_empty_choice_of_layers_is_refused(method_id: str, hparams: dict[str, Any], left: tuple[str, ...]) -> None:
    with pytest.raises(BadRequest, match="no floating-point array of the app's model is one of them"):
        started(method_id, {n: SHAPES[n] for n in left}, **hparams)


def test_a_node_that_left_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    class Leaving(LocalGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = list(super().pull_messages(message_ids))
            for reply in replies:
                if reply.metadata.src_node_id == FIRST_NODE:
                    reply.metadata.__dict__["_src_node_id"] = 1  # the SuperLink's own id
            return replies

    strategy = fedavg.METHOD.strategy(fedavg.METHOD, BaseHParams(), fraction_evaluate=0.0)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        result = strategy.start(Leaving(client_app(), {}, 3), initial(), num_rounds=1)
    expected = 0.5 + np.average([Foreign(k).step[2] for k in (1, 2)], axis=0, weights=SIZES[1:])
    np.testing.assert_allclose(values(result.arrays)["head.bias"], expected, rtol=1e-5)
    assert "unknown node" in caplog.text


def test_no_training_and_another_draw_for_the_evaluation() -> None:
    still = fedavg.METHOD.strategy(fedavg.METHOD, BaseHParams(), fraction_train=0.0, fraction_evaluate=0.0)
    assert not still.start(LocalGrid(client_app(), {}, 3), initial(), num_rounds=1).train_metrics_clientapp
    draws = [[sample_clients(0, t, range(9), 1 / 3, p) for t in range(5)] for p in ("sampling", "evaluation")]
    assert draws[0] != draws[1]


@pytest.mark.parametrize("method", [fedamp.METHOD, cfl.METHOD])
def test_other_methods_that_average_whole_models_take_any_client(method: Any, caplog: pytest.LogCaptureFixture) -> None:
    strategy = method.strategy(method, method.hparams(), fraction_evaluate=0.0)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        result = strategy.start(LocalGrid(client_app(), {}, 3), initial(), num_rounds=2)
    assert set(result.train_metrics_clientapp) == {1, 2} and "does not count" not in caplog.text
    assert not np.allclose(values(result.arrays)["conv.weight"], 0.5)
