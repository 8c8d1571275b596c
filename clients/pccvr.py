"""Personal CCVR, client side: CCVR's head, adjusted to the class shares of each client (`clients/shares.py`).

| symbol        | here                                                                              |
|---------------|-----------------------------------------------------------------------------------|
| b             | bias of the head that arrives, calibrated for the shares q                        |
| p_kc          | `shares(n_k, s)`, from the client's own training labels                           |
| tau           | `settings.tau`                                                                    |
| b_k           | b + tau (log p_k - log q), at the client alone                                    |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from clients.ccvr import CCVRClient, CCVRHParams
from clients.shares import Float64, SharesClient, shares
from fedapp.method import Arrays, Scalar


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


class PersonalCCVRClient(SharesClient, CCVRClient):
    """CCVR's client, which adjusts the bias of a calibrated head before it is scored."""

    settings: ClassVar[PersonalHParams] = PersonalHParams()

    def adjustment(self, prior: Arrays, scalars: Mapping[str, Scalar]) -> Float64:
        """Return tau (log p_k - log q), (C,).

        Parameters
        ----------
        prior : `counts` are N_c of all clients, (C,). q are their shares where the head was calibrated for these, else
            equal ones.
        """
        s, own, total = self.settings, self.task.class_counts(), prior.get("counts")
        if s.shares == "pooled" and total is not None:
            own = total
        log_p = np.log(shares(np.roll(own, 1) if s.shares == "shifted" else own, s.smooth))
        log_q = np.full(len(own), -np.log(len(own)))
        if s.mc_mode == "proportional" and total is not None:
            log_q = np.log(shares(total, s.smooth))
        adjusted: Float64 = s.tau * (log_p - log_q)
        return adjusted
