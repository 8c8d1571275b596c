"""What tests of methods share: hand-made contexts, replies and clients, a bare round loop, tables without times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from clients.base import FedClient
from fedapp import sampling
from fedapp.data import datasets
from fedapp.data.transforms import InputSpec
from fedapp.learning.task import ModelSpec, Task
from fedapp.learning.training import TrainSpec
from fedapp.method import Array, Arrays, ClientInfo, Method, Payload, Reply, ServerContext, ServerState
from fedapp.transport import selection
from strategies.base import FedStrategy

DIGITS_BYTES = 4 * 38_282
"""A `digits-a` model on the wire."""


def point(*values: float) -> Arrays:
    """A model that is one vector, called `head.weight`."""
    return {"head.weight": np.asarray(values, dtype=np.float32)}


def reply(client: int, n: int, arrays: Arrays, **metrics: Any) -> Reply:
    """A checked reply."""
    return Reply(client, n, arrays, {k.replace("_", "-"): v for k, v in metrics.items()})


def context(
    initial: Callable[[int], Arrays] | Arrays, clients: int | Sequence[int] = 3, seed: int = 0, samples: int = 10,
    num_classes: int = 10, width: int = 64,
) -> ServerContext:  # fmt: skip
    """A server's context around given initial models."""
    draw = initial if callable(initial) else lambda k: initial
    ids = range(clients) if isinstance(clients, int) else clients
    shapes = {n: a.shape for n, a in draw(0).items()}
    return ServerContext(
        seed=seed,
        clients=tuple(ClientInfo(c, samples, "digits-a", num_classes, shapes) for c in ids),
        num_classes=num_classes,
        width=width,
        initial=draw(0),
        initial_from=draw,
        rng=lambda purpose, *numbers: sampling.rng(seed, purpose, *numbers),
    )


def random_model(rng: np.random.Generator, scale: float = 1.0) -> Arrays:
    """A model of three arrays with normal entries."""
    shapes = {"features.weight": (4, 3), "head.weight": (3, 4), "head.bias": (3,)}
    return {n: (scale * rng.standard_normal(s)).astype(np.float32) for n, s in shapes.items()}


def flat(model: Mapping[str, Array]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """All numbers of a model in one float64 vector, by name."""
    return np.concatenate([np.asarray(model[n], dtype=np.float64).ravel() for n in sorted(model)])


def deterministic(table: pd.DataFrame) -> pd.DataFrame:
    """The columns of a result table that two equal runs have in common: all but seconds."""
    return table[[c for c in table.columns if not c.endswith("seconds")]]


def equal(a: Mapping[str, Array], b: Mapping[str, Array]) -> bool:
    """Whether two models are equal bit for bit."""
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


def digit_tasks(
    clients: int, *, seed: int = 0, train: int = 40, test: int = 40, relabel: Callable[[int, int], int] | None = None,
    epochs: int = 2, momentum: float = 0.9, lr: float = 0.05,
) -> list[Task]:  # fmt: skip
    """Clients with disjoint parts of digits; `relabel(client, label)` gives populations that contradict each other."""
    data = datasets.load("digits")
    order = np.random.default_rng(seed).permutation(data.num_train)
    inputs = InputSpec.of(data)
    tasks = []
    for c in range(clients):
        rows = order[c * (train + test) : (c + 1) * (train + test)]
        x = torch.from_numpy(np.array(data.x_train[rows]))
        y = torch.tensor([int(v) if relabel is None else relabel(c, int(v)) for v in data.y_train[rows]])
        spec = TrainSpec(epochs=epochs, lr=lr, momentum=momentum)
        tasks.append(Task(c, seed, 10, inputs, "digits-a", x[:train], y[:train], x[train:], y[train:], train=spec))
    return tasks


def digits_context(method: Method, hparams: Any, tasks: Sequence[Task], seed: int = 0) -> ServerContext:
    """The context that the server would have for these clients."""

    def initial_from(k: int) -> Arrays:
        spec = ModelSpec("digits-a", 10, 1, 8, sampling.derived_seed(seed, "server-model", k))
        model = method.client.build_model(spec, hparams)
        return selection.extract(model, FedClient.names_of(model, method, hparams, "global"))

    return context(initial_from, [t.client for t in tasks], seed, tasks[0].num_samples)


def federate(
    method: Method,
    hparams: Any,
    tasks: Sequence[Task],
    rounds: int,
    *,
    stores: Mapping[int, Any] | None = None,
    present: Callable[[int], Sequence[int]] | None = None,
) -> tuple[FedStrategy, ServerState, dict[int, float]]:
    """Run rounds with bare functions; returns strategy, final state, and the `received` accuracy of each client."""
    strategy: FedStrategy = method.strategy(method, hparams)
    state = strategy.init(digits_context(method, hparams, tasks))
    stores = stores or {}

    def client(task: Task) -> FedClient:
        built: FedClient = method.client(task, method, hparams, stores.get(task.client))
        return built

    for server_round in range(1, rounds + 1):
        here = set(range(len(tasks)) if present is None else present(server_round))
        replies = []
        for task in tasks:
            if task.client in here:
                sent = strategy.send(state, server_round, task.client)
                arrays, n, metrics = client(task).train_round(
                    Payload(arrays=sent.all(), scalars=sent.scalars), server_round
                )
                replies.append(Reply(task.client, n, arrays, metrics))
                problem = strategy._check(state, replies[-1])
                assert problem is None, problem
        state = strategy.aggregate(state, server_round, iter(replies))
    scores = {}
    for task in tasks:
        sent = strategy.send(state, rounds + 1, task.client)
        metrics = client(task).evaluate_round(Payload(arrays=sent.all(), scalars=sent.scalars), rounds + 1)
        scores[task.client] = metrics["received-correct"] / metrics["received-total"]
    return strategy, state, scores
