"""Clients that take no part in the training: no method learns anything of them, and every method has an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from clients.base import FedClient
from fedapp import config
from fedapp.cli import app
from fedapp.data import partitions
from fedapp.engines.local import run
from fedapp.errors import BadRequest
from fedapp.learning.evaluation import evaluate
from fedapp.learning.state import read_safetensors
from fedapp.learning.task import Task
from fedapp.method import Payload
from fedapp.models import selection
from fedapp.results import report
from fedapp.results.runs import RunResult
from fedapp.tasks import simulated
from tests.matrix import methods

Tiny = Callable[..., RunResult]
POINTS = ("unseen_received", "unseen_trained@2", "unseen_local@2")


def reproducible(table: pd.DataFrame) -> pd.DataFrame:
    return table[[c for c in table if not c.endswith("seconds")]]


@pytest.mark.full
@pytest.mark.parametrize("method", methods())
def test_every_method_answers_a_newcomer_and_learns_nothing_of_it(
    method: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other labels at the unseen clients change their own scores after training, and nothing else."""
    common = {"method": method, "clients": 5, "fraction_train": 0.67, "unseen": "1,4", "metrics": "accuracy,ece"}
    result = tiny(**common)
    assert list(result.unseen["client"]) == [1, 4] and list(result.final["client"]) == [0, 2, 3]
    assert set(result.clients["client"]) <= {0, 2, 3}
    assert ("unseen_tuned_accuracy" in result.unseen) == ("tuned" in result.protocols)
    for point in (*POINTS, *(["unseen_tuned"] if "tuned" in result.protocols else [])):
        assert result.unseen[[f"{point}_accuracy", f"{point}_loss", f"{point}_ece"]].notna().all(axis=None)
        assert result.summary["metrics"][point]["accuracy"]["mean"] == result.unseen[f"{point}_accuracy"].mean()
    assert result.summary["unseen"] == [1, 4] and result.summary["clients"] == 3
    assert result.summary["headline"]["of"] == result.summary["headline"]["clients"] == 3

    whole = simulated.simulated_task

    def relabelled(settings: Any, client: int, *rest: Any) -> Task:
        task = whole(settings, client, *rest)
        return replace(task, y_train=(task.y_train + 3) % 10) if client in (1, 4) else task

    monkeypatch.setattr(simulated, "simulated_task", relabelled)
    other = tiny(**common)
    for name in ("rounds", "clients", "final"):
        one, two = (reproducible(getattr(r, name)) for r in (result, other))
        pd.testing.assert_frame_equal(one, two, check_exact=True)
    if method not in (
        "fedfomo",
        "ifca",
        "pccvr",
        "pfedfda",
    ):  # these choose a model, or make or adjust a head, by own labels
        pd.testing.assert_series_equal(result.unseen["unseen_received_loss"], other.unseen["unseen_received_loss"])
    for point in POINTS[1:]:
        learned = bool((result.unseen[f"{point}_loss"] != other.unseen[f"{point}_loss"]).all())
        assert learned is (method != "qda" or "local" in point), "a quadratic head is not trained"


def test_scores_of_a_newcomer_by_hand(tiny: Tiny) -> None:
    """FedAvg: the published model, the same after two epochs, and a new model after two epochs."""
    result = tiny(method="fedavg", clients=4, rounds=2, unseen="2", adapt_epochs="2,1,0")
    settings = config.from_flat(result.flat)
    method, hparams = settings.method_and_hparams()
    arrays, _ = read_safetensors(result.out / "models" / "last.safetensors")
    row = result.unseen.iloc[0]
    task = simulated.simulated_task(settings, 2, 4, torch.device("cpu"))

    def scored(client: FedClient) -> tuple[int, float]:
        scores = evaluate(client.model, task.x_test, task.y_test, task.inputs, task.num_classes)
        return int(scores.correct.sum()), scores.loss

    for epochs in (0, 1, 2):
        adapted, alone = (
            method.client(replace(task, train=task.train.replaced(local_epochs=epochs)), method, hparams)
            for _ in range(2)
        )
        for client in (adapted, alone):
            client.round = 3
            client.restore(3, Payload())
        initial = scored(alone)
        selection.merge(adapted.model, arrays)
        if not epochs:
            assert scored(adapted) == (row["unseen_received_correct"], row["unseen_received_loss"])
            continue
        for client, name in ((adapted, "trained"), (alone, "local")):
            client.run_phases()
            assert scored(client) == (row[f"unseen_{name}@{epochs}_correct"], row[f"unseen_{name}@{epochs}_loss"])
        assert scored(alone) != initial
    assert not [c for c in result.unseen if "@0" in c]


@pytest.mark.full
def test_a_newcomer_is_fine_tuned_as_the_method_says(tiny: Tiny) -> None:
    common = {"method": "fedbabu", "clients": 4, "rounds": 1, "unseen": "2"}
    without, tuned = (tiny(**common, method_args=f"tune_epochs={n}").unseen.iloc[0] for n in (0, 2))
    assert without["unseen_tuned_loss"] == without["unseen_received_loss"] == tuned["unseen_received_loss"]
    assert tuned["unseen_tuned_loss"] < tuned["unseen_received_loss"]
    # The local training is of the body alone, the fine-tuning of the head, too.
    assert tuned["unseen_tuned_loss"] != tuned["unseen_trained@2_loss"]
    shown = report.write(tiny(**common, method_args="tune_epochs=2").out).read_text()
    assert "unseen tuned" in shown.replace("_", " ")


def test_ktpfls_own_epochs_do_not_count_for_newcomers(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, int] = {}
    measure = FedClient.measure

    def noted(self: FedClient, protocol: str, *args: Any, **more: Any) -> dict[str, Any]:
        seen[protocol] = self.report.steps
        return measure(self, protocol, *args, **more)

    monkeypatch.setattr(FedClient, "measure", noted)
    tiny(method="ktpfl", clients=3, rounds=4, unseen="0", method_args="epochs=growing", adapt_epochs="1")
    assert seen["unseen_trained@1"] == seen["unseen_local@1"] > 0


@pytest.mark.full
@pytest.mark.usefixtures("in_turn", "no_figures")
def test_tables_and_pages_show_them(tmp_path: Path) -> None:
    words = ("--methods", "local,fedavg", "--clients", "4", "--rounds", "1", "--seeds", "1", "--workers", "1",
             "--set", "unseen=1", "--out", str(tmp_path / "c"))  # fmt: skip
    result = CliRunner().invoke(app, ["compare", *words])
    assert result.exit_code == 0, result.output
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "c"), "--all"]).stdout
    assert "took no part in the training" in shown and "trained@2" in shown
    table = pd.read_csv(tmp_path / "c" / "results.csv").set_index("variant")
    unseen = pd.read_csv(tmp_path / "c" / "runs" / "fedavg-s0" / "unseen.csv")
    assert table.loc["fedavg", "unseen_trained@2_accuracy"] == unseen["unseen_trained@2_accuracy"].mean()
    assert table.loc["fedavg", "unseen_local@2_accuracy"] == table.loc["local", "unseen_local@2_accuracy"]
    assert (table["clients"] == 3).all()
    assert ">trained@2</th>" in (tmp_path / "c" / "report.html").read_text()
    assert "unseen_trained@2 accuracy" in report.write(tmp_path / "c" / "runs" / "fedavg-s0").read_text()


def named(place: Path, names: tuple[str, ...]) -> str:
    """Write two groups of rows for each of these people."""
    rng = np.random.default_rng(0)
    who = np.repeat(np.array(names), 40)
    np.savez(
        place,
        x=rng.standard_normal((len(who), 3)) + np.arange(len(who))[:, None],
        y=np.arange(len(who)) % 2,
        client=who,
    )
    return str(place)


def test_unseen_clients_are_given_by_the_names_of_the_data(tiny: Tiny, tmp_path: Path) -> None:
    data = {"dataset": "npz", "clients": 0, "data_dir": named(tmp_path / "a.npz", ("ada", "bob", "st. dan"))}
    by_name, by_id = (tiny(method="fedavg", normalise="data", unseen=u, **data) for u in ("st. dan, bob", "2,1"))
    assert by_name.summary["unseen"] == [1, 2] and list(by_name.final["client"]) == [0]
    for name in ("rounds", "unseen"):
        one, two = (reproducible(getattr(r, name)) for r in (by_name, by_id))
        pd.testing.assert_frame_equal(one, two, check_exact=True)
    told = r"no client is called 'bop', did you mean 'bob'\? The data have ada, bob, st\. dan"
    with pytest.raises(BadRequest, match=told):
        tiny(method="fedavg", unseen="ada,bop", **data)
    with pytest.raises(BadRequest, match="leaves none of 3"):
        tiny(method="fedavg", unseen="ada,bob,2", **data)


def test_a_name_that_is_a_number_is_marked(tmp_path: Path) -> None:
    path = named(tmp_path / "a.npz", ("7", "8", "9"))
    flat = {"dataset": "npz", "data-dir": path, "partition": "by-client", "clients": 3, "normalise": "data"}
    alike = [simulated.federated(config.from_flat({**flat, "unseen": u}), 3) for u in ("name:8", "1")]
    assert alike[0].inputs.mean == alike[1].inputs.mean
    with pytest.raises(BadRequest, match="no client 8, the ids are 0, 1, 2"):
        simulated.federated(config.from_flat({**flat, "unseen": "8"}), 3)


def test_a_share_is_drawn_by_the_seed_of_the_partition() -> None:
    settings = config.from_flat({"unseen": "0.3"})
    chosen = settings.unseen_of(range(10))
    assert len(chosen) == 3 and chosen == settings.replaced(seed=7, partition_seed=0).unseen_of(range(10))
    assert len({settings.replaced(seed=s).unseen_of(range(10)) for s in range(6)}) > 1
    assert config.from_flat({"unseen": "7, 3,7"}).unseen_of(range(10)) == (3, 7)
    assert config.from_flat({}).unseen_of(range(10)) == ()
    assert config.from_flat({"adapt-epochs": "5,0,2,2"}).evaluation.adaptations == (2, 5)


BAD = {
    "1.5": "a share between 0 and 1", "0.0": "a share between 0 and 1", "3,": "ids or names with commas",
    "1,x": "no client is called 'x': these clients have no names, so give ids: 0, 1, 2", "-1": "called '-1'",
    "9": "no client 9, the ids are 0, 1, 2", "0,1,2": "leaves none of 3 clients",
}  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_unseen_clients_that_cannot_be_are_refused(text: str, tiny: Tiny) -> None:
    with pytest.raises(BadRequest, match=BAD[text]):
        tiny(method="fedavg", unseen=text)
    with pytest.raises(BadRequest, match="whole numbers"):
        config.from_flat({"adapt-epochs": "2,"})


@pytest.mark.full
def test_a_resumed_run_has_the_same_unseen_clients(tiny: Tiny) -> None:
    common = {"method": "fedfomo", "clients": 5, "fraction_train": 0.67, "unseen": "0.4"}
    whole, part = tiny(rounds=3, **common), tiny(rounds=2, **common)
    rest = run(resume=part.out, rounds=3)
    for name in ("rounds", "clients", "final", "unseen"):
        one, two = (reproducible(getattr(r, name)) for r in (whole, rest))
        pd.testing.assert_frame_equal(one, two, check_exact=True)


def test_public_images_are_not_those_of_unseen_clients() -> None:
    settings = config.from_flat({"dataset": "digits", "method": "ktpfl", "unseen": "0,3", "public-data": "0.2"})
    data = simulated.federated(settings, 5)
    without = simulated.federated(settings.replaced(unseen=""), 5)
    sizes = [(len(a.train), len(b.train)) for a, b in zip(data.partition.clients, without.partition.clients)]
    assert [a > b for a, b in sizes] == [True, False, False, True, False] and all(a >= b for a, b in sizes)
    whole = simulated.federated(settings.replaced(unseen="", public_data="", method="fedavg"), 5).partition
    for k in (0, 3):
        assert np.array_equal(data.partition.clients[k].train, whole.clients[k].train)
    assert partitions.hold_back(whole, 0.2, 0, without=(0, 3))[1].size == len(data.public)  # type: ignore[arg-type]
