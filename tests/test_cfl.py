"""CFL: when a cluster is split and how, averages within clusters, and updates kept where not everybody answers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from clients.base import FedClient
from fedapp.learning.task import Task
from fedapp.method import Arrays, Reply, ServerState
from fedapp.models import selection
from strategies import fedavg
from strategies.cfl import CFL, METHOD, CFLHParams, bipartition
from tests.handmade import (
    context,
    digit_tasks,
    digits_context,
    equal,
    federate,
    flat,
    full_batch,
    images,
    point,
    random_model,
    reply,
    steps_by_hand,
)

EAGER: dict[str, Any] = {"start_round": 0, "smooth": 1, "gamma": 0.0}
WORKED = [(0, 100, (1.2, 0.8)), (1, 60, (0.6, 1.4)), (2, 40, (1.5, 1.5))]


def strategy_of(**values: Any) -> CFL:
    return CFL(METHOD, CFLHParams.model_validate({**EAGER, **values}))


def moved(state: ServerState, strategy: CFL, client: int, *step: float, n: int = 10) -> Reply:
    """A reply that moved the received `point` by `step`."""
    sent = strategy.send(state, 1, client).all()
    return reply(client, n, {"head.weight": sent["head.weight"] + np.float32(step)})


def groups(state: ServerState) -> set[frozenset[int]]:
    return {frozenset(m) for m in state["members"].values()}


def test_worked_numbers() -> None:
    strategy = strategy_of(thresholds="absolute", eps1=0.4, eps2=0.5)
    state = strategy.init(context(point(1.0, 1.0)))
    after = strategy.aggregate(state, 1, iter([reply(c, n, point(*w)) for c, n, w in WORKED]))
    np.testing.assert_allclose(after["norms"], [[1, 0, 0.253859, 0.707107]], atol=1e-6)
    assert len(after["clusters"]) == 2
    (with_0,) = (m for m in groups(after) if 0 in m)
    assert 1 not in with_0
    for c, inside in after["members"].items():
        expected = np.mean([WORKED[i][2] for i in inside], axis=0)
        np.testing.assert_allclose(after["clusters"][c]["head.weight"], expected, atol=1e-6)


@pytest.mark.parametrize(
    "values",
    [
        {"eps1": 0.25},  # not stationary: the mean update is 0.253859
        {"eps2": 0.71},  # no disagreement: the longest update is 0.707107
        {"min_size": 3},
        {"start_round": 1},
        {"smooth": 2},
        {"gamma": 0.9},  # client 2 stands at right angles: separation sqrt(1/2)
    ],
)
def test_each_condition_alone_prevents_a_split(values: dict[str, Any]) -> None:
    replies = [reply(c, n, point(*w)) for c, n, w in WORKED]
    usual = {"thresholds": "absolute", "eps1": 0.4, "eps2": 0.5}
    for settings, count in ((usual, 2), ({**usual, **values}, 1)):
        strategy = strategy_of(**settings)
        state = strategy.init(context(point(1.0, 1.0)))
        assert len(strategy.aggregate(state, 1, iter(replies))["clusters"]) == count


def across(cosine: np.ndarray, side: np.ndarray) -> float:
    """The largest cosine between the two halves."""
    return max(cosine[i, j] for i in np.flatnonzero(side) for j in np.flatnonzero(~side))


def unit_rows(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((int(rng.integers(2, 12)), 5))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("seed", range(8))
def test_the_default_bipartition_is_the_best_of_all(seed: int) -> None:
    rows = unit_rows(seed)
    cosine, m = rows @ rows.T, len(rows)
    side = bipartition(cosine)
    assert not side[0] and side.any()
    every = [np.array([False, *(bool(k >> i & 1) for i in range(m - 1))]) for k in range(1, 2 ** (m - 1))]
    assert across(cosine, side) == min(across(cosine, other) for other in every)


def test_complete_linkage_refuses_a_split_that_the_optimum_allows() -> None:
    """Five directions in a fan, and one that is 100 degrees away from both of its ends.

    Complete linkage cuts the fan itself, since its ends are further apart than the last direction is from one of them.
    """
    degrees = np.radians([0, 38, 80, 118, 160, 260])
    steps = np.stack([np.cos(degrees), np.sin(degrees)], axis=1)
    for method, halves, separation in (
        ("single", {frozenset([0, 1, 2, 3, 4]), frozenset([5])}, np.sin(np.radians(100 / 2))),
        ("complete", {frozenset([0, 1, 5]), frozenset([2, 3, 4])}, np.sin(np.radians(42 / 2))),
    ):
        side = bipartition(steps @ steps.T, method)
        assert {frozenset(np.flatnonzero(s).tolist()) for s in (side, ~side)} == halves
        assert np.sqrt((1 - across(steps @ steps.T, side)) / 2) == pytest.approx(separation)
        strategy = strategy_of(r1=1.0, gamma=0.7, linkage=method)
        state = strategy.init(context(point(0.0, 0.0), clients=6))
        after = strategy.aggregate(state, 1, iter([moved(state, strategy, i, *s) for i, s in enumerate(steps)]))
        assert len(after["clusters"]) == (2 if method == "single" else 1)


def slow_bipartition(cosine: np.ndarray) -> set[frozenset[int]]:
    """Complete linkage by its definition: merge the two sets whose least similar members are most similar."""
    sets = [frozenset([i]) for i in range(len(cosine))]
    while len(sets) > 2:
        a, b = max(itertools.combinations(sets, 2), key=lambda p: min(cosine[i, j] for i in p[0] for j in p[1]))
        sets = [s for s in sets if s not in (a, b)] + [a | b]
    return set(sets)


@pytest.mark.parametrize("seed", range(8))
def test_complete_linkage_is_that_of_the_released_code(seed: int) -> None:
    rows = unit_rows(seed)
    side = bipartition(rows @ rows.T, "complete")
    assert not side[0] and side.any()
    halves = {frozenset(np.flatnonzero(side).tolist()), frozenset(np.flatnonzero(~side).tolist())}
    assert halves == slow_bipartition(rows @ rows.T)


def test_bipartition_gives_two_halves_also_when_all_are_alike() -> None:
    for cosine in (np.ones((4, 4)), np.eye(5), np.array([[1.0, -1.0], [-1.0, 1.0]])):
        assert 0 < bipartition(cosine).sum() < len(cosine)


def test_clusters_blend_by_sample_counts_only_where_means_do() -> None:
    for weighting, expected in (("uniform", [0.5, 0.5, 0.0]), ("samples", [0.25, 0.75, 0.0])):
        found = strategy_of(weighting=weighting).blend({"members": {0: [0, 1], 3: [2]}}, {0: 1.0, 1: 3.0, 2: 5.0})
        assert found is not None and found[0] == [0, 1, 2] and found[1][0].tolist() == expected


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("seed", range(4))
def test_a_round_equals_a_slow_computation(seed: int, weighting: str) -> None:
    rng = np.random.default_rng(seed)
    start = random_model(rng)
    strategy = strategy_of(weighting=weighting, r1=0.9, r2=0.1, linkage="complete")
    state = strategy.init(context(start, clients=7))
    replies = [reply(c, int(rng.integers(1, 99)), random_model(rng)) for c in range(7)]
    after = strategy.aggregate(state, 1, iter(replies))
    steps = np.array([flat(r.arrays) - flat(start) for r in replies])
    norms = [np.sqrt((s**2).sum()) for s in steps]
    np.testing.assert_allclose(
        after["norms"][0], [1, 0, np.linalg.norm(steps.mean(axis=0)), max(norms)], rtol=1e-6, atol=1e-6
    )
    cosine = np.array([[a @ b / (np.sqrt(a @ a) * np.sqrt(b @ b)) for b in steps] for a in steps])
    assert groups(after) == slow_bipartition(cosine)
    for c, inside in after["members"].items():
        weights = [replies[i].num_samples if weighting == "samples" else 1 for i in inside]
        step = np.average(steps[inside], axis=0, weights=weights)
        np.testing.assert_allclose(flat(after["clusters"][c]), flat(start) + step, rtol=1e-5, atol=1e-5)


def test_a_round_of_real_clients_is_the_mean_of_their_descents() -> None:
    """Two populations with contradicting labels, two clients each: one cluster becomes two, each with its mean."""
    tasks = [full_batch(t) for t in digit_tasks(4, relabel=lambda c, y: y if c < 2 else (y + 5) % 10)]
    strategy = strategy_of(r1=1.0, min_size=1, linkage="complete")
    state = strategy.init(digits_context(METHOD, strategy.hparams, tasks))
    sent, replies = strategy.send(state, 1, 0), []
    for task in tasks:
        arrays, n, metrics = METHOD.client(task, METHOD, strategy.hparams).train_round(sent, 1)
        replies.append(Reply(task.client, n, arrays, metrics))
    after = strategy.aggregate(state, 1, iter(replies))

    def trained(task: Task) -> Arrays:
        w, x, y = FedClient.build_model(task.spec(0), strategy.hparams), images(task), task.y_train
        selection.merge(w, sent.all())
        steps_by_hand(w.parameters(), lambda: -w(x).log_softmax(dim=1)[torch.arange(len(y)), y].mean(), task)
        return {n: p.detach().numpy() for n, p in w.named_parameters()}

    by_hand = [trained(task) for task in tasks]
    assert groups(after) == {frozenset([0, 1]), frozenset([2, 3])}
    for c, inside in after["members"].items():
        expected = (flat(by_hand[inside[0]]) + flat(by_hand[inside[1]])) / 2
        np.testing.assert_allclose(flat(after["clusters"][c]), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("degrees", "gamma", "count"), [(60, 0.45, 2), (60, 0.55, 1), (120, 0.86, 2), (120, 0.87, 1), (180, 1.0, 2)]
)
def test_halves_are_separated_by_at_least_gamma(degrees: int, gamma: float, count: int) -> None:
    """Where all pairs across the halves have cosine cos t, the separation is sqrt((1 - cos t) / 2) = sin(t / 2)."""
    strategy = strategy_of(r1=1.0, gamma=gamma)
    state = strategy.init(context(point(0.0, 0.0), clients=4))
    steps = [(1.0, 0.0), (np.cos(np.radians(degrees)), np.sin(np.radians(degrees)) if degrees < 180 else 0.0)]
    after = strategy.aggregate(state, 1, iter([moved(state, strategy, i, *steps[i // 2]) for i in range(4)]))
    assert len(after["clusters"]) == count
    assert strategy.report(after, {})["clusters"] == ([[0, 1], [2, 3]] if count == 2 else [[0, 1, 2, 3]])
    (row,) = strategy.report(after, {})["norms"]
    assert row == pytest.approx([1, 0, np.cos(np.radians(degrees / 2)), 1], abs=1e-6)


@pytest.mark.parametrize("first", [[], [(1, 0), (1, 0)], [(1, 0), (0.5, 0.75**0.5)]])
def test_a_cluster_that_stays_whole_does_not_keep_the_next_one_from_its_split(first: list[tuple[float, float]]) -> None:
    """Cluster 0 is silent, or not stationary, or not separated; cluster 1 is all three."""
    strategy = strategy_of(r1=1.0, min_size=1, gamma=0.6)
    state = strategy.init(context(point(0.0, 0.0), clients=4))
    state = {
        **state,
        "clusters": {0: point(0, 0), 1: point(0, 0)},
        "members": {0: [0, 1], 1: [2, 3]},
        "born": {0: 0, 1: 0},
    }
    steps = dict(enumerate(first)) | {2: (1, 0), 3: (-1, 0)}
    after = strategy.aggregate(state, 1, iter([moved(state, strategy, i, *s) for i, s in steps.items()]))
    assert groups(after) == {frozenset([0, 1]), frozenset([2]), frozenset([3])}


@pytest.mark.parametrize(
    ("rows", "settings", "due"),
    [
        ([[1, 0, 0.1, 1], [2, 1, 0.9, 1], [3, 0, 0.1, 1]], {}, True),  # rows of another cluster do not count
        ([[0, 0, 0.1, 1], [3, 0, 0.1, 1]], {}, False),  # nor those of the undivided cluster
        ([[1, 1, 0, 1], [2, 0, 0.01, 0.4], [3, 0, 0.01, 0.4]], {}, False),  # below half of the longest so far
        ([[1, 1, 0, 1], [2, 0, 0.01, 0.5], [3, 0, 0.01, 0.5]], {}, False),  # just half
        ([[2, 0, 0.5, 1], [3, 0, 0.5, 1]], {"r1": 0.5}, False),
        ([[2, 0, 0.25, 1], [3, 0, 0.25, 1]], {"thresholds": "absolute", "eps1": 0.25, "eps2": 0.5}, False),
        ([[2, 0, 0.25, 1], [3, 0, 0.25, 1]], {"thresholds": "absolute", "eps1": 0.5, "eps2": 1.0}, False),
        ([[2, 0, 0.25, 1], [3, 0, 0.25, 1]], {"thresholds": "absolute", "eps1": 0.5, "eps2": 0.5}, True),
    ],
)
def test_a_cluster_is_due_by_its_own_norms_since_it_was_made(
    rows: list[list[float]], settings: dict[str, Any], due: bool
) -> None:
    assert strategy_of(smooth=2, **settings)._due(np.array(rows), 3, 0, 0) is due


def rotating(scale: float, rounds: int, **values: Any) -> list[set[frozenset[int]]]:
    """Two pairs of opposite populations, all updates times `scale`; the clusters after each round."""
    directions = [(1, 0.1), (1, -0.1), (-1, 0.1), (-1, -0.1), (0, 1), (0, -1)]
    strategy = strategy_of(**values)
    state = strategy.init(context(point(0.0, 0.0), clients=6))
    seen = []
    for server_round in range(1, rounds + 1):
        replies = [moved(state, strategy, i, *(scale * np.array(d))) for i, d in enumerate(directions)]
        state = strategy.aggregate(state, server_round, iter(replies))
        seen.append(groups(state))
    return seen


def test_relative_thresholds_do_not_see_the_scale_of_updates() -> None:
    assert rotating(1.0, 4) == rotating(64.0, 4) == rotating(1 / 64, 4)
    absolute = {"thresholds": "absolute", "eps1": 0.4, "eps2": 0.5}
    assert rotating(1.0, 4, **absolute) != rotating(1 / 64, 4, **absolute)


def test_clusters_only_split_and_always_hold_every_client_once() -> None:
    history = rotating(1.0, 6, min_size=1, r1=0.9)
    assert history[-1] == {frozenset([0, 1]), frozenset([2, 3]), frozenset([4]), frozenset([5])}
    for before, after in itertools.pairwise([{frozenset(range(6))}, *history]):
        assert sorted(i for m in after for i in m) == list(range(6))
        assert all(any(m <= b for b in before) for m in after)


def test_updates_that_fade_do_not_split_a_cluster() -> None:
    """Late in training the mean is small beside the longest update even where all agree: r2 is there for that."""
    strategy = strategy_of(r2=0.5)
    state = strategy.init(context(point(0.0, 0.0), clients=4))
    state = strategy.aggregate(state, 1, iter([moved(state, strategy, i, 4.0, 0.1 * i) for i in range(4)]))
    for server_round in range(2, 6):
        noise = [(1, 0), (-1, 0), (0, 1), (0, -1)]
        state = strategy.aggregate(state, server_round, iter([moved(state, strategy, i, *noise[i]) for i in range(4)]))
    assert len(state["clusters"]) == 1


def test_norms_are_smoothed() -> None:
    """One quiet round between lively ones is no standstill where the mean over three rounds decides."""

    def run(smooth: int) -> int:
        strategy = strategy_of(smooth=smooth, gamma=0.0, r1=0.4, r2=0.1)
        state = strategy.init(context(point(0.0, 0.0), clients=4))
        for server_round in range(1, 4):
            steps = [(1, 0), (1, 0), (1, 0.2), (1, 0)] if server_round != 3 else [(1, 0), (-1, 0), (0, 1), (0, -1)]
            state = strategy.aggregate(
                state, server_round, iter([moved(state, strategy, i, *steps[i]) for i in range(4)])
            )
        return len(state["clusters"])

    assert (run(1), run(3)) == (2, 1)


STEPS = {0: (1.0, 0.0), 1: (1.0, 0.1), 2: (-1.0, 0.0), 3: (-1.0, 0.1)}


def test_kept_updates_make_a_test_possible_where_not_all_answer() -> None:
    strategy = strategy_of()
    state = strategy.init(context(point(0.0, 0.0), clients=4))
    state = strategy.aggregate(state, 1, iter([moved(state, strategy, i, *STEPS[i]) for i in (0, 2)]))
    assert len(state["norms"]) == 0, "clients 1 and 3 were never seen"
    assert sorted(state["updates"]) == [0, 2] and state["seen"] == {0: 1, 2: 1}
    before = state["clusters"][0]
    state = strategy.aggregate(state, 2, iter([moved(state, strategy, i, *STEPS[i]) for i in (1, 3)]))
    assert groups(state) == {frozenset([0, 1]), frozenset([2, 3])}
    np.testing.assert_allclose(state["norms"], [[2, 0, 0.05, np.sqrt(1.01)]], rtol=1e-6)
    np.testing.assert_allclose(
        state["clusters"][0]["head.weight"], before["head.weight"] + np.float32(STEPS[1]), rtol=1e-6
    )
    assert state["updates"] == {}, "updates against the undivided cluster say nothing about its halves"
    rows = len(state["norms"])
    state = strategy.aggregate(state, 3, iter([moved(state, strategy, i, *STEPS[i]) for i in (0, 2)]))
    assert len(state["norms"]) == rows and sorted(state["updates"]) == [0, 2]


def test_a_cluster_without_participants_keeps_its_model() -> None:
    strategy = strategy_of()
    state = strategy.init(context(point(0.0, 0.0), clients=4))
    state = strategy.aggregate(state, 1, iter([moved(state, strategy, i, *STEPS[i]) for i in range(4)]))
    assert len(state["clusters"]) == 2
    after = strategy.aggregate(state, 2, iter([moved(state, strategy, 0, 1.0, 1.0)]))
    assert equal(after["clusters"][1], state["clusters"][1])
    assert not equal(after["clusters"][0], state["clusters"][0])


@pytest.mark.parametrize(("max_stale", "tested"), [(0, True), (2, True), (1, False)])
def test_updates_that_are_too_old_are_not_used(max_stale: int, tested: bool) -> None:
    strategy = strategy_of(max_stale=max_stale)
    state = strategy.init(context(point(0.0, 0.0), clients=4))
    for server_round, here in ((1, (0, 2)), (2, (0,)), (3, (1, 3))):
        state = strategy.aggregate(state, server_round, iter([moved(state, strategy, i, *STEPS[i]) for i in here]))
    assert (len(state["norms"]) == 1) is tested


def test_a_client_that_leaves_after_a_full_round_does_not_stop_the_tests() -> None:
    strategy = strategy_of(start_round=1)
    state = strategy.init(context(point(0.0, 0.0), clients=4))
    for server_round, here in ((1, range(4)), (2, range(3))):
        state = strategy.aggregate(state, server_round, iter([moved(state, strategy, i, *STEPS[i]) for i in here]))
    assert len(state["norms"]) == 2 and groups(state) == {frozenset([0, 1]), frozenset([2, 3])}


def test_a_client_that_joins_later_goes_to_the_largest_cluster() -> None:
    strategy = strategy_of(r1=0.6)
    state = strategy.init(context(point(0.0, 0.0), clients=5))
    steps = {**STEPS, 4: (-1.0, -0.1)}
    state = strategy.aggregate(state, 1, iter([moved(state, strategy, i, *steps[i]) for i in range(5)]))
    large = next(c for c, m in state["members"].items() if m == [2, 3, 4])
    assert equal(strategy.send(state, 2, 9).all(), state["clusters"][large])
    state = strategy.aggregate(state, 2, iter([moved(state, strategy, 9, 0.0, 0.5)]))
    assert state["members"][large] == [2, 3, 4, 9]
    assert sum(9 in m for m in state["members"].values()) == 1
    state = strategy.aggregate(state, 3, iter([moved(state, strategy, -1, 0.0, 0.5)]))
    assert state["members"][large] == [-1, 2, 3, 4, 9], "members in the order of their ids"
    assert strategy.context.ids() == (0, 1, 2, 3, 4)


def test_running_statistics_are_averaged_but_have_no_say_in_similarity() -> None:
    def model(x: float, y: float, variance: float) -> Arrays:
        return {"features.bn.running_var": np.float32([variance]), **point(x, y)}

    strategy = strategy_of()
    state = strategy.init(context(model(0, 0, 1), clients=4))
    replies = [reply(i, 10, model(*STEPS[i], 1000.0 * (i + 1))) for i in range(4)]
    after = strategy.aggregate(state, 1, iter(replies))
    assert groups(after) == {frozenset([0, 1]), frozenset([2, 3])}
    np.testing.assert_allclose(after["clusters"][0]["features.bn.running_var"], [1500.0])


def test_clients_that_did_not_move_are_no_obstacle() -> None:
    strategy = strategy_of()
    state = strategy.init(context(point(0.0, 0.0), clients=4))
    state = strategy.aggregate(state, 1, iter([moved(state, strategy, i, 0.0, 0.0) for i in range(4)]))
    assert len(state["clusters"]) == 1 and np.isfinite(state["norms"]).all()
    assert len(strategy.aggregate(state, 2, iter([]))["clusters"]) == 1


@pytest.mark.full
@pytest.mark.parametrize("populations", [2, 3])
def test_contradicting_populations_are_told_apart(populations: int) -> None:
    """Each population shifts its labels: the defaults find them, without being told how many there are."""
    tasks = digit_tasks(3 * populations, relabel=lambda c, y: (y + 3 * (c % populations)) % 10, train=80)
    _, state, scores = federate(METHOD, CFLHParams(), tasks, 15)
    assert groups(state) == {frozenset(range(p, 3 * populations, populations)) for p in range(populations)}
    if populations == 2:
        _, _, single = federate(fedavg.METHOD, fedavg.METHOD.hparams(), tasks, 15)
        assert min(scores.values()) > max(single.values())
