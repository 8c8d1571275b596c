"""FedPer. Arivazhagan, Aggarwal, Singh, Choudhary, Federated Learning with Personalization Layers, 2019: a shared body
under private last layers, trained together.

Symbols    W_B -> state["model"]     n_j -> reply.num_samples     S_t -> the clients that replied
Algorithm 1, server:  W_B <- sum_{j in S_t} (n_j / sum_{i in S_t} n_i) W_Bj:  what the base class does.
"""

from __future__ import annotations

from clients.fedper import FedPerHParams, PrivateClient
from fedapp.method import Method
from strategies.fedavg import FedAvg

METHOD = Method(
    id="fedper",
    title="FedPer",
    paper="Arivazhagan et al., 2019",
    strategy=FedAvg,
    client=PrivateClient,
    hparams=FedPerHParams,
    shared=lambda hparams: hparams.prefixes,
    head="names",
    travels="the body, both ways",
)
