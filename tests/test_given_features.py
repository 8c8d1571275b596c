"""Runs on features that a pretrained body made: the model `identity`, what `auto` stands for, and every method."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedapp import load, registry
from fedapp.cli import app
from fedapp.config import from_flat
from fedapp.data import datasets
from fedapp.engines import local, runner
from fedapp.errors import BadRequest
from fedapp.experiments.api import compare
from fedapp.learning.state import read_safetensors
from fedapp.results import predict, report
from fedapp.results.answers import answers_of
from fedapp.results.runs import RunResult
from fedapp.tasks import simulated
from fedapp.tasks.node import Node, OwnDataError, node_task
from strategies import _composition
from tests.matrix import methods
from tests.test_nodes import start

W, B = "head.weight", "head.bias"
Tiny = Callable[..., RunResult]


def features(path: Path, body: str = "a", rows: int = 240, client: bool = True, seed: int = 0) -> Path:
    """Write features (rows, 12) of four classes for six clients, as `fedapp features` does."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 4, rows)
    x = np.random.default_rng(7).normal(size=(4, 12))[y] + rng.normal(size=(rows, 12))
    owners = {"client": rng.permutation(rows) % 6} if client else {}
    split = np.where(np.arange(rows) % 4 == 0, "test", "train")
    about = np.array(json.dumps({"body": body * 64, "width": 12}))
    np.savez(path, x=x.astype(np.float16), y=y, split=split, about=about, **owners)
    return path


def training(path: Path) -> tuple[Any, Any]:
    """Return the training rows of a file, features float64 and labels."""
    with np.load(path) as arrays:
        train = arrays["split"] == "train"
        return arrays["x"][train].astype(np.float64), arrays["y"][train]


def effective(path: Path, **values: Any) -> dict[str, Any]:
    return local.effective({"dataset": "npz", "data-dir": str(path), **values}).to_flat()


@pytest.mark.parametrize(
    ("method", "given", "args", "normalise"),
    [
        ("fed3r", {}, "base=none scale=fit lam=gcv", "none"),
        ("lda", {}, "base=none scale=fit", "none"),
        ("ccvr", {}, "base=none", "none"),
        ("fedavg", {}, "", "auto"),
        ("fed3r", {"method-args": "lam=3 scale=none"}, "lam=3 scale=none base=none", "none"),
        ("fed3r", {"method-args": "lam=auto scale=none"}, "scale=none base=none lam=gcv", "none"),
        ("fed3r", {"method-args": "base=fedavg"}, "base=fedavg", "auto"),
        ("fed3r", {"dp": "example"}, "base=none scale=none lam=0.01", "none"),
        ("fed3r", {"model": "mlp"}, "", "auto"),
        ("fed3r", {"model": "mlp", "method-args": "base=none"}, "base=none scale=fit lam=gcv", "auto"),
        ("fed3r", {"model": "mlp", "method-args": "base=none", "dp": "example", "normalise": "none"},
         "base=none scale=none lam=0.01", "none"),
    ],
)  # fmt: skip
def test_auto_is_resolved_once_for_features(
    method: str, given: dict[str, Any], args: str, normalise: str, tmp_path: Path
) -> None:
    found = effective(features(tmp_path / "f.npz"), method=method, **given)
    assert found["model"] == given.get("model", "identity")
    assert (found["method-args"], found["normalise"]) == (args, normalise)
    assert from_flat(found).to_flat() == found, "resolved values hold"


def test_without_features_nothing_is_written(tmp_path: Path) -> None:
    for method in ("fed3r", "lda", "fedncm", "fedcof", "ccvr", "pccvr"):
        assert from_flat({"method": method}).to_flat()["method-args"] == ""
        hparams = registry.configured(method, "")[1].model_dump()
        assert hparams["base"] == "fedavg" and "auto" not in hparams.values()
    assert (
        registry.configured("fed3r", "")[1].model_dump() | {"lam": 0.01, "scale": "trained"}
        == registry.configured("fed3r", "lam=0.01 scale=trained base=fedavg")[1].model_dump()
    )


def test_the_head_is_the_ridge_regression_of_all_rows(tmp_path: Path, tiny: Tiny) -> None:
    place = features(tmp_path / "f.npz")
    with np.load(place) as arrays:
        train = arrays["split"] == "train"
        z, y = arrays["x"].astype(np.float64), arrays["y"]
    run = tiny(dataset="npz", clients=0, data_dir=str(place), method="fed3r", rounds=1)
    lam = run.summary["calibration"]["lam"]
    h = np.column_stack([z, np.ones(len(z))])
    wanted = np.linalg.solve(h[train].T @ h[train] + lam * np.eye(13), h[train].T @ np.eye(4)[y[train]]).T
    stored, _ = read_safetensors(run.out / "models" / "last.safetensors")
    assert sorted(stored) == [B, W]
    rows = np.column_stack([stored[W], stored[B]]).astype(np.float64)
    np.testing.assert_allclose(rows / run.summary["calibration"]["scale"], wanted, rtol=1e-5, atol=1e-7)
    right = float(((h[~train] @ wanted.T).argmax(axis=1) == y[~train]).mean())
    assert run.summary["accuracy"]["global"]["last"] == pytest.approx(right)
    assert run.summary["calibration"]["extractor"] == "none: the head is on the data's features"
    net = load(run.out)
    probabilities = net.predict(z[~train].astype(np.float32))
    assert (probabilities.argmax(axis=1) == (h[~train] @ wanted.T).argmax(axis=1)).all()
    assert len(predict.run(net, [place])) == len(z)
    other, kept = features(tmp_path / "g.npz", body="b"), run.out / "models" / "clients" / "0" / "personal.safetensors"
    for same in (net, predict.read_model(kept)):
        with pytest.raises(
            BadRequest, match="of the body bbbbbbbb, and this model was trained on features of aaaaaaaa"
        ):
            predict.run(same, [other])


def flipped(path: Path, place: float = 0.5) -> None:
    """Change one bit of a file, at a share of its length."""
    found = bytearray(path.read_bytes())
    found[int(place * len(found))] ^= 1
    path.write_bytes(found)


def test_a_wrong_bit_is_found_in_a_file_and_in_the_decoded_copy(
    tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDAPP_CACHE", str(tmp_path / "cache"))
    place = features(tmp_path / "f.npz")

    def head() -> bytes:
        run = tiny(dataset="npz", clients=0, data_dir=str(place), method="lda")
        return b"".join(a.tobytes() for a in read_safetensors(run.out / "models" / "last.safetensors")[0].values())

    whole = head()
    for part in ("x_train", "x_test"):
        [copy] = (tmp_path / "cache" / "datasets").glob(f"npz-*/{part}.npy")
        stored = copy.read_bytes()
        flipped(copy)
        datasets._open.cache_clear()
        simulated._federated.cache_clear()
        assert head() == whole and copy.read_bytes() == stored, "the copy is made again from the file"
    flipped(place, 0.2)
    datasets._open.cache_clear()
    simulated._federated.cache_clear()
    with pytest.raises(BadRequest, match=r"f.npz \(Bad CRC-32 for file 'x.npy'\): take a good copy of it"):
        head()
    with pytest.raises(OwnDataError, match="take a good copy of it"):
        node_task(from_flat({"method": "lda", "dataset": "npz"}), Node.parse({"client-id": 0, "data-path": str(place)}),
                  torch.device("cpu"))  # fmt: skip


def test_nothing_is_trained_so_there_is_no_round(
    tmp_path: Path, tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    place = features(tmp_path / "f.npz")
    run = tiny(dataset="npz", clients=0, data_dir=str(place), method="lda", rounds=3)
    assert not len(run.rounds) and not (run.out / "rounds.csv").exists()
    summary = run.summary
    assert summary["rounds"] == 0 and len(run.final) == 6
    assert set(summary["accuracy"]) == {"global", "received"}, "nothing is trained"
    for score in ("global", "received"):
        assert 0.5 < summary["accuracy"][score]["last"] <= 1 and 0.5 < summary["accuracy"][score]["balanced"] <= 1
    assert summary["headline"]["point"] == "after one exchange, before local training"
    runner.print_summary(summary)
    shown = capsys.readouterr().out
    assert "lda on npz, 6 clients, one exchange" in shown and "per client and round" not in shown
    assert f"bytes per client for the query of sums: {8 * (4 * 13 + 13 * 14 // 2):,} up" in shown
    assert report.write(run.out).is_file()
    assert from_flat({"method": "lda", "method-args": "base=none"}).federation.num_server_rounds == 0
    with pytest.raises(BadRequest, match="fedavg trains in rounds, so give at least 1"):
        from_flat({"method": "fedavg", "num-server-rounds": 0})
    words = [
        "run",
        "--method",
        "lda",
        "--dataset",
        "npz",
        "--set",
        f"data-dir={place}",
        "--engine",
        "local",
        "--dry-run",
    ]
    for more, said in (([], 0), (["--rounds", "3"], 1)):
        done = CliRunner().invoke(app, [*words, *more])
        assert done.exit_code == 0 and "num-server-rounds = 0" in done.output
        assert done.output.count("lda trains nothing here (base = none), so there are no rounds") == said


@pytest.mark.full
def test_a_comparison_takes_a_method_without_rounds(tmp_path: Path, in_turn: list[str]) -> None:
    place = features(tmp_path / "f.npz")
    found = compare(
        ["local", "fed3r"], seeds=1, rounds=1, dataset="npz", data_dir=str(place), out=tmp_path / "c", seed=0
    )
    assert [len(run.rounds) for run in found.runs] == [1, 0]
    once = 8 * (4 * 13 + 13 * 14 // 2 + 65)
    assert found.table.set_index("method").loc["fed3r", "bytes_up"] == once
    (answer,) = answers_of(found)
    assert f"A client of Fed3R sends {once:,} B once. Exchanged" in " ".join(answer.sentences().values())


# ---- every method ----------------------------------------------------------------------------------------------------

REFUSED = {
    "fedper": "no array under features., which the method shares",
    **dict.fromkeys(
        ("fedbabu", "fedpac", "fedrep", "pfedfda"), "trains the body by itself, and here no body is trained"
    ),
}
"""Methods that have nothing to do where there is no body."""
REDUCED = {
    "moon": "fedavg", "lgfedavg": "fedavg", "fedproto": "local", "fedtgp": "local",
    "fedclassavg": "fedclassavg contrastive=0",
}  # fmt: skip
"""Methods that equal another one: their terms have no gradient in the head, or their parts are the whole."""


@pytest.mark.full
@pytest.mark.parametrize("method", methods())
def test_every_method_runs_on_features_or_is_another_or_is_refused(
    method: str, tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clients.fedclassavg.supcon", None)  # no term of two views is computed
    common: dict[str, Any] = {"dataset": "npz", "clients": 0, "data_dir": str(features(tmp_path / "f.npz"))}
    common |= {"public_data": "0.05"} if method == "ktpfl" else {}
    if method in REFUSED:
        with pytest.raises(BadRequest, match=REFUSED[method]) as refused:
            tiny(method=method, **common)
        assert "\n" not in str(refused.value)
        return
    run = tiny(method=method, **common)
    assert run.summary["model"] == "identity"
    assert np.isfinite(run.summary["accuracy"]["received"]["last"])
    if method in REDUCED:
        name, _, args = REDUCED[method].partition(" ")
        other = tiny(method=name, method_args=args, **common)
        columns = ["received_accuracy", "received_loss", "trained_accuracy", "trained_loss"]
        assert run.rounds[columns].equals(other.rounds[columns])


@pytest.mark.full
@pytest.mark.parametrize(
    "method",
    [*methods(registry.discover().keys() - REFUSED.keys()), *(f"{m}(personal=true)" for m in ("fed3r", "lda", "qda"))],
)
def test_every_method_takes_features_that_an_exchange_has_standardised(method: str, tmp_path: Path, tiny: Tiny) -> None:
    common: dict[str, Any] = {"dataset": "npz", "clients": 0, "data_dir": str(features(tmp_path / "f.npz"))}
    common |= {"public_data": "0.05"} if method == "ktpfl" else {}
    given, asked = (tiny(method=method, **common, **more) for more in ({}, {"model_args": "standardise=true"}))
    assert asked.summary["bytes_up_query.scaling"] == 8 * 25
    if asked.summary["rounds"]:
        columns = ["received_loss", "trained_loss"]
        np.testing.assert_allclose(asked.rounds[columns], given.rounds[columns], rtol=0.02)
    assert np.isfinite(asked.summary["accuracy"]["received"]["last"])


# ---- bodies ----------------------------------------------------------------------------------------------------------


def registered(path: Path, client: int, **values: Any) -> dict[str, Any]:
    """What a node with a file of its own states when it registers."""
    config = from_flat({"method": "fed3r", "dataset": "npz", "class-names": "0,1,2,3", **values})
    method, hparams = config.method_and_hparams()
    node = Node.parse({"client-id": client, "data-path": str(path)})
    task = node_task(config, node, torch.device("cpu"))
    return json.loads(str(method.client(task, method, hparams).register()[1]["common"]))


def test_a_node_states_the_body_of_its_features(tmp_path: Path) -> None:
    place = features(tmp_path / "f.npz", client=False)
    assert registered(place, 0, model="identity") == {"body": "a" * 64}
    with pytest.raises(BadRequest, match="the run's model is mlp: set model = identity"):
        registered(place, 0)
    with pytest.raises(BadRequest, match="hides differences between classes"):
        from_flat({"method": "fedavg", "dataset": "npz", "model": "identity", "normalise": "client"})


def test_features_of_two_bodies_are_never_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAPP_STATE", str(tmp_path / "home"))
    places = [features(tmp_path / f"{k}.npz", body, client=False, seed=k) for k, body in enumerate("aab")]
    nodes = {70 + k: {"client-id": k, "data-path": str(place)} for k, place in enumerate(places)}
    values = {"dataset": "npz", "model": "identity", "class-names": "0,1,2,3", "num-server-rounds": 1}
    summary, grid, events = start(tmp_path, nodes, method="fed3r", **values)
    told = " ".join(str(event) for event in events)
    assert f"the body of client 2 ({'b' * 64}) differs from that of client 0 ({'a' * 64})" in told
    assert grid.told[70] == ["query.register", "query.sums", "query.losses", "evaluate"]
    assert grid.told[72] == ["query.register"]
    found, _ = read_safetensors(tmp_path / "run" / "models" / "last.safetensors")
    z, y = (np.concatenate(parts) for parts in zip(*map(training, places[:2]), strict=True))
    h, calibration = np.column_stack([z, np.ones(len(z))]), summary["calibration"]
    wanted = np.linalg.solve(h.T @ h + calibration["lam"] * np.eye(13), h.T @ np.eye(4)[y]).T
    np.testing.assert_allclose(found[W] / calibration["scale"], wanted[:, :-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "least", "said"),
    [("lda", 151, 1), ("lda", 150, 0), ("qda", 151, 1), ("ccvr", 151, 1), ("ccvr/cov=diag", 151, 0)],
)
def test_second_moments_of_few_rows_are_warned_of_on_nodes(
    method: str, least: int, said: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _composition.FEW_ROWS == 1 / 4
    monkeypatch.setattr(_composition, "FEW_ROWS", least / 12)
    monkeypatch.setenv("FEDAPP_STATE", str(tmp_path / "home"))
    places = [features(tmp_path / f"{k}.npz", rows=r, client=False, seed=k) for k, r in enumerate((240, 240, 200))]
    nodes = {70 + k: {"client-id": k, "data-path": str(place)} for k, place in enumerate(places)}
    name, _, args = method.partition("/")
    values = {"method": name, "method-args": args, "dataset": "npz", "model": "identity", "class-names": "0,1,2,3"}
    summary, *_ = start(tmp_path, nodes, **values)
    told = [text for text in summary["warnings"] if "second moments" in text]
    assert len(told) == said and all("client 2 sent second moments of 150 rows of 12 features" in text for text in told)


@pytest.mark.parametrize(
    ("method", "args", "apart"),
    [
        ("lgfedavg", "", True), ("fedgh", "", True), ("fedclassavg", "", True), ("cwfedavg", "share=head", True),
        ("fedavg", "", False),
    ],
)  # fmt: skip
def test_clients_of_two_bodies_share_a_head_behind_private_adapters(
    method: str, args: str, apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDAPP_STATE", str(tmp_path / "home"))
    places = [features(tmp_path / f"{k}.npz", body, client=False, seed=k) for k, body in enumerate("aab")]
    if apart:  # a body of another width
        with np.load(places[2]) as arrays:
            np.savez(
                places[2], **{**arrays, "x": arrays["x"][:, :7], "about": json.dumps({"body": "b" * 64, "width": 7})}
            )
    nodes = {70 + k: {"client-id": k, "data-path": str(place)} for k, place in enumerate(places)}
    values = {"dataset": "npz", "model": "adapter", "class-names": "0,1,2,3", "num-server-rounds": 1}
    summary, grid, events = start(tmp_path, nodes, method=method, **{**values, "method-args": args})
    assert ("train" in grid.told[72]) == apart
    assert ("the body of client 2" in " ".join(map(str, events))) != apart
    assert np.isfinite(summary["accuracy"]["received"]["last"])
