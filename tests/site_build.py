"""What MkDocs and griffe call while `make docs` builds the site: navigation, pages that are made, links, docstrings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

from tests import site_pages
from tests.readme import ROOT
from tests.site_text import OUTER, folded, relinked, rewritten


def on_config(config: Any) -> Any:
    """Set the navigation."""
    config["nav"] = site_pages.navigation()
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made, and those at the top of the repository."""
    made = dict(site_pages.generated())
    made |= {place: relinked((ROOT / name).read_text(encoding="utf-8"), "", place) for name, place in OUTER.items()}
    for place, text in made.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn the links of a page that is a file in `docs/`, and say how each page is searched."""
    page.meta["search"] = site_pages.searched(page.file.src_uri)
    if "one-screen" in markdown:
        page.meta["hide"] = ["toc"]
    markdown = folded(markdown)
    if page.file.generated_by:
        return markdown
    place = Path(page.file.src_uri)
    if place.parent.name == "methods":
        # Links of the last part are those of the site.
        head, heading, rest = relinked(markdown, "docs/methods", page.file.src_uri).partition("\n## ")
        picture = site_pages.scheme(site_pages.registry.get(place.stem))
        return f"{head}\n{picture}{heading}{rest}{site_pages.in_code(place.stem)}"
    return relinked(markdown, str(Path("docs") / place.parent), page.file.src_uri)


class Docstrings(griffe.Extension):
    """Rewrites every docstring as it is found."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring:
            obj.docstring.value = rewritten(obj.docstring.value)
