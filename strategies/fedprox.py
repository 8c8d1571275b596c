"""FedProx. Li et al., MLSys 2020: FedAvg's server with a proximal term in the local problem.

Reduces to FedAvg, bit for bit, where mu is 0 (tested).
"""

from __future__ import annotations

from clients.fedprox import FedProxClient, FedProxHParams
from fedapp.method import Method
from strategies.fedavg import FedAvg

METHOD = Method(
    id="fedprox",
    title="FedProx",
    paper="Li et al., MLSys 2020",
    strategy=FedAvg,
    client=FedProxClient,
    hparams=FedProxHParams,
    head="none",
    global_model=True,
    deploy_as="received",
)
