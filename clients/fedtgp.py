"""FedTGP, local step. Zhang et al., FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive
Learning for Data and Model Heterogeneity in Federated Learning, AAAI 2024.

| symbol (paper)   | here                                                                     |
|------------------|--------------------------------------------------------------------------|
| f_i(x)           | `model.represent(x)`, (B, d)                                             |
| hat P^c          | `self.prototypes[c]`, where `self.known[c]`: all classes ever sent       |
| P_i^c            | row of `protos` in the reply, a class mean after training                |
| lambda           | `hparams.lam`                                                            |

Local loss: L = CE + lambda * mean over batch and coordinates of (f_i(x) - hat P^y)^2, which is FedProto's with all
prototypes sent to every client; round 1 has none. The mean over coordinates gives the squared distance the weight
lambda / d. The authors have lambda = 10 with d = 512; lambda = 10 d / 512 is that weight at any width.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from clients.fedproto import FedProtoClient
from fedapp.method import BaseHParams


class FedTGPHParams(BaseHParams):
    """Hyperparameters of FedTGP; what the server trains with is in those from `server_epochs` on."""

    distance: ClassVar[str] = "mse"
    average: ClassVar[str] = "plain"
    collect: ClassVar[str] = "eval"
    down: ClassVar[str] = "all"

    lam: Literal["auto"] | Annotated[float, Field(ge=0)] = Field(
        "auto",
        description="lambda, weight of the prototype term; auto = 10 d / 512 for width d (released code: 10, d = 512)",
    )
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

    def weight(self, width: int) -> float:
        """Return lambda for representations of a width."""
        return 10 * width / 512 if self.lam == "auto" else self.lam


class FedTGPClient(FedProtoClient):
    """FedProto's client: the prototypes that it gets were trained by the server."""
