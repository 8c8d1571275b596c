"""Messages in few pieces: what is packed comes out as it was, and equal arrays of several messages travel once."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from flwr.app import Array as FlowerArray
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedapp.client_app import App
from fedapp.method import Payload
from fedapp.transport.local_grid import _identify
from fedapp.transport.packing import ALIGNED, OWN, PACKED, SHARED, apart, pack, unpack
from fedapp.transport.records import REQUEST, Encoder, payload_of
from fedapp.transport.request import RoundRequest

rng = np.random.default_rng(0)
MODEL = {f"layer{i}.weight": rng.standard_normal((i + 1, 3)).astype(np.float32) for i in range(20)}
SHARE = {"share": 0.5}


def messages(
    *own: dict[str, np.ndarray], common: Any = MODEL, scalars: Any = SHARE, wire_dtype: str = "fp32"
) -> list[Message]:
    _identify(1)
    encoder = Encoder(wire_dtype)
    payloads = [Payload(arrays=arrays, common=common, scalars=scalars) for arrays in own]
    return [Message(encoder.content(p, RoundRequest(round=3))[0], n, "train") for n, p in enumerate(payloads)]


@pytest.mark.parametrize("wire_dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("own", [{}, {"target": np.arange(5.0), "empty": np.zeros((0, 4), np.float32)}])
def test_what_is_packed_comes_out_as_it_was(own: dict[str, np.ndarray], wire_dtype: str) -> None:
    plain, sent = messages(own, {}, wire_dtype=wire_dtype), messages(own, {}, wire_dtype=wire_dtype)
    pack(sent)
    assert all(set(m.content.array_records) == {PACKED} for m in sent)
    for before, after in zip(plain, sent, strict=True):
        assert unpack(after.content) and set(after.content.array_records) == set(before.content.array_records)
        (one, request), (other, also) = payload_of(before), payload_of(after)
        assert request == also and one.scalars == other.scalars and list(one.arrays) == list(other.arrays)
        for name, array in one.arrays.items():
            assert array.dtype == other.arrays[name].dtype and array.shape == other.arrays[name].shape
            assert np.array_equal(array, other.arrays[name]) and other.arrays[name].flags.writeable


def test_arrays_of_several_messages_are_one_pack_and_those_of_one_another() -> None:
    sent = messages({"target": np.ones(2)}, {"target": np.zeros(2)}, {})
    pack(sent)
    first, second, third = (m.content.array_records[PACKED] for m in sent)
    assert first[SHARED] is second[SHARED] is third[SHARED] and OWN not in third
    assert list(apart(first[SHARED])) == list(MODEL) and list(apart(first[OWN])) == ["target"]
    assert first[OWN].data != second[OWN].data


def test_numbers_lie_where_numpy_would_have_them() -> None:
    [alone] = messages({})
    pack([alone])
    [whole] = alone.content.array_records[PACKED].values()
    for array in apart(whole).values():
        offset = whole.data.find(bytes(array.data))
        assert offset % ALIGNED == 0 and array.data.obj is whole.data, "not a copy"  # type: ignore[attr-defined]


def test_arrays_do_not_overlap() -> None:
    """The lengths add up, but the second array would begin where the first one ends and end where it begins."""
    lengths = {"a": 128, "b": -128, "c": 128}
    index = json.dumps({n: ["float32", [16], "numpy.ndarray", length] for n, length in lengths.items()}).encode()
    head = len(index).to_bytes(8, "big") + index
    data = head + bytes(-len(head) % ALIGNED) + bytes(128)
    with pytest.raises(ValueError, match="something else"):
        apart(FlowerArray("uint8", (len(data),), "fedapp.pack", data))


def test_a_message_of_a_hundred_arrays_is_as_many_pieces_as_one_of_one() -> None:
    many = messages({}, common={f"a{i}": np.full(3, i, np.float32) for i in range(100)})
    one = messages({}, common={"a": np.ones(3, np.float32)})
    before = len(get_all_nested_objects(many[0]))
    pack(many)
    pack(one)
    assert len(get_all_nested_objects(many[0])) == len(get_all_nested_objects(one[0])) == 7 < before // 20
    [bare] = messages({}, common={}, scalars={})
    pack([bare])
    assert len(get_all_nested_objects(bare)) == 4, "no piece for a record without content, but for the mark"


def test_a_message_without_arrays_is_marked_and_an_error_stays_one() -> None:
    [empty] = messages({}, common={})
    failed = Message(Error(8, "boom"), reply_to=empty)
    pack([empty, failed])
    assert failed.error.reason == "boom" and unpack(empty.content) and not unpack(empty.content)
    assert not empty.content.array_records and empty.content.config_records[REQUEST]["round"] == 3


def test_a_node_answers_in_the_form_in_which_it_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []

    def answer(app: App, message: Message, context: Any) -> Message:
        seen.append(set(message.content.array_records))
        return Message(message.content, reply_to=message)

    monkeypatch.setattr(ClientApp, "__call__", answer)
    [plain], [sent], node = messages({}), messages({}), Context(1, 1, {}, RecordDict(), {})
    pack([sent])
    for message, form in ((plain, "arrays"), (sent, PACKED)):
        assert set(App()(message, node).content.array_records) == {form}
    assert seen == [{"arrays"}, {"arrays"}]


def test_an_index_that_would_fill_the_memory_is_neither_read_nor_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON of empty lists takes twenty times its size."""
    index = b"[" + b"[]," * (1 << 19) + b"[]]"
    data = len(index).to_bytes(8, "big") + index
    with pytest.raises(ValueError, match=f"has {len(index)} bytes, at most {1 << 20}"):
        apart(FlowerArray("uint8", (len(data),), "fedapp.pack", data))
    monkeypatch.setattr("fedapp.transport.packing.INDEX", 100)
    [many], [few] = messages({}), messages({}, common={"a": np.ones(2, np.float32)})
    pack([many, few])
    assert set(many.content.array_records) == {"arrays"} and set(few.content.array_records) == {PACKED}
