"""Rollback of a spoiled model, and the number of replies that a robust rule needs.

One finite reply can move a model so far that other clients cannot train on it. The next round detects this: so many
clients get NaN, or send values out of range, that too few replies are left. The update is then taken back and the round
is repeated. From then on no single client can move the model that far: the median replaces means, and a method without
an average bounds each client's update by the length of the median one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from fedapp.core.robust import changes_bounded, needed
from fedapp.errors import counted
from fedapp.federation.hook import Hook, Setup
from fedapp.federation.participants import Outcome, Progress, stored
from fedapp.learning.state import StateError
from fedapp.method import Reply, ServerState
from fedapp.transport import checkpoint
from fedapp.transport.traffic import Exchange, RoundFailed, Spoiled

TIMES = 2
"""Largest number of rollbacks in a run."""


class Rollback(Hook):
    """Repeats a round from an earlier state if the present one is spoiled, and bounds clients from then on.

    The first rollback returns to the state before the last update, because a round from there had enough valid replies.
    A malicious client may have spoiled that state too. So the second rollback returns to the initial state.

    Attributes
    ----------
    times : number of rollbacks.   before_round : round of the earlier state, -1 = there is none yet.
    """

    remembers = ("times", "before_round")
    times, before_round = 0, -1
    before: Progress | None = None
    at_end = False

    def __init__(self, run: Setup) -> None:
        super().__init__(run)
        self.asked_for = bool(run.cohort.strategy.policy.robust.rules)

    def can_recover(self) -> bool:
        """Return whether the run can go back.

        It cannot after `TIMES` rollbacks. If every reply is needed (`min-replies = 1`), or rules hold from the start, a
        model that diverged is a mistake in the settings.
        """
        return not self.asked_for and self.run.cohort.manager.settings.min_replies < 1 and self.times < TIMES

    def begin(self, at: Progress) -> None:
        """Bound the clients as before, and read the earlier state."""
        if self.times:
            self.bound()
        if self.before_round >= 0:
            self.before = self.read(self.before_round)

    def read(self, server_round: int) -> Progress | None:
        """Return the point after a round from its checkpoint, or None; round 0 has a file only with a `prepare`."""
        folder, strategy = self.run.directory.path / "checkpoint", self.run.cohort.strategy
        if not server_round and not checkpoint.path_of(folder, 0).exists():
            return Progress(0, strategy.init(strategy.context))
        try:
            return stored(folder, server_round)
        except StateError:
            return None

    def bound(self) -> str:
        """Bound the effect of a single client from now on, and return how."""
        strategy = self.run.cohort.strategy
        if not strategy.method.votes_on(strategy.hparams):
            return "from now on no client's update is longer than the median one"
        policy = strategy.policy
        median = policy.robust.replaced(robust="median", robust_f=max(1, policy.robust.robust_f))
        self.run.cohort.strategy = strategy.under(dataclasses.replace(policy, robust=median))
        return "from now on the median of the clients is taken"

    def recover(self, at: Progress, server_round: int, error: Spoiled) -> Progress | None:
        """Return the earlier state, and let the clients go back with it."""
        to = self.read(0) if self.times else self.before
        if to is None or not self.can_recover():
            return None
        self.times += 1
        self.run.cohort.restore(at)
        self.say(error, to, self.bound())
        self.run.cohort.rewind(to, server_round)
        self.run.cohort.pending += error.dropped
        return dataclasses.replace(to, state=self.with_records(to, at), clients=self.run.cohort.clients)

    def with_records(self, to: Progress, at: Progress) -> ServerState:
        """Return the state of `to` with the records of `at`: these have an entry for each round."""
        return {**to.state, **{name: at.state[name] for name in self.run.cohort.strategy.records if name in at.state}}

    def replies(self, exchange: Exchange, at: Progress, replies: Iterator[Reply]) -> Iterator[Reply]:
        """Bound changes by the median client's if no vote is possible; a secure sum is one reply."""
        cohort = self.run.cohort
        if not self.times or cohort.strategy.policy.robust.rules or cohort.secure is not None:
            return replies
        return iter(self.shortened(at, exchange.round, cohort.wait_for(exchange, replies)))

    def shortened(self, at: Progress, server_round: int, replies: Sequence[Reply]) -> list[Reply]:
        """Return replies whose models changed at most as much as the median client's."""
        strategy = self.run.cohort.strategy
        sent = {c: p.all() for c, p in strategy.send_each(at.state, server_round, [r.client for r in replies])}
        initial = strategy.context.initial
        names = [n for n in initial if all(n in r.arrays and n in sent[r.client] for r in replies)]
        if not names or not replies:
            return list(replies)
        found = changes_bounded(
            [{n: r.arrays[n] for n in names} for r in replies], [{n: sent[r.client][n] for n in names} for r in replies]
        )
        return [dataclasses.replace(r, arrays={**r.arrays, **new}) for r, new in zip(replies, found, strict=True)]

    def judge(self, at: Progress, outcome: Outcome) -> None:
        """Keep the state before this round as the earlier one, if the round counts."""
        if not outcome.void:
            self.before, self.before_round = at, at.round

    def recover_end(self, at: Progress, error: Spoiled) -> Progress | None:
        """Return the state before the last update: no client trained on the last one, so no round found the fault."""
        if self.at_end or self.before is None or not self.can_recover():
            return None
        self.at_end = True
        self.run.cohort.rewind(self.before, at.round + 1)
        self.say(error, self.before, "the one before it is scored")
        self.run.cohort.pending = list(error.dropped)
        return Progress(at.round, self.with_records(self.before, at))

    def say(self, error: Spoiled, to: Progress, how: str) -> None:
        """Warn that the last update, or all of them, are taken back."""
        what = "the update before" if to.round else "everything before"
        self.run.warn(f"{what} round {error.round} spoiled the model and is taken back; {how} ({error.reason})")


class EnoughForRules(Hook):
    """Ends a run in which fewer replies count than its rules need against `robust-f` malicious clients.

    A rule holds for a number of clients, so all replies must arrive before it begins. The median of a rollback needs no
    number: a client that fails must not end a run that another one spoiled.
    """

    def __init__(self, run: Setup) -> None:
        super().__init__(run)
        self.asked_for = run.cohort.strategy.policy.robust

    def replies(self, exchange: Exchange, at: Progress, replies: Iterator[Reply]) -> Iterator[Reply]:
        """Wait for all replies; raise `RoundFailed` if there are too few."""
        cohort = self.run.cohort
        if not cohort.strategy.policy.robust.rules:
            return replies
        arrived = cohort.wait_for(exchange, replies)
        if self.asked_for.rules:
            # A blocked client counts as one of the malicious clients that the rule expects.
            malicious = max(0, self.asked_for.robust_f - len(cohort.manager.offences.blocked))
            least = needed(self.asked_for.averages, malicious)
            if (count := len(exchange.metrics)) < least:
                raise RoundFailed(
                    f"round {exchange.round}: {count} valid replies, and robust needs {least} "
                    f"against {counted(malicious, 'malicious client')}: raise min-replies, or lower robust-f",
                    exchange.round,
                )
        return iter(arrived)
