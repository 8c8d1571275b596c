"""What the figures compute from a run directory without training again.

Every function takes a run (`fedapp.results.runs`). Where its directory lacks what is needed, the function raises
`Unavailable` with the reason and with the command that would make the missing piece. `heads.py`,
`representations.py` and `calibration.py` stand on the same functions.

| symbol (papers)                 | here                                                               |
|---------------------------------|--------------------------------------------------------------------|
| p_i (cwFedAvg)                  | `label_shares`, (K, C) shares of the classes in the training splits |
| z = f(x) (CCVR)                 | `represent`, what the head sees                                     |
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedapp.config import RunConfig
from fedapp.data import partitions
from fedapp.data.transforms import InputSpec
from fedapp.errors import BadRequest
from fedapp.learning.evaluation import batched
from fedapp.learning.state import StateError, read_safetensors
from fedapp.learning.task import ModelSpec
from fedapp.method import Arrays, Method
from fedapp.models import SplitModel
from fedapp.results.runs import RUN_MARK, RunResult, read_json
from fedapp.results.statistics import Floats, Ints
from fedapp.tasks import identity
from fedapp.tasks import simulated as tasks
from fedapp.tasks.simulated import FederatedData
from fedapp.transport import checkpoint, selection

PROBE_IMAGES = 600
"""Test images on which clients' models are looked at, drawn by class; the same for all clients and methods."""


class Unavailable(Exception):
    """A run directory lacks what a computation needs.

    Parameters
    ----------
    why : one sentence without a full stop.
    command : what would make it, or an empty string.
    """

    def __init__(self, why: str, command: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.command = command


# ---- models and data of a run ----------------------------------------------------------------------------------------


def config_of(run: RunResult) -> RunConfig:
    """Return the run's configuration; raise `Unavailable` where this version does not accept it."""
    if run.config is None:
        raise Unavailable(f"this version does not accept the run's configuration ({run.problem})")
    return run.config


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


def client_folders(run: RunResult) -> dict[int, Path]:
    """Return the folders in which the clients of this run keep their state, by client."""
    config = config_of(run)
    # A run directory that was moved or copied takes OUT/state along.
    root = Path(config.storage.state_dir) if config.storage.state_dir else run.out / "state"
    folder = root / (config.storage.federation or "run")
    numbered = sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal()) if folder.is_dir() else []
    return {client: folder / str(client) for client in numbered}


def client_arrays(run: RunResult) -> dict[int, tuple[int, Arrays]]:
    """Read the newest stored state of every client: {client: (round, arrays by name)}.

    Names start with `model/` (the model after local training) or `own/`.

    Raises
    ------
    Unavailable : no client state of this run.
    """
    found: dict[int, tuple[int, Arrays]] = {}
    for client, folder in client_folders(run).items():
        if files := sorted(folder.glob(f"{run.versions.get('run', '')}.*.safetensors")):
            try:
                arrays, header = read_safetensors(files[-1])
            except StateError as e:
                raise Unavailable(str(e)) from e
            found[client] = int(str(header["round"])), arrays
    if not found:
        raise Unavailable("the clients' stored states are missing (OUT/state)", f"fedapp run {run.out / RUN_MARK}")
    return found


def method_of(run: RunResult) -> tuple[Method, Any]:
    """Return the run's method and its hyperparameters."""
    return config_of(run).method_and_hparams()


def server_state(run: RunResult) -> Mapping[str, Any]:
    """Read the server's state after the last round."""
    try:
        latest = checkpoint.latest(run.out / "checkpoint")
    except StateError as e:
        raise Unavailable(f"the checkpoint is damaged ({e})") from e
    if latest is None:
        raise Unavailable("the checkpoint of the last round is missing", f"fedapp run --resume {run.out}")
    return latest[1]


def _model(run: RunResult, name: str, arrays: Arrays, client: int = 0) -> SplitModel:
    """Build an architecture as a client of the run's method does, with these values, in evaluation mode."""
    method, hparams = method_of(run)
    data = data_of(run)
    shape = data.size_of(client).shape
    spec = ModelSpec(name, data.dataset.num_classes, shape, 0, config_of(run).model_options)
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
            run, config.model_of(client), {n[6:]: a for n, a in arrays.items() if n.startswith("model/")}, client
        )
        for client, (_, arrays) in stored
    }


def initial_arrays(run: RunResult) -> Arrays:
    """Draw the shared arrays that the server started from, by wire name."""
    from fedapp import sampling

    method, hparams = method_of(run)
    data, config = data_of(run), config_of(run)
    seed = sampling.server_model_seed(run.seed)
    options = config.model_options
    spec = ModelSpec(config.model_names[0], data.dataset.num_classes, data.inputs.shape, seed, options)
    arrays: Arrays = method.client.initial_arrays(spec, method, hparams, config.training.buffers)
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
    model = _model(run, config_of(run).model_names[0], global_arrays(run, calibrated))
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


def represent(run: RunResult, model: SplitModel, x: Tensor, activated: bool = True) -> NDArray[np.float32]:
    """Return representations (n, width) float32 of images (n, H, W, C) uint8.

    Parameters
    ----------
    activated : the input of the head; False = the trunk's output before the last activation.
    """
    trunk = model.represent if activated else model.features
    rows: NDArray[np.float32] = batched(trunk, x, inputs_of(run)).float().numpy()
    return rows


def counts_of(run: RunResult) -> Ints:
    """Return the training images of each client and class, (K, C); `Unavailable` without a data card."""
    if not run.counts.size:
        raise Unavailable("the run has no data card: real devices keep their class counts to themselves")
    return run.counts


def label_shares(run: RunResult) -> Floats:
    """Return p (K, C), the shares of the classes in the clients' training splits; rows sum to 1.

    Raises
    ------
    Unavailable : no data card.
    """
    counts = counts_of(run)
    shares: Floats = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return shares
