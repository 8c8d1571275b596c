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
Eq. 5:  the received header replaces the own one (`receive` of the base class)
Eq. 6:  local training, plain cross-entropy on extractor and header
Eq. 3:  R_k^s = 1 / |D_k^s| * sum_{i in D_k^s} F_k(phi_k; x_i), with the trained extractor, without augmentation.
The LARs and their labels are sent. Class counts and the locally trained header are not.

With `dp = example` noised sums and counts of all classes take the place of LARs. What one image can change is known
only if the extractor does not depend on the client's images: all clients have the same one, as the run gives it, and
train the header alone (Eq. 6 without phi). The statistics are then the same in all rounds, so they are released once,
and the same numbers are sent again, which reveals nothing more.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from clients.base import FedClient
from fedapp import sampling
from fedapp.lazy import Tensor, torch
from fedapp.learning.training import Phase
from fedapp.method import HEAD, Arrays, BaseHParams, Payload
from fedapp.privacy import statistics

ROWS = 4096
"""Images whose representations are held at a time."""


class FedGHHParams(BaseHParams):
    """Hyperparameters of FedGH; all but `min_class_count` belong to the server's training of the header."""

    header_lr: float = Field(0.01, ge=0, description="eta_theta, learning rate of the header (paper: 0.01)")
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
        "trained", description="frozen = the header never changes, which is what the released code does"
    )
    min_class_count: int = Field(
        1, ge=1, description="leave out classes with fewer samples: the LAR of one sample is that sample (paper: 1)"
    )


class FedGHClient(FedClient):
    """Trains extractor and received header, then sends one mean representation per class."""

    lar_seconds: float

    def after_training(self, payload: Payload) -> Arrays:
        """Return the LARs: `lar` (S_k, d) float32 and `labels` (S_k,) int32, ascending."""
        started = time.perf_counter()
        if self.task.privacy is not None:
            return self.noised()
        y = self.task.y_train
        labels, counts = torch.unique(y, return_counts=True)
        labels = labels[counts >= self.hparams.min_class_count]
        counts = counts[counts >= self.hparams.min_class_count]
        # Eq. 3. In float64, so that the sum does not depend on ROWS; as a product, whose order is fixed on a GPU too.
        sums = torch.zeros(len(labels), self.model.width, dtype=torch.float64, device=self.device)
        for start in range(0, len(y) if len(labels) else 0, ROWS):
            part = slice(start, start + ROWS)
            member = (y[part] == labels[:, None]).double()  # (S_k, rows)
            z = self.representations(self.task.x_train[part])
            sums += member @ z.double()
            self.saw(z, y[part])
        lar = (sums / counts[:, None]).cpu().numpy().astype(np.float32)
        self.lar_seconds = time.perf_counter() - started
        return {"lar": lar, "labels": labels.cpu().numpy().astype(np.int32)}

    def noised(self) -> Arrays:
        """Return noised counts (C,) and sums (C, d), from the first round on the same."""
        started = time.perf_counter()
        names = ("count", "sum")
        if all(f"released/{n}" in self.own for n in names):
            self.released = True
        else:
            found = statistics.release(self, self._parts(), "none", "class means")
            self.own |= {f"released/{n}": found[n] for n in names}
        self.lar_seconds = time.perf_counter() - started
        return {f"noised/{n}": self.own[f"released/{n}"] for n in names}

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, self.task.num_samples, ROWS):
            part = slice(start, start + ROWS)
            yield self.representations(self.task.x_train[part]), self.task.y_train[part]

    def phases(self) -> Sequence[Phase]:
        """Train as always; with `dp` the header alone."""
        if self.task.privacy is None:
            return super().phases()
        return [Phase(self.step_loss, self.train_spec(), prefixes=HEAD)]

    def initial_seed(self) -> int:
        """Return a seed of the client's own; with `dp` that of the server's model, since means must be comparable."""
        return super().initial_seed() if self.task.privacy is None else sampling.server_model_seed(self.task.seed)

    def saw(self, representations: Tensor, labels: Tensor) -> None:
        """Take note of a part of the pass for the LARs: representations (n, d) with labels (n,)."""

    def reply_metrics(self) -> dict[str, Any]:
        """Return the wall-clock seconds of extracting the LARs: the paper expects half of those of one epoch."""
        return {"lar-seconds": self.lar_seconds}
