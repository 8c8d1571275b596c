"""Ditto, local step. Li, Hu, Beirami, Smith, Ditto: Fair and Robust Federated Learning Through Personalization, ICML
2021.

| symbol (paper)   | here                                                                    |
|------------------|-------------------------------------------------------------------------|
| w^t              | the received model; `self.received`, its parameters                     |
| w_k              | `self.model` until it is trained, which is sent                         |
| v_k              | `self.personal`, a whole model that never leaves; the one that predicts |
| lambda           | `hparams.lam`                                                           |

Algorithm 1, client k:  w_k <- SGD on F_k(w) from w^t, as FedAvg does;
                        v_k <- SGD on h_k(v; w^t) = F_k(v) + lambda/2 ||v - w^t||^2 from its last v_k.
w^t stays as it was received. v_k moves only when k takes part. What is stored as the client's model is v_k.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from clients._initial import initial_model
from clients.fedper import PrivateClient, PrivateHParams
from fedapp.core import names
from fedapp.core.contrastive import squared_distance
from fedapp.lazy import Tensor
from fedapp.learning.training import Batch, Phase
from fedapp.method import Arrays, Payload
from fedapp.models import selection
from fedapp.models.copies import copied

if TYPE_CHECKING:
    from fedapp.models import SplitModel

BUFFERS = "buffers/"
"""Private arrays: running statistics of w_k that the server does not send (`buffers=local`)."""


class DittoHParams(PrivateHParams):
    """Hyperparameters of Ditto."""

    lam: float = Field(1.0, ge=0, description="lambda, the pull to the global model (paper: 1, or of 0.1, 1, 2)")
    personal_epochs: int | None = Field(
        None, ge=0, description="passes for the personal model; None = local-epochs of the run, as the paper has it"
    )


class DittoClient(PrivateClient):
    """FedAvg's client, with a personal model of its own."""

    needs_state = True
    received: list[Tensor]

    @functools.cached_property
    def personal(self) -> SplitModel:
        """v_k, which is the client's model until `receive` has put w^t in its place."""
        return self.model

    def receive(self, payload: Payload) -> None:
        """Load w^t into a second model, and keep v_k; a new client's v_k is its initial model, not w^t."""
        self.personal = initial_model(self) if self.loaded is None else self.model
        self.model = copied(self.personal)
        selection.merge(self.model, names.under(BUFFERS, self.own))
        super().receive(payload)

    def before_training(self, payload: Payload) -> None:
        """Keep w^t, which the training of w_k changes in place."""
        self.received = self.snapshot()

    def phases(self) -> Sequence[Phase]:
        """Return the training of w_k and that of v_k, on the same batches; a newcomer, which sends nothing, has one."""
        spec, epochs = self.training, self.hparams.personal_epochs
        if self.newcomer:
            return [Phase(self.personal_loss, spec, model=self.personal)]
        own = spec if epochs is None else spec.replaced(local_epochs=epochs)
        return [*super().phases(), Phase(self.personal_loss, own, model=self.personal)]

    def step_loss(self, batch: Batch) -> Tensor:
        """Return F_k(w) of w_k; `train-loss` is that of the last phase, h_k."""
        return super().step_loss(batch)

    def personal_loss(self, batch: Batch) -> Tensor:
        """Return h_k(v; w^t) = F_k(v) + lambda/2 ||v - w^t||^2; training alone's loss where lambda is 0."""
        loss = self.cross_entropy(self.personal(batch.x), batch.y)
        lam: float = self.hparams.lam
        if lam == 0:
            return loss
        return loss + 0.5 * lam * squared_distance(list(self.personal.parameters()), self.received)

    def after_training(self, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Send w_k, keep what it needs of itself, and go on with v_k, which is scored and stored."""
        sent = selection.views(self.model, self.up_names(), sent=True)
        left = sorted(selection.float_buffers(self.model) - set(self.down_names()))
        self.own = names.prefixed(BUFFERS, selection.extract(self.model, left))
        self.model = self.personal
        return sent, {}
