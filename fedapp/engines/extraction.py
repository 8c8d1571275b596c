"""`fedapp features`: a pretrained body turns all samples of a data set, or a column of texts, into features, once.

Rows are extracted in chunks, by as many processes as there are cores. Each chunk is a file in a folder next to the
result and names the digest of rows and body. So an interrupted extraction goes on where it was, to a file with the same
bytes.
"""

from __future__ import annotations

import hashlib
import json
import time
import zipfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from fedapp import __version__, process
from fedapp import config as configuration
from fedapp.bodies import known
from fedapp.bodies.extractor import Extractor
from fedapp.bodies.known import Body
from fedapp.data import datasets, pictures, tables
from fedapp.data.cache import file_identity
from fedapp.data.columns import PARTS, Array, features_problem, own
from fedapp.data.dataset import Dataset
from fedapp.engines import local, pool
from fedapp.engines.resources import usable_cores
from fedapp.errors import BadRequest
from fedapp.files import atomic, explained, locked
from fedapp.settings import DataSettings

CHUNK = 256
"""Rows of a chunk."""
LOCK = "lock"
"""File in the folder of the chunks that one process holds."""
KEYS = ("data-dir", "columns", "layout", "skip-bad")
"""Run-config keys that say how a data set is read."""
FORMS = (".csv", ".json", ".jsonl", ".parquet")
"""Files that a column of texts may be in."""


@dataclass(frozen=True)
class Source:
    """Where samples come from: a data set and its folder, or a file with the column `text`."""

    name: str
    place: str
    settings: DataSettings
    text: str = ""

    @cached_property
    def found(self) -> Dataset | list[str]:
        """The samples; those of a data set stay on the disk."""
        return self._read[0]

    @cached_property
    def columns(self) -> dict[str, Array]:
        """All columns of own data but `x`."""
        return self._read[1]

    @cached_property
    def _read(self) -> tuple[Dataset | list[str], dict[str, Array]]:
        if self.text:
            texts, columns = tables.texts(Path(self.place), self.text, self.settings)
            own(self.place, {**columns, "x": np.ones((len(texts), 1), np.float32)})  # refuses wrong columns now
            return texts, columns
        data = datasets.load(self.name, self.place or None, self.settings)
        return data, _columns(data)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the samples and of their columns."""
        rows: Any = self.found if isinstance(self.found, list) else dict(self.found.identity)
        columns = {name: column.tolist() for name, column in self.columns.items()}
        files = list(map(file_identity, self.pictures))
        return hashlib.sha256(json.dumps([rows, columns, files], sort_keys=True).encode()).hexdigest()

    @cached_property
    def pictures(self) -> list[Path]:
        """The files of a folder of pictures in the order of the rows; empty for all other samples."""
        if self.name != "folder" or isinstance(self.found, list):
            return []
        listing = pictures.listed(Path(self.place), self.settings.layout)
        good = [p for p in listing.pictures if str(p.path.relative_to(listing.root)) not in self.found.skipped]
        return [p.path for part in PARTS for p in good if p.part == part]

    def __len__(self) -> int:
        return len(self.columns["y"])

    def fit(self, extractor: Extractor) -> None:
        """Compare a body with the samples; see :meth:`Extractor.fit`."""
        data = self.found
        extractor.fit(None) if isinstance(data, list) else extractor.fit(data.shape, data.kind == "image")

    def features(self, extractor: Extractor, rows: range) -> Array:
        """Return the features (n, width) of neighbouring rows, float16."""
        if isinstance(self.found, list):
            return extractor.texts(self.found[rows.start : rows.stop]).astype(np.float16)
        data, parts, apart = self.found, [], bool(self.found.parts or self.pictures)
        for single in np.array_split(np.arange(rows.start, rows.stop), len(rows) if apart else 1):
            x = pictures.whole(self.pictures[single[0]], data.shape[0])[None] if self.pictures else data.take(single)[0]
            if data.kind == "image":  # levels 0 .. 16 of the digits too
                x = x.transpose(0, 3, 1, 2) if data.scale == 255 else x.transpose(0, 3, 1, 2) * (255 / data.scale)
            parts.append(extractor.rows(x))
        with np.errstate(over="ignore"):
            return np.concatenate(parts).astype(np.float16)


def _columns(data: Dataset) -> dict[str, Array]:
    """Return labels, owners, splits and groups of a data set as columns of own data."""
    found: dict[str, Array] = {"y": data.pool_labels, "class_names": np.array(data.classes)}
    if data.owners is not None:
        found["client"] = np.array(data.owner_names)[data.owners]
    if data.num_test or data.held_out is not None:
        split = np.repeat(["train", "test"], [data.num_train, data.num_test]).astype("<U10")
        if data.held_out is not None:
            split[: data.num_train][data.held_out] = "validation"
        found["split"] = split
    return found if data.groups is None else {**found, "group": np.asarray(data.groups)}


def source(data: str, text: str, values: Mapping[str, Any]) -> Source:
    """Return the source that a command names.

    Parameters
    ----------
    data : a data set by name, or a file or folder of own data.   text : column of texts; empty = all samples.
    values : flat run-config keys of :data:`KEYS`.

    Raises
    ------
    BadRequest : there is nothing of the kind, or another key.
    """
    if others := sorted(set(values) - set(KEYS)):
        raise BadRequest(f"{others[0]} has no effect on features: leave it out; {', '.join(KEYS)} have")
    settings, place = configuration.validated(values).data, Path(data).expanduser()
    if text:
        if place.suffix.lower() not in FORMS or not place.is_file():
            raise BadRequest(
                f"{data} cannot have a column of texts: give a file that ends with one of {', '.join(FORMS)}"
            )
        return Source("", str(place), settings, text)
    if data in datasets.DATASET_NAMES or data in datasets.installed():
        return Source(data, settings.data_dir, settings)
    if not place.exists():
        datasets.check_name(data)
    return Source(datasets.source(place), str(place), settings)


def chosen(name: str, stored: str = "", size: int = 0, **described: Any) -> Body:
    """Return the body of a name: a known one, an ONNX file, or `module:function`; see `bodies.known.own`.

    Raises
    ------
    BadRequest : there is none, or an argument does not fit.
    """
    if name in known.NAMES or not (":" in name or "." in name):
        if given := sorted(key for key, value in {"weights": stored, **described}.items() if value):
            raise BadRequest(f"the body '{name}' has its own {given[0]}: leave it out")
        return known.known(name, size)
    return known.own(name, stored, size=size, **described)


@dataclass(frozen=True)
class Extracted:
    """A file of features: its place, its rows, its `about`, the seconds and the chunks that were there before."""

    out: Path
    rows: int
    about: Mapping[str, Any]
    seconds: float
    found: int


def features(
    data: str | Path,
    body: str | Path,
    out: str | Path,
    *,
    weights: str = "",
    size: int = 0,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    tokenizer: str | Path = "",
    tokens: int = 0,
    text: str = "",
    workers: int | None = None,
    progress: Callable[[int, int], None] = lambda done, rows: None,
    **settings: Any,
) -> Extracted:
    """Extract features of a data set once, into an `.npz` file that `dataset = npz` reads.

    Parameters
    ----------
    data : a data set by name, or a file or folder of own data.
    body : `efficientnet-lite0`, `minilm`, an ONNX file, or `module:function`.
    out : the file to write. `x` is float16 (rows, width), the training rows of a data set first.
    weights : of `module:function`.   size : side in pixels to which pictures are resized, bilinear.
    mean, std : of grey levels 0 .. 255, one for all channels or one for each.
    tokenizer : the file `tokenizer.json` of an ONNX file that takes texts.   tokens : the most of a text, else 256.
    text : column of texts of a `.csv`, `.json`, `.jsonl` or `.parquet` file.
    workers : processes, default one per core.
    progress : called with rows that are done and rows in all.
    settings : run-config keys that say how the data are read, such as `skip_bad=True`.

    Raises
    ------
    BadRequest : data, body and arguments do not fit, before anything is computed; or features of a row are not finite
        or all zero.

    Notes
    -----
    Repeat the same call to continue an interrupted one. Pictures of a folder are decoded in their own size, and all are
    resized by one rule, without antialiasing. Data sets of `hf` are cropped and resized by PIL, which is another body.
    """
    values = local.flat(settings)
    described = {"mean": tuple(mean), "std": tuple(std), "tokenizer": str(tokenizer), "tokens": tokens}
    found = chosen(str(body), weights, size, **described)
    return extract(source(str(data), text, values), found, Path(out), workers, progress)


def extract(
    given: Source, body: Body, out: Path, workers: int | None, progress: Callable[[int, int], None]
) -> Extracted:
    """Extract the features of a source; see :func:`features`."""
    out = out.expanduser().absolute()
    if out.suffix != ".npz" or out.exists():
        raise BadRequest(f"{out} exists already: choose another" if out.exists() else f"{out}: give a name with .npz")
    began = time.perf_counter()
    extractor = Extractor(body)
    given, extractor.body = _sized(given, extractor.body)
    given.fit(extractor)
    body, rows, skipped = extractor.body, len(given), getattr(given.found, "skipped", ())
    chunks = _Chunks(out.with_name(f"{out.name}.parts"), f"{given.digest} {body.digest}", rows)
    written = partial(explained, f"cannot write {out} and its chunks", "repeat the command when it can be")
    with written():
        chunks.folder.mkdir(exist_ok=True)
    with locked(chunks.folder / LOCK, f"another process extracts {out}: wait until it has ended, or end it"):
        missing = chunks.missing()
        there, done = len(chunks) - len(missing), rows - sum(len(chunks.rows(n)) for n in missing)
        progress(done, rows)
        with written(), closing(_made(given, extractor, chunks, workers or usable_cores(), missing)) as made:
            for number in made:
                done += len(chunks.rows(number))
                progress(done, rows)
        alive, cut = np.zeros(body.width, bool), 0
        for x, count in map(chunks.read, range(len(chunks))):
            alive, cut = alive | x.any(axis=0), cut + count
        about = {**body.about(), "rows": rows, "dead-columns": int((~alive).sum()), "fedapp": __version__}
        about |= {"texts-cut": cut} if body.tokenizer else {}
        about |= {"left-out": skipped} if skipped else {}
        columns = {**given.columns, "about": np.array(json.dumps(about))}
        with written():
            _write(out, columns, (rows, body.width), (chunks.read(n)[0] for n in range(len(chunks))))
            chunks.remove()
    return Extracted(out, rows, about, time.perf_counter() - began, there)


def _sized(given: Source, body: Body) -> tuple[Source, Body]:
    """Let PIL crop and resize pictures of `hf` to the size of the body, whose digest then says so."""
    if not body.size or given.name != "hf":
        return given, body
    sized = Source(given.name, given.place, given.settings.replaced(image_size=body.size))
    return sized, replace(body, resize="cropped, bilinear of PIL")


@dataclass(frozen=True)
class _Chunks:
    """The files of an extraction, `NUMBER.npz`: features `x` float16, texts `cut`, and what it is `of`."""

    folder: Path
    of: str
    total: int

    def __len__(self) -> int:
        return -(-self.total // CHUNK)

    def rows(self, number: int) -> range:
        """Return the rows of a chunk."""
        return range(number * CHUNK, min((number + 1) * CHUNK, self.total))

    def place(self, number: int) -> Path:
        """Return the file of a chunk."""
        return self.folder / f"{number:06d}.npz"

    def missing(self) -> list[int]:
        """Return the chunks that are not there.

        Raises
        ------
        BadRequest : one that is there is of other rows or another body.
        """
        found = [number for number in range(len(self)) if self.place(number).is_file()]
        for number in found:
            if self._stored(number)["of"] != self.of:
                raise BadRequest(
                    f"{self.folder} holds chunks of other rows or another body: remove it, or choose another out"
                )
        return [number for number in range(len(self)) if number not in found]

    def _stored(self, number: int) -> dict[str, Any]:
        try:
            with np.load(self.place(number)) as chunk:
                return {name: chunk[name] for name in ("x", "cut", "of")}
        except (ValueError, LookupError, EOFError, zipfile.BadZipFile) as e:
            raise BadRequest(f"{self.place(number)} is damaged: remove it and repeat the command") from e

    def remove(self) -> None:
        """Remove the chunks, and their folder if it holds nothing else."""
        for path in (*map(self.place, range(len(self))), self.folder / LOCK):
            path.unlink(missing_ok=True)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def read(self, number: int) -> tuple[Array, int]:
        """Return features and the number of texts that were cut."""
        chunk = self._stored(number)
        return chunk["x"], int(chunk["cut"])

    def make(self, given: Source, extractor: Extractor, number: int) -> int:
        """Extract a chunk and write it; returns its number."""
        before, rows = extractor.cut, self.rows(number)
        x = given.features(extractor, rows)
        if problem := features_problem(x):
            raise BadRequest(
                f"{given.place or given.name}, rows from {rows.start} on: of their features {problem}; float16 holds "
                "numbers up to 65,504: leave such rows out, or choose another body"
            )
        with atomic(self.place(number)) as part, part.open("wb") as stream:
            np.savez(stream, x=x, cut=extractor.cut - before, of=self.of)
        return number


def _made(
    given: Source, extractor: Extractor, chunks: _Chunks, workers: int, missing: Sequence[int]
) -> Generator[int, None, None]:
    """Make chunks, in this process or in several, and yield the numbers of those made."""
    if (workers := min(workers, len(missing))) <= 1:
        with process.environment(OMP_NUM_THREADS="1"):
            yield from map(partial(chunks.make, given, extractor), missing)
        return
    configs, initial = [{"body": extractor.body.name}], (replace(given), extractor.body, chunks)
    try:
        with pool.started(workers, configs, _begin, initial) as apart:
            with pool.uninterrupted():
                waiting = [apart.submit(_make, number) for number in missing]
            for future in as_completed(waiting):
                yield future.result()
    except BrokenProcessPool as e:
        raise BadRequest(
            "a process of the extraction was ended, perhaps since memory ran out: repeat the command with fewer workers"
        ) from e


_mine: list[Callable[[int], int]] = []
"""What a process of the pool makes of the number of a chunk."""


def _begin(given: Source, body: Body, chunks: _Chunks) -> None:
    pool.begin_worker()
    process.prepare(1)
    extractor = Extractor(body)
    given.fit(extractor)
    same = f"{given.digest} {body.digest}" == chunks.of
    _mine[:] = [partial(chunks.make, given, extractor) if same else partial(_refuse, given)]


def _refuse(given: Source, number: int) -> int:
    raise BadRequest(f"{given.place or given.name} has changed since the command began: repeat it")


def _make(number: int) -> int:
    return _mine[0](number)


def _write(out: Path, columns: Mapping[str, Array], shape: tuple[int, int], chunks: Iterator[Array]) -> None:
    """Write an `.npz` file whose `x` is never in memory as a whole."""
    with atomic(out, mode=0o666) as part, zipfile.ZipFile(part, "w") as archive:
        with archive.open("x.npy", "w", force_zip64=True) as stream:
            head = {"descr": "<f2", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(stream, head)
            for x in chunks:
                stream.write(x.tobytes())
        for name, column in columns.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, column, allow_pickle=False)
