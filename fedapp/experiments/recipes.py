"""The shipped recipes: the settings of published tables, and how they shrink for a laptop.

A recipe is a flat TOML of run-config keys. Its first comment line is its description. Rows of a table that differ by
method alone share a recipe; they are listed below the comment `rows:`, each as `fedapp compare --methods` takes it, two
blanks, and what the paper calls it. `fedapp recipes NAME` prints it.

`fedapp/conf/*.toml` are such files. A file of `fedapp/conf/papers` holds all recipes of one paper, each as differences
from what it has in common with others:

- A recipe starts from `[common]`, then takes the parts that `like` names in this order, then its own keys.
  Later `settings` and `words` replace earlier ones key by key; a later `title`, `rows` or `command` replaces an earlier
  one; `notes` follow one another.
- A setting is `[value, where it comes from]`.
- `{word}` in titles, notes and rows stands for one of `words` or for the value of a setting.
- A row is `[entry of --methods, what the paper calls it]`. `{}` in the latter stands for the paper's number: the next
  of `published`.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import dropwhile, islice, takewhile
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import Field

from fedapp import config as configuration
from fedapp import registry
from fedapp.data import datasets
from fedapp.data.names import is_there
from fedapp.errors import BadRequest, listed, suggest
from fedapp.experiments.shipped import FOLDER, Entry, Value, read

LIGHT = ("cnn-a", "cnn-b", "cnn-c", "cnn-d")
"""What larger architectures are replaced by when a recipe is scaled: in this order, and from the start again."""
SMALL = (*LIGHT, "moon", "digits-a", "digits-b", "digits-c")
"""Architectures that stay as they are."""
LEAST_ROUNDS = 2
LEAST_SAMPLES = 5
LEAST_PUBLIC = 100
WIDEST_ENTRY = 60
"""Columns that entries of `rows:` are padded to at most."""


class Part(Entry):
    """What several recipes of a paper have in common."""

    title: str = ""
    notes: str = ""
    command: str = ""
    words: dict[str, str] = Field(default_factory=dict)
    settings: dict[str, tuple[Value, str]] = Field(default_factory=dict)
    rows: tuple[tuple[str, str], ...] = ()


class Row(Part):
    """A recipe: the parts that it is like, its own keys, and the paper's numbers for its rows."""

    name: str
    like: tuple[str, ...] = ()
    published: tuple[str, ...] = ()


class Paper(Entry):
    """A file of `fedapp/conf/papers`."""

    paper: str
    common: Part
    part: dict[str, Part]
    recipe: tuple[Row, ...]

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield name and TOML text of every recipe.

        Raises
        ------
        BadRequest : a recipe that names an unknown part or word, or whose numbers do not fit its rows.
        """
        for row in self.recipe:
            try:
                yield row.name, _text(self.paper, row, [self.common, *(self.part[p] for p in row.like), row])
            except BadRequest as e:
                raise BadRequest(f"recipe {row.name}: {e}") from e
            except KeyError as e:
                raise BadRequest(f"recipe {row.name}: there is no part or word called {e}") from e


def _text(paper: str, row: Row, parts: list[Part]) -> str:
    """Write a recipe as TOML, every value with its source."""
    settings = {key: value for part in parts for key, value in part.settings.items()}
    values = {key: value for key, (value, _) in settings.items()}
    unknown = next((key for key in values if key not in configuration.KEYS), None)
    if unknown is not None:
        raise BadRequest(configuration.unknown_key(unknown, values[unknown]))
    settings = {key: settings[key] for key in configuration.KEYS if key in settings}
    own = {key: text.format(**values) for part in parts for key, text in part.words.items()}
    words = {**values, **own}

    def last(field: str) -> Any:
        return next((v for part in reversed(parts) if (v := getattr(part, field))), "")

    title = f"{paper}, {last('title').format(**words)}"
    notes = [line for part in parts for line in part.notes.format(**words).splitlines()]
    numbers = list(row.published)
    rows = []
    for entry, called in last("rows"):
        if "{}" in called and not numbers:
            raise BadRequest(f"row '{entry}' has no number")
        number = [numbers.pop(0)] if "{}" in called else []
        rows.append((entry.format(**words), called.format(*number, **words)))
    if numbers:
        raise BadRequest(f"numbers without a row: {', '.join(numbers)}")
    width = min(max(len(entry) for entry, _ in rows), WIDEST_ENTRY)
    listed = ["rows:", *(f"  {entry:<{width}}  {name}" for entry, name in rows)]
    comments = [title, "", *notes, "", *listed, "", f"fedapp compare {row.name} {last('command')}"]
    lines = [f"{tomli_w.dumps({key: value}).strip()}  # {source}" for key, (value, source) in settings.items()]
    return "\n".join([*(f"# {c}".rstrip() for c in comments), "", *lines, ""])


@dataclass(frozen=True)
class Recipe:
    """One recipe, shipped or a file of the user's.

    Attributes
    ----------
    title : its first comment line.   rows : entry of `--methods` -> what the paper calls it.
    settings : its run-config keys.   text : the whole TOML.
    """

    name: str
    title: str
    rows: Mapping[str, str]
    settings: Mapping[str, Any]
    text: str

    @property
    def methods(self) -> str:
        """All rows, as `--methods` takes them; empty if it lists none."""
        return ",".join(self.rows)


def parse(name: str, text: str, settings: Mapping[str, Any]) -> Recipe:
    """Read the comments of a recipe."""
    comments = [line[1:].removeprefix(" ") for line in text.splitlines() if line.startswith("#")]
    rest = dropwhile(lambda line: line.strip() != "rows:", comments)
    listed = takewhile(lambda line: line.startswith("  "), islice(rest, 1, None))
    pairs = (line.strip().partition("  ") for line in listed)
    rows = {entry: called.strip() for entry, _, called in pairs}
    return Recipe(name, comments[0] if comments else name, rows, settings, text)


def from_file(path: Path) -> Recipe:
    """Read a recipe from a file, a run's own `config.toml` without the folder of that run.

    Raises
    ------
    BadRequest : the file cannot be read, or is not TOML.
    """
    settings = configuration.read_toml(path)
    if path.name == "config.toml" and Path(str(settings.get("out", ""))).resolve() == path.resolve().parent:
        settings.pop("out", None)
    return parse(path.stem, path.read_text(encoding="utf-8-sig"), settings)


@functools.cache
def shipped() -> dict[str, Recipe]:
    """Return all shipped recipes by name."""
    found = {path.stem: from_file(path) for path in FOLDER.glob("*.toml")}
    for path in (FOLDER / "papers").glob("*.toml"):
        for name, text in read(path, Paper).texts():
            found[name] = parse(name, text, tomllib.loads(text))
    return dict(sorted(found.items()))


def find(file: Path) -> Recipe:
    """Read a file that exists, or return the shipped recipe of that name.

    Raises
    ------
    BadRequest : neither.
    """
    if is_there(file) and not (file.is_dir() and str(file) in shipped()):
        return from_file(file)
    if file.stem in shipped() and file.suffix == ".toml":
        raise BadRequest(f"{file} does not exist; the shipped recipe is called {file.stem}")
    if file.parent != Path() or file.suffix == ".toml":
        return from_file(file)
    if file.name not in shipped():
        raise BadRequest(f"{file} is neither a file nor a shipped recipe{_other(file.name)}")
    return shipped()[file.name]


def _other(name: str) -> str:
    """Explain a name that no recipe has: a method, a data set, or a recipe with another spelling."""
    if name in registry.names():
        return f", but a method: give --method {name}, or several with commas and no blanks, --methods local,{name}"
    if name in datasets.DATASET_NAMES:
        return f", but a data set: give --dataset {name}"
    return f"{suggest(name, shipped()) or '.'} See: fedapp recipes"


def light(models: str, dataset: str) -> str:
    """Return the architectures with every large one replaced by the next of the light family."""
    names = listed(models)
    if dataset == "digits":
        names = ["digits-a" if n == "auto" else n for n in names]
    large = list(dict.fromkeys(n for n in names if n not in SMALL))
    return ",".join(LIGHT[large.index(n) % len(LIGHT)] if n in large else n for n in names)


def scaled(values: Mapping[str, Any], scale: float, chosen: Container[str] = ()) -> tuple[dict[str, Any], str]:
    """Shrink the rounds, the data and the models of a run-config; everything else stays the paper's.

    `num-server-rounds`, `patience`, `data-fraction`, `min-samples` and the number of public images of another data set
    are multiplied by `scale`, down to the least values above. Large architectures are replaced by the light family.
    Numbers of such runs are not the paper's. Keys that the user has `chosen` stay as they are.

    Returns
    -------
    The values with these keys replaced, and one line that describes the changes.

    Raises
    ------
    BadRequest : `scale` is not in (0, 1].
    """
    if not 0 < scale <= 1:
        raise BadRequest(f"--scale {scale:g}: give more than 0 and at most 1 (the recipe unchanged)")
    if scale == 1:
        return dict(values), "scale 1: nothing is changed"
    before = {**configuration.DEFAULTS, **values}

    def times(value: Any, least: int) -> int:
        return max(min(least, int(value)), round(int(value) * scale))

    new: dict[str, Any] = {
        "num-server-rounds": times(before["num-server-rounds"], LEAST_ROUNDS),
        "data-fraction": float(before["data-fraction"]) * scale,
        "min-samples": times(before["min-samples"], LEAST_SAMPLES),
        "patience": times(before["patience"], LEAST_ROUNDS),
        "model": light(str(before["model"]), str(before["dataset"])),
    }
    name, _, count = str(before["public-data"]).partition(":")
    if count.isdigit():
        new["public-data"] = f"{name}:{times(count, LEAST_PUBLIC)}"
    new = {k: v for k, v in new.items() if v != before[k] and k not in chosen}
    told = ", ".join(f"{k} {before[k]} -> {v}" for k, v in new.items())
    return {**values, **new}, f"scale {scale:g}: {told or 'nothing is changed'}"
