"""Secure sums over messages: the exchanges around one whose replies the server sees only in sum.

The cryptography is in `fedapp.core.secure_sum`. Four messages go around each `train` message or query:

=============  ==================================================  =====================================================
message        what the server sends                               what a client answers
=============  ==================================================  =====================================================
query.keys     nothing; once per client and run                    c_u's public key, and a proof (`identity`)
query.shares   ids, keys, proofs of U_1                            s_u's public key, digest of b_u, encrypted shares
train, ...     as usual, and the shares that others encrypted      its numbers as usual, its arrays as one hidden vector
query.agree    whose vectors arrived                               a code for each of these: so I was told
query.unmask   the codes that the others made for the client       one share for each client of U_2
=============  ==================================================  =====================================================

A client that drops out in any of them is named like any other that does not answer. Where at least t are left, the sum
is that of the clients whose vectors arrived; with fewer, the round fails.

Two sums of the same numbers over sets that differ in one client show that client's numbers. So all questions of a run
go to the clients of the first one, and a round that is repeated goes to those whose sum was opened before (`Opened`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedapp.core import masks
from fedapp.core.privacy import Float64, Privacy, step_of
from fedapp.core.secret_shares import SHARE
from fedapp.core.secure_sum import (
    KEY,
    SEALED,
    Collector,
    Member,
    Offer,
    Unopened,
    Unsafe,
    blamed,
    flaw,
    noise_share,
    threshold,
    usable,
)
from fedapp.method import Array, Arrays, Payload, Reply, Sums
from fedapp.reduce.reader import Raw, Schema
from fedapp.reduce.spec import LABELS
from fedapp.transport.cohort import Cohort
from fedapp.transport.identity import PROOF, Identity, unproved
from fedapp.transport.request import RoundRequest
from fedapp.transport.traffic import Exchange, RoundFailed

Ask: TypeAlias = Callable[[str, Mapping[int, Payload], Raw], Iterator[Reply]]
"""Sends the messages of one stage and yields the replies; the last value is the form of a reply."""
PREFIX = "secure/"
KEYS, PROOFS, IDS, DIGEST, SHARES, HIDDEN, CODES = (
    PREFIX + n for n in ("keys", "proofs", "ids", "digest", "shares", "hidden", "codes")
)
NOISED = "noised"
"""Name of the one vector that takes the place of all arrays where the sum has noise."""
QUESTIONS = "query"
"""Name of all questions of a run among the sums that were opened: they are about the same data."""


# ---- replies as sums -------------------------------------------------------------------------------------------------


def additive(arrays: Mapping[str, Array], sums: Sums, num_samples: int, num_classes: int) -> Arrays:
    """Return what of a reply adds up over clients: weighted arrays, totals as they are, and rows of classes.

    Parameters
    ----------
    arrays : the reply's.   num_samples : n_k of the client.   num_classes : C; rows become (C, ...), zero where absent.
    """
    weight = num_samples if sums.weights == "samples" else 1
    of_classes = {sums.rows, LABELS, sums.counts} if sums.rows else set()
    found = {
        name: array if name.startswith(sums.totals) else array.astype(np.float64) * weight
        for name, array in arrays.items()
        if name not in of_classes
    }
    if sums.rows:
        rows, labels = arrays[sums.rows], arrays[LABELS]
        held = np.zeros(num_classes, np.int64)
        held[labels] = arrays.get(sums.counts, np.ones(len(labels), np.int64))
        found[sums.rows] = np.zeros((num_classes, *rows.shape[1:]))
        found[sums.rows][labels] = held[labels, None] * rows.astype(np.float64)
        found[LABELS] = held
    return found


def shapes_of(template: Mapping[str, Array], sums: Sums) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what `additive` makes of a reply like the template."""
    return {name: array.shape for name, array in template.items() if not (sums.rows and name == sums.counts)}


def restored(totals: Mapping[str, Array], sums: Sums, weight: float, template: Mapping[str, Array]) -> Arrays:
    """Return the arrays of the one reply that stands for all, from the sums of `additive`.

    Parameters
    ----------
    weight : sum of the clients' weights.
    template : arrays with the names, shapes and dtypes of a reply; rows of classes for all C classes.
    """
    found: Arrays = {}
    for name, like in template.items():
        if sums.rows and name in (sums.rows, LABELS, sums.counts):
            continue
        total = totals[name] if name.startswith(sums.totals) else totals[name] / weight
        whole = np.issubdtype(like.dtype, np.integer)
        found[name] = (np.rint(total) if whole else total).astype(like.dtype)
    if sums.rows:
        held = np.rint(totals[LABELS]).astype(np.int64)
        seen = np.flatnonzero(held)
        found[sums.rows] = (totals[sums.rows][seen] / held[seen, None]).astype(template[sums.rows].dtype)
        found[LABELS] = seen.astype(template[LABELS].dtype)
        if sums.counts in template:
            found[sums.counts] = held[seen]
    return found


@dataclasses.dataclass(frozen=True)
class Released:
    """What adds up where the sum carries noise (`dp`): one vector in whole steps of a grid, as `Releaser.steps` is.

    Attributes
    ----------
    privacy : the run's statement.   sensitivity, size : of the vector.
    parts : makes a reply's arrays of the vector's sum and of the number of clients in it.
    """

    privacy: Privacy
    sensitivity: float
    size: int
    parts: Callable[[Float64, int], Arrays]

    def step(self, share: float) -> float:
        """Return the step of the grid where each client adds this share of the noise."""
        return step_of(self.size, self.sensitivity, self.privacy.noise * math.sqrt(share))


def in_sum(privacy: Privacy, kept: Mapping[str, Any], colluders: int) -> Privacy:
    """Return what a client states in the exchange under way, in which it adds only its share of the noise.

    Parameters
    ----------
    kept : its secrets; where no exchange is under way, it adds all of the noise.
    """
    if kept.get("phase") != "offered":
        return privacy
    asked = len(kept["ids"])
    return dataclasses.replace(privacy, summed=asked, share=noise_share(asked, int(kept["threshold"]), colluders))


# ---- a client --------------------------------------------------------------------------------------------------------


class SecureClient:
    """A client's side of all exchanges.

    Parameters
    ----------
    client : its id.   kept : its secrets, which last from one message to the next.
    dropout, colluders : of the run; the client counts for itself how many must be left.
    identity : signs this client's key and checks those of the others.
    fewest : clients that must be left in a sum, as the node's owner asks.
    """

    def __init__(
        self,
        client: int,
        kept: MutableMapping[str, Any],
        dropout: float,
        colluders: int,
        identity: Identity,
        fewest: int = 0,
    ) -> None:
        self.member = Member(client, kept)
        self.dropout, self.colluders, self.identity, self.fewest = dropout, colluders, identity, fewest

    def answer(self, stage: str, payload: Payload, request: RoundRequest) -> Arrays:
        """Answer a message that needs no data; an `Unsafe` states the fault."""
        if stage == "query.keys":
            key = self.member.key()
            return {KEYS: _bytes(key), PROOFS: _bytes(self.identity.proof(request.run, self.member.client, key))}
        arrays, tag = payload.all(), request.secure_sum
        ids = _ids(arrays.get(IDS))
        if stage == "query.unmask":
            codes = dict(zip(ids, _rows(arrays.get(CODES), len(ids), KEY), strict=True))
            return {SHARES: self.member.reveal(tag, codes)}
        if stage == "query.agree":
            return {CODES: self.member.agree(tag, ids)}
        keys = dict(zip(ids, _rows(arrays.get(KEYS), len(ids), KEY), strict=True))
        proofs = dict(zip(ids, _rows(arrays.get(PROOFS), len(ids), PROOF), strict=True))
        if problem := self.identity.problem_of(request.run, keys, proofs):
            raise Unsafe(problem)
        least = threshold(len(ids), self.dropout)
        if problem := flaw(len(ids), least, self.colluders):
            raise Unsafe(problem)
        if least < self.fewest:
            raise Unsafe(
                f"a sum may be one of {least} clients, and this node's owner asks for {self.fewest} (min-sum-clients "
                "in the node-config): ask more clients, or lower secure-dropout"
            )
        offer = self.member.offer(tag, keys, least)
        return {KEYS: _bytes(offer.key), DIGEST: _bytes(offer.digest), SHARES: offer.sealed}

    def hide(self, request: RoundRequest, given: Arrays, arrays: Mapping[str, Array], bits: int) -> Arrays:
        """Return the hidden form of arrays that `additive` made.

        Parameters
        ----------
        given : the arrays of the message that belong to secure sums, by their names without `PREFIX`.
        bits : see `masks.encode`.
        """
        ids, shares = _ids(given.get(IDS.removeprefix(PREFIX))), given.get(SHARES.removeprefix(PREFIX))
        sealed = dict(zip(ids, _rows(shares, len(ids), SEALED), strict=True))
        vector = masks.encode(arrays, len(self.member.kept.get("ids", ())) or 1, bits)
        return {HIDDEN: self.member.hide(request.secure_sum, sealed, vector)}


def _bytes(text: bytes) -> Array:
    return np.frombuffer(text, np.uint8)


def _ids(array: Array | None) -> list[int]:
    if array is None or array.ndim != 1 or array.dtype != np.int64 or len(set(array.tolist())) != len(array):
        raise Unsafe("the message has no valid list of clients")
    return [int(i) for i in array]


def _rows(array: Array | None, count: int, size: int) -> list[bytes]:
    if array is None or array.dtype != np.uint8 or array.shape != (count, size):
        raise Unsafe(f"the message does not hold {count} times {size} bytes")
    return [row.tobytes() for row in array]


# ---- the server ------------------------------------------------------------------------------------------------------


def name_of(kind: str, server_round: int) -> str:
    """Return the name of a sum among those that were opened."""
    return QUESTIONS if kind.startswith("query.") else f"{kind} {server_round}"


class Opened:
    """Over which clients sums were opened, so that no other sum of the same numbers is.

    Parameters
    ----------
    sets : client ids by the name of the sum.   note : keeps all of them where a resumed run finds them.
    """

    def __init__(
        self,
        sets: Mapping[str, Sequence[int]] | None = None,
        note: Callable[[Mapping[str, list[int]]], None] | None = None,
    ) -> None:
        self.sets = {name: sorted(ids) for name, ids in (sets or {}).items()}
        self._note = note

    def add(self, name: str, clients: Iterable[int]) -> None:
        """Note a sum; call it before the sum can be opened, so that no kill comes in between."""
        self.sets[name] = sorted(clients)
        if self._note is not None:
            self._note(self.sets)


class SecureSums:
    """The server's side: exchanges whose replies arrive in sum.

    Parameters
    ----------
    cohort : the clients.
    dropout : share of the clients of an exchange that may drop out.   colluders : clients that may help the server.
    opened : sums of this run that were opened before.
    """

    def __init__(self, cohort: Cohort, dropout: float, colluders: int, opened: Opened | None = None) -> None:
        self.cohort, self.dropout, self.colluders = cohort, dropout, colluders
        self.share = 1.0  # of the sum's noise, that each client added in the last exchange
        self.opened = opened or Opened()
        self.keys: dict[int, tuple[bytes, bytes]] = {}  # with its proof, which only clients can judge
        self._owners: dict[bytes, int] = {}  # the first sender of each key, since others can copy it

    def exchange(
        self,
        exchange: Exchange,
        payloads: Iterable[tuple[int, Payload]],
        sums: Sums,
        template: Mapping[str, Array],
        schema: Schema,
        request: RoundRequest,
        released: Released | None = None,
    ) -> Iterator[Reply]:
        """Send one message to each client and yield one reply that stands for all that arrived.

        Parameters
        ----------
        sums : what adds up how.   template : arrays with the names, shapes and dtypes of a reply.
        schema : of the replies; its check is asked about the one reply.
        released : what adds up where the sum has noise.

        Raises
        ------
        RoundFailed : fewer than t clients or than `min-replies` are left, a sum of the same numbers over more clients
            was opened before, the shares do not open the sum, or it cannot be one of replies.
        """
        started, given, kind = time.perf_counter(), dict(payloads), exchange.kind
        name = name_of(kind, exchange.round)
        before = self.before(name)
        if before is not None:
            given = {c: p for c, p in given.items() if c in before}
            self._all_of(before, given, exchange)
        exchange.messaged.extend(sorted(given))
        tag = f"{self.cohort.request.run}/{kind}/{os.urandom(16).hex()}"
        ask = functools.partial(self._ask, exchange, dataclasses.replace(request, secure_sum=tag), schema)
        self._ask_for_keys(exchange, ask, given)
        collector = self._ask_for_shares(exchange, ask, tag, [c for c in given if c in self.keys])
        self.share = noise_share(len(collector.ids), collector.threshold, self.colluders)
        shapes = {NOISED: (released.size,)} if released else shapes_of(template, sums)
        size = sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes.values())
        bits = next(iter(given.values())).sum_bits
        messages = {c: self._with_shares(given.pop(c), collector, c) for c in sorted(collector.offers)}
        members = []
        for reply in ask(kind, messages, {HIDDEN: ("uint64", (size,))}):
            collector.add(reply.client, reply.arrays[HIDDEN])
            members.append(dataclasses.replace(reply, arrays={}))
        self._blame(exchange, collector.offers, collector)
        self._enough(exchange, len(members), len(collector.ids))
        # All that could end the round is asked before the sum is opened: a round that is repeated has another one.
        self.cohort.require(exchange)
        self._all_of(before, collector.summed, exchange)
        self.opened.add(name, collector.summed)
        total = masks.decode(self._open(exchange, ask, collector), shapes, 0 if released else bits or masks.BITS)
        count = sum(m.num_samples for m in members)
        if released is None:
            arrays = restored(total, sums, count if sums.weights == "samples" else len(members), template)
        else:
            arrays = released.parts(total[NOISED] * released.step(self.share), len(members))
        lost = 0.0 if bits else masks.rounding(len(members))
        summed = Reply(-1, count, arrays, {}, exchange.up, kind, 0, tuple(members), lost)
        if problem := schema.check(summed):
            raise RoundFailed(f"round {exchange.round}: the unmasked sum is invalid: {problem}", exchange.round)
        exchange.seconds = time.perf_counter() - started
        yield summed

    def _ask(
        self,
        exchange: Exchange,
        request: RoundRequest,
        schema: Schema,
        stage: str,
        messages: Mapping[int, Payload],
        raw: Raw,
    ) -> Iterator[Reply]:
        """Send the messages of one stage of an exchange and yield the replies; the exchange records them."""
        part = Exchange(stage, exchange.round)
        yield from self.cohort.send_and_receive(part, messages.items(), schema.hidden(raw), request)
        exchange.down, exchange.up = exchange.down + part.down, exchange.up + part.up
        exchange.dropped += part.dropped
        exchange.bad += part.bad
        exchange.diverged += part.diverged
        if stage == exchange.kind:
            exchange.metrics |= part.metrics

    def _ask_for_keys(self, exchange: Exchange, ask: Ask, clients: Iterable[int]) -> None:
        """Ask clients that are new for their long-term keys."""
        new = {c: Payload() for c in clients if c not in self.keys}
        wanted = {KEYS: ("uint8", (KEY,)), PROOFS: ("uint8", (PROOF,))}
        for reply in ask("query.keys", new, wanted) if new else ():
            key = reply.arrays[KEYS].tobytes()
            if not usable(key):
                self.cohort.refuse(exchange, reply.client, "its public key is not valid", "query.keys")
            elif self._owners.setdefault(key, reply.client) != reply.client:
                text = f"its public key is client {self._owners[key]}'s"
                self.cohort.refuse(exchange, reply.client, text, "query.keys")
            else:
                self.keys[reply.client] = key, reply.arrays[PROOFS].tobytes()

    def _ask_for_shares(self, exchange: Exchange, ask: Ask, tag: str, clients: Iterable[int]) -> Collector:
        """Ask clients for a key of this exchange and the encrypted shares of their secrets."""
        ids = sorted(clients)
        least = self._enough(exchange, len(ids), len(ids))
        collector = Collector(tag, ids, least)
        everybody = {IDS: _numbers(ids)} | {
            name: np.stack([_bytes(self.keys[c][i]) for c in ids]) for i, name in enumerate((KEYS, PROOFS))
        }
        raw = {
            KEYS: ("uint8", (KEY,)), DIGEST: ("uint8", (KEY,)), SHARES: ("uint8", (len(ids), SEALED))
        }  # fmt: skip
        for reply in ask("query.shares", {c: Payload(common=everybody) for c in ids}, raw):
            key, digest = reply.arrays[KEYS].tobytes(), reply.arrays[DIGEST].tobytes()
            if usable(key):
                collector.offers[reply.client] = Offer(key, digest, reply.arrays[SHARES])
            else:
                self.cohort.refuse(exchange, reply.client, "its public key is not valid", "query.shares")
        self._blame(exchange, ids, collector)
        for client in set(ids) - set(collector.offers):
            self.keys.pop(client)  # a node that was restarted has another key
        self._enough(exchange, len(collector.offers), len(ids))
        return collector

    def _open(self, exchange: Exchange, ask: Ask, collector: Collector) -> NDArray[np.uint64]:
        """Let the clients agree on the members of the sum, and open it with their shares.

        Raises
        ------
        RoundFailed : too few clients agree, or the shares do not open the sum.
        """
        left = {IDS: _numbers(sorted(collector.summed))}
        told = {c: Payload(common=left) for c in sorted(collector.summed)}
        form: Raw = {CODES: ("uint8", (len(told), KEY))}
        agreed = {r.client: r.arrays[CODES] for r in ask("query.agree", told, form)}
        self._enough(exchange, len(agreed), len(collector.ids))
        codes = {c: Payload({CODES: collector.codes(c, agreed)}, left) for c in sorted(agreed)}
        form = {SHARES: ("uint8", (len(collector.offers), SHARE))}
        shares = {r.client: r.arrays[SHARES] for r in ask("query.unmask", codes, form)}
        try:
            total = collector.open(shares)
        except Unopened as e:
            # One false holder can do this where the shares of two more than t are not there: then no client is blocked.
            for client in e.clients if len(shares) >= collector.threshold + 2 else ():
                text = "the others' shares do not open its secret"
                self.cohort.refuse(exchange, client, text, "query.unmask")
            raise RoundFailed(f"round {exchange.round}: the sum cannot be opened: {e}", exchange.round) from e
        self._judge(exchange, collector)
        return total

    def _blame(self, exchange: Exchange, asked: Collection[int], collector: Collector) -> None:
        """Block senders of false shares, or of a key without a proof, that more clients name than may drop out.

        At least two must name a sender. Those who do are gone too, whichever side is malicious; so
        many could end the round anyway.
        """
        told: Counter[int] = Counter()
        for text in {d.client: d.reason for d in exchange.dropped if d.client in asked}.values():
            told.update((blamed(text) | unproved(text)) & set(asked) - self.cohort.offences.blocked.keys())
        for client, times in sorted(told.items()):
            if times > max(1, len(collector.ids) - collector.threshold):
                text = f"{times} clients could not open its shares or check its key"
                self.cohort.refuse(exchange, client, text, "query.shares")

    def _judge(self, exchange: Exchange, collector: Collector) -> None:
        """Warn of shares that do not fit, naming both sides; block a holder that is false for most clients' secrets."""
        against: dict[int, list[int]] = {}
        for client, holder in sorted(collector.disputes):
            against.setdefault(holder, []).append(client)
        for holder, clients in against.items():
            if 2 * len(clients) > len(collector.offers):
                text = f"its shares of {len(clients)} clients' secrets differ from those it received"
                self.cohort.refuse(exchange, holder, text, "query.unmask")
                continue
            named = ", ".join(map(str, clients[:20]))
            text = f"round {exchange.round}: either client {named} gave client {holder} a false share of a secret, or "
            text += f"client {holder} opened one; the sum was opened without it, and no client is blocked"
            self.cohort.event({"kind": "warning", "text": text})

    def before(self, name: str) -> set[int] | None:
        """Return the clients whose sum was opened, or None; who was blocked since is not asked again."""
        found = self.opened.sets.get(name)
        return None if found is None else set(found) - self.cohort.offences.blocked.keys()

    @staticmethod
    def _all_of(before: Collection[int] | None, there: Collection[int], exchange: Exchange) -> None:
        """Raise `RoundFailed` unless all clients of a sum that was opened before are there."""
        missing = sorted(set(before or ()) - set(there))
        if missing:
            named = ", ".join(map(str, missing[:20]))
            reasons = "".join(f"; client {d.client}: {d.reason}" for d in exchange.dropped[:5])
            raise RoundFailed(
                f"round {exchange.round}: a sum of the same numbers with client {named} was opened before, and one "
                f"without would show that client's own: resume the run when all are back, or start a new run{reasons}",
                exchange.round,
            )

    def _enough(self, exchange: Exchange, left: int, asked: int) -> int:
        """Return t for so many clients that were asked, of whom so many are left."""
        least = threshold(asked, self.dropout)
        problem = flaw(asked, least, self.colluders)
        if left < least or problem:
            text = f"round {exchange.round}: {left} of {asked} clients are left, and a secure sum needs {least}"
            reasons = "; ".join(f"client {d.client}: {d.reason}" for d in exchange.dropped[:5])
            found = "; ".join(part for part in (problem, reasons) if part)
            raise RoundFailed(f"{text} ({found})" if found else text, exchange.round)
        return least

    @staticmethod
    def _with_shares(payload: Payload, collector: Collector, client: int) -> Payload:
        others, sealed = collector.inbox(client)
        return dataclasses.replace(payload, arrays={**payload.arrays, IDS: _numbers(others), SHARES: sealed})


def _numbers(ids: Sequence[int]) -> Array:
    return np.array(ids, dtype=np.int64)
