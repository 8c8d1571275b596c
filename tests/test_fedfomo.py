"""FedFomo: weights by validation, exploration, and what each client is sent."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fedapp
from clients.fedfomo import (
    FedFomoClient,
    FedFomoHParams,
    held_out,
    mix_weights,
    split_payload,
    value,
    wire_name,
)
from fedapp.data.transforms import normalise
from fedapp.learning.state import ClientStore
from fedapp.method import Arrays, Payload, ServerState
from fedapp.models import selection
from strategies import fedavg
from strategies.fedfomo import METHOD, FedFomo
from tests.handmade import (
    DIGITS_BYTES,
    context,
    digit_tasks,
    digits_context,
    equal,
    federate,
    flat,
    full_batch,
    images,
    point,
    reply,
    steps_by_hand,
)


def hparams_of(**values: Any) -> FedFomoHParams:
    return FedFomoHParams.model_validate(values)


def strategy_of(**values: Any) -> FedFomo:
    return FedFomo(METHOD, hparams_of(**values))


def test_worked_numbers() -> None:
    previous = np.array([1.0, 1.0])
    others = np.array([[1.2, 0.8], [0.6, 1.4], [1.5, 1.5]])
    values = [value(1.0, loss, float(np.linalg.norm(w - previous))) for loss, w in zip((0.9, 1.2, 0.7), others)]
    np.testing.assert_allclose(values, [0.353541, -0.353547, 0.424258], atol=1e-6)
    weights = mix_weights(values)
    np.testing.assert_allclose(weights, [0.0, 0.454540, 0.0, 0.545460], atol=1e-6)
    np.testing.assert_allclose(weights @ np.vstack([previous, others]), [1.363638, 1.181822], atol=1e-6)


def test_a_value_is_zero_for_an_equal_model_and_where_a_loss_is_not_finite() -> None:
    assert value(1.0, 1.0, 0.0) == 0.0
    assert value(1.0, 0.5, 0.0) == pytest.approx(0.5e5)
    for loss, other in ((math.inf, 1.0), (1.0, math.nan), (math.inf, math.inf)):
        assert value(loss, other, 1.0) == 0.0


# ---- the validation split -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "expected"), [(1, 0), (2, 1), (3, 1), (10, 2), (13, 3), (100, 20)])
def test_sizes_of_the_validation_split(n: int, expected: int) -> None:
    train, validation = held_out(n, 0.2, torch.Generator().manual_seed(0))
    assert len(validation) == expected
    assert sorted([*train.tolist(), *validation.tolist()]) == list(range(n))
    assert len(held_out(n, 0.99, torch.Generator().manual_seed(0))[0]) >= 1


def test_validation_images_are_never_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    task, other = digit_tasks(2)
    client = FedFomoClient(task, METHOD, hparams_of())
    trained: set[bytes] = set()
    original = FedFomoClient.step_loss

    def step_loss(self: FedFomoClient, batch: Any) -> torch.Tensor:
        trained.update(self.task.x_train[i].numpy().tobytes() for i in batch.index)
        return original(self, batch)

    monkeypatch.setattr(FedFomoClient, "step_loss", step_loss)
    _, n, _ = client.train_round(Payload(), 1)
    validation = {x.numpy().tobytes() for x in client.x_validation}
    everything = {x.numpy().tobytes() for x in task.x_train}
    assert len(everything) == 40 and len(validation) == 8
    assert trained == everything - validation
    assert n == client.register()[0]["num-examples"] == 32, "the weight is what was trained on"
    again = FedFomoClient(task, METHOD, hparams_of())
    assert torch.equal(again.x_validation, client.x_validation), "the same split in every round"
    moved = FedFomoClient(replace(task, client=1), METHOD, hparams_of())
    assert not torch.equal(moved.x_validation, client.x_validation)
    assert len(other.x_train) == len(task.x_train) == 40, "the task itself is left alone"


# ---- what a client does with other models ---------------------------------------------------------------------------


def models_from(count: int, seed: int = 0, scale: float = 0.05) -> tuple[Arrays, list[Arrays]]:
    """The initial model, and models near it."""
    initial = digits_context(METHOD, hparams_of(), digit_tasks(1)).initial
    rng = np.random.default_rng(seed)
    return initial, [
        {n: a + (scale * rng.standard_normal(a.shape)).astype(np.float32) for n, a in initial.items()}
        for _ in range(count)
    ]


def slots_payload(models: list[Arrays], plain: Arrays | None = None) -> Payload:
    arrays = {wire_name(s, n): a for s, model in enumerate(models) for n, a in model.items()}
    return Payload(arrays={**(plain or {}), **arrays})


@pytest.mark.parametrize("baseline", ["before", "after"])
def test_receiving_equals_a_slow_computation(baseline: str, tmp_path) -> None:
    """In round 2 the client is compared with where it started (before) or with what it left (after)."""
    (task,) = digit_tasks(1)
    initial, others = models_from(4)
    store = ClientStore(tmp_path, "fedfomo", "ab")
    gentle = replace(task, train=task.train.replaced(lr=0.002))
    left, _, _ = FedFomoClient(gentle, METHOD, hparams_of(baseline=baseline), store).train_round(
        Payload(arrays=initial), 1
    )
    assert not equal(left, initial)
    client = FedFomoClient(task, METHOD, hparams_of(baseline=baseline), store)
    payload = slots_payload(others)
    base, own = (initial, left) if baseline == "before" else (left, left)
    if baseline == "before":
        payload = replace(payload, scalars={"fomo-own": 2})
        others = [*others[:2], left, *others[2:]]
    client.restore(2, payload)
    client.receive(payload)

    def loss(arrays: Arrays) -> float:
        model = FedFomoClient.build_model(task.spec(0), client.hparams).eval()
        selection.merge(model, arrays)
        with torch.no_grad():
            logits = [model(normalise(x.permute(2, 0, 1)[None], task.inputs))[0] for x in client.x_validation]
        return float(np.mean([float(F.cross_entropy(z, y)) for z, y in zip(logits, client.y_validation)]))

    values = [(loss(base) - loss(w)) / (np.sqrt(((flat(w) - flat(base)) ** 2).sum()) + 1e-5) for w in others]
    np.testing.assert_allclose(client.values, values, rtol=1e-3, atol=1e-7)
    assert any(v > 0 for v in values) and any(v < 0 for v in values), "the case tells both signs apart"
    total = sum(v for v in values if v > 0)
    expected = flat(own) + sum(v / total * (flat(w) - flat(own)) for v, w in zip(values, others) if v > 0)
    got = selection.extract(client.model, initial)
    np.testing.assert_allclose(flat(got), expected, rtol=1e-3, atol=1e-5)


def test_a_local_round_is_eqs_3_to_5_and_then_descent_on_the_rest() -> None:
    (task,) = digit_tasks(1)
    initial, others = models_from(4)
    client = FedFomoClient(full_batch(task), METHOD, hparams_of(models=4))
    arrays, n, metrics = client.train_round(slots_payload(others, initial), 1)
    w = FedFomoClient.build_model(task.spec(0), client.hparams)
    held = {x.numpy().tobytes() for x in client.x_validation}
    rows = [i for i, x in enumerate(task.x_train) if x.numpy().tobytes() not in held]
    rest = full_batch(replace(task, x_train=task.x_train[rows], y_train=task.y_train[rows]))
    x_rest, y_rest = images(rest), rest.y_train
    x_held = normalise(client.x_validation.permute(0, 3, 1, 2), task.inputs)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return -w(x).log_softmax(dim=1)[torch.arange(len(y)), y].mean()

    losses = []
    for model in (initial, *others):
        selection.merge(w, model)
        losses.append(loss(x_held, client.y_validation).item())
    distances = [np.sqrt(sum(np.square(m[k] - initial[k]).sum() for k in m)) for m in others]
    values = [(losses[0] - other) / (d + 1e-5) for other, d in zip(losses[1:], distances)]
    np.testing.assert_allclose(metrics["fomo-weights"], values, rtol=1e-2, atol=1e-6)
    useful = [max(v, 0.0) for v in values]
    shares = [v / sum(useful) for v in useful]
    start = {k: a + sum(s * (m[k] - a) for s, m in zip(shares, others)) for k, a in initial.items()}
    selection.merge(w, {k: a.astype(np.float32) for k, a in start.items()})
    steps_by_hand(w.parameters(), lambda: loss(x_rest, y_rest), rest)
    assert n == len(rows) == 32
    for name, p in w.named_parameters():
        np.testing.assert_allclose(arrays[name], p.detach(), rtol=1e-2, atol=2e-5)


def test_models_that_do_not_help_change_nothing() -> None:
    (task,) = digit_tasks(1)
    client = FedFomoClient(task, METHOD, hparams_of(models=3))
    initial, _ = models_from(0)
    trained, _, _ = client.train_round(Payload(arrays=initial), 1)
    bad = [{n: a + np.float32(10 * s) for n, a in trained.items()} for s in (1, -1)]
    client = FedFomoClient(task, METHOD, hparams_of(models=3))
    payload = slots_payload([*bad, trained], trained)
    client.restore(2, payload)
    client.receive(payload)
    assert equal(selection.extract(client.model, trained), trained)
    assert client.values[0] < 0 and client.values[1] < 0 and client.values[2] == 0
    assert client.after_training(payload)[1] == {"fomo-weights": list(client.values)}


def test_empty_slots_are_reported_as_zeros() -> None:
    (task,) = digit_tasks(1)
    initial, others = models_from(2)
    _, _, metrics = FedFomoClient(task, METHOD, hparams_of()).train_round(slots_payload(others, initial), 1)
    assert len(metrics["fomo-weights"]) == 5 and metrics["fomo-weights"][2:] == [0.0, 0.0, 0.0]
    _, _, metrics = FedFomoClient(task, METHOD, hparams_of(models=0)).train_round(Payload(arrays=initial), 1)
    assert "fomo-weights" not in metrics


def test_values_of_an_earlier_round_are_forgotten() -> None:
    (task,) = digit_tasks(1)
    initial, _ = models_from(0)
    made = FedFomoClient(task, METHOD, hparams_of(models=2))
    made.values = (1.0, 2.0)
    made.restore(2, Payload(arrays=initial))
    made.receive(Payload(arrays=initial))
    assert made.after_training(Payload())[1] == {"fomo-weights": [0.0, 0.0]}


def test_the_own_model_is_the_stored_one(tmp_path) -> None:
    """From its second round on a client is not sent its own model: it has it."""
    (task,) = digit_tasks(1)
    store = ClientStore(tmp_path, "fedfomo", "ab")
    initial, _ = models_from(0)
    trained, _, _ = FedFomoClient(task, METHOD, hparams_of(), store).train_round(Payload(arrays=initial), 1)
    still = replace(task, train=task.train.replaced(lr=0.0))
    arrays, _, _ = FedFomoClient(still, METHOD, hparams_of(), store).train_round(Payload(), 2)
    assert equal(arrays, trained)
    worse = {n: a + np.float32(10) for n, a in trained.items()}
    arrays, _, metrics = FedFomoClient(still, METHOD, hparams_of(), store).train_round(slots_payload([worse]), 3)
    assert equal(arrays, trained) and metrics["fomo-weights"][0] < 0


def test_a_client_that_lost_its_state_goes_on_with_the_others_models() -> None:
    (task,) = digit_tasks(1)
    initial, _ = models_from(0)
    good, _, _ = FedFomoClient(task, METHOD, hparams_of()).train_round(Payload(arrays=initial), 1)
    client = FedFomoClient(task, METHOD, hparams_of())
    client.restore(2, slots_payload([good]))
    client.receive(slots_payload([good]))
    assert equal(selection.extract(client.model, good), good)


def test_a_client_with_one_sample_trains_and_takes_part() -> None:
    (task,) = digit_tasks(1)
    task = replace(task, x_train=task.x_train[:1], y_train=task.y_train[:1])
    initial, others = models_from(2)
    arrays, n, metrics = FedFomoClient(task, METHOD, hparams_of()).train_round(slots_payload(others, initial), 1)
    assert n == 1 and metrics["fomo-weights"] == [0.0] * 5
    assert all(np.isfinite(a).all() for a in arrays.values())


# ---- what the server sends ------------------------------------------------------------------------------------------


def trained_state(strategy: FedFomo, clients: int, table: Any = None) -> ServerState:
    """A state in which all clients took part; client c's model is the point (c, c)."""
    state = strategy.init(context(point(9.0, 9.0), clients=clients))
    zeros = [0.0] * strategy.hparams.models
    replies = [reply(c, 10, point(c, c), fomo_weights=zeros) for c in range(clients)]
    state = strategy.aggregate(state, 1, iter(replies))
    return state if table is None else {**state, "P": np.asarray(table, dtype=np.float64)}


def test_the_most_useful_models_are_sent_not_the_least() -> None:
    strategy = strategy_of(models=2, epsilon=0.0, baseline="after")
    table = [[0, -1, 3, 1, 2], [5, 0, -5, -6, -7], *np.zeros((3, 5))]
    state = trained_state(strategy, 5, table)
    assert strategy.slots(state, 2, 0) == [2, 4]
    assert strategy.slots(state, 2, 1) == [0, 2]
    _, models = split_payload(strategy.send(state, 2, 0))
    assert [m["head.weight"].tolist() for m in models] == [[2, 2], [4, 4]]


def test_exploration_reaches_everybody_and_fades() -> None:
    table = np.zeros((6, 6))
    table[0] = [0, 50, 40, 1, 1, 1]
    cases = (
        (1.0, 1.0, 2, False),
        (1.0, 0.5, 60, True),
        (0.0, 1.0, 2, True),
        (1.0, 1e-9, 1, False),
        (1.0, 1e-9, 2, True),
    )
    for epsilon, decay, server_round, greedy in cases:
        strategy = strategy_of(models=2, epsilon=epsilon, decay=decay, baseline="after")
        seen: Counter[int] = Counter()
        for seed in range(60):
            ctx = context(point(9.0, 9.0), clients=6, seed=seed)
            state = trained_state(strategy, 6, table)
            strategy.context = ctx
            seen.update(strategy.slots(state, server_round, 0))
        assert (set(seen) == {1, 2}) is greedy
        if not greedy:
            assert set(seen) == {1, 2, 3, 4, 5} and max(seen.values()) < 3 * min(seen.values())


def test_without_any_experience_choices_differ_between_clients_and_rounds_but_repeat() -> None:
    strategy = strategy_of(baseline="after", models=2, epsilon=0.0)
    state = trained_state(strategy, 12)
    choices = [tuple(strategy.slots(state, r, c)) for r in range(2, 6) for c in range(12)]
    assert len(set(choices)) > 20
    assert choices == [tuple(strategy.slots(state, r, c)) for r in range(2, 6) for c in range(12)]
    assert not state["P"].any()
    backwards = {**state, "models": dict(reversed(state["models"].items()))}
    assert choices == [tuple(strategy.slots(backwards, r, c)) for r in range(2, 6) for c in range(12)]
    for c in range(12):
        chosen = strategy.slots(state, 2, c)
        assert c not in chosen and len(set(chosen)) == 2


def test_the_own_trained_model_competes_for_a_slot_and_does_not_travel() -> None:
    """P starts as the identity, as in the released code; values move the own model down like any other."""
    strategy = strategy_of(models=2, epsilon=0.0)
    state = trained_state(strategy, 5)
    np.testing.assert_array_equal(state["P"], np.eye(5))
    assert all(strategy.slots(state, 2, c)[0] == c for c in range(5))
    table = [[0.5, 0, 3, 0.4, 0], [5, 6, 7, 0, 0], [1, 1, -9, 1, 1], *np.zeros((2, 5))]
    state = trained_state(strategy, 5, table)
    for client, slots, place, sent in ((0, [2, 0], 1, [[2, 2]]), (1, [2, 1], 1, [[2, 2]]), (2, None, None, None)):
        payload = strategy.send(state, 2, client)
        _, models = split_payload(payload)
        if slots is None:
            assert payload.scalars == {} and len(models) == 2
        else:
            assert strategy.slots(state, 2, client) == slots and payload.scalars == {"fomo-own": place}
            assert [m["head.weight"].tolist() for m in models] == sent
    after = strategy.aggregate(state, 2, iter([reply(1, 10, point(1, 1), fomo_weights=[-0.5, 0.25])]))
    assert after["P"][1].tolist() == [5, 6.25, 6.5, 0, 0]
    joined = strategy.aggregate(state, 2, iter([reply(7, 10, point(7, 7), fomo_weights=[0.0, 0.0])]))
    assert joined["P"][5].tolist() == [0, 0, 0, 0, 0, 1], (
        "a client that joins later believes in itself as the others did"
    )


def test_weights_go_to_the_clients_that_sat_in_the_slots() -> None:
    strategy = strategy_of(models=3)
    state = trained_state(strategy, 6)
    for server_round in (2, 3):
        slots = {c: strategy.slots(state, server_round, c) for c in (1, 4)}
        values = {1: [0.5, -2.0, 0.25], 4: [1.0, 2.0, -3.0]}
        replies = [reply(c, 10, point(-c, -c), fomo_weights=values[c]) for c in (1, 4)]
        after = strategy.aggregate(state, server_round, iter(replies))
        expected = state["P"].copy()
        for c, chosen in slots.items():
            for other, v in zip(chosen, values[c]):
                expected[c, other] += v
        np.testing.assert_array_equal(after["P"], expected)
        assert equal(after["models"][1], point(-1, -1)) and equal(after["models"][2], point(2, 2))
        state = after
    assert (state["P"] < 0).any(), "what hurt is remembered too"


def test_the_first_round_sends_the_initial_model_alone_and_newcomers_get_it_beside_the_others() -> None:
    strategy = strategy_of(baseline="after", models=2)
    state = strategy.init(context(point(9.0, 9.0), clients=4))
    assert equal(strategy.send(state, 1, 0).all(), point(9.0, 9.0))
    zeros = [0.0, 0.0]
    state = strategy.aggregate(state, 1, iter([reply(c, 5, point(c, c), fomo_weights=zeros) for c in (0, 2)]))
    assert strategy.slots(state, 2, 0) == [2], "only clients that took part have a model to pass on"
    rest, models = split_payload(strategy.send(state, 2, 3))
    assert equal(rest.all(), point(9.0, 9.0)) and len(models) == 2
    rest, models = split_payload(strategy.send(state, 2, 2))
    assert rest.all() == {} and len(models) == 1


def test_a_client_that_joins_later_is_added_to_the_table() -> None:
    strategy = strategy_of(baseline="after", models=2)
    state = trained_state(strategy, 3, np.arange(9).reshape(3, 3))
    state["ids"] = np.array([0, 1, 5])
    state["models"] = {0: point(0, 0), 1: point(1, 1), 5: point(5, 5)}
    chosen = strategy.slots(state, 2, 3)
    after = strategy.aggregate(state, 2, iter([reply(3, 5, point(3, 3), fomo_weights=[1.0, 2.0])]))
    assert after["ids"].tolist() == [0, 1, 3, 5]
    np.testing.assert_array_equal(after["P"][np.ix_([0, 1, 3], [0, 1, 3])], state["P"])
    row = dict(zip(after["ids"].tolist(), after["P"][2]))
    assert [row[c] for c in chosen] == [1.0, 2.0] and sum(row.values()) == 3.0
    assert state["P"].shape == (3, 3), "the old state is left alone"


@pytest.mark.parametrize("bad", [None, [1.0], [1.0, math.nan], [math.inf, 0.0], 3.0])
def test_weights_that_are_not_m_numbers_are_refused(bad: Any) -> None:
    metrics = {} if bad is None else {"fomo_weights": bad}
    assert "fomo-weights" in str(strategy_of(models=2).check({}, reply(0, 1, point(1), **metrics)))
    assert strategy_of(models=2).check({}, reply(0, 1, point(1), fomo_weights=[1.0, -1.0])) is None
    assert strategy_of(models=0).check({}, reply(0, 1, point(1))) is None


# ---- whole runs -----------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_clients_find_those_of_their_own_population(tmp_path) -> None:
    """Labels of odd clients are shifted by 3: afterwards the most useful other client is one of the same kind."""
    tasks = digit_tasks(6, relabel=lambda c, y: y if c % 2 == 0 else (y + 3) % 10, train=80)
    stores = {t.client: ClientStore(tmp_path / str(t.client), "fedfomo", "ab") for t in tasks}
    _, state, scores = federate(METHOD, hparams_of(), tasks, 8, stores=stores)
    table = state["P"] - 1e9 * np.eye(6)
    assert all(int(table[c].argmax()) % 2 == c % 2 for c in range(6))
    _, _, single = federate(fedavg.METHOD, fedavg.METHOD.hparams(), tasks, 8)
    assert min(scores.values()) > max(single.values())


@pytest.mark.full
def test_bytes_of_the_extra_downloads(tmp_path) -> None:
    """Round 1: the initial model; then the models of the other three clients, up to M. The own one does not travel."""
    common = {"method": "fedfomo", "clients": 4, "rounds": 3, "dataset": "digits", "data_fraction": 0.3}
    for args, per_round in (
        ("", [1, 3, 3]),
        ("models=2 epsilon=0", [1, 1, 1]),
        ("models=2 baseline=after", [1, 2, 2]),
        ("models=0", [1, 0, 0]),
    ):  # fmt: skip
        result = fedapp.run(method_args=args, out=tmp_path / f"run-{args}", **common)
        assert result.rounds["bytes_down"].tolist() == [k * DIGITS_BYTES for k in per_round]
        assert result.rounds["bytes_up"].tolist() == [DIGITS_BYTES] * 3
        assert result.rounds[["received_accuracy", "trained_accuracy"]].notna().all(axis=None)


def test_a_bound_on_updates_is_measured_from_the_mixed_model() -> None:
    """The payload holds other clients' models only, under other names."""
    (task,) = digit_tasks(1)
    client = FedFomoClient(task, METHOD, hparams_of())
    initial, others = models_from(3)
    payload = slots_payload(others, initial)
    client.restore(1, payload)
    client.receive(payload)
    mixed = selection.extract(client.model, initial)
    client.before_training(payload)
    client.run_phases()
    assert equal(client.reference, mixed) and not equal(mixed, initial)
    assert not equal(selection.extract(client.model, initial), mixed)


def test_validation_images_of_the_run_take_the_place_of_its_own() -> None:
    (task,) = digit_tasks(1)
    x, y = task.x_test[:7], task.y_test[:7]
    given = FedFomoClient(replace(task, x_validation=x, y_validation=y), METHOD, hparams_of())
    assert given.task.num_samples == task.num_samples and given.x_validation is x and given.y_validation is y
    none = replace(task, x_validation=x[:0], y_validation=y[:0])
    for own in (FedFomoClient(none, METHOD, hparams_of()), FedFomoClient(task, METHOD, hparams_of())):
        assert len(own.y_validation) == round(0.2 * task.num_samples) == task.num_samples - own.task.num_samples


def test_without_other_models_a_client_receives_what_it_left(tmp_path) -> None:
    """The reduction to training alone: what is received is what was trained one round before."""
    result = fedapp.run(
        method="fedfomo",
        method_args="models=0",
        clients=4,
        rounds=3,
        dataset="digits",
        data_fraction=0.3,
        out=tmp_path / "alone",
    )
    for name in ("correct", "loss"):
        received = result.clients.pivot(index="round", columns="client", values=f"received_{name}")
        trained = result.clients.pivot(index="round", columns="client", values=f"trained_{name}")
        np.testing.assert_array_equal(received.loc[[2, 3]], trained.loc[[1, 2]])
    np.testing.assert_array_equal(
        result.final["received_correct"], result.clients.query("round == 3")["trained_correct"]
    )
