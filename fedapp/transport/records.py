"""Named numpy arrays to and from Flower's records; the record says which arrays were sent in half precision."""

from __future__ import annotations

import copyreg
import io
import json
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedapp.method import Array, Arrays, Payload, Scalar
from fedapp.transport.request import RoundRequest

ARRAYS, SCALARS, REQUEST, METRICS, INFO = "arrays", "scalars", "request", "metrics", "info"
CAST = "cast"
OF = "@"
"""Stands between the name of a record of arrays and the id of the client that it belongs to, in messages to several."""
PARTS = "parts"
"""Name of the record, and of its one value, that holds all else of the clients that share a message, as JSON."""


def group_of(server_round: int, most: int = 0) -> str:
    """Return the group of a message: its round and, for real nodes, how many bytes its reply can have.

    The listener of :mod:`fedapp.deployment.gate` reads it, so that a node cannot send more.
    """
    return f"{server_round} {most}" if most else str(server_round)


def most_of(group: str) -> int:
    """Return how many bytes the reply to a message can have, or 0 where its group does not say it."""
    most = group.partition(" ")[2]
    return int(most) if most.isascii() and most.isdigit() and len(most) < 19 else 0


class _Shared(FlowerArray):
    """An array in a message within a simulation, which Ray copies once, into memory that all processes map.

    Ray does so with a `PickleBuffer` alone; bytes it copies three times. The receiver gets Flower's own class, with the
    mapped memory instead of the bytes. On real nodes the name of the class would be part of the message.
    """

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if int(protocol) < 5:  # such as that of copy.deepcopy
            return super().__reduce_ex__(protocol)
        found = {"dtype": self.dtype, "shape": self.shape, "stype": self.stype, "data": self._mapped()}
        # Without a function of fedapp: a worker of Ray reads a message before it knows where the app lies.
        return copyreg._reconstructor, (FlowerArray, object, None), found  # type: ignore[attr-defined]

    def _mapped(self) -> Any:
        return pickle.PickleBuffer(self.data)


class _Common(_Shared):
    """An array of several messages, which Ray copies once for all of them, as long as this object is there."""

    _stored: Any = None

    def _mapped(self) -> Any:
        ray: Any = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return super()._mapped()
        if self._stored is None:
            self._stored = _Stored(ray.get, ray.put(np.frombuffer(self.data, np.uint8)))
        return self._stored


class _Stored(NamedTuple):
    """Stands for bytes that Ray has stored: a reader of the message gets the memory."""

    get: Callable[[Any], Any]
    reference: Any

    def __reduce__(self) -> Any:
        return self.get, (self.reference,)


def encoded(array: Array, wire_dtype: str, kind: type[FlowerArray] = FlowerArray, lend: bool = False) -> FlowerArray:
    """Return an array for a message: the bytes of `numpy.save`, put together in one copy.

    Parameters
    ----------
    wire_dtype : `fp16` sends a float32 array in half precision.
    lend : for Ray, which takes it to another process: the numbers where they are, without a header of their own.
    """
    if wire_dtype == "fp16" and array.dtype == np.float32:
        array = array.astype(np.float16)
    array = np.asarray(array, order="C")
    if array.dtype.hasobject:
        raise TypeError("an array of Python objects cannot be sent")
    if lend:
        data: Any = array.reshape(-1).view(np.uint8).data.toreadonly()
    else:
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
        data = b"".join((header.getvalue(), array.data))
    found = kind.__new__(kind)  # the constructor takes bytes alone
    found.__dict__.update(dtype=str(array.dtype), shape=array.shape, stype="numpy.ndarray", data=data)
    return found


def recorded(arrays: Mapping[str, FlowerArray]) -> ArrayRecord:
    """Return a record of these very arrays; the constructor of Flower's would make others with the same bytes."""
    record = ArrayRecord()
    for name, array in arrays.items():
        record[name] = array
    return record


class Encoder:
    """Turns named arrays into Flower arrays; an array object that is sent to many clients is encoded once.

    Parameters
    ----------
    shared : the messages stay within a simulation.
    """

    def __init__(self, wire_dtype: str = "fp32", shared: bool = False) -> None:
        self.wire_dtype = wire_dtype
        self.shared = shared
        self._known: dict[int, tuple[Array, FlowerArray]] = {}

    def arrays(self, payload: Payload) -> dict[str, FlowerArray]:
        """Encode the arrays of a payload by name, those for several clients first and once per object."""
        for array in payload.common.values():
            # The array itself is kept with its id: an id is given out again once its object is gone.
            if id(array) not in self._known or self._known[id(array)][0] is not array:
                common = encoded(array, self.wire_dtype, _Common if self.shared else FlowerArray)
                self._known[id(array)] = array, common
        kind = _Shared if self.shared else FlowerArray
        own = {name: encoded(a, self.wire_dtype, kind) for name, a in payload.arrays.items()}
        return {name: self._known[id(a)][1] for name, a in payload.common.items()} | own

    def content(self, payload: Payload, request: RoundRequest) -> tuple[RecordDict, int]:
        """Return the content of a message, and the bytes of its arrays as they are sent."""
        records, size = self.records(payload, request)
        return sealed(records), size

    def records(self, payload: Payload, request: RoundRequest) -> tuple[Records, int]:
        """Return what the message to a client holds, and the bytes of its arrays as they are sent."""
        arrays = self.arrays(payload)
        casts = {n: str(a.dtype) for n, a in payload.all().items() if str(a.dtype) != arrays[n].dtype}
        header = {**replace(request, sum_bits=payload.sum_bits).record(), CAST: json.dumps(casts)}
        records = Records({ARRAYS: arrays}, {}, {SCALARS: dict(payload.scalars), REQUEST: header})
        return records, sum(wire_bytes(a) for a in arrays.values())


def wire_bytes(array: FlowerArray) -> int:
    """Return the bytes of an array's numbers (Flower's own header of about 128 bytes is not counted)."""
    return int(np.prod(array.shape, dtype=np.int64)) * np.dtype(array.dtype).itemsize


def decoded(sent: FlowerArray, dtype: str | None = None, checked: bool = False) -> Array:
    """Decode an array; `dtype` is the one that it had before it was sent as fp16.

    Parameters
    ----------
    checked : header and size are known to be right: the array stays where it is and cannot be written.
    """
    # Other data than bytes came through Ray from a process of the same simulation, or in a pack from the server.
    if isinstance(sent.data, bytes) and not checked:
        array = sent.numpy()
    else:
        kind, data = np.dtype(sent.dtype), memoryview(sent.data)
        view: Array = np.frombuffer(data[len(data) - wire_bytes(sent) :], kind).reshape(sent.shape)
        array = view if checked else view.copy()
    return array.astype(dtype) if dtype else array


class Records(NamedTuple):
    """What one client gets or sends, by kind and name of the record, as in a RecordDict.

    Flower's records check every value. In a message of many clients that takes longer than a small client's work.
    """

    array_records: dict[str, Mapping[str, FlowerArray]]
    metric_records: dict[str, Mapping[str, Any]]
    config_records: dict[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Part:
    """One client's part of a message to several clients of a simulation, or of their reply."""

    content: Records

    def has_error(self) -> bool:
        """Return False: if a worker fails, Flower replies with an error for the whole message."""
        return False


def sealed(records: Records) -> RecordDict:
    """Return the content of a message to, or from, one client."""
    arrays = {name: recorded(of) for name, of in records.array_records.items()}
    metrics = {name: MetricRecord(dict(of)) for name, of in records.metric_records.items()}
    return RecordDict({**arrays, **metrics, **{n: ConfigRecord(dict(of)) for n, of in records.config_records.items()}})


def together(clients: Mapping[int, Records]) -> RecordDict:
    """Return the content of a message to, or from, several clients of a simulation; `parts` is the inverse.

    Clients that get the very same array objects share one record of them.
    """
    content, texts = RecordDict(), {}
    shared: Mapping[str, FlowerArray] = {}
    for client, records in clients.items():
        arrays = records.array_records[ARRAYS]
        name = ARRAYS if arrays else ""
        if arrays and not shared:
            content[ARRAYS] = recorded(arrays)
            shared = arrays
        elif arrays and not (arrays.keys() == shared.keys() and all(a is shared[n] for n, a in arrays.items())):
            name = f"{ARRAYS}{OF}{client}"
            content[name] = recorded(arrays)
        texts[client] = name, records.metric_records, records.config_records
    content[PARTS] = ConfigRecord({PARTS: json.dumps(texts)})
    return content


def parts(content: RecordDict) -> dict[int, Part]:
    """Return the parts of a message by client; empty if it is for, or from, one client."""
    if PARTS not in content.config_records:
        return {}
    texts = json.loads(str(content.config_records[PARTS][PARTS]))
    found = {int(client): (content.array_records[name] if name else {}, *of) for client, (name, *of) in texts.items()}
    return {client: Part(Records({ARRAYS: arrays}, *of)) for client, (arrays, *of) in found.items()}


def payload_of(message: Message | Part, checked: bool = False) -> tuple[Payload, RoundRequest]:
    """Decode a message of the server: the payload, whose arrays have no other owner, and the request.

    Parameters
    ----------
    checked : headers and sizes of its arrays are known to be right, as in a message of a simulation.
    """
    content = message.content
    header = dict(content.config_records.get(REQUEST, {}))
    casts = json.loads(str(header.pop(CAST, "{}")))
    request = RoundRequest.of(header)
    sent = content.array_records.get(ARRAYS, {})
    arrays = {name: decoded(a, casts.get(name), checked) for name, a in sent.items()}
    if checked:
        arrays = {name: a.copy() for name, a in arrays.items()}
    scalars: dict[str, Any] = dict(content.config_records.get(SCALARS, {}))
    return Payload(arrays, {}, scalars, request.sum_bits), request


def reply_records(
    arrays: Arrays, metrics: Mapping[str, Any], info: Mapping[str, Scalar], wire_dtype: str, lend: bool = False
) -> Records:
    """Return the content of a client's reply: arrays, numbers (or lists of numbers), and plain facts about the client.

    Parameters
    ----------
    lend : Ray takes the reply to another process, from where the arrays are. Until then they must not change.
    """
    sent = {n: encoded(a, wire_dtype, _Shared if lend else FlowerArray, lend) for n, a in arrays.items()}
    casts = {n: str(a.dtype) for n, a in arrays.items() if str(a.dtype) != sent[n].dtype}
    numbers = {k: _number(v) for k, v in metrics.items()}
    if odd := next((k for k, v in info.items() if not isinstance(v, (bool, int, float, str))), None):
        raise TypeError(f"the fact '{odd}' is a {type(info[odd]).__name__}, but must be a bool, int, float or str")
    return Records({ARRAYS: sent}, {METRICS: numbers}, {INFO: {**info, CAST: json.dumps(casts)}})


def _number(value: Any) -> Any:
    """Convert to what a MetricRecord takes: int, float, or a list of one of the two."""
    if isinstance(value, (list, tuple, np.ndarray)):
        items = [float(v) for v in value]
        return [int(v) for v in value] if all(isinstance(v, (int, np.integer)) for v in value) and items else items
    if isinstance(value, (bool, int, np.integer)):
        return int(value)
    return float(value)


def reply_of(message: Message | Part) -> tuple[Arrays, dict[str, Any], dict[str, Any], int]:
    """Decode a reply: arrays, metrics, info, and the bytes of its arrays as they were sent.

    The headers of its arrays must have been checked (:mod:`fedapp.transport.boundary`); the arrays cannot be written.
    """
    content = message.content
    info = dict(content.config_records.get(INFO, {}))
    record: Mapping[str, FlowerArray] = content.array_records.get(ARRAYS, {})
    sent = sum(wire_bytes(a) for a in record.values())
    casts = json.loads(str(info.pop(CAST, "{}")))
    arrays = {name: decoded(a, casts.get(name), checked=True) for name, a in record.items()}
    return arrays, dict(content.metric_records.get(METRICS, {})), info, sent
