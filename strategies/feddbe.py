"""FedDBE. Zhang et al., Eliminating Domain Bias for Federated Learning in Representation Space, NeurIPS 2023: FedAvg,
where a private vector takes up each client's shift of the representations, and their means are held together.

| symbol (paper)   | here                                                                        |
|------------------|-----------------------------------------------------------------------------|
| theta            | `state["model"]`                                                            |
| z-bar_i^g        | `reply.arrays["dbe/mean"]`, (d,), in round 1 only                           |
| z-bar^g          | `state["mean"]`, (d,), from then on: sent to all, never changed             |

Server:  theta <- sum n_k theta_k / sum n_k;   once, after round 1:  z-bar^g = sum n_k z-bar_k^g / sum n_k.
The released code trains all clients before round 1 for this mean, and drops what they trained. Here round 1 is that
training and counts. With kappa = 0 and memory = false it is FedAvg bit for bit (tested).
"""

from __future__ import annotations

import numpy as np

from clients.feddbe import MEAN, FedDBEClient, FedDBEHParams
from fedapp.method import Arrays, Method, Payload, ServerContext, ServerState
from fedapp.reduce.spec import Mean, Reduced
from strategies.base import Strategy


class FedDBE(Strategy):
    """Averages models, and once the clients' mean representations."""

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        """Send theta, and z-bar^g as soon as there is one."""
        return Payload(common={**state["model"], **({MEAN: state["mean"]} if "mean" in state else {})})

    def update(self, state: ServerState, server_round: int, reduced: Reduced) -> ServerState:
        """Average theta, and the means without a z-bar^g; without replies nothing changes."""
        if not reduced.clients:
            return state
        mean = {} if "mean" in state else {"mean": reduced.arrays("mean")[MEAN]}
        return {**state, "model": reduced.arrays("model"), **mean}

    def global_arrays(self, state: ServerState) -> Arrays | None:
        """Return theta with a vector of zeros as the private one, so that it can be stored and used as it is."""
        arrays = super().global_arrays(state)
        return arrays and {**arrays, "bias_memory": np.zeros_like(arrays["head.weight"][0])}


def _mean(context: ServerContext, state: ServerState) -> Arrays:
    """Return 0 for z-bar^g where there is none yet.

    It is a reduction of its own: representations are longer than changes of a model, and would hide these in a norm.
    """
    return {} if "mean" in state else {MEAN: np.zeros(context.width, np.float32)}


METHOD = Method(
    id="feddbe",
    title="FedDBE",
    paper="Zhang et al., NeurIPS 2023",
    strategy=FedDBE,
    client=FedDBEClient,
    hparams=FedDBEHParams,
    extra_up=(MEAN,),
    reduces={"train": {"model": Mean(), "mean": Mean(_mean, features=(MEAN,))}},
    global_model=True,
    travels="the whole model, both ways; once, the mean representation",
)
