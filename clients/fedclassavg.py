"""FedClassAvg, local step. Jang, Ha, Jung, Yoon, FedClassAvg, ICPP 2022.

| symbol (paper)    | here                                                                   |
|-------------------|------------------------------------------------------------------------|
| F_k(x)            | `model.features(x)`, (B, d), before the head's ReLU                    |
| C_k = (W, b)      | `model.head`                                                           |
| C^t               | `self.received_head`, the head as received                             |
| x', x''           | `batch.views`, two independent augmentations                           |
| rho               | `hparams.rho`                                                          |
| T, T_b            | `temperature`, `base_temperature`                                      |

Eq. 4, local loss:     L = L_CL(F_k(x'), F_k(x'')) + L_CE(C_k(F_k(x')), y) + rho * L_R
Eq. 5, proximal term:  L_R = ||C_k - C^t||_2, not squared.
The paper gives neither a temperature nor a normalisation for L_CL. The released code uses T = 100, T_b = 0.07 on raw
features, which diverges under SGD. `preset` chooses; the default normalises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from pydantic import Field

from clients.base import FedClient
from fedapp.core.contrastive import l2_distance, mse_half, supcon
from fedapp.lazy import Tensor, torch
from fedapp.learning.training import BETAS, Batch, Phase
from fedapp.method import BaseHParams, Payload


class Preset(NamedTuple):
    """One choice for everything that the paper leaves open."""

    temperature: float
    base_temperature: float
    normalise: bool
    proximal: Literal["l2", "mse_half"]
    warmup_epochs: int


PRESETS = {
    "khosla": Preset(0.07, 0.07, True, "l2", 0),
    "paper": Preset(100.0, 0.07, False, "l2", 0),
    "authors": Preset(100.0, 0.07, False, "mse_half", 1),
}


class FedClassAvgHParams(BaseHParams):
    """Hyperparameters of FedClassAvg."""

    preset: Literal["khosla", "paper", "authors"] = Field(
        "khosla",
        description="what the paper leaves open: khosla = normalised features, T = 0.07; paper = Eq. 5 with the "
        "released code's T = 100 on raw features; authors = the released code throughout",
    )
    rho: float = Field(0.1, ge=0, description="weight of the proximal term on the head (paper: 0.1, 0.4662, 0.1)")
    contrastive: float = Field(1.0, ge=0, description="weight of the contrastive term (paper: 1); 0 switches it off")
    share: Literal["head", "all", "none"] = Field(
        "head",
        description="the averaged part: the head, the whole model ('+weight', Table 3), or nothing (control: the same "
        "loss, but each client gets back its own head)",
    )
    temperature: float | None = Field(None, gt=0, description="T, instead of the preset's")
    base_temperature: float | None = Field(None, gt=0, description="T_b, instead of the preset's")
    normalise: bool | None = Field(None, description="L2-normalise features in the contrastive term, or the preset's")
    proximal: Literal["l2", "mse_half"] | None = Field(None, description="form of the proximal term, or the preset's")
    warmup_epochs: int | None = Field(
        None,
        ge=0,
        description="local epochs before a client's first round, its head discarded, or the preset's (authors: 1); "
        "none where share=all hands out the whole model",
    )
    beta1: float = Field(
        0.5, ge=0, lt=1, description="first moment decay where the optimizer has two, as Adam (released code: 0.5)"
    )

    @property
    def chosen(self) -> Preset:
        """The preset with the values that were given instead."""
        given = {f: getattr(self, f) for f in Preset._fields if getattr(self, f) is not None}
        return PRESETS[self.preset]._replace(**given)


class FedClassAvgClient(FedClient):
    """Trains body and head on cross-entropy, supervised contrastive and proximal terms."""

    received_head: list[Tensor]

    def receive(self, payload: Payload) -> None:
        """Warm up the body before the client's first round if asked to, then take the received arrays.

        Its random numbers and learning rate are those of round 1, whenever it runs: a client that is scored before it
        first trains must get the same body. A client that receives the whole model skips the warm-up, because that
        model would replace its result.
        """
        epochs = self.hparams.chosen.warmup_epochs
        if epochs and self.begins and self.store is not None:  # without a store every round would be the first one
            # The proximal term of the warm-up refers to the client's own initial head: none has been received yet.
            self.received_head = self.snapshot("head.")
            now, self.round = self.round, 1
            (phase,) = self.phases()
            self.run_phase(replace(phase, spec=self.training.replaced(local_epochs=epochs), draws="warm-up"))
            self.round = now
        super().receive(payload)

    def before_training(self, payload: Payload) -> None:
        """Keep C^t."""
        self.received_head = self.snapshot("head.")

    def step_loss(self, batch: Batch) -> Tensor:
        """Return L of one batch (Eq. 4)."""
        hparams, chosen = self.hparams, self.hparams.chosen
        two = self.num_views == 2
        # (2B, d), all x', then all x'': in one pass, so that BatchNorm sees both views together.
        f = self.model.features(torch.cat(batch.views) if two else batch.x)
        # Eq. 4, L_CE: of the first view alone.
        loss = self.cross_entropy(self.model.classify(self.model.activation(f[: len(batch.y)])), batch.y)
        if two:
            # Eq. 4, L_CL: of both views, on features before the ReLU, which would leave no negative coordinate.
            contrast = supcon(f, batch.y, chosen.temperature, chosen.base_temperature, chosen.normalise)
            loss = loss + hparams.contrastive * contrast
        if hparams.rho > 0:
            # Eq. 5, L_R: weight and bias as one vector.
            distance = l2_distance if chosen.proximal == "l2" else mse_half
            loss = loss + hparams.rho * distance(list(self.model.head.parameters()), self.received_head)
        return loss

    def phases(self) -> Sequence[Phase]:
        """Return the training on two views, with the released code's Adam."""
        return [Phase(self.step_loss, self.training, views=self.num_views, betas=(self.hparams.beta1, BETAS[1]))]

    @property
    def num_views(self) -> int:
        """Views of a batch: one without a contrastive term, or where no body is trained, which alone it moves."""
        two = self.hparams.contrastive > 0 and any(p.requires_grad for p in self.model.features.parameters())
        return 2 if two else 1
