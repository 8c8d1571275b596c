"""The policies of a run as hooks of its round loop, each with a state of its own.

The hooks of a run act in the order of one list (`server_app.HOOKS`), which is part of its numbers. Their states are in
every checkpoint: a run that was killed after any of them goes on with the same bits. So a hook writes only what it may
write twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

from fedapp.config import RunConfig
from fedapp.federation.central import CentralTest
from fedapp.federation.participants import Observer, Outcome, Participants, Progress
from fedapp.method import BaseHParams, ClientInfo, Method, Reply, ServerState
from fedapp.reduce.reader import Check
from fedapp.results.directory import RunDirectory
from fedapp.tasks.scoring import Scoring
from fedapp.transport.request import RoundRequest
from fedapp.transport.traffic import Exchange, Spoiled
from strategies.base import Strategy


class Setup:
    """The parts of a run on which its hooks act.

    Attributes
    ----------
    central : scores on the central test set.   scoring : the clients that each score is taken on.
    unseen : clients that take no part in the training.   infos : those that take part.
    parts : with `bodies`, by the digest of a body: its strategy, infos, central, header.
    names : the clients' own names, empty where the data have none.
    scored : whether clients send scores: not those of real nodes in a run with `dp`.
    test_cap : largest number of test samples in pooled scores, as a multiple of the median client's; 0 = no limit.
    header : what a stored model needs so that it can be built again and used.
    identity : what a checkpoint says about the run.   started : when this process began, by `time.perf_counter`.
    warnings : lines of the summary.
    """

    config: RunConfig
    method: Method
    hparams: BaseHParams
    strategy: Strategy
    directory: RunDirectory
    cohort: Participants
    hooks: Hooks
    central: CentralTest
    scoring: Scoring
    unseen: list[int]
    infos: list[ClientInfo]
    parts: Mapping[str, Setup]
    names: list[str]
    scored: bool
    test_cap: float
    header: dict[str, object]
    identity: dict[str, str]
    started: float
    warnings: list[str]

    def tell(self, event: dict[str, Any]) -> None:
        """Pass an event on."""

    def warn(self, text: str) -> None:
        """Show a line, and note it in the summary."""


class Hook(Observer):
    """One policy of a run; without changes it does nothing. Three of its functions are those of `Observer`.

    Attributes
    ----------
    remembers : names of the attributes that a resumed run must have.   stop : reason to end the training, or empty.
    """

    remembers: ClassVar[tuple[str, ...]] = ()
    stop: str = ""

    def __init__(self, run: Setup) -> None:
        self.run = run

    def begin(self, at: Progress) -> None:
        """Act before the first round of this process."""

    def checks(self, at: Progress, check: Check) -> Check:
        """Return the check of a reply to `train`."""
        return check

    def replies(self, exchange: Exchange, at: Progress, replies: Iterator[Reply]) -> Iterator[Reply]:
        """Return the replies to `train` as they are reduced."""
        return replies

    def recover(self, at: Progress, server_round: int, error: Spoiled) -> Progress | None:
        """Return an earlier state to repeat a round from, if the clients cannot train on the present one."""
        return None

    def judge(self, at: Progress, outcome: Outcome) -> None:
        """Write in `outcome.void` why a round does not count, or note the reason of the hooks before."""

    def after_round(self, at: Progress, outcome: Outcome) -> None:
        """Act at the end of a round."""

    def can_recover(self) -> bool:
        """Return whether a run goes on after an evaluation between rounds that found the model spoiled."""
        return False

    def choose(self, at: Progress) -> Progress | None:
        """Return the state that is scored at the end, None: the last one."""
        return None

    def recover_end(self, at: Progress, error: Spoiled) -> Progress | None:
        """Return another state to score at the end, if the clients cannot score the last one."""
        return None

    def finish(self, at: Progress) -> None:
        """Act after the last scores, with the final state."""

    def state_dict(self) -> ServerState:
        """Return the attributes that `remembers` names."""
        return {name: getattr(self, name) for name in self.remembers}

    def load_state_dict(self, state: ServerState) -> None:
        """Take back what `state_dict` returned."""
        for name in self.remembers:
            setattr(self, name, state[name])


Kind = TypeVar("Kind", bound=Hook)


def _each(name: str) -> Callable[..., None]:
    """Return a method that calls the function `name` of each hook."""

    def call(hooks: Hooks, *given: Any) -> None:
        for hook in hooks:
            getattr(hook, name)(*given)

    return call


class Hooks(list[Hook], Observer):
    """The hooks of a run, in the order in which they act."""

    begin, judge, after_round = _each("begin"), _each("judge"), _each("after_round")
    after_query, after_evaluation, finish = _each("after_query"), _each("after_evaluation"), _each("finish")

    def one(self, kind: type[Kind]) -> Kind:
        """Return the hook of a class."""
        return next(hook for hook in self if isinstance(hook, kind))

    @property
    def stopped(self) -> str:
        """The reason for which the training ends, or an empty text."""
        return next((hook.stop for hook in self if hook.stop), "")

    def request(self, request: RoundRequest) -> RoundRequest:
        """Return the request to clients in a round."""
        return functools.reduce(lambda given, hook: hook.request(given), self, request)

    def checks(self, at: Progress) -> Callable[[Check], Check]:
        """Return a function that wraps the check of a reply."""
        return lambda check: functools.reduce(lambda inner, hook: hook.checks(at, inner), self, check)

    def replies(self, exchange: Exchange, at: Progress) -> Iterator[Reply]:
        """Return the replies to `train` as the hooks leave them."""
        return functools.reduce(lambda given, hook: hook.replies(exchange, at, given), self, iter(exchange))

    def can_recover(self) -> bool:
        """Return whether one hook can."""
        return any(hook.can_recover() for hook in self)

    def recover(self, at: Progress, server_round: int, error: Spoiled) -> Progress:
        """Return the state with which the round is repeated; without a hook that has one, raise the error."""
        return _first((hook.recover(at, server_round, error) for hook in self), error)

    def recover_end(self, at: Progress, error: Spoiled) -> Progress:
        """Return another state to score; without a hook that has one, raise the error."""
        return _first((hook.recover_end(at, error) for hook in self), error)

    def choose(self, at: Progress) -> Progress:
        """Return the state that is scored at the end."""
        return next((chosen for hook in self if (chosen := hook.choose(at)) is not None), at)

    def state_dict(self) -> ServerState:
        """Return the states of all hooks by class."""
        return {type(hook).__name__: hook.state_dict() for hook in self}

    def load_state_dict(self, state: ServerState) -> None:
        """Take back what `state_dict` returned."""
        for hook in self:
            hook.load_state_dict(state[type(hook).__name__])


def _first(found: Iterable[Progress | None], error: Spoiled) -> Progress:
    for to in found:
        if to is not None:
            return to
    raise error
