"""The measured tables of docs/choosing.md: `python -m reproduction study choosing --data DIR --out runs/choosing`.

Every method of the registry runs at its own defaults on the blocks of `choosing.toml`. Finished runs
are not run again and broken ones go on from their checkpoint, so the command can be stopped and started at any time.
What the tables need of a run is one line of docs/choosing.jsonl; a line whose configuration, hyperparameters or scores
mean something else today is left out and its run made anew. Without `--out` nothing is run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.pages import markdown, replaced
from fedapp import config as configuration
from fedapp import registry
from fedapp.config import RunConfig
from fedapp.engines import local as engines
from fedapp.errors import BadRequest, suggest
from fedapp.experiments.compare import pending_config, run_here
from fedapp.experiments.jobs import common_public
from fedapp.experiments.shipped import Entry, Value, read
from fedapp.results.directory import write_text
from fedapp.results.runs import RunResult
from fedapp.results.statistics import DASH, interval, spread, tally, worst
from reproduction.ledger.archive import identity

DOCS = Path(__file__).parents[2] / "docs"
OVERVIEW = "overview"
UNMEASURED = "*Not measured yet.*"


class Block(Entry):
    """One setting: run-config keys beside the common ones, and in words what they are."""

    id: str
    title: str
    scaled: str
    settings: dict[str, Value]


class Choosing(Entry):
    """The file."""

    seeds: int
    settings: dict[str, Value]
    block: tuple[Block, ...]


class Kept(Entry):
    """A finished run: accuracies of its clients in the order of their ids, before and after local training."""

    block: str
    method: str
    seed: int
    made: str
    fedapp: str
    received: list[float]
    trained: list[float]
    bytes_up: float
    bytes_down: float
    seconds: float


def definition() -> Choosing:
    """Return what is measured."""
    return read(Path(__file__).parent / "choosing.toml", Choosing)


def values_of(block: Block, method: str, seed: int, data: Path | None = None) -> dict[str, Any]:
    """Return the run-config keys of one run that are no defaults; all methods hold back the same public images.

    `data` is the folder with the data sets; npz data are a file in it, with the block's name.
    """
    values = {**definition().settings, **block.settings}
    values = common_public(values, ((name, "") for name in registry.discover()))
    if data is not None:
        values["data-dir"] = str(data / f"{block.id}.npz" if values["dataset"] == "npz" else data)
    return {**values, "method": method, "seed": seed}


def digest(block: Block, method: str, seed: int) -> str:
    """Return what makes a run the one that it is, as 12 hexadecimal digits: its keys and the method's defaults."""
    values = values_of(block, method, seed)
    _, hparams = identity(configuration.from_flat(values_of(block, method, seed, DOCS)))
    text = json.dumps([values, hparams, asdict(registry.get(method).defaults)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def kept_of(block: Block, run: RunResult) -> Kept:
    """Return what is kept of a finished run."""
    table = run.final.sort_values("client")
    # A method that fine-tunes before the last score is used after that.
    after = "tuned" if "tuned_accuracy" in table else "trained"
    columns = {"received": "received", "trained": after}
    shares = {name: np.round(table[f"{column}_accuracy"], 6).tolist() for name, column in columns.items()}
    summary = run.summary
    return Kept(
        block=block.id, method=run.method, seed=run.seed, made=digest(block, run.method, run.seed),
        fedapp=str(run.versions.get("fedapp", "")), bytes_up=summary["bytes_up"], bytes_down=summary["bytes_down"],
        seconds=round(float(summary["seconds"]), 1), **shares,
    )  # fmt: skip


def load(path: Path) -> dict[tuple[str, str, int], Kept]:
    """Return the kept runs that are still what the definition asks for, by block, method and seed."""
    blocks = {block.id: block for block in definition().block}
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        one = Kept.model_validate_json(line)
        known = one.block in blocks and one.method in registry.discover()
        if known and one.made == digest(blocks[one.block], one.method, one.seed):
            found[one.block, one.method, one.seed] = one
        else:
            sys.stderr.write(f"left out: {one.block}/{one.method}-s{one.seed}, made with other settings\n")
    return found


def save(path: Path, runs: Iterable[Kept]) -> None:
    """Write kept runs in the order of blocks, methods and seeds."""
    blocks, methods = [block.id for block in definition().block], list(registry.discover())
    rows = sorted(runs, key=lambda r: (blocks.index(r.block), methods.index(r.method), r.seed))
    write_text(path, "".join(row.model_dump_json() + "\n" for row in rows))


def run(
    out: Path, data: Path | None, blocks: Sequence[Block], methods: Sequence[str], there: Mapping[Any, Kept],
    workers: int | None, minutes: float,
) -> tuple[list[Kept], bool]:  # fmt: skip
    """Run what is missing, seed by seed, and start nothing after `minutes` (0: to the end).

    Returns
    -------
    What finished now or earlier below `out`, and whether all went well.
    """
    out = out.expanduser().absolute()
    wanted: dict[str, tuple[Block, RunConfig]] = {}
    for seed in range(definition().seeds):
        for block in blocks:
            for method in methods:
                if (block.id, method, seed) not in there:
                    name = f"{block.id}/{method}-s{seed}"
                    config = engines.effective(values_of(block, method, seed, data))
                    wanted[name] = block, config.replaced(out=str(out / name))
    todo = {name: left for name, (_, config) in wanted.items() if (left := pending_config(config)) is not None}
    sys.stderr.write(
        f"{len(there)} runs are kept, {len(wanted) - len(todo)} finished below {out}, {len(todo)} to run\n"
    )
    end = time.monotonic() + 60 * minutes
    failed = run_here(todo, workers, lambda: minutes > 0 and time.monotonic() > end) if todo else {}
    done = [(block, RunResult(Path(config.storage.out))) for block, config in wanted.values()]
    return [kept_of(block, one) for block, one in done if one.ok], not failed


# ---- tables ----------------------------------------------------------------------------------------------------------

Group = Mapping[str, Sequence[Kept]]
Score = Literal["received", "trained"]
SCORES: tuple[Score, ...] = ("received", "trained")


def of_block(runs: Iterable[Kept], block: str) -> dict[str, list[Kept]]:
    """Return a block's runs by method, in the order of the seeds."""
    found: dict[str, list[Kept]] = {name: [] for name in registry.discover()}
    for one in sorted((r for r in runs if r.block == block), key=lambda r: r.seed):
        found[one.method].append(one)
    return {name: rows for name, rows in found.items() if rows}


def gains(runs: Group, method: str, score: Score = "trained") -> list[float]:
    """Return a mean accuracy minus that of training alone, of each seed that both have."""
    alone = {r.seed: float(np.mean(r.trained)) for r in runs.get("local", ())}
    return [float(np.mean(getattr(r, score))) - alone[r.seed] for r in runs.get(method, ()) if r.seed in alone]


def headline(method: str) -> Score:
    """Return the score that a method is judged by; what is kept of a run has fine-tuned models as trained ones."""
    return registry.get(method).deploy_as


def resolution(runs: Group) -> float:
    """Return the smallest step of a mean over clients.

    Test rows are not kept. One row of a client is the smallest difference between its scores, over all methods.
    """
    by_seed: dict[int, list[list[float]]] = {}
    for one in (r for members in runs.values() for r in members):
        by_seed.setdefault(one.seed, []).extend([one.received, one.trained])
    scores = [np.unique(column) for rows in by_seed.values() for column in np.array(rows).T]
    steps = [np.diff(values).min() for values in scores if len(values) > 1]
    clients = len(next(iter(by_seed.values()))[0])
    return float(np.median(steps)) / clients if steps else math.nan


def gain(values: Sequence[float], step: float) -> str:
    """Write a difference in points with the 90 % interval of its mean over seeds; `step` is its resolution."""
    if not values:
        return DASH
    low, high = (f"{100 * end:+.1f}" for end in interval(values, step)) if len(values) > 1 else ("", "")
    return f"{100 * np.mean(values):+.1f}" + (f" ({low} to {high})" if low else "")


def both(scores: Sequence[Any]) -> str:
    """Write mean over clients and mean of their worst tenth, each mean ± std over seeds; scores by seed and client."""
    return f"{spread(np.mean(s) for s in scores)} / {spread(worst(s)[1] for s in scores)}"


def harmed(runs: Group, method: str) -> str:
    """Write how many clients have a higher, an equal and a lower headline than alone, as means over seeds.

    Test rows are not kept, so only scores that are exactly equal count as the same.
    """
    alone = {r.seed: np.array(r.trained) for r in runs.get("local", ())}
    signs = [np.sign(getattr(r, headline(method)) - alone[r.seed]) for r in runs[method] if r.seed in alone]
    return tally([[float((s == sign).sum()) for sign in (1, 0, -1)] for s in signs if method != "local"])


def block_table(runs: Group) -> list[str]:
    """Build the table of one block; what gains most comes first, training alone at its place."""
    rows, step = [], resolution(runs)
    for name in sorted(runs, key=lambda m: -float(np.mean(gains(runs, m, headline(m)) or [-1.0]))):
        here = runs[name]
        received = DASH if name == "local" else both([r.received for r in here])
        differences = [DASH if name == "local" else gain(gains(runs, name, score), step) for score in SCORES]
        scores = received, both([r.trained for r in here])
        rows.append((registry.get(name).title, len(here), *scores, *differences, headline(name), harmed(runs, name)))
    heads = "method|seeds:|as received|after local training|received to alone|trained to alone"
    return markdown(f"{heads}|headline|gain / same / lose:", rows)


def marked(values: Sequence[float], step: float) -> str:
    """Write a difference in points, bold where the 90 % interval of its mean excludes zero; see :func:`gain`."""
    low, high = interval(values, step)
    apart = low * high > 0  # no interval, with one seed, is NaN
    text = f"{100 * np.mean(values):+.1f}"
    return f"**{text}**" if apart else text


def overview_table(runs: Sequence[Kept]) -> list[str]:
    """Build the table of differences to training alone, as received and trained, methods by blocks."""
    blocks = {b.id: of_block(runs, b.id) for b in definition().block}
    blocks = {name: found for name, found in blocks.items() if found}
    steps = {block: resolution(found) for block, found in blocks.items()}
    rows = []
    for name in registry.discover():
        cells = []
        for block, found in blocks.items():
            both = [gains(found, name, score) if name != "local" else [] for score in SCORES]
            cells.append(" / ".join(marked(values, steps[block]) for values in both) if any(both) else DASH)
        if set(cells) != {DASH}:
            rows.append((registry.get(name).title, *cells))
    return markdown("|".join(["method", *(f"{name}:" for name in blocks)]), rows)


def page(text: str, runs: Sequence[Kept]) -> str:
    """Return the page with every table of `runs`; a block without runs says that it was not measured."""
    for block in definition().block:
        found = of_block(runs, block.id)
        text = replaced(text, block.id, block_table(found) if found else [UNMEASURED])
    return replaced(text, OVERVIEW, overview_table(runs)) if runs else text


def named(text: str, known: Sequence[str], what: str) -> list[str]:
    """Return names from a list with commas, all if it is empty.

    Raises
    ------
    BadRequest : an unknown one.
    """
    names = [name.strip() for name in text.split(",") if name.strip()] or list(known)
    for name in names:
        if name not in known:
            raise BadRequest(f"no {what} '{name}'{suggest(name, known)}")
    return names


def main() -> int:
    """Run what is asked for, keep it, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the runs (default: run nothing)")
    parser.add_argument("--data", type=Path, help="folder with the published data sets and har.npz")
    parser.add_argument("--only", default="", help="blocks, with commas (default: all)")
    parser.add_argument("--methods", default="", help="methods, with commas (default: all)")
    parser.add_argument("--workers", type=int, help="processes at a time (default: one per core)")
    parser.add_argument("--minutes", type=float, default=0.0, help="start no run after so long (default: to the end)")
    parser.add_argument("--kept", type=Path, default=DOCS / "choosing.jsonl", help="(default: %(default)s)")
    parser.add_argument("--doc", type=Path, default=DOCS / "choosing.md", help="(default: %(default)s)")
    args = parser.parse_args()
    blocks = {block.id: block for block in definition().block}
    try:
        chosen = [blocks[name] for name in named(args.only, list(blocks), "block")]
        methods = named(args.methods, list(registry.discover()), "method")
        kept, well = load(args.kept), True
        if args.out is not None:
            new, well = run(args.out, args.data, chosen, methods, kept, args.workers, args.minutes)
            kept |= {(one.block, one.method, one.seed): one for one in new}
            save(args.kept, kept.values())
        args.doc.write_text(page(args.doc.read_text(encoding="utf-8"), list(kept.values())), encoding="utf-8")
    except BadRequest as e:
        sys.stderr.write(f"choosing: {e}\n")
        return 2
    return int(not well)


if __name__ == "__main__":
    sys.exit(main())
