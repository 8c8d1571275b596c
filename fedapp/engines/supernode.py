"""A SuperNode whose messages do not wait for imports: Flower's own, with a warm process beside it.

Flower starts its helper programs by bare name, from `PATH`. So a folder that stands first there gives `flwr-clientapp`
another meaning, for this SuperNode alone, and nothing of Flower is changed. The folder is this user's alone.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from fedapp.engines import control
from fedapp.results.terminal import echo

PROGRAM = "flwr-clientapp"
LIBRARIES = (
    "torch",
    "torch.nested._internal.nested_tensor",
    "numpy.ma",
    "numpy.random",
    "cryptography.hazmat.primitives.asymmetric.x25519",
    "cryptography.hazmat.primitives.ciphers.aead",
    "encodings.cp437",
    "filelock",
    "httpcore",
    "safetensors.numpy",
    "statistics",
    "threadpoolctl",
)
"""What every message imports beside Flower. Nothing of fedapp, of which a run brings a copy of its own."""
POLL = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25"}
"""Seconds between two questions of Flower's executor whether a message has come; 1 by default."""


def serve(words: Sequence[str], cold: bool) -> int:
    """Become `flower-supernode`.

    Parameters
    ----------
    words : its options.   cold : without a warm process.

    Returns
    -------
    Its exit code, where this process cannot become another one (Windows).

    Raises
    ------
    control.LaunchError : Flower is not installed.
    """
    environment = {**POLL, **control.environment()}
    program = control.executable("flower-supernode", environment["PATH"])
    if not cold:
        reason = obstacle(words) or warmed(environment)
        if reason:
            echo(f"fedapp supernode: there is no warm process, because {reason}", err=True)
    if os.name != "nt":
        os.execve(program, [program, *words], environment)
    return subprocess.call([program, *words], env=environment)


def obstacle(words: Sequence[str]) -> str:
    """Return why a SuperNode with these options cannot have a warm process, or an empty text."""
    if not sys.platform.startswith("linux"):
        return f"a warm process needs Linux, and this is {sys.platform}"
    if "--allow-runtime-dependency-installation" in words:
        return "each run installs libraries of its own"
    if "process" in words or "--isolation=process" in words:
        return "another program starts its messages (--isolation process)"
    return ""


def warmed(environment: dict[str, str]) -> str:
    """Start a warm process and put its folder on the path; return why that cannot be done, or an empty text.

    The process ends when this one has ended, also where this one has become another program.
    """
    from fedapp.engines import caller, warm  # they need Linux

    program = control.executable(PROGRAM, environment["PATH"])
    entry = next(iter(metadata.entry_points(group="console_scripts", name=PROGRAM)))
    # In a container the first is often one from which no program may be started.
    roots = [Path(tempfile.gettempdir()), Path(environment.get("FLWR_HOME", Path.home() / ".flwr"))]
    root = next((r for r in roots if r.is_dir() and not os.statvfs(r).f_flag & os.ST_NOEXEC), None)
    if root is None:
        return f"no program may be started in {' or '.join(map(str, roots))}: set TMPDIR to another folder"
    folder = Path(tempfile.mkdtemp(prefix="fedapp-node-", dir=root))
    place = folder / warm.PLACE
    if len(os.fsencode(place)) > 107:
        folder.rmdir()
        return f"{place} is too long for a socket: set TMPDIR to a shorter folder"
    call = [sys.executable, "-I", "-S", caller.__file__, str(place), program]
    script = folder / PROGRAM
    script.write_text(f'#!/bin/sh\nexec {shlex.join(call)} "$@"\n', encoding="utf-8")
    script.chmod(0o700)
    command = [sys.executable, "-P", warm.__file__, str(folder), program, entry.value, *LIBRARIES]
    # In a session of its own Ctrl-C reaches a fork once, through its caller.
    started = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)
    assert started.stdin is not None
    os.set_inheritable(started.stdin.fileno(), True)
    environment["PATH"] = os.pathsep.join([str(folder), environment["PATH"]])
    return ""
