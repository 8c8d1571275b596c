"""Void rounds: a new state must be finite, and no model in it may grow too much.

One finite reply can move an average by any amount. A model many times longer than the last one is useless to the other
clients, and after a few rounds it is NaN everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from fedapp.federation.hook import Hook
from fedapp.federation.participants import Outcome, Progress
from fedapp.method import SECOND, Arrays, ServerState
from fedapp.reduce.reader import Check
from fedapp.transport.checkpoint import not_finite
from fedapp.transport.traffic import RoundFailed

BUFFERS = ("running_mean", "running_var")
"""Statistics of BatchNorm: they take the features' own units, so that their first values may be very large."""


class NormGuard(Hook):
    """Bounds the norm of each model, in the state and in each reply, by a multiple of the last round's (`max-growth`).

    A round is void whose state is longer or not finite.
    """

    limit = math.inf

    def checks(self, at: Progress, check: Check) -> Check:
        """Return the check, followed by one of the lengths."""
        strategy = self.run.cohort.strategy
        growth, initial = strategy.policy.robust.max_growth, strategy.context.initial
        self.limit = growth * (1 + longest(at.state, initial)) if growth else math.inf
        if not growth or self.run.cohort.secure is not None:  # the length of every reply takes a pass over it
            return check
        return bounded(check, initial, self.limit, strategy.reader.moves(at.state))

    def judge(self, at: Progress, outcome: Outcome) -> None:
        """Declare a round void whose state has a flaw."""
        strategy = self.run.cohort.strategy
        outcome.void = flaw(outcome.state, strategy.context.initial, strategy.records, self.limit) or ""


class TwoVoids(Hook):
    """Ends the run after two void rounds in a row, also when it is resumed without a round to train."""

    remembers = ("voids",)
    voids = 0

    def judge(self, at: Progress, outcome: Outcome) -> None:
        """Count the void rounds, for the checkpoint of this round."""
        self.voids = self.voids + 1 if outcome.void else 0

    def begin(self, at: Progress) -> None:
        """Raise `RoundFailed` if no round follows."""
        if at.round >= self.run.config.federation.num_server_rounds or self.run.hooks.stopped:
            self.end_run(at)

    def after_round(self, at: Progress, outcome: Outcome) -> None:
        """Raise `RoundFailed` after the second."""
        self.end_run(at, f": {outcome.void}")

    def end_run(self, at: Progress, why: str = "") -> None:
        """Raise `RoundFailed` if the last two rounds are void."""
        if self.voids > 1:
            raise RoundFailed(
                f"rounds {at.round - 1} and {at.round} are void{why}. Start a new run: lower lr or set clip if all "
                "clients are honest, choose robust if one may not be, or allow more with max-growth",
                at.round,
            )


def length(arrays: Mapping[str, Any], names: Collection[str]) -> float:
    """Return the L2 norm of one model: of the arrays in `names` or of a second model, without BatchNorm statistics."""
    total = 0.0
    for name, array in arrays.items():
        known = name in names or (isinstance(name, str) and name.startswith(SECOND))
        if known and isinstance(array, np.ndarray) and not name.endswith(BUFFERS):
            flat = array.reshape(-1)
            # In float64 where the square of a float32 would not be a number any more.
            squares = float(np.dot(flat, flat)) if flat.dtype == np.float64 else _squares(flat)
            total += squares
    return math.sqrt(total)


def _squares(flat: np.ndarray[Any, Any]) -> float:
    with np.errstate(over="ignore"):
        total = float(np.dot(flat, flat))
    return total if math.isfinite(total) else float(np.square(flat, dtype=np.float64).sum())


def longest(state: ServerState, initial: Arrays) -> float:
    """Return the length of the longest model in a state, at least that of the initial one."""
    return max((length(group, initial) for group in _groups(state)), default=0.0) or length(initial, initial)


def _groups(state: Mapping[Any, Any]) -> Iterator[Mapping[Any, Any]]:
    if any(isinstance(value, np.ndarray) for value in state.values()):
        yield state
    for value in state.values():
        if isinstance(value, Mapping):
            yield from _groups(value)


def flaw(after: ServerState, initial: Arrays, records: Collection[str], limit: float) -> str | None:
    """Return why a new state makes its round void, or None.

    Parameters
    ----------
    records : entries that only note numbers.   limit : greatest length of a model; infinite = any.
    """
    broken = not_finite({name: value for name, value in after.items() if name not in records})
    if broken:
        return f"the server's '{broken}' would hold NaN or infinity"
    found = longest(after, initial)
    return (
        f"the model would have norm {found:.4g}, at most {limit:.4g} is possible (max-growth)"
        if found > limit
        else None
    )


def bounded(
    check: Callable[[Any], str | None],
    initial: Arrays,
    limit: float,
    moves: Callable[[Any], Arrays] = lambda reply: {},
) -> Callable[[Any], str | None]:
    """Return a method's check of a reply with one of its length, if there is a limit: of its model, and of `moves`."""
    if limit == math.inf:
        return check

    def too_long(what: str, arrays: Arrays) -> str | None:
        found = length(arrays, initial)
        if found <= limit:
            return None
        return f"its {what} has norm {found:.4g}, at most {limit:.4g} is possible after the last round's (max-growth)"

    def checked(reply: Any) -> str | None:
        # The method knows how to read its moves in a reply that it does not refuse.
        return too_long("model", reply.arrays) or check(reply) or too_long("move", moves(reply))

    return checked
