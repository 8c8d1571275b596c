"""Figures of FedClassAvg and FedGH: axes in local epochs, what a round costs, all clients before the ReLU, one colour a
method."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex

from fedapp import config
from fedapp.data.transforms import normalise
from fedapp.engines.local import run
from fedapp.results import analysis, costs, figures, representations
from fedapp.results.analysis import Unavailable
from fedapp.results.figures import papers, scores, style
from fedapp.results.figures.pieces import Curve
from fedapp.results.figures.plots import curves, sweep
from fedapp.results.figures.words import title_of
from fedapp.results.runs import read_comparison, read_run

Stub: Any = SimpleNamespace
SMALL: dict[str, Any] = {"dataset": "digits", "clients": 3, "rounds": 2, "local_epochs": 2, "alpha": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Standalone, FedClassAvg and KT-pFL with growing epochs, two seeds of the first."""
    there = tmp_path_factory.mktemp("papers")
    for name, method, more in (
        ("local", "local", {"model": "digits-b"}),
        ("local-1", "local", {"model": "digits-b", "seed": 1}),
        ("classavg", "fedclassavg", {"model": "digits-b"}),
        ("ktpfl", "ktpfl", {"model": "digits-b", "method_args": "epochs=growing"}),
    ):
        run(**{**SMALL, **more, "method": method, "out": there / name})
    return there


# ---- local epochs ----------------------------------------------------------------------------------------------------


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
    assert scores.epochs_done(one, np.array(rounds)).tolist() == expected


def test_accuracy_by_local_epochs_is_the_mean_over_seeds(folder: Path) -> None:
    runs = list(read_comparison(folder).runs)
    _, alt, figure = scores.by_epochs(runs)
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert {str(label).partition("(")[0] for label in lines} == {"local", "fedclassavg", "ktpfl"}
    growing = next(line for label, line in lines.items() if str(label).startswith("ktpfl"))
    assert list(growing.get_xdata()) == [1, 3, 6], "the last point trained once more after the last round"
    assert list(lines["local"].get_xdata()) == [2, 4, 6] and "local" in alt
    both = [read_run(folder / n).curve("trained")["accuracy"] for n in ("local", "local-1")]
    np.testing.assert_allclose(lines["local"].get_ydata(), np.mean(both, axis=0))
    with pytest.raises(Unavailable, match="no run measured global"):
        scores.by_epochs(runs, "global")


# ---- costs -----------------------------------------------------------------------------------------------------------


def test_operations_of_a_round_by_hand(folder: Path) -> None:
    """Three linear layers: forward, gradients of the weights, gradients of all inputs but the image's."""
    layers = [2 * 64 * 128, 2 * 128 * 64, 2 * 64 * 10]
    once = 3 * sum(layers) - layers[0]
    alone = read_run(folder / "local")
    images = alone.counts.sum(axis=1).mean()
    found = costs.cost(alone)
    assert found.flops == pytest.approx(once * images * 2) and (found.up, found.down) == (0, 0)
    head = 4 * (64 * 10 + 10)
    ours = costs.cost(read_run(folder / "classavg"))
    assert (ours.up, ours.down) == (head, head)
    # Both views pass the trunk, one the head; the contrastive loss multiplies 2B rows with each other.
    assert ours.flops > (2 * once - 3 * layers[2]) * images * 2


def test_bytes_of_a_head_grow_with_its_width(folder: Path) -> None:
    assert costs.head_bytes(read_run(folder / "classavg")) == (64, 10, 4 * (64 * 10 + 10))
    with pytest.raises(Unavailable, match="ktpfl sends other arrays"):
        costs.head_bytes(read_run(folder / "ktpfl"))
    with pytest.raises(Unavailable, match="different widths"):
        papers.PAPERS["fedclassavg-scaling"].draw([read_run(folder / "classavg")])
    narrow, wide = (
        Stub(summary={"bytes_up": 4 * 10 * (n + 1)}, classes=["x"] * 10, config=config.from_flat({"model": model}))
        for n, model in ((50, "fedproto-a"), (500, "fedgh-1"))
    )
    _, alt, figure = papers.PAPERS["fedclassavg-scaling"].draw([wide, narrow])
    measured, line = (np.asarray(ln.get_ydata()) for ln in figure.axes[0].lines if len(ln.get_xdata()) == 2)
    assert measured.tolist() == line.tolist() == [2040, 20040] and "N = 500" in alt


# ---- representations -------------------------------------------------------------------------------------------------


def test_all_clients_before_the_relu(folder: Path) -> None:
    one = read_run(folder / "classavg")
    x, _ = analysis.probe(one, 40)
    model = analysis.client_models(one)[1]
    rows = analysis.represent(one, model, x, activated=False)
    expected = model.features(normalise(x.permute(0, 3, 1, 2), analysis.data_of(one).inputs)).detach().numpy()
    np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)
    assert rows.min() < 0 <= analysis.represent(one, model, x).min()
    found = representations.client_embedding(one, clients=None, points=60, activated=False)
    assert sorted(set(found.client.tolist())) == [0, 1, 2]
    caption, _, _ = papers.PAPERS["fedclassavg-8"].draw([one])
    assert "before the ReLU of the same test images by all 3 clients" in caption


# ---- one look a method -----------------------------------------------------------------------------------------------


def colours(figure: Any) -> dict[str, str]:
    return {str(ln.get_label()): to_hex(ln.get_color()) for ax in figure.axes for ln in ax.lines}


def test_a_method_keeps_its_colour_where_a_figure_shows_some_of_the_runs() -> None:
    names = ["Standalone", "FedProx (mu=1)", "FedProx (mu=2)", "FedAvg"]

    def drawn(shown: list[str]) -> dict[str, str]:
        return colours(curves({"": [Curve(n, np.arange(3.0), np.arange(3.0)) for n in shown]}))

    with style.one_look_each(names):
        whole, last = drawn(names), drawn(names[2:])
        assert len(set(whole.values())) == 4 and last == {n: whole[n] for n in names[2:]}
        assert drawn(["FedProx"])["FedProx"] == whole["FedProx (mu=1)"], "it stands for all its variants"
        assert drawn(["x", "FedAvg, alpha 1"])["FedAvg, alpha 1"] == whole["FedAvg"], "in a certain setting too"
        both = drawn(["FedAvg, alpha 1", "FedAvg, alpha 2"])
        assert len(set(both.values())) == 2, "two settings of one method are told apart"
        other = drawn(["class held", "class absent"])
        assert set(other.values()) == {style.INK, style.MUTED}, "what is no method has no method's colour"
        narrow = colours(style._AGAIN[curves({"": [Curve("FedAvg", np.arange(3.0), np.arange(3.0))]})]())
    assert narrow["FedAvg"] == whole["FedAvg"], "on a phone, and when the page is done"
    assert drawn(["FedAvg"])["FedAvg"] == whole["Standalone"], "afterwards every figure starts anew"


def test_a_method_has_one_colour_on_the_page_of_a_comparison(folder: Path) -> None:
    """Traffic and heads do not show Standalone, and still draw the others as the curves do."""
    comparison = read_comparison(folder)
    gallery = figures.of_comparison(comparison, everything=False)
    titles = {title_of(label) for label in comparison.labels}
    seen: dict[str, set[str]] = {}
    for drawing in gallery.drawings:
        for label, colour in colours(drawing.figure).items():
            if label in titles:
                seen.setdefault(label, set()).add(colour)
    assert set(seen) == titles and all(len(found) == 1 for found in seen.values())
    assert len({colour for (colour,) in seen.values()}) == len(seen)
    assert any("Standalone" not in colours(d.figure) and "FedClassAvg" in colours(d.figure) for d in gallery.drawings)


@pytest.mark.parametrize("draw", [curves, partial(sweep, xlabel="x")])
def test_no_band_and_no_error_bar_leaves_the_shares(draw: Any) -> None:
    mean, spread = np.array([0.02, 0.5, 0.99]), np.array([0.1, 0.1, 0.2])
    axes = draw({"": [Curve("a", np.arange(3.0), mean, spread)]}).axes[0]
    ends = np.concatenate([p.vertices[:, 1] for c in axes.collections for p in c.get_paths()])
    assert ends.min() == pytest.approx(0) and ends.max() == pytest.approx(1)
    assert {0.4, 0.6} <= set(ends.round(9)), "inside they are as high as the spread"


def test_every_mark_of_curves_is_in_the_legend() -> None:
    lines = [Curve("a", np.arange(3.0), np.arange(3.0) / 3, np.full(3, 0.1))]
    figure = curves({"p": lines, "q": lines}, baseline=("guessing", 0.4), without="q", band="spread over seeds")
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["a", "guessing", "spread over seeds"]
    heights = [[set(np.asarray(ln.get_ydata())) for ln in axes.lines] for axes in figure.axes]
    assert {0.4} in heights[0] and {0.4} not in heights[1]


# ---- papers ----------------------------------------------------------------------------------------------------------


def test_runs_of_several_folders_are_told_apart(folder: Path, tmp_path: Path) -> None:
    run(**{**SMALL, "model": "digits-b", "method": "fedclassavg", "method_args": "rho=1", "out": tmp_path / "other"})
    drawing = papers.draw("fedclassavg-4", [folder / "classavg", tmp_path / "other"])
    assert sorted(colours(drawing.figure)) == ["FedClassAvg", "FedClassAvg (rho=1)"]


def test_a_sweep_and_a_hyperparameter_are_drawn_or_say_what_they_need(folder: Path, tmp_path: Path) -> None:
    for place, fraction, lr in (("sweep", 0.4, 0.1), ("sweep", 1.0, 0.1), ("rates", 1.0, 0.1), ("rates", 1.0, 1)):
        args = {"method": "fedgh", "method_args": f"header_lr={lr}", "fraction_train": fraction}
        run(**{**SMALL, **args, "rounds": 1, "out": tmp_path / place / f"{fraction}-{lr}"})
    swept, rates = papers.draw("fedgh-4", [tmp_path / "sweep"]), papers.draw("fedgh-5", [tmp_path / "rates"])
    for drawing, expected in ((swept, [0.4, 1.0]), (rates, [0.1, 1.0])):
        line = next(ln for ln in drawing.figure.axes[-1].lines if len(ln.get_xdata()) == 2)
        assert list(line.get_xdata()) == expected
    with pytest.raises(Unavailable, match="several values of header_lr"):
        papers.PAPERS["fedgh-5"].draw([read_run(folder / "local")])


def test_ticks_between_whole_percents_have_a_decimal() -> None:
    figure = curves({"": [Curve("a", np.arange(3.0), np.array([0.8, 0.9, 1.0]))]})
    axes = figure.axes[0]
    for ticks, expected in (([0.9, 0.95], ["90 %", "95 %"]), ([0.9, 0.925], ["90.0 %", "92.5 %"])):
        assert axes.yaxis.get_major_formatter().format_ticks(ticks) == expected
