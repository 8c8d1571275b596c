"""Figures: what they are computed from against slow or independent computations, and how they are written."""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from fedapp.data.transforms import normalise
from fedapp.engines.local import run
from fedapp.models import build_model
from fedapp.results import analysis, calibration, figures, heads, representations
from fedapp.results.analysis import Unavailable
from fedapp.results.figures import maps, pieces, plots, scores, style
from fedapp.results.runs import Comparison, RunResult, groups_of, read_comparison, read_run, varying
from fedapp.transport import checkpoint
from tests.handmade import context, reply

SMALL: dict[str, Any] = {
    "dataset": "digits",
    "data_fraction": 0.3,
    "clients": 4,
    "rounds": 3,
    "local_epochs": 1,
    "batch_size": 8,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("figures")


@pytest.fixture(scope="module")
def cw(folder: Path) -> RunResult:
    run(**{**SMALL, "method": "cwfedavg", "partition": "classes", "classes_per_client": 4, "out": folder / "cw"})
    return read_run(folder / "cw")


@pytest.fixture(scope="module")
def ccvr(folder: Path) -> RunResult:
    run(**{**SMALL, "method": "ccvr", "alpha": 0.2, "clients": 3, "out": folder / "ccvr"})
    return read_run(folder / "ccvr")


@pytest.fixture(scope="module")
def mixed(folder: Path) -> RunResult:
    settings = {**SMALL, "clients": 3, "rounds": 2, "method": "fedclassavg", "model": "digits-a,digits-b"}
    run(**{**settings, "out": folder / "mixed"})
    return read_run(folder / "mixed")


def files(data: RunResult, client: int) -> list[Path]:
    return sorted((data.out / "state" / "run" / str(client)).glob("*.safetensors"))


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_counts_are_those_of_the_saved_partition(cw: RunResult) -> None:
    from fedapp.data.partitions import Partition

    partition = Partition.load(cw.out / "partition.npz")
    labels = analysis.data_of(cw).dataset.pool_labels
    slow = np.zeros((4, 10), int)
    for k, client in enumerate(partition.clients):
        for i in client.train:
            slow[k, labels[i]] += 1
    np.testing.assert_array_equal(cw.counts, slow)
    np.testing.assert_allclose(analysis.label_shares(cw), slow / slow.sum(axis=1, keepdims=True))


def test_a_moved_run_directory_is_read_where_it_lies(cw: RunResult, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(cw.out, moved)
    here, there = analysis.client_arrays(cw), analysis.client_arrays(read_run(moved))
    assert here.keys() == there.keys()
    for client, (server_round, arrays) in here.items():
        assert there[client][0] == server_round == 3
        np.testing.assert_array_equal(there[client][1]["model/head.weight"], arrays["model/head.weight"])


def test_data_that_changed_since_the_run_are_not_used(cw: RunResult, tmp_path: Path) -> None:
    import json

    moved = tmp_path / "changed"
    shutil.copytree(cw.out, moved)
    card = json.loads((moved / "data_card.json").read_text())
    (moved / "data_card.json").write_text(json.dumps({**card, "hash": "0" * 64}))
    with pytest.raises(Unavailable, match="changed since the run"):
        analysis.data_of(read_run(moved))


# ---- heads -----------------------------------------------------------------------------------------------------------


def test_head_norms_are_those_of_the_stored_models(cw: RunResult) -> None:
    ids, norms = heads.head_norms(cw)
    assert ids == [0, 1, 2, 3]
    for k in ids:
        weight = load_file(files(cw, k)[-1])["model/head.weight"]
        slow = [sum(float(w) ** 2 for w in row) ** 0.5 for row in weight]
        np.testing.assert_allclose(norms[k], slow, rtol=1e-6)


def test_the_history_of_norms_ends_with_the_stored_models(cw: RunResult) -> None:
    history = heads.head_norm_history(cw)
    _, norms = heads.head_norms(cw)
    for k, (rounds, rows) in history.items():
        assert rounds.tolist() == [1, 2, 3]
        np.testing.assert_allclose(rows[-1], norms[k], rtol=1e-6)
        before = load_file(files(cw, k)[-2])["model/head.weight"]
        np.testing.assert_allclose(rows[-2], np.linalg.norm(before, axis=1), rtol=1e-6)


def test_resume_leaves_the_history_as_if_never_stopped(cw: RunResult, tmp_path: Path) -> None:
    settings = {**SMALL, "method": "cwfedavg", "partition": "classes", "classes_per_client": 4}
    run(**{**settings, "rounds": 2, "out": tmp_path / "resumed"})
    run(resume=tmp_path / "resumed", rounds=3)
    whole, parts = heads.head_norm_history(cw), heads.head_norm_history(read_run(tmp_path / "resumed"))
    for k in whole:
        np.testing.assert_array_equal(whole[k][0], parts[k][0])
        np.testing.assert_array_equal(whole[k][1], parts[k][1])


def test_head_norms_never_travel(cw: RunResult) -> None:
    for path in (cw.out / "checkpoint").glob("*.safetensors"):
        assert not any("norm" in name for name in load_file(path))
    assert not any("norm" in c for c in cw.clients.columns)


def test_who_learns_from_whom_is_what_the_server_hands_out_next(cw: RunResult) -> None:
    """A times the uploads, in plain loops, is the blend of class models that the checkpoint holds."""
    ids, matrix, _ = heads.who_learns_from_whom(cw)
    np.testing.assert_allclose(matrix.sum(axis=1), 1)
    uploads = [load_file(files(cw, k)[-1])["model/head.weight"].astype(np.float64) for k in ids]
    found = checkpoint.latest(cw.out / "checkpoint")
    assert found is not None
    state = found[1]
    rows = [state["rows"][i]["head.weight"].astype(np.float64) for i in range(len(state["rows"]))]
    for i in ids:
        handed_out = np.zeros_like(uploads[0])
        for j in range(10):  # theta_i = sum_j p~_ij g_j,  g_j = sum_k q_kj theta_k
            for k in range(len(rows)):
                handed_out += state["pt"][i][j] * state["q"][k, j] * rows[k]
        mine = sum(matrix[i, k] * uploads[k] for k in range(len(ids)))
        np.testing.assert_allclose(mine, handed_out, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("args", ["", "tau=0.5"])
def test_with_part_of_the_clients_the_weights_are_those_of_the_models_in_the_blend(args: str, folder: Path) -> None:
    """cwFedAvg with two of four clients a round, and with classes that keep the model of an earlier round.

    Every model that was ever uploaded is a point: the number of its client and round. So A times these points, by the
    rounds in which they count, must be what `send` hands out; here the strategy itself runs, without training.
    """
    from clients.cwfedavg import CwFedAvgHParams
    from fedapp.method import ServerState
    from strategies.cwfedavg import METHOD, CwFedAvg

    tau = float(args.partition("=")[2] or 0)
    strategy = CwFedAvg(METHOD, CwFedAvgHParams(layers="all", tau=tau))
    rng = np.random.default_rng(3)
    initial = {n: np.zeros(s, np.float32) for n, s in (("features.weight", (2, 2)), ("head.weight", (3, 2)))}
    state: ServerState = strategy.init(context(initial, clients=4, num_classes=3))
    assert strategy.blend(state, {}) is None
    sent: dict[int, dict[str, np.ndarray]] = {}
    for server_round, here in enumerate(((0, 1, 2, 3), (1, 3)), 1):
        replies = []
        for c in here:
            rare = 1.0 if server_round == 1 else 0.01  # class 2 in round 2
            head = (rng.random((3, 2)) + 1) * np.array([[1.0], [1.0], [rare]])
            sent[c] = {"features.weight": np.full((2, 2), c, np.float32), "head.weight": head.astype(np.float32)}
            replies.append(reply(c, 10 * (c + 1), sent[c]))
        state = strategy.aggregate(state, server_round, iter(replies))
    found = strategy.blend(state, {})
    assert found is not None
    ids, matrix, _ = found
    np.testing.assert_allclose(matrix.sum(axis=1), 1)
    assert ids == [0, 1, 2, 3] and bool(matrix[:, [0, 2]].any()) is bool(tau), "only a guarded class keeps old models"
    for k, c in enumerate(ids):
        handed_out = strategy.send(state, 3, c).all()["features.weight"]
        np.testing.assert_allclose(handed_out, matrix[k] @ np.arange(4.0), rtol=1e-5)


def after(folder: Path, method: str, **more: Any) -> tuple[RunResult, dict[str, Any]]:
    out = more.get("out", folder / method)
    run(**{**SMALL, "rounds": 2, "method": method, "out": out, **more})
    found = checkpoint.latest(out / "checkpoint")
    assert found is not None
    return read_run(out), found[1]


@pytest.mark.parametrize(
    ("method", "args"), [("ifca", ""), ("ifca", "weighting=uniform"), ("cfl", ""), ("cfl", "weighting=samples")]
)
def test_members_of_a_cluster_learn_from_each_other_as_they_are_averaged(method: str, args: str, folder: Path) -> None:
    data, state = after(folder, method, method_args=args, out=folder / f"{method}-{args}")
    ids, matrix, how = heads.who_learns_from_whom(data)
    by_samples = (args == "weighting=samples") or (method == "ifca" and not args)
    sizes = data.counts.sum(axis=1) if by_samples else np.ones(4)
    assert ("by sample counts" in how) is by_samples
    chosen = state["chosen"] if method == "ifca" else {c: j for j, m in state["members"].items() for c in m}
    for i, j in itertools.product(ids, ids):
        total = sum(sizes[k] for k in ids if chosen[k] == chosen[i])
        assert matrix[i, j] == pytest.approx(sizes[j] / total if chosen[i] == chosen[j] else 0)


def test_attention_times_uploads_is_what_fedamp_hands_out(folder: Path) -> None:
    data, state = after(folder, "fedamp")
    ids, matrix, _ = heads.who_learns_from_whom(data)
    np.testing.assert_allclose(matrix.sum(axis=1), 1)
    uploads = [load_file(files(data, k)[-1])["model/head.bias"].astype(np.float64) for k in ids]
    for i in ids:
        mine = sum(matrix[i, k] * uploads[k] for k in ids)
        np.testing.assert_allclose(mine, state["mixed"][i]["head.bias"], rtol=1e-4, atol=1e-6)


def test_tables_of_fedfomo_and_ktpfl_by_rows(folder: Path) -> None:
    data, state = after(folder, "fedfomo")
    ids, matrix, _ = heads.who_learns_from_whom(data)
    for i in range(len(ids)):
        row = [max(0.0, v) for v in state["P"][i]]
        expected = [v / sum(row) for v in row] if sum(row) else [float(i == j) for j in range(len(ids))]
        np.testing.assert_allclose(matrix[i], expected)
    data, state = after(folder, "ktpfl")
    ids, matrix, _ = heads.who_learns_from_whom(data)
    assert ids == state["ids"]
    np.testing.assert_allclose(matrix.sum(axis=1), 1)
    np.testing.assert_allclose(matrix * state["c"].sum(axis=1)[:, None], state["c"])


def test_without_weights_the_reason_is_told(mixed: RunResult) -> None:
    with pytest.raises(Unavailable, match="fedclassavg keeps no weights") as e:
        heads.who_learns_from_whom(mixed)
    assert e.value.command == "fedapp run --method cwfedavg ... (or ktpfl, fedamp, fedfomo, cfl, ifca, fedpac)"


# ---- representations -------------------------------------------------------------------------------------------------


def test_stages_are_what_the_layers_put_out(cw: RunResult) -> None:
    model = analysis.client_models(cw, 1)[0]
    x, _ = analysis.probe(cw, 40)
    assert list(calibration.layers_of(model)) == ["conv1", "conv2", "fc1", "head"]
    outputs = {name: calibration.output_of(cw, model, name, x) for name in calibration.layers_of(model)}
    with torch.no_grad():
        image = normalise(x.permute(0, 3, 1, 2), analysis.data_of(cw).inputs)
        np.testing.assert_allclose(outputs["fc1"], model.features(image).numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(outputs["head"], model(image).numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(outputs["conv1"], model.features[0](image).flatten(1).numpy(), rtol=1e-5, atol=1e-6)


def linear_cka(x: np.ndarray, y: np.ndarray) -> float:
    """||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F) of the centred features (Kornblith et al., ICML 2019, Eq. 5)."""
    a, b = (z.astype(np.float64) - z.mean(axis=0, dtype=np.float64) for z in (x, y))
    return float(np.linalg.norm(b.T @ a) ** 2 / (np.linalg.norm(a.T @ a) * np.linalg.norm(b.T @ b)))


def test_linear_cka_worked_numbers() -> None:
    a, b = np.array([[1, 2], [2, 1], [3, 3], [4, 0]]), np.array([[1, 0], [0, 1], [1, 1], [2, -1]])
    assert linear_cka(a, b) == pytest.approx(0.400781, abs=6e-7)


def test_cka_of_layers_against_the_formula(cw: RunResult) -> None:
    ids, maps = calibration.layer_cka(cw, images=60)
    assert list(maps) == ["conv1", "conv2", "features", "head"]
    models = analysis.client_models(cw)
    x, _ = analysis.probe(cw, 60)
    outputs = {c: {n: calibration.output_of(cw, m, n, x) for n in calibration.layers_of(m)} for c, m in models.items()}
    for name, key in (("conv1", "conv1"), ("features", "fc1"), ("head", "head")):
        for i, a in enumerate(ids):
            for j, b in enumerate(ids):
                assert maps[name][i, j] == pytest.approx(linear_cka(outputs[a][key], outputs[b][key]), abs=1e-9)
        np.testing.assert_allclose(np.diag(maps[name]), 1)


def test_inner_layers_are_compared_between_equal_architectures_only(mixed: RunResult) -> None:
    ids, maps = calibration.layer_cka(mixed, images=40)
    assert ids == [0, 1, 2]
    assert list(maps)[-2:] == ["features", "head"]
    inner = maps["digits-a conv1"]
    assert np.isfinite(inner[0, 2])
    assert np.isnan(inner[0, 1])
    assert np.isfinite(maps["features"]).all()
    assert calibration.mean_of_pairs(inner) == pytest.approx(inner[0, 2])


def test_conductance_sums_to_the_difference_of_logits() -> None:
    model = build_model("digits-a", num_classes=10, shape=(1, 8, 8), seed=3).eval()
    x = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    zero = torch.zeros_like(x)
    with torch.no_grad():
        gap = float(model(x)[0, 4] - model(zero)[0, 4])
    values = representations.unit_conductance(model, x, zero, 4)
    assert values.shape == (64,)
    assert values.sum() == pytest.approx(gap, abs=1e-5)


def test_conductance_against_captum() -> None:
    attr = pytest.importorskip("captum.attr")
    model = build_model("digits-a", num_classes=10, shape=(1, 8, 8), seed=3).eval()
    x = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    path = attr.LayerConductance(model, model.activation)
    theirs = path.attribute(x, baselines=torch.zeros_like(x), target=4, n_steps=1500, internal_batch_size=500)
    ours = representations.unit_conductance(model, x, torch.zeros_like(x), 4)
    np.testing.assert_allclose(ours, theirs[0].detach().numpy(), atol=5e-4)


def test_ranks_are_of_the_units_and_clients_that_are_right(cw: RunResult) -> None:
    ids, right = representations.right_clients(cw, 50)
    found = representations.conductance(cw, int(right.sum(axis=0).argmax()), (ids, right))
    best = right.sum(axis=0).max()
    assert len(found.clients) == min(8, best) >= 2
    assert found.ranks.shape == (len(found.clients), 64)
    np.testing.assert_allclose(found.ranks.sum(axis=1), 63 * 64 / 2)
    assert -1 <= found.agreement <= 1


def test_tsne_is_the_same_every_time() -> None:
    rows = np.random.default_rng(0).standard_normal((60, 8)).astype(np.float32)
    np.testing.assert_array_equal(representations.embed(rows, 5), representations.embed(rows, 5))
    with pytest.raises(Unavailable, match="too few"):
        representations.embed(rows[:4], 5)


def test_every_client_sees_the_same_images_in_the_embedding(cw: RunResult) -> None:
    found = representations.client_embedding(cw, clients=3, points=90)
    assert found.points.shape == (len(found.label), 2)
    first = found.label[found.client == 0]
    for k in (1, 2):
        np.testing.assert_array_equal(found.label[found.client == k], first)
    assert -1 <= found.silhouette_client <= found.silhouette_label + 2 <= 3


# ---- calibration -----------------------------------------------------------------------------------------------------


def test_the_sweep_repeats_the_runs_own_calibration(ccvr: RunResult) -> None:
    """The same statistics, draws and training order: 0 samples is `before`, the run's M_c is `after`.

    On the wire means and covariances are float32 here, which may tip one test image.
    """
    found = calibration.calibration_sweep(ccvr, (0, 100))
    said = ccvr.summary["calibration"]
    images = sum(ccvr.card["test_sizes"])
    assert found.accuracy[0] == pytest.approx(said["before"], abs=1e-9)
    assert found.accuracy[100] == pytest.approx(said["after"], abs=1.01 / images)
    assert found.images == ccvr.counts.sum()
    assert found.separability > 0


@pytest.mark.full
@pytest.mark.parametrize(
    "args",
    [
        "transform=feature", "transform=sample", "transform=sample-only", "clsnorm=true", "mc_mode=proportional",
        "cov=diag min_count=3", "base=fednh transform=sample",
    ],
)  # fmt: skip
def test_the_sweep_repeats_the_calibration_of_any_variant(args: str, folder: Path) -> None:
    """Without test images on the wire in between, statistics in float64 make the sweep's head that of the run."""
    out = folder / args.replace(" ", "-")
    given = f"{args} epochs=3 samples=50 dtype=float64 oracle=true"
    values = {**SMALL, "data_fraction": 1.0, "rounds": 1, "method": "ccvr", "method_args": given, "alpha": 0.2}
    run(**{**values, "clients": 3, "out": out})
    data = read_run(out)
    said = data.summary["calibration"]
    found = calibration.calibration_sweep(data, (0, 10, 50), (0,))
    images = sum(data.card["test_sizes"])
    assert list(found.accuracy) == [0, 10, 50]
    assert found.accuracy[0] == pytest.approx(said["before"], abs=1e-9)
    assert found.accuracy[50] == pytest.approx(said["after"], abs=1.01 / images)
    assert found.images == said["samples"]
    # The run's oracle sees the same features in another order.
    assert found.oracle[0] == pytest.approx(said["oracle"], abs=0.03)
    assert found.separability > 0


def test_a_run_that_calibrates_nothing_has_no_sweep(folder: Path) -> None:
    run(**{**SMALL, "rounds": 1, "method": "ccvr", "method_args": "epochs=0", "clients": 3, "out": folder / "none"})
    with pytest.raises(Unavailable, match="epochs=0 calibrates nothing"):
        calibration.calibration_sweep(read_run(folder / "none"))


def test_head_norms_before_and_after_calibration(ccvr: RunResult) -> None:
    before, after = (np.linalg.norm(analysis.global_arrays(ccvr, c)["head.weight"], axis=1) for c in (False, True))
    ratios = ccvr.summary["calibration"]["head_norm_ratio"]
    assert before.max() / before.min() == pytest.approx(ratios[0], rel=1e-5)
    assert after.max() / after.min() == pytest.approx(ratios[1], rel=1e-5)


def test_predictions_before_and_after_are_the_two_heads(ccvr: RunResult) -> None:
    found = calibration.calibration_embedding(ccvr, points=150)
    x, y = analysis.probe(ccvr, 150)
    np.testing.assert_array_equal(found.label, y)
    model = analysis.global_model(ccvr, calibrated=False)
    z = analysis.represent(ccvr, model, x)
    for predicted, calibrated in ((found.before, False), (found.after, True)):
        arrays = analysis.global_arrays(ccvr, calibrated)
        np.testing.assert_array_equal(predicted, (z @ arrays["head.weight"].T + arrays["head.bias"]).argmax(axis=1))


def test_personal_models_cannot_be_calibrated(cw: RunResult) -> None:
    with pytest.raises(Unavailable, match="cwfedavg has no global model"):
        calibration.calibration_sweep(cw)


# ---- several runs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sweep(folder: Path) -> Comparison:
    base = {**SMALL, "clients": 3, "rounds": 1}
    for alpha, seed in itertools.product((0.3, 3.0), (0, 1)):
        run(**{**base, "method": "local", "alpha": alpha, "seed": seed, "out": folder / "sweep" / f"a{alpha}-s{seed}"})
    for lam in (0, 10):
        out = folder / "sweep" / "deep" / f"lam{lam}"
        run(**{**base, "method": "cwfedavg", "method_args": f"lam={lam}", "alpha": 0.3, "out": out})
    return read_comparison(folder / "sweep")


def test_settings_and_seeds_are_told_apart(sweep: Comparison) -> None:
    assert len(sweep.runs) == 6
    assert set(varying(sweep.runs)) == {"alpha", "method-args"}
    groups = {tuple(s.items()): len(m) for s, m in groups_of(sweep.runs)}
    assert groups == {(("alpha", 0.3),): 4, (("alpha", 3.0),): 2}


def test_a_sweep_shows_mean_and_spread_over_seeds(sweep: Comparison) -> None:
    runs = {"local": [r for r in sweep.runs if r.method == "local"]}
    curve = scores._sweep_lines(runs, lambda r: float(r.flat["alpha"]))["trained, after local training"][0]
    for i, alpha in enumerate((0.3, 3.0)):
        last = [
            r.summary["accuracy"]["trained"]["last"]
            for r in sweep.runs
            if r.method == "local" and r.flat["alpha"] == alpha
        ]
        assert curve.x[i] == alpha
        assert curve.mean[i] == pytest.approx(np.mean(last))
        assert curve.spread is not None
        assert curve.spread[i] == pytest.approx(abs(last[0] - last[1]) / 2**0.5)


def test_hyperparameters_of_a_method_make_a_figure_with_the_distance(sweep: Comparison) -> None:
    ids = [d.id for d in scores.hyperparameters(sweep.runs)]
    assert ids == ["sweep-cwfedavg-lam", "sweep-cwfedavg-lam-distance"]


# ---- what is drawn and what is left out ------------------------------------------------------------------------------

ALWAYS = {
    "learning-curves", "training-loss", "client-accuracy", "labels-heat", "labels-dots", "head-norms", "norm-evolution",
    "p-against-norms", "tsne", "cka", "conductance", "round-seconds",
}  # fmt: skip


@pytest.mark.full
def test_each_kind_of_run_has_its_figures(cw: RunResult, ccvr: RunResult) -> None:
    found = figures.of_run(cw)
    assert {d.id for d in found.drawings} == ALWAYS | {"who-learns-from-whom"}
    assert all("drawn" not in m.why for m in found.missing)
    found = figures.of_run(ccvr)
    assert {d.id for d in found.drawings} == ALWAYS | {"norms-before-after", "samples-sweep", "calibration-map"}
    for drawing in found.drawings:
        assert len(drawing.alt) > 30
        assert drawing.caption.endswith(".")


def test_what_is_left_out_says_why_and_what_to_do(cw: RunResult, tmp_path: Path) -> None:
    moved = tmp_path / "bare"
    shutil.copytree(cw.out, moved)
    shutil.rmtree(moved / "state")
    found = figures.of_run(read_run(moved))
    missing = {m.title: m for m in found.missing}
    assert {"Evolution of head norms", "Similarity of clients by layer", "Units that matter"} <= missing.keys()
    assert "stored states are missing" in missing["Similarity of clients by layer"].why
    assert missing["Similarity of clients by layer"].command.startswith("fedapp run")
    assert {d.id for d in found.drawings} >= {"learning-curves", "labels-heat"}


def test_a_run_on_devices_has_curves_and_no_data(cw: RunResult, tmp_path: Path) -> None:
    moved = tmp_path / "devices"
    shutil.copytree(cw.out, moved)
    shutil.rmtree(moved / "state")
    for name in ("data_card.json", "partition.npz"):
        (moved / name).unlink()
    found = figures.of_run(read_run(moved))
    on_the_server = {"learning-curves", "training-loss", "client-accuracy", "round-seconds", "who-learns-from-whom"}
    assert {d.id for d in found.drawings} == on_the_server
    assert any("keep their class counts to themselves" in m.why for m in found.missing)


# ---- how figures are written -----------------------------------------------------------------------------------------


def drawing(seed: int = 0) -> style.Drawing:
    rng = np.random.default_rng(seed)
    lines = [pieces.Curve(n, np.arange(1, 6), rng.random(5), 0.1 * rng.random(5)) for n in ("a", "b & <c>")]
    return style.Drawing("x-y", "title", "caption.", "alt <&>", plots.curves({"p": lines, "q": lines}))


def test_the_same_data_give_the_same_bytes() -> None:
    assert drawing().svg() == drawing().svg()
    assert drawing().svg(text=False) == drawing().svg(text=False)
    assert drawing().png() == drawing().png()
    assert drawing().svg() != drawing(1).svg()


def test_inline_figures_have_their_own_ids_and_no_reference_to_the_web() -> None:
    svg = drawing().inline()
    ids = re.findall(r' id="([^"]+)"', svg)
    assert len(ids) == len(set(ids))
    assert all(i.startswith("x-y-") for i in ids)
    for reference in re.findall(r'href="([^"]+)"', svg) + re.findall(r"url\(([^)]+)\)", svg):
        assert reference.startswith("#x-y-")
        assert reference[1:] in ids
    assert set(re.findall(r'https?://[^"]+', svg)) <= {
        "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink",
    }  # fmt: skip
    assert "alt &lt;&amp;&gt;" in svg
    assert style.INK not in svg
    assert "currentColor" in svg


def test_drawing_leaves_matplotlib_as_it_was() -> None:
    before = dict(mpl.rcParams)
    drawing().svg()
    assert dict(mpl.rcParams) == before


def luminance(colour: str) -> float:
    """Relative luminance of sRGB."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colour", style.COLOURS)
def test_colours_stand_out_from_white_and_from_black_paper(colour: str) -> None:
    """A contrast of 3 to 1 on white and on the page's dark colour (graphics, WCAG 2.1, 1.4.11)."""
    light = luminance(colour)
    assert 1.05 / (light + 0.05) >= 3
    assert (light + 0.05) / (luminance("#15171a") + 0.05) >= 3


def test_lines_can_be_told_apart_without_colour() -> None:
    looks = [pieces.look_of(str(i), [str(k) for k in range(21)]) for i in range(21)]
    marks = [(str(k["linestyle"]), k["marker"], k["markerfacecolor"] == "none") for k in looks]
    assert len(set(marks)) == 21


def rotated(colour: tuple[float, ...]) -> tuple[float, ...]:
    """What the page's filter makes of a colour: invert, turn the hue by 180 degrees, 80 % of the brightness (CSS)."""
    turn = np.array([[-0.574, 1.43, 0.144], [0.426, 0.43, 0.144], [0.426, 1.43, -0.856]])
    return tuple(np.clip(0.8 * np.clip(turn @ (1 - np.array(colour[:3])), 0, 1), 0, 1))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_numbers_in_heat_maps_can_be_read_in_both_schemes(scheme: str) -> None:
    values = np.linspace(0, 1, 400)[None]
    axes = mpl.figure.Figure().subplots()
    pieces.heat_map(axes, values, (), (), high=1.0, fmt=".3f")
    assert len(axes.texts) == 399
    for text in axes.texts:
        cell: Any = style.HEAT(float(text.get_text()))
        white = text.get_color() == style.ON_DARK
        if scheme == "dark":
            cell, white = rotated(cell), not white
        shine = pieces.brightness(cell) + 0.05
        assert (1.05 / shine if white else shine / 0.05) >= 4.5


def test_norms_of_methods_are_on_one_scale() -> None:
    panels = {"class counts": np.array([[5.0, 9]]), "a": np.array([[1.0, 2]]), "b": np.array([[0.5, 7]])}
    figure = maps.norm_maps(panels, ["0", "1"], [0])
    assert [axes.images[0].get_clim() for axes in figure.axes[:3]] == [(5, 9), (0.5, 7), (0.5, 7)]


def test_heat_maps_go_from_light_to_dark() -> None:
    shades = [luminance(mpl.colors.to_hex(style.HEAT(v))) for v in np.linspace(0, 1, 64)]
    assert all(a > b for a, b in itertools.pairwise(shades))


def test_many_clients_and_classes_are_drawn() -> None:
    counts = np.random.default_rng(0).integers(0, 9, (120, 100))
    names = [f"class {i}" for i in range(100)]
    for figure in (
        maps.label_heat(counts, names),
        maps.label_dots(counts, names),
        maps.mixing(counts / 9, range(120)[:120]),
    ):
        assert len(figure.axes[0].get_xticks()) <= 40
