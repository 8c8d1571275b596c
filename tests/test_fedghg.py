"""FedGH on Gaussians: worked numbers, the control that is FedGH bit for bit, pooling beside CCVR's, and rho by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import log_softmax

from clients.fedgh import FedGHClient, FedGHHParams
from clients.fedghg import FedGHGClient, FedGHGHParams
from fedapp.core.gaussian import ClassMoments, MomentsPool, moments, pack, to_arrays
from fedapp.core.heads import retrain
from fedapp.core.mixture import Gaussian, between_share, pool
from fedapp.core.robust import UNGUARDED
from fedapp.core.virtual import draw, factorise, gaussian_of, virtual_features
from fedapp.engines.local import RunResult
from fedapp.errors import BadRequest, Impossible
from fedapp.method import Payload, Reply, ServerState
from fedapp.reduce.reader import Policy
from fedapp.reduce.rules_fedghg import BoundedGaussians
from fedapp.reduce.spec import Rows
from fedapp.settings import RobustnessSettings
from strategies.ccvr import statistics as ccvr_statistics
from strategies.fedgh import METHOD as FEDGH
from strategies.fedgh import FedGH, header_step
from strategies.fedghg import METHOD, FedGHG
from tests import handmade
from tests.handmade import asking, guard, refusal
from tests.test_ccvr import asker, calibrate, server
from tests.test_core_gaussian import worked
from tests.test_fedgh import context, head, head_payload, task

CLIENTS: list[ClassMoments] = worked()
"""Three clients of three classes with two features: the worked numbers of the statistics."""


def reply(client: int, of: ClassMoments, cov: str = "diag", counts: bool = False) -> Reply:
    ids = of.classes
    arrays = {"lar": of.means[ids].astype(np.float32), "labels": ids.astype(np.int32)}
    if cov != "none":
        full = [of.cov(c) for c in ids]
        arrays["cov"] = np.array([np.diag(x) if cov == "diag" else pack(x) for x in full], np.float32)
    if counts:
        arrays["counts"] = of.counts[ids].astype(np.int32)
    return Reply(client, int(of.counts.sum()), arrays, {})


def strategy(robust: RobustnessSettings | None = None, seed: int = 0, **hparams: Any) -> FedGHG:
    made = FedGHG(METHOD, FedGHGHParams(**hparams), policy=Policy(robust or UNGUARDED))
    made.context = context(w=np.zeros((3, 2)), seed=seed)
    return made


def after(made: FedGHG, cov: str = "diag", counts: bool = False, clients: Any = CLIENTS) -> ServerState:
    state = made.init(made.context)
    replies = [reply(k, of, cov, counts) for k, of in enumerate(clients)]
    assert [refusal(made, state, r) for r in replies] == [None] * len(replies)
    return made.aggregate(state, 1, iter(replies))


def test_a_cap_holds_for_counts_that_are_sent() -> None:
    for cap, counted in ((2.0, ""), (0.0, "counts"), (1.0, "counts")):
        bounded = BoundedGaussians(Rows("lar", further=("cov",), counted=counted), guard(count_cap=cap))
        given = [reply(k, of, counts=bool(counted)) for k, of in enumerate(CLIENTS)]
        for one in given:
            bounded.add(one)
        found = [of.reply.arrays for of in bounded.result()]
        assert all(arrays.keys() - {"ids", "mean", "count"} == one.arrays.keys() for arrays, one in zip(found, given))
        if counted:
            before, after = ([int(a["counts"].sum()) for a in of] for of in ([r.arrays for r in given], found))
            assert max(after) == 4 < max(before) if cap else after == before  # the median client has 4


# ---- worked numbers ------------------------------------------------------------------------------------------------


def test_worked_headers_of_pooled_means_and_of_the_clients_means() -> None:
    one = {"cov": "none", "header_epochs": 1, "order": "sorted"}
    w, b = head(after(strategy(source="pooled", weights="count", **one), "none", counts=True))
    np.testing.assert_allclose(w, [[-0.004589, -0.024911], [-0.019328, 0.009833], [0.023917, 0.015078]], atol=1e-6)
    np.testing.assert_allclose(b, [-0.000316, -0.000367, 0.000682], atol=1e-6)
    w, b = head(after(strategy(**one), "none"))
    np.testing.assert_allclose(w, [[0.007975, -0.052403], [-0.011968, 0.066035], [0.003993, -0.013633]], atol=1e-6)
    np.testing.assert_allclose(b, [-0.000252, 0.008626, -0.008375], atol=1e-6)


def test_pooling_turned_features_invents_a_correlation_that_no_client_has() -> None:
    x = np.array([[1.0, 0], [2, 0], [3, 0]])
    both = [moments(rows, np.zeros(3, np.int64), 1) for rows in (x, x[:, ::-1].copy())]
    of = [Gaussian(m.means[0], m.cov(0), 3) for m in both]
    np.testing.assert_allclose(of[0].cov, np.diag([1, 0]), atol=1e-12)
    pooled, between, within = pool(of, equal=False)
    np.testing.assert_allclose(pooled.cov, [[1.6, -1.2], [-1.2, 1.6]], atol=1e-12)
    assert pooled.n == 6 and (between, within) == pytest.approx((12, 4))
    assert between_share({0: of}, equal=False) == pytest.approx(12 / 16), "n_k |mu_k - mu|^2 = 6 + 6 of 12 + 4"


# ---- the control ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", ["sample", "client", 2])
def test_without_covariance_it_is_fedgh_of_as_many_passes_bit_for_bit(batch: str | int) -> None:
    """What says whether the covariances are worth anything; with zero variances that travel it is the same."""
    common: dict[str, Any] = {"header_batch": batch, "header_epochs": 5, "header_lr": 0.3}
    server = FedGH(FEDGH, FedGHHParams(**common))
    plain = [reply(k, of, "none") for k, of in enumerate(CLIENTS)]
    expected = server.aggregate(server.init(context(w=np.zeros((3, 2)))), 1, iter(plain))
    points = [moments(of.means[of.classes], of.classes, 3) for of in CLIENTS]
    for state in (after(strategy(cov="none", **common), "none"), after(strategy(**common), clients=points)):
        assert handmade.equal(state["model"], expected["model"]) and np.array_equal(state["loss"], expected["loss"])
    drawn = after(strategy(**common))
    assert not np.array_equal(head(drawn)[0], head(expected)[0])


def test_a_federation_sends_means_and_variances(tiny: Callable[..., RunResult]) -> None:
    common = {"model": "digits-a,digits-b", "final_training": False}
    same, drawn = (tiny(method="fedghg", method_args=f"header_epochs=2 cov={c}", **common) for c in ("none", "diag"))
    rows = same.clients["bytes_up"] / (64 * 4 + 4)
    assert drawn.clients["bytes_up"].equals((rows * (2 * 64 * 4 + 4)).astype(int)) and rows.min() >= 1
    assert 0 < drawn.summary["between_clients"][0] < 1 and same.summary["between_clients"] == [None, None]


# ---- oracles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cov", ["diag", "full"])
def test_draws_have_the_moments_of_each_clients_gaussian(cov: str) -> None:
    made = strategy(cov=cov, header_epochs=8_000)
    answers = [reply(k, of, cov) for k, of in enumerate(CLIENTS)]
    shown = list(made.passes(1, answers, [LARS(r) for r in answers]))
    for k, of in enumerate(CLIENTS):
        for i, c in enumerate(of.classes):
            rows = np.stack([p[k].r[i] for p in shown])
            assert all(p[k].s[i] == c for p in shown[:3])
            expected = of.cov(c) if cov == "full" else np.diag(np.diag(of.cov(c)))
            np.testing.assert_allclose(rows.mean(axis=0), of.means[c], atol=0.06)
            np.testing.assert_allclose(np.cov(rows, rowvar=False), expected, atol=0.09)


def LARS(of: Reply) -> Any:
    from strategies.fedgh import LARs

    order = np.argsort(of.arrays["labels"])
    return LARs(of.arrays["lar"][order].astype(np.float64), of.arrays["labels"][order].astype(np.int64))


def test_the_mean_gradient_of_one_class_in_one_dimension_against_quadrature() -> None:
    """E[(p(z) - e) z] under N(mu, sigma^2) by Gauss-Hermite; the header after one step on all draws."""
    z, weight = np.polynomial.hermite_e.hermegauss(60)
    x, weight = 0.7 + 0.5 * z, weight / weight.sum()
    w, b = np.array([0.4, -0.2]), np.array([0.1, 0.0])
    p = np.exp(w * x[:, None] + b)
    error = p / p.sum(axis=1, keepdims=True) - [1.0, 0.0]
    made = strategy(header_epochs=100_000)
    rows = made.draws((1, 0, 0), Gaussian(np.array([0.7]), np.array([0.25])), (100_000, 1))
    after_w, after_b = w[:, None].copy(), b.copy()
    header_step(after_w, after_b, rows, np.zeros(100_000, np.int64), 1.0)
    np.testing.assert_allclose(w - after_w[:, 0], weight @ (error * x[:, None]), atol=3e-3)
    np.testing.assert_allclose(b - after_b, weight @ error, atol=2e-3)


def test_two_samples_pool_into_their_own_covariance() -> None:
    apart = [Gaussian(np.array([0.0, 1.0]), np.zeros((2, 2))), Gaussian(np.array([2.0, 0.0]), np.zeros((2, 2)))]
    one, between, within = pool(apart, equal=False)
    np.testing.assert_array_equal(one.cov, np.cov([[0.0, 2.0], [1.0, 0.0]]))
    assert (one.n, between, within) == (2, 2.5, 0.0)


def test_pooled_with_counts_is_ccvrs_pooling_and_equal_weights_are_the_mixtures() -> None:
    answers = MomentsPool(3, 2)
    for of in CLIENTS:
        answers.add(to_arrays(of, dtype=np.float64))
    ccvr = answers.moments()
    for c in range(3):
        of = [Gaussian(m.means[c], m.cov(c), int(m.counts[c])) for m in CLIENTS if m.counts[c]]
        one, _, _ = pool(of, equal=False)
        np.testing.assert_allclose(one.mean, ccvr.means[c], atol=1e-12)
        np.testing.assert_allclose(one.cov, ccvr.cov(c), atol=1e-12)
        assert one.n == ccvr.counts[c]
        mixed, between, within = pool(of, equal=True)
        np.testing.assert_allclose(mixed.mean, np.mean([g.mean for g in of], axis=0), atol=1e-12)
        raw = np.mean([g.cov + np.outer(g.mean, g.mean) for g in of], axis=0) - np.outer(mixed.mean, mixed.mean)
        np.testing.assert_allclose(mixed.cov, raw, atol=1e-12)
        assert between + within == pytest.approx(len(of) * np.trace(raw), abs=1e-12)


def overlapping(seed: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Features of four clients through one common extractor: three classes that overlap, in other shares at each."""
    rng = np.random.default_rng(seed)
    found = []
    for shares in ([0.6, 0.3, 0.1], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6], [0.4, 0.3, 0.3]):
        y = rng.choice(3, 80, p=shares)
        spread = np.array([[[1.0, 0.4], [0, 0.8]], [[0.6, 0], [0, 1.2]], [[0.9, -0.5], [0, 0.7]]])[y]
        z = np.array([[0.0, 1], [1.2, 0], [-1, -0.5]])[y] + (spread @ rng.standard_normal((80, 2, 1)))[..., 0]
        found.append((z, y))
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_pooled_over_one_common_extractor_the_last_round_is_ccvrs_retraining(seed: int) -> None:
    """CCVR's own pooling, sampling and re-training on FedGHG's random numbers give its header: only streams differ."""
    m, lr = 40, 0.05
    made = strategy(source="pooled", weights="count", cov="full", header_epochs=m, header_batch="all", header_lr=lr)
    features = overlapping(seed)
    clients = [moments(z, y, 3) for z, y in features]
    w, b = head(after(made, "full", counts=True, clients=clients))

    ccvr, state = server("", context(w=np.zeros((3, 2))))
    statistics = ccvr_statistics(state["model"], ccvr.settings.cov, asking(ccvr, asker(ccvr, features)))[0]
    rows = []
    for c in range(3):
        mean, cov = gaussian_of(statistics, c)
        rows.append(draw(mean, factorise(cov), made.context.rng("gaussians", 1, c).standard_normal((m, 2))))
    z, y = np.stack(rows, axis=1).reshape(-1, 2), np.tile(np.arange(3), m)
    steps = np.arange(3 * m).reshape(m, 3)
    expected_w, expected_b = retrain((np.zeros((3, 2)), np.zeros(3)), z, y, steps, lr, momentum=0.0, weight_decay=0.0)
    np.testing.assert_allclose(w, expected_w, atol=2e-6)
    np.testing.assert_allclose(b, expected_b, atol=2e-6)
    assert np.abs(w).max() > 0.1


@pytest.mark.full
def test_pooled_over_one_common_extractor_it_ends_where_ccvr_ends() -> None:
    """Each with its own draws and optimizer, from its whole server step: the same loss on what it is trained for.

    The header of class means, which knows no spread, does not end there.
    """
    features = overlapping(0)
    clients = [moments(z, y, 3) for z, y in features]
    common: dict[str, Any] = {"source": "pooled", "weights": "count", "header_batch": "all", "header_lr": 0.02}
    ours = head(after(strategy(**common, cov="full", header_epochs=20_000), "full", counts=True, clients=clients))
    means = head(after(strategy(**common, cov="none", header_epochs=20_000), "none", counts=True, clients=clients))
    start = context(w=np.zeros((3, 2)))
    strategy_of_ccvr, _, state = calibrate("samples=6000 weight_decay=0", features, start)
    theirs = strategy_of_ccvr.repair(state).common
    pooled = ccvr_statistics(
        start.initial, strategy_of_ccvr.settings.cov, asking(strategy_of_ccvr, asker(strategy_of_ccvr, features))
    )[0]
    z, y, _ = virtual_features(pooled, np.full(3, 50_000), seed=9)

    def loss(w: NDArray[Any], b: NDArray[Any]) -> float:
        return float(-log_softmax(z @ w.T + b, axis=1)[np.arange(len(y)), y].mean())

    wanted = loss(theirs["head.weight"], theirs["head.bias"])
    gained = np.log(3) - wanted
    assert abs(loss(*ours) - wanted) < 0.02 * gained < 0.2 * gained < loss(*means) - wanted


def test_rho_is_the_share_of_the_variance_between_the_clients_means() -> None:
    """With counts and with equal weights, over the classes of two clients or more: class 2 has one."""
    parts: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for c in (0, 1):
        of = [m for m in CLIENTS if m.counts[c]]
        for equal, found in parts.items():
            n = [1.0 if equal else float(m.counts[c]) for m in of]
            mean = sum(k * m.means[c] for k, m in zip(n, of)) / sum(n)
            b = sum(k * float(((m.means[c] - mean) ** 2).sum()) for k, m in zip(n, of))
            w = sum((1 if equal else k - 1) * float(np.trace(m.cov(c))) for k, m in zip(n, of))
            found.append((b, w))
    for equal, found in parts.items():
        b, w = np.sum(found, axis=0)
        made = strategy(weights="equal" if equal else "count")
        assert after(made, counts=not equal)["between"] == [pytest.approx(b / (b + w), abs=1e-6)]
    same = [moments(np.array([[0.0, 1], [2, 3]]), np.zeros(2, np.int64), 3)] * 2
    assert after(strategy(), clients=same)["between"] == [0.0]
    assert np.isnan(after(strategy(), clients=same[:1])["between"][0]), "one client says nothing"


# ---- refusals ------------------------------------------------------------------------------------------------------


def test_pooling_is_refused_where_the_features_differ_unless_forced() -> None:
    far = [moments(np.array([[0.0, 0], [1, 0]]) + 5 * k, np.zeros(2, np.int64), 3) for k in range(2)]
    with pytest.raises(BadRequest, match=r"9\d% of the variance .* use source=client, or force=true"):
        after(strategy(source="pooled"), clients=far)
    forced = strategy(source="pooled", force=True)
    assert after(forced, clients=far)["between"][0] > 0.9
    near = [moments(np.array([[0.0, 0], [9, 0]]) + k, np.zeros(2, np.int64), 3) for k in range(2)]
    made = strategy(source="pooled")
    first = after(made, clients=near)
    assert first["between"][0] < 0.5 and "pooled_apart" not in made.report(first, {})
    second = made.aggregate(first, 2, iter([reply(k, of) for k, of in enumerate(far)]))
    assert second["between"][1] > 0.9 and made.report(second, {})["pooled_apart"] == [2]


def test_one_liar_does_not_decide_whether_clients_may_be_pooled() -> None:
    near = [moments(np.array([[0.0, 0], [9, 0]]) + 0.1 * k, np.zeros(2, np.int64), 3) for k in range(6)]
    lie = {"labels": np.array([0], "i4"), "lar": np.array([[1e3, 1e3]], "f4"), "cov": np.zeros((1, 2), "f4")}
    answers = [*(reply(k, of) for k, of in enumerate(near)), Reply(6, 2, lie, {})]
    guarded, plain = (strategy(r, source="pooled") for r in (guard(robust="own"), None))
    assert guarded.aggregate(guarded.init(guarded.context), 1, iter(answers))["between"][0] < 0.1
    with pytest.raises(BadRequest, match="100%"):
        plain.aggregate(plain.init(plain.context), 1, iter(answers))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cov": np.array([[1, 0], [0, -1]], np.float32)}, "negative"),
        ({"counts": np.array([1, 0], np.int32)}, "positive whole"),
        ({"counts": np.array([3, 3], np.int32)}, "6 samples from a client of 5"),
    ],
)
def test_bad_replies_are_refused(change: dict[str, Any], words: str) -> None:
    made = strategy(weights="count")
    state = made.init(made.context)
    good = reply(0, CLIENTS[0], counts=True)
    assert refusal(made, state, good) is None
    problem = refusal(made, state, replace(good, arrays={**good.arrays, **change}))
    assert words in str(problem) and isinstance(problem, Impossible) != (words == "negative")
    full = strategy(cov="full")
    given = reply(0, CLIENTS[0], "full").arrays
    assert (
        refusal(full, state, Reply(0, 5, {**given, "cov": np.array([[1, -3, 1], [1, 0, 1]], np.float32)}, {})) is None
    )
    bad = {**given, "cov": np.array([[1, -3, 1], [1, 0, -1]], np.float32)}
    assert "negative" in str(refusal(full, state, Reply(0, 5, bad, {})))


def test_one_liar_is_screened() -> None:
    rng = np.random.default_rng(0)
    honest = [moments(rng.normal(size=(30, 2)) + [c, -c], np.full(30, c), 3) for c in (1, 2) for _ in range(5)]
    replies = [reply(k, of) for k, of in enumerate(honest)]
    wide = {"labels": np.array([1], "i4"), "lar": np.array([[1, -1]], "f4"), "cov": np.full((1, 2), 1e8, "f4")}
    far = {**wide, "lar": np.array([[1e4, 1e4]], "f4")}
    guarded = strategy(guard(robust="own"), header_epochs=1)
    state = guarded.init(guarded.context)
    expected = np.abs(guarded.aggregate(state, 1, iter(replies))["model"]["head.weight"]).max()
    for lie, left_out in ((wide, 0), (far, 1)):
        lies = [*replies, Reply(99, 30, lie, {})]
        found = guarded.aggregate(state, 1, iter(lies))
        assert np.abs(found["model"]["head.weight"]).max() < 2 * expected and found["robust"]["left_out"] == left_out
        plain = strategy(header_epochs=1).aggregate(state, 1, iter(lies))
        assert np.abs(plain["model"]["head.weight"]).max() > 3 * expected


# ---- streams, missing classes, the client --------------------------------------------------------------------------


def test_each_client_and_class_has_a_stream_of_its_own() -> None:
    made = strategy(header_epochs=3)
    answers = [reply(k, of) for k, of in enumerate(CLIENTS)]
    lars = [LARS(r) for r in answers]
    whole, few = list(made.passes(4, answers, lars)), list(made.passes(4, answers[1:], lars[1:]))
    for p, q in zip(whole, few, strict=True):
        assert all(np.array_equal(a.r, b.r) for a, b in zip(p[1:], q, strict=True)), "others' draws play no part"
    longer = next(strategy(header_epochs=9).passes(4, answers, lars))
    assert np.array_equal(longer[0].r, whole[0][0].r)
    other = next(made.passes(5, answers, lars))
    assert not np.array_equal(other[0].r, whole[0][0].r) and not np.array_equal(whole[0][0].r, whole[1][0].r)
    first, second = ((whole[0][0].r[i] - CLIENTS[0].means[i]) / np.sqrt(np.diag(CLIENTS[0].cov(i))) for i in (0, 1))
    assert not np.allclose(first, second, atol=1e-3), "two classes of one client"


def test_nothing_sent_leaves_the_header_and_one_class_is_enough() -> None:
    made = strategy()
    state = made.init(made.context)
    empty = reply(0, ClassMoments(3, 2))
    empty.arrays["cov"] = np.zeros((0, 2), np.float32)
    assert refusal(made, state, replace(empty, num_samples=5)) is None
    for replies in ([], [empty]):
        stays = made.aggregate(state, 1, iter(replies))
        assert handmade.equal(stays["model"], state["model"]) and np.isnan(stays["between"][0])
    assert made.report(stays, {})["between_clients"] == [None]
    moved = made.aggregate(state, 1, iter([reply(2, CLIENTS[2])]))
    assert made.report(moved, {})["classes_absent"] == {"1": [0, 2]} and moved["moved"][0] > 0


@pytest.mark.parametrize("cov", ["diag", "full"])
def test_the_client_sends_fedghs_means_and_the_covariance_of_its_features(cov: str) -> None:
    y = [2, 0, 2, 3, 3, 3, 2, 0, 2, 1]
    hparams = FedGHGHParams(cov=cov, weights="count", min_class_count=2)  # type: ignore[arg-type]
    one = FedGHGClient(task(y), METHOD, hparams)
    arrays, n, metrics = one.train_round(head_payload(), 1)
    plain, _, _ = FedGHClient(task(y), FEDGH, FedGHHParams(min_class_count=2)).train_round(head_payload(), 1)
    assert all(np.array_equal(arrays[name], plain[name]) for name in plain) and n == 10
    assert arrays["counts"].tolist() == [2, 4, 3] and metrics["lar-seconds"] > 0
    z = one.representations().double().numpy()
    for row, c in zip(arrays["cov"], arrays["labels"], strict=True):
        expected = np.cov(z[np.array(y) == c], rowvar=False)
        np.testing.assert_allclose(row, np.diag(expected) if cov == "diag" else pack(expected), atol=1e-5)
    single = FedGHGClient(task([0, 0, 1]), METHOD, FedGHGHParams())
    single.restore(1, head_payload())
    sent, _ = single.after_training(Payload())
    assert sorted(sent) == ["cov", "labels", "lar"] and not sent["cov"][1].any() and sent["cov"][0].any()
