"""FedProto, local step. Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022.

| symbol (paper)   | here                                                                       |
|------------------|----------------------------------------------------------------------------|
| f_i(phi_i; x)    | `model.represent(x)`, (B, r)                                               |
| C_i^(j)          | row of `protos` in the reply: mean representation of class j at client i   |
| bar C^(j)        | `self.prototypes[j]`, where `self.known[j]`                                |
| lambda           | `hparams.lam`                                                              |

Local loss, Eq. 7:  L = L_S(F_i(x), y) + lambda * L_R,  L_R = distance between representations and global prototypes.
As in the released code the distance is taken for every sample, to the prototype of its own class. A sample whose class
has no global prototype adds zero and still counts in the mean; in round 1 nothing has one.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import Field

from clients.classmeans import ClassMeansClient
from fedapp.lazy import Tensor, torch
from fedapp.learning.evaluation import Scores, evaluate
from fedapp.learning.training import Batch
from fedapp.method import Arrays, BaseHParams, Payload


class FedProtoHParams(BaseHParams):
    """Hyperparameters of FedProto."""

    lam: float = Field(1.0, ge=0, description="lambda, weight of the prototype term (paper: 1; 0.1 on CIFAR-10)")
    distance: Literal["mse", "squared", "norm"] = Field(
        "mse",
        description="per sample: squared distance averaged over the r coordinates (released code), summed, or its root",
    )
    average: Literal["plain", "count"] = Field(
        "plain",
        description="global prototype: mean over the clients that own the class (released code), or weighted by their "
        "samples of it, which travel then",
    )
    collect: Literal["eval", "train"] = Field(
        "eval",
        description="local prototypes from a pass after training, or from the last epoch as it ran (released code)",
    )
    down: Literal["own", "all"] = Field("own", description="prototypes sent to a client: of its own classes, or all")
    inference: Literal["classifier", "prototype"] = Field(
        "classifier", description="predict with the head, or by the nearest prototype that the client was sent"
    )

    def weight(self, width: int) -> float:
        """Return lambda for representations of a width."""
        return self.lam


def prototype_loss(z: Tensor, y: Tensor, prototypes: Tensor, known: Tensor, distance: str = "mse") -> Tensor:
    """L_R of one batch.

    Parameters
    ----------
    z : (B, r) representations.   y : (B,) labels.
    prototypes : (C, r); only rows with `known` (C,) bool are used.
    distance : see `FedProtoHParams`.
    """
    squared = (z - prototypes[y]).square()
    per_sample = {
        "mse": lambda: squared.mean(dim=1),
        "squared": lambda: squared.sum(dim=1),
        # The root has no gradient at zero; a sample that sits on its prototype is not moved.
        "norm": lambda: squared.sum(dim=1).clamp_min(1e-24).sqrt(),
    }[distance]()
    return torch.where(known[y], per_sample, torch.zeros_like(per_sample)).mean()


class FedProtoClient(ClassMeansClient):
    """Trains its own model towards the global prototypes and sends its own."""

    prototypes: Tensor
    known: Tensor
    nearest: Scores | None = None

    def receive(self, payload: Payload) -> None:
        """Take the prototypes (M, r) with their labels (M,); the model stays the client's own."""
        self.prototypes, self.known = self.received_rows(payload, "protos")

    def before_training(self, payload: Payload) -> None:
        """Also score nearest-prototype prediction, with the prototypes that were received."""
        super().before_training(payload)
        if bool(self.known.any()) and len(self.task.y_test):
            self.nearest = self.score_nearest(self.task.x_test, self.task.y_test, probabilities=False)

    def step_loss(self, batch: Batch) -> Tensor:
        """Return L_S + lambda * L_R."""
        z = self.model.represent(batch.x)
        self.collect(z, batch.y)
        loss = self.cross_entropy(self.model.classify(z), batch.y)
        lam: float = self.hparams.weight(self.model.width)
        if lam == 0:
            return loss
        pull = prototype_loss(z.float(), batch.y, self.prototypes, self.known, self.hparams.distance)
        total: Tensor = loss + lam * pull  # Eq. 7
        return total

    def after_training(self, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Return the class means of Eq. 3, and how many test images the nearest received prototype got right.

        The arrays are `protos` (S, r), `labels` (S,) and, if asked for, `counts` (S,).
        """
        rows = self.class_rows()
        counts = {"counts": rows.counts.astype(np.int32)} if self.hparams.average == "count" else {}
        arrays = {"protos": rows.values, "labels": rows.labels, **counts}
        if self.nearest is None:
            return arrays, {}
        return arrays, {"prototype-correct": int(self.nearest.correct.sum()), "prototype-total": self.nearest.n}

    def score_nearest(self, x: Tensor, y: Tensor, probabilities: bool) -> Scores:
        """Score nearest-prototype prediction on images (n, H, W, C) uint8."""
        from clients._models import NearestPrototype

        classifier = NearestPrototype(self.model, self.prototypes, self.known)
        return evaluate(classifier, x, y, self.task.inputs, self.task.num_classes, probabilities=probabilities)


class NearestPrototypeClient(FedProtoClient):
    """Predicts by the nearest prototype that it was sent (`inference=prototype`)."""

    def score(self, x: Tensor, y: Tensor, probabilities: bool = False) -> Scores:
        """Score by the nearest prototype, or with the head as long as there is none."""
        return (self.score_nearest if bool(self.known.any()) else super().score)(x, y, probabilities)
