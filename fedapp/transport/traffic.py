"""The record of an exchange (bytes, answers, replies that do not count), and the failure of a round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from fedapp.transport.offences import Dropped


class RoundFailed(RuntimeError):
    """A round had fewer good replies, or the run fewer clients, than the settings require."""

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
class Traffic:
    """Traffic of one exchange: bytes of arrays on the wire, summed over clients, and who answered or was dropped.

    `bad` are those of the dropped whose values were out of range; `diverged` those whose training gave NaN.
    """

    messaged: list[int] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)
    down: int = 0
    up: int = 0
    dropped: list[Dropped] = field(default_factory=list)
    bad: list[Dropped] = field(default_factory=list)
    diverged: int = 0
    seconds: float = 0.0

    def require(self, needed: int, server_round: int) -> None:
        """Raise `RoundFailed` unless there were so many good replies."""
        if len(self.answered) >= needed:
            return
        reasons = "; ".join(f"client {d.client}: {d.reason}" for d in self.dropped[:5])
        more = f" and {len(self.dropped) - 5} more" if len(self.dropped) > 5 else ""
        text = (
            f"round {server_round}: {len(self.answered)} good replies of {len(self.messaged)}, "
            f"min-replies asks for {needed} ({reasons}{more})"
        )
        if len(self.answered) + len(self.bad) + self.diverged >= needed:
            raise Spoiled(text, server_round, self.dropped)
        raise RoundFailed(text, server_round)


def needed_replies(share: float, messages: int) -> int:
    """Return how many good replies a round with that many messages needs, where a share of them is enough."""
    return max(1, math.ceil(share * messages - 1e-9))
