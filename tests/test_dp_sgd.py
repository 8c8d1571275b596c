"""DP-SGD: the accountant of steps on drawn images, the steps themselves, what is booked, and what is refused."""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from torch import nn

from clients.base import FedClient
from fedapp.config import from_flat
from fedapp.core.noise import seeded
from fedapp.core.privacy import Privacy, Steps, composed, epsilon_of, noise_for, noised
from fedapp.data.transforms import InputSpec
from fedapp.engines.local import RunResult
from fedapp.errors import BadRequest
from fedapp.learning import dp_sgd
from fedapp.learning.dp_sgd import NoisySteps
from fedapp.learning.releases import Ledger, Releaser
from fedapp.learning.state import ClientStore, StateError
from fedapp.learning.training import Phase, train
from fedapp.method import Reply
from fedapp.models import build_model
from fedapp.transport.traffic import RoundFailed
from strategies.fedavg import METHOD
from tests.handmade import one_batch_task, short
from tests.test_nodes import THREE, start
from tests.test_private_runs import ledgers

Tiny = Callable[..., RunResult]
SGD: dict[str, Any] = {"method": "fedavg", "dp": "sgd", "dp_epsilon": 50.0}
DELTA = 1e-5
OTHERS = ("fedavgm", "lgfedavg", "fedper")


# ---- the accountant --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("noise", "rate", "count"), [(1.0, 0.1, 20), (0.6, 0.4, 3), (2.0, 0.05, 500)])
def test_epsilon_of_steps_is_that_of_the_integrals_of_both_directions(noise: float, rate: float, count: int) -> None:
    """Oracle: the Renyi divergences of the mixture and the Gaussian by quadrature, at each whole order."""

    def mixed(x: float) -> float:
        return float(np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * noise**2)))

    def log_integral(power: float) -> float:
        large = power * (power - 1) / (2 * noise**2) if power > 1 else 0.0

        def value(x: float) -> float:
            return math.exp(power * mixed(x) - x**2 / (2 * noise**2) - large) / (noise * math.sqrt(2 * math.pi))

        center = max(0.0, power)
        found, _ = quad(
            value, -12 * noise - 2, center + 12 * noise + 2, limit=2000, points=[0.0, 1.0, center], epsabs=0
        )
        return math.log(found) + large

    found = []
    for order in range(2, 40):
        one_more, one_less = log_integral(order), log_integral(1 - order)
        assert one_less <= one_more + 1e-9
        found.append(math.log1p(-1 / order) + (count * one_more - math.log(DELTA) - math.log(order)) / (order - 1))
    assert found.index(min(found)) < len(found) - 1
    assert epsilon_of(math.inf, DELTA, [Steps(noise, rate, count)]) == pytest.approx(min(found), rel=1e-6)


def test_steps_that_draw_all_images_are_releases_like_others() -> None:
    steps = epsilon_of(math.inf, DELTA, [Steps(10.0, 1.0, 100)])
    assert steps == pytest.approx(epsilon_of(composed([10.0] * 100), DELTA), rel=1e-3)
    assert steps == pytest.approx(4.7285, rel=1e-2)
    both = epsilon_of(composed([10.0] * 40), DELTA, [Steps(10.0, 1.0, 35), Steps(10.0, 1.0, 25)])
    assert both == pytest.approx(steps, rel=1e-6)
    assert epsilon_of(3.0, DELTA, []) == epsilon_of(3.0, DELTA)


def test_drawing_fewer_images_costs_less_and_more_steps_cost_more() -> None:
    found = [epsilon_of(math.inf, DELTA, [Steps(1.0, q, 50)]) for q in (0.01, 0.1, 0.5, 1.0)]
    assert found == sorted(found) and found[0] < found[3] / 10
    assert epsilon_of(5.0, DELTA, [Steps(1.0, 0.1, 50)]) > max(found[1], epsilon_of(5.0, DELTA))
    assert epsilon_of(math.inf, DELTA, [Steps(1.0, 0.1, 51)]) > found[1]


@pytest.mark.full
@pytest.mark.parametrize(("epsilon", "rate", "count"), [(1.0, 0.05, 200), (8.0, 0.25, 40), (0.2, 1.0, 1)])
def test_noise_for_a_budget_is_the_least(epsilon: float, rate: float, count: int) -> None:
    noise = noise_for(epsilon, DELTA, count, rate)
    assert epsilon_of(math.inf, DELTA, [Steps(noise, rate, count)]) <= epsilon * (1 + 1e-6)
    assert epsilon_of(math.inf, DELTA, [Steps(noise * 0.999, rate, count)]) > epsilon


def test_a_budget_that_no_noise_keeps() -> None:
    with pytest.raises(ValueError, match="no noise gives 1000000000000 releases epsilon = 1e-06"):
        noise_for(1e-6, DELTA, 10**12)


# ---- the steps -------------------------------------------------------------------------------------------------------


def model_of(width: int = 7) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, width), nn.Linear(width, 4)
    )


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


def exact_clipped_sum(model: nn.Module, x: torch.Tensor, y: torch.Tensor, bound: float) -> np.ndarray[Any, Any]:
    """One image at a time, in float64."""
    total = 0.0
    for i in range(len(x)):
        model.zero_grad()
        loss_of(model, x[i : i + 1], y[i : i + 1]).backward()  # type: ignore[no-untyped-call]
        row = torch.cat([p.grad.flatten() for p in model.parameters()]).double().numpy()  # type: ignore[union-attr]
        total = total + row * min(1.0, bound / float(np.linalg.norm(row)))
    return np.asarray(total)


@pytest.mark.parametrize("bound", [0.3, 2.5, 1e6])
def test_a_step_is_the_noised_sum_of_clipped_gradients(bound: float) -> None:
    model, x, y = model_of(), torch.randn(6, 1, 8, 8), torch.tensor([0, 1, 2, 3, 0, 1])
    x[0] *= 30  # a gradient that is much longer than the others
    exact = exact_clipped_sum(copy.deepcopy(model), x, y, bound)
    steps = NoisySteps(0.25, 4, bound, 1.3, seeded(5))
    parameters = list(model.parameters())
    with steps.watching(model):
        loss_of(model, x, y).backward()  # type: ignore[no-untyped-call]
        steps.replace(parameters, 6, 40)
    found = torch.cat([p.grad.flatten() for p in parameters]).numpy()  # type: ignore[union-attr]
    # The same source draws the same noise; the sum differs by float32 gradients.
    known = noised(exact, bound, 1.3, seeded(5)) / (0.25 * 40)
    np.testing.assert_allclose(found, known, atol=2e-4 * min(bound, 10.0))
    noise = found - exact / 10
    assert noise.std() == pytest.approx(1.3 * bound / 10, rel=0.1)
    assert not any(hasattr(p, name) for p in parameters for name in dp_sgd.LEFT)


def test_with_almost_no_noise_and_no_clipping_a_step_over_all_is_the_plain_gradient() -> None:
    model, x, y = model_of(), torch.randn(5, 1, 8, 8), torch.tensor([0, 1, 2, 3, 0])
    loss_of(model, x, y).backward()  # type: ignore[no-untyped-call]
    plain = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    steps = NoisySteps(1.0, 1, 1e3, 1e-9, seeded(0))
    ((raw, labels, index),) = steps.batches(torch.randint(0, 9, (5, 8, 8, 1), dtype=torch.uint8), y)
    assert raw.shape == (5, 1, 8, 8) and labels.equal(y) and index.tolist() == [0, 1, 2, 3, 4]
    model.zero_grad()
    with steps.watching(model):
        loss_of(model, x, y).backward()  # type: ignore[no-untyped-call]
        steps.replace(list(model.parameters()), 5, 5)
    for p, known in zip(model.parameters(), plain):
        assert p.grad is not None and torch.allclose(p.grad, known, atol=1e-5)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_one_image_moves_the_sum_by_at_most_the_bound(size: float) -> None:
    x, y = torch.randn(8, 1, 8, 8) * size, torch.arange(8) % 4
    sums = []
    for count in (8, 7):
        model, steps = model_of(), NoisySteps(1.0, 1, 0.5, 1.0, seeded(0))
        with steps.watching(model):
            loss_of(model, x[:count], y[:count]).backward()  # type: ignore[no-untyped-call]
            sums.append(steps._clipped_sum(list(model.parameters()), count))
    assert np.linalg.norm(sums[0] - sums[1]) <= 0.5 * (1 + 1e-6)
    assert np.linalg.norm(sums[0]) > 0


def test_an_image_without_a_finite_gradient_says_nothing() -> None:
    model, x, y = model_of(), torch.randn(4, 1, 8, 8), torch.arange(4)
    whole = exact_clipped_sum(copy.deepcopy(model), x[:3], y[:3], 1.0)
    x[3] = math.inf
    steps = NoisySteps(1.0, 1, 1.0, 1.0, seeded(0))
    with steps.watching(model):
        loss_of(model, x, y).backward()  # type: ignore[no-untyped-call]
        np.testing.assert_allclose(steps._clipped_sum(list(model.parameters()), 4), whole, atol=1e-5)


def test_every_image_is_drawn_with_the_rate_and_independently_of_the_others() -> None:
    steps = NoisySteps(0.2, 500, 1.0, 1.0, seeded(3))
    drawn = np.zeros((500, 30))
    for i, (_, _, index) in enumerate(steps.batches(torch.zeros(30, 2, 2, 1, dtype=torch.uint8), torch.zeros(30))):
        drawn[i, index] = 1
    assert abs(drawn.mean() - 0.2) < 4 * math.sqrt(0.16 / drawn.size)
    assert abs(drawn.sum(1).var() / (30 * 0.16) - 1) < 0.3, "the number that is drawn varies as a binomial does"
    assert abs(np.corrcoef(drawn.T) - np.eye(30)).max() < 0.25


def test_a_step_that_draws_nothing_is_noise() -> None:
    model, steps = model_of(), NoisySteps(0.5, 2, 2.0, 3.0, seeded(1))
    steps.replace(list(model.parameters()), 0, 10)
    found = torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]
    assert float(found.std()) == pytest.approx(2.0 * 3.0 / 5, rel=0.1)
    NoisySteps(0.5, 2, 2.0, 1e-9, seeded(1)).replace(list(model.parameters()), 0, 10)
    assert all(float(p.grad.abs().max()) < 1e-6 for p in model.parameters())  # type: ignore[union-attr]


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("method", ["fedavg", *(pytest.param(m, marks=pytest.mark.full) for m in OTHERS)])
def test_a_run_books_every_training_and_spends_what_was_asked(
    method: str, tiny: Tiny, no_page: Any, replies: list[tuple[str, Reply]]
) -> None:
    found = tiny(**{**SGD, "method": method, "dp_epsilon": 3.0}, rounds=2)
    stated = found.summary["privacy"]
    assert stated["unit"] == "example" and stated["mechanism"] == "DP-SGD" and stated["releases"] == 2
    assert 2.9 < stated["epsilon"] <= 3.0 * (1 + 1e-6) and stated["noise"] is None
    booked = ledgers(found.out / "state")
    for client, entries in booked.items():
        count = next(r.num_samples for kind, r in replies if r.client == client)
        batches = max(1, math.floor(count / 64 + 0.5))
        assert [(e["what"], e["rate"], e["steps"], e["round"]) for e in entries] == [
            ("training", 1 / batches, batches, r) for r in (1, 2)
        ]
        assert len({e["noise"] for e in entries}) == 1
        spent = epsilon_of(math.inf, DELTA, [Steps(e["noise"], e["rate"], e["steps"]) for e in entries])
        assert spent == pytest.approx(3.0, rel=1e-3) and spent <= 3.0 * (1 + 1e-6)
    assert "DP-SGD in 2 rounds; each step of a client clips" in found.summary["warnings"][0]


@pytest.mark.full
def test_a_generous_budget_learns_and_a_small_one_does_not(tiny: Tiny, no_page: Any) -> None:
    values = {**SGD, "rounds": 6, "local_epochs": 2, "lr": 0.5, "momentum": 0.0, "data_fraction": 1.0}
    good, poor = (tiny(**{**values, "dp_epsilon": e}).summary["accuracy"]["trained"]["last"] for e in (100.0, 0.05))
    assert good > 0.6 and poor < 0.4


@pytest.mark.full
def test_a_seed_repeats_test_noise_and_never_real_noise(
    tiny: Tiny, no_page: Any, replies: list[tuple[str, Reply]]
) -> None:
    for test in (True, True, False, False):
        tiny(**SGD, rounds=1, clients=2, dp_test=test)
    sent = [np.concatenate([a.ravel() for a in r.arrays.values()]) for kind, r in replies if kind == "train"]
    one, two, three, four = sent[0::2]
    assert np.array_equal(one, two)
    assert not np.isclose(one, three).all() and not np.isclose(three, four).all()


@pytest.mark.parametrize(("rows", "epochs"), [(12, 0), (0, 1)])
def test_a_training_without_steps_is_not_booked(rows: int, epochs: int, tmp_path: Path) -> None:
    releaser = Releaser(Privacy("example", 5.0, DELTA, 0.0, sgd=True, rounds=2), Ledger(tmp_path / "a.jsonl"), {})
    client = FedClient(one_batch_task(), METHOD, METHOD.hparams())
    client.releaser = releaser
    assert client._private(short(local_epochs=epochs), rows) is None and not releaser.done


def test_training_for_a_score_alone_is_not_booked(tmp_path: Path) -> None:
    privacy = Privacy("example", 5.0, DELTA, 0.0, sgd=True, rounds=2, asked=4.0)
    releaser = Releaser(privacy, Ledger(tmp_path / "a.jsonl"), {})
    steps = releaser.training(5, 2, 100, booked=False)
    assert not releaser.done and not releaser.ledger.entries()
    assert steps.noise == noise_for(4.0, DELTA, 20, 0.2), "what the run asks for, where the owner allows more"
    releaser.training(5, 2, 100, booked=True)
    releaser.training(5, 2, 100, booked=True)
    assert releaser.done == 2 and releaser.spent().epsilon == pytest.approx(4.0, rel=1e-3)
    releaser.training(5, 2, 100, booked=True)
    with pytest.raises(BadRequest, match=r"would spend epsilon = .* of 5 .*3 earlier ones"):
        releaser.training(5, 2, 100, booked=True)


@pytest.mark.full
def test_the_last_training_for_scores_is_private_and_not_booked(
    tiny: Tiny, no_page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    training = Releaser.training

    def spy(self: Releaser, count: int, epochs: int, numbers: int, booked: bool) -> NoisySteps:
        seen.append(booked)
        return training(self, count, epochs, numbers, booked)

    monkeypatch.setattr(Releaser, "training", spy)
    tiny(**SGD, rounds=1, protocols="received,trained")
    assert seen == [True] * 3 + [False] * 3


def test_training_is_booked_before_it_begins(tiny: Tiny, no_page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Ledger, *args: Any) -> Any:
        raise BadRequest("the disk is full")

    monkeypatch.setattr(Ledger, "book", full)
    monkeypatch.setattr(NoisySteps, "batches", lambda *args: pytest.fail("trained"))
    with pytest.raises(RoundFailed, match="the disk is full"):
        tiny(**SGD, rounds=1)


def test_a_damaged_line_of_steps_is_not_read(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "a.jsonl")
    ledger.book(Privacy("example", 9.0, DELTA, 0.0, sgd=True), {}, Steps(2.0, 0.5, 3))
    entry = json.loads(ledger.path.read_text())
    for damage in ({"rate": 0}, {"rate": 1.5}, {"steps": 0}, {"rate": "x"}):
        ledger.path.write_text(json.dumps({**entry, **damage}) + "\n")
        with pytest.raises(BadRequest, match="cannot be read"):
            ledger.entries()


@pytest.mark.full
def test_real_nodes_send_models_and_what_they_have_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replies: list[tuple[str, Reply]]
) -> None:
    monkeypatch.setenv("FEDAPP_STATE", str(tmp_path / "state"))
    values = {"method": "lgfedavg", "dp": "sgd", "protocols": "global", "num-server-rounds": 1}
    asks = {number: {**node, "dp": "example"} for number, node in THREE.items()}
    summary, _, _ = start(tmp_path, asks, **values)
    assert summary["privacy"]["epsilon"] == pytest.approx(8.0, rel=1e-3)
    for _, reply in replies:
        assert set(reply.metrics) <= {"num-examples", "dp-epsilon", "dp-releases"}
    assert [len(v) for v in ledgers(tmp_path / "state").values()] == [1, 1, 1]


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"method": "fedprox"}, "fedprox with these method-args has no form"),
        ({"method": "fedclassavg"}, "has no form"),
        ({"method": "fedncm"}, "has no form"),
        ({"precision": "bf16"}, "computed in float32"),
        ({"class-weights": "balanced"}, "counts the samples"),
        ({"secure-sum": True, "clients": 5}, "leave secure-sum out"),
        ({"clip-update": 1.0}, "leave clip-update out"),
        ({"warm-start": True, "state-dir": "/x"}, "made without noise"),
        ({"dp-clip": 0.0}, "must be greater than 0"),
        ({"dp": "client", "clip-update": 1.0, "dp-clip": 2.0}, "dp-clip is for dp = 'sgd'"),
        ({"dp": "none", "dp-clip": 2.0}, "dp-clip is for runs with noise"),
    ],
)
def test_settings_that_break_the_statement(values: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        from_flat({"method": "fedavg", "dp": "sgd", **values})


def test_models_whose_images_have_no_gradients_of_their_own() -> None:
    resnet = build_model("resnet18", num_classes=10, shape=(3, 32, 32), seed=0)
    with pytest.raises(BadRequest, match="'resnet18' has BatchNorm"):
        dp_sgd.check(resnet, "resnet18", (3, 32, 32))

    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x.flatten(1))
            return y * y.mean()

    with pytest.raises(BadRequest, match="depends on the others in its batch"):
        dp_sgd.check(Mixes(), "own", (1, 2, 2))

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x.flatten(1), self.layer.weight, self.layer.bias)

    with pytest.raises(BadRequest, match="no gradient of a single sample"):
        dp_sgd.check(Bare(), "own", (1, 2, 2))
    before = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(8, 3))
    for layer, words in (
        (nn.InstanceNorm2d(2, affine=False, track_running_stats=True), "a buffer changes with the samples"),
        (First(), "depends on the others in its batch"),
    ):
        with pytest.raises(BadRequest, match=words):
            dp_sgd.check(nn.Sequential(before[0], layer, *before[1:]), "own", (1, 2, 2))


class First(nn.Module):
    """Says nothing of the first image of a batch, and of the others how they differ from it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x[:1]


def test_frozen_batchnorm_is_no_obstacle_and_table_rows_are_not_mixed(tiny: Tiny, no_page: Any, tmp_path: Path) -> None:
    class Frozen(nn.BatchNorm2d):
        def train(self, mode: bool = True) -> Frozen:
            return super().train(False)

    net = nn.Sequential(nn.Conv2d(1, 2, 1), Frozen(2, affine=False), nn.Flatten(), nn.Linear(8, 3))
    dp_sgd.check(net, "own", (1, 2, 2))
    down = nn.Sequential(nn.Flatten(), nn.Linear(4, 1))
    nn.init.constant_(down[1].weight, -1.0)  # type: ignore[arg-type]
    dp_sgd.check(down, "own", (1, 2, 2))
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "rows.npz", x=rng.normal(size=(300, 6)).astype(np.float32), y=np.arange(300) % 3)
    values = {**SGD, "dataset": "npz", "data_dir": str(tmp_path / "rows.npz"), "normalise": "none", "rounds": 1}
    with pytest.raises(BadRequest, match="takes values of a row from other rows"):
        tiny(**values, augment="strong")
    tiny(**values, augment="weak")


def test_a_model_is_as_it_was_after_private_training() -> None:
    """With dropout, augmentation and draws of nothing: there are two images and eight steps an epoch."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Dropout(0.5), nn.ReLU(), nn.Flatten(), nn.Linear(108, 4))
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x, y = torch.randint(0, 255, (2, 8, 8, 2), dtype=torch.uint8), torch.tensor([0, 1])
    inputs = InputSpec((2, 8, 8), 255.0, (0.5, 0.5), (0.5, 0.5))
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    report = train(
        model, x, y,
        Phase(lambda b: nn.functional.cross_entropy(model(b.x), b.y), short(local_epochs=3, augment="weak")),
        inputs, torch.Generator(), private=NoisySteps(1 / 8, 8, 1.0, 1.0, seeded(0)),
    )  # fmt: skip
    assert report.steps == 24 and 0 < report.samples < 24
    assert all(not torch.equal(a, before[n]) for n, a in model.state_dict().items())
    assert not any(m._forward_hooks or m._backward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not hasattr(model, "autograd_grad_sample_hooks") and torch.equal(torch.get_rng_state(), rng)
    copy.deepcopy(model)


@pytest.mark.parametrize(("last", "factor"), [(math.inf, 1e3), (1.0, 1e38)])  # losses of NaN, and of infinity
def test_a_loss_that_is_not_finite_says_nothing(last: float, factor: float) -> None:
    layer = nn.Linear(4, 2)
    layer.weight.data = torch.tensor([[1.0, 0, 0, 1], [-1, 0, 0, -1]]) * factor
    model = nn.Sequential(nn.Flatten(), layer)
    x, y = torch.tensor([[1.0, 2, 3, 2], [1, 1, 1, last]]), torch.tensor([0, 1])
    report = train(
        model, x[:, None], y, Phase(lambda b: nn.functional.cross_entropy(model(b.x), b.y), short(local_epochs=2)),
        InputSpec((1, 4), 1.0, (0.0,), (1.0,), kind="series"), torch.Generator(),
        private=NoisySteps(1.0, 1, 1.0, 1.0, seeded(0)),
    )  # fmt: skip
    assert math.isnan(report.loss) and report.steps == 2
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_what_was_trained_without_noise_is_no_start(tiny: Tiny, no_page: Any) -> None:
    found = tiny(method="lgfedavg", rounds=1)
    state = next((found.out / "state").rglob("*.000001.safetensors"))
    run = state.name.split(".")[0]
    assert ClientStore(state.parent, "lgfedavg", run).load(2) is not None
    with pytest.raises(StateError, match="was not made by training with dp = 'sgd'"):
        ClientStore(state.parent, "lgfedavg", run, dp="sgd").load(2)


def test_steps_and_releases_of_clients_add_up_in_one_ledger(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "a.jsonl")
    ledger.book(Privacy("client", 50.0, DELTA, 8.0), {})
    ledger.book(Privacy("example", 50.0, DELTA, 0.0, sgd=True), {}, Steps(1.5, 0.25, 12))
    ledger.book(Privacy("example", 50.0, DELTA, 5.0), {})
    both = epsilon_of(composed([4.0, 5.0]), DELTA, [Steps(1.5, 0.25, 12)])
    assert ledger.spent("example", DELTA).epsilon == both > epsilon_of(5.0, DELTA, [Steps(1.5, 0.25, 12)])
    assert math.isinf(ledger.spent("client", DELTA).epsilon)
    with pytest.raises(BadRequest, match="use dp = 'example' or 'sgd'"):
        ledger.book(Privacy("client", 50.0, DELTA, 8.0), {})


def test_noise_that_does_not_fit_the_grid_is_refused_before_it_is_booked(tmp_path: Path) -> None:
    releaser = Releaser(Privacy("example", 5.0, DELTA, 5000.0, sgd=True), Ledger(tmp_path / "a.jsonl"), {})
    with pytest.raises(BadRequest, match="needs a finer grid"):
        releaser.training(5, 1, 2_000_000, booked=True)
    assert not releaser.ledger.entries()


def test_clients_try_their_model_before_the_first_round(
    tiny: Tiny, no_page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(model: nn.Module, name: str, shape: tuple[int, ...]) -> None:
        raise BadRequest(f"{name} of {shape}")

    monkeypatch.setattr(dp_sgd, "check", refuse)
    with pytest.raises(BadRequest, match=r"client 0 cannot take part: BadRequest: digits-a of \(1, 8, 8\)"):
        tiny(**SGD, model="digits-a")


@pytest.mark.parametrize("name", ["digits-a", "digits-b", "digits-c", "cnn", "fedgh-1", "alexnet", "cnn1d"])
def test_models_that_can_be_trained(name: str) -> None:
    shape = {"cnn": (3, 32, 32), "alexnet": (3, 32, 32), "fedgh-1": (3, 32, 32), "cnn1d": (9, 128)}.get(name, (1, 8, 8))
    model = build_model(name, num_classes=10, shape=shape, seed=0)
    before = copy.deepcopy(model.state_dict())
    dp_sgd.check(model, name, shape)
    assert all(torch.equal(a, before[n]) for n, a in model.state_dict().items())


def test_without_opacus_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus.grad_sample.grad_sample_module", None)
    with pytest.raises(BadRequest, match=r"pip install 'fedapp\[dpsgd\]'"):
        dp_sgd.check(model_of(), "own", (1, 8, 8))
