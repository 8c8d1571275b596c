"""The built site: no warning, no broken link or picture, and guides first in the search."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from tests.readme import ROOT

pytestmark = pytest.mark.full


class Page(HTMLParser):
    """The anchors and the targets of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := known.get(name))}
        self.targets |= {value for name in ("href", "src") if (value := known.get(name))}


page = cache(Page)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site: 20 seconds of processor, for griffe reads every module."""
    pytest.importorskip("mkdocstrings", reason="needs pip install -e .[docs], which make full does")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr or done.stdout
    return out


def broken(site: Path, file: Path) -> list[str]:
    """Return the targets of a page that lead nowhere within the site."""
    found = []
    for target in page(file).targets:
        parts = urlparse(target)
        if parts.scheme or target.startswith("//"):
            continue
        here = site / parts.path.lstrip("/") if parts.path.startswith("/") else file.parent / unquote(parts.path)
        place = file if not parts.path else here / "index.html" if here.is_dir() else here
        if not place.is_file() or (parts.fragment and unquote(parts.fragment) not in page(place.resolve()).anchors):
            found.append(target)
    return found


def test_no_link_or_picture_of_the_site_is_broken(site: Path) -> None:
    files = [f.resolve() for f in site.rglob("*.html") if f.name != "404.html"]
    assert len(files) > 150
    wrong = {str(f.relative_to(site.resolve())): lost for f in files if (lost := broken(site.resolve(), f))}
    assert not wrong


def test_guides_come_before_modules_in_the_search(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    boosts = {entry["location"].partition("#")[0]: entry["boost"] for entry in index}
    assert boosts["scores/"] == boosts["methods/ccvr/"] == boosts["api/"] == 2
    assert boosts["api/fedapp.results.loading/"] == 0.5
    assert not [place for place in boosts if place.startswith("api/fedapp.core")]
