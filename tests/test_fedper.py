"""FedPer: worked means and a worked step, a private head, and its two ends, FedAvg and Standalone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from clients.fedper import FedPerHParams, PrivateClient
from fedapp import sampling
from fedapp.engines.local import RunResult
from fedapp.errors import BadRequest
from fedapp.learning.state import ClientStore
from fedapp.method import Payload, Reply
from fedapp.models.selection import everything
from fedapp.registry import parse_args
from strategies.fedper import METHOD
from tests.handmade import TOY, context, digit_tasks, equal, federate, on_toy, toy_task

Tiny = Callable[..., RunResult]
BODY = "features.1.weight"
STEPPED = {
    BODY: np.array([[1.036512, 0.443357], [-0.546591, 1.068835]]),
    "head.weight": np.array([[0.505396, -0.297359], [-0.315079, 0.889889], [0.109683, 0.107470]]),
    "head.bias": np.array([-0.032468, 0.017861, 0.014607]),
}
"""The example after one step on body and head together."""


def test_one_joint_step_of_the_example() -> None:
    client = on_toy(PrivateClient)(toy_task(), METHOD, FedPerHParams())
    arrays, n, metrics = client.train_round(Payload(common={BODY: TOY[BODY]}), 1)
    assert list(arrays) == [BODY] and n == 3, "the head stays"
    for name, value in everything(client.model).items():
        np.testing.assert_allclose(value, STEPPED[name], atol=1e-6)
    assert metrics["train-loss"] == pytest.approx(0.841809, abs=1e-6)
    assert metrics["trained-loss-sum"] / 3 == pytest.approx(0.781108, abs=1e-6)


def test_the_worked_means_of_bodies() -> None:
    """Three clients of 100, 60 and 40 samples, then the first and the last alone."""
    bodies = [np.array(b) for b in ([1.2, 0.8], [0.6, 1.4], [1.5, 1.5])]
    replies = [Reply(k, n, {BODY: b}, {}) for k, (n, b) in enumerate(zip((100, 60, 40), bodies, strict=True))]
    server = METHOD.strategy(METHOD, FedPerHParams())
    state = server.init(context({BODY: np.zeros(2)}))
    for chosen, mean in ((replies, (1.08, 1.12)), (replies[::2], (1.285714, 1.0))):
        np.testing.assert_allclose(server.aggregate(state, 1, iter(chosen))["model"][BODY], mean, atol=1e-6)
    assert equal(server.aggregate(state, 1, iter([]))["model"], state["model"])
    assert server.global_arrays(state) is None, "a body alone is no model"


def test_a_client_that_sits_out_keeps_its_head(tmp_path: Path) -> None:
    tasks = digit_tasks(2, relabel=lambda client, label: label % 5 + 5 * client)  # each lacks half of the classes
    stores = {t.client: ClientStore(tmp_path / str(t.client), METHOD.id, "ab") for t in tasks}
    heads = []
    for rounds, present in ((1, {1: [0, 1]}), (2, {1: [0, 1], 2: [1]})):
        federate(METHOD, FedPerHParams(), tasks, rounds, stores=stores, present=lambda t, here=present: here[t])
        stored = {c: store.load(3) for c, store in stores.items()}
        heads.append({c: s.arrays["model/head.weight"] for c, s in stored.items() if s})
    assert np.array_equal(heads[0][0], heads[1][0]) and not np.array_equal(heads[0][1], heads[1][1])
    restored = PrivateClient(tasks[0], METHOD, FedPerHParams(), stores[0])
    restored.restore(4, Payload())
    assert np.array_equal(restored.model.head.weight.detach(), heads[1][0])


def test_layers_below_the_head_may_be_private_too(tiny: Tiny) -> None:
    result = tiny(method="fedper", method_args="share=features.conv1")
    assert 0 < result.summary["bytes_up"] == result.summary["bytes_down"] < tiny(method="fedper").summary["bytes_up"]
    with pytest.raises(BadRequest, match=r"'features.77.' matches no array .*it has features.conv1, .*head.weight"):
        tiny(method="fedper", method_args="share=features.77")
    with pytest.raises(BadRequest, match="'body' is not a layer"):
        parse_args(METHOD, "share=features,body")


@pytest.mark.parametrize("start", ["common", "own"])
def test_new_heads_start_alike_or_with_seeds_of_their_own(start: str) -> None:
    hparams = FedPerHParams.model_validate({"start": start})
    heads = []
    for task in digit_tasks(2):
        client = PrivateClient(task, METHOD, hparams)
        client.restore(5, Payload())
        heads.append(client.model.head.weight.detach())
    spec = task.spec(sampling.server_model_seed(task.seed))
    servers = PrivateClient.build_model(spec, hparams).head.weight.detach()
    assert [np.array_equal(h, servers) for h in heads] == [start == "common"] * 2
    assert np.array_equal(*heads) == (start == "common")
