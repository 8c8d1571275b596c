"""Personal CCVR, client side: CCVR's head, adjusted to the class shares of each client.

| symbol        | here                                                                              |
|---------------|-----------------------------------------------------------------------------------|
| b             | bias of the head that arrives, calibrated for the shares q                        |
| p_kc          | `shares(n_k, s)`: (n_kc + s) / (n_k + s C), from the client's own training labels |
| tau           | `settings.tau`                                                                    |
| b_k           | b + tau (log p_k - log q), at the client alone                                    |

The adjustment is made where a model is scored and kept, and nowhere else: a client never trains for a reply from b_k.
So b_k - b, which would reveal its shares, cannot leave it, whatever a server asks for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from clients.ccvr import CCVRClient, CCVRHParams
from fedapp.core import names
from fedapp.lazy import Tensor, torch
from fedapp.learning.evaluation import Scores
from fedapp.method import Payload

if TYPE_CHECKING:
    from fedapp.models import SplitModel

PRIOR = "prior/"
"""Prefix of the payload's further arrays: N_c of all clients, where the settings need them."""
PERSONAL = "personal"
"""Scalar that says that the head is a calibrated one."""
PLAIN = "unadjusted"
"""Name of the score of the head before its adjustment."""
NUMBERS = tuple(f"{PLAIN}-{part}" for part in ("correct", "total", "loss-sum", "balanced"))


class PersonalHParams(CCVRHParams):
    """Hyperparameters of personal CCVR: CCVR's, and how the head is adjusted."""

    tau: float = Field(1.0, ge=0, description="strength of the adjustment; 0 = CCVR (no paper)")
    smooth: float = Field(1.0, gt=0, description="s, added to each class count (no paper)")
    shares: Literal["own", "pooled", "shifted"] = Field(
        "own",
        description="whose shares: the client's; controls: those of all clients together, or the client's own moved on "
        "by one class",
    )

    @model_validator(mode="after")
    def _has_a_bias(self) -> PersonalHParams:
        if self.clsnorm:
            raise ValueError("clsnorm=true has no bias that could be adjusted: leave it out")
        return self


def shares(counts: npt.NDArray[Any], smooth: float) -> npt.NDArray[np.float64]:
    """Return (n_c + s) / (n + s C) of class counts (C,)."""
    found: npt.NDArray[np.float64] = (counts + smooth) / (counts.sum() + smooth * len(counts))
    return found


class PersonalCCVRClient(CCVRClient):
    """CCVR's client, which adjusts the bias of a calibrated head before it is scored."""

    settings: ClassVar[PersonalHParams] = PersonalHParams()
    alone = True  # `score` adds a second score to that of the stored model
    plain: Tensor | None = None
    """b, where the model has b_k."""
    adjusted: SplitModel | None = None
    """The model with b_k; a copy of it that is fine-tuned is another one."""

    def receive(self, payload: Payload) -> None:
        """Take over the model, and adjust its bias if nothing of it leaves the client again."""
        model, prior = names.split(payload, PRIOR)
        super().receive(model)
        if self.scoring and payload.scalars.get(PERSONAL):
            bias = self.model.head.bias
            self.plain, self.adjusted = bias.detach().clone(), self.model
            with torch.no_grad():
                bias.add_(torch.from_numpy(self.adjustment(prior.get("counts"))).to(bias))

    def adjustment(self, total: npt.NDArray[Any] | None) -> npt.NDArray[np.float64]:
        """Return tau (log p_k - log q), (C,).

        Parameters
        ----------
        total : N_c of all clients, (C,). q are their shares where the head was calibrated for these, else equal ones.
        """
        s, own = self.settings, self.task.class_counts()
        if s.shares == "pooled" and total is not None:
            own = total
        log_p = np.log(shares(np.roll(own, 1) if s.shares == "shifted" else own, s.smooth))
        log_q = np.full(len(own), -np.log(len(own)))
        if s.mc_mode == "proportional" and total is not None:
            log_q = np.log(shares(total, s.smooth))
        adjusted: npt.NDArray[np.float64] = s.tau * (log_p - log_q)
        return adjusted

    def before_training(self, payload: Payload) -> None:
        """Forget b: once the model is trained it is not the one that arrived."""
        super().before_training(payload)
        self.plain = None

    def score(self, x: Tensor, y: Tensor, probabilities: bool = False) -> Scores:
        """Score the adjusted model and, in an evaluation, the one that arrived."""
        scores = super().score(x, y, probabilities)
        if self.plain is None or self.newcomer or self.model is not self.adjusted:
            return scores
        bias = self.model.head.bias
        adjusted = bias.detach().clone()
        with torch.no_grad():
            bias.copy_(self.plain)
            plain = super().score(x, y)
            bias.copy_(adjusted)
        return replace(scores, further={PLAIN: plain})
