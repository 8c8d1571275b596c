"""The only ServerApp: configuration, clients, strategy, rounds, results; the same in all engines."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import sys
import time
import traceback
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from logging import INFO
from pathlib import Path
from typing import Any, ClassVar

from flwr.app import Context
from flwr.common import log
from flwr.serverapp import Grid, ServerApp

from fedapp import __version__, process
from fedapp import config as configuration
from fedapp.config import RunConfig
from fedapp.data import partitions
from fedapp.data.card import data_card, in_lines
from fedapp.errors import BadRequest, counted, plain
from fedapp.federation import server_model, totals
from fedapp.federation.bodies import ByBody, JoinedQueries
from fedapp.federation.central import CentralTest, has_global_model
from fedapp.federation.context import server_context
from fedapp.federation.hook import Hook, Hooks, Setup
from fedapp.federation.hooks.events import FinalTrainingNotice, LostClients, ProgressEvents, RoundWarnings
from fedapp.federation.hooks.rollback import EnoughForRules, Rollback
from fedapp.federation.hooks.scores import PeriodicEvaluation, UnseenClients, ValidationChoice
from fedapp.federation.hooks.soundness import NormGuard, TwoVoids
from fedapp.federation.hooks.tables import Tables
from fedapp.federation.hooks.training import BestModel, Checkpoint, EarlyStop, PrivacySpent
from fedapp.federation.loop import federate
from fedapp.federation.participants import Participants, Progress
from fedapp.federation.summary import memory_needed, privacy_stated, summary
from fedapp.learning.state import StateError, write_safetensors
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
LISTED = 1000
"""Largest number of clients with a line of their own in `data_card.txt`."""
HOOKS: tuple[type[Hook], ...] = (
    RoundWarnings, LostClients, NormGuard, Rollback, EnoughForRules, ValidationChoice, Tables, BestModel, EarlyStop,
    PrivacySpent, Checkpoint, ProgressEvents, TwoVoids, FinalTrainingNotice, PeriodicEvaluation, UnseenClients,
)  # fmt: skip
"""The policies of a run. Their order is part of the numbers: rules before tables, tables before the hooks that read
their rows, the checkpoint after all that it remembers, and events after the tables. `NormGuard`, which makes a round
void, comes before `Rollback` and `TwoVoids`, which note that."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run a federation with the settings of the run-config."""
    serve(grid, context.run_config, kind_of(grid).make_listener())


def announce(event: Mapping[str, Any]) -> None:
    """Print an event as one line, for a client that follows the run's log from another machine."""
    sys.stdout.write(f"{ANNOUNCED}{json.dumps(clean(event))}\n")


def place(config: RunConfig, *, confined: bool = True) -> Path:
    """Return the run directory; without `out` a new one, which does not depend on the folder of the SuperLink.

    With `FEDAPP_RUNS` the owner of the SuperLink keeps those of nodes below one folder.

    Raises
    ------
    BadRequest : a relative path, or one that ends in no name.
    """
    if not config.storage.out:
        return new_folder(Path(os.environ.get("FEDAPP_RUNS") or Path.home() / "fedapp-runs"), run_name(config))
    out = Path(config.storage.out)
    if not out.is_absolute() or out.name in ("", ".."):
        raise BadRequest(
            f"out = '{out}' must be an absolute path that ends in a name: a run-config travels to other processes"
        )
    runs = os.environ.get("FEDAPP_RUNS") if confined else None
    if runs and Path(runs).resolve() not in out.resolve().parents:
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
        kind = kind_of(grid)
        config = configuration.from_context(run_config, nodes=not kind.own)
        # The command that started a simulation looks for its run where it asked for it.
        out = place(config, confined=not kind.own)
        check_out(out, config.storage.resume)
        tell = event or (lambda event: None)
        with only_writer(out, kind.orphan_life, lambda text: tell({"kind": "waiting", "text": text})):
            try:
                run = kind(grid, config.replaced(out=str(out)), out, event)
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
    full = not (bad := isinstance(e, BadRequest)) and "No space left on device" in str(e)
    named = bad or full or isinstance(e, (RoundFailed, StateError))
    entry: dict[str, Any] = {
        "message": f"{e}{': make room there, then resume the run' * full}" if named else f"{type(e).__name__}: {e}",
        "traceback": "" if named else "".join(traceback.format_exception(e)),
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
    """One run: it builds everything, hands control to the round loop, and writes the summary.

    A simulation and a deployment differ in what the server knows before the clients register.
    """

    own: ClassVar[bool]
    """Whether all clients are the user's own."""
    check: ClassVar[staticmethod[[RunConfig], None]]
    """Refuses settings that do not fit this kind of run."""
    identity_of: ClassVar[staticmethod[[RunConfig], dict[str, str]]]
    """Returns the checksums of files and data that a resumed run must find again."""
    make_listener: ClassVar[staticmethod[[], Event]]
    """Returns the listener of a run that Flower starts."""
    orphan_life: ClassVar[float] = 0.0
    """Seconds to wait for a server process that lost its SuperLink and still holds the run directory."""

    def __init__(self, grid: Grid, config: RunConfig, out: Path, event: Event | None) -> None:
        process.prepare(config.federation.server_threads)
        self.started = time.perf_counter()
        self.config, self.out, self.listener = config, out, event
        self.check(config)
        self.method, self.hparams = config.method_and_hparams()
        self.scored, self.test_cap = self.own or config.mechanism is None, config.test_cap(self.own)
        resolved = config.resolved(self.own)
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
        scored = bool({"received", "trained"} & set(config.evaluation.measured))
        validation = Validation(config.federation.wire_dtype, config.robustness.max_abs, config.numbers(), scored)
        ledger = StateLedger(config.storage.lost_state == "restart")
        self.manager = self._cohort(grid, resolved.federation, validation, ledger)
        self.warnings += self.manager.warnings()
        if self.start:
            self.manager.load_state_dict(self.remembered["Cohort"])
        self.manager.offences.blocked |= {b.client: b for b in self.directory.blocked_before()}
        self.names: list[str] = []
        self.about: dict[str, object] = {}
        self.infos: list[ClientInfo] = []
        self.parts: dict[str, Run] = {}
        self.body = ""  # of a part

    # ---- what the kinds of runs define ---------------------------------------------------------------------------

    @abstractmethod
    def _cohort(self, grid: Grid, settings: FederationSettings, validation: Validation, ledger: StateLedger) -> Cohort:
        """Return the clients, before any of them is asked."""

    def _load(self) -> tasks.FederatedData | None:
        """Return the data of all clients, or None where the server lacks them."""
        shares = self.manager.partitions()
        clients = self.config.data.clients or max(len(self.manager.infos), shares)
        return tasks.federated(self.config, clients) if shares else None

    # ---- before round 1 ------------------------------------------------------------------------------------------

    @property
    def done(self) -> int:
        """The rounds that a resumed run has behind it."""
        return self.start.round if self.start else 0

    def _directory(self) -> RunDirectory:
        """Open the run directory; with `resume`, after the checks that must come before anything is written there."""
        config, resume = self.config, self.config.storage.resume
        if resume:
            if getattr(self.hparams, "totals", "") and not (self.out / totals.BEFORE).is_file():
                raise BadRequest(f"the run in {self.out} has ended: more clients join or leave in a new run")
            self.start, self.remembered, self.warnings = found_checkpoint(self.out, self.identity)
            if self.done > config.federation.num_server_rounds:
                text = f"{self.out} already holds {counted(self.done, 'round')}; give --rounds {self.done} or more"
                raise BadRequest(text)
            if self.start:
                configuration.check_continued(config, self.out / "config.toml", self.done)
        identity = self.identity_of(config)
        if not resume:
            before = totals.named(config)
            directory = RunDirectory(self.out, config, None, identity)
            if before:
                write_safetensors(self.out / totals.BEFORE, *before)
            return directory
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
        begun = str(self.directory.begun_with)
        if storage.resume and begun != __version__:
            self.warnings.append(
                f"fedapp {begun} began this run, {__version__} continues it: defaults of methods and meanings of "
                "scores may have changed in between (CHANGELOG.md)"
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
        for body, part in list(self.parts.items()):
            try:
                part._choose_model()
            except BadRequest as e:
                self._leave_out(body, f"has no model: {e}")
        self._choose_model()
        several, data = (*self.parts.values(), self), self._data()
        for part in several:
            part._make_context(data)
        context = self.strategy.context
        sizes = {i.client: i.num_samples for i in self.infos}
        tunes = self.method.client.tunes()
        self.scoring = scoring.scoring(config, sizes, self.spec.num_classes, self.own, tunes)
        for text in (memory_needed(self), privacy_stated(self)):
            if text:
                self.warn(text)
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
        for name in ("error.json", totals.BEFORE):
            (self.out / name).unlink(missing_ok=True)
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
        client, spec = self.infos[0].client, self.spec
        wanted = "global" in self.config.evaluation.measured and not self.parts
        wanted = wanted and has_global_model(self.strategy, spec, self.config.training.buffers, self.warn)
        rows = data.central(self.device, self.body) if data is not None and wanted else None
        inputs = data.size_of(client) if data is not None else None
        self.central = CentralTest(self.strategy, spec, client, wanted, rows, inputs, self.device)
        if self.body and data is not None and inputs is not None:
            self.about = described(inputs, data.dataset.classes)
        self.header = {**self.about, **built_from(self.config, spec.name, spec.settings, spec.unit)}
        self.header |= {"num_classes": spec.num_classes, "shape": list(spec.shape)}
        self.strategy.context = self._context(spec, self.central)

    def _leave_out(self, body: str, why: object) -> None:
        """Leave out the clients of a body, for a reason."""
        ids = (i.client for i in self.parts.pop(body).infos if i.client in self.manager.infos)
        self.manager.leave_out(dict.fromkeys(ids, f"the body {body[:8]} {why}"))
        self.infos = [i for i in self.infos if i.client in self.manager.infos]

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
            self.strategy = ByBody({b: p.cohort for b, p in self.parts.items()}, self.manager.infos, self._leave_out)
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
        self.manager.gather(config.data.clients)
        bodies = self.manager.agree(self.method, config.bodies_apart)
        for digits in (n for n in config.bodies_apart if not any(body.startswith(n) for body in bodies)):
            self.warn(f"no client has the body {digits} that bodies lists")
        self.manager.leave_out(server_model.impossible(self.manager))
        present = [i for _, i in sorted(self.manager.infos.items())]
        # Where the clients' own data decide the model, the clients say which one it is.
        known = self.config.replaced(model=server_model.known_model(config, present))
        if known != config:
            self.config = config = known
            self.directory.configure(config)
        # Nodes that join later take part, and a resumed run does not draw again.
        if self.start:
            self.unseen: list[int] = self.remembered["UnseenClients"]["clients"]
        else:
            data = self._load() if config.evaluation.names_unseen else None
            self.unseen = list(config.unseen_of((i.client for i in present), data.partition.names if data else ()))
        self.infos = [i for i in present if i.client not in self.unseen]
        configuration.check_liars(config, len(self.infos), self.own)
        configuration.check_sums(config, len(self.infos))
        for body in filter(None, bodies):
            self.parts[body] = part = self._part(body)
            try:
                configuration.check_sums(config, len(part.infos))
            except BadRequest as e:
                self._leave_out(body, f"has too few clients: {e}")

    def _data(self) -> tasks.FederatedData | None:
        """Load the data if the server has them: for the data card, and for the test set of the `global` score."""
        data = self._load()
        if data is None:
            return None
        # Where each client normalises by itself, the server's model goes with no transform.
        self.about = {} if data.own_moments or data.dataset.parts else described(data.inputs, data.dataset.classes)
        card = data_card(data.dataset, data.partition)
        self.names = in_lines(data.partition.names)
        saved = self.out / "partition.npz"
        if self.done and saved.is_file() and partitions.Partition.load(saved).hash != data.partition.hash:
            raise BadRequest(
                f"the data are split differently from those of {counted(self.done, 'round')} before "
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
        return dataclasses.replace(context, warn=self.warn, nodes=not self.own and self.config.mechanism is None)


class Simulation(Run):
    """A run whose clients are the user's own: the server knows them from the configuration, and has their data."""

    own = True
    check = staticmethod(configuration.check_simulation)
    identity_of = staticmethod(lambda config: identities.of_files(config) | identities.of_data(config))
    make_listener = staticmethod(lambda: Spoken(lambda text: log(INFO, "%s", plain(text, whole=True))))

    def _cohort(self, grid: Grid, settings: FederationSettings, validation: Validation, ledger: StateLedger) -> Cohort:
        request = RoundRequest(self.directory.token, state_dir=str(self.out / "state"))
        found = VirtualCohort(
            grid, settings, request, self.tell, validation=validation, ledger=ledger, poll=(0.01, 0.1)
        )
        found.members = self._members
        found.several = not self.config.secure.secure_sum  # secrets of the clients stay at their nodes
        found.by_size = bool(self.config.training.lr_schedule_steps)
        return found

    def _members(self, clients: int) -> list[Member]:
        self.config = self.config.replaced(clients=clients)
        return members(self, clients)

    def _register(self) -> None:
        """Register the clients; ask them for their models where these are kept."""
        super()._register()
        if self.config.evaluation.keeps_models(len(self.infos)):
            folder = str(self.directory.client_models)
            self.manager.request = dataclasses.replace(self.manager.request, models_dir=folder)


class Deployment(Run):
    """A run of real nodes, which may be anybody's; the server may lack their data."""

    own = False
    check = staticmethod(configuration.check_node)
    identity_of = staticmethod(identities.of_files)
    make_listener = staticmethod(lambda: announce)
    orphan_life = 120.0

    def _note_settings(self) -> None:
        super()._note_settings()
        if self.config.storage.state_dir:
            self.warnings.append(
                "state-dir has no effect on real nodes: each node's own configuration has its state folder"
            )

    def _cohort(self, grid: Grid, settings: FederationSettings, validation: Validation, ledger: StateLedger) -> Cohort:
        request, known = RoundRequest(self.directory.token), roster.of_this_server
        return NodeCohort(
            grid, settings, request, self.tell, known, validation=validation, ledger=ledger, poll=(0.1, 1.0)
        )

    def _load(self) -> tasks.FederatedData | None:
        try:
            return super()._load()
        except BadRequest as e:
            text = f"no data card and no global score, because the server lacks the data: {e}"
            self.tell({"kind": "warning", "text": text})
            return None


def kind_of(grid: Grid) -> type[Run]:
    """Return the kind of a run by its grid: only the grids of simulations let their polling interval be set."""
    return Simulation if hasattr(grid, "pull_interval") else Deployment


def found_checkpoint(out: Path, identity: Mapping[str, str]) -> tuple[Progress | None, ServerState, list[str]]:
    """Return the point from which a resumed run continues, what else it remembers, and the faults of newer ones."""
    path = out / "versions.json"
    try:
        token = str(json.loads(path.read_text(encoding="utf-8"))["run"])
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise BadRequest(
            f"cannot read {path} (the run's token; {type(e).__name__}: {e}): put a good copy of it back, or start "
            "a new run"
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
            data.size_of(c).body if config.bodies_apart else "",
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
        note = partial(write_json, path, indent=None, durable=True)
        opened = Opened({str(n): [int(c) for c in ids] for n, ids in before.items()}, note)
    except (OSError, ValueError, TypeError, AttributeError) as e:
        raise BadRequest(
            f"cannot read {path} (record of opened secure sums; {type(e).__name__}: {e}): put a good copy of it "
            "back, or start a new run"
        ) from e
    return SecureSums(run.manager, secure.secure_dropout, secure.secure_colluders, opened)
