"""What a score means: over all clients, at one age, the same number in every table and at the end of every curve."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fedapp import config, registry
from fedapp.core.heads import tukey
from fedapp.data import partitions
from fedapp.engines import runner
from fedapp.errors import BadRequest
from fedapp.experiments import compare
from fedapp.learning.evaluation import evaluate
from fedapp.learning.metrics import client_row, summarise
from fedapp.learning.state import read_safetensors
from fedapp.models import selection
from fedapp.results.directory import accuracy_summary
from fedapp.results.runs import RunResult
from fedapp.tasks import simulated
from fedapp.transport.local_grid import LocalGrid
from fedapp.transport.traffic import RoundFailed
from tests.handmade import deterministic

Tiny = Callable[..., RunResult]

METHODS = ["local", "fedavg", "fedclassavg", "cwfedavg", "fedgh", "fedproto", "ktpfl", "moon", "fedfomo", "ifca"]


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_an_evaluation_of_all_clients_measures_what_the_next_round_measures(method: str, tiny: Tiny) -> None:
    """With all clients in every round the evaluation after round t and round t + 1 see the same models, bit for bit."""
    result = tiny(method=method, rounds=3, evaluate_every=1)
    columns = [f"{p}_{what}" for p in ("received", "trained") for what in ("accuracy", "loss", "accuracy_pooled")]
    after, during = result.evaluations[columns], result.rounds[columns][1:]
    pd.testing.assert_frame_equal(after, during.reset_index(drop=True), check_exact=True)


DELIVERED = {
    "ccvr", "fedavg", "fedprox", "fedavgm", "moon", "fedncm", "fed3r", "lda", "qda", "fedcof", "pccvr", "cfl", "ifca",
    "fednh", "feduv", "scaffold", "fedyogi",
}  # fmt: skip
"""Methods whose product is the model that the server sends. All others are judged after training at the client."""


def test_every_method_states_its_headline() -> None:
    first = {name: registry.get(name).headlines[0] for name in registry.ORDER}
    found = {name for name, score in first.items() if score == "received"}
    assert found == DELIVERED, f"DELIVERED of this file differs: {found ^ DELIVERED}"
    hparams = registry.parse_args(registry.get("ccvr"), "base=fedprox")
    assert registry.resolve(registry.get("ccvr"), hparams).headlines == ("received", "tuned", "trained", "global")


def test_the_headline_of_a_repaired_head_is_the_delivered_model(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    result = tiny(method="ccvr", rounds=1)
    headline = result.summary["headline"]
    assert (headline["score"], headline["value"]) == ("received", result.final["received_accuracy"].mean())
    assert "before local training" in headline["point"]
    runner.print_summary(result.summary)
    assert f"headline: received {100 * headline['value']:.1f} %" in capsys.readouterr().out
    only = tiny(method="ccvr", rounds=1, protocols="trained").summary["headline"]
    assert only["score"] == "trained", "it is the next score where the first was not measured"


@pytest.mark.parametrize("method", ["fedavg", "fedproto", "local"])
def test_with_sampled_clients_the_headline_is_over_all_of_them(method: str, tiny: Tiny) -> None:
    result = tiny(method=method, clients=5, fraction_train=0.4, rounds=3)
    assert list(result.rounds["clients"]) == [2, 2, 2] and len(result.final) == 5
    trained = result.summary["accuracy"]["trained"]
    assert trained["last"] == result.final["trained_accuracy"].mean()
    headline = result.summary["headline"]
    assert headline["score"] == ("received" if method == "fedavg" else "trained") and headline["clients"] == 5
    assert headline["value"] == result.summary["accuracy"][headline["score"]]["last"]
    assert ("one more local training" in headline["point"]) == (method != "fedavg")
    assert trained["participants"] == result.rounds["trained_accuracy"].iloc[-1] != trained["last"]
    assert trained["best"] == trained["last"], "no round counted all clients"
    assert result.curve("trained")["accuracy"].iloc[-1] == trained["last"]
    assert list(result.curve("trained")["clients"]) == [2, 2, 2, 5]


def test_the_headline_is_a_fine_tuned_average(tiny: Tiny) -> None:
    """FedAvg's `trained` in final.csv by hand: the global model, trained by the client's own loop in the next round."""
    result = tiny(method="fedavg", clients=3, fraction_train=0.67, rounds=2)
    settings = config.from_flat(result.flat)
    method, hparams = settings.method_and_hparams()
    arrays, _ = read_safetensors(result.out / "models" / "last.safetensors")
    for _, row in result.final.iterrows():
        task = simulated.simulated_task(settings, int(row["client"]), 3, torch.device("cpu"))
        client = method.client(task, method, hparams)
        client.round = 3
        client.model = client.build_model(task.spec(0), hparams)
        selection.merge(client.model, arrays)
        client.run_phases()
        scores = evaluate(client.model, task.x_test, task.y_test, task.inputs, task.num_classes)
        assert row["trained_correct"] == scores.correct.sum() and row["trained_total"] == scores.n


@pytest.mark.parametrize("method", ["fedclassavg", "fedavg"])
def test_the_last_training_leaves_nothing_behind(method: str, tiny: Tiny) -> None:
    runs = {flag: tiny(method=method, rounds=2, final_training=flag) for flag in (True, False)}
    keep = [c for c in runs[True].rounds.columns if not c.endswith("seconds")]
    pd.testing.assert_frame_equal(runs[True].rounds[keep], runs[False].rounds[keep], check_exact=True)
    states = [sorted((r.out / "state" / "run").rglob("*.0*.safetensors")) for r in runs.values()]
    kept = [(p.parent.name, p.name.split(".")[1]) for p in states[0]]
    assert kept == [(str(k), f"{r:06d}") for k in range(3) for r in (1, 2)]
    for one, other in zip(*states):
        a, b = read_safetensors(one)[0], read_safetensors(other)[0]
        assert list(a) == list(b) and all(np.array_equal(a[n], b[n]) for n in a)
    stale = runs[False]
    assert stale.final["trained_accuracy"].mean() == pytest.approx(stale.rounds["trained_accuracy"].iloc[-1])
    assert runs[True].final["trained_loss"].mean() != stale.final["trained_loss"].mean()
    point = stale.summary["headline"]["point"]
    assert ("last trained" if method == "fedclassavg" else "before local training") in point


def test_curves_end_at_the_tables_and_stand_at_completed_rounds(tiny: Tiny) -> None:
    result = tiny(method="fedavg", rounds=3)
    for p in ("received", "trained", "global"):
        curve = result.curve(p)
        assert curve["accuracy"].iloc[-1] == result.score(p)
        assert list(curve["completed"]) == ([1, 2, 3] if p == "global" else [0, 1, 2, 3])
    moved = result.summary["bytes_up"] * 3 + result.summary["bytes_down"] * 3
    assert list(result.curve("trained")["bytes"]) == [0, moved, 2 * moved, 3 * moved]
    sampled = tiny(method="fedavg", rounds=3, clients=4, fraction_train=0.25, evaluate_every=1)
    assert (sampled.rounds["bytes_down"] == result.summary["bytes_down"]).all(), "bytes are per client"
    assert list(sampled.curve("received")["completed"]) == [1, 2, 3]
    assert list(sampled.curve("received")["clients"]) == [4, 4, 4]


def test_tables_do_not_depend_on_the_order_of_arrival(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tiny(method="local")
    pushed = LocalGrid.push_messages
    monkeypatch.setattr(LocalGrid, "push_messages", lambda grid, sent: pushed(grid, list(sent)[::-1])[::-1])
    second = tiny(method="local")
    for name in ("clients", "final"):
        one, other = (deterministic(pd.read_csv(run.out / f"{name}.csv")) for run in (first, second))
        pd.testing.assert_frame_equal(one, other, check_exact=True)


def test_best_counts_only_points_with_all_clients() -> None:
    rounds = pd.DataFrame({
        "clients": [4, 2, 4], "trained_accuracy": [0.5, 0.99, 0.7], "trained_accuracy_pooled": [0.6, 0.99, 0.65],
    })  # fmt: skip
    evaluations = pd.DataFrame({
        "clients": [4, 3], "trained_accuracy": [0.8, 0.98], "trained_accuracy_pooled": [0.55, 0.98],
    })  # fmt: skip
    final = {"trained_accuracy": 0.75, "trained_accuracy_pooled": 0.62, "trained_accuracy_std": 0.1}
    found = accuracy_summary(rounds, evaluations, final, ("trained",), 4)["trained"]
    assert found["best"] == 0.8 and found["best_pooled"] == 0.65 and found["last"] == 0.75
    assert found["participants"] is None
    assert accuracy_summary(rounds[:2], evaluations, final, ("trained",), 4)["trained"]["participants"] == 0.99


# ---- validation ------------------------------------------------------------------------------------------------------


def test_validation_images_are_taken_from_training_and_scored(tiny: Tiny) -> None:
    result = tiny(method="fedavg", clients=3, rounds=1, validation=0.25)
    settings = config.from_flat(result.flat)
    without = simulated.federated(settings.replaced(validation=0.0), 3).partition
    partition = simulated.federated(settings, 3).partition
    for before, now in zip(without.clients, partition.clients):
        assert np.array_equal(before.test, now.test)
        assert np.array_equal(before.train, np.sort(np.r_[now.train, now.validation]))
        assert len(now.validation) == int(0.25 * len(before.train) + 0.5)
    assert partitions.Partition.load(result.out / "partition.npz").hash == partition.hash != without.hash
    assert json.loads((result.out / "data_card.json").read_text())["validation"] == sum(
        len(c.validation) for c in partition.clients
    )
    by_client = result.final["trained_validation"]
    assert result.score("trained", "validation") == by_client.mean() and by_client.between(0, 1).all()
    sizes = np.array([len(c.validation) for c in partition.clients])
    assert np.allclose(by_client * sizes, np.round(by_client * sizes)), "shares of the validation images"
    assert list(result.final["num_samples"]) == [len(c.train) for c in partition.clients]


def test_one_image_trains_and_two_are_divided() -> None:
    rows = np.arange(3)
    split = partitions.ClientSplit
    whole = partitions.Partition("", "", (split(rows[:1], rows[:0]), split(rows[1:], rows[:0])), "", {})
    for share in (0.01, 0.99):
        one, two = partitions.hold_out(whole, share, 0).clients
        assert (len(one.train), len(one.validation), len(two.train), len(two.validation)) == (1, 0, 1, 1)


def test_partitions_without_validation_keep_their_hash(tmp_path: Path) -> None:
    data = simulated.federated(config.from_flat({"dataset": "digits"}), 4)
    plain = data.partition
    held = partitions.hold_out(plain, 0.1, 0)
    back = tuple(
        replace(c, train=np.sort(np.r_[c.train, c.validation]), validation=c.validation[:0]) for c in held.clients
    )
    assert partitions._hash(back) == plain.hash != held.hash
    held.save(tmp_path / "p.npz")
    loaded = partitions.Partition.load(tmp_path / "p.npz")
    assert all(np.array_equal(a.validation, b.validation) for a, b in zip(loaded.clients, held.clients))


def test_tukeys_root_can_be_trained_through() -> None:
    z = torch.tensor([-1.0, 0.0, 4.0], requires_grad=True)
    tukey(z).sum().backward()
    assert tukey(z).tolist() == [0.0, 0.0, 2.0]
    assert z.grad is not None and z.grad.tolist() == [0.0, 0.0, 0.25]


def test_calibrated_heads_with_a_transform_can_be_trained(tiny: Tiny) -> None:
    result = tiny(method="ccvr", rounds=1, method_args="transform=sample epochs=2 samples=20")
    assert np.isfinite(result.final["trained_loss"]).all()


# ---- columns ---------------------------------------------------------------------------------------------------------


def test_a_reply_without_the_methods_number_does_not_change_the_columns(tiny: Tiny) -> None:
    whole, without = ({"cross-entropy": 0.5}, {})
    rows = [client_row(m, ["trained"], columns=("cross-entropy",)) for m in (whole, without)]
    assert list(rows[0]) == list(rows[1]) and summarise(rows, ["trained"], ["cross-entropy"])["cross_entropy"] == 0.5
    assert {"cross_entropy"} <= set(tiny(method="cwfedavg", rounds=1).rounds)
    assert "cross_entropy" not in tiny(method="fedavg", rounds=1).rounds


def test_a_run_of_an_earlier_version_keeps_its_columns(tiny: Tiny) -> None:
    result = tiny(method="cwfedavg", rounds=1)
    for name in ("rounds.csv", "clients.csv"):
        pd.read_csv(result.out / name).drop(columns="cross_entropy").to_csv(result.out / name, index=False)
    rest = tiny(resume=result.out, rounds=2)
    assert list(rest.rounds["round"]) == [1, 2] and "cross_entropy" not in rest.rounds


def test_a_metric_that_nobody_declared_is_refused_with_what_to_do(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from clients.base import FedClient

    def seconds(self: FedClient, _: Any) -> tuple[Any, dict[str, Any]]:
        return {}, {"my-seconds": 1.0} if self.task.client == 0 else {}

    monkeypatch.setattr(FedClient, "after_training", seconds)
    with pytest.raises(RoundFailed, match=r"client 0: unexpected metric 'my-seconds': .* Method\.columns"):
        tiny(method="fedavg", rounds=2)


def test_a_final_reply_that_is_dropped_is_not_counted(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from clients.base import FedClient

    whole = FedClient.train_to_score

    def broken(self: FedClient, *args: object, **more: object) -> dict[str, object]:
        if self.task.client == 1:
            raise RuntimeError("no memory")
        return whole(self, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(FedClient, "train_to_score", broken)
    result = tiny(method="fedavg", rounds=1, min_replies=0.5)
    headline = result.summary["headline"]
    assert (headline["clients"], headline["of"]) == (2, 3) and len(result.final) == 2
    assert headline["value"] == result.final["received_accuracy"].mean()


def test_nobody_trains_for_a_score_that_is_not_measured(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from clients.base import FedClient

    monkeypatch.setattr(FedClient, "train_to_score", lambda *args, **more: pytest.fail("it trains"))
    result = tiny(method="fedavg", rounds=1, protocols="received,global", fraction_train=0.5)
    assert "trained_accuracy" not in result.final and not announced(result)


def announced(result: RunResult) -> list[str]:
    texts = (json.loads(line).get("text", "") for line in (result.out / "progress.jsonl").read_text().splitlines())
    return [text for text in texts if "train again for their scores" in text]


def test_the_last_training_of_sampled_clients_is_announced_with_the_way_to_skip_it(tiny: Tiny) -> None:
    settings = {"method": "fedavg", "rounds": 2, "fraction_train": 0.5}
    (text,) = announced(tiny(**settings))
    assert text.startswith("all 3 clients") and "set final-training = false to skip this" in text
    assert not announced(tiny(**settings, final_training=False))


def test_scores_of_the_models_as_last_trained_end_their_curve_too(tiny: Tiny) -> None:
    result = tiny(method="fedavg", clients=5, fraction_train=0.4, rounds=3, final_training=False)
    assert (
        result.curve("trained")["accuracy"].iloc[-1]
        == result.score("trained")
        == result.final["trained_accuracy"].mean()
    )


def test_the_last_score_of_an_earlier_versions_run_is_over_all_its_clients(tiny: Tiny) -> None:
    result = tiny(method="fedavg", clients=5, fraction_train=0.4, rounds=1, final_training=False)
    summary = json.loads((result.out / "summary.json").read_text())
    summary["accuracy"]["trained"]["last"] = 0.123  # version 0.1: the last round's participants
    (result.out / "summary.json").write_text(json.dumps(summary))
    assert RunResult(result.out).score("trained") == result.final["trained_accuracy"].mean()


def test_runs_of_another_version_are_not_counted_and_resumed_with_a_warning(tiny: Tiny, tmp_path: Path) -> None:
    result = tiny(method="fedavg", rounds=1)
    versions = json.loads((result.out / "versions.json").read_text())
    (result.out / "versions.json").write_text(json.dumps({**versions, "fedapp": "0.1.0"}))
    with pytest.raises(BadRequest, match=r"holds a run of fedapp 0\.1\.0"):
        compare.standing(config.from_flat(RunResult(result.out).flat).replaced(out=str(result.out)))
    rest = tiny(resume=result.out, rounds=2)
    assert any("fedapp 0.1.0 began this run" in w for w in rest.summary["warnings"])


@pytest.mark.parametrize(("method", "buffers"), [("fedavg", "local"), ("ccvr", "drop"), ("fedavg", "global")])
def test_no_score_is_of_a_network_without_its_statistics(method: str, buffers: str, tiny: Tiny) -> None:
    net = "tests.own_nets:Normed"
    run = tiny(method=method, buffers=buffers, model=net, evaluate_every=1, metrics="auc", patience=5, unseen="1")
    whole = buffers == "global"
    tables = (run.summary["accuracy"], run.summary["metrics"], run.protocols)
    assert all(("global" in table) == whole for table in tables)
    assert any(name.startswith("global") for name in run.rounds) == whole
    told = [text for text in run.summary["warnings"] if text.startswith(f"no score global: with buffers = {buffers} ")]
    assert len(told) == (0 if whole else 1) and run.headline == "received"
    assert (run.out / "models" / "best.safetensors").is_file()
