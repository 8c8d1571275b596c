"""FML. Shen et al., Federated Mutual Learning, 2020.

Symbols    w_g -> state["small"], the small model by wire name     w_m,k -> reply.arrays["small/*"]
           S_t -> the clients that replied
Algorithm 1, server:  fork: every client of S_t gets w_g.   merge: w_g <- 1/|S_t| sum_{k in S_t} w_m,k.
The private models never leave their clients. With alpha = beta = 1 and `average=samples` the small model is FedAvg's,
bit for bit, beside Standalone's private models (tested).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from clients.fml import FMLClient, FMLHParams
from clients.mutual import SMALL, build_small, prefixed, small_arrays, stripped
from fedapp import sampling
from fedapp.core.robust import mean_of
from fedapp.method import NONE, Arrays, Method, Payload, Reply, ServerContext, ServerState, Sums
from strategies.base import FedStrategy


def initial_small(context: ServerContext, hparams: FMLHParams) -> Arrays:
    """Build the small model that every client begins with, with the values that FedAvg would give its architecture."""
    small = build_small(
        hparams,
        num_classes=context.num_classes,
        shape=context.shape,
        seed=sampling.server_model_seed(context.seed),
    )
    return small_arrays(small)


def shapes_of(state: ServerState) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the small model's arrays by name."""
    return {name: array.shape for name, array in stripped(state["small"]).items()}


class FML(FedStrategy):
    """Averages the small models; the same one goes to every client."""

    def init(self, context: ServerContext) -> ServerState:
        """Return the small model with its initial values."""
        self.context = context
        return {"small": prefixed(initial_small(context, self.hparams))}

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        """Fork: return the small model, the same for all."""
        return Payload(common=state["small"])

    def check(self, state: ServerState, reply: Reply) -> str | None:
        """Refuse a reply that does not hold exactly the small model's arrays."""
        sent, shapes = stripped(reply.arrays), shapes_of(state)
        if sent.keys() != shapes.keys():
            names = [SMALL + n for n in sorted(sent.keys() ^ shapes.keys())]
            return f"the small model's arrays differ: {', '.join(names[:5])}"
        for name, array in sent.items():
            if array.shape != shapes[name] or not np.issubdtype(array.dtype, np.floating):
                return f"'{SMALL}{name}' is {array.dtype} {array.shape}, expected floating point {shapes[name]}"
        return None

    def further(self, state: ServerState, kind: str) -> Arrays:
        """Return the small model."""
        return dict(state["small"]) if kind == "train" else {}

    def aggregate(self, state: ServerState, server_round: int, replies: Iterable[Reply]) -> ServerState:
        """Merge: average the memes; without replies the small model stays."""
        mean = mean_of(state["small"], self.robust)
        for reply in replies:
            mean.add(reply.arrays, self.weight(reply))
        return {**state, "small": mean.mean()} if mean.replies else state

    def weight(self, reply: Reply) -> float:
        """Weight of a reply in the mean."""
        return float(reply.num_samples) if self.hparams.average == "samples" else 1.0


METHOD = Method(
    id="fml",
    title="FML",
    paper="Shen et al., 2020",
    strategy=FML,
    client=FMLClient,
    hparams=FMLHParams,
    shared=NONE,
    extra_up=("small/",),
    sum_only=lambda hparams: Sums("samples" if hparams.average == "samples" else "uniform"),
    heterogeneous=True,
    same_width=False,
    travels="a small shared model, both ways",
)
