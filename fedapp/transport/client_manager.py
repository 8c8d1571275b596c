"""The clients as the server sees them: stable ids, checked replies in the order of the ids, bounded waits.

Flower's node ids are random in each run. Replies arrive in any order. A client that fails sends an error reply or does
not answer. Here each client has its own id, every reply is checked separately, and a dropped reply is recorded with its
reason.

The file is long because registration, exchanges and blocked clients share one state: who is which client, and who may
answer what.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from fedapp import process
from fedapp.core.averages import lower_median
from fedapp.errors import BadRequest, counted, one_line, plain
from fedapp.method import ClientInfo, Method, Payload, Reply
from fedapp.settings import FederationSettings
from fedapp.transport import roster as rosters
from fedapp.transport import virtual
from fedapp.transport.agreement import clash, compared, majority, within_models
from fedapp.transport.boundary import (
    ANOTHER,
    BAD,
    FACTS_SIZE,
    FAILED,
    IMPOSSIBLE,
    INCOMPLETE,
    LARGE,
    UNREADABLE,
    Coming,
    Contract,
    Refused,
    Registration,
    arrived,
    grade,
    patiently,
    push,
    read,
    read_registration,
)
from fedapp.transport.offences import Blocked, Offence, Offences
from fedapp.transport.records import Encoder, Part, Records, group_of, parts, sealed, together
from fedapp.transport.request import RoundRequest
from fedapp.transport.traffic import Dropped, RoundFailed, Spoiled, Traffic, needed_replies
from fedapp.transport.virtual import MANY, Member

Event = Callable[[dict[str, Any]], None]

GONE = (3, 4, 5, INCOMPLETE)
"""Flower's error codes for a message, a reply or a node that no longer exists: the client did not answer."""
LATECOMERS = 10.0
"""Seconds that further nodes have to register after the expected number of clients has registered."""
REGISTER_AGAIN = 600.0
"""Seconds after which an unanswered request to register counts as lost and is sent again."""
FAILED_AGAIN = 30.0
"""Seconds after which a node that could not take part is asked again: what kept it away may be over."""
SILENT = 2
"""Draws without an answer after which a real node gets no message in every second round that draws it."""
PATIENCE, LEAST = 4.0, 60.0
"""What a client is waited for that did not answer the last message of a kind: so many times the median of the others,
and at least as many seconds as the SuperLink needs to find out that a node is gone."""
LOOKS = 25_000
"""Largest product of messages in flight and nodes in a simulation. Ten times a second Flower looks through all of its
messages for each of its nodes. A look takes 3 microseconds, under a lock that all messages need."""
WORTH_SORTING = 2.0
"""Seconds that an exchange must take before sorting its messages saves time."""
EXTRA_BYTES = 64 << 20
"""Bytes that arrays beside the model's may have in every reply, such as a small second model."""
HELD_BYTES = 1 << 30
"""Bytes of memory that replies may use while they wait for those of lower ids."""
WORKER_DIED = (
    "ActorDiedError",
    "ActorUnavailableError",
    "RayActorError",
    "WorkerCrashedError",
    "NodeDiedError",
    "OutOfMemoryError",
)
"""Ray's errors for a process that no longer exists."""
WITHOUT_DATA = ("query.keys", "query.shares", "query.agree", "query.unmask")
"""Messages of secure sums that a client answers without its data; it states no samples."""
_DIGITS = re.compile(r"\d")
_DIGEST = re.compile(r"\A([0-9a-f]{32})?\Z")


class ClientManager:
    """The server's view of its clients over one Flower grid.

    Parameters
    ----------
    grid : Flower's grid.   settings : timeouts and shares, resolved.
    request : what every message of the run says (its token, the shared folder, ...).
    event : receives progress events (plain dicts with a `kind`).
    roster : reads which node is which client. None = the first node that is online holds a client id.
    max_abs : largest value in heads and in means of representations.
    metrics : names of the numbers that a reply may hold beside the method's own; None = any.
    scored : replies to `train` and `evaluate` hold at least one score.
    restart : clients whose stored state is lost may begin anew.
    queued : clients take turns on one machine, so time limits count from the last reply and not from the start.
    poll : shortest and longest time in seconds between two checks for replies; it grows as nothing comes.

    Attributes
    ----------
    states : what each client stored in its last round that counted: digest, and whether its next training starts from
        it. It goes with the next message, so that a client notices a state that is lost or another's.
    several : whether clients of a simulation may share a message. A message to one client alone always goes to the
        same node.
    released : how many noised releases each client says that it has made. It goes with the next message, so that a
        client notices an older copy of its ledger.
    silent : on real nodes, by kind of message: how many draws in a row each client did not answer.
    offences : which clients are blocked, and why.   reference : a client that all others agree with.
    """

    def __init__(
        self,
        grid: Grid,
        settings: FederationSettings,
        request: RoundRequest,
        event: Event = lambda e: None,
        roster: Callable[[], Mapping[int, rosters.Admitted] | None] = lambda: None,
        *,
        max_abs: float = LARGE,
        metrics: frozenset[str] | None = None,
        scored: bool = False,
        restart: bool = False,
        queued: bool = False,
        poll: tuple[float, float] = (0.02, 0.1),
    ) -> None:
        self.grid = grid
        self._read_roster = roster
        self.roster = roster()
        self.settings, self.queued = settings, queued
        self._max_abs, self._metrics, self._scored, self._restart = max_abs, metrics, scored, restart
        self._poll, self._slowest = poll
        self.request = request
        self.event = event
        self.nodes: dict[int, int] = {}
        self.infos: dict[int, ClientInfo] = {}
        self.facts: dict[int, dict[str, Any]] = {}
        self.first_error: dict[str, Any] | None = None
        self.states: dict[int, tuple[str, bool]] = {}
        self.released: dict[int, int] = {}
        self.silent: dict[str, dict[int, int]] = {}
        self._took: dict[tuple[str, int], float] = {}  # seconds of the last answer, by kind and client
        self.offences = Offences()
        self.reference = -1
        self._seen: set[int] = set()
        self._strangers: set[int] = set()
        # Unanswered requests by message id: the node, and when it was sent.
        self._unregistered: dict[str, tuple[int, float]] = {}
        self._coming: dict[str, Coming] = {}  # answers to them that are not complete
        self._left_out: dict[int, str] = {}  # why, by node
        self._failed: dict[int, float] = {}  # when a node said that it cannot take part
        self._stated: dict[int, int] = {}  # which client a node says that it is
        self._moved: set[int] = set()  # nodes, in a simulation clients, that answered as another client
        self._twice: set[int] = set()  # nodes with the id of another one, which may be gone soon
        self._expected = 0
        self._hosts: list[int] = []  # the nodes of a simulation, each of which runs any client
        self._asked: list[int] = []  # those of its clients that were asked who they are
        self._turn = itertools.count()
        self.several = True
        self._method: Method | None = None
        self._encoder = Encoder(settings.wire_dtype, queued)
        self._lasted: dict[str, float] = {}
        if hasattr(grid, "pull_interval"):
            grid.pull_interval = min(self._poll, float(grid.pull_interval))

    # ---- who is there --------------------------------------------------------------------------------------------

    def gather(self, expected: int) -> list[ClientInfo]:
        """Wait until `expected` clients have registered (0: as many as there are nodes). On real nodes; see `enrol`.

        A node that is online but does not answer delays the run only a little: once `expected` clients
        have registered, it has `LATECOMERS` seconds. When the wait limit has passed, the run starts if at least a share
        of `min_replies` has registered (or `min_clients`). A client that is left out may join before any later round.
        It is not waited for if it is one of those expected, 0 .. `expected` - 1, and enough others are there.

        Raises
        ------
        BadRequest : the wait limit passed, or too few clients are left. The message gives the client and the reason.
        """
        started = reported = time.monotonic()
        enough: float | None = None
        settled: float | None = None
        while True:
            self.register(strict=True)
            want = expected or self.partitions() or max(1, len(self.nodes))
            self._expected = want
            want -= sum(c < want for c in self.offences.blocked)  # they are not asked again
            if want <= 0:
                raise BadRequest("every client of this run is blocked (blocked.csv says why): start a new run")
            now = time.monotonic()
            if len(self.nodes) >= want:
                enough = now if enough is None else enough
                late = bool(expected) and now - enough > LATECOMERS
                if self._unregistered and late:
                    self.event({"kind": "warning", "text": f"{self._silent()}: starting without them"})
                if late or not self._unregistered:
                    return [self.infos[c] for c in sorted(self.infos)]
            # Whoever it was that was left out, another node may still come as the client that is missing: on real nodes
            # only the time limit ends the wait for enough of them. Who does not say which client it is, such as a node
            # with a registration that makes no sense, may be the one that is missing, or nobody.
            if not self._unregistered and 0 < want - len(self.nodes) <= len(self._left_out):
                known = want - len(self.nodes) <= self._left_out_of(self._expected)
                settled = now if settled is None else settled
                if (known or now - settled > LATECOMERS) and len(self.nodes) >= self.fewest():
                    return [self.infos[c] for c in sorted(self.infos)]
            else:
                settled = None
            if self.settings.wait_timeout and now - started > self.settings.wait_timeout:
                if len(self.nodes) >= self.fewest():
                    text = f"{self._waiting(want)} after {self.settings.wait_timeout:g} s: starting without them"
                    self.event({"kind": "warning", "text": text})
                    return [self.infos[c] for c in sorted(self.infos)]
                if self._left_out_of(self._expected):
                    self._enough_left(next(iter(self._left_out.values())))
                why = "".join(f"; {reason}" for reason in list(self._left_out.values())[:3])
                raise BadRequest(
                    f"gave up after {self.settings.wait_timeout:g} s: {self._waiting(want)}{why}; "
                    "start the missing clients, or change wait-timeout, min-replies or min-clients"
                )
            if now - reported > 30:
                reported = now
                self.event({"kind": "waiting", "text": self._waiting(want)})
            time.sleep(min(0.2, 10 * self._poll))

    def partitions(self) -> int:
        """Return into how many parts the data are split for the clients, 0 where each has its own."""
        return int(lower_median([int(f.get("partitions", 0)) for f in self.facts.values()]))

    def fewest(self) -> int:
        """Return the smallest number of clients that the run goes on with."""
        return self.settings.min_clients or needed_replies(self.settings.min_replies, self._expected)

    def left_out(self) -> list[str]:
        """Return why nodes are left out that take no part."""
        return [reason for node, reason in self._left_out.items() if node not in self.nodes.values()]

    def _left_out_of(self, expected: int) -> int:
        """Return how many of the clients 0 .. `expected` - 1 are missing because their nodes were left out."""
        missing = {self._stated.get(node, -1) for node in self._left_out} - self.nodes.keys()
        return sum(0 <= c < expected for c in missing - self.offences.blocked.keys())

    def _enough_left(self, reason: str) -> None:
        """Raise `BadRequest` unless enough clients are left without those that were left out, for such a reason."""
        if len(self.nodes) < self.fewest():
            few = (
                f"{len(self.nodes)} of {counted(self._expected, 'client')} can take part, and "
                f"{self.fewest()} are needed: "
            )
            raise BadRequest(reason if self.queued or not self.nodes else few + reason)

    def _waiting(self, want: int) -> str:
        known = set(self.nodes)
        missing = [str(c) for c in range(want) if c not in known] if all(c < want for c in known) else []
        named = f", missing {', '.join(missing[:20])}" if missing and known else ""
        if len(known) >= want:
            return self._silent()
        silent = f"; {self._silent()}" if self._unregistered else ""
        return f"waiting for {want - len(known)} of {counted(want, 'client')}{named}{silent}"

    def _silent(self) -> str:
        return f"{len(self._unregistered)} node(s) that are online have not answered"

    def register(self, strict: bool = False) -> list[int]:
        """Ask nodes that are new or came back to register, and return the ids of the clients that joined.

        Parameters
        ----------
        strict : before round 1 the caller waits for answers. Later this method waits for a new node once. A node that
            does not answer in that time may answer before any later round, which does not wait.

        A node that cannot take part is left out with a warning. It is asked again after it has been offline, and if it
        says so itself, every `FAILED_AGAIN` seconds.
        """
        if self._hosts:
            return []  # all clients of a simulation are there from the start
        now = time.monotonic()
        online = set(patiently(self.grid.get_node_ids)) - self.offences.nodes
        self._renew_roster()
        if self.roster is not None:
            self._strangers -= set(self.roster)
            for node in sorted(online - set(self.roster) - self._strangers):
                self._strangers.add(node)
                text = f"node {node} is not in the roster and was left out: fedapp admit KEY.pub --client N admits it"
                self.event({"kind": "warning", "text": text})
            online &= set(self.roster)
        self._seen &= online
        if not strict:
            self._seen -= self._twice
            self._twice.clear()
        fresh = online - self._seen
        asked = self._unregistered
        lost = [i for i, (node, since) in asked.items() if node not in online or now - since > REGISTER_AGAIN]
        over = {node for node, since in self._failed.items() if now - since > FAILED_AGAIN}
        again = ({asked.pop(i)[0] for i in lost} | over) & self._seen
        self._failed = {node: since for node, since in self._failed.items() if node not in over}
        self._seen -= again
        self._ask_to_register(sorted(fresh | again), now)
        limits = [t for t in (self.settings.wait_timeout, self.settings.round_timeout) if t]
        limit = 0.0 if strict else min(limits, default=60.0)
        joined = []
        while self._unregistered:
            replies = arrived(self.grid, set(self._unregistered), FACTS_SIZE, self._coming)
            for reply in replies:
                said = self._unregistered.pop(reply.metadata.reply_to_message_id, None)
                if said is None:
                    continue
                node = said[0]
                if reply.has_error() and reply.error.code in GONE:
                    self._seen.discard(node)
                    continue
                before = set(self.infos)
                try:
                    joined.append(self._registered(node, reply, online))
                    self._left_out.pop(node, None)
                except BadRequest as e:
                    former, self._left_out[node] = self._left_out.get(node, ""), one_line(e)
                    if _DIGITS.sub("", former) != _DIGITS.sub("", self._left_out[node]):  # it may count seconds
                        self.event({"kind": "warning", "text": f"a new node was left out: {one_line(e)}"})
                    continue
                if not strict:
                    for counts in self.silent.values():  # it was away, so it gets the next message
                        counts.update({c: 1 for c in counts if c == joined[-1]})
                    how = "is here again" if joined[-1] in before else "takes part from now on"
                    self.event({"kind": "joined", "client": joined[-1], "text": f"client {joined[-1]} {how}"})
            if not replies:
                awaited = fresh & {node for node, _ in self._unregistered.values()}
                if not awaited or time.monotonic() - now >= limit:
                    break
                time.sleep(min(self._slowest, max(self._poll, 0.1 * (time.monotonic() - now))))
        return sorted(joined)

    def _renew_roster(self) -> None:
        """Read the roster again: nodes may be admitted during a run. One that cannot be read changes nothing."""
        try:
            self.roster = self._read_roster()
        except BadRequest as e:
            self.event({"kind": "warning", "text": f"the roster of before is used: {one_line(e)}"})

    def _ask_to_register(self, nodes: list[int], now: float) -> None:
        """Push the requests; a node whose request the SuperLink did not accept counts as not seen."""
        if not nodes:
            return
        content, _ = self._encoder.content(Payload(), self.request)
        requests = [Message(content, n, "query.register", group_id=group_of(0, FACTS_SIZE)) for n in nodes]
        ids = push(self.grid, requests)
        for node, message_id in zip(nodes, ids, strict=True):
            if message_id:
                self._unregistered[message_id] = (node, now)
                self._seen.add(node)

    def _registered(self, node: int, reply: Message, online: set[int]) -> int:
        """Add a client that answered; a `BadRequest` says why it cannot take part."""
        registration = self._registration(node, reply)
        client, info = registration.client, {**registration.info, "test-examples": registration.tests}
        self._stated[node] = client
        if self.roster is not None:
            rosters.check(self.roster[node], client, registration.count, registration.tests)
        if client in self.offences.blocked:
            raise BadRequest(f"client {client} is blocked in this run: {self.offences.blocked[client].reason}")
        if self.nodes.get(client, node) != node and self.nodes[client] in online:
            self._twice.add(node)
            raise BadRequest(
                f"two nodes are client {client}, of which {node} came second: give every node its own client-id or "
                "partition-id in node-config (a node without a key that was killed and restarted counts twice for a "
                "minute)"
            )
        newcomer = ClientInfo(
            client,
            registration.count,
            registration.model,
            registration.classes,
            registration.shapes,
            registration.common,
        )
        others = [c for c in (self.reference, *sorted(self.infos)) if c != client and c in self.infos]
        if self._method is not None:
            for other in compared(newcomer, others, self.infos):
                problem = clash(self._method, self.infos[other], newcomer, self.facts[other], info)
                if problem:
                    raise BadRequest(problem)
        for former in [c for c, n in self.nodes.items() if n == node and c != client]:
            self._forget(former)
        self.nodes[client], self.facts[client], self.infos[client] = node, info, newcomer
        return client

    def _registration(self, node: int, reply: Message) -> Registration:
        """Return what a client states about itself; a `BadRequest` says why it cannot take part."""
        if reply.has_error():
            reason = _reason(reply)
            self._note_error(0, -1, "register", reason)
            raise BadRequest(f"a client cannot take part: {_last_line(reason)}")
        registration = read_registration(reply)
        if isinstance(registration, Refused):
            if registration.offence != FAILED:
                raise BadRequest(f"node {node} cannot take part: {registration.reason}")
            who = registration.who
            self._failed[node] = time.monotonic()
            self._stated[node] = int(who.split()[-1]) if who[-1].isdigit() else -1
            self._note_error(0, self._stated[node], "register", registration.reason)
            raise BadRequest(f"{who} cannot take part: {_last_line(registration.reason)}")
        return registration

    # ---- a simulation: all clients are known ------------------------------------------------------------------------

    def count(self) -> int:
        """Return how many clients a simulation has where only Flower knows it: one for each of its nodes."""
        return int(self._introduced({0: self.request})[0].info.get("partitions", 0))

    def enrol(self, members: Sequence[Member], by_size: bool = False) -> list[ClientInfo]:
        """Take the clients of a simulation as configuration and partition say. Few of them are asked, in their place.

        Parameters
        ----------
        members : all clients.
        by_size : one client is asked for each number of training samples too; else one of each architecture, and the
            one with the fewest samples.

        Raises
        ------
        BadRequest : a client that was asked cannot take part, no node came in time, or every client is blocked.
        """
        there = [m for m in members if m.client not in self.offences.blocked]
        self._expected = len(members)
        self.request = replace(self.request, clients=len(members))
        if not there:
            raise BadRequest("every client of this run is blocked (blocked.csv says why): start a new run")
        answers = virtual.asked(there, by_size)
        chosen = sorted({*answers.values(), *virtual.smallest(there)})
        requests = {c: replace(self.request, client=c) for c in chosen}
        registrations = dict(zip(chosen, self._introduced(requests), strict=True))
        for m in there:
            registration = registrations[answers[m.client]]
            if m.client in registrations:
                self._check_member(m, registrations[m.client])
            self.nodes[m.client] = self._hosts[m.client % len(self._hosts)]
            self.facts[m.client] = {**registration.info, "test-examples": m.tests, "partitions": len(members)}
            self.infos[m.client] = ClientInfo(
                m.client, m.examples, registration.model, registration.classes, registration.shapes, registration.common
            )
        self._asked = chosen
        return [self.infos[c] for c in sorted(self.infos)]

    @staticmethod
    def _check_member(member: Member, registration: Registration) -> None:
        shape = tuple(json.loads(str(registration.info["shape"])))
        stated = Member(registration.client, registration.count, registration.tests, registration.model, shape)
        if stated != member:
            raise BadRequest(
                f"a worker has {stated}, the server {member}: use the same version of fedapp and the same data "
                "everywhere, and start flwr run with as many num-supernodes as clients or fewer"
            )

    def _few(self) -> bool:
        """Whether each client of a simulation needs a node of its own, and there are too few."""
        return not self.several and len(self._hosts) < self._expected

    def _introduced(self, asked: Mapping[int, RoundRequest]) -> list[Registration]:
        """Ask clients of a simulation who they are, by id."""
        started = told = time.monotonic()
        limit = self.settings.wait_timeout
        while not (nodes := sorted(self.grid.get_node_ids())) or nodes != self._hosts or self._few():
            self._hosts = nodes  # two equal looks: Flower adds its nodes one by one
            now = time.monotonic()
            if nodes and self._few() and now - started > LATECOMERS:
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
            time.sleep(self._poll)

        def request(batch: Sequence[int]) -> Message:
            content, _ = self._encoder.content(Payload(), asked[batch[0]])
            return Message(content, self._host(batch), "query.register")

        found: dict[int, Registration] = {}
        for batch, reply in self._raw([[c] for c in asked], request, limit, self._underway(len(self._hosts))):
            try:
                found[batch[0]] = self._registration(self._host(batch), reply)
            except BadRequest as e:
                raise BadRequest(one_line(e)) from e
        if missing := sorted(asked.keys() - found.keys()):
            raise BadRequest(f"gave up after {limit:g} s: client {missing[0]} has not answered; change wait-timeout")
        return [found[c] for c in asked]

    def _host(self, batch: Sequence[int]) -> int:
        """Return the node of a message. Clients of a simulation have none of their own if there are more of them."""
        if not self._hosts:
            return self.nodes[batch[0]]
        if len(batch) > 1:
            return self._hosts[next(self._turn) % len(self._hosts)]
        return self._hosts[batch[0] % len(self._hosts)]

    # ---- who agrees ------------------------------------------------------------------------------------------------

    def agree(self, method: Method) -> None:
        """Check before round 1 that the clients agree on what they share; afterwards `reference` is one of them.

        On real nodes the majority is right, and the others are left out. In a simulation all clients are the user's
        own, so that any disagreement is a mistake in the settings.

        Raises
        ------
        BadRequest : clients disagree and there is no majority, too few are left, or it is a simulation; the message
            names the clients, models and shapes.
        """
        # Clients that were not asked are as those that were.
        infos = {c: self.infos[c] for c in self._asked} or self.infos
        found, apart = majority(method, infos, self.facts)
        if self.queued and not apart:
            apart = within_models(method, infos, self.facts)  # on real nodes the server's own weights decide
        if apart and (found is None or self.queued):
            raise BadRequest(one_line(next(iter(apart.values()))))
        self.reference = min(self.infos) if found is None else found
        self.leave_out(apart)
        self._method = method

    def leave_out(self, reasons: Mapping[int, str]) -> None:
        """Leave out clients that do not fit the others or the server's model; by client id, the reason.

        Raises
        ------
        BadRequest : too few clients are left.
        """
        for client, reason in sorted(reasons.items()):
            self._left_out[self._forget(client)] = one_line(reason)
            self.event({"kind": "warning", "text": f"client {client} was left out: {one_line(reason)}"})
        if reasons:
            self._enough_left(one_line(min(reasons.items())[1]))
        if self.reference not in self.infos:
            self.reference = min(self.infos)

    def _forget(self, client: int) -> int:
        """Drop all that is known of a client, and return its node."""
        del self.infos[client], self.facts[client]
        return self.nodes.pop(client)

    def without_silent(self, server_round: int, ids: Sequence[int]) -> tuple[list[int], list[Dropped]]:
        """Return which of the drawn clients get a message in a round, and why the others do not.

        A real node that stays online and does not answer would hold up every round. Whom a round draws does not depend
        on it, so that the draws stay a function of seed and round.
        """
        kinds = ("train", *WITHOUT_DATA)
        counts = {c: max((self.silent.get(kind, {}).get(c, 0), kind) for kind in kinds) for c in ids}
        skipped = {c: found for c, found in counts.items() if found[0] >= SILENT and found[0] % 2 == 0}
        if len(skipped) == len(ids):
            return list(ids), []
        left = []
        for client, (count, kind) in skipped.items():
            self.silent[kind][client] += 1
            reason = f"no message in this round, because the last {count} that drew it brought no answer"
            left.append(Dropped(server_round, client, "train", reason))
            self.event({"kind": "dropped", **left[-1].as_dict()})
        return [c for c in ids if c not in skipped], left

    # ---- one exchange --------------------------------------------------------------------------------------------

    def send_and_receive(
        self,
        kind: str,
        server_round: int,
        payloads: Iterable[tuple[int, Payload]],
        expected: Mapping[str, tuple[int, ...]],
        check: Callable[[Reply], str | None],
        traffic: Traffic,
        request: RoundRequest | None = None,
        timeout: float | None = None,
        raw: Mapping[str, tuple[str, tuple[int, ...]]] | None = None,
        each: Callable[[int, RoundRequest], RoundRequest] = lambda client, request: request,
    ) -> Iterator[Reply]:
        """Send messages to clients and yield the good replies in the order of the client ids.

        On real nodes each client gets a message of its own. In a simulation of many clients several share one, so that
        what they all get is encoded and sent once for all of them.

        `each` changes the request to one client; without `request` it is that of all messages, in `server_round`, which
        records and errors name. A client restores the state that it had before the round of its request. With `raw`
        (`Contract.raw`) replies hold what secure sums consist of.

        A reply is held back until the replies of all lower ids have arrived or failed, so that sums are added up in the
        same order, no matter which client ends first. In a simulation the clients with the most data start first, so
        that at the end no worker is still busy with the largest client (see :meth:`_dispatch`). This costs memory: the
        reply of a large client with a high id waits for those of small clients with low ids. The memory is bounded:
        only the last clients by id are sorted by size, as many as have replies of `HELD_BYTES` together. The clients
        before them start in the order of their ids.

        Afterwards `traffic` says which clients got a message, answered or were dropped.
        """
        started = time.perf_counter()
        common = replace(self.request, round=server_round) if request is None else request
        limit = self.settings.round_timeout if timeout is None else timeout
        # A message expires when nobody waits for its reply any more, so that it does not keep a slow node busy. The
        # extra minute allows for clocks that differ. Virtual clients take turns, so their messages do not expire.
        lifetime = limit + 60 if limit and not self.queued else None
        # For this exchange only: it keeps everything that it has encoded.
        encoder = Encoder(self.settings.wire_dtype, self.queued)
        given = dict(payloads)
        ids = sorted(given)
        traffic.messaged.extend(ids)
        kinds: dict[Any, Any] = {}  # equal ones are kept once
        groups = {c: kinds.setdefault(sent, sent) for c, sent in ((c, _content(p)) for c, p in given.items())}

        def content(client: int) -> Records:
            digest, binds = self.states.get(client, ("", True))
            known = replace(
                each(client, common), client=client if self._hosts else -1, state=digest,
                state_binds=binds or not digest, releases=self.released.get(client, 0),
            )  # fmt: skip
            found, size = encoder.records(given.pop(client), known)
            traffic.down += size
            return found

        def message(batch: Sequence[int]) -> Message:
            whole = sealed(content(batch[0])) if len(batch) == 1 else together({c: content(c) for c in batch})
            group = group_of(server_round, 0 if self._hosts else largest)
            return Message(whole, self._host(batch), kind, ttl=lifetime, group_id=group)

        bytes_each = 4 * sum(math.prod(shape) for shape in expected.values())
        bytes_each += sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in (raw or {}).values())
        order, at_once = self._dispatch(kind, ids, bytes_each)
        held: dict[int, Reply | None] = {}
        awaited, arrivals = deque(ids), itertools.count()
        longest = limit * max(map(len, order), default=1)
        most = 0 if self._hosts else max((self._further(c, kind, expected) for c in ids), default=0)
        largest = FACTS_SIZE + bytes_each + most
        known, quiet = self.silent.get(kind, {}), set[int]()
        patience = {c: self._took.get((kind, c), 0.0) for c in known}
        for batch, answer in self._raw(order, message, longest, at_once, largest, patience):
            if answer.has_error() and answer.error.code == INCOMPLETE:
                quiet.add(batch[0])
            elif not self._hosts:
                known.pop(batch[0], None)
                self._took[kind, batch[0]] = time.perf_counter() - started
            several = {} if len(batch) == 1 or answer.has_error() else parts(answer.content)
            for client in batch:
                contract = self._contract(client, kind, expected, raw or {})
                part = several.get(client, answer)
                held[client] = self._checked(part, contract, server_round, check, traffic, next(arrivals))
            while awaited and awaited[0] in held:
                if (reply := held.pop(awaited.popleft())) is not None:
                    yield reply
        for client in awaited:
            if client not in held:
                quiet.add(client)
                waited = time.perf_counter() - started
                seconds = longest if 0 < longest <= waited else round(waited)
                self._drop(traffic, server_round, client, kind, f"no answer within {seconds:g} s")
            elif (reply := held.pop(client)) is not None:
                yield reply
        if not self._hosts:
            self.silent[kind] = known | {c: known.get(c, 0) + 1 for c in quiet}
        for offence in self.offences.judge(traffic.bad, groups, traffic.answered if kind == "train" else ()):
            self._block(offence, "values out of range too often: ")
        self._lasted[kind] = time.perf_counter() - started
        traffic.seconds += self._lasted[kind]

    def _dispatch(self, kind: str, ids: Sequence[int], bytes_each: int) -> tuple[list[list[int]], int]:
        """Return the clients of each message, in the order of the messages, and how many may be in flight at a time.

        Every tenth of a second Flower's simulation gives messages to its workers, in the order of its nodes and not in
        the order in which they were pushed. Only messages that are pushed later can therefore run later. Half of the
        messages are pushed at once, but enough for all workers; the others follow one by one as replies arrive. If the
        last exchange of this kind took less than two seconds, this is not worth a tenth of a second, and all messages
        are pushed at once.
        """
        if not self.queued:
            return [[c] for c in ids], len(ids)
        several = self.several and bool(self._hosts) and len(ids) >= MANY
        if getattr(self.grid, "one_at_a_time", False):
            # Replies with models are used one by one; where only numbers come, sharing a message saves its overhead.
            size = virtual.MOST if several and kind == "evaluate" else 1
            return [list(ids[i : i + size]) for i in range(0, len(ids), size)], 16
        most, enough = self._underway(len(set(self.nodes.values()))), 2 * (os.cpu_count() or 1)
        sizes = {c: self.infos[c].num_samples for c in ids}

        def messages(order: Sequence[int]) -> list[list[int]]:
            return list(virtual.batches(order, sizes, bytes_each)) if several else [[c] for c in order]

        # Messages in flight run in any order, so all but one of their replies may wait for the first.
        waiting = max(1, HELD_BYTES // max(1, bytes_each))
        most = min(most, max(enough, waiting // 2))
        if self._lasted.get(kind, math.inf) < WORTH_SORTING:
            return messages(ids), most
        first = max(0, len(ids) - waiting)
        order = messages([*ids[:first], *sorted(ids[first:], key=lambda c: (-sizes[c], c))])
        return order, min(most, max(len(order) // 2, enough))

    @staticmethod
    def _underway(nodes: int) -> int:
        """Return how many messages a simulation may have in flight; two for each worker are always enough."""
        return max(16, 2 * (os.cpu_count() or 1), LOOKS // max(1, nodes))

    def _raw(
        self,
        batches: Sequence[list[int]],
        message: Callable[[Sequence[int]], Message],
        limit: float,
        at_once: int,
        most: int = FACTS_SIZE,
        silent: Mapping[int, float] = MappingProxyType({}),
    ) -> Iterator[tuple[list[int], Message]]:
        """Send messages to clients, at most `at_once` at a time; yield (clients, reply) in the order of arrival.

        On real nodes a reply may have `most` bytes.

        Ends when all have answered or `limit` seconds have passed; a limit of 0 waits without limit. It does not wait
        that long where only `silent` clients are missing, which are given with the seconds of their last answer. The
        yielded clients are those that got the message: if their node no longer exists, the reply is an error from the
        SuperLink itself.
        Every 30 seconds an event names the clients whose replies are missing.
        """
        unsent = deque(batches)
        waiting: dict[str, list[int]] = {}
        coming: dict[str, Coming] = {}
        last = told = heard = began = time.monotonic()
        took: list[float] = []
        while unsent or waiting:
            now = [unsent.popleft() for _ in range(min(len(unsent), at_once - len(waiting)))]
            if now:
                ids = push(self.grid, [message(batch) for batch in now])
                waiting |= {i: batch for batch, i in zip(now, ids, strict=True) if i}
            asked = time.monotonic()
            late = bool(limit) and asked - last > limit  # what has come by now still counts
            missing = [c for batch in waiting.values() for c in batch]
            if took and not unsent and silent.keys() >= set(missing):
                usual = (lower_median(took), *(silent[c] for c in missing))
                late = late or asked - began > max(LEAST, PATIENCE * max(usual))
            replies = arrived(self.grid, set(waiting), most, coming, late)
            answered = time.monotonic()
            if replies:
                heard = answered
                last = heard if self.queued else last
            for reply in replies:
                batch = waiting.pop(reply.metadata.reply_to_message_id, None)
                if batch is not None:
                    took.append(heard - began)
                    yield batch, reply
            if late and not (replies and self.queued):
                return
            if waiting and answered - told > 30:
                told = answered
                named = ", ".join(map(str, sorted(missing)[:20]))
                count, of = len(missing) + sum(map(len, unsent)), sum(map(len, batches))
                text = f"waiting for {count} of {counted(of, 'reply')}: {named}"
                self.event({"kind": "waiting", "text": text})
            if not replies and waiting:
                # Checks for replies must not slow down the clients: in a simulation they share the cores and a lock.
                slow = min(self._slowest, 0.1 * (answered - heard))
                pause = max(self._poll, 4 * (answered - asked), slow)
                if limit:
                    pause = min(pause, max(self._poll, last + limit - answered))
                time.sleep(pause)

    def _checked(
        self,
        message: Message | Part,
        contract: Contract,
        server_round: int,
        check: Callable[[Reply], str | None],
        traffic: Traffic,
        arrival: int,
    ) -> Reply | None:
        """Return a reply that counts, or None: then its reason is recorded. Nothing that a client sends is raised."""
        client, stage = contract.client, contract.kind
        got = read(message, contract)
        if isinstance(message, Message) and message.has_error():
            unreadable = message.error.code == UNREADABLE
            got = Refused(_reason(message), IMPOSSIBLE if unreadable else FAILED)
        if isinstance(got, Refused):
            if got.offence == FAILED:
                self._note_error(server_round, client, stage, got.reason)
                traffic.diverged += FloatingPointError.__name__ in _last_line(got.reason)
            offence = self._of_another(client) if got.offence == ANOTHER else got.offence
            self._drop(traffic, server_round, client, stage, _last_line(got.reason), offence)
            return None
        reply = Reply(
            client, int(got.metrics["num-examples"]), got.arrays, got.metrics, got.size, stage, arrival
        )  # fmt: skip
        problem = self._state_problem(client, got.info)
        try:
            problem = problem or check(reply)
        except Exception as e:  # a method's own check is no boundary: what it did not foresee drops the reply too
            problem = f"the reply cannot be read: {type(e).__name__}: {e}"
        if problem:
            self._drop(traffic, server_round, client, stage, problem, grade(problem))
            return None
        if "state" in got.info:
            self.states[client] = str(got.info["state"]), bool(got.info.get("state-binds", True))
        released = reply.metrics.get("dp-releases", 0)
        if isinstance(released, int) and released > self.released.get(client, 0):
            self.released[client] = released
        traffic.answered.append(client)
        traffic.up += got.size
        return reply

    def _of_another(self, client: int) -> str:
        """Return the grade of a reply in the name of another client, and let its node register again.

        A node that was restarted with another id before the server saw it offline does so once.
        """
        # Nodes of a simulation run any client, and do not register again.
        who = client if self._hosts else self.nodes[client]
        if who in self._moved and (self._hosts or who in self._seen):
            return IMPOSSIBLE
        self._moved.add(who)
        self._seen.discard(who)
        return FAILED

    def _further(self, client: int, kind: str, expected: Mapping[str, tuple[int, ...]]) -> int:
        """Return how many bytes a client's arrays beside the model's may have."""
        if kind == "evaluate" or (self._method is not None and not self._method.extra_up):
            return 0
        info = self.infos[client]
        # Where methods ask for representations, those of all clients have one width.
        widths = [int(self.facts[c]["width"]) for c in ([client] if self._hosts else self.facts)]
        classes, width = info.num_classes, int(lower_median(widths))
        # One matrix per class is the most that any method asks for; a query for features asks for all of them.
        most = EXTRA_BYTES + 4 * classes * width * (width + 1) + 16 * sum(math.prod(s) for s in expected.values())
        return most + (8 * info.num_samples * (width + 1) if kind == "query.features" else 0)

    def _contract(
        self,
        client: int,
        kind: str,
        expected: Mapping[str, tuple[int, ...]],
        raw: Mapping[str, tuple[str, tuple[int, ...]]],
    ) -> Contract:
        """Return what a reply may hold: the server's own model, and what the method declares beside it."""
        method, info = self._method, self.infos[client]
        most = self._further(client, kind, expected)
        allowed = (lambda name: kind != "evaluate" and method.allows(name)) if method else lambda name: True
        allowed = (lambda name: False) if raw else allowed
        count = 0 if kind in WITHOUT_DATA else info.num_samples
        of, settings, asked = method.id if method else "the method", self.settings, self._metrics
        known = (lambda name: True) if asked is None or method is None else asked.union(method.numbers).__contains__
        return Contract(
            client, kind, of, expected, allowed, most, count, settings.wire_dtype,
            int(self.facts[client].get("test-examples", -1)), self._max_abs, known,
            self._scored and kind in ("train", "evaluate"), raw,
        )  # fmt: skip

    def _state_problem(self, client: int, info: Mapping[str, Any]) -> str | None:
        """Say what is wrong with what a client reports of its stored state; an older version reports nothing."""
        if "state" not in info:
            return None
        if not all(isinstance(v, str) and _DIGEST.match(v) for v in (info["state"], info.get("state-from", ""))):
            return "the digest of its state is not one"
        lost = info.get("state-lost", "")
        if lost and not self._restart:
            return f"its state is lost and it began anew, which lost-state = 'refuse' does not allow: {lost}"
        known = self.states.get(client, ("", False))[0]
        if not lost and info.get("state-from", "") != known:
            return f"it went on from the state '{info.get('state-from', '')}', the server knows '{known}'"
        return None

    def _drop(
        self, traffic: Traffic, server_round: int, client: int, stage: str, reason: str, offence: str = FAILED
    ) -> None:
        dropped = Dropped(server_round, client, stage, one_line(reason))
        traffic.dropped.append(dropped)
        self.event({"kind": "dropped", **dropped.as_dict()})
        if offence == BAD:
            traffic.bad.append(dropped)
        elif offence == IMPOSSIBLE:
            self._block(dropped)

    def refuse(self, traffic: Traffic, server_round: int, client: int, stage: str, reason: str) -> None:
        """Record that a client sent what no client code of ours can send, and block it."""
        self._drop(traffic, server_round, client, stage, reason, IMPOSSIBLE)

    def _block(self, offence: Offence, why: str = "") -> None:
        """Send a client no more messages in this run, and leave its node alone."""
        node = self._forget(offence.client)
        found = Blocked(offence.round, offence.client, node, offence.stage, why + offence.reason)
        self.offences.blocked[offence.client] = found
        self.event({"kind": "blocked", **found.as_dict()})

    def _note_error(self, server_round: int, client: int, stage: str, text: str) -> None:
        """Keep the first client error with its whole remote traceback."""
        if self.first_error is None or (self.first_error["round"] == 0 and server_round):
            text = plain(text)
            where = {"client": client, "round": server_round, "stage": stage}
            self.first_error = {**where, "message": _last_line(text), "traceback": text}
            self.event({"kind": "client-error", **self.first_error})

    def require(self, traffic: Traffic, server_round: int) -> None:
        """Raise `RoundFailed` unless there were enough good replies, and enough clients are not blocked."""
        needed = needed_replies(self.settings.min_replies, len(traffic.messaged))
        if len(traffic.answered) < needed:
            reasons = "; ".join(f"client {d.client}: {d.reason}" for d in traffic.dropped[:5])
            more = f" and {len(traffic.dropped) - 5} more" if len(traffic.dropped) > 5 else ""
            text = (
                f"round {server_round}: {len(traffic.answered)} good replies of {len(traffic.messaged)}, "
                f"min-replies asks for {needed} ({reasons}{more})"
            )
            if len(traffic.answered) + len(traffic.bad) + traffic.diverged >= needed:
                raise Spoiled(text, server_round, traffic.dropped)
            raise RoundFailed(text, server_round)
        if len(self.nodes) < self.fewest():
            blocked = "; ".join(f"client {c}: {b.reason}" for c, b in list(self.offences.blocked.items())[:5])
            raise RoundFailed(
                f"round {server_round}: {len(self.nodes)} clients are left, and the run needs {self.fewest()} "
                f"(min-clients); blocked are {blocked}",
                server_round,
            )


def _content(payload: Payload) -> tuple[Any, ...]:
    """Return what two payloads of one exchange agree in if they hold the same."""
    common = ((name, id(array)) for name, array in payload.common.items())
    own = ((name, array.shape, zlib.crc32(array.tobytes())) for name, array in payload.arrays.items())
    return frozenset(common), frozenset(own), frozenset(payload.scalars.items())


def _reason(message: Message) -> str:
    """Return the text of an error reply; if a Ray worker died, a last line says so and what to do."""
    error = message.error
    reason = str(error.reason or f"error code {error.code}")
    if not any(f"ray.exceptions.{name}" in reason for name in WORKER_DIED):
        return reason
    sure = any(words in reason for words in ("OutOfMemoryError", "running low on memory", "memory usage threshold"))
    cause = "memory ran out" if sure else "most often because memory ran out"
    return f"{reason}\nthe client's worker process was killed ({cause}): lower batch-size, or {process.FEWER}"


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no reason given"
