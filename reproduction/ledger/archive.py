"""The ledger's runs in a few lines of text: what deciding claims and drawing their tables needs, and nothing else.

The folder holds one file a study, `<study>.jsonl`. The first line says what all of its runs have in common, each other
line is one run as a JSON object:

=============  =======================================================================================================
`config`       its run-config, without folders of the machine
`hparams`      the method's hyperparameters, defaults included
`versions`     of packages and Python, and the processor
`summary`      of `summary.json`: the accuracies, the bytes of a client and round, the seconds of the run
`final`,       the columns of these tables that claims read; a column with one value throughout is that value. Of other
`rounds`,      columns the name is kept, with empty cells. An accuracy that is correct / total is computed from these
`evaluations`  again
=============  =======================================================================================================

Numbers are written so that they read back to the same bits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from pydantic import Field, ValidationError

from fedapp import __version__
from fedapp import config as configuration
from fedapp.config import RunConfig
from fedapp.engines import local as engines
from fedapp.errors import BadRequest, faults
from fedapp.experiments.shipped import Entry
from fedapp.files import explained
from fedapp.results.directory import write_text
from fedapp.results.runs import RunResult
from reproduction.ledger.studies import RunKey, keys_of, settings_of, studies

PLACES = ("data-dir", "out", "resume", "state-dir", "federation", "keep-models", "track")
"""Run-config keys that say where a run was made and what it leaves on disk, and not what it is."""
REQUIRED = ("final-training",)
"""Run-config keys that changed what scores mean when they came: a run whose config lacks one has other scores."""
LATER = {
    "personal": False, "choose": False, "random_features": 0, "wire": "f64", "totals": "", "leave": False,
    "share": "all",
}  # fmt: skip
"""Hyperparameters that methods got after runs were kept, with the values that change no number."""
TABLES = ("final", "rounds", "evaluations")
HPARAMS = "hparams"
"""Where a run of the archive has the hyperparameters that it was made with."""
COLUMNS = re.compile(r"round|client|clients|dropped|bytes_up|bytes_down|[a-z]+_(accuracy|correct|total)")
"""Columns of the tables that are kept: those that `claims` and `reproduce` read."""

TOLERANCE = 1e-9
"""How far the `last` accuracy of a summary may lie from the mean over clients, which pandas adds in another order."""

Number = int | float | None
Share = Annotated[int | float, Field(ge=0, le=1)] | None
Table = dict[str, Number | list[Number]]


class Common(Entry):
    """The first line of a file: entries that all runs of the study share."""

    study: str
    config: dict[str, bool | int | float | str] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)


class Summary(Entry):
    """What is kept of `summary.json`."""

    ok: Literal[True]
    seconds: float
    bytes_up: Number = None
    bytes_down: Number = None
    accuracy: dict[str, dict[str, Share]] = Field(default_factory=dict)
    pooled: dict[str, Number] = Field(default_factory=dict)
    calibration: dict[str, Number] = Field(default_factory=dict)


class Line(Entry):
    """A run; `config` and `versions` say what differs from the first line."""

    variant: str
    seed: int = Field(ge=0)
    config: dict[str, bool | int | float | str]
    hparams: dict[str, Any]
    versions: dict[str, str]
    summary: Summary
    final: Table
    rounds: Table
    evaluations: Table = Field(default_factory=dict)


@dataclass(frozen=True)
class Archive:
    """What a folder holds.

    Attributes
    ----------
    runs : those that are still what their study asks for.   stale : the others, with what differs.
    seconds : of all of them.
    """

    runs: dict[RunKey, RunResult] = field(default_factory=dict)
    stale: dict[RunKey, str] = field(default_factory=dict)
    seconds: dict[RunKey, float] = field(default_factory=dict)


def identity(config: RunConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what makes a run the one that it is: its run-config without places, and its hyperparameters."""
    flat = {key: value for key, value in config.to_flat().items() if key not in PLACES}
    method, hparams = config.method_and_hparams()
    # A method that is built on another one has the hyperparameters of both.
    base = getattr(method.client, "base_hparams", None)
    inner = {} if base is None else {f"base.{k}": v for k, v in base.model_dump(mode="json").items()}
    return flat, {**hparams.model_dump(mode="json"), **inner}


def differing(key: RunKey, flat: Mapping[str, Any], hparams: Mapping[str, Any]) -> str:
    """Return in which settings a run differs from what its study asks for now; empty if in none.

    A run-config key that is younger than the run counts with its default, since a default leaves numbers as they were.
    The keys of :data:`REQUIRED` are the exception: a run without them differs. Hyperparameters must be the same in
    name and value, since a new one says what the method did not do before, unless :data:`LATER` has its value.

    Raises
    ------
    BadRequest : this version does not accept the run's configuration.
    """
    wanted, wanted_hparams = identity(engines.effective(settings_of(key)))
    there, _ = identity(configuration.from_flat(configuration.without_former(flat)))
    pairs = {k: (repr(there[k]), repr(wanted[k])) for k in wanted if there[k] != wanted[k]}
    pairs |= {k: ("missing", repr(wanted[k])) for k in REQUIRED if k not in flat}
    kept = {name: value for name, value in LATER.items() if name in wanted_hparams}
    for k in dict.fromkeys([*hparams, *wanted_hparams]):
        old, new = (repr(d[k]) if k in d else "missing" for d in ({**kept, **hparams}, wanted_hparams))
        if old != new:
            pairs[k] = (old, new)
    return "; ".join(f"{k} = {there} there, {now} now" for k, (there, now) in pairs.items())


def lacking(run: RunResult) -> str:
    """Return the keys of :data:`REQUIRED` that a run's config lacks, with commas between them."""
    return ", ".join(key for key in REQUIRED if key not in run.flat)


def fault(run: RunResult) -> str:
    """Return what in a run's tables and summary contradicts its configuration or each other; empty if nothing does."""
    assert run.config is not None
    clients, wanted_rounds, patience = (
        run.config.data.clients,
        run.config.federation.num_server_rounds,
        run.config.federation.patience,
    )
    found, rounds = run.final.get("client", pd.Series()).tolist(), run.rounds.get("round", pd.Series()).tolist()
    if found != list(range(clients)):
        return f"final has the clients {_brief(found)}, but the config has {clients} of them, 0 to {clients - 1}"
    early = patience and patience <= len(rounds) < wanted_rounds
    if rounds != list(range(1, (len(rounds) if early else wanted_rounds) + 1)):
        return f"rounds has the rounds {_brief(rounds)}, but the config has 1 to {wanted_rounds}"
    for name in TABLES:
        table = getattr(run, name)
        for column in (c for c in table if c.endswith("_accuracy")):
            wrong = [v for v in table[column].dropna() if not 0 <= v <= 1]
            if wrong:
                return f"{name} has {column} {wrong[0]:g}, but an accuracy lies between 0 and 1"
    for protocol in ("received", "trained"):
        mean = float(run.final.get(f"{protocol}_accuracy", pd.Series(dtype=float)).mean())
        last = run.summary.get("accuracy", {}).get(protocol, {}).get("last")
        if not np.isclose(np.nan if last is None else last, mean, rtol=0, atol=TOLERANCE, equal_nan=True):
            return f"summary has the last {protocol} accuracy {last}, but the mean over the clients of final is {mean}"
    return ""


def _brief(numbers: list[Any]) -> str:
    shown = [f"{n:g}" for n in numbers[:3]]
    return ", ".join(shown if len(numbers) < 5 else [*shown, "...", f"{numbers[-1]:g}"]) or "none"


# ---- writing ---------------------------------------------------------------------------------------------------------


def write(folder: Path, runs: Mapping[RunKey, RunResult]) -> Archive:
    """Write finished runs, next to those that the folder holds and that are not among them.

    Returns
    -------
    What the folder holds now; `stale` are the runs that were not taken up. Runs of the folder that are no longer what
    their study asks for are removed.

    Raises
    ------
    BadRequest : a file of the folder cannot be read or written.
    """
    differ = {key: _refusal(key, run) for key, run in runs.items()}
    merged = {**read(folder).runs, **{key: run for key, run in runs.items() if not differ[key]}}
    for study in studies().values():
        own = {key: merged[key] for key in keys_of((study.id, v) for v in study.variants) if key in merged}
        if not own:
            continue
        configs = [{k: v for k, v in run.flat.items() if k not in PLACES} for run in own.values()]
        versions = [{k: v for k, v in r.versions.items() if k not in ("run", "started")} for r in own.values()]
        shared, shared_versions = _common(configs), _common(versions)
        lines: list[dict[str, Any]] = [{"study": study.id, "config": shared, "versions": shared_versions}]
        for (key, run), config, found in zip(own.items(), configs, versions, strict=True):
            lines.append({
                "variant": key.variant, "seed": key.seed, "config": _rest(config, shared), "hparams": _hparams(run),
                "versions": _rest(found, shared_versions), "summary": _summary(run.summary),
                **{name: _columns(getattr(run, name, pd.DataFrame())) for name in TABLES},
            })  # fmt: skip
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        with explained(f"{folder} cannot be written", "give another folder"):
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / f"{study.id}.jsonl", text)
    return Archive(merged, {key: why for key, why in differ.items() if why})


def _refusal(key: RunKey, run: RunResult) -> str:
    """Return why a run is not taken up; empty if it is.

    A run directory does not hold the defaults of hyperparameters that its version had, so today's would be false for
    another version.
    """
    made, now = run.versions.get("fedapp", "an unknown version"), __version__
    if HPARAMS not in run.known and made != now:
        return f"made by fedapp {made}, and this is {now}, whose defaults may differ: run it again in a new folder"
    return run.problem or differing(key, run.flat, _hparams(run)) or fault(run)


def _hparams(run: RunResult) -> dict[str, Any]:
    assert run.config is not None
    hparams: dict[str, Any] = run.known[HPARAMS] if HPARAMS in run.known else identity(run.config)[1]
    return hparams


def _summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the entries of `Summary`, and of their entries the numbers; `accuracy` has them by score."""
    kept = {name: summary[name] for name in Summary.model_fields if summary.get(name) is not None}
    for name in ("pooled", "calibration"):
        if name in kept:
            kept[name] = _numbers(kept[name])
    if "accuracy" in kept:
        kept["accuracy"] = {score: _numbers(values) for score, values in kept["accuracy"].items()}
    return kept


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keep numbers alone; True and False, integers for Python, do not count."""
    return {k: v for k, v in values.items() if v is None or (isinstance(v, int | float) and not isinstance(v, bool))}


def _common(dicts: list[dict[str, Any]]) -> dict[str, Any]:
    return {k: v for k, v in dicts[0].items() if all(k in d and d[k] == v for d in dicts)}


def _rest(entries: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in entries.items() if k not in common}


def _columns(table: pd.DataFrame) -> Table:
    found: Table = {}
    for name in (c for c in table.columns if not c.endswith("seconds")):
        kept = COLUMNS.fullmatch(name)
        values = [None if not kept or pd.isna(v) else v for v in table[name].tolist()]
        found[name] = values[0] if len(values) > 1 and len(set(values)) == 1 else values
    for name, share in _shares(table).items():
        if share.equals(table[name]):
            del found[name]
    return found


def _shares(table: pd.DataFrame) -> dict[str, pd.Series]:
    """Return correct / total of every accuracy whose counts stand in a table."""
    names = [c.removesuffix("_correct") for c in table.columns if c.endswith("_correct")]
    return {f"{n}_accuracy": table[f"{n}_correct"] / table[f"{n}_total"] for n in names if f"{n}_total" in table}


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(folder: Path) -> Archive:
    """Read a folder, which need not exist.

    Raises
    ------
    BadRequest : a file is not what `write` writes; the message names the line.
    """
    found = Archive()
    for path in sorted(folder.glob("*.jsonl")):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeError) as e:
            raise BadRequest(f"{path} cannot be read ({e})") from e
        for number, text in enumerate(lines, 1):
            try:
                value = json.loads(text, parse_constant=_no_number)
                if number == 1:
                    common = Common.model_validate(value, strict=True)
                else:
                    _take(found, path, common, Line.model_validate(value, strict=True))
            except (ValueError, RecursionError) as e:
                reason = faults(e)[0].reason if isinstance(e, ValidationError) else str(e)
                raise BadRequest(
                    f"{path}, line {number}: {reason}: restore the file, or delete it and run the study again"
                ) from e
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _take(found: Archive, path: Path, common: Common, line: Line) -> None:
    """Add a run, or say why it is no longer one of the ledger's."""
    key = RunKey(common.study, line.variant, line.seed)
    if key in found.seconds:
        raise ValueError(f"{key.folder} stands twice")
    flat = {**common.config, **line.config}
    tables = {}
    for name in TABLES:
        table = pd.DataFrame(getattr(line, name)).apply(pd.to_numeric)
        tables[name] = table.assign(**{k: v for k, v in _shares(table).items() if k not in table})
    known = {
        "flat": flat, HPARAMS: line.hparams, "versions": {**common.versions, **line.versions}, **tables,
        "summary": line.summary.model_dump(exclude_unset=True), "alone": flat.get("method") == "local",
    }  # fmt: skip
    run = RunResult(path.parent / key.folder, known=known)  # the directory need not exist
    found.seconds[key] = line.summary.seconds
    try:
        asked = key.study in studies() and key.variant in studies()[key.study].variants
        why = differing(key, flat, line.hparams) if asked else "the ledger has no such run any more"
    except BadRequest as e:
        why = str(e)
    if why:
        found.stale[key] = f"made by fedapp {run.versions.get('fedapp', '(unknown version)')}: {why}"
        return
    if wrong := fault(run):
        raise ValueError(f"{key.folder}: {wrong}")
    found.runs[key] = run
