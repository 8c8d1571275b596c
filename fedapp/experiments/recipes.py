"""The shipped recipes (`fedapp/conf/*.toml`): the settings of published tables, and how they shrink for a laptop.

A recipe is a flat TOML of run-config keys. Its first comment line says what it is. Rows of a table that differ by
method alone share a recipe; they are listed below the comment `rows:`, each as `fedapp compare --methods` takes it, two
blanks, and what the paper calls it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedapp import config as configuration
from fedapp.errors import BadRequest, suggest

FOLDER = Path(__file__).parents[1] / "conf"
LIGHT = ("cnn-a", "cnn-b", "cnn-c", "cnn-d")
"""What larger architectures are replaced by when a recipe is scaled, in this order and over again."""
SMALL = (*LIGHT, "moon", "digits-a", "digits-b", "digits-c")
"""Architectures that stay as they are."""
LEAST_ROUNDS = 2
LEAST_SAMPLES = 5
LEAST_PUBLIC = 100


@dataclass(frozen=True)
class Recipe:
    """One file of `fedapp/conf`.

    Attributes
    ----------
    title : its first comment line.   rows : entry of `--methods` -> what the paper calls it.
    """

    name: str
    path: Path
    title: str
    rows: Mapping[str, str]

    @property
    def methods(self) -> str:
        """All rows, as `--methods` takes them."""
        return ",".join(self.rows)


def parse(path: Path) -> Recipe:
    """Read the comments of a recipe."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line[1:].removeprefix(" ") for line in lines if line.startswith("#")]
    rows: dict[str, str] = {}
    inside = False
    for line in comments:
        if line.strip() == "rows:":
            inside = True
        elif inside and line.startswith("  "):
            entry, _, name = line.strip().partition("  ")
            rows[entry] = name.strip()
        else:
            inside = False
    return Recipe(path.stem, path, comments[0] if comments else path.stem, rows)


@functools.cache
def shipped() -> dict[str, Recipe]:
    """Return all shipped recipes by name."""
    return {path.stem: parse(path) for path in sorted(FOLDER.glob("*.toml"))}


def find(file: Path) -> Path:
    """Return a file that exists, or the shipped recipe of that name.

    Raises
    ------
    BadRequest : neither.
    """
    if file.exists() or file.parent != Path() or file.suffix == ".toml":
        return file
    if file.name not in shipped():
        raise BadRequest(
            f"{file} is neither a file nor a shipped recipe{suggest(file.name, shipped())}. See: fedapp recipes"
        )
    return shipped()[file.name].path


def rows_of(file: Path | None) -> str:
    """Return the rows that a recipe lists, as `--methods` takes them; empty without a file or rows."""
    return parse(file).methods if file is not None and file.is_file() else ""


def light(models: str, dataset: str) -> str:
    """Return the architectures with every large one replaced by the next of the light family."""
    names = [m.strip() for m in models.split(",") if m.strip()]
    if dataset == "digits":
        names = ["digits-a" if n == "auto" else n for n in names]
    large = list(dict.fromkeys(n for n in names if n not in SMALL))
    return ",".join(LIGHT[large.index(n) % len(LIGHT)] if n in large else n for n in names)


def scaled(values: Mapping[str, Any], scale: float) -> tuple[dict[str, Any], str]:
    """Shrink a run-config: the budget of rounds, the data, and the models; all else stays the paper's.

    `num-server-rounds` and `patience` are multiplied by `scale` (at least 2), `data-fraction` and the number of public
    images of another data set too, `min-samples` as well but not below 5, and large architectures are replaced by the
    light family. Numbers so obtained are not the paper's.

    Returns
    -------
    The values with these keys replaced, and one line that says what was done.

    Raises
    ------
    BadRequest : `scale` is not in (0, 1].
    """
    if not 0 < scale <= 1:
        raise BadRequest(f"--scale {scale:g}: more than 0, at most 1 (the recipe as it is)")
    if scale == 1:
        return dict(values), "scale 1: nothing is changed"
    before = {**configuration.defaults(), **values}

    def times(key: str, least: int) -> int:
        return max(min(least, int(before[key])), round(int(before[key]) * scale))

    new: dict[str, Any] = {
        "num-server-rounds": times("num-server-rounds", LEAST_ROUNDS),
        "data-fraction": float(before["data-fraction"]) * scale,
        "min-samples": times("min-samples", LEAST_SAMPLES),
        "patience": times("patience", LEAST_ROUNDS),
        "model": light(str(before["model"]), str(before["dataset"])),
    }
    name, sep, count = str(before["public-data"]).partition(":")
    if sep and count.isdigit():
        new["public-data"] = f"{name}:{max(min(LEAST_PUBLIC, int(count)), round(int(count) * scale))}"
    changed = [f"{k} {before[k]} -> {v}" for k, v in new.items() if v != before[k]]
    return {**values, **{k: v for k, v in new.items() if v != before[k]}}, f"scale {scale:g}: {', '.join(changed)}"
