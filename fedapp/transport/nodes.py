"""The clients of a deployment: real nodes that register, go offline, come back, and may be anybody's."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedapp.errors import BadRequest, counted, one_line
from fedapp.method import ClientInfo, Method, Payload
from fedapp.settings import FederationSettings
from fedapp.transport import roster as rosters
from fedapp.transport.agreement import clash, compared, majority
from fedapp.transport.boundary import FACTS_SIZE, FAILED, IMPOSSIBLE
from fedapp.transport.channel import Answers, Batches, Event, Sender
from fedapp.transport.cohort import POLL, Cohort
from fedapp.transport.delivery import INCOMPLETE, Coming, arrived, patiently, push
from fedapp.transport.ledger import StateLedger
from fedapp.transport.offences import Dropped
from fedapp.transport.records import Encoder, group_of
from fedapp.transport.request import WITHOUT_DATA, RoundRequest
from fedapp.transport.validation import Validation

GONE = (3, 4, 5, INCOMPLETE)
"""Flower's error codes for a message, a reply or a node that no longer exists: the client did not answer."""
LATECOMERS = 10.0
"""Seconds that further nodes have to register after the expected number of clients has registered."""
REGISTER_AGAIN = 600.0
"""Seconds after which an unanswered request to register counts as lost and is sent again."""
FAILED_AGAIN = 30.0
"""Seconds after which a node that could not take part is asked again: the cause may be over."""
SILENT = 2
"""Draws without an answer after which a node gets no message in every second round that draws it."""
WITHOUT_TRAINING = 120.0
"""Seconds for a message without training: nodes answer it at once, or are gone."""
_DIGITS = re.compile(r"\d")


class NodeCohort(Cohort):
    """Clients on real nodes; each gets messages of its own.

    Parameters
    ----------
    roster : reads which node is which client. None = the first node that is online holds a client id.
    validation, ledger, poll : as in `Cohort`.
    """

    in_turn = False
    most_numbers = 1 << 28
    """1 GiB in float32."""

    def __init__(
        self,
        grid: Grid,
        settings: FederationSettings,
        request: RoundRequest,
        event: Event = lambda e: None,
        roster: Callable[[], Mapping[int, rosters.Admitted] | None] = lambda: None,
        *,
        validation: Validation | None = None,
        ledger: StateLedger | None = None,
        poll: tuple[float, float] = POLL,
    ) -> None:
        super().__init__(grid, settings, request, event, validation=validation, ledger=ledger, poll=poll)
        self._read_roster = roster
        self.roster = roster()
        self._fault = ""  # why the roster could not be read again
        self._took: dict[tuple[str, int], float] = {}  # seconds of the last answer, by kind and client
        self._seen: set[int] = set()
        self._strangers: set[int] = set()
        # Unanswered requests by message id: the node, and when it was sent.
        self._unregistered: dict[str, tuple[int, float]] = {}
        self._coming: dict[str, Coming] = {}  # answers to them that are not complete
        self._failed: dict[int, float] = {}  # when a node said that it cannot take part
        self._stated: dict[int, int] = {}  # which client a node says that it is
        self._twice: set[int] = set()  # nodes with the id of another one, which may be gone soon

    # ---- the start of a run --------------------------------------------------------------------------------------

    def warnings(self) -> list[str]:
        """Warn that a run without a roster does not check client ids."""
        if self.roster is not None:
            return []
        return [
            "there is no roster: the first online node to claim a client id gets it; write a roster with fedapp admit, "
            "and set FEDAPP_ROSTER to it at the SuperLink"
        ]

    def candidates(self, able: Sequence[ClientInfo], infos: Sequence[ClientInfo]) -> Sequence[ClientInfo]:
        """Return the first client of each model and shape of samples, the most common ones first.

        One client alone must not choose the model: neither by its name nor by the shape of its inputs.
        """
        shape = {i.client: self.shape_of(i.client) for i in infos}
        shapes, models = Counter(shape.values()), Counter(i.model for i in infos)
        first: dict[tuple[str, tuple[int, ...]], ClientInfo] = {}
        for i in sorted(able, key=lambda i: (-shapes[shape[i.client]], -models[i.model], math.prod(shape[i.client]))):
            first.setdefault((i.model, shape[i.client]), i)
        return list(first.values())

    def gather(self, expected: int) -> list[ClientInfo]:
        """Wait until `expected` clients have registered; 0: as many as there are nodes.

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
            want = self._wanted(expected)
            now = time.monotonic()
            if len(self.nodes) >= want:
                enough = now if enough is None else enough
                late = bool(expected) and now - enough > LATECOMERS
                if self._unregistered and late:
                    self.event({"kind": "warning", "text": f"{self._unanswered()}: starting without them"})
                if late or not self._unregistered:
                    break
            # A node that was left out may be replaced by another one with the same client id, so only the time limit
            # ends the wait for enough clients. A node that does not state a client id may be the missing one.
            if not self._unregistered and 0 < want - len(self.nodes) <= len(self._left_out):
                known = want - len(self.nodes) <= self._missing_left_out()
                settled = now if settled is None else settled
                if (known or now - settled > LATECOMERS) and len(self.nodes) >= self.fewest():
                    break
            else:
                settled = None
            if self.settings.wait_timeout and now - started > self.settings.wait_timeout:
                self._give_up(want)
                break
            if now - reported > 30:
                reported = now
                self.event({"kind": "waiting", "text": self._waiting(want)})
            time.sleep(min(0.2, 10 * self.channel.shortest))
        return [self.infos[c] for c in sorted(self.infos)]

    def _wanted(self, expected: int) -> int:
        """Return how many clients the run waits for."""
        self._expected = expected or self.partitions() or max(1, len(self.nodes))
        want = self._expected - sum(c < self._expected for c in self.offences.blocked)  # they are not asked again
        if want <= 0:
            raise BadRequest("every client of this run is blocked (see blocked.csv): start a new run")
        return want

    def _give_up(self, want: int) -> None:
        """Start without the missing clients, after the wait limit.

        Raises
        ------
        BadRequest : too few clients are there.
        """
        limit = f"{self.settings.wait_timeout:g} s"
        if len(self.nodes) >= self.fewest():
            text = f"{self._waiting(want)} after {limit}: starting without them"
            self.event({"kind": "warning", "text": text})
            return
        if self._missing_left_out():
            self._enough_left(next(iter(self._left_out.values())))
        why = "".join(f"; {reason}" for reason in list(self._left_out.values())[:3])
        raise BadRequest(
            f"gave up after {limit}: {self._waiting(want)}{why}; "
            "start the missing clients, or change wait-timeout, min-replies or min-clients"
        )

    def _missing_left_out(self) -> int:
        """Return how many of the expected clients are missing because their nodes were left out."""
        missing = {self._stated.get(node, -1) for node in self._left_out} - self.nodes.keys()
        return sum(0 <= c < self._expected for c in missing - self.offences.blocked.keys())

    def _shortage(self, reason: str) -> str:
        few = (
            f"{len(self.nodes)} of {counted(self._expected, 'client')} can take part, and {self.fewest()} are needed: "
        )
        return few + reason if self.nodes else reason

    def _waiting(self, want: int) -> str:
        known = set(self.nodes)
        missing = [str(c) for c in range(want) if c not in known] if all(c < want for c in known) else []
        named = f", missing {', '.join(missing[:20])}" if missing and known else ""
        if len(known) >= want:
            return self._unanswered()
        silent = f"; {self._unanswered()}" if self._unregistered else ""
        return f"waiting for {want - len(known)} of {counted(want, 'client')}{named}{silent}"

    def _unanswered(self) -> str:
        return f"{len(self._unregistered)} node(s) that are online have not answered"

    # ---- registration --------------------------------------------------------------------------------------------

    def register(self, strict: bool = False) -> list[int]:
        """Ask nodes that are new or came back to register, and return the ids of the clients that joined.

        A node that cannot take part is left out with a warning. It is asked again after it has been offline, and if it
        says so itself, every `FAILED_AGAIN` seconds.

        Parameters
        ----------
        strict : before round 1 the caller waits for answers. Later this method waits for a new node once. A node that
            does not answer in that time may answer before any later round, which does not wait.
        """
        now = time.monotonic()
        online = self._online()
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
        joined: list[int] = []
        while self._unregistered:
            replies = arrived(self.grid, set(self._unregistered), FACTS_SIZE, self._coming)
            for reply in replies:
                joined += self._join(reply, online, strict)
            if not replies:
                awaited = fresh & {node for node, _ in self._unregistered.values()}
                if not awaited or time.monotonic() - now >= limit:
                    break
                time.sleep(min(self.channel.longest, max(self.channel.shortest, 0.1 * (time.monotonic() - now))))
        return sorted(joined)

    def _online(self) -> set[int]:
        """Return the nodes that are online and may take part."""
        online = set(patiently(self.grid.get_node_ids)) - self.offences.nodes
        try:
            self.roster, fault = self._read_roster(), ""  # nodes may be admitted, or removed, during a run
        except BadRequest as e:
            fault = f"the roster of before is used: {one_line(e)}"
            if fault != self._fault:
                self.event({"kind": "warning", "text": fault})
        self._fault = fault
        if self.roster is None:
            return online
        for client, _ in sorted(self.nodes.items() - {(a.client, a.node) for a in self.roster.values()}):
            self._seen.discard(self._forget(client))
            self.event({"kind": "warning", "text": f"client {client} left the roster, and gets no more messages"})
        self._strangers -= set(self.roster)
        for node in sorted(online - set(self.roster) - self._strangers):
            self._strangers.add(node)
            text = f"node {node} is not in the roster and was left out: fedapp admit KEY.pub --client N admits it"
            self.event({"kind": "warning", "text": text})
        return online & set(self.roster)

    def _ask_to_register(self, nodes: list[int], now: float) -> None:
        """Push the requests; a node whose request the SuperLink did not accept counts as not seen."""
        if not nodes:
            return
        content, _ = Encoder(self.settings.wire_dtype).content(Payload(), self.request)
        requests = [Message(content, n, "query.register", group_id=group_of(0, FACTS_SIZE)) for n in nodes]
        for node, message_id in zip(nodes, push(self.grid, requests), strict=True):
            if message_id:
                self._unregistered[message_id] = (node, now)
                self._seen.add(node)

    def _join(self, reply: Message, online: set[int], strict: bool) -> list[int]:
        """Return the client that an answer adds, as a list; a node that cannot take part is left out with a warning."""
        said = self._unregistered.pop(reply.metadata.reply_to_message_id, None)
        if said is None:
            return []
        node = said[0]
        if reply.has_error() and reply.error.code in GONE:
            self._seen.discard(node)
            return []
        before = set(self.infos)
        try:
            client = self._registered(node, reply, online)
        except BadRequest as e:
            if node in self._unable:
                self._failed[node], self._stated[node] = time.monotonic(), self._unable.pop(node)
            former, self._left_out[node] = self._left_out.get(node, ""), one_line(e)
            if _DIGITS.sub("", former) != _DIGITS.sub("", self._left_out[node]):  # it may count seconds
                self.event({"kind": "warning", "text": f"a new node was left out: {one_line(e)}"})
            return []
        self._left_out.pop(node, None)
        if not strict:
            for counts in self.silent.values():  # it was away, so it gets the next message
                counts.update({c: 1 for c in counts if c == client})
            how = "is here again" if client in before else "takes part from now on"
            self.event({"kind": "joined", "client": client, "text": f"client {client} {how}"})
        return [client]

    def _registered(self, node: int, reply: Message, online: set[int]) -> int:
        """Add a client that answered; a `BadRequest` says why it cannot take part."""
        newcomer = self._registration(node, reply)
        client, facts = newcomer.client, {**newcomer.facts, "test-examples": newcomer.tests}
        self._stated[node] = client
        if self.roster is not None:
            rosters.check(self.roster[node], client, newcomer.num_samples, newcomer.tests)
        if client in self.offences.blocked:
            raise BadRequest(f"client {client} is blocked in this run: {self.offences.blocked[client].reason}")
        if self.nodes.get(client, node) != node and self.nodes[client] in online:
            self._twice.add(node)
            raise BadRequest(
                f"two nodes are client {client}, of which {node} came second: give every node its own client-id or "
                "partition-id in node-config (a node without a key that was killed and restarted counts twice for a "
                "minute)"
            )
        others = [c for c in (self.reference, *sorted(self.infos)) if c != client and c in self.infos]
        if (method := self.method) is not None:
            for other in compared(newcomer, others, self.infos):
                problem = clash(method, self.infos[other], newcomer, self.facts[other], facts)
                if problem:
                    raise BadRequest(problem)
        self.nodes[client], self.facts[client], self.infos[client] = node, facts, newcomer
        for former in [c for c, n in self.nodes.items() if n == node and c != client]:
            self._forget(former)
        return client

    def _agree(self, method: Method, ids: Collection[int]) -> int:
        """Leave out the clients with which the majority does not agree.

        Raises
        ------
        BadRequest : there is no majority, or too few clients are left.
        """
        found, apart = majority(method, {c: self.infos[c] for c in ids}, self.facts)
        if apart and found is None:
            raise BadRequest(one_line(next(iter(apart.values()))))
        return self._agreed(method, found, apart)

    # ---- one exchange --------------------------------------------------------------------------------------------

    def without_silent(self, server_round: int, ids: Sequence[int]) -> tuple[list[int], list[Dropped]]:
        """Return which of the drawn clients get a message in a round, and why the others do not.

        A node that stays online and does not answer would hold up every round. The draws do not depend on it: they stay
        a function of seed and round.
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

    def _limit(self, kind: str) -> float:
        limit = super()._limit(kind)
        return min(limit or WITHOUT_TRAINING, WITHOUT_TRAINING) if kind in WITHOUT_DATA else limit

    def _message(self, content: RecordDict, batch: Sequence[int], kind: str, server_round: int, most: int) -> Message:
        # A message expires when its reply is no longer waited for, so that it does not keep a slow node busy. The extra
        # minute allows for clocks that differ.
        limit = self._limit(kind)
        lifetime = limit + 60 if limit else None
        return Message(content, self.nodes[batch[0]], kind, ttl=lifetime, group_id=group_of(server_round, most))

    def _answers(self, kind: str, batches: Batches, send: Sender, limit: float, at_once: int, most: int) -> Answers:
        """Yield the answers, and note which clients gave none."""
        started = time.monotonic()
        known, quiet = self.silent.get(kind, {}), {c for batch in batches for c in batch}
        patience = {c: self._took.get((kind, c), 0.0) for c in known}
        for batch, answer in self.channel.answers(batches, send, limit, at_once, most, patience):
            if not (answer.has_error() and answer.error.code == INCOMPLETE):
                known.pop(batch[0], None)
                quiet.discard(batch[0])
                self._took[kind, batch[0]] = time.monotonic() - started
            yield batch, answer
        self.silent[kind] = known | {c: known.get(c, 0) + 1 for c in quiet}

    def _of_another(self, client: int) -> str:
        """Let a node that was restarted with another id before the server saw it offline register again, once."""
        node = self.nodes[client]
        if node in self._moved and node in self._seen:
            return IMPOSSIBLE
        self._moved.add(node)
        self._seen.discard(node)
        return FAILED
