"""FedUV. Son, Kim, Chung, Huang, Liu, FedUV: Uniformity and Variance for Heterogeneous Federated Learning, CVPR 2024:
FedAvg's server; two terms in the local loss keep predictions and representations spread out.

Symbols    theta -> state["model"]     n_k -> reply.num_samples
Server:  theta = sum_{k in S_t} (n_k / sum_{j in S_t} n_j) theta_k.
Reduces to FedAvg, bit for bit, where lambda and mu are 0 (tested). The local step is in clients/feduv.py.
"""

from __future__ import annotations

import dataclasses

from clients.feduv import FedUVClient, FedUVHParams
from strategies.fedavg import METHOD as FEDAVG

METHOD = dataclasses.replace(
    FEDAVG, id="feduv", title="FedUV", paper="Son et al., CVPR 2024", client=FedUVClient, hparams=FedUVHParams
)
