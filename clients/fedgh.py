"""FedGH, local step. Yi, Wang, Liu, Shi, Yu, FedGH: Heterogeneous Federated Learning with Generalized Global Header,
ACM MM 2023.

| symbol (paper)   | here                                                            |
|------------------|-----------------------------------------------------------------|
| phi_k            | `model.features`, private                                       |
| theta            | `model.head`, replaced by the received one every round (Eq. 5)  |
| F_k(phi_k; x)    | `model.represent(x)`, (B, d), after the last activation         |
| S_k              | classes present at client k                                     |
| LAR  R_k^s       | row of `lar`, mean representation of class s (Eq. 3)            |

Algorithm 1, client k:
Eq. 5:  the received head replaces the own one (`receive` of the base class)
Eq. 6:  local training, plain cross-entropy on body and head
Eq. 3:  R_k^s = 1 / |D_k^s| * sum_{i in D_k^s} F_k(phi_k; x_i), with the trained body, without augmentation.
The LARs and their labels are sent. Class counts and the locally trained head are not.

With `dp = example` noised sums and counts of all classes take the place of LARs (`fedapp/privacy/clients.py`).
"""

from __future__ import annotations

import time
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from clients.base import FedClient
from fedapp.lazy import Tensor, torch
from fedapp.method import Arrays, BaseHParams, Payload


class FedGHHParams(BaseHParams):
    """Hyperparameters of FedGH; all but `min_class_count` belong to the server's training of the head."""

    header_lr: float = Field(0.01, ge=0, description="eta_theta, learning rate of the head (paper: 0.01)")
    header_batch: Literal["sample", "client", "all"] | Annotated[int, Field(ge=1)] = Field(
        "sample",
        description="LARs per step: sample = one (paper, Eq. 4), client = one client's, all = one step on all, or a "
        "number of pooled LARs",
    )
    header_epochs: int = Field(1, ge=1, description="passes over the LARs per round (paper: 1)")
    header_clip: float = Field(50.0, ge=0, description="largest gradient norm of a step, 0 = none (released code: 50)")
    order: Literal["shuffled", "arrival", "sorted"] = Field(
        "shuffled",
        description="order of the clients: shuffled by (seed, round), as replies arrive (paper; differs from run to "
        "run), or sorted by id",
    )
    mode: Literal["trained", "frozen"] = Field(
        "trained", description="frozen = the head never changes, which is what the released code does"
    )
    min_class_count: int = Field(
        1, ge=1, description="leave out classes with fewer samples: the LAR of one sample is that sample (paper: 1)"
    )
    exact: ClassVar = {("order", "arrival"): "says how long clients take: take shuffled or sorted"}


class FedGHClient(FedClient):
    """Trains body and received head, then sends one mean representation per class."""

    block = 4096

    def after_training(self, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Return what the server trains the head on, and the seconds that it took.

        The paper expects half of the seconds of one epoch.
        """
        started = time.perf_counter()
        arrays = self.lars()
        return arrays, {"lar-seconds": time.perf_counter() - started}

    def lars(self) -> Arrays:
        """Return the LARs: `lar` (S_k, d) float32 and `labels` (S_k,) int32, ascending."""
        labels, counts = torch.unique(self.task.y_train, return_counts=True)
        labels = labels[counts >= self.hparams.min_class_count]
        counts = counts[counts >= self.hparams.min_class_count]
        # Eq. 3. In float64, so that `block` does not matter; as a product, whose order is fixed on a GPU too.
        sums = torch.zeros(len(labels), self.model.width, dtype=torch.float64, device=self.device)
        for z, y in self.feature_batches("train") if len(labels) else ():
            member = (y == labels[:, None]).double()  # (S_k, rows)
            sums += member @ z.double()
            self.saw(z, y)
        lar = (sums / counts[:, None]).cpu().numpy().astype(np.float32)
        return {"lar": lar, "labels": labels.cpu().numpy().astype(np.int32)}

    def saw(self, representations: Tensor, labels: Tensor) -> None:
        """Take note of a part of the pass for the LARs: representations (n, d) with labels (n,)."""
