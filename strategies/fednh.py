"""FedNH. Dai et al., Tackling Data Heterogeneity in Federated Learning with Class Prototypes, AAAI 2023: the head is a
set of class prototypes that start orthonormal and follow the clients' class means slowly.

| symbol (paper)    | here                                                                |
|-------------------|---------------------------------------------------------------------|
| theta, s          | `state["model"]["features.*"]`, `state["model"]["scale"]`           |
| W (rows W_c)      | `state["model"]["head.weight"]`, (C, d), rows of length 1           |
| n_kc mu_kc, n_kc  | `reply.arrays["nh/proto_sum"]`, `reply.arrays["nh/count"]`          |
| rho               | `hparams.rho`                                                       |

Server, over the participants S_t:
    theta, s <- mean over k of theta_k, s_k                          (unweighted, as in the released code)
    mu_c     <- normalise( sum_k n_kc mu_kc / sum_k n_kc )
    W_c      <- normalise( rho W_c + (1 - rho) mu_c )                for classes that somebody has; the others stay.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clients.fednh import COUNT, PROTO_SUM, FedNHClient, FedNHHParams
from fedapp.method import ALL, Array, Arrays, Method, Reductions, Reply, ServerContext, ServerState, TrainDefaults
from fedapp.reduce.spec import ClassMean, Mean, Reduced
from strategies.base import Strategy

SHORTEST = 1e-6
"""A sum of unit vectors shorter than this has no direction."""


class FedNH(Strategy):
    """Averages bodies, and moves prototypes towards the classes' mean directions."""

    def update(self, state: ServerState, server_round: int, reduced: Reduced) -> ServerState:
        """Take theta and s, and move W."""
        if not reduced.clients:
            return state
        model, mu = state["model"], reduced.classes("directions")
        prototypes = move_prototypes(model["head.weight"], mu.values, mu.seen.astype(np.int64), self.hparams.rho)
        return {**state, "model": {**model, **reduced.arrays("trained"), "head.weight": prototypes}}

    def check(self, state: ServerState, reply: Reply) -> str | None:
        """Refuse class sums that do not fit their counts."""
        proto_sum, count = reply.arrays[PROTO_SUM], reply.arrays[COUNT]
        if (count < 0).any() or count.sum() != reply.num_samples:
            return f"'{COUNT}' must hold whole numbers that add up to num-examples = {reply.num_samples}"
        # One percent of tolerance for half precision on the wire.
        if (np.linalg.norm(proto_sum, axis=1) > 1.01 * count).any():
            return f"'{PROTO_SUM}' holds a class mean of normalised features that is longer than 1"
        return None


def move_prototypes(w: Array, proto_sum: NDArray[np.float64], count: Array, rho: float) -> Array:
    """Return the prototypes after a round, (C, d) float32 with rows of length 1.

    Parameters
    ----------
    w : (C, d) prototypes before.
    proto_sum, count : sum over clients of n_kc mu_kc, (C, d), and of n_kc, (C,).
    rho : share of the old prototypes, in [0, 1].

    Notes
    -----
    A row stays, bit for bit, where no client has the class, where rho is 1, and where a sum has no direction.
    """
    new = w.copy()
    if rho == 1:
        return new
    for c in np.flatnonzero(count):
        mu = proto_sum[c] / count[c]
        if (length := np.linalg.norm(mu)) > SHORTEST:
            # float64: rounding would add up over rounds, since W_c is carried from one to the next.
            mixed = rho * w[c].astype(np.float64) + (1 - rho) * mu / length
            if (length := np.linalg.norm(mixed)) > SHORTEST:
                new[c] = mixed / length
    return new


def _reductions(hparams: FedNHHParams) -> Reductions:
    """Return the mean of theta and s, and mu."""
    directions = ClassMean(PROTO_SUM, lambda context, state: state["model"]["head.weight"], COUNT, summed=True)
    return {"train": {"trained": Mean(_trained, hparams.weights), "directions": directions}}


def _trained(context: ServerContext, state: ServerState) -> Arrays:
    return {name: array for name, array in state["model"].items() if not name.startswith("head.")}


METHOD = Method(
    id="fednh",
    title="FedNH",
    paper="Dai et al., AAAI 2023",
    strategy=FedNH,
    client=FedNHClient,
    hparams=FedNHHParams,
    shared=(*ALL, "scale"),
    up=("features.", "scale"),
    extra_up=(PROTO_SUM, COUNT),
    reduces=_reductions,
    global_model=True,
    deploy_as="received",
    travels="the whole model down; body, class mean directions and class counts up",
    defaults=TrainDefaults(clip=10.0),
)
