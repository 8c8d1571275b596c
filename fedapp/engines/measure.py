"""What one virtual client needs, memory and time, measured before a simulation begins.

A few training steps and one batch of the evaluation of the client with the most training data, through the code that
its worker will run. Nothing is stored, and no draw of the run depends on it.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from clients.base import FedClient
from fedapp import process
from fedapp.config import RunConfig
from fedapp.engines.resources import Need, cuda_devices
from fedapp.learning.evaluation import BATCH
from fedapp.learning.task import Task
from fedapp.learning.training import batch_slices
from fedapp.method import ClientInfo, Method, Payload
from fedapp.tasks import simulated as tasks
from strategies.base import server_context

BUDGET_SECONDS = 2.0
"""No further client is begun after this; the first is measured however long it takes."""
STEPS = 4
CUDA_CONTEXT = 512 << 20
"""Bytes of a GPU's memory that a process takes before it holds a single tensor."""


def one_client(configs: Sequence[RunConfig]) -> Need:
    """Measure what one client of these runs needs.

    The client with the most training data of each architecture is tried, one after the other in one process, as a
    worker gets to see them; of runs that differ in neither data, batch size nor architectures the first stands for all.

    Parameters
    ----------
    configs : prepared configurations (:func:`fedapp.engines.local.prepare`) of runs that share their workers.

    Returns
    -------
    Need : the memory of a worker, and the seconds of the slowest client.

    Raises
    ------
    Exception : whatever a client may raise.
    """
    several = list({_same_need(c): c for c in configs[::-1]}.values())[::-1]
    if not cuda_devices():
        return _measured(several)
    # In a process of its own, since a CUDA context stays for as long as its process lives.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measured, several).result()


def _same_need(c: RunConfig) -> tuple[Any, ...]:
    return c.dataset, c.data_dir, c.data_fraction, c.batch_size, c.precision, c.model


def _measured(configs: Sequence[RunConfig]) -> Need:
    started = time.perf_counter()
    device = process.device()
    free = 0
    if device.type == "cuda":
        torch.zeros(1, device=device)
        free = torch.cuda.mem_get_info()[0]
    threads = torch.get_num_threads()
    _put_off_imports()
    process.reset_peak()
    seconds: dict[int, float] = {}
    others = 0
    try:
        for config in configs:
            torch.set_num_threads(config.threads)
            data = tasks.federated(config, config.clients)
            splits = data.partition.clients
            # A worker keeps the images of every client that it has seen.
            sizes = [len(s.train) + len(s.test) for s in splits]
            image = data.inputs.channels * data.inputs.size**2
            for client in _largest(config, [len(s.train) for s in splits]):
                if seconds and time.perf_counter() - started > BUDGET_SECONDS:
                    break
                seconds[client] = max(seconds.get(client, 0.0), _round_seconds(config, client, device))
                others = max(others, (sum(sizes) - sizes[client]) * image)
    finally:
        torch.set_num_threads(threads)
    gpu = torch.cuda.max_memory_reserved() + CUDA_CONTEXT if device.type == "cuda" else 0
    slowest = max(seconds, key=lambda c: seconds[c])
    on_gpu = others if gpu else 0
    return Need(slowest, process.peak_memory() + others - on_gpu, seconds[slowest], gpu + on_gpu, free)


def _put_off_imports() -> None:
    """Make PyTorch import what it needs for its first optimizer step: seconds that are no client's."""
    weight = torch.zeros(1, requires_grad=True)
    weight.sum().backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD([weight], lr=0.1).step()


def _largest(config: RunConfig, sizes: Sequence[int]) -> list[int]:
    """Return the client with the most training data of each architecture, the one with the most of all first."""
    found: dict[str, int] = {}
    for client in sorted(range(len(sizes)), key=lambda c: (-sizes[c], c)):
        found.setdefault(config.model_of(client), client)
    return list(found.values())


def _round_seconds(config: RunConfig, client: int, device: torch.device) -> float:
    """Run a few steps and one batch of the evaluation; return about how long a round of the client takes, in seconds.

    The first step is not counted: it allocates, and chooses its kernels.
    """
    method, hparams = config.method_and_hparams()
    task = tasks.task_of(config, client, config.clients, device)
    few = replace(task, train=replace(task.train, epochs=1), x_test=task.x_test[:BATCH], y_test=task.y_test[:BATCH])
    payload = _first_payload(method, hparams, few)
    slices = batch_slices(task.num_samples, config.batch_size)
    trained: FedClient | None = None
    counts = [slices[min(steps, len(slices)) - 1].stop for steps in (1, STEPS)]
    for count in counts:
        if trained is not None and trained.report.seconds > BUDGET_SECONDS / STEPS:
            break
        part = replace(few, x_train=task.x_train[:count], y_train=task.y_train[:count], x_union=None, y_union=None)
        trained = method.client(part, method, hparams)
        trained.train_round(payload, 1)
    assert trained is not None
    report = trained.report
    training = report.seconds / max(1, report.samples) * task.num_samples * config.local_epochs
    began = time.perf_counter()
    images = max(1, trained.measure("trained")["trained-total"])
    each = (time.perf_counter() - began) / images
    balanced = len(task.y_union) if task.y_union is not None and config.balanced_in(1) else 0
    return float(training + each * (len(task.y_test) + balanced) * len(task.protocols))


def _first_payload(method: Method, hparams: Any, task: Task) -> Payload:
    """Return what the server would send in round 1 to this client, were it the only one."""
    client: FedClient = method.client(task, method, hparams)
    metrics, facts = client.register()
    shapes = {n: tuple(s) for n, s in json.loads(str(facts["shapes"])).items()}
    info = ClientInfo(
        task.client, int(metrics["num-examples"]), task.model, task.num_classes, shapes, client.common_facts()
    )
    context = server_context(
        method, hparams, task.spec(0), [info], seed=task.seed, width=int(facts["width"]), buffers=task.buffers
    )
    strategy = method.strategy(method, hparams)
    payload: Payload = strategy.send(strategy.init(context), 1, task.client)
    return payload
