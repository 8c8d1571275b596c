"""FedRoD, local step. Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification,
ICLR 2022.

| symbol (paper)     | here                                                                 |
|--------------------|----------------------------------------------------------------------|
| f(x; theta)        | h = `model.represent(x)`, (B, d)                                     |
| psi, the G-head    | `model.head`: z_g = W h + b; travels with theta                      |
| phi_m, the P-head  | `model.personal`: z_p = z_g + V h + u; private                       |
| gamma              | `hparams.gamma`                                                      |
| N_m,c              | class counts of the training split; `self.log_prior` = gamma log N_m |

Local losses, in one backward pass:
    generic   CE(z_g + gamma log N_m, y)                      over theta, W, b   (balanced softmax)
    personal  CE(stop(z_g) + V stop(h) + u, y)                over V, u alone
Clients predict by z_p, the server by z_g, both without the prior. The class counts stay with the client.
V and u start at 0: z_p is z_g at first, and the server's model, which has no P-head of its own, is the generic one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from clients.base import FedClient
from fedapp.lazy import Tensor, torch
from fedapp.learning.task import ModelSpec
from fedapp.learning.training import Batch, Phase
from fedapp.method import Arrays, BaseHParams, Payload

if TYPE_CHECKING:
    from clients._models import RoDModel
    from fedapp.models import SplitModel

PERSONAL = "personal."


class FedRoDHParams(BaseHParams):
    """Hyperparameters of FedRoD."""

    gamma: float = Field(
        1.0, ge=0, description="weight of the log class counts in the generic loss (paper: 1); 0 = plain cross-entropy"
    )
    absent: Literal["drop", "one"] = Field(
        "drop",
        description="classes without samples: out of the generic softmax (the formula), or counted as one sample",
    )


def log_prior(counts: Tensor, gamma: float, absent: str) -> Tensor:
    """Return gamma log N, (C,) float32, of class counts (C,); -inf drops a class, without a gradient or NaN."""
    return gamma * (counts.clamp_min(1) if absent == "one" else counts).float().log()


class FedRoDClient(FedClient):
    """Trains the generic model on a balanced loss, and the personal head on the residual."""

    private_logits = True
    model: RoDModel
    log_prior: Tensor
    losses: Tensor
    seen: int

    @classmethod
    def build_model(cls, spec: ModelSpec, hparams: Any) -> SplitModel:
        """Build the zoo's model with a second head."""
        from clients._models import RoDModel

        return RoDModel(super().build_model(spec, hparams))

    def before_training(self, payload: Payload) -> None:
        """Compute gamma log N_m, and begin with empty sums of the losses."""
        super().before_training(payload)
        counts = torch.from_numpy(self.task.class_counts()).to(self.device)
        self.log_prior = log_prior(counts, self.hparams.gamma, self.hparams.absent)
        self.losses, self.seen = torch.zeros(2, device=self.device), 0

    def phases(self) -> Sequence[Phase]:
        """Train both parts at once."""
        return [Phase(self.step_loss, self.training, parameters=self.groups)]

    def groups(self) -> list[dict[str, Any]]:
        """Return both parts in groups: clipped together, the personal gradient would change the generic step."""
        named = list(self.model.named_parameters())
        groups = ([p for n, p in named if n.startswith(PERSONAL) is personal] for personal in (False, True))
        return [{"params": group} for group in groups]

    def step_loss(self, batch: Batch) -> Tensor:
        """Return the sum of both losses; the generic one is exactly FedAvg's where gamma is 0."""
        z = self.model.represent(batch.x)
        z_g = self.model.generic(z)
        # Not 0 times the prior: -inf times 0 is NaN.
        generic = self.cross_entropy(z_g + self.log_prior if self.hparams.gamma else z_g, batch.y)
        personal = self.cross_entropy(z_g.detach() + self.model.personal(z.detach()), batch.y)
        self.losses = self.losses + len(batch.y) * torch.stack([generic, personal]).detach()
        self.seen += len(batch.y)
        return generic + personal

    def after_training(self, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Return the mean of each loss over the steps; `train-loss` is their sum."""
        if not self.seen:
            return {}, {}
        generic, personal = (float(v) for v in (self.losses / self.seen).cpu().numpy())
        return {}, {"generic-loss": generic, "personal-loss": personal}
