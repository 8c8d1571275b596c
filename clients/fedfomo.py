"""FedFomo, local step. Zhang, Sapra, Fidler, Yeung, Alvarez, Personalized Federated Learning with First Order Model
Optimization, ICLR 2021.

| symbol (paper)          | here                                                            |
|-------------------------|-----------------------------------------------------------------|
| theta_i^(l-1)           | `base` in `receive`, by `hparams.baseline`                      |
| theta_n                 | arrays `fomo/<slot>/<name>` of the payload                      |
| L_i                     | mean cross-entropy on `self.x_validation`, never trained on     |
| w_n (Eq. 4)             | `self.values[slot]`                                             |

Eqs. 3 to 5:  v_n = (L_i(theta_i^(l-1)) - L_i(theta_n)) / (||theta_n - theta_i^(l-1)|| + 1e-5),  v+ = max(v, 0),
theta_i <- sum_n (v+_n / sum v+) theta_n,  or the own trained model if all v+ are 0;  then local training.

baseline=before (released code): theta_i^(l-1) is the model from which the last local training started, and the client's
own trained model is one of the candidates theta_n. It is on the client's disk, so it does not travel.
baseline=after: theta_i^(l-1) is the trained model, and only other clients' models are candidates. Others' models then
have to be better than what local training made, and not only better than what it started from.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from clients.base import FedClient
from fedapp import sampling
from fedapp.core import names
from fedapp.core.pairwise import combine
from fedapp.lazy import torch
from fedapp.learning.state import ClientStore
from fedapp.learning.task import Task
from fedapp.method import Arrays, BaseHParams, Method, Payload
from fedapp.models import selection

PREFIX = "fomo/"
wire_name = functools.partial(names.numbered, PREFIX)
split_payload = functools.partial(names.split_numbered, PREFIX)
"""Wire name of the array `name` of the model in a slot, and the way back to (the rest, models by slot)."""
OWN_SLOT = "fomo-own"
"""Scalar of a payload: the place of the client's own trained model among the models that it compares."""
BEFORE = "before/"
"""Private arrays: the mixed model from which the last local training started."""
EPSILON = 1e-5
"""Added to a distance, so that a model equal to one's own is worth 0 and not 0 / 0."""


class FedFomoHParams(BaseHParams):
    """Hyperparameters of FedFomo."""

    models: int = Field(5, ge=0, description="models M that a client compares (paper: 5); 0 = none, a control")
    baseline: Literal["before", "after"] = Field(
        "before",
        description="what others' models are compared with: the own model before its last local training, and the own "
        "trained model competes for a slot (released code), or the own trained model, which has no slot",
    )
    validation: float = Field(
        0.2,
        gt=0,
        lt=1,
        description="share of the local training split held out to compare models (paper: 0.2); where the run itself "
        "holds out validation rows, those are used instead",
    )
    epsilon: float = Field(
        0.3,
        ge=0,
        le=1,
        description="chance that a slot goes to a random client instead of the most useful (paper: 0.3)",
    )
    decay: float = Field(0.95, gt=0, le=1, description="factor on epsilon after each round (paper: decaying)")


def value(loss: float, other_loss: float, distance: float) -> float:
    """Return v_n: how much lower the loss is there, per unit of distance; 0 where a loss is not finite."""
    v = (loss - other_loss) / (distance + EPSILON)
    return v if math.isfinite(v) else 0.0


def mix_weights(values: Sequence[float]) -> NDArray[np.float64]:
    """Return the weights of (own model, other models): shares of the positive values, or all for the own model."""
    positive = np.maximum(np.asarray(values, dtype=np.float64), 0.0)
    total = positive.sum()
    if total == 0.0:
        return np.concatenate([[1.0], positive])
    return np.concatenate([[0.0], positive / total])


def number_held_out(n: int, share: float) -> int:
    """Return how many of n samples validate."""
    return min(n - 1, max(1, round(share * n)))


def held_out(n: int, share: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw which of n samples train and which validate, both in ascending order.

    At least one sample validates and one trains; a single sample trains.
    """
    count = number_held_out(n, share)
    order = torch.randperm(n, generator=generator)
    return order[count:].sort().values, order[:count].sort().values


class FedFomoClient(FedClient):
    """Moves towards the models that do better on its validation split, then trains on the rest."""

    values: tuple[float, ...] = ()

    def __init__(self, task: Task, method: Method, hparams: Any, store: ClientStore | None = None) -> None:
        x, y = task.x_validation, task.y_validation
        if x is None or y is None or not len(y):
            generator = sampling.torch_generator(task.seed, "fomo-validation", task.client)
            parts = held_out(task.num_samples, hparams.validation, generator)
            train, validation = (rows.to(task.y_train.device) for rows in parts)
            x, y = task.x_train[validation], task.y_train[validation]
            task = dataclasses.replace(task, x_train=task.x_train[train], y_train=task.y_train[train])
        self.x_validation, self.y_validation = x, y
        super().__init__(task, method, hparams, store)

    def receive(self, payload: Payload) -> None:
        """Weigh the other clients' models on the validation split and move towards the useful ones."""
        rest, models = split_payload(payload)
        super().receive(rest)
        self.values = ()
        own = selection.extract(self.model, self.down_names())
        if OWN_SLOT in payload.scalars:
            models.insert(int(payload.scalars[OWN_SLOT]), own)
        if models:
            self.move(own, models)
        self.reference = selection.extract(self.model, self.up_names())

    def move(self, own: Arrays, models: Sequence[Arrays]) -> None:
        """Replace the own model by the mix of it and of `models`."""
        base = names.under(BEFORE, self.own) or own  # theta_i^(l-1)
        selection.merge(self.model, base)
        loss = self.validation_loss()
        trained = [name for name, _ in self.model.named_parameters() if name in own]
        values = []
        for arrays in models:
            selection.merge(self.model, arrays)
            # ||theta_n - theta_i|| over trained parameters, without running statistics.
            squares = (np.square(arrays[n] - base[n], dtype=np.float64).sum() for n in trained)
            values.append(value(loss, self.validation_loss(), math.sqrt(sum(squares))))  # Eq. 4
        self.values = tuple(values)
        (mixed,) = combine(mix_weights(values)[None], [own, *models])  # Eqs. 3 and 5
        selection.merge(self.model, mixed)

    def before_training(self, payload: Payload) -> None:
        """Keep the mixed model, from which training starts, where other models are compared with it."""
        if self.hparams.baseline == "before":
            self.own = names.prefixed(BEFORE, self.reference)

    def validation_loss(self) -> float:
        """Mean cross-entropy of the present model on the validation split, in evaluation mode without gradients."""
        return self.score(self.x_validation, self.y_validation).loss

    def after_training(self, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Return v_n for each slot, zeros for slots that were empty."""
        empty = self.hparams.models - len(self.values)
        return {}, {"fomo-weights": [*self.values, *[0.0] * empty]} if self.hparams.models else {}
