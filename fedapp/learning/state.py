"""Client state on disk, and the one way in which arrays are written to files.

Layout: ``STATE-DIR/<federation>/<client-id>/<run>.<round>.safetensors``. The last rounds are kept, and that of a round
that may be chosen. The header of each file names the schema version, the method, the run, the federation, the client
and the round; a mismatch is an error, never a silent fresh start. Every file has a SHA-256 digest of its arrays.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fedapp.files import atomic, private_folder
from fedapp.method import Array, Arrays

SCHEMA = 2
KEPT = 3
"""Rounds that are kept, of a client's state and of the server's: a resumed run can go back over two damaged ones."""
_FILE = re.compile(r"^(?P<run>[0-9a-f]+)\.(?P<round>\d{6})\.safetensors$")
MOST_ROUNDS = 1_000_000
"""A file's name has six digits for the round: one of a later round would never be removed."""
_TOKEN = re.compile(r"\A[0-9a-f]{1,64}\Z")
_NOTES = "head-norms"
LARGE = 1 << 22
"""Bytes of a file from which on it matters that the kernel keeps a copy in memory."""
_recent: deque[Path] = deque(maxlen=4)
"""The last files of this process that no one reads soon."""
_PART = re.compile(r"^\.(tmp\w{6}|.*\.part)$")
"""Temporary files: of safetensors itself, which writes to another name too, and of `files.atomic`."""
AFRESH = "delete it to start this client afresh"
BEGIN_ANEW = "put the right state folder back, or let it start again with --set lost-state=restart"


class StateError(RuntimeError):
    """A stored state cannot be used; the message names the file and the remedy."""


class DamagedError(StateError):
    """A file of a state cannot be read."""


@dataclass(frozen=True)
class Stored:
    """One stored state: the round after which it was written (0 for that of an earlier run), and its arrays by name.

    Attributes
    ----------
    digest : SHA-256 of all arrays of the file, the first 32 hexadecimal digits.
    expected : the digest that the server expected when the state was written: that of the last one it knew of.
    counted : whether the server accepted the reply sent with this state. It did not for a state of an earlier run, and
        did where nothing is known of a server.
    """

    round: int
    path: Path
    arrays: Arrays
    digest: str = ""
    expected: str = ""
    counted: bool = True


@dataclass(frozen=True)
class Expected:
    """The server's record of a client's state, from the client's last reply that counted.

    Attributes
    ----------
    digest : of that state; empty = none.
    binding : whether the next training starts from it. It does not where the server sends the whole model and the
        client keeps no array of its own.
    restart : start again where the state is lost, instead of an error.
    told : whether there is a server that knows which states counted.
    """

    digest: str = ""
    binding: bool = True
    restart: bool = False
    told: bool = True


UNTOLD = Expected(told=False)


def is_token(run: str) -> bool:
    """Return whether a text can be the token of a run."""
    return bool(_TOKEN.match(run))


def let_go(path: Path) -> None:
    """Let the kernel reuse the memory in which it keeps a file that no one reads soon.

    It would keep the states of all clients, and take new memory for each. A call begins to write the file to the disk.
    The calls for the next files then free what has arrived there, so that no one waits for the disk. The first megabyte
    stays: it has the header.
    """
    _recent.append(path)
    if sys.platform != "linux":
        return
    for file in _recent:
        with suppress(OSError):
            handle = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(handle, 1 << 20, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


def remove_parts(folder: Path) -> None:
    """Remove what a writer that was killed has left of a file; only for a folder with one writer, after its writing."""
    for path in folder.iterdir():
        if _PART.match(path.name):
            path.unlink(missing_ok=True)


def _sha(array: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


def _digest(contents: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def write_safetensors(path: Path, arrays: Arrays, header: Mapping[str, object], durable: bool = False) -> str:
    """Write arrays atomically with a JSON header, for this user alone (mode 0600); return their digest.

    Parameters
    ----------
    durable : also survive a power cut.

    Raises
    ------
    OSError : the file cannot be written; what was there before stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    contents = {n: [arrays[n].dtype.str, list(arrays[n].shape), _sha(arrays[n])] for n in sorted(arrays)}
    with atomic(path, durable) as part:
        save_file(arrays, str(part), metadata={"fedapp": json.dumps({**header, "contents": contents})})
    return _digest(contents)


def read_checked(
    path: Path, prefix: str = "", remedy: str = AFRESH, without: Collection[str] = ()
) -> tuple[Arrays, dict[str, Any], str]:
    """Read what `write_safetensors` wrote: arrays, as far as their names begin with `prefix`, header and digest.

    The bytes of all arrays that are read are compared with the header.

    Parameters
    ----------
    without : names of arrays that are not read.

    Raises
    ------
    StateError : the file is absent, damaged or not written by this program; `remedy` ends its message.
    """
    try:
        with safe_open(str(path), framework="numpy") as f:
            header = json.loads((f.metadata() or {})["fedapp"])
            names = list(f.keys())
            arrays = {n: f.get_tensor(n) for n in names if n.startswith(prefix) and n not in without}
        if not isinstance(header, dict):
            raise ValueError("its header is not a JSON object")
        if "contents" not in header:
            raise ValueError("it has no digest: fedapp 0.1 wrote it, and reads it")
        contents = header.pop("contents")
        if sorted(names) != sorted(contents):
            raise ValueError("its arrays are not those that its header lists")
        for name, array in arrays.items():
            dtype, shape, sha = contents[name]
            for what, found, wanted in (
                ("dtype", array.dtype.str, dtype),
                ("shape", list(array.shape), shape),
                ("SHA-256", _sha(array), sha),
            ):
                if found != wanted:
                    raise ValueError(f"{what} of '{name}' is {found}, its header says {wanted}")
        return arrays, header, _digest(contents)
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RecursionError) as e:
        raise DamagedError(f"{path} cannot be read ({e}); {remedy}") from e


def read_safetensors(path: Path, prefix: str = "") -> tuple[Arrays, dict[str, object]]:
    """Read what `write_safetensors` wrote: arrays, as far as their names begin with `prefix`, and header.

    Raises
    ------
    StateError : the file is absent, damaged or not written by this program.
    """
    return read_checked(path, prefix)[:2]


def check_header(path: Path, header: Mapping[str, Any], wanted: Mapping[str, Any], remedy: str) -> None:
    """Compare the header of a file with the expected one.

    Raises
    ------
    StateError : names the file, the field, both values and the remedy.
    """
    if header.get("schema") != SCHEMA:
        raise StateError(f"{path} has schema {header.get('schema')}, this version reads {SCHEMA}; start a new run")
    for name, value in wanted.items():
        if header.get(name) != value:
            raise StateError(f"{path}: {name} is '{header.get(name)}', expected '{value}'; {remedy}")


def read_head_norms(folder: Path, run: str) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Read what `ClientStore.note_head_norms` wrote: rounds (T,) increasing, norms (T, C); T = 0 if it is not there."""
    with suppress(StateError):
        arrays, _ = read_safetensors(folder / f"{run}.{_NOTES}")
        return arrays["rounds"], arrays["norms"]
    return np.zeros(0, np.int64), np.zeros((0, 0), np.float32)


def _saved(path: Path) -> int:
    """Return when a state was written, in ns since 1970: by its header, for a copy of a file has a time of its own.

    A damaged one does not say it: then it is the time of the file.
    """
    try:
        with safe_open(str(path), framework="numpy") as f:
            return int(json.loads((f.metadata() or {})["fedapp"])["saved"])
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RecursionError):
        return path.stat().st_mtime_ns


@dataclass(eq=False)
class ClientStore:
    """The stored states of one client.

    Attributes
    ----------
    folder : `STATE-DIR/<federation>/<client-id>`.
    method : id of the method; a state that another one wrote is refused.
    run : token of the run (hexadecimal). States of other runs are read only with `warm_start`.
    warm_start : start from the newest state of an earlier run while this run has none.
    keep : also keep the state that this client had after round `keep`, which may be the round that is scored at the
        end; 0 = none.
    durable : states survive a power cut (see `write_safetensors`). In a simulation this would cost more than the
        training of small models.
    expected : the server's record of this client's state.
    dp : the run's key. With `sgd` only states of such trainings are read: what others left was made of exact gradients.
    about : what a state means nothing without, such as the names of the classes, by name; a state with another is
        refused.
    lost : why the client starts again although the server has a record of a state; empty = it does not.
    ignored : which file could not be read where nothing of it is needed; empty = none.
    back : states from this round on were made of a model that one client had spoiled, and count no more; 0 = all count.
    written : digest of the state that was saved last, the first 32 hexadecimal digits.
    """

    folder: Path
    method: str
    run: str
    warm_start: bool = False
    keep: int = 0
    durable: bool = False
    expected: Expected = UNTOLD
    dp: str = "none"
    about: Mapping[str, str] = field(default_factory=dict)
    lost: str = field(default="", init=False)
    ignored: str = field(default="", init=False)
    back: int = field(default=0, init=False)
    written: str = field(default="", init=False)

    def __post_init__(self) -> None:
        """Refuse a token that could name a file elsewhere."""
        if not is_token(self.run):
            raise StateError(f"the run's token '{self.run[:80]}' is invalid: hexadecimal digits are needed")

    def _files(self) -> list[tuple[str, int, Path]]:
        """Return (run, round, file) of all states here, by round."""
        if not self.folder.is_dir():
            return []
        found = []
        for path in self.folder.iterdir():
            if m := _FILE.match(path.name):
                found.append((m["run"], int(m["round"]), path))
        return sorted(found, key=lambda f: f[1])

    def load(self, before: int, prefix: str = "", needed: bool = True, without: Collection[str] = ()) -> Stored | None:
        """Return the newest state written before round `before`, or None if the client is new.

        It must be the one in the server's records, or one that this client made of it while its replies did not arrive.

        States of this run from round `before` on belong to rounds that are repeated, so they are ignored.

        Parameters
        ----------
        prefix : read only the arrays whose names begin with it.   without : names of those that are not read either.
        needed : whether the state must be the expected one even where `expected` is not binding. If not, a file that
            cannot be read counts as absent, and `ignored` says which.

        Raises
        ------
        StateError : the state is damaged, lost, older than the expected one or another client's, or another method or
            version wrote it.
        """
        try:
            stored = self._newest(before, prefix, without)
            known = self.expected.digest
            if known and (needed or self.expected.binding):
                if stored is None:
                    raise StateError(
                        f"{self.folder} holds no state of this run, and the server has a record of one from "
                        f"which this client continues (digest {known}); {BEGIN_ANEW}"
                    )
                if known not in (stored.digest, stored.expected):
                    raise StateError(
                        f"{stored.path}: digest is '{stored.digest}', expected '{known}': the file is older than this "
                        f"client's last reply, or another's; {BEGIN_ANEW}"
                    )
        except StateError as e:
            if isinstance(e, DamagedError) and self.expected.digest and not (needed or self.expected.binding):
                self.ignored = str(e)
                return None
            if not (self.expected.restart and self.expected.digest):
                raise
            self.lost = str(e)
            return None
        return stored

    def _newest(self, before: int, prefix: str, without: Collection[str]) -> Stored | None:
        files = self._files()
        own = [f for f in files if f[0] == self.run]
        usable = [f for f in own if f[1] < (min(before, self.back) if self.back else before)]
        if usable:
            return self._read(usable[-1], prefix, without)
        others = [f for f in files if f[0] != self.run]
        if self.warm_start and others:
            last = {f[0]: f for f in others}  # by run, the last of its rounds
            stored = self._read(max(last.values(), key=lambda f: _saved(f[2])), prefix, without)
            return Stored(0, stored.path, stored.arrays, counted=False)
        return None

    def _read(self, file: tuple[str, int, Path], prefix: str, without: Collection[str]) -> Stored:
        run, server_round, path = file
        arrays, header, digest = read_checked(path, prefix, without=without)
        check_header(path, header, {"method": self.method}, "use another state-dir or federation")
        place = {"federation": self.folder.parent.name, "client": self.folder.name}
        remedy = "it belongs elsewhere: put this client's own file back, or delete this one"
        check_header(path, header, {**place, "run": run, "round": server_round}, remedy)
        if self.dp == "sgd" and header.get("dp") != "sgd":
            raise StateError(f"{path} was not made by training with dp = 'sgd', and this run's are: start a new run")
        noted = header["about"] if isinstance(header.get("about"), dict) else {}
        if other := [name for name, value in self.about.items() if noted.get(name, value) != value]:
            raise StateError(
                f"{path} was made with other {' and '.join(other)} than there are now: put the former back, or start a "
                "new run, without warm-start"
            )
        counted = not self.expected.told or digest[:32] == self.expected.digest
        return Stored(server_round, path, arrays, digest[:32], str(header.get("expected", "")), counted)

    def save(self, server_round: int, arrays: Arrays, unread: Collection[str] = ()) -> Path:
        """Write the state after `server_round`; keep this run's newest rounds and delete rounds that are repeated.

        The newest state that is not newer than round `keep` stays too.

        Other runs may be in progress in the same folder, so their states stay.

        Parameters
        ----------
        unread : names of arrays that the next round does not read.
        """
        private_folder(self.folder, self.durable)
        path = self.folder / f"{self.run}.{server_round:06d}.safetensors"
        header = {
            "schema": SCHEMA,
            "method": self.method,
            "run": self.run,
            "federation": self.folder.parent.name,
            "client": self.folder.name,
            "round": server_round,
            "saved": time.time_ns(),
            "expected": self.expected.digest,
            **({"about": self.about} if self.about else {}),
            **({} if self.dp == "none" else {"dp": self.dp}),
        }
        self.written = write_safetensors(path, arrays, header, self.durable)[:32]
        if sum(a.nbytes for name, a in arrays.items() if name in unread) > max(LARGE, path.stat().st_size / 2):
            let_go(path)
        files = self._files()
        own = [f for f in files if f[0] == self.run and f[1] <= server_round]
        keep = [*own[-KEPT:], *[f for f in own if f[1] <= self.keep][-1:]]
        for file in files:
            if file not in keep and file[0] == self.run:
                file[2].unlink(missing_ok=True)
        if self.durable:  # on a real node, where one run at a time writes here
            remove_parts(self.folder)
        return path

    def note_head_norms(self, server_round: int, norms: NDArray[np.floating]) -> None:
        """Note the L2 norms of the head's rows, (C,), after the training of a round, for figures of how heads evolve.

        They reveal much about the client's class counts, so they are kept with its state and never sent. Rounds from
        `server_round` on, which a resumed run repeats, are dropped. Notes of other runs stay as long as their states.
        """
        rounds, rows = read_head_norms(self.folder, self.run)
        before = rounds < server_round
        row = np.asarray(norms, dtype=np.float32)[None]
        arrays: Arrays = {
            "rounds": np.append(rounds[before], np.int64(server_round)),
            "norms": np.concatenate([rows[before], row]) if before.any() else row,
        }
        header = {"schema": SCHEMA, "run": self.run}
        write_safetensors(self.folder / f"{self.run}.{_NOTES}", arrays, header, self.durable)
        runs = {run for run, _, _ in self._files()} | {self.run}
        for old in self.folder.glob(f"*.{_NOTES}"):
            if old.name.split(".")[0] not in runs:
                old.unlink(missing_ok=True)
