"""Arrays decoded once per machine and shared by all of its processes.

A data set is a folder of ``.npy`` files below :func:`cache_root`. Every process maps the files read-only, so that the
operating system keeps one copy in memory however many clients train at a time. A folder appears under its final name in
one step (rename), hence it is either complete or absent. One that cannot be read is built again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from filelock import FileLock

from fedapp.errors import BadRequest
from fedapp.files import absolute, explained

FORMAT = 3
"""Part of every key: raised when the meaning of the stored arrays changes, so that old folders are not read."""

T = TypeVar("T")

FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG)
"""Numbers of the errors of a disk that is full, or of a quota that is used up."""
BLOCK = 1 << 20
"""Bytes that are written at a time."""


def cache_root() -> Path:
    """Return the absolute folder of the cache: ``$FEDAPP_CACHE``, else ``fedapp`` in the user's cache folder."""
    chosen = os.environ.get("FEDAPP_CACHE")
    if chosen:
        return absolute(chosen).resolve()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "fedapp"


def file_identity(path: Path) -> list[str | int]:
    """Return what tells one version of a file from another: absolute path, size in bytes, times in ns, inode.

    A program can set the time of the content (`touch -r`, `cp -p`, `rsync`, `tar -x`), and an archive may give all
    files the same one. The time at which the system itself noted a change cannot be set. A file that cannot be looked
    at, such as a link to nowhere, has the number of the error: its reader names it.
    """
    try:
        stat = path.stat()
    except OSError as error:
        return [str(path.absolute()), -1, error.errno or 0]
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


class Store:
    """The unfinished folder of a data set, which exists and is empty, to be filled by its reader."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, name: str, array: np.ndarray) -> None:
        """Write one array as ``name.npy``.

        Raises
        ------
        BadRequest : the disk is full.
        """
        with _written(self.folder.parent):
            np.save(self.folder / f"{name}.npy", np.ascontiguousarray(array), allow_pickle=False)

    def create(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return a writable array that lies in ``name.npy``, for readers that decode image by image.

        Arrays without rows cannot be mapped; they are written at once and returned from memory.

        Raises
        ------
        BadRequest : the disk is full.
        """
        if 0 in shape:
            empty = np.zeros(shape, dtype)
            self.put(name, empty)
            return empty
        path = self.folder / f"{name}.npy"
        with _written(self.folder.parent):
            array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        # The file is sparse. A write into its map would end the process (SIGBUS) where the disk is full.
        with _written(self.folder.parent), path.open("r+b") as file:
            file.seek(array.offset)
            for start in range(0, array.nbytes, BLOCK):
                file.write(bytes(min(BLOCK, array.nbytes - start)))
        return array


def _written(root: Path) -> contextlib.AbstractContextManager[None]:
    """Add the remedy if the block cannot write into the cache; NumPy's reason counts the missing bytes."""
    remedy = "free some space on its disk, or set FEDAPP_CACHE to a folder that can be written and has more"
    return explained(f"cannot write the data cache {root}", remedy)


def build_once(
    name: str, key: Mapping[str, Any], build: Callable[[Store], Mapping[str, Any]], read: Callable[[Path], T]
) -> T:
    """Return what the folder of a data set holds, building it if it is not there or cannot be read.

    Processes that ask for the same data at once wait for the first one; a build that dies leaves nothing behind that
    could be taken for a data set.

    Parameters
    ----------
    name : start of the folder's name.
    key : JSON values that identify the content: kind of source, identity of its files.
    build : fills the store and returns JSON values that are kept next to the arrays (``meta.json``).
    read : reads a folder with ``meta.json`` and the arrays; `BadRequest` if it is damaged.

    Raises
    ------
    BadRequest : if the cache folder cannot be written, its disk is full, or a folder that was just built is damaged.
    """
    text = json.dumps({"format": FORMAT, "name": name, **key}, sort_keys=True)
    label = f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    root = cache_root() / "datasets"
    final = root / label

    def kept() -> T | None:
        with contextlib.suppress(BadRequest):
            return read(final) if (final / "meta.json").is_file() else None
        return None

    if (found := kept()) is not None:
        return found
    with _written(root):
        root.mkdir(parents=True, exist_ok=True)
        (root / f".{label}.lock").touch()
    with FileLock(root / f".{label}.lock"):
        if (found := kept()) is not None:  # another process may have built it
            return found
        # Only the holder of the lock makes such folders: those that exist were left by a process that died.
        for stale in root.glob(f".{label}.tmp-*"):
            shutil.rmtree(stale, ignore_errors=True)
        with _written(root):
            folder = Path(tempfile.mkdtemp(prefix=f".{label}.tmp-", dir=root))
        try:
            meta = build(Store(folder))
            with _written(root):
                (folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
            if final.exists():
                shutil.rmtree(final)
            folder.replace(final)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return read(final)


def open_array(path: Path) -> np.ndarray:
    """Map one ``.npy`` file read-only; an array without elements is read instead.

    Raises
    ------
    BadRequest : if the file is damaged.
    """
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise BadRequest(
            f"damaged cache file {path} ({error}): delete the folder {path.parent} and try again"
        ) from error
    array.flags.writeable = False
    return array
