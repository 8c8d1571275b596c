"""Metrics beside accuracy and loss: against computations by hand, in every table, and on real nodes."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from typer.testing import CliRunner

from fedapp import client_app, config, plugins
from fedapp.cli import app
from fedapp.data.transforms import normalise
from fedapp.engines import deploy
from fedapp.engines.local import run
from fedapp.errors import BadRequest
from fedapp.learning import evaluation
from fedapp.learning.state import read_safetensors
from fedapp.method import Payload
from fedapp.models import selection
from fedapp.results import report
from fedapp.results.directory import RunDirectory
from fedapp.results.runs import RunResult
from fedapp.results.statistics import harm, over_clients, tally
from fedapp.tasks import simulated
from fedapp.transport.local_grid import _identify
from fedapp.transport.records import Encoder, reply_of
from fedapp.transport.request import RoundRequest

Tiny = Callable[..., RunResult]
ALL = "accuracy,balanced,macro_f1,auc,ece,loss"
OWN = "tests.test_further_metrics:sureness"
COLUMNS = ("balanced_own", "macro_f1", "auc", "auc_classes", "ece")


def sureness(y: np.ndarray, probabilities: np.ndarray) -> float:
    """Mean probability of the true class."""
    return float(probabilities[np.arange(len(y)), y].mean())


def nothing(y: np.ndarray, probabilities: np.ndarray) -> float:
    raise ValueError("no")


# ---- by hand ---------------------------------------------------------------------------------------------------------


def drawn(seed: int, classes: int = 5, present: tuple[int, ...] = (0, 1, 3), n: int = 60) -> tuple[Any, Any]:
    """Labels of some of the classes, and probabilities that often lie on them and never tie."""
    rng = np.random.default_rng(seed)
    y = rng.choice(present, n)
    z = rng.normal(size=(n, classes)) + 1.5 * np.eye(classes)[y]
    e = np.exp(z)
    return y, e / e.sum(axis=1, keepdims=True)


def by_hand(y: np.ndarray, p: np.ndarray) -> dict[str, float]:
    """Loops over samples and pairs of samples."""
    guess = [max(range(p.shape[1]), key=lambda c: row[c]) for row in p]
    recalls, f1s, areas = [], [], []
    for c in sorted(set(y)):
        hit = sum(g == c == t for g, t in zip(guess, y))
        recalls.append(hit / sum(y == c))
        f1s.append(2 * hit / (sum(y == c) + sum(g == c for g in guess)))
        pairs = list(itertools.product(p[y == c, c], p[y != c, c]))
        areas.append(np.mean([(a > b) + 0.5 * (a == b) for a, b in pairs]))
    gaps = 0.0
    for b in range(15):
        inside = [i for i in range(len(y)) if b / 15 < p[i].max() <= (b + 1) / 15]
        if inside:
            accuracy = np.mean([guess[i] == y[i] for i in inside])
            gaps += len(inside) / len(y) * abs(accuracy - np.mean([p[i].max() for i in inside]))
    return {
        "balanced_own": float(np.mean(recalls)),
        "macro_f1": float(np.mean(f1s)),
        "auc": float(np.mean(areas)),
        "auc_classes": len(areas),
        "ece": gaps,
    }


@pytest.mark.parametrize("seed", range(4))
def test_metrics_equal_those_by_hand(seed: int) -> None:
    """Two of five classes are absent, and the model predicts them sometimes."""
    y, p = drawn(seed)
    assert set(p.argmax(axis=1)) - set(y)
    assert evaluation.measured(evaluation.METRICS, y, p) == pytest.approx(by_hand(y, p), rel=1e-12)


def test_metrics_equal_torchmetrics() -> None:
    functional = pytest.importorskip("torchmetrics.functional.classification", reason="torchmetrics is not installed")
    y, p = drawn(7, present=(0, 1, 2, 3, 4))
    labels, predicted = torch.from_numpy(y), torch.from_numpy(p)
    found = evaluation.measured(["balanced", "macro_f1", "auc", "ece"], y, p)
    expected = {
        "balanced_own": functional.multiclass_recall(predicted, labels, 5, average="macro"),
        "macro_f1": functional.multiclass_f1_score(predicted, labels, 5, average="macro"),
        "auc": functional.multiclass_auroc(predicted, labels, 5, average="macro"),
        "ece": functional.multiclass_calibration_error(predicted, labels, 5, n_bins=15),
    }
    assert found == pytest.approx({name: float(value) for name, value in expected.items()}, abs=1e-6)


def test_without_images_or_with_a_model_that_diverged_there_is_no_number() -> None:
    y, p = drawn(0)
    names = [*evaluation.METRICS, OWN]
    nan = p.copy()
    nan[3, 2] = np.nan
    for labels, probabilities in ((y[:0], p[:0]), (y, nan), (y, None)):
        found = evaluation.measured(names, labels, probabilities)
        assert list(found) == [*COLUMNS, "sureness"] and all(math.isnan(v) for v in found.values())
    one_class = evaluation.measured(["auc", "auc_classes", "balanced"], np.zeros(60, np.int64), p)
    assert one_class["auc_classes"] == 0, "there is no area to take the mean of"
    assert math.isnan(one_class["auc"]) and one_class["balanced_own"] == (p.argmax(axis=1) == 0).mean()


# ---- in a run --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    from fedapp.engines.local import run

    out = tmp_path_factory.mktemp("metrics") / "run"
    return run(method="fedavg", dataset="digits", data_fraction=0.3, clients=3, rounds=2, local_epochs=1,
               batch_size=64, evaluate_every=1, metrics=f"{ALL},{OWN}", out=out)  # fmt: skip


def test_they_are_of_the_models_that_the_accuracies_are_of(measured: RunResult) -> None:
    """`received` of every client, from the model that the server published."""
    settings = config.from_flat(measured.flat)
    method, hparams = settings.method_and_hparams()
    arrays, _ = read_safetensors(measured.out / "models" / "last.safetensors")
    for _, row in measured.final.iterrows():
        task = simulated.simulated_task(settings, int(row["client"]), 3, torch.device("cpu"))
        model = method.client.build_model(task.spec(0), hparams).eval()
        selection.merge(model, arrays)
        with torch.no_grad():
            logits = model(normalise(task.x_test.permute(0, 3, 1, 2), task.inputs))
        p, y = logits.double().softmax(dim=1).numpy(), task.y_test.numpy()
        expected = {**by_hand(y, p), "sureness": sureness(y, p)}
        assert {name: row[f"received_{name}"] for name in expected} == pytest.approx(expected, abs=1e-6)
        assert row["received_balanced"] != row["received_balanced_own"], "all clients' images, and the client's own"


def test_summary_and_evaluations_hold_their_means(measured: RunResult) -> None:
    for protocol, name in itertools.product(("received", "trained"), ("accuracy", "loss", *COLUMNS, "sureness")):
        values = sorted(measured.final[f"{protocol}_{name}"])
        found = measured.summary["metrics"][protocol][name]
        low = name in ("loss", "ece")
        assert found == pytest.approx({
            "mean": np.mean(values), "std": np.std(values), "worst_decile": values[-1 if low else 0],
            **({"max": values[-1]} if low else {"min": values[0]}),
        })  # fmt: skip
        assert measured.evaluations[f"{protocol}_{name}"].between(0, 10).all()
    assert set(measured.summary["metrics"]["global"]) == {"accuracy", "loss", *COLUMNS, "sureness"}
    assert measured.summary["metrics"]["global"]["accuracy"]["mean"] == measured.score("global")
    assert measured.metric("trained", "ece", "worst") == measured.final["trained_ece"].max()
    page = report.write(measured.out).read_text()
    assert "received macro_f1" in page and "auc_classes" not in page
    assert f"{measured.metric('trained', 'auc'):.3f}" in page


def test_they_change_no_other_number(measured: RunResult, tiny: Tiny) -> None:
    usual = tiny(method="fedavg", evaluate_every=1)
    for name in ("rounds", "clients", "evaluations", "final"):
        table, other = getattr(usual, name), getattr(measured, name)
        keep = [c for c in table if not c.endswith("seconds")]
        pd.testing.assert_frame_equal(table[keep], other[keep], check_exact=True)
    assert not any("macro_f1" in c for c in usual.final) and usual.metrics == ()
    assert not any("macro_f1" in c for c in measured.rounds), "rounds measure what they always did"


def test_nothing_is_kept_for_metrics_that_nobody_asked_for(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "measured", lambda *a: pytest.fail("it measures"))
    monkeypatch.setattr("clients.base.measured", lambda *a: pytest.fail("it measures"))
    tiny(method="local", rounds=1)


def test_nearest_prototypes_have_probabilities_too(tiny: Tiny) -> None:
    result = tiny(method="fedproto", rounds=1, method_args="inference=prototype", metrics="auc,ece")
    assert result.final[["received_auc", "trained_ece"]].notna().all(axis=None)


def test_confusion_matrices_of_the_last_scores(measured: RunResult, tiny: Tiny, tmp_path: Path) -> None:
    """Counts of every client, from the model that the server published; they change nothing else."""
    found = tiny(method="fedavg", metrics="confusion", evaluate_every=1)
    settings = config.from_flat(found.flat)
    method, hparams = settings.method_and_hparams()
    arrays, _ = read_safetensors(found.out / "models" / "last.safetensors")
    with np.load(found.out / "final_confusion.npz") as held:
        matrices = dict(held)
    assert sorted(matrices) == ["client", "received", "trained"] and matrices["client"].tolist() == [0, 1, 2]
    for k, row in found.final.iterrows():
        task = simulated.simulated_task(settings, int(row["client"]), 3, torch.device("cpu"))
        model = method.client.build_model(task.spec(0), hparams).eval()
        selection.merge(model, arrays)
        with torch.no_grad():
            guess = model(normalise(task.x_test.permute(0, 3, 1, 2), task.inputs)).argmax(dim=1)
        expected = np.zeros((10, 10), int)
        for true, taken in zip(task.y_test.tolist(), guess.tolist(), strict=True):
            expected[true, taken] += 1
        np.testing.assert_array_equal(matrices["received"][k], expected)
        assert not (expected == expected.T).all() and np.trace(matrices["trained"][k]) == row["trained_correct"]
        assert matrices["trained"][k].sum() == row["trained_total"]
    assert found.metrics == () and set(found.final) < set(measured.final)
    keep = [c for c in found.rounds if not c.endswith("seconds")]
    pd.testing.assert_frame_equal(found.rounds[keep], measured.rounds[keep], check_exact=True)
    assert "received" in report.write(found.out).read_text()
    assert not (measured.out / "final_confusion.npz").exists()


def test_clients_without_a_score_have_no_matrix(tmp_path: Path) -> None:
    written = RunDirectory.__new__(RunDirectory)
    written.path = tmp_path
    written.confusion({4: {"received-confusion": [1, 2, 3, 4]}, 2: {}}, ["received", "trained"])
    with np.load(tmp_path / "final_confusion.npz") as held:
        assert set(held) == {"client", "received"} and held["client"].tolist() == [2, 4]
        assert held["received"].tolist() == [[[-1, -1], [-1, -1]], [[1, 2], [3, 4]]]
    written.confusion({4: {}}, ["received"])
    assert not list(tmp_path.iterdir()), "those of an earlier end are gone"
    with pytest.raises(TypeError, match="a score without probabilities"):
        evaluation.confusion(np.zeros(1, np.int64), None)


def test_too_many_classes_for_a_matrix(tmp_path: Path) -> None:
    y = np.arange(257).repeat(4)
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).normal(size=(len(y), 3)).astype("f4"), y=y)
    given = {"dataset": "npz", "data_dir": str(tmp_path / "x.npz"), "partition": "iid", "clients": 2, "rounds": 1}
    with pytest.raises(BadRequest, match="at most 256 classes, and the data have 257"):
        run(method="local", metrics="confusion", out=tmp_path / "out", **given)


# ---- refused ---------------------------------------------------------------------------------------------------------

BAD = {
    "macrof1": "did you mean 'macro_f1'",
    "nowhere.at.all:f": "cannot be imported",
    "tests.test_further_metrics:absent": "cannot be imported",
    "tests.test_further_metrics:ALL": "is not a function",
    "os.path:": "not of the form",
    "../evil:f": "not of the form",
    "tests.test_further_metrics:a.b": "not of the form",
    "some.module:accuracy": "rename your function",
    f"{OWN},other.module:sureness": "rename your function",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_metric_is_refused_before_anything_runs(text: str, tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=BAD[text]):
        tiny(method="fedavg", metrics=text, out=tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_a_metric_that_fails_says_so(tiny: Tiny) -> None:
    with pytest.raises(
        RuntimeError, match=r"nothing' fails with ValueError: no \(.*test_\w+\.py, line [0-9]+, in nothing"
    ):
        tiny(method="fedavg", rounds=1, metrics=OWN.replace("sureness", "nothing"))


def test_real_nodes_import_no_code_that_a_server_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, refused = plugins.importlib.import_module, OWN.partition(":")[0]
    monkeypatch.setattr(plugins.importlib, "import_module", lambda n: pytest.fail(n) if n == refused else taken(n))
    _identify(1)
    flat = config.from_flat({"dataset": "digits", "metrics": OWN}).to_flat()
    own = {"client-id": 0, "data-path": str(tmp_path)}
    shared = {"partition-id": 0, "num-partitions": 3}
    for node in (own, shared):
        content, _ = Encoder("fp32").content(Payload(), RoundRequest())
        context = Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config=flat)
        answer = client_app.app(Message(content, 1, "query.register"), context)
        _, _, info, _ = reply_of(answer)
        assert "a node imports no code that a server names: choose from accuracy, loss, balanced" in info["error"]
    monkeypatch.setattr(deploy, "connection", lambda name: None)
    for metrics in (OWN, "accuracy,confusion"):
        with pytest.raises(BadRequest, match="is for simulations"):
            deploy.run({"metrics": metrics}, tmp_path / "out", None)
        with pytest.raises(BadRequest, match="is for simulations"):
            config.check_node(config.from_flat({"dataset": "digits", "metrics": metrics}))


# ---- over clients ----------------------------------------------------------------------------------------------------


def test_spread_over_clients_by_hand() -> None:
    values = [0.1 * i for i in range(21)] + [math.nan]
    found = over_clients(values)
    assert found == pytest.approx({"mean": 1.0, "std": np.std(values[:21]), "worst_decile": 0.1, "min": 0.0})
    assert over_clients(values, low_is_good=True) == pytest.approx({
        "mean": 1.0, "std": np.std(values[:21]), "worst_decile": 1.9, "max": 2.0,
    })  # fmt: skip
    assert all(math.isnan(v) for v in over_clients([]).values())


def counts(correct: list[float], total: float, first: int = 0) -> pd.DataFrame:
    clients = range(first, first + len(correct))
    return pd.DataFrame({"correct": correct, "total": [total] * len(correct)}, index=clients, dtype=float)


def test_a_client_gains_or_loses_by_more_than_the_error_of_the_difference() -> None:
    """100 test rows at 50 %: one standard error is sqrt(50) = 7.07 rows; at 100 % one row is the least."""
    alone = counts([50, 50, 50, 100, 100, 50], 100)
    assert harm(counts([58, 57, 42, 99, 98, math.nan], 100), alone) == (1, 2, 2)
    assert harm(counts([58, 50], 100, first=5), alone) == (1, 0, 0), "clients that both runs have"
    assert all(math.isnan(v) for v in harm(counts([1], 2, first=9), alone))
    assert all(math.isnan(v) for v in harm(counts([0], 0), counts([0], 0))), "no test rows"
    assert tally([(5, 2, 3), (4, 3, 3), (math.nan,) * 3]) == "4.5 / 2.5 / 3" and tally([]) == "–"


@pytest.mark.full
@pytest.mark.usefixtures("in_turn", "no_figures")
def test_a_comparison_shows_metrics_headlines_and_whom_methods_harm(tmp_path: Path) -> None:
    words = ("--methods", "local,fedavg,fedprox", "--clients", "4", "--rounds", "1", "--seeds", "2", "--workers", "1",
             "--set", "metrics=macro_f1,ece", "--out", str(tmp_path / "c"))  # fmt: skip
    result = CliRunner().invoke(app, ["compare", *words])
    assert result.exit_code == 0, result.output
    table = pd.read_csv(tmp_path / "c" / "results.csv")
    finals = {p.parent.name: pd.read_csv(p).set_index("client") for p in (tmp_path / "c").glob("runs/*/final.csv")}
    for _, row in table.iterrows():
        final, alone = finals[f"{row['variant']}-s{row['seed']}"], finals[f"local-s{row['seed']}"]
        if row["variant"] == "local":
            assert math.isnan(row["gain"]) and math.isnan(row["received_macro_f1"])
            assert row["headline"] == "trained" and row["headline_last"] == row["trained_last"]
        else:
            assert row["headline"] == "received" and row["headline_last"] == row["received_last"]
            n, c, without = final["received_total"], final["received_correct"], alone["trained_correct"]
            error = (c * (1 - c / n) + without * (1 - without / n)) ** 0.5
            gain, lose = (int((d > error.clip(lower=1)).sum()) for d in (c - without, without - c))
            assert (row["gain"], row["same"], row["lose"]) == (gain, 4 - gain - lose, lose)
            assert row["received_macro_f1"] == pytest.approx(final["received_macro_f1"].mean())
        assert row["trained_ece_worst"] == final["trained_ece"].max()
        summary = json.loads((tmp_path / "c" / f"runs/{row['variant']}-s{row['seed']}/summary.json").read_text())
        assert row["trained_macro_f1_worst_decile"] == summary["metrics"]["trained"]["macro_f1"]["worst_decile"]
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "c"), "--all"]).stdout
    assert "Further metrics, mean over clients" in shown and "macro_f1" in shown
    assert "gain / same / lose: clients whose headline is above" in shown
    assert "judged by: trained for training alone; received for FedAvg, FedProx." in shown
    page = (tmp_path / "c" / "report.html").read_text()
    assert (
        "gain / same / lose: clients whose headline is above" in page
        and ">FedAvg *<" in page
        and ">FedProx *<" in page
        and "trained ece, worst 10 %" in page
    )
