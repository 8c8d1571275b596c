"""Runs with secure sums: the same numbers as without, whoever drops out, and nothing that shows a single client."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from flwr.app import Error, Message, RecordDict

from fedapp import registry, server_app
from fedapp.cli import listing
from fedapp.client_app import app as client_app
from fedapp.config import from_flat
from fedapp.engines import local, resources, runner
from fedapp.errors import BadRequest
from fedapp.method import Array, Arrays, Reply, Sums
from fedapp.tasks.node import Node
from fedapp.transport import checkpoint, nodes, roster, secure
from fedapp.transport.identity import PROOF, Identity
from fedapp.transport.local_grid import FIRST_NODE, LocalGrid
from fedapp.transport.secure import HIDDEN, additive, restored, shapes_of
from fedapp.transport.traffic import RoundFailed
from strategies.base import Strategy
from tests.handmade import refusal

SUMMED = {
    "fedavg": "", "fedprox": "", "fedavgm": "", "fedyogi": "", "moon": "", "ditto": "", "fedetf": "", "feduv": "",
    "fedrod": "", "feddbe": "", "fedbabu": "weights=uniform", "fedper": "", "fedrep": "", "fedclassavg": "",
    "lgfedavg": "average=plain", "fml": "", "fednh": "", "fedproto": "down=all", "pfedfda": "",
}  # fmt: skip
"""Methods whose rounds need only sums, with hyperparameters."""
AFTER = {
    "fedncm": "",
    "fed3r": "scale=fit",
    "lda": "",
    "qda": "scale=none",
    "ccvr": "cov=sums epochs=2",
    "pccvr": "cov=sums epochs=2",
}
"""Those that need only sums after the last round."""
WIRE = Callable[[Message], Message | None]


class Watched(LocalGrid):
    """A grid whose replies pass a function, which may keep one back."""

    def __init__(self, flat: dict[str, Any], wire: WIRE) -> None:
        super().__init__(client_app, flat, int(flat["clients"]))
        self.wire = wire

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [r for r in map(self.wire, super().pull_messages(message_ids)) if r is not None]


def go(out: Path, wire: WIRE = lambda reply: reply, **values: Any) -> dict[str, Any]:
    base = {
        "method": "lgfedavg", "clients": 4, "num-server-rounds": 1, "local-epochs": 1, "batch-size": 64,
        "out": str(out), "data-fraction": 0.2, "secure-sum": True, "min-replies": 0.5, "protocols": "received",
        "final-training": False,
    }  # fmt: skip
    flat = from_flat({**base, **values}).to_flat()
    return server_app.serve(Watched(flat, wire), flat)


def state_of(out: Path) -> dict[str, Any]:
    found = checkpoint.latest(out / "checkpoint")
    assert found is not None
    return found[1]


def close(a: Mapping[str, Array], b: Mapping[str, Array], tolerance: float = 2e-6) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        np.testing.assert_allclose(a[name], b[name], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Arrays, int]]:
    """What each client would have sent without masks, and its n_k, in the order of the clients."""
    seen: list[tuple[Arrays, int]] = []

    def record(arrays: Arrays, sums: Sums, num_samples: int, num_classes: int) -> Arrays:
        seen.append((arrays, num_samples))
        return additive(arrays, sums, num_samples, num_classes)

    monkeypatch.setattr(secure, "additive", record)
    return seen


# ---- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("method", SUMMED)
def test_the_server_makes_the_same_of_the_sum_as_of_the_replies(
    method: str, tmp_path: Path, plain: list[tuple[Arrays, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []
    kinds = registry.configured(method, SUMMED[method])[0].strategy.__mro__
    kind = next(k for k in kinds if "aggregate" in k.__dict__)
    original = kind.aggregate

    def both(self: Strategy, state: Any, server_round: int, replies: Iterator[Reply]) -> Any:
        (one,) = replies
        assert one.num_samples == sum(n for _, n in plain) and len(one.members) == len(plain) == 4
        singles = [dataclasses.replace(m, arrays=a) for m, (a, _) in zip(one.members, plain, strict=True)]
        assert all(refusal(self, state, reply) is None for reply in singles)
        expected = original(self, state, server_round, iter(singles))
        found = original(self, state, server_round, iter([one]))
        for name in ("owned",):  # says which client has which class, for `down=own`
            expected, found = ({k: v for k, v in s.items() if k != name} for s in (expected, found))
        (a, texts), (b, others) = checkpoint.flatten(expected), checkpoint.flatten(found)
        close(a, b)
        assert texts == others
        checked.append(method)
        return found

    monkeypatch.setattr(kind, "aggregate", both)
    assert go(tmp_path / "run", method=method, **{"method-args": SUMMED[method]})["dropped"] == 0
    assert checked == [method]


def test_the_list_of_methods_says_with_which_secure_sums_work() -> None:
    found = {m.id: listing.secure_sums(m) for m in registry.discover().values()}
    needed = {"fedproto": "down=all", "ccvr": "cov=sums", "pccvr": "cov=sums"}
    assert found == {m: needed.get(m, "yes" if m in {*SUMMED, *AFTER} else "no") for m in found}


@pytest.mark.parametrize("method", AFTER)
def test_a_head_from_sums_is_the_same(method: str, tmp_path: Path) -> None:
    # Without training a class has dead features, so that scatters are singular: the strictest test of what is checked.
    args = f"base=none {AFTER[method]}"
    hidden = go(tmp_path / "hidden", method=method, **{"method-args": args})
    shown = go(tmp_path / "shown", method=method, **{"method-args": args, "secure-sum": False})
    assert hidden["calibration"]["clients"] == 4
    for name in ("clients", "samples", "samples_left_out", "classes_unseen", "after"):
        assert hidden["calibration"][name] == shown["calibration"][name], name
    from fedapp.learning.state import read_safetensors

    heads = [read_safetensors(tmp_path / run / "models" / "last.safetensors")[0] for run in ("hidden", "shown")]
    # Features of a network that was never trained are small: ridge regression magnifies what is rounded.
    for name, array in heads[1].items():
        assert np.abs(heads[0][name] - array).max() <= 3e-5 * np.abs(array).max(), name


def test_every_method_is_summed_or_refused() -> None:
    refused = set(registry.discover()) - set(SUMMED) - set(AFTER)
    assert {"cwfedavg", "fedgh", "fedamp", "fedfomo", "cfl", "ifca", "ktpfl", "fedcof", "fedtgp", "local"} <= refused
    for method in refused:
        with pytest.raises(BadRequest, match=f"secure-sum: {method}"):
            from_flat({"method": method, "secure-sum": True})


def test_masks_change_no_bit_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    go(tmp_path / "a", **{"num-server-rounds": 2})
    go(tmp_path / "b")
    go(tmp_path / "b", **{"num-server-rounds": 2, "resume": True})
    a, b = (state_of(tmp_path / run)["model"] for run in "ab")
    assert a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


def test_rows_of_classes_add_up() -> None:
    """Two clients with different classes, by hand: prototypes by owners and by counts."""
    one = {"protos": np.array([[1.0, 2.0]], np.float32), "labels": np.array([2], np.int32)}
    two = {"protos": np.array([[3.0, 0.0], [5.0, 6.0]], np.float32), "labels": np.array([0, 2], np.int32)}
    for counts, expected in ((None, [3, 4]), ((1, (7, 3)), [(1 + 15) / 4, (2 + 18) / 4])):
        sent = [one, two]
        if counts:
            sent = [{**one, "counts": np.array([1])}, {**two, "counts": np.array(counts[1])}]
        template = {"protos": np.zeros((4, 2), np.float32), "labels": np.zeros(4, np.int32)}
        template |= {"counts": np.zeros(4, np.int32)} if counts else {}
        sums = Sums(rows="protos", counts="counts" if counts else "")
        parts = [additive(a, sums, 9, 4) for a in sent]
        total = {n: parts[0][n] + parts[1][n] for n in parts[0]}
        assert {n: a.shape for n, a in total.items()} == shapes_of(template, sums)
        found = restored(total, sums, 2, template)
        assert found["labels"].tolist() == [0, 2] and found["protos"].tolist() == [[3, 0], expected]
        assert not counts or found["counts"].tolist() == [7, 4]


# ---- who drops out ---------------------------------------------------------------------------------------------------


def gone(stage: str, *clients: int, silent: bool = False) -> WIRE:
    """Clients that are gone when they should answer a message: Flower says so, or nobody does."""

    def wire(reply: Message) -> Message | None:
        if reply.metadata.message_type != stage or reply.metadata.src_node_id - 1000 not in clients:
            return reply
        return None if silent else Message(Error(code=4, reason="the node is gone"), reply_to=_asked(reply))

    return wire


def _asked(reply: Message) -> Message:
    """A message that a reply could answer."""
    asked = Message(reply.content, reply.metadata.src_node_id, reply.metadata.message_type)
    asked.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
    asked.metadata.__dict__["_src_node_id"], asked.metadata.__dict__["_dst_node_id"] = 1, reply.metadata.src_node_id
    return asked


@pytest.mark.full
@pytest.mark.parametrize("stage", ["query.keys", "query.shares", "train", "query.agree", "query.unmask"])
@pytest.mark.parametrize("silent", [False, True])
def test_a_client_that_drops_out_in_any_phase(
    stage: str, silent: bool, tmp_path: Path, plain: list[tuple[Arrays, int]]
) -> None:
    summary = go(tmp_path / "run", gone(stage, 2, silent=silent), **{"round-timeout": 1.0 if silent else 60.0})
    rows = (tmp_path / "run" / "dropped.csv").read_text().splitlines()[1:]
    assert len(rows) == summary["dropped"] == 1 and rows[0].startswith(f"1,2,{stage},")
    if stage == "train":  # it was computed, and got lost
        del plain[2]
    assert len(plain) == (4 if stage in ("query.agree", "query.unmask") else 3)
    n = sum(n_k for _, n_k in plain)
    mean = {name: sum(a[name].astype(np.float64) * n_k for a, n_k in plain) / n for name in plain[0][0]}
    found = state_of(tmp_path / "run")["model"]
    for name, array in mean.items():
        np.testing.assert_allclose(found[name], array, atol=1e-7)


@pytest.mark.parametrize("stage", ["query.shares", "train", "query.agree", "query.unmask"])
def test_too_many_that_drop_out_end_the_run_truthfully(stage: str, tmp_path: Path) -> None:
    what = "2 clients opened their shares, 3 are needed" if stage == "query.unmask" else "2 of 4 clients are left, and"
    with pytest.raises(RoundFailed, match=f"round 1: .*{what}"):
        go(tmp_path / "run", gone(stage, 1, 2))


def stages(seen: list[tuple[str, int]], wire: WIRE = lambda reply: reply) -> WIRE:
    """Note who answered what."""

    def noted(reply: Message) -> Message | None:
        seen.append((reply.metadata.message_type, reply.metadata.src_node_id - 1000))
        return wire(reply)

    return noted


def who(seen: list[tuple[str, int]], stage: str) -> list[int]:
    return [c for kind, c in seen if kind == stage]


@pytest.mark.parametrize("method", ["ccvr", "pccvr"])
def test_the_questions_of_a_run_are_summed_over_the_same_clients(method: str, tmp_path: Path) -> None:
    """Else the difference of the counts in two sums would be the class histogram of the client that is gone."""
    values: dict[str, Any] = {"method": method, "method-args": "base=none cov=sums epochs=2"}
    seen: list[tuple[str, int]] = []
    go(tmp_path / "first", stages(seen, gone("query.totals", 2)), **values)
    assert who(seen, "query.statistics") == [0, 1, 3]
    seen.clear()
    with pytest.raises(RoundFailed, match="with client 2 was opened before, and one without would show"):
        go(tmp_path / "second", stages(seen, gone("query.statistics", 2)), **values)
    assert who(seen, "query.unmask") == [0, 1, 2, 3]  # of the first question alone
    with pytest.raises(RoundFailed, match="with client 2 was opened before"):  # of a run that goes on too
        go(tmp_path / "second", gone("query.totals", 2), **values, resume=True)
    go(tmp_path / "second", **values, resume=True)


def test_a_sum_is_not_opened_where_the_round_fails_for_lack_of_replies(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    with pytest.raises(RoundFailed, match="3 valid replies of 4, min-replies asks for 4"):
        go(tmp_path / "run", stages(seen, gone("train", 2)), **{"min-replies": 1.0})
    assert who(seen, "train") and not who(seen, "query.unmask")


def test_a_round_that_is_repeated_opens_no_other_sum(tmp_path: Path) -> None:
    """The repeated round trains alike: the difference of two sums would be one client's update."""

    def killed(reply: Message) -> Message | None:
        if reply.metadata.message_type == "query.unmask":
            raise KeyboardInterrupt  # between the opening and the checkpoint
        return gone("train", 2)(reply)

    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "run", killed)
    with pytest.raises(RoundFailed, match="with client 1 was opened before"):
        go(tmp_path / "run", gone("train", 1), resume=True)
    seen: list[tuple[str, int]] = []
    go(tmp_path / "run", stages(seen), resume=True, **{"num-server-rounds": 2})
    assert who(seen, "train") == [0, 1, 3, 0, 1, 2, 3]
    (tmp_path / "run" / "opened-sums.json").write_text('{"train 1": 3}')
    with pytest.raises(BadRequest, match="record of opened secure sums"):
        go(tmp_path / "run", resume=True, **{"num-server-rounds": 3})


def test_a_node_that_forgot_its_keys_gets_new_ones(tmp_path: Path) -> None:
    """As after a restart: it sits out one round."""
    rounds = []

    def wire(reply: Message) -> Message:
        if reply.metadata.message_type == "query.unmask" and reply.metadata.src_node_id == 1003 and not rounds:
            rounds.append(1)
            grid[0].contexts[1003].state.clear()
        return reply

    grid: list[LocalGrid] = []
    original = Watched.__init__

    def remember(self: Watched, *args: Any) -> None:
        original(self, *args)
        grid.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watched, "__init__", remember)
        go(tmp_path / "run", wire, **{"num-server-rounds": 3})
    rows = (tmp_path / "run" / "dropped.csv").read_text().splitlines()[1:]
    assert len(rows) == 1 and rows[0].startswith("2,3,query.shares,") and "not its own" in rows[0]


@pytest.mark.full
def test_each_client_has_a_node_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of one node share a context, which Flower's simulation writes back without a lock."""
    monkeypatch.setattr(nodes, "LATECOMERS", 0.0)
    flat = from_flat({"method": "lgfedavg", "clients": 3, "secure-sum": True, "out": str(tmp_path / "run")}).to_flat()
    with pytest.raises(BadRequest, match="2 nodes are there for 3 clients: start flwr run with num-supernodes = 3"):
        server_app.serve(LocalGrid(client_app, flat, 2), flat)


def test_an_engine_gives_each_client_a_node_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(LocalGrid, "__init__", lambda self, app, flat, nodes: started.append(nodes))
    monkeypatch.setattr(server_app, "serve", lambda *args: None)
    monkeypatch.setattr(local, "read_run", lambda out: None)
    for summed in (True, False):
        local.run_local(from_flat({"method": "lgfedavg", "clients": 70, "secure-sum": summed, "out": str(tmp_path)}))

    class Submitted(Exception):
        pass

    class Session:
        def submit(self, flat: Any, num_supernodes: int, **resources: Any) -> Any:
            started.append(num_supernodes)
            raise Submitted

    for summed in (True, False):
        config = from_flat({"method": "lgfedavg", "clients": 70, "secure-sum": summed, "out": str(tmp_path)})
        with pytest.raises(Submitted):
            runner.run_in(Session(), config, resources.ClientResources(1, 0.0, 1, 1, ""), runner.Follower())  # type: ignore[arg-type]
    assert started == [70, 64, 70, 64]


# ---- what leaves a client, and what it refuses -----------------------------------------------------------------------


def test_only_hidden_vectors_leave_a_client(tmp_path: Path, plain: list[tuple[Arrays, int]]) -> None:
    seen: dict[str, set[str]] = {}
    vectors = []

    def wire(reply: Message) -> Message:
        kind = reply.metadata.message_type
        for name, array in reply.content.array_records.get("arrays", {}).items():
            seen.setdefault(kind, set()).add(name)
            if name == HIDDEN:
                vectors.append(array.numpy())
        return reply

    go(tmp_path / "run", wire, method="fedncm")
    assert seen.pop("train") == seen.pop("query.sums") == {HIDDEN}
    assert seen == {
        "query.keys": {"secure/keys", "secure/proofs"},
        "query.shares": {"secure/keys", "secure/digest", "secure/shares"},
        "query.agree": {"secure/codes"},
        "query.unmask": {"secure/shares"},
    }
    # Numbers that are uniform modulo 2^64: their leading bytes take all values alike. Unmasked, most are 0 or 255.
    for vector in vectors:
        leading = np.bincount((vector >> np.uint64(56)).astype(int), minlength=256)
        expected = len(vector) / 256
        assert ((leading - expected) ** 2).sum() / expected < 255 + 6 * math.sqrt(2 * 255)
    assert len(vectors) == 8 and len(plain) == 8


def test_a_client_answers_nothing_in_the_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_app, "secure_sums", lambda run: None)
    with pytest.raises(RoundFailed, match="has no valid list of clients"):
        go(tmp_path / "run")


def changed(stage: str, client: int, name: str, make: Callable[[np.ndarray], np.ndarray]) -> WIRE:
    """A client that sends something else."""

    def wire(reply: Message) -> Message:
        if reply.metadata.message_type == stage and reply.metadata.src_node_id == 1000 + client:
            record = reply.content.array_records["arrays"]
            record[name] = type(record[name])(make(record[name].numpy()))
        return reply

    return wire


def test_a_false_share_of_one_secret_blocks_nobody(tmp_path: Path) -> None:
    def of_client_3(shares: np.ndarray) -> np.ndarray:
        return shares ^ (np.arange(len(shares)) == 3).astype(np.uint8)[:, None]

    summary = go(tmp_path / "run", changed("query.unmask", 0, "secure/shares", of_client_3))
    assert not summary.get("blocked") and summary["dropped"] == 0
    assert "either client 3 gave client 0 a false share" in (tmp_path / "run" / "progress.jsonl").read_text()


@pytest.mark.parametrize("stage, name", [("query.keys", "secure/keys"), ("query.shares", "secure/keys")])
def test_a_key_that_is_none_blocks_its_sender_and_nobody_else(stage: str, name: str, tmp_path: Path) -> None:
    summary = go(tmp_path / "run", changed(stage, 1, name, np.zeros_like))
    assert summary["blocked"] == [1] and summary["dropped"] == 1


def test_a_copied_key_blocks_the_copier(tmp_path: Path) -> None:
    keys: list[np.ndarray] = []

    def copied(key: np.ndarray) -> np.ndarray:
        return keys[0]

    def wire(reply: Message) -> Message:
        if reply.metadata.message_type == "query.keys":
            keys.append(reply.content.array_records["arrays"]["secure/keys"].numpy())
        return changed("query.keys", 3, "secure/keys", copied)(reply)  # type: ignore[return-value]

    assert go(tmp_path / "run", wire)["blocked"] == [3]


@pytest.mark.parametrize(
    "name, words, drawn",
    [
        ("secure/shares", "could not open its shares", {"clients": 6}),
        ("secure/digest", "do not open its secret", {"clients": 9, "fraction-train": 0.667}),
    ],
)
def test_a_client_with_false_shares_ends_one_run_and_is_blocked(
    name: str, words: str, drawn: dict[str, Any], tmp_path: Path
) -> None:
    seen: list[tuple[str, int]] = []
    with pytest.raises(RoundFailed):
        go(tmp_path / "run", stages(seen, changed("query.shares", 5, name, lambda a: a ^ 1)), **drawn)
    assert words in (tmp_path / "run" / "blocked.csv").read_text()
    first = who(seen, "query.shares")
    seen.clear()
    assert go(tmp_path / "run", stages(seen), **drawn, resume=True)["blocked"] == [5]
    assert who(seen, "train") == [c for c in first if c != 5] != [], "the clients that are left, and no others"


def test_a_client_that_lies_twice_is_blocked_once(tmp_path: Path) -> None:
    false, large = (
        changed("query.shares", 3, "secure/digest", np.zeros_like),
        changed("query.agree", 3, "secure/codes", lambda a: a[:1]),
    )
    with pytest.raises(RoundFailed, match="round 1: the sum cannot be opened"):
        go(tmp_path / "run", lambda reply: large(false(reply) or reply), clients=10, **{"secure-dropout": 0.4})
    assert len((tmp_path / "run" / "blocked.csv").read_text().splitlines()) == 2


def test_a_client_that_opens_false_shares_is_blocked(tmp_path: Path) -> None:
    def wire(reply: Message) -> Message:
        if reply.metadata.message_type == "query.unmask" and reply.metadata.src_node_id == 1000:
            record = reply.content.array_records["arrays"]
            record["secure/shares"] = type(record["secure/shares"])(record["secure/shares"].numpy() ^ 1)
        return reply

    summary = go(tmp_path / "run", wire)
    assert (
        summary["blocked"] == [0] and "differ from those it received" in (tmp_path / "run" / "blocked.csv").read_text()
    )


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Path]:
    """Private keys of three nodes as ssh-keygen and openssl write them, and the roster of their public keys."""
    folder, keys = tmp_path_factory.mktemp("keys"), []
    for client in range(3):
        key = ec.generate_private_key(ec.SECP384R1())
        form = PrivateFormat.OpenSSH if client else PrivateFormat.PKCS8
        keys.append(folder / f"key{client}")
        keys[-1].write_bytes(key.private_bytes(Encoding.PEM, form, NoEncryption()))
        public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        print_of = hashlib.sha256(public).hexdigest()
        roster.add(folder / "roster.toml", roster.Admitted(client, 100 + client, print_of))
    return keys, folder / "roster.toml"


def test_keys_are_signed_by_the_nodes_of_the_roster(sites: tuple[list[Path], Path]) -> None:
    files, peers = sites
    nodes = [Identity(str(f), str(peers)) for f in files]
    keys = {c: bytes([c]) * 32 for c in range(3)}
    proofs = {c: node.proof("run", c, keys[c]) for c, node in enumerate(nodes)}
    assert all(
        len(p) == PROOF and node.problem_of("run", keys, proofs) is None for p, node in zip(proofs.values(), nodes)
    )
    other = nodes[1].proof("run", 2, keys[2])
    for changed in (
        {"keys": {**keys, 2: bytes(32)}}, {"run": "another"}, {"proofs": {**proofs, 2: bytes(PROOF)}},
        {"proofs": {**proofs, 2: other}}, {"proofs": {**proofs, 2: b"\xff" * PROOF}},
    ):  # fmt: skip
        given = {"run": "run", "keys": keys, "proofs": proofs, **changed}
        problem = nodes[0].problem_of(given["run"], given["keys"], given["proofs"])  # type: ignore[arg-type]
        assert problem and "is not signed by its node" in problem, changed
    stranger = nodes[0].problem_of("run", {**keys, 7: keys[0]}, {**proofs, 7: proofs[0]})
    assert stranger == "client 7 is not in this node's list of peers"
    assert Identity().problem_of("run", keys, {}) is None and Identity().proof("run", 0, keys[0]) == bytes(PROOF)
    with pytest.raises(BadRequest, match="is not a private key"):
        Identity(str(peers))


def test_a_node_that_asks_for_secure_sums_refuses_other_runs() -> None:
    for asked in ({"peers": "roster.toml"}, {"min-sum-clients": 5}):
        node = Node.parse({"client-id": 0, "data-path": "/data", **asked})
        config = from_flat({"method": "fedavg"})
        with pytest.raises(BadRequest, match=f"asks for secure sums .{next(iter(asked))} in the node-config."):
            node.check(config)
        node.check(config.replaced(secure_sum=True))


def test_a_node_asks_for_a_number_of_clients_in_a_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Watched.__init__

    def with_fewest(self: Watched, *args: Any) -> None:
        original(self, *args)
        for context in self.contexts.values():
            context.node_config = {**context.node_config, "min-sum-clients": 4}

    monkeypatch.setattr(Watched, "__init__", with_fewest)
    with pytest.raises(RoundFailed, match="a sum may be one of 3 clients, and this node's owner asks for 4"):
        go(tmp_path / "run")
    go(tmp_path / "other", clients=5)


@pytest.mark.parametrize("honest", [True, False])
def test_a_server_that_hands_out_a_key_of_its_own_is_refused(
    honest: bool, tmp_path: Path, sites: tuple[list[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    files, peers = sites
    original = Watched.__init__

    def with_identities(self: Watched, *args: Any) -> None:
        original(self, *args)
        for client, context in enumerate(self.contexts.values()):
            context.node_config = {**context.node_config, "node-key": str(files[client]), "peers": str(peers)}

    monkeypatch.setattr(Watched, "__init__", with_identities)

    def wire(reply: Message) -> Message:
        if not honest and reply.metadata.message_type == "query.keys" and reply.metadata.src_node_id == 1001:
            record = reply.content.array_records["arrays"]
            own = X25519PrivateKey.generate().public_key().public_bytes_raw()
            record["secure/keys"] = type(record["secure/keys"])(np.frombuffer(own, np.uint8))
        return reply

    if honest:
        assert go(tmp_path / "run", wire, clients=3)["dropped"] == 0
        return
    with pytest.raises(RoundFailed, match=r"0 of 3 clients are left.*client 1's is not signed by its node"):
        go(tmp_path / "run", wire, clients=3)


@pytest.mark.parametrize(
    "values, words",
    [
        ({"robust": "median"}, "robust compares single replies, which secure-sum hides"),
        ({"count-cap": 2.0}, "count-cap changes the weights of single replies"),
        ({"max-abs": 10.0}, "max-abs looks at single values"),
        ({"method": "ccvr"}, "secure-sum: ccvr needs the reply of each client"),
        ({"method": "fedproto"}, "secure-sum: fedproto needs"),
        ({"method": "fedclassavg", "method-args": "share=none"}, "with method-args = 'share=none' needs"),
        ({"method": "fed3r", "method-args": "base=scaffold"}, "with method-args = 'base=scaffold' needs"),
        ({"secure-sum": False, "secure-colluders": 1}, "secure-colluders is for secure sums"),
    ],
)
def test_what_does_not_go_with_it_is_refused_before_training(values: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        from_flat({"method": "fedavg", "secure-sum": True, **values})


@pytest.mark.parametrize(
    "values, words",
    [
        ({"clients": 2, "secure-colluders": 1}, "a sum of 2 clients, 1 of whom may help the server, hides no client"),
        ({"secure-dropout": 0.49, "clients": 5, "secure-colluders": 1}, "could get the sum's secrets twice"),
        ({"fraction-train": 0.25}, "secure-sum with 1 client in a round"),
    ],
)
def test_rounds_that_would_hide_nobody_are_refused_before_training(
    values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(BadRequest, match=words):
        go(tmp_path / "run", **values)
    assert not (tmp_path / "run" / "rounds.csv").exists()


def test_each_copy_of_the_app_answers_queries() -> None:
    """Ray unpickles the app for every message, in a process where an earlier copy has answered."""
    flat = from_flat({"method": "fedavg", "clients": 2, "secure-sum": True}).to_flat()
    for copy in (cloudpickle.loads(cloudpickle.dumps(client_app)) for _ in range(2)):
        grid = LocalGrid(copy, flat, 2)
        (reply,) = grid.send_and_receive([Message(RecordDict(), FIRST_NODE, "query.keys")])
        assert not reply.has_error(), reply.error
