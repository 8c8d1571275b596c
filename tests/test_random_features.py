"""Random Fourier features of standardised features: worked numbers, exact heads, every method, nodes, files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from clients import _checks
from clients.base import FedClient
from fedapp import load
from fedapp.client_app import Handlers
from fedapp.config import for_nodes, from_flat
from fedapp.core import fourier
from fedapp.data.moments import feature_sums
from fedapp.data.transforms import InputSpec
from fedapp.errors import BadRequest
from fedapp.learning.state import read_safetensors
from fedapp.method import Payload, Reply
from fedapp.models import frozen
from fedapp.reduce.scaling import MOMENTS, moments_from
from fedapp.results import exporting, predict
from fedapp.results.runs import RunResult
from fedapp.settings import ModelSettings
from fedapp.transport.request import RoundRequest
from tests.test_exact_sums import head, written
from tests.test_given_features import features, training
from tests.test_nodes import start

Tiny = Callable[..., RunResult]
ARGS = "random-features=60 gamma=0.6 seed=11"


def test_the_directions_are_the_worked_numbers() -> None:
    w, u = fourier.directions(384, 2000, 0.6, 11)
    assert fourier.digest(w) == "9dcf1c28c044a6f9eedf32cccdc80eb30867e3bc90acaf1313289c8b21886c76"
    np.testing.assert_allclose(w[0, :3], [0.00479853, -0.00225461, -0.00947315], atol=5e-9)
    np.testing.assert_allclose(u[:2], [0.48436845, 0.47236676], atol=5e-9)
    assert w.std() * 2 * np.pi * 384**0.5 == pytest.approx(0.6, rel=1e-3)


def test_the_cosine_is_that_of_numpy() -> None:
    turns = torch.linspace(-40, 40, 100_001, dtype=torch.float64)
    wanted = np.cos(2 * np.pi * (turns - turns.round()).numpy())
    np.testing.assert_allclose(fourier.cosine(turns).numpy(), wanted, rtol=0, atol=5e-16)


def test_the_stated_largest_feature_is_reached_and_not_exceeded() -> None:
    args = frozen.of("identity", ModelSettings(model_args=ARGS))
    ((_, layer),) = frozen.stages("identity", (1,), ModelSettings(model_args=ARGS))
    largest = float(layer(torch.linspace(-500, 500, 200_001)[:, None]).abs().max())
    assert largest == args.largest


@pytest.mark.full
@pytest.mark.parametrize("method", ["fed3r", "lda", "fedncm"])
def test_a_head_on_them_has_the_same_bits_for_every_division(method: str, tmp_path: Path, tiny: Tiny) -> None:
    def go(clients: int, seed: int = 0, **more: Any) -> RunResult:
        place = written(tmp_path / f"{clients}-{seed}.npz", "plain", clients, seed)
        given = {"dataset": "npz", "clients": 0, "data_dir": str(place), "method": method, "min_samples": 1}
        return tiny(**given, model_args=ARGS, **more)

    whole = go(1)
    wanted, stored = head(whole)
    assert stored["head.weight"].shape == (5, 60)
    for clients, seed in ((1, 1), (20, 0), (20, 1), (100, 0)):
        assert head(go(clients, seed))[0] == wanted, (clients, seed)
    assert head(go(20, secure_sum=True))[0] == wanted


@pytest.mark.full
def test_the_head_is_the_ridge_regression_on_the_features_of_all_rows(tmp_path: Path, tiny: Tiny) -> None:
    place = features(tmp_path / "f.npz")
    run = tiny(dataset="npz", clients=0, data_dir=str(place), method="fed3r", model_args=ARGS)
    x, y = training(place)
    with np.load(place) as arrays:
        test, labels = arrays["x"][arrays["split"] == "test"].astype(np.float64), arrays["y"][arrays["split"] == "test"]
    w, u = fourier.directions(12, 60, 0.6, 11)

    def described(rows: np.ndarray) -> np.ndarray:
        z = (rows - x.mean(axis=0)) / x.std(axis=0)
        return np.column_stack([(2 / 60) ** 0.5 * np.cos(2 * np.pi * (z @ w + u)), np.ones(len(z))])

    h, lam = described(x), run.summary["calibration"]["lam"]
    wanted = np.linalg.solve(h.T @ h + lam * np.eye(61), h.T @ np.eye(4)[y]).T
    stored, _ = read_safetensors(run.out / "models" / "last.safetensors")
    assert sorted(stored) == ["head.bias", "head.weight"], "neither W nor a mean is stored among the arrays"
    rows = np.column_stack([stored["head.weight"], stored["head.bias"]]) / run.summary["calibration"]["scale"]
    np.testing.assert_allclose(rows, wanted, atol=2e-3 * np.abs(wanted).max())
    right = (described(test) @ wanted.T).argmax(axis=1)
    assert run.summary["accuracy"]["global"]["last"] == pytest.approx((right == labels).mean(), abs=0.02)
    net = load(run.out)
    probabilities = net.predict(test.astype(np.float32))
    assert (probabilities.argmax(axis=1) == right).mean() > 0.98
    kept = predict.read_model(run.out / "models" / "clients" / "0" / "personal.safetensors")
    np.testing.assert_allclose(kept.predict(test.astype(np.float32)), probabilities, atol=1e-6)
    for to in exporting.FORMATS:
        assert exporting.write(net, to, tmp_path / f"net.{to}") < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("method", ["fedavg", "lgfedavg", "ditto", "fedgh", "ifca", "local", "fed3r(base=fedavg)"])
def test_gradient_heads_are_trained_on_them(method: str, tmp_path: Path, tiny: Tiny) -> None:
    common: dict[str, Any] = {"dataset": "npz", "clients": 0, "data_dir": str(features(tmp_path / "f.npz"))}
    run = tiny(method=method, model_args=ARGS, rounds=3, lr=1, batch_size=16, local_epochs=5, **common)
    assert run.summary["accuracy"]["trained"]["last"] > 2 * 0.25, "chance is 0.25"
    assert load(run.out, client=1).predict(np.zeros((1, 12), np.float32)).shape == (1, 4)


def test_a_run_standardises_by_an_exchange_as_a_simulation_does_by_itself(tmp_path: Path, tiny: Tiny) -> None:
    place = features(tmp_path / "f.npz")
    with np.load(place) as arrays:
        columns = dict(arrays)
    columns["x"] = columns["x"] * np.arange(1, 13, dtype=np.float32) + 2000  # their squares add up to more than 1e8
    np.savez(place, **columns)
    common: dict[str, Any] = {"dataset": "npz", "clients": 0, "data_dir": str(place), "method": "fedavg"}
    own, asked = tiny(**common), tiny(**common, model_args="standardise=true")
    assert asked.config is not None and asked.config.data.normalise == "none"
    columns = ["received_accuracy", "received_loss", "trained_accuracy", "trained_loss"]
    np.testing.assert_allclose(asked.rounds[columns], own.rounds[columns], rtol=1e-3)
    raw = tiny(**common, normalise="none")
    assert abs(raw.rounds["trained_loss"] - own.rounds["trained_loss"]).max() > 0.1
    assert asked.summary["bytes_up_query.scaling"] == 8 * 25


@pytest.mark.parametrize("secure", [False, True])
def test_nodes_standardise_features_for_heads_trained_in_rounds(
    secure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDAPP_STATE", str(tmp_path / "home"))
    places = [features(tmp_path / f"{k}.npz", client=False, seed=k) for k in range(3)]
    nodes = {70 + k: {"client-id": k, "data-path": str(place)} for k, place in enumerate(places)}
    values = {"dataset": "npz", "model": "identity", "class-names": "0,1,2,3", "num-server-rounds": 2}
    summary, grid, _ = start(tmp_path, nodes, method="fedavg", **values, **{"secure-sum": secure})
    told = grid.told[70]
    assert summary["ok"] and told.index("query.scaling") < told.index("train")
    x = np.concatenate([training(place)[0] for place in places])
    for kept in (tmp_path / "home").rglob("received.safetensors"):
        inputs = predict.read_model(kept).inputs
        np.testing.assert_allclose([inputs.mean, inputs.std], [x.mean(axis=0), x.std(axis=0)], atol=1e-4)
    assert 'model-args = "standardise=true"' in (tmp_path / "run" / "config.toml").read_text()


@pytest.mark.parametrize(
    "given",
    [
        {"method": "fed3r"},
        {"normalise": "none"},
        {"dp": "sgd"},
        {"model-args": "standardise=false"},
        {"model-args": ARGS},
        {"model": "mlp"},
        {"dataset": "digits"},
        {"method": "local", "bodies": "aaaaaaaa,bbbbbbbb"},
    ],
)  # fmt: skip
def test_nodes_keep_what_needs_no_standardisation(given: dict[str, Any]) -> None:
    config = from_flat({"method": "fedavg", "dataset": "npz", "model": "identity", **given})
    assert for_nodes(config) == config


def test_a_resumed_run_goes_on_with_its_scaling(tmp_path: Path, tiny: Tiny) -> None:
    common: dict[str, Any] = {"dataset": "npz", "clients": 0, "data_dir": str(features(tmp_path / "f.npz"))}
    common |= {"method": "fedavg", "model_args": ARGS}
    whole, first = tiny(**common, rounds=3), tiny(**common, rounds=2)
    again = tiny(resume=first.out, rounds=3)
    pd.testing.assert_frame_equal(again.rounds["trained_loss"].to_frame(), whole.rounds["trained_loss"].to_frame())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model-args": "random-features=2501"}, "25 MB a client for heads from sums: take 2500 or fewer"),
        ({"model-args": "random-features=-1"}, "model-args: random_features = '-1'"),
        ({"model-args": "widht=3"}, "model-args: identity has no hyperparameter 'widht'"),
        ({"model-args": ARGS, "normalise": "data"}, "leave out normalise and dp"),
        ({"model-args": ARGS, "dp": "example"}, "leave out normalise and dp"),
        ({"model-args": ARGS, "model": "mlp"}, "are for own models"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=said) as refused:
        from_flat({"method": "fed3r", "dataset": "npz", "model": "identity", **given})
    assert "\n" not in str(refused.value)
    assert from_flat({"dataset": "npz", "model": "identity", "model-args": "random-features=2501 force=true"})


def test_fed3r_has_a_short_form() -> None:
    given = {"dataset": "npz", "model": "identity", "model-args": "gamma=0.6"}
    found = from_flat({**given, "method": "fed3r(random_features=60)"})
    assert found.model.model_args == "random-features=60 gamma=0.6" and found.data.normalise == "none"
    assert from_flat(found.to_flat()) == found
    assert frozen.of("identity", found.model).random_features == 60
    with pytest.raises(BadRequest, match="are for own models"):
        from_flat({**given, "model": "mlp", "model-args": "", "method": "fed3r(random_features=60)"})


def test_images_are_no_features(tiny: Tiny) -> None:
    with pytest.raises(BadRequest, match="model-args of identity are for rows of features, and this data has images"):
        tiny(method="fedavg", model="identity", model_args=ARGS)


def test_a_node_with_another_matrix_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAPP_STATE", str(tmp_path / "home"))
    places = [features(tmp_path / f"{k}.npz", client=False, seed=k) for k in range(3)]
    nodes = {70 + k: {"client-id": k, "data-path": str(place)} for k, place in enumerate(places)}
    original = FedClient.register

    def registered(self: FedClient) -> tuple[dict[str, Any], dict[str, Any]]:
        if self.task.client == 2:
            monkeypatch.setattr(_checks, "digest", lambda w: "f" * 64)
        try:
            return original(self)
        finally:
            monkeypatch.setattr(_checks, "digest", fourier.digest)

    monkeypatch.setattr(FedClient, "register", registered)
    values = {"dataset": "npz", "model": "identity", "class-names": "0,1,2,3", "model-args": ARGS}
    summary, grid, events = start(tmp_path, nodes, method="fed3r", **values)
    told = " ".join(str(event) for event in events)
    assert f"the random-features of client 2 ({'f' * 64}) differs from that of client 0" in told
    assert grid.told[70] == ["query.register", "query.scaling", "query.sums", "query.losses", "evaluate"]
    assert grid.told[72] == ["query.register"]
    assert summary["accuracy"]["received"]["last"] > 0.6
    kept = predict.read_model(next((tmp_path / "home").rglob("received.safetensors")))
    x = np.concatenate([training(place)[0] for place in places[:2]])
    np.testing.assert_allclose(kept.inputs.mean, x.mean(axis=0), atol=1e-4)
    np.testing.assert_allclose(kept.inputs.std, x.std(axis=0), atol=1e-4)


# ---- the exchange ----------------------------------------------------------------------------------------------------


def test_sums_make_mean_and_deviation_with_a_floor() -> None:
    x = np.random.default_rng(0).normal(3, [[1.0, 0.01, 0.0, 2.0]], (9000, 4)).astype(np.float32)
    parts = [feature_sums(part) for part in np.array_split(x, [10, 5000])]
    sums = {n: sum(part[n] for part in parts) for n in parts[0]}
    assert all(np.array_equal(sums[n], feature_sums(x)[n]) for n in sums)
    mean, std = moments_from(sums)
    np.testing.assert_allclose(mean, x.mean(axis=0, dtype=np.float64), atol=1e-4)
    np.testing.assert_allclose(std[:2] + std[3:], x.astype(np.float64).std(axis=0)[[0, 1, 3]], rtol=1e-3)
    assert std[2] == pytest.approx(1e-3 * (5 / 4) ** 0.5, rel=0.02)
    with pytest.raises(BadRequest, match="too small to be standardised: multiply them by a constant"):
        moments_from(feature_sums(1e-3 * x))


@pytest.mark.parametrize(
    ("change", "lost", "said"),
    [
        ({}, 0.0, None), ({"square": np.zeros(2)}, 0.0, "no features have these sums and squares"),
        ({"square": np.full(2, 0.9)}, 0.2, None), ({"square": np.full(2, 0.7)}, 0.2, "no features have these sums"),
        ({"count": np.array([1.5])}, 0.0, "count must be a number of samples"),
        ({"sum": np.zeros(3)}, 0.0, "needs count, sum"),
        ({"count": np.array([9.0]), "square": np.full(2, 9.0)}, 0.0, "sums of 9 samples from a client of 4"),
    ],
)  # fmt: skip
def test_sums_that_no_features_have_are_refused(change: dict[str, np.ndarray], lost: float, said: str | None) -> None:
    sums = {"count": np.array([4.0]), "sum": np.array([2.0, -2.0]), "square": np.array([1.0, 1.0]), **change}
    context: Any = SimpleNamespace(shape=(2,))
    assert not any(a.any() for a in MOMENTS.form(context, {}).values()), "no samples"
    reply = Reply(0, 4, {f"scaling/{name}": array for name, array in sums.items()}, {}, lost=lost)
    found = MOMENTS.problem(context, reply, {})
    assert found is None if said is None else said in str(found)


def test_sums_leave_only_for_a_model_that_standardises_and_of_classes_with_enough_rows() -> None:
    x, y = torch.tensor([[1.0], [2.0], [9.0]]), torch.tensor([4, 4, 1])
    client: Any = SimpleNamespace(task=SimpleNamespace(x_train=x, y_train=y))

    def asked(least: int, **model: str) -> dict[str, float]:
        context: Any = SimpleNamespace(node_config={"client-id": 0, "data-path": "x", "min-class-count": least})
        handlers = Handlers(context, from_flat({"dataset": "npz", **model}), client)
        return {n: float(a[0]) for n, a in handlers.scaling(RoundRequest(), Payload()).arrays.items()}

    scaled = {"model": "identity", "model-args": "standardise=true"}
    assert asked(2, **scaled) == {"scaling/count": 2, "scaling/sum": 3, "scaling/square": 5}
    assert asked(0, **scaled)["scaling/sum"] == 12
    with pytest.raises(BadRequest, match="too few rows of every class"):
        asked(3, **scaled)
    with pytest.raises(BadRequest, match="this run's model does not standardise any"):
        asked(0, model="mlp")


@pytest.mark.parametrize("text", ["[[0], [1]]", "[[0, 0], [1, 0]]", "[[0, NaN], [1, 1]]"])
def test_a_client_refuses_a_scaling_that_is_none(text: str) -> None:
    spec = InputSpec((2,), 1.0, (0.0, 0.0), (1.0, 1.0), "table")
    assert spec.scaled("[[1, 2], [3, 4]]").std == (3.0, 4.0)
    with pytest.raises(BadRequest, match="the server's scaling is not that of rows of 2 features"):
        spec.scaled(text)
