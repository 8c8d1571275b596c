"""FedPer. Arivazhagan, Aggarwal, Singh, Choudhary, Federated Learning with Personalization Layers, 2019: a shared body
under private last layers, trained together.

Symbols    W_B -> state["model"]     n_j -> reply.num_samples     S_t -> the clients that replied
Algorithm 1, server:  W_B <- sum_{j in S_t} (n_j / sum_{i in S_t} n_i) W_Bj:  what the base class does.
"""

from __future__ import annotations

from clients.fedper import FedPerHParams, PrivateClient
from fedapp.method import Method
from strategies.base import Strategy


class FedPer(Strategy):
    """The average of the clients' bodies, weighted by n_j: what the base class does with the arrays that travel."""


def _shared(hparams: FedPerHParams) -> tuple[str, ...]:
    return hparams.prefixes


METHOD = Method(
    id="fedper",
    title="FedPer",
    paper="Arivazhagan et al., 2019",
    strategy=FedPer,
    client=PrivateClient,
    hparams=FedPerHParams,
    shared=_shared,
    head="names",
    travels="the body, both ways",
)
