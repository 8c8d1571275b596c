"""The one reader of run directories: a run (`RunResult`), and several runs under one folder (`Comparison`).

Files are read when they are asked for. A file that is not there is empty, so a run that has only begun can be read; a
file that is there and cannot be read is a `BadRequest` that names it. A last line without its end, which a run is just
writing or left when it was killed, is not read.

The file is long because all that is read of a run, its files, scores, names and failure, has one reader.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedapp import config as configuration
from fedapp.config import RunConfig
from fedapp.data.card import in_lines
from fedapp.data.names import absent, is_there
from fedapp.data.partitions import PARTITION_PARAMETER, UNION
from fedapp.errors import BadRequest
from fedapp.files import absolute
from fedapp.lazy import pd
from fedapp.learning.metrics import mean, summarise
from fedapp.results import forms
from fedapp.results.cells import mapped, uncelled
from fedapp.results.statistics import Ints, resolution, traffic, worst
from fedapp.settings.evaluation import ALWAYS

NO_TESTS = "no client has test rows: add a column split to the data, or use split = holdout"
"""Why runs have no scores, and what to do."""
LONGEST = 400
"""Letters of the reason of a failure that are shown."""
GRID = "grid.csv"
"""The points of a comparison's search, with the one that was chosen for each method and setting."""
AGAIN = "again"
"""Folder of a comparison's second runs of Standalone, and name of their table."""
RUN_MARK = "config.toml"
"""The file that makes a folder a run directory."""
PROTOCOL_TEXT = {
    "received": "before local training",
    "trained": "after local training",
    "tuned": "after fine-tuning of the received model",
    "global": "the one global model on the central test set",
}
"""The meaning of each protocol in all tables and figures."""
UNADJUSTED = "global: the head of all clients, before each of them adjusts it to its own class shares"
"""The meaning of `global` in runs whose clients adjust the received head."""
ONE_SCORE = "Training alone receives no model, so it has one score: after local training."
PAIRED = "Differences in received are to its model before the last training."
TUNED_PAIRS = "Differences in tuned are to the trained model of a reference that does not fine-tune."
"""What the paired tests compare where one side has no such score."""
HARM_TEXT = (
    "gain / same / lose: clients whose headline is above, at and below their own in training alone; at: within one "
    "standard error of the difference, and within one test row in any case."
)


# ---- files -----------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty where the file is not there.

    Raises
    ------
    BadRequest : the file cannot be read, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as e:
        raise BadRequest(f"{path} cannot be read ({e})") from e
    if not isinstance(value, dict):
        raise BadRequest(f"{path} cannot be read (not a JSON object)")
    return value


def read_table(path: Path) -> pd.DataFrame:
    """Read the whole lines of a CSV file; empty where the file is not there or holds no line yet.

    Raises
    ------
    BadRequest : the file cannot be read as a table.
    """
    try:
        content = path.read_bytes()
        # A number that was cut off in the middle is a number too: only its line's end says that it is whole.
        whole = content[: content.rfind(b"\n") + 1]
        table = pd.read_csv(io.BytesIO(whole)) if whole.strip() else pd.DataFrame()
        return mapped(table, uncelled) if b"'" in whole else table
    except FileNotFoundError:
        return pd.DataFrame()
    except (OSError, ValueError, OverflowError) as e:
        raise BadRequest(f"{path} cannot be read ({e})") from e


def refuse(path: Path, said: str) -> None:
    """Refuse a damaged file.

    Raises
    ------
    BadRequest : `said` names the fault.
    """
    if said:
        raise BadRequest(f"{path} is damaged ({said}): take another copy of {path.parent}, or remove it and run again")


_T = TypeVar("_T")


class once(cached_property[_T]):
    """A value that is read once for a run, under all labels that `replace` gives it."""

    def __get__(self, run: Any, owner: type[Any] | None = None) -> _T:  # type: ignore[override]
        name = str(self.attrname)
        if name not in run.known:
            run.known[name] = self.func(run)
        value: _T = run.known[name]
        return value


def _table(name: str, *whole: str) -> once[pd.DataFrame]:
    """Read a table whose columns `whole` have a whole number in each row."""

    def read_whole(run: RunResult) -> pd.DataFrame:
        table = read_table(run.out / name)
        refuse(run.out / name, forms.wrong_table(table, whole))
        return table

    return once(read_whole)


def _json(name: str, wrong: Callable[[Mapping[str, Any]], str] = lambda _: "") -> once[dict[str, Any]]:
    """Read a JSON file; `wrong` returns its damage."""

    def read_whole(run: RunResult) -> dict[str, Any]:
        value = read_json(run.out / name)
        refuse(run.out / name, wrong(value))
        return value

    return once(read_whole)


# ---- one run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RunResult:
    """A run directory, finished or not.

    Attributes
    ----------
    out : the run directory.
    label : in a comparison the method's id with its own values, `fedprox(mu=0.1)`; else the id.
    setting : in a comparison the run-config keys in which its settings differ, without those of the method.
    known : values that were read from the directory so far, by attribute.
    rounds, clients : `rounds.csv` and `clients.csv`, one row per round, and one row per client and round.
    evaluations : `evaluations.csv`, one row per evaluation of all clients between rounds.
    final : `final.csv`, one row per client, scored after the last round.
    unseen : `unseen.csv`, one row per client that took no part, scored after the last round.
    dropped : `dropped.csv`, one row per reply that did not count.
    summary : `summary.json`; empty until the run ends.
    versions : `versions.json`: versions of packages, the processor, the run's token.
    card : `data_card.json`; empty where the data lie on devices.
    error : `error.json`, the first error of a run that failed.
    """

    out: Path
    label: str = ""
    setting: Mapping[str, Any] = field(default_factory=dict)
    known: dict[str, Any] = field(default_factory=dict, repr=False)

    rounds, clients = _table("rounds.csv", "round"), _table("clients.csv", "round", "client")
    evaluations = _table("evaluations.csv", "round")
    final, dropped = _table("final.csv", "client"), _table("dropped.csv", "client")
    unseen = _table("unseen.csv")
    summary = _json("summary.json", forms.wrong_summary)
    versions = _json("versions.json", partial(forms.wrong, forms.Singles))
    card, error = _json("data_card.json", forms.wrong_card), _json("error.json")

    @once
    def flat(self) -> dict[str, Any]:
        """`config.toml`, the run-config as it was written.

        Raises
        ------
        BadRequest : there is none, or it is not TOML.
        """
        file = self.out / RUN_MARK
        try:
            value = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as e:
            raise BadRequest(f"{self.out} holds no run ({RUN_MARK}: {e.strerror})") from e
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as e:
            raise BadRequest(f"{file} cannot be read ({e})") from e
        refuse(file, forms.wrong_config(value))
        return value

    @once
    def _accepted(self) -> tuple[RunConfig | None, str]:
        try:
            return configuration.from_flat({**configuration.without_former(self.flat), "resume": False}), ""
        except BadRequest as e:
            return None, str(e)

    @property
    def config(self) -> RunConfig | None:
        """The run-config, validated and resolved; None where this version does not accept it."""
        return self._accepted[0]

    @property
    def problem(self) -> str:
        """Why `config` is None, else an empty string."""
        return self._accepted[1]

    @property
    def ok(self) -> bool:
        """Whether the run has finished without an error."""
        return bool(self.summary.get("ok"))

    @property
    def failure(self) -> str:
        """The reason that a comparison's run has not finished, with the remedy; empty for a finished run."""
        again = "would fail in the same way" if self.repeats else "continues it"
        return "" if self.ok else f"{self.reason} (the same command {again})"

    @property
    def reason(self) -> str:
        """The reason that the run has not finished, with the round."""
        text = str(self.error.get("message") or self.summary.get("error") or "not finished")
        return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"

    @property
    def repeats(self) -> bool:
        """Whether a run that failed would fail again with the same settings: they are refused, or diverge."""
        return bool(self.error.get("diverged")) or self.error.get("exit") == 2

    @property
    def method(self) -> str:
        """The method's id."""
        return str(self.flat.get("method", "?"))

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.flat.get("seed", 0))

    @property
    def data_seed(self) -> int:
        """The seed of the run's partition."""
        given = self.flat.get("partition-seed", "auto")
        return self.seed if given == "auto" else int(given)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, from the data card."""
        return tuple(str(c) for c in self.card.get("classes", ()))

    @once
    def names(self) -> tuple[str, ...]:
        """The clients' own names, each as it may stand in a line; empty where the data have none."""
        return tuple(in_lines(str(name) for name in self.card.get("names", ())))

    def name_of(self, client: int) -> str:
        """Return a client's number, with its own name behind it if it has one: `3 (ada)`."""
        return f"{client} ({self.names[client]})" if 0 <= client < len(self.names) else str(client)

    @property
    def counts(self) -> Ints:
        """(K, C) training images by client and class; (0, 0) without a data card."""
        return np.array(self.card.get("train", np.zeros((0, 0))), dtype=np.int64)

    @once
    def alone(self) -> bool:
        """Whether clients receive no model (training alone) and have one score, after local training."""
        return "trained_accuracy" in self.rounds and (self.out / RUN_MARK).is_file() and self.method == "local"

    @once
    def protocols(self) -> tuple[str, ...]:
        """Protocols that were measured, in the order of the tables; `trained` alone for Standalone."""
        measured = tuple(p for p in PROTOCOL_TEXT if any(f"{p}_accuracy" in t for t in (self.rounds, self.final)))
        return ("trained",) if self.alone else measured

    @property
    def final_training(self) -> bool:
        """Whether `trained` in final.csv is after one more local training; earlier versions never did that."""
        return bool(self.flat.get("final-training", False))

    @property
    def adjusted(self) -> bool:
        """Whether clients adjusted the head that they received; `global` is then of a head that none of them uses."""
        return bool(self.summary.get("personal"))

    @property
    def bytes_up(self) -> float | None:
        """Bytes that a client sends in a round; without rounds those of its answers to all queries."""
        asked = [value for key, value in self.summary.items() if key.startswith("bytes_up_query.")]
        found: float | None = sum(asked) if asked and not self.summary["rounds"] else self.summary["bytes_up"]
        return found

    @property
    def sampled(self) -> bool:
        """Whether some rounds had only a part of the clients."""
        return bool(len(self.rounds)) and float(self.flat.get("fraction-train", 1.0)) < 1

    def curve(self, protocol: str, everyone: bool = False) -> pd.DataFrame:
        """Return the scores of a protocol by the number of completed rounds that are behind the scored model.

        A client that is scored in round t holds what the server made in round t - 1, and perhaps trained it once: t - 1
        rounds are completed. The last row is the evaluation of all clients after the last round, which tables show.
        Where the clients of a round are sampled and `evaluations.csv` has scores of all clients, those replace the
        participants' scores.

        Parameters
        ----------
        everyone : leave out points that do not count all clients.

        Returns
        -------
        Columns `completed`, `accuracy`, `std` and `pooled` (over clients), `balanced`, `loss`, `clients` (how many were
        scored) and `bytes` (of all clients in the completed rounds, both ways); no rows where nothing was measured.
        Where validation images chose the round, its score stands at that round, and the curve goes on behind it.
        """
        name = f"curve {protocol} {everyone}"
        if name not in self.known:
            self.known[name] = self._curve(protocol, everyone)
        curve: pd.DataFrame = self.known[name]
        return curve

    def _curve(self, protocol: str, everyone: bool) -> pd.DataFrame:
        names = {
            "accuracy": f"{protocol}_accuracy", "std": f"{protocol}_accuracy_std",
            "pooled": f"{protocol}_accuracy_pooled", "balanced": f"{protocol}_balanced", "loss": f"{protocol}_loss",
        }  # fmt: skip
        rounds = self.rounds
        if names["accuracy"] not in rounds:
            return pd.DataFrame(columns=["completed", *names, "clients", "bytes"])
        moved = dict(zip([0, *rounds["round"]], [0.0, *traffic(rounds)]))
        last = int(rounds["round"].max()) if len(rounds) else 0
        ends, completed = rounds, (rounds["round"] - (protocol != "global")).tolist()
        if protocol != "global" and self.sampled and names["accuracy"] in self.evaluations:
            ends, completed = self.evaluations, self.evaluations["round"].tolist()
        unknown = [math.nan] * len(ends)
        columns = [ends[c].tolist() if c in ends else unknown for c in (*names.values(), "clients")]
        points = list(zip(completed, *columns))
        # Each client as it was last trained: where all take part, the last row of rounds.csv says it already.
        if protocol != "trained" or self.final_training or self.sampled:
            points.append((int(self.summary.get("round") or last), *self._last_scores(protocol, names)))
        first: dict[tuple[int, float], tuple[float, ...]] = {}
        for done, accuracy, *others in points:
            if accuracy == accuracy:
                first.setdefault((done, accuracy), (*others, moved.get(done, 0.0)))
        clients = max(len(self.final), int(self.summary.get("clients") or 0))
        order = sorted(first, key=lambda point: point[0]) if self.selected else first
        some = protocol != "global" and everyone
        rows = [(*point, *first[point]) for point in order if not some or first[point][-2] == clients]
        return pd.DataFrame(rows, columns=["completed", *names, "clients", "bytes"])

    def _last_scores(self, protocol: str, names: Mapping[str, str]) -> tuple[float, ...]:
        """Return the scores of the final evaluation in the order of `names`, and how many clients it scored."""
        if protocol == "global":
            known = {"accuracy": self.score("global"), "balanced": self.score("global", "balanced")}
            return *(known.get(name, math.nan) for name in names), math.nan
        told = {c: self.final[c].tolist() for c in self.final if c.startswith(f"{protocol}_")}
        found = summarise([dict(zip(told, row)) for row in zip(*told.values())], [protocol])
        pooled = (self.summary.get("pooled") or {}).get(protocol)
        if pooled is not None:
            found[names["pooled"]] = pooled  # the server knows the cap on test counts
        return *(found[column] for column in names.values()), len(self.final)

    def score(self, protocol: str, name: str = "last") -> float:
        """Return one number of the summary, `last`, `best`, `participants`, ...; NaN where it is missing.

        Standalone has no `received` score: see :data:`ONE_SCORE`.
        """
        if self.alone and protocol == "received":
            return math.nan
        if name == "last" and f"{protocol}_accuracy" in self.final:
            # Summaries of version 0.1 have the last round's participants here.
            return mean(self.final[f"{protocol}_accuracy"])
        value = self.summary.get("accuracy", {}).get(protocol, {}).get(name)
        return math.nan if value is None else float(value)

    @property
    def unseen_scores(self) -> tuple[str, ...]:
        """The scores of clients that took no part, `unseen_received`, `unseen_trained@2`, ...; empty without any."""
        return tuple(p for p in self.summary.get("metrics", {}) if p.startswith("unseen_"))

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics that were measured besides accuracy and loss, as their columns are named."""
        found = {name: None for scores in self.summary.get("metrics", {}).values() for name in scores}
        return tuple(name for name in found if name not in ALWAYS)

    @property
    def printed_metrics(self) -> tuple[str, ...]:
        """The metrics without the number of classes behind `auc`."""
        return tuple(name for name in self.metrics if name != "auc_classes")

    def metric(self, protocol: str, name: str, what: str = "mean") -> float:
        """Return `mean`, `std`, `worst_decile` or `worst` over clients of a metric; NaN where it was not measured."""
        found = {} if self.alone and protocol == "received" else self.summary.get("metrics", {}).get(protocol, {})
        numbers = found.get(name) or {}
        value = numbers.get("min", numbers.get("max")) if what == "worst" else numbers.get(what)
        return math.nan if value is None else float(value)

    @property
    def headline(self) -> str:
        """The score that the method is judged by; empty where none was measured."""
        return str((self.summary.get("headline") or {}).get("score", ""))

    def headline_counts(self) -> pd.DataFrame:
        """Return `correct` and `total` test rows of the headline by client; empty where it is of one global model."""
        columns = {f"{self.headline}_{name}": name for name in ("correct", "total")}
        if not {*columns} <= {*self.final}:
            return pd.DataFrame(columns=[*columns.values()], dtype=float)
        return self.final.set_index("client")[[*columns]].rename(columns=columns)

    @once
    def confusions(self) -> dict[str, Ints]:
        """`final_confusion.npz`: `client` (M,), and (M, C, C) counts by score; empty where none were measured."""
        try:
            with np.load(self.out / "final_confusion.npz") as stored:
                return {name: stored[name] for name in stored.files}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, zipfile.BadZipFile) as e:
            raise BadRequest(f"{self.out / 'final_confusion.npz'} cannot be read ({e})") from e

    @property
    def selected(self) -> bool:
        """Whether validation images chose the round that is scored."""
        return bool(self.flat.get("select", "last") == "validation")

    @property
    def privacy(self) -> dict[str, Any]:
        """The privacy statement of the run; empty without `dp`."""
        return dict(self.summary.get("privacy") or {})

    @property
    def test_rows(self) -> pd.Series:
        """The number of test rows of each client, the same for every score of its own test rows."""
        stated = pd.Series(self.card.get("test_sizes"), dtype=float)
        return next((self.final[c] for c in self.final if c.endswith("_total")), stated)

    def resolution(self, pooled: bool = False, tenth: bool = False) -> float:
        """Return the smallest step of a mean accuracy over clients, or over a tenth of them; NaN without test rows.

        Pooled scores are measured on the clients' test rows together, or on the run's number of them.
        """
        if not pooled:
            return resolution(self.test_rows, tenth)
        stated = (self.summary.get("sampled") or {}).get("balanced") or {}
        rows = min(float(self.test_rows.sum()), float(stated.get("images", UNION)))
        return 1 / rows if rows > 0 else math.nan

    def weakest(self, protocol: str) -> tuple[float, float]:
        """Return the final accuracy of the worst client, and the mean of the worst 10 % of the clients."""
        return worst(self.final.get(f"{protocol}_accuracy", ()))


def read_run(path: str | Path) -> RunResult:
    """Return the run in a run directory.

    Raises
    ------
    BadRequest : there is no `config.toml`, or it is not TOML.
    """
    run = RunResult(absolute(path))
    return replace(run, label=run.method)


# ---- several runs ----------------------------------------------------------------------------------------------------

ROUNDS = "num-server-rounds"
SETTING_KEYS = (
    "dataset", "partition", "alpha", "classes-per-client", "clients", "fraction-train", "model", "local-epochs",
    ROUNDS, "split", "method-args",
)  # fmt: skip
"""Run-config keys in which the runs of a comparison may differ besides method and seed, the outermost first."""
MAX_FOLDER = 80
"""Letters of a folder's name from which on it is cut."""
OWN_KEYS = ("model", "local-epochs")
"""Setting keys that `fedapp compare` lets one method have for itself."""
NOT_OWN = ("method", "seed", "out", "resume", "state-dir", "federation", "keep-models", "track")
"""Run-config keys that do not tell the runs of one method apart in a label."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Several runs under one folder.

    Attributes
    ----------
    out : the folder.
    runs : a run directory below it for each row of `table`, in their order; all of them, by path, where none has a row.
    others : the directories of the other runs, which are of an earlier call.
    """

    out: Path
    runs: tuple[RunResult, ...]
    others: tuple[RunResult, ...] = ()

    @cached_property
    def table(self) -> pd.DataFrame:
        """`results.csv` of `fedapp compare`, one row per run; empty where there is none."""
        return self._numbers("results.csv", "trained_target", "trained_target_rounds", "trained_target_bytes")

    @cached_property
    def significance(self) -> pd.DataFrame:
        """`significance.csv` of `fedapp compare`, one row per setting, measure and method; perhaps empty."""
        return self._numbers("significance.csv", "seeds", "mean_difference", "low", "high")

    @cached_property
    def again(self) -> pd.DataFrame:
        """`again.csv`: training alone a second time, with the columns of `table`; empty with fewer than three seeds."""
        return self._numbers(f"{AGAIN}.csv")

    @cached_property
    def notes(self) -> dict[str, list[str]]:
        """`notes.json` of `fedapp compare`: `alerts`, `notes`, `command`, `reference`, each a list of lines."""
        found = read_json(self.out / "notes.json")
        return {
            name: [str(line) for line in found.get(name) or []] for name in ("alerts", "notes", "command", "reference")
        }

    def _numbers(self, name: str, *columns: str) -> pd.DataFrame:
        table = read_table(self.out / name)
        refuse(self.out / name, forms.wrong_table(table, (), set(table) - set(columns)))
        return table

    @property
    def finished(self) -> tuple[RunResult, ...]:
        """The runs that have finished without an error."""
        return tuple(r for r in self.runs if r.ok)

    @property
    def labels(self) -> tuple[str, ...]:
        """Methods, each with its own values, in the order of tables and figures.

        It is the order of `results.csv`; those it lacks follow by name, and training alone stands last.
        """
        column = next((c for c in ("variant", "method") if c in self.table), None)
        listed = [] if column is None else [str(v) for v in self.table[column]]
        present = {r.label for r in self.runs}
        known = dict.fromkeys([*(v for v in listed if v in present), *sorted(present)])
        return tuple(sorted(known, key=lambda label: label.partition("(")[0] == "local"))


def read_comparison(path: str | Path) -> Comparison:
    """Read the run directories below a folder, up to four levels deep, that `results.csv` has, in its order.

    Raises
    ------
    BadRequest : there is none.
    """
    path = absolute(path)
    folders = sorted(p.parent for depth in range(1, 5) for p in path.glob("*/" * depth + RUN_MARK))
    searched = _searched(path)
    runs = [
        read_run(p)
        for p in folders
        if not {"state", AGAIN} & {*p.relative_to(path).parts} and searched.get(_without_seed(p), "chosen")
    ]
    if not runs:
        raise BadRequest(f"{path} holds neither a run ({RUN_MARK}) nor a comparison (run directories below it)")
    table = Comparison(path, ()).table
    variants = {folder_of(str(v)): str(v) for v in table.get("variant", ())}
    named = {r.out: searched.get(f := _without_seed(r.out)) or variants.get(f.name, "") for r in runs}
    found = _with_rows(labelled([r for r in runs if named[r.out]] or runs, named), table)
    kept = {r.out for r in found}
    return Comparison(path, tuple(found), tuple(r for r in runs if r.out not in kept))


def _with_rows(runs: Sequence[RunResult], table: pd.DataFrame) -> list[RunResult]:
    """Return the runs that have a row of `results.csv`, one for each row, in their order; all where none has one."""
    if not {"variant", "seed"} <= set(table):
        return list(runs)
    columns = [c for c in ("dataset", "partition", "alpha", "classes_per_client", "sweep") if c in table]
    rows = list(table[["variant", "seed", *columns]].itertuples(index=False, name=None))

    def rank(run: RunResult) -> int:
        for number, (variant, seed, *about) in enumerate(rows):
            if (str(variant), seed) == (run.label, run.seed) and all(
                tells_of(run, column, value) for column, value in zip(columns, about)
            ):
                return number
        return len(rows)

    by_row = {rank(run): run for run in runs}
    return [by_row[number] for number in sorted(by_row) if number < len(rows)] or list(runs)


def tells_of(run: RunResult, column: str, value: Any) -> bool:
    """Whether a cell of `results.csv` that describes a setting is that of a run; an empty one is of every run."""
    if value != value or value is None:
        return True
    if column == "sweep":
        pairs = (entry.rpartition(" ") for entry in str(value).split(", "))
        return all(str(_setting(run, key)) == given for key, _, given in pairs)
    return bool(run.flat.get(column.replace("_", "-")) == value)


def _searched(path: Path) -> dict[Path, str]:
    """Return the method that each point of a search stands for, empty for those not chosen, by folder without seed."""
    table = read_table(path / GRID).astype(object).fillna({"setting": ""})
    lacking = {"setting", "variant", "method", "chosen"} - set(table) if len(table) else ()
    refuse(path / GRID, f"no column {', '.join(sorted(lacking))}" if lacking else "")
    return {
        path / "runs" / str(row["setting"]) / folder_of(str(row["variant"])): str(row["method"]) * bool(row["chosen"])
        for _, row in table.iterrows()
    }


def _without_seed(run: Path) -> Path:
    return run.with_name(re.sub(r"-s[0-9]+$", "", run.name))


def read(path: str | Path) -> RunResult | Comparison:
    """Read a run directory, or a folder of run directories.

    Raises
    ------
    BadRequest : it is neither.
    """
    path = folder_at(path)
    return read_run(path) if is_there(path / RUN_MARK) else read_comparison(path)


def folder_at(path: str | Path) -> Path:
    """Return the absolute path of a folder.

    Raises
    ------
    BadRequest : it does not exist, or is a file.
    """
    path, advice = absolute(path), "give a run directory or the folder of a comparison"
    if not is_there(path):
        raise absent(path, advice)
    if not path.is_dir():
        raise BadRequest(f"{path} is not a folder: {advice}")
    return path


def labelled(runs: Sequence[RunResult], named: Mapping[Path, str] | None = None) -> list[RunResult]:
    """Give every run its setting, and a label that tells it from the other runs of that setting and seed.

    `named` has the label of each run of `fedapp compare` by its folder; among other runs, the keys in which those of
    one method and setting differ make the label.
    """
    named = named or {}
    whole = all(named.get(r.out) for r in runs)
    one_length = len({_setting(r, ROUNDS) for r in runs} - {0}) < 2  # 0: a method that trains nothing
    left_out = {"method-args", *(OWN_KEYS if whole else ()), *([ROUNDS] if one_length else [])}
    keys = [k for k in varying(runs) if k not in left_out]
    settings = {r.out: {k: v for k in keys if (v := _setting(r, k)) is not None} for r in runs}
    labelled = []
    for run in runs:
        label = named[run.out] if whole else ""
        if not label:
            like = [r for r in runs if r.method == run.method and settings[r.out] == settings[run.out]]
            own = [k for k in run.flat if k not in NOT_OWN and len({str(r.flat.get(k)) for r in like}) > 1]
            inside = [str(run.flat[k]) if k == "method-args" else f"{k}={run.flat[k]}" for k in own]
            label = run.method + (f"({' '.join(i for i in inside if i)})" if any(inside) else "")
        labelled.append(replace(run, label=label, setting=settings[run.out]))
    return labelled


def folder_of(label: str) -> str:
    """Return the beginning of the folders that a comparison gives the runs of a variant; a long one ends in a hash."""
    text = re.sub(r"[^A-Za-z0-9._=+-]+", "-", label).strip("-")
    if len(text) <= MAX_FOLDER:
        return text
    return f"{text[: MAX_FOLDER - 9]}-{hashlib.sha256(label.encode()).hexdigest()[:8]}"


def uses(run: RunResult, key: str) -> bool:
    """Whether a run's partition uses `alpha` or `classes-per-client`; true for every other key."""
    if key not in PARTITION_PARAMETER.values():
        return True
    return key == PARTITION_PARAMETER.get(str(run.flat.get("partition", "")))


def _setting(run: RunResult, key: str) -> Any:
    """A setting's value, or None where the run's partition does not use it.

    The rounds of a sweep are in the folder's name: a method without rounds has 0 in its run-config.
    """
    if key == ROUNDS and run.flat.get(key) == 0 and (swept := re.search(rf"{ROUNDS}=(\d+)", run.out.parent.name)):
        return int(swept[1])
    return run.flat.get(key) if uses(run, key) else None


def varying(runs: Sequence[RunResult]) -> list[str]:
    """Return the setting keys in which runs differ; those that a partition does not use are left out."""
    return [k for k in SETTING_KEYS if len({str(_setting(r, k)) for r in runs}) > 1]


def groups_of(runs: Sequence[RunResult]) -> Iterator[tuple[Mapping[str, Any], list[RunResult]]]:
    """Yield the settings of a comparison and their runs; one empty setting where all runs share everything."""
    found: dict[tuple[str, ...], list[RunResult]] = {}
    for run in runs:
        found.setdefault(tuple(f"{k}={v}" for k, v in run.setting.items()), []).append(run)
    for members in found.values():
        yield members[0].setting, members
