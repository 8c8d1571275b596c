"""fedapp: federated learning where the classifier head does the work."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"


def _take_own(name: str) -> None:
    """Import the package `name` next to this one, not another of that common name in the user's folder.

    Raises
    ------
    ImportError : another package of that name has been imported before.
    """
    folder = Path(__file__).resolve().parent.parent / name
    if name in sys.modules:
        places = getattr(sys.modules[name], "__path__", None) or [getattr(sys.modules[name], "__file__", None) or ""]
        if Path(next(iter(places))).resolve() != folder:
            raise ImportError(
                f"fedapp has a package '{name}', but {next(iter(places))} of the same name was imported first: rename "
                "that one, or use fedapp in a process of its own (the command fedapp)"
            )
        return
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None or not folder.is_dir():
        raise ImportError(f"fedapp is not complete: {folder} is missing; install it again")
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


for _name in ("clients", "strategies"):
    _take_own(_name)

if TYPE_CHECKING:
    from fedapp.engines.extraction import features
    from fedapp.engines.local import data_card, run
    from fedapp.experiments.api import compare
    from fedapp.results.loading import load
    from fedapp.results.runs import RunResult

__all__ = ["RunResult", "__version__", "compare", "data_card", "features", "load", "run"]
_PLACES = {
    "run": "fedapp.engines.local", "data_card": "fedapp.engines.local", "RunResult": "fedapp.results.runs",
    "compare": "fedapp.experiments.api", "load": "fedapp.results.loading",
    "features": "fedapp.engines.extraction",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import the engine only when it is asked for: the light modules stay light."""
    if name not in _PLACES:
        raise AttributeError(f"module 'fedapp' has no attribute '{name}'")
    return getattr(importlib.import_module(_PLACES[name]), name)
