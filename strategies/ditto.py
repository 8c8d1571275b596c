"""Ditto. Li, Hu, Beirami, Smith, Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021: FedAvg
runs as usual, and each client also trains a personal model that is pulled towards the global one.

Symbols    w -> state["model"]     n_k -> reply.num_samples     S_t -> the clients that replied
Algorithm 1, server:  w^{t+1} <- sum_{k in S_t} (n_k / sum_{j in S_t} n_j) w_k:  what the base class does.
"""

from __future__ import annotations

import dataclasses

from clients.ditto import DittoClient, DittoHParams
from strategies.fedavg import METHOD as FEDAVG

METHOD = dataclasses.replace(
    FEDAVG, id="ditto", title="Ditto", paper="Li et al., ICML 2021", client=DittoClient, hparams=DittoHParams,
    deploy_as="trained",
)  # fmt: skip
