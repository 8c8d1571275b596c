"""Figures of runs and comparisons, drawn from their directories: `of_run`, `of_comparison`."""

from __future__ import annotations

from fedapp.results.figures.gallery import Gallery, Missing, Progress, of_comparison, of_run
from fedapp.results.figures.style import Drawing

__all__ = ["Drawing", "Gallery", "Missing", "Progress", "of_comparison", "of_run"]
