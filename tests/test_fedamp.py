"""FedAMP: attention between models in both forms, the mix, and a proximal term that pulls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.fedamp import FedAMPClient, FedAMPHParams
from fedapp import registry
from fedapp.experiments import compare, recipes
from fedapp.learning.state import ClientStore
from fedapp.method import Arrays, Payload
from fedapp.models import selection
from reproduction.ledger import studies
from strategies.fedamp import METHOD, FedAMP, attention
from tests.handmade import (
    context,
    digit_tasks,
    digits_context,
    equal,
    flat,
    full_batch,
    images,
    point,
    random_model,
    reply,
    steps_by_hand,
)


def hparams_of(**values: Any) -> FedAMPHParams:
    return FedAMPHParams.model_validate(values)


def strategy_of(**values: Any) -> FedAMP:
    return FedAMP(METHOD, hparams_of(**values))


WORKED = [point(1.2, 0.8), point(0.6, 1.4), point(1.5, 1.5)]


def test_worked_numbers_of_the_distance_form() -> None:
    strategy = strategy_of(form="distance", alpha=0.05, sigma=1)
    expected = [
        [0.947667, 0.024338, 0.027995],
        [0.024338, 0.953641, 0.022022],
        [0.027995, 0.022022, 0.949983],
    ]
    np.testing.assert_allclose(attention(WORKED, strategy.hparams), expected, atol=1e-6)
    state = strategy.init(context(point(1.0, 1.0)))
    state = strategy.aggregate(state, 1, iter([reply(i, 10 + i, w) for i, w in enumerate(WORKED)]))
    u = [state["mixed"][i]["head.weight"] for i in range(3)]
    np.testing.assert_allclose(u, [[1.193796, 0.834199], [0.634422, 1.387600], [1.471782, 1.478201]], atol=1e-6)


def slow_attention(models: list[Arrays], h: FedAMPHParams) -> np.ndarray:
    """The formulas, one pair after the other, on flat float64 vectors."""
    w = [flat(m) for m in models]
    m = len(w)
    a = np.zeros((m, m))
    for i in range(m):
        for j in range(m):
            if i != j and h.form == "cosine":
                a[i, j] = np.exp(h.scale * (w[i] @ w[j]) / (np.linalg.norm(w[i]) * np.linalg.norm(w[j])))
            elif i != j:
                a[i, j] = h.alpha * np.exp(-((w[i] - w[j]) ** 2).sum() / h.sigma) / h.sigma
        total = a[i].sum()
        if h.form == "cosine" or total > 1 - h.xi:
            a[i] *= (1 - h.xi) / total
        a[i, i] = 1 - a[i].sum()
    return a


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    m=st.integers(2, 7),
    form=st.sampled_from(["cosine", "distance"]),
    xi=st.floats(0, 1),
    scale=st.floats(0, 30),
    alpha=st.floats(0.01, 1000),
    sigma=st.floats(0.5, 50),
)
def test_attention_and_mix_equal_a_slow_computation(
    seed: int, m: int, form: str, xi: float, scale: float, alpha: float, sigma: float
) -> None:
    rng = np.random.default_rng(seed)
    models = [random_model(rng) for _ in range(m)]
    h = hparams_of(form=form, xi=xi, scale=scale, alpha=alpha, sigma=sigma)
    a = attention(models, h)
    np.testing.assert_allclose(a, slow_attention(models, h), rtol=1e-5, atol=1e-7)
    assert (a >= 0).all()
    np.testing.assert_allclose(a.sum(axis=1), 1.0, rtol=1e-12)
    assert (a.diagonal() >= xi - 1e-9).all()
    strategy = FedAMP(METHOD, h)
    state = strategy.init(context(models[0], clients=m))
    state = strategy.aggregate(state, 1, iter([reply(i, 1 + i, w) for i, w in enumerate(models)]))
    theta = np.stack([flat(w) for w in models])
    for i in range(m):
        np.testing.assert_allclose(flat(state["mixed"][i]), (a @ theta)[i], rtol=1e-4, atol=1e-5)


def test_small_distances_do_not_make_weights_negative() -> None:
    """alpha = 1000, sigma = 0.1 give xi_ij = 10^4 for equal models: unbounded, a client would subtract itself."""
    rng = np.random.default_rng(0)
    start = random_model(rng)
    models = [{n: a + np.float32(0.001 * i) for n, a in start.items()} for i in range(4)]
    a = attention(models, hparams_of(form="distance", alpha=1000, sigma=0.1, xi=0.25))
    np.testing.assert_allclose(a.diagonal(), 0.25, rtol=1e-9)
    assert (a > 0).all()


def test_rows_called_fedamp_in_cwfedavgs_tables_are_what_its_authors_ran() -> None:
    """Command line of the released code: distances, alpha 1000, sigma 0.1; clients train on from their own model."""
    released = {"form": "distance", "alpha": 1000.0, "sigma": 0.1, "lam": 1.0, "start": "own"}
    rows = [
        entry for name, recipe in recipes.shipped().items() if name.startswith("cwfedavg-table")
        for entry, called in recipe.rows.items() if called.startswith("FedAMP")
    ]  # fmt: skip
    assert len(rows) == 12
    args = [" ".join(f"{k}={v}" for k, v in compare.parse_variants(entry)[0].args) for entry in rows]
    args += [v.args for s in studies.studies().values() for v in s.variants.values() if v.method == "fedamp"]
    assert len(args) == 15
    for text in args:
        assert released.items() <= registry.parse_args(METHOD, text).model_dump().items()
    assert hparams_of().form == "cosine", "fedamp without values is HeurFedAMP"


def test_one_model_has_itself_alone() -> None:
    assert attention([point(1, 2)], hparams_of()).tolist() == [[1.0]]
    made, ctx = strategy_of(), context(point(1, 2))
    made.init(ctx)
    assert made.context is ctx


def test_far_models_get_no_weight_in_the_distance_form() -> None:
    models = [point(0, 0), point(1000, 0), point(0, 1000)]
    np.testing.assert_array_equal(attention(models, hparams_of(form="distance")), np.eye(3))


def test_sharp_cosines_do_not_overflow_and_zero_models_have_a_direction_of_none() -> None:
    a = attention([point(1, 0), point(1, 0.1), point(-1, 0)], hparams_of(scale=1e6))
    np.testing.assert_allclose(a, [[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0.5, 0.5]], atol=1e-9)
    a = attention([point(0, 0), point(1, 0), point(-1, 0)], hparams_of())
    np.testing.assert_allclose(a[0], [0.5, 0.25, 0.25])


def test_cosines_do_not_see_lengths_and_similar_models_weigh_more() -> None:
    rng = np.random.default_rng(4)
    models = [random_model(rng) for _ in range(4)]
    models[1] = {n: a + np.float32(0.1) for n, a in models[0].items()}
    a = attention(models, hparams_of())
    np.testing.assert_allclose(
        a, attention([{n: 4 * x for n, x in w.items()} for w in models], hparams_of()), rtol=1e-6
    )
    assert a[0, 1] > a[0, 2] and a[0, 1] > a[0, 3]


def test_running_statistics_are_mixed_but_have_no_say() -> None:
    plain = [point(1, 0), point(1, 0.5), point(0, 1)]
    models = [{**w, "features.bn.running_var": np.float32([10.0**i])} for i, w in enumerate(plain)]
    np.testing.assert_array_equal(attention(models, hparams_of()), attention(plain, hparams_of()))
    strategy = strategy_of()
    state = strategy.init(context(models[0]))
    state = strategy.aggregate(state, 1, iter([reply(i, 5, w) for i, w in enumerate(models)]))
    expected = attention(plain, hparams_of()) @ [1.0, 10.0, 100.0]
    got = [state["mixed"][i]["features.bn.running_var"][0] for i in range(3)]
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_full_self_weight_gives_every_client_its_own_model_back() -> None:
    rng = np.random.default_rng(5)
    models = [random_model(rng) for _ in range(4)]
    for form in ("cosine", "distance"):
        strategy = strategy_of(form=form, xi=1.0)
        state = strategy.init(context(models[0], clients=4))
        state = strategy.aggregate(state, 1, iter([reply(i, 5, w) for i, w in enumerate(models)]))
        assert all(equal(state["mixed"][i], w) for i, w in enumerate(models))


def test_uniform_attention_is_the_unweighted_average() -> None:
    rng = np.random.default_rng(6)
    models = [random_model(rng) for _ in range(5)]
    strategy = strategy_of(scale=0.0, xi=0.2)
    state = strategy.init(context(models[0], clients=5))
    state = strategy.aggregate(state, 1, iter([reply(i, 5 * i + 1, w) for i, w in enumerate(models)]))
    mean = np.mean([flat(w) for w in models], axis=0)
    for i in range(5):
        np.testing.assert_allclose(flat(state["mixed"][i]), mean, atol=1e-6)


def test_absent_clients_keep_their_mix_and_newcomers_get_the_initial_model() -> None:
    strategy = strategy_of()
    start = point(9.0, 9.0)
    state = strategy.init(context(start, clients=4))
    assert equal(strategy.send(state, 1, 0).all(), start)
    first = strategy.aggregate(state, 1, iter([reply(0, 5, point(1, 0)), reply(2, 5, point(0, 1))]))
    second = strategy.aggregate(first, 2, iter([reply(1, 5, point(3, 0)), reply(2, 5, point(0, 4))]))
    assert equal(strategy.send(second, 3, 0).all(), first["mixed"][0])
    assert not equal(second["mixed"][2], first["mixed"][2])
    assert equal(strategy.send(second, 3, 3).all(), start)
    # Only participants mix: client 0's model of round 1 has no part in round 2.
    np.testing.assert_allclose(second["mixed"][1]["head.weight"], [1.5, 2.0])
    ids, weights, _ = strategy.blend(second, {}) or ([], np.zeros(0), "")
    assert ids == [0, 1, 2] and weights[0, 1] == 0 == weights[1, 0] and weights[0, 2] > 0
    np.testing.assert_allclose(weights[1:, 1:] @ [[3, 0], [0, 4]], [second["mixed"][k]["head.weight"] for k in (1, 2)])
    assert sorted(first["mixed"]) == [0, 2], "the old state is left alone"
    assert second["mixed"][0]["head.weight"].base is None, "the mixes of a past round are not held"


def test_a_lone_participant_and_an_empty_round() -> None:
    strategy = strategy_of()
    state = strategy.init(context(point(9.0, 9.0)))
    after = strategy.aggregate(state, 1, iter([reply(1, 5, point(1, 2))]))
    assert equal(after["mixed"][1], point(1, 2))
    assert strategy.aggregate(after, 2, iter([])) is after


def initial() -> Payload:
    strategy = strategy_of()
    return strategy.send(strategy.init(digits_context(METHOD, hparams_of(), digit_tasks(1))), 1, 0)


@pytest.mark.parametrize("start", ["mix", "own"])
def test_two_local_steps_are_descent_on_eq_8(tmp_path, start: str) -> None:
    """F(w) + lambda / (2 alpha) ||w - u||^2 written out, u being the mix, from wherever training starts."""
    (task,) = digit_tasks(1)
    task, store = full_batch(task), ClientStore(tmp_path, "fedamp", "ab")
    own, _, _ = FedAMPClient(task, METHOD, hparams_of(start=start), store).train_round(initial(), 1)
    u = {n: torch.from_numpy(a + np.float32(0.02)) for n, a in initial().all().items()}
    made = FedAMPClient(task, METHOD, hparams_of(lam=3.0, alpha=2.0, start=start), store)
    w = FedAMPClient.build_model(task.spec(0), made.hparams)
    selection.merge(w, own if start == "own" else {n: a.numpy() for n, a in u.items()})
    x, y = images(task), task.y_train

    def loss() -> torch.Tensor:
        supervised = -w(x).log_softmax(dim=1)[torch.arange(len(y)), y].mean()
        return supervised + 3 / (2 * 2) * sum((p - u[n]).square().sum() for n, p in w.named_parameters())

    steps_by_hand(w.parameters(), loss, task)
    arrays, n, _ = made.train_round(Payload(arrays={n: a.numpy() for n, a in u.items()}), 2)
    assert n == 40
    for name, value in w.named_parameters():
        np.testing.assert_allclose(arrays[name], value.detach(), rtol=1e-3, atol=1e-5)


def test_training_may_start_from_the_own_model(tmp_path) -> None:
    """`received` is the mix in any case; with a step of length zero the reply shows where training began."""
    (task,) = digit_tasks(1)
    store = ClientStore(tmp_path, "fedamp", "ab")
    own, _, _ = FedAMPClient(task, METHOD, hparams_of(start="own"), store).train_round(initial(), 1)
    mix = Payload(arrays={n: np.zeros_like(a) for n, a in initial().all().items()})
    still = replace(task, train=task.train.replaced(lr=0.0))
    for start, expected in (("own", own), ("mix", mix.arrays)):
        client = FedAMPClient(still, METHOD, hparams_of(start=start), store)
        arrays, _, metrics = client.train_round(mix, 2)
        assert equal(arrays, expected) and equal(client.reference, expected), "its change is of length zero"
        assert metrics["received-loss-sum"] == pytest.approx(40 * np.log(10), rel=1e-5), "a model of zeros"
        store.folder.joinpath("ab.000002.safetensors").unlink()


def test_the_stored_model_is_read_only_where_training_starts_from_it(tmp_path) -> None:
    (task,) = digit_tasks(1)
    store = ClientStore(tmp_path, "fedamp", "ab")
    FedAMPClient(task, METHOD, hparams_of(), store).train_round(initial(), 1)
    for start in ("mix", "own"):
        made = FedAMPClient(task, METHOD, hparams_of(start=start), store)
        made.restore(2, initial())
        assert (made.loaded is not None) == (start == "own")


def test_a_client_that_never_trained_starts_from_what_it_received() -> None:
    client = FedAMPClient(digit_tasks(1)[0], METHOD, hparams_of(start="own"))
    client.restore(1, initial())
    client.receive(initial())
    assert equal(selection.extract(client.model, client.down_names()), initial().all())
