"""FedAvg. McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.

Symbols    w -> state["model"]     n_k -> reply.num_samples     S_t -> the clients that replied
Algorithm 1, server:  w^{t+1} = sum_{k in S_t} (n_k / sum_{j in S_t} n_j) w_k^{t+1}.
"""

from __future__ import annotations

from clients.base import FedClient
from fedapp.method import Method
from strategies.base import Strategy


class FedAvg(Strategy):
    """The average of the clients' whole models, weighted by n_k: what the base class does."""


METHOD = Method(
    id="fedavg",
    title="FedAvg",
    paper="McMahan et al., AISTATS 2017",
    strategy=FedAvg,
    client=FedClient,
    head="none",
    global_model=True,
    deploy_as="received",
)
