"""The processes of a session: found, stopped, and stopped as well where the session's own process was killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType

import psutil

_MARKER = "FEDAPP_SESSION"

# Run by the guard's interpreter, which is told where this package lies.
_GUARD = """\
import sys
sys.path.insert(0, sys.argv[1])
from fedapp.engines.supervise import _watch_over
_watch_over(sys.argv[2], sys.argv[3])
"""


def _watch_over(mark: str, home: str) -> None:
    """Wait until the launcher dismisses this process, or is gone; then stop what it left and remove its folder."""
    if not sys.stdin.buffer.read():
        _Family(mark).stop()
        shutil.rmtree(home, ignore_errors=True)


class _Family:
    """The processes that descend from a session.

    The environment carries a mark, which also finds processes whose parent has died; the tree finds those that wrote
    over their environment, as a process may that sets its title; what was seen earlier is remembered.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._known: set[psutil.Process] = set()

    def members(self) -> set[psutil.Process]:
        """Collect those that are alive."""
        me = os.getpid()
        found = {process for process in self._known if _alive(process)}
        uid = os.getuid() if hasattr(os, "getuid") else None
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if (uid is None or process.uids().real == uid) and process.environ().get(_MARKER) == self._mark:
                    found.add(process)
        for process in list(found):
            with contextlib.suppress(psutil.Error):
                found.update(process.children(recursive=True))
        self._known = {process for process in found if process.pid != me and _alive(process)}
        return set(self._known)

    def stop(self, keep: Sequence[str] = (), grace: float = 1.0) -> list[psutil.Process]:
        """Stop them, politely and then not; return what is left.

        Parameters
        ----------
        keep : sequence of str
            Commands whose processes stay, by the end of their path.
        grace : float
            Seconds between SIGTERM and SIGKILL.
        """

        def targets() -> list[psutil.Process]:
            return [process for process in self.members() if not _runs(process, *keep)]

        left = targets()
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        deadline = time.monotonic() + grace
        while left and time.monotonic() < deadline:
            time.sleep(0.05)
            left = [process for process in left if _alive(process)]
        # Children may have been born meanwhile, and killing a parent may take several looks.
        for _ in range(50):
            left = targets()
            if not left:
                break
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.1)
        return left


@contextlib.contextmanager
def _shielded() -> Iterator[None]:
    """Hold back interrupts while cleaning up, which takes seconds at most."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _runs(process: psutil.Process, *commands: str) -> bool:
    """Whether the first words of a command line (the interpreter, its options, its script) end with such a path."""
    with contextlib.suppress(psutil.Error):
        return any(f"/{word}".endswith(f"/{command}") for word in process.cmdline()[:4] for command in commands)
    return False
