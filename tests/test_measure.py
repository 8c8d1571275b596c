"""One client measured before a simulation: no number changes, no failure stops a run."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from clients.base import FedClient
from fedapp import registry
from fedapp.config import RunConfig
from fedapp.engines import local as engines
from fedapp.engines import measure, resources, runner
from fedapp.errors import BadRequest
from fedapp.learning.training import TrainReport
from fedapp.method import Payload
from fedapp.tasks import simulated as tasks

SMALL = {"clients": 6, "local-epochs": 1, "batch-size": 32, "alpha": 0.3, "partition": "dirichlet", "seed": 1}


def config(**changes: Any) -> RunConfig:
    values = {**SMALL, **{k.replace("_", "-"): v for k, v in changes.items()}}
    return engines.effective(values)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores, 20 GiB, no GPU, no cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(resources, "usable_cores", lambda: 2)
    monkeypatch.setattr(resources, "cuda_devices", lambda: 0)
    monkeypatch.setattr(measure, "cuda_devices", lambda: 0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=20 << 30))


@pytest.mark.parametrize("method", list(registry.discover()))
def test_every_method_can_be_measured(method: str) -> None:
    need = measure.client_needs([config(method=method)])
    sizes = [len(c.train) for c in tasks.federated(config(method=method), 6).partition.clients]
    assert sizes[need.client] == max(sizes)
    assert need.memory > 100 << 20 and 0 < need.seconds < 600 and need.gpu_memory == 0


def test_measuring_draws_nothing_and_leaves_threads_and_folders_alone(tmp_path: Path) -> None:
    settings = engines.prepare({**SMALL, "threads": 2}, tmp_path / "run")
    random, threads = torch.random.get_rng_state(), torch.get_num_threads()
    measure.client_needs([settings])
    assert torch.equal(torch.random.get_rng_state(), random)
    assert torch.get_num_threads() == threads
    assert not list(tmp_path.rglob("*.*"))


def test_the_largest_client_of_each_architecture_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(model="digits-a,digits-b")
    tried: list[int] = []

    def seconds(config: RunConfig, client: int, device: torch.device) -> float:
        tried.append(client)
        return float(len(tried))

    monkeypatch.setattr(measure, "_round_seconds", seconds)
    need = measure.client_needs([settings, config(model="digits-a,digits-b", seed=2), config(model="digits-a")])
    sizes = [len(c.train) for c in tasks.federated(settings, 6).partition.clients]
    best = [max(range(k, 6, 2), key=lambda c: sizes[c]) for k in (0, 1)]
    overall = max(range(6), key=lambda c: sizes[c])
    # One seed stands for all; the same data and another set of architectures is tried too.
    assert sorted(tried[:2]) == sorted(best) and tried[0] == overall and tried[2:] == [overall]
    assert need.seconds == 3.0 and need.client == overall


def test_settings_whose_clients_differ_are_measured_each(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[RunConfig] = []
    monkeypatch.setattr(measure, "_measure", measured.extend)
    asked = [config(), config(method="fedavg"), config(clients=2), config(partition="iid"), config(alpha=0.1)]
    measure.client_needs(asked)
    assert measured == [asked[0], *asked[2:]]


def test_no_further_client_is_begun_after_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(measure, "_round_seconds", lambda c, client, d: float(tried.append(client) or 1))
    monkeypatch.setattr(measure, "BUDGET_SECONDS", 0.0)
    measure.client_needs([config(model="digits-a,digits-b,digits-c")])
    assert len(tried) == 1


def test_memory_counts_the_images_of_the_other_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker keeps what it has loaded, and in time it has seen everybody."""
    settings = config()
    monkeypatch.setattr(measure, "_round_seconds", lambda *a: 1.0)
    monkeypatch.setattr("fedapp.process.peak_memory", lambda: 0)
    need = measure.client_needs([settings])
    splits = tasks.federated(settings, 6).partition.clients
    images = sum(len(c.train) + len(c.test) for k, c in enumerate(splits) if k != need.client)
    assert need.memory == images * 64


def test_seconds_are_those_of_all_samples_and_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that ticks 10 ms a sample: the few that were tried stand for all."""
    tried: list[int] = []

    def train_round(self: FedClient, payload: Payload, server_round: int) -> None:
        tried.append(self.task.num_samples)
        self.report = TrainReport(1.0, 1, tried[-1], 0.01 * tried[-1])

    monkeypatch.setattr(FedClient, "train_round", train_round)
    monkeypatch.setattr(FedClient, "measure", lambda self, protocol: {"trained-total": 10**12})
    need = measure.client_needs([config(method="fedavg", local_epochs=3, batch_size=16)])
    samples = max(len(c.train) for c in tasks.federated(config(), 6).partition.clients)
    assert need.seconds == pytest.approx(0.01 * samples * 3)
    assert 8 <= tried[0] <= 24 and tried[1] == pytest.approx(4 * tried[0], abs=4)


def test_on_a_gpu_another_process_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA would say is made up; that this process never asks for a context is not."""
    monkeypatch.setattr(measure, "cuda_devices", lambda: 1)
    used: list[str] = []

    class Pool:
        def __init__(self, workers: int, mp_context: Any) -> None:
            used.append(mp_context.get_start_method())

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None:
            used.append("closed")

        def submit(self, function: Any, *args: Any) -> Any:
            return SimpleNamespace(result=lambda: resources.ClientNeeds(3, 2 << 30, 0.5, 4 << 30, 80 << 30))

    monkeypatch.setattr(measure, "ProcessPoolExecutor", Pool)
    need = measure.client_needs([config()])
    assert used == ["spawn", "closed"] and need.gpu_memory == 4 << 30


def test_gpu_memory_is_the_peak_the_context_and_everybodys_images(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config()
    monkeypatch.setattr(measure, "_round_seconds", lambda *a: 1.0)
    monkeypatch.setattr("fedapp.process.device", lambda: SimpleNamespace(type="cuda"))
    monkeypatch.setattr("fedapp.process.peak_memory", lambda: 5)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, device=None, **k: zeros(*a, **k))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 3 << 30)
    need = measure._measure([settings])
    splits = tasks.federated(settings, 6).partition.clients
    images = sum(len(c.train) + len(c.test) for k, c in enumerate(splits) if k != need.client) * 64
    assert need.gpu_memory == (3 << 30) + measure.CUDA_CONTEXT + images
    assert need.gpu_free == 70 << 30 and need.memory == 5


@pytest.mark.full
def test_another_process_can_measure() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(measure._measure, [config()]).result().seconds > 0


# What `fedapp run` makes of it


def test_a_run_says_in_one_line_what_was_chosen_and_why() -> None:
    text = runner.proposed([config()]).text
    assert "\n" not in text
    assert text.startswith("2 of 6 clients at a time on 2 cores: 1 CPU each; one client needs ")
    assert " s a round (measured on client " in text


def test_a_client_with_threads_gets_a_core_for_each() -> None:
    assert runner.proposed([config(threads=2)]).text.startswith("1 of 6 clients at a time on 2 cores: 2 CPU each; one")
    assert runner.proposed([config(threads=64)]).client_cpus == 2  # there are no more


@pytest.mark.parametrize("given", [{"cpus": 1}, {"gpus": 0.0}])
def test_what_the_user_gives_is_not_measured(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "client_needs", lambda configs: pytest.fail("measured"))
    assert runner.proposed([config()], **given).text == "2 of 6 clients at a time on 2 cores: 1 CPU each"
    monkeypatch.setenv("RAY_ADDRESS", "ray-head:6379")
    assert "Ray cluster" in runner.proposed([config()]).text


def test_a_measurement_that_fails_is_told_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(measure, "_round_seconds", fail)
    assert runner.proposed([config()]).text == (
        "2 of 6 clients at a time on 2 cores: 1 CPU each; 1 GiB each assumed, "
        "measuring a client failed (OutOfMemoryError: CUDA out of memory.)"
    )

    def refuse(*args: Any) -> float:
        raise BadRequest("no such thing")

    monkeypatch.setattr(measure, "_round_seconds", refuse)
    with pytest.raises(BadRequest, match="no such thing"):
        runner.proposed([config()])


def test_a_dry_run_prints_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.run_and_report({**SMALL}, None, dry_run=True) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("2 of 6 clients at a time on 2 cores: 1 CPU each; one client needs ")
