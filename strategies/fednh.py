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

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from clients.fednh import COUNT, PROTO_SUM, FedNHClient, FedNHHParams
from fedapp.core.robust import class_means, mean_of
from fedapp.errors import Impossible
from fedapp.method import ALL, Array, Arrays, Method, Reply, ServerState, Sums, TrainDefaults
from strategies.base import FedStrategy

SHORTEST = 1e-6
"""A sum of unit vectors shorter than this has no direction."""


class FedNH(FedStrategy):
    """Averages extractors, and moves prototypes towards the classes' mean directions."""

    def further(self, state: ServerState, kind: str) -> Arrays:
        """Return sums and counts of all classes."""
        if kind != "train":
            return {}
        head = state["model"]["head.weight"]
        return {PROTO_SUM: np.zeros(head.shape, np.float32), COUNT: np.zeros(len(head), np.int64)}

    def aggregate(self, state: ServerState, server_round: int, replies: Iterable[Reply]) -> ServerState:
        """Average theta and s, and move W; without `robust`, sums run as replies arrive."""
        model = state["model"]
        trained = [name for name in model if not name.startswith("head.")]
        mean = mean_of({name: model[name] for name in trained}, self.robust)
        proto_sum = np.zeros(model["head.weight"].shape)
        count = np.zeros(len(proto_sum), dtype=np.int64)
        directions = []
        for reply in replies:
            weight = 1.0 if self.hparams.weights == "uniform" else float(reply.num_samples)
            mean.add({name: reply.arrays[name] for name in trained}, weight)
            if self.robust.active:
                held = np.flatnonzero(reply.arrays[COUNT])
                n = reply.arrays[COUNT][held]
                directions.append((held, reply.arrays[PROTO_SUM][held].astype(np.float64) / n[:, None], n))
                continue
            proto_sum += reply.arrays[PROTO_SUM]
            count += reply.arrays[COUNT]
        if mean.replies == 0:
            return state
        noted: ServerState = {}
        if self.robust.active:
            found = class_means(directions, model["head.weight"], self.robust)  # mu_c, class by class
            proto_sum, count, noted = found.values, found.sent.astype(np.int64), self.noted(state, found.weaker)
        prototypes = move_prototypes(model["head.weight"], proto_sum, count, self.hparams.rho)
        return {**state, "model": {**model, **mean.mean(), "head.weight": prototypes}, **noted}

    def check(self, state: ServerState, reply: Reply) -> str | None:
        """Refuse class sums that do not fit their counts."""
        proto_sum, count = reply.arrays.get(PROTO_SUM), reply.arrays.get(COUNT)
        shape = (self.context.num_classes, self.context.width)
        if proto_sum is None or count is None:
            return f"'{PROTO_SUM}' or '{COUNT}' is missing"
        if proto_sum.shape != shape or count.shape != shape[:1]:
            got = f"'{PROTO_SUM}' has shape {proto_sum.shape} and '{COUNT}' {count.shape}"
            return Impossible(f"{got}, expected {shape} and {shape[:1]}")
        if not np.issubdtype(count.dtype, np.integer) or (count < 0).any() or count.sum() != reply.num_samples:
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
    sum_only=lambda hparams: Sums(hparams.weights, totals=(PROTO_SUM, COUNT)),
    per_class="",
    global_model=True,
    deploy_as="received",
    travels="the whole model down; extractor, class mean directions and class counts up",
    defaults=TrainDefaults(clip=10.0),
)
