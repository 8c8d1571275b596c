"""FedPAC, local step. Xu, Tong, Huang, Personalized Federated Learning with Feature Alignment and Classifier
Collaboration, ICLR 2023.

| symbol (paper)     | here                                                                                |
|--------------------|-------------------------------------------------------------------------------------|
| h = f(theta; x)    | `model.represent(x)`, (B, d)                                                        |
| phi_i              | `model.head`: as the server combined it for this client                             |
| c_c                | `self.target[c]`: the global class mean, or the own one where no client has sent it    |
| mu                 | `hparams.lam`                                                                       |
| h_i, V_i           | `pac/h` (C, d), `pac/v` (1,): what the server combines heads by                     |

Client i in a round:
    1. with the body as received, over the training split in evaluation mode, p_c = n_ic / n_i:
       h_ic = p_c mu_ic,   V_i = [ sum_c p_c mean||h||^2_c - sum_c p_c^2 ||mu_ic||^2 ] / n_i
    2. head phase: CE over phi, the body frozen
    3. body phase: CE + mu * mean over batch and features of (h - c_y)^2 over theta, the head frozen
    4. `pac/proto` (C, d), the class means with the new body, and `pac/count` (C,)
As long as no class mean is known, in round 1, step 3 is plain CE. The mean over features gives the squared distance the
weight mu / d. The released code has mu = 1 with d = 128; mu = d / 128 is that weight at any width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from clients.base import FedClient
from clients.fedrep import BODY
from fedapp.core import names
from fedapp.core.collaboration import ClassStatistics, class_statistics, collaboration_statistics
from fedapp.lazy import F, Tensor, torch
from fedapp.learning.training import Batch, Phase
from fedapp.method import HEAD, Arrays, BaseHParams, Payload

PAC = "pac/"
"""Prefix of all arrays besides the model, in both directions: `h`, `v`, `proto`, `count`, `known`."""


class FedPACHParams(BaseHParams):
    """Hyperparameters of FedPAC."""

    lam: Literal["auto"] | Annotated[float, Field(ge=0)] = Field(
        "auto",
        description="weight of the pull to the global class means; auto = d / 128 for width d (released code: 1, d = "
        "128)",
    )
    head_epochs: int = Field(1, ge=0, description="passes for the head, before local-epochs for the body (paper: 1)")
    head_rate: float = Field(
        1.0,
        gt=0,
        description="learning rate of the head's phase, as a multiple of the run's (released code: 10, with momentum "
        "0.5)",
    )
    combine: Literal["weighted", "own"] = Field(
        "weighted", description="head for the next round: the best combination of the participants', or the own one"
    )

    def weight(self, width: int) -> float:
        """Return mu for representations of a width."""
        return width / 128 if self.lam == "auto" else self.lam


class FedPACClient(FedClient):
    """Trains the head on the received body, then the body towards the global class means."""

    global_means: Tensor
    known: Tensor
    target: Tensor
    pulled: bool
    before: Arrays

    def receive(self, payload: Payload) -> None:
        """Take the model, and set the global class means aside."""
        rest, found = names.split(payload, PAC)
        super().receive(rest)
        self.global_means = torch.from_numpy(found["proto"].astype(np.float32)).to(self.device)
        self.known = torch.from_numpy(found["known"]).to(self.device).bool()

    def class_statistics(self) -> ClassStatistics:
        """Return the moments of the training split with the present body."""
        return class_statistics(self.representations(), self.task.y_train, self.task.num_classes)

    def before_training(self, payload: Payload) -> None:
        """Compute h_i and V_i with the body as received, and what representations are pulled to."""
        found = self.class_statistics()
        h, v = collaboration_statistics(found)
        self.before = {"h": h.float().cpu().numpy(), "v": torch.tensor([v]).numpy()}
        self.target = torch.where(self.known[:, None], self.global_means, found.means.float())
        self.lam: float = self.hparams.weight(self.model.width)
        self.pulled = self.lam > 0 and bool(self.known.any())  # asked here: in each step a GPU would wait

    def phases(self) -> Sequence[Phase]:
        """Return both phases; a newcomer trains its head alone, as in FedRep."""
        spec, rate = self.training, self.hparams.head_rate
        head, faster = spec.replaced(local_epochs=self.hparams.head_epochs, lr=rate * spec.lr), rate * self.rate
        if self.newcomer:
            return [Phase(super().step_loss, head.replaced(local_epochs=spec.local_epochs), HEAD, rate=faster)]
        body = Phase(self.step_loss, spec, BODY, "batches.body")
        return [Phase(super().step_loss, head, HEAD, rate=faster), body]

    def step_loss(self, batch: Batch) -> Tensor:
        """Return the body's loss, CE + mu * mean (h - c_y)^2; FedRep's where mu is 0 or no class mean is known."""
        if not self.pulled:
            return super().step_loss(batch)
        z = self.model.represent(batch.x)
        pull = F.mse_loss(z, self.target[batch.y])
        return self.cross_entropy(self.model.classify(z), batch.y) + self.lam * pull

    def after_training(self, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Return what the server combines heads by, and the class means with the new body."""
        found = self.class_statistics()
        after = {"proto": found.means.float().cpu().numpy(), "count": found.counts.int().cpu().numpy()}
        return names.prefixed(PAC, {**self.before, **after}), {}
