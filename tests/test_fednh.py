"""FedNH: worked numbers, loops as oracle, frozen prototypes, absent classes, what travels, refused replies, resume."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clients._models import PrototypeModel
from clients.fednh import COUNT, PROTO_SUM, FedNHClient, FedNHHParams
from fedapp import run
from fedapp.data.transforms import InputSpec, normalise
from fedapp.errors import BadRequest
from fedapp.learning.state import ClientStore
from fedapp.learning.task import ModelSpec, Task
from fedapp.method import Arrays, Method, Payload, Reply, ServerContext, ServerState
from fedapp.models import build_model
from fedapp.models.selection import extract, merge, shared_names
from fedapp.sampling import rng
from strategies.fednh import METHOD, FedNH, move_prototypes
from tests.handmade import full_batch, images, refusal, short, steps_by_hand, weighted_mean

INPUTS = InputSpec((1, 8, 8), 16.0, (0.3,), (0.4,))
SPEC = ModelSpec("digits-a", 5, (1, 8, 8), 3)
WIDTH = 64


def task(labels: list[int], client: int = 0, **train: Any) -> Task:
    generator = torch.Generator().manual_seed(5 + client)
    x = torch.randint(0, 17, (len(labels), 8, 8, 1), generator=generator, dtype=torch.uint8)
    y = torch.tensor(labels)
    settings = short(**{"local_epochs": 1, "batch_size": 8, "lr": 0.05, "clip": 10.0, **train})
    return Task(client, 1, 5, INPUTS, "digits-a", x, y, x[:4], y[:4], train=settings)


LABELS = [0, 1, 1, 3, 3, 3, 0, 1, 3, 3] * 2


def client(job: Task | None = None, method: Method = METHOD, folder: Path | None = None, **hparams: Any) -> FedNHClient:
    store = None if folder is None else ClientStore(folder, "fednh", "ab")
    return FedNHClient(job or task(LABELS), method, FedNHHParams(**hparams), store)


def initial(**hparams: Any) -> Arrays:
    model = FedNHClient.build_model(SPEC, FedNHHParams(**hparams))
    return extract(model, shared_names(model, ("features.", "head.", "scale")))


def strategy(**hparams: Any) -> tuple[FedNH, ServerState]:
    made = FedNH(METHOD, FedNHHParams(**hparams))
    first = initial(**hparams)
    context = ServerContext(
        seed=0, clients=(), num_classes=5, width=WIDTH, initial=first, initial_from=lambda k: first,
        rng=lambda purpose, *numbers: rng(0, purpose, *numbers),
    )  # fmt: skip
    return made, made.init(context)


def random_reply(number: int, counts: list[int], seed: int) -> Reply:
    """A reply with a random extractor and honest class means."""
    generator = np.random.default_rng([seed, number])
    arrays = {
        n: generator.normal(size=a.shape).astype(np.float32) for n, a in initial().items() if not n.startswith("head.")
    }
    directions = generator.normal(size=(5, WIDTH))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    count = np.array(counts, dtype=np.int32)
    arrays[PROTO_SUM] = (count[:, None] * directions).astype(np.float32)
    arrays[COUNT] = count
    return Reply(number, int(count.sum()), arrays, {})


# ---- the server ------------------------------------------------------------------------------------------------------


def test_worked_numbers() -> None:
    m = np.array([[[0.6, 0.8], [1, 0]], [[0, 1], [0.6, 0.8]]])
    counts = np.array([[3, 1], [1, 3]])
    proto_sum = (counts[:, :, None] * m).sum(axis=0)
    mean = proto_sum / counts.sum(axis=0)[:, None]
    np.testing.assert_allclose(
        mean / np.linalg.norm(mean, axis=1, keepdims=True), [(0.467888, 0.883788), (0.759257, 0.650791)], atol=6e-7
    )
    w = move_prototypes(np.eye(2, dtype=np.float32), proto_sum, counts.sum(axis=0), 0.9)
    np.testing.assert_allclose(w, [(0.995672, 0.092942), (0.078431, 0.996920)], atol=6e-7)
    assert w.dtype == np.float32


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_server_equals_loops(weights: str) -> None:
    fed, state = strategy(weights=weights, rho=0.7)
    replies = [random_reply(0, [3, 0, 9, 1, 0], 1), random_reply(1, [2, 4, 0, 1, 0], 1), random_reply(4, [1] * 5, 1)]
    after = fed.aggregate(state, 1, iter(replies))["model"]
    shares = {"uniform": [1 / 3] * 3, "samples": [r.num_samples / 25 for r in replies]}[weights]
    for name in after:
        if not name.startswith("head."):
            expected = sum(a * r.arrays[name].astype(np.float64) for a, r in zip(shares, replies))
            np.testing.assert_allclose(after[name], expected, rtol=1e-5, atol=1e-6)
    for c in range(5):
        total = [0.0] * WIDTH
        for r in replies:
            total = [t + float(v) for t, v in zip(total, r.arrays[PROTO_SUM][c])]
        length = math.sqrt(sum(t * t for t in total))
        mixed = [0.7 * float(w) + 0.3 * t / length for w, t in zip(state["model"]["head.weight"][c], total)]
        length = math.sqrt(sum(v * v for v in mixed))
        np.testing.assert_allclose(after["head.weight"][c], [v / length for v in mixed], rtol=1e-5, atol=1e-6)


def test_classes_that_nobody_has_keep_their_prototypes_bit_for_bit() -> None:
    fed, state = strategy()
    replies = [random_reply(0, [3, 0, 2, 0, 0], 1), random_reply(1, [1, 0, 0, 0, 2], 1)]
    before, after = state["model"]["head.weight"], fed.aggregate(state, 1, replies)["model"]["head.weight"]
    for c in range(5):
        assert np.array_equal(before[c], after[c]) == (c in (1, 3))


def test_means_that_cancel_leave_the_prototype() -> None:
    w = np.eye(3, dtype=np.float32)
    proto_sum = np.array([[0.0, 0, 0], [0, -4, 0], [0, 0, 4]])
    moved = move_prototypes(w, proto_sum, np.array([4, 4, 4]), 0.5)
    assert np.array_equal(moved, w)
    assert np.isfinite(moved).all()


def test_a_sum_counts_as_a_direction_by_its_length_for_each_sample() -> None:
    w = np.eye(2, dtype=np.float32)
    for length, moves in ((3e-6, False), (6e-6, True)):  # of four samples: 0.75e-6 and 1.5e-6
        sums = np.array([[0.0, length], [0, 0]])
        assert np.array_equal(move_prototypes(w, sums, np.array([4, 0]), 0.5), w) != moves


def test_rho_one_is_fedavg_under_fixed_prototypes() -> None:
    fed, state = strategy(rho=1.0, weights="samples")
    replies = [random_reply(0, [3, 0, 2, 0, 1], 1), random_reply(1, [1, 4, 0, 0, 2], 1)]
    after = fed.aggregate(state, 1, replies)["model"]
    trained = {n: a for n, a in state["model"].items() if not n.startswith("head.")}
    expected = {**state["model"], **weighted_mean(replies, trained)}
    assert after.keys() == expected.keys()
    assert all(np.array_equal(after[n], expected[n]) for n in expected)


def test_prototypes_keep_length_one_over_many_rounds_and_the_old_state_is_not_written() -> None:
    fed, state = strategy(rho=0.3)
    first = {n: a.copy() for n, a in state["model"].items()}
    kept = state
    for server_round in range(1, 8):
        state = fed.aggregate(state, server_round, [random_reply(k, [2, 1, 3, 0, 1], server_round) for k in range(3)])
        np.testing.assert_allclose(np.linalg.norm(state["model"]["head.weight"], axis=1), 1, atol=1e-6)
        assert not state["model"]["head.bias"].any()
    assert all(np.array_equal(kept["model"][n], first[n]) for n in first)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({COUNT: np.array([3, 0, 1, 0, 0], np.int32)}, "add up"),
        ({COUNT: np.array([6, 0, -1, 0, 0], np.int32)}, "add up"),
        ({PROTO_SUM: np.full((5, WIDTH), 1.0, np.float32)}, "longer than 1"),
        ({PROTO_SUM: np.diag([4.5, 0, 2, 0, 0])[:, :1] + np.zeros((5, WIDTH), np.float32)}, "longer than 1"),
        ({PROTO_SUM: np.pad(np.diag([3.1, 0, 2, 0, 0]), ((0, 0), (0, WIDTH - 5)))}, "longer than 1"),
    ],
)
def test_replies_that_do_not_fit_are_refused(change: Arrays, reason: str) -> None:
    fed, state = strategy()
    reply = random_reply(0, [3, 0, 2, 0, 0], 1)
    assert refusal(fed, state, reply) is None
    reply.arrays.update(change)
    assert reason in (refusal(fed, state, reply) or "")


# ---- the client ------------------------------------------------------------------------------------------------------


def test_prototypes_start_orthonormal_and_alike_for_one_seed() -> None:
    model = FedNHClient.build_model(SPEC, FedNHHParams())
    w = model.head.weight.detach().double().numpy()
    np.testing.assert_allclose(w @ w.T, np.eye(5), atol=1e-6)
    assert not model.head.bias.any()
    again = FedNHClient.build_model(SPEC, FedNHHParams(scale=3))
    other = FedNHClient.build_model(dataclasses.replace(SPEC, seed=4), FedNHHParams())
    assert torch.equal(model.head.weight, again.head.weight)
    assert not torch.equal(model.head.weight, other.head.weight)


def test_building_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    FedNHClient.build_model(SPEC, FedNHHParams())
    assert torch.equal(torch.rand(3), expected)


def test_logits_are_scaled_cosines() -> None:
    model = FedNHClient.build_model(SPEC, FedNHHParams(scale=7.0))
    z = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0)).abs()
    logits = model.classify(z).detach()
    for b in range(6):
        for c in range(5):
            cosine = float(z[b] @ model.head.weight[c]) / float(z[b].norm() * model.head.weight[c].norm())
            assert float(logits[b, c]) == pytest.approx(7 * cosine, abs=1e-4)
    # The length of a representation says nothing.
    torch.testing.assert_close(model.classify(z * torch.tensor([[1e-3], [1], [10], [50], [1e4], [2]])).detach(), logits)


def test_more_classes_than_features_is_a_bad_request() -> None:
    FedNHClient.build_model(dataclasses.replace(SPEC, num_classes=64), FedNHHParams())
    with pytest.raises(BadRequest, match="64 features for 65 classes"):
        FedNHClient.build_model(dataclasses.replace(SPEC, num_classes=65), FedNHHParams())


@pytest.mark.parametrize("train_scale", [True, False])
def test_two_local_steps_are_descent_on_the_papers_loss(train_scale: bool) -> None:
    """Cross-entropy of s cos(f(x), W_c) written out, over extractor and scale; then n mu by the model that results."""
    made = client(full_batch(task(LABELS)), scale=3.0, train_scale=train_scale)
    sent = Payload(common=initial(scale=3.0))
    w, x, y = build_model("digits-a", num_classes=5, shape=(1, 8, 8), seed=0), images(made.task), made.task.y_train
    merge(w, {n: a for n, a in sent.common.items() if n != "scale"})
    scale = torch.tensor([3.0], requires_grad=True)
    prototypes = torch.from_numpy(sent.common["head.weight"])

    def directions() -> torch.Tensor:
        z = w.represent(x)
        return z / z.square().sum(dim=1, keepdim=True).sqrt()

    def loss() -> torch.Tensor:
        logits = scale * (directions() @ prototypes.T)
        return (logits.exp().sum(dim=1).log() - logits[torch.arange(len(y)), y]).mean()

    moved = [p for n, p in w.named_parameters() if n.startswith("features.")]
    steps_by_hand([*moved, scale] if train_scale else moved, loss, made.task)
    arrays, _, _ = made.train_round(sent, 1)
    np.testing.assert_allclose(arrays["scale"], scale.detach(), rtol=1e-4)
    assert (arrays["scale"][0] != 3.0) == train_scale
    for name, value in w.named_parameters():
        if name.startswith("features."):
            np.testing.assert_allclose(arrays[name], value.detach(), rtol=1e-3, atol=1e-5)
    z = directions().detach().double().numpy()
    for c in range(5):
        total = z[(y == c).numpy()].sum(axis=0)
        expected = (y == c).sum().item() * total / max(np.linalg.norm(total), 1e-9)
        np.testing.assert_allclose(arrays[PROTO_SUM][c], expected, rtol=1e-3, atol=1e-4)


def test_reply_holds_class_means_of_the_trained_model_and_no_head() -> None:
    made = client(task([0, 1, 1, 3, 3, 3, 0, 1, 3], augment="weak"))
    arrays, n, _ = made.train_round(Payload(common=initial()), 1)
    assert set(arrays) == {*made.up_names(), PROTO_SUM, COUNT}
    assert not any(name.startswith("head.") for name in arrays)
    assert arrays[COUNT].tolist() == [2, 3, 0, 4, 0] and n == 9
    assert arrays[COUNT].dtype == np.int32 and arrays[PROTO_SUM].dtype == np.float32
    with torch.no_grad():
        model = made.model.eval()
        z = model.represent(normalise(made.task.x_train.permute(0, 3, 1, 2), INPUTS)).double()
    for c in range(5):
        rows = [z[i] / z[i].norm() for i in range(9) if int(made.task.y_train[i]) == c]
        if rows:
            mean = sum(rows) / len(rows)
            expected = (len(rows) * mean / mean.norm()).numpy()
        else:
            expected = np.zeros(WIDTH)
        np.testing.assert_allclose(arrays[PROTO_SUM][c], expected, atol=1e-5)
    fed, _ = strategy()
    assert fed.check({}, Reply(0, n, arrays, {})) is None


def test_representations_of_zero_give_no_direction_and_no_nan() -> None:
    sent = Payload(common={n: np.zeros_like(a) if "fc1" in n else a for n, a in initial().items()})
    arrays, n, metrics = client().train_round(sent, 1)
    assert math.isfinite(metrics["train-loss"])
    assert not arrays[PROTO_SUM].any() and arrays[COUNT].sum() == n
    fed, state = strategy()
    after = fed.aggregate(state, 1, [Reply(0, n, arrays, {})])
    assert np.array_equal(after["model"]["head.weight"], state["model"]["head.weight"])


def test_one_sample_and_bf16_are_no_trouble() -> None:
    for job in (task([2]), task(LABELS, precision="bf16")):
        _, _, metrics = client(job).train_round(Payload(common=initial()), 1)
        assert math.isfinite(metrics["train-loss"])


def test_the_trained_model_is_a_prototype_model_and_survives(tmp_path: Path) -> None:
    first = client(folder=tmp_path)
    first.train_round(Payload(common=initial()), 1)
    again = client(folder=tmp_path)
    again.restore(2, Payload(), always=True)
    assert isinstance(again.model, PrototypeModel)
    assert torch.equal(again.model.scale, first.model.scale)  # type: ignore[arg-type]
    assert not any(p.requires_grad for p in again.model.head.parameters())


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_half_precision_on_the_wire(tmp_path: Path) -> None:
    summary = run(method="fednh", clients=2, rounds=2, out=tmp_path / "a", wire_dtype="fp16").summary
    assert summary["ok"] and summary["dropped"] == 0
