"""Fed3R: worked numbers, least squares on all features through the whole message path, any dealing of the samples; what
all heads from sums have in common: composition, refusals, temperature, a given extractor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fedapp import config, registry
from fedapp.core import sums
from fedapp.engines.local import RunResult
from fedapp.errors import BadRequest
from fedapp.learning.evaluation import batched
from fedapp.learning.state import read_safetensors
from fedapp.method import ClientInfo, Payload, Reply
from fedapp.models import build_model, selection
from fedapp.results.predict import read_model
from fedapp.settings import ModelSettings
from fedapp.tasks import simulated
from strategies.fed3r import Fed3RHParams
from tests.closedform import (
    CLIENTS,
    B,
    W,
    answer,
    asker,
    context,
    one_class_each,
    random_data,
    repaired,
    server,
    summed,
    together,
)
from tests.handmade import asking, deterministic, refusal

Tiny = Callable[..., RunResult]
HEADS = ["fed3r", "fedncm", "lda", "fedcof"]


def wide(head: dict[str, np.ndarray]) -> np.ndarray:
    return np.column_stack([head[W], head[B]])


# ---- worked numbers ------------------------------------------------------------------------------------------------


def test_the_head_of_the_worked_example_and_what_normalising_changes() -> None:
    query = np.array([3.6, 4.4, 1])
    plain, divided = (wide(repaired("fed3r", f"normalise={n}")[0]) for n in ("false", "true"))
    np.testing.assert_allclose(plain[0], [-0.010682, -0.219948, 1.213030], atol=1e-6)
    np.testing.assert_allclose(plain @ query, [0.206807, 0.431947, 0.363104], atol=1e-5)
    np.testing.assert_allclose(divided @ query, [0.939146, 2.162224, 2.348106], atol=1e-5)


def test_hyperparameters_reach_the_solution() -> None:
    one = [[0.071165, -0.136142, 0.673331], [-0.109009, 0.165060, 0.122456], [0.105498, 0.037308, -0.232596]]
    np.testing.assert_allclose(wide(repaired("fed3r", "lam=1")[0]), one, atol=1e-6)
    np.testing.assert_allclose(wide(repaired("fed3r", f"relative=true lam={3 / 247}")[0]), one, atol=1e-6)
    bare = repaired("fed3r", "bias=false")[0]
    np.testing.assert_allclose(bare[W][0], [0.179878, -0.036021], atol=1e-6)
    assert not bare[B].any()


def test_weights_of_norm_zero_are_divided_by_the_floor() -> None:
    head = repaired("fed3r", "normalise=true", [([[0, 0]], [0]), ([[0, 0]], [1])])[0]
    assert not head[W].any() and head[B][0] == pytest.approx(1 / 2.01 / 1e-6, rel=1e-5)


# ---- reductions and invariants -------------------------------------------------------------------------------------


def test_any_dealing_of_the_samples_gives_the_same_head() -> None:
    ctx = context(4, 5)
    one = repaired("fed3r", data=random_data(1), ctx=ctx)[0]
    dealt = [random_data(3), random_data(30), random_data(300), one_class_each(random_data(1))]
    solved = []
    for data in dealt:
        strategy, state = server("fed3r", ctx=ctx)
        found = summed(strategy, state, asker(strategy, data))
        solved.append(strategy.rows(found)[0])
        np.testing.assert_allclose(wide(repaired("fed3r", data=data, ctx=ctx)[0]), wide(one), atol=1e-6)
    for rows in solved[1:]:
        np.testing.assert_allclose(rows, solved[0], atol=1e-10)


def test_a_large_penalty_without_bias_and_normalised_is_the_nearest_cosine_mean() -> None:
    ctx, data = context(4, 5), random_data(3)
    found = sums.nearest_mean(answer(server("fed3r", ctx=ctx)[0], *together(data))["sums/b"], "cosine")
    gaps = [
        np.abs(wide(repaired("fed3r", f"normalise=true bias=false lam={lam}", data, ctx)[0]) - found).max()
        for lam in ("1e2", "1e4", "1e8")
    ]
    assert gaps[0] > 5 * gaps[1] > 25 * gaps[2] and gaps[2] < 1e-5


def test_block_after_block_by_the_inversion_lemma_is_the_same_solution() -> None:
    ctx, data = context(4, 5), random_data(6)
    inverse, right = np.eye(6), np.zeros((6, 4))
    for z, y in data:
        h = np.column_stack([z, np.ones(len(y))])
        inverse -= inverse @ h.T @ np.linalg.solve(np.eye(len(y)) + h @ inverse @ h.T, h @ inverse)
        right += h.T @ np.eye(4)[y]
    np.testing.assert_allclose(wide(repaired("fed3r", "lam=1", data, ctx)[0]), (inverse @ right).T, atol=1e-6)


# ---- what all heads from sums have in common -----------------------------------------------------------------------


@pytest.mark.parametrize("method", HEADS)
def test_classes_without_samples_never_win_and_are_named(method: str) -> None:
    head, found = repaired(method, ctx=context(5))
    assert found["classes_unseen"] == [3, 4] and found["samples"] == 10 and found["clients"] == 3
    seen = repaired(method)[0]
    np.testing.assert_allclose(wide(head)[3:] - [0, 0, -1e4], [wide(seen).mean(axis=0)] * 2, atol=1e-3)
    np.testing.assert_array_equal(wide(head)[:3], wide(seen))


@pytest.mark.parametrize("method", HEADS)
def test_small_classes_stay_with_the_client(method: str) -> None:
    head, found = repaired(method, "min_count=2")
    assert found["samples"] == 7 and found["samples_left_out"] == 3 and found["classes_unseen"] == [2]
    kept = [([[1, 2], [2, 1], [3, 3], [0, 4], [1, 5]], [0, 0, 0, 1, 1]), ([[2, 6], [0, 6]], [1, 1])]
    np.testing.assert_array_equal(wide(head), wide(repaired(method, data=kept)[0]))


@pytest.mark.parametrize("method", HEADS)
def test_features_that_are_0_everywhere_give_a_head(method: str) -> None:
    head, _ = repaired(method, data=[(np.zeros((3, 2)), [0, 1, 1]), (np.zeros((2, 2)), [0, 1])])
    assert np.isfinite(wide(head)).all()


def test_rows_of_norm_1_hold_no_class_shares() -> None:
    assert Fed3RHParams().strength(5.0) == 1.0 and Fed3RHParams(normalise=True).strength(5.0) == 0.0


@pytest.mark.parametrize("method", HEADS)
def test_without_any_class_the_model_stays_as_trained(method: str) -> None:
    strategy, before = server(method, "min_count=50")
    after = strategy.finalize(before, asking(strategy, asker(strategy, CLIENTS)))
    assert all(np.array_equal(a, strategy.global_arrays(after)[n]) for n, a in before["model"].items())
    assert strategy.report(after, {})["calibration"]["samples"] == 0


def test_the_factor_is_the_best_on_all_training_rows_and_changes_no_prediction() -> None:
    ctx, data = context(4, 5), random_data(3)
    plain, scaled = (repaired("fed3r", f"scale={t}", data, ctx) for t in ("none", "fit"))
    z, y = together(data)
    logits = z @ plain[0][W].T.astype(float) + plain[0][B]
    losses = sums.scaled_losses(torch.tensor(logits), torch.tensor(y))
    assert scaled[1]["scale"] == sums.SCALES[losses.argmin()] not in (sums.SCALES[0], sums.SCALES[-1])
    assert plain[1]["scale"] == 1
    np.testing.assert_allclose(wide(scaled[0]), scaled[1]["scale"] * wide(plain[0]), rtol=1e-6)


def test_all_clients_decide_on_the_factor() -> None:
    """The last of them alone, whose labels are all wrong, would take the smallest."""
    z, y = together(random_data(1))
    last = z[:3], (y[:3] + 1) % 4
    said = repaired("fed3r", "scale=fit", [(z, y), last], context(4, 5))[1]
    assert said["scale"] > 4 * sums.SCALES[0]
    strategy, state = server("fed3r", "scale=fit", context(4, 5))
    found = summed(strategy, state, asker(strategy, [(z, y), last]))
    rows, seen = strategy.rows(found)[0], np.ones(4, dtype=bool)
    scales = [
        strategy.scale(state["model"], rows, seen, asking(strategy, asker(strategy, d)))
        for d in ([(z, y), last], [last], [last, (z, y)])
    ]
    assert scales[0] == scales[2] != scales[1]


@pytest.mark.parametrize("method", HEADS)
def test_by_default_the_weights_are_as_long_as_those_of_the_trained_head(method: str) -> None:
    """Of the classes with samples; the bias is scaled alike, so no prediction changes."""
    ctx = context(5)
    (plain, _), (scaled, said) = (repaired(method, f"scale={s}", ctx=ctx) for s in ("none", "trained"))
    assert np.linalg.norm(scaled[W][:3]) == pytest.approx(np.linalg.norm(ctx.initial[W][:3]), rel=1e-6)
    np.testing.assert_allclose(wide(scaled)[:3], said["scale"] * wide(plain)[:3], rtol=1e-6, atol=1e-12)
    assert server(method)[0].settings.scale == "trained" and (scaled[B][3:] < -9_000).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a["sums/b"].__setitem__((0, 2), -3), "numbers of samples"),
        (lambda a: [a.update({n: 9 * a[n]}) for n in list(a)], "from a client of 5"),
    ],
)
def test_a_bad_answer_is_dropped_with_its_reason(change: Callable[[Any], Any], words: str) -> None:
    strategy, _ = server("fed3r")
    arrays = answer(strategy, *CLIENTS[0])
    assert refusal(strategy, {}, Reply(0, 5, dict(arrays), {}, kind="query.sums")) is None
    change(arrays)
    assert words in (refusal(strategy, {}, Reply(0, 5, arrays, {}, kind="query.sums")) or "")


@pytest.mark.parametrize("loss", [np.zeros(3), np.full(65, -1.0), np.zeros(65, np.float32), np.full(65, np.nan), None])
def test_bad_losses_are_dropped(loss: Any) -> None:
    strategy, _ = server("fed3r")
    arrays = {} if loss is None else {"sums/loss": loss}
    assert "losses must be" in (refusal(strategy, {}, Reply(0, 5, arrays, {}, kind="query.losses")) or "")
    assert refusal(strategy, {}, Reply(0, 5, {"sums/loss": np.ones(65)}, {}, kind="query.losses")) is None


@pytest.mark.parametrize(
    ("args", "words"),
    [("base=lgfedavg", "does not leave one"), ("base=fed3r", "does not leave one"),
     ("base=none base.mu=1", "none has no hyperparameter 'base.mu'"),
     ("lam=gcv relative=true", "lam=gcv finds the penalty itself: leave relative out")],
)  # fmt: skip
def test_bad_requests_are_found_before_training(args: str, words: str) -> None:
    outer = registry.get("fed3r")
    with pytest.raises(BadRequest, match=words):
        registry.resolve(outer, registry.parse_args(outer, args))


# ---- federations ---------------------------------------------------------------------------------------------------


def test_through_model_client_and_message_it_is_ridge_on_all_features(tiny: Tiny) -> None:
    """Two of three clients a round, as the base trains; all three answer, in evaluation mode, without augmentation."""
    common = {"alpha": 0.3, "fraction_train": 0.67, "augment": "weak", "rounds": 1}
    plain, found = tiny(method="fedavg", **common), tiny(method="fed3r", method_args="scale=fit", **common)
    pd.testing.assert_frame_equal(deterministic(plain.rounds), deterministic(found.rounds), check_exact=True)
    before, after = (read_safetensors(r.out / "models" / "last.safetensors")[0] for r in (plain, found))
    assert {n for n in before if not np.array_equal(before[n], after[n])} == {W, B}
    settings = config.from_flat(config.read_toml(found.out / "config.toml"))
    model = build_model("digits-a", num_classes=10, shape=(1, 8, 8), seed=0)
    selection.merge(model, before)
    z, y = [], []
    for client in range(3):
        task = simulated.simulated_task(settings, client, 3, torch.device("cpu"))
        z.append(batched(model.eval().represent, task.x_train, task.inputs).numpy().astype(np.float64))
        y.append(task.y_train.numpy())
    labels = np.concatenate(y)
    h = np.column_stack([np.concatenate(z), np.ones(len(labels))])
    wanted = np.linalg.solve(h.T @ h + 0.01 * np.eye(65), h.T @ np.eye(10)[labels]).T
    said = found.summary["calibration"]
    np.testing.assert_allclose(wide(after), said["scale"] * wanted, atol=2e-4)
    assert said["samples"] == len(labels) and said["before"] == plain.summary["accuracy"]["global"]["last"]
    assert said["after"] == found.summary["accuracy"]["global"]["last"] > said["before"]
    assert found.summary["bytes_up_query.sums"] == 8 * (65 * 66 // 2 + 10 * 65)
    assert found.summary["bytes_up_query.losses"] == 8 * 65
    assert read_model(found.out / "models" / "last.safetensors", "digits").model.head.weight.shape == (10, 64)


@pytest.mark.parametrize(
    ("rows", "args", "warned"),
    [(24, "", True), (24, "relative=true", True), (24, "lam=5", False), (240, "", False), (6, "", False)],
)
def test_a_small_penalty_near_as_many_samples_as_features_is_warned_of(rows: int, args: str, warned: bool) -> None:
    rng, said = np.random.default_rng(0), list[str]()
    z, y = rng.standard_normal((rows, 23)), np.arange(rows) % 3
    repaired("fed3r", args, [(z, y)], dataclasses.replace(context(3, 23), warn=said.append))
    assert [text.startswith("fed3r: lam = 0.01 is small for 24 samples of 23 features") for text in said] == [
        True
    ] * warned


@pytest.mark.parametrize(
    ("model", "arrays", "weights", "says"),
    [
        ("digits-a", True, "", "random: drawn"),
        ("digits-a", True, "w.pt", "w.pt"),
        ("mine:Net", True, "", "as mine:Net makes it: not trained here"),
        ("mine:Net", False, "", "none: the head is on the data's features"),
    ],
)
def test_a_head_alone_says_whose_features_it_has(model: str, arrays: bool, weights: str, says: str) -> None:
    said, given = list[str](), context()
    clients = tuple(dataclasses.replace(c, model=model) for c in given.clients or (ClientInfo(0, 1, "", 3, {}),))
    initial = {n: a for n, a in given.initial.items() if arrays or not n.startswith("features.")}
    given = dataclasses.replace(given, clients=clients, initial=initial, weights=weights, warn=said.append)
    strategy, _ = server("fed3r", "base=none", given)
    assert strategy.extractor().startswith(says)
    assert [text.startswith("base=none trains nothing") for text in said] == [True] * says.startswith("random")


def test_a_given_extractor_stays_as_it_is_and_a_random_one_is_named(tiny: Tiny) -> None:
    base = tiny(method="fedavg", rounds=1)
    file = base.out / "models" / "last.safetensors"
    given = tiny(method="fed3r", method_args="base=none lam=0.01 scale=trained", rounds=1, weights=str(file))
    bare = tiny(method="fed3r", method_args="base=none", rounds=1)
    after = tiny(method="fed3r", rounds=1)
    was, arrays, same = (read_safetensors(r.out / "models" / "last.safetensors")[0] for r in (base, given, after))
    assert {n for n in was if not np.array_equal(was[n], arrays[n])} == {W, B}
    one, two = (
        r.summary["calibration"]["scale"] for r in (given, after)
    )  # the trained heads differ, and with them this
    np.testing.assert_allclose(wide(arrays) / one, wide(same) / two, rtol=1e-4, atol=1e-6)
    assert given.summary["calibration"]["extractor"] == str(file)
    assert bare.summary["calibration"]["extractor"].startswith("random")
    assert "extractor" not in after.summary["calibration"]
    assert (
        given.summary["bytes_up"] == 0
        and given.summary["calibration"]["after"] == after.summary["calibration"]["after"]
    )
    assert "trained" not in given.summary["accuracy"]


def test_weights_and_frozen_layers_of_a_model_of_the_zoo(tmp_path: Path) -> None:
    model = build_model("digits-a", num_classes=10, shape=(1, 8, 8), seed=1)
    torch.save(model.state_dict(), tmp_path / "w.pt")
    options = ModelSettings(weights=str(tmp_path / "w.pt"), freeze="features")
    other = build_model("digits-a", num_classes=7, shape=(1, 8, 8), seed=2, settings=options)
    fresh = build_model("digits-a", num_classes=7, shape=(1, 8, 8), seed=2)
    for name, value in other.features.state_dict().items():
        assert torch.equal(value, model.features.state_dict()[name])
    assert torch.equal(other.head.weight, fresh.head.weight)
    assert [p.requires_grad for p in other.parameters()] == [False] * (len(list(other.parameters())) - 2) + [True] * 2
    with pytest.raises(BadRequest, match="does not fit the model 'digits-b'"):
        build_model("digits-b", num_classes=7, shape=(1, 8, 8), seed=2, settings=options.replaced(freeze=""))


def test_a_client_answers_nothing_else(tiny: Tiny) -> None:
    method = registry.resolve(registry.get("fed3r"), registry.parse_args(registry.get("fed3r"), ""))
    settings = config.from_flat({"clients": 3, "dataset": "digits", "method": "fed3r"})
    task = simulated.simulated_task(settings, 0, 3, torch.device("cpu"))
    client = method.client(task, method, registry.parse_args(registry.get("fed3r"), ""))
    payload = Payload(common=selection.everything(client.build_model(task.spec(1), None)))
    with pytest.raises(ValueError, match=r"cannot answer 'query\.features'"):
        client.answer_query("features", payload, 1)
    assert method.allows("sums/a") and not method.allows("features/z")


def test_a_base_whose_clients_add_logits_of_their_own_is_warned_of() -> None:
    outer = registry.get("fed3r")
    for base, warned in (("fedrod", True), ("fedavg", False)):
        hparams = registry.parse_args(outer, f"base={base}")
        method = registry.resolve(outer, hparams)
        assert method.warn is not None
        assert ("personal logits" in (method.warn(hparams, "sgd", "none") or "")) is warned


@pytest.mark.parametrize("method", ["fed3r", "fedncm"])
def test_sums_that_hide_single_replies_have_the_shapes_of_what_a_client_sends(method: str) -> None:
    strategy, state = server(method, "scale=fit" if method == "fed3r" else "", context(4, 5))
    sent: dict[str, dict[str, tuple[int, ...]]] = {}
    ask = asker(strategy, [random_data(1)[0]])

    def listening(kind: str, payload: Payload) -> list[Reply]:
        replies = ask(kind, payload)
        sent[kind] = {name: a.shape for name, a in replies[0].arrays.items()}
        return replies

    found = summed(strategy, state, listening)
    if method == "fed3r":
        strategy.scale(state["model"], strategy.rows(found)[0], np.ones(4, dtype=bool), asking(strategy, listening))
    assert list(sent) == (["sums", "losses"] if method == "fed3r" else ["sums"])
    for kind, shapes in sent.items():
        assert {n: a.shape for n, a in strategy.reader.further(f"query.{kind}", state).items()} == shapes
