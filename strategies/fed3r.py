"""Fed3R. Fani, Camoriano, Caputo, Ciccone, Accelerating Heterogeneous Federated Learning with Closed-form Classifiers,
ICML 2024.

| symbol (paper)       | here                                                                        |
|----------------------|-----------------------------------------------------------------------------|
| A, b                 | `a` (d + 1, d + 1) and `b` (C, d + 1) of `found.sums`, over all clients     |
| lambda               | `lam`                                                                       |
| W* = (A + lambda I)^-1 b | `core.sums.ridge`, rows of weights and bias                             |

1. Any base method with one global model trains as it always does.
2. Every client answers once with A_k = sum h h^T and b_k = sum h e_y^T of h = (z, 1) (`clients/sums.py`).
3. W* = (lambda I + sum_k A_k)^-1 sum_k b_k: ridge regression of one-hot labels on all features together, exactly.
   With `lam=gcv` lambda is the one with the least generalised cross-validation error, which needs these sums alone.
4. The released code then divides every class's weights and bias by the norm of its weights, which changes predictions;
   here only with `normalise=true`.
5. One factor for all logits (`scale`).

With `random_features` z are random Fourier features of standardised ones (Fed3R-RF; `fedapp/models/frozen.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from clients.sums import SquaresHParams, SumsClient
from fedapp.core import sums
from fedapp.core.sums import Float64
from fedapp.reduce.spec import Totals
from strategies._sums import HeadFromSums, head_method

FLOOR = 1e-6
"""Smallest norm that a class is divided by (released code)."""


class Fed3RHParams(SquaresHParams):
    """Hyperparameters of Fed3R; those of the base method are given as `base.NAME=value`."""

    lam: Annotated[float, Field(gt=0)] | Literal["auto", "gcv"] = Field(
        "auto",
        description="penalty lambda on weights and bias (code: 0.01); gcv = by generalised cross-validation; auto = "
        "gcv with base = none and without dp, else 0.01",
    )
    relative: bool = Field(False, description="lambda is a multiple of the mean of A's diagonal (code: no)")
    normalise: bool = Field(
        False, description="divide each class's weights and bias by the norm of its weights (code: yes)"
    )
    bias: bool = Field(True, description="whether there is a bias, penalised too (code: yes)")

    random_features: int = Field(
        0,
        ge=0,
        description="D random Fourier features of model = identity (Fed3R-RF); gamma and seed stand in model-args; 0 = "
        "none",
    )

    @model_validator(mode="after")
    def _one_penalty(self) -> Self:
        if self.relative and self.lam == "gcv":
            raise ValueError("lam=gcv finds the penalty itself: leave relative out")
        return self

    # The sums of a run with noise do not fit cross-validation.
    auto_with_noise: ClassVar = {**SquaresHParams.auto_with_noise, "lam": 0.01}

    def settled(self, given: bool = False) -> Self:
        """Return them with the penalty that `auto` stands for."""
        found = super().settled(given)
        gcv = found.base == "none" and not self.relative
        return found.model_copy(update={"lam": "gcv" if gcv else 0.01}) if self.lam == "auto" else found

    def solved(self, found: Totals) -> tuple[Float64, dict[str, Any]]:
        """Return W* (step 3), normalised if that is asked for, and the penalty that was found."""
        a, b = found.sums["a"], found.sums["b"]
        lam: Any = self.lam  # `auto` is settled
        entries = {}
        if lam == "gcv":
            lam, inside = sums.best_penalty(a, b, bias=self.bias)
            entries = {"lam": lam, "lam_inside": inside}
        rows = sums.ridge(a, b, lam, relative=self.relative, bias=self.bias)
        if self.normalise:
            norms = np.linalg.norm(rows[:, :-1], axis=1, keepdims=True)
            rows = rows / np.where(norms > 0, norms, FLOOR)
        return rows, entries

    def strength(self, scale: float) -> float:
        """Return 1: one-hot labels of all rows are fitted, so that their shares are in the logits.

        Rows of norm 1 hold none, as in FedCOF.
        """
        return 0.0 if self.normalise else 1.0


class Fed3R(HeadFromSums):
    """The base method's strategy, with a ridge head after its last round."""

    settings: ClassVar[Fed3RHParams] = Fed3RHParams()

    def rows(self, found: Totals) -> tuple[Float64, dict[str, Any]]:
        """Return the head and the penalty that was found; warn of one that fits badly."""
        if self.settings.lam != "gcv":
            self.check_penalty(found.sums["a"], found.sums["b"], float(self.settings.lam))
        rows, entries = super().rows(found)
        if not entries.pop("lam_inside", True):
            lam = entries["lam"]
            self.context.warn(f"fed3r: lam = {lam:.3g} is the end of the grid of generalised cross-validation")
        return rows, entries

    def check_penalty(self, a: Float64, b: Float64, given: float) -> None:
        """Warn of a penalty below the mean square of a feature where there are about as many samples as features.

        Least squares then fits the noise of the samples, most of all at n = d + 1. In a trial with d = 1280, lam = 0.01
        and 0.4 to 2 times d + 1 samples lost 8 to 61 points of accuracy to lam = 300 times the mean square.
        """
        n, width = float(b[:, -1].sum()), len(a)
        square = float(np.trace(a)) / (n * width)
        lam = given * (float(np.trace(a)) / width if self.settings.relative else 1)
        if lam < square and 0.4 <= n / width <= 2:
            self.context.warn(
                f"fed3r: lam = {given:g} is small for {n:.0f} samples of {width - 1} features: near as "
                "many samples as features the head fits noise. Try a larger lam"
                + ("" if self.settings.relative else f", such as lam={30 * square:.2g} and lam={300 * square:.2g}")
            )


METHOD = head_method(
    "fed3r",
    "Fed3R",
    "Fani et al., ICML 2024",
    Fed3R,
    SumsClient,
    Fed3RHParams,
    "arrays of the base method; once, sums of features and of their products",
)
