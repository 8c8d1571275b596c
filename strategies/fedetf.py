"""FedETF. Li et al., No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with Synthetic and Fixed
Classifier, ICCV 2023: all clients train towards the corners of one simplex, which needs no training and no message.

Symbols    theta, Q, q, s -> state["model"]["features.*", "head.*", "scale"]     M -> computed from C at every client
Server:    FedAvg of theta, Q, q, s, weighted by n_k.
With `etf=false gamma=0` it is FedAvg bit for bit (tested).
"""

from __future__ import annotations

import dataclasses

from clients.fedetf import ETF, SCALE, FedETFClient, FedETFHParams, simplex
from fedapp.method import ALL, Arrays, ServerState
from strategies.base import Strategy
from strategies.fedavg import METHOD as FEDAVG


class FedETF(Strategy):
    """FedAvg's server."""

    def global_arrays(self, state: ServerState) -> Arrays | None:
        """Return the model with the simplex, so that it can be stored and used as it is."""
        arrays = super().global_arrays(state)
        if arrays is None or not self.hparams.etf:
            return arrays
        return {**arrays, ETF: simplex(len(arrays["head.bias"])).numpy()}


def _shared(hparams: FedETFHParams) -> tuple[str, ...]:
    return (*ALL, SCALE) if hparams.etf else ALL


METHOD = dataclasses.replace(
    FEDAVG, id="fedetf", title="FedETF", paper="Li et al., ICCV 2023", strategy=FedETF, client=FedETFClient,
    hparams=FedETFHParams, shared=_shared, head="shape", deploy_as="trained", linear=False,
    travels="body, projection and scale, both ways",
)  # fmt: skip
