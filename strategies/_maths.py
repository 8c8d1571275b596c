"""`Maths`: the server side of a method as pure functions; the table at the head of `strategies/base.py` lists them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from fedapp.method import Arrays, Blend, Method, Payload, Reductions, Reply, Scored, ServerContext, ServerState
from fedapp.reduce.spec import USUAL, Query, Reduced


class Maths:
    """The mathematics of a method; without changes it is FedAvg on the method's shared arrays.

    Attributes
    ----------
    method, hparams : the method and its hyperparameters.   context : the argument of `init`.
    """

    records: ClassVar[tuple[str, ...]] = ()
    """Entries of the state that only note numbers round by round, which may be NaN; all other arrays must be finite."""
    context: ServerContext

    def __init__(self, method: Method, hparams: Any) -> None:
        self.method, self.hparams = method, hparams

    def init(self, context: ServerContext) -> ServerState:
        """Return the state before round 1: the common initial values of the shared arrays."""
        self.context = context
        return {"model": dict(context.initial)}

    def prepare(self, state: ServerState, query: Query) -> ServerState:
        """Return the state that round 1 begins with, after a query to all clients where the method needs one."""
        return state

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        """Return the payload of `client` in `server_round`: the shared arrays, the same for all clients."""
        return Payload(common=state["model"])

    def send_each(self, state: ServerState, server_round: int, clients: Iterable[int]) -> Iterator[tuple[int, Payload]]:
        """Yield each client with its payload, for methods that compute several payloads at lower cost."""
        return ((client, self.send(state, server_round, client)) for client in clients)

    def check(self, state: ServerState, reply: Reply) -> str | None:
        """Return the fault of a reply besides names, shapes and NaN, or None."""
        return None

    def update(self, state: ServerState, server_round: int, reduced: Reduced) -> ServerState:
        """Return the next state: the shared arrays averaged over the participants, weighted by n_k."""
        return {**state, "model": reduced.arrays("model")}

    def global_arrays(self, state: ServerState) -> Arrays | None:
        """Return the one global model by wire name, or None if the method has none."""
        return dict(state["model"]) if self.method.global_model else None

    def finalize(self, state: ServerState, query: Query) -> ServerState:
        """Return the final state after the last round."""
        return state

    def report(self, state: ServerState, final: Scored) -> dict[str, Any]:
        """Return further entries for the run's summary; `final` holds the last scores of all clients."""
        return {}

    def blend(self, state: ServerState, sizes: Mapping[int, float]) -> Blend | None:
        """Return the mixing matrix behind the next payloads, or None where all get the same or nothing.

        `sizes` holds n_k by client; `self.context` is not there. Rows of the matrix sum to 1.
        """
        return None

    @classmethod
    def usual_reductions(cls) -> Reductions:
        """Return the reductions of a method that declares none."""
        return {"train": USUAL}
