"""A stand-in for a GPU: tensors that report the device ``gpu:0`` while their numbers are in main memory.

On a machine without a GPU it shows whether all tensors and generators of an operation are on one device, and when the
host waits for the device. Every operation is intercepted below autograd and computed on the CPU, so the results equal
the CPU's to the last bit. It records copies between host and device and the operations in ``SYNCHRONISING``; the count
of waits is therefore a lower bound. It does not show streams, memory pools, reduced precision or CUDA's own kernels.

Call :func:`plug_in` in a process of its own, before any backward pass: it cannot be undone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")

SYNCHRONISING = tuple(
    f"aten.{name}"
    for name in (
        "_local_scalar_dense.", "nonzero", "masked_select.", "_unique", "unique_", "bincount.", "equal.", "allclose.",
        "repeat_interleave.Tensor", "multinomial.", "histc.", "_linalg_",
    )
)  # fmt: skip
"""Operations whose result, shape or check needs a value on the host."""
WITH_NUMBERS = ("aten.fill", "aten.masked_fill", "aten.index_put", "aten._foreach_")
"""Operations that accept a number in a host tensor, besides all elementwise ones."""

OURS = tuple(f"{Path(__file__).parents[1]}/{name}/" for name in ("fedapp", "strategies", "clients"))


@dataclass(frozen=True)
class Event:
    """A copy between host and device, or an operation for which the host waits.

    Attributes
    ----------
    operation : name of the operation.   caller : `file:function` of the project that called it.
    waits : whether the host waits for the device.
    within : `step` of a local training, `backward` pass, `train` outside its steps, or `elsewhere`.
    """

    operation: str
    caller: str
    waits: bool
    within: str


events: list[Event] = []
"""What happened since this list was last cleared."""
_pinned: dict[int, Tensor] = {}


def device() -> torch.device:
    """Return the pretended device."""
    return torch.device("gpu", 0)


class WrongDeviceError(RuntimeError):
    """An operation got tensors or a generator on two devices; PyTorch raises a RuntimeError for it too."""


class OnDevice(Tensor):
    """A tensor on the pretended device; ``held`` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        made: OnDevice = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=device(), requires_grad=False,
        )  # fmt: skip
        made.held = held
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"OnDevice({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = OnDevice(self.held.detach().clone())
        result = torch.nn.Parameter(copied, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copied
        memo[id(self)] = result
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _operation(func, args, kwargs or {})


class _Device(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _operation(func, args, kwargs or {})


def _note(func: Any, waits: bool = True) -> None:
    caller, names = "", set()
    frame = sys._getframe(1)
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if path.startswith(OURS):
            caller = caller or f"{Path(path).name}:{name}"
            if path.endswith("training.py"):
                names.add(name)
        frame = frame.f_back  # type: ignore[assignment]
    within = next((name for name in ("step", "train") if name in names), "elsewhere")
    # Autograd runs the backward pass on a thread of the device, whose stack does not show the waiting step.
    if threading.current_thread() is not threading.main_thread():
        within = "backward"
    events.append(Event(str(func), caller, waits, within))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [t for part in parts for t in _tensors(part)]


def _with(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same lists, tuples and dictionaries with each tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _with(part, change) for name, part in value.items()}
    return type(value)(_with(part, change) for part in value) if type(value) in (list, tuple) else value


def _note_copy(func: Any, given: Tensor, to: torch.device, non_blocking: bool) -> None:
    """Record a copy. The host waits for it, except for a non-blocking one from pinned memory to the device."""
    if given.device.type != to.type:
        _note(func, waits=not non_blocking or to.type == "cpu" or id(given) not in _pinned)


def _operation(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name, target = str(func), kwargs.get("device")
    if name.startswith("aten.is_pinned."):
        return id(args[0]) in _pinned
    if name.startswith("aten._pin_memory."):
        pinned: Tensor = args[0].clone()
        return _pinned.setdefault(id(pinned), pinned)
    given = _tensors((args, kwargs))
    theirs = [t for t in given if isinstance(t, OnDevice)]
    to = torch.device(target) if target is not None else device() if theirs else CPU
    if not theirs and to.type == "cpu":
        return func(*args, **kwargs)

    if name.startswith("aten._to_copy."):
        _note_copy(func, args[0], to, bool(kwargs.get("non_blocking")))
    elif name.startswith("aten.copy_."):
        to = args[0].device
        _note_copy(func, args[1], to, bool(kwargs.get("non_blocking") or args[2:3] == (True,)))
    else:
        numbers = torch.Tag.pointwise in func.tags or name.startswith(WITH_NUMBERS)
        apart = theirs and any(t.dim() or not numbers for t in given if not isinstance(t, OnDevice))
        indexed = name.startswith(("aten.index.", "aten.index_put")) and isinstance(args[0], OnDevice)
        if apart and not (indexed and all(isinstance(t, OnDevice) or not t.dim() for t in _tensors(args[2:]))):
            raise WrongDeviceError(f"{func}: tensors on two devices, gpu:0 and cpu")
        if any(isinstance(v, torch.Generator) for v in (*args, *kwargs.values())):
            raise WrongDeviceError(f"{func}: a generator of the cpu for a tensor on gpu:0")
        masked = indexed and any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1:2]))
        if apart or masked or name.startswith(SYNCHRONISING):  # indices on the CPU are copied first
            _note(func)

    back = {id(t.held): t for t in theirs}
    held = _with((args, kwargs), lambda t: t.held if isinstance(t, OnDevice) else t)
    if target is not None:
        held[1]["device"] = CPU
    result = func(*held[0], **held[1])

    def placed(value: Tensor) -> Tensor:
        if (same := back.get(id(value))) is None:
            return OnDevice(value) if to.type != "cpu" else value
        if same.shape != value.shape or same.stride() != value.stride():
            raise NotImplementedError(f"{func} changes the shape of a tensor in place")
        return same

    return _with(result, placed)


def plug_in() -> None:
    """Give this process the device. Call it before the app is imported.

    Raises
    ------
    ImportError : this version of PyTorch does not support devices written in Python.
    """
    from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

    class Module(_DummyBackendModule):
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16]

    _setup_privateuseone_for_python_backend(rename="gpu", backend_module=Module())
    torch.__future__.set_swap_module_params_on_conversion(True)
    # Tensors made in inference mode cannot be wrapped. It is used to switch gradients off, which no_grad does too.
    torch.inference_mode = lambda mode=True: torch.no_grad() if mode else torch.enable_grad()  # type: ignore[misc]
    _Device().__enter__()


# What runs on it ------------------------------------------------------------------------------------


def noted() -> dict[str, Any]:
    """Return what is recorded (`waits` of each event) for operations that a GPU refuses, waits for, or does alone."""
    x, host = torch.arange(4.0).to(device()), torch.arange(4)
    pinned, generator = torch.ones(4).pin_memory(), torch.Generator()
    found: dict[str, Any] = {}

    def backward() -> None:
        weight = torch.nn.Parameter(torch.ones(4, device=device()))
        square = (weight * x) ** 2
        square.register_hook(lambda g: g * float(g.sum()))
        square.sum().backward()  # type: ignore[no-untyped-call]

    for name, call in {
        "two devices": lambda: x + torch.ones(4),
        "rows of the host": lambda: torch.index_select(x, 0, host),
        "a stacked number of the host": lambda: torch.stack([x[0], torch.tensor(1.0)]),
        "a generator of the host": lambda: torch.rand(3, generator=generator, device=device()),
        "a number of the host": lambda: x * 2 + torch.tensor(1.0),
        "on the device": lambda: x[torch.arange(2, device=device())].sum() + torch.zeros(4, device=device()),
        "a value": lambda: float(x.sum()),
        "a value in a backward pass": backward,
        "a mask": lambda: x[x > 1],
        "back": lambda: x.cpu(),
        "there": lambda: torch.ones(4).to(device()),
        "there, without waiting": lambda: torch.ones(4).to(device(), non_blocking=True),
        "from pinned memory": lambda: pinned.to(device()),
        "from pinned memory, without waiting": lambda: pinned.to(device(), non_blocking=True),
        "into": lambda: x.clone().copy_(torch.ones(4)),
        "indices of the host": lambda: x[host],
    }.items():
        events.clear()
        try:
            call()
            found[name] = [e.waits if e.within == "elsewhere" else e.within for e in events]
        except WrongDeviceError:
            found[name] = "refused"
    weight = torch.nn.Parameter(torch.ones(4, device=device()))
    ((weight * x) ** 2).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    found["gradient"] = weight.grad.cpu().tolist()
    return found


def evaluation(images: int) -> int:
    """Return how often the host waits in one evaluation."""
    from fedapp.data.transforms import InputSpec
    from fedapp.learning.evaluation import evaluate
    from fedapp.models import build_model

    inputs = InputSpec(shape=(1, 8, 8), scale=16.0, mean=(0.3,), std=(0.4,))
    model = build_model("digits-a", num_classes=10, shape=(1, 8, 8), seed=1).to(device())
    x = torch.zeros(images, 8, 8, 1, dtype=torch.uint8, device=device())
    for _ in range(2):  # the first time fills caches
        events.clear()
        evaluate(model, x, torch.zeros(images, dtype=torch.int64, device=device()), inputs, 10)
    return sum(e.waits for e in events)


def augmentation(channels: int, size: int, kind: str) -> list[bool]:
    """Return the copies of one batch's augmentation, each with whether the host waits."""
    from fedapp.data.transforms import InputSpec, augment

    inputs = InputSpec(shape=(channels, size, size), scale=255.0, mean=(0.5,) * channels, std=(0.2,) * channels)
    x = torch.randint(0, 256, (20, channels, size, size), dtype=torch.uint8).to(device())
    for _ in range(2):
        events.clear()
        augment(x, inputs, kind, torch.Generator().manual_seed(0))
    return [e.waits for e in events]


def runs() -> dict[str, dict[str, Any]]:
    """Return settings of runs by name: every method, and variants that change what a client computes.

    `precision` is left out: it has tests of its own.
    """
    from fedapp import registry

    found: dict[str, dict[str, Any]] = {m: {"method": m} for m in registry.discover()}
    for method, values in (
        ("fd", {"method_args": "collect=train"}),
        ("fedproto", {"method_args": "collect=train"}),
        ("ccvr", {"method_args": "base=moon oracle=true transform=feature"}),
        ("ccvr", {"method_args": "cov=sums clsnorm=true clsprox=0.1"}),
        ("moon", {"augment": "weak"}),
        ("fedclassavg", {"augment": "strong", "momentum": 0.9}),
        ("cwfedavg", {"method_args": "layers=all", "clip": 0.5, "optimizer": "adam", "momentum": 0.0}),
        ("fedavg", {"buffers": "local", "augment": "strong", "weight_decay": 0.01}),
    ):
        found[" ".join([method, *(f"{k}={v}" for k, v in values.items())])] = {"method": method, **values}
    return found


def compared(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Run settings on the CPU and on the device; return whether the results are equal, and the events of the second."""
    from fedapp import process
    from fedapp.core import products
    from fedapp.engines.local import run
    from fedapp.learning import training
    from fedapp.learning.state import read_safetensors
    from fedapp.tasks import simulated as tasks
    from tests.handmade import deterministic

    products.onednn_is_faster = lambda: False  # a GPU has no oneDNN either
    trainings: list[int] = []
    steps: list[int] = []
    original = training.make_optimizer

    def make_optimizer(*args: Any, **kwargs: Any) -> Any:
        trainings.append(1)
        optimizer = original(*args, **kwargs)
        step = optimizer.step

        def counted(*inputs: Any, **named: Any) -> Any:
            steps.append(1)
            return step(*inputs, **named)

        optimizer.step = counted
        return optimizer

    training.make_optimizer = make_optimizer
    tables, arrays = [], []
    for name, where in (("cpu", lambda: CPU), ("gpu", device)):
        process.device = where
        tasks._federated.cache_clear()
        events.clear()
        trainings.clear()
        steps.clear()
        result = run(out=folder / name, **settings)
        tables.append([deterministic(result.clients), deterministic(result.final)])
        # Arrays of the server and of every client. File names begin with a name that each run makes up.
        files = (folder / name).rglob("*.safetensors")
        parts = {(f.parent.name, *f.name.split(".")[-2:]): read_safetensors(f)[0] for f in files}
        arrays.append({(*part, n): a for part, found in parts.items() for n, a in found.items()})
    training.make_optimizer = original
    here, there = arrays
    return {
        "equal": all(a.equals(b) for a, b in zip(*tables, strict=True)),
        "arrays": len(here),
        "equal_arrays": sum(key in there and np.array_equal(a, there[key], equal_nan=True) for key, a in here.items()),
        "steps": len(steps),
        "trainings": len(trainings),
        "in_steps": Counter(f"{e.operation} {e.caller}" for e in events if e.within in ("step", "backward")),
        "waits_in_training": Counter(e.caller for e in events if e.waits and e.within == "train"),
        "elsewhere": Counter(e.caller for e in events if e.within == "elsewhere"),
    }


def main(folder: Path, base: dict[str, Any]) -> None:
    """Write all findings to `standin.json` in a folder."""
    plug_in()
    found = {
        "noted": noted(),
        "evaluation": [evaluation(100), evaluation(1000)],
        "augmentation": {
            f"{kind} {channels}x{size}": augmentation(channels, size, kind)
            for kind in ("none", "weak", "strong")
            for channels in (1, 3)
            for size in (8, 28, 32)
        },
        "runs": {name: compared(folder / str(i), {**base, **v}) for i, (name, v) in enumerate(runs().items())},
    }
    (folder / "standin.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    from tests import standin  # under its own name, so that its classes exist once

    standin.main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    os._exit(0)  # autograd's device thread must not ask for the interpreter while that shuts down
