"""What one virtual client gets: cores, memory, fractions of a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable

import psutil
import pytest

from fedapp.engines import resources
from fedapp.engines.resources import ClientNeeds, choose_resources
from fedapp.errors import BadRequest


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int, int], None]:
    """Set cores, CUDA devices and GiB of memory of the machine that the launcher sees."""

    def build(cores: int, devices: int, memory: int) -> None:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr(resources, "usable_cores", lambda: cores)
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        monkeypatch.setattr(resources, "cuda_devices", lambda: devices)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": memory << 30})())

    return build


def test_two_cores_train_two_clients_at_a_time(machine: Callable[[int, int, int], None]) -> None:
    machine(2, 0, 20)
    chosen = choose_resources(10)
    assert (chosen.client_cpus, chosen.client_gpus, chosen.total_cpus, chosen.parallel) == (1, 0.0, 2, 2)
    assert chosen.text == "2 of 10 clients at a time on 2 cores: 1 CPU each"


@pytest.mark.parametrize(
    ("cores", "memory", "clients", "cpus", "parallel", "total"),
    [
        (64, 500, 3, None, 3, 3),  # no idle actors beside three clients
        (24, 500, 100, None, 24, 24),
        (64, 500, 100, None, 32, 32),  # Flower keeps 32 at work
        (64, 10, 100, None, 10, 10),  # memory for ten
        (8, 100, 20, 3, 2, 6),
        (1, 0, 5, None, 1, 1),
    ],
)
def test_cores_clients_and_memory_bound_what_runs_side_by_side(
    machine: Callable[[int, int, int], None],
    cores: int,
    memory: int,
    clients: int,
    cpus: int | None,
    parallel: int,
    total: int,
) -> None:
    machine(cores, 0, memory)
    chosen = choose_resources(clients, cpus)
    assert (chosen.parallel, chosen.total_cpus) == (parallel, total)


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("cores", range(1, 40))
def test_a_gpu_share_lets_exactly_the_parallel_clients_fit(
    machine: Callable[[int, int, int], None], cores: int, devices: int
) -> None:
    machine(cores, devices, 500)
    chosen = choose_resources(30)
    assert 0 < chosen.client_gpus <= 1
    # Ray counts GPUs in units of 1/10,000, and a client's share must come from one device.
    unit = chosen.client_gpus * 10_000
    assert unit == pytest.approx(round(unit))
    per_device = 10_000 // round(unit)
    assert 1 <= per_device <= 8
    assert chosen.parallel <= per_device * devices
    # Flower's own count, from which it makes its actors.
    assert chosen.total_cpus is not None
    assert chosen.parallel == min(chosen.total_cpus, int(devices / chosen.client_gpus))
    assert chosen.parallel == min(cores, 30, 8 * devices)


NEED = ClientNeeds(7, 3 << 29, 1.13)


@pytest.mark.parametrize(
    ("cores", "memory", "need", "parallel"),
    [
        (2, 20, NEED, 2),
        (16, 20, NEED, 12),  # 13 times 1.5 GiB, one of them for the server
        (16, 2, NEED, 1),
        (16, 500, NEED, 16),
        (16, 20, ClientNeeds(7, 100 << 30, 1.0), 1),
    ],
)
def test_measured_memory_bounds_what_runs_side_by_side(
    machine: Callable[[int, int, int], None], cores: int, memory: int, need: ClientNeeds, parallel: int
) -> None:
    machine(cores, 0, memory)
    chosen = choose_resources(20, needs=need)
    assert (chosen.parallel, chosen.total_cpus, chosen.client_gpus) == (parallel, parallel, 0.0)
    assert chosen.text.startswith(f"{parallel} of 20 clients at a time on {cores} cores: 1 CPU each; one client needs")


def test_work_shorter_than_the_start_of_a_worker_is_left_to_one(machine: Callable[[int, int, int], None]) -> None:
    machine(4, 0, 100)
    need = ClientNeeds(7, 1 << 30, 0.1)
    assert choose_resources(20, needs=need).parallel == 4
    one = choose_resources(20, needs=need, trainings=29)
    assert one.parallel == 1 and "1 of 20 clients at a time on 4 cores: 1 CPU each (there is less to do" in one.text
    assert "less to do" not in choose_resources(1, needs=need, trainings=2).text, "there was no choice"
    assert choose_resources(20, needs=need, trainings=31).parallel == 4
    machine(4, 1, 100)
    chosen = choose_resources(20, needs=need, trainings=29)
    assert (chosen.parallel, chosen.client_gpus, chosen.total_cpus) == (1, 1.0, 1)


def test_the_line_says_what_was_measured(machine: Callable[[int, int, int], None]) -> None:
    machine(2, 0, 20)
    assert choose_resources(20, needs=NEED).text == (
        "2 of 20 clients at a time on 2 cores: 1 CPU each; "
        "one client needs 1.5 GiB and about 1.1 s a round (measured on client 7)"
    )
    assert "about 0.04 s a round" in str(ClientNeeds(0, 1 << 30, 0.0412))


@pytest.mark.parametrize(
    ("devices", "free", "each", "parallel", "share"),
    [
        (1, 80, 10, 7, 0.1428),  # 79 GiB beside the server's
        (1, 139, 2, 8, 0.125),  # at most eight
        (2, 24, 10, 4, 0.5),
        (1, 24, 40, 1, 1.0),  # what does not fit is tried alone
    ],
)
def test_measured_gpu_memory_sets_the_share(
    machine: Callable[[int, int, int], None], devices: int, free: int, each: int, parallel: int, share: float
) -> None:
    machine(16, devices, 500)
    chosen = choose_resources(20, needs=ClientNeeds(7, 3 << 30, 1.0, each << 30, free << 30))
    assert (chosen.parallel, chosen.client_gpus) == (parallel, share)
    assert chosen.parallel == min(chosen.total_cpus or 0, int(devices / chosen.client_gpus))
    assert f"1 CPU and {share:g} of {devices} GPU each" in chosen.text and f"{each}.0 GiB of GPU memory" in chosen.text


@pytest.mark.parametrize(("devices", "gpus", "at_once"), [(2, 0.6, 2), (2, 0.5, 4), (4, 0.3, 12), (4, 1, 4), (4, 2, 2)])
def test_the_share_of_a_client_comes_from_one_gpu(
    machine: Callable[[int, int, int], None], devices: int, gpus: float, at_once: int
) -> None:
    machine(32, devices, 500)
    assert choose_resources(30, gpus=gpus).parallel == at_once


def test_a_whole_gpu_for_each_client_is_respected(machine: Callable[[int, int, int], None]) -> None:
    machine(16, 2, 100)
    chosen = choose_resources(10, gpus=1.0)
    assert (chosen.client_gpus, chosen.parallel) == (1.0, 2)
    assert choose_resources(10, gpus=0.0).client_gpus == 0.0


@pytest.mark.parametrize(
    ("clients", "cpus", "gpus", "message"),
    [
        (0, None, None, "clients = 0"),
        (5, 0, None, "client CPUs = 0"),
        (5, 3, None, "only 2 can be used here"),
        (5, None, -0.5, "client GPUs = -0.5"),
        (5, None, 1.5, "client GPUs = 1.5"),
        (5, None, float("nan"), "client GPUs = nan"),
        (5, None, 0.5, "no CUDA device"),
    ],
)
def test_impossible_resources_are_refused(
    machine: Callable[[int, int, int], None], clients: int, cpus: int | None, gpus: float | None, message: str
) -> None:
    machine(2, 0, 20)
    with pytest.raises(BadRequest, match=message):
        choose_resources(clients, cpus, gpus)


def test_a_cluster_decides_itself(machine: Callable[[int, int, int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    machine(2, 0, 20)
    monkeypatch.setenv("RAY_ADDRESS", "ray-head:6379")
    chosen = choose_resources(50, 4, 0.5)
    assert (chosen.client_cpus, chosen.client_gpus, chosen.total_cpus) == (4, 0.5, None)
    assert "ray-head:6379" in chosen.text
    assert chosen.parallel == 6 and "at most 6" in chosen.text  # threads of a pool on two cores
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert resources.cluster_address() is None
