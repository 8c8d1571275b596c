"""FedNH, local step. Dai, Chen, Li, Heinecke, Sun, Xu, Tackling Data Heterogeneity in Federated Learning with Class
Prototypes, AAAI 2023.

| symbol (paper)   | here                                                                                    |
|------------------|-----------------------------------------------------------------------------------------|
| f(x; theta)      | `model.represent(x)`, (B, d)                                                             |
| W (rows W_c)     | `model.head.weight`, (C, d), rows of length 1, never trained                             |
| s                | `model.scale`, (1,), trained with the body                                               |
| z                | f(x) / ||f(x)||                                                                          |
| n_kc, mu_kc      | class counts and mean directions of this client: `nh/count`, and `nh/proto_sum` = n mu   |

Logits:  s * z W^T, without bias. Local loss: cross-entropy, over theta and s. After training, in evaluation mode and
without augmentation, one pass over the training split gives  mu_kc = normalise(mean of z over class c).
W^0 has orthonormal rows, as in the released code: all pairs are equally far apart, since nothing is known of the
classes. They are not as far apart as C directions can be: those of a regular simplex have cosine -1 / (C - 1), not 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from clients.base import FedClient
from fedapp.lazy import F, torch
from fedapp.learning.task import ModelSpec
from fedapp.method import Arrays, BaseHParams, Payload

if TYPE_CHECKING:
    from fedapp.models import SplitModel

PROTO_SUM, COUNT = "nh/proto_sum", "nh/count"


class FedNHHParams(BaseHParams):
    """Hyperparameters of FedNH."""

    rho: float = Field(0.9, ge=0, le=1, description="share of the old prototypes kept in a round (paper: 0.9)")
    scale: float = Field(20.0, gt=0, description="s at the start (released code: 1 for its CNN, 20 for ResNet, or 30)")
    train_scale: bool = Field(True, description="whether s is trained and averaged (released code: for 1 and 20)")
    weights: Literal["uniform", "samples"] = Field(
        "uniform", description="how clients' bodies are averaged: alike (released code), or by n_k as FedAvg does"
    )


class FedNHClient(FedClient):
    """Trains the body against fixed prototypes, then sends the mean direction of each of its classes."""

    @classmethod
    def build_model(cls, spec: ModelSpec, hparams: Any) -> SplitModel:
        """Build the zoo's model with a prototype head."""
        base = super().build_model(spec, hparams)
        from clients._models import PrototypeModel

        return PrototypeModel(base, scale=hparams.scale, train_scale=hparams.train_scale, seed=spec.seed)

    def after_training(self, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Return n_kc mu_kc, (C, d) float32 with zero rows for absent classes, and n_kc, (C,) int32."""
        z = F.normalize(self.representations(), dim=1)
        y = self.task.y_train
        sums = z.new_zeros(self.task.num_classes, z.shape[1], dtype=torch.float64).index_add_(0, y, z.double())
        count = torch.bincount(y, minlength=self.task.num_classes)
        proto_sum = count[:, None] * F.normalize(sums, dim=1)
        return {PROTO_SUM: proto_sum.float().cpu().numpy(), COUNT: count.int().cpu().numpy()}, {}
