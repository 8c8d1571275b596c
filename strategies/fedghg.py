"""FedGHG: FedGH on Gaussians. Of no paper: FedGH (Yi et al., ACM MM 2023) on virtual features, as CCVR (Luo et al.,
NeurIPS 2021) draws them, in the place of class means.

| symbol               | here                                                                              |
|----------------------|-----------------------------------------------------------------------------------|
| theta = (W, b)       | state["model"], as in FedGH                                                       |
| mu_ks, Sigma_ks, s   | rows of reply.arrays["lar"] and ["cov"], entries of ["labels"]                    |
| n_ks                 | reply.arrays["counts"], sent with `weights=count` only                            |
| M                    | hparams.header_epochs: passes of a round, each over a fresh draw of every row     |
| rho                  | `between_share`, state["between"]                                                 |

Server, in pass m of a round, for each client k in S^t and each of its classes s:
    z ~ N(mu_ks, Sigma_ks),   theta <- theta - eta_theta * grad CE(W z + b, s)      (FedGH's Eq. 4)
With Sigma = 0 this is FedGH with `header_epochs` = M, bit for bit: that run shows the worth of the covariances.
`source=pooled` draws from one Gaussian a class, as CCVR does. That means something only where features mean the
same at all clients, so the server measures which share of the variance within classes lies between the clients' means,
    rho = sum_s sum_k b_k |mu_ks - mu_s|^2 / (that + sum_s sum_k a_k tr Sigma_ks),
over classes of two clients or more, (a_k, b_k) as in `pool`. Where it is above one half in
round 1 `source=pooled` is refused; later rounds above it are named in the summary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from clients.fedghg import FedGHGClient, FedGHGHParams
from fedapp.core import mixture
from fedapp.core.mixture import Gaussian, between_share, by_class, pool
from fedapp.core.virtual import draw, factorise
from fedapp.errors import BadRequest, Impossible
from fedapp.learning.metrics import tidy
from fedapp.method import HEAD, NONE, Method, Reductions, Reply, Scored, ServerContext, ServerState
from fedapp.reduce.spec import Rows
from strategies.fedgh import LEAST, FedGH, Float64, LARs

MOST_BETWEEN = 0.5
"""Largest share of the variance within classes between clients at which their Gaussians are pooled."""


class FedGHG(FedGH):
    """FedGH whose head sees draws from the clients' class Gaussians."""

    records: ClassVar[tuple[str, ...]] = (*FedGH.records, "between")

    def init(self, context: ServerContext) -> ServerState:
        """Return FedGH's state and an empty record of rho."""
        return {**super().init(context), "between": np.zeros(0)}

    def check(self, state: ServerState, reply: Reply) -> str | None:
        """Refuse replies without valid LARs, variances and, if asked for, counts."""
        s, cov, counts = self.hparams, reply.arrays.get("cov"), reply.arrays.get("counts")
        if (cov is None) != (s.cov == "none") or (counts is None) != (s.weights == "equal"):
            kind = f"a reply with cov={s.cov} and weights={s.weights}"
            return Impossible(f"{kind} has other arrays than {sorted(reply.arrays)}")
        return mixture.problem_of(reply.arrays, self.context.width, s.cov == "full", reply.num_samples)

    def noticed(self, state: ServerState, answers: Sequence[Reply], lars: Sequence[LARs]) -> ServerState:
        """Note rho.

        Raises
        ------
        BadRequest : `source=pooled` of features that mean something else at each client. Only in round 1: what has
            been trained since is not lost for it.
        """
        rho = between_share(by_class(self.gaussians(answers, lars)), self.hparams.weights == "equal")
        first = not len(state["between"])
        if first and self.hparams.source == "pooled" and rho > MOST_BETWEEN and not self.hparams.force:
            raise BadRequest(
                f"fedghg: {rho:.0%} of the variance within classes lies between clients, so their features do not mean "
                "the same and one Gaussian a class describes none of them: use source=client, or force=true to try it"
            )
        return {"between": np.append(state["between"], rho)}

    def gaussians(self, answers: Sequence[Reply], lars: Sequence[LARs]) -> list[dict[int, Gaussian]]:
        """Return each client's Gaussians by class: the LARs are their means."""
        every = (mixture.gaussians(r.arrays, self.context.width, self.hparams.cov == "full") for r in answers)
        return [{c: of[c]._replace(mean=mu) for mu, c in zip(r, s.tolist())} for of, (r, s) in zip(every, lars)]

    def passes(self, server_round: int, answers: Sequence[Reply], lars: Sequence[LARs]) -> Iterator[Sequence[LARs]]:
        """Yield draws in the place of the LARs, each pass new ones."""
        own = self.gaussians(answers, lars)
        sources: dict[tuple[int, ...], dict[int, Gaussian]] = {(reply.client,): g for reply, g in zip(answers, own)}
        if self.hparams.source == "pooled":
            equal = self.hparams.weights == "equal"
            sources = {(): {c: pool(of, equal)[0] for c, of in by_class(own).items()}}
        m, d = self.hparams.header_epochs, self.context.width
        drawn = [
            (np.stack([self.draws((server_round, *who, c), g, (m, d)) for c, g in of.items()]), np.array([*of]))
            for who, of in sources.items()
        ]
        return ([LARs(z[:, epoch], s) for z, s in drawn] for epoch in range(m))

    def draws(self, stream: tuple[int, ...], of: Gaussian, shape: tuple[int, int]) -> Float64:
        """Return draws (M, d); each (round, client, class) has a stream of its own. Without covariances all are mu."""
        if self.hparams.cov == "none":
            return np.broadcast_to(of.mean, shape)
        return draw(of.mean, factorise(of.cov), self.context.rng("gaussians", *stream).standard_normal(shape))

    def report(self, state: ServerState, final: Scored) -> dict[str, Any]:
        """Return FedGH's entries, rho of every round and, with `source=pooled`, the rounds that it was too large in."""
        found = {**super().report(state, final), "between_clients": [tidy(v) for v in state["between"].tolist()]}
        apart = (np.flatnonzero(state["between"] > MOST_BETWEEN) + 1).tolist()
        return {**found, "pooled_apart": apart} if self.hparams.source == "pooled" and apart else found


def _reductions(hparams: FedGHGHParams) -> Reductions:
    counted = "counts" if hparams.weights == "count" else ""
    return {"train": {"lar": Rows("lar", further=("cov", "counts"), counted=counted, least=LEAST)}}


METHOD = Method(
    id="fedghg",
    title="FedGH on Gaussians",
    paper="none: FedGH with CCVR's draws",
    strategy=FedGHG,
    client=FedGHGClient,
    hparams=FedGHGHParams,
    shared=HEAD,
    up=NONE,
    extra_up=("lar", "labels", "cov", "counts"),
    reduces=_reductions,
    heterogeneous=True,
    travels="class means and variances up, the head down",
    columns=("lar-seconds",),
)
