"""What `fedapp run` does: check, choose an engine, follow the run, print its results, exit truthfully."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from clients._initial import initial_arrays
from clients.base import FedClient
from fedapp import config as configuration
from fedapp import registry
from fedapp.config import RunConfig
from fedapp.data.card import data_card
from fedapp.engines import local as engines
from fedapp.engines import resources
from fedapp.engines.progress import Display
from fedapp.engines.resources import ClientResources
from fedapp.errors import BadRequest, counted, described, raised
from fedapp.learning.task import ModelSpec
from fedapp.models import selection
from fedapp.results import lines
from fedapp.results.directory import only_writer, short_path
from fedapp.results.runs import NO_TESTS, UNADJUSTED, RunResult
from fedapp.results.statistics import percent, privacy
from fedapp.results.terminal import Screen, announce, echo, print_fitting
from fedapp.tasks import simulated as tasks
from fedapp.tracking import following
from fedapp.transport.virtual import hosts

if TYPE_CHECKING:
    from fedapp.engines.superlink import Session


STARTING = "starting Flower's SuperLink, then Ray with its workers"


class Follower(Display):
    """Shows events of a run on standard error: a live line on a terminal or in a notebook, else one line per round."""

    def __init__(self, label: str = "") -> None:
        super().__init__(TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn(elapsed_when_finished=True))
        self.label = label
        self.started = time.monotonic()
        self.done_before = 0
        self.clients = 0
        self.failed: Mapping[str, Any] | None = None

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Show one event."""
        kind = event.get("kind")
        if kind == "start":
            self.done_before = int(event["done"])
            self.clients = int(event["clients"])
            self.started = time.monotonic()
            self.count(self.label or str(event["method"]), event["rounds"], event["done"])
        elif kind == "round":
            self._round(event)
        elif kind == "failed":
            self.failed = event
        said = lines.line(event)
        if said is not None:
            self.line(said)

    def _round(self, event: Mapping[str, Any]) -> None:
        text, bar = lines.scores(event, self.clients), self.bar
        to_do = event["rounds"] - event["round"]
        seconds = (time.monotonic() - self.started) / max(1, event["round"] - self.done_before) * to_do
        if not to_do:
            text += ", last scores follow"
        elif not isinstance(bar, Progress):  # a terminal's line has a column for it
            text += f", {math.ceil(seconds)} s left"
        if bar is None or self.task is None:
            name = f"{self.label} " if self.label else ""
            self.line(f"{name}round {event['round']}/{event['rounds']}: {text}")
        else:
            bar.update(self.task, completed=event["round"], text=text)


def what_leaves(config: RunConfig) -> list[str]:
    """Return lines with the arrays of each way of a round and their bytes, for each architecture."""
    data = tasks.federated(config, config.data.clients)
    method, hparams = config.method_and_hparams()
    lines = []
    half = config.federation.wire_dtype == "fp16"
    for name, shape in tasks.architectures(config, data):
        client: type[FedClient] = method.client
        spec = ModelSpec(name, data.dataset.num_classes, shape, 0, config.model, config.privacy.unit_features)
        model = client.build_model(spec, hparams)
        state = model.state_dict()
        down = list(initial_arrays(client, spec, method, hparams, config.training.buffers))
        up = selection.shared_names(model, method.up_prefixes(hparams), config.training.buffers)
        ways = {"each way": up} if up == down else {"down": down, "up": up}
        for way, names in ways.items():
            total = sum(state[n].numel() * (2 if half else 4) for n in names)
            named = f" ({', '.join(names)})" if 0 < len(names) < 5 else ""
            built = f"{name} for {described(shape)}" if data.dataset.parts else name
            lines.append(f"{built}: {counted(len(names), 'array')}, {total:,} bytes {way}{named}")
    if method.extra_up:
        lines.append(f"further arrays in replies: {', '.join(method.extra_up)} (their size depends on the data)")
    return [f"exchanged: {registry.exchanged(method, config.federation.num_server_rounds)}", *lines]


def run_and_report(
    values: Mapping[str, Any],
    out: Path | None,
    engine: str = "ray",
    client_cpus: int | None = None,
    client_gpus: float | None = None,
    dry_run: bool = False,
) -> int:
    """Run one configuration as a simulation and print its results; return the exit code."""
    chosen: ClientResources | None = None
    config = engines.effective(values)
    engines.say_ignored(values, config)
    if engine == "ray":  # wrong numbers are refused before any data is loaded, and PyTorch to count GPUs
        chosen = resources.choose_resources(config.data.clients, client_cpus, client_gpus or 0.0)
    elif client_cpus is not None or client_gpus is not None:
        raise BadRequest("--client-cpus and --client-gpus go with --engine ray; the local engine runs clients in turn")
    if dry_run:
        tasks.check(config, config.data.clients)
        print_config(config)
        echo("\n".join(what_leaves(config)))
        if chosen is not None:
            echo(proposed([config], client_cpus, client_gpus).text)
        return 0
    config = _examined(config, values, out, engine)
    folder = Path(config.storage.out)
    if engine == "local":
        announce("building models")
        with Follower() as follower:
            code = local(config, follower)
    else:
        from fedapp.engines.superlink import Session

        chosen = proposed([config], client_cpus, client_gpus)
        echo(chosen.text, err=True)
        announce(STARTING)
        with Follower() as follower, Session(log=folder / "superlink.log") as session:
            code = run_in(session, config, chosen, follower)
    folder = short_path(folder)
    if code == 0:
        print_summary(RunResult(folder).summary)
        echo(f"page: fedapp report {shlex.quote(str(folder))}")
    echo(f"results: {folder}", err=code != 0)
    if code and any((folder / "checkpoint").glob("*")) and not (folder / "error.json").exists():
        echo(f"complete rounds are kept; to continue: fedapp run --resume {shlex.quote(str(folder))}", err=True)
    return code


def _examined(config: RunConfig, values: Mapping[str, Any], out: Path | None, engine: str) -> RunConfig:
    """Check a configuration against data, models and run directory, and print its data card."""
    config = engines.placed(config, out, resume=bool(values.get("resume", False)))
    if config.storage.resume and engine == "ray":
        # The server that finds another one in the folder may write nothing there, not even why it ends.
        with only_writer(Path(config.storage.out)):
            pass
    data = tasks.federated(config, config.data.clients)
    echo(data_card(data.dataset, data.partition).text(), err=True)
    echo(auto_text(values, config), err=True)
    return config


def print_config(config: RunConfig) -> None:
    """Print a configuration as TOML."""
    echo(tomli_w.dumps(config.to_flat()).rstrip())


def proposed(configs: Sequence[RunConfig], cpus: int | None = None, gpus: float | None = None) -> ClientResources:
    """Choose the resources of virtual clients; where neither is given, one client is measured first.

    If the measurement fails, the rule for clients that were not measured applies, and the text says so.

    Parameters
    ----------
    configs : prepared configurations of runs that share their workers, one after the other.
    cpus, gpus : the user's choice; None = chosen here.
    """
    from fedapp.engines import measure

    clients = max(config.data.clients for config in configs)
    if cpus is not None or gpus is not None or resources.cluster_address():
        return resources.choose_resources(clients, cpus, gpus)
    cores = min(max(config.training.threads for config in configs), resources.usable_cores())
    announce("measuring one client")
    try:
        needs = measure.client_needs(configs)
    except BadRequest:
        raise
    except Exception as e:
        chosen = resources.choose_resources(clients, cores)
        reason = (str(e).strip().splitlines() or [""])[0]
        why = f"{type(e).__name__}: {reason}" if reason else type(e).__name__
        return replace(chosen, text=f"{chosen.text}; 1 GiB each assumed, measuring a client failed ({why})")
    # In each round those that are drawn, and all of them again for the last scores.
    trainings = sum(
        math.ceil(c.data.clients * c.federation.fraction_train) * c.federation.num_server_rounds + c.data.clients
        for c in configs
    )
    return resources.choose_resources(clients, cores, needs=needs, trainings=trainings)


def auto_text(given: Mapping[str, Any], used: RunConfig) -> str:
    """List in one line the values that `auto` stood for, among the given keys and the defaults of the others."""
    asked = {**configuration.DEFAULTS, **given}
    pairs = [f"{k} = {v}" for k, v in used.to_flat().items() if asked[k] == "auto" and v != "auto" and k != "split"]
    return "auto: " + ", ".join(pairs) if pairs else "auto: nothing to choose"


def local(config: RunConfig, follower: Follower) -> int:
    """Run one configuration in this process; return the exit code."""
    try:
        engines.run_local(config, follower)
    except BadRequest:
        raise
    except Exception as e:
        follower.line(lines.failed(follower.failed or {"message": raised(e), "traceback": ""}))
        return 1
    return 0


def run_in(session: Session, config: RunConfig, given: ClientResources, follower: Follower) -> int:
    """Submit one run to a session and follow it to its end; return the exit code."""
    handle = session.submit(
        config.to_flat(),
        num_supernodes=hosts(config.data.clients, apart=config.secure.secure_sum),
        client_cpus=given.client_cpus,
        client_gpus=given.client_gpus,
        total_cpus=given.total_cpus,
    )
    with following.tracked(config, follower) as told:
        outcome = handle.follow(told or follower)
    return outcome.report(partial(follower.line, must=True))


def _many(headline: Mapping[str, Any]) -> str:
    scored, known = headline["clients"], headline["of"]
    of_all = counted(known, "client")
    return (f"all {of_all}" if known > 1 else of_all) if scored == known else f"{scored} of {of_all}"


def print_run(run: RunResult, everything: bool) -> None:
    """Print the scores of a finished run.

    Parameters
    ----------
    everything : those of each client too.

    Raises
    ------
    BadRequest : it has not finished, or no client has test rows.
    """
    if not run.ok:
        resumed = f"to continue: fedapp run --resume {shlex.quote(str(run.out))}"
        again = "it would fail in the same way" if run.repeats else resumed
        raise BadRequest(f"{run.out} has not finished: {run.reason}; {again}")
    if not run.headline:
        raise BadRequest(f"{run.out} holds no score: {NO_TESTS}")
    print_summary(run.summary)
    if everything:
        scores = [column for column in run.final if column.endswith(("_accuracy", "_balanced"))]
        names = [run.name_of(int(client)) for client in run.final["client"]]
        print_fitting(
            Screen(highlight=False), names, {c: [*map(percent, run.final[c])] for c in scores}, first="client"
        )


def print_summary(summary: Mapping[str, Any]) -> None:
    """Print a run's final table."""
    Screen(highlight=False).print(
        f"{summary['method']} on {summary['dataset']}, {counted(summary['clients'], 'client')}, "
        f"{counted(summary['rounds'], 'round') if summary['rounds'] else 'one exchange'}"
    )
    table = Table()
    columns = {"all clients %": "last", "std over clients": "last_std", "all classes %": "balanced"}
    for name, key in (("validation %", "validation"), ("last round's clients %", "participants")):
        if any(scores.get(key) is not None for scores in summary["accuracy"].values()):
            columns[name] = key
    for name in ("score", *columns):
        table.add_column(name, justify="left" if name == "score" else "right")
    for protocol, scores in summary["accuracy"].items():
        table.add_row(protocol, *(percent(scores.get(key)) for key in columns.values()))
    Screen().print(table)
    headline = summary.get("headline")
    if headline:
        text = f"headline: {headline['score']} {percent(headline['value'])} %, mean over {_many(headline)}"
        Screen(highlight=False).print_line(f"{text}, {headline['point']}")
    sizes = summary["test_sizes"]
    text = f"test rows per client: {sizes['min']} to {sizes['max']}, mean {sizes['mean']:.1f}; "
    if summary["rounds"]:
        up, down = (f"{summary[f'bytes_{way}']:,.0f} {way}" for way in ("up", "down"))
        text += f"bytes per client and round: {up}, {down}; "
    text += f"dropped: {summary['dropped']}"
    for key, value in summary.items():
        if key.startswith("bytes_up_query."):
            kind = key.removeprefix("bytes_up_query.")
            when = "after the last round, " if summary["rounds"] else ""
            text += f"\nbytes per client {when}for the query of {kind}: {value:,.0f} up"
    if summary.get("left_out"):
        text += "".join(f"\nleft out: {reason}" for reason in summary["left_out"])
    for digits, found in (summary.get("bodies") or {}).items():
        scores = ", ".join(f"{name} {percent(value)} %" for name, value in found["accuracy"].items())
        text += f"\nbody {digits}: {counted(len(found['clients']), 'client')}, {scores}"
    if summary.get("calibration"):
        c = summary["calibration"]
        text += f"\ncalibration (global): before {percent(c.get('before'))} %, after {percent(c.get('after'))} %"
    if c := summary.get("choice"):
        text += (
            f"\nchosen by held-out rows: their own head by {c['own']} of {c['own'] + c['federated']} clients, the "
            f"federated head with their class shares by {c['federated']}; default: {c['default']}"
        )
    if summary.get("personal"):
        text += f"\n{UNADJUSTED}"
    if summary.get("privacy"):
        text += f"\nprivacy: {privacy([summary['privacy']])}"
    if summary.get("stopped"):
        text += f"\nstopped early: {summary['stopped']}"
    Screen(highlight=False).print(text)
