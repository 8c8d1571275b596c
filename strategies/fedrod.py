"""FedRoD. Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022:
a generic head with a class-balanced loss, which is averaged, and a personal one that corrects it.

Symbols    theta, psi -> state["model"]     |D_m| -> reply.num_samples     S_t -> the clients that replied
Algorithm, server:  (theta, psi) <- sum_{m in S_t} (|D_m| / sum_{k in S_t} |D_k|) (theta_m, psi_m):  the base class.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from clients.fedrod import PERSONAL, FedRoDClient, FedRoDHParams
from fedapp.method import Arrays, ServerState
from strategies.base import Strategy
from strategies.fedavg import METHOD as FEDAVG


class FedRoD(Strategy):
    """FedAvg's server on the generic model."""

    def global_arrays(self, state: ServerState) -> Arrays | None:
        """Return the generic model with an empty personal head, so that it can be stored and used as it is."""
        arrays = super().global_arrays(state)
        if arrays is None:
            return None
        empty = {n.replace("head.", PERSONAL): np.zeros_like(a) for n, a in arrays.items() if n.startswith("head.")}
        return {**arrays, **empty}


METHOD = dataclasses.replace(
    FEDAVG, id="fedrod", title="FedRoD", paper="Chen and Chao, ICLR 2022", strategy=FedRoD, client=FedRoDClient,
    hparams=FedRoDHParams, head="names", deploy_as="trained", columns=("generic-loss", "personal-loss"),
)  # fmt: skip
