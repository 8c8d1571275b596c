"""SCAFFOLD: worked numbers, Algorithm 1 with option II as oracle, momentum, sitting out, late clients, FedAvg."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clients.base import FedClient
from clients.scaffold import CONTROL, ScaffoldClient, ScaffoldHParams
from fedapp import sampling
from fedapp.config import from_flat
from fedapp.core import names
from fedapp.engines.local import RunResult
from fedapp.learning.state import ClientStore, Expected, read_safetensors
from fedapp.learning.training import TrainReport, batch_slices
from fedapp.method import BaseHParams, Payload, Reply, ServerState
from fedapp.models import selection
from fedapp.transport import checkpoint
from strategies.fedavg import METHOD as FEDAVG
from strategies.scaffold import METHOD, Scaffold
from tests.handmade import context, digit_tasks, digits_context, equal, federate, images, one_batch_task, reply

# ---- two quadratics in float64: F_1 = (x + 1)^2 / 2 and F_2 = 2 (x - 1)^2, whose sum is least at x = 0.6 -------------

CURVATURE, CENTRE = (1.0, 4.0), (-1.0, 1.0)


class Point(nn.Module):
    """A model of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1, dtype=torch.float64))


def federation(
    rounds: int, *, start: float = 0.0, steps: int = 3, lr: float = 0.1, momentum: float = 0.0,
    present: Mapping[int, Sequence[int]] | None = None, **hparams: Any,
) -> tuple[list[float], list[float], list[dict[int, float]]]:  # fmt: skip
    """x, c and the c_i after each round, by the functions of both sides."""
    settings = ScaffoldHParams(**hparams)
    strategy, task = Scaffold(METHOD, settings), one_batch_task()
    state = strategy.init(context({"x": np.array([start])}, 2))
    clients = [ScaffoldClient(task, METHOD, settings) for _ in range(2)]
    xs, cs, own = [], [], []
    for server_round in range(1, rounds + 1):
        replies = []
        for i in (present or {}).get(server_round, (0, 1)):
            client, payload = clients[i], strategy.send(state, server_round, i)
            point = client.model = Point()  # type: ignore[assignment]
            client.receive(payload)
            client.before_training(payload)
            optimizer = torch.optim.SGD(point.parameters(), lr, momentum)
            for _ in range(steps):
                optimizer.zero_grad()
                (CURVATURE[i] / 2 * (point.x - CENTRE[i]) ** 2).sum().backward()  # type: ignore[no-untyped-call]
                client.correct([point.x])
                optimizer.step()
            client.report = TrainReport(0.0, steps)
            arrays = {"x": point.x.detach().numpy(), **client.after_training(payload)[0]}
            replies.append(Reply(i, 10 * (i + 1), arrays, {}))
            assert strategy.schema(state, "train").check(replies[-1]) is None
        state = strategy.aggregate(state, server_round, iter(replies))
        xs.append(float(state["model"]["x"][0]))
        cs.append(float(state["control"]["x"][0]))
        own.append({i: float(clients[i].own.get(CONTROL + "x", np.zeros(1))[0]) for i in range(2)})
    return xs, cs, own


def test_worked_numbers() -> None:
    xs, cs, own = federation(20)
    np.testing.assert_allclose([*xs[:3], xs[-1]], [0.2565, 0.443634, 0.538447, 0.6], atol=6e-7)
    np.testing.assert_allclose(cs[:3], [-0.855, -0.623779, -0.316043], atol=6e-7)
    np.testing.assert_allclose([own[0][0], own[0][1]], [0.903333, -2.613333], atol=6e-7)


def test_without_correction_it_ends_where_fedavg_does() -> None:
    xs, _, _ = federation(40, correct=False)
    np.testing.assert_allclose([*xs[:3], xs[-1]], [0.2565, 0.377696, 0.434961, 0.486256], atol=6e-7)


def test_a_client_that_joins_in_round_2_leaves_no_offset() -> None:
    xs, cs, own = federation(30, start=1.0, present={1: (0,)})
    np.testing.assert_allclose([*xs[:3], xs[-1]], [0.458, 0.506780, 0.554715, 0.6], atol=6e-7)
    assert own[0][1] == 0 and cs[0] == pytest.approx(own[0][0] / 2), "N counts the client that sat out"


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_momentum_does_not_lengthen_the_control_variates(momentum: float) -> None:
    """Option II as written, c_i - c + (x - y) / (K eta), diverges for momentum 0.9: 2.7e16 after 50 rounds."""
    xs, cs, own = federation(50, steps=10, lr=0.01, momentum=momentum)
    assert xs[-1] == pytest.approx(0.6, abs=1e-6 if momentum == 0.9 else 2e-3)
    assert own[-1][0] == pytest.approx(1.6, abs=5e-3) and abs(cs[-1]) < 5e-3


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_c_is_the_mean_of_all_clients_control_variates_after_every_round(weights: str) -> None:
    """Also where clients sit out, and where nobody answers."""
    _, cs, own = federation(5, present={2: (1,), 3: (), 4: (0,)}, weights=weights)
    shares = {"uniform": (1 / 2, 1 / 2), "samples": (1 / 3, 2 / 3)}[weights]
    for c, found in zip(cs, own, strict=True):
        assert c == pytest.approx(sum(a * found[i] for i, a in enumerate(shares)), abs=1e-12)
    assert cs[1] != cs[0] and cs[2] == cs[1]


def test_samples_as_weights_reach_the_optimum_of_the_weighted_sum() -> None:
    """(F_1 + 2 F_2) / 3 is least at 7/9; without corrected variates it would not stay there."""
    xs, cs, _ = federation(60, weights="samples")
    assert xs[-1] == pytest.approx(7 / 9, abs=1e-6) and cs[-1] == pytest.approx(0, abs=1e-5)


def test_the_global_step_scales_the_change_of_the_mean() -> None:
    one, half = (federation(1, start=1.0, server_lr=eta)[0][0] for eta in (1.0, 0.5))
    assert half == pytest.approx((1.0 + one) / 2, abs=1e-12) and one != 1.0
    strategy = Scaffold(METHOD, ScaffoldHParams(server_lr=0.5))
    first = {"features.running_mean": np.zeros(2, np.float32), "head.weight": np.zeros(2, np.float32)}
    state = strategy.init(context(first, 1))
    assert list(state["control"]) == ["head.weight"], "statistics are not trained, so nothing corrects them"
    ones = {n: np.ones_like(a) for n, a in first.items()} | {CONTROL + "head.weight": np.ones(2, np.float32)}
    after = strategy.aggregate(state, 1, [reply(0, 5, ones)])["model"]
    assert after["features.running_mean"].tolist() == [1, 1] and after["head.weight"].tolist() == [0.5, 0.5]
    assert after["head.weight"].dtype == np.float32


def test_a_client_that_becomes_known_later_counts_from_then_on() -> None:
    strategy = Scaffold(METHOD, ScaffoldHParams())
    state = strategy.init(context({"x": np.zeros(1)}, 2))

    def answered(state: ServerState, server_round: int, **changes: float) -> ServerState:
        replies = [
            reply(int(k[1:]), 5, {"x": np.ones(1), CONTROL + "x": np.array([v])}) for k, v in sorted(changes.items())
        ]
        return strategy.aggregate(state, server_round, iter(replies))

    second = answered(state, 1, c0=3.0, c1=1.0)
    assert second["control"]["x"] == 2.0 and state["control"]["x"] == 0.0 and state["clients"] == {}
    third = answered(second, 2, c7=5.0)
    assert third["control"]["x"] == pytest.approx((3 + 1 + 5) / 3) and set(third["clients"]) == {0, 1, 7}
    assert answered(third, 3) is third


# ---- real clients ----------------------------------------------------------------------------------------------------


def by_hand(
    start: nn.Module, tasks: list[Any], rounds: int, present: Callable[[int], list[int]], corrected: bool = True
) -> tuple[nn.Module, list[Tensor], dict[int, list[Tensor]]]:
    """Algorithm 1 with option II in float64, with the clients' own batches; returns x, c and the c_i."""
    x = copy.deepcopy(start).double()
    zero = [torch.zeros_like(p) for p in x.parameters()]
    c, own = zero, {t.client: zero for t in tasks}
    for server_round in range(1, rounds + 1):
        ys, changes = [], []
        for task in (t for t in tasks if t.client in present(server_round)):
            y, c_i, steps, lr = copy.deepcopy(x), own[task.client], 0, task.train.lr
            generator = sampling.torch_generator(task.seed, "batches", server_round, task.client)
            pictures = images(task).double()
            for _ in range(task.train.local_epochs):
                order = torch.randperm(task.num_samples, generator=generator)
                for part in batch_slices(task.num_samples, task.train.batch_size):
                    loss = F.cross_entropy(y(pictures[order[part]]), task.y_train[order[part]])
                    gradients = torch.autograd.grad(loss, list(y.parameters()))
                    steps += 1
                    with torch.no_grad():
                        for p, g, mine, all_ in zip(y.parameters(), gradients, c_i, c, strict=True):
                            p -= lr * (g - mine + all_ if corrected else g)
            moved = [(a - b).detach() / (steps * lr) for a, b in zip(x.parameters(), y.parameters(), strict=True)]
            new = [a - b + d for a, b, d in zip(c_i, c, moved, strict=True)]
            changes.append([a - b for a, b in zip(new, c_i, strict=True)])
            own[task.client] = new
            ys.append(y)
        with torch.no_grad():
            for i, p in enumerate(x.parameters()):
                p.copy_(torch.stack([list(y.parameters())[i] for y in ys]).mean(dim=0))
        c = [a + sum(change[i] for change in changes) / len(tasks) for i, a in enumerate(c)]
    return x, c, own


def test_it_is_algorithm_1(tmp_path: Path) -> None:
    """Three rounds of three clients with contradicting data, two of them in the second; each has its own file."""
    tasks = digit_tasks(3, relabel=lambda client, label: (label + client) % 10, momentum=0.0, epochs=2)
    stores = {t.client: ClientStore(tmp_path / str(t.client), "scaffold", "ab") for t in tasks}

    def present(server_round: int) -> list[int]:
        return [0, 2] if server_round == 2 else [0, 1, 2]

    hparams = ScaffoldHParams()
    _, state, _ = federate(METHOD, hparams, tasks, 3, stores=stores, present=present)
    start = FedClient.build_model(tasks[0].spec(0), hparams)
    initial = digits_context(METHOD, hparams, tasks).initial
    start.load_state_dict({n: torch.from_numpy(a) for n, a in initial.items()})
    x, c, own = by_hand(start, tasks, 3, present)
    without, _, _ = by_hand(start, tasks, 3, present, corrected=False)
    far = sum(float((a - b).norm()) for a, b in zip(x.parameters(), without.parameters(), strict=True))
    assert far > 0.05, "the correction counts"
    scale = max(float(a.norm()) for a in c)
    for i, (name, p) in enumerate(x.named_parameters()):
        np.testing.assert_allclose(state["model"][name], p.detach(), atol=2e-5)
        np.testing.assert_allclose(state["control"][name], c[i], atol=1e-4 * scale)
        for task in tasks:
            stored = stores[task.client].load(4)
            assert stored is not None and stored.round == 3
            found = stored.arrays[f"own/{CONTROL}{name}"]
            np.testing.assert_allclose(found, own[task.client][i], atol=1e-4 * scale)


def test_a_reply_that_does_not_count_never_happened(tmp_path: Path) -> None:
    """In the first round, and twice in a row: c stays the mean of the c_i, and a new run begins with none."""
    tasks, hparams, known = digit_tasks(2, epochs=1), ScaffoldHParams(), {0: "", 1: ""}
    strategy = Scaffold(METHOD, hparams)
    state = strategy.init(digits_context(METHOD, hparams, tasks))
    for server_round in range(1, 5):
        replies = []
        for task in tasks:
            folder = tmp_path / "f" / str(task.client)
            store = ClientStore(folder, "scaffold", "ab", expected=Expected(known[task.client]))
            client, sent = ScaffoldClient(task, METHOD, hparams, store), strategy.send(state, server_round, 0)
            arrays, n, _ = client.train_round(sent, server_round)
            if (server_round, task.client) not in {(1, 0), (2, 1), (3, 1)}:
                known[task.client] = store.written
                replies.append(Reply(task.client, n, arrays, {}))
        state = strategy.aggregate(state, server_round, iter(replies))
    own = []
    for task in tasks:
        store = ClientStore(tmp_path / "f" / str(task.client), "scaffold", "ab", expected=Expected(known[task.client]))
        client = ScaffoldClient(task, METHOD, hparams, store)
        client.restore(5, sent)
        client.receive(sent)
        own.append(names.under(CONTROL, client.own))
        later = ScaffoldClient(task, METHOD, hparams, ClientStore(store.folder, "scaffold", "cd", warm_start=True))
        later.restore(1, sent)
        later.receive(sent)
        assert not later.own and later.stored is not None
    for name, c in state["control"].items():
        np.testing.assert_allclose(c, (own[0][name] + own[1][name]) / 2, atol=1e-6)
        assert np.abs(own[0][name] - own[1][name]).max() > 1e-4


def test_its_steps_are_plain_and_as_long_as_those_of_momentum() -> None:
    """A constant gradient g moves a model by lr g a step, and by lr g / (1 - 0.9) in the limit with momentum 0.9."""
    config = from_flat({"method": "scaffold", "dataset": "cifar10"})
    common = from_flat({"method": "fedavg", "dataset": "cifar10"})
    x, steps = nn.Parameter(torch.zeros(1, dtype=torch.float64)), []
    for of in (config, common):
        optimizer, before = torch.optim.SGD([x], of.training.lr, of.training.momentum), 0.0
        for _ in range(500):
            x.grad, before = torch.ones_like(x), float(x.detach())
            optimizer.step()
        steps.append(before - float(x.detach()))
    assert (config.training.momentum, config.training.clip) == (0, 10) and steps[0] == pytest.approx(steps[1], rel=1e-9)


@pytest.mark.parametrize("given", [{"momentum": 0.9}, {"optimizer": "adam"}, {"lr": 0.03}])
@pytest.mark.parametrize("dataset", ["cifar10", "digits"])
def test_with_steps_of_another_kind_its_rate_is_that_of_the_other_methods(dataset: str, given: dict[str, Any]) -> None:
    one, other = (from_flat({"method": m, "dataset": dataset, **given}) for m in ("scaffold", "fedavg"))
    assert (one.training.lr, one.training.optimizer) == (other.training.lr, other.training.optimizer)
    plain = from_flat({"method": "scaffold", "dataset": dataset, "momentum": 0.0})
    assert plain.training.lr == from_flat({"method": "scaffold", "dataset": dataset}).training.lr == 0.1


def test_a_training_for_a_score_alone_is_not_corrected() -> None:
    """Neither the last one, nor that of a client that took no part; a round's training is."""
    (task,) = digit_tasks(1, epochs=1, momentum=0.0)
    start = selection.everything(FedClient.build_model(task.spec(3), BaseHParams()))
    sent = Payload(common={**start, **{CONTROL + n: np.full_like(a, 0.05) for n, a in start.items()}})

    def trained(method: Any, hparams: Any, payload: Payload, train: Callable[[Any, Payload], Any]) -> dict[str, Any]:
        client = method.client(task, method, hparams)
        train(client, payload)
        return selection.everything(client.model)

    def score(client: Any, payload: Payload) -> None:
        client.evaluate_round(payload, 4, train=True)
        client.train_to_score(payload)

    def meet(client: Any, payload: Payload) -> None:
        client.meet(payload, 4, "unseen_trained@1", 1)

    plain = Payload(common=start)
    for train in (score, meet):
        assert equal(trained(METHOD, ScaffoldHParams(), sent, train), trained(FEDAVG, BaseHParams(), plain, train))
    rounds = trained(METHOD, ScaffoldHParams(), sent, lambda client, payload: client.train_round(payload, 4))
    alone = trained(FEDAVG, BaseHParams(), plain, lambda client, payload: client.train_round(payload, 4))
    assert not equal(rounds, alone)


def test_without_steps_nothing_changes() -> None:
    task = one_batch_task(model="digits-a", epochs=0)
    client = ScaffoldClient(task, METHOD, ScaffoldHParams())
    model = FedClient.build_model(task.spec(3), BaseHParams())
    arrays = selection.everything(model)
    sent = Payload(common={**arrays, **{CONTROL + n: np.ones_like(a) for n, a in arrays.items()}})
    found, _, _ = client.train_round(sent, 1)
    assert all(not a.any() for a in names.under(CONTROL, found).values()) and not client.own
    assert equal({n: found[n] for n in arrays}, arrays)
    assert client.reference.keys() == arrays.keys()


def test_a_run_keeps_c_the_mean_and_clients_keep_their_own(tiny: Callable[..., RunResult]) -> None:
    """With sampled clients; the final training of all clients leaves c_i alone."""
    result = tiny(method="scaffold", clients=4, rounds=3, fraction_train=0.5, alpha=0.3)
    found = checkpoint.latest(result.out / "checkpoint")
    assert found is not None and sorted(found[1]["clients"]) == [0, 1, 2, 3]
    folders = {c: result.out / "state" / "run" / str(c) for c in set(result.clients["client"])}
    kept = [read_safetensors(max(folder.glob("*.safetensors")))[0] for folder in folders.values()]
    for name, c in found[1]["control"].items():
        np.testing.assert_allclose(c, sum(a[f"own/{CONTROL}{name}"] for a in kept) / 4, atol=1e-6)
    assert max(float(np.abs(c).max()) for c in found[1]["control"].values()) > 1e-3
    assert (result.clients["bytes_up"] == 2 * 153_128).all() and (result.rounds["bytes_down"] == 2 * 153_128).all()


def test_what_moves_c_is_known_to_the_bound_on_updates() -> None:
    strategy = Scaffold(METHOD, ScaffoldHParams())
    state = strategy.init(context({"x": np.zeros(1)}, 1))
    found = strategy.reader.moves(state)(reply(0, 5, {"x": np.ones(1), CONTROL + "x": np.full(1, 3.0)}))
    assert found == {"x": np.full(1, 3.0)}
