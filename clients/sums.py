"""Sums of features for heads in closed form, client side: FedNCM, Fed3R, LDA, FedCOF.

| symbol (papers)    | here                                                                           |
|--------------------|--------------------------------------------------------------------------------|
| z                  | `head_input(represent(x))` of the model, (d,): what the last linear layer sees |
| h = (z, 1)         | the features with a constant                                                   |
| A_k = sum h h^T    | `sums/a`, packed (d + 1)(d + 2)/2                                              |
| b_k = sum h e_y^T  | `sums/b`, (C, d + 1): of every class the sum of z, and n_kc                    |
| sum |z|^2 / d      | `sums/energy`, (1,): where the head needs the features' mean square            |

After the last round the client answers one query with these sums, in one pass and in float64, always for all C classes
(zeros where it has none): the same shapes whatever it holds. With `scale=fit` the head is then sent back, and a second
answer holds the sums of its cross-entropies for a fixed list of factors.

With `personal` each client fits the bias of the scaled head f (W, b) to its own class shares (`clients/shares.py`):
b_k = f b + log p_k - w log q, with p_k = (n_kc + m / C) / (n_k + m), q the same of all clients together, and w the
strength of log q in the head's own logits. A class without rows anywhere keeps its bias.

Where the data are features and nothing is trained, the client states M, the largest |z| of its training rows, when it
registers. From N and M of all clients follows k (`core.sums.exact_bits`): features are then rounded to multiples of
2^-k, and A and b are exact. With dp or `min_count` above 1 M is not stated.

With `dp = example` the answer is `sums/count`, `sums/sum` and `sums/square` with noise (`fedapp/privacy/clients.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from clients._initial import initial_model
from clients.posthoc import PostHocClient, PostHocHParams
from clients.shares import Float64, SharesClient, shares
from fedapp.core import sums
from fedapp.core.names import prefixed
from fedapp.core.sums import FeatureSums, Real
from fedapp.lazy import torch
from fedapp.method import Arrays, Payload, Scalar
from fedapp.models import frozen
from fedapp.reduce.spec import Totals

SUMS = "sums/"
"""Prefix of the arrays of an answer."""
STRENGTH = "prior-strength"
"""Scalar with w, the strength of log q in the logits of a head."""
SMOOTH = 3.0
"""m, rows of equal classes that are added to the class counts of a client, and of all clients.

Add-one smoothing, m = C, lost 0.4 to 4.3 points where classes are many."""


class HeadHParams(PostHocHParams):
    """Hyperparameters that all heads in closed form share; those of the base method are given as `base.NAME=value`."""

    min_count: int = Field(
        1, ge=1, description="classes with fewer samples at a client stay there; 3 for privacy (papers: 1)"
    )
    scale: Literal["auto", "trained", "fit", "none"] = Field(
        "auto",
        description="one factor for all logits, which changes no prediction: trained = the weights get the norm of the "
        "trained head's, so that local training can go on; fit = the best for the losses of the clients' training "
        "rows; none (papers: none; Fed3R+FT fits one); auto = none with dp, fit with base = none or personal, else "
        "trained",
    )
    personal: bool = Field(
        False, description="each client adds the logarithm of its own class shares to the bias, at no byte (no paper)"
    )

    auto_with_noise: ClassVar = {"scale": "none"}
    exact: ClassVar = {("scale", "fit"): "asks for exact losses: take scale=none"}

    def settled(self, given: bool = False) -> Self:
        """Return them with the scale that `auto` stands for: a head that nothing trained has no scale of its own."""
        found = super().settled(given)
        scale = "fit" if found.base == "none" or self.personal else "trained"
        return found.model_copy(update={"scale": scale}) if self.scale == "auto" else found


class SumsHParams(HeadHParams):
    """Hyperparameters of heads from sums of features, and their mathematics, which both sides use."""

    choose: bool = Field(
        False,
        description="each client takes its own head where held-out rows say that it serves it better; implies personal "
        "(no paper)",
    )

    exact: ClassVar = {**HeadHParams.exact, ("choose", True): "sends exact numbers of held-out rows: leave it out"}

    @model_validator(mode="after")
    def _one_sum(self) -> Self:
        if self.choose and self.min_count > 1:
            raise ValueError("choose sends sums twice, and their difference is of few rows: leave min_count out")
        return self

    def settled(self, given: bool = False) -> Self:
        """Return them with `personal` where `choose` implies it."""
        asked = self.model_copy(update={"personal": True}) if self.choose else self
        return super(SumsHParams, asked).settled(given)

    def energy(self) -> bool:
        """Return whether the head needs the features' mean square; each client then sends `sum |z|^2 / d`."""
        return False

    def precision(self) -> Real:
        """Return the type of the numbers in A_k."""
        return np.float64

    def solved(self, found: Totals) -> tuple[Float64, dict[str, Any]]:
        """Return the head as rows (C, d + 1), weights and bias, and the summary's entries about it.

        Parameters
        ----------
        found : `sums` holds b (C, d + 1), and where the head needs them A as `a` (d + 1, d + 1) and the sum of
            |z|^2 / d as `energy` (1,). `parts` holds those of each client where the head needs them apart.
        """
        raise NotImplementedError

    def strength(self, scale: float) -> float:
        """Return w, the strength of the log shares of the rows in the head's logits, after their factor `scale`."""
        return 0.0

    def alone(self) -> Self:
        """Return the hyperparameters of a head from the rows of one client."""
        return self


class TotalsHParams(SumsHParams):
    """The same for heads that need no client's sums apart, so that clients may join or leave stored totals."""

    totals: str = Field(
        "", description="run directory whose sums those of this run's clients are added to; empty = none (no paper)"
    )
    leave: bool = Field(False, description="the sums of this run's clients are taken away from totals (no paper)")

    @model_validator(mode="after")
    def _whole_sums(self) -> Self:
        if self.leave and not self.totals:
            raise ValueError("leave=true needs totals: name the run whose sums hold those of the clients that leave")
        if self.totals and (self.choose or self.precision() is np.float32):
            raise ValueError("totals are exact sums of all rows: leave choose and wire out")
        return self

    def fitted(self) -> dict[str, Any]:
        """Return the values on which the factor of the logits depends, as JSON."""
        return self.model_dump(mode="json", exclude={"totals", "leave", "personal"})


class SquaresHParams(TotalsHParams):
    """The same for heads that need A_k."""

    wire: Literal["f64", "f32"] = Field(
        "f64", description="f32 = sums of products travel in half the bytes, rounded; the head differs by about 1e-4"
    )

    def precision(self) -> Real:
        """Return the type that `wire` names."""
        return np.float32 if self.wire == "f32" else np.float64


class LossesClient(PostHocClient):
    """Answers with the losses of the head that was sent, for a list of factors."""

    repeats: ClassVar[Mapping[str, str]] = {}
    """Further queries -> the one that they repeat, of other rows."""

    def answer(self, kind: str, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Answer `losses`."""
        if self.repeats.get(kind, kind) == "losses":
            losses = [torch.zeros(len(sums.SCALES), dtype=torch.float64).numpy()]
            with torch.no_grad():
                losses += [sums.scaled_losses(self.model.head(z), label) for z, label in self.described(kind)]
            return {SUMS + "loss": sum(losses[1:], losses[0])}, {}
        return super().answer(kind, payload)


class SumsClient(LossesClient):
    """Trains as the base method's client does, and answers with A_k and b_k."""

    squares: ClassVar[bool] = True
    """Whether A_k is sent too."""

    def common_facts(self) -> dict[str, Scalar]:
        """Add the largest |z| of the training rows where sums can be exact."""
        largest = self._largest_feature()
        return {**super().common_facts(), **({} if largest is None else {"largest-feature": largest})}

    def _largest_feature(self) -> float | None:
        if self.settings.base != "none" or self.settings.min_count > 1:
            return None
        if (args := frozen.of(self.task.model, self.task.settings)).scaled:  # its scaling is not known yet
            return args.largest if args.random_features else None
        self.model = initial_model(self)
        if self.model.features.state_dict():  # the last bits of a network's features depend on the block
            return None
        return max(float(z.abs().max()) for z, _ in self.feature_batches("register"))

    def answer(self, kind: str, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Answer also `sums`."""
        if self.repeats.get(kind, kind) == "sums":
            bits = payload.sum_bits // 2 or None
            found = FeatureSums(self.task.num_classes, self.model.width, self.squares, self.settings.energy(), bits)
            for z, label in self.described(kind):
                found.update(z, label)
            arrays = found.arrays()
            if self.squares:
                arrays["a"] = arrays["a"].astype(self.settings.precision(), copy=False)
            return prefixed(SUMS, arrays), self.measure("received")
        return super().answer(kind, payload)


class ClassSumsClient(SumsClient):
    """The same without A_k."""

    squares: ClassVar[bool] = False


class OwnShares(SharesClient):
    """Fits the bias of a head in closed form to the client's own class shares."""

    def adjustment(self, prior: Arrays, scalars: Mapping[str, Scalar]) -> Float64:
        """Return the terms of the head that was sent; `shares` in `prior` are its q."""
        return self.terms(prior["shares"], float(scalars[STRENGTH]), self.task.class_counts())

    def terms(self, q: Float64, strength: float, counts: npt.NDArray[Any]) -> Float64:
        """Return log p_k - w log q, (C,), and 0 for a class without rows.

        Parameters
        ----------
        q : as from `shares_of`.   strength : w.   counts : n_kc, (C,).
        """
        p, seen, found = shares(counts, SMOOTH / len(q)), q > 0, np.zeros(len(q))
        found[seen] = np.log(p[seen]) - strength * np.log(q[seen])
        return found


def shares_of(counts: npt.NDArray[Any]) -> Float64:
    """Return q of class counts (C,): (n_c + m / C) / (N + m), and 0 for a class without rows."""
    return np.where(counts > 0, shares(counts, SMOOTH / len(counts)), 0.0)
