"""What a tracker is: the class that those of fedapp and of other packages derive from.

A package adds one with an entry point in the group `fedapp.trackers`, `mytracker = "mypkg.tracking:MyTracker"`, and
`fedapp run --track mytracker` uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Value = bool | int | float | str


@dataclass(frozen=True)
class Tracked:
    """The run that a tracker follows.

    Attributes
    ----------
    out : run directory on this machine.   name : a short name, the run directory without the folders around it.
    settings : the run-config and the method's hyperparameters (`hparam.mu`), as they are in effect.
    tags : few facts to find runs by: `method`, `dataset`, `seed`, `folder`, `fedapp`.
    key : what :attr:`Tracker.key` was when the run was tracked before, empty for a new run.
    step : the last round that was tracked before, 0 for a new run.
    """

    out: Path
    name: str
    settings: Mapping[str, Value]
    tags: Mapping[str, str]
    key: str = ""
    step: int = 0


class Tracker:
    """Passes one run on to a tracking library. All functions are called in one thread, in the order of the run.

    An exception in any of them ends the tracking with one warning; the run goes on.

    Attributes
    ----------
    key : text by which a resumed run finds what was begun here; it is kept in the run directory.
    where : one line that says where to look at the run.
    """

    key = ""
    where = ""

    def __init__(self, run: Tracked) -> None:
        """Begin to track a run, or go on where `run.key` says."""

    def log(self, step: int, scores: Mapping[str, float]) -> None:
        """Take numbers of a round, all finite.

        Parameters
        ----------
        step : number of the round, from 1; the last round and the last scores of a resumed run may come twice.
        scores : name -> number. `round/<column of rounds.csv>`, `evaluation/<column of evaluations.csv>`,
            `client_<column of clients.csv>/<client>`, `final_client_<column of final.csv>/<client>`.
        """

    def figure(self, name: str, title: str, file: Path) -> None:
        """Take a figure, a PNG file that is removed afterwards."""

    def files(self, folder: str, files: Sequence[Path]) -> None:
        """Take files of the run directory, as `models` or `tables`. Paths below it are to be kept."""

    def end(self, status: str, summary: Mapping[str, float], error: str) -> None:
        """End.

        Parameters
        ----------
        status : `finished`, `failed` or `interrupted`.
        summary : of a finished run, the numbers of summary.json: `accuracy/trained/last`, `bytes_up`, ...
        error : of a failed run, its message.
        """
