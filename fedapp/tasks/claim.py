"""Two runs at once on one node: the folder of a client belongs to one of them, from its first training to its end.

Models that a node keeps for use after a run have the same names in all runs, and a warm start removes the states of
earlier ones. So a second run is refused, in one line that says until when. It may run at the same time under another
name (`federation`). A run that was stopped does not say goodbye. So the node's supervisor asks the SuperLink whether it
is over (:func:`settle`). Where there is none, a run counts as ended when it has been silent for `SILENCE` seconds, or
for three times its longest pause so far.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedapp.errors import BadRequest
from fedapp.files import atomic, locked, private_folder
from fedapp.learning.state import is_token

SILENCE = 120.0
"""Seconds after which a run that has sent nothing counts as ended."""
LONGEST = 3600.0
"""Seconds above which a pause does not count further; as long as a round waits by default."""
SUPERVISED = "FEDAPP_SUPERVISED"
"""Environment variable that a supervisor sets which answers questions about runs."""
ANSWERED = 10.0
"""Seconds that a question is answered in."""
ENDED = ".ended"
"""After a run's token, the name of a file that says since when the run is over."""
_LOCK, _NOTE, _QUESTION = ".lock", ".run", ".over"


def _note(folder: Path) -> dict[str, Any]:
    """Return which run has the folder, Flower's id of it, when it was last here, and its longest pause.

    Without a readable note it is empty.
    """
    try:
        found = json.loads((folder / _NOTE).read_text(encoding="utf-8"))
        run, seen, pause = str(found["run"]), float(found["seen"]), float(found["pause"])
        return {"run": run, "flower": int(found.get("flower", 0)), "seen": seen, "pause": pause}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def check(folder: Path, run: str) -> None:
    """Refuse a run while another one is in progress in the folder of a client.

    Parameters
    ----------
    folder : `STATE-DIR/<federation>/<client-id>`.   run : token of the run that asks.

    Raises
    ------
    BadRequest : names the other run and says until when it is waited for.
    """
    note = _note(folder)
    if note and note["run"] != run:
        # The distance both ways: a clock that was set back must not shut others out for as long as it was ahead.
        left = max(SILENCE, 3 * note["pause"]) - abs(time.time() - note["seen"])
        if left > 0 and not _is_over(folder):
            raise BadRequest(
                f"the run {note['run']} is in progress on this node in the federation '{folder.parent.name}': wait for "
                f"its end (it counts as ended if it is silent for another {left:.0f} s), or give this run another name "
                "with --set federation=NAME"
            )


def _is_over(folder: Path) -> bool:
    """Ask the supervisor whether the run that has a folder is over."""
    if not os.environ.get(SUPERVISED):
        return False
    question, until = folder / _QUESTION, time.monotonic() + ANSWERED
    question.touch()
    while question.exists() and time.monotonic() < until:
        time.sleep(0.1)
    return not (folder / _NOTE).exists()


def settle(root: Path, running: Callable[[int], bool]) -> None:
    """Answer the questions of :func:`check` below a state folder: the claims of runs that are over are removed.

    Parameters
    ----------
    root : `STATE-DIR`.   running : whether a run goes on, by Flower's id.
    """
    for question in root.glob(f"*/*/{_QUESTION}"):
        note = _note(question.parent)
        if note and note["flower"] and not running(note["flower"]):
            (question.parent / _NOTE).unlink(missing_ok=True)
        question.unlink(missing_ok=True)


@contextlib.contextmanager
def held(folder: Path, run: str, last: bool, flower: int = 0) -> Iterator[None]:
    """Hold the folder of a client while a message of a run is worked on; between messages a note keeps it.

    Parameters
    ----------
    last : the run is at its end, so that the next one may begin.   flower : Flower's id of the run; 0 = not known.

    Raises
    ------
    BadRequest : another run is in progress there.
    """
    private_folder(folder)
    # An earlier message of the same run is waited for.
    with locked(folder / _LOCK, patience=-1, waiting=lambda: check(folder, run)):
        check(folder, run)
        former, now = _note(folder), time.time()
        mine = former.get("run") == run
        # Days between a run and its resume do not count: they would shut others out for weeks.
        pause = min(max(former["pause"], now - former["seen"]), LONGEST) if mine else 0.0
        _write(folder, run, pause, flower)
        ended = folder / f"{run}{ENDED}"
        ended.unlink(missing_ok=True)  # a run that had ended goes on for more rounds
        try:
            yield
            if last:
                ended.touch()
        except BaseException:
            last = last or not mine
            raise
        finally:
            if last:
                (folder / _NOTE).unlink(missing_ok=True)
            else:
                _write(folder, run, pause, flower)


def _write(folder: Path, run: str, pause: float, flower: int) -> None:
    note = {"run": run, "flower": flower, "seen": time.time(), "pause": pause}
    with atomic(folder / _NOTE) as part:
        part.write_text(json.dumps(note), encoding="utf-8")


def remove_ended(root: Path, days: float, remove: bool) -> tuple[int, int]:
    """Remove the states of runs that have ended; return how many runs of clients, and their bytes.

    States of a run that was stopped or may go on stay, and so do models for use after a run, the ledgers of releases
    and what is known of these. The next message of a client waits until its folder is done.

    Parameters
    ----------
    root : `STATE-DIR`.   days : for so long the end must be past.   remove : or only count.
    """
    runs = size = 0
    for ended in sorted(root.glob(f"*/*/*{ENDED}")):
        folder, run = ended.parent, ended.name.removesuffix(ENDED)
        with locked(folder / _LOCK, patience=-1):
            files = [f for f in folder.glob(f"{run}.*") if f.is_file()]
            if not (is_token(run) and ended in files and time.time() - ended.stat().st_mtime >= days * 86400):
                continue
            runs, size = runs + 1, size + sum(f.stat().st_size for f in files)
            files.sort(key=lambda file: file.name.endswith(ENDED))  # that one last, in case this is interrupted
            for file in files if remove else ():
                file.unlink()
    return runs, size
