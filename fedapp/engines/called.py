"""What a fork of the warm process runs for :meth:`fedapp.engines.forks.Forks.call`: one function, then it ends."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path


def main(file: str) -> None:
    """Replace a file that holds the search path, and a function with its arguments, by what the function returns.

    The file then holds (True, the value) or (False, the exception).
    """
    with Path(file).open("rb") as given:
        sys.path[:] = pickle.load(given)
        function, args = pickle.load(given)
    try:
        found = pickle.dumps((True, function(*args)))
    except KeyboardInterrupt:  # who asked has it too
        return
    except Exception as e:
        found = pickle.dumps((False, e))
    written = Path(f"{file}.new")
    written.write_bytes(found)
    written.replace(file)


if __name__ == "__main__":
    main(sys.argv[1])
