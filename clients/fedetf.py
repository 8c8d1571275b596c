"""FedETF, local step. Li, Shang, He, Lin, Wu, No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning
with Synthetic and Fixed Classifier, ICCV 2023.

| symbol (paper)     | here                                                                         |
|--------------------|------------------------------------------------------------------------------|
| h                  | `model.represent(x)`, (B, d)                                                 |
| Q, q               | `model.head`, the projection of h to d' = C numbers: u = Q h + q             |
| M (V_ETF)          | `model.etf`, (C, C): columns of length 1 with cosines -1/(C-1), never sent   |
| s (beta)           | `model.scale`, (1,), trained                                                 |
| n_k, gamma         | class counts of the training split, `hparams.gamma`                          |

Logits:  s f^T M  with  f = u / ||u||.      Local loss, over everything but M:  CE(s f^T M + gamma log n_k, y).
M = sqrt(C/(C-1)) (I - J/C); any rotation of it is one that the projection can take up, so none is drawn.
Fine-tuning on a copy, after the last round: `tune_epochs` of the local loss; then `tune_cycles` times plain
cross-entropy over M alone, which is the client's own from here on, and over the projection alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from clients.base import FedClient
from clients.fedrod import log_prior
from fedapp.lazy import Tensor, torch
from fedapp.learning.task import ModelSpec
from fedapp.learning.training import Batch, Phase
from fedapp.method import ALL, HEAD, BaseHParams, Payload

if TYPE_CHECKING:
    from fedapp.models import SplitModel

SCALE, ETF = "scale", "etf"


class FedETFHParams(BaseHParams):
    """Hyperparameters of FedETF."""

    gamma: float = Field(1.0, ge=0, description="weight of the log class counts (released code: 1); 0 = plain")
    absent: Literal["one", "drop"] = Field(
        "one", description="classes without samples: counted as one (released code), or out of the softmax"
    )
    scale: float | None = Field(
        None,
        gt=0,
        description="s at the start (released code: 1 for ResNets, 10 for its CNN); none = 10 log10 C, >= 10",
    )
    train_scale: bool = Field(True, description="whether s is trained (released code: yes)")
    etf: bool = Field(True, description="false is a control: the plain linear head instead of projection and simplex")
    tune_epochs: int = Field(1, ge=0, description="epochs of fine-tuning on the local loss (released code: 3)")
    tune_cycles: int = Field(3, ge=0, description="times that simplex and projection are tuned in turn (code: 20)")
    tune_etf: int = Field(1, ge=0, description="epochs on the simplex in each of them (released code: 3)")
    tune_projection: int = Field(1, ge=0, description="epochs on the projection in each of them (released code: 3)")


def simplex(num_classes: int) -> Tensor:
    """Return M, (C, C) float32: column c is the direction of class c in a simplex around 0."""
    c = num_classes
    return math.sqrt(c / max(1, c - 1)) * (torch.eye(c) - 1 / c)


class FedETFClient(FedClient):
    """Trains towards directions that are fixed and the same for all, on a loss that its class counts balance."""

    computed = (ETF,)

    @classmethod
    def build_model(cls, spec: ModelSpec, hparams: Any) -> SplitModel:
        """Build the zoo's model with a projection and a simplex in the place of its head."""
        base = super().build_model(spec, hparams)
        if not hparams.etf:
            return base
        scale = hparams.scale or max(10.0, 10 * math.log10(base.num_classes))
        from clients._models import ETFModel

        return ETFModel(base, scale=scale, train_scale=hparams.train_scale)

    @functools.cached_property
    def prior(self) -> Tensor:
        """Gamma log n_k, (C,)."""
        counts = torch.from_numpy(self.task.class_counts()).to(self.device)
        return log_prior(counts, self.hparams.gamma, self.hparams.absent)

    def before_training(self, payload: Payload) -> None:
        """Compute the prior here: within a step a GPU would have to be waited for."""
        super().before_training(payload)
        _ = self.prior

    def step_loss(self, batch: Batch) -> Tensor:
        """Return the balanced loss; exactly the plain one where gamma is 0."""
        logits = self.model(batch.x)
        return self.cross_entropy(logits + self.prior if self.hparams.gamma else logits, batch.y)

    def plain_loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy of the logits."""
        return self.cross_entropy(self.model(batch.x), batch.y)

    def tuning(self) -> Sequence[Phase]:
        """Train all but M on the local loss; then M and the projection in turn."""
        p, _ = self.hparams, self.prior
        spec = self.training.replaced(lr_schedule_steps="")

        def phase(loss: Callable[[Batch], Tensor], epochs: int, prefixes: tuple[str, ...], draws: str) -> Phase:
            return Phase(loss, spec.replaced(local_epochs=epochs), prefixes, draws, rate=spec.lr)

        if not p.etf:
            return [phase(self.step_loss, p.tune_epochs, ALL, "tune")]
        self.model.etf.requires_grad_(True)  # of the copy
        phases = [phase(self.step_loss, p.tune_epochs, (*ALL, SCALE), "tune")]
        for i in range(p.tune_cycles):
            phases.append(phase(self.plain_loss, p.tune_etf, (ETF,), f"tune.etf.{i}"))
            phases.append(phase(self.plain_loss, p.tune_projection, HEAD, f"tune.head.{i}"))
        return phases
