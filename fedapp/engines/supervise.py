"""The processes that a session starts: how they are found and stopped, and what signals do meanwhile.

Run as a script, this file is the session's guard: it stops the session's processes if the session's own process was
killed. It therefore imports nothing but the standard library and psutil.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

MARKER = "FEDAPP_SESSION"
"""Environment variable with the session's mark, which all its processes inherit."""


class SessionProcesses:
    """The processes that descend from a session.

    The mark in the environment also finds processes whose parent has died. The process tree finds those that overwrote
    their environment, which a process may do to set its title. Processes found earlier are remembered.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._known: set[psutil.Process] = set()

    def alive(self) -> set[psutil.Process]:
        """Collect those that are alive."""
        found = {process for process in self._known if is_alive(process)}
        uid = os.getuid() if hasattr(os, "getuid") else None
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if (uid is None or process.uids().real == uid) and process.environ().get(MARKER) == self._mark:
                    found.add(process)
        for process in list(found):
            with contextlib.suppress(psutil.Error):
                found.update(process.children(recursive=True))
        self._known = {process for process in found if process.pid != os.getpid() and is_alive(process)}
        return set(self._known)

    def stop(self, keep: Sequence[str] = (), grace: float = 1.0) -> list[psutil.Process]:
        """Stop them with SIGTERM, then with SIGKILL; return those that are left.

        Parameters
        ----------
        keep : commands, by the end of their path, whose processes go on.
        grace : seconds between the two signals.
        """

        def targets() -> list[psutil.Process]:
            return [process for process in self.alive() if not runs(process, *keep)]

        left = targets()
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        deadline = time.monotonic() + grace
        while left and time.monotonic() < deadline:
            time.sleep(0.05)
            left = [process for process in left if is_alive(process)]
        # A process may have started children meanwhile, so the search is repeated until it finds nothing.
        for _ in range(50):
            left = targets()
            if not left:
                break
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.1)
        return left


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def runs(process: psutil.Process, *commands: str) -> bool:
    """Return whether one of the first words of a command line (interpreter, options, script) ends with such a path."""
    with contextlib.suppress(psutil.Error):
        return any(f"/{word}".endswith(f"/{command}") for word in process.cmdline()[:4] for command in commands)
    return False


def reap(child: subprocess.Popen[bytes] | None) -> None:
    """Wait five seconds for a child that was told to end, and kill it if it does not."""
    if child is not None:
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()


class Guard:
    """A small process that stops a session's processes and removes its folder if this process is killed.

    It waits at the end of a pipe. The pipe closes when this process ends, for whatever reason; only :meth:`dismiss`
    writes into it first.
    """

    def __init__(self, mark: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, mark, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """End the guard without a clean-up."""
        try:
            self._process.communicate(b"done", timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()


@contextlib.contextmanager
def handle_signals(handler: Any, *names: str) -> Iterator[None]:
    """Give signals another handler inside the block.

    Python allows this in the main thread only; elsewhere nothing changes. A signal that is ignored stays ignored, such
    as SIGHUP below nohup, and one that the system lacks is passed over.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        for name in names:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle a signal like Ctrl-C, so that every end passes through the same clean-up."""
    raise KeyboardInterrupt(signal.Signals(number).name)


if __name__ == "__main__":
    if not sys.stdin.buffer.read():
        SessionProcesses(sys.argv[1]).stop()
        shutil.rmtree(sys.argv[2], ignore_errors=True)
