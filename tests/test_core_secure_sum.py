"""Secure sums: shares, masks and the protocol, against slow computations and against what a server might try."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from fedapp.core import masks, secure_sum
from fedapp.core.masks import add_mask, decode, encode, largest
from fedapp.core.secret_shares import PRIME, SECRET, combine, corrected, split, value_at, weights_at
from fedapp.core.secure_sum import Collector, Member, Unopened, Unsafe, flaw, noise_share, threshold

# ---- shares ----------------------------------------------------------------------------------------------------------


def test_a_worked_example_of_shamirs_scheme() -> None:
    shares = [value_at([1234, 166, 94], x, 1613) for x in range(1, 7)]  # Wikipedia's numbers
    assert shares == [1494, 329, 965, 176, 1188, 775]
    for chosen in itertools.combinations(range(6), 3):
        weights = weights_at(0, [i + 1 for i in chosen], 1613)
        assert sum(w * shares[i] for w, i in zip(weights, chosen, strict=True)) % 1613 == 1234


def test_fewer_shares_than_the_threshold_say_nothing() -> None:
    prime, t = 5, 3
    seen = {
        secret: Counter(
            (value_at([secret, a, b], 1, prime), value_at([secret, a, b], 4, prime))
            for a in range(prime)
            for b in range(prime)
        )
        for secret in range(prime)
    }
    assert all(counts == seen[0] and set(counts.values()) == {1} for counts in seen.values()) and t - 1 == 2


@given(st.binary(min_size=SECRET, max_size=SECRET), st.integers(1, 9), st.integers(0, 4), st.randoms())
def test_any_t_shares_give_the_secret_back(secret: bytes, t: int, more: int, random: Any) -> None:
    shares = split(secret, t, t + more)
    chosen = random.sample(range(t + more), t)
    assert combine([shares[i] for i in chosen], weights_at(0, [i + 1 for i in chosen])) == secret


def test_shares_of_one_secret_are_drawn_anew() -> None:
    assert split(bytes(SECRET), 2, 3) != split(bytes(SECRET), 2, 3)
    assert split(b"\xff" * SECRET, 1, 2) == [b"\0" + b"\xff" * SECRET] * 2


def test_shares_of_nothing_are_no_secret() -> None:
    assert combine([(PRIME - 1).to_bytes(33, "big")], [1]) is None
    with pytest.raises(ValueError, match="twice"):
        weights_at(0, [1, 1])
    with pytest.raises(ValueError, match="32 bytes"):
        split(b"short", 1, 1)
    with pytest.raises(ValueError, match=r"1 \.\. 2"):
        split(bytes(SECRET), 3, 2)


# ---- numbers and masks -----------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=5), st.integers(1, 50))
def test_numbers_come_back_within_half_a_step(values: list[float], parts: int) -> None:
    array = np.array(values)
    assert np.abs(decode(encode({"x": array}, parts), {"x": array.shape})["x"] - array).max() <= 2.0**-25


def test_a_weighted_mean_is_exact_to_4e_11_and_counts_are_exact() -> None:
    rng = np.random.default_rng(0)
    n = rng.integers(700, 1000, 20)
    w = rng.normal(size=(20, 10, 64)).astype(np.float32)
    total = np.zeros(640 + 10, np.uint64)
    for n_k, w_k in zip(n, w, strict=True):
        total += encode({"head": n_k * w_k.astype(np.float64), "count": np.full(10, n_k * 10**6)}, 20)
    found = decode(total, {"head": (10, 64), "count": (10,)})
    mean = np.einsum("k,kij->ij", n, w.astype(np.float64)) / n.sum()
    assert np.abs(found["head"] / n.sum() - mean).max() < 4.3e-11
    assert (found["count"] == n.sum() * 10**6).all()


def test_a_sum_cannot_wrap() -> None:
    for parts in (1, 3, 100):
        edge = largest(parts)
        total = sum((encode({"x": np.array([edge, -edge])}, parts) for _ in range(parts)), np.zeros(2, np.uint64))
        assert np.allclose(decode(total, {"x": (2,)})["x"], [edge * parts, -edge * parts], rtol=1e-12)
        with pytest.raises(OverflowError, match=f"of {parts} clients takes values up to"):
            encode({"x": np.array([edge * 1.001])}, parts)
        with pytest.raises(OverflowError, match=f"of {parts} clients takes values up to"):
            encode({"x": np.array([0, edge * -1.001])}, parts)
    with pytest.raises(OverflowError):
        encode({"x": np.array([2**62])}, 1)
    for bad in (np.nan, np.inf):
        with pytest.raises(FloatingPointError, match="'x' contains NaN"):
            encode({"x": np.array([0, bad])}, 2)


def test_a_mask_is_the_key_stream_of_aes_and_can_be_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    key = bytes(range(32))
    aes = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()
    blocks = b"".join(aes.update(i.to_bytes(16, "big")) for i in range(4))
    vector = np.zeros(8, np.uint64)
    add_mask(vector, key, 1)
    assert vector.astype("<u8").tobytes() == blocks
    monkeypatch.setattr(masks, "BLOCK", 3)
    add_mask(vector, key, -1)
    assert not vector.any()


# ---- the protocol ----------------------------------------------------------------------------------------------------


class Round:
    """One exchange of n clients, of which some drop out before a phase."""

    def __init__(self, n: int, t: int, tag: str = "run 1") -> None:
        self.tag, self.t = tag, t
        self.members = {10 * i: Member(10 * i, {}) for i in range(1, n + 1)}
        self.keys = {c: m.key() for c, m in self.members.items()}
        self.collector = Collector(tag, self.keys, t)
        rng = np.random.default_rng(n)
        self.x = {c: rng.integers(-(10**6), 10**6, 7) for c in self.members}

    def vector(self, client: int) -> np.ndarray:
        return encode({"x": self.x[client]}, len(self.members))

    def offers(self, gone: int = 0) -> None:
        for client in list(self.members)[gone:]:
            self.collector.offers[client] = self.members[client].offer(self.tag, self.keys, self.t)

    def sealed(self, client: int) -> dict[int, bytes]:
        ids, rows = self.collector.inbox(client)
        return {other: row.tobytes() for other, row in zip(ids, rows, strict=True)}

    def vectors(self, gone: int = 0) -> None:
        for client in list(self.collector.offers)[gone:]:
            self.collector.add(
                client, self.members[client].hide(self.tag, self.sealed(client), self.vector(client))
            )  # fmt: skip

    def agreed(self, gone: int = 0) -> dict[int, Any]:
        left = self.collector.summed
        return {c: self.members[c].agree(self.tag, left) for c in left[: len(left) - gone]}

    def codes(self, client: int, agreed: dict[int, Any]) -> dict[int, bytes]:
        rows = self.collector.codes(client, agreed)
        return {other: row.tobytes() for other, row in zip(sorted(self.collector.summed), rows, strict=True)}

    def shares(self, gone: int = 0, silent: int = 0) -> dict[int, Any]:
        agreed = self.agreed(silent)
        there = list(agreed)[: len(agreed) - gone]
        return {c: self.members[c].reveal(self.tag, self.codes(c, agreed)) for c in there}

    def total(self, shares: dict[int, Any]) -> np.ndarray:
        return decode(self.collector.open(shares), {"x": (7,)})["x"]


@pytest.mark.parametrize(
    "before, during, then, after",
    [(0, 0, 0, 0), (2, 0, 0, 0), (0, 2, 0, 0), (0, 0, 2, 0), (0, 0, 0, 2), (1, 1, 0, 0), (0, 1, 1, 0), (1, 0, 0, 1)],
)
def test_the_sum_is_that_of_the_clients_that_are_left(before: int, during: int, then: int, after: int) -> None:
    it = Round(7, 5)
    it.offers(before)
    it.vectors(during)
    left = it.collector.summed
    assert len(left) == 7 - before - during
    assert (it.total(it.shares(after, then)) == sum(it.x[c] for c in left)).all()


def test_too_few_clients_open_nothing() -> None:
    it = Round(7, 5)
    it.offers()
    it.vectors(1)
    with pytest.raises(Unopened, match="4 clients opened their shares, 5 are needed"):
        it.total(it.shares(2))


def test_what_the_server_gets_says_nothing_of_a_vector() -> None:
    """Not even once it has the keys of all masks that a client shares with others, as after a drop-out."""
    it = Round(4, 3)
    it.offers()
    client, secret = 20, it.members[20].kept["mask-key"]
    hidden = it.members[client].hide(it.tag, it.sealed(client), it.vector(client))
    for other, offer in it.collector.offers.items():
        if other != client:
            own = secure_sum._public(secret)
            key = secure_sum._pair_key(secret, own, offer.key, it.tag, client, other)
            add_mask(hidden, key, -secure_sum._sign(client, other))
    assert not np.array_equal(hidden, it.vector(client))
    assert (np.abs((hidden - it.vector(client)).view(np.int64)) > 2**40).all()  # b_u's mask is still there


def test_two_exchanges_hide_equal_vectors_differently_and_forget_their_secrets() -> None:
    it = Round(3, 2)
    seen = []
    for tag in ("one", "two"):
        it.tag = tag
        it.collector = Collector(tag, it.keys, it.t)
        it.offers()
        it.vectors()
        seen.append(it.members[10].kept["opened"])
        it.shares()
        assert set(it.members[10].kept) == {"box", "tags"}
    assert seen[0] != seen[1]
    with pytest.raises(Unsafe, match="an exchange of this name before"):  # its messages would pass for new ones
        it.offers()


def test_a_client_refuses_what_could_give_its_vector_away() -> None:
    it = Round(5, 4)
    it.offers()
    it.vectors()
    member, kept = it.members[10], dict(it.members[10].kept)
    with pytest.raises(Unsafe, match="not this client's turn"):  # the same masks on another vector
        member.hide(it.tag, it.sealed(10), it.vector(20))
    with pytest.raises(Unsafe, match="turn"):  # before the others said what they were told
        member.reveal(it.tag, {})
    for survivors in ([10, 20, 30], [20, 30, 40, 50], [10, 20, 30, 99]):
        with pytest.raises(Unsafe, match="is not one of 4 or more with this one"):
            member.agree(it.tag, survivors)
    assert member.kept == kept
    with pytest.raises(Unsafe, match="turn"):
        member.agree("another exchange", [10, 20, 30, 40])
    agreed = it.agreed()
    with pytest.raises(Unsafe, match="turn"):  # to another sum
        member.agree(it.tag, [10, 20, 30, 50])
    member.reveal(it.tag, it.codes(10, agreed))
    with pytest.raises(Unsafe, match="turn"):
        member.reveal(it.tag, it.codes(10, agreed))


def test_shares_are_opened_where_t_clients_were_told_of_one_sum() -> None:
    """Codes of clients that were told of another sum, copies, codes for others and none at all do not count."""
    it = Round(5, 4)
    it.offers()
    it.vectors()
    agreed = {c: m.agree(it.tag, [10, 20, 30, 40, 50] if c != 50 else [20, 30, 40, 50]) for c, m in it.members.items()}
    agreed[50] = np.concatenate([np.zeros((1, secure_sum.KEY), np.uint8), agreed[50]])
    codes = it.codes(10, agreed)
    few = {c: codes[c] for c in (20, 30)}
    mine = agreed[10][3].tobytes()  # what this client made for client 40
    for more in ({}, {10: codes[20]}, {40: codes[20]}, {40: mine}, {50: codes[20]}, {99: codes[20]}):
        with pytest.raises(Unsafe, match=r"3 clients confirm the same list of clients .* 4 are needed"):
            it.members[10].reveal(it.tag, {**few, **more})
    others = it.codes(30, agreed)
    with pytest.raises(Unsafe, match="1 clients confirm"):
        it.members[10].reveal(it.tag, others)  # made for client 30
    with pytest.raises(Unsafe, match="1 clients confirm"):
        it.members[50].reveal(it.tag, dict(zip([20, 30, 40], (agreed[c][4].tobytes() for c in (20, 30, 40)))))
    it.members[10].reveal(it.tag, it.codes(10, agreed))  # four of one opinion are enough


def test_a_server_that_names_different_clients_opens_no_sum_of_few() -> None:
    """Every client is told of five clients and of others that differ from one to the next."""
    it = Round(10, 7)
    it.offers()
    it.vectors()
    few, everyone = [10, 20, 30, 40, 50], list(it.members)
    told = {c: sorted({*few, c, *[o for o in everyone if o not in few and (o + c) % 3]}) for c in everyone}
    able = {c: s for c, s in told.items() if len(s) >= it.t}
    agreed = {c: it.members[c].agree(it.tag, s) for c, s in able.items()}
    opened = 0
    for c, survivors in able.items():
        codes = {o: agreed[o][able[o].index(c)].tobytes() for o in survivors if o in able and c in able[o]}
        same = [o for o in able if able[o] == survivors]
        try:
            it.members[c].reveal(it.tag, codes)
            opened += 1
        except Unsafe:
            assert len(same) < it.t
    assert len(able) >= it.t and opened == 0


def test_a_client_refuses_keys_and_shares_of_others() -> None:
    it = Round(4, 3)
    with pytest.raises(Unsafe, match="not its own"):
        it.members[10].offer(it.tag, {**it.keys, 10: it.keys[20]}, 3)
    with pytest.raises(Unsafe, match="one key"):
        it.members[10].offer(it.tag, {**it.keys, 20: it.keys[30]}, 3)
    with pytest.raises(Unsafe, match="public key is not valid"):
        it.members[10].offer(it.tag, {**it.keys, 20: bytes(32)}, 3)
    it.offers()
    sealed = it.sealed(10)
    for wrong, words in (
        ({**sealed, 20: sealed[30], 40: bytes(126)}, "these clients sent it false shares: 20, 40"),
        ({**sealed, 99: sealed[30]}, "not asked"),
        ({20: sealed[20]}, "2 clients take part, 3 are needed"),
    ):
        with pytest.raises(Unsafe, match=words):
            it.members[10].hide(it.tag, wrong, it.vector(10))
    assert secure_sum.blamed("these clients sent it false shares: 20, \u00b2, x, 40") == {20, 40}
    assert secure_sum.blamed("20") == set()
    it.members[10].hide(it.tag, sealed, it.vector(10))


def test_false_shares_are_noticed_and_named() -> None:
    it = Round(6, 4)
    it.offers()
    it.vectors(1)
    shares = it.shares()
    shares[30] = shares[30] ^ 1
    assert (it.total(shares) == sum(it.x[c] for c in it.collector.summed)).all()
    assert it.collector.disputes == {(c, 30) for c in it.members}
    with pytest.raises(Unopened, match="do not fit together") as caught:
        it.total({c: shares[c] for c in (20, 30, 40, 50)})
    assert caught.value.clients == []  # the shares of all secrets are false, so it is no client's own


def test_false_shares_of_clients_that_are_not_neighbours() -> None:
    it = Round(20, 14)
    it.offers()
    it.vectors(1)
    shares = {c: s.copy() for c, s in it.shares().items()}
    for liar in (50, 100):
        shares[liar][:] = 7
    assert (it.total(shares) == sum(it.x[c] for c in it.collector.summed)).all()
    assert {holder for _, holder in it.collector.disputes} == {50, 100}


def test_a_false_share_that_was_given_is_the_givers_or_the_holders() -> None:
    """Nobody can tell them apart, so both are named; and a false digest is nobody's but the giver's."""
    it = Round(6, 4)
    it.offers()
    original = secure_sum.split

    def bad(secret: bytes, t: int, n: int) -> list[bytes]:
        return [bytes(32) + b"\x07", *original(secret, t, n)[1:]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secure_sum, "split", bad)
        it.members[60] = Member(60, {"box": it.members[60].kept["box"]})
        it.collector.offers[60] = it.members[60].offer(it.tag, it.keys, it.t)
    it.vectors()
    shares = it.shares()
    assert (it.total(shares) == sum(it.x.values())).all() and it.collector.disputes == {(60, 10)}
    it.collector.offers[20] = dataclasses.replace(it.collector.offers[20], digest=bytes(32))
    with pytest.raises(Unopened, match=r"^the shares of the secrets of client 20 do not fit together$") as caught:
        it.total(shares)
    assert caught.value.clients == [20]


@given(st.integers(1, 5), st.integers(0, 6), st.randoms())
def test_half_of_the_values_beyond_the_threshold_may_be_false(t: int, more: int, random: Any) -> None:
    coefficients = [random.randrange(PRIME) for _ in range(t)]
    places = random.sample(range(1, 40), t + more)
    values = [value_at(coefficients, x) for x in places]
    for i in random.sample(range(t + more), more // 2):
        values[i] = random.randrange(PRIME)
    assert corrected(values, places, t) == coefficients


# ---- how many must be left -------------------------------------------------------------------------------------------


def test_thresholds() -> None:
    assert [threshold(n, 0.34) for n in (2, 3, 4, 5, 10, 100)] == [2, 2, 3, 4, 7, 66]
    assert threshold(10, 0) == 10 and threshold(10, 0.3) == 7


@pytest.mark.parametrize("n, m", [(2, 0), (3, 0), (4, 1), (6, 1), (7, 2)])
def test_a_server_cannot_have_both_secrets_of_a_client(n: int, m: int) -> None:
    """Each honest client answers once, those that help it answer twice: against all ways to split the honest ones."""
    for t in range(2, n + 1):
        both = any(a + m >= t and n - m - a + m >= t for a in range(n - m + 1))
        assert (flaw(n, t, m) is None) == (not both and t - m >= 2), (n, t, m)


@pytest.mark.parametrize("n, t, m", [(3, 2, 0), (5, 4, 1), (10, 7, 2)])
def test_the_noise_of_a_sum_is_enough_after_the_worst_drop_out(n: int, t: int, m: int) -> None:
    each = noise_share(n, t, m)
    honest = min(
        sum(each for c in left if c >= m)  # clients 0 .. m - 1 tell the server their noise
        for size in range(t, n + 1)
        for left in itertools.combinations(range(n), size)
    )
    assert honest == pytest.approx(1, abs=1e-12)
    with pytest.raises(ValueError, match="hides no client"):
        noise_share(n, m + 1, m)


def test_a_point_of_small_order_is_no_public_key() -> None:
    point = X25519PrivateKey.generate().public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    assert secure_sum.usable(point)
    assert not secure_sum.usable(bytes(32)) and not secure_sum.usable(point[:31])
