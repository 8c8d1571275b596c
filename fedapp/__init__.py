"""fedapp: federated learning where the classifier head does the work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from fedapp.engines.local import run
    from fedapp.results.loading import load
    from fedapp.results.runs import RunResult

__all__ = ["RunResult", "__version__", "load", "run"]


def __getattr__(name: str) -> Any:
    """Import the engine only when it is asked for: the light modules stay light."""
    if name in ("run", "RunResult"):
        from fedapp.engines import local as engine

        return getattr(engine, name)
    if name == "load":
        from fedapp.results.loading import load

        return load
    raise AttributeError(f"module 'fedapp' has no attribute '{name}'")
