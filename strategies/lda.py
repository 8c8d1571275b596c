"""LDA. Linear discriminant analysis (Fisher, 1936) on the features of all clients, in one exchange of sums.

| symbol        | here                                                                       |
|---------------|----------------------------------------------------------------------------|
| mu_c, n_c, N  | class means, class counts, number of samples, from `b` of `found.sums`     |
| Sigma         | covariance within classes, from `a` and `b` of `found.sums`                |
| g, pi_c       | `shrink`, and the class prior that `prior` names                           |

1. Any base method with one global model trains as it always does.
2. Every client answers once with sum h h^T and sum h e_y^T of h = (z, 1) (`clients/sums.py`): what Fed3R sends.
3. Sigma = (A_zz - sum_c n_c mu_c mu_c^T) / (N - C_seen), then (1 - g) Sigma + g tr(Sigma)/d I.
4. W_c = Sigma^-1 mu_c, b_c = -mu_c^T Sigma^-1 mu_c / 2 + log pi_c: the largest logit is the most probable class, if the
   features of each class are Gaussian with this covariance.

No paper of federated learning is behind it: it is the classical rule, and the reference for CCVR, FedCOF and pFedFDA.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from clients.sums import SquaresHParams, SumsClient
from fedapp.core import sums
from fedapp.core.sums import Float64
from fedapp.reduce.spec import Totals
from strategies._sums import HeadFromSums, head_method

ALONE = 0.3
"""g of a head from the rows of one client."""


class LDAHParams(SquaresHParams):
    """Hyperparameters of LDA; those of the base method are given as `base.NAME=value`."""

    shrink: float = Field(
        0.1, gt=0, le=1, description="g, share of tr(Sigma)/d I in the covariance (no paper); 1 = nearest mean"
    )
    prior: Literal["uniform", "pooled"] = Field(
        "uniform", description="pi_c: the same for all classes, or n_c / N (no paper)"
    )

    def solved(self, found: Totals) -> tuple[Float64, dict[str, Any]]:
        """Return the discriminant (steps 3 and 4)."""
        return sums.discriminant(found.sums["a"], found.sums["b"], self.shrink, self.prior), {}

    def strength(self, scale: float) -> float:
        """Return the factor of the logits, if these hold log n_c / N."""
        return scale if self.prior == "pooled" else 0.0

    def alone(self) -> Self:
        """Return a stronger shrinkage, since one client has few rows."""
        return self.model_copy(update={"shrink": ALONE})


class LDA(HeadFromSums):
    """The base method's strategy, with a discriminant head after its last round."""

    settings: ClassVar[LDAHParams] = LDAHParams()


METHOD = head_method(
    "lda",
    "LDA",
    "linear discriminant analysis; no federated paper",
    LDA,
    SumsClient,
    LDAHParams,
    "arrays of the base method; once, sums of features and of their products",
)
