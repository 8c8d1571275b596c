"""Errors that a user can correct, and helpers for the text of messages and generated pages."""

from __future__ import annotations

import difflib
import sysconfig
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

H = TypeVar("H", bound="BaseModel")


class BadRequest(ValueError):
    """A request that cannot be carried out; the message names the fault and the remedy.

    Raised before anything is trained. The command line prints the message without a traceback and exits with code 2.
    """


class Impossible(str):
    """What is wrong with a client's reply, where no client code of ours can send such a one, whatever its numbers.

    A method's `check` returns it, so that the client is blocked at once; it returns plain text for a value that an
    honest client may send too, for example because its model diverged.
    """

    __slots__ = ()


def raised(error: BaseException) -> str:
    """Return in one line the type and text of an error, with file, line and function of the user's code that raised it.

    That is the innermost frame outside this package and Python's library, if possible outside installed packages too.
    """
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError):  # its text holds file and line
        return text
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_foreign(Path(frame.filename))]
    own = [frame for frame in frames if not _is_installed(Path(frame.filename))] or frames
    return f"{text} ({own[-1].filename}, line {own[-1].lineno}, in {own[-1].name})" if own else text


def _is_installed(file: Path) -> bool:
    return bool({"site-packages", "dist-packages"} & set(file.parts))


def _is_foreign(file: Path) -> bool:
    """Whether code of a file is neither of this package nor of Python's library."""
    library = file.is_relative_to(sysconfig.get_path("stdlib")) and not _is_installed(file)
    return not (library or file.name.startswith("<frozen ") or file.is_relative_to(Path(__file__).parent))


LINES, CHARACTERS = 40, 16_384
"""Largest text of another machine that is kept."""


def plain(text: object, whole: bool = False) -> str:
    """Return text that came from another machine as it may stand in a terminal, a log or a table.

    Everything that is not printed as itself, such as escape sequences, carriage returns and marks that turn the
    direction of writing, is written as an escape (`\\x1b`). Lines and tabs stay. Of a long text the end is kept,
    since the last line of a traceback says what happened; with `whole` all of it.
    """
    lines = (str(text) if whole else str(text)[-CHARACTERS:]).split("\n")
    lines = lines if whole else lines[-LINES:]
    return "\n".join("".join(c if c.isprintable() or c == "\t" else _escaped(c) for c in line) for line in lines)


def one_line(text: object) -> str:
    """Return text of another machine in one line, so that it cannot pass for a line of somebody else."""
    return plain(text).replace("\n", "\\n")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def suggest(word: str, known: Iterable[str], advice: str = "") -> str:
    """Return `, did you mean '...'? Advice` with the nearest known word, or `: advice` where none is near.

    Near is a similar word, one with a single other letter, one with its letters in another order, or one that a longer
    word shortens (CosineLR).
    """
    folded = {_folded(k): k for k in known}
    typed = _folded(word)
    near = difflib.get_close_matches(typed, folded, n=1, cutoff=0.7)
    near += [k for k in folded if len(k) == len(typed) > 2 and sum(a != b for a, b in zip(k, typed, strict=True)) == 1]
    near += [k for k in folded if len(typed) > 2 and sorted(k) == sorted(typed)]
    near += [k for k in folded if len(typed) > 5 and k[0] == typed[0] and _shortens(typed, k)]
    if near:
        return f", did you mean '{folded[near[0]]}'?{f' {advice[0].upper()}{advice[1:]}' if advice else ''}"
    return f": {advice}" if advice else ""


def suggest_choice(word: str, known: Iterable[str], further: str = "") -> str:
    """Return :func:`suggest` with the list of all known words as its advice; `further` goes on behind the list."""
    known = tuple(known)
    return suggest(word, known, f"choose from {', '.join(known)}{further}")


def _folded(word: str) -> str:
    return word.lower().replace("_", "-")


def _shortens(short: str, word: str) -> bool:
    """Whether all letters of `short` are in `word`, in this order."""
    letters = iter(word)
    return all(letter in letters for letter in short)


def counted(number: int, noun: str) -> str:
    """Return a count with its noun, in the plural unless the count is one: `1 round`, `2 classes`, `0 replies`."""
    if number == 1:
        return f"{number} {noun}"
    if noun.endswith("y") and noun[-2:-1] not in "aeou":  # reply, but array and key
        return f"{number} {noun[:-1]}ies"
    return f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


def first_of(texts: Sequence[str], most: int = 20, between: str = ", ") -> str:
    """Return the first texts in a line, and the number of further ones."""
    return between.join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def listed(text: str) -> list[str]:
    """Return the parts of a text with commas between them; empty ones are left out."""
    return [part.strip() for part in text.split(",") if part.strip()]


def named_values(key: str, text: str, takes: str) -> dict[str, str]:
    """Read "name=value name=value"; hyphens in names become underscores.

    Parameters
    ----------
    key : the run-config key, for messages.   takes : a sentence that lists the names, for messages.

    Raises
    ------
    BadRequest : a part is not name=value, or a name is given twice.
    """
    values: dict[str, str] = {}
    for part in text.split():
        name, sep, value = part.partition("=")
        name = name.replace("-", "_")
        if not sep or not name or not value:
            raise BadRequest(f"{key}: '{part}' is not name=value (values without spaces). {takes}")
        if values.get(name, value) != value:
            raise BadRequest(f"{key}: '{name}' is given twice, as {values[name]} and as {value}: give it once")
        values[name] = value
    return values


def hyperparameters(
    owner: str, kind: type[H], values: Mapping[str, str], prefix: str = "", key: str = "method-args"
) -> H:
    """Build the hyperparameters of `owner` from the text of `key`; messages put `prefix` before their names.

    Raises
    ------
    BadRequest : unknown name, wrong type or value out of range; the message lists the fields.
    """
    from pydantic import ValidationError

    fields, takes = kind.model_fields, fields_text(owner, kind, prefix)
    for name in values:
        if name not in fields:
            raise BadRequest(
                f"{key}: {owner} has no hyperparameter '{prefix}{name}'{suggest(name, fields) or '.'} {takes}"
            )
    try:
        return kind.model_validate(values)
    except ValidationError as e:
        wrong = "; ".join(f"{prefix}{of.place or owner} = {of.value!r}: {of.reason}" for of in faults(e))
        raise BadRequest(f"{key}: {wrong}. {takes}") from e


class Fault(NamedTuple):
    """A value that pydantic refuses: its place (names with dots between them), the value, and why, in plain words."""

    place: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


def faults(error: ValidationError) -> list[Fault]:
    """Return the faults of values that pydantic refuses; there is at least one."""
    words = {
        "greater_than": "must be greater than {gt}",
        "greater_than_equal": "must be at least {ge}",
        "less_than": "must be less than {lt}",
        "less_than_equal": "must be at most {le}",
        "int_type": "must be a whole number",
        "float_type": "must be a number",
        "string_type": "must be text",
        "bool_type": "must be true or false",
        "literal_error": "must be {expected}",
    }
    return [
        Fault(
            ".".join(map(str, x["loc"])), x["input"],
            words[x["type"]].format(**x.get("ctx", {})) if x["type"] in words else x["msg"],
        )
        for x in error.errors(include_url=False)
    ]  # fmt: skip


def fields_text(owner: str, kind: type[BaseModel], prefix: str = "") -> str:
    """Return one sentence that lists the hyperparameters of `owner` with their defaults."""
    parts = [f"{prefix}{n} (default {f.default})" for n, f in kind.model_fields.items()]
    return f"{owner} takes: {', '.join(parts)}" if parts else f"{owner} takes no hyperparameters"


def plain_value(text: str) -> Any:
    """Return what a text stands for: true, false, none, a number, several with commas between them, else the text."""
    if "," in text:
        return tuple(plain_value(part) for part in text.split(","))
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def is_number(text: str) -> bool:
    """Return whether Python reads a text as a float."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def described(shape: tuple[int, ...]) -> str:
    """Describe samples of a shape in words: images (C, H, W), series (C, T), table rows (F,), or arrays."""
    if len(shape) == 3:
        channels, height, width = shape
        return f"images of {height}x{width} pixels with {counted(channels, 'channel')}"
    if len(shape) == 2:
        return f"series of {counted(shape[1], 'step')} with {counted(shape[0], 'channel')}"
    return f"rows of {counted(shape[0], 'feature')}" if len(shape) == 1 else f"arrays of shape {shape}"
