"""Ditto, local step. Li, Hu, Beirami, Smith, Ditto: Fair and Robust Federated Learning Through Personalization, ICML
2021.

| symbol (paper)   | here                                                                    |
|------------------|-------------------------------------------------------------------------|
| w^t              | the received model; `self.received`, its parameters                     |
| w_k              | `self.model` after its own training, which is sent                      |
| v_k              | `self.personal`, a whole model that never leaves; the one that predicts |
| lambda           | `hparams.lam`                                                           |

Algorithm 1, client k:  w_k <- SGD on F_k(w) from w^t, as FedAvg does;
                        v_k <- SGD on h_k(v; w^t) = F_k(v) + lambda/2 ||v - w^t||^2 from its last v_k.
w^t stays as it was received. v_k moves only when k takes part. What is stored as the client's model is v_k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

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
    """FedAvg's client, with a personal model beside it."""

    needs_state = True
    personal: SplitModel
    received: list[Tensor]

    def restore(self, server_round: int, payload: Payload, always: bool = False) -> None:
        """Restore v_k; a new client's is an initial model, not what was sent."""
        super().restore(server_round, payload, always)
        if self._loaded is None:
            self.model = self.build_model(self.task.spec(self.initial_seed()), self.hparams).to(self.device)
        self.personal = self.model

    def receive(self, payload: Payload) -> None:
        """Put w^t beside v_k."""
        self.model = copied(self.personal)
        selection.merge(self.model, names.under(BUFFERS, self.own))
        super().receive(payload)

    def before_training(self, payload: Payload) -> None:
        """Keep w^t, which the training of w_k changes in place."""
        self.received = self.snapshot()

    def phases(self) -> Sequence[Phase]:
        """Return the training of w_k and that of v_k, on the same batches; a newcomer, which sends nothing, has one."""
        spec = self.train_spec()
        if not self.newcomer:
            spec = spec.replaced(local_epochs=self.phase_epochs()[1])
        parameters = list(self.personal.parameters())
        personal = Phase(self.personal_loss, spec, model=self.personal, parameters=parameters)
        return [personal] if self.newcomer else [*super().phases(), personal]

    def phase_epochs(self) -> Sequence[int]:
        """Return the passes over w_k and over v_k."""
        epochs, personal = self.train_spec().local_epochs, self.hparams.personal_epochs
        return [epochs, epochs if personal is None else personal]

    def personal_loss(self, batch: Batch) -> Tensor:
        """Return h_k(v; w^t) = F_k(v) + lambda/2 ||v - w^t||^2; exactly Standalone's loss where lambda is 0."""
        loss = self.cross_entropy(self.personal(batch.x), batch.y)
        lam: float = self.hparams.lam
        if lam == 0:
            return loss
        return loss + 0.5 * lam * squared_distance(list(self.personal.parameters()), self.received)

    def after_training(self, payload: Payload) -> Arrays:
        """Keep what w_k needs of itself; nothing but w_k is sent."""
        left = sorted(selection.float_buffers(self.model) - set(self.down_names()))
        self.own = {BUFFERS + name: array for name, array in selection.extract(self.model, left).items()}
        return super().after_training(payload)

    def scored(self, protocol: str) -> SplitModel:
        """Return v_k, but w^t for scores of what was received."""
        return self.model if "received" in protocol else self.personal

    @classmethod
    def adds_to_loss(cls) -> bool:
        """`train-loss` is that of v_k, with the pull."""
        return True

    @classmethod
    def epochs_in(cls, server_round: int, local_epochs: int, hparams: Any) -> int:
        """Return the passes over both models."""
        if not server_round:
            return 0
        return local_epochs + (local_epochs if hparams.personal_epochs is None else int(hparams.personal_epochs))
