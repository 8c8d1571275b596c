"""Copies of models, as many as a process has clients."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, TypeVar

from fedapp.lazy import nn, torch
from fedapp.models import own

if TYPE_CHECKING:
    from fedapp.models.split import SplitModel

M = TypeVar("M", bound="nn.Module")

_PLAIN = (bool, int, float, str, type(None))


LARGE = 1 << 20
"""Bytes of a parameter from which on it takes time to copy values that are replaced."""


def copied(model: M, replaced: Collection[str] = ()) -> M:
    """Return what `copy.deepcopy(model)` returns, in a quarter of the time for small models.

    Nearly all of deepcopy's time goes to a module's sixteen empty tables of hooks. Whatever is not known here is left
    to it.

    Parameters
    ----------
    replaced : names of parameters that get other values before anybody reads them; large ones are left undefined.
    """
    memo: dict[int, Any] = {}
    if replaced:
        for name, value in model.named_parameters():
            if name in replaced and value.nbytes >= LARGE and type(value) is nn.Parameter and not vars(value):
                memo[id(value)] = nn.Parameter(torch.empty_like(value), value.requires_grad)
    return _copied(model, memo)


def _copied(module: M, memo: dict[int, Any]) -> M:
    if id(module) in memo:
        found: M = memo[id(module)]
        return found
    kind = type(module)
    # Those of PyTorch's own classes are for files of its old versions.
    usual = kind.__getstate__ is nn.Module.__getstate__ and kind.__setstate__.__module__.startswith("torch.nn.")
    if not usual or hasattr(kind, "__deepcopy__") or kind.__reduce_ex__ is not object.__reduce_ex__:
        return copy.deepcopy(module, memo)
    new = type(module).__new__(type(module))
    memo[id(module)] = new
    for name, value in module.__getstate__().items():  # type: ignore[no-untyped-call]
        if name == "_modules":
            value = {n: m if m is None else _copied(m, memo) for n, m in value.items()}
        elif type(value) in (dict, OrderedDict, set) and not value and id(value) not in memo:
            memo[id(value)] = value = type(value)()
        elif not isinstance(value, _PLAIN):
            value = copy.deepcopy(value, memo)
        new.__dict__[name] = value
    return new


def redrawn(model: SplitModel, seed: int) -> SplitModel:
    """Return a copy with new random values, drawn head first and then module by module.

    For most models that is what `build_model` draws with this seed, without making the modules again. It is not for
    those that make their modules in another order, or start from stored or special values: compare before you rely on
    it.
    """
    model = copied(model)
    with own.seeded(seed):
        for module in (model.head, *model.features.modules()):
            draw = getattr(module, "reset_parameters", None)
            if callable(draw):
                draw()
    return model


def drop_statistics(model: nn.Module, held: Collection[nn.Module], renewed: set[nn.Module]) -> None:
    """Reset the running statistics of BatchNorm before the first phase of a round that moves them.

    Parameters
    ----------
    held : modules that the phase leaves in evaluation mode.   renewed : those of earlier phases; gets these too.
    """
    skipped = {*held, *renewed}
    for module in model.train().modules():  # frozen layers stay in evaluation mode
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training and module not in skipped:
            module.reset_running_stats()
            renewed.add(module)
