"""The clients of a simulation: made from configuration and partition, and addressed several at a time.

The server knows its clients from the configuration. It asks one client of each kind, and the others are like that one.
Any of Flower's nodes runs any client, so at most `HOSTS` nodes are needed. Ten times a second Flower's simulation looks
through all messages for each of its nodes (`add_messages_to_queue` in `flwr/server/superlink/fleet/vce/vce_api.py`,
`get_message_ins` in `in_memory_linkstate.py`), which takes time with the product of both.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import Message, RecordDict

from fedapp.errors import BadRequest, counted, one_line
from fedapp.method import ClientInfo, Method, Payload
from fedapp.transport.agreement import majority, within_models
from fedapp.transport.boundary import FAILED, IMPOSSIBLE, Registration
from fedapp.transport.cohort import Cohort
from fedapp.transport.records import Encoder, group_of
from fedapp.transport.request import RoundRequest

HOSTS = 64
"""Largest number of nodes of a simulation: two for each worker that Flower can keep busy."""
MANY = 40
"""Clients of an exchange from which on a message goes to several of them."""
SHARES = 4
"""A message has at most this part of each worker's remaining clients, so that all workers end together."""
MOST = 64
"""Largest number of clients in a message: replies come together, and the run reports while they are waited for."""
MOST_BYTES = 64 << 20
"""Bytes of arrays that the replies to one message may have."""
NODES_ADDED = 10.0
"""Seconds in which Flower adds the nodes of a simulation."""
LOOKS = 25_000
"""Largest product of messages in flight and nodes in a simulation. Ten times a second Flower looks through all of its
messages for each of its nodes. A look takes 3 microseconds, under a lock that all messages need."""
WORTH_SORTING = 2.0
"""Seconds that an exchange must take before sorting its messages saves time."""
HELD_BYTES = 1 << 30
"""Bytes of memory that replies may use while they wait for those of lower ids."""


@dataclass(frozen=True)
class Member:
    """A client according to configuration and partition.

    Attributes
    ----------
    examples, tests : numbers of training and test samples.   model : architecture.   shape : of one sample.
    body : SHA-256 of its pretrained body, where clients may have several.
    """

    client: int
    examples: int
    tests: int
    model: str
    shape: tuple[int, ...] = ()
    body: str = ""

    @property
    def built(self) -> tuple[str, tuple[int, ...], str]:
        """The settings that determine the arrays of the client's model."""
        return self.model, self.shape, self.body


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


def messages_underway(nodes: int) -> int:
    """Return how many messages a simulation may have in flight; two for each worker are always enough."""
    return max(16, 2 * (os.cpu_count() or 1), LOOKS // max(1, nodes))


class VirtualCohort(Cohort):
    """The clients of a simulation: all are there from the start, and take turns.

    In a simulation of many clients several share a message, so that their common arrays are encoded and sent once.
    `several` = False: each gets a message of its own, which always goes to the same node.

    Attributes
    ----------
    members : returns all clients of a run, from their number.
    by_size : one client is asked to register for each number of training samples too; else one of each architecture,
        and the one with the fewest samples.
    """

    in_turn = True
    most_numbers = math.inf
    several = True
    by_size = False
    members: Callable[[int], Sequence[Member]]
    _hosts: Sequence[int] = ()
    """The nodes; each runs any client."""
    _asked: Sequence[int] = ()
    """The clients that were asked who they are."""

    @functools.cached_property
    def _turn(self) -> Iterator[int]:
        """Numbers of the messages to several clients, which the nodes take in turn."""
        return itertools.count()

    # ---- who is there --------------------------------------------------------------------------------------------

    def count(self) -> int:
        """Return how many clients there are where only Flower knows it: one for each of its nodes."""
        return int(self._introduced({0: self.request})[0].facts.get("partitions", 0))

    def gather(self, expected: int) -> list[ClientInfo]:
        """Take the clients from configuration and partition; 0: one for each of Flower's nodes."""
        return self.enrol(self.members(expected or self.count()))

    def candidates(self, able: Sequence[ClientInfo], infos: Sequence[ClientInfo]) -> Sequence[ClientInfo]:
        """Return the first client: all are the user's own."""
        return able[:1]

    def enrol(self, members: Sequence[Member]) -> list[ClientInfo]:
        """Take these clients, and ask a few of them to register.

        Raises
        ------
        BadRequest : a client that was asked cannot take part, no node came in time, or every client is blocked.
        """
        there = [m for m in members if m.client not in self.offences.blocked]
        self._expected = len(members)
        self.request = replace(self.request, clients=len(members))
        if not there:
            raise BadRequest("every client of this run is blocked (see blocked.csv): start a new run")
        answers = asked(there, self.by_size)
        self._asked = sorted({*answers.values(), *smallest(there)})
        requests = {c: replace(self.request, client=c) for c in self._asked}
        registrations = dict(zip(requests, self._introduced(requests), strict=True))
        if any(r.largest is not None for r in registrations.values()):  # the others have values of their own
            rest = {m.client: replace(self.request, client=m.client) for m in there if m.client not in requests}
            registrations |= zip(rest, self._introduced(rest), strict=True)
        for m in there:
            registration = registrations.get(m.client) or registrations[answers[m.client]]
            if m.client in registrations:
                self._check_member(m, registrations[m.client])
            self.nodes[m.client] = self._host([m.client])
            self.facts[m.client] = {**registration.facts, "test-examples": m.tests, "partitions": len(members)}
            self.infos[m.client] = replace(registration, client=m.client, num_samples=m.examples)
        return [self.infos[c] for c in sorted(self.infos)]

    @staticmethod
    def _check_member(member: Member, registration: Registration) -> None:
        shape = tuple(json.loads(str(registration.facts["shape"])))
        r = registration
        stated = Member(r.client, r.num_samples, r.tests, r.model, shape, member.body and r.body)
        if stated != member:
            raise BadRequest(
                f"a worker has {stated}, the server {member}: use the same version of fedapp and the same data "
                "everywhere, and start flwr run with as many num-supernodes as clients or fewer"
            )

    def _introduced(self, requests: Mapping[int, RoundRequest]) -> list[Registration]:
        """Ask clients who they are, by id."""
        self._wait_for_hosts()
        limit, found = self.settings.wait_timeout, dict[int, Registration]()
        encoder = Encoder(self.settings.wire_dtype, self.in_turn)

        def request(batch: Sequence[int]) -> Message:
            content, _ = encoder.content(Payload(), requests[batch[0]])
            return Message(content, self._host(batch), "query.register")

        batches = [[c] for c in requests]
        for batch, reply in self.channel.answers(batches, request, limit, messages_underway(len(self._hosts))):
            try:
                found[batch[0]] = self._registration(self._host(batch), reply)
            except BadRequest as e:
                raise BadRequest(one_line(e)) from e
        if missing := sorted(requests.keys() - found.keys()):
            raise BadRequest(f"gave up after {limit:g} s: client {missing[0]} has not answered; change wait-timeout")
        return [found[c] for c in requests]

    def _wait_for_hosts(self) -> None:
        """Wait until Flower has added its nodes, one by one: until two looks find the same."""
        started = told = time.monotonic()
        limit = self.settings.wait_timeout
        while not (nodes := sorted(self.grid.get_node_ids())) or nodes != self._hosts or self._few():
            self._hosts = nodes
            now = time.monotonic()
            if nodes and self._few() and now - started > NODES_ADDED:
                raise BadRequest(
                    f"secure-sum keeps the secrets of each client at a node of its own, and {len(nodes)} nodes are "
                    f"there for {counted(self._expected, 'client')}: start flwr run with num-supernodes "
                    f"= {self._expected}"
                )
            if limit and now - started > limit:
                raise BadRequest(f"gave up after {limit:g} s: no node came; change wait-timeout if it needs longer")
            if now - told > 30:
                told = now
                self.event({"kind": "waiting", "text": "waiting for Flower's nodes"})
            time.sleep(self.channel.shortest)

    def _few(self) -> bool:
        """Whether each client needs a node of its own, and there are too few."""
        return not self.several and len(self._hosts) < self._expected

    def _agree(self, method: Method, ids: Collection[int]) -> int:
        """Check that the clients agree. All are the user's own, so any disagreement is a mistake in the settings.

        Raises
        ------
        BadRequest : clients disagree.
        """
        infos = {c: self.infos[c] for c in self._asked if c in ids}  # the others are as those that were asked
        found, apart = majority(method, infos, self.facts)
        if apart := apart or within_models(method, infos, self.facts):
            raise BadRequest(one_line(next(iter(apart.values()))))
        return self._agreed(method, found, {})

    # ---- one exchange --------------------------------------------------------------------------------------------

    def _host(self, batch: Sequence[int]) -> int:
        """Return the node of a message."""
        place = next(self._turn) if len(batch) > 1 else batch[0]
        return self._hosts[place % len(self._hosts)]

    def _batches(self, kind: str, ids: Sequence[int], bytes_each: int) -> tuple[list[list[int]], int]:
        """Return the clients of each message, in the order of the messages, and how many may be in flight at a time.

        The clients with the most data start first, so that at the end no worker is still busy with the largest client.
        This costs memory: the reply of a large client with a high id waits for those of small clients with low ids. The
        memory is bounded: only the last clients by id are sorted by size, as many as have replies of `HELD_BYTES`
        together. The clients before them start in the order of their ids.

        Every tenth of a second Flower's simulation gives messages to its workers, in the order of its nodes and not in
        the order in which they were pushed. Only messages that are pushed later can therefore run later. Half of the
        messages are pushed at once, but enough for all workers; the others follow one by one as replies arrive. If the
        last exchange of this kind took less than two seconds, this is not worth a tenth of a second, and all messages
        are pushed at once.
        """
        several = self.several and len(ids) >= MANY
        if getattr(self.grid, "one_at_a_time", False):
            # Replies with models are used one by one; where only numbers come, sharing a message saves its overhead.
            size = MOST if several and kind == "evaluate" else 1
            return [list(ids[i : i + size]) for i in range(0, len(ids), size)], 16
        most, enough = messages_underway(len(set(self.nodes.values()))), 2 * (os.cpu_count() or 1)
        sizes = {c: self.infos[c].num_samples for c in ids}

        def messages(order: Sequence[int]) -> list[list[int]]:
            return list(batches(order, sizes, bytes_each)) if several else [[c] for c in order]

        # Messages in flight run in any order, so all but one of their replies may wait for the first.
        waiting = max(1, HELD_BYTES // max(1, bytes_each))
        most = min(most, max(enough, waiting // 2))
        if self._lasted.get(kind, math.inf) < WORTH_SORTING:
            return messages(ids), most
        first = max(0, len(ids) - waiting)
        order = messages([*ids[:first], *sorted(ids[first:], key=lambda c: (-sizes[c], c))])
        return order, min(most, max(len(order) // 2, enough))

    def _message(self, content: RecordDict, batch: Sequence[int], kind: str, server_round: int, most: int) -> Message:
        # Clients take turns, so their messages do not expire.
        return Message(content, self._host(batch), kind, group_id=group_of(server_round))

    def _widths(self, ids: Sequence[int]) -> dict[int, int]:
        return {c: int(self.facts[c]["width"]) for c in ids}

    def _of_another(self, client: int) -> str:
        """Return the grade of a reply in the name of another client; nodes run any client and do not register again."""
        if client in self._moved:
            return IMPOSSIBLE
        self._moved.add(client)
        return FAILED
