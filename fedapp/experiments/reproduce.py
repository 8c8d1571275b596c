"""`fedapp reproduce`: run what the ledger of claims needs, decide each claim, and publish the outcome as it is."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedapp.config import RunConfig
from fedapp.engines import local as engines
from fedapp.engines.pool import FinishedRun, run_all
from fedapp.errors import BadRequest, between
from fedapp.experiments.compare import pending_config
from fedapp.experiments.ledger import CLAIMS, Claim, Evidence, Missing, Run, Verdict, points, rounds_to
from fedapp.experiments.studies import STUDIES, RunKey, Study, keys_of, settings_of
from fedapp.results.directory import check_writable
from fedapp.tasks import simulated as tasks

START, END = "<!-- ledger -->", "<!-- /ledger -->"


def chosen(names: Sequence[str]) -> list[Claim]:
    """Return the named claims, all if none is named.

    Raises
    ------
    BadRequest : an unknown name.
    """
    known = {c.id: c for c in CLAIMS}
    bad = [n for n in names if n not in known and list(names) != ["none"]]
    if bad:
        raise BadRequest(f"unknown claim {', '.join(bad)}: choose from {', '.join(known)}")
    if list(names) == ["none"]:
        return []
    return [known[n] for n in names] if names else list(CLAIMS)


def wanted(claims: Sequence[Claim], studies: Sequence[str]) -> list[RunKey]:
    """Return the runs that the claims need (or whole studies), each once, seed by seed."""
    pairs = [p for c in claims for p in c.runs]
    pairs += [(s, v) for s in studies for v in STUDIES[s].variants]
    keys = dict.fromkeys(keys_of(list(dict.fromkeys(pairs))))
    return sorted(keys, key=lambda k: (k.seed, list(STUDIES).index(k.study)))


def prepared(key: RunKey, out: Path, data_dir: str) -> RunConfig:
    """Return the effective configuration of one run, checked."""
    config = engines.effective({**settings_of(key, {"data-dir": data_dir})})
    tasks.check(config, config.clients)
    return config.replaced(out=str(out / key.folder))


def reproduce(
    out: Path,
    data_dir: str,
    claims: Sequence[str] = (),
    studies: Sequence[str] = (),
    minutes: float = 0.0,
    workers: int | None = None,
    doc: Path | None = None,
) -> int:
    """Run the missing runs (for at most `minutes`, 0: to the end), decide, print, and write `doc`.

    Finished runs are not run again and broken ones go on from their last checkpoint, so the ledger can be worked
    through in pieces.

    Returns
    -------
    0, or 1 if a run did not end well.

    Raises
    ------
    BadRequest : an unknown name, or a place that cannot be written to; before anything is run.
    """
    out = out.expanduser().absolute()
    selected = chosen(claims) if claims or not studies else []
    unknown = [s for s in studies if s not in STUDIES]
    if unknown:
        raise BadRequest(f"unknown study {', '.join(unknown)}: choose from {', '.join(STUDIES)}")
    keys = wanted(selected, studies)
    todo = []
    for key in keys:
        config = prepared(key, out, data_dir)
        left = pending_config(config)
        if left is not None:
            todo.append(left)
    # Hours of runs must not end in a place that cannot take what came of them.
    if todo:
        check_writable(out)
    if doc is not None:
        _around(doc)
        if not doc.exists():
            check_writable(doc.absolute().parent)
    typer.echo(f"{len(keys) - len(todo)} of {len(keys)} runs are there already", err=True)
    failed: list[FinishedRun] = []
    end = time.monotonic() + 60 * minutes
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("runs", total=len(todo))

        def on_end(ended: FinishedRun) -> None:
            progress.advance(bar)
            if ended.error:
                failed.append(ended)
            if not console.is_terminal or ended.error:
                console.print(f"{ended.out.relative_to(out)}: {ended.error or 'done'}", markup=False)

        run_all(todo, workers, on_end, lambda: bool(minutes) and time.monotonic() > end)
    evidence = Evidence(out)
    verdicts = [(c, c.decide(evidence)) for c in (selected or CLAIMS)]
    print_ledger(verdicts)
    if doc is not None:
        write(doc, verdicts, evidence)
        write_pages(doc.parent / "methods", evidence)
        typer.echo(f"written to {doc}")
    return 1 if failed else 0


def print_ledger(verdicts: Sequence[tuple[Claim, Verdict]]) -> None:
    """Print one row a claim."""
    table = Table(title="Ledger of claims", show_lines=True)
    for name in ("claim", "paper", "ours", "outcome"):
        table.add_column(name)
    for claim, verdict in verdicts:
        table.add_row(f"{claim.id}: {claim.text}", claim.paper, verdict.ours, verdict.outcome)
    Console(width=max(140, Console().width)).print(table)


def _around(doc: Path) -> tuple[str, str]:
    """Return what stands before and after the ledger in a Markdown file, which need not be there yet.

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
    counts = {o: sum(v.outcome == o for _, v in verdicts) for o in ("holds", "does not hold", "not decided")}
    lines = [
        f"{len(verdicts)} claims: " + ", ".join(f"{n} {o}" for o, n in counts.items()) + ".",
        "",
        "| claim | paper | ours | outcome |",
        "|---|---|---|---|",
    ]
    lines += [f"| **{c.id}** {c.text} | {c.paper} | {v.ours} | {v.outcome} |" for c, v in verdicts]
    lines += [
        "",
        "### The runs",
        "",
        "| study | setting | scaled down | runs | minutes |",
        "|---|---|---|---:|---:|",
    ]
    for study in STUDIES.values():
        runs, seconds = evidence.spent(study.id)
        if runs:
            settings = ", ".join(f"{k} = {v}" for k, v in study.settings.items())
            lines.append(f"| `{study.id}`: {study.title} | {settings} | {study.scaled} | {runs} | {seconds / 60:.0f} |")
    for study in STUDIES.values():
        lines += study_table(study, evidence)
    total = sum(evidence.spent(s)[1] for s in STUDIES)
    cores = tasks_cores()
    lines += [
        "",
        f"{total / 60:.0f} minutes of runs in all, two at a time on {cores} cores "
        f"({platform.machine()}, {processor()}), seeds 0 to 2, one thread a client, {versions_text()}. "
        "A busy machine takes longer; times are not results.",
    ]
    doc.write_text(head + START + "\n" + "\n".join(lines) + "\n" + END + tail, encoding="utf-8")


PAGES = {
    "fedclassavg": ("hetero-cifar10", "hetero-cifar10-skewed", "hetero-fashion", "homo-cifar10"),
    "cwfedavg": ("cw-pathological", "cw-dirichlet", "cw-dirichlet-1", "cw-mnist"),
    "fedgh": ("fedgh-cifar10", "fedgh-cifar10-6"),
    "ccvr": ("ccvr-0.5", "ccvr-0.1", "ccvr-0.05"),
}
"""Studies whose tables stand on the pages of the four methods."""


def write_pages(folder: Path, evidence: Evidence) -> None:
    """Put the studies' tables between the markers of the four methods' pages, where those exist."""
    start, end = "<!-- measured -->", "<!-- /measured -->"
    for page, studies in PAGES.items():
        path = folder / f"{page}.md"
        parts = between(path.read_text(encoding="utf-8") if path.is_file() else "", start, end)
        if parts is None:
            continue
        lines: list[str] = []
        for study in studies:
            table = study_table(STUDIES[study], evidence)
            lines += [*table, "", f"Scaled down: {STUDIES[study].scaled}."] if table else []
        head, _, tail = parts
        path.write_text(head + start + "\n" + "\n".join(lines).strip() + "\n" + end + tail, encoding="utf-8")


def study_table(study: Study, evidence: Evidence) -> list[str]:
    """Build a study's table: every finished variant, mean ± std over seeds, with the paper's number beside it.

    The target is what Standalone (else the first variant) reaches after its last round, less one point; bytes count
    both ways per client, with KT-pFL's public images once.
    """
    found: dict[str, list[Run]] = {}
    for variant in study.variants:
        with contextlib.suppress(Missing):
            found[variant] = list(evidence.runs(study.id, variant).values())
    if not found:
        return []
    calibrated = "calibration" in next(iter(found.values()))[0].summary
    lines = ["", f"#### {study.title}", "", f"`fedapp reproduce --studies {study.id} --claims none ...`", ""]
    if calibrated:
        lines += [
            "| variant | global before | after | on real features | paper |",
            "|---|---:|---:|---:|---|",
        ]
        for variant, runs in found.items():
            cells = [seeds_text([r.summary["calibration"].get(k) for r in runs]) for k in ("before", "after", "oracle")]
            lines.append(f"| {variant} | {' | '.join(cells)} | {study.paper.get(variant, '-')} |")
        return lines
    protocol = "trained"
    first = found.get("local") or next(iter(found.values()))
    target = float(np.mean([r.rounds[f"{protocol}_accuracy"].iloc[-1] for r in first])) - 0.01
    lines += [
        "| variant | received | trained | balanced received | worst client | "
        f"rounds to {100 * target:.1f} % | MB to it | paper |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for variant, runs in found.items():
        reached = [rounds_to(r, target, protocol) for r in runs]
        last = [len(r.rounds) for r in runs]
        done = all(n <= m for n, m in zip(reached, last, strict=True))
        size = [
            n * (r.summary["bytes_up"] + r.summary["bytes_down"]) + r.summary.get("public_bytes", 0)
            for n, r in zip(reached, runs, strict=True)
        ]
        cells = [
            seeds_text([r.final["received_accuracy"].mean() for r in runs]),
            seeds_text([r.final["trained_accuracy"].mean() for r in runs]),
            seeds_text([r.summary["accuracy"]["received"]["balanced"] for r in runs]),
            seeds_text([r.final["received_accuracy"].min() for r in runs]),
            f"{np.mean(reached):.1f}" if done else "not by all",
            f"{np.mean(size) / 1e6:.3g}" if done else "-",
        ]
        lines.append(f"| {variant} | {' | '.join(cells)} | {study.paper.get(variant, '-')} |")
    return lines


def seeds_text(values: Sequence[float | None]) -> str:
    """Format mean ± std over seeds in percent, or a dash."""
    numbers = np.array([v for v in values if v is not None], dtype=np.float64)
    return points(numbers) if len(numbers) > 1 else "-"


def tasks_cores() -> int:
    """Cores that can be used here."""
    from fedapp.engines.resources import usable_cores

    return usable_cores()


def processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown processor"


def versions_text() -> str:
    """Versions of what numbers depend on most."""
    from fedapp.results.directory import versions

    found = versions()
    return ", ".join(f"{p} {found[p]}" for p in ("flwr", "torch", "numpy"))
