"""FedProx. Li et al., MLSys 2020: FedAvg's server with a proximal term in the local problem.

Reduces to FedAvg, bit for bit, where mu is 0 (tested).
"""

from __future__ import annotations

import dataclasses

from clients.fedprox import FedProxClient, FedProxHParams
from strategies.fedavg import METHOD as FEDAVG

METHOD = dataclasses.replace(
    FEDAVG, id="fedprox", title="FedProx", paper="Li et al., MLSys 2020", client=FedProxClient, hparams=FedProxHParams
)
