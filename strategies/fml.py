"""FML. Shen et al., Federated Mutual Learning, 2020.

Symbols    w_g -> state["small"], the small model by wire name     w_m,k -> reply.arrays["small/*"]
           S_t -> the clients that replied
Algorithm 1, server:  fork: every client of S_t gets w_g.   merge: w_g <- 1/|S_t| sum_{k in S_t} w_m,k.
The private models never leave their clients. With alpha = beta = 1 and `average=samples` the small model is FedAvg's,
bit for bit, with the private models of training alone (tested).
"""

from __future__ import annotations

from clients.fml import FMLClient, FMLHParams
from clients.mutual import build_small, prefixed, small_arrays
from fedapp import sampling
from fedapp.method import NONE, Method, Payload, ServerContext, ServerState
from fedapp.reduce.spec import Mean, Reduced, weights_of
from strategies.base import Strategy


class FML(Strategy):
    """Averages the small models; the same one goes to every client."""

    def init(self, context: ServerContext) -> ServerState:
        """Return the small model, with the initial values that FedAvg would give its architecture."""
        self.context, seed = context, sampling.server_model_seed(context.seed)
        small = build_small(self.hparams, num_classes=context.num_classes, shape=context.shape, seed=seed)
        return {"small": prefixed(small_arrays(small))}

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        """Fork: return the small model, the same for all."""
        return Payload(common=state["small"])

    def update(self, state: ServerState, server_round: int, reduced: Reduced) -> ServerState:
        """Merge: average the memes; without replies the small model stays."""
        return {**state, "small": reduced.arrays("small")} if reduced.clients else state


METHOD = Method(
    id="fml",
    title="FML",
    paper="Shen et al., 2020",
    strategy=FML,
    client=FMLClient,
    hparams=FMLHParams,
    shared=NONE,
    extra_up=("small/",),
    reduces=lambda hparams: {"train": {"small": Mean(lambda _, state: state["small"], weights_of(hparams.average))}},
    heterogeneous=True,
    same_width=False,
    travels="a small shared model, both ways",
)
