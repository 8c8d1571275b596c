"""Run one configuration in this process: `from fedapp import run` in a notebook, `fedapp run --engine local`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedapp import config as configuration
from fedapp.config import RunConfig
from fedapp.data import card, datasets
from fedapp.data.card import DataCard
from fedapp.data.names import HUB
from fedapp.errors import BadRequest
from fedapp.files import absolute
from fedapp.models import IDENTITY
from fedapp.results.directory import check_out, check_writable, new_folder, run_name
from fedapp.results.runs import RunResult, read_run
from fedapp.results.terminal import echo
from fedapp.tasks import simulated as tasks
from fedapp.tracking import following

DEFAULT_CLIENTS = 10
Listener = Callable[[Mapping[str, Any]], None]


def read_values(values: Mapping[str, Any], check: Callable[[RunConfig], None]) -> RunConfig:
    """Return the configuration of flat keys after `check` and a look at its trackers."""
    config = configuration.from_flat({**values, "resume": False})
    check(config)
    following.check(config.storage.track)
    return config


def say_ignored(values: Mapping[str, Any], config: RunConfig) -> None:
    """Print that a number of rounds has no effect where nothing is trained."""
    if values.get("num-server-rounds") and not config.federation.num_server_rounds:
        echo(f"{config.federation.method} trains nothing here (base = none), so there are no rounds", err=True)


def effective(values: Mapping[str, Any]) -> RunConfig:
    """Make the effective configuration of a simulation: `auto` resolved, number of clients set, paths absolute."""
    # The model decides hyperparameters, so it is known before they are.
    named = {**configuration.DEFAULTS, **values}
    features = named["model"] == "auto" and datasets.are_features(named["dataset"], str(named["data-dir"]))
    values = {**values, "model": IDENTITY} if features else values
    config = read_values(values, configuration.check_simulation)
    paths = {
        "data_dir": config.data.data_dir,
        "state_dir": config.storage.state_dir,
        "weights": config.model.weights,
        "partition_file": config.data.partition_file,
    }
    given = {name: str(absolute(path)) for name, path in paths.items() if path and not path.startswith(HUB)}
    config = config.replaced(**given)
    if stored := getattr(config.method_and_hparams()[1], "totals", ""):
        place = absolute(stored)
        if len(str(place).split()) > 1:
            raise BadRequest(f"totals={stored}: method-args end at a blank, and {place} has one: rename its folder")
        args = config.federation.method_args.replace(f"totals={stored}", f"totals={place}")
        config = config.replaced(method_args=args)
    return tasks.settled(config, DEFAULT_CLIENTS)


def prepare(values: Mapping[str, Any], out: Path | None) -> RunConfig:
    """Make the effective configuration of a simulation and check everything that can be checked before training.

    Parameters
    ----------
    values : flat run-config keys; missing ones have their defaults.
    out : run directory (made absolute), default a new `./runs/<method>-<dataset>-s<seed>-<time>`.

    Raises
    ------
    BadRequest : a value, the data or the directory would make the run fail later.
    """
    return placed(effective(values), out, resume=bool(values.get("resume", False)))


def placed(config: RunConfig, out: Path | None, *, resume: bool) -> RunConfig:
    """Check an effective configuration against data, models and run directory, and return it with its `out`."""
    tasks.check(config, config.data.clients)
    if config.storage.state_dir:
        check_writable(absolute(config.storage.state_dir))
    return config.replaced(out=str(run_folder(config, out, resume=resume)), resume=resume)


def run_folder(config: RunConfig, out: Path | None, *, resume: bool) -> Path:
    """Return the absolute run directory, by default a new one, after a check of its content."""
    folder = new_folder(Path("runs"), run_name(config)) if out is None else absolute(out)
    check_out(folder, resume)
    return folder


def resumed(place: Path, given: Mapping[str, Any], *others: str, out: Path | None = None) -> dict[str, Any]:
    """Return the flat run-config that continues the run in `place`, which an `out` may name too.

    Raises
    ------
    BadRequest : the run does not exist, or an argument that must not change is given (`others` names those that are
        not keys).
    """
    elsewhere = ["out"] if out is not None and absolute(out) != absolute(place) else []
    free = [key for key in configuration.CHANGEABLE if key not in ("out", "resume")]
    if named := [*sorted(set(given) - set(free)), *others, *elsewhere]:
        raise BadRequest(
            f"a resumed run takes everything but {', '.join(free)} from {place / 'config.toml'}; "
            f"leave out {', '.join(named)}"
        )
    out = absolute(place)
    check_out(out, resume=True)
    values = configuration.read_toml(out / "config.toml")
    if "method" not in values:
        raise BadRequest(f"{out / 'config.toml'} names no method: put a good copy of it back, or start a new run")
    if values.get("dp") == "client" and values.get("dp-noise", "auto") == "auto" and "num-server-rounds" in given:
        # The noise of the other rounds follows from the first number of rounds, and so does the rest of the budget.
        stated = configuration.from_flat(values).mechanism
        values["dp-noise"] = stated.noise if stated else "auto"
    return {**values, **given, "resume": True, "out": str(out)}


def run_local(config: RunConfig, listener: Listener | None = None) -> RunResult:
    """Run a prepared configuration in this process, without Ray."""
    from fedapp.client_app import app as client_app
    from fedapp.server_app import serve
    from fedapp.transport.local_grid import LocalGrid
    from fedapp.transport.virtual import hosts

    context = configuration.for_context(config)
    with following.tracked(config, listener) as told:
        serve(LocalGrid(client_app, context, hosts(config.data.clients, apart=config.secure.secure_sum)), context, told)
    return read_run(Path(config.storage.out))


LISTS = ("model", "protocols", "metrics", "track", "unseen", "adapt-epochs", "class-weights", "class-names", "bodies")
"""Run-config keys whose text has commas between its parts."""
PAIRS = ("method-args", "model-args", "optimizer-args", "partition-args", "columns")
"""Run-config keys whose text is "name=value name=value"."""


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return run-config keys, with hyphens, of keyword arguments; `rounds` is short for `num_server_rounds`.

    A path becomes text, and so does a list (:data:`LISTS`) or a dict (:data:`PAIRS`) of a key that takes several.

    Raises
    ------
    BadRequest : an unknown key, a value of a wrong type or out of its range, or `rounds` is given twice.
    """
    values = {k.replace("_", "-"): _as_key(k.replace("_", "-"), v) for k, v in settings.items()}
    if "rounds" in values:
        rounds = values.pop("rounds")
        if repr(values.get("num-server-rounds", rounds)) != repr(rounds):
            raise BadRequest(
                f"rounds = {configuration.shown(rounds)} and num_server_rounds = "
                f"{configuration.shown(values['num-server-rounds'])}: give it once"
            )
        values["num-server-rounds"] = rounds
    values = configuration.expanded(values)
    configuration.validated(values)
    return values


def _as_key(key: str, value: Any) -> Any:
    """Return a value of a program in the form that a key has in files."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if key in PAIRS and isinstance(value, Mapping):
        return " ".join(f"{name}={_as_text(part)}" for name, part in value.items())
    if key in LISTS and isinstance(value, (list, tuple)):
        return _as_text(value)
    return value


def _as_text(value: Any) -> str:
    return ",".join(map(_as_text, value)) if isinstance(value, (list, tuple)) else str(value)


def as_path(name: str, value: str | Path | None) -> Path | None:
    """Return a folder that a program gives.

    Raises
    ------
    BadRequest : it is neither text nor a path.
    """
    if value is None or isinstance(value, (str, os.PathLike)):
        return None if value is None else Path(value)
    raise BadRequest(f"{name} = {configuration.shown(repr(value))}: must be text or a path")


def run(
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    on_round: Listener | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> RunResult:
    """Run a federation in this process and return its results.

    Parameters
    ----------
    out : run directory.   resume : run directory to continue instead.
    on_round : called after each round with its row of `rounds.csv` as a dict, for a live plot for example; an exception
        of it ends the run, which `resume` can continue.
    progress : show how far the run is; None = in notebooks.
    settings : run-config keys with underscores, such as `method="cwfedavg"`, `method_args="lam=10"` or a dict,
        `clients=20`, `num_server_rounds=5`. `rounds` is short for `num_server_rounds`.

    Raises
    ------
    BadRequest : a setting, the data or the directory would make the run fail later.

    Examples
    --------
    >>> result = run(method="fedavg", clients=4, rounds=2, out="runs/try")  # doctest: +SKIP
    >>> result.rounds[["round", "received_accuracy"]]  # doctest: +SKIP
    """
    from fedapp.engines import progress as display
    from fedapp.engines import runner

    if on_round is not None and not callable(on_round):
        raise BadRequest(f"on_round = {configuration.shown(repr(on_round))}: must be a function")
    folder, earlier = as_path("out", out), as_path("resume", resume)
    values = flat(settings)
    if earlier is not None:
        values, folder = resumed(earlier, values, out=folder), earlier
    config = prepare(values, folder)
    show = display.in_notebook() if progress is None else progress
    with runner.Follower() if show else contextlib.nullcontext() as follower:

        def listener(event: Mapping[str, Any]) -> None:
            if follower is not None:
                follower(event)
            if on_round is not None and event["kind"] == "round":
                on_round({k: v for k, v in event.items() if k not in ("kind", "rounds")})

        return run_local(config, listener if show or on_round is not None else None)


def data_card(**settings: Any) -> DataCard:
    """Return how a run with these settings would divide its data over the clients; nothing is trained.

    Parameters
    ----------
    settings : as for :func:`run`.

    Raises
    ------
    BadRequest : the data are not there, or cannot be divided so.
    """
    config = effective(flat(settings))
    data = tasks.federated(config, config.data.clients)
    return card.data_card(data.dataset, data.partition)
