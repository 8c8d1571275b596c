"""Small helpers for all tests: one thread, a cache of its own, tiny federations."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
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
