"""The kinds of reduction that a method declares, and the object from which its server reads them.

`Method.reduces` names for each exchange (`train` or `query.<kind>`) what the server makes of the arrays of all replies:

=========  =====================================================================================
``Mean``   the mean of named arrays, weighted by n_k or uniform
``Each``   the arrays of each client by themselves
=========  =====================================================================================

From this declaration follow the form of a reply, the reference of robust rules, and the template of secure sums. The
form in which a reduction is computed, plain or robust, is the run's, and a method does not see it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from fedapp.method import Arrays, Reduction, Reply, ServerContext, ServerState, Sums

Of: TypeAlias = Callable[[ServerContext, ServerState], Arrays]
"""Gives the arrays of a reduction from the state that the clients were sent. Their names, shapes and dtypes are those
of a reply, and robust rules measure changes from their values."""

Weights: TypeAlias = Literal["samples", "uniform"]


def weights_of(average: str) -> Weights:
    """Return the weights for a hyperparameter `average`: n_k for `samples`, else uniform."""
    return "samples" if average == "samples" else "uniform"


def shared_model(context: ServerContext, state: ServerState) -> Arrays:
    """Return the shared arrays in a state."""
    model: Arrays = state["model"]
    return model


@dataclass(frozen=True)
class Mean(Reduction):
    """The mean over the clients that replied of the arrays that `of` names.

    Attributes
    ----------
    weights : `samples`, n_k, or `uniform`.
    read : makes these arrays of a reply's, which then have another form: `read(arrays of the reply, of)`.
    """

    of: Of = shared_model
    weights: Weights = "samples"
    read: Callable[[Arrays, Arrays], Arrays] | None = None

    @property
    def sums(self) -> Sums | None:
        """Weighted arrays add up, unless they must be decoded first."""
        return None if self.read else Sums(self.weights)

    @property
    def guards(self) -> tuple[str, ...]:
        """Any rule for averages, and a cap on the weights."""
        return ("rules", "count-cap")


@dataclass(frozen=True)
class Each(Reduction):
    """The arrays of each client that no other reduction of the exchange names."""


class Reducer(Protocol):
    """Takes the replies of an exchange one at a time."""

    def add(self, reply: Reply) -> None:
        """Take a reply."""

    def result(self) -> Any:
        """Return the reduction of all replies that were added."""


class Reduced:
    """The replies to one exchange, reduced as they arrive in the order of the client ids.

    A reply passes through all reductions once and is then dropped. Whatever a server reads first, the others have seen
    the same replies.
    """

    def __init__(self, replies: Iterable[Reply], reducers: Mapping[str, Reducer]) -> None:
        self._replies = iter(replies)
        self._reducers = reducers
        self._clients: list[Reply] = []

    def each(self) -> Iterator[Reply]:
        """Yield the replies as they arrive, for what no reduction names."""
        for reply in self._replies:
            for reducer in self._reducers.values():
                reducer.add(reply)
            self._clients.append(dataclasses.replace(reply, arrays={}))
            yield reply

    @property
    def clients(self) -> list[Reply]:
        """All replies without their arrays; empty if no client replied."""
        self.drain()
        return self._clients

    def drain(self) -> None:
        """Reduce the replies that are left."""
        for _ in self.each():
            pass

    def arrays(self, name: str) -> Arrays:
        """Return the mean `name`; without replies the arrays of `Mean.of` themselves."""
        self.drain()
        found: Arrays = self._reducers[name].result()
        return found
