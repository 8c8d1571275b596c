"""cwFedAvg + WDR, local step. Lee and Choi, Class-Wise Federated Averaging for Efficient Personalization, ICCV 2025.

| symbol (paper)   | here                                                                          |
|------------------|-------------------------------------------------------------------------------|
| theta_i          | `self.model`, the received blend                                              |
| p_i              | `self.p`, (K,) label distribution of the local training split                 |
| W_i, p~_i        | `model.head.weight`, its row norms divided by their sum (Eq. 4)               |
| lambda           | `hparams.lam`                                                                 |

Local loss:  L = CE + lambda * R_i
Eq. 8:       R_i = || p_i - p~_i ||_2, the distance, not its square; the bias plays no part.
Eq. 4:       p~_ij = ||W_i,j|| / sum_k ||W_i,k||.
Both are computed by `fedapp.core.classwise.wdr`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from clients.base import FedClient
from fedapp.core.classwise import wdr
from fedapp.core.names import matches
from fedapp.errors import BadRequest, suggest_choice
from fedapp.lazy import Tensor, torch
from fedapp.learning.training import Batch
from fedapp.method import Arrays, BaseHParams, Payload


def classwise_names(layers: str, names: Sequence[str]) -> list[str]:
    """Return the arrays of the layers that are averaged class by class.

    Parameters
    ----------
    layers : `output`, `all`, `none`, a number (that many last layers), or layer names joined by `+` or `,`: a name X
        stands for whole dotted components, `features.X.` (`conv2` never matches `conv2b`).
    names : wire names of the model in forward order, the head last.

    Raises
    ------
    BadRequest : no such layer; says which there are.
    """
    prefixes = list(dict.fromkeys(".".join(n.split(".")[: 1 if n.startswith("head.") else 2]) for n in names))
    short = {p.removeprefix("features."): p for p in prefixes if p != "head"} | {"output": "head", "head": "head"}
    known = [p.removeprefix("features.") for p in prefixes if p != "head"] + ["output"]
    if layers in ("all", "none"):
        chosen = prefixes if layers == "all" else []
    elif layers.isdecimal():
        if not 1 <= int(layers) <= len(prefixes):
            raise BadRequest(f"layers = {layers}: the model has {len(prefixes)} layers ({', '.join(known)})")
        chosen = prefixes[-int(layers) :]
    else:
        chosen = []
        for part in layers.replace("+", ",").split(","):
            prefix = short.get(part, part)
            if not part or not any(matches(n, (prefix,)) for n in names):
                raise BadRequest(
                    f"layers: the model has no layer '{part}'"
                    + suggest_choice(part, known, ", or give output, all, none, or a number")
                )
            chosen.append(prefix)
    return [n for n in names if matches(n, chosen)]


class CwFedAvgHParams(BaseHParams):
    """Hyperparameters of cwFedAvg + WDR."""

    lam: Literal["auto"] | Annotated[float, Field(ge=0)] = Field(
        "auto",
        description="lambda, weight of WDR; auto = 0.1 K^2 (paper: 10 for 10 classes, 1000 for 100, 2000 for 200); 0 "
        "switches it off",
    )
    wdr: Literal["paper", "authors"] = Field(
        "paper", description="paper = lambda R (Eq. 8), authors = half of it, as the released code has it"
    )
    layers: str = Field(
        "output",
        min_length=1,
        description="layers that are averaged class by class: output (paper's choice), all, none, the last n, or names "
        "joined by + or , such as fc1+output",
    )
    dist: Literal["approx", "empirical"] = Field(
        "approx",
        description="class distributions: read from the uploaded heads, or the true ones, which clients then send "
        "(Table 4; gives privacy up)",
    )
    share: Literal["all", "head"] = Field(
        "all", description="exchanged part: the whole model (paper), or the head alone, over private bodies of any form"
    )
    tau: float = Field(
        0.0,
        ge=0,
        description="under partial participation, classes with less than tau times an even share among the "
        "participants keep their global model of the round before (paper: 0)",
    )

    def weight(self, num_classes: int) -> float:
        """Return the factor in front of R for K classes."""
        lam = 0.1 * num_classes**2 if self.lam == "auto" else self.lam
        return 0.5 * lam if self.wdr == "authors" else lam


class CwFedAvgClient(FedClient):
    """Local training that pulls the norms of the head's rows towards the client's class shares."""

    p: Tensor
    weight: float
    entropy: Tensor
    seen: int

    def before_training(self, payload: Payload) -> None:
        """Compute p_i and the factor of R."""
        self.p = torch.from_numpy(self.distribution()).to(self.device)
        self.weight = self.hparams.weight(self.task.num_classes)
        self.entropy, self.seen = torch.zeros((), device=self.device), 0

    def distribution(self) -> NDArray[np.float32]:
        """(K,) float32 shares of the classes in the training split, exactly 0 for classes without samples."""
        counts = self.task.class_counts()
        p: NDArray[np.float32] = (counts / counts.sum()).astype(np.float32)
        return p

    def step_loss(self, batch: Batch) -> Tensor:
        """Return CE + lambda R; exactly FedAvg's loss where lambda is 0."""
        loss = super().step_loss(batch)
        self.entropy, self.seen = self.entropy + len(batch.y) * loss.detach(), self.seen + len(batch.y)
        if self.weight == 0:
            return loss
        return loss + self.weight * wdr(self.model.head.weight, self.p)  # Eq. 8

    def after_training(self, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Return p_i with `dist=empirical`; R, and the mean cross-entropy of the steps without R."""
        arrays: Arrays = {"distribution": self.distribution()} if self.hparams.dist == "empirical" else {}
        entropy = {"cross-entropy": float(self.entropy) / self.seen} if self.seen else {}
        with torch.no_grad():
            return arrays, {"wdr": float(wdr(self.model.head.weight, self.p)), **entropy}
