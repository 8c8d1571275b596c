"""The search over hyperparameters of a comparison: every point of a grid is run, validation images choose.

The points of one method and setting are compared by their mean over seeds on the images that `validation` holds out
from the clients' training images. Test scores are looked at for the chosen point alone: no table of the comparison
holds those of the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

import pandas as pd

from fedapp import registry
from fedapp.errors import BadRequest, plain_value
from fedapp.experiments.jobs import Job
from fedapp.results.runs import RunResult
from fedapp.results.statistics import mean_and_std


def parse(text: str, option: str) -> dict[str, list[str]]:
    """Read `NAME=VALUE,VALUE;NAME=VALUE`: the values of each name, in their order.

    Raises
    ------
    BadRequest : an entry of another form, none at all, or a name or a value that stands twice (0.1 and 0.10 are one).
    """
    found: dict[str, list[str]] = {}
    for entry in filter(str.strip, text.split(";")):
        name, sep, values = (part.strip() for part in entry.partition("="))
        listed = [value.strip() for value in values.split(",")]
        if not name or not sep or not all(listed):
            raise BadRequest(f"{option}: '{entry.strip()}' is not NAME=VALUE,VALUE (a semicolon between two names)")
        if name in found or len(set(map(plain_value, listed))) < len(listed):
            raise BadRequest(f"{option} names {name if name in found else f'a value of {name}'} twice")
        found[name] = listed
    if text and not found:
        raise BadRequest(f"{option} '{text}' names nothing: give NAME=VALUE,VALUE")
    return found


def points(axes: Mapping[str, Sequence[str]]) -> Iterator[list[str]]:
    """Yield every point of a grid as `name=value` texts; the last name changes fastest."""
    for values in product(*axes.values()):
        yield [f"{name}={value}" for name, value in zip(axes, values)]


def choosing(method: str) -> tuple[str, ...]:
    """Return the scores that are measured on validation images, the clients' own; the first that a run has chooses."""
    return tuple(p for p in registry.get(method).headlines if p != "global")


def beforehand(jobs: Sequence[Job], option: str) -> list[str]:
    """Name the score that chooses points where a method also has a `global` score, which cannot choose.

    Parameters
    ----------
    option : of the search, for messages.

    Raises
    ------
    BadRequest : there are no validation images, or the runs measure no score that those have.
    """
    config = jobs[0].config
    if not config.data.validation:
        raise BadRequest(f"{option} chooses on validation rows: hold some out with --set validation=0.1")
    methods = dict.fromkeys(j.variant.method for j in jobs)
    if not any(p in config.evaluation.measured for p in choosing(jobs[0].variant.method)):
        raise BadRequest(
            f"{option}: protocols = '{config.evaluation.protocols}' measures nothing on validation rows, which "
            "clients hold out. Measure received and trained as well (--set protocols=received,trained,global): they "
            "choose the points"
        )
    if "global" not in config.evaluation.measured:
        return []
    named: dict[str, list[str]] = {}
    for method in (m for m in methods if registry.get(m).global_model):
        by = next(p for p in choosing(method) if p in config.evaluation.measured)
        named.setdefault(by, []).extend(dict.fromkeys(j.variant.family for j in jobs if j.variant.method == method))
    return [
        f"{option}: global has no validation rows, so {by} chooses for {', '.join(families)}; where the published "
        "number is global (as for CCVR), the chosen point need not be the best one for it"
        for by, families in named.items()
    ]


def validation_score(run: RunResult) -> float:
    """Return the mean accuracy over clients on their validation images, of the headline where it was measured."""
    scores = (run.score(protocol, "validation") for protocol in choosing(run.method))
    return next((score for score in scores if math.isfinite(score)), math.nan)


def choose(
    tried: Sequence[Job], jobs: Sequence[Job], option: str
) -> tuple[pd.DataFrame, list[Job], list[str], list[str]]:
    """Choose the point with the highest validation score for each method and setting; the first of equal points.

    Parameters
    ----------
    tried : all runs of the search. A run that diverged or was refused leaves its point out. Any other run that is not
        there leaves its method without a choice.
    jobs : the runs of all points, those of seeds that the search leaves out too.   option : of the search.

    Returns
    -------
    The content of `grid.csv`, the runs of the chosen points under the names of their methods, a line for each choice,
    and the lines of methods without one.
    """
    families: dict[tuple[str, str], dict[str, list[Job]]] = {}
    for job in tried:
        found = families.setdefault((job.setting, job.variant.family), {})
        found.setdefault(job.variant.label, []).append(job)
    rows, chosen, lines, unchosen = [], [], list[str](), list[str]()
    for (setting, family), members in families.items():
        finished = {label for label, runs in members.items() if all(j.result.ok for j in runs)}
        scores = {
            label: mean_and_std(validation_score(j.result) for j in runs if label in finished)
            for label, runs in members.items()
        }
        best = max(scores, key=lambda label: (math.isfinite(mean := scores[label][0]), mean))
        whole = all(j.result.ok or j.result.repeats for runs in members.values() for j in runs)
        known = whole and math.isfinite(scores[best][0])
        for label, (mean, std) in scores.items():
            rows.append({
                "setting": setting, "method": family, "variant": label, "seeds": len(members[label]),
                "validation": mean, "validation_std": std, "chosen": known and label == best,
            })  # fmt: skip
        where = f"{setting} {family}".strip()
        if known:
            chosen += [
                replace(j, variant=replace(j.variant, label=family))
                for j in jobs
                if (j.setting, j.variant.label) == (setting, best)
            ]
            lines.append(f"{where}: {best} of {len(members)}, {100 * scores[best][0]:.1f} % on validation rows")
        else:
            why = "has a score on validation rows" if finished else "has finished with all of its seeds"
            why = f"no point of the grid {why}" if whole else "not all points have run: repeat the command"
            unchosen.append(f"{where}: nothing chosen, {why}")
            lines.append(unchosen[-1])
    return pd.DataFrame(rows), chosen, [f"chosen by {option}:", *lines], unchosen
