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

Only trainable parameters have a velocity. BatchNorm's running statistics are plain averages: momentum could carry a
variance below 0. With beta = 0, dampening 0 and eta = 1 it is FedAvg bit for bit.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field, model_validator

from clients.base import FedClient
from fedapp.method import Array, Arrays, BaseHParams, Method, ServerContext, ServerState
from fedapp.reduce.spec import Reduced
from strategies.base import Strategy

RUNNING_STATISTICS = (".running_mean", ".running_var")
"""How PyTorch names the floating-point buffers of its normalisation layers."""


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


class FedAvgM(Strategy):
    """FedAvg's average, taken as a gradient for SGD with momentum on the server."""

    def init(self, context: ServerContext) -> ServerState:
        """Return w^0 and v = 0 (no arrays yet: the first update creates them)."""
        return {**super().init(context), "velocity": {}}

    def update(self, state: ServerState, server_round: int, reduced: Reduced) -> ServerState:
        """Take one step of momentum to the average of the replies; without replies nothing moves."""
        mean = reduced.arrays("model")
        model: Arrays = {}
        velocity: Arrays = {}
        for name, w in state["model"].items():
            if name.endswith(RUNNING_STATISTICS) or mean[name] is w:  # `is`: without replies the mean is w itself
                model[name] = mean[name]
            else:
                model[name], velocity[name] = self.step(w, mean[name], state["velocity"].get(name))
        return {**state, "model": model, "velocity": velocity or state["velocity"]}

    def step(self, w: Array, mean: Array, v: Array | None) -> tuple[Array, Array]:
        """Return the new w and v of one array.

        Parameters
        ----------
        w, mean : float32 arrays of one shape, what was sent and the average of what came back.
        v : velocity after the round before, None for 0.
        """
        p = self.hparams
        gradient = w - mean
        v_new = (1 - p.dampening) * gradient if v is None else p.momentum * v + (1 - p.dampening) * gradient
        direction = gradient + p.momentum * v_new if p.nesterov else v_new
        # w - eta * direction, as a distance from the average: with eta = 1 and beta = 0 it is the average bit for bit.
        return mean + (gradient - p.server_lr * direction), np.asarray(v_new, dtype=w.dtype)


METHOD = Method(
    id="fedavgm",
    title="FedAvgM",
    paper="Hsu et al., 2019",
    strategy=FedAvgM,
    client=FedClient,
    hparams=FedAvgMHParams,
    head="none",
    global_model=True,
    deploy_as="received",
)
