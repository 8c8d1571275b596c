"""From a configuration to one client's task in a simulation: data set, partition, tensors; cached in the process."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedapp import process, sampling
from fedapp.config import RunConfig, check_liars
from fedapp.data import datasets, flower, natural, partitions
from fedapp.data.cache import file_identity
from fedapp.data.columns import BODY
from fedapp.data.dataset import Dataset, View, sample
from fedapp.data.moments import Rows, Samples, binary, moments
from fedapp.data.names import SHOWN
from fedapp.data.partitions import Partition
from fedapp.data.transforms import InputSpec, channels_first, normalise
from fedapp.errors import BadRequest, described
from fedapp.lazy import Tensor, torch
from fedapp.learning import evaluation
from fedapp.learning.task import Task
from fedapp.learning.training import class_weights
from fedapp.models import build_model, check_model, default_model, default_small, is_own, own, weights
from fedapp.settings import DataSettings, ModelSettings
from fedapp.settings.evaluation import CONFUSION
from fedapp.tasks.public import PublicSource, draw_images, public_source

Indices = NDArray[np.int64]
KEPT_BYTES = 192 << 20
"""Bytes of clients' images that a process keeps as tensors."""


def on_device(rows: tuple[Samples, Indices], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return samples and labels (n,) as tensors."""
    x, y = rows
    return torch.from_numpy(x).to(device), torch.from_numpy(y).long().to(device)


@dataclass(frozen=True)
class FederatedData:
    """A data set and its partition over the clients.

    Tensors are made once per process, client and device.

    Attributes
    ----------
    dataset, partition : the data and their assignment to clients.
    sizes : how the images are normalised, unless each client does it by itself; always their shape and scale. One,
        or where clients' samples differ in size, one for each of the data set's parts.
    seed : of the data (`RunConfig.data_seed`).
    public : (P, H, W, C) uint8 images that all clients may see, without labels; None where the method needs none.
    own_moments : each client's samples are normalised by mean and standard deviation of its own training rows.
    """

    dataset: Dataset
    partition: Partition
    sizes: tuple[InputSpec, ...]
    seed: int
    public: Samples | None = None
    own_moments: bool = False
    _fitted: dict[int, InputSpec] = field(default_factory=dict, repr=False, compare=False)
    _made: dict[tuple[int, str], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False)
    _recent: OrderedDict[tuple[int, str], tuple[Tensor, Tensor]] = field(
        default_factory=OrderedDict, repr=False, compare=False
    )
    _size: list[int] = field(default_factory=lambda: [0], repr=False, compare=False)

    @property
    def inputs(self) -> InputSpec:
        """Of the samples; where clients differ in their size, of those of the first client."""
        return self.size_of(0)

    def size_of(self, client: int) -> InputSpec:
        """Return what samples of this client's size are: their shape, and their normalisation over all clients."""
        part = self.dataset.part
        return self.sizes[0 if part is None else part[self.partition.clients[client].train[0]]]

    def tensors(self, part: str, client: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return images (n, H, W, C) uint8 and labels (n,) int64 of a client's `train`, `test` or `validation` split.

        Those of the last clients are kept, as many as `KEPT_BYTES` hold.
        """
        key = (client, f"{part}/{device}")
        if key in self._recent:
            self._recent.move_to_end(key)
            return self._recent[key]
        found = self._recent[key] = on_device(self.dataset.take(getattr(self.partition.clients[client], part)), device)
        self._size[0] += found[0].nbytes
        while self._size[0] > KEPT_BYTES and len(self._recent) > 1:
            _, (old, _) = self._recent.popitem(last=False)
            self._size[0] -= old.nbytes
        return found

    def union(self, limit: int, device: torch.device) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return the common test set for the balanced score, at most `limit` images; the same for all clients.

        Where clients' samples differ in size, they have none in common.
        """
        if self.dataset.parts:
            return None, None
        key = (-1, f"union/{limit}/{device}")
        if key not in self._made:
            indices = partitions.union_test(self.dataset, self.partition, self.seed, limit)
            self._made[key] = on_device(self.dataset.take(indices), device)
        return self._made[key]

    def inputs_of(self, client: int) -> InputSpec:
        """Return how the samples of a client are normalised."""
        if not self.own_moments:
            return self.size_of(client)
        if client not in self._fitted:
            [(part, own)] = self.dataset.by_size(self.partition.clients[client].train)
            mean, std = moments(View(part, own), part.scale)
            self._fitted[client] = replace(self.size_of(client), mean=mean, std=std)
        return self._fitted[client]

    def public_tensor(self, device: torch.device) -> Tensor | None:
        """Return the public images (P, H, W, C) uint8, in the same order for all clients, or None."""
        if self.public is None:
            return None
        key = (-1, f"public/{device}")
        if key not in self._made:
            self._made[key] = torch.from_numpy(self.public).to(device), torch.zeros(0, dtype=torch.int64)
        return self._made[key][0]

    def central(self, device: torch.device, body: str = "") -> tuple[Tensor, Tensor] | None:
        """Return images (n, H, W, C) uint8 and labels (n,) int64 of the central test set for the `global` score.

        With the split `official` they are the official test images, with `holdout` all clients' test splits together.
        With `merged` there are none, since some client trains on the official test images, and where each client
        normalises by itself there are none, since these images belong to no client; nor where clients' samples differ
        in size, since no model takes all of them; `body` asks for the rows of one body.
        """
        if self.partition.split == "merged" or self.own_moments or (self.dataset.parts and not body):
            return None
        if self.partition.split == "official":
            rows = self.dataset.num_train + np.arange(self.dataset.num_test)
        else:
            rows = np.sort(np.concatenate([c.test for c in self.partition.clients]))
        found = [(part, own) for part, own in self.dataset.by_size(rows) if body in ("", part.about.get(BODY))]
        return on_device(found[0][0].take(found[0][1]), device) if found else None


def federated(config: RunConfig, clients: int) -> FederatedData:
    """Load the data set and partition it over `clients` clients; cached.

    The result depends on the configuration, its files and the number of clients alone, so every process has the same.

    Raises
    ------
    BadRequest : the data are not there, or the partition or the public set cannot be made.
    """
    settings = _settings(config.data, clients, config.data_seed)
    whole = datasets.latest(settings.dataset, settings.data_dir or None, settings)
    file = settings.partition_file
    version = tuple(file_identity(Path(file))) if file and Path(file).is_file() else ()
    one_size = settings.skip_bad and not settings.bodies and not config.method_and_hparams()[0].heterogeneous

    def made(unseen: tuple[int, ...]) -> FederatedData:
        return _federated(whole, settings, public_source(config), unseen, one_size, version)

    unseen: tuple[int, ...] = ()
    if config.evaluation.unseen and clients:
        unseen = config.unseen_of(range(clients), made(()).partition.names if config.evaluation.names_unseen else ())
    data = made(unseen)
    return replace(data, sizes=tuple(with_weights(config, i) for i in data.sizes)) if config.model.weights else data


@functools.lru_cache(maxsize=8)
def _settings(data: DataSettings, clients: int, seed: int) -> DataSettings:
    return data.replaced(clients=clients, partition_seed=seed)


def with_weights(config: RunConfig, inputs: InputSpec) -> InputSpec:
    """Return how images are normalised: with `auto` as the run's weights of torchvision want it, else as given."""
    known = (
        weights.preprocessing(config.model.names[0])
        if config.model.weights and config.data.normalise == "auto"
        else None
    )
    if known is None or inputs.kind != "image" or len(inputs.mean) != len(known[1]):
        return inputs
    return replace(inputs, mean=known[1], std=known[2])


@functools.lru_cache(maxsize=4)
def _federated(
    whole: Dataset,
    settings: DataSettings,
    public: PublicSource | None,
    unseen: tuple[int, ...],
    one_size: bool,
    version: tuple[str | int, ...],  # of the partition's file
) -> FederatedData:
    kind, clients, seed, how = settings.partition, settings.clients, settings.partition_seed, settings.normalise
    split: str = settings.split
    name = whole.name
    whole = whole.of_one_size() if one_size else whole
    dataset = sample(whole, settings.data_fraction, sampling.rng(seed, "data-fraction"))
    if kind == "auto":
        kind = default_partition(dataset)
    if split == "auto":
        given = "given" if kind == "by-client" else "official"
        # The official test rows are dealt by labels: a client that is one owner would be tested on other owners' rows.
        given = "merged" if flower.is_named(kind) and flower.column(kind, settings.partition_args) != "label" else given
        split = given if dataset.num_test else "holdout"
    settings = settings.replaced(partition=kind, split=split)
    if kind == "file":
        partition = natural.from_file(dataset, Path(settings.partition_file))
        if clients not in (0, len(partition.clients)):
            raise BadRequest(
                f"clients = {clients}, but {settings.partition_file} lists {len(partition.clients)}: set clients = 0"
            )
    elif kind == "by-client":
        partition = natural.by_client(dataset, settings)
    else:
        partition = partitions.make(dataset, settings)
    partition = natural.given_validation(partition, dataset)
    _check_sizes(dataset, partition, public)
    specs = [InputSpec.of(part) for part in dataset.parts or (dataset,)]
    images, indices = None, np.zeros(0, np.int64)
    if public is not None and public.share:
        partition, indices = partitions.hold_back(partition, public.share, seed, unseen)
        images = dataset.take(indices)[0]
    elif public is not None:
        # Where data-dir is the user's own data, it does not hold other data sets.
        images = draw_images(
            public, dataset.name, specs[0], settings.data_dir if datasets.published(name) else "", seed
        )
    # A validation split that the data or the file bring along wins.
    if settings.validation and not any(len(c.validation) for c in partition.clients):
        partition = partitions.hold_out(partition, settings.validation, seed, dataset)
    # All may see public rows, and with `auto` they count: methods that hold some back see what the others see.
    held = _training_rows(dataset, partition, unseen, indices[:0] if how == "data" else indices)
    sized = zip(specs, dataset.parts or (dataset,), strict=True)
    specs = [fitted(spec, View(part, held[id(part)]), how) if id(part) in held else spec for spec, part in sized]
    return FederatedData(dataset, partition, tuple(specs), seed, images, own_moments=how == "client")


def _training_rows(
    dataset: Dataset, partition: Partition, unseen: tuple[int, ...], public: Indices
) -> dict[int, Indices]:
    """Return the rows that clients train on, and public ones, by the id of the part of the data set that has them.

    Of unseen clients they are returned only for a part that no other client has.
    """
    held: dict[int, Indices] = {}
    for apart in (True, False):
        if rows := [c.train for k, c in enumerate(partition.clients) if (k in unseen) == apart]:
            held |= {id(part): own for part, own in dataset.by_size(np.unique(np.concatenate([*rows, public])))}
    return held


def _check_sizes(dataset: Dataset, partition: Partition, public: PublicSource | None) -> None:
    """Refuse what samples of several sizes do not go with, whatever the models are."""
    if not dataset.parts:
        return
    if public is not None:
        raise BadRequest(
            f"public rows go to all clients, and the samples of {dataset.name} differ in size "
            f"({'; '.join(dataset.unlike()[:SHOWN])}): choose a method without, or bring the samples to one size"
        )
    for number, client in enumerate(partition.clients):
        if len(dataset.by_size(np.concatenate([client.train, client.test, client.validation]))) > 1:
            name = partition.names[number] if partition.names else number
            raise BadRequest(
                f"client {name} would hold samples of several sizes: bring them to one size, or choose partition = "
                "by-client where each file is a client"
            )


def fitted(inputs: InputSpec, rows: Rows, how: str) -> InputSpec:
    """Return the specification with what training rows say: mean, standard deviation, and which features are binary.

    Parameters
    ----------
    inputs : its mean and standard deviation are those published for the data set, or empty.
    rows : of clients that train, and no others: no test or validation row may have a say in how samples are normalised.
    how : `normalise`: with `auto` published values stay; with `none` samples are only divided by scale.
    """
    if inputs.kind == "table":
        inputs = replace(inputs, binary=binary(rows))
    if how == "auto" and inputs.mean:
        return inputs
    width = inputs.shape[0]
    mean, std = ((0.0,) * width, (1.0,) * width) if how == "none" else moments(rows, inputs.scale)
    return replace(inputs, mean=mean, std=std)


def check_moments(config: RunConfig, inputs: InputSpec) -> None:
    """Refuse, with `dp`, samples that own rows normalise; whether the published numbers fit them depends on the data.

    Raises
    ------
    BadRequest : `normalise = auto`, and mean and standard deviation are neither published nor those of the weights.
    """
    if config.privacy.dp == "none" or config.data.normalise != "auto":
        return
    known = datasets.published(config.data.dataset)
    pretrained = weights.preprocessing(config.model.names[0]) if config.model.weights else None
    if inputs.mean not in (known and known.mean, pretrained and pretrained[1]):
        raise BadRequest(
            f"dp = '{config.privacy.dp}': normalise = 'auto' takes mean and deviation of your own data, since no "
            f"published ones fit {described(inputs.shape)}: take normalise = 'none'"
        )


def check(config: RunConfig, clients: int) -> FederatedData:
    """Check before anything is trained that data, partition, models, class weights and precision fit together.

    Raises
    ------
    BadRequest : they do not; says what to change.
    """
    datasets.load(config.data.dataset, config.data.data_dir or None, config.data)  # what is there now
    if config.model.weights:
        weights.read(config.model.weights)
    data = federated(config, clients)
    check_liars(config, clients - len(config.unseen_of(range(clients), data.partition.names)), simulation=True)
    for inputs in data.sizes:
        check_moments(config, inputs)
    others = data.dataset.unlike()
    if others and not config.data.bodies and not config.method_and_hparams()[0].heterogeneous:
        usual = described(data.dataset.parts[data.dataset.common].shape)
        raise BadRequest(
            f"{config.federation.method} needs samples of one size. Most clients have {usual}, {len(others)} have "
            "others: "
            f"{', '.join(others[:SHOWN])}{', ...' if len(others) > SHOWN else ''}. Bring them to one size, leave these "
            "clients out with skip-bad = true, or choose a method that allows different architectures (fedapp methods)"
        )
    for (name, _), client in architectures(config, data).items():
        inputs = data.size_of(client)
        try:
            check_model(default_model(inputs.shape) if name == "auto" else name, inputs.shape)
        except BadRequest as error:
            if not others:
                raise
            who = data.partition.names[client] if data.partition.names else client
            raise BadRequest(
                f"client {who}: {error} Architectures are given to clients in the order of {config.model.model}, again "
                "and again; auto is the default for each size"
            ) from error
        if is_own(name):
            rows, _ = data.dataset.take(data.partition.clients[client].train[:2])
            try_model(name, rows, inputs, data.dataset.num_classes, config.model)
    if is_own(config.second_model):
        rows, _ = data.dataset.take(data.partition.clients[0].train[:2])
        try_model(config.second_model, rows, data.inputs, data.dataset.num_classes, own.PLAIN)
    if config.second_model and data.dataset.parts:
        _check_second(config, data)
    class_weights(config.training.class_weights, torch.zeros(0, dtype=torch.int64), data.dataset.num_classes)
    if config.evaluation.confusion and data.dataset.num_classes > evaluation.MOST_CONFUSED:
        raise BadRequest(
            f"metrics: '{CONFUSION}' is for at most {evaluation.MOST_CONFUSED} classes, and the data have "
            f"{data.dataset.num_classes}: leave it out"
        )
    if config.training.precision == "bf16" and not bf16_works():
        place = "GPU" if torch.cuda.is_available() else "processor"
        raise BadRequest(f"precision = 'bf16': this {place} has no fast bfloat16; use fp32")
    return data


def _check_second(config: RunConfig, data: FederatedData) -> None:
    """Refuse a second model, which all clients share, whose arrays depend on the size of samples."""
    built = set()
    for shape in dict.fromkeys(spec.shape for spec in data.sizes):
        name = default_small(shape) if config.second_model == "auto" else config.second_model
        check_model(name, shape)
        model = build_model(name, num_classes=data.dataset.num_classes, shape=shape, seed=0)
        built.add(tuple((key, array.shape) for key, array in model.state_dict().items()))
    if len(built) > 1:
        raise BadRequest(
            f"{config.federation.method} shares one small model, and {config.second_model} is another one for each "
            f"size of samples ({', '.join(data.dataset.unlike()[:SHOWN])}): bring the samples to one size, or for "
            'images choose a model that takes any, such as method-args = "small=cnn-d"'
        )


def architectures(config: RunConfig, data: FederatedData) -> dict[tuple[str, tuple[int, ...]], int]:
    """Return a client for each architecture of a run and each shape of samples that it is built for."""
    found = {} if data.dataset.parts else {(name, data.inputs.shape): 0 for name in config.model.names}
    for client in range(len(data.partition.clients)) if data.dataset.parts else ():
        found.setdefault((config.model.name_of(client), data.size_of(client).shape), client)
    return found


def try_model(name: str, rows: Samples, inputs: InputSpec, num_classes: int, settings: ModelSettings) -> None:
    """Try an own model on a client's first training rows, raw as in a `Dataset`.

    Raises
    ------
    BadRequest : it does not do what a model must; says what to change.
    """
    x = normalise(channels_first(torch.from_numpy(np.array(rows[[0, -1]]))), inputs)
    own.check(name, x, num_classes=num_classes, settings=settings)


def bf16_works() -> bool:
    """Return whether this machine computes in bfloat16: a GPU that does, or a processor with such instructions."""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return "bf16" in str(process.cpu_facts())


def simulated_task(
    config: RunConfig, client: int, clients: int, device: torch.device, images: int = partitions.UNION
) -> Task:
    """Return the task of client `client` of `clients`, with its tensors on `device`; `images` of the balanced score.

    Raises
    ------
    BadRequest : there is no such client, or see `federated`.
    """
    if not 0 <= client < clients:
        raise BadRequest(f"client-id (partition-id) {client} is not among the clients 0 .. {clients - 1}")
    data = federated(config, clients)
    parts = ("train", "test", "validation") if config.data.validation else ("train", "test")
    rows = {part: data.tensors(part, client, device) for part in parts}
    extras: dict[str, Any] = {} if data.public is None else {"public": data.public_tensor(device)}
    if data.dataset.groups is not None:
        extras["groups"] = data.dataset.groups[data.partition.clients[client].train]
    task = assemble(config, client, data.dataset.num_classes, data.inputs_of(client), rows, extras)
    x_union, y_union = data.union(images, device)
    return replace(task, x_union=x_union, y_union=y_union)


def model_for(config: RunConfig, client: int, inputs: InputSpec) -> str:
    """Return the architecture of a client; `auto`, which the user's own data decide, is replaced here."""
    name = config.model.name_of(client)
    return default_model(inputs.shape) if name == "auto" else name


def default_partition(dataset: Dataset) -> str:
    """Return the partition that `auto` stands for: the natural clients where the data have them, else dirichlet."""
    return "dirichlet" if dataset.owners is None else "by-client"


def settled(config: RunConfig, clients: int) -> RunConfig:
    """Replace what only the data decide: `auto` of model and partition, and `clients = 0`.

    Parameters
    ----------
    clients : their number where neither the configuration nor the data determine it.

    Raises
    ------
    BadRequest : the data are not there, or no model is the default for them.
    """
    if config.data.partition == "auto" or "auto" in config.model.names:
        dataset = datasets.load(config.data.dataset, config.data.data_dir or None, config.data)
        partition = default_partition(dataset) if config.data.partition == "auto" else config.data.partition
        shapes = {part.shape for part in dataset.parts or (dataset,)}
        models = {default_model(shape) for shape in shapes} if "auto" in config.model.names else {""}
        if len(models) > 1:
            raise BadRequest(
                f"model = auto would be {' and '.join(sorted(models))} for samples of these sizes: name the models"
            )
        [model] = models
        names = ",".join(model if n == "auto" else n for n in config.model.names)
        config = config.replaced(model=names, partition=partition)
    if config.data.clients == 0:
        kind = config.data.partition
        natural_ones = kind in partitions.NATURAL or (flower.is_named(kind) and flower.counts_clients(kind))
        return config.replaced(clients=len(federated(config, 0).partition.clients) if natural_ones else clients)
    return config


def assemble(
    config: RunConfig,
    client: int,
    num_classes: int,
    inputs: InputSpec,
    rows: Mapping[str, tuple[Tensor, Tensor]],
    extras: Mapping[str, Any],
) -> Task:
    """Join a client's data, images (n, H, W, C) uint8 and labels (n,) int64 by split, with the settings of the run."""
    check_moments(config, inputs)
    tensors: dict[str, Any] = {f"{axis}_{part}": t for part, pair in rows.items() for axis, t in zip("xy", pair)}
    return Task(
        client=client,
        seed=config.federation.seed,
        num_classes=num_classes,
        inputs=inputs,
        model=model_for(config, client, inputs),
        **tensors,
        train=config.training,
        rates=config.rates,
        buffers=config.training.buffers,
        protocols=tuple(p for p in config.evaluation.measured if p != "global"),
        metrics=config.evaluation.further_metrics,
        confusion=config.evaluation.confusion,
        settings=config.model,
        unit=config.privacy.unit_features,
        privacy=config.mechanism,
        extras=extras,
    )
