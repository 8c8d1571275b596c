"""The roster of a server: which node is which client.

`fedapp superlink` creates it, and the operator admits nodes with `fedapp admit`. Flower fixes a node's id when its key
is registered, and no program acts as a node without its key, so that an entry binds a key to a client id. Where there
is a roster, a node that is not in it, or says that it is another client, is left out. Without one each run
warns that a client id belongs to the first node that is online and claims it. A roster that is gone admits no new node:
a run in progress keeps the last one, and the next run is refused.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedapp.errors import BadRequest, counted
from fedapp.files import atomic, locked

ROSTER = "FEDAPP_ROSTER"
"""Environment variable with the path of the roster; `fedapp superlink` sets it."""
PATIENCE = 60.0
"""Seconds to wait for another process that adds an entry."""


@dataclass(frozen=True)
class Admitted:
    """One entry of the roster.

    Attributes
    ----------
    client : client id.   node : Flower's node id.   key : SHA-256 of the public key, hexadecimal.
    max_examples : largest number of training rows, and of test rows, that it may report; 0 = no limit.
    """

    client: int
    node: int
    key: str
    max_examples: int = 0


def of_this_server() -> dict[int, Admitted] | None:
    """Read the roster that the environment names; None where it names none.

    Raises
    ------
    BadRequest : as :func:`read` does. A roster that is gone admits no node.
    """
    value = os.environ.get(ROSTER, "")
    return read(Path(value)) if value else None


def read(path: Path) -> dict[int, Admitted]:
    """Read a roster; the keys are node ids.

    Raises
    ------
    BadRequest : it cannot be read, an entry is incomplete, or a node or client stands in it twice.
    """
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8-sig")).get("client", [])
        found = [_entry(e) for e in entries]
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, TypeError, ValueError, AttributeError) as e:
        raise BadRequest(f"the roster {path} cannot be read ({type(e).__name__}: {e}): fedapp admit writes it") from e
    for name in ("client", "node"):
        ids = [getattr(a, name) for a in found]
        twice = sorted({i for i in ids if ids.count(i) > 1})
        if twice:
            raise BadRequest(f"the roster {path} names {name} {twice[0]} twice: remove one of the entries")
    return {a.node: a for a in found}


def _entry(values: Mapping[str, Any]) -> Admitted:
    found = Admitted(
        int(values["client"]), int(values["node-id"]), str(values["key"]), int(values.get("max-examples", 0))
    )
    if min(found.client, found.node, found.max_examples) < 0:
        raise ValueError("a number is negative")
    return found


def check_free(path: Path, known: Mapping[int, Admitted], client: int, node: int = -1) -> None:
    """Check that neither a client id nor a node stands in a roster that was read from `path`.

    Raises
    ------
    BadRequest : one of them does; names the entry and what to do.
    """
    for other in known.values():
        if client == other.client or node == other.node:
            raise BadRequest(
                f"{path} has client {other.client} as node {other.node} already: choose another client id, or remove "
                "that entry and unregister its node (flwr supernode unregister)"
            )


def add(path: Path, entry: Admitted) -> None:
    """Append an entry; the file gets its name only when it is complete.

    Raises
    ------
    BadRequest : the client id or the node stands in the roster already.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    taken = f"another process holds {path}: repeat the command when it has ended"
    with locked(path.with_name(f".{path.name}.lock"), taken, PATIENCE):
        known = read(path) if path.exists() else {}
        check_free(path, known, entry.client, entry.node)
        _write(path, [*known.values(), entry])


def create(path: Path) -> None:
    """Write a roster that admits no node, unless there is one."""
    if not path.exists():
        _write(path, [])


def _write(path: Path, entries: Iterable[Admitted]) -> None:
    rows = [
        {"client": a.client, "node-id": str(a.node), "key": a.key}
        | ({"max-examples": a.max_examples} if a.max_examples else {})
        for a in entries
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "# Which node is which client. fedapp admit appends; a running server reads it before each round.\n"
    with atomic(path, durable=True, mode=0o644) as part:
        part.write_text(text + tomli_w.dumps({"client": rows}), encoding="utf-8")


def check(entry: Admitted, client: int, examples: int, tests: int = 0) -> None:
    """Check a node's statements: its client id, and its numbers of training and test rows.

    Raises
    ------
    BadRequest : it is another client in the roster, or has more rows than it may have.
    """
    if entry.client != client:
        raise BadRequest(
            f"node {entry.node} registers as client {client}, but the roster has it as client {entry.client}"
        )
    for rows, kind in ((examples, "training"), (tests, "test")):
        if entry.max_examples and rows > entry.max_examples:
            raise BadRequest(
                f"client {client} reports {counted(rows, f'{kind} row')}, and the roster allows {entry.max_examples}"
            )
