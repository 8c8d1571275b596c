"""A SuperNode whose messages do not wait for imports: Flower's own, with a warm process beside it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from fedapp.engines import control
from fedapp.engines.forks import LIBRARIES, Cold, Forks
from fedapp.results.terminal import echo

PROGRAM = "flwr-clientapp"
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
    if "--allow-runtime-dependency-installation" in words:
        return "each run installs libraries of its own"
    if "process" in words or "--isolation=process" in words:
        return "another program starts its messages (--isolation process)"
    return ""


def warmed(environment: dict[str, str]) -> str:
    """Start a warm process and put its folder on the path; return why that cannot be done, or an empty text.

    The process ends when this one has ended, also where this one has become another program.
    """
    try:
        forks = Forks(["flwr.supernode.cli", *LIBRARIES, PROGRAM], environment)
    except Cold as e:
        return str(e)
    os.set_inheritable(forks.stdin.fileno(), True)
    environment["PATH"] = forks.path(environment["PATH"])
    return ""
