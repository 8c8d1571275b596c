"""The only ServerApp: configuration, clients, strategy, rounds, results; the same in all engines."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from logging import INFO
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.common import log
from flwr.serverapp import Grid, ServerApp

from fedapp import __version__, process
from fedapp import config as configuration
from fedapp.config import RunConfig, dp_rules
from fedapp.core.secure_sum import threshold
from fedapp.data import partitions
from fedapp.data.card import data_card, in_lines
from fedapp.errors import BadRequest, counted, plain
from fedapp.federation import server_model, totals
from fedapp.federation.bodies import ByBody, JoinedQueries
from fedapp.federation.central import CentralTest
from fedapp.federation.context import server_context
from fedapp.federation.hook import Hook, Hooks, Setup
from fedapp.federation.hooks.events import FinalTrainingNotice, ProgressEvents, RoundWarnings
from fedapp.federation.hooks.rollback import EnoughForRules, Rollback
from fedapp.federation.hooks.scores import PeriodicEvaluation, UnseenClients, ValidationChoice
from fedapp.federation.hooks.soundness import NormGuard, TwoVoids
from fedapp.federation.hooks.tables import Tables
from fedapp.federation.hooks.training import BestModel, Checkpoint, EarlyStop, PrivacySpent
from fedapp.federation.loop import federate
from fedapp.federation.participants import Participants, Progress
from fedapp.federation.summary import summary
from fedapp.learning.task import ModelSpec
from fedapp.method import ClientInfo, Payload, ServerContext, ServerState
from fedapp.models import frozen
from fedapp.reduce.reader import Policy
from fedapp.reduce.scaling import KIND, moments_from
from fedapp.results.directory import (
    ANNOUNCED,
    RunDirectory,
    check_out,
    clean,
    new_folder,
    only_writer,
    run_name,
    write_json,
)
from fedapp.results.lines import Spoken
from fedapp.results.predict import built_from, described
from fedapp.settings import FederationSettings
from fedapp.tasks import identity as identities
from fedapp.tasks import scoring
from fedapp.tasks import simulated as tasks
from fedapp.transport import checkpoint, roster
from fedapp.transport.cohort import Cohort
from fedapp.transport.ledger import StateLedger
from fedapp.transport.nodes import NodeCohort
from fedapp.transport.request import RoundRequest
from fedapp.transport.secure import Opened, SecureSums
from fedapp.transport.traffic import RoundFailed, Spoiled
from fedapp.transport.validation import Validation
from fedapp.transport.virtual import Member, VirtualCohort
from strategies.base import Strategy

app = ServerApp()
Event = Callable[[Mapping[str, Any]], None]
MUCH = 1 << 30
"""Bytes of replies that a server holds without a warning."""
LISTED = 1000
"""Largest number of clients with a line of their own in `data_card.txt`."""
ORPHAN_LIFE = 120.0
"""Seconds to wait for a server process that lost its SuperLink and still holds the run directory."""
HOOKS: tuple[type[Hook], ...] = (
    RoundWarnings, NormGuard, Rollback, EnoughForRules, ValidationChoice, Tables, BestModel, EarlyStop, PrivacySpent,
    Checkpoint, ProgressEvents, TwoVoids, FinalTrainingNotice, PeriodicEvaluation, UnseenClients,
)  # fmt: skip
"""The policies of a run. Their order is part of the numbers: rules before tables, tables before the hooks that read
their rows, the checkpoint after all that it remembers, and events after the tables. `NormGuard`, which makes a round
void, comes before `Rollback` and `TwoVoids`, which note that."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run a federation with the settings of the run-config."""
    say = Spoken(lambda text: log(INFO, "%s", plain(text, whole=True)))
    serve(grid, context.run_config, say if _simulated(grid) else announce)


def _simulated(grid: Grid) -> bool:
    """Whether the grid belongs to a simulation or to this process: only those let their polling interval be set."""
    return hasattr(grid, "pull_interval")


def announce(event: Mapping[str, Any]) -> None:
    """Print an event as one line, for a client that follows the run's log from another machine."""
    sys.stdout.write(f"{ANNOUNCED}{json.dumps(clean(event))}\n")


def default_out(config: RunConfig) -> Path:
    """Make a run directory where `out` is not given; it does not depend on the folder that the SuperLink runs in."""
    return new_folder(Path(os.environ.get("FEDAPP_RUNS") or Path.home() / "fedapp-runs"), run_name(config))


def place(config: RunConfig, *, confined: bool = True) -> Path:
    """Return the run directory. With `FEDAPP_RUNS` the owner of the SuperLink keeps those of nodes below one folder.

    Raises
    ------
    BadRequest : a relative path.
    """
    if not config.storage.out:
        return default_out(config)
    out = Path(config.storage.out)
    if not out.is_absolute():
        raise BadRequest(
            f"out = '{config.storage.out}' must be an absolute path: a run-config travels to other processes"
        )
    runs = os.environ.get("FEDAPP_RUNS") if confined else None
    if runs and not out.resolve().is_relative_to(Path(runs).resolve()):
        return Path(runs) / out.name
    return out


def serve(grid: Grid, run_config: Mapping[str, Any], event: Event | None = None) -> dict[str, Any]:
    """Run a federation over a grid and write its run directory; returns the summary.

    Raises
    ------
    BadRequest : found before anything is trained.
    Exception : the run failed; `error.json` and `summary.json` (`ok: false`) say why.
    """
    out: Path | None = None
    run: Run | None = None
    try:
        config = configuration.from_context(run_config)
        # The command that started a simulation looks for its run where it asked for it.
        out = place(config, confined=not _simulated(grid))
        check_out(out, config.storage.resume)
        patience = 0.0 if _simulated(grid) else ORPHAN_LIFE
        with only_writer(out, patience, lambda text: event({"kind": "waiting", "text": text}) if event else None):
            try:
                run = Run(grid, config.replaced(out=str(out)), out, event)
                return run.go()
            except BaseException as e:
                # A resume that is refused before it begins leaves the files of the earlier run as they are.
                refused = config.storage.resume and run is None
                if out.is_dir() and not refused and not isinstance(e, KeyboardInterrupt):
                    entry = _entry(e, run)
                    write_json(out / "error.json", entry)
                    write_json(out / "summary.json", {"ok": False, "error": entry["message"]})
                raise
    except BaseException as e:
        if event is not None:
            event({"kind": "failed", **_entry(e, run)})
        raise


def _entry(e: BaseException, run: Run | None) -> dict[str, Any]:
    """Describe a failure: the first error, with the client's own traceback where a client caused it."""
    bad = isinstance(e, BadRequest)
    entry: dict[str, Any] = {
        "message": str(e) if bad or isinstance(e, RoundFailed) else f"{type(e).__name__}: {e}",
        "traceback": "" if bad or isinstance(e, RoundFailed) else "".join(traceback.format_exception(e)),
        "exit": 2 if bad else 1,
        "diverged": isinstance(e, Spoiled),
        "client": None,
        "round": e.round if isinstance(e, RoundFailed) else None,
        "stage": "server",
    }
    cause = run.manager.first_error if run is not None else None
    registering = cause is not None and cause["stage"] == "register"  # in round 0, as an exchange before round 1
    blamed = isinstance(e, RoundFailed) and cause is not None and cause["round"] == e.round and not registering
    if cause is not None and (blamed or (bad and registering)):
        entry.update({k: cause[k] for k in ("client", "round", "stage", "traceback")}, cause=cause["message"])
    return entry


class Run(Setup):
    """One run: it builds everything, hands control to the round loop, and writes the summary."""

    def __init__(self, grid: Grid, config: RunConfig, out: Path, event: Event | None) -> None:
        process.prepare(config.federation.server_threads)
        self.started = time.perf_counter()
        self.config, self.out, self.listener = config, out, event
        self.simulation = _simulated(grid)
        if self.simulation:
            configuration.check_simulation(config)
        else:
            configuration.check_node(config)
        self.method, self.hparams = config.method_and_hparams()
        resolved = config.resolved(self.simulation)
        policy = Policy(resolved.robustness, None if config.privacy.dp == "sgd" else config.mechanism)
        self.strategy: Strategy = self.method.strategy(self.method, self.hparams, policy=policy)
        self.device = process.device()
        self.warnings: list[str] = []
        self.hooks = Hooks()
        self.start: Progress | None = None
        self.remembered: ServerState = {}
        self.identity = {"method": config.federation.method, "federation": config.storage.federation}
        self.directory = self._directory()
        self.identity = {"run": self.directory.token, **self.identity}
        self._note_settings()
        request = RoundRequest(self.directory.token, state_dir=str(out / "state") if self.simulation else "")
        self.manager = self._clients(grid, request, resolved.federation)
        if isinstance(self.manager, NodeCohort) and self.manager.roster is None:
            self.warnings.append(
                "there is no roster, so a client id belongs to the first node that is online and claims it: fedapp "
                "admit writes one, and FEDAPP_ROSTER names it to the SuperLink"
            )
        if self.start:
            self.manager.load_state_dict(self.remembered["Cohort"])
        self.manager.offences.blocked |= {b.client: b for b in self.directory.blocked_before()}
        self.names: list[str] = []
        self.about: dict[str, object] = {}
        self.infos: list[ClientInfo] = []
        self.parts: dict[str, Run] = {}
        self.body = ""  # of a part

    def _clients(self, grid: Grid, request: RoundRequest, settings: FederationSettings) -> Cohort:
        """Return the clients, before any of them is asked."""
        config = self.config
        scored = bool({"received", "trained"} & set(config.evaluation.measured))
        validation = Validation(settings.wire_dtype, config.robustness.max_abs, config.numbers(), scored)
        ledger = StateLedger(config.storage.lost_state == "restart")
        if not self.simulation:
            return NodeCohort(
                grid, settings, request, self.tell, roster.of_this_server,
                validation=validation, ledger=ledger, poll=(0.1, 1.0),
            )  # fmt: skip
        found = VirtualCohort(
            grid, settings, request, self.tell, validation=validation, ledger=ledger, poll=(0.01, 0.1)
        )
        found.several = not config.secure.secure_sum  # secrets of the clients stay at their nodes
        return found

    # ---- before round 1 ------------------------------------------------------------------------------------------

    @property
    def done(self) -> int:
        """The rounds that a resumed run has behind it."""
        return self.start.round if self.start else 0

    def _directory(self) -> RunDirectory:
        """Open the run directory; with `resume`, after the checks that must come before anything is written there."""
        config, resume = self.config, self.config.storage.resume
        if resume:
            self.start, self.remembered, self.warnings = found_checkpoint(self.out, self.identity)
            if self.done > config.federation.num_server_rounds:
                text = f"{self.out} already holds {counted(self.done, 'round')}; give --rounds {self.done} or more"
                raise BadRequest(text)
            earlier = configuration.from_flat(configuration.read_toml(self.out / "config.toml"))
            configuration.check_continues(config, earlier, self.done)
        identity = identities.of_files(config) | (identities.of_data(config) if self.simulation else {})
        if not resume:
            return RunDirectory(self.out, config, None, identity)
        before = json.loads((self.out / "versions.json").read_text(encoding="utf-8"))
        if differing := identities.changed(before, identity):
            raise BadRequest(
                f"since the run in {self.out} began these have changed (SHA-256): {differing}. Put the former ones "
                "back, or start a new run"
            )
        return RunDirectory(self.out, config, self.done if self.start else -1)

    def _note_settings(self) -> None:
        """Note settings that have no effect, and what a resumed run changes."""
        storage = self.config.storage
        if storage.resume and storage.lost_state == "restart":
            for name in ("rounds.csv", "clients.csv"):
                self.directory.add_column(name, "restarted")
        if storage.state_dir and not self.simulation:
            self.warnings.append(
                "state-dir has no effect on real nodes: each node's own configuration has its state folder"
            )
        begun = str(self.directory.begun_with)
        if storage.resume and begun != __version__:
            self.warnings.append(
                f"fedapp {begun} began this run, {__version__} continues it: defaults of methods and what a score "
                "means may have changed in between (CHANGELOG.md)"
            )

    def tell(self, event: dict[str, Any]) -> None:
        """Write an event to the run directory and pass it to the listener, if there is one."""
        self.directory.event(event)
        if event["kind"] == "blocked":
            self.directory.append("blocked.csv", {k: v for k, v in event.items() if k != "kind"})
        if self.listener is not None:
            self.listener(event)

    def warn(self, text: str) -> None:
        """Show a line, and note it in the summary."""
        self.warnings.append(text)
        self.tell({"kind": "warning", "text": text})

    def go(self) -> dict[str, Any]:
        """Run all rounds and write the summary."""
        self.tell({"kind": "directory", "out": str(self.out), "run": self.directory.token})
        for text in self.warnings:
            self.tell({"kind": "warning", "text": text})
        self._register()
        config = self.config
        several = (*self.parts.values(), self)
        for part in several:
            part._choose_model()
        data = self._data()
        for part in several:
            part._make_context(data)
        context = self.strategy.context
        sizes = {i.client: i.num_samples for i in self.infos}
        tunes = self.method.client.tunes()
        self.scoring = scoring.scoring(config, sizes, self.spec.num_classes, self.simulation, tunes)
        for text in (memory_needed(self), privacy_stated(self)):
            if text:
                self.warn(text)
        if self.simulation and config.evaluation.keeps_models(len(self.infos)):
            folder = str(self.directory.client_models)
            self.manager.request = dataclasses.replace(self.manager.request, models_dir=folder)
        find = self.method.warn
        if warn := find(self.hparams, config.training.optimizer, config.training.augment) if find else None:
            self.warn(warn)
        rounds = config.federation.num_server_rounds
        about = {"dataset": config.data.dataset, "clients": len(self.infos), "rounds": rounds, "done": self.done}
        about |= {"resume": config.storage.resume, "out": str(self.out), "device": str(self.device)}
        self.tell({"kind": "start", "method": config.federation.method, **about})
        self._make_hooks()
        self._scale()
        self.strategy.context = context = dataclasses.replace(context, totals=totals.read(self))
        state = federate(self.strategy, self.cohort, context, self.hooks, rounds=rounds, start=self._take_start())
        found = summary(self, state)
        write_json(self.out / "summary.json", found)
        (self.out / "error.json").unlink(missing_ok=True)
        self.tell({"kind": "end", "summary": found})
        return found

    def _choose_model(self) -> None:
        """Choose the server's model; clients that do not fit it are left out."""
        manager, config = self.manager, self.config
        self.infos = [i for i in self.infos if i.client in manager.infos]  # another body may have lost clients
        self.spec = server_model.choose(manager, self.infos, config, lambda spec: self._context(spec).initial)
        self.infos = [i for i in self.infos if i.client in manager.infos]

    def _make_context(self, data: tasks.FederatedData | None) -> None:
        """Make the test set of the `global` score and all that depends on the model."""
        wanted = bool(self.method.global_model and "global" in self.config.evaluation.measured and not self.parts)
        rows = data.central(self.device, self.body) if data is not None and wanted else None
        client = self.infos[0].client
        inputs = data.size_of(client) if data is not None else None
        self.central = CentralTest(self.strategy, self.spec, client, wanted, rows, inputs, self.device)
        if self.body and data is not None and inputs is not None:
            self.about = described(inputs, data.dataset.classes)
        spec = self.spec
        self.header = {**self.about, **built_from(self.config, spec.name, spec.settings, spec.unit)}
        self.header |= {"num_classes": spec.num_classes, "shape": list(spec.shape)}
        self.strategy.context = self._context(spec, self.central)

    def _part(self, body: str) -> Run:
        """Return this run with a strategy of its own and with the clients of one body."""
        part = copy.copy(self)
        part.parts, part.body = {}, body
        part.strategy = self.method.strategy(self.method, self.hparams, policy=self.strategy.policy)
        part.infos = [i for i in self.infos if i.body == body]
        return part

    def _take_start(self) -> Progress | None:
        """Return the point from which the run continues, and hold its states no longer: they may be large."""
        start, self.start, self.remembered = self.start, None, {}
        return start

    def _make_hooks(self) -> None:
        """Make the clients of the loop and its hooks, as a checkpoint remembers them."""
        joined = JoinedQueries(self.hooks)
        for part in self.parts.values():
            others = self.manager.nodes.keys() - {i.client for i in part.infos}
            part.cohort = Participants(self.manager, part.strategy, joined, unseen=others, secure=secure_sums(part))
            part.strategy = part.cohort.strategy
        if self.parts:
            self.strategy = ByBody({b: p.cohort for b, p in self.parts.items()}, self.manager.infos)
        self.cohort = Participants(
            self.manager, self.strategy, self.hooks, unseen=self.unseen, each=self.scoring.each,
            retrains=self.config.evaluation.final_training, secure=secure_sums(self),
        )  # fmt: skip
        self.strategy = self.cohort.strategy
        self.hooks += [kind(self) for kind in HOOKS]
        if self.start:
            self.hooks.load_state_dict(self.remembered)

    def _scale(self) -> None:
        """Learn mean and deviation of the features of all clients, if the model wants them standardised."""
        if not frozen.of(self.config.model.model, self.config.model).scaled:
            return
        path = self.out / "scaling.json"
        if not (self.config.storage.resume and path.is_file()):
            found = self.cohort.query(Progress(0, {}))(KIND, Payload()).totals("moments")
            write_json(path, moments_from(found.sums))
        text = path.read_text(encoding="utf-8")
        self.manager.request = dataclasses.replace(self.manager.request, scaling=text)
        if self.central.inputs is not None:
            self.central.inputs = inputs = self.central.inputs.scaled(text)
            known = {"mean": inputs.mean, "std": inputs.std}
            self.header = {**self.header, **known}
            path = self.out / "inputs.json"
            write_json(path, {**json.loads(path.read_text(encoding="utf-8")), **known})

    def _register(self) -> None:
        """Register the clients; they state the model and their number if the configuration leaves these open."""
        config = self.config
        if isinstance(self.manager, VirtualCohort):
            there = members(self, config.data.clients or self.manager.count())
            self.manager.enrol(there, by_size=bool(config.training.lr_schedule_steps))
        elif isinstance(self.manager, NodeCohort):
            self.manager.gather(config.data.clients)
        bodies = self.manager.agree(self.method, config.data.named_bodies)
        for digits in (n for n in config.data.named_bodies if not any(body.startswith(n) for body in bodies)):
            self.warn(f"no client has the body {digits} that bodies lists")
        if not self.simulation:
            self.manager.leave_out(server_model.impossible(self.manager))
        present = [i for _, i in sorted(self.manager.infos.items())]
        # Where the clients' own data decide the model, the clients say which one it is.
        known = config.replaced(model=server_model.known_model(config, present))
        if self.simulation and not config.data.clients:
            known = known.replaced(clients=len(present))
        if known != config:
            self.config = config = known
            self.directory.configure(config)
        # Nodes that join later take part, and a resumed run does not draw again.
        if self.start:
            self.unseen: list[int] = self.remembered["UnseenClients"]["clients"]
        else:
            named = self.simulation and config.evaluation.names_unseen
            names = tasks.federated(config, config.data.clients).partition.names if named else ()
            self.unseen = list(config.unseen_of((i.client for i in present), names))
        self.infos = [i for i in present if i.client not in self.unseen]
        configuration.check_liars(config, len(self.infos), self.simulation)
        configuration.check_sums(config, len(self.infos))
        for body in filter(None, bodies):
            part = self._part(body)
            try:
                configuration.check_sums(config, len(part.infos))
                self.parts[body] = part
            except BadRequest as e:
                why = f"the body {body[:8]} has too few clients: {e}"
                self.manager.leave_out(dict.fromkeys((i.client for i in part.infos), why))

    def _data(self) -> tasks.FederatedData | None:
        """Load the data if the server has them: for the data card, and for the test set of the `global` score."""
        config = self.config
        shares = self.manager.partitions()
        if not self.simulation and not shares:
            return None
        try:
            data = tasks.federated(config, config.data.clients or max(len(self.manager.infos), shares))
        except BadRequest as e:
            if self.simulation:
                raise
            text = f"no data card and no global score, because the server lacks the data: {e}"
            self.tell({"kind": "warning", "text": text})
            return None
        # Where each client normalises by itself, the server's model goes with no transform.
        self.about = {} if data.own_moments or data.dataset.parts else described(data.inputs, data.dataset.classes)
        card = data_card(data.dataset, data.partition)
        self.names = in_lines(data.partition.names)
        saved = self.out / "partition.npz"
        if self.done and saved.is_file() and partitions.Partition.load(saved).hash != data.partition.hash:
            raise BadRequest(
                f"the data are split differently from what {counted(self.done, 'round')} trained on "
                f"(another number of clients, or other "
                f"files in data-dir): resume with the settings of {self.out / 'config.toml'}, or start a new run"
            )
        data.partition.save(saved)
        write_json(self.out / "inputs.json", {**self.about, "clients": list(data.partition.names)})
        write_json(self.out / "data_card.json", card.to_dict(), indent=2 if len(card.train) <= LISTED else None)
        (self.out / "data_card.txt").write_text(card.text(max_clients=LISTED) + "\n", encoding="utf-8")
        self.tell({"kind": "data", "text": card.text()})
        return data

    def _context(self, spec: ModelSpec, central: CentralTest | None = None) -> ServerContext:
        context = server_context(
            self.method,
            self.hparams,
            spec,
            self.infos,
            seed=self.config.federation.seed,
            width=int(self.manager.facts[self.infos[0].client if self.body else self.manager.reference]["width"]),
            buffers=self.config.training.buffers,
            score=central.accuracy if central else None,
        )
        return dataclasses.replace(context, warn=self.warn)


def found_checkpoint(out: Path, identity: Mapping[str, str]) -> tuple[Progress | None, ServerState, list[str]]:
    """Return the point from which a resumed run continues, what else it remembers, and the faults of newer ones."""
    path = out / "versions.json"
    try:
        token = str(json.loads(path.read_text(encoding="utf-8"))["run"])
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise BadRequest(
            f"{path}, which holds the run's token, cannot be read ({type(e).__name__}: {e}): put a good copy of it "
            "back, or start a new run"
        ) from e
    found, faults = checkpoint.recover(out / "checkpoint", {**identity, "run": token})
    if not found:
        return None, {}, faults
    if found[2].keys() != {"Cohort", *(hook.__name__ for hook in HOOKS)}:
        raise BadRequest(
            f"another version of fedapp wrote the checkpoint of {counted(found[0], 'round')} in {out}: resume "
            "the run with that version, or start a new run"
        )
    return Progress(found[0], found[1]), found[2], faults


def members(run: Run, clients: int) -> list[Member]:
    """Return the clients of a simulation as configuration and partition say."""
    config = run.config
    data = tasks.federated(config, clients)
    return [
        Member(
            c, len(own.train) - (0 if len(own.validation) else run.method.held_out(run.hparams, len(own.train))),
            len(own.test),
            tasks.model_for(config, c, data.size_of(c)), data.size_of(c).shape,
            data.size_of(c).body if config.data.bodies else "",
        )
        for c, own in enumerate(data.partition.clients)
    ]  # fmt: skip


def secure_sums(run: Run) -> SecureSums | None:
    """Return the session of secure sums, if the run has `secure-sum`."""
    secure = run.config.secure
    if not secure.secure_sum:
        return None
    path = run.out / f"opened-sums{run.body and '-'}{run.body[:8]}.json"
    try:
        before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        opened = Opened({str(n): [int(c) for c in ids] for n, ids in before.items()}, partial(write_json, path))
    except (OSError, ValueError, TypeError, AttributeError) as e:
        raise BadRequest(
            f"{path}, which holds whose sums were opened, cannot be read ({type(e).__name__}: {e}): put a good "
            "copy of it back, or start a new run"
        ) from e
    return SecureSums(run.manager, secure.secure_dropout, secure.secure_colluders, opened)


def memory_needed(run: Run) -> str:
    """Warn if rules against lying clients need much memory: they hold all replies, and their changes in float64."""
    sent = run.method.expected(run.hparams, run.infos[0].shapes).values()
    asked = math.ceil(len(run.infos) * run.config.federation.fraction_train)
    need = 12 * sum(math.prod(shape) for shape in sent) * asked
    rules = run.config.robustness.robust
    much = run.strategy.policy.robust.averages and need > MUCH
    return f"robust = '{rules}' holds all replies of a round: about {need / 2**30:.1f} GB here" if much else ""


def privacy_stated(run: Run) -> str:
    """State the noise of the run before anything is trained; empty without `dp`."""
    config, clients = run.config, len(run.infos)
    if config.mechanism is None:
        return ""
    sent = run.method.expected(run.hparams, run.infos[0].shapes).values()
    drawn = max(1, math.floor(clients * config.federation.fraction_train + 0.5))
    asked = drawn if config.privacy.dp == "client" else clients
    secure = config.secure
    # The fewest clients of a sum, and those that may help the server.
    least = (threshold(asked, secure.secure_dropout), secure.secure_colluders) if secure.secure_sum else None
    size = sum(math.prod(shape) for shape in sent)
    exact = "; scores are exact, because this is a simulation: they are not covered" if run.simulation else ""
    return dp_rules.stated(config.mechanism, size, asked, config.releases, least) + exact
