"""Models and data of a run, as its directory describes them.

Every function takes a run (`fedapp.results.runs`). Where its directory lacks what is needed, the function raises
`Unavailable` with the reason and with the command that would make the missing piece.

| symbol (CCVR) | here                               |
|---------------|------------------------------------|
| z = f(x)      | `represent`, the input of the head |
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clients import _initial
from fedapp import sampling
from fedapp.data import partitions
from fedapp.data.transforms import InputSpec
from fedapp.errors import BadRequest
from fedapp.learning.evaluation import batched
from fedapp.learning.state import StateError, read_safetensors
from fedapp.learning.task import ModelSpec
from fedapp.method import Arrays
from fedapp.models import SplitModel, selection
from fedapp.results.analysis import Unavailable, client_arrays, config_of, method_of, server_state
from fedapp.results.runs import RunResult, read_json
from fedapp.results.statistics import Ints
from fedapp.tasks import identity
from fedapp.tasks import simulated as tasks
from fedapp.tasks.simulated import FederatedData

PROBE_IMAGES = 600
"""Test images on which clients' models are looked at, drawn by class; the same for all clients and methods."""


@functools.lru_cache(maxsize=1)
def data_of(run: RunResult) -> FederatedData:
    """Load the data of a run, and check that they are divided among the clients as they were in the run.

    Raises
    ------
    Unavailable : the data are on devices, cannot be found, or have changed.
    """
    config = config_of(run)
    if not run.card:
        raise Unavailable("the data lie on the devices: the run has no data card", "fedapp run --engine local ...")
    try:
        data = tasks.federated(config, len(run.counts))
    except (BadRequest, OSError) as e:
        raise Unavailable(f"the run's data cannot be loaded ({e})") from e
    if data.partition.hash != run.card.get("hash"):
        raise Unavailable("the data or their partition have changed since the run", "fedapp run ... --out NEW")
    if other := identity.changed(run.versions, identity.of_files(config) | identity.of_data(config)):
        raise Unavailable(f"these have changed since the run (SHA-256): {other}", "fedapp run ... --out NEW")
    return data


def inputs_of(run: RunResult) -> InputSpec:
    """Return how the samples of a run are normalised.

    Raises
    ------
    Unavailable : see `data_of`; or every client does it by itself, so no two see an image alike.
    """
    data = data_of(run)
    if data.own_moments:
        raise Unavailable("each client normalises its own images (normalise = client)")
    if data.dataset.parts:
        raise Unavailable("clients' samples differ in size, so no two models see the same one")
    noted = read_json(run.out / "inputs.json")  # an earlier version took mean and standard deviation of other rows
    mean, std = (tuple(map(float, noted.get(key) or getattr(data.inputs, key))) for key in ("mean", "std"))
    return replace(data.inputs, mean=mean, std=std)


def _model(run: RunResult, name: str, arrays: Arrays, client: int = 0) -> SplitModel:
    """Build an architecture as a client of the run's method does, with these values, in evaluation mode."""
    method, hparams = method_of(run)
    data = data_of(run)
    shape = data.size_of(client).shape
    config = config_of(run)
    spec = ModelSpec(name, data.dataset.num_classes, shape, 0, config.model, config.privacy.unit_features)
    model: SplitModel = method.client.build_model(spec, hparams)
    try:
        selection.merge(model, arrays)
    except ValueError as e:
        raise Unavailable(f"stored arrays do not fit the model {name} ({e})") from e
    return model.eval()


def client_models(run: RunResult, limit: int | None = None) -> dict[int, SplitModel]:
    """Build the clients' models as they were after their last local training, in evaluation mode.

    Parameters
    ----------
    limit : how many clients at most, by id; None = all.
    """
    config, stored = config_of(run), list(client_arrays(run).items())[:limit]
    return {
        client: _model(
            run, config.model.name_of(client), {n[6:]: a for n, a in arrays.items() if n.startswith("model/")}, client
        )
        for client, (_, arrays) in stored
    }


def initial_arrays(run: RunResult) -> Arrays:
    """Draw the shared arrays that the server started from, by wire name."""
    method, hparams = method_of(run)
    data, config = data_of(run), config_of(run)
    seed = sampling.server_model_seed(run.seed)
    name, unit = config.model.names[0], config.privacy.unit_features
    spec = ModelSpec(name, data.dataset.num_classes, data.inputs.shape, seed, config.model, unit)
    arrays: Arrays = _initial.initial_arrays(method.client, spec, method, hparams, config.training.buffers)
    return arrays


def global_arrays(run: RunResult, calibrated: bool = True) -> Arrays:
    """Read the arrays of the one global model after the last round.

    Parameters
    ----------
    calibrated : with CCVR's re-trained head where the run has one; False gives the head as it was trained.

    Raises
    ------
    Unavailable : the method has no global model, or its file is missing.
    """
    method, _ = method_of(run)
    if not method.global_model:
        raise Unavailable(f"{run.method} has no global model", "fedapp run --method fedavg ... (or ccvr)")
    if calibrated:
        return _published(run)[0]
    arrays: Arrays = server_state(run).get("model") or {}
    if not arrays:
        raise Unavailable("the checkpoint of the last round holds no model")
    return arrays


def _published(run: RunResult) -> tuple[Arrays, Mapping[str, Any]]:
    """Read the model that the server published at the end, and the plain values that go with it."""
    path = run.out / "models" / "last.safetensors"
    try:
        arrays, header = read_safetensors(path)
    except StateError as e:
        raise Unavailable(f"models/{path.name} is missing or damaged") from e
    scalars = header.get("scalars")
    return arrays, scalars if isinstance(scalars, Mapping) else {}


def global_model(run: RunResult, calibrated: bool = True) -> SplitModel:
    """Build the global model after the last round, in evaluation mode; see `global_arrays`."""
    model = _model(run, config_of(run).model.names[0], global_arrays(run, calibrated))
    if calibrated:  # a calibrated head may take representations after Tukey's transform
        method_of(run)[0].client.configure_model(model, _published(run)[1])
    return model


def probe(run: RunResult, limit: int = PROBE_IMAGES) -> tuple[Tensor, Ints]:
    """Draw test images of all clients by class with the run's seed: (n, H, W, C) uint8 and (n,) labels.

    Raises
    ------
    Unavailable : see `data_of`; no client has any, or they differ in size.
    """
    data = data_of(run)
    if data.dataset.parts:
        inputs_of(run)
    indices = partitions.union_test(data.dataset, data.partition, run.seed, limit)
    if not len(indices):
        raise Unavailable("no client has test images")
    x, y = data.dataset.take(indices)
    return torch.from_numpy(x), np.asarray(y, dtype=np.int64)


def head_inputs(model: SplitModel, x: Tensor, inputs: InputSpec) -> NDArray[np.float32]:
    """Return what the head of a model sees (n, width) of images (n, H, W, C)."""
    rows: NDArray[np.float32] = batched(lambda b: model.head_input(model.represent(b)), x, inputs).numpy()
    return rows


def represent(run: RunResult, model: SplitModel, x: Tensor, activated: bool = True) -> NDArray[np.float32]:
    """Return representations (n, width) float32 of images (n, H, W, C) uint8.

    Parameters
    ----------
    activated : the input of the head; False = the trunk's output before the last activation.
    """
    trunk = model.represent if activated else model.features
    rows: NDArray[np.float32] = batched(trunk, x, inputs_of(run)).float().numpy()
    return rows
