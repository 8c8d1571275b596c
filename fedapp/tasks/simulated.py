"""From a configuration to what one client works on: data set, partition, tensors; cached once per process."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedapp import sampling
from fedapp.config import RunConfig, resolve
from fedapp.data import datasets, partitions
from fedapp.data.datasets import DATASET_NAMES, Dataset, UInt8
from fedapp.data.partitions import Partition
from fedapp.data.transforms import InputSpec
from fedapp.errors import BadRequest
from fedapp.learning.task import Task
from fedapp.models import check_model


@dataclass(frozen=True)
class FederatedData:
    """A data set and how it is dealt to clients; tensors are made once per process, client and device.

    `public` are the images (P, H, W, C) uint8 that all clients may see, for methods that need such a set; no labels.
    """

    dataset: Dataset
    partition: Partition
    inputs: InputSpec
    seed: int
    public: UInt8 | None = None
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

    def public_tensor(self, device: torch.device) -> Tensor | None:
        """The public images (P, H, W, C) uint8 in their one order, or None where there are none."""
        if self.public is None:
            return None
        key = (-1, f"public/{device}")
        if key not in self._made:
            self._made[key] = torch.from_numpy(self.public).to(device), torch.zeros(0, dtype=torch.int64)
        return self._made[key][0]

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
        config.dataset, config.data_dir, config.data_fraction, config.partition, config.split, clients,
        config.seed, config.alpha, config.classes_per_client, config.min_samples, public_data(config),
    )  # fmt: skip


PUBLIC_IMAGES = 3000
"""Images that are drawn from another data set where `public-data` gives no number (KT-pFL's published setting)."""


def public_data(config: RunConfig) -> str:
    """What the public set is: "" (none), a share of the training images, or `NAME:COUNT` of another data set.

    A share that is given explicitly is held back from the clients of *every* method, so that methods which are compared
    train on the same private images; the method's own default share concerns that method alone.

    Raises
    ------
    BadRequest : neither a share between 0 and 1 nor a data set with a whole number of images.
    """
    method, _ = config.method_and_hparams()
    text = config.public_data.strip()
    if not text:
        return str(method.public_share) if method.public_share else ""
    try:
        share = float(text)
    except ValueError:
        name, _, count = text.partition(":")
        if count and not (count.isascii() and count.isdigit() and int(count) > 0):
            raise BadRequest(
                f"public-data = '{text}': after the colon stands the number of images, as in {name}:3000"
            ) from None
        if name not in DATASET_NAMES or name in ("npz", "folder", config.dataset):
            others = ", ".join(d for d in DATASET_NAMES if d not in ("npz", "folder", config.dataset))
            raise BadRequest(
                f"public-data = '{text}': give a share of the training images such as 0.05, or another data set "
                f"({others}), NAME or NAME:COUNT"
            ) from None
        return f"{name}:{count or PUBLIC_IMAGES}" if method.public_share else ""
    if not 0 < share < 1:
        raise BadRequest(f"public-data = '{text}': a share of the training images lies between 0 and 1")
    return str(share)


@functools.lru_cache(maxsize=2)
def _federated(
    name: str,
    data_dir: str,
    fraction: float,
    kind: str,
    split: str,
    clients: int,
    seed: int,
    alpha: float,
    cpc: int,
    min_samples: int,
    public: str,
) -> FederatedData:
    dataset = datasets.sample(datasets.load(name, data_dir or None), fraction, sampling.rng(seed, "data-fraction"))
    if split == "auto":
        split = "official" if dataset.num_test else "holdout"
    partition = partitions.make(
        dataset, kind=kind, split=split, clients=clients, seed=seed, alpha=alpha, classes_per_client=cpc,
        min_samples=min_samples,
    )  # fmt: skip
    images = None
    if ":" in public:
        # The folder of the user's own data holds no other data set.
        inputs = InputSpec.of(dataset)
        images = _other_images(dataset.name, inputs, public, "" if name in ("npz", "folder") else data_dir, seed)
    elif public:
        partition, indices = partitions.hold_back(partition, float(public), seed)
        images = dataset.take(indices)[0]
    return FederatedData(dataset, partition, InputSpec.of(dataset), seed, images)


def public_images(config: RunConfig, inputs: InputSpec) -> UInt8 | None:
    """Return the public images (P, H, W, C) uint8 for a node with its own data, or None where the method needs none.

    Raises
    ------
    BadRequest : a share is asked for, which nodes with their own data cannot hold back together.
    """
    public = public_data(config)
    if not public:
        return None
    if ":" not in public:
        raise BadRequest(
            f"{config.method} needs public images, and nodes with their own data have none in common: "
            "give public-data = NAME or NAME:COUNT, a data set that every node has in its data-dir"
        )
    return _other_images("the node's data", inputs, public, config.data_dir, config.seed)


def _other_images(dataset: str, inputs: InputSpec, public: str, data_dir: str, seed: int) -> UInt8:
    """Draw training images (P, H, W, C) uint8 of another data set, in the order of that data set."""
    name, count = public.split(":")
    other = datasets.load(name, data_dir or None)
    if (other.size, other.channels, other.scale) != (inputs.size, inputs.channels, inputs.scale):
        raise BadRequest(
            f"public-data = '{name}' has images of {other.size}x{other.size} pixels, {other.channels} channel(s) and "
            f"grey levels to {other.scale:g}; {dataset} has {inputs.size}x{inputs.size}, {inputs.channels} and "
            f"{inputs.scale:g}: take a data set that fits, or a share such as 0.05"
        )
    if int(count) > other.num_train:
        raise BadRequest(f"public-data = '{public}': {name} has {other.num_train} training images")
    drawn = sampling.rng(seed, "public").choice(other.num_train, int(count), replace=False)
    return other.take(np.sort(drawn))[0]


def check(config: RunConfig, clients: int) -> FederatedData:
    """Find out before anything is trained whether data, partition and models go together (`BadRequest` if not)."""
    data = federated(config, clients)
    for name in resolve(config).model_names:
        check_model(name, channels=data.inputs.channels, size=data.inputs.size)
    if config.precision == "bf16" and not bf16_works():
        place = "GPU" if torch.cuda.is_available() else "processor"
        raise BadRequest(f"precision = 'bf16': this {place} has no fast bfloat16; use fp32")
    return data


def bf16_works() -> bool:
    """Whether bfloat16 pays here: a GPU that has it, or a processor with bfloat16 instructions."""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
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
        extras={} if data.public is None else {"public": data.public_tensor(device)},
    )
