"""Client state on disk: versioned, atomic; the last two rounds are kept, and that of a round that may be chosen.

Layout: ``STATE-DIR/<federation>/<client-id>/<run>.<round>.safetensors``. The header of each file names the method, the
schema version and the run; a mismatch is an error, never a silent fresh start.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fedapp.method import Arrays

SCHEMA = 1
_FILE = re.compile(r"^(?P<run>[0-9a-f]+)\.(?P<round>\d{6})\.safetensors$")
_NOTES = "head-norms"


class StateError(RuntimeError):
    """A stored client state cannot be used; the message names the file and the remedy."""


@dataclass(frozen=True)
class Stored:
    """One stored state: the round after which it was written (0 for that of an earlier run), and its arrays by name."""

    round: int
    path: Path
    arrays: Arrays


def write_safetensors(path: Path, arrays: Arrays, header: dict[str, object]) -> None:
    """Write arrays atomically (temporary file in the same folder, then rename) with a JSON header.

    Raises
    ------
    OSError : the file cannot be written; what was there before stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    os.close(handle)
    try:
        save_file(arrays, name, metadata={"fedapp": json.dumps(header)})
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_safetensors(path: Path, prefix: str = "") -> tuple[Arrays, dict[str, object]]:
    """Read what `write_safetensors` wrote: arrays, as far as their names begin with `prefix`, and header.

    Raises
    ------
    StateError : the file is absent, damaged or not written by this program.
    """
    try:
        with safe_open(str(path), framework="numpy") as f:
            header = json.loads((f.metadata() or {})["fedapp"])
            return {n: f.get_tensor(n) for n in f.keys() if n.startswith(prefix)}, header  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, ValueError) as e:
        raise StateError(f"{path} cannot be read ({e}); delete it to start this client afresh") from e


def read_head_norms(folder: Path, run: str) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Read what `ClientStore.note_head_norms` wrote: rounds (T,) increasing and norms (T, C); T = 0 without a file."""
    path = folder / f"{run}.{_NOTES}"
    if not path.is_file():
        return np.zeros(0, np.int64), np.zeros((0, 0), np.float32)
    arrays, _ = read_safetensors(path)
    return arrays["rounds"], arrays["norms"]


class ClientStore:
    """The stored states of one client.

    Parameters
    ----------
    folder : `STATE-DIR/<federation>/<client-id>`.
    method : id of the method; a state that another one wrote is refused.
    run : token of the run (hexadecimal). States of other runs are read only with `warm_start`.
    warm_start : start from the newest state of an earlier run while this run has none.
    keep : also keep the state that this client had after round `keep`, which may be the round that is scored at the
        end; 0 = none.
    """

    def __init__(self, folder: Path, method: str, run: str, warm_start: bool = False, keep: int = 0) -> None:
        self.folder = folder
        self.method = method
        self.run = run
        self.warm_start = warm_start
        self.keep = keep

    def _files(self) -> list[tuple[str, int, Path]]:
        """Return (run, round, file) of all states here, by round."""
        if not self.folder.is_dir():
            return []
        found = []
        for path in self.folder.iterdir():
            if m := _FILE.match(path.name):
                found.append((m["run"], int(m["round"]), path))
        return sorted(found, key=lambda f: f[1])

    def load(self, before: int, prefix: str = "") -> Stored | None:
        """Return the newest state written before round `before`, or None if the client is new.

        States of this run from round `before` on belong to rounds that are repeated, so they are ignored.

        Parameters
        ----------
        prefix : read only the arrays whose names begin with it.

        Raises
        ------
        StateError : the state is damaged, or another method or another version wrote it.
        """
        files = self._files()
        own = [f for f in files if f[0] == self.run]
        usable = [f for f in own if f[1] < before]
        if usable:
            return self._read(usable[-1], prefix)
        others = [f for f in files if f[0] != self.run]
        if self.warm_start and others:
            newest = max(others, key=lambda f: f[2].stat().st_mtime_ns)
            stored = self._read(newest, prefix)
            return Stored(0, stored.path, stored.arrays)
        return None

    def _read(self, file: tuple[str, int, Path], prefix: str) -> Stored:
        arrays, header = read_safetensors(file[2], prefix)
        if header.get("schema") != SCHEMA:
            raise StateError(
                f"{file[2]} has schema {header.get('schema')}, this version reads {SCHEMA}; start a new run"
            )
        if header.get("method") != self.method:
            raise StateError(
                f"{file[2]} was written by the method '{header.get('method')}', not '{self.method}'; "
                "use another state-dir or federation"
            )
        return Stored(file[1], file[2], arrays)

    def save(self, server_round: int, arrays: Arrays) -> Path:
        """Write the state after `server_round`; keep this run's two newest rounds and delete rounds that are repeated.

        The newest state that is not newer than round `keep` stays too.

        Other runs may be in progress in the same folder, so their states stay. A warm start has taken over the earlier
        run's state: it is deleted once this run has two of its own, when no resumed run can need it any more.
        """
        path = self.folder / f"{self.run}.{server_round:06d}.safetensors"
        write_safetensors(
            path, arrays, {"schema": SCHEMA, "method": self.method, "run": self.run, "round": server_round}
        )
        files = self._files()
        own = [f for f in files if f[0] == self.run and f[1] <= server_round]
        keep = [*own[-2:], *[f for f in own if f[1] <= self.keep][-1:]]
        for file in files:
            if file not in keep and (file[0] == self.run or (self.warm_start and len(own) >= 2)):
                file[2].unlink(missing_ok=True)
        return path

    def note_head_norms(self, server_round: int, norms: NDArray[np.floating]) -> None:
        """Note the L2 norms of the head's rows, (C,), after the training of a round, for figures of how heads evolve.

        They reveal much about the client's class counts, so they are kept beside its state and never sent. Rounds from
        `server_round` on, which a resumed run repeats, are dropped. Notes of other runs stay as long as their states.
        """
        rounds, rows = read_head_norms(self.folder, self.run)
        before = rounds < server_round
        row = np.asarray(norms, dtype=np.float32)[None]
        arrays: Arrays = {
            "rounds": np.append(rounds[before], np.int64(server_round)),
            "norms": np.concatenate([rows[before], row]) if before.any() else row,
        }
        write_safetensors(self.folder / f"{self.run}.{_NOTES}", arrays, {"schema": SCHEMA, "run": self.run})
        runs = {run for run, _, _ in self._files()} | {self.run}
        for old in self.folder.glob(f"*.{_NOTES}"):
            if old.name.split(".")[0] not in runs:
                old.unlink(missing_ok=True)
