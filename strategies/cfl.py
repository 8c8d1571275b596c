"""CFL. Sattler, Mueller, Samek, Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under
Privacy Constraints, IEEE TNNLS 2021.

Symbols    theta_c -> state["clusters"][c]     members of c -> state["members"][c]     Delta theta_i -> updates[i]
           alpha_ij = cos(Delta theta_i, Delta theta_j) -> cosine     eps_1, eps_2 -> `_limits`     gamma_max -> gamma
Each round, for each cluster c:
    stationary      ||mean_{i in c} Delta theta_i|| < eps_1
    incongruent     max_{i in c} ||Delta theta_i|| > eps_2
    if both: split c into c_1, c_2 by `bipartition`, if sqrt((1 - max_{c_1 x c_2} alpha) / 2) >= gamma_max
    theta_c <- theta_c + mean_{i in c} Delta theta_i   (of each cluster, after its split)

The paper's c_1, c_2 minimise max_{c_1 x c_2} alpha over all bipartitions. Single linkage on 1 - alpha finds this
optimum: of all pairs of clusters, the two that it leaves last have the largest least distance. The released code uses
complete linkage, which looks at the largest distances instead.

Lengths of updates scale with learning rate and model, so by default the limits are relative: eps_1 to the cluster's
longest update, eps_2 to the longest of the run so far. Norms are means over the last `smooth` tests.
A test needs an update of every member that was made since the cluster exists. Where only part of the clients answers,
the last update of each is kept for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from clients.base import FedClient
from fedapp.core import names
from fedapp.core.averages import blended
from fedapp.core.pairwise import cosine_from_gram, gram
from fedapp.method import Arrays, BaseHParams, Blend, Method, Payload, Scored, ServerContext, ServerState
from fedapp.reduce.spec import Each, Reduced
from strategies.base import Strategy


class CFLHParams(BaseHParams):
    """Hyperparameters of CFL."""

    thresholds: Literal["relative", "absolute"] = Field(
        "relative", description="relative: r1 and r2; absolute: eps1 and eps2 (paper)"
    )
    r1: float = Field(0.4, ge=0, description="a cluster is stationary below r1 x its longest update")
    r2: float = Field(0.5, ge=0, description="its members disagree above r2 x the longest update of the run so far")
    eps1: float = Field(0.4, ge=0, description="a cluster is stationary below this norm (authors' code: 0.4)")
    eps2: float = Field(1.6, ge=0, description="its members disagree above this norm (authors' code: 1.6)")
    linkage: Literal["single", "complete"] = Field(
        "single",
        description="how a cluster is cut in two: single finds the optimum of the paper's criterion; complete is the "
        "authors' code, whose halves may lie closer together",
    )
    gamma: float = Field(
        0.7,
        ge=0,
        le=1,
        description="gamma_max, least separation of the two halves: 0.7 = no pair across them points the same way, 0 "
        "asks for none (authors' code: none)",
    )
    smooth: int = Field(3, ge=1, description="tests whose norms are averaged (paper: 1)")
    start_round: int = Field(10, ge=0, description="no split up to this round (authors' code: 20)")
    min_size: int = Field(2, ge=1, description="clusters of this size or smaller stay whole (authors' code: 2)")
    max_stale: int = Field(0, ge=0, description="oldest kept update that a test may use, in rounds; 0 = any age")
    weighting: Literal["uniform", "samples"] = Field(
        "uniform", description="how a cluster's members are averaged: all alike (paper), or by n_k"
    )


def bipartition(cosine: NDArray[np.float64], method: str = "single") -> NDArray[np.bool_]:
    """Split m >= 2 clients in two by their cosines.

    Parameters
    ----------
    cosine : (m, m) symmetric, in [-1, 1].
    method : `single`: the largest cosine across the halves is as small as it can be; `complete`: complete linkage.

    Returns
    -------
    (m,) bool, False for the half that holds the first client; both halves have members.
    """
    # 1 - cos merges in the order of -cos, and is the non-negative distance that scipy asks for.
    from scipy.cluster.hierarchy import cut_tree, linkage
    from scipy.spatial.distance import squareform

    tree = linkage(squareform(1.0 - cosine, checks=False), method=method)
    labels: NDArray[np.int64] = cut_tree(tree, n_clusters=2).ravel()
    return np.asarray(labels != labels[0])


class CFL(Strategy):
    """FedAvg within clusters that are split where their members pull in different directions."""

    def init(self, context: ServerContext) -> ServerState:
        """Return one cluster of all clients."""
        self.context = context
        return {
            "clusters": {0: dict(context.initial)},
            "members": {0: list(context.ids())},
            "born": {0: 0},
            "norms": np.zeros((0, 4)),  # rows: round, cluster, norm of the mean update, norm of the longest update
            "updates": {},
            "seen": {},
        }

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        """Return the model of the client's cluster, the same arrays for all its members."""
        return Payload(common=state["clusters"][self._cluster_of(state["members"], client)])

    def update(self, state: ServerState, server_round: int, reduced: Reduced) -> ServerState:
        """Test every cluster, split where due, and average within the clusters that result."""
        got = {reply.client: reply for reply in reduced.each()}
        clusters, born, norms = dict(state["clusters"]), dict(state["born"]), state["norms"]
        members = {c: list(m) for c, m in state["members"].items()}
        updates, seen = dict(state["updates"]), dict(state["seen"])
        for client, reply in got.items():
            home = self._cluster_of(members, client)
            if client not in members[home]:
                members[home] = sorted([*members[home], client])
            updates[client] = _difference(reply.arrays, clusters[home])
            seen[client] = server_round
        for c in sorted(members):
            if not all(i in updates for i in members[c]):
                continue
            # ||mean_i d_i||^2 is the mean of all products <d_i, d_j>; rounding can leave it a little below 0.
            inner = gram([updates[i] for i in members[c]])
            norms = np.vstack(
                [norms, [server_round, c, np.sqrt(max(inner.mean(), 0.0)), np.sqrt(inner.diagonal().max())]]
            )
            if len(members[c]) <= self.hparams.min_size or not self._due(norms, server_round, c, born[c]):
                continue
            cosine = cosine_from_gram(inner)
            side = bipartition(cosine, self.hparams.linkage)
            if np.sqrt((1.0 - cosine[np.ix_(side, ~side)].max()) / 2.0) < self.hparams.gamma:
                continue
            new = max(clusters) + 1
            clusters[new], born[new], born[c] = clusters[c], server_round, server_round
            members[new] = [i for i, other in zip(members[c], side) if other]
            members[c] = [i for i, other in zip(members[c], side) if not other]
        # The split comes first, so that the updates of this round already go to their own half.
        means = {c: reduced.mean(model, c) for c, model in clusters.items()}
        for c in clusters:
            here = [got[i] for i in members[c] if i in got]
            if here:
                weights = [float(r.num_samples) if self.hparams.weighting == "samples" else 1.0 for r in here]
                means[c].add_many([({n: r.arrays[n] for n in clusters[c]}, w) for r, w in zip(here, weights)])
                clusters[c] = means[c].mean()
        # What is kept may be used in the next round, so the test above needs no look at its age.
        kept = [
            i for c, m in members.items() for i in m if i in updates and self._usable(seen[i], born[c], server_round)
        ]
        return {
            "clusters": clusters, "members": members, "born": born, "norms": norms,
            "updates": {i: updates[i] for i in kept}, "seen": {i: seen[i] for i in kept},
        }  # fmt: skip

    def report(self, state: ServerState, final: Scored) -> dict[str, Any]:
        """Return the members of each cluster, and the norms on which thresholds are chosen."""
        return {"clusters": list(state["members"].values()), "norms": state["norms"].tolist()}

    def blend(self, state: ServerState, sizes: Mapping[int, float]) -> Blend | None:
        """Return the weights within the clusters."""
        cluster = {i: c for c, inside in state["members"].items() for i in inside}
        return blended(cluster, sizes, self.hparams.weighting)

    # ---- pieces --------------------------------------------------------------------------------------------------

    def _usable(self, seen: int, born: int, server_round: int) -> bool:
        """Whether an update of round `seen`, for a cluster made in round `born`, may be used after `server_round`."""
        return seen > born and (self.hparams.max_stale == 0 or server_round - seen < self.hparams.max_stale)

    def _due(self, norms: NDArray[np.float64], server_round: int, cluster: int, born: int) -> bool:
        """Whether a cluster is stationary and its members disagree."""
        own = norms[(norms[:, 1] == cluster) & (norms[:, 0] > born)][-self.hparams.smooth :]
        if server_round <= self.hparams.start_round or len(own) < self.hparams.smooth:
            return False
        mean, longest = own[:, 2:].mean(axis=0)
        if self.hparams.thresholds == "absolute":
            return bool(mean < self.hparams.eps1 and longest > self.hparams.eps2)
        return bool(mean < self.hparams.r1 * longest and longest > self.hparams.r2 * norms[:, 3].max())

    @staticmethod
    def _cluster_of(members: Mapping[int, list[int]], client: int) -> int:
        """Return the client's cluster; a client that came later joins the largest (the first of equal ones)."""
        for c, inside in members.items():
            if client in inside:
                return c
        return max(members, key=lambda c: len(members[c]))


def _difference(model: Mapping[str, Any], start: Mapping[str, Any]) -> Arrays:
    """Return the update of what gradients train; running statistics of normalisation layers have no direction."""
    trained = [n for n in start if not n.endswith(names.RUNNING_STATISTICS)]
    return {n: model[n] - start[n] for n in trained}


METHOD = Method(
    id="cfl",
    title="CFL",
    paper="Sattler et al., TNNLS 2021",
    strategy=CFL,
    client=FedClient,
    hparams=CFLHParams,
    head="none",
    reduces={"train": {"models": Each(grouped=True)}},
    deploy_as="received",
    travels="the whole model, both ways (one per cluster)",
)
