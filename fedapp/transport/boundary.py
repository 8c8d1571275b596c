"""The one way in for a client's reply: all of it is checked against the server's expectation before it is decoded.

`read` never raises. A reply comes back as `Good`, or as `Refused` with the reason, whatever was sent. What is expected
follows from the server's own model, never from a client's statements: names, shapes, dtypes, sizes, and ranges
of all numbers. Sizes are checked before anything is decoded, so that no header can make the server allocate memory.
`delivery.arrived` does the same for the pieces in which a reply arrives from a real node.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, Message

from fedapp.method import LARGEST, Array, Arrays, ClientInfo, Size, is_one_of
from fedapp.reduce.reader import Schema
from fedapp.transport.delivery import TEXT_MOST
from fedapp.transport.records import ARRAYS, CAST, INFO, METRICS, Part, reply_of

FAILED, BAD, IMPOSSIBLE, ANOTHER = "failed", "bad value", "impossible", "another client"
"""Grades of what does not count: the client reported a failure, or did not answer; a number out of range, such
as an honest client may send too when its model diverges; what no client code of ours can send; a reply in the name of
another client, as from a node that was restarted with another id."""

FACTS_SIZE = 16 << 20
"""Largest size of a reply without its arrays, in bytes."""
NPY_HEADER = 256
"""Most bytes of an array's own header; NumPy's has 128."""
NPY_ALIGNED = 64
"""NumPy fills up its headers to a multiple of so many bytes."""
FURTHER, METRICS_MOST, LIST_MOST = 4096, 256, 65_536
"""Largest numbers of arrays next to the model's, of metrics, and of entries of one metric."""
NAME_MOST, INFO_MOST = 200, 16
"""Largest length of a name, in characters, and number of facts."""
COUNT_MOST = 10**9
"""Largest sample count, class id or class count."""
LARGE = 1e4
"""Largest value of heads and of means of representations: the default of `max-abs`."""
SECONDS_MOST = 1e7
FACTS = frozenset(("client", "model", "state", "state-from", "state-binds", "state-lost", CAST))
"""Names of a reply's facts that are not numbers."""
HELLO = {
    "client": (0, 999_999),
    "num-examples": (1, COUNT_MOST),
    "test-examples": (0, COUNT_MOST),
    "num-classes": (2, 100_000),
    "width": (1, 1 << 24),
    "partitions": (0, 1_000_000),
}
"""Whole numbers that a client states about itself, with the smallest and the largest that are possible."""
MODEL = re.compile(r"\A[\w.:,+-]{1,200}\Z")
"""The name of an architecture."""
DTYPES = ("float32", "float64", "int32", "int64")
"""What further arrays, such as class means with their labels, may consist of; and half precision where it is on."""
LIMITS: Mapping[Size, Callable[[int, float], float]] = {
    "feature": lambda count, most: most,
    "features": lambda count, most: count * most,
    "products": lambda count, most: count * most**2,
    "losses": lambda count, most: math.inf,
}
"""Largest value of each size, from a client's number of samples and `Contract.max_abs`."""


@dataclass(frozen=True)
class Contract:
    """What one reply may hold.

    Attributes
    ----------
    client : its id.   kind : type of the message that it answers.   schema : of all clients' replies.
    further_bytes : largest size of all arrays next to the model's together.
    count, tests : training and test samples that the client stated when it registered; tests = -1: not stated.
    wire_dtype : `fp32`, or `fp16` if float32 arrays travel in half precision.
    max_abs : largest value in heads and in means of representations.
    numbers : names of the numbers that a reply may hold; None = any.
    scored : whether the reply must hold a score.
    dtypes : possible dtypes of the model arrays.
    """

    client: int
    kind: str
    schema: Schema
    further_bytes: int
    count: int
    wire_dtype: str = "fp32"
    tests: int = -1
    max_abs: float = LARGE
    numbers: Collection[str] | None = None
    scored: bool = False
    dtypes: tuple[str, ...] = ("float32",)


@dataclass(frozen=True)
class Registration(ClientInfo):
    """Statements of a client about itself when it registers.

    Attributes
    ----------
    tests : number of test samples.   facts : all else.
    """

    tests: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Good:
    """A reply with an allowed content; `size` is the bytes of its arrays as they were sent."""

    arrays: Arrays
    metrics: dict[str, Any]
    info: dict[str, Any]
    size: int


@dataclass(frozen=True)
class Refused:
    """Why a reply does not count, and its grade; of a registration that `FAILED`, also its client, -1 = unknown."""

    reason: str
    offence: str = IMPOSSIBLE
    client: int = -1


def read(message: Message | Part, contract: Contract) -> Good | Refused:
    """Return a client's reply, or the reason for its refusal; nothing is ever raised."""
    try:
        content = message.content
        info = dict(content.config_records.get(INFO, {}))
        if "error" in info:
            if not isinstance(info["error"], str) or info.get("stage", contract.kind) != contract.kind:
                return Refused("the error report has no message or a wrong stage")
            return Refused(info["error"], FAILED)
        record: Mapping[str, FlowerArray] = content.array_records.get(ARRAYS, {})
        stated: Mapping[str, Any] = dict(content.metric_records.get(METRICS, {}))
        impossible = (
            _records_problem(content.array_records, content.metric_records, content.config_records)
            or _info_problem(info, contract)
            or _names_problem({name: len(array.data) for name, array in record.items()}, contract)
            or next(filter(None, (_array_problem(name, array, contract) for name, array in record.items())), None)
            or _cast_problem(info, {name: array.dtype for name, array in record.items()}, contract)
            or _metrics_problem(stated, contract)
        )
        if impossible:
            return Refused(impossible)
        if info.get("client", contract.client) != contract.client:
            return Refused(f"the node now answers as client {info['client']!s}", ANOTHER)
        arrays, metrics, info, size = reply_of(message)
        bad = (_value_problem(name, array, contract) for name, array in arrays.items())
        if problem := next(filter(None, bad), None) or _numbers_problem(metrics, contract):
            return Refused(problem, BAD)
        # The loss of a model that diverged may pass the largest number: it counts as not measured.
        metrics = {n: math.nan if isinstance(v, float) and math.isinf(v) else v for n, v in metrics.items()}
        return Good(arrays, metrics, info, size)
    except Exception as e:  # the last resort: what no rule above foresaw must not end the run, nor block a client
        return Refused(f"the reply cannot be read: {type(e).__name__}: {str(e)[:TEXT_MOST]}", BAD)


def decoded_problem(arrays: Arrays, contract: Contract) -> str | None:
    """Return the fault of a reply whose arrays are decoded already, as in Flower's own loop."""
    if not HELLO["num-examples"][0] <= contract.count <= COUNT_MOST:
        return f"num-examples is {contract.count}, a whole number from 1 to {COUNT_MOST} is needed"
    types = (_type_problem(name, str(a.dtype), a.shape, contract) for name, a in arrays.items())
    values = (_value_problem(name, a, contract) for name, a in arrays.items())
    sizes = {name: a.nbytes for name, a in arrays.items()}
    return _names_problem(sizes, contract) or next(filter(None, (*types, *values)), None)


def read_registration(message: Message) -> Registration | Refused:
    """Return a client's registration, or the reason for its refusal; nothing is ever raised."""
    try:
        return _read_registration(message)
    except Exception as e:
        return Refused(f"its registration cannot be read: {type(e).__name__}: {str(e)[:TEXT_MOST]}")


def _read_registration(message: Message) -> Registration | Refused:
    content = message.content
    info: dict[str, Any] = dict(content.config_records.get(INFO, {}))
    metrics: dict[str, Any] = dict(content.metric_records.get(METRICS, {}))
    if "error" in info:
        client = info.get("client", -1)
        return Refused(str(info["error"]), FAILED, client if type(client) is int and client >= 0 else -1)
    if problem := _records_problem(content.array_records, content.metric_records, content.config_records):
        return Refused(problem)
    if content.array_records.get(ARRAYS, ArrayRecord()) or len(info) > INFO_MOST:
        return Refused("its registration has arrays or too many facts")
    for name, (low, high) in HELLO.items():
        value = metrics.get(name) if name.endswith("-examples") else info.get(name, 0 if name == "partitions" else None)
        if type(value) is not int or not low <= value <= high:
            return Refused(f"its {name} is {str(value)[:NAME_MOST]}, a whole number from {low} to {high} is needed")
    texts = {"model": NAME_MOST, "classes": NAME_MOST, "shape": NAME_MOST, "shapes": 1 << 19, "common": 1 << 16}
    for name, most in texts.items():
        value = info.get(name, {"common": "{}", "classes": ""}.get(name))
        if not isinstance(value, str) or len(value) > most:
            return Refused(f"its {name} is not a text of at most {most} characters")
    if not MODEL.match(str(info["model"])):
        return Refused(f"its model '{info['model']}' is not a name")
    shapes, shape = json.loads(str(info["shapes"])), json.loads(str(info["shape"]))
    common = json.loads(str(info.get("common", "{}")))
    if not isinstance(shapes, dict) or len(shapes) > FURTHER or not all(map(_is_shape, shapes.values())):
        return Refused("its shapes are invalid")
    if not _is_shape(shape) or not shape or 0 in shape:
        return Refused(f"its sample shape {info['shape']} is invalid")
    if not isinstance(common, dict) or not all(isinstance(v, (str, int, float)) for v in common.values()):
        return Refused("its common facts are not plain values")
    largest = info.get("largest-feature")
    if largest is not None and not (isinstance(largest, float) and 0 <= largest < math.inf):
        return Refused(f"its largest-feature is {str(largest)[:NAME_MOST]}, a number of at least 0 is needed")
    sized = {name: tuple(sides) for name, sides in shapes.items()}
    return Registration(
        int(info["client"]), int(metrics["num-examples"]), str(info["model"]), int(info["num-classes"]), sized, common,
        int(metrics["test-examples"]), info, largest=largest,
    )  # fmt: skip


def _is_shape(sides: Any) -> bool:
    if not isinstance(sides, list) or len(sides) > 8 or not all(type(s) is int and 0 <= s < 2**31 for s in sides):
        return False
    return math.prod(sides) < 2**40


def _records_problem(*names: Iterable[str]) -> str | None:
    """Return the fault of the names of records of arrays, metrics and facts."""
    found = zip(names, (ARRAYS, METRICS, INFO), strict=True)
    extra = [str(name)[:NAME_MOST] for of, known in found for name in of if name != known]
    return f"unexpected record '{extra[0]}'" if extra else None


def _info_problem(info: Mapping[str, Any], contract: Contract) -> str | None:
    if len(info) > INFO_MOST:
        return f"it states {len(info)} facts, at most {INFO_MOST} are possible"
    for name, value in info.items():
        if name not in FACTS:
            return f"unexpected fact '{name[:NAME_MOST]}'"
        if not isinstance(value, (str, int, float, bool)):
            return f"the fact '{name[:NAME_MOST]}' is a {type(value).__name__}"
        if isinstance(value, str) and name != CAST and len(value) > TEXT_MOST:
            return f"the fact '{name[:NAME_MOST]}' has {len(value)} characters, at most {TEXT_MOST} are possible"
    client = info.get("client", contract.client)
    if type(client) is not int or not HELLO["client"][0] <= client <= HELLO["client"][1]:
        return f"the node now answers as client {str(client)[:NAME_MOST]}"
    return None


def _names_problem(sizes: Mapping[str, int], contract: Contract) -> str | None:
    """Return the fault of the names of arrays and their sizes in bytes."""
    schema = contract.schema
    missing = [name for name in (*schema.shapes, *schema.raw) if name not in sizes]
    if missing:
        return f"arrays missing: {', '.join(missing[:5])}"
    if len(sizes) > len(schema.shapes) + FURTHER:
        return f"it holds {len(sizes)} arrays, at most {len(schema.shapes) + FURTHER} are possible"
    if long := next((name for name in sizes if len(name) > NAME_MOST), ""):
        return f"the name of an array has {len(long)} characters, at most {NAME_MOST} are possible"
    further = sizes.keys() - schema.shapes.keys() - schema.raw.keys()
    if strange := next((name for name in sizes if name in further and not is_one_of(name, schema.further)), None):
        return f"'{strange}' is not an array that {schema.method} shares"
    rest = sum(sizes[name] for name in further)
    if rest > contract.further_bytes:
        return f"arrays next to the model's have {rest} bytes, at most {contract.further_bytes} are possible"
    return None


def _array_problem(name: str, array: FlowerArray, contract: Contract) -> str | None:
    """Return the fault of an array as it was sent; nothing is decoded but its header."""
    shape = tuple(array.shape)
    if not all(type(side) is int and 0 <= side < 2**31 for side in shape) or len(shape) > 8:
        return f"invalid shape for '{name}': {str(shape)[:NAME_MOST]}"
    if array.stype != "numpy.ndarray":
        return f"'{name}' is stored as {str(array.stype)[:NAME_MOST]}, expected numpy.ndarray"
    if problem := _type_problem(name, array.dtype, shape, contract):
        return problem
    size = math.prod(shape) * np.dtype(array.dtype).itemsize
    if not isinstance(array.data, bytes) and len(array.data) == size:
        return None  # from a worker of the same simulation, or in a pack: without a header
    if not size < len(array.data) <= size + NPY_HEADER:
        return f"'{name}' has {len(array.data)} bytes, {array.dtype} of shape {shape} has {size}"
    try:
        stream = io.BytesIO(memoryview(array.data)[:NPY_HEADER])
        version = np.lib.format.read_magic(stream)
        written, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    except Exception:
        return f"'{name}' is not in .npy format"
    if (written, fortran, str(dtype)) != (shape, False, array.dtype) or stream.tell() + size != len(array.data):
        return f"'{name}' differs from its record: {dtype} of shape {str(written)[:NAME_MOST]}"
    # The numbers are read where they lie, and must lie as numbers do.
    if version != (1, 0) or stream.tell() % NPY_ALIGNED:
        return f"'{name}' has a wrong .npy header"
    return None


def _type_problem(name: str, dtype: str, shape: tuple[int, ...], contract: Contract) -> str | None:
    half = ("float16",) if contract.wire_dtype == "fp16" else ()
    schema = contract.schema
    allowed = (*(contract.dtypes if name in schema.shapes else DTYPES), *half)
    expected = schema.shapes.get(name)
    if name in schema.raw:
        allowed, expected = (schema.raw[name][0],), schema.raw[name][1]
    if dtype not in allowed:
        return f"'{name}' has dtype {str(dtype)[:NAME_MOST]}, expected {' or '.join(allowed)}"
    if expected is not None and shape != tuple(expected):
        return f"'{name}' has shape {shape}, expected {tuple(expected)}"
    return None


def _cast_problem(info: Mapping[str, Any], dtypes: Mapping[str, str], contract: Contract) -> str | None:
    """Return the fault of the note of narrowed arrays: it follows from the server's setting."""
    narrowed = {n: "float32" for n, of in dtypes.items() if of == "float16" and contract.wire_dtype == "fp16"}
    stated = info.get(CAST, "{}")
    return None if stated == json.dumps(narrowed) else "it names wrong dtypes for its narrowed arrays"


def _value_problem(name: str, array: Array, contract: Contract) -> str | None:
    """Return the fault of the numbers of an array."""
    schema = contract.schema
    if not array.size or name in schema.raw:
        return None
    low, high = array.min(), array.max()
    if not (np.isfinite(low) and np.isfinite(high)):
        return f"'{name}' contains NaN or infinity"
    # A variance below 0 would make the others' scores NaN. Those of updates may fall.
    least = 0.0 if name in schema.shapes and name.endswith("running_var") else -math.inf
    limit: float = COUNT_MOST
    if np.issubdtype(array.dtype, np.floating):
        # A BatchNorm layer on features in their own units holds the squares of those.
        limit = LARGEST**2 if name.endswith("running_var") else LARGEST
        if size := next((s for begin, s in schema.sizes.items() if name.startswith(begin)), None):
            least = 0.0 if size == "losses" else least
            limit = LIMITS[size](contract.count, contract.max_abs)
    least = max(least, -limit)
    if not (least <= low and high <= limit):
        return f"'{name}' holds values from {low:g} to {high:g}, possible are {least:g} to {limit:g}"
    return None


def _metrics_problem(metrics: Mapping[str, Any], contract: Contract) -> str | None:
    """Return the fault of the names and types of the numbers of a reply."""
    if len(metrics) > METRICS_MOST:
        return f"it holds {len(metrics)} metrics, at most {METRICS_MOST} are possible"
    for name, value in metrics.items():
        if len(name) > NAME_MOST:
            return f"the name of a metric has {len(name)} characters, at most {NAME_MOST} are possible"
        if name != "num-examples" and contract.numbers is not None and name not in contract.numbers:
            return f"unexpected metric '{name}': a method names its own in Method.columns or Method.metrics"
        if isinstance(value, list) and len(value) > LIST_MOST:
            return f"'{name}' has {len(value)} numbers, at most {LIST_MOST} are possible"
        if isinstance(value, list) and (name.endswith(_SCORE) or name == "num-examples"):
            return f"'{name}' is {str(value)[:NAME_MOST]}, one number is needed"
        if name.endswith(_SCORE[:2]):
            stem = name.rpartition("-")[0]
            if not {f"{stem}-correct", f"{stem}-total"} <= metrics.keys():
                return f"'{stem}-correct' and '{stem}-total' go together"
    if "num-examples" not in metrics:
        return "num-examples is missing"
    if contract.scored and not any(name.endswith("-total") for name in metrics):
        return "it holds no score"
    return None


_SCORE = ("-correct", "-total", "-loss-sum")


def _numbers_problem(metrics: Mapping[str, Any], contract: Contract) -> str | None:
    """Return the fault of the numbers of a reply. A loss has no upper limit: an honest client may have a model that
    diverged or was corrupted."""
    count = metrics["num-examples"]
    if not isinstance(count, int) or count != contract.count:
        return f"num-examples is {count}, but the client registered with {contract.count}"
    for name, value in metrics.items():
        if -math.inf in (value if isinstance(value, list) else (value,)):
            return f"'{name}' is {str(value)[:NAME_MOST]}"
        if name.endswith("-total"):
            correct = metrics[name.removesuffix("total") + "correct"]
            if not isinstance(value, int) or not isinstance(correct, int) or not 0 <= correct <= value <= COUNT_MOST:
                return f"'{name}' is {value!r} with {correct!r} of them correct"
            if contract.tests >= 0 and value != contract.tests and not name.endswith("-validation-total"):
                return f"'{name}' is {value}, but the client registered with {contract.tests} test samples"
        elif (name == "train-loss" and value < -contract.max_abs) or (
            name.endswith("-loss-sum") and value < 0
        ):  # terms of some methods are below 0, by little
            return f"'{name}' is {value!r}"
        elif name.endswith("-balanced") and (value < 0 or value > 1):
            return f"'{name}' is {value!r}, a share is needed"
        elif name.endswith("seconds") and not 0 <= value <= SECONDS_MOST:
            return f"'{name}' is {value!r}, possible are 0 to {SECONDS_MOST:g}"
        elif name == "steps" and not (isinstance(value, int) and 0 <= value <= COUNT_MOST):
            return f"'steps' is {value!r}"
    return None
