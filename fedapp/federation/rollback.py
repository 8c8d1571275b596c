"""The way back of a run whose model one client has spoiled.

A finite reply can move a model to where other clients cannot train on it. The next round finds that: so many of them
get NaN, or send what is out of range, that too few replies are left. The update is then taken back and the round is
repeated. From then on no single client can move the model that far: the median takes the place of means, and where a
method has no average to take it of, no client's update is longer than the median one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedapp.core.robust import changes_bounded
from fedapp.learning.state import KEPT
from fedapp.method import Reply, ServerState
from fedapp.transport.cohort import Cohort
from strategies.base import Strategy

TIMES = 2
"""How often a run goes back."""


@dataclass(frozen=True)
class Earlier:
    """What a run can go back to.

    Attributes
    ----------
    round : the last one that counts there; 0 = none.
    state : the server's, after it.   states : what the server knew of the clients' own (`StateLedger.states`).
    """

    round: int
    state: ServerState
    states: Mapping[int, tuple[str, bool]] = field(default_factory=dict)


class WayBack:
    """Decides whether a run goes back, where to, and what bounds its clients afterwards."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.gone_back = 0

    def goes_back(self, manager: Cohort) -> bool:
        """Whether the run goes back if too few clients can do anything with what they were sent.

        Where every reply is needed (`min-replies = 1`) a model that diverged is a mistake in the settings. It also is
        where rules hold from the start, and where the run has gone back before, as often as it may.
        """
        asked_for = bool(self.strategy.policy.robust.rules) and not self.gone_back
        return not asked_for and manager.settings.min_replies < 1 and self.gone_back < TIMES

    def way_back(self, previous: Earlier) -> tuple[Earlier, str]:
        """Return the state to go on from, and what bounds clients from now on.

        At first it is the one before the last update: a round that began there had enough good replies. A client that
        has lied for longer may have spoiled that one too. So the second time it is the one that no client had a part
        in.
        """
        to = Earlier(0, self.strategy.init(self.strategy.context)) if self.gone_back else previous
        return to, self.go_back(self.gone_back + 1)

    def go_back(self, times: int) -> str:
        """Bound what one client can do from now on, and say how.

        Parameters
        ----------
        times : how often the run has gone back.
        """
        self.gone_back = times
        if not self.strategy.method.votes_on(self.strategy.hparams):
            return "from now on no client's update is longer than the median one"
        policy = self.strategy.policy
        median = policy.robust.replaced(robust="median", robust_f=max(1, policy.robust.robust_f))
        self.strategy = self.strategy.under(dataclasses.replace(policy, robust=median))
        return "from now on the median of the clients is taken"

    def shortened(self, state: ServerState, server_round: int, replies: Sequence[Reply]) -> list[Reply]:
        """Return replies of which no model changed more than the median client's."""
        sent = {c: p.all() for c, p in self.strategy.send_each(state, server_round, [r.client for r in replies])}
        names = [
            n for n in self.strategy.context.initial if all(n in r.arrays and n in sent[r.client] for r in replies)
        ]
        if not names or not replies:
            return list(replies)
        found = changes_bounded(
            [{n: r.arrays[n] for n in names} for r in replies], [{n: sent[r.client][n] for n in names} for r in replies]
        )
        return [dataclasses.replace(r, arrays={**r.arrays, **new}) for r, new in zip(replies, found, strict=True)]


def reset(manager: Cohort, to: Earlier, server_round: int) -> int:
    """Let the clients go back too, and return the `RoundRequest.back` of messages of `server_round`.

    What a client made of a spoiled model is spoiled. It keeps few of its states, though; where it has none so old any
    more it goes on from its last one.
    """
    if to.round and server_round - to.round >= KEPT:
        return 0
    manager.ledger.states = dict(to.states)
    return to.round + 1
