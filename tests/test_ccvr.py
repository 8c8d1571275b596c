"""CCVR: worked numbers, pooled features through the whole message path, edge cases, composition with base methods."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn import functional as F

from clients._models import CCVRHead
from clients.base import FedClient
from clients.ccvr import CCVRClient, CCVRHParams
from fedapp import config, registry, sampling
from fedapp.core import gaussian, heads
from fedapp.core.gaussian import MomentsPool
from fedapp.core.virtual import virtual_features
from fedapp.engines.local import RunResult, run
from fedapp.errors import BadRequest
from fedapp.experiments import compare, recipes
from fedapp.learning.evaluation import batched
from fedapp.learning.state import read_safetensors
from fedapp.learning.task import ModelSpec
from fedapp.learning.training import Batch, batch_slices
from fedapp.method import Arrays, Method, Payload, Reply, ServerContext, ServerState
from fedapp.models import SplitModel
from fedapp.models.selection import extract
from fedapp.reduce.reader import Policy
from fedapp.results.predict import read_model
from fedapp.results.runs import read_run
from fedapp.tasks import simulated as tasks
from fedapp.transport.cohort import Cohort
from fedapp.transport.traffic import Exchange
from reproduction.figures.models import global_model
from strategies._maths import Maths
from strategies.ccvr import CCVR, retrain, statistics
from tests import handmade
from tests.handmade import asking, deterministic, guard, refusal
from tests.matrix import methods

W, B = "head.weight", "head.bias"
BASES = sorted(m.id for m in registry.discover().values() if m.global_model and m.linear and m.resolve is None)
"""Every method with one global model, with one of its own or not."""
PRIVATE = ("feddbe", "fedrod")
"""Those whose clients add something of their own to it."""
SMALL: dict[str, Any] = {
    "dataset": "digits",
    "data_fraction": 0.3,
    "clients": 3,
    "local_epochs": 1,
    "batch_size": 64,
    "alpha": 0.3,
}

# Three clients, three classes, d = 2.
CLIENTS = [
    ([[1, 2], [2, 1], [3, 3], [0, 4], [1, 5]], [0, 0, 0, 1, 1]),
    ([[4, 0], [2, 6], [0, 6], [5, 5]], [0, 1, 1, 2]),
    ([[3, 4]], [1]),
]


def method_of(args: str = "") -> tuple[Method, CCVRHParams]:
    outer = registry.get("ccvr")
    hparams = registry.parse_args(outer, args)
    assert isinstance(hparams, CCVRHParams)
    return registry.resolve(outer, hparams), hparams


def context(num_classes: int = 3, width: int = 2, seed: int = 0) -> ServerContext:
    rng = np.random.default_rng(seed)
    initial = {
        "features.0.weight": rng.standard_normal((4, 3)).astype(np.float32),
        W: rng.standard_normal((num_classes, width)).astype(np.float32),
        B: rng.standard_normal(num_classes).astype(np.float32),
    }
    return handmade.context(initial, 0, seed, num_classes=num_classes, width=width)


def server(args: str = "", ctx: ServerContext | None = None) -> tuple[CCVR, ServerState]:
    method, hparams = method_of(args)
    strategy = method.strategy(method, hparams)
    assert isinstance(strategy, CCVR)
    return strategy, strategy.init(ctx or context())


Data = list[tuple[Any, Any]]


def asker(strategy: CCVR, data: Data, order: list[int] | None = None) -> Callable[[str, Payload], list[Reply]]:
    """Answer like clients that hold these features; every answer goes through the strategy's own check."""
    s = strategy.settings

    def answer(k: int, kind: str, payload: Payload) -> Arrays:
        z, y = np.asarray(data[k][0], np.float64), np.asarray(data[k][1])
        if kind == "features":
            return {"features/z": z.astype(np.float32), "features/label": y}
        keep = np.bincount(y, minlength=strategy.context.num_classes)[y] >= s.min_count
        found = gaussian.moments(z[keep], y[keep], strategy.context.num_classes, gaussian.form_of(s.cov))
        if s.cov == "sums":
            arrays = gaussian.sums(found, payload.all().get("statistics/centres"))
            names = ("count", "sum") if kind == "totals" else tuple(arrays)
            arrays = {n: arrays[n] for n in names}
        else:
            arrays = gaussian.to_arrays(found, s.cov, s.rank, s.dtype)
        return {f"statistics/{n}": a for n, a in arrays.items()}

    def ask(kind: str, payload: Payload) -> list[Reply]:
        replies = []
        for client, k in enumerate(order or range(len(data))):
            reply = Reply(
                client,
                len(data[k][1]),
                answer(k, kind, payload),
                {"received-correct": 1, "received-total": 2},
                kind=f"query.{kind}",
            )
            assert strategy.schema({}, reply.kind).check(reply) is None
            replies.append(reply)
        return replies

    return ask


def pooled(args: str, data: Data, ctx: ServerContext | None = None) -> gaussian.ClassMoments:
    strategy, state = server(args, ctx)
    return statistics(state["model"], strategy.settings.cov, asking(strategy, asker(strategy, data)))[0]


def calibrate(args: str, data: Data, ctx: ServerContext | None = None) -> tuple[CCVR, ServerState, ServerState]:
    strategy, state = server(args, ctx)
    return strategy, state, strategy.finalize(state, asking(strategy, asker(strategy, data)))


def six(liar: float = 0.0) -> Data:
    """Six clients of two of four classes each: no class has enough senders for a vote. Client 0 may lie of its own."""
    rng = np.random.default_rng(1)
    data: Data = []
    for k, classes in enumerate(itertools.combinations(range(4), 2)):
        y = np.repeat(classes, 20)
        z = rng.normal(size=(40, 2)) + 4 * np.array([[1, 0], [0, 1], [-1, 0], [0, -1]])[y]
        data.append((z + liar if k == 0 else z, y))
    return data


def test_who_moves_the_head_far_is_named() -> None:
    """Drop-one: distances of heads that are fitted without each client, against runs without that client."""
    told: list[str] = []
    strategy, state = server(ctx=dataclasses.replace(context(4), warn=told.append))
    strategy.policy = Policy(guard(robust="own", robust_f=1))
    assert strategy.finalize(state, asking(strategy, asker(strategy, six())))["ccvr"]["calibration"]["screened"] == {
        "capped": 0, "left_out": 0, "scaled": 0, "pulls": {},
    }  # fmt: skip
    assert not told
    data = six(liar=5.0)
    got = strategy.finalize(state, asking(strategy, asker(strategy, data)))["ccvr"]
    whole = calibrate("", data, context(4))[2]["ccvr"]["head"]
    assert all(np.array_equal(whole[n], a) for n, a in got["head"].items()), "a warning changes nothing"
    moves = []
    for k in range(6):
        head = calibrate("", data[:k] + data[k + 1 :], context(4))[2]["ccvr"]["head"]
        moves.append(np.sqrt(sum(np.square(head[n] - a, dtype=np.float64).sum() for n, a in whole.items())))
    assert moves[0] > 3 * np.median(moves) > max(moves[1:])
    assert got["calibration"]["screened"]["pulls"] == {0: pytest.approx(moves[0] / np.median(moves), abs=0.01)}
    assert len(told) == 1 and "without the statistics of client 0" in told[0]
    few, _ = server(ctx=dataclasses.replace(context(4), warn=told.append))
    few.policy = Policy(guard(robust="own", robust_f=1))
    assert few.finalize(state, asking(few, asker(few, data[:3])))["ccvr"]["calibration"]["screened"]["pulls"] == {}


def together(data: Data) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([np.asarray(z, np.float64) for z, _ in data]), np.concatenate([y for _, y in data])


def random_data(clients: int, classes: int, width: int, seed: int, shift: float = 0.0) -> Data:
    rng = np.random.default_rng(seed)
    data: Data = []
    for _ in range(clients):
        y = rng.choice(classes, size=int(rng.integers(2, 40)), p=rng.dirichlet(np.full(classes, 0.5)))
        mixing = rng.standard_normal((width, width))
        data.append((rng.standard_normal((len(y), width)) @ mixing + y[:, None] + shift, y))
    return data


# ---- worked numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", ["", "dtype=float64", "cov=sums"])
def test_pooled_statistics_of_the_worked_example(args: str) -> None:
    found = pooled(args, CLIENTS)
    assert found.counts.tolist() == [4, 5, 1]
    np.testing.assert_allclose(found.means, [[2.5, 1.5], [1.2, 5.0], [5, 5]], atol=1e-6)
    np.testing.assert_allclose(found.cov(0), [[5 / 3, -2 / 3], [-2 / 3, 5 / 3]], atol=1e-6)
    np.testing.assert_allclose(found.cov(1), [[1.7, -0.25], [-0.25, 1.0]], atol=1e-6)


def test_diagonal_and_pooled_forms_of_the_worked_example() -> None:
    diagonal = pooled("cov=diag", CLIENTS)
    np.testing.assert_allclose(diagonal.cov(0), [5 / 3, 5 / 3], atol=1e-6)
    np.testing.assert_allclose(diagonal.cov(1), [1.7, 1.0], atol=1e-6)
    # (3 Sigma_0 + 4 Sigma_1 + 0) / 7, the same for all classes.
    common = (np.array([[5.0, -2.0], [-2.0, 5.0]]) + np.array([[6.8, -1.0], [-1.0, 4.0]])) / 7
    for c in range(3):
        np.testing.assert_allclose(pooled("cov=pooled", CLIENTS).cov(c), common, atol=1e-6)


# ---- oracles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("args", "tolerance"), [("dtype=float64", 1e-10), ("cov=sums", 1e-10), ("", 1e-5)])
@pytest.mark.parametrize("seed", range(3))
def test_pooling_equals_numpy_on_all_features_together(args: str, tolerance: float, seed: int) -> None:
    """Exact with float64 on the wire; float32 rounds each client's numbers to 6e-8 of their size, here below 1e2."""
    ctx = context(num_classes=4, width=5)
    data = random_data(6, 4, 5, seed)
    z, y = together(data)
    found = pooled(args, data, ctx)
    assert found.counts.tolist() == np.bincount(y, minlength=4).tolist()
    for c in found.classes:
        np.testing.assert_allclose(found.means[c], z[y == c].mean(axis=0), atol=tolerance)
        if found.counts[c] > 1:
            scale = 1 + np.abs(np.cov(z[y == c].T)).max()
            np.testing.assert_allclose(found.cov(c) / scale, np.cov(z[y == c].T) / scale, atol=tolerance)


def test_sums_are_decided_by_who_answers_the_second_question() -> None:
    """A client that is lost between the two questions leaves no trace: the centre need not be the mean."""
    strategy, state = server("cov=sums", context(num_classes=2, width=3))
    data = random_data(4, 2, 3, seed=2)
    full = asker(strategy, data)
    few = asking(strategy, lambda kind, p: full(kind, p)[: 3 if kind == "statistics" else 4])
    found = statistics(state["model"], strategy.settings.cov, few)[0]
    z, y = together(data[:3])
    for c in range(2):
        np.testing.assert_allclose(found.means[c], z[y == c].mean(axis=0), atol=1e-10)
        np.testing.assert_allclose(found.cov(c), np.cov(z[y == c].T), atol=1e-10)


def slow_retrain(
    w: np.ndarray, b: np.ndarray, z: np.ndarray, y: np.ndarray, s: CCVRHParams, norm: bool
) -> tuple[np.ndarray, np.ndarray]:
    """SGD with momentum and weight decay, gradients written out, in float64."""
    w, b = w.astype(np.float64), b.astype(np.float64)
    vw, vb, first = np.zeros_like(w), np.zeros_like(b), True
    for epoch in range(s.epochs):
        order = np.random.default_rng(epoch).permutation(len(y))
        for part in batch_slices(len(y), s.batch):
            rows = order[part]
            norms = np.linalg.norm(w, axis=1, keepdims=True)
            unit = w / norms
            scores = z[rows] @ unit.T if norm else z[rows] @ w.T + b
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            p[np.arange(len(rows)), y[rows]] -= 1
            gw, gb = p.T @ z[rows] / len(rows), p.mean(axis=0)
            if norm:
                gw = (gw - (gw * unit).sum(axis=1, keepdims=True) * unit) / norms
            gw, gb = gw + s.weight_decay * w, gb + s.weight_decay * b
            vw, vb = (gw, gb) if first else (s.momentum * vw + gw, s.momentum * vb + gb)
            first = False
            w = w - s.lr * vw
            b = b if norm else b - s.lr * vb
    return w, b


@pytest.mark.parametrize("norm", [False, True])
def test_retraining_against_gradients_written_out(norm: bool) -> None:
    rng = np.random.default_rng(3)
    z, y = rng.standard_normal((50, 4)), rng.integers(0, 3, 50)
    head = {W: rng.standard_normal((3, 4)).astype(np.float32), B: np.zeros(3, np.float32)}
    s = CCVRHParams(lr=0.05, weight_decay=0.01, epochs=4, batch=16, clsnorm=norm)
    new = retrain(head, z, y, s, np.random.default_rng)
    w, b = slow_retrain(head[W], head[B], z, y, s, norm)
    np.testing.assert_allclose(new[W], w, atol=2e-6)
    np.testing.assert_allclose(new[B], b, atol=2e-6)


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Reply]]:
    """Record the replies of a run by the kind of message that they answer."""
    seen: dict[str, list[Reply]] = {}
    original = Cohort.send_and_receive

    def send_and_receive(self: Cohort, exchange: Exchange, *args: Any, **kwargs: Any) -> Iterator[Reply]:
        for reply in original(self, exchange, *args, **kwargs):
            seen.setdefault(exchange.stage, []).append(reply)
            yield reply

    monkeypatch.setattr(Cohort, "send_and_receive", send_and_receive)
    return seen


def named(reply: Reply, prefix: str) -> Arrays:
    return {n.removeprefix(prefix): a for n, a in reply.arrays.items() if n.startswith(prefix)}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-5)])
def test_statistics_of_a_federation_are_those_of_its_pooled_features(
    dtype: str, tolerance: float, tmp_path: Path, replies: dict[str, list[Reply]]
) -> None:
    """Through model, client, message and pool: np.mean and np.cov of all clients' real features."""
    args = f"oracle=true epochs=1 dtype={dtype}"
    result = run(method="ccvr", method_args=args, rounds=1, out=tmp_path / "run", **SMALL)
    statistics = [named(r, "statistics/") for r in replies["query.statistics"]]
    features = [named(r, "features/") for r in replies["query.features"]]
    assert all(a["mean"].dtype == a["cov"].dtype == dtype for a in statistics)
    pool = MomentsPool(10, 64)
    for arrays in statistics:
        pool.add(arrays)
    found = pool.moments()
    z = np.concatenate([f["z"] for f in features]).astype(np.float64)
    y = np.concatenate([f["label"] for f in features])
    assert found.counts.tolist() == np.bincount(y, minlength=10).tolist()
    assert result.summary["calibration"]["samples"] == len(y)
    for c in found.classes:
        np.testing.assert_allclose(found.means[c], z[y == c].mean(axis=0), atol=tolerance)
        np.testing.assert_allclose(found.cov(c), np.cov(z[y == c].T), atol=tolerance)


@pytest.mark.parametrize("cov", ["full", "sums"])
def test_answers_are_pooled_one_by_one(cov: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of clients, no more than the last two answers are in memory."""
    original, most = Cohort.send_and_receive, []

    def send_and_receive(self: Cohort, exchange: Exchange, *args: Any, **kwargs: Any) -> Iterator[Reply]:
        seen: list[weakref.ref[Reply]] = []
        for reply in original(self, exchange, *args, **kwargs):
            seen.append(weakref.ref(reply))
            if exchange.kind.startswith("query"):
                most.append(sum(ref() is not None for ref in seen))
            yield reply

    monkeypatch.setattr(Cohort, "send_and_receive", send_and_receive)
    args = f"epochs=1 cov={cov}"
    run(method="ccvr", method_args=args, rounds=1, out=tmp_path / "run", **{**SMALL, "clients": 6})
    assert len(most) == (12 if cov == "sums" else 6) and max(most) <= 2


def test_features_are_the_heads_input_in_evaluation_mode_without_augmentation(tmp_path: Path) -> None:
    """The features that are asked for are those of the stored global model on the plain training images."""
    result = run(method="ccvr", method_args="epochs=0", rounds=1, augment="weak", out=tmp_path / "run", **SMALL)
    settings = config.from_flat(
        {k.replace("_", "-"): v for k, v in {**SMALL, "method": "ccvr", "method_args": "epochs=0"}.items()}
    )
    method, hparams = method_of("epochs=0")
    task = tasks.simulated_task(settings, 1, 3, torch.device("cpu"))
    arrays = read_safetensors(result.out / "models" / "last.safetensors")[0]
    client = method.client(task, method, hparams)
    answer, count, metrics = client.answer_query("statistics", Payload(common=arrays), 2)
    model = client.build_model(task.spec(0), hparams)
    model.load_state_dict({n: torch.from_numpy(a) for n, a in arrays.items()})
    z = batched(model.eval().represent, task.x_train, task.inputs).numpy().astype(np.float64)
    y = task.y_train.numpy()
    assert count == len(y) and metrics["received-total"] == len(task.y_test)
    for row, c in enumerate(answer["statistics/ids"].tolist()):
        np.testing.assert_allclose(answer["statistics/mean"][row], z[y == c].mean(axis=0), rtol=1e-6, atol=1e-6)
        if answer["statistics/count"][row] > 1:
            cov = gaussian.unpack(answer["statistics/cov"][row], 64)
            np.testing.assert_allclose(cov, np.cov(z[y == c].T), rtol=1e-5, atol=1e-6)


# ---- reductions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", methods(BASES))
def test_only_the_head_of_the_bases_model_changes(base: str, tmp_path: Path) -> None:
    """Two rounds of any base, then the calibration: features, buffers and further parameters stay bit for bit."""
    common = {**SMALL, "rounds": 2, "alpha": 0.1}
    plain = run(method=base, out=tmp_path / "plain", **common)
    ccvr = run(method="ccvr", method_args=f"base={base}", out=tmp_path / "ccvr", **common)
    pd.testing.assert_frame_equal(deterministic(plain.rounds), deterministic(ccvr.rounds), check_exact=True)
    before, after = (read_safetensors(r.out / "models" / "last.safetensors")[0] for r in (plain, ccvr))
    assert {n for n in before if not np.array_equal(before[n], after[n])} == {W, B} <= before.keys() == after.keys()
    found = ccvr.summary["calibration"]
    assert found["before"] == plain.summary["accuracy"]["global"]["last"] != found["after"]
    assert ccvr.summary["accuracy"]["global"]["last"] == found["after"]
    if base not in PRIVATE:
        assert ccvr.summary["pooled"]["received"] == pytest.approx(found["after"], abs=1e-12), (
            "clients score the same model"
        )


@pytest.mark.parametrize("base", BASES)
def test_what_a_client_describes_is_what_the_bases_head_multiplies(base: str) -> None:
    """z W^T + b of the features that a client would describe are the logits of the base's own model."""
    settings = config.from_flat({"clients": 3, "dataset": "digits", "method": "ccvr"})
    task = tasks.simulated_task(settings, 0, 3, torch.device("cpu"))
    method, hparams = method_of(f"base={base} oracle=true")
    client = method.client(task, method, hparams)
    model = registry.get(base).client.build_model(task.spec(5), registry.parse_args(registry.get(base), ""))
    arrays = extract(model, model.state_dict())
    z = client.answer_query("features", Payload(common=arrays), 1)[0]["features/z"]
    logits = batched(model.eval(), task.x_train, task.inputs).detach().numpy()
    np.testing.assert_allclose(z @ arrays[W].T + arrays[B], logits, rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("transform", ["none", "feature", "sample", "sample-only"])
@pytest.mark.parametrize("base", [b if b == "fedavg" else pytest.param(b, marks=pytest.mark.full) for b in BASES])
def test_no_transform_stands_before_a_head_that_was_not_calibrated(base: str, transform: str, tmp_path: Path) -> None:
    """Without a step of re-training the deployed model is the base's: by epochs, or because no class is large enough.

    The oracle is calibrated, or not, by itself: real features are there even where no class is large enough.
    """
    common = {**SMALL, "clients": 2, "rounds": 1, "data_fraction": 0.3}
    plain = run(method=base, out=tmp_path / "plain", **common)
    wanted = read_safetensors(plain.out / "models" / "last.safetensors")[0]
    for args in ("epochs=0 oracle=true", "min_count=100000 oracle=true epochs=2", "epochs=0 min_count=100000"):
        args = f"base={base} transform={transform} {args}"
        ccvr = run(method="ccvr", method_args=args, out=tmp_path / args.replace(" ", "-"), **common)
        arrays, header = read_safetensors(ccvr.out / "models" / "last.safetensors")
        assert header["scalars"] == {"tukey": False}
        assert all(np.array_equal(arrays[n], wanted[n]) for n in wanted)
        found, score = ccvr.summary["calibration"], plain.summary["accuracy"]["global"]["last"]
        assert found["before"] == found["after"] == ccvr.summary["accuracy"]["global"]["last"] == score
        assert ccvr.summary["pooled"]["received"] == plain.summary["pooled"]["received"]
        if "epochs=0 oracle" in args:
            assert found["oracle"] == score
        again = global_model(read_run(ccvr.out))
        assert getattr(again.head, "transform", False) is False


@pytest.mark.full
@pytest.mark.parametrize("table", ["0.05", "0.1", "0.5"])
def test_rows_of_table_1_score_the_model_as_trained(table: str, tmp_path: Path) -> None:
    """The published number is `global`: of FedAvg, or of FedAvg with clsnorm or clsprox, all without calibration."""
    recipe = recipes.shipped()[f"ccvr-table1-{table}"]
    small = {
        "dataset": "digits", "model": "digits-a", "clients": 2, "num-server-rounds": 1, "local-epochs": 1,
        "augment": "none", "split": "holdout", "data-fraction": 0.4,
    }  # fmt: skip
    scores = {}
    for i, variant in enumerate(compare.parse_variants(recipe.methods)):
        given = dict(part.partition("=")[::2] for part in str(recipe.settings["method-args"]).split())
        args = {**given, **dict(variant.args)} if variant.method == "ccvr" else dict(variant.args)
        flat = {**recipe.settings, **small, "method": variant.method}
        flat["method-args"] = " ".join(f"{k}={v}" for k, v in args.items())
        result = run(out=tmp_path / str(i), **{k.replace("-", "_"): v for k, v in flat.items()})
        scores[variant.label] = result.summary["accuracy"]["global"]["last"]
        assert result.rounds["global_accuracy"].iloc[-1] == result.summary.get("calibration", {}).get(
            "before", scores[variant.label]
        )
        if "oracle" in variant.label:
            found = result.summary["calibration"]
            assert found["before"] == scores["fedavg"], "calibrates the first row's model"
            assert found["oracle"] != found["before"]
        else:
            assert scores[variant.label] == result.rounds["global_accuracy"].iloc[-1]
            assert read_safetensors(result.out / "models" / "last.safetensors")[1]["scalars"] in ({}, {"tukey": False})
    assert len(scores) == 5


def test_the_page_names_every_recipe_and_no_settings_of_its_own() -> None:
    """Table, augmentation, transform, epochs and MOON's weight stand in the recipes alone, so they cannot disagree."""
    page = (Path(__file__).parent.parent / "docs" / "methods" / "ccvr.md").read_text(encoding="utf-8")
    [(first, last)] = re.findall(r"`ccvr-table(\d)-\*` to `ccvr-table(\d)-\*`", page)
    tables = {int(name[10]) for name in recipes.shipped() if name.startswith("ccvr-table")}
    assert tables == set(range(int(first), int(last) + 1))
    for name in re.findall(r"^fedapp compare (ccvr\S+)", page, flags=re.M):
        assert name in recipes.shipped()
    for recipe, weight in (("cifar10-0.1", 5), ("cinic10", 5), ("cifar100", 1)):
        assert f"ccvr(base=moon base.mu={weight})" in recipes.shipped()[f"ccvr-table2-{recipe}"].rows
    assert "MOON 5 (CIFAR-10, CINIC-10) and 1 (CIFAR-100)" in page


# ---- invariants ----------------------------------------------------------------------------------------------------


# ---- edge cases ----------------------------------------------------------------------------------------------------


def test_one_sample_in_all_takes_the_pooled_covariance() -> None:
    """Class 2 of the example: its virtual samples lie around (5, 5) with the spread of the other classes."""
    found = pooled("dtype=float64", CLIENTS)
    z, y, _ = virtual_features(found, 4000, seed=0)
    np.testing.assert_allclose(z[y == 2].mean(axis=0), [5, 5], atol=0.1)
    np.testing.assert_allclose(np.cov(z[y == 2].T), found.pooled_cov(), atol=0.15)
    _, _, state = calibrate("epochs=1", CLIENTS)
    assert state["ccvr"]["calibration"]["classes_single"] == [2]


def test_an_unseen_class_is_left_alone() -> None:
    ctx = context(num_classes=5)
    strategy, before, after = calibrate("weight_decay=0.1", CLIENTS, ctx)
    head = after["ccvr"]["head"]
    assert np.array_equal(head[W][3:], before["model"][W][3:]) and np.array_equal(head[B][3:], before["model"][B][3:])
    assert strategy.report(after, {})["calibration"]["classes_unseen"] == [3, 4]
    seen = {n: a[:3] for n, a in before["model"].items() if n in (W, B)}
    small = dataclasses.replace(context(), initial={"features.0.weight": before["model"]["features.0.weight"], **seen})
    _, _, alone = calibrate("weight_decay=0.1", CLIENTS, small)
    np.testing.assert_allclose(head[W][:3], alone["ccvr"]["head"][W], atol=1e-6)


def test_no_class_at_all_leaves_the_head_and_says_so() -> None:
    strategy, before, after = calibrate("min_count=100", CLIENTS)
    assert np.array_equal(after["ccvr"]["head"][W], before["model"][W])
    found = strategy.report(after, {})["calibration"]
    assert found["samples"] == 0 and found["samples_left_out"] == 10 and found["classes_unseen"] == [0, 1, 2]


@pytest.mark.parametrize("cov", ["full", "diag", "lowrank", "pooled", "sums"])
def test_too_few_samples_stay_with_the_client(cov: str) -> None:
    found = pooled(f"min_count=2 cov={cov}", CLIENTS)
    assert found.counts.tolist() == [3, 4, 0]
    np.testing.assert_allclose(found.means[:2], [[2, 2], [0.75, 5.25]], atol=1e-6)


@pytest.mark.parametrize("args", ["", "dtype=float64", "cov=sums", "cov=lowrank rank=2"])
def test_features_of_lower_rank_than_their_width(args: str) -> None:
    """Width 6, rank 2: covariances are singular, the draws stay in the plane that the features span."""
    rng = np.random.default_rng(7)
    plane, ctx = rng.standard_normal((2, 6)), context(num_classes=2, width=6)
    data: Data = [(rng.standard_normal((9, 2)) @ plane, rng.integers(0, 2, 9)) for _ in range(4)]
    found = pooled(args, data, ctx)
    z, _, jitter = virtual_features(found, 50, seed=0)
    outside = z @ (np.eye(6) - np.linalg.pinv(plane) @ plane)
    assert np.isfinite(z).all() and not jitter
    assert np.abs(outside).max() < 3e-3 * np.abs(z).max()
    _, _, state = calibrate(args, data, ctx)
    assert np.isfinite(state["ccvr"]["head"][W]).all()


# ---- transforms ----------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("transform", ["none", "feature", "sample", "sample-only"])
def test_clients_and_server_use_the_same_calibrated_model(transform: str, tmp_path: Path) -> None:
    """The clients' test splits together are the central test set here: both score one model on the same images."""
    values = {**SMALL, "data_fraction": 1.0}
    result = run(method="ccvr", method_args=f"transform={transform}", rounds=2, out=tmp_path / "run", **values)
    summary, found = result.summary, result.summary["calibration"]
    assert summary["pooled"]["received"] == pytest.approx(found["after"], abs=1e-12)
    assert summary["accuracy"]["global"]["last"] == found["after"]
    assert found["before"] == result.rounds["global_accuracy"].iloc[-1]
    assert found["score"] == "global"
    settings = config.from_flat({"method": "ccvr", "clients": 3, "dataset": "digits", "alpha": 0.3})
    data = tasks.federated(settings, 3)
    central = data.central(torch.device("cpu"))
    assert central is not None
    stored = read_model(result.out / "models" / "last.safetensors", "digits")
    hits = stored.predict(central[0].numpy()).argmax(axis=1) == central[1].numpy()
    assert hits.mean() == pytest.approx(found["after"], abs=1e-12)


def test_where_the_transform_goes() -> None:
    spec = ModelSpec("digits-a", 10, (1, 8, 8), 0)
    z = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    for transform, before_head in (("none", False), ("feature", True), ("sample", True), ("sample-only", False)):
        method, hparams = method_of(f"transform={transform}")
        model = method.client.build_model(spec, hparams)
        plain = FedClient.build_model(spec, None)
        assert torch.equal(model.classify(z), plain.classify(z)), "no transform while the base method trains"
        method.client.configure_model(model, {"tukey": before_head})
        wanted = plain.classify(z.clamp_min(0).sqrt()) if before_head else plain.classify(z)
        torch.testing.assert_close(model.classify(z), wanted)
        assert list(model.state_dict()) == list(plain.state_dict())
        strategy, _, state = calibrate(f"transform={transform} epochs=1", CLIENTS)
        assert strategy.send(state, 0, 0).scalars == {"tukey": before_head}


@pytest.mark.parametrize(("transform", "draws"), [("none", 0), ("feature", 0), ("sample", 1), ("sample-only", 1)])
def test_which_transforms_the_draws_go_through(transform: str, draws: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`none` leaves them alone, and with `feature` the statistics are already those of transformed features."""
    seen: list[int] = []
    original = heads.tukey
    monkeypatch.setattr(heads, "tukey", lambda z: (seen.append(len(z)), original(z))[1])
    calibrate(f"transform={transform} epochs=1 samples=7", CLIENTS)
    assert seen == [3 * 7] * draws


def test_sample_and_sample_only_train_alike_and_feature_asks_for_transformed_statistics() -> None:
    heads = [calibrate(f"transform={t}", CLIENTS)[2]["ccvr"]["head"][W] for t in ("sample", "sample-only", "none")]
    assert np.array_equal(heads[0], heads[1]) and not np.array_equal(heads[0], heads[2])
    settings = config.from_flat({"clients": 3, "dataset": "digits", "method": "ccvr"})
    task = tasks.simulated_task(settings, 0, 3, torch.device("cpu"))
    means = []
    for transform in ("none", "feature"):
        method, hparams = method_of(f"transform={transform} oracle=true")
        client = method.client(task, method, hparams)
        model = client.build_model(task.spec(1), hparams)
        payload = Payload(common=extract(model, model.state_dict()))
        means.append(client.answer_query("statistics", payload, 1)[0]["statistics/mean"])
        z, y = (client.answer_query("features", payload, 1)[0][f"features/{n}"] for n in ("z", "label"))
        np.testing.assert_allclose(means[-1], [z[y == c].mean(axis=0) for c in np.unique(y)], rtol=1e-5, atol=1e-6)
    assert not np.allclose(*means)


# ---- classifier variants and the oracle ----------------------------------------------------------------------------


def test_clsnorm_uses_unit_rows_and_no_bias(tmp_path: Path) -> None:
    method, hparams = method_of("clsnorm=true")
    model = method.client.build_model(ModelSpec("digits-a", 10, (1, 8, 8), 0), hparams)
    assert isinstance(model.head, CCVRHead)
    z = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    w = model.head.weight.detach()
    wanted = torch.stack([torch.stack([row @ phi / phi.norm() for phi in w]) for row in z])
    torch.testing.assert_close(model.classify(z).detach(), wanted)
    F.cross_entropy(model.classify(z), torch.arange(5)).backward()
    slope = model.head.weight.grad
    assert slope is not None and float((slope * w).sum(dim=1).abs().max()) < 1e-6, "along phi_i nothing changes"
    result = run(method="ccvr", method_args="clsnorm=true", rounds=2, out=tmp_path / "run", **SMALL)
    arrays = read_safetensors(result.out / "models" / "last.safetensors")[0]
    assert not arrays[B].any()
    np.testing.assert_allclose(np.linalg.norm(arrays[W], axis=1), 1, atol=1e-6)
    assert result.summary["pooled"]["received"] == pytest.approx(result.summary["calibration"]["after"], abs=1e-12)
    assert result.rounds["train_loss"].iloc[-1] < np.log(10)


def test_clsprox_pulls_the_head_alone() -> None:
    settings = config.from_flat({"clients": 3, "dataset": "digits", "method": "ccvr"})
    task = tasks.simulated_task(settings, 0, 3, torch.device("cpu"))
    losses, slopes = [], []
    for mu in (0.0, 0.5):
        method, hparams = method_of(f"clsprox={mu}")
        client = method.client(task, method, hparams)
        client.restore(1, Payload())
        client.before_training(Payload())
        with torch.no_grad():
            client.model.head.weight += 0.1
            client.model.head.bias -= 0.2
            client.model.features[0].weight += 0.3
        x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(2))
        loss = client.step_loss(Batch(x, torch.arange(6), [x], torch.arange(6)))
        loss.backward()
        losses.append(float(loss.detach()))
        slopes.append([p.grad.clone() for p in client.model.parameters()])
    assert losses[1] - losses[0] == pytest.approx(0.5 / 2 * (640 * 0.1**2 + 10 * 0.2**2), rel=1e-4)
    difference = [float((b - a).abs().max()) for a, b in zip(*slopes)]
    assert difference[:-2] == [0.0] * (len(difference) - 2)
    torch.testing.assert_close(slopes[1][-2] - slopes[0][-2], torch.full((10, 64), 0.5 * 0.1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("base", ["fedavg", "fedprox base.mu=0.4"])
def test_a_round_is_sgd_on_the_bases_loss_and_the_proximal_term(base: str) -> None:
    """Three steps by hand: CE + mu_prox/2 ||w - w^t||^2 + mu/2 ||phi - phi^{t-1}||^2, the last over the head alone."""
    data = handmade.one_batch_task()
    x, y = handmade.pixels(data), data.y_train
    received = handmade.model_like(data)
    method, hparams = method_of(f"base={base} clsprox=0.7")

    def loss(model: SplitModel) -> torch.Tensor:
        total = handmade.cross_entropy(model(x), y)
        for name, p in model.named_parameters():
            gap = ((p - received.get_parameter(name).detach().double()) ** 2).sum()
            total = total + (0.7 * name.startswith("head.") + 0.4 * ("mu" in base)) / 2 * gap
        return total

    arrays, n, metrics = method.client(data, method, hparams).train_round(handmade.whole(received), 1)
    assert n == 12 and metrics["steps"] == 3
    handmade.assert_close(arrays, handmade.descend(received, loss, data), atol=5e-6)


@pytest.mark.full
def test_the_oracle_is_reported_beside_and_changes_nothing(tmp_path: Path) -> None:
    plain = run(method="ccvr", rounds=2, out=tmp_path / "plain", **SMALL)
    both = run(method="ccvr", method_args="oracle=true", rounds=2, out=tmp_path / "both", **SMALL)
    a, b = plain.summary["calibration"], both.summary["calibration"]
    assert {k: b[k] for k in a} == a
    assert b["oracle_deployable"] is False and b["oracle_samples"] == b["samples"] and 0 <= b["oracle"] <= 1
    assert "bytes_up_query.features" not in plain.summary
    assert both.summary["bytes_up_query.features"] == pytest.approx(b["samples"] / 3 * (64 * 4 + 8))
    assert any("real features" in w for w in both.summary["warnings"])
    pd.testing.assert_frame_equal(deterministic(plain.final), deterministic(both.final), check_exact=True)


def test_the_oracle_is_the_head_trained_on_all_features() -> None:
    data = random_data(4, 3, 2, seed=8)
    found: dict[int, float | None] = {}
    for most in (0, 5):
        seen: list[np.ndarray] = []
        ctx = context()
        ctx = dataclasses.replace(ctx, score=lambda arrays, scalars, seen=seen: seen.append(arrays[W]) or 0.5)
        strategy, before, after = calibrate(f"oracle=true oracle_samples={most} epochs=5", data, ctx)
        z, y = together(data)
        if most:
            assert after["ccvr"]["calibration"]["oracle_samples"] == np.minimum(np.bincount(y), most).sum()
        else:
            order = lambda epoch: sampling.rng(0, "ccvr-oracle-order", epoch)  # noqa: E731
            wanted = retrain(before["model"], z, y, strategy.settings, order)
            np.testing.assert_array_equal(seen[2], wanted[W])
        found[most] = after["ccvr"]["calibration"]["oracle"]
    assert found == {0: 0.5, 5: 0.5}


def test_a_client_gives_no_features_unless_the_run_is_an_oracle() -> None:
    settings = config.from_flat({"clients": 3, "dataset": "digits", "method": "ccvr"})
    task = tasks.simulated_task(settings, 0, 3, torch.device("cpu"))
    method, hparams = method_of()
    client = method.client(task, method, hparams)
    payload = Payload(common=extract(client.build_model(task.spec(1), hparams), client.down_names()))
    with pytest.raises(ValueError, match=r"cannot answer 'query\.features'"):
        client.answer_query("features", payload, 1)
    assert not method.allows("features/z") and method.allows("statistics/mean")
    assert method_of("oracle=true")[0].allows("features/z")


# ---- what travels, composition, errors -----------------------------------------------------------------------------


def test_sums_take_two_questions(tmp_path: Path) -> None:
    result = run(method="ccvr", method_args="cov=sums", rounds=1, out=tmp_path / "run", **SMALL)
    full = run(method="ccvr", method_args="dtype=float64", rounds=1, out=tmp_path / "full", **SMALL)
    assert result.summary["bytes_up_query.totals"] == 10 * (8 + 64 * 8)
    assert result.summary["bytes_up_query.statistics"] == 10 * (8 + 64 * 8 + 2080 * 8)
    assert result.summary["calibration"]["after"] == full.summary["calibration"]["after"]


def test_without_a_central_test_set_the_clients_scores_stand_in(tmp_path: Path) -> None:
    plain = run(method="fedavg", rounds=1, split="merged", out=tmp_path / "plain", **SMALL)
    result = run(method="ccvr", rounds=1, split="merged", out=tmp_path / "run", **SMALL)
    found = result.summary["calibration"]
    assert found["score"].startswith("received")
    assert found["before"] == pytest.approx(plain.summary["accuracy"]["received"]["last"], abs=1e-12)
    assert found["after"] == pytest.approx(result.summary["accuracy"]["received"]["last"], abs=1e-12)
    assert json.loads((result.out / "summary.json").read_text())["calibration"] == found


@pytest.mark.full
def test_it_repairs_the_head_of_a_skewed_federation(tmp_path: Path) -> None:
    """Ten clients, Dirichlet 0.1, three rounds: FedAvg's head is biased, its features are not."""
    result = run(method="ccvr", alpha=0.1, rounds=3, clients=10, method_args="oracle=true", out=tmp_path / "run")
    found = result.summary["calibration"]
    assert found["before"] < found["after"] and found["before"] < found["oracle"]
    assert found["head_norm_ratio"][1] < found["head_norm_ratio"][0]


@pytest.mark.parametrize("base", BASES)
def test_composition(base: str) -> None:
    method, hparams = method_of(f"base={base}")
    inner = registry.get(base)
    assert issubclass(method.client, CCVRClient) and issubclass(method.client, inner.client)
    assert issubclass(method.strategy, CCVR) and issubclass(method.strategy, inner.strategy)
    assert method.defaults == inner.defaults and method.resolve is None and method.id == "ccvr"
    again = registry.resolve(registry.get("ccvr"), hparams)
    assert again.client is method.client and again.strategy is method.strategy
    assert method.client.needs_state == inner.client.needs_state


def test_the_base_checks_the_replies_of_its_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Maths, "check", lambda *given: "no model")
    method, hparams = method_of()
    made = method.strategy(method, hparams)
    for kind, told in (("train", "no model"), ("query.statistics", None)):
        assert made.check({}, Reply(0, 1, {}, {}, kind=kind)) == told


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("base=lgfedavg", "lgfedavg does not leave one: take base=fedavg, base=fedprox, base=fedavgm or base=moon"),
        ("base=local", "local does not leave one"),
        ("base=cwfedavg", "cwfedavg does not leave one"),
        ("base=ccvr", "ccvr does not leave one"),
        ("base=fedavgn", "unknown method 'fedavgn', did you mean 'fedavg'"),
        ("base.mu=1", "fedavg has no hyperparameter 'base.mu'. fedavg takes no hyperparameters"),
        (
            "base=moon base.nu=1",
            "moon has no hyperparameter 'base.nu'. moon takes: base.mu (default 1.0), base.tau (default 0.5)",
        ),
        ("base=fedavgm base.momentun=1", "did you mean 'momentum'"),
        ("base=fedprox base.mu=-1", "base.mu = '-1'"),
        ("sample=10", "did you mean 'samples'"),
    ],
)
def test_bad_requests_are_found_before_training(args: str, message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        method_of(args)
    assert message in str(caught.value)


def test_different_architectures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="one architecture"):
        run(method="ccvr", model="digits-a,digits-b", out=tmp_path / "run", clients=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update({"statistics/count": a["statistics/count"] * 0}), "positive"),
        (lambda a: a.update({"statistics/count": a["statistics/count"] * 9}), "from a client of 5"),
        (lambda a: a.update({"statistics/ids": np.array([0, 3])}), "class ids"),
    ],
)
def test_a_bad_answer_is_dropped_with_its_reason(change: Callable[[Arrays], Any], message: str) -> None:
    strategy, _ = server("")
    found = gaussian.to_arrays(gaussian.moments(np.array(CLIENTS[0][0], float), np.array(CLIENTS[0][1]), 3))
    arrays = {f"statistics/{n}": a for n, a in found.items()}
    assert refusal(strategy, {}, Reply(0, 5, dict(arrays), {}, kind="query.statistics")) is None
    change(arrays)
    assert message in (refusal(strategy, {}, Reply(0, 5, arrays, {}, kind="query.statistics")) or "")


def test_totals_of_more_samples_than_the_client_has_are_dropped() -> None:
    strategy, _ = server("cov=sums")
    for samples, message in ((5, None), (4, "sums of 5 samples from a client of 4")):
        arrays = {"statistics/count": np.array([3, 2, 0]), "statistics/sum": np.zeros((3, 2))}
        assert refusal(strategy, {}, Reply(0, samples, arrays, {}, kind="query.totals")) == message


def test_features_that_do_not_fit_are_refused() -> None:
    strategy, _ = server("oracle=true")
    bad = {"features/z": np.zeros((2, 2), np.float32), "features/label": np.array([0, 3])}
    assert refusal(strategy, {}, Reply(0, 2, bad, {}, kind="query.features")) == "labels must lie in 0..2"
    half = Reply(0, 2, {"features/z": bad["features/z"]}, {}, kind="query.features")
    assert "features must be" in (refusal(strategy, {}, half) or "")


def test_a_run_result_names_what_it_did(tmp_path: Path) -> None:
    result: RunResult = run(method="ccvr", rounds=1, out=tmp_path / "run", method_args="min_count=4", **SMALL)
    found = result.summary["calibration"]
    assert found["clients"] == 3 and found["deployable"] is True and found["virtual_samples"] == 1000
    assert found["samples_left_out"] > 0 and result.summary["method"] == "ccvr"
