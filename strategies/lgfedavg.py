"""LG-FedAvg. Liang et al., Think Locally, Act Globally, 2020: private bodies, averaged heads.

Symbols    (W, b) -> state["model"]["head.*"]     n_k -> reply.num_samples     m -> the number of participants
Server:  samples:  head = sum_{k in S_t} (n_k / sum_{j in S_t} n_j) head_k, as FedGH's paper writes it;
         plain:    head = sum_{k in S_t} head_k / m, as the authors' code does.
It starts from random bodies, as in FedGH's paper: different architectures cannot have a common warm start.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from clients.base import FedClient
from fedapp.method import HEAD, BaseHParams, Method
from fedapp.reduce.spec import Mean, weights_of
from strategies.fedavg import FedAvg


class LGFedAvgHParams(BaseHParams):
    """Hyperparameters of LG-FedAvg."""

    average: Literal["samples", "plain"] = Field(
        "samples",
        description="mean of the heads: weighted by n_k (FedGH's comparison), or plain over the participants (released "
        "code)",
    )


METHOD = Method(
    id="lgfedavg",
    title="LG-FedAvg",
    paper="Liang et al., 2020",
    strategy=FedAvg,
    client=FedClient,
    hparams=LGFedAvgHParams,
    shared=HEAD,
    head="names",
    reduces=lambda hparams: {"train": {"model": Mean(weights=weights_of(hparams.average))}},
    heterogeneous=True,
    travels="the head, both ways",
)
