"""FedCOF. Goswami, Magistri, Wang, Twardowski, van de Weijer, Covariances for Free: Exploiting Mean Distributions for
Federated Learning with Pre-Trained Models, NeurIPS 2025.

| symbol (paper)   | here                                                                          |
|------------------|-------------------------------------------------------------------------------|
| n_kc, mu_kc      | from `b` of client k, in `found.parts[k]`: its counts and class means         |
| K_c              | number of clients that own class c                                            |
| S^_c, gamma, G   | `core.sums.scatter_of_means`                                                  |

1. Any base method with one global model trains as it always does.
2. Every client answers once with the sum of features and the count of every class, as for FedNCM (`clients/sums.py`).
3. S^_c = sum_k n_kc (mu_kc - mu_c)(mu_kc - mu_c)^T / (K_c - 1), unbiased for the covariance of class c if every
   client's samples of a class are drawn from one distribution; 0 where K_c is 1.
4. G = sum_c (n_c - 1)(S^_c + gamma I) + N mu mu^T with the mean mu of all features; the scatter between classes is left
   out on purpose.
5. W_c = G^-1 S_c / ||G^-1 S_c||, no bias.
6. One factor for all logits (`scale`).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field

from clients.sums import ClassSumsClient, SumsHParams
from fedapp.core import sums
from fedapp.core.sums import Float64
from fedapp.reduce.spec import Totals
from strategies._sums import HeadFromSums, head_method

FEW = 10
"""With fewer owners of a class than width / FEW the summary notes the low rank of the covariances."""


class FedCOFHParams(SumsHParams):
    """Hyperparameters of FedCOF; those of the base method are given as `base.NAME=value`."""

    gamma: Annotated[float, Field(gt=0)] | Literal["auto", "mean-square"] = Field(
        "auto",
        description="shrinkage added to each class's covariance (code: 1, MobileNetV2: 0.1); mean-square = the "
        "features' own, for which each client sends one more number; auto = mean-square with base = none, else 1",
    )

    def energy(self) -> bool:
        """Return whether the features' mean square is needed."""
        return self.gamma == "mean-square"

    def settled(self, given: bool = False) -> Self:
        """Return them with the gamma that `auto` stands for: 1 would hide features of norm 1."""
        found = super().settled(given)
        gamma = "mean-square" if found.base == "none" else 1.0
        return found.model_copy(update={"gamma": gamma}) if self.gamma == "auto" else found

    def solved(self, found: Totals) -> tuple[Float64, dict[str, Any]]:
        """Return the head (steps 3 to 5), and the shrinkage that was found."""
        gamma: Any = self.gamma  # `auto` is settled
        entries = {}
        if gamma == "mean-square":
            gamma = float(found.sums["energy"][0]) / found.sums["b"][:, -1].sum()
            entries = {"gamma": gamma}
        return sums.cof([part["b"] for part in found.parts], gamma), entries


class FedCOF(HeadFromSums):
    """The base method's strategy, with FedCOF's head after its last round."""

    settings: ClassVar[FedCOFHParams] = FedCOFHParams()
    apart: ClassVar[bool] = True

    def rows(self, found: Totals) -> tuple[Float64, dict[str, Any]]:
        """Return the head, and how many clients own a class."""
        owners = np.sum([part["b"][:, -1] > 0 for part in found.parts], axis=0)
        mean, width = float(owners[owners > 0].mean()), self.context.width
        entries: dict[str, Any] = {"owners_of_a_class": mean}
        if mean < width / FEW:
            entries["note"] = (
                f"{mean:.1f} clients own a class on average: covariances of {width} features estimated from so few "
                "means have a low rank"
            )
        rows, found_entries = super().rows(found)
        return rows, entries | found_entries


METHOD = head_method(
    "fedcof",
    "FedCOF",
    "Goswami et al., NeurIPS 2025",
    FedCOF,
    ClassSumsClient,
    FedCOFHParams,
    "arrays of the base method; once, sum of features and count of every class, and the mean square of features",
)
