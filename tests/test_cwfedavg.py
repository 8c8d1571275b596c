"""cwFedAvg + WDR: worked numbers, slow double loops, limits, and the rules of partial participation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedapp
from clients.cwfedavg import CwFedAvgClient, CwFedAvgHParams, classwise_names
from fedapp.core.classwise import class_globals
from fedapp.data.transforms import InputSpec
from fedapp.errors import BadRequest
from fedapp.learning.task import Task
from fedapp.method import Arrays, Payload, Reply, ServerContext, ServerState
from fedapp.models import SplitModel, build_model, selection
from fedapp.reduce.reader import Policy
from fedapp.registry import resolve
from strategies.cwfedavg import METHOD, CwFedAvg
from tests import handmade
from tests.handmade import guard, refusal, short

# Three clients, three classes, two features.
N = [100, 60, 40]
W = [[[3, 4], [0, 2], [0.6, 0.8]], [[0.3, 0.4], [6, 8], [1, 0]], [[1, 0], [0, 1], [1.2, 1.6]]]
B = [[0.5, 0.1, -0.2], [0.0, 0.4, 0.2], [-0.1, 0.3, 0.6]]
COUNTS = [[80, 20, 0], [0, 50, 10], [10, 10, 20]]
PT = [[0.625, 0.25, 0.125], [0.043478, 0.869565, 0.086957], [0.25, 0.25, 0.5]]
L = [
    [2.134366, 2.608257, 1.131748, 2.953575, 0.782354, 0.791639, 0.298784, 0.192222, 0.017989],
    [1.254965, 1.471088, 3.203860, 5.052211, 0.904580, 0.494138, 0.142022, 0.290523, 0.134910],
    [1.731636, 1.872724, 1.364840, 3.037747, 0.887245, 0.879696, 0.190008, 0.233661, 0.152664],
]
G = [
    [2.639942, 3.342402, 0.208394, 2.075253, 0.693777, 0.878726, 0.402750, 0.137048, -0.079595],
    [1.154613, 1.386534, 3.591022, 5.476309, 0.908229, 0.412968, 0.131920, 0.302494, 0.131172],
    [1.565994, 1.380980, 0.829971, 2.299712, 0.973487, 1.113545, 0.112680, 0.247550, 0.279539],
]
FEDAVG_ROW = [1.79, 2.12, 1.80, 3.60, 0.84, 0.72, 0.23, 0.23, 0.08]
EXACT = {"rtol": 0, "atol": 6e-7}


def context(initial: Arrays, num_classes: int) -> ServerContext:
    return handmade.context(initial, 0, num_classes=num_classes, width=int(initial["head.weight"].shape[1]))


def strategy(**hparams: object) -> CwFedAvg:
    chosen = CwFedAvgHParams(**hparams)  # type: ignore[arg-type]
    return CwFedAvg(resolve(METHOD, chosen), chosen)


def toy_head(w: object, b: object) -> Arrays:
    return {"head.weight": np.array(w, np.float32), "head.bias": np.array(b, np.float32)}


def toy_reply(i: int, **extra: np.ndarray) -> Reply:
    return Reply(i, N[i], {**toy_head(W[i], B[i]), **extra}, {})


def toy(
    *clients: int, state: ServerState | None = None, server_round: int = 1, **hparams: object
) -> tuple[CwFedAvg, ServerState]:
    server = strategy(**hparams)
    ctx = context(toy_head(np.full((3, 2), 7.0), np.zeros(3)), 3)
    start = server.init(ctx)
    start = start if state is None else state
    return server, server.aggregate(start, server_round, iter([toy_reply(i) for i in clients]))


def flat(arrays: Arrays) -> np.ndarray:
    return np.concatenate([arrays[n].ravel() for n in sorted(arrays, key=lambda n: (n != "head.weight", n))])


def sent(server: CwFedAvg, state: ServerState, client: int) -> np.ndarray:
    return flat(server.send(state, 2, client).all())


def rows(state: ServerState) -> list[Arrays]:
    return [state["rows"][i] for i in range(len(state["rows"]))]


def test_a_lie_in_the_head_moves_no_row_farther_than_the_median_client_moves_it() -> None:
    initial, replies = instance(5, 5, 3)
    server = CwFedAvg(METHOD, CwFedAvgHParams(layers="all"), policy=Policy(guard(robust="own", robust_f=1)))
    state = server.init(context(initial, 3))
    replies[2].arrays["head.weight"] = initial["head.weight"] + np.float32(1e3)
    reduced = server.reader.reduce("train", replies, state, lambda clients: server.send_each(state, 1, clients))
    found = [share.reply for share in reduced.shares()]
    changes = np.array([
        [np.linalg.norm(np.append(r.arrays["head.weight"][j] - initial["head.weight"][j],
                                  r.arrays["head.bias"][j] - initial["head.bias"][j])) for j in range(3)]
        for r in replies
    ])  # fmt: skip
    medians = np.median(changes, axis=0)
    for before, after, lengths in zip(replies, found, changes, strict=True):
        for name in ("head.weight", "head.bias"):
            change = (before.arrays[name] - initial[name]).astype(float)
            factor = np.minimum(1, medians / lengths).reshape(-1, *[1] * (change.ndim - 1))
            np.testing.assert_allclose(after.arrays[name] - initial[name], factor * change, atol=2e-4)
            assert after.arrays[name].dtype == np.float32


# ---- worked numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", ["output", "all", "1"])
def test_worked_numbers(layers: str) -> None:
    server, state = toy(0, 1, 2, layers=layers)
    np.testing.assert_allclose([state["pt"][i] for i in range(3)], PT, **EXACT)
    q = [[0.832127, 0.286783, 0.331412], [0.034732, 0.598504, 0.138329], [0.133140, 0.114713, 0.530259]]
    np.testing.assert_allclose(state["q"], q, **EXACT)
    np.testing.assert_allclose([sent(server, state, i) for i in range(3)], L, rtol=0, atol=1e-6)
    np.testing.assert_allclose([flat(g) for g in class_globals(rows(state), state["q"])], G, rtol=0, atol=1e-6)


def test_common_layers_are_fedavg() -> None:
    server, state = toy(0, 1, 2, layers="none")
    np.testing.assert_allclose([sent(server, state, i) for i in (0, 1, 9)], [FEDAVG_ROW] * 3, rtol=0, atol=1e-6)


def test_partial_participation() -> None:
    """Round 2 sees clients 0 and 2; client 1 is blended with its stored distribution, a newcomer with 1/K."""
    _, first = toy(0, 1, 2)
    server, state = toy(0, 2, state=first, server_round=2)
    np.testing.assert_allclose(state["q"], [[0.862069, 0.714286, 0.384615], [0.137931, 0.285714, 0.615385]], **EXACT)
    theta = [flat(toy_head(W[i], B[i])) for i in (0, 2)]
    a = [[0.765441, 0.234559], [0.692044, 0.307956], [0.586396, 0.413604], [0.653657, 0.346343]]
    for client, row in zip((0, 1, 2, 7), a, strict=True):
        np.testing.assert_allclose(sent(server, state, client), np.array(row) @ theta, rtol=0, atol=4e-6)
    newcomer = [2.307313, 2.614627, 0, 1.653657, 0.807806, 1.077075, 0.292194, 0.169269, 0.077075]
    np.testing.assert_allclose(sent(server, state, 7), newcomer, rtol=0, atol=1e-6)
    np.testing.assert_allclose(state["pt"][1], PT[1], **EXACT)  # of its last upload
    assert 7 not in state["pt"]


def test_empirical_distributions() -> None:
    p = np.array(COUNTS) / np.array(N)[:, None]
    server = strategy(dist="empirical")
    start = server.init(context(toy_head(np.ones((3, 2)), np.zeros(3)), 3))
    replies = [toy_reply(i, distribution=p[i].astype(np.float32)) for i in range(3)]
    assert all(refusal(server, {}, r) is None for r in replies)
    replies[0].arrays["distribution"] *= np.float32(1.005)  # only its shares count
    state = server.aggregate(start, 1, iter(replies))
    q = [[0.888889, 0.25, 0], [0, 0.625, 0.333333], [0.111111, 0.125, 0.666667]]
    np.testing.assert_allclose(state["q"], q, **EXACT)
    a = [[0.761111, 0.125, 0.113889], [0.208333, 0.576389, 0.215278], [0.284722, 0.322917, 0.392361]]
    theta = np.array([flat(toy_head(W[i], B[i])) for i in range(3)])
    np.testing.assert_allclose([sent(server, state, i) for i in range(3)], a @ theta, rtol=0, atol=4e-6)


# ---- oracle ----------------------------------------------------------------------------------------------------------

NAMES = {"features.conv1.weight": (2, 3), "features.bn1.running_var": (2,), "features.fc1.weight": (4, 2)}


def instance(seed: int, clients: int, classes: int) -> tuple[Arrays, list[Reply]]:
    rng = np.random.default_rng(seed)
    shapes = {**NAMES, "head.weight": (classes, 4), "head.bias": (classes,)}

    def draw() -> Arrays:
        arrays = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
        arrays["features.bn1.running_var"] = np.abs(arrays["features.bn1.running_var"])
        arrays["head.weight"] *= rng.uniform(0.05, 3, size=(classes, 1)).astype(np.float32)
        return arrays

    return draw(), [Reply(i, int(rng.integers(1, 500)), draw(), {}) for i in range(clients)]


def slow(
    replies: Sequence[Reply], p: dict[int, np.ndarray], recipient: np.ndarray, names: Sequence[str], classes: int
) -> Arrays:
    """Equations 5, 6 and 7 one number after the other; all other arrays averaged by n_i."""
    total = sum(r.num_samples for r in replies)
    out = {}
    for name in replies[0].arrays:
        value = np.zeros(replies[0].arrays[name].shape)
        if name not in names:
            for r in replies:
                value += r.num_samples / total * r.arrays[name].astype(float)
        else:
            for j in range(classes):
                mass = sum(r.num_samples * p[r.client][j] for r in replies)
                for r in replies:
                    q = r.num_samples * p[r.client][j] / mass if mass else r.num_samples / total
                    value += recipient[j] * q * r.arrays[name].astype(float)
        out[name] = value
    return out


def slow_pt(head_weight: np.ndarray) -> np.ndarray:
    norms = [sum(float(v) ** 2 for v in row) ** 0.5 for row in head_weight]
    return np.array(norms) / sum(norms)


@pytest.mark.parametrize("layers", ["output", "all", "fc1+output", "conv1"])
@pytest.mark.parametrize(
    ("clients", "classes"), [(1, 4), (3, 4), (4, 4), (5, 4), (8, 4), (9, 4), (23, 4), (7, 1), (6, 2), (5, 30)]
)
def test_against_double_loops(layers: str, clients: int, classes: int) -> None:
    initial, replies = instance(clients * 31 + classes, clients, classes)
    server = strategy(layers=layers)
    start = server.init(context(initial, classes))
    state = server.aggregate(start, 1, iter(replies))
    assert len(state["rows"]) == min(clients, classes) == len(state["q"])
    kept = [a for row in state["rows"].values() for a in row.values()]
    assert not any(np.shares_memory(a, b) for a in kept for r in replies for b in r.arrays.values())
    np.testing.assert_allclose(state["q"].sum(axis=0), 1, rtol=1e-12)
    names = classwise_names(layers, list(initial))
    p = {r.client: slow_pt(r.arrays["head.weight"]) for r in replies}
    for client in (*range(clients), 99):
        expected = slow(replies, p, p.get(client, np.full(classes, 1 / classes)), names, classes)
        payload = server.send(state, 2, client)
        got = payload.all()
        assert set(got) == set(initial)
        for name in got:
            np.testing.assert_allclose(got[name], expected[name], rtol=2e-5, atol=3e-6)
            assert got[name].dtype == np.float32 and got[name].shape == initial[name].shape
        assert (got["features.bn1.running_var"] >= 0).all()
        if len(state["rows"]) > 1:  # a single class-wise model is common to all
            assert sorted(payload.arrays) == sorted(names)
            assert all(payload.common[n] is state["common"][n] for n in set(initial) - set(names))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), clients=st.integers(1, 12), classes=st.integers(1, 5))
def test_a_consensus_is_kept_and_blends_stay_between_the_uploads(seed: int, clients: int, classes: int) -> None:
    initial, replies = instance(seed, clients, classes)
    server = strategy(layers="all")
    state = server.aggregate(server.init(context(initial, classes)), 1, iter(replies))
    for name, blend in server.send(state, 2, 0).all().items():
        uploads = np.stack([r.arrays[name] for r in replies])
        assert (blend <= uploads.max(0) + 1e-5).all() and (blend >= uploads.min(0) - 1e-5).all()
    same = [Reply(r.client, r.num_samples, replies[0].arrays, {}) for r in replies]
    state = server.aggregate(server.init(context(initial, classes)), 1, iter(same))
    for name, blend in server.send(state, 2, 0).all().items():
        np.testing.assert_allclose(blend, replies[0].arrays[name], rtol=1e-5, atol=1e-6)


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_even_distributions_give_fedavg() -> None:
    initial, replies = instance(5, 6, 3)
    for r in replies:  # rows of equal norm: p~ = 1/K
        w = r.arrays["head.weight"]
        r.arrays["head.weight"] = (w / np.linalg.norm(w, axis=1, keepdims=True)).astype(np.float32)
    mean, all_layers = strategy(layers="none"), strategy(layers="all")
    expected = mean.send(mean.aggregate(mean.init(context(initial, 3)), 1, iter(replies)), 2, 0).all()
    state = all_layers.aggregate(all_layers.init(context(initial, 3)), 1, iter(replies))
    for client in (0, 5, 99):
        got = all_layers.send(state, 2, client).all()
        for name in got:
            np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=2e-6)


def empirical(replies: list[Reply], owners: Sequence[Sequence[float]]) -> list[Reply]:
    for r, p in zip(replies, owners, strict=True):
        r.arrays["distribution"] = np.array(p, np.float32)
    return replies


@pytest.mark.parametrize("clients", [4, 11])
def test_one_class_a_client(clients: int) -> None:
    """Eq. 9: clients of one class share FedAvg of that class among themselves. Class 3 is held by nobody."""
    initial, replies = instance(7, clients, 4)
    kinds = [i % 3 for i in range(clients)]
    server = strategy(layers="all", dist="empirical")
    start = server.init(context(initial, 4))
    state = server.aggregate(start, 1, iter(empirical(replies, np.eye(4)[kinds].tolist())))
    for i, kind in enumerate(kinds):
        own = [r for r, k in zip(replies, kinds, strict=True) if k == kind]
        weight = sum(r.num_samples for r in own)
        for name, value in server.send(state, 2, i).all().items():
            expected = sum(r.num_samples / weight * r.arrays[name].astype(float) for r in own)
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=2e-6)
    nobody = {**state, "pt": {50: np.eye(4)[3]}}  # the class without a holder: FedAvg over all, not 0/0
    total = sum(r.num_samples for r in replies)
    for name, value in server.send(nobody, 2, 50).all().items():
        expected = sum(r.num_samples / total * r.arrays[name].astype(float) for r in replies)
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("layers", ["output", "all"])
def test_clients_served_together_get_what_each_gets_alone(layers: str) -> None:
    """More clients than go into one product, some of them new, and more uploads than classes."""
    initial, replies = instance(9, 7, 4)
    server = strategy(layers=layers)
    state = server.aggregate(server.init(context(initial, 4)), 1, iter(replies))
    ids = [*range(7), *range(100, 130)]
    together = dict(server.send_each(state, 2, iter(ids)))
    assert list(together) == ids
    for client in ids:
        alone = server.send(state, 2, client)
        assert together[client].common.keys() == alone.common.keys()
        for name, value in alone.all().items():
            np.testing.assert_allclose(together[client].all()[name], value, rtol=1e-6, atol=1e-7)


# ---- partial participation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", ["output", "all", "none"])
def test_round_one_hands_out_the_initial_model_itself(layers: str) -> None:
    initial, _ = instance(1, 0, 4)
    server = strategy(layers=layers)
    state = server.init(context(initial, 4))
    first, second = server.send(state, 1, 0), server.send(state, 1, 17)
    assert set(first.common) == set(initial) and not first.arrays
    assert all(first.common[n] is second.common[n] is initial[n] for n in initial)


def test_only_the_last_rounds_uploads_count_and_old_distributions_stay() -> None:
    initial, replies = instance(2, 6, 3)
    server = strategy(layers="all")
    first = server.aggregate(server.init(context(initial, 3)), 1, iter(replies[:4]))
    second = server.aggregate(first, 2, iter(replies[4:]))
    assert sorted(second["pt"]) == [0, 1, 2, 3, 4, 5]
    p = {r.client: slow_pt(r.arrays["head.weight"]) for r in replies}
    expected = slow(replies[4:], p, p[1], list(initial), 3)
    for name, value in server.send(second, 3, 1).all().items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=2e-6)


def test_a_new_upload_brings_a_new_distribution() -> None:
    initial, replies = instance(2, 4, 3)
    server = strategy()
    first = server.aggregate(server.init(context(initial, 3)), 1, iter(replies[:2]))
    again = Reply(0, replies[0].num_samples, replies[3].arrays, {})
    second = server.aggregate(first, 2, iter([again]))
    np.testing.assert_allclose(second["pt"][0], slow_pt(replies[3].arrays["head.weight"]), rtol=1e-6)
    np.testing.assert_allclose(first["pt"][0], slow_pt(replies[0].arrays["head.weight"]), rtol=1e-6)
    assert np.array_equal(second["pt"][1], first["pt"][1])


def test_the_mean_distance_is_reported_and_nonsense_in_it_is_passed_over() -> None:
    initial, replies = instance(3, 4, 4)
    for r, value in zip(replies, (0.25, [1.0], 0.75, None), strict=True):
        r.metrics = {} if value is None else {"wdr": value}
    server = strategy()
    state = server.aggregate(server.init(context(initial, 4)), 1, iter(replies))
    assert server.report(state, {}) == {"wdr": [0.5], "classwise_layers": ["head"]}
    two = strategy(layers="fc1+output")
    start = two.init(context(initial, 4))
    assert start["wdr"].shape == (0,)
    assert two.report(start, {}) == {"wdr": [], "classwise_layers": ["features.fc1", "head"]}


def test_no_upload_leaves_everything() -> None:
    server, state = toy(0, 1, 2)
    after = server.aggregate(state, 2, iter([]))
    assert np.array_equal(sent(server, after, 1), sent(server, state, 1))
    assert server.report(after, {})["wdr"] == [None, None]
    told = toy_reply(0)
    told.metrics = {"wdr": 0.5}
    last = server.aggregate(server.aggregate(after, 3, iter([told])), 4, iter([]))
    assert server.report(last, {})["wdr"] == [None, None, 0.5, None], "in the order of the rounds"


@pytest.mark.parametrize("classes", [3, 2])
def test_a_class_that_no_participant_holds_may_keep_its_model(classes: int) -> None:
    """tau: with 2 classes the kept model makes three rows for two classes, so the globals themselves are kept."""
    initial, replies = instance(4, 4, classes)
    eye = np.eye(classes)
    server = strategy(layers="all", dist="empirical", tau=0.5)
    start = server.init(context(initial, classes))
    first = server.aggregate(start, 1, iter(empirical(replies[:2], eye[[0, 1]].tolist())))
    before = {j: flat(class_globals(rows(first), first["q"])[j]) for j in range(classes)}
    second = server.aggregate(first, 2, iter(empirical(replies[2:], eye[[0, 0]].tolist())))
    after = {j: flat(class_globals(rows(second), second["q"])[j]) for j in range(classes)}
    assert not np.allclose(after[0], before[0])
    for j in range(1, classes):
        np.testing.assert_allclose(after[j], before[j], rtol=1e-6)
    assert len(second["rows"]) == len(second["q"]) and (len(second["rows"]) == 2 if classes == 2 else True)
    held = sum(second["share"].values())
    np.testing.assert_allclose(held, [1.0] * min(classes, 2) + [0.0] * (classes - 2), err_msg="a class is shared once")
    assert len(second["rows"]) <= max(2, classes)


def test_without_tau_no_class_keeps_its_model() -> None:
    initial, replies = instance(4, 4, 3)
    eye = np.eye(3)
    server = strategy(layers="all", dist="empirical")
    first = server.aggregate(server.init(context(initial, 3)), 1, iter(empirical(replies[:2], eye[[0, 1]].tolist())))
    second = server.aggregate(first, 2, iter(empirical(replies[2:], eye[[0, 0]].tolist())))
    total = sum(r.num_samples for r in replies[2:])
    mean = sum(
        r.num_samples / total * flat(r.arrays).astype(float) for r in replies[2:] if r.arrays.pop("distribution").any()
    )
    np.testing.assert_allclose(flat(class_globals(rows(second), second["q"])[1]), mean, rtol=1e-5, atol=2e-6)


def test_no_more_than_two_k_models_are_held_while_replies_come_in() -> None:
    import weakref

    classes, clients = 2, 200
    initial, _ = instance(0, 0, classes)
    alive: list[weakref.ref[np.ndarray]] = []
    most = 0

    def replies() -> object:
        nonlocal most
        for i in range(clients):
            reply = instance(i, 1, classes)[1][0]
            alive.append(weakref.ref(reply.arrays["features.fc1.weight"]))
            reply.client = i
            yield reply
            del reply
            most = max(most, sum(r() is not None for r in alive))

    server = strategy(layers="all")
    state = server.aggregate(server.init(context(initial, classes)), 1, replies())  # type: ignore[arg-type]
    assert most <= 2 * classes + 1, "more than 2K models and the reply in hand"
    assert len(state["rows"]) == classes and len(state["pt"]) == clients


def test_what_is_common_is_encoded_once() -> None:
    from fedapp.transport.records import Encoder
    from fedapp.transport.request import RoundRequest

    initial, replies = instance(10, 5, 4)
    server = strategy()
    state = server.aggregate(server.init(context(initial, 4)), 1, iter(replies))
    encoder = Encoder()
    one, two = (encoder.content(server.send(state, 2, i), RoundRequest())[0].array_records["arrays"] for i in (0, 1))
    for name in initial:
        assert (one[name].data is two[name].data) == (not name.startswith("head."))
    assert not np.array_equal(one["head.weight"].numpy(), two["head.weight"].numpy())


# ---- replies ---------------------------------------------------------------------------------------------------------


def test_replies_that_say_nothing_about_classes_are_refused() -> None:
    server, _ = toy(0, 1, 2)
    zero = toy_reply(0)
    zero.arrays["head.weight"] = np.zeros((3, 2), np.float32)
    assert "zero" in str(refusal(server, {}, zero))
    assert refusal(server, {}, toy_reply(0)) is None


def test_a_distribution_travels_only_where_it_was_asked_for() -> None:
    p = np.array([0.2, 0.3, 0.5], np.float32)
    server, _ = toy(0, 1, 2)
    assert "distribution" in str(refusal(server, {}, toy_reply(0, distribution=p)))
    asked = strategy(dist="empirical")
    asked.init(context(toy_head(np.ones((3, 2)), np.zeros(3)), 3))
    assert refusal(asked, {}, toy_reply(0, distribution=p)) is None
    assert refusal(asked, {}, toy_reply(0, distribution=p * 1.009)) is None, "rounded to half precision, for example"
    for bad in (p * 2, p * 0.5, p * 1.015, np.array([-0.5, 0.5, 1.0], np.float32)):
        assert "shares" in str(refusal(asked, {}, toy_reply(0, distribution=bad)))


# ---- layers ----------------------------------------------------------------------------------------------------------

CNN = [f"features.{n}.{part}" for n in ("conv1", "conv2", "fc1") for part in ("weight", "bias")] + [
    "head.weight",
    "head.bias",
]


@pytest.mark.parametrize(
    ("layers", "count"),
    [
        ("output", 2), ("head", 2), ("all", 8), ("none", 0), ("1", 2), ("2", 4), ("3", 6), ("4", 8), ("fc1+output", 4),
        ("fc1,output", 4), ("conv2+fc1+output", 6), ("conv1", 2), ("features.conv1", 2), ("features", 6),
    ],
)  # fmt: skip
def test_layers_of_the_four_layer_network(layers: str, count: int) -> None:
    model = build_model("cnn", num_classes=10, shape=(3, 32, 32), seed=0)
    names = selection.shared_names(model, ("",))
    assert names == CNN
    got = classwise_names(layers, names)
    assert len(got) == count and got == [n for n in names if n in got]
    if layers.isdecimal() or layers in ("output", "fc1+output", "conv2+fc1+output", "all"):
        assert got == CNN[len(CNN) - count :]  # a suffix in forward order


def test_layers_are_whole_name_components() -> None:
    names = ["features.conv2.weight", "features.conv2b.weight", "features.bn.running_var", "head.weight", "head.bias"]
    assert classwise_names("conv2", names) == ["features.conv2.weight"]
    assert classwise_names("2", names) == ["features.bn.running_var", "head.weight", "head.bias"]


@pytest.mark.parametrize("layers", ["fc2", "conv", "0", "5", "fc1,,output", "bias", "fc1+"])
def test_unknown_layers_are_bad_requests(layers: str) -> None:
    with pytest.raises(BadRequest, match="conv1, conv2, fc1, output"):
        classwise_names(layers, CNN)


# ---- the client ------------------------------------------------------------------------------------------------------


def task(y: Sequence[int], classes: int, lr: float = 0.005) -> Task:
    x = torch.randint(0, 17, (len(y), 8, 8, 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor(y, dtype=torch.int64)
    return Task(
        client=0, seed=0, num_classes=classes, inputs=InputSpec((1, 8, 8), 16.0, (0.3,), (0.4,)), model="digits-b",
        x_train=x, y_train=labels, x_test=x[:2], y_test=labels[:2],
        train=short(local_epochs=1, batch_size=16, lr=lr, momentum=0.0),
    )  # fmt: skip


def test_distribution_of_the_training_split() -> None:
    p = CwFedAvgClient(task([0] * 80 + [1] * 20, 3), METHOD, CwFedAvgHParams()).distribution()
    assert p.dtype == np.float32 and p.tolist() == pytest.approx([0.8, 0.2, 0.0]) and p[2] == 0


@pytest.mark.parametrize(("classes", "lam"), [(10, 10.0), (100, 1000.0), (26, 67.6)])
def test_lambda_grows_with_the_square_of_the_number_of_classes(classes: int, lam: float) -> None:
    assert CwFedAvgHParams().weight(classes) == pytest.approx(lam)
    assert CwFedAvgHParams(wdr="authors").weight(classes) == pytest.approx(lam / 2)
    assert CwFedAvgHParams(lam=2000).weight(classes) == 2000


@pytest.mark.parametrize(
    ("hparams", "factor"),
    [({"lam": 3.0}, 3.0), ({"lam": 1.0}, 1.0), ({"wdr": "authors"}, 0.05 * 3**2), ({"lam": 0}, 0)],
)
def test_a_round_is_sgd_on_the_formula(hparams: dict[str, object], factor: float) -> None:
    """CE + lambda || p - p~ ||_2, with p by counting and p~ from the row norms, in float64; three steps."""
    data = handmade.one_batch_task(n=13, classes=3)
    x, y = handmade.pixels(data), data.y_train
    p, entropies = torch.tensor([5, 4, 4]).double() / 13, list[float]()

    def loss(model: SplitModel) -> torch.Tensor:
        norms = (model.head.weight**2).sum(dim=1).sqrt()
        distance = ((p - norms / norms.sum()) ** 2).sum().sqrt()
        entropy = handmade.cross_entropy(model(x), y)
        entropies.append(float(entropy.detach()))
        return entropy + factor * distance

    received = handmade.model_like(data)
    with torch.no_grad():
        received.head.weight[2] *= 4  # far from p, so that the distance has a direction
    one = CwFedAvgClient(data, METHOD, CwFedAvgHParams(**hparams))  # type: ignore[arg-type]
    arrays, n, metrics = one.train_round(handmade.whole(received), 1)
    expected = handmade.descend(received, loss, data)
    assert n == 13
    handmade.assert_close(arrays, expected, atol=1e-5)
    norms = (expected.head.weight.detach() ** 2).sum(dim=1).sqrt()
    assert metrics["wdr"] == pytest.approx(float(((p - norms / norms.sum()) ** 2).sum().sqrt()), abs=1e-5)
    assert metrics["cross-entropy"] == pytest.approx(np.mean(entropies), abs=1e-5)


def test_nothing_but_the_model_leaves_a_client() -> None:
    model = build_model("digits-b", num_classes=4, shape=(1, 8, 8), seed=0)
    payload = Payload(arrays=selection.everything(model))
    one = CwFedAvgClient(task([0, 1, 2, 0], 4), METHOD, CwFedAvgHParams())
    assert set(one.train_round(payload, 1)[0]) == set(model.state_dict())
    told = CwFedAvgHParams(dist="empirical")
    two = CwFedAvgClient(task([0, 1, 2, 0], 4), resolve(METHOD, told), told)
    arrays = two.train_round(payload, 1)[0]
    assert set(arrays) == {*model.state_dict(), "distribution"}
    assert arrays["distribution"].tolist() == [0.5, 0.25, 0.25, 0.0] and arrays["distribution"].dtype == np.float32


def test_heads_alone_are_blended_over_private_bodies_of_two_widths() -> None:
    """One round by clients with adapters on 5 and on 3 features, against the double loops on their heads."""
    hparams = CwFedAvgHParams(share="head")
    method, rng = resolve(METHOD, hparams), torch.Generator().manual_seed(3)
    heads, clients = [f"head.{part}" for part in ("weight", "bias")], []
    for client, width in enumerate((5, 3, 5)):
        y = torch.randint(0, 4, (20 + client,), generator=rng)
        x, plain = torch.randn(len(y), width, generator=rng), InputSpec((width,), 1.0, (0.0,), (1.0,), "table")
        given = replace(task(y.tolist(), 4), client=client, inputs=plain, model="adapter")
        clients.append(CwFedAvgClient(replace(given, x_train=x, x_test=x[:2]), method, hparams))
    initial = handmade.head_of(build_model("adapter", num_classes=4, shape=(5,), seed=0)).all()
    server = CwFedAvg(method, hparams)
    start = server.init(context(initial, 4))
    replies = []
    for client, one in enumerate(clients):
        arrays, n, _ = one.train_round(server.send(start, 1, client), 1)
        assert sorted(arrays) == sorted(heads) and n == 20 + client
        replies.append(Reply(client, n, arrays, {}))
    state = server.aggregate(start, 1, iter(replies))
    p = {r.client: slow_pt(r.arrays["head.weight"]) for r in replies}
    for client in range(3):
        got, wanted = server.send(state, 2, client).all(), slow(replies, p, p[client], heads, 4)
        assert got.keys() == wanted.keys() == set(heads)
        for name in heads:
            np.testing.assert_allclose(got[name], wanted[name], rtol=2e-5, atol=3e-6)


# ---- whole runs ------------------------------------------------------------------------------------------------------


def run(out: Path, method: str = "cwfedavg", args: str = "", **kw: object) -> fedapp.RunResult:
    values: dict[str, object] = {
        "clients": 4, "rounds": 2, "local_epochs": 1, "partition": "classes", "protocols": "received,trained", **kw,
    }  # fmt: skip
    return fedapp.run(method=method, method_args=args, dataset="digits", data_fraction=0.3, out=out, **values)


def test_traffic_is_that_of_fedavg() -> None:
    """38,282 float32 numbers both ways; with true distributions 10 more up, and a warning."""
    (task,) = handmade.digit_tasks(1, epochs=1)
    for hparams, more in ((CwFedAvgHParams(), 0), (CwFedAvgHParams(dist="empirical"), 40)):
        method = resolve(METHOD, hparams)
        server = CwFedAvg(method, hparams)
        payload = server.send(server.init(handmade.digits_context(method, hparams, [task])), 1, 0)
        arrays = CwFedAvgClient(task, method, hparams).train_round(payload, 1)[0]
        assert payload.nbytes == handmade.DIGITS_BYTES
        assert sum(a.nbytes for a in arrays.values()) == handmade.DIGITS_BYTES + more
        assert method.warn is not None
        assert ("label distribution" in (method.warn(hparams, "sgd", "none") or "")) == bool(more)


def test_unknown_layers_end_the_run_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="did you mean 'fc1'"):
        run(tmp_path / "a", args="layers=fc2")
    assert not (tmp_path / "a" / "rounds.csv").exists()
