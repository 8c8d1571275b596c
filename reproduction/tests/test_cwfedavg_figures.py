"""cwFedAvg's figures: what they compute against stored models, longer runs and slow sums."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.nn import functional as F

from clients.cwfedavg import CwFedAvgClient, CwFedAvgHParams
from fedapp.core.classwise import norm_distribution
from fedapp.engines.local import run
from fedapp.errors import BadRequest
from fedapp.results.analysis import Unavailable
from fedapp.results.figures.heads import training_loss
from fedapp.results.runs import RunResult, read_comparison, read_run
from fedapp.transport import checkpoint
from reproduction.figures import heads, papers, pathways
from strategies.cwfedavg import METHOD
from tests.handmade import digit_tasks, full_batch, images, whole

SMALL: dict[str, Any] = {
    "dataset": "digits", "data_fraction": 0.3, "clients": 4, "rounds": 2, "local_epochs": 1, "batch_size": 32,
    "partition": "classes", "classes_per_client": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("heads")
    for name, method, args in (
        ("fedavg", "fedavg", ""), ("lam0", "cwfedavg", "lam=0"), ("lam10", "cwfedavg", "lam=10"),
    ):  # fmt: skip
        run(**{**SMALL, "method": method, "method_args": args, "out": out / name})
    return out


@pytest.fixture(scope="module")
def cw(folder: Path) -> RunResult:
    return read_run(folder / "lam10")


@pytest.fixture(scope="module")
def fedavg(folder: Path) -> RunResult:
    return read_run(folder / "fedavg")


@pytest.mark.full
@pytest.mark.parametrize("name", ["fedavg", "lam10"])
def test_the_first_round_by_batch_ends_where_the_run_was_after_it(name: str, folder: Path) -> None:
    data = read_run(folder / name)
    history = heads.head_norm_history(data)
    for client in (0, 3):
        shares = heads.first_round(data, client)
        rounds, norms = history[client]
        row = data.clients[(data.clients["client"] == client) & (data.clients["round"] == 1)].iloc[0]
        assert shares.shape == (row["steps"] + 1, 10) and rounds[0] == 1
        np.testing.assert_allclose(shares[-1], norms[0] / norms[0].sum(), rtol=1e-6)
        np.testing.assert_allclose(shares.sum(axis=1), 1)
    first = [heads.first_round(data, client)[0] for client in (0, 3)]
    np.testing.assert_array_equal(first[0], first[1], "all clients start from the same head")


def test_fine_tuning_is_the_next_round_of_a_longer_run(fedavg: RunResult, tmp_path: Path) -> None:
    ids, before, after = heads.fine_tuned(fedavg)
    model = load_file(fedavg.out / "models" / "last.safetensors")["head.weight"]
    np.testing.assert_allclose(before, np.linalg.norm(model, axis=1), rtol=1e-6)
    run(**{**SMALL, "rounds": 3, "method": "fedavg", "out": tmp_path / "longer"})
    history = heads.head_norm_history(read_run(tmp_path / "longer"))
    for k, client in enumerate(ids):
        np.testing.assert_allclose(after[k], history[client][1][-1], rtol=1e-6)


def test_class_models_are_sums_of_uploads_by_class(cw: RunResult, fedavg: RunResult) -> None:
    uploads = [
        load_file(sorted((cw.out / "state" / "run" / str(k)).glob("*.safetensors"))[-1])["model/head.weight"]
        for k in range(4)
    ]
    sizes = cw.counts.sum(axis=1)
    pt = [norm_distribution(w) for w in uploads]
    found = heads.class_global_norms(cw)
    for j in range(10):
        total = sum(sizes[i] * pt[i][j] for i in range(4))
        model = sum(sizes[i] * pt[i][j] / total * uploads[i].astype(np.float64) for i in range(4))  # Eqs. 5 and 6
        np.testing.assert_allclose(found[j], np.linalg.norm(model, axis=1), rtol=1e-4)
    with pytest.raises(Unavailable, match="no global models by class"):
        heads.class_global_norms(fedavg)


def test_the_cross_entropy_is_the_training_loss_without_wdr() -> None:
    """One batch, one step: CE by hand, and the training loss less lambda R."""
    (task,) = (full_batch(t) for t in digit_tasks(1))
    task = replace(task, train=task.train.replaced(local_epochs=1))
    hparams = CwFedAvgHParams(lam=10)
    client = CwFedAvgClient(task, METHOD, hparams)
    model = CwFedAvgClient.build_model(task.spec(0), hparams)
    sent = whole(model)
    p = np.bincount(task.y_train.numpy(), minlength=10) / len(task.y_train)
    distance = float(np.linalg.norm(p - norm_distribution(model.head.weight.detach().numpy())))
    with torch.no_grad():
        entropy = float(F.cross_entropy(model(images(task)), task.y_train))
    _, _, metrics = client.train_round(sent, 1)
    assert metrics["steps"] == 1
    assert metrics["cross-entropy"] == pytest.approx(entropy, rel=1e-5)
    assert metrics["train-loss"] == pytest.approx(entropy + 10 * distance, rel=1e-5)


def test_figure_4_draws_the_loss_and_not_the_accuracy(folder: Path) -> None:
    runs = read_comparison(folder).runs
    caption, alt, figure = training_loss(runs)
    lines = {line.get_label(): np.asarray(line.get_ydata()) for axes in figure.axes for line in axes.get_lines()}
    for data in runs:
        column = "cross_entropy" if data.method == "cwfedavg" else "train_loss"
        np.testing.assert_allclose(lines[data.label], data.rounds[column])
        if data.method == "cwfedavg":
            each = data.clients.groupby("round")["cross_entropy"].mean()
            np.testing.assert_allclose(data.rounds["cross_entropy"], each)
            with_wdr = data.rounds["train_loss"] - data.rounds["cross_entropy"]
            assert (with_wdr > 1).all() if "lam=10" in data.label else np.allclose(with_wdr, 0, atol=1e-6)
    assert figure.axes[0].get_ylabel() == "training loss" and "accuracy" not in caption + alt


@pytest.mark.full
def test_loss_figures_name_the_runs_whose_loss_has_further_terms(folder: Path, tmp_path: Path) -> None:
    plain = read_comparison(folder).runs
    for draw in (training_loss, heads.client_loss):
        assert draw(plain)[0].startswith("Cross-entropy of the local training. "), "cwFedAvg reports it apart from WDR"
    for method in ("fedprox", "fedamp", "fedclassavg", "lgfedavg"):
        run(**{**SMALL, "rounds": 1, "method": method, "out": tmp_path / method})
    more = [read_run(tmp_path / name) for name in ("fedprox", "fedamp", "lgfedavg", "fedclassavg")]
    for draw in (training_loss, heads.client_loss):
        caption = draw([*plain, *more])[0]
        assert "; of fedprox, fedamp, fedclassavg the whole loss, with the terms that the method adds." in caption


def test_memory_is_what_the_checkpoint_holds(fedavg: RunResult, cw: RunResult) -> None:
    model = load_file(fedavg.out / "models" / "last.safetensors")
    assert heads.server_bytes(fedavg) == sum(a.nbytes for a in model.values())
    state = (checkpoint.latest(cw.out / "checkpoint") or (0, {}, {}))[1]
    uploads = 4 * sum(a.nbytes for n, a in model.items() if n.startswith("head."))
    trunk = sum(a.nbytes for n, a in model.items() if not n.startswith("head."))
    small = state["q"].nbytes + state["wdr"].nbytes + sum(p.nbytes for p in state["pt"].values())
    small += sum(q.nbytes for q in state["share"].values())
    assert heads.server_bytes(cw) == uploads + trunk + small


@pytest.mark.full
@pytest.mark.parametrize("name", [n for n in papers.FIGURES if n.startswith("cwfedavg-")])
def test_every_figure_is_drawn_from_a_folder_of_runs(name: str, folder: Path, tmp_path: Path) -> None:
    drawing = papers.draw(name, [] if name == "cwfedavg-1" else [folder])
    assert drawing.id == name and drawing.caption.endswith(".") and len(drawing.alt) > 40
    papers.save(drawing, tmp_path / f"{name}.svg")
    assert (tmp_path / f"{name}.svg").read_text(encoding="utf-8").count("<path") > 10


def test_maps_show_fedavg_before_and_after_tuning_and_their_difference(folder: Path, fedavg: RunResult) -> None:
    _, _, figure = heads.personalisation_maps([r for r in read_comparison(folder).runs if "lam=0" not in r.label])
    titled = {axes.get_title("left"): axes for axes in figure.axes if axes.get_title("left")}
    maps = {title: np.asarray(axes.images[0].get_array()) for title, axes in titled.items()}
    cwfedavg = next(title for title in maps if title.startswith("cwfedavg"))
    assert list(maps) == [
        "training images", "fedavg", "fedavg, fine-tuned", "difference", cwfedavg, "class models",
    ]  # fmt: skip
    _, before, _ = heads.fine_tuned(fedavg)
    np.testing.assert_allclose(maps["fedavg"], np.tile(before, (4, 1)))
    np.testing.assert_allclose(maps["difference"], maps["fedavg, fine-tuned"] - maps["fedavg"], atol=1e-12)
    assert np.abs(maps["difference"]).max() > 0.001


def test_figure_5_needs_two_values_of_lambda(folder: Path, cw: RunResult) -> None:
    with pytest.raises(BadRequest, match="not two values of lam"):
        papers.draw("cwfedavg-5", [cw.out])
    _, alt, _ = heads.regularisation(read_comparison(folder).runs)
    for name, lam in (("lam0", "0"), ("lam10", "10")):
        data = read_run(folder / name)
        assert f"{lam}: {100 * data.score('received'):.1f} %, R = {data.summary['wdr'][-1]:.3f}" in alt


# ---- the toy task ----------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_toy_task_is_the_papers() -> None:
    clients = pathways.data()
    assert [torch.bincount(y).tolist() for _, y in clients] == [[2700, 300], [200, 1800], [500, 500]]
    assert [x.shape for x, _ in clients] == [(3000, 3), (2000, 3), (1000, 3)]
    assert sum(v.size for n, v in pathways.models()["FedAvg, global"].items() if n.endswith("weight")) == 20


@pytest.mark.full
def test_models_of_the_toy_task_follow_eqs_4_to_7() -> None:
    found = pathways.models()
    n = np.array([3000, 2000, 1000])
    plain, regular, personal = (
        [found[f"{name}, client {i}"] for i in (1, 2, 3)] for name in ("FedAvg", "WDR", "cwFedAvg")
    )
    for name, global_ in found["FedAvg, global"].items():
        np.testing.assert_allclose(global_, sum(n[i] * plain[i][name] for i in range(3)) / 6000, rtol=1e-5, atol=1e-7)
    norms = [np.linalg.norm(m["head.weight"], axis=1) for m in regular]
    pt = [v / v.sum() for v in norms]
    for name in found["FedAvg, global"]:
        by_class = [
            sum(n[i] * pt[i][j] * regular[i][name] for i in range(3)) / sum(n[i] * pt[i][j] for i in range(3))
            for j in (0, 1)
        ]
        for j in (0, 1):
            np.testing.assert_allclose(found[f"global of class {j}"][name], by_class[j], rtol=1e-4, atol=1e-6)
        for i in range(3):
            expected = pt[i][0] * by_class[0] + pt[i][1] * by_class[1]
            np.testing.assert_allclose(personal[i][name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_critical_pathways_are_the_largest_weights_and_wdr_turns_them_to_the_majority() -> None:
    found = pathways.models()
    model = found["WDR, client 1"]
    shown = pathways.critical(model)
    everything = np.sort(np.abs(np.concatenate([model[f"{layer}.weight"].ravel() for layer in ("first", "head")])))
    assert [abs(w) for *_, w in shown] == pytest.approx(everything[::-1][:8].tolist())
    for layer, start, end, w in shown:
        assert model["head.weight" if layer else "first.weight"][end, start] == pytest.approx(w)
    ends = {i: {end for layer, _, end, _ in pathways.critical(found[f"WDR, client {i}"]) if layer} for i in (1, 2, 3)}
    assert ends == {1: {0}, 2: {1}, 3: {0, 1}}


@pytest.mark.full
def test_the_caption_of_the_toy_task_names_what_the_paper_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pathways, "CENTRES", ((0.5, 2.0, -1.0), (-3.0, 1.0, 1.0)))
    caption, _, _ = pathways.pathways()
    assert "standard deviation 1 around (0.5, 2, -1) and (-3, 1, 1)." in caption
    assert "5 epochs, SGD with lr 0.05 and batches of 10, lambda 0.4" in caption
