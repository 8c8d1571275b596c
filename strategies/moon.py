"""MOON. Li, He, Song, Model-Contrastive Federated Learning, CVPR 2021: FedAvg's server, a contrastive local loss.

Symbols    w -> state["model"]     |D_i| -> reply.num_samples
Algorithm 1, server:  w^{t+1} = sum_{i in S_t} (|D_i| / sum_{j in S_t} |D_j|) w_i^t.
Reduces to FedAvg, bit for bit, where mu is 0 (tested). The local step is in clients/moon.py.
"""

from __future__ import annotations

import dataclasses

from clients.moon import MoonClient, MoonHParams
from strategies.fedavg import METHOD as FEDAVG

METHOD = dataclasses.replace(
    FEDAVG, id="moon", title="MOON", paper="Li et al., CVPR 2021", client=MoonClient, hparams=MoonHParams
)
