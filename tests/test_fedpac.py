"""FedPAC: worked statistics, weights and means, FedRep as its reduction, heads of clients that come and go."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from clients.fedpac import FedPACClient, FedPACHParams
from fedapp.core.collaboration import class_statistics, collaboration_statistics, combination
from fedapp.learning.training import Batch
from fedapp.method import Arrays, Payload, Reply, ServerState
from fedapp.models.selection import everything, extract
from strategies.fedpac import METHOD, FedPAC
from tests.handmade import (
    context,
    digit_tasks,
    digits_context,
    equal,
    images,
    model_like,
    one_batch_task,
)

W = "head.weight"

# Three clients, two classes, d = 2: representations by class.
CLIENTS = [
    ([[1.0, 0.0], [1.0, 0.2], [0.0, 1.0]], [0, 0, 1]),
    ([[0.8, 0.2], [0.2, 1.0], [0.0, 0.8], [0.1, 0.9]], [0, 1, 1, 1]),
    ([[0.5, 0.5], [0.7, 0.3]], [1, 1]),
]
H = [[[0.666667, 0.066667], [0, 0.333333]], [[0.2, 0.05], [0.075, 0.675]], [[0, 0], [0.6, 0.4]]]
V = [0.151111, 0.072813, 0.01]
ALPHA = [[0.731130, 0.250122, 0.018747], [0.120521, 0.735096, 0.144383], [0.001241, 0.019829, 0.978930]]
VALUES = [0.110482, 0.053524, 0.009789]
"""P alpha of each client, the same throughout."""


def statistics(client: int) -> tuple[np.ndarray[Any, Any], float, Any]:
    z, y = CLIENTS[client]
    found = class_statistics(torch.tensor(z), torch.tensor(y), 2)
    h, v = collaboration_statistics(found)
    return h.numpy(), v, found


def test_the_worked_statistics() -> None:
    for client, (h, v) in enumerate(zip(H, V, strict=True)):
        found = statistics(client)
        np.testing.assert_allclose(found[0], h, atol=1e-6)
        assert found[1] == pytest.approx(v, abs=1e-6)


def test_one_class_of_one_sample_has_no_variance() -> None:
    found = class_statistics(torch.tensor([[0.3, 0.7]]), torch.tensor([1]), 3)
    assert collaboration_statistics(found)[1] == 0.0 and found.counts.tolist() == [0, 1, 0]


def test_the_worked_weights() -> None:
    found = [statistics(k) for k in range(3)]
    h = np.stack([f[0].ravel() for f in found])
    v = np.array([f[1] for f in found])
    weights = combination(h, v)
    np.testing.assert_allclose(weights, ALPHA, atol=1e-6)
    for k, value in enumerate(VALUES):
        apart = h - h[k]
        np.testing.assert_allclose((np.diag(v) + apart @ apart.T) @ weights[k], value, atol=1e-6)
    apart = h - h[0]
    np.testing.assert_allclose(apart @ apart.T, [[0, 0, 0], [0, 0.340417, 0.38], [0, 0.38, 0.813333]], atol=1e-6)
    np.testing.assert_allclose(
        weights @ [1, 2, 4], [1.306365, 2.168246, 3.956619][:1] + [*weights[1:] @ [1, 2, 4]], atol=2e-6
    )
    np.testing.assert_allclose(weights @ [1, 2, 4], [1.306365, 2.168246, 3.956619], atol=2e-6)


def reply(client: int, **changes: Any) -> Reply:
    """What a client of the example replies, with its head a constant of 1, 2 or 4."""
    h, v, found = statistics(client)
    arrays = {
        "features.weight": np.full(2, float(client), np.float32),
        W: np.full((2, 2), (1.0, 2.0, 4.0)[client], np.float32), "head.bias": np.zeros(2, np.float32),
        "pac/h": h.astype(np.float32), "pac/v": np.array([v], np.float32),
        "pac/proto": found.means.float().numpy(), "pac/count": found.counts.int().numpy(),
    }  # fmt: skip
    return Reply(client, len(CLIENTS[client][1]), {**arrays, **changes}, {})


def server(**hparams: Any) -> tuple[FedPAC, ServerState]:
    made = FedPAC(METHOD, FedPACHParams.model_validate(hparams))
    initial = {n: np.full_like(a, 9) for n, a in reply(0).arrays.items() if not n.startswith("pac/")}
    return made, made.init(context(initial, num_classes=2, width=2))


def test_a_worked_round_of_the_server() -> None:
    made, state = server()
    after = made.aggregate(state, 1, iter([reply(k) for k in range(3)]))
    heads = [made.send(after, 2, k).arrays[W][0, 0] for k in range(3)]
    np.testing.assert_allclose(heads, np.array(ALPHA) @ [1, 2, 4], atol=1e-5)
    np.testing.assert_allclose(after["protos"], [[0.933333, 0.133333], [0.25, 0.75]], atol=1e-6)
    assert after["known"].tolist() == [1, 1] and state["known"].tolist() == [0, 0]
    np.testing.assert_allclose(after["model"]["features.weight"], (4 * 1 + 2 * 2) / 9, atol=1e-6)
    assert W not in after["model"] and made.global_arrays(after) is None
    found = made.blend(after, {})
    assert found is not None and found[0] == [0, 1, 2]
    np.testing.assert_allclose(found[1], ALPHA, atol=1e-5)


def test_absent_clients_and_classes_keep_what_they_had() -> None:
    made, state = server()
    first = made.aggregate(state, 1, iter([reply(0), reply(1)]))
    second = made.aggregate(first, 2, iter([reply(2)]))
    assert equal(made.send(second, 3, 0).arrays, made.send(first, 2, 0).arrays)
    assert equal(made.send(second, 3, 2).arrays, {n: reply(2).arrays[n] for n in (W, "head.bias")}), "its own head"
    assert np.array_equal(second["protos"][0], first["protos"][0]), "client 2 lacks class 0"
    np.testing.assert_allclose(second["protos"][1], [0.6, 0.4], atol=1e-6)
    assert equal(made.send(second, 3, 7).arrays, state["head"]), "a new client gets the initial head"
    assert made.aggregate(second, 3, iter([])) is second
    found = made.blend(second, {})
    assert found is not None and found[1][2].tolist() == [0, 0, 1] and made.blend(state, {}) is None


def test_a_count_that_is_capped_counts_less_for_the_class_means_too() -> None:
    made, state = server()
    capped = [reply(0), dataclasses.replace(reply(1), num_samples=2)]
    after = made.aggregate(state, 1, iter(capped))
    means = [statistics(k)[2].means.numpy() for k in (0, 1)]
    expected = (2 * means[0][0] + 0.5 * means[1][0]) / 2.5
    np.testing.assert_allclose(after["protos"][0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pac/v": np.array([-0.1], np.float32)}, "at least 0"),
        ({"pac/count": np.array([1, 1], np.int32)}, "add up to num-examples = 3"),
        ({"pac/count": np.array([4, -1], np.int32)}, "add up"),
    ],
)
def test_statistics_that_do_not_fit_are_refused(changes: Arrays, said: str) -> None:
    made, state = server()
    assert made.check(state, reply(0)) is None
    assert said in str(made.check(state, reply(0, **changes)))


def client(known: list[int], means: np.ndarray[Any, Any], **hparams: Any) -> tuple[FedPACClient, Payload]:
    task = one_batch_task(model="digits-a", classes=4)
    sent = everything(model_like(task))
    pac = {"pac/proto": means.astype(np.float32), "pac/known": np.array(known, np.uint8)}
    return FedPACClient(task, METHOD, FedPACHParams.model_validate(hparams)), Payload(common={**sent, **pac})


def test_the_worked_pull() -> None:
    """Features (1, 0) and (0, 1) of classes 0 and 1, pulled to the class means by counts: .036806."""
    z, y = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
    one, payload = client([0] * 4, np.zeros((4, 64)))
    one.restore(1, payload)
    one.receive(payload)
    one.pulled, one.lam = True, 1.0
    one.target = torch.tensor([[0.933333, 0.133333], [0.25, 0.75]])
    one.model.represent = lambda x: z  # type: ignore[method-assign]
    one.model.classify = lambda z: torch.zeros(2, 4)  # type: ignore[method-assign]
    loss = float(one.step_loss(Batch(z, y, [z], torch.arange(2))))
    assert loss == pytest.approx(np.log(4) + 0.036806, abs=1e-6)


def test_the_default_pull_is_that_of_the_authors_at_any_width() -> None:
    """Weight 1 on the mean over their 128 features is 1 / 128 on the squared distance."""
    one, payload = client([1] * 4, np.random.default_rng(0).normal(size=(4, 64)))
    one.restore(2, payload)
    one.receive(payload)
    one.before_training(payload)
    x, y = images(one.task), one.task.y_train
    z = one.model.represent(x)
    pull = sum(float((z[i] - one.target[c]).square().sum()) for i, c in enumerate(y.tolist())) / len(y)
    plain = float(one.cross_entropy(one.model.classify(z), y))
    found = float(one.step_loss(Batch(x, y, [x], torch.arange(len(y)))))
    assert found - plain == pytest.approx(pull / 128, rel=1e-4)
    assert [FedPACHParams().weight(d) for d in (64, 128, 512)] == [0.5, 1.0, 4.0]


def test_classes_without_a_global_mean_are_pulled_to_the_own_one_before_training() -> None:
    means = np.random.default_rng(0).random((4, 64))
    for known in ([1, 0, 1, 0], [0, 0, 0, 0]):
        one, payload = client(known, means)
        one.restore(2, payload)
        one.receive(payload)
        one.before_training(payload)
        z = one.representations().double()
        for c, here in enumerate(known):
            own = z[one.task.y_train == c].mean(dim=0)
            np.testing.assert_allclose(one.target[c], means[c] if here else own, atol=1e-5)
        assert set(one.reference) == set(everything(one.model))
        pulled = client(known, means)[0].train_round(payload, 2)[0]
        plain = client(known, means, lam=0)[0].train_round(payload, 2)[0]
        assert equal(pulled, plain) == (not any(known)), "no pull in round 1"


def test_a_reply_describes_the_received_body_and_the_trained_one() -> None:
    one, payload = client([1] * 4, np.zeros((4, 64)))
    arrays, n, _ = one.train_round(payload, 1)
    after = class_statistics(one.representations(), one.task.y_train, 4)
    np.testing.assert_allclose(arrays["pac/proto"], after.means, atol=1e-6)
    assert arrays["pac/h"].dtype == arrays["pac/proto"].dtype == np.float32
    assert arrays["pac/count"].tolist() == [3, 3, 3, 3] and n == 12
    fresh, payload = client([1] * 4, np.zeros((4, 64)))
    fresh.restore(1, payload)
    fresh.receive(payload)
    h, v = collaboration_statistics(class_statistics(fresh.representations(), one.task.y_train, 4))
    np.testing.assert_allclose(arrays["pac/h"], h, atol=1e-6)
    assert arrays["pac/v"].shape == (1,) and arrays["pac/v"][0] == pytest.approx(v, rel=1e-5) and v > 0


def test_the_head_has_a_rate_of_its_own() -> None:
    def heads(**hparams: Any) -> Arrays:
        one, payload = client([0] * 4, np.zeros((4, 64)), **hparams)
        one.train_round(payload, 1)
        return extract(one.model, [W])

    twice = one_batch_task(model="digits-a", lr=0.2)
    direct = FedPACClient(twice, METHOD, FedPACHParams())
    direct.train_round(client([0] * 4, np.zeros((4, 64)))[1], 1)
    assert equal(heads(head_rate=2), extract(direct.model, [W])) and not equal(heads(), heads(head_rate=2))


def test_a_run_learns_from_all_clients() -> None:
    tasks = digit_tasks(3, relabel=lambda client, label: min(label, 4 + client))
    made = FedPAC(METHOD, FedPACHParams())
    state = made.init(digits_context(METHOD, FedPACHParams(), tasks))
    for server_round in (1, 2):
        replies = []
        for task in tasks:
            sent = made.send(state, server_round, task.client)
            arrays, n, metrics = FedPACClient(task, METHOD, FedPACHParams()).train_round(sent, server_round)
            replies.append(Reply(task.client, n, arrays, metrics))
            assert made.check(state, replies[-1]) is None
        state = made.aggregate(state, server_round, iter(replies))
    found = made.blend(state, {})
    assert found is not None
    np.testing.assert_allclose(found[1].sum(axis=1), 1, atol=1e-9)
    assert (found[1] >= 0).all() and ((found[1] > 0).sum(axis=1) > 1).any()
