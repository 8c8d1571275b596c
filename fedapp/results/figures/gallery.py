"""The figures of a run and of a comparison, and why some are left out.

`FIGURES` names the figures of a run. Their functions take runs and return a caption, what the figure shows in words,
and the figure. The others depend on what a comparison varies, and return `Drawing`s. All raise `Unavailable` with the
reason, and the command that would make the missing data. They stand in the files of this folder, by what they show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from fedapp import registry
from fedapp.errors import BadRequest
from fedapp.registry import title_of
from fedapp.results import analysis
from fedapp.results.analysis import Unavailable
from fedapp.results.answers import Answer, answers_of
from fedapp.results.figures import gains, heads, maps, scores
from fedapp.results.figures.gains import MOST_METHODS
from fedapp.results.figures.style import Drawing, one_look_each
from fedapp.results.figures.words import Runs, Words, named, setting_text, titled
from fedapp.results.runs import PROTOCOL_TEXT, Comparison, RunResult, groups_of, varying


@dataclass(frozen=True)
class Missing:
    """A figure that is left out: its title, the reason, and the command for the missing runs."""

    title: str
    why: str
    command: str = ""


@dataclass(frozen=True)
class Job:
    """A figure to draw.

    Attributes
    ----------
    section : of the page.   title : for progress, and for the list of omitted figures.
    draw : returns drawings; raises `Unavailable` with the reason.
    """

    section: str
    title: str
    draw: Callable[[], Iterable[Drawing]]


MOST_SEEDS = 10
"""Seeds whose division of the data is drawn."""
Progress = Callable[[int, int, str], object]
"""Hears before each figure its number from 1, how many there are, and its title."""


@dataclass
class Gallery:
    """Figures by section, in the order of the page, and those that are left out.

    Attributes
    ----------
    answers : of a comparison, one for each setting.   unanswered : why there is none.
    """

    sections: dict[str, list[Drawing]] = field(default_factory=dict)
    missing: list[Missing] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    unanswered: str = ""

    @property
    def drawings(self) -> list[Drawing]:
        """All figures."""
        return [d for drawings in self.sections.values() for d in drawings]

    def add_all(self, jobs: Sequence[Job], progress: Progress) -> None:
        """Draw all jobs in turn; what cannot be drawn is listed with the reason."""
        for number, job in enumerate(jobs, 1):
            progress(number, len(jobs), job.title)
            try:
                found = list(job.draw())
                for drawing in found:
                    _ = drawing.inline  # matplotlib finds some faults only as it writes
            except Unavailable as e:
                self.missing.append(Missing(job.title, e.why, e.command))
            except Exception as e:  # one figure must not cost the reader the whole page; the page names the error
                self.missing.append(Missing(job.title, f"it could not be drawn: {type(e).__name__}: {e}"))
            else:
                self.sections.setdefault(job.section, []).extend(found)


def _known(name: str, runs: Runs, more: str = "") -> Job:
    """Return the job of a figure of `FIGURES`; `more` goes on behind its title."""
    section, title, source, draw = FIGURES[name]

    def drawn() -> Iterable[Drawing]:
        caption, alt, figure = draw(runs)
        yield Drawing(name + more.replace(", seed ", "-s"), title + more, caption, alt, figure, source)

    return Job(section, title + more, drawn)


# ---- data --------------------------------------------------------------------------------------------------


def _label_distribution(runs: Runs) -> Words:
    analysis.label_shares(runs[0])
    counts, classes = runs[0].counts, runs[0].classes
    held, rows = (counts > 0).sum(axis=1), counts.sum(axis=1)
    return (
        "Training rows by class and client; an empty cell means 0.",
        f"Heat map: {counts.shape[0]} clients hold {held.min()} to {held.max()} of {counts.shape[1]} classes and "
        f"{rows.min()} to {rows.max()} training rows each.",
        maps.label_heat(counts, classes),
    )


# ---- which figures there are -----------------------------------------------------------------------------------------

FIGURES: dict[str, tuple[str, str, str, Callable[[Runs], Words]]] = {
    "learning-curves": (
        "scores", "Learning curves", "FedClassAvg, Figs. 4 to 7; FedGH, Fig. 2", scores.learning_curves,
    ),
    "training-loss": ("absolute", "Training loss", "cwFedAvg, Fig. 4", heads.training_loss),
    "client-accuracy": ("scores", "Accuracy of every client", "", scores.client_accuracy),
    "labels-heat": ("data", "Label distribution", "FedClassAvg, Figs. 2 and 3", _label_distribution),
    "head-norms": (
        "heads", "Head norms against class counts", "CCVR, Figs. 3 and 12", heads.head_maps,
    ),
    "who-learns-from-whom": ("heads", "Mixing matrix", "", heads.mixing),
    "round-seconds": ("cost", "Time of a round", "", scores.round_seconds),
}  # fmt: skip
"""By id: section of the page, title, the paper's figure, and what draws it."""


def _uses(run: RunResult, name: str) -> bool:
    """Return whether a figure of `FIGURES` shows something that the run's method works with."""
    if name in ("learning-curves", "training-loss", "round-seconds") and run.summary.get("rounds") == 0:
        return False
    if name == "head-norms":
        return not math.isnan(scores.last_wdr(run))
    return name != "who-learns-from-whom" or run.method in registry.blending()


def of_run(run: RunResult, progress: Progress = lambda number, count, title: None) -> Gallery:
    """Draw all figures that a run directory holds the data for; `progress` is called before each of them."""
    gallery = Gallery()
    shown = titled(run)
    jobs = [_known(name, [shown]) for name in FIGURES if _uses(run, name)]
    with one_look_each([named(p) for p in PROTOCOL_TEXT]):  # colours tell protocols apart, for there is one method
        gallery.add_all(jobs, progress)
    return gallery


def of_comparison(comparison: Comparison, progress: Progress = lambda number, count, title: None) -> Gallery:
    """Draw all figures that the runs of a comparison hold the data for; a method looks the same in all of them."""
    gallery = Gallery()
    try:
        gallery.answers = answers_of(comparison)
    except BadRequest as e:
        gallery.unanswered = str(e)
    if not comparison.finished:
        gallery.missing.append(Missing("All figures", "no run has finished yet", "fedapp compare ... (again)"))
        return gallery
    with one_look_each([title_of(label) for label in comparison.labels]):
        gallery.add_all(_jobs(comparison, gallery.answers), progress)
    return gallery


def _jobs(comparison: Comparison, answers: Sequence[Answer]) -> list[Job]:
    """Return the figures of a comparison in the order of the page."""
    order = comparison.labels
    runs = [titled(r) for r in sorted(comparison.finished, key=lambda r: order.index(r.label))]
    jobs: list[Job] = []

    def add(section: str, title: str, draw: Callable[..., Iterable[Drawing]], shown: Runs, *more: object) -> None:
        jobs.append(Job(section, title.strip(), partial(draw, shown, *more)))

    settings = list(groups_of(runs))
    for i, (setting, members) in enumerate(settings):
        name, suffix = setting_text(setting), f"-{i}" if len(settings) > 1 else ""
        answer = next((a for a in answers if a.tells_of(members[0])), None)
        if answer is not None:
            add("differences", f"Differences {name}", gains.differences, members, answer, name, suffix)
        leader = title_of(answer.leader) if answer is not None else ""
        add("clients", f"Who gains {name}", gains.clients, members, leader, name, suffix)
        add("bytes", f"Accuracy against bytes {name}", gains.bytes_of, members, name, suffix)
        add("classes", f"Recall by the share of a class {name}", gains.recall, members, name, suffix)
        add("curves", f"Difference by round {name}", gains.curves, members, name, suffix)
        add("absolute", f"Learning curves {name}", scores.compared_curves, members, name, suffix)
    for key in scores.SWEEPS:
        if key in varying(runs):
            add("sweeps", f"Accuracy against {key}", scores.sweeps, runs, key)
    if any(scores.arguments(r) for r in runs):
        add("sweeps", "Hyperparameters", scores.hyperparameters, runs)
    jobs.append(_known("training-loss", runs))
    divisions = {str(r.card.get("hash")): r for r in reversed(settings[0][1])}
    for run in sorted(divisions.values(), key=lambda r: r.seed)[:MOST_SEEDS]:
        of_seed = f", seed {run.seed}" if len(divisions) > 1 else ""
        jobs.append(_known("labels-heat", [run], of_seed))
    shown = [titled(r) for r in representatives(comparison)]
    for name in ("head-norms", "who-learns-from-whom"):
        if own := [r for r in shown if _uses(r, name)]:
            jobs.append(_known(name, own[:MOST_METHODS]))  # the models of more would take long to look at
    return jobs


def representatives(comparison: Comparison) -> list[RunResult]:
    """Return a finished run of each method, of the first setting and seed, in the order of the methods."""
    first = next(iter(groups_of(comparison.finished)))[1]
    best = [members[0] for members in scores.by_method(sorted(first, key=lambda r: r.seed)).values()]
    return sorted(best, key=lambda r: comparison.labels.index(r.label))
