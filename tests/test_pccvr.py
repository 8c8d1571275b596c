"""Personal CCVR: worked numbers, Bayes' rule as the oracle, its controls, and that shares never leave a client."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from clients.pccvr import PersonalCCVRClient
from clients.shares import shares
from fedapp import config, registry
from fedapp.engines import runner
from fedapp.engines.local import RunResult
from fedapp.learning.state import read_safetensors
from fedapp.method import Method, Payload, Reply
from fedapp.models import selection
from fedapp.results import report, tables
from fedapp.results.runs import UNADJUSTED
from fedapp.tasks import simulated
from tests.handmade import deterministic, one_batch_task

Tiny = Callable[..., RunResult]
W, B = "head.weight", "head.bias"


def method_of(args: str = "") -> tuple[Method, Any]:
    outer = registry.get("pccvr")
    hparams = registry.parse_args(outer, args)
    return registry.resolve(outer, hparams), hparams


def client_of(args: str = "", counts: tuple[int, ...] = (30, 9, 1)) -> tuple[PersonalCCVRClient, Payload]:
    """A client with so many images of each class, and a payload with the calibrated head."""
    method, hparams = method_of(args)
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    task = dataclasses.replace(one_batch_task(sum(counts), len(counts)), y_train=labels)
    client = method.client(task, method, hparams)
    model = client.build_model(task.spec(3), hparams)
    return client, Payload(common=selection.everything(model), scalars={"tukey": False, "personal": True})


def moved(args: str = "", counts: tuple[int, ...] = (30, 9, 1), total: np.ndarray | None = None) -> np.ndarray:
    """What is added to the bias where the model is scored, but for a constant; `total` is what the server sends."""
    client, payload = client_of(args, counts)
    payload.common.update({} if total is None else {"prior/counts": total})
    client.evaluate_round(payload, 2, balanced=False, train=True)
    found = client.model.head.bias.detach().numpy().astype(float) - payload.common[B]
    assert np.array_equal(client.model.head.weight.detach().numpy(), payload.common[W])
    return found - found.mean()


# ---- worked numbers and the oracle ---------------------------------------------------------------------------------


def test_the_decision_of_the_worked_example() -> None:
    p = shares(np.array([30, 9, 1]), 1.0)
    np.testing.assert_allclose(p, [0.720930, 0.232558, 0.046512], atol=1e-6)
    adjusted = np.array([1, 1.2, 0.5]) + np.log(p)
    np.testing.assert_allclose(adjusted, [0.672787, -0.258615, -2.568053], atol=1e-6)
    np.testing.assert_allclose(moved(), np.log(p) - np.log(p).mean(), atol=1e-6)
    np.testing.assert_allclose(moved("tau=0.5"), 0.5 * (np.log(p) - np.log(p).mean()), atol=1e-6)


def test_probabilities_are_those_of_equal_classes_times_the_shares() -> None:
    p = shares(np.array([30, 9, 1]), 0.5)
    logits = np.random.default_rng(0).normal(size=(20, 3))
    equal = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    new = np.exp(logits + moved("smooth=0.5"))
    wanted = equal * p / (equal * p).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(new / new.sum(axis=1, keepdims=True), wanted, atol=1e-6)


def test_a_head_for_the_pooled_shares_is_adjusted_from_these() -> None:
    total = np.array([40, 50, 10])
    wanted = np.log(shares(np.array([30, 9, 1]), 1)) - np.log(shares(total, 1))
    found = moved("mc_mode=proportional", total=total)
    np.testing.assert_allclose(found, wanted - wanted.mean(), atol=1e-6)
    alone = moved("mc_mode=proportional", total=np.array([30, 9, 1]))
    np.testing.assert_allclose(alone, 0, atol=1e-6)


# ---- reductions and controls ---------------------------------------------------------------------------------------


def test_without_strength_or_with_equal_counts_nothing_moves() -> None:
    assert not moved("tau=0").any()
    np.testing.assert_allclose(moved(counts=(7, 7, 7)), 0, atol=1e-6)


def test_the_controls_move_as_much_by_other_shares() -> None:
    own, shifted = moved(), moved("shares=shifted")
    np.testing.assert_allclose(shifted, np.roll(own, 1), atol=1e-6)
    total = np.array([5, 5, 90])
    p = np.log(shares(total, 1))
    np.testing.assert_allclose(moved("shares=pooled", total=total), p - p.mean(), atol=1e-6)


def test_only_a_calibrated_head_is_adjusted() -> None:
    client, payload = client_of()
    payload.scalars["personal"] = False
    metrics = client.evaluate_round(payload, 2, train=True)
    assert np.array_equal(client.model.head.bias.detach().numpy(), payload.common[B])
    assert not any(name.startswith("unadjusted") for name in metrics)


@pytest.mark.parametrize(("args", "sent"), [("", False), ("mc_mode=proportional", True), ("shares=pooled", True)])
def test_the_counts_travel_only_where_clients_need_them(args: str, sent: bool) -> None:
    method, hparams = method_of(args)
    payload = method.strategy(method, hparams).prior({"personal": True, "counts": np.ones(3)})
    assert ("prior/counts" in payload.common) == sent


def test_a_newcomer_is_scored_on_the_model_adjusted_to_its_own_shares() -> None:
    client, payload = client_of()
    client.meet(payload, 2, "unseen_received", 0)
    found = client.model.head.bias.detach().numpy().astype(float) - payload.common[B]
    np.testing.assert_allclose(found - found.mean(), moved(), atol=1e-6)


# ---- what leaves a client ------------------------------------------------------------------------------------------


def test_a_server_that_asks_for_training_on_an_adjusted_head_gets_one_without_shares() -> None:
    """Two clients of the same images in a round: what is sent does not depend on whether the scalar was there."""
    sent = []
    for personal in (True, False):
        client, payload = client_of()
        payload.scalars["personal"] = personal
        sent.append(client.train_round(payload, 2)[0])
    assert all(np.array_equal(a, sent[1][n]) for n, a in sent[0].items())


@pytest.mark.usefixtures("no_figures")
def test_it_sends_what_ccvr_sends_and_is_ccvr_but_for_the_bias(
    tiny: Tiny, replies: list[tuple[str, Reply]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Partial participation, missing classes; the personal models hold the adjusted bias, and tables name `global`."""
    common = {"alpha": 0.2, "fraction_train": 0.67, "rounds": 1, "final_training": False, "keep_models": True}
    plain = tiny(method="ccvr", method_args="epochs=3 samples=20", **common)
    theirs = [(k, sorted(r.arrays), r.bytes_up) for k, r in replies]
    replies.clear()
    found = tiny(method="pccvr", method_args="epochs=3 samples=20", **common)
    assert [(k, sorted(r.arrays), r.bytes_up) for k, r in replies] == theirs
    pd.testing.assert_frame_equal(deterministic(plain.rounds), deterministic(found.rounds), check_exact=True)
    a, b = (read_safetensors(r.out / "models" / "last.safetensors")[0] for r in (plain, found))
    assert all(np.array_equal(a[n], b[n]) for n in a), "the server's model is CCVR's"
    assert plain.summary["accuracy"]["global"] == found.summary["accuracy"]["global"]
    told: dict[str, list[str]] = {}
    for run in (plain, found):
        runner.print_summary(run.summary)
        told[run.method] = [
            " ".join(capsys.readouterr().out.split()),
            tables.meaning([run]),
            report.write(run.out).read_text(),
        ]
    assert all(UNADJUSTED in text for text in told["pccvr"]) and not any(UNADJUSTED in text for text in told["ccvr"])
    said = found.summary["personal"]
    assert said["unadjusted"]["local"] == pytest.approx(plain.summary["accuracy"]["received"]["last"], abs=1e-12)
    assert said["unadjusted"]["balanced"] == pytest.approx(plain.summary["accuracy"]["received"]["balanced"], abs=1e-12)
    assert said["adjusted"]["local"] == pytest.approx(found.summary["accuracy"]["received"]["last"], abs=1e-12)
    settings = config.from_flat(config.read_toml(found.out / "config.toml"))
    for client in range(3):
        task = simulated.simulated_task(settings, client, 3, torch.device("cpu"))
        path = next(Path(found.out).rglob(f"{client}/received.safetensors"))
        kept = read_safetensors(path)[0]
        gap = kept[B].astype(float) - a[B]
        wanted = np.log(shares(task.class_counts(), 1)) + np.log(10)
        np.testing.assert_allclose(gap, wanted, atol=1e-5)
        assert np.array_equal(kept[W], a[W])


def test_the_server_sends_the_counts_of_all_clients_where_they_are_needed(tiny: Tiny) -> None:
    args = "epochs=1 samples=5 shares=pooled"
    found = tiny(method="pccvr", method_args=args, rounds=1, alpha=0.2, final_training=False, keep_models=True)
    settings = config.from_flat(config.read_toml(found.out / "config.toml"))
    counts = [simulated.simulated_task(settings, k, 3, torch.device("cpu")).class_counts() for k in range(3)]
    sent = read_safetensors(found.out / "models" / "last.safetensors")[0][B].astype(float)
    kept = read_safetensors(next(Path(found.out).rglob("1/received.safetensors")))[0][B].astype(float)
    np.testing.assert_allclose(kept - sent, np.log(shares(np.sum(counts, axis=0), 1)) + np.log(10), atol=1e-5)
