"""Figures that were drawn before, by the digest of what they show.

They lie in the user's own cache and not in the run directory: what stands here goes into a page as it is, and a run
directory may come from somebody else.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedapp.data.cache import cache_root
from fedapp.results.directory import write_text
from fedapp.results.figures.style import Drawing, looks
from fedapp.results.figures.words import Runs
from fedapp.results.runs import RunResult

MOST_BYTES = 200_000_000
"""Size of the store from which on what was used longest ago is deleted."""
READ = (".csv", ".json", ".toml")
"""Files of a run directory that figures are drawn from, by their content."""
MODELS = ("checkpoint", "models")
"""Folders of a run directory that count by names, sizes and times of change: models can be large."""


@dataclass(frozen=True)
class Stored:
    """A figure as it stands on a page; the attributes of `Drawing`, with its markup in place of the figure."""

    id: str
    title: str
    caption: str
    alt: str
    source: str
    markup: str

    def inline(self) -> str:
        """Return the figure's element for a page."""
        return self.markup


@functools.cache
def code() -> str:
    """Return the digest of all code that a figure comes from: this project's, and the version of matplotlib."""
    digest = hashlib.sha256(importlib.metadata.version("matplotlib").encode())
    root = Path(__file__).parents[3]
    for path in sorted(p for package in ("fedapp", "strategies", "clients") for p in (root / package).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def content_of(run: RunResult) -> str:
    """Return the digest of what a run directory holds now, of tables by content and of models by time of change."""
    digest = hashlib.sha256()
    for path in sorted(p for p in run.out.iterdir() if p.suffix in READ):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    folders = [run.out / name for name in MODELS]
    if run.config is not None:
        root = Path(run.config.storage.state_dir) if run.config.storage.state_dir else run.out / "state"
        folders.append(root / (run.config.storage.federation or "run"))
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            found = path.stat()
            digest.update(f"{path.relative_to(folder)}\0{found.st_size}\0{found.st_mtime_ns}\0".encode())
    return digest.hexdigest()


class Store:
    """The figures of one page: what was drawn before is read, what is new is kept.

    Parameters
    ----------
    fresh : read nothing, so that everything is drawn anew.
    """

    def __init__(self, fresh: bool = False) -> None:
        self.folder = cache_root() / "figures"
        self.fresh = fresh
        self._content: dict[Path, str] = {}

    def key(self, runs: Runs, *names: Any) -> str:
        """Return the digest of a figure: code, runs with labels and settings, looks of methods, and its own names."""
        for run in runs:
            if run.out not in self._content:
                self._content[run.out] = content_of(run)
        shown = [(self._content[r.out], r.label, {k: str(v) for k, v in r.setting.items()}) for r in runs]
        text = json.dumps([code(), names, shown, sorted(looks().items())], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def read(self, key: str) -> list[Stored] | None:
        """Return the drawings of a key; None where there are none."""
        path = self.folder / f"{key}.json"
        if self.fresh:
            return None
        try:
            found = [Stored(**values) for values in json.loads(path.read_text(encoding="utf-8"))]
            path.touch()
        except (OSError, ValueError, TypeError):
            return None
        return found

    def keep(self, key: str, drawings: Sequence[Drawing]) -> list[Stored]:
        """Keep and return drawings under a key; where nothing can be written, they are drawn again the next time."""
        found = [Stored(d.id, d.title, d.caption, d.alt, d.source, d.inline()) for d in drawings]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(self.folder / f"{key}.json", json.dumps([asdict(s) for s in found]))
        except OSError:
            pass
        return found

    def tidy(self) -> None:
        """Delete what was used longest ago while the store is larger than `MOST_BYTES`."""
        total = 0
        for path, size in _newest_first(self.folder):
            total += size
            if total > MOST_BYTES:
                path.unlink(missing_ok=True)


def _newest_first(folder: Path) -> Iterator[tuple[Path, int]]:
    found = []
    for path in folder.glob("*.json"):
        try:
            found.append((path.stat().st_mtime, path, path.stat().st_size))
        except OSError:  # another process has just deleted it
            continue
    for _, path, size in sorted(found, reverse=True):
        yield path, size
