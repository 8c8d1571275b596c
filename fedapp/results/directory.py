"""The run directory: configuration, versions, tables, summary, checkpoints, models.

| file                | content                                                                               |
|---------------------|---------------------------------------------------------------------------------------|
| `config.toml`       | the effective configuration; `fedapp run config.toml` repeats the run                  |
| `versions.json`     | versions of packages, SHA-256 of data, own code and weights, processor, the run's token |
| `rounds.csv`        | one row per round; every column that is not reproducible ends in `seconds`              |
| `clients.csv`       | one row per client and round: sums, counts and the accuracies they give                 |
| `evaluations.csv`   | with `evaluate-every`: averages over all clients, one row per evaluation                |
| `selected/`         | with `select = validation`: the server's state after the round that leads so far        |
| `final.csv`         | all clients scored once after the last round, or the one that validation images chose   |
| `final_confusion.npz` | with `metrics = confusion`: which classes each client's test samples were taken for   |
| `unseen.csv`        | clients that took no part (`unseen`), scored once after the last round                  |
| `partition.npz`, `data_card.json`, `data_card.txt` | how the data are divided                                  |
| `inputs.json`       | shape, kind and normalisation of the data, names of classes and clients                |
| `scaling.json`      | with `model-args` of `identity`: mean and deviation of the features of all clients      |
| `models/`           | the server's arrays; `clients/<id>/` the clients' final models (`keep-models`)          |
| `totals.safetensors` | of Fed3R, LDA and FedNCM on given features: exact sums over all clients                |
| `totals-before.safetensors` | with `totals`, until the run has ended: the totals that it names               |
| `dropped.csv`       | replies that did not count, with reasons                                                |
| `blocked.csv`       | clients that got no more messages, and the reply that led to it; only if there are any  |
| `summary.json`      | written last; `ok` says whether the run finished                                       |
| `progress.jsonl`    | events while the run goes on                                                            |
| `error.json`        | the first error of a run that failed                                                    |
| `tracking.json`     | with `track`: the last round of each tracker, and under which key it goes on            |
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import math
import platform
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fedapp import __version__
from fedapp.config import RunConfig, write_toml
from fedapp.data.names import absent
from fedapp.errors import BadRequest
from fedapp.files import absolute, atomic, check_folder, locked, synced, writing_to
from fedapp.learning.metrics import tidy
from fedapp.process import processor
from fedapp.results.cells import cell, uncelled
from fedapp.results.statistics import Floats, measured
from fedapp.settings.evaluation import CONFUSION
from fedapp.transport.offences import Blocked, Dropped
from fedapp.transport.request import WITHOUT_DATA

Columns: TypeAlias = Mapping[str, Floats]
"""A table of numbers by column, NaN for empty cells."""
PACKAGES = ("fedapp", "flwr", "ray", "torch", "torchvision", "numpy", "pandas", "scikit-learn", "scipy")


def write_text(path: Path, text: str, durable: bool = False) -> None:
    """Write a file atomically: readers get the old one or the whole new one; `durable` as in `atomic`."""
    with atomic(path, durable, mode=0o644) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any, indent: int | None = 2, durable: bool = False) -> None:
    """Write JSON atomically; NaN becomes null."""
    write_text(path, json.dumps(clean(value), indent=indent) + "\n", durable)


def clean(value: Any) -> Any:
    """Make a value JSON: NaN and infinity become None, keys text, tuples lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(v) for v in value]
    return value


def only_writer(
    out: Path, patience: float = 0.0, tell: Callable[[str], None] = lambda text: None, who: str = "server process"
) -> contextlib.AbstractContextManager[None]:
    """Hold a folder while a server, or another program `who`, writes to it.

    Parameters
    ----------
    patience : seconds to wait for another process to end. A server that lost its SuperLink may run until the SuperLink
        is back and refuses its heartbeat, which is sent about every 30 seconds.
    tell : called with a line of text when there is something to wait for.

    Raises
    ------
    BadRequest : another process writes there.
    """
    text = f"another {who} still writes to {out}"

    def waiting() -> None:
        if patience:
            tell(f"{text}: waiting up to {patience:g} s for its end")

    return locked(out / LOCK, f"{text}: wait until it has ended, or end it", patience, waiting)


def check_out(out: Path, resume: bool) -> None:
    """Check the output directory before a run starts.

    Raises
    ------
    BadRequest : it cannot be read or written, is not empty, or (with `resume`) holds no run.
    """
    with writing_to(out):
        if resume:
            if not (out / "config.toml").is_file():
                if not out.exists():
                    raise absent(out, "give the run directory of a run to resume")
                raise BadRequest(f"{out} holds no run to resume (no config.toml)")
        elif out.exists() and not out.is_dir():
            raise BadRequest(f"{out} is a file; give a folder")
        elif out.is_dir() and any(p.name not in OURS or (p.is_dir() and any(p.iterdir())) for p in out.iterdir()):
            again = f"--resume {shlex.quote(str(out))}"
            raise BadRequest(f"{out} is not empty; give a new folder, or continue the run in it with {again}")
    check_writable(out)


def check_writable(folder: Path) -> None:
    """Make a folder if it does not exist, and check that a file can be made in it.

    Raises
    ------
    BadRequest : it cannot; the message has the system's reason.
    """
    with writing_to(folder):
        check_folder(folder)


def short_path(path: Path) -> Path:
    """Return a path as a command in the current folder takes it: relative where it lies below, else as it is."""
    with contextlib.suppress(ValueError, OSError):
        return path.relative_to(Path.cwd())
    return path


def new_folder(root: Path, name: str) -> Path:
    """Make a new folder `root/<name>-<time>`, with a number behind it where that one exists.

    Raises
    ------
    BadRequest : it cannot be made.
    """
    root = absolute(root)
    base = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        folder = root / (base if number == 1 else f"{base}-{number}")
        with writing_to(folder):
            try:
                root.mkdir(parents=True, exist_ok=True)
                folder.mkdir()  # of two processes in the same second, one fails here and takes the next number
                return folder
            except FileExistsError:
                if not root.is_dir():
                    raise BadRequest(f"{root} is a file; give a folder with --out") from None
    raise AssertionError("there is always a next number")


@contextlib.contextmanager
def removed_if_empty(folder: Path) -> Iterator[None]:
    """Remove a new folder if the block raises before anything is written to it."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # it is not empty
            folder.rmdir()
        raise


def run_name(config: RunConfig) -> str:
    """Beginning of the name of a run's folder where none is given."""
    return f"{config.federation.method}-{config.data.dataset}-s{config.federation.seed}"


LOCK = ".lock"
NAME = "name"
"""Column of clients.csv, final.csv and unseen.csv with the clients' own names, where the data have them."""
TABLES = ("rounds.csv", "clients.csv", "evaluations.csv", "dropped.csv")
"""The tables that a resumed run goes on writing."""
CONFUSIONS = "final_confusion.npz"
OURS = (
    "checkpoint", "models", "state", "versions.json", "progress.jsonl", "superlink.log", "launch.log", "error.json",
    "summary.json", LOCK,
)  # fmt: skip
"""What may be in a run directory before the run's `config.toml`; a run that fails earlier leaves it."""
MOST_CURVES = 100
"""Clients up to which trackers are told of each: they draw a chart for every number of a client."""
TRACKED = ("_accuracy", "_loss")
"""How the columns of single clients end that trackers are told of."""
ANNOUNCED = "fedapp-event "
"""How a line with an event begins in a deployed server's log."""


def versions() -> dict[str, str]:
    """Return versions of the packages that numbers depend on, of Python, and the machine and its processor."""
    found = {}
    for package in PACKAGES[1:]:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed as a package"
    machine = {"machine": platform.machine(), "processor": processor(), "system": platform.system()}
    return {"fedapp": __version__, **found, "python": platform.python_version(), **machine}


def keep_rows(path: Path, wanted: Callable[[list[str]], bool]) -> None:
    """Rewrite a CSV file, if it is there, with the rows that are wanted; a line that a kill cut off is removed."""
    header, *rows = _read(path) or [[]]
    if header:
        _write(path, [header, *(row for row in rows if len(row) == len(header) and wanted(row))])


def _read(path: Path) -> list[list[str]]:
    """Return the lines of a CSV file, none if it is not there."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as f:
        return list(csv.reader(f))


def _write(path: Path, lines: Iterable[Iterable[str]]) -> None:
    with atomic(path, durable=True, mode=0o666) as part, part.open("w", newline="", encoding="utf-8") as f:
        csv.writer(f, lineterminator="\n").writerows(lines)


class RunDirectory:
    """Writes a run directory.

    Parameters
    ----------
    path : absolute path.   config : effective configuration.
    keep_rounds : rounds to keep of an existing run (resume), -1 = nothing, None for a new run.
    identity : all that the run depends on (`tasks.identity`), which a new run notes.
    """

    def __init__(
        self, path: Path, config: RunConfig, keep_rounds: int | None = None, identity: Mapping[str, str] | None = None
    ) -> None:
        self.path = path
        self.config = config
        path.mkdir(parents=True, exist_ok=True)
        (path / "checkpoint").mkdir(exist_ok=True)
        (path / "models").mkdir(exist_ok=True)
        info_path = path / "versions.json"
        if keep_rounds is None:
            self.token, self.begun_with = secrets.token_hex(6), __version__
            about = {"run": self.token, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
            write_json(info_path, {**versions(), **(identity or {}), **about})
        else:
            info = json.loads(info_path.read_text())
            self.token, self.begun_with = str(info["run"]), str(info.get("fedapp"))
            self._check_rounds(keep_rounds)
            self._forget_rounds(keep_rounds)
            for name in ("summary.json", "error.json", "final.csv", CONFUSIONS, "unseen.csv"):
                (path / name).unlink(missing_ok=True)
            shutil.rmtree(self.client_models, ignore_errors=True)
        self.configure(config)

    def confusion(self, metrics: Mapping[int, Mapping[str, Any]], protocols: Iterable[str]) -> None:
        """Write the confusion matrices of the last evaluation, if it measured any.

        The file has `client` (M,), and for every score in `protocols` an array (M, C, C) of counts, true classes in
        rows; a client without this score has -1 everywhere.
        """
        clients, found = sorted(metrics), dict[str, Any]()
        for protocol in protocols:
            given = {c: np.asarray(m[key]) for c, m in metrics.items() if (key := f"{protocol}-{CONFUSION}") in m}
            if given:
                cells = len(next(iter(given.values())))
                rows = [given.get(c, np.full(cells, -1)) for c in clients]
                found[protocol] = np.stack(rows).reshape(len(rows), math.isqrt(cells), -1)
        (self.path / CONFUSIONS).unlink(missing_ok=True)
        if found:
            np.savez_compressed(self.path / CONFUSIONS, client=np.array(clients), **found)

    @property
    def client_models(self) -> Path:
        """Where a simulation keeps the clients' final models, a folder for each client."""
        return self.path / "models" / "clients"

    def configure(self, config: RunConfig) -> None:
        """Write the effective configuration."""
        self.config = config
        write_toml(self.path / "config.toml", config.replaced(resume=False))

    def _check_rounds(self, last: int) -> None:
        """Refuse a checkpoint of round `last`, -1 = none, that does not fit `rounds.csv`.

        Raises
        ------
        BadRequest : rounds up to the last are missing; without a checkpoint there are two, or one and final scores.
        """
        header, *rows = _read(self.path / "rounds.csv") or [[]]
        there = {int(row[0]) for row in rows if len(row) == len(header) and row[0].isdecimal()}
        if missing := sorted(set(range(1, last + 1)) - there):
            raise BadRequest(
                f"{self.path / 'rounds.csv'} lacks round {missing[0]}, which is behind the checkpoint: put a good copy "
                "of it back, or start a new run"
            )
        if last < 0 and len(there) + (self.path / "final.csv").exists() > 1:
            raise BadRequest(f"{self.path} has rounds and no checkpoint: put checkpoint/ back, or start a new run")

    def sync(self) -> None:
        """Wait until the tables of the rounds are on the disk."""
        for path in (self.path, *(self.path / name for name in TABLES)):
            if path.exists():
                synced(path)

    def _forget_rounds(self, last: int) -> None:
        """Remove what a resumed run does again: rounds after `last`, and what followed the last round.

        Dropped replies stay where their exchange is not repeated: those of trainings with the messages of secure sums,
        of the query before round 1, and of evaluations between rounds that `evaluations.csv` holds. After `final.csv`
        the messages of secure sums in round `last` may be those of `finalize`, which is repeated.
        """
        for name in TABLES:
            keep_rows(self.path / name, lambda row: int(row[0]) <= last)
        evaluated = {row["round"] for row in self._rows("evaluations.csv")}
        repeated = last if last and (self.path / "final.csv").exists() else last + 1

        def stays(row: list[str]) -> bool:
            if row[2] in WITHOUT_DATA:
                return int(row[0]) < repeated
            return row[2] in ("train", "query.prepare") or (row[2] == "evaluate" and row[0] in evaluated)

        keep_rows(self.path / "dropped.csv", stays)

    def append(self, name: str, *rows: Mapping[str, Any]) -> None:
        """Append rows to a CSV file; the first row writes the header.

        A run that an earlier version began keeps its columns: new ones are left out.

        Raises
        ------
        ValueError : the row lacks a column of the file.
        """
        if not rows:
            return
        path = self.path / name
        new = not path.exists() or path.stat().st_size == 0
        header = list(rows[0])
        if not new:
            with path.open(newline="", encoding="utf-8") as f:
                header = next(csv.reader(f))
        with path.open("a", newline="", encoding="utf-8") as f:
            writer = csv.writer(f, lineterminator="\n")
            if new:
                writer.writerow(header)
            for row in rows:
                if not set(header) <= set(row):
                    raise ValueError(f"{name}: columns {list(row)} differ from the header {header}")
                writer.writerow([cell(row[column]) for column in header])

    def add_column(self, name: str, column: str) -> None:
        """Add a column to a CSV file that a resumed run goes on writing; its earlier rows are empty there."""
        header, *rows = _read(self.path / name) or [[]]
        if header and column not in header:
            _write(self.path / name, [[*header, column], *([*row, ""] for row in rows)])

    def count(self, name: str) -> int:
        """Return how many rows one of the CSV files has."""
        return len(self._rows(name))

    def dropped(self, dropped: Iterable[Dropped]) -> None:
        """Record replies that did not count."""
        self.append("dropped.csv", *(reply.as_dict() for reply in dropped))

    def blocked_before(self) -> list[Blocked]:
        """Return the clients that are blocked since the run began, also those of rounds that failed."""
        keep_rows(self.path / "blocked.csv", lambda row: True)
        return [
            Blocked(int(row["round"]), int(row["client"]), int(row["node"]), str(row["stage"]), str(row["reason"]))
            for row in self._rows("blocked.csv")
        ]

    def event(self, event: Mapping[str, Any]) -> None:
        """Append an event, which programs that follow the run read."""
        line = json.dumps(clean({"time": time.time(), **event}))
        with (self.path / "progress.jsonl").open("a", encoding="utf-8") as f:
            f.write(line + "\n")

    def table(self, name: str) -> Columns:
        """Read one of the CSV files of numbers back by column, without names; no column if it is not there.

        Without pandas, which a server needs for nothing else and which takes as long to import as Flower.
        """
        rows = self._rows(name)
        columns = [c for c in rows[0] if c != NAME] if rows else []
        return {c: np.array([float(row[c] or "nan") for row in rows]) for c in columns}

    def _rows(self, name: str) -> list[dict[str, str]]:
        path = self.path / name
        if not path.is_file():
            return []
        with path.open(newline="", encoding="utf-8") as f:
            return [{name: uncelled(value) for name, value in row.items()} for row in csv.DictReader(f)]


def accuracy_summary(
    rounds: Columns, evaluations: Columns, final: Mapping[str, float], protocols: tuple[str, ...], clients: int
) -> dict[str, dict[str, Any]]:
    """Return `summary.json`'s accuracy entry by protocol. All but `participants` are over the scored clients.

    Parameters
    ----------
    rounds, evaluations : rounds.csv and evaluations.csv.   final : means over final.csv, and `global_accuracy`.
    clients : the number of all clients.

    Returns
    -------
    last, last_std, balanced : of the final evaluation: mean, standard deviation over clients, balanced score.
    best, best_pooled : the highest mean, and the highest mean weighted by test size, of the final evaluation, of
        `evaluations.csv`, and of the rounds in which all clients took part. They look at test data, so they are never
        the headline.
    participants : where the last round had only a part of the clients, their mean in that round.
    validation : mean over the images that are held out from training; only where there are any.
    """
    out: dict[str, dict[str, Any]] = {}
    full = [(table, np.asarray(table["clients"]) == clients) for table in (rounds, evaluations) if "clients" in table]
    known = len(rounds["clients"]) if "clients" in rounds else 0
    for p in protocols:
        column = f"{p}_accuracy"
        newest = np.asarray(rounds[column])[-1] if column in rounds and known else math.nan
        part = known and np.asarray(rounds["clients"])[-1] < clients
        if p == "global":
            found = measured([*rounds.get(column, ()), final.get(column, math.nan)])
            if not len(found):
                continue
            best = max(found)
            out[p] = {"last": final.get(column, newest), "best": best, "last_std": math.nan}
            out[p]["balanced"] = final.get(f"{p}_balanced", math.nan)
        else:
            highest = {}
            for name, source in (("best", column), ("best_pooled", f"{column}_pooled")):
                seen = [v for table, all_took_part in full if source in table for v in table[source][all_took_part]]
                highest[name] = max(measured([*seen, final.get(source)]), default=math.nan)
            out[p] = {
                "last": final.get(column, math.nan), "best": highest["best"],
                "last_std": final.get(f"{column}_std", math.nan), "balanced": final.get(f"{p}_balanced", math.nan),
                "best_pooled": highest["best_pooled"], "participants": newest if part else math.nan,
            }  # fmt: skip
            if f"{p}_validation" in final:
                out[p]["validation"] = final[f"{p}_validation"]
    return {p: {name: tidy(float(value)) for name, value in scores.items()} for p, scores in out.items()}
