"""FedTGP, local step. Zhang et al., FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive
Learning for Data and Model Heterogeneity in Federated Learning, AAAI 2024.

| symbol (paper)   | here                                                                     |
|------------------|--------------------------------------------------------------------------|
| f_i(x)           | `model.represent(x)`, (B, d)                                             |
| hat P^c          | `self.prototypes[c]`, where `self.known[c]`: all classes ever sent       |
| P_i^c            | row of `protos` in the reply, a class mean after training                |
| lambda           | `hparams.lam`                                                            |

Local loss: L = CE + lambda * mean over batch and coordinates of (f_i(x) - hat P^y)^2, which is FedProto's with all
prototypes sent to every client; round 1 has none. The mean over coordinates makes lambda = 10 with d = 512 a weight of
0.02 on the squared distance.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from clients.fedproto import FedProtoClient
from fedapp.method import BaseHParams


class FedTGPHParams(BaseHParams):
    """Hyperparameters of FedTGP; what the server trains with is in those from `server_epochs` on."""

    distance: ClassVar[str] = "mse"
    average: ClassVar[str] = "plain"
    collect: ClassVar[str] = "eval"
    down: ClassVar[str] = "all"

    lam: float = Field(10.0, ge=0, description="lambda, weight of the prototype term (released code: 10)")
    inference: Literal["classifier", "prototype"] = Field(
        "classifier", description="predict with the head, or by the nearest prototype (released code: prototype)"
    )
    server_epochs: int = Field(100, ge=0, description="S, passes over the class means a round (released code: 100)")
    server_lr: float = Field(0.01, ge=0, description="learning rate of the server's SGD (released code: 0.01)")
    server_batch: int = Field(10, ge=1, description="class means per step (released code: the clients' batch size, 10)")
    tau: float = Field(100.0, ge=0, description="largest margin (released code: 100)")
    network: bool = Field(
        True, description="prototypes are outputs of a net; false trains the vectors alone, from the round's means"
    )


class FedTGPClient(FedProtoClient):
    """FedProto's client: the prototypes that it gets were trained by the server."""
