"""What a CUDA graph does, on the CPU: every operation of one step is noted, and repeated on the very same memory.

Python runs only while the step is recorded, as on a GPU. What a graph cannot hold is an error here too: reading a value
on the host, and shapes that depend on values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = tuple(
    f"aten.{name}"
    for name in (
        "_local_scalar_dense.", "nonzero", "masked_select.", "_unique", "unique_", "bincount.", "equal.",
        "repeat_interleave.Tensor", "lift_fresh",
    )
)  # fmt: skip
"""Operations that wait for the device, whose result has a shape that depends on values, or that bring numbers from the
host."""


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        masked = name.startswith("aten.index") and any(
            t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1:2])
        )
        if name.startswith(WAITS) or masked:
            raise RuntimeError(f"{func} while recording")
        result = func(*args, **(kwargs or {}))
        # Views of what is there need not be repeated, since it stays where it is.
        held = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        fresh = [t for t in _tensors(result) if t.untyped_storage().data_ptr() not in held]
        if fresh or func._schema.is_mutable:
            self.calls.append((func, args, kwargs or {}, fresh))
        return result


class TapeRecorder:
    """A recorder for :class:`fedapp.graphs.Replayed`; counts what it does."""

    def __init__(self) -> None:
        self.run_plainly = self.recorded = self.replayed = 0

    def run(self, step: Callable[[], Tensor]) -> Tensor:
        self.run_plainly += 1
        return step()

    def record(self, step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        self.recorded += 1
        tape = _Tape()
        with tape:
            loss = step()

        def replay() -> None:
            self.replayed += 1
            with torch.no_grad():
                for func, args, kwargs, fresh in tape.calls:
                    again = _tensors(func(*args, **kwargs))
                    if fresh:
                        for there, new in zip(fresh, again, strict=True):
                            there.copy_(new)

        return loss, replay

    def wait(self) -> None:
        """Nothing runs by itself."""
