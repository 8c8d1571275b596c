"""FedKD, local step. Wu et al., Communication-efficient federated learning via knowledge distillation, Nature
Communications 2022.

| symbol (paper)      | here                                                                            |
|---------------------|---------------------------------------------------------------------------------|
| mentor (Theta^t)    | `self.model`, private; predictions p_l, representation H_l (B, r_l)             |
| mentee (Theta^s)    | `self.small`, shared; predictions p_m, representation H_m (B, r_m)              |
| W_h                 | `self.hidden_map`, (r_l, r_m), private                                          |
| U Sigma V of g      | `small/<name>/u`, `/s`, `/v`: the mentee's update, cut at the share `energy`    |
| T(t)                | `payload.scalars["energy"]`                                                     |

Per batch, with D = CE(z_l, y) + CE(z_m, y) and L_H = mean (H_l - H_m W_h^T)^2:
    mentor:  CE(z_l, y) + (KL(p_m || p_l) + L_H) / D
    mentee:  CE(z_m, y) + (KL(p_l || p_m) + L_H) / D
The worse both predict, the less they teach. D is at least `floor`: without it D goes to zero with the training loss,
and the step grows without bound. D and the other model's predictions are constants; L_H moves both models and W_h.
Mentors never leave; a client sends the mentee's change since it was received.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from pydantic import Field

from clients.mutual import Loss, MutualClient, MutualHParams, prefixed, small_arrays, stripped
from fedapp.core.distillation import Reduction, divergence
from fedapp.core.lowrank import compress, rebuild
from fedapp.lazy import F, Tensor, nn, torch
from fedapp.learning.training import Batch
from fedapp.method import Arrays, Payload


class FedKDHParams(MutualHParams):
    """Hyperparameters of FedKD."""

    energy_start: float = Field(0.95, gt=0, le=1, description="share of an update's energy kept at first (paper: 0.95)")
    energy_end: float = Field(0.98, gt=0, le=1, description="share kept at the end (paper: 0.98)")
    energy_rounds: int = Field(20, ge=1, description="rounds over which the share rises (paper: all rounds of the run)")
    distil: float = Field(1.0, ge=0, description="weight of the terms divided by D (paper: 1); 0 = labels alone")
    floor: float = Field(
        1.0,
        ge=0,
        description="smallest D: bad predictions weaken the teaching, good ones do not multiply it (paper: 0)",
    )
    divergence: Reduction = Field(
        "batch", description="divergence averaged over the batch, or over batch and classes (authors' code)"
    )
    average: Literal["plain", "samples"] = Field(
        "plain", description="mean of the updates: plain (authors' code), or weighted by samples"
    )


def mentor_mentee_losses(
    z_l: Tensor,
    z_m: Tensor,
    h_l: Tensor,
    h_m: Tensor,
    hidden_map: Tensor,
    y: Tensor,
    hparams: FedKDHParams,
    cross_entropy: Loss | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the losses of mentor and mentee on one batch.

    Parameters
    ----------
    z_l, z_m : (B, C) logits.   h_l, h_m : (B, r_l) and (B, r_m) representations.   hidden_map : (r_l, r_m) W_h.
    cross_entropy : CE, of logits and labels; None = PyTorch's.
    """
    cross_entropy = cross_entropy or F.cross_entropy
    mentor, mentee = cross_entropy(z_l, y), cross_entropy(z_m, y)
    if hparams.distil == 0:
        return mentor, mentee
    # 1 / D is a weight: without detach, losses could fall by making D larger.
    weight = hparams.distil / (mentor + mentee).detach().clamp_min(max(hparams.floor, 1e-6))
    hidden = F.mse_loss(h_m @ hidden_map.T, h_l)  # L_H, with gradients for both models and W_h
    to_mentor = divergence(z_m, z_l, reduction=hparams.divergence)
    to_mentee = divergence(z_l, z_m, reduction=hparams.divergence)
    return mentor + weight * (to_mentor + hidden), mentee + weight * (to_mentee + hidden)


class FedKDClient(MutualClient):
    """Trains mentor and mentee together and sends the mentee's compressed update."""

    hidden_map: nn.Parameter

    def received_small(self, payload: Payload) -> Arrays:
        """Return the mentee as the server holds it: sent whole, or the stored one plus the mean update."""
        version, parts = int(payload.scalars["version"]), stripped(payload.all())
        if not bool(payload.scalars["whole"]):
            held = int(self.own["version"]) if "version" in self.own else None
            if held == version:  # of a round that did not count: the server sends the same update again
                return self.base()
            if held != version - 1:
                raise ValueError(f"the server sent the mentee's update {version}, but this client holds version {held}")
            base = self.base()
            update = rebuild(parts, {name: array.shape for name, array in base.items()})
            parts = {name: array + update[name] for name, array in base.items()}
        self.own["version"] = np.array(version)
        self.own.update({f"base/{name}": array for name, array in parts.items()})
        return parts

    def base(self) -> Arrays:
        """Return the mentee as received last, by wire name."""
        return {n.removeprefix("base/"): a for n, a in self.own.items() if n.startswith("base/")}

    def before_training(self, payload: Payload) -> None:
        """Take W_h from the private state, or draw it as a linear layer's weights are drawn."""
        if "hidden_map" not in self.own:
            bound = 1 / math.sqrt(self.small.width)
            drawn = torch.rand(self.model.width, self.small.width, generator=self.generator("hidden map"))
            self.own["hidden_map"] = ((2 * drawn - 1) * bound).numpy()
        # `from_numpy` shares memory, and the private state must stay as it is until the round is over.
        self.hidden_map = nn.Parameter(torch.from_numpy(self.own["hidden_map"]).clone().to(self.device))

    def groups(self) -> list[dict[str, Any]]:
        """Return both models and W_h, each clipped by itself."""
        return [*super().groups(), {"params": [self.hidden_map]}]

    def step_loss(self, batch: Batch) -> Tensor:
        """Return the sum of both losses."""
        h_l, h_m = self.model.represent(batch.x), self.small.represent(batch.x)
        z_l, z_m = self.model.classify(h_l), self.small.classify(h_m)
        mentor, mentee = mentor_mentee_losses(
            z_l, z_m, h_l, h_m, self.hidden_map, batch.y, self.hparams, self.cross_entropy
        )
        return mentor + mentee

    def after_training(self, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Return the mentee's update under `small/`, compressed, and the version of the mentee; keep W_h."""
        self.own["hidden_map"] = self.hidden_map.detach().cpu().numpy().copy()
        base = self.base()
        update = {name: array - base[name] for name, array in small_arrays(self.small).items()}
        return prefixed(compress(update, float(payload.scalars["energy"]))), {"version": int(self.own["version"])}
