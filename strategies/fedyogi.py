"""FedYogi. Reddi et al., Adaptive Federated Optimization, ICLR 2021 (arXiv:2003.00295): Yogi on the server.

| symbol (paper) | here                                                                   |
|----------------|------------------------------------------------------------------------|
| x_t            | `state["model"]`, what the clients of a round receive                  |
| Delta_t        | `delta`, sum_{k in S_t} (n_k / sum_j n_j) x_k - x_t                    |
| m_t, v_t       | `state["momentum"]`, 0 and `state["variance"]`, tau^2 before round 1   |
| beta_1, beta_2 | `hparams.beta1`, `hparams.beta2`                                       |
| eta, tau       | `hparams.server_lr`, `hparams.tau`                                     |

Algorithm 2, server:  m <- beta_1 m + (1 - beta_1) Delta;    v <- v - (1 - beta_2) Delta^2 sign(v - Delta^2);
                      x <- x + eta m / (sqrt(v) + tau)       (element by element, without bias correction)

Clients weigh n_k, as in the authors' experiments; Algorithm 2 has equal weights. BatchNorm's running statistics are
plain averages, as in FedAvgM. Where tau is so large that v stays tau^2, FedYogi is FedAvgM with momentum and dampening
beta_1 and rate eta / (2 tau) (tested).
"""

from __future__ import annotations

import dataclasses

import numpy as np
from pydantic import Field

from fedapp.method import Array, Arrays, BaseHParams
from strategies.fedavg import METHOD as FEDAVG
from strategies.fedavgm import ServerOptimizer


class FedYogiHParams(BaseHParams):
    """Hyperparameters of FedYogi."""

    server_lr: float = Field(0.01, gt=0, description="eta, rate of the server (paper: tuned for each task)")
    beta1: float = Field(0.9, ge=0, lt=1, description="beta_1, share of m kept (paper: 0.9)")
    beta2: float = Field(0.99, ge=0, lt=1, description="beta_2; v moves by 1 - beta_2 of Delta^2 (paper: 0.99)")
    tau: float = Field(1e-3, gt=0, description="tau, added to the root of v; v starts at tau^2 (paper: 1e-3)")


class FedYogi(ServerOptimizer):
    """Yogi on the server: steps that large changes lengthen at most to about twice eta."""

    moments = ("momentum", "variance")

    def step(self, w: Array, mean: Array, kept: Arrays) -> tuple[Array, Arrays]:
        """Return the new x, m and v of one array."""
        p = self.hparams
        delta = mean - w
        square = delta * delta
        m = p.beta1 * kept.get("momentum", np.zeros_like(w)) + (1 - p.beta1) * delta
        v = kept.get("variance", np.full_like(w, p.tau**2))
        v = v - (1 - p.beta2) * square * np.sign(v - square)
        return w + p.server_lr * m / (np.sqrt(v) + p.tau), {"momentum": m, "variance": v}


METHOD = dataclasses.replace(
    FEDAVG, id="fedyogi", title="FedYogi", paper="Reddi et al., ICLR 2021", strategy=FedYogi, hparams=FedYogiHParams
)
