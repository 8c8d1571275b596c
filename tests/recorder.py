"""Trackers that keep what they are told, for tests of what trackers get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedapp.tracking.base import Tracked, Tracker

TOLD: list[tuple[Any, ...]] = []
FAILS: set[str] = set()
"""Functions of the tracker `breaks` that raise, as `log 2` or `end`."""


class Recorder(Tracker):
    """Keeps what it is told."""

    def __init__(self, run: Tracked) -> None:
        self.key = run.key or "k1"
        TOLD.append(("begin", run.key))

    def log(self, step: int, scores: Mapping[str, float]) -> None:
        TOLD.append(("log", step, {k: v for k, v in scores.items() if not k.endswith("seconds")}))

    def figure(self, name: str, title: str, file: Path) -> None:
        assert file.read_bytes().startswith(b"\x89PNG")
        TOLD.append(("figure", name))

    def files(self, folder: str, files: Sequence[Path]) -> None:
        TOLD.append(("files", folder, [f.name for f in files if f.is_file()]))

    def end(self, status: str, summary: Mapping[str, float], error: str) -> None:
        TOLD.append(("end", status, len(summary) > 10, error))


class Breaks(Recorder):
    """Fails where `FAILS` says."""

    def log(self, step: int, scores: Mapping[str, float]) -> None:
        if f"log {step}" in FAILS:
            raise ConnectionError("the server is gone")
        super().log(step, scores)
