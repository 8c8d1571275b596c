"""Validation of replies against the schema of their kind and the settings of the run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flwr.app import Message

from fedapp import process
from fedapp.method import ClientInfo
from fedapp.reduce.reader import Schema
from fedapp.transport.boundary import FAILED, IMPOSSIBLE, LARGE, Contract, Refused
from fedapp.transport.delivery import UNREADABLE
from fedapp.transport.request import WITHOUT_DATA

EXTRA_BYTES = 64 << 20
"""Bytes of further arrays that every reply may hold, such as a small second model."""
WORKER_DIED = (
    "ActorDiedError",
    "ActorUnavailableError",
    "RayActorError",
    "WorkerCrashedError",
    "NodeDiedError",
    "OutOfMemoryError",
)
"""Ray's errors for a process that no longer exists."""


@dataclass(frozen=True)
class Validation:
    """Makes the contracts of replies.

    Parameters
    ----------
    wire_dtype : `fp32`, or `fp16` if float32 arrays travel in half precision.
    max_abs : largest value in heads and in means of representations.
    numbers : names of the numbers that a reply may hold besides the method's own; None = any.
    scored : replies to `train` and `evaluate` hold at least one score.
    """

    wire_dtype: str = "fp32"
    max_abs: float = LARGE
    numbers: frozenset[str] | None = None
    scored: bool = False

    def contract(self, kind: str, info: ClientInfo, tests: int, schema: Schema, width: int) -> Contract:
        """Return the contract of a client's reply.

        Parameters
        ----------
        tests : test samples that the client stated, -1 = not stated.
        width : of the representations; where methods ask for them, all clients have one width.
        """
        further = 0
        if schema.further:  # one matrix per class is the most that any method asks for
            matrices = 4 * info.num_classes * width * (width + 1)
            further = EXTRA_BYTES + matrices + 16 * sum(map(math.prod, schema.shapes.values()))
            further += 8 * info.num_samples * (width + 1) if schema.sampled else 0
        return Contract(
            info.client, kind, schema, further, 0 if kind in WITHOUT_DATA else info.num_samples, self.wire_dtype, tests,
            self.max_abs, self.numbers and self.numbers.union(schema.numbers),
            self.scored and kind in ("train", "evaluate"),
        )  # fmt: skip


def failure(message: Message) -> Refused:
    """Return why an error reply does not count; if a Ray worker died, a last line has the cause and the remedy."""
    error = message.error
    reason = str(error.reason or f"error code {error.code}")
    if any(f"ray.exceptions.{name}" in reason for name in WORKER_DIED):
        sure = any(words in reason for words in ("OutOfMemoryError", "running low on memory", "memory usage threshold"))
        cause = "memory ran out" if sure else "most often because memory ran out"
        reason += f"\nthe client's worker process was killed ({cause}): lower batch-size, or {process.FEWER}"
    return Refused(reason, IMPOSSIBLE if error.code == UNREADABLE else FAILED)


def last_line(text: str) -> str:
    """Return the last line of a text that is not empty."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no reason given"
