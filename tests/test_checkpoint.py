"""Server checkpoints: any state comes back, the last three are kept, damaged ones are set aside."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedapp.errors import BadRequest
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


def three(folder: Path, **identity: str) -> None:
    for server_round in (1, 2, 3, 4):
        checkpoint.save(folder, server_round, {"w": np.full(2, server_round)}, {"best": None}, identity)


def damage(folder: Path, *rounds: int) -> None:
    for server_round in rounds:
        path = folder / f"round-{server_round:06d}.safetensors"
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # one bit of an array


def test_checkpoints_keep_three_and_pass_over_a_damaged_one(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    three(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert len(before) == 3
    for bad, round_ in ((4, 3), (3, 2)):
        damage(tmp_path, bad)
        found = checkpoint.latest(tmp_path)
        assert found is not None and found[0] == round_ and found[1]["w"][0] == round_ and found[2] == {"best": None}
    damage(tmp_path, 2)
    with pytest.raises(StateError, match="cannot be read"):
        checkpoint.latest(tmp_path)
    assert sorted(tmp_path.iterdir()) == before, "figures that read a run change nothing"


@pytest.mark.parametrize(
    ("bad", "goes_on", "words"),
    [((), 4, ""), ((4,), 3, "round 4 is lost"), ((3, 4), 2, "rounds 3 to 4 are lost"), ((3,), 4, "")],
)
def test_damaged_checkpoints_are_set_aside_and_named(
    bad: tuple[int, ...], goes_on: int, words: str, tmp_path: Path
) -> None:
    three(tmp_path)
    damage(tmp_path, *bad)
    found, lost = checkpoint.recover(tmp_path)
    assert found is not None and found[0] == goes_on and found[1]["w"].tolist() == [goes_on] * 2
    aside = sorted(p.name for p in tmp_path.iterdir() if p.name.endswith(".damaged"))
    assert aside == [f"round-{r:06d}.safetensors.damaged" for r in bad if r > goes_on]
    assert [name for name in aside if not any(name in line for line in lost)] == []
    assert (not lost) if not words else f"goes on from round {goes_on}: {words}" in lost[-1]


def test_no_good_checkpoint_is_an_error_every_time(tmp_path: Path) -> None:
    assert checkpoint.recover(tmp_path) == (None, [])
    three(tmp_path)
    damage(tmp_path, 2, 3, 4)
    for _ in range(2):
        with pytest.raises(BadRequest, match=r"no checkpoint in .* can be read .* put good copies"):
            checkpoint.recover(tmp_path)


@pytest.mark.parametrize("field", ["method", "run", "federation"])
def test_a_checkpoint_of_another_run_is_refused_and_stays(field: str, tmp_path: Path) -> None:
    identity = {"method": "fedavg", "run": "aa", "federation": "f"}
    three(tmp_path, **identity)
    assert checkpoint.recover(tmp_path, identity)[0] is not None
    with pytest.raises(
        BadRequest, match=rf"000004.safetensors: {field} is '{identity[field]}', expected 'x'; it is of"
    ):
        checkpoint.recover(tmp_path, {**identity, field: "x"})
    (tmp_path / "round-000004.safetensors").rename(tmp_path / "round-000009.safetensors")
    with pytest.raises(BadRequest, match="round is '4', expected '9'"):
        checkpoint.recover(tmp_path, identity)
    assert not list(tmp_path.glob("*.damaged"))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_state_that_is_not_finite_is_not_written(value: float, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"model": {"w": np.ones(2)}}, {})
    state = {"model": {"w": np.array([1.0, value])}, "curve": np.array([np.nan])}
    with pytest.raises(StateError, match=r"after round 2 contains NaN or infinity in 'model.w'"):
        checkpoint.save(tmp_path, 2, state, {}, records=("curve",))
    assert [p.name for p in tmp_path.iterdir()] == ["round-000001.safetensors"]
    checkpoint.save(tmp_path, 2, {**state, "model": {"w": np.ones(2), "n": np.arange(2)}}, {}, records=("curve",))


def test_checkpoints_are_private_and_parts_of_a_killed_writer_go(tmp_path: Path) -> None:
    for name in (".round-000001.safetensors.abc.part", ".tmpa1B2c3", ".mine", "tmpa1B2c3"):
        (tmp_path / name).write_text("half")
    path = checkpoint.save(tmp_path, 1, {"w": np.ones(1)}, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == [".mine", path.name, "tmpa1B2c3"]
    assert path.stat().st_mode & 0o777 == 0o600 and tmp_path.stat().st_mode & 0o777 == 0o700


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
    for server_round in (8, 9, 10, 11):
        path = checkpoint.save(tmp_path, server_round, {"n": server_round, "none": {}}, {"x": [1]})
    assert path.name == "round-000011.safetensors"
    assert checkpoint.latest(tmp_path) == (11, {"n": 11, "none": {}}, {"x": [1]})
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *(f"round-{r:06d}.safetensors" for r in (9, 10, 11)), "round-1.safetensors",
    ]  # fmt: skip
