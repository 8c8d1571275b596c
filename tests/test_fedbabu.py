"""FedBABU: worked numbers, FedAvg under a frozen head, the head's bytes, fine-tuning and its score in every table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from clients._checks import check_training
from clients.base import FedClient
from clients.fedbabu import FedBABUClient, FedBABUHParams
from fedapp import load, registry
from fedapp.cli import app
from fedapp.engines.local import RunResult
from fedapp.errors import BadRequest, counted
from fedapp.learning.state import read_safetensors
from fedapp.learning.task import ModelSpec
from fedapp.learning.training import Phase, train
from fedapp.method import ALL, BaseHParams, Payload
from fedapp.models import SplitModel, selection
from fedapp.results import report
from fedapp.results.runs import TUNED_PAIRS
from strategies.base import Strategy
from strategies.fedavg import METHOD as FEDAVG
from strategies.fedbabu import METHOD, FedBABU
from tests.handmade import (
    context,
    deterministic,
    digit_tasks,
    equal,
    federate,
    on_toy,
    random_model,
    reply,
    toy_model,
    toy_task,
)

TASK = digit_tasks(1, epochs=1)[0]


def client(task: Any = TASK, **hparams: Any) -> FedBABUClient:
    return FedBABUClient(task, METHOD, FedBABUHParams(**hparams))


def sent(task: Any = TASK) -> Payload:
    return Payload(common=selection.everything(FedBABUClient.build_model(task.spec(9), FedBABUHParams())))


def test_worked_numbers() -> None:
    made = on_toy(FedBABUClient)(toy_task(), METHOD, FedBABUHParams())
    found, _, _ = made.train_round(Payload(common=selection.everything(toy_model())), 1)
    ((name, body),) = found.items()
    assert name.startswith("features.")
    np.testing.assert_allclose(body, [[1.036512, 0.443357], [-0.546591, 1.068835]], atol=6e-7)
    loss = made.cross_entropy(made.model(made.task.x_train.double()), made.task.y_train)
    assert float(loss.detach()) == pytest.approx(0.819420, abs=6e-7)
    np.testing.assert_array_equal(made.model.head.weight.detach(), toy_model().head.weight.detach())


def test_the_server_averages_bodies_and_leaves_the_head() -> None:
    start = random_model(np.random.default_rng(0))
    bodies = [{"features.weight": random_model(np.random.default_rng(k))["features.weight"]} for k in (1, 2)]
    for weights, shares in (("samples", (0.25, 0.75)), ("uniform", (0.5, 0.5))):
        strategy = FedBABU(METHOD, FedBABUHParams(weights=weights))
        state = strategy.init(context(start, 3))
        after = strategy.aggregate(state, 1, iter([reply(0, 10, bodies[0]), reply(2, 30, bodies[1])]))["model"]
        expected = sum(a * b["features.weight"].astype(np.float64) for a, b in zip(shares, bodies, strict=True))
        np.testing.assert_allclose(after["features.weight"], expected, atol=1e-6)
        assert all(after[n] is start[n] for n in ("head.weight", "head.bias"))
        assert equal(strategy.aggregate(state, 1, iter([]))["model"], start)


class Frozen(FedClient):
    """Trains as FedAvg does, a model whose head takes no gradients."""

    @classmethod
    def build_model(cls, spec: ModelSpec, hparams: Any) -> SplitModel:
        model = super().build_model(spec, hparams)
        model.head.requires_grad_(False)
        return model


def test_it_is_fedavg_on_a_model_with_a_frozen_head_bit_for_bit() -> None:
    tasks = digit_tasks(3, epochs=1)

    def present(server_round: int) -> list[int]:
        return [0, 2] if server_round == 2 else [0, 1, 2]

    frozen = federate(dataclasses.replace(FEDAVG, client=Frozen), BaseHParams(), tasks, 3, present=present)[1]
    found = federate(METHOD, FedBABUHParams(), tasks, 3, present=present)[1]
    assert equal(found["model"], frozen["model"])
    start = FedBABU(METHOD, FedBABUHParams()).init(context(sent().common))["model"]
    assert start.keys() == found["model"].keys()


class Whole(FedBABUClient):
    """Trains all, as FedAvg does."""

    phases = FedClient.phases


def test_with_all_trained_and_sent_it_is_fedavg_bit_for_bit() -> None:
    class Server(FedBABU):
        update = Strategy.update

    tasks = digit_tasks(3, epochs=1)
    whole = dataclasses.replace(METHOD, client=Whole, strategy=Server, up=ALL, reduces=None)
    plain = federate(FEDAVG, BaseHParams(), tasks, 2)[1]
    assert equal(federate(whole, FedBABUHParams(), tasks, 2)[1]["model"], plain["model"])
    assert not equal(federate(METHOD, FedBABUHParams(), tasks, 2)[1]["model"], plain["model"])


@pytest.mark.parametrize("tune", ["full", "head", "body"])
def test_fine_tuning_trains_a_copy_of_what_was_received(tune: str) -> None:
    made = client(tune=tune, tune_epochs=2)
    payload = sent()
    received = made.evaluate_round(payload, 4, train=True)
    metrics = made.tune_to_score()
    now = selection.everything(made.model)
    assert equal(now, payload.common), "the model is as received again"
    moved = {n for n, a in selection.everything(made.tuned).items() if not np.array_equal(a, now[n])}
    parts = {"full": ("features.", "head."), "head": ("head.",), "body": ("features.",)}[tune]
    assert moved == {n for n in now if n.startswith(parts)} and all(p.requires_grad for p in made.tuned.parameters())
    # The same steps with the training loop itself, on batches drawn for this purpose alone.
    model = FedBABUClient.build_model(TASK.spec(9), FedBABUHParams())
    kept = [p for n, p in model.named_parameters() if n.startswith(parts)]
    spec = TASK.train.replaced(local_epochs=2, lr=0.05 / 100)
    phase = Phase(lambda b: made.cross_entropy(model(b.x), b.y), spec, parameters=lambda: kept)
    train(model, TASK.x_train, TASK.y_train, phase, TASK.inputs, made.generator("tune"))
    found, wanted = selection.everything(made.tuned), selection.everything(model)
    for name in found:  # a head alone is trained on representations that were computed once, in larger batches
        np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=1e-7 if tune == "head" else 0, err_msg=name)
    assert metrics["tuned-loss-sum"] != received["received-loss-sum"] and metrics["tuned-total"] == 40


def test_fine_tuning_has_a_hundredth_of_the_rate_of_training_whatever_the_schedule() -> None:
    """The authors train with 0.1, which becomes 0.001 at the end, and fine-tune with 0.001 and the same momentum."""
    scheduled = TASK.train.replaced(lr=0.1, lr_schedule_steps="OneCycleLR max_lr=1")
    made = client(dataclasses.replace(TASK, train=scheduled, rates=(0.1, 0.01, 0.001)))
    made.round = 3
    for hparams, rate in (({}, 0.001), ({"tune_lr": 0.02}, 0.02)):
        made.hparams = FedBABUHParams(**hparams)
        (phase,) = made.tuning()
        assert phase.rate == pytest.approx(rate) and not phase.spec.lr_schedule_steps
        assert (phase.spec.local_epochs, phase.spec.momentum) == (5, 0.9) and made.rate == 0.001


def test_without_epochs_of_tuning_the_score_is_that_of_received() -> None:
    made = client(tune_epochs=0)
    received = made.evaluate_round(sent(), 4, train=True)
    assert made.tune_to_score() == {k.replace("received", "tuned"): v for k, v in received.items()}
    assert not FedClient.tunes() and FedBABUClient.tunes()


@pytest.mark.parametrize("wild", [[1], [0, 1, 2]])
def test_a_fine_tuning_that_diverges_costs_its_own_score_alone(
    wild: list[int], tiny: Callable[..., RunResult], monkeypatch: pytest.MonkeyPatch, no_page: Any
) -> None:
    """Also where every reply is needed: nothing else depends on that score."""

    def tuning(self: FedBABUClient, original: Any = FedBABUClient.tuning) -> Any:
        def loss(batch: Any) -> torch.Tensor:
            return self.step_loss(batch) * (float("nan") if self.task.client in wild else 1.0)

        return [dataclasses.replace(phase, loss=loss) for phase in original(self)]

    monkeypatch.setattr(FedBABUClient, "tuning", tuning)
    result = tiny(method="fedbabu", rounds=1, min_replies=1.0)
    assert result.summary["dropped"] == 0 and list(result.final["client"]) == [0, 1, 2]
    assert list(result.final["tuned_accuracy"].isna()) == [c in wild for c in range(3)]
    assert not result.final[["received_accuracy", "trained_accuracy"]].isna().any(axis=None)
    (warning,) = result.summary["warnings"]
    assert f"no score 'tuned' of {counted(len(wild), 'client')} ({', '.join(map(str, wild))})" in warning
    headline = result.summary["headline"]
    assert (headline["score"], headline["clients"], headline["of"]) == ("tuned", 3 - len(wild), 3)
    assert (headline["value"] is None) == (len(wild) == 3)
    assert load(result.out, client=1, point="received") is not None
    with pytest.raises(BadRequest, match="has not kept"):
        load(result.out, client=1, point="tuned")


@pytest.mark.parametrize("text", ["fedbabu", "fedpac", "fedrep", "pfedfda", "fednh train_scale=false"])
def test_a_body_that_is_frozen_as_a_whole_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, hparams = registry.configured(*text.partition(" ")[::2])
    model = method.client.build_model(TASK.spec(0), hparams)
    model.features.requires_grad_(False)
    monkeypatch.setattr("clients.base.skeleton", lambda *_: model)
    with pytest.raises(BadRequest, match="freeze fewer layers"):
        check_training(method.client(TASK, method, hparams))


@pytest.mark.usefixtures("no_figures")
def test_a_run_has_the_score_in_every_table_and_keeps_the_tuned_models(tiny: Callable[..., RunResult]) -> None:
    """With sampled clients. The head never moves, and tuning changes no other number of the run."""
    settings = {"method": "fedbabu", "clients": 4, "fraction_train": 0.5, "metrics": "accuracy,ece"}
    result, without = tiny(**settings), tiny(**settings, method_args="tune_epochs=0")
    for name in ("rounds", "clients"):
        assert deterministic(getattr(result, name)).equals(deterministic(getattr(without, name)))
        assert not [c for c in getattr(result, name) if c.startswith("tuned")]
    others = [c for c in deterministic(result.final) if not c.startswith("tuned")]
    assert result.final[others].equals(without.final[others])
    assert (without.final["tuned_loss"] == without.final["received_loss"]).all()
    assert (result.final["tuned_loss"] != result.final["received_loss"]).all()
    headline, tuned = result.summary["headline"], float(result.final["tuned_accuracy"].mean())
    assert headline["score"] == "tuned" and headline["value"] == result.score("tuned") == tuned
    assert "fine-tuning" in headline["point"] and headline["clients"] == 4
    assert result.summary["metrics"]["tuned"]["ece"]["mean"] == pytest.approx(result.final["tuned_ece"].mean())
    assert result.protocols == ("received", "trained", "tuned", "global") and len(result.curve("tuned")) == 0
    last, _ = read_safetensors(result.out / "models" / "last.safetensors")
    other, _ = read_safetensors(tiny(method="fedavg", clients=4, rounds=1).out / "models" / "last.safetensors")
    assert result.rounds["bytes_up"].iloc[0] == 4 * 37_632 and result.rounds["bytes_down"].iloc[0] == 4 * 38_282
    assert other.keys() == last.keys()
    models = [load(result.out, client=1, point=point) for point in ("received", "tuned")]  # type: ignore[arg-type]
    assert torch.equal(models[0].model.head.weight, torch.from_numpy(last["head.weight"]))
    assert not torch.equal(models[1].model.head.weight, models[0].model.head.weight)
    assert "After fine-tuning" in report.write(result.out).read_text()
    with pytest.raises(BadRequest, match="do not fine-tune"):
        load(tiny(method="fedavg", keep_models=False).out, client=0, point="tuned")


@pytest.mark.full
@pytest.mark.usefixtures("in_turn", "no_figures")
def test_a_comparison_has_a_column_for_it(tmp_path: Any) -> None:
    words = ("--methods", "fedavg,fedbabu", "--reference", "fedavg", "--clients", "3", "--rounds", "1", "--seeds", "2",
             "--set", "local-epochs=1", "--set", "batch-size=64", "--out", str(tmp_path / "c"))  # fmt: skip
    result = CliRunner().invoke(app, ["compare", *words])
    assert result.exit_code == 0, result.output
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "c"), "--all"]).stdout
    assert "tuned: received, then fine-tuned" in shown
    assert "tuned_last" in (tmp_path / "c" / "results.csv").read_text().splitlines()[0]
    tests = pd.read_csv(tmp_path / "c" / "significance.csv").set_index(["variant", "measure"])
    runs = (tmp_path / "c" / "runs").glob
    tuned, trained = (
        np.mean([pd.read_csv(p / "final.csv")[column].mean() for p in runs(f"{method}-s*")])
        for method, column in (("fedbabu", "tuned_accuracy"), ("fedavg", "trained_accuracy"))
    )
    assert tests.loc[("fedbabu", "tuned_accuracy"), "mean_difference"] == pytest.approx(tuned - trained)
    assert TUNED_PAIRS in shown
    assert "a reference that does not fine-tune" in (tmp_path / "c" / "report.html").read_text()
