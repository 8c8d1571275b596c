"""The only ServerApp: configuration, clients, strategy, rounds, results; the same in all engines.

The file is long because the life of a run is told in one place, in the order in which it happens.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from logging import INFO
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.common import log
from flwr.serverapp import Grid, ServerApp

from clients.base import FedClient
from fedapp import __version__, process
from fedapp import config as configuration
from fedapp.config import RunConfig, dp_rules
from fedapp.core.secure_sum import threshold
from fedapp.data import partitions
from fedapp.data.card import data_card, in_lines
from fedapp.data.transforms import InputSpec
from fedapp.errors import BadRequest, counted, plain
from fedapp.federation import server_model
from fedapp.federation.context import server_context
from fedapp.federation.loop import Callbacks, RoundLoop, RoundResult
from fedapp.federation.rollback import Earlier
from fedapp.lazy import torch
from fedapp.learning.evaluation import LOW_IS_GOOD, Scores, column, evaluate, measured
from fedapp.learning.metrics import client_row, mean, summarise
from fedapp.learning.state import StateError, write_safetensors
from fedapp.learning.task import ModelSpec
from fedapp.method import Array, Arrays, Scalar, Scored, ServerContext, ServerState
from fedapp.models import own, selection
from fedapp.reduce.reader import Policy
from fedapp.results.directory import (
    ANNOUNCED,
    MOST_CURVES,
    NAME,
    TRACKED,
    Columns,
    RunDirectory,
    accuracy_summary,
    check_out,
    clean,
    new_folder,
    only_writer,
    run_name,
    write_json,
)
from fedapp.results.lines import Spoken
from fedapp.results.predict import described, made_with
from fedapp.results.runs import read_json
from fedapp.results.statistics import measured as measured_values
from fedapp.results.statistics import over_clients
from fedapp.settings import FederationSettings
from fedapp.tasks import identity as identities
from fedapp.tasks import scoring
from fedapp.tasks import simulated as tasks
from fedapp.transport import checkpoint, roster
from fedapp.transport.cohort import Cohort
from fedapp.transport.ledger import StateLedger
from fedapp.transport.nodes import NodeCohort
from fedapp.transport.offences import Offences
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
SELECTED = "selected"
"""Folder of the server's state after the round that validation images have chosen so far."""
ORPHAN_LIFE = 120.0
"""Seconds to wait for a server process that lost its SuperLink and still holds the run directory."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the run-config says."""
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


def place(config: RunConfig) -> Path:
    """Return the run directory. With `FEDAPP_RUNS` the owner of the SuperLink keeps all of them below one folder.

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
    runs = os.environ.get("FEDAPP_RUNS")
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
        out = place(config)
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
    blamed = isinstance(e, RoundFailed) and cause is not None and cause["round"] == e.round
    if cause is not None and (blamed or (bad and cause["stage"] == "register")):
        entry.update({k: cause[k] for k in ("client", "round", "stage", "traceback")}, cause=cause["message"])
    return entry


class Run(Callbacks):
    """One run: it builds everything, hands control to the strategy, and writes results as rounds finish."""

    def __init__(self, grid: Grid, config: RunConfig, out: Path, event: Event | None) -> None:
        process.prepare(config.federation.server_threads)
        self.config = config
        self.out = out
        self.simulation = _simulated(grid)
        if self.simulation:
            configuration.check_simulation(config)
        else:
            configuration.check_node(config)
        self.method, self.hparams = config.method_and_hparams()
        resolved = config.resolved(self.simulation)
        policy = Policy(resolved.robustness, None if config.privacy.dp == "sgd" else config.mechanism)
        self.loop = RoundLoop(self.method.strategy(self.method, self.hparams, policy=policy))
        self.device = process.device()
        self.started = time.perf_counter()
        found, lost = self._found() if config.storage.resume else (None, [])
        self.done = found[0] if found else 0
        self.state: ServerState | None = found[1] if found else None
        self.extra: dict[str, Any] = (
            found[2] if found else {"best": None, "best_loss": None, "since": 0, "dropped": 0, "seconds": 0.0}
        )
        if times := int(self.extra.get("median", 0)):  # a liar of an earlier round decided so
            self.loop.go_back(times)
        self.earlier = float(self.extra["seconds"])
        self.sent: Arrays | None = self.published(self.state) if self.state is not None else None
        if config.storage.resume and self.done > config.federation.num_server_rounds:
            raise BadRequest(f"{out} already holds {counted(self.done, 'round')}; give --rounds {self.done} or more")
        if config.storage.resume:
            earlier = configuration.from_flat(configuration.read_toml(out / "config.toml"))
            configuration.check_continues(config, earlier, self.done)
        identity = identities.of_files(config) | (identities.of_data(config) if self.simulation else {})
        if config.storage.resume:
            lost += self._compare(identity)
        self.directory = RunDirectory(out, config, self.done if config.storage.resume else None, identity)
        if config.storage.resume and config.storage.lost_state == "restart":
            for name in ("rounds.csv", "clients.csv"):
                self.directory.add_column(name, "restarted")
        self.extra["dropped"] = self.directory.count("dropped.csv")
        self.listener = event
        self.warnings: list[str] = lost
        if config.storage.state_dir and not self.simulation:
            self.warnings.append(
                "state-dir has no effect on real nodes: a node's own configuration says where its state is"
            )
        begun = str(self.directory.begun_with)
        if config.storage.resume and begun != __version__:
            self.warnings.append(
                f"fedapp {begun} began this run, {__version__} continues it: defaults of methods and what a score "
                "means may have changed in between (CHANGELOG.md)"
            )
        request = RoundRequest(self.directory.token, state_dir=str(out / "state") if self.simulation else "")
        self.manager = self._cohort(grid, request, resolved.federation)
        if isinstance(self.manager, NodeCohort) and self.manager.roster is None:
            self.warnings.append(
                "there is no roster, so a client id belongs to the first node that is online and claims it: fedapp "
                "admit writes one, and FEDAPP_ROSTER names it to the SuperLink"
            )
        self._know(self.extra)
        self.manager.ledger.released = {int(c): int(n) for c, n in self.extra.get("released", {}).items()}
        self.manager.silent = {k: {int(c): n for c, n in of.items()} for k, of in self.extra.get("silent", {}).items()}
        self.manager.offences = Offences.of(self.extra)
        self.manager.offences.blocked |= {b.client: b for b in self.directory.blocked_before()}
        self.final: dict[str, float] = {}
        self.names: list[str] = []
        self.last_scores: Scored = {}
        self.stopped: str | None = None
        self.chosen: int | None = None
        self.global_scores: Scores | None = None

    def _cohort(self, grid: Grid, request: RoundRequest, settings: FederationSettings) -> Cohort:
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

    def _compare(self, now: Mapping[str, str]) -> list[str]:
        """Refuse to go on with other data, code or weights; return a line where the run did not note what it had."""
        before = json.loads((self.out / "versions.json").read_text(encoding="utf-8"))
        if differing := identities.changed(before, now):
            raise BadRequest(
                f"since the run in {self.out} began these have changed (SHA-256): {differing}. Put the former ones "
                "back, or start a new run"
            )
        if self.simulation and self.config.data.clients:
            facts = described(tasks.federated(self.config, self.config.data.clients).inputs, ())
            noted = read_json(self.out / "inputs.json")
            if any(noted.get(key, facts[key]) != facts[key] for key in ("mean", "std")):
                raise BadRequest(
                    f"{self.out} normalised samples by other numbers than this version would (CHANGELOG.md says by "
                    "which): start a new run"
                )
        lacking = [name for name in now if name not in before]
        return [f"an earlier version began this run and kept no SHA-256 of {', '.join(lacking)}: whether they have "
                "changed since cannot be checked"] if lacking else []  # fmt: skip

    def _found(self) -> tuple[checkpoint.Found | None, list[str]]:
        """Find the checkpoint that this run goes on from, and what was wrong with newer ones."""
        path = self.out / "versions.json"
        try:
            token = str(json.loads(path.read_text(encoding="utf-8"))["run"])
        except (OSError, ValueError, TypeError, KeyError) as e:
            raise BadRequest(
                f"{path}, which holds the run's token, cannot be read ({type(e).__name__}: {e}): put a good copy of it "
                "back, or start a new run"
            ) from e
        return checkpoint.recover(self.out / "checkpoint", self._identity(token))

    def _know(self, extra: Mapping[str, Any]) -> None:
        """Take the clients' states that a checkpoint knows of as those that they must have."""
        self.manager.ledger.states = _states(extra)

    def _identity(self, token: str) -> dict[str, str]:
        return {"method": self.config.federation.method, "run": token, "federation": self.config.storage.federation}

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
        config = self.config
        self.tell({"kind": "directory", "out": str(self.out), "run": self.directory.token})
        for text in self.warnings:
            self.tell({"kind": "warning", "text": text})
        if isinstance(self.manager, VirtualCohort):
            self.manager.enrol(self._members(self.manager), by_size=bool(config.training.lr_schedule_steps))
        elif isinstance(self.manager, NodeCohort):
            self.manager.gather(config.data.clients)
        self.manager.agree(self.method)
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
        names = (
            tasks.federated(config, config.data.clients).partition.names
            if self.simulation and config.evaluation.names_unseen
            else ()
        )
        self.extra.setdefault("unseen", list(config.unseen_of((i.client for i in present), names)))
        self.infos = [i for i in present if i.client not in self.extra["unseen"]]
        configuration.check_liars(config, len(self.infos), self.simulation)
        configuration.check_sums(config, len(self.infos))
        self.spec = server_model.choose(self.manager, self.infos, config, lambda spec: self._context(spec).initial)
        self.infos = [i for i in self.infos if i.client in self.manager.infos]
        self._data()
        self.scoring = scoring.scoring(
            config, {i.client: i.num_samples for i in self.infos}, self.spec.num_classes, self.simulation,
            self.method.client.tunes(),
        )  # fmt: skip
        self._warn_of_memory()
        self._state_privacy()
        if self.simulation and config.evaluation.keeps_models(len(self.infos)):
            folder = str(self.directory.client_models)
            self.manager.request = dataclasses.replace(self.manager.request, models_dir=folder)
        find = self.method.warn
        warn = find(self.hparams, self.config.training.optimizer, self.config.training.augment) if find else None
        if warn:
            self.warn(warn)
        self.tell(
            {
                "kind": "start",
                "method": config.federation.method,
                "dataset": config.data.dataset,
                "clients": len(self.infos),
                "rounds": config.federation.num_server_rounds,
                "done": self.done,
                "resume": config.storage.resume,
                "out": str(self.out),
                "device": str(self.device),
            }
        )
        state = self.loop.run(
            self.manager,
            self._context(),
            rounds=self.done if self._patience_is_over() else self.config.federation.num_server_rounds,
            done=self.done,
            state=self.state,
            previous=self._before(),
            callbacks=self,
            request=self._request,
            evaluate_every=self.config.evaluation.evaluate_every,
            final_training=self.config.evaluation.final_training,
            select=self.config.evaluation.select == "validation",
            unseen=self.extra["unseen"],
            secure=self._secure(),
            each=self.scoring.each,
        )
        return self._finish(state)

    @property
    def strategy(self) -> Strategy:
        """The strategy under the policy of the present round."""
        return self.loop.strategy

    def _secure(self) -> SecureSums | None:
        """Return what makes the sums of which the server sees no single reply, if the run asks for it."""
        config = self.config
        if not config.secure.secure_sum:
            return None
        path = self.out / "opened-sums.json"
        try:
            before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            opened = Opened({str(n): [int(c) for c in ids] for n, ids in before.items()}, partial(write_json, path))
        except (OSError, ValueError, TypeError, AttributeError) as e:
            raise BadRequest(
                f"{path}, which holds whose sums were opened, cannot be read ({type(e).__name__}: {e}): put a good "
                "copy of it back, or start a new run"
            ) from e
        return SecureSums(self.manager, config.secure.secure_dropout, config.secure.secure_colluders, opened)

    def _members(self, cohort: VirtualCohort) -> list[Member]:
        """Return the clients of a simulation as configuration and partition say."""
        config = self.config
        data = tasks.federated(config, config.data.clients or cohort.count())
        kind: type[FedClient] = self.method.client
        return [
            Member(
                c, kind.trains_on(len(own.train), len(own.validation), self.hparams), len(own.test),
                tasks.model_for(config, c, data.size_of(c)), data.size_of(c).shape,
            )
            for c, own in enumerate(data.partition.clients)
        ]  # fmt: skip

    def _before(self) -> Earlier | None:
        """Return what was before the round that a resumed run goes on from, to go back to if that one is spoiled."""
        if self.done == 1:
            return Earlier(0, self.strategy.init(self._context()))
        try:
            _, state, extra = checkpoint.load(self.out / "checkpoint", self.done - 1)
        except StateError:
            return None
        return Earlier(self.done - 1, state, _states(extra))

    def _warn_of_memory(self) -> None:
        """Warn if rules against lying clients need much memory: they hold all replies, and their changes in float64."""
        if not self.strategy.policy.robust.averages:
            return
        sent = self.method.expected(self.hparams, self.infos[0].shapes).values()
        asked = math.ceil(len(self.infos) * self.config.federation.fraction_train)
        need = 12 * sum(math.prod(shape) for shape in sent) * asked
        if need > MUCH:
            rules = self.config.robustness.robust
            self.warn(f"robust = '{rules}' holds all replies of a round: about {need / 2**30:.1f} GB here")

    def _state_privacy(self) -> None:
        """Say how much noise there will be, before anything is trained."""
        config = self.config
        if config.mechanism is None:
            return
        sent = self.method.expected(self.hparams, self.infos[0].shapes).values()
        asked = max(1, math.floor(len(self.infos) * config.federation.fraction_train + 0.5))
        size = sum(math.prod(shape) for shape in sent)
        asked = asked if config.privacy.dp == "client" else len(self.infos)
        text = dp_rules.stated(config.mechanism, size, asked, config.releases, self._sum_of(asked))
        if self.simulation:
            text += "; scores are exact, because this is a simulation: they are not covered"
        self.warn(text)

    def _sum_of(self, asked: int) -> tuple[int, int] | None:
        """Return the fewest clients of a sum, where so many are asked, and those that may help the server."""
        config = self.config
        return (
            (threshold(asked, config.secure.secure_dropout), config.secure.secure_colluders)
            if config.secure.secure_sum
            else None
        )

    def _spent(self, result: RoundResult) -> None:
        """Note the most that a client says it has released, in all runs."""
        for numbers in result.metrics.values() if self.config.mechanism is not None else ():
            known = self.extra.setdefault("privacy", {"epsilon": 0.0, "releases": 0})
            for key in known:
                value = numbers.get(f"dp-{key}", 0)
                if isinstance(value, (int, float)) and value > known[key]:
                    known[key] = value

    def _privacy(self) -> dict[str, Any]:
        """Return what the run states of its clients' data; nothing without `dp`."""
        stated = self.config.mechanism
        if stated is None:
            return {}
        spent = self.extra.get("privacy", {"epsilon": None, "releases": 0})
        found = {"unit": stated.unit, **spent, "delta": stated.delta, "noise": stated.noise or None}
        if stated.sgd:  # without a noise each client has its own
            found |= {"mechanism": "DP-SGD", "clip": stated.bound}
        if self.config.secure.secure_sum:
            # The noise is on sums: epsilon holds as long as no more clients than these help the server.
            found |= {"noise-on": "sum", "colluders": self.config.secure.secure_colluders}
        if stated.test:
            found |= {"epsilon": None, "test": "test noise, no privacy"}
        return {"privacy": {**found, "scores": "exact, not covered" if self.simulation else "none are sent"}}

    def _data(self) -> None:
        """Load the data if the server has them: for the data card, and for the test set of the `global` score."""
        self.central: tuple[torch.Tensor, torch.Tensor] | None = None
        self.inputs: InputSpec | None = None
        self.about: dict[str, object] = {}
        shares = self.manager.partitions()
        if not self.simulation and not shares:
            return
        try:
            data = tasks.federated(self.config, self.config.data.clients or max(len(self.manager.infos), shares))
        except BadRequest as e:
            if self.simulation:
                raise
            self.tell(
                {"kind": "warning", "text": f"no data card and no global score, because the server lacks the data: {e}"}
            )
            return
        self.inputs = data.inputs
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
        if self.method.global_model and "global" in self.config.evaluation.measured:
            self.central = data.central(self.device)

    def _context(self, spec: ModelSpec | None = None) -> ServerContext:
        context = server_context(
            self.method,
            self.hparams,
            spec or self.spec,
            self.infos,
            seed=self.config.federation.seed,
            width=int(self.manager.facts[self.manager.reference]["width"]),
            buffers=self.config.training.buffers,
            score=self.score,
        )
        return dataclasses.replace(context, warn=self.warn)

    def score(self, arrays: Mapping[str, Array], scalars: Mapping[str, Scalar]) -> float | None:
        """Accuracy of the model with these arrays on the central test set, or None where there is none."""
        scores = self._scores(arrays, scalars)
        return None if scores is None else scores.accuracy

    def _scores(
        self, arrays: Mapping[str, Array], scalars: Mapping[str, Scalar], probabilities: bool = False
    ) -> Scores | None:
        if self.central is None or self.inputs is None:
            return None
        client: type[FedClient] = self.method.client
        model = client.build_model(self.spec, self.hparams)
        selection.merge(model, arrays)
        client.configure_model(model, scalars)
        return evaluate(
            model.to(self.device), *self.central, self.inputs, self.spec.num_classes, probabilities=probabilities
        )

    def _score_global(self, state: ServerState, probabilities: bool = False) -> None:
        arrays = self.strategy.global_arrays(state)
        if arrays is None:
            return
        scalars = self.strategy.send(state, 0, self.infos[0].client).scalars
        self.global_scores = self._scores(arrays, scalars, probabilities)

    def _request(self, server_round: int) -> RoundRequest:
        """Return the request of the messages of a round."""
        keep = (self._best_round() or 0) if self.config.evaluation.select == "validation" else 0
        balanced = self.config.balanced_in(server_round)
        return dataclasses.replace(self.manager.request, round=server_round, balanced=balanced, keep=keep)

    def _named(self, client: int) -> dict[str, Any]:
        """Return the columns that say whose a row is: the number, and the name where the data have names."""
        return {"client": client, **({NAME: self.names[client]} if client < len(self.names) else {})}

    def _taking_part(self) -> int:
        """Return the number of clients that have registered and are not unseen."""
        return len(self.manager.infos.keys() - set(self.extra["unseen"]))

    def _protocols(self, last: bool = False) -> list[str]:
        """Return the scores of clients; fine-tuned models are scored after the `last` round only."""
        measured = [p for p in self.config.evaluation.measured if p != "global"]
        return [*measured, *(self._tuned if last else ())]

    def _believed_tests(self) -> float:
        """Return up to how many test samples a client's word counts in pooled scores."""
        tests = (int(facts["test-examples"]) for facts in self.manager.facts.values())
        return self.config.believed_tests(tests, self.simulation)

    @property
    def _tuned(self) -> tuple[str, ...]:
        """The score of fine-tuned models, if the method's clients fine-tune."""
        return ("tuned",) if self.method.client.tunes() else ()

    def _unseen_protocols(self) -> list[str]:
        """Return the scores of unseen clients."""
        adapted = [f"unseen_{kind}@{n}" for n in self.config.evaluation.adaptations for kind in ("trained", "local")]
        return ["unseen_received", *(f"unseen_{p}" for p in self._tuned), *adapted]

    def _best_round(self) -> int | None:
        """Return the first evaluated round with the highest validation accuracy, or None where there is none yet."""
        rows = self.directory.table("evaluations.csv")
        scores = rows.get("received_validation", np.empty(0))
        return None if np.isnan(scores).all() else int(rows["round"][np.nanargmax(scores)])

    # ---- callbacks ---------------------------------------------------------------------------------------------------

    def after_round(self, result: RoundResult, state: ServerState) -> bool:
        """Write tables, models and checkpoint of a round; return whether to go on."""
        config, traffic, server_round = self.config, result.traffic, result.round
        protocols = self._protocols()
        further = (*self.method.columns, *(("restarted",) if config.storage.lost_state == "restart" else ()))
        rows = {
            c: client_row(m, protocols, config.data.validation > 0, further) for c, m in sorted(result.metrics.items())
        }
        row: dict[str, Any] = {"round": server_round, "clients": len(rows)}
        row |= summarise(rows.values(), protocols, further, most=self._believed_tests())
        if self.method.global_model and "global" in config.evaluation.measured:
            self._score_global(state)
            row["global_accuracy"] = self.global_scores.accuracy if self.global_scores else math.nan
            row["global_loss"] = self.global_scores.loss if self.global_scores else math.nan
        row["bytes_up"] = traffic.up / max(1, len(traffic.answered))
        row["bytes_down"] = traffic.down / max(1, len(traffic.messaged))
        row["dropped"] = len(traffic.dropped)
        row["void"] = int(bool(result.void))
        row["round_seconds"] = result.seconds
        row["train_seconds"] = mean(r["train_seconds"] for r in rows.values())
        self.directory.append("rounds.csv", row)
        found = ({"round": server_round, **self._named(client), **columns} for client, columns in rows.items())
        self.directory.append("clients.csv", *found)
        for dropped in traffic.dropped:
            self.directory.dropped(dropped)
        for client in (c for c, r in rows.items() if r.get("restarted") == 1):
            text = f"client {client} began anew in round {server_round}, because its stored state was lost"
            self.warn(text)
        self.extra["states"] = {str(c): list(known) for c, known in sorted(self.manager.ledger.states.items())}
        self.extra |= self.manager.offences.state()
        self.extra["released"] = {str(c): n for c, n in sorted(self.manager.ledger.released.items())}
        self.extra["silent"] = {k: {str(c): n for c, n in of.items()} for k, of in self.manager.silent.items() if of}
        if result.void:
            text = f"round {server_round} is void, the model stays as it was: {result.void}"
            self.warn(text)
        self.extra["voids"] = self.extra.get("voids", 0) + 1 if result.void else 0
        self.extra["dropped"] += len(traffic.dropped)
        self.extra["seconds"] = self.earlier + time.perf_counter() - self.started
        self._spent(result)
        self._models(state, row)
        fell = self._loss_fell({c: r["train_loss"] for c, r in rows.items()})
        self.extra["since"] = 0 if fell else self.extra["since"] + 1
        identity = self._identity(self.directory.token)
        checkpoint.save(self.out / "checkpoint", server_round, state, self.extra, identity, self.strategy.records)
        self._tell_clients(server_round, rows)
        self.tell({"kind": "round", "rounds": config.federation.num_server_rounds, **row})
        if self.extra["voids"] > 1:
            raise RoundFailed(
                f"rounds {server_round - 1} and {server_round} are void: {result.void}. Lower lr or set clip if all "
                "clients are honest, choose robust if one may not be, or allow more with max-growth",
                server_round,
            )
        scores = config.evaluation
        again = scores.final_training and "trained" in scores.measured and config.federation.fraction_train < 1
        if again and server_round == config.federation.num_server_rounds:
            chosen = len(self.scoring.finalists)
            known = counted(len(self.infos), "client")
            some = f"all {known}" if chosen == len(self.infos) else f"{chosen} of {known}"
            text = f"{some} {'train' if len(self.infos) > 1 else 'trains'} once more for their scores"
            self.tell({"kind": "waiting", "text": f"{text}; set final-training = false to skip this"})
        return not self._patience_is_over()

    def _tell_clients(self, server_round: int, rows: Mapping[int, Mapping[str, float]], final: bool = False) -> None:
        """Send the clients' scores to trackers, which may be on another machine than the run directory."""
        if self.config.storage.track and len(self.infos) <= MOST_CURVES:
            scores = {c: {k: v for k, v in row.items() if k.endswith(TRACKED)} for c, row in rows.items()}
            self.tell({"kind": "clients", "round": server_round, "final": final, "rows": scores})

    def _loss_fell(self, losses: Mapping[int, float]) -> bool:
        """Whether the training loss of a round is lower than before; no client alone says that it is not.

        The median of three clients or more lies within the honest ones' losses. One or two have no majority: each is
        compared with its own lowest loss before, and the first loss of a client counts as lower.
        """
        known = {str(c): loss for c, loss in losses.items() if not math.isnan(loss)}
        if 0 < len(known) < 3:
            lowest: dict[str, float] = self.extra.setdefault("lowest", {})
            fell = any(loss < lowest.get(c, math.inf) for c, loss in known.items())
            lowest.update({c: min(loss, lowest.get(c, loss)) for c, loss in known.items()})
            return fell
        best, loss = self.extra["best_loss"], _median(list(losses.values()))
        if best is not None and not loss < best:
            return False
        self.extra["best_loss"] = None if math.isnan(loss) else loss
        return True

    def _patience_is_over(self) -> bool:
        """Whether the training loss has not fallen for `patience` rounds; if so, note why the run stops."""
        patience = self.config.federation.patience
        if not patience or self.extra["since"] < patience:
            return False
        self.stopped = f"no lower training loss for {counted(patience, 'round')}"
        return True

    def published(self, state: ServerState) -> Arrays | None:
        """Return the server's arrays that are kept as a model: the global one, else what is shared, or None."""
        arrays = self.strategy.global_arrays(state) or state.get("model")
        return dict(arrays) if isinstance(arrays, dict) and arrays else None

    def _model_header(self) -> dict[str, object]:
        """Return what a stored model needs so that it can be built again and used."""
        config, spec = self.config, self.spec
        sizes = {"num_classes": spec.num_classes, "shape": list(spec.shape)}
        model = {"model": spec.name, "model-options": own.header(spec.settings, spec.unit)}
        model |= {"made-with": made_with(spec.name, spec.settings.weights)}
        return {
            **self.about,
            "method": config.federation.method,
            "method-args": config.federation.method_args,
            **model,
            **sizes,
        }

    def has_evaluation(self, server_round: int) -> bool:
        """Whether `evaluations.csv` holds the evaluation after `server_round`."""
        return server_round in self.directory.table("evaluations.csv").get("round", ())

    def _models(self, state: ServerState, row: Mapping[str, Any]) -> None:
        """Keep the server's arrays of the last round, and the best ones that were scored.

        `global` scores what the round produced. Where there is no such score, `received` scores what the round sent.
        """
        made, sent = self.published(state), self.sent
        self.sent = made
        if made is None:
            return
        scored_now = not math.isnan(row.get("global_accuracy", math.nan))
        key = "global_accuracy" if scored_now else "received_accuracy"
        scored = made if scored_now else sent
        value = row.get(key, math.nan)
        header = self._model_header()
        write_safetensors(self.out / "models" / "last.safetensors", made, {**header, "round": row["round"]})
        best = self.extra["best"]
        if scored is not None and not math.isnan(value) and (best is None or value > best):
            self.extra["best"] = value
            of = row["round"] if scored_now else row["round"] - 1
            write_safetensors(self.out / "models" / "best.safetensors", scored, {**header, "round": of, key: value})

    def after_evaluation(self, result: RoundResult) -> None:
        """Write an evaluation of all clients: `final.csv` after the last round, else a row of `evaluations.csv`."""
        config = self.config
        protocols = self._protocols(last=result.kind == "final")
        if result.kind == "unseen":
            protocols = self._unseen_protocols()
        elif config.evaluation.select == "validation" and result.kind != "final":
            protocols = ["received"]
            # Before the row that may choose this round is written: a run that is killed in between finds the state.
            checkpoint.link(self.out / "checkpoint", result.round, self.out / SELECTED)
        further = [column(name) for name in config.evaluation.further_metrics]
        rows = {
            c: client_row(m, protocols, config.data.validation > 0, scores=further)
            for c, m in sorted(result.metrics.items())
        }
        summary = summarise(rows.values(), protocols, scores=further, most=self._believed_tests())
        if result.kind in ("final", "unseen"):
            name = f"{result.kind}.csv"
            (self.out / name).unlink(missing_ok=True)
            aside = ("train_loss", "steps", "bytes_up", "train_seconds")
            self.directory.append(
                name,
                *(
                    {**self._named(client), **{k: v for k, v in columns.items() if k not in aside}}
                    for client, columns in rows.items()
                ),
            )
            if result.kind == "final":
                self.final, self.last_scores = summary, result.metrics
                self.directory.confusion(result.metrics, protocols)
                self._warn_of_tuning(result)
                self._tell_clients(result.round, rows, final=True)
        else:
            row = {"round": result.round, "clients": len(rows), **summary, "evaluate_seconds": result.seconds}
            self.directory.append("evaluations.csv", row)
            self.tell({"kind": "evaluated", **row})
            if config.evaluation.select == "validation" and (best := self._best_round()) is not None:
                checkpoint.only(self.out / SELECTED, best)
        for dropped in result.traffic.dropped:
            self.directory.dropped(dropped)
            self.extra["dropped"] += 1

    def _warn_of_tuning(self, result: RoundResult) -> None:
        """Name the clients whose fine-tuning gave no score; with `dp` real nodes send none in any case."""
        if self._tuned and (self.simulation or self.config.mechanism is None):
            asked = sorted(result.metrics.keys() & self.scoring.finalists)
            without = [str(c) for c in asked if "tuned-total" not in result.metrics[c]]
            if without:
                more = f" and {len(without) - 20} more" if len(without) > 20 else ""
                self.warn(
                    f"no score 'tuned' of {counted(len(without), 'client')} ({', '.join(without[:20])}{more}): the "
                    "loss of their fine-tuning is no number; lower lr, or set clip"
                )

    def selected(self, state: ServerState, server_round: int) -> tuple[ServerState, int]:
        """Return the state and number of the round with the best validation accuracy over all clients."""
        best = self._best_round()
        if best is None:
            text = "select = validation found no validation scores, so the last round is scored: give clients more data"
            self.warn(text)
            return state, server_round
        self.chosen = best
        self.tell({"kind": "selected", "round": best})
        _, chosen, extra = checkpoint.load(self.out / SELECTED, best)
        self._know(extra)
        return chosen, best

    def after_query(self, result: RoundResult) -> None:
        """Record the traffic of a query."""
        traffic = result.traffic
        self.extra[f"bytes_up_{result.kind}"] = traffic.up / max(1, len(traffic.answered))
        self.extra["dropped"] += len(traffic.dropped)
        self._spent(result)
        for dropped in traffic.dropped:
            self.directory.dropped(dropped)
        self.tell({"kind": "asked", "what": result.kind, "clients": len(traffic.answered), "seconds": result.seconds})

    def went_back(self, spoiled: Spoiled, earlier: Earlier, how: str) -> None:
        """Say that the last update, or all of them, are taken back."""
        what = "the update before" if earlier.round else "what came before"
        text = f"{what} round {spoiled.round} spoiled the model and is taken back; {how} ({spoiled.reason})"
        self.warn(text)
        self.extra["median"] = self.loop.gone_back

    def without_evaluation(self, spoiled: Spoiled) -> None:
        """Say that there are no scores, and of whom."""
        self.warn(f"the evaluation after round {spoiled.round} is left out: the model is spoiled ({spoiled.reason})")
        for dropped in spoiled.dropped:
            self.directory.dropped(dropped)
            self.extra["dropped"] += 1

    # ---- the end -------------------------------------------------------------------------------------------------

    def _finish(self, state: ServerState) -> dict[str, Any]:
        rounds = self.directory.table("rounds.csv")
        if self.method.global_model and "global" in self.config.evaluation.measured:
            self._score_global(state, probabilities=bool(self.config.evaluation.further_metrics))
            if self.global_scores is not None:
                self.final["global_accuracy"] = self.global_scores.accuracy
                self.final["global_balanced"] = self.global_scores.balanced
        arrays = self.published(state)
        if arrays is not None:
            scalars = dict(self.strategy.send(state, 0, self.infos[0].client).scalars)
            header = {**self._model_header(), "final": True, "scalars": scalars}
            if self.chosen is not None:
                header["round"] = self.chosen
            write_safetensors(self.out / "models" / "last.safetensors", arrays, header)
        final = self.directory.table("final.csv")
        tests = [int(v) for v in final.get("received_total", final.get("trained_total", [])) if not math.isnan(v)]
        none = np.empty(0)
        answered = rounds.get("clients", none)
        messaged = answered + rounds.get("dropped", none)
        evaluations = self.directory.table("evaluations.csv")
        accuracy = accuracy_summary(
            rounds, evaluations, self.final, (*self.config.evaluation.measured, *self._tuned), self._taking_part()
        )
        last = int(rounds["round"].max()) if len(answered) else 0
        scored = last if self.chosen is None else self.chosen
        summary = {
            "ok": True,
            "method": self.config.federation.method,
            "dataset": self.config.data.dataset,
            "model": self.config.model.model,
            "clients": len(self.infos),
            **({"unseen": self.extra["unseen"]} if self.extra["unseen"] else {}),
            "rounds": last,
            "round": scored,
            "seed": self.config.federation.seed,
            "accuracy": accuracy,
            "headline": self._headline(accuracy, scored, final),
            **self.scoring.stated(),
            "metrics": self._metrics(final),
            "pooled": {p: self.final.get(f"{p}_accuracy_pooled") for p in self._protocols(last=True)},
            "test_sizes": {"min": min(tests, default=0), "mean": mean(map(float, tests)), "max": max(tests, default=0)},
            "bytes_up": _whole(float((rounds.get("bytes_up", none) * answered).sum() / (answered.sum() or 1))),
            "bytes_down": _whole(float((rounds.get("bytes_down", none) * messaged).sum() / (messaged.sum() or 1))),
            "dropped": int(self.extra["dropped"]),
            **({"blocked": sorted(self.manager.offences.blocked)} if self.manager.offences.blocked else {}),
            **({"left_out": out} if (out := self.manager.left_out()) else {}),
            "stopped": self.stopped,
            "warnings": self.warnings,
            **{k: _whole(v) for k, v in self.extra.items() if k.startswith("bytes_up_query")},
            **self.strategy.report(state, self.last_scores),
            **self._robustness(state),
            **self._privacy(),
            "seconds": self.earlier + time.perf_counter() - self.started,
        }
        write_json(self.out / "summary.json", summary)
        (self.out / "error.json").unlink(missing_ok=True)
        self.tell({"kind": "end", "summary": summary})
        return summary

    def _robustness(self, state: ServerState) -> dict[str, Any]:
        """Return what was done against lying clients, and where the rule had too few senders; nothing by default."""
        robust = self.strategy.policy.robust
        if not robust.active:
            return {}
        found = {"rules": "+".join(robust.rules) or "none", "f": robust.robust_f, "count_cap": robust.count_cap}
        return {"robust": {**found, **state.get("robust", {})}}

    def _metrics(self, final: Columns) -> dict[str, dict[str, dict[str, float]]]:
        """Return every metric of every score, with how it is spread over clients; `global` has one model and no spread.

        Parameters
        ----------
        final : final.csv.
        """
        names = {m: column(m) for m in ("accuracy", "loss", *self.config.evaluation.further_metrics)}
        found = {
            p: {
                own: over_clients(table[f"{p}_{own}"], low_is_good=name in LOW_IS_GOOD)
                for name, own in names.items()
                if f"{p}_{own}" in table
            }
            for table, protocols in (
                (final, self._protocols(last=True)),
                (self.directory.table("unseen.csv"), self._unseen_protocols()),
            )
            for p in protocols
            if f"{p}_accuracy" in table
        }
        scores = self.global_scores
        if scores is not None and self.central is not None:
            further = measured(
                self.config.evaluation.further_metrics, self.central[1].cpu().numpy(), scores.probabilities
            )
            values = {"accuracy": scores.accuracy, "loss": scores.loss, **further}
            found["global"] = {name: {"mean": value} for name, value in values.items()}
        return found

    def _headline(
        self, accuracy: Mapping[str, Mapping[str, Any]], server_round: int, final: Columns
    ) -> dict[str, Any] | None:
        """Return the one number that a method is judged by, over how many of all clients, and when it was measured."""
        protocol = next((p for p in self.method.headlines if p in accuracy), None)
        if protocol is None:
            return None
        moment = "the last round" if self.chosen is None else f"round {server_round}, chosen on validation images"
        point = {
            "tuned": f"after {moment} and fine-tuning on the client",
            "trained": f"after {moment} and one more local training" if self.config.evaluation.final_training else
            "each client as it was last trained" + ("" if self.chosen is None else f", up to {moment}"),
            "received": f"after {moment}, before local training",
            "global": f"the global model after {moment}",
        }[protocol]  # fmt: skip
        return {"score": protocol, "value": accuracy[protocol]["last"], "point": point, "round": server_round} | {
            "clients": len(measured_values(final.get(f"{protocol}_accuracy", final.get("client", ())))),
            "of": self._taking_part(),
        }  # fmt: skip


def _states(extra: Mapping[str, Any]) -> dict[int, tuple[str, bool]]:
    """Return what a checkpoint knows of the clients' states, as `StateLedger.states`."""
    return {int(c): (str(digest), bool(binds)) for c, (digest, binds) in extra.get("states", {}).items()}


def _median(values: Sequence[float]) -> float:
    """Return the median of those that are not NaN, or NaN."""
    known = [v for v in values if not math.isnan(v)]
    return statistics.median(known) if known else math.nan


def _whole(value: float) -> float | int:
    return int(value) if float(value).is_integer() else float(value)
