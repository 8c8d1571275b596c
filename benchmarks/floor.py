"""The bare floor: a round's gradient steps and evaluations in worker processes, with no federation around them.

Clients wait in one queue, the largest first. A process takes the next client, scores a new model on the client's own
test split, trains it, scores it again and discards it. There are no messages, files or averages: whatever a run takes
beyond this is the cost of the engine.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch

from fedapp import process, sampling
from fedapp.config import RunConfig
from fedapp.learning.evaluation import evaluate
from fedapp.learning.training import Phase, train
from fedapp.models import build_model
from fedapp.tasks.simulated import federated, simulated_task


def one_client(config: RunConfig, client: int) -> float:
    """Compute what a FedAvg client computes in a round; return its accuracy before training."""
    device = process.device()
    task = simulated_task(config, client, config.data.clients, device)
    model = build_model(config.model.model, num_classes=task.num_classes, shape=task.inputs.shape, seed=0).to(device)
    before = evaluate(model, task.x_test, task.y_test, task.inputs, task.num_classes)
    train(
        model, task.x_train, task.y_train,
        Phase(lambda batch: torch.nn.functional.cross_entropy(model(batch.x), batch.y), task.train),
        task.inputs, sampling.torch_generator(config.federation.seed, "batches", 1, client),
    )  # fmt: skip
    evaluate(model, task.x_test, task.y_test, task.inputs, task.num_classes)
    return before.accuracy


@contextmanager
def floor_processes(config: RunConfig, workers: int) -> Iterator[tuple[list[int], Callable[[], float]]]:
    """Keep processes that run rounds.

    Yields
    ------
    Their ids, and what runs all clients once and returns the seconds that this takes.
    """
    sizes = [len(c.train) for c in federated(config, config.data.clients).partition.clients]
    order = sorted(range(len(sizes)), key=lambda k: -sizes[k])
    context, threads = multiprocessing.get_context("spawn"), config.training.threads
    with ProcessPoolExecutor(workers, context, initializer=process.prepare, initargs=(threads,)) as pool:

        def run() -> float:
            started = time.perf_counter()
            list(pool.map(partial(one_client, config), order))
            return time.perf_counter() - started

        pool.submit(int).result()  # starts the processes
        yield list(pool._processes), run
