"""Own data as columns of equal length: the one contract that every source of own data is turned into.

=================  ===========================  ================================================================
column             shape, type                  meaning
=================  ===========================  ================================================================
``x``              (N, H, W) or (N, H, W, C)    images: any height, width and number of channels
                   uint8
                   (N, C, T) float or integer   series of T steps with C channels
                   (N, F) float, integer, bool  rows of a table with F features; NaN = unknown
                   (N, ...) float or integer    other arrays, such as images (N, C, H, W) of floats
``y``              (N,) integer or text         classes 0 .. C-1, or their names
``client``         (N,) integer or text         the natural owner: a person, hospital, writer, machine; optional
``split``          (N,) text                    ``train``, ``validation`` or ``test``; optional
``group``          (N,) integer or text         rows that must stay on one side of every cut, such as windows of
                                                one recording; optional
``class_names``    (C,) text                    names of the classes, in their order; optional
``about``          text                         JSON of `fedapp features`: ``x`` are features of a pretrained body, and
                                                its SHA-256 is the entry ``body``; optional
=================  ===========================  ================================================================

Instead of ``x``, ``y`` and ``split`` there may be ``x_train``, ``y_train`` and, with a test set, ``x_test`` and
``y_test``.
"""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.data.moments import rounded_features
from fedapp.data.names import COLUMNS, composed, name_of
from fedapp.errors import BadRequest, counted, suggest, suggest_choice
from fedapp.settings import DataSettings

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]

CLIENT_COLUMNS = ("x", "y", "split", "group")
"""Columns that the file of one client may have."""
OLD = ("x_train", "y_train", "x_test", "y_test")
KNOWN = (*COLUMNS, *OLD, "class_names", "about")
BODY = "body"
"""Entry of `about` with the SHA-256 of the body that the features are from."""
REPEATED = ("name", "weights", "code", "tokenizer", "size", "resize", "mean", "std", "tokens")
"""Entries of `about` that say how to extract features of further samples."""
PARTS = ("train", "validation", "test")
EXACT = 2**24
"""Largest integer up to which float32 holds every integer."""


@dataclass(frozen=True)
class Own:
    """Own data, checked.

    Attributes
    ----------
    arrays : x_train, y_train, x_test, y_test, and, as far as the data have them, over the rows of both parts, training
        rows first: `owners` int64 (a position in `owner_names`), `groups` int64; over training rows `held_out` bool.
    classes : names of the classes, None if the labels are numbers without names.
    kind : `image`, `series`, `table` or `array`.
    owner_names : of the clients, sorted: numbers as numbers, text as text.
    ignored : arrays or columns of the source that mean nothing here.
    features : of a table, one name per feature where the source has them; `sex=f` for a category of a text column.
    categories : text column of a table -> its categories, in the order of their features.
    skipped : files, or rows of a table of pictures, that could not be used and were left out.
    about : of the column `about`; empty where there is none.
    parts : where clients' samples differ in size, the rows of each size by themselves; `arrays` then has no samples but
        `part` int64 over the rows of both parts, a position in here. Each part has its rows in the order of all.
    """

    arrays: dict[str, Array]
    classes: tuple[str, ...] | None
    kind: str
    owner_names: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[Own, ...] = ()


PLAIN = DataSettings()
"""Own data read by their own names."""


def entries(column: Array) -> Array:
    """Return text as integers where every entry is a plain whole number, so that 10 comes after 9; else as it is."""
    plain = column.dtype.kind == "U" and all(
        t.isascii() and t.isdigit() and str(int(t)) == t and len(t) < 19 for t in map(str, np.unique(column))
    )
    return column.astype(np.int64) if plain and len(column) else column


def labelled(columns: Mapping[str, Array], classes: Sequence[str] | None) -> dict[str, Array]:
    """Return columns with the names of the classes, None = those of `y`; clients and groups may become integers."""
    names = np.unique(entries(columns["y"])).astype(str) if classes is None else np.array(classes, dtype=str)
    numbers = {role: entries(columns[role]) for role in ("client", "group") if role in columns}
    return {**columns, **numbers, "class_names": names}


def read_npz(path: Path) -> dict[str, Array]:
    """Read all arrays of a ``.npz`` file; none may hold Python objects.

    Raises
    ------
    BadRequest : it is no .npz file, or damaged.
    """
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise BadRequest(f"{path} is one array, not an .npz file: write it with numpy.savez")
        with archive:
            # Arrays that mean nothing here are not read, but named.
            found = {key: archive[key] if key in KNOWN else np.empty(0) for key in archive.files}
            if strange := [key for key, value in found.items() if not isinstance(value, np.ndarray)]:
                raise BadRequest(f"{path}: {strange[0]} is not an array: write it again with numpy.savez")
            return found
    except BadRequest:
        raise
    except MemoryError as error:  # the header of an array names its size, whatever the file holds
        raise BadRequest(f"cannot read {path} ({error}): its header claims more data than fits in memory") from error
    # zipfile raises RuntimeError for an encrypted file.
    except (OSError, ValueError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise BadRequest(
            f"cannot read {path} ({error}): take a good copy of it, or write it again with numpy.savez, text as "
            "array.astype(str)"
        ) from error


def read_unlabelled(path: Path) -> dict[str, Array]:
    """Read all arrays of a ``.npz`` file with samples, whose classes may be unknown.

    Raises
    ------
    BadRequest : as for :func:`read_npz`; also if column `x` is missing or has no rows.
    """
    arrays = read_npz(path)
    if "x" not in arrays:
        raise BadRequest(f"{path}: no column 'x' (found: {', '.join(sorted(arrays)) or 'none'})")
    if not arrays["x"].ndim:
        raise BadRequest(f"{path}: x is a single number, wanted (N, ...), a row for each sample")
    return arrays


def part_of(path: Path, root: Path) -> str | None:
    """Return the split that the folder of a client's file names; the folder that the user gave names none."""
    return path.parent.name if path.parent != root and path.parent.name in PARTS else None


def read_client(path: Path, root: Path) -> dict[str, Array]:
    """Read the ``.npz`` file of one client in a folder, `x` as it is kept (`samples`).

    Raises
    ------
    BadRequest : it cannot be read, lacks x or y, or its columns are wrong.
    """
    name_of(path)
    arrays = read_npz(path)
    for key in ("x", "y"):
        if key not in arrays:
            raise BadRequest(f"{path}: no column {key!r} (found: {', '.join(sorted(arrays)) or 'none'})")
    alone = "client" in arrays and set(_texts(np.unique(arrays["client"]))) != {name_of(path)}
    if others := [*(["client"] * alone), *(key for key in OLD if key in arrays)]:
        raise BadRequest(f"{path}: its name gives the client: leave out {', '.join(others)}, or give this file alone")
    x, _ = samples(path, "x", arrays["x"])
    if not len(x):
        raise BadRequest(f"{path} has no rows")
    # What one client's numbers lose may be small against the differences between clients: all are looked at later.
    arrays["x"] = arrays["x"] if any(rounded_features(arrays["x"])) else x
    for key in CLIENT_COLUMNS[1:]:
        if key in arrays and len(_column(path, key, arrays[key])) != len(arrays["x"]):
            raise BadRequest(f"{path}: x has {counted(len(arrays['x']), 'row')} but {key} has {len(arrays[key])}")
    if (part := part_of(path, root)) and "split" in arrays:
        raise BadRequest(f"{path}: the folder {part} gives the split: leave out the column split")
    return arrays


def form_of(arrays: Mapping[str, Array]) -> str:
    """Return the properties that the files of all clients must share."""
    there = ", ".join(key for key in CLIENT_COLUMNS if key in arrays)
    kinds = {"image": "images", "series": "series", "table": "rows of features", "array": "arrays"}
    return f"the columns {there} with {kinds[_kind(arrays['x'])]}"


def of_clients(root: Path, files: Mapping[Path, Mapping[str, Array]], bodies: Sequence[str] = ()) -> Own:
    """Check and join the files of a folder, one per client, as `read_client` reads them.

    Parameters
    ----------
    bodies : first digits of those whose features the files may hold; of each there is a part. Empty = all of one body.

    Raises
    ------
    BadRequest : columns are wrong, or the files differ in their classes or hold features of another body.
    """
    found = {body_of(path, arrays): path for path, arrays in files.items()}
    if len(found) > 1 and not all(bodies and body.startswith(tuple(bodies)) for body in found):
        of = ", ".join(f"{path.name} {f'of {body[:8]}' if body else 'of none'}" for body, path in [*found.items()][:3])
        raise BadRequest(
            f"{root}: the files hold features of different bodies ({of}): extract all with one body, or name each in "
            "bodies"
        )
    sizes: dict[tuple[object, ...], dict[Path, Mapping[str, Array]]] = {}
    for path, arrays in _labelled_alike(root, files).items():
        sizes.setdefault((arrays["x"].shape[1:], body_of(path, arrays)), {})[path] = arrays
    columns = [joined(root, own_files) for own_files in sizes.values()]
    if len(columns) == 1:
        return own(root, columns[0])
    labels = [c["y"] for c in columns]
    names = _class_names([n for c in columns if (n := c.get("class_names")) is not None], root)
    classes, numbered = _classes(root, {"y": np.concatenate(labels)}, names, None)
    known = np.array(classes or range(int(numbered["y"].max()) + 1), str)
    cuts = np.split(numbered["y"], np.cumsum([len(y) for y in labels])[:-1])
    firsts = [next(iter(own_files)) for own_files in sizes.values()]
    parts = [own(f, {**c, "y": y, "class_names": known}) for f, c, y in zip(firsts, columns, cuts, strict=True)]
    return replace(of_parts(parts), classes=classes)


def _labelled_alike(root: Path, files: Mapping[Path, Mapping[str, Array]]) -> Mapping[Path, Mapping[str, Array]]:
    """Return the files with labels of one kind: where some are text, integers become names of classes."""
    text = next((path for path, arrays in files.items() if arrays["y"].dtype.kind == "U"), None)
    if text is None:
        return files
    found = dict(files)
    for path, arrays in files.items():
        if arrays["y"].dtype.kind == "U":
            continue
        if "class_names" not in arrays:
            raise BadRequest(
                f"{root}: y has integers in {path.name} and text in {text.name}: write text in all, or add "
                "class_names to files with integers"
            )
        names = _texts(arrays["class_names"])
        found[path] = {**arrays, "y": np.array(names)[_classes(path, {"y": arrays["y"]}, names, None)[1]["y"]]}
    return found


def of_parts(parts: Sequence[Own]) -> Own:
    """Join the rows of clients whose samples differ in size: of each size one, with the same classes."""
    first, arrays = parts[0], {}
    trained = [len(p.arrays["y_train"]) for p in parts]

    def pooled(columns: Sequence[Array]) -> Array:
        """Return a column over the rows of all: training rows first, as in each."""
        halves = [(c[:n], c[n:]) for c, n in zip(columns, trained, strict=True)]
        return np.concatenate([h[0] for h in halves] + [h[1] for h in halves])

    for key in ("x_train", "x_test"):
        arrays[key] = first.arrays[key][:0]
    for key in ("y_train", "y_test"):
        arrays[key] = np.concatenate([p.arrays[key] for p in parts])
    counts = [len(p.arrays["y_train"]) + len(p.arrays["y_test"]) for p in parts]
    arrays["part"] = pooled([np.full(count, number) for number, count in enumerate(counts)])
    if any("held_out" in p.arrays for p in parts):
        none = [np.zeros(n, bool) for n in trained]
        arrays["held_out"] = np.concatenate([p.arrays.get("held_out", n) for p, n in zip(parts, none, strict=True)])
    names = np.concatenate([np.array(p.owner_names) for p in parts])
    known, number = np.unique(entries(names), return_inverse=True)
    ends = np.cumsum([0, *(len(p.owner_names) for p in parts)])
    arrays["owners"] = pooled([number[start:][p.arrays["owners"]] for p, start in zip(parts, ends)])
    if "groups" in first.arrays:  # of different clients, so no two are one
        starts = np.cumsum([0, *(int(p.arrays["groups"].max()) + 1 for p in parts)])
        arrays["groups"] = pooled([start + p.arrays["groups"] for p, start in zip(parts, starts)])
    ignored = dict.fromkeys(name for p in parts for name in p.ignored)
    return Own(arrays, first.classes, first.kind, tuple(map(str, known)), tuple(ignored), parts=tuple(parts))


def joined(root: Path, files: Mapping[Path, Mapping[str, Array]]) -> dict[str, Array]:
    """Join one file per client into columns; the name of a file is its client, a folder `train`, ... its split.

    Raises
    ------
    BadRequest : the files name different classes.
    """
    rows: dict[str, list[Array]] = {}
    for path, arrays in files.items():
        found = {k: arrays[k] for k in CLIENT_COLUMNS if k in arrays}
        count = len(found["x"])
        if part := part_of(path, root):
            found["split"] = np.full(count, part)
        if "group" in found:  # groups of two clients are two groups, whatever their names
            found["group"] = np.array([f"{name_of(path)}/{g}" for g in found["group"]])
        found["client"] = np.full(count, name_of(path))
        for key, column in found.items():
            rows.setdefault(key, []).append(column)
    columns = {key: np.concatenate(pieces) for key, pieces in rows.items()}
    names = _class_names([v["class_names"] for v in files.values() if "class_names" in v], next(iter(files)).parent)
    columns["client"] = entries(columns["client"])
    about = [v["about"] for v in files.values() if "about" in v][:1]
    columns |= {"about": about[0]} if about else {}
    columns |= {key: column for arrays in files.values() for key, column in arrays.items() if key not in KNOWN}
    return {**columns, **({"class_names": np.array(names)} if names is not None else {})}


def _class_names(given: Sequence[Array], where: Path) -> list[str] | None:
    """Return the names of the classes that several files give, None where none does."""
    names = [_texts(one) for one in given]
    if any(other != names[0] for other in names):
        raise BadRequest(f"{where}: the files have different class_names")
    return names[0] if names else None


def _texts(names: Array) -> list[str]:
    return [composed(str(n)) for n in np.asarray(names).reshape(-1)]


def _about(where: object, arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Return what `about` says of the body of the features; empty without it."""
    if "about" not in arrays:
        return {}
    try:
        found = json.loads(str(arrays["about"]))
        if re.fullmatch("[0-9a-f]{64}", found[BODY]):
            return dict(found)
    except (ValueError, TypeError, KeyError):
        pass
    raise BadRequest(f"{where}: about is not as fedapp features writes it: extract the features again")


def body_of(where: object, arrays: Mapping[str, Array]) -> str:
    """Return the SHA-256 of the body that the features of a file are from; empty for other data.

    Raises
    ------
    BadRequest : `about` is damaged.
    """
    return str(_about(where, arrays).get(BODY, ""))


def features_problem(x: Array) -> str | None:
    """Describe the faults of features (N, F) of a body: numbers that are not finite, or a row of zeros alone."""
    for bad, what in ((~np.isfinite(x).all(axis=1), "numbers that are not finite"), (~x.any(axis=1), "zeros alone")):
        if bad.any():
            return f"row {int(np.argmax(bad))} has {what} ({int(bad.sum())} in all)"
    return None


def own(where: object, arrays: Mapping[str, Array], expected: Sequence[str] | None = None) -> Own:
    """Check columns and cut them into training and test rows; see :class:`Own`.

    Parameters
    ----------
    where : name of the source, for messages.
    arrays : the columns.
    expected : classes of a published data set, which labels must fit; None = the labels' own.

    Raises
    ------
    BadRequest : a column is missing or wrong; the message names it and the remedy.
    """
    about, found = _about(where, arrays), _own(where, arrays, expected)
    if not about:
        return found
    for part in ("x_train", "x_test"):
        if found.kind != "table" or (problem := features_problem(found.arrays[part])):
            what = problem if found.kind == "table" else f"x is of shape {found.arrays[part].shape}"
            raise BadRequest(f"{where}: features of a body are rows of numbers, and {what}: extract them again")
    return replace(found, about=about)


def _own(where: object, arrays: Mapping[str, Array], expected: Sequence[str] | None) -> Own:
    """Do the work of `own` without `about`."""
    names = _texts(arrays["class_names"]) if "class_names" in arrays else None
    ignored = tuple(sorted(k for k in arrays if k not in KNOWN))
    old, new = [k for k in arrays if k in OLD], [k for k in arrays if k in COLUMNS]
    if old and new:
        raise BadRequest(f"{where}: there are {', '.join(new)} and {', '.join(old)}: give one of the two forms")
    if not new:
        _complete(where, arrays)
        labels = {k: _column(where, k, arrays[k]) for k in ("y_train", "y_test") if k in arrays}
        classes, numbered = _classes(where, labels, names, expected)
        x_train, kind = samples(where, "x_train", arrays["x_train"])
        _keep_differences(where, "x_train", arrays["x_train"])
        x_test = x_train[:0]
        if "x_test" in arrays:
            x_test, other = samples(where, "x_test", arrays["x_test"])
            if len(x_test) and other != kind:
                raise BadRequest(
                    f"{where}: x_train is {arrays['x_train'].dtype}, x_test {arrays['x_test'].dtype}, so they are read "
                    f"as {kind} and {other}: write both with the same type and axes, uint8 for images"
                )
        if len(x_test) and x_test.shape[1:] != x_train.shape[1:]:
            raise BadRequest(
                f"{where}: one sample of x_test has the shape {x_test.shape[1:]}, of x_train {x_train.shape[1:]}"
            )
        x_test = x_test.reshape(len(x_test), *x_train.shape[1:]).astype(x_train.dtype, copy=False)
        y_test = numbered.get("y_test", numbered["y_train"][:0])
        for part, x, y in (("train", x_train, numbered["y_train"]), ("test", x_test, y_test)):
            if len(x) != len(y):
                raise BadRequest(f"{where}: x_{part} has {len(x)} rows but y_{part} has {len(y)} labels")
        parts = {"x_train": x_train, "y_train": numbered["y_train"], "x_test": x_test, "y_test": y_test}
        return Own(parts, classes, kind, ignored=ignored)
    return _of_columns(where, arrays, names, expected, ignored)


def _complete(where: object, arrays: Mapping[str, Array]) -> None:
    """Refuse arrays in parts if one part is missing or empty."""
    for key in ("x_train", "y_train"):
        if key not in arrays:
            raise BadRequest(
                f"{where}: no array {key!r} (found: {', '.join(sorted(arrays)) or 'none'}); wanted are x and y, or "
                "x_train, y_train and, if there is a test set, x_test, y_test"
            )
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise BadRequest(f"{where}: x_test and y_test must both be there, or neither")
    if not np.ndim(arrays["x_train"]) or not len(arrays["x_train"]):
        raise BadRequest(f"{where}: x_train has no rows")


def _of_columns(
    where: object,
    arrays: Mapping[str, Array],
    names: list[str] | None,
    expected: Sequence[str] | None,
    ignored: tuple[str, ...],
) -> Own:
    for key in ("x", "y"):
        if key not in arrays:
            raise BadRequest(f"{where}: no column {key!r} (found: {', '.join(sorted(arrays))})")
    x, kind = samples(where, "x", arrays["x"])
    _keep_differences(where, "x", arrays["x"])
    if not len(x):
        raise BadRequest(f"{where}: x has no rows")
    columns = {k: _column(where, k, arrays[k]) for k in COLUMNS[1:] if k in arrays}
    for key, column in columns.items():
        if len(column) != len(x):
            raise BadRequest(f"{where}: x has {counted(len(x), 'row')} but {key} has {len(column)}")
    classes, numbered = _classes(where, {"y": columns["y"]}, names, expected)
    y = numbered["y"]
    part = _parts(where, columns["split"]) if "split" in columns else np.zeros(len(x), np.int64)
    test = part == PARTS.index("test")
    if test.all():
        raise BadRequest(f"{where}: split has no training rows")
    order = np.argsort(test, kind="stable")  # training rows first, each part in the order of the file
    cut = int(np.count_nonzero(~test))
    found: dict[str, Array] = {
        # Without a test part the rows stay as they are, and need no second copy.
        "x_train": x[~test] if test.any() else x,
        "y_train": y[~test],
        "x_test": x[test] if test.any() else x[:0],
        "y_test": y[test],
    }
    owner_names: tuple[str, ...] = ()
    if "client" in columns:
        owners, owner_names = _numbered(columns["client"])
        found["owners"] = owners[order]
    if "group" in columns:
        groups, group_names = _numbered(columns["group"])
        _whole(where, groups, group_names, part)
        found["groups"] = groups[order]
    held_out = part[order][:cut] == PARTS.index("validation")
    if held_out.any():
        found["held_out"] = held_out
    return Own(found, classes, kind, owner_names, ignored)


def samples(where: object, key: str, x: Array) -> tuple[Array, str]:
    """Return samples as they are kept, and their kind.

    Returns
    -------
    x : uint8 (N, H, W, C) for images, else float32.
    kind : `image`, `series`, `table` or `array`, by type and number of axes.

    Raises
    ------
    BadRequest : text, too few axes, values that float32 cannot hold, or missing values outside a table.
    """
    if x.dtype.kind not in "uifb":
        raise BadRequest(f"{where}: {key} is {x.dtype}, wanted numbers: uint8 for images, float32 for all others")
    if x.ndim < 2 or 0 in x.shape[1:]:
        raise BadRequest(
            f"{where}: {key} has shape {x.shape}, wanted (N, F) rows, (N, C, T) series, or uint8 images (N, H, W, C)"
        )
    kind = _kind(x)
    if kind == "image":
        images = x[..., None] if x.ndim == 3 else x
        _, first, second, last = images.shape
        if x.ndim == 4 and first in (1, 3) and last not in (1, 3, 4) and second == last:
            raise BadRequest(
                f"{where}: {key} has shape {x.shape}, which has the channels first: write x.transpose(0, 2, 3, 1)"
            )
        return images, "image"
    if x.dtype.kind in "ui" and x.size and max(abs(int(x.min())), abs(int(x.max()))) > EXACT:
        raise BadRequest(
            f"{where}: {key} is {x.dtype} with numbers above 2^24, which float32 cannot hold: subtract an offset or "
            "divide them, and write x.astype('float32')"
        )
    with np.errstate(over="ignore"):
        values = x.astype(np.float32, copy=False)
    wrong = np.isinf(values) if kind == "table" else ~np.isfinite(values)
    if wrong.any():
        place = np.argwhere(wrong)[0].tolist()
        what = "inf" if np.isinf(values[tuple(place)]) else "nan"
        remedy = "replace it by nan, which stands for an unknown value" if kind == "table" else "fill or leave out"
        raise BadRequest(f"{where}: {key} is {what} at {place} ({int(wrong.sum())} in all): {remedy}")
    return values, kind


def _keep_differences(where: object, key: str, x: Array) -> None:
    for number, told in rounded_features(x):
        raise BadRequest(f"{where}: {key}[:, {number}] {told}, or leave it out")


def _kind(x: Array) -> str:
    return "image" if x.dtype == np.uint8 and x.ndim in (3, 4) else {2: "table", 3: "series"}.get(x.ndim, "array")


def _column(where: object, key: str, column: Array) -> Array:
    """Return a column of integers or text."""
    if column.ndim != 1:
        raise BadRequest(f"{where}: {key} has shape {column.shape}, wanted one entry per row, shape (N,)")
    if column.dtype.kind not in "iubU" and not (key == "split" and column.dtype.kind == "S"):
        wanted = "integer labels 0 .. C-1, or text" if key.startswith("y") else "integers or text"
        raise BadRequest(f"{where}: {key} is {column.dtype}, wanted {wanted}: write {key}.astype(str) or .astype(int)")
    if column.dtype.kind != "U":
        return column
    if (empty := np.flatnonzero(np.char.strip(column) == "")).size:
        raise BadRequest(f"{where}: row {empty[0]} has no {key} ({len(empty)} in all): fill it or leave the row out")
    distinct, place = np.unique(column, return_inverse=True)
    return np.array([composed(t) for t in distinct.tolist()], str)[place] if len(distinct) else column


def _classes(
    where: object, labels: dict[str, Array], names: list[str] | None, expected: Sequence[str] | None
) -> tuple[tuple[str, ...] | None, dict[str, Int64]]:
    """Number the labels; text by `class_names`, else in sorted order."""
    text = {k: v.dtype.kind == "U" for k, v in labels.items()}
    if any(text.values()):
        if not all(text.values()):
            raise BadRequest(f"{where}: {' and '.join(labels)} must both be text, or both be numbers")
        order = names if names is not None else list(expected or sorted({str(v) for k in labels for v in labels[k]}))
        place = {name: number for number, name in enumerate(order)}
        for key, column in labels.items():
            foreign = [str(v) for v in np.unique(column) if str(v) not in place]
            if foreign:
                raise BadRequest(f"{where}: {key} has '{foreign[0]}', which is not a class{suggest(foreign[0], order)}")
        numbered = {k: np.array([place[str(v)] for v in column], np.int64) for k, column in labels.items()}
        names = list(order)
    else:
        numbered = {k: column.astype(np.int64) for k, column in labels.items()}
    every = np.concatenate(list(numbered.values()))
    if not len(every):
        raise BadRequest(f"{where}: there are no labels")
    count = len(expected) if expected is not None else len(names) if names is not None else int(every.max()) + 1
    if names is not None and (len(names) != count or len(set(names)) != len(names) or not all(map(str.strip, names))):
        raise BadRequest(f"{where}: {len(names)} class_names for {count} classes: give each class one name of its own")
    lowest, highest = int(every.min()), int(every.max())
    if lowest < 0 or highest >= count:
        wrong = lowest if lowest < 0 else highest
        raise BadRequest(f"{where}: label {wrong} is out of range: labels must be 0 .. {count - 1}")
    if expected is None and names is None:
        there = np.unique(every)
        if len(there) < count:
            missing = next((i for i, label in enumerate(there.tolist()) if i != label), len(there))
            raise BadRequest(
                f"{where}: no row has label {missing} although the largest label is {count - 1}: number the "
                "classes 0 .. C-1 without gaps, or add class_names with one name per class"
            )
    return (tuple(names) if names is not None else None), numbered


def _parts(where: object, column: Array) -> Int64:
    """Return 0 for training, 1 for validation and 2 for test rows."""
    text = column.astype(str)
    foreign = [str(v) for v in np.unique(text) if v not in PARTS]
    if foreign:
        raise BadRequest(f"{where}: split has '{foreign[0]}'{suggest_choice(foreign[0], PARTS)}")
    return np.asarray(np.select([text == part for part in PARTS], range(len(PARTS))), np.int64)


def _numbered(column: Array) -> tuple[Int64, tuple[str, ...]]:
    """Return each row's position among the sorted distinct entries, and the entries as text."""
    entries, place = np.unique(column, return_inverse=True)
    return place.reshape(-1).astype(np.int64), tuple(str(e) for e in entries)


def _whole(where: object, groups: Int64, names: tuple[str, ...], part: Int64) -> None:
    """Refuse a group with rows on two sides of the given split: its rows are alike, so the test would be too easy."""
    low, high = np.full(len(names), len(PARTS)), np.full(len(names), -1)
    np.minimum.at(low, groups, part)
    np.maximum.at(high, groups, part)
    parted = np.flatnonzero(low < high)
    if len(parted):
        g = parted[0]
        raise BadRequest(
            f"{where}: group '{names[g]}' has rows in {PARTS[low[g]]} and in {PARTS[high[g]]} "
            f"({len(parted)} groups in all): put every group on one side of split"
        )
