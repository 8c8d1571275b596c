"""FedClassAvg: LG-FedAvg without its terms, Eq. 3 on the worked numbers, the control, and the warm-up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from clients import fedclassavg
from clients.fedclassavg import FedClassAvgClient, FedClassAvgHParams
from fedapp.data.transforms import InputSpec
from fedapp.engines.local import RunResult
from fedapp.learning.state import ClientStore
from fedapp.learning.task import Task
from fedapp.learning.training import TrainSpec
from fedapp.method import Arrays, Payload, Reply
from fedapp.models import build_model
from fedapp.transport.selection import everything, extract
from strategies.fedclassavg import METHOD, FedClassAvg

INPUTS = InputSpec(1, 8, 16.0, (0.3,), (0.4,))


def client(folder: Path, **hparams: Any) -> FedClassAvgClient:
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(0, 17, (40, 8, 8, 1), generator=generator, dtype=torch.uint8)
    y = torch.randint(0, 4, (40,), generator=generator)
    spec = TrainSpec(epochs=1, batch_size=8, lr=0.05, augment="weak")
    task = Task(0, 1, 4, INPUTS, "digits-a", x, y, x[:10], y[:10], train=spec)
    return FedClassAvgClient(task, METHOD, FedClassAvgHParams(**hparams), ClientStore(folder, "fedclassavg", "ab"))


def whole() -> Payload:
    return Payload(common=everything(build_model("digits-a", num_classes=4, channels=1, size=8, seed=3)))


def head() -> Payload:
    model = build_model("digits-a", num_classes=4, channels=1, size=8, seed=3)
    return Payload(common=extract(model, ["head.weight", "head.bias"]))


@pytest.fixture
def warmups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Epochs of each warm-up that is trained."""
    found: list[int] = []
    true = fedclassavg.train

    def train(model: Any, x: Any, y: Any, spec: TrainSpec, *args: Any, **others: Any) -> Any:
        found.append(spec.epochs)
        return true(model, x, y, spec, *args, **others)

    monkeypatch.setattr(fedclassavg, "train", train)
    return found


def test_the_warm_up_comes_once_and_leaves_its_trunk_only(tmp_path: Path, warmups: list[int]) -> None:
    warm = client(tmp_path / "w", warmup_epochs=2)
    warm.restore(1, head())
    cold = everything(warm.model)
    warm.receive(head())
    now = everything(warm.model)
    assert warmups == [2]
    assert all(np.array_equal(now[n], head().common[n]) for n in ("head.weight", "head.bias")), "its head is discarded"
    assert any(not np.array_equal(now[n], cold[n]) for n in cold if n.startswith("features."))
    for server_round in (1, 2, 3):
        client(tmp_path / "w", warmup_epochs=2).train_round(head(), server_round)
    assert warmups == [2, 2], "once more for round 1, and never again"


def test_a_client_that_never_trained_is_scored_after_one_and_the_same_warm_up(tmp_path: Path) -> None:
    early, late = (client(tmp_path, warmup_epochs=1).evaluate_round(head(), server_round) for server_round in (3, 6))
    assert early == late


def test_where_the_whole_model_is_handed_out_there_is_no_warm_up(tmp_path: Path, warmups: list[int]) -> None:
    replies = {}
    for epochs in (0, 1):
        folder = tmp_path / str(epochs)
        for server_round in (1, 2):
            c = client(folder, share="all", warmup_epochs=epochs)
            replies[epochs, server_round], _, _ = c.train_round(whole(), server_round)
        c.evaluate_round(whole(), 3)
    assert warmups == [], "it would be trained every round and overwritten"
    for server_round in (1, 2):
        assert all(np.array_equal(a, replies[1, server_round][n]) for n, a in replies[0, server_round].items())


def test_without_its_terms_it_is_lg_fedavg(tiny: Callable[..., RunResult]) -> None:
    common = {"rounds": 3, "augment": "none", "model": "digits-a,digits-b", "batch_size": 32}
    ours = tiny(method="fedclassavg", method_args="contrastive=0 rho=0", **common)
    theirs = tiny(method="lgfedavg", **common)
    for name in ("rounds", "clients", "final"):
        a, b = getattr(ours, name), getattr(theirs, name)
        keep = [c for c in b if not c.endswith("seconds")]
        pd.testing.assert_frame_equal(a[keep], b[keep], check_exact=True)


def replies(*clients: tuple[int, Arrays, int]) -> list[Reply]:
    return [Reply(k, n, arrays, {}, 0) for k, arrays, n in clients]


def test_heads_are_averaged_over_the_participants_data() -> None:
    def make(w: list[list[float]], b: list[float]) -> Arrays:
        return {"head.weight": np.array(w, np.float32), "head.bias": np.array(b, np.float32)}

    one = make([[0.5, -0.2], [-0.3, 0.8], [0.1, 0.1]], [0.0, 0.1, -0.1])
    two = make([[0.4, -0.1], [-0.2, 0.7], [0.0, 0.2]], [0.05, 0.05, -0.05])
    three = make([[0.0, 0.3], [0.6, -0.4], [0.2, 0.5]], [0.3, -0.3, 0.0])
    strategy = FedClassAvg(METHOD, FedClassAvgHParams())
    state = {"model": two}
    everyone = strategy.aggregate(state, 1, replies((0, one, 30), (1, two, 10), (2, three, 20)))["model"]
    np.testing.assert_allclose(
        everyone["head.weight"], [[0.316667, -0.016667], [0.016667, 0.383333], [0.116667, 0.25]], atol=1e-6
    )
    np.testing.assert_allclose(everyone["head.bias"], [0.108333, -0.041667, -0.058333], atol=1e-6)
    some = strategy.aggregate(state, 1, replies((0, one, 30), (2, three, 20)))["model"]
    np.testing.assert_allclose(some["head.weight"], [[0.3, 0], [0.06, 0.32], [0.14, 0.26]], atol=1e-6)
    control = FedClassAvg(METHOD, FedClassAvgHParams(share="none"))
    assert control.aggregate(state, 1, replies((0, one, 30), (2, three, 20))) is state
