"""Server checkpoints: any state comes back, the last two are kept, damaged ones are passed over."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedapp.learning.state import StateError
from fedapp.transport import checkpoint

leaves = st.one_of(
    st.booleans(), st.integers(-(2**40), 2**40), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=5),
    st.none(), st.lists(st.integers(0, 9), max_size=3),
    st.integers(0, 4).map(lambda n: np.arange(n, dtype=np.float32)),
    st.just(np.array(2.5)), st.just(np.ones((2, 0, 3), np.int64)),
)  # fmt: skip
keys = st.one_of(st.text("abc./ :", min_size=1, max_size=4), st.integers(0, 30))
states = st.dictionaries(
    st.text("abc./", min_size=1, max_size=4),
    st.recursive(leaves, lambda inner: st.dictionaries(keys, inner, max_size=3), max_leaves=8),
    max_size=4,
)


def same(a: object, b: object) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    return type(a) is type(b) and a == b


@settings(max_examples=60, deadline=None)
@given(states)
def test_any_state_survives_a_checkpoint(state: dict[str, object]) -> None:
    arrays, scalars = checkpoint.flatten(state)
    assert same(checkpoint.unflatten(arrays, json.loads(json.dumps(scalars))), state)


def test_checkpoints_keep_two_and_pass_over_a_damaged_one(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    for server_round in (1, 2, 3):
        checkpoint.save(tmp_path, server_round, {"w": np.full(2, server_round)}, {"best": None})
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / "round-000003.safetensors").write_bytes(b"damaged")
    found = checkpoint.latest(tmp_path)
    assert found is not None and found[0] == 2 and found[1]["w"][0] == 2 and found[2] == {"best": None}
    (tmp_path / "round-000002.safetensors").write_bytes(b"damaged")
    with pytest.raises(StateError, match="cannot be read"):
        checkpoint.latest(tmp_path)


def test_a_state_holds_arrays_and_plain_values_only() -> None:
    with pytest.raises(TypeError, match="not set"):
        checkpoint.flatten({"x": {1, 2}})


def test_a_checkpoint_keeps_the_order_of_arrays(tmp_path: Path) -> None:
    """Sums depend on the order of their terms in the last bits, and safetensors sorts names."""
    state = {"model": {"w": np.ones(1), "b": np.ones(1), "a": np.ones(1)}, "rows": {11: np.ones(1), 2: np.ones(1)}}
    checkpoint.save(tmp_path, 1, state, {})
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert list(found[1]["model"]) == ["w", "b", "a"] and list(found[1]["rows"]) == [11, 2]


def test_a_state_without_arrays_and_other_files_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "round-1.safetensors").write_text("mine")
    for server_round in (9, 10, 11):
        path = checkpoint.save(tmp_path, server_round, {"n": server_round, "none": {}}, {"x": [1]})
    assert path.name == "round-000011.safetensors"
    assert checkpoint.latest(tmp_path) == (11, {"n": 11, "none": {}}, {"x": [1]})
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "round-000010.safetensors", "round-000011.safetensors", "round-1.safetensors",
    ]  # fmt: skip
