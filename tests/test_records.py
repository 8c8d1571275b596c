"""Named arrays and numbers to and from Flower's records."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Message, RecordDict

from fedapp.method import Payload
from fedapp.transport.local_grid import LocalGrid
from fedapp.transport.records import Encoder, payload_of, reject, reply_content, reply_of


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
    content, size = Encoder(wire).content(Payload(arrays=arrays, scalars={"k": True, "n": 2}), {"round": 3})
    message.content = content
    payload, control = payload_of(message)
    assert control == {"round": 3} and payload.scalars == {"k": True, "n": 2}
    for name, a in arrays.items():
        b = payload.arrays[name]
        assert b.dtype == a.dtype and b.shape == a.shape
        assert np.allclose(a, b, atol=1e-3 if wire == "fp16" and a.dtype == np.float32 else 0)
    assert size == (12 if wire == "fp16" else 24) + 32 + 8 + 2


def test_common_arrays_are_encoded_once() -> None:
    encoder = Encoder()
    shared = {"w": np.ones(1000, np.float32)}
    one, _ = encoder.content(Payload(common=shared), {})
    two, _ = encoder.content(Payload(common=shared, arrays={"own": np.zeros(2)}), {})
    assert one.array_records["arrays"]["w"].data is two.array_records["arrays"]["w"].data


def test_replies_carry_lists_and_numpy_numbers(message: Message) -> None:
    metrics = {"a": np.float32(1.5), "b": [1, 2], "c": np.array([0.5, 1.0]), "num-examples": np.int64(7), "e": []}
    reply = Message(reply_content({"x": np.ones(2, np.float32)}, metrics, {"client": 4}, "fp16"), reply_to=message)
    arrays, got, info, size = reply_of(reply)
    assert arrays["x"].dtype == np.float32 and size == 4
    assert got == {"a": 1.5, "b": [1, 2], "c": [0.5, 1.0], "num-examples": 7, "e": []} and info == {"client": 4}


def test_a_good_reply_is_not_rejected() -> None:
    assert reject({"w": np.ones(3, np.float32)}, {"w": (3,)}, {"num-examples": 1}) is None


ONES = np.ones(3, np.float32)


@pytest.mark.parametrize(
    ("arrays", "metrics", "message"),
    [
        ({}, {"num-examples": 1}, "arrays missing: w"),
        ({"w": np.ones(4, np.float32)}, {"num-examples": 1}, r"'w' has shape (4,), expected (3,)"),
        ({"w": np.ones(3, np.int64)}, {"num-examples": 1}, "'w' has dtype int64, expected a floating-point one"),
        ({"w": ONES * np.nan}, {"num-examples": 1}, "'w' contains NaN or infinity"),
        ({"w": ONES, "more": ONES * np.inf}, {"num-examples": 1}, "'more' contains NaN or infinity"),
        ({"w": ONES}, {"num-examples": 0}, "num-examples is 0"),
        ({"w": ONES}, {"num-examples": -1}, "num-examples is -1"),
        ({"w": ONES}, {"num-examples": float("inf")}, "num-examples is inf"),
        ({"w": ONES}, {}, "num-examples is None"),
    ],
)
def test_a_bad_reply_is_rejected_with_a_reason(arrays, metrics, message) -> None:  # type: ignore[no-untyped-def]
    reason = reject(arrays, {"w": (3,)}, metrics)
    assert reason is not None and message in reason
