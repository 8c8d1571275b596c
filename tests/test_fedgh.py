"""FedGH: class means against slow loops, header steps against autograd, the published order, and edge cases."""

from __future__ import annotations

import copy
import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import fedapp
from clients.fedgh import FedGHClient, FedGHHParams
from fedapp.core.privacy import Privacy
from fedapp.data.transforms import InputSpec
from fedapp.learning.task import Task
from fedapp.method import Payload, Reply, ServerContext, ServerState
from fedapp.models import build_model
from fedapp.reduce.reader import Policy
from fedapp.results.runs import read_run
from strategies.fedgh import METHOD, FedGH, LARs, batches
from tests import handmade
from tests.handmade import refusal, short

# Two clients with hand-made features, d = 2, three classes.
LAR_0 = ([[0.9, 0.2], [0.2, 1.0]], [0, 1])
LAR_1 = ([[0.2, 0.8], [0.6, 0.6]], [1, 2])
START_W = [[0.1, -0.1], [0.0, 0.2], [0.05, 0.05]]


def context(num_classes: int = 3, width: int = 2, w: object = START_W, seed: int = 0) -> ServerContext:
    initial = {
        "head.weight": np.array(w, np.float32).reshape(num_classes, width),
        "head.bias": np.zeros(num_classes, np.float32),
    }
    return handmade.context(initial, 0, seed, num_classes=num_classes, width=width)


def reply(client: int, lar: object, labels: object, arrival: int = 0) -> Reply:
    arrays = {"lar": np.array(lar, np.float32), "labels": np.array(labels, np.int32)}
    return Reply(client, 10, arrays, {}, arrival=arrival)


def strategy(**hparams: object) -> FedGH:
    return FedGH(METHOD, FedGHHParams(**hparams))  # type: ignore[arg-type]


def trained(replies: list[Reply], ctx: ServerContext | None = None, **hparams: object) -> ServerState:
    server = strategy(**hparams)
    return server.aggregate(server.init(ctx or context()), 1, iter(replies))


def head(state: ServerState) -> tuple[np.ndarray, np.ndarray]:
    return state["model"]["head.weight"], state["model"]["head.bias"]


# ---- worked numbers ------------------------------------------------------------------------------------------------

WORKED = [
    ("sample", (0, 1), 0.5,
     [[0.250461, -0.444199], [-0.211691, 0.527302], [0.111230, 0.066897]], [-0.157513, 0.122389, 0.035124],
     [1.083687, 1.212787, 0.647654, 1.926314]),
    ("sample", (1, 0), 0.5,
     [[0.322953, -0.364237], [-0.170144, 0.585571], [-0.002809, -0.071334]], [-0.026600, 0.219303, -0.192703],
     [0.992642, 1.449147, 1.523692, 1.053218]),
    ("client", (0, 1), 0.5,
     [[0.164873, -0.256245], [-0.073812, 0.392649], [0.058939, 0.013596]], [-0.075622, 0.115854, -0.040231],
     [1.024411, 1.119049]),
    ("client", (1, 0), 0.5,
     [[0.192736, -0.222784], [-0.070481, 0.400005], [0.027745, -0.027221]], [-0.022133, 0.126957, -0.104825],
     [1.046227, 1.093961]),
    ("all", (0, 1), 0.5,
     [[0.136287, -0.172703], [-0.032241, 0.305601], [0.045954, 0.017102]], [-0.029650, 0.070826, -0.041175],
     [1.035319]),
    ("sample", (0, 1), 0.01,
     [[0.102894, -0.105854], [-0.002613, 0.208411], [0.049719, 0.047443]], [-0.002413, 0.005603, -0.003190], None),
    ("client", (0, 1), 0.01,
     [[0.101448, -0.102913], [-0.001294, 0.204216], [0.049846, 0.048697]], [-0.001193, 0.002822, -0.001629], None),
    ("all", (0, 1), 0.01,
     [[0.100726, -0.101454], [-0.000645, 0.202112], [0.049919, 0.049342]], [-0.000593, 0.001417, -0.000824], None),
]  # fmt: skip


@pytest.mark.parametrize(("batch", "order", "lr", "w", "b", "losses"), WORKED)
def test_worked_numbers(
    batch: str, order: tuple[int, int], lr: float, w: list[list[float]], b: list[float], losses: list[float] | None
) -> None:
    both = {0: reply(0, *LAR_0, arrival=order.index(0)), 1: reply(1, *LAR_1, arrival=order.index(1))}
    state = trained([both[0], both[1]], header_batch=batch, header_lr=lr, order="arrival")
    np.testing.assert_allclose(head(state)[0], w, atol=6e-7)
    np.testing.assert_allclose(head(state)[1], b, atol=6e-7)
    if losses is not None:
        assert state["loss"][-1] == pytest.approx(np.mean(losses), abs=6e-7)


def test_one_client_alone_pushes_down_the_absent_class() -> None:
    state = trained([reply(0, *LAR_0)], header_lr=0.5)
    np.testing.assert_allclose(
        head(state)[0], [[0.353245, -0.256333], [-0.077492, 0.518482], [-0.125752, -0.112148]], atol=6e-7
    )
    np.testing.assert_allclose(head(state)[1], [0.108328, 0.187143, -0.295472], atol=6e-7)
    assert strategy().report(state, {})["classes_absent"] == {"1": [2]}


def test_no_reply_leaves_the_header() -> None:
    server = strategy(header_lr=0.5)
    start = server.init(context())
    state = server.aggregate(start, 1, iter([]))
    assert np.array_equal(head(state)[0], head(start)[0]) and np.array_equal(head(state)[1], head(start)[1])
    report = server.report(state, {})
    assert report == {"header_loss": [None], "header_moved": [0], "classes_absent": {"1": [0, 1, 2]}}


@pytest.mark.parametrize("batch", ["sample", "client", "all", 3])
def test_frozen_never_moves_and_still_says_how_good_the_header_is(batch: str | int) -> None:
    both = [reply(0, *LAR_0), reply(1, *LAR_1)]
    state = trained(both, mode="frozen", header_batch=batch, header_lr=0.5, header_epochs=3)
    assert np.array_equal(head(state)[0], np.array(START_W, np.float32)) and not head(state)[1].any()
    assert state["moved"].tolist() == [0.0]
    if batch in ("client", "all"):  # equal weights of the LARs: the mean loss of the header that nobody trained
        assert state["loss"][0] == pytest.approx(1.035319, abs=6e-7)


def test_the_record_of_the_rounds() -> None:
    """In the order of the rounds: the loss before each step, the distance of weight and bias, the covered classes."""
    server = strategy(header_lr=0.5, header_batch="all")
    first = server.aggregate(server.init(context()), 1, iter([reply(0, *LAR_0)]))
    second = server.aggregate(first, 2, iter([reply(1, *LAR_1)]))
    steps = [
        [a.astype(np.float64) - b for a, b in zip(head(t), head(s))]
        for s, t in ((server.init(context()), first), (first, second))
    ]
    expected = [sum(float((part**2).sum()) for part in step) ** 0.5 for step in steps]
    np.testing.assert_allclose(second["moved"], expected, rtol=1e-6)
    assert second["loss"].shape == (2,) and second["loss"][0] == first["loss"][0] != second["loss"][1]
    assert second["covered"].tolist() == [[True, True, False], [False, True, True]]
    assert server.report(second, {})["classes_absent"] == {"1": [2], "2": [0]}


# ---- oracle --------------------------------------------------------------------------------------------------------


def by_autograd(
    w: np.ndarray, b: np.ndarray, steps: list[tuple[np.ndarray, np.ndarray]], lr: float, clip: float
) -> tuple[np.ndarray, np.ndarray]:
    layer = torch.nn.Linear(w.shape[1], w.shape[0]).double()
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(w))
        layer.bias.copy_(torch.from_numpy(b))
    sgd = torch.optim.SGD(layer.parameters(), lr=lr)
    for r, s in steps:
        sgd.zero_grad()
        F.cross_entropy(layer(torch.from_numpy(r)), torch.from_numpy(s)).backward()
        if clip:
            norm = torch.sqrt(sum((p.grad**2).sum() for p in layer.parameters()))  # type: ignore[misc,arg-type]
            for p in layer.parameters():
                p.grad *= min(1.0, clip / float(norm))
        sgd.step()
    return layer.weight.detach().numpy(), layer.bias.detach().numpy()


@pytest.mark.parametrize("batch", ["sample", "client", "all", 4])
@pytest.mark.parametrize("clip", [0.0, 0.3, 50.0])
def test_against_autograd(batch: str | int, clip: float) -> None:
    rng = np.random.default_rng(3)
    classes, width = 7, 5
    replies, pool = [], []
    for client in range(4):
        labels = np.sort(rng.choice(classes, size=rng.integers(1, classes), replace=False))
        lar = rng.normal(size=(len(labels), width)).astype(np.float32) * 3
        mixed = rng.permutation(len(labels))
        replies.append(reply(client, lar[mixed], labels[mixed]))  # the server sorts the classes
        pool.append((lar.astype(np.float64), labels))
    ctx = context(classes, width, rng.normal(size=(classes, width)))
    steps: list[tuple[np.ndarray, np.ndarray]] = []
    for _ in range(2):
        r, s = np.concatenate([r for r, _ in pool]), np.concatenate([s for _, s in pool])
        size = {"sample": 1, "all": len(s)}.get(str(batch), 4)
        cut = [(r[i : i + size], s[i : i + size]) for i in range(0, len(s), size)]
        steps += pool if batch == "client" else cut
    state = trained(replies, ctx, header_batch=batch, header_epochs=2, order="sorted", header_lr=0.2, header_clip=clip)
    start = ctx.initial
    w, b = by_autograd(start["head.weight"].astype(float), start["head.bias"].astype(float), steps, 0.2, clip)
    np.testing.assert_allclose(head(state)[0], w, atol=1e-6)
    np.testing.assert_allclose(head(state)[1], b, atol=1e-6)


def test_a_huge_lar_moves_the_header_by_no_more_than_the_clip() -> None:
    state = trained([reply(0, [[1e30, -1e30]], [2])], header_lr=0.1, header_clip=50.0)
    assert np.isfinite(head(state)[0]).all()
    assert state["moved"][0] == pytest.approx(0.1 * 50.0, rel=1e-6)


# ---- order ---------------------------------------------------------------------------------------------------------


def test_the_shuffle_is_a_function_of_seed_and_round() -> None:
    def run(seed: int, server_round: int) -> np.ndarray:
        server = strategy(header_lr=0.5)
        many = [reply(i, [[1.0 + i, -i], [i, 0.5]], [i % 3, (i + 1) % 3]) for i in range(6)]
        return head(server.aggregate(server.init(context(seed=seed)), server_round, iter(many)))[0]

    assert np.array_equal(run(1, 1), run(1, 1))
    assert len({run(seed, server_round).tobytes() for seed in (1, 2) for server_round in (1, 2, 3)}) == 6


def test_order_arrival_takes_the_clients_as_their_replies_arrived() -> None:
    server = strategy(header_lr=0.5, order="arrival")
    start = server.init(context())
    one, two = reply(0, *LAR_0, arrival=1), reply(1, *LAR_1, arrival=0)
    assert refusal(server, start, two) is None and refusal(server, start, one) is None
    state = server.aggregate(start, 1, iter([one, two]))
    np.testing.assert_allclose(head(state)[0][0], [0.322953, -0.364237], atol=6e-7)


@pytest.mark.parametrize("order", ["shuffled", "sorted"])
def test_arrival_does_not_matter_otherwise(order: str) -> None:
    a = trained([reply(0, *LAR_0, arrival=5), reply(1, *LAR_1, arrival=2)], order=order)
    b = trained([reply(0, *LAR_0, arrival=1), reply(1, *LAR_1, arrival=2)], order=order)
    assert np.array_equal(head(a)[0], head(b)[0])


@pytest.mark.parametrize("batch", ["sample", "client", "all", 3, 100])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_lar_is_used_once_a_pass(batch: str | int, shuffle: bool) -> None:
    lars = [LARs(np.full((k, 2), 10.0 * k) + np.arange(k)[:, None], np.arange(k)) for k in (1, 4, 2)]
    rng = np.random.default_rng(0) if shuffle else None
    got = list(batches(lars, batch, rng))
    assert sorted(r for step, _ in got for r in step[:, 0]) == sorted(r for x in lars for r in x.r[:, 0])
    sizes = {"sample": [1] * 7, "client": [1, 4, 2], "all": [7], "3": [3, 3, 1], "100": [7]}[str(batch)]
    assert sorted(len(s) for _, s in got) == sorted(sizes)
    for r, s in got:  # rows and labels stay together
        assert np.array_equal(r[:, 0] % 10, s)


# ---- invariants ----------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), batch=st.sampled_from(["sample", "client", "all", 2]), classes=st.integers(2, 6))
def test_column_sums_of_the_header_are_kept(seed: int, batch: str | int, classes: int) -> None:
    """Each gradient's rows sum to zero over the classes (sum_c p_c - e_sc = 0), clipped or not."""
    rng = np.random.default_rng(seed)
    replies = [
        reply(i, rng.normal(size=(classes, 3)) * 2, rng.permutation(classes)) for i in range(int(rng.integers(1, 4)))
    ]
    ctx = context(classes, 3, rng.normal(size=(classes, 3)))
    state = trained(replies, ctx, header_batch=batch, header_lr=0.3, header_clip=1.0, header_epochs=2)
    np.testing.assert_allclose(head(state)[0].sum(0), ctx.initial["head.weight"].sum(0), atol=3e-6)
    assert abs(float(head(state)[1].sum())) < 3e-6


def test_lars_are_not_weighted_by_samples() -> None:
    many, few = reply(0, *LAR_0), reply(0, *LAR_0)
    many = dataclasses.replace(many, num_samples=5000)
    assert np.array_equal(head(trained([many, reply(1, *LAR_1)]))[0], head(trained([few, reply(1, *LAR_1)]))[0])


# ---- replies -------------------------------------------------------------------------------------------------------


def test_a_reply_without_classes_is_fine_and_skipped() -> None:
    server = strategy(header_lr=0.5)
    start = server.init(context())
    empty = reply(2, np.zeros((0, 2)), np.zeros(0))
    assert refusal(server, {}, empty) is None
    with_it = server.aggregate(start, 1, iter([reply(0, *LAR_0), empty]))
    alone = server.aggregate(start, 1, iter([reply(0, *LAR_0)]))
    assert np.array_equal(head(with_it)[0], head(alone)[0])
    assert np.isnan(server.aggregate(start, 1, iter([empty]))["loss"][0])


# ---- the client ----------------------------------------------------------------------------------------------------


def task(y: list[int], classes: int = 4, seed: int = 0) -> Task:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 17, (len(y), 8, 8, 1), dtype=torch.uint8, generator=generator)
    labels = torch.tensor(y, dtype=torch.int64)
    return Task(
        client=3, seed=0, num_classes=classes, inputs=InputSpec((1, 8, 8), 16.0, (0.3,), (0.4,)), model="digits-b",
        x_train=x, y_train=labels, x_test=x[:2], y_test=labels[:2], train=short(local_epochs=1, batch_size=4, lr=0.05),
    )  # fmt: skip


def head_payload(classes: int = 4) -> Payload:
    model = build_model("digits-b", num_classes=classes, shape=(1, 8, 8), seed=9)
    return Payload(common={n: a.numpy().copy() for n, a in model.state_dict().items() if n.startswith("head.")})


def client(y: list[int], **hparams: object) -> FedGHClient:
    return FedGHClient(task(y), METHOD, FedGHHParams(**hparams))  # type: ignore[arg-type]


def test_class_means_against_a_slow_loop() -> None:
    y = [2, 0, 2, 3, 3, 3, 2, 0, 2]
    one = client(y)
    arrays, n, _ = one.train_round(head_payload(), 1)
    assert sorted(arrays) == ["labels", "lar"] and n == 9
    assert arrays["labels"].tolist() == [0, 2, 3] and arrays["labels"].dtype == np.int32
    assert arrays["lar"].dtype == np.float32 and arrays["lar"].shape == (3, 64)
    z = one.representations().numpy().astype(np.float64)
    for row, label in zip(arrays["lar"], arrays["labels"], strict=True):
        members = [z[i] for i in range(len(y)) if y[i] == label]
        np.testing.assert_allclose(row, sum(members) / len(members), rtol=1e-6, atol=1e-7)
    assert (arrays["lar"] >= 0).all()  # after the last ReLU


def test_a_round_is_sgd_on_the_received_header_and_its_means_are_those_of_the_trained_extractor() -> None:
    """Eq. 5, 6 and 3 by hand: three steps of SGD, then class means of the images by a loop, all in float64."""
    data, sent = handmade.one_batch_task(), handmade.model_like(handmade.one_batch_task())
    x, y = handmade.pixels(data), data.y_train
    one = FedGHClient(data, METHOD, FedGHHParams())
    one.restore(1, handmade.head_of(sent))
    start = copy.deepcopy(one.model)
    start.head.load_state_dict(sent.head.state_dict())
    model = handmade.descend(start, lambda model: handmade.cross_entropy(model(x), y), data)
    arrays, n, metrics = FedGHClient(data, METHOD, FedGHHParams()).train_round(handmade.head_of(sent), 1)
    assert n == 12 and metrics["steps"] == 3 and arrays["labels"].tolist() == [0, 1, 2, 3]
    z = model.features(x).detach().clamp_min(0)
    for label, row in enumerate(arrays["lar"]):
        np.testing.assert_allclose(row, sum(z[i] for i in range(12) if y[i] == label).numpy() / 3, atol=1e-5)


def test_class_means_do_not_depend_on_how_many_images_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    y = list(np.random.default_rng(0).integers(0, 4, 50))
    whole = client(y).train_round(head_payload(), 1)[0]
    monkeypatch.setattr(FedGHClient, "block", 7)
    parts = client(y).train_round(head_payload(), 1)[0]
    np.testing.assert_allclose(whole["lar"], parts["lar"], rtol=1e-6, atol=1e-7)


def test_single_sample_classes() -> None:
    y = [0, 0, 1, 2, 2, 2]
    one = client(y)
    arrays, _, _ = one.train_round(head_payload(), 1)
    assert arrays["labels"].tolist() == [0, 1, 2]
    np.testing.assert_allclose(arrays["lar"][1], one.representations()[2].numpy(), rtol=1e-6)
    few = client(y, min_class_count=2).train_round(head_payload(), 1)[0]
    assert few["labels"].tolist() == [0, 2] and np.array_equal(few["lar"], arrays["lar"][[0, 2]])
    none = client(y, min_class_count=9).train_round(head_payload(), 1)[0]
    assert none["lar"].shape == (0, 64) and none["labels"].shape == (0,)


@pytest.mark.parametrize(
    ("classes", "own", "total"), [(10, 2, 24_048), (100, 10, 220_440)], ids=["cifar10", "cifar100"]
)
def test_bytes_of_the_paper(classes: int, own: int, total: int) -> None:
    server = strategy()
    down = server.send(server.init(context(classes, 500, np.zeros((classes, 500)))), 1, 0).nbytes
    up = sum(a.nbytes for a in reply(0, np.zeros((own, 500)), np.arange(own)).arrays.values())
    assert up + down == total


# ---- whole runs ----------------------------------------------------------------------------------------------------


def run(out: Path, args: str = "", **settings: object) -> fedapp.RunResult:
    values: dict[str, object] = {"clients": 4, "rounds": 2, "local_epochs": 1, "partition": "classes", **settings}
    return fedapp.run(method="fedgh", method_args=args, dataset="digits", data_fraction=0.3, out=out, **values)


def test_heterogeneous_extractors_partial_participation_and_covered_classes(tmp_path: Path) -> None:
    result = run(tmp_path / "a", model="digits-a,digits-b,digits-c", fraction_train=0.5)
    summary = result.summary
    assert summary["bytes_down"] == (64 * 10 + 10) * 4
    assert summary["bytes_up"] == 2 * 64 * 4 + 2 * 4  # two classes a client
    assert all(m > 0 for m in summary["header_moved"])
    assert set(summary["classes_absent"]) == {"1", "2"}  # two clients of two classes cover four of ten at most
    assert all(len(c) >= 6 for c in summary["classes_absent"].values())


def test_a_run_in_which_no_class_is_large_enough_to_be_sent(tmp_path: Path) -> None:
    result = run(tmp_path / "a", "min_class_count=1000")
    assert result.summary["bytes_up"] == 0 and result.summary["dropped"] == 0
    assert result.summary["header_moved"] == [0, 0] and result.summary["header_loss"] == [None, None]


def test_a_number_as_batch_is_a_number() -> None:
    from fedapp.registry import parse_args

    assert parse_args(METHOD, "header_batch=16").header_batch == 16  # type: ignore[attr-defined]


@pytest.mark.full
def test_the_time_of_extracting_the_lars_is_reported_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The passes for the LARs count, the training does not; `clients.csv` has a column for it."""
    true = FedGHClient.representations, FedGHClient.run_phases

    def slow(index: int, seconds: float) -> Any:
        return lambda self, *given: (time.sleep(seconds), true[index](self, *given))[1]

    monkeypatch.setattr(FedGHClient, "representations", slow(0, 0.02))
    monkeypatch.setattr(FedGHClient, "run_phases", slow(1, 0.5))
    fedapp.run(
        dataset="digits", data_fraction=0.3, clients=2, rounds=1, local_epochs=1, method="fedgh", out=tmp_path / "run"
    )
    table = read_run(tmp_path / "run").clients
    assert (table["lar_seconds"] >= 0.02).all()
    assert (table["client_seconds"] > table["lar_seconds"] + 0.5).all()


def test_noised_sums_of_all_clients_make_one_mean_per_class() -> None:
    def noised(client: int, count: object, total: object) -> Reply:
        arrays = {"noised/count": np.array(count, float), "noised/sum": np.array(total, float)}
        return Reply(client, 10, arrays, {})

    sums = [noised(0, [4, 1, 5], [[1, 0], [0, 1], [2, 2]]), noised(1, [6, 3, 5], [[3, 2], [2, 1], [0, 2]])]
    made = strategy()
    made.context = context()
    made.policy = Policy(privacy=Privacy("example", 1.0, 1e-5, 1e-9))
    (found,) = made.reader.reduce("train", sums, {}).rows("lar")
    np.testing.assert_allclose(found.rows, [[0.4, 0.2], [0.5, 0.5], [0.2, 0.4]], atol=1e-6)
    assert found.labels.tolist() == [0, 1, 2] and made.reader.reduce("train", [], {}).rows("lar") == []
