"""`Reader`: reads the replies of one method in one run, by the method's declaration and the run's policy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from fedapp.core.privacy import Privacy
from fedapp.core.robust import UNGUARDED, count_limit, mean_of
from fedapp.errors import Impossible
from fedapp.method import HEAD, Arrays, Method, Payload, Reduction, Reply, ServerContext, ServerState, Size
from fedapp.reduce.noised import NOISED_FORMS, Noised, noised
from fedapp.reduce.plain import MeanReducer, PlainClassMeans, PlainMoments, PlainRows, PlainTotals
from fedapp.reduce.robust import RobustClassMeans
from fedapp.reduce.rules_ccvr import ScreenedMoments
from fedapp.reduce.rules_cwfedavg import Sent, bounded_shares
from fedapp.reduce.rules_fedgh import ScreenedRows
from fedapp.reduce.rules_fedghg import BoundedGaussians
from fedapp.reduce.spec import USUAL, ClassMean, Each, Gaussians, Mean, Query, Reduced, Reducer, Rows, Share, Total
from fedapp.settings import RobustnessSettings, unless_auto

Check: TypeAlias = Callable[[Reply], str | None]
"""Returns the problem of a reply, or None."""
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
Raw: TypeAlias = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Schema:
    """The possible replies to one kind of message, as a method declares them.

    Attributes
    ----------
    method : its id, for messages.
    shapes : of the model's arrays by name; each must be there.
    further : names of other arrays, or beginnings of names that end in `/`.
    sizes : of numbers, by beginnings of arrays' names; the others are at most `LARGEST`.
    numbers : names of the method's own numbers.
    sampled : whether a further array may hold a representation of each sample.
    raw : dtype and shape by name of arrays whose numbers mean nothing by themselves (secure sums). Where there are any,
        the reply holds these and no others.
    check : returns the problem of a reply that fits all this, or None.
    """

    method: str = "the method"
    shapes: Shapes = field(default_factory=dict)
    further: tuple[str, ...] = ()
    sizes: Mapping[str, Size] = field(default_factory=lambda: dict.fromkeys(HEAD, "feature"))
    numbers: Collection[str] = ()
    sampled: bool = False
    raw: Raw = field(default_factory=dict)
    check: Check = lambda reply: None

    def hidden(self, raw: Raw) -> Schema:
        """Return the schema of replies that hold these masked arrays; only their sum is checked."""
        return dataclasses.replace(self, shapes={}, further=(), raw=raw, check=lambda reply: None)


@dataclass(frozen=True)
class Policy:
    """The treatment of replies in a run, the same for all methods.

    Attributes
    ----------
    robust : settings against malicious clients.   privacy : mechanism of a run with noise, or None.
    share : gives the share of the sum's noise that each client added in the last exchange (1: its own).
    """

    robust: RobustnessSettings = UNGUARDED
    privacy: Privacy | None = None
    share: Callable[[], float] = lambda: 1.0

    def resolved(self) -> Policy:
        """Return the policy of a simulation, with a number for each `auto`."""
        robust, cap = self.robust, 2.0 if self.robust.rules else 0.0
        cap, growth = unless_auto(robust.count_cap, cap), unless_auto(robust.max_growth, 0.0)
        return dataclasses.replace(self, robust=robust.replaced(count_cap=cap, max_growth=growth))

    def noise(self) -> float:
        """Return the deviation of one client's noise, as a multiple of the sensitivity."""
        return self.privacy.noise * math.sqrt(self.share()) if self.privacy else 0.0

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
    context : of the strategy.   policy : of the run.
    """

    def __init__(self, method: Method, hparams: Any, context: ServerContext, policy: Policy) -> None:
        self.method, self.hparams, self.context, self.policy = method, hparams, context, policy
        found = method.reductions(hparams)
        if policy.privacy is not None:
            found = {exchange: {n: noised(r) for n, r in of.items()} for exchange, of in found.items()}
        self.reductions = found

    def noised(self, exchange: str) -> Noised | None:
        """Return the reduction of an exchange that has noise, or None."""
        return next((r for r in self.reductions.get(exchange, {}).values() if isinstance(r, Noised)), None)

    def needless(self, exchange: str) -> bool:
        """Return whether a run with noise leaves an exchange out, since its arrays have no form with noise."""
        return self.policy.privacy is not None and self.noised(exchange) is None

    def reduce(
        self, exchange: str, replies: Iterable[Reply], state: ServerState, sent: Sent = lambda clients: ()
    ) -> Reduced:
        """Return the replies to an exchange, to be reduced as they arrive.

        Parameters
        ----------
        sent : gives clients with the payloads that the replies answer.
        """
        found = self.reductions.get(exchange, USUAL if exchange == "train" else {})
        robust = self.policy.robust
        share = next((r.share for r in found.values() if isinstance(r, Each) and r.share), None)
        if share and robust.rules:  # averages too, but no vote is possible on the shares
            robust = robust.replaced(robust="norm")
        reducers = {n: self._reducer(r, state, robust) for n, r in found.items() if not isinstance(r, Each)}

        def shares(arriving: Iterator[Reply]) -> Iterator[Share]:
            assert share is not None, "the method declares no shares"
            if robust.rules:
                averaged = {n for r in reducers.values() if isinstance(r, MeanReducer) for n in r.of}
                names = [n for n in self.context.initial if n not in averaged]
                yield from bounded_shares(arriving, share, names, sent)
            for reply in arriving:
                yield Share(reply, float(reply.num_samples), share(reply.arrays))

        return Reduced(replies, reducers, lambda previous: mean_of(previous, robust), shares)

    def query(self, ask: Callable[[str, Payload, Check], Iterable[Reply]]) -> Query:
        """Return the query of a method.

        Parameters
        ----------
        ask : `ask("query.<kind>", payload, check)` sends the messages and yields the replies by client id that pass
            their checks, and then `check`, which compares a client's answers.
        """
        fixed = {name for of in self.reductions.values() for r in of.values() for name in r.fixed}
        answered: dict[int, Arrays] = {}

        def changed(reply: Reply) -> str | None:
            # Of a sum, a client may have been blocked after the first answer.
            before = {} if reply.members else answered.get(reply.client, {})
            names = [n for n, a in before.items() if n in reply.arrays and not np.array_equal(a, reply.arrays[n])]
            return f"its '{names[0]}' are not those of its first answer" if names else None

        def noted(replies: Iterable[Reply]) -> Iterator[Reply]:
            for reply in replies:
                if fixed:
                    answered[reply.client] = {n: a for n, a in reply.arrays.items() if n in fixed}
                yield reply

        def query(kind: str, payload: Payload) -> Reduced:
            exchange = f"query.{kind}"
            replies = () if self.needless(exchange) else noted(ask(exchange, payload, changed))
            return self.reduce(exchange, replies, payload.common)

        return query

    def _reducer(self, reduction: Reduction, state: ServerState, robust: RobustnessSettings) -> Reducer:
        """Return an empty reduction in the form that the policy asks for."""
        if isinstance(reduction, ClassMean):
            of = reduction.of(self.context, state)
            return RobustClassMeans(reduction, of, robust) if robust.active else PlainClassMeans(reduction, of.shape)
        if isinstance(reduction, Noised):
            form = NOISED_FORMS[type(reduction.plain)]
            return form(reduction, self.context, robust.count_cap, self.policy.noise)
        if isinstance(reduction, Gaussians) and robust.rules and reduction.cov != "sums":
            return ScreenedMoments(reduction, self.context, state)
        if isinstance(reduction, Gaussians):
            return PlainMoments(reduction, self.context, state, robust.count_cap)
        if isinstance(reduction, Total):
            return PlainTotals(reduction, self.context, robust.count_cap if reduction.capped else 0.0)
        if isinstance(reduction, Rows) and reduction.further and robust.active:
            return BoundedGaussians(reduction, robust)
        if isinstance(reduction, Rows):
            return ScreenedRows(reduction) if robust.rules else PlainRows(reduction)
        assert isinstance(reduction, Mean)
        arrays = reduction.of(self.context, state)
        return MeanReducer(arrays, mean_of(arrays, robust), reduction)

    def _forms(self, exchange: str, state: ServerState) -> list[tuple[Reduction, Arrays]] | None:
        """Return each reduction of an exchange with its form; None where the method alone knows one."""
        reductions = self.reductions.get(exchange, {"": Each()}).values()
        if any(isinstance(r, Each) for r in reductions):
            return None
        found = [(r, form) for r in reductions if (form := r.form(self.context, state)) is not None]
        return found if len(found) == len(reductions) else None

    def further(self, exchange: str, state: ServerState) -> Arrays:
        """Return arrays of the names, shapes and dtypes in a reply besides the model's, for sums.

        Those of classes (`Sums.rows`) have a row for each of the C classes.
        """
        forms = self._forms(exchange, state) or []
        return {n: array for _, form in forms for n, array in form.items() if n not in self.context.initial}

    def schema(self, exchange: str, state: ServerState) -> Schema:
        """Return the possible replies to `train`, `evaluate` or a query, of clients that were sent this state."""
        method, shapes = self.method, {name: array.shape for name, array in self.context.initial.items()}
        of = self.reductions.get(exchange, {}).values()
        return Schema(
            method.id,
            method.expected(self.hparams, shapes) if exchange == "train" else {},
            () if exchange == "evaluate" else method.extra_up,
            {**Schema().sizes, **{name: size for r in of for name, size in r.sizes.items()}},
            method.numbers,
            any(isinstance(r, Each) and r.sampled for r in of),
            check=self._checker(exchange, state),
        )

    def _checker(self, exchange: str, state: ServerState) -> Check:
        """Return a function that returns why a reply does not have the form that the server reduces, or None."""
        forms = self._forms(exchange, state)
        allows = self.method.allows if self.method.reduces is None else lambda name: False
        own = tuple(r.prefix for r, _ in forms or () if isinstance(r, Gaussians))
        known = {name for r, form in forms or () for name in (*form, *(r.further if isinstance(r, Rows) else ()))}
        if exchange == "train":  # in Flower's own loop a reply may hold the whole model
            known.update(self.context.initial)

        def problem(reply: Reply) -> str | None:
            if forms is None:
                return None
            if extra := [n for n in reply.arrays.keys() - known if not n.startswith(own) and not allows(n)]:
                return Impossible(f"'{min(extra)}' is unexpected")
            return next((p for r, form in forms if (p := r.problem(self.context, reply, form))), None)

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
