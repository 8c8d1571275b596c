"""What all tests share: one thread, a data cache of their own, the order of long files, tiny federations."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

from fedapp.engines import pool
from fedapp.engines.local import RunResult, run, run_local
from fedapp.method import Reply
from fedapp.results import report
from fedapp.results.figures import Gallery, gallery
from fedapp.tracking import following
from fedapp.transport.cohort import Cohort
from fedapp.transport.traffic import Exchange
from tests import recorder

torch.set_num_threads(1)
# What a test finds must not depend on the day or on how busy the machine is.
settings.register_profile("fedapp", deadline=None, derandomize=True, database=None)
settings.load_profile("fedapp")
# A shell that starts the tests in the background has them ignore Ctrl-C, and children inherit that; they test it.
signal.signal(signal.SIGINT, signal.default_int_handler)

DEPLOYMENTS = ("deployment", "gate", "deploycheck")
"""Files of tests that start SuperLinks and nodes. They mostly wait, so they have a worker of their own."""
SIMULATIONS = ("simulation", "superlink", "supervise", "ray_cluster")
"""Files of tests that start Ray or private SuperLinks: in one worker too, for two Ray clusters on two cores would wait
for each other until time runs out."""
FIRST = (
    *DEPLOYMENTS,
    *SIMULATIONS,
    "standin",
    "registry",
    "nodes",
    "benchmarks",
    "report",
    "config",
    "contract",
    "figures",
    "reductions",
    "models",
    "compare",
    "offences",
    "cohorts",
    "answers",
    "hostile",
    "archive",
)
"""Files to begin with, so that no worker is left with a long one at the end."""


def place(test: str) -> int:
    """Return where a test's file stands in `FIRST`."""
    name = Path(test.partition("::")[0]).stem.removeprefix("test_")
    return FIRST.index(name) if name in FIRST else len(FIRST)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first, and mark the tests that write files, as all federations do: `make quick` goes without."""
    items.sort(key=lambda item: place(item.nodeid))
    for item in items:
        if "tmp_path" in getattr(item, "fixturenames", ()):
            item.add_marker("files")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Start one worker per core, and two more for the tests that mostly wait for other processes."""
    return min(8, os.cpu_count() or 1) + 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one worker, for its tests share fixtures; `DEPLOYMENTS` go to one, and so do `SIMULATIONS`."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            number = place(nodeid)
            if number < len(DEPLOYMENTS):
                return "deployments"
            return "simulations" if number < len(DEPLOYMENTS + SIMULATIONS) else nodeid.partition("::")[0]

    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tests' data out of the user's cache, and one worker's out of another's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDAPP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., RunResult]:
    """Run a tiny federation on digits in this process; keyword arguments are run-config keys with underscores."""
    count = iter(range(1000))

    def go(**changes: Any) -> RunResult:
        if "resume" in changes:
            return run(**changes)
        defaults: dict[str, Any] = {"dataset": "digits", "clients": 3, "rounds": 2, "local_epochs": 1, "batch_size": 64}
        if "dataset" not in changes:
            defaults["data_fraction"] = 0.3
        defaults["out"] = tmp_path / f"run{next(count)}"
        return run(**{**defaults, **changes})

    return go


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Leave the report out, which has tests of its own; collects what it was asked for."""
    asked: list[Path] = []
    monkeypatch.setattr(report, "write", lambda out, **options: asked.append(out))
    return asked


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run in this process, in turn; collects which runs were started."""
    started: list[str] = []

    def run_all(configs: Any, workers: Any, on_end: Any, deadline: Any) -> list[pool.FinishedRun]:
        ended = []
        for c in configs:
            started.append(Path(c.storage.out).name)
            try:
                run_local(c)
                ended.append(pool.FinishedRun(Path(c.storage.out), None))
            except Exception as e:
                ended.append(pool.FinishedRun(Path(c.storage.out), f"{type(e).__name__}: {e}"))
            on_end(ended[-1])
        return ended

    monkeypatch.setattr(pool, "run_all", run_all)
    return started


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write pages without figures, which take most of the time and have tests of their own."""
    monkeypatch.setattr(Gallery, "add_all", lambda *args: None)


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Reply]]:
    """Record every valid reply of a run with the kind of message it answers."""
    seen: list[tuple[str, Reply]] = []
    original = Cohort.send_and_receive

    def send_and_receive(self: Cohort, exchange: Exchange, *args: Any, **kwargs: Any) -> Iterator[Reply]:
        for reply in original(self, exchange, *args, **kwargs):
            seen.append((exchange.stage, reply))
            yield reply

    monkeypatch.setattr(Cohort, "send_and_receive", send_and_receive)
    return seen


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Trackers `records` and `breaks`, and what they were told."""
    recorder.TOLD.clear()
    recorder.FAILS.clear()
    own = {"records": ("json", "tests.recorder:Recorder"), "breaks": ("json", "tests.recorder:Breaks")}
    monkeypatch.setattr(following, "OWN", {**following.OWN, **own})
    monkeypatch.setattr(gallery, "FIGURES", {})
    return recorder.TOLD


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that is there once somebody has started `gs`, to which Pillow hands PostScript."""
    called, script = tmp_path / "called", tmp_path / "bin" / "gs"
    script.parent.mkdir()
    script.write_text(f"#!/bin/sh\ntouch {called}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    return called


SMALL: dict[str, Any] = {
    "dataset": "digits", "data_fraction": 0.3, "clients": 4, "rounds": 3, "local_epochs": 1, "batch_size": 8,
}  # fmt: skip
"""A run of digits for tests of figures."""


def small_run(out: Path, **changed: Any) -> RunResult:
    return run(**{**SMALL, **changed, "out": out})


@pytest.fixture(scope="module")
def cw(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    out = tmp_path_factory.mktemp("cw") / "cw"
    return small_run(out, method="cwfedavg", partition="classes", classes_per_client=4)


@pytest.fixture(scope="module")
def ccvr(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return small_run(tmp_path_factory.mktemp("ccvr") / "ccvr", method="ccvr", alpha=0.2, clients=3)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    out = tmp_path_factory.mktemp("mixed") / "mixed"
    return small_run(out, method="fedclassavg", model="digits-a,digits-b", clients=3, rounds=2)
