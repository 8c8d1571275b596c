"""Figures of FedClassAvg and FedGH: axes in local epochs, the cost of a round, all clients before the ReLU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedapp import config
from fedapp.data.transforms import normalise
from fedapp.engines.local import run
from fedapp.results.analysis import Unavailable
from fedapp.results.runs import read_comparison, read_run
from reproduction.figures import accuracy, costs, models, papers, representations
from tests.test_score_figures import SMALL, colours, paper_runs

Stub: Any = SimpleNamespace


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return paper_runs(tmp_path_factory.mktemp("papers"))


@pytest.mark.parametrize(
    ("flat", "rounds", "expected"),
    [
        ({"method": "local", "local-epochs": 3}, [1, 2, 5], [3, 6, 15]),
        ({"method": "ktpfl", "method-args": "epochs=growing"}, [1, 2, 3, 20, 22], [1, 3, 6, 210, 250]),
        ({"method": "fedclassavg", "local-epochs": 1, "method-args": "preset=authors"}, [1, 2], [2, 3]),
        ({"method": "fedclassavg", "local-epochs": 2}, [], []),
    ],
)
def test_local_epochs_after_each_round(flat: dict[str, Any], rounds: list[int], expected: list[float]) -> None:
    """KT-pFL's released code trains min(t, 20) epochs in round t, FedClassAvg's one more before its first round."""
    one: Any = SimpleNamespace(config=config.from_flat(flat))
    assert accuracy.epochs_done(one, np.array(rounds)).tolist() == expected


@pytest.mark.full
def test_accuracy_by_local_epochs_is_the_mean_over_seeds(folder: Path) -> None:
    runs = list(read_comparison(folder).runs)
    _, alt, figure = accuracy.by_epochs(runs)
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert {str(label).partition("(")[0] for label in lines} == {"local", "fedclassavg", "ktpfl"}
    growing = next(line for label, line in lines.items() if str(label).startswith("ktpfl"))
    assert list(growing.get_xdata()) == [1, 3, 6], "the last point trained once more after the last round"
    assert list(lines["local"].get_xdata()) == [2, 4, 6] and "local" in alt
    both = [read_run(folder / n).curve("trained")["accuracy"] for n in ("local", "local-1")]
    np.testing.assert_allclose(lines["local"].get_ydata(), np.mean(both, axis=0))
    with pytest.raises(Unavailable, match="no run measured global"):
        accuracy.by_epochs(runs, "global")


def test_operations_of_a_round_by_hand(folder: Path) -> None:
    """Three linear layers: forward, gradients of the weights, gradients of all inputs but the image's."""
    layers = [2 * 64 * 128, 2 * 128 * 64, 2 * 64 * 10]
    once = 3 * sum(layers) - layers[0]
    alone = read_run(folder / "local")
    images = alone.counts.sum(axis=1).mean()
    assert costs.cost(alone) == (0, 0, pytest.approx(once * images * 2))
    head = 4 * (64 * 10 + 10)
    up, down, flops = costs.cost(read_run(folder / "classavg"))
    assert (up, down) == (head, head)
    # Both views pass the trunk, one the head; the contrastive loss multiplies 2B rows with each other.
    assert flops > (2 * once - 3 * layers[2]) * images * 2


def test_bytes_of_a_head_grow_with_its_width(folder: Path) -> None:
    assert costs.head_bytes(read_run(folder / "classavg")) == (64, 10, 4 * (64 * 10 + 10))
    with pytest.raises(Unavailable, match="ktpfl sends other arrays"):
        costs.head_bytes(read_run(folder / "ktpfl"))
    with pytest.raises(Unavailable, match="different widths"):
        papers.FIGURES["fedclassavg-scaling"].draw([read_run(folder / "classavg")])
    narrow, wide = (
        Stub(summary={"bytes_up": 4 * 10 * (n + 1)}, classes=["x"] * 10, config=config.from_flat({"model": model}))
        for n, model in ((50, "fedproto-a"), (500, "fedgh-1"))
    )
    _, alt, figure = papers.FIGURES["fedclassavg-scaling"].draw([wide, narrow])
    measured, line = (np.asarray(ln.get_ydata()) for ln in figure.axes[0].lines if len(ln.get_xdata()) == 2)
    assert measured.tolist() == line.tolist() == [2040, 20040] and "N = 500" in alt


@pytest.mark.full
def test_all_clients_before_the_relu(folder: Path) -> None:
    one = read_run(folder / "classavg")
    x, _ = models.probe(one, 40)
    model = models.client_models(one)[1]
    rows = models.represent(one, model, x, activated=False)
    expected = model.features(normalise(x.permute(0, 3, 1, 2), models.data_of(one).inputs)).detach().numpy()
    np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)
    assert rows.min() < 0 <= models.represent(one, model, x).min()
    _, numbers, _ = representations.client_embedding(one, points=60)
    assert sorted(set(numbers["by client"].tolist())) == [0, 1, 2]
    caption, _, _ = papers.FIGURES["fedclassavg-8"].draw([one])
    assert "before the ReLU of the same test images by all 3 clients" in caption


@pytest.mark.full
def test_runs_of_several_folders_are_told_apart(folder: Path, tmp_path: Path) -> None:
    run(**{**SMALL, "model": "digits-b", "method": "fedclassavg", "method_args": "rho=1", "out": tmp_path / "other"})
    drawing = papers.draw("fedclassavg-4", [folder / "classavg", tmp_path / "other"])
    assert sorted(colours(drawing.figure)) == ["FedClassAvg", "FedClassAvg (rho=1)"]


@pytest.mark.full
def test_a_sweep_and_a_hyperparameter_are_drawn_or_say_what_they_need(folder: Path, tmp_path: Path) -> None:
    for place, fraction, lr in (("sweep", 0.4, 0.1), ("sweep", 1.0, 0.1), ("rates", 1.0, 0.1), ("rates", 1.0, 1)):
        args = {"method": "fedgh", "method_args": f"header_lr={lr}", "fraction_train": fraction}
        run(**{**SMALL, **args, "rounds": 1, "out": tmp_path / place / f"{fraction}-{lr}"})
    swept, rates = papers.draw("fedgh-4", [tmp_path / "sweep"]), papers.draw("fedgh-5", [tmp_path / "rates"])
    for drawing, expected in ((swept, [0.4, 1.0]), (rates, [0.1, 1.0])):
        line = next(ln for ln in drawing.figure.axes[-1].lines if len(ln.get_xdata()) == 2)
        assert list(line.get_xdata()) == expected
    with pytest.raises(Unavailable, match="several values of header_lr"):
        papers.FIGURES["fedgh-5"].draw([read_run(folder / "local")])
