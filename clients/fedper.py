"""FedPer, local step. Arivazhagan, Aggarwal, Singh, Choudhary, Federated Learning with Personalization Layers, 2019.

| symbol (paper)   | here                                                                            |
|------------------|---------------------------------------------------------------------------------|
| W_B              | base layers: the arrays under `hparams.share`, which travel                     |
| W_Pj             | personalization layers: all others, private to client j                         |
| K_P              | how many layers are private: the head, unless `share` leaves out more           |

Algorithm 1, client j:  (W_B, W_Pj) <- SGD on the cross-entropy, over both together, from the received W_B and the own
W_Pj. FedRep and Ditto start their private parts as it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from clients.base import FedClient
from fedapp.learning.task import ModelSpec, with_common_seed
from fedapp.method import ALL, NONE, BaseHParams

if TYPE_CHECKING:
    from fedapp.models import SplitModel


class PrivateHParams(BaseHParams):
    """What all methods with private parts have: where these start."""

    start: Literal["common", "own"] = Field(
        "common",
        description="private parts of a new client: those of the server's initial model, the same for all (nearly all "
        "released code), or drawn with a seed of its own",
    )


class FedPerHParams(PrivateHParams):
    """Hyperparameters of FedPer."""

    share: str = Field(
        "features",
        min_length=1,
        description="layers that travel, joined by + or , such as features.conv1+features.conv2 (paper: all but the "
        "head, or but head and last blocks); all = FedAvg, none = training alone",
    )

    @field_validator("share")
    @classmethod
    def _of_the_model(cls, share: str) -> str:
        for part in share.replace("+", ",").split(","):
            if share not in ("all", "none") and part.split(".")[0] not in ("features", "head"):
                raise ValueError(
                    f"'{part}' is not a layer: give all, none, or names such as features, features.conv1 and head"
                )
        return share

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Dotted prefixes of the arrays that travel."""
        given = {"all": ALL, "none": NONE}.get(self.share)
        parts = self.share.replace("+", ",").split(",")
        return tuple(part.removesuffix(".") + "." for part in parts) if given is None else given


class PrivateClient(FedClient):
    """A client with private parts; `hparams.start` chooses their initial values."""

    @classmethod
    def build_model(cls, spec: ModelSpec, hparams: Any) -> SplitModel:
        """Build the model with the values of the server's initial model, or with a client's own."""
        return super().build_model(with_common_seed(spec) if hparams.start == "common" else spec, hparams)
