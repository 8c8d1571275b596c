"""Start a warm process (:mod:`fedapp.engines.warm`) whose forks stand for programs of Flower and of Ray.

Flower starts its helper programs by bare name, from `PATH`. So a folder that stands first there gives those names
another meaning, for the processes that have it in their environment, and nothing of Flower is changed. The folder is
this user's alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from fedapp.engines import control, supervise
from fedapp.engines.resources import cluster_address
from fedapp.errors import BadRequest

T = TypeVar("T")

PYTHON = "fedapp-python"
"""Name in the folder that stands for this interpreter with a script; what is started as `python` stays what it was."""
PROGRAMS = ("flower-superlink", "flower-superexec", "flwr-simulation", "flwr-clientapp")
"""Console scripts that forks can stand for."""
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
"""What every client imports beside Flower. Nothing of fedapp, of which a run brings a copy of its own."""


SIMULATION = (
    "flwr.superlink.cli",
    "flower-superlink",
    "flwr.supercore.cli",
    "flower-superexec",
    "flwr.simulation.app",
    "flwr.server.superlink.fleet.vce.backend",
    *LIBRARIES,
    "flwr-simulation",
    PYTHON,
)
"""What the processes of a simulation import, and their programs, in this order, since a SuperLink need not wait for
PyTorch. Ray is not imported: it notes at its import what the environment says of a worker."""


COLD = "FEDAPP_COLD"
"""Environment variable that asks for processes which are not forked."""


class Cold(Exception):
    """There can be no warm process; the message says why."""


class Forks:
    """A warm process and its folder. It ends with :meth:`end`, or with this process.

    Parameters
    ----------
    steps : in their order, libraries to import and names of programs to stand for from then on (:data:`PYTHON` too).
    environment : of the warm process; its `PATH` says where the programs are.
    settings : of `subprocess.Popen`.

    Raises
    ------
    Cold : not here.
    """

    def __init__(self, steps: Sequence[str], environment: Mapping[str, str], **settings: Any) -> None:
        if not sys.platform.startswith("linux"):
            raise Cold(f"a warm process needs Linux, and this is {sys.platform}")
        self.folder = Path(tempfile.mkdtemp(prefix="fedapp-node-", dir=_root(environment)))
        self._how = steps, dict(environment), settings
        try:
            self.process = self._started(*self._how)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def revive(self) -> None:
        """Start the process again after it has died, in the same folder, so that paths with it stay right.

        Raises
        ------
        Cold : the folder is gone, and another user could make one of this name.
        """
        if not self.folder.is_dir() or self.folder.stat().st_uid != os.geteuid():
            raise Cold(f"{self.folder} is gone: set TMPDIR to a folder that is not cleaned")
        self.end()
        self.process = self._started(*self._how)

    def _started(
        self, steps: Sequence[str], environment: Mapping[str, str], settings: Mapping[str, Any]
    ) -> subprocess.Popen[bytes]:
        from fedapp.engines import caller, warm  # they need Linux

        place = self.folder / warm.PLACE
        place.unlink(missing_ok=True)
        if len(os.fsencode(place)) > 107:
            raise Cold(f"{place} is too long for a socket: set TMPDIR to a shorter folder")
        points = metadata.entry_points(group="console_scripts")
        entries = {point.name: point.value for point in points if point.name in PROGRAMS} | {PYTHON: ""}
        done = []
        for step in steps:
            if step not in entries:
                done.append(step)
                continue
            program = sys.executable if step == PYTHON else control.executable(step, environment["PATH"])
            call = [sys.executable, "-IS", caller.__file__, str(place), program]
            script = self.folder / step
            text = f'#!/bin/sh\nexec {shlex.join(call)} "$@"\n'
            if step == PYTHON:  # a fork runs scripts alone
                text = text.replace("exec", f'case "$1" in -*) exec {shlex.quote(program)} "$@";; esac\nexec', 1)
            script.write_text(text, encoding="utf-8")
            script.chmod(0o700)
            done.append(f"{program}={entries[step]}")
        command = [sys.executable, "-P", warm.__file__, str(self.folder), *done]
        # In a session of its own Ctrl-C reaches a fork once, through its caller.
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True, **settings)
        while not place.exists() and process.poll() is None:  # who asks before that would start the program itself
            time.sleep(0.005)
        return process

    def path(self, after: str) -> str:
        """Return a `PATH` in which its programs come first."""
        return os.pathsep.join([str(self.folder), after])

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function in a fork, so that what it loads does not stay in this process.

        Raises
        ------
        BadRequest : the fork was killed.
        Exception : whatever the function raises.
        """
        from fedapp.engines import called

        handle, file = tempfile.mkstemp(dir=self.folder)
        with os.fdopen(handle, "wb") as given:
            pickle.dump(sys.path, given)
            pickle.dump((function, args), given)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or what waits there would come after what the fork prints
        subprocess.run([self.folder / PYTHON, called.__file__, file, str(os.getpid())])
        answer = Path(f"{file}.answer")
        if not answer.exists():
            raise BadRequest(
                "the process that tries data and model before the run was killed; perhaps the memory ran out"
            )
        good, found = pickle.loads(answer.read_bytes())
        if not good:
            raise found
        value: T = found
        return value

    def end(self) -> None:
        """Let it end, which takes as long as its forks take."""
        assert self.process.stdin is not None
        self.process.stdin.close()


def _root(environment: Mapping[str, str]) -> Path:
    """Return a folder from which programs may be started; in a container that for temporary files often is none."""
    roots = [Path(tempfile.gettempdir())]
    home = environment.get("FLWR_HOME")
    with contextlib.suppress(RuntimeError):  # there is no home
        roots.append(Path(home) if home else Path.home() / ".flwr")
    for root in roots:
        if root.is_dir() and not os.statvfs(root).f_flag & os.ST_NOEXEC:
            return root
    raise Cold(f"no program may be started in {' or '.join(map(str, roots))}: set TMPDIR to another folder")


class Warm:
    """The process from which the SuperLink, its executor, the simulation and Ray's workers are forked.

    It bears the mark of the session whose processes these are. Where there can be none, all of them are started anew.
    """

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.forks: Forks | None = None

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The process, if there is one."""
        return self.forks.process if self.forks else None

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function in a fork that ends with the call, so that what it loads does not stay in this process.

        PyTorch and the data of a run are half a gigabyte. If PyTorch is there already, or no fork is possible, this
        process calls the function itself.
        """
        if "torch" in sys.modules:
            return function(*args)
        self.start()
        return self.forks.call(function, *args) if self.forks else function(*args)

    @property
    def folders(self) -> list[Path]:
        """What is left of it if it is killed."""
        return [self.forks.folder] if self.forks else []

    def start(self) -> None:
        """Start it, unless it has been started before, or is not wanted."""
        if self.forks is None and not os.environ.get(COLD):
            environment = {**control.environment(), supervise.MARKER: self.mark}
            with contextlib.suppress(Cold, OSError):
                self.forks = Forks(SIMULATION, environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def entered(self, environment: dict[str, str]) -> dict[str, str]:
        """Return an environment in which the programs are forks of it."""
        if self.forks is None:
            return environment
        found = {**environment, "PATH": self.forks.path(environment["PATH"])}
        if not cluster_address():
            # The way in which Ray's own job manager says by what workers are started.
            job = {"runtime_env": {"py_executable": str(self.forks.folder / PYTHON)}}
            found.setdefault("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
        return found

    def clear(self) -> None:
        """Let it end, and remove what it leaves if it was killed."""
        if self.forks is not None:
            self.forks.end()
            shutil.rmtree(self.forks.folder, ignore_errors=True)
