"""FedETF. Li et al., No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with Synthetic and Fixed
Classifier, ICCV 2023: all clients train towards the corners of one simplex, which needs no training and no message.

Symbols    theta, Q, q, s -> state["model"]["features.*", "head.*", "scale"]     M -> computed from C at every client
Server:    FedAvg of theta, Q, q, s, weighted by n_k.
With `etf=false gamma=0` it is FedAvg bit for bit (tested).
"""

from __future__ import annotations

import dataclasses

from clients.fedetf import SCALE, FedETFClient, FedETFHParams
from fedapp.method import ALL
from strategies.fedavg import METHOD as FEDAVG


def _shared(hparams: FedETFHParams) -> tuple[str, ...]:
    return (*ALL, SCALE) if hparams.etf else ALL


METHOD = dataclasses.replace(
    FEDAVG, id="fedetf", title="FedETF", paper="Li et al., ICCV 2023", client=FedETFClient, hparams=FedETFHParams,
    shared=_shared, head="shape", deploy_as="trained", linear=False, travels="body, projection and scale, both ways",
)  # fmt: skip
