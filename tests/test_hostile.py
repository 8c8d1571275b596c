"""Hostile replies and registrations: each is refused with a reason, nothing is raised, honest clients are as before."""

from __future__ import annotations

import dataclasses
import json
import math
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.app.message import make_message
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import Metadata, ObjectTree, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import (
    UnexpectedObjectContentError,
    get_all_nested_objects,
    get_object_id,
)
from flwr.supercore.inflatable.inflatable_utils import validate_object_content
from flwr.superlink.grid.http_grid import HttpGrid
from hypothesis import given
from hypothesis import strategies as st

from fedapp import registry
from fedapp.client_app import app
from fedapp.config import from_flat
from fedapp.errors import BadRequest
from fedapp.learning.state import read_safetensors
from fedapp.reduce.reader import Schema
from fedapp.results.runs import RunResult
from fedapp.transport import boundary, checkpoint, delivery, nodes, packing, records, roster, validation
from fedapp.transport.boundary import BAD, FAILED, IMPOSSIBLE, Contract, Good, Refused, Registration
from fedapp.transport.local_grid import FIRST_NODE, LocalGrid, _identify
from fedapp.transport.nodes import NodeCohort
from fedapp.transport.records import ARRAYS, CAST, INFO, METRICS, reply_records, sealed
from fedapp.transport.request import RoundRequest
from fedapp.transport.traffic import Exchange
from fedapp.transport.virtual import Member, VirtualCohort
from tests.handmade import context, exchange
from tests.liars import Forge, Lie, federate, forged, often
from tests.test_robust import QUICK

SHAPES = {"head.weight": (10, 4), "head.bias": (10,), "bn.running_var": (3,)}
SCORES = {"received-correct": 3, "received-total": 5, "received-loss-sum": 4.5, "train-loss": 0.5}


def message(content: RecordDict) -> Message:
    _identify(1)
    return Message(content, 1001, "train")


def honest(wire: str = "fp32", **metrics: Any) -> RecordDict:
    rng = np.random.default_rng(0)
    arrays = {n: np.abs(rng.normal(size=s)).astype(np.float32) for n, s in SHAPES.items()}
    return sealed(
        reply_records(arrays, {"num-examples": 7, **SCORES, **metrics}, {"client": 1, "model": "digits-a"}, wire)
    )


Change = Callable[[RecordDict], None]


def put(name: str, array: np.ndarray) -> Change:
    return lambda c: c[ARRAYS].__setitem__(name, FlowerArray(array))


def raw(name: str = "head.bias", **fields: Any) -> Change:
    """Change what a record says of an array, or its bytes."""

    def change(content: RecordDict) -> None:
        if name not in content[ARRAYS]:
            put(name, np.zeros(0, np.float32))(content)
        for field, value in fields.items():
            setattr(content[ARRAYS][name], field, value)

    return change


def metric(name: str, value: Any) -> Change:
    return lambda c: c[METRICS].__setitem__(name, value)


def info(name: str, value: Any) -> Change:
    return lambda c: c[INFO].__setitem__(name, value)


def both(*changes: Change) -> Change:
    return lambda c: [change(c) for change in changes]  # type: ignore[return-value]


def without(*names: str) -> Change:
    return lambda c: [c[METRICS].__delitem__(name) for name in names]  # type: ignore[return-value]


def many_arrays(content: RecordDict) -> None:
    one = FlowerArray(np.zeros(1, np.float32))
    content[ARRAYS] = ArrayRecord({**dict(content[ARRAYS].items()), **{f"more{i}": one for i in range(20_000)}})


def many_metrics(content: RecordDict) -> None:
    content[METRICS] = MetricRecord({**dict(content[METRICS].items()), **{f"m{i}": 1 for i in range(50_000)}})


BIAS = np.zeros(10, np.float32)


def npy(array: np.ndarray) -> bytes:
    return FlowerArray(array).data


def padded(more: int) -> bytes:
    """The bytes of `BIAS` with a header that is longer."""
    header, numbers = npy(BIAS)[10:128], npy(BIAS)[128:]
    return npy(BIAS)[:8] + (118 + more).to_bytes(2, "little") + header[:-1] + b" " * more + b"\n" + numbers


IMPOSSIBLE_REPLIES: dict[str, tuple[Change, str]] = {
    "float64": (put("head.bias", BIAS.astype(np.float64)), "dtype float64"),
    "longdouble": (put("head.bias", BIAS.astype(np.longdouble)), "dtype"),
    "complex": (put("head.bias", BIAS.astype(np.complex64)), "dtype complex64"),
    "float16 that nobody asked for": (put("head.bias", BIAS.astype(np.float16)), "dtype float16"),
    "pickle": (raw(dtype="object"), "dtype object"),
    "garbage": (raw(data=b"garbage"), "7 bytes"),
    "garbage of the right length": (raw(data=b"x" * 168), "not in .npy format"),
    "no bytes": (raw(data=b""), "0 bytes"),
    "unknown dtype": (raw(dtype="zork"), "dtype zork"),
    "negative side": (raw(shape=(-10,)), "invalid shape for"),
    "claimed side of 2**40": (raw(shape=(2**40,)), "invalid shape for"),
    "other serialisation": (raw(stype="pickle"), "stored as pickle"),
    "transposed": (put("head.weight", np.zeros((4, 10), np.float32)), "shape (4, 10), expected (10, 4)"),
    "header of another shape": (raw(data=npy(np.zeros((2, 5), np.float32))), "differs from its record"),
    "header of another dtype": (raw(data=npy(np.zeros(10, np.int32))), "differs from its record"),
    "Fortran order": (
        raw(shape=(10,), data=npy(BIAS)[:8] + npy(BIAS)[8:].replace(b"False", b"True ", 1)),
        "from its record",
    ),
    "header of NumPy 9": (raw(data=npy(BIAS)[:6] + b"\x09\x00" + npy(BIAS)[8:]), "has a wrong .npy header"),
    "numbers between the bytes of numbers": (raw(data=padded(1)), "has a wrong .npy header"),
    "bytes after the numbers": (raw(data=npy(BIAS) + b"\0"), "differs from its record"),
    "numbers that are cut": (raw(data=npy(BIAS)[:-1]), "differs from its record"),
    "header that is longer than all": (raw(data=npy(BIAS)[:8] + b"\xff\xff" + npy(BIAS)[10:]), "not in .npy format"),
    "other byte order": (raw(data=npy(BIAS.astype(">f4"))), "differs from its record"),
    "fields": (raw(data=npy(np.zeros(10, [("a", "f4")]))), "differs from its record"),
    "text for bytes": (raw(data="x" * 168), "not in .npy format"),
    "empty array of an endless shape": (raw("lar", dtype="float32", shape=(0, 2**31)), "invalid shape for"),
    "half precision in a further array": (put("lar", np.zeros((2, 4), np.float16)), "dtype float16"),
    "missing array": (lambda c: c[ARRAYS].__delitem__("head.bias"), "arrays missing: head.bias"),
    "further array": (put("head.evil", BIAS), "not an array that lgfedavg shares"),
    "20,000 further arrays": (many_arrays, "20003 arrays"),
    "name of 10 MB": (put("labels" * 1_700_000, BIAS), "the name of an array has"),
    "much in an allowed array": (put("lar", np.zeros((100, 30), np.float32)), "at most 10000"),
    "no records": (lambda c: [c.pop(n) for n in list(c)], "arrays missing"),  # type: ignore[dict-item]
    "second record of arrays": (lambda c: c.__setitem__("more", ArrayRecord()), "unexpected record 'more'"),
    "second record of metrics": (lambda c: c.__setitem__("more", MetricRecord()), "unexpected record 'more'"),
    "cast in invalid JSON": (info(CAST, "{"), "narrowed"),
    "deep cast": (info(CAST, "[" * 200_000), "narrowed"),
    "cast null": (info(CAST, "null"), "narrowed"),
    "cast to object": (info(CAST, json.dumps({"head.bias": "object"})), "narrowed"),
    "cast that asks for memory": (info(CAST, json.dumps({"head.bias": "(2000000000,)f4"})), "narrowed"),
    "count list": (metric("num-examples", [1, 2]), "'num-examples' is [1, 2]"),
    "total list": (metric("received-total", [1, 2]), "'received-total' is [1, 2]"),
    "50,000 metrics": (many_metrics, "at most 256"),
    "long list": (metric("fomo-weights", [0.5] * 100_000), "at most 65536"),
    "client inf": (info("client", math.inf), "answers as client inf"),
    "client as truth": (info("client", True), "answers as client True"),
    "fact that is a list": (info("model", [1, 2]), "is a list"),
    "long fact": (info("model", "x" * 5000), "at most 4096"),
    "many facts": (both(*(info(f"f{i}", 1) for i in range(20))), "at most 16"),
    "error that is a number": (info("error", 5), "no message or a wrong stage"),
    "stage that is not a text": (both(info("error", "boom"), info("stage", [1])), "no message or a wrong stage"),
    "error in another stage": (both(info("error", "boom"), info("stage", "=A1")), "a wrong stage"),
    "unexpected fact": (info("more", "x"), "unexpected fact 'more'"),
    "metric that was not requested": (metric("evil", 1), "unexpected metric 'evil'"),
    "total without a number of hits": (without("received-correct"), "go together"),
    "hits without a total": (without("received-total"), "go together"),
    "no score": (
        lambda c: [c[METRICS].__delitem__(f"received-{n}") for n in ("correct", "total")] and None,
        "no score",
    ),
    "no count": (without("num-examples"), "num-examples is missing"),
}
"""What our client code cannot send, with a part of the reason."""
BAD_VALUES: dict[str, tuple[Change, str]] = {
    "NaN": (put("head.bias", BIAS * np.nan), "NaN or infinity"),
    "3e38": (put("head.bias", np.full(10, 3e38, np.float32)), "possible are"),
    "just too large": (put("head.bias", np.full(10, 10_001, np.float32)), "possible are"),
    "class ids beyond all": (put("labels", np.array([2**62])), "possible are"),
    "1e30 in a class mean": (put("lar", np.full((2, 4), 1e30, np.float32)), "possible are"),
    "count inf": (metric("num-examples", math.inf), "num-examples is inf"),
    "count NaN": (metric("num-examples", math.nan), "num-examples is nan"),
    "count 0.4": (metric("num-examples", 0.4), "num-examples is 0.4"),
    "count -7": (metric("num-examples", -7), "num-examples is -7"),
    "count 1e18": (metric("num-examples", 10**18), "registered with 7"),
    "count one more": (metric("num-examples", 8), "registered with 7"),
    "total inf": (metric("received-total", math.inf), "'received-total' is inf"),
    "total 0": (metric("received-total", 0), "'received-total' is 0"),
    "correct 1e9": (metric("received-correct", 10**9), "1000000000 of them correct"),
    "correct one too many": (metric("received-correct", 6), "6 of them correct"),
    "loss below 0": (metric("received-loss-sum", -1.0), "'received-loss-sum' is -1"),
    "loss -inf": (metric("train-loss", -math.inf), "'train-loss' is -inf"),
    "correct below 0": (metric("received-correct", -1), "-1 of them correct"),
    "total of another test set": (metric("received-total", 6), "registered with 5 test samples"),
    "variance below 0": (put("bn.running_var", np.full(3, -1e-3, np.float32)), "possible are 0 to"),
    "share above 1": (metric("received-balanced", 1.5), "a share is needed"),
    "time below 0": (metric("seconds", -1.0), "'seconds' is -1"),
    "time NaN": (metric("train-seconds", math.nan), "'train-seconds' is nan"),
    "half a step": (metric("steps", 0.5), "'steps' is 0.5"),
}
"""What an honest client could send too, for example because its model diverged."""
FAILURES: dict[str, tuple[Change, str]] = {
    "error of 20 MB": (info("error", "x" * 20_000_000), "x"),
    "error with a stage": (both(info("error", "boom"), info("stage", "train")), "boom"),
}
GRADES = {IMPOSSIBLE: IMPOSSIBLE_REPLIES, BAD: BAD_VALUES, FAILED: FAILURES}
KNOWN = {*SCORES, "received-balanced", "seconds", "train-seconds", "steps", "fomo-weights"}
CONTRACT = Contract(
    1, "train", Schema("lgfedavg", SHAPES, ("labels", "lar"), {"head.": "feature", "lar": "feature"}), 10_000, 7,
    tests=5, numbers=KNOWN, scored=True,
)  # fmt: skip
FP16 = dataclasses.replace(CONTRACT, wire_dtype="fp16")
EVALUATION = dataclasses.replace(CONTRACT, kind="evaluate", schema=Schema())


@pytest.mark.parametrize(("grade", "what"), [(g, what) for g, table in GRADES.items() for what in table])
def test_a_hostile_reply_is_refused_with_a_reason(grade: str, what: str) -> None:
    change, reason = GRADES[grade][what]
    content = honest()
    change(content)
    got = boundary.read(message(content), CONTRACT)
    assert isinstance(got, Refused) and got.offence == grade and reason in got.reason, got


def test_honest_replies_pass_as_they_are() -> None:
    for wire, contract in (("fp32", CONTRACT), ("fp16", FP16)):
        got = boundary.read(message(honest(wire)), contract)
        assert isinstance(got, Good) and all(a.dtype == np.float32 for a in got.arrays.values()), got
        assert got.metrics["num-examples"] == 7 and got.info["client"] == 1
    tiny = honest()
    put("head.bias", np.full(10, 1e-45, np.float32))(tiny)
    assert isinstance(boundary.read(message(tiny), CONTRACT), Good)


def test_what_is_read_where_it_lies_is_what_was_sent() -> None:
    for change, name, array in (
        (raw(data=padded(64)), "head.bias", BIAS),
        (put("lar", np.zeros((0, 4), np.float32)), "lar", np.zeros((0, 4), np.float32)),
        (put("labels", np.arange(3)), "labels", np.arange(3)),
        (put("lar", np.arange(6.0).reshape(2, 3)), "lar", np.arange(6.0).reshape(2, 3)),
        (put("lar", np.array(3.5)), "lar", np.array(3.5)),
    ):
        content = honest()
        change(content)
        got = boundary.read(message(content), CONTRACT)
        assert isinstance(got, Good), got
        found = got.arrays[name]
        assert found.dtype == array.dtype and found.shape == array.shape and np.array_equal(found, array)
        assert found.flags.aligned and (not found.size or not found.flags.writeable)


@pytest.mark.parametrize("data", [np.frombuffer(npy(BIAS), np.float32).data, None, 5, [1], memoryview(npy(BIAS))[::2]])
def test_data_that_are_no_bytes_are_refused(data: Any) -> None:
    """They cannot come from a real node; in a simulation they may be anything that Ray makes of bytes."""
    content = honest()
    raw(data=data)(content)
    assert isinstance(boundary.read(message(content), CONTRACT), Refused)
    raw(data=bytearray(npy(BIAS)))(content)
    assert isinstance(boundary.read(message(content), CONTRACT), Good)


@pytest.mark.parametrize("loss", [math.nan, math.inf, 3e38])
def test_an_honest_client_may_say_that_the_model_it_got_is_spoiled(loss: float) -> None:
    """Whatever the losses are, the reply counts: else one liar that spoils the model ends all others."""
    content = honest(**{"received-loss-sum": loss, "train-loss": loss, "received-correct": 0})
    got = boundary.read(message(content), CONTRACT)
    assert isinstance(got, Good), got
    kept = got.metrics["train-loss"]
    assert kept == 3e38 if loss == 3e38 else math.isnan(kept)


@pytest.mark.parametrize("value", [1e5, 6.5e4])
def test_half_precision_is_bounded_too(value: float) -> None:
    content = honest("fp16")
    with np.errstate(over="ignore"):
        put("head.bias", np.full(10, value).astype(np.float16))(content)
    assert isinstance(boundary.read(message(content), FP16), Refused)


def test_an_evaluation_holds_no_arrays() -> None:
    got = boundary.read(message(honest()), EVALUATION)
    assert isinstance(got, Refused) and "not an array" in got.reason


ANY = st.one_of(st.none(), st.text(max_size=20), st.binary(max_size=20), st.integers(), st.floats())


@given(dtype=st.text(max_size=12), shape=st.lists(st.integers(), max_size=4), data=st.binary(max_size=300))
def test_no_bytes_of_an_array_raise(dtype: str, shape: list[int], data: bytes) -> None:
    for name in (dtype, "float32"):
        content = honest()
        raw(dtype=name, shape=tuple(shape), data=data)(content)
        assert isinstance(boundary.read(message(content), CONTRACT), Refused)


@given(name=st.text(max_size=12), value=st.one_of(st.integers(), st.floats(), st.lists(st.floats(), max_size=3)))
def test_no_metric_raises(name: str, value: Any) -> None:
    content = honest()
    content[METRICS].__dict__.setdefault("_data", {})[name] = value  # past Flower's own check of types
    assert isinstance(boundary.read(message(content), CONTRACT), (Good, Refused))


MANY = {f"features.{k}.weight": (256, 256) for k in range(40)}
"""The arrays of a model of 10 MB."""


def peak_of(content: RecordDict, contract: Contract) -> tuple[Good | Refused, int]:
    """Read a reply; return the largest memory that this took beside the reply itself, in bytes."""
    sent = message(content)
    tracemalloc.start()
    try:
        got = boundary.read(sent, contract)
        return got, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("wire", ["fp32", "fp16"])
def test_reading_a_reply_takes_less_than_twice_the_size_of_the_contract(wire: str) -> None:
    """However much a node sends: what is more than the contract's size is refused before it is decoded."""
    contract = dataclasses.replace(CONTRACT, schema=Schema(shapes=MANY), wire_dtype=wire, numbers=None)
    size = sum(4 * a * b for a, b in MANY.values())

    def content(times: int = 1, **more: np.ndarray) -> RecordDict:
        arrays = {n: np.ones((times * a, b), np.float32) for n, (a, b) in MANY.items()}
        return sealed(reply_records({**arrays, **more}, {"num-examples": 7, **SCORES}, {"client": 1}, wire))

    good, most = peak_of(content(), contract)
    # Arrays stay where the message has them; float16 becomes float32, which takes the contract's size once.
    assert isinstance(good, Good) and (size <= most < 2 * size if wire == "fp16" else most < size // 10)
    for hostile in (content(20), content(lar=np.ones((20 * size >> 12, 1 << 10), np.float32))):
        got, most = peak_of(hostile, contract)
        assert isinstance(got, Refused) and got.offence == IMPOSSIBLE and most < size // 10, got
    claimed = content()
    raw(shape=(1 << 30,), name="features.0.weight")(claimed)
    assert peak_of(claimed, contract)[1] < size // 10


# ---- the pieces in which a reply comes from a real node --------------------------------------------------------------


class Link(HttpGrid):
    """Flower's grid of real nodes, with a SuperLink that has one reply, made of these pieces."""

    run: Any = SimpleNamespace(run_id=1)

    def __init__(self, pieces: dict[str, bytes], root: str, tree: list[str] | None = None) -> None:
        super().__init__(token="none")
        self._run: Any = self.run
        self.pieces, self.confirmed = pieces, list[str]()
        parts = [ObjectTree(object_id=name) for name in pieces if name != root] if tree is None else []
        self.reply = PullAppMessagesResponse(
            messages_list=[
                ProtoMessage(metadata=Metadata(message_id=root, message_type="train", reply_to_message_id="asked"))
            ],
            message_object_trees=[ObjectTree(object_id=root, children=parts)],
        )

    @property
    def _runtime_client(self) -> Any:
        def piece(request: Any) -> Any:
            found = self.pieces.get(request.object_id)
            return PullObjectResponse(
                object_found=found is not None, object_available=found is not None, object_content=found or b""
            )

        def confirm(request: Any) -> None:
            self.confirmed.append(request.message_object_id)

        return SimpleNamespace(PullMessages=lambda r: self.reply, PullObject=piece, ConfirmMessageReceived=confirm)


def pieces_of(content: RecordDict, change: Forge = lambda kind, body: body) -> Link:
    """Take a reply apart as a node does, with other bodies."""
    pieces = forged(message(content), change)
    return Link(pieces, list(pieces)[-1])


def packed(content: RecordDict, change: Callable[[bytes], bytes] = bytes) -> RecordDict:
    """Return a reply's content as a node sends it, with other bytes in its pack."""
    sent = message(content)
    packing.pack([sent])
    record = sent.content.array_records[packing.PACKED]
    for name, whole in record.items():
        record[name] = FlowerArray(whole.dtype, whole.shape, whole.stype, change(whole.data))
    return sent.content


def test_a_reply_comes_as_it_was_sent_and_answers_what_the_superlink_says() -> None:
    link = pieces_of(honest())
    [got] = delivery.arrived(link, ["asked"], 1 << 20)
    assert got.metadata.reply_to_message_id == "asked", "not what the node wrote into it"
    assert isinstance(boundary.read(got, CONTRACT), Good) and link.confirmed == [got.metadata.message_id]
    _identify(1)
    failed = Message(Error(8, "boom"), reply_to=message(honest()))
    [piece] = [o.deflate() for o in get_all_nested_objects(failed).values()]
    [got] = delivery.arrived(Link({get_object_id(piece): piece}, get_object_id(piece)), ["asked"], 1 << 20)
    assert got.error.reason == "boom" and got.metadata.reply_to_message_id == "asked"


@pytest.mark.parametrize("kind", ["Message", "RecordDict", "ArrayRecord", "MetricRecord", "ConfigRecord", "Array"])
@pytest.mark.parametrize("body", [b"", b"garbage", b"[" * 100_000, b"{}", b"null"])
def test_pieces_that_are_no_message_are_no_message(kind: str, body: bytes) -> None:
    if (kind, body) in ((k, b"") for k in ("Message", "MetricRecord", "ConfigRecord")):
        return  # an empty one, which is read as such
    link = pieces_of(honest(), lambda k, b: body if k == kind else b)
    [got] = delivery.arrived(link, ["asked"], 1 << 20)
    assert got.error.code == delivery.UNREADABLE and "not a message" in got.error.reason
    assert got.metadata.reply_to_message_id == "asked" and link.confirmed


def test_a_reply_that_is_another_object_or_lacks_a_part_is_no_message() -> None:
    whole = pieces_of(honest())
    record = next(name for name, piece in whole.pieces.items() if piece.startswith(b"MetricRecord"))
    [got] = delivery.arrived(Link(whole.pieces, record, []), ["asked"], 1 << 20)
    assert got.error.code == delivery.UNREADABLE
    root = list(whole.pieces)[-1]
    [got] = delivery.arrived(Link(whole.pieces, root, []), ["asked"], 1 << 20)
    assert got.error.code == delivery.UNREADABLE, "the SuperLink was not told of what it consists of"
    del whole.pieces[record]
    [got] = delivery.arrived(whole, ["asked"], 1 << 20)
    assert got.error.code in nodes.GONE and "missing" in got.error.reason


def test_a_packed_reply_comes_as_it_was_sent() -> None:
    [plain] = delivery.arrived(pieces_of(honest()), ["asked"], 1 << 20)
    [got] = delivery.arrived(pieces_of(packed(honest())), ["asked"], 1 << 20)
    one, other = boundary.read(plain, CONTRACT), boundary.read(got, CONTRACT)
    assert isinstance(one, Good) and isinstance(other, Good)
    assert one.metrics == other.metrics and one.info == other.info and one.size == other.size
    assert list(one.arrays) == list(other.arrays)
    assert all(np.array_equal(a, other.arrays[n]) and other.arrays[n].flags.aligned for n, a in one.arrays.items())


def listed(index: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """Return how to change the index of a pack, in place or to what is returned; the arrays move with it."""

    def change(data: bytes) -> bytes:
        size = packing.LENGTH + int.from_bytes(data[: packing.LENGTH], "big")
        found = json.loads(data[packing.LENGTH : size])
        found = index(found) or found
        text = found if isinstance(found, bytes) else json.dumps(found).encode()
        length = packing.LENGTH + len(text)
        return (
            len(text).to_bytes(packing.LENGTH, "big")
            + text
            + bytes(-length % packing.ALIGNED)
            + data[size + -size % packing.ALIGNED :]
        )

    return change


def replaced(at: int, value: Any) -> Callable[[dict[str, Any]], Any]:
    def index(found: dict[str, Any]) -> None:
        found[next(iter(found))][at] = value

    return index


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: b"", "not a message"),
        (lambda data: data[:4], "not a message"),
        (lambda data: b"\xff" * 8 + data[8:], "not a message"),
        (lambda data: data[:-1], "not a message"),
        (lambda data: data + b"x", "not a message"),
        (listed(lambda found: b"[" * 100_000), "not a message"),
        (listed(lambda found: [1]), "not a message"),
        (listed(lambda found: dict.fromkeys(found, 1)), "not a message"),
        (listed(replaced(0, 5)), "not a message"),
        (listed(replaced(1, "x")), "not a message"),
        (listed(replaced(2, None)), "not a message"),
        (listed(replaced(3, -64)), "not a message"),
        (listed(replaced(3, 1 << 70)), "not a message"),
        (listed(replaced(3, True)), "not a message"),
        (listed(replaced(0, "object")), "dtype"),
        (listed(replaced(1, [1 << 30])), "shape"),
        (listed(replaced(1, ["a"])), "shape"),
        (listed(replaced(2, "torch.Tensor")), "stored as"),
        (listed(lambda found: {f"x{n}": v for n, v in found.items()}), "missing"),
    ],
)
def test_a_pack_that_is_none_is_no_message_and_one_of_wrong_arrays_is_refused(
    change: Callable[[bytes], bytes], said: str
) -> None:
    [got] = delivery.arrived(pieces_of(packed(honest(), change)), ["asked"], 1 << 20)
    if got.has_error():
        assert got.error.code == delivery.UNREADABLE and said in got.error.reason
    else:
        refused = boundary.read(got, CONTRACT)
        assert isinstance(refused, Refused) and refused.offence == IMPOSSIBLE and said in refused.reason


def test_arrays_that_are_packed_twice_or_also_sent_plainly_are_no_message() -> None:
    twice = packed(honest())
    record = twice.array_records[packing.PACKED]
    record[packing.SHARED] = record[packing.OWN]
    both = packed(honest())
    both[ARRAYS] = honest().array_records[ARRAYS]
    other = packed(honest())
    other.array_records[packing.PACKED]["third"] = record[packing.OWN]
    del other.array_records[packing.PACKED][packing.OWN]
    for content in (twice, both, other):
        [got] = delivery.arrived(pieces_of(content), ["asked"], 1 << 20)
        assert got.error.code == delivery.UNREADABLE and "twice" in got.error.reason


class Several(HttpGrid):
    """Flower's grid of real nodes; a node `announces` a reply, and its pieces come when they are in `there`."""

    run: Any = SimpleNamespace(run_id=1)

    def __init__(self) -> None:
        super().__init__(token="none")
        self.announced: list[tuple[str, str, list[str]]] = []
        self.known, self.there = set[str](), dict[str, bytes]()
        self.fails, self.calls = 0, list[str]()

    def announce(self, question: str, whole: Link, but: int = 0) -> None:
        """Announce a reply of which all pieces are there, except for the first ones of those that it names."""
        root, *rest = reversed(whole.pieces)
        self.announced.append((question, root, rest))
        self.known |= whole.pieces.keys()
        self.there |= {name: whole.pieces[name] for name in (rest + [root])[but:]}

    def push_messages(self, messages: Any) -> list[str]:
        return [f"to {m.metadata.dst_node_id}" for m in messages]

    def _answer(self, request: Any) -> PullAppMessagesResponse:
        found = [a for a in self.announced if a[0] in request.message_ids]
        self.announced = [a for a in self.announced if a not in found]  # the SuperLink hands out a reply once
        heads = [Metadata(message_id=root, message_type="train", reply_to_message_id=q) for q, root, _ in found]
        trees = [
            ObjectTree(object_id=root, children=[ObjectTree(object_id=n) for n in names]) for _, root, names in found
        ]
        return PullAppMessagesResponse(
            messages_list=[ProtoMessage(metadata=head) for head in heads], message_object_trees=trees
        )

    def _piece(self, request: Any) -> PullObjectResponse:
        found = self.there.get(request.object_id)
        return PullObjectResponse(
            object_found=request.object_id in self.known, object_available=found is not None,
            object_content=found or b"",
        )  # fmt: skip

    @property
    def _runtime_client(self) -> Any:
        def failing(name: str, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def one(request: Any) -> Any:
                self.calls.append(name)
                if self.fails:
                    self.fails -= 1
                    asked = httpx.Request("POST", "http://127.0.0.1")
                    raise httpx.HTTPStatusError("locked", request=asked, response=httpx.Response(500))
                return call(request)

            return one

        calls = {"PullMessages": self._answer, "PullObject": self._piece, "ConfirmMessageReceived": lambda r: None}
        return SimpleNamespace(**{name: failing(name, call) for name, call in calls.items()})


def asked_of(grid: HttpGrid, limit: float) -> list[tuple[int, Message]]:
    """Ask clients 0 and 1 with a round limit; returns what each answered."""
    manager = NodeCohort(grid, exchange(), RoundRequest(), poll=(0.01, 0.1))
    manager.nodes = {0: 1000, 1: 1001}

    def question(batch: Any) -> Message:
        _identify(1)
        return Message(RecordDict(), manager.nodes[batch[0]], "train")

    return [(batch[0], reply) for batch, reply in manager.channel.answers([[0], [1]], question, limit, 2, 1 << 20)]


def test_a_reply_that_is_not_complete_holds_up_nobody_and_ends_with_the_round() -> None:
    grid, started = Several(), time.monotonic()
    grid.announce("to 1000", pieces_of(honest()), but=2)
    grid.announce("to 1001", pieces_of(honest(**{"train-loss": 0.75})), but=0)
    (first, good), (second, bad) = asked_of(grid, 1.0)
    assert first == 1 and isinstance(boundary.read(good, CONTRACT), Good)
    assert second == 0 and bad.error.code == delivery.INCOMPLETE and time.monotonic() - started < 3


def test_a_reply_whose_pieces_come_later_is_read_then_and_each_piece_is_pulled_once() -> None:
    grid, whole, coming = Several(), pieces_of(honest()), dict[str, delivery.Coming]()
    grid.announce("asked", whole)
    last = list(whole.pieces)[-1]
    late = grid.there.pop(last)
    for _ in range(3):
        assert delivery.arrived(grid, ["asked"], 1 << 20, coming) == [] and list(coming) == ["asked"]
    assert grid.calls.count("PullMessages") == 1, "the SuperLink does not know the question any more"
    grid.there[last] = late
    [got] = delivery.arrived(grid, ["asked"], 1 << 20, coming)
    assert isinstance(boundary.read(got, CONTRACT), Good) and not coming
    delivery.arrived(grid, ["other"], 1 << 20, coming := {"asked": delivery.Coming(got.metadata, [])})
    assert not coming, "nobody waits for it any more"


def test_what_has_come_when_the_time_is_over_still_counts() -> None:
    """The look that the limit ends with is a last one, however long the look before took."""

    class Slow(Several):
        def _answer(self, request: Any) -> PullAppMessagesResponse:
            found = super()._answer(request)
            if self.calls.count("PullMessages") == 1:
                time.sleep(0.3)
                self.announce("to 1000", pieces_of(honest()))
            return found

    assert [client for client, _ in asked_of(Slow(), 0.2)] == [0]


def test_a_superlink_that_fails_for_a_while_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower tries again where it gets no connection, and not where the answer is that the server failed."""
    monkeypatch.setattr(delivery.time, "sleep", lambda seconds: None)
    grid = Several()
    grid.announce("asked", pieces_of(honest()))
    grid.fails = 3
    [got] = delivery.arrived(grid, ["asked"], 1 << 20)
    assert isinstance(boundary.read(got, CONTRACT), Good)
    grid.announce("asked", pieces_of(honest()))
    coming: dict[str, delivery.Coming] = {}
    grid.fails, piece = 0, grid._piece

    def failing(request: Any) -> Any:
        grid.fails += 1  # for the piece after this one
        return piece(request)

    grid._piece = failing  # type: ignore[method-assign]
    assert delivery.arrived(grid, ["asked"], 1 << 20, coming) == [] and list(coming) == ["asked"]
    monkeypatch.setattr(delivery, "AGAIN", 0.0)
    grid.fails = 10
    with pytest.raises(httpx.HTTPStatusError):
        delivery.arrived(grid, ["other"], 1 << 20)


def test_a_node_that_is_still_uploading_when_the_time_is_over_did_not_answer(tmp_path: Path) -> None:
    """It holds up nobody, so that a slow line is no offence, however often."""

    def late(stage: str, sent: Message) -> Message:
        error = Error(delivery.INCOMPLETE, "a part of its reply is missing, and the time is over")
        return make_message(sent.metadata, error=error) if stage == "train" else sent

    run = federate(tmp_path / "run", [1], late, 4, method="fedamp", min_replies=0.5, rounds=5, **QUICK)
    rows = pd.read_csv(run.out / "dropped.csv")
    assert run.summary["ok"] and not run.summary.get("blocked") and list(rows["round"]) == [1, 2, 3, 4, 5]
    assert set(rows["client"]) == {1} and rows["reason"].str.contains("a part of its reply is missing").all()


def test_a_class_of_a_simulation_is_no_part_of_a_message() -> None:
    """Flower puts together the classes that it knows by name, and none of ours; nothing of a real node is unpickled."""
    whole = pieces_of(honest())
    name, piece = next((n, p) for n, p in whole.pieces.items() if p.startswith(b"Array "))
    ours = piece.replace(b"Array", records._Shared.__qualname__.encode(), 1)
    with pytest.raises(UnexpectedObjectContentError):
        validate_object_content(ours)
    whole.pieces[name] = ours
    [got] = delivery.arrived(whole, ["asked"], 1 << 20)
    assert got.error.code == delivery.UNREADABLE


def test_a_piece_that_is_said_to_occur_often_takes_no_memory() -> None:
    content = honest()
    put("head.weight", np.zeros((1 << 20) // 4, np.float32))(content)
    once, many = pieces_of(content, often(1)), pieces_of(content, often(1000))
    tracemalloc.start()
    try:
        [got] = delivery.arrived(many, ["asked"], 8 << 20)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert got.error.code == delivery.UNREADABLE and "more than 8388608 bytes" in got.error.reason and most < 8 << 20
    assert not delivery.arrived(once, ["asked"], 8 << 20)[0].has_error()
    [got] = delivery.arrived(once, ["asked"], 1 << 19)
    assert got.error.code == delivery.UNREADABLE and "its reply has more than" in got.error.reason


def test_a_reply_that_is_no_message_blocks_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that comes at a registration leaves the node out."""
    flat = from_flat({"method": "lgfedavg", "clients": 4, **{k.replace("_", "-"): v for k, v in QUICK.items()}})
    grid: Any = LocalGrid(app, flat.to_flat(), 4)
    manager = NodeCohort(grid, exchange(min_replies=0.5), RoundRequest(), lambda e: None)
    manager.gather(4)
    reply = make_message(message(honest()).metadata, error=Error(delivery.UNREADABLE, "its reply is not a message"))
    under_way = Exchange("train", 1)
    assert manager._checked(reply, CONTRACT, under_way, 0) is None
    assert 1 in manager.offences.blocked and under_way.dropped[0].reason == "its reply is not a message"
    with pytest.raises(BadRequest, match="its reply is not a message"):
        manager._registration(1001, reply)


@pytest.mark.parametrize("clients", [2, 3])
def test_no_client_says_how_much_it_may_send(clients: int) -> None:
    flat = from_flat({"method": "fedavg", "clients": clients, **{k.replace("_", "-"): v for k, v in QUICK.items()}})
    grid: Any = LocalGrid(app, flat.to_flat(), clients)
    manager = NodeCohort(grid, exchange(), RoundRequest(), lambda e: None)
    manager.gather(clients)
    before = manager._widths(range(clients))
    manager.facts[0]["width"] = 1 << 24
    assert manager._widths(range(clients)) == before


# ---- registration ----------------------------------------------------------------------------------------------------


def registration(**changes: Any) -> RecordDict:
    facts: dict[str, Any] = {
        "client": 1, "model": "digits-a", "num-classes": 10, "shape": "[1, 8, 8]", "width": 64, "common": "{}",
        "shapes": json.dumps({n: list(s) for n, s in SHAPES.items()}), "partitions": 4, "classes": "", CAST: "{}",
    }  # fmt: skip
    content = RecordDict({ARRAYS: ArrayRecord(), METRICS: MetricRecord({"num-examples": 7, "test-examples": 5})})
    content[INFO] = ConfigRecord(facts)
    stating(**changes)(content)
    return content


def stating(**changes: Any) -> Change:
    """Change what a client states when it registers; `count` are its samples, and None takes a fact away."""

    def change(content: RecordDict) -> None:
        for name, value in changes.items():
            record, key = (METRICS, "num-examples") if name == "count" else (INFO, name.replace("_", "-"))
            content[record].pop(key, None)
            if value is not None:
                content[record][key] = value

    return change


def test_an_honest_registration_passes() -> None:
    got = boundary.read_registration(message(registration()))
    assert (
        isinstance(got, Registration)
        and got.shapes == SHAPES
        and (got.client, got.num_samples, got.num_classes) == (1, 7, 10)
    )


def test_long_series_and_wide_networks_may_register() -> None:
    many = {f"features.{k}.weight": [64, 64, 3, 3] for k in range(3000)}
    large = registration(shape="[1, 80000]", width=131_072, shapes=json.dumps(many))
    assert isinstance(boundary.read_registration(message(large)), Registration)


def test_a_reply_of_another_client_is_no_other_fault() -> None:
    content = honest()
    content[INFO]["client"] = 0
    got = boundary.read(message(content), CONTRACT)
    assert isinstance(got, Refused) and got.offence == boundary.ANOTHER and "answers as client 0" in got.reason


LARGEST = [
    ("fedavg", "train", "trunk.running_var", 1e16), ("fedavg", "train", "trunk.weight", 1e8),
    ("fedavg", "train", "head.bias", 1e4), ("feddbe", "train", "dbe/mean", 1e4), ("fedpac", "train", "pac/h", 1e4),
    ("fedpac", "train", "pac/v", 1e8), ("pfedfda", "train", "gaussians/mean", 1e4), ("fedgh", "train", "lar", 1e4),
    ("fedproto", "train", "protos", 1e4), ("fd", "train", "outputs", 1e4), ("fednh", "train", "nh/proto_sum", 7e4),
    ("ccvr", "query.statistics", "statistics/mean", 1e4), ("ccvr cov=sums", "query.statistics", "statistics/sum", 7e4),
    ("ccvr cov=sums", "query.statistics", "statistics/square", 7e8), ("lda", "query.sums", "sums/b", 7e4),
    ("lda", "query.sums", "sums/a", 7e8), ("lda", "query.losses", "sums/loss", math.inf),
]  # fmt: skip


@pytest.mark.parametrize(("method", "kind", "name", "largest"), LARGEST)
def test_the_limits_of_values_follow_from_the_declaration(method: str, kind: str, name: str, largest: float) -> None:
    """The client has seven samples. An honest sum of unit vectors may be as long as their number, above 1e4 too."""
    found = registry.configured(*method.partition(" ")[::2])
    strategy = found[0].strategy(*found)
    strategy.context = context({}, num_classes=2, width=1)
    schema = strategy.reader.schema(kind, {"model": {}, "protos": np.zeros((2, 1)), "mean": 0})
    most, beyond = (largest, 2 * largest) if math.isfinite(largest) else (1e30, math.inf)
    for value, good in ((most, True), (-most, most == largest), (beyond, False), (math.nan, False)):
        contract = dataclasses.replace(CONTRACT, schema=schema)
        problem = boundary._value_problem(name, np.array([0.0, value]), contract)
        assert (problem is None) == good, problem


HELLOS: dict[str, tuple[dict[str, Any], str]] = {
    "no client": ({"client": None}, "its client is None"),
    "client -5": ({"client": -5}, "its client is -5"),
    "client 2**62": ({"client": 2**62}, "its client is"),
    "no shapes": ({"shapes": None}, "its shapes is not a text"),
    "shapes that are no JSON": ({"shapes": "{"}, "cannot be read"),
    "deep shapes": ({"shapes": "[" * 60_000}, "cannot be read"),
    "side of 2**40": ({"shapes": json.dumps({"head.bias": [2**40]})}, "its shapes are invalid"),
    "array of 2**60": ({"shapes": json.dumps({"head.bias": [2**30, 2**30]})}, "its shapes are invalid"),
    "long shapes": ({"shapes": json.dumps({"x" * 600_000: [1]})}, "not a text of at most"),
    "no width": ({"width": None}, "its width is None"),
    "width 2**40": ({"width": 2**40}, "its width is"),
    "one class": ({"num_classes": 1}, "its num-classes is 1"),
    "invalid model name": ({"model": "a b\x1b[2J"}, "is not a name"),
    "size x": ({"shape": "x"}, "cannot be read"),
    "no size": ({"shape": "[0, 8, 8]"}, "its sample shape [0, 8, 8] is invalid"),
    "count list": ({"count": [1]}, "its num-examples is [1]"),
    "count inf": ({"count": math.inf}, "its num-examples is inf"),
    "count 1e18": ({"count": 10**18}, "its num-examples is"),
    "partitions -1": ({"partitions": -1}, "its partitions is -1"),
    "common list": ({"common": json.dumps({"a": [1]})}, "common facts"),
    "largest feature nan": ({"largest_feature": math.nan}, "its largest-feature is nan"),
    "largest feature -1": ({"largest_feature": -1.0}, "its largest-feature is -1.0"),
    "largest feature text": ({"largest_feature": "1"}, "its largest-feature is 1, a number"),
}
"""What no client of ours states about itself, with a part of the reason."""


@pytest.mark.parametrize("what", HELLOS)
def test_a_hostile_registration_is_refused(what: str) -> None:
    changes, reason = HELLOS[what]
    got = boundary.read_registration(message(registration(**changes)))
    assert isinstance(got, Refused) and got.offence == IMPOSSIBLE and reason in got.reason, got


# ---- whole runs ------------------------------------------------------------------------------------------------------


Bits = tuple[str, dict[str, bytes]]


def answer(change: Change, to: str = "train") -> Lie:
    def lie(kind: str, reply: Message) -> Message:
        if kind == to:
            change(reply.content)
        return reply

    return lie


def final_bits(out: Path) -> Bits:
    """Return all scores but those of client 1, and the arrays of the last state and of the model that is kept."""
    names = [n for n in ("rounds.csv", "evaluations.csv", "clients.csv", "final.csv") if (out / n).is_file()]
    rows = pd.concat([pd.read_csv(out / name, dtype=str) for name in names])
    rows = rows[rows["client"] != "1"][[c for c in rows if not c.endswith(("seconds", "_down", "dropped"))]]
    found = checkpoint.latest(out / "checkpoint")
    assert found is not None
    arrays, model = dict(checkpoint.flatten(found[1])[0]), out / "models" / "last.safetensors"
    if model.is_file():
        arrays |= {f"kept/{name}": array for name, array in read_safetensors(model)[0].items()}
    return rows.to_csv(index=False), {name: array.tobytes() for name, array in arrays.items()}


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Bits:
    """What a run leaves in which client 1 fails."""
    out = tmp_path_factory.mktemp("silent") / "run"
    run = federate(out, [1], answer(info("error", "ValueError: boom")), 4, method="lgfedavg", min_replies=0.5, **QUICK)
    assert run.summary["ok"] and run.summary["dropped"] == 1
    return final_bits(out)


SOME = ("deep cast", "total list", "3e38", "count 1e18", "error with a stage")
WHOLE = [what for table in GRADES.values() for what in table if what != "correct one too many"]
"""That client 1 has 6 of its test images right may be true in a run."""


@pytest.mark.parametrize("what", [w if w in SOME else pytest.param(w, marks=pytest.mark.full) for w in WHOLE])
def test_a_liar_changes_nothing_for_the_honest_ones(what: str, silent: Bits, tmp_path: Path) -> None:
    """Whatever is refused, the result equals bit for bit that of a run in which the client fails."""
    change = next(table[what][0] for table in GRADES.values() if what in table)
    run = federate(tmp_path / "run", [1], answer(change), 4, method="lgfedavg", min_replies=0.5, **QUICK)
    assert run.summary["ok"] and run.summary["dropped"] == 1
    assert final_bits(run.out) == silent


def one_too_many(content: RecordDict) -> None:
    """State one hit more than there are test images."""
    content[METRICS]["received-correct"] = int(content[METRICS]["received-total"]) + 1


@pytest.mark.parametrize("value", [1e5, 6.5e4, None])
def test_half_precision_and_hits_of_a_liar_change_nothing_for_the_honest_ones(
    value: float | None, tmp_path: Path
) -> None:
    """Infinity and 65,000 in half precision, and more hits than test images, beside a run in which the client fails."""
    with np.errstate(over="ignore"):
        narrow = put("head.bias", np.full(10, value or 0).astype(np.float16))
    changes = {"lie": narrow if value else one_too_many, "silent": info("error", "ValueError: boom")}
    wire = {"wire_dtype": "fp16" if value else "fp32"}
    left = {}
    for name, change in changes.items():
        run = federate(
            tmp_path / name, [1], answer(change), 4, method="lgfedavg", min_replies=0.5, rounds=2, **wire, **QUICK
        )
        assert run.summary["ok"] and run.summary["dropped"] == 2
        left[name] = final_bits(run.out)
    assert left["lie"] == left["silent"]


def test_the_smallest_numbers_that_there_are_count_as_zero(tmp_path: Path) -> None:
    """They are accepted, and move no bit of what the others get."""
    left = []
    for value in (1e-45, 0.0):
        change = put("head.bias", np.full(10, value, np.float32))
        run = federate(tmp_path / str(value), [1], answer(change), 4, method="lgfedavg", rounds=2, **QUICK)
        assert run.summary["ok"] and not run.summary["dropped"]
        left.append(final_bits(run.out))
    assert left[0] == left[1]


def test_a_message_to_a_node_says_how_much_its_reply_can_have(tmp_path: Path) -> None:
    """With heads of 650 numbers: nothing beside them and what every reply holds; in a simulation nobody asks."""
    seen: dict[str, set[str]] = {}

    def note(kind: str, reply: Message) -> Message:
        seen.setdefault(kind, set()).add(reply.metadata.group_id)
        return reply

    federate(tmp_path / "nodes", [0], note, 2, nodes=True, method="lgfedavg", **QUICK)
    facts = boundary.FACTS_SIZE
    assert seen["query.register"] == {f"0 {facts}"} and seen["train"] == {f"1 {facts + 4 * 650}"}
    assert all(facts <= records.most_of(group) <= facts + 4 * 650 for of in seen.values() for group in of)
    seen.clear()
    federate(tmp_path / "gh", [0], note, 2, nodes=True, method="fedgh", **QUICK)
    assert records.most_of(*seen["train"]) > validation.EXTRA_BYTES, "of which the server knows less"
    seen.clear()
    federate(tmp_path / "simulation", [0], note, 2, method="lgfedavg", **QUICK)
    assert seen["train"] == {"1"}


def registered(out: Path, change: Change | None, **settings: Any) -> tuple[RunResult, list[str]]:
    """Run on real nodes, of which node 1001 changes what it states (None: it states nothing); with the warnings."""

    def lie(kind: str, reply: Message) -> Message | None:
        return reply if change or kind != "query.register" else None

    of = {"method": "lgfedavg", "rounds": 2, "wait_timeout": 1.0, **QUICK, **settings}
    run = federate(out, [1], answer(change, "query.register") if change else lie, 4, nodes=True, **of)
    events = map(json.loads, (out / "progress.jsonl").read_text(encoding="utf-8").splitlines())
    return run, [e["text"] for e in events if e["kind"] == "warning"]


@pytest.fixture(scope="module")
def unregistered(tmp_path_factory: pytest.TempPathFactory) -> Bits:
    """What a run leaves in which node 1001 never answers its request to register."""
    run, warned = registered(tmp_path_factory.mktemp("unregistered") / "run", None)
    assert run.summary["ok"] and run.summary["clients"] == 3 and "have not answered" in " ".join(warned)
    assert any("there is no roster" in text for text in warned)
    return final_bits(run.out)


LEFT_OUT: dict[str, tuple[dict[str, Any], str]] = {
    **HELLOS,
    "id of another": ({"client": 0}, "two nodes are client 0, of which 1001 came second"),
    "7 classes": ({"num_classes": 7}, "client 1 has 7 classes, but client 0 has 10"),
    "other shapes": ({"shapes": json.dumps({"head.bias": [10]})}, "'head.weight' is shared but client 0"),
    "other width": ({"width": 65}, "client 0 and client 1 have widths [64, 65]"),
    "error": ({"error": "ValueError: boom"}, "client 1 cannot take part: ValueError: boom"),
}
"""And what the others do not agree with. Without a roster, an id belongs to the node that comes first."""


@pytest.mark.parametrize(
    "what", [w if w in ("no shapes", "7 classes") else pytest.param(w, marks=pytest.mark.full) for w in LEFT_OUT]
)
def test_a_hostile_node_is_left_out_as_if_it_had_never_registered(
    what: str, unregistered: Bits, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(nodes, "LATECOMERS", 0.1)
    changes, reason = LEFT_OUT[what]
    run, warned = registered(tmp_path / "run", stating(**changes))
    assert run.summary["ok"] and run.summary["clients"] == 3 and run.summary["dropped"] == 0
    [named] = {text for text in warned if "left out" in text}
    assert reason in named and final_bits(run.out) == unregistered
    assert len(run.summary["left_out"]) == 1 and reason in run.summary["left_out"][0]


@pytest.mark.full
@pytest.mark.parametrize(
    "changes", [{"model": "zork"}, {"shape": "[3, 8, 8]"}, {"partitions": 1}, {"partitions": 1000}], ids=str
)
def test_a_false_fact_that_nothing_depends_on_changes_nothing(changes: dict[str, Any], tmp_path: Path) -> None:
    """LG-FedAvg takes any model that has the common head, and how many shares there are is the median's word."""
    true, _ = registered(tmp_path / "true", stating())
    false, warned = registered(tmp_path / "false", stating(**changes))
    assert false.summary["clients"] == 4 and not any("left out" in text for text in warned)
    assert final_bits(false.out) == final_bits(true.out)


def test_one_of_two_clients_does_not_let_the_others_be_waited_for_in_vain(tmp_path: Path) -> None:
    of = {"nodes": True, "method": "lgfedavg", "wait_timeout": 1.0, **QUICK}
    run = federate(tmp_path / "run", [1], answer(stating(partitions=1_000_000), "query.register"), 2, **of)
    assert run.summary["ok"] and run.summary["clients"] == 2 and "left_out" not in run.summary


@pytest.mark.full
@pytest.mark.parametrize("method", ["lgfedavg", "local"])
@pytest.mark.parametrize("clients", [2, 5])
def test_no_client_decides_pooled_scores_by_a_test_set_that_it_made_up(
    clients: int, method: str, tmp_path: Path
) -> None:
    """It counts for 10 times the median on real nodes; local training has no weights that a cap could be for."""

    def lie(kind: str, reply: Message) -> Message:
        metrics = reply.content[METRICS]
        if kind == "query.register":
            metrics["test-examples"] = 1_000_000_000
        elif "received-total" in metrics:
            metrics["received-total"], metrics["received-correct"] = 1_000_000_000, 0
        return reply

    of = {"method": method, "rounds": 2, "evaluate_every": 1, **QUICK}
    run = federate(tmp_path / "run", [1], lie, clients, nodes=True, **of)
    honest = run.final[run.final["client"] != 1]
    total = honest["received_total"].sum()
    cap = 10 * sorted([*honest["received_total"], 1e9])[(clients - 1) // 2]
    expected = pytest.approx(honest["received_correct"].sum() / (total + cap))
    assert run.summary["pooled"]["received"] == expected
    assert run.curve("received")["pooled"].iloc[-1] == expected
    assert run.evaluations["received_accuracy_pooled"][0] > 0.01 < run.rounds["received_accuracy_pooled"][1]


SEVERAL = "digits-a,digits-b,digits-c"


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "model", "clients", "name", "left"),
    [
        ("lgfedavg", "auto", 5, "alexnet", 5),
        ("fedgh", "auto", 5, "alexnet", 5),
        ("fd", "auto", 5, "resnet18", 4),
        ("fedclassavg", SEVERAL, 3, "alexnet", 3),
        ("lgfedavg", SEVERAL, 3, "resnet18", 2),
    ],
)
def test_a_client_that_names_another_model_ends_no_run(
    method: str, model: str, clients: int, name: str, left: int, tmp_path: Path
) -> None:
    """AlexNet has another head than the others' models, and images of digits are too small for ResNet-18."""
    of = {"method": method, "model": model, "min_replies": 0.5, "wait_timeout": 1.0, **QUICK}
    lie = answer(stating(model=name), "query.register")
    run = federate(tmp_path / "run", [0], lie, clients, nodes=True, **of)
    assert run.summary["clients"] == left
    if left == clients:
        true = federate(tmp_path / "true", [], lie, clients, nodes=True, **of)
        assert final_bits(run.out) == final_bits(true.out)
    else:
        told = (run.out / "progress.jsonl").read_text(encoding="utf-8")
        assert "client 0 cannot have the model that it names: model 'resnet18' is made for" in told


def test_a_shape_that_one_client_states_makes_no_large_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients of unlike shapes are no majority: the smaller model is tried first, and a larger one has a limit."""
    of = {"method": "fd", "min_replies": 0.5, "wait_timeout": 1.0, **QUICK}
    lie = answer(stating(shape="[300000000]", model="mlp"), "query.register")
    made: list[int] = []
    draw = torch.nn.init.kaiming_uniform_
    monkeypatch.setattr(
        torch.nn.init, "kaiming_uniform_", lambda tensor, **k: (made.append(tensor.numel()), draw(tensor, **k))
    )
    assert federate(tmp_path / "run", [0], lie, 2, nodes=True, **of).summary["ok"]
    monkeypatch.setattr(NodeCohort, "most_numbers", 100)
    with pytest.raises(ValueError, match="is too large"):
        federate(tmp_path / "small", [], lie, 2, nodes=True, **of)
    assert max(made) < 1 << 24


@pytest.mark.full
def test_a_model_of_another_name_is_left_out_where_all_need_one(tmp_path: Path) -> None:
    silent, _ = registered(tmp_path / "silent", None, method="fedavg")
    run, warned = registered(tmp_path / "run", stating(model="zork"), method="fedavg")
    [named] = {text for text in warned if "left out" in text}
    assert "fedavg needs one architecture, but client 1 has zork" in named
    assert final_bits(run.out) == final_bits(silent.out)


@pytest.mark.full
def test_with_a_roster_nobody_takes_the_id_of_a_client_that_comes_later(
    unregistered: Bits, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without one it would, and that client would be left out in its place."""
    monkeypatch.setattr(nodes, "LATECOMERS", 0.1)
    monkeypatch.setenv(roster.ROSTER, str(tmp_path / "roster.toml"))
    for client in range(4):
        roster.add(tmp_path / "roster.toml", roster.Admitted(client, FIRST_NODE + client, ""))
    run, warned = registered(tmp_path / "run", stating(client=2))
    [named] = {text for text in warned if "left out" in text}
    assert "registers as client 2, but the roster has it as client 1" in named
    assert not any("there is no roster" in text for text in warned)
    assert final_bits(run.out) == unregistered


def test_a_hostile_registration_is_left_out_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """On real nodes; in a simulation, where one client is asked in the place of many, it ends the run."""
    monkeypatch.setattr(nodes, "LATECOMERS", 0.2)

    def lying(message: Message, context: Context) -> Message:
        reply = app(message, context)
        if context.node_config["partition-id"] == 1:
            reply.content[INFO]["shapes"] = "{"
        return reply

    flat = from_flat({"method": "lgfedavg", "clients": 4, **{k.replace("_", "-"): v for k, v in QUICK.items()}})
    events: list[dict[str, Any]] = []
    grid: Any = LocalGrid(lying, flat.to_flat(), 4)  # type: ignore[arg-type]
    manager = NodeCohort(grid, exchange(min_replies=0.5), RoundRequest(), events.append)
    assert [i.client for i in manager.gather(4)] == [0, 2, 3]
    assert any("left out" in e.get("text", "") for e in events)
    strict = NodeCohort(grid, exchange(wait_timeout=0.5), RoundRequest(), events.append)
    with pytest.raises(BadRequest, match="cannot take part"):
        strict.gather(4)
    queued = VirtualCohort(grid, exchange(), RoundRequest(), events.append)
    with pytest.raises(BadRequest, match=r"node 1001 cannot take part: .* be read"):
        queued.enrol([Member(1, 9, 3, "digits-a")])
