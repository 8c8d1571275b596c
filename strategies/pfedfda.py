"""pFedFDA. McLaughlin, Su, Personalized Federated Learning via Feature Distribution Adaptation, NeurIPS 2024.

| symbol (paper)       | here                                                                                  |
|----------------------|---------------------------------------------------------------------------------------|
| theta                | state["model"]["features.*"]: the body                                                |
| mu^g, Sigma^g        | state["model"]["gaussians/mean"] (C, d), ["gaussians/cov"] packed, (d (d + 1) / 2,)   |
| n_i                  | reply.num_samples                                                                     |

Server:  theta, mu^g, Sigma^g <- means of the clients' (theta_i, mu_i, Sigma_i), weighted by n_i: what the base class
does with everything in state["model"]. Weighted sums are all it needs. Start: means uniform in [0, 1), the identity.
"""

from __future__ import annotations

import numpy as np

from clients.pfedfda import GAUSSIANS, PFedFDAClient, PFedFDAHParams
from fedapp.core.gaussian import pack, unpack
from fedapp.core.sums import is_positive
from fedapp.method import Arrays, Method, Reply, ServerContext, ServerState, TrainDefaults
from fedapp.reduce.spec import Mean, Reduced
from strategies.base import Strategy


class PFedFDA(Strategy):
    """Averages bodies and the clients' adapted Gaussians."""

    def init(self, context: ServerContext) -> ServerState:
        """Return the initial body and Gaussians that know nothing."""
        state, shape = super().init(context), (context.num_classes, context.width)
        mean, cov = context.rng("gaussians").random(shape), pack(np.eye(context.width))
        start = {GAUSSIANS + "mean": mean.astype(np.float32), GAUSSIANS + "cov": cov.astype(np.float32)}
        return {**state, "model": {**state["model"], **start}}

    def update(self, state: ServerState, server_round: int, reduced: Reduced) -> ServerState:
        """Average bodies, and Gaussians."""
        return {**state, "model": {**reduced.arrays("body"), **reduced.arrays("gaussians")}}

    def check(self, state: ServerState, reply: Reply) -> str | None:
        """Refuse a negative variance, and a covariance that no representations have."""
        cov, last = (unpack(m[GAUSSIANS + "cov"], self.context.width) for m in (reply.arrays, state["model"]))
        if (np.diag(cov) < 0).any():
            return "variances must not be negative"
        slack = 1e-3 * max(float(np.abs(cov).max()), 1.0)
        if is_positive(cov + slack * np.eye(len(cov))):
            return None
        # A median of covariances may have a negative eigenvalue, and a client that keeps the median returns it.
        least, allowed = (float(np.linalg.eigvalsh(c)[0]) for c in (cov, last))
        return "no representations have this covariance" if least < min(allowed, 0.0) - slack else None


def _body(context: ServerContext, state: ServerState) -> Arrays:
    return {n: a for n, a in state["model"].items() if not n.startswith(GAUSSIANS)}


def _gaussians(context: ServerContext, state: ServerState) -> Arrays:
    """Return mu^g and Sigma^g, a reduction of their own: their changes would hide those of the body in a norm."""
    return {n: a for n, a in state["model"].items() if n.startswith(GAUSSIANS)}


METHOD = Method(
    id="pfedfda",
    title="pFedFDA",
    paper="McLaughlin and Su, NeurIPS 2024",
    strategy=PFedFDA,
    client=PFedFDAClient,
    hparams=PFedFDAHParams,
    # The rule's weights grow with the means, and so do the gradients that make the means grow.
    defaults=TrainDefaults(clip=10.0),
    shared=("features.",),
    extra_up=(GAUSSIANS,),
    reduces={
        "train": {
            "body": Mean(_body),
            "gaussians": Mean(_gaussians, least="min_count", features=(GAUSSIANS + "mean",)),
        }
    },
    travels="the body and class Gaussians of one covariance, both ways",
    columns=("beta-mean", "beta-cov"),
)
