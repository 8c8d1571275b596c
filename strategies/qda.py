"""QDA. Quadratic discriminant analysis with shrinkage (Friedman, Regularized Discriminant Analysis, JASA 1989) on the
features of all clients, from the sums that CCVR sends.

| symbol            | here                                                                         |
|-------------------|------------------------------------------------------------------------------|
| n_c, mu_c, S_c    | counts, means and covariances of the pooled statistics                       |
| h, g, pi_c        | `share`, `shrink`, and the class prior that `prior` names                    |
| U_c               | upper triangular, U_c U_c^T = Sigma_c^-1 (`core.quadratic.discriminant`)     |

1. Any base method with one global model trains as it always does.
2. Every client answers twice: with n_kc and sum z, and with the sum of (z - mu_c)(z - mu_c)^T of every class
   (`clients/ccvr.py`, cov=sums).
3. Sigma_c = (1 - h) S_c + h S_w with the covariance S_w within classes, then (1 - g) Sigma_c + g tr(Sigma_c)/d I.
4. logit_c = -(z - mu_c)^T Sigma_c^-1 (z - mu_c) / 2 - log |Sigma_c| / 2 + log pi_c.
5. One factor for all logits (`scale`), from a third query.

With h = 1 it is LDA with the same g. No paper of federated learning is behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np

from clients.ccvr import STATISTICS
from clients.qda import QUADRATIC, QDAClient, QDAHParams
from clients.sums import SUMS
from fedapp.core import quadratic, sums
from fedapp.core.sums import Float64
from fedapp.method import Arrays, Method, Payload, ServerState
from fedapp.reduce.spec import Query
from strategies._composition import built_on
from strategies._sums import LOSSES, B, ClosedForm, Solution, W, fitted_to_shares
from strategies.ccvr import gaussians, statistics


class QDA(ClosedForm):
    """The base method's strategy, with a quadratic head after its last round."""

    settings: ClassVar[QDAHParams] = QDAHParams()
    queries = ("statistics", "totals", "losses")

    def solve(self, w: Arrays, query: Query) -> Solution:
        """Query the statistics and make a quadratic head of them."""
        s = self.settings
        pooled, reduced = statistics(w, s.cov, query)
        self.warn_of_few_rows(reduced.clients)
        counts = pooled.counts
        if not counts.any():
            return {"head": {n: w[n] for n in (W, B)}}, reduced.clients, counts, {}
        solution = quadratic.discriminant(pooled, s.share, s.shrink, s.prior)
        scale = 1.0
        if s.scale == "fit":
            question = Payload(common={**w, **_head(*solution)}, scalars={QUADRATIC: True})
            scale = sums.best_scale(query("losses", question).totals("losses").sums["loss"])
        found = {"scale": scale, "classes_single": np.flatnonzero(counts == 1).tolist(), "head_norm_ratio": None}
        return self.entry(_head(*solution, scale), counts, scale), reduced.clients, counts, found

    def repair(self, state: ServerState) -> Payload:
        """Return the head, and whether it is quadratic."""
        head = state[self.method.id]["head"]
        return Payload(common=head, scalars={QUADRATIC: "head.factor" in head})


def _head(means: Float64, roots: Float64, bias: Float64, scale: float = 1.0) -> Arrays:
    """Return the arrays of a quadratic head in float32, with logits times `scale`."""
    arrays = {W: means, B: scale * bias, "head.factor": scale**0.5 * roots}
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def resolve(hparams: QDAHParams, lookup: Callable[[str], Method]) -> Method:
    """Return the base method with the statistics and the head added."""
    return built_on(fitted_to_shares(METHOD) if hparams.personal else METHOD, hparams, lookup)


METHOD = Method(
    id="qda",
    title="QDA",
    paper="quadratic discriminant analysis; no federated paper",
    strategy=QDA,
    client=QDAClient,
    hparams=QDAHParams,
    extra_up=(STATISTICS, SUMS),
    global_model=True,
    deploy_as="received",
    travels="arrays of the base method; once, count and sum of features of every class, and sums of their products",
    queries=QDA.queries,
    reduces=lambda hparams: {**gaussians(hparams.cov), "query.losses": {"losses": LOSSES}},
    resolve=resolve,
    linear=False,
)
