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

With `robust`, statistics that are out of line are bounded or left out before line 13. Then phi~ is fitted once more
without each client, from the same draws, and a client without whom it moves much farther than without others is named.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from clients.ccvr import CENTRES, FEATURES, STATISTICS, CCVRClient, CCVRHParams
from fedapp.core import gaussian, heads, privacy, virtual
from fedapp.core.gaussian import ClassMoments, MomentsPool
from fedapp.core.robust import FAR, FEW, capped_statistics, pulls, screened_statistics
from fedapp.learning.training import batch_slices
from fedapp.method import ALL, Array, Arrays, Method, Payload, Query, Reply, ServerState, Sums
from fedapp.transport.secure import Released
from strategies._composition import PostHoc, built_on
from strategies.base import of_joint

W, B = "head.weight", "head.bias"


@dataclasses.dataclass(frozen=True)
class Screening:
    """What `robust` made of the clients' statistics.

    Attributes
    ----------
    found : how much was bounded or left out.   answers : what is left, by client.
    """

    found: dict[str, int] = dataclasses.field(default_factory=dict)
    answers: dict[int, Arrays] = dataclasses.field(default_factory=dict)


class CCVR(PostHoc):
    """The base method's strategy, with a calibration of the head after its last round."""

    settings: ClassVar[CCVRHParams] = CCVRHParams()
    answers: ClassVar[Mapping[str, str]] = {"statistics": STATISTICS, "totals": STATISTICS, "features": FEATURES}
    counted: Mapping[int, Array] = {}
    """Class counts of the first of two answers, by client, while the second one is asked for."""

    def finalize(self, state: ServerState, query: Query) -> ServerState:
        """Query statistics, draw virtual representations, re-train the head, and score before and after."""
        state = super().finalize(state, query)
        s, w = self.settings, self.trained(state)
        replies, pooled, screening = self.statistics(w, query)
        counts = pooled.counts
        head, y, jitter = self.fitted(w, pooled)
        found: dict[str, Any] = {
            "virtual_samples": len(y),
            "classes_single": np.flatnonzero(counts == 1).tolist(),
            "jitter": {int(c): float(j) for c, j in jitter.items()},
            **({"screened": screening.found | self.far_pulled(w, head, screening)} if screening.found else {}),
        }
        calibrated = self.calibrated(state, {"head": head, "tukey": s.before_head(len(y))}, replies, counts, **found)
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

    def far_pulled(self, w: Arrays, head: Arrays, screening: Screening) -> dict[str, Any]:
        """Fit phi~ without each client, and warn of those without whom it moves more than `FAR` times the median."""
        clients = list(screening.answers) if len(screening.answers) >= FEW else []
        without = []
        for left_out in clients:
            others = (arrays for client, arrays in screening.answers.items() if client != left_out)
            without.append(self.fitted(w, self.pooled(others))[0])
        far = {c: round(float(p), 2) for c, p in zip(clients, pulls(without, head)) if p > FAR}
        for client, pull in far.items():
            self.context.warn(
                f"without the statistics of client {client} the calibrated head moves {pull:g} times as far as without "
                "those of the median client: it lies, or it holds classes that hardly anybody else has"
            )
        return {"pulls": far}

    def pooled(self, answers: Iterable[Arrays], centres: Array | None = None) -> ClassMoments:
        """Pool statistics of clients (Eq. 3 and 4)."""
        pool = MomentsPool(self.context.num_classes, self.context.width, self.settings.cov, centres)
        for arrays in answers:
            pool.add(arrays)
        return pool.moments()

    def statistics(self, w: Arrays, query: Query) -> tuple[list[Reply], ClassMoments, Screening]:
        """Query N_ck, mu_ck, Sigma_ck and pool them as they arrive (Eq. 3 and 4); the replies come without arrays.

        With `robust` all are kept, and what is out of line is bounded or left out before they are pooled. With
        `count-cap` alone all are kept too, and a client's counts are scaled to what is believed of it, with its sums.

        With cov=sums there are two queries. The first gives N and S1, and with them mu_c. The second gives sums around
        mu_c, so that no large numbers cancel. The server needs only totals over clients. The result depends only on
        the clients that answer the second query; with secure sums they are those of the first.
        """
        c, d = self.context.num_classes, self.context.width
        if self.privacy is not None:
            return self.noised_statistics(w, query)
        replies, question, centres = [], w, None
        if self.settings.cov == "sums":
            count, total = np.zeros(c, dtype=np.int64), np.zeros((c, d))
            counted = {}
            for reply, arrays in self.answers_to(query, "totals", Payload(common=w)):
                counted[reply.client] = arrays["count"]
                count += arrays["count"]
                total += arrays["sum"]
            self.counted = counted
            centres = total / np.maximum(count, 1)[:, None]  # Eq. 3
            question = {**w, CENTRES: centres}

        def arriving() -> Iterator[Arrays]:
            for reply, arrays in self.answers_to(query, "statistics", Payload(common=question)):
                replies.append(reply)
                yield arrays

        if self.settings.cov == "sums" or not self.robust.rules:  # no single class mean is known in sums
            cap = self.robust.count_cap
            believed = capped_statistics(list(arriving()), cap) if cap else arriving()
            return replies, self.pooled(believed, centres), Screening()
        kept, found = screened_statistics(list(arriving()))
        screening = Screening(found, {r.client: arrays for r, arrays in zip(replies, kept, strict=True)})
        return replies, self.pooled(kept), screening

    def noised_statistics(self, w: Arrays, query: Query) -> tuple[list[Reply], ClassMoments, Screening]:
        """Query sums with noise, add them up, and pool the nearest that are possible; as `statistics`."""
        joint = self._joint()
        totals: dict[str, Any] = {}
        replies = []
        for reply, arrays in self.believed(self.answers_to(query, "statistics", Payload(common=w)), joint.length):
            totals = {n: totals.get(n, 0.0) + a for n, a in arrays.items()}
            replies.append(reply)
        moments = gaussian.unpack(totals["square"], joint.width)
        count, total, square = privacy.projected(totals["count"], totals["sum"], moments)
        assert square is not None
        # Whole numbers of samples, with the means that belong to the others.
        whole = np.rint(count)
        ratio = (whole / count)[:, None]
        pool = MomentsPool(joint.classes, joint.width, "sums")
        pool.add({"count": whole.astype(np.int64), "sum": total * ratio, "square": gaussian.pack(square) * ratio})
        return replies, pool.moments(), Screening()

    def released(self, kind: str, template: Arrays) -> Released | None:
        """Return the joint vector of counts, sums and second moments of each class."""
        if self.privacy is None or kind != "query.statistics":
            return super().released(kind, template)
        return of_joint(self.privacy, self._joint(), STATISTICS)

    def _joint(self) -> privacy.Joint:
        return privacy.Joint(self.context.num_classes, self.context.width, "classes")

    def real(self, w: Arrays, query: Query) -> tuple[Array, Array]:
        """Query the clients' real features; return all, or `oracle_samples` per class, drawn uniformly."""
        parts = [arrays for _, arrays in self.answers_to(query, "features", Payload(common=w))]
        z, y = (np.concatenate([p[name] for p in parts]) for name in ("z", "label"))
        if most := self.settings.oracle_samples:
            rng = self.context.rng("ccvr-oracle")
            rows = np.concatenate([rng.permutation(np.flatnonzero(y == c))[:most] for c in np.unique(y)])
            z, y = z[rows], y[rows]
        return z, y

    def further(self, state: ServerState, kind: str) -> Arrays:
        """Return the sums of one client."""
        c, d = self.context.num_classes, self.context.width
        if kind not in ("query.totals", "query.statistics"):
            return super().further(state, kind)
        sums = {"count": np.zeros(c, np.int64), "sum": np.zeros((c, d))}
        square = {} if kind == "query.totals" else {"square": np.zeros((c, d * (d + 1) // 2))}
        return {STATISTICS + name: array for name, array in (sums | square).items()}

    def check_answer(self, kind: str, arrays: Arrays, reply: Reply) -> str | None:
        """Refuse arrays that are not statistics or features, and statistics of more samples than the client has."""
        c, d = self.context.num_classes, self.context.width
        if kind == "features":
            return heads.problem_of(arrays.get("z"), arrays.get("label"), d, c)
        if kind == "totals":
            arrays = {**arrays, "square": np.broadcast_to(0.0, (c, d * (d + 1) // 2))}
        if self.privacy is not None:
            return self._joint().problem_of(arrays)
        problem = gaussian.problem_of(arrays, self.settings.cov, c, d)
        if problem is None and arrays["count"].sum() > reply.num_samples:
            return f"statistics of {arrays['count'].sum()} samples from a client of {reply.num_samples}"
        # Of a sum, a client may have been blocked after the first answer.
        before = self.counted.get(reply.client) if kind == "statistics" and not reply.members else None
        if problem is None and before is not None and not np.array_equal(before, arrays["count"]):
            return "its class counts are not those of its first answer"
        return problem

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
        head[W], head[B], z, y, steps, s.lr, momentum=s.momentum, weight_decay=s.weight_decay, normalise=s.clsnorm
    )
    return {W: weight, B: bias}


def resolve(hparams: CCVRHParams, lookup: Callable[[str], Method]) -> Method:
    """Return the base method with statistics and calibration added; features leave a client for the oracle alone."""
    return composed(METHOD, hparams, lookup)


def composed(outer: Method, hparams: CCVRHParams, lookup: Callable[[str], Method]) -> Method:
    """Return `outer`, which is CCVR or built on it, on its base."""
    if not hparams.oracle:
        outer = dataclasses.replace(outer, extra_up=(STATISTICS,), per_class="min_count")
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
    shared=ALL,
    extra_up=(STATISTICS, FEATURES),
    per_class="",
    global_model=True,
    deploy_as="received",
    travels="what the base method shares; once, count, mean and covariance of every class",
    queries=("statistics", "totals", "features"),
    sum_only=lambda hparams: Sums(totals=(STATISTICS,)) if hparams.cov == "sums" and not hparams.oracle else None,
    # Sums over all samples do not say which class means are out of line.
    guards=lambda hparams: ("count-cap",) if hparams.cov == "sums" else ("own", "count-cap"),
    # The counts of five classes out of ten that one client makes up outweigh four honest clients with 10.
    count_cap=2.0,
    private=("example",),
    resolve=resolve,
    warn=_warn,
)
