"""Run what the ledger of claims needs, decide each claim, and publish the outcome as it is."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
from rich.table import Column, Table

from benchmarks.pages import between, markdown
from fedapp.config import RunConfig
from fedapp.engines import local as engines
from fedapp.engines.resources import usable_cores
from fedapp.errors import BadRequest, counted
from fedapp.experiments.compare import pending_config, run_here
from fedapp.results.directory import check_writable
from fedapp.results.runs import RunResult
from fedapp.results.statistics import spread
from fedapp.results.terminal import Screen, echo
from fedapp.tasks import simulated as tasks
from reproduction.ledger.archive import Archive, read
from reproduction.ledger.archive import lacking as lacking_keys
from reproduction.ledger.archive import write as write_archive
from reproduction.ledger.claims import (
    LEVEL,
    Claim,
    Evidence,
    MissingRun,
    Outcome,
    Pair,
    Verdict,
    claims,
    rounds_to,
    surviving,
    target_of,
)
from reproduction.ledger.studies import RunKey, Study, keys_of, settings_of, studies

START, END = "<!-- ledger -->", "<!-- /ledger -->"


# ---- what is run -----------------------------------------------------------------------------------------------------


def _known(what: str, names: Sequence[str], known: Iterable[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BadRequest(f"unknown {what} {', '.join(unknown)}: choose from {', '.join(known)}")


def chosen(names: Sequence[str]) -> list[Claim]:
    """Return the named claims, all if none is named, none for `none`.

    Raises
    ------
    BadRequest : an unknown name.
    """
    if list(names) == ["none"]:
        return []
    _known("claim", names, claims())
    return [claims()[name] for name in names or claims()]


def wanted(selected: Sequence[Claim], names: Sequence[str]) -> list[RunKey]:
    """Return the runs that claims and whole studies need, each once, seed by seed."""
    pairs = [pair for claim in selected for pair in claim.runs]
    pairs += [Pair(name, variant) for name in names for variant in studies()[name].variants]
    order = list(studies())
    return sorted(keys_of(dict.fromkeys(pairs)), key=lambda key: (key.seed, order.index(key.study)))


def prepared(key: RunKey, out: Path, data_dir: str) -> RunConfig:
    """Return the effective configuration of one run, checked."""
    config = engines.effective(settings_of(key, {"data-dir": data_dir}))
    tasks.check(config, config.data.clients)
    return config.replaced(out=str(out / key.folder))


def minutes_left(todo: Iterable[RunKey], seconds: Mapping[RunKey, float], workers: int) -> float | None:
    """Estimate the minutes that runs will take, from the seconds of earlier ones; None if there are no earlier ones.

    The median over the seeds of the variant counts, else that of its study, else that of all runs.
    """

    def typical(key: RunKey) -> float:
        alike = [
            [s for k, s in seconds.items() if (k.study, k.variant) == (key.study, key.variant)],
            [s for k, s in seconds.items() if k.study == key.study],
            list(seconds.values()),
        ]
        return statistics.median(next(filter(None, alike)))

    return sum(map(typical, todo)) / 60 / workers if seconds else None


def reproduce(
    out: Path | None,
    data_dir: str,
    claim_names: Sequence[str] = (),
    study_names: Sequence[str] = (),
    minutes: float = 0.0,
    workers: int | None = None,
    doc: Path | None = None,
    kept: Path | None = None,
    keep: Path | None = None,
) -> int:
    """Run the missing runs (starting none after `minutes`; 0: to the end), decide, print, and write `doc`.

    Finished runs are not run again and broken ones go on from their last checkpoint, so the ledger can be worked
    through in pieces.

    Parameters
    ----------
    out : folder of the runs; None = nothing is run.
    kept : folder with an archive of earlier runs, which count as finished while their study asks for the same.
    keep : folder whose archive takes up the finished runs.

    Returns
    -------
    0, or 1 if a run failed.

    Raises
    ------
    BadRequest : an unknown name, or a place that cannot be written to; before anything is run.
    """
    selected = chosen(claim_names) if claim_names or not study_names else []
    _known("study", study_names, studies())
    keys = wanted(selected, study_names)
    if kept is not None and not kept.is_dir():
        raise BadRequest(f"{kept} is no folder: --from names a folder that --keep has written")
    archive = read(kept) if kept is not None else Archive()
    for key, why in archive.stale.items():
        echo(f"not taken from {kept}: {key.folder}, {why}", err=True)
    lacking = [key for key in keys if key not in archive.runs]
    todo: dict[str, RunConfig] = {}
    if out is not None:
        out = out.expanduser().absolute()
        configs = {key: pending_config(prepared(key, out, data_dir)) for key in lacking}
        lacking = [key for key, config in configs.items() if config is not None]
        todo = {key.folder: config for key, config in configs.items() if config is not None}
    # Hours of runs must not end in a place that cannot take their results.
    for folder in (out if todo else None, keep):
        if folder is not None:
            check_writable(folder.expanduser().absolute())
    if doc is not None:
        _around(doc)
        if not doc.exists():
            check_writable(doc.absolute().parent)
    evidence = Evidence(out, archive.runs)
    for run in evidence.finished().values():
        if names := lacking_keys(run):
            made = run.versions.get("fedapp", "(unknown version)")
            raise BadRequest(
                f"{run.out} was made by fedapp {made}, whose runs have no {names}: its scores mean something else. "
                "Give a new --out"
            )
    _tell(keys, lacking, archive, evidence, workers if out is not None else 0)
    end = time.monotonic() + 60 * minutes
    failed = run_here(todo, workers, lambda: minutes != 0 and time.monotonic() > end) if todo else []
    evidence = Evidence(out, archive.runs)
    if keep is not None:
        written = write_archive(keep, evidence.finished())
        for key, why in written.stale.items():
            echo(f"not kept: {key.folder}, {why}", err=True)
        echo(f"{counted(len(written.runs), 'run')} kept in {keep}", err=True)
    verdicts = [(claim, claim.decide(evidence)) for claim in selected or claims().values()]
    print_ledger(verdicts)
    if doc is not None:
        write(doc, verdicts, evidence)
        echo(f"written to {doc}")
    return int(bool(failed))


def _tell(
    keys: Sequence[RunKey], lacking: Sequence[RunKey], archive: Archive, evidence: Evidence, workers: int | None
) -> None:
    """Print the number of missing runs and their expected time on standard error; `workers` is 0 if none is run."""
    echo(
        f"{len(keys) - len(lacking)} of {counted(len(keys), 'run')} {'is' if len(keys) == 1 else 'are'} there already",
        err=True,
    )
    if lacking and workers == 0:
        echo(f"missing: {', '.join(key.folder for key in lacking)} (add --out to run them)", err=True)
    elif lacking:
        known = {key: float(run.summary["seconds"]) for key, run in evidence.finished().items()}
        at_once = min(workers or usable_cores(), len(lacking))
        left = minutes_left(lacking, {**archive.seconds, **known}, at_once)
        about = (
            "no earlier run says how long"
            if left is None
            else f"about {counted(round(left), 'minute')}, {at_once} at a time"
        )
        echo(f"to run: {len(lacking)}, {about}", err=True)


# ---- what is published -----------------------------------------------------------------------------------------------


def print_ledger(verdicts: Sequence[tuple[Claim, Verdict]]) -> None:
    """Print one row per claim."""
    heads = (Column(head, overflow="fold") for head in ("claim", "paper", "ours", "outcome"))
    table = Table(*heads, title="Ledger of claims", show_lines=True)
    for claim, verdict in verdicts:
        table.add_row(f"{claim.id}: {claim.text}", claim.paper, verdict.ours, verdict.outcome)
    console = Screen()
    (console if console.is_terminal else Screen(width=max(140, console.width))).print(table)


def _around(doc: Path) -> tuple[str, str]:
    """Return what comes before and after the ledger in a Markdown file, which need not exist yet.

    Raises
    ------
    BadRequest : the file cannot be read or written, or has no place for the ledger.
    """
    text = f"# Reproduction\n\n{START}\n{END}\n"
    if doc.exists():
        try:
            with doc.open("r+", encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeError) as e:
            raise BadRequest(f"{doc} cannot be read and written as text ({e}); give another file") from e
    parts = between(text, START, END)
    if parts is None:
        raise BadRequest(f"{doc} has no markers {START} ... {END}")
    return parts[0], parts[2]


def write(doc: Path, verdicts: Sequence[tuple[Claim, Verdict]], evidence: Evidence) -> None:
    """Write the ledger between its markers in a Markdown file; the chapters around it are kept."""
    head, tail = _around(doc)
    counts = Counter(v.outcome for _, v in verdicts)
    done = evidence.finished()
    seconds = {s: [float(r.summary["seconds"]) for key, r in done.items() if key.study == s] for s in studies()}
    runs = [
        (
            f"`{study.id}`: {study.title}",
            ", ".join(f"{k} = {v}" for k, v in study.settings.items()),
            study.scaled,
            len(seconds[study.id]),
            f"{sum(seconds[study.id]) / 60:.0f}",
        )
        for study in studies().values()
        if seconds[study.id]
    ]
    made_with = Counter(_made_with(run.versions) for run in done.values())
    survives = surviving([v for _, v in verdicts])
    lines = [
        f"{len(verdicts)} claims: " + ", ".join(f"{counts[o]} {o}" for o in get_args(Outcome)) + ".",
        _by_chance([v for _, v in verdicts], survives),
        "",
        *markdown(
            "claim|paper|ours|outcome|survives Holm",
            [(f"**{c.id}** {c.text}", c.paper, v.ours, v.outcome, s) for (c, v), s in zip(verdicts, survives)],
        ),
        *_changes(verdicts, Evidence(None, done, after_a_look=LEVEL)),
        "",
        "### The runs",
        "",
        *markdown("study|setting|scaled down|runs:|minutes:", runs),
        *(line for study in studies().values() for line in study_table(study, evidence)),
        "",
        f"{sum(map(sum, seconds.values())) / 60:.0f} minutes of runs in all, seeds from 0, one thread per client: "
        + "; ".join(f"{counted(count, 'run')} on {text}" for text, count in made_with.items())
        + ". A busy machine takes longer; times are not results.",
    ]
    doc.write_text(head + START + "\n" + "\n".join(lines) + "\n" + END + tail, encoding="utf-8")


def _by_chance(verdicts: Sequence[Verdict], survives: Sequence[str]) -> str:
    """State how many decisions survive, and how many of the others chance alone would give."""
    directed = sum(not math.isnan(v.p) for v in verdicts)
    return (
        f"{directed} of them are directed and measured. {survives.count('yes')} of their decisions survive Holm's "
        f"correction, {survives.count('no')} do not; chance alone would give about {LEVEL * directed:.0f} decisions."
    )


def _changes(verdicts: Sequence[tuple[Claim, Verdict]], one_look: Evidence) -> list[str]:
    """Return the table of claims that had another outcome by the rules of version 0.2, with the rule that changed."""
    rows = []
    for claim, verdict in verdicts:
        if claim.before is not None:
            unit = claim.decide(one_look).outcome == verdict.outcome
            even = "the unit is the seed" if unit else "2.2 % after a look"
            rule = "runs differ in steps" if claim.uneven else even
            rows.append((f"`{claim.id}`", claim.before, verdict.outcome, rule))
    return ["", "### Outcomes that changed", "", *markdown("claim|version 0.2|now|rule", rows)] if rows else []


def _made_with(versions: Mapping[str, str]) -> str:
    """Name the machine and the packages of a run."""
    machine = ", ".join(versions[key] for key in ("machine", "processor") if key in versions) or "an unknown machine"
    packages = ("fedapp", "flwr", "torch", "numpy")
    return ", ".join([machine, *(f"{name} {versions[name]}" for name in packages if name in versions)])


def study_table(study: Study, evidence: Evidence) -> list[str]:
    """Build a study's table: every finished variant, mean ± std over seeds, with the paper's number next to it."""
    found: dict[str, list[RunResult]] = {}
    for variant in study.variants:
        with contextlib.suppress(MissingRun):
            found[variant] = evidence.runs(Pair(study.id, variant))
    if not found:
        return []
    calibrated = "calibration" in next(iter(found.values()))[0].summary
    numbers, cells = (_calibrations if calibrated else _accuracies)(found)
    return [
        "",
        f"#### {study.title}",
        "",
        f"`python -m reproduction claim --studies {study.id} --claims none ...`",
        "",
        *markdown(
            "|".join(["variant", "seeds:", *(f"{name}:" for name in numbers), "paper"]),
            [(name, len(found[name]), *row, study.variants[name].paper) for name, row in cells.items()],
        ),
    ]


Rows = tuple[list[str], dict[str, list[str]]]


def _calibrations(found: dict[str, list[RunResult]]) -> Rows:
    """Return the columns and cells of a study of CCVR: the global model around its calibration."""
    return ["global before", "after", "on real features"], {
        variant: [spread(r.summary["calibration"].get(key) for r in runs) for key in ("before", "after", "oracle")]
        for variant, runs in found.items()
    }


def _accuracies(found: dict[str, list[RunResult]]) -> Rows:
    """Return the columns and cells of a study: accuracies, and rounds and MB to a target.

    The target is what Standalone (else the first variant) reaches after its last round, less one point. Bytes are
    those of the rounds, both ways per client; the public images of KT-pFL are not among them.
    """
    target = target_of(found.get("local") or next(iter(found.values())), "trained")
    rows = {}
    for variant, runs in found.items():
        rounds = [rounds_to(r, target) for r in runs]
        sizes = [n * (r.summary["bytes_up"] + r.summary["bytes_down"]) for n, r in zip(rounds, runs, strict=True)]
        all_reach = all(n <= len(r.rounds) for n, r in zip(rounds, runs, strict=True))
        rows[variant] = [
            spread(r.final["received_accuracy"].mean() for r in runs),
            spread(r.final["trained_accuracy"].mean() for r in runs),
            spread(r.score("received", "balanced") for r in runs),
            spread(r.weakest("received")[0] for r in runs),
            f"{np.mean(rounds):.1f}" if all_reach else "not by all",
            f"{np.mean(sizes) / 1e6:.3g}" if all_reach else "-",
        ]
    columns = ["received", "trained", "received, all classes", "worst client"]
    return [*columns, f"rounds to {100 * target:.1f} %", "MB to it"], rows
