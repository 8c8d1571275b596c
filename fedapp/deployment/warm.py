"""A warm process: it has imported what `flwr-clientapp` needs, and forks instead of starting it.

Flower's SuperNode starts `flwr-clientapp` for every message, and most of the time of a small message is the import of
PyTorch and of Flower. Here both are imported once. Every message keeps a process of its own, which does what the
program does and ends; only the imports are shared, and the memory that they take. :mod:`fedapp.deployment.forks` starts
the warm process, and :mod:`fedapp.deployment.caller` stands in the place of the program.

The warm process imports libraries alone. A run brings its own copy of fedapp, and may bring further code, and both are
imported in the fork, so that no run finds anything of an earlier one. It has no connections, and no threads but those
with which libraries of linear algebra begin, which know about forks. Of a fork it reads nothing but how it ended.
Every process of this user can ask it for a fork, and could start the program itself as well; others are refused.

It ends with the process that started it, which holds the other end of its standard input. Run as a script, this file
imports nothing of fedapp.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

NAME = "warm.py"
"""Name of the warm process for the kernel. Forks have the same command line, and the name of their program."""
PLACE = "warm"
"""Name of the socket in the folder."""
REQUEST = 8 << 20
"""Largest request in bytes; the kernel gives a program at most 6 MiB of arguments and environment."""
ARRIVES = 10.0
"""Seconds in which a request must have arrived. The small program sends it at once."""
GRACE = 10.0
"""Seconds that forks have to end after the process that started the warm process; they notice it themselves."""
OURS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
"""Signals that the warm process handles itself; the first two end it."""


@dataclass(frozen=True)
class Request:
    """What a process would have been started with.

    Attributes
    ----------
    files : standard input, output and errors, open in this process.
    """

    folder: str
    program: str
    words: Sequence[str]
    environment: dict[str, str]
    files: Sequence[int]


def same_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end of a Unix socket runs as this user."""
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return bool(user == os.geteuid())


def receive_request(connection: socket.socket) -> Request | None:
    """Read a request, as :func:`fedapp.deployment.caller.main` sends it; None if it is none, or not from this user."""
    files: list[int] = []
    try:
        if same_user(connection):
            connection.settimeout(ARRIVES)
            head, files, *_ = socket.recv_fds(connection, 4, 3)
            size = int.from_bytes(head, "big")
            if len(head) == 4 and len(files) == 3 and size <= REQUEST:
                body = bytearray()
                while len(body) < size and (more := connection.recv(size - len(body))):
                    body += more
                folder, program, count, *fields = map(os.fsdecode, bytes(body).split(b"\0"))
                pairs = (field.partition("=") for field in fields[int(count) :])
                if len(body) == size:
                    return Request(folder, program, fields[: int(count)], {k: v for k, _, v in pairs}, files)
    except (OSError, ValueError):
        pass
    for file in files:
        os.close(file)
    return None


def refuse(connection: socket.socket, request: Request | None) -> None:
    """Decline; the caller starts the program itself."""
    for file in request.files if request else ():
        os.close(file)
    connection.close()


class ForkServer:
    """Forks for requests at a socket, until standard input closes or a signal comes.

    Parameters
    ----------
    folder : of the socket.   program : the only program that a request may name.
    """

    def __init__(self, folder: str, program: str) -> None:
        self.before = {number: signal.getsignal(number) for number in OURS}
        self.program = program
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(f"{folder}/{PLACE}")
        self.listener.listen(128)
        self.woken, self.wakes = os.pipe()
        os.set_blocking(self.wakes, False)
        signal.set_wakeup_fd(self.wakes, warn_on_full_buffer=False)
        for number in OURS:
            signal.signal(number, lambda number, frame: None)
        self.selector = selectors.DefaultSelector()
        for source in (self.listener, self.woken, 0):
            self.selector.register(source, selectors.EVENT_READ)
        self.forks: dict[int, socket.socket] = {}
        self.until: float | None = None

    def serve(self) -> Request | None:
        """Return the request in each fork, and None in the warm process when it is over."""
        while self.until is None or (self.forks and time.monotonic() < self.until):
            for key, _ in self.selector.select(None if self.until is None else max(0.0, self.until - time.monotonic())):
                source, over = key.fileobj, False
                if self.selector.get_map().get(key.fd) != key:
                    continue  # closed because of another event of the same time
                if source is self.listener:
                    try:
                        connection = self.listener.accept()[0]
                    except OSError:  # the caller is gone, or there are too many open files
                        continue
                    request = receive_request(connection)
                    if request is None or request.program != self.program:
                        refuse(connection, request)
                    elif self.fork(connection, request):
                        return request
                elif isinstance(source, socket.socket):
                    self.pass_signals(source)
                elif source == self.woken:
                    over = bool({signal.SIGTERM, signal.SIGINT} & set(os.read(self.woken, 512)))
                    self.reap()
                else:
                    over = not os.read(0, 512)
                if over and self.until is None:
                    self.until = time.monotonic() + GRACE
                    self.selector.unregister(self.listener)
                    self.selector.unregister(0)
                    self.listener.close()  # a caller that comes from now on starts the program itself
        for pid in self.forks:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return None

    def fork(self, connection: socket.socket, request: Request) -> Request | None:
        """Fork for a request; return it in the fork, and None in the warm process."""
        # A signal to a fork that still has the warm process's handlers would wake the warm process.
        signal.pthread_sigmask(signal.SIG_BLOCK, OURS)
        try:
            pid = os.fork()
        except OSError:  # the machine has no room for it: the caller starts the program itself
            pid = -1
        if pid == 0:
            connection.close()
            self.leave()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, OURS)
        if pid == 0:
            return request
        for file in request.files:
            os.close(file)
        if pid < 0:
            connection.close()
            return None
        self.forks[pid] = connection
        try:
            connection.send(b"\0")
            connection.setblocking(False)
            self.selector.register(connection, selectors.EVENT_READ, pid)
        except OSError:  # the caller is gone
            os.kill(pid, signal.SIGKILL)
        return None

    def leave(self) -> None:
        """Close, in a fork, what belongs to the warm process."""
        signal.set_wakeup_fd(-1)
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.selector.close()
        self.listener.close()
        for connection in self.forks.values():
            connection.close()
        os.close(self.woken)
        os.close(self.wakes)

    def pass_signals(self, connection: socket.socket) -> None:
        """Pass signals on to a fork; kill it if its caller was killed."""
        pid = self.selector.get_key(connection).data
        try:
            numbers = connection.recv(64)
        except OSError:
            numbers = b""
        if not numbers:
            self.selector.unregister(connection)
        for number in numbers or [signal.SIGKILL]:
            with contextlib.suppress(OSError):  # no such signal
                os.kill(pid, number)

    def reap(self) -> None:
        """Send callers the exit codes of their forks."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                code = os.waitstatus_to_exitcode(status)
                connection = self.forks.pop(pid)
                with contextlib.suppress(KeyError):
                    self.selector.unregister(connection)
                with contextlib.suppress(OSError):
                    connection.send(bytes([code if code >= 0 else 128 - code]))
                connection.close()


def set_process_name(name: str) -> None:
    """Give this process a name for the kernel, as far as it keeps names (15 bytes)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def become(request: Request) -> None:
    """Make this fork look as if the program had been started with the content of a request."""
    for at, file in enumerate(request.files):
        os.dup2(file, at)
        os.close(file)
    set_process_name(Path(request.program).name)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.argv = [request.program, *request.words]
    sys.path.insert(0, str(Path(request.program).parent))
    if numbers := sys.modules.get("numpy.random"):
        numbers.seed()  # Python's own generator does so itself, and PyTorch's begins with a constant


def end(function: Callable[[], object]) -> NoReturn:
    """Call an entry point and end as a program does, but leave the interpreter's memory to the kernel.

    To take PyTorch and Flower apart costs 0.4 seconds of a core, and copies the pages that forks share.
    """
    code: object = 1
    try:
        code = function()
    except SystemExit as e:
        code = e.code
    except BaseException:
        traceback.print_exc()
    for last in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):  # type: ignore[attr-defined]
        with contextlib.suppress(Exception):
            last()
    if not isinstance(code, int | None):
        os.write(2, f"{code}\n".encode())
        code = 1
    os._exit((code or 0) & 0xFF)


def main(folder: str, program: str, entry: str, *libraries: str) -> None:
    """Import libraries, then run a program in each fork.

    Parameters
    ----------
    folder : of the socket; it is removed at the end.
    program, entry : path of a console script, and the `package.module:function` that it calls.
    """
    server, here = ForkServer(folder, program), os.getpid()  # a caller that comes before the end of the imports waits
    set_process_name(NAME)
    try:
        gc.disable()
        for library in libraries:
            with contextlib.suppress(Exception):  # a program that needs it reports it
                importlib.import_module(library)
        gc.freeze()  # or the collector would write to all pages that forks share
        gc.enable()
        request = server.serve()
    finally:
        if os.getpid() == here:
            shutil.rmtree(folder, ignore_errors=True)
    if request is None:
        end(lambda: None)  # a library of PyTorch's compiler would report the memory that stays frozen
    become(request)
    module, _, name = entry.partition(":")
    end(getattr(importlib.import_module(module), name))


if __name__ == "__main__":
    main(*sys.argv[1:])
