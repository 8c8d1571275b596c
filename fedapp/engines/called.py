"""What a fork of the warm process runs for :meth:`fedapp.engines.forks.Forks.call`: one function, then it ends."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import traceback
from pathlib import Path


def main(file: str, caller: int) -> None:
    """Read the search path, and a function with its arguments, from a file; write what it returns to FILE.answer.

    The answer is (True, the value) or (False, the exception).

    Parameters
    ----------
    caller : id of the process that waits; this one ends with it.
    """
    threading.Thread(target=_follow, args=(caller,), daemon=True).start()
    with Path(file).open("rb") as given:
        sys.path[:] = pickle.load(given)
        function, args = pickle.load(given)
    try:
        found = pickle.dumps((True, function(*args)))
    except KeyboardInterrupt:  # who asked has it too
        return
    except BaseException as e:
        found = _error(e)
    part = Path(f"{file}.part")
    part.write_bytes(found)
    part.replace(f"{file}.answer")


def _error(e: BaseException) -> bytes:
    """Return an exception with where it was raised, or in words if it cannot be sent."""
    where = traceback.format_exc()
    e.add_note(where)
    try:
        found = pickle.dumps((False, e))
        pickle.loads(found)
    except Exception:
        found = pickle.dumps((False, RuntimeError(where)))
    return found


def _follow(caller: int) -> None:
    while True:
        time.sleep(0.5)
        try:
            os.kill(caller, 0)
        except OSError:
            os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
