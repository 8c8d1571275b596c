"""Named arrays and numbers to and from Flower's records."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.app import Array as FlowerArray
from flwr.app import Message, RecordDict

from fedapp.errors import BadRequest
from fedapp.method import Payload
from fedapp.reduce.reader import Schema
from fedapp.transport.boundary import DTYPES, Contract, Good, decoded_problem, read
from fedapp.transport.local_grid import LocalGrid
from fedapp.transport.records import (
    Encoder,
    Part,
    Records,
    decoded,
    encoded,
    payload_of,
    reply_of,
    reply_records,
    sealed,
)
from fedapp.transport.request import RoundRequest
from tests import handmade


@pytest.fixture
def message() -> Message:
    from flwr.clientapp import ClientApp

    LocalGrid(ClientApp(), {}, 1)
    return Message(RecordDict(), 1000, "train")


@pytest.mark.parametrize("wire", ["fp32", "fp16"])
def test_arrays_travel_with_names_shapes_and_dtypes(wire: str, message: Message) -> None:
    arrays = {
        "a": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3).T,
        "b": np.arange(4),
        "c": np.array(3.5, np.float64),
        "d": np.zeros((0, 5), np.float32),
        "e": np.array([True, False]),
    }
    content, size = Encoder(wire).content(Payload(arrays=arrays, scalars={"k": True, "n": 2}), RoundRequest(round=3))
    message.content = content
    payload, request = payload_of(message)
    assert request == RoundRequest(round=3) and payload.scalars == {"k": True, "n": 2}
    for name, a in arrays.items():
        b = payload.arrays[name]
        assert b.dtype == a.dtype and b.shape == a.shape
        assert np.allclose(a, b, atol=1e-3 if wire == "fp16" and a.dtype == np.float32 else 0)
    assert size == (12 if wire == "fp16" else 24) + 32 + 8 + 2


ARRAYS = [
    np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3).T, np.arange(4), np.array(3.5), np.zeros((0, 5), np.float32),
    np.array([True, False]), np.ones((3, 2), np.float16),
]  # fmt: skip


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}{a.shape}")
def test_an_array_is_sent_as_flower_sends_it(array: np.ndarray) -> None:
    ours, flowers = encoded(array, "fp32"), FlowerArray(np.ascontiguousarray(array).reshape(array.shape))
    assert type(ours) is FlowerArray, "the name of the class is part of a message to a real node"
    assert (ours.dtype, ours.shape, ours.stype, ours.data) == (
        flowers.dtype, flowers.shape, flowers.stype, flowers.data
    )  # fmt: skip


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}{a.shape}")
def test_within_a_simulation_the_numbers_are_copied_once_into_shared_memory(array: np.ndarray) -> None:
    """As Ray does it: the pickle has no numbers, and what is read back lies in the buffers that were given."""
    [own, common] = (
        Encoder(shared=True).content(p, RoundRequest())[0] for p in (Payload({"x": array}), Payload({}, {"x": array}))
    )
    for sent in (own, common):
        travels(array, sent)


def travels(array: np.ndarray, sent: RecordDict) -> None:
    apart: list[pickle.PickleBuffer] = []
    text = pickle.dumps(sent, protocol=5, buffer_callback=apart.append)
    assert b"records" not in text.replace(b"array_records", b""), "a worker reads it before it knows where fedapp is"
    [there] = [bytearray(b.raw()) for b in apart]
    assert len(there) > array.nbytes and (array.nbytes < 4 or array.tobytes("C") not in text)
    record = pickle.loads(text, buffers=[there]).array_records["arrays"]
    view, copied = decoded(record["x"], checked=True), decoded(record["x"])
    for found in (view, copied):
        assert (found.dtype, found.shape) == (array.dtype, array.shape) and np.array_equal(found, array)
    if array.size:
        there[-array.nbytes :] = bytes(array.nbytes)
        assert not view.any() and np.array_equal(copied, array)
    copied += copied.dtype.type(1)
    assert np.array_equal(copy.deepcopy(sent)["arrays"]["x"].numpy(), array), "also where nothing is shared"
    assert np.array_equal(pickle.loads(pickle.dumps(sent, protocol=5))["arrays"]["x"].numpy(), array)


class Store:
    """Stands for Ray, whose store pickles of a message refer to."""

    kept: ClassVar[list[np.ndarray]] = []

    @staticmethod
    def is_initialized() -> bool:
        return True

    @classmethod
    def put(cls, array: np.ndarray) -> int:
        cls.kept.append(array.copy())
        return len(cls.kept) - 1

    @staticmethod
    def get(reference: int) -> np.ndarray:
        return Store.kept[reference]


def test_ray_stores_once_what_several_messages_have_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", Store)
    monkeypatch.setattr(Store, "kept", [])
    encoder, common = Encoder(shared=True), {"w": np.arange(9, dtype=np.float32)}
    for c in (1, 2):
        content, _ = encoder.content(Payload({"own": np.full(3, c)}, common), RoundRequest())
        apart: list[pickle.PickleBuffer] = []
        text = pickle.dumps(content, protocol=5, buffer_callback=apart.append)
        assert b"fedapp" not in text.replace(b"tests.test_records", b"") and common["w"].tobytes() not in text
        record = pickle.loads(text, buffers=apart)["arrays"]
        assert len(apart) == 1, "the client's own array"
        found = {name: decoded(array, checked=True) for name, array in record.items()}
        assert handmade.equal(found, {"own": np.full(3, c), **common}) and len(Store.kept) == 1
        assert np.shares_memory(found["w"], Store.kept[0])
    monkeypatch.setattr(Store, "is_initialized", lambda: False)
    content, _ = Encoder(shared=True).content(Payload({}, {"x": common["w"]}), RoundRequest())
    travels(common["w"], content)


@pytest.mark.parametrize("wire", ["fp32", "fp16"])
@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}{a.shape}")
def test_a_worker_sends_its_arrays_from_where_they_are(array: np.ndarray, wire: str) -> None:
    """Ray copies them once; the server's checks take them without a header, and nobody can write them."""
    records = reply_records({"x": array}, {"num-examples": 1}, {"client": 1}, wire, lend=True)
    apart: list[pickle.PickleBuffer] = []
    text = pickle.dumps(sealed(records), protocol=5, buffer_callback=apart.append)
    if wire == "fp32" and array.flags.c_contiguous and array.size:
        assert np.shares_memory(np.frombuffer(apart[0], np.uint8), array)
    content = pickle.loads(text, buffers=[memoryview(bytes(b.raw())) for b in apart])
    reply = Part(Records(content.array_records, content.metric_records, content.config_records))
    found = reply_of(reply)[0]["x"]
    assert found.dtype == array.dtype and np.allclose(found, array, atol=1e-3)
    if str(array.dtype) in DTYPES:
        good = read(reply, Contract(1, "train", Schema(further=("x",)), 1000, 1, wire))
        assert isinstance(good, Good) and np.array_equal(good.arrays["x"], found)
    assert memoryview(records.array_records["arrays"]["x"].data).readonly


def test_objects_of_python_are_not_sent() -> None:
    for lend in (False, True):
        with pytest.raises(TypeError, match="objects"):
            encoded(np.array([{}]), "fp32", lend=lend)


def test_the_arrays_of_a_reply_cannot_be_written(message: Message) -> None:
    """The server's functions change no argument, and what they get lies where the message has it."""
    content = sealed(reply_records({"x": np.ones(3, np.float32)}, {"num-examples": 1}, {}, "fp32"))
    reply = Message(content, reply_to=message)
    arrays, *_ = reply_of(reply)
    with pytest.raises(ValueError, match="read-only"):
        arrays["x"] += 1
    # The record keeps its bytes: they are where the array is.
    held = np.frombuffer(content.array_records["arrays"]["x"].data, np.uint8)
    assert np.shares_memory(arrays["x"], held)


def test_common_arrays_are_encoded_once() -> None:
    encoder = Encoder()
    shared = {"w": np.ones(1000, np.float32)}
    one, _ = encoder.content(Payload(common=shared), RoundRequest())
    two, _ = encoder.content(Payload(common=shared, arrays={"own": np.zeros(2)}), RoundRequest())
    assert one.array_records["arrays"]["w"].data is two.array_records["arrays"]["w"].data


@pytest.mark.parametrize("fact", [np.float32(1), np.int64(1), None, (1, 2), [1]])
def test_a_fact_that_no_message_can_hold_is_named(fact: Any) -> None:
    with pytest.raises(TypeError, match="the fact 'mine' is a"):
        reply_records({}, {"num-examples": 1}, {"mine": fact}, "fp32")


def test_replies_carry_lists_and_numpy_numbers(message: Message) -> None:
    metrics = {"a": np.float32(1.5), "b": [1, 2], "c": np.array([0.5, 1.0]), "num-examples": np.int64(7), "e": []}
    reply = Message(
        sealed(reply_records({"x": np.ones(2, np.float32)}, metrics, {"client": 4}, "fp16")), reply_to=message
    )
    arrays, got, info, size = reply_of(reply)
    assert arrays["x"].dtype == np.float32 and size == 4
    assert got == {"a": 1.5, "b": [1, 2], "c": [0.5, 1.0], "num-examples": 7, "e": []} and info == {"client": 4}


def refused(arrays: dict[str, np.ndarray], count: int = 1) -> str | None:
    schema = Schema(shapes={"w": (3,)}, further=("more", "head.weight"))
    return decoded_problem(arrays, Contract(1, "train", schema, 1000, count))


def test_a_good_reply_is_not_rejected() -> None:
    assert refused({"w": np.ones(3, np.float32)}) is None


ONES = np.ones(3, np.float32)


@pytest.mark.parametrize(
    ("arrays", "count", "message"),
    [
        ({}, 1, "arrays missing: w"),
        ({"w": np.ones(4, np.float32)}, 1, r"'w' has shape (4,), expected (3,)"),
        ({"w": np.ones(3, np.int64)}, 1, "'w' has dtype int64, expected float32"),
        ({"w": ONES, "more": np.ones(1, np.complex64)}, 1, "'more' has dtype complex64"),
        ({"w": ONES * np.nan}, 1, "'w' contains NaN or infinity"),
        ({"w": ONES, "more": ONES * np.inf}, 1, "'more' contains NaN or infinity"),
        ({"w": ONES, "head.weight": 2e4 * ONES}, 1, "'head.weight' holds values from 20000 to 20000"),
        ({"w": ONES}, 0, "num-examples is 0"),
        ({"w": ONES}, -1, "num-examples is -1"),
        ({"w": ONES}, 10**12, "num-examples is 1000000000000"),
    ],
)
def test_a_bad_reply_is_rejected_with_a_reason(arrays: dict[str, np.ndarray], count: int, message: str) -> None:
    assert str(refused(arrays, count)).startswith(message)


def test_a_request_travels_in_one_form_and_nothing_else_is_read() -> None:
    given = RoundRequest("abcd", 3, client=0, state="ff", state_binds=False, tune=False, unseen=True)
    content, _ = Encoder().content(Payload(), given)
    assert payload_of(Message(content, 1, "train"))[1] == given
    assert RoundRequest().record() == {} and RoundRequest.of({}) == RoundRequest()
    for record in ({"round": "3"}, {"round": True}, {"final": 1}, {"state-dir": "x"}, {"keep": 1.0}):
        with pytest.raises(BadRequest, match=f"{next(iter(record))} = .*one version of fedapp"):
            RoundRequest.of(record)
