"""What tests of methods share: hand-made contexts, replies and clients, SGD written out, a bare round loop, tables
without times.
"""

from __future__ import annotations

import copy
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from clients._initial import initial_arrays
from clients.base import FedClient
from fedapp import config as configuration
from fedapp import registry, sampling
from fedapp.core.averages import RunningMean
from fedapp.core.robust import UNGUARDED
from fedapp.data import datasets, natural, partitions
from fedapp.data.dataset import Dataset
from fedapp.data.partitions import Partition
from fedapp.data.transforms import InputSpec, normalise
from fedapp.federation.context import server_context
from fedapp.learning.state import ClientStore
from fedapp.learning.task import ModelSpec, Task
from fedapp.method import Array, Arrays, ClientInfo, Method, Payload, Reply, ServerContext, ServerState
from fedapp.models import SplitModel, build_model, selection
from fedapp.reduce.plain import MeanReducer
from fedapp.reduce.spec import Mean, Query
from fedapp.results.runs import RunResult
from fedapp.settings import DataSettings, FederationSettings, RobustnessSettings, TrainingSettings
from fedapp.tasks import simulated
from fedapp.transport.boundary import Contract, decoded_problem
from strategies.base import Strategy

SHORT = TrainingSettings(local_epochs=1, lr=0.01, optimizer="sgd", momentum=0.9, weight_decay=0, clip=0, augment="none")
DIGITS_BYTES = 4 * 38_282
"""A `digits-a` model on the wire."""


def guard(**changes: Any) -> RobustnessSettings:
    """Settings of plain averages without limits, with these changes."""
    return UNGUARDED.replaced(**changes)


def exchange(**changes: Any) -> FederationSettings:
    """Settings of rounds that need all replies, however long they take, with these changes."""
    return FederationSettings().replaced(**{"min_replies": 1.0, "min_clients": 0, "round_timeout": 0.0, **changes})


def partitioned(dataset: Dataset, *, kind: str, seed: int, arguments: str = "", **more: Any) -> Partition:
    """Divide a data set by settings whose ranges are not checked."""
    own = {"partition": kind, "partition_seed": seed, "partition_args": arguments, **more}
    make = natural.by_client if kind == "by-client" else partitions.make
    return make(dataset, DataSettings().replaced(**own))


def short(**changes: Any) -> TrainingSettings:
    """Settings of one epoch of SGD, with these changes."""
    return SHORT.replaced(**changes)


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


def refusal(strategy: Strategy, state: ServerState, sent: Reply) -> str | None:
    """What is wrong with a reply, as a run finds it; model arrays may be absent."""
    schema = strategy.schema(state, sent.kind)
    if problem := schema.check(sent):
        return problem
    present = {n: shape for n, shape in schema.shapes.items() if n in sent.arrays}
    contract = Contract(sent.client, sent.kind, replace(schema, shapes=present), sys.maxsize, sent.num_samples)
    return decoded_problem(sent.arrays, contract)


def asking(strategy: Strategy, ask: Callable[[str, Payload], Iterable[Reply]]) -> Query:
    """The query of a strategy whose clients give the replies of `ask(kind, payload)`."""
    return strategy.reader.query(lambda exchange, payload, check: ask(exchange.removeprefix("query."), payload))


def weighted_mean(replies: Iterable[Reply], previous: Mapping[str, Array], mean: RunningMean | None = None) -> Arrays:
    """The mean over replies of the arrays named in `previous`, weighted by n_k."""
    found = MeanReducer(previous, mean or RunningMean(), Mean())
    for given in replies:
        found.add(given)
    return found.result()


def random_model(rng: np.random.Generator, scale: float = 1.0) -> Arrays:
    """A model of three arrays with normal entries."""
    shapes = {"features.weight": (4, 3), "head.weight": (3, 4), "head.bias": (3,)}
    return {n: (scale * rng.standard_normal(s)).astype(np.float32) for n, s in shapes.items()}


def flat(model: Mapping[str, Array]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """All numbers of a model in one float64 vector, by name."""
    return np.concatenate([np.asarray(model[n], dtype=np.float64).ravel() for n in sorted(model)])


def participants(result: RunResult) -> list[tuple[int, dict[int, set[int]]]]:
    """The rounds of a run, each with the training labels of the clients that took part, by client."""
    config = configuration.from_flat(configuration.read_toml(result.out / "config.toml"))
    data = simulated.federated(config, config.data.clients)
    labels = {k: set(data.dataset.take(c.train)[1].tolist()) for k, c in enumerate(data.partition.clients)}
    return [(int(t), {int(k): labels[int(k)] for k in rows["client"]}) for t, rows in result.clients.groupby("round")]


def deterministic(table: pd.DataFrame) -> pd.DataFrame:
    """The columns of a result table that two equal runs have in common: all but seconds."""
    return table[[c for c in table.columns if not c.endswith("seconds")]]


def equal(a: Mapping[str, Array], b: Mapping[str, Array]) -> bool:
    """Whether two models are equal bit for bit."""
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


def one_batch_task(
    n: int = 12, classes: int = 4, *, model: str = "digits-b", client: int = 0, epochs: int = 3, lr: float = 0.1,
    momentum: float = 0.9, batch_size: int | None = None, seed: int = 5, **train: Any,
) -> Task:  # fmt: skip
    """A client whose batch is all its images: their order plays no part, and an epoch is one step."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 17, (n, 8, 8, 1), generator=generator, dtype=torch.uint8)
    y = torch.arange(n) % classes
    spec = short(local_epochs=epochs, batch_size=batch_size or n, lr=lr, momentum=momentum, **train)
    return Task(client, 1, classes, InputSpec((1, 8, 8), 16.0, (0.3,), (0.4,)), model, x, y, x[:4], y[:4], train=spec)


def pixels(task: Task) -> torch.Tensor:
    """The training images as a model gets them, (n, 1, 8, 8), normalised by hand, in float64."""
    (mean,), (std,) = task.inputs.mean, task.inputs.std
    return (task.x_train.double().reshape(len(task.x_train), 1, 8, 8) / task.inputs.scale - mean) / std


def model_like(task: Task, seed: int = 9) -> SplitModel:
    """A model of a task's architecture, other than the client's own initial one."""
    return build_model(task.model, num_classes=task.num_classes, shape=(1, 8, 8), seed=seed)


def whole(model: torch.nn.Module) -> Payload:
    """A payload of all arrays of a model."""
    return Payload(common=selection.everything(model))


def head_of(model: torch.nn.Module) -> Payload:
    """A payload of a model's head."""
    return Payload(common=selection.extract(model, ["head.weight", "head.bias"]))


def descend(model: SplitModel, loss: Callable[[SplitModel], torch.Tensor], task: Task) -> SplitModel:
    """SGD with momentum written out, in float64: a copy of `model` after the steps of a round of `one_batch_task`.

    `loss` gives the loss of all images; it must be written by hand, without the code under test.
    """
    model = copy.deepcopy(model).double().train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    velocity = [torch.zeros_like(p) for p in parameters]
    for _ in range(task.train.local_epochs):
        gradients = torch.autograd.grad(loss(model), parameters)
        with torch.no_grad():
            for p, v, g in zip(parameters, velocity, gradients, strict=True):
                v.mul_(task.train.momentum).add_(g)
                p.sub_(task.train.lr * v)
    return model


def cross_entropy(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats, image by image."""
    return -torch.stack([row[k] - row.exp().sum().log() for row, k in zip(logits, y, strict=True)]).mean()


def assert_close(arrays: Mapping[str, Array], model: torch.nn.Module, prefix: str = "", atol: float = 2e-6) -> None:
    """Every parameter of `model` whose name begins with `prefix` is in `arrays`, and nothing else is."""
    wanted = {n: p.detach().numpy() for n, p in model.named_parameters() if n.startswith(prefix)}
    assert set(arrays) == set(wanted)
    for name, array in wanted.items():
        np.testing.assert_allclose(arrays[name], array, rtol=0, atol=atol, err_msg=name)


TOY_HEAD = {"head.weight": np.array([[0.5, -0.2], [-0.3, 0.8], [0.1, 0.1]]), "head.bias": np.zeros(3)}
TOY = {"features.1.weight": np.array([[1.0, 0.5], [-0.5, 1.0]]), **TOY_HEAD}
"""The common example of the methods with personal heads: h = A x, z = W h + b, in float64."""


class InDouble(nn.Module):
    """Turns samples into float64."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x (B, d) in float64."""
        return x.double()


def toy_model() -> SplitModel:
    """Build the model of the example with its values at the start, where its mean cross-entropy is .841809."""
    trunk = nn.Sequential(InDouble(), nn.Linear(2, 2, bias=False))
    model = SplitModel(name="toy", features=trunk, activation=nn.Identity(), head=nn.Linear(2, 3)).double()
    selection.merge(model, TOY)
    return model


def toy_task(epochs: int = 1, **train: Any) -> Task:
    """The three samples of the example, one of each class, in one batch; SGD with step size .5 and no momentum."""
    x, y = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]]), torch.arange(3)
    spec = short(**{"local_epochs": epochs, "batch_size": 3, "lr": 0.5, "momentum": 0.0, **train})
    return Task(0, 1, 3, InputSpec((2,), 1.0, (0.0, 0.0), (1.0, 1.0), "table"), "toy", x, y, x, y, train=spec)


def on_toy(kind: type[FedClient]) -> type[FedClient]:
    """Return the class of clients with the model of the example."""
    return type(kind.__name__, (kind,), {"build_model": classmethod(lambda cls, spec, hparams: toy_model())})


def full_batch(task: Task, steps: int = 2, lr: float = 0.1) -> Task:
    """The task with a training of `steps` plain gradient steps, each on all its images."""
    return replace(task, train=short(local_epochs=steps, batch_size=task.num_samples, lr=lr, momentum=0.0))


def images(task: Task) -> Tensor:
    """The normalised training images of a task, (n, channels, height, width)."""
    return normalise(task.x_train.permute(0, 3, 1, 2), task.inputs)


def steps_by_hand(parameters: Iterable[nn.Parameter], loss: Callable[[], Tensor], task: Task) -> None:
    """Take the steps of `full_batch` by hand: w <- w - lr dL/dw."""
    trained = list(parameters)
    for _ in range(task.train.local_epochs):
        gradients = torch.autograd.grad(loss(), trained)
        with torch.no_grad():
            for p, gradient in zip(trained, gradients, strict=True):
                p -= task.train.lr * gradient


def clipped_by_hand(parameters: Iterable[nn.Parameter], clip: float) -> float:
    """Scale the gradients of `parameters` together to an L2 norm of at most `clip` (0: leave them); return the norm."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = float(sum(g.double().square().sum() for g in gradients)) ** 0.5
    if clip and norm > clip:
        for g in gradients:
            g.mul_(clip / norm)
    return norm


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
        spec = short(local_epochs=epochs, lr=lr, momentum=momentum)
        tasks.append(Task(c, seed, 10, inputs, "digits-a", x[:train], y[:train], x[train:], y[train:], train=spec))
    return tasks


def digits_context(method: Method, hparams: Any, tasks: Sequence[Task], seed: int = 0) -> ServerContext:
    """The context that the server would have for these clients."""

    def initial_from(k: int) -> Arrays:
        spec = ModelSpec("digits-a", 10, (1, 8, 8), sampling.derived_seed(seed, "server-model", k))
        return initial_arrays(method.client, spec, method, hparams, "global")

    return context(initial_from, [t.client for t in tasks], seed, tasks[0].num_samples)


def federate(
    method: Method,
    hparams: Any,
    tasks: Sequence[Task],
    rounds: int,
    *,
    stores: Mapping[int, Any] | None = None,
    present: Callable[[int], Sequence[int]] | None = None,
) -> tuple[Strategy, ServerState, dict[int, float]]:
    """Run rounds with bare functions; returns strategy, final state, and the `received` accuracy of each client."""
    strategy: Strategy = method.strategy(method, hparams)
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
                wrong = refusal(strategy, state, replies[-1])
                assert wrong is None, wrong
        state = strategy.aggregate(state, server_round, iter(replies))
    scores = {}
    for task in tasks:
        sent = strategy.send(state, rounds + 1, task.client)
        metrics = client(task).evaluate_round(Payload(arrays=sent.all(), scalars=sent.scalars), rounds + 1)
        scores[task.client] = metrics["received-correct"] / metrics["received-total"]
    return strategy, state, scores


@functools.cache
def small_tasks(method: str, args: str, clients: int) -> tuple[Task, ...]:
    """The clients of a small federation on digits, of about 30 images each."""
    config = configuration.from_flat({
        "method": method, "method-args": args, "dataset": "digits", "clients": clients, "data-fraction": 0.1,
        "alpha": 1.0, "local-epochs": 1, "batch-size": 16,
    })  # fmt: skip
    return tuple(simulated.simulated_task(config, k, clients, torch.device("cpu")) for k in range(clients))


class SmallFederation:
    """The server and real clients of any method, without an engine: for tests of all methods.

    Attributes
    ----------
    strategy, state : the server before round 1.   tasks : the clients' data.
    """

    def __init__(self, method: str, args: str = "", clients: int = 4) -> None:
        self.method, self.hparams = registry.configured(method, args)
        self.folder = tempfile.TemporaryDirectory()  # deleted with this object
        self.tasks = small_tasks(method, args, clients)
        infos, width = [], 0
        for task in self.tasks:
            made = self.client(task.client)
            metrics, facts = made.register()
            shapes = {n: tuple(shape) for n, shape in json.loads(str(facts["shapes"])).items()}
            n, width = int(metrics["num-examples"]), int(facts["width"])
            common = json.loads(str(facts["common"]))
            infos.append(ClientInfo(task.client, n, task.model, task.num_classes, shapes, common))
        made_of, self.strategy = self.tasks[0].spec(0), self.server()
        self.context = server_context(self.method, self.hparams, made_of, infos, seed=1, width=width)
        self.state = self.strategy.init(self.context)

    def server(self) -> Strategy:
        """A strategy that has seen no reply."""
        made: Strategy = self.method.strategy(self.method, self.hparams)
        made.context = getattr(self, "context", None)  # type: ignore[assignment]
        return made

    def client(self, number: int) -> FedClient:
        """A client with what it stored in its last round."""
        store = ClientStore(Path(self.folder.name) / str(number), self.method.id, "ab")
        made: FedClient = self.method.client(self.tasks[number], self.method, self.hparams, store)
        return made

    def replies(self, state: ServerState, server_round: int = 1, clients: Iterable[int] = range(4)) -> list[Reply]:
        """Train clients for a round; each reply passes the checks of a run."""
        return [self.reply(k, server_round, self.strategy.send(state, server_round, k), state) for k in clients]

    def reply(self, number: int, server_round: int, sent: Payload, state: ServerState, query: str = "") -> Reply:
        """The checked reply of a client to a round, or to a query after the round."""
        client = self.client(number)
        done = client.answer_query(query, sent, server_round) if query else client.train_round(sent, server_round)
        reply = Reply(number, done[1], done[0], done[2], kind=f"query.{query}" if query else "train")
        wrong = refusal(self.strategy, state, reply)
        assert wrong is None, wrong
        return reply
