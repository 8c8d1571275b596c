"""Federated distillation, local step. Jeong et al., Communication-Efficient On-Device Machine Learning: Federated
Distillation and Augmentation under Non-IID Private Data, 2018.

| symbol (paper)     | here                                                                          |
|--------------------|-------------------------------------------------------------------------------|
| F_i(x)             | `softmax(model(x))`, (B, C) (with `output=logits`: the logits)                |
| bar F_{k,l}        | row of `outputs` in the reply: mean output of client k over its label l       |
| hat F_{k,l}        | `self.targets[l]`, where `self.known[l]`: mean over the *other* clients       |
| gamma              | `hparams.gamma`                                                               |

Local loss:  L = phi(F(x), e_y) + gamma * phi(F(x), hat F_{k,y}),  phi the cross-entropy (the target in second place is
the distribution).  A sample whose label has no target adds zero and still counts in the mean; in round 1 none has one.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from clients.classmeans import ClassMeansClient
from fedapp.core.distillation import soften
from fedapp.lazy import F, Tensor, torch
from fedapp.learning.training import Batch
from fedapp.method import Arrays, BaseHParams, Payload


class FDHParams(BaseHParams):
    """Hyperparameters of federated distillation."""

    gamma: float = Field(1.0, ge=0, description="weight of the distillation term (paper: not given; common code: 1)")
    output: Literal["softmax", "logits"] = Field(
        "softmax",
        description="the averaged outputs: softmax = probabilities, cross-entropy to the target (paper); logits, with "
        "the mean squared error to the target",
    )
    include_self: bool = Field(
        False, description="whether a client's own mean is part of its target (paper: no; common code: yes)"
    )
    collect: Literal["eval", "train"] = Field(
        "eval", description="mean outputs from a pass after training, or from the last epoch as it ran"
    )
    down: Literal["own", "all"] = Field("own", description="targets sent to a client: for its own labels, or all")


def distillation_loss(logits: Tensor, y: Tensor, targets: Tensor, known: Tensor, output: str = "softmax") -> Tensor:
    """phi(F(x), hat F_y) of one batch.

    Parameters
    ----------
    logits : (B, C).   y : (B,) labels.
    targets : (C, C); only rows with `known` (C,) bool are used.
    output : `softmax`: cross-entropy to probabilities; `logits`: mean squared error over the C logits.
    """
    if output == "softmax":
        per_sample = F.cross_entropy(logits, targets[y], reduction="none")
    else:
        per_sample = (logits - targets[y]).square().mean(dim=1)
    return torch.where(known[y], per_sample, torch.zeros_like(per_sample)).mean()


class FDClient(ClassMeansClient):
    """Trains its own model on labels and on the other clients' mean outputs, and sends its own."""

    targets: Tensor
    known: Tensor

    @property
    def rows_width(self) -> int:
        """C: one number a class."""
        return self.task.num_classes

    def rows_of(self, representations: Tensor) -> Tensor:
        """Return the outputs (n, C) that are averaged."""
        with torch.no_grad():
            logits = self.model.classify(representations)
            return soften(logits) if self.hparams.output == "softmax" else logits

    def receive(self, payload: Payload) -> None:
        """Take the targets (M, C) with their labels (M,); the model stays the client's own."""
        self.targets, self.known = self.received_rows(payload, "outputs")

    def step_loss(self, batch: Batch) -> Tensor:
        """Return the loss on labels plus gamma times the loss on targets."""
        z = self.model.represent(batch.x)
        self.collect(z, batch.y)
        logits = self.model.classify(z)
        loss = self.cross_entropy(logits, batch.y)
        if self.hparams.gamma == 0:
            return loss
        distilled = distillation_loss(logits.float(), batch.y, self.targets, self.known, self.hparams.output)
        total: Tensor = loss + self.hparams.gamma * distilled
        return total

    def after_training(self, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Return `outputs` (S, C) and `labels` (S,)."""
        rows = self.class_rows()
        return {"outputs": rows.values, "labels": rows.labels}, {}
