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

from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from clients.ccvr import CCVRClient, CCVRHParams
from fedapp.core import names
from fedapp.lazy import Tensor, torch
from fedapp.method import Payload

PRIOR = "prior/"
"""Prefix of what is sent beside the model: N_c of all clients, where the settings need them."""
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
    stays = False
    """Whether nothing of what follows leaves the client but scores."""
    plain: Tensor | None = None
    """b, where the model has b_k."""

    def receive(self, payload: Payload) -> None:
        """Take over the model, and adjust its bias if nothing of it leaves the client again."""
        model, prior = names.split(payload, PRIOR)
        super().receive(model)
        if self.stays and payload.scalars.get(PERSONAL):
            bias = self.model.head.bias
            self.plain = bias.detach().clone()
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

    def evaluate_round(
        self, payload: Payload, server_round: int, *, balanced: bool = True, train: bool = False
    ) -> dict[str, Any]:
        """Score the adjusted model, and beside it the one that arrived."""
        self.stays = True
        metrics = super().evaluate_round(payload, server_round, balanced=balanced, train=train)
        if self.plain is not None:
            bias = self.model.head.bias
            adjusted = bias.detach().clone()
            with torch.no_grad():
                bias.copy_(self.plain)
                metrics |= {n: v for n, v in self.measure(PLAIN, balanced).items() if n in NUMBERS}
                bias.copy_(adjusted)
        return metrics

    def meet(self, payload: Payload, server_round: int, protocol: str, epochs: int) -> dict[str, Any]:
        """Score a newcomer on the model that it adjusts to its own shares."""
        self.stays = True
        return super().meet(payload, server_round, protocol, epochs)
