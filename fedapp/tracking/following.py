"""Passes the events of a run on to trackers, in the program that follows the run: the same in every engine.

Trackers listen to the events that the server sends. `tracking.json` in the run directory keeps for each of them the key
under which a resumed run goes on, and the last round that it has. Later rounds, which a tracker lacks because it was
added afterwards or had failed, are read from the run directory's tables.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fedapp import __version__, plugins
from fedapp.config import RunConfig
from fedapp.errors import BadRequest, listed, raised, suggest_choice
from fedapp.results.directory import MOST_CURVES, TRACKED, only_writer, write_json
from fedapp.results.runs import RunResult, read_json, read_table
from fedapp.results.terminal import echo
from fedapp.tracking.base import Tracked, Tracker, Value

Listener = Callable[[Mapping[str, Any]], None]
OWN = {
    "tensorboard": ("tensorboard", "fedapp.tracking.tensorboard:TensorBoard"),
    "mlflow": ("mlflow", "fedapp.tracking.mlflow:MLflow"),
    "wandb": ("wandb", "fedapp.tracking.wandb:Wandb"),
}
"""The trackers of fedapp: the library that each needs, which is the name of its extra too, and its class."""
STATE = "tracking.json"
TABLES = (
    "config.toml", "versions.json", "rounds.csv", "clients.csv", "evaluations.csv", "final.csv", "unseen.csv",
    "dropped.csv", "blocked.csv", "summary.json", "error.json", "data_card.json", "partition.npz",
    "final_confusion.npz",
)  # fmt: skip
HIDDEN = ("kind", "time", "round", "rounds")
"""Entries of events and tables that are not numbers of a round."""


def names(text: str) -> list[str]:
    """Return the trackers that `track` names."""
    return list(dict.fromkeys(listed(text)))


def check(text: str) -> None:
    """Check what `track` names before anything is trained.

    Raises
    ------
    BadRequest : there is no such tracker, or its library is not installed; says what to install.
    """
    for name in names(text):
        if name not in OWN:
            _class(name)
            continue
        found = importlib.util.find_spec(OWN[name][0])
        # A folder of the library's name, such as the one that wandb makes, is a package of nothing.
        if found is None or found.origin is None:
            raise BadRequest(f"track = '{name}' needs a library: pip install 'fedapp[{name}]'")


def _class(name: str) -> type[Tracker]:
    """Import a tracker."""
    added = plugins.entries("trackers", OWN)
    if name in (problems := plugins.problems("trackers", OWN)):
        raise BadRequest(problems[name])
    if name not in (known := (*OWN, *added)):
        raise BadRequest(f"track: unknown tracker '{name}'{suggest_choice(name, known)}")
    found: type[Tracker] = plugins.imported(OWN[name][1], name) if name in OWN else added[name].load()
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
    trackers.end("failed", error=str(error.get("message") or "its end is unknown"))


class Trackers:
    """The trackers of one run; a listener of its events."""

    def __init__(self, config: RunConfig, out: Path, listener: Listener | None, over: bool = False) -> None:
        self.config = config
        self.over = over  # the run has ended
        self.complete = True  # nothing has failed
        self.out = out
        self.listener = listener
        self.working: dict[str, Tracker] = {}
        self.state: dict[str, Any] = {}
        self.many = False

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take one event."""
        if self.listener is not None:
            self.listener(event)
        try:
            self._take(event)
        except Exception as e:  # whatever a tracker is given or does, the run goes on
            self._fail(f"tracking failed: {raised(e)}")

    def _take(self, event: Mapping[str, Any]) -> None:
        kind = event.get("kind")
        if kind == "start":
            self._begin(int(event["done"]), int(event["clients"]))
        elif kind == "round":
            self._log(int(event["round"]), _by_name("round", event))
            for name in self.working:
                self.state[name]["round"] = int(event["round"])
            write_json(self.out / STATE, self.state)
        elif kind == "evaluated":
            self._log(int(event["round"]), _by_name("evaluation", event))
        elif kind == "clients" and not self.many:
            series = "final_client" if event["final"] else "client"
            self._log(int(event["round"]), _by_client(series, event["rows"]))
        elif kind == "end":
            try:
                self._attach()
            except Exception as e:  # a full disk, say: the run has finished all the same
                self._fail(f"not all figures and files are tracked: {type(e).__name__}: {e}")
            self.end("finished", dict(flattened(event["summary"])))
        elif kind == "failed":
            stopped = str(event["message"]).startswith("KeyboardInterrupt")
            self.end("interrupted" if stopped else "failed", error="" if stopped else str(event["message"]))

    def tell(self, text: str, kind: str = "warning") -> None:
        """Pass a text to the other listener, or print it on standard error."""
        if self.listener is not None:
            self.listener({"kind": kind, "text": text, "tracker": True})
        elif kind == "warning":
            echo(f"fedapp: {text}", err=True, must=True)

    def _fail(self, text: str) -> None:
        self.complete = False
        self.tell(text)

    def _each(self, do: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.working.items()):
            self._attempt(name, partial(do, tracker))

    def _attempt(self, name: str, do: Callable[[], None]) -> None:
        """Call a tracker; one that fails is left out from then on, with one warning."""
        try:
            do()
        except Exception as e:
            self.working.pop(name, None)
            why, again = raised(e)[:600], f"fedapp track {shlex.quote(str(self.out))} --to {name}"
            goes_on = "" if self.over else ", the run goes on without it"
            advice = f"mend the cause and repeat {again}" if self.over else f"{again} catches up"
            self._fail(f"{name} failed{goes_on} ({why}); {advice}")

    def _begin(self, done: int, clients: int) -> None:
        self.many = clients > MOST_CURVES
        if self.many:
            self.tell(f"{clients} clients have no curves of their own: they are in clients.csv", "tracking")
        try:
            self.state = read_json(self.out / STATE)
        except BadRequest as e:
            self.tell(f"{e}: trackers start again")
        for name in names(self.config.storage.track):
            self._attempt(name, partial(self._start, name, done))
        write_json(self.out / STATE, self.state)

    def _start(self, name: str, done: int) -> None:
        """Start a tracker, and give it the rounds up to `done` that it lacks."""
        known = self.state.setdefault(name, {"key": ""})
        flat = settings(self.config, self.out)
        tags = {key: str(flat[key]) for key in ("method", "dataset", "seed")}
        tags |= {"folder": str(self.out), "fedapp": __version__}
        last = int(known.setdefault("round", max(known.pop("steps", {}).values(), default=0)))  # `steps`: version 0.2
        about = Tracked(self.out, short_name(self.out), flat, tags, key=str(known["key"]), step=last)
        tracker = self.working[name] = _class(name)(about)
        known["key"] = tracker.key
        if tracker.where:
            self.tell(f"{name}: {tracker.where}", "tracking")
        for step, scores in history(self.out, last, done, self.many):
            tracker.log(step, scores)
        known["round"] = max(last, done)

    def _log(self, step: int, scores: Mapping[str, float]) -> None:
        if scores:
            self._each(lambda tracker: tracker.log(step, scores))

    def _attach(self) -> None:
        """Pass on the figures, the tables and the models of a run that has finished."""
        if not self.working:
            return
        from fedapp.results.figures.gallery import of_run

        tables = [f for name in TABLES if (f := self.out / name).is_file()]
        models = sorted(f for f in (self.out / "models").rglob("*.safetensors") if f.is_file())
        # Figures that the run has no data for are left out; the report says why.
        drawings = of_run(RunResult(self.out)).drawings
        with tempfile.TemporaryDirectory(prefix="fedapp-") as folder:
            for drawing in drawings:
                (Path(folder) / f"{drawing.id}.png").write_bytes(drawing.png(dpi=120))

            def attach(tracker: Tracker) -> None:
                for drawing in drawings:
                    tracker.figure(drawing.id, drawing.title, Path(folder) / f"{drawing.id}.png")
                tracker.files("tables", tables)
                if models:
                    tracker.files("models", models)

            self._each(attach)
        if not models:
            self.tell("this machine has no models of the run, so they are not tracked", "tracking")

    def end(self, status: str, summary: Mapping[str, float] | None = None, error: str = "") -> None:
        """End all trackers; what follows has no effect."""
        self._each(lambda tracker: tracker.end(status, summary or {}, error))
        self.working = {}


def track(run: RunResult, to: str, listener: Listener | None) -> bool:
    """Track a run that is over, or what trackers lack of it; return whether nothing failed.

    Parameters
    ----------
    to : trackers, with commas between them.

    Raises
    ------
    BadRequest : no such tracker, none at all, no library, a run that this version does not accept, or one that still
        goes on.
    """
    check(to)
    if not names(to):
        raise BadRequest(f"no tracker given: choose from {', '.join(OWN)}")
    if run.config is None:
        raise BadRequest(f"{run.out}: {run.problem}")
    with only_writer(run.out):
        trackers = Trackers(run.config.replaced(track=to), run.out, listener, over=True)
        last = int(run.rounds["round"].max()) if len(run.rounds) else 0
        trackers({"kind": "start", "done": last, "clients": len(run.final) or run.config.data.clients})
        if run.ok:
            rows = {row["client"]: row for row in run.final.to_dict("records")}
            trackers({"kind": "clients", "round": last, "final": True, "rows": rows})
            trackers({"kind": "end", "summary": run.summary})
        message = str(run.error.get("message") or "")
        trackers.end("failed" if message else "interrupted", error=message)
    return trackers.complete


# ---- tracked values --------------------------------------------------------------------------------------------------


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _by_name(series: str, row: Mapping[Any, Any]) -> dict[str, float]:
    """Return the finite numbers of a round, `round/train_loss`."""
    return {f"{series}/{k}": float(v) for k, v in row.items() if k not in HIDDEN and _finite(v)}


def _by_client(series: str, rows: Mapping[Any, Mapping[Any, Any]]) -> dict[str, float]:
    """Return the finite scores of clients, `client_trained_accuracy/3`."""
    return {
        f"{series}_{column}/{client}": float(value)
        for client, row in rows.items()
        for column, value in row.items()
        if column.endswith(TRACKED) and _finite(value)
    }


def history(out: Path, last: int, done: int, many: bool) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the rounds after `last` up to `done` that a run directory holds; of `many` clients no single ones.

    The evaluation of the round `last` follows that round, so a tracker may lack it: it is among them.
    """
    for series, name, first in (("round", "rounds", last + 1), ("evaluation", "evaluations", last)):
        for row in read_table(out / f"{name}.csv").to_dict("records"):
            if first <= row["round"] <= done:
                yield int(row["round"]), _by_name(series, row)
    clients = read_table(out / "clients.csv")
    for step, rows in clients.groupby("round") if len(clients) and not many else ():
        if last < step <= done:
            yield int(step), _by_client("client", rows.set_index("client").to_dict("index"))


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


def flattened(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of nested objects with their paths, `accuracy/trained/last`."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flattened(inner, f"{name}/{key}" if name else str(key))
    elif _finite(value):
        yield name, float(value)
