"""The figures of the four papers by number: `fedapp figure PAPER-NUMBER RUN...` draws one from runs on any data.

`PAPERS` is the table: a figure's id, what it shows, which runs it needs, and what draws it. `docs/figures.md` has the
command and a picture of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedapp.errors import BadRequest, suggest
from fedapp.results.analysis import Unavailable
from fedapp.results.figures import gallery
from fedapp.results.figures.style import Drawing
from fedapp.results.figures.words import Runs, Words
from fedapp.results.runs import RunResult, read


@dataclass(frozen=True)
class PaperFigure:
    """One figure of a paper.

    Attributes
    ----------
    title : what it shows.   needs : the runs that it is drawn from, in one line.
    draw : makes caption, words and figure from the runs; raises `Unavailable` with the reason.
    """

    title: str
    needs: str
    draw: Callable[[Runs], Words]


PAPERS: dict[str, PaperFigure] = {
    "fedclassavg-2": PaperFigure(
        "Label distribution over clients", "one run of any method", gallery.FIGURES["labels-heat"][3]
    ),
}
"""By id, `<paper>-<number>`; a figure with several parts may have ids such as `ccvr-8a`."""


def draw(name: str, paths: Sequence[Path]) -> Drawing:
    """Draw a paper's figure from run directories, or from folders of run directories.

    Raises
    ------
    BadRequest : no such figure, a folder without finished runs, or runs that it cannot be drawn from.
    """
    if name not in PAPERS:
        raise BadRequest(f"no figure '{name}'{suggest(name, PAPERS)} (fedapp figure lists them all)")
    figure = PAPERS[name]
    if not paths:
        raise BadRequest(f"{name} ({figure.title}) needs {figure.needs}: name the run directories or their folder")
    runs: list[RunResult] = []
    for path in paths:
        found = read(path)
        runs += [found] if isinstance(found, RunResult) else found.finished
    if not runs:
        raise BadRequest(f"no run below {', '.join(map(str, paths))} has finished; {name} needs {figure.needs}")
    try:
        caption, alt, drawn = figure.draw(runs)
    except Unavailable as e:
        command = f": {e.command}" if e.command else ""
        raise BadRequest(f"{name} needs {figure.needs}; {e.why}{command}") from e
    return Drawing(name, figure.title, caption, alt, drawn, name)


def save(drawing: Drawing, file: Path) -> None:
    """Write a drawing as the file's ending says.

    Raises
    ------
    BadRequest : the ending is neither .svg nor .png, or the file cannot be written.
    """
    if file.suffix not in (".svg", ".png"):
        raise BadRequest(f"--out {file}: give a name that ends in .svg or .png")
    data = drawing.png() if file.suffix == ".png" else drawing.svg(text=False).encode()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    except OSError as e:
        raise BadRequest(f"{file} cannot be written ({e.strerror})") from e
