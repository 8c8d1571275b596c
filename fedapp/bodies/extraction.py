"""A pretrained body turns all samples of a data set, or a column of texts, into features, once.

Rows are extracted in chunks. Each chunk is a file in a folder next to the result and names the digest of rows and body.
So an interrupted extraction goes on where it was, to a file with the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import time
import zipfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fedapp import __version__, process
from fedapp.bodies.extractor import Extractor
from fedapp.bodies.known import Body
from fedapp.data import datasets, pictures, tables
from fedapp.data.cache import cache_root, file_identity
from fedapp.data.columns import BODY, PARTS, PLAIN, Array, features_problem, own
from fedapp.data.dataset import Dataset
from fedapp.data.pictures import Listing
from fedapp.errors import BadRequest
from fedapp.files import absolute, atomic, explained, locked, private_folder
from fedapp.settings import DataSettings

CHUNK = 256
"""Rows of a chunk."""
LOCK = "lock"
"""File in the folder of the chunks that one process holds."""
FORMS = (".csv", ".json", ".jsonl", ".parquet")
"""Files that a column of texts may be in."""


@dataclass(frozen=True)
class Source:
    """Where samples come from: a data set and its folder, perhaps of a `node`, or a file with the column `text`."""

    name: str
    place: str
    settings: DataSettings
    text: str = ""
    node: bool = False

    @cached_property
    def found(self) -> Dataset | list[str]:
        """The samples; those of a data set stay on the disk."""
        return self._read[0]

    @cached_property
    def columns(self) -> dict[str, Array]:
        """All columns of own data but `x`."""
        return self._read[1]

    @cached_property
    def pictures(self) -> list[Path]:
        """The files of a folder of pictures in the order of the rows; empty for all other samples."""
        return self._read[2]

    @cached_property
    def _read(self) -> tuple[Dataset | list[str], dict[str, Array], list[Path]]:
        if self.text:
            texts, columns = tables.texts(Path(self.place), self.text, self.settings)
            own(self.place, {**columns, "x": np.ones((len(texts), 1), np.float32)})  # refuses wrong columns now
            return texts, columns, []
        listing = self._listing()
        data = datasets.load(self.name, self.place or None, self.settings, self.node)
        if self._listing() != listing:  # its labels would be those of other files
            raise BadRequest(f"files in {self.place} came or went while they were read: repeat it when none do")
        if data.about:
            raise BadRequest(f"{self.place} holds features of the body {data.about[BODY][:8]}: give raw samples")
        good = [p for p in listing.pictures if str(p.path.relative_to(listing.root)) not in data.skipped]
        return data, _columns(data), [p.path for part in PARTS for p in good if p.part == part]

    def _listing(self) -> Listing:
        if self.name != "folder":
            return Listing(Path(self.place), (), {})
        return pictures.listed(Path(self.place), self.settings.layout)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the samples and of their columns."""
        rows: Any = self.found if isinstance(self.found, list) else dict(self.found.identity)
        columns = {name: column.tolist() for name, column in self.columns.items()}
        files = list(map(file_identity, self.pictures))
        return hashlib.sha256(json.dumps([rows, columns, files], sort_keys=True).encode()).hexdigest()

    @property
    def version(self) -> Any:
        """What tells one version of the files from another, without reading them, and how they are read."""
        if self.text:
            return [self.text, self.settings.columns, file_identity(Path(self.place))]
        return datasets.version(self.name, self.place, self.settings)

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
            x = self._picture(single[0], data.shape[0]) if self.pictures else data.take(single)[0]
            if data.kind == "image":  # levels 0 .. 16 of the digits too
                x = x.transpose(0, 3, 1, 2) if data.scale == 255 else x.transpose(0, 3, 1, 2) * (255 / data.scale)
            parts.append(extractor.rows(x))
        with np.errstate(over="ignore"):
            return np.concatenate(parts).astype(np.float16)

    def _picture(self, row: int, channels: int) -> Array:
        with pictures.named(self.pictures[row]):
            return pictures.whole(self.pictures[row], channels)[None]


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


def of_files(place: Path, text: str, settings: DataSettings, node: bool = False) -> Source:
    """Return the source of a file or folder of own data, perhaps a node's.

    Raises
    ------
    BadRequest : `text` names a column, and the file has none.
    """
    if text and (place.suffix.lower() not in FORMS or not place.is_file()):
        raise BadRequest(f"{place} cannot have a column of texts: give a file that ends with one of {', '.join(FORMS)}")
    # A run's other settings, such as the size of pictures, say nothing of raw samples.
    reading = PLAIN.replaced(columns=settings.columns, layout=settings.layout, skip_bad=settings.skip_bad)
    return Source("" if text else datasets.source(place), str(place), reading, text, node)


@dataclass(frozen=True)
class Extracted:
    """A file of features: its place, its rows, its `about`, the seconds and the chunks that were there before."""

    out: Path
    rows: int
    about: Mapping[str, Any]
    seconds: float
    found: int


def extract(given: Source, body: Body, out: Path, made: Make, progress: Callable[[int, int], None]) -> Extracted:
    """Extract the features of a source into a file.

    Parameters
    ----------
    out : the file, `.npz`.   made : makes the chunks of given numbers.   progress : called with rows done and in all.

    Raises
    ------
    BadRequest : `out` is there; source and body do not fit, before anything is computed; a file cannot be written; or
        features of a row are not finite or all zero.
    """
    out = absolute(out)
    if out.suffix != ".npz" or out.exists():
        raise BadRequest(f"{out} exists already: choose another" if out.exists() else f"{out}: give a name with .npz")
    began = time.perf_counter()
    extractor = Extractor(body)
    given, extractor.body = _sized(given, extractor.body)
    given.fit(extractor)
    body, rows, skipped = extractor.body, len(given), getattr(given.found, "skipped", ())
    chunks = Chunks(out.with_name(f"{out.name}.parts"), f"{given.digest} {body.digest}", rows)
    written = partial(explained, f"cannot write {out} and its chunks", "repeat the command when it can be")
    with written():
        chunks.folder.mkdir(exist_ok=True)
    with locked(chunks.folder / LOCK, f"another process extracts {out}: wait until it has ended, or end it"):
        missing = chunks.missing()
        there, done = len(chunks) - len(missing), rows - sum(len(chunks.rows(n)) for n in missing)
        progress(done, rows)
        with written(), closing(made(given, extractor, chunks, missing)) as numbers:
            for number in numbers:
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


def cached(given: Source, body: Body) -> Path:
    """Return the file of features of own data in the cache of this machine; the first call extracts them.

    Another process that extracts them is waited for, and the chunks of an interrupted one are used. Like the samples,
    the file is for this user alone. One that is damaged is made again.

    Raises
    ------
    BadRequest : source and body do not fit, or the cache cannot be written.
    """
    unfit = replace(body, pooling="", width=0)  # the same before and after the body first runs
    text = json.dumps([given.name, given.version, unfit.digest], sort_keys=True)
    out = cache_root() / "features" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.npz"
    if not _undamaged(out):
        with explained(f"cannot write {out.parent}", "set FEDAPP_CACHE to another folder"):
            private_folder(out.parent)
        with locked(out.with_suffix(".lock"), patience=-1):
            if not _undamaged(out):
                out.unlink(missing_ok=True)
                print(f"fedapp: the body '{body.name}' extracts features of {len(given)} rows, once", flush=True)
                extract(given, body, out, in_turn, lambda done, rows: None)
    return out


def _undamaged(path: Path) -> bool:
    """Return whether a `.npz` file is there with the bytes that were written, by its check sums."""
    with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        return archive.testzip() is None
    return False


def _sized(given: Source, body: Body) -> tuple[Source, Body]:
    """Let PIL crop and resize pictures of `hf` to the size of the body, whose digest then says so."""
    if not body.size or given.name != "hf":
        return given, body
    sized = replace(given, settings=given.settings.replaced(image_size=body.size))
    return sized, replace(body, resize="cropped, bilinear of PIL")


@dataclass(frozen=True)
class Chunks:
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
        with atomic(self.place(number), durable=True) as part, part.open("wb") as stream:
            np.savez(stream, x=x, cut=extractor.cut - before, of=self.of)
        return number


Make: TypeAlias = Callable[[Source, Extractor, Chunks, Sequence[int]], Generator[int, None, None]]
"""Makes chunks and yields the numbers of those made."""


def in_turn(given: Source, extractor: Extractor, chunks: Chunks, missing: Sequence[int]) -> Generator[int, None, None]:
    """Make chunks in this process, and yield the numbers of those made."""
    with process.environment(OMP_NUM_THREADS="1"):
        yield from map(partial(chunks.make, given, extractor), missing)


def _write(out: Path, columns: Mapping[str, Array], shape: tuple[int, int], chunks: Iterator[Array]) -> None:
    """Write an `.npz` file whose `x` is never in memory as a whole."""
    with atomic(out, durable=True, mode=0o666) as part, zipfile.ZipFile(part, "w") as archive:
        with archive.open("x.npy", "w", force_zip64=True) as stream:
            head = {"descr": "<f2", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(stream, head)
            for x in chunks:
                stream.write(x.tobytes())
        for name, column in columns.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, column, allow_pickle=False)
