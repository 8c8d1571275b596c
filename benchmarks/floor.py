"""The bare floor: a round's gradient steps and evaluations in worker processes, with no federation around them.

Clients wait in one queue, the largest first. A worker takes the next client, scores a new model on the client's own
test split, trains it, scores it again and discards it. There are no messages, files or averages: whatever a run takes
beyond this is the cost of the engine.
"""

from __future__ import annotations

import multiprocessing
import queue
import time
from typing import Any

import torch

from fedapp import process, sampling
from fedapp.config import RunConfig, from_flat
from fedapp.learning.evaluation import evaluate
from fedapp.learning.training import train
from fedapp.models import build_model
from fedapp.tasks.simulated import federated, simulated_task


def one_client(config: RunConfig, client: int, model: torch.nn.Module, device: torch.device) -> float:
    """Compute what a FedAvg client computes in a round; return its accuracy before training."""
    task = simulated_task(config, client, config.clients, device)
    model.to(device)
    before = evaluate(model, task.x_test, task.y_test, task.inputs, task.num_classes)
    train(
        model, task.x_train, task.y_train, task.train, task.inputs,
        lambda batch: torch.nn.functional.cross_entropy(model(batch.x), batch.y),
        sampling.torch_generator(config.seed, "batches", 1, client),
    )  # fmt: skip
    evaluate(model, task.x_test, task.y_test, task.inputs, task.num_classes)
    return before.accuracy


def _work(flat: dict[str, Any], jobs: Any, done: Any) -> None:
    config = from_flat(flat)
    process.prepare(config.threads)
    data = federated(config, config.clients)
    device = process.device()
    shape = {"num_classes": data.dataset.num_classes, "channels": data.inputs.channels, "size": data.inputs.size}
    while (job := jobs.get()) is not None:
        done.put(one_client(config, job, build_model(config.model, **shape, seed=0), device))


class Floor:
    """Worker processes that run rounds; a context manager.

    Parameters
    ----------
    config : the configuration of the run to compare with.   workers : number of processes.
    """

    def __init__(self, config: RunConfig, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._jobs, self._done = context.Queue(), context.Queue()
        sizes = [len(c.train) for c in federated(config, config.clients).partition.clients]
        self._order = sorted(range(len(sizes)), key=lambda k: -sizes[k])
        self.workers = [
            context.Process(target=_work, args=(config.to_flat(), self._jobs, self._done), daemon=True)
            for _ in range(workers)
        ]

    def __enter__(self) -> Floor:
        for worker in self.workers:
            worker.start()
        return self

    def __exit__(self, *error: object) -> None:
        for _ in self.workers:
            self._jobs.put(None)
        for worker in self.workers:
            worker.join(timeout=30)

    def round(self) -> float:
        """Run all clients once and return the seconds that this takes."""
        started = time.perf_counter()
        for client in self._order:
            self._jobs.put(client)
        left = len(self._order)
        while left:
            try:
                self._done.get(timeout=5)
                left -= 1
            except queue.Empty:
                if not all(worker.is_alive() for worker in self.workers):
                    raise RuntimeError("a worker of the floor has died: see its error above") from None
        return time.perf_counter() - started
