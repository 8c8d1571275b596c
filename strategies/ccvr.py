"""CCVR. Luo, Chen, Hu, Zhang, Liang, Feng, No Fear of Heterogeneity: Classifier Calibration for Federated Learning with
Non-IID Data, NeurIPS 2021.

| symbol (paper)        | here                                                                     |
|-----------------------|--------------------------------------------------------------------------|
| w = (theta, phi)      | `self.trained(state)`, the base method's model after the last round      |
| N_c, mu_c, Sigma_c    | `pooled.counts`, `pooled.means`, `pooled.cov(c)`                         |
| M_c, G_c              | `virtual.allot(...)[c]`, the rows of `z` with label c                    |
| phi~                  | `state["ccvr"]["head"]`                                                  |

1. Any base method with one global model trains as it always does.
2. Algorithm 1, lines 1 to 10: one query to all clients for N_ck, mu_ck, Sigma_ck of every class (Eq. 2;
   `clients/ccvr.py`).
3. Line 13: Eq. 3 and 4, exactly and in float64, as centred sums of positive semidefinite terms:
       mu_c = sum_k N_ck/N_c mu_ck
       (N_c - 1) Sigma_c = sum_k (N_ck - 1) Sigma_ck + sum_k N_ck (mu_ck - mu_c)(mu_ck - mu_c)^T.
4. Line 14: G_c = M_c draws from N(mu_c, Sigma_c).
5. phi~ = argmin over phi of the mean cross-entropy on the union of the G_c, by SGD from the trained phi; theta stays.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from clients.ccvr import CENTRES, FEATURES, STATISTICS, CCVRClient, CCVRHParams, Proximal
from fedapp.core import gaussian, heads, virtual
from fedapp.core.gaussian import ClassMoments, Mode
from fedapp.core.names import under
from fedapp.learning.training import batch_slices
from fedapp.method import Array, Arrays, BaseHParams, Method, Payload, Reductions, Reply, ServerContext, ServerState
from fedapp.reduce.spec import Each, Gaussians, Query, Reduced, Total
from strategies._composition import PostHoc, built_on, on

W, B = "head.weight", "head.bias"


class CCVR(PostHoc):
    """The base method's strategy, with a calibration of the head after its last round."""

    settings: ClassVar[CCVRHParams] = CCVRHParams()
    queries = ("statistics", "totals", "features")

    def finalize(self, state: ServerState, query: Query) -> ServerState:
        """Query statistics, draw virtual representations, re-train the head, and score before and after."""
        state = super().finalize(state, query)
        s, w = self.settings, self.trained(state)
        pooled, reduced = statistics(w, s.cov, query)
        if s.cov != "diag":
            self.warn_of_few_rows(reduced.clients)
        counts = pooled.counts
        head, y, jitter = self.fitted(w, pooled)
        found: dict[str, Any] = {
            "virtual_samples": len(y),
            "classes_single": np.flatnonzero(counts == 1).tolist(),
            "jitter": {int(c): float(j) for c, j in jitter.items()},
            # Repeats the fit without each client; equal draws make the fits comparable.
            **reduced.audit("statistics", lambda others: self.fitted(w, others)[0], head),
        }
        calibrated = self.calibrated(
            state, {"head": head, "tukey": s.before_head(len(y))}, reduced.clients, counts, **found
        )
        if s.oracle:
            z, y = self.real(w, query)
            best = retrain(w, z, y, s, functools.partial(self.context.rng, "ccvr-oracle-order"))  # Sec. 3.3
            calibrated[self.method.id]["calibration"] |= {
                "oracle": self.score({**state, self.method.id: {"head": best, "tukey": s.before_head(len(y))}}),
                "oracle_samples": len(y),
                "oracle_deployable": False,
            }
        return calibrated

    def fitted(self, w: Arrays, pooled: ClassMoments) -> tuple[Arrays, Array, dict[int, float]]:
        """Return phi~ for statistics, as `on_virtual` does; equal statistics give equal heads."""
        rng = functools.partial(self.context.rng, "ccvr-order")
        return on_virtual(w, pooled, self.settings, self.context.seed, rng)

    def real(self, w: Arrays, query: Query) -> tuple[Array, Array]:
        """Query the clients' real features; return all, or `oracle_samples` per class, drawn uniformly."""
        parts = [under(FEATURES, reply.arrays) for reply in query("features", Payload(common=w))]
        z, y = (np.concatenate([p[name] for p in parts]) for name in ("z", "label"))
        if most := self.settings.oracle_samples:
            rng = self.context.rng("ccvr-oracle")
            rows = np.concatenate([rng.permutation(np.flatnonzero(y == c))[:most] for c in np.unique(y)])
            z, y = z[rows], y[rows]
        return z, y

    def check(self, state: ServerState, reply: Reply) -> str | None:
        """Refuse malformed features."""
        if reply.kind != "query.features":
            return super().check(state, reply)
        z, y = (reply.arrays.get(FEATURES + name) for name in ("z", "label"))
        return heads.problem_of(z, y, self.context.width, self.context.num_classes)

    def repair(self, state: ServerState) -> Payload:
        """Return phi~, and whether Tukey's transform comes before it."""
        return Payload(common=state[self.method.id]["head"], scalars={"tukey": state[self.method.id]["tukey"]})

    def global_arrays(self, state: ServerState) -> Arrays:
        """Return the global model, calibrated if that was done. With clsnorm the head's rows are phi_i / ||phi_i||: a
        plain linear layer then predicts the same.
        """
        arrays = super().global_arrays(state)
        if self.settings.clsnorm:
            norms = np.linalg.norm(arrays[W], axis=1, keepdims=True)
            arrays[W] = (arrays[W] / np.maximum(norms, 1e-12)).astype(arrays[W].dtype)
        return arrays


def statistics(w: Arrays, cov: Mode, query: Query) -> tuple[ClassMoments, Reduced]:
    """Query N_ck, mu_ck, Sigma_ck and pool them (Eq. 3 and 4); the replies come without arrays.

    With cov=sums there are two queries. The first gives N and S1, and with them mu_c. The second gives sums around
    mu_c, so that no large numbers cancel. The result depends only on the clients that answer the second query; with
    secure sums they are those of the first.

    Parameters
    ----------
    w : the model.   cov : form of the covariances.
    """
    question = w
    if cov == "sums":
        first = query("totals", Payload(common=w))
        total = first.totals("totals").sums
        if first.clients:
            question = {**w, CENTRES: total["sum"] / np.maximum(total["count"], 1)[:, None]}  # Eq. 3
    reduced = query("statistics", Payload(common=question))
    return reduced.moments("statistics"), reduced


def on_virtual(
    head: Mapping[str, Array],
    pooled: ClassMoments,
    s: CCVRHParams,
    seed: int,
    rng: Callable[[int], np.random.Generator],
) -> tuple[Arrays, Array, dict[int, float]]:
    """Return phi~ re-trained on virtual representations, their labels, and `Factor.jitter` by class.

    Parameters
    ----------
    head : phi.   pooled : N_c, mu_c, Sigma_c.
    seed : of the draws. Each class has its own stream of random numbers: more samples extend the same set.
    rng : of the order of the samples, by epoch.
    """
    m = virtual.allot(pooled.counts, s.samples, s.mc_mode)
    z, y, jitter = virtual.virtual_features(pooled, m, seed, s.shrink)  # Algorithm 1, line 14
    z = heads.tukey(z) if s.transform in ("sample", "sample-only") else z
    return retrain(head, z, y, s, rng), y, jitter


def retrain(
    head: Mapping[str, Array], z: Array, y: Array, s: CCVRHParams, rng: Callable[[int], np.random.Generator]
) -> Arrays:
    """Return phi~, trained on labelled representations from the present phi; `rng(epoch)` orders them."""
    orders = (rng(epoch).permutation(len(y)) for epoch in range(s.epochs))
    steps = (order[part] for order in orders for part in batch_slices(len(y), s.batch))
    weight, bias = heads.retrain(
        (head[W], head[B]), z, y, steps, s.lr, momentum=s.momentum, weight_decay=s.weight_decay, normalise=s.clsnorm
    )
    return {W: weight, B: bias}


def _totals_problem(context: ServerContext, arrays: Arrays, lost: float) -> str | None:
    c, d = context.num_classes, context.width
    return gaussian.problem_of({**arrays, "square": np.broadcast_to(0.0, (c, d * (d + 1) // 2))}, "sums", c, d)


def gaussians(cov: Mode) -> Reductions:
    """Return the pooled Gaussians; with cov=sums also the sums that their centres are made of."""
    totals = Total(
        STATISTICS,
        lambda context: {
            "count": np.zeros(context.num_classes, np.int64), "sum": np.zeros((context.num_classes, context.width)),
        },
        _totals_problem, lambda arrays: float(arrays["count"].sum()), capped=False, terms={"sum": "features"},
    )  # fmt: skip
    pooled = Gaussians(STATISTICS, cov, CENTRES, least="min_count", fixed=(STATISTICS + "count",))
    return {
        "query.statistics": {"statistics": pooled},
        "query.totals": {"totals": totals} if cov == "sums" else {},
    }


def reductions(hparams: CCVRHParams) -> Reductions:
    """Return the Gaussians; with the oracle also the features."""
    features = {"features": Each(cap=False, sampled=True, least="")} if hparams.oracle else {}
    return {**gaussians(hparams.cov), "query.features": features}


def resolve(hparams: CCVRHParams, lookup: Callable[[str], Method]) -> Method:
    """Return the base method with statistics and calibration added; features leave a client for the oracle alone."""
    return composed(METHOD, hparams, lookup)


def composed(outer: Method, hparams: CCVRHParams, lookup: Callable[[str], Method]) -> Method:
    """Return `outer`, which is CCVR or built on it, on its base."""
    if not hparams.oracle:
        outer = dataclasses.replace(outer, extra_up=(STATISTICS,))
    if hparams.clsprox:
        outer = dataclasses.replace(outer, client=on(Proximal, outer.client, hparams, BaseHParams()))
    return built_on(outer, hparams, lookup)


def _warn(hparams: CCVRHParams, optimizer: str, augment: str) -> str | None:
    return "oracle=true collects the clients' real features: for comparison only" if hparams.oracle else None


METHOD = Method(
    id="ccvr",
    title="CCVR",
    paper="Luo et al., NeurIPS 2021",
    strategy=CCVR,
    client=CCVRClient,
    hparams=CCVRHParams,
    extra_up=(STATISTICS, FEATURES),
    global_model=True,
    deploy_as="received",
    travels="arrays of the base method; once, count, mean and covariance of every class",
    queries=CCVR.queries,
    reduces=reductions,
    resolve=resolve,
    warn=_warn,
)
