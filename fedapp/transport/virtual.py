"""The clients of a simulation: made from configuration and partition, and addressed several at a time.

Nobody is asked what the configuration says. Of each kind of client one is asked, and the others are as it is. Flower's
nodes are only places where clients run: any of them runs any client, so that there are at most `HOSTS` of them. Ten
times a second Flower's simulation looks through all messages for each of its nodes (`add_messages_to_queue` in
`flwr/server/superlink/fleet/vce/vce_api.py`, `get_message_ins` in `in_memory_linkstate.py`), which takes time with the
product of both.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HOSTS = 64
"""Largest number of nodes of a simulation: two for each worker that Flower can keep busy."""
MANY = 40
"""Clients of an exchange from which on a message goes to several of them."""
SHARES = 4
"""A message has at most this part of what is left for each worker, so that all workers end at about the same time."""
MOST = 64
"""Largest number of clients in a message: replies come together, and the run reports while they are waited for."""
MOST_BYTES = 64 << 20
"""Bytes of arrays that the replies to one message may have."""


@dataclass(frozen=True)
class Member:
    """What configuration and partition say of a client.

    Attributes
    ----------
    examples, tests : numbers of training and test samples.   model : architecture.   shape : of one sample.
    """

    client: int
    examples: int
    tests: int
    model: str
    shape: tuple[int, ...] = ()

    @property
    def built(self) -> tuple[str, tuple[int, ...]]:
        """What decides the arrays of the client's model."""
        return self.model, self.shape


def hosts(clients: int, apart: bool = False) -> int:
    """Return the number of nodes of a simulation with that many clients.

    Parameters
    ----------
    apart : each client has a node of its own. Clients of one node share a context, which Flower writes back without a
        lock: what one keeps there (the secrets of `secure-sum`) can be lost while another runs.
    """
    return max(1, clients if apart else min(clients, HOSTS))


def asked(members: Iterable[Member], by_size: bool = False) -> dict[int, int]:
    """Return by client which one answers for it: the first of its architecture and shape of samples.

    Parameters
    ----------
    by_size : clients answer only for those with as many training samples.
    """
    first: dict[tuple[Any, ...], int] = {}
    return {m.client: first.setdefault((*m.built, m.examples if by_size else 0), m.client) for m in members}


def smallest(members: Iterable[Member]) -> list[int]:
    """Return, of each architecture and shape of samples, the client with the fewest: settings fit it least."""
    found: dict[tuple[Any, ...], Member] = {}
    for m in members:
        if m.built not in found or m.examples < found[m.built].examples:
            found[m.built] = m
    return sorted(m.client for m in found.values())


def batches(order: Sequence[int], sizes: Mapping[int, int], bytes_each: int) -> Iterator[list[int]]:
    """Divide the clients of an exchange into messages: large ones first, single clients last.

    Each message has about the same share of the work that is left, so that a few messages do for many clients, and yet
    no worker waits long for another one at the end.

    Parameters
    ----------
    order : client ids in the order in which they shall run.   sizes : samples by client.
    bytes_each : of the arrays of one reply.
    """
    most = MOST if not bytes_each else max(1, min(MOST, MOST_BYTES // bytes_each))
    left = sum(sizes[c] for c in order)
    workers = os.cpu_count() or 1
    batch: list[int] = []
    work, share = 0, left / (SHARES * workers)
    for client in order:
        batch.append(client)
        work += sizes[client]
        if work >= share or len(batch) == most:
            yield batch
            left -= work
            batch, work, share = [], 0, left / (SHARES * workers)
    if batch:
        yield batch
