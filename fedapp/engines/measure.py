"""Memory and time of one virtual client, measured before a simulation begins.

The client with the most training data runs a few training steps and one batch of its evaluation, through the code that
its worker will run. Nothing is stored, and no random draw of the run depends on it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from clients.base import FedClient
from fedapp import process
from fedapp.config import RunConfig
from fedapp.engines.resources import ClientNeeds, cuda_devices
from fedapp.federation.context import server_context
from fedapp.lazy import torch
from fedapp.learning.evaluation import BATCH
from fedapp.learning.task import Task
from fedapp.method import ClientInfo, Method, Payload
from fedapp.tasks import simulated as tasks

BUDGET_SECONDS = 2.0
"""After this no further client is measured; the first one is measured however long it takes."""
STEPS = 4
CUDA_CONTEXT = 512 << 20
"""Bytes of GPU memory that a process takes before it holds a single tensor."""


def client_needs(configs: Sequence[RunConfig]) -> ClientNeeds:
    """Measure what one client of these runs needs.

    The client with the most training data of each architecture is measured, one after the other in one process, because
    a worker sees all of them too. Runs that differ in neither data, batch size nor architectures are measured once.

    Parameters
    ----------
    configs : prepared configurations (:func:`fedapp.engines.local.prepare`) of runs that share their workers.

    Returns
    -------
    The memory of a worker, and the seconds of the slowest client.

    Raises
    ------
    Exception : any error of a client.
    """
    different = {
        (
            c.data,
            c.training.batch_size,
            c.training.precision,
            c.model,
            c.privacy.unit_features,
        ): c
        for c in configs[::-1]
    }
    configs = list(different.values())[::-1]
    if not cuda_devices():
        return _measure(configs)
    # In another process, because a CUDA context stays as long as its process lives.
    context = process.new_processes(c.to_flat() for c in configs)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_measure, configs).result()


def _measure(configs: Sequence[RunConfig]) -> ClientNeeds:
    started = time.perf_counter()
    device = process.device()
    on_gpu = device.type == "cuda"
    gpu_free = 0
    if on_gpu:
        torch.zeros(1, device=device)
        gpu_free = torch.cuda.mem_get_info()[0]
    threads = torch.get_num_threads()
    # PyTorch imports much of itself at its first optimizer step: seconds and memory that belong to no client.
    weight = torch.zeros(1, requires_grad=True)
    weight.sum().backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD([weight], lr=0.1).step()
    process.reset_peak()
    seconds: dict[int, float] = {}
    cached = 0
    try:
        for config in configs:
            torch.set_num_threads(config.training.threads)
            data = tasks.federated(config, config.data.clients)
            sizes = [(len(s.train), len(s.test)) for s in data.partition.clients]
            image = [math.prod(data.size_of(k).shape) for k in range(len(sizes))]
            for client in _largest(config, [train * n for (train, _), n in zip(sizes, image, strict=True)]):
                if seconds and time.perf_counter() - started > BUDGET_SECONDS:
                    break
                seconds[client] = max(seconds.get(client, 0.0), _round_seconds(config, client, device))
                # A worker keeps the images of every client that it has seen.
                cached = max(cached, sum(image[k] * sum(size) for k, size in enumerate(sizes) if k != client))
    finally:
        torch.set_num_threads(threads)
    slowest = max(seconds, key=lambda c: seconds[c])
    if on_gpu:  # the images lie there
        gpu = torch.cuda.max_memory_reserved() + CUDA_CONTEXT + cached
        return ClientNeeds(slowest, process.peak_memory(), seconds[slowest], gpu, gpu_free)
    return ClientNeeds(slowest, process.peak_memory() + cached, seconds[slowest])


def _largest(config: RunConfig, sizes: Sequence[int]) -> list[int]:
    """Return the client with the most training data of each architecture, the largest of all first."""
    found: dict[str, int] = {}
    for client in sorted(range(len(sizes)), key=lambda c: (-sizes[c], c)):
        found.setdefault(config.model.name_of(client), client)
    return list(found.values())


def _round_seconds(config: RunConfig, client: int, device: torch.device) -> float:
    """Run a few steps and one batch of the evaluation; estimate the seconds of a whole round of this client.

    The first step is not counted: it allocates memory and chooses kernels.
    """
    method, hparams = config.method_and_hparams()
    task = tasks.simulated_task(config, client, config.data.clients, device)
    few = replace(
        task, train=task.train.replaced(local_epochs=1), x_test=task.x_test[:BATCH], y_test=task.y_test[:BATCH]
    )
    payload = first_payload(method, hparams, few)
    trained: FedClient | None = None
    for steps in (1, STEPS):
        if trained is not None and trained.report.seconds > BUDGET_SECONDS / STEPS:
            break
        count = min(steps * config.training.batch_size, task.num_samples)
        part = replace(few, x_train=task.x_train[:count], y_train=task.y_train[:count], x_union=None, y_union=None)
        trained = method.client(part, method, hparams)
        trained.train_round(payload, 1)
    assert trained is not None
    report = trained.report
    epochs = method.client(task, method, hparams).epochs()
    training = report.seconds / max(1, report.samples) * task.num_samples * epochs
    began = time.perf_counter()
    images = max(1, trained.measure("trained")["trained-total"])
    each = (time.perf_counter() - began) / images
    balanced = len(task.y_union) if task.y_union is not None and config.balanced_in(1) else 0
    return float(training + each * (len(task.y_test) + balanced) * len(task.protocols))


def first_payload(method: Method, hparams: Any, task: Task) -> Payload:
    """Return the payload of round 1 for this client alone."""
    client = method.client(task, method, hparams)
    metrics, facts = client.register()
    shapes = {n: tuple(s) for n, s in json.loads(str(facts["shapes"])).items()}
    common = json.loads(str(facts["common"]))
    info = ClientInfo(task.client, int(metrics["num-examples"]), task.model, task.num_classes, shapes, common)
    context = server_context(
        method, hparams, task.spec(0), [info], seed=task.seed, width=int(facts["width"]), buffers=task.buffers
    )
    strategy = method.strategy(method, hparams)
    payload: Payload = strategy.send(strategy.init(context), 1, task.client)
    return payload
