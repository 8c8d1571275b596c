"""Which arrays of a model are sent: chosen by prefixes of their dotted names, copied back with strict checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from fedapp.core.names import matches
from fedapp.errors import BadRequest
from fedapp.lazy import Tensor, nn, torch
from fedapp.method import Array, Arrays
from fedapp.models import weights


def float_buffers(model: nn.Module) -> set[str]:
    """Return the names of the floating-point buffers in the state dict, such as BatchNorm's running mean."""
    stored = model.state_dict().keys()
    return {name for name, b in model.named_buffers() if b.is_floating_point() and name in stored}


def shared_names(model: nn.Module, prefixes: Iterable[str], buffers: str = "global") -> list[str]:
    """Return the names of the arrays under `prefixes` that are sent, in the order of the state dict.

    Parameters
    ----------
    buffers : `global` includes floating-point buffers; `local` and `drop` leave them out. Integer buffers
        (`num_batches_tracked`) are never sent, since their average means nothing, nor layers that are kept as they are.

    Raises
    ------
    BadRequest : a prefix matches no array, so that a misspelt one is noticed; or a parameter is complex.
    """
    prefixes = tuple(prefixes)
    parameters = {name for name, _ in model.named_parameters()}
    held = weights.kept(model)
    wanted = parameters | (float_buffers(model) if buffers == "global" else set())
    state = model.state_dict()
    for prefix in prefixes:
        bare = prefix == "features." and hasattr(model, "features")  # a body without arrays, as on given features
        if not bare and not any(matches(name, (prefix,)) for name in state):
            parts = ", ".join(dict.fromkeys(".".join(name.split(".")[:2]) for name in state))
            raise BadRequest(f"'{prefix}' matches no array of the model {type(model).__name__}: it has {parts}")
    names = [n for n in state if n in wanted and matches(n, prefixes) and not matches(n, held)]
    if prefixes and not any(matches(name, prefixes) for name in state):
        raise BadRequest(
            f"the model {type(model).__name__} has no array under {' or '.join(prefixes)}, which the method shares: "
            "take a method that shares the head too, such as fedavg"
        )
    if odd := next((n for n in names if state[n].is_complex()), None):
        raise BadRequest(
            f"'{odd}' of the model {type(model).__name__} is {str(state[odd].dtype).removeprefix('torch.')}, and "
            "arrays travel as real numbers: hold its real and imaginary part as two parameters"
        )
    return names


def views(model: nn.Module, names: Iterable[str], sent: bool = False) -> Arrays:
    """Return named arrays of a model, C-contiguous, in the model's own memory where that can be.

    Parameters
    ----------
    sent : floating-point arrays are float32, whatever the model has: arrays of a model travel in no other dtype. Else
        they have their own dtype, and float32 where NumPy has none (such as bfloat16, which float32 holds exactly).
    """
    state = model.state_dict()
    return {name: _array(state[name].detach().cpu().contiguous(), sent) for name in names}


def _array(value: Tensor, sent: bool) -> Array:
    own = (torch.float64, torch.float32, torch.float16)
    array: Array = (value.float() if value.is_floating_point() and (sent or value.dtype not in own) else value).numpy()
    return array


def extract(model: nn.Module, names: Iterable[str]) -> Arrays:
    """Copy named arrays from a model as they are sent (`views`)."""
    return {name: array.copy() for name, array in views(model, names, sent=True).items()}


def merge(model: nn.Module, arrays: Mapping[str, Array]) -> None:
    """Copy arrays into a model; the other arrays of the model stay as they are.

    Raises
    ------
    ValueError : an unknown name, another shape, or an integer array for a floating-point one or the reverse.
    """
    state = model.state_dict()
    for name, array in arrays.items():
        if name not in state:
            raise ValueError(f"the model has no array named '{name}'")
        target = state[name]
        if tuple(array.shape) != tuple(target.shape):
            raise ValueError(f"'{name}' has shape {tuple(array.shape)}, but the model needs {tuple(target.shape)}")
        if np.issubdtype(array.dtype, np.floating) != target.is_floating_point():
            raise ValueError(f"'{name}' has dtype {array.dtype}, but the model needs {target.dtype}")
        with torch.no_grad():
            target.copy_(torch.from_numpy(np.asarray(array, order="C")))


def everything(model: nn.Module) -> Arrays:
    """Copy the whole state of a model: parameters and all buffers, integer ones included."""
    return {name: array.copy() for name, array in views(model, model.state_dict().keys()).items()}
