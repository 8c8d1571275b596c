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

from collections.abc import Iterable

import numpy as np

from clients.feddbe import MEAN, FedDBEClient, FedDBEHParams
from fedapp.errors import Impossible
from fedapp.method import ALL, Arrays, Method, Payload, Reply, ServerState, Sums
from strategies.base import FedStrategy


class FedDBE(FedStrategy):
    """Averages models, and once the clients' mean representations."""

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        """Send theta, and z-bar^g as soon as there is one."""
        return Payload(common={**state["model"], **({MEAN: state["mean"]} if "mean" in state else {})})

    def check(self, state: ServerState, reply: Reply) -> str | None:
        """Refuse a mean that was not asked for or does not have d numbers."""
        mean, wanted = reply.arrays.get(MEAN), (self.context.width,)
        if "mean" in state:
            return None if mean is None else Impossible(f"'{MEAN}' was not asked for")
        if mean is None or mean.shape != wanted or not np.issubdtype(mean.dtype, np.floating):
            got = "is missing" if mean is None else f"is {mean.dtype} {mean.shape}"
            return Impossible(f"'{MEAN}' {got}, expected float32 {wanted}")
        return None

    def further(self, state: ServerState, kind: str) -> Arrays:
        """Return z-bar, of the first round."""
        return {MEAN: np.zeros(self.context.width, np.float32)} if kind == "train" and "mean" not in state else {}

    def aggregate(self, state: ServerState, server_round: int, replies: Iterable[Reply]) -> ServerState:
        """Average theta, and the means where there is no z-bar^g yet; without replies nothing moves."""
        model = state["model"]
        asked = {} if "mean" in state else {MEAN: np.zeros(self.context.width, np.float32)}
        previous = {**model, **asked}
        found = self.averaged(replies, previous)
        if all(found[n] is a for n, a in previous.items()):  # `is`: what `averaged` returns without replies
            return state
        mean = {"mean": found.pop(MEAN)} if asked else {}
        return {**state, "model": found, **mean}


METHOD = Method(
    id="feddbe",
    title="FedDBE",
    paper="Zhang et al., NeurIPS 2023",
    strategy=FedDBE,
    client=FedDBEClient,
    hparams=FedDBEHParams,
    shared=ALL,
    extra_up=(MEAN,),
    sum_only=Sums(),
    global_model=True,
    travels="the whole model, both ways; once, the mean representation",
)
