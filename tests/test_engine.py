"""The engine's promises: early stop, models kept, evaluations, warm start, buffers, summaries, the notebook entry."""

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

import fedapp
from clients._initial import initial_arrays
from clients.base import FedClient
from fedapp import registry
from fedapp.data.transforms import InputSpec
from fedapp.engines.local import RunResult, run
from fedapp.errors import BadRequest
from fedapp.learning.state import ClientStore, read_checked, read_safetensors
from fedapp.learning.task import ModelSpec, Task
from fedapp.learning.training import Batch
from fedapp.method import BaseHParams, Payload
from fedapp.models import SplitModel, weights
from fedapp.sampling import sample_clients
from strategies.fedavg import METHOD as FEDAVG
from tests.handmade import digit_tasks, short

Tiny = Callable[..., RunResult]


def test_early_stop_by_patience(tiny: Tiny) -> None:
    """A learning rate of nearly zero: the training loss of a client sample moves up and down, not on."""
    result = tiny(method="local", rounds=40, lr=1e-9, patience=2, clients=4, fraction_train=0.5)
    summary = result.summary
    assert summary["ok"] and summary["rounds"] < 40
    assert "no lower training loss for 2 rounds" in summary["stopped"]
    losses = list(result.rounds["train_loss"])
    assert min(losses[:-2]) <= min(losses[-2:])


def test_patience_survives_a_resume(tiny: Tiny, tmp_path: Path) -> None:
    common = {"method": "local", "lr": 1e-9, "patience": 2, "clients": 4, "fraction_train": 0.5}
    whole = tiny(rounds=40, **common)
    stopped = whole.summary["rounds"]
    tiny(rounds=stopped - 1, out=tmp_path / "part", **common)
    rest = run(resume=tmp_path / "part", rounds=40)
    assert rest.summary["rounds"] == stopped and rest.summary["stopped"] == whole.summary["stopped"]


def test_models_last_and_best(tiny: Tiny) -> None:
    result = tiny(method="fedavg", rounds=4, lr=0.2)
    scores = result.rounds["global_accuracy"]
    for name, server_round in (("last", 4), ("best", int(result.rounds["round"][scores.idxmax()]))):
        arrays, header = read_safetensors(result.out / "models" / f"{name}.safetensors")
        assert "head.weight" in arrays and all(np.isfinite(a).all() for a in arrays.values())
        if name == "best":
            assert header["round"] == server_round and header["global_accuracy"] == pytest.approx(scores.max())


def test_evaluations_between_rounds_change_nothing_else(tiny: Tiny) -> None:
    plain = tiny(method="lgfedavg", rounds=3, fraction_train=0.67)
    watched = tiny(method="lgfedavg", rounds=3, fraction_train=0.67, evaluate_every=1)
    assert list(plain.clients["client"]) == [c for t in (1, 2, 3) for c in sample_clients(0, t, range(3), 0.67)]
    keep = [c for c in plain.rounds.columns if not c.endswith("seconds")]
    pd.testing.assert_frame_equal(plain.rounds[keep], watched.rounds[keep], check_exact=True)
    rows = pd.read_csv(watched.out / "evaluations.csv")
    assert list(rows["round"]) == [1, 2] and (rows["clients"] == 3).all()
    assert not (plain.out / "evaluations.csv").exists()


def test_a_later_run_starts_warm_from_an_earlier_ones_clients(tiny: Tiny, tmp_path: Path) -> None:
    shared = {"method": "local", "state_dir": str(tmp_path / "state"), "federation": "lab"}
    first = tiny(rounds=4, **shared)
    warm = tiny(rounds=1, warm_start=True, **shared)
    cold = tiny(rounds=1, method="local")
    assert warm.rounds["received_accuracy"][0] == pytest.approx(first.summary["accuracy"]["received"]["last"])
    assert warm.rounds["received_accuracy"][0] > cold.rounds["received_accuracy"][0]


def test_another_method_does_not_start_from_it(tiny: Tiny, tmp_path: Path) -> None:
    shared = {"state_dir": str(tmp_path / "state"), "federation": "lab"}
    tiny(method="local", rounds=1, **shared)
    with pytest.raises(Exception, match="method is 'local', expected 'lgfedavg'"):
        tiny(method="lgfedavg", rounds=1, warm_start=True, **shared)


def test_the_summary_names_what_it_says(tiny: Tiny) -> None:
    result = tiny(method="fedavg", rounds=3)
    saved = json.loads((result.out / "summary.json").read_text())
    assert saved == json.loads(json.dumps(result.summary))
    received, trained = saved["accuracy"]["received"], saved["accuracy"]["trained"]
    assert received["last"] == pytest.approx(result.final["received_accuracy"].mean())
    assert received["last_std"] == pytest.approx(result.final["received_accuracy"].std(ddof=0))
    assert received["balanced"] == pytest.approx(result.final["received_balanced"].mean())
    assert trained["last"] == pytest.approx(result.final["trained_accuracy"].mean())
    assert received["best"] == max([*result.rounds["received_accuracy"], received["last"]])
    assert saved["headline"]["score"] == "received" and saved["headline"]["value"] == received["last"]
    assert saved["test_sizes"]["max"] >= saved["test_sizes"]["min"] > 0 and "robust" not in saved
    card = (result.out / "data_card.txt").read_text()
    assert "majority" in card and result.summary["bytes_up"] == result.rounds["bytes_up"].mean()


def test_protocols_that_are_not_asked_for_are_not_measured(tiny: Tiny) -> None:
    result = tiny(method="fedavg", protocols="trained", balanced_every=-1)
    assert not [c for c in result.rounds.columns if c.startswith(("received", "global"))]
    assert list(result.summary["accuracy"]) == ["trained"]


def test_the_notebook_entry_refuses_what_the_command_line_refuses(tmp_path: Path) -> None:
    assert fedapp.run is run
    with pytest.raises(BadRequest, match="unknown key 'metod'"):
        run(metod="fedavg", out=tmp_path / "a")
    with pytest.raises(BadRequest, match="leave out method"):
        run(resume=tmp_path, method="fedavg")


# ---- BatchNorm: the most repeated bug in federated code --------------------------------------------------------------


class Normed(FedClient):
    """A client whose model has BatchNorm."""

    @classmethod
    def build_model(cls, spec: ModelSpec, hparams: object) -> SplitModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.seed)
            trunk = torch.nn.Sequential(
                torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32, momentum=0.3)
            )
            head = torch.nn.Linear(32, spec.num_classes)
        return SplitModel(name="normed", features=trunk, activation=torch.nn.ReLU(), head=head)


def normed_task(buffers: str, client: int = 0) -> Task:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    images = torch.from_numpy(x.astype(np.uint8).reshape(-1, 8, 8, 1))[client::2]
    labels = torch.from_numpy(y)[client::2]
    inputs = InputSpec(shape=(1, 8, 8), scale=16.0, mean=(0.305,), std=(0.376,))
    return Task(
        client=client, seed=0, num_classes=10, inputs=inputs, model="normed", x_train=images[:400],
        y_train=labels[:400], x_test=images[400:], y_test=labels[400:], train=short(), buffers=buffers,
    )  # fmt: skip


@pytest.mark.parametrize("buffers", ["global", "local", "drop"])
def test_running_statistics_travel_stay_or_start_anew(buffers: str, tmp_path: Path) -> None:
    from fedapp.method import BaseHParams, Payload

    def client(k: int) -> FedClient:
        return Normed(normed_task(buffers, k), FEDAVG, BaseHParams(), ClientStore(tmp_path / str(k), "fedavg", "aa"))

    stat = "features.2.running_mean"
    first = client(0)
    arrays, _, _ = first.train_round(Payload(), 1)
    assert (stat in arrays) is (buffers == "global")
    assert "features.2.num_batches_tracked" not in arrays
    trained = first.model.state_dict()[stat].clone()
    again = client(0)
    begun = statistics_by_step(again)
    again.restore(2, Payload(arrays=arrays))
    again.receive(Payload(arrays=arrays))
    assert torch.allclose(again.model.state_dict()[stat], trained), "a score is of the statistics that were trained"
    again.train_to_score(Payload(arrays=arrays))
    assert torch.equal(begun[0], torch.zeros(32)) if buffers == "drop" else torch.allclose(begun[0], trained)


def statistics_by_step(client: FedClient) -> list[torch.Tensor]:
    """The running mean of BatchNorm before each training step that is still to come."""
    seen, loss = list[torch.Tensor](), client.step_loss

    def step_loss(batch: Batch) -> torch.Tensor:
        seen.append(client.model.state_dict()["features.2.running_mean"].clone())
        return loss(batch)

    client.step_loss = step_loss  # type: ignore[method-assign]
    return seen


def test_statistics_are_reset_where_a_phase_begins_to_move_them(tmp_path: Path) -> None:
    """FedRep trains its head on the body as received, and FedAMP may start from a model that the client kept."""
    from clients.fedamp import FedAMPClient, FedAMPHParams
    from clients.fedrep import FedRepClient, FedRepHParams
    from strategies.fedamp import METHOD as FEDAMP
    from strategies.fedrep import METHOD as FEDREP

    for kind, method, hparams in (
        (FedRepClient, FEDREP, FedRepHParams(head_epochs=2)),
        (FedAMPClient, FEDAMP, FedAMPHParams(start="own")),
    ):
        normed = type("NormedKind", (kind,), {"build_model": classmethod(Normed.build_model.__func__)})  # type: ignore[attr-defined]

        def one(kind: Any = normed, method: Any = method, hparams: Any = hparams) -> FedClient:
            store = ClientStore(tmp_path / method.id, method.id, "aa")
            made: FedClient = kind(normed_task("drop"), method, hparams, store)
            return made

        first = one()
        first.train_round(Payload(), 1)
        kept, zero = first.model.state_dict()["features.2.running_mean"].clone(), torch.zeros(32)
        client = one()
        begun = statistics_by_step(client)
        client.train_round(Payload(), 2)
        resets = [i for i, mean in enumerate(begun) if torch.equal(mean, zero)]
        head_steps = 0 if method is FEDAMP else len(begun) * 2 // 3
        assert resets == [head_steps] and all(torch.equal(mean, kept) for mean in begun[:head_steps])


def test_statistics_of_frozen_layers_are_not_reset() -> None:
    from fedapp.method import BaseHParams

    client = Normed(normed_task("drop"), FEDAVG, BaseHParams())
    client.restore(1, Payload())
    weights.freeze("normed", client.model, "features.2")
    client.model.features[2].running_mean.fill_(0.25)
    client.train_locally(Payload())
    assert torch.equal(client.model.state_dict()["features.2.running_mean"], torch.full((32,), 0.25))


def test_fedavg_with_batchnorm_on_iid_data_learns_what_one_computer_learns(tmp_path: Path) -> None:
    """Two IID halves, averaged statistics included, against the same model on all data: within five points."""
    from fedapp.core.averages import RunningMean
    from fedapp.method import BaseHParams, Payload

    payload = Payload()
    for server_round in range(1, 7):
        mean = RunningMean()
        for k in (0, 1):
            c = Normed(normed_task("global", k), FEDAVG, BaseHParams(), ClientStore(tmp_path / str(k), "fedavg", "aa"))
            arrays, n, _ = c.train_round(payload, server_round)
            mean.add(arrays, n)
        payload = Payload(arrays=mean.mean())
    metrics = c.evaluate_round(payload, 7, balanced=False)
    together = metrics["received-correct"] / metrics["received-total"]
    tasks = [normed_task("global", k) for k in (0, 1)]
    x, y = torch.cat([t.x_train for t in tasks]), torch.cat([t.y_train for t in tasks])
    task = replace(tasks[1], x_train=x, y_train=y)
    central = Normed(task, registry.get("local"), BaseHParams(), ClientStore(tmp_path / "c", "local", "aa"))
    for server_round in range(1, 7):
        _, _, scores = central.train_round(Payload(), server_round)
    one = scores["trained-correct"] / scores["trained-total"]
    assert together > one - 0.05 and one > 0.8


@pytest.mark.parametrize("protocols", [("received",), ("trained",), ()])
def test_anybodys_client_fn_scores_whatever_is_measured_in_a_run(protocols: tuple[str, ...]) -> None:
    from fedapp.method import BaseHParams

    c = Normed(replace(normed_task("global"), protocols=protocols), FEDAVG, BaseHParams())
    parameters = c.get_parameters({})
    loss, n, metrics = c.evaluate(parameters, {})
    expected = c.measure("received")
    assert n == len(c.task.y_test) == expected["received-total"]
    assert metrics == {"accuracy": expected["received-correct"] / n}
    assert loss == pytest.approx(expected["received-loss-sum"] / n)


def test_a_nodes_context_holds_round_path_and_hash_of_its_state_and_no_more(tmp_path: Path) -> None:
    from fedapp import server_app
    from fedapp.client_app import app as client_app
    from fedapp.config import from_flat
    from fedapp.transport.local_grid import LocalGrid

    values = {
        "method": "lgfedavg",
        "clients": 2,
        "num-server-rounds": 2,
        "local-epochs": 1,
        "out": str(tmp_path / "run"),
    }
    flat = from_flat(values).to_flat()
    grid = LocalGrid(client_app, flat, 2)
    server_app.serve(grid, flat)
    for context in grid.contexts.values():
        assert list(context.state) == ["fedapp"]
        kept = dict(context.state.config_records["fedapp"])
        _, header, digest = read_checked(Path(str(kept["path"])))
        assert kept == {"round": 2, "path": kept["path"], "hash": digest[:32]} and header["round"] == 2


def test_bf16_is_refused_where_it_is_only_imitated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = {"method": "fedavg", "precision": "bf16", "out": tmp_path}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    with pytest.raises(BadRequest, match="this GPU has no fast bfloat16; use fp32"):
        run(**settings)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda self, **how: "flags: avx2" if self.name == "cpuinfo" else read(self, **how)
    )
    with pytest.raises(BadRequest, match="this processor has no fast bfloat16; use fp32"):
        run(**settings)


def test_private_arrays_survive_where_the_server_sends_the_whole_model(tmp_path: Path) -> None:
    """`self.own` is restored whatever the payload holds; the stored model is not read where the server sends one."""
    seen: list[float] = []

    class Counting(FedClient):
        def before_training(self, payload: Payload) -> None:
            seen.append(float(self.own.get("rounds", np.zeros(1))[0]))
            self.own["rounds"] = np.array([seen[-1] + 1])

    task = digit_tasks(1)[0]
    whole = initial_arrays(FEDAVG.client, task.spec(0), FEDAVG, BaseHParams(), "global")
    for server_round in (1, 2, 3):
        client = Counting(task, FEDAVG, BaseHParams(), ClientStore(tmp_path, "fedavg", "abc"))
        client.train_round(Payload(arrays=whole), server_round)
    assert seen == [0.0, 1.0, 2.0]
    again = Counting(task, FEDAVG, BaseHParams(), ClientStore(tmp_path, "fedavg", "abc"))
    again.train_round(Payload(arrays=whole), 3)
    assert seen[-1] == 2.0, "a repeated round starts from what the round before left"
