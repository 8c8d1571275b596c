"""Files that several processes use: written whole or not at all, private folders, and locks."""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fedapp.errors import BadRequest


@contextmanager
def atomic(path: Path, durable: bool = False, mode: int = 0o600) -> Iterator[Path]:
    """Give a new file in the same folder, which takes the name `path` when the block ends without an error.

    Parameters
    ----------
    durable : also survive a power cut. The file is on the disk before it gets its name, and the name before the block
        is left, so that older files may be removed then.
    mode : permissions, less those that the umask takes away.

    Raises
    ------
    OSError : the file cannot be written; what was there before stays.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        yield part
        if durable:
            synced(part)
        part.replace(path)
        if durable:
            synced(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def synced(path: Path) -> None:
    """Wait until a file or the entries of a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def private_folder(folder: Path, durable: bool = False) -> None:
    """Make a folder, and those above it that are missing, for this user alone (mode 0700).

    Parameters
    ----------
    durable : wait until the new entries are on the disk.
    """
    missing = [f for f in (folder, *folder.parents) if not f.exists()]
    for new in reversed(missing):
        new.mkdir(mode=0o700, exist_ok=True)
        if durable:
            synced(new.parent)
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)


def absolute(path: str | Path) -> Path:
    """Return an absolute path, `~` resolved.

    Raises
    ------
    BadRequest : no such home folder, the current folder is gone, or the path is not UTF-8.
    """
    try:
        found = Path(path).expanduser().absolute()
        str(found).encode()
    except UnicodeEncodeError as e:
        raise BadRequest(f"{path}: this path is not UTF-8: give another, or rename it") from e
    except (RuntimeError, OSError) as e:
        raise BadRequest(f"{path}: {e}: give an absolute path") from e
    return found


def check_folder(folder: Path) -> None:
    """Make a folder if it does not exist, and check that a file can be made in it.

    Raises
    ------
    OSError : it cannot.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder)
    os.close(handle)
    Path(name).unlink()


@contextmanager
def locked(
    path: Path, taken: str = "", patience: float = 0.0, waiting: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Hold a lock file, which the system releases at the end of the process.

    Parameters
    ----------
    taken : message if another process keeps it.   patience : seconds to wait for that process; -1 = without end.
    waiting : called before the wait.

    Raises
    ------
    BadRequest : another process keeps it, or the file cannot be made.
    """
    lock = FileLock(path, mode=0o600)  # a user who can read it could hold it
    with writing_to(path.parent):
        if not path.parent.is_dir():  # the library would make it
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            waiting()
            try:
                lock.acquire(timeout=patience)
            except Timeout:
                raise BadRequest(taken) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def explained(what: str, remedy: str) -> Iterator[None]:
    """Turn an OSError of the block into a BadRequest: what failed, the system's reason, and the remedy."""
    try:
        yield
    except OSError as e:
        raise BadRequest(f"{what} ({e.strerror or e}): {remedy}") from e


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turn an OSError of the block into a BadRequest: the folder cannot be written to."""
    try:
        yield
    except OSError as e:
        remedy = "make it first" if isinstance(e, FileNotFoundError) else "give a folder that you may write to"
        raise BadRequest(f"{folder} cannot be written ({e.strerror or e}); {remedy}") from e
