"""Evaluations between rounds, the choice of the scored round, and clients that took no part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedapp.federation.hook import Hook, Setup
from fedapp.federation.participants import Outcome, Progress, stored
from fedapp.method import ServerState
from fedapp.transport import checkpoint
from fedapp.transport.request import RoundRequest
from fedapp.transport.traffic import Exchange, Spoiled

SELECTED = "selected"
"""Folder of the server's state after the round that validation images have chosen so far."""


class PeriodicEvaluation(Hook):
    """Evaluates all clients every `evaluate-every` rounds, and catches up on an evaluation that a kill cut off.

    An evaluation of a spoiled state is left out: the next round detects the fault, and the run rolls back.

    If the evaluations choose the round that is scored at the end, the last round is evaluated too, and only the models
    that clients receive are scored.
    """

    def request(self, request: RoundRequest) -> RoundRequest:
        """Ask for the balanced score in some rounds."""
        return replace(request, balanced=self.run.config.balanced_in(request.round))

    def begin(self, at: Progress) -> None:
        """Catch up on an evaluation that is missing."""
        if at.round and at.round not in self.run.directory.table("evaluations.csv").get("round", ()):
            self.evaluate(at)

    def after_round(self, at: Progress, outcome: Outcome) -> None:
        """Evaluate, if it is time."""
        self.evaluate(at)

    def evaluate(self, at: Progress) -> None:
        """Evaluate all clients after a round that is due."""
        config, cohort = self.run.config, self.run.cohort
        every, select = config.evaluation.evaluate_every, config.evaluation.select == "validation"
        if not every or at.round % every or (at.round == config.federation.num_server_rounds and not select):
            return
        request = replace(cohort.request(at.round), train=cohort.retrains and not select, received_only=select)
        try:
            cohort.evaluate("evaluate", at.state, request)
        except Spoiled as e:
            if not self.run.hooks.can_recover():
                raise
            self.run.warn(f"the evaluation after round {e.round} is left out: the model is spoiled ({e.reason})")
            self.run.directory.dropped(e.dropped)


class ValidationChoice(Hook):
    """Scores the round with the best validation accuracy over all clients at the end (`select = validation`).

    The states of rounds that may be chosen are kept as checkpoints in a folder of their own. Clients keep their states
    of the round that leads.
    """

    chosen: int | None = None

    def __init__(self, run: Setup) -> None:
        super().__init__(run)
        self.active = run.config.evaluation.select == "validation"
        self.folder = run.directory.path / SELECTED

    def best_round(self) -> int | None:
        """Return the first evaluated round with the highest validation accuracy, or None where there is none yet."""
        rows = self.run.directory.table("evaluations.csv")
        scores = rows.get("received_validation", np.empty(0))
        return None if np.isnan(scores).all() else int(rows["round"][np.nanargmax(scores)])

    def request(self, request: RoundRequest) -> RoundRequest:
        """Let clients keep their states of the best round."""
        return replace(request, keep=self.best_round() or 0) if self.active else request

    def after_evaluation(self, exchange: Exchange) -> None:
        """Keep the evaluated state and the best one before it.

        The state is kept before the row that may choose it is written, so a run that is killed in between has it.
        """
        if exchange.kind == "evaluate" and self.active:
            if (best := self.best_round()) is not None:
                checkpoint.only(self.folder, best)
            checkpoint.link(self.run.directory.path / "checkpoint", exchange.round, self.folder)

    def choose(self, at: Progress) -> Progress | None:
        """Return the best round."""
        if not self.active:
            return None
        best = self.best_round()
        if best is None:
            text = "select = validation found no validation scores, so the last round is scored: give clients more data"
            self.run.warn(text)
            return None
        self.chosen = best
        self.run.tell({"kind": "selected", "round": best})
        self.run.directory.sync()
        checkpoint.only(self.folder, best)
        chosen = stored(self.folder, best)
        self.run.cohort.restore(chosen)
        return chosen


class UnseenClients(Hook):
    """Scores the clients that take no part, after the last scores of all others, on the payloads of `send` for them.

    A resumed run does not draw them again.
    """

    def state_dict(self) -> ServerState:
        """Return the clients."""
        return {"clients": self.run.unseen}

    def load_state_dict(self, state: ServerState) -> None:
        """The run has taken them before its hooks were made."""

    def finish(self, at: Progress) -> None:
        """Score those that are there."""
        cohort = self.run.cohort
        if there := sorted(cohort.unseen & cohort.manager.nodes.keys()):
            cohort.evaluate("unseen", at.state, replace(cohort.manager.request, round=at.round, unseen=True), there)
