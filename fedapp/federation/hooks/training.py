"""Best model, patience, privacy spent, and checkpoints."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping

from fedapp.errors import counted
from fedapp.federation.hook import Hook, Setup
from fedapp.federation.participants import Outcome, Progress
from fedapp.learning.state import write_safetensors
from fedapp.method import Arrays, ServerState
from fedapp.transport import checkpoint
from fedapp.transport.traffic import Exchange
from strategies._maths import Maths


class BestModel(Hook):
    """Stores the server's arrays of the last round, and the best ones that were scored.

    `global` scores what the round produced. Where there is no such score, `received` scores what the round sent.

    Attributes
    ----------
    best : highest accuracy so far.   sent : the arrays that the present round has sent, after the first round.
    made_in : the round that made them.
    """

    remembers = ("best",)
    best: float | None = None
    sent: Arrays | None = None
    made_in = 0

    def judge(self, at: Progress, outcome: Outcome) -> None:
        """Take the arrays that the round has sent. After a rollback they are those of an earlier round."""
        self.sent, self.made_in = published(self.run.strategy, at.state) if at.round else None, at.round

    def after_round(self, at: Progress, outcome: Outcome) -> None:
        """Write the models."""
        row, header, folder = outcome.exchange.row, self.run.header, self.run.directory.path / "models"
        made = published(self.run.strategy, at.state)
        if made is None:
            return
        scored_now = not math.isnan(row.get("global_accuracy", math.nan))
        key = "global_accuracy" if scored_now else "received_accuracy"
        scored, of = (made, row["round"]) if scored_now else (self.sent, self.made_in)
        value = row.get(key, math.nan)
        write_safetensors(folder / "last.safetensors", made, {**header, "round": row["round"]})
        if scored is not None and not math.isnan(value) and (self.best is None or value > self.best):
            self.best = value
            write_safetensors(folder / "best.safetensors", scored, {**header, "round": of, key: value})


def published(strategy: Maths, state: ServerState) -> Arrays | None:
    """Return the server's arrays that are kept as a model: the global one, else the shared arrays, or None."""
    arrays = strategy.global_arrays(state) or state.get("model")
    return dict(arrays) if isinstance(arrays, dict) and arrays else None


class EarlyStop(Hook):
    """Ends the training when its loss has not fallen for `patience` rounds (0: never); no client alone decides that.

    The median of three clients or more lies within the honest ones' losses. One or two have no majority: each is
    compared with its own lowest loss before, and the first loss of a client counts as lower.
    """

    remembers = ("since", "best_loss", "lowest")

    since = 0
    best_loss: float | None = None

    def __init__(self, run: Setup) -> None:
        super().__init__(run)
        self.lowest: dict[int, float] = {}

    def begin(self, at: Progress) -> None:
        """Stay stopped."""
        self.decide()

    def after_round(self, at: Progress, outcome: Outcome) -> None:
        """Count the rounds without a lower loss."""
        losses = {c: row["train_loss"] for c, row in outcome.exchange.rows.items()}
        self.since = 0 if self.fell({c: v for c, v in losses.items() if not math.isnan(v)}) else self.since + 1
        self.decide()

    def decide(self) -> None:
        """Note why the training ends, if it does."""
        patience = self.run.config.federation.patience
        if patience and self.since >= patience:
            self.stop = f"no lower training loss for {counted(patience, 'round')}"

    def fell(self, losses: Mapping[int, float]) -> bool:
        """Return whether the loss is lower than before."""
        if 0 < len(losses) < 3:
            fell = any(loss < self.lowest.get(c, math.inf) for c, loss in losses.items())
            self.lowest.update({c: min(loss, self.lowest.get(c, loss)) for c, loss in losses.items()})
            return fell
        median = statistics.median(losses.values()) if losses else None
        if self.best_loss is not None and not (median is not None and median < self.best_loss):
            return False
        self.best_loss = median
        return True


class PrivacySpent(Hook):
    """Notes the largest epsilon and number of releases that a client states, over all its runs.

    Attributes
    ----------
    unstated : clients whose last reply is missing or was dropped: they may have released more than they stated.
    """

    remembers = ("epsilon", "releases", "unstated")

    epsilon: float | None = None
    releases = 0

    def __init__(self, run: Setup) -> None:
        super().__init__(run)
        self.unstated: list[int] = []

    def after_round(self, at: Progress, outcome: Outcome) -> None:
        """Note the numbers of a round."""
        self.after_query(outcome.exchange)

    def after_query(self, exchange: Exchange) -> None:
        """Note the numbers of a query."""
        if self.run.config.mechanism is None:
            return
        self.unstated = sorted({*self.unstated, *exchange.messaged} - exchange.metrics.keys())
        for numbers in exchange.metrics.values():
            self.epsilon = max(self.epsilon or 0.0, numbers.get("dp-epsilon", 0.0))
            self.releases = max(self.releases, numbers.get("dp-releases", 0))


class Checkpoint(Hook):
    """Writes the state of the method with those of all hooks after each round.

    The state from `prepare` is written as that of round 0, so that clients are not asked twice and a rollback to the
    beginning has it.
    """

    remembers = ("seconds",)
    earlier = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the run so far, over all its processes."""
        return self.earlier + time.perf_counter() - self.run.started

    def load_state_dict(self, state: ServerState) -> None:
        """Take the seconds of the processes before."""
        self.earlier = float(state["seconds"])

    def begin(self, at: Progress) -> None:
        """Write the state from `prepare`."""
        if not at.round and type(self.run.strategy).prepare is not Maths.prepare:
            self.save(at)

    def after_round(self, at: Progress, outcome: Outcome) -> None:
        """Write the checkpoint of a round."""
        self.save(at)

    def save(self, at: Progress) -> None:
        """Write a checkpoint."""
        run, remembered = self.run, {"Cohort": self.run.cohort.manager.state_dict(), **self.run.hooks.state_dict()}
        folder, records = run.directory.path / "checkpoint", run.strategy.records
        run.directory.sync()  # a resumed run finds the rows of all rounds behind its checkpoint
        checkpoint.save(folder, at.round, at.state, remembered, run.identity, records)
