"""FedRep. Collins, Hassani, Mokhtari, Shakkottai, Exploiting Shared Representations for Personalized Federated
Learning, ICML 2021: FedPer's split, but heads and body are trained in turn.

Symbols    phi -> state["model"]     n_i -> reply.num_samples     S_t -> the clients that replied
Algorithm 1, server:  samples:  phi <- sum_{i in S_t} (n_i / sum_{j in S_t} n_j) phi_i;
                      plain:    phi <- sum_{i in S_t} phi_i / |S_t|, as the paper has it.
"""

from __future__ import annotations

from clients.fedrep import BODY, FedRepClient, FedRepHParams
from fedapp.method import Method
from fedapp.reduce.spec import Mean, weights_of
from strategies.fedavg import FedAvg

METHOD = Method(
    id="fedrep",
    title="FedRep",
    paper="Collins et al., ICML 2021",
    strategy=FedAvg,
    client=FedRepClient,
    hparams=FedRepHParams,
    shared=BODY,
    head="names",
    reduces=lambda hparams: {"train": {"model": Mean(weights=weights_of(hparams.average))}},
    travels="the body, both ways",
)
