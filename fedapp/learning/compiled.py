"""Losses of training steps through PyTorch's compiler, for `compile = true`; no other run loads the compiler."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from fedapp.data.cache import cache_root
from fedapp.errors import BadRequest
from fedapp.lazy import Tensor, torch

LEAVE = "or leave compile out"


def prepare() -> None:
    """Look for a C++ compiler, and keep what is compiled where the other workers and later runs find it.

    Raises
    ------
    BadRequest : there is none; says what to install.
    """
    kept = {
        "TORCHINDUCTOR_CACHE_DIR": str(cache_root() / "compiled"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else each worker starts processes that only compile
    }
    for name, value in kept.items():
        os.environ.setdefault(name, value)
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as e:
        raise BadRequest(
            "compile = true needs a C++ compiler on every machine that trains: install one, such as g++, or name it in "
            f"the environment variable CXX, {LEAVE}"
        ) from e


def compiled(loss: Callable[[Any], Tensor], batch_size: int) -> Callable[[Any], Tensor]:
    """Return a loss that is compiled for batches of `batch_size`; all others are computed as without the compiler.

    PyTorch keeps machine code with the code of the function, and takes it again wherever all that the function looks
    at is of the same kind: shapes, settings, the structure of the models. So a process compiles once for all of its
    clients. Its code for batches of any size was slower than no compiler at all.

    Parameters
    ----------
    loss : of a `Batch`, a scalar tensor.
    """
    prepare()
    # Dropout draws what it draws without the compiler.
    options: dict[str, Any] = {"fallback_random": True}
    fast = torch.compile(loss, options=options)

    def of(batch: Any) -> Tensor:
        if len(batch.y) != batch_size:
            return loss(batch)
        # Two batch sizes in one process are compiled one by one. What differs between clients, such as a method's
        # tensor of all of a client's images, is compiled for any size when it changes.
        for x in (*batch.views, batch.y, batch.index):
            torch._dynamo.mark_static(x)
        try:
            return fast(batch)
        except torch._dynamo.exc.BackendCompilerFailed as e:
            raise BadRequest(
                f"compile = true: the loss of a batch cannot be compiled ({str(e).strip().splitlines()[0][:200]}): "
                f"check the C++ compiler, {LEAVE}"
            ) from e

    return of
