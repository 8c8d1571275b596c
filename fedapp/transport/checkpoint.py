"""Server checkpoints: nested dicts of arrays and JSON scalars, written so that a power cut leaves the old or the new.

The last `KEPT` are kept. One that is damaged is set aside under another name, and the newest good one is used.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fedapp.errors import BadRequest
from fedapp.files import private_folder
from fedapp.learning.state import KEPT, SCHEMA, StateError, check_header, read_checked, remove_parts, write_safetensors
from fedapp.method import Arrays, ServerState

Found: TypeAlias = tuple[int, ServerState, ServerState]
"""Round, state of the method, and what else of the run a checkpoint remembers, a tree of the same form."""
_REMEMBERED = "\x1fremembered\x1f"
"""Beginning of the names of arrays that are not the method's."""
DAMAGED = ".damaged"
"""Ending of a checkpoint that could not be read and was set aside."""
_FILE = re.compile(r"^round-(\d{6})\.safetensors$")


def flatten(state: ServerState) -> tuple[Arrays, dict[str, Any]]:
    """Split a state into arrays by path and JSON scalars by path (paths joined by a unit separator).

    Raises
    ------
    TypeError : a value is not an array, scalar, list of scalars, None or dict.
    """
    arrays: Arrays = {}
    scalars: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            if not value:
                scalars[prefix + "\x1f{}"] = True
            for key, inner in value.items():
                kind = "i:" if isinstance(key, int) else "s:"
                walk(f"{prefix}\x1f{kind}{key}" if prefix else f"{kind}{key}", inner)
        elif isinstance(value, np.ndarray):
            arrays[prefix] = np.asarray(value, order="C")
        elif isinstance(value, np.generic):
            scalars[prefix] = value.item()
        elif value is None or isinstance(value, (bool, int, float, str, list)):
            scalars[prefix] = value
        else:
            raise TypeError(
                f"a strategy's state may hold arrays and plain values, not {type(value).__name__}: {prefix}"
            )

    for key, inner in state.items():
        walk(f"s:{key}", inner)
    return arrays, scalars


def unflatten(arrays: Arrays, scalars: dict[str, Any]) -> ServerState:
    """Rebuild a state: the inverse of `flatten`."""
    state: ServerState = {}
    for path, value in [*arrays.items(), *scalars.items()]:
        parts = path.split("\x1f")
        empty = parts[-1] == "{}"
        keys: list[Any] = [int(p[2:]) if p.startswith("i:") else p[2:] for p in (parts[:-1] if empty else parts)]
        node: dict[Any, Any] = state
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = {} if empty else value
    return state


def save(
    folder: Path,
    server_round: int,
    state: ServerState,
    remembered: ServerState,
    identity: Mapping[str, str] | None = None,
    records: Collection[str] = (),
) -> Path:
    """Write the state after `server_round`; keep the last `KEPT` checkpoints, and that of round 0.

    The new one is on the disk before an older one is removed.

    Parameters
    ----------
    remembered : what else the run must remember.
    identity : of the run (method, run token, federation); readers compare it.
    records : entries of the state that note numbers which may be NaN.

    Returns
    -------
    The file `round-NNNNNN.safetensors`.

    Raises
    ------
    StateError : an array contains NaN or infinity; the earlier checkpoints stay.
    TypeError : the state holds something that cannot be stored (see `flatten`).   OSError : `folder` is not writable.
    """
    broken = not_finite({name: value for name, value in state.items() if name not in records})
    if broken:
        raise StateError(
            f"the server's state after round {server_round} contains NaN or infinity in '{broken}', so it is not "
            "written: start a new run with a lower lr or with clip"
        )
    arrays, scalars = flatten(state)
    more, values = flatten(remembered)
    private_folder(folder, durable=True)
    path = path_of(folder, server_round)
    if not arrays:
        arrays = {"_": np.zeros(0, np.float32)}
    header = {"schema": SCHEMA, **(identity or {}), "round": server_round}
    header |= {"scalars": scalars, "remembered": values, "order": list(arrays)}
    # safetensors sorts names. The header keeps the state's own order, since the last bits of sums depend on it.
    further = {_REMEMBERED + name: array for name, array in more.items()}
    write_safetensors(path, {**arrays, **further}, header, durable=True)
    for old in _files(folder)[KEPT:]:
        if _number(old):
            old.unlink(missing_ok=True)
    remove_parts(folder)
    return path


def not_finite(state: ServerState) -> str | None:
    """Return the name of the first array in a state that contains NaN or infinity, or None."""
    arrays, _ = flatten(state)
    for name, array in arrays.items():
        if np.issubdtype(array.dtype, np.inexact) and not np.isfinite(array).all():
            return ".".join(key[2:] for key in name.split("\x1f"))
    return None


def _files(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first."""
    return sorted((p for p in folder.iterdir() if _FILE.match(p.name)), reverse=True) if folder.is_dir() else []


def latest(folder: Path) -> Found | None:
    """Read the newest checkpoint that can be read, or None if there is none; nothing is changed.

    Raises
    ------
    StateError : there are checkpoints, and none can be read.
    """
    problem: StateError | None = None
    for path in _files(folder):
        try:
            return _read(path)
        except StateError as e:
            problem = e
    if problem is not None:
        raise problem
    return None


def recover(folder: Path, identity: Mapping[str, str] | None = None) -> tuple[Found | None, list[str]]:
    """Find the checkpoint that a resumed run goes on from. Damaged ones are renamed to `<name>.damaged`.

    Parameters
    ----------
    identity : as in `save`.

    Returns
    -------
    The newest good checkpoint, None where there never was one, and a line for each that was set aside.

    Raises
    ------
    BadRequest : there are only damaged checkpoints, or the newest one is of another run.
    """
    lost: list[str] = []
    found: Found | None = None
    for path in _files(folder):
        try:
            found = _read(path)
        except StateError as e:
            if isinstance(e.__cause__, OSError):  # not damaged: it may not be read, or its disk is away
                raise BadRequest(str(e)) from e
            aside = path.with_name(path.name + DAMAGED)
            path.replace(aside)
            lost.append(f"the checkpoint of round {_number(path)} is damaged and now called {aside.name}: {e}")
            continue
        remedy = "it is of another run: remove it, or resume the run that it belongs to"
        try:
            check_header(path, read_checked(path, "no array")[1], {**(identity or {}), "round": _number(path)}, remedy)
        except StateError as e:
            raise BadRequest(str(e)) from e
        break
    if found is None and (damaged := sorted(p.name for p in _damaged(folder))):
        raise BadRequest(
            f"no checkpoint in {folder} can be read ({', '.join(damaged)} are damaged): put good copies of them back "
            "under their former names, or start a new run in another folder"
        )
    if found is not None and lost:
        rounds = sorted(_number(path) for path in _damaged(folder) if _number(path) > found[0])
        again = f"round {rounds[0]} is" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]} are"
        lost.append(f"the run goes on from round {found[0]}: {again} lost and computed again")
    return found, lost


def _damaged(folder: Path) -> Iterator[Path]:
    return folder.glob(f"round-*.safetensors{DAMAGED}")


def _number(path: Path) -> int:
    return int(path.name.split(".")[0].removeprefix("round-"))


def _read(path: Path, remedy: str = "a resumed run uses the one before") -> Found:
    arrays, header, _ = read_checked(path, remedy=remedy)
    try:
        order = header.get("order", list(arrays))
        more = {n.removeprefix(_REMEMBERED): a for n, a in arrays.items() if n.startswith(_REMEMBERED)}
        arrays = {name: arrays[name] for name in order if name != "_"}
        scalars, remembered, server_round = header["scalars"], header.get("remembered", {}), header["round"]
        if not (isinstance(scalars, dict) and isinstance(remembered, dict) and isinstance(server_round, int)):
            raise TypeError("scalars, remembered and round are not a dict, a dict and a number")
        return server_round, unflatten(arrays, scalars), unflatten(more, remembered)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise StateError(f"{path} cannot be read ({type(e).__name__}: {e}); {remedy}") from e


def link(folder: Path, server_round: int, to: Path) -> None:
    """Put the checkpoint of a round into another folder too: one file with two names, a copy where that is impossible.

    Raises
    ------
    OSError : there is no such checkpoint, or `to` is not writable.
    """
    to.mkdir(exist_ok=True)
    old, new = path_of(folder, server_round), path_of(to, server_round)
    new.unlink(missing_ok=True)
    try:
        new.hardlink_to(old)
    except OSError:
        shutil.copyfile(old, new)


def only(folder: Path, server_round: int) -> None:
    """Remove the checkpoints of all other rounds from a folder."""
    for path in folder.glob("round-*.safetensors"):
        if path != path_of(folder, server_round):
            path.unlink(missing_ok=True)


def load(folder: Path, server_round: int) -> Found:
    """Read the checkpoint after one round.

    Raises
    ------
    StateError : it is not there or cannot be read.
    """
    return _read(path_of(folder, server_round), "put a good copy of it back, or start a new run")


def path_of(folder: Path, server_round: int) -> Path:
    """Return the file of the checkpoint after one round."""
    return folder / f"round-{server_round:06d}.safetensors"
