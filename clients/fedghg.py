"""FedGHG, local step: FedGH's, with the mean and the spread of each class. It is not from a paper.

| symbol     | here                                                                                             |
|------------|--------------------------------------------------------------------------------------------------|
| mu_ks      | row of `lar`, exactly FedGH's                                                                    |
| Sigma_ks   | row of `cov`: variances, or the packed covariance, with divisor n - 1; zero for one sample       |
| n_ks       | `counts`, with `weights=count` only                                                              |

Mean and spread come from the same pass over the training images, in evaluation mode and without augmentation.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import Field

from clients.fedgh import FedGHClient, FedGHHParams
from fedapp.core.gaussian import ClassMoments, pack
from fedapp.lazy import Tensor
from fedapp.method import Arrays, Payload


class FedGHGHParams(FedGHHParams):
    """Hyperparameters of FedGHG: FedGH's, and the form of the statistics and of the draws."""

    header_epochs: int = Field(
        20, ge=1, description="M, passes a round, each over a fresh draw of every class of every client"
    )
    cov: Literal["diag", "full", "none"] = Field("diag", description="form of the covariances in a reply; none = FedGH")
    source: Literal["client", "pooled"] = Field(
        "client", description="draws from each client's own Gaussians, or from one Gaussian a class of all clients"
    )
    weights: Literal["equal", "count"] = Field(
        "equal", description="weights of pooling and of between_clients: 1 a client, or its samples, which travel then"
    )
    force: bool = Field(False, description="pool even where more than half of the variance lies between clients")


class FedGHGClient(FedGHClient):
    """Sends one Gaussian per class."""

    spread: ClassMoments

    def after_training(self, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Return FedGH's `lar` and `labels`, `cov` (S, d) or (S, d (d + 1) / 2) float32, and `counts` (S,) int32."""
        full = self.hparams.cov == "full"
        self.spread = ClassMoments(self.task.num_classes, self.model.width, "full" if full else "diag")
        arrays, numbers = super().after_training(payload)
        labels = arrays["labels"].tolist()
        if self.hparams.cov != "none":
            d = self.model.width
            cov = np.zeros((len(labels), d * (d + 1) // 2 if full else d), np.float32)
            for row, c in zip(cov, labels):
                row[:] = pack(self.spread.cov(c)) if full else self.spread.cov(c)
            arrays["cov"] = cov
        if self.hparams.weights == "count":
            arrays["counts"] = self.task.class_counts()[labels].astype(np.int32)
        return arrays, numbers

    def saw(self, representations: Tensor, labels: Tensor) -> None:
        """Add to the spread of each class."""
        if self.hparams.cov != "none":
            self.spread.update(representations, labels)
