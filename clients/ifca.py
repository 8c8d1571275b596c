"""IFCA, local step. Ghosh, Chung, Yin, Ramchandran, An Efficient Framework for Clustered Federated Learning,
NeurIPS 2020.

| symbol (paper)      | here                                                        |
|---------------------|-------------------------------------------------------------|
| theta_j, j in [k]   | arrays `ifca/<j>/<name>` of the payload, for j = 1 `<name>` |
| F_i(theta_j)        | `self.losses[j]`, mean cross-entropy on the training split  |
| hat j               | `self.choice`                                               |

Algorithm 1, user machine:  hat j = argmin_j F_i(theta_j);  train from theta_{hat j};  return the model and hat j.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from clients.base import FedClient
from fedapp.core import names
from fedapp.method import Arrays, BaseHParams, Payload
from fedapp.models import selection

PREFIX = "ifca/"
wire_name = functools.partial(names.numbered, PREFIX)
split_payload = functools.partial(names.split_numbered, PREFIX)
"""Wire name of the array `name` of a further cluster's model, and the way back to (the first model, the others)."""


class IFCAHParams(BaseHParams):
    """Hyperparameters of IFCA."""

    clusters: int = Field(2, ge=1, description="number of models k (paper: the true number of clusters, or a few more)")
    weighting: Literal["samples", "uniform"] = Field(
        "samples", description="how a cluster's members are averaged: by n_k, or all alike (paper: all alike)"
    )
    trunk: Literal["clustered", "shared"] = Field(
        "clustered",
        description="whether each cluster has its own body, or one body is averaged over all clients and only the "
        "head is clustered (paper: shared on FEMNIST)",
    )


def choose(losses: Sequence[float]) -> int:
    """Return the index of the lowest loss, the first of equal ones; NaN and infinity never beat a finite loss."""
    values = np.asarray(losses, dtype=np.float64)
    return int(np.argmin(np.where(np.isfinite(values), values, np.inf)))


class IFCAClient(FedClient):
    """Estimates its cluster by the loss on its training split, then trains that cluster's model."""

    choice = 0
    losses: tuple[float, ...] = ()

    def receive(self, payload: Payload) -> None:
        """Score all models on the training split and take the one with the lowest loss: hat j = argmin_j F_i."""
        first, others = split_payload(payload)
        super().receive(first)
        models, losses = [first.all(), *others], []
        for arrays in models:
            selection.merge(self.model, arrays)
            losses.append(self.score(self.task.x_train, self.task.y_train).loss)
        self.losses = tuple(losses)
        self.choice = choose(losses)
        selection.merge(self.model, models[self.choice])
        self.reference = {**first.all(), **models[self.choice]}

    def after_training(self, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Return hat j."""
        return {}, {"ifca-cluster": self.choice}
