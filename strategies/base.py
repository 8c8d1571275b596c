"""`FedStrategy`: the server side of a method as pure functions.

A method defines only its mathematics. The table lists the functions that it may define, in the order in which they are
called. Each function returns new values and does not change its arguments. Everything that must be remembered is in the
state, so a checkpoint contains all of it. `self.context`, `self.method` and `self.hparams` never change during a run.

| function                                  | when                                   | what it returns         |
|-------------------------------------------|----------------------------------------|-------------------------|
| `init(context)`                           | once, before round 1                   | the first state         |
| `send(state, server_round, client)`       | for each client that gets a message    | its payload             |
| `send_each(state, server_round, clients)` | instead of `send`, if it is cheaper    | pairs (client, payload) |
| `check(state, reply)`                     | for each reply as it arrives           | what is wrong, or None  |
| `further(state, kind)`                    | before sums that hide single replies   | how replies look        |
| `update(state, server_round, reduced)`    | once per round                         | the next state          |
| `global_arrays(state)`                    | after each round                       | the one model, or None  |
| `finalize(state, query)`                  | once, after the last round             | the final state         |
| `report(state, final)`                    | once, after the final evaluation       | entries of the summary  |
| `blend(state, sizes)`                     | when a figure of the run is drawn      | who learns from whom    |

`reduced` holds the reductions that the method declares in `Method.reduces` (`fedapp/reduce/spec.py`). A class that
defines `aggregate(state, server_round, replies)` instead of `update` gets the checked replies one at a time, in the
order of the client ids, and must read all of them.
`query` is the only other exchange with clients. `final` holds the clients' last scores.

The state is a nested dict of arrays and plain values. `fedapp/federation/loop.py` calls these functions round by round;
`strategies/_flower.py` runs the same functions in Flower's own loop, for apps other than fedapp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

from fedapp.core.privacy import Float64, Joint, Privacy
from fedapp.core.robust import UNGUARDED
from fedapp.method import Arrays, Blend, Method, Payload, Query, Reductions, Reply, Scored, ServerContext, ServerState
from fedapp.reduce.reader import USUAL, Policy, Reader
from fedapp.reduce.spec import Reduced
from fedapp.settings import RobustnessSettings
from fedapp.transport.clipping import arrays_of
from fedapp.transport.secure import Released, SecureSums
from strategies._flower import FlowerLoop


class FedStrategy(FlowerLoop):
    """Base of all strategies; without changes it is FedAvg on the method's shared arrays.

    Parameters
    ----------
    method, hparams : the method and its hyperparameters.
    robust : what is done against clients that lie.
    privacy : what the run states of what leaves its clients, or None.
    flower : settings of Flower's own loop (`strategies/_flower.py`), for apps other than fedapp.
    """

    records: ClassVar[tuple[str, ...]] = ()
    """Entries of the state that only note numbers round by round, which may be NaN; all other arrays must be finite."""

    def __init__(
        self,
        method: Method,
        hparams: Any,
        *,
        robust: RobustnessSettings | None = None,
        privacy: Privacy | None = None,
        **flower: Any,
    ) -> None:
        super().__init__(**flower)
        self.method, self.hparams = method, hparams
        self.robust = robust or UNGUARDED
        self.privacy = privacy
        self.context: ServerContext
        self.secure: SecureSums | None = None

    # ---- mathematics ---------------------------------------------------------------------------------------------

    def init(self, context: ServerContext) -> ServerState:
        """Return the state before round 1: the common initial values of the shared arrays."""
        self.context = context
        return {"model": dict(context.initial)}

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        """Return the payload of `client` in `server_round`: the shared arrays, the same for all clients."""
        return Payload(common=state["model"])

    def send_each(self, state: ServerState, server_round: int, clients: Iterable[int]) -> Iterator[tuple[int, Payload]]:
        """Yield each client with its payload, for methods that compute several payloads at lower cost."""
        return ((client, self.send(state, server_round, client)) for client in clients)

    def check(self, state: ServerState, reply: Reply) -> str | None:
        """Return what is wrong with a reply besides names, shapes and NaN, or None."""
        return None

    def further(self, state: ServerState, kind: str) -> Arrays:
        """Return arrays of the names, shapes and dtypes that replies to `kind` hold beside the model's, for sums.

        Those of classes (`Sums.rows`) have a row for each of the C classes.
        """
        form = self.reader.form(kind, state) or {}
        return {name: array for name, array in form.items() if name not in self.context.initial}

    def update(self, state: ServerState, server_round: int, reduced: Reduced) -> ServerState:
        """Return the next state: the shared arrays averaged over the participants, weighted by n_k."""
        return {**state, "model": reduced.arrays("model")}

    def aggregate(self, state: ServerState, server_round: int, replies: Iterable[Reply]) -> ServerState:
        """Return the next state from the replies of a round: reduce them, then `update`.

        A class that defines this function gets the replies one by one.
        """
        reduced = self.reader.reduce("train", replies, state)
        new = self.update(state, server_round, reduced)
        reduced.drain()
        noted = reduced.noted(state.get("robust", {}))
        return {**new, "robust": noted} if noted else new

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
        """Return who learns from whom in what clients get next, or None where all get the same or nothing.

        `sizes` holds n_k by client; `self.context` is not there. Rows of the matrix sum to 1.
        """
        return None

    # ---- for both round loops ------------------------------------------------------------------------------------

    def expected(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes, out of a client's `shapes`, of the arrays that every reply to `train` must hold."""
        prefixes = self.method.up_prefixes(self.hparams)
        return {n: s for n, s in shapes.items() if any(n.startswith(p) or n == p.rstrip(".") for p in prefixes)}

    def released(self, kind: str, template: Arrays) -> Released | None:
        """Return what of the replies adds up where the sum has noise, or None in a run without `dp`.

        Parameters
        ----------
        template : arrays of the names, shapes and dtypes of a reply.
        """
        if self.privacy is None:
            return None
        if noised := self.reader.noised(kind):
            return of_joint(self.privacy, noised.joint(self.context), noised.prefix)
        size = sum(array.size for array in template.values())
        return Released(self.privacy, self.privacy.bound, size, lambda v, clients: arrays_of(v / clients, template))

    @classmethod
    def usual_reductions(cls) -> Reductions:
        """Return the reductions of a method that declares none: the mean; with an own `aggregate`, nothing."""
        return {"train": USUAL} if cls.aggregate is FedStrategy.aggregate else {}

    @property
    def policy(self) -> Policy:
        """The treatment of replies in this run."""
        return Policy(self.robust, self.privacy, lambda: self.secure.share if self.secure else 1.0)

    @property
    def reader(self) -> Reader:
        """Reads the replies of this method under the present policy."""
        return Reader(self.method, self.hparams, self.context, self.policy)

    def checker(self, state: ServerState, kind: str) -> Callable[[Reply], str | None]:
        """Return a function that gives the problem of a reply to `kind`, or None.

        A form that does not fit the reductions is refused; then the method checks the reply.
        """
        unfit = self.reader.checker(kind, state)
        return lambda reply: unfit(reply) or self.check(state, reply)


def of_joint(stated: Privacy, joint: Joint, prefix: str) -> Released:
    """Return the part of noised statistics that adds up over clients; names of a reply's arrays have the prefix."""

    def parts(vector: Float64, clients: int) -> Arrays:
        return {prefix + name: array for name, array in joint.parts(vector).items()}

    return Released(stated, joint.sensitivity, joint.size, parts)
