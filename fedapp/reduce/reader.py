"""`Reader`: reads the replies of one method in one run, by the method's declaration and the run's policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedapp.core.privacy import Privacy
from fedapp.core.robust import UNGUARDED, count_limit, mean_of
from fedapp.errors import Impossible
from fedapp.method import Array, Arrays, Method, Reduction, Reply, ServerContext, ServerState
from fedapp.reduce.plain import MeanReducer
from fedapp.reduce.spec import Mean, Reduced
from fedapp.settings import RobustnessSettings

USUAL: Mapping[str, Reduction] = {"model": Mean()}
"""Reductions of an exchange for which a method declares none."""


@dataclass(frozen=True)
class Policy:
    """What a run does with all replies, whatever the method.

    Attributes
    ----------
    robust : against clients that lie.   privacy : what the run states of what leaves its clients, or None.
    """

    robust: RobustnessSettings = UNGUARDED
    privacy: Privacy | None = None

    def believed(self, replies: Iterable[Reply], counts: Sequence[float]) -> Iterable[Reply]:
        """Return replies, none with more samples than `count_cap` times the median of `counts`."""
        limit = count_limit(counts, self.robust.count_cap)
        if self.privacy is not None:
            # Every update has the same noise, so equal weights leave the least of it in the mean.
            limit = 1
        if limit is None:
            return replies
        return (dataclasses.replace(r, num_samples=min(r.num_samples, limit)) for r in replies)


class Reader:
    """Reads the replies of one method.

    Parameters
    ----------
    context : what the strategy knows.   policy : what the run does with all replies.
    """

    def __init__(self, method: Method, hparams: Any, context: ServerContext, policy: Policy) -> None:
        self.context, self.policy = context, policy
        self.reductions = method.reductions(hparams)

    def reduce(self, exchange: str, replies: Iterable[Reply], state: ServerState) -> Reduced:
        """Return the replies to an exchange, to be reduced as they arrive."""
        means = {n: r for n, r in self.reductions.get(exchange, USUAL).items() if isinstance(r, Mean)}
        of = {name: mean.of(self.context, state) for name, mean in means.items()}
        return Reduced(
            replies, {n: MeanReducer(of[n], mean_of(of[n], self.policy.robust), mean) for n, mean in means.items()}
        )

    def form(self, exchange: str, state: ServerState) -> Arrays | None:
        """Return arrays of the names, shapes and dtypes of a reply, or None where the method alone knows its form."""
        found: Arrays = {}
        for reduction in self.reductions.get(exchange, {"": None}).values():
            if not isinstance(reduction, Mean) or reduction.read:
                return None
            found |= reduction.of(self.context, state)
        return found

    def moves(self, state: ServerState) -> Callable[[Reply], Arrays]:
        """Return a function that gives the arrays of a reply to `train`, besides the model, that `max-growth` bounds.

        They are the arrays of `Mean.read`, and arrays `<prefix>/<name>` whose name is that of an array of the model.
        """
        train = self.reductions.get("train", {}).values()
        read = [(m.read, m.of(self.context, state)) for m in train if isinstance(m, Mean) and m.read]

        def found(reply: Reply) -> Arrays:
            rest = {n.partition("/")[2]: a for n, a in reply.arrays.items()}
            moves = {n: a for n, a in rest.items() if n in self.context.initial}
            for decode, of in read:
                with np.errstate(over="ignore", invalid="ignore"):
                    moves |= decode(reply.arrays, of)
            return moves

        return found


def form_problem(arrays: Mapping[str, Array], form: Mapping[str, Array], model: Collection[str]) -> str | None:
    """Return why arrays do not have the names, shapes and kinds of numbers of others, or None.

    Parameters
    ----------
    form : arrays of the names, shapes and dtypes that are expected.
    model : names of arrays that may be there too.
    """
    missing, extra = form.keys() - arrays.keys(), arrays.keys() - form.keys() - set(model)
    if missing or extra:
        names = ", ".join(sorted(missing or extra)[:5])
        return Impossible(f"'{names}' {'is missing' if missing else 'was not asked for'}")
    for name, like in form.items():
        array = arrays[name]
        if array.shape != like.shape or (array.dtype.kind == "f") != (like.dtype.kind == "f"):
            return Impossible(f"'{name}' is {array.dtype} {array.shape}, expected {like.dtype} {like.shape}")
    return None
