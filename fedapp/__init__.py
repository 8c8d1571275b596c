"""fedapp: federated learning where the classifier head does the work."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from fedapp.engines.local import data_card, run
    from fedapp.experiments.api import compare
    from fedapp.results.loading import load
    from fedapp.results.runs import RunResult

__all__ = ["RunResult", "__version__", "compare", "data_card", "load", "run"]
_PLACES = {
    "run": "fedapp.engines.local", "data_card": "fedapp.engines.local", "RunResult": "fedapp.results.runs",
    "compare": "fedapp.experiments.api", "load": "fedapp.results.loading",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import the engine only when it is asked for: the light modules stay light."""
    if name not in _PLACES:
        raise AttributeError(f"module 'fedapp' has no attribute '{name}'")
    return getattr(importlib.import_module(_PLACES[name]), name)
