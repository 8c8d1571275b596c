"""Stored weights of an own model: read from a file, checked by name, and layers that keep them."""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedapp.errors import BadRequest, first_of, listed
from fedapp.files import absolute, explained
from fedapp.lazy import Tensor, nn, torch, torchvision

TORCHVISION = "torchvision.models"
SHOWN = 4
"""How many names a message lists."""


def _version(path: str) -> tuple[str, ...]:
    """Return the file of weights, and what tells one version of it from another; programs cannot set its ctime.

    Raises
    ------
    BadRequest : it is not there.
    """
    file = absolute(path)
    with explained(f"weights = '{path}' cannot be read", "give another file"):
        there = file.is_file()
    if not there:
        raise BadRequest(
            f"weights = '{path}' is not a file: give a .safetensors, or a .pt that torch.save(model.state_dict(), "
            "FILE) wrote; fedapp downloads none"
        )
    stat = file.stat()
    return str(file), *map(str, (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino))


def checksum(path: str) -> str:
    """Return the SHA-256 of a file of weights, in hexadecimal digits."""
    return _checksum(*_version(path))


@functools.lru_cache(maxsize=2)
def _checksum(path: str, *version: str) -> str:
    with Path(path).open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def read(path: str) -> Mapping[str, Tensor]:
    """Read a state dict; nothing in the file is executed.

    Raises
    ------
    BadRequest : the file is not there, or holds something else.
    """
    return _read(*_version(path))


@functools.lru_cache(maxsize=2)
def _read(path: str, *version: str) -> Mapping[str, Tensor]:
    wanted = "save it with torch.save(model.state_dict(), FILE) or safetensors.torch.save_file"
    try:
        if path.endswith(".safetensors"):
            import safetensors.torch

            found: Any = safetensors.torch.load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # a damaged file raises errors of any kind
        told = " ".join(str(e).split())[:160]
        raise BadRequest(f"weights = '{path}' cannot be read ({type(e).__name__}: {told}): {wanted}") from e
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    if not isinstance(found, Mapping) or not found or not all(isinstance(v, Tensor) for v in found.values()):
        raise BadRequest(f"weights = '{path}' holds no state dict (names and tensors): {wanted}")
    return {str(name): value for name, value in found.items()}


def fill(name: str, net: nn.Module, path: str, head: str) -> None:
    """Copy all weights but those of the head into a network, strictly by name.

    The head's are left out whatever its size is: it is drawn from the seed, as in all models.

    Parameters
    ----------
    name : of the model, for messages.   head : dotted name of the head's layer, empty if the network is its head.

    Raises
    ------
    BadRequest : a name is missing on either side, a shape differs, or a number is not finite.
    """
    found, state = read(path), net.state_dict()
    apart = {f"{head}.{part}".removeprefix(".") for part in ("weight", "bias")}
    # Counts of batches are not used, and old files lack them.
    wanted = [n for n in state if n not in apart and not n.endswith("num_batches_tracked")]
    where = f"weights = '{path}' does not fit the model '{name}'"
    if lacking := [n for n in wanted if n not in found]:
        others = [n for n in found if n not in state]
        raise BadRequest(f"{where}: it lacks {_some(lacking)}; it has {_some(others) if others else 'no others'}")
    if others := [n for n in found if n not in state and n not in apart]:
        raise BadRequest(f"{where}: the model has no {_some(others)}: choose the architecture that they are of")
    for n in wanted:
        if found[n].shape != state[n].shape:
            shapes = f"{tuple(found[n].shape)} in the file and {tuple(state[n].shape)} in the model"
            raise BadRequest(f"{where}: '{n}' is {shapes}: choose the architecture, or model-args, that it is of")
        if found[n].is_floating_point() and not found[n].isfinite().all():
            raise BadRequest(f"{where}: '{n}' has numbers that are not finite: take another file")
    net.load_state_dict({n: found[n] for n in wanted}, strict=False)


def _some(names: list[str]) -> str:
    return first_of([f"'{n}'" for n in names], SHOWN)


def _stays(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


def freeze(name: str, model: nn.Module, prefixes: str) -> None:
    """Keep layers as they are: not trained, not sent, and always in evaluation mode.

    Parameters
    ----------
    model : the whole model, with `features.` before the names of its body.   prefixes : dotted names with commas
        between them.

    Raises
    ------
    BadRequest : there is no such layer, or it is the head.
    """
    layers = dict(model.named_modules())
    for path in listed(prefixes):
        if path == "head" or path.startswith("head.") or path not in layers or not path:
            top = [n for n in layers if n.count(".") == 1 and n.startswith("features.")]
            raise BadRequest(
                f"freeze = '{path}' does not name a layer in the body of '{name}': use features, or layers such "
                f"as {_some(top)}"
            )
        layer = layers[path]
        layer.requires_grad_(False)
        layer.eval()
        # BatchNorm must not move its statistics, nor dropout set anything to 0, when the whole model is set to train.
        layer.train = types.MethodType(_stays, layer)
        layer.keeps = True


def kept(model: nn.Module) -> tuple[str, ...]:
    """Return the dotted names of the layers that `freeze` keeps as they are."""
    return tuple(path for path, layer in model.named_modules() if getattr(layer, "keeps", False))


@functools.cache
def preprocessing(name: str) -> tuple[int, tuple[float, ...], tuple[float, ...]] | None:
    """Return the side of the images that torchvision's weights of a model were trained on, and their mean and std.

    None for a model that is not torchvision's.
    """
    module, _, function = name.partition(":")
    if module != TORCHVISION and not module.startswith(f"{TORCHVISION}."):
        return None
    try:
        known = torchvision.models.get_model_weights(function).DEFAULT.transforms()  # nothing is downloaded
        return int(known.crop_size[0]), tuple(known.mean), tuple(known.std)
    except (ValueError, AttributeError):
        return None
