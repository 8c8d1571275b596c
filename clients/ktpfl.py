"""KT-pFL, local step. Zhang et al., Parameterized Knowledge Transfer for Personalized Federated Learning, NeurIPS 2021.

| symbol (paper)     | here                                                                          |
|--------------------|-------------------------------------------------------------------------------|
| D_r                | `self.public`, (P, H, W, C) uint8: images that all clients have, without labels |
| s(w_k, x)          | `soften(model(x), T)`; `soft` in the reply, (P, C), in the order of D_r       |
| sum_l c_kl s(w_l)  | `self.target`, (P, C), this client's own mixture; no rows in round 1          |
| T                  | `hparams.temperature`                                                         |

Algorithm 1, client k, every round:  1. distil: `distil_epochs` passes over D_r towards the target;  2. train on the own
images;  3. predict D_r. Distillation and prediction see the same images in the same order with the same preprocessing.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from clients.base import FedClient
from fedapp.core.distillation import divergence_to, soften
from fedapp.core.names import RUNNING_STATISTICS
from fedapp.errors import BadRequest
from fedapp.lazy import F, Tensor, nn, torch
from fedapp.learning.evaluation import batched
from fedapp.learning.training import Batch, Phase
from fedapp.method import Arrays, BaseHParams, Payload, Scalar
from fedapp.models import selection


class KTpFLHParams(BaseHParams):
    """Hyperparameters of KT-pFL; `step`, `lr_c`, `rho` and `coefficients` belong to the server's matrix.

    "Released code" is that of KT-pFL's authors, "port" the one that FedClassAvg's authors compared with.
    """

    step: Literal["self-scaled", "fixed"] = Field(
        "self-scaled",
        description="step of the coefficients: each row's gradient scaled by a power of 5 so that its mean size is "
        "0.01 to 0.05 (released code), or times lr_c (port)",
    )
    lr_c: float = Field(
        0.02, ge=0, description="size of a fixed step; self-scaled ones need none (port: 0.02; 0.01 on grey images)"
    )
    rho: float = Field(
        0.7, ge=0, description="weight that holds the coefficients at 1/K (released code: 0.7; port: also 0.6 on grey)"
    )
    coefficients: Literal["softmax", "rows", "free"] = Field(
        "softmax",
        description="after a step: softmax(5 c) (released code), rows divided by their sums, or left free (port); in "
        "the last two, negative ones become 0",
    )
    temperature: float = Field(10.0, gt=0, description="T of predictions and distillation (released code, port: 10)")
    distil: Literal["kl", "mse"] = Field(
        "kl",
        description="kl = divergence from the target at temperature T (released code); mse = squared error of the "
        "plain softmax (port)",
    )
    scale: bool = Field(
        True,
        description="multiply the divergence by T^2, so that its gradient does not shrink with T (released code: no)",
    )
    distil_epochs: int = Field(
        1, ge=0, description="passes over the public set per round (released code, port: 1); 0 switches it off"
    )
    public_batch: int = Field(
        0, ge=0, description="rows per distillation step (released code, port: 256); 0 = batch-size"
    )
    epochs: Literal["fixed", "growing"] = Field(
        "fixed", description="local epochs: local-epochs, or min(round, 20) (port; released code: mostly up to 10)"
    )
    freeze_bn: bool = Field(False, description="keep BatchNorm statistics as they are while distilling")
    ship: Literal["indices", "images"] = Field(
        "indices",
        description="what `public_bytes` counts: the list of indices, or the rows themselves (FedClassAvg's paper)",
    )
    share: Literal["predictions", "weights"] = Field(
        "predictions",
        description="the mixed arrays: predictions of public rows, or, for one architecture, the clients' weights "
        "('KT-pFL +weight', FedClassAvg's Table 3), which needs no public images",
    )


def distillation_loss(logits: Tensor, target: Tensor, hparams: KTpFLHParams) -> Tensor:
    """Return the loss of a student's logits (B, C) against its target (B, C), whose rows need not sum to 1."""
    if hparams.distil == "mse":
        return F.mse_loss(soften(logits), target)
    t = hparams.temperature
    # With free coefficients the rows of the target do not sum to 1, but their sums are positive.
    loss = divergence_to(target / target.sum(dim=1, keepdim=True), logits, t)
    return loss * t**2 if hparams.scale else loss


class KTpFLClient(FedClient):
    """Distils its own mixture of predictions, trains on its own images, predicts the public set."""

    target: Tensor | None = None

    @property
    def public(self) -> Tensor:
        """The public images (P, H, W, C) uint8."""
        images = self.task.extras.get("public")
        if images is None:
            raise BadRequest(
                "ktpfl needs a public set: give public-data a share such as 0.05, or the name of a data set"
            )
        public: Tensor = images
        return public

    def receive(self, payload: Payload) -> None:
        """Take the target; the model stays the client's own."""
        target = payload.all()["target"].astype(np.float32)
        if len(target) not in (0, len(self.public)):
            raise BadRequest(f"the server mixes {len(target)} public rows, this client has {len(self.public)}")
        self.target = torch.from_numpy(target).to(self.device)

    def phases(self) -> Sequence[Phase]:
        """Distil if there is a target, then train; a newcomer's epochs do not grow."""
        own = self.training
        if self.hparams.epochs == "growing" and not self.newcomer:
            own = own.replaced(local_epochs=min(max(self.round, 1), 20))
        return [*self.distillation(), Phase(self.step_loss, own)]

    def distillation(self) -> Sequence[Phase]:
        """Move the model towards the target: `distil_epochs` passes over the public images."""
        epochs = self.hparams.distil_epochs
        # No target exists at registration. A frozen BatchNorm accepts single images, so the check skips this phase.
        if not epochs or (self.hparams.freeze_bn if self.target is None else not len(self.target)):
            return []
        public = self.public
        size = self.hparams.public_batch or self.task.train.batch_size
        spec = self.training.replaced(local_epochs=epochs, batch_size=size, augment="none")
        no_labels = torch.zeros(len(public), dtype=torch.int64, device=self.device)
        return [Phase(self.distil_step, spec, draws="public", rows=(public, no_labels))]

    def distil_step(self, batch: Batch) -> Tensor:
        """Return the distillation loss of a batch of public images."""
        if self.hparams.freeze_bn:
            for module in self.model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()  # in every step: the training loop puts the whole model into training mode first
        assert self.target is not None
        return distillation_loss(self.model(batch.x), self.target[batch.index], self.hparams)

    def after_training(self, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Return `soft` (P, C), predictions on the public set in its own order, and the checksum of its images."""
        self.model.eval()
        t = self.hparams.temperature
        soft = batched(lambda x: soften(self.model(x), t), self.public, self.task.inputs)
        return {"soft": soft.cpu().numpy()}, {"public-checksum": self.common_facts()["public-checksum"]}

    def common_facts(self) -> dict[str, Scalar]:
        """Return checksum and number of the public images."""
        images = self.public.cpu().numpy()
        return {
            "public-checksum": zlib.crc32(images.tobytes()),
            "public-images": len(images),
            "public-size": images.nbytes,
        }


class KTpFLWeightsClient(KTpFLClient):
    """'+weight': moves towards its own mixture of all clients' weights instead of distilling, then trains.

    The mixture travels as one vector, `target` (D,), of the shared arrays in state-dict order, without statistics.
    """

    def receive(self, payload: Payload) -> None:
        """Take the mixture, empty in round 1; the model, from which the round starts, stays the client's own."""
        self.target = torch.from_numpy(payload.all()["target"].astype(np.float32)).to(self.device)
        self.reference = selection.extract(self.model, self.up_names())

    def distillation(self) -> Sequence[Phase]:
        """Return nothing: the model has moved before."""
        return []

    def before_training(self, payload: Payload) -> None:
        """Take `distil_epochs` gradient steps on ||w - t||^2 with the round's learning rate; statistics stay."""
        if self.target is None or not len(self.target):
            return
        state = self.model.state_dict()
        names = [name for name in self.up_names() if not name.endswith(RUNNING_STATISTICS)]
        mixed = dict(zip(names, torch.split(self.target, [state[n].numel() for n in names]), strict=True))
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                for _ in range(self.hparams.distil_epochs):
                    p.sub_(self.rate * 2 * (p - mixed[name].view_as(p)))

    def after_training(self, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Return nothing but the model."""
        return {}, {}

    def common_facts(self) -> dict[str, Scalar]:
        """Return no facts: nothing is public."""
        return {}
