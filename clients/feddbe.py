"""FedDBE (FedAvg with DBE), local step. Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan, Eliminating Domain Bias for
Federated Learning in Representation Space, NeurIPS 2023.

| symbol (paper)   | here                                                                                 |
|------------------|--------------------------------------------------------------------------------------|
| z, f             | `model.represent(x)`, (B, d)                                                          |
| z-bar_i^p        | `model.bias_memory`, (d,), trained, private, 0 at first ("PRBM")                      |
| z-bar_i^g        | `self.mean`, (d,), running mean of a round's representations, 0 at its start          |
| z-bar^g          | `dbe/mean` of the payload, (d,): the same for all, from round 2 on                    |
| kappa, mu        | `hparams.kappa`, `hparams.mu`                                                         |

Logits:  head(z + z-bar_i^p).   Each batch:  r <- (1 - mu) r + mu mean_B(z)  with the old r as a constant,
loss = cross-entropy + kappa / 2 * mean over d of (r - z-bar^g)^2   ("MR").
The mean over d gives the squared distance the weight kappa / (2 d). The released code has kappa = 50 with d = 512;
kappa = 50 d / 512 is that weight at any width.
Round 1 trains as FedAvg does, without either; its replies bring each client's mean, and z-bar^g is the mean of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from clients.base import FedClient
from fedapp.core import names
from fedapp.lazy import Tensor, torch
from fedapp.learning.task import ModelSpec
from fedapp.learning.training import Batch, Phase
from fedapp.method import ALL, Arrays, BaseHParams, Payload

if TYPE_CHECKING:
    from clients._models import BiasModel
    from fedapp.models import SplitModel

PREFIX = "dbe/"
MEAN = PREFIX + "mean"


class FedDBEHParams(BaseHParams):
    """Hyperparameters of FedDBE."""

    kappa: Literal["auto"] | Annotated[float, Field(ge=0)] = Field(
        "auto",
        description="weight of the mean's distance; auto = 50 d / 512 for width d (released code: 50, d = 512; paper: "
        "tuned)",
    )
    mu: float = Field(
        1.0, gt=0, le=1, description="share of the newest batch in the running mean (released code: 1; paper: tuned)"
    )
    mean: Literal["split", "running"] = Field(
        "split",
        description="what round 1 sends: the mean over the training split after training, or the running mean, which "
        "for mu = 1 is the last batch's (released code)",
    )
    memory: bool = Field(True, description="whether the private vector is trained (released code: yes)")

    def weight(self, width: int) -> float:
        """Return kappa for representations of a width."""
        return 50 * width / 512 if self.kappa == "auto" else self.kappa


def mean_regulariser(mean: Tensor, target: Tensor, kappa: float) -> Tensor:
    """Return kappa / 2 * mean over d of (mean - target)^2, for two vectors (d,)."""
    return kappa / 2 * (mean - target).square().mean()


class FedDBEClient(FedClient):
    """Trains the shared model with a private shift of its representations, whose mean is held near everybody's."""

    model: BiasModel
    target: Tensor | None = None

    @classmethod
    def build_model(cls, spec: ModelSpec, hparams: Any) -> SplitModel:
        """Build the zoo's model with a vector of zeros between representation and head."""
        from clients._models import BiasModel

        return BiasModel(super().build_model(spec, hparams), trained=hparams.memory)

    def receive(self, payload: Payload) -> None:
        """Take the model, and z-bar^g if there is one yet."""
        rest, own = names.split(payload, PREFIX)
        super().receive(rest)
        self.target = torch.from_numpy(own["mean"].copy()).to(self.device) if own else None

    def before_training(self, payload: Payload) -> None:
        """Begin the running mean at 0."""
        self.mean = torch.zeros(self.model.width, device=self.device)

    def phases(self) -> Sequence[Phase]:
        """Train everything; before there is a z-bar^g, all but the private vector."""
        return [Phase(self.step_loss, self.training, ALL if self.target is None else ("",))]

    def step_loss(self, batch: Batch) -> Tensor:
        """Return cross-entropy and, once there is a z-bar^g, the distance of the mean to it."""
        z = self.model.represent(batch.x)
        loss = self.cross_entropy(self.model.classify(z), batch.y)
        mu: float = self.hparams.mu
        self.mean = (1 - mu) * self.mean.detach() + mu * z.float().mean(dim=0)
        kappa: float = self.hparams.weight(self.model.width)
        if self.target is None or kappa == 0:
            return loss
        return loss + mean_regulariser(self.mean, self.target, kappa)

    def after_training(self, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Return `dbe/mean`, (d,) float32, in the round that has no z-bar^g yet."""
        if self.target is not None:
            return {}, {}
        split = self.hparams.mean == "split"
        mean = self.representations().double().mean(dim=0) if split else self.mean.detach()
        return {MEAN: mean.float().cpu().numpy()}, {}
