"""Data sets of the library `datasets`: saved to disk, in Parquet files, as folders of pictures, or from the hub.

Nothing is fetched unless the place is written ``hub:owner/name``. No code of a data set is run.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedapp.data import pictures, tables
from fedapp.data.cache import FULL, file_identity
from fedapp.data.columns import PARTS, Array, Own, labelled, own
from fedapp.data.names import HUB, assigned, entries_of, is_there, roles
from fedapp.errors import BadRequest, suggest_choice
from fedapp.lazy import datasets, pd
from fedapp.settings import DataSettings

MOST_ENCODED = 256 << 20
"""Largest file of a picture in bytes; one in an archive may be a few bytes there."""


def identity(place: str) -> dict[str, Any]:
    """Return what tells one version of a data set from another; of the hub it is the name alone.

    Raises
    ------
    BadRequest : there is nothing.
    """
    if place.startswith(HUB):
        return {"hub": place}
    path = Path(place)
    if not place or not is_there(path):
        raise BadRequest(
            f"data set 'hf' needs data-dir ({place or 'it'} is not there): a folder written by save_to_disk, Parquet "
            "files, a folder of pictures, or hub:owner/name to download one"
        )
    if path.is_dir():
        entries_of(path)  # refuses links to nothing
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {"files": [file_identity(p) for p in files]}


def read(place: str, settings: DataSettings, node: bool = False) -> Own:
    """Read a data set.

    Raises
    ------
    BadRequest : it cannot be read, or columns are missing or wrong; the message names them.
    """
    with tempfile.TemporaryDirectory(prefix="fedapp-") as scratch:
        try:
            found = _opened(place, scratch)
        except (OSError, ValueError, LookupError, TypeError, datasets.exceptions.DatasetsError) as error:
            if isinstance(error, OSError) and error.errno in FULL:
                raise BadRequest(
                    f"the folder of temporary files {scratch} is full ({error.strerror}): free some space, or set "
                    "TMPDIR to a folder on a larger disk"
                ) from error
            why = " ".join(str(error).split()) or type(error).__name__
            raise BadRequest(f"cannot read the data set {place} ({why}): write it again with save_to_disk") from error
        splits = found if isinstance(found, dict) else {"": found}
        foreign = sorted(set(splits) - {"", *PARTS})
        if foreign:
            raise BadRequest(f"{place} has a split '{foreign[0]}'{suggest_choice(foreign[0], PARTS)}")
        names = [part for part in ("", *PARTS) if part in splits]
        _check_alike(place, {part: splits[part].features for part in names})
        whole = datasets.concatenate_datasets([splits[part] for part in names])
        whole = whole.rename_columns(dict(zip(whole.column_names, tables.checked_names(place, whole.column_names))))
        if not len(whole):
            raise BadRequest(f"{place} has no rows")
        split = np.repeat(names, [len(splits[part]) for part in names]) if names not in ([""], ["train"]) else None
        return _columns(place, whole, split, settings, node)


def _check_alike(place: str, splits: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse splits with a column of different types, such as classes in another order."""
    found: dict[str, tuple[str, str]] = {}
    for part, name, kind in ((part, name, str(kind)) for part, kinds in splits.items() for name, kind in kinds.items()):
        first, one = found.setdefault(name, (part, kind)) if kind != "Value('null')" else (part, kind)
        if one != kind:  # of Value('null') no entry is known
            raise BadRequest(
                f"{place}: the column '{name}' is {one} in the split {first} and {kind} in {part}: give it one type, "
                "and classes one order, for example with cast_column"
            )


def _opened(place: str, scratch: str) -> Any:
    if place.startswith(HUB):
        name, _, revision = place.removeprefix(HUB).partition("@")
        return datasets.load_dataset(name, revision=revision or None)
    path = Path(place)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return datasets.load_from_disk(place)
    # The builder is named, so that a script next to the files is never one.
    if path.is_file():
        return datasets.load_dataset("parquet", data_files=place, cache_dir=scratch)["train"]
    builder = "parquet" if any(path.rglob("*.parquet")) else "imagefolder"
    return datasets.load_dataset(builder, data_dir=place, cache_dir=scratch)


def _columns(place: str, data: Any, split: Array | None, settings: DataSettings, node: bool) -> Own:
    wanted = roles(settings.columns)
    found = assigned(place, data.column_names, wanted)
    if split is not None and "split" in found:
        raise BadRequest(f"{place} has several splits and a column '{found['split']}' for them: leave one of them out")
    kinds: Mapping[str, Any] = data.features
    labels = kinds[found["y"]]
    known = labels.names if isinstance(labels, datasets.ClassLabel) else None
    others = [n for n in data.column_names if n not in found.values()]
    chosen = [n for n in wanted.get("x", ()) if n != "*"] or others
    whole = [n for n in chosen if not isinstance(kinds[n], (datasets.Value, datasets.ClassLabel))]
    if not whole:
        frame = pd.DataFrame({name: _values(data, name) for name in data.column_names})
        if split is not None:
            frame["split"], found = split, {**found, "split": "split"}
        return tables.from_frame(place, frame, found, wanted, node, known)
    if len(whole) > 1 or ("x" in wanted and len(chosen) > 1):
        raise BadRequest(
            f'{place}: {", ".join(chosen if "x" in wanted else whole)} could all be x: give columns = "x=NAME"'
        )
    faults: list[str] = []
    arrays: dict[str, Array] = {}
    for role, name in found.items():
        column = pd.Series(_values(data, name), dtype=object)
        arrays[role] = tables.keys(role, column, name, "row {}".format, faults, known is not None)
    if faults:
        raise BadRequest(f"{place}: {'; '.join(faults)}")
    if split is not None:
        arrays["split"] = split
    arrays = labelled(arrays, known)
    (name,) = whole
    if isinstance(kinds[name], datasets.Image):
        where, cells = f"{place}, column {name}", data.cast_column(name, datasets.Image(decode=False))[name]

        decoder = datasets.Image(mode=kinds[name].mode)

        def opened(cell: Mapping[str, Any]) -> Any:
            """Decode a cell of a format that starts no program."""
            content = _content(place, cell)
            pictures.check_format(io.BytesIO(content))
            return decoder.decode_example({"path": None, "bytes": content})

        arrays["x"], bad = pictures.stacked(where, cells, opened, settings)
    else:
        where = f"{place}, column {name}"
        bad = np.flatnonzero(data.with_format("arrow")[name][:].is_null().to_numpy()).tolist()
        if bad and not (settings.skip_bad and len(bad) < len(data)):
            more = f" ({len(bad)} in all)" if len(bad) > 1 else ""
            raise BadRequest(
                f"{where}: row {bad[0]} is empty{more}: fill these rows, or leave them out with skip-bad = true"
            )
        full = data.select(np.delete(np.arange(len(data)), bad)) if bad else data
        arrays["x"] = _stacked(where, full.with_format("numpy"), name)
    training = arrays["split"] == "train" if "split" in arrays else np.ones(len(arrays["y"]), bool)
    gone = set(arrays["y"][training]) - set(np.delete(arrays["y"], bad)[np.delete(training, bad)])
    if gone:
        raise BadRequest(f"{where}: class '{min(gone)}' has no row left for training: repair some of its rows")
    arrays = {role: v if role in ("x", "class_names") else np.delete(v, bad) for role, v in arrays.items()}
    skipped = tuple(f"row {row}" for row in bad)
    return replace(own(place, arrays), ignored=tuple(n for n in others if n != name), skipped=skipped)


def _stacked(where: str, data: Any, name: str) -> Array:
    """Return a column of arrays or lists as one array; numbers of one byte stay so, for then they may be images."""
    try:
        x: Array = data[name][:]
    except ValueError:  # lists of lists of different lengths
        x = np.empty(0, object)
    if x.dtype == object:
        raise BadRequest(f"{where}: its rows have different lengths or are empty: give all the same")
    kind = data.features[name]
    while hasattr(kind, "feature"):
        kind = kind.feature
    # The library makes int64 of all integers; it makes floats of them where some are unknown.
    return x.astype(np.uint8) if kind.dtype == "uint8" and x.dtype.kind in "iu" else x


def _content(place: str, cell: Mapping[str, Any]) -> bytes:
    """Return the bytes of a picture: the cell's own, or those of a file, perhaps in an archive next to the data.

    Raises
    ------
    ValueError : it lies at an address that opening it would ask, and only `hub:` may; there, only the hub itself.
    """
    from datasets.utils.file_utils import is_local_path, xopen

    if cell["bytes"] is not None:
        return bytes(cell["bytes"])
    path = str(cell["path"])
    *archives, last = path.split("::")
    near = is_local_path(last) or (place.startswith(HUB) and last.startswith("hf://"))
    if not near or not all(hop.startswith("zip://") for hop in archives):
        raise ValueError(f"nothing is fetched from {path}")
    if not archives and is_local_path(last) and not Path(last).is_file():
        raise ValueError(f"there is no file {last}")  # a device or a pipe would be read without end
    with xopen(path, "rb") as stream:
        content: bytes = stream.read(MOST_ENCODED + 1)
    if len(content) > MOST_ENCODED:
        raise ValueError(f"{path} has more than {MOST_ENCODED >> 20} MiB")
    return content


def _values(data: Any, name: str) -> Sequence[Any]:
    """Return the entries of one column, classes as their names, without a class None."""
    values: Sequence[Any] = data[name][:]
    kind = data.features[name]
    if isinstance(kind, datasets.ClassLabel):
        values = [None if v is None or v < 0 else kind.names[v] for v in values]
    return values
