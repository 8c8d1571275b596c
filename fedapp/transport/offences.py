"""What clients did that does not count, and which of them are blocked for the rest of a run.

`boundary` grades each refusal. A client that failed is only left out of the round. One that sent what no client code of
ours can send is blocked at once, and one that sent values out of range is blocked when it has `STRIKES` strikes. An
honest client sends such values too when its model diverged, and one malicious client may have spoiled all models.
Values therefore count against a client only where at most half of those that were sent the same sent such: a model of a
group, or of one client, may be spoiled while all others are good. Each valid reply to `train` takes back the part
`PARDON` of a strike: a malicious client with valid replies in between is blocked all the same, and a client of whose
trainings at most one in five diverges never is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

STRIKES = 3
"""Strikes with which a client is blocked; an exchange with values out of range is one."""
PARDON = 0.25
"""Part of a strike that a good training takes back."""


@dataclass(frozen=True)
class Dropped:
    """A reply that was not used: a row of `dropped.csv`."""

    round: int
    client: int
    stage: str
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return a plain dict."""
        return vars(self).copy()


@dataclass(frozen=True)
class Blocked:
    """A client that gets no message any more in this run or its resumes, and the reply that led to it."""

    round: int
    client: int
    node: int
    stage: str
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return a plain dict: a row of `blocked.csv`."""
        return vars(self).copy()


@dataclass
class Offences:
    """The record of a run.

    Attributes
    ----------
    blocked : by client id.   strikes : by client id, of those that have any.
    """

    blocked: dict[int, Blocked] = field(default_factory=dict)
    strikes: dict[int, float] = field(default_factory=dict)

    @property
    def nodes(self) -> set[int]:
        """Flower's ids of the nodes that were blocked."""
        return {b.node for b in self.blocked.values()}

    def judge(self, bad: list[Dropped], sent: Mapping[int, Hashable], good: Collection[int] = ()) -> list[Dropped]:
        """Count the bad values of one exchange; return those that block their clients.

        Parameters
        ----------
        sent : by client a digest of its payload or the like: equal for equal payloads.
        good : clients that lose a part of a strike.
        """
        for client in self.strikes.keys() & set(good):
            self.strikes[client] -= PARDON
        self.strikes = {c: n for c, n in self.strikes.items() if n > 0}
        asked, wrong = Counter(sent.values()), Counter(sent[o.client] for o in bad)
        bad = [o for o in bad if 2 * wrong[sent[o.client]] <= asked[sent[o.client]]]
        for offence in bad:
            self.strikes[offence.client] = self.strikes.get(offence.client, 0) + 1
        return [o for o in bad if self.strikes[o.client] >= STRIKES]

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        blocked = {c: found.as_dict() for c, found in sorted(self.blocked.items())}
        return {"blocked": blocked, "strikes": dict(sorted(self.strikes.items()))}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Offences:
        """Return what `state` was made of."""
        return cls({c: Blocked(**row) for c, row in state["blocked"].items()}, dict(state["strikes"]))
