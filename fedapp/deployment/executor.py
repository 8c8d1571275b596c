"""Flower's executor, which starts the processes of server and node: only one that knows a secret gets tasks.

It uses internals of one minor version of Flower, as all of this room does.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedapp.deployment.credentials import write_secret
from fedapp.errors import BadRequest

FLOWER = (1, 41)
"""The minor version of Flower whose internals are used."""


def minor(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def check_flower(program: str, remedy: str) -> None:
    """Check the version of Flower that is installed.

    Raises
    ------
    BadRequest : it is another minor version.
    """
    if minor(found := metadata.version("flwr")) != FLOWER:
        raise BadRequest(
            f"{program} knows Flower {FLOWER[0]}.{FLOWER[1]} only, and {found} is installed: install that version, or "
            f"{remedy}"
        )


def replace_attribute(owner: Any, name: str, value: object) -> None:
    """Replace an internal attribute of a library.

    Raises
    ------
    BadRequest : it does not exist, so that replacing it would change nothing.
    """
    if not hasattr(owner, name):
        raise BadRequest(f"{owner.__name__} has no {name}: this version of the library is not supported")
    setattr(owner, name, value)


def executor_command(address: str, secret: Path, *options: str) -> list[str]:
    """Return the command of Flower's executor, which ends with this process.

    Parameters
    ----------
    address : HOST:PORT where it asks for tasks.   secret : the file with its secret.   options : of `flower-superexec`.
    """
    return [
        sys.executable, "-P", "-c", "from fedapp.deployment.executor import superexec; superexec()", "flower-superexec",
        "--runtime-api-address", address,
        "--superexec-auth-secret-file", str(secret),
        "--parent-pid", str(os.getpid()),
        *options,
    ]  # fmt: skip


def superexec() -> None:
    """Run flower-superexec in this process, with the tokens of tasks in files of this user.

    Flower writes them on command lines, which all users of the machine see, and who has one acts as the run.
    """
    from flwr.supercore.cli.flower_superexec import flower_superexec
    from flwr.supercore.superexec.executor import subprocess_executor

    del sys.argv[0]  # "-c"
    folder = Path(sys.argv[sys.argv.index("--superexec-auth-secret-file") + 1]).parent

    def start(words: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(without_token(words, folder), **options)

    ours = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
    replace_attribute(subprocess_executor, "subprocess", ours)
    flower_superexec()


def without_token(words: Sequence[str], folder: Path) -> list[str]:
    """Return the command with the token in a file of `folder` that only this user can read."""
    at = words.index("--token")
    path = folder / f"{secrets.token_hex(8)}.token"
    write_secret(path, words[at + 1].encode())
    return [*words[:at], "--token-file", str(path), *words[at + 2 :]]
