"""`dp` with `secure-sum`: each client adds its share of the noise, and the sum has enough of it in the worst case."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from fedapp import client_app
from fedapp.config import dp_rules, from_flat
from fedapp.core import masks, noise
from fedapp.core.privacy import Joint, Privacy, noised, noised_steps, on_grid, step_of
from fedapp.core.secure_sum import noise_share, threshold
from fedapp.errors import BadRequest
from fedapp.learning.releases import Ledger
from fedapp.method import Reply
from fedapp.tasks.node import Node
from fedapp.transport.secure import HIDDEN, in_sum
from fedapp.transport.traffic import RoundFailed
from tests.test_nodes import THREE, start
from tests.test_nodes import share as share_of_data
from tests.test_secure_sums import go, gone, sites, state_of

__all__ = ["sites"]  # a fixture

UPDATES: dict[str, Any] = {"method": "fedavg", "dp": "client", "clip-update": 0.01, "dp-epsilon": 100.0}
STATISTICS: dict[str, Any] = {"dp": "example", "dp-epsilon": 100.0, "dp-noise": 0.16}


def ledgers(folder: Path) -> Iterator[list[dict[str, Any]]]:
    return (Ledger(p).entries() for p in sorted((folder / "state" / "privacy").glob("*.jsonl")))


# ---- the noise -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one, two", [(1.0, 1.0), (0.7, 2.0), (1.0, 3.0)])
def test_discrete_gaussians_add_up_to_one_within_the_bound(one: float, two: float) -> None:
    """All probabilities, by convolution; far smaller deviations than that of our grid, where the factor is 1."""

    def probabilities(deviation: float) -> np.ndarray:
        y = np.arange(-100, 101)
        weight = np.exp(-(y**2) / (2 * deviation**2))
        return weight / weight.sum()

    both = np.convolve(probabilities(one), probabilities(two), mode="same")[90:111]
    away = np.abs(both / probabilities(math.hypot(one, two))[90:111] - 1).max()
    bound = 5 * math.exp(-2 * math.pi**2 / (1 / one**2 + 1 / two**2))
    assert bound / 100 < away <= bound


@pytest.mark.parametrize("n, dropout, m", [(4, 0.34, 0), (10, 0.34, 2), (20, 0.2, 5)])
def test_the_sum_has_the_noise_of_one_release_in_the_worst_case_and_else_more(n: int, dropout: float, m: int) -> None:
    t, z, size, sensitivity = threshold(n, dropout), 2.0, 6000, 1.5
    privacy = Privacy("example", 8.0, 1e-5, z, summed=n, share=noise_share(n, t, m))
    step = step_of(size, sensitivity, privacy.own)
    moved = sensitivity + 2 * math.sqrt(size) * step  # one unit, and rounding to the grid
    assert (t - m) * (noise.STEPS * step) ** 2 >= (z * moved) ** 2 * (1 - 1e-12)
    source = noise.seeded(n)
    each = [noised_steps(np.zeros(size), sensitivity, privacy.own, source)[0] * step for _ in range(n)]
    one = noised(np.zeros(size), sensitivity, z, source)
    worst, everybody = sum(each[: t - m]), sum(each)  # those that are gone, and those that take theirs away
    assert np.std(worst) == pytest.approx(np.std(one), rel=0.05) == pytest.approx(z * sensitivity, rel=0.05)
    assert np.std(everybody) / np.std(one) == pytest.approx(math.sqrt(n / (t - m)), rel=0.05)
    for total in (worst, everybody):
        assert np.mean(total**4) / np.var(total) ** 2 == pytest.approx(3.0, abs=0.3)
        assert abs(total.mean()) < 4 * np.std(total) / math.sqrt(size)


@pytest.mark.parametrize("n", [2, 3, 1000, 2**20])
def test_a_sum_with_noise_cannot_wrap(n: int) -> None:
    largest = Privacy("client", 1.0, 1e-5, 1.0, summed=n, share=0.5).largest
    assert n * (largest + 2.0**33) < 2.0**63  # the sampler gives nothing of 2^32 or more
    near = np.array([1, -1]) * np.floor(0.999 * largest)
    assert (on_grid(near, 1.0, largest) == near).all()
    words = masks.encode({"x": (near + 2.0**32 * np.sign(near)).astype(np.int64)}, n, 0)
    assert (np.sign(masks.decode(words * np.uint64(n), {"x": (2,)}, 0)["x"]) == [1, -1]).all()
    with pytest.raises(ValueError, match="too large compared with its noise"):
        on_grid(np.array([largest]), 1.0, largest)


def test_a_client_adds_all_of_the_noise_unless_it_knows_how_many_are_in_the_sum() -> None:
    privacy = Privacy("client", 1.0, 1e-5, 3.0)
    for kept in ({}, {"phase": "hidden", "ids": [0, 1, 2], "threshold": 3}):
        assert in_sum(privacy, kept, 0) == privacy and privacy.own == 3.0
    found = in_sum(privacy, {"phase": "offered", "ids": list(range(10)), "threshold": 7}, 3)
    assert (found.noise, found.summed, found.share, found.own) == (3.0, 10, 0.25, 1.5)


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("lost", [(), (2,)])
def test_the_mean_of_updates_has_the_noise_of_the_clients_in_it(lost: tuple[int, ...], tmp_path: Path) -> None:
    """4 clients are asked, and 3 must answer: each adds a third, so that 3 have the noise of one release."""
    values = {**UPDATES, "dp-noise": 0.5}
    for name, bound in (("loud", 1e-2), ("quiet", 1e-5)):
        summary = go(tmp_path / name, gone("train", *lost), **{**values, "clip-update": bound})
        assert summary["dropped"] == len(lost)
    loud, quiet = (state_of(tmp_path / name)["model"] for name in ("loud", "quiet"))
    moved = np.concatenate([(loud[n].astype(float) - quiet[n]).ravel() for n in loud])
    answered = 4 - len(lost)
    expected = 0.5e-2 * math.sqrt(answered / 3) / answered
    assert moved.std() == pytest.approx(expected, rel=0.05)
    if not lost:  # the mean is of models, and not of changes alone
        go(tmp_path / "plain", method="fedavg", **{"clip-update": 1e-5})
        plain = state_of(tmp_path / "plain")["model"]
        for name, array in plain.items():
            np.testing.assert_allclose(quiet[name], array, atol=1e-4)
        assert max(np.abs(array).max() for array in plain.values()) > 0.05
    for entries in ledgers(tmp_path / "loud"):
        assert [(e["noise"], e["summed"], e["share"]) for e in entries] == [(0.5, 4, pytest.approx(1 / 3))]
    privacy = json.loads((tmp_path / "loud" / "summary.json").read_text())["privacy"]
    assert privacy["noise-on"] == "sum" and privacy["colluders"] == 0 and privacy["unit"] == "client"


def test_epsilon_is_that_of_the_sum_and_is_spent_round_by_round(tmp_path: Path) -> None:
    values = {**UPDATES, "dp-epsilon": 4.0, "num-server-rounds": 2, "clients": 5, "secure-colluders": 1}
    summary = go(tmp_path / "run", **values)
    config = from_flat({k: v for k, v in values.items() if k != "secure-colluders"})
    assert config.mechanism is not None
    assert summary["privacy"]["epsilon"] == pytest.approx(4.0, rel=1e-3) and summary["privacy"]["releases"] == 2
    assert summary["privacy"]["noise"] == config.mechanism.noise  # as if each client added all of it
    assert "a sum of 4 clients, 1 of whom may help the server, has" in summary["warnings"][0]
    assert all([e["share"] for e in entries] == [pytest.approx(1 / 3)] * 2 for entries in ledgers(tmp_path / "run"))


@pytest.mark.parametrize(
    "method", ["fed3r", *(pytest.param(m, marks=pytest.mark.full) for m in ("fedncm", "lda", "ccvr"))]
)
def test_statistics_with_little_noise_give_the_head_without(method: str, tmp_path: Path) -> None:
    args = "base=none" + (" cov=sums epochs=20 lr=0.5 samples=50" if method == "ccvr" else "")
    values = {"method": method, "method-args": args, "data-fraction": 0.5}
    exact = go(tmp_path / "exact", **values)
    noisy = go(tmp_path / "noisy", **values, **STATISTICS)
    chance = go(tmp_path / "chance", **values, **{**STATISTICS, "dp-noise": 40.0})
    assert all(r["calibration"]["samples_left_out"] == 0 for r in (exact, noisy, chance))
    found = [r["calibration"]["after"] for r in (exact, noisy, chance)]
    assert found[0] > 0.6 and abs(found[1] - found[0]) < 0.15 and found[2] < 0.4


def test_only_hidden_vectors_leave_a_client(tmp_path: Path) -> None:
    seen: dict[str, set[str]] = {}
    sizes = set()

    def wire(reply: Message) -> Message:
        for name, array in reply.content.array_records.get("arrays", {}).items():
            seen.setdefault(reply.metadata.message_type, set()).add(name)
            sizes.add(array.numpy().size if name == HIDDEN else 0)
        return reply

    go(tmp_path / "run", wire, method="fed3r", **{"method-args": "base=none"}, **STATISTICS)
    assert seen["query.sums"] == {HIDDEN} and max(sizes) == Joint(10, 64, "all").size


def test_what_has_no_noise_is_not_hidden_but_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = client_app.Releaser.release

    def copied(self: Any, *args: Any, **more: Any) -> Any:
        found = release(self, *args, **more)
        self.steps = None
        return found

    monkeypatch.setattr(client_app.Releaser, "release", copied)
    with pytest.raises(RoundFailed, match="no noise was drawn for this sum; reply withheld"):
        go(tmp_path / "run", **UPDATES)


def test_a_repeated_round_draws_and_books_noise_anew(tmp_path: Path) -> None:
    def killed(reply: Message) -> Message:
        if reply.metadata.message_type == "query.unmask":
            raise KeyboardInterrupt
        return reply

    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "run", killed, **UPDATES, **{"dp-noise": 1.0})
    go(tmp_path / "run", **UPDATES, **{"dp-noise": 1.0, "resume": True})
    assert [len(entries) for entries in ledgers(tmp_path / "run")] == [2, 2, 2, 2]


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, words",
    [
        ({**STATISTICS, "method": "fedgh"}, "secure-sum: fedgh needs the reply of each client"),
        ({**STATISTICS, "method": "ccvr", "method-args": "base=none"}, "secure-sum: ccvr .*needs the reply"),
        ({**UPDATES, "method": "scaffold"}, "secure-sum: scaffold needs"),
        ({**UPDATES, "method": "ditto"}, "no form with noise on the whole payload"),
    ],
)
def test_what_has_no_noised_sum_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        from_flat({"secure-sum": True, **values})


def test_a_real_node_must_know_whose_keys_it_uses() -> None:
    config = from_flat({**UPDATES, "secure-sum": True, "protocols": "global"})
    with pytest.raises(BadRequest, match=r"would add only a share of the noise, .*give peers and node-key"):
        Node.parse(share_of_data(0)).check(config)
    node = Node.parse({**share_of_data(0), "peers": "roster.toml", "secure-colluders": 2})
    with pytest.raises(BadRequest, match=r"owner counts on 2 clients that help the server .* this run on 0"):
        node.check(config)
    node.check(config.replaced(secure_colluders=2))


def test_real_nodes_with_keys_of_their_own_release_sums_alone(
    tmp_path: Path, sites: tuple[list[Path], Path], monkeypatch: pytest.MonkeyPatch, replies: list[tuple[str, Reply]]
) -> None:
    monkeypatch.setenv("FEDAPP_STATE", str(tmp_path / "home"))
    files, peers = sites
    nodes = {n: {**c, "node-key": str(files[k]), "peers": str(peers)} for k, (n, c) in enumerate(THREE.items())}
    values = {"dp": "example", "dp-epsilon": 4.0, "protocols": "global", "num-server-rounds": 1, "secure-sum": True}
    summary, _, _ = start(tmp_path, nodes, method="fedncm", **{"method-args": "base=none"}, **values)
    stated = summary["privacy"]
    assert stated["scores"] == "none are sent" and stated["noise-on"] == "sum" and stated["releases"] == 1
    assert stated["epsilon"] == pytest.approx(4.0, rel=1e-3)
    assert all(set(reply.metrics) <= {"num-examples", "dp-epsilon", "dp-releases"} for _, reply in replies)
    with pytest.raises(RoundFailed, match="would spend"):
        start(tmp_path / "again", nodes, method="fedncm", **{"method-args": "base=none"}, **values)


def test_noise_that_is_small_beside_the_model_does_not_fit_the_sum(tmp_path: Path) -> None:
    with pytest.raises(RoundFailed, match="raise clip-update"):
        go(tmp_path / "run", **{**UPDATES, "clip-update": 1e-9, "dp-noise": 0.5})


def test_the_first_line_states_the_share_of_each_client() -> None:
    privacy = Privacy("client", 8.0, 1e-5, 10.0)
    alone = dp_rules.stated(privacy, 650, 100, 20)
    shared = dp_rules.stated(privacy, 650, 100, 20, (66, 2))
    assert "of a client is 255 times" in alone and "mean of 100 clients 25.5 times; from 650" in alone
    assert "of a client is 31.9 times" in shared and "mean of 100 clients 3.19 times; from 319 clients" in shared
    assert "a sum of 66 clients, 2 of whom may help the server, has 10 times the effect of one client" in shared
    example = dp_rules.stated(Privacy("example", 8.0, 1e-5, 10.0), 650, 100, 1, (66, 2))
    assert "noise of 1.25 times the effect of one sample, once, at each of 100 clients; a sum of 66" in example
