"""Start a warm process (:mod:`fedapp.deployment.warm`) whose forks stand for a program of Flower.

Flower's executor starts `flwr-clientapp` by bare name, from `PATH`. A folder that stands first there gives the name
another meaning, for the processes that have it in their environment, and nothing of Flower is changed. The folder
belongs to this user alone.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from fedapp.engines import control

PROGRAM = "flwr-clientapp"
"""The console script that forks stand for."""
LIBRARIES = (
    "flwr.supernode.cli",
    "torch",
    "torch._dynamo",  # the first optimizer of a process imports it
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
"""All that a client that trains imports, without fedapp: a run brings a copy of its own."""


class ForkServerUnavailable(Exception):
    """A warm process cannot start; the message gives the reason."""


class Forks:
    """A warm process and its folder. It ends with :meth:`end`, or with this process.

    Parameters
    ----------
    environment : of the warm process; its `PATH` gives the real program.

    Raises
    ------
    ForkServerUnavailable : not on this machine.
    """

    name = "the warm process"

    def __init__(self, environment: Mapping[str, str]) -> None:
        if not sys.platform.startswith("linux"):
            raise ForkServerUnavailable(f"a warm process needs Linux, and this is {sys.platform}")
        self.folder = Path(tempfile.mkdtemp(prefix="fedapp-node-", dir=_root(environment)))
        self._environment = dict(environment)
        try:
            self.start()
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def start(self) -> None:
        """Start the process; after its death in the same folder again, so that paths with it stay right.

        Raises
        ------
        ForkServerUnavailable : the folder is gone, and another user could make one of this name.
        """
        from fedapp.deployment import caller, warm  # they need Linux

        if not self.folder.is_dir() or self.folder.stat().st_uid != os.geteuid():
            raise ForkServerUnavailable(f"{self.folder} is gone: set TMPDIR to a folder that is not cleaned")
        place, script = self.folder / warm.PLACE, self.folder / PROGRAM
        place.unlink(missing_ok=True)
        if len(os.fsencode(place)) > 107:
            raise ForkServerUnavailable(f"{place} is too long for a socket: set TMPDIR to a shorter folder")
        [entry] = metadata.entry_points(group="console_scripts", name=PROGRAM)
        program = control.executable(PROGRAM, self._environment["PATH"])
        call = shlex.join([sys.executable, "-IS", caller.__file__, str(place), program])
        script.write_text(f'#!/bin/sh\nexec {call} "$@"\n', encoding="utf-8")
        script.chmod(0o700)
        command = [sys.executable, "-P", warm.__file__, str(self.folder), program, entry.value, *LIBRARIES]
        # In a session of its own Ctrl-C reaches a fork once, through its caller.
        self.process = subprocess.Popen(command, env=self._environment, stdin=subprocess.PIPE, start_new_session=True)
        while not place.exists() and self.process.poll() is None:  # an earlier caller starts the program itself
            time.sleep(0.005)

    def path(self, after: str) -> str:
        """Return a `PATH` in which its program comes first."""
        return os.pathsep.join([str(self.folder), after])

    def end(self) -> None:
        """Let it end, which takes as long as its forks take."""
        assert self.process.stdin is not None
        self.process.stdin.close()


def _root(environment: Mapping[str, str]) -> Path:
    """Return a folder from which programs may be started; in a container that for temporary files often is none."""
    roots = [Path(tempfile.gettempdir())]
    home = environment.get("FLWR_HOME")
    with contextlib.suppress(RuntimeError):  # no home directory
        roots.append(Path(home) if home else Path.home() / ".flwr")
    for root in roots:
        if root.is_dir() and not os.statvfs(root).f_flag & os.ST_NOEXEC:
            return root
    raise ForkServerUnavailable(
        f"no program may be started in {' or '.join(map(str, roots))}: set TMPDIR to another folder"
    )
