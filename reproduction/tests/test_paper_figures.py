"""`python -m reproduction figure`: every figure is documented with its picture, and bad requests say what to do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from fedapp.engines.local import run
from fedapp.errors import BadRequest
from fedapp.results.figures.pieces import Curve
from fedapp.results.figures.plots import sweep
from fedapp.transport.traffic import RoundFailed
from reproduction.figures import calibration, maps, papers, plots
from reproduction.studies import figures as study

PAGE = Path(__file__).parents[2] / "docs" / "figures.md"


def test_the_page_has_a_section_its_runs_and_a_picture_for_every_figure_and_no_other() -> None:
    sections = dict(re.findall(r"^### ([a-z]+-\w+): .*?\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    assert list(sections) == [n for n in sections if n in papers.FIGURES], "a section without a figure"
    assert set(papers.FIGURES) == set(sections)
    assert "python -m reproduction figure ccvr-2 RUN" in PAGE.read_text(), "the page begins with the command of all"
    for name, text in sections.items():
        assert any(said in text for said in ("Runs: `", "--out runs/", "No run is needed")), name
        pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
        assert pictures and all((PAGE.parent / p).is_file() for p in pictures), name


def test_a_figure_is_drawn_from_a_run_into_a_file(tmp_path: Path) -> None:
    run(dataset="digits", data_fraction=0.3, clients=3, rounds=1, out=tmp_path / "run")
    drawing = papers.draw("fedclassavg-2", [tmp_path / "run"])
    papers.save(drawing, tmp_path / "a" / "f.svg")
    assert ElementTree.parse(tmp_path / "a" / "f.svg").getroot().tag.endswith("svg")
    papers.save(drawing, tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(BadRequest, match=r"ends in \.svg or \.png"):
        papers.save(drawing, tmp_path / "f.pdf")


def test_a_figure_names_methods_by_their_titles(tmp_path: Path) -> None:
    for method in ("fedprox", "lgfedavg"):
        run(dataset="digits", method=method, data_fraction=0.1, clients=2, rounds=1, out=tmp_path / method)
    with pytest.raises(RoundFailed):
        run(dataset="digits", method="fedavg", data_fraction=0.1, clients=2, rounds=1, lr=1e8, out=tmp_path / "failed")
    drawing = papers.draw("fedgh-2", [tmp_path])
    page = drawing.svg(text=True)
    assert "Failed, and not drawn: FedAvg, seed 0 (round 1: " in drawing.caption
    assert "failed, and not drawn: FedAvg" in page
    assert "FedProx" in page and "LG-FedAvg" in page
    named = papers.draw("fedgh-2", [tmp_path / "fedprox", tmp_path / "failed"])
    assert "Failed, and not drawn: FedAvg" in named.caption and "FedAvg" not in named.alt
    assert not re.search("fedprox|lgfedavg", page + drawing.caption + drawing.alt)


def test_a_bad_request_says_what_the_figure_needs(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"no figure 'fedclassavg-22', did you mean 'fedclassavg-2'"):
        papers.draw("fedclassavg-22", [])
    with pytest.raises(BadRequest, match="needs one run, of 2b with"):
        papers.draw("fedclassavg-2", [])
    with pytest.raises(BadRequest, match="missing does not exist"):
        papers.draw("fedclassavg-2", [tmp_path / "missing"])


def test_maps_that_are_compared_share_a_scale() -> None:
    counts, early, late = np.array([[9.0, 1]]), np.array([[1.0, 2]]), np.array([[3.0, 7]])
    rows = {"a": {"training images": counts, "round 1": early, "round 9": late}}
    figure = maps.heat_grid(rows, "class", "client", ["0", "1"], own=("training images",))
    assert [axes.images[0].get_clim() for axes in figure.axes[:3]] == [(0, 9), (1, 7), (1, 7)]
    panels = {"training images": (counts, "client", [0]), "a": (early, "client", [0]), "b": (late, "client", [0])}
    figure = maps.named_maps(panels, ["0", "1"], own=("training images",))
    assert [axes.images[0].get_clim() for axes in figure.axes[:3]] == [(1, 9), (1, 7), (1, 7)]


@pytest.mark.parametrize("first", [0.0, 10.0])
def test_values_far_apart_stand_on_an_axis_of_numbers(first: float) -> None:
    x = np.array([first, 50, 2000])
    (axes,) = sweep({"": [Curve("a", x, x / 4000)]}, "samples").axes
    assert axes.get_xscale() == ("log" if first else "symlog")
    np.testing.assert_array_equal(axes.lines[0].get_xdata(), x)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == [f"{v:g}" for v in x]


def test_means_of_layers_stand_above_their_names() -> None:
    figure = plots.cka({"a": {"conv": np.eye(2), "head": np.eye(2)}, "b": {"conv": np.eye(2), "head": np.eye(2)}})
    means = [line for line in figure.axes[0].lines if line.get_label() in ("a", "b")]
    assert [list(line.get_xdata()) for line in means] == [[0, 1], [0, 1]]


def test_only_predictions_that_change_have_numbers() -> None:
    before, after = np.array([1, 2, 3]), np.array([1, 5, 3])
    shown = calibration.changed(before, after)
    assert {name: list(values) for name, values in shown.items()} == {"before": [-1, 2, -1], "after": [-1, 5, -1]}
    figure = plots.embedding({"": (np.arange(6.0).reshape(3, 2), shown)})
    sizes = [sum(len(c.get_offsets()) for c in axes.collections) for axes in figure.axes]
    assert sizes == [3, 3] and all(len(axes.collections[0].get_offsets()) == 2 for axes in figure.axes)


@pytest.mark.full
def test_the_toy_example_says_what_its_lines_are() -> None:
    _, _, figure = papers.FIGURES["cwfedavg-1"].draw(())
    said = [text.get_text() for text in figure.legends[0].get_texts()]
    assert said == ["positive weight", "negative weight", "width: magnitude within a network"]


def test_every_picture_was_drawn_by_the_commands_of_the_page() -> None:
    """`python -m reproduction study figures` draws those that are not."""
    pictures = study.pictures_of(study.all_pages())
    assert {p.figure for p in pictures} == set(papers.FIGURES)
    assert json.loads(study.DRAWN.read_text()) == {p.file: p.digest for p in pictures}


def test_commands_of_a_page_run_once_and_a_failed_one_is_named(tmp_path: Path) -> None:
    commands = {"runs/a": "echo fedapp >> count && mkdir -p runs/a", "runs/b": "fedapp-is-missing"}
    for _ in range(2):
        assert study.run_commands(commands, tmp_path, tmp_path) == ["fedapp-is-missing"]
    assert (tmp_path / "count").read_text() == "fedapp\n"
    with pytest.raises(BadRequest, match="fedgh-2: no command of the page makes runs/b"):
        study.pictures_of("### fedgh-2: x\n\nRuns: `runs/b`.\n\n![x](figures/a.svg)\n")
