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

LONG = ("test_standin", "test_nodes", "test_benchmarks", "test_report", "test_config", "test_contract", "test_figures")
"""Files that workers begin with, so that none is left with a long one at the end (`pytest -n 2 --dist loadgroup`)."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each file to one worker; the tests with ports, Ray or SuperLinks go to one worker all together, and first.

    A file stays whole because its tests share fixtures. Tests with processes of their own follow one another: two
    Ray clusters on two cores would wait for each other until time runs out.
    """
    order = {name: place for place, name in enumerate(("processes", *LONG))}
    groups = {}
    for item in items:
        alone = item.get_closest_marker("ray") or item.get_closest_marker("deploy")
        groups[item] = "processes" if alone else item.path.stem
        item.add_marker(pytest.mark.xdist_group(groups[item]))
    items.sort(key=lambda item: order.get(groups[item], len(order)))


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
