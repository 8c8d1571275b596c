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

from fedapp.engines.local import RunResult, run

torch.set_num_threads(1)
# A shell that starts the tests in the background has them ignore Ctrl-C, and children inherit that; they test it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., RunResult]:
    """Run a tiny federation on digits in this process; keyword arguments are run-config keys with underscores."""
    count = iter(range(1000))

    def go(**settings: Any) -> RunResult:
        if "resume" in settings:
            return run(**settings)
        defaults: dict[str, Any] = {"dataset": "digits", "clients": 3, "rounds": 2, "local_epochs": 1, "batch_size": 64}
        defaults["out"] = tmp_path / f"run{next(count)}"
        return run(**{**defaults, **settings})

    return go
