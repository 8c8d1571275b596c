"""One exchange of messages (its replies, bytes and dropped replies), and the failure of a round."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedapp.errors import first_of
from fedapp.method import Reply
from fedapp.transport.offences import Dropped


class RoundFailed(RuntimeError):
    """A round had fewer valid replies, or the run fewer clients, than the settings require."""

    def __init__(self, message: str, server_round: int) -> None:
        super().__init__(message)
        self.round = server_round


class Spoiled(RoundFailed):
    """The missing replies had values out of range, or NaN in the training: the model may be spoiled.

    Attributes
    ----------
    reason : the message without the remedy.   dropped : the replies that did not count.
    """

    def __init__(self, message: str, server_round: int, dropped: Sequence[Dropped] = ()) -> None:
        remedy = "lower lr or the method's own learning rate, or set clip"
        super().__init__(f"{message}. Most often the training diverged: {remedy}", server_round)
        self.reason = message
        self.dropped = list(dropped)


@dataclass
class Exchange:
    """One exchange of messages; iterating it yields the replies that count.

    Attributes
    ----------
    kind : `train`, `evaluate`, `final`, `unseen`, `prepare` or `query.<kind>`.   round : for records and errors.
    replies : yields the replies that count.   messaged : the clients that got a message.
    metrics : by client id, the numbers of each reply that counts, with `num-examples` and `bytes-up`.
    down, up : bytes of arrays on the wire, summed over clients.
    dropped : replies that do not count.   bad : those of them with values out of range.
    diverged : number of those whose training gave NaN.
    row, rows : its row of the tables, and those of its clients, once they are written.
    """

    kind: str
    round: int
    replies: Iterator[Reply] = field(default_factory=lambda: iter(()))
    messaged: list[int] = field(default_factory=list)
    metrics: dict[int, dict[str, Any]] = field(default_factory=dict)
    down: int = 0
    up: int = 0
    dropped: list[Dropped] = field(default_factory=list)
    bad: list[Dropped] = field(default_factory=list)
    diverged: int = 0
    seconds: float = 0.0
    row: dict[str, Any] = field(default_factory=dict)
    rows: dict[int, dict[str, float]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Reply]:
        return self.replies

    @property
    def stage(self) -> str:
        """The type of its messages."""
        return "evaluate" if self.kind in ("final", "unseen") else self.kind

    def require(self, needed: int) -> None:
        """Raise `RoundFailed` unless there were so many valid replies."""
        if len(self.metrics) >= needed:
            return
        reasons = first_of([f"client {d.client}: {d.reason}" for d in self.dropped], 5, "; ")
        text = (
            f"round {self.round}: {len(self.metrics)} valid replies of {len(self.messaged)}, "
            f"min-replies asks for {needed} ({reasons})"
        )
        if len(self.metrics) + len(self.bad) + self.diverged >= needed:
            raise Spoiled(text, self.round, self.dropped)
        raise RoundFailed(text, self.round)


def needed_replies(share: float, messages: int) -> int:
    """Return how many valid replies a round with that many messages needs, where a share of them is enough."""
    return max(1, math.ceil(share * messages - 1e-9))
