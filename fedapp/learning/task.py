"""What a client trains on and how: its data, its architecture and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedapp import sampling
from fedapp.core.privacy import Privacy
from fedapp.data.transforms import InputSpec
from fedapp.lazy import Tensor, torch
from fedapp.models.own import PLAIN
from fedapp.settings import ModelSettings, TrainingSettings


@dataclass(frozen=True)
class ModelSpec:
    """What a model is built from.

    Attributes
    ----------
    name : architecture, a name of the model zoo, or an own model, `package.module:function`.
    num_classes : outputs of the head.   shape : of one sample as the model takes it, (C, H, W).
    seed : decides the initial values.   settings : of own models.   unit : representations of norm 1.
    common : for the model of a client, the seed of the server's initial model; None for that one.
    """

    name: str
    num_classes: int
    shape: tuple[int, ...]
    seed: int
    settings: ModelSettings = PLAIN
    unit: bool = False
    common: int | None = None


def with_common_seed(spec: ModelSpec) -> ModelSpec:
    """Return the specification of a client's model with the seed of the server's initial model."""
    return spec if spec.common is None else replace(spec, seed=spec.common)


@dataclass(frozen=True)
class Task:
    """What a client trains on and how.

    Attributes
    ----------
    client : stable client id.   seed : the run's seed.
    num_classes : classes of the federation, C.   inputs : shape and normalisation of the images.
    model : name of the client's architecture.   settings, unit : see :class:`ModelSpec`.
    x_train, x_test : (n, H, W, channels) uint8 tensors on the client's device.
    y_train, y_test : (n,) int64, values 0 .. C - 1.
    x_validation, y_validation : held out from training to choose settings by, or None.
    x_union, y_union : the union of all clients' test splits for the balanced score (simulation only), or None.
    train : settings of local training.   rates : learning rates of rounds 1, 2, ...; empty = `lr` in all.
    buffers : floating-point buffers (BatchNorm's statistics): `global` = shared like parameters, `local` = kept by
        the client, `drop` = reset before every round.
    protocols : which of `received` and `trained` are measured.
    metrics : names of the metrics that evaluations of all clients measure besides accuracy and loss.
    confusion : whether they measure confusion matrices too.
    privacy : the run's statement about its noised replies, or None.
    extras : what else a node or a method needs, by name: `public` images (P, H, W, channels) uint8, `classes` (names),
        `groups` (n,) numbers of training rows that belong together,
        `body` (SHA-256 of the pretrained body that the samples are features of).
    """

    client: int
    seed: int
    num_classes: int
    inputs: InputSpec
    model: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    train: TrainingSettings
    x_validation: Tensor | None = None
    y_validation: Tensor | None = None
    x_union: Tensor | None = None
    y_union: Tensor | None = None
    rates: tuple[float, ...] = ()
    buffers: str = "global"
    protocols: tuple[str, ...] = ("received", "trained")
    metrics: tuple[str, ...] = ()
    confusion: bool = False
    settings: ModelSettings = PLAIN
    unit: bool = False
    privacy: Privacy | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """Number of training samples n_k."""
        return len(self.y_train)

    def spec(self, seed: int) -> ModelSpec:
        """Return the specification of this client's architecture with initial values of `seed`."""
        common = sampling.server_model_seed(self.seed)
        return ModelSpec(self.model, self.num_classes, self.inputs.shape, seed, self.settings, self.unit, common)

    def class_counts(self) -> NDArray[np.int64]:
        """Return the number of training images per class, (C,); private unless the method's page says otherwise."""
        counts: NDArray[np.int64] = torch.bincount(self.y_train, minlength=self.num_classes).cpu().numpy()
        return counts
