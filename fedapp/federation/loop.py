"""The round loop, the same for all methods. Everything else that a run does is a hook (`hooks`)."""

from __future__ import annotations

from collections.abc import Sequence

from fedapp.federation.hook import Hooks
from fedapp.federation.participants import Outcome, Participants, Progress
from fedapp.method import ServerContext, ServerState
from fedapp.transport.traffic import Spoiled
from strategies._maths import Maths


def federate(
    method: Maths,
    cohort: Participants,
    context: ServerContext,
    hooks: Hooks,
    *,
    rounds: int,
    start: Progress | None = None,
) -> ServerState:
    """Train until `rounds` or until a hook stops, then finish. The only loop of the app.

    Parameters
    ----------
    start : point from which the run continues; None: it begins.

    Returns
    -------
    The final state.

    Raises
    ------
    RoundFailed : too few replies counted.   Spoiled : clients cannot train on the state, and no hook can help.
    """
    at = start or Progress(0, method.init(context))
    if not start:
        at = Progress(0, method.prepare(at.state, cohort.query(at)))
    del start  # its state may be large
    hooks.begin(at)  # also catches up on an evaluation that a kill cut off
    while at.round < rounds and not hooks.stopped:
        number, outcome = at.round + 1, None
        clients = cohort.sample(context.seed, number)
        at = Progress(at.round, at.state, cohort.clients)
        while not outcome:
            try:
                outcome = train_once(cohort, hooks, at, number, clients)
            except Spoiled as error:
                at = hooks.recover(at, number, error)  # raises it again where nothing can be done
        hooks.judge(at, outcome)
        at = cohort.accept(at, outcome)  # of a void round only the records stay
        hooks.after_round(at, outcome)
    at, scores = hooks.choose(at), None
    while not scores:
        try:
            state = method.finalize(at.state, cohort.query(at))
            scores = cohort.score(state, at.round)
        except Spoiled as error:
            at = hooks.recover_end(at, error)
    hooks.finish(Progress(at.round, state))
    return state


def train_once(cohort: Participants, hooks: Hooks, at: Progress, number: int, clients: Sequence[int]) -> Outcome:
    """Return the result of one attempt at round `number`."""
    exchange = cohort.train(number, at.state, clients, hooks.checks(at))
    state = cohort.aggregate(at, number, hooks.replies(exchange, at))
    cohort.end_training(exchange)
    return Outcome(state, exchange)
