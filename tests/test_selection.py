"""Which arrays of a model travel, and how they are copied out and back in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedapp.core import names
from fedapp.method import ALL, Payload
from fedapp.models import SplitModel, build_model, selection


class Normed(nn.Module):
    """A model with BatchNorm, and a layer whose name begins as the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 2)
        self.header = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("name", "prefixes", "found"),
    [
        ("head.weight", ("head.",), True),
        ("head.weight", ("head",), True),
        ("head.weight", ("head.weight",), True),
        ("header.weight", ("head.",), False),
        ("header.weight", ("head",), False),
        ("head", ("head",), True),
        ("anything", ("",), True),
        ("anything", (), False),
        ("features.1.bias", ("head.", "features.1."), True),
        ("features.10.bias", ("features.1.",), False),
    ],
)
def test_prefixes_are_whole_components(name: str, prefixes: tuple[str, ...], found: bool) -> None:
    assert names.matches(name, prefixes) is found


def test_a_trunk_without_arrays_is_allowed_unless_nothing_is_left_to_share() -> None:
    bare = SplitModel(name="bare", features=nn.Flatten(), activation=nn.Identity(), head=nn.Linear(3, 2))
    assert selection.shared_names(bare, ALL) == ["head.weight", "head.bias"]
    with pytest.raises(ValueError, match=r"no array under features\., which the method shares: take a method"):
        selection.shared_names(bare, ("features.",))


PARAMETERS = ["features.0.weight", "features.0.bias", "features.1.weight", "features.1.bias"]
STATISTICS = ["features.1.running_mean", "features.1.running_var"]
HEADS = ["head.weight", "head.bias", "header.weight", "header.bias"]


def test_buffers_travel_where_they_are_global_and_counters_never() -> None:
    model = Normed()
    assert selection.float_buffers(model) == set(STATISTICS)
    assert selection.shared_names(model, ("",)) == PARAMETERS + STATISTICS + HEADS
    for buffers in ("local", "drop"):
        assert selection.shared_names(model, ("",), buffers=buffers) == PARAMETERS + HEADS
    assert selection.shared_names(model, ("head.", "features.1.")) == PARAMETERS[2:] + STATISTICS + HEADS[:2]
    assert selection.shared_names(model, iter(["head."])) == HEADS[:2]
    model.register_buffer("constant", torch.ones(2), persistent=False)
    assert selection.float_buffers(model) == set(STATISTICS), "what is not stored is neither sent nor copied"


@pytest.mark.parametrize("prefixes", [("heads.",), ("head.", "feature.")])
def test_a_prefix_that_matches_nothing_is_an_error(prefixes: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=rf"'{prefixes[-1]}' matches no array of the model Normed"):
        selection.shared_names(Normed(), prefixes)


def test_merge_is_the_inverse_of_extract() -> None:
    a, b = Normed(), Normed()
    a.features[1].num_batches_tracked.fill_(7)
    selection.merge(b, selection.everything(a))
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
    assert int(b.features[1].num_batches_tracked) == 7
    assert all(p.requires_grad and p.grad is None for p in b.parameters())


def test_merge_changes_the_named_arrays_alone_and_shares_no_memory() -> None:
    model = Normed()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bias = np.array([1.0, 2.0], np.float32)
    selection.merge(model, {"head.bias": bias})
    bias[:] = 0
    assert model.head.bias.tolist() == [1.0, 2.0]
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items() if n != "head.bias")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"nope": np.ones(1)}, "no array named 'nope'"),
        ({"head.bias": np.ones(3, np.float32)}, r"'head.bias' has shape \(3,\), but the model needs \(2,\)"),
        ({"head.bias": np.ones((2, 1), np.float32)}, "shape"),
        ({"head.bias": np.ones(2, np.int64)}, "'head.bias' has dtype int64, but the model needs torch.float32"),
        ({"features.1.num_batches_tracked": np.array(1.5)}, "has dtype float64, but the model needs torch.int64"),
    ],
)
def test_merge_is_strict(arrays: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        selection.merge(Normed(), arrays)


def test_merge_takes_any_float_dtype_and_any_order() -> None:
    model = Normed()
    weight = np.asfortranarray(np.arange(8.0).reshape(2, 4))
    selection.merge(model, {"head.weight": weight})
    assert model.head.weight.dtype == torch.float32
    assert model.head.weight.tolist() == weight.tolist()


def test_extract_copies_channels_last_weights_contiguous() -> None:
    model = build_model("digits-a", num_classes=10, shape=(1, 8, 8), seed=0)
    arrays = selection.everything(model)
    assert list(arrays) == list(model.state_dict())
    assert all(a.flags.c_contiguous for a in arrays.values())
    before = next(model.parameters()).detach().clone()
    assert np.array_equal(arrays["features.conv1.weight"], before.numpy())
    for a in arrays.values():
        a[...] = 0
    assert torch.equal(before, next(model.parameters()))


def test_extract_returns_the_named_arrays_in_their_own_dtype() -> None:
    model = Normed()
    arrays = selection.extract(model, ["features.1.num_batches_tracked", "head.bias"])
    assert list(arrays) == ["features.1.num_batches_tracked", "head.bias"]
    assert arrays["features.1.num_batches_tracked"].dtype == np.int64 and arrays["head.bias"].dtype == np.float32


def test_several_models_in_one_payload_come_back_in_numeric_order() -> None:
    one, two, plain = (np.zeros(k) for k in (1, 2, 3))
    arrays = {names.numbered("x/", 10, "a/b"): one, "x/2/head.bias": two, "x/2/a": one, "features.0": plain}
    assert "x/10/a/b" in arrays
    found, models = names.split_numbered("x/", Payload(arrays))
    assert list(found.all()) == ["features.0"] and found.arrays["features.0"] is plain
    assert [list(m) for m in models] == [["head.bias", "a"], ["a/b"]]
    assert models[0]["head.bias"] is two and models[1]["a/b"] is one


def test_what_is_no_model_array_is_taken_out_of_a_payload() -> None:
    a, b, c, d = (np.zeros(k) for k in (1, 2, 3, 4))
    payload = Payload({"x/head.bias": a, "head.x/": b}, {"x/one": c, "x.": d}, {"round": 3})
    rest, found = names.split(payload, "x/")
    assert rest.arrays == {"head.x/": b} and rest.common == {"x.": d} and rest.scalars == {"round": 3}
    assert list(found) == ["one", "head.bias"] and found["one"] is c and found["head.bias"] is a
    assert len(payload.all()) == 4, "the payload itself stays whole"
    assert names.under("x/", payload.arrays) == {"head.bias": a}
