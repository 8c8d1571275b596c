"""Replacement for Flower's `flwr-clientapp`: a warm process (:mod:`fedapp.deployment.warm`) runs it.

Flower's executor starts this file as a script of `python -IS`, which takes 20 ms. It hands over its arguments,
environment and open files, and ends as the process that was forked for it ends. Signals are passed on. Where the warm
process does not answer, it becomes the program that it stands for.
"""

from __future__ import annotations

import array
import os
import signal
import socket
import sys

PATIENCE = 120.0
"""Seconds until the warm process must have begun: at the start of a node it is still importing."""


def main(place: str, program: str, *words: str) -> int:
    """Return the exit code of `program`, with these arguments, in a fork of the process that listens at `place`."""
    here = os.getcwd()  # noqa: PTH109 (pathlib takes longer to import than all that is done here)
    fields = [here, program, str(len(words)), *words, *(f"{k}={v}" for k, v in os.environ.items())]
    request = b"\0".join(map(os.fsencode, fields))
    with socket.socket(socket.AF_UNIX) as warm:
        try:
            warm.settimeout(PATIENCE)
            warm.connect(place)
            files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", (0, 1, 2)))]
            warm.sendmsg([len(request).to_bytes(4, "big")], files)
            warm.sendall(request)
            begun = warm.recv(1)
            warm.settimeout(None)
        except OSError:
            begun = b""
        if not begun:
            os.execv(program, [program, *words])
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
            signal.signal(number, lambda number, frame: warm.send(bytes([number])))
        code = warm.recv(1)
        return code[0] if code else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
