"""Tables and picture of docs/choosing.md: `python -m reproduction study choosing --data DIR --out runs/choosing`.

Every method of the registry runs at its own defaults on the blocks of `choosing.toml`. Finished runs
are not run again and broken ones go on from their checkpoint, so the command can be stopped and started at any time.
What they need of a run is one line of docs/choosing.jsonl, written when the run has ended. A line whose
configuration, hyperparameters or scores mean something else today is left out, and its run is repeated. Training alone
runs a second time with the partition of its seed and the next training seed. Without `--out` nothing is run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import typer
from numpy.typing import ArrayLike, NDArray

from benchmarks.pages import markdown, replaced
from fedapp import config as configuration
from fedapp import registry
from fedapp.cli.listing import notes, secure_sums
from fedapp.config import RunConfig
from fedapp.engines import local as engines
from fedapp.errors import BadRequest, counted, suggest
from fedapp.experiments.compare import pending_config, run_here
from fedapp.experiments.jobs import common_public
from fedapp.experiments.shipped import Entry, Value, read
from fedapp.method import TrainDefaults
from fedapp.results import statistics
from fedapp.results.answers import payload_of
from fedapp.results.directory import write_text
from fedapp.results.figures import plots
from fedapp.results.figures.style import Drawing
from fedapp.results.intervals import Difference, differences_of, interval_of, margin_of, points
from fedapp.results.runs import RunResult
from fedapp.results.statistics import DASH, size, tally
from reproduction.ledger.archive import LATER, identity

DOCS = Path(__file__).parents[2] / "docs"
AGAIN = "again"
"""Training alone with the same partition and the next training seed; its difference to training alone is chance."""
UNMEASURED = "*Not measured yet.*"
NEEDS = ("different networks", "one model for all", "one network, a model each")
"""Leaves of the flow chart."""
PICTURE = "pictures/gain-by-rows.svg"


class Block(Entry):
    """One setting: run-config keys next to the common ones, and in words what they are."""

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
    """A finished run; lists have one entry per client, in the order of their ids.

    Attributes
    ----------
    rows, total : training and test rows.
    received, trained : accuracy on the client's own test rows, before and after local training.
    received_all, trained_all : the same models' mean recall over all classes, on the test rows of all clients; empty in
        runs that did not measure it.
    """

    block: str
    method: str
    seed: int
    made: str
    fedapp: str
    rows: tuple[int, ...]
    total: tuple[int, ...]
    received: list[float]
    trained: list[float]
    received_all: tuple[float, ...] = ()
    trained_all: tuple[float, ...] = ()
    bytes_up: float
    bytes_down: float
    seconds: float


def definition() -> Choosing:
    """Return what is measured."""
    return read(Path(__file__).parent / "choosing.toml", Choosing)


def values_of(block: Block, method: str, seed: int, data: Path | None = None) -> dict[str, Any]:
    """Return the run-config keys of one run that are no defaults; all methods hold back the same public images.

    `method` is one of the registry or `AGAIN`. `data` is the folder with the data sets; npz data are a file in it, with
    the block's name.
    """
    values = {**definition().settings, **block.settings}
    values = common_public(values, ((name, "") for name in registry.discover()))
    if data is not None:
        values["data-dir"] = str(data / f"{block.id}.npz" if values["dataset"] == "npz" else data)
    if method == AGAIN:
        return {**values, "method": "local", "seed": seed + 1, "partition-seed": seed}
    return {**values, "method": method, "seed": seed}


def method_names() -> list[str]:
    """Return the methods of the registry and `AGAIN`."""
    return [*registry.discover(), AGAIN]


def digest(block: Block, method: str, seed: int) -> str:
    """Return what makes a run the one that it is, as 12 hexadecimal digits: its keys and the method's defaults."""
    values = values_of(block, method, seed)
    _, hparams = identity(configuration.from_flat(values_of(block, method, seed, DOCS)))
    hparams = {name: value for name, value in hparams.items() if LATER.get(name, ...) != value}
    text = json.dumps([values, hparams, asdict(registry.get(values["method"]).defaults)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def kept_of(block: Block, method: str, seed: int, run: RunResult) -> Kept:
    """Return the line of a finished run."""
    table = run.final.sort_values("client")
    # A method that fine-tunes before the last score is used after that.
    after = "tuned" if "tuned_accuracy" in table else "trained"
    columns = {
        "received": "received_accuracy", "trained": f"{after}_accuracy",
        "received_all": "received_balanced", "trained_all": f"{after}_balanced",
    }  # fmt: skip
    shares = {name: np.round(table[column], 6).tolist() for name, column in columns.items()}
    summary = run.summary
    return Kept(
        block=block.id, method=method, seed=seed, made=digest(block, method, seed),
        fedapp=str(run.versions.get("fedapp", "")), bytes_up=summary["bytes_up"], bytes_down=summary["bytes_down"],
        seconds=round(float(summary["seconds"]), 1), rows=table["num_samples"].tolist(),
        total=table[f"{after}_total"].tolist(), **shares,
    )  # fmt: skip


def load(path: Path) -> dict[tuple[str, str, int], Kept]:
    """Return the kept runs that are still what the definition asks for, by block, method and seed."""
    blocks = {block.id: block for block in definition().block}
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        one = Kept.model_validate_json(line)
        known = one.block in blocks and one.method in method_names()
        if known and one.made == digest(blocks[one.block], one.method, one.seed):
            found[one.block, one.method, one.seed] = one
        else:
            sys.stderr.write(f"left out: {one.block}/{one.method}-s{one.seed}, made with other settings\n")
    return found


def save(path: Path, runs: Iterable[Kept]) -> None:
    """Write kept runs in the order of blocks, methods and seeds."""
    blocks, methods = [block.id for block in definition().block], method_names()
    rows = sorted(runs, key=lambda r: (blocks.index(r.block), methods.index(r.method), r.seed))
    write_text(path, "".join(row.model_dump_json() + "\n" for row in rows))


def run(
    out: Path, data: Path | None, blocks: Sequence[Block], methods: Sequence[str], path: Path,
    workers: int | None, minutes: float,
) -> bool:  # fmt: skip
    """Run the entries that `path` lacks, seed by seed, write each finished run there, and start none after `minutes`.

    With 0 minutes all runs are started. Returns whether all went well.
    """
    out, kept = out.expanduser().absolute(), load(path)
    wanted: dict[str, tuple[Block, str, int]] = {}
    configs: dict[str, RunConfig] = {}
    for seed, block, method in itertools.product(range(definition().seeds), blocks, methods):
        if (block.id, method, seed) not in kept:
            name = f"{block.id}/{method}-s{seed}"
            wanted[name] = block, method, seed
            configs[name] = engines.effective(values_of(block, method, seed, data)).replaced(out=str(out / name))
    todo = {name: left for name, config in configs.items() if (left := pending_config(config)) is not None}
    sys.stderr.write(f"{len(kept)} runs are kept, {len(wanted) - len(todo)} finished below {out}, {len(todo)} to run\n")

    def keep_finished() -> None:
        for name, (block, method, seed) in list(wanted.items()):
            if (done := RunResult(out / name)).ok:
                kept[block.id, method, seed] = kept_of(block, method, seed, done)
                del wanted[name]
        save(path, kept.values())

    def is_late() -> bool:
        keep_finished()
        return minutes > 0 and time.monotonic() > end

    end = time.monotonic() + 60 * minutes
    failed = run_here(todo, workers, is_late) if todo else {}
    keep_finished()
    return not failed


Score = Literal["received", "trained"]


def headline(method: str) -> Score:
    """Return the score that a method is judged by; kept runs have fine-tuned models as trained ones."""
    return registry.get(method).deploy_as


# ---- the page --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """The methods of a block against training alone, each by its headline.

    Attributes
    ----------
    alone : mean accuracy of training alone.   margin : smallest difference that matters, a share.
    methods : by id the difference over seeds.   harm : by id, and by `AGAIN`, clients that gain, score the same, lose.
    everywhere : by id, and by `local`, the mean of the all-class score where runs have it.
    lacking : methods with runs of some setting, but not of all seeds of this one.
    """

    alone: float
    margin: float
    methods: Mapping[str, Difference]
    harm: Mapping[str, Sequence[float]]
    everywhere: Mapping[str, float]
    lacking: Sequence[str]

    def of(self, word: str) -> list[str]:
        """Return the methods with a decision, `better`, `worse`, `equal` or `open`, the largest difference first."""
        found = [m for m, d in self.methods.items() if d.word(self.margin).startswith(word)]
        return sorted(found, key=lambda m: -abs(self.methods[m].mean))


def counts_of(scores: ArrayLike, total: Sequence[int]) -> pd.DataFrame:
    """Return correct and all test rows of each client."""
    return pd.DataFrame({"correct": np.rint(np.asarray(scores) * np.asarray(total)), "total": total})


def compared(runs: Collection[Kept], block: str) -> Compared | None:
    """Compare the methods of a block with training alone; None where that lacks seeds."""
    measured = {"local", *(run.method for run in runs)}
    by: dict[str, dict[int, Kept]] = {name: {} for name in method_names() if name in measured}
    for one in sorted((r for r in runs if r.block == block), key=lambda r: r.seed):
        by[one.method][one.seed] = one
    alone = by.pop("local")
    if len(alone) < definition().seeds:
        return None

    def score(run: Kept, name: str) -> NDArray[np.float64]:
        return np.array(run.trained if name in (AGAIN, "local") else getattr(run, headline(name)))

    def counts(run: Kept, name: str) -> pd.DataFrame:
        return counts_of(score(run, name), run.total)

    def all_classes(runs: Mapping[int, Kept], name: str) -> float:
        return float(np.mean([getattr(r, f"{headline(name)}_all") for r in runs.values()]))

    complete = [name for name, found in by.items() if found.keys() == alone.keys()]
    harm = {
        name: np.mean([statistics.harm(counts(by[name][s], name), counts(alone[s], "local")) for s in alone], axis=0)
        for name in complete
    }
    methods = {
        name: [float(score(by[name][s], name).mean() - np.mean(alone[s].trained)) for s in alone]
        for name in complete
        if name != AGAIN
    }
    rows = np.concatenate([run.total for run in alone.values()])
    level = float(np.mean([np.mean(run.trained) for run in alone.values()]))
    return Compared(
        level, margin_of(level, float(np.median(rows[rows > 0]))),
        differences_of(methods, max(statistics.resolution(run.total) for run in alone.values())), harm,
        {name: all_classes(by.get(name, alone), name) for name in ("local", *methods) if alone[0].trained_all},
        [name for name in by if name not in (*complete, AGAIN)],
    )  # fmt: skip


def title(method: str) -> str:
    """Return a method's name in prose."""
    return registry.get(method).title


def in_points(found: Difference) -> str:
    """Write a difference in points with the interval of its table."""
    return f"{points(found.mean)} ({interval_of(found.low, found.high)})"


Comparisons = Sequence[tuple[Block, Compared]]


def every_block(runs: Sequence[Kept]) -> Comparisons:
    """Return the blocks that can be compared, with their comparisons."""
    blocks = [(block, compared(runs, block.id)) for block in definition().block]
    return [(block, found) for block, found in blocks if found is not None]


def answer(runs: Sequence[Kept], known: Comparisons) -> list[str]:
    """Return the sentences with which the page begins."""
    if not known:
        return [UNMEASURED]
    total = {word: sum(len(c.of(word)) for _, c in known) for word in ("better", "worse", "equal", "open")}
    lines = [
        f"{counted(sum(total.values()), 'comparison')} with training alone ({counted(len(known), 'setting')}, "
        f"{counted(definition().seeds, 'seed')} each; each method's [headline](scores.md#the-headline) on the clients' "
        f"own test rows; 95 % intervals for all methods of a setting together): {total['better']} better, "
        f"{total['worse']} worse, {total['equal']} equal within the margin, {total['open']} open "
        "([words](comparing.md#how-sure-is-a-difference))."
    ]
    for block, found in known:
        better = found.of("better")
        if not better and float(block.settings.get("fraction-train", 1)) < 1:
            lines.append(
                f"With a part of the clients in each round ({block.title}), no method is better than training alone."
            )
        for method in better[:1]:
            gain, same, lose = found.harm[method]
            once = ", and statistics once" * (notes()[method]["costs"][2] > 0)
            worse = _elsewhere(known, method)
            lines.append(
                f"**{title(method)}** is better by {in_points(found.methods[method])} points ({block.title}). It helps "
                f"{tally([[gain]])} of {tally([[gain + same + lose]])} clients there and harms {tally([[lose]])}."
                f"{f' It is {worse}.' if worse else ''} A client sends {size(sent_in(block, runs)[method])} a "
                f"round{once}. {payload_of(method)}"
            )
        others = [
            f"{title(m)} by {in_points(found.methods[m])}{f', {worse}' if (worse := _elsewhere(known, m)) else ''}"
            for m in better[1:]
        ]
        if others:
            lines.append(f"Better there too: {'; '.join(others)}.")
    return [" ".join(lines), *whom_and_cost(runs, known)]


def _elsewhere(known: Comparisons, method: str) -> str:
    """Return the settings in which a method is worse than training alone; an empty string where there are none."""
    harmful = [f"{100 * c.methods[method].mean:+.1f} ({b.title})" for b, c in known if method in c.of("worse")]
    return f"worse elsewhere: {', '.join(harmful)}" if harmful else ""


def other_defaults() -> str:
    """Return the sentence that names the methods with training defaults of their own."""
    usual, found = asdict(TrainDefaults()), []
    for method in registry.discover():
        own = [f"{k} {v}" for k, v in asdict(registry.get(method).defaults).items() if v != usual[k]]
        if own:
            found.append(f"{title(method)} ({', '.join(own).replace('lr_digits', 'lr on digits')})")
    return f"Training keys differ for {', '.join(found)}; all others have the common defaults."


def missing(runs: Sequence[Kept], known: Comparisons) -> list[str]:
    """Return sentences that name methods and settings without all their runs."""
    absent = [title(m) for m in registry.discover() if m not in {run.method for run in runs}]
    absent += [b.title for b in definition().block if b.id not in {block.id for block, _ in known}]
    lines = [f"Not measured yet: {'; '.join(absent)}."] if absent else []
    for block, found in known:
        if found.lacking:
            lines.append(f"Not finished in all seeds ({block.title}): {', '.join(map(title, found.lacking))}.")
    return [" ".join(lines)]


def settings(known: Comparisons) -> list[str]:
    """Return the table of settings, with the definition of a losing client."""
    if not known:
        return [UNMEASURED]
    harm = "A client loses where its correct test rows fall by more than one standard error of the difference."
    if chance := [100 * c.harm[AGAIN][2] / sum(c.harm[AGAIN]) for _, c in known if AGAIN in c.harm]:
        harm += (
            f" Training alone, run again with another training seed, makes {min(chance):.0f} to {max(chance):.0f} % of "
            "the clients of a setting lose by chance."
        )
    rows, whole = [], all(AGAIN in c.harm and c.everywhere for _, c in known)
    for block, c in known:
        better = [f"{title(m)} {in_points(c.methods[m])}" for m in c.of("better")]
        losing = max(c.methods, key=lambda m: c.harm[m][2])
        row = [
            block.title, f"{100 * c.alone:.1f}", ", ".join(better) or "none",
            " / ".join(str(len(c.of(word))) for word in ("equal", "open", "worse")),
            f"{title(losing)}, {c.harm[losing][2]:.1f} of {sum(c.harm[losing]):.0f}",
        ]  # fmt: skip
        if whole:
            widest = max(c.everywhere, key=lambda m: c.everywhere[m])
            row += [
                f"{c.harm[AGAIN][2]:.1f}",
                f"{title(widest)}, {100 * c.everywhere[widest]:.1f} (alone {100 * c.everywhere['local']:.1f})",
            ]
        rows.append(row)
    heads = "setting|alone, %:|better than alone, points|equal / open / worse:|most clients lose"
    heads += "|lose by chance:|highest on all classes, %" if whole else ""
    return [harm, "", *markdown(heads, rows)]


def sent_in(block: Block, runs: Sequence[Kept]) -> dict[str, float]:
    """Return the bytes that a client sends in a round of a setting, by method."""
    return {run.method: run.bytes_up for run in runs if run.block == block.id}


def whom_and_cost(runs: Sequence[Kept], known: Comparisons) -> list[str]:
    """Return a paragraph on whom the methods of the shortlist help and harm, and what they cost and reveal."""
    methods = listed(known)
    if not methods:
        return []
    clients = {m: np.sum([c.harm[m] for _, c in known], axis=0) for m in methods}
    gain, _, lose = ([100 * of[i] / of.sum() for of in clients.values()] for i in range(3))
    sent = [up for m, up in sent_in(known[0][0], runs).items() if m in methods]
    return [
        "",
        f"The {counted(len(methods), 'method')} of the shortlist help {min(gain):.0f} to {max(gain):.0f} % of all "
        f"clients and harm {min(lose):.0f} to {max(lose):.0f} %. A client sends {size(min(sent))} to {size(max(sent))} "
        f"a round ({known[0][0].title}), class statistics with {sum(map(reveals_classes, methods))} of them.",
    ]


def listed(known: Comparisons) -> list[str]:
    """Return the methods that are worse than training alone in no setting."""
    shown = [m for m in registry.discover() if m != "local" and all(m in c.methods for _, c in known)]
    return [m for m in shown if not any(m in c.of("worse") for _, c in known)]


def reveals_classes(method: str) -> bool:
    """Whether a method's replies have statistics of single classes at its defaults."""
    of = registry.get(method)
    return of.class_threshold(of.hparams()) is not None


def shortlist(runs: Sequence[Kept], known: Comparisons) -> list[str]:
    """Return the methods that are worse than training alone in no setting, by what they need and reveal."""
    if not known:
        return [UNMEASURED]
    shown = listed(known)
    least = {m: min(c.methods[m].mean for _, c in known) for m in shown}
    leaves: dict[str, tuple[list[str], list[str]]] = {need: ([], []) for need in NEEDS}
    for method in sorted(shown, key=lambda m: -least[m]):
        of = registry.get(method)
        need = NEEDS[0 if of.heterogeneous else 1 if of.global_model else 2]
        rows_too = ", public rows," * bool(of.public_share)
        text = f"[{title(method)}](methods/{method}.md){rows_too} {100 * least[method]:+.1f}"
        leaves[need][reveals_classes(method)].append(text)
    short = [(need, *(", ".join(found) or "none" for found in both)) for need, both in leaves.items()]
    measured = len({run.method for run in runs} - {"local", AGAIN})
    return [
        f"In no setting is one of these {len(shown)} of {measured} methods shown to be worse than training alone. The "
        "number is its lowest mean difference in a setting, in points. Weights show class sizes too "
        "([threat model](threat-model.md#what-replies-reveal)).",
        "", *markdown("need|sends no class statistics|sends class statistics", short),
    ]  # fmt: skip


def details(runs: Sequence[Kept], known: Comparisons) -> list[str]:
    """Return the table of needs, bytes and intervals of the methods of the shortlist."""
    if not known:
        return [UNMEASURED]
    sent = sent_in(known[0][0], runs)

    def needs(method: str) -> tuple[bool, bool, bool, float]:
        of = registry.get(method)
        return not of.heterogeneous, reveals_classes(method), bool(of.public_share), sent[method]

    rows: list[tuple[str, ...]] = [(title("local"), "any", "no", DASH, "0.0", *[DASH] * 3)]
    for method in sorted(listed(known), key=needs):
        one, reveals, public, up = needs(method)
        ordered = sorted(known, key=lambda pair: pair[1].methods[method].mean)
        low, high = (f"{in_points(c.methods[method])}, {block.id}" for block, c in (ordered[0], ordered[-1]))
        decided = " / ".join(str(sum(method in c.of(word) for _, c in known)) for word in ("better", "equal", "open"))
        rows.append((
            title(method), f"{'one' if one else 'any'}{', public rows' if public else ''}",
            "yes" if reveals else "no", secure_sums(registry.get(method)), f"{up / 1000:.1f}", decided, low, high,
        ))  # fmt: skip
    heads = "method|architectures|class statistics|secure sums|up, kB:|better / equal / open:|lowest, points"
    worse = {m: min(c.methods[m].mean for _, c in known) for m in {m for _, c in known for m in c.of("worse")}}
    absent = ", ".join(f"{title(m)} {100 * worse[m]:+.1f}" for m in sorted(worse, key=lambda m: -worse[m]))
    return [
        f"*Up*: {known[0][0].title}. *Lowest* and *highest*: difference to training alone in a setting. "
        "[Secure sums](secure-sums.md), where there is *yes*, hide class sizes too.",
        "", *markdown(f"{heads}|highest, points", rows), "",
        f"Not on the shortlist, with the lowest difference: {absent or 'none'}.",
    ]  # fmt: skip


def gains(runs: Sequence[Kept], known: Comparisons) -> Drawing | None:
    """Draw each client's median gain with the methods of the shortlist against its training rows.

    Returns None where no setting is complete or the shortlist is empty.
    """
    by, tables = {(r.block, r.method, r.seed): r for r in runs}, []
    methods = listed(known) if known else []
    for (block, _), seed in itertools.product(known if methods else (), range(definition().seeds)):
        alone = by[block.id, "local", seed]
        median = np.median([getattr(by[block.id, m, seed], headline(m)) for m in methods], axis=0)
        right = pd.DataFrame({"correct": median * np.array(alone.total), "total": alone.total})
        sides = statistics.sides(right, counts_of(alone.trained, alone.total))
        tables.append(sides.join(pd.Series(alone.rows, name="rows")))
    if not tables:
        return None
    table = pd.concat(tables)
    gain, half = 100 * (table["score"] - table["alone"]), table["rows"].median()
    few, many = (float(gain[side].mean()) for side in (table["rows"] <= half, table["rows"] > half))
    caption = (
        f"A mark is a client of one seed, its gain the median over the {counted(len(methods), 'method')} of the "
        f"shortlist. Of {len(table)} clients, those with at most {half:.0f} training rows gain {few:+.1f} points on "
        f"average, those with more {many:+.1f}."
    )
    figure = plots.gain_by_rows({counted(len(known), "setting"): (table, [""] * len(table))})
    return Drawing("gain-by-rows", "", caption, "Scatter plot of gains in points against training rows", figure)


def page(text: str, runs: Sequence[Kept]) -> tuple[str, str]:
    """Return the page with the answer, the shortlist and the gains that `runs` give, and the picture of the gains."""
    known = every_block(runs)
    drawing = gains(runs, known)
    shown = [UNMEASURED] if drawing is None else [drawing.caption, "", f"![{drawing.alt}]({PICTURE})"]
    tables = {
        "answer": answer(runs, known), "shortlist": shortlist(runs, known),
        "missing": missing(runs, known), "keys": [other_defaults()], "settings": settings(known),
        "details": details(runs, known), "gains": shown,
    }  # fmt: skip
    for name, lines in tables.items():
        text = replaced(text, name, lines)
    return text, "" if drawing is None else f"{drawing.svg(text=False)}<!-- {drawing.caption} -->\n"


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


def main(
    out: Annotated[Path | None, typer.Option(help="folder of the runs (default: run nothing)")] = None,
    data: Annotated[Path | None, typer.Option(help="folder with the published data sets and har.npz")] = None,
    only: Annotated[str, typer.Option(help="blocks, with commas (default: all)")] = "",
    methods: Annotated[str, typer.Option(help="methods, with commas (default: all)")] = "",
    workers: Annotated[int | None, typer.Option(help="processes at a time (default: one per core)")] = None,
    minutes: Annotated[float, typer.Option(help="start no run after so long; 0: to the end")] = 0.0,
    kept: Path = DOCS / "choosing.jsonl",
    doc: Path = DOCS / "choosing.md",
) -> int:
    """Run what is asked for, keep it, and write the tables."""
    blocks = {block.id: block for block in definition().block}
    chosen = [blocks[name] for name in named(only, list(blocks), "block")]
    wanted, well = named(methods, method_names(), "method"), True
    if out is not None:
        well = run(out, data, chosen, wanted, kept, workers, minutes)
    text, picture = page(doc.read_text(encoding="utf-8"), list(load(kept).values()))
    write_text(doc, text)
    if picture:
        file = doc.parent / PICTURE
        file.parent.mkdir(exist_ok=True)
        write_text(file, picture)
    return int(not well)
