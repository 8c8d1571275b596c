"""Anything at all as a reply, the pieces of one, a registration, a checkpoint, a run's files or a configuration: a
verdict or a plain error comes back, never another exception.

`make test` runs a few hundred cases, the slow test 24,000.
"""

from __future__ import annotations

import contextlib
import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, RecordDict
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fedapp.config import KEYS, from_flat, parse_value
from fedapp.engines.local import run
from fedapp.errors import BadRequest
from fedapp.learning.state import StateError, write_safetensors
from fedapp.results.runs import read_run
from fedapp.transport import boundary, checkpoint, delivery
from fedapp.transport.boundary import Good, Refused, Registration
from fedapp.transport.records import ARRAYS, INFO, METRICS
from tests.test_hostile import CONTRACT, FP16, honest, message, pieces_of, registration

NUMBERS = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.floats(), st.sampled_from([0, -1, 1, 2**31, 1e30, float("nan"), float("inf")])
)
WORDS = st.one_of(
    st.text(max_size=30),
    st.sampled_from(["", "{", "[" * 5000, "null", "nan", "-1", "1e999", "\x00", "=1+1", "a=b", "../x", "x" * 5000]),
)
NAMES = st.one_of(
    WORDS, st.sampled_from(["head.weight", "head.bias", "lar", "labels", "num-examples", "received-total", "client",
                            "shapes", "shape", "width", "num-classes", "state", "cast", "error", "stage", "model"])
)  # fmt: skip
ANY = st.one_of(NUMBERS, WORDS, st.lists(st.floats(), max_size=4), st.lists(st.text(max_size=4), max_size=3),
                st.booleans(), st.binary(max_size=40))  # fmt: skip
EDITS = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=6)


def edited(data: bytes, edits: list[tuple[int, int]], cut: int) -> bytes:
    """Change single bytes, and perhaps cut off the end."""
    found = bytearray(data)
    for place, value in edits:
        if found:
            found[place % len(found)] = value
    return bytes(found[: len(found) - cut % (len(found) + 1)] if cut % 3 == 0 else found)


# ---- what is tried -------------------------------------------------------------------------------------------------


def of_record(
    content: RecordDict, record: str, name: str, value: Any, array: tuple[str, list[int], bytes, int]
) -> RecordDict:
    """Put anything into a record, past Flower's own check of types."""
    dtype, shape, data, what = array
    if record == ARRAYS:
        made = FlowerArray(np.zeros(3, np.float32))
        if what % 2:
            made = FlowerArray(dtype, tuple(shape), "numpy.ndarray", data)
        for n, v in (("dtype", dtype), ("shape", tuple(shape)), ("data", data)):
            if what >> 1 & 1:
                setattr(made, n, v)
        content.array_records.setdefault(ARRAYS, ArrayRecord()).__dict__.setdefault("_data", {})[name] = made
    else:
        content[record].__dict__.setdefault("_data", {})[name] = value
    return content


ARRAY = st.tuples(
    st.one_of(st.text(max_size=8), st.sampled_from(["float32", "float16", "int64", "object", "<U9"])),
    st.lists(st.integers(-3, 2**40), max_size=4), st.binary(max_size=200), st.integers(0, 3),
)  # fmt: skip
CHANGES = st.lists(st.tuples(st.sampled_from([ARRAYS, METRICS, INFO]), NAMES, ANY, ARRAY), min_size=1, max_size=3)


def replies(changes: Any, wire: bool) -> None:
    content = honest("fp16" if wire else "fp32")
    for record, name, value, array in changes:
        content = of_record(content, record, name, value, array)
    assert isinstance(boundary.read(message(content), FP16 if wire else CONTRACT), (Good, Refused))


def registrations(changes: Any, wire: bool) -> None:
    content = registration()
    for record, name, value, array in changes:
        content = of_record(content, record, name, value, array)
    if wire:
        del content[INFO if len(changes) == 1 else METRICS]
    assert isinstance(boundary.read_registration(message(content)), (Registration, Refused))


def pieces(kind: str, edits: Any, cut: int, raw: bytes) -> None:
    def change(of: str, body: bytes) -> bytes:
        return body if of != kind else raw if cut % 4 == 0 else edited(body, edits, cut)

    for reply in delivery.arrived(pieces_of(honest(), change), ["asked"], 1 << 20):
        assert isinstance(boundary.read(reply, CONTRACT), (Good, Refused))
        assert isinstance(boundary.read_registration(reply), (Registration, Refused))


KINDS = ("Message", "RecordDict", "ArrayRecord", "Array", "ArrayChunk", "MetricRecord", "ConfigRecord")
STATE = {"model": {"w": np.ones((2, 3), np.float32)}, "ids": [1, 2], "c": {0: np.zeros(2)}, "none": {}}
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=9), inner, max_size=3)),
    max_leaves=6,
)


def checkpoints(edits: Any, cut: int, header: Any, key: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = checkpoint.save(folder, 3, STATE, {"Cohort": {"clients": np.arange(2)}}, {"run": "aa"})
        if cut % 2:  # a whole file with another header
            arrays, scalars = checkpoint.flatten(STATE)
            good = {"schema": 2, "run": "aa", "round": 3, "scalars": scalars, "remembered": {}, "order": list(arrays)}
            write_safetensors(path, arrays, {**good, key: header})
        else:
            data = path.read_bytes()
            size = struct.unpack("<Q", data[:8])[0]
            path.write_bytes(edited(data[: 8 + size] if cut % 5 == 0 else data, edits, cut))
        for read in (checkpoint.latest, lambda f: checkpoint.recover(f, {"run": "aa"})):
            with contextlib.suppress(StateError, BadRequest):
                read(folder)


FILES = ("rounds.csv", "clients.csv", "final.csv", "dropped.csv", "evaluations.csv", "summary.json", "versions.json",
         "data_card.json", "error.json", "config.toml")  # fmt: skip
KEPT: dict[str, bytes] = {}


def run_files(name: str, edits: Any, cut: int, raw: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        out = Path(place)
        (out / "config.toml").write_bytes(KEPT["config.toml"])
        (out / name).write_bytes(raw if cut % 4 == 0 else edited(KEPT.get(name, b"{}\n"), edits, cut))
        with contextlib.suppress(BadRequest):
            found = read_run(out)
            for table in ("rounds", "clients", "final", "dropped", "evaluations", "unseen"):
                getattr(found, table)
            for value in ("summary", "versions", "card", "error", "flat", "config", "method", "ok"):
                getattr(found, value)


VALUES = st.one_of(
    st.booleans(), st.integers(-5, 2**40), st.floats(), WORDS,
    st.sampled_from(["auto", "fedavg", "ccvr", "mu=1", "base=fedavg base.x=1", "ReduceLROnPlateau", "norm",
                     "StepLR step_size=0",
                     "CosineAnnealingLR T_max=-1", "LambdaLR lr_lambda=1", "a:b", "a.b:c,d", "norm+krum", "0.5", "3,7",
                     "flwr:DirichletPartitioner", "flwr:zork", "x=* y=y", "betas=1", "lbfgs", "sparseadam"]),
)  # fmt: skip


def configurations(pairs: Any, word: str) -> None:
    for act in (lambda: from_flat(dict(pairs)), lambda: parse_value(pairs[0][0], word)):
        try:
            act()
        except BadRequest as e:
            assert str(e)


TRIED: dict[str, tuple[Callable[..., None], tuple[st.SearchStrategy[Any], ...]]] = {
    "replies": (replies, (CHANGES, st.booleans())),
    "registrations": (registrations, (CHANGES, st.booleans())),
    "pieces": (pieces, (st.sampled_from(KINDS), EDITS, st.integers(0, 1 << 16), st.binary(max_size=60))),
    "checkpoints": (checkpoints, (EDITS, st.integers(0, 1 << 16), JSON,
                                  st.sampled_from(["schema", "run", "round", "scalars", "remembered", "order"]))),
    "run files": (run_files, (st.sampled_from(FILES), EDITS, st.integers(0, 1 << 16), st.binary(max_size=60))),
    "configurations": (configurations, (st.lists(st.tuples(st.sampled_from(KEYS), VALUES), min_size=1, max_size=3),
                                        WORDS)),
}  # fmt: skip


def fuzz(what: str, cases: int) -> None:
    check, given_ = TRIED[what]
    quick = settings(max_examples=cases, suppress_health_check=list(HealthCheck), phases=(Phase.generate,))
    quick(given(*given_)(check))()


@pytest.fixture(scope="module", autouse=True)
def files(tmp_path_factory: pytest.TempPathFactory) -> None:
    out = tmp_path_factory.mktemp("fuzz") / "run"
    run(method="local", clients=2, rounds=1, local_epochs=1, batch_size=64, out=out)
    KEPT.update({p.name: p.read_bytes() for p in out.iterdir() if p.name in FILES})
    assert json.loads(KEPT["summary.json"])["ok"]


@pytest.mark.parametrize("what", TRIED)
def test_anything_at_all(what: str) -> None:
    fuzz(what, 60)


@pytest.mark.slow
@pytest.mark.parametrize("what", TRIED)
def test_anything_at_all_4000_times(what: str) -> None:
    fuzz(what, 4000)
