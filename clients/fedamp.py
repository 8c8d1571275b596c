"""FedAMP, local step. Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, Personalized Cross-Silo Federated Learning on Non-IID
Data, AAAI 2021.

| symbol (paper)    | here                                                |
|-------------------|-----------------------------------------------------|
| u_i               | the received model; `self.mix`, its parameters      |
| w_i               | `self.model.parameters()`                           |
| lambda, alpha_k   | `hparams.lam`, `hparams.alpha`                      |

Eq. 8, local problem:  w_i <- argmin_w F_i(w) + lambda / (2 alpha_k) ||w - u_i||^2.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from clients.base import FedClient
from fedapp.core.contrastive import squared_distance
from fedapp.lazy import Tensor
from fedapp.learning.state import ClientStore
from fedapp.learning.task import Task
from fedapp.learning.training import Batch
from fedapp.method import Arrays, BaseHParams, Method, Payload
from fedapp.models import selection


class FedAMPHParams(BaseHParams):
    """Hyperparameters of FedAMP."""

    form: Literal["cosine", "distance"] = Field(
        "cosine",
        description="attention by cosines of models (the paper's HeurFedAMP) or by squared distances (its FedAMP)",
    )
    scale: float = Field(25.0, ge=0, description="sharpness s of the cosine form (paper: tuned)")
    xi: float = Field(
        0.5, ge=0, le=1, description="weight of the client's own model: in the cosine form exactly, else at least"
    )
    sigma: float = Field(
        10.0, gt=0, description="width of the distance form, in squared distance (paper: tuned; 0.1 in cwFedAvg's code)"
    )
    alpha: float = Field(
        10.0, gt=0, description="step alpha of the distance form; divides lam in both forms (cwFedAvg's code: 1000)"
    )
    lam: float = Field(1.0, ge=0, description="lambda of the proximal term lam / (2 alpha) ||w - u||^2 (paper: 1)")
    start: Literal["mix", "own"] = Field(
        "mix", description="where local training starts: at u_i, or at the client's own model as it was left"
    )


class FedAMPClient(FedClient):
    """Local training that is pulled towards the received mix of models."""

    mix: list[Tensor]
    left: Arrays | None = None

    def __init__(self, task: Task, method: Method, hparams: Any, store: ClientStore | None = None) -> None:
        super().__init__(task, method, hparams, store)
        self.needs_state = hparams.start == "own"  # training starts from it, although the server sends a whole model

    def receive(self, payload: Payload) -> None:
        """Take over u_i; set the own model aside if training starts from it."""
        own = self.hparams.start == "own" and self.loaded is not None
        self.left = selection.everything(self.model) if own else None
        super().receive(payload)

    def before_training(self, payload: Payload) -> None:
        """Keep u_i, detached, and go back to the own model if asked to."""
        self.mix = self.snapshot()
        if self.left is not None:
            selection.merge(self.model, self.left)
            self.reference = selection.extract(self.model, self.up_names())

    def step_loss(self, batch: Batch) -> Tensor:
        """Return F_i(w) + lam / (2 alpha) ||w - u_i||^2 over trainable parameters."""
        loss = super().step_loss(batch)
        if self.hparams.lam == 0:
            return loss
        pull = 0.5 * float(self.hparams.lam / self.hparams.alpha)
        return loss + pull * squared_distance(list(self.model.parameters()), self.mix)  # Eq. 8
