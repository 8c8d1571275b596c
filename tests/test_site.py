"""The built site: no warning, no broken link or picture, no page wider than a phone, and what a search finds first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import cache, partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest

from tests.readme import ROOT
from tests.test_browser import chromium  # noqa: F401

pytestmark = pytest.mark.full
QUERIES = {
    "quickstart": "quickstart/",
    "tutorial": "tutorials/",
    "cite": "citing/",
    "glossary": "glossary/",
    "received": "scores/",
    "trained": "scores/",
    "balanced": "scores/",
    "how much privacy": "privacy/",
    "add a method": "own-method/",
    "heterogeneous models": "choosing/",
    "csv": "own-data/",
    "out of memory": "simulation/",
}
"""What readers type into the search, and the page that it must find first."""
FOUND = """async queries => {
  const { base, search } = JSON.parse(document.querySelector('#__config').textContent);
  const index = await (await fetch(new URL('search/search_index.json', new URL(base, location)))).json();
  const worker = new Worker(new URL(search, location));
  const reply = message => new Promise(done => {
    worker.onmessage = event => done(event.data.data);
    worker.postMessage(message);
  });
  await reply({ type: 0, data: { ...index, options: {} } });
  const found = {};
  for (const query of queries) found[query] = (await reply({ type: 2, data: query })).items[0]?.[0].location;
  return found;
}"""
"""The first page for each query, by the site's own search program; its messages are 0: set up, 2: query."""


class Silent(SimpleHTTPRequestHandler):
    """A server of files that prints nothing."""

    def log_message(self, *_: Any) -> None: ...


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


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Serve the site on loopback."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


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


def test_twelve_queries_find_their_pages_first(address: str, chromium: Any) -> None:  # noqa: F811
    tab = chromium.new_page()
    tab.goto(address, timeout=180_000)
    found = tab.evaluate(FOUND, list(QUERIES))
    tab.close()
    assert not {query: place for query, place in found.items() if not str(place).startswith(QUERIES[query])}


def test_the_page_on_choosing_is_one_screen(address: str, chromium: Any) -> None:  # noqa: F811
    """Answer, flow chart, shortlist, measured settings and all folds end within 1,000 pixels at a width of 1,280."""
    tab = chromium.new_page(viewport={"width": 1280, "height": 1000})
    tab.goto(f"{address}choosing/", timeout=180_000)
    end = tab.evaluate("document.querySelector('article').getBoundingClientRect().bottom")
    tab.close()
    assert 600 < end <= 1000


def test_no_page_is_wider_than_a_phone_or_loads_from_elsewhere(site: Path, address: str, chromium: Any) -> None:  # noqa: F811
    places = [str(f.parent.relative_to(site)) for f in site.rglob("index.html")]
    written = sorted(p for p in places if not p.startswith("api/"))
    assert len(written) > 70
    tab, wrong = chromium.new_page(viewport={"width": 390, "height": 800}), []
    tab.on("console", lambda message: wrong.append(f"{tab.url}: {message.text}"))
    tab.on("request", lambda request: request.url.startswith((address, "data:")) or wrong.append(request.url))
    for place in written:
        tab.goto(f"{address}{place}/", timeout=180_000)
        if (wide := tab.evaluate("document.documentElement.scrollWidth")) > 390:
            wrong.append(f"{place}: {wide} px")
    tab.close()
    assert not wrong
