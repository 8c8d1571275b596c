"""Tables in CSV and Parquet files, turned into the columns of own data.

Every numeric column that has no other meaning is a feature; `columns` names others. A text feature becomes one feature
per category of the training rows, 1 where the row has it; a category that only other rows have, and an empty cell, is 0
in all of them. An empty cell of a numeric feature is NaN. Rows are counted from 0. The row numbers that pandas writes
(columns without a name, `Unnamed: 0`, `__index_level_0__`) are features only if `columns` names them. A named index of
a Parquet file is a column like any other.
"""

from __future__ import annotations

import csv
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedapp.data.columns import EXACT, PARTS, Array, Own, entries, labelled, of_parts, own, part_of
from fedapp.data.moments import rounded
from fedapp.data.names import COLUMNS, LABELS, SHOWN, assigned, composed, name_of, readable, roles
from fedapp.errors import BadRequest, counted, is_number
from fedapp.lazy import pd
from fedapp.settings import DataSettings

MOST_CATEGORIES = 64
UNKNOWN = ["", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "-nan", "null", "NULL", "None", "<NA>"]
"""Cells of a feature in a CSV file that stand for an unknown value."""
NAMELESS = "(column {})"
"""What a column without a name is called."""
ROW_NUMBERS = re.compile(r"\(column \d+\)|Unnamed: \d+(\.\d+)*|__index_level_\d+__")
"""Names of the columns in which pandas writes row numbers."""
WITH_COMMAS = re.compile(r"[+-]?(\d{1,3}(,\d{2,3})*,\d{3}(\.\d*)?|[\d.]*,\d+)(e[+-]?\d+)?", re.IGNORECASE)
"""A number with commas, which group thousands or are the decimal mark; `1,4,7` is a list."""
COMMAS = "leave out commas that group thousands, write the decimal mark as a point, or leave the column out"
SHORT = 40
"""Characters of a cell that a message shows."""
Place = Callable[[int], str]
LONGEST = 255
"""Characters of a class, client or group. An array of text takes as much for every row as for the longest one."""


def read(files: Sequence[Path], root: Path, settings: DataSettings, node: bool = False) -> Own:
    """Read a table, or one table per client, whose name is then the file's.

    Parameters
    ----------
    files : all `.csv` or all `.parquet`; several, or one in a folder `train`, ...: one per client.
    root : file or folder that the user gave, for messages.

    Raises
    ------
    BadRequest : a file cannot be read, or columns are missing or wrong; the message names all of them.
    """
    wanted = roles(settings.columns)
    if not root.is_dir():
        frame, found = _frame(root, wanted)
        return _read([root], [frame.reset_index(drop=True)], root, found, wanted, node)

    def table(path: Path) -> tuple[Any, dict[str, str]]:
        return _of_client(path, name_of(path), root, *_frame(path, wanted))

    def form(read: tuple[Any, dict[str, str]]) -> str:
        return "the columns " + ", ".join(f"{role}={name}" for role, name in sorted(read[1].items()))

    tables, skipped = readable(root, files, table, form, settings.skip_bad)
    found = next(iter(tables.values()))[1]
    sizes: dict[tuple[str, ...], list[Path]] = {}
    for path, names in _features_of({p: frame.drop(columns=list(found.values())) for p, (frame, _) in tables.items()},
                                    wanted.get("x", ())).items():  # fmt: skip
        sizes.setdefault(tuple(sorted(names)), []).append(path)
    classes = None
    if len(sizes) > 1:
        faults, y = list[str](), found["y"]
        for path, (frame, _) in tables.items():
            frame[y] = keys("y", frame[y], y, f"{path.name} row {{}}".format, faults)
        _refuse(root, faults)
        classes = [str(n) for n in np.unique(entries(np.concatenate([f[y].to_numpy(str) for f, _ in tables.values()])))]
    parts = [
        _read(own_files, [tables[path][0] for path in own_files], root, found, wanted, node, classes)
        for own_files in sizes.values()
    ]
    return replace(parts[0] if len(parts) == 1 else of_parts(parts), skipped=skipped)


def texts(place: Path, column: str, settings: DataSettings) -> tuple[list[str], dict[str, Array]]:
    """Read a column of texts and the other columns of own data.

    Parameters
    ----------
    place : a `.csv`, `.parquet`, `.json` or `.jsonl` file.
    column : its name.   settings : `columns` says what the others mean.

    Returns
    -------
    texts : in the order of the rows.   columns : y, client, split and group as far as the file has them, class_names.

    Raises
    ------
    BadRequest : the file cannot be read, a column is missing or wrong, or a text is missing; names all rows.
    """
    frame, found = _frame(place, {**roles(settings.columns), "x": (column,)}, (column,))
    faults: list[str] = []
    columns = {role: keys(role, frame[name], name, "row {}".format, faults) for role, name in found.items()}
    cells = _texts(frame, column, faults)
    _refuse(place, faults)
    return cells, labelled(columns, None)


def _texts(frame: Any, column: str, faults: list[str]) -> list[str]:
    """Return the cells of a column of texts; those that are none are noted."""
    known = frame[column][frame[column].notna()]
    odd = {row: v for row, v in known.items() if not isinstance(v, (str, int, float, np.number))}
    _note_odd(odd, column, "row {}".format, faults)
    cells = ["" if e else str(v).strip() for v, e in zip(frame[column], frame[column].isna())]
    if empty := [row for row, text in enumerate(cells) if not text]:
        faults.append(f"row {empty[0]} has no text in '{column}' ({len(empty)} in all): fill it or leave the row out")
    return cells


def _note_odd(odd: Mapping[int, Any], name: str, place: Place, faults: list[str]) -> None:
    """Note cells, by their rows, that no text stands for."""
    for row, value in [*odd.items()][:1]:
        faults.append(f"{place(row)} has {type(value).__name__} in '{name}' ({len(odd)} in all): write text")


def column_of_texts(place: Path, column: str) -> list[str]:
    """Read one column of texts of a table, whose other columns need no meaning; see :func:`texts`.

    Raises
    ------
    BadRequest : the file cannot be read, it has no such column, or a text is missing.
    """
    frame, _ = _frame(place, {"x": (column,)}, (column,), labels=False)
    faults: list[str] = []
    cells = _texts(frame, column, faults)
    _refuse(place, faults)
    return cells


def _features_of(frames: Mapping[Path, Any], listed: Sequence[str]) -> dict[Path, set[str]]:
    """Return the columns of each file that are features; text is one only where `listed` names it."""
    if listed and "*" not in listed:
        return {path: set(listed) for path in frames}
    names = {path: {n for n in frame.columns if not ROW_NUMBERS.fullmatch(n)} for path, frame in frames.items()}
    every = set.union(*names.values())
    for name in [] if listed else every - set.intersection(*names.values()):
        column = pd.concat([frames[path][name] for path in frames if name in names[path]])
        values = _cells(column, name, "row {}".format, []) if _legible(column) else np.empty(0, object)
        if values is not None and values.dtype == object:
            every.remove(name)
    return {path: own_names & every for path, own_names in names.items()}


def _read(
    files: Sequence[Path],
    frames: Sequence[Any],
    root: Path,
    found: Mapping[str, str],
    wanted: Mapping[str, tuple[str, ...]],
    node: bool,
    classes: Sequence[str] | None = None,
) -> Own:
    """Turn the tables of files with the same features into columns of own data."""
    whole = pd.concat(frames, ignore_index=True) if len(frames) > 1 else frames[0]
    ends = np.cumsum([len(frame) for frame in frames])

    def place(row: int) -> str:
        number = int(np.searchsorted(ends, row, side="right"))
        start = int(ends[number - 1]) if number else 0
        return f"row {row - start}" if files == [root] else f"{files[number].name} row {row - start}"

    return from_frame(root, whole, found, wanted, node, classes, place=place)


def _of_client(path: Path, client: str, root: Path, frame: Any, found: Mapping[str, str]) -> tuple[Any, dict[str, str]]:
    """Add the columns client and split, from the name and the folder of a client's file."""
    part = part_of(path, root)
    said = {"client": client, **({"split": part} if part else {})}
    for role, value in said.items():
        if role in found or role in frame.columns:
            raise BadRequest(
                f"{path}: its {'name' if role == 'client' else 'folder'} gives {role} = {value}: leave the column out"
            )
        frame[role] = value
    if "group" in found:  # groups of two clients are two groups, whatever their names
        faults, name = list[str](), found["group"]
        groups = keys("group", frame[name], name, "row {}".format, faults)
        _refuse(path, faults)
        frame[name] = [f"{client}/{group}" for group in groups]
    return frame, {**found, **{role: role for role in said}}


def rows(path: Path, features: Sequence[str], count: int, columns: Sequence[str] = ()) -> Array:
    """Read the features of rows that a model is to classify, as they are read for training.

    Parameters
    ----------
    path : a `.csv` or `.parquet` file. A CSV file may lack the line of names; each column is then a feature.
    features : names of the model's features, found in any order; none = every column but `y`, `client`, ...
    count : number of features.
    columns : the column of each feature, `sex` of `sex=f`; none = found by the names.

    Returns
    -------
    float32 (n, count), NaN where a number is unknown.

    Raises
    ------
    BadRequest : the file cannot be read, or columns are missing or wrong; the message names all of them.
    """
    with _named(path):
        if path.suffix.lower() == ".parquet":
            frame = _parquet(path)
            sources = _sources(path, list(frame.columns), features, columns)
        else:
            frame, sources = _csv_rows(path, features, count, columns)
    if not features:
        known = (*COLUMNS[1:], *LABELS)
        frame = frame[[name for name in frame.columns if name not in known and not ROW_NUMBERS.fullmatch(name)]]
    if not features and frame.shape[1] != count:
        raise BadRequest(f"{path} has {counted(frame.shape[1], 'column')} of features, but the model takes {count}")
    values: list[Array] = []
    faults: list[str] = []
    for feature in features or frame.columns:
        source = sources.get(feature, feature)
        column = frame[source]
        if source != feature:
            category = feature.removeprefix(f"{source}=")
            equal = [known and composed(str(v).strip()) == category for v, known in zip(column, column.notna())]
            values.append(np.array(equal, np.float32))
            continue
        found = None
        if column.isna().all():
            values.append(np.full(len(column), np.nan, np.float32))
        elif not _legible(column):
            faults.append(f"'{source}' is {column.dtype}, wanted numbers")
        else:
            found = _cells(column, source, "row {}".format, faults)
        if found is not None and found.dtype == object:
            row = next(n for n, text in enumerate(found.tolist()) if text and not is_number(text))
            faults.append(
                f"'{source}' has '{found[row][:SHORT]}' (row {row}), which is not a number: leave unknown cells empty"
            )
        elif found is not None and (narrow := _narrow(found, source, "row {}".format, faults)) is not None:
            values.append(narrow)
    _refuse(path, faults)
    return np.stack(values, axis=1)


def _sources(path: Path, names: Sequence[str], features: Sequence[str], columns: Sequence[str]) -> dict[str, str]:
    """Return the column of each feature that stands for a category, `sex=f` -> `sex`.

    Raises
    ------
    BadRequest : columns are missing, or several could be meant; names all of them.
    """
    found, lacking = {}, []
    for number, feature in enumerate(features):
        if columns:
            fitting = [columns[number]] if columns[number] in names else []
        else:
            fitting = [n for n in names if n == feature] or [n for n in names if feature.startswith(f"{n}=")]
        if len(fitting) != 1:
            lacking.append(
                f"{feature} ({' or '.join(fitting)})" if fitting else columns[number] if columns else feature
            )
        elif fitting[0] != feature:
            found[feature] = fitting[0]
    if lacking:
        lacking = list(dict.fromkeys(lacking))
        more = f" ({len(lacking)} in all)" if len(lacking) > SHOWN else ""
        raise BadRequest(
            f"{path} lacks {', '.join(lacking[:SHOWN])}{more}: the model was trained on {', '.join(features[:40])}"
        )
    return found


def _csv_rows(path: Path, features: Sequence[str], count: int, columns: Sequence[str]) -> tuple[Any, dict[str, str]]:
    mark, header = _header(path)
    # Numbers, true and false are values: the file has no header.
    if not set(header) & set(features) and any(is_number(c) or c.lower() in ("true", "false") for c in header):
        if len(header) != count:
            raise BadRequest(f"{path} has {counted(len(header), 'column')} of features, but the model takes {count}")
        return _body(path, mark, list(features) or [f"column {n + 1}" for n in range(count)], 0, {}), {}
    names = checked_names(path, header)
    sources = _sources(path, names, features, columns)
    texts: dict[str, list[str]] = {name: [] for name in sources.values()}
    for feature, source in sources.items():
        texts[source].append(feature.removeprefix(f"{source}="))
    # Text stays as written: 0 and 00 are two categories, and NA is one if training rows of a Parquet file had it.
    unknown = {name: [u for u in UNKNOWN if u not in found] for name, found in texts.items()}
    return _body(path, mark, names, 1, unknown), sources


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the file in whatever error its reader raises."""
    try:
        yield
    except BadRequest:
        raise
    except ImportError as error:
        raise BadRequest(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from error
    except Exception as error:  # a damaged file raises errors of Arrow and of Python
        why = " ".join(str(error).split())
        raise BadRequest(f"cannot read the table {path} ({why}): write it again, CSV as UTF-8 with a header") from error


def _frame(
    path: Path, wanted: Mapping[str, tuple[str, ...]], texts: Sequence[str] = (), labels: bool = True
) -> tuple[Any, dict[str, str]]:
    """Read one file and say which of its columns are y, client, split and group; `texts` are columns of text."""
    with _named(path):
        if read := {".parquet": _parquet, ".json": _json, ".jsonl": _json}.get(path.suffix.lower()):
            frame = read(path)
            found = assigned(path, list(frame.columns), wanted, labels)
        else:
            mark, header = _header(path)
            if all(is_number(name) for name in header):
                raise BadRequest(f"{path}: the first line has numbers only: it must name the columns")
            names = checked_names(path, header)
            found = assigned(path, names, wanted, labels)
            # Text of these columns stays as written: 007 and 7 are two clients, NA may be a class.
            frame = _body(path, mark, names, 1, {name: [""] for name in (*found.values(), *texts)})
        if not len(frame):
            raise BadRequest(f"{path}: the table has no rows")
        return frame, found


def _json(path: Path) -> Any:
    """Read JSON: a list of records, an object of columns, or a record a line."""
    read = partial(pd.read_json, path, dtype=False, encoding="utf-8-sig")
    try:
        frame = read(lines=path.suffix.lower() == ".jsonl")
    except ValueError:  # a record a line under the other suffix
        frame = read(lines=True)
    frame.columns = checked_names(path, [str(name) for name in frame.columns])
    return frame.reset_index(drop=True)


def _parquet(path: Path) -> Any:
    frame = pd.read_parquet(path)
    frame.columns = columns = checked_names(path, [str(name) for name in frame.columns])
    if isinstance(frame.index, pd.RangeIndex) and frame.index.name is None:
        return frame.reset_index(drop=True)
    # Of an index that has the name of a column, the column is read.
    names = ["" if name is None else composed(str(name)) for name in frame.index.names]
    names = [f"__index_level_{i}__" if name in ("", *columns) else name for i, name in enumerate(names)]
    return frame.rename_axis(index=names).reset_index()


def _header(path: Path) -> tuple[str, list[str]]:
    """Return the separator of a CSV file and the cells of its first line."""
    with path.open(encoding="utf-8-sig", newline="") as stream:
        line = stream.readline()
        mark = max(",;\t", key=re.sub('"[^"]*"', "", line).count)
        stream.seek(0)
        header = [name.strip() for name in next(csv.reader(stream, delimiter=mark, skipinitialspace=True), [])]
    if not any(header):
        raise BadRequest(f"{path} is empty: its first line must name the columns")
    return mark, header


def checked_names(where: object, header: Sequence[str]) -> list[str]:
    """Return one name for each column, which is in brackets where the file has none."""
    header = [composed(name) for name in header]
    twice = sorted(name for name, times in Counter(header).items() if name and times > 1)
    if twice:
        raise BadRequest(f"{where}: several columns are called '{twice[0]}' ({len(twice)} such names): rename them")
    return [name or NAMELESS.format(number) for number, name in enumerate(header)]


def _body(path: Path, mark: str, names: list[str], start: int, texts: Mapping[str, Sequence[str]]) -> Any:
    """Read the rows of a CSV file from the line `start` on; `texts` are columns of text -> cells that are unknown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pandas 4 will always read floats to the last bit
        warnings.simplefilter("error", pd.errors.ParserWarning)  # lines longer than the header
        frame = pd.read_csv(
            path, sep=mark, names=names, skiprows=start, header=None, index_col=False, encoding="utf-8-sig",
            dtype=dict.fromkeys(texts, "str"), keep_default_na=False,
            na_values={name: list(texts.get(name, UNKNOWN)) for name in names},
            float_precision="round_trip", skipinitialspace=True, low_memory=False,
        )  # fmt: skip
    if len(frame) and pd.isna(frame.iloc[-1, -1]):  # a file that was cut: pandas refuses longer lines alone
        with path.open(encoding="utf-8-sig", newline="") as stream, suppress(csv.Error):  # it reads no very long cell
            lines = csv.reader(stream, delimiter=mark, skipinitialspace=True)
            *others, last = [len(line) for line in lines if any(map(str.strip, line))]
            if last < min(others[1:], default=len(names)):
                raise BadRequest(f"{path}: its last line has {last} of {len(names)} cells: complete it, or remove it")
    nameless = [name for n, name in enumerate(names) if name == NAMELESS.format(n)]
    return frame.drop(columns=[name for name in nameless if frame[name].isna().all()])


@dataclass
class _Features:
    """Features gathered so far, and the faults of the others."""

    values: list[Array] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    categories: dict[str, tuple[str, ...]] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def from_frame(
    where: object,
    frame: Any,
    found: Mapping[str, str],
    wanted: Mapping[str, tuple[str, ...]],
    node: bool,
    classes: Sequence[str] | None = None,
    place: Place = "row {}".format,
) -> Own:
    """Turn a table into columns of own data.

    Parameters
    ----------
    where : name of the source, for messages.   frame : a pandas DataFrame.
    found, wanted : of `assigned` and `roles`.
    classes : their names in order, as the column y has them; None = sorted.
    place : how messages name a row.

    Raises
    ------
    BadRequest : columns are wrong; the message names all of them.
    """
    features = _Features()
    columns = {role: keys(role, frame[n], n, place, features.faults, bool(classes)) for role, n in found.items()}
    training = np.ones(len(frame), bool)
    if "split" in columns:
        training = columns["split"] == "train"
        if not training.any():
            there = ", ".join(sorted(set(columns["split"].tolist()))[:SHOWN])
            features.faults.append(f"'{found['split']}' has no row 'train', but {there}: write {', '.join(PARTS)}")
    listed = wanted.get("x", ())
    every = [name for name in map(str, frame.columns) if name not in found.values()]
    named = listed and "*" not in listed
    # A table may have very many columns.
    chosen = dict.fromkeys(listed if named else [n for n in every if n in listed or not ROW_NUMBERS.fullmatch(n)])
    features.ignored += [name for name in every if name not in chosen]
    for name in chosen:
        _feature(features, frame[name], name, bool(listed), training, node, place)
    twice = [name for name, times in Counter(features.names).items() if times > 1]
    if twice:
        features.faults.append(
            f"'{twice[0]}' is both a column and a category, or a category of two columns: rename one"
        )
    _refuse(where, features.faults)
    if not features.values:
        raise BadRequest(
            f'{where}: no numeric column is left for the features: name some with columns = "x=a,b" or, with text '
            f"columns, x=*; name texts for a pretrained body with --text, on a node with features-text; there are "
            f"{', '.join(every) or 'no others'}"
        )
    arrays = labelled({**columns, "x": np.stack(features.values, axis=1)}, classes)
    return replace(
        own(where, arrays), features=tuple(features.names), categories=features.categories,
        ignored=tuple(features.ignored),
    )  # fmt: skip


def _refuse(where: object, faults: Sequence[str]) -> None:
    if faults:
        more = f" ({len(faults)} faults in all)" if len(faults) > SHOWN else ""
        raise BadRequest(f"{where}: " + "; ".join(faults[:SHOWN]) + more)


def keys(role: str, column: Any, name: str, place: Place, faults: list[str], given: bool = False) -> Array:
    """Return the entries of y, client, split or group as text; names of classes that are `given` stay as they are."""
    given = given and role == "y"
    empty = np.array(column.isna())
    odd = {row: v for row, v in enumerate(column) if isinstance(v, (bytes, list, dict, np.ndarray))}
    _note_odd(odd, name, place, faults)
    texts = ["" if e else composed(str(v) if given else str(v).strip()) for v, e in zip(column, empty)]
    longest = max(range(len(texts)), key=lambda row: len(texts[row]), default=0)
    if texts and len(texts[longest]) > LONGEST:
        faults.append(f"{place(longest)} has a {role} of {len(texts[longest])} characters in '{name}', above {LONGEST}")
    text = np.array([t[:LONGEST] for t in texts], dtype=str)
    empty |= text == ""
    if empty.any():
        row = int(np.flatnonzero(empty)[0])
        faults.append(
            f"{place(row)} has no {role} (column '{name}' is empty, {int(empty.sum())} in all): fill it or leave the "
            "row out"
        )
    elif role != "split" and not given and all(map(is_number, values := [str(v) for v in np.unique(text)])):
        numbers = np.array([float(v) for v in values])
        if np.isfinite(numbers).all() and (numbers == np.round(numbers)).all():
            # 3.0 is what a column of whole numbers becomes next to an empty cell.
            plain = (t.split(".")[0] if "." in t and "e" not in t.lower() else t for t in text.tolist())
            text = np.array(["0" if t in ("", "-", "+", "-0", "+0") else t for t in plain])
        elif role == "y":
            number = values[int(np.argmax(numbers != np.round(numbers)))]
            faults.append(f"'{name}' has numbers such as {number}, wanted classes: write names or 0, 1, 2, ...")
    return text


def _feature(
    features: _Features, column: Any, name: str, named: bool, training: Array, node: bool, place: Place
) -> None:
    """Add one column to the features, to the ignored ones, or to the faults."""
    if not _legible(column):
        if named:
            features.faults.append(f"'{name}' is {column.dtype}: write numbers or text")
        else:
            features.ignored.append(name)
        return
    values = _cells(column, name, place, features.faults)
    if values is not None and values.dtype == object:
        _one_hot(features, values, name, named, training, node)
    elif values is not None and (narrow := _narrow(values, name, place, features.faults)) is not None:
        if told := rounded(values):
            features.faults.append(f"'{name}' {told}, or leave it out")
        features.values.append(narrow)
        features.names.append(name)


def _legible(column: Any) -> bool:
    """Whether a column holds numbers or text."""
    types = pd.api.types
    if types.is_numeric_dtype(column):
        return not types.is_complex_dtype(column)
    known = column[column.notna()]
    return len(known) > 0 and isinstance(known.iloc[0], (str, bool, int, float))


def _cells(column: Any, name: str, place: Place, faults: list[str]) -> Array | None:
    """Return a column as float64, NaN = unknown, or as texts (object), "" = unknown; None = words among numbers."""
    if pd.api.types.is_numeric_dtype(column):
        numbers: Array = column.to_numpy(np.float64, na_value=np.nan)
        return numbers
    # An array of type str would take as much for every row as for the longest text.
    text = np.array([composed(str(v).strip()) if k else "" for v, k in zip(column, column.notna())], dtype=object)
    numeric = {t: is_number(t) for t in set(text.tolist()) - {""}}
    if {t.lower() for t in numeric} <= {"true", "false"}:
        return np.array([t.lower() == "true" if t else np.nan for t in text.tolist()], np.float64)
    if sum(numeric.values()) <= len(numeric) / 2:
        return text
    odd = [row for row, t in enumerate(text.tolist()) if t and not numeric[t]]
    if odd:
        remedy = COMMAS if WITH_COMMAS.fullmatch(text[odd[0]]) else "leave unknown cells empty, or leave the column out"
        faults.append(
            f"'{name}' has '{text[odd[0]][:SHORT]}' among numbers ({place(odd[0])}, {len(odd)} in all): {remedy}"
        )
        return None
    return np.array([float(t) if t else np.nan for t in text.tolist()])


def _narrow(values: Array, name: str, place: Place, faults: list[str]) -> Array | None:
    """Return numbers as float32; None if it cannot hold them."""
    with np.errstate(over="ignore"):
        narrow: Array = values.astype(np.float32)
    infinite = np.flatnonzero(np.isinf(narrow))
    whole = values[np.isfinite(values)]
    if len(infinite):
        faults.append(
            f"'{name}' is infinite for float32 ({place(int(infinite[0]))}, {len(infinite)} in all): leave them empty"
        )
    elif len(whole) and np.abs(whole).max() > EXACT and (whole == np.round(whole)).all():
        faults.append(
            f"'{name}' has whole numbers above 2^24, which float32 cannot hold: subtract an offset, or leave it out"
        )
    else:
        return narrow
    return None


def _one_hot(features: _Features, text: Array, name: str, named: bool, training: Array, node: bool) -> None:
    """Add a feature per category of a text column."""
    distinct = set(text.tolist()) - {""}
    commas = sorted(filter(WITH_COMMAS.fullmatch, distinct))
    numbers = len(commas) + sum(map(is_number, distinct))
    if len(commas) > sum("," in t for t in distinct) / 2 and numbers > len(distinct) / 2:
        features.faults.append(f"'{name}' has commas in its numbers, such as '{commas[0][:SHORT]}': {COMMAS}")
    elif not named:
        features.ignored.append(name)
    elif node:
        features.faults.append(
            f"'{name}' is text, which every site would code in its own way: write numbers, or leave it out of x"
        )
    else:
        categories = tuple(sorted(set(text[training].tolist()) - {""}))
        if not 1 <= len(categories) <= MOST_CATEGORIES:
            features.faults.append(
                f"'{name}' has {len(categories)} different texts in the training rows, wanted 1 to {MOST_CATEGORIES}: "
                "group them, or leave it out"
            )
            return
        features.values += [(text == category).astype(np.float32) for category in categories]
        features.names += [f"{name}={category}" for category in categories]
        features.categories[name] = categories
