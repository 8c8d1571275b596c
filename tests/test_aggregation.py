"""What every server must do with replies, by real clients: aggregation is pure, does not depend on the order of the
replies or on a checkpoint in between, changes nothing without replies, and malformed replies are refused.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedapp import registry
from fedapp.errors import Impossible
from fedapp.method import Array, Payload, Reply, ServerState
from fedapp.transport import checkpoint
from tests.handmade import SmallFederation, asking, refusal

ONE_BATCH = {"fedgh": "header_batch=all", "fedghg": "header_batch=all", "fedtgp": "server_batch=64 server_epochs=3"}
"""Servers that train: with one batch a step their SGD does not depend on the order either."""
FORMS = [
    ("fedclassavg", "share=none"), ("fedclassavg", "share=all"), ("cwfedavg", "layers=all"),
    ("cwfedavg", "dist=empirical tau=0.5"), ("fedgh", "mode=frozen"), ("ccvr", "base=fedavgm dtype=float64"),
    ("ccvr", "cov=sums"), ("ccvr", "oracle=true"), ("fed3r", "scale=fit"), ("fedavgm", "nesterov=true"),
    ("lgfedavg", "average=plain"), ("fedproto", "average=count down=all"), ("ktpfl", "share=weights"),
    ("ktpfl", "step=fixed coefficients=free"), ("fml", "average=samples"), ("fedkd", "average=samples"),
    ("fd", "output=logits include_self=true down=all"), ("fedamp", "form=distance"), ("fedfomo", "models=2 epsilon=0"),
    ("fedfomo", "baseline=after"), ("cfl", "start_round=0 smooth=1 r1=1 r2=0 gamma=0 min_size=1"),
    ("ifca", "clusters=3 trunk=shared"), ("fednh", "weights=samples"), ("scaffold", "weights=samples server_lr=0.5"),
    ("fedbabu", "weights=uniform"), ("fedghg", "source=pooled weights=count cov=full force=true header_batch=all"),
    ("fedper", "share=features.conv1"), ("fedrep", "average=plain"), ("fedpac", "combine=own"),
]  # fmt: skip
SERVERS = [(method, ONE_BATCH.get(method, "")) for method in registry.discover()] + FORMS


@functools.cache
def trained(method: str, args: str) -> tuple[SmallFederation, list[Reply], ServerState]:
    """A federation, the replies of clients 0, 1 and 3 in round 1, and the state after it."""
    federation = SmallFederation(method, args)
    replies = federation.replies(federation.state, clients=(0, 1, 3))
    return federation, replies, federation.strategy.aggregate(federation.state, 1, iter(replies))


@functools.cache
def second(method: str, args: str) -> list[Reply]:
    """The replies of all clients in round 2, when client 2 takes part for the first time."""
    federation, _, state = trained(method, args)
    return federation.replies(state, 2)


def parts(of: Any) -> tuple[dict[str, Array], dict[str, Any]]:
    """The arrays and the plain values of a state, a payload or a reply."""
    if isinstance(of, Payload):
        of = {"all": of.all(), "scalars": dict(of.scalars)}
    return checkpoint.flatten({"arrays": of.arrays, "metrics": dict(of.metrics)} if isinstance(of, Reply) else of)


def assert_same(one: Any, two: Any, **tolerance: float) -> None:
    """Equal, bit for bit where no tolerance is given."""
    (arrays, values), (others, more) = parts(one), parts(two)
    assert arrays.keys() == others.keys() and values.keys() == more.keys()
    for name, array in arrays.items():
        assert array.dtype == others[name].dtype
        np.testing.assert_allclose(others[name], array, **{"rtol": 0, "atol": 0, **tolerance}, err_msg=name)
    for name, value in values.items():
        numbers = isinstance(value, float | list) and tolerance
        assert more[name] == (pytest.approx(value, rel=1e-4, abs=1e-5) if numbers else value), name


def sent(federation: SmallFederation, state: ServerState, clients: Sequence[int] = (0, 1, 2, 3, 9)) -> Iterator[Any]:
    """The payloads of round 3; client 9 is new."""
    yield from (payload for _, payload in federation.strategy.send_each(state, 3, clients))


@pytest.mark.parametrize(("method", "args"), SERVERS)
@settings(max_examples=4)
@given(order=st.permutations(range(4)), absent=st.sampled_from([None, 0, 2]))
def test_aggregation_is_pure_and_does_not_depend_on_the_order_of_replies(
    method: str, args: str, order: list[int], absent: int | None
) -> None:
    federation, _, state = trained(method, args)
    replies, strategy = second(method, args), federation.strategy
    before, given_before = copy.deepcopy(state), copy.deepcopy(replies)
    inner, shuffled = ([replies[k] for k in ids if k != absent] for ids in (range(4), order))
    one, two = (strategy.aggregate(state, 2, iter(r)) for r in (inner, shuffled))
    for a, b in zip(sent(federation, one), sent(federation, two), strict=True):
        assert_same(a, b, rtol=2e-5, atol=3e-6)
    assert_same(before, state)
    for reply, kept in zip(replies, given_before, strict=True):
        assert_same(kept, reply)


@pytest.mark.parametrize(("method", "args"), SERVERS)
def test_a_server_goes_on_from_a_checkpoint_bit_for_bit(method: str, args: str, tmp_path: Path) -> None:
    federation, _, state = trained(method, args)
    checkpoint.save(tmp_path, 1, state, {}, None, federation.strategy.records)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    straight, resumed = federation.strategy, federation.server()
    assert_same(straight.report(state, {}), resumed.report(found[1], {}))
    after, again = (
        s.aggregate(of, 2, iter(second(method, args))) for s, of in ((straight, state), (resumed, found[1]))
    )
    assert_same(after, again)
    for a, b in zip(sent(federation, after), sent(federation, again), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize(("method", "args"), [s for s in SERVERS if s[0] != "ktpfl"])
def test_without_replies_clients_get_what_they_would_have_got(method: str, args: str) -> None:
    """Not for KT-pFL, whose server takes another step on the last predictions."""
    federation, _, state = trained(method, args)
    for of in (federation.state, state):
        for a, b in zip(sent(federation, of), sent(federation, federation.strategy.aggregate(of, 2, [])), strict=True):
            assert_same(a, b)


AFTER = [(m, a) for m, a in SERVERS if m in ("ccvr", "pccvr", "fedncm", "fed3r", "lda", "fedcof")]


@pytest.mark.parametrize(("method", "args"), AFTER)
def test_a_repair_is_pure_does_not_depend_on_the_order_of_answers_and_can_be_stored(
    method: str, args: str, tmp_path: Path
) -> None:
    """A second repair, and a round after it, start from the trained head."""
    federation, _, state = trained(method, args)
    strategy, before = federation.strategy, copy.deepcopy(state)

    def ask(order: Sequence[int], of: ServerState = state) -> ServerState:
        def query(kind: str, payload: Payload) -> list[Reply]:
            return [federation.reply(k, 2, payload, of, kind) for k in order]

        return strategy.finalize(of, asking(strategy, query))

    one, two = ask(range(4)), ask([2, 0, 3, 1])
    for a, b in zip(sent(federation, one), sent(federation, two), strict=True):
        assert_same(a, b, rtol=1e-3, atol=1e-4)
    assert_same(before, state)
    assert_same(one, ask(range(4), one))
    later = second(method, args)
    assert_same(strategy.aggregate(state, 2, iter(later)), strategy.aggregate(one, 2, iter(later)))
    changed = {n for n, a in strategy.global_arrays(one).items() if not np.array_equal(a, state["model"][n])}  # type: ignore[union-attr]
    assert changed == {"head.weight", "head.bias"}
    checkpoint.save(tmp_path, 2, one, {}, None, strategy.records)
    found = checkpoint.latest(tmp_path)
    assert found is not None and strategy.report(found[1], {}) == strategy.report(one, {})


# ---- malformed replies -----------------------------------------------------------------------------------------------


def malformed(array: Array) -> Iterator[Array | None]:
    """A missing array, one row too many, another axis, another kind of numbers."""
    yield None
    yield np.concatenate([array, array[:1]])
    yield array[None]
    yield array.astype(np.int64 if array.dtype.kind == "f" else np.float32)


def labels(array: Array, *others: int) -> Array:
    """Labels with other values at the end."""
    return np.concatenate([array[: -len(others)], np.array(others, array.dtype)])


FURTHER = {
    "fedproto": "average=count", "cwfedavg": "dist=empirical", "fedghg": "weights=count cov=full",
}  # fmt: skip
"""Arguments with which clients send more arrays."""
OWN_CHECKS = ("cwfedavg", "fedproto", "ktpfl", "fedkd", "fedpac")
"""Methods that check the form of some arrays by themselves; a client is not blocked for such a reply at once."""


@pytest.mark.parametrize("method", registry.discover())
def test_malformed_arrays_are_refused(method: str) -> None:
    """The arrays besides the model's; the shapes of the model's own are checked as messages arrive."""
    federation, (_, reply, _), state = trained(method, FURTHER.get(method, ""))
    strategy, shared = federation.strategy, tuple(federation.method.up_prefixes(federation.hparams))
    asked = [(reply, federation.state)]

    def query(kind: str, payload: Payload) -> list[Reply]:
        answers = [federation.reply(k, 2, payload, state, kind) for k in range(4)]
        asked.append((answers[0], state))
        return answers

    strategy.finalize(state, asking(strategy, query))
    for good, of in asked:
        assert refusal(strategy, of, good) is None
        model = [n for n in good.arrays if good.kind == "train" and n.startswith(shared)]
        wrong = [(name, bad) for name in good.arrays.keys() - model for bad in malformed(good.arrays[name])]
        if "labels" in good.arrays:
            wrong += [("labels", labels(good.arrays["labels"], *others)) for others in ((10,), (-1,), (9, 9))]
        for name, bad in [*wrong, ("other", np.ones(1, np.float32))]:
            arrays = {k: a for k, a in {**good.arrays, name: bad}.items() if a is not None}
            found = refusal(strategy, of, replace(good, arrays=arrays))
            assert found and (isinstance(found, Impossible) or name == "other" or method in OWN_CHECKS), (name, bad)
