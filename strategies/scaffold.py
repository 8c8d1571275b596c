"""SCAFFOLD. Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020: the drift
of local training is corrected by the difference of two directions, the clients' mean one and the client's own.

| symbol (paper)    | here                                                                    |
|-------------------|-------------------------------------------------------------------------|
| x, c              | `state["model"]`, `state["control"]` (trained arrays, no statistics)    |
| y_i, Delta c_i    | `reply.arrays["<name>"]`, `reply.arrays["control/<name>"]`              |
| S, N              | the clients that replied, all clients: `state["clients"]`               |
| eta_g             | `hparams.server_lr`                                                     |

Algorithm 1, server:  x <- x + eta_g / |S| sum_{i in S} (y_i - x);   c <- c + 1 / N sum_{i in S} Delta c_i.
So c is the mean of all clients' c_i after every round, with any participants. With `robust` it is not: a rule shortens
or leaves out Delta c_i, and the client keeps its c_i. With `weights=samples` both means are weighted by n_k. With
`correct=false` too it is FedAvg bit for bit, and so is its first round in any case (tested).
"""

from __future__ import annotations

import numpy as np

from clients.scaffold import CONTROL, ScaffoldClient, ScaffoldHParams
from fedapp.core import names
from fedapp.method import Array, Arrays, Method, Payload, ServerContext, ServerState, TrainDefaults
from fedapp.reduce.spec import Mean, Reduced
from strategies.base import Strategy


class Scaffold(Strategy):
    """Averages models, and keeps the mean of all clients' control variates."""

    def init(self, context: ServerContext) -> ServerState:
        """Return x, and c = 0."""
        state = super().init(context)
        trained = {n: a for n, a in context.initial.items() if not n.endswith(names.RUNNING_STATISTICS)}
        return {**state, "control": {n: np.zeros_like(a) for n, a in trained.items()}, "clients": {}}

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        """Send x and c, the same to all."""
        return Payload(common={**state["model"], **names.prefixed(CONTROL, state["control"])})

    def weight(self, num_samples: int) -> int:
        """Return the weight of a client in both means."""
        return num_samples if self.hparams.weights == "samples" else 1

    def update(self, state: ServerState, server_round: int, reduced: Reduced) -> ServerState:
        """Take the global step, and move c by what the participants' c_i moved; without replies nothing moves."""
        here = {reply.client: self.weight(reply.num_samples) for reply in reduced.clients}
        if not here:
            return state
        x, control, mean = state["model"], state["control"], reduced.arrays("model")
        # A node may join during a run: its c_i = 0 counts from then on, and c is the mean over more clients.
        known = {c.client: self.weight(c.num_samples) for c in self.context.clients} | state["clients"]
        clients = known | here
        now = sum(clients.values())
        before, moved = sum(state["clients"].values()) / now, sum(here.values()) / now
        changes = names.under(CONTROL, mean)
        return {
            **state,
            "model": {n: self.step(a, mean[n], n) for n, a in x.items()},
            "control": {n: (before * c + moved * changes[n]).astype(c.dtype) for n, c in control.items()},
            "clients": clients,
        }

    def step(self, x: Array, mean: Array, name: str) -> Array:
        """Return x + eta_g (mean - x); the mean itself, bit for bit, where eta_g is 1, and of running statistics."""
        eta: float = self.hparams.server_lr
        return mean if eta == 1 or name.endswith(names.RUNNING_STATISTICS) else (1 - eta) * x + eta * mean


def _model_and_changes(context: ServerContext, state: ServerState) -> Arrays:
    """Return x, and 0 for Delta c_i."""
    return {**state["model"], **{CONTROL + n: np.zeros_like(c) for n, c in state["control"].items()}}


METHOD = Method(
    id="scaffold",
    title="SCAFFOLD",
    paper="Karimireddy et al., ICML 2020",
    strategy=Scaffold,
    client=ScaffoldClient,
    hparams=ScaffoldHParams,
    head="none",
    extra_up=(CONTROL,),
    reduces=lambda hparams: {"train": {"model": Mean(_model_and_changes, hparams.weights)}},
    global_model=True,
    deploy_as="received",
    travels="the whole model and a control variate, both ways",
    # Plain SGD, as in the paper, with steps as long as those of the common rate with momentum 0.9: 1 / (1 - 0.9) = 10.
    # On digits, where the common rate is 0.05, the rate is 0.1 too: with 0.2 and more the training loss grows. The
    # limit keeps a correction that is a round old from driving a client away (without it a run on HAR ended in NaN).
    defaults=TrainDefaults(lr=0.1, lr_digits=0.1, momentum=0.0, clip=10.0),
)
