"""Charts of scores: one colour a method, bands, legends and ticks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex

from fedapp.engines.local import run
from fedapp.registry import title_of
from fedapp.results import figures
from fedapp.results.figures import style
from fedapp.results.figures.pieces import Curve
from fedapp.results.figures.plots import curves, sweep
from fedapp.results.runs import read_comparison

Stub: Any = SimpleNamespace
SMALL: dict[str, Any] = {"dataset": "digits", "clients": 3, "rounds": 2, "local_epochs": 2, "alpha": 1.0}


def paper_runs(there: Path) -> Path:
    """Run Standalone, FedClassAvg and KT-pFL with growing epochs, two seeds of the first; return their folder."""
    for name, method, more in (
        ("local", "local", {"model": "digits-b"}),
        ("local-1", "local", {"model": "digits-b", "seed": 1}),
        ("classavg", "fedclassavg", {"model": "digits-b"}),
        ("ktpfl", "ktpfl", {"model": "digits-b", "method_args": "epochs=growing"}),
    ):
        run(**{**SMALL, **more, "method": method, "out": there / name})
    return there


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return paper_runs(tmp_path_factory.mktemp("papers"))


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


@pytest.mark.full
def test_a_method_has_one_colour_on_the_page_of_a_comparison(folder: Path) -> None:
    """Traffic does not show Standalone, and still draw the others as the curves do."""
    comparison = read_comparison(folder)
    gallery = figures.of_comparison(comparison)
    titles = {title_of(label) for label in comparison.labels}
    seen: dict[str, set[str]] = {}
    for drawing in gallery.drawings:
        for label, colour in colours(drawing.figure).items():
            if label in titles:
                seen.setdefault(label, set()).add(colour)
    assert set(seen) == titles and all(len(found) == 1 for found in seen.values())
    assert len({colour for (colour,) in seen.values()}) == len(seen)
    assert any("Standalone" not in colours(d.figure) and "FedClassAvg" in colours(d.figure) for d in gallery.drawings)


@pytest.mark.parametrize("draw", [partial(curves, band="spread"), partial(sweep, xlabel="x")])
def test_no_band_and_no_error_bar_leaves_the_shares(draw: Any) -> None:
    mean, spread = np.array([0.02, 0.5, 0.99]), np.array([0.1, 0.1, 0.2])
    axes = draw({"": [Curve("a", np.arange(3.0), mean, spread)]}).axes[0]
    ends = np.concatenate([p.vertices[:, 1] for c in axes.collections for p in c.get_paths()])
    assert ends.min() == pytest.approx(0) and ends.max() == pytest.approx(1)
    assert {0.4, 0.6} <= set(ends.round(9)), "inside they are as high as the spread"


def test_every_mark_of_curves_is_in_the_legend() -> None:
    lines = [Curve("a", np.arange(3.0), np.arange(3.0) / 3, np.full(3, 0.1))]
    figure = curves({"p": lines, "q": lines}, baseline=("guessing", 0.4, "q"), band="spread over seeds")
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["a", "guessing", "spread over seeds"]
    heights = [[set(np.asarray(ln.get_ydata())) for ln in axes.lines] for axes in figure.axes]
    assert {0.4} in heights[0] and {0.4} not in heights[1]


def test_ticks_between_whole_percents_have_a_decimal() -> None:
    figure = curves({"": [Curve("a", np.arange(3.0), np.array([0.8, 0.9, 1.0]))]})
    axes = figure.axes[0]
    for ticks, expected in (([0.9, 0.95], ["90 %", "95 %"]), ([0.9, 0.925], ["90.0 %", "92.5 %"])):
        assert axes.yaxis.get_major_formatter().format_ticks(ticks) == expected
