"""`python -m reproduction figure`: every figure is documented with its picture, and bad requests say what to do."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fedapp.engines.local import run
from fedapp.errors import BadRequest
from fedapp.transport.client_manager import RoundFailed
from reproduction.figures import papers

PAGE = Path(__file__).parents[2] / "docs" / "figures.md"


def test_the_page_has_a_section_a_command_and_a_picture_for_every_figure_and_no_other() -> None:
    sections = dict(re.findall(r"^### ([a-z]+-\w+): .*?\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    assert list(sections) == [n for n in sections if n in papers.PAPERS], "a section without a figure"
    assert set(papers.PAPERS) == set(sections)
    for name, text in sections.items():
        assert f"python -m reproduction figure {name} " in text, name
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
    assert not re.search("fedprox|lgfedavg", page + drawing.caption + drawing.alt)


def test_a_bad_request_says_what_the_figure_needs(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"no figure 'fedclassavg-22', did you mean 'fedclassavg-2'"):
        papers.draw("fedclassavg-22", [])
    with pytest.raises(BadRequest, match="needs one run, of 2b with"):
        papers.draw("fedclassavg-2", [])
    with pytest.raises(BadRequest, match="not a folder"):
        papers.draw("fedclassavg-2", [tmp_path / "missing"])
