"""FedBABU, local step. Oh, Kim, Yun, FedBABU: Toward Enhanced Representation for Federated Image Classification,
ICLR 2022.

| symbol (paper)     | here                                                                       |
|--------------------|----------------------------------------------------------------------------|
| theta_ext          | `model.features`, the body                                                 |
| theta_cls          | `model.head`: random, the same for all, never trained in the federation    |
| tau                | `local-epochs`                                                             |
| fine-tuning        | `tuning`, on a copy of what was received, after the last round             |

Local loss: cross-entropy, over the body alone. For its last score each client trains a copy of the global model, by
default body and head, for `tune_epochs` with the settings of its training and a hundredth of its learning rate: the
released code trains with 0.1 and fine-tunes with 0.001, without the schedule of the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from clients.base import FedClient
from fedapp.learning.training import Phase
from fedapp.method import ALL, HEAD, BaseHParams

BODY = ("features.",)
PARTS = {"body": BODY, "head": HEAD, "full": ALL}


class FedBABUHParams(BaseHParams):
    """Hyperparameters of FedBABU."""

    weights: Literal["samples", "uniform"] = Field(
        "samples", description="how bodies are averaged: by n_k, or all alike (released code)"
    )
    tune: Literal["full", "head", "body"] = Field(
        "full", description="the part that is fine-tuned for the last score (paper: all three, full as a rule)"
    )
    tune_epochs: int = Field(5, ge=0, description="epochs of fine-tuning (released code: 5); 0 = none")
    tune_lr: float | None = Field(
        None, gt=0, description="learning rate of fine-tuning; none = lr / 100 (released code: 0.001 after 0.1)"
    )


class FedBABUClient(FedClient):
    """Trains the body under a head that stays as it is."""

    def phases(self) -> Sequence[Phase]:
        """Train the body; `freeze` must leave at least one of its layers to train."""
        return [Phase(self.step_loss, self.training, BODY)]

    def tuning(self) -> Sequence[Phase]:
        """Train what `tune` says, on batches of its own."""
        s, spec = self.hparams, self.task.train
        rate = s.tune_lr or spec.lr / 100
        spec = spec.replaced(local_epochs=s.tune_epochs, lr=rate, lr_schedule_steps="")
        return [Phase(self.step_loss, spec, PARTS[s.tune], "tune", rate=rate)]
