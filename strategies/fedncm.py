"""FedNCM. Legate, Bernier, Caccia, Oyallon, Belilovsky, Guiding The Last Layer in Federated Learning with Pre-Trained
Models, NeurIPS 2023.

| symbol (paper) | here                                                             |
|----------------|------------------------------------------------------------------|
| n_kc, S_kc     | `b` of client k: number of samples and sum of features of class c |
| mu_c           | class mean over all clients                                      |

1. Any base method with one global model trains as it always does.
2. Every client answers once with S_kc and n_kc (`clients/sums.py`).
3. mu_c = sum_k S_kc / sum_k n_kc; W_c = mu_c / ||mu_c||, no bias: the nearest mean by cosine, since all features of a
   sample have one norm. With `metric=euclidean`: W_c = mu_c, bias -||mu_c||^2 / 2.
4. One factor for all logits (`scale`).

The released code keeps the random bias of a new linear layer, up to 0.04 against rows of norm 1; here it is 0. Its
second stage, fine-tuning of the whole model from this head, is a run of its own.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from clients.sums import ClassSumsClient, TotalsHParams
from fedapp.core import sums
from fedapp.core.sums import Float64
from fedapp.reduce.spec import Totals
from strategies._sums import HeadFromSums, head_method


class FedNCMHParams(TotalsHParams):
    """Hyperparameters of FedNCM; those of the base method are given as `base.NAME=value`."""

    metric: Literal["cosine", "euclidean"] = Field("cosine", description="the distance to class means (paper: cosine)")

    def solved(self, found: Totals) -> tuple[Float64, dict[str, Any]]:
        """Return the class means as a head (step 3)."""
        return sums.nearest_mean(found.sums["b"], self.metric), {}


class FedNCM(HeadFromSums):
    """The base method's strategy, with class means as its head after its last round."""

    settings: ClassVar[FedNCMHParams] = FedNCMHParams()


METHOD = head_method(
    "fedncm",
    "FedNCM",
    "Legate et al., NeurIPS 2023",
    FedNCM,
    ClassSumsClient,
    FedNCMHParams,
    "arrays of the base method; once, sum of features and count of every class",
)
