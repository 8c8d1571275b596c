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
from typing import Literal

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
        spec, hparams = self.training, self.hparams
        if hparams.phases == "joint":
            return super().phases()
        if self.newcomer:
            return [Phase(self.step_loss, spec, HEAD)]
        body = spec if hparams.body_epochs is None else spec.replaced(local_epochs=hparams.body_epochs)
        return [
            Phase(self.step_loss, spec.replaced(local_epochs=hparams.head_epochs), HEAD),
            Phase(self.step_loss, body, BODY, "batches.body"),
        ]
