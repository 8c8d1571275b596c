"""FedKD: worked numbers, a mentee that server and clients agree on, reductions, missed rounds, what stays private."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.nn import functional as F

from clients.fedkd import FedKDClient, FedKDHParams, mentor_mentee_losses
from clients.mutual import small_arrays, stripped
from fedapp import config as configuration
from fedapp.core.lowrank import compress, rebuild
from fedapp.data.transforms import normalise
from fedapp.engines.local import RunResult
from fedapp.learning.state import ClientStore
from fedapp.learning.training import epoch_batches
from fedapp.method import Arrays, Payload, Reply, ServerContext, ServerState
from fedapp.tasks import simulated as tasks
from fedapp.transport import checkpoint
from strategies.fedkd import METHOD, FedKD, _shapes, energy
from tests.handmade import clipped_by_hand, equal, refusal

Z_L = torch.tensor([[2, 0.5, -1], [0.3, 0.2, 0.1]])
Z_M = torch.tensor([[1.0, 1, 0], [-0.5, 0.8, 0.4]])
H_L = torch.tensor([[1.0, 0], [0.5, 0.5]])
H_M = torch.tensor([[0.2, 0.4], [0.6, 0]])
W_H = torch.tensor([[1, 0.5], [0, 1]])
Y = torch.tensor([0, 1])
SMALL = 9738


def strategy(**hparams: Any) -> tuple[FedKD, ServerState]:
    made = FedKD(METHOD, FedKDHParams(**hparams))
    context = ServerContext(0, (), 10, 64, {}, lambda k: {}, lambda *a: np.random.default_rng(0), shape=(1, 8, 8))
    return made, made.init(context)


def client(k: int, folder: Path, model: str = "digits-a", **hparams: Any) -> FedKDClient:
    config = configuration.from_flat({"method": "fedkd", "dataset": "digits", "clients": 4, "model": model})
    store = ClientStore(folder / str(k), "fedkd", "ab")
    return FedKDClient(tasks.simulated_task(config, k, 4, torch.device("cpu")), METHOD, FedKDHParams(**hparams), store)


def train(made: FedKDClient, payload: Payload, server_round: int) -> Reply:
    arrays, n, metrics = made.train_round(payload, server_round)
    return Reply(made.task.client, n, arrays, metrics)


def test_worked_losses() -> None:
    assert float(F.mse_loss(H_M @ W_H.T, H_L)) == pytest.approx(0.195, abs=1e-6)
    mentor, mentee = mentor_mentee_losses(Z_L, Z_M, H_L, H_M, W_H, Y, FedKDHParams())
    assert float(mentor) == pytest.approx(0.968349, abs=1e-6)
    assert float(mentee) == pytest.approx(1.054408, abs=1e-6)
    mentor, mentee = mentor_mentee_losses(Z_L, Z_M, H_L, H_M, W_H, Y, FedKDHParams(divergence="mean"))
    assert float(mentor) == pytest.approx(0.861146, abs=1e-6)
    assert float(mentee) == pytest.approx(0.950798, abs=1e-6)


def test_worked_energy() -> None:
    hparams = FedKDHParams(energy_rounds=10)
    assert [energy(hparams, t) for t in (0, 5, 10, 30)] == pytest.approx([0.95, 0.965, 0.98, 0.98])
    server, state = strategy(energy_rounds=10)
    assert server.send(state, 6, 0).scalars["energy"] == pytest.approx(0.965), "five rounds are finished"


def test_the_weight_is_a_constant_and_teachers_are_too() -> None:
    z_l, z_m, h_l, h_m, w = (t.clone().requires_grad_() for t in (Z_L, Z_M, H_L, H_M, W_H))
    mentor, mentee = mentor_mentee_losses(z_l, z_m, h_l, h_m, w, Y, FedKDHParams())
    weight = 1 / 1.434703
    p, q, e = F.softmax(Z_L, dim=1), F.softmax(Z_M, dim=1), F.one_hot(Y, 3)
    g = torch.autograd.grad(mentor + mentee, (z_l, z_m, h_l, h_m, w))
    torch.testing.assert_close(g[0], (p - e) / 2 + weight * (p - q) / 2, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(g[1], (q - e) / 2 + weight * (q - p) / 2, rtol=1e-5, atol=1e-6)
    difference = 2 * weight * 2 * (H_L - H_M @ W_H.T) / 4  # L_H stands in both losses
    torch.testing.assert_close(g[2], difference, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(g[3], -difference @ W_H, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(g[4], -difference.T @ H_M, rtol=1e-5, atol=1e-6)


def test_a_perfect_batch_gives_finite_losses() -> None:
    z = torch.tensor([[200.0, 0, 0]])
    for floor in (0.0, 1.0):
        losses = mentor_mentee_losses(z, z, H_L[:1], H_M[:1], W_H, Y[:1], FedKDHParams(floor=floor))
        assert all(bool(loss.isfinite()) for loss in losses)


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_local_training_equals_a_plain_loop(tmp_path: Path, clip: float) -> None:
    """Both models and W_h are clipped each by itself."""
    bound_by: list[bool] = []
    server, state = strategy()
    made = client(1, tmp_path)
    made.task = replace(made.task, train=made.task.train.replaced(clip=clip))
    made.round = 1
    payload = server.send(state, 1, 1)
    made.restore(1, payload)
    made.receive(payload)
    made.before_training(payload)
    large, small = copy.deepcopy(made.model).train(), copy.deepcopy(made.small).train()
    w = torch.nn.Parameter(made.hidden_map.detach().clone())
    bound = 1 / made.small.width**0.5  # a linear layer's
    assert 0.9 * bound < float(w.max()) <= bound and -bound <= float(w.min()) < -0.9 * bound
    made.run_phases()
    spec = made.task.train
    optimizer = torch.optim.SGD([*large.parameters(), *small.parameters(), w], lr=spec.lr, momentum=spec.momentum)
    generator = made.generator("batches")
    for _ in range(spec.local_epochs):
        for raw, y, _ in epoch_batches(made.task.x_train, made.task.y_train, spec.batch_size, generator):
            x = normalise(raw, made.task.inputs)
            h_l, h_m = large.represent(x), small.represent(x)
            log_l, log_m = F.log_softmax(large.classify(h_l), dim=1), F.log_softmax(small.classify(h_m), dim=1)
            ce_l, ce_m = F.nll_loss(log_l, y), F.nll_loss(log_m, y)
            d = max(1.0, float((ce_l + ce_m).detach()))
            kl_l = (log_m.detach().exp() * (log_m.detach() - log_l)).sum(dim=1).mean()
            kl_m = (log_l.detach().exp() * (log_l.detach() - log_m)).sum(dim=1).mean()
            hidden = (h_l - h_m @ w.T).square().mean()
            optimizer.zero_grad()
            (ce_l + ce_m + (kl_l + kl_m + 2 * hidden) / d).backward()
            norms = [clipped_by_hand(part, clip) for part in (large.parameters(), small.parameters(), [w])]
            bound_by.append(min(norms[:2]) > clip)
            optimizer.step()
    assert any(bound_by), "the bound must bind for both models in some step"
    pairs = [*zip(made.model.parameters(), large.parameters()), *zip(made.small.parameters(), small.parameters())]
    for a, b in [*pairs, (made.hidden_map, w)]:
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_server_and_clients_hold_the_same_mentee(tmp_path: Path) -> None:
    """Bit for bit over rounds with changing participants, and every update is what the definition says."""
    server, state = strategy()
    trained: dict[int, Arrays] = {}
    for server_round, ids in enumerate(([0, 1, 2], [0, 1], [0, 2], [1, 2, 3]), start=1):
        replies = []
        for k in ids:
            payload = server.send(state, server_round, k)
            made = client(k, tmp_path, model="digits-a" if k % 2 else "digits-b")
            reply = train(made, payload, server_round)
            assert refusal(server, state, reply) is None
            held, sent = made.base(), stripped(state["small"])
            assert all(np.array_equal(held[n], sent[n]) for n in sent), f"client {k} in round {server_round}"
            trained[k] = small_arrays(made.small)
            exact = {n: trained[k][n] - held[n] for n in held}
            kept = rebuild(stripped(reply.arrays), _shapes(state["small"]))
            for n in exact:
                lost = np.square(kept[n] - exact[n]).sum()
                assert (
                    lost <= (1 - energy(server.hparams, server_round - 1)) * np.square(exact[n]).sum() * 1.001 + 1e-12
                )
            replies.append(reply)
        mean = {
            n: np.mean([rebuild(stripped(r.arrays), _shapes(state["small"]))[n] for r in replies], axis=0)
            for n in _shapes(state["small"])
        }
        new = server.aggregate(state, server_round, iter(replies))
        expected = rebuild(compress(mean, energy(server.hparams, server_round - 1)), _shapes(state["small"]))
        for n, before in stripped(state["small"]).items():
            np.testing.assert_allclose(stripped(new["small"])[n] - before, expected[n], atol=1e-4)
        assert new["holders"] == ids and new["version"] == server_round
        shapes = {n.removesuffix("/s"): a.shape for n, a in stripped(new["update"]).items() if n.endswith("/s")}
        assert server.report(new, {}) == {"update_ranks": {n: rank for n, (rank,) in shapes.items()}}
        state = new


def test_who_missed_a_round_gets_the_whole_mentee() -> None:
    server, state = strategy()
    zeros = {n: np.zeros_like(a) for n, a in state["small"].items()}
    first = server.send(state, 1, 0)
    assert first.scalars["whole"] is True and first.nbytes == 4 * SMALL
    state = server.aggregate(state, 1, iter([Reply(0, 5, zeros, {"version": 0}), Reply(1, 5, zeros, {"version": 0})]))
    assert [server.send(state, 2, k).scalars["whole"] for k in (0, 1, 2)] == [False, False, True]
    assert server.send(state, 2, 0).common is server.send(state, 2, 1).common
    assert server.send(state, 2, 0).nbytes < 4 * SMALL
    state = server.aggregate(state, 2, iter([Reply(1, 5, zeros, {"version": 1}), Reply(2, 5, zeros, {"version": 0})]))
    assert [server.send(state, 3, k).scalars["whole"] for k in (0, 1, 2)] == [True, False, True]
    assert server.aggregate(state, 3, iter([])) is state


def test_the_hidden_map_is_drawn_as_a_linear_layers_weights_are(tmp_path: Path) -> None:
    server, state = strategy()
    made = client(0, tmp_path)
    made.round = 1
    made.restore(1, server.send(state, 1, 0))
    made.receive(server.send(state, 1, 0))
    made.small.width = 16  # not as wide as the mentor: (r_l, r_m)
    made.before_training(server.send(state, 1, 0))
    drawn = made.own["hidden_map"]
    assert drawn.shape == (64, 16) and np.abs(drawn).max() <= 1 / 4
    assert np.abs(drawn).max() > 0.24 and abs(drawn.mean()) < 0.02
    before = drawn.copy()
    with torch.no_grad():
        made.hidden_map += 1
    assert np.array_equal(made.own["hidden_map"], before), "what is trained is a copy until the round is over"
    made.own["base/head.bias"] = made.own["base/head.bias"] + 1
    kept, _ = made.after_training(Payload(scalars={"energy": 0.9}))
    np.testing.assert_array_equal(made.own["hidden_map"], made.hidden_map.detach())
    with torch.no_grad():
        made.hidden_map += 1
    assert not np.array_equal(made.own["hidden_map"], made.hidden_map.detach()), "what is kept is a copy"
    np.testing.assert_allclose(kept["small/head.bias"], -1, atol=1e-6)


def test_an_update_that_comes_twice_counts_once(tmp_path: Path) -> None:
    """After a round that did not count the server sends the same update again."""
    server, state = strategy()
    made = client(0, tmp_path)
    state = server.aggregate(state, 1, iter([train(made, server.send(state, 1, 0), 1)]))
    payload = server.send(state, 2, 0)
    assert not payload.scalars["whole"]
    once = dict(made.received_small(payload))
    assert equal(once, made.received_small(payload)) and int(made.own["version"]) == payload.scalars["version"]


def test_a_client_without_the_base_says_so(tmp_path: Path) -> None:
    server, state = strategy()
    zeros = {n: np.zeros_like(a) for n, a in state["small"].items()}
    state = server.aggregate(state, 1, iter([Reply(0, 5, zeros, {"version": 0})]))
    with pytest.raises(ValueError, match="holds version None"):
        client(0, tmp_path).train_round(server.send(state, 2, 0), 2)


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_with_labels_alone_the_mentee_is_nearly_fedavgs(tiny: Callable[..., RunResult], clip: float) -> None:
    args = "distil=0 average=samples energy_start=1 energy_end=1"
    both = tiny(method="fedkd", method_args=args, rounds=3, model="digits-a,digits-b", clip=clip)
    fedavg = tiny(method="fedavg", rounds=3, model="digits-c", clip=clip)
    a, b = (checkpoint.latest(r.out / "checkpoint") for r in (both, fedavg))
    assert a is not None and b is not None
    for name, value in stripped(a[1]["small"]).items():
        np.testing.assert_allclose(value, b[1]["model"][name], atol=1e-4)


def test_traffic_is_compressed_and_the_private_parts_stay(tiny: Callable[..., RunResult]) -> None:
    result = tiny(method="fedkd", rounds=3, model="digits-a,digits-b")
    assert result.clients["bytes_up"].lt(4 * SMALL).all()
    down = result.rounds["bytes_down"].tolist()
    assert down[0] == 4 * SMALL and max(down[1:]) < 4 * SMALL
    assert "head.weight" not in result.summary["update_ranks"] or result.summary["update_ranks"]["head.weight"] <= 8
    states = sorted((result.out / "state").rglob("*.safetensors"))
    with safe_open(str(states[0]), framework="numpy") as f:
        names = set(f.keys())
    assert {"own/hidden_map", "own/version", "own/base/head.weight"} <= names


def test_the_hidden_map_is_trained_kept_and_bridges_widths(tmp_path: Path) -> None:
    server, state = strategy()
    made = client(0, tmp_path)
    reply = train(made, server.send(state, 1, 0), 1)
    first = made.own["hidden_map"].copy()
    state = server.aggregate(state, 1, iter([reply]))
    again = client(0, tmp_path)
    payload = server.send(state, 2, 0)
    again.restore(2, payload)
    assert np.array_equal(again.own["hidden_map"], first)
    h_l, h_m = torch.randn(2, 5), torch.randn(2, 3)
    losses = mentor_mentee_losses(Z_L, Z_M, h_l, h_m, torch.randn(5, 3), Y, FedKDHParams())
    assert all(bool(loss.isfinite()) for loss in losses)
