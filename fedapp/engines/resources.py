"""The resources of virtual clients: CPU cores, fractions of a GPU, memory, and how many clients work at a time."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

from fedapp.errors import BadRequest, counted
from fedapp.lazy import torch

MEMORY_PER_CLIENT = 1 << 30
"""Bytes assumed for a client that was not measured; a worker that has imported PyTorch takes about half of it."""
WORKER_START = 3.0
"""Seconds of work below which one worker is enough: another would take longer to import PyTorch, Flower and Ray."""
CLIENTS_PER_GPU = 8
SERVER_GPU_MEMORY = 1 << 30
"""Bytes of a GPU left to the server, which scores its global model there."""


@dataclass(frozen=True)
class ClientNeeds:
    """What one virtual client was measured to need.

    Attributes
    ----------
    client : id of the measured client.
    memory : bytes of main memory of its worker process.   seconds : duration of one round, estimated.
    gpu_memory : bytes of GPU memory, 0 without a GPU.   gpu_free : bytes that were free on the GPU.
    """

    client: int
    memory: int
    seconds: float
    gpu_memory: int = 0
    gpu_free: int = 0

    def __str__(self) -> str:
        on_gpu = f", {self.gpu_memory / (1 << 30):.1f} GiB of GPU memory" if self.gpu_memory else ""
        seconds = f"{self.seconds:.1f}" if self.seconds >= 0.95 else f"{self.seconds:.1g}"
        return (
            f"one client needs {self.memory / (1 << 30):.1f} GiB{on_gpu} and about {seconds} s a round "
            f"(measured on client {self.client})"
        )


@dataclass(frozen=True)
class ClientResources:
    """What each virtual client gets.

    Attributes
    ----------
    client_cpus, client_gpus : of one client.
    total_cpus : CPUs that Ray may use; None on an existing cluster, which decides itself.
    parallel : clients that work at a time; on a cluster an upper bound.
    text : all this in one line, for the user.
    """

    client_cpus: int
    client_gpus: float
    total_cpus: int | None
    parallel: int
    text: str


def choose_resources(
    clients: int,
    cpus: int | None = None,
    gpus: float | None = None,
    needs: ClientNeeds | None = None,
    trainings: int | None = None,
) -> ClientResources:
    """Choose the CPUs and the GPU fraction of each virtual client.

    Clients train side by side on one core each: with small models, processes beat threads within one process. As many
    work at a time as there are clients, cores and memory; the memory of one more client is kept for the server. With
    CUDA each client requests a fraction of a GPU, because Ray hides the GPUs from a client that requests none. A GPU is
    shared by as many clients as its memory holds next to the server's share, and by at most 8. If all trainings
    together take less than the start of a worker, one works alone.

    Parameters
    ----------
    clients : number of virtual clients, at least 1.
    cpus : CPUs per client; None = 1.
    gpus : GPUs per client, a fraction below 1 or a whole number; None = chosen, 0 = train on the CPU.
    needs : measured needs of one client; None = not measured, 1 GiB of memory is assumed.
    trainings : local trainings of all runs that share the workers; None = not known.

    Raises
    ------
    BadRequest : a number out of range, more CPUs than there are, or a GPU where there is none. With ``RAY_ADDRESS``
        only the ranges are checked, because the cluster's machines are not visible from here.
    """
    _check_ranges(clients, cpus, gpus)
    client_cpus = cpus or 1
    if cluster := cluster_address():
        parallel = min(clients, max_concurrent_clients())
        each = f"{client_cpus} CPU and {gpus or 0.0:g} GPU"
        text = f"Ray cluster at {cluster}: {each} per client, as many at a time as fit there, at most {parallel}"
        return ClientResources(client_cpus, gpus or 0.0, None, parallel, text)
    cores = usable_cores()
    if client_cpus > cores:
        raise BadRequest(f"client CPUs = {client_cpus}, but only {cores} can be used here: ask for at most {cores}")
    available = psutil.virtual_memory().available
    fit_in_memory = available // MEMORY_PER_CLIENT if needs is None else available // needs.memory - 1
    parallel = min(clients, cores // client_cpus, max(1, fit_in_memory), max_concurrent_clients())
    little = needs is not None and trainings is not None and trainings * needs.seconds < WORKER_START
    why = " (there is less to do than a second worker needs to start)" if little and parallel > 1 else ""
    parallel = 1 if little else parallel
    devices = cuda_devices() if gpus is None or gpus > 0 else 0
    if gpus is not None and gpus > devices:
        raise BadRequest(
            f"client GPUs = {gpus:g}, but {devices or 'no'} CUDA device can be used here: ask for less, or for 0"
        )
    client_gpus = 0.0
    if devices:
        client_gpus = gpus if gpus is not None else _gpu_share(parallel, devices, needs)
        at_once = devices * int(1 / client_gpus) if client_gpus < 1 else int(devices / client_gpus)
        parallel = min(parallel, at_once)
    of_gpu = f" and {client_gpus:g} of {devices} GPU" if client_gpus else ""
    text = (
        f"{parallel} of {counted(clients, 'client')} at a time on {counted(cores, 'core')}: "
        f"{client_cpus} CPU{of_gpu} each{why}{'' if needs is None else f'; {needs}'}"
    )
    return ClientResources(client_cpus, client_gpus, parallel * client_cpus, parallel, text)


def _check_ranges(clients: int, cpus: int | None, gpus: float | None) -> None:
    if clients < 1:
        raise BadRequest(f"clients = {clients}: at least 1 is needed")
    if cpus is not None and cpus < 1:
        raise BadRequest(f"client CPUs = {cpus}: a whole number of at least 1 is needed")
    if gpus is not None and (not 0 <= gpus < float("inf") or (gpus > 1 and gpus != int(gpus))):
        raise BadRequest(f"client GPUs = {gpus}: give a fraction between 0 and 1, or a whole number")


def _gpu_share(clients: int, devices: int, needs: ClientNeeds | None) -> float:
    """Return the fraction of a GPU of each of `clients` that work at a time, as far as their memory fits."""
    per_gpu = CLIENTS_PER_GPU
    if needs is not None and needs.gpu_memory:
        per_gpu = min(per_gpu, max(1, (needs.gpu_free - SERVER_GPU_MEMORY) // needs.gpu_memory))
    # Rounded down: Ray counts GPUs in units of 1/10,000, and a share rounded up would leave out the last client.
    return 10_000 // -(-min(clients, devices * per_gpu) // devices) / 10_000


def max_concurrent_clients() -> int:
    """Return how many clients Flower's simulation keeps at work at a time, however large the cluster is.

    Flower drives each of them from a thread of a pool of Python's default size: this machine's cores and 4, at most 32.
    """
    return min(32, (os.cpu_count() or 1) + 4)


def cluster_address() -> str | None:
    """Return the address of the Ray cluster in the environment, or None where a run starts its own Ray."""
    address = os.environ.get("RAY_ADDRESS", "").strip()
    return None if address in ("", "local") else address


def usable_cores() -> int:
    """Count the cores that this process may use, within its affinity and its container's limits."""
    import joblib  # type: ignore[import-untyped]

    return max(1, int(joblib.cpu_count()))


def cuda_devices() -> int:
    """Count the CUDA devices that PyTorch can use here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
