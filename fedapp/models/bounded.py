"""A bound on the size of new models, for sizes that a file or another machine states."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedapp.lazy import torch

MAKERS = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)
"""Functions that make tensors of any size; layers call them."""


class Bounded(torch.overrides.TorchFunctionMode):
    """Lets new models have only so many numbers.

    Parameters
    ----------
    left : how many.   why : what to say where there would be more.

    Raises
    ------
    ValueError : there would be more; raised before they take memory.
    """

    def __init__(self, left: float, why: str) -> None:
        super().__init__()
        self.left, self.why = left, why

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count what a function of PyTorch will make."""
        if func in MAKERS:
            size = (kwargs or {}).get("size", args[0] if args and isinstance(args[0], (tuple, list)) else args)
            self.left -= math.prod(n for n in size if isinstance(n, int))
            if self.left < 0:
                raise ValueError(self.why)
        return func(*args, **(kwargs or {}))
