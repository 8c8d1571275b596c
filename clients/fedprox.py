"""FedProx, local step. Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.

Symbols    mu -> hparams.mu     w^t -> self.received     w -> self.model.parameters()
Algorithm 2, local problem:  min_w F_k(w) + mu/2 ||w - w^t||^2  (squared norm, trainable parameters only).
"""

from __future__ import annotations

from pydantic import Field

from clients.base import FedClient
from fedapp.core.contrastive import squared_distance
from fedapp.lazy import Tensor
from fedapp.learning.training import Batch
from fedapp.method import BaseHParams, Payload


class FedProxHParams(BaseHParams):
    """Hyperparameters of FedProx."""

    mu: float = Field(0.01, ge=0, description="weight of the proximal term (paper: tuned in {0.001, 0.01, 0.1, 1})")


class FedProxClient(FedClient):
    """Local training that stays near the received model."""

    received: list[Tensor]

    def before_training(self, payload: Payload) -> None:
        """Keep w^t."""
        self.received = self.snapshot()

    def step_loss(self, batch: Batch) -> Tensor:
        """Return F_k(w) + mu/2 ||w - w^t||^2; exactly FedAvg's loss where mu is 0."""
        loss = super().step_loss(batch)
        if self.hparams.mu == 0:
            return loss
        mu: float = self.hparams.mu
        return loss + 0.5 * mu * squared_distance(list(self.model.parameters()), self.received)
