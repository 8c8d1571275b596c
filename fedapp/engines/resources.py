"""What one virtual client gets of a machine: cores, a fraction of a GPU, and how many clients work at a time."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

from fedapp.errors import BadRequest

_MEMORY_PER_CLIENT = 1 << 30  # bytes; an actor that has imported torch takes about half of it
_CLIENTS_PER_GPU = 8
_SERVER_ON_GPU = 1 << 30  # bytes; the server scores its global model there


@dataclass(frozen=True)
class Need:
    """What one virtual client was measured to need.

    Attributes
    ----------
    client : whom it was measured on.
    memory : bytes of main memory of its worker process.   seconds : of one round, about.
    gpu_memory : bytes of a GPU's memory, 0 without a GPU.   gpu_free : bytes that were free on the GPU.
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
class Resources:
    """What one virtual client gets, and how many of them work at a time."""

    client_cpus: int
    client_gpus: float
    total_cpus: int | None
    """CPUs that Ray may use in all; None where a cluster that exists decides."""
    parallel: int
    """Clients at a time; on a cluster an upper bound."""
    text: str


def choose_resources(
    clients: int, cpus: int | None = None, gpus: float | None = None, need: Need | None = None
) -> Resources:
    """Choose CPUs and GPU fractions per virtual client.

    Clients train side by side, one core each, because one process per core beats threads within a process on small
    models. As many work at a time as there are clients, cores and memory for: what a client was measured to need, and
    as much again for the server, else 1 GiB each. Where CUDA is present each requests a fraction of a GPU, as many to a
    GPU as its memory holds beside the server's own, and at most 8, since Ray hides the GPUs from whoever requests none.

    Parameters
    ----------
    clients : int
        Number of virtual clients, at least 1.
    cpus : int or None
        CPUs per client; None = 1.
    gpus : float or None
        GPUs per client, a fraction below 1 or a whole number; None = chosen, 0 = train on the CPU.
    need : Need or None
        What one client needs; None = not measured.

    Returns
    -------
    Resources

    Raises
    ------
    BadRequest
        A number out of range, more CPUs than there are, or a GPU where there is none. A cluster's machines cannot be
        seen from here, so with ``RAY_ADDRESS`` only the ranges are checked.
    """
    if clients < 1:
        raise BadRequest(f"clients = {clients}: at least 1 is needed")
    if cpus is not None and cpus < 1:
        raise BadRequest(f"client CPUs = {cpus}: a whole number of at least 1 is needed")
    if gpus is not None and (not 0 <= gpus < float("inf") or (gpus > 1 and gpus != int(gpus))):
        raise BadRequest(f"client GPUs = {gpus}: give a fraction between 0 and 1, or a whole number")
    client_cpus = cpus or 1
    cluster = cluster_address()
    if cluster:
        client_gpus = gpus or 0.0
        each = f"{client_cpus} CPU and {client_gpus:g} GPU"
        most = min(clients, driven_at_once())
        text = f"Ray cluster at {cluster}: {each} per client, as many at a time as fit there, at most {most}"
        return Resources(client_cpus, client_gpus, None, most, text)

    cores = usable_cores()
    if client_cpus > cores:
        raise BadRequest(f"client CPUs = {client_cpus}, but only {cores} can be used here: ask for at most {cores}")
    available = psutil.virtual_memory().available
    memory = available // need.memory - 1 if need is not None else available // _MEMORY_PER_CLIENT
    parallel = min(clients, cores // client_cpus, max(1, memory), driven_at_once())
    devices = cuda_devices() if gpus is None or gpus > 0 else 0
    if gpus is not None and gpus > devices:
        raise BadRequest(
            f"client GPUs = {gpus:g}, but {devices or 'no'} CUDA device can be used here: ask for less, or for 0"
        )
    client_gpus = 0.0
    if devices:
        fit = _CLIENTS_PER_GPU
        if need is not None and need.gpu_memory:
            fit = min(fit, max(1, (need.gpu_free - _SERVER_ON_GPU) // need.gpu_memory))
        # Rounded down: Ray counts in units of 1/10,000 and would not fit the last client when a share is rounded up.
        share = -(-min(parallel, devices * fit) // devices)
        client_gpus = gpus if gpus is not None else 10_000 // share / 10_000
        parallel = min(parallel, int(devices / client_gpus))
    of_gpu = f" and {client_gpus:g} of {devices} GPU" if client_gpus else ""
    text = f"{parallel} of {clients} clients at a time on {cores} cores: {client_cpus} CPU{of_gpu} each"
    if need is not None:
        text += f"; {need}"
    return Resources(client_cpus, client_gpus, parallel * client_cpus, parallel, text)


def driven_at_once() -> int:
    """Return how many clients Flower's simulation keeps at work at a time, however large the cluster is.

    Each client at work has a thread of a pool of Python's default size: 4 more than this machine's cores, at most 32.
    """
    return min(32, (os.cpu_count() or 1) + 4)


def cluster_address() -> str | None:
    """Return the address of the Ray cluster that the environment asks for, or None for Ray in this machine."""
    address = os.environ.get("RAY_ADDRESS", "").strip()
    return None if address in ("", "local") else address


def usable_cores() -> int:
    """Count the cores that this process may use: affinity and container limits respected."""
    import joblib  # type: ignore[import-untyped]

    return max(1, int(joblib.cpu_count()))


def cuda_devices() -> int:
    """Count the CUDA devices that torch can use here."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
