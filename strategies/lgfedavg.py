"""LG-FedAvg. Liang et al., Think Locally, Act Globally, 2020: private extractors, averaged heads.

Symbols    (W, b) -> state["model"]["head.*"]     n_k -> reply.num_samples
Server:  head = sum_{k in S_t} (n_k / sum_{j in S_t} n_j) head_k.
It starts from random extractors, as in FedGH's paper: different architectures cannot have a common warm start.
"""

from __future__ import annotations

from clients.base import FedClient
from fedapp.method import HEAD, Method
from strategies.base import FedStrategy


class LGFedAvg(FedStrategy):
    """The average of the clients' heads, weighted by n_k."""


METHOD = Method(
    id="lgfedavg",
    title="LG-FedAvg",
    paper="Liang et al., 2020",
    strategy=LGFedAvg,
    client=FedClient,
    shared=HEAD,
    heterogeneous=True,
    travels="the head, both ways",
)
