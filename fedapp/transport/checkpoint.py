"""Server checkpoints: nested dicts of arrays and JSON scalars, written atomically; the last two are kept."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from fedapp.learning.state import StateError, read_safetensors, write_safetensors
from fedapp.method import Arrays, ServerState

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


def save(folder: Path, server_round: int, state: ServerState, extra: dict[str, Any]) -> Path:
    """Write the state after `server_round` with `extra` (JSON values); keep the last two checkpoints.

    Returns
    -------
    The file `round-NNNNNN.safetensors`.

    Raises
    ------
    TypeError : the state holds something that cannot be stored (see `flatten`).   OSError : `folder` is not writable.
    """
    arrays, scalars = flatten(state)
    path = folder / f"round-{server_round:06d}.safetensors"
    if not arrays:
        arrays = {"_": np.zeros(0, np.float32)}
    header = {"round": server_round, "scalars": scalars, "extra": extra, "order": list(arrays)}
    # safetensors sorts names. The header keeps the state's own order, since the last bits of sums depend on it.
    write_safetensors(path, arrays, header)
    for old in sorted(p for p in folder.iterdir() if _FILE.match(p.name))[:-2]:
        old.unlink(missing_ok=True)
    return path


def latest(folder: Path) -> tuple[int, ServerState, dict[str, Any]] | None:
    """Read the newest checkpoint that can be read: (round, state, extra), or None if there is none.

    Raises
    ------
    StateError : there are checkpoints, and none can be read.
    """
    if not folder.is_dir():
        return None
    paths = sorted((p for p in folder.iterdir() if _FILE.match(p.name)), reverse=True)
    problem: StateError | None = None
    for path in paths:
        try:
            return _read(path)
        except StateError as e:
            problem = e
    if problem is not None:
        raise problem
    return None


def _read(path: Path) -> tuple[int, ServerState, dict[str, Any]]:
    arrays, header = read_safetensors(path)
    arrays = {name: arrays[name] for name in header.get("order", arrays) if name != "_"}  # type: ignore[attr-defined]
    scalars, extra = header["scalars"], header["extra"]
    assert isinstance(scalars, dict) and isinstance(extra, dict) and isinstance(header["round"], int)
    return header["round"], unflatten(arrays, scalars), extra


def link(folder: Path, server_round: int, to: Path) -> None:
    """Put the checkpoint of a round into another folder too: one file with two names, a copy where that is impossible.

    Raises
    ------
    OSError : there is no such checkpoint, or `to` is not writable.
    """
    to.mkdir(exist_ok=True)
    name = f"round-{server_round:06d}.safetensors"
    (to / name).unlink(missing_ok=True)
    try:
        (to / name).hardlink_to(folder / name)
    except OSError:
        shutil.copyfile(folder / name, to / name)


def only(folder: Path, server_round: int) -> None:
    """Remove the checkpoints of all other rounds from a folder."""
    for path in folder.glob("round-*.safetensors"):
        if path.name != f"round-{server_round:06d}.safetensors":
            path.unlink(missing_ok=True)


def load(folder: Path, server_round: int) -> ServerState:
    """Read the state after one round.

    Raises
    ------
    StateError : it is not there or cannot be read.
    """
    return _read(folder / f"round-{server_round:06d}.safetensors")[1]
