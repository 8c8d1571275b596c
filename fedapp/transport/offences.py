"""What clients did that does not count, and which of them are blocked for the rest of a run.

`boundary` grades each refusal. A client that failed is only left out of the round. One that sent what no client code of
ours can send is blocked at once, and one that sent values out of range is blocked the `STRIKES`-th time. An honest
client sends such values too when its model diverged, and a single liar may have spoiled the models of all others.
Values therefore count against a client only in exchanges in which at most half of the clients sent such.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STRIKES = 3
"""Exchanges with values out of range after which a client is blocked."""


@dataclass(frozen=True)
class Offence:
    """One reply that did not count, in the words of `dropped.csv`."""

    round: int
    client: int
    stage: str
    reason: str


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
    blocked : by client id.   strikes : exchanges with values out of range, by client id.
    """

    blocked: dict[int, Blocked] = field(default_factory=dict)
    strikes: dict[int, int] = field(default_factory=dict)

    @property
    def nodes(self) -> set[int]:
        """Flower's ids of the nodes that were blocked."""
        return {b.node for b in self.blocked.values()}

    def judge(self, bad: list[Offence], messaged: int) -> list[Offence]:
        """Count the bad values of one exchange with `messaged` clients; return those that block their clients."""
        if 2 * len(bad) > messaged:
            return []
        for offence in bad:
            self.strikes[offence.client] = self.strikes.get(offence.client, 0) + 1
        return [o for o in bad if self.strikes[o.client] >= STRIKES]

    def state(self) -> dict[str, Any]:
        """Return JSON values for a checkpoint."""
        return {
            "blocked": [b.as_dict() for _, b in sorted(self.blocked.items())],
            "strikes": {str(c): n for c, n in sorted(self.strikes.items())},
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Offences:
        """Return what `state` was made of."""
        found = [Blocked(**row) for row in state.get("blocked", [])]
        return cls({b.client: b for b in found}, {int(c): int(n) for c, n in state.get("strikes", {}).items()})
