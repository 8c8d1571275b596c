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

from fedapp.engines.local import RunResult, run

torch.set_num_threads(1)
# What a test finds must not depend on the day or on how busy the machine is.
settings.register_profile("fedapp", deadline=None, derandomize=True, database=None)
settings.load_profile("fedapp")
# A shell that starts the tests in the background has them ignore Ctrl-C, and children inherit that; they test it.
signal.signal(signal.SIGINT, signal.default_int_handler)

PROCESSES = ("simulation", "deployment", "gate", "superlink", "supervise", "deploycheck", "ray_cluster")
"""Files of tests that own ports, Ray or SuperLinks: all of them in one worker, one after another."""
FIRST = (*PROCESSES, "standin", "registry", "nodes", "benchmarks", "report", "config", "contract", "figures")
"""Files to begin with, so that no worker is left with a long one at the end; each begins with two groups at once."""


def place(test: str) -> int:
    """Return where a test's file stands in `FIRST`."""
    name = Path(test.partition("::")[0]).stem.removeprefix("test_")
    return FIRST.index(name) if name in FIRST else len(FIRST)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first."""
    items.sort(key=lambda item: place(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one worker, for its tests share fixtures, and the files of `PROCESSES` to the same one.

    Two Ray clusters on two cores would wait for each other until time runs out.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "processes" if place(nodeid) < len(PROCESSES) else nodeid.partition("::")[0]

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
        defaults["out"] = tmp_path / f"run{next(count)}"
        return run(**{**defaults, **changes})

    return go
