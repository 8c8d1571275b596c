"""MOON, local step. Li, He, Song, Model-Contrastive Federated Learning, CVPR 2021.

| symbol (paper) | here                                                                              |
|----------------|-----------------------------------------------------------------------------------|
| R_w(x)         | `model.represent(x)`, (B, d): what the head sees (model `moon`: its projection)    |
| w_i^t          | `self.model`, in training                                                          |
| w^t            | `self.frozen[0]`, as it came, in evaluation mode                                   |
| w_i^{t-1}      | `self.previous`, as this client last trained it, in evaluation mode                |
| mu, tau        | `hparams.mu`, `hparams.tau`                                                        |

Eqs. 3 and 4:  l = l_sup + mu * l_con,
    l_con = -log( e^{cos(z, z_glob) / tau} / (e^{cos(z, z_glob) / tau} + e^{cos(z, z_prev) / tau}) ).

The previous model is read from the state that every client keeps anyway. It is the model of the last participation,
however long ago. A client that never trained has none: its loss is l_sup, as in the released code. Taking the received
model in its place would add the constant mu log 2, whose gradient is exactly zero: the same training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from clients.base import FedClient
from fedapp.core.contrastive import moon_contrast
from fedapp.lazy import Tensor, torch
from fedapp.learning.evaluation import batched
from fedapp.learning.training import Batch
from fedapp.method import BaseHParams, Payload
from fedapp.models.copies import copied

if TYPE_CHECKING:
    from fedapp.models import SplitModel


class MoonHParams(BaseHParams):
    """Hyperparameters of MOON."""

    mu: float = Field(1.0, ge=0, description="weight of the contrastive term (paper: 5 on CIFAR-10, 1 on CIFAR-100)")
    tau: float = Field(0.5, gt=0, description="temperature (paper: 0.5)")


class MoonClient(FedClient):
    """Pulls representations towards the received model's and away from the client's own previous ones."""

    needs_state = True
    previous: SplitModel | None = None
    frozen: Sequence[SplitModel] = ()
    references: Sequence[Tensor] = ()

    def receive(self, payload: Payload) -> None:
        """Put w_i^{t-1} aside before w^t replaces it."""
        # A copy: the model itself goes on to become w^t.
        self.previous = None if self.loaded is None else _frozen(self.model)
        super().receive(payload)

    def before_training(self, payload: Payload) -> None:
        """Freeze w^t; without augmentation one pass of the frozen models serves all epochs."""
        self.frozen, self.references = (), ()
        if self.previous is not None and self.hparams.mu > 0:
            self.frozen = (_frozen(self.model), self.previous)
            if self.training.augment == "none":
                self.references = [batched(m.represent, self.task.x_train, self.task.inputs) for m in self.frozen]

    def step_loss(self, batch: Batch) -> Tensor:
        """Return l_sup + mu * l_con; exactly FedAvg's loss if mu is 0 or without a previous model."""
        if not self.frozen:
            return super().step_loss(batch)
        z = self.model.represent(batch.x)
        loss = self.cross_entropy(self.model.classify(z), batch.y)
        z_glob, z_prev = self.frozen_representations(batch)
        mu: float = self.hparams.mu
        return loss + mu * moon_contrast(z, z_glob, z_prev, self.hparams.tau)  # Eq. 4; l_con is Eq. 3

    def frozen_representations(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return z_glob and z_prev of a batch, (B, d) each, without gradient."""
        if self.references:
            return self.references[0][batch.index], self.references[1][batch.index]
        with torch.no_grad():
            return self.frozen[0].represent(batch.x), self.frozen[1].represent(batch.x)


def _frozen(model: SplitModel) -> SplitModel:
    """Copy a model for use in evaluation mode without gradients."""
    frozen = copied(model).eval()
    frozen.requires_grad_(False)
    return frozen
