"""Imports between the package and the folders beside it, and the commands of `python -m reproduction`."""

from __future__ import annotations

import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

from reproduction.__main__ import STUDIES
from tests.house import FILES, ROOT, imports, module

OURS = [p for p in sorted((ROOT / "reproduction").rglob("*.py")) if "tests" not in p.parts]
ROOMS = {"figures": {"figures"}, "ledger": {"ledger"}}
"""Folders of `reproduction` that the files of a folder may import; a study may import all of them."""


def test_the_package_imports_nothing_beside_it() -> None:
    outside = {"reproduction", "benchmarks", "tests", "tools"}
    assert {str(p) for p in FILES if outside & {m.partition(".")[0] for m in imports(p)}} == set()


@pytest.mark.parametrize("path", OURS, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_imports_from_folders_below_its_own(path: Path) -> None:
    used = imports(path)
    assert not {"tests", "tools"} & {m.partition(".")[0] for m in used}
    rooms = {m.split(".")[1] for m in used if m.startswith("reproduction.")}
    assert rooms <= ROOMS.get(path.relative_to(ROOT).parts[1], {*ROOMS, "studies"})


def test_no_two_files_need_each_other() -> None:
    names = {module(p) for p in OURS}
    graph = {module(p): (imports(p) & names) - {module(p)} for p in OURS}
    list(graphlib.TopologicalSorter(graph).static_order())


def test_every_study_has_a_command() -> None:
    files = {p.stem for p in (ROOT / "reproduction" / "studies").glob("*.py")} - {"__init__"}
    assert set(STUDIES) == files


@pytest.mark.full
def test_a_study_takes_its_own_options() -> None:
    command = [sys.executable, "-m", "reproduction", "study", "har_plain", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "initial models" in done.stdout
