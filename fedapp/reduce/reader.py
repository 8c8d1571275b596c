"""`Reader`: reads the replies of one method in one run, by the method's declaration and the run's policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from fedapp.core.privacy import Privacy
from fedapp.core.robust import UNGUARDED, count_limit, mean_of
from fedapp.errors import Impossible
from fedapp.method import Arrays, Method, Reduction, Reply, ServerContext, ServerState
from fedapp.reduce.noised import NoisedRows, PooledRows
from fedapp.reduce.plain import MeanReducer, PlainClassMeans, PlainRows
from fedapp.reduce.robust import RobustClassMeans, ScreenedRows
from fedapp.reduce.spec import ClassMean, Each, Mean, Reduced, Reducer, Rows
from fedapp.settings import RobustnessSettings

Formed: TypeAlias = Mean | ClassMean | Rows | NoisedRows
"""Reductions that know the form of a reply."""
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
        self.reductions = {
            exchange: {name: self._noised(reduction) for name, reduction in found.items()}
            for exchange, found in method.reductions(hparams).items()
        }

    def _noised(self, reduction: Reduction) -> Reduction:
        """Return the form with noise of a reduction, where the run asks for it and there is one."""
        private = self.policy.privacy is not None and isinstance(reduction, Rows) and reduction.noised
        return NoisedRows(reduction) if private and isinstance(reduction, Rows) else reduction

    def reduce(self, exchange: str, replies: Iterable[Reply], state: ServerState) -> Reduced:
        """Return the replies to an exchange, to be reduced as they arrive."""
        found = self.reductions.get(exchange, USUAL)
        reducers = {n: self._reducer(r, state) for n, r in found.items() if not isinstance(r, Each)}
        return Reduced(replies, reducers, lambda previous: mean_of(previous, self.policy.robust))

    def _reducer(self, reduction: Reduction, state: ServerState) -> Reducer:
        """Return an empty reduction in the form that the policy asks for."""
        robust = self.policy.robust
        if isinstance(reduction, ClassMean):
            of = reduction.of(self.context, state)
            return RobustClassMeans(reduction, of, robust) if robust.active else PlainClassMeans(reduction, of.shape)
        if isinstance(reduction, NoisedRows):
            return PooledRows(reduction, self.context, robust.count_cap)
        if isinstance(reduction, Rows):
            return ScreenedRows(reduction) if robust.rules else PlainRows(reduction)
        assert isinstance(reduction, Mean)
        arrays = reduction.of(self.context, state)
        return MeanReducer(arrays, mean_of(arrays, robust), reduction)

    def form(self, exchange: str, state: ServerState) -> Arrays | None:
        """Return arrays of the names, shapes and dtypes of a reply, or None where the method alone knows its form."""
        forms = self._forms(exchange, state)
        return None if forms is None else {name: a for _, form in forms for name, a in form.items()}

    def _forms(self, exchange: str, state: ServerState) -> list[tuple[Formed, Arrays]] | None:
        """Return each reduction of an exchange with its form; None where the method alone knows one."""
        found: list[tuple[Formed, Arrays]] = []
        for reduction in self.reductions.get(exchange, {"": Each()}).values():
            if not isinstance(reduction, Formed):
                return None
            form = reduction.form(self.context, state)
            if form is None:
                return None
            found.append((reduction, form))
        return found

    def checker(self, exchange: str, state: ServerState) -> Callable[[Reply], str | None]:
        """Return a function that returns why a reply does not have the form that the server reduces, or None."""
        forms, model = self._forms(exchange, state), self.context.initial.keys()
        if forms is None:
            return lambda reply: None
        known = {name for r, form in forms for name in (*form, *(r.beside if isinstance(r, Rows) else ()))}

        def problem(reply: Reply) -> str | None:
            if extra := reply.arrays.keys() - known - model:
                return Impossible(f"'{min(extra)}' was not asked for")
            return next((p for r, form in forms if (p := r.problem(reply.arrays, form, reply.num_samples))), None)

        return problem

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
