"""State, checkpoints, records, selection and sampling."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedapp.learning.state import ClientStore, StateError
from fedapp.method import Payload
from fedapp.models import build_model
from fedapp.sampling import rng, sample_clients, torch_generator
from fedapp.transport import checkpoint, selection
from fedapp.transport.local_grid import LocalGrid
from fedapp.transport.records import Encoder, payload_of, reject, reply_content, reply_of

# ---- state -----------------------------------------------------------------------------------------------------------


def store(folder: Path, run: str = "aa", method: str = "m", warm: bool = False) -> ClientStore:
    return ClientStore(folder / "3", method, run, warm)


def test_state_survives_and_rolls_back(tmp_path: Path) -> None:
    s = store(tmp_path)
    assert s.load(before=1) is None
    for server_round in (1, 2, 5):
        s.save(server_round, {"x": np.full(3, server_round, np.float32), "n": np.array(7), "empty": np.zeros((0, 4))})
    newest = s.load(before=6)
    assert newest is not None and newest.round == 5 and newest.arrays["x"][0] == 5
    assert newest.arrays["n"].shape == () and newest.arrays["empty"].shape == (0, 4)
    before = s.load(before=5)
    assert before is not None and before.round == 2
    assert len(list((tmp_path / "3").iterdir())) == 2, "the last two rounds are kept"
    s.save(3, {"x": np.zeros(1, np.float32)})
    kept = sorted(int(p.name.split(".")[1]) for p in (tmp_path / "3").iterdir())
    assert kept == [2, 3], "what was rolled back is dropped"


def test_state_is_keyed_by_run_and_method(tmp_path: Path) -> None:
    store(tmp_path).save(4, {"x": np.ones(1)})
    assert store(tmp_path, run="bb").load(before=1) is None
    warm = store(tmp_path, run="bb", warm=True).load(before=1)
    assert warm is not None and warm.round == 0
    with pytest.raises(StateError, match="was written by the method 'm', not 'other'"):
        store(tmp_path, method="other").load(before=9)


def test_damaged_state_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    path = store(tmp_path).save(1, {"x": np.ones(100)})
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(StateError, match="cannot be read"):
        store(tmp_path).load(before=2)


def test_an_interrupted_write_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s = store(tmp_path)
    s.save(1, {"x": np.ones(3)})

    def broken(*args: object, **kwargs: object) -> None:
        Path(str(args[1])).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("fedapp.learning.state.save_file", broken)
    with pytest.raises(OSError, match="disk full"):
        s.save(2, {"x": np.zeros(3)})
    assert [p.name for p in (tmp_path / "3").iterdir()] == ["aa.000001.safetensors"]


# ---- checkpoints -----------------------------------------------------------------------------------------------------

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


# ---- records ---------------------------------------------------------------------------------------------------------


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


def test_control_values_are_plain() -> None:
    assert dict(ConfigRecord({"a": True})) == {"a": True}


# ---- selection -------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """A model with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 2)
        self.header = nn.Linear(2, 2)


def test_prefixes_buffers_and_integer_counters() -> None:
    model = Normed()
    everything = selection.shared_names(model, ("",))
    assert "features.1.running_mean" in everything and "features.1.num_batches_tracked" not in everything
    assert "features.1.running_mean" not in selection.shared_names(model, ("",), buffers="local")
    assert selection.shared_names(model, ("head.",)) == ["head.weight", "head.bias"]
    with pytest.raises(ValueError, match=r"'heads\.' matches no array"):
        selection.shared_names(model, ("heads.",))


def test_merge_is_strict_and_the_inverse_of_extract() -> None:
    a, b = Normed(), Normed()
    selection.merge(b, selection.everything(a))
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
    with pytest.raises(ValueError, match="no array named"):
        selection.merge(a, {"nope": np.ones(1)})
    with pytest.raises(ValueError, match="shape"):
        selection.merge(a, {"head.bias": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match="dtype"):
        selection.merge(a, {"head.bias": np.ones(2, np.int64)})


def test_extract_copies_channels_last_weights_contiguous() -> None:
    model = build_model("digits-a", num_classes=10, channels=1, size=8, seed=0)
    arrays = selection.everything(model)
    assert all(a.flags.c_contiguous for a in arrays.values())
    before = next(model.parameters()).detach().clone()
    for a in arrays.values():
        a[...] = 0
    assert torch.equal(before, next(model.parameters()))


# ---- sampling --------------------------------------------------------------------------------------------------------


def test_draws_are_functions_of_their_names() -> None:
    assert rng(1, "a", 2, 3).random() == rng(1, "a", 2, 3).random()
    values = {rng(s, p, *n).random() for s in (0, 1) for p in ("a", "b") for n in ((0,), (1,), (0, 1), ())}
    assert len(values) == 16
    one = torch.rand(3, generator=torch_generator(1, "a", 2))
    assert torch.equal(one, torch.rand(3, generator=torch_generator(1, "a", 2)))


@given(st.integers(1, 200), st.floats(0.01, 1.0), st.integers(1, 50))
def test_participants(total: int, fraction: float, server_round: int) -> None:
    ids = list(range(100, 100 + total))
    chosen = sample_clients(3, server_round, ids[::-1], fraction)
    assert chosen == sorted(set(chosen)) and set(chosen) <= set(ids)
    assert len(chosen) == max(1, int(fraction * total + 0.5))
    assert chosen == sample_clients(3, server_round, ids, fraction)


def test_every_client_is_drawn_about_equally_often() -> None:
    counts = np.zeros(20)
    for server_round in range(1, 2001):
        for c in sample_clients(0, server_round, range(20), 0.25):
            counts[c] += 1
    expected = 2000 * 0.25
    chi2 = float(((counts - expected) ** 2 / (expected * 0.75)).sum())
    assert chi2 < 43.8, "chi-square with 19 degrees of freedom, 0.1 %"
