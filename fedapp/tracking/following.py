"""Passes what happens in a run on to trackers, in the program that follows the run: the same in every engine.

Trackers listen to the events that the server sends. `tracking.json` in the run directory keeps, for each of them, the
key under which a resumed run goes on and the last step of each series, so that no step is tracked twice. Rounds that a
tracker has not seen, because it was added later or had failed, are read from the run directory's tables.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fedapp import __version__, plugins
from fedapp.config import RunConfig
from fedapp.errors import BadRequest, raised, suggest
from fedapp.results.directory import MOST_CURVES, TRACKED, only_writer, write_json
from fedapp.results.runs import RunResult, read_json, read_table
from fedapp.tracking.base import Tracked, Tracker, Value

Listener = Callable[[Mapping[str, Any]], None]
OWN = {
    "tensorboard": ("tensorboard", "fedapp.tracking.tensorboard:TensorBoard"),
    "mlflow": ("mlflow", "fedapp.tracking.mlflow:MLflow"),
    "wandb": ("wandb", "fedapp.tracking.wandb:Wandb"),
}
"""The trackers of fedapp: the library that each needs, which is the name of its extra too, and its class."""
STATE = "tracking.json"
SECTIONS = ("data", "scores", "heads", "cost")
"""Sections of the report whose figures are drawn from tables and heads within a second or two."""
TABLES = (
    "config.toml", "versions.json", "rounds.csv", "clients.csv", "evaluations.csv", "final.csv", "unseen.csv",
    "dropped.csv", "blocked.csv", "summary.json", "error.json", "data_card.json", "partition.npz",
    "final_confusion.npz",
)  # fmt: skip
HIDDEN = ("kind", "time", "round")
"""What events and tables hold beside numbers of a step."""


def names(text: str) -> list[str]:
    """Return the trackers that `track` names."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def check(text: str) -> None:
    """Check what `track` names before anything is trained.

    Raises
    ------
    BadRequest : there is no such tracker, or its library is not installed; says what to install.
    """
    for name in names(text):
        if name not in OWN:
            _added(name).load()
            continue
        found = importlib.util.find_spec(OWN[name][0])
        # A folder of the library's name, such as the one that wandb makes, is a package of nothing.
        if found is None or found.origin is None:
            raise BadRequest(f"track = '{name}' needs a library: pip install 'fedapp[{name}]'")


def _added(name: str) -> plugins.Entry:
    if name in (problems := plugins.problems("trackers", OWN)):
        raise BadRequest(problems[name])
    added = plugins.entries("trackers", OWN)
    if name not in added:
        known = (*OWN, *added)
        raise BadRequest(f"track: unknown tracker '{name}'{suggest(name, known)}: choose from {', '.join(known)}")
    return added[name]


def _class(name: str) -> type[Tracker]:
    found: type[Tracker] = plugins.imported(OWN[name][1], name) if name in OWN else _added(name).load()
    return found


@contextlib.contextmanager
def tracked(config: RunConfig, listener: Listener | None, out: Path | None = None) -> Iterator[Listener | None]:
    """Let trackers listen to a run too, inside the block.

    Parameters
    ----------
    config : its configuration, which names the trackers.   listener : who else listens to its events.
    out : run directory on this machine, where it is not the configuration's.
    """
    if not names(config.storage.track):
        yield listener
        return
    trackers = Trackers(config, out or Path(config.storage.out), listener)
    try:
        yield trackers
    except KeyboardInterrupt:
        trackers.end("interrupted")
        raise
    except BaseException as e:
        trackers.end("failed", error=f"{type(e).__name__}: {e}")
        raise
    # Where the run is in another process, only its files may say how it ended.
    summary, error = (read_json(trackers.out / f"{name}.json") for name in ("summary", "error"))
    if summary.get("ok") is True:
        trackers.end("finished", dict(flattened(summary)))
    trackers.end("failed", error=str(error.get("message") or "nothing was heard of its end"))


class Trackers:
    """The trackers of one run; a listener of its events."""

    def __init__(self, config: RunConfig, out: Path, listener: Listener | None) -> None:
        self.config = config
        self.out = out
        self.listener = listener
        self.working: dict[str, Tracker] = {}
        self.state: dict[str, Any] = {}
        self.many = False
        self.ended = False

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take one event."""
        if self.listener is not None:
            self.listener(event)
        try:
            self._take(event)
        except Exception as e:  # whatever a tracker is given or does, the run goes on
            self.tell(f"tracking failed: {raised(e)}")

    def _take(self, event: Mapping[str, Any]) -> None:
        kind = event.get("kind")
        if kind == "start":
            self._begin(int(event["done"]), int(event["clients"]))
        elif kind == "round":
            self._log("round", int(event["round"]), {f"round/{k}": v for k, v in event.items() if k != "rounds"})
        elif kind == "evaluated":
            self._log("evaluation", int(event["round"]), {f"evaluation/{k}": v for k, v in event.items()})
        elif kind == "clients":
            series = "final_client" if event["final"] else "client"
            self._log(series, int(event["round"]), _by_client(series, event["rows"]))
        elif kind == "end":
            self._finish(event["summary"])
        elif kind == "failed":
            stopped = str(event["message"]).startswith("KeyboardInterrupt")
            self.end("interrupted" if stopped else "failed", error="" if stopped else str(event["message"]))

    def tell(self, text: str, kind: str = "warning") -> None:
        """Say something to who else listens, or on standard error."""
        if self.listener is not None:
            self.listener({"kind": kind, "text": text})
        elif kind == "warning":
            sys.stderr.write(f"fedapp: {text}\n")

    def _each(self, do: Callable[[str, Tracker], None]) -> None:
        """Do something with each tracker; one that fails is left out from then on, with one warning."""
        for name, tracker in list(self.working.items()):
            try:
                do(name, tracker)
            except Exception as e:
                del self.working[name]
                self._failed(name, e)

    def _failed(self, name: str, error: Exception) -> None:
        told = raised(error)[:600]
        self.tell(f"{name} failed, the run goes on without it ({told}); fedapp track {self.out} --to {name} catches up")

    # ---- the life of a run -------------------------------------------------------------------------------------------

    def _begin(self, done: int, clients: int) -> None:
        self.many = clients > MOST_CURVES
        if self.many:
            self.tell(f"{clients} clients have no curves of their own: they are in clients.csv", "tracking")
        try:
            self.state = read_json(self.out / STATE)
        except BadRequest as e:
            self.tell(f"{e}: trackers begin anew")
        facts = self.out, short_name(self.out), settings(self.config, self.out), tags(self.config, self.out)
        for name in names(self.config.storage.track):
            known = self.state.setdefault(name, {"key": "", "steps": {}})
            try:
                step = max(known["steps"].values(), default=0)
                tracker = _class(name)(Tracked(*facts, key=str(known["key"]), step=step))
            except Exception as e:
                self._failed(name, e)
                continue
            self.working[name] = tracker
            known["key"] = tracker.key
            if tracker.where:
                self.tell(f"{name}: {tracker.where}", "tracking")
        self._keep()
        for series, step, scores in history(self.out, done):
            self._log(series, step, scores)

    def _keep(self) -> None:
        try:
            write_json(self.out / STATE, self.state)
        except OSError as e:
            self.tell(f"{self.out / STATE} cannot be written ({e.strerror}): a resumed run may be tracked twice")

    def _log(self, series: str, step: int, scores: Mapping[str, Any]) -> None:
        if self.many and "client" in series:
            return
        finite = {k: float(v) for k, v in scores.items() if k.rpartition("/")[2] not in HIDDEN and _finite(v)}
        steps = {name: self.state[name]["steps"] for name in self.working}
        before = {name: known.get(series, 0) for name, known in steps.items() if known.get(series, 0) < step}
        if not finite or not before:
            return
        # Kept first: a process that is killed in between leaves out a step of a tracker, and doubles none.
        for name in before:
            steps[name][series] = step
        self._keep()
        failed = []

        def log(name: str, tracker: Tracker) -> None:
            if name in before:
                try:
                    tracker.log(step, finite)
                except Exception:
                    steps[name][series] = before[name]
                    failed.append(name)
                    raise

        self._each(log)
        if failed:
            self._keep()

    def _finish(self, summary: Mapping[str, Any]) -> None:
        last = {name: self.state[name]["steps"].get("round", 0) for name in self.working}
        # What a tracker has of the end of this round is not given to it again.
        again = {name: self.working.pop(name) for name in last if self.state[name].get("ended") == last[name]}
        try:
            self._attach()
        except Exception as e:  # a full disk, say: the run has finished all the same
            self.tell(f"not all figures and files are tracked: {type(e).__name__}: {e}")
        self._each(lambda name, tracker: tracker.end("finished", dict(flattened(summary)), ""))
        for name in self.working:
            self.state[name]["ended"] = last[name]
        self._keep()
        self.working = again
        self.end("finished")

    def _attach(self) -> None:
        """Pass on the figures, the tables and the models of a run that has finished."""
        from fedapp.results.figures.gallery import FIGURES

        run = RunResult(self.out)
        with tempfile.TemporaryDirectory(prefix="fedapp-") as folder:
            for name, (section, *_) in FIGURES.items():
                if section in SECTIONS and self.working:
                    self._figure(name, run, Path(folder))
        tables = [f for name in TABLES if (f := self.out / name).is_file()]
        models = sorted(f for f in (self.out / "models").rglob("*.safetensors") if f.is_file())
        self._each(lambda name, tracker: tracker.files("tables", tables))
        if models:
            self._each(lambda name, tracker: tracker.files("models", models))
        elif self.working:
            self.tell("this machine has no models of the run, so they are not tracked", "tracking")

    def _figure(self, name: str, run: RunResult, folder: Path) -> None:
        from fedapp.results.figures import Gallery

        gallery = Gallery()  # what the run has no data for is left out; the report says why
        gallery.add_known(name, [run])
        for drawing in gallery.drawings:
            file = folder / f"{drawing.id}.png"
            file.write_bytes(drawing.png(dpi=120))
            self._each(partial(_figure, drawing, file))

    def end(self, status: str, summary: Mapping[str, float] | None = None, error: str = "") -> None:
        """End all trackers; what follows has no effect."""
        if not self.ended:
            self.ended = True
            self._each(lambda name, tracker: tracker.end(status, summary or {}, error))
            self.working = {}


def track(run: RunResult, to: str, listener: Listener | None) -> None:
    """Track a run that is over, or what trackers lack of it.

    Parameters
    ----------
    to : trackers, with commas between them.

    Raises
    ------
    BadRequest : no such tracker, no library, a run that this version does not accept, or one that still goes on.
    """
    check(to)
    if run.config is None:
        raise BadRequest(f"{run.out}: {run.problem}")
    with only_writer(run.out):
        trackers = Trackers(run.config.replaced(track=to), run.out, listener)
        last = int(run.rounds["round"].max()) if len(run.rounds) else 0
        trackers({"kind": "start", "done": last, "clients": len(run.final) or run.config.data.clients})
        if run.ok:
            rows = {row["client"]: row for row in run.final.to_dict("records")}
            trackers({"kind": "clients", "round": last, "final": True, "rows": rows})
            trackers({"kind": "end", "summary": run.summary})
        message = str(run.error.get("message") or "")
        trackers.end("failed" if message else "interrupted", error=message)


def _figure(drawing: Any, file: Path, name: str, tracker: Tracker) -> None:
    tracker.figure(drawing.id, drawing.title, file)


# ---- what is tracked -------------------------------------------------------------------------------------------------


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _by_client(prefix: str, rows: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{prefix}_{column}/{client}": value
        for client, row in rows.items()
        for column, value in row.items()
        if column.endswith(TRACKED)
    }


def history(out: Path, last: int) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield series, step and numbers of the rounds up to `last` that a run directory holds."""
    tables = {name: read_table(out / f"{name}.csv") for name in ("rounds", "clients", "evaluations")}
    for series, name in (("round", "rounds"), ("evaluation", "evaluations")):
        for row in tables[name].to_dict("records"):
            if row["round"] <= last:
                yield series, int(row["round"]), {f"{series}/{k}": v for k, v in row.items()}
    clients = tables["clients"]
    for step, rows in clients.groupby("round") if len(clients) else ():
        if step <= last:
            yield "client", int(step), _by_client("client", {r["client"]: r for r in rows.to_dict("records")})


def short_name(out: Path) -> str:
    """Return a run directory's name with the folders that tell it from others, `compare-1/fedavg-s0`."""
    with contextlib.suppress(ValueError):
        out = out.relative_to(Path.cwd())
    parts = [p for p in out.parts if p != "runs"]
    return out.name if out.is_absolute() else "/".join(parts)


def settings(config: RunConfig, out: Path) -> dict[str, Value]:
    """Return the run-config and the method's hyperparameters, as flat values."""
    inner = config.method_and_hparams()[1].model_dump(mode="json")
    plain = {k: v if isinstance(v, (bool, int, float, str)) else json.dumps(v) for k, v in inner.items()}
    flat = {k: v for k, v in config.to_flat().items() if k not in ("resume", "track", "out")}
    return {**flat, **{f"hparam.{k}": v for k, v in plain.items()}, "out": str(out)}


def tags(config: RunConfig, out: Path) -> dict[str, str]:
    """Return few facts to find a run by."""
    facts = {"method": config.federation.method, "dataset": config.data.dataset, "seed": str(config.federation.seed)}
    return {**facts, "folder": str(out), "fedapp": __version__}


def flattened(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of nested objects with their paths, `accuracy/trained/last`."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flattened(inner, f"{name}/{key}" if name else str(key))
    elif _finite(value):
        yield name, float(value)
