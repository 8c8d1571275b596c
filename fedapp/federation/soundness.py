"""Whether a state may take the place of the one before: it is finite, and no model in it grew too much.

One finite reply can move an average by any amount. A model that is many times longer than the last one is of no use to
the others, and a few rounds later it is NaN everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from fedapp.method import Arrays, ServerState
from fedapp.transport.checkpoint import not_finite

BUFFERS = ("running_mean", "running_var")
"""Statistics of BatchNorm: they take the features' own units, so that their first values may be very large."""
SMALL = "small/"
"""Beginning of the names of a second model's arrays (FML, FedKD)."""


def length(arrays: Mapping[str, Any], names: Collection[str]) -> float:
    """Return the L2 norm of one model: of the arrays in `names` or of a second model, without BatchNorm statistics."""
    total = 0.0
    for name, array in arrays.items():
        known = name in names or (isinstance(name, str) and name.startswith(SMALL))
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
    """Say why a state must not take the place of the one before, or return None.

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
