"""`fedapp features`: extraction by as many processes as there are cores; see :mod:`fedapp.bodies.extraction`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fedapp import config as configuration
from fedapp import process
from fedapp.bodies import extraction, known
from fedapp.bodies.extraction import Chunks, Extracted, Source
from fedapp.bodies.extractor import Extractor
from fedapp.bodies.known import Body
from fedapp.data import datasets
from fedapp.data.names import is_there
from fedapp.engines import local, pool
from fedapp.engines.resources import usable_cores
from fedapp.errors import BadRequest
from fedapp.files import absolute

KEYS = ("data-dir", "columns", "layout", "skip-bad")
"""Run-config keys that say how a data set is read."""


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
    settings, place = configuration.validated(values).data, absolute(data)
    if not text and (data in datasets.DATASET_NAMES or data in datasets.installed()):
        return Source(data, settings.data_dir, settings)
    if not text and not is_there(place):
        datasets.check_name(data)
    return extraction.of_files(place, text, settings)


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
    found = known.chosen(str(body), weights, size, **described)
    return extract(source(str(data), text, values), found, Path(out), workers, progress)


def extract(
    given: Source, body: Body, out: Path, workers: int | None, progress: Callable[[int, int], None]
) -> Extracted:
    """Extract the features of a source; see :func:`features`."""
    return extraction.extract(given, body, out, partial(_made, workers or usable_cores()), progress)


def _made(
    workers: int, given: Source, extractor: Extractor, chunks: Chunks, missing: Sequence[int]
) -> Generator[int, None, None]:
    """Make chunks, in this process or in several, and yield the numbers of those made."""
    if (workers := min(workers, len(missing))) <= 1:
        yield from extraction.in_turn(given, extractor, chunks, missing)
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


def _begin(given: Source, body: Body, chunks: Chunks) -> None:
    pool.begin_worker()
    process.prepare(1)
    try:
        extractor = Extractor(body)
        given.fit(extractor)
        if f"{given.digest} {body.digest}" != chunks.of:
            raise BadRequest(f"{given.place or given.name} has changed since the command began: repeat it")
        _mine[:] = [partial(chunks.make, given, extractor)]
    except BadRequest as e:  # raised here it would end the pool without its text
        _mine[:] = [partial(_refuse, e)]


def _refuse(error: BadRequest, number: int) -> int:
    raise error


def _make(number: int) -> int:
    return _mine[0](number)
