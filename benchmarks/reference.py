"""The reference loop: a round as common research libraries write it, for comparison.

The loop is one process with as many threads as the app has workers. Each time a client's arrays are needed, they are
read from compressed files, converted to a list of pairs and passed through a `DataLoader`. The model trains eagerly in
PyTorch's default memory layout. After training, each client makes a pass over its test data, and one over its training
data for the training loss. The server averages with loops over parameters. cwFedAvg adds the regulariser to each step,
averages once per class, and then mixes the averages for each client.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fedapp.config import RunConfig
from fedapp.tasks.simulated import FederatedData, federated

Pairs = list[tuple[Tensor, Tensor]]


def cnn(num_classes: int, size: int, channels: int) -> nn.Sequential:
    """Return the small CNN of the compared settings: activation before pooling, 512 features before the head."""
    side = ((size - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * side * side, 512), nn.ReLU(), nn.Linear(512, num_classes),
    )  # fmt: skip


def write_client_files(folder: Path, data: FederatedData) -> None:
    """Write every client's normalised arrays, one compressed file per client and split."""
    mean = np.asarray(data.inputs.mean, dtype=np.float32)
    std = np.asarray(data.inputs.std, dtype=np.float32)
    for client, split in enumerate(data.partition.clients):
        for part, indices in (("train", split.train), ("test", split.test)):
            x, y = data.dataset.take(indices)
            images = (x.astype(np.float32) / data.inputs.scale - mean) / std
            (folder / part).mkdir(parents=True, exist_ok=True)
            np.savez_compressed(folder / part / f"{client}.npz", x=images.transpose(0, 3, 1, 2), y=y)


def read(folder: Path, part: str, client: int) -> Pairs:
    """Read a client's file into a list of (image, label) pairs."""
    with np.load(folder / part / f"{client}.npz") as file:
        x, y = torch.tensor(file["x"], dtype=torch.float32), torch.tensor(file["y"], dtype=torch.int64)
    return list(zip(x, y))


class Reference:
    """The loop's server and clients; `round()` returns the seconds that one round takes.

    Parameters
    ----------
    config : a run configuration, which gives data, batch size and learning rate.
    folder : for the clients' files.   lam : factor of cwFedAvg's regulariser; None = FedAvg.
    """

    def __init__(self, config: RunConfig, folder: Path, threads: int, lam: float | None) -> None:
        torch.set_num_threads(threads)
        data = federated(config, config.data.clients)
        self.folder, self.lam = folder, lam
        if not folder.exists():
            write_client_files(folder, data)
        self.classes = data.dataset.num_classes
        self.batch, self.lr = config.training.batch_size, float(config.training.lr)
        self.sizes = [len(c.train) for c in data.partition.clients]
        torch.manual_seed(config.federation.seed)
        model = cnn(self.classes, data.inputs.shape[-1], data.inputs.shape[0])
        self.models = [copy.deepcopy(model) for _ in self.sizes]
        self.scores: list[float] = []

    def round(self) -> float:
        """Train and score every client, then average."""
        started = time.perf_counter()
        self.scores = [self._client(k) for k in range(len(self.models))]
        if self.lam is None:
            self._average()
        else:
            self._average_by_class()
        return time.perf_counter() - started

    def _loader(self, part: str, client: int, shuffle: bool) -> Iterable[Any]:
        return DataLoader(read(self.folder, part, client), batch_size=self.batch, shuffle=shuffle, drop_last=shuffle)  # type: ignore[arg-type]

    def _client(self, k: int) -> float:
        model = self.models[k]
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr)
        shares = self._shares(k)
        model.train()
        for x, y in self._loader("train", k, shuffle=True):
            loss = F.cross_entropy(model(x), y)
            if self.lam is not None:
                norms = torch.norm(model[-1].weight, dim=1)
                loss = loss + 0.5 * self.lam * torch.norm(shares - norms / norms.sum())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        model.eval()
        correct = total = 0
        with torch.no_grad():
            for x, y in self._loader("test", k, shuffle=False):
                correct += int((model(x).argmax(1) == y).sum())
                total += len(y)
            losses = 0.0
            for x, y in self._loader("train", k, shuffle=False):
                losses += float(F.cross_entropy(model(x), y)) * len(y)
        return correct / max(1, total)

    def _shares(self, k: int) -> Tensor:
        if self.lam is None:
            return torch.zeros(self.classes)
        labels = torch.stack([y for _, y in read(self.folder, "train", k)])
        return torch.bincount(labels, minlength=self.classes) / len(labels)

    @torch.no_grad()
    def _average(self) -> None:
        total = sum(self.sizes)
        mean = [torch.zeros_like(p) for p in self.models[0].parameters()]
        for model, size in zip(self.models, self.sizes, strict=True):
            for target, p in zip(mean, model.parameters(), strict=True):
                target += p * (size / total)
        for model in self.models:
            for target, p in zip(mean, model.parameters(), strict=True):
                p.copy_(target)

    @torch.no_grad()
    def _average_by_class(self) -> None:
        norms = [torch.norm(m[-1].weight, dim=1) for m in self.models]
        p = torch.stack([n / n.sum() for n in norms])
        mass = p * torch.tensor(self.sizes, dtype=torch.float32)[:, None]
        q = mass / mass.sum(0)
        mixed = naive_mix([list(m.parameters()) for m in self.models], p, q)
        for model, values in zip(self.models, mixed, strict=True):
            for target, value in zip(model.parameters(), values, strict=True):
                target.copy_(value)


@torch.no_grad()
def naive_mix(models: list[list[Tensor]], p: Tensor, q: Tensor) -> list[list[Tensor]]:
    """Average class-wise as defined: K global models, each a sum over clients, then a sum of them per client."""
    clients, classes = q.shape
    globals_: list[list[Tensor]] = []
    for j in range(classes):
        summed = [torch.zeros_like(t) for t in models[0]]
        for i in range(clients):
            for target, t in zip(summed, models[i], strict=True):
                target.add_(t, alpha=float(q[i, j]))
        globals_.append(summed)
    mixed = []
    for i in range(len(p)):
        blend = [torch.zeros_like(t) for t in models[0]]
        for j in range(classes):
            for target, t in zip(blend, globals_[j], strict=True):
                target.add_(t, alpha=float(p[i, j]))
        mixed.append(blend)
    return mixed
