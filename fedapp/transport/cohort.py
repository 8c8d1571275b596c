"""The clients as the server sees them: stable ids, checked replies in the order of the ids, bounded waits.

Flower's node ids are random in each run. Replies arrive in any order. A client that fails sends an error reply or does
not answer. Here each client has its own id, every reply is checked separately, and a dropped reply is recorded with its
reason. An exchange goes through these layers, each in a file of its own:

=================  ==================================================================================
`StateLedger`      adds the client's last stored state to a request, and compares the reply with it
`Channel`          messages in flight, time limits, order of the replies
`Validation`       what a reply may hold
`Offences`         clients that are blocked
=================  ==================================================================================

`SecureSums` stands around all of them. `NodeCohort` and `VirtualCohort` know where a message goes.
"""

from __future__ import annotations

import itertools
import json
import math
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedapp.core.averages import lower_median
from fedapp.errors import BadRequest, Impossible, one_line, plain
from fedapp.method import ClientInfo, Method, Payload, Reply
from fedapp.reduce.reader import Schema
from fedapp.settings import FederationSettings
from fedapp.transport.agreement import by_body, other_classes
from fedapp.transport.boundary import (
    ANOTHER,
    BAD,
    FACTS_SIZE,
    FAILED,
    IMPOSSIBLE,
    Contract,
    Good,
    Refused,
    Registration,
    read,
    read_registration,
)
from fedapp.transport.channel import Answers, Batches, Channel, Event, Sender, in_order
from fedapp.transport.ledger import StateLedger
from fedapp.transport.offences import Blocked, Dropped, Offences
from fedapp.transport.records import Encoder, Part, parts, sealed, together
from fedapp.transport.request import RoundRequest
from fedapp.transport.traffic import Exchange, RoundFailed, needed_replies
from fedapp.transport.validation import Validation, failure, last_line

POLL = (0.02, 0.1)
"""Shortest and longest time in seconds between two checks for replies."""


class Cohort(ABC):
    """The server's view of its clients over one Flower grid.

    Parameters
    ----------
    grid : Flower's grid.   settings : timeouts and shares, resolved.
    request : the values common to all messages of the run: its token, the shared folder, ...
    event : receives progress events (plain dicts with a `kind`).
    validation : decides which replies count.   ledger : the clients' states.
    poll : shortest and longest time in seconds between two checks for replies.

    Attributes
    ----------
    nodes : Flower's id of each client's node.   infos, facts : the clients' statements about themselves, by id.
    offences : which clients are blocked, and why.   reference : a client that all others agree with.
    first_error : the first error of a client, with its whole remote traceback.
    silent : by kind of message: how many draws in a row each client did not answer.
    """

    in_turn: ClassVar[bool]
    """Whether clients take turns on one machine."""
    most_numbers: ClassVar[float]
    """Largest model, in numbers, that the server builds because a client names it."""

    def __init__(
        self,
        grid: Grid,
        settings: FederationSettings,
        request: RoundRequest,
        event: Event = lambda e: None,
        *,
        validation: Validation | None = None,
        ledger: StateLedger | None = None,
        poll: tuple[float, float] = POLL,
    ) -> None:
        self.grid, self.settings, self.request, self.event = grid, settings, request, event
        self.validation = validation or Validation(settings.wire_dtype)
        self.ledger = ledger or StateLedger()
        self.channel = Channel(grid, event, poll, self.in_turn)
        self.nodes: dict[int, int] = {}
        self.infos: dict[int, ClientInfo] = {}
        self.facts: dict[int, dict[str, Any]] = {}
        self.first_error: dict[str, Any] | None = None
        self.silent: dict[str, dict[int, int]] = {}
        self.offences = Offences()
        self.reference = -1
        self.method: Method | None = None
        self._left_out: dict[int, str] = {}  # why, by node
        self._unable: dict[int, int] = {}  # the client of a node that states itself that it cannot take part, or -1
        self._moved: set[int] = set()  # nodes, in a simulation clients, that answered as another client
        self._expected = 0
        self._lasted: dict[str, float] = {}  # seconds of the last exchange by type of message

    # ---- who is there --------------------------------------------------------------------------------------------

    @abstractmethod
    def gather(self, expected: int) -> list[ClientInfo]:
        """Wait until the clients of a run have registered; 0: as many as there are."""

    def warnings(self) -> list[str]:
        """Return lines that the user should read before the run."""
        return []

    def shape_of(self, client: int) -> tuple[int, ...]:
        """Return the shape of one sample of a client."""
        return tuple(json.loads(str(self.facts[client]["shape"])))

    @abstractmethod
    def candidates(self, able: Sequence[ClientInfo], infos: Sequence[ClientInfo]) -> Sequence[ClientInfo]:
        """Return the clients whose models the server tries, of those `able` whose models it may build."""

    def register(self) -> list[int]:
        """Ask nodes that are new or came back to register, and return the ids of the clients that joined."""
        return []

    def agree(self, method: Method, bodies: Sequence[str] = ()) -> list[str]:
        """Check that clients agree on shared arrays, and return the digests of their bodies: empty without `bodies`.

        Parameters
        ----------
        bodies : first digits of pretrained bodies. Only clients of one body must agree on more than their classes; a
            body whose clients do not is left out.

        Raises
        ------
        BadRequest : clients disagree, or too few are left; the message names the clients, models and shapes.
        """
        groups, others = by_body(self.infos, bodies)
        self.leave_out(others)
        found = dict[str, int]()
        for body, ids in sorted(groups.items(), key=lambda group: -len(group[1])):
            try:
                found[body] = of = self._agree(method, ids)
                first = next(iter(found.values()))
                if problem := other_classes(self.infos[first], self.infos[of], self.facts[first], self.facts[of]):
                    raise BadRequest(one_line(problem))
            except BadRequest as e:
                if not bodies:
                    raise
                found.pop(body, None)
                self.leave_out({c: f"the body {body[:8]} fails: {e}" for c in ids if c in self.infos})
        return [body for body in groups if body in found]

    @abstractmethod
    def _agree(self, method: Method, ids: Collection[int]) -> int:
        """Check that these clients agree, and return the reference; see `agree`."""

    def without_silent(self, server_round: int, ids: Sequence[int]) -> tuple[list[int], list[Dropped]]:
        """Return which of the drawn clients get a message in a round, and why the others do not."""
        return list(ids), []

    def _shortage(self, reason: str) -> str:
        """Return the message of a run in which too few clients are left, for such a reason."""
        return reason

    def partitions(self) -> int:
        """Return the number of parts that the data are split into, 0 if each client has data of its own."""
        return int(lower_median([int(f.get("partitions", 0)) for f in self.facts.values()]))

    def fewest(self) -> int:
        """Return the smallest number of clients that the run goes on with."""
        return self.settings.min_clients or needed_replies(self.settings.min_replies, self._expected)

    def left_out(self) -> list[str]:
        """Return why nodes are left out that take no part."""
        return [reason for node, reason in self._left_out.items() if node not in self.nodes.values()]

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

    def _enough_left(self, reason: str) -> None:
        """Raise `BadRequest` unless enough clients are left without those that were left out, for such a reason."""
        if len(self.nodes) < self.fewest():
            raise BadRequest(self._shortage(reason))

    def _agreed(self, method: Method, reference: int | None, apart: Mapping[int, str]) -> int:
        """Leave out the clients that do not agree with the reference, and note the method for those that join later."""
        self.reference = min(self.infos) if reference is None else reference
        self.leave_out(apart)
        self.method = method
        return self.reference

    def _forget(self, client: int) -> int:
        """Drop all that is known of a client, and return its node."""
        del self.infos[client], self.facts[client]
        if client == self.reference:
            self.reference = min(self.infos, default=-1)
        return self.nodes.pop(client)

    def _registration(self, node: int, reply: Message) -> Registration:
        """Return a client's registration; raise `BadRequest` with the reason if it cannot take part."""
        if reply.has_error():
            reason = failure(reply).reason
            self._note_error(0, -1, "register", reason)
            raise BadRequest(f"a client cannot take part: {last_line(reason)}")
        registration = read_registration(reply)
        if isinstance(registration, Refused):
            if registration.offence != FAILED:
                raise BadRequest(f"node {node} cannot take part: {registration.reason}")
            self._unable[node] = client = registration.client
            self._note_error(0, client, "register", registration.reason)
            who = f"client {client}" if client >= 0 else "a client"
            raise BadRequest(f"{who} cannot take part: {last_line(registration.reason)}")
        if (largest := registration.largest or 0.0) > (most := self.validation.max_abs):
            fault = f"it has a feature of {largest:g}, max-abs is {most:g}: scale the features down, or raise max-abs"
            raise BadRequest(f"client {registration.client} cannot take part: {fault}")
        return registration

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know of the clients."""
        silent = {kind: dict(of) for kind, of in self.silent.items() if of}
        return {**self.ledger.state_dict(), "silent": silent, **self.offences.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.ledger.load_state_dict(state)
        self.silent, self.offences = state["silent"], Offences.of(state)

    # ---- one exchange --------------------------------------------------------------------------------------------

    def _limit(self, kind: str) -> float:
        """Return the seconds that clients have for a message, 0 = no limit."""
        return self.settings.round_timeout

    def _batches(self, kind: str, ids: Sequence[int], bytes_each: int) -> tuple[list[list[int]], int]:
        """Return the clients of each message, in the order of the messages, and how many may be in flight at a time."""
        return [[c] for c in ids], len(ids)

    @abstractmethod
    def _message(self, content: RecordDict, batch: Sequence[int], kind: str, server_round: int, most: int) -> Message:
        """Return a message to clients whose reply may have `most` bytes."""

    def _answers(self, kind: str, batches: Batches, send: Sender, limit: float, at_once: int, most: int) -> Answers:
        """Send messages and yield the answers as they arrive; see :meth:`Channel.answers`."""
        return self.channel.answers(batches, send, limit, at_once, most)

    def _widths(self, ids: Sequence[int]) -> dict[int, int]:
        """Return by client the width of representations that bounds the size of its reply: usual for its body."""
        widths: dict[str, list[int]] = {}
        for client, info in self.infos.items():
            widths.setdefault(info.body, []).append(int(self.facts[client]["width"]))
        return {c: int(lower_median(widths[self.infos[c].body])) for c in ids}

    @abstractmethod
    def _of_another(self, client: int) -> str:
        """Return the grade of a reply to this client's message that names another client."""

    def send_and_receive(
        self,
        exchange: Exchange,
        payloads: Iterable[tuple[int, Payload]],
        schema: Schema,
        request: RoundRequest | Mapping[int, RoundRequest],
    ) -> Iterator[Reply]:
        """Send messages to clients and yield the valid replies in the order of the client ids.

        A reply is held back until the replies of all lower ids have arrived or failed, so that sums are added up in the
        same order, no matter which client ends first. The exchange records which clients got a message, answered or
        were dropped.

        Parameters
        ----------
        schema : of the replies.
        request : to all clients, or by client. A client restores the state that it had before the round of its request.
        """
        started, kind, before = time.perf_counter(), exchange.stage, len(exchange.bad)
        given = dict(payloads)  # each is let go when its message is made
        ids, groups = sorted(given), _groups(given)
        exchange.messaged.extend(ids)
        bytes_each = 4 * sum(math.prod(shape) for shape in schema.shapes.values())
        bytes_each += sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in schema.raw.values())
        batches, at_once = self._batches(kind, ids, bytes_each)
        contracts = self._contracts(kind, ids, schema)
        most = FACTS_SIZE + bytes_each + max((c.further_bytes for c in contracts.values()), default=0)
        limit = self._limit(kind) * max(map(len, batches), default=1)
        encoder = Encoder(self.settings.wire_dtype, self.in_turn)  # it keeps what it has encoded for several clients

        def message(batch: Sequence[int]) -> Message:
            records = {}
            for client in batch:
                asked = request if isinstance(request, RoundRequest) else request[client]
                records[client], size = encoder.records(given.pop(client), self.ledger.request(client, asked))
                exchange.down += size
            content = together(records) if len(batch) > 1 else sealed(records[batch[0]])
            return self._message(content, batch, kind, exchange.round, most)

        arrivals = itertools.count()
        arriving = (
            (c, self._checked(several.get(c, answer), contracts[c], exchange, next(arrivals)))
            for batch, answer in self._answers(kind, batches, message, limit, at_once, most)
            for several in [{} if len(batch) == 1 or answer.has_error() else parts(answer.content)]
            for c in batch
        )

        def unanswered(client: int) -> None:
            waited = time.perf_counter() - started
            seconds = limit if 0 < limit <= waited else round(waited)
            self._drop(exchange, client, f"no answer within {seconds:g} s")

        yield from in_order(ids, arriving, unanswered)
        exchange.metrics = dict(sorted(exchange.metrics.items()))
        for offence in self.offences.judge(exchange.bad[before:], groups, exchange.metrics if kind == "train" else ()):
            self._block(offence, "values out of range too often: ")
        self._lasted[kind] = time.perf_counter() - started
        exchange.seconds += self._lasted[kind]

    def _contracts(self, kind: str, ids: Sequence[int], schema: Schema) -> dict[int, Contract]:
        """Return the contract of each client's reply."""
        widths, infos, contract = self._widths(ids), self.infos, self.validation.contract
        tests = {c: int(self.facts[c].get("test-examples", -1)) for c in ids}
        return {c: contract(kind, infos[c], tests[c], schema, widths[c]) for c in ids}

    def _checked(self, message: Message | Part, contract: Contract, exchange: Exchange, arrival: int) -> Reply | None:
        """Return a reply that counts, or None: then its reason is recorded. Nothing that a client sends is raised."""
        client = contract.client
        got = failure(message) if isinstance(message, Message) and message.has_error() else read(message, contract)
        if isinstance(got, Good):
            count = int(got.metrics["num-examples"])
            reply = Reply(client, count, got.arrays, got.metrics, got.size, contract.kind, arrival)
            try:
                problem = self.ledger.problem(client, got.info, got.metrics) or contract.schema.check(reply)
            except Exception as e:  # a method's own check may raise anything
                problem = f"the reply cannot be read: {type(e).__name__}: {e}"
            if not problem:
                self.ledger.note(client, got.info, got.metrics)
                exchange.metrics[client] = {**got.metrics, "bytes-up": got.size}
                exchange.up += got.size
                return reply
            got = Refused(problem, IMPOSSIBLE if isinstance(problem, Impossible) else BAD)
        elif got.offence == FAILED:
            self._note_error(exchange.round, client, contract.kind, got.reason)
            exchange.diverged += FloatingPointError.__name__ in last_line(got.reason)
        offence = self._of_another(client) if got.offence == ANOTHER else got.offence
        self._drop(exchange, client, last_line(got.reason), offence)
        return None

    # ---- replies that do not count -------------------------------------------------------------------------------

    def _drop(self, exchange: Exchange, client: int, reason: str, offence: str = FAILED, stage: str = "") -> None:
        dropped = Dropped(exchange.round, client, stage or exchange.stage, one_line(reason))
        exchange.dropped.append(dropped)
        self.event({"kind": "dropped", **dropped.as_dict()})
        if offence == BAD:
            exchange.bad.append(dropped)
        elif offence == IMPOSSIBLE:
            self._block(dropped)

    def refuse(self, exchange: Exchange, client: int, reason: str, stage: str) -> None:
        """Record a reply that our own client code cannot produce, and block its client."""
        self._drop(exchange, client, reason, IMPOSSIBLE, stage)

    def _block(self, offence: Dropped, why: str = "") -> None:
        """Send a client no more messages in this run, and leave its node alone."""
        if offence.client not in self.nodes:  # it is blocked already
            return
        where = offence.round, offence.client, self._forget(offence.client), offence.stage
        self.offences.blocked[offence.client] = found = Blocked(*where, why + offence.reason)
        self.event({"kind": "blocked", **found.as_dict()})

    def _note_error(self, server_round: int, client: int, stage: str, text: str) -> None:
        """Keep the first client error with its whole remote traceback."""
        if self.first_error is None or (self.first_error["round"] == 0 and server_round):
            text = plain(text)
            where = {"client": client, "round": server_round, "stage": stage}
            self.first_error = {**where, "message": last_line(text), "traceback": text}
            self.event({"kind": "client-error", **self.first_error})

    def require(self, exchange: Exchange) -> None:
        """Raise `RoundFailed` unless there were enough valid replies, and enough clients are not blocked."""
        exchange.require(needed_replies(self.settings.min_replies, len(exchange.messaged)))
        if len(self.nodes) < self.fewest():
            blocked = "; ".join(f"client {c}: {b.reason}" for c, b in list(self.offences.blocked.items())[:5])
            raise RoundFailed(
                f"round {exchange.round}: {len(self.nodes)} clients are left, and the run needs {self.fewest()} "
                f"(min-clients); blocked are {blocked or 'none'}",
                exchange.round,
            )


def _groups(payloads: Mapping[int, Payload]) -> dict[int, Any]:
    """Return by client a key of its payload: one object for all clients with equal payloads."""
    kinds: dict[Any, Any] = {}
    return {client: kinds.setdefault(sent, sent) for client, sent in ((c, _content(p)) for c, p in payloads.items())}


def _content(payload: Payload) -> tuple[Any, ...]:
    """Return a key in which two payloads of one exchange agree if they hold the same values."""
    common = ((name, id(array)) for name, array in payload.common.items())
    own = ((name, array.shape, zlib.crc32(array.tobytes())) for name, array in payload.arrays.items())
    return frozenset(common), frozenset(own), frozenset(payload.scalars.items())
