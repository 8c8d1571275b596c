"""Sums of rounded features have the same bits for every division of the rows, and so has the head that they make."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from threadpoolctl import threadpool_limits

from fedapp.core import gaussian, masks, sums
from fedapp.errors import BadRequest
from fedapp.learning.state import read_safetensors
from fedapp.results.runs import RunResult
from fedapp.transport.local_grid import FIRST_NODE
from fedapp.transport.records import ARRAYS, INFO
from tests.liars import change_arrays, federate

Tiny = Callable[..., RunResult]
CLASSES, WIDTH, ROWS = 5, 9, 400


def rows_of(kind: str, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Return features (rows, 9) float32 and labels; class 3 is absent."""
    rng = np.random.default_rng(5)
    y = rng.choice([0, 1, 2, 4], rows)
    if kind == "one row a class":
        y = np.arange(rows) % 2
        y[:2] = 2, 4
    z = rng.normal(size=(CLASSES, WIDTH))[y] + rng.normal(size=(rows, WIDTH))
    return (z + {"offset 100": 100, "offset 1000": 1000}.get(kind, 0)).astype(np.float32), y


def integer_sums(z: np.ndarray, y: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return A and b of all rows together in whole numbers, which NumPy adds without any rounding."""
    units = np.rint(z.astype(np.float64) * 2.0**bits).astype(np.int64)
    one = np.full((len(y), 1), 2**bits, np.int64)
    h = np.hstack([units, one])
    b = np.eye(CLASSES, dtype=np.int64)[y].T @ h
    return (h.T @ h) / 4.0**bits, b / 2.0**bits


@pytest.mark.parametrize(
    ("samples", "largest", "bits"),
    [
        ([60_000], 1.0, 18), ([60_000] * 2, 1.0, 18), ([131_073], 1.0, 17), ([60_000], 100.0, 11),
        ([600] * 100, 100.0, 11), ([60_000], 1e4, 5), ([60_000], 2e4, 4), ([60_000], 4e4, None),
        ([134_217] * 1000, 1e-3, 18), ([134_218] * 1000, 1e-3, 17), ([10], 0.0, 18),
        ([2**18, *[1] * 4095], 8.0, 13),  # with 14 bits one client: 2^24 of at most 2^35 / 2^12
    ],
)  # fmt: skip
def test_the_bits_of_exact_sums(samples: list[int], largest: float, bits: int | None) -> None:
    assert sums.exact_bits(samples, largest) == bits
    if largest and bits is not None and max(samples) < 134_218:
        assert bits == min(18, int((53 - np.log2(sum(samples) * largest**2)) // 2))


@pytest.mark.parametrize("kind", ["plain", "offset 100", "offset 1000", "one row a class"])
@pytest.mark.parametrize("clients", [1, 20, 100])
def test_sums_have_the_bits_of_whole_numbers(kind: str, clients: int) -> None:
    z, y = rows_of(kind)
    rng = np.random.default_rng(clients)
    bits = sums.exact_bits([ROWS], float(np.abs(z).max()))
    assert bits is not None
    a, b = integer_sums(z, y, bits)
    for block in (1, 7, 1024):
        parts = []
        for rows in np.array_split(rng.permutation(ROWS), clients):
            own = sums.FeatureSums(CLASSES, WIDTH, bits=bits)
            for start in range(0, len(rows), block):
                part = rows[start : start + block]
                own.update(torch.from_numpy(z[part]), torch.from_numpy(y[part]))
            parts.append(own.arrays())
            assert sums.problem_of(parts[-1], CLASSES, WIDTH, np.float64) is None
        assert np.array_equal(gaussian.unpack(np.sum([p["a"] for p in parts], axis=0), WIDTH + 1), a)
        assert np.array_equal(np.sum([p["b"] for p in parts], axis=0), b)
        words = np.sum([masks.encode(p, clients, 2 * bits) for p in parts], axis=0, dtype=np.uint64)
        opened = masks.decode(words, {n: x.shape for n, x in parts[0].items()}, 2 * bits)
        assert np.array_equal(gaussian.unpack(opened["a"], WIDTH + 1), a) and np.array_equal(opened["b"], b)


def test_no_feature_has_larger_products_than_stated() -> None:
    z, y = rows_of("plain")
    a, b = integer_sums(z, y, 16)
    for j in range(WIDTH):
        forged = a.copy()
        forged[j, j] *= 2**10
        found = sums.problem_of_rounding({"a": gaussian.pack(forged), "b": b}, 16, ROWS, float(np.abs(z).max()))
        assert "'a' is larger than 400 rows" in str(found)


def with_a_negative_eigenvalue(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return A with a scatter within classes whose least eigenvalue is -1e-6 max|A|."""
    values, vectors = np.linalg.eigh(sums.scatter_within(a, b))
    forged = a.copy()
    forged[:-1, :-1] -= (values[0] + 1e-6 * np.abs(a).max()) * np.outer(vectors[:, 0], vectors[:, 0])
    return forged


def without_a_row(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return A whose last column lacks the mean of a class."""
    forged, c = a.copy(), np.flatnonzero(b[:, -1])[0]
    forged[-1, :-1] -= b[c, :-1] / b[c, -1]
    forged[:-1, -1] = forged[-1, :-1]
    return forged


def test_two_forged_answers_among_100_are_refused_by_name(tmp_path: Path) -> None:
    forgers = {30: with_a_negative_eigenvalue, 60: without_a_row}

    def lie(kind: str, reply: Message) -> Message:
        if kind != "query.sums":
            return reply
        arrays = {n: array.numpy() for n, array in reply.content[ARRAYS].items()}
        a = gaussian.unpack(arrays["sums/a"], WIDTH + 1)
        forge = forgers[reply.metadata.src_node_id - FIRST_NODE]
        forged = gaussian.pack(forge(a, arrays["sums/b"]))
        return change_arrays(reply, lambda name, array: forged if name == "sums/a" else array)

    place = written(tmp_path / "f.npz", "plain", 100)
    given = {"dataset": "npz", "clients": 100, "data_dir": str(place), "method": "fed3r", "min_samples": 1}
    run = federate(tmp_path / "run", forgers, lie, **given, min_replies=0.9)
    assert dict(zip(run.dropped["client"], run.dropped["reason"])) == {
        30: "no features have these second moments",
        60: "the last column of 'a' is not the sum of the rows of 'b'",
    }
    assert run.summary["calibration"]["clients"] == 98


def test_sums_of_other_features_than_stated_are_refused_by_name(tmp_path: Path) -> None:
    """The server takes no client's word for it: each number is a multiple of 2^-k or 2^-2k, and none is too large."""
    forgers = {3: lambda a, b: (a, b + 2.0**-30), 6: lambda a, b: (a + 2.0**-40, b), 9: lambda a, b: (64 * a, 8 * b)}

    def lie(kind: str, reply: Message) -> Message:
        if kind != "query.sums":
            return reply
        given = {n: array.numpy() for n, array in reply.content[ARRAYS].items()}
        a, b = gaussian.unpack(given["sums/a"], WIDTH + 1), given["sums/b"].copy()
        z, (square, total) = slice(None, -1), forgers[reply.metadata.src_node_id - FIRST_NODE](a[:-1, :-1], b[:, :-1])
        b[:, z] = np.where(b[:, -1:] > 0, total, 0)
        a[z, z], a[-1], a[:, -1] = square, b.sum(axis=0), b.sum(axis=0)
        forged = {"sums/a": gaussian.pack(a), "sums/b": b}
        return change_arrays(reply, lambda name, array: forged[name])

    place = written(tmp_path / "f.npz", "plain", 10)
    given = {"dataset": "npz", "clients": 10, "data_dir": str(place), "method": "fed3r", "min_samples": 1}
    run = federate(tmp_path / "run", forgers, lie, **given, min_replies=0.5)
    reasons = dict(zip(run.dropped["client"], run.dropped["reason"]))
    assert reasons[3] == "'b' holds no sums of rounded features"
    assert reasons[6] == "'a' holds no sums of rounded features"
    assert re.search(r"is larger than \d+ rows with features up to .* give", reasons[9])
    assert run.summary["blocked"] == [3, 6, 9]


def test_second_moments_whose_pivot_is_no_number_are_refused() -> None:
    large = 1.7e308
    a, b = np.zeros((5, 5)), np.zeros((CLASSES, 5))
    a[:4, :4] = [[0, -1e300, 1e300, -large], [0, large, -large, -1e300], [0, 0, large, 0], [0, 0, 0, large]]
    a[4, 4] = b[0, 4] = 5  # five rows of one class, whose sum is 0
    with np.errstate(over="ignore"):
        found = sums.problem_of({"a": gaussian.pack(a), "b": b}, CLASSES, 4, np.float64)
    assert found == "no features have these second moments"


def test_a_solution_does_not_depend_on_the_number_of_threads() -> None:
    rng = np.random.default_rng(1)
    z, y = rng.normal(size=(2000, 700)), rng.integers(0, CLASSES, 2000)
    h = np.column_stack([z, np.ones(2000)])
    a, b = h.T @ h, np.eye(CLASSES)[y].T @ h
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            own = sums.FeatureSums(CLASSES, 700, bits=14)
            with threadpool_limits(threads):
                own.update(torch.from_numpy(z), torch.from_numpy(y))
                scores = sums.cross_validated(a, b, 2000.0, sums.PENALTIES)
            found.append([sums.ridge(a, b, 3.0), *own.arrays().values(), *scores])
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(map(np.array_equal, *found))
    np.testing.assert_allclose(found[0][0], np.linalg.solve(a + 3 * np.eye(701), b.T).T, rtol=1e-8, atol=1e-12)


# ---- runs ------------------------------------------------------------------------------------------------------------


def written(place: Path, kind: str, clients: int, seed: int = 0, scale: float = 1.0, loud: int = -1) -> Path:
    """Write features for so many clients in an order of their own; `loud` is a client with a large feature."""
    z, y = rows_of(kind)
    test, label = rows_of(kind, 60)
    rng = np.random.default_rng(seed)
    order = rng.permutation(ROWS)
    owner = np.concatenate([np.arange(clients), rng.integers(0, clients, ROWS - clients)])
    x = scale * z[order]
    x[owner == loud, 0] = 3e4
    np.savez(
        place, x=np.concatenate([x, test]), y=np.concatenate([y[order], label]),
        client=np.concatenate([owner, np.arange(60) % clients]), split=["train"] * ROWS + ["test"] * 60,
        about=np.array(json.dumps({"body": "a" * 64, "width": WIDTH})), class_names=list("abcde"),
    )  # fmt: skip
    return place


def head(run: RunResult) -> tuple[str, dict[str, np.ndarray]]:
    stored, _ = read_safetensors(run.out / "models" / "last.safetensors")
    return hashlib.sha256(b"".join(stored[n].tobytes() for n in sorted(stored))).hexdigest(), stored


@pytest.mark.full
@pytest.mark.parametrize("kind", ["plain", "offset 1000", "one row a class"])
@pytest.mark.parametrize("method", ["fed3r", "lda", "fedncm"])
def test_a_head_has_the_same_bits_for_every_division(method: str, kind: str, tmp_path: Path, tiny: Tiny) -> None:
    def go(clients: int, seed: int = 0, **more: Any) -> RunResult:
        place = written(tmp_path / f"{clients}-{seed}.npz", kind, clients, seed)
        return tiny(dataset="npz", clients=0, data_dir=str(place), method=method, min_samples=1, **more)

    whole = go(1)
    wanted, stored = head(whole)
    for clients, seed in ((1, 1), (20, 0), (20, 1), (100, 0)):
        assert head(go(clients, seed))[0] == wanted, (clients, seed)
    assert head(go(20, secure_sum=True))[0] == wanted
    if method != "fed3r":
        return
    z, y = rows_of(kind)
    bits = sums.exact_bits([ROWS], float(np.abs(z).max()))
    assert bits is not None
    a, b = integer_sums(z, y, bits)
    ridge = np.linalg.solve(a + whole.summary["calibration"]["lam"] * np.eye(WIDTH + 1), b.T).T
    rows = np.column_stack([stored["head.weight"], stored["head.bias"]]) / whole.summary["calibration"]["scale"]
    np.testing.assert_allclose(rows[[0, 1, 2, 4]], ridge[[0, 1, 2, 4]], rtol=2e-4, atol=1e-5 * np.abs(ridge).max())


def test_a_feature_above_max_abs_is_refused_by_name(tmp_path: Path, tiny: Tiny) -> None:
    place = written(tmp_path / "f.npz", "plain", 6, loud=4)
    given = {"dataset": "npz", "clients": 0, "data_dir": str(place), "method": "fed3r"}
    with pytest.raises(BadRequest, match="client 4 cannot take part: it has a feature of 30000, max-abs is 10000"):
        tiny(**given)
    assert head(tiny(**given, max_abs=1e6))[1]


def test_features_without_bits_end_the_run(tmp_path: Path, tiny: Tiny) -> None:
    place = written(tmp_path / "f.npz", "plain", 6, scale=1e3, loud=2)
    with np.load(place) as arrays:
        columns = dict(arrays)
    columns["x"][np.flatnonzero(columns["client"] == 2)[0], 0] = 9e5
    np.savez(place, **columns)
    given = {"dataset": "npz", "clients": 0, "data_dir": str(place), "method": "fed3r", "max_abs": 1e6}
    with pytest.raises(BadRequest, match="client 2 has a feature of 900000, which leaves fewer than 4 bits"):
        tiny(**given)
    assert head(tiny(**given, method_args="min_count=2"))[1], "then nothing is rounded"


def test_features_that_rounding_would_take_away_are_not_rounded(tmp_path: Path, tiny: Tiny) -> None:
    found = []
    for unit in (1.0, 2.0**-30):
        place = written(tmp_path / f"{unit}.npz", "plain", 6, scale=unit)
        run = tiny(dataset="npz", clients=0, data_dir=str(place), method="lda", method_args="scale=none")
        found.append(unit * head(run)[1]["head.weight"][[0, 1, 2, 4]])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-3)


@pytest.mark.parametrize("method", ["fed3r", "fedncm"])
@pytest.mark.parametrize(("largest", "warned"), [(1e5, True), (1e3, False), (4e6, None)])
def test_a_false_largest_feature_is_named(
    method: str, largest: float, warned: bool | None, tmp_path: Path, no_page: list[Path]
) -> None:
    def lie(kind: str, reply: Message) -> Message:
        if kind == "query.register":
            reply.content[INFO]["largest-feature"] = largest
        return reply

    place = written(tmp_path / "f.npz", "plain", 6)
    given = {"dataset": "npz", "data_dir": str(place), "method": method, "min_samples": 1, "max_abs": 1e7}
    if warned is None:
        with pytest.raises(BadRequest, match="client 4 has a feature of 4e"):
            federate(tmp_path / "run", [4], lie, 6, **given)
        return
    run = federate(tmp_path / "run", [4], lie, 6, **given)
    told = [w for w in run.summary["warnings"] if "round features" in w]
    assert len(told) == warned and all("client 4 states a feature of 100000" in w for w in told)


@pytest.mark.full
@pytest.mark.parametrize("method", ["fed3r", "lda"])
def test_second_moments_in_single_precision(method: str, tmp_path: Path, tiny: Tiny) -> None:
    """Clients of 4 rows have singular second moments, which rounding makes indefinite."""
    place = written(tmp_path / "f.npz", "plain", 100)
    given = {"dataset": "npz", "clients": 0, "data_dir": str(place), "method": method, "min_samples": 1}
    exact, rounded = tiny(**given), tiny(**given, method_args="wire=f32")
    assert rounded.summary["calibration"]["clients"] == 100
    size = (WIDTH + 1) * (WIDTH + 2) // 2
    sent = [run.summary["bytes_up_query.sums"] for run in (exact, rounded)]
    assert sent[0] - sent[1] == 4 * size
    for name, array in head(exact)[1].items():
        np.testing.assert_allclose(head(rounded)[1][name], array, atol=1e-4 * np.abs(array).max())
    assert head(exact)[0] != head(rounded)[0]


@pytest.mark.parametrize("rows", [3, 30, 400])
def test_honest_second_moments_in_single_precision_pass(rows: int) -> None:
    rng = np.random.default_rng(rows)
    for width in (9, 200):
        own = sums.FeatureSums(CLASSES, width)
        z = rng.normal(size=(rows, width)) + rng.normal(size=width) * 3
        own.update(torch.from_numpy(z), torch.from_numpy(rng.integers(0, CLASSES, rows)))
        arrays = own.arrays()
        arrays["a"] = arrays["a"].astype(np.float32)
        assert sums.problem_of(arrays, CLASSES, width, np.float32) is None
        a = gaussian.unpack(arrays["a"], width + 1)
        a[:-1, :-1] -= 1e-3 * np.abs(a).max() * np.eye(width)
        arrays["a"] = gaussian.pack(a).astype(np.float32)
        if rows < width:
            assert sums.problem_of(arrays, CLASSES, width, np.float32)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"secure_sum": True}, "plain", "leave secure-sum out"), ({"dp": "example"}, "plain", "leave dp out"),
        ({"wire_dtype": "fp16"}, "plain", "leave wire-dtype out"), ({}, "offset 100", "too far from 0"),
    ],
)  # fmt: skip
def test_single_precision_is_refused_where_it_does_not_suffice(
    changes: dict[str, Any], kind: str, message: str, tmp_path: Path, tiny: Tiny
) -> None:
    place = written(tmp_path / "f.npz", kind, 6)
    with pytest.raises(BadRequest, match=f"wire=f32.*{message}"):
        tiny(dataset="npz", clients=0, data_dir=str(place), method="lda", method_args="wire=f32", **changes)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The bits of each secure sum."""
    found: list[int] = []
    original = masks.decode
    monkeypatch.setattr(
        masks, "decode", lambda total, shapes, bits: found.append(bits) or original(total, shapes, bits)
    )
    yield found


def test_a_secure_sum_has_the_bits_of_its_products(tmp_path: Path, tiny: Tiny, asked: list[int]) -> None:
    place = written(tmp_path / "f.npz", "offset 100", 6)
    tiny(dataset="npz", clients=0, data_dir=str(place), method="fed3r", secure_sum=True)
    bits = sums.exact_bits([ROWS], float(np.abs(rows_of("offset 100")[0]).max()))
    assert bits is not None and asked == [2 * bits, masks.BITS]  # and the losses of factors
