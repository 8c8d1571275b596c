"""Methods x data sets x partitions x seeds: full run directories, tidy tables, one report; resumable.

| file               | content                                                                                  |
|--------------------|------------------------------------------------------------------------------------------|
| `runs/`            | a run directory for each `<method>-s<seed>`; with several data sets or partitions in a    |
|                    | folder `<dataset>-<partition>`                                                           |
| `results.csv`      | one row per run                                                                          |
| `curves.csv`       | one row per run, round and protocol                                                      |
| `significance.csv` | one row per measure and method: its difference to the reference                          |
| `again/`           | from three seeds on: training alone a second time, with the next training seed           |
| `again.csv`        | one row per run in it                                                                    |
| `notes.json`       | alerts and notes                                                                         |
| `grid.csv`         | with `--grid`: one row per point, its validation score, and whether it was chosen        |
| `report.html`      | all of it on one page                                                                    |

Finished runs are not run again, broken ones are continued from their last checkpoint.

The file is long because it goes from the words of `--methods` to the exit code.
"""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, Self

from fedapp import __version__, process, registry
from fedapp import config as configuration
from fedapp.config import OWN_SETTINGS, RunConfig
from fedapp.data import flower
from fedapp.data.card import data_card
from fedapp.data.partitions import PARTITION_PARAMETER
from fedapp.engines import local as engines
from fedapp.engines import pool, runner
from fedapp.engines import superlink as launch
from fedapp.engines.progress import Display
from fedapp.engines.resources import usable_cores
from fedapp.errors import BadRequest, counted, named_values, plain_value, suggest_choice
from fedapp.experiments import grid, tables
from fedapp.experiments.jobs import Job, Variant, common_public
from fedapp.files import absolute, explained
from fedapp.models import IDENTITY, head_width, is_own
from fedapp.results import answers
from fedapp.results.cells import write_table
from fedapp.results.directory import (
    OURS,
    check_out,
    check_writable,
    new_folder,
    only_writer,
    removed_if_empty,
    short_path,
)
from fedapp.results.runs import AGAIN, GRID, Comparison, RunResult
from fedapp.results.terminal import announce, echo
from fedapp.tasks import identity
from fedapp.tasks import simulated as tasks

SWEPT = ("clients", "fraction-train", "num-server-rounds", "split")
"""Run-config keys that `--sweep` takes: the runs of a value are a setting of their own."""
DEFAULT_METHODS = "local,lgfedavg,fedclassavg"
TUNE = "--tune"
"""The option of the search that is the same for all methods."""
DEFAULT_SEEDS = 3
VALIDATION = 0.1
"""Share of the training rows on which `--tune` chooses, where the run-config names none."""
FEWEST_SEEDS = 3
"""Seeds from which on training alone runs a second time."""


# ---- the runs --------------------------------------------------------------------------------------------------------


def entries(text: str) -> list[str]:
    """Return the parts of a text with commas between them, outside of brackets."""
    return [entry.strip() for entry in re.split(r",(?![^(]*\))", text) if entry.strip()]


def parse_variants(text: str) -> list[Variant]:
    """Read `--methods`: ids with commas between them, each perhaps with `(name=value name=value)`.

    A name in the brackets is a hyperparameter of the method; where the method has none of that name, it is one of the
    run-config keys :data:`OWN_SETTINGS`. `config.lr` always means the key (CCVR has an `lr` of its own).

    Raises
    ------
    BadRequest : no method, an unknown one, an unknown name, brackets that do not match, or the same entry twice.
    """
    variants = [_variant("--methods", *configuration.in_brackets("--methods", entry)) for entry in entries(text)]
    if not variants:
        raise BadRequest("no method given: --methods local,fedavg,...")
    same = [(v.method, {k: plain_value(text) for k, text in v.args}, dict(v.settings)) for v in variants]
    folders = [v.folder for v in variants]
    twice = {v.label for v, what in zip(variants, same) if same.count(what) > 1 or folders.count(v.folder) > 1}
    if twice:
        raise BadRequest(f"--methods names {', '.join(sorted(twice))} twice")
    return variants


def _variant(option: str, method: str, inside: Sequence[str], family: str = "") -> Variant:
    """Make a variant of a method from the parts in its brackets."""
    args, settings = configuration.told_apart(option, method, inside)
    label = method + (f"({' '.join(inside)})" if inside else "")
    return Variant(label, method, tuple(args.items()), tuple(settings.items()), family)


def expand(variants: Sequence[Variant], text: str, option: str = "--grid") -> list[Variant]:
    """Put every point of a grid in the place of each variant.

    A name of the grid is a hyperparameter or one of :data:`OWN_SETTINGS`, as in the brackets of `--methods`; it counts
    for the methods that have it, and `METHOD.name` for one method alone.

    Parameters
    ----------
    option : `--grid`, or `--tune`, whose names are keys of :data:`OWN_SETTINGS` alone: all methods have them.

    Raises
    ------
    BadRequest : a grid that cannot be read, a name that no variant has, or a value that a variant already has.
    """
    axes, used, found = grid.parse(text, option), set(), []
    if option == TUNE and (others := [name for name in axes if name not in OWN_SETTINGS]):
        near = suggest_choice(others[0], OWN_SETTINGS)
        raise BadRequest(f"{option} takes keys that all methods have, and {others[0]} is not one of them{near}")
    for variant in variants:
        fields = registry.get(variant.method).hparams.model_fields
        inside = variant.label[len(variant.method) :].strip("()").split()
        mine: dict[str, list[str]] = {}
        for name, values in axes.items():
            own = name.removeprefix(f"{variant.method}.")
            if option == TUNE and own.replace("-", "_") in fields:
                own = f"config.{own}"
            key = own.removeprefix("config.").replace("_", "-")
            based = own.startswith("base.") and "base_args" in fields
            if based or own.replace("-", "_") in fields or key in OWN_SETTINGS:
                mine[own] = axes.get(f"{variant.method}.{own}", values)
                used.add(name)
        for point in grid.points(mine):
            args, settings = configuration.told_apart(option, variant.method, point)
            if twice := {*args, *settings} & {*dict(variant.args), *dict(variant.settings)}:
                raise BadRequest(f"{option}: {variant.label} has a value of its own for {', '.join(sorted(twice))}")
            found.append(_variant(option, variant.method, [*inside, *point], variant.label))
    if unused := [name for name in axes if name not in used]:
        raise BadRequest(f"{option}: none of {', '.join(v.label for v in variants)} has {', '.join(unused)}")
    return found


def parse_partition(text: str) -> dict[str, Any]:
    """Read an entry of `--partitions`: `KIND` or `KIND:NUMBER`, the number being alpha or the classes per client.

    A partitioner of flwr-datasets, `flwr:NAME`, takes the run's `partition-args`.

    Raises
    ------
    BadRequest : unknown kind, a number that the kind does not take, or no number.
    """
    if flower.is_named(text.strip()):
        return {"partition": text.strip()}
    kind, sep, number = text.strip().partition(":")
    if kind not in PARTITION_PARAMETER:
        raise BadRequest(f"unknown partition '{kind}'{suggest_choice(kind, PARTITION_PARAMETER)}")
    key = PARTITION_PARAMETER[kind] or ""
    if sep and not key:
        raise BadRequest(f"--partitions {text}: {kind} takes no number")
    return {"partition": kind} | ({key: configuration.parse_value(key, number)} if sep else {})


def settings_of(
    values: Mapping[str, Any], datasets: Sequence[str], partitions: Sequence[str], sweep: str = ""
) -> dict[str, dict[str, Any]]:
    """Return all data sets with all partitions and all values of a sweep; those of `values` where none is named.

    Returns
    -------
    Folder of its runs, where a comparison has several settings -> run-config keys.
    """
    settings: dict[str, dict[str, Any]] = {}
    axes = grid.parse(sweep, "--sweep")
    if others := [name for name in axes if name not in SWEPT]:
        raise BadRequest(f"--sweep: no common key '{others[0]}'{suggest_choice(others[0], SWEPT)}")
    for dataset in datasets or [str(values.get("dataset", configuration.DEFAULTS["dataset"]))]:
        for text in partitions or [""]:
            chosen = {"dataset": dataset, **(parse_partition(text) if text else {})}
            flat = {**configuration.DEFAULTS, **values, **chosen}
            partition = configuration.known_partition(str(flat["partition"]), dataset)
            folder = f"{dataset}-{partition.replace(':', '-')}"
            if key := PARTITION_PARAMETER.get(partition):
                folder += f"-{flat[key]:g}"
            for point in grid.points(axes):
                name = "-".join([folder, *point])
                if name in settings:
                    raise BadRequest(f"{name} is asked for twice in --datasets and --partitions")
                own = {k: configuration.parse_value(k, v) for k, _, v in (at.partition("=") for at in point)}
                settings[name] = {**chosen, **own}
    return settings


def jobs_of(
    values: Mapping[str, Any],
    variants: Sequence[Variant],
    settings: Mapping[str, Mapping[str, Any]],
    seeds: int,
    out: Path,
) -> list[Job]:
    """Make the effective configuration of every run and check it before anything is trained.

    `method-args` of the values are for the values' method (for all where they name none); brackets go before them.
    If a method needs public data and no `public-data` is given, its share is held back from the clients of every
    method, so that all train on the same images.

    Raises
    ------
    BadRequest : a configuration that a method refuses (all that do are named), or data that cannot be divided so.
    """
    if seeds < 1:
        raise BadRequest(f"--seeds {seeds}: at least 1")
    given = named_values("method-args", str(values.get("method-args", "")), "")
    args = {v: {**(given if values.get("method", v.method) == v.method else {}), **dict(v.args)} for v in variants}
    texts = {v: " ".join(f"{k}={value}" for k, value in own.items()) for v, own in args.items()}
    values = common_public(values, [(v.method, text) for v, text in texts.items()])
    first = int(values.get("seed", 0))
    refused: dict[str, None] = {}
    jobs = []
    for (folder, setting), seed, variant in product(settings.items(), range(first, first + seeds), variants):
        flat = {
            **values, **setting, **dict(variant.settings), "method": variant.method, "seed": seed,
            "method-args": texts[variant],
        }  # fmt: skip
        several = folder if len(settings) > 1 else ""
        try:
            config = engines.effective(flat).replaced(out=str(out / "runs" / several / f"{variant.folder}-s{seed}"))
            _check_widths(config)
            if not refused:
                tasks.check(config, config.data.clients)
        except BadRequest as e:
            reason = str(e).removeprefix(f"{variant.method} ")  # the label names the method already
            refused.setdefault(f"{variant.label}{' ' if reason != str(e) else ': '}{reason}")
        else:
            sweep = ", ".join(f"{key} {setting[key]}" for key in SWEPT if key in setting)
            jobs.append(Job(variant, several, seed, config, sweep))
    if refused:
        raise BadRequest("\n".join(refused))
    _check_clients(jobs)
    return jobs


def _check_clients(jobs: Sequence[Job]) -> None:
    """Refuse methods if some take clients of several sizes that others leave out."""
    found: dict[tuple[str, int], dict[tuple[str, ...], str]] = {}
    for job in jobs if any(j.config.data.skip_bad for j in jobs) else ():
        names = tasks.federated(job.config, job.config.data.clients).partition.names
        found.setdefault((job.setting, job.seed), {}).setdefault(names, job.variant.label)
    for by_names in found.values():
        if len(by_names) > 1:
            (_, fewer), *_, (_, more) = sorted(by_names.items(), key=lambda pair: len(pair[0]))
            raise BadRequest(
                f"{fewer} would leave out clients (skip-bad) whose samples have another size, which {more} takes: "
                "compare methods of one kind, or move these clients' files away"
            )


def _check_widths(config: RunConfig) -> None:
    """Refuse architectures whose heads do not fit together before clients register and the server notices."""
    method, hparams = config.method_and_hparams()
    if len(set(config.model.names)) == 1:
        return
    by_data = {name for name in config.model.names if is_own(name) or name == IDENTITY}
    widths = {head_width(name) for name in config.model.names if name not in by_data}
    if by_data:
        data = tasks.federated(config, config.data.clients)
        found = ((name, shape) for name, shape in tasks.architectures(config, data) if name in by_data)
        widths |= {head_width(name, data.dataset.num_classes, shape, config.model) for name, shape in found}
    if len(widths) > 1 and method.same_width and (method.shared_prefixes(hparams) or method.extra_up):
        raise BadRequest(
            f"the models of {config.model.model} have features of widths {sorted(widths)}, but heads or "
            "representations are compared: take models of one family"
        )


# ---- earlier runs ----------------------------------------------------------------------------------------------------


def standing(config: RunConfig) -> Literal["new", "done", "broken off", "nothing kept"]:
    """Return the progress of the run in `config.out`; touches nothing.

    Raises
    ------
    BadRequest : the directory holds a run with another configuration, or something else, or cannot be looked into.
    """
    out = Path(config.storage.out)
    try:
        if not (out / "config.toml").is_file():
            strange = [p.name for p in out.iterdir() if p.name not in OURS] if out.is_dir() else []
            if strange or (out.exists() and not out.is_dir()):
                raise BadRequest(f"{out} holds no run, but {', '.join(strange) or 'is a file'}; give a new --out")
            return "nothing kept" if out.is_dir() else "new"
        there = configuration.from_flat(configuration.read_toml(out / "config.toml")).to_flat()
        made = str(RunResult(out).versions.get("fedapp", __version__))
        if made != __version__:
            raise BadRequest(
                f"{out} holds a run of fedapp {made}, this is {__version__}: scores and defaults may mean something "
                "else; give a new --out"
            )
        now = {k: v for k, v in config.to_flat().items() if k not in ("out", "track") and there[k] != v}
        if differing := "; ".join(f"{k} = {there[k]!r} there, {v!r} now" for k, v in now.items()):
            raise BadRequest(
                f"{out} holds a run with another configuration ({differing}): give a new --out, or its settings"
            )
        run = RunResult(out)
        if not run.ok and not any((out / "checkpoint").glob("*.safetensors")):
            return "nothing kept"  # it is begun again, with code that may have been mended
        if other := identity.changed(run.versions, identity.of_files(config) | identity.of_data(config)):
            raise BadRequest(
                f"since the run in {out} these have changed (SHA-256): {other}. Put the former ones back, or give a "
                "new --out"
            )
        return "done" if run.ok else "broken off"
    except OSError as e:
        raise BadRequest(f"{out} cannot be used ({e.strerror or e}); give another --out") from e


def pending_config(config: RunConfig) -> RunConfig | None:
    """Return the run that is left: None if it is complete, a resuming configuration if it broke off.

    What a run left that broke off before its first checkpoint is removed.

    Raises
    ------
    BadRequest : the directory holds a run with another configuration, or something else.
    """
    state, out = standing(config), config.storage.out
    try:
        if state == "nothing kept":
            shutil.rmtree(out)
    except OSError as e:
        raise BadRequest(f"{out} cannot be removed ({e.strerror or e}); give another --out") from e
    return None if state == "done" else config.replaced(resume=state == "broken off")


# ---- running ---------------------------------------------------------------------------------------------------------


def rounds_done(out: Path) -> int:
    """Return the number of rows in a run's `rounds.csv`, 0 where there is none."""
    with contextlib.suppress(OSError):
        return max(0, (out / "rounds.csv").read_bytes().count(b"\n") - 1)
    return 0


class RunsProgress(Display):
    """Shows on standard error how far several runs are: a bar with the time left, or lines without a terminal."""

    EVERY_SECONDS = 60.0

    def __init__(self, runs: Mapping[str, RunConfig]) -> None:
        super().__init__()
        self.names = {Path(c.storage.out): name for name, c in runs.items()}
        self.rounds = {Path(c.storage.out): c.federation.num_server_rounds for c in runs.values()}
        self.ended: dict[str, str | None] = {}  # with their errors
        self.before = self.done()
        self.total = sum(self.rounds.values())
        self.started = self.told = time.monotonic()
        self.stop = threading.Event()
        self.watch = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        super().__enter__()
        self.count("runs", max(1, self.total))
        if self.bar is None:
            self.line(self.text(self.done()))
        self.watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.watch.join()
        self._show()
        super().__exit__()

    def _watch(self) -> None:
        while not self.stop.wait(0.5):
            self._show()

    def _show(self) -> None:
        if self.bar is not None and self.task is not None:
            done = self.done()
            self.bar.update(self.task, completed=done, text=self.text(done))
        elif time.monotonic() - self.told > self.EVERY_SECONDS:
            self.line(self.text(self.done()))

    def done(self) -> int:
        """Rounds done in all runs."""
        return sum(n if self.names[out] in self.ended else rounds_done(out) for out, n in self.rounds.items())

    def text(self, done: int) -> str:
        """Return the number of ended runs, and the time left at the pace so far."""
        fresh = done - self.before
        text = f"{len(self.ended)} of {counted(len(self.names), 'run')}, {done} of {counted(self.total, 'round')}"
        if fresh > 0 and done < self.total:
            left = (time.monotonic() - self.started) / fresh * (self.total - done)
            text += f", about {math.ceil(left)} s left" if left < 120 else f", about {left / 60:.0f} min left"
        return text

    def line(self, text: str, must: bool = False) -> None:
        """Print a line above the bar."""
        self.told = time.monotonic()
        super().line(text, must)

    def on_end(self, run: pool.FinishedRun) -> None:
        """Report a run that ended."""
        name = self.names[run.out]
        self.ended[name] = run.error
        if run.error:
            self.line(f"{name} failed: {run.error}", must=True)
        elif self.bar is None:
            self.line(f"{name}: done; {self.text(self.done())}")


def run_here(
    todo: Mapping[str, RunConfig], workers: int | None, deadline: Callable[[], bool] = lambda: False
) -> dict[str, str]:
    """Run on the local engine, one process per core; returns the errors of the runs that failed, by name."""
    threads = max((max(c.training.threads, c.federation.server_threads) for c in todo.values()), default=1)
    workers = workers or max(1, usable_cores() // threads)
    with RunsProgress(todo) as progress:
        try:
            pool.run_all(list(todo.values()), workers, progress.on_end, deadline)
        except BrokenProcessPool as e:
            again = "own code of __main__ is loaded by running your script again: start the comparison below "
            again += '`if __name__ == "__main__":`, or move that code to a module'
            own = process.uses_main(c.to_flat() for c in todo.values())
            advice = again if own else "perhaps for lack of memory; --workers 1 needs less"
            progress.line(f"a worker process died ({e}), {advice}", must=True)
            lost = {n for n in todo.keys() - progress.ended if not RunResult(Path(todo[n].storage.out)).ok}
            progress.ended.update(dict.fromkeys(lost, "the process ended"))
    return {name: error for name in todo if (error := progress.ended.get(name))}


def run_on_ray(todo: Mapping[str, RunConfig], log: Path) -> dict[str, str]:
    """Run one after the other through `flwr run` on one Ray; returns the errors of the runs that failed, by name."""
    failed: dict[str, str] = {}
    resources = runner.proposed(list(todo.values()))
    echo(resources.text, err=True)
    announce(runner.STARTING)
    with launch.Session(log=log, ray_cpus=resources.total_cpus) as session:
        for number, (name, config) in enumerate(todo.items(), 1):
            with runner.Follower(f"{name} ({number}/{len(todo)})") as follower:
                try:
                    if runner.run_in(session, config, resources, follower):
                        failed[name] = "see above"
                except BadRequest as e:
                    follower.line(f"{name} failed: {e}", must=True)
                    failed[name] = f"BadRequest: {e}"
    return failed


@dataclass(frozen=True)
class Plan:
    """The runs of a comparison, as its command asks for them.

    Attributes
    ----------
    values : flat run-config that all runs share.   methods : see :func:`parse_variants`.
    seeds : number of seeds, from the values' seed on.
    datasets, partitions : none = those of the values.   sweep : see :func:`settings_of`.
    points, tune : see :func:`expand`; the tables hold the point of each method that `grid.choose` chose. With `tune`
        the points run with the first seed alone, and the chosen ones with all seeds.
    reference : label of the method to compare with; default `local`, which is added where it is absent.
    target : accuracy in (0, 1) whose rounds and bytes are counted; None = what the reference ends at.
    """

    values: Mapping[str, Any]
    methods: str
    seeds: int = DEFAULT_SEEDS
    datasets: Sequence[str] = ()
    partitions: Sequence[str] = ()
    sweep: str = ""
    points: str = ""
    tune: str = ""
    reference: str | None = None
    target: float | None = None

    def command(self) -> str:
        """Return the command that makes the same comparison."""
        options = {
            "methods": self.methods, "datasets": ",".join(self.datasets), "partitions": ",".join(self.partitions),
            "sweep": self.sweep, "grid": self.points, "tune": self.tune, "on": "validation" if self.tune else "",
            "reference": self.reference, "target": self.target, "seeds": self.seeds,
        }  # fmt: skip
        given = [(f"--{name}", str(value)) for name, value in options.items() if value not in (None, "")]
        texts = {key: str(value).lower() if isinstance(value, bool) else value for key, value in self.values.items()}
        lists = {"dataset": self.datasets, "partition": self.partitions}
        given += [("--set", f"{key}={text}") for key, text in texts.items() if not lists.get(key)]
        return shlex.join(["fedapp", "compare", *(word for pair in given for word in pair)])


def run(plan: Plan, out: Path | None, engine: str = "local", workers: int | None = None) -> int:
    """Run a comparison, print its tables, write its files.

    Parameters
    ----------
    out : folder of the comparison, default a new `./runs/compare-<time>`.
    workers : processes at a time on the local engine.

    Returns
    -------
    Exit code: 0; 1 if a run failed or the runs do not share partition and sampling; 2 if all were refused.
    """
    if engine not in ("local", "ray"):
        raise BadRequest(f"engine = '{engine}': choose local or ray")
    values, tune, reference = plan.values, plan.tune, plan.reference
    variants = parse_variants(plan.methods)
    settings = settings_of(values, plan.datasets, plan.partitions, plan.sweep)
    if reference is None:
        variants = with_standalone(values, variants, settings)
    alone = next((v for v in variants if v.method == "local"), variants[0])
    first = ",".join(v.label for v in parse_variants(reference)) if reference else alone.label
    if first not in [v.label for v in variants]:
        raise BadRequest(f"--reference {reference}: not among {', '.join(v.label for v in variants)}")
    if plan.target is not None and not 0 < plan.target < 1:
        raise BadRequest(f"--target {plan.target:g}: a share between 0 and 1, such as 0.9")
    if workers is not None and (workers < 1 or engine != "local"):
        raise BadRequest("--workers: at least 1, with --engine local")
    if plan.points and tune:
        raise BadRequest("--tune and --grid are two searches: give one of them")
    searched, option = (tune, TUNE) if tune else (plan.points, "--grid")
    if tune:
        values = {"validation": VALIDATION, **values}
    if searched:
        variants = expand(variants, searched, option)
    folder = new_folder(Path("runs"), "compare") if out is None else absolute(out)
    with removed_if_empty(folder) if out is None else contextlib.nullcontext():
        jobs = jobs_of(values, variants, settings, plan.seeds, folder)
        process.check_main([job.config.to_flat() for job in jobs], on_ray=engine == "ray")
        choice = grid.beforehand(jobs, option) if searched else []
    how = f"the same command with --out {shlex.quote(str(short_path(folder)))} continues"
    if out is None:
        echo(f"results: {short_path(folder)} ({how})", err=True)
    out = folder
    for job in (*jobs, *repeats(jobs, out)):
        standing(job.config)
    check_writable(out / "runs")
    # Two comparisons in one folder would remove each other's unfinished runs.
    with only_writer(out, who="fedapp compare"), interrupts_explained(how):
        for line in (*choice, *_beforehand(values, jobs)):
            echo(line, err=True)
        again, tabled, notes, unchosen = [] if searched else repeats(jobs, out), jobs, list[str](), list[str]()
        tried = [job for job in jobs if not tune or job.seed == jobs[0].seed]
        failed = execute([*tried, *again], engine, out, workers)
        if searched:
            points, tabled, notes, unchosen = grid.choose(tried, jobs, option)
            chosen = {(job.setting, job.variant.label) for job in tabled}
            if tune:  # a step that is too large for a method is a result of the search
                spoiled = {j.name for j in tried if (j.setting, j.variant.family) in chosen and j.result.repeats}
                failed = {name: why for name, why in failed.items() if name not in spoiled}
            again = repeats(tabled, out)
            failed |= execute([*(tabled if tune else ()), *again], engine, out, workers)
        finished = [job for job in tabled if job.result.ok]
        shared = tables.verify(finished)
        alerts = [*shared.lines[int(shared.ok) :], *differences(tabled, grid.parse(tune, TUNE))]
        notes = [*notes, *shared.lines[: int(shared.ok)]]
        command = replace(plan, values=values).command()
        with explained(f"the tables in {out} cannot be written", f"make room; the runs are kept, and {how}"):
            tables.write(out, tabled, again, first, plan.target, alerts, notes, command)
            if searched:
                write_table(out / GRID, points)
            else:  # the choice of an earlier call would name the runs of this one
                (out / GRID).unlink(missing_ok=True)
    found = {p.parent for depth in (1, 2) for p in (out / "runs").glob("*/" * depth + "config.toml")}
    if others := sorted(str(p.relative_to(out / "runs")) for p in found - {j.out for j in jobs}):
        echo(f"not in these tables, but in {out / 'runs'}: {', '.join(others)}", err=True)
    _report(out, finished)
    lasting = {job.name: job.result.failure for job in (*jobs, *tabled) if job.name in failed and job.result.repeats}
    told = [f"{name} failed: {why}" for name, why in lasting.items()]
    if passing := [name for name in failed if name not in lasting]:
        told.append(f"failed: {', '.join(passing)} ({how} when the cause above is gone)")
    for line in (*told, *unchosen):
        echo(line, err=True, must=True)
    if tabled:
        echo(answers.screen(Comparison(out, ())))
    if failed:
        refused = all(e.startswith("BadRequest") for e in failed.values()) and not finished
        return 2 if refused else 1
    return 0 if shared.ok and not unchosen else 1


@contextlib.contextmanager
def interrupts_explained(how: str) -> Iterator[None]:
    """Print at Ctrl-C how the comparison of the block goes on."""
    try:
        yield
    except KeyboardInterrupt:
        echo(f"what has finished is kept: {how}", err=True, must=True)
        raise


def with_standalone(
    values: Mapping[str, Any], variants: list[Variant], settings: Mapping[str, Mapping[str, Any]]
) -> list[Variant]:
    """Add training alone where no variant is it, unless it refuses the settings."""
    single = Variant("local", "local")
    if any(v.method == single.method for v in variants):
        return variants
    with contextlib.suppress(BadRequest):
        jobs_of(values, [single], settings, 1, Path())
        return [*variants, single]
    return variants


def repeats(jobs: Sequence[Job], out: Path) -> list[Job]:
    """Return runs of training alone with the same partition and the next training seed; none below three seeds.

    They show how many clients gain and lose by chance.
    """
    first = {(job.setting, job.seed): job for job in reversed(jobs) if job.variant.method == "local"}
    if len({seed for _, seed in first}) < FEWEST_SEEDS:
        return []
    found = []
    for job in reversed(first.values()):
        folder = out / AGAIN / job.setting / job.out.name
        own = {"seed": job.seed + 1, "partition_seed": job.config.data_seed, "out": str(folder)}
        found.append(replace(job, config=job.config.replaced(**own)))
    return found


def execute(jobs: Sequence[Job], engine: str, out: Path, workers: int | None) -> dict[str, str]:
    """Run the jobs that have not finished; return the errors of those that failed, by name."""
    configs = {job.name + f" {AGAIN}" * job.out.is_relative_to(out / AGAIN): job.config for job in jobs}
    todo = {name: left for name, config in configs.items() if (left := pending_config(config)) is not None}
    if there := len(jobs) - len(todo):
        echo(f"{there} of {counted(len(jobs), 'run')} {'is' if len(jobs) == 1 else 'are'} there already", err=True)
    for config in todo.values():
        check_out(Path(config.storage.out), config.storage.resume)
    if not todo:
        return {}
    return run_on_ray(todo, out / "superlink.log") if engine == "ray" else run_here(todo, workers)


def _beforehand(values: Mapping[str, Any], jobs: Sequence[Job]) -> Iterator[str]:
    """Print the division of the data, and the decisions for all methods."""
    for setting in dict.fromkeys(job.setting for job in jobs):
        job = next(j for j in jobs if j.setting == setting)
        data = tasks.federated(job.config, job.config.data.clients)
        seeds = len({j.config.data_seed for j in jobs if j.setting == setting})
        yield data_card(data.dataset, data.partition).text(seed=f"seed {job.seed} of {seeds}" if seeds > 1 else "")
    public = jobs[0].config.data.public_data
    if public and not values.get("public-data"):
        yield f"public-data = {public} for all methods, since one of them needs public rows"


def _report(out: Path, finished: Sequence[Job]) -> None:
    """Write `report.html`; a page that cannot be made does not undo the runs."""
    (out / "report.html").unlink(missing_ok=True)  # of an earlier call
    if not finished:
        return
    try:
        from fedapp.results import report

        report.write(out)
    except Exception as e:
        again = shlex.join(["fedapp", "report", str(short_path(out))])
        echo(f"no report.html: {type(e).__name__}: {e} ({again} tries again)", err=True)


def differences(jobs: Sequence[Job], tuned: Mapping[str, Sequence[str]] | None = None) -> list[str]:
    """Name the training settings in which methods differ, since `auto` is each method's own.

    Parameters
    ----------
    tuned : keys and values of a search that was the same for all methods; they are named in any case.
    """
    lines: dict[str, None] = {}
    settings: dict[str, dict[str, dict[str, Any]]] = {}
    for job in jobs:
        name = "training alone" if job.variant.label == "local" else job.variant.title
        settings.setdefault(job.setting if tuned else "", {}).setdefault(name, job.config.to_flat())
    for (setting, methods), key in product(settings.items(), OWN_SETTINGS):
        by: dict[Any, list[str]] = {}
        for title, flat in methods.items():
            by.setdefault(flat[key], []).append(title)
        *few, (common, _) = sorted(by.items(), key=lambda item: len(item[1]))
        parts = [f"{value} for {', '.join(titles)}" for value, titles in few]
        told = "; ".join([*parts, f"{common} for all{' others' if few else ''}"])
        if tuned and key in tuned:
            where = f" in {setting}" if setting else ""
            values = ", ".join(tuned[key])
            lines[f"Chosen from {values} on validation rows of seed {jobs[0].seed}{where}, {key}: {told}."] = None
        elif few:
            lines[f"Settings differ, {key}: {told}."] = None
    return list(lines)
