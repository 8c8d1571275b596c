"""Sums of vectors that hide each single vector from the server, also where clients drop out on the way.

Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017.

| symbol (paper) | here                                                                                     |
|----------------|------------------------------------------------------------------------------------------|
| c_u            | `box`, X25519, once per run: encrypts what u sends to another client through the server  |
| s_u            | `mask-key`, X25519, new in every exchange: with v's it gives the mask of the pair        |
| b_u            | `seed`, new in every exchange: gives u's own mask                                        |
| U_1, U_2, U_3  | clients asked; those whose shares arrived; those whose vectors arrived                   |
| t              | `threshold`, shares that open a secret                                                   |

1. `Member.key`: c_u's public key, once. All others get it.
2. `Member.offer`: u draws s_u and b_u, and sends each v of U_1 one share of both, encrypted for v.
3. `Member.hide`: y_u = x_u + PRG(b_u) + sum_{v in U_2, v > u} PRG(s_uv) - sum_{v in U_2, v < u} PRG(s_uv)  (mod 2^64).
4. `Member.agree`: each v tells each other client of U_3 which U_3 it was told of.
5. `Member.reveal`: where t clients were told of one U_3, each v sends its share of b_u for u in U_3, and of s_u for u
   in U_2 without U_3, never both.
6. `Collector.open`: sum y_u without PRG(b_u), and without the masks that U_3 shares with those that are gone.

s_u and b_u live for one exchange. With keys for the whole run, dropping out once would give away all earlier vectors:
once s_u of a client that is gone is open, so are its masks of all earlier exchanges, and the server has opened its b_u
in these. So only c_u lasts, and its shares are never given away.

A server that tells clients of different U_3 is found out in 4, round 3 of the paper's protocol against active servers,
with codes that each pair of clients can check instead of signatures. A client agrees once in an exchange, so t clients
for each of two U_3 would need 2 t <= n + m, where m help the server (`flaw`). One U_3 of t clients or more is opened,
or none. Whom the server names in U_2 then no longer matters. All honest clients that agreed have masks with each other,
and every other client of U_3 has one with at least one of them. So nothing but the sum over U_3 is free of masks.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections import Counter
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedapp.core.masks import Words, add_mask
from fedapp.core.secret_shares import PRIME, SECRET, SHARE, combine, corrected, split, value_at, weights_at

Bytes = npt.NDArray[np.uint8]

KEY = 32
"""Bytes of a public key, of a seed and of its digest."""
_NONCE, _TAG = 12, 16
_PLAIN = 2 * SHARE + KEY
SEALED = _NONCE + _PLAIN + _TAG
"""Bytes of an encrypted pair of shares."""


class Unsafe(ValueError):
    """A message that is not part of the protocol; answering it could give a secret away."""


class Unopened(ValueError):
    """A sum that cannot be opened; `clients` are those whose secrets the others' shares do not give, few of them.

    Either such a client gave false shares or a false digest of its own secret, or holders of its shares are malicious.
    """

    def __init__(self, message: str, clients: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.clients = list(clients)


def threshold(clients: int, dropout: float) -> int:
    """Return t, the fewest of so many clients whose sum is opened, where a share of them may drop out."""
    return clients - int(dropout * clients + 1e-9)


def flaw(clients: int, threshold: int, colluders: int) -> str | None:
    """Return the reason that sums would reveal single values, or None.

    Parameters
    ----------
    clients : n, that are asked.   threshold : t.   colluders : m, clients that tell the server all that they know.
    """
    if threshold - colluders < 2:
        return f"a sum of {threshold} clients, {colluders} of whom may help the server, hides no client"
    if 2 * threshold <= clients + colluders:
        return (
            f"{threshold} of {clients} clients open a sum, {colluders} of whom may help the server: it could get the "
            "sum's secrets twice"
        )
    return None


def noise_share(clients: int, threshold: int, colluders: int) -> float:
    """Return the variance of the noise that each client adds, as a share of that which the sum needs.

    The noise of those that answer adds up. The fewest whose sum is opened are t, and those that help the server can
    take theirs away, so t - m must bring the noise of one release: 1 / (t - m). Where all n answer, the variance of the
    sum is n / (t - m) times what it needs.

    Parameters
    ----------
    clients, threshold, colluders : n, t and m as in `flaw`.

    Raises
    ------
    ValueError : the sum is over too few clients to hide a single one, see `flaw`.
    """
    if problem := flaw(clients, threshold, colluders):
        raise ValueError(problem)
    return 1.0 / (threshold - colluders)


# ---- keys ------------------------------------------------------------------------------------------------------------


def _public(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def _derived(secret: bytes, purpose: str, tag: str, *parts: bytes) -> bytes:
    """Return 32 bytes for one purpose in one exchange."""
    fields = [b"fedapp secure sum", purpose.encode(), tag.encode(), *parts]
    info = b"".join(struct.pack(">I", len(f)) + f for f in fields)
    return HKDF(SHA256(), 32, salt=None, info=info).derive(secret)


def _agreed(private: bytes, public: bytes) -> bytes:
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as e:  # a point of small order: the secret would be 0 whatever the private key
        raise Unsafe("a public key is not valid") from e


def usable(public: bytes) -> bool:
    """Whether a public key gives secrets that depend on the private key."""
    try:
        _agreed(os.urandom(32), public)
    except Unsafe:
        return False
    return True


def _number(client: int) -> bytes:
    return struct.pack(">Q", client)


def _seal_key(private: bytes, public: bytes, tag: str, sender: int, receiver: int) -> bytes:
    return _derived(_agreed(private, public), "seal", tag, _number(sender), _number(receiver))


def _pair_key(private: bytes, own: bytes, public: bytes, tag: str, client: int, other: int) -> bytes:
    """Return the key of the mask that two clients share; `own` is the public key that belongs to `private`."""
    first, second = sorted([(client, own), (other, public)])
    parts = (_number(first[0]), first[1], _number(second[0]), second[1])
    return _derived(_agreed(private, public), "pair", tag, *parts)


def _own_key(seed: bytes, tag: str, client: int) -> bytes:
    return _derived(seed, "own", tag, _number(client))


def _code(private: bytes, public: bytes, tag: str, sender: int, receiver: int, told: bytes) -> bytes:
    """Return what only the two clients can make: the one tells the other what it was told."""
    return _derived(_agreed(private, public), "agree", tag, _number(sender), _number(receiver), told)


def _sign(client: int, other: int) -> int:
    return 1 if client < other else -1


# ---- a client --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Offer:
    """What a client sends before an exchange.

    Attributes
    ----------
    key : public key of s_u.   digest : of b_u, so that false shares are noticed.
    sealed : (n, SEALED) uint8, by the order of the ids of U_1: shares for each; zeros for the client itself.
    """

    key: bytes
    digest: bytes
    sealed: Bytes


class Member:
    """One client in the exchanges of one run.

    Parameters
    ----------
    client : its id.
    kept : its secrets; plain values that the caller keeps from one message to the next, where no one else reads them.
    """

    def __init__(self, client: int, kept: MutableMapping[str, Any]) -> None:
        self.client = client
        self.kept = kept

    def key(self) -> bytes:
        """Return the public key for what others send to this client; the same in the whole run."""
        if "box" not in self.kept:
            self.kept["box"] = os.urandom(32)
        return _public(self.kept["box"])

    def offer(self, tag: str, keys: Mapping[int, bytes], threshold: int) -> Offer:
        """Draw the secrets of an exchange and share them; those of an exchange before it are forgotten.

        Parameters
        ----------
        tag : name of the exchange. A name holds once, so that no message of another exchange passes for one of this.
        keys : public keys of U_1 by client id.
        threshold : t, as this client counts itself.

        Raises
        ------
        Unsafe : a key is missing or comes twice, or this client's is another than it gave; or the name was used.
        """
        if keys.get(self.client) != self.key():
            raise Unsafe("the key that others were given for this client is not its own")
        if len(set(keys.values())) != len(keys):
            raise Unsafe("two clients have one key")
        tags = self.kept.get("tags", [])
        if tag in tags:
            raise Unsafe("there was an exchange of this name before")
        ids, box = sorted(keys), self.kept["box"]
        secret, seed = os.urandom(32), os.urandom(32)
        public = _public(secret)
        pairs = zip(split(secret, threshold, len(ids)), split(seed, threshold, len(ids)), strict=True)
        sealed, own = np.zeros((len(ids), SEALED), np.uint8), b""
        for row, (other, (of_secret, of_seed)) in enumerate(zip(ids, pairs, strict=True)):
            plain = of_secret + of_seed + public
            if other == self.client:
                own = plain
                continue
            nonce = os.urandom(_NONCE)
            box_key = _seal_key(box, keys[other], tag, self.client, other)
            sealed[row] = np.frombuffer(nonce + AESGCM(box_key).encrypt(nonce, plain, tag.encode()), np.uint8)
        self._forget()
        self.kept.update(
            {"tag": tag, "ids": ids, "keys": b"".join(keys[i] for i in ids), "threshold": threshold}
            | {"mask-key": secret, "seed": seed, "own": own, "phase": "offered", "tags": [*tags, tag]}
        )
        return Offer(public, _digest(seed), sealed)

    def hide(self, tag: str, sealed: Mapping[int, bytes], vector: Words) -> Words:
        """Return y_u. A vector is hidden once; for another one there must be new secrets.

        Parameters
        ----------
        sealed : what the others of U_2 encrypted for this client, by their ids.   vector : x_u; it is not changed.

        Raises
        ------
        Unsafe : it was not asked for shares before, was asked for another vector already, fewer than t are there, or
            shares are none, or not from the client that they are said to be from; `blamed` says whose.
        """
        kept = self._of(tag, "offered")
        keys = self._boxes()
        there = sorted({*sealed, self.client})
        if self.client in sealed or not set(there) <= set(keys):
            raise Unsafe("shares came from clients that were not asked for any")
        if len(there) < kept["threshold"]:
            raise Unsafe(f"{len(there)} clients take part, {kept['threshold']} are needed")
        opened, pairs, false = {self.client: kept["own"]}, {}, []
        own = _public(kept["mask-key"])
        for other, text in sealed.items():
            box_key = _seal_key(kept["box"], keys[other], tag, other, self.client)
            try:
                opened[other] = AESGCM(box_key).decrypt(text[:_NONCE], text[_NONCE:], tag.encode())
                public = opened[other][2 * SHARE :]
                pairs[other] = _pair_key(kept["mask-key"], own, public, tag, self.client, other)
            except (InvalidTag, Unsafe):
                false.append(other)
        if false:
            raise Unsafe(_BLAME + ", ".join(map(str, sorted(false))))
        # Before anything is made of it: the same masks on two vectors would show their difference.
        kept["phase"] = "hidden"
        hidden = vector.copy()
        for other, pair in pairs.items():
            add_mask(hidden, pair, _sign(self.client, other))
        add_mask(hidden, _own_key(kept["seed"], tag, self.client), 1)
        kept.update({"there": there, "opened": b"".join(opened[i][: 2 * SHARE] for i in there)})
        for name in ("mask-key", "seed", "own"):
            del kept[name]
        return hidden

    def agree(self, tag: str, survivors: Collection[int]) -> Bytes:
        """Return a code for each client of U_3, (n_3, KEY) by the order of their ids: this client was told of U_3.

        It holds for the clients, keys and threshold that this client was given. A client agrees once.

        Raises
        ------
        Unsafe : fewer than t survived, or clients that were not there, or this one is said to be gone.
        """
        kept, left = self._of(tag, "hidden"), sorted(set(survivors))
        if self.client not in left or not set(left) <= set(kept["there"]) or len(left) < kept["threshold"]:
            raise Unsafe(f"a sum of {len(left)} clients is not one of {kept['threshold']} or more with this one")
        numbers = (kept["threshold"], len(kept["ids"]), *kept["ids"], *left)
        told = hashlib.sha256(kept["keys"] + b"".join(map(_number, numbers))).digest()
        kept.update({"left": left, "told": told, "phase": "agreed"})
        boxes = self._boxes()
        rows = [bytes(KEY) if i == self.client else _code(kept["box"], boxes[i], tag, self.client, i, told)
                for i in left]  # fmt: skip
        return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), KEY)

    def reveal(self, tag: str, codes: Mapping[int, bytes]) -> Bytes:
        """Return a share of b_u for each survivor and of s_u for all others of U_2, in the order of the ids of U_2.

        This client answers once and then has nothing left to give away.

        Parameters
        ----------
        codes : what others of U_3 made for this client in `agree`, by their ids.

        Raises
        ------
        Unsafe : fewer than t clients, this one among them, agree on who survived.
        """
        kept, boxes = self._of(tag, "agreed"), self._boxes()
        agreed = {self.client} | {
            other
            for other in set(kept["left"]) & codes.keys() - {self.client}
            if hmac.compare_digest(
                codes[other], _code(kept["box"], boxes[other], tag, other, self.client, kept["told"])
            )
        }
        if len(agreed) < kept["threshold"]:
            raise Unsafe(
                f"{len(agreed)} clients confirm the same list of clients in the sum, and {kept['threshold']} are needed"
            )
        left, opened = set(kept["left"]), zip(kept["there"], _pieces(kept["opened"], 2 * SHARE), strict=True)
        rows = [pair[SHARE:] if other in left else pair[:SHARE] for other, pair in opened]
        self._forget()
        return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), SHARE)

    def _boxes(self) -> dict[int, bytes]:
        return dict(zip(self.kept["ids"], _pieces(self.kept["keys"], KEY), strict=True))

    def _of(self, tag: str, phase: str) -> MutableMapping[str, Any]:
        if self.kept.get("tag") != tag or self.kept.get("phase") != phase:
            raise Unsafe("it is not this client's turn for that")
        return self.kept

    def _forget(self) -> None:
        for name in [n for n in self.kept if n not in ("box", "tags")]:
            del self.kept[name]


def _pieces(text: bytes, size: int) -> list[bytes]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def _digest(seed: bytes) -> bytes:
    return hashlib.sha256(b"fedapp secure sum seed" + seed).digest()


_BLAME = "these clients sent it false shares: "


def blamed(reason: str) -> set[int]:
    """Return the clients that the text of a client's `Unsafe` names as senders of false shares."""
    _, found, names = reason.partition(_BLAME)
    return {int(n) for n in names.split(", ") if n.isascii() and n.isdigit()} if found else set()


# ---- the server ------------------------------------------------------------------------------------------------------


class Collector:
    """The server's side of one exchange.

    Parameters
    ----------
    tag : name of the exchange.   clients : U_1.   threshold : t.

    Attributes
    ----------
    offers : by client, of U_2.   summed : U_3, in the order in which their vectors arrived.
    disputes : pairs of a client and a holder whose share of the client's secret does not lie on the polynomial of the
        others. Either the one gave a false share, or the other opened one: no one but these two can tell.
    """

    def __init__(self, tag: str, clients: Collection[int], threshold: int) -> None:
        self.tag, self.ids, self.threshold = tag, sorted(clients), threshold
        self.offers: dict[int, Offer] = {}
        self.summed: list[int] = []
        self.disputes: set[tuple[int, int]] = set()
        self._total: Words | None = None
        self._known: dict[tuple[int, tuple[int, ...]], list[int]] = {}

    def inbox(self, client: int) -> tuple[list[int], Bytes]:
        """Return the other clients of U_2, and what each encrypted for this one, (n_2 - 1, SEALED)."""
        place = self.ids.index(client)
        others = [c for c in sorted(self.offers) if c != client]
        rows = [self.offers[c].sealed[place] for c in others]
        return others, np.stack(rows) if rows else np.zeros((0, SEALED), np.uint8)

    def add(self, client: int, hidden: Words) -> None:
        """Add y_u to the sum."""
        if self._total is None:
            self._total = np.zeros(len(hidden), np.uint64)
        self._total += hidden
        self.summed.append(client)

    def codes(self, client: int, agreed: Mapping[int, Bytes]) -> Bytes:
        """Return one client's part of each reply of `Member.agree`, (n_3, KEY); zeros without a reply."""
        left = sorted(self.summed)
        none = np.zeros((len(left), KEY), np.uint8)
        return np.stack([agreed.get(other, none)[left.index(client)] for other in left])

    def open(self, shares: Mapping[int, Bytes]) -> Words:
        """Return the sum of x_u over U_3.

        Parameters
        ----------
        shares : what `Member.reveal` returned, by client.

        Raises
        ------
        Unopened : there are fewer than t, or the shares of a secret give none that belongs to it.
        """
        self.disputes.clear()
        if len(shares) < self.threshold or self._total is None:
            raise Unopened(f"{len(shares)} clients opened their shares, {self.threshold} are needed")
        there, left = sorted(self.offers), set(self.summed)
        secrets, lost = {}, []
        for i, client in enumerate(there):
            found = self._secret(client, client in left, {h: s[i].tobytes() for h, s in shares.items()})
            if found is None:
                lost.append(client)
            else:
                secrets[client] = found
        if lost:
            named = ", ".join(map(str, lost[:20]))
            # Where most secrets are lost, the holders are malicious, not the owners.
            few = lost if 2 * len(lost) < len(there) else []
            raise Unopened(f"the shares of the secrets of client {named} do not fit together", few)
        total = self._total.copy()
        for client in there:
            if client in left:
                add_mask(total, _own_key(secrets[client], self.tag, client), -1)
                continue
            own = self.offers[client].key
            for other in self.summed:
                key = _pair_key(secrets[client], own, self.offers[other].key, self.tag, client, other)
                add_mask(total, key, -_sign(other, client))
        return total

    def _secret(self, client: int, left: bool, shares: Mapping[int, bytes]) -> bytes | None:
        """Return b_u of a client that is left, or s_u of one that is gone; None where the shares do not give it.

        Shares of t holders do, as the digest shows, if none of them is false. Else up to half of the shares beyond t
        may be false, with any holders; and all beyond t, where others next to each other in the circle of all do.
        """
        often = Counter(holder for _, holder in self.disputes)
        holders = sorted(shares, key=lambda h: (often[h], h))  # those that were right before come first
        chosen = holders[: self.threshold]
        secret = self._of(client, left, shares, chosen)
        if secret is not None:
            suspects = {h: shares[h] for h in holders if h in often or h in chosen}
            self.disputes |= {(client, holder) for holder in self._false(suspects, chosen)}
            return secret
        if len(holders) == self.threshold:
            return None
        values = {h: int.from_bytes(shares[h], "big") for h in holders}
        places = [self.ids.index(h) + 1 for h in holders]
        found = corrected([values[h] for h in holders], places, self.threshold)
        if found is not None and found[0] < 2 ** (8 * SECRET):
            secret = found[0].to_bytes(SECRET, "big")
            if self._belongs(client, left, secret):
                false = (h for h, x in zip(holders, places, strict=True) if value_at(found, x) != values[h])
                self.disputes |= {(client, holder) for holder in false}
                return secret
        circle = sorted(shares) * 2
        for start in range(1, len(holders)):
            chosen = circle[start : start + self.threshold]
            secret = self._of(client, left, shares, chosen)
            if secret is not None:
                self.disputes |= {(client, holder) for holder in self._false(shares, chosen)}
                return secret
        return None

    def _of(self, client: int, left: bool, shares: Mapping[int, bytes], chosen: Sequence[int]) -> bytes | None:
        """Return the secret that t holders' shares give, if it is the client's."""
        weights = self._weights(tuple(self.ids.index(h) + 1 for h in chosen))
        found = combine([shares[h] for h in chosen], weights)
        return found if found is not None and self._belongs(client, left, found) else None

    def _belongs(self, client: int, left: bool, secret: bytes) -> bool:
        offer = self.offers[client]
        return hmac.compare_digest(*((offer.digest, _digest(secret)) if left else (offer.key, _public(secret))))

    def _weights(self, positions: tuple[int, ...], place: int = 0) -> list[int]:
        if (place, positions) not in self._known:
            self._known[place, positions] = weights_at(place, positions)
        return self._known[place, positions]

    def _false(self, shares: Mapping[int, bytes], good: Sequence[int]) -> set[int]:
        """Return the holders whose shares do not lie on the polynomial of the good ones."""
        positions = tuple(self.ids.index(h) + 1 for h in good)
        values = [int.from_bytes(shares[h], "big") for h in good]
        found = set()
        for holder in shares.keys() - set(good):
            weights = self._weights(positions, self.ids.index(holder) + 1)
            expected = sum(v * w for v, w in zip(values, weights, strict=True)) % PRIME
            if expected != int.from_bytes(shares[holder], "big"):
                found.add(holder)
        return found
