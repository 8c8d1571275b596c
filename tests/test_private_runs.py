"""Runs with `dp`: what leaves a client, what its ledger says, what the summary states, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedapp import client_app, registry
from fedapp.config import check_node, dp_rules, from_flat
from fedapp.core.privacy import Joint
from fedapp.core.sums import FeatureSums
from fedapp.engines import local
from fedapp.engines.local import RunResult
from fedapp.errors import BadRequest
from fedapp.federation.hooks.training import Checkpoint, PrivacySpent
from fedapp.learning.releases import Ledger
from fedapp.method import Reply
from fedapp.models import build_model
from fedapp.tasks import simulated
from fedapp.tasks.node import Node, node_task
from fedapp.transport.ledger import StateLedger
from fedapp.transport.traffic import RoundFailed
from tests.test_nodes import THREE, share, start

Tiny = Callable[..., RunResult]
EXAMPLE: dict[str, Any] = {"dp": "example", "rounds": 1, "method_args": "base=none", "dp_test": True}


def ledgers(folder: Path) -> dict[int, list[dict[str, Any]]]:
    return {int(p.name.split("-")[0]): Ledger(p).entries() for p in sorted((folder / "privacy").glob("*.jsonl"))}


# ---- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("method", ["fedncm", "fed3r", "lda", "ccvr"])
def test_statistics_with_little_noise_give_the_head_without(method: str, tiny: Tiny, no_page: Any) -> None:
    args = "base=none" + (" epochs=20 lr=0.5 samples=50" if method == "ccvr" else "")
    exact = tiny(method=method, rounds=1, method_args=args)
    noisy = tiny(**{**EXAMPLE, "method": method, "method_args": args, "dp_epsilon": 100.0, "dp_noise": 0.16})
    chance = tiny(**{**EXAMPLE, "method": method, "method_args": args, "dp_epsilon": 0.05})
    found = [r.summary["calibration"]["after"] for r in (exact, noisy, chance)]
    assert found[0] > 0.6 and abs(found[1] - found[0]) < 0.15 and found[2] < 0.4


def test_every_class_is_sent_and_one_release_is_booked(
    tiny: Tiny, no_page: Any, replies: list[tuple[str, Reply]]
) -> None:
    found = tiny(method="fed3r", partition="pathological", classes_per_client=2, **{**EXAMPLE, "dp_epsilon": 2.0})
    sent = [r for kind, r in replies if kind == "query.sums"]
    assert len(sent) == 3
    for reply in sent:
        assert set(reply.arrays) == {"sums/count", "sums/sum", "sums/square"}
        assert (reply.arrays["sums/count"] != 0).all() and (reply.arrays["sums/sum"] != 0).all()
    assert {k: [e["what"] for e in v] for k, v in ledgers(found.out / "state").items()} == {
        k: ["sums"] for k in range(3)
    }
    privacy = found.summary["privacy"]
    assert privacy["unit"] == "example" and privacy["releases"] == 1 and privacy["delta"] == 1e-5
    assert privacy["epsilon"] is None and privacy["test"] == "test noise, no privacy"
    assert "TEST NOISE, no privacy" in found.summary["warnings"][0]


def test_what_is_released_is_the_sums_of_unit_features_with_the_stated_noise(
    tiny: Tiny, no_page: Any, replies: list[tuple[str, Reply]], monkeypatch: pytest.MonkeyPatch
) -> None:
    exact: dict[int, Any] = {}
    release = client_app.Releaser.release

    def spy(self: Any, values: Any, sensitivity: float, what: str) -> Any:
        exact[len(exact)] = (values, sensitivity)
        return release(self, values, sensitivity, what)

    monkeypatch.setattr(client_app.Releaser, "release", spy)
    tiny(method="fed3r", **{**EXAMPLE, "dp_noise": 2.0, "dp_epsilon": 100.0})
    sent = [r for kind, r in replies if kind == "query.sums"]
    joint = Joint(10, 64, "all")
    for reply, (values, sensitivity) in zip(sent, exact.values()):
        assert sensitivity == joint.sensitivity
        parts = joint.parts(values)
        assert parts["count"].sum() == reply.num_samples
        diagonal = np.cumsum([0, *range(64, 1, -1)])
        assert parts["square"][diagonal].sum() == pytest.approx(reply.num_samples, rel=1e-5)  # trace = sum of norms
        noise = joint.vector({n.removeprefix("sums/"): a for n, a in reply.arrays.items()}) - values
        assert noise.std() == pytest.approx(2.0 * sensitivity, rel=0.05)


def test_a_seed_repeats_test_noise_and_never_real_noise(
    tiny: Tiny, no_page: Any, replies: list[tuple[str, Reply]]
) -> None:
    for test in (True, True, False, False):
        tiny(method="fedncm", clients=2, **{**EXAMPLE, "dp_test": test})
    first, second, third, fourth = np.concatenate(
        [r.arrays["sums/sum"].ravel() for kind, r in replies if kind == "query.sums"]
    ).reshape(4, -1)
    assert np.array_equal(first, second)
    # Of 1,280 numbers two may be close by chance.
    assert np.isclose(first, third).mean() < 0.01 and np.isclose(third, fourth).mean() < 0.01


def test_fedgh_releases_once_and_trains_no_extractor(
    tiny: Tiny, no_page: Any, replies: list[tuple[str, Reply]]
) -> None:
    args = "header_lr=1 header_epochs=20"
    found = tiny(method="fedgh", method_args=args, rounds=3, dp="example", dp_epsilon=50.0, dp_test=True)
    for client in range(3):
        sent = [r.arrays for kind, r in replies if kind == "train" and r.client == client]
        assert len(sent) == 3 and set(sent[0]) == {"noised/count", "noised/sum"}
        assert all(np.array_equal(a["noised/sum"], sent[0]["noised/sum"]) for a in sent)
        assert (sent[0]["noised/count"] != 0).all()
    assert [len(v) for v in ledgers(found.out / "state").values()] == [1, 1, 1]
    assert found.summary["privacy"]["releases"] == 1
    assert found.summary["accuracy"]["received"]["last"] > 0.5


def test_fedghs_clients_have_one_extractor_that_no_round_changes(tiny: Tiny, no_page: Any) -> None:
    from fedapp.learning.state import read_safetensors

    found = tiny(method="fedgh", rounds=2, dp="example", dp_test=True)
    states = [read_safetensors(p, "model/")[0] for p in sorted((found.out / "state").rglob("*.safetensors"))
              if "head" not in p.name]  # fmt: skip
    assert len(states) == 6
    trunk = {n for n in states[0] if n.startswith("model/features.")}
    assert trunk and all(np.array_equal(s[n], states[0][n]) for s in states for n in trunk)
    heads = {s["model/head.weight"].tobytes() for s in states}
    assert len(heads) == 6  # which each client trains for itself


def test_representations_have_norm_1_in_training_and_in_use() -> None:
    for unit in (False, True):
        model = build_model("digits-a", num_classes=10, shape=(1, 8, 8), seed=0, unit=unit)
        norms = model.represent(torch.rand(5, 1, 8, 8)).norm(dim=1)
        assert torch.allclose(norms, torch.ones(5), atol=1e-6) is unit


def test_a_stored_model_predicts_as_it_was_scored(tiny: Tiny, no_page: Any) -> None:
    import fedapp

    found = tiny(method="fedncm", **{**EXAMPLE, "dp_epsilon": 50.0})
    model = fedapp.load(found.out)
    z = model.model.represent(torch.rand(3, 1, 8, 8)) if hasattr(model, "model") else None
    stored = json.loads((found.out / "summary.json").read_text())
    assert stored["privacy"]["unit"] == "example"
    assert z is None or torch.allclose(z.norm(dim=1), torch.ones(3), atol=1e-6)


# ---- the budget ------------------------------------------------------------------------------------------------------


def test_a_second_run_on_the_same_data_is_refused_at_the_client(tiny: Tiny, tmp_path: Path, no_page: Any) -> None:
    values = {**EXAMPLE, "method": "fedncm", "state_dir": str(tmp_path / "nodes"), "dp_epsilon": 1.0}
    tiny(**values, federation="one")
    with pytest.raises((RoundFailed, BadRequest), match=r"would spend epsilon = 1\.\d+ of 1 .*1 earlier ones"):
        tiny(**values, federation="two")
    third = tiny(**{**values, "dp_epsilon": 3.0, "dp_noise": 4.0452}, federation="three")
    assert third.summary["privacy"]["releases"] == 2
    assert [len(v) for v in ledgers(tmp_path / "nodes").values()] == [2, 2, 2]


def test_updates_are_booked_round_by_round(tiny: Tiny, no_page: Any, replies: list[tuple[str, Reply]]) -> None:
    found = tiny(method="fedclassavg", rounds=3, dp="client", clip_update=0.5, fraction_train=0.67, dp_epsilon=4.0)
    privacy = found.summary["privacy"]
    assert privacy["unit"] == "client" and 0 < privacy["epsilon"] <= 4.0
    booked = ledgers(found.out / "state")
    asked = {c: sum(kind == "train" and r.client == c for kind, r in replies) for c in booked}
    assert {c: len(v) for c, v in booked.items()} == asked and sum(asked.values()) == 6
    assert privacy["releases"] == max(asked.values())
    first = found.summary["warnings"][0]
    assert "epsilon = 4, delta = 1e-05 for each client" in first and "recommended from 1000 clients" in first
    assert "in the mean of 2 clients" in first, "2.01 are drawn"


def test_updates_count_equally_and_their_noise_is_the_stated_one(tiny: Tiny, no_page: Any) -> None:
    """With a bound so small that only noise is left, the mean of 3 clients has the deviation z C / sqrt(3)."""
    values: dict[str, Any] = {"method": "fedavg", "rounds": 1, "dp": "client", "dp_epsilon": 100.0, "dp_noise": 0.5}
    from fedapp.learning.state import read_safetensors

    found = tiny(**values, clip_update=1e-3)
    start_from = tiny(**values, clip_update=1e-9)
    one, two = (read_safetensors(r.out / "models" / "last.safetensors")[0] for r in (found, start_from))
    moved = np.concatenate([(one[n] - two[n]).ravel() for n in one])
    assert moved.std() == pytest.approx(0.5e-3 / np.sqrt(3), rel=0.05)


def test_a_repeated_exchange_sends_the_same_statistics_again(
    tiny: Tiny, no_page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is killed after its clients have released what the budget allows, and before the server has kept it."""

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    for method, args, stage in (("fedncm", "base=none", "after_query"), ("fedgh", "", "after_round")):
        out = tmp_path / method
        with monkeypatch.context() as patch:
            patch.setattr(PrivacySpent, stage, killed)
            with pytest.raises(KeyboardInterrupt):
                tiny(method=method, method_args=args, rounds=1, dp="example", out=out)
        found = local.run(resume=out)
        assert found.summary["privacy"]["releases"] == 1 and found.summary["privacy"]["epsilon"] <= 8
        assert [len(v) for v in ledgers(out / "state").values()] == [1, 1, 1]


def test_a_killed_round_costs_a_release_and_a_resumed_run_may_end_earlier(
    tiny: Tiny, no_page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise stays that of the first number of rounds, so one round fewer is within the budget."""
    save, out = Checkpoint.save, tmp_path / "cut"

    def killed(self: Checkpoint, at: Any) -> None:
        if at.round == 2:
            raise KeyboardInterrupt
        save(self, at)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            tiny(method="lgfedavg", rounds=3, dp="client", clip_update=1.0, out=out)
    found = local.run(resume=out, rounds=2)
    assert found.summary["privacy"]["releases"] == 3 and found.summary["privacy"]["epsilon"] == pytest.approx(8, 1e-3)


def test_epsilon_bounds_replies_that_did_not_count(tiny: Tiny, no_page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = StateLedger.problem

    def lost(self: StateLedger, client: int, info: Any, metrics: Any) -> str | None:
        return "lost" if client == 0 and metrics["dp-releases"] == 2 else problem(self, client, info, metrics)

    monkeypatch.setattr(StateLedger, "problem", lost)
    common: dict[str, Any] = {"method": "lgfedavg", "dp": "client", "clip_update": 1.0, "min_replies": 0.3}
    stated = tiny(**common, rounds=2).summary["privacy"]
    assert stated["unstated"] == 1 and stated["epsilon"] >= 8 > 0
    stated = tiny(**common, rounds=3).summary["privacy"]
    assert "unstated" not in stated, "its next reply states all of its releases"


@pytest.mark.parametrize(
    "metrics",
    [{"dp-epsilon": 1e6}, {"dp-epsilon": float("nan")}, {"dp-epsilon": -1.0}, {"dp-epsilon": [1.0]},
     {"dp-releases": 10**9}, {"dp-releases": -1}, {"dp-releases": 1.5}],
)  # fmt: skip
def test_a_client_states_no_epsilon_that_no_budget_allows(metrics: dict[str, Any]) -> None:
    assert "it states" in str(StateLedger().problem(0, {}, metrics))
    assert StateLedger().problem(0, {}, {"dp-epsilon": 8.0, "dp-releases": 3}) is None


def test_noise_on_updates_has_no_limit_of_growth() -> None:
    for dp, growth in (("client", 0.0), ("none", 10.0)):
        config = from_flat({"method": "fedclassavg", "dp": dp, "clip-update": 1.0 if dp == "client" else 0.0})
        assert config.resolved(simulation=False).robustness.max_growth == growth


def test_the_page_names_the_methods_with_noised_statistics() -> None:
    page = Path(__file__).parents[1] / "docs" / "privacy.md"
    row = next(line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `example` |"))
    methods = [m for m in registry.discover().values() if m.units(m.hparams()) == ("example",)]
    assert {name.strip() for name in row.split("|")[4].split(",")} == {m.title for m in methods}


# ---- real nodes ------------------------------------------------------------------------------------------------------

NODES: dict[str, Any] = {"method": "fedncm", "method-args": "base=none", "num-server-rounds": 1, "dp": "example",
                         "protocols": "global"}  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDAPP_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def test_a_real_node_sends_noised_numbers_and_nothing_else(
    tmp_path: Path, home: Path, replies: list[tuple[str, Reply]]
) -> None:
    summary, _, _ = start(tmp_path, THREE, **NODES)
    privacy = summary["privacy"]
    assert privacy["scores"] == "none are sent" and privacy["releases"] == 1
    assert privacy["epsilon"] == pytest.approx(8.0, rel=1e-3)
    for _, reply in replies:
        assert set(reply.metrics) <= {"num-examples", "dp-epsilon", "dp-releases"}
    assert [len(v) for v in ledgers(home).values()] == [1, 1, 1]
    with pytest.raises(RoundFailed, match="would spend"):
        start(tmp_path / "again", THREE, **{**NODES, "federation": "other"})


def test_a_nodes_own_budget_wins(tmp_path: Path, home: Path) -> None:
    small = {n: {**c, "dp-epsilon": 2.0} for n, c in THREE.items()}
    with pytest.raises(RoundFailed, match=r"would spend epsilon = \S+ of 2 "):
        start(tmp_path, small, **NODES)
    assert not any(ledgers(home).values())
    large = {n: {**c, "dp-epsilon": 20} for n, c in THREE.items()}
    for name in ("a", "b"):
        start(tmp_path / name, large, **{**NODES, "federation": name})
    assert [len(v) for v in ledgers(home).values()] == [2, 2, 2]


def test_a_node_may_ask_for_runs_with_noise_alone(tmp_path: Path, home: Path) -> None:
    strict = {n: {**c, "dp": "example"} for n, c in THREE.items()}
    with pytest.raises(BadRequest, match=r"for the unit 'example' .* has dp = 'none': set dp = 'example' or 'sgd'"):
        start(tmp_path, strict, **{"num-server-rounds": 1})
    assert start(tmp_path / "b", strict, **NODES)[0]["ok"]


def test_errors_of_real_nodes_say_nothing_of_the_data(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(self: Any, features: Any, labels: Any) -> None:
        raise ArithmeticError("patient 4711")

    monkeypatch.setattr(FeatureSums, "update", fails)
    with pytest.raises(RoundFailed):
        start(tmp_path, THREE, **NODES)
    told = (tmp_path / "run" / "error.json").read_text()
    assert "4711" not in told and "ArithmeticError in query.sums: details are in the node's own log" in told
    assert "4711" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"dp": "none"}, r"dp = 'none' must be 'example' or 'client'"),
        ({"dp-epsilon": 0}, "must be a number above 0"),
        ({"dp-epsilon": float("inf")}, "must be a number above 0"),
        ({"dp-delta": "1e-5"}, "must be a number above 0"),
        ({"dp-epsilon": True}, "must be a number above 0"),
    ],
)
def test_a_nodes_budget_must_be_one(more: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        Node.parse({**share(0), **more})


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"method": "fedncm"}, "base method 'fedavg' sends whole models without noise"),
        ({"method": "fedavg"}, "fedavg with these method-args has no form.*take dp = 'sgd'"),
        ({"method": "fedcof", "method-args": "base=none"}, "no form with noise on the whole payload"),
        ({"method": "fedghg"}, "no form"),
        ({"method": "cwfedavg"}, "no form"),
        ({"method-args": "base=none min_count=3"}, "min_count is a threshold on true counts"),
        ({"method-args": "base=none scale=fit"}, "scale=fit asks for exact losses"),
        ({"method": "fedgh", "method-args": "min_class_count=2"}, "min_class_count is a threshold on true counts"),
        ({"method": "fedgh", "method-args": "order=arrival"}, "order=arrival says how long clients take"),
        ({"method": "fedgh", "robust": "own"}, "robust compares single clients"),
        ({"method": "fedgh", "model": "digits-a,digits-b"}, "give one model"),
        ({"method": "ccvr", "method-args": "base=none oracle=true"}, "oracle=true sends the features"),
        ({"method": "ccvr", "method-args": "base=none cov=lowrank"}, "only full and sums"),
        ({"method": "ccvr", "method-args": "base=none transform=feature"}, "transform=feature changes the norm"),
        ({"warm-start": True, "state-dir": "/x"}, "warm-start begins from states that were made without noise"),
        ({"select": "validation", "validation": 0.1}, "chooses a round by exact scores"),
        ({"patience": 3}, "exact training losses"),
        ({"normalise": "data"}, "normalise = 'data' moves every sample"),
        ({"normalise": "client"}, "normalise = 'client' moves every sample"),
        ({"dataset": "npz", "data-dir": "/x"}, "takes mean and deviation of your own data"),
        ({"dp": "client", "method": "fedavg"}, "give clip-update"),
        ({"dp": "client", "method": "fedgh"}, "take dp = 'example'"),
        ({"dp": "client", "method": "scaffold", "clip-update": 1.0}, "no form"),
        ({"dp": "client", "method": "fedclassavg", "method-args": "share=none", "clip-update": 1.0}, "no form"),
        ({"dp": "none", "dp-epsilon": 1.0}, "dp-epsilon is for runs with noise"),
        ({"dp": "none", "dp-test": True}, "dp-test is for runs with noise"),
        ({"dp-epsilon": 0.0}, "must be greater than 0"),
        ({"dp-delta": 0.5}, "must be at most 0.01"),
    ],
)  # fmt: skip
def test_what_would_break_the_statement_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        from_flat({"dp": "example", "method": "fedncm", "method-args": "base=none" if "method" not in values else "",
                   **values})  # fmt: skip


def test_rows_that_the_published_numbers_do_not_fit_are_not_normalised_by_themselves(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, channels in (("cifar10", 1), ("mnist", 1)):
        x = rng.integers(0, 256, (60, 32, 32, channels), dtype=np.uint8)
        np.savez(
            tmp_path / f"{name}.npz", x_train=x, y_train=np.arange(60) % 10, x_test=x[:20], y_test=np.arange(20) % 10
        )
    private = {"dp": "example", "method": "fed3r", "method-args": "base=none", "clients": 2, "min-samples": 1}
    values = {**private, "data-dir": str(tmp_path)}
    with pytest.raises(BadRequest, match=r"no published ones fit images of 32x32 pixels with 1 channel: .* 'none'"):
        simulated.check(local.effective({**values, "dataset": "cifar10"}), 2)
    simulated.check(local.effective({**values, "dataset": "cifar10", "normalise": "none"}), 2)
    simulated.check(local.effective({**values, "dataset": "mnist"}), 2)
    np.savez(tmp_path / "own.npz", x=rng.standard_normal((30, 5)), y=np.arange(30) % 3)
    own = Node.parse({"client-id": 0, "data-path": str(tmp_path / "own.npz")})
    config = from_flat({**private, "dataset": "digits", "class-names": "0,1,2", "model": "mlp"})
    with pytest.raises(BadRequest, match="no published ones fit rows of 5 features"):
        node_task(config, own, torch.device("cpu"))


def test_what_a_node_would_send_beside_is_refused() -> None:
    config = from_flat({**NODES, "dp-test": True})
    with pytest.raises(BadRequest, match="takes noise from the seed, which protects no one"):
        check_node(config)
    with pytest.raises(BadRequest, match="set protocols = 'global'"):
        check_node(from_flat({**NODES, "protocols": "received,global"}))
    check_node(from_flat(NODES))


def test_statistics_of_batchnorm_are_no_updates(tiny: Tiny, no_page: Any) -> None:
    dp_rules.check_names(["features.0.weight", "head.bias"])
    with pytest.raises(BadRequest, match=r"'features\.1\.running_mean' .*set buffers = 'local'"):
        dp_rules.check_names(["features.1.weight", "features.1.running_mean"])


def test_a_client_without_a_ledger_sends_nothing(tiny: Tiny, no_page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_app, "_releaser", lambda *args: None)
    for values in (
        {**EXAMPLE, "method": "fedncm"},
        {"method": "fedavg", "rounds": 1, "dp": "client", "clip_update": 1.0},
    ):
        with pytest.raises(RoundFailed, match="reply withheld"):
            tiny(**values)


def test_a_method_that_forgets_the_noise_sends_nothing(
    tiny: Tiny, no_page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = lambda *args: {n: np.zeros(s) for n, s in Joint(10, 64).shapes.items()}  # noqa: E731
    monkeypatch.setattr("fedapp.privacy.statistics.release", exact)
    with pytest.raises(RoundFailed, match="without noise; reply withheld"):
        tiny(**{**EXAMPLE, "method": "fedncm"})


def test_with_dp_no_digest_of_a_state_leaves(tiny: Tiny, no_page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    content = client_app.reply_records

    def reply_records(arrays: Any, metrics: Any, info: Any, *more: Any, **named: Any) -> Any:
        seen.append(dict(info))
        return content(arrays, metrics, info, *more, **named)

    monkeypatch.setattr(client_app, "reply_records", reply_records)
    tiny(method="fedgh", rounds=2, dp="example", dp_test=True)
    assert seen and not any(key.startswith("state") for info in seen for key in info)


def test_a_node_with_an_older_ledger_releases_nothing(tmp_path: Path, home: Path) -> None:
    """Its state knows of the release, or where state and ledger are both older, the server that sent the message."""
    large = {n: {**c, "dp-epsilon": 20} for n, c in THREE.items()}
    start(tmp_path / "a", large, **NODES)
    for path in (home / "privacy").glob("*.jsonl"):
        path.write_bytes(b"")
    with pytest.raises(RoundFailed, match="it has 0 releases, and 1 were made"):
        start(tmp_path / "b", large, **NODES)
    assert not any(ledgers(home).values())
    taken: list[int] = []

    def put_back(grid: Any, server_round: int) -> None:
        taken.append(server_round)
        if server_round == 2:
            shutil.rmtree(home / "privacy")
            for head in home.glob("*/*/*.head"):
                head.unlink()

    shutil.rmtree(home)
    rounds = {**NODES, "method": "lgfedavg", "method-args": "", "dp": "client", "clip-update": 1.0}
    with pytest.raises(RoundFailed, match="it has 0 releases, and 1 were made"):
        start(tmp_path / "c", large, put_back, **{**rounds, "num-server-rounds": 3, "dp-epsilon": 20.0})
    assert taken == [1, 2]


def test_a_client_with_noise_never_begins_anew(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"lost-state = 'restart' may begin with an empty ledger"):
        from_flat({**NODES, "lost-state": "restart"})


def test_every_remedy_of_a_refusal_is_a_value_of_the_method() -> None:
    for method in registry.discover().values():
        for text in method.hparams.exact.values():
            for key, value in re.findall(r"take (\w+)=(\w+)", text):
                assert getattr(method.hparams.model_validate({key: value}), key) == value
