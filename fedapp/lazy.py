"""Large libraries, loaded when one of their names is first used.

Importing PyTorch takes ten times as long as all that a command such as `fedapp methods` does. A module that is also
read for its tables (configuration, methods, hyperparameters, names of models) takes it from here:

    from fedapp.lazy import F, Tensor, nn, torch

What these names hold is a stand-in. Its first use imports the library and puts the real thing into all modules of the
project, so that later uses cost nothing. To inherit from a class of PyTorch is a use, and so is a decorator at the top
of a module: they load it while the module is imported. `tests/test_start.py` names the modules that must not.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets
    import pandas as pd
    import torch
    import torchvision
    from PIL import Image
    from scipy import stats
    from scipy.linalg import blas, lapack
    from torch import Tensor, nn
    from torch.nn import functional as F

__all__ = ["F", "Image", "Tensor", "blas", "datasets", "lapack", "nn", "pd", "stats", "torch", "torchvision"]

NAMES = {
    "torch": ("torch", ""),
    "Tensor": ("torch", "Tensor"),
    "nn": ("torch", "nn"),
    "F": ("torch.nn", "functional"),
    "blas": ("scipy.linalg", "blas"),
    "lapack": ("scipy.linalg", "lapack"),
    "stats": ("scipy.stats", ""),
    "pd": ("pandas", ""),
    "Image": ("PIL.Image", ""),
    "datasets": ("datasets", ""),
    "torchvision": ("torchvision", ""),
}
"""What each name stands for: a module, and a name in it."""
OURS = ("fedapp", "clients", "strategies")


def loaded(module: str) -> Any:
    """Import a large module without the collector of cyclic garbage, and exempt all present objects from it.

    PyTorch makes half a million objects that stay. To look through them takes 0.14 s, several times during the import
    and again and again after it, in every process of a run.
    """
    if module in sys.modules:
        return sys.modules[module]
    was = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # at the end of the process its cycles are garbage
        if was:
            gc.enable()


class StandIn:
    """A module or a class that is imported when it is first used."""

    def __init__(self, module: str, name: str) -> None:
        self.__dict__["_place"] = (module, name)

    def _real(self) -> Any:
        module, name = self._place
        real = loaded(module)
        real = getattr(real, name) if name else real
        for known, ours in list(sys.modules.items()):
            if known.partition(".")[0] in OURS:
                for key, value in list(vars(ours).items()):
                    if value is self:
                        setattr(ours, key, real)
        return real

    def __getattr__(self, name: str) -> Any:
        # What Python asks of everything, such as __wrapped__, does not import.
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return getattr(self._real(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._real()(*args, **kwargs)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._real())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._real(),)


if not TYPE_CHECKING:
    globals().update({name: StandIn(*place) for name, place in NAMES.items()})
