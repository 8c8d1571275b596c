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

from collections.abc import Mapping
from typing import Any

import numpy as np

from clients.fedkd import FedKDClient, FedKDHParams
from clients.mutual import prefixed, stripped
from fedapp.core.lowrank import compress, problem_of, ranks, rebuild
from fedapp.method import LARGEST, NONE, Array, Arrays, Method, Payload, Reply, Scored, ServerContext, ServerState
from fedapp.reduce.spec import Mean, Reduced, weights_of
from strategies.fml import FML


def energy(hparams: FedKDHParams, finished: int) -> float:
    """Share of an update's energy that is kept after `finished` rounds: linear from start to end, then constant."""
    done = min(1.0, finished / hparams.energy_rounds)
    return hparams.energy_start + (hparams.energy_end - hparams.energy_start) * done


class FedKD(FML):
    """Averages compressed updates of the small model."""

    def init(self, context: ServerContext) -> ServerState:
        """Return the mentee with its initial values, version 0, which no one holds yet."""
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
        of = _no_update(self.context, state)
        if problem := problem_of(stripped(reply.arrays), _shapes(of)):
            return problem
        with np.errstate(over="ignore", invalid="ignore"):
            update = _rebuilt(reply.arrays, of)
        for name, array in update.items():
            # Each factor was bounded by itself, and their product is as large as all of them together.
            if not np.abs(array).max(initial=0) <= LARGEST:
                return f"'{name}' would hold values of more than {LARGEST:g} when it is rebuilt"
        return None

    def update(self, state: ServerState, server_round: int, reduced: Reduced) -> ServerState:
        """Compress the mean update, and move the mentee by what the clients will get."""
        if not reduced.clients:
            return state
        update = compress(stripped(reduced.arrays("update")), energy(self.hparams, server_round - 1))
        # What clients will add, not the exact mean: both must hold the same mentee.
        step = rebuild(update, _shapes(state["small"]))
        small = {name: array + step[name] for name, array in stripped(state["small"]).items()}
        return {
            "small": prefixed(small),
            "update": prefixed(update),
            "version": state["version"] + 1,
            "holders": [r.client for r in reduced.clients if r.metrics.get("version") == state["version"]],
        }

    def report(self, state: ServerState, final: Scored) -> dict[str, Any]:
        """Return the ranks of the last mean update; arrays that are not named went dense."""
        return {"update_ranks": ranks(stripped(state["update"]))}


def _shapes(small: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the mentee's arrays by name."""
    return {name: array.shape for name, array in stripped(small).items()}


def _no_update(context: ServerContext, state: ServerState) -> Arrays:
    """Return an update of 0."""
    return {name: np.zeros(array.shape, np.float32) for name, array in state["small"].items()}


def _rebuilt(arrays: Arrays, of: Arrays) -> Arrays:
    """Return g_k of a reply, in the shapes of `of`."""
    return prefixed(rebuild(stripped(arrays), _shapes(of)))


METHOD = Method(
    id="fedkd",
    title="FedKD",
    paper="Wu et al., Nature Communications 2022",
    strategy=FedKD,
    client=FedKDClient,
    hparams=FedKDHParams,
    shared=NONE,
    extra_up=("small/",),
    reduces=lambda hparams: {"train": {"update": Mean(_no_update, weights_of(hparams.average), _rebuilt)}},
    heterogeneous=True,
    same_width=False,
    metrics=("version",),
    travels="low-rank updates of a small shared model, both ways",
)
