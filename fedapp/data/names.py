"""Names of classes, clients and columns of own data, and of the files that hold them."""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from fedapp.errors import BadRequest, suggest, suggest_choice
from fedapp.files import absolute

Read = TypeVar("Read")
SHOWN = 10
"""Files, columns or faults that one message lists."""
COLUMNS = ("x", "y", "client", "split", "group")
"""What a column of own data may mean."""
HUB = "hub:"
"""How the place of data begins that are downloaded."""
LABELS = ("y", "label", "target")
"""Names of the column of the classes where `columns` does not say it."""
PART_OF = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""What a file or folder may be called that holds a part of the data -> the part's own name."""
PICTURE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"})
FILE_SUFFIXES = PICTURE_SUFFIXES | {".npz", ".csv", ".parquet"}


def composed(text: str) -> str:
    """Return a name in the composed form of Unicode (NFC), so that two encodings of one name are one name."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def name_of(path: Path, suffix: bool = False) -> str:
    """Return the name of the class or the client that a file or folder has; with `suffix` all of it.

    Raises
    ------
    BadRequest : the name is not UTF-8, so no report could hold it.
    """
    name = path.name if suffix else path.stem
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"{path}: its name is not UTF-8: rename it") from error
    return composed(name)


def roles(text: str) -> dict[str, tuple[str, ...]]:
    """Read the key `columns`, such as ``x=age,pulse y=diagnosis client=hospital split=part group=patient``.

    Returns
    -------
    x, y, client, split, group, as far as the text has them -> names of columns; x may have several.

    Raises
    ------
    BadRequest : it is not of this form.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadRequest(f"columns = {text!r}: {error}") from error
    found: dict[str, tuple[str, ...]] = {}
    for word in words:
        role, _, value = word.partition("=")
        # Within a name a comma is written twice.
        names = tuple(composed(name.replace(",,", ",").strip()) for name in re.split("(?<!,),(?!,)", value))
        if role not in COLUMNS or not all(names):
            raise BadRequest(
                f"columns: '{word}' is not of the form x=a,b or y=NAME"
                + suggest_choice(role, COLUMNS, "; a name with a space stands in quotation marks")
            )
        if role in found or (role != "x" and len(names) > 1):
            raise BadRequest(f"columns: {role} is given more than once; only x may have several columns: x=a,b")
        found[role] = names
    every = [name for names in found.values() for name in names]
    if len(set(every)) != len(every):
        raise BadRequest(f"columns: '{max(every, key=every.count)}' is named twice: give each column one meaning")
    return found


def assigned(
    where: object, names: Sequence[str], wanted: Mapping[str, tuple[str, ...]], labels: bool = True
) -> dict[str, str]:
    """Return which columns of a source are y, client, split and group.

    Parameters
    ----------
    where : name of the source, for messages.   names : its columns.   wanted : of `roles`.
    labels : whether there must be a column y.

    Raises
    ------
    BadRequest : names all columns that do not exist, or the ones that could be y.
    """
    missing = [n for listed in wanted.values() for n in listed if n not in names and n != "*"]
    shown = ", ".join(map(str, names[:40])) + (", ..." if len(names) > 40 else "")
    if missing:
        meant = {n: suggest(n, names).removeprefix(", ") for n in missing[:SHOWN]}
        lacking = ", ".join(f"'{n}' ({near})" if near else f"'{n}'" for n, near in meant.items())
        raise BadRequest(f"{where}: no column {lacking} ({len(missing)} in all); it has {shown}")
    found = {role: wanted[role][0] for role in COLUMNS[1:] if role in wanted}
    taken = {n for listed in wanted.values() for n in listed}
    for role in ("client", "split", "group"):
        if role not in found and role in names and role not in taken:
            found[role] = role
    if "y" not in found and labels:
        likely = [n for n in LABELS if n in names and n not in taken]
        if len(likely) != 1:
            several = f"{' and '.join(likely)} could both be" if likely else "no column y, label or target for"
            raise BadRequest(f'{where}: {several} the classes: say which with columns = "y=NAME"; it has {shown}')
        found["y"] = likely[0]
    return found


def entries_of(folder: Path) -> list[Path]:
    """Return what a folder holds, sorted, but for hidden files, such as the lock links of editors.

    Raises
    ------
    BadRequest : a link that may stand for a folder leads nowhere.
    """
    found = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for path in found:  # of a link that stands for a file, its reader says so
        if path.suffix.lower() not in FILE_SUFFIXES and path.is_symlink() and not path.exists():
            raise BadRequest(f"{path} is a link to nothing: repair or remove it")
    return found


def files_of(folder: Path, kind: str) -> list[Path]:
    """Return the files of a folder with a suffix in any case, sorted; empty if the folder does not exist."""
    return distinct([p for p in entries_of(folder) if p.suffix.lower() == f".{kind}"]) if folder.is_dir() else []


def distinct(paths: list[Path], suffix: bool = False) -> list[Path]:
    """Return the clients' files or folders in one folder, and refuse two with the same `name_of`."""
    found: dict[str, Path] = {}
    for path in paths:
        other = found.setdefault(composed(path.name if suffix else path.stem), path)
        if other != path:
            raise BadRequest(f"{other} and {path.name} have one name: rename one of them")
    return paths


def is_there(path: Path) -> bool:
    """Return whether there is a file or folder; a name that the system does not allow is not there.

    Raises
    ------
    BadRequest : it lies in a folder that may not be searched.
    """
    with readable_at(path):
        try:
            path.stat()
        except PermissionError:
            raise
        except (OSError, ValueError):
            return False
    return True


def absent(path: Path, advice: str = "") -> BadRequest:
    """Return the error for a path without a file; it names one similar to the first part that is missing."""
    whole = absolute(path)
    missing = next((p for p in reversed((whole, *whole.parents)) if not is_there(p)), None)
    if missing is None:
        return BadRequest(f"{path} is not a file" + (f": {advice}" if advice else ""))
    names = [p.name for p in missing.parent.glob("*")]
    return BadRequest(f"{path} does not exist{suggest(missing.name, names, advice)}")


@contextmanager
def readable_at(place: object) -> Iterator[None]:
    """Name the file if the block, which looks at files below `place`, fails."""
    try:
        yield
    except OSError as error:
        raise BadRequest(
            f"cannot read {error.filename or place} ({error.strerror or error}): repair it, move it away, or let the "
            "user of this program read it"
        ) from error


def readable(
    root: Path, files: Sequence[Path], reader: Callable[[Path], Read], form: Callable[[Read], str], skip_bad: bool
) -> tuple[dict[Path, Read], tuple[str, ...]]:
    """Read the files of a folder, one per client, and return them with the names of those that were left out.

    Parameters
    ----------
    form : says what all files must have in common. What most of them have is right; of equally many the first.

    Raises
    ------
    BadRequest : files cannot be used (all are named), and none is left or `skip_bad` is off.
    """
    found: dict[Path, Read] = {}
    bad: dict[Path, str] = {}
    for path in files:
        try:
            found[path] = reader(path)
        except BadRequest as error:
            if path == root:
                raise
            bad[path] = str(error)
    forms = {path: form(value) for path, value in found.items()}
    right, votes = next(iter(Counter(forms.values()).most_common(1)), ("", 0))
    for path in [path for path, own in forms.items() if own != right]:
        bad[path] = (
            f"{path} has {forms[path]}, but {votes} of {len(forms)} files {'have' if votes > 1 else 'has'} {right}"
        )
        del found[path]
    if bad and not (skip_bad and found):
        raise unusable(root, [bad[path] for path in files if path in bad], len(files))
    return found, tuple(str(path.relative_to(root)) for path in files if path in bad)


def unusable(root: Path, bad: Sequence[str], count: int) -> BadRequest:
    """Return the error that names files of a folder: one line for each bad one, of `count` files in all."""
    more = f"; and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    return BadRequest(
        f"{len(bad)} of {count} files in {root} cannot be used: {'; '.join(bad[:SHOWN])}{more}: "
        "repair them, move them away, or leave them out with skip-bad = true"
    )
