"""FedAvgM. Hsu, Qi, Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, 2019: FedAvg with momentum on the server.

| symbol (paper) | here                                                                         |
|----------------|------------------------------------------------------------------------------|
| w              | `state["model"]`, what the clients of a round receive                        |
| Delta w        | `gradient`, w - sum_{k in S_t} (n_k / sum_j n_j) w_k                          |
| v              | `state["velocity"]`, 0 before round 1                                        |
| beta           | `hparams.momentum`                                                           |
| eta            | `hparams.server_lr`                                                          |

    v <- beta v + (1 - dampening) Delta w;    w <- w - eta v                    (Flower's form: dampening 0)
                                              w <- w - eta (Delta w + beta v)   (Nesterov, dampening 0)

BatchNorm's running statistics are plain averages: momentum could carry a variance below 0. Other buffers of an own
model have a velocity, as parameters have. With beta = 0, dampening 0 and eta = 1 it is FedAvg bit for bit.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import ClassVar

import numpy as np
from pydantic import Field, model_validator

from fedapp.core.names import RUNNING_STATISTICS
from fedapp.method import Array, Arrays, BaseHParams, ServerContext, ServerState
from fedapp.reduce.spec import Reduced
from strategies.base import Strategy
from strategies.fedavg import METHOD as FEDAVG


class FedAvgMHParams(BaseHParams):
    """Hyperparameters of FedAvgM."""

    momentum: float = Field(0.5, ge=0, lt=1, description="beta, share of v kept (paper: 0 to 0.997; CCVR: 0.1)")
    server_lr: float = Field(1.0, gt=0, description="eta, step along v (paper: 1)")
    dampening: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share taken from each new Delta w (0: paper; equal to momentum: MOON's released code)",
    )
    nesterov: bool = Field(False, description="look ahead along v: w - eta (Delta w + beta v)")

    @model_validator(mode="after")
    def _one_form(self) -> FedAvgMHParams:
        if self.nesterov and self.dampening > 0:
            raise ValueError("nesterov=true is defined without dampening: leave dampening at 0")
        return self


class ServerOptimizer(Strategy):
    """FedAvg's average, taken as a gradient for an optimizer on the server (FedOpt: Reddi et al., ICLR 2021).

    A subclass defines `step` and names its `moments`: entries of the state with one array for each trainable parameter.
    """

    moments: ClassVar[tuple[str, ...]]

    def init(self, context: ServerContext) -> ServerState:
        """Return w^0 and empty moments; the first update creates their arrays."""
        return {**super().init(context), **{m: {} for m in self.moments}}

    def update(self, state: ServerState, server_round: int, reduced: Reduced) -> ServerState:
        """Take one step to the average of the replies; without replies nothing moves."""
        mean = reduced.arrays("model")
        after = {**state, "model": {}, **{m: dict(state[m]) for m in self.moments}}
        for name, w in state["model"].items():
            if name.endswith(RUNNING_STATISTICS) or mean[name] is w:  # `is`: without replies the mean is w itself
                after["model"][name] = mean[name]
                continue
            kept = {m: state[m][name] for m in self.moments if name in state[m]}
            after["model"][name], kept = self.step(w, mean[name], kept)
            for m, array in kept.items():
                after[m][name] = np.asarray(array, dtype=w.dtype)
        return after

    @abstractmethod
    def step(self, w: Array, mean: Array, kept: Arrays) -> tuple[Array, Arrays]:
        """Return the new w and the new moments of one array.

        Parameters
        ----------
        w, mean : float32 arrays of one shape, the array of the payload and the average of the replies.
        kept : its moments after the round before, by name; empty before its first step.
        """


class FedAvgM(ServerOptimizer):
    """SGD with momentum on the server."""

    moments = ("velocity",)

    def step(self, w: Array, mean: Array, kept: Arrays) -> tuple[Array, Arrays]:
        """Return the new w and v of one array."""
        p = self.hparams
        gradient = w - mean
        v = (1 - p.dampening) * gradient
        if "velocity" in kept:
            v = p.momentum * kept["velocity"] + v
        direction = gradient + p.momentum * v if p.nesterov else v
        # w - eta * direction, as a distance from the average: with eta = 1 and beta = 0 it is the average bit for bit.
        return mean + (gradient - p.server_lr * direction), {"velocity": v}


METHOD = dataclasses.replace(
    FEDAVG, id="fedavgm", title="FedAvgM", paper="Hsu et al., 2019", strategy=FedAvgM, hparams=FedAvgMHParams
)
