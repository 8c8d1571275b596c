"""FedRep, local step. Collins, Hassani, Mokhtari, Shakkottai, Exploiting Shared Representations for Personalized
Federated Learning, ICML 2021.

| symbol (paper)   | here                                                                   |
|------------------|------------------------------------------------------------------------|
| phi              | `model.features`, the shared representation, received and sent         |
| h_i              | `model.head`, private                                                  |
| tau              | `hparams.head_epochs`, passes over the training split for the head     |

Algorithm 1, client i:  h_i <- SGD on f_i(h, phi) over h, phi as received;  then phi_i <- SGD on f_i(h_i, phi) over phi.
f_i is the mean cross-entropy. Each phase has an optimizer of its own, and what it does not train stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from clients.fedper import PrivateClient, PrivateHParams
from fedapp.learning.training import Phase
from fedapp.method import HEAD

BODY = ("features.",)


class FedRepHParams(PrivateHParams):
    """Hyperparameters of FedRep."""

    phases: Literal["turns", "joint"] = Field(
        "turns", description="head first, then body (paper), or both together for local-epochs: FedPer"
    )
    head_epochs: int = Field(10, ge=0, description="passes for the head (paper: 10)")
    body_epochs: int | None = Field(
        None, ge=0, description="passes for the body (paper: 1, or 5); None = local-epochs of the run"
    )
    average: Literal["samples", "plain"] = Field(
        "samples", description="mean of the bodies: weighted by n_k (released code for FEMNIST), or plain (paper)"
    )


class FedRepClient(PrivateClient):
    """Trains the head on the received body, then the body under the new head."""

    def phases(self) -> Sequence[Phase]:
        """Return both phases; a newcomer trains its head alone, on the body that the others have made."""
        spec, hparams = self.train_spec(), self.hparams
        if hparams.phases == "joint":
            return super().phases()
        if self.newcomer:
            return [Phase(self.step_loss, spec, HEAD)]
        head_epochs, body_epochs = self.phase_epochs()
        return [
            Phase(self.step_loss, spec.replaced(local_epochs=head_epochs), HEAD),
            Phase(self.step_loss, spec.replaced(local_epochs=body_epochs), BODY, "batches.body"),
        ]

    def phase_epochs(self) -> Sequence[int]:
        """Return the passes for the head and for the body."""
        epochs, hparams = self.train_spec().local_epochs, self.hparams
        if hparams.phases == "joint":
            return [epochs]
        return [hparams.head_epochs, epochs if hparams.body_epochs is None else hparams.body_epochs]

    @classmethod
    def epochs_in(cls, server_round: int, local_epochs: int, hparams: Any) -> int:
        """Return the passes of both phases."""
        if not server_round or hparams.phases == "joint":
            return super().epochs_in(server_round, local_epochs, hparams)
        body_epochs = local_epochs if hparams.body_epochs is None else hparams.body_epochs
        return int(hparams.head_epochs + body_epochs)
