"""FML: worked numbers, a two-optimizer oracle, reductions to Standalone and to FedAvg, what leaves and what stays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.nn import functional as F

from clients.fml import FMLClient, FMLHParams, mutual_losses
from clients.mutual import build_small, prefixed, small_arrays, stripped
from fedapp import config as configuration
from fedapp import registry, sampling
from fedapp.data.transforms import normalise
from fedapp.engines.local import RunResult
from fedapp.errors import BadRequest
from fedapp.learning.training import epoch_batches
from fedapp.method import Arrays, Payload, Reply, ServerContext, ServerState
from fedapp.tasks import simulated as tasks
from fedapp.transport import checkpoint
from strategies.fml import FML, METHOD
from tests.handmade import clipped_by_hand, equal, refusal

Z_L = torch.tensor([[2, 0.5, -1], [0.3, 0.2, 0.1]])
Z_M = torch.tensor([[1.0, 1, 0], [-0.5, 0.8, 0.4]])
Y = torch.tensor([0, 1])


def context(size: int = 8, seed: int = 0) -> ServerContext:
    return ServerContext(seed, (), 10, 64, {}, lambda k: {}, lambda *a: np.random.default_rng(0), shape=(1, size, size))


def strategy(**hparams: Any) -> tuple[FML, ServerState]:
    made = FML(METHOD, FMLHParams(**hparams))
    return made, made.init(context())


def client(model: str = "digits-a", **hparams: Any) -> FMLClient:
    config = configuration.from_flat({"method": "fml", "dataset": "digits", "clients": 4, "model": model})
    return FMLClient(tasks.simulated_task(config, 1, 4, torch.device("cpu")), METHOD, FMLHParams(**hparams))


def reply(k: int, arrays: Arrays, n: int = 5) -> Reply:
    return Reply(k, n, arrays, {})


def test_worked_losses() -> None:
    assert float(F.cross_entropy(Z_L, Y)) == pytest.approx(0.671627, abs=1e-6)
    assert float(F.cross_entropy(Z_M, Y)) == pytest.approx(0.763076, abs=1e-6)
    local, meme = mutual_losses(Z_L, Z_M, Y, FMLHParams())
    assert float(local) == pytest.approx(0.451168, abs=1e-6)
    assert float(meme) == pytest.approx(0.493026, abs=1e-6)
    local, _ = mutual_losses(Z_L, Z_M, Y, FMLHParams(divergence="mean"))
    assert float(local) == pytest.approx(0.374265, abs=1e-6)


def test_each_loss_moves_its_own_model_only() -> None:
    z_l, z_m = Z_L.clone().requires_grad_(), Z_M.clone().requires_grad_()
    local, meme = mutual_losses(z_l, z_m, Y, FMLHParams(alpha=0.3, beta=0.6))
    (grad,) = torch.autograd.grad(local, z_l, retain_graph=True)
    assert torch.autograd.grad(local, z_m, retain_graph=True, allow_unused=True) == (None,)
    assert torch.autograd.grad(meme, z_l, retain_graph=True, allow_unused=True) == (None,)
    p, q, e = F.softmax(Z_L, dim=1), F.softmax(Z_M, dim=1), F.one_hot(Y, 3)
    torch.testing.assert_close(grad, (0.3 * (p - e) + 0.7 * (p - q)) / 2)


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_local_training_equals_two_optimizers(clip: float) -> None:
    """One optimizer over both models on the sum of both losses is one step on each, from the same predictions."""
    server, state = strategy(alpha=0.4, beta=0.7)
    made = client(alpha=0.4, beta=0.7)
    made.task = replace(made.task, train=made.task.train.replaced(clip=clip))
    made.round = 1
    payload = server.send(state, 1, 1)
    made.restore(1, payload)
    made.receive(payload)

    large, small = copy.deepcopy(made.model).train(), copy.deepcopy(made.small).train()
    made.before_training(payload)
    made.run_phases()
    spec = made.task.train
    optimizers = [torch.optim.SGD(m.parameters(), lr=spec.lr, momentum=spec.momentum) for m in (large, small)]
    generator = made.generator("batches")

    for _ in range(spec.local_epochs):
        for raw, y, _ in epoch_batches(made.task.x_train, made.task.y_train, spec.batch_size, generator):
            x = normalise(raw, made.task.inputs)
            z_l, z_m = large(x), small(x)
            log_l, log_m = F.log_softmax(z_l, dim=1), F.log_softmax(z_m, dim=1)
            kl_l = (log_m.detach().exp() * (log_m.detach() - log_l)).sum(dim=1).mean()
            kl_m = (log_l.detach().exp() * (log_l.detach() - log_m)).sum(dim=1).mean()
            losses = (0.4 * F.cross_entropy(z_l, y) + 0.6 * kl_l, 0.7 * F.cross_entropy(z_m, y) + 0.3 * kl_m)
            for optimizer, loss, model in zip(optimizers, losses, (large, small), strict=True):
                optimizer.zero_grad()
                loss.backward()
                clipped_by_hand(model.parameters(), clip)
                optimizer.step()
    for ours, theirs in ((made.model, large), (made.small, small)):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_the_first_small_model_is_the_one_that_fedavg_would_start_from() -> None:
    server, state = strategy()
    seed = sampling.derived_seed(0, "server-model", 0)
    expected = build_small(server.hparams, num_classes=10, shape=(1, 8, 8), seed=seed)
    assert server.context.shape == (1, 8, 8)
    for name, p in expected.named_parameters():
        assert np.array_equal(state["small"][f"small/{name}"], p.detach())


@pytest.mark.parametrize("average", ["plain", "samples"])
def test_merge_is_the_mean_over_participants(average: str) -> None:
    server, state = strategy(average=average)
    rng = np.random.default_rng(0)
    sent = [{n: rng.normal(size=a.shape).astype(np.float32) for n, a in state["small"].items()} for _ in range(3)]
    counts = [2, 3, 7]
    replies = [reply(k, arrays, n) for k, (arrays, n) in enumerate(zip(sent, counts, strict=True))]
    assert all(refusal(server, state, r) is None for r in replies)
    kept = {n: a.copy() for n, a in state["small"].items()}
    new = server.aggregate(state, 1, iter(replies))
    weights = counts if average == "samples" else [1, 1, 1]
    for name, value in new["small"].items():
        expected = sum(w * a[name].astype(np.float64) for w, a in zip(weights, sent, strict=True)) / sum(weights)
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
        assert np.array_equal(state["small"][name], kept[name]), "the old state was changed"
    assert server.aggregate(new, 2, iter([])) is new


def test_auto_chooses_by_image_size_alone() -> None:
    hparams = FMLHParams()
    for size, name in ((8, "digits-c"), (28, "cnn-d"), (32, "cnn-d"), (64, "cnn-d")):
        assert build_small(hparams, num_classes=5, shape=(3, size, size), seed=0).name == name
    assert build_small(FMLHParams(small="fedgh-5"), num_classes=10, shape=(3, 32, 32), seed=0).name == "fedgh-5"
    named = sum(
        a.nbytes
        for a in small_arrays(
            build_small(FMLHParams(small="fedgh-5"), num_classes=10, shape=(3, 32, 32), seed=0)
        ).values()
    )
    assert named == 2_680_232


def test_the_small_model_is_the_servers_and_the_private_one_stays() -> None:
    server, state = strategy()
    made = client()
    made.restore(1, Payload())
    private = copy.deepcopy(made.model.state_dict())
    made.receive(server.send(state, 1, 1))
    held, sent = small_arrays(made.small), stripped(state["small"])
    assert held.keys() == sent.keys() and all(np.array_equal(held[n], sent[n]) for n in sent)
    assert all(torch.equal(a, private[n]) for n, a in made.model.state_dict().items())
    assert made.small.training
    ours = [*made.model.parameters(), *made.small.parameters()]
    assert [id(p) for group in made.groups() for p in group["params"]] == [id(p) for p in ours]


def test_unknown_and_unfit_small_models_are_bad_requests() -> None:
    with pytest.raises(BadRequest, match="digits-c"):
        registry.parse_args(METHOD, "small=digitsc")
    with pytest.raises(BadRequest, match="8x8"):
        FML(METHOD, FMLHParams(small="fedgh-5")).init(context())


def test_a_payload_without_the_small_model_is_an_error() -> None:
    with pytest.raises(ValueError, match="small/"):
        client().train_round(Payload(), 1)


def test_batch_norm_statistics_of_the_small_model_travel() -> None:
    small = build_small(FMLHParams(small="resnet18"), num_classes=3, shape=(1, 32, 32), seed=0)
    names = small_arrays(small)
    assert any(n.endswith("running_mean") for n in names)
    assert not any(n.endswith("num_batches_tracked") for n in names)


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_with_labels_alone_the_small_model_is_fedavgs(tiny: Callable[..., RunResult], clip: float) -> None:
    args = "alpha=1 beta=1 average=samples"
    both = tiny(method="fml", method_args=args, rounds=3, model="digits-a,digits-b", clip=clip)
    fedavg = tiny(method="fedavg", rounds=3, model="digits-c", clip=clip)
    a, b = (checkpoint.latest(r.out / "checkpoint") for r in (both, fedavg))
    assert a is not None and b is not None
    assert equal(stripped(a[1]["small"]), b[1]["model"])


def test_private_models_stay_and_the_small_one_is_counted(tiny: Callable[..., RunResult]) -> None:
    result = tiny(method="fml", rounds=2, model="digits-a,digits-b", fraction_train=0.67)
    assert result.summary["bytes_up"] == result.summary["bytes_down"] == 4 * 9738
    states = sorted((result.out / "state").rglob("*.safetensors"))

    with safe_open(str(states[0]), framework="numpy") as f:
        assert all(n.startswith("model/") for n in f.keys())  # noqa: SIM118


def test_prefixes_round_trip() -> None:
    arrays = {"head.bias": np.zeros(3)}
    assert stripped({**prefixed(arrays), "other": np.ones(1)}) == arrays
