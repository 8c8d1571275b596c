"""Messages in flight: their number, time limits, and replies in the order of client ids."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from flwr.app import Message
from flwr.serverapp import Grid

from fedapp.core.averages import lower_median
from fedapp.errors import counted
from fedapp.transport.boundary import FACTS_SIZE
from fedapp.transport.delivery import Coming, arrived, push

Event: TypeAlias = Callable[[dict[str, Any]], None]
Batches: TypeAlias = Sequence[list[int]]
Sender: TypeAlias = Callable[[Sequence[int]], Message]
Answers: TypeAlias = Iterator[tuple[list[int], Message]]
Found = TypeVar("Found")

PATIENCE, LEAST = 4.0, 60.0
"""Waiting time for a client that did not answer the last message of a kind, as a multiple of the others' median and in
seconds: the SuperLink needs at least as long to find out that a node is gone."""
REPORT = 30.0
"""Seconds between two events that name the missing clients."""


class Channel:
    """Messages to clients over one grid, and their replies as they arrive.

    Parameters
    ----------
    poll : shortest and longest time in seconds between two checks for replies; it grows while none arrives.
    in_turn : clients take turns on one machine, so a time limit counts from the last reply and not from the start.
    """

    def __init__(self, grid: Grid, event: Event, poll: tuple[float, float], in_turn: bool) -> None:
        self.grid, self.event, self.in_turn = grid, event, in_turn
        self.shortest, self.longest = poll
        if hasattr(grid, "pull_interval"):
            grid.pull_interval = min(self.shortest, float(grid.pull_interval))

    def answers(
        self,
        batches: Batches,
        send: Sender,
        limit: float,
        at_once: int,
        most: int = FACTS_SIZE,
        silent: Mapping[int, float] = MappingProxyType({}),
    ) -> Answers:
        """Send a message to each batch of clients and yield (batch, reply) in the order of arrival.

        The yielded clients are those that got the message: if their node no longer exists, the reply is an error from
        the SuperLink itself.

        Parameters
        ----------
        limit : seconds until the exchange ends; 0 = none.   at_once : messages in flight.
        most : bytes of a reply of a real node.
        silent : clients that did not answer the last message, with the seconds of their last answer. Where only these
            are missing, the exchange ends earlier.
        """
        unsent, waiting, coming = deque(batches), dict[str, list[int]](), dict[str, Coming]()
        last = told = heard = began = time.monotonic()
        took: list[float] = []
        while unsent or waiting:
            now = [unsent.popleft() for _ in range(min(len(unsent), at_once - len(waiting)))]
            if now:
                ids = push(self.grid, [send(batch) for batch in now])
                waiting |= {i: batch for batch, i in zip(now, ids, strict=True) if i}
            asked = time.monotonic()
            late = bool(limit) and asked - last > limit  # replies that have arrived by now still count
            missing = [c for batch in waiting.values() for c in batch]
            if took and not unsent and silent.keys() >= set(missing):
                usual = max((lower_median(took), *(silent[c] for c in missing)))
                late = late or asked - began > max(LEAST, PATIENCE * usual)
            replies = arrived(self.grid, set(waiting), most, coming, late)
            answered = time.monotonic()
            if replies:
                heard = answered
                last = heard if self.in_turn else last
            for reply in replies:
                batch = waiting.pop(reply.metadata.reply_to_message_id, None)
                if batch is not None:
                    took.append(heard - began)
                    yield batch, reply
            if late and not (replies and self.in_turn):
                return
            if waiting and answered - told > REPORT:
                told = answered
                self._report(missing, len(missing) + sum(map(len, unsent)), sum(map(len, batches)))
            if not replies and waiting:
                self._pause(asked, answered, answered - heard, last + limit - answered if limit else None)

    def _report(self, missing: Sequence[int], count: int, of: int) -> None:
        named = ", ".join(map(str, sorted(missing)[:20]))
        self.event({"kind": "waiting", "text": f"waiting for {count} of {counted(of, 'reply')}: {named}"})

    def _pause(self, asked: float, answered: float, quiet: float, left: float | None) -> None:
        """Sleep before the next check: checks must not slow down clients that share the cores and a lock."""
        pause = max(self.shortest, 4 * (answered - asked), min(self.longest, 0.1 * quiet))
        time.sleep(pause if left is None else min(pause, max(self.shortest, left)))


def in_order(
    ids: Sequence[int], arriving: Iterable[tuple[int, Found | None]], unanswered: Callable[[int], None]
) -> Iterator[Found]:
    """Yield what arrives by client in the order of `ids`, without None; call `unanswered` for a client without.

    A reply is held back until those of all clients before it have arrived or failed.
    """
    held: dict[int, Found | None] = {}
    awaited = deque(ids)
    for client, found in arriving:
        held[client] = found
        while awaited and awaited[0] in held:
            if (first := held.pop(awaited.popleft())) is not None:
                yield first
    for client in awaited:
        if client not in held:
            unanswered(client)
        elif (late := held.pop(client)) is not None:
            yield late
