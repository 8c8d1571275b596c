"""From a configuration to what one client works on: data set, partition, tensors; cached once per process."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from clients.base import Task
from fedapp.config import RunConfig, resolve
from fedapp.data import datasets, partitions
from fedapp.data.datasets import Dataset
from fedapp.data.partitions import Partition
from fedapp.data.transforms import InputSpec
from fedapp.errors import BadRequest
from fedapp.models import check_model


@dataclass(frozen=True)
class FederatedData:
    """A data set and how it is dealt to clients; tensors are made once per process, client and device."""

    dataset: Dataset
    partition: Partition
    inputs: InputSpec
    seed: int
    _made: dict[tuple[int, str], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def tensors(self, part: str, client: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Images (n, H, W, C) uint8 and labels (n,) int64 of a client's `train` or `test` split, or of the `union`."""
        key = (client, f"{part}/{device}")
        if key not in self._made:
            if part == "union":
                indices = partitions.union_test(self.dataset, self.partition, self.seed)
            else:
                indices = getattr(self.partition.clients[client], part)
            x, y = self.dataset.take(indices)
            self._made[key] = torch.from_numpy(x).to(device), torch.from_numpy(y).long().to(device)
        return self._made[key]

    def central(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """The central test set for the `global` score.

        `official`: the official test images; `holdout`: all clients' test splits together; `merged`: None, since there
        the official test images are training data of some client.
        """
        if self.partition.split == "merged":
            return None
        if self.partition.split == "official":
            x, y = np.array(self.dataset.x_test), np.array(self.dataset.y_test)
        else:
            x, y = self.dataset.take(np.sort(np.concatenate([c.test for c in self.partition.clients])))
        return torch.from_numpy(x).to(device), torch.from_numpy(y).long().to(device)


def federated(config: RunConfig, clients: int) -> FederatedData:
    """Load the data set and deal it to `clients` clients; a function of the configuration alone, cached."""
    return _federated(
        config.dataset, config.data_dir, config.partition, config.split, clients, config.seed, config.alpha,
        config.classes_per_client, config.min_samples,
    )  # fmt: skip


@functools.lru_cache(maxsize=2)
def _federated(
    name: str, data_dir: str, kind: str, split: str, clients: int, seed: int, alpha: float, cpc: int, min_samples: int
) -> FederatedData:
    dataset = datasets.load(name, data_dir or None)
    if split == "auto":
        split = "official" if dataset.num_test else "holdout"
    partition = partitions.make(
        dataset, kind=kind, split=split, clients=clients, seed=seed, alpha=alpha, classes_per_client=cpc,
        min_samples=min_samples,
    )  # fmt: skip
    return FederatedData(dataset, partition, InputSpec.of(dataset), seed)


def check(config: RunConfig, clients: int) -> FederatedData:
    """Find out before anything is trained whether data, partition and models go together (`BadRequest` if not)."""
    data = federated(config, clients)
    for name in resolve(config).model_names:
        check_model(name, channels=data.inputs.channels, size=data.inputs.size)
    if config.precision == "bf16" and not _bf16_works():
        raise BadRequest("precision = 'bf16': this processor has no fast bfloat16; use fp32")
    return data


def _bf16_works() -> bool:
    """Whether bfloat16 pays here: a GPU that has it, or a processor with bfloat16 instructions."""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported())
    try:
        return "bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


def task_of(config: RunConfig, client: int, clients: int, device: torch.device) -> Task:
    """Return what client `client` of `clients` works on.

    Raises
    ------
    BadRequest : there is no such client.
    """
    if not 0 <= client < clients:
        raise BadRequest(f"client-id (partition-id) {client} is not among the {clients} clients 0 .. {clients - 1}")
    data = federated(config, clients)
    x_train, y_train = data.tensors("train", client, device)
    x_test, y_test = data.tensors("test", client, device)
    x_union, y_union = data.tensors("union", -1, device)
    return Task(
        client=client,
        seed=config.seed,
        num_classes=data.dataset.num_classes,
        inputs=data.inputs,
        model=resolve(config).model_of(client),
        x_train=x_train,
        y_train=y_train,
        x_test=x_test,
        y_test=y_test,
        x_union=x_union,
        y_union=y_union,
        train=config.train_spec(),
        buffers=config.buffers,
        protocols=tuple(p for p in config.measured if p != "global"),
    )
