"""FedKD. Wu et al., Communication-efficient federated learning via knowledge distillation, Nature Communications 2022.

| symbol (paper)   | here                                                                                |
|------------------|-------------------------------------------------------------------------------------|
| Theta^s          | state["small"], the mentee as every client of the last round will hold it           |
| g_k              | the mentee's update of client k, from reply.arrays["small/*"]                       |
| g                | state["update"], the mean update in its compressed form                             |
| T(t)             | `energy(hparams, t)`, t = finished rounds                                           |

Algorithm 1, server:  g <- mean_{k in S_t} rebuild(g_k);  compress g at T(t);  Theta^s <- Theta^s + rebuild(g);  send g.
Server and clients add the *compressed* mean, so they hold the same mentee.  A client that missed the last round
does not hold what the update must be added to: it gets the whole mentee (scalar `whole`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from clients.fedkd import FedKDClient, FedKDHParams
from clients.mutual import prefixed, stripped
from fedapp.core.lowrank import compress, problem_of, ranks, rebuild
from fedapp.core.robust import mean_of
from fedapp.method import LARGEST, NONE, Arrays, Method, Payload, Reply, Scored, ServerContext, ServerState
from strategies.fml import FML, shapes_of


def energy(hparams: FedKDHParams, finished: int) -> float:
    """Share of an update's energy that is kept after `finished` rounds: linear from start to end, then constant."""
    done = min(1.0, finished / hparams.energy_rounds)
    return hparams.energy_start + (hparams.energy_end - hparams.energy_start) * done


class FedKD(FML):
    """Averages compressed updates of the small model."""

    def init(self, context: ServerContext) -> ServerState:
        """Return the mentee with its initial values, version 0, which nobody holds yet."""
        return {**super().init(context), "update": {}, "version": 0, "holders": []}

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        """Return the last mean update to clients that hold what it was added to, the whole mentee to all others."""
        whole = client not in state["holders"]
        return Payload(
            common=state["small"] if whole else state["update"],
            scalars={"whole": whole, "version": state["version"], "energy": energy(self.hparams, server_round - 1)},
        )

    def check(self, state: ServerState, reply: Reply) -> str | None:
        """Refuse a reply from which no update of the mentee can be rebuilt."""
        problem = problem_of(stripped(reply.arrays), shapes_of(state))
        if problem:
            return problem
        for name, array in self.moves(state, reply).items():
            # Each factor was bounded by itself, and their product is as large as all of them together.
            if not np.abs(array).max(initial=0) <= LARGEST:
                return f"'{name}' would hold values of more than {LARGEST:g} when it is rebuilt"
        return None

    def moves(self, state: ServerState, reply: Reply) -> Arrays:
        """Return the rebuilt update."""
        with np.errstate(over="ignore", invalid="ignore"):
            return prefixed(rebuild(stripped(reply.arrays), shapes_of(state)))

    def aggregate(self, state: ServerState, server_round: int, replies: Iterable[Reply]) -> ServerState:
        """Rebuild and average the updates, compress the mean, and move the mentee by what the clients will get."""
        shapes, holders = shapes_of(state), []
        mean = mean_of({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, self.robust)
        for reply in replies:
            mean.add(rebuild(stripped(reply.arrays), shapes), self.weight(reply))
            if reply.metrics.get("version") == state["version"]:
                holders.append(reply.client)
        if not mean.replies:
            return state
        update = compress(mean.mean(), energy(self.hparams, server_round - 1))
        step = rebuild(update, shapes)  # what clients will add, not the exact mean: both must hold the same mentee
        small = {name: array + step[name] for name, array in stripped(state["small"]).items()}
        return {
            "small": prefixed(small),
            "update": prefixed(update),
            "version": state["version"] + 1,
            "holders": holders,
        }

    def report(self, state: ServerState, final: Scored) -> dict[str, Any]:
        """Return the ranks of the last mean update; arrays that are not named went dense."""
        return {"update_ranks": ranks(stripped(state["update"]))}


METHOD = Method(
    id="fedkd",
    title="FedKD",
    paper="Wu et al., Nature Communications 2022",
    strategy=FedKD,
    client=FedKDClient,
    hparams=FedKDHParams,
    shared=NONE,
    extra_up=("small/",),
    heterogeneous=True,
    same_width=False,
    metrics=("version",),
    travels="low-rank updates of a small shared model, both ways",
)
